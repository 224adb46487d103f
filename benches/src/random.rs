//! Pseudo-random numbers that depend on the seed and the index only, not on the order of requests.

/// A bijection of 0..n: rounds of xor-shift and odd multiplication on the next power of two.
///
/// The rounds repeat until the value is below n ("cycle walking": Black and Rogaway, Ciphers with
/// Arbitrary Finite Domains, CT-RSA 2002, section 3).
pub struct Permutation {
    count: u64,
    mask: u64,
    shift: u32,
    seed: u64,
}

impl Permutation {
    /// Makes a permutation of `count` numbers, which depends on the seed.
    pub fn new(count: u64, seed: u64) -> Self {
        let bits = 64 - count.saturating_sub(1).leading_zeros();
        Self { count, mask: if bits == 64 { u64::MAX } else { (1 << bits) - 1 }, shift: bits.div_ceil(2).max(1), seed }
    }

    /// Returns the image of `index`.
    pub fn at(&self, index: u64) -> u64 {
        let mut value = index;
        loop {
            for round in 0..3 {
                let odd = hash(self.seed ^ round) | 1;
                value = (value ^ (value >> self.shift)).wrapping_mul(odd).wrapping_add(odd >> 7) & self.mask;
            }
            value ^= value >> self.shift;
            if value < self.count {
                return value;
            }
        }
    }
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64 bits.
pub fn hash(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The finalizer of MurmurHash3: a bijection of 32 bits.
pub fn mix32(value: u32) -> u32 {
    let mut z = value;
    z = (z ^ (z >> 16)).wrapping_mul(0x85eb_ca6b);
    z = (z ^ (z >> 13)).wrapping_mul(0xc2b2_ae35);
    z ^ (z >> 16)
}

/// Maps random bits to a number below `count`, by multiplication.
pub fn below(bits: u64, count: u64) -> u64 {
    ((u128::from(bits) * u128::from(count)) >> 64) as u64
}

/// Maps random bits to a number in 0..1.
pub fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_are_bijective_at_and_around_powers_of_two() {
        for count in [1, 2, 3, 63, 64, 65, 1000, 4096, 4097] {
            let permutation = Permutation::new(count, 3);
            let mut seen = vec![false; count as usize];
            for index in 0..count {
                let value = permutation.at(index) as usize;
                assert!(!std::mem::replace(&mut seen[value], true), "{value} comes twice of {count}");
            }
        }
    }
}
