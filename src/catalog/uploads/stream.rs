//! One stream of an upload, whose rows become a table or a part of one.

use std::time::Instant;

use arrow::array::RecordBatch;

use super::{Finished, Key, Place, Shared, Uploads};
use crate::Result;
use crate::catalog::upload::{Rows, Target};
use crate::memory::Interrupt;

/// One stream of rows. Dropping it without [`UploadStream::finish`] discards its rows.
#[derive(Debug)]
pub struct UploadStream {
    pub(super) uploads: Uploads,
    /// `None` once the stream is finished.
    pub(super) rows: Option<Rows>,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    Single(Box<Target>),
    Shared(Key, Place),
}

impl UploadStream {
    /// Adds rows. Buffers outside the arena are copied into it.
    ///
    /// # Errors
    /// See [`Upload::append`](crate::catalog::Upload::append); [`NotFound`](crate::Error::NotFound)
    /// when the upload was aborted or forgotten meanwhile.
    pub fn append(&mut self, batch: RecordBatch) -> Result<()> {
        self.append_interruptible(batch, &Interrupt::default())
    }

    /// Same as [`UploadStream::append`], unless it is interrupted. The stream is unusable then.
    ///
    /// # Errors
    /// As [`UploadStream::append`]; the interrupt's.
    pub fn append_interruptible(&mut self, batch: RecordBatch, interrupt: &Interrupt) -> Result<()> {
        if let Kind::Shared(key, _) = &self.kind {
            let mut state = self.uploads.inner.state.lock();
            match state.shared.get_mut(key) {
                Some(shared) if batch.num_rows() > 0 => shared.last_activity = Instant::now(),
                Some(_) => (),
                None => return Err(state.no_upload(key)),
            }
        }
        self.rows.as_mut().expect("`finish` consumes the stream").append(batch, interrupt)?;
        if let Kind::Shared(key, place) = &self.kind {
            let (bytes, mut state) = (self.bytes(), self.uploads.inner.state.lock());
            let open = state.shared.get_mut(key).and_then(|shared| shared.streams_open.get_mut(place));
            open.into_iter().for_each(|so_far| *so_far = bytes);
        }
        Ok(())
    }

    /// Rows so far.
    pub fn rows(&self) -> u64 {
        self.rows.as_ref().map_or(0, |rows| rows.rows)
    }

    /// Bytes that those rows refer to. Memory that several batches share counts once.
    pub fn bytes(&self) -> u64 {
        self.rows.as_ref().map_or(0, |rows| rows.bytes)
    }

    /// Bytes of the rows of all streams of the upload so far, except those that broke off.
    pub fn upload_bytes(&self) -> u64 {
        match &self.kind {
            Kind::Single(_) => self.bytes(),
            Kind::Shared(key, _) => self.uploads.inner.state.lock().shared.get(key).map_or(0, Shared::bytes),
        }
    }

    /// Ends the stream well: the table appears, or the part waits for the commit.
    ///
    /// # Errors
    /// See [`Upload::commit`](crate::catalog::Upload::commit); [`NotFound`](crate::Error::NotFound)
    /// when the upload was aborted or forgotten meanwhile; the interrupt's, before the table
    /// appears.
    pub fn finish(mut self, interrupt: &Interrupt) -> Result<Finished> {
        let done = self.rows.take().expect("`finish` consumes the stream").done();
        match &mut self.kind {
            Kind::Single(target) => {
                let table = target.commit(&done, interrupt);
                self.uploads.inner.state.lock().end_single(&target.editor.tenant);
                Ok(Finished::Table(table?))
            }
            Kind::Shared(key, place) => {
                let mut state = self.uploads.inner.state.lock();
                let rows = done.rows;
                match state.shared.get_mut(key) {
                    Some(shared) => shared.take_part(*place, done),
                    None => return Err(state.no_upload(key)),
                }
                Ok(Finished::Part { rows })
            }
        }
    }
}

impl Drop for UploadStream {
    fn drop(&mut self) {
        if self.rows.take().is_none() {
            return;
        }
        let mut state = self.uploads.inner.state.lock();
        match &self.kind {
            Kind::Single(target) => state.end_single(&target.editor.tenant),
            Kind::Shared(key, place) => {
                if let Some(shared) = state.shared.get_mut(key) {
                    shared.lose_part(*place);
                }
            }
        }
    }
}
