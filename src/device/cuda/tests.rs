//! Compares the GPU's primitives with the host device's, on the same adversarial data. Without a
//! GPU the tests pass without testing anything, and say so; `DOVETAIL_TEST_DEVICE=cuda` makes that
//! a failure.

mod text;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use arrow::buffer::{BooleanBuffer, Buffer};
use bytemuck::Pod;
use parking_lot::{RwLock, RwLockReadGuard};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};

use super::match_partitions::UnitRows;
use super::work::FILL;
use super::{CudaDevice, GpuPlace, device_count, gpu_identities, gpus_seen};
use crate::Error;
use crate::device::host::HostDevice;
use crate::device::host::testing::{patterns, random};
use crate::device::{
    BitSlice, BytesColumn, BytesPart, CancelFlag, Column, Device, DeviceBuffer, Hashing, HostColumn, JoinedRows,
    KeyEncoding, KeyField, KeyValues, KeyWidth, Keys, Matches, NO_ROW, PackedKeys, Pairs, PartitionMatches, Partitions,
    Payload, Positions, RadixBits, Stream, Table, Unmatched, ValueField, Wanted, Which, Width, length_bits, strings,
};
use crate::memory::{Arena, Budget};

/// Values of variable length, or nulls.
type Text = Vec<Option<Vec<u8>>>;

struct Side {
    device: Arc<dyn Device>,
    stream: Stream,
    arena: Arena,
    /// Declared last, because closing the device waits for all work of the GPU.
    _among_others: Option<RwLockReadGuard<'static, ()>>,
}

/// Held by tests that need the GPU to themselves. When another test ends, it frees pinned memory,
/// which waits until the GPU is idle. Work queued meanwhile waits with it.
static ALONE: RwLock<()> = RwLock::new(());

/// Opens the GPU with a budget of `bytes` bytes, if there is a GPU.
fn gpu_with(bytes: u64) -> Option<Side> {
    // A test may hold several guards.
    let among_others = ALONE.read_recursive();
    Some(Side { _among_others: Some(among_others), ..gpu_alone_with(bytes)? })
}

/// Opens the GPU like [`gpu_with`], for a test that holds [`ALONE`].
fn gpu_alone_with(bytes: u64) -> Option<Side> {
    if device_count().unwrap() == 0 {
        let required = std::env::var("DOVETAIL_TEST_DEVICE").is_ok_and(|device| device == "cuda");
        assert!(!required, "DOVETAIL_TEST_DEVICE=cuda, and there is no GPU");
        println!("no GPU: nothing was tested");
        return None;
    }
    let budget = |_| Budget::new("memory of device cuda:0", "--device-memory", bytes);
    Some(Side::of(Arc::new(CudaDevice::open(0, &GpuPlace::default(), 2, budget).unwrap())))
}

/// Opens the GPU and a host device to compare it with.
fn both() -> Option<[Side; 2]> {
    let memory = Budget::new("memory of device host:0", "--device-memory", 8 << 30);
    Some([gpu_with(8 << 30)?, Side::of(Arc::new(HostDevice::new(0, 2, memory, None).unwrap()))])
}

impl Side {
    fn of(device: Arc<dyn Device>) -> Self {
        let stream = device.stream(CancelFlag::new()).unwrap();
        let arena = Arena::new(Budget::new("host memory", "--host-memory", 4 << 30));
        Self { device, stream, arena, _among_others: None }
    }

    fn put<T: Pod>(&self, values: &[T]) -> DeviceBuffer {
        // A buffer of u128 is aligned for keys of any width on host devices.
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let mut aligned = vec![0u128; bytes.len().div_ceil(16)];
        bytemuck::cast_slice_mut::<u128, u8>(&mut aligned)[..bytes.len()].copy_from_slice(bytes);
        let buffer = Buffer::from_vec(aligned).slice_with_length(0, bytes.len());
        self.device.copy_in(&[buffer], &self.stream).unwrap()
    }

    /// Copies in a bitmap that starts at bit 0.
    fn put_bits(&self, bits: impl Iterator<Item = bool>) -> DeviceBuffer {
        let bits: BooleanBuffer = bits.collect();
        let bits = BitSlice::Bits { len: bits.len(), buffer: bits.into_inner(), offset: 0 };
        self.device.copy_in_bits(&[bits], &self.stream).unwrap()
    }

    /// Copies in text in several parts, which begin anywhere, with offsets of the given width and
    /// without validity.
    fn put_text(&self, values: &Text, offset_width: Width, random: &mut StdRng) -> BytesColumn {
        let rows = values.len();
        let mut parts = Vec::new();
        let mut start = 0;
        while start < rows || parts.is_empty() {
            let end = rows.min(start + random.random_range(0..rows / 3 + 2));
            // Bytes before and after the values belong to other rows.
            let mut data = vec![b'z'; random.random_range(0..20)];
            let mut offsets = vec![data.len()];
            for value in &values[start..end] {
                // Bytes under a null may be anything.
                data.extend_from_slice(value.as_deref().unwrap_or(b"null"));
                offsets.push(data.len());
            }
            data.extend_from_slice(b"zz");
            let offsets = match offset_width {
                Width::W4 => Buffer::from_vec(offsets.into_iter().map(|offset| offset as u32).collect()),
                _ => Buffer::from_vec(offsets.into_iter().map(|offset| offset as u64).collect()),
            };
            parts.push(BytesPart { offsets, data: Buffer::from_vec(data) });
            start = end;
        }
        strings(&*self.device).copy_in_bytes(&parts, offset_width, &self.stream).unwrap()
    }

    fn get<T: Pod>(&self, buffer: &DeviceBuffer, count: usize) -> Vec<T> {
        let bytes = self.device.copy_out(buffer, count * size_of::<T>(), &self.arena, &self.stream).unwrap();
        bytemuck::pod_collect_to_vec(&bytes[..count * size_of::<T>()])
    }

    fn list(&self, positions: &[u32], nullable: bool) -> Positions {
        Positions::List { data: self.put(positions), rows: positions.len(), nullable }
    }

