// Key columns to keys of one width: equal exactly when all fields are, in the order of the fields' values.

#include "common.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 256;

// 128 bits of a value or key, as two halves.
struct Wide {
    u64 low, high;
};

__device__ inline Wide minus(Wide a, Wide b) { return {a.low - b.low, a.high - b.high - (a.low < b.low)}; }

__device__ inline Wide shifted(Wide value, u32 by) {
    if (by == 0) return value;
    if (by >= 64) return {0, value.low << (by - 64)};
    return {value.low << by, value.high << by | value.low >> (64 - by)};
}

// The lowest `bits` bits.
__device__ inline Wide cut(Wide value, u32 bits) {
    if (bits >= 128) return value;
    if (bits >= 64) return {value.low, bits == 64 ? 0 : value.high & ((1ull << (bits - 64)) - 1)};
    return {bits == 0 ? 0 : value.low & (~0ull >> (64 - bits)), 0};
}

__device__ inline Wide load(const void* data, u64 row, u32 width) {
    switch (width) {
        case 1: return {static_cast<const u8*>(data)[row], 0};
        case 2: return {static_cast<const u16*>(data)[row], 0};
        case 4: return {static_cast<const u32*>(data)[row], 0};
        case 8: return {static_cast<const u64*>(data)[row], 0};
        default: {
            const Key16 value = static_cast<const Key16*>(data)[row];
            return {value.low, value.high};
        }
    }
}

__device__ inline Wide sign_extended(Wide value, u32 width) {
    if (width < 8) value.low = u64((long long)(value.low << (64 - 8 * width)) >> (64 - 8 * width));
    if (width < 16) value.high = u64((long long)value.low >> 63);
    return value;
}

// The image of a float that keeps order: negatives reversed, positives above them, -0 like 0, one NaN above all.
__device__ inline u64 float_image(u64 bits, u32 width) {
    const u32 exponent_bits = width == 2 ? 5 : width == 4 ? 8 : 11;
    const u32 mantissa_bits = width == 2 ? 10 : width == 4 ? 23 : 52;
    const u64 sign = 1ull << (exponent_bits + mantissa_bits);
    const u64 infinity = ((1ull << exponent_bits) - 1) << mantissa_bits;
    const u64 magnitude = bits & (sign - 1);
    if (magnitude > infinity) return sign | infinity | 1ull << (mantissa_bits - 1);
    if ((bits & sign) && magnitude != 0) return ~bits & (sign | (sign - 1));
    return sign | magnitude;
}

__device__ inline Wide image(const DovetailKeyField& field, u64 row) {
    Wide value = load(field.data, row, field.width);
    const Wide min{field.min_low, field.min_high};
    switch (field.encoding) {
        case DOVETAIL_SIGNED: return minus(sign_extended(value, field.width), min);
        case DOVETAIL_OFFSET: return minus(value, min);
        case DOVETAIL_FLOAT: return {float_image(value.low, field.width), 0};
        default: return value;
    }
}

__device__ inline Wide widened(u32 key) { return {key, 0}; }
__device__ inline Wide widened(u64 key) { return {key, 0}; }
__device__ inline Wide widened(Key16 key) { return {key.low, key.high}; }
__device__ inline void narrow(Wide value, u32& key) { key = u32(value.low); }
__device__ inline void narrow(Wide value, u64& key) { key = value.low; }
__device__ inline void narrow(Wide value, Key16& key) { key = {value.low, value.high}; }

template <typename Key>
__global__ void pack(DovetailPackKeys args) {
    const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= args.rows) return;
    const u64 row = args.kept ? args.kept[at] : at;
    Key* keys = static_cast<Key*>(args.keys);
    Wide key = args.accumulate ? widened(keys[at]) : Wide{0, 0};
    for (u32 index = 0; index < args.field_count; ++index) {
        const DovetailKeyField& field = args.fields[index];
        const bool valid = !field.validity || (field.validity[row / 8] >> (row % 8) & 1);
        Wide bits{0, 0};
        if (valid && field.bits > 0) bits = shifted(cut(image(field, row), field.bits), field.shift);
        if (!valid && field.null_bit >= 0) bits = shifted({1, 0}, u32(field.null_bit));
        key.low |= bits.low;
        key.high |= bits.high;
    }
    narrow(key, keys[at]);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_pack_keys(const DovetailPackKeys* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        pack<decltype(key)><<<blocks_for(args->rows, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}
