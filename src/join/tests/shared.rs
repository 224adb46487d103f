//! Results that share columns with the tables they come from.

use crate::device::Phase;
use std::ops::Range;

use arrow::array::AsArray;
use arrow::datatypes::Int32Type;

use super::*;
use crate::catalog::Table;

/// True if a column of a batch is stored in a batch of the table.
fn is_stored_in(table: &Table, column: &ArrayRef) -> bool {
    let bytes = |array: &ArrayRef| {
        let data = array.to_data();
        // The first buffer has a value, an offset or a view per row.
        let width = data.buffers()[0].len() / (data.len() + data.offset()).max(1);
        let start = data.buffers()[0].as_ptr() as usize + data.offset() * width;
        start..start + data.len() * width
    };
    let found = bytes(column);
    let holds = |array: &ArrayRef| bytes(array).start <= found.start && found.end <= bytes(array).end;
    table.batches.iter().flat_map(|batch| batch.columns()).any(holds)
}

/// Returns a batch of rows `rows` of a table of keys, their squares, and a text.
fn rows_of(rows: Range<i32>, payload: &str) -> RecordBatch {
    let text: ArrayRef = Arc::new(StringArray::from_iter_values(rows.clone().map(|row| format!("text of {row}"))));
    batch(vec![("k", numbers(rows.clone())), (payload, numbers(rows.map(|row| row.wrapping_mul(row)))), ("text", text)])
}

/// Runs a join. Returns the batches of the result and, for each column, the number of rows that are
/// stored in a table.
fn joined(bench: &Bench, plan: &Plan) -> (Vec<RecordBatch>, Vec<(String, usize)>) {
    let batches = Mutex::new(Vec::new());
    let sink = Each(|batch| {
        batches.lock().push(batch);
        Ok(())
    });
    bench.run(plan, &sink, &Monitor::default()).unwrap();
    let batches = batches.into_inner();
    let tables = [bench.catalog.table("l").unwrap(), bench.catalog.table("r").unwrap()];
    let shared_rows = |index: usize| {
        let lies = |batch: &&RecordBatch| tables.iter().any(|table| is_stored_in(table, batch.column(index)));
        batches.iter().filter(lies).map(RecordBatch::num_rows).sum()
    };
    let fields = plan.task().unwrap().schema;
    let shared = fields.fields().iter().enumerate().map(|(index, field)| (field.name().clone(), shared_rows(index)));
    let shared = shared.collect();
    (batches, shared)
}

/// Returns the columns that share `rows` rows with a table. The other columns share none.
fn names(shared: &[(String, usize)], rows: usize) -> Vec<&str> {
    assert!(shared.iter().all(|(_, shared)| [0, rows].contains(shared)), "{shared:?}, and not {rows} rows");
    shared.iter().filter(|(_, shared)| *shared > 0).map(|(name, _)| name.as_str()).collect()
}

