use std::sync::Arc;

use arrow::array::*;
use arrow::buffer::{NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow::datatypes::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::catalog::{Adopter, Upload};

/// Makes a batch with a column of every layout, with nulls.
pub(super) fn every_layout(rows: usize, random: &mut StdRng) -> RecordBatch {
    let numbers: Vec<Option<i32>> =
        (0..rows).map(|_| (!random.random_bool(0.2)).then(|| random.random_range(-9..9))).collect();
    let texts: Vec<Option<String>> =
        numbers.iter().map(|n| n.map(|n| "a long enough text ".repeat(n.unsigned_abs() as usize % 3))).collect();
    let text = || texts.iter().map(|text| text.as_deref());
    let ints = Int32Array::from(numbers.clone());
    let lists = || numbers.iter().map(|n| n.map(|n| vec![Some(n); n.unsigned_abs() as usize % 4]));
    let item = Arc::new(Field::new("item", DataType::Int32, true));
    let fixed_list = FixedSizeListArray::new(
        item.clone(),
        2,
        Arc::new(Int32Array::from_iter_values(0..2 * rows as i32)),
        Some(NullBuffer::from_iter(numbers.iter().map(Option::is_some))),
    );
    let nested = StructArray::from(vec![
        (item, Arc::new(ints.clone()) as ArrayRef),
        (Arc::new(Field::new("text", DataType::Utf8, true)), Arc::new(StringArray::from_iter(text())) as ArrayRef),
    ]);
    let offsets = OffsetBuffer::new(ScalarBuffer::from_iter(0..=rows as i32));
    let struct_list = ListArray::new(
        Arc::new(Field::new("item", nested.data_type().clone(), true)),
        offsets,
        Arc::new(nested.clone()),
        None,
    );
    let dictionary: DictionaryArray<Int16Type> = text().collect();
    let runs = {
        let ends = Int32Array::from_iter_values(1..=rows.max(1) as i32);
        let values = Int32Array::from_iter_values(0..rows.max(1) as i32);
        RunArray::try_new(&ends, &values).unwrap().slice(0, rows)
    };
    let union = {
        let fields = UnionFields::try_new(
            vec![0, 1],
            vec![Field::new("i", DataType::Int32, true), Field::new("t", DataType::Utf8, true)],
        )
        .unwrap();
        let ids = ScalarBuffer::from_iter((0..rows).map(|row| (row % 2) as i8));
        let children: Vec<ArrayRef> = vec![Arc::new(ints.clone()), Arc::new(StringArray::from_iter(text()))];
        UnionArray::try_new(fields, ids, None, children).unwrap()
    };
    let mut map = MapBuilder::new(None, StringBuilder::new(), Int32Builder::new());
    for number in &numbers {
        for entry in 0..number.unwrap_or(0) {
            map.keys().append_value(format!("key {entry}"));
            map.values().append_option(*number);
        }
        map.append(number.is_some()).unwrap();
    }
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("int", Arc::new(ints)),
        ("bool", Arc::new(BooleanArray::from_iter(numbers.iter().map(|n| n.map(|n| n > 0))))),
        ("null", Arc::new(NullArray::new(rows))),
        ("decimal", Arc::new(Decimal128Array::from_iter(numbers.iter().map(|n| n.map(i128::from))))),
        ("text", Arc::new(StringArray::from_iter(text()))),
        ("large", Arc::new(LargeStringArray::from_iter(text()))),
        ("view", Arc::new(StringViewArray::from_iter(text()))),
        (
            "fixed",
            Arc::new(
                FixedSizeBinaryArray::try_from_sparse_iter_with_size(
                    numbers.iter().map(|n| n.map(|n| [n as u8; 3])),
                    3,
                )
                .unwrap(),
            ),
        ),
        ("list", Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists()))),
        ("large list", Arc::new(LargeListArray::from_iter_primitive::<Int32Type, _, _>(lists()))),
        ("fixed list", Arc::new(fixed_list)),
        ("struct", Arc::new(nested)),
        ("list of structs", Arc::new(struct_list)),
        ("dictionary", Arc::new(dictionary)),
        ("runs", Arc::new(runs)),
        ("union", Arc::new(union)),
        ("map", Arc::new(map.finish())),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

