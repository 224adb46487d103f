// Gathers values of variable length at positions. A prefix sum of their lengths gives the offsets
// of the result; then their bytes are copied.
//
// Each thread writes eight bytes of the result, which may come from several values. Writes are
// therefore coalesced whole words, and bytes of long and short values cost the same. A thread finds
// the value in which its word begins by a search among the values of the block's words.

#include <cub/device/device_scan.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include "common.cuh"
#include "values.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 256, PER_THREAD = 4, TILE = THREADS * PER_THREAD, WORD = sizeof(u64);

// Length in bytes of the value at a position. A missing row and a null have length 0, whatever is
// stored under them. The scan reads one row past the end (length 0), so that it ends with the sum.
struct BytesOf {
    const u64* begins;
    const u8* validity;
    const u32* positions;
    u32 start;
    u64 rows;

    __host__ __device__ u64 operator()(u64 at) const {
        if (at >= rows) return 0;
        const u32 row = position_at(positions, start, at);
        if (row == NO_ROW || !is_valid(validity, row)) return 0;
        return begins[row + u64(1)] - begins[row];
    }
};

cudaError_t gathered_begins(void* scratch, size_t& bytes, const DovetailGatheredBegins& args, cudaStream_t stream) {
    const BytesOf bytes_of{reinterpret_cast<const u64*>(args.begins), args.validity, args.positions, args.start, args.rows};
    const auto lengths = thrust::transform_iterator(thrust::counting_iterator<u64>(0), bytes_of);
    return cub::DeviceScan::ExclusiveSum(scratch, bytes, lengths, reinterpret_cast<u64*>(args.gathered),
                                         std::int64_t(args.rows + 1), stream);
}

__global__ void narrow_begins(const __grid_constant__ DovetailGatherBytes args) {
    const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (at <= args.rows) args.offsets[at] = u32(args.gathered[at]);
}

__global__ void __launch_bounds__(THREADS) gather_bytes(const __grid_constant__ DovetailGatherBytes args) {
    __shared__ u64 range[2];
    const u64* gathered = reinterpret_cast<const u64*>(args.gathered);
    const u64 words = (args.bytes + WORD - 1) / WORD, tile = u64(blockIdx.x) * TILE;
    const u64 end = tile + TILE < words ? tile + TILE : words;
    if (threadIdx.x == 0) range[0] = row_of(gathered, 0, args.rows, tile * WORD);
    if (threadIdx.x == 32) range[1] = row_of(gathered, 0, args.rows, (end * WORD < args.bytes ? end * WORD : args.bytes) - 1) + 1;
    __syncthreads();
    const u64 beyond = range[1];
#pragma unroll
    for (u32 part = 0; part < PER_THREAD; ++part) {
        const u64 place = tile + part * THREADS + threadIdx.x;
        if (place >= end) continue;
        u64 row = row_of(gathered, range[0], beyond, place * WORD), into = place * WORD - gathered[row], word = 0;
        for (u32 filled = 0;;) {
            const u64 length = gathered[row + 1] - gathered[row];
            const u32 position = position_at(args.positions, args.start, row);
            word |= word_at(args.data, args.begins[position], into, length) << 8 * filled;
            filled += u32(length - into < WORD ? length - into : WORD);
            if (filled >= WORD || place * WORD + filled >= args.bytes) break;
            // Skips to the next value that is not empty.
            row = row_of(gathered, row, beyond, place * WORD + filled);
            into = 0;
        }
        args.out[place] = word;
    }
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

uint64_t dovetail_gathered_begins_scratch_bytes(uint64_t rows) {
    size_t bytes = 0;
    DovetailGatheredBegins args{};
    args.rows = rows;
    const cudaError_t error = gathered_begins(nullptr, bytes, args, nullptr);
    return bytes_unless(error, bytes);
}

int dovetail_gathered_begins(const DovetailGatheredBegins* args, DovetailStream stream) {
    size_t bytes = args->scratch_bytes;
    return answered(gathered_begins(args->scratch, bytes, *args, cudaStream_t(stream)));
}

int dovetail_gather_bytes(const DovetailGatherBytes* args, DovetailStream stream) {
    if (args->offsets) narrow_begins<<<blocks_for(args->rows + 1, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
    const int narrowed = launched();
    if (narrowed != 0 || args->bytes == 0) return narrowed;
    gather_bytes<<<blocks_for(ceil_div<u64>(args->bytes, WORD), TILE), THREADS, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}
