//! Who may change a table.

use super::Table;
use crate::{Error, Result};

/// Somebody who makes, changes and drops tables. Everybody reads every table; only its owner changes it, or somebody who may
/// change everybody's.
///
/// A table stays its owner's whoever changes it. What was added is charged to who added it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Editor {
    /// The tenant that owns what is made, and pays for it.
    pub tenant: String,
    /// Whether the tables of others may be changed as well.
    pub is_admin: bool,
}

/// What becomes of a table whose name the result of a join is to have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IntoMode {
    /// It stays, and the name is refused.
    #[default]
    Create,
    /// The result takes its place.
    Replace,
}

impl From<&str> for Editor {
    fn from(tenant: &str) -> Self {
        Self { tenant: tenant.into(), is_admin: false }
    }
}

impl Editor {
    /// Somebody of that tenant who may change the tables of all.
    pub fn admin(tenant: &str) -> Self {
        Self { tenant: tenant.into(), is_admin: true }
    }

    /// Fails when the table is not this one's to change.
    ///
    /// # Errors
    /// [`Error::Denied`] says whose it is.
    pub(super) fn check(&self, table: &Table, done: &str) -> Result<()> {
        if self.is_admin || self.tenant == table.owner {
            return Ok(());
        }
        Err(Error::Denied(format!(
            "table {:?} belongs to tenant {:?}; it can be {done} by that tenant and by an admin",
            table.name, table.owner
        )))
    }
}
