// A blocked Bloom filter over build keys: four bits of one 64-bit word for each key, so that a key is entered by one atomic and
// looked up by one load. At 12 bits a key, about one key in thirty that matches nothing passes. It pays as long as it stays
// in the second-level cache; the planner knows when few rows will match. Which keys pass is found by select.cu.

#include "filter.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 256;

template <typename Key>
__global__ void build(DovetailFilterBuild args) {
    const u64 row = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (row >= args.rows) return;
    const FilterBits bits(mix(static_cast<const Key*>(args.keys)[row]), args.word_mask);
    u64* word = reinterpret_cast<u64*>(args.words) + bits.word;
    // Keys that repeat find their bits set.
    if ((*const_cast<const volatile u64*>(word) & bits.pattern) != bits.pattern) atomicOr(word, bits.pattern);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_filter_build(const DovetailFilterBuild* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        build<decltype(key)><<<blocks_for(args->rows, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}
