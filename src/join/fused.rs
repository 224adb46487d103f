//! Inner joins whose partitions a device joins in one go: no list of matches is written, and the
//! moved columns come out side by side.
//!
//! ```text
//!   probe batch ─► join_partitions ─┬─ a count
//!                                   ├─ rows of both sides, in the order of the batches ─► batches
//!                                   ├─ more rows than the room ─► again, with room for them
//!                                   └─ too many for the device's memory, or partitions too skewed
//!                                      ─► match, expand, gather
//! ```
//!
//! The first probe batch takes room for as many pairs per probe row as statistics expect. Each
//! later probe batch takes room for as many as the previous one had. The first run of a probe batch
//! returns the number of pairs, whatever the room was. A guess that is too small costs a second run
//! and loses no row.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::column_gather::SideRows;
use super::inputs::SideInput;
use super::matching::BuildSide;
use super::materialize::Materializer;
use super::transform::{Order, TransformedSide, is_raw_key};
use super::{JoinKind, RowLayout, Task};
use crate::columns::KeyLayout;
use crate::device::{Device, Phase, Positions, Wanted};
use crate::{Error, Result};

/// Facts about the pairs of partitions that are joined in one go.
pub(super) struct Fused {
    /// True if a column of the result is made from the keys.
    keys: bool,
    /// Pairs per probe row of the last probe batch, or the expected number before the first probe
    /// batch.
    pairs_per_row: Mutex<f64>,
    /// True if the device gave up a probe batch. It would give up the next probe batches too,
    /// because the build side is the same.
    gave_up: AtomicBool,
}

/// Room beyond the guess, because probe batches differ.
const SLACK: f64 = 1.02;

/// Room beyond the expected pairs, because statistics err.
const EXPECTED_SLACK: f64 = 1.1;

/// Divisor of free memory: the pairs of a probe batch take at most this share of it.
const FREE_SHARE: u64 = 4;

impl Fused {
    /// Returns `None` if the join must know which rows have matches or which matches are real, or
    /// if the device is not faster this way.
    pub(super) fn of(
        task: &Task,
        build: &SideInput,
        probe: &SideInput,
        layout: &KeyLayout,
        device: &dyn Device,
    ) -> Option<Self> {
        let is_partitioned = matches!(task.composition.row_layout, RowLayout::Partitioned(_));
        let is_worth_it = device.tuning().fuses_partition_join && !task.expected.matches_first;
        if !is_worth_it || !is_partitioned || task.how != JoinKind::Inner || layout.is_hashed() {
            return None;
        }
        let is_key = |input: &SideInput| {
            input.output_columns.iter().any(|&column| is_raw_key(layout, input, column, task.composition.row_layout))
        };
        Some(Self {
            keys: is_key(build) || is_key(probe),
            // Even a small result gets room for one pair per probe row.
            pairs_per_row: Mutex::new((EXPECTED_SLACK * task.expected.pairs_per_row).max(1.0)),
            gave_up: AtomicBool::new(false),
        })
    }

    /// Joins a probe batch of partitions. Returns false if the probe batch has to be matched, and
    /// nothing of it was emitted.
    ///
    /// # Errors
    /// Errors of the device and the sink.
    pub(super) fn join_probe_batch(
        &self,
        materializer: &Materializer<'_>,
        built: &BuildSide,
        probe: &TransformedSide,
        probe_batch: Range<usize>,
        emitted: &mut dyn FnMut(f64),
    ) -> Result<bool> {
        let cx = materializer.cx;
        let (Order::Partitioned(build_side), Order::Partitioned(probe_side)) = (&built.transformed.order, &probe.order)
        else {
            return Ok(false);
        };
        if self.gave_up.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let rows = probe_side.bounds.rows_of(probe_batch.clone())?.len() as f64;
        let key_bytes = build_side.keys.width.bytes();
        let moved_columns = build_side.payload.iter().chain(&probe_side.payload);
        let row_bytes = moved_columns.map(|column| column.width.bytes()).sum::<usize>() + key_bytes;
        let join = |wanted| {
            let join = || cx.device.join_partitions(build_side, probe_side, probe_batch.clone(), wanted, cx.stream);
            match cx.monitor.phase(Phase::Join, (rows * (key_bytes + row_bytes) as f64) as u64, join) {
                // Matching a probe batch takes less memory.
                Err(Error::Exhausted(_)) => Ok(None),
                Ok(None) => {
                    self.gave_up.store(true, Ordering::Relaxed);
                    Ok(None)
                }
                outcome => outcome,
            }
        };
        if materializer.task.counts_rows {
            let Some(joined) = join(Wanted::Count)? else { return Ok(false) };
            materializer.count(joined.pairs as usize, &mut |_| ())?;
            emitted(rows);
            return Ok(true);
        }
        let room_max = (cx.device.memory().free_bytes() / FREE_SHARE / row_bytes as u64) as usize;
        let guess = (rows * *self.pairs_per_row.lock() * SLACK).ceil() as usize;
        let wanted = |room: usize| Wanted::Rows { room: room.min(room_max), keys: self.keys };
        let Some(mut joined) = join(wanted(guess))? else { return Ok(false) };
        if rows > 0.0 {
            *self.pairs_per_row.lock() = joined.pairs as f64 / rows;
        }
        if joined.rows.is_none() {
            if joined.pairs > room_max as u64 {
                return Ok(false);
            }
            let Some(again) = join(wanted(joined.pairs as usize))? else { return Ok(false) };
            joined = again;
        }
        let Some(columns) = joined.rows else { return Ok(false) };
        let pairs = joined.pairs as usize;
        let build = built.transformed.joined(columns.keys.clone(), columns.build, cx)?;
        let probe = probe.joined(columns.keys, columns.probe, cx)?;
        let all = || Positions::Range(0..pairs);
        let mut done = 0.0;
        materializer.emit(
            &SideRows::Transformed(&build, all()),
            &SideRows::Transformed(&probe, all()),
            pairs,
            &mut |pair| {
                let through = rows * pair as f64 / pairs as f64;
                emitted(through - done);
                done = through;
            },
        )?;
        emitted(rows - done);
        Ok(true)
    }
}
