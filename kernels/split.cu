// Splits pairs of matched rows by the part of the build side that they refer to. One kernel counts
// the pairs per part. In a second kernel each block reserves space for its tile's pairs in all
// parts at once.

#include "common.cuh"

namespace dovetail {
namespace {

// Pairs per thread. 8 is slower, 2 equally fast (tuning.md).
constexpr u32 THREADS = 512, PER_THREAD = 4, TILE = THREADS * PER_THREAD;
constexpr u32 PARTS = DOVETAIL_PARTS_MAX;
static_assert(PARTS == 32, "a warp has a lane for each part");

// Blocks of the counting kernel: several per multiprocessor. Each adds its counts once.
constexpr u32 COUNTING_BLOCKS = 1024;

__global__ void __launch_bounds__(THREADS) count(DovetailSplit args) {
    __shared__ u32 counts[PARTS];
    if (threadIdx.x < PARTS) counts[threadIdx.x] = 0;
    __syncthreads();
    const u64 stride = u64(gridDim.x) * THREADS;
    for (u64 at = u64(blockIdx.x) * THREADS + threadIdx.x; at < args.pairs; at += stride)
        atomicAdd(&counts[args.build[at] >> args.part_bits], 1u);
    __syncthreads();
    if (threadIdx.x < PARTS && counts[threadIdx.x]) atomicAdd(&args.counts[threadIdx.x], counts[threadIdx.x]);
}

__global__ void __launch_bounds__(THREADS) split(DovetailSplit args) {
    __shared__ u32 counts[PARTS], starts[PARTS];
    if (threadIdx.x < PARTS) counts[threadIdx.x] = 0;
    __syncthreads();
    const u64 tile = u64(blockIdx.x) * TILE;
    u32 build[PER_THREAD], rank[PER_THREAD];
#pragma unroll
    for (u32 item = 0; item < PER_THREAD; ++item) {
        const u64 at = tile + item * THREADS + threadIdx.x;
        build[item] = at < args.pairs ? args.build[at] : 0;
    }
#pragma unroll
    for (u32 item = 0; item < PER_THREAD; ++item) {
        const u64 at = tile + item * THREADS + threadIdx.x;
        if (at < args.pairs) rank[item] = atomicAdd(&counts[build[item] >> args.part_bits], 1u);
    }
    __syncthreads();
    if (threadIdx.x < PARTS) {
        const u32 all = args.counts[threadIdx.x];
        u32 until = all;
#pragma unroll
        for (u32 distance = 1; distance < PARTS; distance *= 2) {
            const u32 before = __shfl_up_sync(0xffffffffu, until, distance);
            if (threadIdx.x >= distance) until += before;
        }
        const u32 own = counts[threadIdx.x];
        starts[threadIdx.x] = until - all + (own ? atomicAdd(&args.taken[threadIdx.x], own) : 0);
    }
    __syncthreads();
#pragma unroll
    for (u32 item = 0; item < PER_THREAD; ++item) {
        const u64 at = tile + item * THREADS + threadIdx.x;
        if (at >= args.pairs) continue;
        const u32 part = build[item] >> args.part_bits;
        const u32 place = starts[part] + rank[item];
        args.build_split[place] = build[item] - (part << args.part_bits);
        args.probe_split[place] = args.probe ? args.probe[at] : args.probe_start + u32(at);
    }
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_split(const DovetailSplit* args, DovetailStream stream) {
    const u32 blocks = blocks_for(args->pairs, TILE);
    count<<<blocks < COUNTING_BLOCKS ? blocks : COUNTING_BLOCKS, THREADS, 0, cudaStream_t(stream)>>>(*args);
    split<<<blocks, THREADS, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}
