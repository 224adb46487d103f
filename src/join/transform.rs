//! Layouts: rows of one side with their keys, in table order, partitioned, or sorted, and the
//! columns moved along.
//!
//! A column of the result comes from the first of these places that has it:
//!
//! 1. The table, if the result has the side's rows one after the other in table order. The result
//!    then shares the column (`materialize.rs`).
//! 2. The columns that *moved* with the keys (gather from transformed relation, GFTR: Wu et al.
//!    2024, section 4.2).
//! 3. The columns on the device as they were copied in, gathered by row number (gather from
//!    untransformed relation, GFUR). This includes text if the device supports text.
//! 4. The table, gathered by row number on the host, for columns that the device cannot move
//!    (nested, booleans, text if the device does not support it).
//!
//! Nullable columns are never moved, because validity bits do not move well. They come from place
//! 3.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::RowLayout;
use super::context::JoinContext;
use super::inputs::SideInput;
use super::threads::on_device_pool;
use crate::Result;
use crate::columns::{KeyLayout, Role, Rows, SideKeys};
use crate::device::{
    BytesColumn, Column, DeviceBuffer, Filter, Keys, NO_ROW, Partitions, Payload, Phase, Positions, Sorted, Stream,
    Which,
};

/// Transformed rows of one side. *Transformed positions* count in this order; *row numbers* count
/// in `rows`.
#[derive(Clone, Debug)]
pub(super) struct TransformedSide {
    pub(super) rows: Rows,
    pub(super) keys: Arc<SideKeys>,
    pub(super) order: Order,
    /// Row number at each transformed position. `None` if positions are row numbers. Also `None`,
    /// with `numbered` false, for partitions and sorted rows that moved no row numbers.
    pub(super) to_rows: Option<Positions>,
    /// True if row numbers are known, from `to_rows` or as the identity.
    pub(super) numbered: bool,
    /// Table columns that were moved, in ascending order.
    moved_columns: Vec<usize>,
    originals: Arc<Originals>,
    /// Rows that have no key because of a null. `None` if there are none, or if the join drops
    /// them.
    pub(super) null_keys: Option<Positions>,
    /// Table rows behind row numbers, if these number rows that an exchange has brought. `rows` are
    /// then all rows of the table.
    pub(super) exchanged: Option<Arc<ExchangedNumbers>>,
}

/// Table rows behind rows that came in pieces, each of one chunk of the table.
#[derive(Debug)]
pub(super) struct ExchangedNumbers {
    /// Row number in its chunk of each row: 32 bits.
    pub(super) in_chunk: Column,
    /// First row of each piece, ascending, and the table row at which the piece's chunk starts.
    pub(super) pieces: Vec<(usize, u64)>,
}

impl ExchangedNumbers {
    /// Returns the table rows behind row numbers, given their numbers in chunks. [`NO_ROW`] becomes
    /// [`u64::MAX`].
    pub(super) fn table_rows(&self, numbers: &[u32], in_chunk: &[u32]) -> Vec<u64> {
        let of = |(&number, &in_chunk): (&u32, &u32)| {
            if number == NO_ROW {
                return u64::MAX;
            }
            let piece = self.pieces.partition_point(|(first, _)| *first <= number as usize) - 1;
            self.pieces[piece].1 + u64::from(in_chunk)
        };
        numbers.iter().zip(in_chunk).map(of).collect()
    }
}

/// Columns on the device as they were copied in, by table column.
#[derive(Debug, Default)]
pub(super) struct Originals {
    columns: Mutex<BTreeMap<usize, Column>>,
    text: Mutex<BTreeMap<usize, BytesColumn>>,
    /// Columns that were copied in as keys, even if nothing is gathered from them.
    came_as_keys: BTreeSet<usize>,
    /// True if rows were gathered from any other column.
    used: AtomicBool,
}

impl Originals {
    fn of(
        columns: BTreeMap<usize, Column>,
        text: BTreeMap<usize, BytesColumn>,
        came_as_keys: BTreeSet<usize>,
    ) -> Arc<Self> {
        let (columns, text) = (Mutex::new(columns), Mutex::new(text));
        Arc::new(Self { columns, text, came_as_keys, used: AtomicBool::new(false) })
    }

