//! Batches of a result that another process made, restored from lent pieces and buffers of both
//! tables.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use arrow::array::{Array, ArrayData, RecordBatch};
use arrow::buffer::Buffer;

use super::messages::BatchParts;
use crate::join::Task;
use crate::memory::{Place, holding};
use crate::{Error, Result};

/// Lent pieces that are not written any more, by start address.
pub(super) type Pieces = BTreeMap<u64, Buffer>;

/// Restores a batch of a task's result from lent pieces and the buffers of both tables.
pub(super) fn restored(
    task: &Task,
    tables: &TableBuffers<'_>,
    pieces: &Pieces,
    parts: &BatchParts,
) -> Result<RecordBatch> {
    let find = |place: &Place| match place {
        Place::Bytes(bytes) => Ok(Place::aligned(bytes)),
        Place::Slab { address, len } => {
            let (address, len) = (*address, *len as usize);
            slice_of(pieces, address, len).or_else(|| tables.find(address, len)).ok_or_else(|| {
                Error::Internal(format!("{len} bytes at {address:#x} were not lent, and are in neither table"))
            })
        }
    };
    parts.restore(&task.schema, &find)
}

/// Returns the slice of a buffer at `address`.
fn slice_of(buffers: &BTreeMap<u64, Buffer>, address: u64, len: usize) -> Option<Buffer> {
    let (start, offset) = holding(buffers, address, len, Buffer::len)?;
    Some(buffers[&start].slice_with_length(offset, len))
}

/// Buffers of both tables of a task, by address. A result may share them.
pub(super) struct TableBuffers<'a> {
    task: &'a Task,
    buffers: OnceLock<BTreeMap<u64, Buffer>>,
}

impl<'a> TableBuffers<'a> {
    pub(super) fn new(task: &'a Task) -> Self {
        Self { task, buffers: OnceLock::new() }
    }

    pub(super) fn find(&self, address: u64, len: usize) -> Option<Buffer> {
        let buffers = self.buffers.get_or_init(|| {
            let mut buffers = BTreeMap::new();
            for table in [&self.task.build.table, &self.task.probe.table] {
                for column in table.batches.iter().flat_map(|batch| batch.columns()) {
                    collect(&column.to_data(), &mut buffers);
                }
            }
            // A buffer within another would hide the larger one. A table that was the result of a
            // join may have such buffers.
            let mut end = 0;
            buffers.retain(|&start, buffer| {
                let is_outside = start + buffer.len() as u64 > end;
                end = end.max(start + buffer.len() as u64);
                is_outside
            });
            buffers
        });
        slice_of(buffers, address, len)
    }
}

/// Collects all buffers of an array, by address. Of buffers with the same start, keeps the longest.
fn collect(array: &ArrayData, buffers: &mut BTreeMap<u64, Buffer>) {
    let mut add = |buffer: &Buffer| {
        let known = buffers.entry(buffer.as_ptr() as u64).or_insert_with(|| buffer.clone());
        if known.len() < buffer.len() {
            *known = buffer.clone();
        }
    };
    array.buffers().iter().for_each(&mut add);
    if let Some(nulls) = array.nulls() {
        add(nulls.buffer());
    }
    array.child_data().iter().for_each(|child| collect(child, buffers));
}
