//! Helpers shared by the tests of the host device.

use std::collections::HashMap;

use arrow::buffer::{Buffer, MutableBuffer};
use bytemuck::Pod;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::HostDevice;
use super::buffer::{bytes_of, values_of};
use super::hash::Key;
use crate::device::{
    CancelFlag, Column, Device, DeviceBuffer, KeyWidth, Keys, Matches, NO_ROW, Payload, Positions, Stream, Width,
};
use crate::memory::{Arena, Budget};

/// A device, a stream on it and an arena.
pub(super) struct Bench {
    pub(super) device: HostDevice,
    pub(super) stream: Stream,
    pub(super) arena: Arena,
}

impl Bench {
    pub(super) fn new(threads: usize) -> Self {
        Self::with_memory(threads, 4 << 30)
    }

    pub(super) fn with_memory(threads: usize, bytes: u64) -> Self {
        let memory = Budget::new("memory of device host:0", "--device-memory", bytes);
        let device = HostDevice::new(0, threads, memory, None).unwrap();
        let stream = device.stream(CancelFlag::new()).unwrap();
        Self { device, stream, arena: Arena::new(Budget::new("host memory", "--host-memory", 4 << 30)) }
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.device.memory().used_bytes()
    }

    pub(super) fn buffer<T: Pod>(&self, values: &[T]) -> DeviceBuffer {
        self.device.copy_in(&[buffer_of(values)], &self.stream).unwrap()
    }

    /// Returns positions as a list, with `NO_ROW` allowed.
    pub(super) fn list(&self, positions: &[u32], nullable: bool) -> Positions {
        Positions::List { data: self.buffer(positions), rows: positions.len(), nullable }
    }
}

/// Returns values as an aligned Arrow buffer.
pub(super) fn buffer_of<T: Pod>(values: &[T]) -> Buffer {
    let mut bytes = MutableBuffer::new(size_of_val(values));
    bytes.extend_from_slice(bytemuck::cast_slice::<T, u8>(values));
    bytes.into()
}

/// Returns positions as numbers.
pub(super) fn numbers(positions: &Positions) -> Vec<u32> {
    match positions {
        Positions::Range(range) => range.clone().map(|position| position as u32).collect(),
        Positions::List { data, rows, .. } => values_of::<u32>(data, *rows).to_vec(),
    }
}

/// Returns a random generator with a seed that a failing test prints.
pub(in crate::device) fn random(seed: u64) -> StdRng {
    println!("random seed {seed}");
    StdRng::seed_from_u64(seed)
}

/// Numbers of rows around the boundaries of lines, blocks and morsels.
pub(super) const SIZES: [usize; 14] =
    [0, 1, 2, 15, 16, 17, 63, 64, 65, 1023, 1025, (1 << 14) - 1, (1 << 14) + 1, 100_003];

/// Thread counts to test with.
pub(super) const THREADS: [usize; 4] = [1, 2, 3, 8];

/// Returns difficult patterns of small numbers, with names. The first pattern has no repeats.
pub(in crate::device) fn patterns(rows: usize, random: &mut StdRng) -> Vec<(&'static str, Vec<u32>)> {
    let count = rows as u32;
    let mut shuffled: Vec<u32> = (0..count).collect();
    shuffled.shuffle(random);
    let zipf = |random: &mut StdRng| {
        // The inverse of a power law's distribution: over a third of the rows have the number 1.
        let uniform: f64 = random.random_range(1e-9..1.0);
        (uniform.powf(-1.5) as u32).min(1 << 20)
    };
    vec![
        ("shuffled", shuffled.clone()),
        ("in pairs", shuffled.iter().map(|n| n / 2).collect()),
        ("all equal", vec![7; rows]),
        ("multiples of 2^16", (0..count).map(|n| (n % 1000) << 16).collect()),
        ("skewed", (0..rows).map(|_| zipf(random)).collect()),
        ("random", (0..rows).map(|_| random.random()).collect()),
        ("sorted", (0..count).collect()),
        ("clustered", (0..rows).map(|row| (row as u32 % 2) << 31 | random.random_range(0..500)).collect()),
    ]
}

/// Returns a key of any width for a number: distinct for distinct numbers, with the number in its
/// lowest and highest bits.
pub(super) fn key<K: Key>(number: u32) -> K {
    let number = u128::from(number);
    K::truncate(number | number << 50 | number << 96)
}

impl Bench {
    /// Makes keys from numbers. Returns them on the device and as values.
    pub(super) fn keys<K: Key>(&self, numbers: &[u32]) -> (Keys, Vec<K>) {
        let values: Vec<K> = numbers.iter().map(|&number| key(number)).collect();
        let width = KeyWidth::for_bits(K::BITS).unwrap();
        (Keys { data: self.buffer(&values), width, rows: values.len() }, values)
    }

