//! The join that a client asks for, in names of the catalog.

use crate::catalog::IntoMode;
use crate::join::{JoinKind, Strategy};

/// A requested join. Names are not checked yet: [`bind`](super::bind()) checks them.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinSpec {
    /// Name of the left table.
    pub left: String,
    /// Name of the right table.
    pub right: String,
    /// Pairs of columns that must be equal; at least one.
    pub on: Vec<KeyPair>,
    /// Kind of join, which decides the rows that survive.
    pub how: JoinKind,
    /// Columns of the result: `column`, `left.column` or `right.column`. Empty: the keys once, the
    /// rest of left, the rest of right.
    pub columns: Vec<String>,
    /// True if the result is the number of joined rows, in one row with one column, `count`. Then
    /// `columns` must be empty.
    pub count: bool,
    /// Strategy to run. `None`: the planner chooses.
    pub strategy: Option<Strategy>,
    /// True if null keys match null keys. [`KeyPair::nulls_equal`] overrides it.
    pub nulls_equal: bool,
    /// Devices that may run the join.
    pub devices: DeviceRequest,
    /// Maximum rows per batch of the result. `None`: messages of 1 to 4 MB.
    pub batch_rows: Option<usize>,
    /// Priority, -100 to 100; higher starts first.
    pub priority: i32,
    /// Seconds to keep the result after it is complete. `Some(0)`: released as the first reader
    /// reads it. `None`: the server's setting.
    pub retain_seconds: Option<u32>,
    /// Name of the table that keeps the result.
    pub into: Option<String>,
    /// Action if a table of that name exists already.
    pub into_mode: IntoMode,
}

impl JoinSpec {
    /// Returns the inner join of two tables, with defaults for everything else.
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

    /// True if the result is consumed while it is read, and is never stored in whole. A result that
    /// becomes a table is stored in whole.
    pub fn is_read_as_made(&self) -> bool {
        self.retain_seconds == Some(0) && self.into.is_none()
    }

    /// Returns advice for a join whose result does not fit in host memory.
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
    /// Returns a pair that treats nulls as the join does.
    pub fn new(left: &str, right: &str) -> Self {
        Self { left: left.into(), right: right.into(), nulls_equal: None }
    }
}

/// Devices that a join may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceRequest {
    /// Any device, as many as serve the join best.
    #[default]
    Any,
    /// The given number of devices.
    Count(usize),
    /// Any of the named devices.
    Named(Vec<String>),
}
