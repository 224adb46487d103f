//! Shapes: all that jobs must have in common to use one build side.

use std::sync::{Arc, Weak};

use arrow::datatypes::SchemaRef;

use super::admission::Admitted;
use super::device_set::DeviceSet;
use super::job_options::{DeviceRequest, JobOptions};
use crate::catalog::Table;
use crate::join::{Composition, Side};
use crate::planner::{BoundJoin, JoinKey, JoinKind, KeyPair, OutputColumn, Plan, Strategy};

/// All that two jobs must have in common to share a resident.
pub(super) struct Shape {
    table: Weak<Table>,
    name: String,
    pub(super) streamed: Side,
    pub(super) arriving: SchemaRef,
    pub(super) how: JoinKind,
    keys: Vec<JoinKey>,
    /// Names of the key columns.
    pub(super) on: Vec<KeyPair>,
    output: Vec<OutputColumn>,
    /// Columns of the result.
    pub(super) schema: SchemaRef,
    pub(super) batch_rows: Option<usize>,
    strategy: Option<Strategy>,
    /// Decisions of the plan, on the device with the shortest predicted time.
    pub(super) planned: Composition,
    devices: DeviceRequest,
    /// Devices that may prepare it.
    places: Vec<DeviceSet>,
    /// Further joins of a chain, with the same arriving rows.
    pub(super) then: Vec<FurtherJoin>,
}

/// Further join of a chain, as two jobs must have it in common.
pub(super) struct FurtherJoin {
    table: Weak<Table>,
    pub(super) name: String,
    pub(super) how: JoinKind,
    keys: Vec<JoinKey>,
    pub(super) on: Vec<KeyPair>,
    output: Vec<OutputColumn>,
}

/// Returns the names of the key columns of a join.
fn named_keys(join: &BoundJoin) -> Vec<KeyPair> {
    let name = |side: Side, key: &JoinKey| join.table(side).schema.field(key.column(side)).name().clone();
    let named = |key: &JoinKey| KeyPair {
        left: name(Side::Left, key),
        right: name(Side::Right, key),
        nulls_equal: Some(key.nulls_equal),
    };
    join.keys.iter().map(named).collect()
}

impl FurtherJoin {
    fn is_like(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.table, &other.table)
            && (self.how, &self.keys, &self.output) == (other.how, &other.keys, &other.output)
    }
}

impl Shape {
    /// Describes a join whose rows of the `streamed` side arrive.
    pub(super) fn new(admitted: &Admitted, streamed: Side, options: &JobOptions) -> Self {
        let Plan { join, then, composition, .. } = admitted.plan();
        let table = join.table(streamed.other());
        let further = |plan: &Plan| {
            let BoundJoin { how, keys, output, .. } = &plan.join;
            let table = plan.join.table(streamed.other());
            let (name, table) = (table.name.clone(), Arc::downgrade(table));
            FurtherJoin {
                table,
                name,
                how: *how,
                keys: keys.clone(),
                on: named_keys(&plan.join),
                output: output.clone(),
            }
        };
        Self {
            then: then.iter().map(further).collect(),
            table: Arc::downgrade(table),
            name: table.name.clone(),
            streamed,
            arriving: join.table(streamed).schema.clone(),
            how: join.how,
            keys: join.keys.clone(),
            on: named_keys(join),
            output: join.output.clone(),
            schema: join.schema.clone(),
            batch_rows: join.batch_rows,
            strategy: options.strategy,
            planned: composition.clone(),
            devices: options.devices.clone(),
            places: admitted.places.iter().map(|place| place.devices.clone()).collect(),
        }
    }

    pub(super) fn is_like(&self, other: &Self) -> bool {
        // What was asked for may differ, if it comes to the same.
        (self.strategy == other.strategy || self.planned == other.planned)
            && (self.devices == other.devices || self.places == other.places)
            && Weak::ptr_eq(&self.table, &other.table)
            && (self.streamed, self.how, self.batch_rows) == (other.streamed, other.how, other.batch_rows)
            && self.keys == other.keys
            && self.output == other.output
            && self.schema.fields() == other.schema.fields()
            && self.arriving.fields() == other.arriving.fields()
            && self.then.len() == other.then.len()
            && self.then.iter().zip(&other.then).all(|(one, other)| one.is_like(other))
    }

    /// True if a join of two tables may use a resident of this shape. Its strategy and its devices
    /// are not compared.
    pub(super) fn serves(&self, join: &BoundJoin) -> bool {
        self.then.is_empty()
            && std::ptr::eq(self.table.as_ptr(), Arc::as_ptr(join.table(self.streamed.other())))
            && (self.how, self.batch_rows) == (join.how, join.batch_rows)
            && self.keys == join.keys
            && self.output == join.output
            && self.schema.fields() == join.schema.fields()
            && self.arriving.fields() == join.table(self.streamed).schema.fields()
    }

    /// Returns all tables, each with its name.
    pub(super) fn tables(&self) -> impl Iterator<Item = (&str, &Weak<Table>)> {
        let further = self.then.iter().map(|join| (join.name.as_str(), &join.table));
        std::iter::once((self.name.as_str(), &self.table)).chain(further)
    }

    /// Returns the names of all tables.
    pub(super) fn names(&self) -> String {
        self.tables().map(|(name, _)| name).collect::<Vec<_>>().join(", ")
    }
}
