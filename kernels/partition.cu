// One radix pass over rows that may be partitioned already. Each parent partition is partitioned
// separately.
//
//   parents ─► tiles of 4096 to 8192 rows ─► histogram ─► bounds
//           ─► scatter: rank a tile in shared memory, move its columns
//
// Shared-memory atomics rank the rows of a tile. That is faster than the stable ranking of a radix
// sort, and order within a partition is free. A tile reserves space in its partitions with one
// atomic per partition, so tiles need not wait for each other. Each column is then ordered in
// shared memory and written in runs. With 256 partitions, a run of 4-byte values is 128 bytes long
// on average. (Rui and Tu 2017, section 4.1, share a histogram per block in this way; moving
// columns with the keys is GFTR: Wu et al. 2024, section 4.2.)
//
// If the bounds are known (count_partitions.cu counts for two passes at once), the pass needs no
// histogram. Large first passes then write whole sectors only (combine.cuh).

#include <algorithm>
#include <cub/device/device_scan.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include "combine.cuh"
#include "tiles.cuh"

namespace dovetail {
namespace {

auto tiles_of(const DovetailPartition& args, u32 tile_rows) {
    return thrust::transform_iterator(thrust::counting_iterator<u32>(0), PiecesOf{args.parent_bounds, args.parents, tile_rows, tile_rows});
}

// Divides the scratch memory.
struct Scratch {
    u32 *counts, *cursors, *tile_starts;
    void* scan;
    size_t scan_bytes, bytes;
    // Error of the query for the scans' scratch bytes.
    cudaError_t error;

    Scratch(void* memory, u32 parents, u32 bits) {
        const u64 partitions = u64(parents) << bits;
        Divider divider(memory);
        counts = divider.take<u32>(partitions + 1);
        cursors = divider.take<u32>(partitions + 1);
        tile_starts = divider.take<u32>(u64(parents) + 1);
        size_t of_counts = 0, of_tiles = 0;
        error = cub::DeviceScan::ExclusiveSum(nullptr, of_counts, counts, cursors, std::int64_t(partitions + 1));
        DovetailPartition args{};
        args.parents = parents;
        if (error == cudaSuccess)
            error = cub::DeviceScan::ExclusiveSum(nullptr, of_tiles, tiles_of(args, 1), tile_starts, std::int64_t(parents) + 1);
        scan_bytes = of_counts > of_tiles ? of_counts : of_tiles;
        scan = divider.take<u8>(scan_bytes);
        bytes = divider.bytes();
    }
};

template <typename Key, u32 PER_THREAD>
__global__ void __launch_bounds__(THREADS) count_digits(DovetailPartition args, const u32* tile_starts, u32* counts) {
    __shared__ u32 in_bin[BINS_MAX];
    const Tile tile = find_tile(args, tile_starts, THREADS * PER_THREAD, blockIdx.x);
    if (tile.rows == 0) return;
    const u32 bins = 1u << args.bits;
    if (threadIdx.x < bins) in_bin[threadIdx.x] = 0;
    __syncthreads();
    const Key* keys = static_cast<const Key*>(args.keys) + tile.start;
    Key key[PER_THREAD];
#pragma unroll
    for (u32 at = 0; at < PER_THREAD; ++at) {
        const u32 row = at * THREADS + threadIdx.x;
        key[at] = row < tile.rows ? keys[row] : Key{};
    }
#pragma unroll
    for (u32 at = 0; at < PER_THREAD; ++at) {
        const u32 row = at * THREADS + threadIdx.x;
        if (row < tile.rows) atomicAdd(&in_bin[digit(mix(key[at]), args.skip, args.bits)], 1u);
    }
    __syncthreads();
    if (threadIdx.x < bins && in_bin[threadIdx.x] > 0)
        atomicAdd(&counts[(tile.parent << args.bits) + threadIdx.x], in_bin[threadIdx.x]);
}

// Destinations of a tile's rows in shared memory, by their rank in the order of partitions.
template <u32 TILE>
struct Places {
    u8 bins[TILE];
    // By partition: the start of its rows in the tile, and the distance from there to their output
    // index.
    u32 starts[BINS_MAX], shifts[BINS_MAX];

