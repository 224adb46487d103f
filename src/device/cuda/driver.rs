//! Calls of the driver: a GPU's context, streams and events, and the meaning of its errors.
//!
//! CUDA's errors come in classes, by the party that can act:
//!
//! | class | examples | becomes |
//! |---|---|---|
//! | capacity | out of memory within budget | [`Error::Exhausted`]: another process has taken it |
//! | transient | device busy, OS error | [`Error::Unavailable`], once: a retry may succeed |
//! | lost | uncorrectable memory error, off the bus | [`Error::Unavailable`], also in later calls |
//! | all lost | illegal address, launch failure | the same, on every GPU of the process |
//! | defect | invalid value, invalid handle | [`Error::Internal`] |
//! | absence | no driver, no GPU | [`Error::Unsupported`] |
//!
//! A code in no list is transient if the GPU still answers, and otherwise lost. After an error of
//! class lost the context is useless: the GPU is marked as lost, and fails every call with that
//! error until the process restarts. After an error of class all lost, CUDA fails every call of the
//! process with that error, in any context. Two H200s did so even with contexts of our own. Only
//! another process would be unharmed.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow::buffer::Buffer;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, sys};
use parking_lot::Mutex;

use super::abi::{DovetailReadBack, DovetailStream, dovetail_read_back};
use super::fault;
use super::observe::Observer;
use super::tuning::Limits;
use crate::device::fault::Trigger;
use crate::device::gpu_uuid::{VISIBLE_GPUS, position_of_uuid, uuid_text};
use crate::device::loss::remedy;
use crate::device::{ComputeCapability, DeviceHandle, DeviceId, DeviceKind, GpuIdentity, GpuSeen, TestOptions};
use crate::memory::Pin;
use crate::{Error, Result};

/// True if this machine has a CUDA driver.
pub(super) fn is_driver_present() -> bool {
    // SAFETY: the call opens the driver's library and closes it again.
    unsafe { sys::is_culib_present() }
}

/// Returns the logical GPUs per physical GPU.
fn gpus_of_one() -> u16 {
    TestOptions::get().gpus_of_one.unwrap_or(1).max(1)
}

/// Returns the number of GPUs of this process.
pub(super) fn gpu_count() -> Result<u16> {
    Ok(driver_count()?.saturating_mul(gpus_of_one()))
}

/// Returns the number of GPUs that the driver shows to this process.
fn driver_count() -> Result<u16> {
    if !is_driver_present() {
        return Ok(0);
    }
    let attempt = |error: DriverError| Error::Unsupported(format!("asking the CUDA driver for its GPUs: {error}"));
    if let Err(error) = result::init() {
        // A driver is installed, but has no device to drive.
        return match error.0 {
            sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
            _ => Err(attempt(error)),
        };
    }
    Ok(u16::try_from(result::device::get_count().map_err(attempt)?).unwrap_or(u16::MAX))
}

fn cannot_tell(error: DriverError) -> Error {
    Error::Unsupported(format!("asking the CUDA driver about its GPUs: {error}"))
}

/// Returns the driver's own numbers of its GPUs, in its order.
fn driver_gpus() -> Result<Vec<sys::CUdevice>> {
    let devices = (0..driver_count()?).map(|ordinal| result::device::get(ordinal.into()));
    devices.collect::<Result<_, _>>().map_err(cannot_tell)
}

/// Returns the UUIDs of the GPUs that the driver shows to this process.
fn driver_uuids() -> Result<Vec<Option<String>>> {
    Ok(driver_gpus()?.into_iter().map(uuid_of).collect())
}

/// Returns the identity of each GPU of this process.
pub(super) fn gpu_identities() -> Result<Vec<GpuIdentity>> {
    let identity = |device: sys::CUdevice| {
        Ok(GpuIdentity { uuid: uuid_of(device), pci_address: pci_address(device)?, numa_node: numa_node(device) })
    };
    let identities: Vec<GpuIdentity> =
        driver_gpus()?.into_iter().map(identity).collect::<Result<_, _>>().map_err(cannot_tell)?;
    let of_one = |identity| std::iter::repeat_n(identity, usize::from(gpus_of_one()));
    Ok(identities.into_iter().flat_map(of_one).collect())
}

