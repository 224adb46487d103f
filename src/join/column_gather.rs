//! Columns of one side, gathered for a batch of the result, and the arrays made from them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, new_null_array};
use arrow::compute::kernels::zip::zip;
use arrow::compute::{CastOptions, cast_with_options, is_null};
use arrow::datatypes::{DataType, FieldRef, UInt32Type};

use super::RowLayout;
use super::batch_sizes::BatchSizes;
use super::context::JoinContext;
use super::inputs::SideInput;
use super::threads::on_device_pool;
use super::transform::{ExchangedNumbers, TransformedSide, is_raw_key};
use crate::columns::{
    BatchSlice, KeyLayout, Role, bytes_array, decoded_bytes, encode, encode_again, fixed_array, gather_on_host,
    is_stored_by_row, with_wanted_keys,
};
use crate::device::{Column, Device, DeviceBuffer, HostBytes, HostColumn, Positions, strings};
use crate::human::type_name;
use crate::memory::{Arena, ArenaReservation};
use crate::{Error, Result};

/// Rows of one side from which a batch is made.
pub(super) enum SideRows<'a> {
    /// Rows at transformed positions.
    Transformed(&'a TransformedSide, Positions),
    /// Rows by row number.
    Numbered(&'a TransformedSide, Positions),
    Missing,
}

impl<'a> SideRows<'a> {
    /// Returns a range of these rows.
    pub(super) fn part(&self, range: &Range<usize>, cx: &JoinContext<'_>) -> Result<SideRows<'a>> {
        let part = |positions| cx.device.compose(positions, &Positions::Range(range.clone()), cx.stream);
        Ok(match self {
            Self::Transformed(transformed, positions) => Self::Transformed(transformed, part(positions)?),
            Self::Numbered(transformed, numbers) => Self::Numbered(transformed, part(numbers)?),
            Self::Missing => Self::Missing,
        })
    }
}

/// Column of the result that may be incomplete. Device columns are complete only after the work
/// queued for them is done.
pub(super) enum PendingColumn {
    /// Stored in the table, one array per slice.
    Shared(Vec<ArrayRef>),
    FromDevice(HostColumn, DataType, Option<ArrayRef>),
    TextFromDevice(HostBytes, DataType),
    Ready(ArrayRef),
    /// Column that left the device before the build columns arrived, one array per slice.
    Left(Vec<ArrayRef>),
    /// Gathered from batches that share no dictionary. The array has its own dictionary, with
    /// 32-bit keys.
    Encoded(ArrayRef),
    /// Values of the first column, or of the second where the first is null.
    Either(Box<PendingColumn>, Box<PendingColumn>),
}

/// Makes the arrays of a batch from gathered columns.
pub(super) struct ArrayAssembler<'a> {
    pub(super) arena: &'a Arena,
    /// Reservations for values decoded from dictionaries, because decoded columns are many times as
    /// large.
    pub(super) paid: Vec<ArenaReservation>,
}

impl ArrayAssembler<'_> {
    pub(super) fn finish(&mut self, column: PendingColumn, field: &FieldRef) -> Result<ArrayRef> {
        let array = match column {
            PendingColumn::Shared(_) | PendingColumn::Left(_) => unreachable!("the column is assembled"),
            PendingColumn::FromDevice(column, data_type, dictionary) => {
                fixed_array(&data_type, column, dictionary.as_ref())?
            }
            PendingColumn::TextFromDevice(column, data_type) => bytes_array(&data_type, column)?,
            PendingColumn::Ready(array) => array,
            PendingColumn::Encoded(array) if matches!(field.data_type(), DataType::Dictionary(..)) => {
                return with_wanted_keys(array.as_dictionary::<UInt32Type>(), field.data_type());
            }
            PendingColumn::Encoded(array) => array,
            PendingColumn::Either(first, second) => {
                // The sides have different dictionaries, so merge their plain values.
                let plain = match field.data_type() {
                    DataType::Dictionary(_, values) => {
                        Arc::new(field.as_ref().clone().with_data_type(values.as_ref().clone()))
                    }
                    _ => field.clone(),
                };
                let (first, second) = (self.finish(*first, &plain)?, self.finish(*second, &plain)?);
                is_null(&first).and_then(|missing| zip(&missing, &second, &first)).map_err(|error| {
                    Error::Internal(format!("merging key {:?} from both sides: {error}", field.name()))
                })?
            }
        };
        // The key of an outer join has a type that holds the values of both sides. Either side may
        // have a narrower type.
        match (array.data_type(), field.data_type()) {
            (found, wanted) if found == wanted => Ok(array),
            // The wanted key type may be too narrow for the dictionary as it is stored.
            (DataType::Dictionary(..), wanted @ DataType::Dictionary(..)) => encode_again(&array, wanted),
            (_, wanted @ DataType::Dictionary(..)) => encode(&array, wanted),
            (found, wanted) => {
                let purpose = || format!("decoding the dictionary of column {:?}", field.name());
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
pub(super) struct Sides<'a> {
    pub(super) build: ColumnGather<'a>,
    pub(super) probe: ColumnGather<'a>,
}

impl<'a> Sides<'a> {
    pub(super) fn of(&self, role: Role) -> &ColumnGather<'a> {
        match role {
            Role::Build => &self.build,
            Role::Probe => &self.probe,
        }
    }

    pub(super) fn of_mut(&mut self, role: Role) -> &mut ColumnGather<'a> {
        match role {
            Role::Build => &mut self.build,
            Role::Probe => &mut self.probe,
        }
    }
}

/// Gathers columns of one side for one batch. Looks up row numbers once, and only if a column needs
/// them.
pub(super) struct ColumnGather<'a> {
    cx: &'a JoinContext<'a>,
    layout: &'a KeyLayout,
    row_layout: RowLayout,
    pub(super) input: &'a SideInput,
    pub(super) rows: SideRows<'a>,
    pub(super) count: usize,
    /// True if each row is paired with a row of the other side that has an equal key.
    pub(super) are_matched: bool,
    row_numbers: Option<Positions>,
    row_numbers_on_host: Option<arrow::buffer::Buffer>,
    /// Table rows of rows that an exchange has brought.
    table_rows: Option<Arc<Vec<u64>>>,
    /// Slices of the table that hold the rows, if the table has the rows in this order and the
    /// result may share them.
    pub(super) slices: Option<Vec<BatchSlice>>,
    /// Wanted columns that were not gathered yet.
    pub(super) asked_for: BTreeSet<usize>,
    /// Wanted columns that the device moves, on their way.
    pub(super) gathered: BTreeMap<usize, HostColumn>,
}

