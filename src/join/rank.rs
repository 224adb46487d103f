//! Ranks: the members of a gang. Each rank runs the same task on a device of its own.
//!
//! ```text
//!   rank 0   chunk 0 │ chunk 2 │ chunk 5 │ ...   each takes the next rows that no rank has taken
//!   rank 1   chunk 1 │ chunk 3 │ chunk 4 │ ...
//! ```
//!
//! On a host of several NUMA nodes, a rank takes the rows on the node of its device first
//! (`row_nodes`). A host device that helps GPUs takes rows from the end (`helping`). Ranks are
//! threads of one process, or processes. They meet at a [`GangBoard`]: counters in memory that all
//! of them map. A join on one device is a gang of one rank, and needs no board.

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::row_nodes::{NODES_MAX, NearRows, RowNodes};
use crate::Result;
use crate::columns::Role;
use crate::device::{DeviceId, DeviceKind};
use crate::memory::SharedCounters;

/// Counters in a cache line. Counters that different ranks write have lines of their own.
const LINE: usize = 8;

/// Base-2 logarithm of the number of buckets that an exchange divides keys into. A bucket belongs
/// to one rank. With 256 buckets, shares of up to eight ranks differ by at most 2 % if keys are
/// spread evenly, and a device needs one pass.
pub(crate) const BUCKET_BITS: u32 = 8;

pub(super) const BUCKETS: usize = 1 << BUCKET_BITS;

/// Counters of a channel: a line each for what is sent, for what is released, and for the slots.
pub(super) const CHANNEL_COUNTERS: usize = 3 * LINE;

pub(super) const RELEASED: usize = LINE;

pub(super) const SLOT_HEADERS: usize = 2 * LINE;

/// Bits of a [`Taken`] counter that have the rows taken from the start.
const START_BITS: u32 = 40;

/// Rows of a piece: those of one word of the columns' bitmaps.
const PIECE_ROWS: u64 = 64;

/// Counters of a gang, and the devices of its ranks. Clones share the counters.
#[derive(Clone, Debug)]
pub struct GangBoard {
    devices: Arc<[DeviceId]>,
    counters: SharedCounters,
}

/// Places of counters on a board, in this order. Each group starts at its own cache line.
enum Place {
    /// Rows of a side and of a NUMA node that ranks have taken.
    Taken(Role, usize),
    /// Number of ranks that have added to the sum.
    Added,
    Sum,
    /// Number of ranks that have counted their build rows.
    Counted,
    /// Build rows that a rank has read in each bucket.
    Histogram {
        rank: usize,
    },
    /// Counters of a channel between two ranks.
    Channel {
        from: usize,
        to: usize,
    },
}

impl GangBoard {
    /// Makes the board of a gang with a rank on each of the given devices.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the system has no memory for it.
    pub fn new(devices: &[DeviceId]) -> Result<Self> {
        Ok(Self { devices: devices.into(), counters: SharedCounters::new(Self::size(devices.len()))? })
    }

    /// Maps the board of a gang on these devices that another process has made.
    ///
    /// # Errors
    /// The errors of [`SharedCounters::of_file`].
    pub fn of_file(file: OwnedFd, devices: &[DeviceId]) -> Result<Self> {
        let counters = SharedCounters::of_file(file, Self::size(devices.len()))?;
        Ok(Self { devices: devices.into(), counters })
    }

    /// Returns the file of the board, for another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.counters.file()
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.devices.len()
    }

    /// Returns the devices of the ranks.
    pub fn devices(&self) -> &[DeviceId] {
        &self.devices
    }

    /// Returns the counters, and the first of a channel between two ranks.
    pub(super) fn channel(&self, from: usize, to: usize) -> (SharedCounters, usize) {
        (self.counters.clone(), self.at(Place::Channel { from, to }))
    }

    /// True if the rank with this number is a host device, and others are GPUs.
    pub fn helps_gpus(&self, number: usize) -> bool {
        self.devices[number].kind == DeviceKind::Host && self.gpus() > 0
    }

    /// Returns the number of GPUs among the devices.
    fn gpus(&self) -> usize {
        self.devices.iter().filter(|device| device.kind == DeviceKind::Cuda).count()
    }

    fn at(&self, place: Place) -> usize {
        let sums = 2 * NODES_MAX * LINE;
        let histograms = sums + 3 * LINE;
        match place {
            Place::Taken(Role::Build, node) => node * LINE,
            Place::Taken(Role::Probe, node) => (NODES_MAX + node) * LINE,
            Place::Added => sums,
            Place::Sum => sums + LINE,
            Place::Counted => sums + 2 * LINE,
            Place::Histogram { rank } => histograms + rank * BUCKETS,
            Place::Channel { from, to } => {
                histograms + self.ranks() * BUCKETS + (from * self.ranks() + to) * CHANNEL_COUNTERS
            }
        }
    }

    /// Counters of a board.
    fn size(ranks: usize) -> usize {
        (2 * NODES_MAX + 3) * LINE + ranks * BUCKETS + ranks * ranks * CHANNEL_COUNTERS
    }
}

