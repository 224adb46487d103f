// A blocked Bloom filter over build keys. Each key sets four bits of one 64-bit word, so one atomic
// inserts it and one load looks it up. At 12 bits per key, about one in thirty keys without a match
// passes. The filter pays while it fits in the L2 cache and few rows match. The planner decides if
// a join has one. select.cu lists the keys that pass.

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
    // Repeated keys find their bits set and skip the atomic.
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
