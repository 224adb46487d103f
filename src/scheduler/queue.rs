//! Which job runs next, and where: a plain data structure, without threads and without a clock of its own.
//!
//! Tenants take turns by stride scheduling (Waldspurger and Weihl 1995): each has a *pass*, the device time it was given
//! over its weight, and whoever has the least is next. A tenant that comes back starts at the least pass of those that are
//! active, so that nobody saves up turns. Within a tenant, jobs go by priority plus age: one point per
//! [`AGING_SECONDS`] of waiting, so that every job's turn comes. Priority is a matter between the jobs of one tenant; weight is
//! the matter between tenants.
//!
//! In that order, each job is placed on the device where it is predicted to finish first, counting what runs and what was
//! placed before it (list scheduling by earliest finish; see [`placing`](super::placing)). If that device is busy the job
//! waits for it; what comes later may use another device meanwhile, but not push ahead on this one. So a large job is not
//! starved by small ones, nor are small ones held up by a large one on devices that it does not use.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::time::Duration;

use super::JobId;
use super::placing::{Bookings, HostMemory, Load, Place, Turn};

/// Seconds of waiting that are worth one point of priority.
pub(super) const AGING_SECONDS: f64 = 1.0;

/// A job that waits.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) id: JobId,
    pub(super) tenant: String,
    pub(super) priority: i32,
    pub(super) submitted: Duration,
    /// Where it may run.
    pub(super) places: Vec<Place>,
    /// Since when its turn has come but for host memory.
    pub(super) short_since: Option<Duration>,
    /// Since when nothing is known to give that memory back.
    pub(super) hopeless_since: Option<Duration>,
}

/// For how long a job's turn has come but for host memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Short {
    pub(super) waited: Duration,
    /// For how long nothing is known to give that memory back; zero when something is.
    pub(super) hopeless: Duration,
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

    /// Bytes of host memory that all who wait will ask for, each where it takes the most.
    pub(super) fn host_bytes(&self) -> u64 {
        let most = |job: &Waiting| job.places.iter().map(|place| place.host.bytes).max().unwrap_or(0);
        self.waiting.iter().fold(0, |sum, job| sum.saturating_add(most(job)))
    }

    /// Notes that a job's turn has come but for host memory, and answers for how long that has been so.
    pub(super) fn note_short(&mut self, id: JobId, now: Duration, comes_back: bool) -> Option<Short> {
        let job = self.waiting.iter_mut().find(|job| job.id == id)?;
        let waited = now.saturating_sub(*job.short_since.get_or_insert(now));
        if comes_back {
            job.hopeless_since = None;
            return Some(Short { waited, hopeless: Duration::ZERO });
        }
        Some(Short { waited, hopeless: now.saturating_sub(*job.hopeless_since.get_or_insert(now)) })
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

    /// Every waiting job's turn, in order. Those that wait for nothing should start.
    pub(super) fn turns(&self, now: Duration, loads: &[Load], host: HostMemory) -> Vec<Turn> {
        let mut bookings = Bookings::new(now, loads, host);
        let mut lines = self.lines(now);
        let mut turns = Vec::with_capacity(self.waiting.len());
        while let Some(line) = lines.iter_mut().min_by(|a, b| a.compare(b)) {
            let Some(job) = line.jobs.pop() else { break };
            let turn = bookings.place(job);
            line.pass += turn.as_ref().map_or(0.0, Turn::seconds) / line.weight;
            turns.extend(turn);
            lines.retain(|line| !line.jobs.is_empty());
        }
        turns
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

#[cfg(test)]
mod tests;
