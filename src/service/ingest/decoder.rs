//! Decodes the messages of one upload to record batches in the arena.
//!
//! ```text
//!   header ── open ──► Opened (schema | dictionary plan | batch plan) ── Landing ◄── body
//!                                     └──────────────── close ──► Content
//! ```
//!
//! Opening and closing take effort, which is known before and counted in bytes. The callers decide
//! on which thread to do it.
//!
//! The flatbuffer is verified before it is read, and all code that reads it runs under
//! `catch_unwind`. The reason is that arrow's schema conversion panics on unknown types. A message
//! must never end more than its own upload.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{Field, Fields, SchemaRef};
use arrow::ipc;
use arrow_flight::{FlightData, FlightDescriptor};
use bytes::Bytes;
use flatbuffers::VerifierOptions;
use prost::Message;

use super::Limits;
use super::arrays::{Dictionaries, array, check_views, record_batch, reserve_bitmaps};
use super::landing::Landing;
use super::plan::{BatchPlan, plan_batch};
use super::schema::{StreamSchema, read_schema};
use super::wire::{Event, HEADER_BYTES_MAX, Parser};
use crate::human::{first_of, quoted, type_name};
use crate::memory::{Arena, Bounds, Held, Interrupt, human_bytes, schema_bytes};
use crate::{Context, Error, Result, panics};

/// Effort of a byte of a header, in bytes of a body. A header lists arrays and buffers, and each of
/// them becomes several objects.
const HEADER_EFFORT: usize = 16;

/// Decoded message of an upload.
#[derive(Debug)]
pub struct Received {
    /// Destination of the upload; the first message has it.
    pub descriptor: Option<FlightDescriptor>,
    /// Message's `app_metadata`; empty if it has none.
    pub app_metadata: Bytes,
    pub content: Content,
    /// True if the message has rows, or values of a dictionary.
    pub has_rows: bool,
}

/// Content of a message.
#[derive(Debug)]
pub enum Content {
    Schema(SchemaRef),
    /// Rows, whose buffers are stored in the arena at multiples of 64 bytes.
    Batch(RecordBatch),
    /// A dictionary, which the batches that follow refer to. The consumer needs none of it.
    Dictionary,
    /// Metadata alone.
    Nothing,
}

/// Decodes one upload on the ordinary path: tonic has received each message, so its whole Arrow
/// body is in memory. Batches are copied into the arena, and validated like those of the one-copy
/// path.
#[derive(Debug)]
pub struct StreamDecoder {
    arena: Arena,
    limits: Limits,
    schema: Option<StreamSchema>,
    dictionaries: Dictionaries,
    /// Bounds of the memory of the schema.
    bounds: Bounds,
    schema_held: Held,
}

/// Decodes the bytes of a DoPut request, however they are cut into chunks: the one-copy path.
#[derive(Debug)]
pub(super) struct WireDecoder {
    parser: Parser,
    decoder: StreamDecoder,
    /// Header of the current message, once it is read.
    opened: Option<Opened>,
    landing: Option<Landing>,
    body_len: usize,
    /// Step that [`WireDecoder::work`] does next.
    pending: Option<Pending>,
    /// Bytes of bodies that have rows.
    row_bytes: u64,
}

/// Step of decoding that may take long.
#[derive(Clone, Copy, Debug)]
enum Pending {
    /// A body begins: its header is read, and memory is allocated.
    Body,
    /// A message has ended: its arrays are built and checked.
    End,
}

/// Header that was read, with the plan for its body.
#[derive(Debug)]
pub(super) enum Opened {
    Schema(StreamSchema),
    Dictionary { id: i64, is_delta: bool, plan: BatchPlan },
    Batch(BatchPlan),
    Nothing,
}

impl Opened {
    fn plan(&self) -> Option<&BatchPlan> {
        match self {
            Self::Dictionary { plan, .. } | Self::Batch(plan) => Some(plan),
            Self::Schema(_) | Self::Nothing => None,
        }
    }

    fn is_compressed(&self) -> bool {
        self.plan().is_some_and(|plan| plan.compression.is_some())
    }

    fn has_rows(&self) -> bool {
        self.plan().is_some_and(|plan| plan.rows > 0)
    }
}

impl WireDecoder {
    /// Creates a decoder of one request. Its batches go to `arena`. Other memory is taken within
    /// `bounds`.
    pub fn new(arena: Arena, limits: Limits, bounds: Bounds) -> Self {
        Self {
            parser: Parser::new(limits.message_bytes, bounds.clone()),
            decoder: StreamDecoder { bounds, ..StreamDecoder::new(arena, limits) },
            opened: None,
            landing: None,
            body_len: 0,
            pending: None,
            row_bytes: 0,
        }
    }

