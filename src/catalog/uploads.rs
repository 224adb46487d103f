//! Uploads under way: their limits, and uploads that several streams fill together.
//!
//! ```text
//!   open(ID) ─► UploadStream ─ append, append … ─ finish ─► part ┐
//!   open(ID) ─► UploadStream ─ append, append … ─ finish ─► part ┼─ commit(ID) ─► Table
//!   open(ID) ─► UploadStream ─ append ─ (broken off) ─► nothing  ┘
//! ```
//!
//! If a stream breaks off, its rows are discarded and the upload stays open, so that the client can
//! send that stream again. The client cannot forget to do so if it numbers its streams: the commit
//! is refused until the stream of every begun number has ended well.

mod stream;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use arrow::datatypes::SchemaRef;
use parking_lot::Mutex;

use stream::Kind;
pub use stream::UploadStream;

use super::upload::{DoneRows, Rows, Target};
use super::{Catalog, Editor, Table, UploadOptions};
use crate::memory::Interrupt;
use crate::{Context, Error, Result, human};

/// Maximum number of ended uploads whose IDs are remembered. They serve to answer a repeated commit
/// and to refuse a repeated ID.
const ENDED_MAX: usize = 1024;

/// Limits on the number of uploads and on their idle time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UploadsLimits {
    /// Uploads under way at once: single streams, and IDs that several streams fill.
    pub under_way: usize,
    /// Same, for the uploads of one tenant; `None` for no limit.
    pub of_tenant: Option<usize>,
    /// Idle time after which an upload with an ID is forgotten.
    pub idle: Duration,
}

/// All uploads under way. Clones share them.
#[derive(Clone, Debug)]
pub struct Uploads {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    catalog: Catalog,
    limits: UploadsLimits,
    state: Mutex<State>,
}

/// Owner and upload ID.
type Key = (String, String);

#[derive(Debug, Default)]
struct State {
    /// Number of uploads that have one stream and no ID, by owner.
    single: HashMap<String, usize>,
    shared: HashMap<Key, Shared>,
    ended: VecDeque<(Key, Ended)>,
}

/// An upload that several streams fill.
#[derive(Debug)]
struct Shared {
    /// `None` while the upload is being committed.
    target: Option<Target>,
    /// Name, schema and options of the first stream, compared with those of the other streams.
    name: String,
    schema: SchemaRef,
    options: UploadOptions,
    parts: BTreeMap<Place, DoneRows>,
    /// Open streams, each with the bytes of its rows so far.
    streams_open: BTreeMap<Place, u64>,
    /// Numbered parts whose stream broke off.
    broken: BTreeSet<u64>,
    streams: u64,
    /// Time when rows arrived last, or a commit failed. Streams without rows do not keep an upload.
    last_activity: Instant,
}

/// Position of a part. Numbered parts come first by number, then the others in the order of
/// opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Numbered(u64),
    Opened(u64),
}

/// A position before all other parts.
const FIRST: Place = Place::Numbered(0);

/// Reason for which an upload with an ID ended.
#[derive(Debug)]
enum Ended {
    Committed(Weak<Table>),
    Aborted,
    Refused(String),
    Forgotten(Duration),
}

/// Outcome of a stream that ended well.
#[derive(Debug)]
pub enum Finished {
    /// The stream was a whole upload: this table has appeared.
    Table(Arc<Table>),
    /// The stream was one of several: its rows wait for the commit.
    Part { rows: u64 },
}

impl Uploads {
    /// Makes an empty registry of uploads.
    pub fn new(catalog: Catalog, limits: UploadsLimits) -> Self {
        Self { inner: Arc::new(Inner { catalog, limits, state: Mutex::default() }) }
    }

    /// Starts a stream: a whole upload, or a part of the upload that `options` names. Checks
    /// everything that can be checked before rows arrive.
    ///
    /// # Errors
    /// See [`Upload::begin`](super::Upload::begin); [`Error::Exhausted`] when the limit of uploads
    /// under way is reached; [`Error::Invalid`] when the streams of one upload differ in table,
    /// schema or options; [`Error::AlreadyExists`] when the ID or the part is taken.
    pub fn open(
        &self,
        editor: impl Into<Editor>,
        name: &str,
        schema: SchemaRef,
        options: UploadOptions,
    ) -> Result<UploadStream> {
        match options.upload.clone() {
            None => self.open_single(editor.into(), name, schema, &options),
            Some(id) => self.open_shared(editor.into(), id, name, schema, options),
        }
    }

