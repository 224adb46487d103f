// Small transfers for which copies would be too slow. A copy between host memory and the GPU queues
// behind all copies queued before it on any stream, and result columns are megabytes. Each copy
// within GPU memory takes as long as a kernel.

#include "common.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 256;

__global__ void read_back(const __grid_constant__ DovetailReadBack args) {
    const u8* from = static_cast<const u8*>(args.from);
    u8* to = static_cast<u8*>(args.to);
    // Copies whole words if both addresses are aligned, because each store to host memory crosses
    // the link separately.
    const bool has_words = (std::uintptr_t(from) | std::uintptr_t(to)) % 4 == 0;
    const u32 words = has_words ? args.bytes / 4 : 0;
    for (u32 word = threadIdx.x; word < words; word += THREADS)
        reinterpret_cast<u32*>(to)[word] = reinterpret_cast<const u32*>(from)[word];
    for (u32 byte = 4 * words + threadIdx.x; byte < args.bytes; byte += THREADS) to[byte] = from[byte];
}

__global__ void write_words(const __grid_constant__ DovetailWriteWords args) {
    if (threadIdx.x < args.count) args.to[threadIdx.x] = args.words[threadIdx.x];
}

// Each row of blocks (`blockIdx.y`) copies one list.
__global__ void concat(const __grid_constant__ DovetailConcat args) {
    const DovetailList list = args.lists[blockIdx.y];
    u32* to = args.to + list.start;
    for (u64 at = u64(blockIdx.x) * THREADS + threadIdx.x; at < list.count; at += u64(gridDim.x) * THREADS) to[at] = list.from[at];
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_read_back(const DovetailReadBack* args, DovetailStream stream) {
    read_back<<<1, THREADS, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}

int dovetail_write_words(const DovetailWriteWords* args, DovetailStream stream) {
    if (args->count > DOVETAIL_WORDS_MAX) return int(cudaErrorInvalidValue);
    write_words<<<1, DOVETAIL_WORDS_MAX, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}

int dovetail_concat(const DovetailConcat* args, DovetailStream stream) {
    if (args->list_count == 0) return 0;
    u64 longest = 0;
    for (u32 list = 0; list < args->list_count; ++list) longest = longest > args->lists[list].count ? longest : args->lists[list].count;
    // Four numbers per thread, or more for long lists: BLOCKS_MAX blocks keep the GPU busy.
    constexpr u32 BLOCKS_MAX = 1024;
    const u32 blocks = blocks_for(longest, THREADS * 4);
    const dim3 grid(blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX, args->list_count);
    concat<<<grid, THREADS, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}
