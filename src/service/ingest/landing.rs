//! Landing of a message's body: straight in the arena, each buffer in its own aligned place.
//!
//! ```text
//!   body on the wire   | validity |pad| values   |pad| offsets |pad| ...   8-byte aligned or not
//!                        ╲               ╲              ╲                  one copy, by chunk
//!   piece of the arena | validity | ··· | values     | ··· | offsets | ··· aligned to 64 bytes
//! ```
//!
//! Arrow buffers cover only the bytes of slots, and a slot becomes a buffer only when all of its
//! bytes came from this message. So data that earlier tables left in a piece stays hidden.
//!
//! Two kinds of body take a second copy: one that arrives before its header, and one that is
//! compressed (each buffer alone: Arrow columnar format, "Compression").

use std::io::Read;
use std::ops::Range;

use arrow::buffer::Buffer;
use arrow::ipc::CompressionType;

use super::plan::{BatchPlan, BufferPlan, Need};
use crate::memory::{Arena, ArenaBuffer, Interrupt, human_bytes};
use crate::{Error, Result};

/// Alignment of slots within their piece, in bytes: the widest vector load, and Arrow's
/// recommendation.
pub(super) const SLOT_ALIGNMENT: usize = 64;

const PURPOSE: &str = "a message of an upload";

/// Bytes that are copied between two checks of the interrupt.
const UNCHECKED_BYTES: usize = 4 << 20;

/// Size of the prefix of each compressed buffer: its uncompressed length, or -1 for a buffer that
/// is not compressed.
const LENGTH_PREFIX_BYTES: usize = 8;

/// Body of a message, as it arrives.
#[derive(Debug)]
pub(super) enum Landing {
    /// Copied straight into the slots.
    Scatter(Scatter),
    /// Copied as it arrives, in one range, and divided at the end.
    Whole { piece: ArenaBuffer, have: usize },
    /// Dropped, because no array needs it.
    Discard,
}

impl Landing {
    /// Creates the landing of a body whose header is known.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the arena has no room; nothing was copied then.
    pub fn planned(plan: &BatchPlan, body_len: usize, arena: &Arena) -> Result<Self> {
        match plan.compression {
            None => Ok(Self::Scatter(Scatter::new(plan, arena)?)),
            Some(_) => Self::whole(body_len, arena),
        }
    }

    /// Creates the landing of a body with a known length and an unknown header.
    ///
    /// # Errors
    /// As [`Landing::planned`].
    pub fn whole(body_len: usize, arena: &Arena) -> Result<Self> {
        Ok(Self::Whole { piece: arena.allocate(body_len, PURPOSE)?, have: 0 })
    }

    /// Copies the next bytes of the body to their place.
    pub fn write(&mut self, bytes: &[u8]) {
        match self {
            Self::Scatter(scatter) => scatter.write(bytes),
            Self::Whole { piece, have } => {
                piece[*have..*have + bytes.len()].copy_from_slice(bytes);
                *have += bytes.len();
            }
            Self::Discard => {}
        }
    }

    /// Returns the buffers of the plan, in its order, once the whole body was written.
    ///
    /// # Errors
    /// [`Error::Invalid`] for compressed data that contradicts its header, [`Error::Exhausted`]
    /// when the decompressed data exceeds `message_limit_bytes` or the arena's budget, and the
    /// interrupt's.
    pub fn finish(
        self,
        plan: &BatchPlan,
        arena: &Arena,
        message_limit_bytes: usize,
        interrupt: &Interrupt,
    ) -> Result<Vec<Buffer>> {
        match (self, plan.compression) {
            (Self::Scatter(scatter), _) => Ok(scatter.finish()),
            (Self::Whole { piece, .. }, None) => {
                let mut scatter = Scatter::new(plan, arena)?;
                for part in piece.chunks(UNCHECKED_BYTES) {
                    interrupt.check()?;
                    scatter.write(part);
                }
                Ok(scatter.finish())
            }
            (Self::Whole { piece, .. }, Some(codec)) => {
                decompress(&piece, plan, codec, arena, message_limit_bytes, interrupt)
            }
            (Self::Discard, _) => Err(Error::Internal("the body of a batch was discarded".into())),
        }
    }
}

