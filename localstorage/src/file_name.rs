//! Names and relative paths, parsed before the file system sees them.

use std::borrow::Borrow;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::str::FromStr;

use thiserror::Error;

/// The longest name that Linux file systems accept, in bytes.
///
/// *Source:* `NAME_MAX` in `linux/limits.h`.
const NAME_MAX: usize = 255;

/// The name of a directory entry: one component of a path.
///
/// Invariant: 1 to 255 bytes, none of them `/` or NUL, and neither `.` nor `..`. It need not be UTF-8.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileName(OsString);

impl FileName {
    /// Checks the name.
    ///
    /// # Errors
    /// [`InvalidName`] with the rule that the name breaks.
    pub fn try_new(name: impl Into<OsString>) -> Result<Self, InvalidName> {
        let name = name.into();
        check_name(name.as_bytes())?;
        Ok(Self(name))
    }

    /// The name as stored by the file system.
    pub fn as_os_str(&self) -> &OsStr {
        &self.0
    }
}

impl FromStr for FileName {
    type Err = InvalidName;

    fn from_str(name: &str) -> Result<Self, InvalidName> {
        Self::try_new(name)
    }
}

impl AsRef<Path> for FileName {
    fn as_ref(&self) -> &Path {
        Path::new(&self.0)
    }
}

impl AsRef<OsStr> for FileName {
    fn as_ref(&self) -> &OsStr {
        &self.0
    }
}

impl Borrow<OsStr> for FileName {
    fn borrow(&self) -> &OsStr {
        &self.0
    }
}

impl PartialEq<str> for FileName {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

impl PartialEq<&str> for FileName {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

impl fmt::Debug for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Replaces invalid UTF-8.
impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.display(), f)
    }
}

/// A defect of a name, or of a component of a relative path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidName {
    /// A component is empty: two adjacent slashes, an empty path, or the start of an absolute path.
    #[error("path is absolute or has an empty component: use a relative path")]
    Empty,
    /// The directory itself: omit it.
    #[error("path contains \".\"")]
    Dot,
    /// The parent directory: relative paths never lead upwards.
    #[error("path contains \"..\"")]
    DotDot,
    /// A single name contains a slash.
    #[error("name contains a slash")]
    Slash,
    /// A name contains a NUL byte, which no path can.
    #[error("name contains a NUL byte")]
    Nul,
    /// A name is longer than file systems accept.
    #[error("name is longer than {NAME_MAX} bytes")]
    TooLong,
    /// Names of this form are reserved for files being written; see [`Dir::write`](crate::Dir::write) and
    /// [`LayoutDir::commit_files`](crate::tree::LayoutDir::commit_files).
    #[error("name is reserved for temporary files")]
    Reserved,
}

fn check_name(name: &[u8]) -> Result<(), InvalidName> {
    match name {
        b"" => Err(InvalidName::Empty),
        b"." => Err(InvalidName::Dot),
        b".." => Err(InvalidName::DotDot),
        _ if name.contains(&b'/') => Err(InvalidName::Slash),
        _ if name.contains(&0) => Err(InvalidName::Nul),
        _ if name.len() > NAME_MAX => Err(InvalidName::TooLong),
        _ => Ok(()),
    }
}

/// Checks each component of a relative path and splits off the last one. The first part may be empty.
pub(crate) fn split_last(path: &Path) -> Result<(&Path, &OsStr), InvalidName> {
    let bytes = path.as_os_str().as_bytes();
    for component in bytes.split(|&byte| byte == b'/') {
        check_name(component)?;
        // A file that a caller wrote under such a name would be removed as stale.
        if is_temp_file_name(component) {
            return Err(InvalidName::Reserved);
        }
    }
    let (parent, name) = match bytes.iter().rposition(|&byte| byte == b'/') {
        Some(slash) => (&bytes[..slash], &bytes[slash + 1..]),
        None => (&bytes[..0], bytes),
    };
    Ok((Path::new(OsStr::from_bytes(parent)), OsStr::from_bytes(name)))
}

const TEMP_FILE_PREFIX: &[u8] = b".nodekeel-";
const TEMP_FILE_SUFFIX: &[u8] = b".new";

/// The name of a file being written, before it replaces another. It does not contain the name of that file,
/// so that the longest name has a temporary one, too.
pub(crate) fn temp_file_name(random: u64) -> OsString {
    format!(".nodekeel-{random:016x}.new").into()
}

/// Returns whether [`temp_file_name`] creates names of this form.
pub(crate) fn is_temp_file_name(name: &[u8]) -> bool {
    let hex = name.strip_prefix(TEMP_FILE_PREFIX).and_then(|rest| rest.strip_suffix(TEMP_FILE_SUFFIX));
    hex.is_some_and(|hex| hex.len() == 16 && hex.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_split_before_its_last_name() {
        let parts = |path: &'static str| split_last(Path::new(path)).map(|(a, b)| (a.to_str(), b.to_str()));
        assert_eq!(parts("a"), Ok((Some(""), Some("a"))));
        assert_eq!(parts("a/b/c"), Ok((Some("a/b"), Some("c"))));
    }

    #[test]
    fn an_invalid_relative_path_is_rejected() {
        let long = "x".repeat(256);
        for (path, why) in [
            ("", InvalidName::Empty),
            ("/", InvalidName::Empty),
            ("/etc", InvalidName::Empty),
            ("a/", InvalidName::Empty),
            ("a//b", InvalidName::Empty),
            (".", InvalidName::Dot),
            ("./a", InvalidName::Dot),
            ("..", InvalidName::DotDot),
            ("a/../b", InvalidName::DotDot),
            ("a\0b", InvalidName::Nul),
            (&long, InvalidName::TooLong),
            (".nodekeel-0123456789abcdef.new", InvalidName::Reserved),
        ] {
            assert_eq!(split_last(Path::new(path)), Err(why), "{path:?}");
        }
        assert_eq!(FileName::try_new("a/b"), Err(InvalidName::Slash));
    }

    #[test]
    fn temp_files_are_recognized_by_their_names() {
        assert!(
            is_temp_file_name(temp_file_name(0).as_bytes())
                && is_temp_file_name(temp_file_name(u64::MAX).as_bytes())
        );
        for other in [".nodekeel-.new", ".nodekeel-0123456789abcdeX.new", "nodekeel-0123456789abcdef.new"] {
            assert!(!is_temp_file_name(other.as_bytes()), "{other}");
        }
    }
}
