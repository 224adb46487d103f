//! Windows of GPUs: device memory that is exported by a file descriptor and mapped by the processes
//! of other GPUs.
//!
//! A window is physical memory with addresses in each process that maps it (CUDA's virtual memory
//! management). It lives until no process maps it and no file refers to it. Copies to a peer go
//! through the mapping like copies within the GPU. A window in host memory is pinned in both
//! processes, and copied to and from like the arena.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};

use super::CudaDevice;
use super::buffer::cuda;
use super::driver::Gpu;
use super::transfer::concat;
use crate::Result;
use crate::device::peers::MappedPeers;
use crate::device::{Device, DeviceBuffer, DeviceId, PeerOps, PeerWindow, Stream};
use crate::memory::SharedWindow;
use cudarc::driver::sys;

const FILE: sys::CUmemAllocationHandleType = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The window of a GPU, and those of its peers. Views of all jobs share them.
#[derive(Debug, Default)]
pub(super) struct Windows {
    own: OnceLock<(Mapped, OwnedFd)>,
    of_peers: MappedPeers<PeerMemory>,
    /// Windows that peers write to in place of `own`.
    in_host: MappedPeers<SharedWindow>,
}

/// Window that a GPU writes to.
#[derive(Clone, Debug)]
enum PeerMemory {
    Device(Arc<Mapped>),
    Host(SharedWindow),
}

impl PeerMemory {
    fn bytes(&self) -> usize {
        match self {
            Self::Device(mapped) => mapped.bytes,
            Self::Host(window) => window.bytes(),
        }
    }
}

/// Memory of a window at addresses of this process. Unmapped on drop; no work may use it then.
#[derive(Debug)]
struct Mapped {
    gpu: Arc<Gpu>,
    pointer: sys::CUdeviceptr,
    bytes: usize,
}

impl Mapped {
    /// Maps physical memory for reads and writes of this GPU.
    fn new(gpu: &Arc<Gpu>, memory: &Physical<'_>, bytes: usize) -> Result<Self> {
        let mut pointer = 0;
        // SAFETY: the pointer is to a local variable.
        let reserved = unsafe { sys::cuMemAddressReserve(&raw mut pointer, bytes, 0, 0, 0) }.result();
        gpu.check(reserved, "reserving addresses for a window")?;
        // SAFETY: the addresses were just reserved, and the memory has these bytes.
        let mapped = unsafe { sys::cuMemMap(pointer, bytes, 0, memory.handle, 0) }.result();
        if let Err(error) = gpu.check(mapped, "mapping a window") {
            // SAFETY: nothing is mapped at these addresses.
            let _ = unsafe { sys::cuMemAddressFree(pointer, bytes) };
            return Err(error);
        }
        let mapped = Self { gpu: gpu.clone(), pointer, bytes };
        let access = sys::CUmemAccessDesc {
            location: gpu.location(),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was just mapped, and the description is read during the call.
        let allowed = unsafe { sys::cuMemSetAccess(pointer, bytes, &raw const access, 1) }.result();
        gpu.check(allowed, "letting the GPU use a window")?;
        Ok(mapped)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // A lost GPU has nothing to unmap.
        if let Some(_visit) = self.gpu.visit_unless_lost() {
            // SAFETY: exactly the range that was mapped, and no work uses it any more.
            unsafe {
                let _ = sys::cuMemUnmap(self.pointer, self.bytes);
                let _ = sys::cuMemAddressFree(self.pointer, self.bytes);
            }
        }
    }
}

/// Reference to physical memory. The memory lives on while it is mapped.
struct Physical<'a> {
    gpu: &'a Gpu,
    handle: sys::CUmemGenericAllocationHandle,
}

impl<'a> Physical<'a> {
    /// Allocates at least `bytes` bytes. Also returns their number.
    fn allocate(gpu: &'a Gpu, bytes: usize) -> Result<(Self, usize)> {
        // SAFETY: all fields are numbers, an enumeration with a zero, and a null pointer.
        let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = FILE;
        properties.location = gpu.location();
        let (mut granule, minimum) = (0, sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM);
        // SAFETY: the pointers are to local variables.
        let asked = unsafe { sys::cuMemGetAllocationGranularity(&raw mut granule, &raw const properties, minimum) };
        gpu.check(asked.result(), "sizing a window")?;
        let (bytes, mut handle) = (bytes.next_multiple_of(granule.max(1)), 0);
        // SAFETY: as above.
        let created = unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0) };
        gpu.check(created.result(), "allocating a window")?;
        Ok((Self { gpu, handle }, bytes))
    }

    /// Returns a file that refers to the memory.
    fn export(&self) -> Result<OwnedFd> {
        let mut file: RawFd = -1;
        // SAFETY: the pointer is to a local variable of the type that a file needs.
        let exported = unsafe { sys::cuMemExportToShareableHandle((&raw mut file).cast(), self.handle, FILE, 0) };
        self.gpu.check(exported.result(), "exporting a window")?;
        // SAFETY: the driver has opened the file for the caller, its only owner.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    fn import(gpu: &'a Gpu, file: &OwnedFd) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: for this type of handle, the driver takes the number of an open file.
        let imported =
            unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, file.as_raw_fd() as usize as *mut _, FILE) };
        gpu.check(imported.result(), "importing the window of a peer")?;
        Ok(Self { gpu, handle })
    }
}