/// Slots in one piece of the arena, filled in the order of the body.
#[derive(Debug)]
pub(super) struct Scatter {
    /// `None` when no slot has any bytes.
    piece: Option<ArenaBuffer>,
    /// Place of each buffer of the plan in the piece.
    slots: Vec<Range<usize>>,
    /// Start in the body, and slot in the piece, of each buffer that has bytes; ordered by the
    /// start.
    order: Vec<(usize, Range<usize>)>,
    /// First entry of `order` that is not complete.
    next: usize,
    /// Bytes of the body that were written.
    position: usize,
}

impl Scatter {
    fn new(plan: &BatchPlan, arena: &Arena) -> Result<Self> {
        let lengths = plan.buffers.iter().map(|buffer| buffer.used_bytes(buffer.source.len()));
        let (slots, total) = lay_out(lengths.collect::<Result<Vec<_>>>()?);
        let mut order: Vec<_> = slots
            .iter()
            .zip(&plan.buffers)
            .filter(|(slot, _)| !slot.is_empty())
            .map(|(slot, buffer)| (buffer.source.start, slot.clone()))
            .collect();
        order.sort_unstable_by_key(|(source, _)| *source);
        let piece = (total > 0).then(|| arena.allocate(total, PURPOSE)).transpose()?;
        Ok(Self { piece, slots, order, next: 0, position: 0 })
    }

    fn write(&mut self, mut bytes: &[u8]) {
        let Some(piece) = &mut self.piece else { return };
        while let Some((source, slot)) = self.order.get(self.next) {
            let padding = source.saturating_sub(self.position).min(bytes.len());
            bytes = &bytes[padding..];
            self.position += padding;
            if bytes.is_empty() {
                return;
            }
            let done = self.position - source;
            let part = &bytes[..bytes.len().min(slot.len() - done)];
            piece[slot.start + done..][..part.len()].copy_from_slice(part);
            bytes = &bytes[part.len()..];
            self.position += part.len();
            if done + part.len() == slot.len() {
                self.next += 1;
            }
        }
    }

    fn finish(self) -> Vec<Buffer> {
        assert_eq!(self.next, self.order.len(), "a slot was left unfilled, though every slot is inside the body");
        freeze(self.piece, self.slots)
    }
}

/// Places slots of the given lengths one behind the other. Returns the slots and the end of the
/// last.
fn lay_out(lengths: Vec<usize>) -> (Vec<Range<usize>>, usize) {
    let mut end = 0;
    let slots = lengths
        .into_iter()
        .map(|len| {
            let start = if len == 0 { 0 } else { end };
            end += len.next_multiple_of(SLOT_ALIGNMENT);
            start..start + len
        })
        .collect();
    (slots, end)
}

fn freeze(piece: Option<ArenaBuffer>, slots: Vec<Range<usize>>) -> Vec<Buffer> {
    let whole = piece.map(ArenaBuffer::freeze).unwrap_or_default();
    slots
        .into_iter()
        .map(|slot| if slot.is_empty() { Buffer::default() } else { whole.slice_with_length(slot.start, slot.len()) })
        .collect()
}

