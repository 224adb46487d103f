//! Encodes record batches as Flight messages of 1 to 4 MB, without copying their buffers. The
//! server and the command line both use it.
//!
//! The encoder of `arrow-flight` is not used. Its version 59.3 writes the schema of a LargeList as
//! that of a List, expands dictionaries by default, and copies every body twice. It also splits by
//! an estimate that strings and lists exceed.
//!
//! This encoder measures encoded messages. A message that is too large is encoded again with fewer
//! rows. The bytes per row of each message set the number of rows of the next. A body is a list of
//! pieces of the batch's own buffers. Only small pieces, and pieces that must be computed (offsets
//! and bitmaps of a slice), are written anew.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::buffer::Buffer;
use arrow::datatypes::{BinaryViewType, ByteViewType, DataType, SchemaRef, StringViewType};
use arrow::ipc::writer::{DictionaryTracker, IpcDataGenerator, IpcWriteOptions, StreamEncoder};
use arrow_flight::FlightData;
use bytes::{BufMut, Bytes, BytesMut};

use super::compact::{compact, is_by_place};
use crate::columns::any_part;
use crate::memory::{Arena, human_bytes};
use crate::{Error, Result};

/// Target size of messages, in bytes. At 2 MB a message's fixed costs are small against its
/// transfer, and it still fits into a core's second-level cache between encoding and sending.
const MESSAGE_BYTES_TARGET: usize = 2 << 20;

/// Default maximum of messages of several rows, in bytes. Several gRPC stacks refuse more than 4
/// MiB by default, and the rest of the message takes a little of that.
const MESSAGE_BYTES_MAX: usize = 4_000_000;

/// Bytes of a message in addition to its header and its body, at most.
const FIELDS_BYTES_MAX: usize = 64;

/// Largest body of a message, in bytes. gRPC encodes the length of a message in 32 bits, and the
/// header takes part of that length.
const WIRE_BYTES_MAX: u64 = u32::MAX as u64 - (64 << 20);

/// Minimum size in bytes of a piece of a body that is sent uncopied. Smaller pieces are copied
/// together, because each piece costs an HTTP/2 frame.
const PIECE_BYTES_MIN: usize = 16 << 10;

/// A Flight message whose body is still in pieces.
#[derive(Clone, Debug)]
pub struct Message {
    /// Arrow message, as a flatbuffer.
    header: Bytes,
    app_metadata: Bytes,
    /// Body, in pieces; empty for a schema.
    body: Vec<Buffer>,
    body_bytes: usize,
}

impl Message {
    /// Returns the same message with `app_metadata`.
    #[must_use]
    pub fn with_app_metadata(self, app_metadata: Bytes) -> Self {
        Self { app_metadata, ..self }
    }

    /// Returns the bytes of the header, the metadata and the body.
    pub fn bytes(&self) -> usize {
        self.header.len() + self.app_metadata.len() + self.body_bytes
    }

    /// Returns the bytes of the body.
    pub fn body_bytes(&self) -> usize {
        self.body_bytes
    }

    /// Returns about the bytes that the message takes outside of `arena`, also when it is sent.
    pub fn heap_bytes(&self, arena: &Arena) -> usize {
        // Small pieces are copied, wherever they are stored.
        let is_on_heap = |piece: &&Buffer| piece.len() < PIECE_BYTES_MIN || !arena.owns(piece.as_ptr());
        let pieces = self.body.iter().filter(is_on_heap).map(|piece| piece.len());
        2 * (self.header.len() + self.app_metadata.len())
            + self.body.len() * size_of::<Buffer>()
            + pieces.sum::<usize>()
    }

