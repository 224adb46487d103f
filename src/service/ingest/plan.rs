//! Layout of a record batch, known from its flatbuffer header before the first byte of its body.
//!
//! A header lists nodes (a length and a null count per array, parents before children) and buffers
//! (ranges of the body, in the same order). The type of an array determines its buffers: Arrow
//! columnar format, "Physical Memory Layout" and "Recursive Message Listings". Every value of the
//! header is checked here, against the type and against the length of the body. So later steps
//! allocate and copy without further checks.

use std::ops::Range;

use arrow::datatypes::{DataType, Field, Fields, UnionMode};
use arrow::ipc;

use super::schema::dictionary_id;
use crate::human::type_name;
use crate::{Context, Error, Result};

/// Maximum number of rows of one batch. Arrow asks senders not to exceed it, because some languages
/// count in 32 bits. Without a limit, types without buffers (null, empty structs) could claim any
/// number at no cost.
const ROWS_MAX: u64 = i32::MAX as u64;

/// Maximum number of elements of a nested array. Only arrays of types without buffers could claim
/// more.
const ELEMENTS_MAX: u64 = 1 << 40;

/// Size of a view of a string or a binary.
pub(super) const VIEW_BYTES: usize = 16;

/// Plan of one record batch (or dictionary), made from its header.
#[derive(Debug)]
pub(super) struct BatchPlan {
    pub rows: usize,
    pub columns: Vec<ArrayPlan>,
    /// One per buffer that the header lists.
    pub buffers: Vec<BufferPlan>,
    pub compression: Option<ipc::CompressionType>,
}

/// Plan of one array: its type, and its buffers.
#[derive(Debug)]
pub(super) struct ArrayPlan {
    pub data_type: DataType,
    pub rows: usize,
    pub null_count: usize,
    /// Index of the validity bitmap in [`BatchPlan::buffers`]; `None` when there are no nulls.
    pub validity: Option<usize>,
    /// Indexes of the other buffers.
    pub buffers: Range<usize>,
    pub children: Vec<ArrayPlan>,
    /// Number of the array's dictionary. Its values become one more child of the array.
    pub dictionary: Option<i64>,
}

/// Plan of one buffer of the body.
#[derive(Debug)]
pub(super) struct BufferPlan {
    /// Range in the body, in bytes.
    pub source: Range<usize>,
    pub need: Need,
}

/// Bytes of a buffer that its array uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// No bytes: the validity bitmap of an array without nulls, for instance.
    Nothing,
    /// Exactly this many bytes. If the sender sent more, they are padding.
    Bytes(usize),
    /// All bytes that were sent: other buffers determine the size of the values.
    All,
}

impl BatchPlan {
    /// Returns the bytes that validation of the batch reads or writes, at most. Columns of numbers
    /// need no validation and do not count.
    pub fn checked_bytes(&self) -> usize {
        let checked = self.columns.iter().filter(|column| !column.data_type.is_primitive());
        checked.map(|column| self.checked_bytes_of(column)).fold(0, usize::saturating_add)
    }

    fn checked_bytes_of(&self, array: &ArrayPlan) -> usize {
        let buffers = &self.buffers[array.buffers.clone()];
        let own = match array.data_type {
            // Each view may refer to a whole buffer.
            DataType::Utf8View | DataType::BinaryView => {
                let longest = buffers.iter().skip(1).map(|buffer| buffer.source.len()).max().unwrap_or(0);
                array.rows.saturating_mul(VIEW_BYTES.saturating_add(longest))
            }
            _ => buffers.iter().map(|buffer| buffer.source.len()).sum(),
        };
        // A bitmap of the nulls, which some types do not send.
        let own = own.saturating_add(array.rows / 8);
        array.children.iter().map(|child| self.checked_bytes_of(child)).fold(own, usize::saturating_add)
    }
}

impl BufferPlan {
    /// Returns the number of bytes that the array uses, of `sent` bytes after decompression.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the array needs more than `sent` bytes.
    pub fn used_bytes(&self, sent: usize) -> Result<usize> {
        match self.need {
            Need::Nothing => Ok(0),
            Need::All => Ok(sent),
            Need::Bytes(bytes) if bytes <= sent => Ok(bytes),
            Need::Bytes(bytes) => {
                Err(Error::Invalid(format!("a buffer of {sent} bytes is too short: its array needs {bytes}")))
            }
        }
    }
}

