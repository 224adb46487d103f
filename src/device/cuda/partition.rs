//! Partitioning by bits of the mixed key, in as many passes as the bits need, and making equal keys adjacent.

use std::sync::Arc;

use super::abi::{self, DOVETAIL_MOVES_MAX, DOVETAIL_PASS_BITS_MAX};
use super::buffer::{CudaBuffer, pointer_of};
use super::keys::{Image, carried, key_pointer, rearranged, sorted_order};
use super::matching::find_runs;
use super::work::Work;
use crate::Result;
use crate::device::{Carry, Column, Grouping, Keys, Partitions, Positions, RadixBits, Runs, Width};

/// Moves that one pass makes beside the keys and, if it is not carried anyway, the row number that the rest is gathered by.
const CARRIED_MAX: usize = DOVETAIL_MOVES_MAX - 2;

pub(super) fn partition(work: &Work<'_>, keys: &Keys, carry: &[Carry], bits: RadixBits) -> Result<Partitions> {
    if carry.len() > CARRIED_MAX {
        // More columns than a pass moves: row numbers go along, and columns are gathered by them.
        let mut partitions = partition(work, keys, &[Carry::RowNumber], bits)?;
        let numbers = partitions.carried.pop().expect("row numbers were carried");
        let order = Positions::List { data: numbers.data, rows: numbers.rows, may_miss: false };
        return Ok(Partitions { carried: carried(work, carry, &order)?, ..partitions });
    }
    let rows = keys.rows;
    let mut moving = Moving {
        keys: keys.clone(),
        columns: carry
            .iter()
            .map(|carry| match carry {
                Carry::RowNumber => None,
                Carry::Column(column) => Some(column.clone()),
            })
            .collect(),
    };
    let mut bounds = work.upload(&[0, rows as u32], "bounds of partitions")?;
    let mut parents = 1;
    let passes = bits.bits.div_ceil(DOVETAIL_PASS_BITS_MAX).max(1);
    let mut skip = bits.skip;
    for pass in 0..passes {
        // As even as possible: 9 bits are 5 and 4, because the runs that a tile writes get shorter with each bit.
        let of_pass = (bits.skip + bits.bits - skip).div_ceil(passes - pass);
        if of_pass > 0 {
            (moving, bounds) = moving.pass(work, parents, &bounds, RadixBits { skip, bits: of_pass })?;
            parents <<= of_pass;
            skip += of_pass;
        }
    }
    let columns = moving.columns.into_iter().map(|column| match column {
        Some(column) => Ok(Column { validity: None, ..column }),
        // Nothing was moved: the row numbers are what they were.
        None => {
            let data = Arc::new(super::keys::numbers(work, rows)?);
            Ok(Column { data, width: Width::W4, rows, validity: None })
        }
    });
    let carried = columns.collect::<Result<_>>()?;
    let bounds: Vec<u32> = work.download(&bounds, parents + 1, "bounds of partitions")?;
    let bounds = bounds.into_iter().map(|bound| bound as usize).collect();
    Ok(Partitions { keys: moving.keys, carried, bounds, bits, grouping: Grouping::Unknown })
}

/// What goes from pass to pass. A column that is not there yet is the row number.
struct Moving {
    keys: Keys,
    columns: Vec<Option<Column>>,
}

