//! Explains a chain: the order of its joins, and the share of its rows that each keeps.

use std::fmt;

use serde::Serialize;

use super::Plan;
use super::cost::PredictedPhase;
use crate::catalog::Table;
use crate::columns::Role;
use crate::human;
use crate::join::{ChainReport, kept_share, order_of};
use crate::memory::human_bytes;

/// Join of a chain.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedChainJoin {
    /// Name of its table among the inputs.
    pub table: String,
    pub how: &'static str,
    /// Key columns of the rows that probe it.
    pub keys: Vec<String>,
    /// Place in the predicted order, from 1.
    pub predicted_place: usize,
    /// Share of the rows that reach it and that it is predicted to keep. A join that repeats rows
    /// may keep more than 1.
    pub predicted_share: f64,
    /// Rows that have reached it. `None`: the chain has not run.
    pub rows: Option<u64>,
    /// Rows that it has made of them.
    pub kept_rows: Option<u64>,
    /// `None`: no rows have reached it.
    pub measured_share: Option<f64>,
}

/// Returns the joins of a chain in the order in which the rows probe them, and the story of that
/// order if the chain has run. There are none for a join that no others follow.
pub(super) fn explained_chain(plan: &Plan, report: Option<&ChainReport>) -> (Vec<ExplainedChainJoin>, Option<String>) {
    let Some(then) = &plan.join.then else { return (Vec::new(), None) };
    let plans: Vec<&Plan> = plans_of(plan).collect();
    let shares: Vec<f64> = plans.iter().map(|plan| predicted_share(plan)).collect();
    let predicted_order = order_of(&shares);
    let report = report.filter(|report| report.order.len() == plans.len() && report.joins.len() == plans.len());
    let explained = |&join: &usize| {
        let (plan, rows_side) = (plans[join], plans[join].side(Role::Probe));
        let schema = &plan.join.table(rows_side).schema;
        let passed = report.map(|report| report.joins[join]);
        ExplainedChainJoin {
            table: then.labels.get(join).cloned().unwrap_or_default(),
            how: plan.join.how.name(),
            keys: plan.join.keys.iter().map(|key| schema.field(key.column(rows_side)).name().clone()).collect(),
            predicted_place: 1 + predicted_order.iter().position(|&other| other == join).unwrap_or(join),
            predicted_share: shares[join],
            rows: passed.map(|passed| passed.rows),
            kept_rows: passed.map(|passed| passed.kept),
            measured_share: passed
                .filter(|passed| passed.rows > 0)
                .map(|passed| passed.kept as f64 / passed.rows as f64),
        }
    };
    let order = report.map_or(&predicted_order, |report| &report.order);
    let joins: Vec<ExplainedChainJoin> = order.iter().map(explained).collect();
    let story = report.map(|report| story_of(&joins, report.changes));
    (joins, story)
}

/// Says in words how the order of the joins compares with the predicted order, and why it differs.
fn story_of(joins: &[ExplainedChainJoin], changes: u64) -> String {
    let times = match changes {
        0 => "did not change while rows arrived".to_string(),
        1 => "changed once while rows arrived".to_string(),
        changes => format!("changed {changes} times while rows arrived"),
    };
    // The first join that has overtaken another.
    let overtaken = joins.iter().enumerate().find_map(|(at, ahead)| {
        let behind = joins[at + 1..].iter().find(|behind| behind.predicted_place < ahead.predicted_place)?;
        Some((ahead, behind))
    });
    let Some((ahead, behind)) = overtaken else {
        return format!("The order of the joins is as predicted, and {times}.");
    };
    let kept = |join: &ExplainedChainJoin| {
        let measured = join.measured_share.map_or("none".into(), percent);
        format!("{measured} of its rows ({} predicted)", percent(join.predicted_share))
    };
    let learned = if changes == 0 { ": earlier rows of other streams had shown it" } else { "" };
    format!(
        "{:?} comes before {:?}, unlike predicted: it has kept {}, and {:?} {}. The order {times}{learned}.",
        ahead.table,
        behind.table,
        kept(ahead),
        behind.table,
        kept(behind)
    )
}

/// Returns the share of its rows that a join of a chain is predicted to keep.
pub(super) fn predicted_share(plan: &Plan) -> f64 {
    let rows_side = plan.side(Role::Probe);
    kept_share(plan.estimates.pairs / plan.estimates.keyed(rows_side).max(1.0), plan.join.how, rows_side)
}

