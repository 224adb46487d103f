// A radix hash join of two tables in device memory, two partition passes and a join of the pairs of partitions in shared
// memory: the composition that the `radix-hash` strategy is to have on a GPU, with every choice open to measurement.
//
//   nvcc -O3 -std=c++17 -arch=native -o radix_join radix_join.cu && ./radix_join [log2 of build rows, 27] [log2 of probe rows, 27]
//
//   columns ─► pass 1 ─► packed rows in 256 partitions ─► pass 2 ─► packed rows in 65 536 ─► join ─► columns
//
// Payload moves with the key (GFTR: Wu et al. 2024, section 4.2) as one packed row, so that a row is ranked once for all of
// its columns. There is no histogram: each partition has room for its share of rows and six standard deviations more, and
// counts what does not fit; when the counts say so, the caller has to run again with exact room. Keys are spread by a
// bijective hash, of which the passes and the table use disjoint bits. One block joins one pair of partitions: it stages
// the build rows in shared memory, chains them by bucket, and reserves room for the matches of a tile of probe rows with
// one atomic.
//
// Prints a JSON line per shape with the median of five runs by events, in all and by phase. Every run is checked on the
// device: each result row must have the payload that belongs to its key, and their number and checksums must be right.

#include <algorithm>
#include <cmath>
#include <vector>

#include "common.cuh"

using u16 = std::uint16_t;

constexpr int BITS_1 = 8, BITS_2 = 8;
constexpr u32 BINS_1 = 1u << BITS_1, BINS_2 = 1u << BITS_2;

__device__ inline u32 digit_1(u32 key) { return mix(key) >> (32 - BITS_1); }
__device__ inline u32 digit_2(u32 key) { return (mix(key) >> (32 - BITS_1 - BITS_2)) & (BINS_2 - 1); }

// What a row of so many words is read and written by: one access where its size allows.
template <int WORDS>
struct Cells {
    using Cell = u32;
    static constexpr int PER_ROW = WORDS;
};
template <>
struct Cells<2> {
    using Cell = uint2;
    static constexpr int PER_ROW = 1;
};

// Reads a packed row of so many words into registers.
template <int WORDS, int PER_THREAD>
__device__ inline void read_row(const u32* rows, u32 row, bool present, u32 (&value)[WORDS][PER_THREAD], int at) {
    if constexpr (WORDS == 2) {
        uint2 both = present ? __ldcs(reinterpret_cast<const uint2*>(rows) + row) : uint2{};
        value[0][at] = both.x;
        value[1][at] = both.y;
    } else {
#pragma unroll
        for (int word = 0; word < WORDS; ++word) value[word][at] = present ? __ldcs(rows + size_t(row) * WORDS + word) : 0;
    }
}

// ---- Partitioning -------------------------------------------------------------------------------------------------------

// Where a pass puts rows: partition `p` has room for `capacity` rows from `p * capacity` on; `counts[p]` goes on counting
// when there is no room left.
struct Room {
    u32* rows;
    u32* counts;
    u32 capacity;
};

// Ranks, orders and writes one tile of up to THREADS * PER_THREAD rows that threads hold in registers.
template <int WORDS, int THREADS, int PER_THREAD, u32 BINS, typename Digit>
__device__ inline void write_tile(const u32 (&value)[WORDS][PER_THREAD], const bool (&present)[PER_THREAD], u32 filled,
                                  Room room, u32 first_partition, u32* shared, Digit digit) {
    u32* staged = shared;
    u32* starts = staged + THREADS * PER_THREAD * WORDS;
    u32* places = starts + BINS;
    __shared__ u32 warp_sums[THREADS / 32];
    for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) starts[bin] = 0;
    __syncthreads();
    u32 rank[PER_THREAD];
