//! Placing: predicts where and when a waiting job runs. Slots of devices are booked one job after
//! the other; host memory is shared.
//!
//! ```text
//!   host:0   slot 0  │ short job ▒▒▒│ (kept free) │ large job ████████████│ ...
//!            slot 1  │ short job ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│           ████████████│ ...
//!                    now                          └─ all slots are free: the large job takes them
//! ```
//!
//! A short job whose device memory fits next to that of others takes one slot. Jobs on the other
//! slots stretch its time. Any other job takes all slots of its device. Slots are used in the order
//! of booking, so that later short jobs do not delay a large one. The short jobs are booked after
//! the large one, or elsewhere. A slot that is idle until a large job starts runs a job meanwhile
//! that is predicted to end well before that (backfilling).
//!
//! Host memory is shared by all jobs, and may be held for as long as a lease. So a job that lacks
//! only host memory books no slot, and others run meanwhile. That does not go on forever: after
//! [`CLAIM_AFTER`] free host memory is kept for the job.

use std::cell::OnceCell;
use std::fmt;
use std::time::Duration;

use super::JobId;
use super::admission::WORTH_MORE_DEVICES;
use super::device_set::DeviceSet;
use super::options::Policy;

/// Time after which a job that has a slot, but lacks memory, is tried again.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// Time during which jobs that take less host memory may overtake a job that lacks it. The time is
/// a tenth of the default lease, and memory mostly comes back within it. Keeping free memory for
/// the job any sooner would idle devices for nothing. The time is also hundreds of times as long as
/// the short joins that overtake the job. So a client's burst of short joins is mostly over by
/// then.
pub(super) const CLAIM_AFTER: Duration = Duration::from_secs(30);

/// Host memory that a job takes on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HostNeed {
    /// Predicted bytes. At most the bytes that tables leave, as far as could be told at admission.
    pub(super) bytes: u64,
    /// Fewest bytes to start with if no more will become free. Equal to `bytes`, unless the
    /// prediction exceeds what tables leave. Such a job would wait for more in vain, and its
    /// prediction may be wrong.
    pub(super) least_bytes: u64,
    /// True for a turn of a stream. If these bytes are not free, it starts with none, and takes
    /// them as it goes. So it never waits for host memory, and none is kept for it.
    pub(super) takes_less: bool,
}

/// A job that waits.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) id: JobId,
    pub(super) tenant: String,
    pub(super) priority: i32,
    pub(super) submitted: Duration,
    pub(super) places: Vec<Place>,
    /// Time at which the job began to lack only host memory.
    pub(super) starved_since: Option<Duration>,
    /// Time from which nothing is known to give that memory back.
    pub(super) unsatisfiable_since: Option<Duration>,
    /// Predicted time until the job has the turn of the build side at its prepared place. `None`:
    /// no other job has it.
    pub(super) turn_wait: Option<Duration>,
}

/// Devices that a job may run on together.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Place {
    pub(super) devices: DeviceSet,
    /// Index of their plan among the job's.
    pub(super) plan: usize,
    /// Predicted seconds if the job has the devices alone.
    pub(super) seconds: f64,
    /// Bytes of memory that must be free on each device for the job to start alone.
    pub(super) memory_bytes: u64,
    /// Bytes of each device's memory that the job gets if it runs in parallel with others. `None`:
    /// the job takes the devices alone.
    pub(super) shared_bytes: Option<u64>,
    /// True if the build side is on the device already, in memory of its own.
    pub(super) is_prepared: bool,
    pub(super) host: HostNeed,
}

impl Place {
    /// Returns the predicted seconds of all devices.
    pub(super) fn device_seconds(&self) -> f64 {
        self.seconds * self.devices.len() as f64
    }

    fn needed_bytes(&self) -> u64 {
        self.shared_bytes.unwrap_or(self.memory_bytes)
    }
}

/// Load of a device.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Load {
    InService { slots: usize, free_bytes: u64, running: Vec<RunningJob> },
    Lost,
}

impl Load {
    /// Returns the number of jobs that the device runs alone or leads.
    fn led(&self) -> usize {
        match self {
            Self::Lost => 0,
            Self::InService { running, .. } => running.iter().filter(|job| job.is_leader).count(),
        }
    }
}

/// Job on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RunningJob {
    pub(super) until: Duration,
    pub(super) alone: bool,
    /// True on the device that leads the job's others, or runs it alone.
    pub(super) is_leader: bool,
}

/// Host memory, now and as predicted.
#[derive(Clone, Copy)]
pub(super) struct HostMemory<'a> {
    pub(super) free_bytes: u64,
    /// Finds the times and bytes of memory that becomes free on its own: jobs end, leases end.
    /// Called at most once, and only if a job needs more than is free.
    pub(super) returns: &'a dyn Fn() -> Vec<(Duration, u64)>,
}

