//! Schema of an upload: read from a client's flatbuffer, and checked before other code relies on
//! it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::datatypes::{
    DataType, Decimal32Type, Decimal64Type, Decimal128Type, Decimal256Type, Field, Schema, SchemaRef,
    validate_decimal_precision_and_scale,
};
use arrow::ipc;

use crate::human::type_name;
use crate::{Context, Error, Result, columns};

/// Maximum nesting of types. Deeper types would cost stack in all code that walks a type.
const NESTING_MAX: usize = 32;

/// Schema, and the value types of its dictionaries.
#[derive(Clone, Debug)]
pub(super) struct StreamSchema {
    /// Columns, their types and their metadata as the client sent them.
    pub schema: SchemaRef,
    /// Value type of each dictionary by its number, nested dictionaries included.
    pub dictionary_values: HashMap<i64, DataType>,
}

/// Reads a verified flatbuffer schema. The caller must catch the library's panics on unknown types.
///
/// # Errors
/// [`Error::Invalid`] for a schema that contradicts itself, [`Error::Unsupported`] for big-endian
/// data.
pub(super) fn read_schema(message: ipc::Schema<'_>) -> Result<StreamSchema> {
    if message.endianness() != ipc::Endianness::Little {
        return Err(Error::Unsupported(
            "the schema says that the data is big-endian; send it in little-endian order (Arrow's default)".into(),
        ));
    }
    if message.fields().is_none() {
        return Err(Error::Invalid("the schema lists no fields, not even an empty list".into()));
    }
    let schema = ipc::convert::fb_to_schema(message);
    check_names(&schema)?;
    let mut dictionary_values = HashMap::new();
    for field in schema.fields() {
        check_type(field.data_type(), 1)
            .and_then(|()| collect_dictionaries(field, &mut dictionary_values))
            .context(|| format!("column {:?}", field.name()))?;
    }
    Ok(StreamSchema { schema: Arc::new(schema), dictionary_values })
}

/// Refuses columns that share a name, because joins refer to columns by name.
fn check_names(schema: &Schema) -> Result<()> {
    let mut names = HashSet::with_capacity(schema.fields().len());
    match schema.fields().iter().find(|field| !names.insert(field.name())) {
        None => Ok(()),
        Some(field) => Err(Error::Invalid(format!(
            "the schema has two columns named {:?}; rename one, since joins refer to columns by name",
            field.name()
        ))),
    }
}

fn check_type(data_type: &DataType, depth: usize) -> Result<()> {
    use DataType as T;
    if depth > NESTING_MAX {
        return Err(Error::Invalid(format!("the type is nested deeper than {NESTING_MAX} levels")));
    }
    let check_field = |field: &Field| check_type(field.data_type(), depth + 1);
    match data_type {
        T::FixedSizeBinary(len) if *len < 0 => Err(wrong(data_type, "its length is negative")),
        T::FixedSizeList(_, len) if *len < 0 => Err(wrong(data_type, "its length is negative")),
        T::Decimal32(precision, scale) => {
            Ok(validate_decimal_precision_and_scale::<Decimal32Type>(*precision, *scale)?)
        }
        T::Decimal64(precision, scale) => {
            Ok(validate_decimal_precision_and_scale::<Decimal64Type>(*precision, *scale)?)
        }
        T::Decimal128(precision, scale) => {
            Ok(validate_decimal_precision_and_scale::<Decimal128Type>(*precision, *scale)?)
        }
        T::Decimal256(precision, scale) => {
            Ok(validate_decimal_precision_and_scale::<Decimal256Type>(*precision, *scale)?)
        }
        T::List(field)
        | T::LargeList(field)
        | T::ListView(field)
        | T::LargeListView(field)
        | T::FixedSizeList(field, _) => check_field(field),
        T::Struct(fields) => fields.iter().try_for_each(|field| check_field(field)),
        T::Union(fields, _) => fields.iter().try_for_each(|(_, field)| check_field(field)),
        T::Map(entries, _) => match entries.data_type() {
            T::Struct(pair) if pair.len() == 2 && !pair[0].is_nullable() && !entries.is_nullable() => {
                check_field(entries)
            }
            _ => Err(wrong(data_type, "its entries are not a non-nullable struct of a non-nullable key and a value")),
        },
        T::RunEndEncoded(run_ends, values) => {
            if run_ends.is_nullable() || !run_ends.data_type().is_run_ends_type() {
                return Err(wrong(data_type, "its run ends are not non-nullable int16, int32 or int64"));
            }
            check_field(values)
        }
        T::Dictionary(keys, values) => {
            if !keys.is_dictionary_key_type() {
                return Err(wrong(data_type, "its keys are not integers"));
            }
            check_type(values, depth + 1)
        }
        _ => Ok(()),
    }
}

fn wrong(data_type: &DataType, what: &str) -> Error {
    Error::Invalid(format!("type {} is not well-formed: {what}", type_name(data_type)))
}

/// Collects the value type of each dictionary of a column. Columns may share a dictionary, if they
/// agree on its type.
fn collect_dictionaries(field: &Field, values_by_id: &mut HashMap<i64, DataType>) -> Result<()> {
    if let (Some(id), DataType::Dictionary(_, values)) = (dictionary_id(field), field.data_type()) {
        match values_by_id.insert(id, values.as_ref().clone()) {
            Some(other) if other != **values => {
                return Err(Error::Invalid(format!(
                    "dictionary {id} holds values of type {} for one column and of type {} for another",
                    type_name(&other),
                    type_name(values)
                )));
            }
            _ => {}
        }
    }
    children(field.data_type()).into_iter().try_for_each(|child| collect_dictionaries(child, values_by_id))
}

/// Returns the fields directly inside a type. For a dictionary, returns the fields inside the value
/// type, because the values have no field of their own.
fn children(data_type: &DataType) -> Vec<&Field> {
    match data_type {
        DataType::Dictionary(_, values) => children(values),
        other => columns::children(other),
    }
}

/// Returns the number of a column's dictionary in the stream; `None` without a dictionary.
pub(super) fn dictionary_id(field: &Field) -> Option<i64> {
    // The method is deprecated because a number has no meaning outside of its stream. Inside of the
    // stream, arrow offers no other way to read it.
    #[expect(deprecated)]
    field.dict_id()
}
