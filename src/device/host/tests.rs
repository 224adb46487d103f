//! Tests of the device as a whole: every primitive, its memory, its links.

use std::time::{Duration, Instant};

use super::testing::{Bench, numbers, patterns, random};
use super::*;
use crate::device::{BitSlice, Width};

/// Calls every primitive once, each with the result of the one before.
fn every_primitive(bench: &Bench, rows: usize) -> Result<()> {
    let Bench { device, stream, arena } = bench;
    let numbers: Vec<u32> = patterns(rows, &mut random(5)).swap_remove(1).1;
    let part = Buffer::from_vec(numbers);
    let data = device.copy_in(&[part.clone(), Buffer::from(&[][..])], stream)?;
    let bits = [BitSlice::Ones { len: rows / 2 }, BitSlice::Ones { len: rows - rows / 2 }];
    let validity = Some(device.copy_in_bits(&bits, stream)?);
    let column = Column { data, width: Width::W4, rows, validity };
    let encoding = crate::device::KeyEncoding::Signed { min: 0 };
    let field = KeyField { column: column.clone(), encoding, shift: 0, bits: 32, null_bit: None };
    let keys = device.pack_keys(&[field], KeyWidth::W8, stream)?.keys;
    let filter = device.build_filter(&keys, stream)?;
    device.filter_keys(&filter, &PackedKeys { keys: keys.clone(), rows_kept: None }, stream)?;
    let payload = [Payload::RowNumber, Payload::Column(column.clone())];
    let bits = RadixBits { skip: 0, bits: 4 };
    let partitions = device.partition(&keys, &payload, bits, stream)?;
    let grouped = device.group_partitions(partitions.clone(), stream)?;
    device.match_partitions(&partitions, &partitions, 0..16, stream)?;
    device.match_partitions(&grouped, &partitions, 0..16, stream)?;
    let sorted = device.sort(&keys, &payload, stream)?;
    device.is_sorted(&keys, stream)?;
    device.match_sorted(&sorted.keys, &sorted.keys, 0..rows, stream)?;
    device.build_dense_table(&keys, 0, rows as u128 * 2, stream)?;
    let table = device.build_table(&keys, false, stream)?;
    let matches = device.probe_table(&table, &keys, 0..rows, stream)?;
    let pairs = device.expand(&matches, 0..matches.total, Unmatched::Skip, stream)?;
    device.select_matches(&matches, Which::Unmatched, stream)?;
    let flags = device.new_flags(rows, stream)?;
    device.mark_build(&matches, &flags, stream)?;
    device.mark(&pairs.probe, &flags, stream)?;
    device.select_flags(&flags, rows, Which::Unmatched, stream)?;
    device.compose(&table.order.clone().expect("keys repeat"), &pairs.build, stream)?;
    device.gather(&column, &pairs.probe, stream)?;
    device.gather_to_host(&column, &pairs.probe, arena, stream)?;
    device.positions_to_host(&pairs.probe, arena, stream)?;
    device.copy_out(&column.data, 4 * rows, arena, stream)?;
    device.synchronize(stream)
}

#[test]
fn a_budget_that_is_too_small_refuses_and_gets_every_byte_back() {
    let rows = 20_000;
    // One thread: with two, the peak depends on how the threads interleave, and another run may
    // need a little less.
    let enough = Bench::new(1);
    every_primitive(&enough, rows).unwrap();
    assert_eq!(enough.used_bytes(), 0);
    let needed = enough.device.memory().used_bytes_max();
    for step in 0..=50 {
        let bench = Bench::with_memory(1, needed * step / 60);
        match every_primitive(&bench, rows) {
            Err(Error::Exhausted(text)) => assert!(text.contains("--device-memory"), "{text}"),
            other => panic!("{} of {needed} bytes gave {other:?}", needed * step / 60),
        }
        assert_eq!((bench.used_bytes(), bench.arena.budget().used_bytes()), (0, 0), "{step} of 60");
    }
}

#[test]
fn a_cancelled_stream_runs_nothing() {
    let bench = Bench::new(2);
    let (keys, _) = bench.keys::<u32>(&[3, 1, 2]);
    bench.stream.cancel.raise();
    assert!(matches!(bench.device.sort(&keys, &[], &bench.stream), Err(Error::Cancelled(_))));
    assert!(matches!(bench.device.build_table(&keys, false, &bench.stream), Err(Error::Cancelled(_))));
    assert!(matches!(bench.device.synchronize(&bench.stream), Err(Error::Cancelled(_))));
}