impl fmt::Debug for HostMemory<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("free_bytes", &self.free_bytes).finish_non_exhaustive()
    }
}

/// Predicted start of a waiting job. The index in the list of all predicted starts is the job's
/// position in the queue.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ScheduledStart {
    pub(super) id: JobId,
    pub(super) place: Place,
    pub(super) host_bytes: u64,
    pub(super) start: Duration,
    /// Reason to wait; `None` if the job starts right now.
    pub(super) wait: Option<Wait>,
}

impl ScheduledStart {
    /// Returns the seconds of device time that the job is about to take; 0 if only host memory or
    /// another job's turn keeps it from starting.
    pub(super) fn seconds(&self) -> f64 {
        if matches!(self.wait, Some(Wait::HostMemory { .. } | Wait::Turn)) { 0.0 } else { self.place.device_seconds() }
    }
}

/// Reason why a job does not start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Wait {
    /// The device runs other jobs, or will run some first.
    Device,
    /// Another job has the turn of the build side. The job books no slot.
    Turn,
    /// The device has a slot for the job, but not the memory.
    DeviceMemory { needed_bytes: u64, free_bytes: u64 },
    /// The device has a slot and memory for the job, but the host has no memory for its result.
    HostMemory {
        needed_bytes: u64,
        free_bytes: u64,
        /// True if the memory that jobs and leases give back is enough.
        comes_back: bool,
    },
}

/// Use of the slots and of memory by running jobs, and by waiting jobs that were placed so far.
#[derive(Debug)]
pub(super) struct Timeline<'a> {
    policy: Policy,
    now: Duration,
    /// Time at which each slot of each device is free. A lost device has no slots.
    slots: Vec<Vec<Duration>>,
    /// Time until which a slot that is idle now stays idle, and `None` for one that is not. A job
    /// that waits for other slots, or for other devices, has booked the slot from then on.
    idle_until: Vec<Vec<Option<Duration>>>,
    device_free_bytes: Vec<u64>,
    /// Jobs that wait or run.
    jobs: usize,
    host: HostMemory<'a>,
    /// Bytes of host memory that have become free by each time, on their own.
    returned: OnceCell<Vec<(Duration, u64)>>,
    /// Host memory that is free before any waiting job starts.
    host_free_bytes: u64,
}

impl<'a> Timeline<'a> {
    /// Creates the timeline of the running jobs. `waiting` jobs will be placed.
    pub(super) fn new(now: Duration, loads: &[Load], waiting: usize, host: HostMemory<'a>, policy: Policy) -> Self {
        let slots_of = |load: &Load| match load {
            Load::Lost => Vec::new(),
            Load::InService { slots, running, .. } => {
                // A slot is taken while a job runs there, however late the job is.
                let until = |job: &RunningJob| job.until.max(now + Duration::from_nanos(1));
                let alone = running.iter().filter(|job| job.alone).map(until).max();
                let mut free_at = vec![alone.unwrap_or(now); (*slots).max(running.len()).max(1)];
                for (slot, job) in free_at.iter_mut().zip(running) {
                    *slot = until(job);
                }
                free_at
            }
        };
        let free_bytes_of = |load: &Load| match load {
            Load::Lost => 0,
            Load::InService { free_bytes, .. } => *free_bytes,
        };
        let slots: Vec<Vec<Duration>> = loads.iter().map(slots_of).collect();
        let idle = |free_at: &Duration| (*free_at <= now).then_some(Duration::MAX);
        Self {
            policy,
            now,
            idle_until: slots.iter().map(|slots| slots.iter().map(idle).collect()).collect(),
            slots,
            device_free_bytes: loads.iter().map(free_bytes_of).collect(),
            jobs: waiting + loads.iter().map(Load::led).sum::<usize>(),
            returned: OnceCell::new(),
            host_free_bytes: host.free_bytes,
            host,
        }
    }

