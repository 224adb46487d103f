//! Keys as numbers, and their bijective mixing.
//!
//! Mixing is a bijection on keys of each width. Equal mixed keys therefore mean equal keys, and
//! dense, sparse and patterned keys spread alike. Partitions take bits from the top of the mixed
//! key, tables from the bottom. Rows of one partition therefore still spread over a table.

use std::fmt::Debug;

use super::partition::Cell;
use super::raw::{RunSlot4, Slot4, Slot8, Slot16};
use super::slots::Slot;

/// A packed key of 4, 8 or 16 bytes.
pub(super) trait Key: Cell + Ord + Default + Debug + std::hash::Hash {
    /// Bits per key.
    const BITS: u32;

    /// A table slot for distinct keys.
    type Unique: Slot<Self>;

    /// A table slot for keys that repeat.
    type Run: Slot<Self>;

    /// Maps keys to keys bijectively. Every bit of the result depends on every bit of the key.
    fn mix(self) -> Self;

    /// Returns the lowest bits that fit an index.
    fn low(self) -> usize;

    /// Returns the bits from `shift` upwards that fit an index. `shift` is less than
    /// [`Self::BITS`].
    fn bits_from(self, shift: u32) -> usize;

    /// Returns the lowest bits of `value`.
    fn truncate(value: u128) -> Self;

    /// Returns the lowest bits of `value`, quicker than [`Self::truncate`].
    fn truncate_64(value: u64) -> Self;

    /// Shifts left by `shift` bits, less than [`Self::BITS`].
    fn shifted(self, shift: u32) -> Self;

    /// Returns the difference, wrapping.
    fn wrapping_sub(self, other: Self) -> Self;

    /// Bitwise or.
    fn or(self, other: Self) -> Self;

    /// Bitwise and.
    fn and(self, other: Self) -> Self;

    /// Bitwise exclusive or.
    fn xor(self, other: Self) -> Self;

    /// Number of zeros above the highest set bit.
    fn leading_zeros(self) -> u32;

    /// Number of zeros below the lowest set bit.
    fn trailing_zeros(self) -> u32;
}

macro_rules! key_arithmetic {
    ($name:ty) => {
        const BITS: u32 = <$name>::BITS;

        #[inline(always)]
        fn low(self) -> usize {
            self as usize
        }

        #[inline(always)]
        fn bits_from(self, shift: u32) -> usize {
            (self >> shift) as usize
        }

        #[inline(always)]
        fn truncate(value: u128) -> Self {
            value as Self
        }

        #[inline(always)]
        fn truncate_64(value: u64) -> Self {
            value as Self
        }

        #[inline(always)]
        fn shifted(self, shift: u32) -> Self {
            self << shift
        }

        #[inline(always)]
        fn or(self, other: Self) -> Self {
            self | other
        }

        #[inline(always)]
        fn and(self, other: Self) -> Self {
            self & other
        }

        #[inline(always)]
        fn wrapping_sub(self, other: Self) -> Self {
            <$name>::wrapping_sub(self, other)
        }

        #[inline(always)]
        fn xor(self, other: Self) -> Self {
            self ^ other
        }

        #[inline(always)]
        fn leading_zeros(self) -> u32 {
            <$name>::leading_zeros(self)
        }

        #[inline(always)]
        fn trailing_zeros(self) -> u32 {
            <$name>::trailing_zeros(self)
        }
    };
}

impl Key for u32 {
    type Unique = Slot4;
    type Run = RunSlot4;
    key_arithmetic!(u32);

    /// The finaliser of MurmurHash3 (32 bits, Austin Appleby, public domain).
    #[inline(always)]
    fn mix(self) -> Self {
        let mut h = self;
        h ^= h >> 16;
        h = h.wrapping_mul(0x85eb_ca6b);
        h ^= h >> 13;
        h = h.wrapping_mul(0xc2b2_ae35);
        h ^ (h >> 16)
    }
}

impl Key for u64 {
    type Unique = Slot8;
    type Run = Slot8;
    key_arithmetic!(u64);

    /// The finaliser of MurmurHash3 (64 bits, Austin Appleby, public domain).
    #[inline(always)]
    fn mix(self) -> Self {
        let mut h = self;
        h ^= h >> 33;
        h = h.wrapping_mul(0xff51_afd7_ed55_8ccd);
        h ^= h >> 33;
        h = h.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        h ^ (h >> 33)
    }
}