    /// Returns one of `columns`, to gather rows from it. `copy` copies the column in if it is
    /// missing.
    fn of_column<C: Clone>(
        &self,
        columns: &Mutex<BTreeMap<usize, C>>,
        column: usize,
        copy: impl FnOnce() -> Result<C>,
    ) -> Result<C> {
        let original = match columns.lock().entry(column) {
            Entry::Occupied(there) => there.get().clone(),
            Entry::Vacant(missing) => missing.insert(copy()?).clone(),
        };
        self.used.fetch_or(!self.came_as_keys.contains(&column), Ordering::Relaxed);
        Ok(original)
    }
}

/// Time at which columns that do not move with the keys are copied in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyIn {
    /// With the keys, so that the columns cross the link while the device works on the keys.
    Prefetch,
    /// When rows are gathered from them. Columns that the result shares with the table are then
    /// never copied in. If rows are moved, columns are copied ahead all the same.
    WhenNeeded,
}

/// Keys in their layout.
#[derive(Clone, Debug)]
pub(super) enum Order {
    Original(Keys),
    Partitioned(Partitions),
    Sorted(Sorted),
    /// In the order in which a join of partitions wrote them, next to the rows of the other side.
    Joined {
        /// Keys, if a column of the result is made from them.
        keys: Option<Keys>,
        moved_columns: Vec<Column>,
    },
}

/// Rows of one side on the device, with their keys, before they are laid out.
pub(super) struct ArrivedRows {
    pub(super) rows: Rows,
    pub(super) keys: Arc<SideKeys>,
    /// Columns of the result that devices can move, by table column.
    pub(super) columns: BTreeMap<usize, Column>,
    pub(super) text: BTreeMap<usize, BytesColumn>,
    pub(super) came_as_keys: BTreeSet<usize>,
    pub(super) null_keys: Option<Positions>,
    /// Table rows behind the rows, if an exchange has brought them.
    pub(super) exchanged: Option<Arc<ExchangedNumbers>>,
}

/// How rows are copied in, packed and laid out.
#[derive(Clone, Copy)]
pub(super) struct Transform<'a> {
    pub(super) layout: &'a KeyLayout,
    pub(super) row_layout: RowLayout,
    /// True if rows without a key are part of the result.
    pub(super) keeps_null_keys: bool,
    /// Drops rows whose keys do not pass, as if they had no key. Only if `keeps_null_keys` is
    /// false.
    pub(super) filter: Option<&'a Filter>,
    pub(super) copy_in: CopyIn,
}

/// Copies in, packs and transforms some rows of one side. Moved columns are complete once the
/// context's main stream is synchronized. Columns in table order are complete once both streams of
/// the context are.
///
/// # Errors
/// Errors of the device.
pub(super) fn transform(
    cx: &JoinContext<'_>,
    input: &SideInput,
    rows: Rows,
    how: Transform<'_>,
) -> Result<TransformedSide> {
    lay_out(cx, input, arrive(cx, input, rows, how)?, how.layout, how.row_layout)
}

