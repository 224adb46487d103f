//! The names in a client's certificate, and when the server's own are good.
//!
//! TLS parses certificates and checks who signed them, so this reads no more of X.509 (RFC 5280, section 4.1) than the way to
//! these, and refuses what it does not understand.
//!
//! ```text
//!   Certificate ─ tbsCertificate ─┬─ [0] version, serial number, algorithm, issuer
//!                                 ├─ validity ─► from when, until when
//!                                 ├─ subject ─ sets of (type, value) ─► common names
//!                                 ├─ key, unique identifiers
//!                                 └─ [3] extensions ─ subjectAltName ─► DNS names, URIs
//! ```

use std::time::SystemTime;

use crate::{Error, Result};

/// Longer names are no names of tenants.
const NAME_BYTES_MAX: usize = 256;

/// Tags of DER (X.690, section 8).
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_IDENTIFIER: u8 = 0x06;
const OCTET_STRING: u8 = 0x04;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
const IA5_STRING: u8 = 0x16;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;
const DNS_NAME: u8 = 0x82;
const URI: u8 = 0x86;

/// The object identifiers id-at-commonName (2.5.4.3) and id-ce-subjectAltName (2.5.29.17).
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
const SUBJECT_ALTERNATIVE_NAME: &[u8] = &[0x55, 0x1d, 0x11];

/// The names of a certificate's subject, the one it is known by first: its common names, then the DNS names and URIs of its
/// alternative names. Names that could not be written on one line of a file or a log are left out.
///
/// # Errors
/// [`Error::Unauthenticated`] for what is no certificate, or one without a name.
pub(super) fn names(der: &[u8]) -> Result<Vec<String>> {
    let names = read(der)
        .ok_or_else(|| Error::Unauthenticated("the client's certificate is none that this server can read".into()))?;
    let is_sound =
        |name: &&str| !name.trim().is_empty() && name.len() <= NAME_BYTES_MAX && !name.chars().any(char::is_control);
    let names: Vec<String> = names.into_iter().filter(is_sound).map(ToString::to_string).collect();
    match names.is_empty() {
        true => Err(Error::Unauthenticated(
            "the client's certificate has no common name, and no DNS name or URI among its alternative names, to know its \
             tenant by"
                .into(),
        )),
        false => Ok(names),
    }
}

/// What a certificate's validity has against it at a time, with the date; `None` for one that is good, and for what cannot be read.
pub(super) fn out_of_date(der: &[u8], now: SystemTime) -> Option<String> {
    // Dates that are written so sort as they follow on each other.
    let now = humantime::format_rfc3339_seconds(now).to_string();
    match validity(der)? {
        [_, end] if end < now => Some(format!("expired on {end}")),
        [start, _] if now < start => Some(format!("is not valid before {start}")),
        _ => None,
    }
}

/// From when until when a certificate is good, as RFC 3339 writes it.
fn validity(der: &[u8]) -> Option<[String; 2]> {
    let mut fields = behind_issuer(der)?;
    let mut times = Der(fields.expect(SEQUENCE)?);
    Some([time(times.next()?)?, time(times.next()?)?])
}

/// A time as RFC 5280, section 4.1.2.5, has it written: in seconds, of Greenwich.
fn time((tag, digits): (u8, &[u8])) -> Option<String> {
    let digits = std::str::from_utf8(digits).ok()?.strip_suffix('Z')?;
    if !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let digits = match (tag, digits.len()) {
        (UTC_TIME, 12) => format!("{}{digits}", if digits < "50" { "20" } else { "19" }),
        (GENERALIZED_TIME, 14) => digits.to_owned(),
        _ => return None,
    };
    let [year, month, day] = [&digits[..4], &digits[4..6], &digits[6..8]];
    let [hour, minute, second] = [&digits[8..10], &digits[10..12], &digits[12..]];
    Some(format!("{year}-{month}-{day}T{hour}:{minute}:{second}Z"))
}

/// What comes in a certificate from its validity on.
fn behind_issuer(der: &[u8]) -> Option<Der<'_>> {
    let mut certificate = Der(Der(der).expect(SEQUENCE)?);
    let mut fields = Der(certificate.expect(SEQUENCE)?);
    fields.take_if(VERSION)?;
    // Serial number, algorithm, issuer.
    for _ in 0..3 {
        fields.next()?;
    }
    Some(fields)
}

/// `None` for what is no certificate.
fn read(der: &[u8]) -> Option<Vec<&str>> {
    let mut fields = behind_issuer(der)?;
    // Validity.
    fields.next()?;
    let mut names = common_names(fields.expect(SEQUENCE)?)?;
    while let Some((tag, content)) = fields.next() {
        if tag == EXTENSIONS {
            names.extend(alternative_names(Der(content).expect(SEQUENCE)?)?);
        }
    }
    fields.0.is_empty().then_some(names)
}

/// Of a subject: a sequence of sets of attributes, the least specific first.
fn common_names(subject: &[u8]) -> Option<Vec<&str>> {
    let mut names = Vec::new();
    let mut sets = Der(subject);
    while !sets.0.is_empty() {
        let mut attributes = Der(sets.expect(SET)?);
        while !attributes.0.is_empty() {
            let mut attribute = Der(attributes.expect(SEQUENCE)?);
            let is_common_name = attribute.expect(OBJECT_IDENTIFIER)? == COMMON_NAME;
            let (tag, value) = attribute.next()?;
            // Other kinds of text went out of use with the last century.
            if is_common_name && [UTF8_STRING, PRINTABLE_STRING, IA5_STRING].contains(&tag) {
                names.insert(0, std::str::from_utf8(value).ok()?);
            }
        }
    }
    Some(names)
}