    /// Makes the table of an upload with an ID appear, in whole: the rows of all streams that ended
    /// well. A repeated commit returns the same table.
    ///
    /// # Errors
    /// [`Error::NotFound`] for the ID; [`Error::Precondition`] while a stream is open, or when a
    /// numbered part broke off and was not sent again; the interrupt's, before the table appears;
    /// else see [`Upload::commit`](super::Upload::commit). After [`Error::Invalid`] the upload is
    /// forgotten. After any other error it can be committed again.
    pub fn commit(&self, owner: &str, id: &str, interrupt: &Interrupt) -> Result<Arc<Table>> {
        let key = (owner.into(), id.into());
        let (mut target, mut parts) = {
            let mut state = self.inner.state.lock();
            if !state.shared.contains_key(&key) {
                return state.committed(&key);
            }
            state.take_complete(&key)?
        };
        // The registry is not locked while the rows are checked. `target: None` keeps other calls
        // out of the upload during that time.
        let mut rows = Rows::new(&target).done();
        let together = put_together(&mut rows, &mut parts, interrupt);
        let committed = together
            .and_then(|()| target.commit(&rows, interrupt))
            .context(|| format!("uploading table {:?}", target.name));
        let mut state = self.inner.state.lock();
        let _dropped = match &committed {
            Ok(table) => state.end(key, Ended::Committed(Arc::downgrade(table))),
            Err(error @ Error::Invalid(_)) => state.end(key, Ended::Refused(error.message().into())),
            Err(_) => {
                if let Some(shared) = state.shared.get_mut(&key) {
                    shared.target = Some(target);
                    if rows.rows > 0 {
                        parts.insert(FIRST, rows);
                    }
                    shared.parts = parts;
                    shared.last_activity = Instant::now();
                }
                None
            }
        };
        drop(state);
        committed
    }

    /// Discards an upload with an ID and all its rows, which takes long if they are many. Streams
    /// that are still open fail with their next rows.
    ///
    /// # Errors
    /// [`Error::NotFound`] for the ID; [`Error::Precondition`] while it is being committed.
    pub fn abort(&self, owner: &str, id: &str) -> Result<()> {
        let key = (owner.into(), id.into());
        let mut state = self.inner.state.lock();
        let aborted = match state.shared.get(&key) {
            None => return Err(state.no_upload(&key)),
            Some(shared) if shared.target.is_none() => return Err(being_committed(id)),
            Some(_) => state.end(key, Ended::Aborted),
        };
        drop(state);
        drop(aborted);
        Ok(())
    }

    /// Discards uploads with an ID that were idle for too long, and returns their owners and IDs.
    /// The caller should call it every few seconds. It takes long if they have many rows.
    pub fn forget_idle(&self, now: Instant) -> Vec<(String, String)> {
        let mut state = self.inner.state.lock();
        let limit = self.inner.limits.idle;
        let idle =
            |shared: &Shared| shared.target.is_some() && now.saturating_duration_since(shared.last_activity) > limit;
        let keys: Vec<Key> =
            state.shared.iter().filter(|(_, shared)| idle(shared)).map(|(key, _)| key.clone()).collect();
        let idle: Vec<Shared> = keys.iter().filter_map(|key| state.end(key.clone(), Ended::Forgotten(limit))).collect();
        drop(state);
        drop(idle);
        keys
    }

    /// True if that upload has begun and has not ended.
    pub fn is_under_way(&self, owner: &str, id: &str) -> bool {
        self.inner.state.lock().shared.contains_key(&(owner.into(), id.into()))
    }

    /// Number of uploads under way.
    pub fn under_way(&self) -> usize {
        self.inner.state.lock().under_way()
    }