    /// Takes bytes from the front of `input` until there is work to do. Returns its effort, in
    /// bytes; `None` when more input is needed. [`WireDecoder::work`] must follow before the next
    /// call.
    ///
    /// # Errors
    /// [`Error::Invalid`] for malformed bytes, [`Error::Exhausted`] above a limit. The decoder is
    /// of no use afterwards.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<usize>> {
        debug_assert!(self.pending.is_none(), "the work before it was not done");
        while let Some(event) = self.parser.next(input)? {
            match event {
                Event::FieldEnds => {}
                Event::BodyBegins(len) => {
                    self.body_len = len;
                    self.pending = Some(Pending::Body);
                    return Ok(Some(self.header_effort()));
                }
                Event::Body(bytes) => {
                    if self.opened.as_ref().is_some_and(Opened::has_rows) {
                        self.row_bytes += bytes.len() as u64;
                    }
                    self.landing.as_mut().expect("a body begins before it goes on").write(bytes);
                }
                Event::MessageEnds => {
                    self.pending = Some(Pending::End);
                    return Ok(Some(match (&self.opened, &self.landing) {
                        (Some(opened), Some(Landing::Scatter(_))) => self.decoder.effort(opened),
                        // A few compressed bytes may become many.
                        (Some(opened), _) if opened.is_compressed() => usize::MAX,
                        // The whole body is copied once more.
                        (Some(opened), _) => self.decoder.effort(opened).saturating_add(self.body_len),
                        // The body came before its header, so nothing is known about its rows.
                        (None, Some(_)) => usize::MAX,
                        (None, None) => self.header_effort(),
                    }));
                }
            }
        }
        Ok(None)
    }

    /// Does the work that [`WireDecoder::next`] found. Returns a message if it is complete.
    ///
    /// # Errors
    /// As [`WireDecoder::next`]; also [`Error::Exhausted`] above the arena's budget,
    /// [`Error::Unsupported`] for unsupported data, and the interrupt's.
    pub fn work(&mut self, interrupt: &Interrupt) -> Result<Option<Received>> {
        match self.pending.take() {
            None => Ok(None),
            Some(Pending::Body) => self.begin_body().map(|()| None),
            Some(Pending::End) => self.end_message(interrupt).map(Some),
        }
    }

    /// Returns the bytes of rows that have arrived, whether their message is complete or not.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    fn header_effort(&self) -> usize {
        self.parser.fields().header.as_ref().map_or(0, Vec::len).saturating_mul(HEADER_EFFORT)
    }

    /// True if a message has begun and is not complete.
    pub fn is_inside_message(&self) -> bool {
        self.parser.is_inside_message()
    }

    /// Ends the input.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the bytes ended inside a message.
    pub fn end(&self) -> Result<()> {
        self.parser.end()
    }

    fn begin_body(&mut self) -> Result<()> {
        let len = self.body_len;
        self.landing = Some(match &self.parser.fields().header {
            Some(header) => self.decoder.land(self.opened.insert(self.decoder.open(header, len)?), len)?,
            // Before the schema, only the schema may come, which has no body.
            None if self.decoder.schema.is_none() => Landing::Discard,
            None => Landing::whole(len, &self.decoder.arena)?,
        });
        Ok(())
    }

    fn end_message(&mut self, interrupt: &Interrupt) -> Result<Received> {
        let fields = self.parser.take_fields();
        let body_len = std::mem::take(&mut self.body_len);
        let opened = match self.opened.take() {
            Some(opened) => opened,
            None => self.decoder.open(fields.header.as_deref().unwrap_or_default(), body_len)?,
        };
        let landing = match self.landing.take() {
            Some(landing) => landing,
            None => self.decoder.land(&opened, 0)?,
        };
        let has_rows = opened.has_rows();
        let content = self.decoder.close(opened, landing, interrupt)?;
        let descriptor = fields.descriptor.map(|bytes| read_descriptor(&bytes)).transpose()?;
        Ok(Received { descriptor, app_metadata: fields.app_metadata.unwrap_or_default().into(), content, has_rows })
    }
}

impl StreamDecoder {
    /// Creates a decoder of one stream. Its batches go to `arena`.
    pub fn new(arena: Arena, limits: Limits) -> Self {
        let (bounds, held) = (Bounds::default(), Held::default());
        Self { arena, limits, schema: None, dictionaries: Dictionaries::default(), bounds, schema_held: held }
    }