impl<'a> ColumnGather<'a> {
    pub(super) fn new(
        cx: &'a JoinContext<'a>,
        layout: &'a KeyLayout,
        row_layout: RowLayout,
        input: &'a SideInput,
        rows: SideRows<'a>,
        count: usize,
    ) -> Self {
        Self {
            cx,
            layout,
            row_layout,
            input,
            rows,
            count,
            are_matched: false,
            row_numbers: None,
            row_numbers_on_host: None,
            table_rows: None,
            slices: None,
            asked_for: BTreeSet::new(),
            gathered: BTreeMap::new(),
        }
    }

    /// Finds the slices of the table that hold the rows, if the rows are there in the wanted
    /// order. Returns false if the table's batches are so small that the result's batches would be
    /// fragments.
    pub(super) fn find_slices(&mut self, sizes: BatchSizes) -> bool {
        let (SideRows::Transformed(transformed, Positions::Range(range))
        | SideRows::Numbered(transformed, Positions::Range(range))) = &self.rows
        else {
            return false;
        };
        if !transformed.is_in_table_order() {
            return false;
        }
        let slices = transformed.rows.slices(range.clone());
        // The first and the last slice are cut where these rows begin and end, however long the
        // batches of the table are.
        let whole = slices.len().saturating_sub(2);
        if range.len() < whole * sizes.slice_rows_min() {
            return false;
        }
        self.slices = Some(slices);
        true
    }

