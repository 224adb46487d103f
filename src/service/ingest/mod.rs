//! Ingest: an upload's path from the socket into the arena, with one copy.
//!
//! ```text
//!   HTTP/2 chunks ─► wire: gRPC + protobuf ─┬─ header ─► plan: place of every buffer ─┐
//!                                           └─ body ───► landing: one copy ───────────┤
//!                                         UploadSink ◄── arrays: validated ◄──────────┘
//!   tonic's FlightData ─► StreamDecoder (a second copy) ─► the same plan, landing and arrays
//! ```
//!
//! tonic's own decoder copies every chunk into a buffer of its own. arrow's decoder copies the body
//! again because it is not aligned. A third copy would bring it into the arena.
//!
//! Senders put the body last in a message, so its Arrow header is known before the first byte of
//! the body arrives. [`DoPutLayer`] stands in front of tonic's Flight service. It takes the calls
//! of DoPut whose descriptor is a path, and copies each chunk straight to its aligned place. It
//! passes all other calls on unchanged. This includes calls whose messages gRPC itself compresses,
//! which [`StreamDecoder`](decoder::StreamDecoder) decodes.
//!
//! No data of a client is trusted. A length is checked against the available bytes before memory is
//! taken for it. Every array is validated in full before it leaves this room. An error ends only
//! its upload, with a sentence, and leaves no data behind.
//!
//! Work on a message takes as long as the rows that it makes, which may be many more bytes than
//! were sent: views share text, runs and nulls take no bytes. So the effort is computed from the
//! header before the work, and long work runs on a thread of its own
//! ([`CpuWork`](crate::service::cpu_work::CpuWork)). It ends with its upload. The text of views is
//! limited like the bytes of a message. Memory that only the checks need is reserved.
//!
//! This room depends on memory, and on uploads only through [`UploadHandler`]. It does not depend
//! on the catalog, nor on authentication.

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

pub use decoder::{Content, Received};
pub use layer::{DoPut, DoPutLayer};
pub use respond::Acks;
pub use upload::upload_messages;
pub(super) use upload::{Source, Wire, timeout};

use crate::Result;
use crate::memory::Interrupt;

/// Starts uploads.
#[tonic::async_trait]
pub trait UploadHandler: Send + Sync + 'static {
    /// Starts an upload to `descriptor`. `extensions` are those of the call, in which earlier
    /// layers stored its caller. `app_metadata` is that of the first message.
    ///
    /// # Errors
    /// Any refusal before the first row. The error ends the call.
    async fn begin(
        &self,
        extensions: &Extensions,
        descriptor: FlightDescriptor,
        schema: SchemaRef,
        app_metadata: Bytes,
    ) -> Result<Box<dyn UploadSink>>;
}

/// Takes the batches of one upload. Dropping it before [`UploadSink::finish`] discards the upload.
#[tonic::async_trait]
pub trait UploadSink: Send {
    /// Takes the next batch. Its buffers are stored in the arena and validated. The interrupt is
    /// checked every few milliseconds.
    ///
    /// # Errors
    /// Any error ends the call; the sink is dropped.
    fn append(&mut self, batch: RecordBatch, interrupt: &Interrupt) -> Result<Ack>;

    /// Completes the upload, after the client has sent all its data.
    ///
    /// # Errors
    /// Any error ends the call, and the upload has no effect.
    async fn finish(self: Box<Self>) -> Result<Ack>;
}

/// Progress of an upload, which clients receive after each batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ack {
    /// Rows taken since the upload began.
    pub rows: u64,
    /// Bytes of the buffers of those rows.
    pub bytes: u64,
}

impl Ack {
    /// Returns the acknowledgement as clients read it in `app_metadata`:
    /// `{"rows":1000,"bytes":8064}`.
    pub fn to_json(self) -> String {
        format!(r#"{{"rows":{},"bytes":{}}}"#, self.rows, self.bytes)
    }
}

/// Limits on the size of a message and on the idle time of a client.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Largest message, in bytes, as it is sent and after decompression. It also limits the text to
    /// which the views of a message refer.
    pub message_bytes: usize,
    /// Time that an upload waits for the next rows of its client. After that, the upload is given
    /// up with its rows.
    pub idle: Duration,
}
