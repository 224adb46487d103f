//! Channel from one rank to another: a ring of slots in the receiver's window.
//!
//! ```text
//!   sender    waits until a slot is released ─► pushes rows into it ─► counts it as sent
//!   receiver  waits until a slot is sent ─► takes its rows ─► counts it as released
//! ```
//!
//! Both counters, and the header of each slot, are on the board of the gang. A slot is never
//! written before it is released, so more rows than fit take more rounds and no more memory. A slot
//! without rows ends a sequence.

use std::ops::Range;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use crate::device::{Device, DeviceBuffer, DeviceId, Stream, peers};
use crate::join::rank::{GangBoard, RELEASED, SLOT_HEADERS};
use crate::memory::SharedCounters;
use crate::{Error, Result};

/// Slots of a channel. One is filled and one is emptied, while one is on its way.
pub(super) const SLOTS: usize = 3;

/// Alignment of the columns in a slot, in bytes.
const ALIGNMENT: usize = 256;

/// Columns of the rows that cross an exchange, by the bytes of a value.
#[derive(Clone, Debug)]
pub(super) struct SlotLayout {
    pub(super) widths: Vec<usize>,
}

impl SlotLayout {
    /// Returns the most rows that fit in a slot.
    fn rows_max(&self, slot_bytes: usize) -> usize {
        let row_bytes: usize = self.widths.iter().sum();
        slot_bytes.saturating_sub(ALIGNMENT * self.widths.len()) / row_bytes.max(1)
    }

    /// Returns the place of each column of `rows` rows in a slot.
    fn places(&self, rows: usize) -> Vec<Range<usize>> {
        let mut start = 0;
        let place = |width: &usize| {
            let bytes = start..start + rows * width;
            start = bytes.end.next_multiple_of(ALIGNMENT);
            bytes
        };
        self.widths.iter().map(place).collect()
    }
}

/// Rows that cross an exchange together. All are of one chunk of a table.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) rows: usize,
    /// Table row at which the chunk starts.
    pub(super) chunk_start: u64,
    /// Buffer of each column.
    pub(super) columns: Vec<DeviceBuffer>,
}

/// Rows of a buffer's columns to send.
pub(super) struct Outgoing<'a> {
    pub(super) columns: &'a [DeviceBuffer],
    pub(super) rows: Range<usize>,
    pub(super) chunk_start: u64,
}

/// One direction between two ranks, at either end.
pub(super) struct Channel {
    /// Device of the sender.
    from: DeviceId,
    /// Device of the receiver.
    to: DeviceId,
    counters: SharedCounters,
    /// First counter of the channel.
    at: usize,
    /// First byte of the slots in the receiver's window.
    window_start: usize,
    slot_bytes: usize,
    done: Mutex<Done>,
}

/// Progress of one end.
#[derive(Default)]
struct Done {
    /// Slots that this end has sent or released.
    slots: u64,
    /// True if the receiver has come to the end of a sequence.
    is_ended: bool,
}

impl Channel {
    /// Returns the channel between two different ranks. All windows have `window_bytes`.
    pub(super) fn new(board: &GangBoard, from: usize, to: usize, window_bytes: usize) -> Self {
        let (counters, at) = board.channel(from, to);
        // Each sender has an equal part of the window.
        let slot_bytes = window_bytes / (board.ranks() - 1) / SLOTS / ALIGNMENT * ALIGNMENT;
        let part = if from < to { from } else { from - 1 };
        Self {
            from: board.devices()[from],
            to: board.devices()[to],
            counters,
            at,
            window_start: part * SLOTS * slot_bytes,
            slot_bytes,
            done: Mutex::default(),
        }
    }

    /// Sends rows in as many slots as they need. Waits for slots. Any number of threads may send.
    ///
    /// # Errors
    /// The error of `check`, errors of the device, and [`Error::Exhausted`] if a slot is too small
    /// for a row.
    pub(super) fn send(
        &self,
        layout: &SlotLayout,
        outgoing: &Outgoing<'_>,
        (device, stream): (&dyn Device, &Stream),
        check: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let rows_max = layout.rows_max(self.slot_bytes);
        if rows_max == 0 {
            return Err(Error::Exhausted(format!(
                "the exchange window of {} is too small for rows of {} bytes",
                self.to,
                layout.widths.iter().sum::<usize>()
            )));
        }
        for start in outgoing.rows.clone().step_by(rows_max) {
            let rows = start..outgoing.rows.end.min(start + rows_max);
            let mut sent = self.done.lock();
            let slot = self.slot_for(sent.slots, check)?;
            let places = layout.places(rows.len());
            for ((buffer, place), width) in outgoing.columns.iter().zip(places).zip(&layout.widths) {
                let bytes = rows.start * width..rows.end * width;
                peers(device)?.push(self.to, self.slot_start(slot) + place.start, buffer, bytes, stream)?;
            }
            device.synchronize(stream)?;
            self.publish(&mut sent, slot, rows.len() as u64, outgoing.chunk_start);
        }
        Ok(())
    }

