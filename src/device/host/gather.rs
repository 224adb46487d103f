//! Gathers rows of a column by position.

use std::ops::Range;

use arrow::util::bit_mask;
use bytemuck::Pod;
use rayon::prelude::*;

use super::buffer::{bytes_of, values_of};
use super::hash::with_cell;
use super::{MORSEL_ROWS, Run};
use crate::Result;
use crate::device::{Column, HostColumn, NO_ROW, Positions, ROWS_MAX};
use crate::memory::Arena;

const MORSEL_BITMAP_BYTES: usize = MORSEL_ROWS / 8;

pub(super) fn gather(run: &Run<'_>, column: &Column, positions: &Positions) -> Result<Column> {
    let rows = positions.len();
    if matches!(positions, Positions::Range(range) if *range == (0..column.rows)) {
        return Ok(column.clone());
    }
    let mut data = run.values::<u8>(rows * column.width.bytes(), "gathering a column")?;
    gather_values(run, column, positions, &mut data)?;
    let mut validity = None;
    if needs_validity(column, positions) {
        let mut bitmap = run.values::<u8>(rows.div_ceil(8), "gathering validity")?;
        let nulls = gather_validity(run, column, positions, &mut bitmap)?;
        validity = (nulls > 0).then(|| bitmap.freeze());
    }
    Ok(Column { data: data.freeze(), width: column.width, rows, validity })
}

pub(super) fn gather_to_host(
    run: &Run<'_>,
    column: &Column,
    positions: &Positions,
    arena: &Arena,
) -> Result<HostColumn> {
    let rows = positions.len();
    let mut data = arena.allocate(rows * column.width.bytes(), "a column of the result")?;
    gather_values(run, column, positions, &mut data)?;
    let mut validity = None;
    if needs_validity(column, positions) {
        let mut bitmap = arena.allocate(rows.div_ceil(8), "a validity bitmap of the result")?;
        let nulls = gather_validity(run, column, positions, &mut bitmap)?;
        validity = (nulls > 0).then(|| (bitmap.freeze(), nulls));
    }
    Ok(HostColumn { data: data.freeze(), validity, rows })
}

fn needs_validity(column: &Column, positions: &Positions) -> bool {
    column.validity.is_some() || matches!(positions, Positions::List { nullable: true, .. })
}

/// Writes the values at `positions`, and zeros for [`NO_ROW`].
fn gather_values(run: &Run<'_>, column: &Column, positions: &Positions, out: &mut [u8]) -> Result<()> {
    with_cell!(column.width, T => {
        // Byte arrays and not integers, because a column may be a slice of another owner's buffer,
        // without alignment.
        let values = values_of::<T>(&column.data, column.rows);
        let out = bytemuck::cast_slice_mut::<u8, T>(out);
        match positions {
            Positions::Range(range) => run.copy(&values[range.clone()], out),
            Positions::List { data, rows, nullable } => {
                let positions = values_of::<u32>(data, *rows);
                run.fill(out, |start, out| pick(values, &positions[start..start + out.len()], *nullable, out))
            }
        }
    })
}

fn pick<T: Pod>(values: &[T], positions: &[u32], nullable: bool, out: &mut [T]) {
    if !nullable {
        out.iter_mut().zip(positions).for_each(|(out, &at)| *out = values[at as usize]);
        return;
    }
    // No column has a row number `NO_ROW`, so that one comparison finds both misses and mistakes.
    assert!(values.len() <= ROWS_MAX);
    for (out, &at) in out.iter_mut().zip(positions) {
        debug_assert!(at == NO_ROW || (at as usize) < values.len(), "position {at} of {} rows", values.len());
        *out = values.get(at as usize).copied().unwrap_or_else(T::zeroed);
    }
}

/// Writes the validity of the rows at `positions` and returns the number of nulls.
fn gather_validity(run: &Run<'_>, column: &Column, positions: &Positions, bitmap: &mut [u8]) -> Result<usize> {
    let rows = positions.len();
    let validity = column.validity.as_ref().map(bytes_of);
    let valid = |at: u32| at != NO_ROW && validity.is_none_or(|bits| bits[at as usize / 8] >> (at % 8) & 1 == 1);
    bitmap
        .par_chunks_mut(MORSEL_BITMAP_BYTES)
        .enumerate()
        .map(|(morsel, bitmap)| {
            run.cancel.check()?;
            let range = morsel * MORSEL_ROWS..rows.min((morsel + 1) * MORSEL_ROWS);
            Ok(match positions {
                Positions::Range(whole) => copy_bits(validity, whole.start + range.start, range.len(), bitmap),
                Positions::List { data, rows, .. } => pick_bits(&values_of::<u32>(data, *rows)[range], valid, bitmap),
            })
        })
        .try_reduce(|| 0, |a, b| Ok::<_, crate::Error>(a + b))
}

