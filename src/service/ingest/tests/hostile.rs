//! Messages of hostile, broken or confused senders: each gets an error in a sentence, and leaves no
//! memory allocated.

use std::iter::once;

use arrow::array::{ArrayDataBuilder, StringViewArray, make_array};
use arrow::buffer::Buffer;
use arrow::ipc;
use arrow::ipc::{CompressionType, Endianness, MessageHeader};
use flatbuffers::FlatBufferBuilder;
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::random::{leaf_types, nested_types, random_batch};
use super::*;
use crate::Error;

fn sent(batch: &RecordBatch) -> Vec<FlightData> {
    messages(&batch.schema(), std::slice::from_ref(batch), &like_pyarrow())
}

/// Decodes on both paths. Asserts that both refuse with the same sentence, which contains `part`,
/// and that no memory is held afterwards.
fn assert_refused(messages: &[FlightData], part: &str) -> Error {
    let arena = arena();
    let error = decode(once(&wire(messages)[..]), &arena).expect_err(part);
    assert!(error.message().contains(part), "{error:?} does not say {part:?}");
    assert_eq!(decode_messages(messages.to_vec(), &arena).expect_err(part), error);
    assert_eq!(arena.budget().used_bytes(), 0);
    error
}

/// Builds a record batch header by hand: nodes (length, nulls) and buffers (offset, length).
fn batch_header(rows: i64, nodes: &[(i64, i64)], buffers: &[(i64, i64)], variadic: &[i64], body_len: i64) -> Vec<u8> {
    let mut builder = FlatBufferBuilder::new();
    let nodes: Vec<_> = nodes.iter().map(|&(length, nulls)| ipc::FieldNode::new(length, nulls)).collect();
    let buffers: Vec<_> = buffers.iter().map(|&(offset, length)| ipc::Buffer::new(offset, length)).collect();
    let nodes = builder.create_vector(&nodes);
    let buffers = builder.create_vector(&buffers);
    let variadic = builder.create_vector(variadic);
    let mut batch = ipc::RecordBatchBuilder::new(&mut builder);
    batch.add_length(rows);
    batch.add_nodes(nodes);
    batch.add_buffers(buffers);
    batch.add_variadicBufferCounts(variadic);
    let batch = batch.finish().as_union_value();
    finish_message(builder, MessageHeader::RecordBatch, batch, body_len)
}

fn finish_message(
    mut builder: FlatBufferBuilder<'_>,
    header_type: MessageHeader,
    header: flatbuffers::WIPOffset<flatbuffers::UnionWIPOffset>,
    body_len: i64,
) -> Vec<u8> {
    let mut message = ipc::MessageBuilder::new(&mut builder);
    message.add_version(MetadataVersion::V5);
    message.add_header_type(header_type);
    message.add_header(header);
    message.add_bodyLength(body_len);
    let message = message.finish();
    builder.finish(message, None);
    builder.finished_data().to_vec()
}

/// Builds the schema message of one column `c`, and a batch by hand for it.
fn by_hand(
    data_type: DataType,
    rows: i64,
    nodes: &[(i64, i64)],
    buffers: &[(i64, i64)],
    variadic: &[i64],
    body: &[u8],
) -> Vec<FlightData> {
    let mut messages = messages(&schema_of(vec![("c", data_type)]), &[], &like_pyarrow());
    let header = batch_header(rows, nodes, buffers, variadic, body.len() as i64);
    messages.push(FlightData::new().with_data_header(header).with_data_body(body.to_vec()));
    messages
}

#[test]
fn a_valid_handmade_batch_is_accepted() {
    let arena = arena();
    let body = [1i32.to_le_bytes(), 2i32.to_le_bytes()].concat();
    let messages = by_hand(DataType::Int32, 2, &[(2, 0)], &[(0, 0), (0, 8)], &[], &body);
    let came = decode(once(&wire(&messages)[..]), &arena).unwrap();
    assert_eq!(came[0].column(0).as_ref(), &Int32Array::from(vec![1, 2]) as &dyn Array);
}

