//! Copies of the first chunks of the probe side, while the last keys of the build side are indexed.
//!
//! ```text
//!   link in    build keys                  │ chunk 0 │ chunk 1 │ chunk 2 ...
//!   device       index as they arrive ...      │ match 0 │ match 1 ...
//! ```
//!
//! Streams begin when the build side is ready. By then these chunks have arrived or are on their
//! way, each on its own stream. Rows of the result leave as soon as they are matched.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::Task;
use super::chunks::{Chunk, ProbeRows, chunk_row_bytes, even_chunk_rows, only_copies, streams_of, value_bytes};
use super::context::JoinContext;
use super::copy_order::CopyOrder;
use super::inputs::SideInput;
use super::transform::{CopyIn, Transform, TransformedSide, transform};
use crate::columns::KeyLayout;
use crate::device::host::TableBytes;
use crate::device::{Device, Stream};
use crate::{Error, Result};

/// Number of chunks queued ahead. The link moves two chunks while the last 32 MiB of keys are
/// indexed and streams begin, which takes about a millisecond. A chunk of a probe side of 2^27 rows
/// takes 0.8 ms with rows of 16 bytes, and 0.6 ms with rows of 12 bytes.
const CHUNKS: usize = 2;

/// Chunks that were queued before the build side was ready.
#[derive(Default)]
pub(super) struct Prefetch {
    chunks: Mutex<VecDeque<PrefetchedChunk>>,
    /// Makes these chunks, and all later ones, cross the link one after the other.
    pub(super) copy_order: CopyOrder,
}

/// Chunk whose copies were queued on its own stream.
pub(super) struct PrefetchedChunk {
    pub(super) stream: Stream,
    pub(super) chunk: Chunk,
    pub(super) transformed: TransformedSide,
}

/// Inputs from which chunks are made.
pub(super) struct Probes<'a> {
    pub(super) task: &'a Task,
    pub(super) build: &'a SideInput,
    pub(super) probe: &'a SideInput,
    pub(super) layout: &'a KeyLayout,
    pub(super) copy_in: CopyIn,
}

