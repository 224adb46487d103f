//! Builds Arrow arrays from buffers that have landed. Checks every value that other code trusts.
//!
//! `ArrayData::build` validates in full. Offsets are in range and ascending, strings are UTF-8,
//! dictionary keys and union type ids exist. Runs ascend and cover the array, views point into
//! their buffers, null counts are true. Children are validated when they are built, before their
//! parents.

use std::collections::HashMap;

use arrow::array::{Array, ArrayData, ArrayRef, RecordBatch, RecordBatchOptions, make_array};
use arrow::buffer::Buffer;
use arrow::compute::concat;
use arrow::datatypes::{DataType, SchemaRef, UnionMode};

use super::landing::SLOT_ALIGNMENT;
use super::nulls::check_nulls;
use super::plan::{ArrayPlan, BatchPlan, VIEW_BYTES};
use crate::columns::any_part;
use crate::memory::{Arena, Interrupt, Reservation, human_bytes};
use crate::{Context, Error, Result};

/// Largest value that is stored inside of its view, in bytes (Arrow columnar format, "Variable-size
/// Binary View Layout").
const INLINE_VIEW_BYTES: u64 = 12;

/// Dictionaries of one stream, at its current point.
#[derive(Debug, Default)]
pub(super) struct Dictionaries {
    by_id: HashMap<i64, Dictionary>,
}

/// Dictionary: the values that were sent first, and the deltas that extend it. They are joined when
/// a batch needs them.
#[derive(Debug)]
struct Dictionary {
    parts: Vec<ArrayRef>,
}

impl Dictionaries {
    /// Takes the values of a dictionary message. Earlier batches keep the values that they were
    /// sent with.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a delta to a dictionary that was never sent.
    pub fn insert(&mut self, id: i64, values: ArrayRef, is_delta: bool) -> Result<()> {
        if !is_delta {
            // Arrow's writer sends a union inside of lists from its first value on, even if the
            // first list begins later. Joining the values with an empty array gives lists that
            // begin at the first value.
            let has_unions = any_part(values.data_type(), &|part| matches!(part, DataType::Union(..)));
            let parts = if has_unions { vec![values.slice(0, 0), values] } else { vec![values] };
            self.by_id.insert(id, Dictionary { parts });
            return Ok(());
        }
        let dictionary = self.by_id.get_mut(&id).ok_or_else(|| {
            Error::Invalid(format!("a delta extends dictionary {id}, which was not sent before in this stream"))
        })?;
        dictionary.parts.push(values);
        Ok(())
    }

    /// Returns the bytes of dictionaries that were extended, and are joined when a batch needs
    /// them.
    pub fn parts_bytes(&self) -> usize {
        let extended = self.by_id.values().filter(|dictionary| dictionary.parts.len() > 1);
        extended.flat_map(|dictionary| &dictionary.parts).map(|part| part.get_buffer_memory_size()).sum()
    }

    fn values(&mut self, id: i64, arena: &Arena) -> Result<Option<ArrayData>> {
        let Some(dictionary) = self.by_id.get_mut(&id) else { return Ok(None) };
        if dictionary.parts.len() > 1 {
            dictionary.parts = vec![join_parts(&dictionary.parts, arena)?];
        }
        Ok(Some(dictionary.parts[0].to_data()))
    }
}

/// Builds the planned record batch from the buffers that were sent for it.
///
/// # Errors
/// [`Error::Invalid`] names the column and its fault. The interrupt's.
pub(super) fn record_batch(
    plan: &BatchPlan,
    buffers: &[Buffer],
    schema: &SchemaRef,
    dictionaries: &mut Dictionaries,
    arena: &Arena,
    interrupt: &Interrupt,
) -> Result<RecordBatch> {
    let columns = plan.columns.iter().zip(schema.fields()).map(|(column, field)| {
        interrupt.check()?;
        let array = array(column, buffers, dictionaries, arena).context(|| format!("column {:?}", field.name()))?;
        check_nulls(field, &array).map(|()| array)
    });
    let options = RecordBatchOptions::new().with_row_count(Some(plan.rows));
    Ok(RecordBatch::try_new_with_options(schema.clone(), columns.collect::<Result<_>>()?, &options)?)
}

