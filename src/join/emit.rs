//! From matched rows to batches of the result.

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions, new_null_array};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, FieldRef};

use super::BatchSink;
use super::arrange::{Arranged, Arrangement, Workshop, is_raw_key};
use super::inputs::{SideInput, column_on_side};
use crate::columns::{KeyLayout, fixed_array, fixed_width, gather_on_host};
use crate::device::{HostColumn, Positions};
use crate::planner::{OutputSource, Plan};
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

/// Makes batches of the result.
pub(super) struct Emitter<'a> {
    pub(super) shop: &'a Workshop<'a>,
    pub(super) plan: &'a Plan,
    pub(super) layout: &'a KeyLayout,
    pub(super) arrangement: Arrangement,
    pub(super) build: &'a SideInput,
    pub(super) probe: &'a SideInput,
    pub(super) sink: &'a dyn BatchSink,
    /// Rows per batch, at most.
    pub(super) batch_rows: usize,
}

/// A column on its way: device columns are complete only after the stream is synchronized.
enum Pending {
    FromDevice(HostColumn, DataType, Option<ArrayRef>),
    Ready(ArrayRef),
}

impl Emitter<'_> {
    /// Emits `rows` rows, the two sides side by side.
    ///
    /// # Errors
    /// The device's, the sink's, and [`Error::Exhausted`] when the arena is full.
    pub(super) fn emit(&self, build: SideRows<'_>, probe: SideRows<'_>, rows: usize) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        let join = &self.plan.join;
        let mut build = Gatherer::new(self, self.build, build, rows);
        let mut probe = Gatherer::new(self, self.probe, probe, rows);
        let row_bytes = (self.build.device_row_bytes() + self.probe.device_row_bytes()) as u64;
        let columns = self.shop.monitor.phase("gather", 2 * row_bytes * rows as u64, || {
            let mut pending = Vec::with_capacity(join.output.len());
            for output in &join.output {
                // A key is taken from the probe side where that has rows: its rows lie in order. Only where it has none
                // (build rows without a match) does the build side give it.
                let from_build = match output.source {
                    OutputSource::Column { side, .. } => side == self.build.side,
                    OutputSource::Key { .. } => probe.is_missing(),
                };
                let gatherer = if from_build { &mut build } else { &mut probe };
                let column =
                    column_on_side(join, &output.source, gatherer.input.side).expect("the side was chosen to have it");
                pending.push(gatherer.gather(column)?);
            }
            self.shop.device.synchronize(self.shop.stream)?;
            pending
                .into_iter()
                .zip(join.schema.fields())
                .map(|(column, field)| finish(column, field))
                .collect::<Result<Vec<_>>>()
        })?;
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let batch = RecordBatch::try_new_with_options(join.schema.clone(), columns, &options)
            .map_err(|error| Error::Internal(format!("assembling a batch of the result: {error}")))?;
        for start in (0..rows).step_by(self.batch_rows) {
            self.sink.push(batch.slice(start, self.batch_rows.min(rows - start)))?;
        }
        Ok(())
    }
}

fn finish(column: Pending, field: &FieldRef) -> Result<ArrayRef> {
    let array = match column {
        Pending::FromDevice(column, data_type, dictionary) => fixed_array(&data_type, column, dictionary.as_ref())?,
        Pending::Ready(array) => array,
    };
    // A key may come from the side whose type differs (another integer width, a dictionary) from the one promised.
    match array.data_type() == field.data_type() {
        true => Ok(array),
        false => cast_with_options(&array, field.data_type(), &CastOptions { safe: false, ..CastOptions::default() })
            .map_err(|error| {
                Error::Internal(format!("casting key {:?} to {}: {error}", field.name(), field.data_type()))
            }),
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
            return Ok(Pending::Ready(array));
        };
        let dictionary = movable.dictionary.clone();
        if let SideRows::Arranged(arranged, positions) = &self.rows {
            let raw = is_raw_key(self.emitter.layout, self.input, column, self.emitter.arrangement);
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

/// Rows per batch so that a batch is about one wire message: what a client asked for, or about 4 MB of fixed-width columns.
pub(super) fn batch_rows(plan: &Plan) -> usize {
    const BATCH_BYTES: usize = 4 << 20;
    // Strings and nested values are guessed at 32 bytes a row.
    let guess = |data_type: &DataType| fixed_width(data_type).map_or(32, |width| width.bytes());
    let row_bytes: usize = plan.join.schema.fields().iter().map(|field| guess(field.data_type())).sum();
    let rows = plan.join.spec.batch_rows.unwrap_or(BATCH_BYTES / row_bytes.max(1));
    rows.clamp(1, 1 << 20)
}
