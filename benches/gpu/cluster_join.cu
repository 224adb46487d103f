// A radix hash join with one pass over device memory: the second level of partitioning goes from block to block within a cluster, and
// never to memory. It is beside `radix_join.cu`, which has the two passes of the server's kernels, to see which of the two is quicker
// (kernels/tuning.md tells).
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -o cluster_join cluster_join.cu && ./cluster_join [log2 of build rows, 27] [log2 of probe rows, 27]
//
//   columns ─► pass ─► packed rows in 2048 partitions ─► exchange in a cluster of 8 blocks ─► join in shared memory ─► columns
//
// Of 2^27 build rows a partition has 65,536, more than the shared memory of one multiprocessor holds and less than that of eight. The
// blocks of a cluster divide a pair of partitions among them: each reads a part of the rows, a tile at a time, puts a tile in order by
// the block that owns a row, which three further bits of its hash say, and sends each block its rows by one bulk copy. What has come is
// entered into the block's own table (build side), or looked up there (probe side). A tile is sent before the last one is worked on, and
// the one after that is on its way from memory meanwhile.
//
// A block takes room in the result for many rows at once and uses it up tile by tile, so that no tile waits for an answer from memory;
// each block leaves a gap at the end, which a join that is used would have to fill. Build keys are distinct: a probe row has one match.
//
// Prints a JSON line per shape with the median of five runs by events, in all and by phase; every run is checked as `radix_join` does.

#include <algorithm>
#include <vector>

#include "clusters.cuh"
#include "tables.cuh"

using u16 = std::uint16_t;

__device__ inline u32 digit(u32 key, u32 skip, u32 bits) { return (mix(key) << skip) >> (32 - bits); }

// ---- Partitioning -------------------------------------------------------------------------------------------------------

constexpr int PASS_THREADS = 1024;

template <int WORDS>
constexpr int ROWS_A_THREAD = WORDS == 2 ? 16 : 12;

template <int WORDS>
constexpr u32 PASS_TILE = PASS_THREADS* ROWS_A_THREAD<WORDS>;

template <int WORDS>
constexpr size_t pass_shared_bytes(u32 bits) {
    return (size_t(PASS_TILE<WORDS>) * WORDS + (2u << bits)) * 4;
}

// Ranks, orders and writes a tile, as the passes of `radix_join` do, with two or more partitions to a thread. A thread reads four
// consecutive rows at a time.
template <int WORDS, int BITS>
__global__ void __launch_bounds__(PASS_THREADS) pass(Columns<WORDS> columns, u32 count, Room room) {
    constexpr u32 PER_THREAD = ROWS_A_THREAD<WORDS>, PARTITIONS = 1u << BITS, OWN = PARTITIONS / PASS_THREADS;
    static_assert(OWN > 0, "a thread has partitions");
    extern __shared__ __align__(128) u32 pass_memory[];
    u32 *staged = pass_memory, *starts = staged + PASS_TILE<WORDS> * WORDS, *places = starts + PARTITIONS;
    __shared__ u32 warp_sums[PASS_THREADS / 32];
    const size_t start = size_t(blockIdx.x) * PASS_TILE<WORDS>;
    const u32 filled = u32(min(count - start, size_t(PASS_TILE<WORDS>)));
    const auto row_of = [](int at) { return at / 4 * PASS_THREADS * 4 + threadIdx.x * 4 + at % 4; };
    u32 value[WORDS][PER_THREAD];
#pragma unroll
    for (int at = 0; at < PER_THREAD; at += 4) {
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            // Columns end on a multiple of four rows.
            const auto* from = reinterpret_cast<const uint4*>(columns.column[word] + start + row_of(at));
            const uint4 four = row_of(at) < filled ? __ldcs(from) : uint4{};
            value[word][at] = four.x;
            value[word][at + 1] = four.y;
            value[word][at + 2] = four.z;
            value[word][at + 3] = four.w;
        }
    }
    for (u32 bin = threadIdx.x; bin < PARTITIONS; bin += PASS_THREADS) starts[bin] = 0;
    __syncthreads();
    u16 rank[PER_THREAD];
