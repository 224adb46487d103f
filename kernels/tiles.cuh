// Tiles: a block's run of rows of one parent partition, and the loads of its threads.

#pragma once

#include "common.cuh"

namespace dovetail {

constexpr u32 THREADS = 512;
constexpr u32 BINS_MAX = 1u << DOVETAIL_PASS_BITS_MAX;

static_assert(BINS_MAX <= THREADS && BINS_MAX <= 256, "a thread has one bin at most, and its number is a byte");

struct Tile {
    u32 parent, start, rows;
};

// Returns tile `index`, of up to `tile_rows` rows, or an empty tile if it does not exist. All
// threads of a block search for its parent together. That takes one or two dependent loads instead
// of one per halving.
__device__ inline Tile find_tile(const DovetailPartition& args, const u32* tile_starts, u32 tile_rows, u32 index) {
    // Finds the last parent that starts at or before this tile.
    u32 low = 0, high = args.parents;
    while (high - low > 1) {
        const u32 stride = (high - low + THREADS - 1) / THREADS, parent = low + threadIdx.x * stride;
        const u32 before = u32(__syncthreads_count(parent < high && tile_starts[parent] <= index));
        low += (before - 1) * stride;
        high = min(high, low + stride);
    }
    // Passes the tile through shared memory. Otherwise the compiler would keep all values derived
    // from it in registers.
    __shared__ Tile found;
    if (threadIdx.x == 0) {
        const u32 start = args.parent_bounds[low] + (index - tile_starts[low]) * tile_rows;
        const bool is_there = index < tile_starts[args.parents];
        found = {low, start, is_there ? min(tile_rows, args.parent_bounds[low + 1] - start) : 0};
    }
    __syncthreads();
    return found;
}

// Returns the value of a row of a tile, or the row's number if the move has no column.
template <typename Cell>
__device__ inline Cell value_of(const DovetailMove& move, const Tile& tile, u32 row) {
    if constexpr (sizeof(Cell) == 4)
        if (!move.from) return Cell(tile.start + row);
    return static_cast<const Cell*>(move.from)[tile.start + row];
}

// Loads a thread's rows of a tile: keys, and the `EXTRA` columns that move together with them.
// `is_there`: true if a row of the tile exists.
template <typename Key, typename Cell, u32 EXTRA, u32 PER_THREAD, typename IsThere>
__device__ inline void load_rows(const DovetailPartition& args, const Tile& tile, Key (&key)[PER_THREAD],
                                 Cell (&extra)[EXTRA == 0 ? 1 : EXTRA][PER_THREAD], IsThere is_there) {
    const Key* from = static_cast<const Key*>(args.keys) + tile.start;
#pragma unroll
    for (u32 at = 0; at < PER_THREAD; ++at) {
        const u32 row = at * THREADS + threadIdx.x;
        key[at] = is_there(row) ? from[row] : Key{};
    }
    if constexpr (EXTRA > 0) {
#pragma unroll
        for (u32 column = 0; column < EXTRA; ++column) {
#pragma unroll
            for (u32 at = 0; at < PER_THREAD; ++at) {
                const u32 row = at * THREADS + threadIdx.x;
                extra[column][at] = is_there(row) ? value_of<Cell>(args.moves[1 + column], tile, row) : Cell{};
            }
        }
    }
}

// Minimum number of a warp's rows in one partition for which one atomic counts them all.
constexpr u32 ALIKE_MIN = 8;

// Ranks the rows of a tile within their partitions and counts each partition in shared memory.
// `bin_of` returns the partition of one of this thread's rows. `is_there`: true if that row exists.
//
// Normally each row takes an atomic, and the GPU serializes a warp's atomics to one partition. With
// one key in half of all rows, that took longer than all other work. If at least ALIKE_MIN lanes
// share a partition in a warp's first rows, one atomic counts that partition for the whole warp.
template <u32 PER_THREAD, typename BinOf, typename IsThere>
__device__ inline void rank_rows(u32* counts, u16 (&rank)[PER_THREAD], BinOf bin_of, IsThere is_there) {
    const u32 first = is_there(0) ? bin_of(0) : BINS_MAX, same = __match_any_sync(~0u, first);
    const u32 many = __ballot_sync(~0u, first < BINS_MAX && __popc(same) >= ALIKE_MIN);
    if (many == 0) {
#pragma unroll
        for (u32 at = 0; at < PER_THREAD; ++at) rank[at] = is_there(at) ? u16(atomicAdd(&counts[bin_of(at)], 1u)) : 0;
        return;
    }
    const u32 lane = threadIdx.x % 32, heavy = __shfl_sync(~0u, first, __ffs(many) - 1);
#pragma unroll
    for (u32 at = 0; at < PER_THREAD; ++at) {
        const u32 bin = is_there(at) ? bin_of(at) : BINS_MAX, alike = __ballot_sync(~0u, bin == heavy);
        const u32 before = __popc(alike & ((1u << lane) - 1)), leader = alike == 0 ? 0 : __ffs(alike) - 1;
        u32 place = 0;
        if (bin < BINS_MAX && (bin != heavy || lane == leader)) place = atomicAdd(&counts[bin], bin == heavy ? __popc(alike) : 1u);
        const u32 of_leader = __shfl_sync(~0u, place, leader);
        rank[at] = u16(bin == heavy ? of_leader + before : place);
    }
}

// Returns the sum of `value` over the block's threads before this one. `total` receives the sum
// over all threads.
__device__ inline u32 sum_before(u32 value, u32& total) {
    __shared__ u32 warp_sums[THREADS / 32];
    const u32 inclusive = warp_inclusive_sum(value);
    if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = inclusive;
    __syncthreads();
    u32 before = inclusive - value;
    total = 0;
    // Only the first BINS_MAX threads have bins.
#pragma unroll
    for (u32 warp = 0; warp < BINS_MAX / 32; ++warp) {
        const u32 sum = warp_sums[warp];
        before += warp < threadIdx.x / 32 ? sum : 0;
        total += sum;
    }
    return before;
}

}  // namespace dovetail
