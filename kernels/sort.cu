// Sorts by CUB's radix sort, and checks if keys are sorted already.

#include <cub/device/device_radix_sort.cuh>

#include "common.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 256;

template <typename Key>
cudaError_t sort(void* scratch, size_t& bytes, const DovetailSort& args, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(scratch, bytes, static_cast<const Key*>(args.keys_in),
                                           static_cast<Key*>(args.keys_out), args.values_in, args.values_out,
                                           std::int64_t(args.rows), int(args.begin_bit), int(args.end_bit), stream);
}

__device__ inline u32 turned_left(u32 key, u32 by) { return by == 0 ? key : key << by | key >> (32 - by); }
__device__ inline u64 turned_left(u64 key, u32 by) { return by == 0 ? key : key << by | key >> (64 - by); }
__device__ inline Key16 turned_left(Key16 key, u32 by) {
    if (by == 0) return key;
    return {key.low << by | key.high >> (64 - by), key.high << by | key.low >> (64 - by)};
}

__device__ inline u32 part(u32 key, u32) { return key; }
__device__ inline u64 part(u64 key, u32) { return key; }
__device__ inline u64 part(Key16 key, u32 upper) { return upper ? key.high : key.low; }

template <typename Key>
__global__ void image(DovetailSortImage args) {
    const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= args.rows) return;
    Key key = static_cast<const Key*>(args.keys)[args.order ? args.order[at] : at];
    if (args.mixed) key = turned_left(mix(key), args.skip);
    auto integer = part(key, args.upper);
    static_cast<decltype(integer)*>(args.images)[at] = integer;
}

template <typename Key>
__global__ void is_sorted(DovetailIsSorted args) {
    // Returns early once keys are known to be unsorted. For keys in random order most blocks return
    // here, and each other block writes once.
    const bool is_known = threadIdx.x == 0 && *static_cast<volatile u32*>(args.unsorted);
    if (__syncthreads_or(is_known)) return;
    const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    const Key* keys = static_cast<const Key*>(args.keys);
    const bool descends = at + 1 < args.rows && keys[at + 1] < keys[at];
    if (__syncthreads_or(descends) && threadIdx.x == 0) *args.unsorted = 1;
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

uint64_t dovetail_sort_scratch_bytes(uint32_t width, uint64_t rows) {
    size_t bytes = 0;
    DovetailSort args{};
    args.rows = rows;
    args.end_bit = 8 * width;
    const cudaError_t error = width == 4 ? sort<u32>(nullptr, bytes, args, nullptr) : sort<u64>(nullptr, bytes, args, nullptr);
    return bytes_unless(error, bytes);
}

int dovetail_sort(const DovetailSort* args, DovetailStream stream) {
    size_t bytes = args->scratch_bytes;
    if (args->width == 4) return answered(sort<u32>(args->scratch, bytes, *args, cudaStream_t(stream)));
    return answered(sort<u64>(args->scratch, bytes, *args, cudaStream_t(stream)));
}

int dovetail_sort_image(const DovetailSortImage* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        image<decltype(key)><<<blocks_for(args->rows, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}

int dovetail_is_sorted(const DovetailIsSorted* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        is_sorted<decltype(key)><<<blocks_for(args->rows, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}
