use std::sync::Arc;

use arrow::array::{
    ArrayRef, Decimal128Array, DictionaryArray, Float64Array, Int8Array, Int32Array, Int64Array, RecordBatch,
    StringArray, UInt64Array,
};
use arrow::datatypes::Int8Type;

use super::*;
use crate::device::CancelFlag;
use crate::device::host::HostDevice;
use crate::memory::Budget;

fn fact(class: KeyClass, data_type: DataType) -> KeyFacts {
    KeyFacts {
        class,
        build_type: data_type.clone(),
        probe_type: data_type,
        range: None,
        bytes_max: None,
        nulls_equal: false,
        sorted: false,
    }
}

#[test]
fn one_integer_column_is_its_own_key() {
    for (data_type, width) in [(DataType::Int32, KeyWidth::W4), (DataType::UInt64, KeyWidth::W8)] {
        let layout = KeyLayout::new(vec![fact(KeyClass::Integer, data_type)], 0);
        assert!(layout.is_raw() && !layout.is_hashed());
        assert_eq!(layout.width(), width);
    }
    let narrow = KeyLayout::new(vec![fact(KeyClass::Integer, DataType::Int8)], 0);
    assert!(!narrow.is_raw(), "8 bits are widened to 32");
}

#[test]
fn integers_of_two_widths_or_signs_share_their_range() {
    let mut mixed = fact(KeyClass::Integer, DataType::Int32);
    mixed.probe_type = DataType::UInt64;
    let layout = KeyLayout::new(vec![mixed.clone()], 0);
    assert_eq!(layout.width(), KeyWidth::W16, "from -2^31 to 2^64 takes 65 bits");
    mixed.range = Some((-5, 1000));
    assert_eq!(KeyLayout::new(vec![mixed], 0).width(), KeyWidth::W4);
}

#[test]
fn composite_keys_take_the_bits_of_their_ranges() {
    let mut key = fact(KeyClass::Integer, DataType::Int64);
    key.range = Some((1, 150_000));
    let mut flag = fact(KeyClass::String, DataType::Utf8);
    flag.bytes_max = Some(3);
    let mut day = fact(KeyClass::Date32, DataType::Date32);
    day.range = Some((8035, 10591));
    day.nulls_equal = true;
    let layout = KeyLayout::new(vec![key, flag, day], 0);
    let Form::Packed { width, fields } = &layout.form else { panic!("57 bits are packed") };
    assert_eq!(*width, KeyWidth::W8);
    let places: Vec<_> = fields.iter().map(|field| (field.shift, field.bits, field.null_bit)).collect();
    assert_eq!(places, [(39, 18, None), (13, 26, None), (0, 12, Some(12))]);
}

#[test]
fn wide_and_unbounded_keys_are_hashed() {
    assert!(KeyLayout::new(vec![fact(KeyClass::String, DataType::Utf8)], 0).is_hashed());
    let mut long = fact(KeyClass::Binary, DataType::Binary);
    long.bytes_max = Some(16);
    assert!(KeyLayout::new(vec![long], 0).is_hashed());
    assert!(KeyLayout::new(vec![fact(KeyClass::Decimal { scale: 2 }, DataType::Decimal256(50, 2))], 0).is_hashed());
    assert!(KeyLayout::new(vec![fact(KeyClass::Integer, DataType::Int64); 3], 0).is_hashed());
    assert!(!KeyLayout::new(vec![fact(KeyClass::Integer, DataType::Int64); 2], 0).is_hashed());
}