#[test]
fn false_lengths_are_refused_before_memory_is_taken() {
    let body = [0u8; 16];
    let huge = i64::MAX;
    let int = DataType::Int32;
    let cases: Vec<(Vec<FlightData>, &str)> = vec![
        (by_hand(int.clone(), 1 << 40, &[(1 << 40, 0)], &[(0, 0), (0, 16)], &[], &body), "rows of a batch"),
        (by_hand(int.clone(), -1, &[(-1, 0)], &[(0, 0), (0, 16)], &[], &body), "elements of an array"),
        (by_hand(int.clone(), 5, &[(5, 0)], &[(0, 0), (0, 16)], &[], &body), "its array needs 20"),
        (by_hand(int.clone(), 4, &[(3, 0)], &[(0, 0), (0, 16)], &[], &body), "3 elements where 4 are expected"),
        (by_hand(int.clone(), 4, &[(4, 5)], &[(0, 8), (8, 8)], &[], &body), "nulls of an array"),
        (by_hand(int.clone(), 4, &[(4, -1)], &[(0, 8), (8, 8)], &[], &body), "nulls of an array"),
        (by_hand(int.clone(), 4, &[(4, 1)], &[(0, 0), (0, 16)], &[], &body), "its array needs 1"),
        (by_hand(int.clone(), 4, &[(4, 0)], &[(0, 0), (8, 16)], &[], &body), "is outside the body"),
        (by_hand(int.clone(), 4, &[(4, 0)], &[(0, 0), (huge, huge)], &[], &body), "is outside the body"),
        (by_hand(int.clone(), 4, &[(4, 0)], &[(0, 0), (-8, 16)], &[], &body), "bytes before a buffer"),
        (by_hand(int.clone(), 4, &[(4, 0)], &[(0, 0), (0, -16)], &[], &body), "bytes of a buffer"),
        (by_hand(int.clone(), 2, &[(2, 1)], &[(0, 8), (4, 8)], &[], &body), "overlap"),
        (by_hand(int.clone(), 0, &[], &[], &[], &[]), "fewer arrays than the schema"),
        (by_hand(int.clone(), 4, &[(4, 0)], &[(0, 0)], &[], &body), "fewer buffers than the schema"),
        (by_hand(int.clone(), 4, &[(4, 0), (4, 0)], &[(0, 0), (0, 16)], &[], &body), "1 arrays, 0 buffers"),
        (by_hand(int.clone(), 4, &[(4, 0)], &[(0, 0), (0, 16), (0, 0)], &[], &body), "0 arrays, 1 buffers"),
        (by_hand(int, 4, &[(4, 0)], &[(0, 0), (0, 16)], &[3], &body), "1 counts of variadic"),
        (by_hand(DataType::Utf8View, 1, &[(1, 0)], &[(0, 0), (0, 16)], &[], &body), "does not say how many"),
        (by_hand(DataType::Utf8View, 1, &[(1, 0)], &[(0, 0), (0, 16)], &[huge], &body), "views claim"),
        (by_hand(DataType::Utf8View, 1, &[(1, 0)], &[(0, 0), (0, 16)], &[-1], &body), "views claim"),
        (by_hand(DataType::Null, huge, &[(huge, huge)], &[], &[], &[]), "elements of an array"),
        (
            by_hand(DataType::FixedSizeBinary(i32::MAX), 1 << 30, &[(1 << 30, 0)], &[(0, 0), (0, 16)], &[], &body),
            "its array needs",
        ),
    ];
    for (messages, part) in cases {
        let arena = arena();
        assert_refused(&messages, part);
        // All checks except those of values come before any allocation in the arena.
        let _ = decode(once(&wire(&messages)[..]), &arena);
        assert_eq!(arena.budget().used_bytes_max(), 0, "{part}");
    }
}

