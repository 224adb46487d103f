//! The kinds of join, and the sides of one.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::device::Which;
use crate::human::asked;
use crate::{Error, Result};

/// Which rows of a join survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum JoinKind {
    /// Every matching pair.
    Inner,
    /// And left rows without a match, with nulls for right.
    Left,
    /// And right rows without a match, with nulls for left.
    Right,
    /// And both.
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

/// A side of a join, as the user wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Side {
    /// The first table named.
    Left,
    /// The second.
    Right,
}

impl Side {
    /// The other one.
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
    /// All of them, in the order of the documentation.
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

    /// The name on the wire.
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

    /// Whether rows of `side` without a match survive, beside nulls.
    pub fn keeps_unmatched(self, side: Side) -> bool {
        matches!((self, side), (Self::Left | Self::Full, Side::Left) | (Self::Right | Self::Full, Side::Right))
    }

    /// For semi and anti joins, the only side whose rows appear.
    pub fn only_side(self) -> Option<Side> {
        match self {
            Self::LeftSemi | Self::LeftAnti => Some(Side::Left),
            Self::RightSemi | Self::RightAnti => Some(Side::Right),
            _ => None,
        }
    }

    /// Which build rows are emitted at the end, when every probe row has left its mark.
    pub fn build_rows_kept(self, build_side: Side) -> Option<Which> {
        match self.only_side() {
            Some(only) if only == build_side && self.is_anti() => Some(Which::Unmatched),
            Some(only) if only == build_side => Some(Which::Matched),
            _ => self.keeps_unmatched(build_side).then_some(Which::Unmatched),
        }
    }

    /// Whether rows of `side` without a match leave no trace in the result, so that they may be dropped as soon as they are
    /// known.
    pub fn drops_unmatched(self, side: Side) -> bool {
        let is_sought = self.is_anti() && self.only_side() == Some(side);
        !is_sought && !self.keeps_unmatched(side)
    }

    /// Whether it is one of the two anti joins.
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

/// What other systems call kinds of joins, and what they are called here.
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

/// The refusal of a name that nothing has, with those that are accepted, and with the one that was probably meant: spelt in
/// another way, known by another name elsewhere, or misspelt.
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

/// How close a name must be to be taken for misspelt, 0 to 1: two of three letters are right.
const CLOSE: f64 = 0.66;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for kind in JoinKind::ALL {
            assert_eq!(kind.name().parse::<JoinKind>().unwrap(), kind);
        }
    }

    #[test]
    fn a_name_from_elsewhere_or_misspelt_is_answered_with_ours() {
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
