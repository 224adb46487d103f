//! Turns uploads into tables of the catalog.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow_flight::FlightDescriptor;
use arrow_flight::flight_descriptor::DescriptorType;
use bytes::Bytes;
use http::{Extensions, HeaderMap};

use super::auth::{Caller, Role};
use super::call_record::CallRecord;
use super::commands;
use super::get_info::{not_identified, table_name};
use super::ingest::{Ack, UploadHandler, UploadSink};
use super::shared::{Shared, Worker, shutting_down};
use crate::catalog::{UploadOptions, UploadStream};
use crate::human::asked;
use crate::memory::{Interrupt, human_bytes};
use crate::{Context, Error, Result};

/// Rough size of a name in upload options, with the text around it, in bytes.
const NAME_BYTES: usize = 16;

/// Turns uploads into tables.
#[derive(Clone, Debug)]
pub struct TableUploads {
    shared: Arc<Shared>,
}

impl TableUploads {
    /// Creates a handler that uploads into the catalog of the given server.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }
}

#[tonic::async_trait]
impl UploadHandler for TableUploads {
    async fn begin(
        &self,
        extensions: &Extensions,
        descriptor: FlightDescriptor,
        schema: SchemaRef,
        app_metadata: Bytes,
    ) -> Result<Box<dyn UploadSink>> {
        let caller = extensions.get::<Caller>().cloned().ok_or_else(not_identified)?;
        let record = extensions.get::<CallRecord>().cloned().unwrap_or_default();
        let worker = self.shared.worker(&caller);
        if descriptor.r#type != DescriptorType::Path as i32 {
            return Err(commands::flight_sql_refusal(&descriptor.cmd).unwrap_or_else(|| {
                Error::Unsupported(
                    "an upload takes a path, not a command; upload to path [\"table\"], with options as JSON in app_metadata"
                        .into(),
                )
            }));
        }
        let name = table_name(&descriptor.path)?.to_owned();
        record.set_command(&name);
        caller.require(Role::Writer, &format!("uploading table {}", asked(&name)))?;
        let header = extensions.get::<OptionsHeader>().cloned();
        let names = schema.fields().len() + app_metadata.len() / NAME_BYTES;
        let begun = move |shared: &Shared| {
            let options = options(&app_metadata, header.as_ref())?;
            // A drain waits for uploads under way, so an upload may still open the streams that it
            // needs.
            let is_under_way = |id: &String| shared.uploads.is_under_way(&caller.tenant, id);
            if shared.is_draining() && !options.upload.as_ref().is_some_and(is_under_way) {
                return Err(shutting_down());
            }
            let is_temporary = options.temporary_seconds.is_some();
            let stream = shared.uploads.open(caller.editor(), &name, schema, options);
            Ok((stream.context(|| format!("uploading table {}", asked(&name)))?, name, is_temporary))
        };
        let (stream, name, is_temporary) = worker.work_on(names, begun).await?;
        let bytes_max = is_temporary.then(|| self.shared.scheduler.build_bytes_max());
        let (ack, shared) = (Ack::default(), self.shared.clone());
        Ok(Box::new(TableSink { name, stream, bytes_max, ack, record, shared, worker }))
    }
}

/// Upload options in a header of the call, because clients such as pyarrow cannot put
/// `app_metadata` on the first message.
#[derive(Clone, Debug)]
pub(super) struct OptionsHeader(Bytes);

impl OptionsHeader {
    const NAME: &str = "dovetail-upload-options";

    /// Returns the options header of a call, if there is one. Handlers see it in the extensions.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        headers.get(Self::NAME).map(|value| Self(Bytes::copy_from_slice(value.as_bytes())))
    }
}

/// Reads options as JSON from the first message's `app_metadata`, or from the header. Without
/// either, all options are defaults.
fn options(app_metadata: &[u8], header: Option<&OptionsHeader>) -> Result<UploadOptions> {
    let (place, json) = match (app_metadata, header) {
        (b"", None) => return Ok(UploadOptions::default()),
        (b"", Some(OptionsHeader(json))) => (format!("the header {}", OptionsHeader::NAME), &json[..]),
        (json, None) => ("app_metadata".into(), json),
        (_, Some(_)) => {
            return Err(Error::Invalid(format!(
                "upload options are in both app_metadata and the header {}; send them in one place",
                OptionsHeader::NAME
            )));
        }
    };
    // The JSON is first read as a map. Otherwise serde would accept a list, as the values of the
    // fields in order.
    let options = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(json)
        .and_then(|_| serde_json::from_slice(json));
    options.map_err(|error| {
        Error::Invalid(format!(
            "the upload options in {place} cannot be read: {error}; write JSON such as {{\"mode\": \"replace\", \
             \"sorted_by\": [\"k\"], \"unique\": [[\"k\"]]}}"
        ))
    })
}

struct TableSink {
    name: String,
    stream: UploadStream,
    /// Maximum bytes of the rows of all streams of the upload, if it makes a temporary table.
    bytes_max: Option<u64>,
    ack: Ack,
    record: CallRecord,
    shared: Arc<Shared>,
    worker: Worker,
}

#[tonic::async_trait]
impl UploadSink for TableSink {
    fn append(&mut self, batch: RecordBatch, interrupt: &Interrupt) -> Result<Ack> {
        let rows = batch.num_rows() as u64;
        self.stream.append_interruptible(batch, interrupt).context(|| format!("uploading table {:?}", self.name))?;
        self.ack = Ack { rows: self.stream.rows(), bytes: self.stream.bytes() };
        if let Some(bytes_max) = self.bytes_max.filter(|&bytes_max| self.stream.upload_bytes() > bytes_max) {
            return Err(Error::Exhausted(format!(
                "the rows of temporary table {:?} take more than {}, the part of a device's memory that a build side may take; \
                 send fewer columns, upload a table that stays, or raise the server's --device-memory",
                self.name,
                human_bytes(bytes_max)
            )));
        }
        self.record.add_rows(rows);
        self.shared.metrics.received_rows.inc_by(rows);
        Ok(self.ack)
    }

    async fn finish(self: Box<Self>) -> Result<Ack> {
        let Self { name, stream, ack, worker, .. } = *self;
        // Finishing checks the declared order row by row, and combines the statistics of every
        // column.
        let finished = worker.work(move |_, interrupt| stream.finish(interrupt)).await;
        finished.context(|| format!("uploading table {name:?}"))?;
        Ok(ack)
    }
}
