//! How good the planner's choices are: joins drawn at random, each by every strategy and as the planner would run it.

use serde_json::{Value, json};

use super::axes::{Columns, Keys, Payloads, ProbeKeys};
use super::engine::Measured;
use super::random::{below, hash, unit};
use super::workload::Workload;
use crate::cli::output::{self, Align};

/// A choice this much slower than the best is good enough.
const TOLERANCE: f64 = 1.1;

/// Rows of a build side at full size: between these, as likely in each power of two. Joins of fewer are through in a
/// fraction of a millisecond by any strategy.
const BUILD_ROWS: (f64, f64) = ((1 << 14) as f64, (1 << 26) as f64);

/// Bytes of tables and result at full size, at the most.
const BYTES_MAX: f64 = (24u64 << 30) as f64;

/// What tiny scales leave of that, so that the smallest joins fit.
const BYTES_MIN: f64 = (16 << 20) as f64;

/// Bytes of tables and result, at the most.
pub fn bytes_max(scale: f64) -> u64 {
    (BYTES_MAX * scale).max(BYTES_MIN) as u64
}

/// So many workloads, which follow from the seed.
pub fn draw(count: usize, scale: f64, seed: u64) -> Vec<Workload> {
    let possible = |workload: &Workload| workload.impossible().is_none() && workload.bytes() <= bytes_max(scale);
    // Hashed first: seeds next to each other would draw the same joins in another order.
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

/// Random draws that follow on each other.
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

/// The planner's choice of one case beside the best strategy.
#[derive(Clone, Debug, PartialEq)]
struct Choice {
    case: String,
    chosen: String,
    chosen_seconds: f64,
    best: String,
    best_seconds: f64,
}

/// The choices of a suite.
#[derive(Clone, Debug, Default)]
pub struct Choices {
    all: Vec<Choice>,
}

impl Choice {
    fn times_best(&self) -> f64 {
        self.chosen_seconds / self.best_seconds
    }
}

impl Choices {
    /// Adds a case: what was measured of each strategy, and of the planner's choice, which is called `auto`. Without
    /// the latter, or with nothing beside it, there is nothing to compare.
    pub fn add(&mut self, case: String, measured: &[Measured]) {
        let Some(chosen) = measured.iter().find(|measured| measured.asked == "auto") else { return };
        let best = measured.iter().min_by(|a, b| a.median().total_cmp(&b.median()));
        let Some(best) = best.filter(|_| measured.len() > 1) else { return };
        self.all.push(Choice {
            case,
            chosen: chosen.strategy.clone(),
            chosen_seconds: chosen.median(),
            best: best.strategy.clone(),
            best_seconds: best.median(),
        });
    }

    /// The share of choices that are good enough; `None` without any.
    fn share(&self) -> Option<f64> {
        let good = self.all.iter().filter(|choice| choice.times_best() <= TOLERANCE).count();
        (!self.all.is_empty()).then(|| good as f64 / self.all.len() as f64)
    }

    /// Those that are not, the worst first.
    fn misses(&self) -> Vec<&Choice> {
        let mut misses: Vec<&Choice> = self.all.iter().filter(|choice| choice.times_best() > TOLERANCE).collect();
        misses.sort_by(|a, b| b.times_best().total_cmp(&a.times_best()));
        misses
    }

    /// For a line of results; `None` when nothing was compared.
    pub fn summary(&self) -> Option<Value> {
        let miss = |choice: &&Choice| {
            json!({
                "case": choice.case,
                "chosen": choice.chosen,
                "seconds": choice.chosen_seconds,
                "best": choice.best,
                "best_seconds": choice.best_seconds,
                "times_best": choice.times_best(),
            })
        };
        let misses: Vec<Value> = self.misses().iter().map(miss).collect();
        let share = self.share()?;
        Some(json!({"cases": self.all.len(), "tolerance": TOLERANCE, "share_within": share, "misses": misses}))
    }

    /// For people.
    pub fn show(&self) {
        let Some(share) = self.share() else { return };
        let misses = self.misses();
        output::line(format!(
            "\nThe planner's choice was within {:.0} % of the best strategy in {} of {} joins ({:.0} %)",
            (TOLERANCE - 1.0) * 100.0,
            self.all.len() - misses.len(),
            self.all.len(),
            share * 100.0
        ));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_possible_and_follow_from_the_seed() {
        let drawn = draw(50, 1.0 / 1024.0, 3);
        assert_eq!(drawn.len(), 50);
        assert!(drawn.iter().all(|workload| workload.impossible().is_none()));
        assert_eq!(drawn, draw(50, 1.0 / 1024.0, 3));
        let another = draw(50, 1.0 / 1024.0, 4);
        assert!(drawn.iter().all(|workload| !another.contains(workload)), "another seed draws other joins");
    }

    #[test]
    fn a_choice_is_missed_when_another_is_more_than_a_tenth_faster() {
        let measured = |asked: &'static str, strategy: &str, seconds: f64| Measured {
            asked,
            seconds: vec![seconds],
            strategy: strategy.into(),
            ..Measured::default()
        };
        let mut choices = Choices::default();
        let by = |auto: f64| {
            vec![measured("hash", "hash", 1.0), measured("sort-merge", "sort-merge", 2.0), measured("auto", "x", auto)]
        };
        choices.add("good".into(), &by(1.09));
        choices.add("bad".into(), &by(1.3));
        choices.add("the best itself".into(), &by(0.5));
        choices.add("alone".into(), &[measured("auto", "hash", 1.0)]);
        let summary = choices.summary().unwrap();
        assert_eq!(summary["cases"], 3);
        assert_eq!(summary["misses"].as_array().unwrap().len(), 1);
        assert_eq!(summary["misses"][0]["case"], "bad");
        assert_eq!(summary["misses"][0]["best"], "hash");
        assert!(Choices::default().summary().is_none());
    }
}
