//! Quality of the planner's choices.
//!
//! Joins are drawn at random. Each runs by every strategy and by the planner's choice.
//! `--exhaustive` adds every way to compose the join, and repeats all of it with columns on the
//! device.

use serde_json::{Value, json};

use super::axes::{Columns, Keys, Payloads, ProbeKeys};
use super::engine::Measured;
use super::random::{below, hash, unit};
use super::workload::Workload;
use dovetail::cli::output::{self, Align};
use dovetail::planner::PlanOverrides;

/// A choice is good if it takes at most this many times as long as the best way.
const TOLERANCE: f64 = 1.1;

/// Range of build rows at full size, uniform in the logarithm. Smaller joins take a fraction of a
/// millisecond by any strategy.
const BUILD_ROWS: (f64, f64) = ((1 << 14) as f64, (1 << 26) as f64);

/// Maximum bytes of tables and result at full size.
const BYTES_MAX: f64 = (24u64 << 30) as f64;

/// Lower bound of the maximum at tiny scales, so that the smallest joins fit.
const BYTES_MIN: f64 = (16 << 20) as f64;

/// Returns the maximum bytes of tables and result at `scale`.
pub fn bytes_max(scale: f64) -> u64 {
    (BYTES_MAX * scale).max(BYTES_MIN) as u64
}

/// Draws `count` workloads from the seed.
pub fn draw(count: usize, scale: f64, seed: u64) -> Vec<Workload> {
    let possible = |workload: &Workload| workload.impossible().is_none() && workload.bytes() <= bytes_max(scale);
    // Hashed first, because adjacent seeds would draw the same joins in another order.
    let start = hash(seed);
    (0..).map(|at| one(Draws { state: hash(start.wrapping_add(at)) }, scale)).filter(possible).take(count).collect()
}

fn one(mut draws: Draws, scale: f64) -> Workload {
    let (low, high) = BUILD_ROWS;
    let high = (high * scale).max(4.0 * low);
    let build_rows = (low * (high / low).powf(draws.unit())) as u64;
    let ratio = 2f64.powf(6.0 * draws.unit() - 2.0);
    let columns = |draws: &mut Draws| Columns {
        as_key: 0,
        of_4: *draws.of(&[0, 0, 1, 1, 2, 4]),
        of_8: *draws.of(&[0, 0, 1, 1, 2, 4]),
    };
    Workload {
        keys: *draws.of(&[Keys::Dense, Keys::Dense, Keys::Sparse, Keys::Sparse, Keys::Multiples, Keys::Text]),
        key_columns: *draws.of(&[1, 1, 1, 1, 2]),
        key_bytes: *draws.of(&[4, 8]),
        build_rows,
        probe_rows: (build_rows as f64 * ratio) as u64,
        payloads: Payloads { build: columns(&mut draws), probe: columns(&mut draws) },
        match_ratio: *draws.of(&[1.0, 1.0, 1.0, 0.5, 0.25, 0.0625, 0.01]),
        copies: *draws.of(&[1, 1, 1, 1, 2, 8]),
        probe_keys: *draws.of(&[
            ProbeKeys::Uniform,
            ProbeKeys::Uniform,
            ProbeKeys::Each,
            ProbeKeys::Zipf(0.75),
            ProbeKeys::Zipf(1.25),
        ]),
        nulls: *draws.of(&[0.0, 0.0, 0.0, 0.1]),
        seed: draws.next(),
    }
}

/// A sequence of random draws.
struct Draws {
    state: u64,
}

impl Draws {
    fn next(&mut self) -> u64 {
        self.state = hash(self.state);
        self.state
    }

    fn unit(&mut self) -> f64 {
        unit(self.next())
    }

    fn of<'a, T>(&mut self, values: &'a [T]) -> &'a T {
        &values[below(self.next(), values.len() as u64) as usize]
    }
}

/// The planner's choice of one case next to the best alternative.
///
/// The minimum of many times is partly luck, and more so if the times vary more. The benchmark
/// therefore repeats the choice and an alternative that seems faster, in turn. Only the second
/// times count.
#[derive(Clone, Debug, PartialEq)]
struct Choice {
    case: String,
    chosen: String,
    chosen_plan: String,
    chosen_seconds: f64,
    best: String,
    best_plan: String,
    best_seconds: f64,
}

/// The choices of joins with columns on the device, or of those without.
#[derive(Clone, Debug, Default)]
struct Group {
    all: Vec<Choice>,
}

/// The choices of a suite.
#[derive(Clone, Debug, Default)]
pub struct Choices {
    /// Joins that copy in all columns.
    streamed: Group,
    /// Joins whose columns are on the device from earlier runs.
    kept: Group,
}

