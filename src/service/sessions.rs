//! Sessions: options that a client sets once and that apply to its later calls.
//!
//! A session begins with the first SetSessionOptions. Clients send back its identifier in a cookie
//! (`arrow_flight_session_id`), as other Flight clients do. The server drops a session when the
//! client closes it, or when it was idle for long.
//!
//! The messages are written by hand from Arrow's `Flight.proto`: `arrow-flight` 59.3 does not have
//! them.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use http::HeaderMap;
use uuid::Uuid;

use super::auth::Caller;
use super::commands::Defaults;
use crate::{Error, Result};

/// Cookie that carries the identifier of a session.
pub const COOKIE: &str = "arrow_flight_session_id";

/// Maximum number of sessions; more are refused. A session is a few hundred bytes.
const SESSIONS_MAX: usize = 10_000;

/// Maximum number of sessions of one tenant, so that one tenant cannot keep the others from opening
/// any.
const TENANT_SESSIONS_MAX: usize = 1000;

/// Options that a session may set, with their meaning.
pub const OPTIONS: [(&str, &str); 4] = [
    ("strategy", "strategy of joins that name none"),
    ("priority", "priority of joins that give none, -100 to 100"),
    ("retain_seconds", "seconds that results are kept, for joins that do not set it"),
    ("nulls_equal", "true if nulls match nulls, for joins that do not set it"),
];

/// SetSessionOptionsRequest of Arrow Flight.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SetSessionOptionsRequest {
    /// Values by option name. A value without a kind removes the option.
    #[prost(map = "string, message", tag = "1")]
    pub session_options: HashMap<String, SessionOptionValue>,
}

/// Value of a session option.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SessionOptionValue {
    /// `None` removes the option.
    #[prost(oneof = "OptionValue", tags = "1, 2, 3, 4, 5")]
    pub option_value: Option<OptionValue>,
}

/// Kinds of value.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum OptionValue {
    #[prost(string, tag = "1")]
    StringValue(String),
    #[prost(bool, tag = "2")]
    BoolValue(bool),
    #[prost(sfixed64, tag = "3")]
    Int64Value(i64),
    #[prost(double, tag = "4")]
    DoubleValue(f64),
    #[prost(message, tag = "5")]
    StringListValue(StringListValue),
}

/// Several texts.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StringListValue {
    #[prost(string, repeated, tag = "1")]
    pub values: Vec<String>,
}

/// SetSessionOptionsResult: the errors by option. Empty on success.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SetSessionOptionsResult {
    #[prost(map = "string, message", tag = "1")]
    pub errors: HashMap<String, SetSessionOptionsError>,
}

/// Error of one option.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct SetSessionOptionsError {
    /// Kind of error, an [`OptionError`].
    #[prost(enumeration = "OptionError", tag = "1")]
    pub value: i32,
}

/// Kinds of error of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum OptionError {
    /// Not used.
    Unspecified = 0,
    InvalidName = 1,
    InvalidValue = 2,
    /// Option that cannot be set here.
    Error = 3,
}

/// GetSessionOptionsResult of Arrow Flight.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GetSessionOptionsResult {
    #[prost(map = "string, message", tag = "1")]
    pub session_options: HashMap<String, SessionOptionValue>,
}

/// CloseSessionResult of Arrow Flight.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct CloseSessionResult {
    /// Status of closing, a [`CloseStatus`].
    #[prost(enumeration = "CloseStatus", tag = "1")]
    pub status: i32,
}

/// Status of closing a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum CloseStatus {
    /// Not used.
    Unspecified = 0,
    Closed = 1,
    Closing = 2,
    NotCloseable = 3,
}

#[derive(Debug)]
struct Session {
    tenant: String,
    options: BTreeMap<String, OptionValue>,
    last_used: Instant,
}

/// Sessions of a server.
#[derive(Debug)]
pub struct Sessions {
    by_id: DashMap<Uuid, Session>,
    idle_max: Duration,
}

impl Sessions {
    /// Creates an empty set of sessions. Each session is dropped when idle for `idle_max`.
    pub fn new(idle_max: Duration) -> Self {
        Self { by_id: DashMap::new(), idle_max }
    }

    /// Returns the number of sessions.
    pub fn count(&self) -> usize {
        self.by_id.len()
    }

    /// Drops sessions that were idle for too long.
    pub fn sweep(&self) {
        self.by_id.retain(|_, session| session.last_used.elapsed() < self.idle_max);
    }

    /// Returns the session that a call's headers name, if it exists and is the caller's.
    pub fn find(&self, headers: &HeaderMap, caller: &Caller) -> Option<Uuid> {
        let id = cookie(headers)?;
        let mut session = self.by_id.get_mut(&id).filter(|session| session.tenant == caller.tenant)?;
        session.last_used = Instant::now();
        Some(id)
    }

