//! What passes between a strategy and a device: buffers, columns, keys, arrangements, matches and positions.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use arrow::buffer::Buffer;
use serde::{Deserialize, Serialize};

use crate::Result;

/// The position that means "no row": a null on gathering. No row has it, because [`ROWS_MAX`] is smaller.
pub const NO_ROW: u32 = u32::MAX;

/// The most rows of one side that a device is given at a time: as many as 32-bit positions tell apart, but for so many that those
/// which follow the last one in a tile have positions as well.
pub const ROWS_MAX: usize = (u32::MAX - 0xffff) as usize;

/// The most parts of a build side that pairs are divided by.
pub const PARTS_MAX: usize = 32;

/// Which device: its kind and its number among those of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceId {
    /// CPU or GPU.
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
    /// A slice of the CPU's threads with a memory budget.
    Host,
    /// An NVIDIA GPU.
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

/// What a device is made of, and the sizes it works best with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// As the operator knows it: `2 threads of Intel(R) Xeon(R)`, `NVIDIA H200`.
    pub name: String,
    /// Which one of those that are alike: a GPU's UUID; empty where it says none.
    pub unit: String,
    /// CPU threads, or multiprocessors.
    pub parallelism: usize,
    /// CPU threads that work for it: those of a host device, and of a GPU those that do what it cannot.
    pub cpu_threads: usize,
    /// Streams of one job that are worked on at once, so that copies and kernels overlap. 1 where a call is finished when
    /// it returns.
    pub streams: usize,
    /// Rows that one of them takes at a time, so that the others have nothing to do where there are no more; 1 where rows are shared out one by
    /// one.
    pub morsel_rows: usize,
    /// Probe rows that one wave of matching and gathering should cover, so that what passes between its primitives stays
    /// in cache (host) or launches stay few (GPU).
    pub wave_rows: usize,
    /// Bytes of the result that should be gathered at once: about a message's worth while they are in cache (host), more
    /// where each call and each copy costs by itself (GPU).
    pub gather_bytes: usize,
    /// Device memory that arranging a side takes on top of what a host device needs, per row: beside a second copy of what is
    /// arranged. `None` where that is nothing.
    pub row_scratch_bytes: Option<usize>,
    /// Build rows that a partition should have, so that its hash table stays in the fastest memory.
    pub partition_rows: usize,
    /// The most bits that one partition pass resolves well.
    pub pass_bits_max: u32,
    /// Whether partitions had better be joined in one go ([`join_partitions`](super::Device::join_partitions)) than matched first
    /// and gathered then.
    pub joins_partitions: bool,
    /// Whether it works on values of variable length itself: makes keys of them ([`short_values`](super::Device::short_values),
    /// [`hash_keys`](super::Device::hash_keys)), and gathers them ([`gather_bytes_to_host`](super::Device::gather_bytes_to_host)); else
    /// the host does.
    pub works_on_text: bool,
}

/// Memory of a device. Only the device's own room looks inside.
pub trait DeviceMemory: Any + Send + Sync + fmt::Debug {
    /// Bytes that may be used.
    fn size_bytes(&self) -> usize;
    /// Bytes that the device's budget is charged for it: more than may be used, where memory comes in larger pieces.
    fn charged_bytes(&self) -> u64 {
        self.size_bytes() as u64
    }
    /// For the owning device, which knows the concrete type.
    fn as_any(&self) -> &dyn Any;
}

/// Shared memory of a device; the last clone frees it (in stream order) and gives its budget back.
pub type DeviceBuffer = Arc<dyn DeviceMemory>;

/// Bytes per value of a fixed-width column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Width {
    /// 8 bits.
    W1,
    /// 16 bits.
    W2,
    /// 32 bits.
    W4,
    /// 64 bits.
    W8,
    /// 128 bits.
    W16,
    /// 256 bits (wide decimals). Payload only.
    W32,
}

impl Width {
    /// The width of that many bytes, if there is one.
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
    /// Bytes per value.
    pub width: Width,
    /// Number of values.
    pub rows: usize,
    /// A bit per row, 1 for a value; `None` when there are no nulls. What lies under a null is unspecified.
    pub validity: Option<DeviceBuffer>,
}

/// A gathered column in host memory.
#[derive(Clone, Debug)]
pub struct HostColumn {
    /// Values, in Arrow's layout.
    pub data: Buffer,
    /// A bit per row, 1 for a value, and the number of nulls; `None` when there are none.
    pub validity: Option<(Buffer, usize)>,
    /// Number of values.
    pub rows: usize,
}

/// A run of bits in host memory, in Arrow's order (least significant first).
#[derive(Clone, Debug)]
pub enum BitSlice {
    /// `len` bits of `buffer` from bit `offset`.
    Bits {
        /// Where the bits are.
        buffer: Buffer,
        /// First bit.
        offset: usize,
        /// Number of bits.
        len: usize,
    },
    /// `len` bits that are all one: a chunk without nulls.
    Ones {
        /// Number of bits.
        len: usize,
    },
}

