//! Batches of a result that another process made, restored from lent pieces and from buffers of
//! tables and segments.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use arrow::array::{Array, ArrayData, RecordBatch};
use arrow::buffer::Buffer;
use arrow::datatypes::SchemaRef;

use super::messages::BatchParts;
use crate::catalog::Table;
use crate::memory::{Place, holding};
use crate::{Error, Result};

/// Memory that a pushed batch may refer to, in addition to the tables of its job.
#[derive(Debug, Default)]
pub(super) struct PushSources {
    /// Lent pieces that are not written any more, by start address.
    pub(super) pieces: BTreeMap<u64, Buffer>,
    /// Segments of the job's rows.
    pub(super) segments: Vec<Arc<TableBuffers>>,
}

impl PushSources {
    fn find(&self, address: u64, len: usize) -> Option<Buffer> {
        let in_segment = || self.segments.iter().find_map(|segment| segment.find(address, len));
        slice_of(&self.pieces, address, len).or_else(in_segment)
    }
}

/// Restores a batch of a result.
pub(super) fn restored(
    schema: &SchemaRef,
    tables: &TableBuffers,
    sources: &PushSources,
    parts: &BatchParts,
) -> Result<RecordBatch> {
    let find = |place: &Place| match place {
        Place::Bytes(bytes) => Ok(Place::aligned(bytes)),
        Place::Slab { address, len } => {
            let (address, len) = (*address, *len as usize);
            sources.find(address, len).or_else(|| tables.find(address, len)).ok_or_else(|| {
                Error::Internal(format!("{len} bytes at {address:#x} were not lent, and are in no rows of the join"))
            })
        }
    };
    parts.restore(schema, &find)
}

/// Returns the slice of a buffer at `address`.
fn slice_of(buffers: &BTreeMap<u64, Buffer>, address: u64, len: usize) -> Option<Buffer> {
    let (start, offset) = holding(buffers, address, len, Buffer::len)?;
    Some(buffers[&start].slice_with_length(offset, len))
}

/// Buffers of tables, by address. A result may share them.
#[derive(Debug)]
pub(super) struct TableBuffers {
    tables: Vec<Arc<Table>>,
    buffers: OnceLock<BTreeMap<u64, Buffer>>,
}

impl TableBuffers {
    pub(super) fn new(tables: Vec<Arc<Table>>) -> Self {
        Self { tables, buffers: OnceLock::new() }
    }

    pub(super) fn find(&self, address: u64, len: usize) -> Option<Buffer> {
        let buffers = self.buffers.get_or_init(|| {
            let mut buffers = BTreeMap::new();
            for table in &self.tables {
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