#pragma unroll
    for (int at = 0; at < PER_THREAD; ++at)
        rank[at] = row_of(at) < filled ? u16(atomicAdd(&starts[digit(value[0][at], 0, BITS)], 1u)) : 0;
    __syncthreads();
    u32 in_bin[OWN], place[OWN], sum = 0;
#pragma unroll
    for (u32 own = 0; own < OWN; ++own) {
        const u32 bin = threadIdx.x * OWN + own;
        in_bin[own] = starts[bin];
        sum += in_bin[own];
        place[own] = in_bin[own] ? atomicAdd(&room.counts[bin], in_bin[own]) : 0;
    }
    const u32 inclusive = warp_inclusive_sum(sum);
    if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = inclusive;
    __syncthreads();
    u32 before = inclusive - sum;
    for (u32 warp = 0; warp < threadIdx.x / 32; ++warp) before += warp_sums[warp];
#pragma unroll
    for (u32 own = 0; own < OWN; ++own) {
        const u32 bin = threadIdx.x * OWN + own;
        starts[bin] = before;
        places[bin] = place[own] - before;
        before += in_bin[own];
    }
    __syncthreads();
#pragma unroll
    for (int at = 0; at < PER_THREAD; ++at) {
        if (row_of(at) >= filled) continue;
        const u32 to = (starts[digit(value[0][at], 0, BITS)] + rank[at]) * WORDS;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) staged[to + word] = value[word][at];
    }
    __syncthreads();
    for (u32 cell = threadIdx.x; cell < filled * WORDS; cell += PASS_THREADS) {
        const u32 row = cell / WORDS, bin = digit(staged[row * WORDS], 0, BITS), in_partition = places[bin] + row;
        const size_t to = size_t(bin) * room.capacity + in_partition;
        if (in_partition < room.capacity) room.rows[to * WORDS + cell % WORDS] = staged[cell];
    }
}

// ---- Joining ------------------------------------------------------------------------------------------------------------

constexpr u32 THREADS = 1024, STAGES = 2, BUCKETS = 4096;
// Rows for which a block takes room in the result at once.
constexpr u32 CHUNK = 16384;
constexpr u16 NONE = 0xffff;

// Partitions by the first BITS bits of a key's hash, and blocks of a cluster by those that follow.
template <int WORDS, int BITS, int SIZE_BITS>
struct Form {
    static constexpr u32 PARTITIONS = 1u << BITS, SIZE = 1u << SIZE_BITS;
    // What one block sends another of a tile, at the most: a share, and six deviations or more.
    static constexpr u32 SHARE = THREADS / SIZE, SENT_MAX = SIZE == 4 ? SHARE + 84 : SHARE + 64;
    // Build rows of a block: the share of 2^27 rows, and six deviations.
    static constexpr u32 ROWS_MAX = ((1u << (27 - BITS - SIZE_BITS)) + 560) / 8 * 8;
    static_assert(SENT_MAX * WORDS % 4 == 0, "pieces are multiples of 16 bytes");
    static_assert(ROWS_MAX < NONE, "rows of a table are 16-bit numbers");

    struct alignas(128) Shared {
        // From each block of the cluster, and for each.
        u32 in[STAGES][SIZE][SENT_MAX * WORDS], out[STAGES][SIZE][SENT_MAX * WORDS];
        u32 heads[BUCKETS];
        u32 table[ROWS_MAX * WORDS];
        u16 next[ROWS_MAX];
        u32 in_rows[STAGES][SIZE], out_rows[STAGES][SIZE];
        // Of this probe tile and the next one in turns: its pairs, where the first `room` of them go, and where the others do.
        u32 pairs[2], room[2];
        u64 place[2], next_place[2];
        u64 full[STAGES], empty[STAGES];
    };
};

// The tiles of a cluster's pairs of partitions, one after the other: first those of the build side. All blocks make the same steps.
template <typename Form>
struct Walk {
    Room build, probe;
    u32 clusters, partition, step, build_rows, probe_rows, build_tiles, tiles;

