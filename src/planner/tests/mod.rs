//! Tests of the planner's choices, with fixed rates, on tables that exist as statistics only.

mod choice;
mod cost;
mod divide;
mod estimates;
mod recorded;
mod wide;
mod wu_2024;

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};

use super::*;
use crate::Error;
use crate::catalog::{Catalog, ColumnStatistics, HeavyValue, Table, Value};
use crate::device::host::{EmulatedLink, HostDevice};
use crate::device::{Capabilities, Tuning};
use crate::memory::{Arena, Budget};

/// A table of `rows` rows whose first column is the key.
struct TableSpec {
    rows: u64,
    key: DataType,
    /// Smallest and largest key.
    range: (i128, i128),
    distinct: f64,
    ascending: bool,
    /// `None`: no skew.
    heaviest_share: Option<f64>,
    nulls: u64,
    payload: Vec<DataType>,
}

impl TableSpec {
    /// Distinct keys `0..rows` in no order, with `payload` columns of 4 bytes.
    fn primary(rows: u64, payload: usize) -> Self {
        Self {
            rows,
            key: DataType::Int32,
            range: (0, i128::from(rows) - 1),
            distinct: rows as f64,
            ascending: false,
            heaviest_share: None,
            nulls: 0,
            payload: vec![DataType::Int32; payload],
        }
    }

    fn build(&self, name: &str) -> Table {
        let mut fields = vec![Field::new("k", self.key.clone(), self.nulls > 0)];
        let payload = self.payload.iter().enumerate();
        fields.extend(payload.map(|(at, data_type)| Field::new(format!("{name}{at}"), data_type.clone(), false)));
        let key_statistics = ColumnStatistics {
            nulls: self.nulls,
            min: Some(Value::Integer(self.range.0)),
            max: Some(Value::Integer(self.range.1)),
            distinct: Some(self.distinct),
            ascending: self.ascending,
            heaviest_share: self.heaviest_share.unwrap_or(1.0 / self.distinct),
            heavy: self.heaviest_share.iter().map(|&share| HeavyValue { hash: 1, share, row: 0 }).collect(),
            ..ColumnStatistics::default()
        };
        let mut statistics = vec![ColumnStatistics::default(); fields.len()];
        statistics[0] = key_statistics;
        let row_bytes: usize = fields.iter().map(|field| field.data_type().primitive_width().unwrap_or(32)).sum();
        let mut table = Table::from_batches(name, Arc::new(Schema::new(fields)), Vec::new()).unwrap();
        table.rows = self.rows;
        table.bytes = self.rows * row_bytes as u64;
        table.statistics = statistics;
        table.sorted_by = Vec::new();
        table
    }
}

fn bound(left: &TableSpec, right: &TableSpec, how: JoinKind) -> BoundJoin {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
    catalog.create(left.build("r")).unwrap();
    catalog.create(right.build("s")).unwrap();
    let spec = JoinSpec { how, ..JoinSpec::inner("r", "s", vec![KeyPair::new("k", "k")]) };
    bind(&spec, &catalog).unwrap()
}

/// An A100 with tables in its own memory, from Wu et al. 2024. Table 4: a gather of 2^27 values of
/// 4 bytes takes 12.05 M cycles unclustered and 1.41 M clustered, at 1.41 GHz. Figure 7:
/// partitioning and gathering clustered is 1.79 times as fast as gathering unclustered, sorting
/// 1.23 times. Section 5.2.2: cuDF's hash join is 4 times slower than partitioned ones. Two passes
/// of 8 bits partition.
fn a100() -> Target {
    let rows = f64::from(1u32 << 27);
    let (clustered, unclustered) = (1.41e6 / 1.41e9, 12.05e6 / 1.41e9);
    let partition_seconds = unclustered / 1.79 - clustered;
    let sort_seconds = unclustered / 1.23 - clustered;
    let pair_bytes = 2.0 * 8.0 + 4.0;
    let rates = Rates {
        copy_in: 1e15,
        copy_out: 1e15,
        reads_host_memory: false,
        copies_overlap: true,
        stream: 1.4e12,
        partition: 2.0 * pair_bytes * rows / partition_seconds,
        sort_rows: [rows / sort_seconds, 0.35 * rows / sort_seconds, 0.17 * rows / sort_seconds],
        sort_carry: 2.0 * 4.0 * rows / sort_seconds,
        build_repeated_rows: [10e9; 3],
        probe_rows: 40e9,
        dense_rows: 40e9,
        join_rows: [0.0; 3],
        random_reads: rows / (unclustered - clustered),
        cache_bytes: 40 << 20,
        host_values: 1e9,
        call_seconds: 20e-6,
        partition_call_seconds: 60e-6,
        sort_call_seconds: [60e-6; 3],
        build_repeated_call_seconds: [200e-6; 3],
    };
    Target {
        ranks: 1,
        helping_hosts: 0,
        name: "cuda:0".into(),
        memory_bytes: 40 << 30,
        memory_setting: "--device-memory".into(),
        parallelism: 108,
        tuning: Tuning {
            // Tables and result are on the device in whole.
            streams: 1,
            morsel_rows: 1,
            probe_batch_rows: usize::MAX,
            partition_rows: 4096,
            pass_bits_max: 8,
            ..Target::default().tuning
        },
        capabilities: Capabilities { strings: false, exchanges: true, forms_gangs: true },
        gang: GangRates::assumed(&rates),
        rates,
        kept: Vec::new(),
    }
}

/// Returns the target with two passes for the partitions that 2^27 rows need.
fn two_pass(mut target: Target) -> Target {
    target.rates.partition /= 2.0;
    target
}

/// Keys of the whole 31-bit range, so that no perfect hashing applies.
fn sparse(rows: u64, payload: usize) -> TableSpec {
    TableSpec { range: (0, i128::from(i32::MAX)), ..TableSpec::primary(rows, payload) }
}

fn seconds_of(plan: &Plan, strategy: Strategy) -> f64 {
    if plan.strategy() == strategy {
        return plan.seconds;
    }
    plan.alternatives.iter().find(|other| other.strategy == strategy).expect("every strategy is priced").seconds
}
