//! Which job runs next, and where: a plain data structure, without threads and without a clock of its own.
//!
//! Tenants take turns by stride scheduling (Waldspurger and Weihl 1995): each has a *pass*, the device time it was given
//! over its weight, and whoever has the least is next. A tenant that comes back starts at the least pass of those that are
//! active, so that nobody saves up turns. Within a tenant, jobs go by priority plus age: one point per
//! [`AGING_SECONDS`] of waiting, so that every job's turn comes. Priority is a matter between the jobs of one tenant; weight is
//! the matter between tenants.
//!
//! In that order, each job is placed on the device where it is predicted to finish first, counting what runs and what was
//! placed before it (list scheduling by earliest finish). If that device is busy the job waits for it; what comes later may use
//! another device meanwhile, but not push ahead on this one. So a large job is not starved by small ones, nor are small ones
//! held up by a large one on devices that it does not use.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::time::Duration;

use super::JobId;

/// Seconds of waiting that are worth one point of priority.
pub(super) const AGING_SECONDS: f64 = 1.0;

/// How long a device that is idle but short of memory is looked at again.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// A job that waits.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) id: JobId,
    pub(super) tenant: String,
    pub(super) priority: i32,
    pub(super) submitted: Duration,
    /// Where it may run.
    pub(super) places: Vec<Place>,
}

/// A device that a job may run on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Place {
    /// Index of the device.
    pub(super) device: usize,
    /// Predicted seconds there.
    pub(super) seconds: f64,
    /// Bytes of device memory that must be free for it to start.
    pub(super) memory_bytes: u64,
}

/// What a device is doing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Load {
    /// Nothing; that many bytes of its memory are free.
    Idle { free_bytes: u64 },
    /// A job that is predicted to end then.
    Busy { until: Duration },
    /// It is out of service.
    Lost,
}

/// A job's turn as it is predicted. Its index among the turns is its position in the queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Turn {
    pub(super) id: JobId,
    pub(super) place: Place,
    /// When it starts.
    pub(super) start: Duration,
    /// Whether it starts right now.
    pub(super) now: bool,
}

#[derive(Debug)]
struct Tenant {
    weight: f64,
    /// Seconds of device time over weight.
    pass: f64,
    /// Jobs that wait or run.
    active: usize,
}

