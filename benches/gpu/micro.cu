// What the memory system of a GPU does with the access patterns that joins are made of.
//
//   nvcc -O3 -std=c++17 -arch=sm_90a -o micro micro.cu && ./micro [log2 of rows, 27] [case ...]
//
// Prints one JSON line per case: the median of several runs by CUDA events. These numbers decide how the join kernels are
// composed, so each case is one question:
//
//   copy         bytes read and written per second: the ceiling of everything that streams
//   atomic       atomic additions per second to 1 .. 2^20 addresses: can blocks reserve output with one counter?
//   gather       values per second read at random places of a working set: when is a table small enough for the L2?
//   rank         keys per second ranked by atomics in shared memory, by number of bins and skew
//   scatter      bytes per second written in short runs to many streams, as a pass does, with nothing to rank or to stage
//   partition    rows per second of one partition pass (rank, stage in shared memory, write runs), by bins and row size
//   groups       rows per second of one pass that writes whole sectors only, by bins and row size: what would a single pass into
//                thousands of partitions take?
//   store        stores per second of 32 to 256 bytes from shared memory to random places, each one bulk copy, or 16 bytes a
//                thread: can full buffers of a partition leave by one instruction?
//   tiles        bytes per second that reach shared memory when a cluster's blocks read the same tiles, loaded once and
//                multicast, or by each block for itself: what does it take that several blocks share a partition?
//   exchange     bytes per second that each block of a cluster sends to the shared memory of all, its own among them, by bulk copies or
//                16 bytes a thread: can the second level of a partitioning go from block to block, past the memory?
//   link         bytes per second between pinned host memory and the GPU: in, out, and both at once, by how the memory was pinned, by
//                the size of pieces, and beside gathers from random places: what do joins leave of the link's rate?
//   links        `link` of each GPU of the host alone, and of several at once: what does one take from another?
//   peer         `store` into the memory of a second GPU, beside a plain copy to there: can a pass write to its peers?
//
// `exchange` and `store` by bulk copies need compute capability 9.0, `tiles` 9 to 11 and code that is made for it (sm_90a, not
// sm_90), `links` a second GPU, and `peer` one that the first reaches; where one cannot run, a line says that it was skipped.
//
// What is written is checked: each row must be in its partition, and all of them there, by count and checksum; what is copied,
// scattered or stored is compared word by word, with memory overwritten before; counters must add up, and so must the tiles
// that blocks of a cluster saw, in their order.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <sys/mman.h>

#include "clusters.cuh"
#include "common.cuh"

static void skipped(const char* name, const char* why) { std::printf("{\"case\":\"%s\",\"skipped\":\"%s\"}\n", name, why); }

// One of them to warm up.
constexpr int RUNS = 6;

// The median of the others.
static double median_of(std::vector<double> runs) {
    std::sort(runs.begin() + 1, runs.end());
    return runs[1 + (runs.size() - 1) / 2];
}

// The median in seconds, by events of the current GPU.
static double seconds(const std::function<void()>& work) {
    cudaEvent_t start, stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    std::vector<double> runs;
    for (int run = 0; run < RUNS; ++run) {
        CHECK(cudaEventRecord(start));
        work();
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(stop));
        CHECK(cudaEventSynchronize(stop));
        float taken = 0;
        CHECK(cudaEventElapsedTime(&taken, start, stop));
        runs.push_back(taken / 1e3);
    }
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(stop));
    return median_of(runs);
}

// ---- What is written, and whether it is there -------------------------------------------------------------------------

// The word in this place of a column that nothing but its seed tells.
__host__ __device__ inline u32 drawn(u32 at, u32 seed) { return mix(at * 2654435761u + seed); }

__global__ void fill_kernel(u32* column, size_t count, u32 seed, bool key, int skew) {
    size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) {
        u32 word = drawn(u32(at), seed);
        // Skewed keys: half of all rows have one of 2^skew keys.
        column[at] = key && skew >= 0 && (word & 1) ? (word >> 8) & ((1u << skew) - 1) : word;
    }
}

static void fill(int processors, void* words, size_t bytes, u32 seed) {
    fill_kernel<<<processors * 8, 256>>>(static_cast<u32*>(words), bytes / 4, seed, false, -1);
    CHECK(cudaGetLastError());
}

__global__ void compare_kernel(const u32* words, size_t count, u32 seed, u64* wrong) {
    size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step)
        if (words[at] != drawn(u32(at), seed)) atomicAdd(wrong, 1ull);
}

static void expect_none(const char* what, u64 wrong) {
    if (wrong == 0) return;
    std::fprintf(stderr, "%s: %llu are wrong\n", what, wrong);
    std::exit(1);
}

// Ends the program if a check counts something that is wrong.
static void verify(const char* what, const std::function<void(u64*)>& check) {
    auto* wrong = device_memory<u64>(1);
    CHECK(cudaMemset(wrong, 0, sizeof(u64)));
    check(wrong);
    CHECK(cudaGetLastError());
    u64 found = 0;
    CHECK(cudaMemcpy(&found, wrong, sizeof(u64), cudaMemcpyDeviceToHost));
    expect_none(what, found);
    CHECK(cudaFree(wrong));
}

static void verify_filled(int processors, const char* what, const void* words, size_t bytes, u32 seed) {
    verify(what, [&](u64* wrong) {
        compare_kernel<<<processors * 8, 256>>>(static_cast<const u32*>(words), bytes / 4, seed, wrong);
    });
}

// ---- copy -------------------------------------------------------------------------------------------------------------

__global__ void copy_kernel(const uint4* __restrict__ from, uint4* __restrict__ to, size_t count) {
    size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) to[at] = from[at];
}

static void copy(int processors, size_t count) {
    const size_t bytes = count * 32;
    auto* from = device_memory<uint4>(bytes / 16);
    auto* to = device_memory<uint4>(bytes / 16);
    fill(processors, from, bytes, 3);
    CHECK(cudaMemset(to, 0xee, bytes));
    double taken = seconds([&] { copy_kernel<<<processors * 16, 512>>>(from, to, bytes / 16); });
    verify_filled(processors, "words of the copy", to, bytes, 3);
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
        const u64 count = u64(blocks) * (256 / 32) * rounds;
        std::vector<u64> added(addresses);
        CHECK(cudaMemcpy(added.data(), counters, addresses * sizeof(u64), cudaMemcpyDeviceToHost));
        u64 sum = 0;
        for (u64 counter : added) sum += counter;
        expect_none("atomic additions", sum - RUNS * count);
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
static void gather_of(int processors, size_t count, const char* name) {
    const size_t bytes_max = size_t(2) << 30, reads = count * 2;
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

// ---- scatter ----------------------------------------------------------------------------------------------------------

// Where the run of this number begins, in runs: in a row of as many runs as there are streams, each stream gets one, in an
// order that differs from row to row, as tiles of a partition pass have them.
__device__ inline u32 place_of_run(u32 run, int stream_bits, u32 runs) {
    const u32 row = run >> stream_bits;
    const u32 stream = (run * 0x9e3779b1u + mix(row)) & ((1u << stream_bits) - 1);
    return stream * (runs >> stream_bits) + row;
}

// No word is twice in what is scattered, and few instructions make one, so that it is the stores that take the time.
__device__ inline u32 scattered_word(u32 at) { return at * 0x85ebca6bu + 1; }

// Consecutive threads write consecutive words of a run. `shift` words move all runs away from where sectors begin.
template <u32 WORDS, typename Word>
__global__ void scatter_kernel(Word* to, int stream_bits, u32 runs, u32 shift) {
    constexpr u32 PER_WORD = sizeof(Word) / 4, PER_RUN = WORDS / PER_WORD;
    const u32 step = gridDim.x * blockDim.x;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < runs * PER_RUN; at += step) {
        Word word;
#pragma unroll
        for (u32 part = 0; part < PER_WORD; ++part) reinterpret_cast<u32*>(&word)[part] = scattered_word(at * PER_WORD + part);
        to[size_t(place_of_run(at / PER_RUN, stream_bits, runs)) * PER_RUN + at % PER_RUN + shift] = word;
    }
}

template <u32 WORDS>
__global__ void compare_runs(const u32* words, int stream_bits, u32 runs, u32 shift, u64* wrong) {
    const u32 step = gridDim.x * blockDim.x;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < runs * WORDS; at += step) {
        const size_t place = size_t(place_of_run(at / WORDS, stream_bits, runs)) * WORDS + at % WORDS + shift;
        if (words[place] != scattered_word(at)) atomicAdd(wrong, 1ull);
    }
}

