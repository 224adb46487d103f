//! Growth of the arena: slabs are mapped when a piece finds no room, and ahead of need.
//!
//! ```text
//!   allocation ── no room ──► a slab with room is being mapped? ── yes: wait for it ─┐
//!                             └─ no: map one, without a lock ────────────────────────┴─► piece
//!   growth threads: free bytes ahead of need, needs of jobs (urgent), bytes to prepare
//! ```
//!
//! No lock is held while a slab is populated and pinned. So an allocation that finds room never
//! waits, and several slabs are mapped in parallel. The first thread without room maps a slab. The
//! next threads wait for it as long as it has room for them, and map further slabs otherwise.
//!
//! # Preparing
//! Pinning a slab stops the copies of other threads, and populating it takes as long as several
//! joins. So a server with GPUs prepares memory before it is needed
//! ([`BackgroundGrowth::prepare`]): in slabs of 256 MiB, with few threads, and as long as the
//! process may use more memory. Preparing pauses while devices copy for jobs. The server also maps
//! in advance what jobs have reserved, and what the next queued jobs are predicted to take
//! ([`Arena::expect`]). What was prepared stays mapped. Only a piece that is too long for all holes
//! takes empty slabs away, when no more may be mapped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::mapping::{Mapping, Populating};
use super::{Arena, Inner, Room, SlabId, Slabs, slack_bytes};
use crate::memory::{Interrupt, human_bytes, limits};
use crate::{Error, Result};

/// Size of a slab that is prepared, in bytes; less if that is more than a sixteenth of the budget.
/// Pieces of tens of megabytes leave little of it unused. Pinning takes 6 ms, during which copies
/// of other threads wait.
const PREPARED_SLAB_BYTES: usize = 256 << 20;

/// Least bytes of empty slabs kept for reuse; the arena keeps half of the budget if that is more.
/// Empty slabs above this go back to the system at once. Where a thread grows the arena ahead, they
/// go back when they were not needed for a while ([`TRIM_INTERVAL`]).
const EMPTY_SLAB_BYTES_KEPT_MIN: usize = 2 << 30;

/// Time between checks for slabs that were not needed since the last check. A table that is dropped
/// and uploaded again, or a result that follows another, gets the same pages. This holds even for
/// pages beyond half of the budget.
const TRIM_INTERVAL: Duration = Duration::from_secs(30);

/// Time between checks of the interrupt while a thread waits for a slab that another thread maps.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(10);

/// Threads that grow the arena in the background. One pins a slab while the other populates one.
const GROWTH_THREADS: usize = 2;

/// Part of the memory that the process may use which preparing leaves free: a sixteenth.
const LEFT_FREE_PART: u64 = 16;

/// Returns the bytes of empty slabs to keep. A server that once needed its memory needs it again,
/// since tables are replaced and results come and go. Without empty slabs, each new upload of a
/// table of half the budget would need fresh pages. These cost four times as much as the copy.
fn empty_slab_bytes_kept(limit: u64) -> usize {
    usize::try_from(limit / 2).unwrap_or(usize::MAX).max(EMPTY_SLAB_BYTES_KEPT_MIN)
}

/// Growth that is under way or wanted.
#[derive(Debug, Default)]
pub(super) struct Growth {
    /// Slabs that are being mapped.
    coming: Vec<Coming>,
    /// Bytes that threads wait for.
    waiting_bytes: usize,
    /// True while threads grow the arena in the background.
    in_background: bool,
    /// Bytes that should be free ahead of need.
    free_bytes_wanted: usize,
    /// Bytes that should be mapped ahead of need.
    prepared_bytes: usize,
    /// True if the needs of jobs are mapped ahead.
    is_for_jobs: bool,
    /// Bytes that the next queued jobs are predicted to take.
    expected_bytes: usize,
    /// True while preparing waits for jobs that run on devices.
    is_paused: bool,
    /// Least number of bytes that were free since the last trim. These bytes were not needed.
    free_bytes_min: usize,
    progress: Option<Progress>,
}

/// Slab that is being mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Coming {
    len: usize,
    /// Bytes of the piece that it is mapped for.
    own: usize,
    /// Bytes for other threads to wait for. None in a slab that is prepared, which takes longer
    /// than one that is urgent.
    room: usize,
}

