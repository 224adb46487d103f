//! Partitions joined in one go.

use std::ops::Range;
use std::ptr::null;
use std::sync::Arc;

use super::abi::{self, DOVETAIL_JOIN_ROWS, DOVETAIL_MOVES_MAX, DovetailJoinColumn};
use super::buffer::{CudaBuffer, pointer_of};
use super::keys::{carried, key_pointer};
use super::matching::units;
use super::work::Work;
use crate::Result;
use crate::device::{Carry, Column, JoinedPartitions, JoinedRows, Keys, Partitions, Positions, Wanted, Width};

/// Rounds that the largest partition may take. Each looks all probe rows of the partition up again, and one whose build rows have a
/// single key enters them one after the other.
const ROUNDS_MAX: usize = 16;

const PURPOSE: &str = "joining partitions";

pub(super) fn join(
    work: &Work<'_>,
    build: &Partitions,
    probe: &Partitions,
    partitions: Range<usize>,
    wanted: Wanted,
) -> Result<Option<JoinedPartitions>> {
    let build_bounds = &build.bounds[partitions.start..=partitions.end];
    let is_oversized = |bounds: &[usize]| bounds[1] - bounds[0] > ROUNDS_MAX * DOVETAIL_JOIN_ROWS as usize;
    if build_bounds.windows(2).any(is_oversized) {
        return Ok(None);
    }
    let (room, with_keys) = match wanted {
        Wanted::Count => (0, false),
        Wanted::Rows { room, keys } => (room, keys),
    };
    let mut writing = Writing { work, room, columns: Vec::new(), written: Vec::new() };
    let wants_rows = wanted != Wanted::Count;
    let width = |keys: &Keys| Width::from_bytes(keys.width.bytes()).expect("every key width is a column width");
    if wants_rows && build.carried.len() + probe.carried.len() < DOVETAIL_MOVES_MAX {
        if with_keys {
            writing.add(Some(&probe.keys.as_column()), width(&probe.keys), true)?;
        }
        for (columns, of_probe) in [(&build.carried, false), (&probe.carried, true)] {
            columns.iter().try_for_each(|column| writing.add(Some(column), column.width, of_probe))?;
        }
        let (pairs, columns) = writing.run(build, probe, &partitions)?;
        return Ok(Some(JoinedPartitions {
            pairs,
            rows: columns.map(|columns| rows_of(columns, build, probe, with_keys)),
        }));
    }
    if wants_rows {
        // More columns than a kernel writes: positions are written, and columns gathered by them.
        writing.add(None, Width::W4, false)?;
        writing.add(None, Width::W4, true)?;
    }
    let (pairs, columns) = writing.run(build, probe, &partitions)?;
    let Some(positions) = columns.filter(|_| wants_rows) else {
        return Ok(Some(JoinedPartitions { pairs, rows: None }));
    };
    let list = |column: &Column| Positions::List { data: column.data.clone(), rows: column.rows, may_miss: false };
    let gathered = |columns: &[Column], at: usize| {
        let carry: Vec<Carry> = columns.iter().cloned().map(Carry::Column).collect();
        carried(work, &carry, &list(&positions[at]))
    };
    let keys = match with_keys {
        true => gathered(&[probe.keys.as_column()], 1)?.pop().map(|column| keys_of(column, &probe.keys)),
        false => None,
    };
    let rows = JoinedRows { keys, build: gathered(&build.carried, 0)?, probe: gathered(&probe.carried, 1)? };
    Ok(Some(JoinedPartitions { pairs, rows: Some(rows) }))
}

fn rows_of(columns: Vec<Column>, build: &Partitions, probe: &Partitions, with_keys: bool) -> JoinedRows {
    let mut columns = columns.into_iter();
    let keys = if with_keys { columns.next().map(|column| keys_of(column, &probe.keys)) } else { None };
    JoinedRows { keys, build: columns.by_ref().take(build.carried.len()).collect(), probe: columns.collect() }
}

fn keys_of(column: Column, like: &Keys) -> Keys {
    Keys { data: column.data, width: like.width, rows: column.rows }
}

/// The columns that a call is to write.
struct Writing<'a> {
    work: &'a Work<'a>,
    room: usize,
    columns: Vec<DovetailJoinColumn>,
    written: Vec<(CudaBuffer, Width)>,
}

impl Writing<'_> {
    /// Takes memory for a column; with nothing to read it from, for the positions of rows.
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

    /// How many pairs there are, and the columns if there was room for all of them. Waits.
    fn run(
        self,
        build: &Partitions,
        probe: &Partitions,
        partitions: &Range<usize>,
    ) -> Result<(u64, Option<Vec<Column>>)> {
        let Self { work, room, columns, written } = self;
        let bounds: Vec<u32> =
            build.bounds[partitions.start..=partitions.end].iter().map(|&bound| bound as u32).collect();
        let mut units = units(&probe.bounds[partitions.start..=partitions.end]);
        units.retain(|unit| bounds[unit.partition as usize] < bounds[unit.partition as usize + 1]);
        let mut pairs = 0;
        if !units.is_empty() {
            let bounds = work.upload(&bounds, PURPOSE)?;
            let units_on_device = work.upload(&units, PURPOSE)?;
            let counted = work.filled(size_of::<u64>(), 0, PURPOSE)?;
            let mut args = abi::DovetailJoinPartitions {
                build_keys: key_pointer(&build.keys),
                build_bounds: bounds.as_ptr(),
                probe_keys: key_pointer(&probe.keys),
                units: units_on_device.as_ptr(),
                unit_count: units.len() as u32,
                key_bytes: build.keys.width.bytes() as u32,
                columns: [NO_COLUMN; DOVETAIL_MOVES_MAX],
                column_count: columns.len() as u32,
                room: room as u64,
                pairs: counted.as_mut_ptr(),
            };
            args.columns[..columns.len()].copy_from_slice(&columns);
            work.launch(PURPOSE, abi::dovetail_join_partitions, &args)?;
            pairs = work.read(&counted, PURPOSE)?;
        }
        let columns = (pairs <= room as u64).then(|| {
            let column = |(data, width)| Column { data: Arc::new(data), width, rows: pairs as usize, validity: None };
            written.into_iter().map(column).collect()
        });
        Ok((pairs, columns))
    }
}

const NO_COLUMN: DovetailJoinColumn =
    DovetailJoinColumn { from: null(), to: std::ptr::null_mut(), width: 0, of_probe: 0 };
