//! Parser of the bytes of a DoPut request as they arrive: gRPC's message framing and protobuf's
//! `FlightData`.
//!
//! ```text
//!   gRPC      [ flag: 1 byte | length: 4 bytes, big-endian | message ] ...
//!   message   [ tag: varint | length: varint | bytes ] ...
//!             tags 1 descriptor, 2 header, 3 metadata, 1000 body
//! ```
//!
//! The parser collects the small fields, because they are needed whole. It passes the body on
//! uncopied, piece by piece, to the caller, which knows the body's place. It does not depend on
//! Arrow.

use crate::memory::{Bounds, CountedBytes, Held, human_bytes};
use crate::{Error, Result};

/// Longest Arrow header, in bytes. That of a batch of a hundred thousand columns fits.
pub(super) const HEADER_BYTES_MAX: usize = 16 << 20;

/// Longest `app_metadata`, in bytes. The options of an upload of many thousands of columns fit.
pub(super) const METADATA_BYTES_MAX: usize = 1 << 20;

/// Longest descriptor, in bytes. It has the name of a table, or a command.
pub(super) const DESCRIPTOR_BYTES_MAX: usize = 1 << 20;

const DESCRIPTOR: u64 = 1;
const DATA_HEADER: u64 = 2;
const APP_METADATA: u64 = 3;
const DATA_BODY: u64 = 1000;

/// Parses a stream of gRPC messages of `FlightData`, however its bytes are cut into chunks.
#[derive(Debug)]
pub(super) struct Parser {
    state: State,
    /// Bytes of the current message that the parser has not taken yet.
    message_left: usize,
    message_limit_bytes: usize,
    fields: Fields,
    /// Bounds of the memory of the fields.
    bounds: Bounds,
    /// Memory of the fields of the current message, until the next one begins.
    held: Vec<Held>,
}

/// Fields of one message, except the body. `None`: not sent (so far).
#[derive(Debug, Default)]
pub(super) struct Fields {
    /// Protobuf `FlightDescriptor`.
    pub descriptor: Option<Vec<u8>>,
    /// Flatbuffer `Message`, without the length that precedes it in an IPC stream.
    pub header: Option<Vec<u8>>,
    /// Bytes whose meaning is between client and server.
    pub app_metadata: Option<Vec<u8>>,
    has_body: bool,
}

/// Next event of the parser.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event<'a> {
    /// Complete field other than the body, visible in [`Parser::fields`].
    FieldEnds,
    /// Start of the body, with its length in bytes.
    BodyBegins(usize),
    /// Next bytes of the body; never empty.
    Body(&'a [u8]),
    /// End of the message. Call [`Parser::take_fields`] before the next event.
    MessageEnds,
}

#[derive(Debug)]
enum State {
    Prefix { bytes: [u8; 5], have: usize },
    Tag(Varint),
    Length { field: u64, varint: Varint },
    SkipVarint(Varint),
    Skip { left: usize },
    Collect { field: u64, len: usize, bytes: CountedBytes },
    Body { left: usize },
}

impl State {
    const START: Self = Self::Prefix { bytes: [0; 5], have: 0 };
    const NEXT_FIELD: Self = Self::Tag(Varint { value: 0, have: 0 });
}

impl Parser {
    /// Creates a parser that refuses messages of more than `message_limit_bytes`. The memory of
    /// their fields is taken within `bounds`.
    pub fn new(message_limit_bytes: usize, bounds: Bounds) -> Self {
        let (state, fields) = (State::START, Fields::default());
        Self { state, message_left: 0, message_limit_bytes, fields, bounds, held: Vec::new() }
    }

    /// Returns the fields of the current message so far.
    pub fn fields(&self) -> &Fields {
        &self.fields
    }

    /// Returns the fields of the message that ended.
    pub fn take_fields(&mut self) -> Fields {
        std::mem::take(&mut self.fields)
    }

