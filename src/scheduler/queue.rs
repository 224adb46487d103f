//! Queue: decides which job runs next, and where. A plain data structure, without threads and
//! without a clock.
//!
//! Tenants take turns by stride scheduling (Waldspurger and Weihl 1995). Each tenant has a *pass*:
//! the device time it was given over its weight. The tenant with the smallest pass is next. A
//! tenant that comes back starts with the smallest pass of the active tenants, so that no tenant
//! saves up turns. Within a tenant, jobs go by priority plus age: one point per [`AGING_SECONDS`]
//! of waiting. So every job's turn comes. Priority orders the jobs of one tenant; weight orders
//! tenants.
//!
//! In that order, each job is placed on the devices where it is predicted to finish first. Running
//! jobs and jobs placed earlier count (list scheduling by earliest finish; see
//! [`placing`](super::placing)). If that device is busy, the job waits for it. Later jobs may use
//! another device meanwhile, but overtake on this one only where they are predicted to end well
//! before the job starts. So small jobs do not starve a large job. A large job does not hold up
//! small ones on devices that it does not use.

use std::cmp::{Ordering, Reverse};
use std::collections::HashMap;
use std::time::Duration;

use super::JobId;
use super::options::Policy;
use super::placing::{HostMemory, Load, Place, ScheduledStart, Timeline, Waiting};

/// Seconds of waiting that are worth one point of priority.
pub(super) const AGING_SECONDS: f64 = 1.0;

/// Durations for which a job has lacked only host memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Starvation {
    pub(super) waited: Duration,
    /// Duration for which nothing is known to give that memory back; zero if something is.
    pub(super) unsatisfiable: Duration,
}

#[derive(Debug)]
struct Tenant {
    weight: f64,
    /// Seconds of device time over weight.
    pass: f64,
    active: usize,
}

/// Waiting jobs, and the device time of their tenants.
#[derive(Debug, Default)]
pub(super) struct Queue {
    policy: Policy,
    waiting: Vec<Waiting>,
    tenants: HashMap<String, Tenant>,
    weights: HashMap<String, f64>,
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

    /// Returns the bytes of host memory that all waiting jobs will ask for, each on the device
    /// where it takes most.
    pub(super) fn host_bytes(&self) -> u64 {
        let most = |job: &Waiting| job.places.iter().map(|place| place.host.bytes).max().unwrap_or(0);
        self.waiting.iter().fold(0, |sum, job| sum.saturating_add(most(job)))
    }

    /// Notes that a job lacks only host memory, and returns for how long.
    pub(super) fn note_starved(&mut self, id: JobId, now: Duration, comes_back: bool) -> Option<Starvation> {
        let job = self.waiting.iter_mut().find(|job| job.id == id)?;
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
        self.waiting.push(job);
    }

    /// Puts a started job back, and refunds the time that its tenant was charged.
    pub(super) fn push_back(&mut self, job: Waiting, charged_seconds: f64) {
        if let Some(tenant) = self.tenants.get_mut(&job.tenant) {
            tenant.pass -= charged_seconds / tenant.weight;
        }
        self.waiting.push(job);
    }

    /// Returns the waiting jobs, in no order.
    pub(super) fn ids(&self) -> impl Iterator<Item = JobId> + '_ {
        self.waiting.iter().map(|job| job.id)
    }

    /// Replaces the places of a job, if it waits.
    pub(super) fn replace_places(&mut self, id: JobId, places: &[Place]) {
        if let Some(job) = self.waiting.iter_mut().find(|job| job.id == id) {
            job.places = places.to_vec();
        }
    }

    /// Removes a job that will not run.
    pub(super) fn remove(&mut self, id: JobId) -> Option<Waiting> {
        let at = self.waiting.iter().position(|job| job.id == id)?;
        let job = self.waiting.swap_remove(at);
        self.deactivate(&job.tenant, 0.0);
        Some(job)
    }

    /// Removes the jobs that have no place left among `loads`.
    pub(super) fn remove_unplaceable(&mut self, loads: &[Load]) -> Vec<Waiting> {
        let unplaceable = |job: &Waiting| {
            job.places.iter().all(|place| place.devices.iter().any(|device| loads[device] == Load::Lost))
        };
        let ids: Vec<JobId> = self.waiting.iter().filter(|job| unplaceable(job)).map(|job| job.id).collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Removes a job that starts, and charges its tenant for the predicted time of all its devices.
    pub(super) fn start(&mut self, id: JobId, seconds: f64) -> Option<Waiting> {
        let at = self.waiting.iter().position(|job| job.id == id)?;
        let job = self.waiting.swap_remove(at);
        if let Some(tenant) = self.tenants.get_mut(&job.tenant) {
            tenant.pass += seconds / tenant.weight;
        }
        Some(job)
    }

    /// Records the end of a started job, and charges its tenant for time beyond the prediction.
    pub(super) fn end(&mut self, tenant: &str, predicted_seconds: f64, seconds: f64) {
        self.deactivate(tenant, seconds - predicted_seconds);
    }

    /// Returns every waiting job's scheduled start, in order. Jobs with no reason to wait should
    /// start.
    pub(super) fn schedule(&self, now: Duration, loads: &[Load], host: HostMemory) -> Vec<ScheduledStart> {
        let mut timeline = Timeline::new(now, loads, self.waiting.len(), host, self.policy);
        let mut lines = match self.policy {
            Policy::Fair => self.lines(now),
            Policy::Greedy => self.line_of_all(),
        };
        let mut schedule = Vec::with_capacity(self.waiting.len());
        while let Some(line) = lines.iter_mut().min_by(|a, b| a.compare(b)) {
            let Some(job) = line.jobs.pop() else { break };
            let scheduled = timeline.place(job);
            line.pass += scheduled.as_ref().map_or(0.0, ScheduledStart::seconds) / line.weight;
            schedule.extend(scheduled);
            lines.retain(|line| !line.jobs.is_empty());
        }
        schedule
    }

    /// Returns the waiting jobs by tenant, the first to start at the end.
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

    /// Returns the waiting jobs of all tenants in one line, the first to come at the end.
    fn line_of_all(&self) -> Vec<Line<'_>> {
        let mut jobs: Vec<&Waiting> = self.waiting.iter().collect();
        jobs.sort_by_key(|job| Reverse(job.id));
        vec![Line { pass: 0.0, weight: 1.0, jobs }]
    }

    fn activate(&mut self, tenant: &str) {
        let (floor, weight) = (self.floor().unwrap_or(0.0), self.weight(tenant));
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

/// Jobs of a tenant that are not placed yet.
struct Line<'a> {
    pass: f64,
    weight: f64,
    jobs: Vec<&'a Waiting>,
}

impl Line<'_> {
    /// Compares by pass, least first. Among equals, the tenant with the earlier first job is first.
    fn compare(&self, other: &Self) -> Ordering {
        let first = |line: &Self| line.jobs.last().map(|job| job.id);
        self.pass.total_cmp(&other.pass).then_with(|| first(self).cmp(&first(other)))
    }
}

#[cfg(test)]
mod tests;
