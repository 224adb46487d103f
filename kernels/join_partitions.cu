// Joining partitions in one kernel: a hash table in shared memory per block, and the joined rows written column by column.
//
// A block has some probe rows of one partition. It enters the partition's build keys into an open-addressing table, in which rows
// with equal keys are chained to the first of them, and which knows the length of each chain. A tile of probe rows is looked up,
// takes room in the output by one atomic, and lists its pairs in shared memory; then each column is written by consecutive threads
// to consecutive places, from build and probe rows that lie in the first-level cache by then. (Rui and Tu 2017, section 4.2, for
// output that is written directly and for skewed partitions that are split over blocks; Wu et al. 2024, section 4.2, for columns
// that are moved with the keys.)
//
// Nothing has to be known of build keys: those that repeat give more pairs, and a partition with more rows than a table has room
// for is worked off in rounds. The length of a chain is known without walking it, so that pairs for which there is no room are
// counted all the same, and quickly: the caller runs again with room for them.

#include "common.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 512, PER_THREAD = 4, TILE = THREADS * PER_THREAD;
constexpr u32 ROWS = DOVETAIL_JOIN_ROWS, SLOTS = 4096;
constexpr u32 EMPTY = ~0u;

static_assert(ROWS < SLOTS && ROWS < 0xffff && TILE <= 0x10000, "rows of a table and of a tile are 16-bit numbers");

// A chain's next row, and in its first row the chain's length, in one word that is exchanged as a whole.
constexpr u32 NO_NEXT = 0xffff0000u;
__device__ inline u32 next_of(u32 link) { return link >> 16; }
__device__ inline u32 length_of(u32 link) { return link & 0xffffu; }

template <typename Key>
struct Shared {
    Key keys[ROWS];
    u32 slots[SLOTS];
    u32 links[ROWS];
    // The build row in the table and the probe row in the tile.
    u32 pairs[TILE];
};

// Enters a row whose key lies in the table's keys. Links are ready.
template <typename Key>
__device__ inline void enter(Shared<Key>& table, u32 row) {
    const Key key = table.keys[row];
    for (u32 at = low_bits(mix(key)) % SLOTS;; at = (at + 1) % SLOTS) {
        const u32 first = atomicCAS(&table.slots[at], EMPTY, row);
        if (first == EMPTY) return;
        if (table.keys[first] != key) continue;
        // Behind the first row of its key, which stays where it is.
        for (u32 seen = atomicAdd(&table.links[first], 0);;) {
            table.links[row] = seen & NO_NEXT;
            const u32 now = atomicCAS(&table.links[first], seen, row << 16 | (length_of(seen) + 1));
            if (now == seen) return;
            seen = now;
        }
    }
}

// The first row with that key, or EMPTY.
template <typename Key>
__device__ inline u32 look_up(const Shared<Key>& table, Key key) {
    for (u32 at = low_bits(mix(key)) % SLOTS;; at = (at + 1) % SLOTS) {
        const u32 first = table.slots[at];
        if (first == EMPTY || table.keys[first] == key) return first;
    }
}

// Writes a column of so many pairs. `room`: places that there are from `to` on.
template <typename Cell>
__device__ inline void write_column(const DovetailJoinColumn& column, const u32* pairs, u32 count, u64 place, u64 room,
                                    u32 build_start, u32 probe_start) {
    const Cell* from = static_cast<const Cell*>(column.from);
    Cell* to = static_cast<Cell*>(column.to) + place;
    const u32 start = column.of_probe ? probe_start : build_start;
    const u32 shift = column.of_probe ? 0 : 16;
#pragma unroll 4
    for (u32 at = threadIdx.x; at < count; at += THREADS) {
        const u32 row = start + (pairs[at] >> shift & 0xffffu);
        if (place + at < room) {
            if constexpr (sizeof(Cell) == 4) to[at] = from ? from[row] : Cell(row);
            else to[at] = from[row];
        }
    }
}