/// Copies `len` bits from bit `start` and returns the number of zeros.
fn copy_bits(validity: Option<&[u8]>, start: usize, len: usize, bitmap: &mut [u8]) -> usize {
    let validity = validity.expect("a range has no missing row, so the validity is of the column");
    bitmap.fill(0);
    bit_mask::set_bits(bitmap, validity, 0, start, len)
}

fn pick_bits(positions: &[u32], valid: impl Fn(u32) -> bool, bitmap: &mut [u8]) -> usize {
    let mut ones = 0;
    for (byte, positions) in bitmap.iter_mut().zip(positions.chunks(8)) {
        *byte = positions.iter().rev().fold(0, |byte, &at| byte << 1 | u8::from(valid(at)));
        ones += byte.count_ones() as usize;
    }
    positions.len() - ones
}

pub(super) fn concat(run: &Run<'_>, lists: &[(&Positions, Range<usize>)]) -> Result<Positions> {
    let rows = lists.iter().map(|(_, range)| range.len()).sum();
    let mut all = run.values::<u32>(rows, "concatenating positions")?;
    let mut rest = &mut all[..];
    for (positions, range) in lists {
        let Positions::List { data, rows, nullable: false } = positions else {
            unreachable!("only lists without missing rows are concatenated")
        };
        let (next, after) = rest.split_at_mut(range.len());
        run.copy(&values_of::<u32>(data, *rows)[range.clone()], next)?;
        rest = after;
    }
    Ok(Positions::List { data: all.freeze(), rows, nullable: false })
}

