// The tables of the standalone joins, where their passes put rows, and how a result is checked.

#pragma once

#include <algorithm>
#include <cmath>

#include "common.cuh"

template <int WORDS>
struct Columns {
    const u32* column[WORDS];
};

template <int COLUMNS>
struct Result {
    u32* column[COLUMNS];
    u64* rows;
    u64 capacity;
};

// Where a pass puts rows: partition `p` has room for `capacity` rows from `p * capacity` on; `counts[p]` goes on counting
// when there is no room left.
struct Room {
    u32* rows;
    u32* counts;
    u32 capacity;
};

// What is in memory that a join has not written.
constexpr u32 NOT_WRITTEN = 0xeeeeeeeeu;

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

// Counts rows whose payload is not that of their key, and rows that nobody wrote, and adds up the payload of the probe side.
__global__ void verify(const u32* key, const u32* ra, const u32* rb, const u32* sa, const u32* sb, u64 count, u64* wrong, u64* sum,
                       u64* gaps) {
    u64 mine = 0;
    for (u64 at = blockIdx.x * u64(blockDim.x) + threadIdx.x; at < count; at += u64(gridDim.x) * blockDim.x) {
        if (key[at] == NOT_WRITTEN && ra[at] == NOT_WRITTEN && sa[at] == NOT_WRITTEN) {
            atomicAdd(gaps, 1ull);
            continue;
        }
        if (ra[at] != mix(key[at] + 1) || (rb && rb[at] != mix(key[at] + 2))) atomicAdd(wrong, 1ull);
        mine += sa[at];
        if (sb) mine += 3ull * sb[at];
    }
    atomicAdd(sum, mine);
}

// Room for the share of rows of one partition and six standard deviations, when each key occurs `repeats` times on average: distinct keys
// fall into partitions at random, and all rows of a key fall with it.
static Room room_for(size_t rows, u32 partitions, int words, double repeats) {
    double share = double(rows) / partitions;
    Room room{};
    room.capacity = u32(share + 6 * std::sqrt(share * (1 + repeats)) + 8) / 4 * 4 + 4;
    room.rows = device_memory<u32>(size_t(partitions) * room.capacity * words);
    room.counts = device_memory<u32>(partitions);
    return room;
}

// A build side of distinct keys, a probe side each row of which has one of them, both with `WORDS - 1` columns of payload, and memory for
// all columns of their join: the key, the build side's payload and that of the probe side.
template <int WORDS>
struct Tables {
    static constexpr int COLUMNS = 2 * WORDS - 1;

    u32 build_count, probe_count;
    Columns<WORDS> build{}, probe{};
    Result<COLUMNS> result{};
    // Rows of the result, wrong ones, the sum of payload found and the one expected, rows of the result that nobody wrote.
    u64* totals;

    // `gaps`: rows for which the result has room beyond those that there are.
    Tables(int build_bits, int probe_bits, bool sparse, u64 gaps = 0) : build_count(1u << build_bits), probe_count(1u << probe_bits) {
        u32 *of_build[3] = {}, *of_probe[3] = {};
        for (int word = 0; word < WORDS; ++word) {
            build.column[word] = of_build[word] = device_memory<u32>(build_count);
            probe.column[word] = of_probe[word] = device_memory<u32>(probe_count);
        }
        totals = device_memory<u64>(5);
        CHECK(cudaMemset(totals, 0, 5 * sizeof(u64)));
        result.rows = totals;
        result.capacity = probe_count + gaps;
        for (auto& column : result.column) column = device_memory<u32>(result.capacity);
        fill_build<<<2048, 256>>>(of_build[0], of_build[1], of_build[2], build_count, build_bits, sparse);
        fill_probe<<<2048, 256>>>(of_probe[0], of_probe[1], of_probe[2], probe_count, build_count, sparse, totals + 3);
        CHECK(cudaGetLastError());
    }
    ~Tables() {
        for (const auto* columns : {&build, &probe})
            for (const u32* column : columns->column) cudaFree(const_cast<u32*>(column));
        for (u32* column : result.column) cudaFree(column);
        cudaFree(totals);
    }
    Tables(const Tables&) = delete;

    // As if there had been no join.
    void forget() {
        for (u32* column : result.column) CHECK(cudaMemset(column, NOT_WRITTEN & 0xff, result.capacity * 4));
        CHECK(cudaMemset(totals, 0, 3 * sizeof(u64)));
        CHECK(cudaMemset(totals + 4, 0, sizeof(u64)));
        CHECK(cudaDeviceSynchronize());
    }

    // Ends the program unless every row of the join is there once and right; answers how many rows of the result nobody wrote.
    u64 expect_all() {
        u64 found[5];
        CHECK(cudaMemcpy(found, totals, 8, cudaMemcpyDeviceToHost));
        u32* const* column = result.column;
        verify<<<2048, 256>>>(column[0], column[1], WORDS == 3 ? column[2] : nullptr, column[WORDS], WORDS == 3 ? column[4] : nullptr,
                              std::min<u64>(found[0], result.capacity), totals + 1, totals + 2, totals + 4);
        CHECK(cudaMemcpy(found, totals, sizeof(found), cudaMemcpyDeviceToHost));
        if (found[0] - found[4] != probe_count || found[1] != 0 || found[2] != found[3]) {
            std::fprintf(stderr, "%llu rows and not %u, %llu of them wrong, checksum %llu and not %llu\n", found[0] - found[4],
                         probe_count, found[1], found[2], found[3]);
            std::exit(1);
        }
        return found[4];
    }
};
