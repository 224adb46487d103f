//! A file of measured rates, which later starts of the server read.
//!
//! ```json
//! {"calibration": 13, "devices": [{"kind": "host", "name": "2 threads of ...", "parallelism": 2,
//!   "cpu_threads": 2, "memory_bytes": 4294967296, "link": [], "measured": "2026-11-21T17:00:00Z",
//!   "rates": {"copy_in": 1.2e10, ...}}], "gangs": [{"devices": [{"kind": "host", ...}, ...],
//!   "measured": "2026-11-21T17:00:00Z", "rates": {"host_memory": 9e9, "pairs": [[0, 2e9], ...]}}]}
//! ```
//!
//! Rates belong to a device model: its threads, memory and link. A device that differs in one of
//! these is measured anew, and the file keeps the rates of the others. Rates of devices that work
//! at the same time belong to all their models, in order.
//!
//! If the file is of another calibration version, or has an invalid rate, rates are measured again
//! and the file is overwritten. The file only saves time; nothing depends on it. A file with other
//! contents is not ours: the server neither uses nor writes it.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::{LinkRates, Rates};
use crate::device::{DeviceFacts, DeviceKind};
use crate::memory::Budget;
use crate::{Context, Error, Result};

/// Version of the calibration. Raise it when the measured rates, or the way of measuring, change.
const CALIBRATION: u32 = 13;

/// The first field of every file of rates, of any version.
const CALIBRATION_FIELD: &str = "calibration";

/// Maximum devices in the file; the most recently measured are kept.
const DEVICES_MAX: usize = 64;

/// Maximum sets of devices in the file, as for devices.
const GANGS_MAX: usize = 16;

/// Maximum bytes of a file of rates. A larger file is not ours.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Device properties that rates depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceModel {
    /// `host` or `cuda`.
    pub kind: String,
    pub name: String,
    pub parallelism: usize,
    pub cpu_threads: usize,
    /// Bytes of device memory, rounded down to a power of two. A device of little memory is
    /// measured with little data, and the free memory of a GPU varies from start to start.
    pub memory_bytes: u64,
    /// Bytes per second of emulated links to and from host memory; empty for none.
    pub link: Vec<f64>,
}

impl DeviceModel {
    /// Returns the model of a device with the given hardware, behind the given link.
    pub fn of(kind: DeviceKind, facts: &DeviceFacts, memory: &Budget, link: Vec<f64>) -> Self {
        Self {
            kind: kind.to_string(),
            name: facts.name.clone(),
            parallelism: facts.parallelism,
            cpu_threads: facts.cpu_threads,
            memory_bytes: memory.limit_bytes().checked_ilog2().map_or(0, |bits| 1 << bits),
            link,
        }
    }
}

/// Rates, and the time of their measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedRates {
    #[serde(flatten)]
    pub model: DeviceModel,
    #[serde(with = "rfc3339")]
    pub measured: SystemTime,
    pub rates: Rates,
}

/// Rates of all devices of a kind that work at the same time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedLinkRates {
    pub devices: Vec<DeviceModel>,
    #[serde(with = "rfc3339")]
    pub measured: SystemTime,
    pub rates: LinkRates,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Contents {
    calibration: u32,
    devices: Vec<SavedRates>,
    #[serde(default)]
    gangs: Vec<SavedLinkRates>,
}

/// A file of rates.
#[derive(Clone, Debug)]
pub struct RatesFile {
    path: PathBuf,
    /// Rates in order of measurement, the latest last.
    kept: Contents,
    /// True if the file may be overwritten.
    is_ours: bool,
}

