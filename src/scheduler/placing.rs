//! Where a waiting job goes, and when: devices as seats that are booked one job after the other, and host memory.
//!
//! ```text
//!   host:0   seat 0  │ short job ▒▒▒│                │ large job ████████████│ ...
//!            seat 1  │ short job ▒▒▒▒▒▒▒│ (kept free) │           ████████████│ ...
//!                    now                 └─ the last seat is free: the large job takes all of them
//! ```
//!
//! A short job whose device memory fits beside others' takes one seat, and its time is stretched by those who sit there
//! too. Any other job takes all seats of its device. Whoever is booked on a seat first sits there first, so that short jobs that
//! come later do not keep a large one waiting: they are booked after it, or elsewhere.
//!
//! Host memory is everybody's, and what holds it may hold it for as long as a lease. A job whose turn has come but for host
//! memory therefore books no seat, and others run meanwhile; but not for ever: after [`CLAIM_AFTER`] what is free is kept for it.

use std::time::Duration;

use super::JobId;
use super::admission::HostNeed;
use super::queue::Waiting;

/// When what is seated, but short of memory, is looked at again.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// How long a job lets others overtake it that take less host memory. A tenth of the default lease, in which what it waits for
/// mostly comes back, so keeping free memory for it any sooner would idle devices for nothing; and hundreds of times as long as
/// the short joins that overtake it, so that a client's burst of these is mostly over.
pub(super) const CLAIM_AFTER: Duration = Duration::from_secs(30);

/// A device that a job may run on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Place {
    /// Index of the device.
    pub(super) device: usize,
    /// Predicted seconds there, when it has the device alone.
    pub(super) seconds: f64,
    /// Bytes of device memory that must be free for it to start alone.
    pub(super) memory_bytes: u64,
    /// Bytes of device memory with which it runs beside others; `None` when it takes the device alone.
    pub(super) shared_bytes: Option<u64>,
    /// The host memory that is reserved for it before it starts there.
    pub(super) host: HostNeed,
}

impl Place {
    fn needed_bytes(&self) -> u64 {
        self.shared_bytes.unwrap_or(self.memory_bytes)
    }
}

/// What a device is doing.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Load {
    /// It serves.
    InService {
        /// Jobs that it runs at a time, at the most.
        seats: usize,
        /// Bytes of its memory that are free.
        free_bytes: u64,
        /// The jobs on it.
        running: Vec<Seated>,
    },
    /// It is out of service.
    Lost,
}

/// A job on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Seated {
    /// When it is predicted to end.
    pub(super) until: Duration,
    /// Whether it has the device alone.
    pub(super) alone: bool,
}

/// Host memory, now and as it is expected to be.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct HostMemory {
    /// Bytes that are free.
    pub(super) free_bytes: u64,
    /// What comes back without anybody's doing, and when: jobs end, leases end.
    pub(super) returns: Vec<(Duration, u64)>,
}

impl HostMemory {
    /// What is free once all that comes back by itself has.
    fn bytes_ever(&self) -> u64 {
        self.returns.iter().fold(self.free_bytes, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// When so many bytes are expected to be free; `None` when somebody has to free them.
    fn free_at(&self, bytes: u64, now: Duration) -> Option<Duration> {
        let mut returns = self.returns.clone();
        returns.sort_unstable();
        let mut free = self.free_bytes;
        let mut at = now;
        for (time, returned) in returns {
            if free >= bytes {
                break;
            }
            free = free.saturating_add(returned);
            at = at.max(time);
        }
        (free >= bytes).then_some(at)
    }
}

/// A job's turn as it is predicted. Its index among the turns is its position in the queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Turn {
    pub(super) id: JobId,
    pub(super) place: Place,
    /// Bytes of host memory that it starts with.
    pub(super) host_bytes: u64,
    /// When it starts.
    pub(super) start: Duration,
    /// What it waits for; `None` when it starts right now.
    pub(super) wait: Option<Wait>,
}

impl Turn {
    /// Seconds of the device's time that it is about to take; none while only memory keeps it from starting.
    pub(super) fn seconds(&self) -> f64 {
        if matches!(self.wait, Some(Wait::HostMemory { .. })) { 0.0 } else { self.place.seconds }
    }
}

/// What keeps a job from starting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Wait {
    /// Its device runs other jobs, or will run some first.
    Device,
    /// Its device has a place for it, and not the memory.
    DeviceMemory { needed_bytes: u64, free_bytes: u64 },
    /// Its device has a place and memory for it, and the host has no memory for its result.
    HostMemory {
        needed_bytes: u64,
        free_bytes: u64,
        /// Whether what jobs and leases give back by themselves will do.
        comes_back: bool,
    },
}

