//! Run of a trace: the server's scheduler on a simulated machine and clock.
//!
//! ```text
//!   events by time ─► arrival ──────► Scheduler::submit ─┐
//!                     cancel, tick ─► Scheduler          ├─► take_placed ─► work
//!                     device lost, back ─► devices ──────┘
//!                     work is done ─► PlacedJob::end ─► result is kept ─► read, and released
//! ```
//!
//! Jobs on one device share its copies and its kernels (`sharing.rs`). Jobs whose bytes together are
//! more than a link between devices, or the memory of a socket, moves are slower in proportion.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use dovetail::catalog::Catalog;
use dovetail::engine::Engine;
use dovetail::memory::{Arena, Budget, Interrupt, Reservation};
use dovetail::planner::{Distribution, Strategy, bind};
use dovetail::scheduler::{
    Clock, DeviceRequest, Job, JobId, JobOptions, JobState, KeptResult, PlacedJob, Policy, Scheduler, SchedulerOptions,
    Submission, TracedJob, TracedTimes,
};
use dovetail::topology::Topology;
use dovetail::{Error, Result};

use super::clients::{Next, loops};
use super::faults::{Fate, Faults, Losses};
use super::machine::{Load, Machine};
use super::sharing::{self, Use};
use super::tables::{devices_of, options_of, spec_of};

/// Inputs of a run.
#[derive(Clone, Debug)]
pub struct Setup {
    pub topology: Topology,
    pub policy: Policy,
    /// Speed of each device, as a multiple of an H200's.
    pub speed: f64,
    /// Memory of a device that the topology does not tell.
    pub device_memory: u64,
    /// Host memory for results. Tables do not count.
    pub host_memory: u64,
    /// True if a client asks for its next join after the end of its last one. Otherwise jobs arrive
    /// at the times of the trace.
    pub closed_loop: bool,
    /// Bytes per second at which a client reads a result.
    pub read_rate: f64,
    /// Standard deviation of the logarithm of run times over predicted ones.
    pub spread: f64,
    pub faults: Faults,
    pub seed: u64,
}

/// Clock that the simulation sets.
#[derive(Debug, Default)]
struct SimulatedClock(AtomicU64);

impl Clock for SimulatedClock {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Relaxed))
    }
}

/// A job of the trace, from its arrival to its end.
#[derive(Debug)]
pub struct Record {
    /// Time of its submission. Until then, that in the trace.
    pub arrived: f64,
    pub tenant: String,
    pub weight: f64,
    /// True if it asked for several devices.
    pub is_gang: bool,
    /// Least predicted seconds of all places at admission, and the devices that they take.
    pub predicted: f64,
    pub predicted_devices: usize,
    pub fate: Fate,
    /// Time at which it first ran.
    pub started: Option<f64>,
    pub ended: Option<f64>,
    /// `None` if it was refused at its submission.
    pub state: Option<JobState>,
    /// Reason of the refusal at its submission.
    pub refusal: Option<String>,
    /// Strategy and distribution of the plan of its last run.
    pub composed: Option<(Strategy, Distribution)>,
    /// Most devices that it ran on.
    pub devices: usize,
    /// Seconds of device time that it was given, and the part of them until the last arrival.
    pub device_seconds: f64,
    pub device_seconds_of_window: f64,
    /// Times that it was placed on devices.
    pub runs: usize,
    /// Times of the job on the server that wrote the trace.
    pub measured: Option<TracedTimes>,
    job: Option<Arc<Job>>,
}

impl Record {
    fn new(traced: &TracedJob, arrived: f64, fate: Fate) -> Self {
        let is_gang = match devices_of(traced) {
            DeviceRequest::Any => false,
            DeviceRequest::All => true,
            DeviceRequest::Count(count) => count > 1,
            DeviceRequest::Named(names) => names.len() > 1,
        };
        Self {
            arrived,
            tenant: traced.tenant.clone(),
            weight: traced.weight,
            is_gang,
            predicted: 0.0,
            predicted_devices: 1,
            fate,
            started: None,
            ended: None,
            state: None,
            refusal: None,
            composed: None,
            devices: 0,
            device_seconds: 0.0,
            device_seconds_of_window: 0.0,
            runs: 0,
            measured: traced.measured,
            job: None,
        }
    }

