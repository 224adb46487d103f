//! Devices of a simulated machine. They have memory, and rates to plan with, and run no join.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{DeviceRates, Engine, Grant, MemoryUse, Prepared};
use crate::catalog::Table;
use crate::device::{CacheStats, Capabilities, ColumnRows, DeviceFacts, DeviceId, DeviceInfo, DeviceKind, Tuning};
use crate::join::{BatchSink, Monitor, Rank, RowSource, Task};
use crate::memory::Budget;
use crate::planner::Rates;
use crate::topology::{DeviceNode, SharedLinks};
use crate::{Error, Result};

/// Rate of links that no file describes. The described links of a machine are the narrower ones.
const WIDE: f64 = 1e12;

/// Seconds of a call, as a server measured them on an H200 (`benches/results/rates.jsonl`,
/// 3372c37). They decide how long small joins take.
const CALL_SECONDS: f64 = 15.8e-6;

/// Device that a topology describes, with the rates of a GPU.
#[derive(Debug)]
pub struct SimulatedDevice {
    id: DeviceId,
    info: DeviceInfo,
    memory: Budget,
    rates: DeviceRates,
    is_lost: AtomicBool,
}

impl SimulatedDevice {
    /// Returns the devices of a topology with its links, in its order. Each works `speed` times as
    /// fast as an H200, copies at the rates of the described links, and has `memory_bytes` if the
    /// topology does not say how much.
    pub fn all_of(links: &Arc<SharedLinks>, speed: f64, memory_bytes: u64) -> Vec<Arc<Self>> {
        let topology = links.topology();
        let device = |node: &DeviceNode| {
            let h200 = Rates { call_seconds: CALL_SECONDS, ..Rates::h200().of_faster_device(speed) };
            let rates = match topology.host_link(node) {
                Some(_) => Rates { copy_in: WIDE, copy_out: WIDE, ..h200 },
                None => h200,
            };
            let id = DeviceId { kind: DeviceKind::Host, index: node.index };
            let memory_bytes = node.memory_bytes.unwrap_or(memory_bytes);
            Arc::new(Self {
                id,
                info: like_a_gpu(),
                memory: Budget::new(format!("memory of {id}"), "--device-memory", memory_bytes),
                rates: DeviceRates::measured_now(rates).linked_by(links.clone()),
                is_lost: AtomicBool::new(false),
            })
        };
        topology.devices.iter().map(device).collect()
    }

    /// Loses the device, or brings it back.
    pub fn set_lost(&self, is_lost: bool) {
        self.is_lost.store(is_lost, Ordering::Relaxed);
    }
}

fn like_a_gpu() -> DeviceInfo {
    let facts = DeviceFacts {
        name: "a simulated GPU".into(),
        uuid: None,
        compute_capability: None,
        // The rates are those of the whole device, for few partitions too.
        parallelism: 1,
        cpu_threads: 4,
    };
    // As of an H200 (`device/cuda/tuning.rs`), because plans and their memory depend on it.
    let tuning = Tuning {
        streams: 5,
        morsel_rows: 1,
        probe_batch_rows: 1 << 24,
        gather_bytes: 64 << 20,
        row_scratch_bytes: Some(40),
        partition_rows: 2048,
        pass_bits_max: 16,
        fuses_partition_join: true,
    };
    let capabilities = Capabilities { strings: true, exchanges: true, forms_gangs: true };
    DeviceInfo { facts, tuning, capabilities }
}

impl Engine for SimulatedDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> &Budget {
        &self.memory
    }

    fn memory_use(&self) -> MemoryUse {
        MemoryUse::of(&self.memory)
    }

    /// Returns the number for a GPU.
    fn jobs_max(&self) -> usize {
        4
    }

    fn rates(&self) -> &DeviceRates {
        &self.rates
    }

    fn set_rates(&mut self, rates: DeviceRates) {
        self.rates = rates;
    }

    fn run_rank(&self, _: Task, _: &Rank, _: &Grant, _: &dyn BatchSink, _: &Monitor) -> Result<()> {
        Err(runs_no_join(self.id))
    }

    fn prepare(&self, _: Task, _: &dyn RowSource, _: &Grant, _: &Monitor) -> Result<Box<dyn Prepared>> {
        Err(runs_no_join(self.id))
    }

    fn check(&self) -> Result<()> {
        match self.is_lost.load(Ordering::Relaxed) {
            true => Err(Error::Unavailable(format!("{} is lost", self.id))),
            false => Ok(()),
        }
    }

    fn cached_rows(&self, _: &Arc<Table>) -> Vec<ColumnRows> {
        Vec::new()
    }

    fn cache_stats(&self) -> Option<CacheStats> {
        None
    }

    fn measure_rates(&self, _: &dyn Fn(f64)) -> Option<Rates> {
        None
    }
}

fn runs_no_join(id: DeviceId) -> Error {
    Error::Unsupported(format!("{id} is simulated, and runs no join"))
}
