//! Tests of joins with very many columns or keys: planning takes time in proportion to their
//! number.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::device::{Capabilities, Tuning};
use crate::memory::Interrupt;

/// Linear planning takes a second or two. A step that compares all columns with all others takes
/// many minutes.
const COLUMNS: usize = 20_000;

/// Ends a test that would take many minutes.
fn patience() -> Interrupt {
    let start = Instant::now();
    Interrupt::by(move || match start.elapsed() < Duration::from_secs(120) {
        true => Ok(()),
        false => Err(Error::Internal("this takes more than proportional time".into())),
    })
}

/// Tables `r` and `s` with the same column names: `c0`, `c1`, ...; every second column is text, the
/// others numbers.
fn catalog(name: impl Fn(usize) -> String) -> Catalog {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
    let types = [DataType::Int32, DataType::Utf8];
    let fields = (0..COLUMNS).map(|column| Field::new(name(column), types[column % 2].clone(), false));
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let statistics = |column: usize| ColumnStatistics {
        min: Some(Value::Integer(0)),
        max: Some(Value::Integer(100)),
        distinct: Some(1e6),
        max_value_bytes: (column % 2 == 1).then_some(8),
        ..ColumnStatistics::default()
    };
    for table in ["r", "s"] {
        let mut table = Table::from_batches(table, schema.clone(), Vec::new()).unwrap();
        (table.rows, table.bytes) = (1 << 24, (1 << 24) * COLUMNS as u64 * 8);
        table.statistics = (0..COLUMNS).map(statistics).collect();
        catalog.create(table).unwrap();
    }
    catalog
}

/// A GPU for which the planner considers everything: deferred payload, and work on text.
fn gpu() -> Target {
    let mut target = a100();
    target.rates = Rates { copy_in: 50e9, copy_out: 50e9, ..target.rates };
    target.memory_bytes = u64::MAX;
    let tuning = Tuning { streams: 4, probe_batch_rows: 1 << 22, ..target.tuning };
    Target { tuning, capabilities: Capabilities { strings: true, exchanges: true, forms_gangs: true }, ..target }
}

fn names(pairs: impl Iterator<Item = usize>) -> Vec<KeyPair> {
    pairs.map(|column| KeyPair::new(&format!("c{column}"), &format!("c{column}"))).collect()
}

fn planned(spec: JoinSpec, catalog: &Catalog, target: &Target) -> Plan {
    let interrupt = patience();
    let join = bind_interruptible(&spec, catalog, &interrupt).unwrap();
    propose(join, &PlanOverrides::default(), target, &interrupt).unwrap().0
}

#[test]
fn planning_and_explaining_a_join_of_many_columns_takes_proportional_time_and_text() {
    let catalog = catalog(|column| format!("c{column}"));
    for target in [Target::default(), gpu()] {
        let plan = planned(JoinSpec::inner("r", "s", names(0..1)), &catalog, &target);
        assert_eq!(plan.join.output.len(), 2 * COLUMNS - 1);
        assert_eq!(plan.join.schema.field(2 * COLUMNS - 2).name(), &format!("c{}_right", COLUMNS - 1));
        let explanation = Explanation::new(&plan, "one", "the only one".into(), None);
        assert!(explanation.to_string().len() < 64 << 10, "the printed text names only the first of many columns");
        plan.task().unwrap();
    }
}

#[test]
fn finding_many_named_columns_and_keys_takes_proportional_time() {
    let catalog = catalog(|column| format!("c{column}"));
    let on_all = JoinSpec::inner("r", "s", names(0..COLUMNS));
    assert_eq!(planned(on_all.clone(), &catalog, &Target::default()).join.output.len(), COLUMNS);
    let columns = (0..COLUMNS).flat_map(|column| [format!("left.c{column}"), format!("right.c{column}")]).collect();
    let named = JoinSpec { columns, ..JoinSpec::inner("r", "s", names(0..1)) };
    assert_eq!(planned(named, &catalog, &Target::default()).join.output.len(), 2 * COLUMNS);
    let keys = (0..COLUMNS).map(|column| format!("c{column}")).collect();
    let keys = JoinSpec { columns: keys, ..on_all };
    assert_eq!(planned(keys, &catalog, &Target::default()).join.output.len(), COLUMNS);
}

/// A table that was joined with itself repeatedly, each time on a result.
#[test]
fn finding_columns_with_repeated_suffixes_takes_proportional_time() {
    const SUFFIXES: usize = 1000;
    let name = |column: usize| match column {
        ..SUFFIXES => format!("c{}", "_right".repeat(column)),
        _ => format!("d{column}"),
    };
    let spec = JoinSpec::inner("r", "s", vec![KeyPair::new("d5000", "d5000")]);
    let join = bind_interruptible(&spec, &catalog(name), &patience()).unwrap();
    let of_right = |column: usize| join.schema.field(COLUMNS + column).name().clone();
    // All names of the left side come first.
    assert_eq!(of_right(0), name(0) + &"_right".repeat(SUFFIXES));
    assert_eq!(of_right(SUFFIXES - 1), name(SUFFIXES - 1) + &"_right".repeat(SUFFIXES));
}

#[test]
fn planning_ends_when_it_is_interrupted() {
    let catalog = catalog(|column| format!("c{column}"));
    let spec = JoinSpec::inner("r", "s", names(0..1));
    let stop = Interrupt::by(|| Err(Error::Cancelled("enough".into())));
    let refusal = Error::Cancelled("enough".into());
    assert_eq!(bind_interruptible(&spec, &catalog, &stop).unwrap_err(), refusal);
    let join = bind(&spec, &catalog).unwrap();
    assert_eq!(propose(join.clone(), &PlanOverrides::default(), &gpu(), &stop).unwrap_err(), refusal);
    // The planner checks the interrupt once for each price of each strategy on each side.
    let looks = Arc::new(AtomicUsize::new(0));
    let count = looks.clone();
    let counted = Interrupt::by(move || {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    propose(join, &PlanOverrides::default(), &gpu(), &counted).unwrap();
    assert!(looks.load(Ordering::Relaxed) >= 2 * Strategy::ALL.len(), "{looks:?}");
}
