//! Replays, without a device, the planner's choices among compositions of joins that were all timed
//! on a device. A line of the record is one join: what the planner knew of the join, and the
//! seconds of each composition. `benches/README.md` says how to record anew.

use std::any::Any;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::sync::Weak;

use arrow::array::{ArrayRef, LargeBinaryArray, NullArray, RecordBatch};
use arrow::buffer::{Buffer, OffsetBuffer};
use flate2::read::MultiGzDecoder;
use serde::Deserialize;

use super::*;
use crate::device::{Capabilities, ColumnRows, Tuning};
use crate::memory::Interrupt;
use crate::planner::plan::propose_estimated;

/// A choice this much slower than the best is good enough.
const TOLERANCE: f64 = 1.1;

#[derive(Deserialize)]
struct Line {
    device: String,
    planned: Recorded,
}

#[derive(Deserialize)]
struct Recorded {
    on: Vec<(String, String)>,
    columns: Vec<String>,
    shares: bool,
    left: RecordedTable,
    right: RecordedTable,
    estimates: Estimates,
    target: RecordedTarget,
    /// Each composition, with its seconds.
    ways: Vec<(String, f64)>,
}

#[derive(Deserialize)]
struct RecordedTable {
    rows: u64,
    bytes: u64,
    batches: usize,
    columns: Vec<RecordedColumn>,
}

#[derive(Deserialize)]
struct RecordedColumn {
    name: String,
    #[serde(rename = "type")]
    data_type: String,
    nullable: bool,
    nulls: u64,
    min: Option<i64>,
    max: Option<i64>,
    distinct: Option<f64>,
    ascending: bool,
    unique_ascending: bool,
    heaviest_share: f64,
    max_value_bytes: Option<u64>,
    /// Bytes of all values, for text.
    value_bytes: Option<u64>,
    /// Rows that the device had cached.
    kept: Vec<(u64, u64)>,
}

#[derive(Deserialize)]
struct RecordedTarget {
    memory_bytes: u64,
    parallelism: usize,
    morsel_rows: usize,
    partition_rows: usize,
    pass_bits_max: u32,
    streams: usize,
    #[serde(alias = "wave_rows")]
    probe_batch_rows: usize,
    row_scratch_bytes: Option<usize>,
    #[serde(alias = "works_on_text")]
    supports_text: bool,
    rates: Rates,
}

impl RecordedColumn {
    fn statistics(&self) -> ColumnStatistics {
        ColumnStatistics {
            nulls: self.nulls,
            min: self.min.map(|min| Value::Integer(min.into())),
            max: self.max.map(|max| Value::Integer(max.into())),
            distinct: self.distinct,
            ascending: self.ascending,
            unique_ascending: self.unique_ascending,
            heaviest_share: self.heaviest_share,
            heavy: Vec::new(),
            max_value_bytes: self.max_value_bytes,
        }
    }

    /// Returns one value with the bytes of all values, in memory that is never touched. The planner
    /// reads no numbers.
    fn array(&self) -> ArrayRef {
        let Some(bytes) = self.value_bytes else { return Arc::new(NullArray::new(1)) };
        let values = Buffer::from_vec(vec![0u8; bytes as usize]);
        Arc::new(LargeBinaryArray::new(OffsetBuffer::from_lengths([bytes as usize]), values, None))
    }
}

impl RecordedTable {
    /// Returns a table without rows that looks to the planner like the recorded one.
    fn restore(&self, name: &str) -> Table {
        let fields = self
            .columns
            .iter()
            .map(|column| Field::new(&column.name, column.data_type.parse::<DataType>().unwrap(), column.nullable));
        let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        let first = RecordBatch::try_from_iter(self.columns.iter().map(|column| (&column.name, column.array())));
        let first = first.unwrap();
        let others = std::iter::repeat_n(first.slice(0, 0), self.batches.saturating_sub(1));
        let mut table = Table::from_batches(name, schema, Vec::new()).unwrap();
        table.batches = std::iter::once(first.clone()).chain(others).collect();
        (table.rows, table.bytes) = (self.rows, self.bytes);
        table.statistics = self.columns.iter().map(RecordedColumn::statistics).collect();
        table
    }

    fn kept(&self, table: &Arc<Table>) -> Vec<ColumnRows> {
        let table: Weak<Table> = Arc::downgrade(table);
        let of_column = |(column, of): (usize, &RecordedColumn)| -> Vec<ColumnRows> {
            let rows = |&(start, end): &(u64, u64)| ColumnRows {
                table: table.clone() as Weak<dyn Any + Send + Sync>,
                column,
                rows: start..end,
            };
            of.kept.iter().map(rows).collect()
        };
        self.columns.iter().enumerate().flat_map(of_column).collect()
    }
}