/// Builds one array of a plan from the buffers of the whole batch.
///
/// # Errors
/// As [`record_batch`].
pub(super) fn array(
    plan: &ArrayPlan,
    buffers: &[Buffer],
    dictionaries: &mut Dictionaries,
    arena: &Arena,
) -> Result<ArrayRef> {
    Ok(make_array(array_data(plan, buffers, dictionaries, arena)?))
}

/// Reserves the memory of bitmaps that only the checks of columns need. The checks of nested arrays
/// make a bit on the heap for each element, and some elements take no bytes themselves.
///
/// # Errors
/// [`Error::Exhausted`] when the arena's budget has too little.
pub(super) fn reserve_bitmaps(columns: &[ArrayPlan], arena: &Arena) -> Result<Option<Reservation>> {
    let has_bitmaps = |column: &&ArrayPlan| !column.children.is_empty() || column.data_type == DataType::Null;
    let bytes = columns.iter().filter(has_bitmaps).map(bitmap_bytes).fold(0, u64::saturating_add);
    (bytes > 0).then(|| arena.budget().reserve(bytes, "checking nulls")).transpose()
}

/// Returns the bytes of two bitmaps for each array of a plan.
fn bitmap_bytes(plan: &ArrayPlan) -> u64 {
    let own = 2 * (plan.rows as u64).div_ceil(8);
    plan.children.iter().map(bitmap_bytes).fold(own, u64::saturating_add)
}

/// Refuses views that refer to more text than a message may have. Several views may refer to the
/// same bytes, and the work on each view takes as long as if it had its own.
///
/// # Errors
/// [`Error::Exhausted`] above `limit_bytes`.
pub(super) fn check_views(columns: &[ArrayPlan], buffers: &[Buffer], limit_bytes: usize) -> Result<()> {
    let bytes = columns.iter().map(|column| viewed_bytes(column, buffers)).fold(0, u64::saturating_add);
    if bytes <= limit_bytes as u64 {
        return Ok(());
    }
    Err(Error::Exhausted(format!(
        "the views of a batch refer to {}, over the limit of {} per message; send smaller batches, a dictionary, or raise \
         the server's --message-limit",
        human_bytes(bytes),
        human_bytes(limit_bytes as u64),
    )))
}

/// Returns the bytes to which the views of a column refer. Bytes count once for each view.
fn viewed_bytes(plan: &ArrayPlan, buffers: &[Buffer]) -> u64 {
    let own = match plan.data_type {
        DataType::Utf8View | DataType::BinaryView => {
            let [views, texts @ ..] = &buffers[plan.buffers.clone()] else { return 0 };
            let longest = texts.iter().map(Buffer::len).max().unwrap_or(0) as u64;
            // The length comes first. Short values are stored inside of the view. A length that no
            // buffer has is refused later, with the name of the column.
            let lengths = views.as_chunks::<VIEW_BYTES>().0.iter();
            let lengths = lengths.map(|&[a, b, c, d, ..]| u64::from(u32::from_le_bytes([a, b, c, d])));
            lengths.filter(|length| (INLINE_VIEW_BYTES + 1..=longest).contains(length)).sum()
        }
        _ => 0,
    };
    plan.children.iter().map(|child| viewed_bytes(child, buffers)).fold(own, u64::saturating_add)
}

fn array_data(
    plan: &ArrayPlan,
    buffers: &[Buffer],
    dictionaries: &mut Dictionaries,
    arena: &Arena,
) -> Result<ArrayData> {
    if plan.rows == 0 && matches!(plan.data_type, DataType::RunEndEncoded(_, _)) {
        // Arrow's Rust writer sends an empty slice as one run that ends at 0, which is no valid
        // run.
        return Ok(ArrayData::new_empty(&plan.data_type));
    }
    let mut children = plan
        .children
        .iter()
        .map(|child| array_data(child, buffers, dictionaries, arena))
        .collect::<Result<Vec<_>>>()?;
    if let (Some(id), DataType::Dictionary(_, values)) = (plan.dictionary, &plan.data_type) {
        children.push(match dictionaries.values(id, arena)? {
            Some(values) => values,
            // The format lets a sender leave out the dictionary of a column without values.
            None if plan.null_count == plan.rows => ArrayData::new_empty(values),
            None => {
                return Err(Error::Invalid(format!(
                    "its dictionary (number {id}) was not sent before the batch that refers to it"
                )));
            }
        });
    }
    let builder = ArrayData::builder(plan.data_type.clone())
        .len(plan.rows)
        .null_bit_buffer(plan.validity.map(|index| buffers[index].clone()))
        .null_count(plan.null_count)
        .buffers(buffers[plan.buffers.clone()].to_vec())
        .child_data(children);
    let data = builder.build()?;
    check_order(&data)?;
    Ok(data)
}