#[test]
fn fixed_size_lists_with_a_wrong_number_of_elements_are_refused() {
    let item = || Arc::new(Field::new("item", DataType::Int8, true));
    let body = [0u8; 16];
    let list = |len| DataType::FixedSizeList(item(), len);
    assert_refused(
        &by_hand(list(3), 2, &[(2, 0), (5, 0)], &[(0, 0), (0, 0), (0, 8)], &[], &body),
        "5 elements where 6",
    );
    // The lists have more elements than memory has addresses.
    let inner = Arc::new(Field::new("item", list(i32::MAX), true));
    let nested = DataType::FixedSizeList(inner, i32::MAX);
    let nodes = [(1 << 30, 0), (1 << 40, 0), (1, 0)];
    assert_refused(&by_hand(nested, 1 << 30, &nodes, &[(0, 0), (0, 0), (0, 0), (0, 8)], &[], &body), "column \"c\"");
}

/// Checks that a column with wrong values is refused. A header does not show such values, and no
/// Arrow library would build them.
fn bad_column(data_type: DataType, rows: usize, buffers: Vec<Vec<u8>>, part: &str) {
    let mut nodes = vec![(rows as i64, 0)];
    let mut body = Vec::new();
    let mut ranges = Vec::new();
    for (index, buffer) in buffers.iter().enumerate() {
        if index == 0 && !matches!(data_type, DataType::Union(_, _)) {
            ranges.push((0, 0));
        }
        ranges.push((body.len() as i64, buffer.len() as i64));
        body.extend(buffer);
        body.resize(body.len().next_multiple_of(8), 0);
    }
    let mut variadic = Vec::new();
    match &data_type {
        DataType::Utf8View | DataType::BinaryView => variadic.push(buffers.len() as i64 - 1),
        DataType::List(_) | DataType::LargeList(_) | DataType::ListView(_) | DataType::LargeListView(_) => {
            nodes.push((4, 0));
            ranges.extend([(0, 0), (body.len() as i64, 4)]);
            body.extend([0; 8]);
        }
        DataType::Union(_, _) => {
            nodes.push((4, 0));
            ranges.extend([(0, 0), (body.len() as i64, 4)]);
            body.extend([0; 8]);
        }
        _ => {}
    }
    let error = assert_refused(&by_hand(data_type, rows as i64, &nodes, &ranges, &variadic, &body), part);
    assert!(matches!(error, Error::Invalid(_)), "{error:?}");
    assert!(error.message().contains("column \"c\""), "{error} does not name the column");
}

fn bytes_of<const N: usize>(values: impl IntoIterator<Item = [u8; N]>) -> Vec<u8> {
    values.into_iter().flatten().collect()
}

#[test]
fn invalid_offsets_are_refused() {
    let i32s = |values: &[i32]| bytes_of(values.iter().map(|value| value.to_le_bytes()));
    let i64s = |values: &[i64]| bytes_of(values.iter().map(|value| value.to_le_bytes()));
    let text = || b"abcdefgh".to_vec();
    for offsets in [[0, 4, 9], [0, 5, 4], [-1, 0, 4], [0, -4, 8], [0, i32::MAX, 8], [9, 9, 9]] {
        bad_column(DataType::Utf8, 2, vec![i32s(&offsets), text()], "");
        bad_column(DataType::Binary, 2, vec![i32s(&offsets), text()], "");
        bad_column(DataType::LargeUtf8, 2, vec![i64s(&offsets.map(i64::from)), text()], "");
        let item = Arc::new(Field::new("item", DataType::Int8, true));
        bad_column(DataType::List(item.clone()), 2, vec![i32s(&offsets)], "");
        bad_column(DataType::LargeList(item), 2, vec![i64s(&offsets.map(i64::from))], "");
    }
    bad_column(DataType::LargeBinary, 2, vec![i64s(&[0, i64::MAX, 8]), text()], "");
    let item = Arc::new(Field::new("item", DataType::Int8, true));
    for (offset, size) in [(0, 5), (4, 1), (-1, 1), (1, -1), (i32::MAX, i32::MAX)] {
        bad_column(DataType::ListView(item.clone()), 1, vec![i32s(&[offset]), i32s(&[size])], "");
        let (offset, size) = (i64::from(offset) << 31, i64::from(size) << 31);
        if size != 0 {
            bad_column(DataType::LargeListView(item.clone()), 1, vec![i64s(&[offset]), i64s(&[size])], "");
        }
    }
}