#pragma unroll
    for (int at = 0; at < PER_THREAD; ++at) rank[at] = present[at] ? atomicAdd(&starts[digit(value[0][at])], 1u) : 0;
    __syncthreads();

    static_assert(BINS <= THREADS, "a thread has one bin");
    const bool has_bin = threadIdx.x < BINS;
    const u32 in_bin = has_bin ? starts[threadIdx.x] : 0;
    u32 inclusive = in_bin;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        u32 other = __shfl_up_sync(0xffffffffu, inclusive, distance);
        if (threadIdx.x % 32 >= distance) inclusive += other;
    }
    if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = inclusive;
    // The atomic is on its way while the warps wait for each other.
    u32 place = has_bin && in_bin ? atomicAdd(&room.counts[first_partition + threadIdx.x], in_bin) : 0;
    __syncthreads();
    u32 before = inclusive - in_bin;
    for (u32 warp = 0; warp < threadIdx.x / 32; ++warp) before += warp_sums[warp];
    if (has_bin) {
        starts[threadIdx.x] = before;
        // The place in its partition of the row that is first in the tile, if it went there.
        places[threadIdx.x] = place - before;
    }
    __syncthreads();
#pragma unroll
    for (int at = 0; at < PER_THREAD; ++at) {
        if (present[at]) {
            u32 to = (starts[digit(value[0][at])] + rank[at]) * WORDS;
#pragma unroll
            for (int word = 0; word < WORDS; ++word) staged[to + word] = value[word][at];
        }
    }
    __syncthreads();
    using Cell = typename Cells<WORDS>::Cell;
    constexpr u32 PER_ROW = Cells<WORDS>::PER_ROW;
    for (u32 cell = threadIdx.x; cell < filled * PER_ROW; cell += THREADS) {
        u32 row = cell / PER_ROW, bin = digit(staged[row * WORDS]);
        u32 in_partition = places[bin] + row;
        if (in_partition < room.capacity) {
            size_t to = size_t(first_partition + bin) * room.capacity + in_partition;
            reinterpret_cast<Cell*>(room.rows)[to * PER_ROW + cell % PER_ROW] = reinterpret_cast<Cell*>(staged)[cell];
        }
    }
}

template <int WORDS>
struct Columns {
    const u32* column[WORDS];
};

// Pass 1: from columns. A thread reads four consecutive rows at a time.
template <int WORDS, int THREADS, int PER_THREAD>
__global__ void __launch_bounds__(THREADS, 2) pass_1(Columns<WORDS> columns, u32 count, Room room) {
    extern __shared__ u32 shared[];
    constexpr u32 TILE = THREADS * PER_THREAD;
    const size_t start = size_t(blockIdx.x) * TILE;
    u32 value[WORDS][PER_THREAD];
    bool present[PER_THREAD];
#pragma unroll
    for (int at = 0; at < PER_THREAD; at += 4) {
        size_t row = start + size_t(at / 4) * THREADS * 4 + threadIdx.x * 4;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            // Columns end on a multiple of four rows.
            uint4 four = row < count ? __ldcs(reinterpret_cast<const uint4*>(columns.column[word] + row)) : uint4{};
            value[word][at] = four.x;
            value[word][at + 1] = four.y;
            value[word][at + 2] = four.z;
            value[word][at + 3] = four.w;
        }
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) present[at + lane] = row + lane < count;
    }
    const u32 filled = u32(count - start < TILE ? count - start : TILE);
    write_tile<WORDS, THREADS, PER_THREAD, BINS_1>(value, present, filled, room, 0, shared,
                                                   [](u32 key) { return digit_1(key); });
}

