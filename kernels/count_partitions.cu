// Counts the partitions of two radix passes at once. Each block keeps a histogram of up to 2^16
// partitions in shared memory.
//
//   keys ─► histogram per block, 16 bits per partition ─► sums ─► bounds of the second pass
//        ─► every n-th bound: bounds of the first pass
//
// With a histogram per pass, each pass would read all keys once more. Each block would also add its
// counts to the global histogram after each tile. That takes 0.44 ms for 2^27 keys of 4 bytes; this
// kernel takes 0.2 ms (tuning.md).

#include <cub/device/device_scan.cuh>

#include "common.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 1024;
// Keys per block, at least: with fewer keys, another block is not worth its histogram.
constexpr u64 KEYS_MIN = 4 * THREADS;
// Count at which a 16-bit counter is carried to the global counts: half its range. Other threads
// may add before the carry is subtracted. A barrier every ROUNDS rounds keeps them from adding the
// other half.
constexpr u32 CARRY = 0x8000;

// Words of a histogram. Two partitions share a word, because there is no atomic add on 16-bit
// integers.
__host__ __device__ constexpr u32 words_of(u32 bits) { return bits == 0 ? 1 : 1u << (bits - 1); }

u32 blocks_of(u64 rows) {
    const u64 wanted = ceil_div<u64>(rows, KEYS_MIN), most = limit_of(cudaDevAttrMultiProcessorCount);
    return u32(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

// Divides the scratch memory.
struct Scratch {
    u32 *counts, *per_block;
    void* scan;
    size_t scan_bytes = 0, bytes;
    // Error of the query for the scan's scratch bytes.
    cudaError_t error;

    Scratch(void* memory, u64 rows, u32 bits) {
        const u64 partitions = u64(1) << bits;
        Divider divider(memory);
        counts = divider.take<u32>(partitions + 1);
        per_block = divider.take<u32>(u64(blocks_of(rows)) * words_of(bits));
        error = cub::DeviceScan::ExclusiveSum(nullptr, scan_bytes, counts, counts, std::int64_t(partitions + 1));
        scan = divider.take<u8>(scan_bytes);
        bytes = divider.bytes();
    }
};

// Reads every THREADS-th key, starting at `first`.
template <typename Key, u32 COUNT>
__device__ inline void read_keys(const Key* keys, u64 first, u64 end, Key (&read)[COUNT]) {
    const Key* from = keys + first + threadIdx.x;
    // Skips the bounds check per key if all keys exist. Counting has little other work that would
    // hide the check.
    if (first + COUNT * THREADS <= end) {
#pragma unroll
        for (u32 at = 0; at < COUNT; ++at) read[at] = from[at * THREADS];
        return;
    }
#pragma unroll
    for (u32 at = 0; at < COUNT; ++at) read[at] = first + at * THREADS + threadIdx.x < end ? from[at * THREADS] : Key{};
}

// Counts the block's keys. `counts` receives the carries. `per_block` receives the block's final
// counters.
template <typename Key>
__global__ void __launch_bounds__(THREADS) count_partitions(const __grid_constant__ DovetailCountPartitions args, u32* counts,
                                                            u32* per_block) {
    extern __shared__ __align__(16) u32 pairs[];
    const u32 words = words_of(args.bits);
    for (u32 word = threadIdx.x; word < words; word += THREADS) pairs[word] = 0;
    __syncthreads();
    const Key* keys = static_cast<const Key*>(args.keys);
    const u64 rows = args.rows, share = (rows + gridDim.x - 1) / gridDim.x, start = share * blockIdx.x, end = min(rows, start + share);
    // Prefetches the next round: twice as many keys are in flight as are counted.
    constexpr u32 LOADS = 32 / sizeof(Key), ROUNDS = CARRY / (2 * LOADS * THREADS);
    u32 round = 0;
    Key next[LOADS];
    read_keys(keys, start, end, next);
    for (u64 first = start; first < end; first += LOADS * THREADS) {
        Key key[LOADS];
#pragma unroll
        for (u32 at = 0; at < LOADS; ++at) key[at] = next[at];
        read_keys(keys, first + LOADS * THREADS, end, next);
        const bool is_whole = first + LOADS * THREADS <= end;
#pragma unroll
        for (u32 at = 0; at < LOADS; ++at) {
            if (!is_whole && first + at * THREADS + threadIdx.x >= end) continue;
            const u32 partition = digit(mix(key[at]), args.skip, args.bits), shift = partition % 2 * 16;
            if ((atomicAdd(&pairs[partition / 2], 1u << shift) >> shift & 0xffff) == CARRY - 1) {
                atomicSub(&pairs[partition / 2], CARRY << shift);
                atomicAdd(&counts[partition], CARRY);
            }
        }
        if (++round % ROUNDS == 0) __syncthreads();
    }
    __syncthreads();
    for (u32 word = threadIdx.x; word < words; word += THREADS) per_block[u64(blockIdx.x) * words + word] = pairs[word];
}

__global__ void add_counts(const u32* per_block, u32 blocks, u32 words, u32* counts) {
    const u32 word = blockIdx.x * blockDim.x + threadIdx.x;
    if (word >= words) return;
    u32 even = 0, odd = 0;
#pragma unroll 8
    for (u32 block = 0; block < blocks; ++block) {
        const u32 pair = per_block[u64(block) * words + word];
        even += pair & 0xffff;
        odd += pair >> 16;
    }
    counts[2 * word] += even;
    counts[2 * word + 1] += odd;
}

__global__ void take_every(const u32* from, u32 stride, u32 count, u32* to) {
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) to[at] = from[u64(at) * stride];
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

uint64_t dovetail_count_partitions_scratch_bytes(uint64_t rows, uint32_t bits) {
    if (words_of(bits) * 4 > limit_of(cudaDevAttrMaxSharedMemoryPerBlockOptin)) return 0;
    const Scratch scratch(nullptr, rows, bits);
    return bytes_unless(scratch.error, scratch.bytes);
}

int dovetail_count_partitions(const DovetailCountPartitions* args, DovetailStream stream_handle) {
    const cudaStream_t stream = cudaStream_t(stream_handle);
    Scratch scratch(args->scratch, args->rows, args->bits);
    if (scratch.error != cudaSuccess) return answered(scratch.error);
    if (scratch.bytes > args->scratch_bytes || args->bits == 0 || args->coarse_bits > args->bits) return int(cudaErrorInvalidValue);
    const u32 partitions = 1u << args->bits, words = words_of(args->bits), blocks = blocks_of(args->rows);
    cudaError_t error = cudaMemsetAsync(scratch.counts, 0, (partitions + 1) * 4, stream);
    if (error != cudaSuccess) return answered(error);
    const int code = with_key(args->key_bytes, [&](auto key) {
        const auto kernel = count_partitions<decltype(key)>;
        // The attribute is the same for all calls, because concurrent calls set it too.
        const u32 most = words_of(2 * DOVETAIL_PASS_BITS_MAX) * 4, limit = limit_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(most < limit ? most : limit));
        if (error != cudaSuccess) return answered(error);
        kernel<<<blocks, THREADS, words * 4, stream>>>(*args, scratch.counts, scratch.per_block);
        return launched();
    });
    if (code != 0) return code;
    add_counts<<<blocks_for(words, 128), 128, 0, stream>>>(scratch.per_block, blocks, words, scratch.counts);
    error = cub::DeviceScan::ExclusiveSum(scratch.scan, scratch.scan_bytes, scratch.counts, args->bounds,
                                          std::int64_t(partitions) + 1, stream);
    if (error != cudaSuccess) return answered(error);
    const u32 coarse = (1u << args->coarse_bits) + 1;
    take_every<<<blocks_for(coarse, 128), 128, 0, stream>>>(args->bounds, partitions >> args->coarse_bits, coarse,
                                                            args->coarse_bounds);
    return launched();
}
