//! Gathering of values of variable length to host memory. The first call computes their total
//! length and waits for it. Then values are concatenated and copied out. All waits come before the
//! column's own copies, because a wait would otherwise include these copies.

use std::ptr::{null, null_mut};

use super::abi;
use super::buffer::pointer_of;
use super::gather::{list, validity_at};
use super::transfer::copy_to_host;
use super::work::Work;
use crate::device::{BytesColumn, HostBytes, Positions, Width};
use crate::memory::Arena;
use crate::{Error, Result};

/// Gathers text to host memory. `offset_width`: bytes of the requested offsets, 4 or 8.
/// `bytes_max`: limit of the bytes of values.
pub(super) fn gather_to_host(
    work: &Work<'_>,
    column: &BytesColumn,
    positions: &Positions,
    offset_width: Width,
    bytes_max: u64,
    arena: &Arena,
) -> Result<HostBytes> {
    const PURPOSE: &str = "gathering text of the result";
    let rows = positions.len();
    let (positions_list, start) = list(positions);
    let begins = pointer_of(&column.begins, column.rows + 1);
    let gathered = work.values::<u64>(rows + 1, PURPOSE)?;
    let bytes = {
        // SAFETY: the call only computes a size from a number.
        let scratch_bytes = unsafe { abi::dovetail_gathered_begins_scratch_bytes(rows as u64) };
        let scratch = work.scratch(scratch_bytes, PURPOSE)?;
        let args = abi::DovetailGatheredBegins {
            begins,
            validity: column.validity.as_ref().map_or(null(), |bits| pointer_of(bits, column.rows.div_ceil(8))),
            positions: positions_list,
            start,
            rows: rows as u64,
            scratch: scratch.as_mut_ptr(),
            scratch_bytes,
            gathered: gathered.as_mut_ptr(),
        };
        work.launch("finding where gathered text begins", abi::dovetail_gathered_begins, &args)?;
        work.read_at::<u64>(&gathered, rows, PURPOSE)?
    };
    let addressed = if offset_width == Width::W4 { i32::MAX as u64 } else { i64::MAX as u64 };
    if bytes > bytes_max.min(addressed) {
        return Err(Error::TooLong(format!(
            "{bytes} bytes of text in one batch of {rows} rows are more than the {} that go into one; ask for smaller batches with \
             batch_rows",
            bytes_max.min(addressed)
        )));
    }
    let validity = validity_at(work, column.validity.as_ref(), column.rows, positions)?;

    // Allocate host memory first: if that fails, nothing is copied.
    let host_offsets = arena.allocate((rows + 1) * offset_width.bytes(), PURPOSE)?;
    let host_data = arena.allocate(bytes as usize, PURPOSE)?;
    let host_bits = match &validity {
        Some(_) => Some(arena.allocate(rows.div_ceil(8), PURPOSE)?),
        None => None,
    };
    let offsets = match offset_width {
        Width::W4 => Some(work.values::<u32>(rows + 1, PURPOSE)?),
        _ => None,
    };
    let data = work.buffer((bytes as usize).next_multiple_of(size_of::<u64>()), PURPOSE)?;
    let args = abi::DovetailGatherBytes {
        data: pointer_of::<u8>(&column.data, 0).cast(),
        begins,
        positions: positions_list,
        start,
        rows: rows as u64,
        gathered: gathered.as_ptr(),
        bytes,
        offsets: offsets.as_ref().map_or(null_mut(), |offsets| offsets.as_mut_ptr()),
        out: data.as_mut_ptr(),
    };
    work.launch("gathering text", abi::dovetail_gather_bytes, &args)?;
    let data = copy_to_host(work, &data, 0, host_data, PURPOSE)?;
    let offsets = copy_to_host(work, offsets.as_ref().unwrap_or(&gathered), 0, host_offsets, PURPOSE)?;
    let validity = match (validity, host_bits) {
        (Some((bits, nulls)), Some(host)) => Some((copy_to_host(work, &bits, 0, host, PURPOSE)?, nulls)),
        _ => None,
    };
    Ok(HostBytes { offsets, data, validity, rows })
}
