//! UUIDs of file systems.

use std::fmt;
use std::str::FromStr;

use rustix::rand::{GetRandomFlags, getrandom};

/// The UUID of a file system, written as 8-4-4-4-12 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Uuid(pub(crate) [u8; 16]);

impl Uuid {
    /// A random UUID. *Source:* RFC 9562, version 4.
    pub(crate) fn new_v4() -> rustix::io::Result<Uuid> {
        let mut bytes = [0; 16];
        getrandom(&mut bytes, GetRandomFlags::empty())?;
        // Version 4, and the variant of the RFC.
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Uuid(bytes))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let hyphen = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{hyphen}{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for Uuid {
    type Err = ();

    fn from_str(text: &str) -> Result<Uuid, ()> {
        let number = u128::from_str_radix(&text.replace('-', ""), 16).map_err(|_| ())?;
        let uuid = Uuid(number.to_be_bytes());
        // Each UUID has one text: capitals, and dashes in other places, are rejected.
        if uuid.to_string() == text { Ok(uuid) } else { Err(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_uuid_is_version_4_and_parses_back() {
        let uuid = Uuid::new_v4().unwrap();
        let text = uuid.to_string();
        assert_eq!((text.len(), &text[14..15], text.parse()), (36, "4", Ok(uuid)));
        assert_ne!(Uuid::new_v4(), Ok(uuid));
        for invalid in ["", "x", &text[1..], &text.to_uppercase(), &text.replace('-', "")] {
            assert_eq!(invalid.parse::<Uuid>(), Err(()), "{invalid}");
        }
    }
}