fn all_buffers(data: &ArrayData, found: &mut Vec<(usize, usize)>) {
    found.extend(data.buffers().iter().map(|buffer| (buffer.as_ptr() as usize, buffer.len())));
    found.extend(data.nulls().map(|nulls| (nulls.buffer().as_ptr() as usize, nulls.buffer().len())));
    data.child_data().iter().for_each(|child| all_buffers(child, found));
}

#[test]
fn adopted_batches_of_any_layout_and_slice_equal_the_originals_and_are_stored_in_the_arena() {
    let mut random = StdRng::seed_from_u64(crate::testing::seed());
    let catalog = catalog();
    for rows in [0, 1, 7, 8, 9, 63, 64, 65, 200] {
        let batch = every_layout(rows, &mut random);
        for _ in 0..10 {
            let start = random.random_range(0..=rows);
            let slice = batch.slice(start, random.random_range(0..=rows - start));
            let adopted = catalog.adopt(slice.clone()).unwrap();
            assert_eq!(adopted, slice, "{rows} rows from {start}");
            let mut buffers = Vec::new();
            adopted.columns().iter().for_each(|column| all_buffers(&column.to_data(), &mut buffers));
            for (address, len) in buffers {
                assert!(len == 0 || catalog.arena().owns(address as *const u8));
            }
            adopted.columns().iter().for_each(|column| column.to_data().validate_full().unwrap());
        }
    }
    assert_eq!(catalog.arena().budget().used_bytes(), 0);
}

#[test]
fn a_batch_already_stored_in_the_arena_is_not_copied() {
    let catalog = catalog();
    let first = catalog.adopt(batch(0..100)).unwrap();
    let used = catalog.arena().budget().used_bytes();
    let second = catalog.adopt(first.slice(10, 20)).unwrap();
    assert_eq!(catalog.arena().budget().used_bytes(), used);
    assert_eq!(second.column(0).to_data().buffers()[0].as_ptr(), first.column(0).to_data().buffers()[0][80..].as_ptr());
}

#[test]
fn only_the_rows_of_a_slice_are_copied_and_counted() {
    let catalog = catalog();
    let large = batch(0..10_000);
    let mut upload = Upload::begin(&catalog, "t", schema(), UploadOptions::default()).unwrap();
    upload.append(large.slice(5000, 10)).unwrap();
    let table = upload.commit().unwrap();
    // Ten keys, eleven offsets, ten texts such as "name 5000".
    assert_eq!(table.bytes, 80 + 44 + 90);
    assert!(catalog.arena().budget().used_bytes() < 4096);
}

#[test]
fn a_dictionary_that_batches_share_is_copied_and_counted_once() {
    let arena = arena_of(64 << 20);
    let values: ArrayRef = Arc::new(StringArray::from_iter_values((0..10_000).map(|n| format!("value {n}"))));
    let column = |keys: std::ops::Range<i32>| -> RecordBatch {
        let array = DictionaryArray::new(Int32Array::from_iter_values(keys), values.clone());
        RecordBatch::try_from_iter([("d", Arc::new(array) as ArrayRef)]).unwrap()
    };
    let mut adopter = Adopter::new(arena.clone());
    let first = adopter.adopt(column(0..10)).unwrap();
    let used = arena.budget().used_bytes();
    let second = adopter.adopt(column(20..30)).unwrap();
    assert!(arena.budget().used_bytes() < used + 1024);
    let dictionary = |batch: &RecordBatch| batch.column(0).as_any_dictionary().values().to_data();
    assert!(dictionary(&first).ptr_eq(&dictionary(&second)));

    let catalog = Catalog::new(arena);
    let mut upload = Upload::begin(&catalog, "t", first.schema(), UploadOptions::default()).unwrap();
    (0..5).for_each(|n| upload.append(column(n..n + 10)).unwrap());
    let table = upload.commit().unwrap();
    let dictionary_bytes = values.to_data().buffers().iter().map(|buffer| buffer.len() as u64).sum::<u64>();
    assert_eq!(table.bytes, dictionary_bytes + 5 * 40);
}

#[test]
fn a_full_arena_refuses_a_batch_and_uses_no_memory_for_it() {
    let arena = arena_of(4096);
    let catalog = Catalog::new(arena.clone());
    assert_refused(catalog.adopt(batch(0..1000)), is!(Exhausted), &["--host-memory"]);
    assert_eq!(arena.budget().used_bytes(), 0);
}
