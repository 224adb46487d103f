//! The engine under measurement: one device, one catalog, and no server.

use std::sync::Arc;
use std::time::Instant;

use arrow::array::RecordBatch;
use parking_lot::Mutex;

use super::generate::{Summary, Workload};
use crate::catalog::{Catalog, Upload, UploadMode, UploadOptions};
use crate::device::{CancelFlag, Device, DeviceId, open_device};
use crate::join::{self, BatchSink, Monitor, PhaseRecord};
use crate::memory::{Arena, Budget};
use crate::planner::{self, JoinSpec, KeyPair, Strategy, Target};
use crate::{Error, Result};

/// A device and the tables.
#[derive(Debug)]
pub struct Engine {
    catalog: Catalog,
    device: Arc<dyn Device>,
    /// The device as the planner sees it, with rates measured on this machine.
    target: Target,
    threads: usize,
}

/// What was measured of one strategy on one workload.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Of each run, ascending.
    pub seconds: Vec<f64>,
    /// Rows of the result.
    pub rows: u64,
    /// Bytes of both tables.
    pub bytes_in: u64,
    /// Bytes of the result.
    pub bytes_out: u64,
    /// The strategy that ran.
    pub strategy: Strategy,
    /// Of the untimed run.
    pub phases: Vec<PhaseRecord>,
    /// The most device memory that was in use.
    pub device_memory_max_bytes: u64,
    /// Threads of the device.
    pub threads: usize,
    /// The device's name.
    pub device: String,
}

impl Measured {
    /// The middle one of the runs' times.
    pub fn median(&self) -> f64 {
        self.seconds[self.seconds.len() / 2]
    }
}

/// Keeps all batches: the result is materialized, and freed when the clock has stopped.
#[derive(Default)]
struct Keep {
    batches: Mutex<Vec<RecordBatch>>,
}

impl BatchSink for Keep {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        self.batches.lock().push(batch);
        Ok(())
    }
}

impl Engine {
    /// An empty engine.
    ///
    /// # Errors
    /// What opening the device answers.
    pub fn new(device: DeviceId, threads: Option<usize>, device_memory: u64, host_memory: u64) -> Result<Self> {
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let arena = Arena::new(Budget::new("host memory", "--host-memory", host_memory));
        let device = open_device(device, threads, |free| {
            let bytes = free.map_or(device_memory, |free| device_memory.min(free));
            Budget::new(format!("memory of device {device}"), "--device-memory", bytes)
        })?;
        arena.pin_by(device.pin());
        let target = Target::of(&*device, planner::calibrate(&*device));
        Ok(Self { catalog: Catalog::new(arena), device, target, threads })
    }

    /// Uploads a table, as a client's would be: into the arena, with statistics.
    ///
    /// # Errors
    /// [`Error::Exhausted`].
    pub fn put(&self, name: &str, batches: Vec<RecordBatch>) -> Result<()> {
        let schema = batches.first().map(RecordBatch::schema).ok_or_else(|| Error::Internal("no batches".into()))?;
        let options = UploadOptions { mode: UploadMode::Replace, ..UploadOptions::default() };
        let mut upload = Upload::begin(&self.catalog, name, schema, options)?;
        for batch in batches {
            upload.append(batch)?;
        }
        upload.commit().map(drop)
    }

    /// Joins build with probe: once to warm up and check, then `runs` times against the clock. `ran` hears of each, outside
    /// of what is timed.
    ///
    /// # Errors
    /// [`Error::Internal`] when the rows are not those expected; what the engine answers.
    pub fn measure(
        &self,
        workload: &Workload,
        asked_for: Option<Strategy>,
        expected: Summary,
        runs: u32,
        ran: &dyn Fn(),
    ) -> Result<Measured> {
        let (_, batches, phases, strategy) = self.join(asked_for)?;
        ran();
        let got = Summary::of(&batches, workload.payloads)?;
        if got != expected {
            return Err(Error::Internal(format!(
                "the result is wrong: {} rows with checksum {:x}, and {} with {:x} were expected",
                got.rows, got.checksum, expected.rows, expected.checksum
            )));
        }
        let bytes_out = batches.iter().map(super::super::client::batch_bytes).sum();
        drop(batches);
        let mut seconds = Vec::with_capacity(runs as usize);
        for _ in 0..runs {
            seconds.push(self.join(asked_for)?.0);
            ran();
        }
        seconds.sort_by(f64::total_cmp);
        let bytes_in = self.catalog.table("build")?.bytes + self.catalog.table("probe")?.bytes;
        let device_memory_max_bytes = self.device.memory().used_bytes_max();
        Ok(Measured {
            seconds,
            rows: expected.rows,
            bytes_in,
            bytes_out,
            strategy,
            phases,
            device_memory_max_bytes,
            threads: self.threads,
            device: self.device.info().name.clone(),
        })
    }

    fn join(&self, strategy: Option<Strategy>) -> Result<(f64, Vec<RecordBatch>, Vec<PhaseRecord>, Strategy)> {
        let spec = JoinSpec { strategy, ..JoinSpec::inner("build", "probe", vec![KeyPair::new("k", "k")]) };
        let plan = planner::plan_on(planner::bind(spec, &self.catalog)?, strategy, &self.target)?;
        let (sink, monitor) = (Keep::default(), Monitor::new(CancelFlag::new()));
        let start = Instant::now();
        join::run(&plan.task()?, &*self.device, self.catalog.arena(), &sink, &monitor)?;
        let seconds = start.elapsed().as_secs_f64();
        Ok((seconds, sink.batches.into_inner(), monitor.phases(), plan.strategy))
    }
}
