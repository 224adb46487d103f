// Radix partitioning: one pass over rows that may be partitioned already, each parent partition on its own.
//
//   parents ─► tiles of 8192 rows ─► histogram ─► bounds ─► scatter: rank a tile in shared memory, move its columns
//
// Rows of a tile are ranked by shared-memory atomics, which is quicker than the stable ranking of a radix sort, because order
// within a partition is free. A tile takes room in its partitions with one atomic per partition, so that tiles need not wait
// for each other. Each column is then put in order in shared memory and written in runs: with 256 partitions, a run of 4-byte
// values is 128 bytes long on average. (Rui and Tu 2017, section 4.1, share a histogram per block in this way; that columns
// move with the keys is GFTR: Wu et al. 2024, section 4.2.)

#include <cub/device/device_scan.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include "common.cuh"

namespace dovetail {
namespace {

// 512 threads and 16 rows for each were the best of 40 variants on an H200 (benches/README.md).
constexpr u32 THREADS = 512, PER_THREAD = 16, TILE = THREADS * PER_THREAD;
constexpr u32 BINS_MAX = 1u << DOVETAIL_PASS_BITS_MAX;

static_assert(BINS_MAX <= THREADS, "a thread has one bin at most");

struct TilesOf {
    const u32* bounds;
    u32 parents;
    __host__ __device__ u32 operator()(u32 parent) const {
        return parent < parents ? (bounds[parent + 1] - bounds[parent] + TILE - 1) / TILE : 0;
    }
};

auto tiles_of(const DovetailPartition& args) {
    return thrust::transform_iterator(thrust::counting_iterator<u32>(0), TilesOf{args.parent_bounds, args.parents});
}

// How scratch memory is divided.
struct Scratch {
    u32 *counts, *cursors, *tile_starts;
    void* scan;
    size_t scan_bytes, bytes;

