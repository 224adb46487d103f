//! Dispatch: takes a request to a job in the queue, and from there to a device, with the memory
//! that it needs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use super::admission::{Admitted, Proposed, Terms, admit, propose};
use super::ending::count_failure;
use super::feeds::{Feed, place_feed};
use super::handle::Submission;
use super::job::{Job, JobId, JobPlans, JobState, QueueForecast};
use super::job_options::JobOptions;
use super::placing::{HostMemory, Load, RunningJob, ScheduledStart, Wait, Waiting};
use super::queue::Extent;
use super::residents::ResidentUse;
use super::state::{DeviceState, Leftovers, Publishing, Running, Shared, State};
use super::trace::TracedJob;
use crate::catalog::{ArrivingRows, BackpressureLimits, Editor, EvictionPermit, ResultSpool, SpoolOptions};
use crate::device::CancelFlag;
use crate::engine::Engine;
use crate::human;
use crate::join::MESSAGE_BYTES;
use crate::memory::{Budget, Holders, Interrupt, ReservedPool, human_bytes, schema_bytes};
use crate::planner::BoundJoin;
use crate::{Error, Result};

/// Time that a job waits for host memory if no running job or lease is known to give it back. A
/// client that still reads a dropped table or result may give it back.
const UNSATISFIABLE_WAIT: Duration = Duration::from_secs(5);

/// Maximum bytes of a schema that is not counted. Jobs that wait or run are few.
const SMALL_SCHEMA_BYTES: u64 = 16 << 10;

impl Shared {
    fn admit(&self, join: BoundJoin, options: &JobOptions, interrupt: &Interrupt) -> Result<Admitted> {
        let lost = self.lost();
        admit(join, options, &self.catalog, &self.engines, self.terms(interrupt), |device| !lost[device])
    }

    /// Returns the plan that a join would run with, without a place in the queue.
    pub(super) fn propose(
        &self,
        join: BoundJoin,
        options: &JobOptions,
        owner: &str,
        interrupt: &Interrupt,
    ) -> Result<Proposed> {
        let (lost, terms) = (self.lost(), self.terms(interrupt));
        let proposed = propose(join.clone(), options, &self.catalog, &self.engines, terms, |device| !lost[device])?;
        self.propose_on_kept(proposed, &join, options, owner, terms)
    }

    /// Returns, for each device, true if it is out of service.
    fn lost(&self) -> Vec<bool> {
        self.state.lock().devices.iter().map(|device_state| device_state.lost.is_some()).collect()
    }

