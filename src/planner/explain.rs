//! Explains a plan for people and machines: steps, predicted and measured times, and rejected
//! alternatives.

use std::fmt;

use serde::Serialize;

use super::cost::{MemoryNeed, PredictedPhase, Resource};
use super::deviation::{Measured, PhaseTimes, deviation};
use super::explain_chain::{
    ExplainedChainJoin, chain_tree, explained_chain, phases_of_all, predicted_share, rows_that_arrive, write_chain,
};
use super::inputs::{Inputs, TextWork};
use super::{Distribution, KeptBuild, MovedPayload, Plan, Rates, Side, Strategy, Target};
use crate::Error;
use crate::device::Phase;
use crate::human;
use crate::join::{PhaseRecord, RankReport};
use crate::memory::human_bytes;

/// Everything known about a plan. The action `explain` answers with its JSON form. The command line
/// shows its text form.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    pub strategy: &'static str,
    pub reason: String,
    /// Reason why the server refuses the join, and a remedy. `None` if the join may run.
    pub refusal: Option<String>,
    pub how: &'static str,
    /// Steps of the plan, the last one first, indented as a tree.
    pub tree: Vec<String>,
    pub device: ExplainedDevice,
    /// Sets of devices that were candidates when the join was planned, small sets first. Empty if
    /// the request allowed only one.
    pub sets: Vec<ExplainedSet>,
    pub left: ExplainedSide,
    pub right: ExplainedSide,
    pub result: ExplainedResult,
    pub memory: MemoryNeed,
    pub phases: Vec<ExplainedPhase>,
    /// Number of the prepared build side that the join probes. `None` if it prepares its own.
    pub prepared: Option<u64>,
    /// Time at which that build side was prepared, as RFC 3339 in UTC.
    pub prepared_since: Option<String>,
    /// Predicted seconds that the join saves by not preparing it again.
    pub prepared_saves_seconds: Option<f64>,
    /// Phases without the work on that build side: they are left out, or shorter.
    pub prepared_saves: Vec<Phase>,
    /// Joins of a chain, in the order in which the rows probe them. Empty for any other join.
    pub chain: Vec<ExplainedChainJoin>,
    /// Comparison of that order with the predicted order, and the reason for a difference. `None`
    /// if no rows have passed through a chain.
    pub chain_order: Option<String>,
    /// `None` if no rows cross between devices.
    pub exchange: Option<ExplainedExchange>,
    /// Part of each device in a join that runs or has run on several.
    pub ranks: Vec<RankReport>,
    /// `None` if the join has not run on several devices.
    pub skew: Option<Skew>,
    pub predicted_seconds: f64,
    /// `None` for a job that has not run.
    pub measured_seconds: Option<f64>,
    /// Reason why the measured time is far from the prediction. `None` if the two are close.
    pub deviation: Option<String>,
    pub alternatives: Vec<ExplainedAlternative>,
}

/// The devices of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedDevice {
    /// One name, or the names of all ranks, separated by commas.
    pub name: String,
    pub reason: String,
    /// Bytes of each device.
    pub memory_bytes: u64,
    /// Number of devices that run the join together. The seconds and bytes of phases are those of
    /// one of them.
    pub ranks: usize,
    /// Division of the join among the ranks: `alone`, `broadcast` or `hash`.
    pub distribution: &'static str,
}

/// Sets of devices with one plan, as candidates for a join.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedSet {
    /// Names of the devices of one of the sets, separated by commas.
    pub devices: String,
    /// Number of devices of each set.
    pub ranks: usize,
    /// Number of sets.
    pub sets: usize,
    pub strategy: &'static str,
    /// Division of the join among the devices: `alone`, `broadcast` or `hash`.
    pub distribution: &'static str,
    /// Seconds if the devices run nothing else.
    pub predicted_seconds: f64,
    /// Resource that is busy for longest.
    pub bound: Resource,
    /// Reason why the join does not run there. `None`: the queue decides.
    pub rejected: Option<String>,
}

