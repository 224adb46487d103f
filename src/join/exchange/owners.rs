//! Owners: the rank that joins the rows of each bucket.

use std::ops::Range;

use crate::join::rank::BUCKETS;

/// Consecutive buckets of each rank. Ranks own ranges of buckets, so that all rows of a rank follow
/// each other once rows are partitioned by bucket.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Owners {
    /// First bucket of each rank and, at the end, the number of buckets.
    bounds: Vec<usize>,
}

impl Owners {
    /// Divides the buckets so that ranks get about equally many rows. `rows` has the rows of each
    /// bucket.
    pub(super) fn of(rows: &[u64], ranks: usize) -> Self {
        assert_eq!(rows.len(), BUCKETS, "each bucket has rows");
        // Buckets without any rows count as much as each other.
        let is_empty = rows.iter().all(|&rows| rows == 0);
        let weight = |bucket: usize| if is_empty { 1 } else { rows[bucket] };
        let total: u128 = (0..BUCKETS).map(|bucket| u128::from(weight(bucket))).sum();
        let mut bounds = vec![0];
        let (mut bucket, mut before) = (0, 0u128);
        for rank in 1..ranks as u128 {
            let wanted = total * rank / ranks as u128;
            // A bucket is taken if that comes nearer to the wanted rows.
            while bucket < BUCKETS && 2 * before + u128::from(weight(bucket)) <= 2 * wanted {
                before += u128::from(weight(bucket));
                bucket += 1;
            }
            bounds.push(bucket);
        }
        bounds.push(BUCKETS);
        Self { bounds }
    }

    /// Returns the rows of a rank among rows that are partitioned by bucket.
    pub(super) fn rows_of(&self, rank: usize, bucket_bounds: &[usize]) -> Range<usize> {
        bucket_bounds[self.bounds[rank]]..bucket_bounds[self.bounds[rank + 1]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(rows: &[u64], ranks: usize) -> Vec<u64> {
        let owners = Owners::of(rows, ranks);
        let mut bucket_bounds = vec![0];
        rows.iter().for_each(|&rows| bucket_bounds.push(bucket_bounds[bucket_bounds.len() - 1] + rows as usize));
        (0..ranks).map(|rank| owners.rows_of(rank, &bucket_bounds).len() as u64).collect()
    }

    #[test]
    fn even_buckets_give_even_shares() {
        for ranks in 1..=16 {
            let shares = shares(&[1000; BUCKETS], ranks);
            let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
            assert!(shares.iter().sum::<u64>() == 256_000 && most - least <= 1000, "{ranks}: {shares:?}");
        }
    }

    #[test]
    fn no_share_is_farther_from_the_mean_than_the_largest_bucket() {
        let mut rows = [0; BUCKETS];
        for (bucket, rows) in rows.iter_mut().enumerate() {
            *rows = (bucket as u64 * 7919) % 101;
        }
        rows[200] = 3000;
        let total: u64 = rows.iter().sum();
        for ranks in 1..=8 {
            for share in shares(&rows, ranks) {
                assert!(share.abs_diff(total / ranks as u64) <= 3001, "{ranks}: {share} of {total}");
            }
        }
    }

    #[test]
    fn a_heavy_bucket_bounds_the_rows_and_the_other_buckets_of_a_rank() {
        // `planner/rank_parts.rs` prices joins by these bounds.
        const EVEN: u64 = 1000;
        let cases = [0.1, 0.25, 0.5, 0.9].into_iter().flat_map(|heavy| (2..=8).map(move |ranks| (heavy, ranks)));
        for (heavy, ranks, place) in cases.flat_map(|(heavy, ranks)| (0..BUCKETS).map(move |at| (heavy, ranks, at))) {
            let others = (BUCKETS - 1) as f64 * EVEN as f64;
            let mut rows = [EVEN; BUCKETS];
            rows[place] = (heavy / (1.0 - heavy) * others) as u64;
            let (total, equal) = (rows.iter().sum::<u64>() as f64, 1.0 / ranks as f64);
            let bounds = Owners::of(&rows, ranks).bounds;
            for buckets in bounds.windows(2).map(|bounds| bounds[0]..bounds[1]) {
                let owned = rows[buckets.clone()].iter().sum::<u64>() as f64;
                let (most, bucket) = (heavy + (1.0 - heavy) * equal, EVEN as f64);
                assert!(owned <= most * total + bucket, "{heavy}, {ranks}, {place}: {owned} of {total}");
                let of_others = buckets.filter(|&bucket| bucket != place).count() as f64 * EVEN as f64;
                let most = (equal / (1.0 - heavy)).min(1.0);
                assert!(of_others <= most * others + bucket, "{heavy}, {ranks}, {place}: {of_others} of {others}");
            }
        }
    }

    #[test]
    fn without_rows_every_rank_owns_buckets() {
        assert_eq!(Owners::of(&[0; BUCKETS], 4).bounds, [0, 64, 128, 192, 256]);
    }
}
