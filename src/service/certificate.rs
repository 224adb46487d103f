//! Names in a client's certificate, and validity of the server's own certificate.
//!
//! TLS checks who signed a certificate. This file repeats no check of TLS.

use std::time::SystemTime;

use x509_parser::asn1_rs::Tag;
use x509_parser::error::X509Error;
use x509_parser::prelude::{ASN1Time, FromDer, GeneralName, X509Certificate};

use crate::{Error, Result};

/// Maximum size of a tenant's name, in bytes. Longer names are left out.
const NAME_BYTES_MAX: usize = 256;

/// Tags of the alternative names that are read as text (RFC 5280, section 4.2.1.6).
const DNS_NAME: Tag = Tag(2);
const URI: Tag = Tag(6);

/// Encodings of a common name's text that are read. RFC 5280 has new certificates use the first two
/// only.
const TEXT: [Tag; 3] = [Tag::Utf8String, Tag::PrintableString, Tag::Ia5String];

/// Returns the names of a certificate's subject, the main name first. Common names come before the
/// DNS names and URIs of its alternative names. Names that cannot be written on one line of a file
/// or a log are left out.
///
/// # Errors
/// [`Error::Unauthenticated`] for bytes that are no certificate, or for a certificate without a
/// name.
pub(super) fn names(der: &[u8]) -> Result<Vec<String>> {
    let unreadable = || Error::Unauthenticated("this server cannot read the client's certificate".into());
    let (_, certificate) = X509Certificate::from_der(der).map_err(|_| unreadable())?;
    let names = all_names(&certificate).map_err(|_| unreadable())?;
    let is_sound =
        |name: &&str| !name.trim().is_empty() && name.len() <= NAME_BYTES_MAX && !name.chars().any(char::is_control);
    let names: Vec<String> = names.into_iter().filter(is_sound).map(ToString::to_string).collect();
    match names.is_empty() {
        true => Err(Error::Unauthenticated(
            "the client's certificate names no tenant: it has no common name, and no DNS name or URI among its alternative \
             names"
                .into(),
        )),
        false => Ok(names),
    }
}

/// Describes the dates between which a certificate is valid, if `now` is not between them. `None`
/// for a certificate that is valid or cannot be read.
pub(super) fn out_of_date(der: &[u8], now: SystemTime) -> Option<String> {
    match validity(der)? {
        (_, end) if end < now => Some(format!("expired on {}", humantime::format_rfc3339_seconds(end))),
        (start, _) if now < start => Some(format!("is not valid before {}", humantime::format_rfc3339_seconds(start))),
        _ => None,
    }
}

/// Returns the time at which a certificate expires; `None` for one that cannot be read.
pub(super) fn valid_until(der: &[u8]) -> Option<SystemTime> {
    validity(der).map(|(_, end)| end)
}

/// Returns the times between which a certificate is valid.
fn validity(der: &[u8]) -> Option<(SystemTime, SystemTime)> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    // `humantime` cannot write an earlier date.
    let time = |time: ASN1Time| SystemTime::from(time.to_datetime()).max(SystemTime::UNIX_EPOCH);
    let validity = certificate.validity();
    Some((time(validity.not_before), time(validity.not_after)))
}

/// Returns common names, the most specific first, then DNS names and URIs.
fn all_names<'a>(certificate: &'a X509Certificate<'_>) -> Result<Vec<&'a str>, X509Error> {
    let common = certificate.subject().iter_common_name().filter(|name| TEXT.contains(&name.attr_value().tag()));
    let mut names: Vec<&str> = common.map(|name| name.as_str()).collect::<Result<_, _>>()?;
    names.reverse();
    let alternative = certificate.subject_alternative_name()?;
    for name in alternative.iter().flat_map(|extension| &extension.value.general_names) {
        match name {
            GeneralName::DNSName(name) | GeneralName::URI(name) => names.push(name),
            GeneralName::Invalid(DNS_NAME | URI, _) => return Err(X509Error::InvalidExtensions),
            _ => {}
        }
    }
    Ok(names)
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
    fn a_certificate_is_identified_by_its_common_name_or_else_its_alternative_names() {
        let dns = SanType::DnsName("ann.example".try_into().unwrap());
        let uri = SanType::URI("spiffe://example/ann".try_into().unwrap());
        let address = SanType::IpAddress([127, 0, 0, 1].into());
        let of = |name, alternatives| names(&certificate(name, alternatives)).unwrap();
        assert_eq!(of(Some("ann"), vec![uri.clone(), address, dns]), ["ann", "spiffe://example/ann", "ann.example"]);
        assert_eq!(of(None, vec![uri]), ["spiffe://example/ann"]);
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "staff");
        params.distinguished_name.push(DnType::OrganizationName, "example");
        params.distinguished_name.push(DnType::CustomDnType(vec![2, 5, 4, 3]), "ann");
        let several = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert_eq!(names(several.der()).unwrap(), ["ann", "staff"], "the most specific comes last in a certificate");
    }

    #[test]
    fn a_certificate_with_a_name_that_is_not_text_is_refused() {
        let whole = certificate(Some("carol"), vec![SanType::DnsName("ann.example".try_into().unwrap())]);
        for name in ["carol", "ann.example"] {
            let mut wrong = whole.clone();
            // The first "carol" is the issuer's.
            let at = wrong.windows(name.len()).rposition(|bytes| bytes == name.as_bytes()).unwrap();
            wrong[at] = 0xff;
            assert!(matches!(names(&wrong), Err(Error::Unauthenticated(_))), "{name}");
        }
    }

    #[test]
    fn a_certificate_without_a_valid_tenant_name_is_refused() {
        for name in [None, Some(" "), Some("ann\nadmin"), Some("a\0b"), Some(&*"x".repeat(300))] {
            let refused = names(&certificate(name, Vec::new()));
            assert!(matches!(refused, Err(Error::Unauthenticated(_))), "{name:?}: {refused:?}");
        }
        assert!(matches!(names(b"no certificate"), Err(Error::Unauthenticated(_))));
    }

    #[test]
    fn a_certificate_is_valid_from_its_first_day_to_its_last() {
        use std::time::Duration;
        let of = |years: [i32; 2]| {
            let mut params = CertificateParams::default();
            params.not_before = rcgen::date_time_ymd(years[0], 2, 3);
            params.not_after = rcgen::date_time_ymd(years[1], 4, 5);
            params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
        };
        let at = |time: &str| humantime::parse_rfc3339(time).unwrap();
        let day = Duration::from_secs(24 * 3600);
        // From 2050 on, certificates encode times in another way.
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

    /// TLS passes on only certificates that parse in full. This test covers a later version of TLS
    /// that does not.
    #[test]
    fn a_certificate_truncated_at_any_byte_is_refused() {
        let whole = certificate(Some("ann"), vec![SanType::DnsName("ann.example".try_into().unwrap())]);
        assert_eq!(names(&whole).unwrap(), ["ann", "ann.example"]);
        for len in 0..whole.len() {
            assert!(names(&whole[..len]).is_err(), "{len} of {} bytes", whole.len());
        }
        // No change of a single byte may cause a panic.
        for at in 0..whole.len() {
            for value in [0x00, 0x30, 0x7f, 0x80, 0x83, 0xff] {
                let mut wrong = whole.clone();
                wrong[at] = value;
                let _ = (names(&wrong), out_of_date(&wrong, SystemTime::UNIX_EPOCH));
            }
        }
    }
}