    fn numbers(&self, positions: &Positions) -> Vec<u32> {
        let host = self.device.positions_to_host(positions, &self.arena, &self.stream).unwrap();
        host[..4 * positions.len()].chunks(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }

    fn keys(&self, numbers: &[u32], width: KeyWidth) -> Keys {
        let bytes: Vec<u8> =
            numbers.iter().flat_map(|&number| key(number).to_le_bytes()[..width.bytes()].to_vec()).collect();
        Keys { data: self.put(&bytes), width, rows: numbers.len() }
    }

    /// Returns keys as numbers of 128 bits.
    fn key_values(&self, keys: &Keys) -> Vec<u128> {
        let bytes: Vec<u8> = self.get(&keys.data, keys.rows * keys.width.bytes());
        bytes.chunks(keys.width.bytes()).map(wide).collect()
    }

    /// Makes a column of each width whose values encode their row, and row numbers.
    fn payload_of_every_width(&self, rows: usize) -> Vec<Payload> {
        self.payload(&WIDTHS, rows).into_iter().chain([Payload::RowNumber]).collect()
    }

    /// Makes columns of the given widths whose values encode their row.
    fn payload(&self, widths: &[Width], rows: usize) -> Vec<Payload> {
        let column = |&width| {
            let bytes: Vec<u8> = (0..rows).flat_map(|row| cell(row, width)).collect();
            Payload::Column(Column { data: self.put(&bytes), width, rows, validity: None })
        };
        widths.iter().map(column).collect()
    }

    /// Makes row numbers as a column of 8 bytes.
    fn wide_row_numbers(&self, rows: usize) -> Payload {
        let numbers: Vec<u64> = (0..rows as u64).collect();
        Payload::Column(Column { data: self.put(&numbers), width: Width::W8, rows, validity: None })
    }

    /// Returns the row at each place, read from the last payload column. Asserts that all columns
    /// before it moved with it.
    fn rows_moved(&self, payload: &[Column], story: &str) -> Vec<u32> {
        let (numbers, columns) = payload.split_last().unwrap();
        let order: Vec<u32> = match numbers.width {
            Width::W8 => self.get::<u64>(&numbers.data, numbers.rows).into_iter().map(|row| row as u32).collect(),
            _ => self.get(&numbers.data, numbers.rows),
        };
        for column in columns {
            let width = column.width;
            let bytes: Vec<u8> = self.get(&column.data, column.rows * width.bytes());
            for (place, &row) in order.iter().enumerate() {
                let found = &bytes[place * width.bytes()..(place + 1) * width.bytes()];
                assert_eq!(found, cell(row as usize, width), "place {place} of {width:?}, {story}");
            }
        }
        order
    }

    fn runs(&self, matches: &Matches) -> Vec<(u32, u32)> {
        let rows = matches.rows.len();
        let first: Vec<u32> = self.get(&matches.first, rows);
        let count: Vec<u32> = match &matches.count {
            Some(count) => self.get(count, rows),
            None => first.iter().map(|&first| u32::from(first != NO_ROW)).collect(),
        };
        first.into_iter().zip(count).collect()
    }

    /// Asserts that matches are right. `build`: the keys by build position.
    fn assert_matches(&self, matches: &Matches, build: &[u128], probe: &[u128], story: &str) {
        let mut counts: HashMap<u128, u32> = HashMap::new();
        build.iter().for_each(|&key| *counts.entry(key).or_default() += 1);
        let (mut total, mut matched_rows, mut longest) = (0, 0, 0);
        let mut seen: HashMap<u128, u32> = HashMap::new();
        for (row, ((first, count), key)) in self.runs(matches).into_iter().zip(&probe[matches.rows.clone()]).enumerate()
        {
            let expected = counts.get(key).copied().unwrap_or(0);
            assert_eq!(count, expected, "row {row} with key {key:x}, {story}");
            if expected == 0 {
                assert_eq!(first, NO_ROW, "row {row}, {story}");
                continue;
            }
            let known = *seen.entry(*key).or_insert_with(|| {
                let run = first as usize..first as usize + expected as usize;
                assert!(build[run].iter().all(|build| build == key), "row {row} with key {key:x}, {story}");
                first
            });
            assert_eq!(first, known, "rows with one key have one run, {story}");
            total += u64::from(expected);
            matched_rows += 1;
            longest = longest.max(expected);
        }
        assert_eq!((matches.total, matches.matched_rows), (total, matched_rows), "{story}");
        assert_eq!(matches.count.is_some(), longest > 1, "lengths are given when one is above one, {story}");
    }
}

const WIDTHS: [Width; 6] = [Width::W1, Width::W2, Width::W4, Width::W8, Width::W16, Width::W32];
const KEY_WIDTHS: [KeyWidth; 3] = [KeyWidth::W4, KeyWidth::W8, KeyWidth::W16];
/// Sizes around warps, blocks, tiles and units.
const SIZES: [usize; 12] = [0, 1, 2, 31, 33, 255, 257, 4096, 4097, 8191, 8193, 100_003];

/// Returns a key of 128 bits. Distinct numbers give distinct keys, even if the keys are cut.
fn key(number: u32) -> u128 {
    let number = u128::from(number);
    number | number << 50 | number << 96
}

fn cut(key: u128, width: KeyWidth) -> u128 {
    key & (u128::MAX >> (128 - 8 * width.bytes()))
}

fn wide(bytes: &[u8]) -> u128 {
    let mut all = [0; 16];
    all[..bytes.len()].copy_from_slice(bytes);
    u128::from_le_bytes(all)
}

fn cell(row: usize, width: Width) -> Vec<u8> {
    (0..width.bytes()).map(|byte| (row >> (8 * (byte % 4))) as u8 ^ byte as u8).collect()
}

fn values_of(numbers: &[u32], width: KeyWidth) -> Vec<u128> {
    numbers.iter().map(|&number| cut(key(number), width)).collect()
}

/// Returns the largest number of rows to test with: `DOVETAIL_TEST_ROWS_MAX`, for sanitizers, which
/// make everything slow.
fn rows_max() -> usize {
    std::env::var("DOVETAIL_TEST_ROWS_MAX").ok().and_then(|rows| rows.parse().ok()).unwrap_or(usize::MAX)
}

/// Returns the sizes to test with.
fn sizes() -> impl Iterator<Item = usize> {
    let most = rows_max();
    SIZES.into_iter().filter(move |&rows| rows <= most)
}

/// Calls `test` with numbers of every pattern, for every key width and number of rows.
fn for_every_case(seed: u64, test: impl FnMut(&[u32], KeyWidth, &str, &mut StdRng)) {
    for_every_case_of(&KEY_WIDTHS, seed, test);
}

/// Calls `test` like [`for_every_case`], for some key widths. Tests with many cases are split by
/// width, because sanitizers make everything slow.
fn for_every_case_of(widths: &[KeyWidth], seed: u64, mut test: impl FnMut(&[u32], KeyWidth, &str, &mut StdRng)) {
    let mut random = random(seed);
    for rows in sizes() {
        for (pattern, numbers) in patterns(rows, &mut random) {
            for &width in widths {
                test(&numbers, width, &format!("{rows} {pattern} keys of {width:?}"), &mut random);
            }
        }
    }
}

#[test]
fn bytes_and_bits_are_copied_in_and_back_out() {
    let Some(sides) = both() else { return };
    let mut random = random(201);
    for _ in 0..50 {
        let parts: Vec<Vec<u8>> = (0..random.random_range(0..4))
            .map(|_| (0..random.random_range(0..100_000)).map(|_| random.random()).collect())
            .collect();
        let buffers: Vec<Buffer> = parts.iter().cloned().map(Buffer::from_vec).collect();
        let mut bits = Vec::new();
        // Parts of whole bytes are copied without joining.
        let unit = if random.random() { 8 } else { 1 };
        let parts_max = random.random_range(0..5);
        for part in 0..parts_max {
            let ragged = if part + 1 == parts_max { random.random_range(0..8) } else { 0 };
            let len = random.random_range(0..5000 / unit) * unit + ragged;
            let offset = random.random_range(0..100 / unit) * unit;
            let values: Vec<bool> = (0..offset + len).map(|_| random.random()).collect();
            bits.push(match random.random_bool(0.3) {
                true => BitSlice::Ones { len },
                false => BitSlice::Bits { buffer: BooleanBuffer::from(values).into_inner(), offset, len },
            });
        }
        let len: usize = bits.iter().map(BitSlice::len).sum();
        let [gpu, host] = sides.each_ref().map(|side| {
            let bytes = side.device.copy_in(&buffers, &side.stream).unwrap();
            let bitmap = side.device.copy_in_bits(&bits, &side.stream).unwrap();
            let copy = side.device.copy(&bytes, &side.stream).unwrap();
            let [bytes, copy] = [bytes, copy].map(|bytes| side.get::<u8>(&bytes, bytes.size_bytes()));
            (bytes, side.get::<u8>(&bitmap, len.div_ceil(8)), copy)
        });
        assert_eq!((&gpu.0, &gpu.2), (&parts.concat(), &gpu.0));
        assert_eq!(gpu, host);
    }
}

#[test]
fn keys_are_packed_as_on_the_host() {
    let Some(sides) = both() else { return };
    let mut random = random(202);
    for case in 0..300 {
        let rows = random.random_range(0..3000);
        let key_width = KEY_WIDTHS[random.random_range(0..3)];
        let mut shift = 0;
        let mut fields = Vec::new();
        // Some cases have more fields than one call packs.
        let fields_max = if case % 20 == 0 { 20 } else { 4 };
        for _ in 0..random.random_range(1..=fields_max) {
            let width = WIDTHS[random.random_range(0..5)];
            let left = 8 * key_width.bytes() as u32 - shift;
            if left < 2 {
                break;
            }
            let encoding = match random.random_range(0..4) {
                0 => KeyEncoding::Unsigned,
                1 => KeyEncoding::Signed { min: i128::from(random.random_range(-300..300i32)) },
                2 => KeyEncoding::Offset { min: u128::from(random.random_range(0..300u32)) },
                _ if matches!(width, Width::W2 | Width::W4 | Width::W8) => KeyEncoding::Float,
                _ => KeyEncoding::Unsigned,
            };
            let bits = random.random_range(0..=(left - 1).min(8 * width.bytes() as u32));
            let nulls = random.random_range(0..3);
            let bytes: Vec<u8> = (0..rows * width.bytes())
                .map(|_| [0, 0x80, 0xff, 0x7f, random.random()][random.random_range(0..5)])
                .collect();
            let valid: Vec<bool> = (0..rows).map(|_| random.random_bool(0.8)).collect();
            fields.push((bytes, width, encoding, shift, bits, nulls, valid));
            shift += bits + 1;
        }
        let [gpu, host] = sides.each_ref().map(|side| {
            let fields: Vec<KeyField> = fields
                .iter()
                .map(|(bytes, width, encoding, shift, bits, nulls, valid)| {
                    let bits_of = |valid: &[bool]| BitSlice::Bits {
                        buffer: BooleanBuffer::from(valid.to_vec()).into_inner(),
                        offset: 0,
                        len: rows,
                    };
                    let validity =
                        (*nulls > 0).then(|| side.device.copy_in_bits(&[bits_of(valid)], &side.stream).unwrap());
                    let column = Column { data: side.put(bytes), width: *width, rows, validity };
                    let null_bit = (*nulls == 2).then_some(shift + bits);
                    KeyField { column, encoding: *encoding, shift: *shift, bits: *bits, null_bit }
                })
                .collect();
            let packed = side.device.pack_keys(&fields, key_width, &side.stream).unwrap();
            (side.key_values(&packed.keys), packed.rows_kept.as_ref().map(|kept| side.numbers(kept)))
        });
        assert_eq!(gpu, host, "{rows} rows of {key_width:?}: {fields:?}");
    }
}

/// Key columns of a few rows: text, and numbers of several kinds. Two of the columns have
/// occasional nulls.
struct LongKeys {
    text: Vec<Option<Vec<u8>>>,
    number: Vec<Option<i32>>,
    /// Unsigned on one side only.
    positive: Vec<u16>,
    wide: Vec<i128>,
    double: Vec<f64>,
    single: Vec<f32>,
}

/// Representation of a row's key: equal for two rows exactly if their values are equal.
type LongKey = (Option<Vec<u8>>, Option<i32>, u16, i128, String);

impl LongKeys {
    fn random(rows: usize, random: &mut StdRng) -> Self {
        // Few different bytes, and lengths around whole words: many values are equal, and many
        // share a prefix.
        let text = |random: &mut StdRng| {
            let len = *[0, 1, 7, 8, 9, 15, 16, 17, 31, 40].choose(random).unwrap();
            random.random_bool(0.9).then(|| {
                let mut bytes = vec![b'a'; len];
                if let Some(last) = bytes.last_mut() {
                    *last = b'a' + random.random_range(0..2);
                }
                bytes
            })
        };
        let mut random_of = |choices: [f64; 5]| (0..rows).map(|_| *choices.choose(random).unwrap()).collect::<Vec<_>>();
        let double = random_of([0.0, -0.0, f64::NAN, -f64::NAN, 1.5]);
        let single = random_of([0.0, -0.0, f64::NAN, -1.5, -1.5]).into_iter().map(|value| value as f32).collect();
        Self {
            text: (0..rows).map(|_| text(random)).collect(),
            number: (0..rows).map(|_| random.random_bool(0.9).then(|| random.random_range(-1..1))).collect(),
            positive: (0..rows).map(|_| if random.random() { u16::MAX } else { 7 }).collect(),
            wide: (0..rows).map(|_| if random.random_bool(0.1) { 1 << 64 } else { -1 }).collect(),
            double,
            single,
        }
    }

    fn rows(&self) -> usize {
        self.text.len()
    }

    fn key(&self, row: usize) -> LongKey {
        // Zeros of both signs are equal, and so are all NaNs.
        let shown = |value: f64| if value.is_nan() || value == 0.0 { value.abs() } else { value };
        let floats = format!("{} {}", shown(self.double[row]), shown(self.single[row].into()));
        (self.text[row].clone(), self.number[row], self.positive[row], self.wide[row], floats)
    }

