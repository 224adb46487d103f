//! Messages of a request, taken whole from its bytes and decompressed, in memory that is counted
//! before it is taken.
//!
//! ```text
//!   HTTP/2 frames ─► head: 5 bytes ─► message, as its bytes arrive ─► decompressed ─► one frame
//!                     └ limit           └ Held                         └ Held, ratio
//! ```
//!
//! tonic would take the memory of a message as soon as its head declares it, and would decompress
//! whatever the result takes. Behind this layer it gets whole messages that are not compressed.

use std::io::{self, Read};

use bytes::{Buf, Bytes};

use crate::memory::{CountedBytes, Interrupt, human_bytes};
use crate::service::call_memory::{CallShare, Counted};
use crate::{Error, Result};

/// Size of gRPC's head of a message: a byte that says if it is compressed, and its length.
const HEAD_BYTES: usize = 5;

/// Purpose of the memory, for errors.
const PURPOSE: &str = "the request";

/// Size that any message may have when it is decompressed, in bytes.
const RATIO_FREE_BYTES: usize = 1 << 20;

/// Times its compressed size that a larger message may have when it is decompressed. gzip reaches
/// little more, even with zeros.
const RATIO_MAX: usize = 1000;

/// Largest window of a zstd frame, as a power of two of bytes. RFC 8878 recommends this limit.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

/// Same in bytes. Windows of gzip are smaller.
const WINDOW_BYTES_MAX: u64 = 1 << ZSTD_WINDOW_LOG_MAX;

/// Algorithms that gRPC messages may be compressed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Gzip,
    Zstd,
}

impl Encoding {
    /// Returns the encoding of that name in the header `grpc-encoding`.
    pub(super) fn named(name: &[u8]) -> Option<Self> {
        match name {
            b"gzip" => Some(Self::Gzip),
            b"zstd" => Some(Self::Zstd),
            _ => None,
        }
    }
}

/// Owner of the memory of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The call, until its end: its handler keeps the message in another form.
    Call,
    /// The message's own bytes, until they are dropped.
    Bytes,
}

/// How the messages of a request are taken.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    pub(super) memory: CallShare,
    pub(super) owner: Owner,
    pub(super) encoding: Option<Encoding>,
    /// Largest message, before and after it is decompressed.
    pub(super) limit: usize,
    /// End of the error for a message over the limit: the method, or the setting that raises it.
    pub(super) advice: &'static str,
}

/// Takes whole messages from the bytes of a request.
#[derive(Debug)]
pub(super) struct Messages {
    rules: Rules,
    /// Bytes of the request that were not taken yet.
    input: Bytes,
    /// Current message, with its head; empty before the first byte of the head.
    current: CountedBytes,
}

impl Messages {
    /// Creates the messages of a request.
    pub(super) fn new(rules: Rules) -> Self {
        Self { rules, input: Bytes::new(), current: CountedBytes::default() }
    }

    /// Returns how the messages are taken.
    pub(super) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Adds bytes, after the messages of earlier bytes were taken.
    pub(super) fn push(&mut self, bytes: Bytes) {
        debug_assert!(self.input.is_empty(), "the bytes before these were not taken");
        self.input = bytes;
    }

    /// True if a message has begun and is not complete.
    pub(super) fn is_inside(&self) -> bool {
        !self.current.is_empty()
    }

    /// True if no bytes wait to be taken or completed.
    pub(super) fn is_empty(&self) -> bool {
        self.input.is_empty() && !self.is_inside()
    }

    /// Returns the next message with its head, as it was sent; `None` when more bytes are needed.
    /// [`Rules::finish`] follows.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the memory of calls has no room, or for a message over the limit;
    /// [`Error::Invalid`] for a malformed head.
    pub(super) fn next(&mut self) -> Result<Option<CountedBytes>> {
        while !self.input.is_empty() {
            let wanted = match self.current.len() {
                have if have < HEAD_BYTES => HEAD_BYTES,
                _ => HEAD_BYTES + self.declared_bytes()?,
            };
            let part = self.input.len().min(wanted - self.current.len());
            self.current.extend(&self.input[..part], wanted, self.rules.memory.bounds(), PURPOSE)?;
            self.input.advance(part);
            // A small part of a frame would keep the memory of the whole.
            if self.input.is_empty() {
                self.input = Bytes::new();
            }
            if self.current.len() >= HEAD_BYTES && self.current.len() == HEAD_BYTES + self.declared_bytes()? {
                return Ok(Some(std::mem::take(&mut self.current)));
            }
        }
        Ok(None)
    }