template <u32 WORDS, typename Word>
static void scatter_of(int processors, u32* to, u32 runs, u32 shift) {
    const size_t bytes = size_t(runs) * WORDS * 4;
    for (int stream_bits : {10, 11, 12}) {
        CHECK(cudaMemset(to, 0xee, bytes + shift * 4));
        double taken = seconds([&] {
            scatter_kernel<WORDS, Word><<<processors * 4, 512>>>(reinterpret_cast<Word*>(to), stream_bits, runs, shift);
        });
        verify("scattered words", [&](u64* wrong) {
            compare_runs<WORDS><<<processors * 8, 256>>>(to, stream_bits, runs, shift, wrong);
        });
        std::printf("{\"case\":\"scatter\",\"run_bytes\":%u,\"streams\":%u,\"thread_bytes\":%zu,\"whole_sectors\":%s,\"runs\":%u,"
                    "\"seconds\":%.6g,\"tb_per_second\":%.4g}\n",
                    WORDS * 4, 1u << stream_bits, sizeof(Word), shift == 0 ? "true" : "false", runs, taken, bytes / taken / 1e12);
    }
}

static void scatter(int processors, size_t count) {
    const u32 runs = u32(count / 8);
    auto* to = device_memory<u32>(size_t(runs) * 48 + 1);
    scatter_of<24, u32>(processors, to, runs, 0);
    scatter_of<32, u32>(processors, to, runs, 0);
    scatter_of<48, u32>(processors, to, runs, 0);
    scatter_of<24, u32>(processors, to, runs, 1);
    scatter_of<32, u32>(processors, to, runs, 1);
    scatter_of<48, u32>(processors, to, runs, 1);
    scatter_of<24, uint4>(processors, to, runs, 0);
    scatter_of<32, uint4>(processors, to, runs, 0);
    scatter_of<48, uint4>(processors, to, runs, 0);
    CHECK(cudaFree(to));
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
    const u32 inclusive = warp_inclusive_sum(sum);
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

// Rows of WORDS columns of 4 bytes, the first of them the key.
template <int WORDS>
struct Rows {
    size_t count;
    std::vector<u32*> columns;
    const u32** pointers;
    // Of all words, each by its column.
    u64 expected = 0;

    Rows(int processors, size_t count, int skew) : count(count), columns(WORDS) {
        for (int word = 0; word < WORDS; ++word) {
            columns[word] = device_memory<u32>(count);
            fill_kernel<<<processors * 8, 256>>>(columns[word], count, 17 + word, word == 0, skew);
            std::vector<u32> host(count);
            CHECK(cudaMemcpy(host.data(), columns[word], count * 4, cudaMemcpyDeviceToHost));
            for (u32 value : host) expected += u64(value) * (word + 1);
        }
        pointers = device_memory<const u32*>(WORDS);
        CHECK(cudaMemcpy(pointers, columns.data(), WORDS * sizeof(u32*), cudaMemcpyHostToDevice));
    }
    ~Rows() {
        for (u32* column : columns) cudaFree(column);
        cudaFree(pointers);
    }
    Rows(const Rows&) = delete;

    // Ends the program unless every row is in its partition, and all of them are there.
    void verify_partitioned(const char* what, int processors, const u32* rows, u32 bins, const u64* ends) const {
        auto* results = device_memory<u64>(2);
        CHECK(cudaMemset(results, 0, 16));
        check_kernel<WORDS><<<processors * 8, 256>>>(rows, count, bins, ends, results, results + 1);
        u64 found[2];
        CHECK(cudaMemcpy(found, results, 16, cudaMemcpyDeviceToHost));
        if (found[0] != 0 || found[1] != expected) {
            std::fprintf(stderr, "%s: %llu rows in a wrong place, checksum %llu and not %llu\n", what, (unsigned long long)found[0],
                         (unsigned long long)found[1], (unsigned long long)expected);
            std::exit(1);
        }
        CHECK(cudaFree(results));
    }
};

template <int WORDS, int THREADS, int PER_THREAD>
static void partition_of(int processors, size_t count, int skew) {
    const Rows<WORDS> input(processors, count, skew);
    auto* rows = device_memory<u32>(count * WORDS);
    for (u32 bins : {64u, 256u, 512u, 1024u, 2048u}) {
        auto* totals = device_memory<u64>(bins);
        auto* cursors = device_memory<u64>(bins);
        auto* starts = device_memory<u64>(bins);
        const size_t tile = size_t(THREADS) * PER_THREAD;
        const size_t shared_bytes = tile * WORDS * 4 + (bins + (bins & 1) + 2) * 4 + bins * 8;
        auto kernel = partition_kernel<WORDS, THREADS, PER_THREAD>;
        int per_block = 0;
        CHECK(cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
        if (shared_bytes > size_t(per_block)) continue;
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)));
        double histogram = seconds([&] {
            CHECK(cudaMemsetAsync(totals, 0, bins * 8));
            histogram_kernel<<<processors * 4, 512, bins * 4>>>(input.columns[0], count, bins, totals);
        });
        scan_kernel<<<1, 1>>>(totals, starts, bins);
        double taken = seconds([&] {
            CHECK(cudaMemcpyAsync(cursors, starts, bins * 8, cudaMemcpyDeviceToDevice));
            kernel<<<unsigned((count + tile - 1) / tile), THREADS, shared_bytes>>>(input.pointers, count, bins, cursors, rows);
        });
        input.verify_partitioned("partition", processors, rows, bins, cursors);
        std::printf("{\"case\":\"partition\",\"row_bytes\":%d,\"bins\":%u,\"tile_rows\":%zu,\"threads\":%d,\"skew\":%d,"
                    "\"rows\":%zu,\"seconds\":%.6g,\"g_rows_per_second\":%.4g,\"tb_per_second\":%.4g,"
                    "\"histogram_seconds\":%.6g}\n",
                    WORDS * 4, bins, tile, THREADS, skew, count, taken, count / taken / 1e9,
                    2.0 * WORDS * 4 * count / taken / 1e12, histogram);
        std::fflush(stdout);
        CHECK(cudaFree(totals));
        CHECK(cudaFree(cursors));
        CHECK(cudaFree(starts));
    }
    CHECK(cudaFree(rows));
}

// ---- groups -----------------------------------------------------------------------------------------------------------

// One pass that writes whole sectors only, into more partitions than rows of a tile can be put in order for: each partition has room for a
// group of rows in shared memory, and a group leaves when it is full. Blocks go on from tile to tile with what is left. A group is of as
// many rows as fill sectors, and lies at a multiple of that; rows that are in none go to both ends of their partition.
//
//   starts[bin]          multiple of GROUP                              ends[bin]
//      | 1st, 2nd ...    | groups, as blocks take room ...        | last, first after the head |
//
// Each round every thread puts its rows into groups that have room; whoever fills one takes room for it in the output. A row that finds
// its group full is tried again when that has left, so that many rows of one partition take many rounds: keys had better be uniform.
template <int GROUP>
__host__ __device__ inline u32 next_group(u32 row) {
    return (row + GROUP - 1) / GROUP * GROUP;
}

