//! The planner's view of the device that it plans for.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use super::{GangRates, Rates};
use crate::catalog::Table;
use crate::device::{Capabilities, ColumnRows, Device, DeviceId, DeviceInfo, Tuning};
use crate::memory::Budget;

/// A device, or a set of devices, as the planner sees it: sizes and rates of one. Devices of a set
/// are equal, except for host devices beside GPUs.
#[derive(Clone, Debug)]
pub struct Target {
    pub name: String,
    /// Devices that run a join together, each with these sizes and rates.
    pub ranks: usize,
    /// Host devices among the ranks of GPUs. They take the rows that GPUs have no time for, and
    /// predictions leave them out.
    pub helping_hosts: usize,
    pub memory_bytes: u64,
    /// Option by which the operator raises `memory_bytes`: `--device-memory`.
    pub memory_setting: String,
    /// Threads or multiprocessors: partitions that the device works on at once.
    pub parallelism: usize,
    pub tuning: Tuning,
    pub capabilities: Capabilities,
    pub rates: Rates,
    /// Rates of the devices together.
    pub gang: GangRates,
    /// Columns that each of the devices has cached in earlier joins, as of the time of planning.
    pub kept: Vec<ColumnRows>,
}

impl Target {
    /// Returns the view of a device with the given rates. Those of a gang are assumed.
    pub fn of(device: &dyn Device, rates: Rates) -> Self {
        Self::new(device.id(), &DeviceInfo::of(device), device.memory(), rates)
    }

    /// Returns the view of a device with the given description and rates.
    pub fn new(id: DeviceId, info: &DeviceInfo, memory: &Budget, rates: Rates) -> Self {
        Self {
            name: id.to_string(),
            ranks: 1,
            helping_hosts: 0,
            memory_bytes: memory.limit_bytes(),
            memory_setting: memory.setting().into(),
            parallelism: info.facts.parallelism,
            tuning: info.tuning,
            capabilities: info.capabilities,
            gang: GangRates::assumed(&rates),
            rates,
            kept: Vec::new(),
        }
    }

    /// Returns the equal parts that predictions divide a gang's rows into.
    pub(super) fn parts(&self) -> usize {
        self.ranks - self.helping_hosts
    }

    /// True if plans for both devices are equal, whatever their names, as long as neither has
    /// cached columns of the joined tables.
    pub fn same_sizes_and_rates(&self, other: &Self) -> bool {
        // Lists every field, so that the compiler finds a forgotten one.
        let Self {
            name: _,
            ranks,
            helping_hosts,
            memory_bytes,
            memory_setting,
            parallelism,
            tuning,
            capabilities,
            rates,
            gang,
            kept: _,
        } = self;
        *ranks == other.ranks
            && *helping_hosts == other.helping_hosts
            && *memory_bytes == other.memory_bytes
            && *memory_setting == other.memory_setting
            && *parallelism == other.parallelism
            && *tuning == other.tuning
            && *capabilities == other.capabilities
            && *rates == other.rates
            && *gang == other.gang
    }

    /// Returns the rows of a table that a device has cached in earlier joins.
    pub fn cached_rows(device: &dyn Device, table: &Arc<Table>) -> Vec<ColumnRows> {
        let table: Weak<Table> = Arc::downgrade(table);
        device.cache().map_or_else(Vec::new, |cache| cache.cached_rows(&(table as Weak<dyn Any + Send + Sync>)))
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
            ranks: 1,
            helping_hosts: 0,
            memory_bytes: u64::MAX,
            memory_setting: "the server's --device-memory".into(),
            parallelism: 1,
            tuning: Tuning {
                streams: 1,
                morsel_rows: 16 << 10,
                probe_batch_rows: 1 << 18,
                gather_bytes: 4 << 20,
                row_scratch_bytes: None,
                partition_rows: 16 << 10,
                pass_bits_max: 11,
                fuses_partition_join: false,
            },
            capabilities: Capabilities { strings: false, exchanges: true, forms_gangs: true },
            rates: Rates::host(1),
            gang: GangRates::assumed(&Rates::host(1)),
            kept: Vec::new(),
        }
    }
}
