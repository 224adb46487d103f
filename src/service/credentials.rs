//! Credentials: the token file and the files of TLS, which are read again while the server runs.
//!
//! ```text
//!   SIGHUP ─────────────┐
//!                       ├─► read all files ─► sound? ─ yes ─► replace all, log each change
//!   a file's change ────┘                       └ no ─► keep all, log why
//! ```
//!
//! Each call is checked against the newest credentials when it begins. Calls in progress keep
//! theirs until they end. Files are watched by their times and sizes, which works on every file
//! system, and for secrets that are links to links, as Kubernetes mounts them.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, RwLock};

use super::auth::Authenticator;
use super::settings::Settings;
use super::tls::Tls;
use crate::scheduler::Scheduler;
use crate::{Error, Result, human};

/// Time between looks at the files. A change is read after the second look that sees it, because a
/// certificate and its key are written one after the other.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Maximum number of changes that a reload logs one by one.
const CHANGES_LOGGED: usize = 50;

/// Credentials of a server, as its files had them when they were last sound.
#[derive(Debug)]
pub struct Credentials {
    settings: Settings,
    current: RwLock<Current>,
    files: Mutex<Files>,
    last_reload: Mutex<Option<Reload>>,
}

/// Credentials that belong together.
#[derive(Clone, Debug)]
struct Current {
    authenticator: Arc<Authenticator>,
    tls: Option<Arc<Tls>>,
}

/// Reload, as operators see it.
#[derive(Clone, Debug)]
pub struct Reload {
    pub at: SystemTime,
    /// True if the files could not be used, so that the previous credentials stayed.
    pub has_failed: bool,
}

/// Signs by which a change of a file is seen, for each file. `None` stands for a file that is
/// missing, and for a pipe.
type Signs = Vec<Option<Sign>>;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Sign {
    modified: Option<SystemTime>,
    size_bytes: u64,
    device: u64,
    inode: u64,
}

#[derive(Debug)]
struct Files {
    /// Signs from before the files were last read.
    read: Signs,
    /// Different signs that the last look saw.
    changed: Option<Signs>,
}

impl Credentials {
    /// Reads the files of the settings.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file that cannot be used, and why.
    pub(super) fn load(settings: &Settings) -> Result<Self> {
        let files = Mutex::new(Files { read: signs(settings), changed: None });
        let current = RwLock::new(Current::load(settings, None)?);
        Ok(Self { settings: settings.clone(), current, files, last_reload: Mutex::default() })
    }

    /// Returns the callers that are admitted now.
    pub(super) fn authenticator(&self) -> Arc<Authenticator> {
        self.current.read().authenticator.clone()
    }

    /// Returns what TLS uses now; `None` for a server without TLS.
    pub(super) fn tls(&self) -> Option<Arc<Tls>> {
        self.current.read().tls.clone()
    }

    /// Returns warnings about the files: faults that do not keep the server from starting.
    pub(super) fn remarks(&self) -> Vec<String> {
        let tls = self.tls();
        let of_tls = tls.iter().flat_map(|tls| tls.remarks.iter().cloned());
        let token_file = self.settings.token_file.as_deref();
        of_tls.chain(token_file.and_then(|path| human::readable_by_others("--token-file", path))).collect()
    }

    /// Returns the last reload, if there was one.
    pub(super) fn last_reload(&self) -> Option<Reload> {
        self.last_reload.lock().clone()
    }

    /// True if there are files that a reload reads.
    pub(super) fn has_files(&self) -> bool {
        paths(&self.settings).next().is_some()
    }

