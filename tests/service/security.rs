//! Authentication and authorization of clients.

use std::path::Path;

use arrow_flight::{BasicAuth, HandshakeRequest};
use dovetail::service::Server;
use futures::{StreamExt, TryStreamExt};
use prost::Message;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request};

use crate::harness::*;

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn with_token<T>(message: T, token: &str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {token}").parse::<MetadataValue<_>>().unwrap());
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_decide_the_permissions_of_a_caller() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = write(folder.path(), "tokens", "r ann reader\nw ann writer\nb bob writer 2\nx root admin\n");
    let server = TestServer::start(&[&format!("--token-file={tokens}")]).await;
    let mut client = server.client().await;

    refused(client.get_flight_info(path("t")).await, Code::Unauthenticated, "Bearer TOKEN");
    refused(client.get_flight_info(with_token(path("t"), "z")).await, Code::Unauthenticated, "not known");
    refused(client.get_flight_info(with_token(path("t"), "r")).await, Code::NotFound, "\"t\"");

    let upload = |token: &'static str| {
        let mut client = client.clone();
        async move {
            let messages = arrow_flight::encode::FlightDataEncoderBuilder::new()
                .with_flight_descriptor(Some(path("t")))
                .build(futures::stream::iter(keyed(10, 10)).map(Ok));
            let messages: Vec<_> = messages.try_collect().await.unwrap();
            let acks = client.do_put(with_token(futures::stream::iter(messages), token)).await?;
            acks.into_inner().try_collect::<Vec<_>>().await
        }
    };
    refused(upload("z").await, Code::Unauthenticated, "not known");
    refused(upload("r").await, Code::PermissionDenied, "writer");
    upload("w").await.unwrap();

    // Another tenant may read the table but not drop it. A ticket is invalid for other tenants.
    let info = client.get_flight_info(with_token(path("t"), "b")).await.unwrap().into_inner();
    let ticket = info.endpoint[0].ticket.clone().unwrap();
    refused(client.do_get(with_token(ticket.clone(), "r")).await, Code::PermissionDenied, "another tenant");
    assert!(client.do_get(with_token(ticket, "b")).await.is_ok());
    let drop = || arrow_flight::Action::new("drop_table", r#"{"name": "t"}"#);
    refused(client.do_action(with_token(drop(), "r")).await, Code::PermissionDenied, "writer");
    refused(client.do_action(with_token(drop(), "b")).await, Code::PermissionDenied, "ann");
    assert!(client.do_action(with_token(drop(), "x")).await.is_ok());
}

/// Sends a handshake of one message. Returns the token in the header, the message and the trailer.
async fn handshake(client: &mut Client, header: Option<&str>, payload: &[u8]) -> Result<[String; 3], tonic::Status> {
    let message = HandshakeRequest { protocol_version: 0, payload: payload.to_vec().into() };
    let mut request = Request::new(futures::stream::iter([message]));
    if let Some(header) = header {
        request.metadata_mut().insert("authorization", header.parse().unwrap());
    }
    let answer = client.handshake(request).await?;
    let token = |metadata: &tonic::metadata::MetadataMap| {
        let value = metadata.get("authorization").and_then(|value| value.to_str().ok()).unwrap_or("");
        value.strip_prefix("Bearer ").unwrap_or("").to_owned()
    };
    let in_header = token(answer.metadata());
    let mut messages = answer.into_inner();
    let message = messages.message().await?.expect("a handshake has one answer");
    assert!(messages.message().await?.is_none(), "a handshake has one answer");
    let in_trailer = token(&messages.trailers().await?.expect("trailers"));
    Ok([in_header, String::from_utf8(message.payload.to_vec()).unwrap(), in_trailer])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handshake_takes_the_token_as_the_password() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = write(folder.path(), "tokens", "w ann writer\n");
    let server = TestServer::start(&[&format!("--token-file={tokens}")]).await;
    let mut client = server.client().await;
    // "anyone:w" and "w:anyone".
    let (right, wrong) = ("Basic YW55b25lOnc=", "Basic dzphbnlvbmU=");
    let basic = |password: &str| BasicAuth { username: "anyone".into(), password: password.into() }.encode_to_vec();
    let all = |token: &str| [token.to_owned(), token.to_owned(), token.to_owned()];
    assert_eq!(handshake(&mut client, Some(right), b"").await.unwrap(), all("w"));
    assert_eq!(handshake(&mut client, Some("Bearer w"), b"").await.unwrap(), all("w"));
    assert_eq!(handshake(&mut client, None, &basic("w")).await.unwrap(), all("w"));
    refused(handshake(&mut client, Some(wrong), &basic("w")).await, Code::Unauthenticated, "not known");
    refused(handshake(&mut client, None, &basic("x")).await, Code::Unauthenticated, "not known");
    refused(handshake(&mut client, None, b"").await, Code::Unauthenticated, "not known");
    refused(handshake(&mut client, None, b"anyone:w").await, Code::Unauthenticated, "not Flight's BasicAuth");
    // Calls take the password too, and the token in the header that older clients send.
    for (header, value) in [("authorization", right), ("auth-token-bin", "dw")] {
        let mut request = Request::new(path("t"));
        let value: http::HeaderValue = value.parse().unwrap();
        request.metadata_mut().as_mut().insert(header, value);
        refused(client.get_flight_info(request).await, Code::NotFound, "\"t\"");
    }

    let open = TestServer::start(&[]).await;
    let mut client = open.client().await;
    for (header, payload, token) in [
        (Some(wrong), &b""[..], "anyone"),
        (Some("Negotiate x"), &b""[..], "anonymous"),
        (None, &b""[..], "anonymous"),
        (None, &b"anyone:w"[..], "anonymous"),
        (None, &basic("x")[..], "x"),
    ] {
        assert_eq!(handshake(&mut client, header, payload).await.unwrap(), all(token), "{header:?} {payload:?}");
    }
}

struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Issues a certificate with the name, and its key.
    fn issue(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.into()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_serves_clients_that_trust_the_server_and_mutual_tls_clients_that_it_trusts() {
    let folder = tempfile::tempdir().unwrap();
    let (authority, stranger) = (Authority::new(), Authority::new());
    let (cert, key) = authority.issue("localhost");
    let cert = write(folder.path(), "cert.pem", &cert);
    let key = write(folder.path(), "key.pem", &key);
    let client_ca = write(folder.path(), "ca.pem", &authority.pem());
    let (cert, key) = (format!("--tls-cert={cert}"), format!("--tls-key={key}"));

    let trusting = |ca: &Authority| {
        ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca.pem())).domain_name("localhost")
    };
    let endpoint = |server: &TestServer, tls: ClientTlsConfig| {
        Endpoint::from_shared(server.address.replace("http:", "https:")).unwrap().tls_config(tls).unwrap()
    };

    let server = TestServer::start(&[&cert, &key]).await;
    let mut client = connect(endpoint(&server, trusting(&authority))).await;
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
    assert_eq!(rows(&get(&mut client, path("t")).await.unwrap()), 10);
    assert!(endpoint(&server, trusting(&stranger)).connect().await.is_err());

    let server = TestServer::start(&[&cert, &key, &format!("--tls-client-ca={client_ca}")]).await;
    let identity = |ca: &Authority| {
        let (cert, key) = ca.issue("a client");
        Identity::from_pem(cert, key)
    };
    let mut client = connect(endpoint(&server, trusting(&authority).identity(identity(&authority)))).await;
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
    for tls in [trusting(&authority), trusting(&authority).identity(identity(&stranger))] {
        // In TLS 1.3, a client appears to be connected before the server has checked its
        // certificate.
        let outcome = match endpoint(&server, tls).connect().await {
            Ok(channel) => Client::new(channel).get_flight_info(path("t")).await.map(|_| ()),
            Err(error) => Err(tonic::Status::unavailable(error.to_string())),
        };
        assert!(outcome.is_err(), "a stranger was served");
    }
    assert_eq!(rows(&get(&mut client, path("t")).await.unwrap()), 10);
}