fn alternative_names(extensions: &[u8]) -> Option<Vec<&str>> {
    let mut names = Vec::new();
    let mut extensions = Der(extensions);
    while !extensions.0.is_empty() {
        let mut extension = Der(extensions.expect(SEQUENCE)?);
        if extension.expect(OBJECT_IDENTIFIER)? != SUBJECT_ALTERNATIVE_NAME {
            continue;
        }
        // Whether it is critical may stand before it.
        let (mut tag, mut value) = extension.next()?;
        if tag != OCTET_STRING {
            (tag, value) = extension.next()?;
        }
        let mut alternatives = Der((tag == OCTET_STRING).then_some(Der(value).expect(SEQUENCE)?)?);
        while let Some((tag, value)) = alternatives.next() {
            if [DNS_NAME, URI].contains(&tag) {
                names.push(std::str::from_utf8(value).ok()?);
            }
        }
    }
    Some(names)
}

/// What is left to read of some DER: elements of a tag, a length and a content.
struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    /// The next element. `None` at the end, and for one that is cut short or longer than any certificate.
    fn next(&mut self) -> Option<(u8, &'a [u8])> {
        let (&[tag, first], rest) = self.0.split_first_chunk()?;
        let (len, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            0x81..=0x83 => {
                let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                (digits.iter().fold(0, |len, &digit| len << 8 | usize::from(digit)), rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(len)?;
        self.0 = rest;
        Some((tag, content))
    }

    /// The content of the next element, which must have that tag.
    fn expect(&mut self, tag: u8) -> Option<&'a [u8]> {
        self.next().filter(|(found, _)| *found == tag).map(|(_, content)| content)
    }

    /// Passes over the next element if it has that tag. `None` when it cannot be read.
    fn take_if(&mut self, tag: u8) -> Option<()> {
        if self.0.first() == Some(&tag) {
            self.next()?;
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};

    use super::*;

    fn certificate(common_name: Option<&str>, alternatives: Vec<SanType>) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        if let Some(name) = common_name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params.subject_alt_names = alternatives;
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn a_certificate_is_known_by_its_common_name_and_then_by_its_alternatives() {
        let dns = SanType::DnsName("ann.example".try_into().unwrap());
        let uri = SanType::URI("spiffe://example/ann".try_into().unwrap());
        let address = SanType::IpAddress([127, 0, 0, 1].into());
        let of = |name, alternatives| names(&certificate(name, alternatives)).unwrap();
        assert_eq!(of(Some("ann"), vec![uri.clone(), address, dns]), ["ann", "spiffe://example/ann", "ann.example"]);
        assert_eq!(of(None, vec![uri]), ["spiffe://example/ann"]);
    }

    #[test]
    fn a_certificate_without_a_name_that_is_fit_for_a_tenant_is_refused() {
        for name in [None, Some(" "), Some("ann\nadmin"), Some("a\0b"), Some(&*"x".repeat(300))] {
            let refused = names(&certificate(name, Vec::new()));
            assert!(matches!(refused, Err(Error::Unauthenticated(_))), "{name:?}: {refused:?}");
        }
        assert!(matches!(names(b"no certificate"), Err(Error::Unauthenticated(_))));
    }

    #[test]
    fn a_certificate_is_good_from_its_first_day_to_its_last() {
        use std::time::Duration;
        let of = |years: [i32; 2]| {
            let mut params = CertificateParams::default();
            params.not_before = rcgen::date_time_ymd(years[0], 2, 3);
            params.not_after = rcgen::date_time_ymd(years[1], 4, 5);
            params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
        };
        let at = |time: &str| humantime::parse_rfc3339(time).unwrap();
        let day = Duration::from_secs(24 * 3600);
        // From 2050 on, times are written in another way.
        for years in [[2020, 2030], [1999, 2049], [2049, 2051], [2050, 9999]] {
            let certificate = of(years);
            let [start, end] = [format!("{}-02-03T00:00:00Z", years[0]), format!("{}-04-05T00:00:00Z", years[1])];
            for good in [at(&start), at(&start) + day, at(&end) - day, at(&end)] {
                assert_eq!(out_of_date(&certificate, good), None, "{years:?}");
            }
            let early = format!("is not valid before {start}");
            assert_eq!(out_of_date(&certificate, at(&start) - day), Some(early), "{years:?}");
            let late = format!("expired on {end}");
            assert_eq!(out_of_date(&certificate, at(&end) + day), Some(late), "{years:?}");
        }
        assert_eq!(out_of_date(b"no certificate", SystemTime::now()), None);
    }

    /// TLS hands on whole certificates only; this is for the day when something else does.
    #[test]
    fn a_certificate_that_is_cut_short_anywhere_is_refused() {
        let whole = certificate(Some("ann"), vec![SanType::DnsName("ann.example".try_into().unwrap())]);
        assert_eq!(names(&whole).unwrap(), ["ann", "ann.example"]);
        for len in 0..whole.len() {
            assert!(names(&whole[..len]).is_err(), "{len} of {} bytes", whole.len());
        }
        // Whatever a byte is changed to, nothing panics.
        for at in 0..whole.len() {
            for value in [0x00, 0x30, 0x7f, 0x80, 0x83, 0xff] {
                let mut wrong = whole.clone();
                wrong[at] = value;
                let _ = (names(&wrong), out_of_date(&wrong, SystemTime::UNIX_EPOCH));
            }
        }
    }
}
