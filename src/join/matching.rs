//! Matching: a build side that is ready to be probed, and the probe batches in which a probe chunk
//! is matched against it.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use arrow::buffer::Buffer;
use parking_lot::Mutex;

use super::context::JoinContext;
use super::transform::{Order, TransformedSide};
use crate::columns::KeyLayout;
use crate::device::{Device, Keys, Matches, PartitionMatches, Phase, Table};
use crate::{Error, Result};

/// Transformed and indexed build side.
#[derive(Debug)]
pub(super) struct BuildSide {
    /// Build positions of matches are transformed positions in these rows.
    pub(super) transformed: TransformedSide,
    /// Table of the `hash` strategy. The other strategies need only the layout.
    table: Option<Table>,
    /// Result of [`BuildSide::grouping_bytes`], which looks at every partition and is called twice
    /// for each probe chunk.
    grouping_bytes: OnceLock<u64>,
}

impl BuildSide {
    /// Indexes a transformed build side. `dense` has the smallest and the largest key, if the keys
    /// are worth an array of that extent. `repeats` is true if some key is expected to occur twice.
    /// `adjacent` is true if equal keys must be adjacent before the first probe batch, because
    /// marks or comparisons refer to positions that may not move later.
    pub(super) fn new(
        mut transformed: TransformedSide,
        dense: Option<(u128, u128)>,
        layout: &KeyLayout,
        repeats: bool,
        adjacent: bool,
        cx: &JoinContext<'_>,
    ) -> Result<Self> {
        let mut table = None;
        match &transformed.order {
            Order::Original(keys) => {
                let bytes = (keys.rows * (layout.width().bytes() + 4)) as u64;
                table = Some(cx.monitor.phase(Phase::BuildTable, 3 * bytes, || {
                    let built = build_table(keys, dense.filter(|_| layout.is_raw()), repeats, cx)?;
                    if let Some(order) = &built.order {
                        transformed.to_rows = Some(match &transformed.to_rows {
                            Some(rows) => cx.device.compose(rows, order, cx.stream)?,
                            None => order.clone(),
                        });
                    }
                    Ok(built)
                })?);
            }
            Order::Partitioned(_) if adjacent => transformed.group(cx)?,
            _ => {}
        }
        Ok(Self { transformed, table, grouping_bytes: OnceLock::new() })
    }

    /// True if building the table has shown that all keys are distinct.
    pub(super) fn has_distinct_keys(&self) -> bool {
        self.table.as_ref().is_some_and(|table| table.order.is_none())
    }

    /// Returns the device memory that grouping may still take, 0 if none is needed. Grouping takes
    /// a copy of the transformed rows. The partitions that are being grouped also take a position
    /// per row and a table of keys with at most four slots per row.
    pub(super) fn grouping_bytes(&self, device: &dyn Device) -> u64 {
        *self.grouping_bytes.get_or_init(|| self.find_grouping_bytes(device))
    }

    fn find_grouping_bytes(&self, device: &dyn Device) -> u64 {
        let Order::Partitioned(partitions) = &self.transformed.order else { return 0 };
        if partitions.is_grouped() {
            return 0;
        }
        let key_bytes = partitions.keys.width.bytes();
        let row_bytes: usize = key_bytes + partitions.payload.iter().map(|column| column.width.bytes()).sum::<usize>();
        let Some(bounds) = partitions.bounds.here() else {
            // A device with its own memory sorts all rows at once: keys and row numbers, their
            // sorted copies, and as much scratch memory.
            return (partitions.keys.rows * (row_bytes + 3 * (key_bytes + 4))) as u64;
        };
        let mut sizes: Vec<usize> = bounds.windows(2).map(|bounds| bounds[1] - bounds[0]).collect();
        sizes.sort_unstable_by_key(|&rows| Reverse(rows));
        let rows_at_once: usize = sizes.iter().take(device.facts().parallelism).sum();
        let slot_bytes = (key_bytes + 8).next_power_of_two();
        (partitions.keys.rows * row_bytes + rows_at_once * (4 + 4 * slot_bytes)) as u64
    }

    /// Returns the keys in the order of build positions.
    pub(super) fn run_keys(&self, cx: &JoinContext<'_>) -> Result<Keys> {
        let keys = self.transformed.transformed_keys();
        Ok(match self.table.as_ref().and_then(|table| table.order.as_ref()) {
            Some(order) => Keys { data: cx.device.gather(&keys.as_column(), order, cx.stream)?.data, ..keys.clone() },
            None => keys.clone(),
        })
    }

    /// Returns the keys in the order of build positions, in host memory.
    pub(super) fn run_keys_on_host(&self, cx: &JoinContext<'_>) -> Result<Buffer> {
        let keys = self.run_keys(cx)?;
        cx.device.copy_out(&keys.data, keys.rows * keys.width.bytes(), cx.arena, cx.stream)
    }

    /// True if equal keys of partitions are known to be adjacent.
    pub(super) fn is_grouped(&self) -> bool {
        matches!(&self.transformed.order, Order::Partitioned(partitions) if partitions.is_grouped())
    }