/// `None` if the driver does not report it.
fn numa_node(device: sys::CUdevice) -> Option<u32> {
    let mut node: c_int = -1;
    // SAFETY: the driver gave the device, and writes one number.
    let asked =
        unsafe { sys::cuDeviceGetAttribute(&raw mut node, Attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device) };
    asked.result().ok().and_then(|()| u32::try_from(node).ok())
}

/// `None` if the driver does not report it.
fn uuid_of(device: sys::CUdevice) -> Option<String> {
    let uuid = result::device::get_uuid(device).ok()?;
    let name = result::device::get_name(device).unwrap_or_default();
    Some(uuid_text(uuid.bytes.map(|byte| byte as u8), &name))
}

/// Returns the GPUs that the driver shows to this process.
pub(super) fn gpus_seen() -> Result<Vec<GpuSeen>> {
    let devices = driver_gpus()?;
    let seen = |&device: &sys::CUdevice| {
        // SAFETY: the driver gave the device.
        let memory_bytes = unsafe { result::device::total_mem(device) }? as u64;
        let peers = devices.iter().map(|&peer| Ok(device == peer || can_access(device, peer)?));
        let peers = peers.collect::<Result<_, DriverError>>()?;
        Ok(GpuSeen {
            name: result::device::get_name(device)?,
            uuid: uuid_of(device),
            pci_address: pci_address(device)?,
            memory_bytes,
            peers,
        })
    };
    devices.iter().map(seen).collect::<Result<_, _>>().map_err(cannot_tell)
}

fn can_access(device: sys::CUdevice, peer: sys::CUdevice) -> Result<bool, DriverError> {
    let mut can: c_int = 0;
    // SAFETY: the driver gave both devices, and writes one number.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, device, peer) }.result()?;
    Ok(can != 0)
}

fn pci_address(device: sys::CUdevice) -> Result<String, DriverError> {
    let mut text = [0u8; 32];
    // SAFETY: the driver gave the device, and writes at most as many bytes, the last of them 0.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as c_int, device) }.result()?;
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    Ok(String::from_utf8_lossy(&text[..end]).to_lowercase())
}

/// Class of an error: the party that can act on it, and the work that it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Capacity,
    Transient,
    Lost,
    AllLost,
    Defect,
    Unknown,
}

impl Class {
    /// Classifies a code of the driver, or of the runtime, whose codes from 200 on are the same.
    fn of(code: c_int) -> Self {
        match code {
            2 => Self::Capacity,
            // The device is busy; the operating system failed; not ready, in two ways.
            46 | 304 | 600 | 802 => Self::Transient,
            // The driver is shutting down; uncorrectable errors of memory and of NVLink;
            // the context is gone; external device.
            4 | 214 | 220 | 709 | 721 => Self::Lost,
            // Errors that leave the process in an inconsistent state, according to CUDA's manual.
            700 | 702 | 710 | 714..=719 => Self::AllLost,
            // Invalid arguments, handles, images and launches.
            1 | 8 | 9 | 98 | 200 | 201 | 209 | 218 | 400 | 401 | 500 | 701 | 720 | 801 => Self::Defect,
            _ => Self::Unknown,
        }
    }
}

/// True if CUDA has ended all work of this process.
static ALL_LOST: AtomicBool = AtomicBool::new(false);

/// A GPU and this process's context on it.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) ordinal: u16,
    context: Arc<CudaContext>,
    /// Bytes of the cache that all multiprocessors share.
    pub(super) cache_bytes: u64,
    lost: AtomicBool,
    pub(super) faults: Trigger,
    pub(super) observer: Observer,
    idle: Mutex<Vec<Lane>>,
}

