use std::sync::Arc;

use arrow::array::{
    BinaryViewArray, BinaryViewBuilder, DictionaryArray, Int32Array, Int64Array, LargeListArray, ListArray,
    RecordBatchOptions, RunArray, StringArray, StringViewArray, StructArray, UnionArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::compute::concat_batches;
use arrow::datatypes::{Field, Int32Type, Schema, UnionFields};
use arrow_flight::decode::FlightRecordBatchStream;
use futures::{StreamExt, TryStreamExt, stream};
use prost::Message as _;

use super::*;

fn messages_of(batches: &[RecordBatch]) -> Vec<FlightData> {
    let (mut encoder, schema) = Encoder::new(batches[0].schema()).unwrap();
    let mut messages = vec![schema];
    for batch in batches {
        encode(&mut encoder, batch, &mut messages);
    }
    messages.into_iter().map(as_received).collect()
}

fn encode(encoder: &mut Encoder, batch: &RecordBatch, messages: &mut Vec<Message>) {
    encoder.begin(batch.clone());
    messages.extend(std::iter::from_fn(|| encoder.next_message().unwrap()));
}

/// Decodes the message as the receiver does. Checks that the result is the same in pieces and
/// whole.
fn as_received(message: Message) -> FlightData {
    let wire = message.clone().into_wire().concat();
    let (frame, protobuf) = wire.split_at(5);
    assert_eq!((frame[0], u32::from_be_bytes(frame[1..].try_into().unwrap()) as usize), (0, protobuf.len()));
    let received = FlightData::decode(protobuf).unwrap();
    assert_eq!(received, FlightData::from(message));
    received
}

fn decoded(messages: Vec<FlightData>) -> Vec<RecordBatch> {
    let stream = FlightRecordBatchStream::new_from_flight_data(stream::iter(messages).map(Ok));
    futures::executor::block_on(stream.try_collect()).unwrap()
}

fn check_round_trip(batch: RecordBatch) -> Vec<FlightData> {
    let messages = messages_of(std::slice::from_ref(&batch));
    let back = decoded(messages.clone());
    assert_eq!(concat_batches(&batch.schema(), &back).unwrap(), batch);
    messages
}

fn batch_of(column: ArrayRef) -> RecordBatch {
    let field = Field::new("c", column.data_type().clone(), true);
    RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![column]).unwrap()
}

#[test]
fn messages_respect_the_size_limit_of_the_client() {
    let text = |at: i32| "x".repeat(if at % 50 == 0 { 900 } else { 10 });
    let batch = batch_of(Arc::new(StringArray::from_iter_values((0..20_000).map(text))));
    for limit in [2 << 10, 16 << 10, 1 << 20] {
        let (encoder, schema) = Encoder::new(batch.schema()).unwrap();
        let (mut encoder, mut messages) = (encoder.with_limit(limit), vec![schema]);
        encode(&mut encoder, &batch, &mut messages);
        let messages: Vec<FlightData> = messages.into_iter().map(as_received).collect();
        let largest = messages.iter().map(|message| message.encoded_len()).max().unwrap();
        assert!(largest <= limit && messages.len() < 2_000, "{largest} of {limit} in {}", messages.len());
        assert_eq!(concat_batches(&batch.schema(), &decoded(messages)).unwrap(), batch);
    }
}

#[test]
fn messages_of_a_large_batch_are_1_to_4_mb() {
    let batch = batch_of(Arc::new(Int64Array::from_iter_values(0..3_000_000)));
    let sizes: Vec<usize> = check_round_trip(batch)[1..].iter().map(|message| message.data_body.len()).collect();
    let (last, full) = sizes.split_last().unwrap();
    assert!(full.iter().all(|size| (1_000_000..=4_000_000).contains(size)) && *last <= 4_000_000, "{sizes:?}");
}