    /// True if the result may share a column with the table, provided that the table has the rows
    /// in the wanted order.
    pub(super) fn may_share(&self, column: usize, field: &FieldRef) -> bool {
        let data_type = self.input.table.schema.field(column).data_type();
        self.input.shares && data_type == field.data_type() && is_stored_by_row(data_type)
    }

    pub(super) fn share(&self, column: usize) -> PendingColumn {
        let (SideRows::Transformed(transformed, _) | SideRows::Numbered(transformed, _)) = &self.rows else {
            unreachable!("a missing side has no columns to share")
        };
        let slices = self.slices.iter().flatten();
        PendingColumn::Shared(slices.map(|slice| transformed.rows.stored(column, slice)).collect())
    }

    /// Returns the bytes per value that the device moves, for text on average. Returns 0 for a
    /// column that it does not move.
    pub(super) fn width_bytes(&self, column: usize) -> u64 {
        match self.is_missing() {
            true => 0,
            false => match self.input.text(column) {
                Some(text) => text.mean_bytes,
                None => self.input.movable(column).map_or(0, |movable| movable.width.bytes() as u64),
            },
        }
    }

    /// Asks for a column. Copies it to the device if it will be gathered from there and was not
    /// copied yet.
    pub(super) fn ask_for(&mut self, column: usize) -> Result<()> {
        self.asked_for.insert(column);
        let (SideRows::Transformed(transformed, _) | SideRows::Numbered(transformed, _)) = &self.rows else {
            return Ok(());
        };
        if self.input.movable(column).is_some() && self.moved(column).is_none() {
            transformed.original(column, self.cx)?;
        }
        if self.input.text(column).is_some() {
            transformed.original_text(column, self.cx)?;
        }
        Ok(())
    }

    /// Returns a column that the device has in transformed order.
    fn moved(&self, column: usize) -> Option<Column> {
        let SideRows::Transformed(transformed, _) = &self.rows else { return None };
        match is_raw_key(self.layout, self.input, column, self.row_layout) {
            true => Some(transformed.transformed_keys().as_column()),
            false => transformed.moved_column(column).cloned(),
        }
    }

    pub(super) fn is_missing(&self) -> bool {
        matches!(self.rows, SideRows::Missing)
    }

    /// True if some of the rows may be missing.
    pub(super) fn nullable(&self) -> bool {
        matches!(self.rows, SideRows::Transformed(_, Positions::List { nullable: true, .. }))
    }

    /// Returns a column's validity, or `None` if no gathered row can be null. A key whose nulls
    /// never match has no null in matched rows, even if the table has nulls.
    fn needed(&self, validity: Option<DeviceBuffer>, column: usize) -> Option<DeviceBuffer> {
        let has_none = self.are_matched && self.input.unmatched_nulls.contains(&column);
        validity.filter(|_| !has_none)
    }

