// Matches sorted keys: each probe key finds the run of equal build keys.
//
// A block takes consecutive probe rows. The positions of its first and last key among the build
// keys bound the matches of all its rows. A block thus searches the whole build side twice, instead
// of twice per row. This is the merge path of Rui and Tu 2017, section 5, cut along the probe side
// only. Each block therefore writes a fixed range of matches. A bounded range that fits is searched
// in shared memory.

#include "common.cuh"

namespace dovetail {
namespace {

// tuning.md has the measurements for these values.
constexpr u32 THREADS = 256;
constexpr u32 STAGED_BYTES = 32 << 10;

// Rows per thread. Only 2048 keys of 16 bytes fit in the staging memory, and a tile of 2048 probe
// rows would often have a longer range.
template <typename Key>
constexpr u32 PER_THREAD = sizeof(Key) == 16 ? 4 : 8;
template <typename Key>
constexpr u32 TILE = THREADS * PER_THREAD<Key>;

// Returns the first index in low..high whose key is at least `key`. With `AFTER`: whose key is
// above `key`.
template <typename Key, bool AFTER>
__device__ inline u64 search(const Key* keys, u64 low, u64 high, Key key) {
    while (low < high) {
        const u64 middle = low + (high - low) / 2;
        if (AFTER ? !(key < keys[middle]) : keys[middle] < key) low = middle + 1;
        else high = middle;
    }
    return low;
}

template <typename Key>
__global__ void __launch_bounds__(THREADS) match(DovetailMatchSorted args) {
    constexpr u32 STAGED = STAGED_BYTES / sizeof(Key);
    __shared__ __align__(16) u8 staged_bytes[STAGED_BYTES];
    __shared__ u64 range[2];
    Key* staged = reinterpret_cast<Key*>(staged_bytes);
    const Key* build = static_cast<const Key*>(args.build_keys);
    const Key* probe = static_cast<const Key*>(args.probe_keys);
    const u64 start = u64(blockIdx.x) * TILE<Key>;
    const u64 end = start + TILE<Key> < args.rows ? start + TILE<Key> : args.rows;
    if (start < end && threadIdx.x == 0) range[0] = search<Key, false>(build, 0, args.build_rows, probe[start]);
    if (start < end && threadIdx.x == 32) range[1] = search<Key, true>(build, 0, args.build_rows, probe[end - 1]);
    __syncthreads();
    Tally tally;
    if (start < end) {
        const u64 low = range[0], high = range[1];
        const bool fits = high - low <= STAGED;
        if (fits) {
            for (u64 at = low + threadIdx.x; at < high; at += THREADS) staged[at - low] = build[at];
        }
        __syncthreads();
#pragma unroll
        for (u32 at = 0; at < PER_THREAD<Key>; ++at) {
            const u64 row = start + at * THREADS + threadIdx.x;
            if (row >= end) continue;
            const Key key = probe[row];
            u64 first, after;
            if (fits) {
                first = low + search<Key, false>(staged, 0, high - low, key);
                after = low + search<Key, true>(staged, first - low, high - low, key);
            } else {
                first = search<Key, false>(build, low, high, key);
                after = search<Key, true>(build, first, high, key);
            }
            const u32 count = u32(after - first);
            args.first[row] = count > 0 ? u32(first) : NO_ROW;
            args.count[row] = count;
            tally.add(count);
        }
    }
    tally.store(args.totals);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_match_sorted(const DovetailMatchSorted* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        using Key = decltype(key);
        match<Key><<<blocks_for(args->rows, TILE<Key>), THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}