/// Progress of preparing, for the log.
#[derive(Clone, Copy, Debug)]
struct Progress {
    since: Instant,
    /// Bytes that were mapped at the beginning.
    mapped_bytes: usize,
    /// Quarters that the log has told.
    quarters: usize,
}

/// Slab that a growth thread is about to map.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    len: usize,
    /// True if jobs or uploads may soon wait for it.
    is_urgent: bool,
}

impl Ahead {
    fn coming(self) -> Coming {
        Coming { len: self.len, own: 0, room: if self.is_urgent { self.len } else { 0 } }
    }
}

impl Arena {
    /// Starts threads that map slabs ahead of need, so that `free_bytes` are usually free within
    /// the budget. They also give back slabs that were not needed for a while. Only one such call
    /// is useful at a time. The threads end when the returned value is dropped.
    pub fn grow_ahead(&self, free_bytes: u64) -> BackgroundGrowth {
        {
            let mut slabs = self.inner.slabs.lock();
            slabs.growth.in_background = true;
            slabs.growth.free_bytes_wanted = usize::try_from(free_bytes).unwrap_or(usize::MAX);
        }
        let stops = Arc::new(Stops::default());
        let spawn = |number: usize| {
            let (inner, stops) = (self.inner.clone(), stops.clone());
            let thread = std::thread::Builder::new().name(format!("arena-growth-{number}"));
            let started = thread.spawn(move || inner.grow_in_background(number == 0, &stops));
            started.inspect_err(|error| tracing::warn!("the arena grows with fewer threads: {error}")).ok()
        };
        let threads: Vec<_> = (0..GROWTH_THREADS).filter_map(spawn).collect();
        if threads.is_empty() {
            self.inner.slabs.lock().growth.give_up();
        }
        BackgroundGrowth { inner: self.inner.clone(), stops, threads }
    }

    /// Announces the bytes that the next queued jobs are predicted to take. They are mapped in the
    /// background, if memory is prepared at all. `jobs_run`: true if devices work for jobs now,
    /// which pinning would stop. Preparing then pauses until the next call without.
    pub fn expect(&self, bytes: u64, jobs_run: bool) {
        let mut slabs = self.inner.slabs.lock();
        slabs.growth.expected_bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        slabs.growth.is_paused = jobs_run;
        slabs.wake_growth(&self.inner);
    }

    /// Bytes that were announced last, and whether jobs ran then.
    #[cfg(test)]
    pub(crate) fn expected(&self) -> (u64, bool) {
        let growth = &self.inner.slabs.lock().growth;
        (growth.expected_bytes as u64, growth.is_paused)
    }

    /// Bytes that should be mapped ahead of need.
    pub fn prepared_bytes_wanted(&self) -> u64 {
        self.inner.slabs.lock().growth.prepared_bytes as u64
    }

    /// Time that allocations have waited for slabs to be mapped, in total.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.inner.waited_nanos.load(Ordering::Relaxed))
    }
}

/// Growth of an arena ahead of need, which lasts while this value lives. See [`Arena::grow_ahead`].
#[derive(Debug)]
pub struct BackgroundGrowth {
    inner: Arc<Inner>,
    stops: Arc<Stops>,
    threads: Vec<JoinHandle<()>>,
}

/// Requests to the growth threads.
#[derive(Debug, Default)]
struct Stops {
    preparing: AtomicBool,
    all: AtomicBool,
}

impl Stops {
    /// Returns the interrupt of mapping a slab ahead.
    fn interrupt(self: &Arc<Self>, ahead: Ahead) -> Interrupt {
        let stops = self.clone();
        Interrupt::by(move || {
            let is_stopped =
                stops.all.load(Ordering::Relaxed) || !ahead.is_urgent && stops.preparing.load(Ordering::Relaxed);
            if is_stopped { Err(Error::Cancelled("no more memory is mapped ahead".into())) } else { Ok(()) }
        })
    }
}