/// Jobs that wait, and what their tenants have had.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: Vec<Waiting>,
    tenants: HashMap<String, Tenant>,
    weights: HashMap<String, f64>,
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Jobs of a tenant that wait or run.
    pub(super) fn active(&self, tenant: &str) -> usize {
        self.tenants.get(tenant).map_or(0, |tenant| tenant.active)
    }

    /// Sets a tenant's share relative to others'; 1 where nothing is set.
    pub(super) fn set_weight(&mut self, tenant: &str, weight: f64) {
        self.weights.insert(tenant.into(), weight);
        if let Some(known) = self.tenants.get_mut(tenant) {
            known.weight = weight;
        }
    }

    pub(super) fn push(&mut self, job: Waiting) {
        self.activate(&job.tenant);
        self.waiting.push(job);
    }

    /// Puts a job back whose device was lost; what it was charged is given back.
    pub(super) fn push_back(&mut self, job: Waiting, charged_seconds: f64) {
        if let Some(tenant) = self.tenants.get_mut(&job.tenant) {
            tenant.pass -= charged_seconds / tenant.weight;
        }
        self.waiting.push(job);
    }

    /// Takes a job out because it will not run.
    pub(super) fn remove(&mut self, id: JobId) -> Option<Waiting> {
        let at = self.waiting.iter().position(|job| job.id == id)?;
        let job = self.waiting.swap_remove(at);
        self.deactivate(&job.tenant, 0.0);
        Some(job)
    }

    /// Takes out the jobs that have no place left among `loads`.
    pub(super) fn remove_homeless(&mut self, loads: &[Load]) -> Vec<Waiting> {
        let homeless = |job: &Waiting| job.places.iter().all(|place| loads[place.device] == Load::Lost);
        let ids: Vec<JobId> = self.waiting.iter().filter(|job| homeless(job)).map(|job| job.id).collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Takes a job out because it starts, and charges its tenant for what it is predicted to take.
    pub(super) fn start(&mut self, id: JobId, seconds: f64) -> Option<Waiting> {
        let at = self.waiting.iter().position(|job| job.id == id)?;
        let job = self.waiting.swap_remove(at);
        if let Some(tenant) = self.tenants.get_mut(&job.tenant) {
            tenant.pass += seconds / tenant.weight;
        }
        Some(job)
    }

    /// Says that a job which started has ended, and charges what it took beyond the prediction.
    pub(super) fn end(&mut self, tenant: &str, predicted_seconds: f64, seconds: f64) {
        self.deactivate(tenant, seconds - predicted_seconds);
    }

    /// Every waiting job's turn, in order. Those with `now` should start.
    pub(super) fn turns(&self, now: Duration, loads: &[Load]) -> Vec<Turn> {
        let mut free_at: Vec<Option<Duration>> = loads.iter().map(|load| free_at(load, now)).collect();
        let mut lines = self.lines(now);
        let mut turns = Vec::with_capacity(self.waiting.len());
        while let Some(line) = lines.iter_mut().min_by(|a, b| a.compare(b)) {
            let Some(job) = line.jobs.pop() else { break };
            let seconds = match self.place(job, now, loads, &mut free_at) {
                Some(turn) => {
                    turns.push(turn);
                    turn.place.seconds
                }
                None => 0.0,
            };
            line.pass += seconds / line.weight;
            lines.retain(|line| !line.jobs.is_empty());
        }
        turns
    }

    /// Where a job is predicted to finish first; books the device for it.
    fn place(&self, job: &Waiting, now: Duration, loads: &[Load], free_at: &mut [Option<Duration>]) -> Option<Turn> {
        let start_at = |place: &Place| -> Option<Duration> {
            let free = free_at[place.device]?.max(now);
            // An idle device whose memory is not free (yet) is kept for the job all the same.
            let short = matches!(loads[place.device], Load::Idle { free_bytes } if free_bytes < place.memory_bytes);
            Some(if short { free.max(now + RETRY) } else { free })
        };
        let starts = job.places.iter().filter_map(|place| Some((*place, start_at(place)?)));
        let finish = |(place, start): &(Place, Duration)| start.as_secs_f64() + place.seconds;
        let (place, start) = starts.min_by(|a, b| finish(a).total_cmp(&finish(b)))?;
        let run = Duration::try_from_secs_f64(place.seconds.max(1e-6)).unwrap_or(Duration::from_secs(u32::MAX.into()));
        free_at[place.device] = Some(start.saturating_add(run));
        let is_idle = matches!(loads[place.device], Load::Idle { .. });
        Some(Turn { id: job.id, place, start, now: is_idle && start <= now })
    }

    /// Waiting jobs by tenant, those to start first at the end.
    fn lines(&self, now: Duration) -> Vec<Line<'_>> {
        let mut by_tenant: HashMap<&str, Vec<&Waiting>> = HashMap::new();
        for job in &self.waiting {
            by_tenant.entry(&job.tenant).or_default().push(job);
        }
        let urgency =
            |job: &Waiting| f64::from(job.priority) + now.saturating_sub(job.submitted).as_secs_f64() / AGING_SECONDS;
        let mut lines = Vec::with_capacity(by_tenant.len());
        for (tenant, mut jobs) in by_tenant {
            jobs.sort_by(|a, b| urgency(a).total_cmp(&urgency(b)).then(b.id.cmp(&a.id)));
            let tenant = &self.tenants[tenant];
            lines.push(Line { pass: tenant.pass, weight: tenant.weight, jobs });
        }
        lines
    }

    fn activate(&mut self, tenant: &str) {
        let floor = self.floor().unwrap_or(0.0);
        let weight = self.weights.get(tenant).copied().unwrap_or(1.0);
        let known = self.tenants.entry(tenant.into()).or_insert_with(|| Tenant { weight, pass: floor, active: 0 });
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
        // A tenant that owes nothing to those who are active is forgotten, so when nobody is, all are.
        let floor = self.floor().unwrap_or(f64::INFINITY);
        self.tenants.retain(|_, tenant| tenant.active > 0 || tenant.pass > floor);
    }

    /// The least pass of the tenants that are active; `None` when none is.
    fn floor(&self) -> Option<f64> {
        let active = self.tenants.values().filter(|tenant| tenant.active > 0);
        active.map(|tenant| tenant.pass).min_by(f64::total_cmp)
    }
}