    /// Returns a column of each width whose values identify their row.
    pub(super) fn columns_of_every_width(&self, rows: usize) -> Vec<Column> {
        [Width::W1, Width::W2, Width::W4, Width::W8, Width::W16, Width::W32]
            .map(|width| Column {
                data: self.buffer(&(0..rows).flat_map(|row| cell(row, width)).collect::<Vec<u8>>()),
                width,
                rows,
                validity: None,
            })
            .to_vec()
    }
}

impl Bench {
    /// Returns row numbers, and a column of each width.
    pub(super) fn payload_of_every_width(&self, rows: usize) -> Vec<Payload> {
        [Payload::RowNumber]
            .into_iter()
            .chain(self.columns_of_every_width(rows).into_iter().map(Payload::Column))
            .collect()
    }
}

/// Asserts that `keys` are `values` in another order, each once, and that all of
/// [`Bench::payload_of_every_width`] moved along. Returns the row at each place.
pub(super) fn assert_transformed<'a, K: Key>(
    keys: &Keys,
    payload: &'a [Column],
    values: &[K],
    situation: &str,
) -> &'a [u32] {
    let order = values_of::<u32>(&payload[0].data, values.len());
    let found = values_of::<K>(&keys.data, values.len());
    assert_eq!(keys.rows, values.len(), "{situation}");
    let mut seen = vec![false; values.len()];
    for (place, &row) in order.iter().enumerate() {
        assert!(!std::mem::replace(&mut seen[row as usize], true), "row {row} twice, {situation}");
        assert_eq!(found[place], values[row as usize], "the key of row {row}, {situation}");
    }
    assert_moved(&payload[1..], order, situation);
    order
}

/// Returns the value of a row in [`Bench::columns_of_every_width`].
pub(super) fn cell(row: usize, width: Width) -> Vec<u8> {
    (0..width.bytes()).map(|byte| (row >> (8 * (byte % 4))) as u8 ^ byte as u8).collect()
}

/// Asserts that `columns`, transformed from [`Bench::columns_of_every_width`], hold the rows
/// `order`.
fn assert_moved(columns: &[Column], order: &[u32], situation: &str) {
    for column in columns {
        let bytes = column.width.bytes();
        assert_eq!(column.rows, order.len());
        for (place, &row) in order.iter().enumerate() {
            let found = &bytes_of(&column.data)[place * bytes..(place + 1) * bytes];
            assert_eq!(found, cell(row as usize, column.width), "place {place} of width {bytes}, {situation}");
        }
    }
}

/// Asserts that `matches` are right for the given probe keys. `build` has the keys by build
/// position.
pub(super) fn assert_matches<K: Key>(matches: &Matches, build: &[K], probe: &[K], situation: &str) {
    let mut counts: HashMap<K, u32> = HashMap::new();
    build.iter().for_each(|&key| *counts.entry(key).or_default() += 1);
    let rows = matches.rows.clone();
    let first = values_of::<u32>(&matches.first, rows.len());
    let count = matches.count.as_ref().map(|count| values_of::<u32>(count, rows.len()));
    let (mut total, mut matched_rows, mut longest) = (0, 0, 0);
    // Each run is checked once, not once per probe row. With few distinct keys, the latter would
    // take too long.
    let mut runs_seen: HashMap<K, u32> = HashMap::new();
    for (index, key) in probe[rows].iter().enumerate() {
        let expected = counts.get(key).copied().unwrap_or(0);
        let found = count.map_or(u32::from(first[index] != NO_ROW), |count| count[index]);
        assert_eq!(found, expected, "row {index} with key {key:?}, {situation}");
        if expected == 0 {
            assert_eq!(first[index], NO_ROW, "row {index}, {situation}");
        } else {
            let seen = *runs_seen.entry(*key).or_insert_with(|| {
                let run = first[index] as usize..first[index] as usize + expected as usize;
                assert!(build[run].iter().all(|build| build == key), "row {index} with key {key:?}, {situation}");
                first[index]
            });
            assert_eq!(first[index], seen, "rows with one key have one run, {situation}");
        }
        total += u64::from(expected);
        matched_rows += usize::from(expected > 0);
        longest = longest.max(expected);
    }
    assert_eq!((matches.total, matches.matched_rows), (total, matched_rows), "{situation}");
    assert_eq!(matches.count.is_some(), longest > 1, "lengths are given when one is above one, {situation}");
}

/// Calls a generic test function for every width of key.
macro_rules! for_every_key {
    ($test:ident) => {
        $test::<u32>();
        $test::<u64>();
        $test::<u128>();
    };
}

pub(super) use for_every_key;
