// Joins partitions with distinct build keys and little payload. Joined rows are written from
// registers and shared memory.
//
// A block takes one partition. Asynchronous copies, which need no registers and are all in flight
// at once, move its build keys and payload into shared memory. A thread holds two or four probe
// rows and their payload in registers. That is small enough for 64 warps per multiprocessor (48
// with 8-byte keys), which hide each other's latency. It takes 1.8 ms for 2^27 with 2^27 rows of 12
// bytes. The general kernel (join_partitions.cu) takes 2.7 ms with half as many warps (tuning.md).
//
// Units that are not simple are left to that kernel: a partition with more rows than the table
// holds, and a partition's probe rows from the first tile in which a row has several matches. If
// many units are left over, later blocks return at once.

#pragma once

#include <cuda_pipeline.h>

#include "common.cuh"

namespace dovetail {
namespace {

constexpr u32 ROWS = DOVETAIL_JOIN_ROWS, BUCKETS = 4096;
constexpr u32 NONE = 0xffff;

static_assert(ROWS < NONE, "rows of a table are 16-bit numbers");

// Returns this block's unit of the list, or its partition.
__device__ inline DovetailMatchUnit unit_of_block(const DovetailJoinPartitions& args) {
    if (args.units) return args.units[blockIdx.x];
    return {blockIdx.x, args.probe_bounds[blockIdx.x], args.probe_bounds[blockIdx.x + 1]};
}

namespace direct {

constexpr u32 THREADS = 512;
// Longest chain that is searched. With distinct keys and five rows for eight buckets, hardly any
// chain is as long. Units with longer chains are left over.
constexpr u32 CHAIN_MAX = 24;
// Units left over beyond which no block begins another unit.
constexpr u32 LEFT_OVER_MAX = 64;

template <typename Key, typename Cell, u32 COLUMNS>
struct alignas(16) Shared {
    u32 heads[BUCKETS];
    Key keys[ROWS];
    Cell payload[COLUMNS][ROWS];
    // Next row of each row's chain.
    u16 next[ROWS];
};

// Columns of each side: the probe side's keys, if `has_keys`, then `build` and `probe` columns.
struct Columns {
    u32 has_keys, build, probe;
};

template <typename Key, typename Cell, u32 COLUMNS, u32 PER_THREAD>
__global__ void __launch_bounds__(THREADS, sizeof(Key) == 4 ? 4 : 3) join(const __grid_constant__ DovetailJoinPartitions args,
                                                                         Columns of) {
    constexpr u32 TILE = THREADS * PER_THREAD;
    extern __shared__ __align__(16) u8 shared[];
    Shared<Key, Cell, COLUMNS>& table = *reinterpret_cast<Shared<Key, Cell, COLUMNS>*>(shared);
    __shared__ u32 warp_pairs[THREADS / 32];
    __shared__ u64 tile_place;
    const DovetailMatchUnit unit = unit_of_block(args);
    const u32 build_start = args.build_bounds[unit.partition], rows = args.build_bounds[unit.partition + 1] - build_start;
    if (unit.start == unit.end || rows == 0) return;
    const auto leave_over = [&](u32 from) {
        if (threadIdx.x > 0) return;
        const u64 at = atomicAdd(reinterpret_cast<u64*>(&args.totals->left_over), u64(1));
        args.left_over[at] = {unit.partition, from, unit.end};
    };
    const bool is_much = *reinterpret_cast<volatile u64*>(&args.totals->left_over) > LEFT_OVER_MAX;
    // A block-wide vote, because the number may change between the threads' reads.
    if (__syncthreads_or(rows > ROWS || is_much)) return leave_over(unit.start);

    const Key* build = static_cast<const Key*>(args.build_keys) + build_start;
    const Key* probe = static_cast<const Key*>(args.probe_keys);
    const DovetailJoinColumn *of_build = args.columns + of.has_keys, *of_probe = of_build + of.build;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 column = 0; column < of.build; ++column) {
        const Cell* from = static_cast<const Cell*>(of_build[column].from) + build_start;
        for (u32 row = threadIdx.x; row < rows; row += THREADS)
            __pipeline_memcpy_async(&table.payload[column][row], from + row, sizeof(Cell));
    }
    for (u32 row = threadIdx.x; row < rows; row += THREADS) __pipeline_memcpy_async(&table.keys[row], build + row, sizeof(Key));
    __pipeline_commit();
    for (u32 four = threadIdx.x; four < BUCKETS / 4; four += THREADS)
        reinterpret_cast<uint4*>(table.heads)[four] = {NONE, NONE, NONE, NONE};
    __pipeline_wait_prior(0);
    __syncthreads();
    for (u32 row = threadIdx.x; row < rows; row += THREADS)
        table.next[row] = u16(atomicExch(&table.heads[low_bits(mix(table.keys[row])) % BUCKETS], row));
    __syncthreads();

