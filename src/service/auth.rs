//! Authentication of callers, and their roles.
//!
//! Without a token file every caller is anonymous and may do everything. The listener is then on
//! the loopback interface, unless the operator set `--insecure`. With a token file, every call
//! carries `authorization: Bearer TOKEN`, or comes over a connection whose client certificate the
//! file lists. Clients that know only user names and passwords send any user name, with the token
//! as the password ([`basic_password`], and `handshake.rs`). The file has one caller per line:
//!
//! ```text
//!   # TOKEN | cert:NAME         TENANT  ROLE  [WEIGHT]
//!   s3cret                      ann     writer
//!   0ther                       bob     reader  2.0
//!   cert:loader.example         ann     writer
//!   cert:spiffe://example/ops   ops     admin
//! ```
//!
//! A certificate is listed by its common name, or by a DNS name or URI among its alternative names.
//! If clients need certificates (`--tls-client-ca`) and there is no file, each client is a writer.
//! The main name of the certificate is the tenant's name. Clients that should be admins, or readers
//! only, must be listed. A token takes precedence over the certificate of its connection.
//!
//! * `reader` reads tables and runs joins whose result does not become a table;
//! * `writer` also uploads tables, drops its own, and stores results of joins as tables;
//! * `admin` may also do this with the tables, jobs and results of all other tenants.
//!
//! Only hashes of tokens are kept, and compared in constant time.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;

use http::HeaderMap;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::certificate;
use crate::catalog::Editor;
use crate::human::file_failure;
use crate::{Context, Error, Result};

/// Permissions of a caller. Each role includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Reads tables, runs joins.
    Reader,
    /// Makes and drops tables.
    Writer,
    /// Acts on tables, jobs and results of other tenants.
    Admin,
}

impl Role {
    /// Returns the name in the token file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reader => "reader",
            Self::Writer => "writer",
            Self::Admin => "admin",
        }
    }
}

/// Authenticated caller of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Caller {
    /// Empty for anonymous callers.
    pub tenant: String,
    pub role: Role,
    /// Tenant's share of the devices when several tenants wait.
    pub weight: f64,
}

impl Caller {
    /// Returns the caller of a server without tokens: all tables, jobs and results are open to it.
    pub fn anonymous() -> Self {
        Self { tenant: String::new(), role: Role::Admin, weight: 1.0 }
    }

    #[cfg(test)]
    pub(super) fn of_tenant(tenant: &str) -> Self {
        Self { tenant: tenant.into(), role: Role::Writer, weight: 1.0 }
    }

    /// Checks that the caller has a role.
    ///
    /// # Errors
    /// [`Error::Denied`] says what the caller attempted and which role that needs.
    pub fn require(&self, role: Role, attempt: &str) -> Result<()> {
        if self.role >= role {
            return Ok(());
        }
        Err(Error::Denied(format!(
            "{attempt} needs the role {}, and tenant {:?} has the role {}",
            role.name(),
            self.tenant,
            self.role.name()
        )))
    }

    /// Returns the caller in the catalog's form, for changes of tables.
    pub fn editor(&self) -> Editor {
        Editor { tenant: self.tenant.clone(), is_admin: self.role == Role::Admin }
    }

    /// True if the caller may see and end the jobs and results of the given owner.
    pub fn may_touch(&self, owner: &str) -> bool {
        self.role == Role::Admin || self.tenant == owner
    }
}

/// Callers that a server admits.
#[derive(Debug)]
pub struct Authenticator {
    /// Callers of the token file; `None` without a file.
    listed: Option<Listed>,
    /// True if TLS admits only clients with certificates.
    has_certificates: bool,
}

/// Callers of a token file.
#[derive(Debug, Default)]
struct Listed {
    tokens: Vec<Token>,
    certificates: HashMap<String, Caller>,
}

struct Token {
    hash: [u8; 32],
    caller: Caller,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token of {:?}", self.caller.tenant)
    }
}

