//! Rates of devices that work at the same time, and share links and host memory.

use serde::{Deserialize, Serialize};

use super::Rates;
use crate::device::DeviceKind;

/// Rates of pairs that differ by less than this factor are taken for one rate. Equal links are
/// never measured as quite equal, and sets of equal devices must have equal plans. All host devices
/// exchange rows through the same memory, so their rates differ only by what else ran.
fn alike(kind: DeviceKind) -> f64 {
    match kind {
        DeviceKind::Cuda => 1.15,
        DeviceKind::Host => f64::INFINITY,
    }
}

/// Rates of a set of devices of one kind that work at the same time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GangRates {
    /// Bytes per second that a device writes to one of the others while they all write to each
    /// other.
    pub peers: f64,
    /// Bytes per second that cross the links between all devices and host memory together, in both
    /// directions.
    pub host_memory: f64,
}

impl GangRates {
    /// Returns assumed rates of devices with the given rates. (Two H100s of one host wrote 393 GB/s
    /// each, and copied 127 GB/s in and out together; four H200s copied 195 GB/s. A host device
    /// copies twice, into a window and out of it.)
    pub fn assumed(rates: &Rates) -> Self {
        const GPU_PEERS: f64 = 390e9;
        const HOST_MEMORY: f64 = 127e9;
        let peers = if rates.reads_host_memory { rates.stream / 4.0 } else { GPU_PEERS };
        Self { peers, host_memory: HOST_MEMORY }
    }
}

/// Measured rates of all devices of a kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkRates {
    /// Rate of host memory for all devices, like that of [`GangRates`].
    host_memory: f64,
    /// Bytes per second from each device to each other while all write, by index of the writer and
    /// then of the owner. A device's own is 0.
    pairs: Vec<Vec<f64>>,
}

impl LinkRates {
    /// Makes rates of the measured ones of devices of a kind. Pairs that are alike get their mean.
    pub fn new(kind: DeviceKind, host_memory: f64, mut pairs: Vec<Vec<f64>>) -> Self {
        let alike = alike(kind);
        let mut sorted: Vec<f64> = pairs.iter().flatten().copied().filter(|&rate| rate > 0.0).collect();
        sorted.sort_by(f64::total_cmp);
        for class in sorted.chunk_by(|slower, faster| *faster < slower * alike) {
            let (least, most) = (class[0], class[class.len() - 1]);
            let mean = class.iter().sum::<f64>() / class.len() as f64;
            pairs.iter_mut().flatten().filter(|rate| (least..=most).contains(*rate)).for_each(|rate| *rate = mean);
        }
        Self { host_memory, pairs }
    }

    /// Returns the rates of a set of these devices, by index. The slowest pair bounds an exchange.
    /// `None` for a set of one device.
    pub fn of_set(&self, members: &[usize]) -> Option<GangRates> {
        let pair = |&writer: &usize| {
            let others = members.iter().filter(move |&&owner| owner != writer);
            others.map(move |&owner| self.pairs[writer][owner])
        };
        let peers = members.iter().flat_map(pair).reduce(f64::min)?;
        Some(GangRates { peers, host_memory: self.host_memory })
    }

    /// Returns the bytes per second from one device to another, by index.
    pub fn of_pair(&self, from: usize, to: usize) -> f64 {
        self.pairs[from][to]
    }

    /// True if there is a positive rate of host memory, and one for each pair of `devices` devices.
    pub(super) fn are_sound(&self, devices: usize) -> bool {
        let is_positive = |rate: f64| rate.is_finite() && rate > 0.0;
        let is_sound = |(writer, rates): (usize, &Vec<f64>)| {
            rates.len() == devices && (0..devices).all(|owner| owner == writer || is_positive(rates[owner]))
        };
        is_positive(self.host_memory) && self.pairs.len() == devices && self.pairs.iter().enumerate().all(is_sound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_equal_links_have_one_rate_and_the_slowest_pair_bounds_a_set() {
        // Two pairs of GPUs with a bridge each.
        let (fast, slow) = ([380e9, 390e9, 400e9, 395e9], 20e9);
        let pairs = vec![
            vec![0.0, fast[0], slow, slow * 1.1],
            vec![fast[1], 0.0, slow, slow],
            vec![slow, slow, 0.0, fast[2]],
            vec![slow, slow, fast[3], 0.0],
        ];
        let of_hosts = LinkRates::new(DeviceKind::Host, 100e9, pairs.clone());
        assert_eq!(of_hosts.of_set(&[0, 1]), of_hosts.of_set(&[0, 2]), "the CPU's devices have no links");
        let rates = LinkRates::new(DeviceKind::Cuda, 100e9, pairs);
        assert!(rates.are_sound(4) && !rates.are_sound(3));
        let of = |members: &[usize]| rates.of_set(members).unwrap();
        assert_eq!(of(&[0, 1]), of(&[2, 3]));
        assert_eq!(of(&[0, 1]), GangRates { peers: 391.25e9, host_memory: 100e9 });
        assert_eq!(of(&[0, 2]), of(&[1, 2, 3]));
        assert!((20e9..22e9).contains(&of(&[0, 1, 2, 3]).peers));
        assert_eq!(rates.of_set(&[1]), None);
    }

    #[test]
    fn a_missing_or_impossible_rate_is_noticed() {
        let of =
            |host_memory, rate| LinkRates::new(DeviceKind::Cuda, host_memory, vec![vec![0.0, 1.0], vec![rate, 0.0]]);
        assert!(of(1.0, 1.0).are_sound(2));
        for wrong in [of(0.0, 1.0), of(f64::INFINITY, 1.0), of(1.0, 0.0), of(1.0, -1.0), of(1.0, f64::NAN)] {
            assert!(!wrong.are_sound(2), "{wrong:?}");
        }
    }
}
