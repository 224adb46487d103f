// Joins partitions in one kernel. Each block builds a hash table in shared memory and writes the
// joined rows column by column.
//
// A block takes some probe rows of one partition. It chains the partition's build rows by bucket
// and looks up a tile of probe rows. It reserves output space by one atomic and lists its pairs in
// shared memory. Then consecutive threads write each column to consecutive addresses. The build and
// probe rows are in the L1 cache by then. (Rui and Tu 2017, section 4.2, for direct output and for
// skewed partitions that are split over blocks; Wu et al. 2024, section 4.2, for columns that move
// with the keys.)
//
// Another kernel (join_direct.cuh) joins simple calls, and leaves units that are not simple to this
// one.
//
// The kernel assumes nothing about build keys. Repeated keys give more pairs. A partition with more
// rows than the table holds is joined in rounds. If a probe row walks a chain so long that a list
// of runs would be faster, the kernel stops the walk and sets `long_chains`. Pairs beyond the
// output's room are still counted, so that the caller can run again with enough room.
//
// Loads go to registers several at a time, before any of them is stored. Otherwise the compiler
// would keep each load behind every store that might alias it.

#include "join_direct.cuh"

namespace dovetail {
namespace {

// The fastest of 128 to 512 threads with 2 to 8 rows each on an H200 (kernels/tuning.md).
constexpr u32 THREADS = 256, PER_THREAD = 4, TILE = THREADS * PER_THREAD;
// Build rows that a probe row is compared with in one round, at most.
constexpr u32 CHAIN_MAX = 1024;

static_assert(TILE <= 0x10000, "rows of a tile are 16-bit numbers");

template <typename Key>
struct Shared {
    Key keys[ROWS];
    // First row of each bucket's chain.
    u32 heads[BUCKETS];
    // Next row of each row's chain.
    u16 next[ROWS];
    // Pairs: the build row in the table (upper 16 bits) and the probe row in the tile (lower 16
    // bits).
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

// Returns the next row of the chain with `key`, after `row`. One must exist.
template <typename Key>
__device__ inline u32 find_next(const Shared<Key>& table, u32 row, Key key) {
    do row = table.next[row];
    while (table.keys[row] != key);
    return row;
}

// Writes a column of `count` pairs, at most TILE, from output index `place` on. `room`: rows that
// `column.to` holds.
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

// Writes the positions of `count` pairs, like `write_column`.
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
            // The probe keys are loaded while the table is built.
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
            // Numbers pairs in the order of rows, so that neighbouring threads write next to each
            // other.
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
                // Pairs beyond the room are counted only.
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
        const cudaError_t error = allow_shared_bytes<shared_bytes>(join<Key>);
        if (error != cudaSuccess) return answered(error);
        join<Key><<<args->unit_count, THREADS, shared_bytes, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}
