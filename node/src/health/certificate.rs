//! Certificates that expire soon, have expired, or are not valid yet.

use std::time::{Duration, SystemTime};

use thiserror::Error;
use x509_parser::pem::Pem;

use super::HealthCondition;

/// The time in which a certificate is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CertificateValidity {
    /// The first moment.
    pub not_before: SystemTime,
    /// The last moment.
    pub not_after: SystemTime,
}

/// The text has no certificate, or one that can't be parsed.
#[derive(Debug, Error)]
#[error(
    "can't parse the certificate: use a PEM file whose first certificate is that of the client or server"
)]
pub struct InvalidCertificate;

impl CertificateValidity {
    /// A certificate that is valid between these moments.
    pub fn new(not_before: SystemTime, not_after: SystemTime) -> Self {
        Self { not_before, not_after }
    }

    /// The validity of the first certificate of a PEM file.
    ///
    /// # Errors
    /// [`InvalidCertificate`].
    pub fn from_pem(text: &[u8]) -> Result<Self, InvalidCertificate> {
        let mut blocks = Pem::iter_from_buffer(text).map_while(Result::ok);
        // Other blocks, a key for example, may precede it. The certificates after the first one are its chain.
        let block = blocks.find(|block| block.label == "CERTIFICATE").ok_or(InvalidCertificate)?;
        let parsed = block.parse_x509().map_err(|_| InvalidCertificate)?;
        let validity = parsed.validity();
        let time = |seconds: i64| {
            // No certificate is older than 1970, and years beyond 9999 don't exist in one.
            SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
        };
        Ok(Self::new(time(validity.not_before.timestamp()), time(validity.not_after.timestamp())))
    }

    /// The condition of this object's certificate at this time: a warning from `warn_before` before its end on. Add a
    /// hint that tells how to renew it.
    pub fn condition(&self, object: &str, now: SystemTime, warn_before: Duration) -> Option<HealthCondition> {
        let Self { not_before, not_after } = *self;
        // Both moments are part of the validity (RFC 5280, 4.1.2.5).
        if let Ok(left) = not_before.duration_since(now)
            && !left.is_zero()
        {
            let problem = format!("its certificate is not valid for another {}", format_time(left));
            return Some(HealthCondition::problem(object, problem));
        }
        match not_after.duration_since(now) {
            Err(_) => {
                let ago = now.duration_since(not_after).unwrap_or_default();
                let problem = format!("its certificate expired {} ago", format_time(ago));
                Some(HealthCondition::problem(object, problem).since(Some(not_after)))
            }
            Ok(left) if left < warn_before => {
                let problem = format!("its certificate expires in {}", format_time(left));
                Some(HealthCondition::warning(object, problem))
            }
            Ok(_) => None,
        }
    }
}

/// A duration in its largest unit, rounded down.
fn format_time(time: Duration) -> String {
    let seconds = time.as_secs();
    let (count, unit) = match seconds {
        0..60 => (seconds, "second"),
        60..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    if count == 1 { format!("1 {unit}") } else { format!("{count} {unit}s") }
}

#[cfg(test)]
mod tests {
    use super::super::ConditionSeverity;
    use super::*;

    const DAY: u64 = 86_400;

    #[test]
    fn a_certificate_is_reported_before_its_validity_near_its_end_and_after_it() {
        use ConditionSeverity::{Problem, Warning};
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let validity = CertificateValidity::new(at(100 * DAY), at(465 * DAY));
        let condition = |seconds| validity.condition("/k.conf", at(seconds), Duration::from_secs(30 * DAY));
        for (now, expected) in [
            (98 * DAY, Some((Problem, "/k.conf: its certificate is not valid for another 2 days"))),
            (100 * DAY - 1, Some((Problem, "/k.conf: its certificate is not valid for another 1 second"))),
            (100 * DAY, None),
            (435 * DAY, None),
            (435 * DAY + 1, Some((Warning, "/k.conf: its certificate expires in 29 days"))),
            (465 * DAY - 7200, Some((Warning, "/k.conf: its certificate expires in 2 hours"))),
            (465 * DAY, Some((Warning, "/k.conf: its certificate expires in 0 seconds"))),
            (465 * DAY + 60, Some((Problem, "/k.conf: its certificate expired 1 minute ago"))),
        ] {
            let found = condition(now);
            let shown = found.as_ref().map(|found| (found.severity, found.to_string()));
            assert_eq!(shown, expected.map(|(severity, text)| (severity, text.to_owned())), "{now}");
        }
        assert_eq!(condition(466 * DAY).expect("expired").since, Some(at(465 * DAY)));
    }

    #[test]
    fn what_is_not_a_certificate_is_rejected() {
        let block =
            |label: &str, body: &str| format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n");
        for text in
            [String::new(), "text".into(), block("EC PRIVATE KEY", "AAAA"), block("CERTIFICATE", "AAAA")]
        {
            assert!(CertificateValidity::from_pem(text.as_bytes()).is_err(), "{text}");
        }
    }
}