/// Copies in and packs some rows of one side, as [`transform`] does.
///
/// # Errors
/// Errors of the device.
pub(super) fn arrive(cx: &JoinContext<'_>, input: &SideInput, rows: Rows, how: Transform<'_>) -> Result<ArrivedRows> {
    let Transform { layout, row_layout, keeps_null_keys, filter, copy_in } = how;
    let (device, stream, monitor) = (cx.device, cx.stream, cx.monitor);
    let row_count = rows.len();
    let key_bytes = (row_count * layout.width().bytes()) as u64;
    let pack = || {
        monitor.counted_phase(Phase::PackKeys, |moved| {
            let value_bytes = row_count * layout.value_row_bytes(input.role);
            moved.bytes = 2 * key_bytes + value_bytes as u64 + layout.value_bytes(&rows, &input.key_columns);
            layout.pack(input.role, &rows, &input.key_columns, device, cx.arena, stream)
        })
    };
    let (mut keys, mut key_columns) = if layout.is_made_on_host() { on_device_pool(device, pack)? } else { pack()? };
    // Columns that are neither compared nor gathered are not needed any more.
    key_columns.bytes.retain(|&column, _| input.text(column).is_some());
    let packed = keys.packed.clone();
    if let Some(filter) = filter {
        assert!(!keeps_null_keys, "a filter would drop unmatched rows that are part of the result");
        let bytes = (packed.keys.rows * layout.width().bytes()) as u64;
        keys.packed = monitor.phase(Phase::Filter, bytes, || device.filter_keys(filter, &packed, stream))?;
    }
    let mut columns = BTreeMap::new();
    let mut copy_columns = |move_with_keys: bool| -> Result<()> {
        let wanted =
            input.output_columns.iter().filter(|column| move_with_keys == input.moved_columns.contains(column));
        for &column in wanted {
            // A raw key column is gathered from the keys themselves.
            if input.movable(column).is_none() || is_raw_key(layout, input, column, row_layout) {
                continue;
            }
            if let Some(came) = key_columns.fixed.get(&column) {
                columns.insert(column, came.clone());
            } else if copy_in == CopyIn::Prefetch || row_layout != RowLayout::Original {
                columns.insert(column, copy_column(cx, cx.copies, &rows, column)?);
            }
        }
        Ok(())
    };
    let is_moved = row_layout != RowLayout::Original;
    copy_columns(true)?;
    let to_be_moved = if is_moved { Some(device.record_event(cx.copies)?) } else { None };
    copy_columns(false)?;
    let mut text = BTreeMap::new();
    for column in input.text_columns() {
        if let Some(came) = key_columns.bytes.get(&column) {
            text.insert(column, came.clone());
        } else if copy_in == CopyIn::Prefetch || is_moved {
            text.insert(column, copy_text(cx, cx.copies, &rows, column)?);
        }
    }
    let came_as_keys: BTreeSet<usize> = key_columns.fixed.into_keys().chain(key_columns.bytes.into_keys()).collect();
    drop(packed);
    if let Some(came) = to_be_moved {
        // These columns are about to move with the keys. The others still cross the link meanwhile.
        device.wait_event(&came, stream)?;
        record_stream(columns.iter().filter(|(column, _)| input.moved_columns.contains(column)), cx);
    }
    let keys = Arc::new(keys);
    let null_keys = match &keys.packed.rows_kept {
        Some(kept) if keeps_null_keys && kept.len() < row_count => {
            Some(monitor.phase(Phase::PackKeys, row_count as u64, || rows_without_key(cx, kept, row_count))?)
        }
        _ => None,
    };

    Ok(ArrivedRows { rows, keys, columns, text, came_as_keys, null_keys, exchanged: None })
}

