// Lists the rows that satisfy a condition, and sets the flags of matched build rows.

#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>

#include "common.cuh"
#include "filter.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 256;

// True if a row is to be listed.
struct Condition {
    DovetailSelect args;

    __device__ bool operator()(u32 position) const {
        // `row` indexes the whole input, even if the selection starts at a later row.
        const u32 row = position - args.base;
        switch (args.condition) {
            case DOVETAIL_FLAG_SET: return args.flags[row] != 0;
            case DOVETAIL_FLAG_CLEAR: return args.flags[row] == 0;
            case DOVETAIL_MATCHED: return args.first[row] != NO_ROW;
            case DOVETAIL_UNMATCHED: return args.first[row] == NO_ROW;
            case DOVETAIL_VALID:
            case DOVETAIL_INVALID: {
                u32 valid = 1;
                for (u32 index = 0; index < args.bitmap_count; ++index)
                    valid &= args.bitmaps[index][row / 8] >> (row % 8);
                return (valid & 1) == (args.condition == DOVETAIL_VALID);
            }
            default:
                switch (args.key_bytes) {
                    case 4: return of_key<u32>(row);
                    case 8: return of_key<u64>(row);
                    default: return of_key<Key16>(row);
                }
        }
    }

    template <typename Key>
    __device__ bool of_key(u32 row) const {
        const Key* keys = static_cast<const Key*>(args.keys);
        if (args.condition == DOVETAIL_RUN_HEADS) return row == 0 || keys[row] != keys[row - 1];
        const FilterBits bits(mix(keys[row]), args.filter_mask);
        return (reinterpret_cast<const u64*>(args.filter_words)[bits.word] & bits.pattern) == bits.pattern;
    }
};

cudaError_t select(void* scratch, size_t& scratch_bytes, const DovetailSelect& args, cudaStream_t stream) {
    return cub::DeviceSelect::If(scratch, scratch_bytes, thrust::counting_iterator<u32>(args.base + args.start), args.positions,
                                 reinterpret_cast<u64*>(args.selected), std::int64_t(args.rows), Condition{args}, stream);
}

constexpr u8 MATCHED = 1, RUN_MATCHED = 2;

// Several streams mark neighbouring rows concurrently, and CUDA has no byte atomics. Every read or
// write of a flag therefore goes through the word around it.
__device__ inline u8 flag_of(const u8* flags, u32 at) {
    return u8(reinterpret_cast<const volatile u32*>(flags)[at / 4] >> 8 * (at % 4));
}

// Sets bits of a flag. Returns its previous value.
__device__ inline u8 set(u8* flags, u32 at, u8 value) {
    const u32 shift = 8 * (at % 4);
    return u8(atomicOr(reinterpret_cast<u32*>(flags) + at / 4, u32(value) << shift) >> shift);
}

// Marks runs. Only the first thread that reaches a run marks it, because many probe rows may share
// a run and a run may be long.
__global__ void mark_runs(DovetailMarkRuns args) {
    const u64 row = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (row >= args.rows || args.first[row] == NO_ROW) return;
    const u32 first = args.first[row];
    // Reads the flag before the atomic, because many threads reach a hot run.
    const u8 before = flag_of(args.flags, first);
    if (!args.count) {
        if (!before) set(args.flags, first, MATCHED);
        return;
    }
    if (before & RUN_MATCHED) return;
    if (set(args.flags, first, RUN_MATCHED) & RUN_MATCHED) return;
    const u32 count = args.count[row];
    if (count > DOVETAIL_LONG_RUN) {
        const u32 place = atomicAdd(args.long_run_count, 1u);
        args.long_runs[2 * place] = first;
        args.long_runs[2 * place + 1] = count;
        return;
    }
    for (u32 at = 1; at < count; ++at) set(args.flags, first + at, MATCHED);
}

__global__ void mark_long_runs(DovetailMarkRuns args) {
    const u32 count = *args.long_run_count;
    for (u32 run = blockIdx.x; run < count; run += gridDim.x) {
        const u32 first = args.long_runs[2 * run], length = args.long_runs[2 * run + 1];
        for (u32 at = 1 + threadIdx.x; at < length; at += THREADS) set(args.flags, first + at, MATCHED);
    }
}

__global__ void mark(DovetailMark args) {
    const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= args.rows) return;
    const u32 position = position_at(args.positions, args.start, at);
    if (position != NO_ROW) set(args.flags, position, MATCHED);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

uint64_t dovetail_select_scratch_bytes(uint64_t rows) {
    size_t bytes = 0;
    DovetailSelect args{};
    args.rows = rows;
    const cudaError_t error = select(nullptr, bytes, args, nullptr);
    return bytes_unless(error, bytes);
}

int dovetail_select(const DovetailSelect* args, DovetailStream stream) {
    size_t bytes = args->scratch_bytes;
    return answered(select(args->scratch, bytes, *args, cudaStream_t(stream)));
}

int dovetail_mark_runs(const DovetailMarkRuns* args, DovetailStream stream) {
    mark_runs<<<blocks_for(args->rows, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
    if (args->count) mark_long_runs<<<256, THREADS, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}

int dovetail_mark(const DovetailMark* args, DovetailStream stream) {
    mark<<<blocks_for(args->rows, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}
