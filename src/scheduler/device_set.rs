//! Sets of devices that run one job together, and the sets that a request allows.

use super::job_options::DeviceRequest;
use crate::device::{DeviceId, DeviceKind};
use crate::{Error, Result, human};

/// Most devices for which all sets of a given size are candidates: at most 70 sets. With more
/// devices, only sets of neighbours are candidates.
const ALL_SETS_DEVICES_MAX: usize = 8;

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

    /// Returns the set of these devices that a condition holds for; `None` if it holds for none.
    pub(super) fn only(&self, holds: impl Fn(usize) -> bool) -> Option<Self> {
        let devices: Vec<usize> = self.iter().filter(|&device| holds(device)).collect();
        (!devices.is_empty()).then(|| Self::new(devices))
    }

    /// Returns the devices, the leader first.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().copied()
    }
}

/// Returns all sets of two and more devices of one kind that a condition holds for, small sets
/// first.
pub(super) fn sets_of_several(devices: &[DeviceId], holds: impl Fn(usize) -> bool) -> Vec<DeviceSet> {
    let kinds = by_kind(devices, holds);
    let most = kinds.iter().map(Vec::len).max().unwrap_or(0);
    (2..=most)
        .flat_map(|count| kinds.iter().flat_map(move |of_kind| sets_of(of_kind, count)).collect::<Vec<_>>())
        .collect()
}

impl DeviceRequest {
    /// Returns the sets of devices that a job with this request may run on, by index into
    /// `devices`. Those of [`Self::Any`] are the single devices.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a request that these devices can never serve.
    pub(super) fn sets(&self, devices: &[DeviceId]) -> Result<Vec<DeviceSet>> {
        let kinds = by_kind(devices, |_| true);
        match self {
            Self::Any | Self::Count(1) => Ok((0..devices.len()).map(|device| DeviceSet::new([device])).collect()),
            Self::Count(0) => Err(Error::Invalid(format!(
                "\"devices\" is 0, and a join needs one; name some of {}, ask for 1, or leave it out",
                names(devices)
            ))),
            Self::Count(count) => {
                let sets: Vec<DeviceSet> = kinds.iter().flat_map(|of_kind| sets_of(of_kind, *count)).collect();
                if sets.is_empty() {
                    let most = kinds.iter().map(Vec::len).max().unwrap_or(0);
                    return Err(Error::Invalid(format!(
                        "\"devices\" is {count}, and the server has {most} devices of one kind at most: {}; ask for fewer",
                        names(devices)
                    )));
                }
                Ok(sets)
            }
            Self::All => {
                let all = kinds.into_iter().find(|of_kind| !of_kind.is_empty());
                Ok(all.into_iter().map(DeviceSet::new).collect())
            }
            Self::Named(asked) => Ok(vec![named(asked, devices)?]),
        }
    }
}

/// Returns the devices of each kind that a condition holds for, by index. GPUs come first.
fn by_kind(devices: &[DeviceId], holds: impl Fn(usize) -> bool) -> [Vec<usize>; 2] {
    let of_kind = |kind| (0..devices.len()).filter(|&at| devices[at].kind == kind && holds(at)).collect();
    [of_kind(DeviceKind::Cuda), of_kind(DeviceKind::Host)]
}

