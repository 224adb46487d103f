//! Who is calling, and what they may do.
//!
//! Without a token file everybody is anonymous and may do everything; the listener is on the loopback interface then
//! (or the operator said `--insecure`, or asks for client certificates). With one, every call carries
//! `authorization: Bearer TOKEN`. The file is one token per line:
//!
//! ```text
//!   # TOKEN  TENANT  ROLE  [WEIGHT]
//!   s3cret   ann     writer
//!   0ther    bob     reader  2.0
//! ```
//!
//! * `reader` reads tables and runs joins whose result is not kept as a table;
//! * `writer` also uploads, drops and keeps results as tables of its own;
//! * `admin` may do this with everybody's tables, jobs and results.
//!
//! Only hashes of tokens are kept, and compared in constant time.

use std::path::Path;

use http::HeaderMap;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::catalog::Editor;
use crate::{Context, Error, Result};

/// What somebody may do. Each role includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Reads tables, runs joins.
    Reader,
    /// Makes and drops tables.
    Writer,
    /// Acts on what belongs to others.
    Admin,
}

impl Role {
    /// The name in the token file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reader => "reader",
            Self::Writer => "writer",
            Self::Admin => "admin",
        }
    }
}

/// Who makes a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Caller {
    /// The tenant's name; empty for anonymous callers.
    pub tenant: String,
    /// What the tenant may do with this token.
    pub role: Role,
    /// The tenant's share of the devices when several wait.
    pub weight: f64,
}

impl Caller {
    /// The caller of a server without tokens: everything is theirs.
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
    /// [`Error::Denied`] says what was attempted and which role it takes.
    pub fn require(&self, role: Role, attempt: &str) -> Result<()> {
        if self.role >= role {
            return Ok(());
        }
        Err(Error::Denied(format!(
            "{attempt} takes the role {}, and the token of tenant {:?} has the role {}",
            role.name(),
            self.tenant,
            self.role.name()
        )))
    }

    /// The caller as the catalog knows those who change tables.
    pub fn editor(&self) -> Editor {
        Editor { tenant: self.tenant.clone(), is_admin: self.role == Role::Admin }
    }

    /// Whether something of that owner is the caller's to look at and to end.
    pub fn may_touch(&self, owner: &str) -> bool {
        self.role == Role::Admin || self.tenant == owner
    }
}

/// The tokens of a server.
#[derive(Debug)]
pub struct Authenticator {
    /// `None`: everybody is anonymous.
    tokens: Option<Vec<Token>>,
}

struct Token {
    hash: [u8; 32],
    caller: Caller,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Token of {:?}", self.caller.tenant)
    }
}

impl Authenticator {
    /// Lets everybody in.
    pub fn open() -> Self {
        Self { tokens: None }
    }

    /// Reads a token file.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the line that is wrong; the file's own I/O error.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).context(|| format!("reading the token file {}", path.display()))?;
        Self::parse(&text).context(|| format!("the token file {}", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let mut tokens = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            // The line itself is a secret: errors give its number only.
            let token = parse_line(line).context(|| format!("line {}", number + 1))?;
            if tokens.iter().any(|other: &Token| other.hash == token.hash) {
                return Err(Error::Invalid(format!("line {}: the token is there already", number + 1)));
            }
            tokens.push(token);
        }
        if tokens.is_empty() {
            return Err(Error::Invalid("it has no tokens; nobody could call".into()));
        }
        Ok(Self { tokens: Some(tokens) })
    }

    /// Whether callers need a token.
    pub fn needs_token(&self) -> bool {
        self.tokens.is_some()
    }

    /// The tenants and their weights, for the scheduler's shares.
    pub fn tenants(&self) -> impl Iterator<Item = &Caller> {
        self.tokens.iter().flatten().map(|token| &token.caller)
    }