impl Recorded {
    fn are_columns_kept(&self) -> bool {
        [&self.left, &self.right].into_iter().flat_map(|table| &table.columns).any(|column| !column.kept.is_empty())
    }

    fn choice(&self) -> Plan {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 40)));
        let keys = self.on.iter().map(|(left, right)| KeyPair::new(left, right)).collect();
        let spec = JoinSpec { columns: self.columns.clone(), ..JoinSpec::inner("left", "right", keys) };
        catalog.create(self.left.restore("left")).unwrap();
        catalog.create(self.right.restore("right")).unwrap();
        let mut join = bind(&spec, &catalog).unwrap();
        join.result_is_stored = !self.shares;
        let kept = [self.left.kept(&join.left), self.right.kept(&join.right)].concat();
        let target = self.target.restore(kept);
        let (plan, refusal) =
            propose_estimated(join, self.estimates.clone(), &PlanOverrides::default(), &target, &Interrupt::default())
                .unwrap();
        assert!(refusal.is_none(), "{refusal:?}");
        plan
    }

    /// Seconds of a composition. If it was not timed, the slowest of those that differ only in the
    /// number of partitions or in the moved columns.
    fn seconds(&self, composition: &str) -> Option<f64> {
        let strategy_side_flags = |composition: &str| {
            let words = composition.splitn(3, ' ').take(2).collect::<Vec<_>>().join(" ");
            let flags = composition.rsplit_once('[').map(|(_, flags)| flags.to_owned());
            (words, flags)
        };
        let exact = self.ways.iter().find(|(way, _)| way == composition).map(|(_, seconds)| *seconds);
        let wanted = strategy_side_flags(composition);
        let near = self.ways.iter().filter(|(way, _)| strategy_side_flags(way) == wanted);
        exact.or_else(|| near.map(|(_, seconds)| *seconds).max_by(f64::total_cmp))
    }

    /// Seconds of the planner's choice over those of the best composition.
    fn times_best(&self) -> f64 {
        let best = self.ways.iter().map(|(_, seconds)| *seconds).fold(f64::INFINITY, f64::min);
        self.seconds(&self.choice().composition.to_string()).map_or(f64::INFINITY, |seconds| seconds / best)
    }
}

impl RecordedTarget {
    fn restore(&self, kept: Vec<ColumnRows>) -> Target {
        let Self { memory_bytes, parallelism, morsel_rows, partition_rows, pass_bits_max, .. } = *self;
        let Self { streams, probe_batch_rows, row_scratch_bytes, supports_text, .. } = *self;
        Target {
            name: "recorded".into(),
            ranks: 1,
            helping_hosts: 0,
            memory_bytes,
            memory_setting: "--device-memory".into(),
            parallelism,
            tuning: Tuning {
                streams,
                morsel_rows,
                probe_batch_rows,
                row_scratch_bytes,
                partition_rows,
                pass_bits_max,
                ..Target::default().tuning
            },
            capabilities: Capabilities { strings: supports_text, exchanges: false, forms_gangs: false },
            gang: GangRates::assumed(&self.rates),
            rates: self.rates.clone(),
            kept,
        }
    }
}

/// For each device, with and without cached columns: seconds of the choices over those of the best.
fn replay() -> BTreeMap<(String, bool), Vec<f64>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/results/planned.jsonl.gz");
    let lines = BufReader::new(MultiGzDecoder::new(File::open(path).unwrap())).lines();
    let mut groups: BTreeMap<(String, bool), Vec<f64>> = BTreeMap::new();
    for line in lines {
        let Line { device, planned } = serde_json::from_str(&line.unwrap()).unwrap();
        groups.entry((device, planned.are_columns_kept())).or_default().push(planned.times_best());
    }
    groups
}

/// Minimum share of good choices, on a GPU and on two threads of a CPU. With two threads, times of
/// one composition differ by a tenth from run to run.
const GOOD_MIN: [(&str, f64); 2] = [("NVIDIA", 0.89), ("2 threads", 0.74)];

#[test]
fn recorded_choices_are_good() {
    let groups = replay();
    assert_eq!(groups.len(), 3, "a GPU with and without cached columns, and a CPU");
    for ((device, kept), times) in groups {
        let good = times.iter().filter(|&&times| times <= TOLERANCE).count();
        let share = good as f64 / times.len() as f64;
        println!("{device}, cached {kept}: {good} of {} choices are good ({:.1} %)", times.len(), 100.0 * share);
        let (_, least) = GOOD_MIN.iter().find(|(name, _)| device.starts_with(name)).expect("a minimum is known");
        assert!(times.len() >= 250 && share >= *least, "{device}, cached {kept}: {share}");
    }
}