    /// Makes the record of a job that had device time until the last arrival, and in all.
    #[cfg(test)]
    pub fn of_device_seconds(traced: &TracedJob, of_window: f64, device_seconds: f64) -> Self {
        let fate = Fate::draw(0, 0, 0.0, &Faults::default());
        Self { device_seconds, device_seconds_of_window: of_window, ..Self::new(traced, 0.0, fate) }
    }

    /// True if the job waits or runs.
    pub fn is_open(&self) -> bool {
        self.job.is_some() && self.ended.is_none()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Arrives(usize),
    IsCancelled(usize),
    /// Work is done, or fails.
    Ends(usize),
    /// A client has read the result of a job.
    IsRead(usize),
    IsLost(usize),
    IsBack(usize),
    Tick,
}

/// Event. Of events at the same time, the one that was planned first is first.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Event {
    at: f64,
    number: u64,
    what: What,
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.total_cmp(&other.at).then(self.number.cmp(&other.number))
    }
}

/// Job on its devices.
#[derive(Debug)]
struct Work {
    placed: PlacedJob,
    /// Number in the trace.
    number: usize,
    devices: Vec<usize>,
    /// Seconds that are left at full speed.
    left: f64,
    loads: Vec<Load>,
    of_device: Use,
    speed: f64,
    result_bytes: u64,
    fails: bool,
    /// Memory of the devices, if the job has them alone.
    memory: Vec<Reservation>,
}

/// Simulated server in the middle of a trace.
#[derive(Debug)]
pub struct Simulation {
    setup: Setup,
    clock: Arc<SimulatedClock>,
    scheduler: Scheduler,
    catalog: Catalog,
    host: Budget,
    machine: Machine,
    trace: Vec<TracedJob>,
    /// The job that follows the end of each job. The others arrive at the times of the trace.
    next: Vec<Option<Next>>,
    now: f64,
    events: BinaryHeap<Reverse<Event>>,
    planned: u64,
    losses: Losses,
    working: Vec<Work>,
    kept: BTreeMap<usize, KeptResult>,
    records: Vec<Record>,
    arrivals_left: usize,
    /// Jobs that wait or run, with their number in the trace.
    open: BTreeMap<JobId, usize>,
    /// Jobs that have ended, as the scheduler counts them.
    counted: u64,
    /// Ticks in a row at which jobs waited, and nothing else was to happen.
    ticks_in_vain: u32,
    /// Seconds for which each device had a job.
    busy: Vec<f64>,
    /// Seconds for which each pipe would have been used in full.
    moved: Vec<f64>,
}

/// Outcome of a run.
#[derive(Debug)]
pub struct Outcome {
    pub records: Vec<Record>,
    /// Seconds from the first arrival to the end of the last job.
    pub seconds: f64,
    /// By device: its name, and the share of the time in which it had a job.
    pub devices: Vec<(String, f64)>,
    /// By link or memory of the host: its name, and the share of its rate that was used.
    pub pipes: Vec<(String, f64)>,
}

/// Interval between ticks, as in a server.
const TICK: f64 = 1.0;

/// Ticks in vain after which jobs that wait will wait for ever. It is more than any limit of the
/// scheduler.
const TICKS_IN_VAIN_MAX: u32 = 2000;

