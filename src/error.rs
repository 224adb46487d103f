//! The crate's error type.
//!
//! Every failure that leaves a room of this crate is an [`Error`]. Its variant names the party that
//! can act on the failure, and so decides the gRPC status that a client sees. `service::status`
//! holds the one mapping. The message states the attempt, its object and the remedy.
//! [`Error::context`] adds the outer attempt in front.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The result type of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure, classified by the party that can act on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Error {
    /// The request is wrong, and a retry fails again. The caller corrects it.
    Invalid(String),
    /// Values are too long or too many for one batch of a result. The join tries fewer rows. A
    /// caller sees this error only if a single row is too large. It then uploads the column with
    /// wider types.
    TooLong(String),
    /// No table, job, upload or ticket has this name (any more). The caller names another.
    NotFound(String),
    /// The name is taken. The caller picks another, or says `replace`.
    AlreadyExists(String),
    /// The request is well-formed, but the object that it names is in the wrong state.
    Precondition(String),
    /// Credentials are missing or wrong. The caller logs in.
    Unauthenticated(String),
    /// The caller is known, but lacks a permission. An administrator grants it.
    Denied(String),
    /// Memory, a quota or a queue is full. The caller waits or asks for less, or the operator
    /// raises the named setting.
    Exhausted(String),
    /// The server or a device cannot serve now. The caller tries again later.
    Unavailable(String),
    /// The caller, or an administrator, stopped the work.
    Cancelled(String),
    /// The caller's deadline passed before the work was done.
    DeadlineExceeded(String),
    /// The protocol allows the request, but this server does not implement it. The message names an
    /// alternative.
    Unsupported(String),
    /// A defect in Dovetail. The operator reports it.
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

    /// Replaces the message and keeps the variant.
    #[must_use]
    pub fn with_message(mut self, message: String) -> Self {
        *self.message_mut() = message;
        self
    }

    /// Returns the message for the user, without the variant's name.
    pub fn message(&self) -> &str {
        match self {
            Self::Invalid(message)
            | Self::TooLong(message)
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
            | Self::TooLong(message)
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
    /// Calls [`Error::context`] on an error. The closure runs on failure only.
    fn context<D: fmt::Display>(self, attempt: impl FnOnce() -> D) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for Result<T, E> {
    fn context<D: fmt::Display>(self, attempt: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|error| error.into().context(attempt()))
    }
}

/// Maps most Arrow errors to [`Error::Invalid`], because their usual cause is a caller's bytes.
/// Memory errors become [`Error::Exhausted`]. Compute errors and overflows become
/// [`Error::Internal`].
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
        // Readers of other crates wrap the errors of this crate's own readers.
        error.downcast::<Self>().unwrap_or_else(|error| Self::Internal(crate::human::system_words(&error)))
    }
}