impl Prefetch {
    /// Queues copies of up to `CHUNKS` chunks, each on a stream of its own that waits for the build
    /// side's copies on both of the context's streams. Queues none if a chunk needs a host wait
    /// before it is ready. Queues none if free memory is under twice the sum of the index, a chunk
    /// for each stream and `held_back` bytes. The index then has enough memory whatever its keys
    /// are.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn queue(of: &Probes<'_>, cx: &JoinContext<'_>, rows: &ProbeRows<'_>, held_back: u64) -> Result<Self> {
        let mut prefetch = Self::default();
        let (device, total) = (cx.device, of.probe.table.rows);
        let streams = streams_of(of.task, rows.total_of_rank(), device);
        let waits = of.probe.key_columns.iter().any(|&key| of.probe.has_nulls(key)) || of.layout.is_hashed();
        if streams <= 1 || waits || of.task.composition.filter || !only_copies(of.task, of.layout) {
            return Ok(prefetch);
        }
        let chunk_rows = even_chunk_rows(of.task, of.layout, total, streams, rows.ranks());
        let chunks_rows = streams as u64 * chunk_rows;
        let chunks_bytes = chunks_rows * chunk_row_bytes(of.probe, of.layout) as u64
            + value_bytes(of.probe, of.layout, 0..total.min(chunks_rows));
        if device.memory().free_bytes() / 2 < held_back + of.index_bytes(device) + chunks_bytes {
            return Ok(prefetch);
        }
        let of_build = [device.record_event(cx.stream)?, device.record_event(cx.copies)?];
        let chunks = prefetch.chunks.get_mut();
        while chunks.len() < CHUNKS.min(streams)
            && let Some(chunk) = rows.take(|_, _| chunk_rows, cx.monitor.cancel())?
        {
            let stream = device.stream(cx.monitor.cancel().clone())?;
            of_build.iter().try_for_each(|queued| device.wait_event(queued, &stream))?;
            match of.copy(cx, &stream, &prefetch.copy_order, &chunk) {
                Ok(transformed) => chunks.push_back(PrefetchedChunk { stream, chunk, transformed }),
                Err(Error::Exhausted(_)) => {
                    rows.put_back(chunk);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(prefetch)
    }

    /// Takes the next queued chunk, if there is one.
    pub(super) fn take(&self) -> Option<PrefetchedChunk> {
        self.chunks.lock().pop_front()
    }
}

impl Probes<'_> {
    /// Returns the most device memory that indexing the build side takes. Keys may repeat although
    /// the planner expected distinct keys.
    fn index_bytes(&self, device: &dyn Device) -> u64 {
        let rows = self.build.table.rows;
        let of = |repeats| TableBytes::new(self.layout.width(), rows, repeats);
        let (distinct, repeated) = (of(false), of(true));
        let scratch = rows * device.tuning().row_scratch_bytes.unwrap_or(0) as u64;
        distinct.stays + repeated.stays + repeated.building.max(distinct.building) + scratch
    }

    fn copy(
        &self,
        cx: &JoinContext<'_>,
        stream: &Stream,
        copy_order: &CopyOrder,
        chunk: &Chunk,
    ) -> Result<TransformedSide> {
        let own = JoinContext { stream, copies: stream, ..*cx };
        let rows = chunk.segment.rows(chunk.rows.clone());
        // Every row has a key.
        let (layout, copy_in, row_layout) = (self.layout, self.copy_in, self.task.composition.row_layout);
        let how = Transform { layout, row_layout, keeps_null_keys: false, filter: None, copy_in };
        let queue = || transform(&own, &chunk.segment, rows, how);
        copy_order.take(cx.device, stream, queue).map(|(transformed, _)| transformed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int32Array, RecordBatch};
    use arrow::datatypes::{DataType, Field, Schema};

    use super::*;
    use crate::catalog::{Catalog, Upload, UploadOptions};
    use crate::columns::Role;
    use crate::device::host::HostDevice;
    use crate::device::{CancelFlag, Device};
    use crate::join::{Monitor, Strategy, TableRows, TransferOrder};
    use crate::memory::{Arena, Budget};
    use crate::planner::{self, JoinSpec, KeyPair};

    const ROWS: u64 = 100_000;

    /// Returns the first row that is not queued ahead, on a device with the given streams and
    /// memory.
    fn next_row(strategy: Strategy, with_nulls: bool, streams: usize, memory: u64) -> u64 {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 30)));
        for name in ["build", "probe"] {
            let schema = Arc::new(Schema::new(vec![Field::new("k", DataType::Int32, true)]));
            let keys = Int32Array::from_iter((0..ROWS as i32).map(|key| (key > 0 || !with_nulls).then_some(key)));
            let mut upload = Upload::begin(&catalog, name, schema.clone(), UploadOptions::default()).unwrap();
            upload.append(RecordBatch::try_new(schema, vec![Arc::new(keys)]).unwrap()).unwrap();
            upload.commit().unwrap();
        }
        let spec = JoinSpec::inner("build", "probe", vec![KeyPair::new("k", "k")]);
        let mut plan = planner::plan(planner::bind(&spec, &catalog).unwrap(), Some(strategy)).unwrap();
        plan.composition.transfer_order = TransferOrder::Chunks;
        let task = Task { chunk_rows_min: Some(1 << 12), ..plan.task().unwrap() };
        let input = |role| Arc::new(SideInput::of_task(&task, role, false));
        let (build, probe) = (input(Role::Build), input(Role::Probe));
        let layout = KeyLayout::new(task.key_facts.clone(), 0);
        let budget = Budget::new("device memory", "--device-memory", memory);
        let device = HostDevice::new(0, 2, budget, None).unwrap().with_streams(streams);
        let (stream, monitor) = (device.stream(CancelFlag::new()).unwrap(), Monitor::new(CancelFlag::new()));
        let cx = JoinContext {
            device: &device,
            stream: &stream,
            copies: &stream,
            arena: catalog.arena(),
            monitor: &monitor,
        };
        let of = Probes { task: &task, build: &build, probe: &probe, layout: &layout, copy_in: CopyIn::Prefetch };
        let source = TableRows::new(task.probe.table.clone());
        let (rows, mut row) = (ProbeRows::new(&source, &task, &probe, &device), 0);
        let prefetch = Prefetch::queue(&of, &cx, &rows, 0).unwrap();
        while let Some(PrefetchedChunk { chunk, transformed, .. }) = prefetch.take() {
            assert_eq!((chunk.rows.start, transformed.len() as u64), (row, chunk.len()));
            row = chunk.rows.end;
        }
        let next = rows.take(|_, left| left.end - left.start, &CancelFlag::new()).unwrap().unwrap();
        assert_eq!(next.rows, row..ROWS, "streams go on after the queued chunks");
        assert_eq!(prefetch.copy_order.last().is_some(), row > 0, "later chunks cross the link after these");
        row
    }

    #[test]
    fn only_chunks_that_wait_for_nothing_are_prefetched() {
        // A fiftieth of the rows would be too few for a chunk.
        assert_eq!(next_row(Strategy::Hash, false, 5, 1 << 30), 2 << 12);
        assert_eq!(
            next_row(Strategy::Hash, false, 1, 1 << 30),
            0,
            "one stream has no copies to overlap with the indexing"
        );
        assert_eq!(next_row(Strategy::Hash, true, 5, 1 << 30), 0, "the number of rows with a key has to be waited for");
        assert_eq!(next_row(Strategy::RadixHash, false, 5, 1 << 30), 0, "chunks are partitioned first");
        assert_eq!(next_row(Strategy::Hash, false, 5, 8 << 20), 0, "there may be too little memory for the index");
    }
}
