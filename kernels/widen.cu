// Offsets from a base to the values of a column, which crossed the link as no more bytes than its range needs.

#include "common.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 256;
// Loads of a thread that are under way at once.
constexpr u32 VALUES = 4;

// Values are integers of two's complement or without a sign: what wraps around in their width is right for both.
template <typename Value>
__device__ inline Value value_of(u64 offset, const DovetailWiden& args) {
    return Value(offset + args.base_low);
}

template <>
__device__ inline Key16 value_of<Key16>(u64 offset, const DovetailWiden& args) {
    const u64 low = offset + args.base_low;
    return {low, args.base_high + (low < offset)};
}

template <typename Offset, typename Value>
__global__ void widen(const __grid_constant__ DovetailWiden args) {
    const Offset* offsets = static_cast<const Offset*>(args.offsets);
    Value* values = static_cast<Value*>(args.values);
    const u64 first = u64(blockIdx.x) * THREADS * VALUES + threadIdx.x;
    Offset own[VALUES];
#pragma unroll
    for (u32 index = 0; index < VALUES; ++index) {
        const u64 at = first + index * THREADS;
        own[index] = at < args.rows ? offsets[at] : Offset{};
    }
#pragma unroll
    for (u32 index = 0; index < VALUES; ++index) {
        const u64 at = first + index * THREADS;
        if (at < args.rows) values[at] = value_of<Value>(own[index], args);
    }
}

template <typename Offset, typename Value>
int launch(const DovetailWiden& args, DovetailStream stream) {
    if constexpr (sizeof(Offset) >= sizeof(Value)) {
        return int(cudaErrorInvalidValue);
    } else {
        widen<Offset, Value><<<blocks_for(args.rows, THREADS * VALUES), THREADS, 0, cudaStream_t(stream)>>>(args);
        return launched();
    }
}

template <typename Offset>
int with_value(const DovetailWiden& args, DovetailStream stream) {
    switch (args.value_bytes) {
        case 2: return launch<Offset, u16>(args, stream);
        case 4: return launch<Offset, u32>(args, stream);
        case 8: return launch<Offset, u64>(args, stream);
        case 16: return launch<Offset, Key16>(args, stream);
        default: return int(cudaErrorInvalidValue);
    }
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_widen(const DovetailWiden* args, DovetailStream stream) {
    switch (args->offset_bytes) {
        case 1: return with_value<u8>(*args, stream);
        case 2: return with_value<u16>(*args, stream);
        case 4: return with_value<u32>(*args, stream);
        case 8: return with_value<u64>(*args, stream);
        default: return int(cudaErrorInvalidValue);
    }
}