    /// Finds the place where a job is predicted to finish first, with the fewest devices if that
    /// takes about as long, and books a slot there. `None` if all its devices are lost.
    pub(super) fn place(&mut self, job: &Waiting) -> Option<ScheduledStart> {
        let alone = job.places.iter().filter(|place| place.devices.len() == 1);
        let alone_seconds = alone.map(|place| place.seconds).reduce(f64::min);
        let may_take = |place: &&Place| self.leaves_others_their_share(place, alone_seconds);
        let turn_at = |place: &Place| match job.turn_wait.filter(|_| place.is_prepared) {
            Some(wait) => self.now.saturating_add(wait),
            None => self.now,
        };
        let start_on = |place| Some((place, self.start_on(place)?.max(turn_at(place))));
        let starts = job.places.iter().filter(may_take).filter_map(start_on);
        let left = |(place, start): &(&Place, Duration)| {
            start.saturating_sub(self.now).as_secs_f64() + self.run_seconds(place, *start)
        };
        let starts: Vec<(&Place, Duration)> = starts.collect();
        let least = starts.iter().map(left).reduce(f64::min)?;
        let about_as_soon = if self.policy == Policy::Greedy { 1.0 } else { WORTH_MORE_DEVICES };
        let (place, start) = starts
            .into_iter()
            .filter(|start| left(start) <= least * about_as_soon)
            .min_by(|a, b| a.0.devices.len().cmp(&b.0.devices.len()).then(left(a).total_cmp(&left(b))))?;
        let run = self.run_seconds(place, start);

        let device_free_bytes = self.device_free_bytes(place);
        let needed_bytes = match place.host.bytes {
            bytes if bytes <= self.host.free_bytes => bytes,
            _ if place.host.takes_less => 0,
            bytes => bytes.min(self.host_bytes_ever().max(place.host.least_bytes)),
        };
        let scheduled = |start, wait| {
            Some(ScheduledStart { id: job.id, place: place.clone(), host_bytes: needed_bytes, start, wait })
        };
        if place.is_prepared && job.turn_wait.is_some() {
            return scheduled(start, Some(Wait::Turn));
        }
        let is_short = self.is_short_of_memory(place);
        let wait = if start > self.now && !is_short {
            Some(Wait::Device)
        } else if device_free_bytes < place.needed_bytes() {
            Some(Wait::DeviceMemory { needed_bytes: place.needed_bytes(), free_bytes: device_free_bytes })
        } else if self.host.free_bytes < needed_bytes {
            let free_at = self.host_free_at(needed_bytes);
            let wait =
                Wait::HostMemory { needed_bytes, free_bytes: self.host.free_bytes, comes_back: free_at.is_some() };
            if job.starved_since.is_some_and(|since| self.now.saturating_sub(since) >= CLAIM_AFTER) {
                self.host.free_bytes = 0;
            }
            return scheduled(free_at.unwrap_or(self.now).max(self.now + RETRY), Some(wait));
        } else {
            self.host.free_bytes -= needed_bytes;
            place.devices.iter().for_each(|device| self.device_free_bytes[device] -= place.needed_bytes());
            None
        };
        let run = Duration::try_from_secs_f64(run.max(1e-6)).unwrap_or(Duration::from_secs(u32::MAX.into()));
        self.book(place, start, start.saturating_add(run), is_short);
        scheduled(start, wait)
    }

    /// Returns the host memory that has become free by each time, in order.
    fn returned(&self) -> &[(Duration, u64)] {
        self.returned.get_or_init(|| {
            let mut returned = (self.host.returns)();
            returned.sort_unstable();
            let mut sum = 0u64;
            for (_, bytes) in &mut returned {
                sum = sum.saturating_add(*bytes);
                *bytes = sum;
            }
            returned
        })
    }

    /// Returns the host memory that is free once all running jobs and leases have ended.
    fn host_bytes_ever(&self) -> u64 {
        self.host_free_bytes.saturating_add(self.returned().last().map_or(0, |(_, bytes)| *bytes))
    }

    /// Returns when `bytes` of host memory, more than is free now, are expected to be free; `None`
    /// if a client has to free them.
    fn host_free_at(&self, bytes: u64) -> Option<Duration> {
        let missing_bytes = bytes.saturating_sub(self.host.free_bytes);
        let at = self.returned().partition_point(|(_, returned)| *returned < missing_bytes);
        self.returned().get(at).map(|(time, _)| self.now.max(*time))
    }

    /// False if the place leaves other jobs less than an equal share of all devices, and they lose
    /// by that. They lose if much of the device time is wasted, or if many jobs together wait
    /// longer for the wasted part than this job gains. `alone_seconds`: the job's time on one
    /// device, if it fits there.
    fn leaves_others_their_share(&self, place: &Place, alone_seconds: Option<f64>) -> bool {
        /// Device time over that of one device, up to which several devices waste little.
        const WASTE_MAX: f64 = 1.25;
        if self.policy == Policy::Greedy {
            return true;
        }
        let ranks = place.devices.len();
        let devices = self.slots.iter().filter(|slots| !slots.is_empty()).count();
        let is_share = ranks == 1 || ranks * self.jobs <= devices;
        is_share
            || alone_seconds.is_none_or(|alone| {
                let others = self.jobs.saturating_sub(1) as f64;
                let wasted = place.device_seconds() - alone;
                let others_wait = wasted / devices as f64 * others;
                place.device_seconds() <= alone * WASTE_MAX && others_wait <= alone - place.seconds
            })
    }

