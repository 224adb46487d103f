// Joins of two tables in device memory with the hash tables of NVIDIA's cuCollections (cuco), composed as cuDF composes its
// joins: what a user of GPU data frames has today, to be compared with `radix_join.cu` on the same tables.
//
//   pip install --no-deps --target headers libraft-cu13==25.12.0    # cuco and the CCCL that goes with it, as cuDF 25.12 has them
//   nvcc -O3 -std=c++17 -arch=native --expt-relaxed-constexpr --expt-extended-lambda -I headers/libraft/include/rapids \
//       -I headers/libraft/include -o cuco_join cuco_join.cu && ./cuco_join [log2 of build rows, 27] [log2 of probe rows, 27]
//
//   build keys ─► hash table ─► with the probe keys: row numbers of matches ─► gathers ─► columns
//
// Three tables, all filled to half:
//
//   static_multiset   cudf::hash_join: slots of hash and row number, double hashing by two threads a key; the matches are
//                     counted and then retrieved, since build keys may repeat
//   static_set        cudf::distinct_hash_join, for unique build keys: slots of hash and row number, linear probing by one
//                     thread a key; one look-up for each probe row, and the rows that found something are compacted
//   static_map        as static_set, but with the key in the slot in place of its hash, so that no probe reads a key of the
//                     build table: less general than cuDF's, for keys of one column of 4 or 8 bytes
//
// Prints a JSON line per join with the median of five runs by events, in all and by phase. The memory of the hash table
// comes from a pool that keeps it; memory of row numbers and of the result is not taken in the timed part. Every run is
// checked on the device: the number of rows, and the sum of a hash over all columns of each result row, which the generator
// of the probe side works out from the build row that it chose. Payloads follow from row numbers, not from keys.

#include <algorithm>
#include <exception>
#include <limits>
#include <vector>

#include <cuco/hash_functions.cuh>
#include <cuco/pair.cuh>
#include <cuco/static_map.cuh>
#include <cuco/static_multiset.cuh>
#include <cuco/static_set.cuh>
#include <thrust/copy.h>
#include <thrust/execution_policy.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <thrust/iterator/transform_output_iterator.h>
#include <thrust/iterator/zip_iterator.h>

#include "common.cuh"

constexpr double LOAD_FACTOR = 0.5;
constexpr int MAX_PAYLOADS = 2;
constexpr int NO_ROW = -1;

template <typename T>
struct Table {
    T* key;
    T* payload[MAX_PAYLOADS];
    u32 rows;
};

// ---- Tables of hashes and row numbers, as in cuDF -----------------------------------------------------------------------

using Slot = cuco::pair<u32, int>;

template <typename T>
struct SlotOf {
    const T* keys;
    __device__ Slot operator()(int row) const { return {cuco::murmurhash3_32<T>{}(keys[row]), row}; }
};

struct RowOf {
    __device__ int operator()(const Slot& slot) const { return slot.second; }
};

// While building: every row has a slot of its own.
struct NeverEqual {
    __device__ bool operator()(const Slot&, const Slot&) const { return false; }
};

template <typename T>
struct SameKey {
    const T *probe, *build;
    __device__ bool operator()(const Slot& probe_row, const Slot& build_row) const {
        return probe_row.first == build_row.first && probe[probe_row.second] == build[build_row.second];
    }
};

struct FirstHash {
    __device__ u32 operator()(const Slot& slot) const { return slot.first; }
};

struct SecondHash {
    cuco::murmurhash3_32<u32> hash;
    __host__ __device__ SecondHash(u32 seed) : hash{seed} {}
    __device__ u32 operator()(const Slot& slot) const { return hash(slot.first); }
};

static const cuco::empty_key<Slot> EMPTY_SLOT{Slot{std::numeric_limits<u32>::max(), NO_ROW}};

template <typename Function>
static auto rows_as(Function function) {
    return thrust::make_transform_iterator(thrust::counting_iterator<int>{0}, function);
}

// ---- Joins: from keys to row numbers of matches ---------------------------------------------------------------------------

struct Matches {
    int *probe, *build;
    int* found;  // the build row of each probe row, where there is at most one
    u64 capacity;
};

