// Small transfers for which copies would be too slow. A copy between host memory and the GPU queues
// behind all copies queued before it on any stream, and result columns are megabytes.

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
