//! Queue: decides which job runs next, and where. A plain data structure, without threads and
//! without a clock.
//!
//! Tenants take turns by stride scheduling (Waldspurger and Weihl 1995). Each tenant has a *pass*:
//! the device time it was given over its weight. The tenant with the smallest pass is next. A
//! tenant that comes back starts with the smallest pass of the active tenants, so that no tenant
//! saves up turns. Within a tenant, jobs go by priority plus age: one point per [`AGING`] of
//! waiting. So every job's turn comes. Priority orders the jobs of one tenant; weight orders
//! tenants.
//!
//! In that order, each job is placed on the devices where it is predicted to finish first. Running
//! jobs and jobs placed earlier count (list scheduling by earliest finish; see
//! [`placing`](super::placing)). If that device is busy, the job waits for it. Later jobs may use
//! another device meanwhile, but overtake on this one only where they are predicted to end well
//! before the job starts. So small jobs do not starve a large job. A large job does not hold up
//! small ones on devices that it does not use.
//!
//! The scheduler places jobs after every event, with its lock. With many waiting jobs this takes
//! long, so it ends with the last job that may start now ([`Extent::MayStart`]). The jobs behind it
//! are placed when a client asks for their predicted starts.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use super::JobId;
use super::device_set::DeviceSet;
use super::options::Policy;
use super::placing::{HostMemory, Load, Place, ScheduledStart, Timeline, Waiting};

/// Time of waiting that is worth one point of priority.
pub(super) const AGING: Duration = Duration::from_secs(1);

/// Durations for which a job has lacked only host memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Starvation {
    pub(super) waited: Duration,
    /// Duration for which nothing is known to give that memory back; zero if something is.
    pub(super) unsatisfiable: Duration,
}

/// Place of a job in the line of its tenant, least first: the time of its submission in
/// nanoseconds, earlier by the time that its priority is worth. All jobs age alike, so the order
/// does not change with time.
type Turn = (i128, JobId);

impl Waiting {
    fn turn(&self) -> Turn {
        let nanos = |time: Duration| time.as_nanos() as i128;
        (nanos(self.submitted) - i128::from(self.priority) * nanos(AGING), self.id)
    }
}

#[derive(Debug)]
struct Tenant {
    weight: f64,
    /// Seconds of device time over weight.
    pass: f64,
    /// Jobs that wait or run.
    active: usize,
    /// Jobs that wait.
    line: BTreeSet<Turn>,
}

/// Part of the waiting jobs that a schedule has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// Ends with the last job that may start now. All jobs behind it wait for devices.
    MayStart,
    All,
}

/// Scheduled starts of waiting jobs, in order. Jobs with no reason to wait should start.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    pub(super) starts: Vec<ScheduledStart>,
    /// True if every waiting job was placed.
    pub(super) is_whole: bool,
}

/// Waiting jobs, and the device time of their tenants.
#[derive(Debug, Default)]
pub(super) struct Queue {
    policy: Policy,
    waiting: BTreeMap<JobId, Waiting>,
    tenants: HashMap<String, Tenant>,
    weights: HashMap<String, f64>,
    parked: Parked,
}

/// Jobs that lack memory and book no slot for the time being.
#[derive(Debug, Default)]
struct Parked {
    jobs: HashSet<JobId>,
    /// Least bytes that they lack of each device.
    devices: HashMap<usize, u64>,
}

impl Parked {
    /// True if the job is parked, or lacks as much memory wherever it may run.
    fn has(&self, job: &Waiting, loads: &[Load]) -> bool {
        let lacks = |place: &Place, device: usize, least_bytes: u64| match &loads[device] {
            Load::InService { free_bytes, .. } => {
                let needed_bytes = place.shared_bytes.unwrap_or(place.memory_bytes);
                needed_bytes.saturating_sub(*free_bytes) >= least_bytes
            }
            Load::Lost => false,
        };
        let waits = |place: &Place| {
            place
                .devices
                .iter()
                .any(|device| self.devices.get(&device).is_some_and(|&least| lacks(place, device, least)))
        };
        self.jobs.contains(&job.id) || !self.devices.is_empty() && job.places.iter().all(waits)
    }
}