/// Lays out rows that have arrived.
///
/// # Errors
/// Errors of the device.
pub(super) fn lay_out(
    cx: &JoinContext<'_>,
    input: &SideInput,
    arrived: ArrivedRows,
    layout: &KeyLayout,
    row_layout: RowLayout,
) -> Result<TransformedSide> {
    let (device, stream, monitor) = (cx.device, cx.stream, cx.monitor);
    let ArrivedRows { rows, keys, columns: mut originals, text, came_as_keys, null_keys, exchanged } = arrived;
    let key_bytes = (keys.packed.keys.rows * layout.width().bytes()) as u64;
    if row_layout == RowLayout::Original {
        let order = Order::Original(keys.packed.keys.clone());
        let to_rows = keys.packed.rows_kept.clone();
        let originals = Originals::of(originals, text, came_as_keys);
        return Ok(TransformedSide {
            rows,
            keys,
            order,
            to_rows,
            numbered: true,
            moved_columns: Vec::new(),
            originals,
            null_keys,
            exchanged,
        });
    }
    let (partition_phase, order_phase, sort_phase) = match input.role {
        Role::Build => (Phase::PartitionBuild, Phase::CheckBuildOrder, Phase::SortBuild),
        Role::Probe => (Phase::PartitionProbe, Phase::CheckProbeOrder, Phase::SortProbe),
    };
    let is_sorted = || device.is_sorted(&keys.packed.keys, stream);
    if row_layout == RowLayout::Sorted && monitor.phase(order_phase, key_bytes, is_sorted)? {
        let sorted = Sorted { keys: keys.packed.keys.clone(), payload: Vec::new() };
        let to_rows = keys.packed.rows_kept.clone();
        return Ok(TransformedSide {
            rows,
            keys,
            order: Order::Sorted(sorted),
            to_rows,
            numbered: true,
            moved_columns: Vec::new(),
            originals: Originals::of(originals, text, came_as_keys),
            null_keys,
            exchanged,
        });
    }

    let mut moved_columns = Vec::new();
    let mut payload = Vec::new();
    for (&column, original) in originals.iter().filter(|(column, _)| input.moved_columns.contains(column)) {
        if original.validity.is_none() {
            moved_columns.push(column);
            let column = of_kept_rows(cx, original, keys.packed.rows_kept.as_ref())?;
            payload.push(Payload::Column(column));
        }
    }
    // Columns that are not moved need row numbers, and so does the comparison of real values
    // behind hashed keys.
    let is_moved = |column: &usize| moved_columns.binary_search(column).is_ok();
    let elsewhere = |column: &usize| !is_moved(column) && !is_raw_key(layout, input, *column, row_layout);
    let numbered = layout.is_hashed() || input.output_columns.iter().any(elsewhere);
    if numbered {
        payload.push(Payload::RowNumber);
    }
    let row_count = keys.packed.keys.rows;
    let moved_bytes = 2 * (key_bytes + payload.iter().map(|payload| payload_bytes(payload, row_count)).sum::<u64>());
    let order = match row_layout {
        // The histogram reads the keys a second time.
        RowLayout::Partitioned(bits) => {
            Order::Partitioned(monitor.phase(partition_phase, moved_bytes + key_bytes, || {
                device.partition(&keys.packed.keys, &payload, bits, stream)
            })?)
        }
        _ => {
            Order::Sorted(monitor.phase(sort_phase, moved_bytes, || device.sort(&keys.packed.keys, &payload, stream))?)
        }
    };
    if null_keys.is_none() {
        originals.retain(|column, _| !is_moved(column));
    }
    let originals = Originals::of(originals, text, came_as_keys);
    let mut transformed =
        TransformedSide { rows, keys, order, to_rows: None, numbered, moved_columns, originals, null_keys, exchanged };
    let phase = if matches!(row_layout, RowLayout::Sorted) { sort_phase } else { partition_phase };
    monitor.phase(phase, 0, || transformed.find_row_numbers(cx))?;
    Ok(transformed)
}

impl TransformedSide {
    /// Returns the keys in transformed order.
    pub(super) fn transformed_keys(&self) -> &Keys {
        match &self.order {
            Order::Original(keys) => keys,
            Order::Partitioned(partitions) => &partitions.keys,
            Order::Sorted(sorted) => &sorted.keys,
            Order::Joined { keys, .. } => keys.as_ref().expect("keys are kept if a column is made of them"),
        }
    }

    /// Returns the number of transformed rows. All transformed rows have a key.
    pub(super) fn len(&self) -> usize {
        self.transformed_keys().rows
    }

    /// Returns a table column in transformed order, if it was moved.
    pub(super) fn moved_column(&self, column: usize) -> Option<&Column> {
        let at = self.moved_columns.binary_search(&column).ok()?;
        match &self.order {
            Order::Original(_) => None,
            Order::Partitioned(partitions) => partitions.payload.get(at),
            Order::Sorted(sorted) => sorted.payload.get(at),
            Order::Joined { moved_columns, .. } => moved_columns.get(at),
        }
    }