template <int GROUP>
__device__ inline u32 single_place(u32 start, u32 end, u32 number) {
    const u32 first = next_group<GROUP>(start), head = (first < end ? first : end) - start;
    return number < head ? start + number : end - 1 - (number - head);
}

template <int WORDS, int GROUP>
constexpr size_t groups_shared_bytes(u32 bins) {
    return size_t(bins) * (GROUP * WORDS + 3) * 4;
}

// `cursors`: where the next group of each partition goes. `singles`: rows of each that went to no group.
template <int WORDS, int GROUP, int THREADS, int PER_THREAD>
__global__ void __launch_bounds__(THREADS) groups_kernel(const u32* const* __restrict__ columns, size_t count, u32 bins, const u32* starts,
                                                         const u32* ends, u32* cursors, u32* singles, u32* __restrict__ rows) {
    constexpr u32 TILE = THREADS * PER_THREAD, WORDS_OF_GROUP = GROUP * WORDS, VECTORS = WORDS_OF_GROUP / 4;
    static_assert(WORDS_OF_GROUP % 8 == 0, "a group is whole sectors");
    extern __shared__ __align__(16) u32 shared[];
    u32* groups = shared;                         // bins * WORDS_OF_GROUP
    u32* filled = groups + bins * WORDS_OF_GROUP; // bins: rows of each group, and those that found no room
    u32* full = filled + bins;                    // bins: full ones
    u32* places = full + bins;                    // bins: where these go
    __shared__ u32 full_count;
    const size_t tiles = (count + TILE - 1) / TILE;
    const size_t first = tiles * blockIdx.x / gridDim.x, last = tiles * (blockIdx.x + 1) / gridDim.x;
    for (u32 bin = threadIdx.x; bin < bins; bin += THREADS) filled[bin] = 0;
    if (threadIdx.x == 0) full_count = 0;

    // A tile is loaded while the one before is put into groups.
    u32 coming[WORDS][PER_THREAD];
    const auto load = [&](size_t tile) {
#pragma unroll
        for (int at = 0; at < PER_THREAD; ++at) {
            const size_t row = tile * TILE + at * THREADS + threadIdx.x;
#pragma unroll
            for (int word = 0; word < WORDS; ++word) coming[word][at] = tile < last && row < count ? columns[word][row] : 0;
        }
    };
    load(first);
    __syncthreads();
    for (size_t tile = first; tile < last; ++tile) {
        u32 value[WORDS][PER_THREAD];
        u32 pending = 0;
#pragma unroll
        for (int at = 0; at < PER_THREAD; ++at) {
            if (tile * TILE + at * THREADS + threadIdx.x < count) pending |= 1u << at;
#pragma unroll
            for (int word = 0; word < WORDS; ++word) value[word][at] = coming[word][at];
        }
        load(tile + 1);
        do {
#pragma unroll
            for (int at = 0; at < PER_THREAD; ++at) {
                if (!(pending >> at & 1)) continue;
                const u32 bin = mix(value[0][at]) & (bins - 1);
                const u32 place = atomicAdd(&filled[bin], 1u);
                if (place >= GROUP) continue;
                pending &= ~(1u << at);
#pragma unroll
                for (int word = 0; word < WORDS; ++word) groups[bin * WORDS_OF_GROUP + place * WORDS + word] = value[word][at];
                if (place == GROUP - 1) {
                    const u32 number = atomicAdd(&full_count, 1u);
                    full[number] = bin;
                    places[number] = atomicAdd(&cursors[bin], u32(GROUP));
                }
            }
            __syncthreads();
            const u32 leaving = full_count;
            for (u32 at = threadIdx.x; at < leaving * VECTORS; at += THREADS) {
                const u32 number = at / VECTORS, vector = at % VECTORS, bin = full[number], place = places[number], end = ends[bin];
                // There is place for all rows, but not for all groups.
                if (place + GROUP <= end) {
                    reinterpret_cast<uint4*>(rows + size_t(place) * WORDS)[vector] =
                        reinterpret_cast<const uint4*>(groups + bin * WORDS_OF_GROUP)[vector];
                } else if (vector == 0) {
                    const u32 before = atomicAdd(&singles[bin], u32(GROUP)), start = starts[bin];
                    for (u32 row = 0; row < GROUP; ++row)
                        for (int word = 0; word < WORDS; ++word)
                            rows[size_t(single_place<GROUP>(start, end, before + row)) * WORDS + word] =
                                groups[bin * WORDS_OF_GROUP + row * WORDS + word];
                }
            }
            __syncthreads();
            for (u32 number = threadIdx.x; number < leaving; number += THREADS) filled[full[number]] = 0;
            if (threadIdx.x == 0) full_count = 0;
        } while (__syncthreads_or(pending != 0));
    }
    for (u32 bin = threadIdx.x; bin < bins; bin += THREADS) {
        const u32 left = filled[bin];
        if (left == 0) continue;
        const u32 before = atomicAdd(&singles[bin], left), start = starts[bin], end = ends[bin];
        for (u32 row = 0; row < left; ++row)
            for (int word = 0; word < WORDS; ++word)
                rows[size_t(single_place<GROUP>(start, end, before + row)) * WORDS + word] =
                    groups[bin * WORDS_OF_GROUP + row * WORDS + word];
    }
}

