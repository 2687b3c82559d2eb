//! Checks over arbitrary input. Each panics if something does not hold.

use crate::mounts::{self, Mount};
use crate::{Bytes, Inodes};

/// A text is a quantity or not; one is displayed so that it is read as the same, and nothing is larger than its digits
/// say.
pub fn check_quantity(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    if let Ok(bytes) = text.parse::<Bytes>() {
        assert_eq!(bytes.to_string().parse(), Ok(bytes), "{text:?}");
        let digits = text.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
        assert!(digits.parse().is_ok_and(|digits: u64| bytes.0 >= digits), "{text:?} became {bytes}");
    }
    if let Ok(inodes) = text.parse::<Inodes>() {
        assert_eq!(inodes.to_string().parse(), Ok(inodes), "{text:?}");
        assert_eq!(text.parse(), Ok(Bytes(inodes.0)), "both are read alike");
    }
}

/// A line is a mount or not; one is printed so that it is read as the same, on one line of ASCII.
pub fn check_mountinfo(text: &[u8]) {
    for mount in mounts::parse(text) {
        let line = mount.to_string();
        assert!(line.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{line:?}");
        assert_eq!(Mount::parse(line.as_bytes()), Some(mount), "{line:?}");
    }
    let lines = text.split(|byte| *byte == b'\n').count();
    assert!(mounts::parse(text).count() <= lines);
}

/// What fdinfo says of a mount is a number or nothing.
pub fn check_fdinfo(text: &[u8]) {
    if let Some(id) = mounts::mount_id(text) {
        assert_eq!(mounts::mount_id(format!("pos:\t0\nmnt_id:\t{id}\n").as_bytes()), Some(id));
    }
}
