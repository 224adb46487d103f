//! Rows of arrays as text, read value by value, without the kernels and slices of any library.

use std::fmt::Write;

use arrow::array::{Array, AsArray};
use arrow::datatypes::{ArrowNativeType, DataType, Int16Type, Int32Type, Int64Type, UnionMode};

/// Returns the value of a row. A null in the values of a dictionary or of runs is a null. A union
/// includes the selected child.
pub fn value(array: &dyn Array, row: usize) -> String {
    let mut text = String::new();
    write_value(array, row, &mut text);
    text
}

/// Returns the values of all rows.
pub fn values(array: &dyn Array) -> Vec<String> {
    (0..array.len()).map(|row| value(array, row)).collect()
}

fn write_value(array: &dyn Array, row: usize, text: &mut String) {
    use DataType as T;
    if array.is_null(row) {
        return text.push_str("null");
    }
    match array.data_type() {
        T::Null => text.push_str("null"),
        T::Boolean => write!(text, "{}", array.as_boolean().value(row)).unwrap(),
        T::Utf8 => write!(text, "{:?}", array.as_string::<i32>().value(row)).unwrap(),
        T::LargeUtf8 => write!(text, "{:?}", array.as_string::<i64>().value(row)).unwrap(),
        T::Utf8View => write!(text, "{:?}", array.as_string_view().value(row)).unwrap(),
        T::Binary => write_bytes(array.as_binary::<i32>().value(row), text),
        T::LargeBinary => write_bytes(array.as_binary::<i64>().value(row), text),
        T::BinaryView => write_bytes(array.as_binary_view().value(row), text),
        T::FixedSizeBinary(_) => write_bytes(array.as_fixed_size_binary().value(row), text),
        T::List(_) => {
            let list = array.as_list::<i32>();
            write_list(list.values(), list.offsets()[row].as_usize()..list.offsets()[row + 1].as_usize(), text);
        }
        T::LargeList(_) => {
            let list = array.as_list::<i64>();
            write_list(list.values(), list.offsets()[row].as_usize()..list.offsets()[row + 1].as_usize(), text);
        }
        T::ListView(_) => {
            let list = array.as_list_view::<i32>();
            let start = list.offsets()[row].as_usize();
            write_list(list.values(), start..start + list.sizes()[row].as_usize(), text);
        }
        T::LargeListView(_) => {
            let list = array.as_list_view::<i64>();
            let start = list.offsets()[row].as_usize();
            write_list(list.values(), start..start + list.sizes()[row].as_usize(), text);
        }
        T::FixedSizeList(_, size) => {
            let size = *size as usize;
            write_list(array.as_fixed_size_list().values(), row * size..(row + 1) * size, text);
        }
        T::Map(..) => {
            let map = array.as_map();
            write_list(map.entries(), map.offsets()[row].as_usize()..map.offsets()[row + 1].as_usize(), text);
        }
        T::Struct(fields) => {
            text.push('{');
            for (field, column) in fields.iter().zip(array.as_struct().columns()) {
                write!(text, "{}: ", field.name()).unwrap();
                write_value(column, row, text);
                text.push_str(", ");
            }
            text.push('}');
        }
        T::Union(_, mode) => {
            let union = array.as_union();
            let id = union.type_ids()[row];
            write!(text, "{id}=").unwrap();
            let place = if *mode == UnionMode::Dense { union.offsets().unwrap()[row].as_usize() } else { row };
            write_value(union.child(id), place, text);
        }
        T::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            write_value(dictionary.values(), dictionary.normalized_keys()[row], text);
        }
        T::RunEndEncoded(ends, _) => match ends.data_type() {
            T::Int16 => {
                let runs = array.as_run::<Int16Type>();
                write_value(runs.values(), runs.get_physical_index(row), text);
            }
            T::Int32 => {
                let runs = array.as_run::<Int32Type>();
                write_value(runs.values(), runs.get_physical_index(row), text);
            }
            _ => {
                let runs = array.as_run::<Int64Type>();
                write_value(runs.values(), runs.get_physical_index(row), text);
            }
        },
        fixed => {
            let width = fixed.primitive_width().unwrap();
            let data = array.to_data();
            let start = (data.offset() + row) * width;
            write_bytes(&data.buffers()[0][start..start + width], text);
        }
    }
}

fn write_list(values: &dyn Array, rows: std::ops::Range<usize>, text: &mut String) {
    text.push('[');
    for row in rows {
        write_value(values, row, text);
        text.push_str(", ");
    }
    text.push(']');
}

fn write_bytes(bytes: &[u8], text: &mut String) {
    bytes.iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
    text.push('b');
}