// Pass 2: from packed rows of one partition of pass 1.
template <int WORDS, int THREADS, int PER_THREAD>
__global__ void __launch_bounds__(THREADS, 2) pass_2(Room from, Room room) {
    extern __shared__ u32 shared[];
    constexpr u32 TILE = THREADS * PER_THREAD;
    const u32 partition = blockIdx.y;
    const u32 count = min(from.counts[partition], from.capacity);
    const u32 start = blockIdx.x * TILE;
    if (start >= count) return;
    const u32* rows = from.rows + (size_t(partition) * from.capacity + start) * WORDS;
    const u32 filled = min(count - start, TILE);
    u32 value[WORDS][PER_THREAD];
    bool present[PER_THREAD];
    if constexpr (WORDS == 2) {
#pragma unroll
        for (int at = 0; at < PER_THREAD; ++at) {
            u32 row = at * THREADS + threadIdx.x;
            present[at] = row < filled;
            read_row(rows, row, present[at], value, at);
        }
    } else {
        // Through shared memory, so that reads are whole lines whatever the size of a row.
        for (u32 word = threadIdx.x; word < filled * WORDS; word += THREADS) shared[word] = __ldcs(rows + word);
        __syncthreads();
#pragma unroll
        for (int at = 0; at < PER_THREAD; ++at) {
            u32 row = at * THREADS + threadIdx.x;
            present[at] = row < filled;
#pragma unroll
            for (int word = 0; word < WORDS; ++word) value[word][at] = present[at] ? shared[row * WORDS + word] : 0;
        }
    }
    // The first barrier in write_tile keeps reads of shared memory before its writes.
    write_tile<WORDS, THREADS, PER_THREAD, BINS_2>(value, present, filled, room, partition * BINS_2, shared,
                                                   [](u32 key) { return digit_2(key); });
}

// ---- Joining ------------------------------------------------------------------------------------------------------------

template <int COLUMNS>
struct Result {
    u32* column[COLUMNS];
    u64* rows;
    u64 capacity;
};

constexpr u16 NONE = 0xffff;

// One block joins one pair of partitions. The table is chains of build rows by bucket; keys may repeat.
template <int BUILD_WORDS, int PROBE_WORDS, int THREADS, int PER_THREAD, u32 BUCKETS>
__global__ void __launch_bounds__(THREADS) join(Room build, Room probe, Result<BUILD_WORDS + PROBE_WORDS - 1> result) {
    extern __shared__ u32 shared[];
    const u32 partition = blockIdx.x;
    const u32 build_rows = min(build.counts[partition], build.capacity);
    const u32 probe_rows = min(probe.counts[partition], probe.capacity);
    if (build_rows == 0 || probe_rows == 0) return;
    u32* heads = shared;
    u32* staged = heads + BUCKETS;
    u16* next = reinterpret_cast<u16*>(staged + build.capacity * BUILD_WORDS);
    __shared__ u32 warp_sums[THREADS / 32];
    __shared__ u64 tile_place;

    const u32* from = build.rows + size_t(partition) * build.capacity * BUILD_WORDS;
    for (u32 bucket = threadIdx.x; bucket < BUCKETS; bucket += THREADS) heads[bucket] = NONE;
    using Cell = typename Cells<BUILD_WORDS>::Cell;
    for (u32 cell = threadIdx.x; cell < build_rows * Cells<BUILD_WORDS>::PER_ROW; cell += THREADS)
        reinterpret_cast<Cell*>(staged)[cell] = __ldcs(reinterpret_cast<const Cell*>(from) + cell);
    __syncthreads();
    for (u32 row = threadIdx.x; row < build_rows; row += THREADS)
        next[row] = u16(atomicExch(&heads[mix(staged[row * BUILD_WORDS]) % BUCKETS], row));
    __syncthreads();

    const u32* probes = probe.rows + size_t(partition) * probe.capacity * PROBE_WORDS;
    for (u32 start = 0; start < probe_rows; start += THREADS * PER_THREAD) {
        u32 value[PROBE_WORDS][PER_THREAD], first[PER_THREAD], matches = 0;
#pragma unroll
        for (int at = 0; at < PER_THREAD; ++at) {
            u32 row = start + at * THREADS + threadIdx.x;
            read_row(probes, row, row < probe_rows, value, at);
        }
        u32 count[PER_THREAD];
#pragma unroll
        for (int at = 0; at < PER_THREAD; ++at) {
            u32 row = start + at * THREADS + threadIdx.x;
            count[at] = 0;
            first[at] = NONE;
            if (row < probe_rows) {
                for (u32 entry = heads[mix(value[0][at]) % BUCKETS]; entry != NONE; entry = next[entry]) {
                    if (staged[entry * BUILD_WORDS] == value[0][at]) {
                        if (count[at] == 0) first[at] = entry;
                        ++count[at];
                    }
                }
            }
            matches += count[at];
        }
        // Room for the whole tile by one atomic, in the order of rows of warps so that neighbours write side by side.
        u32 place_in_tile[PER_THREAD];
        u32 tile_matches = 0;
#pragma unroll
        for (int at = 0; at < PER_THREAD; ++at) {
            u32 inclusive = count[at];
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                u32 other = __shfl_up_sync(0xffffffffu, inclusive, distance);
                if (threadIdx.x % 32 >= distance) inclusive += other;
            }
            place_in_tile[at] = tile_matches + inclusive - count[at];
            tile_matches += __shfl_sync(0xffffffffu, inclusive, 31);
        }
        if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = tile_matches;
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 sum = 0;
            for (int warp = 0; warp < THREADS / 32; ++warp) {
                u32 of_warp = warp_sums[warp];
                warp_sums[warp] = sum;
                sum += of_warp;
            }
            tile_place = atomicAdd(result.rows, u64(sum));
        }
        __syncthreads();
        const u64 place = tile_place + warp_sums[threadIdx.x / 32];