/// Plans a record batch with columns `fields` whose body has `body_len` bytes.
///
/// # Errors
/// [`Error::Invalid`] when the header contradicts the schema, the body or itself.
pub(super) fn plan_batch(
    header: ipc::RecordBatch<'_>,
    version: ipc::MetadataVersion,
    fields: &Fields,
    body_len: usize,
) -> Result<BatchPlan> {
    let mut reader = Reader::new(header, version, body_len)?;
    let rows = count(header.length(), ROWS_MAX, "rows of a batch")?;
    let columns = fields
        .iter()
        .map(|field| {
            let column = reader.array(field)?;
            check_rows(column.rows, rows).map(|()| column).context(|| format!("column {:?}", field.name()))
        })
        .collect::<Result<_>>()?;
    let (nodes_left, variadic_left) = (reader.nodes.len(), reader.variadic.len());
    if nodes_left > 0 || variadic_left > 0 || reader.next_buffer < reader.buffers.len() {
        return Err(Error::Invalid(format!(
            "the batch lists more than its {} columns need: {nodes_left} arrays, {} buffers and {variadic_left} counts of \
             variadic buffers are left over",
            fields.len(),
            reader.buffers.len() - reader.next_buffer,
        )));
    }
    let compression = header.compression().map(|compression| compression.codec());
    let plan = BatchPlan { rows, columns, buffers: reader.buffers, compression };
    check_overlap(&plan.buffers)?;
    if compression.is_none() {
        for buffer in &plan.buffers {
            buffer.used_bytes(buffer.source.len())?;
        }
    }
    Ok(plan)
}

/// Reads types and header in step.
struct Reader {
    nodes: std::vec::IntoIter<(usize, usize)>,
    variadic: std::vec::IntoIter<i64>,
    buffers: Vec<BufferPlan>,
    next_buffer: usize,
    unions_have_validity: bool,
}

impl Reader {
    fn new(header: ipc::RecordBatch<'_>, version: ipc::MetadataVersion, body_len: usize) -> Result<Self> {
        let nodes = header.nodes().into_iter().flatten().map(|node| {
            let rows = count(node.length(), ELEMENTS_MAX, "elements of an array")?;
            let nulls = count(node.null_count(), rows as u64, "nulls of an array")?;
            Ok((rows, nulls))
        });
        let buffers = header.buffers().into_iter().flatten().map(|buffer| {
            let offset = count(buffer.offset(), u64::MAX, "bytes before a buffer")?;
            let len = count(buffer.length(), u64::MAX, "bytes of a buffer")?;
            // The offset of an empty buffer has no meaning, and some senders write arbitrary values
            // there.
            let source = if len == 0 { 0..0 } else { offset..offset.saturating_add(len) };
            match source.end <= body_len {
                true => Ok(BufferPlan { source, need: Need::Nothing }),
                false => Err(Error::Invalid(format!(
                    "a buffer of {len} bytes at offset {offset} is outside the body of {body_len} bytes"
                ))),
            }
        });
        Ok(Self {
            nodes: nodes.collect::<Result<Vec<_>>>()?.into_iter(),
            variadic: header.variadicBufferCounts().into_iter().flatten().collect::<Vec<_>>().into_iter(),
            buffers: buffers.collect::<Result<_>>()?,
            next_buffer: 0,
            // Before version 5 of the format, unions have validity bitmaps.
            unions_have_validity: version < ipc::MetadataVersion::V5,
        })
    }

    fn array(&mut self, field: &Field) -> Result<ArrayPlan> {
        self.array_inner(field).context(|| format!("column {:?}", field.name()))
    }

    fn array_inner(&mut self, field: &Field) -> Result<ArrayPlan> {
        let data_type = field.data_type();
        let (rows, null_count) = self.node()?;
        let validity = match data_type {
            DataType::Null | DataType::RunEndEncoded(_, _) => None,
            DataType::Union(_, _) if self.unions_have_validity => {
                self.buffer(Need::Nothing)?;
                None
            }
            DataType::Union(_, _) => None,
            _ => self.validity(rows, null_count)?,
        };
        let first_buffer = self.next_buffer;
        self.own_buffers(data_type, rows)?;
        Ok(ArrayPlan {
            data_type: data_type.clone(),
            rows,
            null_count: if validity.is_some() { null_count } else { 0 },
            validity,
            buffers: first_buffer..self.next_buffer,
            children: self.children(data_type, rows)?,
            dictionary: dictionary_id(field),
        })
    }

    /// Plans the buffers of an array itself, after its validity.
    fn own_buffers(&mut self, data_type: &DataType, rows: usize) -> Result<()> {
        use DataType as T;
        match data_type {
            T::Null | T::Struct(_) | T::FixedSizeList(_, _) | T::RunEndEncoded(_, _) => Ok(()),
            T::Boolean => self.buffer(Need::Bytes(rows.div_ceil(8))),
            T::Utf8 | T::Binary => {
                self.offsets(rows, 4)?;
                self.buffer(Need::All)
            }
            T::LargeUtf8 | T::LargeBinary => {
                self.offsets(rows, 8)?;
                self.buffer(Need::All)
            }
            T::Utf8View | T::BinaryView => {
                self.fixed(rows, VIEW_BYTES)?;
                (0..self.variadic_count()?).try_for_each(|_| self.buffer(Need::All))
            }
            T::FixedSizeBinary(width) => self.fixed(rows, *width as usize),
            T::List(_) | T::Map(_, _) => self.offsets(rows, 4),
            T::LargeList(_) => self.offsets(rows, 8),
            T::ListView(_) => [4, 4].into_iter().try_for_each(|width| self.fixed(rows, width)),
            T::LargeListView(_) => [8, 8].into_iter().try_for_each(|width| self.fixed(rows, width)),
            T::Union(_, UnionMode::Sparse) => self.fixed(rows, 1),
            T::Union(_, UnionMode::Dense) => [1, 4].into_iter().try_for_each(|width| self.fixed(rows, width)),
            T::Dictionary(keys, _) => self.fixed(rows, primitive_width(keys)?),
            primitive => self.fixed(rows, primitive_width(primitive)?),
        }
    }