    /// Returns the side's rows in the order in which a join of partitions wrote them.
    /// `moved_columns` has the moved columns, in their order.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn joined(&self, keys: Option<Keys>, moved_columns: Vec<Column>, cx: &JoinContext<'_>) -> Result<Self> {
        let mut joined = Self { order: Order::Joined { keys, moved_columns }, to_rows: None, ..self.clone() };
        cx.monitor.phase(Phase::Join, 0, || joined.find_row_numbers(cx))?;
        Ok(joined)
    }

    /// Returns some of the side's rows in table order, with the given columns on the device.
    pub(super) fn part(
        &self,
        rows: Rows,
        columns: BTreeMap<usize, Column>,
        text: BTreeMap<usize, BytesColumn>,
    ) -> Self {
        Self {
            rows,
            keys: self.keys.clone(),
            order: Order::Joined { keys: None, moved_columns: Vec::new() },
            to_rows: None,
            numbered: true,
            moved_columns: Vec::new(),
            originals: Originals::of(columns, text, BTreeSet::new()),
            null_keys: None,
            exchanged: None,
        }
    }

    /// Returns rows of a table with keys. `to_rows` has the row number of each key. `None`: all
    /// rows have a key, in table order.
    pub(super) fn of_keys(rows: Rows, keys: SideKeys, to_rows: Option<Positions>) -> Self {
        Self {
            rows,
            order: Order::Original(keys.packed.keys.clone()),
            keys: Arc::new(keys),
            to_rows,
            numbered: true,
            moved_columns: Vec::new(),
            originals: Arc::default(),
            null_keys: None,
            exchanged: None,
        }
    }

    /// Returns a table column as it was copied in. Copies it in first if it is missing.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn original(&self, column: usize, cx: &JoinContext<'_>) -> Result<Column> {
        let originals = &self.originals;
        originals.of_column(&originals.columns, column, || copy_column(cx, cx.stream, &self.rows, column))
    }

    /// Returns a column of values of variable length as it was copied in. Copies it in first if it
    /// is missing.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn original_text(&self, column: usize, cx: &JoinContext<'_>) -> Result<BytesColumn> {
        let originals = &self.originals;
        originals.of_column(&originals.text, column, || copy_text(cx, cx.stream, &self.rows, column))
    }

    /// Records the context's main stream for the columns that its `copies` stream copied in. The
    /// main stream must have waited for the copies.
    pub(super) fn record_stream_of_originals(&self, cx: &JoinContext<'_>) {
        record_stream(&*self.originals.columns.lock(), cx);
        for BytesColumn { data, begins, validity, .. } in self.originals.text.lock().values() {
            record_stream_of_buffers([data, begins].into_iter().chain(validity), cx);
        }
    }

    /// True if rows were gathered from columns as they were copied in, except columns that were
    /// copied in as keys.
    pub(super) fn used_originals(&self) -> bool {
        self.originals.used.load(Ordering::Relaxed)
    }

    /// True if all transformed positions are row numbers of the table.
    pub(super) fn is_in_table_order(&self) -> bool {
        self.numbered && self.to_rows.is_none() && self.exchanged.is_none()
    }

    /// Makes equal keys of partitions adjacent.
    pub(super) fn group(&mut self, cx: &JoinContext<'_>) -> Result<()> {
        let Order::Partitioned(partitions) = &self.order else { return Ok(()) };
        let bytes =
            2 * partitions.payload.iter().map(|column| (column.rows * column.width.bytes()) as u64).sum::<u64>();
        let partitions = partitions.clone();
        cx.monitor.phase(Phase::GroupBuild, bytes, || {
            self.order = Order::Partitioned(cx.device.group_partitions(partitions, cx.stream)?);
            self.find_row_numbers(cx)
        })
    }

    /// Takes the row numbers out of the moved columns.
    fn find_row_numbers(&mut self, cx: &JoinContext<'_>) -> Result<()> {
        if !self.numbered {
            return Ok(());
        }
        let moved_columns = match &self.order {
            Order::Original(_) => return Ok(()),
            Order::Partitioned(partitions) => &partitions.payload,
            Order::Sorted(sorted) => &sorted.payload,
            Order::Joined { moved_columns, .. } => moved_columns,
        };
        let Some(numbers) = moved_columns.get(self.moved_columns.len()) else { return Ok(()) };
        self.to_rows = Some(original_numbers(cx, numbers, self.keys.packed.rows_kept.as_ref())?);
        Ok(())
    }
}