#[test]
fn devices_hash_the_key_types_that_they_can_read() {
    use DataType as T;
    let long = |class: KeyClass, build: DataType, probe: DataType, bytes: usize| KeyFacts {
        bytes_max: Some(bytes),
        probe_type: probe,
        ..fact(class, build)
    };
    let text = || long(KeyClass::String, T::Utf8, T::LargeUtf8, 20);
    let is_read = |facts: Vec<KeyFacts>| KeyLayout::new(facts, 0).made_by_device().is_hashed_by_device();
    let dictionary = || T::Dictionary(T::Int8.into(), T::Utf8.into());
    for (facts, expected) in [
        (text(), true),
        (long(KeyClass::Binary, T::Binary, T::LargeBinary, 4096), true),
        (long(KeyClass::Binary, T::Binary, T::Binary, 4097), false),
        (KeyFacts { bytes_max: None, ..text() }, false),
        (long(KeyClass::String, T::Utf8, T::Utf8View, 20), false),
        (long(KeyClass::String, dictionary(), T::Utf8, 20), false),
        (long(KeyClass::Binary, T::FixedSizeBinary(16), T::Binary, 16), false),
        (fact(KeyClass::Decimal { scale: 2 }, T::Decimal256(50, 2)), false),
    ] {
        assert_eq!(is_read(vec![facts.clone()]), expected, "{facts:?}");
        assert!(!is_read(vec![facts, fact(KeyClass::Boolean, T::Boolean)]), "booleans are bits");
    }
    assert!(!is_read(vec![fact(KeyClass::Integer, T::Int64)]), "packed keys are not hashed");
    // Short text is packed together with numbers that a device packs anyway.
    let short = || KeyFacts { range: Some((0, 9)), ..fact(KeyClass::Integer, T::Int64) };
    let flag = || long(KeyClass::String, T::Utf8, T::Utf8, 3);
    let packed = |facts| KeyLayout::new(facts, 0).made_by_device();
    let layout = packed(vec![short(), flag()]);
    assert!(layout.is_made_by_device() && !layout.is_hashed() && !layout.is_made_on_host());
    assert_eq!((layout.value_row_bytes(Role::Build), layout.value_bytes_max()), (8 + 4 + 16, 3));
    assert!(!packed(vec![short()]).is_made_by_device(), "no key has to be made");
    assert!(packed(vec![flag(), long(KeyClass::String, dictionary(), T::Utf8, 3)]).is_made_on_host());
    assert!(is_read(vec![text(); 8]) && !is_read(vec![text(); 9]));

    // Bytes of a row next to its text, and the encoding of fixed-width values on both sides.
    let mixed = KeyFacts { probe_type: T::UInt8, ..fact(KeyClass::Integer, T::Int64) };
    let wide = KeyFacts { probe_type: T::Decimal128(20, 0), ..fact(KeyClass::Integer, T::UInt64) };
    let half = fact(KeyClass::Float { bytes: 2 }, T::Float16);
    for (facts, role, encoding) in [
        (&mixed, Role::Build, KeyEncoding::Signed { min: 0 }),
        (&mixed, Role::Probe, KeyEncoding::Unsigned),
        (&wide, Role::Build, KeyEncoding::Unsigned),
        (&wide, Role::Probe, KeyEncoding::Signed { min: 0 }),
        (&half, Role::Build, KeyEncoding::Float),
    ] {
        assert_eq!(facts.whole_encoding(role), encoding, "{facts:?}");
    }
    let layout = KeyLayout::new(vec![mixed, text(), wide, half], 0).made_by_device();
    assert!(layout.is_hashed_by_device() && !layout.is_made_on_host());
    assert_eq!((0..4).map(|at| layout.copies_column(at)).collect::<Vec<_>>(), [true, false, true, true]);
    assert_eq!([Role::Build, Role::Probe].map(|role| layout.value_row_bytes(role)), [8 + 12 + 8 + 2, 1 + 16 + 16 + 2]);
    assert_eq!(layout.value_bytes_max(), 20);
}

