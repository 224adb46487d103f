//! Results that become tables.
//!
//! ```text
//!   worker of a device ─ last rows ─► publishing ─► threads of this file ─► table, end of job
//!        └─► next job                                 └─ wait for statistics, and take part
//! ```
//!
//! A job leaves its devices with its last rows. The statistics of its table may take longer, so
//! other threads wait for them. Until the table appears the job is running: its readers wait for
//! the end, and it can be stopped.

use std::time::Instant;

use super::job::Job;
use super::state::{Publishing, Shared, Taken};
use crate::{Context, Result, panics};

impl Shared {
    /// Takes a job that has written its last rows off its devices. Its result becomes a table
    /// later.
    pub(super) fn hand_to_publishers(&self, taken: &Taken) {
        let mut state = self.state.lock();
        self.release_devices(&mut state, taken);
        state.publishing.push(Publishing { job: taken.job.clone(), is_taken: false });
        self.publish.notify_one();
        self.give_turns(state);
    }

    /// Makes tables of results until shutdown, and then until no job can come any more. Runs in
    /// threads of its own.
    pub(super) fn keep_publishing(&self) {
        loop {
            while self.publish_next() {}
            let mut state = self.state.lock();
            if state.publishing.iter().any(|publishing| !publishing.is_taken) {
                continue;
            }
            if state.shutdown && state.devices.iter().all(|device_state| device_state.running.is_empty()) {
                return;
            }
            self.publish.wait(&mut state);
        }
    }

    /// Makes a table of the result that has waited longest. Returns `false` if none waits.
    pub(super) fn publish_next(&self) -> bool {
        let next = {
            let mut state = self.state.lock();
            let next = state.publishing.iter_mut().find(|publishing| !publishing.is_taken);
            next.map(|publishing| {
                publishing.is_taken = true;
                publishing.job.clone()
            })
        };
        let Some(job) = next else { return false };
        let said = |message: &str| {
            tracing::error!(job = job.id.0, message, "making a table of a result panicked");
            format!("making a table of the result of job {} panicked: {message}", job.id)
        };
        let outcome = panics::as_error(said, || keep_as_table(&job));
        self.conclude(&job, outcome, |state| state.publishing.retain(|publishing| publishing.job.id != job.id));
        true
    }
}

fn keep_as_table(job: &Job) -> Result<()> {
    let written = Instant::now();
    let name = job.settle_table(job.result.wait_for_statistics())?;
    let into = name.name().to_string();
    job.result
        .into_table(name, &job.owner, job.options.into_life)
        .context(|| format!("keeping the result as table {into:?}"))?;
    let after_ms = (written.elapsed().as_secs_f64() * 1e6).round() / 1e3;
    tracing::info!(job = job.id.0, table = into, after_ms, "the result is a table");
    Ok(())
}