#[test]
fn text_that_is_not_utf8_is_refused() {
    let offsets = |ends: [i32; 2]| bytes_of([0, ends[0], ends[1]].map(i32::to_le_bytes));
    bad_column(DataType::Utf8, 2, vec![offsets([2, 4]), vec![b'a', 0xff, b'b', b'c']], "column \"c\"");
    // Each byte is part of valid text, but the cut is in the middle of a character.
    bad_column(DataType::Utf8, 2, vec![offsets([1, 2]), "ß".into()], "utf-8");
    let mut view = [0u8; 16];
    view[0] = 2;
    view[4] = 0xc3;
    bad_column(DataType::Utf8View, 1, vec![view.to_vec()], "column \"c\"");
}

#[test]
fn views_that_point_outside_of_their_buffers_are_refused() {
    let view = |len: u32, prefix: &[u8; 4], buffer: u32, offset: u32| {
        [len.to_le_bytes(), *prefix, buffer.to_le_bytes(), offset.to_le_bytes()].concat()
    };
    let text = || b"abcdefghijklmnopqrstuvwxyz".to_vec();
    for (len, prefix, buffer, offset) in [
        (26, b"abcd", 1, 0),
        (27, b"abcd", 0, 0),
        (26, b"bcde", 0, 1),
        (20, b"xxxx", 0, 0),
        (u32::MAX, b"abcd", 0, 0),
        (20, b"abcd", 0, u32::MAX),
        (20, b"abcd", u32::MAX, 0),
    ] {
        for data_type in [DataType::Utf8View, DataType::BinaryView] {
            bad_column(data_type, 1, vec![view(len, prefix, buffer, offset), text()], "column \"c\"");
        }
    }
    bad_column(DataType::BinaryView, 1, vec![view(20, b"abcd", 0, 0)], "column \"c\"");
}

#[test]
fn unions_of_unknown_members_are_refused() {
    use arrow::datatypes::{UnionFields, UnionMode};
    let fields = || UnionFields::try_new([5], [Field::new("a", DataType::Int8, true)]).unwrap();
    for ids in [[5, 5, 6, 5], [5, -5, 5, 5], [127, 5, 5, 5]] {
        let ids: Vec<u8> = ids.iter().map(|&id: &i8| id as u8).collect();
        bad_column(DataType::Union(fields(), UnionMode::Sparse), 4, vec![ids], "column \"c\"");
    }
    for offset in [4, -1, i32::MAX] {
        let offsets = bytes_of([0, 1, 2, offset].map(i32::to_le_bytes));
        bad_column(DataType::Union(fields(), UnionMode::Dense), 4, vec![vec![5; 4], offsets], "column \"c\"");
    }
}

#[test]
fn runs_that_do_not_cover_their_array_are_refused() {
    let run_ends = Arc::new(Field::new("run_ends", DataType::Int32, false));
    let data_type = DataType::RunEndEncoded(run_ends, Arc::new(Field::new("values", DataType::Int8, true)));
    for ends in [[1, 2], [2, 2], [3, 1], [-1, 4], [0, 4], [1, 3]] {
        let body = [bytes_of(ends.map(i32::to_le_bytes)), vec![7, 8, 0, 0, 0, 0, 0, 0]].concat();
        let nodes = [(4, 0), (2, 0), (2, 0)];
        let buffers = [(0, 0), (0, 8), (0, 0), (8, 2)];
        assert_refused(&by_hand(data_type.clone(), 4, &nodes, &buffers, &[], &body), "column \"c\"");
    }
    let nodes = [(4, 0), (2, 1), (2, 0)];
    let body = [vec![1, 0, 0, 0, 0, 0, 0, 0], bytes_of([2, 4].map(i32::to_le_bytes)), vec![7, 8, 0, 0, 0, 0, 0, 0]];
    let buffers = [(0, 1), (8, 8), (0, 0), (16, 2)];
    assert_refused(&by_hand(data_type, 4, &nodes, &buffers, &[], &body.concat()), "column \"c\"");
}