impl Gpu {
    /// Opens the GPU with the given UUID, or else the one of the given number, as the driver
    /// counts, with the observer of the given name.
    pub(super) fn open(ordinal: u16, uuid: Option<&str>, observer: &str) -> Result<Self> {
        // The driver's library panics if no driver is installed.
        let count = gpu_count()?;
        if ordinal >= count && uuid.is_none_or(|_| count == 0) {
            let there_are = match count {
                0 if is_driver_present() => "the CUDA driver shows none".into(),
                0 => "no CUDA driver was found".into(),
                1 => "there is one, number 0".into(),
                _ => format!("there are {count}, numbered from 0"),
            };
            return Err(Error::Unsupported(format!(
                "there is no GPU {ordinal}: {there_are}; use the CPU instead: host"
            )));
        }
        let number = match uuid {
            None => usize::from(ordinal / gpus_of_one()),
            Some(uuid) => {
                let visible = std::env::var(VISIBLE_GPUS).ok();
                position_of_uuid(uuid, &format!("cuda:{ordinal}"), &driver_uuids()?, visible.as_deref())?
            }
        };
        let context =
            CudaContext::new(number).map_err(|error| Error::Unsupported(format!("opening GPU {ordinal}: {error}")))?;
        // Opening the GPU has made its context current on the calling thread.
        let observer = Observer::named(observer, ordinal)?;
        let faults = Trigger::of(DeviceId { kind: DeviceKind::Cuda, index: ordinal });
        let cache_bytes = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
        let cache_bytes = cache_bytes.ok().and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
        let gpu = Self {
            ordinal,
            context,
            cache_bytes,
            lost: AtomicBool::new(false),
            faults,
            observer,
            idle: Mutex::default(),
        };
        gpu.keep_freed_memory()?;
        Ok(gpu)
    }