impl Queue {
    /// Creates an empty queue.
    pub(super) fn new(policy: Policy) -> Self {
        Self { policy, ..Self::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the number of a tenant's jobs that wait or run.
    pub(super) fn active(&self, tenant: &str) -> usize {
        self.tenants.get(tenant).map_or(0, |tenant| tenant.active)
    }

    /// Returns the bytes of host memory that the next `jobs` will ask for, each at the place where
    /// it takes least time.
    pub(super) fn next_host_bytes(&self, jobs: usize) -> u64 {
        let (mut turns, mut sum) = (self.turns(), 0u64);
        let mut add = |job: &Waiting| {
            let fastest = job.places.iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds));
            sum = sum.saturating_add(fastest.map_or(0, |place| place.host.bytes));
            fastest.map_or(0.0, Place::device_seconds)
        };
        for _ in 0..jobs {
            turns.take(&mut add);
        }
        sum
    }

    /// True if a waiting job may run on the device.
    pub(super) fn wants(&self, device: usize) -> bool {
        let is_place = |place: &Place| place.devices.iter().any(|member| member == device);
        self.waiting.values().any(|job| job.places.iter().any(is_place))
    }

    /// Notes that a job lacks only host memory, and returns for how long.
    pub(super) fn note_starved(&mut self, id: JobId, now: Duration, comes_back: bool) -> Option<Starvation> {
        let job = self.waiting.get_mut(&id)?;
        let waited = now.saturating_sub(*job.starved_since.get_or_insert(now));
        if comes_back {
            job.unsatisfiable_since = None;
            return Some(Starvation { waited, unsatisfiable: Duration::ZERO });
        }
        Some(Starvation { waited, unsatisfiable: now.saturating_sub(*job.unsatisfiable_since.get_or_insert(now)) })
    }

    /// Sets a tenant's share relative to other tenants. The default is 1.
    pub(super) fn set_weight(&mut self, tenant: &str, weight: f64) {
        self.weights.insert(tenant.into(), weight);
        if let Some(known) = self.tenants.get_mut(tenant) {
            known.weight = weight;
        }
    }

    /// Returns a tenant's share relative to other tenants.
    pub(super) fn weight(&self, tenant: &str) -> f64 {
        self.weights.get(tenant).copied().unwrap_or(1.0)
    }

    pub(super) fn push(&mut self, job: Waiting) {
        self.activate(&job.tenant);
        self.insert(job);
    }

    /// Puts a started job back, and refunds the time that its tenant was charged.
    pub(super) fn push_back(&mut self, job: Waiting, charged_seconds: f64) {
        if let Some(tenant) = self.tenants.get_mut(&job.tenant) {
            tenant.pass -= charged_seconds / tenant.weight;
        }
        self.insert(Waiting { turn_wait: None, ..job });
    }

    fn insert(&mut self, job: Waiting) {
        let tenant = self.tenants.get_mut(&job.tenant).expect("the tenant of a job is active");
        tenant.line.insert(job.turn());
        self.waiting.insert(job.id, job);
    }

    /// Takes a job out of its line.
    fn take(&mut self, id: JobId) -> Option<Waiting> {
        let job = self.waiting.remove(&id)?;
        if let Some(tenant) = self.tenants.get_mut(&job.tenant) {
            tenant.line.remove(&job.turn());
        }
        Some(job)
    }

    /// True if the job waits.
    pub(super) fn contains(&self, id: JobId) -> bool {
        self.waiting.contains_key(&id)
    }

    /// Replaces the places of a job, if it waits.
    pub(super) fn replace_places(&mut self, id: JobId, places: &[Place]) {
        if let Some(job) = self.waiting.get_mut(&id) {
            job.places = places.to_vec();
        }
    }

    /// Takes the places on a device away from a job that waits. Returns `false`, and takes none, if
    /// the job has no other place.
    pub(super) fn leave_device(&mut self, id: JobId, device: usize) -> bool {
        let is_elsewhere = |place: &Place| place.devices.iter().all(|member| member != device);
        let Some(job) = self.waiting.get_mut(&id).filter(|job| job.places.iter().any(is_elsewhere)) else {
            return false;
        };
        job.places.retain(is_elsewhere);
        true
    }

