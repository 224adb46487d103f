//! Copies batches from outside the arena into the arena.
//!
//! ```text
//!   column ─ outline ─► the parts of its buffers ─ copy ─► one piece of the arena per batch
//!                       that its rows refer to
//!                          └─ dictionary ────────────────► a piece of its own, shared by batches
//! ```

use std::collections::{HashMap, HashSet};

use arrow::array::{Array, ArrayData, ArrayRef, BooleanBufferBuilder, RecordBatch, layout, make_array};
use arrow::buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow::datatypes::{DataType, SchemaRef};

use crate::memory::Arena;
use crate::{Context, Error, Result};

/// Alignment of every buffer in a piece, in bytes: a cache line, which is more than any Arrow type
/// needs.
const BUFFER_ALIGNMENT: usize = 64;

/// Copies the batches of one stream into the arena. Dictionaries that batches share stay shared.
#[derive(Debug)]
pub struct Adopter {
    arena: Arena,
    /// The last dictionary of each dictionary column, in the order of the batch's columns: the
    /// original and its copy. Holding the original keeps its address from being reused for another
    /// dictionary.
    dictionaries: Vec<Option<(ArrayData, ArrayData)>>,
}

impl Adopter {
    /// Makes an adopter of one stream's batches.
    pub fn new(arena: Arena) -> Self {
        Self { arena, dictionaries: Vec::new() }
    }

    /// Returns the batch with all its buffers in the arena. Columns that are stored in the arena
    /// stay as they are. Of the other columns, the parts that the rows refer to are copied into one
    /// piece. A dictionary that the previous batch also had is not copied again.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the arena has no room.
    pub fn adopt(&mut self, batch: RecordBatch) -> Result<RecordBatch> {
        let foreign: Vec<bool> = batch.columns().iter().map(|column| !self.is_home(&column.to_data())).collect();
        if !foreign.contains(&true) {
            return Ok(batch);
        }
        let (schema, columns, rows) = batch.into_parts();
        let mut ordinal = 0;
        let mut outlines = Vec::with_capacity(columns.len());
        for (column, &foreign) in columns.iter().zip(&foreign) {
            outlines.push(foreign.then(|| Outline::of(&column.to_data())));
        }
        for outline in outlines.iter_mut().flatten() {
            self.settle_dictionaries(outline, &mut ordinal)?;
        }
        let size = outlines.iter().flatten().map(Outline::size_bytes).sum();
        let mut writer = Writer::new(&self.arena, size)?;
        outlines.iter().flatten().for_each(|outline| outline.write(&mut writer));
        let mut written = writer.freeze();
        let mut adopted = Vec::with_capacity(columns.len());
        for (column, outline) in columns.into_iter().zip(outlines) {
            adopted.push(match outline {
                None => column,
                Some(outline) => make_array(outline.build(&mut written)?),
            });
        }
        with_rows(schema, adopted, rows)
    }

    /// True if all buffers are in the arena.
    fn is_home(&self, data: &ArrayData) -> bool {
        let owns = |buffer: &Buffer| buffer.is_empty() || self.arena.owns(buffer.as_ptr());
        data.buffers().iter().all(owns)
            && data.nulls().is_none_or(|nulls| owns(nulls.buffer()))
            && data.child_data().iter().all(|child| self.is_home(child))
    }

    /// Replaces each dictionary that the outline refers to with the arena's copy.
    fn settle_dictionaries(&mut self, outline: &mut Outline, ordinal: &mut usize) -> Result<()> {
        for child in &mut outline.children {
            match child {
                Child::Part(part) => self.settle_dictionaries(part, ordinal)?,
                Child::Dictionary(values) => {
                    let index = *ordinal;
                    *ordinal += 1;
                    *values = self.adopt_dictionary(values, index)?;
                }
            }
        }
        Ok(())
    }

    fn adopt_dictionary(&mut self, values: &ArrayData, index: usize) -> Result<ArrayData> {
        if self.is_home(values) {
            return Ok(values.clone());
        }
        if self.dictionaries.len() <= index {
            self.dictionaries.resize(index + 1, None);
        }
        if let Some((original, copy)) = &self.dictionaries[index]
            && original.ptr_eq(values)
        {
            return Ok(copy.clone());
        }
        // A dictionary of dictionaries gets an adopter of its own, because its inner dictionaries
        // have no index in this adopter.
        let mut outline = Outline::of(values);
        Adopter::new(self.arena.clone()).settle_dictionaries(&mut outline, &mut 0)?;
        let mut writer = Writer::new(&self.arena, outline.size_bytes())?;
        outline.write(&mut writer);
        let copy = outline.build(&mut writer.freeze())?;
        self.dictionaries[index] = Some((values.clone(), copy.clone()));
        Ok(copy)
    }
}

