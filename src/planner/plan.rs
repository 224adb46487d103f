//! Plans: the way a join will run, and the reason for it.

use std::cmp::Ordering;

use super::cost::{Chunks, Costed, Demand, Links, MemoryNeed, PredictedPhase, Question, Resource};
use super::divide;
use super::inputs::{Input, Inputs, TextWork};
use super::rank_parts::RankParts;
use super::value_sizes::result_row_bytes;
use super::{BoundJoin, Composition, Distribution, Estimates, KeptBuild, PlanOverrides, Side, Strategy, Target};
use crate::columns::{KeyLayout, Role};
use crate::device::{Phase, ROWS_MAX};
use crate::human;
use crate::memory::{Interrupt, human_bytes};
use crate::{Error, Result};

/// A join that is ready to run on one device, or on any other of the same sizes and rates.
#[derive(Clone, Debug)]
pub struct Plan {
    pub join: BoundJoin,
    pub composition: Composition,
    /// Probe rows predicted to pass a filter of the build keys; `None` without a filter.
    pub filtered_rows: Option<f64>,
    /// True if the build side is in the order of the key, as declared or as seen at upload. Sorting
    /// is then skipped.
    pub build_sorted: bool,
    pub probe_sorted: bool,
    pub estimates: Estimates,
    /// Mean bytes per row of the result.
    pub row_bytes: f64,
    pub result_bytes: u64,
    pub memory: MemoryNeed,
    /// Host memory that the join takes in addition to its inputs and its result, in bytes: keys
    /// made by the host.
    pub host_scratch_bytes: u64,
    /// Bytes that each rank is predicted to send to the others.
    pub sent_bytes: u64,
    /// Predicted phases, in the order of their first run.
    pub phases: Vec<PredictedPhase>,
    pub seconds: f64,
    /// Resource that is busy for longest.
    pub bound: Resource,
    /// Predicted seconds for which a rank keeps each resource busy.
    pub demand: Demand,
    /// The device of the plan. Its name is of one of the devices that the plan serves.
    pub target: Target,
    pub reason: String,
    /// Reason why the devices that were asked for do not exchange rows, if they cannot.
    pub undivided: Option<String>,
    /// Build side that is on the device already; `None`: the join prepares its own.
    pub kept_build: Option<KeptBuild>,
    /// The other strategies on each side, and why they lost. Those that fit come first, sorted by
    /// time.
    pub alternatives: Vec<Alternative>,
    /// Plans of the further joins of a chain.
    pub then: Vec<Plan>,
}

/// A strategy on a build side that was not chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    pub strategy: Strategy,
    pub build_side: Side,
    pub distribution: Distribution,
    pub seconds: f64,
    pub memory: MemoryNeed,
    /// True if the caller has asked for another.
    pub is_overridden: bool,
    /// Comparison of its predicted time with that of the plan. `None`: it does not fit in the
    /// device's memory.
    pub comparison: Option<String>,
}

impl Alternative {
    /// Returns the reason why it lost on a device of this name, with the given bytes of memory.
    pub fn reason(&self, device: &str, memory_bytes: u64) -> String {
        let overridden = if self.is_overridden { "another was asked for; " } else { "" };
        match &self.comparison {
            Some(comparison) => format!("{overridden}{comparison}"),
            None => format!(
                "{overridden}it needs at least {} of device memory, and {device} has {}",
                human_bytes(self.memory.minimum_bytes),
                human_bytes(memory_bytes)
            ),
        }
    }
}

impl Plan {
    /// True if keys are too wide to be packed, so that they are hashed, and compared if their
    /// hashes are equal.
    pub fn compares_keys(&self) -> bool {
        // A plan exists only if all key types are valid.
        self.join.key_facts(self.composition.build_side).is_ok_and(|facts| KeyLayout::new(facts, 0).is_hashed())
    }

    /// Returns the name of the plan's strategy.
    pub fn strategy(&self) -> Strategy {
        self.composition.strategy()
    }

    /// Returns the side with the given role.
    pub fn side(&self, role: Role) -> Side {
        match role {
            Role::Build => self.composition.build_side,
            Role::Probe => self.composition.build_side.other(),
        }
    }
}

/// Chooses strategy and build side for the default [`Target`]: a host device with unlimited memory.
///
/// # Errors
/// The errors of [`plan_on`].
pub fn plan(join: BoundJoin, strategy: Option<Strategy>) -> Result<Plan> {
    plan_on(join, strategy, &Target::default())
}

