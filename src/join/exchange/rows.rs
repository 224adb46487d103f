//! Rows of one side before and after an exchange.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::channel::{Piece, SlotLayout};
use crate::Result;
use crate::columns::{KeyLayout, Role, SideKeys};
use crate::device::{
    Bounds, Column, DeviceBuffer, KeyWidth, Keys, PackedKeys, Payload, Phase, Positions, RadixBits, Width, peers,
};
use crate::join::RowLayout;
use crate::join::context::JoinContext;
use crate::join::inputs::SideInput;
use crate::join::rank::BUCKET_BITS;
use crate::join::transform::{
    ArrivedRows, CopyIn, ExchangedNumbers, Transform, TransformedSide, arrive, lay_out, of_kept_rows, original_numbers,
};

/// One side of an exchange: the columns that cross, in this order: the key, columns of the result,
/// and row numbers if the host gathers a column.
pub(super) struct ExchangedSide {
    pub(super) input: Arc<SideInput>,
    /// The side as a table, for rows that cross nothing.
    pub(super) table: SideInput,
    keeps_without_key: bool,
    pub(super) slots: SlotLayout,
    key_width: KeyWidth,
    /// Table columns that cross.
    columns: Vec<(usize, Width)>,
    /// Table column that equals the key bit for bit, and does not cross a second time.
    raw_key: Option<usize>,
    is_numbered: bool,
}

/// Chunk of a table, partitioned by bucket.
pub(super) struct BucketedChunk {
    pub(super) role: Role,
    /// Table row at which the chunk starts.
    pub(super) start: u64,
    /// Columns that cross, in the order of [`ExchangedSide`].
    pub(super) columns: Vec<DeviceBuffer>,
    bounds: Bounds,
    /// Rows without a key, by row number in the chunk, if the join keeps them.
    pub(super) without_key: Option<(TransformedSide, Positions)>,
}

impl BucketedChunk {
    /// Returns the first row of each bucket and, at the end, the number of rows. May wait.
    ///
    /// # Errors
    /// The device's read error.
    pub(super) fn bounds(&self) -> Result<&[usize]> {
        self.bounds.get()
    }
}

impl ExchangedSide {
    /// Describes the exchange of a side. `input` is its [exchanged](SideInput::exchanged) form.
    /// `keeps_without_key` is true if the join keeps rows without a key.
    pub(super) fn new(table: SideInput, input: Arc<SideInput>, keeps_without_key: bool, layout: &KeyLayout) -> Self {
        let raw_key = input.key_columns.first().copied().filter(|&key| layout.is_raw() && !input.has_nulls(key));
        let movable = |&column: &usize| Some((column, input.movable(column)?.width));
        let crosses = |(column, _): &(usize, Width)| Some(*column) != raw_key;
        let columns: Vec<_> = input.output_columns.iter().filter_map(movable).filter(crosses).collect();
        let is_numbered = input.output_columns.iter().any(|&column| input.movable(column).is_none());
        let mut widths = vec![layout.width().bytes()];
        widths.extend(columns.iter().map(|(_, width)| width.bytes()));
        widths.extend(is_numbered.then_some(size_of::<u32>()));
        let slots = SlotLayout { widths };
        let key_width = layout.width();
        Self { input, table, keeps_without_key, slots, key_width, columns, raw_key, is_numbered }
    }

