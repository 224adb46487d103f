//! Which columns cross the link as offsets from a base, in fewer bytes than their values take (frame of reference): integers whose range is
//! known to need no more, where the CPU narrows them faster than the link carries them as they are.

use super::Rates;
use super::inputs::integers;
use crate::catalog::Table;
use crate::columns::{Role, fixed_width};
use crate::device::{FrameOfReference, NarrowedMin};

/// How many times as fast as plain copies narrowed ones have to be: the CPU has other work as well.
const WORTH: f64 = 1.15;

/// Which columns cross the link narrowed, if their range allows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Narrowing {
    /// None.
    Nothing,
    /// Those that arrive before any row of the result can leave: of the build side, and where other columns of that come last, only its keys.
    /// The link has nothing to carry the other way meanwhile, and the CPU nothing else to do.
    BeforeRows,
    /// All.
    Everything,
}

impl Narrowing {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Nothing, Self::BeforeRows, Self::Everything];

    /// As a word of a command, or in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::BeforeRows => "before-rows",
            Self::Everything => "everything",
        }
    }

    /// Whether it is about a column of the side of that role, which is one of its keys or not.
    pub(super) fn includes(self, role: Role, is_key: bool, build_columns_last: bool) -> bool {
        match self {
            Self::Nothing => false,
            Self::BeforeRows => role == Role::Build && (is_key || !build_columns_last),
            Self::Everything => true,
        }
    }
}

impl Rates {
    /// Whether narrowing columns is faster than copying them as they are.
    pub(super) fn narrows(&self) -> bool {
        self.copy_in_narrowed > WORTH * self.copy_in
    }

    /// Seconds in which so many bytes of values cross the link as offsets: what takes longer of narrowing them and of the link.
    pub(super) fn narrowed_seconds(&self, frame: &FrameOfReference, bytes: f64) -> f64 {
        (bytes / self.copy_in_narrowed).max(frame.share() * bytes / self.copy_in)
    }
}

/// The frame in which the values of a column lie; `None` where offsets would take as many bytes, or it is not known, or the column, or what
/// each batch has of it, is too small.
pub(super) fn frame_of(table: &Table, column: usize, least: &NarrowedMin) -> Option<FrameOfReference> {
    let width = fixed_width(table.schema.field(column).data_type())?;
    let (min, max) = integers(table.statistics.get(column)?)?;
    let bytes = table.rows * width.bytes() as u64;
    let batches = table.batches.len().max(1) as u64;
    let is_large = bytes >= least.copy_bytes as u64 && bytes / batches >= least.batch_bytes as u64;
    FrameOfReference::of(width, min, max).filter(|_| is_large)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Width;

    #[test]
    fn offsets_are_as_narrow_as_the_range_allows() {
        let frame = |width, min: i128, max: i128| FrameOfReference::of(width, min, max).map(|frame| frame.offset_width);
        assert_eq!(frame(Width::W8, 7, 7), Some(Width::W1));
        assert_eq!(frame(Width::W8, -1, 254), Some(Width::W1));
        assert_eq!(frame(Width::W8, -1, 255), Some(Width::W2));
        assert_eq!(frame(Width::W8, -1, (1 << 32) - 2), Some(Width::W4));
        assert_eq!(frame(Width::W8, -1, (1 << 32) - 1), None, "eight bytes again");
        assert_eq!(frame(Width::W8, i64::MIN.into(), i64::MAX.into()), None);
        assert_eq!(frame(Width::W4, 0, 65_536), None);
        assert_eq!(frame(Width::W16, 0, u64::MAX.into()), Some(Width::W8));
        assert_eq!(frame(Width::W16, i128::MIN, i128::MAX), None);
        assert_eq!((frame(Width::W1, 0, 0), frame(Width::W32, 0, 0), frame(Width::W8, 1, 0)), (None, None, None));
    }
}