    pub(super) fn gather(&mut self, column: usize) -> Result<PendingColumn> {
        let JoinContext { device, stream, arena, .. } = *self.cx;
        let data_type = self.input.table.schema.field(column).data_type().clone();
        if let Some(gathered) = self.gathered.get(&column) {
            let movable = self.input.movable(column).expect("a column that the device gathered is movable");
            return Ok(PendingColumn::FromDevice(gathered.clone(), data_type, movable.dictionary.clone()));
        }
        let transformed = match &self.rows {
            SideRows::Missing => return Ok(PendingColumn::Ready(new_null_array(&data_type, self.count))),
            SideRows::Transformed(transformed, _) | SideRows::Numbered(transformed, _) => *transformed,
        };
        if let Some(text) = self.input.text(column) {
            let mut original = transformed.original_text(column, self.cx)?;
            original.validity = self.needed(original.validity, column);
            let numbers = self.row_numbers()?;
            let bytes_max = text_bytes_max(device, self.count as u64 * text.mean_bytes);
            let gathered = strings(device).gather_bytes_to_host(
                &original,
                &numbers,
                text.offset_width,
                bytes_max,
                arena,
                stream,
            )?;
            return Ok(PendingColumn::TextFromDevice(gathered, data_type));
        }
        assert!(self.input.movable(column).is_none(), "the device gathers all movable columns together");
        let rows = &transformed.rows;
        let array = match &transformed.exchanged {
            None => {
                let numbers = self.row_numbers_on_host()?;
                let numbers: &[u32] = bytemuck::cast_slice(&numbers[..4 * self.count]);
                on_device_pool(device, || gather_on_host(rows, column, numbers, arena))?
            }
            Some(exchanged) => {
                let numbers = self.table_rows(exchanged)?;
                on_device_pool(device, || gather_on_host(rows, column, &numbers, arena))?
            }
        };
        Ok(match data_type {
            DataType::Dictionary(..) => PendingColumn::Encoded(array),
            _ => PendingColumn::Ready(array),
        })
    }

    /// Returns a column that the device moves, as it is stored on the device, and the positions of
    /// these rows in it.
    pub(super) fn moved_at(&mut self, column: usize) -> Result<Option<(Column, Positions)>> {
        let transformed = match &self.rows {
            SideRows::Transformed(transformed, _) | SideRows::Numbered(transformed, _) => *transformed,
            SideRows::Missing => return Ok(None),
        };
        if self.input.movable(column).is_none() {
            return Ok(None);
        }
        if let (Some(moved), SideRows::Transformed(_, positions)) = (self.moved(column), &self.rows) {
            return Ok(Some((moved, positions.clone())));
        }
        let mut original = transformed.original(column, self.cx)?;
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
            SideRows::Transformed(transformed, positions) => {
                assert!(transformed.numbered, "the transformed rows have no row numbers, and a column needs them");
                match &transformed.to_rows {
                    Some(map) => self.cx.device.compose(map, positions, self.cx.stream)?,
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
        let cx = self.cx;
        let on_host = cx.device.positions_to_host(&numbers, cx.arena, cx.stream)?;
        self.row_numbers_on_host = Some(on_host.clone());
        Ok(on_host)
    }
}

impl ColumnGather<'_> {
    /// Returns the table rows of rows that an exchange has brought.
    fn table_rows(&mut self, exchanged: &ExchangedNumbers) -> Result<Arc<Vec<u64>>> {
        if let Some(rows) = &self.table_rows {
            return Ok(rows.clone());
        }
        let (numbers, on_host) = (self.row_numbers()?, self.row_numbers_on_host()?);
        let JoinContext { device, stream, arena, .. } = *self.cx;
        let in_chunk = device.gather_to_host(&exchanged.in_chunk, &numbers, arena, stream)?;
        device.synchronize(stream)?;
        let of =
            |numbers: &arrow::buffer::Buffer| -> Vec<u32> { bytemuck::pod_collect_to_vec(&numbers[..4 * self.count]) };
        let rows = Arc::new(exchanged.table_rows(&of(&on_host), &of(&in_chunk.data)));
        self.table_rows = Some(rows.clone());
        Ok(rows)
    }
}

/// Returns the most bytes of text to gather at once, for rows with `expected` bytes. Pieces are
/// sized by the mean length of rows, and may have far longer text. Without a bound, that text would
/// take memory that other streams count on.
fn text_bytes_max(device: &dyn Device, expected: u64) -> u64 {
    const TIMES: u64 = 4;
    // Tests have little text.
    let enough = if cfg!(test) { 1 << 10 } else { device.tuning().gather_bytes as u64 };
    TIMES * expected.max(enough)
}
