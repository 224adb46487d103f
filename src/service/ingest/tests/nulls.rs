//! Nulls in fields that may not be null: refused wherever they are stored, and accepted if no row
//! refers to them.

use arrow::array::{ArrayDataBuilder, Int8Array, NullArray, RunArray, StructArray, UnionArray, make_array};
use arrow::buffer::{Buffer, NullBuffer};
use arrow::datatypes::{FieldRef, UnionFields};

use super::*;

/// Returns arrays of two values, one for each kind of array that stores nulls outside of its
/// bitmap. The second value is null if `has_null`.
fn kinds(has_null: bool) -> Vec<(&'static str, ArrayRef)> {
    let second = if has_null { None } else { Some(2) };
    let values = || Arc::new(Int32Array::from(vec![Some(1), second])) as ArrayRef;
    let fields = || UnionFields::try_new([4], [Field::new("n", DataType::Int32, true)]).unwrap();
    let union = |offsets: Option<Vec<i32>>| {
        let offsets = offsets.map(Into::into);
        Arc::new(UnionArray::try_new(fields(), vec![4i8, 4].into(), offsets, vec![values()]).unwrap()) as ArrayRef
    };
    let keys = Int8Array::from(vec![0, 1]);
    let ends = Int32Array::from(vec![1, 2]);
    vec![
        ("dictionary", Arc::new(DictionaryArray::try_new(keys, values()).unwrap())),
        ("runs", Arc::new(RunArray::try_new(&ends, &values()).unwrap())),
        ("sparse union", union(None)),
        ("dense union", union(Some(vec![0, 1]))),
    ]
}

fn required(array: &ArrayRef) -> FieldRef {
    Arc::new(Field::new("item", array.data_type().clone(), false))
}

fn with_child(
    array: &ArrayRef,
    data_type: DataType,
    more: impl FnOnce(ArrayDataBuilder) -> ArrayDataBuilder,
) -> ArrayRef {
    let builder = more(ArrayData::builder(data_type).add_child_data(array.to_data()));
    // The constructors of typed arrays refuse some of these nulls.
    make_array(builder.build().unwrap())
}

/// Returns the array, two values long, as a field that may not be null at each kind of place.
fn places(array: &ArrayRef) -> Vec<(&'static str, Field, ArrayRef)> {
    let field = required(array);
    let offsets = Buffer::from_vec(vec![0i32, 2]);
    let sizes = Buffer::from_vec(vec![2i32]);
    let list = with_child(array, DataType::List(field.clone()), |list| list.len(1).add_buffer(offsets));
    let view = with_child(array, DataType::ListView(field.clone()), |list| {
        list.len(1).add_buffer(Buffer::from_vec(vec![0i32])).add_buffer(sizes)
    });
    let fixed = with_child(array, DataType::FixedSizeList(field.clone(), 2), |list| list.len(1));
    let structs = with_child(array, DataType::Struct(vec![field.clone()].into()), |list| list.len(2));
    let nullable = |array: &ArrayRef| Field::new("c", array.data_type().clone(), true);
    vec![
        ("top", field.as_ref().clone().with_name("c"), array.clone()),
        ("list", nullable(&list), list),
        ("list view", nullable(&view), view),
        ("fixed-size list", nullable(&fixed), fixed),
        ("struct", nullable(&structs), structs),
    ]
}

fn upload(field: Field, array: ArrayRef) -> Result<Vec<RecordBatch>> {
    let nullable = Arc::new(Schema::new(vec![field.clone().with_nullable(true)]));
    let schema = Schema::new(vec![field]);
    // Arrow checks batches as they are made, so only the schema that is sent first declares fields
    // that may not be null.
    let batch = RecordBatch::try_new(nullable, vec![array]).unwrap();
    decode_messages(messages(&schema, &[batch], &like_pyarrow()), &arena())
}

#[test]
fn nulls_without_a_bitmap_are_refused_in_non_nullable_fields() {
    for (kind, array) in kinds(true) {
        for (place, field, array) in places(&array) {
            let refusal = upload(field, array).expect_err(&format!("{kind} in {place}"));
            assert!(
                refusal.message().contains("is declared not null, and its value 1 is null"),
                "{kind} in {place}: {refusal}"
            );
            assert!(matches!(refusal, crate::Error::Invalid(_)), "{kind} in {place}: {refusal:?}");
        }
    }
    for (kind, array) in kinds(false) {
        for (place, field, array) in places(&array) {
            let came = upload(field, array.clone()).unwrap_or_else(|error| panic!("{kind} in {place}: {error}"));
            assert_eq!(came[0].column(0), &array, "{kind} in {place}");
        }
    }
}

#[test]
fn a_non_nullable_column_of_the_null_type_is_refused() {
    let nulls: ArrayRef = Arc::new(NullArray::new(2));
    let refusal = upload(Field::new("c", DataType::Null, false), nulls).unwrap_err();
    assert!(refusal.message().contains("is declared not null"), "{refusal}");
}

#[test]
fn nulls_that_no_row_uses_are_accepted() {
    let two = || Arc::new(Int32Array::from(vec![Some(1), None])) as ArrayRef;
    let unused: ArrayRef = Arc::new(DictionaryArray::try_new(Int8Array::from(vec![0, 0]), two()).unwrap());
    let fields = UnionFields::try_new(
        [0, 1],
        [Field::new("a", DataType::Int32, false), Field::new("b", DataType::Int32, false)],
    );
    let other = Arc::new(Int32Array::from(vec![None, Some(2)]));
    let union = UnionArray::try_new(fields.unwrap(), vec![0i8, 1].into(), None, vec![two(), other]).unwrap();
    let unselected: ArrayRef = Arc::new(union);
    for array in [unused, unselected] {
        for (place, field, array) in places(&array) {
            let came = upload(field, array.clone()).unwrap_or_else(|error| panic!("{place}: {error}"));
            assert_eq!(came[0].column(0), &array, "{place}");
            // An accepted batch can be sent in slices.
            let sent = crate::service::compact::compact(&came[0].slice(0, 1));
            assert_eq!(sent.unwrap().column(0), &array.slice(0, 1), "{place}");
        }
    }
    // The null of a struct hides the one below it.
    let hidden = DictionaryArray::try_new(Int8Array::from(vec![0, 1]), two()).unwrap();
    let field = Arc::new(Field::new("d", hidden.data_type().clone(), false));
    let nulls = Some(NullBuffer::from(vec![true, false]));
    let structs: ArrayRef = Arc::new(StructArray::try_new(vec![field].into(), vec![Arc::new(hidden)], nulls).unwrap());
    let came = upload(Field::new("c", structs.data_type().clone(), true), structs.clone()).unwrap();
    assert_eq!(came[0].column(0), &structs);
}
