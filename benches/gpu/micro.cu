// What the memory system of a GPU does with the access patterns that joins are made of.
//
//   nvcc -O3 -std=c++17 -arch=native -o micro micro.cu && ./micro [log2 of rows, 27]
//
// Prints one JSON line per case: the median of several runs by CUDA events. These numbers decide how the join kernels are
// composed, so each case is one question:
//
//   copy         bytes read and written per second: the ceiling of everything that streams
//   atomic       atomic additions per second to 1 .. 2^20 addresses: can blocks reserve output with one counter?
//   gather       values per second read at random places of a working set: when is a table small enough for the L2?
//   rank         keys per second ranked by atomics in shared memory, by number of bins and skew
//   partition    rows per second of one partition pass (rank, stage in shared memory, write runs), by bins and row size
//
// Every partition is checked: each row must be in its partition, and all of them there, by count and checksum.

#include <algorithm>
#include <functional>
#include <vector>

#include "common.cuh"

// The median of five runs in seconds, after one to warm up.
static double seconds(const std::function<void()>& work) {
    cudaEvent_t start, stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    std::vector<float> milliseconds;
    for (int run = 0; run < 6; ++run) {
        CHECK(cudaEventRecord(start));
        work();
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(stop));
        CHECK(cudaEventSynchronize(stop));
        float taken = 0;
        CHECK(cudaEventElapsedTime(&taken, start, stop));
        if (run > 0) milliseconds.push_back(taken);
    }
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(stop));
    std::sort(milliseconds.begin(), milliseconds.end());
    return milliseconds[milliseconds.size() / 2] / 1e3;
}

// ---- copy -------------------------------------------------------------------------------------------------------------

__global__ void copy_kernel(const uint4* __restrict__ from, uint4* __restrict__ to, size_t count) {
    size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) to[at] = from[at];
}

static void copy(int processors) {
    const size_t bytes = size_t(4) << 30;
    auto* from = device_memory<uint4>(bytes / 16);
    auto* to = device_memory<uint4>(bytes / 16);
    CHECK(cudaMemset(from, 1, bytes));
    double taken = seconds([&] { copy_kernel<<<processors * 16, 512>>>(from, to, bytes / 16); });
    std::printf("{\"case\":\"copy\",\"seconds\":%.6g,\"tb_per_second\":%.4g}\n", taken, 2.0 * bytes / taken / 1e12);
    CHECK(cudaFree(from));
    CHECK(cudaFree(to));
}

// ---- atomic -----------------------------------------------------------------------------------------------------------

// One lane of each warp adds, as a reservation for a warp would, `rounds` times.
__global__ void atomic_kernel(u64* counters, u32 mask, int rounds, u64* sink) {
    u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (threadIdx.x % 32 != 0) return;
    u64 sum = 0;
    for (int round = 0; round < rounds; ++round) sum += atomicAdd(&counters[mix(warp * 1024 + round) & mask], 1ull);
    if (sum == ~0ull) *sink = sum;
}

static void atomic(int processors) {
    auto* counters = device_memory<u64>(1 << 20);
    auto* sink = device_memory<u64>(1);
    const int blocks = processors * 8, rounds = 256;
    for (u32 addresses : {1u, 32u, 1024u, 1u << 15, 1u << 20}) {
        CHECK(cudaMemset(counters, 0, sizeof(u64) << 20));
        double taken = seconds([&] { atomic_kernel<<<blocks, 256>>>(counters, addresses - 1, rounds, sink); });
        double count = double(blocks) * (256 / 32) * rounds;
        std::printf("{\"case\":\"atomic\",\"addresses\":%u,\"seconds\":%.6g,\"g_per_second\":%.4g}\n", addresses, taken,
                    count / taken / 1e9);
    }
    CHECK(cudaFree(counters));
    CHECK(cudaFree(sink));
}

// ---- gather -----------------------------------------------------------------------------------------------------------

template <typename T>
__device__ inline u32 first_word(const T& value) {
    return *reinterpret_cast<const u32*>(&value);
}

template <typename T>
__global__ void gather_kernel(const T* __restrict__ table, u32 mask, size_t reads, u32* sink) {
    u32 sum = 0;
    size_t step = size_t(gridDim.x) * blockDim.x;
    // Four independent reads in flight per thread.
    for (size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x; at < reads; at += 4 * step) {
        T value[4];
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) value[lane] = table[mix(u32(at + lane * step)) & mask];
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) sum += first_word(value[lane]);
    }
    if (sum == 0x9e3779b9u) *sink = sum;
}

