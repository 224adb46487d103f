// Expands matches into pairs of positions. A prefix sum gives the number of pairs before each probe
// row. Each pair then finds its probe row by binary search.

#include <cub/device/device_scan.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include "common.cuh"

namespace dovetail {
namespace {

// Pairs per thread. 8 is the fastest of 4, 8 and 16 (tuning.md).
constexpr u32 THREADS = 128, PER_THREAD = 8, TILE = THREADS * PER_THREAD;

struct PairsOf {
    const u32* first;
    const u32* count;
    bool emit_unmatched;

    __host__ __device__ u64 operator()(u64 row) const {
        const u32 length = count ? count[row] : u32(first[row] != NO_ROW);
        return emit_unmatched && length == 0 ? 1 : length;
    }
};

cudaError_t pair_starts(void* scratch, size_t& bytes, const DovetailPairStarts& args, cudaStream_t stream) {
    const auto pairs = thrust::transform_iterator(thrust::counting_iterator<u64>(0),
                                                  PairsOf{args.first, args.count, args.emit_unmatched != 0});
    return cub::DeviceScan::ExclusiveSum(scratch, bytes, pairs, reinterpret_cast<u64*>(args.starts),
                                         std::int64_t(args.rows), stream);
}

__global__ void __launch_bounds__(THREADS) expand(DovetailExpand args) {
    __shared__ u64 range[2];
    const u64* starts = reinterpret_cast<const u64*>(args.starts);
    const u64 tile = u64(blockIdx.x) * TILE;
    const u64 end = tile + TILE < args.pairs ? tile + TILE : args.pairs;
    if (tile >= end) return;
    if (threadIdx.x == 0) range[0] = row_of(starts, 0, args.rows, args.first_pair + tile);
    if (threadIdx.x == 32) range[1] = row_of(starts, 0, args.rows, args.first_pair + end - 1) + 1;
    __syncthreads();
#pragma unroll
    for (u32 at = 0; at < PER_THREAD; ++at) {
        const u64 place = tile + at * THREADS + threadIdx.x;
        if (place >= end) continue;
        const u64 pair = args.first_pair + place;
        const u64 row = row_of(starts, range[0], range[1], pair);
        const u32 first = args.first[row];
        args.build[place] = first == NO_ROW ? NO_ROW : first + u32(pair - starts[row]);
        args.probe[place] = args.first_row + u32(row);
    }
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

uint64_t dovetail_pair_starts_scratch_bytes(uint64_t rows) {
    size_t bytes = 0;
    DovetailPairStarts args{};
    args.rows = rows;
    const cudaError_t error = pair_starts(nullptr, bytes, args, nullptr);
    return bytes_unless(error, bytes);
}

int dovetail_pair_starts(const DovetailPairStarts* args, DovetailStream stream) {
    size_t bytes = args->scratch_bytes;
    return answered(pair_starts(args->scratch, bytes, *args, cudaStream_t(stream)));
}

int dovetail_expand(const DovetailExpand* args, DovetailStream stream) {
    expand<<<blocks_for(args->pairs, TILE), THREADS, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}
