//! Data that passes between a strategy and a device: buffers, columns, keys, layouts, matches
//! and positions.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use arrow::buffer::Buffer;
use serde::{Deserialize, Serialize};

use crate::Result;

/// The position that means "no row": a null on gathering. No row has it, because [`ROWS_MAX`] is
/// smaller.
pub const NO_ROW: u32 = u32::MAX;

/// Maximum number of rows of one side that a device is given at a time. This is the number of
/// 32-bit positions, less a margin: the rows that follow the last one in a tile need positions as
/// well.
pub const ROWS_MAX: usize = (u32::MAX - 0xffff) as usize;

/// Maximum number of parts of a build side that pairs are divided by.
pub const PARTS_MAX: usize = 32;

/// Identity of a device: its kind and its number within the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceId {
    pub kind: DeviceKind,
    /// From 0, within the kind.
    pub index: u16,
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.index)
    }
}

/// The kinds of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DeviceKind {
    Host,
    Cuda,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        })
    }
}

/// Memory of a device. Only the device's own module reads it.
pub trait DeviceMemory: Any + Send + Sync + fmt::Debug {
    /// Bytes that may be used.
    fn size_bytes(&self) -> usize;
    /// Bytes that the device's budget is charged. More than the usable bytes if memory comes in
    /// larger pieces.
    fn charged_bytes(&self) -> u64 {
        self.size_bytes() as u64
    }
    /// Gives the owning device the concrete type.
    fn as_any(&self) -> &dyn Any;
}

/// Shared memory of a device. The last clone frees it (in stream order) and returns its budget.
pub type DeviceBuffer = Arc<dyn DeviceMemory>;

/// Bytes per value of a fixed-width column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Width {
    W1,
    W2,
    W4,
    W8,
    W16,
    /// Wide decimals. Payload only.
    W32,
}

impl Width {
    /// Returns the width of the given number of bytes, if there is one.
    pub fn from_bytes(bytes: usize) -> Option<Self> {
        Some(match bytes {
            1 => Self::W1,
            2 => Self::W2,
            4 => Self::W4,
            8 => Self::W8,
            16 => Self::W16,
            32 => Self::W32,
            _ => return None,
        })
    }

    /// Bytes per value.
    pub fn bytes(self) -> usize {
        match self {
            Self::W1 => 1,
            Self::W2 => 2,
            Self::W4 => 4,
            Self::W8 => 8,
            Self::W16 => 16,
            Self::W32 => 32,
        }
    }
}

/// A fixed-width column on a device.
#[derive(Clone, Debug)]
pub struct Column {
    /// `rows` values of `width` bytes.
    pub data: DeviceBuffer,
    pub width: Width,
    pub rows: usize,
    /// A bit per row, 1 for a value; `None` when there are no nulls. The value under a null is
    /// unspecified.
    pub validity: Option<DeviceBuffer>,
}

/// A gathered column in host memory.
#[derive(Clone, Debug)]
pub struct HostColumn {
    /// Values, in Arrow's layout.
    pub data: Buffer,
    /// A bit per row, 1 for a value, and the number of nulls; `None` when there are none.
    pub validity: Option<(Buffer, usize)>,
    pub rows: usize,
}

/// A run of bits in host memory, in Arrow's order (least significant first).
#[derive(Clone, Debug)]
pub enum BitSlice {
    /// `len` bits of `buffer` from bit `offset`.
    Bits { buffer: Buffer, offset: usize, len: usize },
    /// `len` bits that are all one: a chunk without nulls.
    Ones { len: usize },
}

impl BitSlice {
    /// Number of bits.
    pub fn len(&self) -> usize {
        match self {
            Self::Bits { len, .. } | Self::Ones { len } => *len,
        }
    }

    /// True if there are no bits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Bytes per packed key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KeyWidth {
    W4,
    W8,
    W16,
}

impl KeyWidth {
    /// Returns the narrowest width that holds `bits` bits.
    pub fn for_bits(bits: u32) -> Option<Self> {
        Some(match bits {
            0..=32 => Self::W4,
            33..=64 => Self::W8,
            65..=128 => Self::W16,
            _ => return None,
        })
    }

    /// Bytes per key.
    pub fn bytes(self) -> usize {
        match self {
            Self::W4 => 4,
            Self::W8 => 8,
            Self::W16 => 16,
        }
    }
}

/// One key column and its place in the packed key.
#[derive(Clone, Debug)]
pub struct KeyField {
    pub column: Column,
    pub encoding: KeyEncoding,
    /// Position of the field's lowest bit in the packed key.
    pub shift: u32,
    pub bits: u32,
    /// `Some(bit)`: nulls match nulls. A null row has this bit of the packed key set, and zeros for
    /// the value. `None`: a row that is null here has no key.
    pub null_bit: Option<u32>,
}