/// Checks a rule of the format that `ArrayData::build` skips: the rows of a union refer to their
/// values in order. The server does not rely on this order, but clients that fetch the values may.
/// (The precision of decimals is not checked, because no memory access depends on it.)
fn check_order(data: &ArrayData) -> Result<()> {
    if !matches!(data.data_type(), DataType::Union(_, UnionMode::Dense)) {
        return Ok(());
    }
    // Place of the last value that a row had, by type id.
    let mut last = [0; i8::MAX as usize + 1];
    for (&id, &offset) in data.buffer::<i8>(0).iter().zip(data.buffer::<i32>(1)).take(data.len()) {
        let last = &mut last[id as usize];
        if offset < *last {
            return Err(Error::Invalid(format!("the offsets of a union decrease from {last} to {offset}")));
        }
        *last = offset;
    }
    Ok(())
}

/// Joins the parts of a dictionary and brings the result into the arena.
fn join_parts(parts: &[ArrayRef], arena: &Arena) -> Result<ArrayRef> {
    const PURPOSE: &str = "a dictionary that was extended";
    let bytes: usize = parts.iter().map(|part| part.to_data().get_slice_memory_size()).sum::<Result<_, _>>()?;
    // The joined values are on the heap for a moment, so that memory is reserved too.
    let _transient = arena.budget().reserve(bytes as u64, PURPOSE)?;
    let parts: Vec<&dyn Array> = parts.iter().map(AsRef::as_ref).collect();
    let joined = concat(&parts)?.to_data();
    let mut len = 0;
    buffer_bytes(&joined, &mut len);
    let mut piece = arena.allocate(len, PURPOSE)?;
    let mut slots = Vec::new();
    copy_buffers(&joined, &mut piece, &mut slots, &mut 0);
    let whole = piece.freeze();
    let mut landed = slots.into_iter().map(|(start, len)| whole.slice_with_length(start, len));
    Ok(make_array(replace_buffers(&joined, &mut landed)?))
}

fn all_buffers(data: &ArrayData) -> impl Iterator<Item = &Buffer> {
    data.buffers().iter().chain(data.nulls().map(|nulls| nulls.buffer()))
}

fn buffer_bytes(data: &ArrayData, bytes: &mut usize) {
    *bytes += all_buffers(data).map(|buffer| buffer.len().next_multiple_of(SLOT_ALIGNMENT)).sum::<usize>();
    data.child_data().iter().for_each(|child| buffer_bytes(child, bytes));
}

fn copy_buffers(data: &ArrayData, piece: &mut [u8], slots: &mut Vec<(usize, usize)>, end: &mut usize) {
    for buffer in all_buffers(data) {
        piece[*end..*end + buffer.len()].copy_from_slice(buffer);
        slots.push((*end, buffer.len()));
        *end += buffer.len().next_multiple_of(SLOT_ALIGNMENT);
    }
    data.child_data().iter().for_each(|child| copy_buffers(child, piece, slots, end));
}

/// Returns the array with other buffers of the same bytes. `landed` has them in the order of
/// [`all_buffers`], parents first.
fn replace_buffers(data: &ArrayData, landed: &mut impl Iterator<Item = Buffer>) -> Result<ArrayData> {
    const SAME: &str = "one buffer was copied for each that there is";
    let buffers = data.buffers().iter().map(|_| landed.next().expect(SAME)).collect();
    let nulls = data.nulls().map(|nulls| {
        let bits = arrow::buffer::BooleanBuffer::new(landed.next().expect(SAME), nulls.offset(), nulls.len());
        arrow::buffer::NullBuffer::new(bits)
    });
    let children = data.child_data().iter().map(|child| replace_buffers(child, landed)).collect::<Result<_>>()?;
    let builder = ArrayData::builder(data.data_type().clone()).len(data.len()).offset(data.offset());
    Ok(builder.buffers(buffers).nulls(nulls).child_data(children).build()?)
}
