//! Requests to the planner: a given strategy, the planner's own choice, or one of all ways to
//! compose a join.

use super::suite::vary;
use dovetail::planner::{PlanOverrides, Side, Strategy};

/// Returns the name in results: a strategy, `auto` for the planner's choice, or `forced` for a way
/// to compose a join.
pub fn name(overrides: &PlanOverrides) -> &'static str {
    match overrides.strategy {
        _ if *overrides == PlanOverrides::default() => "auto",
        Some(strategy) if *overrides == PlanOverrides::named(Some(strategy)) => strategy.name(),
        _ => "forced",
    }
}

/// Returns the text for people: the name, or the decisions that are overridden.
pub fn label(overrides: &PlanOverrides) -> String {
    if name(overrides) == "forced" { overrides.to_string() } else { name(overrides).to_owned() }
}

/// Returns all ways to compose a join. For a given join, many are impossible or give the same plan.
pub fn every_way() -> Vec<PlanOverrides> {
    const EITHER: [Option<bool>; 2] = [Some(false), Some(true)];
    let mut ways = vec![PlanOverrides::default()];
    vary(&mut ways, &Strategy::ALL.map(Some), |way, strategy| way.strategy = strategy);
    vary(&mut ways, &[true, false], |way, by_name| way.by_name = by_name);
    vary(&mut ways, &[Side::Left, Side::Right].map(Some), |way, side| way.build_side = side);
    vary(&mut ways, &EITHER, |way, filter| way.filter = filter);
    vary(&mut ways, &EITHER, |way, last| way.defer_build_payload = last);
    vary(&mut ways, &EITHER, |way, gathers| way.device_gathers_text = gathers);
    ways
}