impl Moving {
    fn pass(
        &self,
        work: &Work<'_>,
        parents: usize,
        parent_bounds: &CudaBuffer,
        bits: RadixBits,
    ) -> Result<(Self, CudaBuffer)> {
        const PURPOSE: &str = "partitioning";
        let rows = self.keys.rows;
        let mut args = abi::DovetailPartition {
            keys: key_pointer(&self.keys),
            parent_bounds: parent_bounds.as_ptr(),
            rows: rows as u64,
            key_bytes: self.keys.width.bytes() as u32,
            parents: parents as u32,
            skip: bits.skip,
            bits: bits.bits,
            moves: [NO_MOVE; DOVETAIL_MOVES_MAX],
            move_count: 0,
            scratch: std::ptr::null_mut(),
            scratch_bytes: 0,
            bounds: std::ptr::null_mut(),
        };
        let mut add = |from: Option<&Column>| -> Result<CudaBuffer> {
            let width = from.map_or(Width::W4, |column| column.width);
            let to = work.buffer(rows * width.bytes(), PURPOSE)?;
            let from = match from {
                Some(column) => pointer_of::<u8>(&column.data, rows * width.bytes()).cast(),
                None => std::ptr::null(),
            };
            args.moves[args.move_count as usize] =
                abi::DovetailMove { from, to: to.as_mut_ptr(), width: width.bytes() as u32 };
            args.move_count += 1;
            Ok(to)
        };
        let keys = add(Some(&self.keys.as_column()))?;
        let columns = self.columns.iter().map(|column| {
            let width = column.as_ref().map_or(Width::W4, |column| column.width);
            let data = Arc::new(add(column.as_ref())?);
            Ok(Some(Column { data, width, rows, validity: None }))
        });
        let columns = columns.collect::<Result<_>>()?;
        // SAFETY: it computes a size from numbers.
        args.scratch_bytes = unsafe { abi::dovetail_partition_scratch_bytes(args.parents, args.bits) };
        let scratch = work.scratch(args.scratch_bytes, PURPOSE)?;
        let bounds = work.values::<u32>((parents << bits.bits) + 1, "bounds of partitions")?;
        args.scratch = scratch.as_mut_ptr();
        args.bounds = bounds.as_mut_ptr();
        work.launch(PURPOSE, abi::dovetail_partition, &args)?;
        let keys = Keys { data: Arc::new(keys), ..self.keys.clone() };
        Ok((Self { keys, columns }, bounds))
    }
}

const NO_MOVE: abi::DovetailMove = abi::DovetailMove { from: std::ptr::null(), to: std::ptr::null_mut(), width: 0 };

/// Sorts by the mixed key: partitions are ranges of it, so that they stay as they are, and equal keys become adjacent. Runs of
/// them are found here, once, and not for each chunk that is matched.
pub(super) fn group(work: &Work<'_>, partitions: &Partitions) -> Result<Partitions> {
    if partitions.is_grouped() {
        return Ok(partitions.clone());
    }
    let Partitions { keys, carried: columns, bounds, bits, .. } = partitions;
    let (order, _) = sorted_order(work, keys, Image::Mixed { skip: bits.skip })?;
    let keys = rearranged(work, keys, &order)?;
    let carry: Vec<Carry> = columns.iter().cloned().map(Carry::Column).collect();
    let carried = carried(work, &carry, &order)?;
    let runs = runs_of(work, &keys, bounds)?;
    Ok(Partitions {
        keys,
        carried,
        bounds: bounds.clone(),
        bits: *bits,
        grouping: Grouping::Adjacent { runs: Some(runs) },
    })
}

/// The runs of keys that are adjacent within their partitions. Waits.
fn runs_of(work: &Work<'_>, keys: &Keys, bounds: &[usize]) -> Result<Runs> {
    const PURPOSE: &str = "finding the runs of partitions";
    let (heads, count) = find_runs(work, keys)?;
    let bounds: Vec<u32> = bounds.iter().map(|&bound| bound as u32).collect();
    let on_device = work.upload(&bounds, PURPOSE)?;
    let before = work.values::<u32>(bounds.len(), PURPOSE)?;
    let args = abi::DovetailLowerBounds {
        positions: heads.as_ptr(),
        position_count: count as u64,
        bounds: on_device.as_ptr(),
        bound_count: bounds.len() as u64,
        indices: before.as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_lower_bounds, &args)?;
    Ok(Runs { heads: Arc::new(heads), count, before: Arc::new(before) })
}
