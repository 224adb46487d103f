//! What the planner is asked for: a strategy, its own choice, or one of all ways to compose a join.

use dovetail::planner::{Forced, Side, Strategy};

/// In results: a strategy, `auto` for the planner's choice, or `forced` for a way to compose a join.
pub fn name(forced: &Forced) -> &'static str {
    match forced.strategy {
        _ if *forced == Forced::default() => "auto",
        Some(strategy) if *forced == Forced::named(Some(strategy)) => strategy.name(),
        _ => "forced",
    }
}

/// For people: its name, or what is forced.
pub fn label(forced: &Forced) -> String {
    if name(forced) == "forced" { forced.to_string() } else { name(forced).to_owned() }
}

/// All ways to compose a join. Many of them cannot be for a given one, or come out the same.
pub fn every_way() -> Vec<Forced> {
    const EITHER: [Option<bool>; 2] = [Some(false), Some(true)];
    let mut ways = vec![Forced::default()];
    vary(&mut ways, &Strategy::ALL.map(Some), |way, strategy| way.strategy = strategy);
    vary(&mut ways, &[true, false], |way, by_name| way.by_name = by_name);
    vary(&mut ways, &[Side::Left, Side::Right].map(Some), |way, side| way.build_side = side);
    vary(&mut ways, &EITHER, |way, filter| way.filter = filter);
    vary(&mut ways, &EITHER, |way, last| way.build_columns_last = last);
    vary(&mut ways, &EITHER, |way, gathers| way.device_gathers_text = gathers);
    ways
}

/// Each way with each value of a decision.
fn vary<T: Copy>(ways: &mut Vec<Forced>, values: &[T], set: impl Fn(&mut Forced, T)) {
    let varied = ways.iter().flat_map(|way| {
        values.iter().map(|&value| {
            let mut varied = *way;
            set(&mut varied, value);
            varied
        })
    });
    *ways = varied.collect();
}