template <int WORDS, int GROUP, int THREADS, int PER_THREAD>
static void groups_of(int processors, size_t count) {
    const Rows<WORDS> input(processors, count, -1);
    auto* rows = device_memory<u32>(count * WORDS);
    for (u32 bins : {256u, 1024u, 2048u, 4096u}) {
        const auto kernel = groups_kernel<WORDS, GROUP, THREADS, PER_THREAD>;
        const size_t shared_bytes = groups_shared_bytes<WORDS, GROUP>(bins);
        int per_block = 0, per_processor = 0;
        CHECK(cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
        if (shared_bytes > size_t(per_block)) continue;
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)));
        CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, THREADS, shared_bytes));
        auto* totals = device_memory<u64>(bins);
        CHECK(cudaMemset(totals, 0, bins * 8));
        histogram_kernel<<<processors * 4, 512, bins * 4>>>(input.columns[0], count, bins, totals);
        std::vector<u64> sums(bins), ends_of_all(bins);
        CHECK(cudaMemcpy(sums.data(), totals, bins * 8, cudaMemcpyDeviceToHost));
        std::vector<u32> starts(bins), ends(bins), cursors(bins);
        u64 sum = 0;
        for (u32 bin = 0; bin < bins; ++bin) {
            starts[bin] = u32(sum);
            cursors[bin] = next_group<GROUP>(starts[bin]);
            sum += sums[bin];
            ends[bin] = u32(sum);
            ends_of_all[bin] = sum;
        }
        // Of each partition: where it starts and ends, where its groups go at first, and then, with the rows that are in none.
        auto* bounds = device_memory<u32>(5 * bins);
        const auto part = [&](int number) { return bounds + size_t(number) * bins; };
        CHECK(cudaMemcpy(part(0), starts.data(), bins * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(part(1), ends.data(), bins * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(part(2), cursors.data(), bins * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemset(rows, 0xff, count * WORDS * 4));
        const double taken = seconds([&] {
            CHECK(cudaMemcpyAsync(part(3), part(2), bins * 4, cudaMemcpyDeviceToDevice));
            CHECK(cudaMemsetAsync(part(4), 0, bins * 4));
            kernel<<<processors * per_processor, THREADS, shared_bytes>>>(input.pointers, count, bins, part(0), part(1), part(3), part(4),
                                                                          rows);
        });
        CHECK(cudaMemcpy(totals, ends_of_all.data(), bins * 8, cudaMemcpyHostToDevice));
        input.verify_partitioned("groups", processors, rows, bins, totals);
        std::printf("{\"case\":\"groups\",\"row_bytes\":%d,\"bins\":%u,\"group_rows\":%d,\"tile_rows\":%d,\"threads\":%d,"
                    "\"blocks_per_multiprocessor\":%d,\"rows\":%zu,\"seconds\":%.6g,\"g_rows_per_second\":%.4g,\"tb_per_second\":%.4g}\n",
                    WORDS * 4, bins, GROUP, THREADS * PER_THREAD, THREADS, per_processor, count, taken, count / taken / 1e9,
                    2.0 * WORDS * 4 * count / taken / 1e12);
        CHECK(cudaFree(totals));
        CHECK(cudaFree(bounds));
    }
    CHECK(cudaFree(rows));
}

// ---- store ------------------------------------------------------------------------------------------------------------

constexpr int STORE_THREADS = 128, STORE_STAGES = 2;

// Each store has a place of its own; one of less than 128 bytes leaves the rest of its place alone.
template <int BYTES>
constexpr u32 PLACE_BYTES = BYTES > 128 ? BYTES : 128;

// The 16 bytes of this number of a store.
__device__ inline uint4 piece_of(u32 store, u32 piece) { return uint4{store, piece, mix(store * 16 + piece), ~store}; }

// A warp puts what its threads will store into shared memory, as a partition pass stages rows, in turns into one of two
// buffers, and stores it from there.
template <int BYTES, bool BULK>
__global__ void __launch_bounds__(STORE_THREADS) store_kernel(char* to, u32 stores, int bits) {
    constexpr u32 PIECES = BYTES / 16;
    extern __shared__ __align__(128) uint4 staged_pieces[];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 warps = gridDim.x * (STORE_THREADS / 32);
    uint4* buffers = staged_pieces + warp * STORE_STAGES * 32 * PIECES;
    u32 stage = 0;
    for (u32 first = (blockIdx.x * (STORE_THREADS / 32) + warp) * 32; first < stores; first += warps * 32) {
        uint4* buffer = buffers + stage * 32 * PIECES;
#if HAS_BULK_COPIES
        if constexpr (BULK) wait_until_read<STORE_STAGES - 1>();
#endif
        __syncwarp();
#pragma unroll
        for (u32 at = lane; at < 32 * PIECES; at += 32) buffer[at] = piece_of(first + at / PIECES, at % PIECES);
        if constexpr (BULK) {
#if HAS_BULK_COPIES
            show_to_copies();
            __syncwarp();
            copy_out(to + size_t(shuffled(first + lane, bits)) * PLACE_BYTES<BYTES>, buffer + lane * PIECES, BYTES);
#endif
        } else {
            __syncwarp();
#pragma unroll
            for (u32 at = lane; at < 32 * PIECES; at += 32) {
                char* place = to + size_t(shuffled(first + at / PIECES, bits)) * PLACE_BYTES<BYTES>;
                reinterpret_cast<uint4*>(place)[at % PIECES] = buffer[at];
            }
        }
        stage = (stage + 1) % STORE_STAGES;
    }
#if HAS_BULK_COPIES
    // Shared memory must last until it has been read.
    if constexpr (BULK) wait_until_copied();
#endif
}

template <int BYTES>
__global__ void compare_stores(const char* places, u32 stores, int bits, u64* wrong) {
    const u32 step = gridDim.x * blockDim.x;
    for (u32 store = blockIdx.x * blockDim.x + threadIdx.x; store < stores; store += step) {
        const auto* place = reinterpret_cast<const uint4*>(places + size_t(shuffled(store, bits)) * PLACE_BYTES<BYTES>);
        bool same = true;
        for (u32 piece = 0; piece < PLACE_BYTES<BYTES> / 16; ++piece) {
            const uint4 expected = piece < BYTES / 16
                                       ? piece_of(store, piece)
                                       : uint4{0xeeeeeeeeu, 0xeeeeeeeeu, 0xeeeeeeeeu, 0xeeeeeeeeu};
            const uint4 found = place[piece];
            same = same && found.x == expected.x && found.y == expected.y && found.z == expected.z && found.w == expected.w;
        }
        if (!same) atomicAdd(wrong, 1ull);
    }
}

template <int BYTES, bool BULK>
static void store_of(int processors, char* to, size_t bytes, int owner, const char* name) {
    const u32 stores = u32(bytes / PLACE_BYTES<BYTES>);
    int bits = 0;
    while ((1u << bits) < stores) ++bits;
    CHECK(cudaSetDevice(owner));
    CHECK(cudaMemset(to, 0xee, bytes));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(0));
    auto kernel = store_kernel<BYTES, BULK>;
    const int shared_bytes = STORE_THREADS * STORE_STAGES * BYTES;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    int blocks = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, STORE_THREADS, size_t(shared_bytes)));
    double taken = seconds([&] { kernel<<<processors * blocks, STORE_THREADS, shared_bytes>>>(to, stores, bits); });
    verify("stores", [&](u64* wrong) { compare_stores<BYTES><<<processors * 8, 256>>>(to, stores, bits, wrong); });
    std::printf("{\"case\":\"%s\",\"way\":\"%s\",\"bytes\":%d,\"stores\":%u,\"seconds\":%.6g,\"g_per_second\":%.4g,"
                "\"tb_per_second\":%.4g}\n",
                name, BULK ? "bulk copy" : "16 bytes a thread", BYTES, stores, taken, stores / taken / 1e9,
                double(stores) * BYTES / taken / 1e12);
}

template <int BYTES>
static void store_both_ways(int processors, bool bulk_copies, char* to, size_t bytes, int owner, const char* name) {
    store_of<BYTES, false>(processors, to, bytes, owner, name);
    if (bulk_copies) store_of<BYTES, true>(processors, to, bytes, owner, name);
}

// Into memory of the GPU `owner`.
static void store_all(int processors, bool bulk_copies, char* to, size_t bytes, int owner, const char* name) {
    store_both_ways<32>(processors, bulk_copies, to, bytes, owner, name);
    store_both_ways<64>(processors, bulk_copies, to, bytes, owner, name);
    store_both_ways<128>(processors, bulk_copies, to, bytes, owner, name);
    store_both_ways<256>(processors, bulk_copies, to, bytes, owner, name);
    if (!bulk_copies) skipped(name, "bulk copies need compute capability 9.0");
}

static void store(int processors, bool bulk_copies, size_t count) {
    const size_t bytes = count * 32;
    auto* to = device_memory<char>(bytes);
    store_all(processors, bulk_copies, to, bytes, 0, "store");
    CHECK(cudaFree(to));
}

// ---- tiles ------------------------------------------------------------------------------------------------------------

constexpr u32 TILE_BYTES = 16 << 10, TILE_STAGES = 8, TILE_READERS = 256;

// What one of the readers makes of its part of a tile.
__device__ inline u32 weighed(const char* tile, u32 reader) {
    u32 sum = 0;
#pragma unroll
    for (u32 at = reader; at < TILE_BYTES / 16; at += TILE_READERS) {
        const uint4 words = reinterpret_cast<const uint4*>(tile)[at];
        sum += (words.x + 3 * words.y + 5 * words.z + 7 * words.w) * (2 * at + 1);
    }
    return sum;
}

// Tiles that were seen in another order have another sum.
__device__ inline u32 appended(u32 sum, u32 tile) { return sum * 0x9e3779b1u + tile; }

// Where the tile of this number of a cluster lies: clusters take the tiles in turns, as often as it takes.
__device__ inline const char* tile_of(const char* source, u32 source_tiles, u32 cluster, u32 clusters, u32 number) {
    return source + size_t((u64(number) * clusters + cluster) % source_tiles) * TILE_BYTES;
}