    /// Reads the current head.
    fn declared_bytes(&self) -> Result<usize> {
        let flag = self.current[0];
        if flag > 1 {
            return Err(Error::Invalid(format!("a message starts with flag {flag}, and gRPC defines 0 and 1")));
        }
        if flag == 1 && self.rules.encoding.is_none() {
            return Err(Error::Invalid(
                "a message is compressed, and its call does not say how; send the header grpc-encoding".into(),
            ));
        }
        let len =
            u32::from_be_bytes(self.current[1..HEAD_BYTES].try_into().expect("four bytes follow the flag")) as usize;
        if len > self.rules.limit {
            return Err(self.rules.over_limit(format!("a message of {}", human_bytes(len as u64))));
        }
        Ok(len)
    }
}

impl Rules {
    /// Returns the effort of finishing a message, as the bytes that it may have then.
    pub(super) fn effort(&self, message: &[u8]) -> usize {
        if message[0] == 0 { 0 } else { self.decompressed_bytes_max(message) }
    }

    /// Returns a message with its head, uncompressed, with the owner of its memory.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the memory of calls has no room, or for a message over the limit
    /// or the ratio; [`Error::Invalid`] for a message that does not decompress; the interrupt's.
    pub(super) fn finish(&self, message: CountedBytes, interrupt: &Interrupt) -> Result<Bytes> {
        let (bytes, held) = self.uncompressed(message, interrupt)?.into_parts();
        Ok(match self.owner {
            Owner::Bytes => Bytes::from_owner(Counted { bytes, _held: held }),
            Owner::Call => {
                self.memory.keep(held);
                bytes.into()
            }
        })
    }

    fn over_limit(&self, what: String) -> Error {
        Error::Exhausted(format!("{what} is over the limit of {}; {}", human_bytes(self.limit as u64), self.advice))
    }

    fn decompressed_bytes_max(&self, message: &[u8]) -> usize {
        let compressed = message.len() - HEAD_BYTES;
        RATIO_FREE_BYTES.max(compressed.saturating_mul(RATIO_MAX)).min(self.limit)
    }

    fn uncompressed(&self, message: CountedBytes, interrupt: &Interrupt) -> Result<CountedBytes> {
        let (1, Some(encoding)) = (message[0], self.encoding) else { return Ok(message) };
        let compressed = &message[HEAD_BYTES..];
        let limit = self.decompressed_bytes_max(&message);
        let mut out = self.decompressed(compressed, encoding, limit, interrupt)?;
        let len = out.len() - HEAD_BYTES;
        if len > limit {
            return Err(match limit == self.limit {
                true => self.over_limit("a message, when it is decompressed,".into()),
                false => Error::Exhausted(format!(
                    "a message of {} decompresses to more than {}, and to more than {RATIO_MAX} times its size; send it \
                     uncompressed",
                    human_bytes(compressed.len() as u64),
                    human_bytes(limit as u64)
                )),
            });
        }
        let len = u32::try_from(len).expect("the limit of a message has 31 bits");
        out[1..HEAD_BYTES].copy_from_slice(&len.to_be_bytes());
        Ok(out)
    }

