//! Deliberate failures of a GPU:
//!
//! * `illegal-access`: a kernel writes to unmapped memory, and all GPUs of the process are lost
//! * `lost`: as after an uncorrectable memory error; this GPU is lost
//! * `transient`: as after a momentary failure of the system
//! * `launch-error`
//! * `copy-error`: of a copy to the GPU
//! * `copy-out-error`: of a copy of values or positions to host memory
//! * `read-back-error`: of a few numbers that a primitive waits for
//! * `lost-push`: bytes that are written to a peer do not arrive
//! * `out-of-memory`: as when another process has taken memory that the budget promises
//!
//! `device/fault.rs` says how a test asks for one.

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

use super::abi;
use super::driver::Queue;
use crate::Result;

/// Injects the failures of a launch.
pub(super) fn before_launch(queue: &Queue, kernel: &str) -> Result<()> {
    if queue.gpu.faults.is_due("launch-error") {
        // Too many resources requested.
        return queue.gpu.check_launch(701, kernel);
    }
    if queue.gpu.faults.is_due("lost") {
        // Uncorrectable error of its memory.
        return queue.gpu.check_launch(214, kernel);
    }
    if queue.gpu.faults.is_due("transient") {
        // The operating system failed to do its part.
        return queue.gpu.check_launch(304, kernel);
    }
    if queue.gpu.faults.is_due("illegal-access") {
        let args = abi::DovetailIllegalAccess { address: 64 };
        // SAFETY: the access is illegal for the GPU, which stops the context. The GPU cannot reach
        // the CPU's memory.
        let code = unsafe { abi::dovetail_illegal_access(&args, queue.handle()) };
        queue.gpu.check_launch(code, kernel)?;
    }
    Ok(())
}

/// Injects the failure of a copy to the GPU.
pub(super) fn before_copy(queue: &Queue, attempt: &str) -> Result<()> {
    match queue.gpu.faults.is_due("copy-error") {
        true => queue.gpu.check(Err(DriverError(CUresult::CUDA_ERROR_INVALID_VALUE)), attempt),
        false => Ok(()),
    }
}

/// Injects the failure of a just queued copy to host memory, or returns the driver's answer. The
/// copy still runs, as it may after a real error: its target must live until the copy is done.
pub(super) fn of_copy_out(queue: &Queue, copied: Result<(), DriverError>) -> Result<(), DriverError> {
    unless_due(queue, "copy-out-error", copied)
}

/// Injects the failure of numbers that are read back and waited for, by a copy or by a kernel.
pub(super) fn of_read_back(queue: &Queue, copied: Result<(), DriverError>) -> Result<(), DriverError> {
    unless_due(queue, "read-back-error", copied)
}

fn unless_due(queue: &Queue, fault: &str, answer: Result<(), DriverError>) -> Result<(), DriverError> {
    match answer.is_ok() && queue.gpu.faults.is_due(fault) {
        true => Err(DriverError(CUresult::CUDA_ERROR_INVALID_VALUE)),
        false => answer,
    }
}

/// Injects the failure of an allocation.
pub(super) fn before_allocation(queue: &Queue, purpose: &str) -> Result<()> {
    match queue.gpu.faults.is_due("out-of-memory") {
        true => queue.gpu.check(Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)), purpose),
        false => Ok(()),
    }
}