    /// Returns when one slot of each device is free for the job, or all slots if it runs alone.
    /// `None` if a device is lost.
    fn slot_free_at(&self, place: &Place) -> Option<Duration> {
        let of_device = |device: usize| {
            let slots = self.slots[device].iter().copied();
            if place.shared_bytes.is_some() { slots.min() } else { slots.max() }
        };
        place.devices.iter().try_fold(Duration::ZERO, |latest, device| Some(latest.max(of_device(device)?)))
    }

    /// Returns the free memory of the place's device that has the least.
    fn device_free_bytes(&self, place: &Place) -> u64 {
        place.devices.iter().map(|device| self.device_free_bytes[device]).min().unwrap_or(0)
    }

    /// Returns when the job could start. Devices with a free slot but too little memory are kept
    /// for the job.
    fn start_on(&self, place: &Place) -> Option<Duration> {
        let free_at = self.slot_free_at(place)?.max(self.now);
        if self.is_short_of_memory(place) {
            return Some(self.now + RETRY);
        }
        Some(if free_at > self.now && self.ends_while_slots_are_idle(place) { self.now } else { free_at })
    }

    /// True if the devices have a free slot for the job, but not the memory.
    fn is_short_of_memory(&self, place: &Place) -> bool {
        let is_free = self.slot_free_at(place).is_some_and(|free_at| free_at <= self.now);
        is_free && self.device_free_bytes(place) < place.needed_bytes()
    }

    /// True if the job can run now in slots that are idle until others start, and is predicted to
    /// end well before that.
    fn ends_while_slots_are_idle(&self, place: &Place) -> bool {
        self.device_free_bytes(place) >= place.needed_bytes()
            && self.are_idle_for(place, self.run_seconds(place, self.now))
    }

    /// True if the job's slots are idle now, and stay so for well over the given time.
    fn are_idle_for(&self, place: &Place, seconds: f64) -> bool {
        /// Predicted times that have to pass before the slots are needed. Most joins take less.
        const MARGIN: f64 = 1.5;
        let idle = |device: usize| {
            let slots = self.idle_until[device].iter().map(|until| until.unwrap_or(Duration::ZERO));
            if place.shared_bytes.is_some() { slots.max() } else { slots.min() }.unwrap_or(Duration::ZERO)
        };
        let until = place.devices.iter().map(idle).min().unwrap_or(Duration::ZERO);
        let needed = if self.policy == Policy::Greedy { 0.0 } else { seconds * MARGIN };
        until > self.now && (until == Duration::MAX || needed <= (until - self.now).as_secs_f64())
    }

    /// True if a slot is idle.
    pub(super) fn has_idle_slot(&self) -> bool {
        self.idle_until.iter().flatten().any(Option::is_some)
    }

    /// False if the job can only wait for devices, now and after others are placed: none of its
    /// places has slots that stay idle for its time.
    pub(super) fn may_start(&self, job: &Waiting) -> bool {
        job.places.iter().any(|place| self.are_idle_for(place, place.seconds))
    }

    /// Returns the run time of a job, stretched by the jobs on other slots when it starts. The
    /// device with the most other jobs decides.
    fn run_seconds(&self, place: &Place, start: Duration) -> f64 {
        let beside = |device: usize| self.slots[device].iter().filter(|free_at| **free_at > start).count();
        let most = place.devices.iter().map(beside).max().unwrap_or(0);
        if place.shared_bytes.is_some() { place.seconds * (1 + most) as f64 } else { place.seconds }
    }

    /// Books slots for a job. Other jobs may use a slot that is idle until the job starts, unless
    /// the job `lacks_memory`, which they would take.
    fn book(&mut self, place: &Place, start: Duration, end: Duration, lacks_memory: bool) {
        let idles_until = (start > self.now && !lacks_memory).then_some(start);
        let is_backfill = start <= self.now && self.slot_free_at(place).is_some_and(|free_at| free_at > self.now);
        for device in place.devices.iter() {
            let (slots, idle_until) = (&mut self.slots[device], &mut self.idle_until[device]);
            let all = 0..slots.len();
            let one = match is_backfill {
                true => all.clone().max_by_key(|&slot| idle_until[slot]),
                false => all.clone().min_by_key(|&slot| slots[slot]),
            };
            let one = one.expect("a device in service has a slot");
            for slot in if place.shared_bytes.is_some() { one..one + 1 } else { all } {
                slots[slot] = slots[slot].max(end);
                idle_until[slot] = idle_until[slot].and_then(|until| Some(until.min(idles_until?)));
            }
        }
    }
}