    /// Reads the files again because of `cause`. Replaces all credentials, or none. Returns the
    /// changes, which it logs.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file that cannot be used, and why.
    pub(super) fn reload(&self, cause: &str, scheduler: &Scheduler) -> Result<Vec<String>> {
        // Held until the end, so that of two reloads the later one reads the newer files.
        let mut files = self.files.lock();
        *files = Files { read: signs(&self.settings), changed: None };
        let loaded = can_be_read_again(&self.settings);
        let loaded = loaded.and_then(|()| Current::load(&self.settings, self.tls().as_deref()));
        *self.last_reload.lock() = Some(Reload { at: SystemTime::now(), has_failed: loaded.is_err() });
        let newer = loaded.inspect_err(|error| {
            tracing::error!("{cause}: the previous tokens and certificates stay in use, because of an error: {error}");
        })?;
        let before = self.replace(newer.clone());
        let mut changes = before.authenticator.changes(&newer.authenticator);
        if let (Some(before), Some(newer)) = (&before.tls, &newer.tls) {
            changes.extend(before.changes(newer));
            if before.has_other_authorities(newer) {
                before.superseded.cancel();
            }
        }
        set_weights(scheduler, &before.authenticator, &newer.authenticator)?;
        log_changes(cause, &changes);
        self.remarks().iter().for_each(|remark| tracing::warn!("{remark}"));
        Ok(changes)
    }

    /// Replaces the credentials. Returns those from before.
    fn replace(&self, newer: Current) -> Current {
        std::mem::replace(&mut *self.current.write(), newer)
    }

    /// Reloads files that have changed since they were read, and not since the previous look.
    pub(super) fn look(&self, scheduler: &Scheduler) {
        let now = signs(&self.settings);
        let mut files = self.files.lock();
        let has_settled = files.changed.as_ref() == Some(&now);
        files.changed = (now != files.read).then_some(now);
        let is_due = has_settled && files.changed.is_some();
        drop(files);
        if is_due {
            // The error is logged.
            let _ = self.reload("files have changed", scheduler);
        }
    }
}

impl Current {
    fn load(settings: &Settings, previous: Option<&Tls>) -> Result<Self> {
        let authenticator = match &settings.token_file {
            Some(path) => Authenticator::from_file(path)?,
            None => Authenticator::open(),
        };
        let authenticator = authenticator.with_certificates(settings.tls_client_ca.is_some())?;
        let tls = Tls::load(settings)?.map(|tls| Arc::new(tls.after(previous)));
        Ok(Self { authenticator: Arc::new(authenticator), tls })
    }
}

/// Sets the weights of all tenants. A tenant that is listed no more has the weight of unlisted
/// tenants.
fn set_weights(scheduler: &Scheduler, before: &Authenticator, newer: &Authenticator) -> Result<()> {
    let listed: HashSet<&str> = newer.tenants().map(|caller| caller.tenant.as_str()).collect();
    let removed = before.tenants().map(|caller| caller.tenant.as_str()).filter(|tenant| !listed.contains(tenant));
    removed.into_iter().try_for_each(|tenant| scheduler.set_weight(tenant, 1.0))?;
    newer.tenants().try_for_each(|caller| scheduler.set_weight(&caller.tenant, caller.weight))
}

fn log_changes(cause: &str, changes: &[String]) {
    if changes.is_empty() {
        tracing::info!("{cause}: tokens and certificates are read again, and are as before");
    }
    for change in changes.iter().take(CHANGES_LOGGED) {
        tracing::info!("{cause}: {change}");
    }
    if let Some(more) = changes.len().checked_sub(CHANGES_LOGGED).filter(|more| *more > 0) {
        tracing::info!("{cause}: {}", human::counted_as(more as u64, "more change", "more changes"));
    }
}

fn paths(settings: &Settings) -> impl Iterator<Item = &Path> {
    let files = [&settings.token_file, &settings.tls_cert, &settings.tls_key, &settings.tls_client_ca];
    files.into_iter().flatten().map(|path| path.as_path())
}

/// Refuses pipes, because a read would wait for their next writer.
fn can_be_read_again(settings: &Settings) -> Result<()> {
    match paths(settings).find(|path| path.exists() && !path.is_file()) {
        Some(path) => Err(Error::Invalid(format!(
            "{} is not an ordinary file, so it is read only when the server starts",
            path.display()
        ))),
        None => Ok(()),
    }
}

fn signs(settings: &Settings) -> Signs {
    use std::os::unix::fs::MetadataExt;
    let sign = |path: &Path| {
        let file = path.metadata().ok().filter(std::fs::Metadata::is_file)?;
        Some(Sign { modified: file.modified().ok(), size_bytes: file.size(), device: file.dev(), inode: file.ino() })
    };
    paths(settings).map(sign).collect()
}
