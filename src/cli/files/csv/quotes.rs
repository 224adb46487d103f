//! Quotes, looked at as the bytes pass: Arrow's reader takes a quote that is not closed to go on to the end of the file, and what
//! is behind one that closes for a part of the field, so that one quote too many swallows rows without a word.

use std::io::Read;

use super::records::newlines;
use crate::{Error, Result};

/// Where in the text one is, as far as quotes go.
pub(super) struct Quotes {
    delimiter: u8,
    /// The byte before the next.
    last: u8,
    /// The line of the next byte; the first is 1.
    line: usize,
    /// The line on which the field in quotes began that the next byte may be in.
    opened: Option<usize>,
    /// Whether `last` is a quote that closes that field, unless another follows.
    may_close: bool,
}

impl Quotes {
    pub(super) fn new(delimiter: u8) -> Self {
        Self { delimiter, last: b'\n', line: 1, opened: None, may_close: false }
    }

    /// Takes the next bytes of the text.
    pub(super) fn check(&mut self, mut bytes: &[u8]) -> Result<()> {
        while let Some(first) = bytes.first() {
            if std::mem::take(&mut self.may_close) {
                match first {
                    b'"' => bytes = &bytes[1..],
                    other if self.is_end(*other) => self.opened = None,
                    _ => return Err(self.behind(bytes)),
                }
                continue;
            }
            let quote = bytes.iter().position(|byte| *byte == b'"');
            let (before, after) = bytes.split_at(quote.unwrap_or(bytes.len()));
            self.line += newlines(before);
            self.last = before.last().copied().unwrap_or(self.last);
            if quote.is_some() {
                match self.opened {
                    Some(_) => self.may_close = true,
                    // Anywhere else it is a character like others.
                    None if self.is_end(self.last) => self.opened = Some(self.line),
                    None => {}
                }
                self.last = b'"';
            }
            bytes = after.get(1..).unwrap_or_default();
        }
        Ok(())
    }

    /// Takes the end of the text.
    pub(super) fn finish(&self) -> Result<()> {
        match self.opened {
            Some(line) if !self.may_close => Err(Error::Invalid(format!(
                "line {line} has a quote that opens a field and is not closed; a field that begins with a quote ends with one, \
                 and a quote within it is doubled"
            ))),
            _ => Ok(()),
        }
    }

    /// Whether a field ends at this byte, and another may begin behind it.
    fn is_end(&self, byte: u8) -> bool {
        byte == self.delimiter || matches!(byte, b'\n' | b'\r')
    }

    fn behind(&self, bytes: &[u8]) -> Error {
        let found = String::from_utf8_lossy(&bytes[..bytes.len().min(char::MAX.len_utf8())]);
        let found = found.chars().next().unwrap_or_default();
        let opened = match self.opened {
            Some(line) if line < self.line => format!(", which began on line {line}"),
            _ => String::new(),
        };
        Error::Invalid(format!(
            "line {} has {found:?} behind the quote that closes a field{opened}; a field that begins with a quote ends with one, \
             and a quote within it is doubled",
            self.line
        ))
    }
}

/// Bytes whose quotes are looked at as they are read.
pub(super) struct Checked<R> {
    pub input: R,
    pub quotes: Quotes,
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.input.read(buffer)?;
        match read {
            0 if !buffer.is_empty() => self.quotes.finish(),
            _ => self.quotes.check(&buffer[..read]),
        }
        .map_err(std::io::Error::other)?;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is wrong with a text, whose bytes come in pieces of every length.
    fn check(text: &str) -> Result<()> {
        let outcome = |length: usize| {
            let mut quotes = Quotes::new(b',');
            text.as_bytes().chunks(length).try_for_each(|piece| quotes.check(piece))?;
            quotes.finish()
        };
        let whole = outcome(text.len().max(1));
        for length in 1..text.len() {
            let pieces = outcome(length);
            // A piece may end within a character, of which the error then shows what there is.
            assert_eq!(pieces.is_ok(), whole.is_ok(), "{text:?} in pieces of {length} bytes");
        }
        whole
    }

    #[test]
    fn quotes_that_are_in_pairs_pass() {
        for text in [
            "",
            "a,b\n1,2\n",
            "\"a\",\"b\"\r\n\"1\",\"2\"",
            "\"\",\"\"\"\"\n",
            "\"a\n\n\"\"b\"\"\",\n\r\n\"c\"",
            // Where no field begins, a quote is a character.
            "5\",5\" disk\na\"b\"c,\"d\"\n",
        ] {
            assert_eq!(check(text), Ok(()), "{text:?}");
        }
    }

    #[test]
    fn one_quote_too_many_is_told_with_its_line() {
        for (text, said) in [
            ("a\n\"b", "line 2 has a quote that opens a field and is not closed"),
            ("a,b\n1,\"\n2,3\n\n", "line 2 has a quote that opens"),
            ("\"a\"\n\"b\n\nc\"\n\"\"\"", "line 5 has a quote that opens"),
            ("a\n\"b\"c\n", "line 2 has 'c' behind the quote that closes a field;"),
            ("a\n\"b\" \n", "line 2 has ' ' behind"),
            ("a,b\n1,\"x\n2,\"é\"\n", "line 3 has 'é' behind the quote that closes a field, which began on line 2;"),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.message().starts_with(said), "{text:?}: {error}");
        }
    }
}
