//! Speed of each primitive of a device.
//!
//! ```sh
//! cargo bench -p dovetail-bench --bench primitives -- --device cuda:0 --rows 128M --width 4 \
//!     --filter partition
//! ```
//!
//! Prints one JSON line per case. `rows` are the probe rows for cases with two sides, and the build
//! side has half as many. `seconds` is the median of the runs. `moved_bytes` counts every byte that
//! the primitive must read or write once, so that `gb_per_second` compares with the memory's rate.
//! On the CPU, the case `copy_out` measures the memory's rate. On a GPU, that case crosses the link
//! instead. Cases use the [`Device`] trait, and hold for every kind of device.

use std::time::Instant;

use arrow::buffer::{BooleanBuffer, Buffer};
use clap::Parser;
use dovetail::device::{
    BitSlice, BytesPart, CancelFlag, Column, Device, DeviceId, Hashing, KeyEncoding, KeyField, KeyValues, KeyWidth,
    Keys, Matches, NO_ROW, PARTS_MAX, PackedKeys, Pairs, PartitionMatches, Partitions, Payload, Positions, RadixBits,
    Stream, Unmatched, ValueField, Which, Width, open_device, parse_device, strings,
};
use dovetail::memory::{Arena, Budget};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

mod arguments;
mod record;
use arguments::count;
use record::Recorder;

fn main() {
    let options = Options::parse();
    let memory = |free: Option<u64>| Budget::new("device memory", "--device-memory", free.unwrap_or(16 << 30));
    let device = open_device(options.device, options.threads, memory).expect("a device");
    let stream = device.stream(CancelFlag::new()).expect("a stream");
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 16 << 30));
    arena.pin_by(device.pin());
    let recorder = Mutex::new(Recorder::new("primitives", options.record));
    let bench = Bench { device: &*device, stream, arena, options, recorder };
    bench.transfers();
    bench.keys();
    bench.long_keys();
    for width in bench.options.width.map_or(vec![KeyWidth::W4, KeyWidth::W8, KeyWidth::W16], |width| vec![width]) {
        bench.row_layouts(width);
        bench.matching(width);
    }
    bench.pairs();
    bench.gathers();
    bench.radix_join();
}

#[derive(Parser)]
struct Options {
    /// Rows of the probe side. The build side has half as many
    #[arg(long, default_value = "4M", value_parser = count)]
    rows: usize,
    /// Bytes of a key: 4, 8 or 16 [default: each]
    #[arg(long, value_parser = key_width)]
    width: Option<KeyWidth>,
    /// Run only cases whose name contains this text
    #[arg(long, default_value = "")]
    filter: String,
    /// Device: host, or cuda:N
    #[arg(long, default_value = "host", value_parser = parse_device)]
    device: DeviceId,
    /// CPU threads of the device
    #[arg(long, default_value_t = std::thread::available_parallelism().map_or(1, usize::from))]
    threads: usize,
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Append the measurements to benches/results
    #[arg(long)]
    record: bool,
    /// Option that cargo passes; no effect
    #[arg(long, hide = true)]
    bench: bool,
}

fn key_width(text: &str) -> Result<KeyWidth, String> {
    match text {
        "4" => Ok(KeyWidth::W4),
        "8" => Ok(KeyWidth::W8),
        "16" => Ok(KeyWidth::W16),
        _ => Err("write 4, 8 or 16".into()),
    }
}

struct Bench<'a> {
    device: &'a dyn Device,
    stream: Stream,
    arena: Arena,
    options: Options,
    recorder: Mutex<Recorder>,
}

