//! Integers that cross the link as offsets from a base, in fewer bytes than they take: CPU threads narrow them on their way, and a
//! kernel widens them where they arrive (frame of reference: Goldstein, Ramakrishnan and Shaft 1998).
//!
//! ```text
//!   column ─► tasks ─► CPU threads ─► slot, pinned ─► copy ─► piece on the GPU ─► widen ─► column
//!              ▲                        │      ▲        │
//!              └── so many values each  │      │        └── taken: the slot may be written again
//!                                       └──────┼── filled: the copy may begin
//!                                              └── slots go round
//! ```
//!
//! All of it is queued at once, as plain copies are, and whoever queues it goes on. A stream waits for a slot by a word of pinned memory
//! that the CPU counts up when the slot is filled, and counts up another itself when it was copied from. Slots are given out in the order
//! in which their copies are queued, and tasks are taken in the same order, so that a thread which waits for a slot waits for work that
//! was queued before its own, and for nothing else. That may be work of other kinds: a piece whose stream has kernels to wait for holds its
//! slot meanwhile, and with enough of these other jobs' columns wait as well.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use arrow::buffer::Buffer;
use bytemuck::Pod;
use cudarc::driver::sys;
use multiversion::multiversion;
use parking_lot::{Condvar, Mutex};

use super::abi::{self, DovetailWiden};
use super::buffer::CudaBuffer;
use super::driver::{Gpu, Pinned};
use super::work::{PIECE_BYTES, Work};
use crate::device::{DeviceId, DeviceInfo, DeviceKind, FrameOfReference, NarrowedMin, Width};
use crate::{Error, Result};

/// Bytes of a slot, and how many there are: what is narrowed ahead of the copy that is under way. All of them stay in the CPU's last cache,
/// so that memory is read and not written.
const SLOT_BYTES: usize = if cfg!(test) { 64 << 10 } else { 8 << 20 };
const SLOTS: usize = 8;

/// Values of a slot at the most, whatever their offsets take, and at the least. With half as many at the most, 2^27 values of 8 bytes came in
/// at 47 to 86 GB/s in four runs on an H200, in the place of 82 to 88 (builds that were not kept).
const VALUES_MAX: usize = SLOT_BYTES / 4;
const VALUES_MIN: usize = VALUES_MAX / 8;

/// A column is cut into so many pieces if these are no smaller or larger than that: what is narrowed of the first has to wait for the rest of
/// it, and the link with it.
const PIECES: usize = 8;

/// Tasks of a piece: a few for each thread, so that one which is late holds up little.
const TASKS: usize = 32;

/// Smaller columns cross as they are: threads have to wake up. `DOVETAIL_TEST_NARROWED_BYTES` says otherwise, so that tests of joins narrow
/// theirs.
const BYTES_MIN: usize = SLOT_BYTES / 2;

/// What narrowing has to save of the link's time. Four joins of 0.8 to 2.2 ms took 0.1 to 0.5 ms longer, where less than 0.2 ms were to be
/// saved (an H200, 76f666f). With the variable, anything is enough.
const SAVED_MIN: Duration = Duration::from_millis(1);

/// Batches whose columns are smaller cost more to go through than narrowing saves.
const PART_BYTES_MIN: usize = if cfg!(test) { 256 } else { 16 << 10 };

/// Counters are this far apart, so that no two are in one line of any cache.
const WORD_BYTES: usize = 128;

/// A thread lets others go first so often before it sleeps until there is something to do, or between two looks at a slot that is still being
/// copied from. A copy takes 80 to 150 us, and so does waking up.
const YIELDS: usize = 1000;
const NAP: Duration = Duration::from_micros(20);

/// What is narrowed.
pub(super) fn least() -> NarrowedMin {
    // The tests of this room say what they want by sizes.
    let asked = std::env::var("DOVETAIL_TEST_NARROWED_BYTES").ok().filter(|_| !cfg!(test));
    let asked = asked.and_then(|bytes| bytes.parse().ok());
    let copy_bytes = asked.unwrap_or(BYTES_MIN);
    let saved = if asked.is_some() { Duration::ZERO } else { SAVED_MIN };
    NarrowedMin { copy_bytes, batch_bytes: PART_BYTES_MIN.min(copy_bytes), saved }
}

