use super::*;
use crate::device::Device;
use crate::device::host::testing::{Bench, SIZES, THREADS, assert_transformed, for_every_key, key, patterns, random};

fn rows_arrive_in_their_partition<K: Key>() {
    let mut random = random(21);
    for threads in THREADS {
        let bench = Bench::new(threads);
        for rows in SIZES {
            let payload = bench.payload_of_every_width(rows);
            for (index, (pattern, numbers)) in patterns(rows, &mut random).into_iter().enumerate() {
                // All combinations would take minutes, so sizes, patterns and bits take turns.
                if rows > 2000 && (index + threads) % 4 != 0 {
                    continue;
                }
                let (keys, values) = bench.keys::<K>(&numbers);
                let bits = [(0, 0), (0, 1), (0, 6), (3, 5), (0, 11), (11, 9), (0, 12), (2, 13)][(index + rows) % 8];
                let bits = RadixBits { skip: bits.0, bits: bits.1 };
                let situation = format!("{rows} rows {pattern}, {bits:?}, {threads} threads");
                let found = bench.device.partition(&keys, &payload, bits, &bench.stream).unwrap();
                let bounds = found.bounds.get().unwrap();
                assert_eq!(bounds.len(), (1 << bits.bits) + 1, "{situation}");
                assert_eq!((bounds[0], bounds[1 << bits.bits]), (0, rows), "{situation}");
                let order = assert_transformed(&found.keys, &found.payload, &values, &situation);
                for (partition, range) in bounds.windows(2).enumerate() {
                    for &row in &order[range[0]..range[1]] {
                        let digit = (K::BITS - bits.skip - bits.bits) % K::BITS;
                        let digit = values[row as usize].mix().bits_from(digit) & ((1 << bits.bits) - 1);
                        assert_eq!(digit, partition, "row {row}, {situation}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_row_arrives_in_its_partition_with_its_payload() {
    for_every_key!(rows_arrive_in_their_partition);
}

#[test]
fn the_number_of_passes_does_not_change_the_partitions() {
    // Bits around the limits of one, two and three passes, with enough rows that most partitions
    // have some.
    let bench = Bench::new(2);
    let max = bench.device.tuning().pass_bits_max;
    let numbers: Vec<u32> = (0..100_003).map(|row: u32| row.wrapping_mul(0x9e37_79b9) >> 4).collect();
    let (keys, _) = bench.keys::<u64>(&numbers);
    let payload = [Payload::RowNumber, Payload::Column(keys.as_column())];
    for bits in [max - 1, max, max + 1, 2 * max - 1, 2 * max, 2 * max + 1] {
        let bits = RadixBits { skip: 3, bits };
        let digit = digit_of::<u64>(bits);
        let found = bench.device.partition(&keys, &payload, bits, &bench.stream).unwrap();
        let values = values_of::<u64>(&found.keys.data, keys.rows);
        let rows = values_of::<u32>(&found.payload[0].data, keys.rows);
        assert_eq!(values, values_of::<u64>(&found.payload[1].data, keys.rows), "{bits:?}");
        assert!(rows.iter().zip(values).all(|(&row, &value)| value == key::<u64>(numbers[row as usize])), "{bits:?}");
        let bounds = found.bounds.get().unwrap();
        assert_eq!(bounds.len(), (1 << bits.bits) + 1, "{bits:?}");
        assert_eq!(bounds[1 << bits.bits], keys.rows, "{bits:?}");
        let mut seen = 0;
        for (partition, range) in bounds.windows(2).enumerate() {
            seen += range[1] - range[0];
            assert!(values[range[0]..range[1]].iter().all(|&key| digit(key) == partition), "{partition}, {bits:?}");
        }
        assert_eq!(seen, keys.rows, "{bits:?}");
    }
}
