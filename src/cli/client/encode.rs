//! Record batches as Flight messages of a size that every client and proxy takes.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{BinaryViewType, ByteViewType, DataType, SchemaRef, StringViewType};
use arrow::ipc::writer::{DictionaryTracker, IpcDataGenerator, IpcWriteContext, IpcWriteOptions};
use arrow_flight::FlightData;

use crate::Result;

/// The size that messages aim at. Messages of 2 MB measured faster than 16 MB ones, which fall out of the cache.
const MESSAGE_BYTES: usize = 2 << 20;

/// A message over this is encoded again in two halves: sizes are estimated from the mean row, and rows may differ.
const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// Turns the batches of one stream into messages. Dictionaries are sent as dictionaries, once as long as they stay the
/// same in memory.
#[derive(Debug)]
pub struct Encoder {
    generator: IpcDataGenerator,
    /// Shared by schema and batches: dictionaries are numbered in the order in which the schema lists them.
    dictionaries: DictionaryTracker,
    options: IpcWriteOptions,
    context: IpcWriteContext,
}

impl Encoder {
    /// An encoder, and the message that comes first.
    pub fn new(schema: &SchemaRef) -> (Self, FlightData) {
        let mut encoder = Self {
            generator: IpcDataGenerator::default(),
            dictionaries: DictionaryTracker::new(false),
            options: IpcWriteOptions::default(),
            context: IpcWriteContext::default(),
        };
        let dictionaries = &mut encoder.dictionaries;
        let schema = encoder.generator.schema_to_bytes_with_dictionary_tracker(schema, dictionaries, &encoder.options);
        (encoder, schema.into())
    }

    /// The messages of a batch, in order. An empty batch gives none.
    ///
    /// # Errors
    /// Arrow's, for a type that IPC cannot carry.
    pub fn encode(&mut self, batch: &RecordBatch) -> Result<Vec<FlightData>> {
        let pieces = (batch_bytes(batch) as usize).div_ceil(MESSAGE_BYTES).max(1);
        let rows_per_piece = batch.num_rows().div_ceil(pieces).max(1);
        let mut messages = Vec::with_capacity(pieces);
        for start in (0..batch.num_rows()).step_by(rows_per_piece) {
            let rows = rows_per_piece.min(batch.num_rows() - start);
            self.encode_piece(&batch.slice(start, rows), &mut messages)?;
        }
        Ok(messages)
    }

    fn encode_piece(&mut self, piece: &RecordBatch, messages: &mut Vec<FlightData>) -> Result<()> {
        let compact = compact_views(piece)?;
        let (dictionaries, encoded) =
            self.generator.encode(&compact, &mut self.dictionaries, &self.options, &mut self.context)?;
        messages.extend(dictionaries.into_iter().map(FlightData::from));
        let message = FlightData::from(encoded);
        if message.data_body.len() > MESSAGE_BYTES_MAX && piece.num_rows() > 1 {
            let half = piece.num_rows() / 2;
            self.encode_piece(&piece.slice(0, half), messages)?;
            return self.encode_piece(&piece.slice(half, piece.num_rows() - half), messages);
        }
        messages.push(message);
        Ok(())
    }
}

/// Bytes of the values of a batch, however large the buffers are that it shares with others.
pub fn batch_bytes(batch: &RecordBatch) -> u64 {
    batch.columns().iter().map(|column| sliced_bytes(column) as u64).sum()
}

/// Bytes that this slice of an array refers to.
fn sliced_bytes(array: &ArrayRef) -> usize {
    match array.data_type() {
        DataType::Utf8View => view_bytes::<StringViewType>(array),
        DataType::BinaryView => view_bytes::<BinaryViewType>(array),
        _ => array.to_data().get_slice_memory_size().unwrap_or_else(|_| array.get_buffer_memory_size()),
    }
}

fn view_bytes<T: ByteViewType>(array: &ArrayRef) -> usize {
    let views = array.as_byte_view::<T>();
    views.len() * 16 + views.total_buffer_bytes_used()
}

