//! UUIDs of GPUs, which mean the same GPU in every process and in every library.
//!
//! CUDA and NVML count GPUs in different orders, and `CUDA_VISIBLE_DEVICES` changes the order of
//! CUDA alone. With numbers in it, another GPU gets a number when one before it is gone. So the
//! server names a GPU by its UUID to the process that opens it.

#[cfg(any(dovetail_cuda, test))]
use crate::human::first_of;
#[cfg(any(dovetail_cuda, test))]
use crate::{Error, Result};

/// Variable that chooses the GPUs that CUDA shows to a process: numbers, or UUIDs of GPUs or of
/// slices (MIG), which may be cut short.
pub const VISIBLE_GPUS: &str = "CUDA_VISIBLE_DEVICES";

/// Returns a UUID as `nvidia-smi -L` prints it. `name` is the name of the GPU or slice.
#[cfg(any(dovetail_cuda, test))]
pub(super) fn uuid_text(bytes: [u8; 16], name: &str) -> String {
    let kind = if is_slice(name) { "MIG" } else { "GPU" };
    format!("{kind}-{}", uuid::Uuid::from_bytes(bytes))
}

/// True for the name of a slice of a GPU: `NVIDIA H200 MIG 1g.18gb`.
pub fn is_slice(name: &str) -> bool {
    name.contains(" MIG ")
}

/// Finds GPU `uuid`, which the server calls `device`, among those that CUDA shows to this process.
/// `visible` is the setting [`VISIBLE_GPUS`] of this process.
///
/// # Errors
/// [`Error::Unavailable`] with the GPUs that there are instead.
#[cfg(any(dovetail_cuda, test))]
pub(super) fn position_of_uuid(
    uuid: &str,
    device: &str,
    shown: &[Option<String>],
    visible: Option<&str>,
) -> Result<usize> {
    let is_it = |found: &Option<String>| found.as_deref() == Some(uuid);
    shown.iter().position(is_it).ok_or_else(|| {
        let instead = match shown {
            [] => "it shows none".to_string(),
            _ => {
                let number = |(number, found): (usize, &Option<String>)| {
                    format!("{} as GPU {number}", found.as_deref().unwrap_or("one without a UUID"))
                };
                format!("it shows {}", first_of(shown.iter().enumerate().map(number)))
            }
        };
        let setting = visible.map(|setting| format!("; {VISIBLE_GPUS} is {setting:?}")).unwrap_or_default();
        Error::Unavailable(format!("{device} is {uuid}, and CUDA does not show this GPU: {instead}{setting}"))
    })
}

/// Returns the [`VISIBLE_GPUS`] of a process for the GPU `own`, given all GPUs of the server.
///
/// CUDA ends the list at the first GPU that is gone, so `own` comes first. The others follow,
/// because the process maps their memory.
pub fn visible_to_process_of<'a>(own: &'a str, all: impl IntoIterator<Item = &'a str>) -> String {
    let mut list = vec![own];
    for uuid in all {
        // CUDA shows no GPU at all if the list names one twice.
        if !list.contains(&uuid) {
            list.push(uuid);
        }
    }
    list.join(",")
}

/// Returns the entry of [`VISIBLE_GPUS`] that names no GPU, if CUDA shows fewer GPUs than the
/// setting has entries. CUDA ignores it and all entries after it.
pub fn unknown_visible_gpu(setting: &str, shown: usize) -> Option<&str> {
    // CUDA shows at most one slice, whatever the setting names.
    let is_gpu = |entry: &&str| !entry.starts_with("MIG-");
    setting.split(',').map(str::trim).nth(shown).filter(is_gpu).filter(|entry| !entry.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// UUIDs of two H200 of one host.
    const FIRST: &str = "GPU-704cafac-ba7e-169b-5d7d-88ca4e64f449";
    const SECOND: &str = "GPU-c3b7a89c-4f8e-0f58-3c28-e6fe4dc419a0";

    #[test]
    fn uuids_read_as_nvidia_smi_prints_them() {
        let bytes = 0x704cafac_ba7e_169b_5d7d_88ca4e64f449_u128.to_be_bytes();
        assert_eq!(uuid_text(bytes, "NVIDIA H200"), FIRST);
        assert_eq!(uuid_text(bytes, "NVIDIA H200 MIG 1g.18gb"), FIRST.replace("GPU", "MIG"));
    }

    #[test]
    fn a_gpu_is_found_in_any_order_and_its_absence_names_the_others() {
        let shown = |uuids: &[&str]| uuids.iter().map(|uuid| Some((*uuid).to_string())).collect::<Vec<_>>();
        let find = |uuids: &[&str], visible| position_of_uuid(SECOND, "cuda:1", &shown(uuids), visible);
        assert_eq!(find(&[FIRST, SECOND], None), Ok(1));
        assert_eq!(find(&[SECOND, FIRST], Some("1,0")), Ok(0));
        let gone = find(&[FIRST], Some("0,1")).unwrap_err();
        let expected = format!(
            "cuda:1 is {SECOND}, and CUDA does not show this GPU: it shows {FIRST} as GPU 0; CUDA_VISIBLE_DEVICES is \
             \"0,1\""
        );
        assert_eq!(gone, Error::Unavailable(expected));
        let none = find(&[], None).unwrap_err();
        assert!(none.message().ends_with("does not show this GPU: it shows none"), "{none}");
    }

    #[test]
    fn a_process_sees_its_own_gpu_even_if_another_is_gone() {
        assert_eq!(visible_to_process_of(SECOND, [FIRST, SECOND]), format!("{SECOND},{FIRST}"));
        // Several logical GPUs of one.
        assert_eq!(visible_to_process_of(FIRST, [FIRST, FIRST]), FIRST);
    }

    #[test]
    fn the_entry_at_which_cuda_stops_is_named() {
        // As CUDA does with driver 580.
        assert_eq!(unknown_visible_gpu("1,0", 2), None);
        assert_eq!(unknown_visible_gpu(&format!("{SECOND},GPU-0000,{FIRST}"), 1), Some("GPU-0000"));
        assert_eq!(unknown_visible_gpu("GPU-0000,GPU-c3b7a89c", 0), Some("GPU-0000"));
        assert_eq!(unknown_visible_gpu(" 0 , 7 ", 1), Some("7"));
        assert_eq!(unknown_visible_gpu("MIG-a,MIG-b", 1), None);
        assert_eq!((unknown_visible_gpu("", 0), unknown_visible_gpu("0,", 1)), (None, None));
    }
}