    /// Who makes a call with these headers.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`] without a token that is known.
    pub fn authenticate(&self, headers: &HeaderMap) -> Result<Caller> {
        let Some(tokens) = &self.tokens else { return Ok(Caller::anonymous()) };
        let header = headers.get(http::header::AUTHORIZATION).ok_or_else(|| {
            Error::Unauthenticated("this server needs a token: send the header \"authorization: Bearer TOKEN\"".into())
        })?;
        let presented = header.as_bytes();
        let scheme_len = "Bearer ".len();
        let is_bearer = presented.len() > scheme_len && presented[..scheme_len].eq_ignore_ascii_case(b"Bearer ");
        if !is_bearer {
            return Err(Error::Unauthenticated(
                "the authorization header is not \"Bearer TOKEN\", which is the only scheme here".into(),
            ));
        }
        let hash = hash(presented[scheme_len..].trim_ascii());
        // Every token is compared, so that the time says nothing about which one came close.
        let mut found = None;
        for token in tokens {
            if bool::from(token.hash.ct_eq(&hash)) {
                found = Some(&token.caller);
            }
        }
        found.cloned().ok_or_else(|| Error::Unauthenticated("the token is not known to this server".into()))
    }
}

fn parse_line(line: &str) -> Result<Token> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (token, tenant, role, weight) = match words[..] {
        [token, tenant, role] => (token, tenant, role, "1"),
        [token, tenant, role, weight] => (token, tenant, role, weight),
        _ => return Err(Error::Invalid("write TOKEN TENANT ROLE [WEIGHT]".into())),
    };
    let roles = [Role::Reader, Role::Writer, Role::Admin];
    let role = roles
        .into_iter()
        .find(|known| known.name() == role)
        .ok_or_else(|| Error::Invalid(format!("unknown role {role:?}; it is one of reader, writer, admin")))?;
    let weight: f64 = weight
        .parse()
        .ok()
        .filter(|weight| (0.001..=1000.0).contains(weight))
        .ok_or_else(|| Error::Invalid(format!("the weight {weight:?} is not a number from 0.001 to 1000")))?;
    Ok(Token { hash: hash(token.as_bytes()), caller: Caller { tenant: tenant.into(), role, weight } })
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
        let ann = tokens.authenticate(&headers("Bearer s3cret")).unwrap();
        assert_eq!((ann.tenant.as_str(), ann.role, ann.weight), ("ann", Role::Writer, 1.0));
        let bob = tokens.authenticate(&headers("bearer other")).unwrap();
        assert_eq!((bob.tenant.as_str(), bob.role, bob.weight), ("bob", Role::Reader, 2.5));
    }

    #[test]
    fn anything_else_is_unauthenticated() {
        let tokens = Authenticator::parse("s3cret ann writer").unwrap();
        for wrong in ["Bearer s3cre", "Bearer s3cret2", "Bearer ", "Basic s3cret", "s3cret", ""] {
            assert!(matches!(tokens.authenticate(&headers(wrong)), Err(Error::Unauthenticated(_))), "{wrong:?}");
        }
        assert!(matches!(tokens.authenticate(&HeaderMap::new()), Err(Error::Unauthenticated(_))));
    }

    #[test]
    fn a_wrong_line_is_named_and_its_token_is_not() {
        for wrong in
            ["t0ken", "t0ken ann", "t0ken ann king", "t0ken ann admin heavy", "t0ken ann admin 0", "t0ken a b c d"]
        {
            let refusal = Authenticator::parse(&format!("x y admin\n{wrong}")).unwrap_err();
            assert!(refusal.message().contains("line 2") && !refusal.message().contains("t0ken"), "{refusal}");
        }
        assert!(Authenticator::parse("# nothing\n").is_err());
        assert!(Authenticator::parse("a b admin\na c admin").unwrap_err().message().contains("already"));
    }

    #[test]
    fn roles_include_those_below() {
        let caller = |role| Caller { tenant: "ann".into(), role, weight: 1.0 };
        assert!(caller(Role::Writer).require(Role::Reader, "reading").is_ok());
        let refusal = caller(Role::Reader).require(Role::Writer, "uploading a table").unwrap_err();
        assert!(matches!(&refusal, Error::Denied(text) if text.contains("uploading") && text.contains("writer")));
        assert!(caller(Role::Admin).may_touch("bob") && !caller(Role::Writer).may_touch("bob"));
    }
}