impl BackgroundGrowth {
    /// Maps slabs in the background until `bytes` are mapped, and the needs of jobs ahead of them.
    /// Maps less if the process may not use that much. Returns at once.
    pub fn prepare(&self, bytes: u64) {
        let bytes = usize::try_from(bytes.min(self.inner.mapped_ahead_max())).unwrap_or(usize::MAX);
        let is_stopped = self.stops.preparing.load(Ordering::Relaxed);
        if bytes == 0 || is_stopped || !self.inner.slabs.lock().growth.in_background {
            return;
        }
        tracing::info!("preparing {} of host memory in the background", human_bytes(bytes as u64));
        let mut slabs = self.inner.slabs.lock();
        let (since, mapped_bytes) = (Instant::now(), slabs.mapped_bytes);
        slabs.growth.prepared_bytes = bytes;
        slabs.growth.is_for_jobs = true;
        slabs.growth.progress = Some(Progress { since, mapped_bytes, quarters: 0 });
        slabs.wake_growth(&self.inner);
    }

    /// Stops preparing at once. Memory that jobs need is still mapped ahead.
    pub fn stop_preparing(&self) {
        self.stops.preparing.store(true, Ordering::Relaxed);
        self.inner.slabs.lock().growth.stop_preparing();
    }
}

impl Drop for BackgroundGrowth {
    fn drop(&mut self) {
        self.stops.all.store(true, Ordering::Relaxed);
        self.inner.slabs.lock().growth.give_up();
        self.inner.growth_wanted.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread that grows the arena panicked");
            }
        }
    }
}

impl Growth {
    fn stop_preparing(&mut self) {
        (self.prepared_bytes, self.progress) = (0, None);
    }

    /// Ends growth in the background.
    fn give_up(&mut self) {
        self.stop_preparing();
        (self.free_bytes_wanted, self.is_for_jobs, self.in_background) = (0, false, false);
    }

    /// True if a slab that is being mapped has room for `size` bytes more.
    fn is_coming(&self, size: usize) -> bool {
        let is_large_enough = self.coming.iter().any(|slab| slab.room >= size);
        is_large_enough && self.sum(|slab| slab.room) >= self.waiting_bytes.saturating_add(size)
    }

    /// Sums up bytes of the slabs that are being mapped.
    fn sum(&self, bytes: impl Fn(&Coming) -> usize) -> usize {
        self.coming.iter().map(bytes).sum()
    }

    fn end(&mut self, slab: Coming) {
        let at = self.coming.iter().position(|other| *other == slab).expect("the slab was being mapped");
        self.coming.swap_remove(at);
    }
}

impl Inner {
    /// Finds room of `size` bytes, in a slab that has it or in a new one.
    pub(super) fn place(&self, size: usize, interrupt: &Interrupt) -> Result<Room> {
        if let Some(place) = self.slabs.lock().take(size, self) {
            return Ok(place);
        }
        let since = Instant::now();
        let place = self.place_in_new(size, interrupt);
        let nanos = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited_nanos.fetch_add(nanos, Ordering::Relaxed);
        place
    }

    /// Waits for room in a slab that is being mapped, or maps one.
    fn place_in_new(&self, size: usize, interrupt: &Interrupt) -> Result<Room> {
        let len = size.next_multiple_of(self.backing.granule_bytes()).max(self.slab_bytes);
        // Unmapping takes long and may free other pieces, so it is done without the lock.
        let mut given_back = Vec::new();
        let mut slabs = self.slabs.lock();
        loop {
            if let Some(place) = slabs.take(size, self) {
                return Ok(place);
            }
            MutexGuard::unlocked(&mut slabs, || interrupt.check())?;
            if slabs.growth.is_coming(size) {
                self.wait_for_slab(&mut slabs, size);
                continue;
            }
            let Err(fragmented) = self.make_room(&mut slabs, len, size, &mut given_back) else { break };
            MutexGuard::unlocked(&mut slabs, || given_back.clear());
            if !slabs.growth.coming.is_empty() {
                // The slab may leave room in the end.
                self.wait_for_slab(&mut slabs, size);
            } else if MutexGuard::unlocked(&mut slabs, || self.budget.reclaim(size as u64)) == 0 {
                return Err(fragmented);
            }
            // Reclaimed memory may leave a place that is large enough, or a whole slab empty.
        }
        let coming = Coming { len, own: size, room: len - size };
        slabs.growth.coming.push(coming);
        let mapped = MutexGuard::unlocked(&mut slabs, || {
            given_back.clear();
            self.map_slab(len, interrupt, Populating::Urgent)
        });
        self.end_mapping(&mut slabs, coming, mapped)?;
        let place = slabs.take(size, self);
        Ok(place.expect("a new slab is at least as large as the piece that it was made for"))
    }

