// Matches within partitions. Each block builds a temporary hash table in shared memory.
//
// A block takes some probe rows of one partition. It stages the partition's build keys in shared
// memory, inserts their row numbers into an open-addressing table, and looks up its probe rows. A
// partition with more distinct build keys than fit is matched in rounds, each with its own table:
// slow, but correct. Partitions with many probe rows get several blocks, which build the same table
// (Rui and Tu 2017, section 4.2, split skewed partitions in this way).

#include "common.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 512;
constexpr u32 ROWS = DOVETAIL_TABLE_ROWS, SLOTS = 2 * ROWS;
constexpr u32 EMPTY = ~0u;

// Returns the slot at which a search starts, from the lowest bits of the mixed key. All keys of a
// partition share the highest bits.
__device__ inline u32 slot_of(u32 low) { return low % SLOTS; }

template <typename Key>
__global__ void __launch_bounds__(THREADS) match(DovetailMatchPartitions args) {
    extern __shared__ __align__(16) u8 shared[];
    Key* staged = reinterpret_cast<Key*>(shared);
    u32* slots = reinterpret_cast<u32*>(staged + ROWS);
    const DovetailMatchUnit unit = args.units[blockIdx.x];
    if (unit.start == unit.end) return;
    const u32 build_start = args.build_bounds[unit.partition], build_end = args.build_bounds[unit.partition + 1];
    const Key* build = static_cast<const Key*>(args.build_keys);
    const Key* probe = static_cast<const Key*>(args.probe_keys);
    Tally tally;
    // At least one round: rows without a match are written in the first round.
    for (u64 round = build_start; round == build_start || round < build_end; round += ROWS) {
        const u32 rows = u32(min(u64(ROWS), build_end - round));
        const bool is_first = round == build_start;
        __syncthreads();
        for (u32 slot = threadIdx.x; slot < SLOTS; slot += THREADS) slots[slot] = EMPTY;
        for (u32 row = threadIdx.x; row < rows; row += THREADS) {
            const u32 run = u32(round) + row;
            staged[row] = build[args.heads ? args.heads[run] : run];
        }
        __syncthreads();
        for (u32 row = threadIdx.x; row < rows; row += THREADS) {
            const Key key = staged[row];
            for (u32 at = slot_of(low_bits(mix(key)));; at = (at + 1) % SLOTS) {
                const u32 found = atomicCAS(&slots[at], EMPTY, row);
                if (found == EMPTY) break;
                if (staged[found] == key) {
                    args.totals->unsound = 1;
                    break;
                }
            }
        }
        __syncthreads();
        for (u32 row = unit.start + threadIdx.x; row < unit.end; row += THREADS) {
            const Key key = probe[row];
            u32 found = EMPTY;
            for (u32 at = slot_of(low_bits(mix(key)));; at = (at + 1) % SLOTS) {
                found = slots[at];
                if (found == EMPTY || staged[found] == key) break;
            }
            const u32 place = row - args.first_row;
            if (found == EMPTY) {
                if (is_first) {
                    args.first[place] = NO_ROW;
                    if (args.count) args.count[place] = 0;
                }
                continue;
            }
            const u32 run = u32(round) + found;
            const u32 first = args.heads ? args.heads[run] : run;
            const u32 count = args.heads ? args.heads[run + 1] - first : 1;
            args.first[place] = first;
            if (args.count) args.count[place] = count;
            tally.add(count);
        }
    }
    tally.store(args.totals);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_match_partitions(const DovetailMatchPartitions* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        using Key = decltype(key);
        constexpr u32 shared_bytes = ROWS * sizeof(Key) + SLOTS * 4;
        const cudaError_t error = allow_shared_bytes<shared_bytes>(match<Key>);
        if (error != cudaSuccess) return answered(error);
        match<Key><<<args->unit_count, THREADS, shared_bytes, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}
