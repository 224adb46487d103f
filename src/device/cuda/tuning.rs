//! Limits that a GPU must have, and sizes that it works best with, by its architecture.
//!
//! The kernels set most sizes, which are the same on every GPU. A [`Policy`] has the sizes that
//! only measurements give. An architecture that was not measured uses [`FALLBACK`], and the log
//! says so. To tune another architecture, add its measured sizes to [`MEASURED`].

use super::abi;
use crate::device::{ComputeCapability, Tuning};
use crate::{Error, Result};

/// Smallest compute capability that the kernels are compiled for. They use its asynchronous copies
/// to shared memory and its reductions over warps.
const CAPABILITY_MIN: ComputeCapability = ComputeCapability { major: 8, minor: 0 };

/// Properties of a GPU that decide if kernels start, as the driver reports them.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) name: String,
    pub(super) capability: ComputeCapability,
    pub(super) block_shared_bytes: u32,
}

impl Limits {
    /// Fails if some kernel would not start on the GPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the limit that is too small.
    pub(super) fn check(&self) -> Result<()> {
        let Self { name, capability, block_shared_bytes } = self;
        let refuse = |has: String, need: String| {
            Err(Error::Unsupported(format!(
                "the GPU ({name}) has {has}, and the kernels need {need}; use the CPU instead: host"
            )))
        };
        if *capability < CAPABILITY_MIN {
            return refuse(format!("compute capability {capability}"), format!("{CAPABILITY_MIN} or later"));
        }
        if *block_shared_bytes < abi::DOVETAIL_SHARED_BYTES_MAX {
            let [has, need] = [*block_shared_bytes, abi::DOVETAIL_SHARED_BYTES_MAX].map(|bytes| bytes >> 10);
            return refuse(format!("{has} KiB of shared memory for each block"), format!("{need} KiB"));
        }
        Ok(())
    }
}

/// Sizes that were measured on one architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Policy {
    measured_on: ComputeCapability,
    /// [`Tuning::streams`].
    streams: usize,
    /// [`Tuning::probe_batch_rows`].
    probe_batch_rows: usize,
    /// [`Tuning::gather_bytes`].
    gather_bytes: usize,
}

/// Sizes for H100 and H200, all measured on an H200 (kernels/tuning.md).
const HOPPER: Policy = Policy {
    measured_on: ComputeCapability { major: 9, minor: 0 },
    // Joining 2^27 rows with 2^27 of 12 bytes by `hash`, with 1, 3, 5 and 8 streams: more than 5
    // gained nothing.
    streams: 5,
    // 2^22 and 2^26 rows take as long, and 2^20 take up to 17 % longer.
    probe_batch_rows: 1 << 24,
    gather_bytes: 64 << 20,
};

/// Policies of the measured architectures. Not measured so far: 8.0 (A100), 8.6 and 8.9
/// (workstations, L4, L40), 10.0 and later (Blackwell).
const MEASURED: [Policy; 1] = [HOPPER];

/// Policy of all other architectures.
const FALLBACK: Policy = HOPPER;

impl Policy {
    fn of(capability: ComputeCapability) -> Self {
        MEASURED.into_iter().find(|policy| policy.measured_on == capability).unwrap_or(FALLBACK)
    }
}

/// Returns the sizes that a GPU of this architecture works best with. Logs if they are those of
/// another architecture.
pub(super) fn tuning_of(Limits { name, capability, .. }: &Limits) -> Tuning {
    let Policy { measured_on, streams, probe_batch_rows, gather_bytes } = Policy::of(*capability);
    if measured_on != *capability {
        tracing::info!(
            "{name} has compute capability {capability}, on which no sizes were measured; it uses those measured on \
             {measured_on}, so that joins may be slower than they could be"
        );
    }
    Tuning {
        streams,
        probe_batch_rows,
        gather_bytes,
        // A block takes several thousand rows. A call with too few rows for all blocks ends before
        // the next call is made.
        morsel_rows: 1,
        // Sorting needs images of keys and row numbers, twice each, and several copies of the
        // bounds of partitions.
        row_scratch_bytes: Some(40),
        // Half of the rows of a table in shared memory: partitions vary in size, and each that is
        // too large costs one more round.
        partition_rows: abi::DOVETAIL_TABLE_ROWS as usize / 2,
        // Two passes, because one kernel counts for both. With less than 128 KiB of shared memory
        // for each block, a GPU counts 2^16 partitions pass by pass.
        pass_bits_max: 2 * abi::DOVETAIL_PASS_BITS_MAX,
        fuses_partition_join: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(major: u32, minor: u32, shared_kib: u32) -> Limits {
        let capability = ComputeCapability { major, minor };
        Limits { name: format!("a GPU of {capability}"), capability, block_shared_bytes: shared_kib << 10 }
    }

    #[test]
    fn an_architecture_that_was_not_measured_uses_the_fallback() {
        let policy = |major, minor| Policy::of(ComputeCapability { major, minor });
        assert_eq!(policy(9, 0).measured_on, ComputeCapability { major: 9, minor: 0 });
        for (major, minor) in [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0), (99, 1)] {
            assert_eq!(policy(major, minor), FALLBACK, "{major}.{minor}");
        }
        assert!(MEASURED.contains(&FALLBACK), "the fallback was measured somewhere");
        let architectures = MEASURED.map(|policy| policy.measured_on);
        assert!(architectures.is_sorted_by(|one, other| one < other), "{architectures:?} has each one once");
    }

    #[test]
    fn kernels_fit_in_the_shared_memory_of_every_supported_architecture() {
        for (major, minor, shared_kib) in
            [(8, 0, 163), (8, 6, 99), (8, 7, 163), (8, 9, 99), (9, 0, 227), (10, 0, 227), (12, 0, 99)]
        {
            assert_eq!(gpu(major, minor, shared_kib).check(), Ok(()), "{major}.{minor}");
        }
    }

    #[test]
    fn a_gpu_on_which_a_kernel_would_not_start_is_refused() {
        for (limits, named) in [
            (gpu(7, 5, 64), "compute capability 7.5, and the kernels need 8.0"),
            (gpu(8, 0, 64), "64 KiB of shared memory for each block, and the kernels need 99 KiB"),
        ] {
            let refused = limits.check().unwrap_err();
            assert!(matches!(&refused, Error::Unsupported(text) if text.contains(named)), "{refused}");
        }
    }
}