/// Chooses strategy and build side for a device: the least predicted time among plans that fit in
/// its memory. A requested strategy is taken, with its better build side.
///
/// # Errors
/// [`Error::Exhausted`] when no strategy fits in device memory, or the requested one does not.
/// [`Error::Unsupported`] when both sides have more rows than positions can address.
pub fn plan_on(join: BoundJoin, strategy: Option<Strategy>, target: &Target) -> Result<Plan> {
    plan_with_overrides(join, &PlanOverrides::named(strategy), target)
}

/// Plans as [`plan_on`] does, with some decisions taken beforehand.
///
/// # Errors
/// The errors of [`plan_on`], [`Error::Unsupported`] when no plan agrees with the overridden
/// decisions, and [`Error::Invalid`] when the distribution is impossible.
pub fn plan_with_overrides(join: BoundJoin, overrides: &PlanOverrides, target: &Target) -> Result<Plan> {
    let (plan, refusal) = propose(join, overrides, target, &Interrupt::default())?;
    refusal.map_or(Ok(plan), Err)
}

/// Plans as [`plan_with_overrides`] does, but without refusing a join that does not fit. If nothing
/// fits, returns the plan nearest to fitting and the reason for its refusal.
///
/// # Errors
/// [`Error::Unsupported`] when both sides have more rows than positions can address, or no plan
/// agrees with the overridden decisions. [`Error::Invalid`] when the distribution is impossible.
/// The errors of the interrupt.
pub fn propose(
    join: BoundJoin,
    overrides: &PlanOverrides,
    target: &Target,
    interrupt: &Interrupt,
) -> Result<(Plan, Option<Error>)> {
    if join.then.is_some() {
        return propose_chain(join, overrides, target, interrupt);
    }
    let estimates = Estimates::of(&join, interrupt)?;
    propose_estimated(join, estimates, overrides, target, interrupt)
}

/// Proposes a plan for the first join of a chain, with plans of the others. Its memory, its time,
/// and the rows and bytes of its result are those of the whole chain.
fn propose_chain(
    mut join: BoundJoin,
    overrides: &PlanOverrides,
    target: &Target,
    interrupt: &Interrupt,
) -> Result<(Plan, Option<Error>)> {
    if let Some(strategy) = overrides.strategy.filter(|&strategy| strategy != Strategy::Hash) {
        return Err(Error::Unsupported(format!(
            "joins with \"then\" have strategy {}, and {strategy} was asked for; leave \"strategy\" out",
            Strategy::Hash
        )));
    }
    let overrides = PlanOverrides { strategy: Some(Strategy::Hash), ..*overrides };
    let joins = join.then.as_mut().map(|then| std::mem::take(&mut then.joins)).unwrap_or_default();
    let (then, unknown_rows) = (join.then.take(), join.unknown_rows);
    let (mut plan, mut refusal) = propose(join, &overrides, target, interrupt)?;
    plan.join.then = then;
    // They are strategies of the first join alone, and a chain has one strategy.
    plan.alternatives.clear();
    let rows = (plan.join.table(plan.side(Role::Probe)).rows as f64).max(1.0);
    for join in joins {
        let (further, refused) = propose(BoundJoin { unknown_rows, ..join }, &overrides, target, interrupt)?;
        refusal = refusal.or(refused);
        let (all, own) = (&mut plan.memory, further.memory);
        all.minimum_bytes += own.minimum_bytes;
        all.whole_bytes += own.whole_bytes;
        all.resident_bytes += own.resident_bytes;
        plan.seconds += further.seconds;
        // Each join repeats or drops the rows that the joins before it give.
        plan.estimates.rows *= further.estimates.rows / rows;
        plan.row_bytes += further.row_bytes;
        plan.host_scratch_bytes += further.host_scratch_bytes;
        plan.then.push(further);
    }
    plan.result_bytes = result_bytes(&plan.join, plan.estimates.rows, plan.row_bytes);
    let probed = |plan: &Plan| format!("{:?} ({})", plan.join.table(plan.composition.build_side).name, plan.join.how);
    let tables: Vec<String> = std::iter::once(&plan).chain(&plan.then).map(probed).collect();
    plan.reason = format!(
        "joins of the same rows with several tables have this strategy; predicted to take {}; the rows probe {}, in the order \
         that they show to be best",
        human::seconds(plan.seconds),
        tables.join(", ")
    );
    if plan.memory.minimum_bytes > target.memory_bytes && refusal.is_none() {
        refusal = Some(Error::Exhausted(format!(
            "the tables of these joins need at least {} of device memory together, and {} has {}; raise {}, or join fewer tables or \
             columns",
            human_bytes(plan.memory.minimum_bytes),
            target.name,
            human_bytes(target.memory_bytes),
            target.memory_setting
        )));
    }
    Ok((plan, refusal))
}

