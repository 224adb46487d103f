//! Gangs: one join on several devices, one rank on each.
//!
//! ```text
//!   job's monitor ◄── sum of progress and phases ── monitors of the ranks
//!         └────────── stop ─────────────────────► flag that all ranks share ◄── first failure
//!   sink of the job ◄── batches of all ranks, whose waits for readers end with the flag
//! ```
//!
//! Each rank runs on the engine of its device, in a thread of its own here. The engine may be a
//! process. The ranks meet at the board of the gang (`join/rank.rs`).

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::windows::{connect_all, disconnect_lost};
use super::{Engine, Grant, spawn_in};
use crate::catalog::Table;
use crate::device::{CancelFlag, DeviceId};
use crate::join::{BatchSink, GangBoard, Monitor, NearRows, Rank, RankReport, Report, RowNodes, Task, add_phases};
use crate::{Context, Error, Result, panics};

/// Time between two looks at the job's request to stop, and at the progress of ranks.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Runs a task on several engines, a rank on each, in the memory that each is granted. One engine
/// runs the task alone.
///
/// # Errors
/// The errors of [`Engine::run`]. If a rank fails, the others are stopped, and the error is that of
/// the rank that failed first, or of a rank whose device was lost.
pub fn run_gang(
    engines: &[Arc<dyn Engine>],
    task: Task,
    grants: &[Grant],
    sink: &dyn BatchSink,
    monitor: &Monitor,
) -> Result<()> {
    assert_eq!(engines.len(), grants.len(), "each rank is granted memory");
    if let ([engine], [grant]) = (engines, grants) {
        return engine.run(task, grant, sink, monitor);
    }
    if task.composition.exchanges_rows() {
        let engines: Vec<&dyn Engine> = engines.iter().map(|engine| &**engine).collect();
        connect_all(&engines, monitor.cancel())?;
    }
    let gang = Gang { stop: CancelFlag::new(), state: Mutex::default(), changed: Condvar::new() };
    let devices: Vec<DeviceId> = engines.iter().map(|engine| engine.id()).collect();
    let board = GangBoard::new(&devices)?;
    let rows = near_rows(engines, &board, &task);
    let monitors: Vec<Monitor> = engines.iter().map(|_| Monitor::new(gang.stop.clone())).collect();
    let interrupted = sink.interrupted_by(gang.stop.interrupt());
    let sink = interrupted.as_deref().unwrap_or(sink);
    std::thread::scope(|scope| {
        let ranks = engines.iter().zip(grants).zip(&monitors).enumerate();
        for (number, ((engine, grant), of_rank)) in ranks {
            let near = NearRows { node: engine.numa_node(), ..rows.clone() };
            let (rank, task, gang) = (Rank::of_gang(number, board.clone()).on_node(near), task.clone(), &gang);
            let run = move || {
                let said = |panic: &str| format!("the join panicked on {}: {panic}", engine.id());
                let ran = panics::as_error(said, || engine.run_rank(task, &rank, grant, sink, of_rank));
                gang.ended(ran.context(|| format!("rank {number} on {}", engine.id())));
            };
            if let Err(error) = spawn_in(scope, format!("gang/{number}"), run) {
                gang.ended(Err(error));
            }
        }
        gang.watch(&board, monitor, &monitors);
    });
    monitor.take_over(sum_of(&board, &monitors));
    disconnect_lost(engines);
    gang.state.into_inner().failure.map_or(Ok(()), Err)
}

/// Finds the NUMA nodes of both sides' rows, if the devices are on several nodes. Ranks of one node
/// take rows in their order. Host devices that help GPUs do not count.
fn near_rows(engines: &[Arc<dyn Engine>], board: &GangBoard, task: &Task) -> NearRows {
    let ranks = engines.iter().enumerate().filter(|&(number, _)| !board.helps_gpus(number));
    let mut nodes = ranks.map(|(_, engine)| engine.numa_node());
    let first = nodes.next();
    if nodes.all(|node| Some(node) == first) {
        return NearRows::default();
    }
    let of = |table: &Table| Arc::new(RowNodes::of(table, &|address| engines[0].node_of(address)));
    NearRows { node: None, build: of(&task.build.table), probe: of(&task.probe.table) }
}

