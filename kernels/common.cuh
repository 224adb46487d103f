// Shared parts of the kernels: keys as numbers, their bijective mixing, and helpers for launches.
//
// Keys are unsigned integers of 4, 8 or 16 bytes. Mixing is a bijection on keys of each width, so
// equal mixed keys mean equal keys. Dense, sparse and patterned keys all spread evenly. Partitions
// use the top bits of the mixed key and tables the bottom bits, so that rows of one partition still
// spread over a table. The host device mixes in the same way (src/device/host/hash.rs).

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

// The position of a missing row.
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

// Three rounds of a Feistel network over the halves: a bijection for any round function.
__host__ __device__ inline Key16 mix(Key16 key) {
    key.high ^= mix(key.low ^ 0x243f6a8885a308d3ull);
    key.low ^= mix(key.high ^ 0x13198a2e03707344ull);
    key.high ^= mix(key.low ^ 0xa4093822299f31d0ull);
    return key;
}

// Returns the digit of a mixed key: `bits` bits after the `skip` most significant ones. `bits` is 1
// to 32.
__host__ __device__ inline u32 digit(u32 mixed, u32 skip, u32 bits) { return (mixed << skip) >> (32 - bits); }
__host__ __device__ inline u32 digit(u64 mixed, u32 skip, u32 bits) { return u32((mixed << skip) >> (64 - bits)); }
__host__ __device__ inline u32 digit(Key16 mixed, u32 skip, u32 bits) { return digit(mixed.high, skip, bits); }

// Returns the lowest bits of a mixed key.
__host__ __device__ inline u32 low_bits(u32 mixed) { return mixed; }
__host__ __device__ inline u32 low_bits(u64 mixed) { return u32(mixed); }
__host__ __device__ inline u32 low_bits(Key16 mixed) { return u32(mixed.low); }

// Returns the tag of a mixed key. For keys of 8 and 16 bytes, tag bits choose no partition and in
// most tables no slot. They distinguish most unequal keys of a slot.
__host__ __device__ inline u32 tag_bits(u32 mixed) { return mixed; }
__host__ __device__ inline u32 tag_bits(u64 mixed) { return u32(mixed >> 24); }
__host__ __device__ inline u32 tag_bits(Key16 mixed) { return u32(mixed.low >> 24); }

// Returns entry `at` of a list of positions. Without a list, positions are consecutive from
// `start`.
__host__ __device__ inline u32 position_at(const u32* positions, u32 start, u64 at) {
    return positions ? positions[at] : start + u32(at);
}

// True if a row is valid by an Arrow bitmap (lowest bit of a byte first). Without a bitmap all rows
// are valid.
__host__ __device__ inline bool is_valid(const u8* validity, u64 row) { return !validity || (validity[row / 8] >> (row % 8) & 1); }

// Number of pieces of each partition, as input of a scan. A partition of more than `whole_rows`
// rows is divided into pieces of up to `piece_rows` rows. `whole_rows` is at least `piece_rows`. A
// smaller partition is one piece, or none if it is empty. `bounds`: starts of the partitions, and
// the end of the last one. The entry after the last partition is 0, so that a scan ends with the
// sum.
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

// Returns the blocks of `threads` threads for one thread per row. At least one, because an empty
// grid is an error.
inline u32 blocks_for(u64 rows, u32 threads) { return u32(rows == 0 ? 1 : ceil_div<u64>(rows, threads)); }

// Returns the error of an entry point's launch, if any. A later call reports errors of running
// kernels.
inline int launched() { return int(cudaGetLastError()); }

// Returns a call's error code and clears the error that the runtime remembers. Otherwise this
// thread's next launch would report it as its own.
inline int answered(cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();
    return int(error);
}

// Returns the scratch bytes of a call. After an error it returns 2^64 - 1, which no device can
// allocate.
inline std::uint64_t bytes_unless(cudaError_t error, size_t bytes) { return answered(error) == 0 ? bytes : ~std::uint64_t(0); }

// Divides memory into pieces aligned to 256 bytes. Starting from null, it computes their total
// size.
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

// Returns an attribute of the current GPU, or 0 if the query fails.
inline u32 limit_of(cudaDeviceAttr attribute) {
    int device = 0, limit = 0;
    if (answered(cudaGetDevice(&device)) != 0 || answered(cudaDeviceGetAttribute(&limit, attribute, device)) != 0) return 0;
    return u32(limit);
}

// Maximum bytes of a kernel's shared variables, in addition to its dynamic shared memory.
constexpr u32 SHARED_VARIABLES_BYTES_MAX = 1 << 10;

// Lets a kernel use `BYTES` of dynamic shared memory, which every supported GPU has.
template <u32 BYTES, typename Kernel>
inline cudaError_t allow_shared_bytes(Kernel kernel) {
    static_assert(BYTES + SHARED_VARIABLES_BYTES_MAX <= DOVETAIL_SHARED_BYTES_MAX, "a kernel fits in every supported GPU");
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
}

// Calls `body` with a value of the key type of `key_bytes` bytes.
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
// Wide decimals are aligned to at least 16 bytes, so they are moved in two halves.
struct alignas(16) Cell32 {
    u64 words[4];
};

// Calls `body` with a value of the cell type of `width` bytes.
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

// Returns the row in low..high that contains item `number`, given the first item of each row: the
// last row that starts at or before it. A row without items starts where the next one does.
__device__ inline u64 row_of(const u64* starts, u64 low, u64 high, u64 number) {
    while (high - low > 1) {
        const u64 middle = low + (high - low) / 2;
        if (starts[middle] <= number) low = middle;
        else high = middle;
    }
    return low;
}

// Returns the sum over a warp, in every lane.
template <typename T>
__device__ inline T warp_sum(T value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// Returns the sum over the lanes of a warp up to and including this one.
__device__ inline u32 warp_inclusive_sum(u32 value) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, value, distance);
        if (lane >= distance) value += other;
    }
    return value;
}

// Adds each thread's matches to the totals of a match.
struct Tally {
    u64 total = 0;
    u32 matched = 0, longest = 0;

    __device__ void add(u32 count) {
        total += count;
        matched += count > 0;
        longest = count > longest ? count : longest;
    }

    // Called by all threads of a block, which must consist of whole warps. All blocks update the
    // same few words, and the GPU serializes these atomics (1.3 billion/s on an H200). So each
    // block updates them once, and should cover about a thousand rows or more.
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
