//! Facts about how a column crosses the link to the device, found once for all steps and strategies
//! that ask.

use std::collections::HashMap;

use super::super::inputs::{Input, Inputs};
use super::super::target::CachedRows;
use super::super::{BoundJoin, Target};
use crate::columns::{Role, fixed_width};

/// The transfer of a column over the link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    /// Bytes of a value; 0 for values of variable length.
    pub(super) bytes: f64,
    /// Share of the rows that the device has cached, for a reader that takes one part after
    /// another.
    pub(super) kept_share: f64,
    /// Share of the rows that the device has cached, for a reader that takes all rows at once: all
    /// or nothing.
    pub(super) kept_share_at_once: f64,
}

/// The columns of one side.
#[derive(Debug)]
pub(super) struct SideLinks {
    /// The columns of [`Input::columns`], in that order.
    pub(super) columns: Vec<Link>,
    /// The key columns, in the order of the pairs.
    pub(super) keys: Vec<Link>,
}

/// The columns of both sides of a join on one device.
#[derive(Debug)]
pub(in crate::planner) struct Links {
    build: SideLinks,
    probe: SideLinks,
}

impl Links {
    pub(in crate::planner) fn new(join: &BoundJoin, inputs: &Inputs, target: &Target) -> Self {
        Self { build: SideLinks::new(join, &inputs.build, target), probe: SideLinks::new(join, &inputs.probe, target) }
    }

    pub(super) fn of(&self, role: Role) -> &SideLinks {
        match role {
            Role::Build => &self.build,
            Role::Probe => &self.probe,
        }
    }
}

impl SideLinks {
    fn new(join: &BoundJoin, input: &Input, target: &Target) -> Self {
        let table = join.table(input.side);
        let kept: HashMap<usize, CachedRows> = target.cached_rows_of(table);
        let link = |column: usize| {
            let share = |at_once| kept.get(&column).map_or(0.0, |kept| kept.share(table.rows, at_once));
            Link {
                bytes: fixed_width(table.schema.field(column).data_type()).map_or(0.0, |width| width.bytes() as f64),
                kept_share: share(false),
                kept_share_at_once: share(true),
            }
        };
        Self {
            columns: input.columns.iter().map(|column| link(column.index)).collect(),
            keys: join.keys.iter().map(|key| link(key.column(input.side))).collect(),
        }
    }
}