    /// Returns the message as gRPC sends it: its frame and protobuf fields, then the pieces of its
    /// body.
    pub fn into_wire(self) -> Vec<Bytes> {
        // Fields 2 (data_header), 3 (app_metadata) and 1000 (data_body) of FlightData, all of them
        // bytes.
        const HEADER_KEY: u64 = 2 << 3 | 2;
        const METADATA_KEY: u64 = 3 << 3 | 2;
        const BODY_KEY: u64 = 1000 << 3 | 2;
        let mut fields = BytesMut::with_capacity(self.header.len() + self.app_metadata.len() + 64);
        let mut put = |key, bytes: &Bytes| {
            put_varint(key, &mut fields);
            put_varint(bytes.len() as u64, &mut fields);
            fields.put_slice(bytes);
        };
        put(HEADER_KEY, &self.header);
        if !self.app_metadata.is_empty() {
            put(METADATA_KEY, &self.app_metadata);
        }
        if self.body_bytes > 0 {
            put_varint(BODY_KEY, &mut fields);
            put_varint(self.body_bytes as u64, &mut fields);
        }
        let message_bytes = fields.len() + self.body_bytes;
        let mut small = BytesMut::with_capacity(fields.len() + PIECE_BYTES_MIN);
        // The frame head: not compressed, then the length.
        small.put_u8(0);
        small.put_u32(u32::try_from(message_bytes).expect("the encoder refuses larger ones"));
        small.put_slice(&fields);

        let mut wire = Vec::new();
        for piece in self.body {
            if piece.len() < PIECE_BYTES_MIN {
                small.put_slice(&piece);
                continue;
            }
            if !small.is_empty() {
                wire.push(small.split().freeze());
            }
            wire.push(Bytes::from_owner(Piece(piece)));
        }
        if !small.is_empty() {
            wire.push(small.freeze());
        }
        wire
    }
}

/// Converts the message to one piece, for senders that need that.
impl From<Message> for FlightData {
    fn from(message: Message) -> Self {
        let mut body = BytesMut::with_capacity(message.body_bytes);
        message.body.iter().for_each(|piece| body.put_slice(piece));
        let Message { header, app_metadata, .. } = message;
        Self { data_header: header, app_metadata, data_body: body.freeze(), ..Self::default() }
    }
}

/// Piece of a body, kept alive until it is sent.
struct Piece(Buffer);

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

