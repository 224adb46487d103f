//! The deliberate failures of a GPU: `illegal-access` (a kernel writes where no memory is: all GPUs of the process are lost), `lost`
//! (as after an uncorrectable memory error: this one is), `transient` (as when the system could not do its part just then),
//! `launch-error`, `copy-error` (of a copy to the GPU), `copy-out-error` (of values or positions, to host memory), `read-back-error`
//! (of a few numbers that a primitive waits for), and `out-of-memory` (as when another process has taken what the budget promises).
//! `device/fault.rs` says how a test asks for one.

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

use super::abi;
use super::driver::Queue;
use crate::Result;

/// The failures of a launch.
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
        // The operating system could not do what was asked.
        return queue.gpu.check_launch(304, kernel);
    }
    if queue.gpu.faults.is_due("illegal-access") {
        let args = abi::DovetailIllegalAccess { address: 64 };
        // SAFETY: the access is illegal for the GPU, which stops the context; the CPU's memory is out of its reach.
        let code = unsafe { abi::dovetail_illegal_access(&args, queue.handle()) };
        queue.gpu.check_launch(code, kernel)?;
    }
    Ok(())
}

/// The failures of a copy to the GPU.
pub(super) fn before_copy(queue: &Queue, attempt: &str) -> Result<()> {
    match queue.gpu.faults.is_due("copy-error") {
        true => queue.gpu.check(Err(DriverError(CUresult::CUDA_ERROR_INVALID_VALUE)), attempt),
        false => Ok(()),
    }
}

/// The failures of a copy to host memory that was just queued, and the driver's answer else. The copy is under way all the same, as
/// nobody knows after an error whether it is not: what it writes must live until it is done.
pub(super) fn of_copy_out(queue: &Queue, copied: Result<(), DriverError>) -> Result<(), DriverError> {
    unless_due(queue, "copy-out-error", copied)
}

/// The same of numbers that are read back and waited for, by a copy or by a kernel.
pub(super) fn of_read_back(queue: &Queue, copied: Result<(), DriverError>) -> Result<(), DriverError> {
    unless_due(queue, "read-back-error", copied)
}

fn unless_due(queue: &Queue, fault: &str, answer: Result<(), DriverError>) -> Result<(), DriverError> {
    match answer.is_ok() && queue.gpu.faults.is_due(fault) {
        true => Err(DriverError(CUresult::CUDA_ERROR_INVALID_VALUE)),
        false => answer,
    }
}

/// The failures of taking memory.
pub(super) fn before_allocation(queue: &Queue, purpose: &str) -> Result<()> {
    match queue.gpu.faults.is_due("out-of-memory") {
        true => queue.gpu.check(Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)), purpose),
        false => Ok(()),
    }
}