fn decompress(
    body: &[u8],
    plan: &BatchPlan,
    codec: CompressionType,
    arena: &Arena,
    message_limit_bytes: usize,
    interrupt: &Interrupt,
) -> Result<Vec<Buffer>> {
    let sources = plan.buffers.iter().map(|buffer| Compressed::read(buffer, body)).collect::<Result<Vec<_>>>()?;
    let mut total: usize = 0;
    for source in &sources {
        total = total.saturating_add(source.len);
        if total > message_limit_bytes {
            return Err(Error::Exhausted(format!(
                "a batch has {} or more when it is decompressed, over the limit of {} per message; send smaller \
                 batches, or raise the server's --message-limit",
                human_bytes(total as u64),
                human_bytes(message_limit_bytes as u64),
            )));
        }
    }
    let (slots, end) = lay_out(sources.iter().map(|source| source.len).collect());
    let mut piece = (end > 0).then(|| arena.allocate(end, PURPOSE)).transpose()?;
    let mut zstd = None;
    for (source, slot) in sources.iter().zip(&slots) {
        if let Some(piece) = &mut piece
            && !slot.is_empty()
        {
            interrupt.check()?;
            source.write_to(&mut piece[slot.clone()], codec, &mut zstd)?;
        }
    }
    let buffers = freeze(piece, slots);
    let used = buffers.iter().zip(&plan.buffers).map(|(buffer, plan)| {
        let used = plan.used_bytes(buffer.len())?;
        Ok(buffer.slice_with_length(0, used))
    });
    used.collect()
}

/// Buffer as it was sent.
struct Compressed<'a> {
    bytes: &'a [u8],
    /// Length after decompression, in bytes.
    len: usize,
    is_plain: bool,
}

impl<'a> Compressed<'a> {
    fn read(buffer: &BufferPlan, body: &'a [u8]) -> Result<Self> {
        const NOTHING: Compressed<'_> = Compressed { bytes: &[], len: 0, is_plain: true };
        let bytes = &body[buffer.source.clone()];
        if bytes.is_empty() || buffer.need == Need::Nothing {
            return Ok(NOTHING);
        }
        let Some((prefix, bytes)) = bytes.split_first_chunk::<LENGTH_PREFIX_BYTES>() else {
            return Err(Error::Invalid(format!(
                "a compressed buffer has {} bytes, fewer than the {LENGTH_PREFIX_BYTES} of its length prefix",
                bytes.len()
            )));
        };
        match i64::from_le_bytes(*prefix) {
            -1 => Ok(Self { bytes, len: bytes.len(), is_plain: true }),
            len => match usize::try_from(len) {
                Ok(len) => Ok(Self { bytes, len, is_plain: false }),
                Err(_) => Err(Error::Invalid(format!("a compressed buffer claims {len} bytes"))),
            },
        }
    }

    fn write_to(
        &self,
        slot: &mut [u8],
        codec: CompressionType,
        zstd: &mut Option<zstd::bulk::Decompressor<'static>>,
    ) -> Result<()> {
        let written = match codec {
            _ if self.is_plain => {
                slot.copy_from_slice(self.bytes);
                Ok(slot.len())
            }
            CompressionType::ZSTD => {
                let context = match zstd {
                    Some(context) => context,
                    None => zstd.insert(zstd::bulk::Decompressor::new()?),
                };
                context.decompress_to_buffer(self.bytes, slot)
            }
            CompressionType::LZ4_FRAME => read_all(lz4_flex::frame::FrameDecoder::new(self.bytes), slot),
            other => return Err(Error::Unsupported(format!("a body is compressed by {other:?}; send LZ4 or ZSTD"))),
        };
        match written {
            Ok(len) if len == slot.len() => Ok(()),
            Ok(len) => Err(Error::Invalid(format!(
                "a compressed buffer declares {} bytes, and decompresses to {len}",
                slot.len()
            ))),
            Err(error) => Err(Error::Invalid(format!(
                "a buffer of {} bytes does not decompress to {} bytes: {error}",
                self.bytes.len(),
                slot.len()
            ))),
        }
    }
}

/// Fills the slot and returns the number of bytes. Counts at most one byte beyond the slot.
fn read_all(mut decoder: impl Read, slot: &mut [u8]) -> std::io::Result<usize> {
    let mut have = 0;
    while have < slot.len() {
        match decoder.read(&mut slot[have..])? {
            0 => return Ok(have),
            part => have += part,
        }
    }
    Ok(have + decoder.read(&mut [0])?)
}
