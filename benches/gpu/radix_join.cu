// A radix hash join of two tables in device memory, two partition passes and a join of the pairs of partitions in shared
// memory: the composition of the `radix-hash` strategy on a GPU, for rows of one fixed form, and without counting them first.
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
// Or in waves: the second pass of some partitions of the first one at a time, of both sides, and their join right after it, in memory
// that is used again for each wave, so that what these kernels hand on is still in the second-level cache. Waves alternate between
// streams, by one graph of launches.
//
// Prints a JSON line per shape with the median of five runs by events, in all and by phase, and one for each way to make waves. Every run
// is checked on the device: each result row must have the payload that belongs to its key, and their number and checksums must be right.

#include <algorithm>
#include <vector>

#include "tables.cuh"

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
    const u32 inclusive = warp_inclusive_sum(in_bin);
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
            const u32 inclusive = warp_inclusive_sum(count[at]);
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

// The partitions from `first` on.
static Room from_partition(Room room, u32 first, int words) {
    room.rows += size_t(first) * room.capacity * words;
    room.counts += first;
    return room;
}

// Two tables, room for their partitions, and the kernels that join them.
template <int WORDS>
struct Join {
    static constexpr int THREADS = 512, PER_THREAD = WORDS == 2 ? 16 : 12, JOIN_THREADS = 512, JOIN_ROWS = WORDS == 2 ? 4 : 2;
    static constexpr u32 TILE = THREADS * PER_THREAD, BUCKETS = 4096;
    static constexpr size_t PASS_SHARED = (TILE * WORDS + 2 * 256) * 4;
    static constexpr auto FIRST = pass_1<WORDS, THREADS, PER_THREAD>;
    static constexpr auto SECOND = pass_2<WORDS, THREADS, PER_THREAD>;
    static constexpr auto JOINED = join<WORDS, WORDS, JOIN_THREADS, JOIN_ROWS, BUCKETS>;

    Tables<WORDS> tables;
    bool is_sparse;
    Room build_1, build_2, probe_1, probe_2;
    size_t join_shared;
    // Any two of these tell of the time between them.
    cudaEvent_t events[6];

    Join(int build_bits, int probe_bits, bool is_sparse) : tables(build_bits, probe_bits, is_sparse), is_sparse(is_sparse) {
        const double repeats = double(tables.probe_count) / tables.build_count;
        build_1 = room_for(tables.build_count, BINS_1, WORDS, 0);
        build_2 = room_for(tables.build_count, BINS_1 * BINS_2, WORDS, 0);
        probe_1 = room_for(tables.probe_count, BINS_1, WORDS, repeats);
        probe_2 = room_for(tables.probe_count, BINS_1 * BINS_2, WORDS, repeats);
        join_shared = (BUCKETS + size_t(build_2.capacity) * WORDS) * 4 + size_t(build_2.capacity) * 2;
        if (build_2.capacity >= NONE || join_shared > 227 * 1024) {
            std::fprintf(stderr, "%u build rows per partition do not fit in shared memory\n", build_2.capacity);
            std::exit(1);
        }
        CHECK(cudaFuncSetAttribute(FIRST, cudaFuncAttributeMaxDynamicSharedMemorySize, int(PASS_SHARED)));
        CHECK(cudaFuncSetAttribute(SECOND, cudaFuncAttributeMaxDynamicSharedMemorySize, int(PASS_SHARED)));
        CHECK(cudaFuncSetAttribute(JOINED, cudaFuncAttributeMaxDynamicSharedMemorySize, int(join_shared)));
        for (auto& event : events) CHECK(cudaEventCreate(&event));
    }
    ~Join() {
        for (auto& event : events) cudaEventDestroy(event);
        for (Room room : {build_1, build_2, probe_1, probe_2}) {
            cudaFree(room.rows);
            cudaFree(room.counts);
        }
    }
    Join(const Join&) = delete;