#[test]
fn messages_stay_small_when_the_first_rows_are_much_shorter_than_the_rest() {
    let short = (0..10_000).map(|_| "x".to_owned());
    let long = (0..400).map(|row| format!("{row:040000}"));
    let batch = batch_of(Arc::new(StringArray::from_iter_values(short.chain(long))));
    let messages = check_round_trip(batch);
    assert!(messages.iter().all(|message| message.data_body.len() <= MESSAGE_BYTES_MAX));
    assert!(messages.len() > 4);
}

#[test]
fn a_row_larger_than_a_message_is_sent_alone() {
    let rows = [1, 6_000_000, 2, 6_000_000].map(|len| "y".repeat(len));
    let messages = check_round_trip(batch_of(Arc::new(StringArray::from_iter_values(rows))));
    assert!(messages.len() <= 5);
}

#[test]
fn views_are_cut_with_their_rows() {
    let rows = (0..200_000).map(|row| format!("{row:060}"));
    let messages = check_round_trip(batch_of(Arc::new(StringViewArray::from_iter_values(rows))));
    assert!(messages.iter().all(|message| message.data_body.len() <= MESSAGE_BYTES_MAX));
}

/// Checks that messages have at most 4 MB, and together are about as large as the values.
fn check_size(batch: RecordBatch, value_bytes: usize) {
    let messages = check_round_trip(batch);
    let sizes = messages.iter().map(|message| message.data_body.len());
    assert!(sizes.clone().all(|size| size <= MESSAGE_BYTES_MAX), "{:?}", sizes.collect::<Vec<_>>());
    assert!(sizes.clone().sum::<usize>() <= value_bytes / 4 * 5, "{} for {value_bytes}", sizes.sum::<usize>());
}

#[test]
fn views_inside_of_structs_are_cut_with_their_rows() {
    let rows = (0..200_000).map(|row| format!("{row:060}"));
    let views: ArrayRef = Arc::new(StringViewArray::from_iter_values(rows));
    let field = Arc::new(Field::new("v", DataType::Utf8View, true));
    check_size(batch_of(Arc::new(StructArray::from(vec![(field, views)]))), 200_000 * (60 + 16));
}

#[test]
fn dense_unions_are_cut_with_their_rows() {
    let rows = 1_000_000;
    let fields = [Field::new("n", DataType::Int64, true), Field::new("t", DataType::Utf8, true)];
    let children: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(0..rows / 2)),
        Arc::new(StringArray::from_iter_values((0..rows / 2).map(|row| format!("{row:020}")))),
    ];
    let type_ids = (0..rows).map(|row| (row % 2) as i8).collect();
    let offsets = (0..rows).map(|row| (row / 2) as i32).collect();
    let fields = UnionFields::try_new([0, 1], fields).unwrap();
    let union = UnionArray::try_new(fields, type_ids, Some(offsets), children).unwrap();
    check_size(batch_of(Arc::new(union)), rows as usize * (5 + 8 / 2 + 24 / 2));
}

/// Regression test: every message after the first had the union values of the batch's first rows.
#[test]
fn sparse_unions_inside_of_lists_are_cut_with_their_rows() {
    let rows = 60_000;
    let fields = [Field::new("n", DataType::Int64, true), Field::new("t", DataType::Utf8, true)];
    let children: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(0..2 * rows)),
        Arc::new(StringArray::from_iter_values((0..2 * rows).map(|value| format!("{value:020}")))),
    ];
    let fields = UnionFields::try_new([0, 1], fields).unwrap();
    let type_ids = (0..2 * rows).map(|value| (value % 2) as i8).collect();
    let union: ArrayRef = Arc::new(UnionArray::try_new(fields, type_ids, None, children).unwrap());
    let item = Arc::new(Field::new("item", union.data_type().clone(), true));
    let lists = ListArray::new(item, OffsetBuffer::from_lengths(std::iter::repeat_n(2, rows as usize)), union, None);
    let messages = check_round_trip(batch_of(Arc::new(lists)));
    assert!(messages.len() > 2, "{} messages", messages.len());
}