impl ExplainedSet {
    /// Describes `sets` sets of the plan's number of devices.
    pub fn new(plan: &Plan, devices: String, sets: usize, rejected: Option<String>) -> Self {
        Self {
            devices,
            ranks: plan.target.ranks,
            sets,
            strategy: plan.strategy().name(),
            distribution: plan.composition.distribution.name(),
            predicted_seconds: plan.seconds,
            bound: plan.bound,
            rejected,
        }
    }
}

/// A side of the join.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedSide {
    pub table: String,
    /// `build` or `probe`.
    pub role: &'static str,
    pub keys: Vec<String>,
    pub rows: u64,
    pub bytes: u64,
    pub keyed_rows: u64,
    /// Estimated.
    pub distinct_keys: u64,
    /// Predicted.
    pub matched_rows: u64,
    /// Keys with far more rows than others, the most frequent first, as far as a sample shows.
    /// Empty for several key columns.
    pub heavy_keys: Vec<ExplainedHeavyKey>,
    pub sorted: bool,
    /// Columns that move with the keys when rows are partitioned or sorted. The others are gathered
    /// by row number.
    pub carried: Vec<String>,
    /// Rows predicted to pass the filter of the build keys, for a filtered probe side.
    pub filtered_rows: Option<u64>,
}

/// A key with many rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedHeavyKey {
    pub key: String,
    /// Estimated.
    pub rows: u64,
}

/// The result of the join.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedResult {
    pub predicted_rows: u64,
    pub predicted_bytes: u64,
    /// Rows so far; the total once the result is complete.
    pub rows: Option<u64>,
}

/// A phase, with prediction and measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedPhase {
    #[serde(rename = "name")]
    pub phase: Phase,
    /// `None`: the phase was not expected.
    pub predicted_seconds: Option<f64>,
    pub predicted_bytes: Option<u64>,
    /// `None`: the phase has not run.
    pub measured_seconds: Option<f64>,
    /// Bytes read and written, as the running join counted them.
    pub measured_bytes: Option<u64>,
    pub measured_bytes_per_second: Option<f64>,
    /// Bytes that were not copied because the device had cached them in an earlier join. `None`:
    /// the phase has not run.
    pub kept_bytes: Option<u64>,
    /// Bytes that were not copied because the device reads them in place. `None`: the phase has not
    /// run.
    pub in_place_bytes: Option<u64>,
    pub boundary: Resource,
    /// Measured rate of that boundary, in bytes per second: an upper limit for the phase.
    pub boundary_bytes_per_second: f64,
}

/// Bytes that cross between the devices of a gang. Bytes and seconds are those of one of them, the
/// measured ones on average.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedExchange {
    pub predicted_bytes: u64,
    /// Seconds of these bytes at the rate of the boundary.
    pub predicted_seconds: f64,
    /// `None`: the join has not run.
    pub measured_bytes: Option<u64>,
    /// Seconds in which a device sent rows, or waited for room to send them.
    pub measured_seconds: Option<f64>,
    pub measured_bytes_per_second: Option<f64>,
    pub boundary: Resource,
    /// Rate of that boundary out of each device, in bytes per second.
    pub boundary_bytes_per_second: f64,
}

/// Largest part of a device in a gang, relative to the mean. 1: all parts are equal.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Skew {
    pub build_rows: f64,
    pub probe_rows: f64,
    pub sent_bytes: f64,
    pub work_seconds: f64,
}

impl Skew {
    /// Returns the skew of a gang; `None` without ranks.
    fn of(ranks: &[RankReport]) -> Option<Self> {
        let skew = |part: &dyn Fn(&RankReport) -> f64| {
            let sum: f64 = ranks.iter().map(part).sum();
            let largest = ranks.iter().map(part).fold(0.0, f64::max);
            if sum > 0.0 { largest * ranks.len() as f64 / sum } else { 1.0 }
        };
        (!ranks.is_empty()).then(|| Self {
            build_rows: skew(&|rank| rank.build_rows as f64),
            probe_rows: skew(&|rank| rank.probe_rows as f64),
            sent_bytes: skew(&|rank| rank.sent_bytes as f64),
            work_seconds: skew(&|rank| rank.work_seconds),
        })
    }
}

