//! Moving one column of one thread's rows through a line per partition.

use super::super::buffer::split_at_bounds;
use super::super::raw::{self, LINE_BYTES};

/// Source of a writer's values.
#[derive(Clone, Copy)]
pub(super) enum Source<'a, T> {
    Values(&'a [T]),
    /// The number of the row itself.
    Numbers,
}

/// Writer of one column of one thread's rows.
pub(super) trait Write: Send {
    /// Moves the rows from `first_row` on, which have the given digits.
    fn write(&mut self, digits: &[u16], first_row: usize);

    /// Writes the values that remain in the lines.
    fn finish(&mut self);
}

/// A value that can be a row number. Only `u32` ever is one.
pub(in crate::device::host) trait Cell: bytemuck::Pod + Send + Sync {
    fn number(row: usize) -> Self;
}

macro_rules! not_a_number {
    ($($cell:ty),*) => {
        $(impl Cell for $cell {
            fn number(_row: usize) -> Self {
                unreachable!("row numbers are payload as u32")
            }
        })*
    };
}

impl Cell for u32 {
    #[inline(always)]
    fn number(row: usize) -> Self {
        row as u32
    }
}

not_a_number!(u64, u128, [u8; 1], [u8; 2], [u8; 4], [u8; 8], [u8; 16], [u8; 32]);

/// Gives each thread a writer of its pieces of `out`, which are ordered by digit, and by thread
/// within a digit.
pub(super) fn add_writers<'a, T: Cell>(
    writers: &mut [Vec<Box<dyn Write + 'a>>],
    source: Source<'a, T>,
    out: &'a mut [T],
    piece_bounds: &[usize],
) {
    let threads = writers.len();
    let mut pieces: Vec<Vec<&mut [T]>> = writers.iter().map(|_| Vec::new()).collect();
    let mut phases: Vec<Vec<usize>> = writers.iter().map(|_| Vec::new()).collect();
    for (index, piece) in split_at_bounds(out, piece_bounds, 1).into_iter().enumerate() {
        pieces[index % threads].push(piece);
        phases[index % threads].push(piece_bounds[index] & (lane_count::<T>() - 1));
    }
    for ((writers, pieces), phases) in writers.iter_mut().zip(pieces).zip(phases) {
        writers.push(Box::new(Writer::new(source, pieces, phases)));
    }
}

/// Values per cache line.
const fn lane_count<T>() -> usize {
    LINE_BYTES / size_of::<T>()
}

/// Moves one column through a line per partition.
struct Writer<'a, T> {
    source: Source<'a, T>,
    pieces: Vec<&'a mut [T]>,
    lines: Vec<T>,
    /// Values written so far, counted from the line boundary before the piece. The lowest bits are
    /// the place in the line.
    ends: Vec<usize>,
    /// Offset of each piece in its first line.
    phases: Vec<usize>,
}

impl<'a, T: Cell> Writer<'a, T> {
    fn new(source: Source<'a, T>, pieces: Vec<&'a mut [T]>, phases: Vec<usize>) -> Self {
        let lines = vec![T::zeroed(); pieces.len() * lane_count::<T>()];
        Self { source, pieces, lines, ends: phases.clone(), phases }
    }

    #[inline(always)]
    fn put(&mut self, digit: usize, value: T) {
        let lanes = lane_count::<T>();
        let end = self.ends[digit];
        let lane = end & (lanes - 1);
        self.lines[digit * lanes + lane] = value;
        self.ends[digit] = end + 1;
        if lane == lanes - 1 {
            self.flush(digit, end + 1);
        }
    }

    /// Writes the line that ends at `end`. The line is full except for any part before the piece.
    #[inline(always)]
    fn flush(&mut self, digit: usize, end: usize) {
        let lanes = lane_count::<T>();
        let line = &self.lines[digit * lanes..(digit + 1) * lanes];
        let written = end - self.phases[digit];
        if written >= lanes {
            raw::stream_line(&mut self.pieces[digit][written - lanes..written], line);
        } else {
            self.pieces[digit][..written].copy_from_slice(&line[lanes - written..]);
        }
    }
}

impl<T: Cell> Write for Writer<'_, T> {
    fn write(&mut self, digits: &[u16], first_row: usize) {
        match self.source {
            Source::Values(values) => {
                let values = &values[first_row..first_row + digits.len()];
                digits.iter().zip(values).for_each(|(&digit, &value)| self.put(usize::from(digit), value));
            }
            Source::Numbers => {
                digits.iter().zip(first_row..).for_each(|(&digit, row)| self.put(usize::from(digit), T::number(row)));
            }
        }
    }

    fn finish(&mut self) {
        let lanes = lane_count::<T>();
        for (digit, piece) in self.pieces.iter_mut().enumerate() {
            let (end, written) = (self.ends[digit], self.ends[digit] - self.phases[digit]);
            let filled = end & (lanes - 1);
            let left = filled.min(written);
            let line = &self.lines[digit * lanes..digit * lanes + filled];
            piece[written - left..].copy_from_slice(&line[filled - left..]);
        }
    }
}