/// Proposes a plan for a join with the given estimates.
pub(super) fn propose_estimated(
    join: BoundJoin,
    estimates: Estimates,
    overrides: &PlanOverrides,
    target: &Target,
    interrupt: &Interrupt,
) -> Result<(Plan, Option<Error>)> {
    let question = Question { join: &join, overrides, estimates: &estimates, target, interrupt };
    let mut candidates = candidates(&question)?;
    // The side whose rows arrive cannot be the build side, whatever the caller asks for.
    let of_stream = PlanOverrides {
        build_side: overrides.build_side,
        defer_build_payload: overrides.defer_build_payload,
        ..PlanOverrides::default()
    };
    let arrives = join.left.arrives || join.right.arrives;
    if arrives {
        candidates.retain(|candidate| of_stream.allows(&candidate.costed.composition));
    }
    // Plans that fit are sorted by time. The others follow by memory, because a refusal names the
    // one nearest to fitting.
    candidates.sort_by(|a, b| by_fit_and_time(&a.costed, &b.costed, target));
    let wanted = |candidate: &Candidate| overrides.allows(&candidate.costed.composition);
    let Some(chosen) = candidates.iter().position(wanted) else {
        return Err(Error::Unsupported(format!(
            "no plan for this join on {} satisfies: {overrides}; a build side has at most {ROWS_MAX} rows, a filter needs a \
             kind of join that drops probe rows without a match and a device that has filters, and a GPU gathers text only if \
             there is text that it supports",
            target.name
        )));
    };
    let chosen = candidates.remove(chosen);
    let by_strategy = overrides.strategy.is_some();
    let refusal = (!chosen.fits(target)).then(|| too_large(&join, &chosen, by_strategy, &candidates, target));

    let mut alternatives = Vec::with_capacity(candidates.len());
    for candidate in candidates {
        let is_overridden = !wanted(&candidate);
        alternatives.push(candidate.into_alternative(&chosen.costed, is_overridden, target));
    }
    let asked = match arrives {
        true => PlanOverrides { build_side: None, defer_build_payload: None, ..*overrides },
        false => *overrides,
    };
    let is_overridden = asked.is_more_than_distribution();
    let reason = match (&refusal, is_overridden) {
        (Some(_), false) => "no plan fits in device memory; this one needs the least".into(),
        _ => why(&chosen.costed, is_overridden, &alternatives),
    };
    let undivided = divide::undivided(&question, &chosen.costed.composition)?;
    let row_bytes = result_row_bytes(&join);
    let result_bytes = result_bytes(&join, estimates.rows, row_bytes);
    let target = match chosen.costed.composition.distribution {
        Distribution::Alone => Target { ranks: 1, helping_hosts: 0, ..target.clone() },
        _ => target.clone(),
    };
    let host_scratch_bytes = target.ranks as u64 * host_scratch_bytes(&chosen.costed, &chosen.inputs, &target);
    let plan = Plan {
        composition: chosen.costed.composition,
        filtered_rows: chosen.costed.filtered_rows,
        build_sorted: chosen.inputs.build.sorted,
        probe_sorted: chosen.inputs.probe.sorted,
        row_bytes,
        result_bytes,
        host_scratch_bytes,
        memory: chosen.costed.memory,
        sent_bytes: chosen.costed.sent_bytes as u64,
        phases: chosen.costed.phases,
        seconds: chosen.costed.seconds,
        bound: chosen.costed.demand.bound(),
        demand: chosen.costed.demand,
        target,
        reason,
        undivided,
        kept_build: None,
        alternatives,
        then: Vec::new(),
        estimates,
        join,
    };
    Ok((plan, refusal))
}

fn result_bytes(join: &BoundJoin, rows: f64, row_bytes: f64) -> u64 {
    let bitmaps = join.schema.fields().iter().filter(|field| field.is_nullable()).count() as f64 / 8.0;
    (rows * (row_bytes + bitmaps)) as u64
}

/// Orders plans that fit by time, before all others. Orders the others by memory, then time.
fn by_fit_and_time(a: &Costed, b: &Costed, target: &Target) -> Ordering {
    let fits = |costed: &Costed| costed.memory.minimum_bytes <= target.memory_bytes;
    let by_need = || a.memory.minimum_bytes.cmp(&b.memory.minimum_bytes);
    let by_seconds = || a.seconds.total_cmp(&b.seconds);
    let within = if fits(a) { by_seconds() } else { by_need().then_with(by_seconds) };
    fits(b).cmp(&fits(a)).then(within)
}

/// A strategy on a build side, with its price.
struct Candidate {
    inputs: Inputs,
    costed: Costed,
}

