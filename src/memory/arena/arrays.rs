//! Arrow arrays built from buffers without a full check. Either another process that sees the same
//! slabs has described an array by the places of its buffers. Or this process assembles an array
//! from values that were checked before.

use arrow::array::ArrayData;
use arrow::buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow::datatypes::DataType;
use serde::{Deserialize, Serialize};

use super::Place;
use crate::{Error, Result};

/// Description of an array without its type, with places instead of buffers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayParts {
    len: usize,
    offset: usize,
    nulls: Option<NullParts>,
    buffers: Vec<Place>,
    children: Vec<ArrayParts>,
}

impl ArrayParts {
    /// Bytes that travel with the description, because they are in no slab that both processes see.
    pub fn sent_bytes(&self) -> usize {
        let mut sent = 0;
        self.each_place(&mut |place| {
            if let Place::Bytes(bytes) = place {
                sent += bytes.len();
            }
        });
        sent
    }

    /// Calls `show` with every place of the array.
    pub fn each_place<'a>(&'a self, show: &mut dyn FnMut(&'a Place)) {
        if let Some(nulls) = &self.nulls {
            show(&nulls.place);
        }
        self.buffers.iter().for_each(&mut *show);
        self.children.iter().for_each(|child| child.each_place(show));
    }
}

/// Validity of the values: one bit each, from bit `offset` of the place on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct NullParts {
    place: Place,
    offset: usize,
    len: usize,
    null_count: usize,
}

/// Describes an array by its parts. `place_of` returns the place of a buffer.
pub fn describe(array: &ArrayData, place_of: &dyn Fn(&Buffer) -> Place) -> ArrayParts {
    let nulls = array.nulls().map(|nulls| NullParts {
        place: place_of(nulls.buffer()),
        offset: nulls.offset(),
        len: nulls.len(),
        null_count: nulls.null_count(),
    });
    ArrayParts {
        len: array.len(),
        offset: array.offset(),
        nulls,
        buffers: array.buffers().iter().map(place_of).collect(),
        children: array.child_data().iter().map(|child| describe(child, place_of)).collect(),
    }
}

/// Rebuilds the array of the given type from its parts. `find` returns the buffer at a place. The
/// sending process runs the same program and has checked the values. This process does not check
/// them again, because tables have billions of values.
///
/// # Errors
/// The errors of `find`, and [`Error::Internal`] when the parts belong to another type.
pub fn restore(data_type: &DataType, parts: &ArrayParts, find: &dyn Fn(&Place) -> Result<Buffer>) -> Result<ArrayData> {
    let types = child_types(data_type);
    if types.len() != parts.children.len() {
        return Err(Error::Internal(format!(
            "an array of type {data_type} has {} child arrays, and not {}",
            types.len(),
            parts.children.len()
        )));
    }
    let children = types.into_iter().zip(&parts.children).map(|(child, parts)| restore(child, parts, find));
    let buffers = parts.buffers.iter().map(find);
    let mut array = ArrayData::builder(data_type.clone())
        .len(parts.len)
        .offset(parts.offset)
        .buffers(buffers.collect::<Result<_>>()?)
        .child_data(children.collect::<Result<_>>()?);
    if let Some(nulls) = &parts.nulls {
        let bits = BooleanBuffer::new(find(&nulls.place)?, nulls.offset, nulls.len);
        // SAFETY: the process that counted the nulls read the same bits.
        array = array.nulls(Some(unsafe { NullBuffer::new_unchecked(bits, nulls.null_count) }));
    }
    // SAFETY: lengths, offsets and values come from an array of the other process, which runs this
    // same program.
    let array = unsafe { array.build_unchecked() };
    // Still run the checks that cost nothing per row, so that a faulty child cannot stop this
    // process.
    array.validate().map_err(|error| Error::Internal(format!("an array from another process is invalid: {error}")))?;
    Ok(array)
}

/// Assembles an array of values of variable length. Each value is empty, or a whole value of a
/// checked array of the given type. Values are not checked again, because results have billions of
/// values. `offsets` have the type's width, and ascend from 0 to the length of `values`. `nulls`
/// are validity bits, 0 for a null, and the number of nulls. The caller guarantees all of this,
/// because invalid text would not be noticed here.
///
/// # Errors
/// [`Error::Internal`] when offsets or values are too short for `rows`, or the type is not of
/// variable length.
///
/// # Panics
/// When `nulls` has fewer bits than `rows`.
pub(crate) fn of_whole_values(
    data_type: &DataType,
    rows: usize,
    offsets: Buffer,
    values: Buffer,
    nulls: Option<(Buffer, usize)>,
) -> Result<ArrayData> {
    let failed =
        |error: &dyn std::fmt::Display| Error::Internal(format!("assembling a column of {data_type}: {error}"));
    if !matches!(data_type, DataType::Utf8 | DataType::LargeUtf8 | DataType::Binary | DataType::LargeBinary) {
        return Err(failed(&"its values are not of variable length"));
    }
    let mut array = ArrayData::builder(data_type.clone()).len(rows).add_buffer(offsets).add_buffer(values);
    if let Some((bits, null_count)) = nulls {
        array = array.null_bit_buffer(Some(bits)).null_count(null_count);
    }
    // SAFETY: the gathering code writes each value whole, from its own offset on. So text stays
    // valid text.
    let array = unsafe { array.build_unchecked() };
    // Still run the checks that cost nothing per row.
    array.validate().map_err(|error| failed(&error))?;
    Ok(array)
}

