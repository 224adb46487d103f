//! From matched rows to batches of the result.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::compute::kernels::zip::zip;
use arrow::compute::{CastOptions, cast_with_options, is_null};
use arrow::datatypes::{DataType, FieldRef, UInt32Type};

use super::arrange::{Arranged, Workshop, is_raw_key};
use super::inputs::SideInput;
use super::{BatchSink, OutputColumn, OutputSource, Side, Task};
use crate::columns::{KeyLayout, decoded_bytes, encode, encode_again, fixed_array, gather_on_host, with_wanted_keys};
use crate::device::{Event, HostColumn, Positions};
use crate::memory::{Arena, Reservation};
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
}

/// How many rows are treated together on their way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchSizes {
    /// Rows per batch, at most.
    pub(super) batch_rows: usize,
    /// Rows that are gathered at once: as many batches as make about one message, and at least one.
    pub(super) gather_rows: usize,
}

/// A column on its way: device columns are complete only after what was queued for them is done.
enum Pending {
    FromDevice(HostColumn, DataType, Option<ArrayRef>),
    Ready(ArrayRef),
    /// Gathered from batches that share no dictionary: it has one of its own, with 32-bit keys.
    Encoded(ArrayRef),
    /// The first, and where that is null, the second.
    Either(Box<Pending>, Box<Pending>),
}

/// Rows on their way.
struct InFlight {
    range: Range<usize>,
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
        let at_once = self.sizes.gather_rows.min(self.rows_that_fit());
        // Where copies overlap with everything else, the next rows are queued before the last ones are waited for.
        let in_flight_max = if self.shop.device.info().streams > 1 { 1 } else { 0 };
        let mut in_flight = VecDeque::new();
        let mut ranges = (0..rows).step_by(at_once).map(|start| start..rows.min(start + at_once));
        // Parts of a range that was too large, the first one last.
        let mut parts: Vec<Range<usize>> = Vec::new();
        while let Some(range) = parts.pop().or_else(|| ranges.next()) {
            match self.queue(build, probe, &range) {
                Ok(queued) => in_flight.push_back(queued),
                // How long strings are is known on average only: these are too long for the offsets of one batch.
                Err(Error::Invalid(_)) if range.len() > 1 => {
                    let middle = range.start + range.len() / 2;
                    parts.extend([middle..range.end, range.start..middle]);
                }
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

    /// Pushes rows that are on their way, when they are there.
    fn push(&self, in_flight: InFlight, emitted: &mut dyn FnMut(usize)) -> Result<()> {
        let InFlight { range, columns, complete } = in_flight;
        let rows = range.len();
        // Until the batch is in the sink's hands.
        let mut finisher = Finisher { arena: self.shop.arena, paid: Vec::new() };
        let columns = self.shop.monitor.phase("gather", 0, || {
            self.shop.device.wait(&complete, self.shop.stream)?;
            columns
                .into_iter()
                .zip(self.task.schema.fields())
                .map(|(column, field)| finisher.finish(column, field))
                .collect::<Result<Vec<_>>>()
        })?;
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let batch = RecordBatch::try_new_with_options(self.task.schema.clone(), columns, &options)
            .map_err(|error| Error::Internal(format!("assembling a batch of the result: {error}")))?;
        for start in (0..rows).step_by(self.sizes.batch_rows) {
            self.shop.monitor.cancel().check()?;
            let length = self.sizes.batch_rows.min(rows - start);
            self.sink.push(batch.slice(start, length))?;
            emitted(range.start + start + length);
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
        let row_bytes = (self.build.device_row_bytes() + self.probe.device_row_bytes()) as u64;
        self.shop.monitor.phase("gather", 2 * row_bytes * rows as u64, || {
            let mut build = Gatherer::new(self, self.build, build.part(range, self.shop)?, rows);
            let mut probe = Gatherer::new(self, self.probe, probe.part(range, self.shop)?, rows);
            let gather = |output: &OutputColumn| match output.source {
                OutputSource::Column { side, index } if side == self.build.side => build.gather(index),
                OutputSource::Column { index, .. } => probe.gather(index),
                OutputSource::Key { index } => self.gather_key(index, &mut build, &mut probe),
            };
            let columns = self.task.output.iter().map(gather).collect::<Result<Vec<_>>>()?;
            let complete = self.shop.device.record_event(self.shop.stream)?;
            Ok(InFlight { range: range.clone(), columns, complete })
        })
    }

    /// The left value where there is a left row, else the right value. Where both look alike, the probe side gives it: its
    /// rows lie in order.
    fn gather_key<'a>(&self, index: usize, build: &mut Gatherer<'a>, probe: &mut Gatherer<'a>) -> Result<Pending> {
        let key = &self.task.keys[index];
        let (first, second) = match key.alike || self.probe.side == Side::Left {
            true => (probe, build),
            false => (build, probe),
        };
        let column = |gatherer: &Gatherer<'_>| key.column(gatherer.input.side);
        if first.is_missing() {
            return second.gather(column(second));
        }
        let values = first.gather(column(first))?;
        if !first.may_miss() {
            return Ok(values);
        }
        // A key that is null although its row is there has matched a null.
        Ok(Pending::Either(Box::new(values), Box::new(second.gather(column(second))?)))
    }
}

/// Makes the arrays of a batch of what was gathered.
struct Finisher<'a> {
    arena: &'a Arena,
    /// For values that were taken out of their dictionaries, and are many times as large then.
    paid: Vec<Reservation>,
}

impl Finisher<'_> {
    fn finish(&mut self, column: Pending, field: &FieldRef) -> Result<ArrayRef> {
        let array = match column {
            Pending::FromDevice(column, data_type, dictionary) => fixed_array(&data_type, column, dictionary.as_ref())?,
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
                    Error::Internal(format!("casting column {:?} from {found} to {wanted}: {error}", field.name()))
                })
            }
        }
    }
}