impl Authenticator {
    /// Creates an authenticator that admits every caller.
    pub fn open() -> Self {
        Self { listed: None, has_certificates: false }
    }

    /// Sets whether TLS checks a certificate of every client.
    ///
    /// # Errors
    /// [`Error::Invalid`] when certificates are listed and TLS checks none.
    pub fn with_certificates(self, has_certificates: bool) -> Result<Self> {
        if !has_certificates && self.listed.as_ref().is_some_and(|listed| !listed.certificates.is_empty()) {
            return Err(Error::Invalid(
                "the token file lists client certificates, and the server asks clients for none: give --tls-client-ca"
                    .into(),
            ));
        }
        Ok(Self { has_certificates, ..self })
    }

    /// Reads a token file.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the wrong line, or why the file cannot be read.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::Invalid(file_failure(path, &error)))
            .context(|| format!("reading the token file {}", path.display()))?;
        Self::parse(&text).context(|| format!("the token file {}", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let mut listed = Listed::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            // The line is a secret: errors give only its number.
            let (secret, caller) = parse_line(line).context(|| format!("line {}", number + 1))?;
            let is_new = match secret.strip_prefix(CERTIFICATE) {
                Some(name) => listed.certificates.insert(name.into(), caller).is_none(),
                None => listed.add_token(Token { hash: hash(secret.as_bytes()), caller }),
            };
            if !is_new {
                return Err(Error::Invalid(format!("line {}: the token or certificate is listed twice", number + 1)));
            }
        }
        listed.check_weights()?;
        if listed.tokens.is_empty() && listed.certificates.is_empty() {
            return Err(Error::Invalid(
                "it lists no tokens and no certificates, so no client could call; list at least one".into(),
            ));
        }
        Ok(Self { listed: Some(listed), has_certificates: false })
    }

    /// True if callers need a token, unless their certificate is listed.
    pub fn needs_token(&self) -> bool {
        self.listed.is_some()
    }

    /// Returns the tenants and their weights, for the scheduler's shares.
    pub fn tenants(&self) -> impl Iterator<Item = &Caller> {
        self.listed.iter().flat_map(Listed::callers)
    }

    /// Describes what is different in `newer`: the tokens and certificates that are listed, and
    /// their permissions. No description has a token in it.
    pub(super) fn changes(&self, newer: &Self) -> Vec<String> {
        let (before, after) = (self.by_credential(), newer.by_credential());
        let mut changes = Vec::new();
        for (credential, caller) in &before {
            match after.get(credential) {
                None => changes.push(format!("{credential} of {caller} is removed")),
                Some(now) if now != caller => changes.push(format!("{credential} of {caller} is now of {now}")),
                Some(_) => {}
            }
        }
        let added = after.iter().filter(|(credential, _)| !before.contains_key(*credential));
        changes.extend(added.map(|(credential, caller)| format!("{credential} of {caller} is added")));
        changes
    }

    fn by_credential(&self) -> BTreeMap<Credential<'_>, &Caller> {
        let Some(listed) = &self.listed else { return BTreeMap::new() };
        let tokens = listed.tokens.iter().map(|token| (Credential::Token(&token.hash), &token.caller));
        let certificates = listed.certificates.iter().map(|(name, caller)| (Credential::Certificate(name), caller));
        tokens.chain(certificates).collect()
    }

    /// Authenticates a call with the given headers, over a connection with the given client
    /// certificate (DER).
    ///
    /// # Errors
    /// [`Error::Unauthenticated`] without a known token or an accepted certificate.
    pub fn authenticate(&self, headers: &HeaderMap, certificate: Option<&[u8]>) -> Result<Caller> {
        let certificate = certificate.filter(|_| self.has_certificates);
        let Some(listed) = &self.listed else {
            return match certificate {
                Some(certificate) => {
                    let tenant = certificate::names(certificate)?.swap_remove(0);
                    Ok(Caller { tenant, role: Role::Writer, weight: 1.0 })
                }
                None if self.has_certificates => Err(Error::Unauthenticated(
                    "this server needs a client certificate, and the connection has none".into(),
                )),
                None => Ok(Caller::anonymous()),
            };
        };
        match presented_token(headers)? {
            Some(token) => listed.by_token(&token),
            None => listed.by_certificate(certificate),
        }
    }

    /// Checks a token that a handshake presents. A server without tokens accepts any.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`] for an unknown token.
    pub fn check_token(&self, token: &[u8]) -> Result<()> {
        self.listed.as_ref().map_or(Ok(()), |listed| listed.by_token(token).map(drop))
    }
}

