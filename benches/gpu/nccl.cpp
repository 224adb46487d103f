// NCCL's all-to-all between all GPUs of the host, for comparison with the pushes of `benches/peers.rs`.
//
//   nvcc -O2 benches/gpu/nccl.cpp -lnccl -o nccl && ./nccl
//
// Each GPU sends the given bytes, an equal part to each other GPU, and receives as many. Prints a JSON line for each
// amount: the median of the runs, and the bytes per second out of each GPU.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>
#include <nccl.h>

#define CHECK(call, ok, text)                                         \
    do {                                                              \
        auto code = (call);                                           \
        if (code != ok) {                                             \
            std::fprintf(stderr, "%s: %s\n", #call, text(code));      \
            std::exit(1);                                             \
        }                                                             \
    } while (0)
#define CUDA(call) CHECK(call, cudaSuccess, cudaGetErrorString)
#define NCCL(call) CHECK(call, ncclSuccess, ncclGetErrorString)

int main() {
    constexpr int RUNS = 9;
    int gpus = 0;
    CUDA(cudaGetDeviceCount(&gpus));
    if (gpus < 2) {
        std::fprintf(stderr, "two GPUs are needed, and there are %d\n", gpus);
        return 1;
    }
    std::vector<ncclComm_t> comms(gpus);
    NCCL(ncclCommInitAll(comms.data(), gpus, nullptr));
    std::vector<cudaStream_t> streams(gpus);
    std::vector<char *> from(gpus), to(gpus);
    const size_t most = size_t{4} << 30;
    for (int gpu = 0; gpu < gpus; ++gpu) {
        CUDA(cudaSetDevice(gpu));
        CUDA(cudaStreamCreate(&streams[gpu]));
        CUDA(cudaMalloc(&from[gpu], most));
        CUDA(cudaMalloc(&to[gpu], most));
    }
    for (size_t bytes : {size_t{64} << 20, size_t{1} << 30, most}) {
        const size_t part = bytes / (gpus - 1);
        auto exchange = [&] {
            NCCL(ncclGroupStart());
            for (int gpu = 0; gpu < gpus; ++gpu) {
                for (int step = 1; step < gpus; ++step) {
                    const int next = (gpu + step) % gpus, last = (gpu + gpus - step) % gpus;
                    const size_t at = (step - 1) * part;
                    NCCL(ncclSend(from[gpu] + at, part, ncclChar, next, comms[gpu], streams[gpu]));
                    NCCL(ncclRecv(to[gpu] + at, part, ncclChar, last, comms[gpu], streams[gpu]));
                }
            }
            NCCL(ncclGroupEnd());
            for (int gpu = 0; gpu < gpus; ++gpu) {
                CUDA(cudaSetDevice(gpu));
                CUDA(cudaStreamSynchronize(streams[gpu]));
            }
        };
        std::vector<double> seconds;
        for (int run = 0; run <= RUNS; ++run) {
            const auto start = std::chrono::steady_clock::now();
            exchange();
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
            // The first run connects the GPUs.
            if (run > 0) seconds.push_back(took.count());
        }
        std::sort(seconds.begin(), seconds.end());
        const double median = seconds[RUNS / 2];
        std::printf("{\"case\":\"nccl\",\"gpus\":%d,\"bytes\":%zu,\"runs\":%d,\"seconds\":%.9f,\"bytes_per_second\":%.0f}\n",
                    gpus, bytes, RUNS, median, static_cast<double>(bytes) / median);
    }
}