// Every block of a cluster reads all of the cluster's tiles from its shared memory. One thread, of a warp of its own, has them
// copied there, several tiles ahead:
//
//   full[stage]    the block's own copies have been asked for, and all bytes of the tile are there
//   empty[stage]   the readers are done with it, those of all blocks whose memory is written from here
//
// With MULTICAST each block loads a part of each tile, into the memory of all of them, and else the whole tile for itself.
template <int SIZE, bool MULTICAST>
__global__ void __launch_bounds__(TILE_READERS + 32)
    tiles_kernel(const char* source, u32 source_tiles, u32 tiles, u32* sums) {
#if HAS_MULTICAST
    extern __shared__ __align__(128) char staged_tiles[];
    __shared__ u64 full[TILE_STAGES], empty[TILE_STAGES];
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < TILE_STAGES; ++stage) {
            init_barrier(full[stage], 1);
            init_barrier(empty[stage], (MULTICAST ? SIZE : 1) * (TILE_READERS / 32));
        }
        show_barriers();
    }
    // No block is written to before its barriers are there.
    wait_for_cluster();
    const u32 rank = rank_in_cluster();
    if (threadIdx.x == TILE_READERS) {
        for (u32 number = 0; number < tiles; ++number) {
            const u32 stage = number % TILE_STAGES;
            if (number >= TILE_STAGES) wait_for(empty[stage], (number / TILE_STAGES - 1) & 1);
            // Bytes from other blocks may come earlier: the phase lasts until this arrival all the same.
            arrive_expecting(full[stage], TILE_BYTES);
            const char* from = tile_of(source, source_tiles, blockIdx.x / SIZE, gridDim.x / SIZE, number);
            char* to = staged_tiles + stage * TILE_BYTES;
            if constexpr (MULTICAST) {
                constexpr u32 PART = TILE_BYTES / SIZE;
                copy_in_to_all(to + rank * PART, from + rank * PART, PART, full[stage], (1u << SIZE) - 1);
            } else {
                copy_in(to, from, TILE_BYTES, full[stage]);
            }
        }
    } else if (threadIdx.x < TILE_READERS) {
        u32 sum = 0;
        for (u32 number = 0; number < tiles; ++number) {
            const u32 stage = number % TILE_STAGES;
            wait_for(full[stage], (number / TILE_STAGES) & 1);
            sum = appended(sum, weighed(staged_tiles + stage * TILE_BYTES, threadIdx.x));
            __syncwarp();
            if constexpr (MULTICAST) {
                if (threadIdx.x % 32 < SIZE) arrive_at(empty[stage], threadIdx.x % 32);
            } else {
                if (threadIdx.x % 32 == 0) arrive_at(empty[stage], rank);
            }
        }
        atomicAdd(&sums[blockIdx.x], sum);
    }
    // No block ends while another one may still arrive at its barriers.
    wait_for_cluster();
#endif
}

// What the blocks of each cluster must find, by plain reads.
__global__ void __launch_bounds__(TILE_READERS) compare_tiles(const char* source, u32 source_tiles, u32 tiles, u32 size,
                                                              const u32* sums, u64* wrong) {
    __shared__ u32 expected;
    if (threadIdx.x == 0) expected = 0;
    __syncthreads();
    u32 sum = 0;
    for (u32 number = 0; number < tiles; ++number)
        sum = appended(sum, weighed(tile_of(source, source_tiles, blockIdx.x, gridDim.x, number), threadIdx.x));
    atomicAdd(&expected, sum);
    __syncthreads();
    if (threadIdx.x < size && sums[blockIdx.x * size + threadIdx.x] != expected) atomicAdd(wrong, 1ull);
}

template <int SIZE, bool MULTICAST>
static void tiles_of(int processors, const char* source, size_t source_bytes, size_t count) {
    auto kernel = tiles_kernel<SIZE, MULTICAST>;
    const int shared_bytes = TILE_STAGES * TILE_BYTES;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    ClusterLaunch launch(processors, SIZE, TILE_READERS + 32, shared_bytes);
    const u32 clusters = launch.fit(kernel);
    if (clusters == 0) return skipped("tiles", "this GPU runs no clusters of this size");
    const u32 blocks = clusters * SIZE, source_tiles = u32(source_bytes / TILE_BYTES);
    // Each stage several times, however few rows there are.
    const u32 tiles = std::max(u32(count * 64 / TILE_BYTES / blocks), 4 * TILE_STAGES);
    auto* sums = device_memory<u32>(blocks);
    double taken = seconds([&] {
        CHECK(cudaMemsetAsync(sums, 0, blocks * 4));
        CHECK(cudaLaunchKernelEx(&launch.config, kernel, source, source_tiles, tiles, sums));
    });
    verify("sums of tiles", [&](u64* wrong) {
        compare_tiles<<<clusters, TILE_READERS>>>(source, source_tiles, tiles, SIZE, sums, wrong);
    });
    const double bytes = double(tiles) * TILE_BYTES * blocks;
    std::printf("{\"case\":\"tiles\",\"way\":\"%s\",\"cluster\":%d,\"blocks\":%u,\"tile_bytes\":%u,\"source_bytes\":%zu,"
                "\"seconds\":%.6g,\"tb_per_second\":%.4g}\n",
                MULTICAST ? "multicast" : "each its own", SIZE, blocks, TILE_BYTES, source_bytes, taken, bytes / taken / 1e12);
    CHECK(cudaFree(sums));
}