    /// Adds the slab that was mapped. Threads that wait for it then find room in it. If it could
    /// not be mapped, they map a slab themselves.
    fn end_mapping(
        &self,
        slabs: &mut MutexGuard<'_, Slabs>,
        coming: Coming,
        mapped: Result<Arc<Mapping>>,
    ) -> Result<()> {
        let added = mapped.map(|memory| {
            // A pin that is set later pins all slabs in the list.
            if let Some(pin) = self.pin.get() {
                MutexGuard::unlocked(slabs, || memory.pin_by(pin));
            }
            let start = memory.start.as_ptr() as usize;
            self.ranges.write().insert(start, (start + memory.len, memory.node));
            slabs.add(memory);
        });
        slabs.growth.end(coming);
        self.grown.notify_all();
        added
    }

    fn wait_for_slab(&self, slabs: &mut MutexGuard<'_, Slabs>, size: usize) {
        slabs.growth.waiting_bytes += size;
        self.grown.wait_for(slabs, INTERRUPT_INTERVAL);
        slabs.growth.waiting_bytes -= size;
    }

    /// Takes empty slabs away until a slab of `len` bytes may be mapped, and adds them to
    /// `given_back`. Dropping them unmaps them. They are too small for the piece of `size` bytes,
    /// since the caller found no place for it.
    fn make_room(&self, slabs: &mut Slabs, len: usize, size: usize, given_back: &mut Vec<Arc<Mapping>>) -> Result<()> {
        let limit = self.budget.limit_bytes();
        let mapped_max = limit.saturating_add(slack_bytes(limit));
        let mapped_max = self.backing.capacity_bytes().map_or(mapped_max, |capacity| capacity.min(mapped_max));
        while (slabs.mapped_bytes + slabs.growth.sum(|slab| slab.len) + len) as u64 > mapped_max {
            let Some(slab) = slabs.free.empty_slab() else {
                let free = slabs.free.free_bytes() as u64;
                return Err(Error::Exhausted(format!(
                    "{} of host memory are free, but only in pieces of less than {}; drop tables that are no longer \
                     needed, or raise the server's --host-memory",
                    human_bytes(free),
                    human_bytes(size as u64),
                )));
            };
            given_back.push(self.forget(slabs, slab));
        }
        Ok(())
    }

    /// Removes an empty slab from the records. Dropping the result unmaps it.
    fn forget(&self, slabs: &mut Slabs, slab: SlabId) -> Arc<Mapping> {
        slabs.free.remove_slab(slab);
        let memory = slabs.mappings.remove(&slab).expect("an empty slab is mapped");
        slabs.mapped_bytes -= memory.len;
        self.ranges.write().remove(&(memory.start.as_ptr() as usize));
        memory
    }

    fn map_slab(&self, len: usize, interrupt: &Interrupt, populating: Populating) -> Result<Arc<Mapping>> {
        let memory = Mapping::on_node(self.next_node(), len, &self.backing, interrupt, populating).map_err(
            |error| match error {
                Error::Exhausted(_) => {
                    let (len, memory) = (human_bytes(len as u64), self.backing.describe());
                    error.context(format!("mapping a slab of {len} for the arena, whose memory is {memory}"))
                }
                interrupted => interrupted,
            },
        )?;
        Ok(Arc::new(memory))
    }

    pub(super) fn give_back(&self, slab: SlabId, offset: usize, size: usize) {
        let mut slabs = self.slabs.lock();
        if !slabs.free.give_back(slab, offset, size) {
            return;
        }
        // Threads that grow the arena give back the slabs that were not needed for a while.
        let is_trimmed = slabs.growth.in_background;
        if is_trimmed || slabs.free.empty_slab_bytes() <= empty_slab_bytes_kept(self.budget.limit_bytes()) {
            return;
        }
        let memory = self.forget(&mut slabs, slab);
        // Unmapping takes long, so other threads do not wait for it.
        drop(slabs);
        drop(memory);
    }

