//! Decisions that a caller takes instead of the planner, so that the planner's own can be measured
//! against them.

use std::fmt;

use super::{Side, Strategy};
use crate::join::{Composition, Distribution, MovedPayload};

/// Decisions fixed by the caller. The planner makes the others to fit them. `filter` and
/// `defer_build_payload` apply where compositions are priced (`cost/choice.rs`).
/// `device_gathers_text` applies earlier, in the choice of inputs (`plan.rs`). Last, plans that do
/// not agree with all overrides are left out ([`allows`](Self::allows)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanOverrides {
    pub strategy: Option<Strategy>,
    /// True if the name of a strategy also decides which columns move with the keys: all that can,
    /// or none. False: on each side columns move if that pays.
    pub by_name: bool,
    pub build_side: Option<Side>,
    pub filter: Option<bool>,
    /// True if columns of the build side come in after the probe side, where possible.
    pub defer_build_payload: Option<bool>,
    pub device_gathers_text: Option<bool>,
    pub distribution: Option<Distribution>,
    pub shares_build_read: Option<bool>,
}

impl PlanOverrides {
    /// Forces a strategy asked for by name. `None` forces nothing.
    pub fn named(strategy: Option<Strategy>) -> Self {
        Self { strategy, by_name: strategy.is_some(), ..Self::default() }
    }

    /// Takes the decisions of a join that is prepared already.
    pub fn of_prepared(composition: &Composition) -> Self {
        Self {
            strategy: Some(composition.strategy()),
            by_name: !matches!(composition.moved_payload, MovedPayload::Columns { .. }),
            build_side: Some(composition.build_side),
            filter: Some(composition.filter),
            defer_build_payload: Some(composition.defers_build_payload()),
            device_gathers_text: Some(composition.device_gathers_text),
            distribution: Some(composition.distribution),
            shares_build_read: Some(composition.shares_build_read),
        }
    }

    /// True if any decision is taken beforehand, except the distribution.
    pub(super) fn is_more_than_distribution(&self) -> bool {
        Self { distribution: None, ..*self } != Self::default()
    }

    /// True if a composition agrees with the overrides.
    pub(super) fn allows(&self, composition: &Composition) -> bool {
        // Lists every field, so that the compiler finds a forgotten one. The inputs decide who
        // gathers text.
        let Self {
            strategy,
            by_name: _,
            build_side,
            filter,
            defer_build_payload,
            device_gathers_text: _,
            distribution,
            shares_build_read,
        } = *self;
        strategy.is_none_or(|strategy| strategy == composition.strategy())
            && build_side.is_none_or(|side| side == composition.build_side)
            && filter.is_none_or(|filter| filter == composition.filter)
            && defer_build_payload.is_none_or(|defers| defers == composition.defers_build_payload())
            && distribution.is_none_or(|distribution| distribution == composition.distribution)
            && shares_build_read.is_none_or(|shares| shares == composition.shares_build_read)
    }
}

/// Part of a sentence: `strategy hash, built on the left side, with a filter`.
impl fmt::Display for PlanOverrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.strategy.map(|strategy| format!("strategy {strategy}")),
            self.build_side.map(|side| format!("built on the {side} side")),
            self.filter.map(|is_filtered| format!("{} a filter", if is_filtered { "with" } else { "without" })),
            self.defer_build_payload.map(|last| format!("build columns {}", if last { "last" } else { "first" })),
            self.device_gathers_text
                .map(|gathers| format!("text gathered by the {}", if gathers { "device" } else { "host" })),
            self.distribution.map(|distribution| format!("distribution {}", distribution.name())),
            self.shares_build_read
                .map(|shares| format!("build side read {}", if shares { "in shares" } else { "whole by each device" })),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        f.write_str(&parts.join(", "))
    }
}
