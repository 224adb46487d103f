//! Description of a device, as values that can be sent to another process.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Device, DeviceKind};

/// Facts, tuning and capabilities of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    pub facts: DeviceFacts,
    pub tuning: Tuning,
    pub capabilities: Capabilities,
}

impl DeviceInfo {
    /// Returns the description of a device of this process.
    pub fn of(device: &dyn Device) -> Self {
        Self { facts: device.facts().clone(), tuning: *device.tuning(), capabilities: Capabilities::of(device) }
    }
}

/// Hardware of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// Name for the operator: `2 threads of Intel(R) Xeon(R)`, `NVIDIA H200`.
    pub name: String,
    /// UUID of a GPU, or of a slice of one, as `nvidia-smi -L` prints it. `None` for a host device,
    /// and for a GPU whose driver does not say.
    pub uuid: Option<String>,
    /// `None` for a host device.
    pub compute_capability: Option<ComputeCapability>,
    /// CPU threads, or multiprocessors. At least 1.
    pub parallelism: usize,
    /// CPU threads of this device. A host device's own threads, or a GPU's helpers for the work
    /// that the GPU cannot do.
    pub cpu_threads: usize,
}

/// NVIDIA's number of a GPU architecture: 9.0 for H100 and H200.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ComputeCapability {
    pub major: u32,
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Sizes that a device works best with. All are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    /// Streams of one job that are worked on at once, so that copies and kernels overlap. 1 if a
    /// call is finished when it returns.
    pub streams: usize,
    /// Rows per morsel, which one thread takes at a time. If a call has no more rows, the other
    /// threads idle. 1 if rows are shared out one by one.
    pub morsel_rows: usize,
    /// Probe rows that one probe batch of matching and gathering should cover. Intermediate data
    /// then stays in cache (host), or launches stay few (GPU).
    pub probe_batch_rows: usize,
    /// Bytes of the result that should be gathered at once. About one message while the bytes are
    /// in cache (host), more if each call and each copy has a cost (GPU).
    pub gather_bytes: usize,
    /// Extra bytes of device memory per row for transforming a side, compared with a host device. A
    /// second copy of the transformed data comes on top. `None` if the device needs no more than a
    /// host device.
    pub row_scratch_bytes: Option<usize>,
    /// Build rows per partition whose hash table stays in the fastest memory.
    pub partition_rows: usize,
    /// Maximum bits that one partition pass resolves well.
    pub pass_bits_max: u32,
    /// True if partitions should be joined in one step ([`Device::join_partitions`]) instead of
    /// matched first and gathered later.
    pub fuses_partition_join: bool,
}

/// Optional work that a device does, as a value for the planner and for other processes. In the
/// device's own process, [`Device::strings`] and its like give the operations themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// True if the device makes keys of values of variable length and gathers them
    /// ([`Device::strings`]). Otherwise the host does both.
    pub strings: bool,
    /// True if the device has a window, so that it can exchange rows with others of its kind
    /// ([`Device::peers`]).
    pub exchanges: bool,
    /// True if the device runs joins together with others of its kind. GPUs do so only if they
    /// exchange rows: those of one process fail together.
    pub forms_gangs: bool,
}

impl Capabilities {
    /// Returns the capabilities that the device offers.
    pub fn of(device: &dyn Device) -> Self {
        let exchanges = device.peers().is_some_and(|peers| peers.window_bytes() > 0);
        let forms_gangs = exchanges || device.id().kind == DeviceKind::Host;
        Self { strings: device.strings().is_some(), exchanges, forms_gangs }
    }
}