fn candidates(question: &Question<'_>) -> Result<Vec<Candidate>> {
    let Question { join, overrides, target, .. } = *question;
    let mut candidates = Vec::new();
    if target.ranks > 1 && target.capabilities.forms_gangs {
        for distribution in [Distribution::Broadcast, Distribution::Hash] {
            candidates.extend(candidates_distributed(question, distribution)?);
        }
    }
    if candidates.is_empty() {
        if let Some(wanted) = overrides.distribution.filter(|&wanted| wanted != Distribution::Alone) {
            return Err(divide::refusal(join, wanted, target)?);
        }
        // A join that no distribution can run is left to one device of the set.
        candidates = candidates_distributed(question, Distribution::Alone)?;
    }
    if candidates.is_empty() && join.left.rows.min(join.right.rows) > ROWS_MAX as u64 {
        return Err(Error::Unsupported(format!(
            "tables {:?} and {:?} have {} and {} rows, and the smaller side of a join may have at most {ROWS_MAX} on one device; \
             join them in parts",
            join.left.name, join.right.name, join.left.rows, join.right.rows
        )));
    }
    Ok(candidates)
}

/// Prices each strategy on each build side, for ranks that divide the join in one way.
fn candidates_distributed(question: &Question<'_>, distribution: Distribution) -> Result<Vec<Candidate>> {
    let Question { join, overrides, estimates, target, .. } = *question;
    // The smaller side comes first, so it wins if times are equal.
    let smaller = if join.left.rows <= join.right.rows { Side::Left } else { Side::Right };
    let mut candidates = Vec::new();
    for build_side in [smaller, smaller.other()] {
        if !divide::is_possible(question, build_side, distribution)? {
            continue;
        }
        let build_rows = join.table(build_side).rows;
        let shares = if distribution == Distribution::Hash { target.ranks as u64 } else { 1 };
        if build_rows.div_ceil(shares) > ROWS_MAX as u64 {
            continue;
        }
        let whole = text_ways(question, build_side)?;
        let Some(Inputs { build, probe, .. }) = whole.last() else { continue };
        let parts = RankParts::of(distribution, target.parts(), build, probe, estimates);
        let of_rank = estimates.of_rank(join, build_side, parts);
        let question = Question { estimates: &of_rank, ..*question };
        let mut ways: Vec<Inputs> = whole.into_iter().map(|inputs| inputs.of_rank(distribution, parts)).collect();
        if target.capabilities.exchanges {
            let shared: Vec<Inputs> = ways.iter().filter_map(Inputs::sharing_build_read).collect();
            ways.extend(shared);
        }
        let links: Vec<Links> = ways.iter().map(|inputs| Links::new(join, inputs, target)).collect();
        for strategy in Strategy::ALL {
            let costed = |(inputs, links)| Ok((inputs, Costed::cheapest(&question, strategy, inputs, links)?));
            // Plans that agree with the overridden decisions come first.
            let is_other = |costed: &Costed| !overrides.allows(&costed.composition);
            let by_way: Vec<(&Inputs, Costed)> = ways.iter().zip(&links).map(costed).collect::<Result<_>>()?;
            let best = by_way
                .into_iter()
                .min_by(|(_, a), (_, b)| is_other(a).cmp(&is_other(b)).then_with(|| by_fit_and_time(a, b, target)));
            let Some((inputs, mut costed)) = best else { continue };
            if build_side != smaller {
                // Predictions err by more than this, and the smaller side is the safer one.
                costed.seconds *= 1.02;
            }
            candidates.push(Candidate { inputs: inputs.clone(), costed });
        }
    }
    Ok(candidates)
}

/// Returns the inputs for each way that the device can work on text. In the last, the host does
/// everything.
fn text_ways(question: &Question<'_>, build_side: Side) -> Result<Vec<Inputs>> {
    let Question { join, overrides, estimates, target, interrupt } = *question;
    let inputs = |makes_keys, gathers| {
        interrupt.check()?;
        Inputs::new(join, build_side, estimates, TextWork { makes_keys, gathers })
    };
    let by_host = inputs(false, false)?;
    let may_make_keys = target.capabilities.strings && by_host.build.host_keys;
    let may_gather = target.capabilities.strings && join.has_device_text(build_side);
    let mut ways = Vec::new();
    for (makes_keys, gathers) in [(true, true), (true, false), (false, true)] {
        if (may_make_keys || !makes_keys) && (may_gather || !gathers) {
            ways.push(inputs(makes_keys, gathers)?);
            // The device may be unable to read some keys.
            ways.pop_if(|way| way.device_makes_keys != makes_keys);
        }
    }
    ways.push(by_host);
    ways.retain(|way| overrides.device_gathers_text.is_none_or(|gathers| gathers == way.device_gathers_text()));
    Ok(ways)
}

