// What the GPU benchmarks share: errors that end the program, memory, the hash that spreads keys, and an order that is none.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                                         \
    do {                                                                                                    \
        cudaError_t error_ = (call);                                                                        \
        if (error_ != cudaSuccess) {                                                                        \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
            std::exit(1);                                                                                   \
        }                                                                                                   \
    } while (0)

using u32 = std::uint32_t;
using u64 = unsigned long long;

// A bijection of 32 bits (the finalizer of MurmurHash3): equal hashes mean equal keys, and dense and patterned keys spread
// over bins alike.
__host__ __device__ inline u32 mix(u32 key) {
    key ^= key >> 16;
    key *= 0x85ebca6bu;
    key ^= key >> 13;
    key *= 0xc2b2ae35u;
    return key ^ (key >> 16);
}

// A permutation of 0 .. 2^bits - 1: two rounds of multiplication and shift, each a bijection.
__host__ __device__ inline u32 shuffled(u32 at, int bits) {
    const u32 mask = bits == 32 ? ~0u : (1u << bits) - 1;
    at = (at * 0x9e3779b1u) & mask;
    at ^= at >> (bits / 2);
    at = (at * 0x85ebca6bu) & mask;
    return at ^ (at >> (bits / 2));
}

// The sum over the lanes of a warp up to this one.
__device__ inline u32 warp_inclusive_sum(u32 value) {
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(~0u, value, distance);
        if (threadIdx.x % 32 >= distance) value += other;
    }
    return value;
}

template <typename T>
static T* device_memory(size_t count) {
    void* pointer = nullptr;
    CHECK(cudaMalloc(&pointer, std::max<size_t>(count, 4) * sizeof(T)));
    return static_cast<T*>(pointer);
}
