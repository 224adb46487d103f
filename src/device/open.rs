//! Opening the GPUs of this machine, as far as this build can use them: the one place that knows whether it can.

use std::sync::Arc;

use super::Device;
#[cfg(not(dovetail_cuda))]
use crate::Error;
use crate::Result;
use crate::memory::Budget;

/// Whether this build has kernels: an nvcc was found when it was made.
pub const HAS_KERNELS: bool = cfg!(dovetail_cuda);

/// How many GPUs this process can use; none in a build without kernels, or without a driver.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) when there is a driver that does not work.
#[cfg(dovetail_cuda)]
pub fn gpu_count() -> Result<u16> {
    super::cuda::device_count()
}

/// How many GPUs this process can use; none in a build without kernels, or without a driver.
///
/// # Errors
/// None in this build.
#[cfg(not(dovetail_cuda))]
pub fn gpu_count() -> Result<u16> {
    Ok(0)
}

/// Opens GPU number `index`, with `threads` CPU threads for the work beside it. `budget` is told how many bytes of its memory
/// are free.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) when there is no such GPU, or this build cannot use it.
#[cfg(dovetail_cuda)]
pub fn open_gpu(index: u16, threads: usize, budget: impl FnOnce(u64) -> Budget) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(super::cuda::CudaDevice::open(index, threads, budget)?))
}

/// Opens GPU number `index`.
///
/// # Errors
/// [`Error::Unsupported`], because this build has no kernels.
#[cfg(not(dovetail_cuda))]
pub fn open_gpu(index: u16, _threads: usize, _budget: impl FnOnce(u64) -> Budget) -> Result<Arc<dyn Device>> {
    Err(Error::Unsupported(format!(
        "cuda:{index} is a GPU, which this build cannot use: no nvcc was found when it was made; use host devices"
    )))
}
