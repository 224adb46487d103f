//! Permission to change a table.

use super::Table;
use crate::{Error, Result};

/// A caller that makes, changes and drops tables. Every tenant can read every table, but only its
/// owner and admins can change it.
///
/// A table keeps its owner when an admin changes it. Appended rows are charged to the tenant that
/// appended them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Editor {
    /// The tenant that owns the tables that this editor makes, and is charged for them.
    pub tenant: String,
    /// True if this editor may also change the tables of other tenants.
    pub is_admin: bool,
}

/// Handling of an existing table whose name the result of a join asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IntoMode {
    /// The existing table stays, and the name is refused.
    #[default]
    Create,
    Replace,
}

impl From<&str> for Editor {
    fn from(tenant: &str) -> Self {
        Self { tenant: tenant.into(), is_admin: false }
    }
}

impl Editor {
    /// Returns an editor of that tenant that may change the tables of all tenants.
    pub fn admin(tenant: &str) -> Self {
        Self { tenant: tenant.into(), is_admin: true }
    }

    /// Fails if this editor may not change `table`.
    ///
    /// # Errors
    /// [`Error::Denied`] names the owner.
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
