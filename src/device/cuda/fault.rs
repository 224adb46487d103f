//! Deliberate failures, for tests of what becomes of jobs and of the server when a GPU fails.
//!
//! `DOVETAIL_TEST_FAULT` names a file. Whenever that file exists, the next call that its text applies to removes it and fails
//! in that way: `illegal-access` (a kernel writes where no memory is: the GPU is lost), `launch-error`, `copy-error` or
//! `out-of-memory` (as when another process has taken what the budget promises). Without the variable nothing is looked at.

use std::path::PathBuf;
use std::sync::LazyLock;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

use super::abi;
use super::driver::Queue;
use crate::Result;

static TRIGGER: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("DOVETAIL_TEST_FAULT").map(PathBuf::from));

/// Whether this call is to fail in that way.
fn is_due(fault: &str) -> bool {
    let Some(trigger) = &*TRIGGER else { return false };
    let due = std::fs::read_to_string(trigger).is_ok_and(|text| text.trim() == fault);
    due && std::fs::remove_file(trigger).is_ok()
}

/// The failures of a launch.
pub(super) fn before_launch(queue: &Queue, kernel: &str) -> Result<()> {
    if is_due("launch-error") {
        // Too many resources requested.
        return queue.gpu.check_launch(701, kernel);
    }
    if is_due("illegal-access") {
        let args = abi::DovetailIllegalAccess { address: 64 };
        // SAFETY: the access is illegal for the GPU, which stops the context; the CPU's memory is out of its reach.
        let code = unsafe { abi::dovetail_illegal_access(&args, queue.handle()) };
        queue.gpu.check_launch(code, kernel)?;
    }
    Ok(())
}

/// The failures of a copy.
pub(super) fn before_copy(queue: &Queue, attempt: &str) -> Result<()> {
    match is_due("copy-error") {
        true => queue.gpu.check(Err(DriverError(CUresult::CUDA_ERROR_INVALID_VALUE)), attempt),
        false => Ok(()),
    }
}

/// The failures of taking memory.
pub(super) fn before_allocation(queue: &Queue, purpose: &str) -> Result<()> {
    match is_due("out-of-memory") {
        true => queue.gpu.check(Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)), purpose),
        false => Ok(()),
    }
}