    void empty_rooms(cudaStream_t stream) {
        for (Room room : {build_1, probe_1}) CHECK(cudaMemsetAsync(room.counts, 0, BINS_1 * 4, stream));
        for (Room room : {build_2, probe_2}) CHECK(cudaMemsetAsync(room.counts, 0, BINS_1 * BINS_2 * 4, stream));
    }
    static u32 tiles(u32 rows) { return (rows + TILE - 1) / TILE; }
    void first_pass(const Columns<WORDS>& columns, u32 count, Room to, cudaStream_t stream) {
        FIRST<<<tiles(count), THREADS, PASS_SHARED, stream>>>(columns, count, to);
        CHECK(cudaGetLastError());
    }
    void second_pass(Room from, Room to, u32 parents, cudaStream_t stream) {
        SECOND<<<dim3(tiles(from.capacity), parents), THREADS, PASS_SHARED, stream>>>(from, to);
        CHECK(cudaGetLastError());
    }
    void join_partitions(Room build, Room probe, u32 parents, cudaStream_t stream) {
        JOINED<<<parents * BINS_2, JOIN_THREADS, join_shared, stream>>>(build, probe, tables.result);
        CHECK(cudaGetLastError());
    }

    float milliseconds(int from, int to) {
        float taken = 0;
        CHECK(cudaEventElapsedTime(&taken, events[from], events[to]));
        return taken;
    }
    // The beginning of a line.
    void print(const char* name, float milliseconds) {
        std::printf("{\"case\":\"%s\",\"build_rows\":%u,\"probe_rows\":%u,\"payloads\":%d,\"sparse\":%s,\"milliseconds\":%.4g", name,
                    tables.build_count, tables.probe_count, WORDS - 1, is_sparse ? "true" : "false", milliseconds);
    }

    void run() {
        constexpr int PHASES = 5;
        const char* names[PHASES] = {"build pass 1", "build pass 2", "probe pass 1", "probe pass 2", "join"};
        std::vector<float> taken[PHASES + 1];
        for (int repeat = 0; repeat < 6; ++repeat) {
            tables.forget();
            CHECK(cudaEventRecord(events[0]));
            empty_rooms(nullptr);
            first_pass(tables.build, tables.build_count, build_1, nullptr);
            CHECK(cudaEventRecord(events[1]));
            second_pass(build_1, build_2, BINS_1, nullptr);
            CHECK(cudaEventRecord(events[2]));
            first_pass(tables.probe, tables.probe_count, probe_1, nullptr);
            CHECK(cudaEventRecord(events[3]));
            second_pass(probe_1, probe_2, BINS_1, nullptr);
            CHECK(cudaEventRecord(events[4]));
            join_partitions(build_2, probe_2, BINS_1, nullptr);
            CHECK(cudaEventRecord(events[5]));
            CHECK(cudaEventSynchronize(events[5]));
            for (int phase = 0; phase <= PHASES && repeat > 0; ++phase)
                taken[phase].push_back(phase < PHASES ? milliseconds(phase, phase + 1) : milliseconds(0, PHASES));
            tables.expect_all();
        }
        for (auto& times : taken) std::sort(times.begin(), times.end());
        print("radix_join", taken[PHASES][2]);
        for (int phase = 0; phase < PHASES; ++phase) std::printf(",\"%s\":%.4g", names[phase], taken[phase][2]);
        std::printf(",\"g_rows_per_second\":%.4g}\n", (double(tables.build_count) + tables.probe_count) / taken[PHASES][2] / 1e6);
        std::fflush(stdout);
    }

    // Waves of so many parents, in turns on so many streams, of which each has memory for one.
    void run_in_waves(u32 parents, u32 lanes) {
        cudaStream_t start;
        cudaEvent_t started;
        std::vector<cudaStream_t> streams(lanes);
        std::vector<cudaEvent_t> ended(lanes);
        CHECK(cudaStreamCreateWithFlags(&start, cudaStreamNonBlocking));
        CHECK(cudaEventCreateWithFlags(&started, cudaEventDisableTiming));
        for (auto& stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        for (auto& event : ended) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));

