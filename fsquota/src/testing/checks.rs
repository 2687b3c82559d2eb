//! Checks over arbitrary input. Each panics if its property does not hold.

use crate::owner::OwnerRecord;
use crate::{Bytes, Inodes};

/// Any text parses as a quantity or is rejected. A quantity parses back from its `Display`, and is not less
/// than its digits.
pub fn fuzz_quantity(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    if let Ok(bytes) = text.parse::<Bytes>() {
        assert_eq!(bytes.to_string().parse(), Ok(bytes), "{text:?}");
        let digits = text.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
        assert!(digits.parse().is_ok_and(|digits: u64| bytes.0 >= digits), "{text:?} became {bytes}");
    }
    if let Ok(inodes) = text.parse::<Inodes>() {
        assert_eq!(inodes.to_string().parse(), Ok(inodes), "{text:?}");
        assert_eq!(text.parse(), Ok(Bytes(inodes.0)), "both parse alike");
    }
}

/// Any value of the owner's attribute is a mark or damaged. A mark parses back from what is written of it.
pub fn fuzz_owner_mark(value: &[u8]) {
    if let Some(record) = OwnerRecord::parse(value) {
        assert_eq!(OwnerRecord::parse(record.to_string().as_bytes()), Some(record));
    }
}