/// IPC sends the whole of every buffer that a view array refers to, however few of its rows are left; those that mostly
/// hold other rows are copied down to what is used.
fn compact_views(batch: &RecordBatch) -> Result<RecordBatch> {
    fn compact<T: ByteViewType>(array: &ArrayRef) -> ArrayRef {
        let views = array.as_byte_view::<T>();
        let held: usize = views.data_buffers().iter().map(|buffer| buffer.len()).sum();
        if held > 2 * views.total_buffer_bytes_used() { Arc::new(views.gc()) } else { array.clone() }
    }
    let is_view = |column: &ArrayRef| matches!(column.data_type(), DataType::Utf8View | DataType::BinaryView);
    if !batch.columns().iter().any(is_view) {
        return Ok(batch.clone());
    }
    let columns = batch.columns().iter().map(|column| match column.data_type() {
        DataType::Utf8View => compact::<StringViewType>(column),
        DataType::BinaryView => compact::<BinaryViewType>(column),
        _ => column.clone(),
    });
    Ok(RecordBatch::try_new(batch.schema(), columns.collect())?)
}

#[cfg(test)]
mod tests {
    use arrow::array::{DictionaryArray, Int32Array, LargeListArray, StringArray, StringViewArray};
    use arrow::datatypes::{Field, Int32Type, Schema};
    use arrow_flight::decode::FlightRecordBatchStream;
    use futures::TryStreamExt;

    use super::*;

    fn round_trip(batch: &RecordBatch) -> (usize, usize, Vec<RecordBatch>) {
        let (mut encoder, first) = Encoder::new(&batch.schema());
        let mut messages = vec![first];
        messages.extend(encoder.encode(batch).unwrap());
        let sizes: Vec<usize> = messages.iter().map(|message| message.data_body.len()).collect();
        let stream = futures::stream::iter(messages.into_iter().map(Ok));
        let batches = futures::executor::block_on(
            FlightRecordBatchStream::new_from_flight_data(stream).try_collect::<Vec<RecordBatch>>(),
        );
        (sizes.len() - 1, sizes.into_iter().max().unwrap(), batches.unwrap())
    }

    fn batch_of(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
        RecordBatch::try_from_iter(columns).unwrap()
    }

    #[test]
    fn large_batches_become_several_messages_of_even_size() {
        let rows = 3_000_000;
        let batch = batch_of(vec![("k", Arc::new(Int32Array::from_iter_values(0..rows)) as _)]);
        let (messages, largest, batches) = round_trip(&batch);
        assert_eq!(messages, 6);
        assert!(largest <= MESSAGE_BYTES + 4096, "{largest}");
        assert_eq!(arrow::compute::concat_batches(&batch.schema(), &batches).unwrap(), batch);
    }

    #[test]
    fn one_huge_row_among_small_ones_does_not_pull_its_neighbours_over_the_limit() {
        let huge = "x".repeat(6 << 20);
        let text =
            StringArray::from_iter_values((0..4).map(|at| if at == 1 { huge.as_str() } else { &huge[..5 << 20] }));
        let batch = batch_of(vec![("t", Arc::new(text) as _)]);
        let (_, largest, batches) = round_trip(&batch);
        assert!(largest <= MESSAGE_BYTES_MAX, "{largest}");
        assert_eq!(arrow::compute::concat_batches(&batch.schema(), &batches).unwrap(), batch);
    }

    #[test]
    fn dictionaries_stay_dictionaries_and_are_sent_once() {
        let words: DictionaryArray<Int32Type> = (0..1_000_000).map(|at| ["air", "rail", "ship"][at % 3]).collect();
        let batch = batch_of(vec![("mode", Arc::new(words) as _)]);
        let (messages, _, batches) = round_trip(&batch);
        assert_eq!(messages, 1 + 2, "one dictionary and two batches");
        assert!(matches!(batches[0].column(0).data_type(), DataType::Dictionary(_, _)));
        assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), 1_000_000);
    }

    #[test]
    fn a_slice_of_views_sends_its_own_bytes_only() {
        let text = StringViewArray::from_iter_values((0..100_000).map(|at| format!("a rather long value number {at}")));
        let batch = batch_of(vec![("t", Arc::new(text) as _)]).slice(500, 10);
        let (messages, largest, batches) = round_trip(&batch);
        assert_eq!(messages, 1);
        assert!(largest < 2048, "{largest}");
        assert_eq!(batches[0], batch);
    }

    #[test]
    fn large_lists_stay_large() {
        let lists = LargeListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1), None]), None]);
        let field = Field::new("l", lists.data_type().clone(), true);
        let batch = RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![Arc::new(lists)]).unwrap();
        assert_eq!(round_trip(&batch).2, vec![batch]);
    }
}