    /// Ends the sequence of slots.
    ///
    /// # Errors
    /// The error of `check`.
    pub(super) fn end(&self, check: &dyn Fn() -> Result<()>) -> Result<()> {
        let mut sent = self.done.lock();
        let slot = self.slot_for(sent.slots, check)?;
        self.publish(&mut sent, slot, 0, 0);
        Ok(())
    }

    /// Begins to receive another sequence.
    pub(super) fn begin(&self) {
        self.done.lock().is_ended = false;
    }

    /// Takes the rows of the next slot. Returns `None` at the end of a sequence. Any number of
    /// threads may receive.
    ///
    /// # Errors
    /// The error of `check`, and errors of the device.
    pub(super) fn receive(
        &self,
        layout: &SlotLayout,
        (device, stream): (&dyn Device, &Stream),
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Option<Piece>> {
        let mut released = self.done.lock();
        if released.is_ended {
            return Ok(None);
        }
        self.counters.wait(self.at, released.slots + 1, check)?;
        let slot = (released.slots % SLOTS as u64) as usize;
        let header = self.at + SLOT_HEADERS + 2 * slot;
        let (rows, chunk_start) = (self.counters.get(header) as usize, self.counters.get(header + 1));
        let start = self.slot_start(slot);
        let own = peers(device)?;
        let take = |place: Range<usize>| own.take(self.from, start + place.start..start + place.end, stream);
        let columns = layout.places(rows).into_iter().map(take).collect::<Result<Vec<_>>>()?;
        device.synchronize(stream)?;
        released.slots += 1;
        released.is_ended = rows == 0;
        self.counters.add(self.at + RELEASED, 1);
        Ok((rows > 0).then_some(Piece { rows, chunk_start, columns }))
    }

    /// Waits until the slot for the next rows is released, and returns it.
    fn slot_for(&self, sent: u64, check: &dyn Fn() -> Result<()>) -> Result<usize> {
        self.counters.wait(self.at + RELEASED, (sent + 1).saturating_sub(SLOTS as u64), check)?;
        Ok((sent % SLOTS as u64) as usize)
    }

    fn publish(&self, sent: &mut Done, slot: usize, rows: u64, chunk_start: u64) {
        let header = self.at + SLOT_HEADERS + 2 * slot;
        self.counters.counter(header).store(rows, Ordering::Relaxed);
        self.counters.counter(header + 1).store(chunk_start, Ordering::Relaxed);
        sent.slots += 1;
        self.counters.add(self.at, 1);
    }

    fn slot_start(&self, slot: usize) -> usize {
        self.window_start + slot * self.slot_bytes
    }
}

const _: () = assert!(2 * SLOTS <= 8, "the headers of all slots fit in a line");

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::AtomicBool;

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::device::host::HostDevice;
    use crate::device::{CancelFlag, PeerOps, PeerWindow};
    use crate::memory::{Arena, Budget};

    /// Two columns, of 4 and of 1 bytes.
    fn layout() -> SlotLayout {
        SlotLayout { widths: vec![4, 1] }
    }

    /// Opens two devices that have mapped each other's windows.
    fn pair(window_bytes: usize) -> [HostDevice; 2] {
        let budget = || Budget::new("device memory", "--device-memory", 64 << 20);
        let devices = [0, 1].map(|index| HostDevice::new(index, 1, budget(), None).unwrap());
        devices.iter().for_each(|device| device.open_window(window_bytes).unwrap());
        for (device, peer) in [(&devices[0], &devices[1]), (&devices[1], &devices[0])] {
            let file = peer.window_file().unwrap().try_clone_to_owned().unwrap();
            device.map_window(peer.id(), PeerWindow::Device { file, bytes: window_bytes }).unwrap();
        }
        devices
    }

    /// Numbers of the rows that a thread sends, and their columns.
    fn rows(device: &dyn Device, stream: &Stream, first: u32, count: usize) -> Vec<DeviceBuffer> {
        let numbers: Vec<u32> = (first..).take(count).collect();
        let bytes: Vec<u8> = numbers.iter().map(|number| (number % 251) as u8).collect();
        let column = |bytes: Vec<u8>| device.copy_in(&[bytes.into()], stream).unwrap();
        vec![column(bytemuck::cast_slice(&numbers).to_vec()), column(bytes)]
    }

