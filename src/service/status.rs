//! The one mapping between our errors and gRPC statuses.

use tonic::{Code, Status};

use crate::Error;

/// The status that a client sees for an error: the code by who can act, the message as it is.
impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Invalid(_) => Code::InvalidArgument,
            Error::NotFound(_) => Code::NotFound,
            Error::AlreadyExists(_) => Code::AlreadyExists,
            Error::Precondition(_) => Code::FailedPrecondition,
            Error::Unauthenticated(_) => Code::Unauthenticated,
            Error::Denied(_) => Code::PermissionDenied,
            Error::Exhausted(_) => Code::ResourceExhausted,
            Error::Unavailable(_) => Code::Unavailable,
            Error::Cancelled(_) => Code::Cancelled,
            Error::DeadlineExceeded(_) => Code::DeadlineExceeded,
            Error::Unsupported(_) => Code::Unimplemented,
            Error::Internal(_) => Code::Internal,
        };
        Self::new(code, error.message())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_has_its_own_code_and_keeps_its_message() {
        let text = || "what was attempted".to_owned();
        let mapping = [
            (Error::Invalid(text()), Code::InvalidArgument),
            (Error::NotFound(text()), Code::NotFound),
            (Error::AlreadyExists(text()), Code::AlreadyExists),
            (Error::Precondition(text()), Code::FailedPrecondition),
            (Error::Unauthenticated(text()), Code::Unauthenticated),
            (Error::Denied(text()), Code::PermissionDenied),
            (Error::Exhausted(text()), Code::ResourceExhausted),
            (Error::Unavailable(text()), Code::Unavailable),
            (Error::Cancelled(text()), Code::Cancelled),
            (Error::DeadlineExceeded(text()), Code::DeadlineExceeded),
            (Error::Unsupported(text()), Code::Unimplemented),
            (Error::Internal(text()), Code::Internal),
        ];
        for (index, (error, code)) in mapping.iter().enumerate() {
            let status = Status::from(error.clone());
            assert_eq!((status.code(), status.message()), (*code, "what was attempted"));
            assert!(mapping[..index].iter().all(|(_, other)| other != code), "{code:?} is used twice");
        }
    }
}
