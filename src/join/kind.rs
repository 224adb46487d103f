//! Kinds of join, and the sides of a join.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::device::Which;
use crate::human::asked;
use crate::{Error, Result};

/// Kind of a join: selects the rows that survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum JoinKind {
    /// Every matching pair.
    Inner,
    /// Every matching pair, and left rows without a match, with nulls for right.
    Left,
    /// Every matching pair, and right rows without a match, with nulls for left.
    Right,
    /// Every matching pair, and rows of both sides without a match, with nulls for the other side.
    Full,
    /// Left rows with a match, once each.
    LeftSemi,
    /// Left rows without a match.
    LeftAnti,
    /// Right rows with a match, once each.
    RightSemi,
    /// Right rows without a match.
    RightAnti,
}

/// Side of a join, as the user wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Side {
    /// The first table named.
    Left,
    /// The second table named.
    Right,
}

impl Side {
    /// Returns the other side.
    pub fn other(self) -> Self {
        match self {
            Self::Left => Self::Right,
            Self::Right => Self::Left,
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Left => "left",
            Self::Right => "right",
        })
    }
}

impl JoinKind {
    /// All kinds, in the order of the documentation.
    pub const ALL: [Self; 8] = [
        Self::Inner,
        Self::Left,
        Self::Right,
        Self::Full,
        Self::LeftSemi,
        Self::LeftAnti,
        Self::RightSemi,
        Self::RightAnti,
    ];

    /// Returns the name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inner => "inner",
            Self::Left => "left",
            Self::Right => "right",
            Self::Full => "full",
            Self::LeftSemi => "left_semi",
            Self::LeftAnti => "left_anti",
            Self::RightSemi => "right_semi",
            Self::RightAnti => "right_anti",
        }
    }

    /// True if rows of `side` without a match survive, with nulls for the other side.
    pub fn keeps_unmatched(self, side: Side) -> bool {
        matches!((self, side), (Self::Left | Self::Full, Side::Left) | (Self::Right | Self::Full, Side::Right))
    }

    /// Returns the only side whose rows appear, for semi and anti joins.
    pub fn only_side(self) -> Option<Side> {
        match self {
            Self::LeftSemi | Self::LeftAnti => Some(Side::Left),
            Self::RightSemi | Self::RightAnti => Some(Side::Right),
            _ => None,
        }
    }

    /// Returns which build rows are emitted at the end, when every probe row has marked its
    /// matches.
    pub fn build_rows_kept(self, build_side: Side) -> Option<Which> {
        match self.only_side() {
            Some(only) if only == build_side && self.is_anti() => Some(Which::Unmatched),
            Some(only) if only == build_side => Some(Which::Matched),
            _ => self.keeps_unmatched(build_side).then_some(Which::Unmatched),
        }
    }

    /// True if rows of `side` without a match leave no trace in the result. They may then be
    /// dropped as soon as they are known.
    pub fn drops_unmatched(self, side: Side) -> bool {
        let is_sought = self.is_anti() && self.only_side() == Some(side);
        !is_sought && !self.keeps_unmatched(side)
    }

    /// True for the two anti joins.
    pub fn is_anti(self) -> bool {
        matches!(self, Self::LeftAnti | Self::RightAnti)
    }
}

impl fmt::Display for JoinKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for JoinKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = Self::ALL;
        all.into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| unknown("kind of join", text, &all.map(Self::name), &OTHER_NAMES))
    }
}

/// Names of kinds of join in other systems, each with its name here.
const OTHER_NAMES: [(&str, &str); 9] = [
    ("outer", "full"),
    ("full_outer", "full"),
    ("left_outer", "left"),
    ("right_outer", "right"),
    ("semi", "left_semi"),
    ("leftsemi", "left_semi"),
    ("anti", "left_anti"),
    ("leftanti", "left_anti"),
    ("exists", "left_semi"),
];

/// Returns the error for an unknown name. It lists the accepted names, and suggests the name that
/// was probably meant: a name spelt in another way, known by another name elsewhere, or misspelt.
pub(super) fn unknown(what: &str, given: &str, accepted: &[&str], other_names: &[(&str, &str)]) -> Error {
    let plain = |name: &str| name.trim().to_lowercase().replace(['-', ' '], "_");
    let given_plain = plain(given);
    let same = accepted.iter().find(|name| plain(name) == given_plain).copied();
    let other = || Some(other_names.iter().find(|(name, _)| *name == given_plain)?.1);
    let close = || {
        let closeness = |name: &&&str| strsim::normalized_damerau_levenshtein(&plain(name), &given_plain);
        let closest = accepted.iter().max_by(|a, b| closeness(a).total_cmp(&closeness(b)))?;
        (closeness(&closest) >= CLOSE).then_some(*closest)
    };
    let meant = same.or_else(other).or_else(close);
    let hint = meant.map(|name| format!("; did you mean {name:?}?")).unwrap_or_default();
    Error::Invalid(format!("unknown {what} {}; it is one of {}{hint}", asked(given), accepted.join(", ")))
}

/// Least similarity, 0 to 1, at which a name counts as misspelt: two of three letters are right.
const CLOSE: f64 = 0.66;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kind_names_parse_back() {
        for kind in JoinKind::ALL {
            assert_eq!(kind.name().parse::<JoinKind>().unwrap(), kind);
        }
    }

    #[test]
    fn an_unknown_kind_of_join_is_refused_with_the_name_that_is_meant() {
        for (given, meant) in [
            ("outer", Some("full")),
            ("FULL OUTER", Some("full")),
            ("left outer", Some("left")),
            ("semi", Some("left_semi")),
            ("anti", Some("left_anti")),
            ("LEFT", Some("left")),
            ("Left-Anti", Some("left_anti")),
            ("inenr", Some("inner")),
            ("right_sem", Some("right_semi")),
            ("cross", None),
            ("", None),
        ] {
            let refused = given.parse::<JoinKind>().unwrap_err();
            let said = refused.message();
            assert!(said.starts_with(&format!("unknown kind of join {given:?}; it is one of inner, left, ")), "{said}");
            match meant {
                Some(name) => assert!(said.ends_with(&format!("; did you mean {name:?}?")), "{said}"),
                None => assert!(!said.contains("did you mean"), "{said}"),
            }
        }
    }
}