/// A strategy that was not chosen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedAlternative {
    pub strategy: &'static str,
    pub build_side: String,
    /// `alone`, `broadcast` or `hash`.
    pub distribution: &'static str,
    pub predicted_seconds: f64,
    pub reason: String,
}

impl Explanation {
    /// Explains a plan on a device, with measurements if the join has run.
    pub fn new(plan: &Plan, device: &str, device_reason: String, measured: Option<&Measured>) -> Self {
        let join = &plan.join;
        let moved = MovedNames::of(plan);
        let ranks = measured.map_or(&[][..], |measured| &measured.ranks);
        let side = |side: Side| {
            let table = join.table(side);
            let key_name = |key: &super::JoinKey| table.schema.field(key.column(side)).name().clone();
            ExplainedSide {
                table: table.name.clone(),
                role: if side == plan.composition.build_side { "build" } else { "probe" },
                keys: join.keys.iter().map(key_name).collect(),
                rows: table.rows,
                bytes: table.bytes,
                keyed_rows: plan.estimates.keyed(side).round() as u64,
                distinct_keys: plan.estimates.distinct(side).round() as u64,
                matched_rows: plan.estimates.matched(side).round() as u64,
                heavy_keys: heavy_keys(plan, side),
                sorted: if side == plan.composition.build_side { plan.build_sorted } else { plan.probe_sorted },
                carried: moved.of_side(side).iter().map(|name| (*name).to_owned()).collect(),
                filtered_rows: match side == plan.composition.build_side {
                    true => None,
                    false => plan.filtered_rows.map(|rows| rows.round() as u64),
                },
            }
        };
        let alternatives = plan.alternatives.iter().map(|alternative| ExplainedAlternative {
            strategy: alternative.strategy.name(),
            build_side: alternative.build_side.to_string(),
            distribution: alternative.distribution.name(),
            predicted_seconds: alternative.seconds,
            reason: alternative.reason(device, plan.target.memory_bytes),
        });
        let result = ExplainedResult {
            predicted_rows: match join.counts_rows {
                true => 1,
                false => (plan.estimates.rows * plan.then.iter().map(predicted_share).product::<f64>()).round() as u64,
            },
            predicted_bytes: plan.result_bytes,
            rows: measured.map(|measured| measured.rows),
        };
        let phases = line_up(&phases_of_all(plan), measured, &plan.target);
        let (chain, chain_order) = explained_chain(plan, measured.map(|measured| &measured.chain));
        let kept = plan.kept_build.as_ref();
        Self {
            strategy: plan.strategy().name(),
            reason: plan.reason.clone(),
            refusal: None,
            how: join.how.name(),
            tree: tree(plan, &moved),
            device: ExplainedDevice {
                name: device.into(),
                reason: match &plan.undivided {
                    Some(why) => format!("{device_reason}; {why}"),
                    None => device_reason,
                },
                memory_bytes: plan.target.memory_bytes,
                ranks: plan.target.ranks,
                distribution: plan.composition.distribution.name(),
            },
            sets: Vec::new(),
            left: side(Side::Left),
            right: side(Side::Right),
            result,
            memory: plan.memory,
            deviation: measured.and_then(|measured| deviation(plan.seconds, &times(&phases), measured)),
            phases,
            prepared: kept.map(|kept| kept.number),
            prepared_since: kept.map(KeptBuild::since),
            prepared_saves_seconds: kept.map(|kept| kept.saved_seconds),
            prepared_saves: kept.map_or_else(Vec::new, |kept| kept.saved_phases.clone()),
            chain,
            chain_order,
            exchange: exchange(plan, ranks),
            ranks: ranks.to_vec(),
            skew: Skew::of(ranks),
            predicted_seconds: plan.seconds,
            measured_seconds: measured.map(|measured| measured.seconds),
            alternatives: alternatives.collect(),
        }
    }

