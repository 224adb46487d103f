//! The only mapping between Dovetail's errors and gRPC statuses.

use std::borrow::Cow;

use tonic::{Code, Status};

use crate::Error;

/// Maximum size of a message in the trailers, in bytes. gRPC clients refuse trailers of 8 KiB or
/// more, and then the caller sees no message. Only some characters are sent as they are. Each byte
/// of the others is sent as three bytes.
const SENT_BYTES_MAX: usize = 4 << 10;

/// Bytes at the end of a long message, as sent, that are not cut out: they have the remedy.
const SENT_BYTES_END: usize = 1 << 10;

/// Converts an error to the status that a client sees. The code says who can act; the message is
/// unchanged, unless it is very long.
impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Invalid(_) | Error::TooLong(_) => Code::InvalidArgument,
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
        Self::new(code, cut(error.message()))
    }
}

/// Converts the status with which a request broke off, or with which a layer in front refused it.
/// `what` names the request, such as "the handshake".
pub(super) fn of_request(status: &Status, what: &str) -> Error {
    let message = status.message();
    match status.code() {
        Code::ResourceExhausted => Error::Exhausted(message.into()),
        Code::Unimplemented => Error::Unsupported(message.into()),
        Code::DeadlineExceeded => Error::DeadlineExceeded(message.into()),
        Code::InvalidArgument | Code::Internal => Error::Invalid(format!("{what} cannot be read: {message}")),
        _ => Error::Cancelled(format!("{what} broke off: {message}")),
    }
}

/// Cuts out the middle of a message that is too long to be sent.
fn cut(message: &str) -> Cow<'_, str> {
    let sent_bytes = |character: char| match character {
        'a'..='z' | 'A'..='Z' | '0'..='9' => 1,
        _ => 3 * character.len_utf8(),
    };
    if message.chars().map(sent_bytes).sum::<usize>() <= SENT_BYTES_MAX {
        return message.into();
    }
    let within = |limit: usize| {
        let mut bytes = 0;
        move |character: &char| {
            bytes += sent_bytes(*character);
            bytes <= limit
        }
    };
    let start: String = message.chars().take_while(within(SENT_BYTES_MAX - SENT_BYTES_END - 20)).collect();
    let end: Vec<char> = message.chars().rev().take_while(within(SENT_BYTES_END)).collect();
    format!("{start} [...] {}", end.iter().rev().collect::<String>()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_has_its_own_code_and_keeps_its_message() {
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
        // The caller can act on both errors in the same way, so they share a code.
        assert_eq!(Status::from(Error::TooLong(text())).code(), Code::InvalidArgument);
    }

    #[test]
    fn a_request_that_a_layer_refused_keeps_the_refusal() {
        let refusals = [
            Error::Exhausted("send less".into()),
            Error::Unsupported("send no such thing".into()),
            Error::DeadlineExceeded("it came too late".into()),
        ];
        for refusal in refusals {
            assert_eq!(of_request(&refusal.clone().into(), "the handshake"), refusal);
        }
        let torn = of_request(&Error::Invalid("it ended early".into()).into(), "the handshake");
        assert_eq!(torn, Error::Invalid("the handshake cannot be read: it ended early".into()));
        let reset = of_request(&Status::unavailable("reset"), "the handshake");
        assert_eq!(reset, Error::Cancelled("the handshake broke off: reset".into()));
    }

    #[test]
    fn long_messages_keep_their_beginning_and_their_end_and_fit_into_trailers() {
        for filler in ["x", " ", "ü", "漢"] {
            let message = format!("reading: {}; write less", filler.repeat(100_000));
            let status = Status::from(Error::Invalid(message));
            assert!(status.message().starts_with("reading: ") && status.message().ends_with("; write less"));
            let mut headers = http::HeaderMap::new();
            status.add_header(&mut headers).unwrap();
            let sent = headers.get("grpc-message").unwrap().len();
            assert!((1000..=SENT_BYTES_MAX).contains(&sent), "{sent} bytes of {filler:?}");
        }
    }
}
