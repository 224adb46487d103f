//! Partitioning by bits of the mixed key, in as many passes as the bits need.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::abi::{self, DOVETAIL_MOVES_MAX, DOVETAIL_PASS_BITS_MAX};
use super::buffer::{CudaBuffer, key_pointer, pointer_of};
use super::driver::Queue;
use super::gather::{move_payload, numbers};
use super::work::Work;
use crate::Result;
use crate::device::{Bounds, BoundsOnDevice, Column, Grouping, Keys, Partitions, Payload, Positions, RadixBits, Width};

/// Payload columns that one pass moves at most. The other two moves are the keys and, if it is no
/// payload column, the row number by which the remaining columns are gathered.
const PAYLOAD_MAX: usize = DOVETAIL_MOVES_MAX - 2;

pub(super) fn partition(work: &Work<'_>, keys: &Keys, payload: &[Payload], bits: RadixBits) -> Result<Partitions> {
    if payload.len() > PAYLOAD_MAX {
        // One pass cannot move that many columns. Move row numbers, and gather columns by them.
        let mut partitions = partition(work, keys, &[Payload::RowNumber], bits)?;
        let numbers = partitions.payload.pop().expect("the payload is the row numbers");
        let order = Positions::List { data: numbers.data, rows: numbers.rows, nullable: false };
        return Ok(Partitions { payload: move_payload(work, payload, &order)?, ..partitions });
    }
    let rows = keys.rows;
    let mut moving = Moving {
        keys: keys.clone(),
        columns: payload
            .iter()
            .map(|payload| match payload {
                Payload::RowNumber => None,
                Payload::Column(column) => Some(column.clone()),
            })
            .collect(),
    };
    let digits = digits(bits);
    let counted = match &digits[..] {
        [] => Vec::new(),
        [only] => count(work, keys, bits.skip, only.bits, only.bits)?,
        [first, second, ..] => count(work, keys, bits.skip, first.bits + second.bits, first.bits)?,
    };
    let mut counted = counted.into_iter();
    let mut bounds = work.values::<u32>(2, "bounds of partitions")?;
    work.write_words(&[0, rows as u32], &bounds, 0)?;
    let largest = work.values::<u32>(1, "bounds of partitions")?;
    let mut parents = 1;
    for (pass, &digit) in digits.iter().enumerate() {
        let asked = if pass + 1 == digits.len() { Some(&largest) } else { None };
        (moving, bounds) = moving.pass(work, parents, &bounds, digit, counted.next(), asked)?;
        parents <<= digit.bits;
    }
    let columns = moving.columns.into_iter().map(|column| match column {
        Some(column) => Ok(Column { validity: None, ..column }),
        // No pass has moved rows, so the row numbers are consecutive.
        None => {
            let data = Arc::new(numbers(work, rows)?);
            Ok(Column { data, width: Width::W4, rows, validity: None })
        }
    });
    let payload = columns.collect::<Result<_>>()?;
    let on_device = BoundsThere {
        bounds,
        partitions: parents,
        largest_there: largest,
        largest: if digits.is_empty() { OnceLock::from(rows) } else { OnceLock::new() },
        queue: work.queue.clone(),
    };
    let bounds = Bounds::on_device(parents, rows, Box::new(on_device));
    Ok(Partitions { keys: moving.keys, payload, bounds, bits, grouping: Grouping::Unknown })
}

/// Average number of tiles per block from which writing whole sectors pays. With fewer tiles, too
/// many rows are left to be written one by one.
fn combined_tiles_min() -> u32 {
    // Under sanitizers, which make everything slow, tests reach this path with few rows.
    if cfg!(test) && std::env::var_os("DOVETAIL_TEST_ROWS_MAX").is_some() { 0 } else { 8 }
}

/// Divides the bits among passes, as evenly as possible: 9 bits are 5 and 4. Each additional bit
/// shortens the runs that a tile writes.
fn digits(bits: RadixBits) -> Vec<RadixBits> {
    let passes = bits.bits.div_ceil(DOVETAIL_PASS_BITS_MAX);
    let mut skip = bits.skip;
    let digit = |pass: u32| {
        let of_pass = (bits.skip + bits.bits - skip).div_ceil(passes - pass);
        skip += of_pass;
        RadixBits { skip: skip - of_pass, bits: of_pass }
    };
    (0..passes).map(digit).collect()
}