    /// Adds the sets of devices that were candidates.
    #[must_use]
    pub fn among(self, sets: Vec<ExplainedSet>) -> Self {
        Self { sets: if sets.len() > 1 { sets } else { Vec::new() }, ..self }
    }

    /// Adds the reason why the join is refused, if there is one.
    #[must_use]
    pub fn refused(self, refusal: Option<&Error>) -> Self {
        Self { refusal: refusal.map(|refusal| refusal.message().into()), ..self }
    }
}

/// Explains a measured time that is far from the prediction of the plan; `None` if the two are
/// close.
pub fn deviation_from(plan: &Plan, measured: &Measured) -> Option<String> {
    deviation(plan.seconds, &times(&line_up(&phases_of_all(plan), Some(measured), &plan.target)), measured)
}

fn times(phases: &[ExplainedPhase]) -> Vec<PhaseTimes> {
    let times = phases.iter().map(|phase| PhaseTimes {
        name: phase.phase.name(),
        predicted_seconds: phase.predicted_seconds.unwrap_or(0.0),
        measured_seconds: phase.measured_seconds.unwrap_or(0.0),
        saved_bytes: phase.kept_bytes.unwrap_or(0) + phase.in_place_bytes.unwrap_or(0),
    });
    times.collect()
}

/// Pairs each predicted phase, in order, with its measurement, then adds the unexpected phases.
/// Seconds and bytes are those of one rank, the measured ones on average.
fn line_up(predicted: &[PredictedPhase], measured: Option<&Measured>, target: &Target) -> Vec<ExplainedPhase> {
    let of_all = measured.map_or(&[][..], |measured| &measured.phases);
    let measured: Vec<PhaseRecord> = of_all.iter().map(|phase| phase.of_each(target.ranks)).collect();
    let explained = |phase: Phase, predicted: Option<&PredictedPhase>| {
        let found = measured.iter().find(|measured| measured.phase == phase);
        let rate = found.filter(|phase| phase.seconds > 0.0 && phase.bytes > 0);
        let (boundary, boundary_bytes_per_second) = boundary(phase, &target.rates);
        ExplainedPhase {
            phase,
            predicted_seconds: predicted.map(|phase| phase.seconds),
            predicted_bytes: predicted.map(|phase| phase.bytes),
            measured_seconds: found.map(|phase| phase.seconds),
            measured_bytes: found.map(|phase| phase.bytes),
            measured_bytes_per_second: rate.map(|phase| phase.bytes as f64 / phase.seconds),
            kept_bytes: found.map(|phase| phase.kept_bytes),
            in_place_bytes: found.map(|phase| phase.in_place_bytes),
            boundary,
            boundary_bytes_per_second,
        }
    };
    let expected = predicted.iter().map(|phase| explained(phase.phase, Some(phase)));
    let is_expected = |phase: Phase| predicted.iter().any(|expected| expected.phase == phase);
    let unexpected =
        measured.iter().filter(|phase| !is_expected(phase.phase)).map(|phase| explained(phase.phase, None));
    expected.chain(unexpected).collect()
}