impl Simulation {
    /// Makes a server of a machine, and plans the arrivals of a trace.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight that is not above 0.
    pub fn new(setup: Setup, mut trace: Vec<TracedJob>) -> Result<Self> {
        trace.sort_by(|a, b| a.at.total_cmp(&b.at));
        let machine = Machine::new(&setup.topology, setup.speed, setup.device_memory);
        let host = Budget::new("host memory", "--host-memory", setup.host_memory);
        let catalog = Catalog::new(Arena::new(host.clone()));
        let clock = Arc::new(SimulatedClock::default());
        let options = SchedulerOptions {
            policy: setup.policy,
            queue_limit: usize::MAX,
            // Clients release results.
            retain: Duration::from_secs(1 << 30),
            history: 0,
            workers: false,
            publishers: 0,
            timer: false,
            ..SchedulerOptions::default()
        };
        let engines = machine.devices.iter().map(|device| device.clone() as Arc<dyn Engine>).collect();
        let scheduler = Scheduler::with_clock(catalog.clone(), engines, options, clock.clone());
        let first = trace.first().map_or(0.0, |job| job.at);
        let record = |(number, job): (usize, &TracedJob)| {
            Record::new(job, job.at - first, Fate::draw(setup.seed, number, setup.spread, &setup.faults))
        };
        let records: Vec<Record> = trace.iter().enumerate().map(record).collect();
        let next = if setup.closed_loop { loops(&trace) } else { vec![None; trace.len()] };
        let mut simulation = Self {
            clock,
            scheduler,
            catalog,
            host,
            trace,
            next,
            now: 0.0,
            events: BinaryHeap::new(),
            planned: 0,
            losses: Losses::new(setup.seed, &setup.faults),
            working: Vec::new(),
            kept: BTreeMap::new(),
            arrivals_left: records.len(),
            records,
            open: BTreeMap::new(),
            counted: 0,
            ticks_in_vain: 0,
            busy: vec![0.0; machine.devices.len()],
            moved: vec![0.0; machine.pipes.len()],
            machine,
            setup,
        };
        simulation.plan_all();
        Ok(simulation)
    }

    fn plan_all(&mut self) {
        let follow: BTreeSet<usize> = self.next.iter().flatten().map(|next| next.job).collect();
        for number in (0..self.records.len()).filter(|number| !follow.contains(number)) {
            self.plan(self.records[number].arrived, What::Arrives(number));
        }
        for device in 0..self.machine.devices.len() {
            self.plan_loss(device);
        }
        self.plan(TICK, What::Tick);
    }

    fn plan(&mut self, at: f64, what: What) {
        self.planned += 1;
        self.events.push(Reverse(Event { at, number: self.planned, what }));
    }

    fn plan_loss(&mut self, device: usize) {
        if let Some(after) = self.losses.next_loss() {
            self.plan(self.now + after, What::IsLost(device));
        }
    }

    /// Runs the trace to its end. `observe` sees the server after each event.
    ///
    /// # Errors
    /// The errors of `observe`, and [`Error::Internal`] if jobs wait for ever, or memory was given
    /// twice.
    pub fn run(mut self, observe: &mut dyn FnMut(&Self) -> Result<()>) -> Result<Outcome> {
        while !self.is_over() {
            let Some(event) = self.next() else { break };
            self.advance(event.at);
            self.handle(event.what)?;
            self.start_placed()?;
            self.note_ends();
            self.check_progress(event.what)?;
            observe(&self)?;
        }
        self.outcome()
    }

    fn is_over(&self) -> bool {
        self.arrivals_left == 0 && self.open.is_empty() && self.kept.is_empty()
    }

    /// Takes the next event: the end of work, or an event that was planned.
    fn next(&mut self) -> Option<Event> {
        let end = |(at, work): (usize, &Work)| Event {
            at: self.now + work.left / work.speed,
            number: 0,
            what: What::Ends(at),
        };
        let end = self.working.iter().enumerate().map(end).min();
        match (end, self.events.peek()) {
            (Some(end), Some(Reverse(planned))) if end.at <= planned.at => Some(end),
            (Some(end), None) => Some(end),
            _ => self.events.pop().map(|event| event.0),
        }
    }