static void tiles(int processors, bool multicast, size_t count) {
    int per_block = 0, has_clusters = 0;
    CHECK(cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(cudaDeviceGetAttribute(&has_clusters, cudaDevAttrClusterLaunch, 0));
    if (!multicast || !has_clusters)
        return skipped("tiles", "multicast needs compute capability 9 to 11, and code for sm_90a, sm_100f or sm_110f");
    if (per_block < int(TILE_STAGES * TILE_BYTES + 1024)) return skipped("tiles", "too little shared memory for a block");
    const size_t source_bytes = count * 8;
    auto* source = device_memory<char>(source_bytes);
    fill(processors, source, source_bytes, 5);
    // What the second-level cache holds, and what it does not.
    for (size_t bytes : {source_bytes / 64, source_bytes}) {
        tiles_of<2, true>(processors, source, bytes, count);
        tiles_of<2, false>(processors, source, bytes, count);
        tiles_of<4, true>(processors, source, bytes, count);
        tiles_of<4, false>(processors, source, bytes, count);
        tiles_of<8, true>(processors, source, bytes, count);
        tiles_of<8, false>(processors, source, bytes, count);
    }
    CHECK(cudaFree(source));
}

// ---- exchange ---------------------------------------------------------------------------------------------------------

constexpr int EXCHANGE_THREADS = 512, EXCHANGE_STAGES = 2;

// What a block has received from all others, for as many rounds as are under way, and what it sends.
template <int SIZE, int BYTES>
struct alignas(128) Boxes {
    uint4 in[EXCHANGE_STAGES][SIZE][BYTES / 16];
    uint4 out[EXCHANGE_STAGES][SIZE][BYTES / 16];
    u64 full[EXCHANGE_STAGES], empty[EXCHANGE_STAGES];
};

// In each round every block sends so many bytes to each block of its cluster, itself among them, and reads what has come.
template <int SIZE, int BYTES, bool BULK>
__global__ void __launch_bounds__(EXCHANGE_THREADS) exchange_kernel(u32 rounds, u32* sums) {
#if HAS_BULK_COPIES
    extern __shared__ __align__(128) char boxes[];
    auto& s = *reinterpret_cast<Boxes<SIZE, BYTES>*>(boxes);
    const u32 rank = rank_in_cluster();
    for (u32 at = threadIdx.x; at < sizeof(s.out) / 4; at += EXCHANGE_THREADS) reinterpret_cast<u32*>(s.out)[at] = mix(at * SIZE + rank);
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < EXCHANGE_STAGES; ++stage) {
            init_barrier(s.full[stage], SIZE);
            init_barrier(s.empty[stage], SIZE);
        }
        show_barriers();
    }
    show_to_copies();
    wait_for_cluster();
    u32 sum = 0;
    const auto send = [&](u32 round) {
        const u32 stage = round % EXCHANGE_STAGES;
        if constexpr (BULK) {
            if (threadIdx.x >= SIZE) return;
            // Each begins with another block.
            const u32 to = (rank + threadIdx.x) % SIZE;
            if (round >= EXCHANGE_STAGES) wait_for(s.empty[stage], (round / EXCHANGE_STAGES - 1) & 1);
            arrive_expecting_at(s.full[stage], to, BYTES);
            copy_to(s.in[stage][rank], to, s.out[stage][to], BYTES, s.full[stage]);
        } else {
            if (round >= EXCHANGE_STAGES) wait_for(s.empty[stage], (round / EXCHANGE_STAGES - 1) & 1);
            for (u32 at = threadIdx.x; at < SIZE * BYTES / 16; at += EXCHANGE_THREADS) {
                const u32 to = (rank + at / (BYTES / 16)) % SIZE, part = at % (BYTES / 16);
                store_in(&s.in[stage][rank][part], to, s.out[stage][to][part]);
            }
            __syncthreads();
            if (threadIdx.x < SIZE) arrive_for_all_at(s.full[stage], threadIdx.x);
        }
    };
    send(0);
    for (u32 round = 0; round < rounds; ++round) {
        if (round + 1 < rounds) send(round + 1);
        const u32 stage = round % EXCHANGE_STAGES;
        wait_for(s.full[stage], (round / EXCHANGE_STAGES) & 1);
        for (u32 at = threadIdx.x; at < SIZE * BYTES / 16; at += EXCHANGE_THREADS) {
            const uint4 words = s.in[stage][0][at];
            sum += words.x + 3 * words.y + 5 * words.z + 7 * words.w;
        }
        __syncthreads();
        if (threadIdx.x < SIZE) arrive_at(s.empty[stage], threadIdx.x);
    }
    atomicAdd(&sums[blockIdx.x], sum);
    // No block ends while another one may still write to it.
    wait_for_cluster();
#endif
}

template <int SIZE, int BYTES, bool BULK>
static void exchange_of(int processors, size_t count) {
    const auto kernel = exchange_kernel<SIZE, BYTES, BULK>;
    constexpr int shared_bytes = sizeof(Boxes<SIZE, BYTES>);
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    ClusterLaunch launch(processors, SIZE, EXCHANGE_THREADS, shared_bytes);
    const u32 clusters = launch.fit(kernel);
    if (clusters == 0) return skipped("exchange", "this GPU runs no clusters of this size");
    const u32 blocks = clusters * SIZE;
    const u32 rounds = std::max(u32(count * 12 / (size_t(blocks) * SIZE * BYTES)), u32(4 * EXCHANGE_STAGES));
    auto* sums = device_memory<u32>(blocks);
    CHECK(cudaMemset(sums, 0, blocks * 4));
    const double taken = seconds([&] { CHECK(cudaLaunchKernelEx(&launch.config, kernel, rounds, sums)); });
    // What each block must have read, as the kernel adds it up: the words of all senders for this block.
    std::vector<u32> found(blocks);
    CHECK(cudaMemcpy(found.data(), sums, blocks * 4, cudaMemcpyDeviceToHost));
    u64 wrong = 0;
    for (u32 rank = 0; rank < SIZE; ++rank) {
        u32 of_stage[EXCHANGE_STAGES] = {}, expected = 0;
        for (u32 stage = 0; stage < EXCHANGE_STAGES; ++stage)
            for (u32 sender = 0; sender < SIZE; ++sender)
                for (u32 word = 0; word < BYTES / 4; ++word)
                    of_stage[stage] += (2 * (word % 4) + 1) * mix(((stage * SIZE + rank) * (BYTES / 4) + word) * SIZE + sender);
        for (u32 round = 0; round < rounds; ++round) expected += of_stage[round % EXCHANGE_STAGES];
        for (u32 cluster = 0; cluster < clusters; ++cluster) wrong += found[cluster * SIZE + rank] != RUNS * expected;
    }
    expect_none("sums of what blocks received", wrong);
    const double bytes = double(rounds) * blocks * SIZE * BYTES;
    std::printf("{\"case\":\"exchange\",\"way\":\"%s\",\"cluster\":%d,\"blocks\":%u,\"bytes\":%d,\"seconds\":%.6g,"
                "\"tb_per_second\":%.4g}\n",
                BULK ? "bulk copy" : "16 bytes a thread", SIZE, blocks, BYTES, taken, bytes / taken / 1e12);
    CHECK(cudaFree(sums));
}

template <int SIZE, int BYTES>
static void exchange_both_ways(int processors, size_t count) {
    exchange_of<SIZE, BYTES, false>(processors, count);
    exchange_of<SIZE, BYTES, true>(processors, count);
}

static void exchange(int processors, bool bulk_copies, size_t count) {
    if (!bulk_copies) return skipped("exchange", "clusters and bulk copies need compute capability 9.0");
    // compute-sanitizer 2025.3: memcheck takes bulk copies between blocks for writes out of place, and racecheck does not follow stores to
    // another block past a barrier of this one to the thread that tells of them.
    if (count < 1 << 20) return skipped("exchange", "compute-sanitizer, for which runs with few rows are, does not follow it");
    exchange_both_ways<4, 1024>(processors, count);
    exchange_both_ways<4, 3072>(processors, count);
    exchange_both_ways<4, 6144>(processors, count);
    exchange_both_ways<8, 512>(processors, count);
    exchange_both_ways<8, 1536>(processors, count);
    exchange_both_ways<8, 3072>(processors, count);
}

// ---- link -------------------------------------------------------------------------------------------------------------

// Gathers values from random places until it is told to stop, as joins do while rows come and go.
__global__ void gather_beside_kernel(const u32* __restrict__ table, u32 mask, u32* out, u32 out_mask, const volatile u32* stop,
                                     u64* gathered) {
    // Should nobody say so, it ends by itself after seconds.
    constexpr u32 ROUNDS_MAX = 1 << 20;
    const u32 step = gridDim.x * blockDim.x;
    u32 at = blockIdx.x * blockDim.x + threadIdx.x, round = 0;
    for (; round < ROUNDS_MAX && *stop == 0; ++round) {
        u32 value[4];
#pragma unroll
        for (u32 lane = 0; lane < 4; ++lane) value[lane] = table[mix(at + lane * step) & mask];
#pragma unroll
        for (u32 lane = 0; lane < 4; ++lane) out[(at + lane * step) & out_mask] = value[lane];
        at += 4 * step;
    }
    atomicAdd(gathered, u64(4) * round);
}

struct Way {
    const char* name;
    bool in, out;
};
constexpr Way IN{"in", true, false}, OUT{"out", false, true}, BOTH{"both", true, true};

// Memory on both ends of the link of one GPU, and a stream for each way. The GPU has to be the current one in every call.
struct Ends {
    static constexpr u32 IN_SEED = 7, OUT_SEED = 11;

    int processors;
    size_t bytes;
    // How the host's memory came to stay in its place: allocated by CUDA, or by us and registered.
    bool is_registered;
    void *host_in, *host_out;
    char *device_in, *device_out;
    cudaStream_t in_stream, out_stream;