// Marks the end of a phase.
struct Clock {
    static constexpr int PHASES = 4;
    cudaEvent_t events[PHASES + 1];
    int next = 0;
    Clock() {
        for (auto& event : events) CHECK(cudaEventCreate(&event));
    }
    ~Clock() {
        for (auto& event : events) cudaEventDestroy(event);
    }
    void mark() { CHECK(cudaEventRecord(events[next++])); }
    float milliseconds(int from, int to) const {
        float taken = 0;
        CHECK(cudaEventElapsedTime(&taken, events[from], events[to]));
        return taken;
    }
};

// What Thrust needs beside its input and output, from the pool.
struct Temporary {
    using value_type = char;
    char* allocate(std::ptrdiff_t bytes) {
        void* pointer = nullptr;
        CHECK(cudaMallocAsync(&pointer, size_t(bytes), nullptr));
        return static_cast<char*>(pointer);
    }
    void deallocate(char* pointer, size_t) { CHECK(cudaFreeAsync(pointer, nullptr)); }
};

struct IsRow {
    __device__ bool operator()(int row) const { return row != NO_ROW; }
};

// Drops the probe rows that found nothing; the number of those that are left.
static u64 compact(const Matches& matches, u32 probe_rows) {
    Temporary temporary;
    auto pairs = thrust::make_zip_iterator(matches.found, thrust::counting_iterator<int>{0});
    auto out = thrust::make_zip_iterator(matches.build, matches.probe);
    return thrust::copy_if(thrust::cuda::par_nosync(temporary).on(nullptr), pairs, pairs + probe_rows, matches.found, out,
                           IsRow{}) -
           out;
}

// Each join builds its table, marks, does the first half of the probe side, marks, and the other half. The table is handed
// back so that its memory is released outside of the timed part.
template <typename T>
struct Multiset {
    static constexpr const char* NAME = "static_multiset";
    static constexpr const char* PHASES[Clock::PHASES] = {"build", "count", "retrieve", "gather"};
    cuco::static_multiset<Slot, cuco::extent<size_t>, cuda::thread_scope_device, NeverEqual,
                          cuco::double_hashing<2, FirstHash, SecondHash>, cuco::cuda_allocator<Slot>, cuco::storage<2>>
        table;

    explicit Multiset(const Table<T>& build) : table{cuco::extent<size_t>{build.rows}, LOAD_FACTOR, EMPTY_SLOT} {
        auto slots = rows_as(SlotOf<T>{build.key});
        table.insert(slots, slots + build.rows);
    }

    u64 probe(const Table<T>& build, const Table<T>& probe, const Matches& matches, Clock& clock) const {
        auto slots = rows_as(SlotOf<T>{probe.key});
        SameKey<T> same{probe.key, build.key};
        u64 count = table.count(slots, slots + probe.rows, same, table.hash_function());
        clock.mark();
        if (count > matches.capacity) return count;
        auto probe_out = thrust::make_transform_output_iterator(matches.probe, RowOf{});
        auto build_out = thrust::make_transform_output_iterator(matches.build, RowOf{});
        auto end = table.retrieve(slots, slots + probe.rows, same, table.hash_function(), probe_out, build_out);
        return u64(end.first - probe_out);
    }
};

template <typename T>
struct Set {
    static constexpr const char* NAME = "static_set";
    static constexpr const char* PHASES[Clock::PHASES] = {"build", "find", "compact", "gather"};
    cuco::static_set<Slot, cuco::extent<int>, cuda::thread_scope_device, NeverEqual, cuco::linear_probing<1, FirstHash>,
                     cuco::cuda_allocator<Slot>, cuco::storage<1>>
        table;

    explicit Set(const Table<T>& build) : table{cuco::extent<int>{int(build.rows)}, LOAD_FACTOR, EMPTY_SLOT} {
        auto slots = rows_as(SlotOf<T>{build.key});
        table.insert_async(slots, slots + build.rows);
    }

    u64 probe(const Table<T>& build, const Table<T>& probe, const Matches& matches, Clock& clock) const {
        auto slots = rows_as(SlotOf<T>{probe.key});
        table.find_async(slots, slots + probe.rows, SameKey<T>{probe.key, build.key}, FirstHash{},
                         thrust::make_transform_output_iterator(matches.found, RowOf{}));
        clock.mark();
        return compact(matches, probe.rows);
    }
};

