//! Answers to requests that are not gRPC: a browser, `curl`, a probe, or a proxy that speaks HTTP/1
//! to the server.

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, Version, header};
use http_body_util::Full;
use tonic::body::Body;

/// Type of the messages of gRPC. A suffix names their encoding.
const GRPC: &str = "application/grpc";

/// Returns the answer to a request that is not gRPC over HTTP/2; `None` for one that is.
pub(super) fn answer(request: &Request<Body>) -> Option<Response<Body>> {
    let is_http2 = request.version() == Version::HTTP_2;
    let is_grpc = is_grpc(request.method(), request.headers());
    let (status, text) = match (is_grpc, is_http2) {
        (true, true) => return None,
        (true, false) => (
            StatusCode::HTTP_VERSION_NOT_SUPPORTED,
            format!(
                "gRPC needs HTTP/2, and this request came over {:?}. If a proxy passes requests on, let it use HTTP/2 \
                 towards the server (grpc_pass in nginx).\n",
                request.version()
            ),
        ),
        (false, _) => (
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "This is the Arrow Flight port of a Dovetail server. It speaks gRPC over HTTP/2: connect with the command \
             line (dovetail tables --server ...), the Python client (dovetail.connect), or another Flight client. \
             Metrics and health are on the admin port (--admin-listen).\n"
                .into(),
        ),
    };
    let mut response = Response::new(Body::new(Full::new(Bytes::from(text))));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain; charset=utf-8"));
    if !is_http2 {
        headers.insert(header::CONNECTION, header::HeaderValue::from_static("close"));
    }
    Some(response)
}

/// True if a request is a call of gRPC. A call without a type of content is taken for one.
fn is_grpc(method: &Method, headers: &HeaderMap) -> bool {
    let is_of_type = |value: &header::HeaderValue| {
        let suffix = value.as_bytes().strip_prefix(GRPC.as_bytes());
        suffix.is_some_and(|suffix| matches!(suffix.first(), None | Some(b'+' | b';')))
    };
    method == Method::POST && headers.get(header::CONTENT_TYPE).is_none_or(is_of_type)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_of_grpc_over_http2_pass() {
        let request = |method: &str, version: Version, content: Option<&str>| {
            let request = Request::builder().method(method).version(version);
            let request = content.into_iter().fold(request, |request, content| request.header("content-type", content));
            answer(&request.body(Body::empty()).unwrap()).map(|answer| answer.status().as_u16())
        };
        let (two, one) = (Version::HTTP_2, Version::HTTP_11);
        for content in ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"] {
            assert_eq!(request("POST", two, Some(content)), None, "{content}");
            assert_eq!(request("POST", one, Some(content)), Some(505), "{content}");
        }
        assert_eq!(request("POST", two, None), None);
        for (method, content) in
            [("GET", None), ("HEAD", None), ("POST", Some("application/json")), ("POST", Some("application/grpc-web"))]
        {
            assert_eq!(request(method, two, content), Some(415), "{method} {content:?}");
            assert_eq!(request(method, one, content), Some(415), "{method} {content:?}");
        }
    }
}