/// Narrows what one GPU is sent, for all of its jobs.
#[derive(Debug)]
pub(super) struct Narrower {
    gpu: Arc<Gpu>,
    threads: usize,
    least: NarrowedMin,
    /// Made for the first column; `None` where it could not be.
    belt: OnceLock<Option<Belt>>,
}

impl Narrower {
    /// With as many of so many CPU threads as are left by a join's streams, whose threads ask the GPU again and again whether it is done:
    /// one that had to wait for a core would hold up its stream for milliseconds.
    pub(super) fn new(gpu: Arc<Gpu>, threads: usize, info: &DeviceInfo) -> Self {
        let threads = threads.saturating_sub(info.streams).max(1);
        Self { gpu, threads, least: info.narrowed_min, belt: OnceLock::new() }
    }

    fn belt(&self) -> Option<&Belt> {
        let make = || {
            let made =
                if self.gpu.has_stream_words() { Belt::start(&self.gpu, self.threads).map(Some) } else { Ok(None) };
            made.unwrap_or_else(|error| {
                tracing::warn!(device = self.gpu.ordinal, %error, "columns cross the link in all of their bytes");
                None
            })
        };
        self.belt.get_or_init(make).as_ref()
    }

    /// Queues copies of values that lie in a frame of reference, one part after the other in one buffer, as their offsets. `None`, and nothing
    /// is done, where they had better cross as they are, or there is memory for nothing else.
    ///
    /// # Errors
    /// The driver's, and that the job was stopped. What was queued until then comes to its end by itself.
    pub(super) fn copy_in(
        &self,
        work: &Work<'_>,
        parts: &[Buffer],
        frame: &FrameOfReference,
        purpose: &'static str,
    ) -> Result<Option<CudaBuffer>> {
        let width = frame.width.bytes();
        let bytes: usize = parts.iter().map(Buffer::len).sum();
        let lie_well = parts.iter().all(|part| (part.as_ptr() as usize).is_multiple_of(width));
        let least = self.least;
        let is_large = bytes > 0 && bytes >= least.copy_bytes && bytes / parts.len() >= least.batch_bytes;
        if !is_large || !lie_well {
            return Ok(None);
        }
        let Some(belt) = self.belt().filter(|belt| !belt.slots.lock().order.is_empty()) else { return Ok(None) };
        let buffer = work.buffer(bytes, purpose)?;
        let values = bytes / width;
        let offset_bytes = frame.offset_width.bytes();
        // Widened together: each time, the link waits for a kernel.
        let group_values = even(values, PIECE_BYTES / width);
        let values_max = VALUES_MAX.min(SLOT_BYTES / offset_bytes);
        let piece_values = even(group_values, values.div_ceil(PIECES).clamp(VALUES_MIN, values_max));
        let task_values = piece_values.div_ceil(TASKS).next_multiple_of(64);
        // What is narrowed takes more memory than what is not.
        let offsets = match work.buffer(group_values.min(values) * offset_bytes, purpose) {
            Err(Error::Exhausted(_)) => return Ok(None),
            offsets => offsets?,
        };
        let mut arriving = work.arriving(bytes);
        let mut source = Source { parts, part: 0, at: 0 };
        for group in ranges(0..values, group_values) {
            let watched = work.watch(purpose, group.len() * offset_bytes);
            for piece in ranges(group.clone(), piece_values) {
                work.cancel.check()?;
                let of_task =
                    |task: Range<usize>| ((task.start - piece.start) * offset_bytes, source.take(task.len() * width));
                let tasks: Vec<_> = ranges(piece.clone(), task_values).map(of_task).collect();
                // A thread that was the last to let go of pinned memory would wait for the GPU, which waits for that thread. Not held before
                // the copy is queued: another thread that waits for the stream would let go of them.
                let sources: Vec<Buffer> = tasks.iter().flat_map(|(_, source)| source.iter().cloned()).collect();
                let [start, end] = [piece.start, piece.end].map(|value| (value - group.start) * offset_bytes);
                let sent = belt.send(work, tasks, frame, &offsets, start..end, purpose);
                sources.into_iter().for_each(|source| work.queue.hold(source));
                sent?;
            }
            drop(watched);
            widen(work, frame, &offsets, &buffer, &group)?;
            arriving.reached(group.end * width)?;
        }
        buffer.arrives(arriving.arrivals);
        Ok(Some(buffer))
    }
}