    /// Lets a waiting job book no slot until [`unpark`](Self::unpark), and no other job that lacks
    /// as much memory. Returns `false` if that is done for enough jobs.
    pub(super) fn park(&mut self, id: JobId, devices: &DeviceSet, missing_bytes: u64) -> bool {
        // Each takes another schedule.
        const PARKED_MAX: usize = 16;
        for device in devices.iter() {
            let least_bytes = self.parked.devices.entry(device).or_insert(missing_bytes);
            *least_bytes = missing_bytes.min(*least_bytes);
        }
        self.parked.jobs.len() < PARKED_MAX && self.parked.jobs.insert(id)
    }

    pub(super) fn unpark(&mut self) {
        self.parked = Parked::default();
    }

    /// Returns the time for which a job has waited; zero if it does not wait.
    pub(super) fn waited(&self, id: JobId, now: Duration) -> Duration {
        self.waiting.get(&id).map_or(Duration::ZERO, |job| now.saturating_sub(job.submitted))
    }

    /// Notes that a job waits for the turns of `ahead` other jobs at its prepared place. `None`: it
    /// waits for no turn. Joins with one build side are alike, so each is expected to take as long
    /// as this job.
    pub(super) fn set_turns_ahead(&mut self, id: JobId, ahead: Option<usize>) {
        if let Some(job) = self.waiting.get_mut(&id) {
            let seconds = job.places.iter().find(|place| place.is_prepared).map_or(0.0, |place| place.seconds);
            let wait = |ahead| Duration::try_from_secs_f64(seconds * ahead as f64).unwrap_or(Duration::MAX);
            job.turn_wait = ahead.map(wait);
        }
    }

    /// Removes the places of a job where its build side was prepared, if the job waits. Without
    /// such a place, it waits for no turn.
    pub(super) fn remove_prepared_places(&mut self, id: JobId) {
        if let Some(job) = self.waiting.get_mut(&id) {
            job.places.retain(|place| !place.is_prepared);
            job.turn_wait = None;
        }
    }

    /// Removes a job that will not run.
    pub(super) fn remove(&mut self, id: JobId) -> Option<Waiting> {
        let job = self.take(id)?;
        self.deactivate(&job.tenant, 0.0);
        Some(job)
    }

