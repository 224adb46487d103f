//! What the planner is asked for: a strategy, its own choice, or its own choice with one decision changed.

use dovetail::planner::{Carried, Forced, Plan, Strategy};

/// What a run is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// What is decided beforehand.
    pub forced: Forced,
    /// The one decision that is another than in the planner's choice.
    pub change: Option<Change>,
}

/// A decision of the planner's, changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Probe rows pass over a filter of the build keys.
    FilterOn,
    /// They do not.
    FilterOff,
    /// The other side is the build side.
    OtherSide,
    /// All columns that can move with the keys (GFTR).
    Carried,
    /// All columns are gathered by row number (GFUR).
    Gathered,
    /// The build side's columns come in after the probe side.
    ColumnsLast,
    /// They come in first.
    ColumnsFirst,
    /// The device gathers text of the result, or the host does.
    TextBy(Gatherer),
}

/// Who gathers text of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gatherer {
    Device,
    Host,
}

impl Change {
    /// Changes of one choice, at the most.
    pub const OF_ONE_MAX: usize = 5;

    /// In results.
    pub fn name(self) -> &'static str {
        match self {
            Self::FilterOn => "filter on",
            Self::FilterOff => "filter off",
            Self::OtherSide => "other side",
            Self::Carried => "carried",
            Self::Gathered => "gathered",
            Self::ColumnsLast => "build columns last",
            Self::ColumnsFirst => "build columns first",
            Self::TextBy(Gatherer::Device) => "text by the device",
            Self::TextBy(Gatherer::Host) => "text by the host",
        }
    }

    /// The decision.
    pub fn decision(self) -> &'static str {
        match self {
            Self::FilterOn | Self::FilterOff => "filter",
            Self::OtherSide => "build side",
            Self::Carried | Self::Gathered => "columns",
            Self::ColumnsLast | Self::ColumnsFirst => "order of columns",
            Self::TextBy(_) => "text",
        }
    }
}

impl From<Option<Strategy>> for Asked {
    /// A strategy by its name, or the planner's choice.
    fn from(strategy: Option<Strategy>) -> Self {
        Self { forced: Forced::named(strategy), change: None }
    }
}

impl Asked {
    /// A choice with each of its decisions changed, one at a time. What follows from a decision the planner decides anew, such as how
    /// many partitions there are, or whether rows that find another build side pass over a filter.
    pub fn changes(chosen: &Plan) -> Vec<Self> {
        let is_filtered = chosen.filtered_rows.is_some();
        let as_chosen = Forced {
            strategy: Some(chosen.strategy),
            by_name: false,
            build_side: Some(chosen.build_side),
            filter: Some(is_filtered),
            build_columns_last: None,
            device_gathers_text: None,
        };
        let filter = if is_filtered { Change::FilterOff } else { Change::FilterOn };
        let mut changes = vec![
            (filter, Forced { filter: Some(!is_filtered), ..as_chosen }),
            (Change::OtherSide, Forced { build_side: Some(chosen.build_side.other()), filter: None, ..as_chosen }),
        ];
        if chosen.build_columns_last {
            changes.push((Change::ColumnsFirst, Forced { build_columns_last: Some(false), ..as_chosen }));
        } else if chosen.strategy == Strategy::Hash {
            changes.push((Change::ColumnsLast, Forced { build_columns_last: Some(true), ..as_chosen }));
        }
        if chosen.could_gather_text_otherwise() {
            let by = if chosen.device_gathers_text { Gatherer::Host } else { Gatherer::Device };
            let forced = Forced { device_gathers_text: Some(by == Gatherer::Device), ..as_chosen };
            changes.push((Change::TextBy(by), forced));
        }
        if let Some([carrying, gathering]) = carrying_and_gathering(chosen.strategy) {
            let by_name = |strategy| Forced { strategy: Some(strategy), by_name: true, ..as_chosen };
            if chosen.carried != Carried::Everything {
                changes.push((Change::Carried, by_name(carrying)));
            }
            if chosen.carried != Carried::Nothing {
                changes.push((Change::Gathered, by_name(gathering)));
            }
        }
        changes.into_iter().map(|(change, forced)| Self { forced, change: Some(change) }).collect()
    }

    /// What it is called: a strategy, `auto` for the planner's choice, or `forced` for that with a decision changed.
    pub fn name(&self) -> &'static str {
        match (self.change, self.forced.strategy) {
            (Some(_), _) => "forced",
            (None, strategy) => strategy.map_or("auto", Strategy::name),
        }
    }

    /// As people read it: `auto, filter off`.
    pub fn label(&self) -> String {
        match self.change {
            Some(change) => format!("auto, {}", change.name()),
            None => self.name().to_owned(),
        }
    }
}

/// The strategies that arrange rows as this one does, with columns that move along and with none. A table over rows as they lie
/// moves nothing.
fn carrying_and_gathering(strategy: Strategy) -> Option<[Strategy; 2]> {
    match strategy {
        Strategy::Hash => None,
        Strategy::RadixHash | Strategy::RadixHashGfur => Some([Strategy::RadixHash, Strategy::RadixHashGfur]),
        Strategy::SortMerge | Strategy::SortMergeGfur => Some([Strategy::SortMerge, Strategy::SortMergeGfur]),
    }
}