template <typename T>
struct KeyAndRow {
    const T* keys;
    __device__ cuco::pair<T, T> operator()(int row) const { return {keys[row], T(row)}; }
};

template <typename T>
struct Map {
    static constexpr const char* NAME = "static_map";
    static constexpr const char* PHASES[Clock::PHASES] = {"build", "find", "compact", "gather"};
    static constexpr T NONE = std::numeric_limits<T>::max();
    // A row number as wide as the key: a slot is as wide as the two are rounded up.
    cuco::static_map<T, T, cuco::extent<size_t>, cuda::thread_scope_device, cuda::std::equal_to<T>,
                     cuco::linear_probing<1, cuco::murmurhash3_32<T>>, cuco::cuda_allocator<cuco::pair<T, T>>,
                     cuco::storage<1>>
        table;

    explicit Map(const Table<T>& build)
        : table{cuco::extent<size_t>{build.rows}, LOAD_FACTOR, cuco::empty_key<T>{NONE}, cuco::empty_value<T>{NONE}} {
        auto pairs = rows_as(KeyAndRow<T>{build.key});
        table.insert_async(pairs, pairs + build.rows);
    }

    u64 probe(const Table<T>&, const Table<T>& probe, const Matches& matches, Clock& clock) const {
        table.find_async(probe.key, probe.key + probe.rows, matches.found);
        clock.mark();
        return compact(matches, probe.rows);
    }
};

// ---- Gathers ------------------------------------------------------------------------------------------------------------

template <typename T>
__global__ void gather_rows(const T* from, const int* rows, T* to, u64 count) {
    constexpr int PER_THREAD = 4;
    const u64 start = blockIdx.x * u64(blockDim.x) * PER_THREAD + threadIdx.x;
    T value[PER_THREAD];
#pragma unroll
    for (int at = 0; at < PER_THREAD; ++at) {
        u64 place = start + at * u64(blockDim.x);
        if (place < count) value[at] = from[__ldcs(rows + place)];
    }
#pragma unroll
    for (int at = 0; at < PER_THREAD; ++at) {
        u64 place = start + at * u64(blockDim.x);
        if (place < count) __stcs(to + place, value[at]);
    }
}

template <typename T>
static void gather(const T* from, const int* rows, T* to, u64 count) {
    if (count > 0) gather_rows<<<u32((count + 1023) / 1024), 256>>>(from, rows, to, count);
}

// ---- The benchmark ------------------------------------------------------------------------------------------------------

// Sparse keys are spread over all bits.
template <typename T>
constexpr T SPREAD = sizeof(T) == 4 ? T(0x9e3779b1u) : T(0x9e3779b97f4a7c15ull);

template <typename T>
__device__ inline T key_of(u32 number, bool sparse) {
    return sparse ? T(number) * SPREAD<T> : T(number);
}

// The payload of a row in the payload column of that number; the columns of the probe side have other numbers.
template <typename T>
__device__ inline T payload_of(u32 row, u32 column) {
    u32 low = mix(row + column * 0x3c6ef372u);
    return sizeof(T) == 4 ? T(low) : T(u64(mix(low ^ 0xa54ff53au)) << 32 | low);
}

__device__ inline u64 hashed(u64 hash, u64 value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
    return hash ^ (hash >> 32);
}

template <typename T>
__global__ void fill_build(Table<T> table, int payloads, int bits, bool sparse) {
    for (u32 row = blockIdx.x * blockDim.x + threadIdx.x; row < table.rows; row += gridDim.x * blockDim.x) {
        table.key[row] = key_of<T>(shuffled(row, bits), sparse);
        for (int column = 0; column < payloads; ++column) table.payload[column][row] = payload_of<T>(row, column);
    }
}

