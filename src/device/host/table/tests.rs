use super::*;
use crate::device::Device;
use crate::device::host::testing::{Bench, SIZES, THREADS, assert_matches, for_every_key, numbers, patterns, random};

/// Returns numbers to look up, some of them in the build side and some not.
fn probe_numbers(build: &[u32]) -> Vec<u32> {
    build.iter().flat_map(|&number| [number, number ^ 0x55, number]).chain([0, 1, u32::MAX]).collect()
}

fn finds_all<K: Key>() {
    let mut random = random(41);
    for threads in THREADS {
        let bench = Bench::new(threads);
        for rows in SIZES {
            for (index, (pattern, build_numbers)) in patterns(rows, &mut random).into_iter().enumerate() {
                if rows > 2000 && (index + threads) % 3 != 0 {
                    continue;
                }
                let situation = format!("{rows} rows {pattern}, {threads} threads");
                let (build, values) = bench.keys::<K>(&build_numbers);
                let (probe, probe_values) = bench.keys::<K>(&probe_numbers(&build_numbers));
                let table = bench.device.build_table(&build, false, &bench.stream).unwrap();
                let order = table.order.as_ref().map(numbers);
                let distinct = values.iter().collect::<std::collections::HashSet<_>>().len();
                assert_eq!(order.is_some(), distinct < rows, "{situation}");
                let order = order.unwrap_or((0..rows as u32).collect());
                let by_position: Vec<K> = order.iter().map(|&row| values[row as usize]).collect();
                for range in [0..probe.rows, probe.rows / 3..probe.rows - 1, 1..1] {
                    let found = bench.device.probe_table(&table, &probe, range.clone(), &bench.stream).unwrap();
                    assert_eq!(found.rows, range);
                    assert_matches(&found, &by_position, &probe_values, &situation);
                }
            }
        }
    }
}

#[test]
fn a_table_finds_all_of_its_keys_and_no_others() {
    for_every_key!(finds_all);
}

fn dense<K: Key>() {
    let mut random = random(42);
    for threads in THREADS {
        let bench = Bench::new(threads);
        for rows in SIZES.into_iter().filter(|&rows| rows > 0) {
            let numbers = patterns(rows, &mut random).remove(0).1;
            for (min, gap) in [(0u128, 1u128), (1000, 3), (u128::MAX >> (128 - K::BITS + 1), 1)] {
                let values: Vec<K> = numbers.iter().map(|&n| K::truncate(min + gap * u128::from(n))).collect();
                let width = KeyWidth::for_bits(K::BITS).unwrap();
                let keys = |values: &[K]| Keys { data: bench.buffer(values), width, rows: values.len() };
                let max = min + gap * (rows as u128 - 1);
                let build = |values: &[K], min, max| {
                    bench.device.build_dense_table(&keys(values), min, max, &bench.stream).unwrap()
                };
                let table = build(&values, min, max).expect("distinct keys in range");
                let probe: Vec<K> = values
                    .iter()
                    .flat_map(|&key| [key, K::truncate(1).wrapping_sub(key), key.wrapping_sub(K::truncate(1))])
                    .collect();
                let all = 0..probe.len();
                let found = bench.device.probe_table(&table, &keys(&probe), all, &bench.stream).unwrap();
                assert_matches(&found, &values, &probe, &format!("{rows} rows from {min} by {gap}"));
                assert!(build(&[&values[..], &values[..1]].concat(), min, max + 1).is_none(), "a key repeats");
                if rows > 1 {
                    assert!(build(&values, min + 1, max + 1).is_none(), "a key is below the range");
                    assert!(build(&values, min, max - 1).is_none(), "a key is above the range");
                }
            }
        }
    }
}

#[test]
fn a_dense_table_is_built_only_of_distinct_keys_in_range() {
    for_every_key!(dense);
}

#[test]
fn keys_that_all_hash_to_one_region_are_found() {
    // The lowest bits of the mixed keys agree except for a few, so one region of the table gets all
    // keys. By chance this would hardly happen.
    let bench = Bench::new(2);
    let wanted = slot_count(60_000) - 1;
    let region = wanted & !(REGION_SLOTS - 1);
    let chosen: Vec<u64> = (0..).filter(|key: &u64| key.mix().low() & wanted & region == 0).take(60_000).collect();
    let keys = Keys { data: bench.buffer(&chosen), width: KeyWidth::W8, rows: chosen.len() };
    let table = bench.device.build_table(&keys, false, &bench.stream).unwrap();
    assert!(table.order.is_none());
    let found = bench.device.probe_table(&table, &keys, 0..chosen.len(), &bench.stream).unwrap();
    assert_matches(&found, &chosen, &chosen, "one region");
}

fn takes_what_was_reckoned<K: Key>() {
    let bench = Bench::new(2);
    let width = KeyWidth::for_bits(K::BITS).unwrap();
    for rows in [1u32, 100, 16_384, 16_385, 100_003] {
        for (repeats, numbers) in [(false, (0..rows).collect::<Vec<_>>()), (true, (0..rows).map(|n| n / 2).collect())] {
            let (keys, values) = bench.keys::<K>(&numbers);
            let repeats = repeats && rows > 1;
            let reckoned = TableBytes::new(width, u64::from(rows), repeats);
            // A device with this much memory has enough, whichever attempt fails first.
            let enough = reckoned.stays + reckoned.building + PIECES_ROUNDED_UP;
            let exact = Bench::with_memory(2, enough);
            let situation = format!("{rows} keys of {width:?}, repeats {repeats}");
            let table =
                exact.device.build_table(&keys, false, &exact.stream).unwrap_or_else(|e| panic!("{situation}: {e}"));
            // The table keeps no more than predicted, nor much less.
            let used = exact.used_bytes();
            assert!(used <= reckoned.stays + PIECES_ROUNDED_UP, "{used} of {reckoned:?}, {situation}");
            assert!(used >= reckoned.stays, "{used} of {reckoned:?}, {situation}");
            // Regions, and the slots of their rows, need not be filled at the same time.
            let peak = exact.device.memory().used_bytes_max() + 4 * u64::from(rows);
            assert!(peak + PIECES_ROUNDED_UP >= enough, "{peak} of {reckoned:?}, {situation}");
            assert_eq!(table.order.is_some(), repeats, "{situation}");
            drop(values);
        }
    }
}

/// Allowance for rounding each piece of memory up to a cache line.
const PIECES_ROUNDED_UP: u64 = 64 * 64;

#[test]
fn a_table_takes_the_predicted_memory() {
    for_every_key!(takes_what_was_reckoned);
}