    __device__ Walk(const Room& build, const Room& probe, u32 cluster, u32 clusters)
        : build(build), probe(probe), clusters(clusters), partition(cluster) {
        enter();
    }
    __device__ bool is_over() const { return partition >= Form::PARTITIONS; }
    __device__ bool is_build() const { return step < build_tiles; }
    __device__ void advance() {
        if (++step < tiles) return;
        partition += clusters;
        enter();
    }
    // What this thread reads of the tile: a packed row, or null. Tiles of a side are of one size.
    template <int WORDS>
    __device__ const u32* row(u32 rank) const {
        const u32* from = is_build() ? build.rows : probe.rows;
        const u32 capacity = is_build() ? build.capacity : probe.capacity, rows = is_build() ? build_rows : probe_rows;
        const u32 of_side = is_build() ? build_tiles : tiles - build_tiles, tile = is_build() ? step : step - build_tiles;
        const u32 parts = of_side * Form::SIZE;
        const u32 each = ((rows + parts - 1) / parts + 31) / 32 * 32, row = (tile * Form::SIZE + rank) * each + threadIdx.x;
        return threadIdx.x < each && row < rows ? from + (size_t(partition) * capacity + row) * WORDS : nullptr;
    }

private:
    __device__ void enter() {
        constexpr u32 TILE = THREADS * Form::SIZE;
        step = 0;
        for (; !is_over(); partition += clusters) {
            build_rows = min(build.counts[partition], build.capacity);
            probe_rows = min(probe.counts[partition], probe.capacity);
            build_tiles = (build_rows + TILE - 1) / TILE;
            tiles = build_tiles + (probe_rows + TILE - 1) / TILE;
            if (build_rows > 0 && probe_rows > 0) return;
        }
    }
};