    fn terms<'a>(&self, interrupt: &'a Interrupt) -> Terms<'a> {
        Terms { jobs_per_device: self.options.jobs_per_device, window_bytes: self.window_bytes(), interrupt }
    }

    /// Returns the budget of tables and results.
    pub(super) fn host_budget(&self) -> &Budget {
        self.catalog.arena().budget()
    }

    /// Returns the most bytes that may accumulate of a result that is consumed as it is read. The
    /// limit is the option `window_bytes`, or an eighth of host memory if that is less. So several
    /// such results fit in memory together with their tables.
    pub(super) fn window_bytes(&self) -> u64 {
        self.options.window_bytes.min(self.host_budget().limit_bytes() / 8)
    }

    pub(super) fn submit(
        self: &Arc<Self>,
        join: BoundJoin,
        options: JobOptions,
        terms: Submission,
    ) -> Result<Arc<Job>> {
        let Submission { owner, is_admin, client, interrupt: planning } = terms;
        self.check_room(&self.state.lock(), &owner)?;
        // Planning takes long, so it is done without the lock.
        let mut admitted = self.admit(join, &options, &planning)?;
        if let Some(streamed) = options.streamed {
            place_feed(&mut admitted, streamed, &options, &self.engines)?;
        }
        self.fit_batches(&mut admitted, &options, &owner);
        let (resident, kept) = match options.streamed {
            Some(side) => (Some((side, self.resident(&admitted, side, &options, &owner)?)), None),
            None => (None, self.place_on_kept(&mut admitted, &options, &owner, self.terms(&planning))?),
        };
        let places = std::mem::take(&mut admitted.places);
        let planned = JobPlans::of(admitted);
        let plan = planned.plan();
        let feed = resident.map(|(side, resident)| {
            let charge = self.catalog.count_as_result(self.catalog.charge(&owner));
            Feed::new(side, plan, places.clone(), resident, charge)
        });
        let charge = match schema_bytes(&plan.join.schema) {
            small if small <= SMALL_SCHEMA_BYTES => self.catalog.charge(&owner),
            _ => self.catalog.charge_schema(&owner, &plan.join.schema)?,
        };
        let charge = if options.into.is_some() { charge } else { self.catalog.count_as_result(charge) };
        // The interrupt ends planning only. From here on the job exists.
        planning.check()?;
        let mut state = self.state.lock();
        self.check_room(&state, &owner)?;
        let id = JobId(state.last_id + 1);
        let editor = Editor { tenant: owner.clone(), is_admin };
        let purpose = format!("the result of job {id}");
        let reserve = |into: &String| self.catalog.reserve_for_result(into, &editor, options.into_mode, &purpose);
        let name = options.into.as_ref().map(reserve).transpose()?;
        state.last_id = id.0;
        let cancel = CancelFlag::new();
        // A result that becomes a table is retained, because the table holds its memory.
        let retain = match options.retain_seconds {
            Some(0) if name.is_some() => self.options.retain,
            Some(seconds) => Duration::from_secs(seconds.into()),
            None => self.options.retain,
        };
        // Evicting frees nothing if a table holds the memory. A client that sets the lease of its
        // result was promised that time. A stream ends if it is left unread.
        let is_evictable = name.is_none() && options.retain_seconds.is_none() || feed.is_some();
        let (interrupt, is_device_wanted) = (cancel.interrupt(), Arc::new(AtomicBool::new(false)));
        let host_memory = ReservedPool::new(self.host_budget().clone());
        let spool = SpoolOptions {
            retain,
            bytes_max: if retain.is_zero() { self.window_bytes() } else { u64::MAX },
            arena: Some(self.catalog.arena().drawing_on(host_memory.clone()).interrupted_by(interrupt.clone())),
            charge: Some(charge),
            tables: planned.tables().into_iter().chain(planned.further_tables()).map(Arc::downgrade).collect(),
            interrupt,
            when_wanted: Some(BackpressureLimits::when(is_device_wanted.clone())),
            eviction: is_evictable
                .then(|| EvictionPermit { results: self.catalog.evictable_results().clone(), owner: owner.clone() }),
            arriving: feed.as_ref().map(|feed| feed.rows().clone() as Arc<dyn ArrivingRows>),
            becomes_table_in: name.is_some().then(|| self.catalog.clone()),
            ..SpoolOptions::default()
        };
        let result = ResultSpool::with_options(plan.join.schema.clone(), spool);
        let (now, priority) = (self.clock.now(), options.priority);
        let job = Arc::new(Job::new(
            id,
            owner.clone(),
            options,
            planned,
            result,
            host_memory,
            cancel,
            is_device_wanted,
            feed,
            kept,
            name,
            Arc::downgrade(self),
        ));
        state.live.insert(id, job.clone());
        state.totals.submitted_total += 1;
        let (starved_since, unsatisfiable_since, turn_wait) = (None, None, None);
        let entry = Waiting {
            id,
            tenant: owner,
            priority,
            submitted: now,
            places,
            starved_since,
            unsatisfiable_since,
            turn_wait,
        };
        match &job.feed {
            Some(_) => self.open_new(&mut state, &job, entry),
            None => state.queue.push(entry),
        }
        let predicted_ms = (job.plan.seconds * 1e6).round() / 1e3;
        tracing::info!(job = id.0, tenant = job.owner, strategy = %job.plan.strategy(), predicted_ms, "queued");
        // The size of rows that arrive is not known.
        if self.options.trace.is_some() && job.feed.is_none() {
            let traced = TracedJob::of(&job, state.queue.weight(&job.owner), client);
            job.life.lock().traced = Some(Box::new(traced));
        }
        let mut leftovers = Vec::new();
        self.dispatch(&mut state, &mut leftovers);
        drop(state);
        self.free_leftovers(leftovers);
        Ok(job)
    }

    /// Limits the batch size of a result that is consumed as it is read, so that several batches
    /// fit into the tenant's remaining room. A single batch that does not fit would fail the join,
    /// and no reader could make room for it.
    fn fit_batches(&self, admitted: &mut Admitted, options: &JobOptions, owner: &str) {
        const BATCHES: u64 = 4;
        // Minimum bytes of a batch. Results that were read also give room, which `room_of` does not
        // count.
        const BYTES_MIN: u64 = 64 << 10;
        let Some(room) = self.catalog.room_of(owner) else { return };
        let bytes = (room / BATCHES).max(BYTES_MIN);
        if !options.is_read_as_made() || bytes >= MESSAGE_BYTES as u64 {
            return;
        }
        for plan in &mut admitted.plans {
            let rows = ((bytes as f64 / plan.row_bytes.max(1.0)) as usize).max(1);
            plan.join.batch_rows.get_or_insert(rows);
        }
    }

    /// Refuses a submission that has no room in the queue; see [`Scheduler::check_room`].
    ///
    /// [`Scheduler::check_room`]: super::Scheduler::check_room
    pub(super) fn check_room(&self, state: &State, owner: &str) -> Result<()> {
        if state.draining {
            return Err(Error::Unavailable("the server is shutting down and takes no new jobs; try another".into()));
        }
        if state.queue.len() >= self.options.queue_limit {
            return Err(Error::Exhausted(format!(
                "{} already, and the queue takes no more; try again later, or raise the server's --queue-limit",
                human::counted_as(state.queue.len() as u64, "job waits", "jobs wait")
            )));
        }
        // A client that has stopped a job need not wait until the job's device has noticed.
        let is_stopped = |running: &&Running| running.job.owner == owner && running.job.check_stop().is_err();
        let running = state.devices.iter().flat_map(|device_state| &device_state.running);
        let stopped: BTreeSet<JobId> = running.filter(is_stopped).map(|running| running.job.id).collect();
        let published = |publishing: &&Publishing| publishing.job.owner == owner && publishing.job.check_stop().is_ok();
        let published = state.publishing.iter().filter(published).count();
        let open = state.open.values().filter(|open| open.job.owner == owner).count();
        let active = state.queue.active(owner).saturating_sub(stopped.len()) + published + open;
        if self.options.tenant_jobs > 0 && active >= self.options.tenant_jobs {
            return Err(Error::Exhausted(format!(
                "tenant {owner:?} has {} waiting or running, and may have no more; wait for one to end, or raise the server's --tenant-jobs",
                human::counted(active as u64, "job")
            )));
        }
        Ok(())
    }

    /// Starts every job that can start. A job that fails for lack of memory adds leftovers, which
    /// the caller must drop without the lock. Never waits for a device.
    pub(super) fn dispatch(&self, state: &mut State, leftovers: &mut Vec<Leftovers>) {
        state.queue.unpark();
        // A job that fails, waits for its turn, or is parked, may have kept others waiting.
        while self.take_turns(state, Extent::MayStart, leftovers) {}
    }

    /// Updates the forecasts of all waiting jobs, if events may have changed them. With many jobs
    /// waiting this takes long, and no job starts meanwhile. So it takes at most a tenth of the
    /// time, and leaves forecasts as they are if it would take more.
    pub(super) fn update_forecasts(&self) {
        const PAUSE: u32 = 9;
        let (mut state, mut leftovers) = (self.state.lock(), Vec::new());
        let begun = self.clock.now();
        if !state.forecasts.are_stale || begun < state.forecasts.due {
            return;
        }
        state.queue.unpark();
        while self.take_turns(&mut state, Extent::All, &mut leftovers) {}
        let now = self.clock.now();
        state.forecasts.due = now + (now - begun) * PAUSE;
        drop(state);
        self.free_leftovers(leftovers);
    }

    /// Takes one round of turns, and sets the forecasts of the jobs that were placed and wait. True
    /// if a waiting job has failed, has begun to wait for its turn, has given its turn up, or was
    /// parked.
    fn take_turns(&self, state: &mut State, extent: Extent, leftovers: &mut Vec<Leftovers>) -> bool {
        self.queue_next_turns(state);
        let (now, wall_now) = (self.clock.now(), SystemTime::now());
        let loads = self.loads(state, now);
        let returns = || Self::host_memory_returns(state, now);
        let host = HostMemory { free_bytes: self.host_budget().free_bytes(), returns: &returns };
        let schedule = state.queue.schedule(now, &loads, host, extent);
        state.forecasts.are_stale = !schedule.is_whole;
        let mut is_wanted = vec![false; state.devices.len()];
        let (mut position, mut again, mut holders) = (0, false, None);
        for scheduled in schedule.starts {
            let waits_for_devices = matches!(scheduled.wait, Some(Wait::Device | Wait::DeviceMemory { .. }));
            scheduled.place.devices.iter().for_each(|device| is_wanted[device] |= waits_for_devices);
            let job = state.live[&scheduled.id].clone();
            if Self::leave_stale_place(state, &job, &scheduled) {
                again = true;
                continue;
            }
            if self.bound_marking(state, &job, &scheduled, leftovers) {
                again = true;
                continue;
            }
            again |= Self::give_up_turn(&job, &scheduled);
            let device = self.engines[scheduled.place.devices.leader()].id();
            let waiting_for = match scheduled.wait {
                None if state.shutdown => "the server is shutting down".into(),
                None if self.must_await_turn(state, &job, &scheduled, now) => {
                    // Its slot is free for others.
                    again = true;
                    continue;
                }
                None => match self.start(state, &job, &scheduled, now, leftovers) {
                    Ok(()) => continue,
                    // Another thread took the memory a moment ago.
                    Err(error) => error.message().to_string(),
                },
                Some(Wait::Device) => device.to_string(),
                Some(Wait::Turn) => "the turn of another join with the same build side".into(),
                Some(Wait::DeviceMemory { needed_bytes, free_bytes }) => {
                    let missing_bytes = needed_bytes.saturating_sub(free_bytes);
                    let waited = state.queue.waited(job.id, now);
                    // Those that make room now are named as well.
                    let held = Self::device_holders(state, &scheduled.place.devices);
                    self.evict_residents(state, &scheduled.place.devices, missing_bytes, waited, leftovers);
                    if Self::waits_for_marks(state, &scheduled.place.devices, missing_bytes, leftovers) {
                        again |= state.queue.park(job.id, &scheduled.place.devices, missing_bytes);
                    }
                    let (needed, free) = (human_bytes(needed_bytes), human_bytes(free_bytes));
                    format!("{needed} of the memory of {device}, and {free} are free{held}")
                }
                Some(Wait::HostMemory { needed_bytes, free_bytes, comes_back }) => {
                    let Some(short) = state.queue.note_starved(scheduled.id, now, comes_back) else { continue };
                    let (needed, free) = (human_bytes(needed_bytes), human_bytes(free_bytes));
                    if short.waited >= self.options.memory_wait || short.unsatisfiable >= UNSATISFIABLE_WAIT {
                        let error = self.out_of_host_memory(state, &job, &needed, &free, short.waited);
                        state.queue.remove(job.id);
                        leftovers.push(self.close(&job, Err(error.clone())).1);
                        count_failure(&mut state.totals, &error);
                        self.ended.notify_all();
                        again = true;
                        continue;
                    }
                    let held = holders.get_or_insert_with(|| held_behind(&self.holders(state)));
                    format!("{needed} of host memory for its result, and {free} are free{held}")
                }
            };
            let start = wall_now + scheduled.start.saturating_sub(now);
            job.life.lock().forecast = Some(QueueForecast { position, start, waiting_for });
            position += 1;
        }
        if !schedule.is_whole {
            // All other jobs wait for devices.
            is_wanted.iter_mut().enumerate().for_each(|(device, is_wanted)| *is_wanted |= state.queue.wants(device));
        }
        // Tell running jobs if other jobs want their device. A writer that waits for a reader then
        // gives up sooner.
        for (device_state, is_wanted) in state.devices.iter().zip(is_wanted) {
            for Running { job, .. } in &device_state.running {
                let has_turn = |kept: &&ResidentUse| kept.resident().has_turn(job.id);
                let is_waited_for = job.feed.as_ref().is_some_and(Feed::keeps_others_waiting)
                    || job.kept.as_ref().filter(has_turn).is_some_and(|kept| kept.resident().has_next());
                job.is_device_wanted.store(is_wanted || is_waited_for, Ordering::Relaxed);
            }
        }
        let jobs_run = state.devices.iter().any(|device_state| !device_state.running.is_empty());
        let slots = self.engines.iter().map(|engine| self.options.slots(&**engine)).sum();
        self.catalog.arena().expect(state.queue.next_host_bytes(slots), jobs_run);
        again
    }

    fn out_of_host_memory(&self, state: &State, job: &Job, needed: &str, free: &str, waited: Duration) -> Error {
        Error::Exhausted(format!(
            "job {} waited {:.0} s for {needed} of host memory for its result, and {free} of {} are free{}; release results \
             that are no longer needed, {}",
            job.id,
            waited.as_secs_f64(),
            human_bytes(self.host_budget().limit_bytes()),
            held_behind(&self.holders(state)),
            job.options.room_advice(),
        ))
    }

    pub(super) fn loads(&self, state: &mut State, now: Duration) -> Vec<Load> {
        let running_job = |device: usize, running: &Running, beside: usize| {
            let left = running.predicted_seconds - running.device_seconds;
            // A late job is expected to stay for another tenth of its time so far. The later it is,
            // the worse was its prediction, and waiting clients must not be told "now" repeatedly.
            let late = 0.1 * now.saturating_sub(running.started).as_secs_f64();
            let ahead = if left > 0.0 { left * beside as f64 } else { late };
            let ahead = Duration::try_from_secs_f64(ahead).unwrap_or(Duration::MAX);
            let (alone, is_leader) = (running.shared_bytes.is_none(), running.devices.leader() == device);
            RunningJob { until: now.saturating_add(ahead), alone, is_leader }
        };
        let load = |(device, (device_state, engine)): (usize, (&mut DeviceState, &Arc<dyn Engine>))| {
            device_state.count_time(now);
            // Bytes promised to jobs that are about to reserve them are not free.
            let promised_bytes = device_state.running.iter().map(|running| running.promised_bytes).sum();
            match &device_state.lost {
                Some(_) => Load::Lost,
                None => Load::InService {
                    slots: self.options.slots(&**engine),
                    free_bytes: engine.memory().free_bytes().saturating_sub(promised_bytes),
                    running: device_state
                        .running
                        .iter()
                        .map(|running| running_job(device, running, device_state.running.len()))
                        .collect(),
                },
            }
        };
        state.devices.iter_mut().zip(&self.engines).enumerate().map(load).collect()
    }

    /// Returns when host memory becomes free, and how much: results whose lease ends, and
    /// reservations of running jobs. Tables do not count.
    fn host_memory_returns(state: &State, now: Duration) -> Vec<(Duration, u64)> {
        let wall_now = SystemTime::now();
        let returns = state.live.values().filter_map(|job| {
            let is_queued = job.life.lock().state == JobState::Queued;
            let becomes_table = job.options.into.is_some();
            let result_bytes = job.result.returning_bytes();
            // A result that can be evicted counts as free already.
            let held = if becomes_table || job.result.is_evictable() { 0 } else { result_bytes };
            // A running job returns what it has drawn for anything except its result.
            let drawn = job.host_memory.promised_bytes().saturating_sub(result_bytes);
            let bytes = held.saturating_add(drawn.max(job.host_memory.free_bytes()));
            // A running job is given a lease at its end. The time to its end is short compared with
            // a lease.
            let lease = match job.result.expires() {
                Some(expires) => expires.duration_since(wall_now).unwrap_or_default(),
                None => job.result.retained_for(),
            };
            (!is_queued && bytes > 0).then(|| (now.saturating_add(lease), bytes))
        });
        returns.collect()
    }

    /// Reserves the job's host memory, promises its part of the device's memory, and gives the job
    /// to the device's workers. A worker reserves that part without the lock. Cached columns may
    /// have to be evicted first, which can wait for all work on the device; see [`Shared::grant`].
    ///
    /// # Errors
    /// Returns [`Error::Exhausted`] if less host memory is free. The job then waits on.
    fn start(
        &self,
        state: &mut State,
        job: &Arc<Job>,
        scheduled: &ScheduledStart,
        now: Duration,
        leftovers: &mut Vec<Leftovers>,
    ) -> Result<()> {
        let (devices, seconds) = (&scheduled.place.devices, scheduled.place.seconds);
        let device = devices.leader();
        let kept = job.kept.as_ref().map(ResidentUse::resident);
        let has_left = kept.is_some_and(|resident| scheduled.place.is_prepared && resident.built().is_none());
        if has_left || job.feed.as_ref().is_some_and(|feed| feed.lacks_join(&scheduled.place)) {
            return Err(Error::Exhausted(format!("memory of {}", self.engines[device].id())));
        }
        // This thread holds the scheduler's lock. The budget's own list of holders would wait for
        // it.
        let reserved = self.host_budget().try_reserve(scheduled.host_bytes);
        let reserved = match reserved {
            Err(_) if scheduled.place.host.takes_less => self.host_budget().try_reserve(0),
            reserved => reserved,
        };
        let reserved = reserved.map_err(|used| {
            let (needed, limit) = (human_bytes(scheduled.host_bytes), self.host_budget().limit_bytes());
            let free = human_bytes(limit.saturating_sub(used));
            let held = held_behind(&self.holders(state));
            Error::Exhausted(format!("{needed} of host memory for its result, and {free} are free{held}"))
        })?;
        let Some(mut entry) = state.queue.start(scheduled.id, scheduled.place.device_seconds()) else { return Ok(()) };
        if !scheduled.place.is_prepared {
            leftovers.extend(Self::leave_kept(job, &mut entry, now));
        }
        job.host_memory.open(reserved);
        state.totals.waited_seconds_total += now.saturating_sub(entry.submitted).as_secs_f64();
        devices.iter().for_each(|device| state.devices[device].count_time(now));
        let beside = devices.iter().map(|device| state.devices[device].running.len()).max().unwrap_or(0);
        {
            let mut life = job.life.lock();
            life.state = JobState::Running;
            life.forecast = None;
            life.devices = devices.iter().map(|member| self.engines[member].id()).collect();
            life.run_by(scheduled.place.plan);
            life.started.get_or_insert_with(SystemTime::now);
            let places = || entry.places.iter().filter(|place| !place.is_prepared);
            life.device_reason = match places().count() {
                _ if kept.is_some() && scheduled.place.is_prepared => "its build side is kept there".into(),
                0 | 1 if devices.len() > 1 => "the only devices that may run it together".into(),
                0 | 1 => "the only device that may run it".into(),
                count if places().any(|place| place.devices.len() > 1) => {
                    format!("predicted to finish it first, of the {count} sets of devices that may run it")
                }
                count => format!("predicted to finish it first, of the {count} that may run it"),
            };
            if beside > 0 {
                life.device_reason += &format!("; it is short, and started next to {beside} more");
            }
        }
        let shared_bytes = scheduled.place.shared_bytes;
        for member in devices.iter() {
            state.devices[member].running.push(Running {
                job: job.clone(),
                devices: devices.clone(),
                entry: entry.clone(),
                started: now,
                predicted_seconds: seconds,
                device_seconds: 0.0,
                shared_bytes,
                promised_bytes: shared_bytes.unwrap_or(0),
                // The leader's worker takes the job.
                is_taken: member != device,
            });
        }
        // If no worker is idle, one will be soon.
        if let Some(worker) = state.devices[device].idle.pop() {
            self.work[device][worker].notify_one();
        }
        Ok(())
    }
}

