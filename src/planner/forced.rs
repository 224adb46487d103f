//! Decisions that are taken out of the planner's hands, so that its own can be measured against them.

use std::fmt;

use super::cost::Costed;
use super::{Side, Strategy};

/// What is decided beforehand. The planner decides all else, and so that it goes with this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forced {
    /// The strategy.
    pub strategy: Option<Strategy>,
    /// Whether the name of a strategy says which columns move with the keys: all that can, or none. Otherwise those of each side
    /// do, if that is worth it.
    pub by_name: bool,
    /// The build side.
    pub build_side: Option<Side>,
    /// Whether probe rows pass over a filter of the build keys.
    pub filter: Option<bool>,
    /// Whether columns of the build side come in after the probe side, where they can.
    pub build_columns_last: Option<bool>,
    /// Whether the device gathers text of the result.
    pub device_gathers_text: Option<bool>,
}

impl Forced {
    /// A strategy that is asked for by its name; `None`: nothing.
    pub fn named(strategy: Option<Strategy>) -> Self {
        Self { strategy, by_name: strategy.is_some(), ..Self::default() }
    }

    /// Whether anything is decided beforehand.
    pub(super) fn is_anything(&self) -> bool {
        *self != Self::default()
    }

    /// Whether a strategy on a build side, as it is composed, goes with this.
    pub(super) fn allows(&self, build_side: Side, costed: &Costed) -> bool {
        self.strategy.is_none_or(|strategy| strategy == costed.strategy)
            && self.build_side.is_none_or(|side| side == build_side)
            && self.filter.is_none_or(|is_filtered| is_filtered == costed.filtered_rows.is_some())
            && self.build_columns_last.is_none_or(|last| last == costed.build_columns_last)
    }
}

/// As a part of a sentence: `strategy hash, built on the left side, with a filter`.
impl fmt::Display for Forced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.strategy.map(|strategy| format!("strategy {strategy}")),
            self.build_side.map(|side| format!("built on the {side} side")),
            self.filter.map(|is_filtered| format!("{} a filter", if is_filtered { "with" } else { "without" })),
            self.build_columns_last.map(|last| format!("build columns {}", if last { "last" } else { "first" })),
            self.device_gathers_text
                .map(|gathers| format!("text gathered by the {}", if gathers { "device" } else { "host" })),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        f.write_str(&parts.join(", "))
    }
}