// `failed` is set where more rows came together than there is room for.
template <int WORDS, int BITS, int SIZE_BITS>
__global__ void __launch_bounds__(THREADS) join(Room build, Room probe, Result<2 * WORDS - 1> result, u32* failed) {
#if HAS_BULK_COPIES
    using Form = Form<WORDS, BITS, SIZE_BITS>;
    constexpr u32 SIZE = Form::SIZE, SENT_MAX = Form::SENT_MAX;
    extern __shared__ __align__(128) char join_memory[];
    auto& s = *reinterpret_cast<typename Form::Shared*>(join_memory);
    const u32 lane = threadIdx.x % 32, rank = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            init_barrier(s.full[stage], SIZE);
            init_barrier(s.empty[stage], SIZE);
        }
        show_barriers();
        s.pairs[0] = s.pairs[1] = 0;
    }
    if (threadIdx.x < STAGES * SIZE) s.out_rows[threadIdx.x / SIZE][threadIdx.x % SIZE] = 0;
    // No block is sent rows before its barriers are there.
    wait_for_cluster();

    Walk<Form> coming(build, probe, blockIdx.x / SIZE, gridDim.x / SIZE), here = coming;
    u32 row[WORDS];
    bool has_row = false;
    const auto load = [&] {
        const u32* from = coming.is_over() ? nullptr : coming.template row<WORDS>(rank);
        has_row = from != nullptr;
        if (has_row) {
#pragma unroll
            for (int word = 0; word < WORDS; ++word) row[word] = __ldcs(from + word);
        }
        if (!coming.is_over()) coming.advance();
    };
    // Sends the tile that was loaded, which is tile `number` of this cluster, and loads the next one.
    const auto send = [&](u32 number) {
        const u32 stage = number % STAGES;
        u32 value[WORDS];
#pragma unroll
        for (int word = 0; word < WORDS; ++word) value[word] = row[word];
        const bool is_there = has_row;
        load();
        const u32 owner = is_there ? digit(value[0], BITS, SIZE_BITS) : 0;
        // Rows of the warp with the same owner; and, by lane, all of the owner of that number.
        u32 alike = __ballot_sync(~0u, is_there), of_lane = alike;
#pragma unroll
        for (u32 bit = 0; bit < SIZE_BITS; ++bit) {
            const u32 set = __ballot_sync(~0u, owner >> bit & 1);
            alike &= owner >> bit & 1 ? set : ~set;
            of_lane &= lane >> bit & 1 ? set : ~set;
        }
        const u32 of_owner = lane < SIZE ? atomicAdd(&s.out_rows[stage][lane], __popc(of_lane)) : 0;
        const u32 to = __shfl_sync(~0u, of_owner, owner) + __popc(alike & ((1u << lane) - 1));
        // What was there before has been read when all blocks are done with what it became.
        if (number >= STAGES) wait_for(s.empty[stage], (number / STAGES - 1) & 1);
        if (is_there && to < SENT_MAX) {
#pragma unroll
            for (int word = 0; word < WORDS; ++word) s.out[stage][owner][to * WORDS + word] = value[word];
        }
        show_to_copies();
        __syncthreads();
        if (threadIdx.x >= SIZE) return;
        // Each thread begins with another block.
        const u32 peer = (rank + threadIdx.x) % SIZE, rows = s.out_rows[stage][peer];
        const u32 bytes = (min(rows, SENT_MAX) * WORDS * 4 + 15) / 16 * 16;
        if (rows > SENT_MAX) *failed = 1;
        s.out_rows[stage][peer] = 0;
        store_in(&s.in_rows[stage][rank], peer, min(rows, SENT_MAX));
        arrive_expecting_at(s.full[stage], peer, bytes);
        if (bytes > 0) copy_to(s.in[stage][rank], peer, s.out[stage][peer], bytes, s.full[stage]);
    };

    load();
    // Tiles sent, build rows of this partition that are in the table, probe tiles so far.
    u32 sent = 0, entered = 0, turns = 0;
    // Of thread 0: the rows of the result that this block has, and how many of them are used.
    u64 chunk = 0;
    u32 used = CHUNK;
    bool is_last = here.is_over();
    const auto send_next = [&] {
        if (is_last) return;
        is_last = coming.is_over();
        send(sent++);
    };
    // The walk is ahead of what is loaded by one tile: it is over when the last one has been loaded, which is still to be sent.
    send_next();
    for (u32 number = 0; !here.is_over(); ++number, here.advance()) {
        send_next();
        const u32 stage = number % STAGES;
        if (here.step == 0) {
            for (u32 four = threadIdx.x; four < BUCKETS / 4; four += THREADS)
                reinterpret_cast<uint4*>(s.heads)[four] = {NONE, NONE, NONE, NONE};
            entered = 0;
            __syncthreads();
        }
        wait_for(s.full[stage], (number / STAGES) & 1);
        u32 ends[SIZE], rows = 0;
#pragma unroll
        for (u32 sender = 0; sender < SIZE; ++sender) ends[sender] = rows += s.in_rows[stage][sender];
        // Row `at` of those that have come.
        const auto received = [&](u32 at) {
            u32 sender = 0, start = 0;
#pragma unroll
            for (u32 other = 0; other + 1 < SIZE; ++other) {
                if (at >= ends[other]) {
                    sender = other + 1;
                    start = ends[other];
                }
            }
            return &s.in[stage][sender][(at - start) * WORDS];
        };
        if (here.is_build()) {
            for (u32 at = threadIdx.x; at < rows; at += THREADS) {
                const u32 *from = received(at), to = entered + at;
                if (to >= Form::ROWS_MAX) {
                    *failed = 1;
                    continue;
                }
#pragma unroll
                for (int word = 0; word < WORDS; ++word) s.table[to * WORDS + word] = from[word];
                s.next[to] = u16(atomicExch(&s.heads[mix(from[0]) % BUCKETS], to));
            }
            entered += rows;
            __syncthreads();
            if (threadIdx.x < SIZE) arrive_at(s.empty[stage], threadIdx.x);
            continue;
        }
        // Of twice as many rows as threads at the most.
        u32 entry[2], value[2][WORDS], in_warp = 0, before = 0;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 at = half * THREADS + threadIdx.x;
            entry[half] = NONE;
            if (half * THREADS >= rows) break;
            if (at < rows) {
                const u32* from = received(at);
#pragma unroll
                for (int word = 0; word < WORDS; ++word) value[half][word] = from[word];
                u32 found = s.heads[mix(value[half][0]) % BUCKETS];
                while (found != NONE && s.table[found * WORDS] != value[half][0]) found = s.next[found];
                entry[half] = found;
            }
            in_warp += __popc(__ballot_sync(~0u, entry[half] != NONE));
        }
        const u32 turn = turns++ % 2;
        if (lane == 0) before = atomicAdd(&s.pairs[turn], in_warp);
        before = __shfl_sync(~0u, before, 0);
        __syncthreads();
        if (threadIdx.x < SIZE) arrive_at(s.empty[stage], threadIdx.x);
        if (threadIdx.x == 0) {
            const u32 pairs = s.pairs[turn], room = CHUNK - used;
            s.pairs[turn ^ 1] = 0;
            s.place[turn] = chunk + used;
            s.room[turn] = room;
            used += pairs;
            if (pairs > room) {
                chunk = atomicAdd(result.rows, u64(CHUNK));
                s.next_place[turn] = chunk;
                used = pairs - room;
            }
        }
        __syncthreads();
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            if (half * THREADS >= rows) break;
            const u32 matched = __ballot_sync(~0u, entry[half] != NONE), in_tile = before + __popc(matched & ((1u << lane) - 1));
            const u64 to = in_tile < s.room[turn] ? s.place[turn] + in_tile : s.next_place[turn] + (in_tile - s.room[turn]);
            before += __popc(matched);
            if (entry[half] == NONE || to >= result.capacity) continue;
            result.column[0][to] = value[half][0];