    /// Removes the jobs that have no place left among `loads`.
    pub(super) fn remove_unplaceable(&mut self, loads: &[Load]) -> Vec<Waiting> {
        let unplaceable = |job: &Waiting| {
            job.places.iter().all(|place| place.devices.iter().any(|device| loads[device] == Load::Lost))
        };
        if !loads.contains(&Load::Lost) {
            return Vec::new();
        }
        let ids: Vec<JobId> = self.waiting.values().filter(|job| unplaceable(job)).map(|job| job.id).collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Removes a job that starts, and charges its tenant for the predicted time of all its devices.
    pub(super) fn start(&mut self, id: JobId, seconds: f64) -> Option<Waiting> {
        let job = self.take(id)?;
        if let Some(tenant) = self.tenants.get_mut(&job.tenant) {
            tenant.pass += seconds / tenant.weight;
        }
        Some(job)
    }

    /// Records the end of a started job, and charges its tenant for time beyond the prediction.
    pub(super) fn end(&mut self, tenant: &str, predicted_seconds: f64, seconds: f64) {
        self.deactivate(tenant, seconds - predicted_seconds);
    }

    /// Schedules the waiting jobs, in order: all, or those up to the last one that may start now.
    pub(super) fn schedule(&self, now: Duration, loads: &[Load], host: HostMemory<'_>, extent: Extent) -> Schedule {
        let mut timeline = Timeline::new(now, loads, self.waiting.len(), host, self.policy);
        let (mut turns, mut starts, mut placed) = (self.turns(), Vec::new(), HashSet::new());
        // Each job that is placed leaves fewer idle slots. So a job that cannot start now cannot
        // start later in this walk, and is looked at once.
        let mut unplaced = self.waiting.values().peekable();
        loop {
            let goes_on = extent == Extent::All
                || timeline.has_idle_slot() && {
                    while unplaced.next_if(|job| placed.contains(&job.id) || !timeline.may_start(job)).is_some() {}
                    unplaced.peek().is_some()
                };
            let place = |job: &Waiting| {
                placed.insert(job.id);
                if self.parked.has(job, loads) {
                    return 0.0;
                }
                let scheduled = timeline.place(job);
                let seconds = scheduled.as_ref().map_or(0.0, ScheduledStart::seconds);
                starts.extend(scheduled);
                seconds
            };
            if !goes_on || !turns.take(place) {
                return Schedule { starts, is_whole: placed.len() == self.waiting.len() };
            }
        }
    }

    /// Returns the waiting jobs in the order of their turns.
    fn turns<'a>(&'a self) -> Turns<'a> {
        let of_tenant = |tenant: &'a Tenant| -> Option<Line<'a>> {
            let jobs = tenant.line.iter().map(|(_, id)| &self.waiting[id]);
            Line::new(tenant.pass, tenant.weight, Box::new(jobs))
        };
        let lines = match self.policy {
            Policy::Fair => self.tenants.values().filter_map(of_tenant).collect(),
            // One line of all tenants, the first to come first.
            Policy::Greedy => Line::new(0.0, 1.0, Box::new(self.waiting.values())).into_iter().collect(),
        };
        Turns { lines }
    }

    fn activate(&mut self, tenant: &str) {
        let (floor, weight) = (self.floor().unwrap_or(0.0), self.weight(tenant));
        let known = self.tenants.entry(tenant.into()).or_insert_with(|| Tenant {
            weight,
            pass: floor,
            active: 0,
            line: BTreeSet::new(),
        });
        if known.active == 0 {
            known.pass = known.pass.max(floor);
        }
        known.active += 1;
    }

    fn deactivate(&mut self, tenant: &str, extra_seconds: f64) {
        if let Some(known) = self.tenants.get_mut(tenant) {
            known.pass += extra_seconds / known.weight;
            known.active = known.active.saturating_sub(1);
        }
        // A tenant that owes nothing to active tenants is forgotten. If no tenant is active, all
        // are forgotten.
        let floor = self.floor().unwrap_or(f64::INFINITY);
        self.tenants.retain(|_, tenant| tenant.active > 0 || tenant.pass > floor);
    }

    /// Returns the least pass of the active tenants; `None` if there is none.
    fn floor(&self) -> Option<f64> {
        let active = self.tenants.values().filter(|tenant| tenant.active > 0);
        active.map(|tenant| tenant.pass).min_by(f64::total_cmp)
    }
}

/// Waiting jobs that have yet to take their turns.
struct Turns<'a> {
    lines: Vec<Line<'a>>,
}

impl<'a> Turns<'a> {
    /// Gives the next job to `charge`, which returns the seconds of device time that its tenant is
    /// charged. Returns `false` if no job is left.
    fn take(&mut self, charge: impl FnOnce(&'a Waiting) -> f64) -> bool {
        let next = (0..self.lines.len()).min_by(|&a, &b| self.lines[a].compare(&self.lines[b]));
        let Some(next) = next else { return false };
        let line = &mut self.lines[next];
        line.pass += charge(line.first) / line.weight;
        match line.rest.next() {
            Some(job) => line.first = job,
            None => {
                self.lines.swap_remove(next);
            }
        }
        true
    }
}

/// Jobs of a tenant that have yet to take their turns.
struct Line<'a> {
    pass: f64,
    weight: f64,
    first: &'a Waiting,
    rest: Box<dyn Iterator<Item = &'a Waiting> + 'a>,
}

impl<'a> Line<'a> {
    /// Returns the line of the given jobs; `None` if there is no job.
    fn new(pass: f64, weight: f64, mut rest: Box<dyn Iterator<Item = &'a Waiting> + 'a>) -> Option<Self> {
        Some(Self { pass, weight, first: rest.next()?, rest })
    }

    /// Compares by pass, least first. Among equals, the tenant with the earlier first job is first.
    fn compare(&self, other: &Self) -> Ordering {
        self.pass.total_cmp(&other.pass).then_with(|| self.first.id.cmp(&other.first.id))
    }
}

#[cfg(test)]
mod tests;
