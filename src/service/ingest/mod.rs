//! Ingest: the way of an upload from the socket into the arena, with one copy.
//!
//! ```text
//!   HTTP/2 chunks ─► wire: gRPC + protobuf ─┬─ header ─► plan: place of every buffer ─┐
//!                                           └─ body ───────────── landing: one copy ──┴─► arrays: validated ─► UploadSink
//!   tonic's FlightData ─► StreamDecoder (a second copy) ── the same plan, landing and validation ──────────────────┘
//! ```
//!
//! tonic's own decoder copies every chunk into a buffer of its own, and arrow's copies the body again because it is not
//! aligned; a third copy would bring it into the arena. Senders put the body last in a message, so its Arrow header is
//! known before the first byte of it arrives: [`DoPutLayer`] stands in front of tonic's Flight service, takes the calls
//! of DoPut whose descriptor is a path, and copies each chunk straight into its aligned places. Everything else it hands
//! on unchanged; a call whose messages gRPC itself compresses too, to be decoded by [`StreamDecoder`].
//!
//! Nothing that a client says is believed: a length is checked against what is there before memory is taken for it, and
//! every array is validated in full before anybody sees it. What goes wrong ends that upload with a sentence, and leaves
//! nothing behind.
//!
//! This room knows of memory, and of uploads through [`UploadHandler`] only; nothing of the catalog, nor of who calls.

mod arrays;
mod decoder;
mod landing;
mod layer;
mod nulls;
mod plan;
mod respond;
mod schema;
#[cfg(test)]
mod tests;
mod upload;
mod wire;

use std::time::Duration;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow_flight::FlightDescriptor;
use bytes::Bytes;
use http::Extensions;

pub use decoder::{Content, Received, StreamDecoder};
pub use layer::{DoPut, DoPutLayer};
pub use respond::Acks;
pub(super) use upload::timeout;
pub use upload::upload_messages;

use crate::Result;

/// Starts uploads.
#[tonic::async_trait]
pub trait UploadHandler: Send + Sync + 'static {
    /// Starts an upload to `descriptor`. `extensions` are those of the call, where earlier layers left who calls;
    /// `app_metadata` is that of the first message.
    ///
    /// # Errors
    /// Whatever can be refused before the first row is; the call ends with it.
    async fn begin(
        &self,
        extensions: &Extensions,
        descriptor: FlightDescriptor,
        schema: SchemaRef,
        app_metadata: Bytes,
    ) -> Result<Box<dyn UploadSink>>;
}

/// Takes the batches of one upload. Dropping it before [`UploadSink::finish`] forgets the upload.
#[tonic::async_trait]
pub trait UploadSink: Send {
    /// Takes the next batch, whose buffers live in the arena and were validated.
    ///
    /// # Errors
    /// End the call; the sink is dropped.
    fn append(&mut self, batch: RecordBatch, app_metadata: Bytes) -> Result<Ack>;

    /// Called when the client has sent everything.
    ///
    /// # Errors
    /// End the call: the upload did not happen.
    async fn finish(self: Box<Self>) -> Result<Ack>;
}

/// What an upload has taken so far, which clients are told after each batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ack {
    /// Rows taken, since the upload began.
    pub rows: u64,
    /// Bytes of their buffers.
    pub bytes: u64,
}

impl Ack {
    /// The acknowledgement as clients read it, in `app_metadata`: `{"rows":1000,"bytes":8064}`.
    pub fn to_json(self) -> String {
        format!(r#"{{"rows":{},"bytes":{}}}"#, self.rows, self.bytes)
    }
}

/// How much a client may send at a time, and how long it may send nothing.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The largest message, in bytes, as it is sent and after decompression.
    pub message_bytes: usize,
    /// How long an upload waits for the next bytes of its client, before it is given up with its rows.
    pub idle: Duration,
}