/// Returns the types of an array's child arrays.
fn child_types(data_type: &DataType) -> Vec<&DataType> {
    match data_type {
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::ListView(field)
        | DataType::LargeListView(field)
        | DataType::FixedSizeList(field, _)
        | DataType::Map(field, _) => vec![field.data_type()],
        DataType::Struct(fields) => fields.iter().map(|field| field.data_type()).collect(),
        DataType::Union(fields, _) => fields.iter().map(|(_, field)| field.data_type()).collect(),
        DataType::Dictionary(_, values) => vec![values],
        DataType::RunEndEncoded(ends, values) => vec![ends.data_type(), values.data_type()],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{
        Array, ArrayRef, BooleanArray, Date32Array, Decimal128Array, DictionaryArray, FixedSizeBinaryArray, Int32Array,
        Int64Array, ListArray, MapBuilder, NullArray, RunArray, StringArray, StringViewArray, StructArray, UnionArray,
        make_array,
    };
    use arrow::buffer::ScalarBuffer;
    use arrow::datatypes::{Field, Int32Type, UnionFields};

    use super::*;

    fn arrays() -> Vec<ArrayRef> {
        let numbers: Int32Array = (0..100).map(|at| (at % 3 > 0).then_some(at)).collect();
        let words: Vec<Option<String>> =
            (0..100).map(|at| (at % 4 > 0).then(|| format!("a word of {at} letters"))).collect();
        let lists: Vec<Option<Vec<Option<i32>>>> =
            (0..100).map(|at| (at % 5 > 0).then(|| (0..at % 7).map(Some).collect())).collect();
        let mut maps = MapBuilder::new(None, arrow::array::StringBuilder::new(), arrow::array::Int32Builder::new());
        for at in 0..100 {
            maps.keys().append_value(format!("k{at}"));
            maps.values().append_value(at);
            maps.append(at % 2 == 0).unwrap();
        }
        let fields = vec![
            (Arc::new(Field::new("n", DataType::Int32, true)), Arc::new(numbers.clone()) as ArrayRef),
            (
                Arc::new(Field::new("b", DataType::Boolean, true)),
                Arc::new(BooleanArray::from(vec![true; 100])) as ArrayRef,
            ),
        ];
        let union_fields =
            UnionFields::from_fields([Field::new("n", DataType::Int32, true), Field::new("w", DataType::Int64, true)]);
        let union = UnionArray::try_new(
            union_fields,
            ScalarBuffer::from((0..100).map(|at| (at % 2) as i8).collect::<Vec<_>>()),
            None,
            vec![Arc::new(numbers.clone()), Arc::new(Int64Array::from((0..100).collect::<Vec<_>>()))],
        );
        vec![
            Arc::new(numbers.clone()),
            Arc::new(numbers.slice(3, 50)),
            Arc::new((0..100).map(|at| (at % 3 > 0).then_some(at % 2 == 0)).collect::<BooleanArray>().slice(5, 60)),
            Arc::new(Decimal128Array::from((0..100).map(|at| i128::from(at) << 70).collect::<Vec<_>>())),
            Arc::new(Date32Array::from((0..100).collect::<Vec<_>>())),
            Arc::new(StringArray::from(words.clone()).slice(7, 80)),
            Arc::new(StringViewArray::from_iter(words.clone()).slice(7, 80)),
            Arc::new(FixedSizeBinaryArray::try_from_iter((0..100u8).map(|at| [at; 5])).unwrap()),
            Arc::new(words.iter().map(|word| word.as_deref()).collect::<DictionaryArray<Int32Type>>()),
            Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists).slice(9, 70)),
            Arc::new(maps.finish()),
            Arc::new(StructArray::from(fields).slice(11, 30)),
            Arc::new(union.unwrap()),
            Arc::new(
                RunArray::<Int32Type>::try_new(
                    &Int32Array::from(vec![2, 5, 9]),
                    &StringArray::from(vec!["a", "b", "c"]),
                )
                .unwrap(),
            ),
            Arc::new(NullArray::new(10)),
            Arc::new(Int32Array::from(Vec::<i32>::new())),
        ]
    }

    #[test]
    fn arrays_of_every_shape_are_rebuilt_from_their_parts() {
        for array in arrays() {
            let place_of = |buffer: &Buffer| Place::Bytes(buffer.to_vec());
            let find = |place: &Place| match place {
                Place::Bytes(bytes) => Ok(Place::aligned(bytes)),
                Place::Slab { .. } => unreachable!("all buffers are sent as bytes"),
            };
            let parts = describe(&array.to_data(), &place_of);
            let restored = restore(array.data_type(), &parts, &find).unwrap();
            restored.validate_full().unwrap();
            assert_eq!(&make_array(restored), &array);
        }
    }

    #[test]
    fn parts_of_another_type_are_refused() {
        let array = Int32Array::from(vec![1, 2]);
        let parts = describe(&array.to_data(), &|buffer| Place::Bytes(buffer.to_vec()));
        let find = |_: &Place| Ok(Buffer::from(vec![0u8; 8]));
        let list = DataType::new_list(DataType::Int32, true);
        assert!(restore(&list, &parts, &find).unwrap_err().message().contains("has 1 child arrays, and not 0"));
    }
}