template <typename T>
static void gather_of(int processors, const char* name) {
    const size_t bytes_max = size_t(2) << 30, reads = size_t(1) << 28;
    auto* table = device_memory<T>(bytes_max / sizeof(T));
    auto* sink = device_memory<u32>(1);
    CHECK(cudaMemset(table, 1, bytes_max));
    for (size_t mebibytes : {4, 8, 16, 24, 32, 48, 64, 128, 512, 2048}) {
        if ((mebibytes & (mebibytes - 1)) != 0) continue;
        u32 mask = u32((mebibytes << 20) / sizeof(T)) - 1;
        double taken = seconds([&] { gather_kernel<T><<<processors * 16, 256>>>(table, mask, reads, sink); });
        std::printf("{\"case\":\"gather\",\"value\":\"%s\",\"mebibytes\":%zu,\"seconds\":%.6g,\"g_per_second\":%.4g}\n", name,
                    mebibytes, taken, reads / taken / 1e9);
    }
    CHECK(cudaFree(table));
    CHECK(cudaFree(sink));
}

// ---- rank -------------------------------------------------------------------------------------------------------------

// Each thread ranks its keys among those of its block with the same digit, as a partition pass must, and does nothing else.
__global__ void rank_kernel(const u32* __restrict__ keys, size_t count, u32 bins, u32* sink) {
    extern __shared__ u32 counters[];
    u32 sum = 0;
    const size_t tile = size_t(blockDim.x) * 16;
    for (size_t start = size_t(blockIdx.x) * tile; start + tile <= count; start += gridDim.x * tile) {
        for (u32 bin = threadIdx.x; bin < bins; bin += blockDim.x) counters[bin] = 0;
        __syncthreads();
        u32 key[16];
#pragma unroll
        for (int at = 0; at < 16; ++at) key[at] = keys[start + at * blockDim.x + threadIdx.x];
#pragma unroll
        for (int at = 0; at < 16; ++at) sum += atomicAdd(&counters[mix(key[at]) & (bins - 1)], 1u);
        __syncthreads();
    }
    if (sum == 0x9e3779b9u) *sink = sum;
}

static void rank(int processors, const u32* keys, size_t count, const char* distribution, u32* sink) {
    for (u32 bins : {256u, 1024u, 2048u, 4096u}) {
        double taken = seconds([&] { rank_kernel<<<processors * 4, 512, bins * 4>>>(keys, count, bins, sink); });
        std::printf("{\"case\":\"rank\",\"keys\":\"%s\",\"bins\":%u,\"seconds\":%.6g,\"g_per_second\":%.4g}\n", distribution,
                    bins, taken, count / taken / 1e9);
    }
}

// ---- partition --------------------------------------------------------------------------------------------------------

__global__ void histogram_kernel(const u32* __restrict__ keys, size_t count, u32 bins, u64* totals) {
    extern __shared__ u32 counters[];
    for (u32 bin = threadIdx.x; bin < bins; bin += blockDim.x) counters[bin] = 0;
    __syncthreads();
    size_t step = size_t(gridDim.x) * blockDim.x;
    const auto* vectors = reinterpret_cast<const uint4*>(keys);
    for (size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x; at < count / 4; at += step) {
        uint4 four = vectors[at];
        atomicAdd(&counters[mix(four.x) & (bins - 1)], 1u);
        atomicAdd(&counters[mix(four.y) & (bins - 1)], 1u);
        atomicAdd(&counters[mix(four.z) & (bins - 1)], 1u);
        atomicAdd(&counters[mix(four.w) & (bins - 1)], 1u);
    }
    __syncthreads();
    for (u32 bin = threadIdx.x; bin < bins; bin += blockDim.x)
        if (counters[bin]) atomicAdd(&totals[bin], u64(counters[bin]));
}

__global__ void scan_kernel(const u64* totals, u64* cursors, u32 bins) {
    u64 sum = 0;
    for (u32 bin = 0; bin < bins; ++bin) {
        cursors[bin] = sum;
        sum += totals[bin];
    }
}

// One pass: rows of WORDS columns of 4 bytes, the first of them the key, from columns into packed rows by partition. A tile
// of rows is ranked, reserves room in each partition with one global atomic, is put in order in shared memory, and leaves
// in runs.
template <int WORDS, int THREADS, int PER_THREAD>
__global__ void __launch_bounds__(THREADS)
    partition_kernel(const u32* const* __restrict__ columns, size_t count, u32 bins, u64* cursors, u32* __restrict__ rows) {
    constexpr int TILE = THREADS * PER_THREAD;
    extern __shared__ u32 shared[];
    u32* staged = shared;                            // TILE * WORDS
    u32* starts = staged + TILE * WORDS;             // bins + 1: rows of the tile in each bin, then where they start
    u64* places = reinterpret_cast<u64*>(starts + bins + (bins & 1) + 2);  // bins: global place of the tile's first row
    __shared__ u32 warp_sums[THREADS / 32];
    const size_t start = size_t(blockIdx.x) * TILE;

    for (u32 bin = threadIdx.x; bin < bins; bin += THREADS) starts[bin] = 0;
    __syncthreads();
    u32 value[WORDS][PER_THREAD];
    u32 rank[PER_THREAD];
#pragma unroll
    for (int at = 0; at < PER_THREAD; ++at) {
        size_t row = start + at * THREADS + threadIdx.x;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) value[word][at] = row < count ? columns[word][row] : 0;
    }
