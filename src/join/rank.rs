//! Ranks: the members of a gang, each of which runs the same task on a device of its own.
//!
//! ```text
//!   rank 0   chunk 0 │ chunk 2 │ chunk 5 │ ...      each takes the next rows that no rank has taken
//!   rank 1   chunk 1 │ chunk 3 │ chunk 4 │ ...
//! ```
//!
//! Ranks are threads of one process, or processes. They meet at a [`GangBoard`]: counters in memory
//! that all of them map. A join on one device is a gang of one rank, and needs no board.

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use crate::Result;
use crate::columns::Role;
use crate::memory::SharedCounters;

/// Counters that start at their own cache lines, so that ranks do not disturb each other.
const LINE: usize = 8;

/// Counters of a gang.
#[derive(Clone, Debug)]
pub struct GangBoard {
    ranks: usize,
    counters: SharedCounters,
}

impl GangBoard {
    /// Makes the board of a gang with the given number of ranks.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the system has no memory for it.
    pub fn new(ranks: usize) -> Result<Self> {
        Ok(Self { ranks, counters: SharedCounters::new(Self::counters(ranks))? })
    }

    /// Maps the board of a gang of this number of ranks that another process has made.
    ///
    /// # Errors
    /// The errors of [`SharedCounters::of_file`].
    pub fn of_file(file: OwnedFd, ranks: usize) -> Result<Self> {
        Ok(Self { ranks, counters: SharedCounters::of_file(file, Self::counters(ranks))? })
    }

    /// Returns the file of the board, for another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.counters.file()
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    fn counters(_ranks: usize) -> usize {
        4 * LINE
    }

    fn taken_rows(role: Role) -> usize {
        match role {
            Role::Build => 0,
            Role::Probe => LINE,
        }
    }

    /// Number of ranks that have added to [`SUM`](Self::SUM).
    const ADDED: usize = 2 * LINE;
    const SUM: usize = 3 * LINE;
}

/// Member of a gang, or a device that runs a join alone.
#[derive(Clone, Debug)]
pub struct Rank {
    number: usize,
    /// `None` for a join on one device.
    board: Option<GangBoard>,
}

impl Rank {
    /// Returns the only rank of a join on one device.
    pub fn alone() -> Self {
        Self { number: 0, board: None }
    }

    /// Returns a rank of a gang, by number.
    pub fn of_gang(number: usize, board: GangBoard) -> Self {
        Self { number, board: Some(board) }
    }

    /// Returns the number of the rank, counted from zero.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Returns the board of the gang; `None` for a join on one device.
    pub fn board(&self) -> Option<&GangBoard> {
        self.board.as_ref()
    }

    /// Returns the number of ranks of the gang.
    pub fn ranks(&self) -> usize {
        self.board.as_ref().map_or(1, GangBoard::ranks)
    }

    /// True if other ranks take rows too.
    pub(super) fn shares_rows(&self) -> bool {
        self.board.is_some()
    }

    /// Adds a number of this rank, once. Returns the sum of all ranks to the last of them.
    pub(super) fn sum(&self, of_rank: u64) -> Option<u64> {
        let Some(GangBoard { ranks, counters }) = &self.board else { return Some(of_rank) };
        counters.counter(GangBoard::SUM).fetch_add(of_rank, Ordering::AcqRel);
        let added = counters.counter(GangBoard::ADDED).fetch_add(1, Ordering::AcqRel) + 1;
        (added == *ranks as u64).then(|| counters.get(GangBoard::SUM))
    }

    /// Takes the next rows of one side that no rank has taken. `rows_of` returns how many of the
    /// rows that are left this rank would take. Returns `None` once all `total` rows are taken.
    ///
    /// # Panics
    /// For a join on one device, which shares no rows.
    pub(super) fn take_rows(
        &self,
        role: Role,
        total: u64,
        mut rows_of: impl FnMut(Range<u64>) -> u64,
    ) -> Option<Range<u64>> {
        let board = self.board.as_ref().expect("only ranks of a gang share rows");
        let taken = board.counters.counter(GangBoard::taken_rows(role));
        let mut start = taken.load(Ordering::Relaxed);
        while start < total {
            let end = total.min(start + rows_of(start..total).max(1));
            match taken.compare_exchange_weak(start, end, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(start..end),
                Err(now) => start = now,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rank_gets_the_sum_of_all() {
        let board = GangBoard::new(3).unwrap();
        let sums: Vec<_> =
            [5, 7, 0].iter().enumerate().map(|(at, &rows)| Rank::of_gang(at, board.clone()).sum(rows)).collect();
        assert_eq!((sums, Rank::alone().sum(4)), (vec![None, None, Some(12)], Some(4)));
    }

    #[test]
    fn each_row_is_taken_by_exactly_one_rank() {
        const ROWS: u64 = 100_000;
        let board = GangBoard::new(3).unwrap();
        let taken_by = &|number: usize| {
            let file = board.file().try_clone_to_owned().unwrap();
            let rank = Rank::of_gang(number, GangBoard::of_file(file, 3).unwrap());
            assert_eq!((rank.number(), rank.ranks()), (number, 3));
            let next = || rank.take_rows(Role::Probe, ROWS, |left| (left.start % 7 + number as u64 + 1).min(left.end));
            std::iter::from_fn(next).collect::<Vec<_>>()
        };
        let mut ranges: Vec<Range<u64>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3).map(|number| scope.spawn(move || taken_by(number))).collect();
            ranks.into_iter().flat_map(|rank| rank.join().unwrap()).collect()
        });
        ranges.sort_by_key(|range| range.start);
        assert_eq!((ranges[0].start, ranges[ranges.len() - 1].end), (0, ROWS));
        assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
        let build = Rank::of_gang(0, board).take_rows(Role::Build, 10, |left| left.end);
        assert_eq!(build, Some(0..10), "the sides are counted apart");
    }
}
