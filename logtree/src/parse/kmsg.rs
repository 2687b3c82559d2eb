//! Records of the kernel log.

use std::time::Duration;

use super::level_word::level_of_severity;
use crate::{FieldValue, LogField, LogMessage};

/// One record of `/dev/kmsg`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct KmsgRecord {
    /// The sequence number; a gap to the previous record means that records were overwritten before they were
    /// read.
    pub seq: u64,
    /// Time since boot, on the kernel's monotonic clock.
    pub since_boot: Duration,
    /// The syslog facility: 0 is the kernel, others are programs that wrote to `/dev/kmsg`.
    pub facility: u32,
    /// The message, without a time, which only the caller can compute from the time of boot. Its fields are
    /// the key=value lines after the text, and the `facility` if it is not the kernel's.
    pub message: LogMessage,
}

/// Parses a record of `/dev/kmsg`: `6,339,5140900,-;text`, then lines ` KEY=value`.
///
/// The severity is the lowest three bits of the first number: 0 and 1 are fatal, 2 and 3 errors, 4 is a
/// warning, 5 and 6 are information, 7 is debugging. Escaped bytes are decoded.
///
/// *Source:* Documentation/ABI/testing/dev-kmsg.
pub fn kmsg_record(record: &str) -> Option<KmsgRecord> {
    let (header, body) = record.split_once(';')?;
    let mut header = header.split(',');
    let priority: u32 = header.next()?.parse().ok()?;
    let seq = header.next()?.parse().ok()?;
    let since_boot = Duration::from_micros(header.next()?.parse().ok()?);
    // The flags mark continued records; header fields of later kernels are ignored.
    header.next()?;

    let level = level_of_severity(u64::from(priority & 7)).expect("three bits are a severity");
    let facility = priority >> 3;
    let mut lines = body.lines();
    let mut message = LogMessage::without_position(level, unescape_bytes(lines.next().unwrap_or_default()));
    message.fields = lines
        .filter_map(|line| line.strip_prefix(' ')?.split_once('='))
        .map(|(name, value)| LogField {
            name: name.to_owned(),
            value: FieldValue::Text(unescape_bytes(value)),
        })
        .collect();
    if facility != 0 {
        message = message.with_field("facility", u64::from(facility));
    }
    Some(KmsgRecord { seq, since_boot, facility, message })
}

/// Decodes `\xNN`, the kernel's escape for unprintable bytes and the backslash.
fn unescape_bytes(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut pieces = text.split("\\x");
    bytes.extend_from_slice(pieces.next().unwrap_or_default().as_bytes());
    for piece in pieces {
        match piece.split_at_checked(2).map(|(digits, rest)| (u8::from_str_radix(digits, 16), rest)) {
            Some((Ok(byte), rest)) => {
                bytes.push(byte);
                bytes.extend_from_slice(rest.as_bytes());
            }
            // Not from the kernel, which escapes every backslash: it stays as it is.
            _ => bytes.extend_from_slice(format!("\\x{piece}").as_bytes()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    /// Reference case 15: empty, no `;`, a plain record, a warning with continuation lines.
    #[test]
    fn records_parse_with_continuation_lines_as_fields() {
        assert_eq!(kmsg_record(""), None);
        assert_eq!(kmsg_record("6,1,2,- text"), None);
        assert_eq!(kmsg_record("6,1;text"), None);

        let record = kmsg_record("6,339,5140900,-;NET: Registered PF_INET6 protocol family\n").unwrap();
        assert_eq!((record.seq, record.since_boot), (339, Duration::from_micros(5_140_900)));
        assert_eq!((record.message.level, record.facility), (Level::Info, 0));
        assert_eq!(record.message.text, "NET: Registered PF_INET6 protocol family");

        let record = kmsg_record("4,1,2,-,caller=T1;link down\n SUBSYSTEM=net\n DEVICE=n2\n").unwrap();
        assert_eq!((record.message.level, record.message.text.as_str()), (Level::Warn, "link down"));
        let fields: Vec<_> =
            record.message.fields.iter().map(|f| format!("{}={}", f.name, f.value)).collect();
        assert_eq!(fields, ["SUBSYSTEM=net", "DEVICE=n2"]);
    }

    #[test]
    fn the_facility_does_not_hide_the_severity() {
        let record = kmsg_record("11,1,2,-;a program's error").unwrap();
        assert_eq!((record.message.level, record.facility), (Level::Error, 1));
        assert_eq!(record.message.fields[0].value, FieldValue::Uint(1));
    }

    #[test]
    fn escaped_bytes_are_decoded() {
        assert_eq!(unescape_bytes(r"a\x5cb\xc3\xbc\x0a"), "a\\bü\n");
        assert_eq!(unescape_bytes(r"\xzz \x1 \x"), r"\xzz \x1 \x");
        assert_eq!(unescape_bytes("\\xü"), "\\xü");
    }
}