/// Rows of a side and of a NUMA node that ranks have taken: rows from the start, and pieces from
/// the end. One counter has both, so that no row is taken from both ends.
#[derive(Clone, Copy)]
struct Taken {
    from_start: u64,
    /// Pieces of [`PIECE_ROWS`], the last of the side with fewer rows. Only of a side whose rows
    /// are alike.
    pieces: u64,
}

impl Taken {
    fn of(counter: u64) -> Self {
        Self { from_start: counter & ((1 << START_BITS) - 1), pieces: counter >> START_BITS }
    }

    fn counter(self) -> u64 {
        self.pieces << START_BITS | self.from_start
    }

    /// Returns the end of the rows that are left of `total`.
    fn end(self, total: u64) -> u64 {
        if self.pieces == 0 { total } else { (total.div_ceil(PIECE_ROWS) - self.pieces) * PIECE_ROWS }
    }

    /// Takes the first `count` rows that are `left`.
    fn first(self, count: u64, left: &Range<u64>) -> (Range<u64>, Self) {
        (left.start..left.start + count, Self { from_start: self.from_start + count, ..self })
    }

    /// Takes whole pieces, of at most the last `count` rows that are `left` of `total`. Takes none
    /// if the counter cannot have more.
    fn last(self, count: u64, left: &Range<u64>, total: u64) -> (Range<u64>, Self) {
        let start = (left.end - count).next_multiple_of(PIECE_ROWS).min(left.end);
        let pieces = total.div_ceil(PIECE_ROWS) - start / PIECE_ROWS;
        match pieces < 1 << (u64::BITS - START_BITS) {
            true => (start..left.end, Self { pieces, ..self }),
            false => (left.end..left.end, self),
        }
    }
}

/// Member of a gang, or a device that runs a join alone.
#[derive(Clone, Debug)]
pub struct Rank {
    number: usize,
    /// `None` for a join on one device.
    board: Option<GangBoard>,
    near: NearRows,
}

impl Rank {
    /// Returns the only rank of a join on one device.
    pub fn alone() -> Self {
        Self { number: 0, board: None, near: NearRows::default() }
    }

    /// Returns a rank of a gang, by number.
    pub fn of_gang(number: usize, board: GangBoard) -> Self {
        Self { number, board: Some(board), near: NearRows::default() }
    }

    /// Returns the rank on a NUMA node, which takes the rows there first.
    pub fn on_node(self, near: NearRows) -> Self {
        Self { near, ..self }
    }

    /// Returns the NUMA node of the rank, and those of the rows.
    pub fn near(&self) -> &NearRows {
        &self.near
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

    /// True for a host device among the ranks of GPUs.
    pub(super) fn helps_gpus(&self) -> bool {
        self.board.as_ref().is_some_and(|board| board.helps_gpus(self.number))
    }

    /// Returns the number of ranks that divide the rows evenly: all except those that help.
    pub(super) fn even_ranks(&self) -> usize {
        let gpus = self.board.as_ref().map_or(0, GangBoard::gpus);
        if gpus > 0 { gpus } else { self.ranks() }
    }

    /// Adds a number of this rank, once. Returns the sum of all ranks to the last of them.
    pub(super) fn sum(&self, of_rank: u64) -> Option<u64> {
        let Some(board) = &self.board else { return Some(of_rank) };
        board.counters.counter(board.at(Place::Sum)).fetch_add(of_rank, Ordering::AcqRel);
        let added = board.counters.counter(board.at(Place::Added)).fetch_add(1, Ordering::AcqRel) + 1;
        (added == board.ranks() as u64).then(|| board.counters.get(board.at(Place::Sum)))
    }

    /// Adds this rank's build rows by bucket, once. Waits for all ranks, and returns the sums.
    ///
    /// # Errors
    /// The error of `check`.
    ///
    /// # Panics
    /// For a join on one device.
    pub(super) fn histogram(&self, of_rank: &[u64; BUCKETS], check: &dyn Fn() -> Result<()>) -> Result<Vec<u64>> {
        let board = self.board.as_ref().expect("only ranks of a gang exchange rows");
        let counter = |rank: usize, bucket: usize| board.counters.counter(board.at(Place::Histogram { rank }) + bucket);
        for (bucket, &rows) in of_rank.iter().enumerate() {
            counter(self.number, bucket).store(rows, Ordering::Relaxed);
        }
        board.counters.add(board.at(Place::Counted), 1);
        board.counters.wait(board.at(Place::Counted), board.ranks() as u64, check)?;
        let sum = |bucket: usize| (0..board.ranks()).map(|rank| counter(rank, bucket).load(Ordering::Relaxed)).sum();
        Ok((0..BUCKETS).map(sum).collect())
    }

    /// Returns the number of rows of one side, of `total`, that no rank has taken.
    pub(super) fn left_rows(&self, role: Role, total: u64) -> u64 {
        let Some(board) = &self.board else { return total };
        let taken_of = |node| {
            let taken = Taken::of(board.counters.get(board.at(Place::Taken(role, node))));
            taken.from_start + total - taken.end(total)
        };
        total - self.rows_of(role).order(None).map(taken_of).sum::<u64>()
    }

    /// Takes the next rows of one side that no rank has taken, those on the rank's NUMA node first.
    /// A rank that helps takes the last rows, unless the rows are on several nodes. `rows_of`
    /// returns how many of the given rows this rank would take. Returns `None` once all `total`
    /// rows are taken, or if a rank that helps would take none.
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
        assert!(total < 1 << START_BITS, "a gang cannot count {total} rows");
        let (rows, helps) = (self.rows_of(role), self.helps_gpus());
        // GPUs take the rows that a rank that helps leaves. Rows that another rank leaves are lost.
        let least = u64::from(!helps);
        for node in rows.order(self.near.node) {
            let counter = board.counters.counter(board.at(Place::Taken(role, node)));
            let mut now = Taken::of(counter.load(Ordering::Relaxed));
            while let Some(left) = rows.left(node, now.from_start, now.end(total)) {
                let count = rows_of(left.clone()).clamp(least, left.end - left.start);
                let (taken, then) = match helps && rows.are_alike() {
                    true => now.last(count, &left, total),
                    false => now.first(count, &left),
                };
                if taken.is_empty() {
                    return None;
                }
                let (before, after) = (now.counter(), then.counter());
                match counter.compare_exchange_weak(before, after, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => return Some(taken),
                    Err(changed) => now = Taken::of(changed),
                }
            }
        }
        None
    }