/// State that the ranks of a gang share in the server.
struct Gang {
    stop: CancelFlag,
    state: Mutex<GangState>,
    changed: Condvar,
}

#[derive(Default)]
struct GangState {
    ended: usize,
    /// First failure that is not the consequence of another.
    failure: Option<Error>,
}

impl Gang {
    fn ended(&self, outcome: Result<()>) {
        let mut state = self.state.lock();
        state.ended += 1;
        if let Err(error) = outcome {
            if state.failure.as_ref().is_none_or(|known| explains(&error, known)) {
                state.failure = Some(error);
            }
            self.stop.raise();
        }
        self.changed.notify_all();
    }

    /// Reports progress and passes on the request to stop, until all ranks have ended.
    fn watch(&self, board: &GangBoard, job: &Monitor, monitors: &[Monitor]) {
        let mut state = self.state.lock();
        while state.ended < monitors.len() {
            if job.cancel().is_raised() {
                self.stop.raise();
            }
            job.take_over(sum_of(board, monitors));
            self.changed.wait_for(&mut state, LOOK_INTERVAL);
        }
    }
}

/// True if a later failure is the reason for an earlier one. A rank that was stopped is never the
/// reason, and a device that failed always is: the end of its process is noticed late.
fn explains(later: &Error, earlier: &Error) -> bool {
    let weight = |error: &Error| match error {
        Error::Cancelled(_) => 0,
        Error::Unavailable(_) => 2,
        _ => 1,
    };
    weight(later) > weight(earlier)
}

/// Adds up what the ranks report, and lists the part of each. Work that a rank has not announced
/// yet counts as the work that others have announced, so that progress does not go back. The work
/// of host devices that help GPUs does not count, because no share of the rows is theirs.
fn sum_of(board: &GangBoard, monitors: &[Monitor]) -> Report {
    let reports: Vec<Report> = monitors.iter().map(Monitor::report).collect();
    let announced = reports.iter().map(|report| report.work_total).max().unwrap_or(0);
    let ranks = board.devices().iter().zip(&reports).map(|(&device, report)| RankReport::of(device, report)).collect();
    let mut sum = Report { ranks, ..Report::default() };
    for (number, report) in reports.into_iter().enumerate() {
        if !board.helps_gpus(number) {
            sum.work_done += report.work_done;
            sum.work_total += report.work_total.max(announced);
        }
        sum.probed_rows += report.probed_rows;
        sum.build_rows += report.build_rows;
        sum.sent_bytes += report.sent_bytes;
        sum.sending_seconds += report.sending_seconds;
        add_phases(&mut sum.phases, report.phases);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceKind;

    #[test]
    fn the_progress_of_a_gang_is_that_of_the_ranks_that_divide_the_rows() {
        let device = |kind, index| DeviceId { kind, index };
        let gpus = [device(DeviceKind::Cuda, 0), device(DeviceKind::Cuda, 1)];
        let hosts = [device(DeviceKind::Host, 0), device(DeviceKind::Host, 1)];
        let progress_of = |devices: [DeviceId; 2]| {
            let monitors = [50, 10].map(|done| {
                let monitor = Monitor::default();
                monitor.expect_work(100);
                monitor.advance(done);
                monitor
            });
            let report = sum_of(&GangBoard::new(&devices).unwrap(), &monitors);
            assert_eq!(report.ranks.len(), 2);
            (report.work_done, report.work_total)
        };
        assert_eq!([progress_of(gpus), progress_of(hosts)], [(60, 200); 2]);
        assert_eq!(progress_of([gpus[0], hosts[0]]), (50, 100));
    }
}