#pragma unroll
    for (int at = 0; at < PER_THREAD; ++at) {
        size_t row = start + at * THREADS + threadIdx.x;
        rank[at] = row < count ? atomicAdd(&starts[mix(value[0][at]) & (bins - 1)], 1u) : 0;
    }
    __syncthreads();

    // An exclusive scan over the bins; each thread has a few consecutive ones.
    const u32 each = (bins + THREADS - 1) / THREADS;
    u32 sum = 0;
    for (u32 at = 0; at < each; ++at) {
        u32 bin = threadIdx.x * each + at;
        if (bin < bins) sum += starts[bin];
    }
    u32 inclusive = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        u32 other = __shfl_up_sync(0xffffffffu, inclusive, distance);
        if (threadIdx.x % 32 >= distance) inclusive += other;
    }
    if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = inclusive;
    __syncthreads();
    u32 before = inclusive - sum;
    for (u32 warp = 0; warp < threadIdx.x / 32; ++warp) before += warp_sums[warp];
    for (u32 at = 0; at < each; ++at) {
        u32 bin = threadIdx.x * each + at;
        if (bin < bins) {
            u32 in_bin = starts[bin];
            u64 place = in_bin ? atomicAdd(&cursors[bin], u64(in_bin)) : 0;
            places[bin] = place - before;
            starts[bin] = before;
            before += in_bin;
        }
    }
    __syncthreads();

#pragma unroll
    for (int at = 0; at < PER_THREAD; ++at) {
        size_t row = start + at * THREADS + threadIdx.x;
        if (row < count) {
            u32 to = (starts[mix(value[0][at]) & (bins - 1)] + rank[at]) * WORDS;
#pragma unroll
            for (int word = 0; word < WORDS; ++word) staged[to + word] = value[word][at];
        }
    }
    __syncthreads();

    const u32 filled = u32(count - start < TILE ? count - start : TILE);
    for (u32 word = threadIdx.x; word < filled * WORDS; word += THREADS) {
        u32 row = word / WORDS;
        u32 bin = mix(staged[row * WORDS]) & (bins - 1);
        rows[(places[bin] + row) * WORDS + word % WORDS] = staged[word];
    }
}

// Counts rows that lie in a partition that is not theirs, and adds up all words.
template <int WORDS>
__global__ void check_kernel(const u32* rows, size_t count, u32 bins, const u64* ends, u64* wrong, u64* checksum) {
    size_t step = size_t(gridDim.x) * blockDim.x;
    u64 sum = 0;
    for (size_t row = size_t(blockIdx.x) * blockDim.x + threadIdx.x; row < count; row += step) {
        u32 bin = mix(rows[row * WORDS]) & (bins - 1);
        u64 first = bin ? ends[bin - 1] : 0;
        if (row < first || row >= ends[bin]) atomicAdd(wrong, 1ull);
        for (int word = 0; word < WORDS; ++word) sum += u64(rows[row * WORDS + word]) * (word + 1);
    }
    atomicAdd(checksum, sum);
}

__global__ void fill_kernel(u32* column, size_t count, u32 seed, bool key, int skew) {
    size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) {
        u32 drawn = mix(u32(at) * 2654435761u + seed);
        // Skewed keys: half of all rows have one of 2^skew keys.
        column[at] = key && skew >= 0 && (drawn & 1) ? (drawn >> 8) & ((1u << skew) - 1) : drawn;
    }
}

