//! Sessions: options by cookie.

use std::collections::HashMap;

use arrow_flight::Action;
use dovetail::service::sessions::{
    COOKIE, CloseSessionResult, GetSessionOptionsResult, OptionError, OptionValue, SessionOptionValue,
    SetSessionOptionsRequest, SetSessionOptionsResult,
};
use futures::TryStreamExt;
use prost::Message;
use tonic::{Code, Request, Status};

use crate::harness::*;

/// Calls an action, in a session if one is given. Returns its result and the cookie that it sets.
async fn call<R: Message + Default>(
    client: &mut Client,
    name: &str,
    body: Vec<u8>,
    cookie: Option<&str>,
) -> Result<(R, Option<String>), Status> {
    let mut request = Request::new(Action::new(name, body));
    if let Some(cookie) = cookie {
        request.metadata_mut().insert("cookie", format!("theme=dark; {cookie}").parse().unwrap());
    }
    let response = client.do_action(request).await?;
    let set = response.metadata().get("set-cookie").map(|value| value.to_str().unwrap().to_owned());
    let results: Vec<_> = response.into_inner().try_collect().await?;
    Ok((R::decode(&*results[0].body).unwrap(), set))
}

fn options(pairs: &[(&str, OptionValue)]) -> Vec<u8> {
    let value = |value: &OptionValue| SessionOptionValue { option_value: Some(value.clone()) };
    let session_options: HashMap<_, _> =
        pairs.iter().map(|(name, option)| ((*name).to_owned(), value(option))).collect();
    SetSessionOptionsRequest { session_options }.encode_to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_keeps_its_options_until_it_is_closed() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    let request = options(&[
        ("priority", OptionValue::Int64Value(7)),
        ("strategy", OptionValue::StringValue("sort-merge".into())),
        ("colour", OptionValue::StringValue("blue".into())),
        ("retain_seconds", OptionValue::StringValue("long".into())),
    ]);
    let (result, cookie): (SetSessionOptionsResult, _) =
        call(&mut client, "SetSessionOptions", request, None).await.unwrap();
    let errors: HashMap<_, _> = result.errors.iter().map(|(name, error)| (name.as_str(), error.value)).collect();
    let expected = [("colour", OptionError::InvalidName as i32), ("retain_seconds", OptionError::InvalidValue as i32)];
    assert_eq!(errors, HashMap::from(expected));

    let cookie = cookie.expect("a session was opened");
    assert!(cookie.starts_with(COOKIE));
    let (kept, _): (GetSessionOptionsResult, _) =
        call(&mut client, "GetSessionOptions", vec![], Some(&cookie)).await.unwrap();
    let priority = kept.session_options["priority"].option_value.clone();
    assert_eq!((kept.session_options.len(), priority), (2, Some(OptionValue::Int64Value(7))));

    let (closed, _): (CloseSessionResult, _) = call(&mut client, "CloseSession", vec![], Some(&cookie)).await.unwrap();
    assert_eq!(closed.status, 1);
    let gone = call::<GetSessionOptionsResult>(&mut client, "GetSessionOptions", vec![], Some(&cookie)).await;
    refused(gone, Code::FailedPrecondition, "session");
}
