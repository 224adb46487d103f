//! Tests that decoded data equals the sent data, however it is cut, ordered, aligned or compressed.

use std::iter::once;

use arrow::array::{RecordBatchOptions, new_empty_array};
use arrow::ipc::CompressionType;
use arrow::ipc::writer::DictionaryHandling;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::random::{leaf_types, nested_types, random_batch, random_type};
use super::*;

fn assert_round_trip(schema: &SchemaRef, sent: &[RecordBatch], options: &IpcWriteOptions) {
    let arena = arena();
    let messages = messages(schema, sent, options);
    let check = |path: &str, came: Result<Vec<RecordBatch>>| {
        let came = came.unwrap_or_else(|error| panic!("{path}: {schema:?}: {error}"));
        assert_eq!(came, sent, "{path}");
        came.iter().for_each(|batch| {
            assert_eq!(batch.schema(), *schema, "{path}");
            assert_in_arena(batch, &arena);
        });
        drop(came);
        assert_eq!(arena.budget().used_bytes(), 0, "{path}");
    };
    check("wire", decode(once(&wire(&messages)[..]), &arena));
    check("messages", decode_messages(messages, &arena));
}

/// Row counts around a byte of bits, around a slot, and around the content of a message of the
/// tests' limit.
const ROWS: [usize; 9] = [0, 1, 7, 8, 9, 63, 64, 65, 1000];

#[test]
fn every_type_is_decoded_unchanged() {
    let mut rng = StdRng::seed_from_u64(1);
    let leaves = leaf_types();
    let nested = leaves.iter().flat_map(|leaf| nested_types(leaf, true));
    for data_type in leaves.iter().cloned().chain(nested) {
        let sizes = if data_type.is_nested() { &[0, 1, 9, 65][..] } else { &ROWS };
        let schema = schema_of(vec![("c", data_type)]);
        for &rows in sizes {
            let batch = random_batch(&mut rng, &schema, rows);
            assert_round_trip(&schema, &[batch], &like_pyarrow());
        }
    }
}

#[test]
fn every_dictionary_is_decoded_as_a_dictionary() {
    let mut rng = StdRng::seed_from_u64(2);
    for keys in [DataType::Int8, DataType::UInt8, DataType::Int16, DataType::UInt32, DataType::Int64, DataType::UInt64]
    {
        for values in leaf_types().into_iter().filter(|leaf| *leaf != DataType::Null) {
            let schema = schema_of(vec![("d", DataType::Dictionary(Box::new(keys.clone()), Box::new(values)))]);
            // Each batch has a dictionary of its own, which replaces the one before.
            let batches: Vec<_> = [0, 1, 9, 65].map(|rows| random_batch(&mut rng, &schema, rows)).into();
            assert_round_trip(&schema, &batches, &like_pyarrow());
        }
    }
}

#[test]
fn a_batch_without_columns_keeps_its_rows() {
    let schema = schema_of(vec![]);
    let options = RecordBatchOptions::new().with_row_count(Some(42));
    let batch = RecordBatch::try_new_with_options(schema.clone(), vec![], &options).unwrap();
    assert_round_trip(&schema, &[batch], &like_pyarrow());
}

#[test]
fn unions_of_format_version_4_are_decoded_unchanged() {
    let mut rng = StdRng::seed_from_u64(3);
    let options = IpcWriteOptions::try_new(8, false, MetadataVersion::V4).unwrap();
    // Runs came to the format with version 5.
    let is_of_version_4 = |data_type: &DataType| !matches!(data_type, DataType::RunEndEncoded(_, _));
    for data_type in nested_types(&DataType::Utf8, true).into_iter().filter(is_of_version_4) {
        let schema = schema_of(vec![("c", data_type)]);
        let batch = random_batch(&mut rng, &schema, 17);
        assert_round_trip(&schema, &[batch], &options);
    }
}

#[test]
fn compressed_bodies_are_decompressed() {
    let mut rng = StdRng::seed_from_u64(4);
    for codec in [CompressionType::LZ4_FRAME, CompressionType::ZSTD] {
        let options = like_pyarrow().try_with_compression(Some(codec)).unwrap();
        for data_type in leaf_types().iter().cloned().chain(nested_types(&DataType::Utf8, true)) {
            let schema = schema_of(vec![("c", data_type)]);
            let batches: Vec<_> = ROWS.map(|rows| random_batch(&mut rng, &schema, rows)).into();
            assert_round_trip(&schema, &batches, &options);
        }
    }
}