fn names(devices: &[DeviceId]) -> String {
    devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Returns the set of the named devices.
fn named(asked: &[String], devices: &[DeviceId]) -> Result<DeviceSet> {
    if asked.is_empty() {
        return Err(Error::Invalid(format!(
            "\"devices\" is an empty list; name some of {}, or leave it out",
            names(devices)
        )));
    }
    let mut found = Vec::new();
    for name in asked {
        let at = devices.iter().position(|id| id.to_string() == *name).ok_or_else(|| {
            Error::Invalid(format!(
                "there is no device {}; name some of {}, or leave \"devices\" out for any of them",
                human::asked(name),
                names(devices)
            ))
        })?;
        found.push(at);
    }
    Ok(DeviceSet::new(found))
}

/// Returns the sets of `count` of the given devices.
fn sets_of(devices: &[usize], count: usize) -> Vec<DeviceSet> {
    if devices.len() > ALL_SETS_DEVICES_MAX {
        return devices.windows(count).map(|neighbours| DeviceSet::new(neighbours.iter().copied())).collect();
    }
    let is_of_size = |members: &u32| members.count_ones() as usize == count;
    let of =
        |members: u32| DeviceSet::new((0..devices.len()).filter(|at| members >> at & 1 == 1).map(|at| devices[at]));
    (0..1 << devices.len()).filter(is_of_size).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(kinds: &[(DeviceKind, u16)]) -> Vec<DeviceId> {
        kinds.iter().map(|&(kind, index)| DeviceId { kind, index }).collect()
    }

    fn asked(request: &DeviceRequest, devices: &[DeviceId]) -> Vec<Vec<usize>> {
        request.sets(devices).unwrap().iter().map(|set| set.iter().collect()).collect()
    }

    #[test]
    fn a_count_is_served_by_every_set_of_one_kind() {
        use DeviceKind::{Cuda, Host};
        let mixed = ids(&[(Cuda, 0), (Host, 0), (Cuda, 1), (Cuda, 2)]);
        assert_eq!(asked(&DeviceRequest::Count(2), &mixed), [[0, 2], [0, 3], [2, 3]]);
        assert_eq!(asked(&DeviceRequest::Count(3), &mixed), [[0, 2, 3]]);
        assert_eq!(asked(&DeviceRequest::All, &mixed), [[0, 2, 3]]);
        assert_eq!(asked(&DeviceRequest::Any, &mixed), [[0], [1], [2], [3]]);
        let refused = DeviceRequest::Count(4).sets(&mixed).unwrap_err();
        assert!(matches!(&refused, Error::Invalid(message) if message.contains("has 3 devices of one kind")));
        let many: Vec<_> = (0..16).map(|index| (Host, index)).collect();
        assert_eq!(DeviceRequest::Count(8).sets(&ids(&many)).unwrap().len(), 9);
    }

    #[test]
    fn sets_of_several_have_one_kind_and_only_devices_in_service() {
        use DeviceKind::{Cuda, Host};
        let mixed = ids(&[(Cuda, 0), (Host, 0), (Cuda, 1), (Cuda, 2), (Host, 1)]);
        let sets = |holds: &dyn Fn(usize) -> bool| -> Vec<Vec<usize>> {
            sets_of_several(&mixed, holds).iter().map(|set| set.iter().collect()).collect()
        };
        let all: [&[usize]; 5] = [&[0, 2], &[0, 3], &[2, 3], &[1, 4], &[0, 2, 3]];
        assert_eq!(sets(&|_| true), all);
        assert_eq!(sets(&|device| device != 2), [[0, 3], [1, 4]]);
        assert_eq!(sets(&|device| device < 2).len(), 0);
    }

    #[test]
    fn a_list_is_one_set() {
        let devices = ids(&[(DeviceKind::Cuda, 0), (DeviceKind::Host, 0), (DeviceKind::Host, 1)]);
        let named = |names: &[&str]| DeviceRequest::Named(names.iter().map(ToString::to_string).collect());
        assert_eq!(asked(&named(&["host:1", "host:0", "host:1"]), &devices), [[1, 2]]);
        assert_eq!(asked(&named(&["cuda:0"]), &devices), [[0]]);
        assert_eq!(asked(&named(&["host:0", "cuda:0"]), &devices), [[0, 1]], "the CPU may help a GPU");
        for (wrong, words) in [(&["host:7"][..], "no device \"host:7\""), (&[], "empty list")] {
            let refused = named(wrong).sets(&devices).unwrap_err();
            assert!(matches!(&refused, Error::Invalid(message) if message.contains(words)), "{refused}");
        }
    }

    #[test]
    fn a_set_has_each_device_once_in_order() {
        let set = DeviceSet::new([3, 1, 3]);
        assert_eq!((set.len(), set.leader(), set.iter().collect::<Vec<_>>()), (2, 1, vec![1, 3]));
        assert_eq!(set, DeviceSet::new([1, 3]));
    }
}