impl Choice {
    /// Compares the measurements of one case. `None` without the planner's choice or an
    /// alternative.
    fn of(case: String, measured: &[&Measured]) -> Option<Self> {
        let (chosen, rival) = rival(measured)?;
        let [chosen_seconds, rival_seconds] = times(chosen, rival);
        let (best, best_seconds) =
            if rival_seconds < chosen_seconds { (rival, rival_seconds) } else { (chosen, chosen_seconds) };
        Some(Self {
            case,
            chosen: chosen.strategy.clone(),
            chosen_plan: chosen.plan.clone(),
            chosen_seconds,
            best: best.strategy.clone(),
            best_plan: best.plan.clone(),
            best_seconds,
        })
    }

    fn times_best(&self) -> f64 {
        self.chosen_seconds / self.best_seconds
    }

    fn is_good(&self) -> bool {
        self.times_best() <= TOLERANCE
    }
}

/// Returns the planner's choice and the fastest alternative. `None` if one of them is missing.
fn rival<'a>(measured: &[&'a Measured]) -> Option<(&'a Measured, &'a Measured)> {
    let chosen = measured.iter().find(|measured| measured.asked == PlanOverrides::default())?;
    let others = measured.iter().filter(|other| other.asked != chosen.asked);
    Some((chosen, others.min_by(|a, b| a.median().total_cmp(&b.median()))?))
}

/// Returns the times by which a choice is compared with an alternative.
fn times(chosen: &Measured, other: &Measured) -> [f64; 2] {
    match (chosen.median_again(), other.median_again()) {
        (Some(chosen), Some(other)) => [chosen, other],
        _ => [chosen.median(), other.median()],
    }
}

/// Returns the indices to time again: the planner's choice and the fastest alternative, if the
/// alternative seemed faster.
pub fn to_measure_again(measured: &[Measured]) -> Vec<usize> {
    let all: Vec<&Measured> = measured.iter().collect();
    match rival(&all) {
        Some((chosen, rival)) if rival.median() < chosen.median() => {
            (0..measured.len()).filter(|&at| [chosen.asked, rival.asked].contains(&measured[at].asked)).collect()
        }
        _ => Vec::new(),
    }
}

impl Group {
    fn good(&self) -> usize {
        self.all.iter().filter(|choice| choice.is_good()).count()
    }

    /// Returns the share of good choices, or `None` without any choice.
    fn share(&self) -> Option<f64> {
        (!self.all.is_empty()).then(|| self.good() as f64 / self.all.len() as f64)
    }

    /// Returns the choices that are not good, the worst first.
    fn misses(&self) -> Vec<&Choice> {
        let mut misses: Vec<&Choice> = self.all.iter().filter(|choice| !choice.is_good()).collect();
        misses.sort_by(|a, b| b.times_best().total_cmp(&a.times_best()));
        misses
    }

    fn summary(&self) -> Option<Value> {
        let miss = |choice: &&Choice| {
            json!({
                "case": choice.case,
                "chosen": choice.chosen,
                "plan": choice.chosen_plan,
                "seconds": choice.chosen_seconds,
                "best": choice.best,
                "best_plan": choice.best_plan,
                "best_seconds": choice.best_seconds,
                "times_best": choice.times_best(),
            })
        };
        let misses: Vec<Value> = self.misses().iter().map(miss).collect();
        let share = self.share()?;
        Some(json!({
            "cases": self.all.len(),
            "within": self.good(),
            "tolerance": TOLERANCE,
            "share_within": share,
            "misses": misses,
        }))
    }

    /// Shows the group. `of` describes the joins, and `others` the alternatives.
    fn show(&self, of: &str, others: &str) {
        let Some(share) = self.share() else { return };
        output::line(format!(
            "\nThe planner's choice was within {:.0} % of the best {others} in {} of {} joins{of} ({:.0} %)",
            (TOLERANCE - 1.0) * 100.0,
            self.good(),
            self.all.len(),
            share * 100.0
        ));
        let misses = self.misses();
        if misses.is_empty() {
            return;
        }
        let row = |choice: &&Choice| {
            vec![
                choice.case.clone(),
                choice.chosen.clone(),
                output::seconds(choice.chosen_seconds),
                choice.best.clone(),
                output::seconds(choice.best_seconds),
                format!("{:.2}", choice.times_best()),
            ]
        };
        let columns = [
            ("missed", Align::Left),
            ("chosen", Align::Left),
            ("time", Align::Right),
            ("best", Align::Left),
            ("time", Align::Right),
            ("x best", Align::Right),
        ];
        output::line(output::table(&columns, &misses.iter().map(row).collect::<Vec<_>>()));
    }
}

