//! What a client asks for: a join, in words of the catalog.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// A join as it was asked for. Names are not checked yet: [`bind`](super::bind) does that.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinSpec {
    /// Name of the left table.
    pub left: String,
    /// Name of the right table.
    pub right: String,
    /// Pairs of columns that must be equal; at least one.
    pub on: Vec<KeyPair>,
    /// Which rows survive.
    pub how: JoinKind,
    /// Columns of the result: `column`, `left.column` or `right.column`. Empty: the keys once, the rest of left, the
    /// rest of right.
    pub columns: Vec<String>,
    /// `None`: the planner chooses.
    pub strategy: Option<Strategy>,
    /// Whether null keys match null keys, where a pair does not say.
    pub nulls_equal: bool,
    /// Which devices may run it.
    pub devices: DeviceRequest,
    /// Rows per batch of the result, at most. `None`: messages of 1 to 4 MB.
    pub batch_rows: Option<usize>,
    /// -100 to 100; higher starts first.
    pub priority: i32,
    /// Seconds that the result is kept once it is complete. `Some(0)`: released as the first reader reads it. `None`: the
    /// server's setting.
    pub retain_seconds: Option<u32>,
    /// Keeps the result as a table of this name.
    pub into: Option<String>,
}

impl JoinSpec {
    /// The inner join of two tables, with nothing else said.
    pub fn inner(left: &str, right: &str, on: Vec<KeyPair>) -> Self {
        Self {
            left: left.into(),
            right: right.into(),
            on,
            how: JoinKind::Inner,
            columns: Vec::new(),
            strategy: None,
            nulls_equal: false,
            devices: DeviceRequest::Any,
            batch_rows: None,
            priority: 0,
            retain_seconds: None,
            into: None,
        }
    }
}

/// Two columns that must be equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPair {
    /// Column of the left table.
    pub left: String,
    /// Column of the right table.
    pub right: String,
    /// Overrides [`JoinSpec::nulls_equal`].
    pub nulls_equal: Option<bool>,
}

impl KeyPair {
    /// A pair that treats nulls as the join does.
    pub fn new(left: &str, right: &str) -> Self {
        Self { left: left.into(), right: right.into(), nulls_equal: None }
    }
}

/// Which devices a join may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceRequest {
    /// Any, as many as serve it best.
    #[default]
    Any,
    /// This many.
    Count(usize),
    /// Out of these, by name.
    Named(Vec<String>),
}

/// Which rows of a join survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

/// How a join is composed of primitives. See the `join` room for what each does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// One hash table over the whole build side.
    Hash,
    /// Radix partitions with their payload columns; a table per partition.
    RadixHash,
    /// Radix partitions of keys and row numbers; payload gathered from where it lies.
    RadixHashGfur,
    /// Both sides sorted with their payload columns, merged.
    SortMerge,
    /// Keys and row numbers sorted, merged; payload gathered from where it lies.
    SortMergeGfur,
}

/// A side of a join, as the user wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

    /// Whether it is one of the two anti joins.
    pub fn is_anti(self) -> bool {
        matches!(self, Self::LeftAnti | Self::RightAnti)
    }
}

impl Strategy {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 5] = [Self::Hash, Self::RadixHash, Self::RadixHashGfur, Self::SortMerge, Self::SortMergeGfur];

    /// The name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hash => "hash",
            Self::RadixHash => "radix-hash",
            Self::RadixHashGfur => "radix-hash-gfur",
            Self::SortMerge => "sort-merge",
            Self::SortMergeGfur => "sort-merge-gfur",
        }
    }
}

impl fmt::Display for JoinKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Strategy {
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
            .ok_or_else(|| unknown("kind of join", text, &all.map(Self::name)))
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = Self::ALL;
        let found = all.into_iter().find(|strategy| strategy.name() == text);
        found.ok_or_else(|| {
            unknown(
                "strategy",
                text,
                &["auto", "hash", "radix-hash", "radix-hash-gfur", "sort-merge", "sort-merge-gfur"],
            )
        })
    }
}

fn unknown(what: &str, given: &str, accepted: &[&str]) -> Error {
    Error::Invalid(format!("unknown {what} {given:?}; it is one of {}", accepted.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for kind in JoinKind::ALL {
            assert_eq!(kind.name().parse::<JoinKind>().unwrap(), kind);
        }
        for strategy in Strategy::ALL {
            assert_eq!(strategy.name().parse::<Strategy>().unwrap(), strategy);
        }
        let refusal = "quantum".parse::<Strategy>().unwrap_err();
        assert!(refusal.message().contains("radix-hash-gfur"), "{refusal}");
    }
}