    /// Lets work go on until a time.
    fn advance(&mut self, until: f64) {
        let seconds = until - self.now;
        let of_window = if self.arrivals_left > 0 { seconds } else { 0.0 };
        let mut jobs = vec![0usize; self.busy.len()];
        for work in &self.working {
            work.devices.iter().for_each(|&device| jobs[device] += 1);
        }
        for work in &mut self.working {
            work.left = (work.left - work.speed * seconds).max(0.0);
            let parts: f64 = work.devices.iter().map(|&device| 1.0 / jobs[device] as f64).sum();
            let record = &mut self.records[work.number];
            record.device_seconds += parts * seconds;
            record.device_seconds_of_window += parts * of_window;
            work.loads.iter().for_each(|&(pipe, load)| self.moved[pipe] += load * work.speed * seconds);
        }
        self.busy.iter_mut().zip(&jobs).filter(|(_, jobs)| **jobs > 0).for_each(|(busy, _)| *busy += seconds);
        self.now = until;
        self.clock.0.store((until * 1e9).round() as u64, Relaxed);
    }

    fn handle(&mut self, what: What) -> Result<()> {
        match what {
            What::Arrives(number) => self.submit(number)?,
            What::IsCancelled(number) => self.cancel(number)?,
            What::Ends(at) => {
                let error =
                    self.working[at].fails.then(|| Error::Unavailable("a simulated failure that passes".into()));
                self.end(at, error.map_or(Ok(()), Err));
            }
            What::IsRead(number) => {
                if let Some(kept) = self.kept.remove(&number) {
                    kept.release();
                }
            }
            What::IsLost(device) => self.lose(device),
            What::IsBack(device) => {
                self.machine.devices[device].set_lost(false);
                self.plan_loss(device);
            }
            What::Tick => {
                self.scheduler.tick(SystemTime::now());
                self.plan(self.now + TICK, What::Tick);
            }
        }
        Ok(())
    }

    fn submit(&mut self, number: usize) -> Result<()> {
        self.arrivals_left -= 1;
        let traced = &self.trace[number];
        self.scheduler.set_weight(&traced.tenant, traced.weight)?;
        let options = JobOptions { priority: traced.priority, ..options_of(traced)? };
        let terms = Submission { owner: traced.tenant.clone(), ..Submission::default() };
        let bound = bind(&spec_of(traced)?, &self.catalog)?;
        let submitted = self.scheduler.submit(bound, options, terms);
        if submitted.is_err() || traced.measured.is_none() {
            self.plan_next(number);
        }
        let record = &mut self.records[number];
        record.arrived = self.now;
        let job = match submitted {
            Ok(job) => job,
            Err(refusal) => {
                record.refusal = Some(refusal.to_string());
                return Ok(());
            }
        };
        record.predicted = job.plan.seconds;
        record.predicted_devices = job.plan.target.ranks;
        self.open.insert(job.id, number);
        record.job = Some(job);
        let seconds = record.predicted * record.fate.time;
        if let Some(after) = record.fate.cancelled_after {
            self.plan(self.now + after * seconds, What::IsCancelled(number));
        }
        Ok(())
    }

    fn cancel(&mut self, number: usize) -> Result<()> {
        if let Some(kept) = self.kept.remove(&number) {
            kept.release();
            return Ok(());
        }
        let record = &self.records[number];
        let Some(job) = record.job.as_ref().filter(|_| record.is_open()) else { return Ok(()) };
        self.scheduler.cancel(job.id)?;
        if let Some(at) = self.working.iter().position(|work| work.number == number) {
            self.end(at, Err(Error::Cancelled("cancelled".into())));
        }
        Ok(())
    }

    fn lose(&mut self, device: usize) {
        self.machine.devices[device].set_lost(true);
        while let Some(at) = self.working.iter().position(|work| work.devices.contains(&device)) {
            self.end(at, Err(Error::Unavailable(format!("{} is lost", self.machine.names[device]))));
        }
        let back = self.now + self.losses.back_after();
        self.plan(back, What::IsBack(device));
    }

    /// Ends work, and keeps its result until a client has read it.
    fn end(&mut self, at: usize, outcome: Result<()>) {
        let Work { placed, number, result_bytes, memory, .. } = self.working.swap_remove(at);
        drop(memory);
        if let Some(kept) = placed.end(outcome, result_bytes) {
            self.kept.insert(number, kept);
            self.plan(self.now + result_bytes as f64 / self.setup.read_rate, What::IsRead(number));
        }
        self.set_speeds();
    }

