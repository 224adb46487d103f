//! Turns matched rows into batches of the result.
//!
//! The device or the host gathers most columns, and writes them to the result's own memory. Some
//! joins have each row of a slice of the probe side in the result once, for example if every
//! order line has its order. The table then stores the columns of that side as the result needs
//! them, and the result shares them: they cross no link, and are not written again. Batches of the
//! result then end where the batches of the table do.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{Array, ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::datatypes::{FieldRef, Schema, SchemaRef};

use super::batch_sizes::BatchSizes;
use super::column_gather::{ArrayAssembler, ColumnGather, PendingColumn, SideRows, Sides};
use super::context::JoinContext;
use super::inputs::SideInput;
use super::transform::TransformedSide;
use super::{BatchSink, OutputSource, Side, Task};
use crate::columns::{KeyLayout, Role};
use crate::device::{Event, Phase, Positions};
use crate::memory::ArenaReservation;
use crate::{Error, Result};

/// Makes batches of the result.
pub(super) struct Materializer<'a> {
    pub(super) cx: &'a JoinContext<'a>,
    pub(super) task: &'a Task,
    pub(super) layout: &'a KeyLayout,
    pub(super) build: &'a SideInput,
    pub(super) probe: &'a SideInput,
    pub(super) sink: &'a dyn BatchSink,
    pub(super) sizes: BatchSizes,
}

/// Source of a column's values: a column of one side, and perhaps a column of the other side for
/// rows that the first side lacks.
struct Source {
    first: (Role, usize),
    otherwise: Option<(Role, usize)>,
}

impl Source {
    /// True if the only source is a column of `role` for which `holds` returns true.
    fn is_of(&self, role: Role, holds: impl FnOnce(usize) -> bool) -> bool {
        self.otherwise.is_none() && self.first.0 == role && holds(self.first.1)
    }
}

/// Rows processed at once: some of the rows emitted together, or of the rows that wait for the same
/// part of the build side.
struct RowSlice {
    part: usize,
    range: Range<usize>,
}

/// Columns of the probe side, for rows whose columns of the build side come later.
pub(super) struct PartialBatch {
    /// Source of each column of the result, and its values if it has any yet.
    columns: Vec<(Role, usize, Option<PendingColumn>)>,
}

/// Rows of one join of a chain: a part of the columns of rows that several joins make.
pub(super) struct ChainPart<'a> {
    pub(super) materializer: Materializer<'a>,
    pub(super) build: SideRows<'a>,
    pub(super) probe: SideRows<'a>,
}

/// [`PartialBatch`] in host memory. The rows are in the order in which they were queued.
pub(super) struct StoredPartialBatch {
    /// Source of each column of the result, and its values if it has any yet.
    columns: Vec<(Role, usize, Option<ArrayRef>)>,
    /// Reservations from [`ArrayAssembler::paid`].
    _paid: Vec<ArenaReservation>,
}

/// Some rows of a partial batch, with the rows of the build side that complete them.
pub(super) struct Group<'a> {
    pub(super) partial: &'a StoredPartialBatch,
    /// Row numbers of all rows of the partial batch, each within its part of the build side.
    pub(super) build: &'a Positions,
    pub(super) part: usize,
    /// Rows of the partial batch that belong to this part.
    pub(super) range: Range<usize>,
}

/// Rows whose columns are queued.
struct InFlight {
    range: Range<usize>,
    /// Lengths of the consecutive slices that make up the rows.
    slices: Vec<usize>,
    columns: Vec<PendingColumn>,
    complete: Event,
}

