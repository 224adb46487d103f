//! Gauges, and counters of other components: read when the metrics are asked for.

use std::time::SystemTime;

use prometheus::{Counter, Encoder, IntCounter, IntGauge, TextEncoder};

use super::metrics::{Metrics, state_name};
use super::shared::Shared;
use crate::scheduler::SchedulerStats;
use crate::{Result, lines};

/// Returns all metrics as text, read now.
///
/// # Errors
/// [`Error::Internal`](crate::Error::Internal) when the text form cannot be written.
pub fn render(shared: &Shared) -> Result<String> {
    shared.metrics.read_gauges(shared);
    let mut text = Vec::new();
    TextEncoder::new()
        .encode(&shared.metrics.registry.gather(), &mut text)
        .map_err(|error| crate::Error::Internal(format!("writing the metrics: {error}")))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

impl Metrics {
    fn read_gauges(&self, shared: &Shared) {
        let set = |gauge: IntGauge, value: u64| gauge.set(value.try_into().unwrap_or(i64::MAX));
        let arena = shared.catalog.arena();
        let kinds = [
            ("used", arena.budget().used_bytes()),
            ("used_max", arena.budget().used_bytes_max()),
            ("mapped", arena.mapped_bytes()),
            ("prefault", arena.prepared_bytes_wanted()),
            ("limit", arena.budget().limit_bytes()),
        ];
        for (kind, bytes) in kinds {
            set(self.arena_bytes.with_label_values(&[kind]), bytes);
        }
        let calls = shared.call_memory.whole();
        let kinds =
            [("used", calls.used_bytes()), ("used_max", calls.used_bytes_max()), ("limit", calls.limit_bytes())];
        for (kind, bytes) in kinds {
            set(self.call_memory_bytes.with_label_values(&[kind]), bytes);
        }
        let (backing, page_bytes) = (arena.backing().kind(), arena.backing().page_bytes().to_string());
        self.arena_info.with_label_values(&[backing, page_bytes.as_str()]).set(1);
        for device in &shared.devices {
            let (id, memory) = (device.id().to_string(), device.memory_use());
            let cache = device.cache_stats().unwrap_or_default();
            let kinds = [
                ("used", memory.used_bytes.saturating_sub(cache.bytes)),
                ("kept", cache.bytes),
                ("used_max", memory.used_bytes_max),
                ("limit", device.memory().limit_bytes()),
            ];
            for (kind, bytes) in kinds {
                set(self.device_memory_bytes.with_label_values(&[&id, kind]), bytes);
            }
        }
        self.read_devices(shared);
        self.read_dropped_lines(shared);
        let mut by_state = [("queued", 0), ("running", 0), ("complete", 0), ("failed", 0), ("cancelled", 0)];
        for job in shared.scheduler.jobs() {
            let state = state_name(&job.state());
            if let Some((_, count)) = by_state.iter_mut().find(|(name, _)| *name == state) {
                *count += 1;
            }
        }
        for (state, count) in by_state {
            self.jobs.with_label_values(&[state]).set(count);
        }
        self.read_scheduler(&shared.scheduler.stats());
        let tables = shared.catalog.tables();
        set(self.tables.clone(), tables.len() as u64);
        set(self.table_bytes.clone(), tables.iter().map(|table| table.bytes).sum());
        set(self.uploads.clone(), shared.uploads.under_way() as u64);
        set(self.cpu_work.with_label_values(&["calls"]), shared.cpu_work.calls() as u64);
        set(self.cpu_work.with_label_values(&["slots_taken"]), shared.cpu_work.slots_taken() as u64);
        raise(&self.cpu_work_interrupted, shared.cpu_work.interrupted() as u64);
        self.tenant_bytes.reset();
        for (tenant, usage) in shared.catalog.usage_of_all() {
            set(self.tenant_bytes.with_label_values(&[&tenant]), usage.bytes);
        }
        self.tenant_connections.reset();
        for (tenant, count) in shared.connections.by_tenant() {
            set(self.tenant_connections.with_label_values(&[&tenant]), count as u64);
        }
        set(self.sessions.clone(), shared.sessions.count() as u64);
        set(self.connections.clone(), shared.connections.open() as u64);
        if let Some(reload) = shared.credentials.last_reload() {
            let at = reload.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            set(self.last_reload_seconds.clone(), at.as_secs());
            self.last_reload_failed.set(reload.has_failed.into());
        }
    }
}

impl Metrics {
    /// Copies the counters of devices and of the arena.
    fn read_devices(&self, shared: &Shared) {
        let _reading = self.reading.lock();
        raise_seconds(&self.arena_wait_seconds, shared.catalog.arena().waited().as_secs_f64());
        for device in &shared.devices {
            let id = device.id().to_string();
            raise(&self.device_restarts.with_label_values(&[&id]), device.restarts());
            let Some(cache) = device.cache_stats() else { continue };
            for (outcome, total) in [("hit", cache.hits), ("miss", cache.misses), ("evicted", cache.evictions)] {
                raise(&self.device_cache.with_label_values(&[&id, outcome]), total);
            }
            raise(&self.device_cache_hit_bytes.with_label_values(&[&id]), cache.hit_bytes);
        }
    }

    /// Copies the counts of dropped log lines.
    fn read_dropped_lines(&self, shared: &Shared) {
        let _reading = self.reading.lock();
        raise(&self.log_lines_dropped.with_label_values(&["server"]), lines::dropped());
        for device in &shared.devices {
            let Some(total) = device.dropped_lines() else { continue };
            raise(&self.log_lines_dropped.with_label_values(&[&device.id().to_string()]), total);
        }
    }

    /// Copies the counters of the scheduler.
    fn read_scheduler(&self, stats: &SchedulerStats) {
        let _reading = self.reading.lock();
        let outcomes = [
            ("submitted", stats.submitted_total),
            ("refused", stats.refused_total),
            ("completed", stats.completed_total),
            ("failed", stats.failed_total),
            ("cancelled", stats.cancelled_total),
        ];
        for (outcome, total) in outcomes {
            raise(&self.jobs_total.with_label_values(&[outcome]), total);
        }
        raise(&self.result_rows, stats.rows_total);
        raise(&self.result_bytes, stats.bytes_total);
        raise(&self.shared_questions, stats.shared_questions_total);
        raise_seconds(&self.job_wait_seconds, stats.waited_seconds_total);
        self.queue_length.set(stats.queued as i64);
        for device in &stats.devices {
            let id = device.id.to_string();
            self.device_up.with_label_values(&[&id]).set(device.lost.is_none().into());
            raise(&self.device_jobs.with_label_values(&[&id]), device.jobs_total);
            raise_seconds(&self.device_busy_seconds.with_label_values(&[&id]), device.busy_seconds_total);
        }
    }
}

fn raise_seconds(counter: &Counter, total: f64) {
    counter.inc_by((total - counter.get()).max(0.0));
}

/// Raises a counter to a total that is counted elsewhere.
fn raise(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}