// Each probe row draws its build row; `sum` is that of the hashes of the result's rows.
template <typename T>
__global__ void fill_probe(Table<T> table, u32 build_rows, int payloads, int bits, bool sparse, u64* sum) {
    u64 mine = 0;
    for (u32 row = blockIdx.x * blockDim.x + threadIdx.x; row < table.rows; row += gridDim.x * blockDim.x) {
        u32 build_row = u32((u64(mix(row ^ 0x5bd1e995u)) * build_rows) >> 32);
        T key = key_of<T>(shuffled(build_row, bits), sparse);
        table.key[row] = key;
        u64 hash = key;
        for (int column = 0; column < payloads; ++column) hash = hashed(hash, payload_of<T>(build_row, column));
        for (int column = 0; column < payloads; ++column) {
            T payload = payload_of<T>(row, MAX_PAYLOADS + column);
            table.payload[column][row] = payload;
            hash = hashed(hash, payload);
        }
        mine += hash;
    }
    atomicAdd(sum, mine);
}

template <typename T>
struct Result {
    T* key;
    T* build[MAX_PAYLOADS];
    T* probe[MAX_PAYLOADS];
};

template <typename T>
__global__ void sum_result(Result<T> result, int payloads, u64 rows, u64* sum) {
    u64 mine = 0;
    for (u64 row = blockIdx.x * u64(blockDim.x) + threadIdx.x; row < rows; row += u64(gridDim.x) * blockDim.x) {
        u64 hash = result.key[row];
        for (int column = 0; column < payloads; ++column) hash = hashed(hash, result.build[column][row]);
        for (int column = 0; column < payloads; ++column) hash = hashed(hash, result.probe[column][row]);
        mine += hash;
    }
    atomicAdd(sum, mine);
}

// No build key may be the mark of an empty slot of `Map`.
template <typename T>
static void check_keys(u32 build_rows, bool sparse) {
    T inverse = SPREAD<T>;
    for (int round = 0; round < 6; ++round) inverse *= T(2) - SPREAD<T> * inverse;
    T number = sparse ? Map<T>::NONE * inverse : Map<T>::NONE;
    if (number < build_rows) {
        std::fprintf(stderr, "the key of build row number %llu marks empty slots: take fewer build rows than %u\n", u64(number),
                     build_rows);
        std::exit(1);
    }
}

template <typename T, typename Join>
static void measure(const Table<T>& build, const Table<T>& probe, int payloads, bool sparse, const Matches& matches,
                    const Result<T>& result, u64* totals, u64 expected) {
    std::vector<float> taken[Clock::PHASES + 1];
    for (int repeat = 0; repeat < 6; ++repeat) {
        // What an earlier run left must not pass for what this one has to write.
        for (int* rows : {matches.probe, matches.build, matches.found}) CHECK(cudaMemset(rows, 0xee, size_t(probe.rows) * 4));
        CHECK(cudaMemset(result.key, 0xee, size_t(probe.rows) * sizeof(T)));
        for (int column = 0; column < payloads; ++column)
            for (T* payload : {result.build[column], result.probe[column]})
                CHECK(cudaMemset(payload, 0xee, size_t(probe.rows) * sizeof(T)));
        CHECK(cudaMemset(totals, 0, sizeof(u64)));
        CHECK(cudaDeviceSynchronize());

        Clock clock;
        clock.mark();
        Join join(build);
        clock.mark();
        u64 rows = join.probe(build, probe, matches, clock);
        CHECK(cudaGetLastError());
        if (rows != probe.rows) {
            std::fprintf(stderr, "%s: %llu rows and not %u\n", Join::NAME, rows, probe.rows);
            std::exit(1);
        }
        clock.mark();
        gather(probe.key, matches.probe, result.key, rows);
        for (int column = 0; column < payloads; ++column) {
            gather(build.payload[column], matches.build, result.build[column], rows);
            gather(probe.payload[column], matches.probe, result.probe[column], rows);
        }
        clock.mark();
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        if (repeat > 0) {
            for (int phase = 0; phase < Clock::PHASES; ++phase) taken[phase].push_back(clock.milliseconds(phase, phase + 1));
            taken[Clock::PHASES].push_back(clock.milliseconds(0, Clock::PHASES));
        }

        sum_result<<<2048, 256>>>(result, payloads, rows, totals);
        u64 sum = 0;
        CHECK(cudaMemcpy(&sum, totals, sizeof(u64), cudaMemcpyDeviceToHost));
        if (sum != expected) {
            std::fprintf(stderr, "%s: checksum %llu and not %llu\n", Join::NAME, sum, expected);
            std::exit(1);
        }
    }
    for (auto& times : taken) std::sort(times.begin(), times.end());
    const float total = taken[Clock::PHASES][2];
    std::printf("{\"case\":\"cuco_join\",\"table\":\"%s\",\"key_bytes\":%d,\"build_rows\":%u,\"probe_rows\":%u,\"payloads\":%d,"
                "\"sparse\":%s,\"milliseconds\":%.4g",
                Join::NAME, int(sizeof(T)), build.rows, probe.rows, payloads, sparse ? "true" : "false", total);
    for (int phase = 0; phase < Clock::PHASES; ++phase) std::printf(",\"%s\":%.4g", Join::PHASES[phase], taken[phase][2]);
    std::printf(",\"g_rows_per_second\":%.4g}\n", (double(build.rows) + probe.rows) / total / 1e6);
    std::fflush(stdout);
}