    /// Reads a chunk of a table whose columns all cross. Rows without a key are dropped.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn read_whole(&self, cx: &JoinContext<'_>, layout: &KeyLayout, rows: Range<u64>) -> Result<Piece> {
        assert!(!self.is_numbered && !self.keeps_without_key, "whole rows cross");
        let chunk_start = rows.start;
        let (arrived, columns) = self.arrive(cx, layout, rows)?;
        let keys = arrived.keys.packed.keys.clone();
        let columns = std::iter::once(keys.data).chain(columns.into_iter().map(|column| column.data));
        Ok(Piece { rows: keys.rows, chunk_start, columns: columns.collect() })
    }

    /// Copies a chunk of the table in. Returns its keys, and the columns that cross of the rows
    /// with a key.
    fn arrive(&self, cx: &JoinContext<'_>, layout: &KeyLayout, rows: Range<u64>) -> Result<(ArrivedRows, Vec<Column>)> {
        let (row_layout, keeps_null_keys) = (RowLayout::Original, self.keeps_without_key);
        let how = Transform { layout, row_layout, keeps_null_keys, filter: None, copy_in: CopyIn::Prefetch };
        let arrived = arrive(cx, &self.input, self.input.rows(rows), how)?;
        let rows_kept = arrived.keys.packed.rows_kept.as_ref();
        let of_column = |(column, _): &(usize, Width)| of_kept_rows(cx, &arrived.columns[column], rows_kept);
        let columns = self.columns.iter().map(of_column).collect::<Result<_>>()?;
        Ok((arrived, columns))
    }

    /// Reads a chunk of the table and partitions it by bucket.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn read(&self, cx: &JoinContext<'_>, layout: &KeyLayout, rows: Range<u64>) -> Result<BucketedChunk> {
        let start = rows.start;
        let (arrived, columns) = self.arrive(cx, layout, rows)?;
        let packed = arrived.keys.packed.clone();
        let mut payload: Vec<Payload> = columns.into_iter().map(Payload::Column).collect();
        if self.is_numbered {
            payload.push(Payload::RowNumber);
        }
        let bytes = 2 * (packed.keys.rows * self.slots.widths.iter().sum::<usize>()) as u64;
        let bits = RadixBits { skip: 0, bits: BUCKET_BITS };
        let mut partitions = cx
            .monitor
            .phase(Phase::Exchange, bytes, || cx.device.partition(&packed.keys, &payload, bits, cx.stream))?;
        drop(payload);
        if self.is_numbered {
            let numbers = partitions.payload.pop().expect("row numbers are the last column");
            let Positions::List { data, rows, .. } = original_numbers(cx, &numbers, packed.rows_kept.as_ref())? else {
                unreachable!("a list that is looked up in a list gives a list")
            };
            partitions.payload.push(Column { data, rows, ..numbers });
        }
        let without_key = match arrived.null_keys.clone() {
            Some(numbers) => Some((lay_out(cx, &self.table, arrived, layout, RowLayout::Original)?, numbers)),
            None => None,
        };
        let columns =
            std::iter::once(partitions.keys.data).chain(partitions.payload.into_iter().map(|column| column.data));
        let (columns, bounds) = (columns.collect(), partitions.bounds);
        Ok(BucketedChunk { role: self.input.role, start, columns, bounds, without_key })
    }

    /// Joins pieces together to rows that can be laid out. Streams of other threads may have made
    /// the pieces, if these streams are done with them.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn arrived(&self, cx: &JoinContext<'_>, mut pieces: Vec<Piece>) -> Result<ArrivedRows> {
        // Memory that is freed on the stream of another thread could be reused while this one
        // reads.
        for buffer in pieces.iter().flat_map(|piece| &piece.columns) {
            cx.device.record_stream(buffer, cx.stream);
        }
        let rows: usize = pieces.iter().map(|piece| piece.rows).sum();
        let mut starts = Vec::with_capacity(pieces.len());
        let mut first = 0;
        for piece in &pieces {
            starts.push((first, piece.chunk_start));
            first += piece.rows;
        }
        let mut buffers = Vec::with_capacity(self.slots.widths.len());
        for width in self.slots.widths.iter().rev() {
            // Each column of the pieces is freed before the next is put together.
            let parts: Vec<(DeviceBuffer, Range<usize>)> = pieces
                .iter_mut()
                .map(|piece| (piece.columns.pop().expect("a piece has every column"), 0..piece.rows * width))
                .collect();
            buffers.push(match <[_; 1]>::try_from(parts) {
                Ok([(buffer, _)]) => buffer,
                Err(parts) => peers(cx.device)?.concat_bytes(&parts, cx.stream)?,
            });
        }
        let mut next = || buffers.pop().expect("every column was put together");
        let keys = Keys { data: next(), width: self.key_width, rows };
        let column = |&(index, width): &(usize, Width)| (index, Column { data: next(), width, rows, validity: None });
        let mut columns: BTreeMap<usize, Column> = self.columns.iter().map(column).collect();
        if let Some(raw_key) = self.raw_key.filter(|key| self.input.movable(*key).is_some()) {
            columns.insert(raw_key, keys.as_column());
        }
        let exchanged = self.is_numbered.then(|| {
            let in_chunk = Column { data: next(), width: Width::W4, rows, validity: None };
            Arc::new(ExchangedNumbers { in_chunk, pieces: starts })
        });
        Ok(ArrivedRows {
            // The host gathers from the whole table.
            rows: self.input.rows(if self.is_numbered { 0..self.input.table.rows } else { 0..0 }),
            keys: Arc::new(SideKeys::packed(PackedKeys { keys, rows_kept: None })),
            columns,
            text: BTreeMap::new(),
            came_as_keys: BTreeSet::new(),
            null_keys: None,
            exchanged,
        })
    }
}
