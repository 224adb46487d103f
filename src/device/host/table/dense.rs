//! The perfect-hash table: an array of positions, for distinct keys that are dense.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::Run;
use super::super::buffer::{as_atomic_u32, values_of};
use super::super::hash::Key;
use super::super::slots::Tally;
use super::HostTable;
use crate::Result;
use crate::device::{Keys, NO_ROW, Table};

pub(in crate::device::host) fn build_dense<K: Key>(
    run: &Run<'_>,
    keys: &Keys,
    key_min: u128,
    key_max: u128,
) -> Result<Option<Table>> {
    assert!(key_min <= key_max || keys.rows == 0, "a range of keys from {key_min} to {key_max}");
    let span = key_max.saturating_sub(key_min).saturating_add(1);
    if key_max > u128::MAX >> (128 - K::BITS) || span < keys.rows as u128 {
        // No key reaches a `key_max` beyond its width, and a key repeats if the range has fewer
        // keys than there are rows. Both rule out such a table.
        return Ok(None);
    }
    let Ok(span) = usize::try_from(span) else { return Ok(None) };
    let key_min = K::truncate(key_min);
    let values = values_of::<K>(&keys.data, keys.rows);
    let mut positions = run.values::<u32>(span, "a table of dense keys")?;
    run.fill(&mut positions, |_, positions| positions.fill(NO_ROW))?;
    let sound = AtomicBool::new(true);
    {
        // First all rows are written. Then each row is checked to be still stored. This is quicker
        // than atomic exchanges.
        let positions = as_atomic_u32(&mut positions);
        let slot = |key: K| positions.get(dense_index(key, key_min));
        run.map(0..keys.rows, |range| {
            for (row, &key) in range.clone().zip(&values[range]) {
                match slot(key) {
                    Some(position) => position.store(row as u32, Ordering::Relaxed),
                    None => sound.store(false, Ordering::Relaxed),
                }
            }
        })?;
        if sound.load(Ordering::Relaxed) {
            run.map(0..keys.rows, |range| {
                let kept = |(row, &key)| slot(key).is_some_and(|kept| kept.load(Ordering::Relaxed) == row as u32);
                if !range.clone().zip(&values[range]).all(kept) {
                    sound.store(false, Ordering::Relaxed);
                }
            })?;
        }
    }
    let table = HostTable::Dense { positions, key_min };
    Ok(sound.into_inner().then(|| Table { state: Arc::new(table), order: None, rows: keys.rows }))
}

/// Returns the index of a key in a dense table, beyond its end for a key outside the table's range.
#[inline(always)]
fn dense_index<K: Key>(key: K, key_min: K) -> usize {
    let offset = key.wrapping_sub(key_min);
    // A difference that does not fit is far beyond the end of every table.
    if size_of::<K>() > size_of::<usize>() && offset.bits_from(K::BITS / 2) != 0 { usize::MAX } else { offset.low() }
}

pub(super) fn probe_dense<K: Key>(positions: &[u32], key_min: K, keys: &[K], first: &mut [u32]) -> Tally {
    let mut matched = 0;
    for (first, &key) in first.iter_mut().zip(keys) {
        *first = positions.get(dense_index(key, key_min)).copied().unwrap_or(NO_ROW);
        matched += usize::from(*first != NO_ROW);
    }
    Tally { matched_rows: matched, total: matched as u64, longest: u32::from(matched > 0) }
}