    /// Sends and receives with several threads at both ends, which pause at random places. Every
    /// row arrives once and whole, through a window that holds only a few rows at a time.
    #[test]
    fn every_row_arrives_once_whatever_the_order_of_steps() {
        const SENDERS: u32 = 3;
        const PIECES: u32 = 20;
        for seed in 0..12 {
            let window_bytes = [6 << 10, 20 << 10, 1 << 20][seed as usize % 3];
            let devices = pair(window_bytes);
            let board = GangBoard::new(&devices.each_ref().map(Device::id)).unwrap();
            let end = |_: usize| Channel::new(&board, 0, 1, window_bytes);
            let (sender, receiver) = (end(0), end(1));
            let pause = |random: &mut StdRng| (0..random.random_range(0..3)).for_each(|_| std::thread::yield_now());
            let arrived = Mutex::new(BTreeMap::new());
            let sending = std::sync::atomic::AtomicU32::new(SENDERS);
            let check = || Ok(());
            std::thread::scope(|scope| {
                for thread in 0..SENDERS {
                    let (sender, devices, sending) = (&sender, &devices, &sending);
                    scope.spawn(move || {
                        let mut random = StdRng::seed_from_u64(1000 * seed + u64::from(thread));
                        let device = devices[0].for_job(devices[0].memory().clone()).unwrap();
                        let stream = device.stream(CancelFlag::new()).unwrap();
                        for piece in 0..PIECES {
                            let count = random.random_range(0..2000);
                            let first = (thread * PIECES + piece) * 10_000;
                            let columns = rows(&*device, &stream, first, count);
                            let sent = Outgoing { columns: &columns, rows: 0..count, chunk_start: u64::from(first) };
                            sender.send(&layout(), &sent, (&*device, &stream), &check).unwrap();
                            pause(&mut random);
                        }
                        if sending.fetch_sub(1, Ordering::AcqRel) == 1 {
                            sender.end(&check).unwrap();
                        }
                    });
                }
                for thread in 0..2 {
                    let (receiver, devices, arrived) = (&receiver, &devices, &arrived);
                    scope.spawn(move || {
                        let mut random = StdRng::seed_from_u64(1000 * seed + 100 + thread);
                        let device = devices[1].for_job(devices[1].memory().clone()).unwrap();
                        let stream = device.stream(CancelFlag::new()).unwrap();
                        let arena = Arena::new(Budget::new("host memory", "--host-memory", 64 << 20));
                        while let Some(piece) = receiver.receive(&layout(), (&*device, &stream), &check).unwrap() {
                            let numbers = device.copy_out(&piece.columns[0], 4 * piece.rows, &arena, &stream).unwrap();
                            let bytes = device.copy_out(&piece.columns[1], piece.rows, &arena, &stream).unwrap();
                            let numbers: Vec<u32> = bytemuck::pod_collect_to_vec(&numbers[..]);
                            for (number, byte) in numbers.into_iter().zip(&bytes[..]) {
                                assert_eq!(
                                    (u64::from(number) / 10_000 * 10_000, number % 251),
                                    (piece.chunk_start, u32::from(*byte))
                                );
                                *arrived.lock().entry(number).or_insert(0) += 1;
                            }
                            pause(&mut random);
                        }
                    });
                }
            });
            let mut expected = 0;
            for thread in 0..SENDERS {
                let mut random = StdRng::seed_from_u64(1000 * seed + u64::from(thread));
                for piece in 0..PIECES {
                    let count = random.random_range(0..2000);
                    let first = (thread * PIECES + piece) * 10_000;
                    assert!((first..).take(count).all(|number| arrived.lock().get(&number) == Some(&1)), "seed {seed}");
                    expected += count;
                    pause(&mut random);
                }
            }
            assert_eq!(arrived.lock().len(), expected, "seed {seed}");
        }
    }

    #[test]
    fn a_full_ring_holds_its_sender_back_until_it_is_stopped() {
        let devices = pair(6 << 10);
        let board = GangBoard::new(&devices.each_ref().map(Device::id)).unwrap();
        let sender = Channel::new(&board, 0, 1, 6 << 10);
        let stream = devices[0].stream(CancelFlag::new()).unwrap();
        let columns = rows(&devices[0], &stream, 0, 50_000);
        let stop = AtomicBool::new(false);
        let check = || match stop.swap(true, Ordering::Relaxed) {
            true => Err(Error::Cancelled("stopped".into())),
            false => Ok(()),
        };
        let sent = Outgoing { columns: &columns, rows: 0..50_000, chunk_start: 0 };
        let outcome = sender.send(&layout(), &sent, (&devices[0], &stream), &check);
        assert_eq!(outcome, Err(Error::Cancelled("stopped".into())));
        let slots = sender.done.lock().slots;
        assert_eq!((slots, sender.counters.get(sender.at)), (SLOTS as u64, SLOTS as u64), "no slot is filled twice");
    }

    #[test]
    fn a_window_too_small_for_a_row_is_refused() {
        let devices = pair(1 << 10);
        let board = GangBoard::new(&devices.each_ref().map(Device::id)).unwrap();
        let stream = devices[0].stream(CancelFlag::new()).unwrap();
        let columns = rows(&devices[0], &stream, 0, 1);
        let sent = Outgoing { columns: &columns, rows: 0..1, chunk_start: 0 };
        let channel = Channel::new(&board, 0, 1, 1 << 10);
        let refused = channel.send(&layout(), &sent, (&devices[0], &stream), &|| Ok(())).unwrap_err();
        assert!(matches!(&refused, Error::Exhausted(message) if message.contains("host:1")), "{refused}");
    }
}