impl Choices {
    /// Adds a case: the measurements of each strategy, of the planner's choice, and of other ways
    /// to compose the join. Does nothing without the planner's choice or an alternative.
    pub fn add(&mut self, case: &str, measured: &[Measured]) {
        for (group, kept) in [(&mut self.streamed, false), (&mut self.kept, true)] {
            let of_group: Vec<&Measured> = measured.iter().filter(|measured| measured.kept == kept).collect();
            group.all.extend(Choice::of(case.to_owned(), &of_group));
        }
    }

    /// Returns the summary for a line of results, or `None` if nothing was compared. Joins with
    /// columns on the device are under `kept`.
    pub fn summary(&self) -> Option<Value> {
        let mut summary = self.streamed.summary()?;
        if let Some(kept) = self.kept.summary() {
            summary["kept"] = kept;
        }
        Some(summary)
    }

    /// Shows the choices to people. `exhaustive`: every way to compose the joins was measured.
    pub fn show(&self, exhaustive: bool) {
        let others = if exhaustive { "way to compose it" } else { "strategy" };
        self.streamed.show("", others);
        self.kept.show(" with columns on the device", others);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dovetail::planner::Strategy;

    #[test]
    fn drawn_workloads_are_possible_and_determined_by_the_seed() {
        let drawn = draw(50, 1.0 / 1024.0, 3);
        assert_eq!(drawn.len(), 50);
        assert!(drawn.iter().all(|workload| workload.impossible().is_none()));
        assert_eq!(drawn, draw(50, 1.0 / 1024.0, 3));
        let another = draw(50, 1.0 / 1024.0, 4);
        assert!(drawn.iter().all(|workload| !another.contains(workload)), "another seed draws other joins");
    }

    fn measured(asked: PlanOverrides, strategy: &str, seconds: f64) -> Measured {
        Measured { asked, seconds: vec![seconds], strategy: strategy.into(), ..Measured::default() }
    }

    /// Measurements of two strategies, and of the planner's choice.
    fn of_three(auto: f64) -> Vec<Measured> {
        vec![
            measured(PlanOverrides::named(Some(Strategy::Hash)), "hash", 1.0),
            measured(PlanOverrides::named(Some(Strategy::SortMerge)), "sort-merge", 2.0),
            measured(PlanOverrides::default(), "x", auto),
        ]
    }

    #[test]
    fn a_choice_is_missed_when_another_is_more_than_a_tenth_faster() {
        let mut choices = Choices::default();
        choices.add("good", &of_three(1.09));
        choices.add("bad", &of_three(1.3));
        choices.add("the best itself", &of_three(0.5));
        choices.add("alone", &[measured(PlanOverrides::default(), "hash", 1.0)]);
        let summary = choices.summary().unwrap();
        assert_eq!((&summary["cases"], &summary["within"]), (&3.into(), &2.into()));
        assert_eq!(summary["misses"].as_array().unwrap().len(), 1);
        assert_eq!(summary["misses"][0]["case"], "bad");
        assert_eq!(summary["misses"][0]["best"], "hash");
        assert!(summary.get("kept").is_none());
        assert!(Choices::default().summary().is_none());
    }

    #[test]
    fn choices_that_seem_quicker_are_measured_again_and_only_the_second_time_counts() {
        let mut measured = of_three(1.3);
        assert_eq!(
            to_measure_again(&measured),
            [0, 2],
            "`hash` seemed quicker than the choice, and `sort-merge` did not"
        );
        assert_eq!(to_measure_again(&of_three(0.9)), [0; 0]);
        assert_eq!(to_measure_again(&measured[..2]), [0; 0], "without the planner's choice");
        let times_best = |measured: &[Measured]| {
            Choice::of("a join".into(), &measured.iter().collect::<Vec<_>>()).unwrap().times_best()
        };
        assert_eq!(times_best(&measured), 1.3);
        (measured[0].seconds_again, measured[2].seconds_again) = (vec![1.0], vec![1.05]);
        assert_eq!(times_best(&measured), 1.05);
        measured[0].seconds_again = vec![1.25];
        assert_eq!(times_best(&measured), 1.0);
    }

    #[test]
    fn joins_of_cached_columns_are_a_separate_group() {
        let mut choices = Choices::default();
        let mut all = of_three(1.2);
        all.extend(of_three(1.05).into_iter().map(|measured| Measured { kept: true, ..measured }));
        choices.add("a join", &all);
        let summary = choices.summary().unwrap();
        assert_eq!((&summary["cases"], &summary["within"]), (&1.into(), &0.into()));
        assert_eq!((&summary["kept"]["cases"], &summary["kept"]["within"]), (&1.into(), &1.into()));
    }
}