    __device__ u32 destination(u32 place) const { return shifts[bins[place]] + place; }
};

// Moves one column of a tile. Values are put in the order of partitions in shared memory, as many
// at a time as fit, and then written out.
template <typename Cell, u32 TILE, u32 PER_THREAD>
__device__ inline void move_column(const DovetailMove& move, const Tile& tile, const u16 (&place)[PER_THREAD],
                                   const Places<TILE>& places, u8* staged_bytes, u32 staged_size) {
    const u32 at_once = staged_size / sizeof(Cell);
    // Loads are issued together. Otherwise the compiler would keep each load behind a store that
    // might alias it.
    constexpr u32 LOADS = sizeof(Cell) <= 8 ? 4 : 1;
    static_assert(PER_THREAD % LOADS == 0, "whole groups of loads");
    Cell* to = static_cast<Cell*>(move.to);
    Cell* staged = reinterpret_cast<Cell*>(staged_bytes);
    for (u32 first = 0; first < tile.rows; first += at_once) {
#pragma unroll
        for (u32 part = 0; part < PER_THREAD; part += LOADS) {
            Cell value[LOADS];
#pragma unroll
            for (u32 load = 0; load < LOADS; ++load) {
                const u32 row = (part + load) * THREADS + threadIdx.x;
                if (row < tile.rows && place[part + load] - first < at_once) value[load] = value_of<Cell>(move, tile, row);
            }
#pragma unroll
            for (u32 load = 0; load < LOADS; ++load) {
                const u32 row = (part + load) * THREADS + threadIdx.x;
                if (row < tile.rows && place[part + load] - first < at_once) staged[place[part + load] - first] = value[load];
            }
        }
        __syncthreads();
        const u32 filled = min(at_once, tile.rows - first);
        for (u32 at = threadIdx.x; at < filled; at += THREADS) to[places.destination(first + at)] = staged[at];
        __syncthreads();
    }
}

// The first move is the keys. The keys and the next `EXTRA` moves, of type `Cell`, move together.
// All their loads are in flight while rows are ranked, and each row's destination is computed once.
// The other columns follow one by one.
template <typename Key, typename Cell, u32 EXTRA, u32 PER_THREAD>
struct Scatter {
    static constexpr u32 TILE = THREADS * PER_THREAD;
    static constexpr u32 STAGED_BYTES = TILE * (sizeof(Key) + EXTRA * sizeof(Cell));
    static constexpr u32 SHARED_BYTES = STAGED_BYTES + sizeof(Places<TILE>);
};

template <typename Key, typename Cell, u32 EXTRA, u32 PER_THREAD>
__global__ void __launch_bounds__(THREADS, 2) scatter(const __grid_constant__ DovetailPartition args, const u32* tile_starts,
                                                      u32* cursors) {
    using Sizes = Scatter<Key, Cell, EXTRA, PER_THREAD>;
    constexpr u32 TILE = Sizes::TILE;
    extern __shared__ __align__(16) u8 shared[];
    Key* staged_keys = reinterpret_cast<Key*>(shared);
    Cell* staged_cells = reinterpret_cast<Cell*>(staged_keys + TILE);
    Places<TILE>& places = *reinterpret_cast<Places<TILE>*>(shared + Sizes::STAGED_BYTES);
    const Tile tile = find_tile(args, tile_starts, TILE, blockIdx.x);
    if (tile.rows == 0) return;
    const u32 bins = 1u << args.bits;
    if (threadIdx.x < BINS_MAX) places.starts[threadIdx.x] = 0;

    Key key[PER_THREAD];
    Cell extra[EXTRA == 0 ? 1 : EXTRA][PER_THREAD];
    load_rows<Key, Cell, EXTRA>(args, tile, key, extra, [&](u32 row) { return row < tile.rows; });
    __syncthreads();
    u16 place[PER_THREAD];
    static_assert(TILE <= 65536, "places of a tile fit in their type");
    rank_rows(
        places.starts, place, [&](u32 at) { return digit(mix(key[at]), args.skip, args.bits); },
        [&](u32 at) { return at * THREADS + threadIdx.x < tile.rows; });
    __syncthreads();

    // The start of each partition in the tile, and the distance from there to its output index.
    const u32 count = threadIdx.x < bins ? places.starts[threadIdx.x] : 0;
    const u32 room = count > 0 ? atomicAdd(&cursors[(tile.parent << args.bits) + threadIdx.x], count) : 0;
    u32 total;
    const u32 start = sum_before(count, total);
    if (threadIdx.x < bins) {
        places.starts[threadIdx.x] = start;
        places.shifts[threadIdx.x] = room - start;
    }
    __syncthreads();
#pragma unroll
    for (u32 at = 0; at < PER_THREAD; ++at) {
        const u32 row = at * THREADS + threadIdx.x;
        if (row < tile.rows) {
            const u32 bin = digit(mix(key[at]), args.skip, args.bits);
            place[at] += u16(places.starts[bin]);
            places.bins[place[at]] = u8(bin);
            staged_keys[place[at]] = key[at];
            if constexpr (EXTRA > 0) {
#pragma unroll
                for (u32 column = 0; column < EXTRA; ++column) staged_cells[column * TILE + place[at]] = extra[column][at];
            }
        }
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < tile.rows; at += THREADS) {
        const u32 to = places.destination(at);
        static_cast<Key*>(args.moves[0].to)[to] = staged_keys[at];
        if constexpr (EXTRA > 0) {
#pragma unroll
            for (u32 column = 0; column < EXTRA; ++column)
                static_cast<Cell*>(args.moves[1 + column].to)[to] = staged_cells[column * TILE + at];
        }
    }
    if (args.move_count == 1 + EXTRA) return;
    __syncthreads();

    for (u32 index = 1 + EXTRA; index < args.move_count; ++index) {
        const DovetailMove& move = args.moves[index];
        const auto move_as = [&](auto cell) {
            move_column<decltype(cell), TILE>(move, tile, place, places, shared, Sizes::STAGED_BYTES);
        };
        switch (move.width) {
            case 1: move_as(u8{}); break;
            case 2: move_as(u16{}); break;
            case 4: move_as(u32{}); break;
            case 8: move_as(u64{}); break;
            case 16: move_as(Cell16{}); break;
            default: move_as(Cell32{}); break;
        }
    }
}

// Runs one pass, with `EXTRA` columns that move together with the keys.
template <typename Key, typename Cell, u32 EXTRA>
int run_pass(const DovetailPartition& args, Scratch& scratch, cudaStream_t stream) {
    // Rows per thread: as many as fit in a thread's registers at once.
    constexpr u32 ROW_BYTES = sizeof(Key) + EXTRA * sizeof(Cell), PER_THREAD = ROW_BYTES <= 8 ? 16 : ROW_BYTES <= 12 ? 12 : 8;
    using Sizes = Scatter<Key, Cell, EXTRA, PER_THREAD>;
    const u64 partitions = u64(args.parents) << args.bits;
    if constexpr (COMBINING_PAYS<Key, Cell, EXTRA>) {
        if (args.is_counted && args.parents == 1 && args.move_count == 1 + EXTRA) {
            const cudaError_t error = run_combined<Key, Cell, EXTRA>(args, scratch.cursors, scratch.counts, stream);
            if (error != cudaErrorNotSupported) return answered(error);
        }
    }
    cudaError_t error = cub::DeviceScan::ExclusiveSum(scratch.scan, scratch.scan_bytes, tiles_of(args, Sizes::TILE),
                                                      scratch.tile_starts, std::int64_t(args.parents) + 1, stream);
    if (error != cudaSuccess) return answered(error);
    // The maximum number of tiles. Blocks without a tile return at once.
    const u32 tiles = u32(args.rows / Sizes::TILE + args.parents);
    if (!args.is_counted) {
        error = cudaMemsetAsync(scratch.counts, 0, (partitions + 1) * 4, stream);
        if (error != cudaSuccess) return answered(error);
        count_digits<Key, PER_THREAD><<<tiles, THREADS, 0, stream>>>(args, scratch.tile_starts, scratch.counts);
        error = cub::DeviceScan::ExclusiveSum(scratch.scan, scratch.scan_bytes, scratch.counts, args.bounds,
                                              std::int64_t(partitions) + 1, stream);
        if (error != cudaSuccess) return answered(error);
    }
    error = cudaMemcpyAsync(scratch.cursors, args.bounds, partitions * 4, cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return answered(error);
    const auto kernel = scatter<Key, Cell, EXTRA, PER_THREAD>;
    error = allow_shared_bytes<Sizes::SHARED_BYTES>(kernel);
    if (error != cudaSuccess) return answered(error);
    kernel<<<tiles, THREADS, Sizes::SHARED_BYTES, stream>>>(args, scratch.tile_starts, scratch.cursors);
    return launched();
}

__global__ void find_largest(const u32* bounds, u32 partitions, u32* largest) {
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 of_warp = __reduce_max_sync(~0u, at < partitions ? bounds[at + 1] - bounds[at] : 0);
    if (threadIdx.x % 32 == 0) atomicMax(largest, of_warp);
}

// Puts moves of `width` directly after the keys' move. Returns their number, at most `most`.
u32 put_first(DovetailPartition& args, u32 width, u32 most) {
    DovetailMove* end = args.moves + args.move_count;
    DovetailMove* others =
        std::stable_partition(args.moves + 1, end, [&](const DovetailMove& move) { return move.width == width; });
    return std::min(most, u32(others - args.moves) - 1);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

uint64_t dovetail_partition_scratch_bytes(uint32_t parents, uint32_t bits) {
    const Scratch scratch(nullptr, parents, bits);
    return bytes_unless(scratch.error, scratch.bytes);
}

int dovetail_partition(const DovetailPartition* given, DovetailStream stream_handle) {
    const cudaStream_t stream = cudaStream_t(stream_handle);
    DovetailPartition args = *given;
    Scratch scratch(args.scratch, args.parents, args.bits);
    if (scratch.error != cudaSuccess) return answered(scratch.error);
    if (scratch.bytes > args.scratch_bytes) return int(cudaErrorInvalidValue);
    const int code = with_key(args.key_bytes, [&](auto key) {
        using Key = decltype(key);
        if constexpr (sizeof(Key) <= 8) {
            switch (put_first(args, 4, 2)) {
                case 2: return run_pass<Key, u32, 2>(args, scratch, stream);
                case 1: return run_pass<Key, u32, 1>(args, scratch, stream);
                default: break;
            }
            if (put_first(args, 8, 1) == 1) return run_pass<Key, u64, 1>(args, scratch, stream);
        }
        return run_pass<Key, u32, 0>(args, scratch, stream);
    });
    if (code != 0 || !args.largest) return code;
    const cudaError_t error = cudaMemsetAsync(args.largest, 0, 4, stream);
    if (error != cudaSuccess) return answered(error);
    const u32 partitions = args.parents << args.bits;
    find_largest<<<blocks_for(partitions, 256), 256, 0, stream>>>(args.bounds, partitions, args.largest);
    return launched();
}
