//! What the planner knows of the device that it plans for.

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
    /// How the operator raises that: `--device-memory`.
    pub memory_knob: String,
    /// Threads or multiprocessors: so many partitions are worked on at once.
    pub parallelism: usize,
    /// [`DeviceInfo::morsel_rows`](crate::device::DeviceInfo::morsel_rows).
    pub morsel_rows: usize,
    /// Build rows that a partition should have.
    pub partition_rows: usize,
    /// The most bits that one partition pass resolves.
    pub pass_bits_max: u32,
    /// Streams of a join that are worked on at once.
    pub streams: usize,
    /// Probe rows of a wave.
    pub wave_rows: usize,
    /// [`DeviceInfo::row_scratch_bytes`](crate::device::DeviceInfo::row_scratch_bytes).
    pub row_scratch_bytes: Option<usize>,
    /// [`DeviceInfo::works_on_text`](crate::device::DeviceInfo::works_on_text).
    pub works_on_text: bool,
    /// What it does how fast.
    pub rates: Rates,
    /// Columns that are there already from earlier joins, as they were when the plan was made.
    pub kept: Vec<ColumnRows>,
}

impl Target {
    /// The view of a device with those rates.
    pub fn of(device: &dyn Device, rates: Rates) -> Self {
        Self::new(device.id(), device.info(), device.memory(), rates)
    }

    /// The view of a device that is made of that, with those rates.
    pub fn new(id: DeviceId, info: &DeviceInfo, memory: &Budget, rates: Rates) -> Self {
        Self {
            name: id.to_string(),
            memory_bytes: memory.limit_bytes(),
            memory_knob: memory.knob().into(),
            parallelism: info.parallelism.max(1),
            morsel_rows: info.morsel_rows.max(1),
            partition_rows: info.partition_rows.max(1),
            pass_bits_max: info.pass_bits_max.max(1),
            streams: info.streams.max(1),
            wave_rows: info.wave_rows.max(1),
            row_scratch_bytes: info.row_scratch_bytes,
            works_on_text: info.works_on_text,
            rates,
            kept: Vec::new(),
        }
    }

    /// What of a table a device has kept from earlier joins.
    pub fn kept_rows(device: &dyn Device, table: &Arc<Table>) -> Vec<ColumnRows> {
        let table: Weak<Table> = Arc::downgrade(table);
        device.kept_rows(&(table as Weak<dyn Any + Send + Sync>))
    }

    /// What the device has kept of a table's columns, by column.
    pub(super) fn kept_rows_of(&self, table: &Arc<Table>) -> HashMap<usize, KeptRows> {
        let of_table = |kept: &&ColumnRows| std::ptr::addr_eq(kept.table.as_ptr(), Arc::as_ptr(table));
        let mut by_column: HashMap<usize, KeptRows> = HashMap::new();
        for kept in self.kept.iter().filter(of_table) {
            by_column.entry(kept.column).or_default().0.push(kept.rows.clone());
        }
        by_column.values_mut().for_each(|kept| kept.0.sort_unstable_by_key(|rows| rows.start));
        by_column
    }
}

/// The rows of a column that a device has kept, by where they start.
#[derive(Debug, Default)]
pub(super) struct KeptRows(Vec<Range<u64>>);

impl KeptRows {
    /// The share of the column's rows that need not be copied. A reader of all of them `at_once` is given what is kept only if
    /// nothing is missing.
    pub(super) fn share(&self, table_rows: u64, at_once: bool) -> f64 {
        // Chunks of joins that cut the table otherwise overlap.
        let (rows, _) = self
            .0
            .iter()
            .fold((0, 0), |(sum, end), rows| (sum + rows.end.saturating_sub(rows.start.max(end)), end.max(rows.end)));
        if at_once && rows < table_rows { 0.0 } else { rows as f64 / table_rows.max(1) as f64 }
    }
}

/// A host device of one thread and of memory without bound, with the default rates.
impl Default for Target {
    fn default() -> Self {
        Self {
            name: "host:0".into(),
            memory_bytes: u64::MAX,
            memory_knob: "the server's --device-memory".into(),
            parallelism: 1,
            morsel_rows: 16 << 10,
            partition_rows: 16 << 10,
            pass_bits_max: 11,
            streams: 1,
            wave_rows: 1 << 18,
            row_scratch_bytes: None,
            works_on_text: false,
            rates: Rates::host(1),
            kept: Vec::new(),
        }
    }
}