impl RatesFile {
    /// Opens a file, which need not exist. A file with other contents is ignored, with a warning.
    pub fn open(path: &Path) -> Self {
        let text = read(path);
        let kept = text.as_deref().map_err(Error::clone).and_then(kept_in).unwrap_or_else(|error| {
            tracing::warn!(file = %path.display(), %error, "the file of rates is ignored, and rates are measured again");
            Contents::default()
        });
        Self { path: path.into(), kept, is_ours: text.is_ok_and(|text| is_ours(&text)) }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the rates of a device model, if known.
    pub fn find(&self, model: &DeviceModel) -> Option<&SavedRates> {
        self.kept.devices.iter().find(|kept| kept.model == *model)
    }

    /// Returns the rates of devices of these models that work at the same time, if known.
    pub fn find_links(&self, devices: &[DeviceModel]) -> Option<&SavedLinkRates> {
        self.kept.gangs.iter().find(|kept| kept.devices == devices)
    }

    /// Returns the rates of the devices of a model's kind and name that were measured last.
    pub fn latest(&self, kind: DeviceKind, name: &str) -> Option<&SavedRates> {
        let kind = kind.to_string();
        self.kept.devices.iter().rfind(|kept| kept.model.kind == kind && kept.model.name == name)
    }

    /// Returns the rates of `count` devices of one kind together that were measured last.
    pub fn latest_links(&self, kind: DeviceKind, count: usize) -> Option<&SavedLinkRates> {
        let kind = kind.to_string();
        let is_of = |kept: &&SavedLinkRates| {
            kept.devices.len() == count && kept.devices.iter().all(|device| device.kind == kind)
        };
        self.kept.gangs.iter().rfind(is_of)
    }

    /// Adds measured rates and removes earlier ones of the same model. [`RatesFile::save`] writes
    /// them.
    pub fn add(&mut self, measured: SavedRates) {
        put_latest(&mut self.kept.devices, measured, |one, other| one.model == other.model, DEVICES_MAX);
    }

    /// Adds measured rates of several devices, as [`RatesFile::add`] does those of one.
    pub fn add_links(&mut self, measured: SavedLinkRates) {
        put_latest(&mut self.kept.gangs, measured, |one, other| one.devices == other.devices, GANGS_MAX);
    }

    /// Writes the file to a temporary name and renames it, so that no reader sees half of it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the path holds a file with other contents; errors of writing.
    pub fn save(&self) -> Result<()> {
        let context = || format!("saving measured rates in {}", self.path.display());
        if !self.is_ours {
            return Err(Error::Invalid("the file there is not a file of rates, and is left unchanged".into()))
                .context(context);
        }
        let contents = Contents { calibration: CALIBRATION, ..self.kept.clone() };
        let text = serde_json::to_string_pretty(&contents)
            .map_err(|error| Error::Internal(error.to_string()))
            .context(context)?;
        replace(&self.path, &(text + "\n")).context(context)
    }
}

/// Adds an entry in place of earlier ones of the same devices. Only the latest `most` stay.
fn put_latest<T>(kept: &mut Vec<T>, latest: T, is_same: impl Fn(&T, &T) -> bool, most: usize) {
    kept.retain(|earlier| !is_same(earlier, &latest));
    kept.push(latest);
    kept.drain(..kept.len().saturating_sub(most));
}

/// Writes a file under a unique temporary name, because servers may start together, and renames it.
/// The file gets the permissions of any new file.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let as_any = Permissions::from_mode(0o666);
    let mut aside = tempfile::Builder::new().permissions(as_any).tempfile_in(folder)?;
    aside.write_all(text.as_bytes())?;
    aside.persist(path).map(drop).map_err(|failed| failed.error)
}

/// The text of a file; empty if there is none.
fn read(path: &Path) -> Result<String> {
    match std::fs::File::open(path) {
        Ok(file) => {
            let mut text = String::new();
            let read = std::io::Read::read_to_string(&mut std::io::Read::take(file, FILE_BYTES_MAX), &mut text);
            read.context(|| "reading the file")?;
            Ok(text)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error).context(|| "opening the file"),
    }
}

/// True if the text is empty, or was written by some version of this program, even in part.
fn is_ours(text: &str) -> bool {
    let first = format!("{{\n  \"{CALIBRATION_FIELD}\":");
    text.trim().is_empty() || first.starts_with(text) || text.starts_with(&first)
}

fn kept_in(text: &str) -> Result<Contents> {
    let wrong = |why: String| Error::Invalid(format!("it is not a file of rates: {why}"));
    if text.trim().is_empty() {
        return Ok(Contents::default());
    }
    let version: serde_json::Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
    match version.get(CALIBRATION_FIELD) {
        None => return Err(wrong(format!("it has no {CALIBRATION_FIELD:?}"))),
        Some(other) if *other != CALIBRATION => {
            return Err(Error::Invalid(format!(
                "the file is of calibration {other}, and this version measures with calibration {CALIBRATION}"
            )));
        }
        Some(_) => (),
    }
    let contents: Contents = serde_json::from_value(version).map_err(|error| wrong(error.to_string()))?;
    if let Some(kept) = contents.devices.iter().find(|kept| !kept.rates.are_sound()) {
        return Err(wrong(format!("a rate of {:?} is not a positive number", kept.model.name)));
    }
    if contents.gangs.iter().any(|kept| !kept.rates.are_sound(kept.devices.len())) {
        return Err(wrong("a rate between devices is missing, or not a positive number".into()));
    }
    Ok(contents)
}