#[test]
fn a_dictionary_that_grows_by_deltas_serves_each_batch_as_it_was_sent() {
    let schema = schema_of(vec![("d", DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8)))]);
    let all = ["a", "b", "a long string that no view would hold in place", "", "ü"];
    let values = |len: usize| Arc::new(StringArray::from_iter_values(&all[..len])) as ArrayRef;
    let batch = |len: usize| {
        let keys = Int32Array::from((0..len as i32).rev().collect::<Vec<_>>());
        let column = DictionaryArray::<Int32Type>::try_new(keys, values(len)).unwrap();
        RecordBatch::try_new(schema.clone(), vec![Arc::new(column)]).unwrap()
    };
    let options = like_pyarrow().with_dictionary_handling(DictionaryHandling::Delta);
    let batches = [batch(2), batch(3), batch(5)];
    let sent = messages(&schema, &batches, &options);
    let is_delta = |message: &FlightData| {
        let header = arrow::ipc::root_as_message(&message.data_header).unwrap();
        header.header_as_dictionary_batch().is_some_and(|dictionary| dictionary.isDelta())
    };
    assert_eq!(sent.iter().filter(|message| is_delta(message)).count(), 2);
    assert_round_trip(&schema, &batches, &options);
}

#[test]
fn a_dictionary_may_be_left_out_for_a_column_of_nulls() {
    let schema = schema_of(vec![("d", DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8)))]);
    let column = DictionaryArray::<arrow::datatypes::Int8Type>::try_new(
        arrow::array::Int8Array::new_null(3),
        new_empty_array(&DataType::Utf8),
    );
    let batch = RecordBatch::try_new(schema.clone(), vec![Arc::new(column.unwrap())]).unwrap();
    let mut sent = messages(&schema, std::slice::from_ref(&batch), &like_pyarrow());
    sent.remove(1);
    let arena = arena();
    assert_eq!(decode(once(&wire(&sent)[..]), &arena).unwrap(), [batch]);
}

#[test]
fn columns_may_share_a_dictionary_number() {
    let arena = arena();
    let data_type = || DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    let schema = schema_of(vec![("d", data_type())]);
    let column = small_batch().column(3).clone();
    let batch = RecordBatch::try_new(schema.clone(), vec![column]).unwrap();
    let sent = messages(&schema, &[batch], &like_pyarrow());
    // The schema is sent twice, as some senders do; the second is no change.
    let again = [&sent[..1], &sent[..]].concat();
    assert_eq!(decode(once(&wire(&again)[..]), &arena).unwrap().len(), 1);
}

#[test]
fn small_messages_may_be_split_at_every_byte() {
    let arena = arena();
    let batch = small_batch();
    let bytes = wire(&messages(&batch.schema(), &[batch.clone(), batch.slice(1, 3)], &like_pyarrow()));
    let expected = [batch.clone(), batch.slice(1, 3)];
    for cut in 0..=bytes.len() {
        let (before, after) = bytes.split_at(cut);
        assert_eq!(decode([before, after], &arena).unwrap(), expected, "cut at byte {cut}");
    }
    assert_eq!(decode(bytes.chunks(1), &arena).unwrap(), expected);
    assert_eq!(arena.budget().used_bytes(), 0);
}