/// A tenant's jobs on their way to places.
struct Line<'a> {
    pass: f64,
    weight: f64,
    jobs: Vec<&'a Waiting>,
}

impl Line<'_> {
    /// Least pass first; among equals, whose first job came first.
    fn compare(&self, other: &Self) -> Ordering {
        let first = |line: &Self| line.jobs.last().map(|job| job.id);
        self.pass.total_cmp(&other.pass).then_with(|| first(self).cmp(&first(other)))
    }
}

/// When a device is free; `None` when never.
fn free_at(load: &Load, now: Duration) -> Option<Duration> {
    match load {
        Load::Idle { .. } => Some(now),
        Load::Busy { until } => Some((*until).max(now)),
        Load::Lost => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Load = Load::Idle { free_bytes: 1 << 30 };

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// A job of that many seconds on every one of `devices` devices.
    fn job(id: u64, tenant: &str, priority: i32, run: f64, devices: usize) -> Waiting {
        let places = (0..devices).map(|device| Place { device, seconds: run, memory_bytes: 1 }).collect();
        Waiting { id: JobId(id), tenant: tenant.into(), priority, submitted: Duration::ZERO, places }
    }

    fn order(queue: &Queue, now: Duration, loads: &[Load]) -> Vec<u64> {
        queue.turns(now, loads).iter().map(|turn| turn.id.0).collect()
    }

    /// Runs everything on one device, one job after the other, and answers the order.
    fn run_all(queue: &mut Queue, mut now: Duration) -> Vec<u64> {
        let mut order = Vec::new();
        while let Some(turn) = queue.turns(now, &[IDLE]).first().copied() {
            assert!(turn.now, "the first turn starts on an idle device");
            let job = queue.start(turn.id, turn.place.seconds).unwrap();
            now += seconds(turn.place.seconds);
            queue.end(&job.tenant, turn.place.seconds, turn.place.seconds);
            order.push(job.id.0);
        }
        order
    }

    #[test]
    fn a_tenants_jobs_go_by_priority_and_then_by_age() {
        let mut queue = Queue::default();
        for (id, priority) in [(1, 0), (2, 5), (3, -5), (4, 5)] {
            queue.push(job(id, "a", priority, 1.0, 1));
        }
        assert_eq!(order(&queue, Duration::ZERO, &[IDLE]), [2, 4, 1, 3]);
    }

    #[test]
    fn waiting_outweighs_priority_in_the_end() {
        let mut queue = Queue::default();
        queue.push(job(1, "a", -100, 1.0, 1));
        // Jobs of the highest priority keep coming; each is younger than the one that waits.
        let mut now = Duration::ZERO;
        let mut id = 1;
        loop {
            id += 1;
            queue.push(Waiting { submitted: now, ..job(id, "a", 100, 1.0, 1) });
            let first = queue.turns(now, &[IDLE])[0];
            queue.start(first.id, 1.0).unwrap();
            queue.end("a", 1.0, 1.0);
            if first.id == JobId(1) {
                break;
            }
            now += seconds(1.0);
            assert!(now < seconds(300.0), "the job of low priority starves");
        }
        assert!(now >= seconds(199.0), "200 points of priority were worth {now:?} only");
    }

    #[test]
    fn tenants_take_turns_whatever_they_have_submitted() {
        let mut queue = Queue::default();
        for id in 1..=6 {
            queue.push(job(id, "flood", 100, 1.0, 1));
        }
        queue.push(job(7, "calm", -100, 1.0, 1));
        queue.push(job(8, "calm", -100, 1.0, 1));
        assert_eq!(run_all(&mut queue, Duration::ZERO), [1, 7, 2, 8, 3, 4, 5, 6]);
    }

    #[test]
    fn shares_of_device_time_follow_weights() {
        let mut queue = Queue::default();
        queue.set_weight("heavy", 3.0);
        for id in 1..=40 {
            queue.push(job(id, "heavy", 0, 1.0, 1));
            queue.push(job(100 + id, "light", 0, 1.0, 1));
        }
        let first_16 = &run_all(&mut queue, Duration::ZERO)[..16];
        assert_eq!(first_16.iter().filter(|id| **id < 100).count(), 12, "{first_16:?}");
    }

    #[test]
    fn shares_count_time_and_not_jobs() {
        let mut queue = Queue::default();
        for id in 1..=8 {
            queue.push(job(id, "long", 0, 4.0, 1));
        }
        for id in 101..=132 {
            queue.push(job(id, "short", 0, 1.0, 1));
        }
        let order = run_all(&mut queue, Duration::ZERO);
        // By the time half of the long jobs are done, so is half of the short ones.
        let fourth = order.iter().position(|id| *id == 4).unwrap();
        let short = order[..=fourth].iter().filter(|id| **id > 100).count();
        assert!((12..=20).contains(&short), "{short} of 32 short jobs beside 4 of 8 long ones: {order:?}");
    }

    #[test]
    fn nobody_saves_up_turns_by_being_away() {
        let mut queue = Queue::default();
        for id in 1..=20 {
            queue.push(job(id, "always", 0, 1.0, 1));
        }
        for _ in 0..10 {
            let turn = queue.turns(Duration::ZERO, &[IDLE])[0];
            queue.start(turn.id, 1.0).unwrap();
            queue.end("always", 1.0, 1.0);
        }
        for id in 101..=110 {
            queue.push(job(id, "late", 0, 1.0, 1));
        }
        let order = run_all(&mut queue, Duration::ZERO);
        let late_among_first_six = order[..6].iter().filter(|id| **id > 100).count();
        assert_eq!(late_among_first_six, 3, "{order:?}");
    }

    #[test]
    fn a_job_that_took_longer_than_predicted_is_paid_by_its_tenant() {
        let mut queue = Queue::default();
        for id in 1..=4 {
            queue.push(job(id, "liar", 0, 1.0, 1));
        }
        for id in 101..=112 {
            queue.push(job(id, "honest", 0, 1.0, 1));
        }
        queue.start(JobId(1), 1.0).unwrap();
        queue.end("liar", 1.0, 8.0);
        let order = run_all(&mut queue, Duration::ZERO);
        assert!(order[..7].iter().all(|id| *id > 100), "{order:?}");
    }

    #[test]
    fn jobs_spread_over_idle_devices_and_their_starts_are_predicted() {
        let mut queue = Queue::default();
        for id in 1..=5 {
            queue.push(job(id, "a", 0, 2.0, 2));
        }
        let turns = queue.turns(seconds(10.0), &[IDLE, IDLE]);
        let starts: Vec<f64> = turns.iter().map(|turn| turn.start.as_secs_f64()).collect();
        assert_eq!(starts, [10.0, 10.0, 12.0, 12.0, 14.0]);
        let now: Vec<bool> = turns.iter().map(|turn| turn.now).collect();
        assert_eq!(now, [true, true, false, false, false]);
        assert_ne!(turns[0].place.device, turns[1].place.device);
    }

    #[test]
    fn a_job_waits_for_a_fast_device_when_that_is_predicted_to_be_sooner() {
        let slow_and_fast = |id: u64| {
            let place = |device, seconds| Place { device, seconds, memory_bytes: 1 };
            Waiting { places: vec![place(0, 10.0), place(1, 1.0)], ..job(id, "a", 0, 0.0, 0) }
        };
        let mut queue = Queue::default();
        queue.push(slow_and_fast(1));
        let turns = queue.turns(Duration::ZERO, &[IDLE, Load::Busy { until: seconds(3.0) }]);
        assert_eq!((turns[0].place.device, turns[0].start, turns[0].now), (1, seconds(3.0), false));
        // A later job that only the slow device can run does not have to wait for it.
        queue.push(job(2, "a", 0, 5.0, 1));
        let turns = queue.turns(Duration::ZERO, &[IDLE, Load::Busy { until: seconds(3.0) }]);
        assert_eq!((turns[1].id, turns[1].place.device, turns[1].now), (JobId(2), 0, true));
        // The longer the fast one is taken, the better looks the slow one.
        let turns = queue.turns(Duration::ZERO, &[IDLE, Load::Busy { until: seconds(30.0) }]);
        assert_eq!((turns[0].place.device, turns[0].now), (0, true));
    }

    #[test]
    fn a_large_job_keeps_its_device_until_memory_is_free() {
        let mut queue = Queue::default();
        let mut large = job(1, "a", 0, 1.0, 1);
        large.places[0].memory_bytes = 100;
        queue.push(large);
        queue.push(job(2, "a", 0, 1.0, 1));
        let turns = queue.turns(Duration::ZERO, &[Load::Idle { free_bytes: 50 }]);
        assert_eq!((turns[0].id, turns[0].now), (JobId(1), false));
        assert!(!turns[1].now, "a small job overtook a large one on its device");
        let turns = queue.turns(Duration::ZERO, &[Load::Idle { free_bytes: 100 }]);
        assert_eq!((turns[0].id, turns[0].now), (JobId(1), true));
    }

    #[test]
    fn jobs_go_elsewhere_when_a_device_is_lost_and_are_named_when_there_is_none() {
        let mut queue = Queue::default();
        queue.push(job(1, "a", 0, 1.0, 2));
        queue.push(job(2, "b", 0, 1.0, 1));
        let loads = [Load::Lost, IDLE];
        let homeless: Vec<u64> = queue.remove_homeless(&loads).iter().map(|job| job.id.0).collect();
        assert_eq!(homeless, [2]);
        let turns = queue.turns(Duration::ZERO, &loads);
        assert_eq!((turns.len(), turns[0].place.device), (1, 1));
        assert_eq!((queue.active("b"), queue.active("a")), (0, 1));
    }

    #[test]
    fn tenants_are_forgotten_once_they_owe_nothing() {
        let mut queue = Queue::default();
        // Whoever had more than one that still waits is remembered, or leaving and coming back would pay.
        queue.push(job(2001, "waits", 0, 1.0, 1));
        queue.push(job(2002, "leaves", 0, 1.0, 1));
        queue.start(JobId(2002), 1.0).unwrap();
        queue.end("leaves", 1.0, 1.0);
        queue.push(job(2003, "leaves", 0, 1.0, 1));
        assert_eq!(run_all(&mut queue, Duration::ZERO), [2001, 2003]);
        for id in 0..1000 {
            let tenant = format!("tenant {id}");
            queue.push(job(id, &tenant, 0, 1.0, 1));
            queue.start(JobId(id), 1.0).unwrap();
            queue.end(&tenant, 1.0, 1.0);
        }
        assert!(queue.tenants.is_empty(), "{} tenants are remembered", queue.tenants.len());
    }
}