    /// Decompresses up to one byte more than `limit`, behind a head for an uncompressed message.
    fn decompressed(
        &self,
        compressed: &[u8],
        encoding: Encoding,
        limit: usize,
        interrupt: &Interrupt,
    ) -> Result<CountedBytes> {
        let wrong = |error: io::Error| Error::Invalid(format!("a message does not decompress: {error}"));
        let mut reader: Box<dyn Read + '_> = match encoding {
            Encoding::Gzip => Box::new(flate2::read::GzDecoder::new(compressed)),
            Encoding::Zstd => {
                let mut reader = zstd::stream::read::Decoder::with_buffer(compressed).map_err(wrong)?;
                reader.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(wrong)?;
                Box::new(reader)
            }
        };
        let most = HEAD_BYTES + limit + 1;
        let mut out = CountedBytes::default();
        let add = |part: &[u8], out: &mut CountedBytes| out.extend(part, most, self.memory.bounds(), PURPOSE);
        add(&[0; HEAD_BYTES], &mut out)?;
        let mut part = vec![0; 64 << 10];
        // The decoder keeps the last bytes, as many as its window has.
        let mut window = self.memory.bounds().reserve(0, PURPOSE)?;
        while out.len() < most {
            interrupt.check()?;
            let room = part.len().min(most - out.len());
            let read = reader.read(&mut part[..room]).map_err(wrong)?;
            if read == 0 {
                break;
            }
            window.try_grow((read as u64).min(WINDOW_BYTES_MAX - window.bytes()), PURPOSE)?;
            add(&part[..read], &mut out)?;
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::memory::{Bounds, Budget};

    const LIMIT: usize = 8 << 20;

    fn budget() -> Budget {
        Budget::new("memory of calls", "--call-memory", 4 << 20)
    }

    fn messages(budget: &Budget, encoding: Option<Encoding>) -> Messages {
        let memory = CallShare::within(Bounds::new([budget.clone()]));
        Messages::new(Rules { memory, owner: Owner::Bytes, encoding, limit: LIMIT, advice: "send less" })
    }

    fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
        [&[flag], &u32::try_from(message.len()).unwrap().to_be_bytes()[..], message].concat()
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn all(messages: &mut Messages, wire: &[u8], step: usize) -> Result<Vec<Bytes>> {
        let mut found = Vec::new();
        for chunk in wire.chunks(step) {
            messages.push(Bytes::copy_from_slice(chunk));
            while let Some(message) = messages.next()? {
                found.push(messages.rules().finish(message, &Interrupt::default())?);
            }
        }
        Ok(found)
    }

    #[test]
    fn messages_come_whole_however_they_are_cut_and_their_memory_goes_back() {
        let budget = budget();
        let texts = [vec![], vec![1; 3], vec![2; 100_000], vec![3; CountedBytes::FREE]];
        let wire: Vec<u8> = texts.iter().flat_map(|text| framed(0, text)).collect();
        for step in [1, 4, 5, 6, 4096, wire.len()] {
            let found = all(&mut messages(&budget, None), &wire, step).unwrap();
            assert_eq!(found, texts.each_ref().map(|text| framed(0, text)), "in steps of {step}");
            assert!((95_000..150_000).contains(&budget.used_bytes()), "{} bytes", budget.used_bytes());
            drop(found);
            assert_eq!(budget.used_bytes(), 0);
        }
    }

    #[test]
    fn memory_is_taken_as_bytes_arrive_and_not_as_a_head_declares_it() {
        let budget = budget();
        let mut messages = messages(&budget, None);
        let head = [&[0][..], &(LIMIT as u32).to_be_bytes()].concat();
        assert!(all(&mut messages, &head, 5).unwrap().is_empty() && messages.is_inside());
        assert_eq!(budget.used_bytes(), 0);
        all(&mut messages, &[0; 1 << 20], 1 << 16).unwrap();
        assert!(budget.used_bytes() <= 2 << 20, "{} bytes", budget.used_bytes());
        let refusal = all(&mut messages, &[0; 4 << 20], 1 << 16).unwrap_err();
        assert!(matches!(&refusal, Error::Exhausted(text) if text.contains("--call-memory")), "{refusal}");
        assert!(budget.used_bytes_max() <= 4 << 20);
        drop(messages);
        assert_eq!(budget.used_bytes(), 0);
    }

    #[test]
    fn messages_are_decompressed_within_the_ratio_the_limit_and_the_budget() {
        let text: Vec<u8> = (0..200_000_u32).map(|value| (value % 251) as u8).collect();
        let zstd = |bytes: &[u8]| zstd::bulk::compress(bytes, 3).unwrap();
        for (encoding, compressed) in [(Encoding::Gzip, gzip(&text)), (Encoding::Zstd, zstd(&text))] {
            let budget = budget();
            let found = all(&mut messages(&budget, Some(encoding)), &framed(1, &compressed), 1000).unwrap();
            assert_eq!(found, [framed(0, &text)]);
            assert!(budget.used_bytes() >= 190_000);
            let plain = all(&mut messages(&budget, Some(encoding)), &framed(0, &text), 1000).unwrap();
            assert_eq!(plain, [framed(0, &text)], "a call of compressed messages may send others");
        }
        for (bytes, part) in
            [(3 << 20, "more than 1000 times its size; send it uncompressed"), (LIMIT * 100, "memory of calls")]
        {
            let budget = budget();
            let refusal = all(&mut messages(&budget, Some(Encoding::Zstd)), &framed(1, &zstd(&vec![0; bytes])), 99);
            let refusal = refusal.unwrap_err();
            assert!(matches!(&refusal, Error::Exhausted(text) if text.contains(part)), "{refusal}");
            assert!(budget.used_bytes_max() <= 4 << 20 && budget.used_bytes() == 0);
        }
        let small = Budget::new("memory of calls", "--call-memory", 100 << 10);
        let refusal = all(&mut messages(&small, Some(Encoding::Gzip)), &framed(1, &gzip(&text)), 99).unwrap_err();
        assert!(refusal.message().contains("the request needs"), "{refusal}");
    }

    #[test]
    fn malformed_messages_are_refused() {
        let budget = budget();
        let mut torn = zstd::bulk::compress(&[7; 1000], 3).unwrap();
        torn.truncate(torn.len() / 2);
        let over = framed(0, &[0; LIMIT + 1]);
        for (encoding, wire, part) in [
            (None, framed(1, b"text"), "its call does not say how"),
            (None, framed(2, b"text"), "starts with flag 2"),
            (Some(Encoding::Zstd), framed(1, b"text"), "does not decompress"),
            (Some(Encoding::Zstd), framed(1, &torn), "does not decompress"),
            (Some(Encoding::Gzip), framed(1, b"text"), "does not decompress"),
            (None, over[..10].to_vec(), "a message of 8.0 MiB is over the limit of 8.0 MiB; send less"),
        ] {
            let refusal = all(&mut messages(&budget, encoding), &wire, 1).unwrap_err();
            assert!(refusal.message().contains(part), "{refusal}");
        }
    }
}