    /// Makes the stream-ordered pool keep freed memory, instead of returning it to the driver at
    /// the next synchronization.
    fn keep_freed_memory(&self) -> Result<()> {
        let mut threshold = u64::MAX;
        // SAFETY: the pool belongs to this device, and the attribute is a 64-bit number that is
        // read during the call.
        let kept = unsafe {
            result::device::get_default_mem_pool(self.context.cu_device()).and_then(|pool| {
                let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
                result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast::<c_void>())
            })
        };
        self.check(kept, "setting up the memory pool")
    }

    /// Returns the place of the GPU's memory, as the driver names it.
    pub(super) fn location(&self) -> sys::CUmemLocation {
        let type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        sys::CUmemLocation { type_, id: self.context.cu_device() }
    }

    /// Returns the GPU's UUID; `None` if the driver does not report it.
    pub(super) fn uuid(&self) -> Option<String> {
        uuid_of(self.context.cu_device())
    }

    /// Returns the GPU's name, such as `NVIDIA H200`, and its limits.
    pub(super) fn limits(&self) -> Result<Limits> {
        const ATTEMPT: &str = "reading the GPU's limits";
        let (major, minor) = self.answer(self.context.compute_capability(), ATTEMPT)?;
        let shared = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, ATTEMPT)?;
        Ok(Limits {
            name: self.answer(result::device::get_name(self.context.cu_device()), "reading the GPU's name")?,
            capability: ComputeCapability { major: major.unsigned_abs(), minor: minor.unsigned_abs() },
            block_shared_bytes: shared,
        })
    }

    /// Returns the number of multiprocessors, at least 1.
    pub(super) fn multiprocessors(&self) -> Result<usize> {
        let attribute = Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(self.attribute(attribute, "reading the GPU's multiprocessors")?.max(1) as usize)
    }

    fn attribute(&self, attribute: Attribute, attempt: &str) -> Result<u32> {
        Ok(self.answer(self.context.attribute(attribute), attempt)?.unsigned_abs())
    }

    /// Returns the bytes of memory that are free now.
    pub(super) fn free_bytes(&self) -> Result<u64> {
        self.bind()?;
        let (free, _) = self.answer(result::mem_get_info(), "reading the GPU's memory")?;
        Ok(free as u64 / u64::from(gpus_of_one()))
    }

    /// Makes this GPU's context current on the calling thread.
    pub(super) fn bind(&self) -> Result<()> {
        self.check_not_lost()?;
        self.check(self.context.bind_to_thread(), "binding a thread to the GPU")
    }

    /// Makes this GPU's context current on the calling thread until the result is dropped, and then
    /// the one before. For calls that other GPUs' work may contain: pinning memory, and freeing
    /// what is dropped. Works on a lost GPU if the driver lets it.
    pub(super) fn visit(&self) -> Result<Visit, DriverError> {
        let before = result::ctx::get_current()?;
        self.context.bind_to_thread()?;
        Ok(Visit { before: before.filter(|before| *before != self.context.cu_ctx()) })
    }

    /// Visits this GPU as [`visit`](Self::visit) does, unless it is lost. A lost GPU has nothing to
    /// free.
    pub(super) fn visit_unless_lost(&self) -> Option<Visit> {
        self.check_not_lost().ok()?;
        self.visit().ok()
    }

    /// Turns adding up the times of work on or off.
    pub(super) fn add_up_times(&self, on: bool) -> Result<()> {
        self.bind()?;
        self.observer.add_up(on, self.ordinal)
    }

    /// Waits for all work queued on any stream, and marks the GPU as lost if it was lost meanwhile.
    /// Failures of a stream are reported to callers that wait for that stream.
    pub(super) fn settle(&self, attempt: &str) {
        let _ = self.bind().and_then(|()| self.check(result::ctx::synchronize(), attempt));
    }

    /// Fails if this GPU, or all GPUs, are lost.
    pub(super) fn check_not_lost(&self) -> Result<()> {
        match self.lost.load(Ordering::Relaxed) || ALL_LOST.load(Ordering::Relaxed) {
            true => Err(self.lost_error("earlier work")),
            false => Ok(()),
        }
    }

    /// Marks the GPU as lost by `what`. `all`: marks all GPUs as lost, because CUDA fails every
    /// call.
    fn lose(&self, what: &str, all: bool) -> Error {
        self.lost.store(true, Ordering::Relaxed);
        if all {
            ALL_LOST.store(true, Ordering::Relaxed);
        }
        let error = self.lost_error(what);
        tracing::error!(device = self.ordinal, "{error}");
        error
    }

    /// Returns the error of work that could not even be prepared.
    pub(super) fn unprepared(&self, attempt: &str) -> Error {
        self.error(sys::CUresult::CUDA_ERROR_UNKNOWN as c_int, "the size of its scratch memory is unknown", attempt)
    }

    /// True if the driver still answers for the GPU, and all queued work ends without error.
    fn answers(&self) -> bool {
        self.context
            .bind_to_thread()
            .and_then(|()| result::mem_get_info())
            .and_then(|_| result::ctx::synchronize())
            .is_ok()
    }

    fn lost_error(&self, what: &str) -> Error {
        let remedy = remedy(ALL_LOST.load(Ordering::Relaxed));
        Error::Unavailable(format!("device cuda:{} was lost by {what}; {remedy}", self.ordinal))
    }

    /// Converts a code to our error. `says`: the code and its name.
    fn error(&self, code: c_int, says: &str, attempt: &str) -> Error {
        let device = format!("device cuda:{}", self.ordinal);
        let transient = || {
            Error::Unavailable(format!("{attempt} on {device} failed ({says}), and the GPU still answers; try again"))
        };
        match Class::of(code) {
            Class::Capacity => Error::Exhausted(format!(
                "{attempt} on {device}: the GPU has less free memory than its budget; another process uses it, or the \
                 server's --device-memory promises too much"
            )),
            Class::Transient => transient(),
            Class::Defect => Error::Internal(format!("{attempt} on {device}: {says}")),
            Class::Unknown if self.answers() => transient(),
            Class::Lost | Class::Unknown => self.lose(&format!("{attempt} ({says})"), false),
            Class::AllLost => self.lose(&format!("{attempt} ({says})"), true),
        }
    }

    fn answer<T>(&self, answer: Result<T, DriverError>, attempt: &str) -> Result<T> {
        answer.map_err(|DriverError(code)| self.error(code as c_int, &DriverError(code).to_string(), attempt))
    }

    /// Converts the driver's answer to ours.
    pub(super) fn check(&self, answer: Result<(), DriverError>, attempt: &str) -> Result<()> {
        self.answer(answer, attempt)
    }

    /// Converts the answer of a kernel's entry point to ours. The runtime's codes are the driver's.
    pub(super) fn check_launch(&self, code: c_int, kernel: &str) -> Result<()> {
        match code {
            0 => Ok(()),
            _ => Err(self.error(code, &format!("CUDA error {code}"), kernel)),
        }
    }
}

/// A thread's stay with another GPU. Dropping it makes the context from before current again.
#[must_use]
pub(super) struct Visit {
    /// `None` if the thread had no context, or this GPU's.
    before: Option<sys::CUcontext>,
}

impl Drop for Visit {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: contexts of GPUs live as long as the process.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
}

