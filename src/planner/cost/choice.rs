//! Decisions about a strategy before it is priced: the number of partitions and passes, a filter
//! for probe rows, and the columns that move with the keys. Prices a few combinations and takes the
//! cheapest.

use super::super::filter;
use super::super::inputs::{Input, Inputs};
use super::super::{BoundJoin, Estimates, PlanOverrides, Side, Strategy, Target};
use super::links::Links;
use super::memory::{Chunks, MemoryNeed};
use super::steps::{HostShare, phases_of, total_seconds};
use super::{Costed, Filter, Model};
use crate::Result;
use crate::columns::Role;
use crate::device::host::FilterBytes;
use crate::join::{BUCKET_BITS, Composition, Distribution, MovedPayload, RowLayout, TransferOrder};
use crate::memory::Interrupt;

/// Inputs common to all prices of one plan.
pub(in crate::planner) struct Question<'a> {
    pub(in crate::planner) join: &'a BoundJoin,
    pub(in crate::planner) overrides: &'a PlanOverrides,
    pub(in crate::planner) estimates: &'a Estimates,
    pub(in crate::planner) target: &'a Target,
    /// Ends the pricing.
    pub(in crate::planner) interrupt: &'a Interrupt,
}

impl Costed {
    /// Prices as [`cheapest`](Self::cheapest) does, uninterrupted.
    #[cfg(test)]
    pub(in crate::planner) fn new(
        join: &BoundJoin,
        strategy: Strategy,
        overrides: &PlanOverrides,
        inputs: &Inputs,
        estimates: &Estimates,
        target: &Target,
    ) -> Self {
        let question = Question { join, overrides, estimates, target, interrupt: &Interrupt::default() };
        Self::cheapest(&question, strategy, inputs, &Links::new(join, inputs, target)).unwrap()
    }

    /// Finds the cheapest composition of a strategy that agrees with the overridden decisions, as
    /// far as possible.
    ///
    /// # Errors
    /// The errors of the interrupt.
    pub(in crate::planner) fn cheapest(
        question: &Question<'_>,
        strategy: Strategy,
        inputs: &Inputs,
        links: &Links,
    ) -> Result<Self> {
        let Question { join, overrides, estimates, target, .. } = *question;
        let cheapest = |filtered_rows: Option<f64>| {
            let priced = radix_bits(strategy, inputs, target).into_iter().map(|radix_bits| {
                let choice = Choice { question, strategy, links, radix_bits, filtered_rows };
                choice.price(inputs.clone(), overrides.by_name)
            });
            let priced: Vec<Self> = priced.collect::<Result<_>>()?;
            let cheapest = priced.into_iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds));
            Ok(cheapest.expect("every strategy has at least one composition"))
        };
        let passing = match overrides.filter {
            Some(false) => None,
            // The filter of a rank knows only the keys of that rank.
            _ if inputs.distribution == Distribution::Hash => None,
            None if !filter::is_predictable(inputs, estimates) => None,
            _ => filter::passing_rows(join, inputs),
        };
        let Some(rows) = passing else { return cheapest(None) };
        let filtered = cheapest(Some(rows))?;
        if overrides.filter.is_some() {
            return Ok(filtered);
        }
        let unfiltered = cheapest(None)?;
        let pays = filtered.seconds < filter::WORTH * unfiltered.seconds;
        Ok(if pays { filtered } else { unfiltered })
    }
}

/// Strategy, radix bits and filter of one price.
struct Choice<'a> {
    question: &'a Question<'a>,
    strategy: Strategy,
    links: &'a Links,
    radix_bits: Option<u32>,
    filtered_rows: Option<f64>,
}

