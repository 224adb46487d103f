// Checks that the emulated GPU computes what a GPU does and reports the errors that it should. Each
// wrong kernel runs in its own process.
//
//   FLAGS="-fsanitize=undefined -fsanitize-undefined-trap-on-error"
//   c++ -std=c++17 -O2 $FLAGS kernels/emulator/*.cpp -ldl -o check && ./check

#include <cstdio>
#include <cstdlib>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

#include "cuda.h"

extern "C" {
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void**, int);
int cuCtxSetCurrent(void*);
int cuCtxSynchronize();
int cuMemAllocAsync(void**, size_t, void*);
int cuMemFreeAsync(void*, void*);
}

namespace {

constexpr unsigned ALL = ~0u, THREADS = 256;

// Each thread has its own element of `out`, which has THREADS elements.
void right(unsigned* out) {
    __shared__ unsigned sums[THREADS / 32];
    emulator::begin_shared_variables(sums);
    const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    unsigned inclusive = lane;
    for (unsigned distance = 1; distance < 32; distance *= 2) {
        const unsigned other = __shfl_up_sync(ALL, inclusive, distance);
        if (lane >= distance) inclusive += other;
    }
    bool is_right = inclusive == lane * (lane + 1) / 2 && __shfl_sync(ALL, inclusive, 31) == 496;
    is_right &= __shfl_xor_sync(ALL, 1ull << 40 | lane, 5) == (1ull << 40 | (lane ^ 5));
    is_right &= __ballot_sync(ALL, lane % 3 == 0) == 0x49249249u && __any_sync(ALL, lane == 9) && !__any_sync(ALL, lane > 31);
    is_right &= __match_any_sync(ALL, lane / 8) == 0xffu << lane / 8 * 8;
    is_right &= __reduce_add_sync(ALL, ~0u) == ~0u * 32u && __reduce_max_sync(ALL, lane ^ 21) == 31;
    // Diverged lanes use separate masks.
    if (lane < 7) is_right &= __reduce_add_sync(0x7f, 1) == 7;
    else is_right &= __ballot_sync(~0x7fu, lane == 7) == 0x80;
    if (lane == 0) sums[warp] = warp;
    __syncthreads();
    is_right &= sums[7 - warp] == 7 - warp;
    is_right &= __syncthreads_count(thread < 77) == 77 && __syncthreads_or(thread == 200) && !__syncthreads_or(thread == 256);
    is_right &= __syncthreads_and(thread < 256) && !__syncthreads_and(thread != 0);
    atomicAdd(&out[thread], is_right ? 1u : 1000u);
}

void ends_before_a_barrier(unsigned*) {
    if (threadIdx.x == 5) return;
    __syncthreads();
}
void two_barriers(unsigned*) {
    if (threadIdx.x < 32) __syncthreads();
    else __syncthreads_or(1);
}
void lane_is_missing(unsigned*) {
    if (threadIdx.x != 40) __ballot_sync(ALL, 1);
}
void waits_elsewhere(unsigned*) {
    if (threadIdx.x % 32 == 3) __syncthreads();
    else __reduce_add_sync(ALL, 1);
}
void not_in_its_mask(unsigned*) { __ballot_sync(0xffff, 1); }
void shuffles_from_nobody(unsigned*) {
    if (threadIdx.x % 32 < 16) __shfl_sync(0xffff, 1, 20);
}
void writes_behind(unsigned* out) { out[THREADS + threadIdx.x] = 1; }
void reads_what_is_not_there(unsigned* out) {
    volatile std::uintptr_t address = 64;
    out[threadIdx.x] = *reinterpret_cast<unsigned*>(address);
}
void leaves_an_array(unsigned* out) {
    __shared__ unsigned some[16];
    emulator::begin_shared_variables(some);
    some[threadIdx.x % 17] = 1;
    __syncthreads();
    out[threadIdx.x] = some[0];
}
void leaves_dynamic_memory(unsigned*) { static_cast<volatile unsigned*>(emulator::dynamic_shared())[threadIdx.x + 1] = 1; }
void is_misaligned(unsigned* out) { *reinterpret_cast<uint4*>(out + 1) = {1, 2, 3, 4}; }
void shifts_too_far(unsigned* out) { out[threadIdx.x] = 1u << (threadIdx.x + 1); }
void never_waits(unsigned* out) { __pipeline_memcpy_async(out + threadIdx.x, out + (threadIdx.x + 1) % THREADS, 4); }

// Each thread writes its element and reads its right neighbour's without a barrier between. A
// thread that runs before its neighbour reads garbage.
void lacks_a_barrier(unsigned* out) {
    __shared__ unsigned some[THREADS];
    emulator::begin_shared_variables(some);
    some[threadIdx.x] = 1;
    const unsigned other = some[(threadIdx.x + 1) % THREADS];
    out[threadIdx.x] = other;
}

unsigned* memory() {
    void *context = nullptr, *memory = nullptr;
    if (cuInit(0) != 0 || cuDevicePrimaryCtxRetain(&context, 0) != 0 || cuCtxSetCurrent(context) != 0) std::abort();
    if (cuMemAllocAsync(&memory, THREADS * sizeof(unsigned), nullptr) != 0) std::abort();
    return static_cast<unsigned*>(memory);
}

// Runs `body` in a child process. Returns the child's stderr and its exit code.
template <typename Body>
std::pair<std::string, int> said_by(const Body& body) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        _exit(body());
    }
    close(ends[1]);
    std::string said;
    char part[400];
    for (ssize_t bytes; (bytes = read(ends[0], part, sizeof(part))) > 0;) said.append(part, size_t(bytes));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return {said, WIFEXITED(status) ? WEXITSTATUS(status) : -1};
}