/// Returns the predicted and measured bytes of an exchange; `None` for a plan without one.
fn exchange(plan: &Plan, ranks: &[RankReport]) -> Option<ExplainedExchange> {
    if !plan.composition.exchanges_rows() {
        return None;
    }
    let rate = plan.target.gang.peers;
    let mean = |part: &dyn Fn(&RankReport) -> f64| {
        (!ranks.is_empty()).then(|| ranks.iter().map(part).sum::<f64>() / ranks.len() as f64)
    };
    let (bytes, seconds) = (mean(&|rank| rank.sent_bytes as f64), mean(&|rank| rank.sending_seconds));
    Some(ExplainedExchange {
        predicted_bytes: plan.sent_bytes,
        predicted_seconds: plan.sent_bytes as f64 / rate,
        measured_bytes: bytes.map(|bytes| bytes as u64),
        measured_seconds: seconds,
        measured_bytes_per_second: bytes.zip(seconds.filter(|&seconds| seconds > 0.0)).map(|(bytes, s)| bytes / s),
        boundary: Resource::Peers,
        boundary_bytes_per_second: rate,
    })
}

/// Resource whose boundary the bytes of a phase cross, and its rate in bytes per second.
fn boundary(phase: Phase, rates: &Rates) -> (Resource, f64) {
    match phase {
        Phase::CopyIn => (Resource::LinkIn, rates.copy_in),
        // Half of the bytes that a gather counts are read on the device; the other half crosses to
        // the host.
        Phase::Gather if 2.0 * rates.copy_out < rates.stream => (Resource::LinkOut, 2.0 * rates.copy_out),
        _ => (Resource::Device, rates.stream),
    }
}

/// Steps of the plan, from the result down to the tables.
fn tree(plan: &Plan, moved: &MovedNames<'_>) -> Vec<String> {
    /// Maximum heavy keys shown. More keys, or more characters per key, would hide the rest of the
    /// tree.
    const HEAVY_SHOWN: usize = 3;
    const KEY_CHARS_MAX: usize = 24;
    if let Some(then) = &plan.join.then {
        return chain_tree(plan, &then.labels);
    }
    let how_gathered = match (plan.strategy(), &plan.composition.moved_payload) {
        (Strategy::Hash, _) => "by row number",
        (_, MovedPayload::Everything) => "from the columns moved with the keys",
        (_, MovedPayload::Nothing) => "by row number, from the columns as stored",
        (_, MovedPayload::Columns { .. }) => "from the columns moved with the keys, the others by row number",
    };
    let matching = match plan.strategy() {
        Strategy::Hash if plan.composition.dense => "probe one perfect-hash array".into(),
        Strategy::Hash => "probe one hash table".into(),
        Strategy::RadixHash | Strategy::RadixHashGfur => match 1u64 << plan.composition.radix_bits().unwrap_or(0) {
            1 => "match one partition with a hash table".into(),
            partitions => format!("match {} partitions, a hash table for each", human::count(partitions)),
        },
        Strategy::SortMerge | Strategy::SortMergeGfur => "merge sorted rows".into(),
    };
    let made = match plan.join.counts_rows {
        true => {
            format!("count the rows, expected to be {}", human::count(plan.estimates.rows.round() as u64))
        }
        false => {
            let columns = human::counted(plan.join.output.len() as u64, "column");
            let text = if plan.composition.device_gathers_text { ", text also by the GPU" } else { "" };
            format!("gather {columns} {how_gathered}{text}")
        }
    };
    let compared = match (plan.compares_keys(), plan.composition.device_makes_keys) {
        (false, _) => "",
        (true, false) => "; keys hashed and compared by the CPU",
        (true, true) => "; keys hashed and compared by the GPU",
    };
    let mut lines = vec![made, format!("└─ {matching}: {}{compared}", plan.join.how)];
    for (branch, role, side, sorted) in [
        ("├─", "build", plan.composition.build_side, plan.build_sorted),
        ("└─", "probe", plan.composition.build_side.other(), plan.probe_sorted),
    ] {
        let table = plan.join.table(side);
        let moved = match (&plan.composition.moved_payload, moved.of_side(side)) {
            (MovedPayload::Everything, _) => "keys and columns".into(),
            (MovedPayload::Columns { .. }, names) if !names.is_empty() => {
                format!("keys with {}", human::first_of(names.iter()))
            }
            _ => "keys and row numbers".to_string(),
        };
        let transformed = match plan.strategy() {
            Strategy::Hash => "as stored".to_string(),
            Strategy::RadixHash | Strategy::RadixHashGfur => format!("partition {moved}"),
            Strategy::SortMerge | Strategy::SortMergeGfur if sorted => "sorted already".into(),
            Strategy::SortMerge | Strategy::SortMergeGfur => format!("sort {moved}"),
        };
        let filtered = match plan.filtered_rows {
            Some(rows) if side != plan.composition.build_side => {
                let share = 100.0 * rows / plan.estimates.keyed(side).max(1.0);
                format!("filter by the build keys, {share:.0} % pass; ")
            }
            _ => String::new(),
        };
        let later = match plan.composition.defers_build_payload() && role == "build" {
            true => ", its other columns after the probe side",
            false => "",
        };
        let divided = match (plan.composition.distribution, role) {
            (Distribution::Alone, _) => String::new(),
            (Distribution::Broadcast, "build") if plan.composition.shares_build_read => {
                format!("; all of it to each of {} devices, which read a share each", plan.target.ranks)
            }
            (Distribution::Broadcast, "build") => format!("; all of it to each of {} devices", plan.target.ranks),
            (Distribution::Broadcast, _) => format!("; divided among {} devices", plan.target.ranks),
            (Distribution::Hash, _) => format!("; exchanged by key among {} devices", plan.target.ranks),
        };
        let kept = match (&plan.kept_build, role) {
            (Some(kept), "build") => format!("; {kept}"),
            _ => String::new(),
        };
        lines.push(format!("   {branch} {role}: {filtered}{transformed}{later}{divided}{kept}"));
        let stem = if branch == "├─" { "│ " } else { "  " };
        lines.push(match table.arrives {
            true => format!("   {stem} └─ {}", rows_that_arrive(table)),
            false => format!(
                "   {stem} └─ table {:?}, {}, {}",
                table.name,
                human::counted(table.rows, "row"),
                human_bytes(table.bytes)
            ),
        });
        let heavy = heavy_keys(plan, side);
        if !heavy.is_empty() {
            let share = |heavy: &ExplainedHeavyKey| {
                let key: String = heavy.key.chars().take(KEY_CHARS_MAX).collect();
                format!("{key:?} on {:.1} % of the rows", 100.0 * heavy.rows as f64 / table.rows.max(1) as f64)
            };
            let shown: Vec<String> = heavy.iter().take(HEAVY_SHOWN).map(share).collect();
            let more = if heavy.len() > HEAVY_SHOWN { ", ..." } else { "" };
            lines.push(format!("   {stem}     heavy keys: {}{more}", shown.join(", ")));
        }
    }
    lines
}

