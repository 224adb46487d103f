//! Joins of partitions in one call: build, probe and output.

use std::ops::Range;
use std::ptr::null;
use std::sync::Arc;

use super::abi::{
    self, DOVETAIL_JOIN_ROWS, DOVETAIL_MOVES_MAX, DovetailJoinColumn, DovetailJoinTotals, DovetailMatchUnit,
};
use super::buffer::{CudaBuffer, key_pointer, pointer_of};
use super::gather::move_payload;
use super::match_partitions::{UnitRows, units};
use super::partition::{any_above, bounds_of};
use super::work::Work;
use crate::Result;
use crate::device::{
    Column, JoinedPartitions, JoinedRows, KeyWidth, Keys, Partitions, Payload, Positions, Wanted, Width,
};

/// Rounds that the largest partition may take at most: each round looks up all probe rows of the
/// partition again.
const ROUNDS_MAX: usize = 16;

const PURPOSE: &str = "joining partitions";

/// Implements [`Device::join_partitions`](crate::device::Device::join_partitions).
pub(super) fn join(
    work: &Work<'_>,
    build: &Partitions,
    probe: &Partitions,
    partitions: Range<usize>,
    wanted: Wanted,
) -> Result<Option<JoinedPartitions>> {
    if any_above(ROUNDS_MAX * DOVETAIL_JOIN_ROWS as usize, build, partitions.clone())? {
        return Ok(None);
    }
    let run = |writing: &Writing<'_>| launch(work, build, probe, partitions.clone(), writing);
    let Wanted::Rows { room, keys: with_keys } = wanted else {
        let pairs = run(&Writing::nothing(work, 0))?;
        return Ok(pairs.map(|pairs| JoinedPartitions { pairs, rows: None }));
    };

    let keys = with_keys.then(|| probe.keys.as_column());
    let mut writing = Writing { has_keys: with_keys, ..Writing::nothing(work, room) };
    let by_position = build.payload.len() + probe.payload.len() >= DOVETAIL_MOVES_MAX;
    if by_position {
        // A kernel cannot write that many columns: write positions, and gather columns by them.
        writing.add(None, Width::W4, false)?;
        writing.add(None, Width::W4, true)?;
    } else {
        keys.iter().try_for_each(|keys| writing.add(Some(keys), keys.width, true))?;
        for (columns, of_probe) in [(&build.payload, false), (&probe.payload, true)] {
            columns.iter().try_for_each(|column| writing.add(Some(column), column.width, of_probe))?;
        }
    }
    let Some(pairs) = run(&writing)? else { return Ok(None) };
    if pairs > room as u64 {
        return Ok(Some(JoinedPartitions { pairs, rows: None }));
    }
    let mut written = writing.into_columns(pairs as usize).into_iter();
    let rows = if by_position {
        let mut positions =
            written.map(|column| Positions::List { data: column.data, rows: column.rows, nullable: false });
        let [of_build, of_probe] = [positions.next(), positions.next()].map(|list| list.expect("both are written"));
        let gathered = |columns: &[Column], positions: &Positions| {
            let payload: Vec<Payload> = columns.iter().cloned().map(Payload::Column).collect();
            move_payload(work, &payload, positions)
        };
        let keys = keys.map(|keys| gathered(&[keys], &of_probe)).transpose()?.and_then(|mut column| column.pop());
        JoinedRows {
            keys: keys.map(|column| keys_of(column, &probe.keys)),
            build: gathered(&build.payload, &of_build)?,
            probe: gathered(&probe.payload, &of_probe)?,
        }
    } else {
        JoinedRows {
            keys: if with_keys { written.next().map(|column| keys_of(column, &probe.keys)) } else { None },
            build: written.by_ref().take(build.payload.len()).collect(),
            probe: written.collect(),
        }
    };
    Ok(Some(JoinedPartitions { pairs, rows: Some(rows) }))
}

fn keys_of(column: Column, like: &Keys) -> Keys {
    Keys { data: column.data, width: like.width, rows: column.rows }
}

/// Columns that a call is to write.
struct Writing<'a> {
    work: &'a Work<'a>,
    /// Rows that fit in each column.
    room: usize,
    /// True if the first column holds the keys.
    has_keys: bool,
    columns: Vec<DovetailJoinColumn>,
    written: Vec<(CudaBuffer, Width)>,
}

impl<'a> Writing<'a> {
    fn nothing(work: &'a Work<'a>, room: usize) -> Self {
        Self { work, room, has_keys: false, columns: Vec::new(), written: Vec::new() }
    }