#[test]
fn dictionary_keys_without_values_are_refused() {
    let batch = small_batch().project(&[3]).unwrap();
    let mut messages = sent(&batch);
    assert_eq!(messages.len(), 3);
    // The keys are the last buffer of the body: 0 1 _ 0 2.
    let mut body = messages[2].data_body.to_vec();
    let keys: Vec<u8> = bytes_of([0, 1, 0, 0, 2].map(i32::to_le_bytes));
    let at = body.windows(keys.len()).position(|window| window == keys).unwrap();
    for wrong in [3, -1, i32::MAX] {
        body[at..at + 4].copy_from_slice(&wrong.to_le_bytes());
        messages[2].data_body = body.clone().into();
        assert_refused(&messages, "column \"d\"");
    }
}

#[test]
fn dictionaries_that_are_missing_foreign_or_out_of_order_are_refused() {
    let batch = small_batch();
    let mut without = sent(&batch);
    let dictionary = without.remove(1);
    assert_refused(&without, "dictionary (number 0) was not sent before");
    let mut before_schema = sent(&batch);
    before_schema.swap(0, 1);
    assert_refused(&before_schema, "a dictionary came before the schema");
    let mut foreign = sent(&RecordBatch::try_from_iter([("k", batch.column(0).clone())]).unwrap());
    foreign.insert(1, dictionary);
    assert_refused(&foreign, "no column of the schema has a dictionary");
}

#[test]
fn a_delta_to_a_dictionary_that_was_never_sent_is_refused() {
    let batch = small_batch();
    let mut messages = sent(&batch);
    let mut builder = FlatBufferBuilder::new();
    let (nodes, buffers) = (vec![ipc::FieldNode::new(0, 0)], vec![ipc::Buffer::new(0, 0); 3]);
    let (nodes, buffers) = (builder.create_vector(&nodes), builder.create_vector(&buffers));
    let mut values = ipc::RecordBatchBuilder::new(&mut builder);
    values.add_nodes(nodes);
    values.add_buffers(buffers);
    let values = values.finish();
    let mut dictionary = ipc::DictionaryBatchBuilder::new(&mut builder);
    dictionary.add_id(0);
    dictionary.add_data(values);
    dictionary.add_isDelta(true);
    let dictionary = dictionary.finish().as_union_value();
    let header = finish_message(builder, MessageHeader::DictionaryBatch, dictionary, 0);
    messages.insert(1, FlightData::new().with_data_header(header));
    assert_refused(&messages, "was not sent before in this stream");
}

#[test]
fn messages_in_the_wrong_order_are_refused() {
    let batch = small_batch();
    let messages = sent(&batch);
    assert_refused(&messages[2..], "a record batch came before the schema");
    let other = RecordBatch::try_from_iter([("other", batch.column(0).clone())]).unwrap();
    assert_refused(&[messages, sent(&other)].concat(), "the schema changed during the stream");
}

#[test]
fn headers_that_are_not_arrow_messages_are_refused() {
    let batch = small_batch();
    let mut messages = sent(&batch);
    messages[1].data_header = vec![0xff; 100].into();
    assert_refused(&messages, "not an Arrow IPC flatbuffer");
    // A flatbuffer table has a field that points out of the buffer. The library reports that with a
    // trace of several lines.
    let mut cut = messages[0].data_header.to_vec();
    cut.truncate(cut.len() / 2);
    messages[1].data_header = cut.into();
    let error = assert_refused(&messages, "while verifying table field");
    assert!(!error.message().contains(['\n', '\t']), "{error:?} is more than a sentence");
    messages[1].data_header = Vec::new().into();
    assert_refused(&messages, "and no header");
    messages[1].data_header = batch_header(0, &[], &[], &[], i64::MAX).into();
    assert_refused(&messages, "declares a body");
    messages[1].data_header = batch_header(0, &[], &[], &[], -1).into();
    assert_refused(&messages, "declares a body");
    let mut builder = FlatBufferBuilder::new();
    let empty = builder.start_table();
    let unknown = flatbuffers::WIPOffset::new(builder.end_table(empty).value());
    let header = finish_message(builder, MessageHeader(77), unknown, 0);
    messages[1].data_header = header.into();
    assert_refused(&messages, "is not supported");
}

