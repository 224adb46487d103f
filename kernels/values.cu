// Keys of text. Short values become numbers, which are packed. Wider values get 128-bit hashes, and
// the values behind equal hashes are compared.
//
// Values of variable length are stored one after the other at known offsets. Each thread reads the
// bytes of one row in aligned words. The rows of a warp are adjacent, so after the first word the
// cache holds the warp's bytes.

#include "common.cuh"
#include "values.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 128;

// Rebases offsets: each batch's offsets count from its own first byte, the results count from the
// first byte of the first batch.
template <typename Offset>
__global__ void value_begins(const __grid_constant__ DovetailValueBegins args) {
    const u64 first = u64(blockIdx.x) * THREADS, row = first + threadIdx.x;
    if (row > args.rows) return;
    // Finds the last part that begins at or before the block's first row, then advances to the part
    // of the thread's row.
    u64 part = 0, beyond = args.parts;
    while (beyond - part > 1) {
        const u64 middle = part + (beyond - part) / 2;
        if (args.part_rows[middle] <= first) part = middle; else beyond = middle;
    }
    while (part + 1 < args.parts && args.part_rows[part + 1] <= row) ++part;
    // Each part has one more offset than rows.
    const u64 offset = u64(static_cast<const Offset*>(args.offsets)[row + part]);
    args.begins[row] = offset + args.part_bases[part];
}

// Reverses the bytes of a word: the first byte becomes the most significant.
__device__ inline u64 reversed(u64 word) {
    word = (word & 0x00ff00ff00ff00ffull) << 8 | (word >> 8 & 0x00ff00ff00ff00ffull);
    word = (word & 0x0000ffff0000ffffull) << 16 | (word >> 16 & 0x0000ffff0000ffffull);
    return word << 32 | word >> 32;
}

template <typename Number>
__global__ void short_values(const __grid_constant__ DovetailShortValues args) {
    const u64 row = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (row >= args.rows) return;
    const u64 begin = args.begins[row], length = args.begins[row + 1] - begin;
    Wide number{0, 0};
    if (length <= args.bytes_max) {
        number.high = length > 0 ? reversed(word_at(args.data, begin, 0, length)) : 0;
        number.low = length > 8 ? reversed(word_at(args.data, begin, 8, length)) : 0;
        // Moves the bytes from the top of 16 bytes to just above the length.
        number = shifted_down(number, 8 * (16 - args.bytes_max) - args.length_bits);
        number.low |= length;
    }
    narrow(number, static_cast<Number*>(args.numbers)[row]);
}

__device__ inline Wide image(const DovetailValueField& field, u64 row) {
    return image(field.data, field.width, field.encoding, Wide{0, 0}, row);
}

// Two 64-bit hashes. Each is a chain of multiplications by its own secret factor; the upper half of
// each product is XORed into the lower half. Collisions cannot be predicted without the factors.
struct Hash {
    u64 low, high, low_factor, high_factor;

    __device__ explicit Hash(u64 seed)
        : low(mix(seed ^ 0x452821e638d01377ull)),
          high(mix(seed ^ 0xbe5466cf34e90c6cull)),
          low_factor(mix(seed ^ 0xc0ac29b7c97c50ddull) | 1),
          high_factor(mix(seed ^ 0x3f84d5b5b5470917ull) | 1) {}

    __device__ static u64 folded(u64 value, u64 factor) { return value * factor ^ __umul64hi(value, factor); }

    // Adds a word to both hashes. The added rotation keeps a word that cancels the hash from
    // erasing all earlier words.
    __device__ void add(u64 word) {
        low = folded(low ^ word, low_factor) + (low << 31 | low >> 33);
        high = folded(high ^ word, high_factor) + (high << 29 | high >> 35);
    }

    __device__ Key16 done() const { return {mix(low), mix(high)}; }
};