/// Pins the arena's slabs for the copies of all GPUs.
#[derive(Debug)]
pub(super) struct PinForGpus {
    pub(super) gpu: Arc<Gpu>,
}

impl Pin for PinForGpus {
    fn pin(&self, start: *mut u8, len: usize, _file: Option<&Arc<OwnedFd>>) -> bool {
        /// Pins for the contexts of all GPUs, not only of this one.
        const PORTABLE: u32 = 1;
        // The arena maps slabs in the middle of another GPU's work too.
        let Some(_visit) = self.gpu.visit_unless_lost() else { return false };
        // SAFETY: the slab is mapped, and is unpinned before it is unmapped.
        let pinned = unsafe { sys::cuMemHostRegister_v2(start.cast(), len, PORTABLE) }.result();
        if let Err(error) = pinned {
            tracing::warn!("pinning {len} bytes of host memory for the GPUs: {error}; copies of it will be slower");
        }
        pinned.is_ok()
    }

    fn unpin(&self, start: *mut u8) {
        if let Ok(_visit) = self.gpu.visit() {
            // SAFETY: the slab was pinned. Pending copies hold their pieces of the arena, so no
            // pending copy uses this slab.
            let _ = unsafe { sys::cuMemHostUnregister(start.cast()) };
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // A lost GPU has nothing to release.
        if let Ok(_visit) = self.visit() {
            self.idle.get_mut().drain(..).for_each(Lane::unmake);
        }
    }
}

/// Bytes that one call reads back at most.
const READ_BACK_BYTES: usize = 4096;

/// Idle lanes that are kept at most: enough for a few concurrent joins, with seven lanes each.
const IDLE_LANES_MAX: usize = 64;

/// A stream of the driver, with the page of pinned memory through which small results return. Lanes
/// outlive joins: making one takes as long as a small kernel, and the driver frees pinned memory
/// only when the whole GPU is idle.
#[derive(Debug)]
struct Lane {
    raw: sys::CUstream,
    read_back: *mut c_void,
}

// SAFETY: the driver's streams may be used by any thread, and the page belongs to the lane's owner
// alone.
unsafe impl Send for Lane {}

impl Lane {
    fn make(gpu: &Gpu) -> Result<Self> {
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking);
        let raw = gpu.answer(raw, "making a stream")?;
        // SAFETY: the memory is freed once, with the lane.
        let page = unsafe { result::malloc_host(READ_BACK_BYTES, 0) };
        match gpu.answer(page, "pinning memory for a stream") {
            Ok(read_back) => Ok(Self { raw, read_back }),
            Err(error) => {
                // SAFETY: nothing was queued on the stream.
                let _ = unsafe { result::stream::destroy(raw) };
                Err(error)
            }
        }
    }

    /// Returns the lane to the driver. No work may be pending on it.
    fn unmake(self) {
        // SAFETY: the lane is the only owner of the page and the stream.
        unsafe {
            let _ = result::free_host(self.read_back);
            let _ = result::stream::destroy(self.raw);
        }
    }
}

/// A CUDA stream, and the memory that must live until its work is done.
pub(super) struct Queue {
    pub(super) gpu: Arc<Gpu>,
    raw: sys::CUstream,
    /// Host memory that pending copies read or write.
    in_flight: Mutex<InFlight>,
    /// The page of its lane.
    read_back: Mutex<*mut c_void>,
}

/// Buffers in the order in which their copies were queued, and the number of buffers released
/// earlier.
#[derive(Default)]
struct InFlight {
    buffers: VecDeque<Buffer>,
    let_go: u64,
}

impl InFlight {
    fn held(&self) -> u64 {
        self.let_go + self.buffers.len() as u64
    }

    /// Takes out the buffers that were queued before the buffer of the given number.
    fn let_go_before(&mut self, number: u64) -> Vec<Buffer> {
        let done = number.saturating_sub(self.let_go).min(self.buffers.len() as u64);
        self.let_go += done;
        self.buffers.drain(..done as usize).collect()
    }
}

// SAFETY: the driver's streams may be used by any thread, and the pinned memory is used only under
// its lock.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queue(cuda:{})", self.gpu.ordinal)
    }
}

