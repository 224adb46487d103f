// One hash table over all build keys, and a direct-address array that replaces it if distinct keys
// are dense.
//
// A slot has 64 bits: a tag (bits of the mixed key) above the number of a run of equal build keys.
// One compare-and-swap inserts it. For 4-byte keys the tag is the whole mixed key. For wider keys
// with equal tags, the keys in the build column are compared. Linear probing stays short, because
// at most half of the slots are taken.

#include "common.cuh"

namespace dovetail {
namespace {

// Probe rows per thread. Their random reads overlap, and a block adds to the totals once for all
// its rows. More than four are slower (tuning.md).
constexpr u32 THREADS = 256, PROBES = 4;
constexpr u64 EMPTY = ~0ull;

template <typename Key>
__device__ inline u64 start_of(Key mixed, u64 slot_mask) {
    if constexpr (sizeof(Key) == 4) return u64(mixed) & slot_mask;
    else if constexpr (sizeof(Key) == 8) return mixed & slot_mask;
    else return mixed.low & slot_mask;
}

template <typename Key>
__device__ inline bool same(u64 slot, u32 tag, Key key, const Key* keys, const u32* heads) {
    if (u32(slot >> 32) != tag) return false;
    if constexpr (sizeof(Key) == 4) return true;
    const u32 run = u32(slot);
    return keys[heads ? heads[run] : run] == key;
}

template <typename Key>
__global__ void insert(DovetailTableInsert args) {
    const u64 index = u64(blockIdx.x) * THREADS + threadIdx.x, run = args.first + index;
    if (index >= args.runs) return;
    const Key* keys = static_cast<const Key*>(args.keys);
    const Key key = keys[args.heads ? args.heads[run] : run];
    const Key mixed = mix(key);
    const u32 tag = tag_bits(mixed);
    const u64 entry = u64(tag) << 32 | run;
    u64* slots = reinterpret_cast<u64*>(args.slots);
    // Stops once a key is known to repeat, because the table is then useless. Heavy keys would make
    // searches very long.
    for (u64 at = start_of(mixed, args.slot_mask);; at = (at + 1) & args.slot_mask) {
        const u64 found = atomicCAS(&slots[at], EMPTY, entry);
        if (found == EMPTY) return;
        if (same(found, tag, key, keys, args.heads)) {
            args.totals->unsound = 1;
            return;
        }
        if (reinterpret_cast<volatile DovetailMatchTotals*>(args.totals)->unsound) return;
    }
}

// Returns the thread's `at`-th probe row. Neighbouring threads have neighbouring rows.
__device__ inline u64 probed_row(u32 at) { return (u64(blockIdx.x) * PROBES + at) * THREADS + threadIdx.x; }

template <typename Key>
__global__ void __launch_bounds__(THREADS) probe(DovetailTableProbe args) {
    const Key* keys = static_cast<const Key*>(args.build_keys);
    const Key* probes = static_cast<const Key*>(args.probe_keys);
    const u64* slots = reinterpret_cast<const u64*>(args.slots);
    Tally tally;
    // The first slots of all probes are loaded before any is examined, so that the loads overlap.
    u64 slot[PROBES];
#pragma unroll
    for (u32 at = 0; at < PROBES; ++at) {
        const u64 row = probed_row(at);
        slot[at] = row < args.rows ? __ldg(&slots[start_of(mix(probes[row]), args.slot_mask)]) : EMPTY;
    }
#pragma unroll
    for (u32 at = 0; at < PROBES; ++at) {
        const u64 row = probed_row(at);
        if (row >= args.rows) continue;
        const Key key = probes[row];
        const Key mixed = mix(key);
        const u32 tag = tag_bits(mixed);
        u32 first = NO_ROW, count = 0;
        u64 found = slot[at];
        for (u64 place = start_of(mixed, args.slot_mask); found != EMPTY; found = __ldg(&slots[place])) {
            if (same(found, tag, key, keys, args.heads)) {
                const u32 run = u32(found);
                first = args.heads ? args.heads[run] : run;
                count = args.heads ? args.heads[run + 1] - first : 1;
                break;
            }
            place = (place + 1) & args.slot_mask;
        }
        args.first[row] = first;
        if (args.count) args.count[row] = count;
        tally.add(count);
    }
    tally.store(args.totals);
}

__device__ inline u64 offset_of(u32 key, u64 min_low, u64) { return u32(key - u32(min_low)); }
__device__ inline u64 offset_of(u64 key, u64 min_low, u64) { return key - min_low; }
// A difference of more than 64 bits gives an offset beyond the end of every array.
__device__ inline u64 offset_of(Key16 key, u64 min_low, u64 min_high) {
    return key.high - min_high - (key.low < min_low) == 0 ? key.low - min_low : ~0ull;
}

template <typename Key>
__global__ void dense_insert(DovetailDenseInsert args) {
    const u64 index = u64(blockIdx.x) * THREADS + threadIdx.x, row = args.first + index;
    if (index >= args.rows) return;
    const u64 at = offset_of(static_cast<const Key*>(args.keys)[row], args.min_low, args.min_high);
    const u32 number = args.row_numbers ? args.row_numbers[row] : u32(row);
    if (at >= args.span || atomicExch(&args.positions[at], number) != NO_ROW) args.totals->unsound = 1;
}

template <typename Key>
__global__ void __launch_bounds__(THREADS) dense_probe(DovetailDenseProbe args) {
    const Key* probes = static_cast<const Key*>(args.probe_keys);
    Tally tally;
    u32 first[PROBES];
#pragma unroll
    for (u32 at = 0; at < PROBES; ++at) {
        const u64 row = probed_row(at);
        const u64 offset = row < args.rows ? offset_of(probes[row], args.min_low, args.min_high) : ~0ull;
        first[at] = offset < args.span ? __ldg(&args.positions[offset]) : NO_ROW;
    }
#pragma unroll
    for (u32 at = 0; at < PROBES; ++at) {
        const u64 row = probed_row(at);
        if (row >= args.rows) continue;
        args.first[row] = first[at];
        tally.add(first[at] != NO_ROW);
    }
    tally.store(args.totals);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_table_insert(const DovetailTableInsert* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        insert<decltype(key)><<<blocks_for(args->runs, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}

int dovetail_table_probe(const DovetailTableProbe* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        probe<decltype(key)><<<blocks_for(args->rows, THREADS * PROBES), THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}

int dovetail_dense_insert(const DovetailDenseInsert* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        dense_insert<decltype(key)><<<blocks_for(args->rows, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}

int dovetail_dense_probe(const DovetailDenseProbe* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        dense_probe<decltype(key)><<<blocks_for(args->rows, THREADS * PROBES), THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}
