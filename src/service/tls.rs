//! TLS of the Flight port: the server's certificate, its key, and the authorities of clients.
//!
//! The files are read at the start, and again at each reload (`credentials.rs`). A connection keeps
//! the certificate of its handshake.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_util::sync::CancellationToken;

use super::certificate;
use super::settings::Settings;
use crate::human::{self, file_failure};
use crate::{Context, Error, Result};

/// Protocols over TLS, the preferred one first. HTTP/1.1 is only for a client without HTTP/2, which
/// is then answered in a sentence.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// TLS as the files of the settings describe it.
#[derive(Debug)]
pub(super) struct Tls {
    pub(super) config: Arc<ServerConfig>,
    /// Warnings: faults that do not keep the server from starting.
    pub(super) remarks: Vec<String>,
    /// Chain of the server, its own certificate first.
    chain: Vec<CertificateDer<'static>>,
    /// Certificates of the authorities whose clients are admitted.
    authorities: Vec<CertificateDer<'static>>,
    /// Cancelled when other authorities take the place of [`authorities`](Self::authorities).
    /// Connections that these admitted close then, after their calls.
    pub(super) superseded: CancellationToken,
}

impl Tls {
    /// Reads the files of the settings; `None` for a server without TLS.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file that cannot be used, and why.
    pub(super) fn load(settings: &Settings) -> Result<Option<Self>> {
        let (cert, key) = match (&settings.tls_cert, &settings.tls_key) {
            (Some(cert), Some(key)) => (cert.as_path(), key.as_path()),
            (None, None) if settings.tls_client_ca.is_none() => return Ok(None),
            _ => return Err(Error::Invalid("TLS needs both --tls-cert and --tls-key".into())),
        };
        let (cert_pem, key_pem) = (read(cert)?, read(key)?);
        check_pem((cert, &cert_pem), (key, &key_pem))?;
        let chain = certificates("--tls-cert", (cert, &cert_pem))?;
        let private_key = PrivateKeyDer::from_pem_slice(&key_pem).map_err(|_| {
            Error::Invalid(format!(
                "--tls-key names {}, in which the private key is damaged or cut short; check that it was copied in whole",
                key.display()
            ))
        })?;
        let authorities = match &settings.tls_client_ca {
            Some(path) => {
                let pem = read(path)?;
                check_holds("--tls-client-ca", (path, &pem), CERTIFICATE, PRIVATE_KEY)?;
                certificates("--tls-client-ca", (path, &pem))?
            }
            None => Vec::new(),
        };
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::Internal(format!("no version of TLS: {error}")))?;
        let builder = match &settings.tls_client_ca {
            Some(path) => builder.with_client_cert_verifier(verifier(path, &authorities)?),
            None => builder.with_no_client_auth(),
        };
        let config = builder.with_single_cert(chain.clone(), private_key);
        let mut config = config.map_err(|error| unusable(cert, key, &error.to_string()))?;
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        let remarks = out_of_date(cert, &chain).into_iter().chain(human::readable_by_others("--tls-key", key));
        let remarks = remarks.collect();
        Ok(Some(Self { config: Arc::new(config), remarks, chain, authorities, superseded: CancellationToken::new() }))
    }

    /// Returns the same TLS as the successor of `previous`. Connections that both admit stay open
    /// until other authorities are named.
    pub(super) fn after(self, previous: Option<&Self>) -> Self {
        match previous.filter(|previous| !previous.has_other_authorities(&self)) {
            Some(previous) => Self { superseded: previous.superseded.clone(), ..self },
            None => self,
        }
    }

    /// Describes what is different in `newer`.
    pub(super) fn changes(&self, newer: &Self) -> Vec<String> {
        let mut changes = Vec::new();
        if self.chain != newer.chain {
            changes.push(format!(
                "the certificate of the server is replaced: the new one is valid until {}, the previous one until {}",
                newer.valid_until(),
                self.valid_until()
            ));
        }
        if self.has_other_authorities(newer) {
            let count = human::counted_as(newer.authorities.len() as u64, "certificate", "certificates");
            changes.push(format!(
                "the authorities of clients are replaced by {count}: connections that others admitted close after their calls"
            ));
        }
        changes
    }

    /// True if `newer` admits clients of other authorities.
    pub(super) fn has_other_authorities(&self, newer: &Self) -> bool {
        self.authorities != newer.authorities
    }

    /// Returns the day on which the certificate of the server expires, as text.
    fn valid_until(&self) -> String {
        let end = self.chain.first().and_then(|own| certificate::valid_until(own));
        end.map_or_else(|| "an unknown day".into(), |end| humantime::format_rfc3339_seconds(end).to_string())
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let read = std::fs::read(path).map_err(|error| Error::Invalid(file_failure(path, &error)));
    read.context(|| format!("reading {}", path.display()))
}