    Ends(int processors, size_t bytes, bool is_registered) : processors(processors), bytes(bytes), is_registered(is_registered) {
        for (void** host : {&host_in, &host_out}) {
            if (is_registered) {
                *host = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                if (*host == MAP_FAILED) std::perror("mmap"), std::exit(1);
                madvise(*host, bytes, MADV_HUGEPAGE);
                std::memset(*host, 1, bytes);
                CHECK(cudaHostRegister(*host, bytes, cudaHostRegisterDefault));
            } else {
                CHECK(cudaMallocHost(host, bytes));
            }
        }
        for (size_t at = 0; at < bytes / 4; ++at) static_cast<u32*>(host_in)[at] = drawn(u32(at), IN_SEED);
        device_in = device_memory<char>(bytes);
        device_out = device_memory<char>(bytes);
        fill(processors, device_out, bytes, OUT_SEED);
        for (cudaStream_t* stream : {&in_stream, &out_stream}) CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    }

    ~Ends() {
        for (cudaStream_t stream : {in_stream, out_stream}) CHECK(cudaStreamDestroy(stream));
        for (char* memory : {device_in, device_out}) CHECK(cudaFree(memory));
        for (void* host : {host_in, host_out}) {
            if (is_registered) {
                CHECK(cudaHostUnregister(host));
                munmap(host, bytes);
            } else {
                CHECK(cudaFreeHost(host));
            }
        }
    }

    Ends(const Ends&) = delete;

    // So that a copy that did not happen shows.
    void overwrite() {
        CHECK(cudaMemset(device_in, 0xee, bytes));
        std::memset(host_out, 0xee, bytes);
    }

    // Enqueues the copy of a piece of that many bytes, or of what is left of it.
    void copy_piece(Way way, size_t at, size_t piece) {
        const size_t count = std::min(piece, bytes - at);
        if (way.in) CHECK(cudaMemcpyAsync(device_in + at, static_cast<char*>(host_in) + at, count, cudaMemcpyHostToDevice, in_stream));
        if (way.out)
            CHECK(cudaMemcpyAsync(static_cast<char*>(host_out) + at, device_out + at, count, cudaMemcpyDeviceToHost, out_stream));
    }

    void copy(Way way, size_t piece) {
        for (size_t at = 0; at < bytes; at += piece) copy_piece(way, at, piece);
    }

    void verify(Way way) {
        if (way.in) verify_filled(processors, "words copied in", device_in, bytes, IN_SEED);
        if (way.out) {
            u64 wrong = 0;
            for (size_t at = 0; at < bytes / 4; ++at) wrong += static_cast<u32*>(host_out)[at] != drawn(u32(at), OUT_SEED);
            expect_none("words copied out", wrong);
        }
    }
};

// The ends, and what gathers beside copies need.
struct Link {
    static constexpr size_t GATHERED_BYTES = size_t(2) << 30, WRITTEN_BYTES = size_t(256) << 20;

    Ends ends;
    u32 *table, *written, *stop, *stop_words;
    u64* gathered;
    cudaStream_t gather_stream;
    cudaEvent_t begin, in_end, out_end, gather_end;

    Link(int processors, size_t bytes, bool is_registered) : ends(processors, bytes, is_registered) {
        table = device_memory<u32>(GATHERED_BYTES / 4);
        written = device_memory<u32>(WRITTEN_BYTES / 4);
        fill(processors, table, GATHERED_BYTES, 13);
        stop = device_memory<u32>(1);
        gathered = device_memory<u64>(1);
        // A copy engine says when to stop: kernels may have no room beside the one that is to end.
        CHECK(cudaMallocHost(reinterpret_cast<void**>(&stop_words), 8));
        stop_words[0] = 0, stop_words[1] = 1;
        CHECK(cudaStreamCreateWithFlags(&gather_stream, cudaStreamNonBlocking));
        for (cudaEvent_t* event : {&begin, &in_end, &out_end, &gather_end})
            CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }

    ~Link() {
        for (cudaEvent_t event : {begin, in_end, out_end, gather_end}) CHECK(cudaEventDestroy(event));
        CHECK(cudaStreamDestroy(gather_stream));
        for (void* memory : {static_cast<void*>(table), static_cast<void*>(written), static_cast<void*>(stop), static_cast<void*>(gathered)})
            CHECK(cudaFree(memory));
        CHECK(cudaFreeHost(stop_words));
    }

    Link(const Link&) = delete;

    // Copies in pieces of that many bytes, beside gathers by so many blocks.
    void measure(Way way, size_t piece, int gather_blocks) {
        ends.overwrite();
        CHECK(cudaMemset(gathered, 0, sizeof(u64)));
        // Between two events of the stream that is timed, which waits for all others.
        double taken = seconds([&] {
            CHECK(cudaMemcpyAsync(stop, stop_words, 4, cudaMemcpyHostToDevice, nullptr));
            CHECK(cudaEventRecord(begin));
            for (cudaStream_t stream : {ends.in_stream, ends.out_stream, gather_stream}) CHECK(cudaStreamWaitEvent(stream, begin, 0));
            if (gather_blocks > 0)
                gather_beside_kernel<<<gather_blocks, 256, 0, gather_stream>>>(table, GATHERED_BYTES / 4 - 1, written,
                                                                               WRITTEN_BYTES / 4 - 1, stop, gathered);
            CHECK(cudaEventRecord(gather_end, gather_stream));
            ends.copy(way, piece);
            CHECK(cudaEventRecord(in_end, ends.in_stream));
            CHECK(cudaEventRecord(out_end, ends.out_stream));
            CHECK(cudaStreamWaitEvent(nullptr, in_end, 0));
            CHECK(cudaStreamWaitEvent(nullptr, out_end, 0));
            CHECK(cudaMemcpyAsync(stop, stop_words + 1, 4, cudaMemcpyHostToDevice, nullptr));
            CHECK(cudaStreamWaitEvent(nullptr, gather_end, 0));
        });
        ends.verify(way);
        u64 values = 0;
        CHECK(cudaMemcpy(&values, gathered, sizeof values, cudaMemcpyDeviceToHost));
        std::printf("{\"case\":\"link\",\"way\":\"%s\",\"bytes_each_way\":%zu,\"piece_bytes\":%zu,\"host_memory\":\"%s\","
                    "\"gather_blocks\":%d,\"gathered_g_per_second\":%.4g,\"seconds\":%.6g,\"gb_per_second\":%.4g}\n",
                    way.name, ends.bytes, piece, ends.is_registered ? "registered" : "allocated", gather_blocks,
                    double(values) / RUNS / taken / 1e9, taken, double(ends.bytes) * (way.in + way.out) / taken / 1e9);
    }
};

static void link(int processors, size_t count) {
    constexpr size_t MIB = 1 << 20;
    {
        Link allocated(processors, count * 8, false);
        for (Way way : {IN, OUT, BOTH}) allocated.measure(way, 16 * MIB, 0);
    }
    Link registered(processors, count * 8, true);
    for (Way way : {IN, OUT, BOTH}) registered.measure(way, 16 * MIB, 0);
    for (size_t piece : {4 * MIB, MIB}) registered.measure(BOTH, piece, 0);
    // From a fraction of what keeps the memory busy to more than has room at once.
    for (int blocks : {processors / 8, processors / 2, processors, 2 * processors, 8 * processors}) {
        for (Way way : {IN, OUT, BOTH}) registered.measure(way, 16 * MIB, std::max(blocks, 1));
    }
}

// ---- links ------------------------------------------------------------------------------------------------------------

