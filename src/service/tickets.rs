//! Tickets, which clients present to read data. Only this server can make them.
//!
//! ```text
//!   "DVT1" | HMAC-SHA256 of the rest (32 bytes) | JSON: target, tenant, time of expiry
//! ```
//!
//! A ticket has all data that is needed to serve it, so the server keeps no list of tickets. It is
//! opaque to clients, bound to its tenant, and expires. The key is drawn when the server starts, so
//! tickets do not outlive the server.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arrow_flight::Ticket;
use hmac::{Hmac, Mac};
use rand::RngCore;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::auth::Caller;
use crate::scheduler::{JobId, no_job};
use crate::{Error, Result};

/// First bytes of every ticket. No protobuf message and no JSON object starts like this. So a
/// descriptor can contain a ticket in place of a command (PollFlightInfo).
const MAGIC: &[u8; 4] = b"DVT1";

const MAC_BYTES: usize = 32;

/// Data that a ticket lets its holder read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// Batches `first..end` of a table, in the given version.
    Table {
        name: String,
        /// Version of the table, see [`table_version`].
        version: u64,
        first: usize,
        end: usize,
    },
    /// Batches `part`, `part + parts`, ... of a job's result.
    Result { job: u64, part: usize, parts: usize },
    /// Batches `first..end` of a job's result.
    Part { job: u64, first: usize, end: usize },
    /// Progress of a job.
    Poll { job: u64 },
}

impl Target {
    /// Returns the job of the target, if it has one.
    pub fn job(&self) -> Option<JobId> {
        match self {
            Self::Table { .. } => None,
            Self::Result { job, .. } | Self::Part { job, .. } | Self::Poll { job } => Some(JobId(*job)),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Body {
    target: Target,
    tenant: String,
    /// Milliseconds since 1970.
    expires: u64,
}

/// Makes tickets and checks them.
pub struct Tickets {
    key: [u8; 32],
}

impl std::fmt::Debug for Tickets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tickets")
    }
}

impl Default for Tickets {
    /// Creates tickets with a random key.
    fn default() -> Self {
        let mut key = [0; 32];
        rand::rng().fill_bytes(&mut key);
        Self { key }
    }
}

impl Tickets {
    /// Issues a ticket for the given tenant.
    pub fn issue(&self, target: Target, tenant: &str, expires: SystemTime) -> Ticket {
        let expires = millis(expires);
        let body = serde_json::to_vec(&Body { target, tenant: tenant.into(), expires })
            .expect("a ticket is plain data, which always has a JSON form");
        let mut ticket = Vec::with_capacity(MAGIC.len() + MAC_BYTES + body.len());
        ticket.extend_from_slice(MAGIC);
        ticket.extend_from_slice(&self.mac(&body).finalize().into_bytes());
        ticket.extend_from_slice(&body);
        Ticket { ticket: ticket.into() }
    }

    /// True if bytes look like a ticket. [`Tickets::open`] decides whether the ticket is valid.
    pub fn looks_like(bytes: &[u8]) -> bool {
        bytes.starts_with(MAGIC)
    }

    /// Returns the data that a ticket lets this caller read.
    ///
    /// # Errors
    /// [`Error::Invalid`] when this server did not make the ticket, [`Error::NotFound`] when it has
    /// expired. If it was made for another tenant: [`Error::Denied`] for a table, and the same as
    /// for a missing job for a job.
    pub fn open(&self, ticket: &[u8], caller: &Caller) -> Result<Target> {
        let body = self.verify(ticket).ok_or_else(|| {
            Error::Invalid(
                "this is not a ticket of this server (or the server was restarted since); get one from GetFlightInfo"
                    .into(),
            )
        })?;
        if body.tenant != caller.tenant {
            return Err(body.target.job().map_or_else(
                || Error::Denied("this ticket was made for another tenant; get your own from GetFlightInfo".into()),
                no_job,
            ));
        }
        if body.expires <= millis(SystemTime::now()) {
            return Err(Error::NotFound(
                "this ticket has expired; get another from GetFlightInfo, and renew it in time with RenewFlightEndpoint"
                    .into(),
            ));
        }
        Ok(body.target)
    }

    fn verify(&self, ticket: &[u8]) -> Option<Body> {
        let rest = ticket.strip_prefix(MAGIC)?;
        let (mac, body) = rest.split_at_checked(MAC_BYTES)?;
        // `verify_slice` compares in constant time.
        self.mac(body).verify_slice(mac).ok()?;
        serde_json::from_slice(body).ok()
    }

    fn mac(&self, body: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key).expect("HMAC takes keys of any length");
        mac.update(body);
        mac
    }
}

/// Returns a table's version, made from its creation time. A ticket for one version is not valid
/// for the next.
pub fn table_version(created: SystemTime) -> u64 {
    since_epoch(created).as_nanos() as u64
}

fn millis(time: SystemTime) -> u64 {
    since_epoch(time).as_millis() as u64
}

fn since_epoch(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target::Result { job: 7, part: 1, parts: 4 }
    }

    fn soon() -> SystemTime {
        SystemTime::now() + Duration::from_secs(60)
    }

    #[test]
    fn a_ticket_is_valid_for_its_own_tenant_only() {
        let tickets = Tickets::default();
        let ticket = tickets.issue(target(), "ann", soon()).ticket;
        assert_eq!(tickets.open(&ticket, &Caller::of_tenant("ann")).unwrap(), target());
        assert_eq!(tickets.open(&ticket, &Caller::of_tenant("bob")), Err(no_job(JobId(7))));
        let table = Target::Table { name: "t".into(), version: 1, first: 0, end: 1 };
        let of_table = tickets.issue(table, "ann", soon()).ticket;
        assert!(matches!(tickets.open(&of_table, &Caller::of_tenant("bob")), Err(Error::Denied(_))));
        assert!(matches!(Tickets::default().open(&ticket, &Caller::of_tenant("ann")), Err(Error::Invalid(_))));
    }

    #[test]
    fn a_ticket_with_any_byte_changed_is_refused() {
        let tickets = Tickets::default();
        let ticket = tickets.issue(target(), "", soon()).ticket;
        for at in 0..ticket.len() {
            let mut forged = ticket.to_vec();
            forged[at] ^= 1;
            assert!(matches!(tickets.open(&forged, &Caller::anonymous()), Err(Error::Invalid(_))), "byte {at}");
            assert!(matches!(tickets.open(&ticket[..at], &Caller::anonymous()), Err(Error::Invalid(_))), "cut at {at}");
        }
    }

    #[test]
    fn an_expired_ticket_is_not_found() {
        let tickets = Tickets::default();
        let ticket = tickets.issue(target(), "", SystemTime::now() - Duration::from_millis(1)).ticket;
        assert!(matches!(tickets.open(&ticket, &Caller::anonymous()), Err(Error::NotFound(_))));
    }
}