    fn open_single(
        &self,
        editor: Editor,
        name: &str,
        schema: SchemaRef,
        options: &UploadOptions,
    ) -> Result<UploadStream> {
        if options.part.is_some() {
            return Err(Error::Invalid("\"part\" needs \"upload\", the ID that the parts share".into()));
        }
        let owner = editor.tenant.clone();
        {
            let mut state = self.inner.state.lock();
            self.check_limits(&state, &owner)?;
            *state.single.entry(owner.clone()).or_default() += 1;
        }
        // The registry is not locked while thousands of columns are checked.
        let target = Target::new(&self.inner.catalog, editor, name, schema, options);
        let target = target.inspect_err(|_| self.inner.state.lock().end_single(&owner))?;
        let rows = Some(Rows::new(&target));
        Ok(UploadStream { uploads: self.clone(), rows, kind: Kind::Single(Box::new(target)) })
    }

    fn open_shared(
        &self,
        editor: Editor,
        id: String,
        name: &str,
        schema: SchemaRef,
        options: UploadOptions,
    ) -> Result<UploadStream> {
        let key = (editor.tenant.clone(), id);
        let id = &key.1;
        super::names::check_name(id).map_err(|error| error.context("an upload ID follows the rules of table names"))?;
        let mut state = self.inner.state.lock();
        if let Some((_, ended)) = state.ended.iter().find(|(ended, _)| *ended == key) {
            return Err(Error::AlreadyExists(format!("upload {id:?} {}; start another under a new ID", ended.told())));
        }
        if !state.shared.contains_key(&key) {
            self.check_limits(&state, &key.0)?;
            let target = Target::new(&self.inner.catalog, editor, name, schema.clone(), &options)?;
            let shared = Shared::new(target, options.clone());
            state.shared.insert(key.clone(), shared);
        }
        let shared = state.shared.get_mut(&key).expect("it was found, or has just been inserted");
        let (rows, place) = shared.open(id, name, &schema, &options)?;
        drop(state);
        Ok(UploadStream { uploads: self.clone(), rows: Some(rows), kind: Kind::Shared(key, place) })
    }

    fn check_limits(&self, state: &State, owner: &str) -> Result<()> {
        let UploadsLimits { under_way, of_tenant, .. } = self.inner.limits;
        if of_tenant.is_some_and(|limit| state.under_way_of(owner) >= limit) {
            return Err(Error::Exhausted(format!(
                "tenant {owner:?} has {} under way, and may have no more; wait for one to end, or raise the server's \
                 --tenant-uploads",
                human::counted(state.under_way_of(owner) as u64, "upload")
            )));
        }
        if state.under_way() < under_way {
            return Ok(());
        }
        Err(Error::Exhausted(format!(
            "{} under way, which is the limit; wait for one to end, or raise the server's --upload-limit",
            human::counted_as(under_way as u64, "upload is", "uploads are")
        )))
    }
}

impl Shared {
    fn new(target: Target, options: UploadOptions) -> Self {
        Self {
            name: target.name.clone(),
            schema: target.schema.clone(),
            target: Some(target),
            options: UploadOptions { part: None, ..options },
            parts: BTreeMap::new(),
            streams_open: BTreeMap::new(),
            broken: BTreeSet::new(),
            streams: 0,
            last_activity: Instant::now(),
        }
    }

    fn open(&mut self, id: &str, name: &str, schema: &SchemaRef, options: &UploadOptions) -> Result<(Rows, Place)> {
        let Some(target) = &self.target else { return Err(being_committed(id)) };
        let differs = |what: &str| {
            Err(Error::Invalid(format!(
                "this stream and the first stream of upload {id:?} differ in {what}; all streams must fill table {:?}, with the \
                 same schema and options",
                self.name
            )))
        };
        if name != self.name {
            return differs("the table's name");
        }
        if schema != &self.schema {
            return differs("the schema");
        }
        if (UploadOptions { part: None, ..options.clone() }) != self.options {
            return differs("the options");
        }
        let place = options.part.map_or(Place::Opened(self.streams), Place::Numbered);
        if self.parts.contains_key(&place) || self.streams_open.contains_key(&place) {
            return Err(Error::AlreadyExists(format!(
                "upload {id:?} has that part already, or another stream is sending it; give each stream its own part number"
            )));
        }
        self.streams += 1;
        self.streams_open.insert(place, 0);
        Ok((Rows::new(target), place))
    }