fn put_varint(mut value: u64, out: &mut BytesMut) {
    while value >= 0x80 {
        out.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

/// Encodes the batches of one stream, a message at a time.
pub struct Encoder {
    stream: StreamEncoder,
    target_bytes: usize,
    /// Maximum size of a message of more than one row, in bytes. A message exceeds it only if its
    /// rows share one large value.
    max_bytes: usize,
    /// Batch without rows, sent to keep the stream alive.
    rowless: RecordBatch,
    has_dictionaries: bool,
    /// Bytes per row of the last message, for choosing the number of rows of the next.
    row_bytes: Option<f64>,
    batch: Option<UnderWay>,
    /// Messages that are ready: dictionaries, then the rows that refer to them.
    ready: VecDeque<Message>,
}

/// Batch that is being encoded.
struct UnderWay {
    batch: RecordBatch,
    /// Next row.
    start: usize,
    row_bytes_mean: f64,
    /// Bytes that encoding a message may touch, in addition to those that it sends.
    effort_bytes: usize,
}

/// Encoded rows whose message is not queued yet.
struct Tried {
    message: Message,
    /// Number of ready messages once the dictionaries of these rows were queued.
    ready: usize,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").field("row_bytes", &self.row_bytes).finish_non_exhaustive()
    }
}

impl Encoder {
    /// Creates an encoder, and the message that starts its stream.
    ///
    /// # Errors
    /// Arrow's, for a type that IPC cannot carry.
    pub fn new(schema: SchemaRef) -> Result<(Self, Message)> {
        let options = IpcWriteOptions::default();
        // Arrow's stream encoder sends the schema only with the first batch, and a stream must
        // start before that. So the schema is encoded here. Both encoders number dictionaries by
        // their place in the schema, and so alike.
        let mut dictionaries = DictionaryTracker::new(false);
        let message =
            IpcDataGenerator::default().schema_to_bytes_with_dictionary_tracker(&schema, &mut dictionaries, &options);
        let message =
            Message { header: message.ipc_message.into(), app_metadata: Bytes::new(), body: Vec::new(), body_bytes: 0 };
        let stream = StreamEncoder::try_new_with_options(&schema, options)?;
        let has_dictionaries = !dictionaries.dict_id().is_empty();
        let rowless = RecordBatch::new_empty(schema);
        let (row_bytes, batch, ready) = (None, None, VecDeque::new());
        let (target_bytes, max_bytes) = (MESSAGE_BYTES_TARGET, MESSAGE_BYTES_MAX);
        let encoder = Self { stream, target_bytes, max_bytes, rowless, has_dictionaries, row_bytes, batch, ready };
        Ok((encoder, message))
    }

    /// Lowers the limits for a receiver that takes messages of at most `limit_bytes`.
    pub fn with_limit(self, limit_bytes: usize) -> Self {
        let max_bytes = self.max_bytes.min(limit_bytes.saturating_sub(FIELDS_BYTES_MAX));
        Self { max_bytes, target_bytes: self.target_bytes.min(max_bytes / 2).max(1), ..self }
    }

    /// True if the rows of `message` need not be split.
    fn fits(&self, message: &Message) -> bool {
        message.header.len() + message.body_bytes <= self.max_bytes
    }

    /// Takes the next batch. The messages of the previous batch must have been fetched: its
    /// remaining rows are dropped.
    pub fn begin(&mut self, batch: RecordBatch) {
        debug_assert!(self.batch.is_none(), "the batch before it was not encoded to its end");
        if self.has_dictionaries {
            // The slice has the dictionaries that the receiver will have by then, so a keep-alive
            // message sends none.
            self.rowless = batch.slice(0, 0);
        }
        let row_bytes_mean = batch_bytes(&batch) as f64 / batch.num_rows().max(1) as f64;
        let effort_bytes = effort_bytes(&batch);
        self.batch = Some(UnderWay { batch, start: 0, row_bytes_mean, effort_bytes });
    }

    /// Returns the bytes that [`Encoder::next_message`] may touch, in addition to those that it
    /// sends; `None` when there is no message left.
    pub fn next_effort_bytes(&self) -> Option<usize> {
        match self.ready.is_empty() {
            true => self.batch.as_ref().map(|batch| batch.effort_bytes),
            false => Some(0),
        }
    }

    /// Returns the next message of the batch: new dictionaries, then the rows; `None` at the end. A
    /// batch without rows gives one message.
    ///
    /// # Errors
    /// As [`Encoder::new`]; [`Error::Exhausted`] for a row that is too large for a message.
    pub fn next_message(&mut self) -> Result<Option<Message>> {
        if self.ready.is_empty()
            && let Some(UnderWay { batch, start, row_bytes_mean, effort_bytes }) = self.batch.take()
        {
            let wanted = self.rows_per_message(row_bytes_mean).min(batch.num_rows() - start);
            let start = start + self.encode_rows(&batch, start, wanted)?;
            if start < batch.num_rows() {
                self.batch = Some(UnderWay { batch, start, row_bytes_mean, effort_bytes });
            }
        }
        Ok(self.ready.pop_front())
    }

    /// Returns a message without rows. Call it between batches only.
    ///
    /// # Errors
    /// As [`Encoder::new`].
    pub fn keep_alive(&mut self) -> Result<Message> {
        let rowless = compact(&self.rowless)?;
        self.encode_slice(&rowless)
    }

    /// Estimates the rows of the next message from the last one. A row is assumed to take at most 8
    /// times the mean of the batch. Without this limit, one row that was sent alone with a large
    /// shared value would make all rows look that large.
    fn rows_per_message(&self, row_bytes_mean: f64) -> usize {
        let row_bytes = self.row_bytes.map_or(row_bytes_mean, |row_bytes| row_bytes.min(8.0 * row_bytes_mean));
        ((self.target_bytes as f64 / row_bytes.max(f64::MIN_POSITIVE)) as usize).max(1)
    }

    /// Encodes at most `wanted` rows from `start`, and returns the number of encoded rows.
    fn encode_rows(&mut self, batch: &RecordBatch, start: usize, wanted: usize) -> Result<usize> {
        let whole = self.try_rows(batch, start, wanted)?;
        if wanted <= 1 || self.fits(&whole.message) {
            return self.accept(whole.message, wanted);
        }
        let (mut count, mut bytes) = (wanted, whole.message.body_bytes);
        loop {
            let fitting = count as f64 * (self.target_bytes as f64 / bytes as f64);
            let fewer = (fitting as usize).clamp(1, count / 2);
            let tried = self.try_rows(batch, start, fewer)?;
            let bytes_before = std::mem::replace(&mut bytes, tried.message.body_bytes);
            // If the rows share a large value, every message carries it, however few rows the
            // message has. Then fewer messages are better. If only one row is large, the message of
            // the other rows is small.
            if !self.fits(&tried.message) && bytes > bytes_before / 10 * 9 {
                let others = self.try_rows(batch, start + fewer, count - fewer)?;
                if others.message.body_bytes > bytes_before / 2 {
                    let whole = self.behind_its_dictionaries(whole, batch, start, wanted)?;
                    self.queue(whole)?;
                    return Ok(wanted);
                }
            }
            count = fewer;
            if count == 1 || self.fits(&tried.message) {
                let message = self.behind_its_dictionaries(tried, batch, start, count)?;
                return self.accept(message, count);
            }
        }
    }

    /// Encodes rows that may turn out to be too many.
    fn try_rows(&mut self, batch: &RecordBatch, start: usize, count: usize) -> Result<Tried> {
        let slice = compact(&batch.slice(start, count))?;
        let message = self.encode_slice(&slice)?;
        Ok(Tried { message, ready: self.ready.len() })
    }

    /// Returns the message of rows that were tried. If a later try has queued other dictionaries,
    /// encodes the rows again.
    fn behind_its_dictionaries(
        &mut self,
        tried: Tried,
        batch: &RecordBatch,
        start: usize,
        count: usize,
    ) -> Result<Message> {
        match tried.ready == self.ready.len() {
            true => Ok(tried.message),
            false => self.try_rows(batch, start, count).map(|again| again.message),
        }
    }

    /// Queues a message of `count` rows. Its bytes per row become the estimate for the next
    /// messages.
    fn accept(&mut self, message: Message, count: usize) -> Result<usize> {
        if count > 0 {
            self.row_bytes = Some((message.body_bytes as f64 / count as f64).max(0.125));
        }
        self.queue(message)?;
        Ok(count)
    }

    fn queue(&mut self, message: Message) -> Result<()> {
        let bytes = message.body_bytes as u64;
        if bytes > WIRE_BYTES_MAX {
            return Err(Error::Exhausted(format!(
                "a row or a dictionary takes {}, and a gRPC message holds less than 4 GiB; leave out the column that is too \
                 large, or upload its values in parts",
                human_bytes(bytes)
            )));
        }
        self.ready.push_back(message);
        Ok(())
    }

    /// Encodes a slice, queues its new dictionaries, and returns its rows' message.
    fn encode_slice(&mut self, slice: &RecordBatch) -> Result<Message> {
        let mut stream = Pieces { pieces: self.stream.encode(slice)?.into() };
        let mut last: Option<Message> = None;
        while let Some((message, is_schema)) = stream.next_message()? {
            if is_schema {
                continue;
            }
            if let Some(dictionary) = last.replace(message) {
                self.queue(dictionary)?;
            }
        }
        last.ok_or_else(|| Error::Internal("a batch was encoded to nothing".into()))
    }
}

/// Returns the bytes of the values of a batch, without other values in shared buffers.
pub fn batch_bytes(batch: &RecordBatch) -> u64 {
    batch.columns().iter().map(|column| array_bytes(column) as u64).sum()
}

/// Returns the bytes that encoding a message of the batch may touch, in addition to those that it
/// sends. Columns of some types are not sent as they are: values are copied or compared, and a
/// message of few rows may refer to all of them.
pub(super) fn effort_bytes(batch: &RecordBatch) -> usize {
    let is_sent_as_stored = |data_type: &DataType| {
        !any_part(data_type, &|part| matches!(part, DataType::Dictionary(..)) || is_by_place(part))
    };
    let touched = batch.columns().iter().filter(|column| !is_sent_as_stored(column.data_type()));
    touched.map(|column| column.get_array_memory_size()).sum()
}

/// Returns the bytes that this slice of an array refers to.
pub(super) fn array_bytes(array: &ArrayRef) -> usize {
    match array.data_type() {
        DataType::Utf8View => view_bytes::<StringViewType>(array),
        DataType::BinaryView => view_bytes::<BinaryViewType>(array),
        _ => array.to_data().get_slice_memory_size().unwrap_or_else(|_| array.get_buffer_memory_size()),
    }
}

fn view_bytes<T: ByteViewType>(array: &ArrayRef) -> usize {
    /// Number of views beyond which some are taken for all. Reading this many takes a tenth of a
    /// millisecond.
    const COUNTED_MAX: usize = 64 << 10;
    let views = array.as_byte_view::<T>();
    let step = views.len().div_ceil(COUNTED_MAX).max(1);
    let used: usize = views.lengths().step_by(step).map(|length| length as usize).filter(|&length| length > 12).sum();
    // Several rows may refer to the same bytes.
    let held = views.data_buffers().iter().map(|buffer| buffer.len()).sum();
    views.len() * 16 + used.saturating_mul(step).min(held)
}

/// Encoded stream in pieces, which [`Pieces::next_message`] cuts into its messages.
struct Pieces {
    pieces: VecDeque<Buffer>,
}

impl Pieces {
    /// Returns the next message, and true if it is a schema.
    fn next_message(&mut self) -> Result<Option<(Message, bool)>> {
        if self.pieces.is_empty() {
            return Ok(None);
        }
        let malformed = || Error::Internal("the encoder of record batches wrote a stream that cannot be read".into());
        // Layout: four bytes of ones, the length of the flatbuffer, the flatbuffer, the body.
        let prefix = self.take_joined(8);
        let header_bytes = prefix.get(4..8).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
        let header = self.take_joined(header_bytes.ok_or_else(malformed)? as usize);
        let message = arrow::ipc::root_as_message(&header).map_err(|_| malformed())?;
        let body_bytes = usize::try_from(message.bodyLength()).map_err(|_| malformed())?;
        let is_schema = message.header_type() == arrow::ipc::MessageHeader::Schema;
        let body = self.take(body_bytes);
        Ok(Some((Message { header, app_metadata: Bytes::new(), body, body_bytes }, is_schema)))
    }

    fn take(&mut self, mut bytes: usize) -> Vec<Buffer> {
        let mut taken = Vec::new();
        while let Some(piece) = self.pieces.pop_front() {
            if piece.is_empty() {
                continue;
            }
            if bytes == 0 {
                self.pieces.push_front(piece);
                break;
            }
            let len = piece.len().min(bytes);
            if len < piece.len() {
                self.pieces.push_front(piece.slice(len));
            }
            taken.push(piece.slice_with_length(0, len));
            bytes -= len;
        }
        taken
    }

    fn take_joined(&mut self, bytes: usize) -> Bytes {
        let mut joined = BytesMut::with_capacity(bytes);
        self.take(bytes).iter().for_each(|piece| joined.put_slice(piece));
        joined.freeze()
    }
}