impl BitSlice {
    /// Number of bits.
    pub fn len(&self) -> usize {
        match self {
            Self::Bits { len, .. } | Self::Ones { len } => *len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Bytes per packed key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KeyWidth {
    /// 32 bits.
    W4,
    /// 64 bits.
    W8,
    /// 128 bits.
    W16,
}

impl KeyWidth {
    /// The narrowest width that holds `bits` bits.
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
    /// The values.
    pub column: Column,
    /// How a value becomes bits.
    pub encoding: KeyEncoding,
    /// Where the field's lowest bit goes in the packed key.
    pub shift: u32,
    /// Bits that the encoded value takes.
    pub bits: u32,
    /// `Some(bit)`: nulls match nulls; a null row has this bit of the packed key set, and zeros for the value.
    /// `None`: a row that is null here has no key.
    pub null_bit: Option<u32>,
}

/// How a key value becomes bits, so that equal bits mean equal values. Order is kept where the type has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyEncoding {
    /// The bits as they are, zero-extended.
    Unsigned,
    /// A two's-complement integer of the column's width, minus `min` (wrapping in 128 bits): small ranges take few bits,
    /// and order is kept. With `min` the type's own minimum this is the usual sign flip.
    Signed {
        /// The smallest value of both sides.
        min: i128,
    },
    /// An unsigned integer of the column's width minus `min`.
    Offset {
        /// The smallest value of both sides.
        min: u128,
    },
    /// IEEE 754 of the column's width (2, 4 or 8): -0 becomes 0, every NaN the same NaN, and order is kept.
    Float,
}

/// Keys of fixed width, as they lie.
#[derive(Clone, Debug)]
pub struct Keys {
    /// `rows` unsigned integers.
    pub data: DeviceBuffer,
    /// Bytes per key.
    pub width: KeyWidth,
    /// Number of keys; at most [`ROWS_MAX`].
    pub rows: usize,
}

impl Keys {
    /// The keys as a column, to be gathered.
    pub fn as_column(&self) -> Column {
        let width = Width::from_bytes(self.width.bytes()).expect("every key width is a column width");
        Column { data: self.data.clone(), width, rows: self.rows, validity: None }
    }
}

/// Keys made from columns.
#[derive(Clone, Debug)]
pub struct PackedKeys {
    /// The keys of the rows that have one.
    pub keys: Keys,
    /// The row number of each key; `None` when every row has a key, so that they are the same.
    pub rows_kept: Option<Positions>,
}

/// Something that moves with the keys when rows are arranged.
#[derive(Clone, Debug)]
pub enum Carry {
    /// The number of the row itself, made on the fly; arrives as a column of width 4.
    RowNumber,
    /// A column's values. Its validity, if any, is not moved: nullable columns are gathered by row number.
    Column(Column),
}

/// Which bits of the mixed key choose the partition. Bits are counted from the most significant, so that levels are disjoint:
/// the second of two passes over `{0, 15}` uses `{8, 7}` if the first used `{0, 8}`, and tables use the lowest bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RadixBits {
    /// Bits that earlier levels have used.
    pub skip: u32,
    /// Bits of this level: `1 << bits` partitions, in as many passes as that takes.
    pub bits: u32,
}

/// Rows arranged by partition.
#[derive(Clone, Debug)]
pub struct Partitions {
    /// The keys, partition after partition.
    pub keys: Keys,
    /// What was carried, in the same order and as it was given.
    pub carried: Vec<Column>,
    /// Where each partition starts.
    pub bounds: Bounds,
    /// The bits that chose the partition.
    pub bits: RadixBits,
    /// What is known of equal keys.
    pub grouping: Grouping,
}

impl Partitions {
    /// Whether equal keys are known to be adjacent.
    pub fn is_grouped(&self) -> bool {
        matches!(self.grouping, Grouping::Adjacent { .. })
    }
}

/// Where partitions start, and at the end the number of rows: one more entry than partitions. A device with memory of its own keeps them
/// there, and tells when it is asked: many joins never ask.
#[derive(Clone, Debug)]
pub struct Bounds(Arc<BoundsState>);

#[derive(Debug)]
enum BoundsState {
    Here(Vec<usize>),
    There { partitions: usize, rows: usize, bounds: Box<dyn BoundsOnDevice>, read: OnceLock<Vec<usize>> },
}

/// Bounds in a device's memory.
pub trait BoundsOnDevice: fmt::Debug + Send + Sync {
    /// All of them. Waits.
    fn read(&self) -> Result<Vec<usize>>;

    /// For the device that made them.
    fn as_any(&self) -> &dyn Any;
}

impl Bounds {
    /// Those of so many partitions with so many rows together, in a device's memory.
    pub fn on_device(partitions: usize, rows: usize, bounds: Box<dyn BoundsOnDevice>) -> Self {
        Self(Arc::new(BoundsState::There { partitions, rows, bounds, read: OnceLock::new() }))
    }

    /// How many partitions there are.
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

    /// The bounds; read from the device when it was never asked. May wait.
    ///
    /// # Errors
    /// The device's.
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