pub(super) fn compose(run: &Run<'_>, map: &Positions, positions: &Positions) -> Result<Positions> {
    match (map, positions) {
        (Positions::Range(map), Positions::Range(range)) => {
            assert!(range.end <= map.len() || range.is_empty(), "positions {range:?} of {} rows", map.len());
            Ok(Positions::Range(map.start + range.start..map.start + range.end))
        }
        (Positions::Range(map), Positions::List { .. }) if map.start == 0 => Ok(positions.clone()),
        (Positions::Range(map), Positions::List { data, rows, nullable }) => {
            let positions = values_of::<u32>(data, *rows);
            let mut composed = run.values::<u32>(*rows, "composing positions")?;
            run.fill(&mut composed, |start, out| {
                for (out, &at) in out.iter_mut().zip(&positions[start..]) {
                    *out = if at == NO_ROW { NO_ROW } else { map.start as u32 + at };
                }
            })?;
            Ok(Positions::List { data: composed.freeze(), rows: *rows, nullable: *nullable })
        }
        (Positions::List { rows, .. }, Positions::Range(range)) if *range == (Range { start: 0, end: *rows }) => {
            Ok(map.clone())
        }
        (Positions::List { data, rows, nullable }, Positions::Range(range)) => {
            let map = &values_of::<u32>(data, *rows)[range.clone()];
            let mut composed = run.values::<u32>(range.len(), "composing positions")?;
            run.copy(map, &mut composed)?;
            Ok(Positions::List { data: composed.freeze(), rows: range.len(), nullable: *nullable })
        }
        (
            Positions::List { data: map, rows: map_rows, nullable: map_is_nullable },
            Positions::List { data, rows, nullable },
        ) => {
            let (map, positions) = (values_of::<u32>(map, *map_rows), values_of::<u32>(data, *rows));
            let mut composed = run.values::<u32>(*rows, "composing positions")?;
            run.fill(&mut composed, |start, out| {
                let positions = &positions[start..start + out.len()];
                if !nullable {
                    return pick(map, positions, false, out);
                }
                for (out, &at) in out.iter_mut().zip(positions) {
                    *out = if at == NO_ROW { NO_ROW } else { map[at as usize] };
                }
            })?;
            Ok(Positions::List { data: composed.freeze(), rows: *rows, nullable: *map_is_nullable || *nullable })
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::buffer::{BooleanBuffer, Buffer};
    use rand::Rng;

    use super::*;
    use crate::device::host::testing::{Bench, SIZES, THREADS, buffer_of, cell, numbers, random};
    use crate::device::{BitSlice, Device};

    /// Returns the values gathered from a column of [`Bench::columns_of_every_width`]. `None`: a
    /// null.
    fn expected(column: &Column, valid: &[bool], positions: &[u32]) -> Vec<Option<Vec<u8>>> {
        let value = |&at: &u32| (at != NO_ROW && valid[at as usize]).then(|| cell(at as usize, column.width));
        positions.iter().map(value).collect()
    }

    fn found(data: &[u8], validity: Option<&[u8]>, width: usize) -> Vec<Option<Vec<u8>>> {
        let valid = |row: usize| validity.is_none_or(|bits| bits[row / 8] >> (row % 8) & 1 == 1);
        data.chunks(width).enumerate().map(|(row, value)| valid(row).then(|| value.to_vec())).collect()
    }

    #[test]
    fn rows_are_gathered_with_their_validity_to_the_device_and_to_the_host() {
        let mut random = random(91);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                for mut column in bench.columns_of_every_width(rows) {
                    let mut valid = vec![true; rows];
                    if random.random() {
                        valid = (0..rows).map(|_| random.random_bool(0.7)).collect();
                        let buffer = BooleanBuffer::from(valid.clone()).into_inner();
                        let bits = BitSlice::Bits { buffer, offset: 0, len: rows };
                        column.validity = Some(bench.device.copy_in_bits(&[bits], &bench.stream).unwrap());
                    }
                    let some: Vec<u32> =
                        (0..rows + 5).filter(|_| rows > 0).map(|_| random.random_range(0..rows as u32)).collect();
                    let mut with_misses = some.clone();
                    with_misses.iter_mut().step_by(3).for_each(|at| *at = NO_ROW);
                    let all_positions = [
                        bench.list(&some, false),
                        bench.list(&with_misses, true),
                        bench.list(&some, true),
                        Positions::Range(0..rows),
                        Positions::Range(rows / 3..rows - rows / 5),
                    ];
                    for positions in all_positions {
                        let situation = format!("{rows} rows of width {:?} at {positions:?}", column.width);
                        let width = column.width.bytes();
                        let expected = expected(&column, &valid, &numbers(&positions));
                        let nulls = expected.iter().filter(|value| value.is_none()).count();
                        let moved = bench.device.gather(&column, &positions, &bench.stream).unwrap();
                        assert_eq!(moved.rows, expected.len());
                        let data = &bytes_of(&moved.data)[..moved.rows * width];
                        assert!(found(data, moved.validity.as_ref().map(bytes_of), width) == expected, "{situation}");
                        let host =
                            bench.device.gather_to_host(&column, &positions, &bench.arena, &bench.stream).unwrap();
                        let bits = host.validity.as_ref().map(|(bits, _)| bits.as_slice());
                        assert!(found(&host.data, bits, width) == expected, "{situation}");
                        assert_eq!(host.validity.map_or(0, |(_, nulls)| nulls), nulls, "{situation}");
                        for (value, at) in host.data.chunks(width).zip(numbers(&positions)) {
                            assert!(at != NO_ROW || value.iter().all(|&byte| byte == 0), "{situation}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn unaligned_columns_are_gathered() {
        let bench = Bench::new(2);
        let bytes: Vec<u8> = (0..=255).collect();
        let part: Buffer = buffer_of(&bytes).slice(3);
        let data = bench.device.copy_in(&[part], &bench.stream).unwrap();
        let column = Column { data, width: crate::device::Width::W16, rows: 15, validity: None };
        let moved = bench.device.gather(&column, &bench.list(&[14, 0], false), &bench.stream).unwrap();
        assert_eq!(bytes_of(&moved.data)[..32], [&bytes[227..243], &bytes[3..19]].concat());
    }

    #[test]
    fn lists_are_concatenated_in_order() {
        let bench = Bench::new(2);
        let lists =
            [vec![5u32, 6, 7], vec![], (0..100_000).rev().collect()].map(|list: Vec<u32>| bench.list(&list, false));
        let parts =
            [(&lists[2], 1..99_999), (&lists[1], 0..0), (&lists[0], 2..3), (&lists[0], 0..2), (&lists[0], 1..1)];
        let found = bench.device.concat(&parts, &bench.stream).unwrap();
        let expected: Vec<u32> = (1..99_999).rev().chain([7, 5, 6]).collect();
        assert_eq!(numbers(&found), expected);
        assert_eq!(numbers(&bench.device.concat(&[], &bench.stream).unwrap()), Vec::<u32>::new());
    }

    #[test]
    fn composed_positions_are_looked_up_in_the_map() {
        let mut random = random(92);
        let bench = Bench::new(2);
        for rows in SIZES.into_iter().filter(|&rows| rows > 0) {
            let list: Vec<u32> = (0..rows).map(|_| random.random_range(0..rows as u32)).collect();
            let mut missing = list.clone();
            missing.iter_mut().step_by(4).for_each(|at| *at = NO_ROW);
            let choices = [
                Positions::Range(0..rows),
                Positions::Range(10..10 + rows),
                bench.list(&list, false),
                bench.list(&missing, true),
            ];
            let inner =
                [Positions::Range(0..rows), Positions::Range(rows / 2..rows), choices[2].clone(), choices[3].clone()];
            for map in &choices {
                for positions in &inner {
                    let table = numbers(map);
                    let look_up = |at: u32| if at == NO_ROW { NO_ROW } else { table[at as usize] };
                    let expected: Vec<u32> = numbers(positions).into_iter().map(look_up).collect();
                    let found = bench.device.compose(map, positions, &bench.stream).unwrap();
                    let nullable = !matches!(found, Positions::Range(_) | Positions::List { nullable: false, .. });
                    assert!(nullable || !expected.contains(&NO_ROW));
                    assert_eq!(numbers(&found), expected, "{positions:?} in {map:?}");
                }
            }
        }
    }
}