/// Makes a batch of those columns. `rows` is needed if there are no columns.
fn with_rows(schema: SchemaRef, columns: Vec<ArrayRef>, rows: usize) -> Result<RecordBatch> {
    let options = arrow::array::RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema, columns, &options)
        .map_err(Error::from)
        .context(|| "putting a batch together from its copies")
}

/// Counts the bytes that batches refer to. Memory that several batches share counts once.
#[derive(Debug, Default)]
pub(super) struct Meter {
    /// Memory with buffers that batches may share, by address. The meter holds the memory so that
    /// the address cannot be reused.
    shared: HashMap<usize, SharedMemory>,
}

#[derive(Debug)]
struct SharedMemory {
    memory: Buffer,
    /// Address and length of the buffers in this memory that were counted.
    counted: HashSet<(usize, usize)>,
}

impl Meter {
    /// Bytes of the parts of buffers that the batch's rows refer to and that no earlier batch
    /// referred to.
    pub(super) fn referenced_bytes(&mut self, batch: &RecordBatch) -> u64 {
        batch.columns().iter().map(|column| self.referenced_bytes_of(column)).sum()
    }

    /// Same as [`Meter::referenced_bytes`], for one column.
    pub(super) fn referenced_bytes_of(&mut self, column: &ArrayRef) -> u64 {
        self.outline_bytes(&Outline::of(&column.to_data()))
    }

    /// Drops memory that only this meter holds, so that new memory at the same address is counted.
    /// Callers that drop batches while they count others need this.
    pub(super) fn forget_unused(&mut self) {
        self.shared.retain(|_, shared| shared.memory.strong_count() > 1);
    }

    /// True if the buffer was not counted before.
    fn is_new(&mut self, buffer: &Buffer) -> bool {
        let place = (buffer.as_ptr() as usize, buffer.len());
        let memory = || SharedMemory { memory: buffer.clone(), counted: HashSet::new() };
        self.shared.entry(buffer.data_ptr().as_ptr() as usize).or_insert_with(memory).counted.insert(place)
    }

    fn outline_bytes(&mut self, outline: &Outline) -> u64 {
        let parts: u64 = outline.parts.iter().map(|part| self.part_bytes(part)).sum();
        let nulls = outline.nulls.as_ref().map_or(0, |nulls| nulls.len().div_ceil(8) as u64);
        let children = outline.children.iter().map(|child| match child {
            Child::Part(part) => self.outline_bytes(part),
            Child::Dictionary(values) => self.dictionary_bytes(values),
        });
        parts + nulls + children.sum::<u64>()
    }

    fn part_bytes(&mut self, part: &Part) -> u64 {
        let new = match part {
            Part::Shared(buffer) => self.is_new(buffer),
            _ => true,
        };
        if new { part.len() as u64 } else { 0 }
    }

    fn dictionary_bytes(&mut self, values: &ArrayData) -> u64 {
        let outline = Outline::of(values);
        match values.buffers().last().is_none_or(|last| self.is_new(last)) {
            true => self.outline_bytes(&outline),
            false => 0,
        }
    }
}

/// The parts of an array's buffers that its rows refer to, from which an [`ArrayData`] is built.
#[derive(Debug)]
struct Outline {
    data_type: DataType,
    len: usize,
    offset: usize,
    nulls: Option<NullBuffer>,
    parts: Vec<Part>,
    children: Vec<Child>,
}

/// A buffer to be written.
#[derive(Debug)]
enum Part {
    Bytes(Buffer),
    /// Bytes to copy unchanged, to which other batches may refer as well.
    Shared(Buffer),
    /// Bits, which may start inside a byte.
    Bits(BooleanBuffer),
    /// The first offset is subtracted from each when they are written.
    Offsets32(Buffer),
    /// The first offset is subtracted from each when they are written.
    Offsets64(Buffer),
}

#[derive(Debug)]
enum Child {
    Part(Outline),
    Dictionary(ArrayData),
}

