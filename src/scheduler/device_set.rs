//! Sets of devices that run one job together.

/// Devices of a job, by index, in ascending order. A set has at least one device. The first is its
/// leader, whose worker runs the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeviceSet(Vec<usize>);

impl DeviceSet {
    /// Returns the set of the given devices.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn new(devices: impl IntoIterator<Item = usize>) -> Self {
        let mut devices: Vec<usize> = devices.into_iter().collect();
        assert!(!devices.is_empty(), "a job runs on at least one device");
        devices.sort_unstable();
        devices.dedup();
        Self(devices)
    }

    /// Returns the number of devices.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the device whose worker runs the job.
    pub(super) fn leader(&self) -> usize {
        self.0[0]
    }

    /// Returns the devices, the leader first.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_each_device_once_in_order() {
        let set = DeviceSet::new([3, 1, 3]);
        assert_eq!((set.len(), set.leader(), set.iter().collect::<Vec<_>>()), (2, 1, vec![1, 3]));
        assert_eq!(set, DeviceSet::new([1, 3]));
    }
}