impl Materializer<'_> {
    /// Emits `rows` rows with the two sides side by side. Takes device and host memory for a few
    /// batches at a time, however many rows there are. A stopped job ends between two batches.
    /// Calls `emitted` after each batch with the number of rows that have left.
    ///
    /// # Errors
    /// Errors of the device and the sink, and [`Error::Exhausted`] when the arena is full.
    pub(super) fn emit(
        &self,
        build: &SideRows<'_>,
        probe: &SideRows<'_>,
        rows: usize,
        emitted: &mut dyn FnMut(usize),
    ) -> Result<()> {
        if self.task.counts_rows {
            return self.count(rows, emitted);
        }
        let at_once = self.sizes.gather_rows.min(self.rows_that_fit());
        self.emit_pieces(pieces(0, rows, at_once), &mut |piece| self.queue(build, probe, &piece.range), emitted)
    }

    /// Emits the rows of groups, after their columns of the probe side have left. Groups of the
    /// same part of the build side are adjacent. `part` returns the rows of a part in table order,
    /// once their copies are queued. Processes at most `rows_at_once` rows at once.
    ///
    /// # Errors
    /// The errors of [`emit`](Self::emit) and of `part`.
    pub(super) fn emit_deferred(
        &self,
        groups: &[Group<'_>],
        rows_at_once: usize,
        part: &mut dyn FnMut(usize) -> Result<TransformedSide>,
    ) -> Result<()> {
        // Gather groups of a part together, also from several chunks, because copies of only a
        // megabyte leave a sixth of the link unused.
        let parts: Vec<&[Group<'_>]> = groups.chunk_by(|a, b| a.part == b.part).collect();
        let rows_of = |groups: &[Group<'_>]| groups.iter().map(|group| group.range.len()).sum();
        let rows_at_once = rows_at_once.min(self.rows_that_fit());
        let pieces_of = |(part, groups): (usize, &&[Group<'_>])| pieces(part, rows_of(groups), rows_at_once);
        let pieces = parts.iter().enumerate().flat_map(pieces_of);
        let mut current = None;
        let mut queue = |piece: &RowSlice| {
            let groups = parts[piece.part];
            let number = groups[0].part;
            let transformed = match current.take() {
                Some((last, transformed)) if last == number => transformed,
                _ => part(number)?,
            };
            let (_, transformed) = current.insert((number, transformed));
            self.queue_deferred(groups, transformed, &piece.range)
        };
        self.emit_pieces(pieces, &mut queue, &mut |_| {})
    }

    /// Emits `rows` rows with the columns of several joins side by side, as [`emit`](Self::emit)
    /// does. `columns` has the part of each column of the result, and the column's number in it.
    ///
    /// # Errors
    /// The errors of [`emit`](Self::emit).
    pub(super) fn emit_parts(&self, parts: &[ChainPart<'_>], columns: &[(usize, usize)], rows: usize) -> Result<()> {
        let at_once = self.sizes.gather_rows.min(self.rows_that_fit() / parts.len());
        let mut queue = |piece: &RowSlice| {
            let of_part = |part: &ChainPart<'_>| part.materializer.queue(&part.build, &part.probe, &piece.range);
            let mut queued = parts.iter().map(of_part).collect::<Result<Vec<InFlight>>>()?;
            // Only the first part has rows in table order, which its table may share.
            let slices = std::mem::take(&mut queued[0].slices);
            let mut given: Vec<Vec<Option<PendingColumn>>> =
                queued.into_iter().map(|part| part.columns.into_iter().map(Some).collect()).collect();
            let mut take = |&(part, column): &(usize, usize)| given[part][column].take().expect("each column once");
            let columns = columns.iter().map(&mut take).collect();
            let complete = self.cx.device.record_event(self.cx.stream)?;
            Ok(InFlight { range: piece.range.clone(), slices, columns, complete })
        };
        self.emit_pieces(pieces(0, rows, at_once.max(1)), &mut queue, &mut |_| {})
    }

    fn emit_pieces(
        &self,
        mut pieces: impl Iterator<Item = RowSlice>,
        queue: &mut dyn FnMut(&RowSlice) -> Result<InFlight>,
        emitted: &mut dyn FnMut(usize),
    ) -> Result<()> {
        // If the device overlaps copies with other work, queue the next rows before the host waits
        // for the previous ones.
        let in_flight_max = if self.cx.device.tuning().streams > 1 { 1 } else { 0 };
        let mut in_flight = VecDeque::new();
        // Time at which memory for the next rows ran out.
        let mut starved_since = None;
        // Halves of pieces that were too large. The last one is processed next.
        let mut parts: Vec<RowSlice> = Vec::new();
        while let Some(piece) = parts.pop().or_else(|| pieces.next()) {
            match queue(&piece) {
                Ok(queued) => {
                    starved_since = None;
                    in_flight.push_back(queued);
                }
                Err(error @ Error::Exhausted(_)) => {
                    // The failed piece holds host memory until the stream is done with the work
                    // queued for it.
                    self.cx.device.synchronize(self.cx.stream)?;
                    if let Some(first) = in_flight.pop_front() {
                        self.push(first, emitted)?;
                        parts.push(piece);
                    } else if piece.range.len() > self.sizes.batch_rows {
                        parts.extend(piece.halves());
                    } else if self.sink.wait_for_readers(*starved_since.get_or_insert_with(Instant::now))? {
                        parts.push(piece);
                    } else if piece.range.len() > PIECE_ROWS_MIN {
                        // Other streams may hold the memory that is short, and a smaller piece
                        // needs less.
                        parts.extend(piece.halves());
                    } else {
                        return Err(error);
                    }
                }
                // Pieces are sized by the mean length of text. This piece has more text than one
                // batch or memory can hold, so halve it.
                Err(Error::TooLong(_)) if piece.range.len() > 1 => parts.extend(piece.halves()),
                Err(error) => return Err(error),
            }
            if in_flight.len() > in_flight_max
                && let Some(first) = in_flight.pop_front()
            {
                self.push(first, emitted)?;
            }
        }
        in_flight.into_iter().try_for_each(|queued| self.push(queued, emitted))
    }

    /// Pushes the number of rows, for joins that only count.
    ///
    /// # Errors
    /// Errors of the sink, and [`Error::Cancelled`] if the job was stopped.
    pub(super) fn count(&self, rows: usize, emitted: &mut dyn FnMut(usize)) -> Result<()> {
        self.cx.monitor.cancel().check()?;
        self.sink.push(batch_of(&Arc::new(Schema::empty()), Vec::new(), rows)?)?;
        emitted(rows);
        Ok(())
    }

    /// Waits for queued rows, and pushes them.
    fn push(&self, in_flight: InFlight, emitted: &mut dyn FnMut(usize)) -> Result<()> {
        let InFlight { range, slices, columns, complete } = in_flight;
        let shared: Vec<bool> = columns.iter().map(|column| matches!(column, PendingColumn::Shared(_))).collect();
        // Holds reservations until the sink has the batches.
        let mut assembler = ArrayAssembler { arena: self.cx.arena, paid: Vec::new() };
        // One array for each slice, or one for all.
        let columns = self.cx.monitor.phase(Phase::Gather, 0, || {
            self.cx.device.wait(&complete, self.cx.stream)?;
            columns
                .into_iter()
                .zip(self.task.schema.fields())
                .map(|(column, field)| match column {
                    PendingColumn::Shared(arrays) | PendingColumn::Left(arrays) => Ok(arrays),
                    gathered => Ok(vec![assembler.finish(gathered, field)?]),
                })
                .collect::<Result<Vec<Vec<ArrayRef>>>>()
        })?;
        let mut start = 0;
        for (number, &rows) in slices.iter().enumerate() {
            let of_slice = |arrays: &Vec<ArrayRef>| match slices.len() == arrays.len() {
                true => arrays[number].clone(),
                false => arrays[0].slice(start, rows),
            };
            let batch = batch_of(&self.task.schema, columns.iter().map(of_slice).collect(), rows)?;
            for from in (0..rows).step_by(self.sizes.batch_rows) {
                self.cx.monitor.cancel().check()?;
                let length = self.sizes.batch_rows.min(rows - from);
                self.sink.push_sharing(batch.slice(from, length), &shared)?;
                emitted(range.start + start + from + length);
            }
            start += rows;
        }
        Ok(())
    }

    /// Returns the rows whose positions and row numbers of both sides, 16 bytes per row, fit in a
    /// quarter of free memory.
    fn rows_that_fit(&self) -> usize {
        ((self.cx.device.memory().free_bytes() / 4 / 16) as usize).max(256)
    }

    /// Queues the work that makes a range of rows.
    fn queue(&self, build: &SideRows<'_>, probe: &SideRows<'_>, range: &Range<usize>) -> Result<InFlight> {
        let rows = range.len();
        let mut sides = self.cx.monitor.phase(Phase::Gather, 0, || {
            Ok(Sides {
                build: self.column_gather(Role::Build, build.part(range, self.cx)?, rows),
                probe: self.column_gather(Role::Probe, probe.part(range, self.cx)?, rows),
            })
        })?;
        if [&sides.build, &sides.probe].iter().all(|side| !side.is_missing() && !side.nullable()) {
            (sides.build.are_matched, sides.probe.are_matched) = (true, true);
        }
        let fields = self.task.schema.fields();
        let sources: Vec<Source> = self.task.output.iter().map(|output| self.source(output.source, &sides)).collect();
        // Batches can end where the slices of one side end, but not where those of both sides do.
        let shared_side = [Role::Probe, Role::Build].into_iter().find(|&role| {
            let side = sides.of(role);
            sources.iter().zip(fields).any(|(source, field)| source.is_of(role, |column| side.may_share(column, field)))
                && sides.of_mut(role).find_slices(self.sizes)
        });
        let slices = match shared_side.and_then(|role| sides.of(role).slices.as_ref()) {
            Some(slices) => slices.iter().map(|slice| slice.rows.len()).collect(),
            None => vec![rows],
        };
        let is_shared = |source: &Source, field: &FieldRef| {
            shared_side.is_some_and(|role| source.is_of(role, |column| sides.of(role).may_share(column, field)))
        };
        let shared: Vec<bool> = sources.iter().zip(fields).map(|(source, field)| is_shared(source, field)).collect();
        let planned: Vec<(Source, bool)> = sources.into_iter().zip(shared).collect();
        for (source, _) in planned.iter().filter(|(_, is_shared)| !is_shared) {
            for (role, column) in [Some(source.first), source.otherwise].into_iter().flatten() {
                sides.of_mut(role).ask_for(column)?;
            }
        }
        self.cx.monitor.counted_phase(Phase::Gather, |moved| {
            self.gather_moved(&mut [&mut sides.build, &mut sides.probe])?;
            let mut columns = Vec::with_capacity(planned.len());
            for (Source { first, otherwise }, is_shared) in planned {
                // Mapping a column's memory may take a while, so look at the cancel flag first.
                self.cx.monitor.cancel().check()?;
                let mut take = |(role, column): (Role, usize)| {
                    let side = sides.of_mut(role);
                    let bytes = side.width_bytes(column) * rows as u64;
                    if is_shared {
                        moved.in_place_bytes += bytes;
                        return Ok(side.share(column));
                    }
                    moved.bytes += 2 * bytes;
                    side.gather(column)
                };
                let first = take(first)?;
                columns.push(match otherwise {
                    Some(otherwise) => PendingColumn::Either(Box::new(first), Box::new(take(otherwise)?)),
                    None => first,
                });
            }
            let complete = self.cx.device.record_event(self.cx.stream)?;
            Ok(InFlight { range: range.clone(), slices, columns, complete })
        })
    }

    /// Queues the columns of the probe side alone, for rows in which both sides have a row.
    ///
    /// # Errors
    /// Errors of the device, and [`Error::Exhausted`] when the arena is full.
    pub(super) fn queue_partial(&self, probe: SideRows<'_>, rows: usize) -> Result<PartialBatch> {
        let mut side = self.column_gather(Role::Probe, probe, rows);
        side.are_matched = true;
        let givers = || self.task.output.iter().map(|output| self.giver(output.source));
        for (_, column) in givers().filter(|&(role, _)| role == Role::Probe) {
            side.ask_for(column)?;
        }
        self.cx.monitor.counted_phase(Phase::Gather, |moved| {
            self.gather_moved(&mut [&mut side])?;
            let columns = givers().map(|(role, column)| {
                self.cx.monitor.cancel().check()?;
                if role == Role::Build {
                    return Ok((role, column, None));
                }
                moved.bytes += 2 * side.width_bytes(column) * rows as u64;
                Ok((role, column, Some(side.gather(column)?)))
            });
            Ok(PartialBatch { columns: columns.collect::<Result<_>>()? })
        })
    }

    /// Finishes a partial batch whose copies are done.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when there is no host memory for values that are decoded from a
    /// dictionary.
    pub(super) fn finish_partial(&self, partial: PartialBatch) -> Result<StoredPartialBatch> {
        let mut assembler = ArrayAssembler { arena: self.cx.arena, paid: Vec::new() };
        let columns =
            partial.columns.into_iter().zip(self.task.schema.fields()).map(|((role, column, there), field)| {
                let there = there.map(|there| assembler.finish(there, field)).transpose()?;
                Ok((role, column, there))
            });
        let columns = columns.collect::<Result<_>>()?;
        Ok(StoredPartialBatch { columns, _paid: assembler.paid })
    }

    /// Queues the columns of the build side for rows whose columns of the probe side have left.
    /// `range` selects rows of the groups, counted from the first row of the first group.
    fn queue_deferred(&self, groups: &[Group<'_>], part: &TransformedSide, range: &Range<usize>) -> Result<InFlight> {
        let JoinContext { device, stream, monitor, .. } = *self.cx;
        let rows = range.len();
        let taken = taken_of(groups, range);
        let lists: Vec<_> = taken.iter().map(|(group, rows)| (group.build, rows.clone())).collect();
        let numbers = monitor.phase(Phase::Gather, 0, || device.concat(&lists, stream))?;
        let rows_of_part = SideRows::Numbered(part, numbers);
        let mut side = self.column_gather(Role::Build, rows_of_part, rows);
        side.are_matched = true;
        for (_, column, _) in groups[0].partial.columns.iter().filter(|(role, ..)| *role == Role::Build) {
            side.ask_for(*column)?;
        }
        monitor.counted_phase(Phase::Gather, |moved| {
            self.gather_moved(&mut [&mut side])?;
            let columns = groups[0].partial.columns.iter().enumerate().map(|(at, (role, column, _))| {
                monitor.cancel().check()?;
                if *role == Role::Build {
                    moved.bytes += 2 * side.width_bytes(*column) * rows as u64;
                    return side.gather(*column);
                }
                let left = |(group, rows): &(&Group<'_>, Range<usize>)| {
                    let there = group.partial.columns[at].2.as_ref().expect("probe columns are complete");
                    there.slice(rows.start, rows.len())
                };
                Ok(PendingColumn::Left(taken.iter().map(left).collect()))
            });
            let columns = columns.collect::<Result<_>>()?;
            let complete = device.record_event(stream)?;
            let slices = taken.iter().map(|(_, rows)| rows.len()).collect();
            Ok(InFlight { range: range.clone(), slices, columns, complete })
        })
    }

    /// Returns the gather of `count` rows of one side.
    fn column_gather<'g>(&'g self, role: Role, rows: SideRows<'g>, count: usize) -> ColumnGather<'g> {
        let input = match role {
            Role::Build => self.build,
            Role::Probe => self.probe,
        };
        ColumnGather::new(self.cx, self.layout, self.task.composition.row_layout, input, rows, count)
    }

    /// Gathers the columns asked for that the device moves. One copy takes several columns across a
    /// link.
    fn gather_moved(&self, sides: &mut [&mut ColumnGather<'_>]) -> Result<()> {
        let JoinContext { device, stream, arena, monitor, .. } = *self.cx;
        // Mapping the columns' memory may take a while, so look at the cancel flag first.
        monitor.cancel().check()?;
        let mut moved = Vec::new();
        for (at, side) in sides.iter_mut().enumerate() {
            for column in std::mem::take(&mut side.asked_for) {
                if let Some((values, positions)) = side.moved_at(column)? {
                    moved.push((at, column, values, positions));
                }
            }
        }
        let columns: Vec<_> = moved.iter().map(|(_, _, values, positions)| (values, positions)).collect();
        let gathered = device.gather_all_to_host(&columns, arena, stream)?;
        for ((at, column, ..), gathered) in moved.iter().zip(gathered) {
            sides[*at].gathered.insert(*column, gathered);
        }
        Ok(())
    }

    /// Returns the side and the column that give a column of the result, for rows in which both
    /// sides have a row. If both sides' keys look alike, the probe side gives the key, because
    /// probe rows are in order.
    fn giver(&self, source: OutputSource) -> (Role, usize) {
        match source {
            OutputSource::Column { side, index } => {
                (if side == self.build.side { Role::Build } else { Role::Probe }, index)
            }
            OutputSource::Key { index } => {
                let key = &self.task.keys[index];
                match key.alike || self.probe.side == Side::Left {
                    true => (Role::Probe, key.column(self.probe.side)),
                    false => (Role::Build, key.column(self.build.side)),
                }
            }
        }
    }

    fn source(&self, source: OutputSource, sides: &Sides<'_>) -> Source {
        let giver = self.giver(source);
        let OutputSource::Key { index } = source else { return Source { first: giver, otherwise: None } };
        // The left value where there is a left row, else the right value. If both look alike,
        // either value.
        let key = &self.task.keys[index];
        let (first, second) = match giver.0 {
            Role::Probe => (&sides.probe, &sides.build),
            Role::Build => (&sides.build, &sides.probe),
        };
        let of = |side: &ColumnGather<'_>| (side.input.role, key.column(side.input.side));
        match () {
            () if first.is_missing() => Source { first: of(second), otherwise: None },
            () if !first.nullable() => Source { first: of(first), otherwise: None },
            // An existing row with a null key has matched a null, so either side gives a null.
            () => Source { first: of(first), otherwise: Some(of(second)) },
        }
    }
}

impl RowSlice {
    /// Returns the second half, and the first half.
    fn halves(&self) -> [Self; 2] {
        let (part, Range { start, end }) = (self.part, self.range.clone());
        let middle = start + (end - start) / 2;
        [Self { part, range: middle..end }, Self { part, range: start..middle }]
    }
}

/// Divides `rows` rows of a part into pieces of `at_once` rows.
fn pieces(part: usize, rows: usize, at_once: usize) -> impl Iterator<Item = RowSlice> {
    (0..rows).step_by(at_once).map(move |start| RowSlice { part, range: start..rows.min(start + at_once) })
}

/// Returns the groups that overlap `range`, and the overlapping rows of each group. `range` counts
/// the rows of all groups together.
fn taken_of<'g, 'a>(groups: &'g [Group<'a>], range: &Range<usize>) -> Vec<(&'g Group<'a>, Range<usize>)> {
    let mut start = 0;
    let of_group = |group: &'g Group<'a>| {
        let (from, to) = (range.start.max(start), range.end.min(start + group.range.len()));
        let offset = group.range.start;
        let taken = (from < to).then(|| (group, offset + from - start..offset + to - start));
        start += group.range.len();
        taken
    };
    groups.iter().filter_map(of_group).collect()
}

fn batch_of(schema: &SchemaRef, columns: Vec<ArrayRef>, rows: usize) -> Result<RecordBatch> {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options)
        .map_err(|error| Error::Internal(format!("assembling a batch of the result: {error}")))
}

/// Pieces of more rows than this are still halved if memory is short, however small batches become.
const PIECE_ROWS_MIN: usize = 64;