/// Makes those values of a column of offsets, of which there are as many.
fn widen(
    work: &Work<'_>,
    frame: &FrameOfReference,
    offsets: &CudaBuffer,
    column: &CudaBuffer,
    values: &Range<usize>,
) -> Result<()> {
    let (base, width, offset_width) = (frame.base as u128, frame.width.bytes(), frame.offset_width.bytes());
    assert!(values.len() * offset_width <= offsets.size() && values.end * width <= column.size(), "values {values:?}");
    let args = DovetailWiden {
        offsets: offsets.as_ptr(),
        offset_bytes: offset_width as u32,
        base_low: base as u64,
        base_high: (base >> 64) as u64,
        rows: values.len() as u64,
        value_bytes: width as u32,
        // SAFETY: the column has these values, as was just asserted.
        values: unsafe { column.as_mut_ptr::<u8>().add(values.start * width) }.cast(),
    };
    work.launch("widening a column", abi::dovetail_widen, &args)
}

/// So many values, or a few more or fewer, that pieces of them are of about one size: the last is waited for like the others.
fn even(values: usize, about: usize) -> usize {
    values.div_ceil(values.div_ceil(about)).next_multiple_of(64)
}

/// A range in parts of that length; the last may be shorter.
fn ranges(all: Range<usize>, length: usize) -> impl Iterator<Item = Range<usize>> {
    let end = all.end;
    all.step_by(length).map(move |start| start..end.min(start + length))
}

/// What is left of a column.
struct Source<'a> {
    parts: &'a [Buffer],
    part: usize,
    at: usize,
}

impl Source<'_> {
    /// The next bytes, of as many parts as they are of.
    fn take(&mut self, mut bytes: usize) -> Vec<Buffer> {
        let mut taken = Vec::new();
        while bytes > 0 {
            let part = &self.parts[self.part];
            let some = bytes.min(part.len() - self.at);
            if some > 0 {
                taken.push(part.slice_with_length(self.at, some));
            }
            (self.at, bytes) = (self.at + some, bytes - some);
            if self.at == part.len() {
                (self.part, self.at) = (self.part + 1, 0);
            }
        }
        taken
    }
}

/// Slots and the threads that fill them.
#[derive(Debug)]
struct Belt {
    shared: Arc<Shared>,
    /// Who is next.
    slots: Mutex<Slots>,
    workers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Slots {
    /// In the order in which they are given out. One whose copy could not be queued is none any more: nobody would say that it is free.
    order: VecDeque<usize>,
    /// How often each was given out.
    given: [u64; SLOTS],
}

#[derive(Debug)]
struct Shared {
    gpu: Arc<Gpu>,
    /// Two counters for each slot, and the slots.
    memory: Pinned,
    tasks: Mutex<Tasks>,
    /// How many of them wait, for those who only look.
    waiting: AtomicUsize,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Tasks {
    waiting: VecDeque<Task>,
    is_closed: bool,
}

/// Some values to be narrowed.
#[derive(Debug)]
struct Task {
    piece: Arc<Piece>,
    /// Where in the slot their offsets begin.
    at: usize,
    source: Vec<Buffer>,
}

/// What one slot carries.
#[derive(Debug)]
struct Piece {
    slot: usize,
    /// How often the slot was given out, this time included.
    number: u64,
    frame: FrameOfReference,
    /// Tasks that are not done.
    left: AtomicUsize,
}

impl Belt {
    fn start(gpu: &Arc<Gpu>, threads: usize) -> Result<Self> {
        let purpose = "pinning memory for narrowed columns";
        let memory = Pinned::new(gpu, 2 * SLOTS * WORD_BYTES + SLOTS * SLOT_BYTES, purpose)?;
        let (tasks, waiting, wake) = (Mutex::default(), AtomicUsize::new(0), Condvar::new());
        let shared = Arc::new(Shared { gpu: gpu.clone(), memory, tasks, waiting, wake });
        for slot in 0..SLOTS {
            shared.filled(slot).store(0, Ordering::Relaxed);
            shared.taken(slot).store(0, Ordering::Relaxed);
        }
        let slots = Mutex::new(Slots { order: (0..SLOTS).collect(), given: [0; SLOTS] });
        let mut belt = Self { shared, slots, workers: Vec::new() };
        let id = DeviceId { kind: DeviceKind::Cuda, index: gpu.ordinal };
        for thread in 0..threads {
            let shared = belt.shared.clone();
            let started =
                std::thread::Builder::new().name(format!("{id}-narrow-{thread}")).spawn(move || shared.work());
            let refused = |cause| Error::Exhausted(format!("starting {threads} threads for device {id}: {cause}"));
            belt.workers.push(started.map_err(refused)?);
        }
        Ok(belt)
    }