/// The first row is sent alone, after a try together with the rows after it, whose runs have no
/// values.
#[test]
fn rows_are_sent_after_their_own_dictionaries() {
    let rows = 100;
    let text = StringArray::from_iter_values((0..rows).map(|row| "x".repeat(if row == 0 { 6_000_000 } else { 1 })));
    let values = StringArray::from(vec!["a", "b", "c"]);
    let dictionary = DictionaryArray::<Int32Type>::new(Int32Array::from(vec![2, 1]), Arc::new(values));
    let runs: ArrayRef = Arc::new(RunArray::try_new(&Int32Array::from(vec![1, 2]), &dictionary).unwrap());
    let item = Arc::new(Field::new("item", runs.data_type().clone(), true));
    let lengths = (0..rows).map(|row| if row == 0 { 2 } else { 0 });
    let lists = ListArray::new(item, OffsetBuffer::from_lengths(lengths), runs, None);
    let columns: [(&str, ArrayRef); 2] = [("t", Arc::new(text)), ("l", Arc::new(lists))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let back = decoded(messages_of(std::slice::from_ref(&batch)));
    let [first, ..] = &back[..] else { panic!("no batches") };
    assert_eq!(first.num_rows(), 1, "the large row goes alone");
    let came = first.column(1).as_list::<i32>().value(0);
    let runs = came.as_run::<Int32Type>().downcast::<DictionaryArray<Int32Type>>().unwrap();
    let came: Vec<&str> = (0..2)
        .map(|row| {
            let dictionary = runs.values();
            let key = dictionary.keys().value(runs.run_array().get_physical_index(row));
            dictionary.values().as_string::<i32>().value(key as usize)
        })
        .collect();
    assert_eq!(came, ["c", "b"]);
    assert_eq!(back.iter().map(RecordBatch::num_rows).sum::<usize>(), rows);
}

#[test]
fn rows_that_share_one_large_value_are_sent_together() {
    let shared = |bytes: usize| {
        let mut views = BinaryViewBuilder::new();
        let value = views.append_block(vec![7u8; bytes].into());
        (0..50_000).for_each(|_| views.try_append_view(value, 0, bytes as u32).unwrap());
        batch_of(Arc::new(views.finish()))
    };
    // In this batch, one row alone is that large.
    let large = batch_of(Arc::new(BinaryViewArray::from_iter_values([vec![1; 6_000_000]])));
    let (before, after) = (shared(6_000_000), shared(3_000_000));
    let messages = messages_of(&[before, large, after]);
    let bytes: usize = messages.iter().map(|message| message.data_body.len()).sum();
    // One message for each row would be 450 GB in total.
    assert!(bytes < 100_000_000, "{bytes} bytes in {} messages", messages.len());
    let rows = messages.iter().filter_map(|message| {
        let header = arrow::ipc::root_as_message(&message.data_header).unwrap();
        header.header_as_record_batch().map(|batch| batch.length())
    });
    assert_eq!(rows.sum::<i64>(), 100_001);
}

#[test]
fn one_large_row_does_not_make_small_rows_go_alone() {
    let rows = [6_000_000].into_iter().chain([10; 1000]).chain([5_000_000; 3]).map(|len| "w".repeat(len));
    let messages = check_round_trip(batch_of(Arc::new(StringArray::from_iter_values(rows))));
    let large = messages.iter().filter(|message| message.data_body.len() > MESSAGE_BYTES_MAX);
    assert_eq!(large.count(), 4, "each large row by itself");
}

#[test]
fn a_batch_too_large_for_any_message_is_refused() {
    let batch = batch_of(Arc::new(Int32Array::from(vec![1])));
    let (mut encoder, _) = Encoder::new(batch.schema()).unwrap();
    let body_bytes = 5 << 30;
    let refused = encoder
        .queue(Message { header: Bytes::new(), app_metadata: Bytes::new(), body: Vec::new(), body_bytes })
        .unwrap_err();
    assert!(matches!(&refused, Error::Exhausted(text) if text.contains("5.0 GiB")), "{refused:?}");
}

#[test]
fn large_lists_keep_their_type() {
    let lists = (0..100_000).map(|row| (row % 7 != 0).then(|| vec![Some(row), None, Some(row + 1)]));
    let lists = LargeListArray::from_iter_primitive::<Int32Type, _, _>(lists);
    let messages = check_round_trip(batch_of(Arc::new(lists)));
    assert!(messages.iter().all(|message| message.data_body.len() <= MESSAGE_BYTES_MAX));
}

#[test]
fn a_dictionary_is_sent_once_and_stays_a_dictionary() {
    let values: ArrayRef = Arc::new(StringArray::from_iter_values((0..1000).map(|row| format!("value {row}"))));
    let keys = Int32Array::from_iter_values((0..2_000_000).map(|row| row % 1000));
    let column: ArrayRef = Arc::new(DictionaryArray::new(keys, values));
    let nested = StructArray::from(vec![(Arc::new(Field::new("d", column.data_type().clone(), true)), column.clone())]);
    let schema = Schema::new(vec![
        Field::new("d", column.data_type().clone(), true),
        Field::new("s", nested.data_type().clone(), true),
    ]);
    let batch = RecordBatch::try_new(Arc::new(schema), vec![column, Arc::new(nested)]).unwrap();
    let messages = check_round_trip(batch);
    let headers = messages.iter().map(|message| arrow::ipc::root_as_message(&message.data_header).unwrap());
    let dictionaries = headers.filter(|header| header.header_type() == arrow::ipc::MessageHeader::DictionaryBatch);
    assert_eq!(dictionaries.count(), 2);
}

#[test]
fn batches_without_rows_or_columns_arrive() {
    let empty = RecordBatch::new_empty(Arc::new(Schema::new(vec![Field::new("c", DataType::Utf8, true)])));
    assert_eq!(decoded(messages_of(&[empty])).len(), 1);
    let options = RecordBatchOptions::new().with_row_count(Some(12345));
    let rows_only = RecordBatch::try_new_with_options(Arc::new(Schema::empty()), vec![], &options).unwrap();
    let back = decoded(messages_of(&[rows_only]));
    assert_eq!(back.iter().map(RecordBatch::num_rows).sum::<usize>(), 12345);
}

#[test]
fn a_keep_alive_sends_no_dictionary_again() {
    let values: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
    let batch = batch_of(Arc::new(DictionaryArray::new(Int32Array::from(vec![0, 1, 1]), values)));
    let (mut encoder, schema) = Encoder::new(batch.schema()).unwrap();
    let mut messages = vec![schema];
    encode(&mut encoder, &batch, &mut messages);
    messages.push(encoder.keep_alive().unwrap());
    encode(&mut encoder, &batch, &mut messages);
    assert_eq!(messages.len(), 1 + 2 + 1 + 1, "schema, dictionary and rows, keep-alive, rows");
    let back = decoded(messages.into_iter().map(as_received).collect());
    assert_eq!(concat_batches(&batch.schema(), &back).unwrap().num_rows(), 6);
}

#[test]
fn a_keep_alive_is_a_batch_without_rows() {
    let batch = batch_of(Arc::new(Int32Array::from(vec![1, 2, 3])));
    let (mut encoder, schema) = Encoder::new(batch.schema()).unwrap();
    let mut messages = vec![schema, encoder.keep_alive().unwrap()];
    encode(&mut encoder, &batch, &mut messages);
    let messages = messages.into_iter().map(as_received).collect();
    let rows: Vec<usize> = decoded(messages).iter().map(RecordBatch::num_rows).collect();
    assert_eq!(rows, [0, 3]);
}