#[test]
fn schemas_that_cannot_be_tables_are_refused() {
    let refused = |fields: Vec<Field>, part: &str| {
        assert_refused(&messages(&Schema::new(fields), &[], &like_pyarrow()), part);
    };
    let twice = Field::new("k", DataType::Int32, true);
    refused(vec![twice.clone(), twice], "two columns named \"k\"");
    refused(vec![Field::new("b", DataType::FixedSizeBinary(-4), true)], "its length is negative");
    let item = Arc::new(Field::new("item", DataType::Int8, true));
    refused(vec![Field::new("l", DataType::FixedSizeList(item.clone(), -1), true)], "its length is negative");
    refused(vec![Field::new("d", DataType::Decimal128(39, 2), true)], "column \"d\"");
    refused(vec![Field::new("d", DataType::Decimal32(4, 9), true)], "column \"d\"");
    refused(vec![Field::new("m", DataType::Map(item, false), true)], "its entries are not");
    let nullable_ends = Arc::new(Field::new("run_ends", DataType::Int32, true));
    let values = Arc::new(Field::new("values", DataType::Int8, true));
    refused(vec![Field::new("r", DataType::RunEndEncoded(nullable_ends, values.clone()), true)], "its run ends");
    let text_ends = Arc::new(Field::new("run_ends", DataType::Utf8, false));
    refused(vec![Field::new("r", DataType::RunEndEncoded(text_ends, values), true)], "its run ends");
    let deep = (0..40).fold(DataType::Int8, |inner, _| DataType::List(Arc::new(Field::new("item", inner, true))));
    refused(vec![Field::new("deep", deep, true)], "nested deeper");
}

#[test]
fn big_endian_data_is_refused() {
    let mut builder = FlatBufferBuilder::new();
    let fields = builder.create_vector::<flatbuffers::ForwardsUOffset<ipc::Field<'_>>>(&[]);
    let mut schema = ipc::SchemaBuilder::new(&mut builder);
    schema.add_endianness(Endianness::Big);
    schema.add_fields(fields);
    let schema = schema.finish().as_union_value();
    let header = finish_message(builder, MessageHeader::Schema, schema, 0);
    let error = assert_refused(&[FlightData::new().with_data_header(header)], "big-endian");
    assert!(matches!(error, Error::Unsupported(_)));
}

#[test]
fn nulls_in_a_column_that_forbids_them_are_refused() {
    let schema = Schema::new(vec![Field::new("c", DataType::Int32, false)]);
    let mut messages = messages(&schema, &[], &like_pyarrow());
    let header = batch_header(2, &[(2, 1)], &[(0, 1), (8, 8)], &[], 16);
    messages.push(FlightData::new().with_data_header(header).with_data_body(vec![1; 16]));
    assert_refused(&messages, "non-nullable");
    // The header promises one null, and the bitmap has two.
    let mut messages = by_hand(DataType::Int32, 3, &[(3, 1)], &[(0, 1), (8, 12)], &[], &[0; 24]);
    messages[1].data_body = [vec![1], vec![0; 23]].concat().into();
    assert_refused(&messages, "null_count");
}

#[test]
fn compressed_bodies_with_false_claims_are_refused() {
    let batch = small_batch();
    for codec in [CompressionType::LZ4_FRAME, CompressionType::ZSTD] {
        let numbers: ArrayRef = Arc::new(Int64Array::from(vec![7; 1000]));
        let batch = RecordBatch::try_from_iter([("n", numbers)]).unwrap();
        let options = like_pyarrow().try_with_compression(Some(codec)).unwrap();
        let good = messages(&batch.schema(), std::slice::from_ref(&batch), &options);
        let prefix = 8000i64.to_le_bytes();
        let at = good[1].data_body.windows(8).position(|window| window == prefix).expect("the buffer's length");
        for (claimed, part) in [
            (7999, "column"),
            (8001, "declares 8001 bytes, and decompresses to 8000"),
            (i64::MAX, "over the limit"),
            (1 << 40, "over the limit"),
            (-2, "claims -2 bytes"),
            (0, "too short"),
        ] {
            let mut bad = good.clone();
            let mut body = bad[1].data_body.to_vec();
            body[at..at + 8].copy_from_slice(&claimed.to_le_bytes());
            bad[1].data_body = body.into();
            assert_refused(&bad, if claimed == 7999 { "7999" } else { part });
        }
    }
    drop(batch);
}