    /// Queues a piece: its tasks for the threads, and on the stream of `work` a copy that waits for them.
    fn send(
        &self,
        work: &Work<'_>,
        tasks: Vec<(usize, Vec<Buffer>)>,
        frame: &FrameOfReference,
        to: &CudaBuffer,
        bytes: Range<usize>,
        purpose: &'static str,
    ) -> Result<()> {
        let (queue, shared) = (work.queue, &*self.shared);
        assert!(bytes.len() <= SLOT_BYTES && bytes.end <= to.size(), "bytes {bytes:?} of {}", to.size());
        // Until the copy is queued: the order of copies is that of slots.
        let mut slots = self.slots.lock();
        let none_left = || Error::Unavailable(format!("{purpose} on device cuda:{}: copies fail", queue.gpu.ordinal));
        let slot = slots.order.pop_front().ok_or_else(none_left)?;
        slots.given[slot] += 1;
        let number = slots.given[slot];
        let piece = Arc::new(Piece { slot, number, frame: *frame, left: AtomicUsize::new(tasks.len()) });
        let tasks = tasks.into_iter().map(|(at, source)| Task { piece: piece.clone(), at, source });
        shared.put(tasks);
        // It wakes the others, which takes longer than all of this: a call of the system for each.
        shared.wake.notify_one();
        if let Err(error) = queue.wait_for_word(shared.filled(slot), number, purpose) {
            // Nothing on the stream waits for the threads, which still read the table: the caller does, before its stream lets go of that.
            while piece.left.load(Ordering::Acquire) > 0 {
                std::thread::yield_now();
            }
            return Err(error);
        }
        let (from, to) = (shared.slot(slot, 0..bytes.len()), to.pointer() + bytes.start as u64);
        // SAFETY: slot and buffer have so many bytes, as was asserted, and the slot stays until the GPU's work is done. Nobody writes to it
        // from when it is filled until the copy is done.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes.len(), queue.raw()) };
        queue.gpu.check(copied.result(), purpose)?;
        queue.write_word(shared.taken(slot), number, purpose)?;
        slots.order.push_back(slot);
        Ok(())
    }
}

impl Drop for Belt {
    fn drop(&mut self) {
        // Should the GPU be lost, whoever waits for it is told so.
        self.shared.gpu.settle("ending a device");
        self.shared.tasks.lock().is_closed = true;
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // It does what streams still wait for before it ends.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// How often a slot was filled.
    fn filled(&self, slot: usize) -> &AtomicU64 {
        self.word(2 * slot)
    }

    /// How often a slot was copied from, which the GPU says.
    fn taken(&self, slot: usize) -> &AtomicU64 {
        self.word(2 * slot + 1)
    }

    fn word(&self, number: usize) -> &AtomicU64 {
        let start = number * WORD_BYTES;
        // SAFETY: it lies within the memory, at a multiple of 8, and is used as an atomic only.
        unsafe { AtomicU64::from_ptr(self.memory.at(start..start + 8).cast()) }
    }

    /// Bytes of a slot.
    fn slot(&self, slot: usize, bytes: Range<usize>) -> *mut u8 {
        let start = 2 * SLOTS * WORD_BYTES + slot * SLOT_BYTES;
        assert!(bytes.end <= SLOT_BYTES, "bytes {bytes:?} of a slot");
        self.memory.at(start + bytes.start..start + bytes.end)
    }

    /// Takes tasks until there are none and will be none.
    fn work(&self) {
        while let Some(task) = self.next() {
            self.fill(task);
        }
    }

    fn put(&self, more: impl Iterator<Item = Task>) {
        let mut tasks = self.tasks.lock();
        tasks.waiting.extend(more);
        self.waiting.store(tasks.waiting.len(), Ordering::Relaxed);
    }

    fn take(&self, tasks: &mut Tasks) -> Option<Task> {
        let task = tasks.waiting.pop_front();
        self.waiting.store(tasks.waiting.len(), Ordering::Relaxed);
        task
    }

    /// The next task. Where there is none, one may come soon: of the next piece, or of another column.
    fn next(&self) -> Option<Task> {
        for _ in 0..YIELDS {
            if self.waiting.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            } else if let Some(task) = self.take(&mut self.tasks.lock()) {
                return Some(task);
            }
        }
        let mut tasks = self.tasks.lock();
        loop {
            match self.take(&mut tasks) {
                Some(task) => {
                    let others = tasks.waiting.len().min(2);
                    drop(tasks);
                    for _ in 0..others {
                        self.wake.notify_one();
                    }
                    return Some(task);
                }
                None if tasks.is_closed => return None,
                None => self.wake.wait(&mut tasks),
            }
        }
    }