#pragma unroll
            for (int word = 1; word < WORDS; ++word) {
                result.column[word][to] = s.table[entry[half] * WORDS + word];
                result.column[WORDS - 1 + word][to] = value[half][word];
            }
        }
        // Nobody begins the next table before all are done with this one.
        if (here.step + 1 == here.tiles) __syncthreads();
    }
    // No block ends while another one may still arrive at its barriers.
    wait_for_cluster();
#endif
}

// ---- The benchmark ------------------------------------------------------------------------------------------------------

template <int WORDS, int BITS, int SIZE_BITS>
static void run(int processors, int build_bits, int probe_bits) {
    using Form = Form<WORDS, BITS, SIZE_BITS>;
    constexpr size_t shared_bytes = sizeof(typename Form::Shared);
    Tables<WORDS> tables(build_bits, probe_bits, true, u64(processors) * CHUNK);
    Room build = room_for(tables.build_count, Form::PARTITIONS, WORDS, 0);
    Room probe = room_for(tables.probe_count, Form::PARTITIONS, WORDS, double(tables.probe_count) / tables.build_count);
    auto* failed = device_memory<u32>(1);
    CHECK(cudaMemset(failed, 0, 4));
    const auto partition = pass<WORDS, BITS>;
    const auto joined = join<WORDS, BITS, SIZE_BITS>;
    CHECK(cudaFuncSetAttribute(partition, cudaFuncAttributeMaxDynamicSharedMemorySize, int(pass_shared_bytes<WORDS>(BITS))));
    CHECK(cudaFuncSetAttribute(joined, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)));
    ClusterLaunch launch(processors, Form::SIZE, THREADS, shared_bytes);
    const u32 clusters = launch.fit(joined);
    if (clusters == 0) {
        std::printf("{\"case\":\"cluster_join\",\"cluster\":%u,\"skipped\":\"this GPU runs no clusters of this size\"}\n", Form::SIZE);
        return;
    }
    const auto run_pass = [&](const Columns<WORDS>& columns, u32 count, Room to) {
        constexpr u32 TILE = PASS_TILE<WORDS>;
        partition<<<(count + TILE - 1) / TILE, PASS_THREADS, pass_shared_bytes<WORDS>(BITS)>>>(columns, count, to);
    };

    constexpr int PHASES = 3;
    const char* names[PHASES] = {"build pass", "probe pass", "join"};
    cudaEvent_t events[PHASES + 1];
    for (auto& event : events) CHECK(cudaEventCreate(&event));
    std::vector<float> taken[PHASES + 1];
    u64 gaps = 0;
    for (int repeat = 0; repeat < 6; ++repeat) {
        tables.forget();
        CHECK(cudaEventRecord(events[0]));
        for (Room room : {build, probe}) CHECK(cudaMemsetAsync(room.counts, 0, Form::PARTITIONS * 4));
        run_pass(tables.build, tables.build_count, build);
        CHECK(cudaEventRecord(events[1]));
        run_pass(tables.probe, tables.probe_count, probe);
        CHECK(cudaEventRecord(events[2]));
        CHECK(cudaLaunchKernelEx(&launch.config, joined, build, probe, tables.result, failed));
        CHECK(cudaEventRecord(events[3]));
        CHECK(cudaEventSynchronize(events[3]));
        for (int phase = 0; phase <= PHASES && repeat > 0; ++phase) {
            float milliseconds = 0;
            CHECK(cudaEventElapsedTime(&milliseconds, events[phase < PHASES ? phase : 0], events[phase < PHASES ? phase + 1 : PHASES]));
            taken[phase].push_back(milliseconds);
        }
        u32 has_failed = 0;
        CHECK(cudaMemcpy(&has_failed, failed, 4, cudaMemcpyDeviceToHost));
        if (has_failed) {
            std::fprintf(stderr, "more rows came together than there is room for\n");
            std::exit(1);
        }
        gaps = tables.expect_all();
    }
    for (auto& times : taken) std::sort(times.begin(), times.end());
    std::printf("{\"case\":\"cluster_join\",\"partitions\":%u,\"cluster\":%u,\"clusters\":%u,\"build_rows\":%u,"
                "\"probe_rows\":%u,\"payloads\":%d,\"sparse\":true,\"milliseconds\":%.4g",
                Form::PARTITIONS, Form::SIZE, clusters, tables.build_count, tables.probe_count, WORDS - 1, taken[PHASES][2]);
    for (int phase = 0; phase < PHASES; ++phase) std::printf(",\"%s\":%.4g", names[phase], taken[phase][2]);
    std::printf(",\"gap_rows\":%llu,\"g_rows_per_second\":%.4g}\n", gaps,
                (double(tables.build_count) + tables.probe_count) / taken[PHASES][2] / 1e6);
    std::fflush(stdout);
    for (auto& event : events) CHECK(cudaEventDestroy(event));
    for (Room room : {build, probe}) {
        CHECK(cudaFree(room.rows));
        CHECK(cudaFree(room.counts));
    }
    CHECK(cudaFree(failed));
}

int main(int argc, char** argv) {
    const int build_bits = argc > 1 ? std::atoi(argv[1]) : 27;
    const int probe_bits = argc > 2 ? std::atoi(argv[2]) : 27;
    if (build_bits < 12 || build_bits > 27 || probe_bits < build_bits || probe_bits > 28) {
        std::fprintf(stderr, "there are 2^12 to 2^27 build rows, and as many probe rows or up to 2^28\n");
        return 2;
    }
    int processors = 0;
    CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    const auto skip = [](const char* why) {
        std::printf("{\"case\":\"cluster_join\",\"skipped\":\"%s\"}\n", why);
        return 0;
    };
    if (!features_here().bulk_copies) return skip("clusters and bulk copies need compute capability 9.0");
    int per_block = 0;
    CHECK(cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    if (size_t(per_block) < sizeof(Form<3, 11, 3>::Shared)) return skip("too little shared memory for a block");
    run<3, 11, 3>(processors, build_bits, probe_bits);
    run<2, 11, 3>(processors, build_bits, std::min(probe_bits + 1, 28));
    run<3, 12, 2>(processors, build_bits, probe_bits);
    run<2, 12, 2>(processors, build_bits, std::min(probe_bits + 1, 28));
    return 0;
}