int failures = 0;

void expect(bool is_right, const char* what, const std::string& said) {
    if (is_right) return;
    ++failures;
    std::printf("%s: not as it should be: %s\n", what, said.c_str());
}

void expect_said(const char* name, void (*kernel)(unsigned*), const char* words) {
    const auto [said, code] = said_by([&] {
        emulator::launch(name, kernel, 3, THREADS, THREADS * sizeof(unsigned), nullptr)(memory());
        return cudaGetLastError() != 0 && cuCtxSynchronize() != 0 ? 7 : 0;
    });
    expect(code == 7 && said.find(std::string(name) + ", block (") != said.npos && said.find(words) != said.npos, name, said);
}

}  // namespace

int main() {
    const auto [said, code] = said_by([] {
        unsigned* out = memory();
        for (unsigned at = 0; at < THREADS; ++at) out[at] = 0;
        emulator::launch("right", right, 5, THREADS, 0, nullptr)(out);
        for (unsigned at = 0; at < THREADS; ++at)
            if (out[at] != 5) return 1;
        return int(cudaGetLastError());
    });
    expect(code == 0, "a right kernel", said);
    expect_said("ends_before_a_barrier", ends_before_a_barrier, "has ended without coming to it");
    expect_said("two_barriers", two_barriers, "waits at a barrier of another kind");
    expect_said("lane_is_missing", lane_is_missing, "which not all of these lanes come to");
    expect_said("waits_elsewhere", waits_elsewhere, "which not all of these lanes come to");
    expect_said("not_in_its_mask", not_in_its_mask, "whose mask does not name this lane");
    expect_said("shuffles_from_nobody", shuffles_from_nobody, "a lane that the mask does not name");
    expect_said("writes_behind", writes_behind, "lies between pieces");
    expect_said("reads_what_is_not_there", reads_what_is_not_there, "0x40 is no memory of the GPU");
    expect_said("leaves_an_array", leaves_an_array, "an index out of bounds");
    expect_said("leaves_dynamic_memory", leaves_dynamic_memory, "an illegal access");
    expect_said("is_misaligned", is_misaligned, "a misaligned address");
    expect_said("shifts_too_far", shifts_too_far, "trapped");
    expect_said("never_waits", never_waits, "ended before its asynchronous copies had");

    const auto of_freed = said_by([] {
        unsigned* out = memory();
        cuMemFreeAsync(out, nullptr);
        emulator::launch("freed", right, 1, THREADS, 0, nullptr)(out);
        return int(cudaGetLastError() != 0);
    });
    expect(of_freed.second == 1 && of_freed.first.find("was freed") != std::string::npos, "memory that was freed", of_freed.first);
    const auto of_order = said_by([] {
        unsigned* out = memory();
        for (unsigned launch = 0; launch < 2; ++launch) {
            emulator::launch("lacks_a_barrier", lacks_a_barrier, 1, THREADS, 0, nullptr)(out);
            for (unsigned at = 0; at < THREADS; ++at)
                if (out[at] != 1) return 7;
        }
        return 0;
    });
    expect(of_order.second == 7, "a barrier that is missing", of_order.first);
    const auto of_shape = said_by([] {
        emulator::launch("shape", right, 1, 1025, 0, nullptr)(memory());
        const bool is_refused = cudaGetLastError() == cudaErrorInvalidConfiguration;
        emulator::launch("shape", right, 1, THREADS, 50 << 10, nullptr)(memory());
        // A refused launch leaves the GPU usable.
        return is_refused && cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess ? 7 : 0;
    });
    expect(of_shape.second == 7, "launches that a GPU refuses", of_shape.first);
    std::printf(failures == 0 ? "the emulated GPU is as it should be\n" : "%d checks failed\n", failures);
    return failures == 0 ? 0 : 1;
}
