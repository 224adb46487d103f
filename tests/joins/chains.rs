//! Chains of joins that the same rows probe, compared with an independent naive join.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int32Array, RecordBatch, UInt32Array};
use arrow::compute::{concat_batches, take};
use arrow::datatypes::{Field, Schema};
use dovetail::Error;
use dovetail::columns::Role;
use dovetail::device::CancelFlag;
use dovetail::join::{Chain, IncomingBatches, Monitor, PreparedJoin, RowSource, TableRows, Task};
use dovetail::planner::{self, JoinKind, JoinSpec, KeyPair, Side, Strategy};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::data::{KeyKind, TableData};
use crate::{Bench, Collect, naive, seed};

/// Kinds of join that keep, drop or repeat rows of the right side alone.
const KINDS: [JoinKind; 4] = [JoinKind::Inner, JoinKind::Right, JoinKind::RightSemi, JoinKind::RightAnti];

/// Columns of a table besides its keys, one for each way of gathering, and a key.
const PAYLOAD: [&str; 6] = ["row", "nullable", "bits", "strings", "lists", "k0"];

/// Table that the facts are joined with, and the place of its keys among those of the facts.
struct Dimension {
    how: JoinKind,
    data: TableData,
    keys: Range<usize>,
}

/// Facts with the keys of all dimensions.
struct Star {
    kinds: Vec<KeyKind>,
    facts: TableData,
    dimensions: Vec<Dimension>,
}

fn whole(data: &TableData) -> RecordBatch {
    concat_batches(&data.batches[0].schema(), &data.batches).unwrap()
}

impl Star {
    fn random(rng: &mut StdRng) -> Self {
        let fact_rows = *[0, 1, 65, 300].choose(rng).unwrap();
        let (mut kinds, mut dimensions) = (Vec::new(), Vec::new());
        for _ in 0..rng.random_range(1..=4) {
            let own: Vec<KeyKind> = (0..rng.random_range(1..=2)).map(|_| *KeyKind::ALL.choose(rng).unwrap()).collect();
            // Few rows for each key, because each dimension multiplies the rows of the result.
            let (rows, distinct) = *[(0, 10), (20, 10), (60, 60), (200, 400), (500, 300)].choose(rng).unwrap();
            let keys = kinds.len()..kinds.len() + own.len();
            let data = TableData::random(rng, &own, rows, distinct);
            dimensions.push(Dimension { how: *KINDS.choose(rng).unwrap(), data, keys });
            kinds.extend(own);
        }
        let distinct = *[20, 100, 400].choose(rng).unwrap();
        Self { facts: TableData::random(rng, &kinds, fact_rows, distinct), kinds, dimensions }
    }

    /// Returns the rows of all joins: facts, then each dimension that gives columns.
    fn naive(&self) -> RecordBatch {
        let mut rows: Vec<(u32, Vec<Option<u32>>)> =
            (0..self.facts.keys.len() as u32).map(|fact| (fact, Vec::new())).collect();
        for dimension in &self.dimensions {
            let kinds = &self.kinds[dimension.keys.clone()];
            // Numbers that agree modulo two are the same boolean.
            let is_equal = |(at, (one, other)): (usize, (&Option<u32>, &Option<u32>))| match (one, other) {
                (Some(one), Some(other)) if kinds[at] == KeyKind::Boolean => one % 2 == other % 2,
                (Some(one), Some(other)) => one == other,
                _ => false,
            };
            let mut kept = Vec::new();
            for (fact, builds) in rows {
                let key = &self.facts.keys[fact as usize][dimension.keys.clone()];
                let matches: Vec<u32> = (0..dimension.data.keys.len() as u32)
                    .filter(|&row| key.iter().zip(&dimension.data.keys[row as usize]).enumerate().all(is_equal))
                    .collect();
                let with = |build: Option<u32>| (fact, [&builds[..], &[build]].concat());
                match dimension.how {
                    JoinKind::RightSemi if !matches.is_empty() => kept.push(with(None)),
                    JoinKind::RightAnti | JoinKind::Right if matches.is_empty() => kept.push(with(None)),
                    JoinKind::Inner | JoinKind::Right => kept.extend(matches.into_iter().map(|row| with(Some(row)))),
                    _ => {}
                }
            }
            rows = kept;
        }
        let (mut fields, mut columns) = (Vec::new(), Vec::<ArrayRef>::new());
        let mut add = |at: usize, data: &TableData, numbers: UInt32Array| {
            for name in PAYLOAD {
                let column = take(whole(data).column_by_name(name).unwrap(), &numbers, None).unwrap();
                fields.push(Field::new(format!("{name}_{at}"), column.data_type().clone(), true));
                columns.push(column);
            }
        };
        add(0, &self.facts, rows.iter().map(|(fact, _)| *fact).collect());
        for (at, dimension) in self.dimensions.iter().enumerate().filter(|(_, dimension)| gives_columns(dimension.how))
        {
            add(at + 1, &dimension.data, rows.iter().map(|(_, builds)| builds[at]).collect());
        }
        RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
    }

