// First radix pass for rows of several columns of mostly 4 bytes. It writes only whole sectors of
// memory.
//
// A tile's rows of a partition begin and end at any address, so a 32-byte sector that two tiles
// share is written twice. On average only 21 bytes of a sector that `scatter` (partition.cu) writes
// are new. Here a block works through consecutive tiles and keeps up to seven rows of each
// partition in shared memory until the partition has eight. It writes groups of eight rows to
// output indices that are multiples of eight. A group is one or two sectors per column, moved by
// 16-byte loads and stores. CPUs partition in this way for their caches and TLBs (software
// write-combining; Wu et al. 2024, section 4.2, on why partitioning is memory-bound).
//
// Leftover rows go to both ends of a partition, outside the whole groups:
//
//   bounds[p]      multiple of 8                                       bounds[p + 1]
//      | 1st, 2nd ... ↑ groups, in the order of atomics ... | ... last, first after head |
//
// A tile's runs of 8-byte columns are twice as long and share fewer sectors. A single column writes
// little. In both cases writing sectors twice is faster than keeping rows back.
//
// The method pays if few partitions are written at once. In a second pass each block would work in
// another parent, and write to as many addresses as blocks and partitions together. Measured there:
// up to 2.0 ms instead of 1.27 ms (tuning.md).

#pragma once

#include "tiles.cuh"

