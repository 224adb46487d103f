// What the kernels share: keys as numbers and their bijective mixing, and how a kernel is launched.
//
// Keys are unsigned integers of 4, 8 or 16 bytes. Mixing is a bijection on keys of each width, so that equal mixed keys mean
// equal keys, and dense, sparse and patterned keys spread alike. Partitions take bits from the top of the mixed key, tables
// from the bottom, so that rows of one partition still spread over a table. The host device mixes in the same way
// (src/device/host/hash.rs).

#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "dovetail_kernels.h"

namespace dovetail {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
// Atomics exist for this 64-bit type, and not for std::uint64_t.
using u64 = unsigned long long;

static_assert(sizeof(u64) == 8, "64 bits");

// The position that means "no row".
constexpr u32 NO_ROW = 0xffffffffu;

struct alignas(16) Key16 {
    u64 low, high;
};

__host__ __device__ inline bool operator==(Key16 a, Key16 b) { return a.low == b.low && a.high == b.high; }
__host__ __device__ inline bool operator!=(Key16 a, Key16 b) { return !(a == b); }
__host__ __device__ inline bool operator<(Key16 a, Key16 b) { return a.high != b.high ? a.high < b.high : a.low < b.low; }

// The finalizers of MurmurHash3 (Austin Appleby, public domain).
__host__ __device__ inline u32 mix(u32 key) {
    key ^= key >> 16;
    key *= 0x85ebca6bu;
    key ^= key >> 13;
    key *= 0xc2b2ae35u;
    return key ^ (key >> 16);
}

__host__ __device__ inline u64 mix(u64 key) {
    key ^= key >> 33;
    key *= 0xff51afd7ed558ccdull;
    key ^= key >> 33;
    key *= 0xc4ceb9fe1a85ec53ull;
    return key ^ (key >> 33);
}

// Three rounds of a Feistel network over the halves: a bijection whatever its round function is.
__host__ __device__ inline Key16 mix(Key16 key) {
    key.high ^= mix(key.low ^ 0x243f6a8885a308d3ull);
    key.low ^= mix(key.high ^ 0x13198a2e03707344ull);
    key.high ^= mix(key.low ^ 0xa4093822299f31d0ull);
    return key;
}

// `bits` bits of a mixed key, after the `skip` most significant ones. `bits` is 1 to 32.
__host__ __device__ inline u32 digit(u32 mixed, u32 skip, u32 bits) { return (mixed << skip) >> (32 - bits); }
__host__ __device__ inline u32 digit(u64 mixed, u32 skip, u32 bits) { return u32((mixed << skip) >> (64 - bits)); }
__host__ __device__ inline u32 digit(Key16 mixed, u32 skip, u32 bits) { return digit(mixed.high, skip, bits); }

// The lowest bits of a mixed key.
__host__ __device__ inline u32 low_bits(u32 mixed) { return mixed; }
__host__ __device__ inline u32 low_bits(u64 mixed) { return u32(mixed); }
__host__ __device__ inline u32 low_bits(Key16 mixed) { return u32(mixed.low); }

// Bits that neither choose a partition nor, in most tables, a slot: they tell most unequal keys of a slot apart.
__host__ __device__ inline u32 tag_bits(u32 mixed) { return mixed; }
__host__ __device__ inline u32 tag_bits(u64 mixed) { return u32(mixed >> 24); }
__host__ __device__ inline u32 tag_bits(Key16 mixed) { return u32(mixed.low >> 24); }

// The position at a place of a list or, without one, of rows that follow on each other from `start` on.
__host__ __device__ inline u32 position_at(const u32* positions, u32 start, u64 at) {
    return positions ? positions[at] : start + u32(at);
}

// Whether a row has a value, by a bitmap of Arrow's, where the lowest bit of a byte comes first; without one all have.
__host__ __device__ inline bool is_valid(const u8* validity, u64 row) { return !validity || (validity[row / 8] >> (row % 8) & 1); }

// For scans: into how many pieces of up to so many rows each partition is divided that has more than `whole_rows`, of which there are no
// fewer; others are one piece, or none. `bounds`: where partitions start and the last one ends. There is one number more than partitions,
// which is none, so that a scan ends with the sum.
struct PiecesOf {
    const u32* bounds;
    u32 partitions, whole_rows, piece_rows;
    __host__ __device__ u32 operator()(u32 partition) const {
        if (partition >= partitions) return 0;
        const u32 rows = bounds[partition + 1] - bounds[partition];
        return rows <= whole_rows ? u32(rows > 0) : rows / piece_rows + u32(rows % piece_rows > 0);
    }
};

template <typename T>
inline T ceil_div(T value, T by) {
    return (value + by - 1) / by;
}

// Blocks of `threads` for one thread per row; grids have at least one block, because none is an error.
inline u32 blocks_for(u64 rows, u32 threads) { return u32(rows == 0 ? 1 : ceil_div<u64>(rows, threads)); }

// What an entry point answers: the error of its launch, if any. Errors of running kernels come with a later call.
inline int launched() { return int(cudaGetLastError()); }

// What an entry point answers for a call that failed or did not. The runtime remembers an error until it is asked for it: the next launch
// of this thread must not take it for its own.
inline int answered(cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();
    return int(error);
}

// What an entry point answers that was asked how much scratch memory a call takes: nobody has so much as it says after an error.
inline std::uint64_t bytes_unless(cudaError_t error, size_t bytes) { return answered(error) == 0 ? bytes : ~std::uint64_t(0); }

// Divides memory into pieces that begin at multiples of 256 bytes. From null on, it finds how much they take together.
struct Divider {
    u8 *start, *at;