impl Bench<'_> {
    fn wants(&self, name: &str) -> bool {
        name.contains(&self.options.filter)
    }

    /// Times `work` after one warm-up call, and prints its line.
    fn case<R>(&self, name: &str, rows: usize, width: usize, moved_bytes: usize, mut work: impl FnMut() -> R) {
        if !self.wants(name) {
            return;
        }
        drop(work());
        let mut seconds: Vec<f64> = (0..self.options.runs.max(1))
            .map(|_| {
                let start = Instant::now();
                let result = work();
                self.device.synchronize(&self.stream).expect("the work is done");
                let taken = start.elapsed().as_secs_f64();
                drop(result);
                taken
            })
            .collect();
        seconds.sort_by(f64::total_cmp);
        let median = seconds[seconds.len() / 2];
        let line = serde_json::json!({
            "name": name,
            "device": self.options.device.to_string(),
            "rows": rows,
            "width": width,
            "threads": self.options.threads,
            "seconds": median,
            "rows_per_second": (rows as f64 / median).round(),
            "moved_bytes": moved_bytes,
            "gb_per_second": (moved_bytes as f64 / median / 1e7).round() / 100.0,
        });
        self.recorder.lock().write(line);
    }

    fn column(&self, values: &[u32]) -> Column {
        Column { data: self.buffer(bytemuck::cast_slice(values)), width: Width::W4, rows: values.len(), validity: None }
    }

    fn buffer(&self, bytes: &[u8]) -> dovetail::device::DeviceBuffer {
        // Two parts, so that every kind of device copies.
        let parts = [Buffer::from(bytes), Buffer::from(&[][..])];
        self.device.copy_in(&parts, &self.stream).expect("a buffer")
    }

    /// Makes keys of any width from small numbers, spread over the width.
    fn spread(&self, numbers: &[u32], width: KeyWidth) -> Keys {
        let data = match width {
            KeyWidth::W4 => self.buffer(bytemuck::cast_slice(numbers)),
            KeyWidth::W8 => {
                let keys: Vec<u64> =
                    numbers.iter().map(|&n| u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
                self.buffer(bytemuck::cast_slice(&keys))
            }
            KeyWidth::W16 => {
                let keys: Vec<u128> = numbers.iter().map(|&n| u128::from(n) << 70 | u128::from(n)).collect();
                self.buffer(bytemuck::cast_slice(&keys))
            }
        };
        Keys { data, width, rows: numbers.len() }
    }

    fn transfers(&self) {
        let rows = self.options.rows;
        let parts: Vec<Buffer> = (0..4).map(|_| Buffer::from_vec(vec![1u32; rows / 4])).collect();
        self.case("copy_in", rows, 4, 8 * rows, || self.device.copy_in(&parts, &self.stream).unwrap());
        let mut numbers = self.arena.allocate(8 * rows, "numbers").unwrap();
        bytemuck::cast_slice_mut::<u8, u64>(&mut numbers).iter_mut().zip(0..).for_each(|(to, at)| *to = at % 200);
        let numbers = [numbers.freeze()];
        self.case("copy_in_pinned", rows, 8, 16 * rows, || self.device.copy_in(&numbers, &self.stream).unwrap());
        drop(numbers);
        let bits = BooleanBuffer::collect_bool(rows, |row| row % 3 == 0).into_inner();
        let slices = [
            BitSlice::Bits { buffer: bits.clone(), offset: 3, len: rows / 2 },
            BitSlice::Ones { len: 5 },
            BitSlice::Bits { buffer: bits, offset: 0, len: rows / 2 },
        ];
        self.case("copy_in_bits", rows, 0, rows / 4, || self.device.copy_in_bits(&slices, &self.stream).unwrap());
        let column = self.column(&vec![7; rows]);
        self.case("copy_out", rows, 4, 8 * rows, || {
            self.device.copy_out(&column.data, 4 * rows, &self.arena, &self.stream).unwrap()
        });
        let list = self.list(&(0..rows as u32).collect::<Vec<_>>());
        self.case("positions_to_host", rows, 4, 8 * rows, || {
            self.device.positions_to_host(&list, &self.arena, &self.stream).unwrap()
        });
    }

    fn list(&self, positions: &[u32]) -> Positions {
        let column = self.column(positions);
        Positions::List { data: column.data, rows: positions.len(), nullable: false }
    }

    fn keys(&self) {
        let rows = self.options.rows;
        let column = self.column(&(0..rows as u32).collect::<Vec<_>>());
        let validity = BooleanBuffer::collect_bool(rows, |row| row % 16 != 0).into_inner();
        let validity = self
            .device
            .copy_in_bits(&[BitSlice::Bits { buffer: validity, offset: 0, len: rows }], &self.stream)
            .unwrap();
        let nullable = Column { validity: Some(validity), ..column.clone() };
        let field = |column: &Column, shift, null_bit| KeyField {
            column: column.clone(),
            encoding: KeyEncoding::Signed { min: -5 },
            shift,
            bits: 31,
            null_bit,
        };
        let pack = |fields: &[KeyField], width| self.device.pack_keys(fields, width, &self.stream).unwrap();
        let one = [field(&column, 0, None)];
        self.case("pack_keys/one", rows, 4, 8 * rows, || pack(&one, KeyWidth::W4));
        let without_nulls = [field(&nullable, 0, None)];
        self.case("pack_keys/nulls-left-out", rows, 4, 12 * rows, || pack(&without_nulls, KeyWidth::W4));
        let two = [field(&column, 0, None), field(&nullable, 31, Some(62))];
        self.case("pack_keys/two", rows, 8, 16 * rows, || pack(&two, KeyWidth::W8));
    }

    /// Measures text keys of 20 bytes. The build side has half as many, in another order.
    fn long_keys(&self) {
        const BYTES: usize = 20;
        let names = [
            "copy_in_bytes",
            "hash_keys/text",
            "differing_pairs/text",
            "gather_bytes_to_host/random",
            "gather_bytes_to_host/range",
        ];
        if self.device.strings().is_none() || !names.iter().any(|name| self.wants(name)) {
            return;
        }
        // As many rows as offsets of 4 bytes can address.
        let rows = self.options.rows.min(i32::MAX as usize / BYTES);
        let text = |numbers: &[u32]| {
            let data: Vec<u8> = numbers.iter().flat_map(|number| format!("{number:020}").into_bytes()).collect();
            let offsets: Vec<u32> = (0..=numbers.len()).map(|row| (BYTES * row) as u32).collect();
            let mut pinned = self.arena.allocate(data.len(), "text").unwrap();
            pinned.copy_from_slice(&data);
            BytesPart { offsets: Buffer::from_vec(offsets), data: pinned.freeze() }
        };
        let field = |part: &BytesPart| {
            let bytes =
                strings(self.device).copy_in_bytes(std::slice::from_ref(part), Width::W4, &self.stream).unwrap();
            [ValueField { values: KeyValues::Bytes(bytes), nulls_equal: false }]
        };
        let mut numbers: Vec<u32> = (0..rows as u32).collect();
        let probe = text(&numbers);
        let copied = rows * (BYTES + size_of::<u32>());
        self.case(names[0], rows, BYTES, copied, || {
            strings(self.device).copy_in_bytes(std::slice::from_ref(&probe), Width::W4, &self.stream)
        });
        numbers.truncate(rows.div_ceil(2));
        numbers.shuffle(&mut StdRng::seed_from_u64(7));
        let (build, probe) = (field(&text(&numbers)), field(&probe));
        let hashing = Hashing { seed: 3, mask: u128::MAX };
        let (arena, stream) = (&self.arena, &self.stream);
        let KeyValues::Bytes(stored) = &probe[0].values else { unreachable!("it was made of text") };
        let mut places: Vec<u32> = (0..rows as u32).collect();
        places.shuffle(&mut StdRng::seed_from_u64(8));
        // Bytes read and written, value starts of 8 bytes, and offsets and positions of 4 bytes.
        let gathered = 2 * rows * BYTES + rows * (size_of::<u64>() + 2 * size_of::<u32>());
        for (name, positions) in [(names[3], self.list(&places)), (names[4], Positions::Range(0..rows))] {
            self.case(name, rows, BYTES, gathered, || {
                strings(self.device)
                    .gather_bytes_to_host(stored, &positions, Width::W4, u64::MAX, arena, stream)
                    .unwrap()
            });
        }
        let hashed = rows * (BYTES + size_of::<u64>() + KeyWidth::W16.bytes());
        self.case(names[1], rows, BYTES, hashed, || {
            strings(self.device).hash_keys(&probe, hashing, &self.stream).unwrap()
        });
        // The partner of each probe row that has one. All pairs have equal text.
        let mut partner = vec![NO_ROW; rows];
        for (row, &number) in numbers.iter().enumerate() {
            partner[number as usize] = row as u32;
        }
        let positions = Positions::List { data: self.column(&partner).data, rows, nullable: true };
        let pairs = Pairs { build: positions, probe: Positions::Range(0..rows) };
        let compared = rows * size_of::<u32>() + numbers.len() * 2 * (BYTES + size_of::<u64>());
        self.case(names[2], rows, BYTES, compared, || {
            let differing = strings(self.device).differing_pairs(&build, &probe, &pairs, &self.stream).unwrap();
            assert!(differing.is_empty());
        });
    }

    fn row_layouts(&self, width: KeyWidth) {
        let (rows, bytes) = (self.options.rows, width.bytes());
        let names = [
            "partition/6-bits",
            "partition/9-bits",
            "partition/11-bits",
            "partition/13-bits",
            "partition/fitting",
            "partition/heavy-key",
            "partition/row-number",
            "group_partitions",
            "group_partitions/heavy-key",
            "sort",
            "is_sorted",
        ];
        if !names.iter().any(|name| self.wants(name)) {
            return;
        }
        let mut numbers: Vec<u32> = (0..rows as u32).collect();
        numbers.shuffle(&mut StdRng::seed_from_u64(1));
        let keys = self.spread(&numbers, width);
        let payload = Payload::Column(self.column(&numbers));
        // 13 bits take two passes.
        for bits in [6, 9, 11, 13] {
            let name = format!("partition/{bits}-bits");
            self.case(&name, rows, bytes, 2 * (bytes + 4) * rows, || {
                self.partition(&keys, std::slice::from_ref(&payload), bits)
            });
        }
        // Partitions of the device's preferred size, also with one key in half of the rows.
        let heavy: Vec<u32> = numbers.iter().map(|&n| if n % 2 == 0 { 0 } else { n }).collect();
        let heavy = self.spread(&heavy, width);
        let fitting = self.fitting_bits(rows);
        for (name, keys) in [("partition/fitting", &keys), ("partition/heavy-key", &heavy)] {
            self.case(name, rows, bytes, 2 * (bytes + 4) * rows, || {
                self.partition(keys, std::slice::from_ref(&payload), fitting)
            });
        }
        let heavy = self.partition(&heavy, std::slice::from_ref(&payload), fitting);
        self.case("group_partitions/heavy-key", rows, bytes, 2 * (bytes + 4) * rows, || {
            self.device.group_partitions(heavy.clone(), &self.stream).unwrap()
        });
        self.case("partition/row-number", rows, bytes, (2 * bytes + 4) * rows, || {
            self.partition(&keys, &[Payload::RowNumber], 9)
        });
        let pairs: Vec<u32> = numbers.iter().map(|n| n / 2).collect();
        let partitions =
            self.partition(&self.spread(&pairs, width), std::slice::from_ref(&payload), self.fitting_bits(rows));
        self.case("group_partitions", rows, bytes, 2 * (bytes + 4) * rows, || {
            self.device.group_partitions(partitions.clone(), &self.stream).unwrap()
        });
        self.case("sort", rows, bytes, 2 * (bytes + 4) * rows, || {
            self.device.sort(&keys, std::slice::from_ref(&payload), &self.stream).unwrap()
        });
        let sorted = self.device.sort(&keys, &[], &self.stream).unwrap().keys;
        self.case("is_sorted", rows, bytes, bytes * rows, || self.device.is_sorted(&sorted, &self.stream).unwrap());
    }

    fn partition(&self, keys: &Keys, payload: &[Payload], bits: u32) -> Partitions {
        self.device.partition(keys, payload, RadixBits { skip: 0, bits }, &self.stream).unwrap()
    }

    /// Returns the radix bits for partitions of the device's preferred size.
    fn fitting_bits(&self, rows: usize) -> u32 {
        rows.div_ceil(self.device.tuning().partition_rows).next_power_of_two().trailing_zeros()
    }

    /// Makes a build side of distinct keys, shuffled, and a probe side of twice as many rows with
    /// one match each.
    fn sides(&self, width: KeyWidth) -> (Keys, Keys, Vec<u32>) {
        let probe_rows = self.options.rows;
        let build_rows = probe_rows / 2;
        let mut random = StdRng::seed_from_u64(2);
        let mut build: Vec<u32> = (0..build_rows as u32).collect();
        build.shuffle(&mut random);
        let probe: Vec<u32> = (0..probe_rows).map(|_| random.random_range(0..build_rows as u32)).collect();
        (self.spread(&build, width), self.spread(&probe, width), build)
    }

    fn matching(&self, width: KeyWidth) {
        let names = [
            "build_filter",
            "filter_keys",
            "build_table",
            "build_table/repeated",
            "build_dense_table",
            "probe_table",
            "probe_table/dense",
            "match_partitions",
            "match_partitions/grouped",
            "match_sorted",
        ];
        if !names.iter().any(|name| self.wants(name)) {
            return;
        }
        let (device, stream, bytes) = (self.device, &self.stream, width.bytes());
        let (build, probe, numbers) = self.sides(width);
        let (build_rows, probe_rows) = (build.rows, probe.rows);
        // Half-full tables of keys and positions.
        let slots_bytes = build_rows.next_power_of_two() * 2 * (bytes + 4);
        self.case("build_table", build_rows, bytes, bytes * build_rows + slots_bytes, || {
            device.build_table(&build, false, stream).unwrap()
        });
        self.case("build_filter", build_rows, bytes, bytes * build_rows, || {
            device.build_filter(&build, stream).unwrap()
        });
        // One probe row in sixteen has a key in the filter.
        let known: Vec<u32> = numbers.iter().copied().filter(|n| n % 16 == 0).collect();
        let filter = device.build_filter(&self.spread(&known, width), stream).unwrap();
        let keys = PackedKeys { keys: probe.clone(), rows_kept: None };
        let moved = bytes * probe_rows + (2 * bytes + 4) * probe_rows / 16;
        self.case("filter_keys", probe_rows, bytes, moved, || device.filter_keys(&filter, &keys, stream).unwrap());
        let halved: Vec<u32> = numbers.iter().map(|n| n / 2).collect();
        let repeated = self.spread(&halved, width);
        self.case("build_table/repeated", build_rows, bytes, bytes * build_rows + slots_bytes, || {
            device.build_table(&repeated, true, stream).unwrap()
        });
        let table = device.build_table(&build, false, stream).unwrap();
        self.case("probe_table", probe_rows, bytes, (2 * bytes + 8) * probe_rows, || {
            device.probe_table(&table, &probe, 0..probe_rows, stream).unwrap()
        });
        if width == KeyWidth::W4 {
            let last = build_rows as u128 - 1;
            self.case("build_dense_table", build_rows, bytes, 8 * build_rows, || {
                device.build_dense_table(&build, 0, last, stream).unwrap().unwrap()
            });
            let dense = device.build_dense_table(&build, 0, last, stream).unwrap().unwrap();
            self.case("probe_table/dense", probe_rows, bytes, 12 * probe_rows, || {
                device.probe_table(&dense, &probe, 0..probe_rows, stream).unwrap()
            });
        }
        let bits = self.fitting_bits(build_rows);
        let partitions = (self.partition(&build, &[], bits), self.partition(&probe, &[], bits));
        let all = 0..1 << bits;
        let moved = bytes * (build_rows + probe_rows) + 4 * probe_rows;
        self.case("match_partitions", probe_rows, bytes, moved, || {
            device.match_partitions(&partitions.0, &partitions.1, all.clone(), stream).unwrap()
        });
        let grouped = device.group_partitions(self.partition(&repeated, &[], bits), stream).unwrap();
        self.case("match_partitions/grouped", probe_rows, bytes, moved + 4 * probe_rows, || {
            device.match_partitions(&grouped, &partitions.1, all.clone(), stream).unwrap()
        });
        let sorted = [&build, &probe].map(|keys| device.sort(keys, &[], stream).unwrap().keys);
        self.case("match_sorted", probe_rows, bytes, moved + 4 * probe_rows, || {
            device.match_sorted(&sorted[0], &sorted[1], 0..probe_rows, stream).unwrap()
        });
    }

    /// Makes matches of `rows` probe rows with a build side of half as many. A `share` of the probe
    /// rows match `run` build rows each.
    fn matches(&self, share: f64, run: u32) -> Matches {
        let rows = self.options.rows;
        let mut random = StdRng::seed_from_u64(3);
        let distinct = (rows as u32 / 2 / run).max(1);
        let build: Vec<u32> = (0..rows as u32 / 2).map(|row| row % distinct).collect();
        let limit = (f64::from(distinct) / share) as u32;
        let probe: Vec<u32> = (0..rows).map(|_| random.random_range(0..limit.max(1))).collect();
        let table = self.device.build_table(&self.spread(&build, KeyWidth::W4), false, &self.stream).unwrap();
        self.device.probe_table(&table, &self.spread(&probe, KeyWidth::W4), 0..rows, &self.stream).unwrap()
    }

    fn pairs(&self) {
        let names = [
            "expand/one-each",
            "expand/runs-of-8",
            "split_pairs",
            "select_matches",
            "mark_build",
            "mark",
            "select_flags",
        ];
        if !names.iter().any(|name| self.wants(name)) {
            return;
        }
        let (device, stream, rows) = (self.device, &self.stream, self.options.rows);
        // No case with matches in half of the rows: the list of these rows is made once for all
        // calls, so a repeated run would time nothing.
        for (name, run) in [("expand/one-each", 1), ("expand/runs-of-8", 8)] {
            let matches = self.matches(1.0, run);
            // Expand the first pairs, at most `rows`. With one match per row, leave out the first
            // pair: the device would return all pairs in place, at no cost. It copies a part of the
            // pairs, as for a batch.
            let one_each = run == 1;
            let pairs = u64::from(one_each)..matches.total.min(rows as u64);
            let count = (pairs.end - pairs.start) as usize;
            let pair_bytes = if one_each { 4 } else { 8 };
            let moved = 4 * rows / run as usize * (1 + usize::from(run > 1)) + pair_bytes * count;
            self.case(name, count, 4, moved, || {
                device.expand(&matches, pairs.clone(), Unmatched::Skip, stream).unwrap()
            });
        }
        if self.wants("split_pairs") {
            let matches = self.matches(1.0, 1);
            let pairs = device.expand(&matches, 0..matches.total, Unmatched::Skip, stream).unwrap();
            let part_bits = (rows / 2).next_power_of_two().trailing_zeros().saturating_sub(PARTS_MAX.trailing_zeros());
            let parts = (rows / 2).div_ceil(1 << part_bits);
            self.case("split_pairs", rows, 4, 16 * rows, || {
                device.split_pairs(&pairs, part_bits, parts, stream).unwrap()
            });
        }
        let half = self.matches(0.5, 1);
        self.case("select_matches", rows, 4, 4 * rows + 4 * half.matched_rows, || {
            device.select_matches(&half, Which::Matched, stream).unwrap()
        });
        let flags = device.new_flags(rows, stream).unwrap();
        self.case("mark_build", rows, 4, 4 * rows + half.matched_rows, || {
            device.mark_build(&half, &flags, stream).unwrap();
        });
        let positions = device.select_matches(&half, Which::Matched, stream).unwrap();
        self.case("mark", positions.len(), 4, 5 * positions.len(), || device.mark(&positions, &flags, stream).unwrap());
        self.case("select_flags", rows, 1, rows + 4 * positions.len(), || {
            device.select_flags(&flags, rows, Which::Matched, stream).unwrap()
        });
    }

    fn gathers(&self) {
        let names = [
            "gather/random",
            "gather/range",
            "gather_to_host/random",
            "gather_to_host/range",
            "gather_to_host/nulls",
            "compose",
        ];
        if !names.iter().any(|name| self.wants(name)) {
            return;
        }
        let (device, stream, arena, rows) = (self.device, &self.stream, &self.arena, self.options.rows);
        let mut numbers: Vec<u32> = (0..rows as u32).collect();
        numbers.shuffle(&mut StdRng::seed_from_u64(4));
        let random = self.list(&numbers);
        let range = Positions::Range(1..rows);
        for width in [Width::W1, Width::W2, Width::W4, Width::W8, Width::W16, Width::W32] {
            let bytes = width.bytes();
            let column = Column { data: self.buffer(&vec![7; bytes * rows]), width, rows, validity: None };
            let moved = (2 * bytes + 4) * rows;
            self.case("gather/random", rows, bytes, moved, || device.gather(&column, &random, stream).unwrap());
            self.case("gather_to_host/random", rows, bytes, moved, || {
                device.gather_to_host(&column, &random, arena, stream).unwrap()
            });
            if width == Width::W4 {
                self.case("gather/range", rows, bytes, 8 * rows, || device.gather(&column, &range, stream).unwrap());
                self.case("gather_to_host/range", rows, bytes, 8 * rows, || {
                    device.gather_to_host(&column, &range, arena, stream).unwrap()
                });
                let bits = BooleanBuffer::collect_bool(rows, |row| row % 3 == 0).into_inner();
                let slice = BitSlice::Bits { buffer: bits, offset: 0, len: rows };
                let validity = Some(device.copy_in_bits(&[slice], stream).unwrap());
                let nullable = Column { validity, ..column };
                self.case("gather_to_host/nulls", rows, bytes, moved + rows / 4, || {
                    device.gather_to_host(&nullable, &random, arena, stream).unwrap()
                });
            }
        }
        let map = self.list(&numbers.iter().rev().copied().collect::<Vec<_>>());
        self.case("compose", rows, 4, 12 * rows, || device.compose(&map, &random, stream).unwrap());
    }

    /// Measures the primitives of a `radix-hash` join together. Each side has 4-byte keys and a
    /// 4-byte payload. The key and both payloads of every match are written to host memory, in
    /// probe batches.
    fn radix_join(&self) {
        if !self.wants("radix_join") {
            return;
        }
        let (device, stream, arena) = (self.device, &self.stream, &self.arena);
        let (build, probe, numbers) = self.sides(KeyWidth::W4);
        let build_payload = Payload::Column(self.column(&numbers));
        let probe_payload = Payload::Column(self.column(&vec![3; probe.rows]));
        let bits = self.fitting_bits(build.rows);
        let moved = 16 * (build.rows + probe.rows) + 4 * (build.rows + probe.rows) + 20 * probe.rows;
        let mut phases = [0.0; 4];
        self.case("radix_join", probe.rows, 4, moved, || {
            let mut last = Instant::now();
            let mut lap = |phase: usize| {
                phases[phase] += last.elapsed().as_secs_f64();
                last = Instant::now();
            };
            let build = self.partition(&build, std::slice::from_ref(&build_payload), bits);
            let probe = self.partition(&probe, std::slice::from_ref(&probe_payload), bits);
            lap(0);
            let bounds = probe.bounds.get().unwrap();
            let mut columns = Vec::new();
            let mut start = 0;
            while start < 1 << bits {
                let mut end = start + 1;
                while end < 1 << bits && bounds[end + 1] - bounds[start] <= device.tuning().probe_batch_rows {
                    end += 1;
                }
                let matches = match device.match_partitions(&build, &probe, start..end, stream).unwrap() {
                    PartitionMatches::Matched(matches) => matches,
                    PartitionMatches::RepeatedBuildKeys => panic!("build keys are distinct"),
                };
                lap(1);
                let pairs = device.expand(&matches, 0..matches.total, Unmatched::Skip, stream).unwrap();
                lap(2);
                columns.push(device.gather_to_host(&probe.keys.as_column(), &pairs.probe, arena, stream).unwrap());
                columns.push(device.gather_to_host(&build.payload[0], &pairs.build, arena, stream).unwrap());
                columns.push(device.gather_to_host(&probe.payload[0], &pairs.probe, arena, stream).unwrap());
                lap(3);
                start = end;
            }
            columns
        });
        let runs = (self.options.runs + 1) as f64;
        let [partition, matching, expand, gather] = phases.map(|seconds| seconds / runs);
        eprintln!(
            "radix_join, mean: partition {partition:.4} s, match {matching:.4}, expand {expand:.4}, gather {gather:.4}"
        );
    }
}
