//! Resources that a join keeps busy, and the seconds in which they do its work together.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, Index};

use serde::Serialize;

/// Declares [`Resource`]. Each line is a resource, with its name in explanations.
macro_rules! resources {
    ($($(#[$doc:meta])* $resource:ident = $name:literal,)+) => {
        /// Part of the machine that moves or processes bytes of a join, at its own rate.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        #[serde(into = "&'static str")]
        pub enum Resource {
            $($(#[$doc])* $resource,)+
        }

        impl Resource {
            /// All resources.
            const ALL: &[Self] = &[$(Self::$resource,)+];

            /// Returns the name of the boundary that bytes cross at the resource.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$resource => $name,)+
                }
            }
        }
    };
}

resources! {
    /// The link to the device.
    LinkIn = "host to device",
    /// The device, with its memory.
    Device = "device memory",
    /// The link from the device.
    LinkOut = "device to host",
    /// The links to the other devices of a gang.
    Peers = "device to device",
    /// The memory of the host, which the links of all devices of a gang share.
    HostMemory = "host memory",
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<Resource> for &'static str {
    fn from(resource: Resource) -> Self {
        resource.name()
    }
}

/// Seconds for which work keeps each resource busy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand([f64; Resource::ALL.len()]);

impl Demand {
    /// Returns the demand of work that keeps one resource busy.
    pub(super) fn of(resource: Resource, seconds: f64) -> Self {
        Self::default().with(resource, seconds)
    }

    /// Replaces the seconds of one resource.
    pub(super) fn with(mut self, resource: Resource, seconds: f64) -> Self {
        self.0[resource as usize] = seconds;
        self
    }

    /// Returns the resource that is busy for longest.
    pub(in crate::planner) fn bound(self) -> Resource {
        let busier = |a: &&Resource, b: &&Resource| self[**a].total_cmp(&self[**b]);
        *Resource::ALL.iter().rev().max_by(busier).expect("there are resources")
    }

    /// Seconds if the resources take turns.
    pub(super) fn sum(self) -> f64 {
        self.0.into_iter().sum()
    }

    /// Seconds of the busiest resource.
    pub(super) fn busiest(self) -> f64 {
        self.0.into_iter().fold(0.0, f64::max)
    }

    /// Seconds of the work if it is divided into chunks that go round between the resources,
    /// `at_once` of them at a time.
    ///
    /// Closed queueing networks bound the time. It is at least the time of the busiest resource
    /// (the roofline). It is at most the time for which each chunk would find all others waiting at
    /// the busiest one (Zahorjan et al. 1982, "Balanced job bound analysis of queueing networks").
    /// The upper bound is used. With one chunk at a time it is the sum of all resources, and with
    /// many it is the busiest one's time.
    pub(super) fn in_chunks(self, at_once: f64) -> f64 {
        (self.sum() + (at_once - 1.0) * self.busiest()) / at_once
    }

    /// Seconds of the work if it waits for its columns to arrive. Then all other resources work in
    /// parallel, also on the demand of `meanwhile`, for which the work does not wait.
    pub(super) fn after_arrival(self, meanwhile: Self) -> f64 {
        let arrival = self[Resource::LinkIn];
        arrival + (self.with(Resource::LinkIn, 0.0) + meanwhile).busiest()
    }
}

impl Index<Resource> for Demand {
    type Output = f64;

    fn index(&self, resource: Resource) -> &f64 {
        &self.0[resource as usize]
    }
}

impl Add for Demand {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(seconds, more)| *seconds += more);
        self
    }
}

impl Sum for Demand {
    fn sum<I: Iterator<Item = Self>>(demands: I) -> Self {
        demands.fold(Self::default(), Self::add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second of each resource, except `busy` seconds of one.
    fn with_busy(resource: Resource, busy: f64) -> Demand {
        let even: Demand = Resource::ALL.iter().map(|&resource| Demand::of(resource, 1.0)).sum();
        even.with(resource, busy)
    }

    fn assert_close(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-9 * expected, "{found} instead of {expected}");
    }

    #[test]
    fn one_chunk_at_a_time_takes_the_sum_of_all_resources() {
        let demand = with_busy(Resource::Device, 5.0);
        assert_close(demand.in_chunks(1.0), 4.0 + Resource::ALL.len() as f64);
        assert_close(demand.in_chunks(1.0), demand.sum());
    }

    #[test]
    fn many_chunks_at_a_time_take_the_time_of_the_busiest_resource() {
        let demand = with_busy(Resource::LinkOut, 5.0);
        let mut last = demand.in_chunks(1.0);
        for at_once in [2.0, 4.0, 1e3, 1e6, 1e12] {
            let seconds = demand.in_chunks(at_once);
            assert!((5.0..last).contains(&seconds), "{seconds} with {at_once} chunks at a time");
            last = seconds;
        }
        assert_close(last, 5.0);
    }

    #[test]
    fn each_resource_decides_if_it_is_the_busiest() {
        for &resource in Resource::ALL {
            let demand = with_busy(resource, 100.0);
            assert_close(demand.busiest(), 100.0);
            assert_close(demand.in_chunks(1e12), 100.0);
            // A second more of it is a second more of the total. A second more of another is not.
            assert_close(demand.in_chunks(4.0) + 1.0, with_busy(resource, 101.0).in_chunks(4.0));
            for &other in Resource::ALL.iter().filter(|&&other| other != resource) {
                assert_close(demand.in_chunks(4.0) + 0.25, demand.with(other, 2.0).in_chunks(4.0));
            }
        }
    }

    #[test]
    fn only_the_columns_that_work_waits_for_arrive_first() {
        let demand = Demand::of(Resource::LinkIn, 2.0) + Demand::of(Resource::Device, 3.0);
        for (meanwhile, expected) in [(0.0, 5.0), (1.0, 5.0), (4.0, 6.0)] {
            assert_close(demand.after_arrival(Demand::of(Resource::LinkIn, meanwhile)), expected);
        }
        assert_close((demand + Demand::of(Resource::LinkOut, 7.0)).after_arrival(Demand::default()), 9.0);
    }

    #[test]
    fn demands_add_up_by_resource() {
        let demands = [(Resource::LinkIn, 1.0), (Resource::Device, 2.0), (Resource::LinkIn, 4.0)];
        let sum: Demand = demands.into_iter().map(|(resource, seconds)| Demand::of(resource, seconds)).sum();
        assert_eq!((sum[Resource::LinkIn], sum[Resource::Device], sum[Resource::LinkOut]), (5.0, 2.0, 0.0));
    }
}