    /// Plans the arrays inside an array. Each has the number of elements that the array needs.
    fn children(&mut self, data_type: &DataType, rows: usize) -> Result<Vec<ArrayPlan>> {
        use DataType as T;
        match data_type {
            // Offsets select the used elements; they are checked once they have arrived.
            T::List(child) | T::LargeList(child) | T::ListView(child) | T::LargeListView(child) | T::Map(child, _) => {
                Ok(vec![self.array(child)?])
            }
            T::FixedSizeList(child, len) => {
                Ok(vec![self.child(child, rows.checked_mul(*len as usize).ok_or_else(too_many)?)?])
            }
            T::Struct(fields) => fields.iter().map(|field| self.child(field, rows)).collect(),
            T::Union(fields, UnionMode::Sparse) => fields.iter().map(|(_, field)| self.child(field, rows)).collect(),
            T::Union(fields, UnionMode::Dense) => fields.iter().map(|(_, field)| self.array(field)).collect(),
            T::RunEndEncoded(run_ends, values) => {
                let run_ends = self.array(run_ends)?;
                let values = self.array(values)?;
                check_rows(values.rows, run_ends.rows)?;
                Ok(vec![run_ends, values])
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Plans a child with at least the elements that its parent needs. Senders may include elements
    /// that a slice left out.
    fn child(&mut self, field: &Field, rows: usize) -> Result<ArrayPlan> {
        let child = self.array(field)?;
        match child.rows >= rows {
            true => Ok(child),
            false => Err(Error::Invalid(format!(
                "column {:?}: an array has {} elements where {rows} are expected",
                field.name(),
                child.rows
            ))),
        }
    }

    fn node(&mut self) -> Result<(usize, usize)> {
        self.nodes.next().ok_or_else(|| Error::Invalid("the batch lists fewer arrays than the schema has".into()))
    }

    fn buffer(&mut self, need: Need) -> Result<()> {
        let buffer = self
            .buffers
            .get_mut(self.next_buffer)
            .ok_or_else(|| Error::Invalid("the batch lists fewer buffers than the schema needs".into()))?;
        buffer.need = need;
        self.next_buffer += 1;
        Ok(())
    }

    fn validity(&mut self, rows: usize, null_count: usize) -> Result<Option<usize>> {
        let index = self.next_buffer;
        self.buffer(if null_count == 0 { Need::Nothing } else { Need::Bytes(rows.div_ceil(8)) })?;
        Ok((null_count > 0).then_some(index))
    }

    fn fixed(&mut self, rows: usize, width: usize) -> Result<()> {
        self.buffer(Need::Bytes(rows.checked_mul(width).ok_or_else(too_many)?))
    }

    /// Plans the offsets: one more than the number of elements. An empty array may have none.
    fn offsets(&mut self, rows: usize, width: usize) -> Result<()> {
        self.fixed(if rows == 0 { 0 } else { rows + 1 }, width)
    }

    fn variadic_count(&mut self) -> Result<usize> {
        let count = self
            .variadic
            .next()
            .ok_or_else(|| Error::Invalid("the batch does not say how many data buffers its views have".into()))?;
        let left = self.buffers.len() - self.next_buffer;
        usize::try_from(count)
            .ok()
            .filter(|&count| count <= left)
            .ok_or_else(|| Error::Invalid(format!("views claim {count} data buffers, and {left} are listed")))
    }
}

fn primitive_width(data_type: &DataType) -> Result<usize> {
    let unknown = || Error::Unsupported(format!("columns of type {} are not supported", type_name(data_type)));
    data_type.primitive_width().ok_or_else(unknown)
}

fn count(value: i64, max: u64, what: &str) -> Result<usize> {
    u64::try_from(value)
        .ok()
        .filter(|&value| value <= max)
        .map(|value| value as usize)
        .ok_or_else(|| Error::Invalid(format!("{value} is not a valid number of {what}; it must be from 0 to {max}")))
}

fn check_rows(found: usize, expected: usize) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(Error::Invalid(format!("an array has {found} elements where {expected} are expected"))),
    }
}

fn too_many() -> Error {
    Error::Invalid("an array has more elements than memory has addresses".into())
}

/// Refuses buffers that share bytes: they could make a small message fill a large memory.
fn check_overlap(buffers: &[BufferPlan]) -> Result<()> {
    let mut ranges: Vec<_> = buffers.iter().map(|buffer| &buffer.source).filter(|range| !range.is_empty()).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    match ranges.windows(2).find(|pair| pair[0].end > pair[1].start) {
        None => Ok(()),
        Some(pair) => {
            Err(Error::Invalid(format!("two buffers overlap in the body: bytes {:?} and {:?}", pair[0], pair[1])))
        }
    }
}