#[test]
fn equal_integers_and_wide_decimals_have_equal_hashes() {
    let rows_of = |column: ArrayRef| {
        let batch = RecordBatch::try_from_iter([("k", column)]).unwrap();
        Rows::of(&batch.schema(), std::slice::from_ref(&batch), 0..batch.num_rows() as u64)
    };
    let integers: ArrayRef = Arc::new(Int64Array::from(vec![i64::MIN, -1, 0, i64::MAX]));
    let unsigned: ArrayRef = Arc::new(UInt64Array::from(vec![1, 5, 0, u64::MAX]));
    let wide = DataType::Decimal256(40, 0);
    for column in [integers, unsigned] {
        let mixed = KeyFacts { probe_type: wide.clone(), ..fact(KeyClass::Integer, column.data_type().clone()) };
        let layout = KeyLayout::new(vec![mixed], 0);
        assert!(layout.is_hashed());
        let decimals = arrow::compute::cast(&column, &wide).unwrap();
        let hashes = [column, decimals].map(|column| {
            let reader = [KeyReader::new(&rows_of(column), 0, true).unwrap()];
            (0..4).map(|row| layout.hash(&reader, row, 7).unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(hashes[0], hashes[1]);
    }
}

#[test]
fn all_bits_of_all_fields_are_in_a_hash() {
    let strings = |values: [&str; 4]| Arc::new(StringArray::from(values.to_vec())) as ArrayRef;
    let columns = [strings(["a", "b", "a", "ab"]), strings(["b", "a", "a", ""])];
    let named = columns.into_iter().enumerate().map(|(at, column)| (format!("k{at}"), column));
    let batch = RecordBatch::try_from_iter(named).unwrap();
    let rows = Rows::of(&batch.schema(), std::slice::from_ref(&batch), 0..4);
    let readers: Vec<KeyReader> = (0..2).map(|at| KeyReader::new(&rows, at, false).unwrap()).collect();
    let layout = KeyLayout::new(vec![fact(KeyClass::String, DataType::Utf8); 2], 0);
    for seed in [0, 7, u64::MAX] {
        let hashes: Vec<u128> = (0..4).map(|row| layout.hash(&readers, row, seed).unwrap()).collect();
        for (at, hash) in hashes.iter().enumerate() {
            assert!(!hashes[..at].contains(hash), "row {at} of seed {seed}");
        }
        // The last field of rows 1 and 2 is the same. Only the first field's hash differs, and all
        // its bits count.
        let first = |row| {
            readers[0].value(row).map(|value| match value {
                KeyValue::Bytes(bytes) => xxh3_128_with_seed(bytes, seed),
                KeyValue::Number(_) => unreachable!("strings are bytes"),
            })
        };
        let difference = hashes[1].wrapping_sub(hashes[2]);
        let low_bits = (1u128 << 64) - 1;
        assert_ne!(difference & low_bits, 0);
        assert_ne!(difference >> 64, 0);
        assert_ne!(first(1), first(2));
    }
}

/// Returns whether keys of the given columns of one batch are in ascending order, and whether the
/// layout says so.
fn packed_in_order(columns: Vec<ArrayRef>, mut facts: Vec<KeyFacts>) -> (bool, bool) {
    facts.iter_mut().for_each(|fact| fact.sorted = true);
    let named = columns.into_iter().enumerate().map(|(at, column)| (format!("k{at}"), column));
    let batch = RecordBatch::try_from_iter(named).unwrap();
    let memory = Budget::new("memory of device host:0", "--device-memory", 1 << 20);
    let device = HostDevice::new(0, 1, memory, None).unwrap();
    let stream = device.stream(CancelFlag::new()).unwrap();
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 64 << 20));
    let rows = Rows::of(&batch.schema(), std::slice::from_ref(&batch), 0..batch.num_rows() as u64);
    let indexes: Vec<usize> = (0..facts.len()).collect();
    let layout = KeyLayout::new(facts, 0);
    let (keys, _) = layout.pack(Role::Build, &rows, &indexes, &device, &arena, &stream).unwrap();
    (device.is_sorted(&keys.packed.keys, &stream).unwrap(), layout.keeps_order())
}

#[test]
fn rows_in_order_have_keys_in_order() {
    let integer = |range| KeyFacts { range, ..fact(KeyClass::Integer, DataType::Int32) };
    let string = KeyFacts { bytes_max: Some(3), ..fact(KeyClass::String, DataType::Utf8) };
    let integers = |values: &[i32]| Arc::new(Int32Array::from(values.to_vec())) as ArrayRef;
    let strings = |values: &[&str]| Arc::new(StringArray::from(values.to_vec())) as ArrayRef;
    let wide = Decimal128Array::from(vec![i128::MIN, -1, 0, i128::MAX]).with_data_type(DataType::Decimal128(38, 0));
    let floats = [f64::NEG_INFINITY, -2.5, -0.0, 0.0, 1e-300, f64::INFINITY, f64::NAN];
    let float_type = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Float64));
    let float_keys = Int8Array::from_iter_values(0..floats.len() as i8);
    let float_values = Arc::new(Float64Array::from(floats.to_vec()));
    let floats = DictionaryArray::<Int8Type>::try_new(float_keys, float_values).unwrap();
    let cases: Vec<(&str, Vec<ArrayRef>, Vec<KeyFacts>)> = vec![
        ("signed", vec![integers(&[i32::MIN, -7, -1, 0, 5])], vec![integer(Some((i32::MIN.into(), 5)))]),
        ("signed of unknown range", vec![integers(&[-7, -1, 0, 5])], vec![integer(None)]),
        ("negative", vec![integers(&[-7, -6, -6, -1])], vec![integer(Some((-7, -1)))]),
        ("wide", vec![Arc::new(wide)], vec![fact(KeyClass::Integer, DataType::Decimal128(38, 0))]),
        ("strings", vec![strings(&["", "\0", "a", "ab", "abc", "b", "ba"])], vec![string.clone()]),
        ("floats of the host", vec![Arc::new(floats)], vec![fact(KeyClass::Float { bytes: 8 }, float_type)]),
        (
            "the first column decides",
            vec![integers(&[-2, -2, 1, 3]), strings(&["b", "ca", "a", ""]), integers(&[9, 1, 8, 0])],
            vec![integer(Some((-2, 3))), string, integer(Some((0, 9)))],
        ),
    ];
    for (name, columns, facts) in cases {
        assert_eq!(packed_in_order(columns, facts), (true, true), "{name}");
    }
    let nobody_sorted = KeyLayout::new(vec![integer(Some((-7, 5)))], 0);
    assert!(nobody_sorted.is_raw() && !nobody_sorted.keeps_order());
    assert!(!KeyLayout::new(vec![fact(KeyClass::String, DataType::Utf8)], 0).keeps_order(), "hashes have no order");
}