impl Candidate {
    fn fits(&self, target: &Target) -> bool {
        self.costed.memory.minimum_bytes <= target.memory_bytes
    }

    fn into_alternative(self, chosen: &Costed, is_overridden: bool, target: &Target) -> Alternative {
        let comparison = self.fits(target).then(|| against(&self.costed, chosen));
        let Costed { composition, seconds, memory, .. } = self.costed;
        let (strategy, build_side, distribution) =
            (composition.strategy(), composition.build_side, composition.distribution);
        Alternative { strategy, build_side, distribution, seconds, memory, is_overridden, comparison }
    }
}

/// Describes how much longer one prediction is than another, and in which phase.
fn against(loser: &Costed, winner: &Costed) -> String {
    let seconds_of = |costed: &Costed, phase: Phase| {
        costed.phases.iter().filter(|found| found.phase == phase).map(|found| found.seconds).sum::<f64>()
    };
    let phases = loser.phases.iter().chain(&winner.phases).map(|phase| phase.phase);
    // Take differences in the direction of the total. The largest is then in the phase where the
    // slower plan loses most.
    let way = if loser.seconds < winner.seconds { -1.0 } else { 1.0 };
    let difference = |phase: Phase| way * (seconds_of(loser, phase) - seconds_of(winner, phase));
    let compared = match loser.seconds.total_cmp(&winner.seconds) {
        Ordering::Less => "it is predicted to be faster".to_string(),
        _ if winner.seconds <= 0.0 => "it is no faster".to_string(),
        _ if loser.seconds < 1.005 * winner.seconds => "it is predicted to take the same time".to_string(),
        _ => format!("{:.2} times as long", loser.seconds / winner.seconds),
    };
    let Some(phase) = phases.max_by(|a, b| difference(*a).total_cmp(&difference(*b))) else { return compared };
    let [of_loser, of_winner] = [loser, winner].map(|costed| human::seconds(seconds_of(costed, phase)));
    match difference(phase) > 0.0 && of_loser != of_winner {
        true => format!("{compared}; the largest difference is {:?} with {of_loser} against {of_winner}", phase.name()),
        false => compared,
    }
}

fn why(chosen: &Costed, overrides: bool, alternatives: &[Alternative]) -> String {
    if overrides {
        return format!("it was asked for; predicted to take {}", human::seconds(chosen.seconds));
    }
    match alternatives.first() {
        Some(next) => format!(
            "the shortest predicted time of the plans that fit in device memory, {}; next is {} built on the {} side with {}",
            human::seconds(chosen.seconds),
            next.strategy,
            next.build_side,
            human::seconds(next.seconds)
        ),
        None => format!("the only strategy; predicted to take {}", human::seconds(chosen.seconds)),
    }
}

fn too_large(join: &BoundJoin, chosen: &Candidate, overrides: bool, others: &[Candidate], target: &Target) -> Error {
    let attempt = match overrides {
        true => format!("strategy {} for this join", chosen.costed.composition.strategy()),
        false => "this join".into(),
    };
    let fitting = others.iter().find(|other| other.fits(target));
    let advice = match fitting {
        Some(other) => format!("strategy {} fits; ", other.costed.composition.strategy()),
        None => String::new(),
    };
    let build = join.table(chosen.costed.composition.build_side);
    Error::Exhausted(format!(
        "{attempt} needs at least {} of device memory, with table {:?} ({}) as the build side, and {} has {}; {advice}raise {}, \
         or join fewer columns or rows",
        human_bytes(chosen.costed.memory.minimum_bytes),
        build.name,
        human::counted(build.rows, "row"),
        target.name,
        human_bytes(target.memory_bytes),
        target.memory_setting
    ))
}

/// Bytes of the keys that the host packs or hashes for the device, with their validity. Counts the
/// build side and the concurrent chunks of the probe side.
fn host_scratch_bytes(costed: &Costed, inputs: &Inputs, target: &Target) -> u64 {
    let made = |input: &Input| match input.host_keys {
        true => input.rows_read * (inputs.key_bytes() + input.key_columns as f64 / 8.0),
        false => 0.0,
    };
    let Composition { transfer_order, .. } = costed.composition;
    let strategy = costed.composition.strategy();
    let chunks = Chunks::new(strategy, &costed.memory, inputs, target, transfer_order);
    (made(&inputs.build) + made(&inputs.probe) * chunks.at_once / chunks.count) as u64
}
