// Joining partitions in one kernel: a hash table in shared memory per block, and the joined rows written column by column.
//
// A block has some probe rows of one partition. It chains the partition's build rows by bucket, looks a tile of probe rows up, takes
// room in the output by one atomic, and lists its pairs in shared memory; then each column is written by consecutive threads to
// consecutive places, from build and probe rows that lie in the first-level cache by then. (Rui and Tu 2017, section 4.2, for
// output that is written directly and for skewed partitions that are split over blocks; Wu et al. 2024, section 4.2, for columns
// that are moved with the keys.)
//
// Simple calls are joined by another kernel (join_direct.cuh), which leaves what is not simple to this one.
//
// Nothing has to be known of build keys: those that repeat give more pairs, and a partition with more rows than a table has room
// for is worked off in rounds. Where a probe row walks so long a chain that a list of runs would be the better way, the kernel gives
// up and says so. Pairs for which there is no room are counted all the same: the caller runs again with room for them.
//
// Loads go to registers several at a time before anything of them is stored, because the compiler keeps a load behind every store
// that might be to the same place.

#include "join_direct.cuh"

namespace dovetail {
namespace {

// Of 128 to 512 threads with 2 to 8 rows each, these were the best on an H200 (kernels/tuning.md).
constexpr u32 THREADS = 256, PER_THREAD = 4, TILE = THREADS * PER_THREAD;
// Build rows that a probe row is compared with in one round, at the most.
constexpr u32 CHAIN_MAX = 1024;

static_assert(TILE <= 0x10000, "rows of a tile are 16-bit numbers");

template <typename Key>
struct Shared {
    Key keys[ROWS];
    // The first row of each bucket's chain.
    u32 heads[BUCKETS];
    // The next row of each row's chain.
    u16 next[ROWS];
    // The build row in the table and the probe row in the tile.
    u32 pairs[TILE];
};

// Reads every THREADS-th of up to `count` keys.
template <u32 COUNT, typename Key>
__device__ inline void read_keys(const Key* keys, u32 count, Key (&read)[COUNT]) {
#pragma unroll
    for (u32 at = 0; at < COUNT; ++at) {
        const u32 row = at * THREADS + threadIdx.x;
        read[at] = row < count ? keys[row] : Key{};
    }
}

// The next row of a chain with that key, after `row`. There must be one.
template <typename Key>
__device__ inline u32 find_next(const Shared<Key>& table, u32 row, Key key) {
    do row = table.next[row];
    while (table.keys[row] != key);
    return row;
}

// Writes a column of so many pairs, at most TILE. `room`: places that there are from `to` on.
template <typename Cell>
__device__ inline void write_column(const DovetailJoinColumn& column, const u32* pairs, u32 count, u64 place, u64 room,
                                    u32 build_start, u32 probe_start) {
    const Cell* from = static_cast<const Cell*>(column.from) + (column.of_probe ? probe_start : build_start);
    Cell* to = static_cast<Cell*>(column.to) + place;
    const u32 fits = u32(min(u64(count), room - place));
    const u32 shift = column.of_probe ? 0 : 16;
    constexpr u32 LOADS = sizeof(Cell) <= 8 ? PER_THREAD : 1;
    for (u32 first = threadIdx.x; first < fits; first += LOADS * THREADS) {
        Cell value[LOADS];
#pragma unroll
        for (u32 load = 0; load < LOADS; ++load) {
            const u32 pair = first + load * THREADS;
            if (pair < fits) value[load] = from[pairs[pair] >> shift & 0xffffu];
        }
#pragma unroll
        for (u32 load = 0; load < LOADS; ++load) {
            const u32 pair = first + load * THREADS;
            if (pair < fits) to[pair] = value[load];
        }
    }
}

// The same of the positions of rows.
__device__ inline void write_positions(const DovetailJoinColumn& column, const u32* pairs, u32 count, u64 place, u64 room,
                                       u32 build_start, u32 probe_start) {
    u32* to = static_cast<u32*>(column.to) + place;
    for (u32 pair = threadIdx.x; pair < count && place + pair < room; pair += THREADS)
        to[pair] = column.of_probe ? probe_start + (pairs[pair] & 0xffffu) : build_start + (pairs[pair] >> 16);
}

template <typename Key>
__global__ void __launch_bounds__(THREADS, 4) join(const __grid_constant__ DovetailJoinPartitions args) {
    extern __shared__ __align__(16) u8 shared[];
    Shared<Key>& table = *reinterpret_cast<Shared<Key>*>(shared);
    __shared__ u32 warp_pairs[THREADS / 32];
    __shared__ u64 tile_place, counted_of[THREADS / 32];
    const DovetailMatchUnit unit = unit_of_block(args);
    if (unit.start == unit.end) return;
    const u64 build_start = args.build_bounds[unit.partition], build_end = args.build_bounds[unit.partition + 1];
    const Key* build = static_cast<const Key*>(args.build_keys);
    const Key* probe = static_cast<const Key*>(args.probe_keys);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 counted = 0;
    bool is_long = false;
    for (u64 round = build_start; round < build_end; round += ROWS) {
        const u32 rows = u32(min(u64(ROWS), build_end - round));
        Key keys[PER_THREAD];
        {
            // On their way while the table is built.
            read_keys(probe + unit.start, unit.end - unit.start, keys);
            __syncthreads();
            for (u32 bucket = threadIdx.x; bucket < BUCKETS; bucket += THREADS) table.heads[bucket] = NONE;
            constexpr u32 LOADS = 16 / sizeof(Key);
            for (u32 first = 0; first < rows; first += LOADS * THREADS) {
                Key entered[LOADS];
                read_keys(build + round + first, rows - first, entered);
                if (first == 0) __syncthreads();
#pragma unroll
                for (u32 load = 0; load < LOADS; ++load) {
                    const u32 row = first + load * THREADS + threadIdx.x;
                    if (row < rows) {
                        table.keys[row] = entered[load];
                        table.next[row] = u16(atomicExch(&table.heads[low_bits(mix(entered[load])) % BUCKETS], row));
                    }
                }
            }
            __syncthreads();
        }
        for (u32 tile = unit.start; tile < unit.end; tile += TILE) {
            const u32 tile_rows = unit.end - tile;
            if (tile > unit.start) read_keys(probe + tile, tile_rows, keys);
            u32 entry[PER_THREAD], length[PER_THREAD], place[PER_THREAD];
            u32 in_warp = 0;
#pragma unroll
            for (u32 at = 0; at < PER_THREAD; ++at) {
                entry[at] = length[at] = 0;
                u32 found = at * THREADS + threadIdx.x < tile_rows ? table.heads[low_bits(mix(keys[at])) % BUCKETS] : NONE;
                for (u32 step = 0; found != NONE && step < CHAIN_MAX; ++step) {
                    if (table.keys[found] == keys[at]) {
                        if (length[at] == 0) entry[at] = found;
                        ++length[at];
                    }
                    found = table.next[found];
                }
                is_long |= found != NONE;
            }
            if (args.column_count == 0) {
#pragma unroll
                for (u32 at = 0; at < PER_THREAD; ++at) counted += length[at];
                continue;
            }
            // In the order of rows, so that neighbours write side by side.
#pragma unroll
            for (u32 at = 0; at < PER_THREAD; ++at) {
                const u32 matched = __ballot_sync(~0u, length[at] > 0);
                u32 ahead = __popc(matched & ((1u << lane) - 1)), of_row = __popc(matched);
                if (__any_sync(~0u, length[at] > 1)) {
                    const u32 inclusive = warp_inclusive_sum(length[at]);
                    ahead = inclusive - length[at];
                    of_row = __shfl_sync(~0u, inclusive, 31);
                }
                place[at] = in_warp + ahead;
                in_warp += of_row;
            }
            if (lane == 0) warp_pairs[warp] = in_warp;
            __syncthreads();
            u32 before = 0, in_tile = 0;
#pragma unroll
            for (u32 other = 0; other < THREADS / 32; ++other) {
                before += other < warp ? warp_pairs[other] : 0;
                in_tile += warp_pairs[other];
            }
            if (threadIdx.x == 0) tile_place = atomicAdd(reinterpret_cast<u64*>(&args.totals->pairs), u64(in_tile));
            for (u32 window = 0; window < in_tile; window += TILE) {
#pragma unroll
                for (u32 at = 0; at < PER_THREAD; ++at) {
                    const u32 begin = before + place[at], end = min(window + TILE, begin + length[at]);
                    for (u32 pair = max(window, begin); pair < end; ++pair) {
                        table.pairs[pair - window] = entry[at] << 16 | (at * THREADS + threadIdx.x);
                        if (pair + 1 < begin + length[at]) entry[at] = find_next(table, entry[at], keys[at]);
                    }
                }
                __syncthreads();
                const u64 first = tile_place + window;
                // Pairs for which there is no room are counted, and that is all.
                if (first >= args.room) break;
                const u32 count = min(TILE, in_tile - window);
                for (u32 index = 0; index < args.column_count; ++index) {
                    const DovetailJoinColumn& column = args.columns[index];
                    const auto write = [&](auto cell) {
                        write_column<decltype(cell)>(column, table.pairs, count, first, args.room, u32(round), tile);
                    };
                    if (!column.from) {
                        write_positions(column, table.pairs, count, first, args.room, u32(round), tile);
                        continue;
                    }
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
            __syncthreads();
        }
    }
    if (is_long) args.totals->long_chains = 1;
    if (args.column_count > 0) return;
    counted = warp_sum(counted);
    if (lane == 0) counted_of[warp] = counted;
    __syncthreads();
    if (warp > 0) return;
    counted = warp_sum(lane < THREADS / 32 ? counted_of[lane] : 0);
    if (lane == 0 && counted > 0) atomicAdd(reinterpret_cast<u64*>(&args.totals->pairs), counted);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_join_partitions(const DovetailJoinPartitions* args, DovetailStream stream) {
    if (args->is_direct) return run_direct(*args, cudaStream_t(stream));
    return with_key(args->key_bytes, [&](auto key) {
        using Key = decltype(key);
        constexpr u32 shared_bytes = sizeof(Shared<Key>);
        const cudaError_t error = cudaFuncSetAttribute(join<Key>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return answered(error);
        join<Key><<<args->unit_count, THREADS, shared_bytes, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}
