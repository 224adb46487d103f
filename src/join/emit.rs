//! From matched rows to batches of the result.
//!
//! Most columns are gathered, by the device or on the host, and written to memory of the result's own. But when each row of a
//! stretch of the probe side is in the result once, as where every order line has its order, then the columns of that side
//! lie in the table as the result has them, and the result shares them: they cross no link, and nobody writes them again.
//! Batches of the result then end where those of the table do.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::compute::kernels::zip::zip;
use arrow::compute::{CastOptions, cast_with_options, is_null};
use arrow::datatypes::{DataType, FieldRef, Schema, SchemaRef, UInt32Type};

use super::arrange::{Arranged, Workshop, is_raw_key};
use super::inputs::SideInput;
use super::late::LateChunk;
use super::run::beside;
use super::{BatchSink, OutputSource, Side, Task};
use crate::columns::{
    KeyLayout, Role, Stretch, bytes_array, decoded_bytes, encode, encode_again, fixed_array, gather_on_host,
    lies_by_row, rows_max, with_wanted_keys,
};
use crate::device::{Column, Device, DeviceBuffer, Event, HostBytes, HostColumn, Positions};
use crate::human::type_name;
use crate::memory::{Arena, Held};
use crate::{Error, Result};

/// The rows of one side that a batch is made of.
pub(super) enum SideRows<'a> {
    /// At arranged positions.
    Arranged(&'a Arranged, Positions),
    /// By row number.
    Numbered(&'a Arranged, Positions),
    /// No rows of this side: nulls.
    Missing,
}

impl<'a> SideRows<'a> {
    /// Some of these rows.
    fn part(&self, range: &Range<usize>, shop: &Workshop<'_>) -> Result<SideRows<'a>> {
        let part = |positions| shop.device.compose(positions, &Positions::Range(range.clone()), shop.stream);
        Ok(match self {
            Self::Arranged(arranged, positions) => Self::Arranged(arranged, part(positions)?),
            Self::Numbered(arranged, numbers) => Self::Numbered(arranged, part(numbers)?),
            Self::Missing => Self::Missing,
        })
    }
}

/// Makes batches of the result.
pub(super) struct Emitter<'a> {
    pub(super) shop: &'a Workshop<'a>,
    pub(super) task: &'a Task,
    pub(super) layout: &'a KeyLayout,
    pub(super) build: &'a SideInput,
    pub(super) probe: &'a SideInput,
    pub(super) sink: &'a dyn BatchSink,
    /// Sizes of batches.
    pub(super) sizes: BatchSizes,
    /// Where columns of the build side come last: the rows of this chunk that wait for them.
    pub(super) late: Option<&'a LateChunk<'a>>,
}

/// How many rows are treated together on their way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchSizes {
    /// Rows per batch, at most.
    pub(super) batch_rows: usize,
    /// Rows that are gathered at once: as many batches as make up what a device gathers at once, and at least one.
    pub(super) gather_rows: usize,
    /// Bytes that a device gathers at once.
    gather_bytes: usize,
    /// Rows of one array, at most.
    rows_max: usize,
}

/// A column on its way: device columns are complete only after what was queued for them is done.
enum Pending {
    /// As it lies in the table, a stretch at a time.
    Shared(Vec<ArrayRef>),
    FromDevice(HostColumn, DataType, Option<ArrayRef>),
    TextFromDevice(HostBytes, DataType),
    Ready(ArrayRef),
    /// As it left before, a stretch at a time.
    Left(Vec<ArrayRef>),
    /// Gathered from batches that share no dictionary: it has one of its own, with 32-bit keys.
    Encoded(ArrayRef),
    /// The first, and where that is null, the second.
    Either(Box<Pending>, Box<Pending>),
}

/// Where the values of a column come from: a column of a side, and where that side has no row, one of the other.
struct Source {
    first: (Role, usize),
    otherwise: Option<(Role, usize)>,
}

impl Source {
    /// Whether it is a column of that side alone for which that holds.
    fn is_of(&self, role: Role, holds: impl FnOnce(usize) -> bool) -> bool {
        self.otherwise.is_none() && self.first.0 == role && holds(self.first.1)
    }
}