#[test]
fn columns_are_shared_with_the_table_if_each_row_matches_once() {
    // The batches of the right table end at other rows, and one of them is empty.
    let bounds = [0, 54_000, 54_000, 120_001];
    let right: Vec<_> = bounds.windows(2).map(|bounds| rows_of(bounds[0]..bounds[1], "square")).collect();
    let bench = Bench::of_batches(64 << 20, &[rows_of(0..150_000, "left_square")], &right);
    for (how, strategy, expected) in [
        (JoinKind::Inner, Strategy::Hash, vec!["k", "square", "text_right"]),
        (JoinKind::Right, Strategy::Hash, vec!["k", "square", "text_right"]),
        // Sorted already, so nothing moves.
        (JoinKind::Inner, Strategy::SortMerge, vec!["k", "square", "text_right"]),
        (JoinKind::RightSemi, Strategy::Hash, vec!["k", "square", "text"]),
        (JoinKind::RightSemi, Strategy::SortMergeGfur, vec!["k", "square", "text"]),
        // Partitions have another order.
        (JoinKind::Inner, Strategy::RadixHash, vec![]),
        // Rows of the left that have no match come at the end.
        (JoinKind::Full, Strategy::Hash, vec!["k", "square", "text_right"]),
        (JoinKind::Left, Strategy::Hash, vec!["k", "square", "text_right"]),
    ] {
        let (batches, shared) = joined(&bench, &bench.plan(spec(how), strategy, Side::Left));
        assert_eq!(names(&shared, 120_001), expected, "{how} by {strategy}");
        let mut keys = Vec::new();
        for batch in &batches {
            let column = |name: &str| batch.column_by_name(name);
            let of_batch = column("k").unwrap().as_primitive::<Int32Type>().values();
            let squares = ["square", "left_square"].into_iter().filter_map(column);
            for squares in squares.map(|column| column.as_primitive::<Int32Type>()) {
                let right =
                    |(row, &key): (usize, &i32)| squares.is_null(row) || squares.value(row) == key.wrapping_mul(key);
                assert!(of_batch.iter().enumerate().all(right), "{how} by {strategy}");
            }
            for text in ["text", "text_right"].into_iter().filter_map(column).map(|column| column.as_string::<i32>()) {
                let right =
                    |(row, key): (usize, &i32)| text.is_null(row) || text.value(row) == format!("text of {key}");
                assert!(of_batch.iter().enumerate().all(right), "{how} by {strategy}");
            }
            keys.extend_from_slice(of_batch);
        }
        keys.sort_unstable();
        let rows = if matches!(how, JoinKind::Full | JoinKind::Left) { 150_000 } else { 120_001 };
        assert!(keys.into_iter().eq(0..rows), "{how} by {strategy}");
    }
}

#[test]
fn a_side_whose_rows_are_all_in_the_result_is_shared() {
    for (how, right) in [(JoinKind::LeftSemi, 0..5000), (JoinKind::LeftAnti, 1000..5000)] {
        let bench = Bench::new(64 << 20, rows_of(0..1000, "square"), rows_of(right, "other"));
        let (_, shared) = joined(&bench, &bench.plan(spec(how), Strategy::Hash, Side::Left));
        assert_eq!(names(&shared, 1000), ["k", "square", "text"], "{how}");
    }
}

#[test]
fn dictionaries_that_differ_between_batches_are_shared_unchanged() {
    let coded = |rows: Range<i32>| {
        let texts: Vec<String> = rows.clone().map(|row| format!("{}", row / 100)).collect();
        let coded: DictionaryArray<Int32Type> = texts.iter().map(String::as_str).collect();
        batch(vec![("k", numbers(rows)), ("coded", Arc::new(coded))])
    };
    let right = [coded(0..100_000), coded(100_000..200_000)];
    let bench = Bench::of_batches(64 << 20, &[rows_of(0..200_000, "square")], &right);
    let (batches, shared) = joined(&bench, &bench.plan(spec(JoinKind::Inner), Strategy::Hash, Side::Left));
    assert_eq!(names(&shared, 200_000), ["k", "coded"]);
    for batch in batches {
        let coded = arrow::compute::cast(batch.column_by_name("coded").unwrap(), &DataType::Utf8).unwrap();
        let keys = batch.column(0).as_primitive::<Int32Type>().values();
        assert!(keys.iter().zip(coded.as_string::<i32>()).all(|(key, text)| text == Some(&format!("{}", key / 100))));
    }
}