    /// Allocates memory for a column. If `from` is `None`, the column receives the positions of
    /// rows.
    fn add(&mut self, from: Option<&Column>, width: Width, of_probe: bool) -> Result<()> {
        let to = self.work.buffer(self.room.saturating_mul(width.bytes()), PURPOSE)?;
        self.columns.push(DovetailJoinColumn {
            from: from.map_or(null(), |column| pointer_of::<u8>(&column.data, column.rows * width.bytes()).cast()),
            to: to.as_mut_ptr(),
            width: width.bytes() as u32,
            of_probe: u32::from(of_probe),
        });
        self.written.push((to, width));
        Ok(())
    }

    /// True if the kernel that keeps payload in registers can write the columns. Payload columns
    /// must have one width, 4 or 8 bytes, and at most 8 bytes per side. Keys must be smaller than
    /// 16 bytes, and without payload, keys must be written.
    fn is_direct(&self, keys: KeyWidth) -> bool {
        let payload = &self.columns[usize::from(self.has_keys)..];
        let Some(width) = payload.first().map(|column| column.width) else {
            return self.has_keys && keys != KeyWidth::W16;
        };
        let of_probe = payload.iter().filter(|column| column.of_probe != 0).count();
        matches!(width, 4 | 8)
            && keys != KeyWidth::W16
            && payload.iter().all(|column| column.width == width && !column.from.is_null())
            && of_probe.max(payload.len() - of_probe) * width as usize <= 8
    }

    /// Returns the first `rows` rows of the written columns.
    fn into_columns(self, rows: usize) -> Vec<Column> {
        let column = |(data, width)| Column { data: Arc::new(data), width, rows, validity: None };
        self.written.into_iter().map(column).collect()
    }
}

/// Joins the partitions and returns the number of pairs, or `None` if the kernel gave up. Waits.
fn launch(
    work: &Work<'_>,
    build: &Partitions,
    probe: &Partitions,
    partitions: Range<usize>,
    writing: &Writing<'_>,
) -> Result<Option<u64>> {
    if partitions.is_empty() || build.bounds.rows() == 0 || probe.bounds.rows() == 0 {
        return Ok(Some(0));
    }
    // If a partition is skewed, blocks share it, and a list of units assigns their work.
    let unit_rows = UnitRows::of(build, probe);
    let units = match unit_rows.divides(bounds_of(probe).largest()?) {
        true => Some(units(work, probe, &partitions, &unit_rows, PURPOSE)?),
        false => None,
    };
    let unit_count = units.as_ref().map_or(partitions.len(), |(_, count)| *count);
    let is_direct = writing.is_direct(build.keys.width);
    let left_over = work.values::<DovetailMatchUnit>(if is_direct { unit_count } else { 0 }, PURPOSE)?;
    let totals = work.filled(size_of::<DovetailJoinTotals>(), 0, PURPOSE)?;
    let mut args = abi::DovetailJoinPartitions {
        build_keys: key_pointer(&build.keys),
        build_bounds: bounds_of(build).from(partitions.start),
        probe_keys: key_pointer(&probe.keys),
        probe_bounds: if units.is_some() { null() } else { bounds_of(probe).from(partitions.start) },
        units: units.as_ref().map_or(null(), |(units, _)| units.as_ptr()),
        unit_count: unit_count as u32,
        key_bytes: build.keys.width.bytes() as u32,
        columns: [NO_COLUMN; DOVETAIL_MOVES_MAX],
        column_count: writing.columns.len() as u32,
        room: writing.room as u64,
        is_direct: u32::from(is_direct),
        left_over: left_over.as_mut_ptr(),
        totals: totals.as_mut_ptr(),
    };
    args.columns[..writing.columns.len()].copy_from_slice(&writing.columns);
    work.launch(PURPOSE, abi::dovetail_join_partitions, &args)?;
    let mut found: DovetailJoinTotals = work.read(&totals, PURPOSE)?;
    if found.left_over > 0 {
        // The general kernel does the units that the simple kernel has left over.
        (args.units, args.unit_count, args.is_direct) = (left_over.as_ptr(), found.left_over as u32, 0);
        work.launch(PURPOSE, abi::dovetail_join_partitions, &args)?;
        found = work.read(&totals, PURPOSE)?;
    }
    Ok((found.long_chains == 0).then_some(found.pairs))
}

const NO_COLUMN: DovetailJoinColumn =
    DovetailJoinColumn { from: null(), to: std::ptr::null_mut(), width: 0, of_probe: 0 };
