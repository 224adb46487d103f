// 128-bit numbers, images of fixed-width key values (equal exactly when the values are), and access
// to bytes of variable-length values.

#pragma once

#include "common.cuh"

namespace dovetail {

// 128 bits of a value or key.
struct Wide {
    u64 low, high;
};

__device__ inline Wide minus(Wide a, Wide b) { return {a.low - b.low, a.high - b.high - (a.low < b.low)}; }

__device__ inline Wide shifted(Wide value, u32 by) {
    if (by == 0) return value;
    if (by >= 64) return {0, value.low << (by - 64)};
    return {value.low << by, value.high << by | value.low >> (64 - by)};
}

__device__ inline Wide shifted_down(Wide value, u32 by) {
    if (by == 0) return value;
    if (by >= 128) return {0, 0};
    if (by >= 64) return {value.high >> (by - 64), 0};
    return {value.low >> by | value.high << (64 - by), value.high >> by};
}

// Returns the lowest `bits` bits.
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

// Returns an order-preserving image of a float: negatives reversed, positives above them, -0 equal
// to 0, and all NaNs equal and above all other values.
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

// Returns the image of a column's value. Equal images mean equal values.
__device__ inline Wide image(const void* data, u32 width, u32 encoding, Wide min, u64 row) {
    const Wide value = load(data, row, width);
    switch (encoding) {
        case DOVETAIL_SIGNED: return minus(sign_extended(value, width), min);
        case DOVETAIL_OFFSET: return minus(value, min);
        case DOVETAIL_FLOAT: return {float_image(value.low, width), 0};
        default: return value;
    }
}

// Narrows a number to a key of fewer bytes.
__device__ inline void narrow(Wide value, u32& key) { key = u32(value.low); }
__device__ inline void narrow(Wide value, u64& key) { key = value.low; }
__device__ inline void narrow(Wide value, Key16& key) { key = {value.low, value.high}; }

// Returns up to eight bytes of a value, starting `at` bytes into it, with zeros above them. It
// never reads a word that holds none of the value's bytes.
__device__ inline u64 word_at(const void* data, u64 begin, u64 at, u64 length) {
    const u64* words = static_cast<const u64*>(data);
    const u64 from = begin + at, count = length - at < 8 ? length - at : 8;
    const u32 skipped = 8 * u32(from % 8);
    u64 word = words[from / 8] >> skipped;
    if (from % 8 + count > 8) word |= words[from / 8 + 1] << (64 - skipped);
    return count < 8 ? word & ((1ull << 8 * count) - 1) : word;
}

}  // namespace dovetail