/// Returns the predicted phases of all joins of a plan together.
pub(super) fn phases_of_all(plan: &Plan) -> Vec<PredictedPhase> {
    let mut phases = plan.phases.clone();
    for further in plan.then.iter().flat_map(|then| &then.phases) {
        match phases.iter_mut().find(|known| known.phase == further.phase) {
            Some(known) => {
                known.seconds += further.seconds;
                known.bytes += further.bytes;
            }
            None => phases.push(further.clone()),
        }
    }
    phases
}

/// Steps of a chain, from the result down to the tables.
pub(super) fn chain_tree(plan: &Plan, labels: &[String]) -> Vec<String> {
    let columns = human::counted(plan.join.schema.fields().len() as u64, "column");
    let joins = plan.then.len() + 1;
    let mut lines = vec![
        format!("gather {columns} by row number"),
        format!("└─ probe {joins} tables in one pass, with only row numbers between two of them"),
    ];
    for (plan, label) in plans_of(plan).zip(labels) {
        let table = plan.join.table(plan.side(Role::Build));
        let index = if plan.composition.dense { "perfect-hash array" } else { "hash table" };
        let kept = plan.kept_build.as_ref().map_or_else(String::new, |kept| format!("; {kept}"));
        lines.push(format!("   ├─ build: one {index}{kept}"));
        let name = if *label == table.name { String::new() } else { format!(" as {label:?}") };
        let (rows, bytes) = (human::counted(table.rows, "row"), human_bytes(table.bytes));
        lines.push(format!("   │  └─ table {:?}{name}, {rows}, {bytes}", table.name));
    }
    lines.push("   └─ probe: as stored".into());
    let rows = plan.join.table(plan.side(Role::Probe));
    lines.push(format!("      └─ {}", rows_that_arrive(rows)));
    lines
}

/// Describes the side of a join whose rows arrive.
pub(super) fn rows_that_arrive(rows: &Table) -> String {
    format!("rows {:?}, as they arrive; times are predicted for {} of them", rows.name, human::count(rows.rows))
}

fn plans_of(plan: &Plan) -> impl Iterator<Item = &Plan> {
    std::iter::once(plan).chain(&plan.then)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Prints the joins of a chain as a table, and the story of their order.
pub(super) fn write_chain(
    f: &mut fmt::Formatter<'_>,
    joins: &[ExplainedChainJoin],
    story: Option<&String>,
) -> fmt::Result {
    let table = |join: &ExplainedChainJoin| format!("{:?} on {}", join.table, join.keys.join(", "));
    let width = joins.iter().map(|join| table(join).chars().count()).max().unwrap_or(0);
    let heading = "joins in the order in which the rows probe them";
    writeln!(f, "{heading:width$}  kind         predicted to keep  kept", width = width + 3)?;
    // The heading may be wider than the names.
    let width = width.max(heading.len() - 3);
    for (at, join) in joins.iter().enumerate() {
        let kept = match (join.rows, join.kept_rows, join.measured_share) {
            (Some(rows), Some(kept), Some(share)) => {
                format!("{}, {} of {}", percent(share), human::count(kept), human::count(rows))
            }
            (Some(_), ..) => "no row has reached it".into(),
            _ => "-".into(),
        };
        let (place, how, predicted) = (at + 1, join.how, percent(join.predicted_share));
        writeln!(f, "{place:>2} {:width$}  {how:11}  {predicted:>17}  {kept}", table(join))?;
    }
    story.map_or(Ok(()), |story| writeln!(f, "{story}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(table: &str, predicted_place: usize, rows: u64, kept: u64) -> ExplainedChainJoin {
        ExplainedChainJoin {
            table: table.into(),
            how: "inner",
            keys: vec!["k".into()],
            predicted_place,
            predicted_share: predicted_place as f64,
            rows: Some(rows),
            kept_rows: Some(kept),
            measured_share: (rows > 0).then(|| kept as f64 / rows as f64),
        }
    }

    #[test]
    fn the_story_of_an_order_names_a_join_that_overtook_another() {
        let as_predicted = [join("a", 1, 10, 5), join("b", 2, 5, 5)];
        assert_eq!(
            story_of(&as_predicted, 2),
            "The order of the joins is as predicted, and changed 2 times while rows arrived."
        );
        let overtaken = [join("a", 1, 10, 5), join("c", 3, 1000, 4), join("b", 2, 0, 0)];
        assert_eq!(
            story_of(&overtaken, 1),
            "\"c\" comes before \"b\", unlike predicted: it has kept 0.4 % of its rows (300.0 % predicted), and \"b\" none of \
             its rows (200.0 % predicted). The order changed once while rows arrived."
        );
        assert!(story_of(&overtaken, 0).ends_with("rows arrived: earlier rows of other streams had shown it."));
    }
}