/// Returns the keys of a side with far more rows than others.
fn heavy_keys(plan: &Plan, side: Side) -> Vec<ExplainedHeavyKey> {
    let table = plan.join.table(side);
    let explained = plan.estimates.heavy(&plan.join, side).filter_map(|(heavy, rows)| {
        let values = plan.join.keys.iter().map(|key| table.value_text(key.column(side), heavy.row));
        let values: Option<Vec<String>> = values.collect();
        Some(ExplainedHeavyKey { key: values?.join(", "), rows: rows.round() as u64 })
    });
    explained.collect()
}

/// The columns of each side that move with its keys.
struct MovedNames<'a> {
    left: Vec<&'a str>,
    right: Vec<&'a str>,
}

impl<'a> MovedNames<'a> {
    fn of(plan: &'a Plan) -> Self {
        let (join, build_side) = (&plan.join, plan.composition.build_side);
        let text =
            TextWork { makes_keys: plan.composition.device_makes_keys, gathers: plan.composition.device_gathers_text };
        // A plan exists only if its keys can be packed.
        let Ok(inputs) = Inputs::new(join, build_side, &plan.estimates, text) else {
            return Self { left: Vec::new(), right: Vec::new() };
        };
        let names = |side: Side| {
            let input = if side == build_side { &inputs.build } else { &inputs.probe };
            let moved = plan.composition.moved_payload.of_side(side, &join.output_columns(side, build_side));
            let moving = input.columns.iter().filter(|column| column.can_move() && moved.contains(&column.index));
            moving.map(|column| join.table(side).schema.field(column.index).name().as_str()).collect()
        };
        Self { left: names(Side::Left), right: names(Side::Right) }
    }