/// Rows that are treated at once: some of all that are emitted together, or of those that wait for the same part of the build side.
struct Piece {
    part: usize,
    range: Range<usize>,
}

/// Columns of the probe side, of rows whose columns of the build side come later.
pub(super) struct Half {
    /// Where each column of the result comes from, and what there is of it.
    columns: Vec<(Role, usize, Option<Pending>)>,
}

/// The same, in host memory. The rows stand in the order in which they were queued.
pub(super) struct HalfThere {
    /// Where each column of the result comes from, and what there is of it.
    columns: Vec<(Role, usize, Option<ArrayRef>)>,
    /// As of [`Finisher::paid`].
    _paid: Vec<Held>,
}

/// Some rows of a half, with the rows of the build side that they are to stand beside.
pub(super) struct Group<'a> {
    pub(super) half: &'a HalfThere,
    /// Row numbers of all rows of the half, each within the part of the build side that it lies in.
    pub(super) build: &'a Positions,
    /// Which part that is.
    pub(super) part: usize,
    /// Which of the rows: those of this part.
    pub(super) range: Range<usize>,
}

/// Rows on their way.
struct InFlight {
    range: Range<usize>,
    /// The lengths of the stretches that they are made of, one batch after the other.
    stretches: Vec<usize>,
    columns: Vec<Pending>,
    /// When they are complete.
    complete: Event,
}