impl Outline {
    fn of(data: &ArrayData) -> Self {
        let (offset, len) = (data.offset(), data.len());
        let buffers = data.buffers();
        let mut outline = Self {
            data_type: data.data_type().clone(),
            len,
            offset: 0,
            nulls: data.nulls().cloned(),
            parts: Vec::new(),
            children: Vec::new(),
        };
        let part = |child: &ArrayData| Child::Part(Self::of(child));
        match data.data_type() {
            DataType::Boolean => {
                outline.parts.push(Part::Bits(BooleanBuffer::new(buffers[0].clone(), offset, len)));
            }
            DataType::Utf8 | DataType::Binary => {
                let (offsets, first, last) = offsets_32(&buffers[0], offset, len);
                outline.parts = vec![offsets, Part::Bytes(buffers[1].slice_with_length(first, last - first))];
            }
            DataType::LargeUtf8 | DataType::LargeBinary => {
                let (offsets, first, last) = offsets_64(&buffers[0], offset, len);
                outline.parts = vec![offsets, Part::Bytes(buffers[1].slice_with_length(first, last - first))];
            }
            DataType::Utf8View | DataType::BinaryView => {
                outline.parts.push(Part::Bytes(buffers[0].slice_with_length(offset * 16, len * 16)));
                outline.parts.extend(buffers[1..].iter().cloned().map(Part::Shared));
            }
            DataType::List(_) | DataType::Map(..) => {
                let (offsets, first, last) = offsets_32(&buffers[0], offset, len);
                outline.parts.push(offsets);
                outline.children.push(part(&slice(&data.child_data()[0], first, last - first)));
            }
            DataType::LargeList(_) => {
                let (offsets, first, last) = offsets_64(&buffers[0], offset, len);
                outline.parts.push(offsets);
                outline.children.push(part(&slice(&data.child_data()[0], first, last - first)));
            }
            DataType::FixedSizeList(_, size) => {
                let size = *size as usize;
                outline.children.push(part(&slice(&data.child_data()[0], offset * size, len * size)));
            }
            DataType::Struct(_) => {
                outline.children.extend(data.child_data().iter().map(|child| part(&slice(child, offset, len))));
            }
            DataType::Dictionary(key, _) => {
                let width = key.primitive_width().expect("dictionary keys are integers");
                outline.parts.push(Part::Bytes(buffers[0].slice_with_length(offset * width, len * width)));
                outline.children.push(Child::Dictionary(data.child_data()[0].clone()));
            }
            other => match fixed_width(other) {
                Some(width) => {
                    outline.parts.push(Part::Bytes(buffers[0].slice_with_length(offset * width, len * width)));
                }
                // Unions, list views and runs refer to their children in other ways, and are rare.
                // They are copied whole.
                None => {
                    outline.offset = offset;
                    outline.parts.extend(buffers.iter().cloned().map(Part::Bytes));
                    outline.children.extend(data.child_data().iter().map(part));
                }
            },
        }
        outline
    }

    /// Bytes that [`Outline::write`] writes, except dictionaries.
    fn size_bytes(&self) -> usize {
        let aligned = |len: usize| len.next_multiple_of(BUFFER_ALIGNMENT);
        let parts: usize = self.parts.iter().map(|part| aligned(part.len())).sum();
        let nulls = self.nulls.as_ref().map_or(0, |nulls| aligned(nulls.len().div_ceil(8)));
        let children = self.children.iter().map(|child| match child {
            Child::Part(part) => part.size_bytes(),
            Child::Dictionary(_) => 0,
        });
        parts + nulls + children.sum::<usize>()
    }

    fn write(&self, writer: &mut Writer) {
        self.parts.iter().for_each(|part| writer.write(part));
        if let Some(nulls) = &self.nulls {
            writer.write(&Part::Bits(nulls.inner().clone()));
        }
        for child in &self.children {
            if let Child::Part(part) = child {
                part.write(writer);
            }
        }
    }

    /// Builds the array over the buffers that [`Outline::write`] wrote.
    fn build(self, written: &mut Written) -> Result<ArrayData> {
        let buffers = self.parts.iter().map(|part| written.next(part.len())).collect();
        let nulls = self.nulls.map(|nulls| {
            let bits = written.next(nulls.len().div_ceil(8));
            NullBuffer::new(BooleanBuffer::new(bits, 0, nulls.len()))
        });
        let build_child = |child| match child {
            Child::Part(part) => Outline::build(part, written),
            Child::Dictionary(values) => Ok(values),
        };
        let children = self.children.into_iter().map(build_child).collect::<Result<Vec<_>>>()?;
        let builder = ArrayData::builder(self.data_type).len(self.len).offset(self.offset).nulls(nulls);
        Ok(builder.buffers(buffers).child_data(children).build()?)
    }
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Self::Bytes(buffer) | Self::Shared(buffer) | Self::Offsets32(buffer) | Self::Offsets64(buffer) => {
                buffer.len()
            }
            Self::Bits(bits) => bits.len().div_ceil(8),
        }
    }
}