    fn of_side(&self, side: Side) -> &[&'a str] {
        if side == Side::Left { &self.left } else { &self.right }
    }
}

/// One line: the bytes that each device sends, predicted and measured.
impl fmt::Display for ExplainedExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = |bytes_per_second: f64| format!("{}/s", human_bytes(bytes_per_second as u64));
        let (bytes, seconds) = (human_bytes(self.predicted_bytes), human::seconds(self.predicted_seconds));
        write!(f, "sent by each device: {bytes} predicted, at least {seconds}")?;
        if let (Some(bytes), Some(seconds)) = (self.measured_bytes, self.measured_seconds) {
            write!(f, "; {} measured, {}", human_bytes(bytes), human::seconds(seconds))?;
        }
        if let Some(achieved) = self.measured_bytes_per_second {
            write!(f, "; {} of {} ({})", rate(achieved), rate(self.boundary_bytes_per_second), self.boundary)?;
        }
        Ok(())
    }
}

/// Prints the part of each rank, and the largest part over the mean.
fn write_ranks(f: &mut fmt::Formatter<'_>, ranks: &[RankReport], skew: &Skew) -> fmt::Result {
    let mut line = |title: &str, cells: [String; 5]| {
        let [build, probe, sent, sending, work] = cells;
        writeln!(f, "{title:17} {build:>14} {probe:>14} {sent:>11} {sending:>9} {work:>9}")
    };
    line("rank", ["build rows", "probe rows", "sent", "sending", "work"].map(Into::into))?;
    for rank in ranks {
        let cells = [
            human::count(rank.build_rows),
            human::count(rank.probe_rows),
            human_bytes(rank.sent_bytes),
            human::seconds(rank.sending_seconds),
            human::seconds(rank.work_seconds),
        ];
        line(&rank.device, cells)?;
    }
    let Skew { build_rows, probe_rows, sent_bytes, work_seconds } = skew;
    let times = |skew: &f64| format!("{skew:.2}");
    line(
        "largest / mean",
        [times(build_rows), times(probe_rows), times(sent_bytes), String::new(), times(work_seconds)],
    )
}

/// Prints the candidate sets as a table.
fn write_sets(f: &mut fmt::Formatter<'_>, sets: &[ExplainedSet]) -> fmt::Result {
    writeln!(f, "devices that could run it: predicted time, what bounds it")?;
    for set in sets {
        let how = match set.ranks {
            1 => set.strategy.to_string(),
            _ => format!("{}, {}", set.strategy, set.distribution),
        };
        let more = if set.sets > 1 { format!(" ({} such sets)", set.sets) } else { String::new() };
        let rejected = set.rejected.as_ref().map_or_else(String::new, |why| format!("; {why}"));
        writeln!(
            f,
            "  {:>9}  {}{more}: {how}; {}{rejected}",
            human::seconds(set.predicted_seconds),
            set.devices,
            set.bound
        )?;
    }
    Ok(())
}