    /// Returns the effort of decoding a message, in bytes.
    pub(super) fn effort_of(&self, message: &FlightData) -> usize {
        match message.data_body.len() {
            0 => message.data_header.len().saturating_mul(HEADER_EFFORT),
            // The header is not read yet, so nothing is known about the rows.
            _ => usize::MAX,
        }
    }

    /// Returns the effort of [`StreamDecoder::close`], in bytes.
    fn effort(&self, opened: &Opened) -> usize {
        let deltas = self.dictionaries.parts_bytes();
        opened.plan().map_or(0, |plan| plan.checked_bytes().saturating_add(deltas))
    }

    /// Decodes one message.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a malformed message, [`Error::Exhausted`] above a limit or the
    /// arena's budget, [`Error::Unsupported`] for unsupported data, and the interrupt's. The
    /// decoder is of no use afterwards.
    pub fn decode(&mut self, message: FlightData, interrupt: &Interrupt) -> Result<Received> {
        let FlightData { flight_descriptor: descriptor, data_header, app_metadata, data_body } = message;
        for (len, max, what) in
            [(data_header.len(), HEADER_BYTES_MAX, "header"), (data_body.len(), self.limits.message_bytes, "body")]
        {
            if len > max {
                return Err(Error::Exhausted(format!(
                    "the {what} of a message has {}, over the limit of {}; send smaller batches",
                    human_bytes(len as u64),
                    human_bytes(max as u64),
                )));
            }
        }
        let opened = self.open(&data_header, data_body.len())?;
        let mut landing = self.land(&opened, data_body.len())?;
        landing.write(&data_body);
        let has_rows = opened.has_rows();
        let content = self.close(opened, landing, interrupt)?;
        Ok(Received { descriptor, app_metadata, content, has_rows })
    }

    /// Reads and checks a header. Plans the places of its body of `body_len` bytes.
    fn open(&self, header: &[u8], body_len: usize) -> Result<Opened> {
        without_panics(|| self.open_inner(header, body_len))
    }

    fn open_inner(&self, header: &[u8], body_len: usize) -> Result<Opened> {
        if header.is_empty() {
            return match body_len {
                0 => Ok(Opened::Nothing),
                _ => Err(Error::Invalid(format!("a message has a body of {body_len} bytes and no header"))),
            };
        }
        let message = ipc::root_as_message_with_opts(&verified(header), header).map_err(|error| {
            let why = in_one_line(&error.to_string());
            Error::Invalid(format!("the header of a message is not an Arrow IPC flatbuffer: {why}"))
        })?;
        let version = message.version();
        if version != ipc::MetadataVersion::V4 && version != ipc::MetadataVersion::V5 {
            return Err(Error::Unsupported(format!("Arrow IPC format {version:?} is not supported; send V5 (or V4)")));
        }
        if usize::try_from(message.bodyLength()).map_or(true, |declared| declared > body_len) {
            return Err(Error::Invalid(format!(
                "the header of a message declares a body of {} bytes, and the body has {body_len}",
                message.bodyLength()
            )));
        }
        if let Some(schema) = message.header_as_schema() {
            return self.open_schema(schema).context(|| "reading the schema");
        }
        if let Some(batch) = message.header_as_record_batch() {
            let schema = self.schema("a record batch")?;
            let plan = plan_batch(batch, version, schema.schema.fields(), body_len);
            return plan.context(|| "reading a record batch").map(Opened::Batch);
        }
        if let Some(dictionary) = message.header_as_dictionary_batch() {
            let id = dictionary.id();
            return self.open_dictionary(dictionary, version, body_len).context(|| format!("reading dictionary {id}"));
        }
        Err(Error::Unsupported(format!(
            "a message of type {:?} is not supported; send a schema, dictionaries and record batches",
            message.header_type()
        )))
    }

    fn open_schema(&self, schema: ipc::Schema<'_>) -> Result<Opened> {
        let schema = read_schema(schema)?;
        match &self.schema {
            Some(before) if before.schema != schema.schema => Err(Error::Invalid(format!(
                "the schema changed during the stream: {} after {}",
                describe(&schema.schema),
                describe(&before.schema),
            ))),
            // Some senders repeat the schema.
            Some(_) => Ok(Opened::Nothing),
            None => Ok(Opened::Schema(schema)),
        }
    }

