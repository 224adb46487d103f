//! The parts of a join that the fullest rank of a gang gets.

use super::inputs::Input;
use super::{Distribution, Estimates};

/// Parts of a join, from 0 to 1. Each is the largest that a rank can get, and not all are of the
/// same rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RankParts {
    /// An equal part. Ranks read equal parts of what they divide.
    pub(super) equal: f64,
    /// Rows of the build side that a rank indexes.
    pub(super) build: f64,
    /// Rows of the probe side that a rank joins.
    pub(super) probe: f64,
    /// Pairs of the result.
    pub(super) pairs: f64,
}

impl RankParts {
    /// Parts of a join on one device.
    pub(super) const ALONE: Self = Self { equal: 1.0, build: 1.0, probe: 1.0, pairs: 1.0 };

    /// Returns the parts for both whole sides of a join.
    pub(super) fn of(
        distribution: Distribution,
        ranks: usize,
        build: &Input,
        probe: &Input,
        estimates: &Estimates,
    ) -> Self {
        let equal = 1.0 / ranks as f64;
        match distribution {
            Distribution::Alone => Self::ALONE,
            Distribution::Broadcast => Self { equal, build: 1.0, probe: equal, pairs: equal },
            Distribution::Hash => {
                let share = |part: f64, whole: f64| if whole > 0.0 { (part / whole).min(1.0) } else { 0.0 };
                let of_build = share(build.heaviest_rows, build.keyed);
                let largest = |share: f64| largest_part(share, of_build, ranks);
                Self {
                    equal,
                    build: largest(of_build),
                    probe: largest(share(probe.heaviest_rows, probe.keyed)),
                    pairs: largest(share(estimates.heaviest_pairs, estimates.pairs)),
                }
            }
        }
    }
}

/// Returns the largest part of some rows that a rank can get if ranks divide keys by hash. `share`
/// is the share of these rows that have the most frequent key, and `of_build` that share of the
/// build side.
///
/// All rows of a key are on one rank. Ranks divide keys so that they own about equally many build
/// rows, as far as whole keys allow (`join/exchange/owners.rs`). So the rank with the heavy key may
/// own up to an equal part of the other keys. If a heavy key has much of the build side, the ranks
/// without it own more than an equal part of the other keys.
fn largest_part(share: f64, of_build: f64, ranks: usize) -> f64 {
    let equal = 1.0 / ranks as f64;
    let with_heavy = share + (1.0 - share) * equal;
    let without = (1.0 - share) * (equal / (1.0 - of_build)).min(1.0);
    with_heavy.max(without)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_keys_give_equal_parts() {
        for ranks in 2..=8 {
            assert_eq!(largest_part(0.0, 0.0, ranks), 1.0 / ranks as f64);
        }
    }

    #[test]
    fn the_owner_of_a_heavy_key_has_all_its_rows_and_a_part_of_the_others() {
        // Half of the build rows have one key. Four ranks may each own an eighth of the others.
        assert_eq!(largest_part(0.5, 0.5, 4), 5.0 / 8.0);
        assert_eq!(5.0 / 8.0 + 3.0 * (1.0 / 8.0), 1.0);
        assert_eq!(largest_part(1.0, 1.0, 4), 1.0);
        assert_eq!(largest_part(0.6, 0.0, 2), 0.8, "a heavy key of the probe side alone");
    }

    #[test]
    fn ranks_without_the_heavy_build_key_own_more_of_the_other_keys() {
        // One rank has the key with half of the build rows. Of the others, each may own a quarter
        // of the build rows: half of all other keys, and so half of an even probe side.
        assert_eq!(largest_part(0.0, 0.5, 4), 0.5);
        assert_eq!(largest_part(0.0, 0.9, 4), 1.0, "one rank owns all keys but the heavy one");
        assert_eq!(largest_part(0.25, 0.9, 4), 0.75, "a rank with another heavy key has less");
    }
}
