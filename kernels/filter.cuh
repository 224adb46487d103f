// Computes the bits of a filter that a key sets.

#pragma once

#include "common.cuh"

namespace dovetail {

// Mixes the bits that tables use for slots once more. Keys of four bytes have too few bits for a
// word and a pattern.
__host__ __device__ inline u64 filter_hash(u32 mixed) { return mix(u64(mixed)); }
__host__ __device__ inline u64 filter_hash(u64 mixed) { return mix(mixed); }
__host__ __device__ inline u64 filter_hash(Key16 mixed) { return mix(mixed.low ^ mixed.high); }

struct FilterBits {
    u64 word, pattern;

    template <typename Key>
    __host__ __device__ FilterBits(Key mixed, u64 word_mask) {
        const u64 hash = filter_hash(mixed);
        word = (hash >> 24) & word_mask;
        pattern = 1ull << (hash & 63) | 1ull << (hash >> 6 & 63) | 1ull << (hash >> 12 & 63) | 1ull << (hash >> 18 & 63);
    }
};

}  // namespace dovetail
