//! The type of a partition: a GUID.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::super::uuid::Uuid;

/// The type of a partition in a GPT, written as 8-4-4-4-12 hexadecimal digits. Both cases are parsed; small letters are
/// printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionType(Uuid);

/// A text that is not the type of a partition.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("can't parse partition type {text:?}: expected a GUID such as {}", PartitionType::NODEKEEL_DATA)]
pub struct InvalidPartitionType {
    text: String,
}

impl PartitionType {
    /// A node's data partition. Other programs do not know this type, and leave such a partition alone.
    pub const NODEKEEL_DATA: PartitionType = PartitionType(Uuid([
        0x50, 0xf0, 0xda, 0x07, 0xf6, 0x92, 0x49, 0xa7, 0x8a, 0x4c, 0x25, 0xa2, 0x07, 0xfd, 0x3f, 0x25,
    ]));

    /// An EFI system partition. *Source:* UEFI specification 2.10, 5.3.3.
    pub const EFI_SYSTEM: PartitionType = PartitionType(Uuid([
        0xc1, 0x2a, 0x73, 0x28, 0xf8, 0x1f, 0x11, 0xd2, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b,
    ]));

    pub(super) fn from_gpt_bytes(bytes: [u8; 16]) -> PartitionType {
        PartitionType(guid_from_gpt_bytes(bytes))
    }

    #[cfg(test)]
    pub(super) fn to_gpt_bytes(self) -> [u8; 16] {
        guid_from_gpt_bytes(self.0.0).0
    }

    /// Returns whether it marks a free entry of the table.
    pub(super) fn is_unused(self) -> bool {
        self.0.0 == [0; 16]
    }
}

/// In a GPT, the first three groups of digits are little-endian numbers.
pub(super) fn guid_from_gpt_bytes(mut bytes: [u8; 16]) -> Uuid {
    bytes[..4].reverse();
    bytes[4..6].reverse();
    bytes[6..8].reverse();
    Uuid(bytes)
}

impl fmt::Display for PartitionType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for PartitionType {
    type Err = InvalidPartitionType;

    fn from_str(text: &str) -> Result<PartitionType, InvalidPartitionType> {
        let uuid = text.to_ascii_lowercase().parse();
        uuid.map(PartitionType).map_err(|()| InvalidPartitionType { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_is_parsed_in_both_cases_and_read_from_its_bytes_in_a_gpt() {
        let text = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B";
        assert_eq!(text.parse(), Ok(PartitionType::EFI_SYSTEM));
        assert_eq!(PartitionType::EFI_SYSTEM.to_string(), text.to_lowercase());
        assert_eq!(PartitionType::NODEKEEL_DATA.to_string(), "50f0da07-f692-49a7-8a4c-25a207fd3f25");
        let on_disk = *b"\x28\x73\x2a\xc1\x1f\xf8\xd2\x11\xba\x4b\x00\xa0\xc9\x3e\xc9\x3b";
        assert_eq!(PartitionType::from_gpt_bytes(on_disk), PartitionType::EFI_SYSTEM);
        let invalid = "esp".parse::<PartitionType>().unwrap_err();
        assert!(invalid.to_string().starts_with("can't parse partition type \"esp\": expected a GUID"));
    }
}
