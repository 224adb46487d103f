//! Joins of a gang whose ranks exchange rows. By hash, each rank joins all rows of its own keys. By
//! broadcast, ranks read the build side in shares and send it to each other (`broadcast.rs`).
//!
//! Hash distribution:
//!
//! ```text
//!   build   chunk ─► partition by bucket ─► keep ─► (all ranks: histogram ─► owners)
//!           kept rows ─► own ────────────────────────────────┐
//!                     └► channel to their owner ─► pieces ───┴─► lay out ─► index
//!   probe   chunk ─► partition by bucket ─► own ──────────────► lay out ─► match ─► batches
//!                                        └► channel ─► pieces ─► lay out ─► match ─► batches
//! ```
//!
//! A *bucket* is the set of keys whose mixed hash begins with the same bits. The rows of the build
//! side are counted by bucket before any row crosses, so each rank gets about equally many, and
//! knows how many. Ranks take chunks of both tables in turn.
//!
//! Columns of fixed width without nulls move with their keys. The host gathers the others from the
//! table, by chunk and row number. Rows without a key cross nothing: the rank that reads them emits
//! them, if the kind of join keeps them. Keys must be packed exactly; hashed keys would have to be
//! compared by values that other ranks have.

mod broadcast;
mod channel;
mod owners;
mod rows;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use self::channel::{Channel, Outgoing, Piece};
use self::owners::Owners;
use self::rows::{BucketedChunk, ExchangedSide};
use super::chunks::{Chunk, ProbeRows, chunk_row_bytes, chunk_rows, even_chunk_rows};
use super::column_gather::SideRows;
use super::context::{CallStreams, JoinContext};
use super::inputs::{SideInput, check_rank_build_rows};
use super::materialize::Materializer;
use super::prepared::{Preparation, PreparedJoin};
use super::probe::Probing;
use super::progress::{Progress, Stage};
use super::rank::{BUCKETS, GangBoard, Rank};
use super::semantics::JoinSemantics;
use super::source::TableRows;
use super::threads::run_on_device_pool;
use super::transform::lay_out;
use super::{BatchSink, Distribution, Monitor, Task};
use crate::columns::{KeyLayout, Role};
use crate::device::{Device, Phase, peers};
use crate::memory::Arena;
#[cfg(test)]
use crate::turns::{await_started, in_turns};
use crate::{Error, Result, panics};

/// Returns the work of a thread. In tests, threads may take turns.
#[cfg(not(test))]
fn in_turns<T>(work: T) -> T {
    work
}

/// Lets the threads go first that this one has started. Only tests order them.
#[cfg(not(test))]
fn await_started() {}

/// Everything that the threads of a rank share.
struct Exchange<'a> {
    task: &'a Arc<Task>,
    rank: &'a Rank,
    board: &'a GangBoard,
    device: &'a dyn Device,
    arena: &'a Arena,
    sink: &'a dyn BatchSink,
    monitor: &'a Monitor,
    /// Channels to and from each other rank, by its number. `None` for this rank.
    out: Vec<Option<Channel>>,
    into: Vec<Option<Channel>>,
    build: ExchangedSide,
    probe: ExchangedSide,
    preparation: Preparation,
    /// True if a thread of this rank has failed.
    failed: AtomicBool,
}

/// Runs one rank of a join whose ranks exchange rows.
///
/// # Errors
/// The errors of [`run_rank`](super::run_rank). [`Error::Unavailable`] if the memory of a peer is
/// not mapped.
pub(super) fn run_exchanged(
    task: &Arc<Task>,
    rank: &Rank,
    device: &dyn Device,
    arena: &Arena,
    sink: &dyn BatchSink,
    monitor: &Monitor,
) -> Result<()> {
    let exchange = Exchange::new(task, rank, device, arena, sink, monitor)?;
    let progress = Progress::new(&task.expected.stage_seconds, monitor);
    let streams = CallStreams::new(device, monitor)?;
    let cx = streams.context(device, arena, monitor);
    match task.composition.distribution {
        Distribution::Hash => exchange.join_by_hash(&cx, progress),
        Distribution::Alone | Distribution::Broadcast => exchange.join_by_broadcast(&cx, progress),
    }
}