#[test]
fn fields_may_come_in_any_order_with_unknown_ones_between() {
    let arena = arena();
    let batch = small_batch();
    for options in [like_pyarrow(), like_pyarrow().try_with_compression(Some(CompressionType::ZSTD)).unwrap()] {
        let sent = messages(&batch.schema(), std::slice::from_ref(&batch), &options);
        for order in permutations(&[0, 1, 2, 3]) {
            let mut bytes = Vec::new();
            for message in &sent {
                let descriptor = message.flight_descriptor.as_ref().map(Message::encode_to_vec).unwrap_or_default();
                let parts: [&[u8]; 4] = [&descriptor, &message.data_header, &message.app_metadata, &message.data_body];
                let mut encoded = Vec::new();
                for index in &order {
                    encoded.extend([field(9, b"from the future"), vec![0x50, 0xac, 0x02]].concat());
                    encoded.extend(field([1, 2, 3, 1000][*index], parts[*index]));
                    encoded.extend([vec![0x5d], vec![7; 4], vec![0x61], vec![7; 8]].concat());
                }
                bytes.extend(frame(&encoded));
            }
            for chunk in [bytes.len(), 1, 7, 64] {
                let received = receive(bytes.chunks(chunk), &arena).unwrap();
                assert_eq!(received[0].descriptor.as_ref().unwrap().path, ["t"], "{order:?}");
                assert_eq!(&received[0].app_metadata[..], b"{}", "{order:?}");
                let came = batches(received);
                assert_eq!(came, std::slice::from_ref(&batch), "{order:?}, chunks of {chunk}");
                came.iter().for_each(|batch| assert_in_arena(batch, &arena));
            }
        }
    }
    assert_eq!(arena.budget().used_bytes(), 0);
}

fn permutations(of: &[usize]) -> Vec<Vec<usize>> {
    if of.is_empty() {
        return vec![vec![]];
    }
    let with_first = |&first: &usize| {
        let rest: Vec<_> = of.iter().copied().filter(|&other| other != first).collect();
        permutations(&rest).into_iter().map(move |tail| [vec![first], tail].concat())
    };
    of.iter().flat_map(with_first).collect()
}

/// With one copy, each message has one piece: the arena has given out exactly the bytes of the
/// slots.
#[test]
fn a_batch_takes_one_piece_of_the_arena_and_no_more_than_its_slots() {
    let arena = arena();
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("a", Arc::new(Int64Array::from_iter_values(0..1000))),
        ("b", Arc::new(Int32Array::from_iter_values(0..1000))),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let bytes = wire(&messages(&batch.schema(), std::slice::from_ref(&batch), &like_pyarrow()));
    let came = decode(bytes.chunks(1000), &arena).unwrap();
    let (a, b) = (came[0].column(0).to_data(), came[0].column(1).to_data());
    let (a, b) = (&a.buffers()[0], &b.buffers()[0]);
    assert_eq!(a.data_ptr(), b.data_ptr(), "both columns lie in one allocation");
    assert_eq!(a.as_ptr() as usize % crate::memory::ALIGNMENT, 0);
    assert_eq!(b.as_ptr() as usize - a.as_ptr() as usize, 8000);
    assert_eq!(arena.budget().used_bytes(), 12_032);
    assert_eq!(arena.budget().used_bytes_max(), 12_032, "nothing was allocated on the way");
}

fn random_schema(rng: &mut StdRng, depth: usize) -> SchemaRef {
    let columns = rng.random_range(0..6);
    let fields: Vec<_> =
        (0..columns).map(|column| Field::new(format!("c{column}"), random_type(rng, depth), true)).collect();
    Arc::new(Schema::new_with_metadata(fields, [("origin".into(), "random".into())].into()))
}

#[test]
fn random_batches_in_random_chunks_are_decoded_unchanged() {
    let mut seeds = StdRng::seed_from_u64(crate::testing::seed());
    for _ in 0..150 {
        let seed: u64 = seeds.random();
        let mut rng = StdRng::seed_from_u64(seed);
        let arena = arena();
        let schema = random_schema(&mut rng, 2);
        let sent: Vec<_> = (0..rng.random_range(0..4))
            .map(|_| {
                let rows = rng.random_range(0..300);
                random_batch(&mut rng, &schema, rows)
            })
            .collect();
        let codec = [None, None, Some(CompressionType::LZ4_FRAME), Some(CompressionType::ZSTD)][rng.random_range(0..4)];
        let options = IpcWriteOptions::try_new(8 << rng.random_range(0..4), false, MetadataVersion::V5).unwrap();
        let options = options.try_with_compression(codec).unwrap();
        let bytes = wire(&messages(&schema, &sent, &options));
        let mut cuts: Vec<_> = (0..rng.random_range(0..50)).map(|_| rng.random_range(0..=bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let came = decode(cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]), &arena).unwrap();
        assert_eq!(came, sent, "seed {seed}");
        came.iter().for_each(|batch| assert_in_arena(batch, &arena));
        drop(came);
        assert_eq!(arena.budget().used_bytes(), 0, "seed {seed}");
    }
}