/// True if a column of the result is gathered from the transformed keys, because the key is that
/// column, bit for bit.
pub(super) fn is_raw_key(layout: &KeyLayout, input: &SideInput, column: usize, row_layout: RowLayout) -> bool {
    layout.is_raw()
        && input.key_columns[0] == column
        && row_layout != RowLayout::Original
        // Rows without a key are gathered from the original column.
        && !input.has_nulls(column)
}

/// Returns the values of a column for the rows that have a key. `kept` lists these, unless all
/// have.
pub(super) fn of_kept_rows(cx: &JoinContext<'_>, column: &Column, kept: Option<&Positions>) -> Result<Column> {
    let Some(kept) = kept else { return Ok(column.clone()) };
    let bytes = 2 * (kept.len() * column.width.bytes()) as u64;
    cx.monitor.phase(Phase::CopyIn, bytes, || cx.device.gather(column, kept, cx.stream))
}

/// Returns the row numbers behind numbers that moved with the keys. These count the rows that have
/// a key; `kept` lists them, unless all have.
pub(super) fn original_numbers(cx: &JoinContext<'_>, moved: &Column, kept: Option<&Positions>) -> Result<Positions> {
    let numbers = Positions::List { data: moved.data.clone(), rows: moved.rows, nullable: false };
    match kept {
        Some(kept) => cx.device.compose(kept, &numbers, cx.stream),
        None => Ok(numbers),
    }
}

/// Lets columns be dropped, also after an error, while the context's main stream still reads them.
/// The main stream must have waited for their copies.
fn record_stream<'a>(columns: impl IntoIterator<Item = (&'a usize, &'a Column)>, cx: &JoinContext<'_>) {
    let columns = columns.into_iter().map(|(_, column)| column);
    record_stream_of_buffers(columns.flat_map(|column| std::iter::once(&column.data).chain(&column.validity)), cx);
}

fn record_stream_of_buffers<'a>(buffers: impl IntoIterator<Item = &'a DeviceBuffer>, cx: &JoinContext<'_>) {
    buffers.into_iter().for_each(|buffer| cx.device.record_stream(buffer, cx.stream));
}

/// Copies in a column in table order.
pub(super) fn copy_column(cx: &JoinContext<'_>, stream: &Stream, rows: &Rows, column: usize) -> Result<Column> {
    cx.monitor.counted_phase(Phase::CopyIn, |moved| {
        let before = stream.savings.so_far();
        let copied = rows.copy_in(column, cx.device, stream)?;
        let savings = stream.savings.so_far().since(before);
        moved.bytes += ((rows.len() * copied.width.bytes()) as u64).saturating_sub(savings.bytes());
        moved.kept_bytes += savings.kept;
        moved.in_place_bytes += savings.in_place;
        Ok(copied)
    })
}

/// Copies in a column of values of variable length.
pub(super) fn copy_text(cx: &JoinContext<'_>, stream: &Stream, rows: &Rows, column: usize) -> Result<BytesColumn> {
    cx.monitor.counted_phase(Phase::CopyIn, |moved| {
        moved.bytes += rows.text_bytes(column);
        rows.copy_in_bytes(column, cx.device, stream)
    })
}

fn payload_bytes(payload: &Payload, rows: usize) -> u64 {
    let width = match payload {
        Payload::RowNumber => 4,
        Payload::Column(column) => column.width.bytes(),
    };
    (rows * width) as u64
}

/// Returns the rows that `kept` does not list.
pub(super) fn rows_without_key(cx: &JoinContext<'_>, kept: &Positions, rows: usize) -> Result<Positions> {
    let flags = cx.device.new_flags(rows, cx.stream)?;
    cx.device.mark(kept, &flags, cx.stream)?;
    cx.device.select_flags(&flags, rows, Which::Unmatched, cx.stream)
}
