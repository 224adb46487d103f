//! Strategies by name. The page of [`crate::join`] describes each of them.

use std::fmt;
use std::str::FromStr;

use super::kind::unknown;
use crate::{Error, Result};

/// Name of a row layout, with or without payload that moves with the keys. [The module](super)
/// describes each strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// One hash table over the whole build side.
    Hash,
    /// Radix partitions with their payload columns, and a table per partition.
    RadixHash,
    /// Radix partitions of keys and row numbers. Payload stays in table order and is gathered.
    RadixHashGfur,
    /// Both sides sorted with their payload columns, and merged.
    SortMerge,
    /// Keys and row numbers sorted and merged. Payload stays in table order and is gathered.
    SortMergeGfur,
}

impl Strategy {
    /// All strategies, in the order of the documentation.
    pub const ALL: [Self; 5] = [Self::Hash, Self::RadixHash, Self::RadixHashGfur, Self::SortMerge, Self::SortMergeGfur];

    /// Returns the name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hash => "hash",
            Self::RadixHash => "radix-hash",
            Self::RadixHashGfur => "radix-hash-gfur",
            Self::SortMerge => "sort-merge",
            Self::SortMergeGfur => "sort-merge-gfur",
        }
    }

    /// True if payload columns move with the keys (gather from transformed relations). False if
    /// payload stays in table order and is gathered (gather from untransformed relations): Wu et
    /// al. 2024, section 4.
    pub fn moves_payload(self) -> bool {
        matches!(self, Self::RadixHash | Self::SortMerge)
    }

    /// True if both sides are partitioned.
    pub fn is_partitioned(self) -> bool {
        matches!(self, Self::RadixHash | Self::RadixHashGfur)
    }

    /// True if both sides are sorted.
    pub fn is_sorted(self) -> bool {
        matches!(self, Self::SortMerge | Self::SortMergeGfur)
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = Self::ALL;
        let found = all.into_iter().find(|strategy| strategy.name() == text);
        found.ok_or_else(|| {
            unknown(
                "strategy",
                text,
                &["auto", "hash", "radix-hash", "radix-hash-gfur", "sort-merge", "sort-merge-gfur"],
                &[("hash_join", "hash"), ("radix", "radix-hash"), ("merge", "sort-merge"), ("sort", "sort-merge")],
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategy_names_parse_back() {
        for strategy in Strategy::ALL {
            assert_eq!(strategy.name().parse::<Strategy>().unwrap(), strategy);
        }
        let refusal = "quantum".parse::<Strategy>().unwrap_err();
        assert!(refusal.message().contains("radix-hash-gfur") && !refusal.message().contains("mean"), "{refusal}");
        for (given, meant) in
            [("HASH", "hash"), ("Radix_Hash", "radix-hash"), ("AUTO", "auto"), ("merge", "sort-merge")]
        {
            let refusal = given.parse::<Strategy>().unwrap_err();
            assert!(refusal.message().ends_with(&format!("; did you mean {meant:?}?")), "{refusal}");
        }
    }
}