/// Token or certificate of a token file. Its text tells nothing of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Credential<'a> {
    Token(&'a [u8; 32]),
    Certificate(&'a str),
}

impl fmt::Display for Credential<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Token(_) => f.write_str("a token"),
            Self::Certificate(name) => write!(f, "the certificate {name:?}"),
        }
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tenant {:?} ({}, weight {})", self.tenant, self.role.name(), self.weight)
    }
}

/// Header of the token that a handshake returned, as clients of the C++ and Java libraries send it.
const TOKEN_OF_HANDSHAKE: &str = "auth-token-bin";

/// Returns the token among the headers of a call; `None` if there is none.
///
/// # Errors
/// [`Error::Unauthenticated`] for a header of another scheme, or one that cannot be read.
pub(super) fn presented_token(headers: &HeaderMap) -> Result<Option<Vec<u8>>> {
    let Some(header) = headers.get(http::header::AUTHORIZATION) else {
        let Some(header) = headers.get(TOKEN_OF_HANDSHAKE) else { return Ok(None) };
        let token = decode_base64(header.as_bytes());
        return token.map(Some).ok_or_else(|| {
            Error::Unauthenticated(format!("the header {TOKEN_OF_HANDSHAKE} is not base64, as gRPC sends it"))
        });
    };
    let header = header.as_bytes();
    let of_scheme = |scheme: &[u8]| {
        let (name, value) = header.split_at_checked(scheme.len())?;
        (name.eq_ignore_ascii_case(scheme) && !value.is_empty()).then(|| value.trim_ascii())
    };
    if let Some(token) = of_scheme(b"Bearer ") {
        return Ok(Some(token.to_vec()));
    }
    let Some(basic) = of_scheme(b"Basic ") else {
        return Err(Error::Unauthenticated(
            "the authorization header is neither \"Bearer TOKEN\" nor \"Basic\" with any user name and the token as the \
             password; other schemes are not supported"
                .into(),
        ));
    };
    basic_password(basic).map(Some).ok_or_else(|| {
        Error::Unauthenticated("the authorization header has \"Basic\" without USER:PASSWORD in base64 after it".into())
    })
}

/// Returns the password of a header of the scheme Basic (RFC 7617).
fn basic_password(encoded: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = decode_base64(encoded)?;
    // A user name has no colon, and a password may.
    let colon = decoded.iter().position(|&byte| byte == b':')?;
    Some(decoded.split_off(colon + 1))
}

/// Decodes base64 with or without padding: gRPC omits it, and Basic has it.
fn decode_base64(encoded: &[u8]) -> Option<Vec<u8>> {
    use base64::Engine as _;
    use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    GeneralPurpose::new(&base64::alphabet::STANDARD, config).decode(encoded.trim_ascii()).ok()
}

impl Listed {
    /// Returns the caller of a token.
    fn by_token(&self, token: &[u8]) -> Result<Caller> {
        let hash = hash(token);
        // Every token is compared, so that the time does not depend on which one matched.
        let mut found = None;
        for token in &self.tokens {
            if bool::from(token.hash.ct_eq(&hash)) {
                found = Some(&token.caller);
            }
        }
        found.cloned().ok_or_else(|| Error::Unauthenticated("the token is not known to this server".into()))
    }