impl<'a> Exchange<'a> {
    fn new(
        task: &'a Arc<Task>,
        rank: &'a Rank,
        device: &'a dyn Device,
        arena: &'a Arena,
        sink: &'a dyn BatchSink,
        monitor: &'a Monitor,
    ) -> Result<Self> {
        let board = rank.board().expect("one device exchanges no rows");
        let window_bytes = peers(device)?.window_bytes();
        let table = |role| SideInput::of_task(task, role, device.strings().is_some());
        let (build_table, probe_table) = (table(Role::Build), table(Role::Probe));
        let build = Arc::new(build_table.exchanged());
        let probe = Arc::new(match task.composition.distribution {
            Distribution::Hash => probe_table.exchanged(),
            Distribution::Alone | Distribution::Broadcast => probe_table.clone(),
        });
        let semantics = JoinSemantics::new(task, &build, &probe, None);
        let preparation = Preparation::new(task.clone(), build.clone(), probe.clone(), device);
        let layout = &preparation.layout;
        assert!(!layout.is_hashed(), "hashed keys are compared by values that other ranks have");
        let channel = |from: usize, to: usize| (from != to).then(|| Channel::new(board, from, to, window_bytes));
        let own = rank.number();
        Ok(Self {
            out: (0..board.ranks()).map(|to| channel(own, to)).collect(),
            into: (0..board.ranks()).map(|from| channel(from, own)).collect(),
            build: ExchangedSide::new(build_table, build, semantics.keeps_build_without_key(), layout),
            probe: ExchangedSide::new(probe_table, probe, semantics.keeps_probe_without_key(), layout),
            task,
            rank,
            board,
            device,
            arena,
            sink,
            monitor,
            preparation,
            failed: AtomicBool::new(false),
        })
    }

    /// Joins rows of both sides that cross to the rank of their key.
    fn join_by_hash(&self, cx: &JoinContext<'_>, mut progress: Progress<'_>) -> Result<()> {
        let (owners, pieces) = self.exchange_build()?;
        progress.reach(Stage::TransformBuild, 1.0);
        let join = self.prepare(pieces, cx, &mut |_| Ok(()))?;
        progress.reach(Stage::IndexBuild, 1.0);
        let source = TableRows::new(self.task.probe.table.clone());
        let rows = ProbeRows::new(&source, self.task, &self.probe.input, self.device).of_rank(self.rank);
        let probing = Probing::new(&join, rows, self.sink, progress);
        self.exchange_probe(&owners, &join, &probing)?;
        let mut progress = probing.into_progress();
        join.finish_with(cx, self.sink, &mut |share| progress.reach(Stage::KeptBuild, share))?;
        progress.finish();
        Ok(())
    }

    fn layout(&self) -> &KeyLayout {
        &self.preparation.layout
    }

    /// Returns the error of a rank that should stop.
    fn check(&self) -> Result<()> {
        self.monitor.cancel().check()?;
        match self.failed.load(Ordering::Relaxed) {
            true => Err(Error::Cancelled("another thread of the rank has failed".into())),
            false => Ok(()),
        }
    }

    /// Returns the threads that read chunks and send their rows.
    fn senders(&self) -> usize {
        self.device.tuning().streams
    }

    /// Returns the threads that send or receive rows of the probe side.
    fn threads(&self) -> usize {
        self.senders() + self.receivers() * (self.board.ranks() - 1)
    }

    /// Returns the threads that receive rows of one other rank. With the senders, they are about
    /// twice as many as the device has streams, because half of them wait.
    fn receivers(&self) -> usize {
        self.senders().div_ceil(self.board.ranks() - 1)
    }