    /// Copies the columns in. Text has several parts, which begin anywhere, with offsets of the
    /// given width. The types of numbers vary with that width.
    fn fields(&self, side: &Side, nulls_equal: bool, offset_width: Width, random: &mut StdRng) -> Vec<ValueField> {
        let rows = self.rows();
        let validity = |is_valid: Vec<bool>| Some(side.put_bits(is_valid.into_iter()));
        let text = side.put_text(&self.text, offset_width, random);
        assert_eq!(text.rows, rows);
        let text = BytesColumn { validity: validity(self.text.iter().map(Option::is_some).collect()), ..text };
        let nullable = |data, width, encoding, validity| {
            let column = Column { data, width, rows, validity };
            KeyValues::Fixed { column, encoding }
        };
        let fixed = |data, width, encoding| nullable(data, width, encoding, None);
        let is_number = validity(self.number.iter().map(Option::is_some).collect());
        let signed = KeyEncoding::Signed { min: 0 };
        let numbers = || self.number.iter().map(|number| number.unwrap_or(77));
        let [number, positive] = match offset_width {
            Width::W4 => [
                nullable(side.put(&numbers().collect::<Vec<i32>>()), Width::W4, signed, is_number),
                fixed(side.put(&self.positive), Width::W2, KeyEncoding::Unsigned),
            ],
            _ => [
                nullable(side.put(&numbers().map(i64::from).collect::<Vec<i64>>()), Width::W8, signed, is_number),
                fixed(side.put(&self.positive.iter().map(|&n| n.into()).collect::<Vec<i32>>()), Width::W4, signed),
            ],
        };
        let wide = fixed(side.put(&self.wide), Width::W16, signed);
        let double = fixed(side.put(&self.double), Width::W8, KeyEncoding::Float);
        let single = fixed(side.put(&self.single), Width::W4, KeyEncoding::Float);
        let all = [KeyValues::Bytes(text), number, positive, wide, double, single];
        all.into_iter().map(|values| ValueField { values, nulls_equal }).collect()
    }
}

#[test]
fn short_text_is_encoded_as_distinct_numbers_in_the_same_order() {
    let Some(gpu) = gpu_with(1 << 30) else { return };
    let mut random = random(232);
    for rows in sizes() {
        for bytes_max in [0, 1, 3, 4, 7, 8, 9, 15] {
            let mut value = || {
                let len = random.random_range(0..=bytes_max);
                (0..len).map(|_| *[0, 1, b'a', u8::MAX].choose(&mut random).unwrap()).collect::<Vec<u8>>()
            };
            let values: Vec<Vec<u8>> = (0..rows).map(|_| value()).collect();
            // The row under a null has more bytes than `bytes_max`. It may give any number, but no
            // bytes beyond the values may be read.
            let hidden = vec![b'x'; 40];
            let all = || values.iter().chain([&hidden]);
            let ends = all().scan(3, |end, value| {
                *end += value.len() as u32;
                Some(*end)
            });
            let offsets = [3].into_iter().chain(ends).collect::<Vec<u32>>();
            let data = [&b"zzz"[..], &all().flatten().copied().collect::<Vec<u8>>()].concat();
            let part = BytesPart { offsets: Buffer::from_vec(offsets), data: Buffer::from_vec(data) };
            let bytes = strings(&*gpu.device).copy_in_bytes(&[part], Width::W4, &gpu.stream).unwrap();
            let column = strings(&*gpu.device).short_values(&bytes, bytes_max, &gpu.stream).unwrap();
            let found: Vec<u8> = gpu.get(&column.data, (rows + 1) * column.width.bytes());
            let numbers: Vec<u128> = found.chunks(column.width.bytes()).map(wide).take(rows).collect();
            let expected = |value: &Vec<u8>| {
                let mut padded = [0; 16];
                padded[16 - bytes_max..][..value.len()].copy_from_slice(value);
                u128::from_be_bytes(padded) << length_bits(bytes_max) | value.len() as u128
            };
            assert_eq!(numbers, values.iter().map(expected).collect::<Vec<_>>(), "{rows} rows of {bytes_max} bytes");
            let mut order: Vec<usize> = (0..rows).collect();
            order.sort_by_key(|&row| numbers[row]);
            assert!(
                order.windows(2).all(|pair| values[pair[0]] <= values[pair[1]]),
                "{rows} rows of {bytes_max} bytes"
            );
        }
    }
}

#[test]
fn keys_too_wide_to_be_packed_are_hashed_and_compared() {
    let Some(gpu) = gpu_with(2 << 30) else { return };
    let mut random = random(231);
    for rows in sizes() {
        for nulls_equal in [false, true] {
            let sides = [(); 2].map(|()| LongKeys::random(rows, &mut random));
            let widths = [Width::W4, Width::W8];
            let fields: [Vec<ValueField>; 2] =
                std::array::from_fn(|at| sides[at].fields(&gpu, nulls_equal, widths[at], &mut random));
            let has_key =
                |side: &LongKeys, row: usize| nulls_equal || (side.text[row].is_some() && side.number[row].is_some());
            let story = format!("{rows} rows, nulls equal: {nulls_equal}");

            // Equal hashes imply equal values, across both sides.
            let mut value_of = HashMap::new();
            let mut hash_of = HashMap::new();
            for (side, fields) in sides.iter().zip(&fields) {
                let hashing = Hashing { seed: 5, mask: u128::MAX };
                let packed = strings(&*gpu.device).hash_keys(fields, hashing, &gpu.stream).unwrap();
                let kept: Vec<u32> = (0..rows).filter(|&row| has_key(side, row)).map(|row| row as u32).collect();
                let found = packed.rows_kept.as_ref().map_or((0..rows as u32).collect(), |kept| gpu.numbers(kept));
                assert_eq!(found, kept, "{story}");
                for (&row, hash) in kept.iter().zip(gpu.key_values(&packed.keys)) {
                    let value = side.key(row as usize);
                    assert_eq!(*value_of.entry(hash).or_insert_with(|| value.clone()), value, "{story}");
                    assert_eq!(*hash_of.entry(value).or_insert(hash), hash, "{story}");
                }
            }

            // Pairs of random rows, treated as if their hashes were equal.
            let any = |random: &mut StdRng| random.random_range(0..rows as u32);
            let build: Vec<u32> =
                (0..rows).map(|_| if random.random_bool(0.1) { NO_ROW } else { any(&mut random) }).collect();
            let probe: Vec<u32> = (0..rows).map(|_| any(&mut random)).collect();
            let differs = |at: usize, probe_row: u32| {
                let (build_row, probe_row) = (build[at], probe_row as usize);
                build_row != NO_ROW && {
                    let (of_build, of_probe) = (sides[0].key(build_row as usize), sides[1].key(probe_row));
                    let has_null = of_build.0.is_none() || of_build.1.is_none();
                    of_build != of_probe || (has_null && !nulls_equal)
                }
            };
            for (probe, of) in
                [(gpu.list(&probe, false), probe.clone()), (Positions::Range(0..rows), (0..rows as u32).collect())]
            {
                let pairs = Pairs { build: gpu.list(&build, true), probe };
                let [of_build, of_probe] = &fields;
                let found = strings(&*gpu.device).differing_pairs(of_build, of_probe, &pairs, &gpu.stream).unwrap();
                let expected: Vec<u32> = (0..rows).filter(|&at| differs(at, of[at])).map(|at| at as u32).collect();
                assert_eq!(gpu.numbers(&found), expected, "{story}");
            }

            // Hashes of no bits at all, and of all bits.
            for mask in [u128::MAX, 0] {
                let hashing = Hashing { seed: 6, mask };
                let packed = strings(&*gpu.device).hash_keys(&fields[0], hashing, &gpu.stream).unwrap();
                let hashes = gpu.key_values(&packed.keys);
                assert!(hashes.iter().all(|hash| hash & !mask == 0), "{story}");
                let kept = packed.rows_kept.as_ref().map_or((0..rows as u32).collect(), |kept| gpu.numbers(kept));
                let mut order: Vec<usize> = (0..kept.len()).collect();
                order.sort_by_key(|&at| (hashes[at], kept[at]));
                let ordered: Vec<u32> = order.iter().map(|&at| kept[at]).collect();
                let keys: Vec<u128> = order.iter().map(|&at| hashes[at]).collect();
                let keys = Keys { data: gpu.put(&keys), width: KeyWidth::W16, rows: keys.len() };
                let mut values = ordered.iter().map(|&row| sides[0].key(row as usize));
                let first = values.next();
                let is_uniform = mask != 0 || values.all(|value| Some(&value) == first.as_ref());
                let ordered = gpu.list(&ordered, false);
                let found = strings(&*gpu.device).are_runs_uniform(&fields[0], &ordered, &keys, &gpu.stream).unwrap();
                assert_eq!(found, is_uniform, "{story}, mask {mask:x}");
            }
        }
    }
}

/// Two rows whose concatenated values are the same words, unless the hash includes which values are
/// null.
#[test]
fn keys_with_nulls_in_different_places_have_different_hashes() {
    let Some(gpu) = gpu_with(1 << 30) else { return };
    let rows = 2;
    let bits = BooleanBuffer::from(vec![false, true]).into_inner();
    let bits = BitSlice::Bits { buffer: bits, offset: 0, len: rows };
    let validity = Some(gpu.device.copy_in_bits(&[bits], &gpu.stream).unwrap());
    let numbers = |values: [u64; 2], validity| {
        let column = Column { data: gpu.put(&values), width: Width::W8, rows, validity };
        KeyValues::Fixed { column, encoding: KeyEncoding::Unsigned }
    };
    let text = |values: [&[u8]; 2]| {
        let offsets = vec![0, values[0].len() as u32, (values[0].len() + values[1].len()) as u32];
        let part = BytesPart { offsets: Buffer::from_vec(offsets), data: Buffer::from_vec(values.concat()) };
        KeyValues::Bytes(strings(&*gpu.device).copy_in_bytes(&[part], Width::W4, &gpu.stream).unwrap())
    };
    let first = [&[0; 8][..], &[8], &[0; 7], b"abcdefgh"].concat();
    // One row is null, "", 1 and these 24 bytes. The other is 1, "\0", 24 and the last 8 of the
    // bytes. They would differ by a zero word, if nulls gave any.
    for number in [0u64, 1, 0x9216_d5d9_8979_fb1b] {
        let columns = [
            numbers([7, number], validity.clone()),
            text([b"", b"\0"]),
            numbers([1, 24], None),
            text([&first, b"abcdefgh"]),
        ];
        let fields = columns.map(|values| ValueField { values, nulls_equal: true });
        for seed in 0..4 {
            let hashing = Hashing { seed, mask: u128::MAX };
            let packed = strings(&*gpu.device).hash_keys(&fields, hashing, &gpu.stream).unwrap();
            let [a, b] = gpu.key_values(&packed.keys)[..] else { panic!("two rows") };
            assert_ne!(a, b, "{number:x}, seed {seed}");
        }
    }
}

#[test]
fn long_values_in_many_parts_are_distinguished_by_their_last_byte() {
    let Some(gpu) = gpu_with(1 << 30) else { return };
    // More parts than fit in a call's arguments, and than a block has rows.
    let text = |row: usize| format!("{}{row:03}", "x".repeat(1000 + row % 9)).into_bytes();
    let rows = 600;
    let part = |row: usize| {
        let text = text(row);
        BytesPart { offsets: Buffer::from_vec(vec![0u32, text.len() as u32]), data: Buffer::from_vec(text) }
    };
    let none = BytesPart { offsets: Buffer::from_vec(vec![7u32]), data: Buffer::from_vec(vec![0u8; 9]) };
    let parts: Vec<BytesPart> = (0..rows).flat_map(|row| [part(row), none.clone()]).collect();
    let bytes = strings(&*gpu.device).copy_in_bytes(&parts, Width::W4, &gpu.stream).unwrap();
    assert_eq!(bytes.rows, rows);
    let lengths: Vec<u64> = gpu.get::<u64>(&bytes.begins, rows + 1).windows(2).map(|ends| ends[1] - ends[0]).collect();
    assert!((0..rows).all(|row| lengths[row] == text(row).len() as u64));
    let fields = [ValueField { values: KeyValues::Bytes(bytes), nulls_equal: false }];
    let hashing = Hashing { seed: 1, mask: u128::MAX };
    let packed = strings(&*gpu.device).hash_keys(&fields, hashing, &gpu.stream).unwrap();
    let hashes: BTreeSet<u128> = gpu.key_values(&packed.keys).into_iter().collect();
    assert_eq!(hashes.len(), rows);
    let other = |by: u32| gpu.list(&(0..rows as u32).map(|row| (row + by) % rows as u32).collect::<Vec<_>>(), false);
    for (by, differing) in [(0, 0), (9, rows)] {
        let pairs = Pairs { build: other(by), probe: Positions::Range(0..rows) };
        let found = strings(&*gpu.device).differing_pairs(&fields, &fields, &pairs, &gpu.stream).unwrap();
        assert_eq!(found.len(), differing, "rows {by} apart");
    }
}

/// Returns the rows of each partition, in any order.
fn contents(order: &[u32], bounds: &[usize]) -> Vec<BTreeSet<u32>> {
    bounds.windows(2).map(|bounds| order[bounds[0]..bounds[1]].iter().copied().collect()).collect()
}

#[test]
fn rows_with_keys_of_4_bytes_are_partitioned_and_grouped_as_on_the_host() {
    partitions_and_groups_as_the_host(KeyWidth::W4);
}

#[test]
fn rows_with_keys_of_8_bytes_are_partitioned_and_grouped_as_on_the_host() {
    partitions_and_groups_as_the_host(KeyWidth::W8);
}

#[test]
fn rows_with_keys_of_16_bytes_are_partitioned_and_grouped_as_on_the_host() {
    partitions_and_groups_as_the_host(KeyWidth::W16);
}

fn partitions_and_groups_as_the_host(width: KeyWidth) {
    let Some(sides) = both() else { return };
    for_every_case_of(&[width], 203, |numbers, width, story, random| {
        // Bits that a host device resolves in one pass, and a GPU in up to two.
        let bits = RadixBits { skip: [0, 3, 9][random.random_range(0..3)], bits: random.random_range(0..=11) };
        let values = values_of(numbers, width);
        let [gpu, host] = sides.each_ref().map(|side| {
            let keys = side.keys(numbers, width);
            let payload = side.payload_of_every_width(numbers.len());
            let partitions = side.device.partition(&keys, &payload, bits, &side.stream).unwrap();
            let story = format!("{story}, {bits:?}");
            let order = side.rows_moved(&partitions.payload, &story);
            let transformed: Vec<u128> = order.iter().map(|&row| values[row as usize]).collect();
            assert_eq!(side.key_values(&partitions.keys), transformed, "{story}");
            let bounds = partitions.bounds.get().unwrap().to_vec();
            let grouped = side.device.group_partitions(partitions.clone(), &side.stream).unwrap();
            assert!(grouped.is_grouped() && grouped.bounds.get().unwrap() == bounds);
            let regrouped = side.rows_moved(&grouped.payload, &story);
            let keys = side.key_values(&grouped.keys);
            assert_eq!(keys, regrouped.iter().map(|&row| values[row as usize]).collect::<Vec<_>>(), "{story}");
            let runs = keys.chunk_by(|a, b| a == b).count();
            assert_eq!(runs, values.iter().collect::<BTreeSet<_>>().len(), "equal keys are adjacent, {story}");
            assert_eq!(contents(&order, &bounds), contents(&regrouped, &bounds), "{story}");
            (contents(&order, &bounds), bounds)
        });
        assert!(gpu == host, "{story}, {bits:?}: other partitions than on the host");
    });
}

#[test]
fn many_bits_take_several_passes() {
    let Some([gpu, _]) = both() else { return };
    for bits in [16, 17] {
        for_every_case(209, |numbers, width, story, _| {
            if numbers.len() < 8000 {
                return;
            }
            let keys = gpu.keys(numbers, width);
            let bits = RadixBits { skip: 0, bits };
            let partitions = gpu.device.partition(&keys, &[Payload::RowNumber], bits, &gpu.stream).unwrap();
            let order: Vec<u32> = gpu.get(&partitions.payload[0].data, numbers.len());
            let values = values_of(numbers, width);
            let transformed: Vec<u128> = order.iter().map(|&row| values[row as usize]).collect();
            assert_eq!(gpu.key_values(&partitions.keys), transformed, "{story}, {bits:?}");
            assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), numbers.len(), "{story}, {bits:?}");
            // Each key is in one partition only.
            let mut partition_of = HashMap::new();
            for (partition, bounds) in partitions.bounds.get().unwrap().windows(2).enumerate() {
                for &key in &transformed[bounds[0]..bounds[1]] {
                    assert_eq!(*partition_of.entry(key).or_insert(partition), partition, "{story}, {bits:?}");
                }
            }
            // With as many partitions as keys, hardly any partition is shared.
            if story.contains("shuffled") && numbers.len() > 100_000 {
                let used = partition_of.values().collect::<BTreeSet<_>>().len();
                assert!(used > 40_000, "{used} partitions for {} keys, {story}", numbers.len());
            }
        });
    }
}

