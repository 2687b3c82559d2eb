//! The records of a pax header.
//!
//! *Source:* POSIX.1-2017, pax, "pax Extended Header": `length key=value\n`, where the length counts itself.

/// The attributes that a pax header gives the next entry.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PaxHeader {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    /// The entry is a GNU sparse file: its data are not its content.
    pub(super) is_sparse: bool,
    /// The bytes of the extended attributes of the entry.
    pub(super) attribute_bytes: u64,
}

impl PaxHeader {
    /// `None` for invalid records.
    pub(super) fn parse(mut records: &[u8]) -> Option<Self> {
        let mut pax = Self::default();
        while !records.is_empty() {
            // The longest number that fits has 20 digits: garbage is not searched any further.
            let space = records.iter().take(20).position(|byte| *byte == b' ')?;
            let length: usize = std::str::from_utf8(&records[..space]).ok()?.parse().ok()?;
            let record = records.get(space + 1..length)?.strip_suffix(b"\n")?;
            let equals = record.iter().position(|byte| *byte == b'=')?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => pax.path = Some(value.to_vec()),
                b"linkpath" => pax.link = Some(value.to_vec()),
                b"size" => pax.size = Some(std::str::from_utf8(value).ok()?.parse().ok()?),
                key if key.starts_with(b"GNU.sparse.") => pax.is_sparse = true,
                key if key.starts_with(b"SCHILY.xattr.") => pax.attribute_bytes += value.len() as u64,
                // Times and owners are of no use here: a blob has only a name and a size.
                _ => {}
            }
            records = &records[length..];
        }
        Some(pax)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_by_their_length() {
        let pax = PaxHeader::parse(b"11 path=ab\n20 linkpath=x\ny=1234\n12 size=123\n16 mtime=1.5123\n");
        assert!(pax.is_none(), "a wrong length");
        let pax = PaxHeader::parse(b"11 path=ab\n17 linkpath=x\ny=\n12 size=123\n").expect("records");
        assert_eq!(
            (pax.path.as_deref(), pax.link.as_deref(), pax.size),
            (Some(&b"ab"[..]), Some(&b"x\ny="[..]), Some(123))
        );
        assert!(PaxHeader::parse(b"22 GNU.sparse.major=1\n").expect("records").is_sparse);
    }

    #[test]
    fn invalid_records_are_rejected() {
        for text in [
            "x",
            "5",
            "0 ",
            "3 =\n",
            "99 path=ab\n",
            "11 path=ab ",
            "18446744073709551616 a=b\n",
            "12 size=-12\n",
        ] {
            let parsed = PaxHeader::parse(text.as_bytes());
            assert!(parsed.is_none() || parsed == Some(PaxHeader::default()), "{text}");
        }
    }
}