    /// Returns the task of each dimension's join.
    fn tasks(&self, bench: &Bench) -> Vec<Task> {
        bench.put("facts", &self.facts.batches);
        let task = |(at, dimension): (usize, &Dimension)| {
            let name = format!("dimension {at}");
            bench.put(&name, &dimension.data.batches);
            let own = |column: &str| format!("left.{column}");
            let pairs = dimension.keys.clone().enumerate();
            let pairs = pairs.map(|(own, of_facts)| KeyPair::new(&format!("k{own}"), &format!("k{of_facts}")));
            let mut columns = Vec::new();
            if at == 0 {
                columns.extend(PAYLOAD.map(|column| format!("right.{column}")));
            }
            if gives_columns(dimension.how) {
                columns.extend(PAYLOAD.map(own));
            }
            let spec = JoinSpec {
                how: dimension.how,
                count: columns.is_empty(),
                columns,
                batch_rows: Some(50),
                ..JoinSpec::inner(name.as_str(), "facts", pairs.collect())
            };
            task_of(bench, &spec)
        };
        self.dimensions.iter().enumerate().map(task).collect()
    }
}

fn gives_columns(how: JoinKind) -> bool {
    how.only_side().is_none()
}

/// Returns the task of a join that builds on its left table.
fn task_of(bench: &Bench, spec: &JoinSpec) -> Task {
    let mut plan = planner::plan(planner::bind(spec, &bench.catalog).unwrap(), Some(Strategy::Hash)).unwrap();
    plan.composition.build_side = Side::Left;
    Task { dense_range: None, chunk_rows_min: Some(64), ..plan.task().unwrap() }
}

fn prepare(bench: &Bench, task: Task) -> Arc<PreparedJoin> {
    let (task, monitor) = (Arc::new(task), Monitor::new(CancelFlag::new()));
    let build = TableRows::new(task.build.table.clone());
    Arc::new(PreparedJoin::prepare(task, &build, &*bench.device, bench.catalog.arena(), &monitor).unwrap())
}

/// Makes a chain of prepared joins, with the columns of the first join, then those of the second.
fn chain_of(bench: &Bench, tasks: Vec<Task>) -> dovetail::Result<Chain> {
    let (mut fields, mut columns) = (Vec::new(), Vec::new());
    for (join, task) in tasks.iter().enumerate() {
        for (column, output) in task.output.iter().enumerate() {
            // The first join gives the facts, and then its own table.
            let at = if join == 0 && column < PAYLOAD.len() { 0 } else { join + 1 };
            let name = output.name.trim_end_matches("_right");
            let data_type = task.schema.field(column).data_type().clone();
            fields.push(Field::new(format!("{name}_{at}"), data_type, true));
            columns.push((join, column));
        }
    }
    let joins = tasks.into_iter().map(|task| prepare(bench, task)).collect();
    Chain::new(joins, Arc::new(Schema::new(fields)), columns, &*bench.device)
}

