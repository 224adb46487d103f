//! Classes of device sets. One plan serves all sets of a class, so eight equal GPUs cost one plan.

use std::sync::Arc;

use super::device_set::DeviceSet;
use crate::device::{ColumnRows, DeviceKind};
use crate::engine::Engine;
use crate::planner::{BoundJoin, Target};

/// Facts about a set of devices that a plan depends on. Sets of one class have the same plan.
#[derive(Clone, Debug)]
pub(super) struct DeviceClass {
    /// Sizes and rates of the set's devices, and the columns that all of them have cached. A set of
    /// unlike devices has the memory and the rates of the device with the least memory. If it has
    /// GPUs, the rates are those of a GPU.
    target: Target,
    /// The set itself, if it has cached columns of the join's tables. Such a set is a class of its
    /// own.
    cached_on: Option<DeviceSet>,
}

impl DeviceClass {
    /// Returns the class of a set, for a join of the given tables now.
    fn of(devices: &DeviceSet, engines: &[Arc<dyn Engine>], join: &BoundJoin) -> Self {
        let is_gpu = |device: &usize| engines[*device].id().kind == DeviceKind::Cuda;
        let priced: Vec<usize> = match devices.iter().any(|device| is_gpu(&device)) {
            true => devices.iter().filter(is_gpu).collect(),
            false => devices.iter().collect(),
        };
        let helping_hosts = devices.len() - priced.len();
        let memory_of = |device: &usize| engines[*device].memory().limit_bytes();
        let least = &engines[*priced.iter().min_by_key(|&device| memory_of(device)).expect("a set has a device")];
        let kept = cached_by_all(&priced, engines, join);
        let ids: Vec<_> = priced.iter().map(|&device| engines[device].id()).collect();
        let (rates, gang) = least.rates().of_set(&ids);
        let mut target = Target::new(least.id(), least.info(), least.memory(), rates);
        if helping_hosts > 0 {
            target.memory_bytes = devices.iter().map(|device| memory_of(&device)).min().expect("a set has a device");
            target.capabilities.exchanges = false;
            // A GPU of the server's own process runs joins with the CPU, but not with other GPUs.
            target.capabilities.forms_gangs |= priced.len() == 1;
        }
        let target = Target { ranks: devices.len(), helping_hosts, gang, kept, ..target };
        let cached_on = (!target.kept.is_empty()).then(|| devices.clone());
        Self { target, cached_on }
    }

    /// Groups sets by class. Classes are in the order of their first set.
    pub(super) fn group(
        sets: Vec<DeviceSet>,
        engines: &[Arc<dyn Engine>],
        join: &BoundJoin,
    ) -> Vec<(Self, Vec<DeviceSet>)> {
        let mut groups: Vec<(Self, Vec<DeviceSet>)> = Vec::new();
        for devices in sets {
            let class = Self::of(&devices, engines, join);
            match groups.iter_mut().find(|(known, _)| *known == class) {
                Some((_, members)) => members.push(devices),
                None => groups.push((class, vec![devices])),
            }
        }
        groups
    }

    /// Returns the planner's view of a device of the class. It has the name of one of them.
    pub(super) fn target(&self) -> &Target {
        &self.target
    }
}

/// Returns the columns of a join's tables, and their rows, that all of the devices have cached.
/// Devices of a set take rows in turn, so any of them may copy the rows that one lacks.
fn cached_by_all(devices: &[usize], engines: &[Arc<dyn Engine>], join: &BoundJoin) -> Vec<ColumnRows> {
    let of_device = |device: usize| -> Vec<ColumnRows> {
        [&join.left, &join.right].into_iter().flat_map(|table| engines[device].cached_rows(table)).collect()
    };
    devices.iter().copied().map(of_device).reduce(|all, more| in_both(&all, &more)).unwrap_or_default()
}

/// Returns the rows that are in both lists. Rows that a list has twice are in the result twice.
fn in_both(one: &[ColumnRows], other: &[ColumnRows]) -> Vec<ColumnRows> {
    one.iter().flat_map(|rows| other.iter().filter_map(|more| rows.overlap(more))).collect()
}

impl PartialEq for DeviceClass {
    fn eq(&self, other: &Self) -> bool {
        self.cached_on == other.cached_on && self.target.same_sizes_and_rates(&other.target)
    }
}