    /// Gives back the empty slabs that were not needed since the last call, except `kept_max`
    /// bytes.
    pub(super) fn trim(&self, kept_max: usize) {
        let mut slabs = self.slabs.lock();
        let mut unneeded = slabs.growth.free_bytes_min.saturating_sub(kept_max);
        while let Some(slab) = slabs.free.empty_slab().filter(|slab| slabs.mappings[slab].len <= unneeded) {
            let memory = self.forget(&mut slabs, slab);
            unneeded -= memory.len;
            // Unmapping takes long, so other threads do not wait for it.
            MutexGuard::unlocked(&mut slabs, || drop(memory));
        }
        slabs.growth.free_bytes_min = slabs.free.free_bytes();
    }

    /// Most bytes to map ahead of need.
    fn mapped_ahead_max(&self) -> u64 {
        let limit = self.budget.limit_bytes();
        self.backing.capacity_bytes().map_or(limit, |capacity| capacity.min(limit))
    }

    /// Maps slabs ahead of need until growth ends. One of the threads also trims.
    fn grow_in_background(&self, trims: bool, stops: &Arc<Stops>) {
        let mut trimmed = Instant::now();
        loop {
            if trims && trimmed.elapsed() >= TRIM_INTERVAL {
                self.trim(self.kept_max());
                trimmed = Instant::now();
            }
            let mut slabs = self.slabs.lock();
            if !slabs.growth.in_background {
                return;
            }
            if let Some(said) = slabs.tell_progress() {
                MutexGuard::unlocked(&mut slabs, || tracing::info!("{said}"));
            }
            match slabs.ahead(self) {
                Some(ahead) => {
                    slabs.growth.coming.push(ahead.coming());
                    // Another thread may map the next slab meanwhile.
                    slabs.wake_growth(self);
                    drop(slabs);
                    self.map_ahead(ahead, stops);
                }
                None if trims => {
                    self.growth_wanted.wait_for(&mut slabs, TRIM_INTERVAL.saturating_sub(trimmed.elapsed()));
                }
                None => self.growth_wanted.wait(&mut slabs),
            }
        }
    }

    /// Bytes of empty slabs that stay mapped.
    fn kept_max(&self) -> usize {
        let growth = &self.slabs.lock().growth;
        empty_slab_bytes_kept(self.budget.limit_bytes()).max(growth.free_bytes_wanted).max(growth.prepared_bytes)
    }

    /// Maps a slab whose growth has begun.
    fn map_ahead(&self, ahead: Ahead, stops: &Arc<Stops>) {
        let Ahead { len, is_urgent } = ahead;
        let populating = if is_urgent { Populating::Urgent } else { Populating::Ahead };
        let mapped = match is_urgent {
            true => Ok(()),
            false => self.check_that_memory_is_left(len),
        };
        let mapped = mapped.and_then(|()| self.map_slab(len, &stops.interrupt(ahead), populating));
        let mut slabs = self.slabs.lock();
        match self.end_mapping(&mut slabs, ahead.coming(), mapped) {
            Ok(()) | Err(Error::Cancelled(_)) => {}
            Err(error) if is_urgent => {
                slabs.growth.give_up();
                drop(slabs);
                tracing::warn!("the arena grows only on demand from now on: {error}");
                self.growth_wanted.notify_all();
            }
            Err(error) => {
                let (mapped, wanted) = (slabs.mapped_bytes, slabs.growth.prepared_bytes);
                slabs.growth.prepared_bytes = mapped.min(wanted);
                slabs.growth.progress = None;
                drop(slabs);
                let (mapped, wanted) = (human_bytes(mapped as u64), human_bytes(wanted as u64));
                tracing::warn!("{mapped} of {wanted} of host memory are prepared, and no more will be: {error}");
            }
        }
    }