    /// Opens a session.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when there are too many sessions.
    pub fn open(&self, caller: &Caller) -> Result<Uuid> {
        self.sweep();
        if self.by_id.len() >= SESSIONS_MAX {
            return Err(Error::Exhausted(format!(
                "there are {SESSIONS_MAX} sessions already; close one with CloseSession, or call without a session"
            )));
        }
        let own = self.by_id.iter().filter(|session| session.tenant == caller.tenant).count();
        if own >= TENANT_SESSIONS_MAX {
            return Err(Error::Exhausted(format!(
                "tenant {:?} has {TENANT_SESSIONS_MAX} sessions already; close one with CloseSession, or send the cookie of \
                 one that is open",
                caller.tenant
            )));
        }
        let id = Uuid::new_v4();
        let session = Session { tenant: caller.tenant.clone(), options: BTreeMap::new(), last_used: Instant::now() };
        self.by_id.insert(id, session);
        Ok(id)
    }

    /// Sets options. Returns an error for each option that cannot be set.
    pub fn set(&self, id: Uuid, request: SetSessionOptionsRequest) -> SetSessionOptionsResult {
        let mut errors = HashMap::new();
        for (name, value) in request.session_options {
            let error = match value.option_value {
                _ if !OPTIONS.iter().any(|(known, _)| *known == name) => OptionError::InvalidName,
                Some(value) if !is_valid(&name, &value) => OptionError::InvalidValue,
                value => {
                    if let Some(mut session) = self.by_id.get_mut(&id) {
                        match value {
                            Some(value) => session.options.insert(name, value),
                            None => session.options.remove(&name),
                        };
                    }
                    continue;
                }
            };
            errors.insert(name, SetSessionOptionsError { value: error.into() });
        }
        SetSessionOptionsResult { errors }
    }

    /// Returns the options of a session.
    pub fn get(&self, id: Uuid) -> GetSessionOptionsResult {
        let options = self.by_id.get(&id).map(|session| session.options.clone()).unwrap_or_default();
        let session_options =
            options.into_iter().map(|(name, value)| (name, SessionOptionValue { option_value: Some(value) })).collect();
        GetSessionOptionsResult { session_options }
    }

    /// Returns the defaults for joins of a session that omit an option.
    pub fn defaults(&self, id: Option<Uuid>) -> Defaults {
        let mut defaults = Defaults::default();
        let Some(session) = id.and_then(|id| self.by_id.get(&id)) else { return defaults };
        for (name, value) in &session.options {
            match (name.as_str(), value) {
                ("strategy", OptionValue::StringValue(strategy)) => defaults.strategy = Some(strategy.clone()),
                ("priority", OptionValue::Int64Value(priority)) => defaults.priority = i32::try_from(*priority).ok(),
                ("retain_seconds", OptionValue::Int64Value(seconds)) => {
                    defaults.retain_seconds = u32::try_from(*seconds).ok();
                }
                ("nulls_equal", OptionValue::BoolValue(nulls_equal)) => defaults.nulls_equal = Some(*nulls_equal),
                _ => (),
            }
        }
        defaults
    }

    /// Drops a session.
    pub fn close(&self, id: Uuid) {
        self.by_id.remove(&id);
    }
}

fn is_valid(name: &str, value: &OptionValue) -> bool {
    match (name, value) {
        ("strategy", OptionValue::StringValue(strategy)) => {
            strategy == "auto" || strategy.parse::<crate::planner::Strategy>().is_ok()
        }
        ("priority", OptionValue::Int64Value(priority)) => (-100..=100).contains(priority),
        ("retain_seconds", OptionValue::Int64Value(seconds)) => u32::try_from(*seconds).is_ok(),
        ("nulls_equal", OptionValue::BoolValue(_)) => true,
        _ => false,
    }
}

/// Returns the session identifier among a call's cookies.
fn cookie(headers: &HeaderMap) -> Option<Uuid> {
    let cookies = headers.get_all(http::header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = cookies.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let (_, id) = pairs.find(|(name, _)| *name == COOKIE)?;
    Uuid::parse_str(id.trim_matches('"')).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_tenant_cannot_take_all_sessions() {
        let sessions = Sessions::new(Duration::from_secs(60));
        let (ada, eve) = (Caller::of_tenant("ada"), Caller::of_tenant("eve"));
        let opened: Vec<Uuid> = (0..TENANT_SESSIONS_MAX).map(|_| sessions.open(&eve).unwrap()).collect();
        let refused = sessions.open(&eve).unwrap_err();
        assert!(matches!(&refused, Error::Exhausted(text) if text.contains("\"eve\"")), "{refused:?}");
        sessions.open(&ada).unwrap();
        sessions.close(opened[0]);
        sessions.open(&eve).unwrap();
    }
}