    fn rows_of(&self, role: Role) -> &RowNodes {
        if role == Role::Build { &self.near.build } else { &self.near.probe }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(count: u16) -> Vec<DeviceId> {
        (0..count).map(|index| DeviceId { kind: DeviceKind::Host, index }).collect()
    }

    /// Returns two GPUs, and a host device that helps them.
    fn helped() -> Vec<DeviceId> {
        let gpus = (0..2).map(|index| DeviceId { kind: DeviceKind::Cuda, index });
        gpus.chain(hosts(1)).collect()
    }

    #[test]
    fn all_ranks_get_the_sum_of_their_histograms() {
        let board = GangBoard::new(&hosts(3)).unwrap();
        let of_rank = &|number: usize| {
            let mut rows = [0; BUCKETS];
            (rows[number], rows[BUCKETS - 1]) = (10, number as u64);
            Rank::of_gang(number, board.clone()).histogram(&rows, &|| Ok(())).unwrap()
        };
        let sums: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3).map(|number| scope.spawn(move || of_rank(number))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(sums.iter().all(|sum| sum[..4] == [10, 10, 10, 0] && sum[BUCKETS - 1] == 3), "{sums:?}");
    }

    #[test]
    fn only_host_devices_beside_gpus_help() {
        let gpu = DeviceId { kind: DeviceKind::Cuda, index: 0 };
        let [mixed, equal] = [vec![hosts(2)[0], gpu, hosts(2)[1]], hosts(3)];
        let helps = |devices: &[DeviceId], number| Rank::of_gang(number, GangBoard::new(devices).unwrap()).helps_gpus();
        assert_eq!([0, 1, 2].map(|number| helps(&mixed, number)), [true, false, true]);
        assert_eq!([0, 1, 2].map(|number| helps(&equal, number)), [false; 3]);
        assert!(!Rank::alone().helps_gpus());
        let even = |devices: &[DeviceId]| Rank::of_gang(0, GangBoard::new(devices).unwrap()).even_ranks();
        assert_eq!([even(&mixed), even(&equal), even(&helped()), Rank::alone().even_ranks()], [1, 3, 2, 1]);
    }

    #[test]
    fn the_last_rank_gets_the_sum_of_all() {
        let board = GangBoard::new(&hosts(3)).unwrap();
        let sums: Vec<_> =
            [5, 7, 0].iter().enumerate().map(|(at, &rows)| Rank::of_gang(at, board.clone()).sum(rows)).collect();
        assert_eq!((sums, Rank::alone().sum(4)), (vec![None, None, Some(12)], Some(4)));
    }

    #[test]
    fn each_row_is_taken_by_exactly_one_rank() {
        const ROWS: u64 = 100_000;
        for devices in [hosts(3), helped()] {
            let board = GangBoard::new(&devices).unwrap();
            let taken_by = &|number: usize| {
                let file = board.file().try_clone_to_owned().unwrap();
                let rank = Rank::of_gang(number, GangBoard::of_file(file, &devices).unwrap());
                assert_eq!((rank.number(), rank.ranks()), (number, 3));
                let rows_of = |left: Range<u64>| PIECE_ROWS + (left.start % 7 + number as u64 + 1).min(left.end);
                let next = || rank.take_rows(Role::Probe, ROWS, rows_of);
                std::iter::from_fn(next).collect::<Vec<_>>()
            };
            let mut ranges: Vec<Range<u64>> = std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..3).map(|number| scope.spawn(move || taken_by(number))).collect();
                ranks.into_iter().flat_map(|rank| rank.join().unwrap()).collect()
            });
            ranges.sort_by_key(|range| range.start);
            assert_eq!((ranges[0].start, ranges[ranges.len() - 1].end), (0, ROWS));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            let rank = Rank::of_gang(0, board);
            assert_eq!((rank.left_rows(Role::Probe, ROWS), rank.left_rows(Role::Build, 10)), (0, 10));
            assert_eq!(rank.take_rows(Role::Build, 10, |left| left.end), Some(0..10), "the sides are counted apart");
        }
    }

    #[test]
    fn a_rank_that_helps_takes_whole_words_of_bitmaps_from_the_end() {
        const ROWS: u64 = 1000;
        let board = GangBoard::new(&helped()).unwrap();
        let [gpu, host] = [0, 2].map(|number| Rank::of_gang(number, board.clone()));
        let take = |rank: &Rank, rows: u64| rank.take_rows(Role::Probe, ROWS, |_| rows);
        assert_eq!([take(&host, 0), take(&host, 100), take(&gpu, 100)], [None, Some(960..1000), Some(0..100)]);
        assert_eq!([take(&host, 64), take(&host, 63), take(&host, 200)], [Some(896..960), None, Some(704..896)]);
        assert_eq!(gpu.left_rows(Role::Probe, ROWS), 604);
        assert_eq!(
            [take(&gpu, 500), take(&host, 500), take(&gpu, 0)],
            [Some(100..600), Some(640..704), Some(600..601)]
        );
        assert_eq!([take(&host, 500), take(&gpu, 500), take(&gpu, 500)], [None, Some(601..640), None]);
        assert_eq!(host.left_rows(Role::Probe, ROWS), 0);
    }

    #[test]
    fn a_rank_that_helps_takes_rows_of_several_nodes_in_their_order() {
        const ROWS: u64 = 4000;
        let board = GangBoard::new(&helped()).unwrap();
        let near = NearRows { probe: Arc::new(RowNodes::of_two_nodes(ROWS)), ..NearRows::default() };
        let rank = |number| Rank::of_gang(number, board.clone()).on_node(NearRows { node: Some(0), ..near.clone() });
        let take = |rank: &Rank, rows: u64| rank.take_rows(Role::Probe, ROWS, |_| rows);
        assert_eq!(
            [take(&rank(2), 100), take(&rank(2), 0), take(&rank(0), 9000)],
            [Some(0..100), None, Some(100..1000)]
        );
        assert_eq!(rank(1).left_rows(Role::Probe, ROWS), 3000);
    }

    #[test]
    fn a_rank_takes_the_rows_of_its_node_first_and_then_those_of_others() {
        const ROWS: u64 = 4_000;
        let board = GangBoard::new(&hosts(3)).unwrap();
        let rows = Arc::new(RowNodes::of_two_nodes(ROWS));
        let rank = |number: usize, node: Option<u32>| {
            let near = NearRows { node, build: Arc::default(), probe: rows.clone() };
            Rank::of_gang(number, board.clone()).on_node(near)
        };
        let (first, second, lost) = (rank(0, Some(0)), rank(1, Some(1)), rank(2, None));
        let take = |rank: &Rank| rank.take_rows(Role::Probe, ROWS, |left| (left.end - left.start).min(600));
        assert_eq!([take(&second), take(&first)], [Some(1000..1600), Some(0..600)]);
        // A chunk ends with its run.
        assert_eq!([take(&second), take(&first)], [Some(1600..2000), Some(600..1000)]);
        assert_eq!([take(&second), take(&second)], [Some(3000..3600), Some(3600..4000)]);
        assert_eq!([take(&second), take(&lost)], [Some(2000..2600), Some(2600..3000)]);
        assert_eq!([take(&first), take(&second), take(&lost)], [None, None, None]);
        // Rows of a side without nodes are taken in their order.
        assert_eq!(second.take_rows(Role::Build, 10, |_| 7), Some(0..7));
        assert_eq!(first.take_rows(Role::Build, 10, |_| 7), Some(7..10));
    }
}