    /// Returns the bytes of the rows of all streams, except those that broke off.
    fn bytes(&self) -> u64 {
        self.parts.values().map(|rows| rows.bytes).chain(self.streams_open.values().copied()).sum()
    }

    fn take_part(&mut self, place: Place, rows: DoneRows) {
        self.streams_open.remove(&place);
        if let Place::Numbered(part) = place {
            self.broken.remove(&part);
        }
        self.parts.insert(place, rows);
    }

    fn lose_part(&mut self, place: Place) {
        self.streams_open.remove(&place);
        if let Place::Numbered(part) = place {
            self.broken.insert(part);
        }
    }
}

impl State {
    fn under_way(&self) -> usize {
        self.single.values().sum::<usize>() + self.shared.len()
    }

    fn under_way_of(&self, owner: &str) -> usize {
        let shared = self.shared.keys().filter(|(other, _)| other == owner).count();
        self.single.get(owner).copied().unwrap_or(0) + shared
    }

    fn end_single(&mut self, owner: &str) {
        if let Some(count) = self.single.get_mut(owner) {
            *count -= 1;
            if *count == 0 {
                self.single.remove(owner);
            }
        }
    }

    /// Takes all parts. Fails if a stream is open or a part is missing.
    fn take_complete(&mut self, key: &Key) -> Result<(Target, BTreeMap<Place, DoneRows>)> {
        let id = &key.1;
        let shared = self.shared.get_mut(key).expect("the caller looked");
        let open = shared.streams_open.len();
        if open > 0 {
            return Err(Error::Precondition(format!(
                "upload {id:?} cannot be committed while {open} of its streams are open; end them first"
            )));
        }
        if let Some(part) = shared.broken.first() {
            return Err(Error::Precondition(format!(
                "upload {id:?} cannot be committed: the stream of part {part} broke off; send it again, or abort the upload"
            )));
        }
        let Some(target) = shared.target.take() else { return Err(being_committed(id)) };
        Ok((target, std::mem::take(&mut shared.parts)))
    }

    /// Ends an upload. Returns its rows, which the caller drops without the lock.
    #[must_use]
    fn end(&mut self, key: Key, how: Ended) -> Option<Shared> {
        let ended = self.shared.remove(&key);
        if self.ended.len() == ENDED_MAX {
            self.ended.pop_front();
        }
        self.ended.push_back((key, how));
        ended
    }

    /// Returns the table of an upload that was committed before.
    fn committed(&self, key: &Key) -> Result<Arc<Table>> {
        let ended = self.ended.iter().find(|(ended, _)| ended == key).map(|(_, how)| how);
        match ended {
            Some(Ended::Committed(table)) => table.upgrade().ok_or_else(|| self.no_upload(key)),
            _ => Err(self.no_upload(key)),
        }
    }

    fn no_upload(&self, key: &Key) -> Error {
        let ended = self.ended.iter().find(|(ended, _)| ended == key);
        Error::NotFound(match ended {
            Some((_, how)) => format!("upload {:?} {}", key.1, how.told()),
            None => format!("there is no upload {:?}; the first stream with this ID starts it", key.1),
        })
    }
}

impl Ended {
    fn told(&self) -> String {
        match self {
            Self::Committed(_) => "was committed".into(),
            Self::Aborted => "was aborted".into(),
            Self::Refused(why) => format!("was refused: {why}"),
            Self::Forgotten(idle) => format!(
                "was dropped with its rows, because no rows arrived for it within {} s (the server's --upload-idle-seconds)",
                idle.as_secs()
            ),
        }
    }
}

/// Concatenates parts in order. An interrupt leaves the remaining parts in `parts`.
fn put_together(rows: &mut DoneRows, parts: &mut BTreeMap<Place, DoneRows>, interrupt: &Interrupt) -> Result<()> {
    while !parts.is_empty() {
        interrupt.check()?;
        if let Some((_, part)) = parts.pop_first() {
            rows.extend(part);
        }
    }
    Ok(())
}

fn being_committed(id: &str) -> Error {
    Error::Precondition(format!("upload {id:?} is being committed"))
}