/// Prints the plan, the phases as a table, the parts of ranks, and the alternatives.
impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.strategy, self.reason)?;
        writeln!(f, "on {}: {}", self.device.name, self.device.reason)?;
        if let (Some(number), Some(since), Some(saved)) =
            (self.prepared, &self.prepared_since, self.prepared_saves_seconds)
        {
            let phases: Vec<&str> = self.prepared_saves.iter().map(|phase| phase.name()).collect();
            writeln!(
                f,
                "build side {number} is kept there since {since}: it saves {} of a predicted {} ({})",
                human::seconds(saved),
                human::seconds(self.predicted_seconds + saved),
                phases.join(", ")
            )?;
        }
        if let Some(refusal) = &self.refusal {
            writeln!(f, "the join would be refused now: {refusal}")?;
        }
        writeln!(f)?;
        for line in &self.tree {
            writeln!(f, "  {line}")?;
        }
        writeln!(f)?;
        if !self.chain.is_empty() {
            write_chain(f, &self.chain, self.chain_order.as_ref())?;
            writeln!(f)?;
        }
        write!(
            f,
            "result: {} predicted, {}",
            human::counted(self.result.predicted_rows, "row"),
            human_bytes(self.result.predicted_bytes)
        )?;
        if let Some(rows) = self.result.rows {
            write!(f, "; {} so far or in total", human::counted(rows, "row"))?;
        }
        writeln!(f)?;
        writeln!(
            f,
            "device memory: at least {}, {} for the whole probe side at once",
            human_bytes(self.memory.minimum_bytes),
            human_bytes(self.memory.whole_bytes)
        )?;
        writeln!(f)?;
        writeln!(f, "{:17} {:>21}  {:>21}  achieved", "phase", "predicted", "measured")?;
        for phase in &self.phases {
            let cell = |seconds: Option<f64>, bytes: Option<u64>| match seconds {
                Some(seconds) => format!("{:>9} {:>11}", human::seconds(seconds), human_bytes(bytes.unwrap_or(0))),
                None => "-".into(),
            };
            let rate = |bytes_per_second: f64| format!("{}/s", human_bytes(bytes_per_second as u64));
            let achieved = phase.measured_bytes_per_second.map(|achieved| {
                format!("{} of {} ({})", rate(achieved), rate(phase.boundary_bytes_per_second), phase.boundary)
            });
            let savings = |bytes: Option<u64>, how: &str| {
                bytes.filter(|&bytes| bytes > 0).map(|bytes| format!("{} {how}", human_bytes(bytes)))
            };
            let kept = savings(phase.kept_bytes, "cached on the device");
            let in_place = savings(phase.in_place_bytes, "read in place");
            let told: Vec<String> = [achieved, kept, in_place].into_iter().flatten().collect();
            let achieved = if told.is_empty() { "-".into() } else { told.join("; ") };
            writeln!(
                f,
                "{:17} {:>21}  {:>21}  {achieved}",
                phase.phase,
                cell(phase.predicted_seconds, phase.predicted_bytes),
                cell(phase.measured_seconds, phase.measured_bytes)
            )?;
        }
        let measured = self.measured_seconds.map_or("-".into(), human::seconds);
        writeln!(f, "{:17} {:>9} {:11}  {:>9}", "total", human::seconds(self.predicted_seconds), "", measured)?;
        if let Some(deviation) = &self.deviation {
            writeln!(f)?;
            writeln!(f, "{deviation}")?;
        }
        if let Some(exchange) = &self.exchange {
            writeln!(f)?;
            writeln!(f, "{exchange}")?;
        }
        if let Some(skew) = &self.skew {
            writeln!(f)?;
            write_ranks(f, &self.ranks, skew)?;
        }
        if !self.sets.is_empty() {
            writeln!(f)?;
            write_sets(f, &self.sets)?;
        }
        if !self.alternatives.is_empty() {
            writeln!(f)?;
            let divided = if self.device.ranks > 1 { ", distribution" } else { "" };
            writeln!(f, "not chosen (strategy, build side{divided})")?;
        }
        for other in &self.alternatives {
            let (name, seconds) = (other.strategy, human::seconds(other.predicted_seconds));
            let divided = if self.device.ranks > 1 { format!(" {:9}", other.distribution) } else { String::new() };
            writeln!(f, "  {name:15} {:5}{divided} {seconds:>9}  {}", other.build_side, other.reason)?;
        }
        Ok(())
    }
}