#[test]
fn many_columns_move_together() {
    let Some([gpu, _]) = both() else { return };
    let numbers: Vec<u32> = (0..20_000).map(|row| row * 7919 % 20_011).collect();
    let keys = gpu.keys(&numbers, KeyWidth::W8);
    let mut payload: Vec<Payload> = (0..20).flat_map(|_| gpu.payload_of_every_width(numbers.len())).collect();
    payload.truncate(19 * 7);
    payload.extend(gpu.payload_of_every_width(numbers.len()));
    let bits = RadixBits { skip: 0, bits: 10 };
    let partitions = gpu.device.partition(&keys, &payload, bits, &gpu.stream).unwrap();
    let first = gpu.rows_moved(&partitions.payload[..7], "the first columns");
    assert_eq!(first, gpu.rows_moved(&partitions.payload[19 * 7..], "the last columns"));
}

#[test]
fn keys_are_sorted_and_their_order_is_detected() {
    let Some(sides) = both() else { return };
    for_every_case(204, |numbers, width, story, _| {
        let values = values_of(numbers, width);
        let [gpu, host] = sides.each_ref().map(|side| {
            let keys = side.keys(numbers, width);
            let payload = side.payload_of_every_width(numbers.len());
            let ordered = side.device.is_sorted(&keys, &side.stream).unwrap();
            let sorted = side.device.sort(&keys, &payload, &side.stream).unwrap();
            let order = side.rows_moved(&sorted.payload, story);
            let found = side.key_values(&sorted.keys);
            assert_eq!(found, order.iter().map(|&row| values[row as usize]).collect::<Vec<_>>(), "{story}");
            assert!(side.device.is_sorted(&sorted.keys, &side.stream).unwrap(), "{story}");
            (ordered, found)
        });
        assert_eq!(gpu, host, "{story}");
    });
}

/// Makes build and probe numbers of one pattern. About half of the probe side has partners.
fn build_and_probe(numbers: &[u32], random: &mut StdRng) -> (Vec<u32>, Vec<u32>) {
    let build: Vec<u32> = numbers.iter().copied().filter(|_| random.random_bool(0.6)).collect();
    (build, numbers.to_vec())
}

fn some_range(rows: usize, random: &mut StdRng) -> Range<usize> {
    let start = random.random_range(0..=rows / 2);
    start..random.random_range(start..=rows)
}

#[test]
fn tables_find_every_key() {
    let Some([gpu, _]) = both() else { return };
    for_every_case(205, |numbers, width, story, random| {
        let (build, probe) = build_and_probe(numbers, random);
        let (build_keys, probe_keys) = (gpu.keys(&build, width), gpu.keys(&probe, width));
        let (build_values, probe_values) = (values_of(&build, width), values_of(&probe, width));
        let check = |table: &Table, rows: Range<usize>| {
            let ordered = match &table.order {
                Some(order) => gpu.numbers(order).iter().map(|&row| build_values[row as usize]).collect(),
                None => build_values.clone(),
            };
            let matches = gpu.device.probe_table(table, &probe_keys, rows, &gpu.stream).unwrap();
            gpu.assert_matches(&matches, &ordered, &probe_values, story);
        };
        let table = gpu.device.build_table(&build_keys, false, &gpu.stream).unwrap();
        let distinct = build.iter().collect::<BTreeSet<_>>().len() == build.len();
        assert_eq!(table.order.is_none(), distinct, "{story}");
        let expecting = gpu.device.build_table(&build_keys, true, &gpu.stream).unwrap();
        assert!(expecting.order.is_some(), "{story}");
        check(&expecting, 0..probe.len());
        check(&table, 0..probe.len());
        check(&table, some_range(probe.len(), random));
        if let (Some(&min), Some(&max)) = (build_values.iter().min(), build_values.iter().max())
            && max - min < 1 << 24
        {
            let dense = gpu.device.build_dense_table(&build_keys, min, max, &gpu.stream).unwrap();
            assert_eq!(dense.is_some(), distinct, "{story}");
            if let Some(dense) = dense {
                check(&dense, some_range(probe.len(), random));
            }
            if max == min {
                return;
            }
            let narrow = gpu.device.build_dense_table(&build_keys, min, max - 1, &gpu.stream);
            assert!(narrow.unwrap().is_none(), "a key is outside the range, {story}");
        }
    });
}

/// Tests that arrays larger than the cache are written part by part.
#[test]
fn large_arrays_of_dense_keys_find_every_key() {
    // An array of 128 MiB, and keys that begin in the middle of a part.
    const SPAN: u32 = 1 << 25;
    const MIN: u32 = 12_345_678;
    let Some([gpu, _]) = both() else { return };
    let mut random = random(213);
    for width in [KeyWidth::W4, KeyWidth::W8, KeyWidth::W16] {
        let build = |numbers: &[u32]| {
            // Raw numbers, because `Side::keys` spreads keys out.
            let bytes: Vec<u8> =
                numbers.iter().flat_map(|&n| u128::from(n).to_le_bytes()[..width.bytes()].to_vec()).collect();
            let keys = Keys { data: gpu.put(&bytes), width, rows: numbers.len() };
            let last = u128::from(MIN + SPAN - 1);
            (keys.clone(), gpu.device.build_dense_table(&keys, u128::from(MIN), last, &gpu.stream).unwrap())
        };
        let distinct: BTreeSet<u32> = (0..300_000).map(|_| MIN + random.random_range(0..SPAN)).collect();
        let sorted: Vec<u32> = distinct.into_iter().collect();
        let mut shuffled = sorted.clone();
        shuffled.shuffle(&mut random);
        for numbers in [&shuffled, &sorted] {
            let story = format!("{width:?}, the first key is {}", numbers[0]);
            let (keys, table) = build(numbers);
            let values: Vec<u128> = numbers.iter().map(|&n| n.into()).collect();
            let matches = gpu.device.probe_table(&table.unwrap(), &keys, 0..keys.rows, &gpu.stream).unwrap();
            gpu.assert_matches(&matches, &values, &values, &story);
            let runs: Vec<u32> = gpu.runs(&matches).into_iter().map(|(first, _)| first).collect();
            assert_eq!(runs, (0..keys.rows as u32).collect::<Vec<_>>(), "{story}");
        }
        let place = random.random_range(1..shuffled.len());
        for wrong in [shuffled[place - 1], MIN - 1, MIN + SPAN] {
            let mut numbers = shuffled.clone();
            numbers[place] = wrong;
            assert!(build(&numbers).1.is_none(), "{wrong} repeats or is outside the range, {width:?}");
        }
    }
}

/// Blocks a stream until the returned sender is dropped, or for ten seconds.
#[allow(unsafe_code)]
fn hold(stream: &Stream) -> mpsc::Sender<()> {
    unsafe extern "C" fn wait(argument: *mut std::ffi::c_void) {
        // SAFETY: the argument is the box made below, and the function is called once.
        let until = unsafe { Box::from_raw(argument.cast::<mpsc::Receiver<()>>()) };
        // Continue after a timeout too.
        let _ = until.recv_timeout(Duration::from_secs(10));
    }
    let (sender, receiver) = mpsc::channel();
    let queue = &super::cuda_stream(stream).queue;
    queue.gpu.bind().unwrap();
    // SAFETY: the stream lives, and the function takes the argument that it is given.
    unsafe {
        cudarc::driver::result::stream::launch_host_function(
            queue.raw(),
            wait,
            Box::into_raw(Box::new(receiver)).cast(),
        )
    }
    .unwrap();
    sender
}

/// CUDA numbers GPUs by process, and `CUDA_VISIBLE_DEVICES` changes the numbers.
#[test]
fn a_gpu_is_opened_by_its_uuid_whatever_its_number() {
    if device_count().unwrap() == 0 {
        return;
    }
    let uuids: Vec<String> = gpu_identities().unwrap().into_iter().filter_map(|gpu| gpu.uuid).collect();
    let seen: Vec<String> = gpus_seen().unwrap().into_iter().filter_map(|gpu| gpu.uuid).collect();
    assert_eq!((&uuids, uuids.len()), (&seen, usize::from(device_count().unwrap())));
    let budget = |_| Budget::new("memory of a GPU", "--device-memory", 1 << 20);
    let place = |uuid: &str| GpuPlace { uuid: Some(uuid.into()), ..GpuPlace::default() };
    for (number, uuid) in uuids.iter().rev().enumerate() {
        let device = CudaDevice::open(number as u16, &place(uuid), 1, budget).unwrap();
        assert_eq!((device.facts().uuid.as_ref(), device.id().index), (Some(uuid), number as u16));
    }
    let gone = "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff";
    let refused = CudaDevice::open(0, &place(gone), 1, budget).unwrap_err();
    let Error::Unavailable(text) = &refused else { panic!("{refused:?}") };
    assert!(text.starts_with(&format!("cuda:0 is {gone}")) && text.contains(&uuids[0]), "{text}");
    if let (true, Ok("1,GPU-0000")) = (cfg!(dovetail_emulated), std::env::var("CUDA_VISIBLE_DEVICES").as_deref()) {
        assert!(uuids[0].starts_with("GPU-0101") && uuids[1].starts_with("GPU-0000"), "{uuids:?}");
    }
}

/// A thread that works for one GPU may pin memory by another, and free what another has.
#[test]
fn work_of_a_gpu_goes_on_after_calls_for_another() {
    let Some(first) = gpu_with(8 << 30) else { return };
    if device_count().unwrap() < 2 {
        println!("one GPU: nothing was tested");
        return;
    }
    first.arena.pin_by(first.device.pin());
    let of_first = first.put(&[1_u32; 1000]);
    let budget = |_| Budget::new("memory of device cuda:1", "--device-memory", 8 << 30);
    let second = Side::of(Arc::new(CudaDevice::open(1, &GpuPlace::default(), 2, budget).unwrap()));
    let numbers: Vec<u32> = (0..1_000_000).collect();
    let of_second = second.put(&numbers);
    let bytes = numbers.len() * size_of::<u32>();
    drop(of_first);
    for _ in 0..3 {
        // The arena maps and pins a slab for the copy.
        let copied = second.device.copy_out(&of_second, bytes, &first.arena, &second.stream).unwrap();
        assert_eq!(copied.as_slice(), bytemuck::cast_slice::<u32, u8>(&numbers));
    }
}