/// Regression test: every client with a certificate of the authority was an admin.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificates_name_is_its_tenant_and_only_a_listed_one_is_an_admin() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let (cert, key) = authority.issue("localhost");
    let cert = format!("--tls-cert={}", write(folder.path(), "cert.pem", &cert));
    let key = format!("--tls-key={}", write(folder.path(), "key.pem", &key));
    let client_ca = format!("--tls-client-ca={}", write(folder.path(), "ca.pem", &authority.pem()));
    let as_client = async |server: &TestServer, name: &str| {
        let (cert, key) = authority.issue(name);
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(authority.pem()))
            .domain_name("localhost")
            .identity(Identity::from_pem(cert, key));
        let endpoint = Endpoint::from_shared(server.address.replace("http:", "https:")).unwrap();
        connect(endpoint.tls_config(tls).unwrap()).await
    };
    let drop_t = || Request::new(arrow_flight::Action::new("drop_table", r#"{"name": "t"}"#));

    let server = TestServer::start(&[&cert, &key, &client_ca]).await;
    let (mut ann, mut bob) = (as_client(&server, "ann").await, as_client(&server, "bob").await);
    put(&mut ann, "t", keyed(10, 10)).await.unwrap();
    refused(bob.do_action(drop_t()).await, Code::PermissionDenied, "ann");
    assert_eq!(rows(&get(&mut bob, path("t")).await.unwrap()), 10);
    assert!(ann.do_action(drop_t()).await.is_ok());

    let tokens = "t0ken carl writer\ncert:ann ann writer\ncert:bob looks reader\ncert:ops ops admin\n";
    let tokens = format!("--token-file={}", write(folder.path(), "tokens", tokens));
    let server = TestServer::start(&[&cert, &key, &client_ca, &tokens]).await;
    let (mut ann, mut bob) = (as_client(&server, "ann").await, as_client(&server, "bob").await);
    put(&mut ann, "t", keyed(10, 10)).await.unwrap();
    refused(bob.do_action(drop_t()).await, Code::PermissionDenied, "writer");
    let mut dora = as_client(&server, "dora").await;
    refused(dora.get_flight_info(path("t")).await, Code::Unauthenticated, "does not list the certificate of \"dora\"");
    assert!(dora.get_flight_info(with_token(path("t"), "t0ken")).await.is_ok());
    assert!(as_client(&server, "ops").await.do_action(drop_t()).await.is_ok());
    refused(
        Server::start(&settings(&[&tokens])).await.map_err(tonic::Status::from),
        Code::InvalidArgument,
        "--tls-client-ca",
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_replaces_tokens_and_keeps_tables_and_calls_in_progress() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = write(folder.path(), "tokens", "t0ken-a ann writer\nt0ken-b bob reader\n");
    let server = TestServer::start(&[&format!("--token-file={tokens}")]).await;
    let mut client = server.client().await;
    let messages = arrow_flight::encode::FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(path("t")))
        .build(futures::stream::iter(keyed(10, 5)).map(Ok));
    let messages: Vec<_> = messages.try_collect().await.unwrap();
    // The rest of this upload comes after its token was removed.
    let (rest, upload) = futures::channel::mpsc::unbounded();
    let mut sent = messages.into_iter();
    rest.unbounded_send(sent.next().unwrap()).unwrap();
    let mut acks = client.do_put(with_token(upload, "t0ken-a")).await.unwrap().into_inner();

    write(folder.path(), "tokens", "t0ken-c ann writer\nt0ken-b bob writer 2\n");
    let mut changes = server.shared.reload("a test").unwrap();
    changes.sort();
    let expected = [
        r#"a token of tenant "ann" (writer, weight 1) is added"#,
        r#"a token of tenant "ann" (writer, weight 1) is removed"#,
        r#"a token of tenant "bob" (reader, weight 1) is now of tenant "bob" (writer, weight 2)"#,
    ];
    assert_eq!(changes, expected);
    refused(client.get_flight_info(with_token(path("t"), "t0ken-a")).await, Code::Unauthenticated, "not known");
    sent.for_each(|message| rest.unbounded_send(message).unwrap());
    drop(rest);
    while acks.message().await.unwrap().is_some() {}
    // The table is there, for the tenant's new token too.
    let drop_t = || arrow_flight::Action::new("drop_table", r#"{"name": "t"}"#);
    refused(client.do_action(with_token(drop_t(), "t0ken-b")).await, Code::PermissionDenied, "ann");
    client.do_action(with_token(drop_t(), "t0ken-c")).await.unwrap();

    let info = async |token: &str| -> serde_json::Value {
        let mut client = server.client().await;
        let action = arrow_flight::Action::new("server_info", "");
        let results = client.do_action(with_token(action, token)).await.unwrap().into_inner();
        let results: Vec<_> = results.try_collect().await.unwrap();
        serde_json::from_slice(&results[0].body).unwrap()
    };
    assert_eq!(info("t0ken-c").await["last_reload_failed"], false);
    assert!(server.http_get("/metrics").await.1.contains("dovetail_last_reload_failed 0\n"));
    for wrong in ["t0ken-d carl king\n", "", "cert:ann ann writer\n"] {
        write(folder.path(), "tokens", wrong);
        let refusal = server.shared.reload("a test").unwrap_err();
        assert!(!refusal.message().contains("t0ken"), "{refusal}");
        assert_eq!(info("t0ken-c").await["last_reload_failed"], true, "the tokens from before stay");
    }
    std::fs::remove_file(&tokens).unwrap();
    assert!(server.shared.reload("a test").is_err());
    assert_eq!(info("t0ken-c").await["last_reload_failed"], true);
    assert!(server.http_get("/metrics").await.1.contains("dovetail_last_reload_failed 1\n"));
}

/// Kubernetes replaces a secret by another link, and an editor by another file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_change_are_read_again_without_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("tokens");
    for (name, token) in [("first", "t0ken-a"), ("second", "t0ken-b")] {
        write(folder.path(), name, &format!("{token} ann writer\n"));
    }
    std::os::unix::fs::symlink("first", &link).unwrap();
    let server = TestServer::start(&[&format!("--token-file={}", link.display())]).await;
    let code = async |token: &str| {
        let mut client = server.client().await;
        client.get_flight_info(with_token(path("t"), token)).await.unwrap_err().code()
    };
    assert_eq!((code("t0ken-a").await, code("t0ken-b").await), (Code::NotFound, Code::Unauthenticated));
    std::os::unix::fs::symlink("second", folder.path().join("new")).unwrap();
    std::fs::rename(folder.path().join("new"), &link).unwrap();
    eventually("the other file is read", async || code("t0ken-b").await == Code::NotFound).await;
    assert_eq!(code("t0ken-a").await, Code::Unauthenticated);
    std::fs::write(&link, "t0ken-longer ann writer\n").unwrap();
    eventually("the file is read again", async || code("t0ken-longer").await == Code::NotFound).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_replaces_certificates_and_the_authorities_of_clients() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (Authority::new(), Authority::new());
    let install = |server: &Authority, clients: &Authority| {
        let (cert, key) = server.issue("localhost");
        let files = [("cert.pem", cert), ("key.pem", key), ("ca.pem", clients.pem())];
        files.map(|(name, text)| write(folder.path(), name, &text))
    };
    let [cert, key, client_ca] = install(&old, &old);
    let flags = [format!("--tls-cert={cert}"), format!("--tls-key={key}"), format!("--tls-client-ca={client_ca}")];
    let server = TestServer::start(&flags.each_ref().map(String::as_str)).await;
    let as_ann = async |server_ca: &Authority, own: &Authority| {
        let (cert, key) = own.issue("ann");
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(server_ca.pem()))
            .domain_name("localhost")
            .identity(Identity::from_pem(cert, key));
        let endpoint = Endpoint::from_shared(server.address.replace("http:", "https:")).unwrap();
        // In TLS 1.3, a client appears to be connected before the server has checked its
        // certificate.
        let channel = endpoint.tls_config(tls).unwrap().connect().await.map_err(|_| Code::Unavailable)?;
        let mut client = Client::new(channel);
        match client.get_flight_info(path("t")).await {
            Err(status) if status.code() == Code::NotFound => Ok(client),
            outcome => Err(outcome.err().map_or(Code::Ok, |status| status.code())),
        }
    };
    let mut before = as_ann(&old, &old).await.unwrap();

    // Another certificate: open connections stay.
    install(&new, &old);
    let changes = server.shared.reload("a test").unwrap();
    assert!(matches!(&changes[..], [one] if one.contains("the new one is valid until ")), "{changes:?}");
    assert!(as_ann(&old, &old).await.is_err(), "the server has a certificate of another authority");
    as_ann(&new, &old).await.unwrap();
    refused(before.get_flight_info(path("t")).await, Code::NotFound, "\"t\"");

    // A key that does not fit changes nothing, and neither does the rest of that reload.
    write(folder.path(), "key.pem", &new.issue("localhost").1);
    write(folder.path(), "ca.pem", &new.pem());
    let refusal = server.shared.reload("a test").unwrap_err();
    assert!(refusal.message().contains("is not the private key of the certificate"), "{refusal}");
    as_ann(&new, &old).await.unwrap();
    assert!(as_ann(&new, &new).await.is_err());

    // Other authorities of clients: a connection that the former ones admitted is closed.
    install(&new, &new);
    let changes = server.shared.reload("a test").unwrap();
    assert!(changes.iter().any(|change| change.contains("the authorities of clients are replaced by 1 certificate")));
    as_ann(&new, &new).await.unwrap();
    assert!(as_ann(&new, &old).await.is_err());
    eventually(
        "the former connection is closed",
        async || !matches!(before.get_flight_info(path("t")).await, Err(status) if status.code() == Code::NotFound),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_non_loopback_address_without_tls_is_refused_at_start() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = format!("--token-file={}", write(folder.path(), "tokens", "t ann writer\n"));
    for flags in [vec!["--listen=0.0.0.0:0"], vec!["--listen=0.0.0.0:0", &tokens]] {
        let refusal = Server::start(&settings(&flags)).await.unwrap_err();
        assert!(refusal.message().contains("--insecure"), "{refusal}");
    }
    assert!(Server::start(&settings(&["--listen=0.0.0.0:0", "--insecure"])).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_cannot_work_are_refused_at_start() {
    let wrong = [
        ("--endpoints=0", "endpoints"),
        ("--message-limit=3GiB", "--message-limit"),
        ("--message-limit=lots", "--message-limit"),
        ("--host-memory=200%", "--host-memory"),
        ("--public-locations=grpc://0.0.0.0:1", "every interface"),
        ("--admin-listen=nowhere", "--admin-listen"),
        ("--tenant-memory=much", "--tenant-memory"),
        ("--token-file=/does/not/exist", "/does/not/exist"),
    ];
    for (flag, words) in wrong {
        let refusal = Server::start(&settings(&[flag])).await.unwrap_err();
        assert!(refusal.message().contains(words), "{flag}: {refusal}");
    }
}
