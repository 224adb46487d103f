//! Joins on gangs of host devices, compared with the naive join.

use std::sync::Arc;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use dovetail::device::Device;
use dovetail::device::host::HostDevice;
use dovetail::engine::{Engine, Grant, InProcess, run_gang};
use dovetail::join::{Distribution, Monitor, Task};
use dovetail::memory::{Budget, ReservedPool};
use dovetail::planner::{self, JoinKind, JoinSpec, PlanOverrides, Strategy, Target};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::data::Case;
use crate::naive::NullsEqual;
use crate::{Bench, Collect, is_wanted, naive, seed, spec};

/// Engines of a gang, with the tables of a bench.
struct Gang {
    bench: Bench,
    devices: Vec<Arc<dyn Device>>,
    engines: Vec<Arc<dyn Engine>>,
}

impl Gang {
    fn new(ranks: usize, device_memory: u64) -> Self {
        let bench = Bench::new(1, device_memory);
        let device = |index: usize| -> Arc<dyn Device> {
            let budget = Budget::new(format!("memory of device host:{index}"), "--device-memory", device_memory);
            // Unlike numbers of threads and streams, so that ranks take unlike chunks.
            Arc::new(HostDevice::new(index as u16, 1 + index % 2, budget, None).unwrap().with_streams(1 + index % 3))
        };
        let devices: Vec<_> = (0..ranks).map(device).collect();
        let engine = |device: &Arc<dyn Device>| -> Arc<dyn Engine> {
            Arc::new(InProcess::new(device.clone(), bench.catalog.arena().clone()))
        };
        let engines = devices.iter().map(engine).collect();
        Self { bench, devices, engines }
    }

    /// Runs a join, and returns the distribution that the planner chose or was asked for.
    fn join(
        &self,
        spec: &JoinSpec,
        overrides: &PlanOverrides,
        chunk_rows_min: u64,
    ) -> dovetail::Result<(Distribution, Vec<arrow::array::RecordBatch>)> {
        let target = Target { ranks: self.engines.len(), ..Target::default() };
        let join = planner::bind(spec, &self.bench.catalog)?;
        let plan = planner::plan_with_overrides(join, overrides, &target)?;
        let ranks = plan.target.ranks;
        let task = Task { chunk_rows_min: Some(chunk_rows_min), ..plan.task()? };
        let host_memory = ReservedPool::new(self.bench.catalog.arena().budget().clone());
        let grant = || Grant { device_memory: None, host_memory: host_memory.clone() };
        let grants: Vec<Grant> = (0..ranks).map(|_| grant()).collect();
        let sink = Collect::default();
        run_gang(&self.engines[..ranks], task, &grants, &sink, &Monitor::default())?;
        for device in &self.devices {
            assert_eq!(device.memory().used_bytes(), 0, "a gang left memory of {} in use", device.id());
        }
        Ok((plan.composition.distribution, sink.batches.into_inner()))
    }
}

fn check_all(gang: &Gang, case: &Case, nulls_equal: &NullsEqual, rng: &mut StdRng) {
    gang.bench.put("l", &case.left.batches);
    gang.bench.put("r", &case.right.batches);
    for how in JoinKind::ALL {
        let wanted: Vec<Strategy> = Strategy::ALL.into_iter().filter(|_| is_wanted()).collect();
        let expected = naive::join(case, how, nulls_equal);
        for strategy in wanted {
            let spec = JoinSpec { nulls_equal: nulls_equal.whole, ..spec(case.key_kinds.len(), how) };
            let overrides = PlanOverrides { by_name: rng.random(), ..PlanOverrides::named(Some(strategy)) };
            let chunk_rows_min = rng.random_range(1..300);
            let label = format!("{how} by {strategy} on {} ranks, {chunk_rows_min} rows, {case}", gang.engines.len());
            let run = |spec: &JoinSpec| {
                gang.join(spec, &overrides, chunk_rows_min).unwrap_or_else(|error| panic!("{label}: {error}"))
            };
            let (distribution, rows) = run(&spec);
            naive::assert_same_rows(&rows, &expected, &label);
            assert_eq!(distribution == Distribution::Alone, how == JoinKind::Full, "{label}");
            let (_, counted) = run(&JoinSpec { count: true, ..spec });
            let counts: Vec<i64> = counted
                .iter()
                .flat_map(|batch| batch.column(0).as_primitive::<Int64Type>().values().to_vec())
                .collect();
            assert_eq!(counts, [expected.len() as i64], "{label}, counted");
        }
    }
}

#[test]
fn gangs_agree_with_the_naive_join() {
    let mut rng = StdRng::seed_from_u64(seed());
    let cases = if std::env::var_os("DOVETAIL_LONG").is_some() { 500 } else { 12 };
    let ranks: &[usize] = if std::env::var_os("DOVETAIL_LONG").is_some() { &[2, 3, 4, 5, 8] } else { &[2, 3] };
    for _ in 0..cases {
        let case = Case::random(&mut rng);
        let memory = [1 << 20, 8 << 20, 1 << 30][rng.random_range(0..3)];
        let gang = Gang::new(ranks[rng.random_range(0..ranks.len())], memory);
        let nulls_equal = NullsEqual::from(rng.random_bool(0.3));
        check_all(&gang, &case, &nulls_equal, &mut rng);
    }
}