    for (u32 tile = unit.start; tile < unit.end; tile += TILE) {
        Key keys[PER_THREAD];
        Cell payload[COLUMNS][PER_THREAD];
#pragma unroll
        for (u32 at = 0; at < PER_THREAD; ++at) {
            const u32 row = tile + at * THREADS + threadIdx.x;
            if (row >= unit.end) continue;
            keys[at] = probe[row];
#pragma unroll
            for (u32 column = 0; column < COLUMNS; ++column)
                if (column < of.probe) payload[column][at] = static_cast<const Cell*>(of_probe[column].from)[row];
        }
        u32 entry[PER_THREAD], in_warp = 0;
        bool is_simple = true;
#pragma unroll
        for (u32 at = 0; at < PER_THREAD; ++at) {
            entry[at] = NONE;
            if (tile + at * THREADS + threadIdx.x < unit.end) {
                u32 found = table.heads[low_bits(mix(keys[at])) % BUCKETS];
                for (u32 step = 0; found != NONE && step < CHAIN_MAX; ++step) {
                    if (table.keys[found] == keys[at]) {
                        is_simple &= entry[at] == NONE;
                        entry[at] = found;
                    }
                    found = table.next[found];
                }
                is_simple &= found == NONE;
            }
            in_warp += __popc(__ballot_sync(~0u, entry[at] != NONE));
        }
        if (lane == 0) warp_pairs[warp] = in_warp;
        if (!__syncthreads_and(is_simple)) return leave_over(tile);
        if (warp == 0) {
            const u32 of_warp = lane < THREADS / 32 ? warp_pairs[lane] : 0;
            const u32 inclusive = warp_inclusive_sum(of_warp);
            if (lane < THREADS / 32) warp_pairs[lane] = inclusive - of_warp;
            if (lane == 31) tile_place = atomicAdd(reinterpret_cast<u64*>(&args.totals->pairs), u64(inclusive));
        }
        __syncthreads();
        u64 place = tile_place + warp_pairs[warp];
#pragma unroll
        for (u32 at = 0; at < PER_THREAD; ++at) {
            const u32 matched = __ballot_sync(~0u, entry[at] != NONE);
            const u64 to = place + __popc(matched & ((1u << lane) - 1));
            place += __popc(matched);
            // Pairs beyond the room are counted only.
            if (entry[at] == NONE || to >= args.room) continue;
            if (of.has_keys) static_cast<Key*>(args.columns[0].to)[to] = keys[at];
#pragma unroll
            for (u32 column = 0; column < COLUMNS; ++column) {
                if (column < of.build) static_cast<Cell*>(of_build[column].to)[to] = table.payload[column][entry[at]];
                if (column < of.probe) static_cast<Cell*>(of_probe[column].to)[to] = payload[column][at];
            }
        }
        // All threads read the output indices before the next tile overwrites them.
        __syncthreads();
    }
}

template <typename Key, typename Cell, u32 COLUMNS, u32 PER_THREAD>
int run(const DovetailJoinPartitions& args, Columns columns, cudaStream_t stream) {
    if (columns.build > COLUMNS || columns.probe > COLUMNS) return int(cudaErrorInvalidValue);
    constexpr u32 shared_bytes = sizeof(Shared<Key, Cell, COLUMNS>);
    const auto kernel = join<Key, Cell, COLUMNS, PER_THREAD>;
    const cudaError_t error = allow_shared_bytes<shared_bytes>(kernel);
    if (error != cudaSuccess) return answered(error);
    kernel<<<args.unit_count, THREADS, shared_bytes, stream>>>(args, columns);
    return launched();
}

}  // namespace direct

inline int run_direct(const DovetailJoinPartitions& args, cudaStream_t stream) {
    direct::Columns columns{};
    u32 width = 4;
    for (u32 index = 0; index < args.column_count; ++index) {
        const DovetailJoinColumn& column = args.columns[index];
        if (index == 0 && column.of_probe && column.from == args.probe_keys) {
            columns.has_keys = 1;
            continue;
        }
        const bool is_in_place = column.from && (columns.build + columns.probe == 0 || column.width == width);
        if (!is_in_place || (!column.of_probe && columns.probe > 0)) return int(cudaErrorInvalidValue);
        width = column.width;
        ++(column.of_probe ? columns.probe : columns.build);
    }
    // Four rows per thread for keys and one 4-byte column per side: the registers suffice
    // (tuning.md).
    const bool is_narrow = width == 4 && columns.build <= 1 && columns.probe <= 1;
    if (width != 4 && width != 8) return int(cudaErrorInvalidValue);
    switch (args.key_bytes) {
        case 4:
            if (is_narrow) return direct::run<u32, u32, 1, 4>(args, columns, stream);
            return width == 8 ? direct::run<u32, u64, 1, 2>(args, columns, stream) : direct::run<u32, u32, 2, 2>(args, columns, stream);
        case 8:
            return width == 8 ? direct::run<u64, u64, 1, 2>(args, columns, stream) : direct::run<u64, u32, 2, 2>(args, columns, stream);
        default: return int(cudaErrorInvalidValue);
    }
}

}  // namespace
}  // namespace dovetail
