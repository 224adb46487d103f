// The parts of CUDA that the kernels use, for the host's C++ compiler: language, runtime calls, and
// a grid whose threads are fibers.
//
// Code that uses any other part of CUDA does not compile. README.md explains how threads run.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One copy per host thread, which runs one block at a time. The translation fills it with garbage
// at the start of each block.
#define __shared__ static thread_local

struct uint3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Indices of the running fiber.
extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNotSupported = 801,
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
typedef struct CUstream_st* cudaStream_t;

cudaError_t cudaGetLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);

namespace emulator {

enum class Barrier : std::uint8_t { PLAIN, COUNT, OR, AND };
// `SHUFFLE`: each lane reads the value of the lane that it names.
enum class WarpOp : std::uint8_t { SHUFFLE, BALLOT, ANY, MATCH_ANY, ADD, MAX };

// Waits for all threads of the block. Returns the number of threads with a true predicate.
unsigned wait_for_block(Barrier kind, bool predicate);
// Waits for all lanes of the mask. Returns the operation's result for this lane.
std::uint64_t wait_for_warp(WarpOp op, unsigned mask, std::uint64_t value, unsigned source_lane);
// Ends the launch with an error that names the kernel, the block and the thread.
[[noreturn]] void fail(const char* what);

// Returns the block's dynamic shared memory. A guard page follows it.
void* dynamic_shared();
// Fills a variable in shared memory with garbage, the first time that the block reaches it.
void begin_shared(void* variable, size_t bytes);
template <typename... Variables>
void begin_shared_variables(Variables&... variables) {
    (begin_shared(&variables, sizeof(variables)), ...);
}

// Asynchronous copies: pending until they are waited for.
void copy_later(void* to, const void* from, size_t bytes);
void finish_copies();

cudaError_t allow_dynamic_shared(const void* kernel, int bytes);

// Runs `thread` with `arguments` as every thread of a grid, one block after the other. The next
// call reports errors.
void run(const char* name, const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
         void (*thread)(const void*), const void* arguments);

template <typename... Parameters>
struct Launch {
    const char* name;
    void (*kernel)(Parameters...);
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;

    void operator()(Parameters... arguments) const {
        const auto thread = [&] { kernel(arguments...); };
        run(name, reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream,
            [](const void* body) { (*static_cast<const decltype(thread)*>(body))(); }, &thread);
    }
};

// The translation of `kernel<<<grid, block, shared_bytes, stream>>>`.
template <typename... Parameters>
Launch<Parameters...> launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                             cudaStream_t stream) {
    return {name, kernel, grid, block, shared_bytes, stream};
}

// Type of an argument from which no template parameter is deduced.
template <typename T>
struct Same {
    using Type = T;
};
template <typename T>
using As = typename Same<T>::Type;

template <typename T>
T* checked(T* at) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics exist for words of 4 and 8 bytes");
    if (reinterpret_cast<std::uintptr_t>(at) % sizeof(T) != 0) fail("an atomic on a misaligned address");
    return at;
}

template <typename T>
T shuffle(unsigned mask, T value, unsigned source_lane) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles exist for words of 4 and 8 bytes");
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    word = wait_for_warp(WarpOp::SHUFFLE, mask, word, source_lane);
    std::memcpy(&value, &word, sizeof(T));
    return value;
}

}  // namespace emulator

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
    return emulator::allow_dynamic_shared(reinterpret_cast<const void*>(kernel), value);
}

inline void __syncthreads() { emulator::wait_for_block(emulator::Barrier::PLAIN, false); }
inline int __syncthreads_count(int predicate) { return int(emulator::wait_for_block(emulator::Barrier::COUNT, predicate != 0)); }
inline int __syncthreads_or(int predicate) { return emulator::wait_for_block(emulator::Barrier::OR, predicate != 0) > 0; }
inline int __syncthreads_and(int predicate) {
    return emulator::wait_for_block(emulator::Barrier::AND, predicate != 0) == blockDim.x * blockDim.y * blockDim.z;
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return unsigned(emulator::wait_for_warp(emulator::WarpOp::BALLOT, mask, predicate != 0, 0));
}
inline int __any_sync(unsigned mask, int predicate) {
    return emulator::wait_for_warp(emulator::WarpOp::ANY, mask, predicate != 0, 0) != 0;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
    return unsigned(emulator::wait_for_warp(emulator::WarpOp::MATCH_ANY, mask, std::uint64_t(value), 0));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    return unsigned(emulator::wait_for_warp(emulator::WarpOp::ADD, mask, value, 0));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return unsigned(emulator::wait_for_warp(emulator::WarpOp::MAX, mask, value, 0));
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
    return emulator::shuffle(mask, value, unsigned(source) % 32);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return emulator::shuffle(mask, value, threadIdx.x % 32 ^ unsigned(lanes));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
    const unsigned lane = threadIdx.x % 32;
    return emulator::shuffle(mask, value, lane < distance ? lane : lane - distance);
}

// Real atomics: other host threads may run kernels at the same time.
template <typename T>
T atomicAdd(T* at, emulator::As<T> by) { return __atomic_fetch_add(emulator::checked(at), by, __ATOMIC_RELAXED); }
template <typename T>
T atomicSub(T* at, emulator::As<T> by) { return __atomic_fetch_sub(emulator::checked(at), by, __ATOMIC_RELAXED); }
template <typename T>
T atomicOr(T* at, emulator::As<T> bits) { return __atomic_fetch_or(emulator::checked(at), bits, __ATOMIC_RELAXED); }
template <typename T>
T atomicExch(T* at, emulator::As<T> value) { return __atomic_exchange_n(emulator::checked(at), value, __ATOMIC_RELAXED); }
template <typename T>
T atomicCAS(T* at, emulator::As<T> expected, emulator::As<T> value) {
    __atomic_compare_exchange_n(emulator::checked(at), &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <typename T>
T atomicMax(T* at, emulator::As<T> value) {
    T found = __atomic_load_n(emulator::checked(at), __ATOMIC_RELAXED);
    while (found < value && !__atomic_compare_exchange_n(at, &found, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return found;
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __ffs(int word) { return __builtin_ffs(word); }
template <typename T>
T __ldg(const T* at) { return *at; }
template <typename T>
T min(T a, T b) { return b < a ? b : a; }
template <typename T>
T max(T a, T b) { return a < b ? b : a; }

// cuda_pipeline.h.
inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
    const bool is_size = bytes == 4 || bytes == 8 || bytes == 16;
    if (!is_size || (reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) % bytes != 0)
        emulator::fail("an asynchronous copy of a size or alignment that there is none of");
    emulator::copy_later(to, from, bytes);
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(size_t batches) {
    if (batches > 0) emulator::fail("waiting for some of the asynchronous copies is not emulated");
    emulator::finish_copies();
}

// nvtx3/nvToolsExt.h. Ranges do nothing, because no profiler would show them.
inline void nvtxRangePushA(const char*) {}
inline void nvtxRangePop() {}