template <typename Key>
__global__ void __launch_bounds__(THREADS) join(const __grid_constant__ DovetailJoinPartitions args) {
    extern __shared__ __align__(16) u8 shared[];
    Shared<Key>& table = *reinterpret_cast<Shared<Key>*>(shared);
    __shared__ u32 warp_pairs[THREADS / 32];
    __shared__ u64 tile_place;
    const DovetailMatchUnit unit = args.units[blockIdx.x];
    const u32 build_start = args.build_bounds[unit.partition], build_end = args.build_bounds[unit.partition + 1];
    const Key* build = static_cast<const Key*>(args.build_keys);
    const Key* probe = static_cast<const Key*>(args.probe_keys);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 counted = 0;
    for (u64 round = build_start; round < build_end; round += ROWS) {
        const u32 rows = u32(min(u64(ROWS), build_end - round));
        __syncthreads();
        for (u32 slot = threadIdx.x; slot < SLOTS; slot += THREADS) table.slots[slot] = EMPTY;
        for (u32 row = threadIdx.x; row < rows; row += THREADS) {
            table.keys[row] = build[round + row];
            table.links[row] = NO_NEXT | 1;
        }
        __syncthreads();
        for (u32 row = threadIdx.x; row < rows; row += THREADS) enter(table, row);
        __syncthreads();
        for (u32 tile = unit.start; tile < unit.end; tile += TILE) {
            Key keys[PER_THREAD];
            u32 entry[PER_THREAD], length[PER_THREAD], place[PER_THREAD];
#pragma unroll
            for (u32 at = 0; at < PER_THREAD; ++at) {
                const u64 row = u64(tile) + at * THREADS + threadIdx.x;
                keys[at] = row < unit.end ? probe[row] : Key{};
            }
            u32 in_warp = 0;
#pragma unroll
            for (u32 at = 0; at < PER_THREAD; ++at) {
                const u64 row = u64(tile) + at * THREADS + threadIdx.x;
                entry[at] = row < unit.end ? look_up(table, keys[at]) : EMPTY;
                length[at] = entry[at] == EMPTY ? 0 : length_of(table.links[entry[at]]);
                if (args.column_count == 0) {
                    counted += length[at];
                    continue;
                }
                // In the order of rows, so that neighbours write side by side.
                u32 inclusive = length[at];
#pragma unroll
                for (int distance = 1; distance < 32; distance *= 2) {
                    const u32 other = __shfl_up_sync(0xffffffffu, inclusive, distance);
                    if (lane >= distance) inclusive += other;
                }
                place[at] = in_warp + inclusive - length[at];
                in_warp += __shfl_sync(0xffffffffu, inclusive, 31);
            }
            if (args.column_count == 0) continue;
            if (lane == 0) warp_pairs[warp] = in_warp;
            __syncthreads();
            u32 before = 0, in_tile = 0;
#pragma unroll
            for (u32 other = 0; other < THREADS / 32; ++other) {
                before += other < warp ? warp_pairs[other] : 0;
                in_tile += warp_pairs[other];
            }
            if (threadIdx.x == 0) tile_place = atomicAdd(reinterpret_cast<u64*>(args.pairs), u64(in_tile));
            __syncthreads();
            const u64 first_place = tile_place;
            // Pairs for which there is no room are counted, and that is all.
            for (u32 window = 0; window < in_tile && first_place + window < args.room; window += TILE) {
#pragma unroll
                for (u32 at = 0; at < PER_THREAD; ++at) {
                    const u32 begin = before + place[at], end = min(window + TILE, begin + length[at]);
                    for (u32 pair = max(window, begin); pair < end; ++pair) {
                        table.pairs[pair - window] = entry[at] << 16 | (at * THREADS + threadIdx.x);
                        entry[at] = next_of(table.links[entry[at]]);
                    }
                }
                __syncthreads();
                const u32 count = min(TILE, in_tile - window);
                for (u32 index = 0; index < args.column_count; ++index) {
                    const DovetailJoinColumn& column = args.columns[index];
                    const auto write = [&](auto cell) {
                        write_column<decltype(cell)>(column, table.pairs, count, first_place + window, args.room, u32(round), tile);
                    };
                    switch (column.width) {
                        case 1: write(u8{}); break;
                        case 2: write(u16{}); break;
                        case 4: write(u32{}); break;
                        case 8: write(u64{}); break;
                        case 16: write(Cell16{}); break;
                        default: write(Cell32{}); break;
                    }
                }
                __syncthreads();
            }
        }
    }
    if (args.column_count > 0) return;
    counted = warp_sum(counted);
    __shared__ u64 counted_of[THREADS / 32];
    if (lane == 0) counted_of[warp] = counted;
    __syncthreads();
    if (warp > 0) return;
    counted = warp_sum(lane < THREADS / 32 ? counted_of[lane] : 0);
    if (lane == 0 && counted > 0) atomicAdd(reinterpret_cast<u64*>(args.pairs), counted);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_join_partitions(const DovetailJoinPartitions* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        using Key = decltype(key);
        constexpr u32 shared_bytes = sizeof(Shared<Key>);
        const cudaError_t error = cudaFuncSetAttribute(join<Key>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return int(error);
        join<Key><<<args->unit_count, THREADS, shared_bytes, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}
