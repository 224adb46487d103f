//! Loans to a job of another process, kept by the process that owns the slabs.
//!
//! ```text
//!   lend        [                 free                  ]   a region
//!   borrower    [ piece |  free  | piece |  piece | free]   allocates there, without a message
//!   cut_out     [ piece |  free  ] piece [  piece | free]   a piece of a result leaves the region
//!   take_back   [ piece ]          piece [  piece ]         unused bytes are the owner's again
//! ```
//!
//! A piece that a result refers to belongs to the result from then on, with its share of the
//! region's reservation. So the result keeps its own bytes in use, and not the region.

use std::collections::BTreeMap;

use arrow::buffer::Buffer;
use serde::{Deserialize, Serialize};

use super::{ALIGNMENT, ArenaBuffer, holding, size_of_piece};

/// Bytes of a loan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Address of the first byte in the owner.
    pub address: u64,
    pub len: usize,
}

/// Memory that a job of another process has borrowed. Dropping it takes all of it back, except
/// pieces that results refer to.
#[derive(Debug, Default)]
pub struct Loans {
    /// Regions where the borrower hands out pieces, by address.
    regions: BTreeMap<u64, ArenaBuffer>,
    /// Pieces that results refer to and the borrower still uses, by address.
    cut_out: BTreeMap<u64, Buffer>,
}

impl Loans {
    /// Lends a region. Returns its bytes.
    pub fn lend(&mut self, region: ArenaBuffer) -> Span {
        let span = Span { address: region.as_ptr() as u64, len: size_of_piece(region.len()) };
        self.regions.insert(span.address, region);
        span
    }

    /// Takes pieces that a result refers to out of their regions, and returns them by address. The
    /// borrower does not write to them any more. Bytes that are not lent are left out.
    pub fn cut_out(&mut self, pieces: &[Span]) -> BTreeMap<u64, Buffer> {
        let mut found = BTreeMap::new();
        for &span in pieces {
            // Earlier batches may refer to the same piece.
            let known = self.cut_out.get(&span.address).cloned();
            if let Some(piece) = known.or_else(|| self.carve(span)) {
                self.cut_out.insert(span.address, piece.clone());
                found.insert(span.address, piece);
            }
        }
        found
    }

    /// Takes back bytes that the borrower does not use any more. They are free when the returned
    /// buffers are dropped, which may unmap a slab. Bytes that are not lent are left out.
    #[must_use]
    pub fn take_back(&mut self, unused: &[Span]) -> Vec<Buffer> {
        let take = |&span: &Span| self.cut_out.remove(&span.address).or_else(|| self.carve(span));
        unused.iter().filter_map(take).collect()
    }

    /// Cuts bytes out of their region.
    fn carve(&mut self, Span { address, len }: Span) -> Option<Buffer> {
        let size = len.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let (start, offset) = holding(&self.regions, address, size, |region| size_of_piece(region.len()))?;
        if !offset.is_multiple_of(ALIGNMENT) {
            return None;
        }
        let mut piece = self.regions.remove(&start)?;
        if offset > 0 {
            let rest = piece.split_off(offset);
            self.regions.insert(start, std::mem::replace(&mut piece, rest));
        }
        if size < piece.len() {
            self.regions.insert(address + size as u64, piece.split_off(size));
        }
        piece.truncate(len);
        Some(piece.freeze())
    }
}
