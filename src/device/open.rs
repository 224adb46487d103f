//! Opens devices: the GPUs of this machine that this build can use, or one device by name. No other
//! module knows which GPUs this build can use.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::host::HostDevice;
use super::{Device, DeviceId, DeviceKind};
#[cfg(not(dovetail_cuda))]
use crate::Error;
use crate::Result;
use crate::memory::Budget;

/// Parses `host` or `cuda:N`, for programs that run on one device.
///
/// # Errors
/// For any other text, a message that names the accepted forms.
pub fn parse_device(text: &str) -> Result<DeviceId, String> {
    match text.split_once(':') {
        None if text == "host" => Ok(DeviceId { kind: DeviceKind::Host, index: 0 }),
        Some(("cuda", index)) => match index.parse() {
            Ok(index) => Ok(DeviceId { kind: DeviceKind::Cuda, index }),
            Err(error) => Err(format!("{text}: {error}")),
        },
        _ => Err(format!("{text} is not a device; write host, or cuda:N for GPU number N")),
    }
}

/// Opens one device, the CPU as a whole or a GPU, with `threads` CPU threads. `budget` receives the
/// number of bytes that a GPU's memory can give.
///
/// # Errors
/// Errors of [`open_gpu`] and [`HostDevice::new`].
pub fn open_device(
    id: DeviceId,
    threads: usize,
    budget: impl FnOnce(Option<u64>) -> Budget,
) -> Result<Arc<dyn Device>> {
    open_device_at(id, &GpuPlace::default(), threads, budget)
}

/// GPU of a device, and the CPUs of the device's threads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuPlace {
    /// UUID of the GPU to open. `None`: the GPU of the device's number, or a host device.
    pub uuid: Option<String>,
    /// NUMA node of the GPU. `None`: there is one node, or it is not known.
    pub numa_node: Option<u32>,
    /// CPUs of the NUMA node. Empty: all CPUs.
    pub cpus: Vec<u32>,
}

/// Opens a device as [`open_device`] does. A GPU is found by its UUID instead of its number: CUDA
/// numbers the GPUs of each process by itself, and another number after a GPU is gone.
///
/// # Errors
/// Those of [`open_device`], and [`Error::Unavailable`](crate::Error::Unavailable) if CUDA shows no
/// GPU with this UUID to this process.
pub fn open_device_at(
    id: DeviceId,
    place: &GpuPlace,
    threads: usize,
    budget: impl FnOnce(Option<u64>) -> Budget,
) -> Result<Arc<dyn Device>> {
    match id.kind {
        DeviceKind::Host => Ok(Arc::new(HostDevice::new(id.index, threads, budget(None), None)?)),
        DeviceKind::Cuda => open_gpu_at(id.index, place, threads, |bytes| budget(Some(bytes))),
    }
}

/// Number of GPUs that this process can use. 0 in a build without kernels, or without a driver.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) when there is a driver that does not work.
#[cfg(dovetail_cuda)]
pub fn gpu_count() -> Result<u16> {
    super::cuda::device_count()
}

/// Number of GPUs that this process can use. 0 in a build without kernels, or without a driver.
///
/// # Errors
/// None in this build.
#[cfg(not(dovetail_cuda))]
pub fn gpu_count() -> Result<u16> {
    Ok(0)
}

/// Properties that tell one GPU from the others, and where it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuIdentity {
    /// UUID, in the form of [`DeviceFacts::uuid`](super::DeviceFacts::uuid).
    pub uuid: Option<String>,
    /// Address on the PCI bus, in lower case: `0000:1b:00.0`.
    pub pci_address: String,
    /// NUMA node of the host that is nearest, if the driver says.
    pub numa_node: Option<u32>,
}

/// Returns the identity of each of the GPUs that [`gpu_count`] counts.
///
/// # Errors
/// Those of [`gpu_count`].
#[cfg(dovetail_cuda)]
pub fn gpu_identities() -> Result<Vec<GpuIdentity>> {
    super::cuda::gpu_identities()
}

/// Returns nothing, because this build has no kernels.
///
/// # Errors
/// None in this build.
#[cfg(not(dovetail_cuda))]
pub fn gpu_identities() -> Result<Vec<GpuIdentity>> {
    Ok(Vec::new())
}

/// A GPU, or a slice of one, as the driver shows it. No context is made for this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuSeen {
    pub name: String,
    /// UUID, in the form of [`DeviceFacts::uuid`](super::DeviceFacts::uuid).
    pub uuid: Option<String>,
    /// Address on the PCI bus, in lower case: `0000:1b:00.0`.
    pub pci_address: String,
    pub memory_bytes: u64,
    /// True for each GPU, in the driver's order, whose memory this one can access. Its own is true.
    pub peers: Vec<bool>,
}

/// Returns the GPUs that the driver shows to this process. Empty in a build without kernels, or
/// without a driver.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) when there is a driver that does not work.
#[cfg(dovetail_cuda)]
pub fn gpus_seen() -> Result<Vec<GpuSeen>> {
    super::cuda::gpus_seen()
}

/// Returns no GPU, because this build has no kernels.
///
/// # Errors
/// None in this build.
#[cfg(not(dovetail_cuda))]
pub fn gpus_seen() -> Result<Vec<GpuSeen>> {
    Ok(Vec::new())
}

/// Reason why [`gpu_count`] is 0, if it is.
#[cfg(dovetail_cuda)]
pub fn why_no_gpu() -> &'static str {
    match super::cuda::has_driver() {
        true => "the CUDA driver shows it no GPU",
        false => "no CUDA driver was found",
    }
}

/// Reason why [`gpu_count`] is 0.
#[cfg(not(dovetail_cuda))]
pub fn why_no_gpu() -> &'static str {
    concat!("this build has no kernels: ", env!("DOVETAIL_WHY_NO_KERNELS"))
}

/// Opens GPU number `index`, with `threads` CPU threads for work that the GPU cannot do. `budget`
/// receives the number of bytes that the GPU's memory can give: 95% of the free bytes.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) when there is no such GPU, or this build
/// cannot use it.
pub fn open_gpu(index: u16, threads: usize, budget: impl FnOnce(u64) -> Budget) -> Result<Arc<dyn Device>> {
    open_gpu_at(index, &GpuPlace::default(), threads, budget)
}

#[cfg(dovetail_cuda)]
fn open_gpu_at(
    index: u16,
    place: &GpuPlace,
    threads: usize,
    budget: impl FnOnce(u64) -> Budget,
) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(super::cuda::CudaDevice::open(index, place, threads, |free| budget(free / 20 * 19))?))
}

#[cfg(not(dovetail_cuda))]
fn open_gpu_at(
    index: u16,
    _place: &GpuPlace,
    _threads: usize,
    _budget: impl FnOnce(u64) -> Budget,
) -> Result<Arc<dyn Device>> {
    let why = why_no_gpu();
    Err(Error::Unsupported(format!("cuda:{index} is a GPU that cannot be used, because {why}; use the CPU")))
}