/// What is booked so far: the jobs that run, and those whose turn comes before.
#[derive(Debug)]
pub(super) struct Bookings {
    now: Duration,
    /// When each seat of each device is free; no seats on a device that is lost.
    seats: Vec<Vec<Duration>>,
    device_free_bytes: Vec<u64>,
    host: HostMemory,
    /// Host memory that is free once all that runs has ended.
    host_bytes_ever: u64,
}

impl Bookings {
    /// What runs.
    pub(super) fn new(now: Duration, loads: &[Load], host: HostMemory) -> Self {
        let seats_of = |load: &Load| match load {
            Load::Lost => Vec::new(),
            Load::InService { seats, running, .. } => {
                // A seat is taken while somebody sits there, however late.
                let until = |job: &Seated| job.until.max(now + Duration::from_nanos(1));
                let alone = running.iter().filter(|job| job.alone).map(until).max();
                let mut free_at = vec![alone.unwrap_or(now); (*seats).max(running.len()).max(1)];
                for (seat, job) in free_at.iter_mut().zip(running) {
                    *seat = until(job);
                }
                free_at
            }
        };
        let free_bytes_of = |load: &Load| match load {
            Load::Lost => 0,
            Load::InService { free_bytes, .. } => *free_bytes,
        };
        Self {
            now,
            seats: loads.iter().map(seats_of).collect(),
            device_free_bytes: loads.iter().map(free_bytes_of).collect(),
            host_bytes_ever: host.bytes_ever(),
            host,
        }
    }

    /// Where a job is predicted to finish first; books a seat there. `None` when all its devices are lost.
    pub(super) fn place(&mut self, job: &Waiting) -> Option<Turn> {
        let starts = job.places.iter().filter_map(|place| Some((*place, self.start_on(place)?)));
        let finish = |(place, start): &(Place, Duration)| start.as_secs_f64() + self.run_seconds(place, *start);
        let (place, start) = starts.min_by(|a, b| finish(a).total_cmp(&finish(b)))?;
        let run = self.run_seconds(&place, start);

        let device_free_bytes = self.device_free_bytes[place.device];
        let needed_bytes = place.host.bytes.min(self.host_bytes_ever.max(place.host.least_bytes));
        let turn = |start, wait| Some(Turn { id: job.id, place, host_bytes: needed_bytes, start, wait });
        let wait = if self.seat_free_at(&place)? > self.now {
            Some(Wait::Device)
        } else if device_free_bytes < place.needed_bytes() {
            Some(Wait::DeviceMemory { needed_bytes: place.needed_bytes(), free_bytes: device_free_bytes })
        } else if self.host.free_bytes < needed_bytes {
            let free_at = self.host.free_at(needed_bytes, self.now);
            let wait =
                Wait::HostMemory { needed_bytes, free_bytes: self.host.free_bytes, comes_back: free_at.is_some() };
            if job.short_since.is_some_and(|since| self.now.saturating_sub(since) >= CLAIM_AFTER) {
                self.host.free_bytes = 0;
            }
            return turn(free_at.unwrap_or(self.now).max(self.now + RETRY), Some(wait));
        } else {
            self.host.free_bytes -= needed_bytes;
            self.device_free_bytes[place.device] -= place.needed_bytes();
            None
        };
        let run = Duration::try_from_secs_f64(run.max(1e-6)).unwrap_or(Duration::from_secs(u32::MAX.into()));
        self.book(&place, start.saturating_add(run));
        turn(start, wait)
    }

    /// When there is a seat for it, or all of them.
    fn seat_free_at(&self, place: &Place) -> Option<Duration> {
        let seats = self.seats[place.device].iter().copied();
        if place.shared_bytes.is_some() { seats.min() } else { seats.max() }
    }

    /// When it could start. A device that has a seat and no memory is kept for the job all the same.
    fn start_on(&self, place: &Place) -> Option<Duration> {
        let free_at = self.seat_free_at(place)?.max(self.now);
        let is_short = free_at <= self.now && self.device_free_bytes[place.device] < place.needed_bytes();
        Some(if is_short { self.now + RETRY } else { free_at })
    }

    /// How long it takes beside those who sit there when it starts.
    fn run_seconds(&self, place: &Place, start: Duration) -> f64 {
        let beside = self.seats[place.device].iter().filter(|free_at| **free_at > start).count();
        if place.shared_bytes.is_some() { place.seconds * (1 + beside) as f64 } else { place.seconds }
    }

    fn book(&mut self, place: &Place, end: Duration) {
        let seats = &mut self.seats[place.device];
        match place.shared_bytes {
            Some(_) => {
                let first = seats.iter_mut().min();
                *first.expect("a device in service has a seat") = end;
            }
            None => seats.fill(end),
        }
    }
}
