//! Places in slabs that two processes see, at different addresses. Addresses in messages between
//! the two are those of the process that owns the slabs.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::buffer::{Buffer, MutableBuffer};
use parking_lot::{Condvar, Mutex, RwLock};
use serde::{Deserialize, Serialize};

use super::{Arena, Mapping, Pin};
use crate::{Error, Result};

/// Place of bytes, for another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    Slab {
        /// Address of the first byte in the owner.
        address: u64,
        len: u64,
    },
    /// Bytes by value, because no slab that both processes see has them.
    Bytes(Vec<u8>),
}

impl Place {
    /// Copies bytes that came by value into a buffer with Arrow's alignment.
    pub fn aligned(bytes: &[u8]) -> Buffer {
        let mut aligned = MutableBuffer::with_capacity(bytes.len());
        aligned.extend_from_slice(bytes);
        aligned.into()
    }
}

impl Arena {
    /// Returns the place of a buffer, for a process that sees the slabs of this arena.
    pub fn place_of(&self, buffer: &Buffer) -> Place {
        match !buffer.is_empty() && self.owns(buffer.as_ptr()) {
            true => Place::Slab { address: buffer.as_ptr() as u64, len: buffer.len() as u64 },
            false => Place::Bytes(buffer.to_vec()),
        }
    }
}

/// Place in this process.
pub(super) struct ViewedPlace {
    pub(super) start: NonNull<u8>,
    pub(super) memory: Arc<Mapping>,
}

/// Slabs of another process's arena, mapped in this process.
#[derive(Debug, Default)]
pub struct SlabViews {
    views: RwLock<Views>,
    /// Slabs that are announced and not added yet, by address in the owner.
    announced: Mutex<Vec<(u64, usize)>>,
    /// Number of these slabs.
    announced_count: AtomicUsize,
    added: Condvar,
    pin: Option<Arc<dyn Pin>>,
}

#[derive(Debug, Default)]
struct Views {
    by_owner: BTreeMap<u64, Arc<Mapping>>,
    /// Address in the owner by address in this process.
    by_view: BTreeMap<u64, u64>,
}

/// Finds the entry that contains `address..address + len`. Returns its start and the offset of
/// `address` in it. Entries do not overlap.
pub fn holding<T>(
    entries: &BTreeMap<u64, T>,
    address: u64,
    len: usize,
    len_of: impl Fn(&T) -> usize,
) -> Option<(u64, usize)> {
    let (&start, entry) = entries.range(..=address).next_back()?;
    let offset = usize::try_from(address - start).ok()?;
    let is_inside = offset.checked_add(len).is_some_and(|end| end <= len_of(entry));
    is_inside.then_some((start, offset))
}

impl SlabViews {
    /// Creates views that `pin` pins, if given.
    pub fn pinned_by(pin: Option<Arc<dyn Pin>>) -> Self {
        Self { pin, ..Self::default() }
    }

    /// Announces a slab that another thread adds later. A thread that looks for bytes of the slab
    /// waits until then.
    pub fn announce(&self, address: u64, len: usize) {
        let mut announced = self.announced.lock();
        announced.push((address, len));
        self.announced_count.store(announced.len(), Ordering::Release);
    }

    /// Maps the slab that is at `address` in its owner and consists of `file`.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses.
    pub fn add(&self, address: u64, len: usize, file: OwnedFd) -> Result<()> {
        let view = Mapping::of_file(file, len).map(|view| {
            if let Some(pin) = &self.pin {
                view.pin_by(pin);
            }
            let mut views = self.views.write();
            views.by_view.insert(view.start.as_ptr() as u64, address);
            views.by_owner.insert(address, Arc::new(view));
        });
        let mut announced = self.announced.lock();
        if let Some(at) = announced.iter().position(|&slab| slab == (address, len)) {
            announced.remove(at);
            self.announced_count.store(announced.len(), Ordering::Release);
            self.added.notify_all();
        }
        view
    }

    /// Waits while a slab with the bytes is announced and not added.
    fn wait_for_slab(&self, address: u64, len: usize) {
        if self.announced_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let is_in = |&(start, slab_len): &(u64, usize)| {
            start <= address && address.saturating_add(len as u64) <= start.saturating_add(slab_len as u64)
        };
        self.added.wait_while(&mut self.announced.lock(), |announced| announced.iter().any(is_in));
    }

    /// Removes a slab that its owner has unmapped. Buffers in the slab keep its view mapped.
    pub fn remove(&self, address: u64) {
        let mut views = self.views.write();
        let view = views.by_owner.remove(&address);
        if let Some(view) = &view {
            views.by_view.remove(&(view.start.as_ptr() as u64));
        }
        drop(views);
    }

    /// Returns the view of `len` bytes at the owner's `address`.
    ///
    /// # Errors
    /// [`Error::Internal`] when no slab known here contains the bytes.
    pub(super) fn view(&self, address: u64, len: usize) -> Result<ViewedPlace> {
        self.wait_for_slab(address, len);
        let views = self.views.read();
        let Some((start, offset)) = holding(&views.by_owner, address, len, |memory| memory.len) else {
            return Err(Error::Internal(format!(
                "{len} bytes at {address:#x} are in no slab that is shared with this process"
            )));
        };
        let memory = views.by_owner[&start].clone();
        // SAFETY: the offset was just found to be in the mapping.
        let start = unsafe { memory.start.add(offset) };
        Ok(ViewedPlace { start, memory })
    }

    /// True if the address of this process is in a slab.
    pub(super) fn contain(&self, address: *const u8) -> bool {
        let views = self.views.read();
        holding(&views.by_view, address as u64, 1, |owner| views.by_owner[owner].len).is_some()
    }

    /// Returns the bytes at a place.
    ///
    /// # Errors
    /// [`Error::Internal`] when no slab known here contains the place.
    pub fn buffer(&self, place: &Place) -> Result<Buffer> {
        self.buffer_with(place, ())
    }

    /// Returns the bytes at a place, as [`buffer`](Self::buffer) does. If the bytes are in a slab,
    /// drops `kept` with the last reference to them.
    ///
    /// # Errors
    /// The errors of [`buffer`](Self::buffer).
    pub fn buffer_with(&self, place: &Place, kept: impl Send + Sync + 'static) -> Result<Buffer> {
        match place {
            Place::Bytes(bytes) => Ok(Place::aligned(bytes)),
            Place::Slab { address, len } => {
                let ViewedPlace { start, memory } = self.view(*address, *len as usize)?;
                // A buffer only drops its owner, so a panic leaves no half-changed state.
                let owner = Arc::new(AssertUnwindSafe((memory, kept)));
                // SAFETY: the bytes stay mapped while the mapping lives. Their owner lets no other
                // code write to them while a job reads them.
                Ok(unsafe { Buffer::from_custom_allocation(start, *len as usize, owner) })
            }
        }
    }

    /// Returns the place of a buffer, for the owner.
    pub fn place_of(&self, buffer: &Buffer) -> Place {
        let (start, len) = (buffer.as_ptr() as u64, buffer.len());
        let views = self.views.read();
        match holding(&views.by_view, start, len, |owner| views.by_owner[owner].len) {
            Some((view, offset)) if len > 0 => {
                Place::Slab { address: views.by_view[&view] + offset as u64, len: len as u64 }
            }
            _ => Place::Bytes(buffer.to_vec()),
        }
    }
}