fn probe(bench: &Bench, chain: &Chain, rows: &dyn RowSource) -> Vec<RecordBatch> {
    let (sink, monitor) = (Collect::default(), Monitor::new(CancelFlag::new()));
    chain.probe(rows, &*bench.device, bench.catalog.arena(), &sink, &monitor).unwrap();
    assert_eq!(monitor.progress(), 1.0);
    sink.batches.into_inner()
}

/// Returns a source of batches that have arrived.
fn arrived(batches: &[RecordBatch]) -> IncomingBatches {
    let source = IncomingBatches::new("facts", batches[0].schema(), usize::MAX);
    batches.iter().for_each(|batch| source.push(batch.clone(), &CancelFlag::new()).unwrap());
    source.finish();
    source
}

#[test]
fn random_chains_agree_with_the_naive_joins() {
    let mut rng = StdRng::seed_from_u64(seed() ^ 40);
    let cases = if std::env::var_os("DOVETAIL_LONG").is_some() { 2000 } else { 60 };
    for case in 0..cases {
        let star = Star::random(&mut rng);
        let expected = naive::rows_of(&star.naive());
        let kinds: Vec<_> =
            star.dimensions.iter().map(|dimension| (dimension.how, &star.kinds[dimension.keys.clone()])).collect();
        let bench = Bench::new(rng.random_range(1..=3), 64 << 20);
        let label = format!("case {case}: {} facts, joins {kinds:?} on {bench}", star.facts.keys.len());
        let mut tasks = star.tasks(&bench);
        let table = bench.catalog.table("facts").unwrap();
        // Devices hash no key of a chain.
        tasks.iter_mut().for_each(|task| task.composition.device_makes_keys = false);
        let chain = chain_of(&bench, tasks.clone()).unwrap();
        naive::assert_same_rows(&probe(&bench, &chain, &TableRows::new(table)), &expected, &label);
        drop(chain);
        let unknown = tasks.into_iter().map(|task| task.with_unknown_rows(Role::Probe)).collect();
        let chain = chain_of(&bench, unknown).unwrap();
        let label = format!("{label}, facts arrive");
        naive::assert_same_rows(&probe(&bench, &chain, &arrived(&star.facts.batches)), &expected, &label);
        drop(chain);
        let kept = crate::cache_stats(&*bench.device).unwrap_or_default().bytes;
        assert_eq!(bench.device.memory().used_bytes(), kept, "{label}: the chain left device memory in use");
    }
}

/// Returns a table of numbers.
fn numbers(columns: &[(&str, Vec<i32>)]) -> RecordBatch {
    let column =
        |(name, values): &(&str, Vec<i32>)| (name.to_string(), Arc::new(Int32Array::from(values.clone())) as ArrayRef);
    RecordBatch::try_from_iter(columns.iter().map(column)).unwrap()
}