/// Tests keys that still cross the link: they are entered piece by piece, and pieces end within
/// batches and within keys.
#[test]
fn keys_that_are_still_being_copied_in_are_all_inserted() {
    const MIN: u32 = 1000;
    const ROWS: usize = 200_000;
    let _alone = ALONE.write();
    let Some(gpu) = gpu_alone_with(8 << 30) else { return };
    gpu.arena.pin_by(gpu.device.pin());
    let mut random = random(219);
    let mut numbers: Vec<u32> = (MIN..MIN + ROWS as u32).collect();
    numbers.shuffle(&mut random);
    let mut repeated = numbers.clone();
    repeated[ROWS - 1] = repeated[7];
    let mut arriving = |numbers: &[u32], width: KeyWidth| {
        let mut bytes = gpu.arena.allocate(numbers.len() * width.bytes(), "keys of a test").unwrap();
        for (to, &number) in bytes.chunks_exact_mut(width.bytes()).zip(numbers) {
            to.copy_from_slice(&u128::from(number).to_le_bytes()[..width.bytes()]);
        }
        let (all, mut parts, mut start) = (bytes.freeze(), Vec::new(), 0);
        while start < numbers.len() {
            let rows = random.random_range(1..70_000).min(numbers.len() - start);
            parts.push(all.slice_with_length(start * width.bytes(), rows * width.bytes()));
            start += rows;
        }
        // No bytes arrive before the check below. An emulated GPU reports finished copies as
        // arriving.
        let gate = (!cfg!(dovetail_emulated)).then(|| hold(&gpu.stream));
        let data = gpu.device.copy_in(&parts, &gpu.stream).unwrap();
        assert!(super::buffer::cuda(&data).is_arriving(), "{width:?}: copies are done before anything is entered");
        // Few bytes arrive while the keys are entered.
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            drop(gate);
        });
        Keys { data, width, rows: numbers.len() }
    };
    for width in KEY_WIDTHS {
        let last = u128::from(MIN) + ROWS as u128 - 1;
        let dense = |keys: &Keys| gpu.device.build_dense_table(keys, u128::from(MIN), last, &gpu.stream).unwrap();
        let hashed = |keys: &Keys| gpu.device.build_table(keys, false, &gpu.stream).unwrap();
        let values: Vec<u128> = numbers.iter().map(|&number| number.into()).collect();
        let probe = arriving(&numbers, width);
        let array = dense(&arriving(&numbers, width)).expect("all keys are distinct");
        for (table, story) in [(array, "an array"), (hashed(&arriving(&numbers, width)), "a hash table")] {
            assert!(table.order.is_none(), "{story}, {width:?}");
            let matches = gpu.device.probe_table(&table, &probe, 0..ROWS, &gpu.stream).unwrap();
            gpu.assert_matches(&matches, &values, &values, story);
            let rows: Vec<u32> = gpu.runs(&matches).into_iter().map(|(first, _)| first).collect();
            assert!(rows == (0..ROWS as u32).collect::<Vec<_>>(), "{story}, {width:?}");
        }
        assert!(dense(&arriving(&repeated, width)).is_none(), "a key repeats, {width:?}");
        assert!(hashed(&arriving(&repeated, width)).order.is_some(), "a key repeats, {width:?}");
    }
}

#[test]
fn partitions_and_sorted_keys_find_every_key() {
    let Some([gpu, _]) = both() else { return };
    for_every_case(206, |numbers, width, story, random| {
        let (build, probe) = build_and_probe(numbers, random);
        let (build_keys, probe_keys) = (gpu.keys(&build, width), gpu.keys(&probe, width));
        // With few partitions, some are larger than a table. With many, most are empty.
        let bits = RadixBits { skip: 0, bits: [0, 2, 5, 11][random.random_range(0..4)] };
        let transform = |keys| gpu.device.partition(keys, &[], bits, &gpu.stream).unwrap();
        let (build_side, probe_side): (Partitions, Partitions) = (transform(&build_keys), transform(&probe_keys));
        let probe_values = gpu.key_values(&probe_side.keys);
        let part = some_range(1 << bits.bits, random);
        for range in [0..1 << bits.bits, part] {
            let find = |build: &Partitions| {
                gpu.device.match_partitions(build, &probe_side, range.clone(), &gpu.stream).unwrap()
            };
            let grouped = gpu.device.group_partitions(build_side.clone(), &gpu.stream).unwrap();
            let PartitionMatches::Matched(matches) = find(&grouped) else { panic!("they are grouped, {story}") };
            let bounds = probe_side.bounds.get().unwrap();
            assert_eq!(matches.rows, bounds[range.start]..bounds[range.end], "{story}");
            gpu.assert_matches(&matches, &gpu.key_values(&grouped.keys), &probe_values, story);
            if let PartitionMatches::Matched(matches) = find(&build_side) {
                gpu.assert_matches(&matches, &gpu.key_values(&build_side.keys), &probe_values, story);
            } else {
                let sizes = build_side.bounds.get().unwrap()[range.start..=range.end]
                    .windows(2)
                    .map(|bounds| bounds[1] - bounds[0]);
                let distinct = build.iter().collect::<BTreeSet<_>>().len() == build.len();
                assert!(!distinct || sizes.max() > Some(4096), "distinct keys in small partitions match, {story}");
            }
        }
        let sort = |keys| gpu.device.sort(keys, &[], &gpu.stream).unwrap().keys;
        let (build_sorted, probe_sorted) = (sort(&build_keys), sort(&probe_keys));
        for rows in [0..probe.len(), some_range(probe.len(), random)] {
            let matches = gpu.device.match_sorted(&build_sorted, &probe_sorted, rows, &gpu.stream).unwrap();
            gpu.assert_matches(&matches, &gpu.key_values(&build_sorted), &gpu.key_values(&probe_sorted), story);
        }
    });
}

/// Makes few launches, so that a race checker can finish.
#[test]
fn partitions_about_as_large_as_a_table_find_every_key() {
    let Some([gpu, _]) = both() else { return };
    let most = super::abi::DOVETAIL_TABLE_ROWS as usize;
    let bits = RadixBits { skip: 0, bits: 0 };
    for width in KEY_WIDTHS {
        for rows in [most - 1, most, most + 1] {
            let story = format!("one partition of {rows} keys of {width:?}");
            let build: Vec<u32> = (0..rows as u32).map(|row| 3 * row).collect();
            let probe: Vec<u32> = (0..1000).map(|row| 7 * row).collect();
            let transform = |keys: &Keys| gpu.device.partition(keys, &[], bits, &gpu.stream).unwrap();
            let (build_side, probe_side) = (transform(&gpu.keys(&build, width)), transform(&gpu.keys(&probe, width)));
            let check = |build: &Partitions| match gpu.device.match_partitions(build, &probe_side, 0..1, &gpu.stream) {
                Ok(PartitionMatches::Matched(matches)) => {
                    let keys = [build, &probe_side].map(|side| gpu.key_values(&side.keys));
                    gpu.assert_matches(&matches, &keys[0], &keys[1], &story);
                    true
                }
                answer => !matches!(answer.unwrap(), PartitionMatches::RepeatedBuildKeys),
            };
            assert_eq!(check(&build_side), rows <= most, "as stored, {story}");
            let grouped = gpu.device.group_partitions(build_side, &gpu.stream).unwrap();
            assert!(check(&grouped), "grouped, {story}");
        }
    }
}

/// Payload of a side besides its keys: columns, and row numbers of 4 or 8 bytes.
#[derive(Debug)]
struct SidePayload {
    columns: &'static [Width],
    wide_numbers: bool,
}

/// The first payload needs the general kernel; the others are small enough for registers.
const PAYLOADS: [SidePayload; 4] = [
    SidePayload { columns: &WIDTHS, wide_numbers: false },
    SidePayload { columns: &[], wide_numbers: false },
    SidePayload { columns: &[Width::W4], wide_numbers: false },
    SidePayload { columns: &[], wide_numbers: true },
];

/// Joins ranges of partitions, and compares the rows with the pairs that keys imply.
fn assert_joins(
    side: &Side,
    build: &[u32],
    probe: &[u32],
    width: KeyWidth,
    (bits, range): (u32, Range<usize>),
    side_payload: &SidePayload,
    story: &str,
) {
    let story = &format!("{story}, {side_payload:?}");
    let bits = RadixBits { skip: 0, bits };
    let transform = |numbers: &[u32]| {
        let (keys, rows) = (side.keys(numbers, width), numbers.len());
        let mut payload = side.payload(side_payload.columns, rows);
        payload.push(if side_payload.wide_numbers { side.wide_row_numbers(rows) } else { Payload::RowNumber });
        side.device.partition(&keys, &payload, bits, &side.stream).unwrap()
    };
    let (build_side, probe_side) = (transform(build), transform(probe));
    let stored = |partitions: &Partitions| {
        let Partitions { payload, bounds, .. } = partitions;
        let bounds = bounds.get().unwrap();
        let rows = side.rows_moved(payload, story);
        rows[bounds[range.start]..bounds[range.end]].to_vec()
    };
    let mut rows_of: HashMap<u128, Vec<u32>> = HashMap::new();
    for row in stored(&build_side) {
        rows_of.entry(cut(key(build[row as usize]), width)).or_default().push(row);
    }
    let mut expected = Vec::new();
    for row in stored(&probe_side) {
        let of_key = rows_of.get(&cut(key(probe[row as usize]), width));
        expected.extend(of_key.into_iter().flatten().map(|&build_row| (build_row, row)));
    }
    expected.sort_unstable();
    let join =
        |wanted| side.device.join_partitions(&build_side, &probe_side, range.clone(), wanted, &side.stream).unwrap();
    let pairs = expected.len();
    let Some(counted) = join(Wanted::Count) else {
        // The kernel gives up at chains of 1024 rows. Chains of distinct keys are far shorter than
        // half of that.
        let heaviest = rows_of.values().map(Vec::len).max();
        assert!(heaviest > Some(512), "it gave up, {story}");
        return;
    };
    assert_eq!((counted.pairs, counted.rows.is_none()), (pairs as u64, true), "{story}");
    for (room, keys) in [(pairs, true), (pairs + 7, false), (pairs / 2, true)] {
        let joined = join(Wanted::Rows { room, keys }).unwrap();
        assert_eq!(joined.pairs, pairs as u64, "room for {room}, {story}");
        let Some(rows) = joined.rows else {
            assert!(room < pairs, "room for {room} of {pairs}, {story}");
            continue;
        };
        let (build_rows, probe_rows) = (side.rows_moved(&rows.build, story), side.rows_moved(&rows.probe, story));
        assert_eq!(rows.keys.is_some(), keys);
        for (found, &row) in rows.keys.iter().flat_map(|keys| side.key_values(keys)).zip(&probe_rows) {
            assert_eq!(found, cut(key(probe[row as usize]), width), "{story}");
        }
        let mut found: Vec<(u32, u32)> = build_rows.into_iter().zip(probe_rows).collect();
        found.sort_unstable();
        assert!(found == expected, "{} rows with room for {room}, {story}", found.len());
    }
}

fn pair_count(build: &[u32], probe: &[u32]) -> usize {
    let mut rows_of: HashMap<u32, usize> = HashMap::new();
    build.iter().for_each(|&number| *rows_of.entry(number).or_default() += 1);
    probe.iter().map(|number| rows_of.get(number).copied().unwrap_or(0)).sum()
}

#[test]
fn partitions_of_keys_of_4_bytes_are_joined_in_one_go() {
    joins_partitions_in_one_go(KeyWidth::W4);
}

#[test]
fn partitions_of_keys_of_8_bytes_are_joined_in_one_go() {
    joins_partitions_in_one_go(KeyWidth::W8);
}

#[test]
fn partitions_of_keys_of_16_bytes_are_joined_in_one_go() {
    joins_partitions_in_one_go(KeyWidth::W16);
}

fn joins_partitions_in_one_go(width: KeyWidth) {
    let Some([gpu, host]) = both() else { return };
    for_every_case_of(&[width], 212, |numbers, width, story, random| {
        let (build, probe) = build_and_probe(numbers, random);
        let (build, mut probe) = (&build[..build.len().min(4000)], &probe[..probe.len().min(4000)]);
        // A heavy key on both sides gives too many pairs to compare.
        while pair_count(build, probe) > 20_000 {
            probe = &probe[..probe.len() / 2];
        }
        // Two passes at most, and fewer blocks under sanitizers, which make everything slow.
        let bits = [0, 2, 5, if rows_max() < 100_000 { 9 } else { 11 }][random.random_range(0..4)];
        for range in [0..1 << bits, some_range(1 << bits, random)] {
            for (side, payload) in
                [&gpu, &host].into_iter().flat_map(|side| PAYLOADS.iter().map(move |payload| (side, payload)))
            {
                let story = format!("{story}, partitions {range:?} of 2^{bits} on {}", side.device.id());
                assert_joins(side, build, probe, width, (bits, range.clone()), payload, &story);
            }
        }
    });
}

/// Makes few launches of few blocks, so that a race checker can finish with every kernel.
#[test]
fn a_few_rows_in_two_partitions_are_joined_in_one_go() {
    let Some([gpu, _]) = both() else { return };
    let probe: Vec<u32> = (0..90).map(|row| row % 70).collect();
    for width in KEY_WIDTHS {
        // Keys with and without repeats.
        for keys in [40, 60] {
            let build: Vec<u32> = (0..60).map(|row| row % keys).collect();
            for payload in &PAYLOADS {
                let story = format!("60 rows of {keys} keys of {width:?}");
                assert_joins(&gpu, &build, &probe, width, (1, 0..2), payload, &story);
            }
        }
    }
}