// Each GPU of the host alone, the first two, four and so on, and all of them at once, between memory of their own. That of the host was
// touched by one thread: on several sockets it may lie on one of them.
static void links(int processors, size_t count) {
    constexpr size_t PIECE = size_t(16) << 20;
    int gpus = 0;
    CHECK(cudaGetDeviceCount(&gpus));
    if (gpus < 2) return skipped("links", "there is one GPU");
    std::vector<std::unique_ptr<Ends>> ends;
    for (int gpu = 0; gpu < gpus; ++gpu) {
        CHECK(cudaSetDevice(gpu));
        ends.push_back(std::make_unique<Ends>(processors, count * 8, true));
    }
    auto measure = [&](int first, int end, Way way) {
        std::vector<double> taken;
        for (int gpu = first; gpu < end; ++gpu) {
            CHECK(cudaSetDevice(gpu));
            ends[gpu]->overwrite();
        }
        // By the host's clock: there are no events of several GPUs.
        for (int run = 0; run < RUNS; ++run) {
            for (int gpu = first; gpu < end; ++gpu) {
                CHECK(cudaSetDevice(gpu));
                CHECK(cudaDeviceSynchronize());
            }
            const auto since = std::chrono::steady_clock::now();
            // In turn, so that none begins late.
            for (size_t at = 0; at < ends[first]->bytes; at += PIECE) {
                for (int gpu = first; gpu < end; ++gpu) {
                    CHECK(cudaSetDevice(gpu));
                    ends[gpu]->copy_piece(way, at, PIECE);
                }
            }
            for (int gpu = first; gpu < end; ++gpu) {
                CHECK(cudaSetDevice(gpu));
                CHECK(cudaDeviceSynchronize());
            }
            taken.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count());
        }
        for (int gpu = first; gpu < end; ++gpu) {
            CHECK(cudaSetDevice(gpu));
            ends[gpu]->verify(way);
        }
        const double median = median_of(taken);
        const size_t bytes = ends[first]->bytes * size_t(end - first);
        std::printf("{\"case\":\"links\",\"way\":\"%s\",\"first_gpu\":%d,\"gpus\":%d,\"bytes_each_way\":%zu,\"piece_bytes\":%zu,"
                    "\"host_memory\":\"registered\",\"seconds\":%.6g,\"gb_per_second\":%.4g}\n",
                    way.name, first, end - first, bytes, PIECE, median, double(bytes) * (way.in + way.out) / median / 1e9);
    };
    for (Way way : {IN, OUT, BOTH}) {
        for (int gpu = 0; gpu < gpus; ++gpu) measure(gpu, gpu + 1, way);
        for (int together = 2; together < gpus; together *= 2) measure(0, together, way);
        measure(0, gpus, way);
    }
    for (int gpu = 0; gpu < gpus; ++gpu) {
        CHECK(cudaSetDevice(gpu));
        ends[gpu].reset();
    }
    CHECK(cudaSetDevice(0));
}

// ---- peer -------------------------------------------------------------------------------------------------------------

static void peer(int processors, bool bulk_copies, size_t count) {
    int gpus = 0, reachable = 0;
    CHECK(cudaGetDeviceCount(&gpus));
    if (gpus < 2) return skipped("peer", "there is one GPU");
    CHECK(cudaDeviceCanAccessPeer(&reachable, 0, 1));
    if (!reachable) return skipped("peer", "the first GPU does not reach the memory of the second");
    const size_t bytes = count * 32;
    auto* from = device_memory<char>(bytes);
    CHECK(cudaSetDevice(1));
    auto* to = device_memory<char>(bytes);
    CHECK(cudaMemset(to, 0xee, bytes));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(0));
    CHECK(cudaDeviceEnablePeerAccess(1, 0));
    fill(processors, from, bytes, 13);
    double taken = seconds([&] { CHECK(cudaMemcpyPeerAsync(to, 1, from, 0, bytes)); });
    verify_filled(processors, "words copied to a peer", to, bytes, 13);
    std::printf("{\"case\":\"peer\",\"way\":\"plain copy\",\"bytes\":%zu,\"seconds\":%.6g,\"tb_per_second\":%.4g}\n", bytes, taken,
                bytes / taken / 1e12);
    store_all(processors, bulk_copies, to, bytes, 1, "peer");
    CHECK(cudaFree(from));
    CHECK(cudaSetDevice(1));
    CHECK(cudaFree(to));
    CHECK(cudaSetDevice(0));
}

int main(int argc, char** argv) {
    // Lines are there as soon as they are measured, also of a run that ends badly.
    std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
    // A smaller power of two is for a memory checker, not for timing.
    const int bits = argc > 1 ? std::atoi(argv[1]) : 27;
    if (bits < 17 || bits > 28) {
        std::fprintf(stderr, "%d bits of rows: there are 2^17 to 2^28\n", bits);
        return 2;
    }
    const size_t count = size_t(1) << bits;
    constexpr const char* CASES[] = {"copy",  "atomic", "gather",   "rank", "scatter", "partition", "groups",
                                     "store", "tiles",  "exchange", "link", "links",   "peer"};
    for (int at = 2; at < argc; ++at) {
        if (std::none_of(std::begin(CASES), std::end(CASES), [&](const char* name) { return !std::strcmp(name, argv[at]); })) {
            std::fprintf(stderr, "there is no case %s\n", argv[at]);
            return 2;
        }
    }
    auto wanted = [&](const char* name) {
        return argc <= 2 || std::any_of(argv + 2, argv + argc, [&](const char* given) { return !std::strcmp(name, given); });
    };

    cudaDeviceProp properties{};
    CHECK(cudaGetDeviceProperties(&properties, 0));
    const int processors = properties.multiProcessorCount;
    const Features features = features_here();
    std::printf("{\"case\":\"device\",\"name\":\"%s\",\"multiprocessors\":%d,\"l2_bytes\":%d}\n", properties.name, processors,
                properties.l2CacheSize);
    if (wanted("copy")) copy(processors, count);
    if (wanted("atomic")) atomic(processors);
    if (wanted("gather")) {
        gather_of<u32>(processors, count, "4 bytes");
        gather_of<uint2>(processors, count, "8 bytes");
        gather_of<uint4>(processors, count, "16 bytes");
    }
    if (wanted("rank")) {
        auto* keys = device_memory<u32>(count);
        auto* sink = device_memory<u32>(1);
        fill_kernel<<<processors * 8, 256>>>(keys, count, 17, true, -1);
        rank(processors, keys, count, "uniform", sink);
        fill_kernel<<<processors * 8, 256>>>(keys, count, 17, true, 0);
        rank(processors, keys, count, "half of them one key", sink);
        CHECK(cudaFree(keys));
        CHECK(cudaFree(sink));
    }
    if (wanted("scatter")) scatter(processors, count);
    if (wanted("partition")) {
        partition_of<2, 512, 16>(processors, count, -1);
        partition_of<2, 1024, 16>(processors, count, -1);
        partition_of<3, 512, 16>(processors, count, -1);
        partition_of<3, 1024, 12>(processors, count, -1);
        partition_of<3, 1024, 16>(processors, count, -1);
        partition_of<3, 512, 16>(processors, count, 0);
    }
    if (wanted("groups")) {
        groups_of<2, 4, 512, 4>(processors, count);
        groups_of<2, 4, 1024, 4>(processors, count);
        groups_of<2, 8, 1024, 4>(processors, count);
        groups_of<3, 8, 512, 4>(processors, count);
        groups_of<3, 8, 1024, 2>(processors, count);
        groups_of<3, 8, 1024, 4>(processors, count);
    }
    if (wanted("store")) store(processors, features.bulk_copies, count);
    if (wanted("tiles")) tiles(processors, features.multicast, count);
    if (wanted("exchange")) exchange(processors, features.bulk_copies, count);
    if (wanted("link")) link(processors, count);
    if (wanted("links")) links(processors, count);
    if (wanted("peer")) peer(processors, features.bulk_copies, count);
    return 0;
}
