//! Tests of the whole path from a client's bytes to record batches, without a network.

mod end_to_end;
mod hostile;
mod nulls;
#[path = "../../../../tests/nested/arrays.rs"]
mod random;
mod round_trip;
mod uploads;

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{Array, ArrayData, ArrayRef, DictionaryArray, Int32Array, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Int32Type, Schema, SchemaRef};
use arrow::ipc::MetadataVersion;
use arrow::ipc::writer::{DictionaryTracker, EncodedData, IpcDataGenerator, IpcWriteContext, IpcWriteOptions};
use arrow_flight::{FlightData, FlightDescriptor};
use prost::Message;

use super::decoder::{Content, StreamDecoder, WireDecoder};
use super::landing::SLOT_ALIGNMENT;
use super::{Limits, Received};
use crate::Result;
use crate::memory::{Arena, Bounds, Budget, Interrupt};
use crate::service::cpu_work::CpuWork;

const LIMITS: Limits = Limits { message_bytes: 8 << 20, idle: Duration::from_secs(60) };

fn arena() -> Arena {
    Arena::new(Budget::new("host memory", "--host-memory", 64 << 20))
}

/// Returns the options of C++ and Python senders: buffers at multiples of 8 bytes.
fn like_pyarrow() -> IpcWriteOptions {
    IpcWriteOptions::try_new(8, false, MetadataVersion::V5).unwrap()
}

/// Encodes the messages of an upload: the schema with a descriptor, then dictionaries and batches.
fn messages(schema: &Schema, batches: &[RecordBatch], options: &IpcWriteOptions) -> Vec<FlightData> {
    let generator = IpcDataGenerator::default();
    let mut tracker = DictionaryTracker::new(false);
    let mut context = IpcWriteContext::default();
    let descriptor = FlightDescriptor::new_path(vec!["t".into()]);
    let encoded = generator.schema_to_bytes_with_dictionary_tracker(schema, &mut tracker, options);
    let mut messages = vec![message(encoded).with_descriptor(descriptor).with_app_metadata("{}")];
    for batch in batches {
        // Arrow's writer confuses the rows of sparse unions in slices of lists, so batches are
        // compacted. Batches with forbidden nulls cannot be rebuilt, and stay as they are.
        let compacted = crate::service::compact::compact(batch);
        let batch = compacted.as_ref().unwrap_or(batch);
        let (dictionaries, encoded) = generator.encode(batch, &mut tracker, options, &mut context).unwrap();
        messages.extend(dictionaries.into_iter().chain([encoded]).map(message));
    }
    messages
}

fn message(encoded: EncodedData) -> FlightData {
    FlightData::new().with_data_header(encoded.ipc_message).with_data_body(encoded.arrow_data)
}

/// Encodes the bytes of messages on the wire, with fields in prost's order.
fn wire(messages: &[FlightData]) -> Vec<u8> {
    messages.iter().flat_map(|message| frame(&message.encode_to_vec())).collect()
}

/// Frames a gRPC message, uncompressed.
fn frame(message: &[u8]) -> Vec<u8> {
    [&[0], &(message.len() as u32).to_be_bytes()[..], message].concat()
}

/// Encodes one protobuf field of bytes.
fn field(tag: u32, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    prost::encoding::encode_key(tag, prost::encoding::WireType::LengthDelimited, &mut out);
    prost::encoding::encode_varint(bytes.len() as u64, &mut out);
    out.extend_from_slice(bytes);
    out
}

/// Decodes a stream of chunks, and returns all decoded messages.
fn receive<'a>(chunks: impl IntoIterator<Item = &'a [u8]>, arena: &Arena) -> Result<Vec<Received>> {
    let mut decoder = WireDecoder::new(arena.clone(), LIMITS, Bounds::default());
    let mut received = Vec::new();
    for mut chunk in chunks {
        while decoder.next(&mut chunk)?.is_some() {
            received.extend(decoder.work(&Interrupt::default())?);
        }
        assert!(chunk.is_empty(), "the decoder asked for more while it had {} bytes", chunk.len());
    }
    decoder.end()?;
    Ok(received)
}

/// Decodes a stream of chunks, and returns only the batches.
fn decode<'a>(chunks: impl IntoIterator<Item = &'a [u8]>, arena: &Arena) -> Result<Vec<RecordBatch>> {
    receive(chunks, arena).map(batches)
}

fn decode_messages(messages: Vec<FlightData>, arena: &Arena) -> Result<Vec<RecordBatch>> {
    let mut decoder = StreamDecoder::new(arena.clone(), LIMITS);
    messages
        .into_iter()
        .map(|message| decoder.decode(message, &Interrupt::default()))
        .collect::<Result<_>>()
        .map(batches)
}

fn batches(received: Vec<Received>) -> Vec<RecordBatch> {
    let batch = |message: Received| match message.content {
        Content::Batch(batch) => Some(batch),
        Content::Schema(_) | Content::Dictionary | Content::Nothing => None,
    };
    received.into_iter().filter_map(batch).collect()
}

/// Asserts that all buffers of a batch are aligned, and that the arena's budget covers those with
/// bytes.
fn assert_in_arena(batch: &RecordBatch, arena: &Arena) {
    fn check(data: &ArrayData, bytes: &mut usize) {
        let buffers = data.buffers().iter().chain(data.nulls().map(|nulls| nulls.buffer()));
        for buffer in buffers.filter(|buffer| !buffer.is_empty()) {
            assert_eq!(buffer.as_ptr() as usize % SLOT_ALIGNMENT, 0, "a buffer of {} is not aligned", data.data_type());
            // Arrow itself creates the single offset of an empty list.
            *bytes += if data.is_empty() { 0 } else { buffer.len() };
        }
        data.child_data().iter().for_each(|child| check(child, bytes));
    }
    let mut bytes = 0;
    batch.columns().iter().for_each(|column| check(&column.to_data(), &mut bytes));
    // Several columns may share a dictionary, which this counts once for each column.
    if !batch.schema().fields().iter().any(|field| field.data_type().to_string().contains("Dictionary")) {
        assert!(bytes as u64 <= arena.budget().used_bytes(), "{bytes} bytes are more than the arena gave out");
    }
}

/// Builds a small batch with a column of each important layout: fixed, bitmap, variable,
/// dictionary.
fn small_batch() -> RecordBatch {
    let strings: StringArray = [Some("a"), None, Some("ccc"), Some("größer"), Some("")].into_iter().collect();
    let dictionary: DictionaryArray<Int32Type> =
        [Some("x"), Some("y"), None, Some("x"), Some("z")].into_iter().collect();
    let columns: [(&str, ArrayRef); 4] = [
        ("k", Arc::new(Int64Array::from(vec![1, 2, 3, 4, 5]))),
        ("v", Arc::new(Int32Array::from(vec![Some(1), None, Some(3), None, Some(5)]))),
        ("s", Arc::new(strings)),
        ("d", Arc::new(dictionary)),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap()
}

fn schema_of(fields: Vec<(&str, DataType)>) -> SchemaRef {
    Arc::new(Schema::new(
        fields.into_iter().map(|(name, data_type)| Field::new(name, data_type, true)).collect::<Vec<_>>(),
    ))
}