/// Encoding of a key value in bits, so that equal bits mean equal values. If the type has an order,
/// the bits keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyEncoding {
    /// The bits as they are, zero-extended.
    Unsigned,
    /// A two's-complement integer of the column's width, minus `min` (wrapping in 128 bits). Small
    /// ranges take few bits, and order is kept. With the type's own minimum as `min`, this is the
    /// usual sign flip.
    Signed {
        /// The smallest value of both sides.
        min: i128,
    },
    /// An unsigned integer of the column's width minus `min`.
    Offset { min: u128 },
    /// IEEE 754 of the column's width (2, 4 or 8): -0 becomes 0, every NaN the same NaN, and order
    /// is kept.
    Float,
}

/// Keys of fixed width, in their given order.
#[derive(Clone, Debug)]
pub struct Keys {
    /// `rows` unsigned integers.
    pub data: DeviceBuffer,
    pub width: KeyWidth,
    /// At most [`ROWS_MAX`].
    pub rows: usize,
}

impl Keys {
    /// Returns the keys as a column, for gathering.
    pub fn as_column(&self) -> Column {
        let width = Width::from_bytes(self.width.bytes()).expect("every key width is a column width");
        Column { data: self.data.clone(), width, rows: self.rows, validity: None }
    }
}

/// Keys made from columns.
#[derive(Clone, Debug)]
pub struct PackedKeys {
    pub keys: Keys,
    /// The row number of each key. `None` when every row has a key, so that key and row numbers are
    /// equal.
    pub rows_kept: Option<Positions>,
}

/// Data that moves with the keys when rows are transformed.
#[derive(Clone, Debug)]
pub enum Payload {
    /// The row's own number, made on the fly. It arrives as a column of width 4.
    RowNumber,
    /// A column's values. Its validity, if any, is not moved: nullable columns are gathered by row
    /// number.
    Column(Column),
}

/// Bits of the mixed key that choose the partition. Bits are counted from the most significant, so
/// that levels are disjoint. The second of two passes over `{0, 15}` uses `{8, 7}` if the first
/// used `{0, 8}`. Tables use the lowest bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RadixBits {
    /// Bits that earlier levels have used.
    pub skip: u32,
    /// Bits of this level: `1 << bits` partitions, in as many passes as needed.
    pub bits: u32,
}

/// Rows transformed by partition.
#[derive(Clone, Debug)]
pub struct Partitions {
    pub keys: Keys,
    /// In the order in which they were given.
    pub payload: Vec<Column>,
    pub bounds: Bounds,
    pub bits: RadixBits,
    pub grouping: Grouping,
}

impl Partitions {
    /// True if equal keys are known to be adjacent.
    pub fn is_grouped(&self) -> bool {
        matches!(self.grouping, Grouping::Adjacent { .. })
    }
}

/// Starts of partitions and, at the end, the number of rows: one more entry than partitions. A
/// device with its own memory stores them there and reports them on request, because many joins
/// never need them.
#[derive(Clone, Debug)]
pub struct Bounds(Arc<BoundsState>);

#[derive(Debug)]
enum BoundsState {
    Here(Vec<usize>),
    There { partitions: usize, rows: usize, bounds: Box<dyn BoundsOnDevice>, read: OnceLock<Vec<usize>> },
}

/// Bounds in a device's memory.
pub trait BoundsOnDevice: fmt::Debug + Send + Sync {
    /// Reads all bounds. Waits.
    fn read(&self) -> Result<Vec<usize>>;

    /// Gives the device that made the bounds the concrete type.
    fn as_any(&self) -> &dyn Any;
}

impl Bounds {
    /// Bounds of `partitions` partitions with `rows` rows in total, stored on a device.
    pub fn on_device(partitions: usize, rows: usize, bounds: Box<dyn BoundsOnDevice>) -> Self {
        Self(Arc::new(BoundsState::There { partitions, rows, bounds, read: OnceLock::new() }))
    }

    /// Number of partitions.
    pub fn partitions(&self) -> usize {
        match &*self.0 {
            BoundsState::Here(bounds) => bounds.len() - 1,
            BoundsState::There { partitions, .. } => *partitions,
        }
    }

    /// Rows of all partitions.
    pub fn rows(&self) -> usize {
        match &*self.0 {
            BoundsState::Here(bounds) => bounds[bounds.len() - 1],
            BoundsState::There { rows, .. } => *rows,
        }
    }

    /// Returns the bounds, read from the device at the first call. May wait.
    ///
    /// # Errors
    /// The device's read error.
    pub fn get(&self) -> Result<&[usize]> {
        let (bounds, read) = match &*self.0 {
            BoundsState::Here(bounds) => return Ok(bounds),
            BoundsState::There { bounds, read, .. } => (bounds, read),
        };
        if let Some(read) = read.get() {
            return Ok(read);
        }
        let bounds = bounds.read()?;
        Ok(read.get_or_init(|| bounds))
    }

    /// Returns the bounds, unless a device stores them in its own memory.
    pub fn here(&self) -> Option<&[usize]> {
        match &*self.0 {
            BoundsState::Here(bounds) => Some(bounds),
            BoundsState::There { .. } => None,
        }
    }

    /// Returns the bounds that a device stores in its own memory, if it does.
    pub fn there(&self) -> Option<&dyn BoundsOnDevice> {
        match &*self.0 {
            BoundsState::Here(_) => None,
            BoundsState::There { bounds, .. } => Some(&**bounds),
        }
    }