    fn fill(&self, task: Task) {
        let Task { piece, mut at, source } = task;
        if self.may_be_filled(&piece) {
            for values in &source {
                let frame = &piece.frame;
                let bytes = values.len() / frame.width.bytes() * frame.offset_width.bytes();
                let to = self.slot(piece.slot, at..at + bytes);
                // SAFETY: each task has a part of the slot to itself, and the GPU has taken what was there before.
                narrow(values, unsafe { std::slice::from_raw_parts_mut(to, bytes) }, frame);
                at += bytes;
            }
        }
        // Before the stream goes on: whoever has waited for it counts on the tables' memory.
        drop(source);
        if piece.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            // On a lost GPU pieces of a slot may end in any order.
            self.filled(piece.slot).fetch_max(piece.number, Ordering::Release);
        }
    }

    /// Waits until what was in the piece's slot before is taken. `false` where the GPU is lost, and takes nothing any more.
    fn may_be_filled(&self, piece: &Piece) -> bool {
        for look in 0.. {
            if self.taken(piece.slot).load(Ordering::Acquire) + 1 >= piece.number {
                break;
            }
            if self.gpu.check_not_lost().is_err() {
                return false;
            }
            if look < YIELDS { std::thread::yield_now() } else { std::thread::sleep(NAP) }
        }
        true
    }
}

/// Values to offsets, by the widest instructions that the CPU has: memory is what bounds them then. What lies under a null may be outside of
/// the frame: whatever becomes of it is unspecified, as it was.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn narrow(values: &[u8], offsets: &mut [u8], frame: &FrameOfReference) {
    let base = frame.base as u128;
    match frame.width {
        Width::W2 => by_width(values, offsets, frame, |value: u16| value.wrapping_sub(base as u16).into()),
        Width::W4 => by_width(values, offsets, frame, |value: u32| value.wrapping_sub(base as u32).into()),
        Width::W8 => by_width(values, offsets, frame, |value: u64| value.wrapping_sub(base as u64)),
        Width::W16 => by_width(values, offsets, frame, |value: u128| value.wrapping_sub(base) as u64),
        Width::W1 | Width::W32 => unreachable!("no frame of reference has values of {:?}", frame.width),
    }
}

#[inline(always)]
fn by_width<V: Pod>(values: &[u8], offsets: &mut [u8], frame: &FrameOfReference, offset: impl Fn(V) -> u64) {
    #[inline(always)]
    fn write<V: Pod, O: Pod>(values: &[u8], offsets: &mut [u8], offset: impl Fn(V) -> O) {
        let (values, offsets) = (bytemuck::cast_slice::<u8, V>(values), bytemuck::cast_slice_mut::<u8, O>(offsets));
        values.iter().zip(offsets).for_each(|(&value, to)| *to = offset(value));
    }
    match frame.offset_width {
        Width::W1 => write(values, offsets, |value| offset(value) as u8),
        Width::W2 => write(values, offsets, |value| offset(value) as u16),
        Width::W4 => write(values, offsets, |value| offset(value) as u32),
        Width::W8 => write(values, offsets, offset),
        Width::W16 | Width::W32 => unreachable!("no frame of reference has offsets of {:?}", frame.offset_width),
    }
}