    /// Returns the build side with equal keys of partitions adjacent.
    pub(super) fn grouped(&self, cx: &JoinContext<'_>) -> Result<Self> {
        let mut transformed = self.transformed.clone();
        transformed.group(cx)?;
        Ok(Self { transformed, table: self.table.clone(), grouping_bytes: OnceLock::new() })
    }

    /// Matches one probe batch of a probe chunk. Returns `None` if build keys repeat, and must be
    /// [grouped](Self::grouped) first.
    pub(super) fn match_probe_batch(
        &self,
        probe: &TransformedSide,
        probe_batch: Range<usize>,
        cx: &JoinContext<'_>,
    ) -> Result<Option<Matches>> {
        let (device, stream) = (cx.device, cx.stream);
        let key_bytes = probe.transformed_keys().width.bytes();
        let probe_batch_bytes = |rows: usize| (rows * (2 * key_bytes + 8)) as u64;
        let matches = match (&self.transformed.order, &probe.order) {
            (Order::Original(_), Order::Original(keys)) => {
                let table = self.table.as_ref().expect("a build side in its original order has a table");
                cx.monitor.phase(Phase::Match, probe_batch_bytes(probe_batch.len()), || {
                    device.probe_table(table, keys, probe_batch, stream)
                })?
            }
            (Order::Sorted(build), Order::Sorted(sorted)) => {
                cx.monitor.phase(Phase::Match, probe_batch_bytes(probe_batch.len()), || {
                    device.match_sorted(&build.keys, &sorted.keys, probe_batch, stream)
                })?
            }
            (Order::Partitioned(build), Order::Partitioned(partitions)) => {
                let rows = partitions.bounds.rows_of(probe_batch.clone())?.len();
                let found = cx.monitor.phase(Phase::Match, probe_batch_bytes(rows), || {
                    device.match_partitions(build, partitions, probe_batch.clone(), stream)
                })?;
                match found {
                    PartitionMatches::Matched(matches) => matches,
                    PartitionMatches::RepeatedBuildKeys => return Ok(None),
                }
            }
            _ => unreachable!("both sides have the same row layout"),
        };
        Ok(Some(matches))
    }
}

/// Build side that several streams probe. Only grouping changes it: if keys are found to repeat
/// during probing, the first stream that finds out groups them. The other streams go on with the
/// build side that they have.
#[derive(Debug)]
pub(super) struct SharedBuild(Mutex<Arc<BuildSide>>);

impl SharedBuild {
    pub(super) fn new(built: BuildSide) -> Self {
        Self(Mutex::new(Arc::new(built)))
    }

    /// Returns the build side as it is now.
    pub(super) fn current(&self) -> Arc<BuildSide> {
        self.0.lock().clone()
    }

    /// Returns the build side with equal keys adjacent. Groups it, unless another stream has done
    /// so since `seen` was taken.
    pub(super) fn grouped(&self, seen: &Arc<BuildSide>, cx: &JoinContext<'_>) -> Result<Arc<BuildSide>> {
        // Earlier probe batches of this stream may still read the build side that is about to be
        // dropped.
        cx.device.synchronize(cx.stream)?;
        let mut current = self.0.lock();
        if !Arc::ptr_eq(&current, seen) {
            return Ok(current.clone());
        }
        if seen.is_grouped() {
            return Err(Error::Internal("grouped partitions were reported as not grouped".into()));
        }
        let grouped = Arc::new(seen.grouped(cx)?);
        // Other streams do not wait for this stream's work.
        cx.device.synchronize(cx.stream)?;
        *current = grouped.clone();
        Ok(grouped)
    }
}

/// Divides a probe chunk into probe batches: ranges of rows, or of partitions, of about
/// `probe_batch_rows` probe rows each. May wait for the bounds of partitions.
pub(super) fn probe_batches(probe: &TransformedSide, probe_batch_rows: usize) -> Result<Vec<Range<usize>>> {
    let Order::Partitioned(partitions) = &probe.order else {
        let rows = probe.len();
        return Ok((0..rows)
            .step_by(probe_batch_rows)
            .map(|start| start..rows.min(start + probe_batch_rows))
            .collect());
    };
    let count = partitions.bounds.partitions();
    if partitions.bounds.rows() <= probe_batch_rows {
        return Ok(std::iter::once(0..count).collect());
    }
    let bounds = partitions.bounds.get()?;
    let mut probe_batches = Vec::new();
    let mut start = 0;
    while start < count {
        let mut end = start + 1;
        while end < count && bounds[end + 1] - bounds[start] <= probe_batch_rows {
            end += 1;
        }
        probe_batches.push(start..end);
        start = end;
    }
    Ok(probe_batches)
}

/// Builds the dense table if the keys are as dense as expected, otherwise the general table.
fn build_table(keys: &Keys, dense: Option<(u128, u128)>, repeats: bool, cx: &JoinContext<'_>) -> Result<Table> {
    if let Some((min, max)) = dense
        && let Some(table) = cx.device.build_dense_table(keys, min, max, cx.stream)?
    {
        return Ok(table);
    }
    cx.device.build_table(keys, repeats, cx.stream)
}
