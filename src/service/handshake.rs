//! Handshake: for clients that know only user names and passwords.
//!
//! The user name does not matter, and the password is the token. The answer is the token, in the
//! forms that clients look for. They send it with each further call.
//!
//! | client | sends | takes the token from | sends it as |
//! |---|---|---|---|
//! | `authenticate_basic_token` | `authorization: Basic` | a header or trailer | `authorization` |
//! | `authenticate` | `BasicAuth` in a message | the first message | `auth-token-bin` |
//!
//! The first is of pyarrow, of Java and of Flight SQL drivers, the second of pyarrow and Java.

use std::time::Duration;

use arrow_flight::{BasicAuth, HandshakeRequest, HandshakeResponse};
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use prost::Message;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::{Code, Request, Response, Status, Streaming};

use super::auth::{Authenticator, Caller, presented_token};
use super::status::of_request;
use crate::{Error, Result};

/// Longest wait for the message of a handshake. No caller is known until then.
const MESSAGE_WAIT: Duration = Duration::from_secs(30);

/// Token for clients of a server without tokens, which need one that is not empty.
const ANY_TOKEN: &[u8] = b"anonymous";

/// Answers a handshake. The call has a [`Caller`] if its headers or its certificate identify one.
///
/// # Errors
/// [`Error::Unauthenticated`] without a caller and without a known token in the first message.
pub async fn answer(
    authenticator: &Authenticator,
    request: Request<Streaming<HandshakeRequest>>,
) -> Result<Response<BoxStream<'static, Result<HandshakeResponse, Status>>>> {
    let is_known = request.extensions().get::<Caller>().is_some();
    // A server without tokens ignores headers that cannot be read.
    let in_header = presented_token(request.metadata().as_ref()).ok().flatten();
    // A client that writes after the answer has ended its call may wait for ever.
    let in_message = password(request.into_inner()).await?;
    let token = match in_header {
        Some(token) => token,
        None => {
            let password = match in_message {
                Some(password) => password,
                None if authenticator.needs_token() => return Err(no_password()),
                None => Vec::new(),
            };
            if !is_known || !password.is_empty() {
                authenticator.check_token(&password)?;
            }
            password
        }
    };
    let token = if token.is_empty() { ANY_TOKEN } else { &token };
    let mut metadata = MetadataMap::new();
    // Other bytes cannot be in a header, and no client could send them as a token.
    let in_header = if token.iter().all(|byte| (b' '..=b'~').contains(byte)) { token } else { ANY_TOKEN };
    if let Ok(mut bearer) = MetadataValue::<Ascii>::try_from([&b"Bearer "[..], in_header].concat().as_slice()) {
        bearer.set_sensitive(true);
        metadata.insert("authorization", bearer);
    }
    let answer = HandshakeResponse { protocol_version: 0, payload: token.to_vec().into() };
    // The status carries the trailers.
    let end = Status::with_metadata(Code::Ok, "", metadata.clone());
    let mut response = Response::new(stream::iter([Ok(answer), Err(end)]).boxed());
    *response.metadata_mut() = metadata;
    Ok(response)
}

/// Returns the password in the first message: empty without a message, `None` if the message has
/// another form.
async fn password(mut messages: Streaming<HandshakeRequest>) -> Result<Option<Vec<u8>>> {
    let first = tokio::time::timeout(MESSAGE_WAIT, messages.message()).await.map_err(|_| {
        Error::DeadlineExceeded(format!("no message of the handshake came within {} s", MESSAGE_WAIT.as_secs()))
    })?;
    let first = first.map_err(|status| of_request(&status, "the message of the handshake"))?;
    let payload = first.map(|message| message.payload).unwrap_or_default();
    Ok(BasicAuth::decode(payload).ok().map(|sent| sent.password.into_bytes()))
}

fn no_password() -> Error {
    Error::Unauthenticated(
        "the message of the handshake is not Flight's BasicAuth; send any user name, with the token as the password, or \
         send the header \"authorization: Bearer TOKEN\" with every call, without a handshake"
            .into(),
    )
}