    /// The bounds, unless a device keeps them in memory of its own.
    pub fn here(&self) -> Option<&[usize]> {
        match &*self.0 {
            BoundsState::Here(bounds) => Some(bounds),
            BoundsState::There { .. } => None,
        }
    }

    /// What the device has, of a device with memory of its own.
    pub fn there(&self) -> Option<&dyn BoundsOnDevice> {
        match &*self.0 {
            BoundsState::Here(_) => None,
            BoundsState::There { bounds, .. } => Some(&**bounds),
        }
    }

    /// Rows of a range of partitions. May wait, unless it is all of them.
    ///
    /// # Errors
    /// The device's.
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
        assert!(!bounds.is_empty(), "there is one bound more than partitions");
        Self(Arc::new(BoundsState::Here(bounds)))
    }
}

/// What is known of equal keys within partitions.
#[derive(Clone, Debug)]
pub enum Grouping {
    /// They may lie apart.
    Unknown,
    /// They are adjacent.
    Adjacent {
        /// Where, from a device that matches by runs.
        runs: Option<Runs>,
    },
}

/// Runs of equal keys, one after the other through all partitions.
#[derive(Clone, Debug)]
pub struct Runs {
    /// Where each starts, and at the end the number of rows: 32-bit positions.
    pub heads: DeviceBuffer,
    /// How many there are.
    pub count: usize,
    /// How many lie before each partition, and at the end all of them: 32-bit numbers.
    pub before: DeviceBuffer,
}

/// Rows arranged by key.
#[derive(Clone, Debug)]
pub struct Sorted {
    /// Keys in ascending order.
    pub keys: Keys,
    /// What was carried, in the same order and as it was given.
    pub carried: Vec<Column>,
}

/// A table over build keys, in the form that its device likes.
#[derive(Clone, Debug)]
pub struct Table {
    /// The device's own.
    pub state: Arc<dyn DeviceMemory>,
    /// Build rows with equal keys adjacent, when keys repeat: matches are positions in this list.
    pub order: Option<Positions>,
    /// Build rows in the table.
    pub rows: usize,
}

/// What is known of a set of build keys in little memory, in the form that its device likes.
#[derive(Clone, Debug)]
pub struct Filter {
    /// The device's own.
    pub state: Arc<dyn DeviceMemory>,
    /// Keys that it was built of.
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
    /// How many of them have a match.
    pub matched_rows: usize,
    /// The sum of all run lengths.
    pub total: u64,
}

impl Matches {
    /// How many pairs [`expand`](super::Device::expand) can give.
    pub fn pair_count(&self, unmatched: Unmatched) -> u64 {
        match unmatched {
            Unmatched::Skip => self.total,
            Unmatched::Emit => self.total + (self.rows.len() - self.matched_rows) as u64,
        }
    }
}

/// What [`match_partitions`](super::Device::match_partitions) found.
#[derive(Clone, Debug)]
pub enum PartitionMatches {
    /// The matches of the probe rows of those partitions.
    Matched(Matches),
    /// A build key repeats, and equal keys are not adjacent: group the partitions, then ask again.
    RepeatedBuildKeys,
}

/// What [`join_partitions`](super::Device::join_partitions) found.
#[derive(Clone, Debug)]
pub struct JoinedPartitions {
    /// Pairs of rows with equal keys.
    pub pairs: u64,
    /// Each of them once, in no order; `None` where there was no room for all.
    pub rows: Option<JoinedRows>,
}

/// Rows of both sides, side by side.
#[derive(Clone, Debug)]
pub struct JoinedRows {
    /// Their keys, if they were asked for.
    pub keys: Option<Keys>,
    /// What the build side carried, in the same order and as it was given.
    pub build: Vec<Column>,
    /// What the probe side carried.
    pub probe: Vec<Column>,
}

/// What is wanted of joined partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// How many rows there would be.
    Count,
    /// The rows, if these are no more than `room`, with their keys or without.
    Rows {
        /// Rows that memory may be taken for.
        room: usize,
        /// Whether their keys are among them.
        keys: bool,
    },
}

/// What becomes of probe rows without a match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmatched {
    /// They are passed over.
    Skip,
    /// They give one pair without a build row.
    Emit,
}

/// Which rows to select.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Those with a match.
    Matched,
    /// Those without.
    Unmatched,
}

/// A list of row positions on a device.
#[derive(Clone, Debug)]
pub enum Positions {
    /// Consecutive positions; nothing is stored.
    Range(Range<usize>),
    /// 32-bit positions.
    List {
        /// `rows` unsigned integers of 32 bits.
        data: DeviceBuffer,
        /// Number of positions.
        rows: usize,
        /// Whether [`NO_ROW`] may be among them.
        may_miss: bool,
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

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Matched rows, side by side.
#[derive(Clone, Debug)]
pub struct Pairs {
    /// Build positions; [`NO_ROW`] beside an unmatched probe row.
    pub build: Positions,
    /// Probe positions.
    pub probe: Positions,
}
