//! Gathering of values at positions, to the device and to host memory.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::null;
use std::sync::Arc;

use super::abi::{self, DOVETAIL_LISTS_MAX};
use super::buffer::{CudaBuffer, GRANULE_BYTES, cuda, pointer_of};
use super::transfer::copy_to_host;
use super::work::Work;
use crate::Result;
use crate::device::{Column, DeviceBuffer, HostColumn, Keys, Payload, Positions, Width};
use crate::memory::Arena;

/// Byte that marks a missing row in a list of positions: the byte of `NO_ROW`.
const NO_ROW_BYTE: u8 = 0xff;

/// Returns a pointer to stored positions, or null and the first position of consecutive ones.
pub(super) fn list(positions: &Positions) -> (*const u32, u32) {
    match positions {
        Positions::Range(range) => (null(), range.start as u32),
        Positions::List { data, rows, .. } => (pointer_of(data, *rows), 0),
    }
}

fn nullable(positions: &Positions) -> bool {
    matches!(positions, Positions::List { nullable: true, .. })
}

/// Gathers values. If `data` is `None`, they are consecutive numbers from `data_start` on. Room in
/// `out` for more whole values becomes zero.
pub(super) fn gather_cells(
    work: &Work<'_>,
    data: Option<*const c_void>,
    data_start: u32,
    width: Width,
    positions: &Positions,
    missing: u8,
    out: &CudaBuffer,
) -> Result<()> {
    assert!(out.size() >= positions.len() * width.bytes(), "{} values in {} bytes", positions.len(), out.size());
    let (list, start) = list(positions);
    let args = abi::DovetailGather {
        data: data.unwrap_or(null()),
        data_start,
        width: width.bytes() as u32,
        positions: list,
        start,
        rows: positions.len() as u64,
        places: (out.size() / width.bytes()) as u64,
        missing,
        out: out.as_mut_ptr(),
    };
    work.launch("gathering values", abi::dovetail_gather, &args)
}

/// Gathers a column's values, and its validity with the number of nulls, if there are any. Waits if
/// there may be nulls.
fn gathered(
    work: &Work<'_>,
    column: &Column,
    positions: &Positions,
) -> Result<(CudaBuffer, Option<(CudaBuffer, usize)>)> {
    const PURPOSE: &str = "gathering a column";
    let rows = positions.len();
    let data = pointer_of::<u8>(&column.data, column.rows * column.width.bytes()).cast();
    let values = work.buffer(rows * column.width.bytes(), PURPOSE)?;
    gather_cells(work, Some(data), 0, column.width, positions, 0, &values)?;
    Ok((values, validity_at(work, column.validity.as_ref(), column.rows, positions)?))
}

/// Gathers the validity of a column of `column_rows` rows, with the number of nulls, if there are
/// any. Waits if there may be nulls.
pub(super) fn validity_at(
    work: &Work<'_>,
    validity: Option<&DeviceBuffer>,
    column_rows: usize,
    positions: &Positions,
) -> Result<Option<(CudaBuffer, usize)>> {
    const PURPOSE: &str = "gathering validity";
    if validity.is_none() && !nullable(positions) {
        return Ok(None);
    }
    let rows = positions.len();
    let bits = work.buffer(rows.div_ceil(8), PURPOSE)?;
    let cleared = work.filled(size_of::<u64>(), 0, PURPOSE)?;
    let (list, start) = list(positions);
    let args = abi::DovetailGatherBits {
        bits: validity.map_or(null(), |bits| pointer_of(bits, column_rows.div_ceil(8))),
        positions: list,
        start,
        rows: rows as u64,
        out: bits.as_mut_ptr(),
        cleared: cleared.as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_gather_bits, &args)?;
    let nulls = work.read::<u64>(&cleared, PURPOSE)? as usize;
    Ok((nulls > 0).then_some((bits, nulls)))
}

pub(super) fn gather(work: &Work<'_>, column: &Column, positions: &Positions) -> Result<Column> {
    let (values, validity) = gathered(work, column, positions)?;
    let validity = validity.map(|(bits, _)| Arc::new(bits) as _);
    Ok(Column { data: Arc::new(values), width: column.width, rows: positions.len(), validity })
}