// All joins of one pair of tables.
template <typename T>
static void run(int build_bits, int probe_bits, int payloads, bool sparse) {
    Table<T> build{}, probe{};
    build.rows = 1u << build_bits;
    probe.rows = 1u << probe_bits;
    check_keys<T>(build.rows, sparse);
    Matches matches{};
    Result<T> result{};
    std::vector<void*> taken;
    auto column = [&](auto*& pointer, u32 rows) {
        pointer = device_memory<std::remove_reference_t<decltype(*pointer)>>(rows);
        taken.push_back(pointer);
    };
    for (Table<T>* table : {&build, &probe}) {
        column(table->key, table->rows);
        for (int payload = 0; payload < payloads; ++payload) column(table->payload[payload], table->rows);
    }
    column(result.key, probe.rows);
    for (int payload = 0; payload < payloads; ++payload) {
        column(result.build[payload], probe.rows);
        column(result.probe[payload], probe.rows);
    }
    matches.capacity = probe.rows;
    for (int** rows : {&matches.probe, &matches.build, &matches.found}) column(*rows, probe.rows);
    u64* totals = nullptr;  // checksum, expected checksum
    column(totals, 2);
    CHECK(cudaMemset(totals, 0, 2 * sizeof(u64)));
    fill_build<<<2048, 256>>>(build, payloads, build_bits, sparse);
    fill_probe<<<2048, 256>>>(probe, build.rows, payloads, build_bits, sparse, totals + 1);
    CHECK(cudaGetLastError());
    u64 expected = 0;
    CHECK(cudaMemcpy(&expected, totals + 1, sizeof(u64), cudaMemcpyDeviceToHost));

    measure<T, Multiset<T>>(build, probe, payloads, sparse, matches, result, totals, expected);
    measure<T, Set<T>>(build, probe, payloads, sparse, matches, result, totals, expected);
    measure<T, Map<T>>(build, probe, payloads, sparse, matches, result, totals, expected);
    for (void* memory : taken) CHECK(cudaFree(memory));
}

int main(int argc, char** argv) {
    const int build_bits = argc > 1 ? std::atoi(argv[1]) : 27;
    const int probe_bits = argc > 2 ? std::atoi(argv[2]) : 27;
    if (build_bits < 1 || build_bits > 29 || probe_bits < 1 || probe_bits > 29) {
        std::fprintf(stderr, "%d and %d bits of rows: both sides have 2^1 to 2^29 rows\n", build_bits, probe_bits);
        return 2;
    }
    // The pool keeps what is freed: a run takes the memory of the run before.
    int device = 0;
    cudaMemPool_t pool = nullptr;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetDefaultMemPool(&pool, device));
    u64 keep = ~0ull;
    CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    try {
        for (bool sparse : {false, true}) {
            run<u32>(build_bits, probe_bits, 2, sparse);
            run<u32>(build_bits, probe_bits + 1, 1, sparse);
            run<u64>(build_bits, probe_bits, 1, sparse);
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "cuco: %s\n", error.what());
        return 1;
    }
    return 0;
}