/// Slices a child by way of a typed array. [`ArrayData::slice`] would apply a struct's offset
/// twice: it slices the columns, and also sets the offset of the struct.
fn slice(child: &ArrayData, offset: usize, len: usize) -> ArrayData {
    match offset == 0 && len == child.len() {
        true => child.clone(),
        false => make_array(child.clone()).slice(offset, len).to_data(),
    }
}

/// Bytes of a value, for types whose values all have the same width.
fn fixed_width(data_type: &DataType) -> Option<usize> {
    match data_type {
        DataType::FixedSizeBinary(size) => Some(*size as usize),
        DataType::Null | DataType::Union(..) | DataType::RunEndEncoded(..) => None,
        other if layout(other).buffers.len() == 1 => other.primitive_width(),
        _ => None,
    }
}

/// Returns the offsets of `len` values, and the first and the last offset.
fn offsets_32(offsets: &Buffer, offset: usize, len: usize) -> (Part, usize, usize) {
    let width = size_of::<i32>();
    if len == 0 {
        return (Part::Offsets32(Buffer::from(&[0u8; 4])), 0, 0);
    }
    let slice = offsets.slice_with_length(offset * width, (len + 1) * width);
    let values = slice.typed_data::<i32>();
    let (first, last) = (values[0] as usize, values[len] as usize);
    (Part::Offsets32(slice), first, last)
}

/// Same as [`offsets_32`], for 64-bit offsets.
fn offsets_64(offsets: &Buffer, offset: usize, len: usize) -> (Part, usize, usize) {
    let width = size_of::<i64>();
    if len == 0 {
        return (Part::Offsets64(Buffer::from(&[0u8; 8])), 0, 0);
    }
    let slice = offsets.slice_with_length(offset * width, (len + 1) * width);
    let values = slice.typed_data::<i64>();
    let (first, last) = (values[0] as usize, values[len] as usize);
    (Part::Offsets64(slice), first, last)
}

/// Fills a piece of the arena, buffer after buffer.
struct Writer {
    piece: crate::memory::ArenaBuffer,
    filled: usize,
}

impl Writer {
    fn new(arena: &Arena, size: usize) -> Result<Self> {
        Ok(Self { piece: arena.allocate(size, "copying a batch into the arena")?, filled: 0 })
    }

    fn write(&mut self, part: &Part) {
        let target = &mut self.piece[self.filled..self.filled + part.len()];
        match part {
            Part::Bytes(buffer) | Part::Shared(buffer) => target.copy_from_slice(buffer),
            Part::Bits(bits) if bits.offset() % 8 == 0 => {
                let start = bits.offset() / 8;
                target.copy_from_slice(&bits.values()[start..start + part.len()]);
            }
            Part::Bits(bits) => {
                let mut aligned = BooleanBufferBuilder::new(bits.len());
                aligned.append_buffer(bits);
                target.copy_from_slice(aligned.as_slice());
            }
            Part::Offsets32(buffer) => {
                let offsets = buffer.typed_data::<i32>();
                for (target, offset) in target.as_chunks_mut::<4>().0.iter_mut().zip(offsets) {
                    *target = (offset - offsets[0]).to_ne_bytes();
                }
            }
            Part::Offsets64(buffer) => {
                let offsets = buffer.typed_data::<i64>();
                for (target, offset) in target.as_chunks_mut::<8>().0.iter_mut().zip(offsets) {
                    *target = (offset - offsets[0]).to_ne_bytes();
                }
            }
        }
        self.filled += part.len().next_multiple_of(BUFFER_ALIGNMENT);
    }

    fn freeze(self) -> Written {
        Written { piece: self.piece.freeze(), taken: 0 }
    }
}

/// A filled piece. [`Written::next`] returns its buffers in the order in which they were written.
struct Written {
    piece: Buffer,
    taken: usize,
}

impl Written {
    fn next(&mut self, len: usize) -> Buffer {
        let buffer = self.piece.slice_with_length(self.taken, len);
        self.taken += len.next_multiple_of(BUFFER_ALIGNMENT);
        buffer
    }
}