    fn callers(&self) -> impl Iterator<Item = &Caller> {
        self.tokens.iter().map(|token| &token.caller).chain(self.certificates.values())
    }

    /// Refuses lines that give a tenant different weights, because only one of them would count. A
    /// line without a weight has weight 1.
    fn check_weights(&self) -> Result<()> {
        let mut weights = HashMap::new();
        for Caller { tenant, weight, .. } in self.callers() {
            let first = *weights.entry(tenant).or_insert(*weight);
            if first != *weight {
                let (less, more) = (first.min(*weight), first.max(*weight));
                return Err(Error::Invalid(format!(
                    "tenant {tenant:?} has the weights {less} and {more} in different lines; give it one weight in all lines (a line without a weight has 1)"
                )));
            }
        }
        Ok(())
    }

    /// Adds a token. Returns true if it was new.
    fn add_token(&mut self, token: Token) -> bool {
        let is_new = self.tokens.iter().all(|other| other.hash != token.hash);
        self.tokens.push(token);
        is_new
    }

    /// Returns the caller of a connection that sent no token.
    fn by_certificate(&self, certificate: Option<&[u8]>) -> Result<Caller> {
        const NEEDS_TOKEN: &str = "this server needs a token: send the header \"authorization: Bearer TOKEN\", or any user \
                                   name with the token as the password";
        let Some(certificate) = certificate else { return Err(Error::Unauthenticated(NEEDS_TOKEN.into())) };
        let names = certificate::names(certificate)?;
        let caller = names.iter().find_map(|name| self.certificates.get(name));
        caller.cloned().ok_or_else(|| {
            Error::Unauthenticated(format!(
                "{NEEDS_TOKEN}; the token file does not list the certificate of {:?}",
                names[0]
            ))
        })
    }
}

/// Prefix of certificate names in the token file.
const CERTIFICATE: &str = "cert:";

/// Parses a line. Returns the token, or the certificate name with its prefix, and the caller.
fn parse_line(line: &str) -> Result<(&str, Caller)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (token, tenant, role, weight) = match words[..] {
        [token, tenant, role] => (token, tenant, role, "1"),
        [token, tenant, role, weight] => (token, tenant, role, weight),
        _ => return Err(Error::Invalid("write TOKEN TENANT ROLE [WEIGHT], or cert:NAME TENANT ROLE [WEIGHT]".into())),
    };
    if token == CERTIFICATE {
        return Err(Error::Invalid("the name of the certificate is missing after \"cert:\"".into()));
    }
    let roles = [Role::Reader, Role::Writer, Role::Admin];
    let role = roles
        .into_iter()
        .find(|known| known.name() == role)
        .ok_or_else(|| Error::Invalid(format!("unknown role {role:?}; the roles are reader, writer, admin")))?;
    let weight: f64 = weight
        .parse()
        .ok()
        .filter(|weight| (0.001..=1000.0).contains(weight))
        .ok_or_else(|| Error::Invalid(format!("the weight {weight:?} is not a number from 0.001 to 1000")))?;
    Ok((token, Caller { tenant: tenant.into(), role, weight }))
}