impl Emitter<'_> {
    /// Emits `rows` rows, the two sides side by side. However many there are, they take device and host memory for a few
    /// batches at a time, and a job that is stopped stops between two batches. `emitted` is told how many rows have left
    /// after each batch.
    ///
    /// # Errors
    /// The device's, the sink's, and [`Error::Exhausted`] when the arena is full.
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

    /// Emits the rows of groups whose columns of the probe side have left before, those of each part of the build side next to each other.
    /// `part` answers the rows of that part, as they lie in its table, once they are on their way; `rows_at_once` of them are treated at
    /// once.
    ///
    /// # Errors
    /// As of [`emit`](Self::emit), and those of `part`.
    pub(super) fn emit_rest(
        &self,
        groups: &[Group<'_>],
        rows_at_once: usize,
        part: &mut dyn FnMut(usize) -> Result<Arranged>,
    ) -> Result<()> {
        // Those of a part are gathered together, whatever chunks they are of: copies of a megabyte leave a sixth of the link unused.
        let parts: Vec<&[Group<'_>]> = groups.chunk_by(|a, b| a.part == b.part).collect();
        let rows_of = |groups: &[Group<'_>]| groups.iter().map(|group| group.range.len()).sum();
        let rows_at_once = rows_at_once.min(self.rows_that_fit());
        let pieces_of = |(part, groups): (usize, &&[Group<'_>])| pieces(part, rows_of(groups), rows_at_once);
        let pieces = parts.iter().enumerate().flat_map(pieces_of);
        let mut current = None;
        let mut queue = |piece: &Piece| {
            let groups = parts[piece.part];
            let number = groups[0].part;
            let arranged = match current.take() {
                Some((last, arranged)) if last == number => arranged,
                _ => part(number)?,
            };
            let (_, arranged) = current.insert((number, arranged));
            self.queue_rest(groups, arranged, &piece.range)
        };
        self.emit_pieces(pieces, &mut queue, &mut |_| {})
    }

    fn emit_pieces(
        &self,
        mut pieces: impl Iterator<Item = Piece>,
        queue: &mut dyn FnMut(&Piece) -> Result<InFlight>,
        emitted: &mut dyn FnMut(usize),
    ) -> Result<()> {
        // Where copies overlap with everything else, the next rows are queued before the last ones are waited for.
        let in_flight_max = if self.shop.device.info().streams > 1 { 1 } else { 0 };
        let mut in_flight = VecDeque::new();
        // Since when there is no memory for the next rows.
        let mut short_since = None;
        // Parts of a piece that was too large, the first one last.
        let mut parts: Vec<Piece> = Vec::new();
        while let Some(piece) = parts.pop().or_else(|| pieces.next()) {
            match queue(&piece) {
                Ok(queued) => {
                    short_since = None;
                    in_flight.push_back(queued);
                }
                Err(error @ Error::Exhausted(_)) => {
                    // Host memory that was taken for it is held until the stream has come so far.
                    self.shop.device.synchronize(self.shop.stream)?;
                    if let Some(first) = in_flight.pop_front() {
                        self.push(first, emitted)?;
                        parts.push(piece);
                    } else if piece.range.len() > self.sizes.batch_rows {
                        parts.extend(piece.halves());
                    } else if self.sink.wait_for_readers(*short_since.get_or_insert_with(Instant::now))? {
                        parts.push(piece);
                    } else if piece.range.len() > PIECE_ROWS_MIN {
                        // Other streams may hold what is short, and less will do.
                        parts.extend(piece.halves());
                    } else {
                        return Err(error);
                    }
                }
                // How long text is is known on average only: this is too long for the offsets of one batch, or for memory.
                Err(Error::Invalid(_)) if piece.range.len() > 1 => parts.extend(piece.halves()),
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

    /// Says how many rows there are, where only that is wanted.
    ///
    /// # Errors
    /// The sink's, and that the job was stopped.
    pub(super) fn count(&self, rows: usize, emitted: &mut dyn FnMut(usize)) -> Result<()> {
        self.shop.monitor.cancel().check()?;
        self.sink.push(batch_of(&Arc::new(Schema::empty()), Vec::new(), rows)?)?;
        emitted(rows);
        Ok(())
    }

    /// Pushes rows that are on their way, when they are there.
    fn push(&self, in_flight: InFlight, emitted: &mut dyn FnMut(usize)) -> Result<()> {
        let InFlight { range, stretches, columns, complete } = in_flight;
        let shared: Vec<bool> = columns.iter().map(|column| matches!(column, Pending::Shared(_))).collect();
        // Until the batches are in the sink's hands.
        let mut finisher = Finisher { arena: self.shop.arena, paid: Vec::new() };
        // An array for each stretch, or one for all.
        let columns = self.shop.monitor.phase("gather", 0, || {
            self.shop.device.wait(&complete, self.shop.stream)?;
            columns
                .into_iter()
                .zip(self.task.schema.fields())
                .map(|(column, field)| match column {
                    Pending::Shared(arrays) | Pending::Left(arrays) => Ok(arrays),
                    gathered => Ok(vec![finisher.finish(gathered, field)?]),
                })
                .collect::<Result<Vec<Vec<ArrayRef>>>>()
        })?;
        let mut start = 0;
        for (number, &rows) in stretches.iter().enumerate() {
            let of_stretch = |arrays: &Vec<ArrayRef>| match stretches.len() == arrays.len() {
                true => arrays[number].clone(),
                false => arrays[0].slice(start, rows),
            };
            let batch = batch_of(&self.task.schema, columns.iter().map(of_stretch).collect(), rows)?;
            for from in (0..rows).step_by(self.sizes.batch_rows) {
                self.shop.monitor.cancel().check()?;
                let length = self.sizes.batch_rows.min(rows - from);
                self.sink.push_sharing(batch.slice(from, length), &shared)?;
                emitted(range.start + start + from + length);
            }
            start += rows;
        }
        Ok(())
    }

    /// Rows whose positions and row numbers of both sides, 16 bytes, fit in a quarter of what is free.
    fn rows_that_fit(&self) -> usize {
        ((self.shop.device.memory().free_bytes() / 4 / 16) as usize).max(256)
    }

    /// Queues everything that those rows are made by.
    fn queue(&self, build: &SideRows<'_>, probe: &SideRows<'_>, range: &Range<usize>) -> Result<InFlight> {
        let rows = range.len();
        let mut sides = self.shop.monitor.phase("gather", 0, || {
            Ok(Sides {
                build: Gatherer::new(self, self.build, build.part(range, self.shop)?, rows),
                probe: Gatherer::new(self, self.probe, probe.part(range, self.shop)?, rows),
            })
        })?;
        if [&sides.build, &sides.probe].iter().all(|side| !side.is_missing() && !side.may_miss()) {
            (sides.build.are_matched, sides.probe.are_matched) = (true, true);
        }
        let fields = self.task.schema.fields();
        let sources: Vec<Source> = self.task.output.iter().map(|output| self.source(output.source, &sides)).collect();
        // Only one of them can be cut where its batches end.
        let shared_side = [Role::Probe, Role::Build].into_iter().find(|&role| {
            let side = sides.of(role);
            sources.iter().zip(fields).any(|(source, field)| source.is_of(role, |column| side.may_share(column, field)))
                && sides.of_mut(role).find_stretches(self.sizes)
        });
        let stretches = match shared_side.and_then(|role| sides.of(role).stretches.as_ref()) {
            Some(stretches) => stretches.iter().map(|stretch| stretch.rows.len()).collect(),
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
        self.shop.monitor.counted_phase("gather", |moved| {
            self.gather_moved(&mut [&mut sides.build, &mut sides.probe])?;
            let mut columns = Vec::with_capacity(planned.len());
            for (Source { first, otherwise }, is_shared) in planned {
                // A column's memory may have to be mapped first, which takes a while.
                self.shop.monitor.cancel().check()?;
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
                    Some(otherwise) => Pending::Either(Box::new(first), Box::new(take(otherwise)?)),
                    None => first,
                });
            }
            let complete = self.shop.device.record_event(self.shop.stream)?;
            Ok(InFlight { range: range.clone(), stretches, columns, complete })
        })
    }

    /// Queues the columns of the probe side alone, of rows in which both sides have a row.
    ///
    /// # Errors
    /// The device's, and [`Error::Exhausted`] when the arena is full.
    pub(super) fn queue_half(&self, probe: SideRows<'_>, rows: usize) -> Result<Half> {
        let mut side = Gatherer { are_matched: true, ..Gatherer::new(self, self.probe, probe, rows) };
        let givers = || self.task.output.iter().map(|output| self.giver(output.source));
        for (_, column) in givers().filter(|&(role, _)| role == Role::Probe) {
            side.ask_for(column)?;
        }
        self.shop.monitor.counted_phase("gather", |moved| {
            self.gather_moved(&mut [&mut side])?;
            let columns = givers().map(|(role, column)| {
                self.shop.monitor.cancel().check()?;
                if role == Role::Build {
                    return Ok((role, column, None));
                }
                moved.bytes += 2 * side.width_bytes(column) * rows as u64;
                Ok((role, column, Some(side.gather(column)?)))
            });
            Ok(Half { columns: columns.collect::<Result<_>>()? })
        })
    }

    /// A half whose copies are done.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when there is no host memory for values that have to leave their dictionary.
    pub(super) fn finish_half(&self, half: Half) -> Result<HalfThere> {
        let mut finisher = Finisher { arena: self.shop.arena, paid: Vec::new() };
        let columns = half.columns.into_iter().zip(self.task.schema.fields()).map(|((role, column, there), field)| {
            let there = there.map(|there| finisher.finish(there, field)).transpose()?;
            Ok((role, column, there))
        });
        let columns = columns.collect::<Result<_>>()?;
        Ok(HalfThere { columns, _paid: finisher.paid })
    }

    /// Queues the columns of the build side, beside those of the probe side that have left: of those of the groups' rows, counted from the
    /// first of the first group, that lie in `range`.
    fn queue_rest(&self, groups: &[Group<'_>], part: &Arranged, range: &Range<usize>) -> Result<InFlight> {
        let Workshop { device, stream, monitor, .. } = *self.shop;
        let rows = range.len();
        let taken = taken_of(groups, range);
        let lists: Vec<_> = taken.iter().map(|(group, rows)| (group.build, rows.clone())).collect();
        let numbers = monitor.phase("gather", 0, || device.concat(&lists, stream))?;
        let rows_of_part = SideRows::Numbered(part, numbers);
        let mut side = Gatherer { are_matched: true, ..Gatherer::new(self, self.build, rows_of_part, rows) };
        for (_, column, _) in groups[0].half.columns.iter().filter(|(role, ..)| *role == Role::Build) {
            side.ask_for(*column)?;
        }
        monitor.counted_phase("gather", |moved| {
            self.gather_moved(&mut [&mut side])?;
            let columns = groups[0].half.columns.iter().enumerate().map(|(at, (role, column, _))| {
                monitor.cancel().check()?;
                if *role == Role::Build {
                    moved.bytes += 2 * side.width_bytes(*column) * rows as u64;
                    return side.gather(*column);
                }
                let left = |(group, rows): &(&Group<'_>, Range<usize>)| {
                    let there = group.half.columns[at].2.as_ref().expect("columns of the probe side have left");
                    there.slice(rows.start, rows.len())
                };
                Ok(Pending::Left(taken.iter().map(left).collect()))
            });
            let columns = columns.collect::<Result<_>>()?;
            let complete = device.record_event(stream)?;
            let stretches = taken.iter().map(|(_, rows)| rows.len()).collect();
            Ok(InFlight { range: range.clone(), stretches, columns, complete })
        })
    }

    /// Gathers what was asked for of those columns that the device moves, together: one copy takes several across a link.
    fn gather_moved(&self, sides: &mut [&mut Gatherer<'_>]) -> Result<()> {
        let Workshop { device, stream, arena, monitor, .. } = *self.shop;
        // Their memory may have to be mapped first, which takes a while.
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

    /// Which side gives a column of rows in which both have a row. Where both sides' keys look alike, the probe side gives them: its rows
    /// lie in order.
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
        // The left value where there is a left row, else the right value, or if both look alike, either.
        let key = &self.task.keys[index];
        let (first, second) = match giver.0 {
            Role::Probe => (&sides.probe, &sides.build),
            Role::Build => (&sides.build, &sides.probe),
        };
        let of = |gatherer: &Gatherer<'_>| (gatherer.input.role, key.column(gatherer.input.side));
        match () {
            () if first.is_missing() => Source { first: of(second), otherwise: None },
            () if !first.may_miss() => Source { first: of(first), otherwise: None },
            // A key that is null although its row is there has matched a null.
            () => Source { first: of(first), otherwise: Some(of(second)) },
        }
    }
}

impl Piece {
    /// Its second half, and its first.
    fn halves(&self) -> [Self; 2] {
        let (part, Range { start, end }) = (self.part, self.range.clone());
        let middle = start + (end - start) / 2;
        [Self { part, range: middle..end }, Self { part, range: start..middle }]
    }
}

/// So many rows of a part, in pieces of so many.
fn pieces(part: usize, rows: usize, at_once: usize) -> impl Iterator<Item = Piece> {
    (0..rows).step_by(at_once).map(move |start| Piece { part, range: start..rows.min(start + at_once) })
}

/// Which rows of which groups lie in a range of all of their rows.
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

/// Makes the arrays of a batch of what was gathered.
struct Finisher<'a> {
    arena: &'a Arena,
    /// For values that were taken out of their dictionaries, and are many times as large then.
    paid: Vec<Held>,
}

impl Finisher<'_> {
    fn finish(&mut self, column: Pending, field: &FieldRef) -> Result<ArrayRef> {
        let array = match column {
            Pending::Shared(_) | Pending::Left(_) => unreachable!("it is what the result shows"),
            Pending::FromDevice(column, data_type, dictionary) => fixed_array(&data_type, column, dictionary.as_ref())?,
            Pending::TextFromDevice(column, data_type) => bytes_array(&data_type, column)?,
            Pending::Ready(array) => array,
            Pending::Encoded(array) if matches!(field.data_type(), DataType::Dictionary(..)) => {
                return with_wanted_keys(array.as_dictionary::<UInt32Type>(), field.data_type());
            }
            Pending::Encoded(array) => array,
            Pending::Either(first, second) => {
                // Dictionaries of two sides have to become one, by their values.
                let plain = match field.data_type() {
                    DataType::Dictionary(_, values) => {
                        Arc::new(field.as_ref().clone().with_data_type(values.as_ref().clone()))
                    }
                    _ => field.clone(),
                };
                let (first, second) = (self.finish(*first, &plain)?, self.finish(*second, &plain)?);
                is_null(&first).and_then(|missing| zip(&missing, &second, &first)).map_err(|error| {
                    Error::Internal(format!("putting key {:?} together from both sides: {error}", field.name()))
                })?
            }
        };
        // A key of an outer join has a type that holds the values of both sides, and either may have a narrower one.
        match (array.data_type(), field.data_type()) {
            (found, wanted) if found == wanted => Ok(array),
            // Its keys may be of a type that cannot number a dictionary as it lies.
            (DataType::Dictionary(..), wanted @ DataType::Dictionary(..)) => encode_again(&array, wanted),
            (_, wanted @ DataType::Dictionary(..)) => encode(&array, wanted),
            (found, wanted) => {
                let purpose = || format!("column {:?} as its values, out of its dictionary,", field.name());
                match decoded_bytes(&array) {
                    0 => {}
                    bytes => self.paid.push(self.arena.reserve(bytes, &purpose())?),
                }
                let strict = CastOptions { safe: false, ..CastOptions::default() };
                cast_with_options(&array, wanted, &strict).map_err(|error| {
                    let (found, wanted) = (type_name(found), type_name(wanted));
                    Error::Internal(format!("casting column {:?} from {found} to {wanted}: {error}", field.name()))
                })
            }
        }
    }
}

/// Both sides of the rows that are being gathered.
struct Sides<'a> {
    build: Gatherer<'a>,
    probe: Gatherer<'a>,
}

impl<'a> Sides<'a> {
    fn of(&self, role: Role) -> &Gatherer<'a> {
        match role {
            Role::Build => &self.build,
            Role::Probe => &self.probe,
        }
    }

    fn of_mut(&mut self, role: Role) -> &mut Gatherer<'a> {
        match role {
            Role::Build => &mut self.build,
            Role::Probe => &mut self.probe,
        }
    }
}

/// Gathers columns of one side for one batch. Row numbers are looked up once, and only when a column needs them.
struct Gatherer<'a> {
    emitter: &'a Emitter<'a>,
    input: &'a SideInput,
    rows: SideRows<'a>,
    count: usize,
    /// Whether each row stands beside one of the other side with an equal key.
    are_matched: bool,
    row_numbers: Option<Positions>,
    row_numbers_on_host: Option<arrow::buffer::Buffer>,
    /// Where the rows lie in the table, when they follow each other there as they do here, and the result may share them.
    stretches: Option<Vec<Stretch>>,
    /// Columns that are wanted and were not gathered yet.
    asked_for: BTreeSet<usize>,
    /// Of those that the device moves, on their way.
    gathered: BTreeMap<usize, HostColumn>,
}

impl<'a> Gatherer<'a> {
    fn new(emitter: &'a Emitter<'a>, input: &'a SideInput, rows: SideRows<'a>, count: usize) -> Self {
        Self {
            emitter,
            input,
            rows,
            count,
            are_matched: false,
            row_numbers: None,
            row_numbers_on_host: None,
            stretches: None,
            asked_for: BTreeSet::new(),
            gathered: BTreeMap::new(),
        }
    }

    /// Finds where the rows lie, if they lie as they are wanted. The batches of the table must not be so small that those of the
    /// result would be fragments.
    fn find_stretches(&mut self, sizes: BatchSizes) -> bool {
        let (SideRows::Arranged(arranged, Positions::Range(range))
        | SideRows::Numbered(arranged, Positions::Range(range))) = &self.rows
        else {
            return false;
        };
        if !arranged.lies_in_order() {
            return false;
        }
        let stretches = arranged.rows.stretches(range.clone());
        // The first and the last are cut where these rows begin and end, however long the batches of the table are.
        let whole = stretches.len().saturating_sub(2);
        if range.len() < whole * sizes.stretch_rows_min() {
            return false;
        }
        self.stretches = Some(stretches);
        true
    }

    /// Whether the result may share a column with the table, should the rows lie there as they are wanted.
    fn may_share(&self, column: usize, field: &FieldRef) -> bool {
        let data_type = self.input.table.schema.field(column).data_type();
        self.input.shares && data_type == field.data_type() && lies_by_row(data_type)
    }

    fn share(&self, column: usize) -> Pending {
        let (SideRows::Arranged(arranged, _) | SideRows::Numbered(arranged, _)) = &self.rows else {
            unreachable!("a missing side lies nowhere")
        };
        let stretches = self.stretches.iter().flatten();
        Pending::Shared(stretches.map(|stretch| arranged.rows.lying(column, stretch)).collect())
    }

    /// Bytes per value that the device moves, of text on average; 0 for a column that it does not.
    fn width_bytes(&self, column: usize) -> u64 {
        match self.is_missing() {
            true => 0,
            false => match self.input.text(column) {
                Some(text) => text.mean_bytes,
                None => self.input.movable(column).map_or(0, |movable| movable.width.bytes() as u64),
            },
        }
    }

    /// A column is wanted: brings it to the device, if that is where it will be gathered from and it is not there yet.
    fn ask_for(&mut self, column: usize) -> Result<()> {
        self.asked_for.insert(column);
        let (SideRows::Arranged(arranged, _) | SideRows::Numbered(arranged, _)) = &self.rows else { return Ok(()) };
        if self.input.movable(column).is_some() && self.moved(column).is_none() {
            arranged.original(column, self.emitter.shop)?;
        }
        if self.input.text(column).is_some() {
            arranged.original_text(column, self.emitter.shop)?;
        }
        Ok(())
    }

    /// A column that lies in arranged order on the device.
    fn moved(&self, column: usize) -> Option<Column> {
        let SideRows::Arranged(arranged, _) = &self.rows else { return None };
        match is_raw_key(self.emitter.layout, self.input, column, self.emitter.task.arrangement) {
            true => Some(arranged.arranged_keys().as_column()),
            false => arranged.carried(column).cloned(),
        }
    }

    fn is_missing(&self) -> bool {
        matches!(self.rows, SideRows::Missing)
    }

    /// Whether some of the rows may not be there.
    fn may_miss(&self) -> bool {
        matches!(self.rows, SideRows::Arranged(_, Positions::List { may_miss: true, .. }))
    }

    /// A column's validity, unless no row has a null there, whatever the table has: nulls that match nothing are in no matched row.
    fn needed(&self, validity: Option<DeviceBuffer>, column: usize) -> Option<DeviceBuffer> {
        let has_none = self.are_matched && self.input.unmatched_nulls.contains(&column);
        validity.filter(|_| !has_none)
    }

    fn gather(&mut self, column: usize) -> Result<Pending> {
        let Workshop { device, stream, arena, .. } = *self.emitter.shop;
        let data_type = self.input.table.schema.field(column).data_type().clone();
        if let Some(gathered) = self.gathered.get(&column) {
            let movable = self.input.movable(column).expect("the device has moved it");
            return Ok(Pending::FromDevice(gathered.clone(), data_type, movable.dictionary.clone()));
        }
        let arranged = match &self.rows {
            SideRows::Missing => return Ok(Pending::Ready(new_null_array(&data_type, self.count))),
            SideRows::Arranged(arranged, _) | SideRows::Numbered(arranged, _) => *arranged,
        };
        if let Some(text) = self.input.text(column) {
            let mut original = arranged.original_text(column, self.emitter.shop)?;
            original.validity = self.needed(original.validity, column);
            let numbers = self.row_numbers()?;
            let bytes_max = text_bytes_max(device, self.count as u64 * text.mean_bytes);
            let gathered =
                device.gather_bytes_to_host(&original, &numbers, text.offset_width, bytes_max, arena, stream)?;
            return Ok(Pending::TextFromDevice(gathered, data_type));
        }
        assert!(self.input.movable(column).is_none(), "columns that the device moves are gathered together");
        let numbers = self.row_numbers_on_host()?;
        let numbers = bytemuck::cast_slice(&numbers[..4 * self.count]);
        let array = beside(device, || gather_on_host(&arranged.rows, column, numbers, arena))?;
        Ok(match data_type {
            DataType::Dictionary(..) => Pending::Encoded(array),
            _ => Pending::Ready(array),
        })
    }

    /// A column that the device moves, as it lies there, and where these rows are in it.
    fn moved_at(&mut self, column: usize) -> Result<Option<(Column, Positions)>> {
        let arranged = match &self.rows {
            SideRows::Arranged(arranged, _) | SideRows::Numbered(arranged, _) => *arranged,
            SideRows::Missing => return Ok(None),
        };
        if self.input.movable(column).is_none() {
            return Ok(None);
        }
        if let (Some(moved), SideRows::Arranged(_, positions)) = (self.moved(column), &self.rows) {
            return Ok(Some((moved, positions.clone())));
        }
        let mut original = arranged.original(column, self.emitter.shop)?;
        original.validity = self.needed(original.validity, column);
        Ok(Some((original, self.row_numbers()?)))
    }

    fn row_numbers(&mut self) -> Result<Positions> {
        if let Some(numbers) = &self.row_numbers {
            return Ok(numbers.clone());
        }
        let numbers = match &self.rows {
            SideRows::Missing => unreachable!("a missing side has no row numbers"),
            SideRows::Numbered(_, numbers) => numbers.clone(),
            SideRows::Arranged(arranged, positions) => {
                assert!(arranged.numbered, "the arrangement carried no row numbers, and a column needs them");
                match &arranged.to_rows {
                    Some(map) => self.emitter.shop.device.compose(map, positions, self.emitter.shop.stream)?,
                    None => positions.clone(),
                }
            }
        };
        self.row_numbers = Some(numbers.clone());
        Ok(numbers)
    }

    fn row_numbers_on_host(&mut self) -> Result<arrow::buffer::Buffer> {
        if let Some(numbers) = &self.row_numbers_on_host {
            return Ok(numbers.clone());
        }
        let numbers = self.row_numbers()?;
        let shop = self.emitter.shop;
        let on_host = shop.device.positions_to_host(&numbers, shop.arena, shop.stream)?;
        self.row_numbers_on_host = Some(on_host.clone());
        Ok(on_host)
    }
}

/// Rows that are still treated in two pieces, however small batches become, where there is no memory for them in one.
const PIECE_ROWS_MIN: usize = 64;

/// Bytes of text that may be gathered at once, of rows that were expected to have so many: pieces are cut by how long rows are on average, and
/// what has no bounds would take memory that other streams count on.
fn text_bytes_max(device: &dyn Device, expected: u64) -> u64 {
    const TIMES: u64 = 4;
    // Tests have little text.
    let enough = if cfg!(test) { 1 << 10 } else { device.info().gather_bytes as u64 };
    TIMES * expected.max(enough)
}

/// Bytes of a message that is large enough for its overhead not to count.
pub(crate) const MESSAGE_BYTES: usize = 4 << 20;

impl BatchSizes {
    /// Batches of about one wire message, or of as many rows as the client asked for, for rows of that many bytes on average;
    /// and as many of them at once as make up `gather_bytes`.
    pub(crate) fn new(asked_for: Option<usize>, row_bytes: f64, gather_bytes: usize) -> Self {
        const ROWS_MAX: usize = 1 << 20;
        let rows_of = |bytes: usize| (bytes as f64 / row_bytes.max(1.0)) as usize;
        let batch_rows = asked_for.unwrap_or(rows_of(MESSAGE_BYTES)).clamp(1, ROWS_MAX);
        let gather_rows = batch_rows * (rows_of(gather_bytes) / batch_rows).max(1);
        Self { batch_rows, gather_rows, gather_bytes, rows_max: usize::MAX }
    }

    /// The same, of no more rows than an array of each of these columns can have.
    pub(super) fn of_columns(self, schema: &SchemaRef) -> Self {
        let rows_max = schema.fields().iter().map(|field| rows_max(field.data_type())).min().unwrap_or(usize::MAX);
        let batch_rows = self.batch_rows.min(rows_max).max(1);
        let gather_rows = batch_rows * (self.gather_rows.min(rows_max) / batch_rows).max(1);
        Self { batch_rows, gather_rows, rows_max, ..self }
    }

    /// Rows that are gathered at once where only some of their columns are, of that many bytes a row: as many as elsewhere, or as make up half
    /// as many bytes.
    pub(super) fn gather_rows_of(&self, row_bytes: u64) -> usize {
        let rows = self.gather_bytes / 2 / (row_bytes as usize).max(1);
        rows.clamp(self.gather_rows, self.rows_max.max(self.gather_rows))
    }

    /// Rows of a stretch of a table, on average and at the least, that a result shares, but for those at both ends of what is gathered
    /// at once. Batches of less than a quarter of what makes a message would be put together on their way to the client, which costs
    /// as much as gathering them.
    pub(crate) fn stretch_rows_min(&self) -> usize {
        self.batch_rows.div_ceil(4)
    }
}