#[test]
fn the_join_that_keeps_the_fewest_rows_comes_first_as_rows_change() {
    const ROWS: i32 = 20_000;
    let bench = Bench::new(2, 64 << 20);
    bench.put("wide", &[numbers(&[("id", (0..1000).collect()), ("w", (0..1000).collect())])]);
    bench.put("narrow", &[numbers(&[("id", (0..10).collect()), ("n", (0..10).collect())])]);
    // Rows that both joins keep, rows that "wide" drops, and rows that "narrow" drops.
    let facts = |a: fn(i32) -> i32, b: fn(i32) -> i32| {
        numbers(&[("a", (0..ROWS).map(a).collect()), ("b", (0..ROWS).map(b).collect()), ("v", (0..ROWS).collect())])
    };
    let narrow_drops = facts(|row| row % 1000, |row| row % 1000);
    let wide_drops = facts(|row| row % 1000 * 1000, |row| row % 10);
    bench.put("facts", &[narrow_drops.slice(0, 0)]);
    let task = |table: &str, key: &str, columns: &[&str]| {
        let columns = columns.iter().map(|column| column.to_string()).collect();
        let spec = JoinSpec { columns, ..JoinSpec::inner(table, "facts", vec![KeyPair::new("id", key)]) };
        task_of(&bench, &spec).with_unknown_rows(Role::Probe)
    };
    let tasks = [task("wide", "a", &["right.v", "left.w"]), task("narrow", "b", &["left.n"])];
    let fields = ["v", "w", "n"].map(|name| Field::new(name, arrow::datatypes::DataType::Int32, true));
    let joins = tasks.into_iter().map(|task| prepare(&bench, task)).collect();
    let schema = Arc::new(Schema::new(fields.to_vec()));
    let chain = Chain::new(joins, schema, vec![(0, 0), (0, 1), (1, 0)], &*bench.device).unwrap();
    for (facts, kept, order) in [(&narrow_drops, 100, [1, 0]), (&wide_drops, 10, [0, 1]), (&narrow_drops, 100, [1, 0])]
    {
        let found = probe(&bench, &chain, &arrived(std::slice::from_ref(facts)));
        let (mut v, mut w, mut n) = (Vec::new(), Vec::new(), Vec::new());
        for row in 0..ROWS {
            let value =
                |column: usize| facts.column(column).as_any().downcast_ref::<Int32Array>().unwrap().value(row as usize);
            if value(0) < 1000 && value(1) < 10 {
                v.push(row);
                w.push(value(0));
                n.push(value(1));
            }
        }
        assert_eq!(v.len(), ROWS as usize * kept / 10_000);
        let expected = numbers(&[("v", v), ("w", w), ("n", n)]);
        let schema = Schema::new(fields.to_vec());
        let expected = RecordBatch::try_new(Arc::new(schema), expected.columns().to_vec()).unwrap();
        naive::assert_same_rows(&found, &naive::rows_of(&expected), "rows that change");
        assert_eq!(chain.order(), order, "kept shares {:?}", chain.kept_shares());
    }
}

#[test]
fn joins_that_cannot_be_part_of_a_chain_are_refused() {
    let bench = Bench::new(2, 64 << 20);
    bench.put("d", &[numbers(&[("id", vec![1, 2])])]);
    bench.put("facts", &[numbers(&[("a", vec![1, 2]), ("b", vec![1, 2])])]);
    bench.put("others", &[numbers(&[("a", vec![1, 2])])]);
    let spec =
        |how: JoinKind, facts: &str| JoinSpec { how, ..JoinSpec::inner("d", facts, vec![KeyPair::new("id", "a")]) };
    let refused = |tasks: Vec<Task>| chain_of(&bench, tasks).map(drop).unwrap_err();
    for how in [JoinKind::Left, JoinKind::Full, JoinKind::LeftSemi, JoinKind::LeftAnti] {
        let error = refused(vec![task_of(&bench, &spec(how, "facts"))]);
        assert!(
            matches!(&error, Error::Unsupported(why) if why.contains("\"d\"") && why.contains(how.name())),
            "{error}"
        );
    }
    let mut plan = planner::plan(
        planner::bind(&spec(JoinKind::Inner, "facts"), &bench.catalog).unwrap(),
        Some(Strategy::RadixHash),
    )
    .unwrap();
    plan.composition.build_side = Side::Left;
    let error = refused(vec![plan.task().unwrap()]);
    assert!(matches!(&error, Error::Unsupported(why) if why.contains("radix-hash")), "{error}");
    let count = |facts: &str| task_of(&bench, &JoinSpec { count: true, ..spec(JoinKind::Inner, facts) });
    assert!(matches!(refused(vec![count("facts"), count("others")]), Error::Internal(_)));
    assert!(matches!(refused(Vec::new()), Error::Internal(_)));
}