    /// Checks that the process may use `len` bytes more, and some for everything else.
    fn check_that_memory_is_left(&self, len: usize) -> Result<()> {
        if self.backing.is_set_aside() {
            return Ok(());
        }
        let (Ok(limit), Some(free)) = (limits::process_memory_limit(), limits::process_memory_free()) else {
            return Ok(());
        };
        let left = limit / LEFT_FREE_PART;
        match (len as u64).saturating_add(left) <= free {
            true => Ok(()),
            false => Err(Error::Exhausted(format!(
                "the process may use {} more, and preparing leaves {} free",
                human_bytes(free),
                human_bytes(left)
            ))),
        }
    }
}

impl Slabs {
    fn add(&mut self, memory: Arc<Mapping>) {
        let id = self.next_id;
        self.next_id += 1;
        self.mapped_bytes += memory.len;
        self.free.add_slab(id, memory.len);
        self.mappings.insert(id, memory);
    }

    pub(super) fn take(&mut self, size: usize, inner: &Inner) -> Option<Room> {
        let place = self.free.take(size);
        self.growth.free_bytes_min = self.growth.free_bytes_min.min(self.free.free_bytes());
        self.wake_growth(inner);
        place.map(|(slab, offset)| (slab, offset, self.mappings[&slab].clone()))
    }

    /// Wakes a growth thread if it should map a slab.
    fn wake_growth(&self, inner: &Inner) {
        if self.growth.in_background && self.ahead(inner).is_some() {
            inner.growth_wanted.notify_one();
        }
    }

    /// Returns the slab to map next ahead of need.
    fn ahead(&self, inner: &Inner) -> Option<Ahead> {
        let growth = &self.growth;
        let mapped = self.mapped_bytes + growth.sum(|slab| slab.len);
        let room = usize::try_from(inner.mapped_ahead_max()).unwrap_or(usize::MAX).saturating_sub(mapped);
        let free = (self.free.free_bytes() + growth.sum(|slab| slab.room)).saturating_sub(growth.waiting_bytes);
        let promised = || self.promised_bytes(inner).saturating_add(growth.expected_bytes);
        let of_jobs = if growth.is_for_jobs { promised() } else { 0 };
        if free < growth.free_bytes_wanted.saturating_add(of_jobs) {
            let len = inner.slab_bytes;
            return (len <= room).then_some(Ahead { len, is_urgent: true });
        }
        let missing = growth.prepared_bytes.saturating_sub(mapped).min(room);
        if missing == 0 || growth.is_paused {
            return None;
        }
        let granule = inner.backing.granule_bytes();
        let len_max = PREPARED_SLAB_BYTES.min(inner.budget.limit_bytes() as usize / 16).max(inner.slab_bytes);
        let len = missing.min(len_max).next_multiple_of(granule);
        let len = if len > room { room / granule * granule } else { len };
        (len > 0).then_some(Ahead { len, is_urgent: false })
    }

    /// Bytes that jobs and uploads have reserved, without those in pieces, and without those of
    /// pieces that wait for a slab.
    fn promised_bytes(&self, inner: &Inner) -> usize {
        let in_pieces = self.mapped_bytes - self.free.free_bytes();
        let of_waiting = self.growth.waiting_bytes + self.growth.sum(|slab| slab.own);
        usize::try_from(inner.budget.used_bytes()).unwrap_or(usize::MAX).saturating_sub(in_pieces + of_waiting)
    }

    /// Returns a line for the log if another quarter of the bytes to prepare is mapped.
    fn tell_progress(&mut self) -> Option<String> {
        let growth = &mut self.growth;
        let (wanted, progress) = (growth.prepared_bytes, growth.progress.as_mut()?);
        let quarters = (self.mapped_bytes as u128 * 4 / wanted.max(1) as u128).min(4) as usize;
        if quarters <= progress.quarters {
            return None;
        }
        progress.quarters = quarters;
        let seconds = progress.since.elapsed().as_secs_f64();
        let rate = self.mapped_bytes.saturating_sub(progress.mapped_bytes) as f64 / seconds / 1e9;
        let (mapped, wanted) = (human_bytes(self.mapped_bytes.min(wanted) as u64), human_bytes(wanted as u64));
        Some(match quarters {
            4 => {
                growth.progress = None;
                format!("prepared {wanted} of host memory in {seconds:.1} s, {rate:.1} GB/s")
            }
            _ => format!("prepared {mapped} of {wanted} of host memory"),
        })
    }
}

#[cfg(test)]
mod tests;