/// Makes few launches, so that a race checker can finish.
#[test]
fn partitions_of_several_rounds_are_joined_in_one_go() {
    let Some([gpu, _]) = both() else { return };
    let most = super::abi::DOVETAIL_JOIN_ROWS;
    for width in KEY_WIDTHS {
        for (rows, keys) in [(most, most), (most + 1, most), (2 * most + 5, most / 4)] {
            let build: Vec<u32> = (0..rows).map(|row| row % keys).collect();
            let probe: Vec<u32> = (0..700).map(|row| row * 7).collect();
            let story = format!("one partition of {rows} rows and {keys} keys of {width:?}");
            for payload in &PAYLOADS {
                assert_joins(&gpu, &build, &probe, width, (0, 0..1), payload, &story);
            }
        }
    }
    // Cases that are better grouped: partitions that are far too large, and rows of few keys.
    let distinct: Vec<u32> = (0..17 * most).collect();
    for numbers in [distinct, vec![7; 1100]] {
        let bits = RadixBits { skip: 0, bits: 0 };
        let side = gpu.device.partition(&gpu.keys(&numbers, KeyWidth::W8), &[], bits, &gpu.stream).unwrap();
        let joined = gpu.device.join_partitions(&side, &side, 0..1, Wanted::Count, &gpu.stream).unwrap();
        assert!(joined.is_none(), "{} rows", numbers.len());
    }
}

/// Tests that blocks share a partition, whose first rows have one match each and whose last have
/// two.
#[test]
fn skewed_partitions_are_joined_in_one_go() {
    let Some([gpu, _]) = both() else { return };
    let keys = super::abi::DOVETAIL_JOIN_ROWS - 10;
    for repeated in [0, 5] {
        let build: Vec<u32> = (0..keys).chain(keys - repeated..keys).collect();
        let probe: Vec<u32> = (0..70_000).map(|row: u32| if row < 40_000 { row % 2000 } else { row % keys }).collect();
        for width in [KeyWidth::W4, KeyWidth::W8] {
            for payload in &PAYLOADS {
                let story = format!("{repeated} of {keys} keys are on two rows");
                assert_joins(&gpu, &build, &probe, width, (0, 0..1), payload, &story);
            }
        }
    }
}

/// One partition has most probe rows and is divided. Others have fewer or more rows than a unit and
/// are not divided.
#[test]
fn divided_partitions_are_matched_among_undivided_ones() {
    let Some([gpu, _]) = both() else { return };
    let keys = 500u32;
    let build: Vec<u32> = (0..keys).chain(0..keys / 10).collect();
    for (rows, bits) in [(5000, 4), (9000, 2)] {
        // Half of all rows have one key.
        let probe: Vec<u32> =
            (0..rows).map(|row: u32| if row.is_multiple_of(2) { 7 } else { row % (keys + 50) }).collect();
        for width in [KeyWidth::W4, KeyWidth::W8, KeyWidth::W16] {
            let story = format!("{rows} rows in {bits} bits");
            let transform = |numbers: &[u32]| {
                let bits = RadixBits { skip: 0, bits };
                gpu.device.partition(&gpu.keys(numbers, width), &[], bits, &gpu.stream).unwrap()
            };
            let (build_side, probe_side) = (transform(&build), transform(&probe));
            let unit_rows = UnitRows::of(&build_side, &probe_side);
            let sizes = probe_side.bounds.get().unwrap().windows(2).map(|bounds| bounds[1] - bounds[0]);
            let divided = sizes.filter(|&rows| unit_rows.divides(rows)).count();
            assert_eq!(divided, 1, "{story}");
            let grouped = gpu.device.group_partitions(build_side, &gpu.stream).unwrap();
            let matches = gpu.device.match_partitions(&grouped, &probe_side, 0..1 << bits, &gpu.stream).unwrap();
            let PartitionMatches::Matched(matches) = matches else { panic!("they are grouped, {story}") };
            let [build_keys, probe_keys] = [&grouped, &probe_side].map(|side| gpu.key_values(&side.keys));
            gpu.assert_matches(&matches, &build_keys, &probe_keys, &story);
            for payload in &PAYLOADS {
                assert_joins(&gpu, &build, &probe, width, (bits, 0..1 << bits), payload, &story);
            }
        }
    }
}

/// Partitions rows whose last payload column is the row number. Asserts that each row comes out
/// once, with all its values. Returns the bounds, and order-independent sums of the rows of each
/// partition.
fn partitioned(
    side: &Side,
    numbers: &[u32],
    width: KeyWidth,
    payload: &[Payload],
    bits: RadixBits,
    story: &str,
) -> (Vec<usize>, Vec<(u64, u64)>) {
    let partitions = side.device.partition(&side.keys(numbers, width), payload, bits, &side.stream).unwrap();
    let order = side.rows_moved(&partitions.payload, story);
    let bounds = partitions.bounds.get().unwrap().to_vec();
    let right = side.key_values(&partitions.keys).into_iter().zip(&order);
    assert!({ right }.all(|(found, &row)| found == cut(key(numbers[row as usize]), width)), "{story}");
    let mut seen = vec![false; numbers.len()];
    order.iter().for_each(|&row| assert!(!std::mem::replace(&mut seen[row as usize], true), "{story}"));
    let sums = bounds
        .windows(2)
        .map(|bounds| order[bounds[0]..bounds[1]].iter().map(|&row| u64::from(row)))
        .map(|rows| rows.fold((0, 0), |(sum, squares), row| (sum + row, squares ^ row.wrapping_mul(row))))
        .collect();
    (bounds, sums)
}

/// Tests rows of a warp that go to one partition, which are numbered together, unlike the others.
/// Half of the rows, or all, have one key.
#[test]
fn partitions_with_half_of_all_rows_are_made_as_on_the_host() {
    let Some([gpu, host]) = both() else { return };
    let mut random = random(215);
    let heavy = 12_345;
    // Some warps, and some tiles for each block of a small GPU. No size is a whole number of them.
    for rows in [333, 4999, 40_077].into_iter().filter(|&rows| rows <= rows_max()) {
        let others: Vec<u32> = (0..rows).map(|_| random.random()).collect();
        let some = |is_heavy: &mut dyn FnMut(usize) -> bool| -> Vec<u32> {
            others.iter().enumerate().map(|(row, &other)| if is_heavy(row) { heavy } else { other }).collect()
        };
        let patterns = [
            ("half of all, anywhere,", some(&mut |_| random.random())),
            ("half of all, the first,", some(&mut |row| row < rows / 2)),
            (
                "a quarter, where lanes are odd, and half, where they are high,",
                some(&mut |row| row % 4 == 1 || row % 32 > 15),
            ),
            ("all but the last", some(&mut |row| row + 1 < rows)),
            ("all", some(&mut |_| true)),
        ];
        for (pattern, numbers) in patterns {
            for width in KEY_WIDTHS {
                for payload in [&[][..], &[Width::W4], &[Width::W8], &WIDTHS] {
                    let bits =
                        RadixBits { skip: random.random_range(0..5), bits: [1, 5, 8, 11][random.random_range(0..4)] };
                    let story = format!("{pattern} of {rows} rows have one {width:?} key, {payload:?}, {bits:?}");
                    // Row numbers of 8 bytes are moved with the keys too, if no other payload of 4
                    // bytes is.
                    for is_wide in [false, true] {
                        let [of_gpu, of_host] = [&gpu, &host].map(|side| {
                            let number = if is_wide { side.wide_row_numbers(rows) } else { Payload::RowNumber };
                            let payload: Vec<Payload> =
                                side.payload(payload, rows).into_iter().chain([number]).collect();
                            partitioned(side, &numbers, width, &payload, bits, &story)
                        });
                        assert!(of_gpu == of_host, "{story}: other partitions than on the host");
                    }
                }
                // Keys alone, where equal keys cannot be told apart.
                let bits = RadixBits { skip: 1, bits: 7 };
                let [of_gpu, of_host] = [&gpu, &host].map(|side| {
                    let partitions =
                        side.device.partition(&side.keys(&numbers, width), &[], bits, &side.stream).unwrap();
                    let (mut keys, bounds) =
                        (side.key_values(&partitions.keys), partitions.bounds.get().unwrap().to_vec());
                    bounds.windows(2).for_each(|bounds| keys[bounds[0]..bounds[1]].sort_unstable());
                    (keys, bounds)
                });
                assert!(
                    of_gpu == of_host,
                    "{pattern} of {rows} rows have one {width:?} key: other partitions than on the host"
                );
            }
        }
    }
}

/// Tests enough rows for a first pass to write whole sectors. Partitions have any size: some are
/// empty, and one has a third of the rows.
#[test]
fn large_passes_are_partitioned_as_on_the_host() {
    let Some([gpu, host]) = both() else { return };
    // Nine of the largest tiles for each block; two under sanitizers, which make everything slow
    // (`combined_tiles_min`).
    let tiles = if rows_max() < 100_000 { 2 } else { 9 };
    let rows = gpu.device.facts().parallelism * 2 * tiles * 6144 + 4321;
    let mut random = random(214);
    let few: Vec<u32> = (0..40).map(|_| random.random()).collect();
    let numbers: Vec<u32> = (0..rows as u32)
        .map(|row| match random.random_range(0..1000) {
            0..333 => 7,
            333..340 => few[row as usize % few.len()],
            // These keys fall into only some of the partitions.
            _ => row % 200_000,
        })
        .collect();
    let cases: [(KeyWidth, u32, &[Width]); 6] = [
        (KeyWidth::W4, 16, &[Width::W4]),
        (KeyWidth::W4, 13, &[]),
        (KeyWidth::W4, 8, &[Width::W4, Width::W1]),
        (KeyWidth::W8, 12, &[]),
        (KeyWidth::W8, 5, &[Width::W4]),
        (KeyWidth::W16, 12, &[]),
    ];
    for (width, bits, payload) in cases {
        let story = format!("2^{bits} partitions of {rows} {width:?} keys with {payload:?}");
        let bits = RadixBits { skip: 2, bits };
        let [of_gpu, of_host] = [&gpu, &host].map(|side| {
            let payload: Vec<Payload> = side.payload(payload, rows).into_iter().chain([Payload::RowNumber]).collect();
            partitioned(side, &numbers, width, &payload, bits, &story)
        });
        assert!(of_gpu == of_host, "{story}: other partitions than on the host");
    }
    // Payload of 8 bytes is moved with the keys too.
    for width in [KeyWidth::W4, KeyWidth::W8] {
        let bits = RadixBits { skip: 0, bits: 9 };
        let keys = gpu.keys(&numbers, width);
        let partitions = gpu.device.partition(&keys, &[gpu.wide_row_numbers(rows)], bits, &gpu.stream).unwrap();
        let order = gpu.rows_moved(&partitions.payload, "wide row numbers");
        let found = gpu.key_values(&partitions.keys);
        assert!(found.into_iter().zip(&order).all(|(found, &row)| found == cut(key(numbers[row as usize]), width)));
        assert_eq!(order.iter().map(|&row| u64::from(row)).sum::<u64>(), (0..rows as u64).sum::<u64>());
    }
}

#[test]
fn many_columns_are_joined_by_position() {
    let Some([gpu, _]) = both() else { return };
    let numbers: Vec<u32> = (0..500).map(|row| row % 300).collect();
    let keys = gpu.keys(&numbers, KeyWidth::W8);
    let payload = vec![Payload::RowNumber; super::abi::DOVETAIL_MOVES_MAX - 10];
    let bits = RadixBits { skip: 0, bits: 3 };
    let side = gpu.device.partition(&keys, &payload, bits, &gpu.stream).unwrap();
    let wanted = Wanted::Rows { room: 2000, keys: true };
    let joined = gpu.device.join_partitions(&side, &side, 0..8, wanted, &gpu.stream).unwrap().unwrap();
    let JoinedRows { keys, build, probe } = joined.rows.unwrap();
    assert_eq!((joined.pairs, build.len(), probe.len()), (4 * 200 + 100, payload.len(), payload.len()));
    let values = gpu.key_values(&keys.unwrap());
    for column in build.iter().chain(&probe) {
        let rows: Vec<u32> = gpu.get(&column.data, column.rows);
        let of_rows: Vec<u128> =
            rows.iter().map(|&row| key(numbers[row as usize])).map(|key| cut(key, KeyWidth::W8)).collect();
        assert_eq!(of_rows, values);
    }
}

