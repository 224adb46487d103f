//! NVLinks of all GPUs, asked of NVML, the driver's library for management.
//!
//! The library is opened when it is asked, so that no build and no machine needs it. The crate
//! `nvml-wrapper` 0.13 is not used: its `remote_device_type` always returns `Unknown`, because the
//! answer is written to a temporary value. Only that answer tells a bridge from a switch.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use libloading::{Library, Symbol};

use crate::topology::{NvmlGpu, NvmlLink, NvmlRemote};
use crate::{Error, Result};

const LIBRARY: &str = "libnvidia-ml.so.1";

/// Twice the links of a B200, in case a later GPU has more. NVML refuses numbers that are too
/// large.
const LINKS_MAX: c_uint = 36;

/// Codes of NVML.
const SUCCESS: c_int = 0;
const ACTIVE: c_uint = 1;
const REMOTE_GPU: c_uint = 0;
const REMOTE_SWITCH: c_uint = 2;

/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`.
const UUID_BYTES: usize = 96;

type Handle = *mut c_void;

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PciInfo {
    legacy_address: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    address: [c_char; 32],
}

impl PciInfo {
    const EMPTY: Self =
        Self { legacy_address: [0; 16], domain: 0, bus: 0, device: 0, device_id: 0, subsystem_id: 0, address: [0; 32] };
}

/// Functions without an argument: `nvmlInit_v2` and `nvmlShutdown`.
type Plain = unsafe extern "C" fn() -> c_int;
type Count = unsafe extern "C" fn(*mut c_uint) -> c_int;
type ByIndex = unsafe extern "C" fn(c_uint, *mut Handle) -> c_int;
type Uuid = unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> c_int;
type Pci = unsafe extern "C" fn(Handle, *mut PciInfo) -> c_int;
type OfLink = unsafe extern "C" fn(Handle, c_uint, *mut c_uint) -> c_int;
type RemotePci = unsafe extern "C" fn(Handle, c_uint, *mut PciInfo) -> c_int;

/// NVML, between its start and its end.
struct Nvml<'a> {
    count: Symbol<'a, Count>,
    by_index: Symbol<'a, ByIndex>,
    uuid: Symbol<'a, Uuid>,
    pci: Symbol<'a, Pci>,
    state: Symbol<'a, OfLink>,
    version: Symbol<'a, OfLink>,
    remote_type: Symbol<'a, OfLink>,
    remote_pci: Symbol<'a, RemotePci>,
    shutdown: Symbol<'a, Plain>,
}

/// Returns the GPUs that NVML shows, with their active NVLinks.
///
/// # Errors
/// [`Error::Unavailable`] if there is no library, or it has no driver to talk to.
pub fn nvml_gpus() -> Result<Vec<NvmlGpu>> {
    // SAFETY: opening the library runs its initializers. Those of NVML start nothing.
    let library = unsafe { Library::new(LIBRARY) }.map_err(|error| Error::Unavailable(error.to_string()))?;
    Nvml::start(&library)?.gpus()
}

fn check(code: c_int, attempt: &str) -> Result<()> {
    match code {
        SUCCESS => Ok(()),
        code => Err(Error::Unavailable(format!("{attempt}: NVML error {code}"))),
    }
}

/// Returns the text that NVML wrote.
fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|&byte| byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

impl<'a> Nvml<'a> {
    fn start(library: &'a Library) -> Result<Self> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type is that of the function in `nvml.h`, which keeps the meaning of
                // a name.
                unsafe { library.get($name) }.map_err(|error| Error::Unavailable(error.to_string()))?
            };
        }
        let start: Symbol<'_, Plain> = symbol!("nvmlInit_v2");
        let nvml = Self {
            count: symbol!("nvmlDeviceGetCount_v2"),
            by_index: symbol!("nvmlDeviceGetHandleByIndex_v2"),
            uuid: symbol!("nvmlDeviceGetUUID"),
            pci: symbol!("nvmlDeviceGetPciInfo_v3"),
            state: symbol!("nvmlDeviceGetNvLinkState"),
            version: symbol!("nvmlDeviceGetNvLinkVersion"),
            remote_type: symbol!("nvmlDeviceGetNvLinkRemoteDeviceType"),
            remote_pci: symbol!("nvmlDeviceGetNvLinkRemotePciInfo_v2"),
            shutdown: symbol!("nvmlShutdown"),
        };
        // SAFETY: NVML counts starts and ends. If this one fails, the end that follows fails too,
        // and changes nothing.
        check(unsafe { start() }, "starting NVML")?;
        Ok(nvml)
    }

    fn gpus(&self) -> Result<Vec<NvmlGpu>> {
        let mut count = 0;
        // SAFETY: NVML has started, and writes one number.
        check(unsafe { (self.count)(&raw mut count) }, "counting GPUs")?;
        // A GPU that this process may not use has no handle.
        Ok((0..count).filter_map(|index| self.gpu(index).ok()).collect())
    }

    fn gpu(&self, index: c_uint) -> Result<NvmlGpu> {
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: NVML has started, and writes one handle.
        check(unsafe { (self.by_index)(index, &raw mut handle) }, "finding a GPU")?;
        let mut uuid = [0; UUID_BYTES];
        // SAFETY: NVML gave the handle, and writes at most as many bytes.
        check(unsafe { (self.uuid)(handle, uuid.as_mut_ptr(), UUID_BYTES as c_uint) }, "reading a UUID")?;
        let mut pci = PciInfo::EMPTY;
        // SAFETY: NVML gave the handle, and fills one structure.
        check(unsafe { (self.pci)(handle, &raw mut pci) }, "reading an address")?;
        let links = (0..LINKS_MAX).filter_map(|link| self.link(handle, link)).collect();
        Ok(NvmlGpu { uuid: text(&uuid), pci_address: text(&pci.address), links })
    }

    /// `None` if the link is not active, or there is no such link.
    fn link(&self, gpu: Handle, link: c_uint) -> Option<NvmlLink> {
        let number = |function: &OfLink| {
            let mut number = 0;
            // SAFETY: NVML gave the handle, refuses a link that the GPU lacks, and writes one
            // number.
            (unsafe { function(gpu, link, &raw mut number) } == SUCCESS).then_some(number)
        };
        if number(&self.state)? != ACTIVE {
            return None;
        }
        let remote = match number(&self.remote_type) {
            Some(REMOTE_SWITCH) => NvmlRemote::Switch,
            Some(REMOTE_GPU) => {
                let mut pci = PciInfo::EMPTY;
                // SAFETY: as above; it fills one structure.
                match unsafe { (self.remote_pci)(gpu, link, &raw mut pci) } {
                    SUCCESS => NvmlRemote::Gpu(text(&pci.address)),
                    _ => NvmlRemote::Unknown,
                }
            }
            _ => NvmlRemote::Unknown,
        };
        Some(NvmlLink { version: number(&self.version).unwrap_or(0), remote })
    }
}

impl Drop for Nvml<'_> {
    fn drop(&mut self) {
        // SAFETY: it ends what `start` has started.
        let _ = unsafe { (self.shutdown)() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvml_names_the_gpus_or_says_why_it_cannot() {
        match nvml_gpus() {
            Err(error) => assert!(matches!(&error, Error::Unavailable(why) if !why.is_empty()), "{error}"),
            Ok(gpus) => {
                let is_named = |gpu: &NvmlGpu| gpu.uuid.starts_with("GPU-") && gpu.pci_address.contains(':');
                assert!(gpus.iter().all(is_named), "{gpus:?}");
            }
        }
    }

    #[test]
    fn the_structure_of_an_address_is_that_of_the_library() {
        assert_eq!((size_of::<PciInfo>(), std::mem::offset_of!(PciInfo, address)), (68, 36));
        let mut bytes = [0 as c_char; 32];
        assert_eq!(text(&bytes), "");
        bytes[..4].copy_from_slice(&b"00:1".map(|byte| byte as c_char));
        assert_eq!(text(&bytes), "00:1");
    }
}