impl Shared {
    /// Describes what holds host memory: tables, and results that wait for readers or for the end
    /// of their leases. Empty if nothing does.
    fn holders(&self, state: &State) -> String {
        const NAMED_MAX: usize = 5;
        let held = state.live.values().map(|job| (job.result.waiting_bytes(), job.id, job.feed.is_some()));
        let mut held: Vec<(u64, JobId, bool)> = held.filter(|(bytes, ..)| *bytes > 0).collect();
        held.sort_unstable_by(|one, other| other.cmp(one));
        let (streams, results): (Vec<_>, Vec<_>) = held.into_iter().partition(|(.., is_stream)| *is_stream);
        let mut holders = Vec::new();
        for (held, one, several) in [
            (
                results,
                ["the result of job", "holds", "until its client cancels it or its lease ends"],
                ["the results of jobs", "hold", "until their clients cancel them or their leases end"],
            ),
            (
                streams,
                ["the stream of job", "holds", "until its client reads the joined rows"],
                ["the streams of jobs", "hold", "until their clients read the joined rows"],
            ),
        ] {
            if held.is_empty() {
                continue;
            }
            let bytes = human_bytes(held.iter().map(|(bytes, ..)| bytes).sum());
            let named: Vec<String> = held.iter().take(NAMED_MAX).map(|(_, id, _)| id.to_string()).collect();
            let (named, more) = (named.join(", "), if held.len() > NAMED_MAX { ", ..." } else { "" });
            let [what, hold, until] = if held.len() == 1 { one } else { several };
            holders.push(format!("{what} {named}{more} {hold} {bytes} {until}"));
        }
        match self.catalog.table_bytes() {
            0 => {}
            bytes => holders.push(format!("tables hold {}", human_bytes(bytes))),
        }
        holders.join(", and ")
    }
}

impl Holders for Shared {
    fn named(&self) -> String {
        const MOMENT: Duration = Duration::from_millis(10);
        self.state.try_lock_for(MOMENT).map_or_else(String::new, |state| self.holders(&state))
    }
}

fn held_behind(holders: &str) -> String {
    if holders.is_empty() { String::new() } else { format!("; {holders}") }
}