    /// Takes bytes from the front of `input` up to the next event; `None` when more input is
    /// needed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for bytes that are not a `FlightData`, [`Error::Exhausted`] for a message
    /// or field over its limit, [`Error::Unsupported`] for a message compressed by gRPC. The parser
    /// is of no use afterwards.
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Event<'a>>> {
        loop {
            match &mut self.state {
                State::Prefix { bytes, have } => {
                    let part = take(input, bytes.len() - *have);
                    bytes[*have..*have + part.len()].copy_from_slice(part);
                    *have += part.len();
                    if *have < bytes.len() {
                        return Ok(None);
                    }
                    self.held.clear();
                    let [flag, length @ ..] = *bytes;
                    self.message_left = self.check_prefix(flag, u32::from_be_bytes(length))?;
                    self.state = State::NEXT_FIELD;
                }
                State::Tag(varint) if self.message_left == 0 && varint.have == 0 => {
                    self.state = State::START;
                    return Ok(Some(Event::MessageEnds));
                }
                State::Tag(varint) => {
                    let Some(tag) = varint.read(input, &mut self.message_left)? else { return Ok(None) };
                    self.state = self.field_begins(tag)?;
                }
                State::Length { field, varint } => {
                    let Some(len) = varint.read(input, &mut self.message_left)? else { return Ok(None) };
                    let field = *field;
                    let len = usize::try_from(len).ok().filter(|&len| len <= self.message_left).ok_or_else(|| {
                        let left = self.message_left;
                        malformed(format!("field {field} claims {len} bytes, and its message has {left} left"))
                    })?;
                    self.state = match field {
                        DATA_BODY => State::Body { left: len },
                        DESCRIPTOR | DATA_HEADER | APP_METADATA => collect(field, len)?,
                        _ => State::Skip { left: len },
                    };
                    if field == DATA_BODY {
                        return Ok(Some(Event::BodyBegins(len)));
                    }
                }
                State::SkipVarint(varint) => {
                    if varint.read(input, &mut self.message_left)?.is_none() {
                        return Ok(None);
                    }
                    self.state = State::NEXT_FIELD;
                }
                State::Skip { left } => {
                    let part = take(input, *left);
                    *left -= part.len();
                    self.message_left -= part.len();
                    if *left > 0 {
                        return Ok(None);
                    }
                    self.state = State::NEXT_FIELD;
                }
                State::Collect { field, len, bytes } => {
                    let part = take(input, *len - bytes.len());
                    bytes.extend(part, *len, &self.bounds, "a message of an upload")?;
                    self.message_left -= part.len();
                    if bytes.len() < *len {
                        return Ok(None);
                    }
                    let (bytes, held) = std::mem::take(bytes).into_parts();
                    self.held.push(held);
                    match *field {
                        DESCRIPTOR => self.fields.descriptor = Some(bytes),
                        DATA_HEADER => self.fields.header = Some(bytes),
                        _ => self.fields.app_metadata = Some(bytes),
                    }
                    self.state = State::NEXT_FIELD;
                    return Ok(Some(Event::FieldEnds));
                }
                State::Body { left: 0 } => self.state = State::NEXT_FIELD,
                State::Body { left } => {
                    let part = take(input, *left);
                    *left -= part.len();
                    self.message_left -= part.len();
                    return Ok((!part.is_empty()).then_some(Event::Body(part)));
                }
            }
        }
    }

    /// Ends the input.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the bytes ended inside a message.
    pub fn end(&self) -> Result<()> {
        match self.is_inside_message() {
            false => Ok(()),
            true => Err(malformed("the stream ended inside a message".into())),
        }
    }

    /// True if a message has begun and is not complete.
    pub fn is_inside_message(&self) -> bool {
        !matches!(self.state, State::Prefix { have: 0, .. })
    }

    fn check_prefix(&self, flag: u8, length: u32) -> Result<usize> {
        match flag {
            0 => {}
            1 => {
                return Err(Error::Unsupported(
                    "a message is compressed by gRPC, and its call does not say how; send grpc-encoding: identity, and \
                     compress the Arrow IPC body instead (LZ4 or ZSTD)"
                        .into(),
                ));
            }
            _ => return Err(malformed(format!("a message starts with flag {flag}, and gRPC defines 0 and 1"))),
        }
        let len = length as usize;
        if len > self.message_limit_bytes {
            return Err(Error::Exhausted(format!(
                "a message of {} is over the limit of {}; send smaller batches, or raise the server's --message-limit",
                human_bytes(len as u64),
                human_bytes(self.message_limit_bytes as u64),
            )));
        }
        Ok(len)
    }

    fn field_begins(&mut self, tag: u64) -> Result<State> {
        const VARINT: u64 = 0;
        const FIXED_64: u64 = 1;
        const LENGTH: u64 = 2;
        const FIXED_32: u64 = 5;
        let (field, wire_type) = (tag >> 3, tag & 7);
        let is_known = matches!(field, DESCRIPTOR | DATA_HEADER | APP_METADATA | DATA_BODY);
        if is_known && wire_type != LENGTH {
            return Err(malformed(format!(
                "field {field} has protobuf wire type {wire_type} instead of that of bytes"
            )));
        }
        let repeated = match field {
            0 => return Err(malformed("a field has number 0".into())),
            DESCRIPTOR => self.fields.descriptor.is_some(),
            DATA_HEADER => self.fields.header.is_some(),
            APP_METADATA => self.fields.app_metadata.is_some(),
            DATA_BODY => std::mem::replace(&mut self.fields.has_body, true),
            _ => false,
        };
        if repeated {
            return Err(malformed(format!("field {field} came twice in one message")));
        }
        let skip = |left: usize| match left <= self.message_left {
            true => Ok(State::Skip { left }),
            false => Err(malformed(format!("field {field} is cut off by the end of its message"))),
        };
        match wire_type {
            VARINT => Ok(State::SkipVarint(Varint::default())),
            FIXED_64 => skip(8),
            LENGTH => Ok(State::Length { field, varint: Varint::default() }),
            FIXED_32 => skip(4),
            _ => Err(malformed(format!("field {field} has protobuf wire type {wire_type}, which proto3 does not use"))),
        }
    }
}