#[test]
fn invalid_grpc_frames_are_refused() {
    let arena = arena();
    let good = wire(&sent(&small_batch()));
    let refuse = |bytes: &[u8], part: &str| {
        let error = decode(once(bytes), &arena).expect_err(part);
        assert!(error.message().contains(part), "{error:?} does not say {part:?}");
        assert_eq!(arena.budget().used_bytes(), 0);
        error
    };
    let over = [&[0], &(LIMITS.message_bytes as u32 + 1).to_be_bytes()[..]].concat();
    assert!(matches!(refuse(&over, "--message-limit"), Error::Exhausted(_)));
    assert!(matches!(refuse(&[1, 0, 0, 0, 9], "compressed by gRPC"), Error::Unsupported(_)));
    refuse(&[2, 0, 0, 0, 0], "flag 2");
    refuse(&frame(&[0x0a, 0x05, 1]), "claims 5 bytes");
    refuse(&frame(&[0x0a]), "cut off");
    refuse(&frame(&[0x80]), "cut off");
    refuse(&frame(&[0x09, 1, 2, 3]), "wire type 1");
    refuse(&frame(&[0x51, 1, 2, 3]), "cut off");
    refuse(&frame(&[0x53]), "wire type 3");
    refuse(&frame(&[0x02, 0]), "number 0");
    refuse(&frame(&[0xff; 11]), "longer than 64 bits");
    refuse(&frame(&[field(2, b"a"), field(2, b"b")].concat()), "twice");
    refuse(&frame(&[field(1000, b""), field(1000, b"")].concat()), "twice");
    refuse(&frame(&field(1, &[0xff, 0xff])), "flight descriptor");
    let field_over = [vec![0x12], prost_varint(17 << 20)].concat();
    let mut long = Vec::from([0]);
    long.extend(((LIMITS.message_bytes) as u32).to_be_bytes());
    long.extend(field_over);
    refuse(&long, "claims 17825792 bytes");
    for cut in 1..good.len() {
        // A stream that ends between messages is a shorter upload; the sink decides whether it is
        // complete.
        if let Err(error) = decode(once(&good[..cut]), &arena) {
            assert!(error.message().contains("ended inside a message"), "{error:?}");
        }
        assert_eq!(arena.budget().used_bytes(), 0);
    }
}

fn prost_varint(value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    prost::encoding::encode_varint(value, &mut out);
    out
}

#[test]
fn a_batch_larger_than_the_budget_is_refused_and_takes_no_memory() {
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 4096));
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![7; 1000]));
    let batch = RecordBatch::try_from_iter([("n", numbers)]).unwrap();
    let error = decode(once(&wire(&sent(&batch))[..]), &arena).unwrap_err();
    assert!(matches!(&error, Error::Exhausted(text) if text.contains("--host-memory")), "{error:?}");
    assert_eq!((arena.budget().used_bytes(), arena.mapped_bytes()), (0, 0));
}

/// Makes a batch of views that all refer to the same text.
fn same_text(rows: usize, text_bytes: usize) -> RecordBatch {
    let text = StringViewArray::from_iter_values(["x".repeat(text_bytes)]);
    let (views, texts, _) = text.into_parts();
    let views = std::iter::repeat_n(views[0], rows).collect();
    let column: ArrayRef = Arc::new(StringViewArray::try_new(views, texts, None).unwrap());
    RecordBatch::try_from_iter([("v", column)]).unwrap()
}

