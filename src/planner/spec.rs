//! What a client asks for: a join, in words of the catalog.

use crate::catalog::IntoMode;
use crate::join::{JoinKind, Strategy};

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
    /// The result is the number of rows that it would have, in one row with one column, `count`. Then no columns can be named.
    pub count: bool,
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
    /// What becomes of a table that has the name already.
    pub into_mode: IntoMode,
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
            count: false,
            strategy: None,
            nulls_equal: false,
            devices: DeviceRequest::Any,
            batch_rows: None,
            priority: 0,
            retain_seconds: None,
            into: None,
            into_mode: IntoMode::Create,
        }
    }

    /// Whether the result is consumed as it is read, and never there in whole. What becomes a table is.
    pub fn is_read_as_made(&self) -> bool {
        self.retain_seconds == Some(0) && self.into.is_none()
    }

    /// What would help a join whose result finds no room in host memory.
    pub fn room_advice(&self) -> &'static str {
        match (&self.into, self.retain_seconds) {
            (Some(_), _) => {
                "ask for fewer columns, drop tables, or raise the server's --host-memory: a result that becomes a table has to fit in whole"
            }
            (None, Some(0)) => "drop tables, or raise the server's --host-memory",
            (None, _) => {
                "ask for fewer columns, drop tables, raise the server's --host-memory, or fetch it as it is made with retain_seconds 0 (--retain-seconds 0)"
            }
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