        CHECK(cudaStreamBeginCapture(start, cudaStreamCaptureModeGlobal));
        empty_rooms(start);
        first_pass(tables.build, tables.build_count, build_1, start);
        first_pass(tables.probe, tables.probe_count, probe_1, start);
        CHECK(cudaEventRecord(started, start));
        for (auto stream : streams) CHECK(cudaStreamWaitEvent(stream, started));
        for (u32 parent = 0; parent < BINS_1; parent += parents) {
            const u32 lane = parent / parents % lanes;
            // Rows lie where those of the stream's last wave did, and counts of all partitions in their own places.
            const auto wave_of = [&](const Room& room) {
                Room wave = from_partition(room, lane * parents * BINS_2, WORDS);
                wave.counts = room.counts + parent * BINS_2;
                return wave;
            };
            const Room build = wave_of(build_2), probe = wave_of(probe_2);
            second_pass(from_partition(build_1, parent, WORDS), build, parents, streams[lane]);
            second_pass(from_partition(probe_1, parent, WORDS), probe, parents, streams[lane]);
            join_partitions(build, probe, parents, streams[lane]);
        }
        for (u32 lane = 0; lane < lanes; ++lane) {
            CHECK(cudaEventRecord(ended[lane], streams[lane]));
            CHECK(cudaStreamWaitEvent(start, ended[lane]));
        }
        cudaGraph_t graph;
        cudaGraphExec_t launches;
        CHECK(cudaStreamEndCapture(start, &graph));
        CHECK(cudaGraphInstantiate(&launches, graph, 0));

        std::vector<float> taken;
        for (int repeat = 0; repeat < 6; ++repeat) {
            tables.forget();
            CHECK(cudaEventRecord(events[0], start));
            CHECK(cudaGraphLaunch(launches, start));
            CHECK(cudaEventRecord(events[1], start));
            CHECK(cudaEventSynchronize(events[1]));
            if (repeat > 0) taken.push_back(milliseconds(0, 1));
            tables.expect_all();
        }
        std::sort(taken.begin(), taken.end());
        print("radix_join in waves", taken[2]);
        const double bytes = double(parents) * BINS_2 * (build_2.capacity + probe_2.capacity) * WORDS * 4;
        std::printf(",\"parents\":%u,\"streams\":%u,\"wave_megabytes\":%.4g}\n", parents, lanes, bytes / 1e6);
        std::fflush(stdout);

        CHECK(cudaGraphExecDestroy(launches));
        CHECK(cudaGraphDestroy(graph));
        for (auto stream : streams) CHECK(cudaStreamDestroy(stream));
        for (auto event : ended) CHECK(cudaEventDestroy(event));
        CHECK(cudaStreamDestroy(start));
        CHECK(cudaEventDestroy(started));
    }
};

template <int WORDS>
static void run(int build_bits, int probe_bits, bool is_sparse) {
    Join<WORDS> join(build_bits, probe_bits, is_sparse);
    join.run();
    if (!is_sparse) return;
    // Few rows are for a memory checker, and not for timing.
    if (build_bits < 20) return join.run_in_waves(16, 2);
    for (u32 parents : {1u, 2u, 4u, 16u})
        for (u32 lanes : {1u, 2u, 3u, 4u}) join.run_in_waves(parents, lanes);
}

int main(int argc, char** argv) {
    const int build_bits = argc > 1 ? std::atoi(argv[1]) : 27;
    const int probe_bits = argc > 2 ? std::atoi(argv[2]) : 27;
    for (bool is_sparse : {false, true}) {
        run<3>(build_bits, probe_bits, is_sparse);
        run<2>(build_bits, probe_bits + 1, is_sparse);
    }
    return 0;
}