impl Key for u128 {
    type Unique = Slot16;
    type Run = Slot16;
    key_arithmetic!(u128);

    /// Three rounds of a Feistel network over the two halves, with the 64-bit mix as its round
    /// function. A Feistel network is a bijection with any round function.
    #[inline(always)]
    fn mix(self) -> Self {
        let (mut high, mut low) = ((self >> 64) as u64, self as u64);
        // Constants (binary digits of pi) keep zero halves from meeting the mix's fixed point at
        // zero.
        high ^= (low ^ 0x243f_6a88_85a3_08d3).mix();
        low ^= (high ^ 0x1319_8a2e_0370_7344).mix();
        high ^= (low ^ 0xa409_3822_299f_31d0).mix();
        (u128::from(high) << 64) | u128::from(low)
    }
}

/// Runs an expression with `$key` as the integer type of a [`KeyWidth`](crate::device::KeyWidth).
macro_rules! with_key {
    ($width:expr, $key:ident => $body:expr) => {
        match $width {
            $crate::device::KeyWidth::W4 => {
                type $key = u32;
                $body
            }
            $crate::device::KeyWidth::W8 => {
                type $key = u64;
                $body
            }
            $crate::device::KeyWidth::W16 => {
                type $key = u128;
                $body
            }
        }
    };
}

/// Runs an expression with `$cell` as the byte array of a [`Width`](crate::device::Width).
macro_rules! with_cell {
    ($width:expr, $cell:ident => $body:expr) => {
        match $width {
            $crate::device::Width::W1 => {
                type $cell = [u8; 1];
                $body
            }
            $crate::device::Width::W2 => {
                type $cell = [u8; 2];
                $body
            }
            $crate::device::Width::W4 => {
                type $cell = [u8; 4];
                $body
            }
            $crate::device::Width::W8 => {
                type $cell = [u8; 8];
                $body
            }
            $crate::device::Width::W16 => {
                type $cell = [u8; 16];
                $body
            }
            $crate::device::Width::W32 => {
                type $cell = [u8; 32];
                $body
            }
        }
    };
}

pub(super) use {with_cell, with_key};

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Pearson's statistic of how evenly `count` buckets are filled, divided by its expectation:
    /// near 1 for random numbers.
    fn unevenness(buckets: impl Iterator<Item = usize>, count: usize) -> f64 {
        let mut filled = vec![0u32; count];
        let mut total = 0.0;
        for bucket in buckets {
            filled[bucket] += 1;
            total += 1.0;
        }
        let mean = total / count as f64;
        filled.iter().map(|&n| (f64::from(n) - mean).powi(2) / mean).sum::<f64>() / count as f64
    }

    fn spreads<K: Key>(pattern: &str, keys: impl Iterator<Item = u128> + Clone) {
        for (end, shift) in [("top", K::BITS - 10), ("bottom", 0)] {
            let buckets = keys.clone().map(|key| K::truncate(key).mix().bits_from(shift) & 1023);
            let found = unevenness(buckets, 1024);
            assert!(found < 1.5, "{pattern} keys of {} bits at the {end}: {found}", K::BITS);
        }
    }

    #[test]
    fn patterned_keys_spread_over_the_top_and_the_bottom_bits() {
        spreads::<u32>("dense", 0..1 << 16);
        spreads::<u32>("multiples of 2^16", (0..1 << 16).map(|i| i << 16));
        for pattern_shift in [0, 16, 32, 48] {
            spreads::<u64>("shifted", (0..1 << 16).map(|i| i << pattern_shift));
        }
        for pattern_shift in [0, 16, 48, 64, 100, 112] {
            spreads::<u128>("shifted", (0..1 << 16).map(|i| i << pattern_shift));
        }
        spreads::<u128>("equal halves", (0..1 << 16).map(|i| (i << 64) | i));
    }

    #[test]
    fn mixing_maps_different_keys_to_different_values() {
        let keys = || (0..100_000u128).map(|i| i.wrapping_mul(0x9e37_79b9) ^ (i << 90));
        let distinct = |mixed: Vec<u128>| mixed.into_iter().collect::<HashSet<_>>().len();
        assert_eq!(distinct(keys().map(Key::mix).collect()), 100_000);
        assert_eq!(distinct((0..100_000u64).map(|i| u128::from((i << 40).mix())).collect()), 100_000);
        assert_eq!(distinct((0..65536u32).map(|i| u128::from((i << 16).mix())).collect()), 65536);
    }
}