/// Gathers the keys at the rows of `order`.
pub(super) fn rearranged(work: &Work<'_>, keys: &Keys, order: &Positions) -> Result<Keys> {
    Ok(Keys { data: gather(work, &keys.as_column(), order)?.data, ..keys.clone() })
}

/// Transforms the payload columns by the row numbers of `order`. Validity is not moved.
pub(super) fn move_payload(work: &Work<'_>, payload: &[Payload], order: &Positions) -> Result<Vec<Column>> {
    let Positions::List { data: numbers, rows, .. } = order else { unreachable!("rows are ordered by a list") };
    payload
        .iter()
        .map(|payload| match payload {
            Payload::RowNumber => Ok(Column { data: numbers.clone(), width: Width::W4, rows: *rows, validity: None }),
            Payload::Column(column) => gather(work, &Column { validity: None, ..column.clone() }, order),
        })
        .collect()
}

/// Returns the row numbers 0, 1, and so on.
pub(super) fn numbers(work: &Work<'_>, rows: usize) -> Result<CudaBuffer> {
    let numbers = work.values::<u32>(rows, "numbering rows")?;
    gather_cells(work, None, 0, Width::W4, &Positions::Range(0..rows), 0, &numbers)?;
    Ok(numbers)
}

pub(super) fn gather_to_host(
    work: &Work<'_>,
    column: &Column,
    positions: &Positions,
    arena: &Arena,
) -> Result<HostColumn> {
    const PURPOSE: &str = "gathering a column of the result";
    let rows = positions.len();
    let data = arena.allocate(rows * column.width.bytes(), PURPOSE)?;
    if let (Positions::Range(range), None) = (positions, &column.validity) {
        // The values are stored in the requested order.
        let data = copy_to_host(work, cuda(&column.data), range.start * column.width.bytes(), data, PURPOSE)?;
        return Ok(HostColumn { data, validity: None, rows });
    }
    let (values, validity) = gathered(work, column, positions)?;
    let data = copy_to_host(work, &values, 0, data, PURPOSE)?;
    let validity = match validity {
        Some((bits, nulls)) => {
            let piece = arena.allocate(rows.div_ceil(8), PURPOSE)?;
            Some((copy_to_host(work, &bits, 0, piece, PURPOSE)?, nulls))
        }
        None => None,
    };
    Ok(HostColumn { data, validity, rows })
}

/// Bytes that are copied out together at most, such as two columns of a chunk of 2^27 rows. With
/// more, the link is no busier, and a piece might not fit a 64 MiB slab of host memory. Tests have
/// little data.
const TOGETHER_BYTES: usize = if cfg!(test) { 64 << 10 } else { 48 << 20 };

/// Gathers several columns. Columns without nulls at listed positions are gathered next to each
/// other, and one copy takes them across the link. The link is idle for some 8 us between two
/// copies (tuning.md).
pub(super) fn gather_all_to_host(
    work: &Work<'_>,
    columns: &[(&Column, &Positions)],
    arena: &Arena,
) -> Result<Vec<HostColumn>> {
    let is_plain = |(column, positions): &(&Column, &Positions)| {
        column.validity.is_none() && matches!(positions, Positions::List { nullable: false, .. })
    };
    let mut gathered: Vec<Option<HostColumn>> = vec![None; columns.len()];
    let mut rest: VecDeque<usize> = (0..columns.len()).filter(|&at| is_plain(&columns[at])).collect();
    while let Some(first) = rest.pop_front() {
        let (mut together, mut bytes) = (vec![first], padded_bytes(columns[first]));
        while let Some(&next) = rest.front()
            && bytes + padded_bytes(columns[next]) <= TOGETHER_BYTES
        {
            bytes += padded_bytes(columns[next]);
            together.extend(rest.pop_front());
        }
        if together.len() > 1 {
            let of_these: Vec<_> = together.iter().map(|&at| columns[at]).collect();
            for (at, column) in together.into_iter().zip(gather_together(work, &of_these, arena)?) {
                gathered[at] = Some(column);
            }
        }
    }
    let columns = columns.iter().zip(gathered);
    let or_alone = |(&(column, positions), gathered): (&(&Column, &Positions), Option<HostColumn>)| {
        gathered.map_or_else(|| gather_to_host(work, column, positions, arena), Ok)
    };
    columns.map(or_alone).collect()
}