    Scratch(void* memory, u32 parents, u32 bits) {
        const u64 partitions = u64(parents) << bits;
        u8* at = static_cast<u8*>(memory);
        auto take = [&](u64 bytes) {
            u8* taken = at;
            at += ceil_div<u64>(bytes, 256) * 256;
            return taken;
        };
        counts = reinterpret_cast<u32*>(take((partitions + 1) * 4));
        cursors = reinterpret_cast<u32*>(take((partitions + 1) * 4));
        tile_starts = reinterpret_cast<u32*>(take((u64(parents) + 1) * 4));
        size_t of_counts = 0, of_tiles = 0;
        cub::DeviceScan::ExclusiveSum(nullptr, of_counts, counts, cursors, std::int64_t(partitions + 1));
        DovetailPartition args{};
        args.parents = parents;
        cub::DeviceScan::ExclusiveSum(nullptr, of_tiles, tiles_of(args), tile_starts, std::int64_t(parents) + 1);
        scan_bytes = of_counts > of_tiles ? of_counts : of_tiles;
        scan = take(scan_bytes);
        bytes = size_t(at - static_cast<u8*>(memory));
    }
};

// The rows of one tile.
struct Tile {
    u32 parent, start, rows;
};

// The tile that this block works on. False when there is none.
__device__ inline bool find_tile(const DovetailPartition& args, const u32* tile_starts, Tile& tile) {
    __shared__ Tile found;
    if (threadIdx.x == 0) {
        u32 low = 0, high = args.parents;
        // The last parent that starts at or before this tile.
        while (high - low > 1) {
            const u32 middle = low + (high - low) / 2;
            if (tile_starts[middle] <= blockIdx.x) low = middle;
            else high = middle;
        }
        const u32 start = args.parent_bounds[low] + (blockIdx.x - tile_starts[low]) * TILE;
        const u32 end = args.parent_bounds[low + 1];
        found = {low, start, blockIdx.x < tile_starts[args.parents] ? min(TILE, end - start) : 0};
    }
    __syncthreads();
    tile = found;
    return tile.rows > 0;
}

template <typename Key>
__global__ void __launch_bounds__(THREADS) count_digits(DovetailPartition args, const u32* tile_starts, u32* counts) {
    __shared__ u32 in_bin[BINS_MAX];
    Tile tile;
    if (!find_tile(args, tile_starts, tile)) return;
    const u32 bins = 1u << args.bits;
    if (threadIdx.x < bins) in_bin[threadIdx.x] = 0;
    __syncthreads();
    const Key* keys = static_cast<const Key*>(args.keys) + tile.start;
#pragma unroll
    for (u32 at = 0; at < PER_THREAD; ++at) {
        const u32 row = at * THREADS + threadIdx.x;
        if (row < tile.rows) atomicAdd(&in_bin[digit(mix(keys[row]), args.skip, args.bits)], 1u);
    }
    __syncthreads();
    if (threadIdx.x < bins && in_bin[threadIdx.x] > 0)
        atomicAdd(&counts[(tile.parent << args.bits) + threadIdx.x], in_bin[threadIdx.x]);
}

constexpr u32 STAGED_BYTES = TILE * 4;

// Moves one column of a tile: into the order of partitions in shared memory, as many values at a time as fit, then out.
template <typename Cell>
__device__ inline void move_column(const DovetailMove& move, const Tile& tile, const u16 (&place)[PER_THREAD],
                                   const u32* destinations, u8* staged_bytes) {
    constexpr u32 AT_ONCE = STAGED_BYTES / sizeof(Cell) < TILE ? STAGED_BYTES / sizeof(Cell) : TILE;
    const Cell* from = static_cast<const Cell*>(move.from) + tile.start;
    Cell* to = static_cast<Cell*>(move.to);
    Cell* staged = reinterpret_cast<Cell*>(staged_bytes);
    for (u32 first = 0; first < tile.rows; first += AT_ONCE) {
#pragma unroll
        for (u32 at = 0; at < PER_THREAD; ++at) {
            const u32 row = at * THREADS + threadIdx.x;
            if (row < tile.rows && place[at] - first < AT_ONCE) {
                if constexpr (sizeof(Cell) == 4) staged[place[at] - first] = move.from ? from[row] : Cell(tile.start + row);
                else staged[place[at] - first] = from[row];
            }
        }
        __syncthreads();
        const u32 filled = min(AT_ONCE, tile.rows - first);
        for (u32 at = threadIdx.x; at < filled; at += THREADS) to[destinations[first + at]] = staged[at];
        __syncthreads();
    }
}

template <typename Key>
__global__ void __launch_bounds__(THREADS) scatter(const __grid_constant__ DovetailPartition args, const u32* tile_starts,
                                                   u32* cursors) {
    extern __shared__ __align__(16) u8 shared[];
    u8* staged = shared;
    u32* destinations = reinterpret_cast<u32*>(staged + STAGED_BYTES);
    u32* in_bin = destinations + TILE;
    u32* shifts = in_bin + BINS_MAX;
    __shared__ u32 warp_sums[THREADS / 32];
    Tile tile;
    if (!find_tile(args, tile_starts, tile)) return;
    const u32 bins = 1u << args.bits;
    if (threadIdx.x < BINS_MAX) in_bin[threadIdx.x] = 0;
    __syncthreads();

    const Key* keys = static_cast<const Key*>(args.keys) + tile.start;
    u16 place[PER_THREAD];
    u8 bin[PER_THREAD];
    static_assert(BINS_MAX <= 256 && TILE <= 65536, "bins and places of a tile fit in their types");
#pragma unroll
    for (u32 at = 0; at < PER_THREAD; ++at) {
        const u32 row = at * THREADS + threadIdx.x;
        bin[at] = row < tile.rows ? u8(digit(mix(keys[row]), args.skip, args.bits)) : 0;
    }
#pragma unroll
    for (u32 at = 0; at < PER_THREAD; ++at) {
        const u32 row = at * THREADS + threadIdx.x;
        place[at] = row < tile.rows ? u16(atomicAdd(&in_bin[bin[at]], 1u)) : 0;
    }
    __syncthreads();

    // Where each partition starts in the tile, and how far from there it is to its place in the output.
    const u32 count = threadIdx.x < bins ? in_bin[threadIdx.x] : 0;
    const u32 room = count > 0 ? atomicAdd(&cursors[(tile.parent << args.bits) + threadIdx.x], count) : 0;
    u32 inclusive = count;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, inclusive, distance);
        if (threadIdx.x % 32 >= distance) inclusive += other;
    }
    if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = inclusive;
    __syncthreads();
    u32 start = inclusive - count;
    for (u32 warp = 0; warp < threadIdx.x / 32; ++warp) start += warp_sums[warp];
    if (threadIdx.x < bins) {
        in_bin[threadIdx.x] = start;
        shifts[threadIdx.x] = room - start;
    }
    __syncthreads();
#pragma unroll
    for (u32 at = 0; at < PER_THREAD; ++at) {
        const u32 row = at * THREADS + threadIdx.x;
        if (row < tile.rows) {
            place[at] += u16(in_bin[bin[at]]);
            destinations[place[at]] = shifts[bin[at]] + place[at];
        }
    }
    __syncthreads();