/// Regression test: 100,000 views of one text of 8 MiB took a minute, although 10 MiB were sent.
#[test]
fn views_count_as_the_text_that_they_refer_to() {
    let limit = LIMITS.message_bytes;
    let text_bytes = 64 << 10;
    let refused =
        assert_refused(&sent(&same_text(limit / text_bytes + 1, text_bytes)), "the views of a batch refer to 8.1 MiB");
    assert!(matches!(refused, Error::Exhausted(_)) && refused.message().contains("--message-limit"), "{refused}");
    let arena = arena();
    let fitting = same_text(limit / text_bytes, text_bytes);
    assert_eq!(decode(once(&wire(&sent(&fitting))[..]), &arena).unwrap(), [fitting]);
    // Inside of lists, views count as well.
    let inner = same_text(limit / text_bytes + 1, text_bytes);
    let item = Arc::new(Field::new("item", DataType::Utf8View, false));
    let offsets = arrow::buffer::OffsetBuffer::from_lengths([inner.num_rows()]);
    let list: ArrayRef = Arc::new(arrow::array::ListArray::new(item, offsets, inner.column(0).clone(), None));
    assert_refused(&sent(&RecordBatch::try_from_iter([("l", list)]).unwrap()), "the views of a batch refer to");
}

/// Arrays of some types take no bytes, and checking them does.
#[test]
fn memory_for_checking_elements_without_bytes_is_reserved() {
    let rows = 1 << 20;
    let item = Arc::new(Field::new("item", DataType::Null, false));
    let elements = rows * rows;
    let lists = DataType::FixedSizeList(item, rows as i32);
    // One row in eight is null.
    let bitmap = vec![0xfe; rows as usize / 8];
    let nodes = [(rows, rows / 8), (elements, elements)];
    let messages = by_hand(lists, rows, &nodes, &[(0, bitmap.len() as i64)], &[], &bitmap);
    let refused = assert_refused(&messages, "checking nulls");
    assert!(matches!(refused, Error::Exhausted(_)), "{refused}");
}

/// Flips each bit of a stream, and sets each byte of its headers to extreme values. Each flip gives
/// an error or a valid batch. No panic escapes, no memory stays, and no batch has invalid values.
#[test]
fn flipped_bits_give_an_error_or_a_valid_batch() {
    let mut rng = StdRng::seed_from_u64(5);
    let nested = nested_types(&DataType::Utf8, true).into_iter();
    let types: Vec<_> = leaf_types().into_iter().step_by(5).chain(nested).collect();
    let arena = arena();
    let mut streams = vec![sent(&small_batch())];
    streams.extend(types.into_iter().map(|data_type| {
        let schema = schema_of(vec![("c", data_type)]);
        let batch = random_batch(&mut rng, &schema, 9);
        messages(&schema, &[batch], &like_pyarrow())
    }));
    for stream in streams {
        let bytes = wire(&stream);
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1 << bit;
                assert_sound(decode(once(&flipped[..]), &arena));
                assert_eq!(arena.budget().used_bytes(), 0, "bit {bit} of byte {at}");
            }
        }
        for (index, message) in stream.iter().enumerate() {
            for at in 0..message.data_header.len() {
                for value in [0, 0x7f, 0x80, 0xff] {
                    let mut stream = stream.clone();
                    let mut header = message.data_header.to_vec();
                    header[at] = value;
                    stream[index].data_header = header.into();
                    assert_sound(decode_messages(stream, &arena));
                }
            }
        }
    }
    assert_eq!(arena.budget().used_bytes(), 0);
}

fn assert_sound(outcome: Result<Vec<RecordBatch>>) {
    for batch in outcome.into_iter().flatten() {
        for column in batch.columns() {
            column.to_data().validate_full().expect("what is let through is valid");
            // Printing touches every value, as a consumer would.
            let _ = arrow::util::pretty::pretty_format_columns("c", std::slice::from_ref(column));
        }
    }
}

/// Shows that the test above can fail: an invalid array does not pass `validate_full`.
#[test]
fn arrow_refuses_an_invalid_array() {
    let built = ArrayDataBuilder::new(DataType::Utf8)
        .len(1)
        .add_buffer(Buffer::from_vec(vec![0i32, 9]))
        .add_buffer(Buffer::from(b"abc"))
        .build();
    assert!(built.map(make_array).is_err());
}