    fn open_dictionary(
        &self,
        dictionary: ipc::DictionaryBatch<'_>,
        version: ipc::MetadataVersion,
        body_len: usize,
    ) -> Result<Opened> {
        let schema = self.schema("a dictionary")?;
        let (id, is_delta) = (dictionary.id(), dictionary.isDelta());
        let values = schema
            .dictionary_values
            .get(&id)
            .ok_or_else(|| Error::Invalid("no column of the schema has a dictionary of that number".into()))?;
        let batch = dictionary.data().ok_or_else(|| Error::Invalid("the message has no values".into()))?;
        let fields = Fields::from(vec![Field::new("values", values.clone(), true)]);
        let plan = plan_batch(batch, version, &fields, body_len)?;
        Ok(Opened::Dictionary { id, is_delta, plan })
    }

    fn schema(&self, what: &str) -> Result<&StreamSchema> {
        self.schema.as_ref().ok_or_else(|| Error::Invalid(format!("{what} came before the schema")))
    }

    fn land(&self, opened: &Opened, body_len: usize) -> Result<Landing> {
        match opened.plan() {
            Some(plan) => Landing::planned(plan, body_len, &self.arena),
            None => Ok(Landing::Discard),
        }
    }

    /// Builds the arrays of a message whose body has landed.
    fn close(&mut self, opened: Opened, landing: Landing, interrupt: &Interrupt) -> Result<Content> {
        without_panics(|| self.close_inner(opened, landing, interrupt))
    }

    fn close_inner(&mut self, opened: Opened, landing: Landing, interrupt: &Interrupt) -> Result<Content> {
        let limit = self.limits.message_bytes;
        let arena = &self.arena;
        match opened {
            Opened::Nothing => Ok(Content::Nothing),
            Opened::Schema(schema) => {
                self.schema_held = self.bounds.reserve(schema_bytes(&schema.schema), "the schema of an upload")?;
                Ok(Content::Schema(self.schema.insert(schema).schema.clone()))
            }
            Opened::Batch(plan) => {
                let attempt = || "reading a record batch";
                let buffers = landing.finish(&plan, arena, limit, interrupt).context(attempt)?;
                check_views(&plan.columns, &buffers, limit).context(attempt)?;
                let _bitmaps = reserve_bitmaps(&plan.columns, arena).context(attempt)?;
                let schema = Arc::clone(&self.schema("a record batch")?.schema);
                let batch = record_batch(&plan, &buffers, &schema, &mut self.dictionaries, arena, interrupt);
                batch.context(attempt).map(Content::Batch)
            }
            Opened::Dictionary { id, is_delta, plan } => {
                let attempt = || format!("reading dictionary {id}");
                let buffers = landing.finish(&plan, arena, limit, interrupt).context(attempt)?;
                check_views(&plan.columns, &buffers, limit).context(attempt)?;
                let _bitmaps = reserve_bitmaps(&plan.columns, arena).context(attempt)?;
                let values = array(&plan.columns[0], &buffers, &mut self.dictionaries, arena).context(attempt)?;
                self.dictionaries.insert(id, values, is_delta).context(attempt)?;
                Ok(Content::Dictionary)
            }
        }
    }
}

/// Reads a protobuf descriptor.
///
/// # Errors
/// [`Error::Invalid`] when the bytes are no descriptor.
pub(super) fn read_descriptor(bytes: &[u8]) -> Result<FlightDescriptor> {
    FlightDescriptor::decode(bytes)
        .map_err(|error| Error::Invalid(format!("the flight descriptor cannot be read: {error}")))
}

/// Returns the limits of a header. Parts of a flatbuffer may be shared, and each use is decoded to
/// a copy of its own. So the size that counts is that of all uses.
fn verified(header: &[u8]) -> VerifierOptions {
    /// Senders share the layouts of tables, which are a few bytes each.
    const USES_MAX: usize = 8;
    VerifierOptions { max_apparent_size: 4096 + USES_MAX * header.len(), ..VerifierOptions::default() }
}

/// Runs a reader of a client's bytes. A panic in it becomes that client's error.
fn without_panics<T>(read: impl FnOnce() -> Result<T>) -> Result<T> {
    // State that the closure changes is not used after an error, because the error ends the upload.
    panics::caught(read).unwrap_or_else(|said| {
        let said = in_one_line(&said);
        Err(Error::Invalid(format!("a message is malformed, or of a kind that Arrow's reader does not know: {said}")))
    })
}

/// Joins the lines of a library's message, so that it fits into a sentence.
fn in_one_line(said: &str) -> String {
    let lines = said.lines().map(|line| line.trim().trim_end_matches('.')).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(", ")
}

fn describe(schema: &SchemaRef) -> String {
    let column = |field: &Arc<Field>| format!("{} {}", quoted(field.name()), type_name(field.data_type()));
    format!("({})", first_of(schema.fields().iter().map(column)))
}