#[test]
fn columns_are_gathered_if_rows_are_left_out_repeated_or_fragmented() {
    let left = rows_of(0..20_000, "square");
    let cases = [
        ("a row without a match", vec![rows_of(0..20_001, "other")]),
        ("fragments", (0..2000).map(|start| rows_of(10 * start..10 * start + 10, "other")).collect()),
    ];
    for (label, right) in cases {
        let bench = Bench::of_batches(64 << 20, std::slice::from_ref(&left), &right);
        let (batches, shared) = joined(&bench, &bench.plan(spec(JoinKind::Inner), Strategy::Hash, Side::Left));
        assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), 20_000, "{label}");
        assert!(names(&shared, 0).is_empty(), "{label}: {shared:?}");
    }
    let twice = batch(vec![("k", numbers((0..2000).map(|row| row / 2))), ("v", numbers(0..2000))]);
    let bench = Bench::new(64 << 20, twice, rows_of(0..1000, "other"));
    let (batches, shared) = joined(&bench, &bench.plan(spec(JoinKind::Inner), Strategy::Hash, Side::Left));
    assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), 2000);
    assert!(names(&shared, 0).is_empty(), "{shared:?}");
}

#[test]
fn long_batches_are_shared_wherever_a_probe_batch_ends() {
    // The number of batches decides which batches have rows left over, and how many.
    for count in (1..60).step_by(7) {
        let right: Vec<_> = (0..count).map(|at| rows_of(2600 * at..2600 * (at + 1), "other")).collect();
        let bench = Bench::of_batches(64 << 20, &[rows_of(0..2600 * count, "square")], &right);
        let spec = JoinSpec { batch_rows: Some(10_000), ..spec(JoinKind::Inner) };
        let (_, shared) = joined(&bench, &bench.plan(spec, Strategy::Hash, Side::Left));
        assert_eq!(names(&shared, 2600 * count as usize), ["k", "other", "text_right"], "{count} batches");
    }
}

#[test]
fn a_small_part_of_a_table_is_copied_so_that_the_table_can_be_freed() {
    let bench = Bench::new(64 << 20, rows_of(0..20_000, "square"), rows_of(0..20_000, "other"));
    for (columns, expected) in [(vec!["other"], vec![]), (vec!["other", "right.text"], vec!["other", "text"])] {
        let columns = columns.into_iter().map(String::from).collect();
        let spec = JoinSpec { columns, ..spec(JoinKind::Inner) };
        let (_, shared) = joined(&bench, &bench.plan(spec, Strategy::Hash, Side::Left));
        assert_eq!(names(&shared, 20_000), expected);
    }
}

#[test]
fn a_result_that_becomes_a_table_has_its_own_memory() {
    let bench = Bench::new(64 << 20, rows_of(0..20_000, "square"), rows_of(0..20_000, "other"));
    let mut plan = bench.plan(spec(JoinKind::Inner), Strategy::Hash, Side::Left);
    plan.join.result_is_stored = true;
    let (batches, shared) = joined(&bench, &plan);
    assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), 20_000);
    assert!(names(&shared, 0).is_empty(), "{shared:?}");
}

#[test]
fn shared_columns_do_not_cross_the_link() {
    let link = EmulatedLink { to_device_bytes_per_second: 1e12, from_device_bytes_per_second: 1e12 };
    let memory = Budget::new("memory of device host:0", "--device-memory", 64 << 20);
    let linked = HostDevice::new(0, 2, memory, Some(link)).unwrap();
    let bench = Bench::new(64 << 20, rows_of(0..1000, "square"), rows_of(0..1000, "other"));
    for (how, expected) in [(JoinKind::Inner, 4000), (JoinKind::RightSemi, 0)] {
        let plan = bench.plan(spec(how), Strategy::Hash, Side::Left);
        let monitor = Monitor::default();
        run(&Arc::new(plan.task().unwrap()), &linked, bench.catalog.arena(), &Each(|_| Ok(())), &monitor).unwrap();
        let copied: u64 =
            monitor.phases().iter().filter(|phase| phase.phase == Phase::CopyIn).map(|phase| phase.bytes).sum();
        // The keys are copied to be packed. Except them, the inner join copies only the left
        // table's numbers.
        assert_eq!(copied, expected, "{how}");
    }
}