    explicit Divider(void* memory) : start(static_cast<u8*>(memory)), at(start) {}

    template <typename T>
    T* take(u64 count) {
        u8* taken = at;
        at += ceil_div<u64>(count * sizeof(T), 256) * 256;
        return reinterpret_cast<T*>(taken);
    }

    size_t bytes() const { return size_t(at - start); }
};

// What the current GPU has of something; nothing where it does not say.
inline u32 limit_of(cudaDeviceAttr attribute) {
    int device = 0, limit = 0;
    if (answered(cudaGetDevice(&device)) != 0 || answered(cudaDeviceGetAttribute(&limit, attribute, device)) != 0) return 0;
    return u32(limit);
}

// Calls `body` with a value of the type of keys of that many bytes.
template <typename Body>
inline int with_key(u32 key_bytes, Body body) {
    switch (key_bytes) {
        case 4: return body(u32{});
        case 8: return body(u64{});
        case 16: return body(Key16{});
        default: return int(cudaErrorInvalidValue);
    }
}

struct alignas(16) Cell16 {
    u64 words[2];
};
// Wide decimals lie at multiples of 16 bytes at least, so that they are moved in two halves.
struct alignas(16) Cell32 {
    u64 words[4];
};

// Calls `body` with a value of a type of that many bytes.
template <typename Body>
inline int with_cell(u32 width, Body body) {
    switch (width) {
        case 1: return body(u8{});
        case 2: return body(u16{});
        case 4: return body(u32{});
        case 8: return body(u64{});
        case 16: return body(Cell16{});
        case 32: return body(Cell32{});
        default: return int(cudaErrorInvalidValue);
    }
}

// The row in low..high that has the thing of that number, where each row's things start behind those of the rows before: the last row that
// starts at or before it. Rows without things start where the next one does.
__device__ inline u64 row_of(const u64* starts, u64 low, u64 high, u64 number) {
    while (high - low > 1) {
        const u64 middle = low + (high - low) / 2;
        if (starts[middle] <= number) low = middle;
        else high = middle;
    }
    return low;
}

// The sum over a warp, in every lane.
template <typename T>
__device__ inline T warp_sum(T value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// The sum over the lanes of a warp up to this one.
__device__ inline u32 warp_inclusive_sum(u32 value) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, value, distance);
        if (lane >= distance) value += other;
    }
    return value;
}

// Adds what each thread found to the totals of a match.
struct Tally {
    u64 total = 0;
    u32 matched = 0, longest = 0;

    __device__ void add(u32 count) {
        total += count;
        matched += count > 0;
        longest = count > longest ? count : longest;
    }

    // Called by all threads of a block, of which there are whole warps. All blocks add to the same few words, which the GPU does one
    // after the other (1.3 G/s on an H200): a block adds once, and had better have some thousand rows.
    __device__ void store(DovetailMatchTotals* totals) const {
        __shared__ u64 total_of[32];
        __shared__ u32 matched_of[32], longest_of[32];
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const u64 total_of_warp = warp_sum(total);
        const u32 matched_of_warp = __reduce_add_sync(0xffffffffu, matched);
        const u32 longest_of_warp = __reduce_max_sync(0xffffffffu, longest);
        if (lane == 0) {
            total_of[warp] = total_of_warp;
            matched_of[warp] = matched_of_warp;
            longest_of[warp] = longest_of_warp;
        }
        __syncthreads();
        if (warp > 0) return;
        const bool is_warp = lane < blockDim.x / 32;
        const u64 total_of_block = warp_sum(is_warp ? total_of[lane] : 0);
        const u32 matched_of_block = __reduce_add_sync(0xffffffffu, is_warp ? matched_of[lane] : 0);
        const u32 longest_of_block = __reduce_max_sync(0xffffffffu, is_warp ? longest_of[lane] : 0);
        if (lane == 0 && matched_of_block > 0) {
            atomicAdd(reinterpret_cast<u64*>(&totals->total), total_of_block);
            atomicAdd(reinterpret_cast<u64*>(&totals->matched_rows), u64(matched_of_block));
            atomicMax(&totals->longest, longest_of_block);
        }
    }
};

}  // namespace dovetail