__global__ void hash_keys(const __grid_constant__ DovetailHashKeys args) {
    const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= args.rows) return;
    const u64 row = args.kept ? args.kept[at] : at;
    // The mask of valid fields comes first, and each value of variable length follows its length.
    // Two different rows therefore never give the same sequence of words.
    u32 there = 0;
    for (u32 index = 0; index < args.field_count; ++index) there |= u32(is_valid(args.fields[index].validity, row)) << index;
    Hash hash(args.seed);
    hash.add(there);
    for (u32 index = 0; index < args.field_count; ++index) {
        const DovetailValueField& field = args.fields[index];
        if (!(there >> index & 1)) continue;
        if (field.begins) {
            const u64 begin = field.begins[row], length = field.begins[row + 1] - begin;
            hash.add(length);
            for (u64 byte = 0; byte < length; byte += 8) hash.add(word_at(field.data, begin, byte, length));
        } else {
            // Hashes the widened value, because the other side's column may have another width.
            const Wide value = image(field, row);
            hash.add(value.low);
            hash.add(value.high);
        }
    }
    Key16 key = hash.done();
    key.low &= args.mask_low;
    key.high &= args.mask_high;
    static_cast<Key16*>(args.keys)[at] = key;
}

__device__ inline bool differ(const DovetailValueField& a, u64 row_of_a, const DovetailValueField& b, u64 row_of_b) {
    const bool is_there = is_valid(a.validity, row_of_a);
    if (is_there != is_valid(b.validity, row_of_b)) return true;
    if (!is_there) return a.nulls_equal == 0;
    if (!a.begins) {
        const Wide of_a = image(a, row_of_a), of_b = image(b, row_of_b);
        return of_a.low != of_b.low || of_a.high != of_b.high;
    }
    const u64 begin_of_a = a.begins[row_of_a], begin_of_b = b.begins[row_of_b];
    const u64 length = a.begins[row_of_a + 1] - begin_of_a;
    if (b.begins[row_of_b + 1] - begin_of_b != length) return true;
    for (u64 byte = 0; byte < length; byte += 8) {
        if (word_at(a.data, begin_of_a, byte, length) != word_at(b.data, begin_of_b, byte, length)) return true;
    }
    return false;
}

__global__ void compare_values(const __grid_constant__ DovetailCompareValues args) {
    const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    bool differs = false;
    if (at < args.pairs) {
        const u32 a = args.a_rows ? args.a_rows[at] : args.a_start + u32(at);
        const u32 b = args.b_rows ? args.b_rows[at] : args.b_start + u32(at);
        const Key16* keys = static_cast<const Key16*>(args.keys);
        const bool is_meant = a != NO_ROW && b != NO_ROW && (!keys || keys[at] == keys[at + 1]);
        for (u32 index = 0; is_meant && !differs && index < args.field_count; ++index)
            differs = differ(args.a[index], a, args.b[index], b);
        if (args.flags) args.flags[at] = differs;
    }
    if (differs) atomicAdd(args.differing, 1u);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_value_begins(const DovetailValueBegins* args, DovetailStream stream) {
    const u32 blocks = blocks_for(args->rows + 1, THREADS);
    switch (args->offset_bytes) {
        case 4: value_begins<u32><<<blocks, THREADS, 0, cudaStream_t(stream)>>>(*args); break;
        case 8: value_begins<u64><<<blocks, THREADS, 0, cudaStream_t(stream)>>>(*args); break;
        default: return int(cudaErrorInvalidValue);
    }
    return launched();
}

int dovetail_short_values(const DovetailShortValues* args, DovetailStream stream) {
    return with_key(args->number_bytes, [&](auto number) {
        short_values<decltype(number)><<<blocks_for(args->rows, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}

int dovetail_hash_keys(const DovetailHashKeys* args, DovetailStream stream) {
    hash_keys<<<blocks_for(args->rows, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}

int dovetail_compare_values(const DovetailCompareValues* args, DovetailStream stream) {
    compare_values<<<blocks_for(args->pairs, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
    return launched();
}