    /// Returns the rows of a range of partitions. May wait, unless the range is all partitions.
    ///
    /// # Errors
    /// The device's read error.
    pub fn rows_of(&self, partitions: Range<usize>) -> Result<Range<usize>> {
        if partitions == (0..self.partitions()) {
            return Ok(0..self.rows());
        }
        let bounds = self.get()?;
        Ok(bounds[partitions.start]..bounds[partitions.end])
    }
}

impl From<Vec<usize>> for Bounds {
    fn from(bounds: Vec<usize>) -> Self {
        assert!(!bounds.is_empty(), "there is one more bound than partitions");
        Self(Arc::new(BoundsState::Here(bounds)))
    }
}

/// Knowledge about equal keys within partitions.
#[derive(Clone, Debug)]
pub enum Grouping {
    Unknown,
    Adjacent {
        /// Their runs, from a device that matches by runs.
        runs: Option<Runs>,
    },
}

/// Runs of equal keys, one after the other through all partitions.
#[derive(Clone, Debug)]
pub struct Runs {
    /// Start of each run and, at the end, the number of rows: 32-bit positions.
    pub heads: DeviceBuffer,
    pub count: usize,
    /// Number of runs before each partition and, at the end, of all runs: 32-bit numbers.
    pub before: DeviceBuffer,
}

/// Rows transformed by key.
#[derive(Clone, Debug)]
pub struct Sorted {
    pub keys: Keys,
    /// In the order in which they were given.
    pub payload: Vec<Column>,
}

/// A table over build keys, in the device's own form.
#[derive(Clone, Debug)]
pub struct Table {
    pub state: Arc<dyn DeviceMemory>,
    /// Build rows with equal keys adjacent, when keys repeat: matches are positions in this list.
    pub order: Option<Positions>,
    pub rows: usize,
}

/// A compact summary of a set of build keys, in the device's own form.
#[derive(Clone, Debug)]
pub struct Filter {
    pub state: Arc<dyn DeviceMemory>,
    /// Number of keys that the filter was built from.
    pub rows: usize,
}

/// For each probe row of a range, the run of build positions that have its key.
#[derive(Clone, Debug)]
pub struct Matches {
    /// `rows.len()` 32-bit build positions; [`NO_ROW`] where there is no match.
    pub first: DeviceBuffer,
    /// `rows.len()` 32-bit run lengths; `None` when no run is longer than one.
    pub count: Option<DeviceBuffer>,
    /// The probe positions that were matched.
    pub rows: Range<usize>,
    pub matched_rows: usize,
    /// The sum of all run lengths.
    pub total: u64,
}

impl Matches {
    /// Returns the number of pairs that [`expand`](super::Device::expand) can give.
    pub fn pair_count(&self, unmatched: Unmatched) -> u64 {
        match unmatched {
            Unmatched::Skip => self.total,
            Unmatched::Emit => self.total + (self.rows.len() - self.matched_rows) as u64,
        }
    }
}

/// Result of [`match_partitions`](super::Device::match_partitions).
#[derive(Clone, Debug)]
pub enum PartitionMatches {
    Matched(Matches),
    /// A build key repeats, and equal keys are not adjacent. Group the partitions, then call again.
    RepeatedBuildKeys,
}

/// Result of [`join_partitions`](super::Device::join_partitions).
#[derive(Clone, Debug)]
pub struct JoinedPartitions {
    pub pairs: u64,
    /// Each pair once, in no order. `None` if there was no room for all.
    pub rows: Option<JoinedRows>,
}

/// Rows of both sides: row `i` of every column belongs to pair `i`.
#[derive(Clone, Debug)]
pub struct JoinedRows {
    /// Keys of the rows, if they were asked for.
    pub keys: Option<Keys>,
    /// The columns that the build side moved, in the order in which they were given.
    pub build: Vec<Column>,
    pub probe: Vec<Column>,
}

/// Requested result of joined partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    Count,
    /// The rows, if there are at most `room`, with their keys or without.
    Rows {
        room: usize,
        keys: bool,
    },
}

/// Treatment of probe rows without a match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmatched {
    Skip,
    /// Rows without a match give one pair without a build row.
    Emit,
}

/// Selection of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Matched,
    Unmatched,
}

/// A list of row positions on a device.
#[derive(Clone, Debug)]
pub enum Positions {
    /// Consecutive positions; nothing is stored.
    Range(Range<usize>),
    List {
        /// `rows` unsigned integers of 32 bits.
        data: DeviceBuffer,
        rows: usize,
        /// True if [`NO_ROW`] may be among the positions.
        nullable: bool,
    },
}

impl Positions {
    /// Number of positions.
    pub fn len(&self) -> usize {
        match self {
            Self::Range(range) => range.len(),
            Self::List { rows, .. } => *rows,
        }
    }

    /// True if there are no positions.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Matched rows: entry `i` of both lists is pair `i`.
#[derive(Clone, Debug)]
pub struct Pairs {
    /// Build positions; [`NO_ROW`] for an unmatched probe row.
    pub build: Positions,
    pub probe: Positions,
}