    /// Begins the work of all jobs that were placed.
    fn start_placed(&mut self) -> Result<()> {
        let mut has_started = false;
        while let Some(placed) = self.scheduler.take_placed() {
            let work = self.begin(placed)?;
            self.working.push(work);
            has_started = true;
        }
        if has_started {
            self.set_speeds();
        }
        Ok(())
    }

    fn begin(&mut self, placed: PlacedJob) -> Result<Work> {
        let id = placed.job().id;
        let number = *self.open.get(&id).ok_or_else(|| Error::Internal(format!("job {id} is not of the trace")))?;
        let devices: Vec<usize> = placed.devices().collect();
        let plan = placed.job().planned();
        let memory = if placed.is_alone() { self.take_all(&devices, plan.memory.minimum_bytes)? } else { Vec::new() };
        let record = &mut self.records[number];
        record.started.get_or_insert(self.now);
        record.devices = record.devices.max(devices.len());
        record.runs += 1;
        record.composed = Some((plan.strategy(), plan.composition.distribution));
        let fails = record.fate.fails_once && record.runs == 1;
        let seconds = (plan.seconds * record.fate.time).max(1e-6);
        Ok(Work {
            loads: self.machine.loads(&plan, &devices, seconds),
            of_device: Use::of(&plan, seconds),
            left: if fails { seconds / 2.0 } else { seconds },
            speed: 1.0,
            // Something tells the client how many rows there are.
            result_bytes: ((plan.result_bytes as f64 * record.fate.bytes) as u64).max(64),
            placed,
            number,
            devices,
            fails,
            memory,
        })
    }

    /// Takes all memory of devices that a job has alone.
    ///
    /// # Errors
    /// [`Error::Internal`] if the job shares a device, or lacks memory there.
    fn take_all(&self, devices: &[usize], needed_bytes: u64) -> Result<Vec<Reservation>> {
        let take = |&device: &usize| {
            let memory = self.machine.devices[device].memory();
            let name = &self.machine.names[device];
            if self.working.iter().any(|work| work.devices.contains(&device)) {
                return Err(Error::Internal(format!("a job that runs alone was given {name}, which has a job")));
            }
            let taken = memory.reserve(memory.free_bytes(), "a job that runs alone")?;
            match taken.bytes() < needed_bytes {
                true => {
                    Err(Error::Internal(format!("a job needs {needed_bytes} B of {name}, and got {}", taken.bytes())))
                }
                false => Ok(taken),
            }
        };
        devices.iter().map(take).collect()
    }

    /// Sets the speed of all work from the devices and links that it shares.
    fn set_speeds(&mut self) {
        self.working.iter_mut().for_each(|work| work.speed = 1.0);
        for device in 0..self.busy.len() {
            let mut here: Vec<&mut Work> =
                self.working.iter_mut().filter(|work| work.devices.contains(&device)).collect();
            let uses: Vec<Use> = here.iter().map(|work| work.of_device).collect();
            // The slowest device of a gang bounds it.
            here.iter_mut().zip(sharing::speeds(&uses)).for_each(|(work, speed)| work.speed = work.speed.min(speed));
        }
        let mut wanted = vec![0.0; self.machine.pipes.len()];
        for work in &self.working {
            work.loads.iter().for_each(|&(pipe, load)| wanted[pipe] += load * work.speed);
        }
        for work in &mut self.working {
            let most = work.loads.iter().map(|&(pipe, _)| wanted[pipe]).fold(1.0, f64::max);
            work.speed /= most;
        }
    }