/// Computes the bounds after a first pass and, if `bits` exceeds `coarse_bits`, after the second.
/// Returns fewer bounds, or none, if the GPU cannot count that many partitions at once. Passes
/// without bounds count for themselves.
fn count(work: &Work<'_>, keys: &Keys, skip: u32, bits: u32, coarse_bits: u32) -> Result<Vec<CudaBuffer>> {
    const PURPOSE: &str = "counting partitions";
    // SAFETY: the call only computes a size from numbers and properties of the current GPU.
    let scratch_bytes = unsafe { abi::dovetail_count_partitions_scratch_bytes(keys.rows as u64, bits) };
    if scratch_bytes == 0 {
        return if bits > coarse_bits { count(work, keys, skip, coarse_bits, coarse_bits) } else { Ok(Vec::new()) };
    }
    let scratch = work.scratch(scratch_bytes, PURPOSE)?;
    let [fine, coarse] = [bits, coarse_bits].map(|bits| work.values::<u32>((1 << bits) + 1, "bounds of partitions"));
    let (fine, coarse) = (fine?, coarse?);
    let args = abi::DovetailCountPartitions {
        keys: key_pointer(keys),
        rows: keys.rows as u64,
        key_bytes: keys.width.bytes() as u32,
        skip,
        bits,
        coarse_bits,
        scratch: scratch.as_mut_ptr(),
        scratch_bytes,
        bounds: fine.as_mut_ptr(),
        coarse_bounds: coarse.as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_count_partitions, &args)?;
    Ok(if bits == coarse_bits { vec![fine] } else { vec![coarse, fine] })
}

/// Bounds as stored on a GPU: 32-bit positions.
#[derive(Debug)]
pub(super) struct BoundsThere {
    bounds: CudaBuffer,
    pub(super) partitions: usize,
    largest_there: CudaBuffer,
    largest: OnceLock<usize>,
    /// Stream on which the bounds were made, so that reading them waits for no other stream.
    queue: Arc<Queue>,
}

impl BoundsThere {
    /// Returns the bounds from `partition` on.
    pub(super) fn from(&self, partition: usize) -> *const u32 {
        assert!(partition <= self.partitions, "partition {partition} of {}", self.partitions);
        // SAFETY: there is one more bound than partitions.
        unsafe { self.bounds.as_ptr::<u32>().add(partition) }
    }

    /// Returns the number of rows of the largest partition. Waits at the first call.
    pub(super) fn largest(&self) -> Result<usize> {
        if let Some(&largest) = self.largest.get() {
            return Ok(largest);
        }
        let read = self.queue.read_small(self.largest_there.pointer(), size_of::<u32>(), "bounds of partitions")?;
        let largest: u32 = bytemuck::pod_read_unaligned(&read);
        Ok(*self.largest.get_or_init(|| largest as usize))
    }
}

impl BoundsOnDevice for BoundsThere {
    fn read(&self) -> Result<Vec<usize>> {
        let bounds: Vec<u32> =
            self.queue.download(self.bounds.pointer(), self.partitions + 1, "bounds of partitions")?;
        Ok(bounds.into_iter().map(|bound| bound as usize).collect())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Returns the bounds of partitions that a GPU made.
pub(super) fn bounds_of(partitions: &Partitions) -> &BoundsThere {
    let there = partitions.bounds.there().and_then(|bounds| bounds.as_any().downcast_ref());
    there.expect("partitions that a GPU gets are GPU partitions")
}

/// True if a partition of `range` has more than `rows` rows. Waits.
pub(super) fn any_above(rows: usize, partitions: &Partitions, range: Range<usize>) -> Result<bool> {
    if bounds_of(partitions).largest()? <= rows {
        return Ok(false);
    }
    let bounds = &partitions.bounds.get()?[range.start..=range.end];
    Ok(bounds.windows(2).any(|bounds| bounds[1] - bounds[0] > rows))
}

/// Columns that are moved from pass to pass. A `None` column is the row number, which the first
/// pass writes.
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
        counted: Option<CudaBuffer>,
        largest: Option<&CudaBuffer>,
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
            is_counted: u32::from(counted.is_some()),
            combined_tiles_min: combined_tiles_min(),
            moves: [NO_MOVE; DOVETAIL_MOVES_MAX],
            move_count: 0,
            scratch: std::ptr::null_mut(),
            scratch_bytes: 0,
            bounds: std::ptr::null_mut(),
            largest: largest.map_or(std::ptr::null_mut(), CudaBuffer::as_mut_ptr),
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
        // SAFETY: the call only computes a size from numbers.
        args.scratch_bytes = unsafe { abi::dovetail_partition_scratch_bytes(args.parents, args.bits) };
        let scratch = work.scratch(args.scratch_bytes, PURPOSE)?;
        let bounds = match counted {
            Some(bounds) => bounds,
            None => work.values::<u32>((parents << bits.bits) + 1, "bounds of partitions")?,
        };
        args.scratch = scratch.as_mut_ptr();
        args.bounds = bounds.as_mut_ptr();
        work.launch(PURPOSE, abi::dovetail_partition, &args)?;
        let keys = Keys { data: Arc::new(keys), ..self.keys.clone() };
        Ok((Self { keys, columns }, bounds))
    }
}

const NO_MOVE: abi::DovetailMove = abi::DovetailMove { from: std::ptr::null(), to: std::ptr::null_mut(), width: 0 };