#pragma unroll
        for (int at = 0; at < PER_THREAD; ++at) {
            u64 to = place + place_in_tile[at];
            u32 entry = first[at];
            for (u32 match = 0; match < count[at]; ++match, ++to) {
                if (match > 0) {
                    do entry = next[entry];
                    while (staged[entry * BUILD_WORDS] != value[0][at]);
                }
                if (to < result.capacity) {
                    __stcs(result.column[0] + to, value[0][at]);
#pragma unroll
                    for (int word = 1; word < BUILD_WORDS; ++word)
                        __stcs(result.column[word] + to, staged[entry * BUILD_WORDS + word]);
#pragma unroll
                    for (int word = 1; word < PROBE_WORDS; ++word)
                        __stcs(result.column[BUILD_WORDS - 1 + word] + to, value[word][at]);
                }
            }
        }
        __syncthreads();
    }
}

// ---- The benchmark ------------------------------------------------------------------------------------------------------

// Sparse keys are spread over all 32 bits.
__host__ __device__ inline u32 key_of(u32 number, bool sparse) { return sparse ? number * 0x9e3779b1u : number; }

__global__ void fill_build(u32* key, u32* a, u32* b, u32 count, int bits, bool sparse) {
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x) {
        u32 value = key_of(shuffled(at, bits), sparse);
        key[at] = value;
        a[at] = mix(value + 1);
        if (b) b[at] = mix(value + 2);
    }
}

__global__ void fill_probe(u32* key, u32* a, u32* b, u32 count, u32 build_count, bool sparse, u64* sum) {
    u64 mine = 0;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x) {
        key[at] = key_of(u32((u64(mix(at ^ 0x5bd1e995u)) * build_count) >> 32), sparse);
        a[at] = mix(at + 77);
        mine += a[at];
        if (b) {
            b[at] = mix(at + 78);
            mine += 3ull * b[at];
        }
    }
    atomicAdd(sum, mine);
}

__global__ void verify(const u32* key, const u32* ra, const u32* rb, const u32* sa, const u32* sb, u64 count, u64* wrong,
                       u64* sum) {
    u64 mine = 0;
    for (u64 at = blockIdx.x * u64(blockDim.x) + threadIdx.x; at < count; at += u64(gridDim.x) * blockDim.x) {
        if (ra[at] != mix(key[at] + 1) || (rb && rb[at] != mix(key[at] + 2))) atomicAdd(wrong, 1ull);
        mine += sa[at];
        if (sb) mine += 3ull * sb[at];
    }
    atomicAdd(sum, mine);
}

// Room for the share of rows of one partition and six standard deviations, when each key occurs `repeats` times on average:
// distinct keys fall into partitions at random, and all rows of a key fall with it.
static Room room_for(size_t rows, u32 partitions, int words, double repeats) {
    double share = double(rows) / partitions;
    Room room{};
    room.capacity = u32(share + 6 * std::sqrt(share * (1 + repeats)) + 8) / 4 * 4 + 4;
    room.rows = device_memory<u32>(size_t(partitions) * room.capacity * words);
    room.counts = device_memory<u32>(partitions);
    return room;
}