namespace dovetail {
namespace {

// Rows per group. 8 is the fastest of 4, 8 and 16 (tuning.md): a sector of 4-byte values.
constexpr u32 GROUP = 8;

__host__ __device__ inline u32 next_group(u32 position) { return (position + GROUP - 1) / GROUP * GROUP; }

// True if combining is faster for these column types (tuning.md).
template <typename Key, typename Cell, u32 EXTRA>
constexpr bool COMBINING_PAYS = EXTRA > 0 && sizeof(Cell) == 4 && (sizeof(Key) == 4 || (sizeof(Key) == 8 && EXTRA == 2));

template <typename Key, typename Cell, u32 EXTRA, u32 PER_THREAD>
struct alignas(16) Combining {
    static constexpr u32 TILE = THREADS * PER_THREAD;
    // A tile, and the rows left over from earlier tiles.
    static constexpr u32 LEFT = (GROUP - 1) * BINS_MAX, SLOTS = TILE + LEFT;
    Key keys[SLOTS];
    Cell cells[EXTRA][SLOTS];
    // The i-th leftover row of a partition is at `i * BINS_MAX + partition`.
    Key left_keys[LEFT];
    Cell left_cells[EXTRA][LEFT];
    // By partition:
    //
    //   counts: rows of the tile
    //   begins: first slot of the tile's own rows
    //   ends: end of its groups among the slots
    //   shifts: distance from a slot to its output index
    //   singles: first slot whose row goes to no group
    //   singles_before: rows of the partition that went to no group earlier
    u32 counts[BINS_MAX], begins[BINS_MAX], ends[BINS_MAX], shifts[BINS_MAX], singles[BINS_MAX], singles_before[BINS_MAX];
    u8 bin_of_group[SLOTS / GROUP];
};

// Moves four values by 16-byte accesses.
template <typename T>
__device__ inline void move_four(T* to, const T* from) {
#pragma unroll
    for (u32 part = 0; part < sizeof(T) / 4; ++part) reinterpret_cast<uint4*>(to)[part] = reinterpret_cast<const uint4*>(from)[part];
}

// Returns the output index of leftover row `number`.
__device__ inline u32 single_place(const u32* bounds, u32 number) {
    const u32 start = bounds[0], end = bounds[1], head = min(next_group(start), end) - start;
    return number < head ? start + number : end - 1 - (number - head);
}

// Groups of one partition in a tile that its own thread marks, at most. If all partitions are
// alike, a partition has three or four.
constexpr u32 OWN_GROUPS_MAX = 16;

// Marks the groups of partitions with more than OWN_GROUPS_MAX groups, one warp per partition.
template <typename Shared>
__device__ inline void mark_many_groups(Shared& s, u32 bins) {
    for (u32 bin = threadIdx.x / 32; bin < bins; bin += THREADS / 32) {
        const u32 end = s.ends[bin], start = bin == 0 ? 0 : s.ends[bin - 1];
        if (end - start <= OWN_GROUPS_MAX * GROUP) continue;
        for (u32 group = start / GROUP + threadIdx.x % 32; group < end / GROUP; group += 32) s.bin_of_group[group] = u8(bin);
    }
}

__global__ void start_groups(const u32* bounds, u32 partitions, u32* cursors, u32* singles) {
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= partitions) return;
    cursors[at] = next_group(bounds[at]);
    singles[at] = 0;
}

// Partitions the block's tiles. `cursors`: output index of each partition's next group. `singles`:
// rows of each partition that went to no group.
template <typename Key, typename Cell, u32 EXTRA, u32 PER_THREAD>
__global__ void __launch_bounds__(THREADS, 2) combine(const __grid_constant__ DovetailPartition args, u32* cursors, u32* singles) {
    using Shared = Combining<Key, Cell, EXTRA, PER_THREAD>;
    extern __shared__ __align__(16) u8 shared[];
    Shared& s = *reinterpret_cast<Shared*>(shared);
    const u32 bin = threadIdx.x, bins = 1u << args.bits;
    const u64 tiles = (args.rows + Shared::TILE - 1) / Shared::TILE;
    const u32 first = u32(tiles * blockIdx.x / gridDim.x), last = u32(tiles * (blockIdx.x + 1) / gridDim.x);
    Key* keys_to = static_cast<Key*>(args.moves[0].to);
    const auto cells_to = [&](u32 column) { return static_cast<Cell*>(args.moves[1 + column].to); };
    // This thread's partition: its leftover rows, and the end of its groups.
    u32 left = 0, limit = 0;
    if (bin < bins) {
        const u32 start = next_group(args.bounds[bin]), end = args.bounds[bin + 1];
        limit = end > start ? start + (end - start) / GROUP * GROUP : start;
    }

    for (u32 index = first; index < last; ++index) {
        const u64 start_row = u64(index) * Shared::TILE;
        const Tile tile = {0, u32(start_row), u32(min(u64(Shared::TILE), args.rows - start_row))};
        Key key[PER_THREAD];
        Cell extra[EXTRA][PER_THREAD];
        // A whole tile needs no bounds check per row. `scatter` does not gain by this.
        if (tile.rows == Shared::TILE) load_rows<Key, Cell, EXTRA>(args, tile, key, extra, [](u32) { return true; });
        else load_rows<Key, Cell, EXTRA>(args, tile, key, extra, [&](u32 row) { return row < tile.rows; });
        if (bin < BINS_MAX) s.counts[bin] = 0;
        __syncthreads();
        u16 rank[PER_THREAD];
        static_assert(Shared::TILE <= 65536, "ranks fit in their type");
        rank_rows(
            s.counts, rank, [&](u32 at) { return digit(mix(key[at]), args.skip, args.bits); },
            [&](u32 at) { return at * THREADS + threadIdx.x < tile.rows; });
        __syncthreads();

        // Whole groups are written. Each partition's slots begin with its earlier leftover rows.
        const u32 available = bin < bins ? left + s.counts[bin] : 0, out = available / GROUP * GROUP;
        // The atomic is in flight while the rows are ordered.
        const u32 room = out > 0 ? atomicAdd(&cursors[bin], out) : 0;
        u32 total;
        const u32 start = sum_before(out, total);
        if (bin < bins) {
            s.begins[bin] = start + left;
            s.ends[bin] = start + out;
            if (out > 0) {
                for (u32 at = 0; at < left; ++at) {
                    s.keys[start + at] = s.left_keys[at * BINS_MAX + bin];
#pragma unroll
                    for (u32 column = 0; column < EXTRA; ++column)
                        s.cells[column][start + at] = s.left_cells[column][at * BINS_MAX + bin];
                }
                // If the partition has many groups, a warp marks them below.
                if (out <= OWN_GROUPS_MAX * GROUP)
                    for (u32 at = start; at < start + out; at += GROUP) s.bin_of_group[at / GROUP] = u8(bin);
            }
            left = available - out;
        }
        if (__syncthreads_or(out > OWN_GROUPS_MAX * GROUP)) mark_many_groups<Shared>(s, bins);
#pragma unroll
        for (u32 at = 0; at < PER_THREAD; ++at) {
            if (at * THREADS + threadIdx.x >= tile.rows) continue;
            const u32 of = digit(mix(key[at]), args.skip, args.bits);
            const u32 slot = s.begins[of] + rank[at], end = s.ends[of];
            const bool stays = slot >= end;
            const u32 to = stays ? (slot - end) * BINS_MAX + of : slot;
            (stays ? s.left_keys : s.keys)[to] = key[at];
#pragma unroll
            for (u32 column = 0; column < EXTRA; ++column)
                (stays ? s.left_cells[column] : s.cells[column])[to] = extra[column][at];
        }
        bool is_over = false;
        if (bin < bins) {
            // Groups may reach over the end of their partition: all its rows fit, but not all its
            // groups.
            is_over = out > 0 && room + out > limit;
            const u32 placed = is_over ? (room < limit ? limit - room : 0) : out;
            s.shifts[bin] = room - start;
            s.singles[bin] = start + placed;
            if (is_over) s.singles_before[bin] = atomicAdd(&singles[bin], out - placed);
        }
        const bool any_over = __syncthreads_or(is_over);
        for (u32 slot = 4 * threadIdx.x; slot < total; slot += 4 * THREADS) {
            const u32 of = s.bin_of_group[slot / GROUP];
            if (any_over && slot >= s.singles[of]) {
                for (u32 at = slot; at < slot + 4; ++at) {
                    const u32 to = single_place(args.bounds + of, s.singles_before[of] + at - s.singles[of]);
                    keys_to[to] = s.keys[at];
                    for (u32 column = 0; column < EXTRA; ++column) cells_to(column)[to] = s.cells[column][at];
                }
                continue;
            }
            const u32 to = s.shifts[of] + slot;
            move_four(keys_to + to, s.keys + slot);
#pragma unroll
            for (u32 column = 0; column < EXTRA; ++column) move_four(cells_to(column) + to, s.cells[column] + slot);
        }
        __syncthreads();
    }
    if (left == 0) return;
    const u32 before = atomicAdd(&singles[bin], left);
    for (u32 at = 0; at < left; ++at) {
        const u32 to = single_place(args.bounds + bin, before + at);
        keys_to[to] = s.left_keys[at * BINS_MAX + bin];
        for (u32 column = 0; column < EXTRA; ++column) cells_to(column)[to] = s.left_cells[column][at * BINS_MAX + bin];
    }
}

// Runs a pass over rows of one parent with known bounds, with `EXTRA` columns that move with the
// keys. `cursors` and `singles` have one number per partition. Returns cudaErrorNotSupported, with
// nothing done, if combining is not faster.
template <typename Key, typename Cell, u32 EXTRA>
cudaError_t run_combined(const DovetailPartition& args, u32* cursors, u32* singles, cudaStream_t stream) {
    // Fewer rows per thread than in `scatter`, because leftover rows need shared memory too. 8 is
    // the best of 8, 10 and 12 for 12-byte rows.
    constexpr u32 ROW_BYTES = sizeof(Key) + EXTRA * sizeof(Cell), PER_THREAD = ROW_BYTES <= 8 ? 12 : ROW_BYTES <= 12 ? 8 : 6;
    using Shared = Combining<Key, Cell, EXTRA, PER_THREAD>;
    const u32 blocks = 2 * limit_of(cudaDevAttrMultiProcessorCount);
    // A block with few tiles would write too many of its rows one by one, as leftovers.
    if (args.rows < u64(blocks) * args.combined_tiles_min * Shared::TILE) return cudaErrorNotSupported;
    if (sizeof(Shared) > limit_of(cudaDevAttrMaxSharedMemoryPerBlockOptin)) return cudaErrorNotSupported;
    const auto kernel = combine<Key, Cell, EXTRA, PER_THREAD>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    if (error != cudaSuccess) return error;
    start_groups<<<1, BINS_MAX, 0, stream>>>(args.bounds, 1u << args.bits, cursors, singles);
    kernel<<<blocks, THREADS, sizeof(Shared), stream>>>(args, cursors, singles);
    return cudaGetLastError();
}

}  // namespace
}  // namespace dovetail