impl DeviceHandle for super::CudaStream {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl Queue {
    pub(super) fn new(gpu: Arc<Gpu>) -> Result<Self> {
        gpu.bind()?;
        let idle = gpu.idle.lock().pop();
        let Lane { raw, read_back } = idle.map_or_else(|| Lane::make(&gpu), Ok)?;
        Ok(Self { gpu, raw, in_flight: Mutex::default(), read_back: Mutex::new(read_back) })
    }

    /// Returns the stream as the kernels' entry points take it.
    pub(super) fn handle(&self) -> DovetailStream {
        self.raw.cast()
    }

    /// Returns the stream as the driver takes it.
    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Keeps host memory alive until a copy queued before this call is known to be done.
    pub(super) fn hold(&self, buffer: Buffer) {
        self.in_flight.lock().buffers.push_back(buffer);
    }

    /// Waits for all work, then releases the host memory that the work used.
    pub(super) fn synchronize(&self, attempt: &str) -> Result<()> {
        self.gpu.bind()?;
        // Only buffers held now belong to copies queued by now; another thread may queue more
        // copies.
        let held = self.in_flight.lock().held();
        // SAFETY: the stream lives as long as the queue.
        let waited = unsafe { result::stream::synchronize(self.raw) };
        let waited = self.gpu.check(waited, attempt);
        if !self.may_go_on_after(&waited) {
            let held = self.in_flight.lock().let_go_before(held);
            drop(held);
        }
        waited
    }

    /// True if work may still run although the wait returned: the wait failed, but the GPU is not
    /// lost. A lost GPU executes nothing more.
    fn may_go_on_after(&self, waited: &Result<()>) -> bool {
        waited.is_err() && self.gpu.check_not_lost().is_ok()
    }

    /// Reads values back once all earlier work is done.
    pub(super) fn download<T: bytemuck::Pod>(
        &self,
        from: sys::CUdeviceptr,
        count: usize,
        attempt: &'static str,
    ) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); count];
        if count > 0 {
            self.gpu.bind()?;
            let watched = self.gpu.observer.watch(self, attempt, size_of_val(&values[..]) as u64);
            // SAFETY: callers pass memory of this device with that many values. The copy is waited
            // for before the values are read.
            let copied = unsafe { result::memcpy_dtoh_async(&mut values, from, self.raw) };
            drop(watched);
            let copied = fault::of_read_back(self, copied);
            let waited = self.synchronize(attempt);
            self.gpu.check(copied, attempt)?;
            waited?;
        }
        Ok(values)
    }

    /// Reads a few bytes of device memory once all earlier work is done. A kernel writes the bytes
    /// to host memory. A copy would wait for all column copies that other streams queued before:
    /// 0.7 ms with 5 streams.
    pub(super) fn read_small(&self, from: sys::CUdeviceptr, bytes: usize, attempt: &str) -> Result<Vec<u8>> {
        assert!(bytes <= READ_BACK_BYTES, "{bytes} bytes do not fit in the read-back page");
        let page = self.read_back.lock();
        self.gpu.bind()?;
        let args = DovetailReadBack { from: from as *const c_void, bytes: bytes as u64, to: *page };
        let watched = self.gpu.observer.watch(self, "reading a number back", bytes as u64);
        // SAFETY: callers pass memory of this device with at least that many bytes, and the page
        // has as many. The page is pinned, so the GPU may write it by the same address. The lock
        // excludes other users.
        let code = unsafe { dovetail_read_back(&args, self.handle()) };
        drop(watched);
        self.gpu.check_launch(code, "reading a number back")?;
        // If the kernel is still running after an error, it ends before the next one on this stream
        // writes to the page.
        self.gpu.check(fault::of_read_back(self, Ok(())), attempt)?;
        self.synchronize(attempt)?;
        // SAFETY: the page has that many bytes, and the wait above returns only after the kernel
        // that writes them.
        Ok(unsafe { std::slice::from_raw_parts(page.cast::<u8>(), bytes) }.to_vec())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // A lost device has stopped all work; its answers no longer matter.
        let _visit = self.gpu.visit();
        // SAFETY: no more work can be queued. Memory is released only once no work is pending.
        let settled = unsafe { result::stream::synchronize(self.raw) };
        self.gpu.observer.settle(self);
        // This wait may be the first to report that the GPU is lost. A known loss was reported
        // already.
        let waited = self.gpu.check_not_lost().and_then(|()| self.gpu.check(settled, "ending a stream"));
        if self.may_go_on_after(&waited) {
            // Pending work is unknown, so the memory that it may use is leaked.
            std::mem::forget(std::mem::take(self.in_flight.get_mut()));
        }
        let lane = Lane { raw: self.raw, read_back: *self.read_back.get_mut() };
        let mut idle = self.gpu.idle.lock();
        if settled.is_ok() && idle.len() < IDLE_LANES_MAX {
            idle.push(lane);
        } else {
            drop(idle);
            lane.unmake();
        }
    }
}