#[test]
fn a_filter_lets_every_build_key_through_and_few_others() {
    let Some([gpu, _]) = both() else { return };
    for_every_case(210, |numbers, width, story, random| {
        let (build, _) = build_and_probe(numbers, random);
        let others: Vec<u32> = (0..numbers.len() as u32).map(|number| number | 1 << 30).collect();
        let probe = [numbers, &others].concat();
        let filter = gpu.device.build_filter(&gpu.keys(&build, width), &gpu.stream).unwrap();
        let kept: Vec<u32> = (0..probe.len() as u32).filter(|row| row % 3 != 0).collect();
        for rows_kept in [None, Some(&kept)] {
            let asked: Vec<u32> = match rows_kept {
                Some(kept) => kept.iter().map(|&row| probe[row as usize]).collect(),
                None => probe.clone(),
            };
            let packed =
                PackedKeys { keys: gpu.keys(&asked, width), rows_kept: rows_kept.map(|kept| gpu.list(kept, false)) };
            let passed = gpu.device.filter_keys(&filter, &packed, &gpu.stream).unwrap();
            let rows = match &passed.rows_kept {
                Some(rows) => gpu.numbers(rows),
                None => (0..probe.len() as u32).collect(),
            };
            let found = gpu.key_values(&passed.keys);
            let expected: Vec<u128> = rows.iter().map(|&row| cut(key(probe[row as usize]), width)).collect();
            assert_eq!(found, expected, "{story}");
            let keys: BTreeSet<u128> = values_of(&build, width).into_iter().collect();
            let matching = |values: &[u128]| values.iter().filter(|value| keys.contains(value)).count();
            assert_eq!(matching(&found), matching(&values_of(&asked, width)), "{story}");
            let wrong = found.len() - matching(&found);
            assert!(wrong <= 20 + asked.len() / 8, "{wrong} of {} pass wrongly, {story}", asked.len());
        }
    });
}

/// Makes matches of `runs`, each a first build position and a length. `start`: the first probe row.
fn random_matches(side: &Side, runs: &[(u32, u32)], start: usize) -> Matches {
    let (first, count): (Vec<u32>, Vec<u32>) = runs.iter().copied().unzip();
    let longest = count.iter().max().copied().unwrap_or(0);
    Matches {
        first: side.put(&first),
        count: (longest > 1).then(|| side.put(&count)),
        rows: start..start + runs.len(),
        matched_rows: count.iter().filter(|&&count| count > 0).count(),
        total: count.iter().map(|&count| u64::from(count)).sum(),
    }
}

#[test]
fn matches_become_the_same_pairs_selections_and_marks_as_on_the_host() {
    let Some(sides) = both() else { return };
    let mut random = random(207);
    let build_rows = rows_max().min(50_000) as u32;
    for rows in sizes() {
        for longest in [1, 3, 40, 3000] {
            // Heads of runs: runs do not overlap, and several probe rows may have the same run.
            let mut heads = vec![0u32];
            while *heads.last().unwrap() < build_rows {
                heads.push(build_rows.min(heads.last().unwrap() + random.random_range(1..=longest)));
            }
            let share = [0.0, 0.1, 0.9, 1.0][random.random_range(0..4)];
            let runs: Vec<(u32, u32)> = (0..rows)
                .map(|_| match random.random_bool(share) {
                    false => (NO_ROW, 0),
                    true => {
                        let run = random.random_range(1..heads.len());
                        (heads[run - 1], heads[run] - heads[run - 1])
                    }
                })
                .collect();
            let total: u64 = runs.iter().map(|run| u64::from(run.1)).sum();
            let cuts: Vec<f64> = (0..2).map(|_| random.random()).collect();
            let [gpu, host] = sides.each_ref().map(|side| {
                let matches = random_matches(side, &runs, 70);
                let mut found = BTreeMap::new();
                for unmatched in [Unmatched::Skip, Unmatched::Emit] {
                    let pairs = matches.pair_count(unmatched).min(2_000_000);
                    let mut ends = vec![0, pairs];
                    ends.extend(cuts.iter().map(|cut| (cut * pairs as f64) as u64));
                    ends.sort_unstable();
                    for range in ends.windows(2) {
                        let made = side.device.expand(&matches, range[0]..range[1], unmatched, &side.stream).unwrap();
                        let lists = vec![side.numbers(&made.build), side.numbers(&made.probe)];
                        found.insert(format!("{unmatched:?} {range:?}"), lists);
                    }
                }
                // Each row with its first match only, in the same memory, and then all pairs again.
                let once = Matches { count: None, total: matches.matched_rows as u64, ..matches.clone() };
                for (story, matches) in [("once", &once), ("again", &matches)] {
                    let range = 0..matches.total.min(2_000_000);
                    let made = side.device.expand(matches, range, Unmatched::Skip, &side.stream).unwrap();
                    found.insert(story.into(), vec![side.numbers(&made.build), side.numbers(&made.probe)]);
                }
                let flags = side.device.new_flags(build_rows as usize, &side.stream).unwrap();
                side.device.mark_build(&matches, &flags, &side.stream).unwrap();
                side.device.mark_build(&matches, &flags, &side.stream).unwrap();
                side.device.mark(&side.list(&[3, NO_ROW, 4], true), &flags, &side.stream).unwrap();
                side.device.mark(&Positions::Range(9..11), &flags, &side.stream).unwrap();
                for which in [Which::Matched, Which::Unmatched] {
                    let selected = side.device.select_matches(&matches, which, &side.stream).unwrap();
                    let marked = side.device.select_flags(&flags, build_rows as usize, which, &side.stream).unwrap();
                    found.insert(format!("{which:?}"), vec![side.numbers(&selected), side.numbers(&marked)]);
                }
                found
            });
            assert!(gpu == host, "{rows} rows, runs of up to {longest}, {share} matched, {total} pairs");
        }
    }
}

#[test]
fn pairs_are_partitioned_by_their_build_rows() {
    let Some(sides) = both() else { return };
    let mut random = random(209);
    for rows in sizes() {
        for (part_bits, build_rows) in [(3, 1u32), (3, 9), (3, 8 * 32), (10, 20_000), (31, u32::MAX - 1)] {
            let parts = ((build_rows - 1) >> part_bits) as usize + 1;
            // Build rows in mostly one part, or in all parts.
            let hot = random.random_range(0..build_rows);
            let share = [0.0, 0.99][random.random_range(0..2)];
            let build: Vec<u32> = (0..rows)
                .map(|_| if random.random_bool(share) { hot } else { random.random_range(0..build_rows) })
                .collect();
            let probe: Vec<u32> = (0..rows as u32).map(|row| row ^ 5).collect();
            let [gpu, host] = sides.each_ref().map(|side| {
                [side.list(&probe, false), Positions::Range(11..11 + rows)].map(|probe| {
                    let pairs = Pairs { build: side.list(&build, false), probe };
                    let (split, bounds) = side.device.split_pairs(&pairs, part_bits, parts, &side.stream).unwrap();
                    let (build, probe) = (side.numbers(&split.build), side.numbers(&split.probe));
                    // Rows are in no order within a part.
                    let of_part = |bounds: &[usize]| {
                        let range = bounds[0]..bounds[1];
                        let pairs = build[range.clone()].iter().copied().zip(probe[range].iter().copied());
                        pairs.collect::<BTreeSet<(u32, u32)>>()
                    };
                    (bounds.windows(2).map(of_part).collect::<Vec<_>>(), bounds)
                })
            });
            assert!(gpu == host, "{rows} pairs in {parts} parts of 2^{part_bits}");
        }
    }
}

#[test]
fn columns_are_gathered_as_on_the_host() {
    let Some(sides) = both() else { return };
    let mut random = random(208);
    for rows in sizes().filter(|&rows| rows > 0) {
        for width in WIDTHS {
            let bytes: Vec<u8> = (0..rows).flat_map(|row| cell(row, width)).collect();
            let valid: Vec<bool> = (0..rows).map(|_| random.random_bool(0.7)).collect();
            let start = random.random_range(0..rows);
            let nullable: bool = random.random();
            let with_nulls: bool = random.random();
            let list: Vec<u32> = (0..random.random_range(0..2 * rows))
                .map(|_| match nullable && random.random_bool(0.2) {
                    true => NO_ROW,
                    false => random.random_range(0..rows as u32),
                })
                .collect();
            let [gpu, host] = sides.each_ref().map(|side| {
                let bits =
                    BitSlice::Bits { buffer: BooleanBuffer::from(valid.clone()).into_inner(), offset: 0, len: rows };
                let validity = with_nulls.then(|| side.device.copy_in_bits(&[bits], &side.stream).unwrap());
                let column = Column { data: side.put(&bytes), width, rows, validity };
                let positions = [Positions::Range(start..rows), side.list(&list, nullable)];
                positions
                    .iter()
                    .map(|positions| {
                        let taken = side.device.gather_to_host(&column, positions, &side.arena, &side.stream).unwrap();
                        side.device.synchronize(&side.stream).unwrap();
                        // Values under a null are unspecified.
                        let is_valid = |row: usize| {
                            taken.validity.as_ref().is_none_or(|(bits, _)| bits[row / 8] >> (row % 8) & 1 == 1)
                        };
                        let cells: Vec<Option<&[u8]>> = (0..positions.len())
                            .map(|row| is_valid(row).then(|| &taken.data[row * width.bytes()..][..width.bytes()]))
                            .map(|cell| cell.map(|cell| &*Vec::leak(cell.to_vec())))
                            .collect();
                        let again = side.device.gather(&column, positions, &side.stream).unwrap();
                        assert!(taken.validity.is_none() || again.validity.is_some());
                        let composed = side.device.compose(
                            &side.list(&list, nullable),
                            &Positions::Range(0..list.len() / 2),
                            &side.stream,
                        );
                        (cells, taken.validity.as_ref().map(|validity| validity.1), side.numbers(&composed.unwrap()))
                    })
                    .collect::<Vec<_>>()
            });
            assert!(gpu == host, "{rows} rows of {width:?}, nulls {with_nulls}, misses {nullable}");
        }
    }
}

#[test]
fn columns_gathered_together_equal_columns_gathered_alone() {
    let Some([gpu, _]) = both() else { return };
    let mut random = random(209);
    for rows in sizes().filter(|&rows| rows > 0) {
        // Columns with nulls, with missing rows, by ranges and by lists of other lengths, before
        // and after columns that one copy takes.
        let asked: Vec<(Column, Positions)> = (0..random.random_range(0..9))
            .map(|_| {
                let width = WIDTHS[random.random_range(0..WIDTHS.len())];
                let bytes: Vec<u8> = (0..rows).flat_map(|row| cell(row, width)).collect();
                let valid: BooleanBuffer = (0..rows).map(|_| random.random_bool(0.7)).collect();
                let bits = [BitSlice::Bits { buffer: valid.into_inner(), offset: 0, len: rows }];
                let with_nulls = random.random_bool(0.2);
                let validity = with_nulls.then(|| gpu.device.copy_in_bits(&bits, &gpu.stream).unwrap());
                let column = Column { data: gpu.put(&bytes), width, rows, validity };
                let (start, nullable) = (random.random_range(0..rows), random.random_bool(0.2));
                let positions = match random.random_bool(0.2) {
                    true => Positions::Range(start..rows),
                    false => {
                        let position = |random: &mut StdRng| match nullable && random.random_bool(0.2) {
                            true => NO_ROW,
                            false => random.random_range(0..rows as u32),
                        };
                        let taken = random.random_range(0..=rows);
                        gpu.list(&(0..taken).map(|_| position(&mut random)).collect::<Vec<_>>(), nullable)
                    }
                };
                (column, positions)
            })
            .collect();
        let columns: Vec<_> = asked.iter().map(|(column, positions)| (column, positions)).collect();
        let together = gpu.device.gather_all_to_host(&columns, &gpu.arena, &gpu.stream).unwrap();
        let alone = columns
            .iter()
            .map(|(column, positions)| gpu.device.gather_to_host(column, positions, &gpu.arena, &gpu.stream).unwrap());
        let alone: Vec<_> = alone.collect();
        gpu.device.synchronize(&gpu.stream).unwrap();
        assert_eq!(together.len(), alone.len());
        // If one copy may take two columns, the second is stored in the piece of the first.
        let are_plain = |at: &usize| {
            let (column, positions) = &asked[*at];
            column.validity.is_none()
                && matches!(positions, Positions::List { nullable: false, .. })
                && !positions.is_empty()
        };
        let plain: Vec<usize> = (0..asked.len()).filter(are_plain).collect();
        let of_one_piece = |pair: &[usize]| {
            let [first, second] = [pair[0], pair[1]].map(|at| &together[at].data);
            first.data_ptr() == second.data_ptr()
        };
        if asked.iter().map(|(column, positions)| positions.len() * column.width.bytes() + 256).sum::<usize>()
            <= 64 << 10
        {
            assert!(plain.windows(2).all(of_one_piece), "columns {plain:?}, {rows} rows");
        }
        for (at, (together, alone)) in together.iter().zip(&alone).enumerate() {
            assert_eq!(together.rows, columns[at].1.len());
            assert_eq!(together.data.as_ptr() as usize % 64, 0, "column {at}, with the alignment of Arrow");
            assert!(together.data == alone.data, "column {at} of {}, {rows} rows", columns.len());
            let bits = |column: &HostColumn| {
                let (bits, nulls) = column.validity.clone()?;
                Some((BooleanBuffer::new(bits, 0, column.rows), nulls))
            };
            assert_eq!(bits(together), bits(alone), "validity of column {at} of {}, {rows} rows", columns.len());
        }
    }
}