fn collect(field: u64, len: usize) -> Result<State> {
    let (what, most) = match field {
        DESCRIPTOR => ("descriptor", DESCRIPTOR_BYTES_MAX),
        DATA_HEADER => ("header", HEADER_BYTES_MAX),
        _ => ("app_metadata", METADATA_BYTES_MAX),
    };
    if len > most {
        return Err(Error::Exhausted(format!(
            "the {what} of a message has {}, over the limit of {}",
            human_bytes(len as u64),
            human_bytes(most as u64),
        )));
    }
    Ok(State::Collect { field, len, bytes: CountedBytes::default() })
}

/// Base-128 number that arrives byte by byte.
#[derive(Debug, Default)]
struct Varint {
    value: u64,
    have: u32,
}

impl Varint {
    /// Takes bytes until the number is complete; `None` when more input is needed.
    fn read(&mut self, input: &mut &[u8], message_left: &mut usize) -> Result<Option<u64>> {
        while let Some(byte) = take_byte(input, message_left)? {
            if let Some(value) = self.push(byte)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    fn push(&mut self, byte: u8) -> Result<Option<u64>> {
        // The tenth byte has only the 64th bit.
        if self.have == 9 && byte > 1 {
            return Err(malformed("a number is longer than 64 bits".into()));
        }
        self.value |= u64::from(byte & 0x7f) << (7 * self.have);
        self.have += 1;
        Ok((byte < 0x80).then_some(self.value))
    }
}

fn take<'a>(input: &mut &'a [u8], len_max: usize) -> &'a [u8] {
    let (part, rest) = input.split_at(len_max.min(input.len()));
    *input = rest;
    part
}

/// Takes the next byte of the message; `None` when more input is needed.
fn take_byte(input: &mut &[u8], message_left: &mut usize) -> Result<Option<u8>> {
    if *message_left == 0 {
        return Err(malformed("a field is cut off by the end of its message".into()));
    }
    let Some((&byte, rest)) = input.split_first() else { return Ok(None) };
    *input = rest;
    *message_left -= 1;
    Ok(Some(byte))
}

fn malformed(what: String) -> Error {
    Error::Invalid(format!("not a gRPC stream of FlightData: {what}"))
}