/// Returns the check of clients' certificates.
fn verifier(
    path: &Path,
    authorities: &[CertificateDer<'static>],
) -> Result<Arc<dyn tokio_rustls::rustls::server::danger::ClientCertVerifier>> {
    let mut roots = RootCertStore::empty();
    // Certificates that TLS cannot read are left out.
    roots.add_parsable_certificates(authorities.iter().cloned());
    let provider = Arc::new(ring::default_provider());
    WebPkiClientVerifier::builder_with_provider(roots.into(), provider).build().map_err(|error| match error {
        VerifierBuilderError::NoRootAnchors => Error::Invalid(format!(
            "--tls-client-ca names {}, which holds no certificate of an authority that TLS can read",
            path.display()
        )),
        error => Error::Invalid(format!("--tls-client-ca names {}, which TLS cannot use: {error}", path.display())),
    })
}

/// Returns the error for a certificate and a key that TLS cannot use, although they are PEM blocks
/// of the right kinds.
fn unusable(cert: &Path, key: &Path, cause: &str) -> Error {
    if cause.contains("UnsupportedCertVersion") {
        return Error::Invalid(
            "the certificate of --tls-cert is of version 1 of X.509, which clients do not accept; make one of version 3, which has \
             extensions, as with: openssl req -x509 ... -addext subjectAltName=DNS:HOST -addext \
             basicConstraints=critical,CA:FALSE"
                .into(),
        );
    }
    let (cert, key) = (cert.display(), key.display());
    if cause.contains("KeyMismatch") {
        return Error::Invalid(format!(
            "--tls-key names {key}, which is not the private key of the certificate in {cert}, which --tls-cert names; the first \
             certificate of the chain must be the one that was made for that key"
        ));
    }
    Error::Invalid(format!(
        "the certificate in {cert}, which --tls-cert names, cannot be used with the private key in {key}, which --tls-key names: \
         {cause}"
    ))
}

/// Path and content of a file.
type NamedFile<'a> = (&'a Path, &'a [u8]);

/// Kinds of PEM block: the end of the block's first line, and its name in messages.
const CERTIFICATE: (&str, &str) = ("CERTIFICATE-----", "a certificate");
const PRIVATE_KEY: (&str, &str) = ("PRIVATE KEY-----", "a private key");

fn has(pem: &[u8], what: (&str, &str)) -> bool {
    let text = String::from_utf8_lossy(pem);
    text.lines().any(|line| line.starts_with("-----BEGIN ") && line.trim_end().ends_with(what.0))
}

/// Refuses a file without the `wanted` kind of PEM block. The error says if the file has the
/// `other` kind.
fn check_holds(flag: &str, (path, pem): NamedFile<'_>, wanted: (&str, &str), other: (&str, &str)) -> Result<()> {
    if has(pem, wanted) {
        return Ok(());
    }
    let held = if has(pem, other) { format!(", but {}", other.1) } else { String::new() };
    let wanted = wanted.1.trim_start_matches("a ");
    Err(Error::Invalid(format!("{flag} names {}, which holds no {wanted} in PEM{held}", path.display())))
}

/// Refuses swapped files, and files that are neither a certificate nor a key.
fn check_pem(cert: NamedFile<'_>, key: NamedFile<'_>) -> Result<()> {
    if has(cert.1, PRIVATE_KEY) && has(key.1, CERTIFICATE) && !(has(cert.1, CERTIFICATE) && has(key.1, PRIVATE_KEY)) {
        return Err(Error::Invalid(format!(
            "--tls-cert and --tls-key have each other's file: {} holds the private key, and {} the certificate",
            cert.0.display(),
            key.0.display()
        )));
    }
    check_holds("--tls-cert", cert, CERTIFICATE, PRIVATE_KEY)?;
    check_holds("--tls-key", key, PRIVATE_KEY, CERTIFICATE)
}

/// Reads the certificates of a file.
fn certificates(flag: &str, (path, pem): NamedFile<'_>) -> Result<Vec<CertificateDer<'static>>> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    read.map_err(|_| {
        Error::Invalid(format!(
            "{flag} names {}, in which a certificate is damaged or cut short; check that it was copied in whole",
            path.display()
        ))
    })
}

/// Describes the server's certificates that are out of date: TLS starts with them, but clients
/// refuse them.
fn out_of_date(path: &Path, certificates: &[CertificateDer<'_>]) -> Vec<String> {
    let now = SystemTime::now();
    let remarks = certificates.iter().enumerate().filter_map(|(at, certificate)| {
        let why = certificate::out_of_date(certificate, now)?;
        let which = match at {
            0 => "the certificate of the server".to_owned(),
            _ => format!("certificate {} of the server's chain", at + 1),
        };
        Some(format!(
            "{which}, in {}, {why}, and it is {} now: clients refuse it, so replace it",
            path.display(),
            humantime::format_rfc3339_seconds(now)
        ))
    });
    remarks.collect()
}