fn every_primitive(side: &Side, rows: usize) -> crate::Result<()> {
    let Side { device, stream, arena, .. } = side;
    let numbers: Vec<u32> = patterns(rows, &mut random(5)).swap_remove(1).1;
    let data = device.copy_in(&[Buffer::from_vec(numbers)], stream)?;
    let validity = Some(device.copy_in_bits(&[BitSlice::Ones { len: rows }], stream)?);
    let column = Column { data, width: Width::W4, rows, validity };
    let field = KeyField {
        column: column.clone(),
        encoding: KeyEncoding::Signed { min: 0 },
        shift: 0,
        bits: 32,
        null_bit: None,
    };
    let keys = device.pack_keys(&[field], KeyWidth::W8, stream)?.keys;
    let payload = [Payload::RowNumber, Payload::Column(column.clone())];
    let partitions = device.partition(&keys, &payload, RadixBits { skip: 0, bits: 10 }, stream)?;
    let grouped = device.group_partitions(partitions.clone(), stream)?;
    device.match_partitions(&grouped, &partitions, 0..16, stream)?;
    let sorted = device.sort(&keys, &payload, stream)?;
    device.match_sorted(&sorted.keys, &sorted.keys, 0..rows, stream)?;
    let table = device.build_table(&keys, false, stream)?;
    let matches = device.probe_table(&table, &keys, 0..rows, stream)?;
    let pairs = device.expand(&matches, 0..matches.total, Unmatched::Skip, stream)?;
    let flags = device.new_flags(rows, stream)?;
    device.mark_build(&matches, &flags, stream)?;
    device.select_flags(&flags, rows, Which::Unmatched, stream)?;
    device.gather_to_host(&column, &pairs.probe, arena, stream)?;
    let plain = Column { validity: None, ..column.clone() };
    device.gather_all_to_host(&[(&plain, &pairs.probe), (&plain, &pairs.build)], arena, stream)?;
    if device.strings().is_some() {
        let text = BytesPart { offsets: Buffer::from_vec(vec![0u32; rows + 1]), data: Buffer::from_vec(vec![0u8]) };
        let text = strings(&**device).copy_in_bytes(&[text], Width::W4, stream)?;
        strings(&**device).short_values(&text, 9, stream)?;
        strings(&**device).gather_bytes_to_host(&text, &pairs.probe, Width::W4, u64::MAX, arena, stream)?;
        let text = KeyValues::Bytes(text);
        let fields = [ValueField { values: text, nulls_equal: false }];
        let hashed = strings(&**device).hash_keys(&fields, Hashing { seed: 1, mask: 0 }, stream)?;
        let all = Positions::Range(0..rows);
        strings(&**device).are_runs_uniform(&fields, &all, &hashed.keys, stream)?;
        strings(&**device).differing_pairs(&fields, &fields, &Pairs { build: all.clone(), probe: all }, stream)?;
    }
    device.copy_out(&column.data, 4 * rows, arena, stream)?;
    device.synchronize(stream)
}

#[test]
fn a_budget_that_is_too_small_refuses_and_gets_every_byte_back() {
    let Some(enough) = gpu_with(1 << 30) else { return };
    every_primitive(&enough, 20_000).unwrap();
    let needed = enough.device.memory().used_bytes_max();
    drop(enough.stream);
    assert_eq!(enough.device.memory().used_bytes(), 0);
    // Under sanitizers, test fewer budgets, because each takes long.
    for step in (0..=20).step_by(if rows_max() < 100_000 { 7 } else { 1 }) {
        let side = gpu_with(needed * step / 24).unwrap();
        match every_primitive(&side, 20_000) {
            Err(Error::Exhausted(text)) => assert!(text.contains("--device-memory"), "{text}"),
            other => panic!("{} of {needed} bytes gave {other:?}", needed * step / 24),
        }
        let Side { device, stream, arena, .. } = side;
        drop(stream);
        assert_eq!((device.memory().used_bytes(), arena.budget().used_bytes()), (0, 0), "{step} of 24");
    }
}

#[test]
fn a_cancelled_stream_runs_nothing() {
    let Some(gpu) = gpu_with(1 << 30) else { return };
    let keys = gpu.keys(&[3, 1, 2], KeyWidth::W4);
    gpu.stream.cancel.raise();
    assert!(matches!(gpu.device.sort(&keys, &[], &gpu.stream), Err(Error::Cancelled(_))));
    assert!(matches!(gpu.device.synchronize(&gpu.stream), Err(Error::Cancelled(_))));
}

#[test]
fn observers_are_notified_of_fills_and_copies() {
    let Some(_other) = gpu_with(1 << 30) else { return };
    let budget = |_| Budget::new("memory of device cuda:0", "--device-memory", 1 << 30);
    let device = CudaDevice::open_observed(0, &GpuPlace::default(), 2, "times", budget).unwrap();
    let told_of = |work: &dyn Fn(&Stream)| {
        let stream = device.stream(CancelFlag::new()).unwrap();
        work(&stream);
        // Times are known when the stream has ended.
        drop(stream);
        device.timing().unwrap().take_times().iter().map(|time| time.work).collect::<BTreeSet<&str>>()
    };
    let filled = told_of(&|stream| drop(device.new_flags(1000, stream).unwrap()));
    assert_eq!(filled, BTreeSet::from([FILL]));
    let bits = BitSlice::Bits { buffer: Buffer::from_vec(vec![0x5au8; 100]), offset: 0, len: 800 };
    let bitmap = told_of(&|stream| {
        let ones = BitSlice::Ones { len: 803 };
        drop(device.copy_in_bits(&[bits.clone(), ones], stream).unwrap());
    });
    assert_eq!(bitmap, BTreeSet::from(["copying a bitmap to the device", FILL]));
    let ones = told_of(&|stream| drop(device.copy_in_bits(&[BitSlice::Ones { len: 803 }], stream).unwrap()));
    assert_eq!(ones, BTreeSet::from([FILL]), "nothing of it is copied");
    let empty = told_of(&|stream| drop(device.new_flags(0, stream).unwrap()));
    assert!(empty.is_empty(), "{empty:?}");
}

#[test]
fn kernel_times_are_added_up_only_while_timing_is_on() {
    let Some(_other) = gpu_with(1 << 30) else { return };
    let budget = |_| Budget::new("memory of device cuda:0", "--device-memory", 1 << 30);
    let device = CudaDevice::open_observed(0, &GpuPlace::default(), 2, "silent", budget).unwrap();
    for (on, expected) in [(false, 0), (true, 1), (false, 0), (true, 1)] {
        device.timing().unwrap().add_up_times(on).unwrap();
        let stream = device.stream(CancelFlag::new()).unwrap();
        drop(device.new_flags(1000, &stream).unwrap());
        drop(stream);
        assert_eq!(device.timing().unwrap().take_times().len(), expected, "adding up: {on}");
    }
}

#[test]
fn work_of_another_stream_waits_for_an_event() {
    let Some(gpu) = gpu_with(1 << 30) else { return };
    let other = gpu.device.stream(CancelFlag::new()).unwrap();
    let numbers: Vec<u32> = (0..1 << 20).rev().collect();
    let sorted = gpu.device.sort(&gpu.keys(&numbers, KeyWidth::W4), &[], &gpu.stream).unwrap();
    gpu.device.wait_event(&gpu.device.record_event(&gpu.stream).unwrap(), &other).unwrap();
    assert!(gpu.device.is_sorted(&sorted.keys, &other).unwrap());
}

#[test]
fn lists_of_positions_are_concatenated_in_order() {
    let Some(gpu) = gpu_with(1 << 30) else { return };
    for rows in sizes().filter(|&rows| rows >= 31) {
        let lists = [(0..rows as u32).rev().collect::<Vec<_>>(), vec![7, 8, 9]].map(|list| gpu.list(&list, false));
        let parts = [(&lists[1], 1..3), (&lists[0], 1..rows - 1), (&lists[0], 5..5), (&lists[1], 0..1)];
        let found = gpu.device.concat(&parts, &gpu.stream).unwrap();
        let expected: Vec<u32> = [8, 9].into_iter().chain((1..rows as u32 - 1).rev()).chain([7]).collect();
        assert!(gpu.numbers(&found) == expected, "{rows} rows");
    }
}

/// Tests the order of frees. Memory freed in the order of its first stream would be reused at once,
/// even if a second stream has yet to read it.
#[test]
fn a_buffer_recorded_on_a_stream_is_freed_after_the_work_that_reads_it() {
    let rows = rows_max().min(1 << 20);
    let Some(gpu) = gpu_with(1 << 30) else { return };
    let other = gpu.device.stream(CancelFlag::new()).unwrap();
    let numbers: Vec<u32> = (0..rows as u32).collect();
    let (keys, backwards) = (gpu.keys(&numbers, KeyWidth::W16), numbers.iter().rev().copied().collect::<Vec<_>>());
    let positions = gpu.list(&backwards, false);
    let data = gpu.device.copy_in(&[Buffer::from_vec(numbers)], &other).unwrap();
    gpu.device.wait_event(&gpu.device.record_event(&other).unwrap(), &gpu.stream).unwrap();
    gpu.device.synchronize(&gpu.stream).unwrap();
    // Work that delays the stream's read for long enough.
    for _ in 0..20 {
        gpu.device.sort(&keys, &[], &gpu.stream).unwrap();
    }
    let column = Column { data, width: Width::W4, rows, validity: None };
    let gathered = gpu.device.gather(&column, &positions, &gpu.stream).unwrap();
    gpu.device.record_stream(&column.data, &gpu.stream);
    drop(column);
    let _written = gpu.device.new_flags(rows * size_of::<u32>(), &other).unwrap();
    gpu.device.synchronize(&other).unwrap();
    assert!(gpu.get::<u32>(&gathered.data, rows) == backwards, "memory was reused before it was read");
}

/// Compares the header that the kernels include with the structs in `abi.rs`. `DOVETAIL_BLESS=1`
/// rewrites it.
#[test]
fn the_header_agrees_with_the_structs() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
    if !std::path::Path::new(folder).exists() {
        println!("the sources are elsewhere: nothing was tested");
        return;
    }
    let config = cbindgen::Config::from_file(format!("{folder}/cbindgen.toml")).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/device/cuda/abi.rs");
    let made = cbindgen::Builder::new().with_src(source).with_config(config).generate().unwrap();
    let mut text = Vec::new();
    made.write(&mut text);
    let path = format!("{folder}/dovetail_kernels.h");
    if std::env::var_os("DOVETAIL_BLESS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap();
    assert!(
        committed == String::from_utf8(text).unwrap(),
        "{path} is out of date: run this test with DOVETAIL_BLESS=1"
    );
}