/// A mark in a stream.
pub(super) struct Mark {
    gpu: Arc<Gpu>,
    raw: sys::CUevent,
    /// Number of buffers that the stream had held before the mark.
    held: u64,
}

// SAFETY: the driver's events may be used by any thread.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mark(cuda:{})", self.gpu.ordinal)
    }
}

impl DeviceHandle for Mark {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl Mark {
    /// Marks the work queued so far.
    pub(super) fn record(queue: &Queue) -> Result<Self> {
        queue.gpu.bind()?;
        let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let held = queue.in_flight.lock().held();
        let mark = Self { raw: queue.gpu.answer(raw, "making an event")?, gpu: queue.gpu.clone(), held };
        // SAFETY: event and stream are of this context and live.
        let recorded = unsafe { result::event::record(mark.raw, queue.raw) };
        mark.gpu.check(recorded, "recording an event")?;
        Ok(mark)
    }

    /// Waits until the work marked in `queue` is done, then releases the host memory that it used.
    pub(super) fn wait(&self, queue: &Queue, attempt: &str) -> Result<()> {
        queue.gpu.bind()?;
        // SAFETY: the event lives.
        let waited = unsafe { result::event::synchronize(self.raw) };
        queue.gpu.check(waited, attempt)?;
        let done = queue.in_flight.lock().let_go_before(self.held);
        drop(done);
        // A lost GPU fails the wait, as for the whole stream.
        queue.gpu.check_not_lost()
    }

    /// True if the marked work is known to be done. Does not wait.
    pub(super) fn is_done(&self) -> bool {
        // SAFETY: the event lives.
        unsafe { result::event::query(self.raw) }.is_ok()
    }

    /// Makes later work of `queue` wait for the marked work.
    pub(super) fn hold_back(&self, queue: &Queue) -> Result<()> {
        queue.gpu.bind()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream live.
        let waits = unsafe { result::stream::wait_event(queue.raw, self.raw, flags) };
        queue.gpu.check(waits, "waiting for an event")
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let _visit = self.gpu.visit();
        // SAFETY: the driver keeps an event until all work that waits for it has passed it.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_lost_only_by_errors_that_end_its_context() {
        use sys::CUresult as Code;
        let class = |code: Code| Class::of(code as c_int);
        assert_eq!(class(Code::CUDA_ERROR_OUT_OF_MEMORY), Class::Capacity);
        for code in [Code::CUDA_ERROR_DEVICE_UNAVAILABLE, Code::CUDA_ERROR_OPERATING_SYSTEM, Code::CUDA_ERROR_NOT_READY]
        {
            assert_eq!(class(code), Class::Transient, "{code:?}");
        }
        for code in [Code::CUDA_ERROR_ECC_UNCORRECTABLE, Code::CUDA_ERROR_NVLINK_UNCORRECTABLE] {
            assert_eq!(class(code), Class::Lost, "{code:?}");
        }
        for code in [Code::CUDA_ERROR_ILLEGAL_ADDRESS, Code::CUDA_ERROR_ASSERT, Code::CUDA_ERROR_LAUNCH_FAILED] {
            assert_eq!(class(code), Class::AllLost, "{code:?}");
        }
        for code in [
            Code::CUDA_ERROR_INVALID_VALUE,
            Code::CUDA_ERROR_INVALID_HANDLE,
            Code::CUDA_ERROR_NOT_SUPPORTED,
            Code::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            Code::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
        ] {
            assert_eq!(class(code), Class::Defect, "{code:?}");
        }
        assert_eq!(class(Code::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED), Class::Unknown);
    }
}