/// Times in RFC 3339 format.
mod rfc3339 {
    use std::time::SystemTime;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_rfc3339_seconds(*time))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_rfc3339(&text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn kept(name: &str, copy_in: f64) -> SavedRates {
        let model = DeviceModel {
            kind: "host".into(),
            name: name.into(),
            parallelism: 2,
            cpu_threads: 2,
            memory_bytes: 1 << 30,
            link: vec![12e9, 24e9],
        };
        let measured = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        SavedRates { model, measured, rates: Rates { copy_in, ..Rates::host(2) } }
    }

    #[test]
    fn rates_of_several_devices_belong_to_all_their_models() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rates.json");
        let mut file = RatesFile::open(&path);
        let (model, measured) = (kept("a", 1.0).model, kept("a", 1.0).measured);
        let of = |host_memory| SavedLinkRates {
            devices: vec![model.clone(), model.clone()],
            measured,
            rates: LinkRates::new(DeviceKind::Host, host_memory, vec![vec![0.0, 2e9], vec![3e9, 0.0]]),
        };
        file.add_links(of(1e9));
        file.add_links(of(4e9));
        file.save().unwrap();
        let again = RatesFile::open(&path);
        assert_eq!(again.find_links(&[model.clone(), model.clone()]), Some(&of(4e9)));
        assert_eq!(again.find_links(&[model.clone(), kept("b", 1.0).model]), None);
        assert_eq!(again.find_links(std::slice::from_ref(&model)), None);
        // A rate that is missing, or none.
        for wrong in [vec![vec![0.0, 2e9]], vec![vec![0.0, 2e9], vec![0.0, 0.0]]] {
            let mut file = RatesFile::open(&path);
            file.add_links(SavedLinkRates { rates: LinkRates::new(DeviceKind::Host, 1e9, wrong), ..of(1e9) });
            file.save().unwrap();
            assert_eq!(RatesFile::open(&path).find_links(&[model.clone(), model.clone()]), None);
        }
    }

    #[test]
    fn saved_rates_are_found_by_all_parameters_that_they_depend_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new").join("rates.json");
        let mut file = RatesFile::open(&path);
        assert!(file.find(&kept("a", 1.0).model).is_none());
        file.add(kept("a", 1.0));
        file.add(kept("b", 2.0));
        file.add(kept("a", 3.5e9));
        file.save().unwrap();
        let file = RatesFile::open(&path);
        assert_eq!(file.find(&kept("a", 0.0).model), Some(&kept("a", 3.5e9)));
        assert_eq!(file.find(&kept("b", 0.0).model), Some(&kept("b", 2.0)));
        let model = kept("a", 0.0).model;
        for other in [
            DeviceModel { parallelism: 3, ..model.clone() },
            DeviceModel { cpu_threads: 3, ..model.clone() },
            DeviceModel { memory_bytes: 1, ..model.clone() },
            DeviceModel { link: vec![12e9], ..model.clone() },
            DeviceModel { kind: "cuda".into(), ..model },
        ] {
            assert!(file.find(&other).is_none(), "{other:?}");
        }
        let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "other files are left: {left:?}");
    }

    #[test]
    fn a_damaged_file_or_one_of_another_version_is_ignored_and_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rates.json");
        let mut file = RatesFile::open(&path);
        file.add(kept("a", 1e9));
        file.save().unwrap();
        let sound = std::fs::read_to_string(&path).unwrap();
        let half = &sound[..sound.len() / 2];
        let later = sound.replace(&format!("\"calibration\": {CALIBRATION}"), "\"calibration\": 999");
        let backwards = sound.replace("\"copy_in\": 1000000000.0", "\"copy_in\": -1000000000.0");
        assert!(later != sound && backwards != sound);
        for wrong in [half, "", "\n", &sound[..1], &sound[..9], &later, &backwards] {
            std::fs::write(&path, wrong).unwrap();
            let mut file = RatesFile::open(&path);
            assert!(file.find(&kept("a", 0.0).model).is_none(), "{wrong:?} was accepted");
            file.add(kept("a", 2e9));
            file.save().unwrap();
            assert_eq!(RatesFile::open(&path).find(&kept("a", 0.0).model), Some(&kept("a", 2e9)));
        }
    }

    #[test]
    fn a_file_of_another_user_is_neither_used_nor_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes.json");
        for theirs in [b"[]" as &[u8], b"{}", b"{\"calibration\": 2}", b"k,v\n1,2\n", b"\0", b"\xff\xfe"] {
            std::fs::write(&path, theirs).unwrap();
            let mut file = RatesFile::open(&path);
            file.add(kept("a", 2e9));
            let refused = file.save().unwrap_err();
            assert!(
                refused.message().contains("notes.json") && refused.message().contains("is not a file of rates"),
                "{refused}"
            );
            assert_eq!(std::fs::read(&path).unwrap(), theirs);
        }
    }

    #[test]
    fn the_file_stays_small_by_forgetting_the_oldest_rates() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = RatesFile::open(&folder.path().join("rates.json"));
        for device in 0..=DEVICES_MAX {
            file.add(kept(&device.to_string(), 1.0));
        }
        assert!(file.find(&kept("0", 1.0).model).is_none());
        assert!(file.find(&kept("1", 1.0).model).is_some());
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let in_the_way = folder.path().join("a file");
        std::fs::write(&in_the_way, "").unwrap();
        let refused = RatesFile::open(&in_the_way.join("rates.json")).save().unwrap_err();
        assert!(refused.message().contains("a file/rates.json"), "{refused}");
    }
}