template <int WORDS>
static void run(int build_bits, int probe_bits, bool sparse) {
    constexpr int THREADS = 512, PER_THREAD = WORDS == 2 ? 16 : 12, JOIN_THREADS = 512, JOIN_ROWS = WORDS == 2 ? 4 : 2;
    constexpr u32 TILE = THREADS * PER_THREAD, BUCKETS = 4096;
    const u32 build_count = 1u << build_bits, probe_count = 1u << probe_bits;
    u32 *build[3] = {}, *probe[3] = {}, *out[5] = {};
    for (int word = 0; word < WORDS; ++word) {
        build[word] = device_memory<u32>(build_count);
        probe[word] = device_memory<u32>(probe_count);
    }
    for (int column = 0; column < 2 * WORDS - 1; ++column) out[column] = device_memory<u32>(probe_count);
    auto* totals = device_memory<u64>(4);  // rows, wrong rows, checksum, expected checksum
    CHECK(cudaMemset(totals, 0, 32));
    fill_build<<<2048, 256>>>(build[0], build[1], build[2], build_count, build_bits, sparse);
    fill_probe<<<2048, 256>>>(probe[0], probe[1], probe[2], probe_count, build_count, sparse, totals + 3);

    const double repeats = double(probe_count) / build_count;
    Room build_1 = room_for(build_count, BINS_1, WORDS, 0), build_2 = room_for(build_count, BINS_1 * BINS_2, WORDS, 0);
    Room probe_1 = room_for(probe_count, BINS_1, WORDS, repeats);
    Room probe_2 = room_for(probe_count, BINS_1 * BINS_2, WORDS, repeats);
    Result<2 * WORDS - 1> result{};
    for (int column = 0; column < 2 * WORDS - 1; ++column) result.column[column] = out[column];
    result.rows = totals;
    result.capacity = probe_count;
    Columns<WORDS> build_columns{}, probe_columns{};
    for (int word = 0; word < WORDS; ++word) {
        build_columns.column[word] = build[word];
        probe_columns.column[word] = probe[word];
    }
    const size_t partition_shared = (TILE * WORDS + 2 * 256) * 4;
    const size_t join_shared = (BUCKETS + size_t(build_2.capacity) * WORDS) * 4 + size_t(build_2.capacity) * 2;
    if (build_2.capacity >= NONE || join_shared > 227 * 1024) {
        std::fprintf(stderr, "%u build rows per partition do not fit in shared memory\n", build_2.capacity);
        std::exit(1);
    }
    auto first = pass_1<WORDS, THREADS, PER_THREAD>;
    auto second = pass_2<WORDS, THREADS, PER_THREAD>;
    auto joined = join<WORDS, WORDS, JOIN_THREADS, JOIN_ROWS, BUCKETS>;
    CHECK(cudaFuncSetAttribute(first, cudaFuncAttributeMaxDynamicSharedMemorySize, int(partition_shared)));
    CHECK(cudaFuncSetAttribute(second, cudaFuncAttributeMaxDynamicSharedMemorySize, int(partition_shared)));
    CHECK(cudaFuncSetAttribute(joined, cudaFuncAttributeMaxDynamicSharedMemorySize, int(join_shared)));
    auto tiles = [](u32 rows) { return (rows + TILE - 1) / TILE; };

    constexpr int PHASES = 5;
    const char* names[PHASES] = {"build pass 1", "build pass 2", "probe pass 1", "probe pass 2", "join"};
    cudaEvent_t events[PHASES + 1];
    for (auto& event : events) CHECK(cudaEventCreate(&event));
    std::vector<float> taken[PHASES + 1];
    for (int repeat = 0; repeat < 6; ++repeat) {
        for (int column = 0; column < 2 * WORDS - 1; ++column) CHECK(cudaMemset(out[column], 0xee, size_t(probe_count) * 4));
        CHECK(cudaMemset(totals, 0, 24));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventRecord(events[0]));
        for (Room room : {build_1, probe_1}) CHECK(cudaMemsetAsync(room.counts, 0, BINS_1 * 4));
        for (Room room : {build_2, probe_2}) CHECK(cudaMemsetAsync(room.counts, 0, BINS_1 * BINS_2 * 4));
        first<<<tiles(build_count), THREADS, partition_shared>>>(build_columns, build_count, build_1);
        CHECK(cudaEventRecord(events[1]));
        second<<<dim3(tiles(build_1.capacity), BINS_1), THREADS, partition_shared>>>(build_1, build_2);
        CHECK(cudaEventRecord(events[2]));
        first<<<tiles(probe_count), THREADS, partition_shared>>>(probe_columns, probe_count, probe_1);
        CHECK(cudaEventRecord(events[3]));
        second<<<dim3(tiles(probe_1.capacity), BINS_1), THREADS, partition_shared>>>(probe_1, probe_2);
        CHECK(cudaEventRecord(events[4]));
        joined<<<BINS_1 * BINS_2, JOIN_THREADS, join_shared>>>(build_2, probe_2, result);
        CHECK(cudaEventRecord(events[5]));
        CHECK(cudaGetLastError());
        CHECK(cudaEventSynchronize(events[5]));
        for (int phase = 0; phase <= PHASES; ++phase) {
            float milliseconds = 0;
            if (phase < PHASES) CHECK(cudaEventElapsedTime(&milliseconds, events[phase], events[phase + 1]));
            if (phase == PHASES) CHECK(cudaEventElapsedTime(&milliseconds, events[0], events[PHASES]));
            if (repeat > 0) taken[phase].push_back(milliseconds);
        }
        verify<<<2048, 256>>>(out[0], out[1], WORDS == 3 ? out[2] : nullptr, out[WORDS], WORDS == 3 ? out[4] : nullptr,
                              probe_count, totals + 1, totals + 2);
        u64 found[4];
        CHECK(cudaMemcpy(found, totals, 32, cudaMemcpyDeviceToHost));
        if (found[0] != probe_count || found[1] != 0 || found[2] != found[3]) {
            std::fprintf(stderr, "%llu rows and not %u, %llu of them wrong, checksum %llu and not %llu\n", found[0],
                         probe_count, found[1], found[2], found[3]);
            std::exit(1);
        }
    }
    for (auto& times : taken) std::sort(times.begin(), times.end());
    std::printf("{\"case\":\"radix_join\",\"build_rows\":%u,\"probe_rows\":%u,\"payloads\":%d,\"sparse\":%s,\"milliseconds\":%.4g",
                build_count, probe_count, WORDS - 1, sparse ? "true" : "false", taken[PHASES][2]);
    for (int phase = 0; phase < PHASES; ++phase) std::printf(",\"%s\":%.4g", names[phase], taken[phase][2]);
    std::printf(",\"g_rows_per_second\":%.4g}\n", (double(build_count) + probe_count) / taken[PHASES][2] / 1e6);
    std::fflush(stdout);
    for (auto& event : events) CHECK(cudaEventDestroy(event));
    for (int word = 0; word < WORDS; ++word) {
        CHECK(cudaFree(build[word]));
        CHECK(cudaFree(probe[word]));
    }
    for (int column = 0; column < 2 * WORDS - 1; ++column) CHECK(cudaFree(out[column]));
    for (Room room : {build_1, build_2, probe_1, probe_2}) {
        CHECK(cudaFree(room.rows));
        CHECK(cudaFree(room.counts));
    }
    CHECK(cudaFree(totals));
}

int main(int argc, char** argv) {
    const int build_bits = argc > 1 ? std::atoi(argv[1]) : 27;
    const int probe_bits = argc > 2 ? std::atoi(argv[2]) : 27;
    for (bool sparse : {false, true}) {
        run<3>(build_bits, probe_bits, sparse);
        run<2>(build_bits, probe_bits + 1, sparse);
    }
    return 0;
}
