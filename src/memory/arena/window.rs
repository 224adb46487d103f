//! Windows: ranges of memory that several devices write, also from other processes.
//!
//! A window has no locks. Its users agree who writes which bytes and when, by counters
//! ([`SharedCounters`](super::SharedCounters)).

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::Pin;
use super::backing::{Backing, HUGE_PAGE_BYTES};
use super::mapping::{Mapping, Populating};
use crate::memory::Interrupt;
use crate::{Error, Result};

/// Memory of a file that several processes map. Clones share it.
#[derive(Clone, Debug)]
pub struct SharedWindow {
    mapping: Arc<Mapping>,
    file: Arc<OwnedFd>,
    bytes: usize,
}

impl SharedWindow {
    /// Makes a window.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the system has no memory for it.
    pub fn new(bytes: usize) -> Result<Self> {
        let len = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let mapping = Mapping::new(len, &Backing::Memfd, &Interrupt::default(), Populating::Urgent)?;
        let file = mapping.file().expect("memory of a memfd has a file").clone();
        Ok(Self { mapping: Arc::new(mapping), file, bytes })
    }

    /// Maps a window of another device.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the system has no addresses for it.
    /// [`Internal`](crate::Error::Internal) for a file that is too short.
    pub fn of_file(file: OwnedFd, bytes: usize) -> Result<Self> {
        let mapped = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let found = std::fs::File::from(file.try_clone()?).metadata()?.len();
        if found < mapped as u64 {
            return Err(Error::Internal(format!("a file of {found} bytes has no window of {bytes} bytes")));
        }
        Ok(Self { mapping: Arc::new(Mapping::of_file(file.try_clone()?, mapped)?), file: Arc::new(file), bytes })
    }

    /// Returns the file of the window, for another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Pins the window's memory until it is unmapped, if it is not pinned yet.
    pub fn pin_by(&self, pin: &Arc<dyn Pin>) {
        self.mapping.pin_by(pin);
    }

    /// Returns the address of the first byte of a range, for a driver that copies the range.
    ///
    /// # Panics
    /// If the range reaches past the end.
    pub fn pointer(&self, range: Range<usize>) -> *mut u8 {
        self.check(range.clone());
        // SAFETY: the start of the range is in the mapping, as checked.
        unsafe { self.mapping.start.as_ptr().add(range.start) }
    }

    /// Writes bytes at an offset.
    ///
    /// # Panics
    /// If they reach past the end.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.pointer(offset..offset + bytes.len());
        // SAFETY: the range is in the mapping, as checked. No Rust reference points into a window,
        // and its users agree that no other one uses these bytes meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Reads bytes at an offset.
    ///
    /// # Panics
    /// If they reach past the end.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.pointer(offset..offset + into.len());
        // SAFETY: as for `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    fn check(&self, range: Range<usize>) {
        assert!(range.end <= self.bytes, "bytes {range:?} of a window of {}", self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_through_one_mapping_are_read_through_another() {
        let here = SharedWindow::new(5000).unwrap();
        let there = SharedWindow::of_file(here.file().try_clone_to_owned().unwrap(), 5000).unwrap();
        there.write(4990, b"0123456789");
        let mut found = [0; 4];
        here.read(4996, &mut found);
        assert_eq!(&found, b"6789");
    }

    #[test]
    #[should_panic(expected = "of a window of 5000")]
    fn a_write_past_the_end_is_a_defect() {
        SharedWindow::new(5000).unwrap().write(4991, b"0123456789");
    }

    #[test]
    fn a_file_that_is_too_short_has_no_window() {
        let short = SharedWindow::new(1).unwrap();
        let of = SharedWindow::of_file(short.file().try_clone_to_owned().unwrap(), 64 << 20);
        assert!(matches!(of, Err(Error::Internal(message)) if message.contains("no window")));
    }
}