impl Drop for Physical<'_> {
    fn drop(&mut self) {
        if let Some(_visit) = self.gpu.visit_unless_lost() {
            // SAFETY: the reference is released once.
            let _ = unsafe { sys::cuMemRelease(self.handle) };
        }
    }
}

impl CudaDevice {
    /// Pins a window in host memory for the copies of this GPU, until it is unmapped.
    fn pinned(&self, window: SharedWindow) -> SharedWindow {
        self.pin().iter().for_each(|pin| window.pin_by(pin));
        window
    }
}

impl PeerOps for CudaDevice {
    fn open_window(&self, bytes: usize) -> Result<()> {
        if self.windows.own.get().is_some() {
            return Ok(());
        }
        self.gpu.bind()?;
        let (memory, bytes) = Physical::allocate(&self.gpu, bytes)?;
        let opened = (Mapped::new(&self.gpu, &memory, bytes)?, memory.export()?);
        // Another call may have set it meanwhile, which is as good.
        let _ = self.windows.own.set(opened);
        Ok(())
    }

    fn window_bytes(&self) -> usize {
        self.windows.own.get().map_or(0, |(own, _)| own.bytes)
    }

    fn window_file(&self) -> Option<BorrowedFd<'_>> {
        self.windows.own.get().map(|(_, file)| file.as_fd())
    }

    fn map_window(&self, peer: DeviceId, window: PeerWindow) -> Result<()> {
        let memory = match window {
            PeerWindow::Device { file, bytes } => {
                self.gpu.bind()?;
                let imported = Physical::import(&self.gpu, &file)?;
                PeerMemory::Device(Arc::new(Mapped::new(&self.gpu, &imported, bytes)?))
            }
            PeerWindow::Host(window) => PeerMemory::Host(self.pinned(window)),
        };
        self.windows.of_peers.insert(peer, memory);
        Ok(())
    }

    fn unmap_window(&self, peer: DeviceId) {
        self.windows.of_peers.remove(peer);
    }

    fn take_from_host(&self, peer: DeviceId, window: Option<SharedWindow>) {
        self.windows.in_host.set(peer, window.map(|window| self.pinned(window)));
    }

    fn push(
        &self,
        peer: DeviceId,
        offset: usize,
        from: &DeviceBuffer,
        bytes: Range<usize>,
        stream: &Stream,
    ) -> Result<()> {
        const PURPOSE: &str = "writing to a peer";
        let window = self.windows.of_peers.get(peer, self.id)?;
        let (work, from) = (self.work(stream)?, cuda(from));
        let fits = bytes.end <= from.size() && offset + bytes.len() <= window.bytes();
        assert!(fits, "bytes {bytes:?} of {} to {offset} of {}", from.size(), window.bytes());
        if bytes.is_empty() || work.queue.gpu.faults.is_due("lost-push") {
            return Ok(());
        }
        let _watched = work.watch(PURPOSE, bytes.len());
        let (from, len, queue) = (from.pointer() + bytes.start as u64, bytes.len(), work.queue.raw());
        // SAFETY: both have these bytes, as was just asserted. The ranks of a join agree that no
        // other one uses these bytes of the window meanwhile, and wait for the copy.
        let copied = unsafe {
            match &window {
                PeerMemory::Device(mapped) => {
                    sys::cuMemcpyDtoDAsync_v2(mapped.pointer + offset as u64, from, len, queue)
                }
                PeerMemory::Host(window) => {
                    sys::cuMemcpyDtoHAsync_v2(window.pointer(offset..offset + len).cast(), from, len, queue)
                }
            }
        };
        work.queue.gpu.check(copied.result(), PURPOSE)
    }

    fn take(&self, peer: DeviceId, bytes: Range<usize>, stream: &Stream) -> Result<DeviceBuffer> {
        const PURPOSE: &str = "taking rows from a peer";
        let (own, _) = self.windows.own.get().expect("rows arrive only in a window that is open");
        assert!(bytes.end <= own.bytes, "bytes {bytes:?} of a window of {}", own.bytes);
        let work = self.work(stream)?;
        let taken = work.buffer(bytes.len(), PURPOSE)?;
        if bytes.is_empty() {
            return Ok(Arc::new(taken));
        }
        let _watched = work.watch(PURPOSE, bytes.len());
        let (to, len, queue) = (taken.pointer(), bytes.len(), work.queue.raw());
        // SAFETY: both have these bytes: a window in host memory checks that, and it was just
        // asserted of the other. The caller waits for the copy before bytes of a peer replace them.
        let copied = unsafe {
            match self.windows.in_host.find(peer) {
                None => sys::cuMemcpyDtoDAsync_v2(to, own.pointer + bytes.start as u64, len, queue),
                Some(window) => sys::cuMemcpyHtoDAsync_v2(to, window.pointer(bytes).cast(), len, queue),
            }
        };
        work.queue.gpu.check(copied.result(), PURPOSE)?;
        Ok(Arc::new(taken))
    }

    fn concat_bytes(&self, parts: &[(DeviceBuffer, Range<usize>)], stream: &Stream) -> Result<DeviceBuffer> {
        let parts = parts.iter().map(|(part, bytes)| (part, bytes.clone()));
        concat(&self.work(stream)?, parts, "joining pieces of rows together")
    }
}