impl Choice<'_> {
    /// Prices the strategy with all movable columns moved, or none, as its name says. If the
    /// planner may choose, a strategy that moves payload does so only on the sides where that pays.
    fn price(&self, mut inputs: Inputs, by_name: bool) -> Result<Costed> {
        let all = self.strategy.moves_payload();
        for input in [&mut inputs.build, &mut inputs.probe] {
            input.columns.iter_mut().for_each(|column| column.is_moved = all && column.can_move());
        }
        let everything = self.costed(&inputs)?;
        if by_name || !all {
            return Ok(everything);
        }
        let mut best = everything;
        for side in [Role::Build, Role::Probe] {
            let mut tried = inputs.clone();
            tried.of_mut(side).columns.iter_mut().for_each(|column| column.is_moved = false);
            let costed = self.costed(&tried)?;
            if costed.seconds < best.seconds {
                (best, inputs) = (costed, tried);
            }
        }
        // With nothing moved, this would be the GFUR variant of the strategy.
        if inputs.moves_payload() { Ok(best) } else { self.price(inputs, true) }
    }

    fn model<'a>(&'a self, inputs: &'a Inputs) -> Model<'a> {
        let Question { join, estimates, target, .. } = *self.question;
        let passes = self.radix_bits.map_or(0.0, |bits| f64::from(bits.div_ceil(target.tuning.pass_bits_max).max(1)));
        let partitions = self.radix_bits.map_or(1.0, |bits| f64::from(1u32 << bits));
        let filter = self.filtered_rows.map(|rows| {
            let bytes = FilterBytes::new(inputs.key_width, inputs.build.rows as u64, target.parallelism);
            Filter { passing: rows.min(inputs.probe.keyed), bytes }
        });
        Model {
            join,
            strategy: self.strategy,
            inputs,
            links: self.links,
            estimates,
            target,
            rates: &target.rates,
            passes,
            partitions,
            filter,
        }
    }

    /// Prices up to three transfer orders and keeps the cheapest. The first is the build side, then
    /// the probe side in chunks. The second has the probe side whole, for joins in which overlap is
    /// not worth its calls. In the third, keys of both sides come before the build side's columns.
    ///
    /// # Errors
    /// The errors of the interrupt.
    fn costed(&self, inputs: &Inputs) -> Result<Costed> {
        let Question { overrides, target, interrupt, .. } = *self.question;
        interrupt.check()?;
        let model = self.model(inputs);
        let memory = model.memory();
        let chunks = |transfer_order| Chunks::new(self.strategy, &memory, inputs, target, transfer_order);
        let in_chunks = chunks(TransferOrder::Chunks);
        let mut best = self.costed_with(&model, memory, in_chunks);
        let at_once = (in_chunks.count > 1.0).then(|| (chunks(TransferOrder::ProbeAtOnce), memory));
        let deferred = Chunks { transfer_order: TransferOrder::DeferBuildPayload, ..in_chunks };
        let last = model.memory_with_deferred_payload(memory, overrides.defer_build_payload);
        let last = last.map(|memory| (deferred, memory));
        for (chunks, memory) in [at_once, last].into_iter().flatten() {
            let costed = self.costed_with(&model, memory, chunks);
            let is_overridden = chunks == deferred && overrides.defer_build_payload == Some(true);
            if is_overridden || costed.seconds < best.seconds {
                best = costed;
            }
        }
        Ok(best)
    }

    fn costed_with(&self, model: &Model<'_>, memory: MemoryNeed, chunks: Chunks) -> Costed {
        let (rates, steps) = (model.rates, model.steps(chunks));
        let (strategy, inputs) = (self.strategy, model.inputs);
        let host_share = match inputs.distribution {
            Distribution::Alone => f64::INFINITY,
            Distribution::Broadcast | Distribution::Hash => model.target.gang.host_memory / model.target.parts() as f64,
        };
        let composition = Composition {
            build_side: inputs.build.side,
            row_layout: RowLayout::of(strategy, self.radix_bits).within(inputs.distribution),
            moved_payload: moved_payload(strategy, inputs),
            dense: inputs.dense_slots.is_some(),
            filter: self.filtered_rows.is_some(),
            transfer_order: chunks.transfer_order,
            device_makes_keys: inputs.device_makes_keys,
            device_gathers_text: inputs.device_gathers_text(),
            distribution: inputs.distribution,
            shares_build_read: inputs.shares_build_read,
        };
        // Others copy less out than the fullest rank does.
        let mean_out = inputs.parts.equal / inputs.parts.pairs;
        let (seconds, demand) = total_seconds(&steps, chunks, rates, HostShare { rate: host_share, mean_out });
        Costed {
            composition,
            seconds,
            demand,
            phases: phases_of(&steps),
            memory,
            filtered_rows: self.filtered_rows,
            sent_bytes: model.sent_bytes(),
        }
    }
}

/// Candidate radix widths: partitions of about `partition_rows` build rows, in one pass, and in two
/// if one gives too few partitions. `None` for strategies without partitions.
fn radix_bits(strategy: Strategy, inputs: &Inputs, target: &Target) -> Vec<Option<u32>> {
    if !strategy.is_partitioned() {
        return vec![None];
    }
    let partitions = (inputs.build.rows as u64).div_ceil(target.tuning.partition_rows.max(1) as u64).max(1);
    let wanted = partitions.next_power_of_two().trailing_zeros();
    let one_pass = wanted.min(target.tuning.pass_bits_max);
    let used_bits = if inputs.distribution == Distribution::Hash { BUCKET_BITS } else { 0 };
    let two_passes = wanted.min(2 * target.tuning.pass_bits_max).min(8 * inputs.key_width.bytes() as u32 - used_bits);
    let mut bits = vec![Some(one_pass)];
    if two_passes > one_pass {
        bits.push(Some(two_passes));
    }
    bits
}

/// Collects the columns that pricing a strategy marked as moved with the keys.
fn moved_payload(strategy: Strategy, inputs: &Inputs) -> MovedPayload {
    let sides = [&inputs.build, &inputs.probe];
    let all = || sides.into_iter().flat_map(|input| &input.columns);
    if !strategy.moves_payload() {
        return MovedPayload::Nothing;
    }
    if all().all(|column| column.is_moved || !column.can_move()) {
        return MovedPayload::Everything;
    }
    let of = |side: Side| {
        let columns = sides.into_iter().filter(|input: &&Input| input.side == side).flat_map(|input| &input.columns);
        columns.filter(|column| column.is_moved).map(|column| column.index).collect()
    };
    MovedPayload::Columns { left: of(Side::Left), right: of(Side::Right) }
}