fn hash(token: &[u8]) -> [u8; 32] {
    Sha256::digest(token).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(authorization: &str) -> HeaderMap {
        HeaderMap::from_iter([(http::header::AUTHORIZATION, authorization.parse().unwrap())])
    }

    #[test]
    fn a_known_token_gives_its_tenant_role_and_weight() {
        let tokens = Authenticator::parse("# comment\n\n s3cret ann writer\nother bob reader 2.5\n").unwrap();
        let ann = tokens.authenticate(&headers("Bearer s3cret"), None).unwrap();
        assert_eq!((ann.tenant.as_str(), ann.role, ann.weight), ("ann", Role::Writer, 1.0));
        let bob = tokens.authenticate(&headers("bearer other"), None).unwrap();
        assert_eq!((bob.tenant.as_str(), bob.role, bob.weight), ("bob", Role::Reader, 2.5));
    }

    #[test]
    fn calls_without_a_known_token_are_unauthenticated() {
        let tokens = Authenticator::parse("s3cret ann writer").unwrap();
        for wrong in ["Bearer s3cre", "Bearer s3cret2", "Bearer ", "Basic s3cret", "s3cret", ""] {
            assert!(matches!(tokens.authenticate(&headers(wrong), None), Err(Error::Unauthenticated(_))), "{wrong:?}");
        }
        assert!(matches!(tokens.authenticate(&HeaderMap::new(), None), Err(Error::Unauthenticated(_))));
    }

    #[test]
    fn a_password_is_a_token() {
        let tokens = Authenticator::parse("s3cret ann writer\nwith:colon bob reader").unwrap();
        let basic = |credentials: &str| {
            use base64::Engine as _;
            headers(&format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(credentials)))
        };
        for (credentials, tenant) in
            [("anyone:s3cret", "ann"), (":s3cret", "ann"), ("ann:with:colon", "bob"), ("größe:s3cret", "ann")]
        {
            assert_eq!(tokens.authenticate(&basic(credentials), None).unwrap().tenant, tenant, "{credentials}");
        }
        for wrong in ["s3cret:anyone", "s3cret", "ann:", "ann:s3cret "] {
            let refused = tokens.authenticate(&basic(wrong), None);
            assert!(matches!(refused, Err(Error::Unauthenticated(_))), "{wrong:?}");
        }
        for (wrong, words) in [
            ("Basic ", "neither \"Bearer TOKEN\" nor \"Basic\""),
            ("Basic !", "without USER:PASSWORD in base64"),
            ("Negotiate abc", "other schemes are not supported"),
        ] {
            let told = tokens.authenticate(&headers(wrong), None).unwrap_err().to_string();
            assert!(told.contains(words), "{told}");
            assert_eq!(Authenticator::open().authenticate(&headers(wrong), None).unwrap(), Caller::anonymous());
        }
        // The token that a handshake returned, as gRPC sends binary headers: without padding.
        let of_handshake =
            |token: &str| HeaderMap::from_iter([("auth-token-bin".parse().unwrap(), token.parse().unwrap())]);
        assert_eq!(tokens.authenticate(&of_handshake("czNjcmV0"), None).unwrap().tenant, "ann");
        assert_eq!(tokens.authenticate(&of_handshake("d2l0aDpjb2xvbg"), None).unwrap().tenant, "bob");
        assert!(tokens.authenticate(&of_handshake("?"), None).is_err());
        assert!(tokens.check_token(b"s3cret").is_ok() && tokens.check_token(b"s3cre").is_err());
        assert!(Authenticator::open().check_token(b"").is_ok());
    }

    #[test]
    fn a_tenant_has_one_weight() {
        Authenticator::parse("a ann writer 2\nb ann reader 2.0\nc bob reader\ncert:d bob writer 1\n").unwrap();
        for file in ["a ann writer 2\nb ann reader\n", "a ann writer 2\ncert:b ann writer 1\n"] {
            let error = Authenticator::parse(file).unwrap_err();
            assert!(error.message().contains("tenant \"ann\" has the weights 1 and 2 in different lines"), "{error}");
        }
    }

    #[test]
    fn a_newer_file_is_described_by_its_changes_without_a_token() {
        let before = "t0ken-a ann writer\nt0ken-b bob reader\ncert:ops ops admin\ncert:old old reader\n";
        let after = "t0ken-a ann reader 2\ncert:ops ops admin\ncert:old older reader\nt0ken-c carl writer\n";
        let [before, after] = [before, after].map(|text| Authenticator::parse(text).unwrap());
        let mut changes = before.changes(&after);
        changes.sort();
        let expected = [
            r#"a token of tenant "ann" (writer, weight 1) is now of tenant "ann" (reader, weight 2)"#,
            r#"a token of tenant "bob" (reader, weight 1) is removed"#,
            r#"a token of tenant "carl" (writer, weight 1) is added"#,
            r#"the certificate "old" of tenant "old" (reader, weight 1) is now of tenant "older" (reader, weight 1)"#,
        ];
        assert_eq!(changes, expected);
        assert!(after.changes(&after).is_empty());
    }

    /// Creates a certificate with the given common name, as TLS passes it on.
    fn certificate(name: &str) -> Vec<u8> {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn a_certificate_is_by_default_a_writer_of_its_own_tenant() {
        let open = Authenticator::open().with_certificates(true).unwrap();
        let ann = open.authenticate(&HeaderMap::new(), Some(&certificate("ann"))).unwrap();
        assert_eq!((ann.tenant.as_str(), ann.role), ("ann", Role::Writer));
        assert!(matches!(open.authenticate(&HeaderMap::new(), None), Err(Error::Unauthenticated(_))));
        // Without TLS checks, no certificate is believed.
        let anonymous = Authenticator::open().authenticate(&HeaderMap::new(), Some(&certificate("ann"))).unwrap();
        assert_eq!(anonymous, Caller::anonymous());
    }

    #[test]
    fn a_listed_certificate_has_the_role_of_its_line_and_a_token_overrides_it() {
        let file = "s3cret bob reader\ncert:ops.example ops admin 3\n";
        let both = Authenticator::parse(file).unwrap().with_certificates(true).unwrap();
        let ops = both.authenticate(&HeaderMap::new(), Some(&certificate("ops.example"))).unwrap();
        assert_eq!((ops.tenant.as_str(), ops.role, ops.weight), ("ops", Role::Admin, 3.0));
        let bob = both.authenticate(&headers("Bearer s3cret"), Some(&certificate("ops.example"))).unwrap();
        assert_eq!((bob.tenant.as_str(), bob.role), ("bob", Role::Reader));
        let stranger = both.authenticate(&HeaderMap::new(), Some(&certificate("ann"))).unwrap_err();
        assert!(
            matches!(&stranger, Error::Unauthenticated(text) if text.contains("does not list the certificate of \"ann\"")),
            "{stranger}"
        );
        let wrong = both.authenticate(&headers("Bearer wrong"), Some(&certificate("ops.example")));
        assert!(matches!(wrong, Err(Error::Unauthenticated(_))), "a wrong token is not made good by a certificate");
        assert_eq!(both.tenants().count(), 2);
        assert!(Authenticator::parse(file).unwrap().with_certificates(false).is_err(), "nobody asks for certificates");
        for wrong in ["cert: ann admin", "cert:a ann admin\ncert:a bob admin"] {
            assert!(Authenticator::parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn an_error_names_the_wrong_line_and_not_its_token() {
        for wrong in
            ["t0ken", "t0ken ann", "t0ken ann king", "t0ken ann admin heavy", "t0ken ann admin 0", "t0ken a b c d"]
        {
            let refusal = Authenticator::parse(&format!("x y admin\n{wrong}")).unwrap_err();
            assert!(refusal.message().contains("line 2") && !refusal.message().contains("t0ken"), "{refusal}");
        }
        assert!(Authenticator::parse("# nothing\n").is_err());
        assert!(Authenticator::parse("a b admin\na c admin").unwrap_err().message().contains("listed twice"));
    }

    #[test]
    fn a_role_includes_all_lower_roles() {
        let caller = |role| Caller { tenant: "ann".into(), role, weight: 1.0 };
        assert!(caller(Role::Writer).require(Role::Reader, "reading").is_ok());
        let refusal = caller(Role::Reader).require(Role::Writer, "uploading a table").unwrap_err();
        assert!(matches!(&refusal, Error::Denied(text) if text.contains("uploading") && text.contains("writer")));
        assert!(caller(Role::Admin).may_touch("bob") && !caller(Role::Writer).may_touch("bob"));
    }
}