/// Gathers columns of one side for one batch. Row numbers are looked up once, and only when a column needs them.
struct Gatherer<'a> {
    emitter: &'a Emitter<'a>,
    input: &'a SideInput,
    rows: SideRows<'a>,
    count: usize,
    row_numbers: Option<Positions>,
    row_numbers_on_host: Option<arrow::buffer::Buffer>,
}

impl<'a> Gatherer<'a> {
    fn new(emitter: &'a Emitter<'a>, input: &'a SideInput, rows: SideRows<'a>, count: usize) -> Self {
        Self { emitter, input, rows, count, row_numbers: None, row_numbers_on_host: None }
    }

    fn is_missing(&self) -> bool {
        matches!(self.rows, SideRows::Missing)
    }

    /// Whether some of the rows may not be there.
    fn may_miss(&self) -> bool {
        matches!(self.rows, SideRows::Arranged(_, Positions::List { may_miss: true, .. }))
    }

    fn gather(&mut self, column: usize) -> Result<Pending> {
        let Workshop { device, stream, arena, .. } = *self.emitter.shop;
        let data_type = self.input.table.schema.field(column).data_type().clone();
        let arranged = match &self.rows {
            SideRows::Missing => return Ok(Pending::Ready(new_null_array(&data_type, self.count))),
            SideRows::Arranged(arranged, _) | SideRows::Numbered(arranged, _) => *arranged,
        };
        let Some(movable) = self.input.movable(column) else {
            let numbers = self.row_numbers_on_host()?;
            let array =
                gather_on_host(&arranged.rows, column, bytemuck::cast_slice(&numbers[..4 * self.count]), arena)?;
            return Ok(match data_type {
                DataType::Dictionary(..) => Pending::Encoded(array),
                _ => Pending::Ready(array),
            });
        };
        let dictionary = movable.dictionary.clone();
        if let SideRows::Arranged(arranged, positions) = &self.rows {
            let raw = is_raw_key(self.emitter.layout, self.input, column, self.emitter.task.arrangement);
            let moved =
                if raw { Some(arranged.arranged_keys().as_column()) } else { arranged.carried(column).cloned() };
            if let Some(moved) = moved {
                return Ok(Pending::FromDevice(
                    device.gather_to_host(&moved, positions, arena, stream)?,
                    data_type,
                    dictionary,
                ));
            }
        }
        let numbers = self.row_numbers()?;
        let original = arranged.original(column).expect("a column that was not carried stays as it was copied in");
        Ok(Pending::FromDevice(device.gather_to_host(original, &numbers, arena, stream)?, data_type, dictionary))
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

impl BatchSizes {
    /// Batches of about one wire message, or of as many rows as the client asked for, for rows of that many bytes on average;
    /// and as many of them at once as make up `gather_bytes`.
    pub(super) fn new(asked_for: Option<usize>, row_bytes: f64, gather_bytes: usize) -> Self {
        /// Bytes of a message that is large enough for its overhead not to count.
        const MESSAGE_BYTES: usize = 4 << 20;
        const ROWS_MAX: usize = 1 << 20;
        let rows_of = |bytes: usize| ((bytes as f64 / row_bytes.max(1.0)) as usize).clamp(1, ROWS_MAX);
        let batch_rows = asked_for.unwrap_or(rows_of(MESSAGE_BYTES)).clamp(1, ROWS_MAX);
        Self { batch_rows, gather_rows: batch_rows * (rows_of(gather_bytes) / batch_rows).max(1) }
    }
}