    /// Runs `senders` threads of `send` and `receivers` threads of `receive` for each other rank,
    /// each with a view of the device and a stream of its own. `receive` gets the number of the
    /// rank.
    fn on_threads(
        &self,
        senders: usize,
        receivers: usize,
        send: &(dyn Fn(&JoinContext<'_>) -> Result<()> + Sync),
        receive: &(dyn Fn(&JoinContext<'_>, usize) -> Result<()> + Sync),
    ) -> Result<()> {
        let failure = Mutex::new(None);
        let run = |work: &dyn Fn(&JoinContext<'_>) -> Result<()>| {
            let on_own_view = || {
                // The view of a host device runs on its calling thread.
                let device = self.device.for_job(self.device.memory().clone())?;
                let streams = CallStreams::new(&*device, self.monitor)?;
                let cx = streams.context(&*device, self.arena, self.monitor);
                work(&JoinContext { copies: cx.stream, ..cx })
            };
            let said = |panic: &str| format!("a thread of the exchange panicked: {panic}");
            if let Err(error) = panics::as_error(said, on_own_view) {
                self.failed.store(true, Ordering::Relaxed);
                let mut failure = failure.lock();
                // A thread that was stopped is not the reason.
                if failure.as_ref().is_none_or(|first| matches!(first, Error::Cancelled(_))) {
                    *failure = Some(error);
                }
            }
        };
        std::thread::scope(|scope| {
            for from in self.others().flat_map(|from| std::iter::repeat_n(from, receivers)) {
                scope.spawn(in_turns(move || run(&|cx| receive(cx, from))));
            }
            for _ in 1..senders {
                scope.spawn(in_turns(|| run(&send)));
            }
            run(&send);
            await_started();
        });
        failure.into_inner().map_or(Ok(()), Err)
    }

    /// Returns the numbers of the other ranks, the next one first, so that ranks do not all send to
    /// the same one at a time.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (own, ranks) = (self.rank.number(), self.board.ranks());
        (1..ranks).map(move |step| (own + step) % ranks)
    }

    /// Takes the next chunk of a side's table that no rank has taken.
    fn next_chunk(&self, side: &ExchangedSide) -> Option<Range<u64>> {
        let input = &*side.input;
        self.rank.take_rows(input.role, input.table.rows, |left| self.chunk_rows(side, left))
    }

    /// Returns how many of a side's rows that are left make a chunk.
    fn chunk_rows(&self, side: &ExchangedSide, left: Range<u64>) -> u64 {
        let (input, layout) = (&*side.input, self.layout());
        let most = even_chunk_rows(self.task, layout, input.table.rows, self.senders(), self.board.ranks());
        // Each chunk is there as it came and partitioned, and receivers have pieces as well.
        let shares = 2 * self.threads();
        let row_bytes = chunk_row_bytes(input, layout) as u64;
        chunk_rows(input, layout, row_bytes, self.device, 0, shares, left.start..left.end.min(left.start + most))
    }

    /// Reads a chunk of a side, and emits its rows that have no key.
    fn read_chunk(&self, cx: &JoinContext<'_>, side: &ExchangedSide, rows: Range<u64>) -> Result<BucketedChunk> {
        run_on_device_pool(cx.device, || {
            let chunk = side.read(cx, self.layout(), rows)?;
            self.emit_without_key(cx, &chunk)?;
            Ok(chunk)
        })
    }

    /// Emits the rows of a chunk that have no key, if the kind of join keeps them.
    fn emit_without_key(&self, cx: &JoinContext<'_>, chunk: &BucketedChunk) -> Result<()> {
        let Some((side, numbers)) = &chunk.without_key else { return Ok(()) };
        let Preparation { task, layout, sizes, .. } = &self.preparation;
        let (build, probe) = (&self.build.table, &self.probe.table);
        let materializer = Materializer { cx, task, layout, build, probe, sink: self.sink, sizes: *sizes };
        let rows = SideRows::Numbered(side, numbers.clone());
        match chunk.role {
            Role::Build => materializer.emit(&rows, &SideRows::Missing, numbers.len(), &mut |_| {}),
            Role::Probe => materializer.emit(&SideRows::Missing, &rows, numbers.len(), &mut |_| {}),
        }
    }

    fn send(&self, cx: &JoinContext<'_>, side: &ExchangedSide, to: usize, outgoing: &Outgoing<'_>) -> Result<()> {
        let bytes = (outgoing.rows.len() * side.slots.widths.iter().sum::<usize>()) as u64;
        let channel = self.out[to].as_ref().expect("there is a channel to each other rank");
        let send = || channel.send(&side.slots, outgoing, (cx.device, cx.stream), &|| self.check());
        self.monitor.phase(Phase::Exchange, bytes, || self.monitor.sending(bytes, send))
    }

    /// Sends the rows of a chunk to their owners. Returns the rows of this rank.
    fn send_chunk(
        &self,
        cx: &JoinContext<'_>,
        side: &ExchangedSide,
        owners: &Owners,
        chunk: &BucketedChunk,
    ) -> Result<Option<Piece>> {
        let bounds = chunk.bounds()?;
        for to in self.others() {
            let rows = owners.rows_of(to, bounds);
            self.send(cx, side, to, &Outgoing { columns: &chunk.columns, rows, chunk_start: chunk.start })?;
        }
        let own = owners.rows_of(self.rank.number(), bounds);
        if own.is_empty() {
            return Ok(None);
        }
        let peers = peers(cx.device)?;
        let cut = |(column, width): (&_, &usize)| {
            peers.concat_bytes(&[(Clone::clone(column), own.start * width..own.end * width)], cx.stream)
        };
        let columns = chunk.columns.iter().zip(&side.slots.widths).map(cut).collect::<Result<_>>()?;
        // Another thread may join the rows.
        cx.device.synchronize(cx.stream)?;
        Ok(Some(Piece { rows: own.len(), chunk_start: chunk.start, columns }))
    }

    fn receive(&self, cx: &JoinContext<'_>, side: &ExchangedSide, from: usize) -> Result<Option<Piece>> {
        let channel = self.into[from].as_ref().expect("there is a channel from each other rank");
        channel.receive(&side.slots, (cx.device, cx.stream), &|| self.check())
    }

    /// Reads this rank's share of the build side. Returns the owners of all buckets, and the rows
    /// that this rank owns.
    fn exchange_build(&self) -> Result<(Owners, Vec<Piece>)> {
        let (kept, histogram) = (Mutex::new(Vec::new()), Mutex::new([0; BUCKETS]));
        let read = |cx: &JoinContext<'_>| {
            while let Some(rows) = self.next_chunk(&self.build) {
                self.check()?;
                let chunk = self.read_chunk(cx, &self.build, rows)?;
                let mut histogram = histogram.lock();
                for (rows, bounds) in histogram.iter_mut().zip(chunk.bounds()?.windows(2)) {
                    *rows += (bounds[1] - bounds[0]) as u64;
                }
                // Another thread may send the chunk. Its rows move after its bounds are known.
                let moved = cx.device.record_event(cx.stream)?;
                kept.lock().push((chunk, moved));
            }
            Ok(())
        };
        self.on_threads(self.senders(), 0, &read, &|_, _| Ok(()))?;
        let rows = self.rank.histogram(&histogram.into_inner(), &|| self.check())?;
        let owners = Owners::of(&rows, self.board.ranks());
        let pieces = self.collect_build(|cx, keep| {
            while let Some((chunk, moved)) = { kept.lock().pop() } {
                cx.device.wait_event(&moved, cx.stream)?;
                self.send_chunk(cx, &self.build, &owners, &chunk)?.into_iter().for_each(keep);
            }
            Ok(())
        })?;
        Ok((owners, pieces))
    }

    /// Runs `send` on several threads, while others receive build rows. `send` passes the pieces
    /// that this rank keeps on. Returns these, and the pieces that arrive from other ranks.
    fn collect_build(
        &self,
        send: impl Fn(&JoinContext<'_>, &dyn Fn(Piece)) -> Result<()> + Sync,
    ) -> Result<Vec<Piece>> {
        let pieces = Mutex::new(Vec::new());
        let sending = AtomicUsize::new(self.senders());
        let keep = |piece| pieces.lock().push(piece);
        let send = |cx: &JoinContext<'_>| {
            send(cx, &keep)?;
            self.end_channels_after(&sending)
        };
        let receive = |cx: &JoinContext<'_>, from: usize| {
            while let Some(piece) = self.receive(cx, &self.build, from)? {
                keep(piece);
            }
            Ok(())
        };
        self.on_threads(self.senders(), self.receivers(), &send, &receive)?;
        self.into.iter().flatten().for_each(Channel::begin);
        Ok(pieces.into_inner())
    }

    /// Ends the channels to other ranks if no other thread is `sending`.
    fn end_channels_after(&self, sending: &AtomicUsize) -> Result<()> {
        match sending.fetch_sub(1, Ordering::AcqRel) {
            1 => self.out.iter().flatten().try_for_each(|channel| channel.end(&|| self.check())),
            _ => Ok(()),
        }
    }

    /// Lays out and indexes the build rows of this rank. Calls `laid_out` before they are indexed.
    fn prepare(
        &self,
        pieces: Vec<Piece>,
        cx: &JoinContext<'_>,
        laid_out: &mut (dyn FnMut(&KeyLayout) -> Result<()> + Send),
    ) -> Result<PreparedJoin> {
        let rows: usize = pieces.iter().map(|piece| piece.rows).sum();
        check_rank_build_rows(&self.build.input.table.name, rows as u64)?;
        self.monitor.set_build_rows(rows as u64);
        let mut arrived = Some(self.build.arrived(cx, pieces)?);
        let row_layout = self.task.composition.row_layout;
        PreparedJoin::prepare_side(self.preparation.clone(), cx, &mut |layout| {
            let arrived = arrived.take().expect("packed keys need one layout");
            let side = lay_out(cx, &self.build.input, arrived, layout, row_layout)?;
            laid_out(layout)?;
            Ok(side)
        })
    }

    /// Reads this rank's share of the probe side, and joins the rows that it owns. Pieces are
    /// joined together once they have as many rows as a chunk, because some joins pass over all of
    /// the build side each time.
    fn exchange_probe(&self, owners: &Owners, join: &PreparedJoin, probing: &Probing<'_>) -> Result<()> {
        let waiting = WaitingPieces::new(self.chunk_rows(&self.probe, 0..self.probe.input.table.rows));
        let (sending, working) = (AtomicUsize::new(self.senders()), AtomicUsize::new(self.threads()));
        let join_pieces = |cx: &JoinContext<'_>, pieces: Vec<Piece>| {
            if pieces.is_empty() {
                return Ok(());
            }
            run_on_device_pool(cx.device, || {
                let rows = pieces.iter().map(|piece| piece.rows as u64).sum();
                let chunk = Chunk { segment: self.probe.input.clone(), rows: 0..rows };
                let arrived = self.probe.arrived(cx, pieces)?;
                let row_layout = self.task.composition.row_layout;
                let side = lay_out(cx, &self.probe.input, arrived, self.layout(), row_layout)?;
                probing.join_chunk(cx, self.threads(), &chunk, &side)
            })
        };
        let finish = |cx: &JoinContext<'_>| match working.fetch_sub(1, Ordering::AcqRel) {
            1 => join_pieces(cx, waiting.take()),
            _ => Ok(()),
        };
        let send = |cx: &JoinContext<'_>| {
            cx.device.wait_event(&join.ready, cx.stream)?;
            while let Some(rows) = self.next_chunk(&self.probe) {
                self.check()?;
                let chunk = self.read_chunk(cx, &self.probe, rows)?;
                let own = self.send_chunk(cx, &self.probe, owners, &chunk)?;
                drop(chunk);
                if let Some(own) = own {
                    join_pieces(cx, waiting.add(own))?;
                }
            }
            self.end_channels_after(&sending)?;
            finish(cx)
        };
        let receive = |cx: &JoinContext<'_>, from: usize| {
            cx.device.wait_event(&join.ready, cx.stream)?;
            while let Some(piece) = self.receive(cx, &self.probe, from)? {
                join_pieces(cx, waiting.add(piece))?;
            }
            finish(cx)
        };
        self.on_threads(self.senders(), self.receivers(), &send, &receive)
    }
}

/// Pieces that wait for others, to be joined together.
struct WaitingPieces {
    /// Rows to join together.
    rows: u64,
    pieces: Mutex<Vec<Piece>>,
}

impl WaitingPieces {
    fn new(rows: u64) -> Self {
        Self { rows, pieces: Mutex::default() }
    }

    /// Adds a piece. Returns all pieces if they have enough rows, and otherwise none.
    fn add(&self, piece: Piece) -> Vec<Piece> {
        let mut pieces = self.pieces.lock();
        pieces.push(piece);
        let rows: u64 = pieces.iter().map(|piece| piece.rows as u64).sum();
        if rows < self.rows { Vec::new() } else { std::mem::take(&mut *pieces) }
    }

    fn take(&self) -> Vec<Piece> {
        std::mem::take(&mut *self.pieces.lock())
    }
}