/// Returns the bytes of a column that is gathered with others. Each column begins at a multiple of
/// `GRANULE_BYTES`.
fn padded_bytes((column, positions): (&Column, &Positions)) -> usize {
    (positions.len() * column.width.bytes()).next_multiple_of(GRANULE_BYTES)
}

/// Gathers values at listed positions, of several columns, and copies them out at once.
fn gather_together(work: &Work<'_>, columns: &[(&Column, &Positions)], arena: &Arena) -> Result<Vec<HostColumn>> {
    const PURPOSE: &str = "gathering columns of the result";
    let bytes = columns.iter().map(|&column| padded_bytes(column)).sum();
    let host = arena.allocate(bytes, PURPOSE)?;
    let values: DeviceBuffer = Arc::new(work.buffer(bytes, PURPOSE)?);
    let mut end = 0;
    let mut places = Vec::with_capacity(columns.len());
    for &(column, positions) in columns {
        let place = end..end + padded_bytes((column, positions));
        end = place.end;
        let data = pointer_of::<u8>(&column.data, column.rows * column.width.bytes()).cast();
        // The gather writes every byte that is copied, including the padding.
        gather_cells(work, Some(data), 0, column.width, positions, 0, &CudaBuffer::part_of(&values, place.clone()))?;
        places.push(place.start..place.start + positions.len() * column.width.bytes());
    }
    let host = copy_to_host(work, cuda(&values), 0, host, PURPOSE)?;
    let column_of = |(&(_, positions), place): (&(&Column, &Positions), Range<usize>)| HostColumn {
        data: host.slice_with_length(place.start, place.len()),
        validity: None,
        rows: positions.len(),
    };
    Ok(columns.iter().zip(places).map(column_of).collect())
}

pub(super) fn compose(work: &Work<'_>, map: &Positions, positions: &Positions) -> Result<Positions> {
    // A range of a range is a range. All places of a list, in order, give the list.
    if let (Positions::Range(map), Positions::Range(positions)) = (map, positions) {
        assert!(positions.end <= map.len(), "positions {positions:?} of a map of {}", map.len());
        return Ok(Positions::Range(map.start + positions.start..map.start + positions.end));
    }
    if let Positions::Range(positions) = positions
        && *positions == (0..map.len())
    {
        return Ok(map.clone());
    }
    if let Positions::Range(map) = map
        && map.start == 0
    {
        return Ok(positions.clone());
    }
    let rows = positions.len();
    let out = work.values::<u32>(rows, "composing positions")?;
    let (data, data_start) = match map {
        Positions::Range(range) => (None, range.start as u32),
        Positions::List { data, rows, .. } => (Some(pointer_of::<u32>(data, *rows).cast()), 0),
    };
    gather_cells(work, data, data_start, Width::W4, positions, NO_ROW_BYTE, &out)?;
    Ok(Positions::List { data: Arc::new(out), rows, nullable: nullable(map) || nullable(positions) })
}

pub(super) fn concat(work: &Work<'_>, lists: &[(&Positions, Range<usize>)]) -> Result<Positions> {
    const PURPOSE: &str = "concatenating positions";
    let rows = lists.iter().map(|(_, range)| range.len()).sum();
    let all = work.values::<u32>(rows, PURPOSE)?;
    let mut start = 0;
    for lists in lists.chunks(DOVETAIL_LISTS_MAX) {
        let mut args = abi::DovetailConcat {
            lists: [abi::DovetailList { from: null(), count: 0, start: 0 }; DOVETAIL_LISTS_MAX],
            list_count: lists.len() as u32,
            to: all.as_mut_ptr(),
        };
        for (to, (positions, range)) in args.lists.iter_mut().zip(lists) {
            let Positions::List { data, rows, nullable: false } = positions else {
                unreachable!("only lists without missing rows are concatenated")
            };
            assert!(range.start <= range.end && range.end <= *rows, "entries {range:?} of {rows}");
            // SAFETY: the list has that many entries, as was just asserted.
            let from = unsafe { pointer_of::<u32>(data, *rows).add(range.start) };
            *to = abi::DovetailList { from, count: range.len() as u64, start };
            start += range.len() as u64;
        }
        work.launch(PURPOSE, abi::dovetail_concat, &args)?;
    }
    Ok(Positions::List { data: Arc::new(all), rows, nullable: false })
}
