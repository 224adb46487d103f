// The parts of CUB and Thrust that the kernels use, as plain loops. Each runs as a kernel of one
// thread, so that its illegal accesses are reported like a kernel's.

#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda.h"

namespace emulator {

// Scratch bytes that each algorithm asks for. It fills them with garbage.
constexpr size_t SCRATCH_BYTES = 1000;

// True if the call only asks for the scratch size, or gives too little. `answer` is the call's
// result in both cases.
inline bool is_answered(void* scratch, size_t& bytes, cudaError_t& answer) {
    answer = cudaSuccess;
    if (!scratch) {
        bytes = SCRATCH_BYTES;
        return true;
    }
    if (bytes < SCRATCH_BYTES) answer = cudaErrorInvalidValue;
    return answer != cudaSuccess;
}

template <typename Body>
cudaError_t run_alone(const char* name, void* scratch, cudaStream_t stream, const Body& body) {
    const auto thread = [&] {
        std::memset(scratch, 0xcd, SCRATCH_BYTES);
        body();
    };
    run(name, nullptr, 1, 1, 0, stream, [](const void* body) { (*static_cast<const decltype(thread)*>(body))(); }, &thread);
    return cudaGetLastError();
}

}  // namespace emulator

namespace thrust {

template <typename T>
struct counting_iterator {
    T first;
    explicit counting_iterator(T first) : first(first) {}
    T operator[](std::int64_t at) const { return T(first + at); }
};

template <typename Function, typename Iterator>
struct transform_iterator {
    Iterator from;
    Function function;
    transform_iterator(Iterator from, Function function) : from(from), function(function) {}
    auto operator[](std::int64_t at) const { return function(from[at]); }
};
template <typename Function, typename Iterator>
transform_iterator(Iterator, Function) -> transform_iterator<Function, Iterator>;

}  // namespace thrust

namespace cub {

struct DeviceScan {
    template <typename From, typename To>
    static cudaError_t ExclusiveSum(void* scratch, size_t& bytes, From from, To* to, std::int64_t count, cudaStream_t stream = nullptr) {
        cudaError_t answer;
        if (emulator::is_answered(scratch, bytes, answer)) return answer;
        return emulator::run_alone("CUB's DeviceScan::ExclusiveSum", scratch, stream, [&] {
            // The sum is as wide as the summands, as in CUB.
            std::decay_t<decltype(from[0])> sum = 0;
            for (std::int64_t at = 0; at < count; ++at) {
                // The output may alias the input.
                const auto value = from[at];
                to[at] = sum;
                sum += value;
            }
        });
    }
};

struct DeviceSelect {
    template <typename From, typename T, typename Count, typename Condition>
    static cudaError_t If(void* scratch, size_t& bytes, From from, T* to, Count* selected, std::int64_t count, Condition condition,
                          cudaStream_t stream = nullptr) {
        cudaError_t answer;
        if (emulator::is_answered(scratch, bytes, answer)) return answer;
        return emulator::run_alone("CUB's DeviceSelect::If", scratch, stream, [&] {
            std::int64_t found = 0;
            for (std::int64_t at = 0; at < count; ++at)
                if (condition(from[at])) to[found++] = from[at];
            *selected = Count(found);
        });
    }
};

struct DeviceRadixSort {
    template <typename Key, typename Value>
    static cudaError_t SortPairs(void* scratch, size_t& bytes, const Key* keys_in, Key* keys_out, const Value* values_in,
                                 Value* values_out, std::int64_t count, int begin_bit, int end_bit, cudaStream_t stream = nullptr) {
        cudaError_t answer;
        if (emulator::is_answered(scratch, bytes, answer)) return answer;
        return emulator::run_alone("CUB's DeviceRadixSort::SortPairs", scratch, stream, [&] {
            const int bits = end_bit - begin_bit;
            const Key mask = bits >= int(8 * sizeof(Key)) ? ~Key(0) : Key((Key(1) << bits) - 1);
            std::vector<std::pair<Key, Value>> pairs(count);
            for (std::int64_t at = 0; at < count; ++at) pairs[at] = {keys_in[at], values_in[at]};
            const auto part = [&](Key key) { return bits == 0 ? 0 : key >> begin_bit & mask; };
            std::stable_sort(pairs.begin(), pairs.end(), [&](const auto& a, const auto& b) { return part(a.first) < part(b.first); });
            for (std::int64_t at = 0; at < count; ++at) {
                keys_out[at] = pairs[at].first;
                values_out[at] = pairs[at].second;
            }
        });
    }
};

}  // namespace cub
