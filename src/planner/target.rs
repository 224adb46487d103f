//! The planner's view of the device that it plans for.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use super::Rates;
use crate::catalog::Table;
use crate::device::{ColumnRows, Device, DeviceId, DeviceInfo};
use crate::memory::Budget;

/// A device as the planner sees it: sizes and rates.
#[derive(Clone, Debug)]
pub struct Target {
    /// The device's name: `host:0`.
    pub name: String,
    /// Bytes of device memory that a join may use.
    pub memory_bytes: u64,
    /// Option by which the operator raises `memory_bytes`: `--device-memory`.
    pub memory_setting: String,
    /// Threads or multiprocessors: partitions that the device works on at once.
    pub parallelism: usize,
    /// [`DeviceInfo::morsel_rows`](crate::device::DeviceInfo::morsel_rows).
    pub morsel_rows: usize,
    /// Preferred build rows per partition.
    pub partition_rows: usize,
    /// Maximum bits that one partition pass resolves.
    pub pass_bits_max: u32,
    /// Streams of a join that the device works on at once.
    pub streams: usize,
    /// Probe rows per probe batch.
    pub probe_batch_rows: usize,
    /// [`DeviceInfo::row_scratch_bytes`](crate::device::DeviceInfo::row_scratch_bytes).
    pub row_scratch_bytes: Option<usize>,
    /// [`DeviceInfo::supports_text`](crate::device::DeviceInfo::supports_text).
    pub supports_text: bool,
    /// Rates of the device.
    pub rates: Rates,
    /// Columns that the device has cached in earlier joins, as of the time of planning.
    pub kept: Vec<ColumnRows>,
}

impl Target {
    /// Returns the view of a device with the given rates.
    pub fn of(device: &dyn Device, rates: Rates) -> Self {
        Self::new(device.id(), device.info(), device.memory(), rates)
    }

    /// Returns the view of a device with the given description and rates.
    pub fn new(id: DeviceId, info: &DeviceInfo, memory: &Budget, rates: Rates) -> Self {
        Self {
            name: id.to_string(),
            memory_bytes: memory.limit_bytes(),
            memory_setting: memory.setting().into(),
            parallelism: info.parallelism.max(1),
            morsel_rows: info.morsel_rows.max(1),
            partition_rows: info.partition_rows.max(1),
            pass_bits_max: info.pass_bits_max.max(1),
            streams: info.streams.max(1),
            probe_batch_rows: info.probe_batch_rows.max(1),
            row_scratch_bytes: info.row_scratch_bytes,
            supports_text: info.supports_text,
            rates,
            kept: Vec::new(),
        }
    }

    /// True if plans for both devices are equal, whatever their names, as long as neither has
    /// cached columns of the joined tables.
    pub fn same_sizes_and_rates(&self, other: &Self) -> bool {
        // Lists every field, so that the compiler finds a forgotten one.
        let Self {
            name: _,
            memory_bytes,
            memory_setting,
            parallelism,
            morsel_rows,
            partition_rows,
            pass_bits_max,
            streams,
            probe_batch_rows,
            row_scratch_bytes,
            supports_text,
            rates,
            kept: _,
        } = self;
        *memory_bytes == other.memory_bytes
            && *memory_setting == other.memory_setting
            && *parallelism == other.parallelism
            && *morsel_rows == other.morsel_rows
            && *partition_rows == other.partition_rows
            && *pass_bits_max == other.pass_bits_max
            && *streams == other.streams
            && *probe_batch_rows == other.probe_batch_rows
            && *row_scratch_bytes == other.row_scratch_bytes
            && *supports_text == other.supports_text
            && *rates == other.rates
    }

    /// Returns the rows of a table that a device has cached in earlier joins.
    pub fn cached_rows(device: &dyn Device, table: &Arc<Table>) -> Vec<ColumnRows> {
        let table: Weak<Table> = Arc::downgrade(table);
        device.cached_rows(&(table as Weak<dyn Any + Send + Sync>))
    }

    /// Returns the rows of a table that the device has cached, by column.
    pub(super) fn cached_rows_of(&self, table: &Arc<Table>) -> HashMap<usize, CachedRows> {
        let of_table = |kept: &&ColumnRows| std::ptr::addr_eq(kept.table.as_ptr(), Arc::as_ptr(table));
        let mut by_column: HashMap<usize, CachedRows> = HashMap::new();
        for kept in self.kept.iter().filter(of_table) {
            by_column.entry(kept.column).or_default().0.push(kept.rows.clone());
        }
        by_column.values_mut().for_each(|kept| kept.0.sort_unstable_by_key(|rows| rows.start));
        by_column
    }
}

/// The rows of a column that a device has cached, in order of their start.
#[derive(Debug, Default)]
pub(super) struct CachedRows(Vec<Range<u64>>);

impl CachedRows {
    /// Returns the share of the column's rows that need not be copied. A reader of all rows
    /// `at_once` uses cached rows only if none is missing.
    pub(super) fn share(&self, table_rows: u64, at_once: bool) -> f64 {
        // Chunks overlap if joins cut the table differently.
        let (rows, _) = self
            .0
            .iter()
            .fold((0, 0), |(sum, end), rows| (sum + rows.end.saturating_sub(rows.start.max(end)), end.max(rows.end)));
        if at_once && rows < table_rows { 0.0 } else { rows as f64 / table_rows.max(1) as f64 }
    }
}

/// A host device of one thread with unlimited memory and the default rates.
impl Default for Target {
    fn default() -> Self {
        Self {
            name: "host:0".into(),
            memory_bytes: u64::MAX,
            memory_setting: "the server's --device-memory".into(),
            parallelism: 1,
            morsel_rows: 16 << 10,
            partition_rows: 16 << 10,
            pass_bits_max: 11,
            streams: 1,
            probe_batch_rows: 1 << 18,
            row_scratch_bytes: None,
            supports_text: false,
            rates: Rates::host(1),
            kept: Vec::new(),
        }
    }
}