#[test]
fn a_flag_raised_during_the_work_stops_it_and_frees_its_memory() {
    let bench = Bench::new(2);
    for pause_ms in [0, 1, 3, 10, 30, 100] {
        let stream = bench.device.stream(CancelFlag::new()).unwrap();
        let cancel = stream.cancel.clone();
        let raiser = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(pause_ms));
            cancel.raise();
        });
        let again = Bench {
            stream,
            device: HostDevice::new(1, 2, bench.device.memory().clone(), None).unwrap(),
            arena: bench.arena.clone(),
        };
        // The work continues forever until it is stopped.
        let stopped = loop {
            if let Err(error) = every_primitive(&again, 100_000) {
                break error;
            }
        };
        assert!(matches!(stopped, Error::Cancelled(_)), "{stopped:?}");
        assert_eq!((bench.used_bytes(), bench.arena.budget().used_bytes()), (0, 0));
        raiser.join().unwrap();
    }
}

#[test]
fn transfers_over_an_emulated_link_take_the_time_of_its_rates() {
    let link = EmulatedLink { to_device_bytes_per_second: 10e6, from_device_bytes_per_second: 20e6 };
    let memory = Budget::new("memory of device host:0", "--device-memory", 1 << 30);
    let device = HostDevice::new(0, 2, memory, Some(link)).unwrap();
    let stream = device.stream(CancelFlag::new()).unwrap();
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 1 << 30));
    let part = Buffer::from_vec(vec![1u8; 1_000_000]);
    let start = Instant::now();
    let buffer = device.copy_in(&[part], &stream).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(100));
    assert!(device.memory().used_bytes() >= 1_000_000, "a copy is charged");
    let start = Instant::now();
    device.copy_out(&buffer, 1_000_000, &arena, &stream).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(50));
    // Each of two concurrent streams waits for the other's bytes.
    let column = Column { data: buffer, width: Width::W1, rows: 1_000_000, validity: None };
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| device.gather_to_host(&column, &Positions::Range(0..1_000_000), &arena, &stream).unwrap());
        }
    });
    assert!(start.elapsed() >= Duration::from_millis(100));
    drop(column);
    assert_eq!(device.memory().used_bytes(), 0);
}

#[test]
fn devices_that_share_a_lane_share_its_rate() {
    let (socket, arena) = (Lane::new(10e6).unwrap(), Arena::new(Budget::new("host memory", "--host-memory", 1 << 30)));
    let own = || Lane::new(1e12).unwrap();
    let both_ways = |index| {
        let memory = Budget::new("memory of a device", "--device-memory", 1 << 30);
        // Both devices share the `socket` lane, which counts the bytes of both directions.
        let lanes = || vec![socket.clone(), own()];
        let route = EmulatedRoute { to_device: lanes(), from_device: lanes() };
        HostDevice::with_route(index, 1, memory, Some(route)).unwrap()
    };
    let devices = [both_ways(0), both_ways(1)];
    let start = Instant::now();
    std::thread::scope(|scope| {
        for device in &devices {
            scope.spawn(|| {
                let stream = device.stream(CancelFlag::new()).unwrap();
                let buffer = device.copy_in(&[Buffer::from_vec(vec![1u8; 500_000])], &stream).unwrap();
                device.copy_out(&buffer, 500_000, &arena, &stream).unwrap();
            });
        }
    });
    assert!(start.elapsed() >= Duration::from_millis(200), "two megabytes at ten per second");
}

#[test]
fn devices_without_threads_or_links_without_rates_are_refused() {
    let memory = || Budget::new("memory of device host:0", "--device-memory", 1 << 20);
    assert!(matches!(HostDevice::new(0, 0, memory(), None), Err(Error::Invalid(_))));
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let link = EmulatedLink { to_device_bytes_per_second: 1e9, from_device_bytes_per_second: rate };
        assert!(matches!(HostDevice::new(0, 1, memory(), Some(link)), Err(Error::Invalid(_))), "{rate}");
    }
}

#[test]
fn positions_reach_the_host_as_numbers() {
    let bench = Bench::new(2);
    for positions in [Positions::Range(7..50_000), bench.list(&[5, crate::device::NO_ROW, 0], true)] {
        let host = bench.device.positions_to_host(&positions, &bench.arena, &bench.stream).unwrap();
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&host), numbers(&positions));
    }
}