template <int WORDS, int THREADS, int PER_THREAD>
static void partition_of(int processors, size_t count, int skew) {
    std::vector<u32*> columns(WORDS);
    u64 expected = 0;
    for (int word = 0; word < WORDS; ++word) {
        columns[word] = device_memory<u32>(count);
        fill_kernel<<<processors * 8, 256>>>(columns[word], count, 17 + word, word == 0, skew);
        std::vector<u32> host(count);
        CHECK(cudaMemcpy(host.data(), columns[word], count * 4, cudaMemcpyDeviceToHost));
        for (u32 value : host) expected += u64(value) * (word + 1);
    }
    auto** pointers = device_memory<const u32*>(WORDS);
    CHECK(cudaMemcpy(pointers, columns.data(), WORDS * sizeof(u32*), cudaMemcpyHostToDevice));
    auto* rows = device_memory<u32>(count * WORDS);
    for (u32 bins : {64u, 256u, 512u, 1024u, 2048u}) {
        auto* totals = device_memory<u64>(bins);
        auto* cursors = device_memory<u64>(bins);
        auto* starts = device_memory<u64>(bins);
        auto* results = device_memory<u64>(2);
        const size_t tile = size_t(THREADS) * PER_THREAD;
        const size_t shared_bytes = tile * WORDS * 4 + (bins + (bins & 1) + 2) * 4 + bins * 8;
        auto kernel = partition_kernel<WORDS, THREADS, PER_THREAD>;
        int per_block = 0;
        CHECK(cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
        if (shared_bytes > size_t(per_block)) continue;
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)));
        double histogram = seconds([&] {
            CHECK(cudaMemsetAsync(totals, 0, bins * 8));
            histogram_kernel<<<processors * 4, 512, bins * 4>>>(columns[0], count, bins, totals);
        });
        scan_kernel<<<1, 1>>>(totals, starts, bins);
        double taken = seconds([&] {
            CHECK(cudaMemcpyAsync(cursors, starts, bins * 8, cudaMemcpyDeviceToDevice));
            kernel<<<unsigned((count + tile - 1) / tile), THREADS, shared_bytes>>>(pointers, count, bins, cursors, rows);
        });
        CHECK(cudaMemset(results, 0, 16));
        check_kernel<WORDS><<<processors * 8, 256>>>(rows, count, bins, cursors, results, results + 1);
        u64 found[2];
        CHECK(cudaMemcpy(found, results, 16, cudaMemcpyDeviceToHost));
        if (found[0] != 0 || found[1] != expected) {
            std::fprintf(stderr, "partition: %llu rows in a wrong place, checksum %llu and not %llu\n",
                         (unsigned long long)found[0], (unsigned long long)found[1], (unsigned long long)expected);
            std::exit(1);
        }
        std::printf("{\"case\":\"partition\",\"row_bytes\":%d,\"bins\":%u,\"tile_rows\":%zu,\"threads\":%d,\"skew\":%d,"
                    "\"rows\":%zu,\"seconds\":%.6g,\"g_rows_per_second\":%.4g,\"tb_per_second\":%.4g,"
                    "\"histogram_seconds\":%.6g}\n",
                    WORDS * 4, bins, tile, THREADS, skew, count, taken, count / taken / 1e9,
                    2.0 * WORDS * 4 * count / taken / 1e12, histogram);
        std::fflush(stdout);
        CHECK(cudaFree(totals));
        CHECK(cudaFree(cursors));
        CHECK(cudaFree(starts));
        CHECK(cudaFree(results));
    }
    for (u32* column : columns) CHECK(cudaFree(column));
    CHECK(cudaFree(pointers));
    CHECK(cudaFree(rows));
}

int main(int argc, char** argv) {
    cudaDeviceProp properties{};
    CHECK(cudaGetDeviceProperties(&properties, 0));
    const int processors = properties.multiProcessorCount;
    std::printf("{\"case\":\"device\",\"name\":\"%s\",\"multiprocessors\":%d,\"l2_bytes\":%d}\n", properties.name, processors,
                properties.l2CacheSize);
    copy(processors);
    atomic(processors);
    gather_of<u32>(processors, "4 bytes");
    gather_of<uint2>(processors, "8 bytes");
    gather_of<uint4>(processors, "16 bytes");

    // A smaller power of two is for a memory checker, not for timing.
    const size_t count = size_t(1) << (argc > 1 ? std::atoi(argv[1]) : 27);
    auto* keys = device_memory<u32>(count);
    auto* sink = device_memory<u32>(1);
    fill_kernel<<<processors * 8, 256>>>(keys, count, 17, true, -1);
    rank(processors, keys, count, "uniform", sink);
    fill_kernel<<<processors * 8, 256>>>(keys, count, 17, true, 0);
    rank(processors, keys, count, "half of them one key", sink);
    CHECK(cudaFree(keys));
    CHECK(cudaFree(sink));

    partition_of<2, 512, 16>(processors, count, -1);
    partition_of<2, 1024, 16>(processors, count, -1);
    partition_of<3, 512, 16>(processors, count, -1);
    partition_of<3, 1024, 12>(processors, count, -1);
    partition_of<3, 1024, 16>(processors, count, -1);
    partition_of<3, 512, 16>(processors, count, 0);
    return 0;
}