    /// Notes the jobs that have ended since the last event.
    fn note_ends(&mut self) {
        let stats = self.scheduler.stats();
        let counted = stats.completed_total + stats.failed_total + stats.cancelled_total;
        if counted == self.counted {
            return;
        }
        self.counted = counted;
        let (scheduler, records, now) = (&self.scheduler, &mut self.records, self.now);
        let mut ended = Vec::new();
        self.open.retain(|&id, &mut number| {
            let record = &mut records[number];
            let state = record.job.as_ref().map(|job| job.state()).filter(JobState::is_final);
            let Some(state) = state else { return true };
            if state != JobState::Complete {
                // Nothing is left to fetch, so the server may forget it.
                let _ = scheduler.cancel(id);
            }
            record.state = Some(state);
            record.ended = Some(now);
            ended.push(number);
            false
        });
        for number in ended {
            if self.trace[number].measured.is_some() {
                self.plan_next(number);
            }
        }
    }

    /// Plans the arrival of the job that follows a job, if there is one.
    fn plan_next(&mut self, number: usize) {
        if let Some(Next { job, pause }) = self.next[number] {
            self.plan(self.now + pause, What::Arrives(job));
        }
    }

    /// Fails if jobs wait, and nothing will happen that lets them run.
    fn check_progress(&mut self, what: What) -> Result<()> {
        let will_happen =
            |event: &Reverse<Event>| !matches!(event.0.what, What::Tick | What::IsLost(_) | What::IsCancelled(_));
        let is_in_vain = what == What::Tick && self.working.is_empty() && !self.events.iter().any(will_happen);
        self.ticks_in_vain = if is_in_vain { self.ticks_in_vain + 1 } else { 0 };
        match self.ticks_in_vain > TICKS_IN_VAIN_MAX {
            true => Err(Error::Internal(format!("{} jobs wait for ever", self.scheduler.stats().queued))),
            false => Ok(()),
        }
    }

    fn outcome(self) -> Result<Outcome> {
        let held = self.host.used_bytes()
            + self.machine.devices.iter().map(|device| device.memory().used_bytes()).sum::<u64>();
        if held > 0 {
            return Err(Error::Internal(format!("{held} B are reserved at the end")));
        }
        let seconds = self.records.iter().filter_map(|record| record.ended).fold(0.0, f64::max);
        let share = |busy: f64| if seconds > 0.0 { busy / seconds } else { 0.0 };
        let pipes = self.machine.pipes.iter().zip(&self.moved).filter(|(pipe, _)| pipe.is_of_host);
        Ok(Outcome {
            seconds,
            devices: self.machine.names.iter().cloned().zip(self.busy.iter().map(|&busy| share(busy))).collect(),
            pipes: pipes.map(|(pipe, &moved)| (pipe.name.clone(), share(moved))).collect(),
            records: self.records,
        })
    }
}

/// Returns the device time that the jobs of a trace need, each on the devices where it needs least.
///
/// # Errors
/// The errors of planning.
pub fn device_seconds(setup: &Setup, trace: &[TracedJob]) -> Result<f64> {
    let Simulation { scheduler, catalog, .. } = Simulation::new(setup.clone(), Vec::new())?;
    let of_job = |job: &TracedJob| {
        let bound = bind(&spec_of(job)?, &catalog)?;
        let explained = scheduler.explain(bound, &options_of(job)?, &job.tenant, &Interrupt::default())?;
        let sets = explained.sets.iter().filter(|set| set.rejected.is_none());
        let of_sets = sets.map(|set| set.predicted_seconds * set.ranks as f64);
        let chosen = explained.predicted_seconds * explained.device.ranks as f64;
        Ok(if explained.refusal.is_some() { 0.0 } else { of_sets.fold(chosen, f64::min) })
    };
    trace.iter().map(of_job).sum()
}

/// What observers may see.
#[cfg(test)]
impl Simulation {
    /// Returns all jobs of the trace, in the order of their arrival.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Returns the bytes of host memory that the scheduler's jobs and results were given, and those
    /// that the budget counts.
    pub fn host_bytes(&self) -> (u64, u64) {
        let of_jobs: u64 = self.working.iter().map(|work| work.placed.host_bytes()).sum();
        let of_results: u64 = self.kept.values().map(KeptResult::bytes).sum();
        (of_jobs + of_results, self.host.used_bytes())
    }
}
