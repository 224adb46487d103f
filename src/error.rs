//! What can go wrong, named by who can act on it.
//!
//! Every failure that leaves a room of this crate is an [`Error`]. A variant says who can do something about it, and
//! therefore which gRPC status a client sees (`service::status` holds the one mapping). The message says what was
//! attempted, on what, and what would be right; [`Error::context`] adds the outer attempt in front.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure, by who can act on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Error {
    /// The request is wrong as it stands; sending it again changes nothing. The caller corrects it.
    Invalid(String),
    /// A table, job, upload or ticket of that name does not exist (any more). The caller names another.
    NotFound(String),
    /// The name is taken. The caller picks another, or says `replace`.
    AlreadyExists(String),
    /// The request is well-formed, but the thing it names is in the wrong state for it.
    Precondition(String),
    /// Nobody presented credentials, or they are wrong. The caller logs in.
    Unauthenticated(String),
    /// The caller is known and may not do this. An administrator grants it.
    Denied(String),
    /// Memory, a quota or a queue is full. The caller waits or asks for less; the operator raises the named setting.
    Exhausted(String),
    /// The server or a device cannot serve now. The caller tries again later.
    Unavailable(String),
    /// The caller, or an administrator, stopped the work.
    Cancelled(String),
    /// The caller's deadline passed before the work was done.
    DeadlineExceeded(String),
    /// The protocol allows it and this server does not do it; the message says what to use instead.
    Unsupported(String),
    /// A defect of ours. The operator reports it.
    Internal(String),
}

impl Error {
    /// Puts the outer attempt in front of the message: `uploading "orders": column "k": ...`.
    #[must_use]
    pub fn context(mut self, attempt: impl fmt::Display) -> Self {
        let message = self.message_mut();
        *message = format!("{attempt}: {message}");
        self
    }

    /// The same failure in other words.
    #[must_use]
    pub fn with_message(mut self, message: String) -> Self {
        *self.message_mut() = message;
        self
    }

    /// The sentence for the person who reads it, without the variant's name.
    pub fn message(&self) -> &str {
        match self {
            Self::Invalid(message)
            | Self::NotFound(message)
            | Self::AlreadyExists(message)
            | Self::Precondition(message)
            | Self::Unauthenticated(message)
            | Self::Denied(message)
            | Self::Exhausted(message)
            | Self::Unavailable(message)
            | Self::Cancelled(message)
            | Self::DeadlineExceeded(message)
            | Self::Unsupported(message)
            | Self::Internal(message) => message,
        }
    }

    fn message_mut(&mut self) -> &mut String {
        match self {
            Self::Invalid(message)
            | Self::NotFound(message)
            | Self::AlreadyExists(message)
            | Self::Precondition(message)
            | Self::Unauthenticated(message)
            | Self::Denied(message)
            | Self::Exhausted(message)
            | Self::Unavailable(message)
            | Self::Cancelled(message)
            | Self::DeadlineExceeded(message)
            | Self::Unsupported(message)
            | Self::Internal(message) => message,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message())
    }
}

impl std::error::Error for Error {}

/// Adds what was being attempted to a result's error.
pub trait Context<T> {
    /// As [`Error::context`]; the closure runs on failure only.
    fn context<D: fmt::Display>(self, attempt: impl FnOnce() -> D) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for Result<T, E> {
    fn context<D: fmt::Display>(self, attempt: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|error| error.into().context(attempt()))
    }
}

/// Arrow refuses what it is given (a caller's bytes) far more often than it fails itself, and says which.
impl From<arrow::error::ArrowError> for Error {
    fn from(error: arrow::error::ArrowError) -> Self {
        use arrow::error::ArrowError as A;
        match error {
            A::MemoryError(_) => Self::Exhausted(error.to_string()),
            A::ComputeError(_) | A::ArithmeticOverflow(_) | A::OffsetOverflowError(_) => {
                Self::Internal(error.to_string())
            }
            other => Self::Invalid(other.to_string()),
        }
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        // What this crate's own readers say comes through readers of others.
        error.downcast::<Self>().unwrap_or_else(|error| Self::Internal(crate::human::system_words(&error)))
    }
}
