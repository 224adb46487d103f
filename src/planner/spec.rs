//! The join that a caller asks for: its inputs, and the rows and columns of its result.

use std::sync::Arc;

use crate::catalog::Table;
use crate::join::{JoinKind, Side};

/// A requested join. Names are not checked yet: [`bind`](super::bind()) checks them.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinSpec {
    pub left: Input,
    pub right: Input,
    /// At least one.
    pub on: Vec<KeyPair>,
    pub how: JoinKind,
    /// Columns of the result: `column`, `left.column` or `right.column`. Empty: the keys once, the
    /// rest of left, the rest of right.
    pub columns: Vec<String>,
    /// True if the result is the number of joined rows, in one row with one column, `count`. Then
    /// `columns` must be empty.
    pub count: bool,
    /// True if null keys match null keys. [`KeyPair::nulls_equal`] overrides it.
    pub nulls_equal: bool,
    /// Maximum rows per batch of the result. `None`: messages of 1 to 4 MB.
    pub batch_rows: Option<usize>,
    /// Further tables that the same rows are joined with. Only for rows that arrive.
    pub then: Vec<ThenSpec>,
}

/// A further join of a chain.
#[derive(Clone, Debug, PartialEq)]
pub struct ThenSpec {
    pub table: Input,
    /// Name of the table among the columns of the result. `None`: its own.
    pub label: Option<String>,
    /// At least one, with the sides of the first join.
    pub on: Vec<KeyPair>,
    pub how: JoinKind,
}

impl JoinSpec {
    /// Returns the inner join of two inputs, with defaults for everything else.
    pub fn inner(left: impl Into<Input>, right: impl Into<Input>, on: Vec<KeyPair>) -> Self {
        Self {
            left: left.into(),
            right: right.into(),
            on,
            how: JoinKind::Inner,
            columns: Vec::new(),
            count: false,
            nulls_equal: false,
            batch_rows: None,
            then: Vec::new(),
        }
    }

    /// Returns the name of a side.
    pub fn table_name(&self, side: Side) -> &str {
        if side == Side::Left { self.left.name() } else { self.right.name() }
    }
}

/// Rows on one side of a join.
#[derive(Clone, Debug)]
pub enum Input {
    /// The table of this name in the catalog, at the time of binding.
    Table(String),
    /// The given rows. The catalog need not know them, and their table's name is only a label.
    Rows(Arc<Table>),
}

impl Input {
    /// Returns the name of the table, for messages.
    pub fn name(&self) -> &str {
        match self {
            Self::Table(name) => name,
            Self::Rows(table) => &table.name,
        }
    }
}

impl From<&str> for Input {
    fn from(name: &str) -> Self {
        Self::Table(name.into())
    }
}

impl From<String> for Input {
    fn from(name: String) -> Self {
        Self::Table(name)
    }
}

impl From<Arc<Table>> for Input {
    fn from(table: Arc<Table>) -> Self {
        Self::Rows(table)
    }
}

/// Two inputs are equal if they have the same name, or are the same rows in memory.
impl PartialEq for Input {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Table(name), Self::Table(other)) => name == other,
            (Self::Rows(table), Self::Rows(other)) => Arc::ptr_eq(table, other),
            _ => false,
        }
    }
}

/// Two columns that must be equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPair {
    pub left: String,
    pub right: String,
    /// Overrides [`JoinSpec::nulls_equal`].
    pub nulls_equal: Option<bool>,
}

impl KeyPair {
    /// Returns a pair that treats nulls as the join does.
    pub fn new(left: &str, right: &str) -> Self {
        Self { left: left.into(), right: right.into(), nulls_equal: None }
    }
}