    for (u32 index = 0; index < args.move_count; ++index) {
        const DovetailMove& move = args.moves[index];
        switch (move.width) {
            case 1: move_column<u8>(move, tile, place, destinations, staged); break;
            case 2: move_column<u16>(move, tile, place, destinations, staged); break;
            case 4: move_column<u32>(move, tile, place, destinations, staged); break;
            case 8: move_column<u64>(move, tile, place, destinations, staged); break;
            case 16: move_column<Cell16>(move, tile, place, destinations, staged); break;
            default: move_column<Cell32>(move, tile, place, destinations, staged); break;
        }
    }
}

constexpr u32 SCATTER_SHARED_BYTES = STAGED_BYTES + (TILE + 2 * BINS_MAX) * 4;

}  // namespace
}  // namespace dovetail

using namespace dovetail;

uint64_t dovetail_partition_scratch_bytes(uint32_t parents, uint32_t bits) {
    return Scratch(nullptr, parents, bits).bytes;
}

int dovetail_partition(const DovetailPartition* args, DovetailStream stream_handle) {
    const cudaStream_t stream = cudaStream_t(stream_handle);
    const u64 partitions = u64(args->parents) << args->bits;
    Scratch scratch(args->scratch, args->parents, args->bits);
    if (scratch.bytes > args->scratch_bytes) return int(cudaErrorInvalidValue);
    cudaError_t error = cudaMemsetAsync(scratch.counts, 0, (partitions + 1) * 4, stream);
    if (error != cudaSuccess) return int(error);
    error = cub::DeviceScan::ExclusiveSum(scratch.scan, scratch.scan_bytes, tiles_of(*args), scratch.tile_starts,
                                          std::int64_t(args->parents) + 1, stream);
    if (error != cudaSuccess) return int(error);
    // As many as there can be; blocks without a tile end at once.
    const u32 tiles = u32(args->rows / TILE + args->parents);
    return with_key(args->key_bytes, [&](auto key) {
        using Key = decltype(key);
        count_digits<Key><<<tiles, THREADS, 0, stream>>>(*args, scratch.tile_starts, scratch.counts);
        cudaError_t error = cub::DeviceScan::ExclusiveSum(scratch.scan, scratch.scan_bytes, scratch.counts, args->bounds,
                                                          std::int64_t(partitions) + 1, stream);
        if (error != cudaSuccess) return int(error);
        error = cudaMemcpyAsync(scratch.cursors, args->bounds, partitions * 4, cudaMemcpyDeviceToDevice, stream);
        if (error != cudaSuccess) return int(error);
        error = cudaFuncSetAttribute(scatter<Key>, cudaFuncAttributeMaxDynamicSharedMemorySize, SCATTER_SHARED_BYTES);
        if (error != cudaSuccess) return int(error);
        scatter<Key><<<tiles, THREADS, SCATTER_SHARED_BYTES, stream>>>(*args, scratch.tile_starts, scratch.cursors);
        return launched();
    });
}
