//! Names and relative paths, parsed before the file system sees them.

use std::borrow::Borrow;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::str::FromStr;

use thiserror::Error;

/// The longest name that Linux's file systems take, in bytes.
///
/// *Source:* `NAME_MAX` in `linux/limits.h`.
const NAME_MAX: usize = 255;

/// A name in a directory: one component of a path.
///
/// Invariant: 1 to 255 bytes, none of them `/` or NUL, and neither `.` nor `..`. It need not be UTF-8.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(OsString);

impl Name {
    /// Checks the name.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn try_new(name: impl Into<OsString>) -> Result<Self, InvalidName> {
        let name = name.into();
        check(name.as_bytes())?;
        Ok(Self(name))
    }

    /// The name as the file system has it.
    pub fn as_os_str(&self) -> &OsStr {
        &self.0
    }
}

impl FromStr for Name {
    type Err = InvalidName;

    fn from_str(name: &str) -> Result<Self, InvalidName> {
        Self::try_new(name)
    }
}

impl AsRef<Path> for Name {
    fn as_ref(&self) -> &Path {
        Path::new(&self.0)
    }
}

impl AsRef<OsStr> for Name {
    fn as_ref(&self) -> &OsStr {
        &self.0
    }
}

impl Borrow<OsStr> for Name {
    fn borrow(&self) -> &OsStr {
        &self.0
    }
}

impl PartialEq<str> for Name {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

impl PartialEq<&str> for Name {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// With what is no UTF-8 replaced.
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.display(), f)
    }
}

/// What keeps a name, or a component of a relative path, from being one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidName {
    /// There is nothing between two slashes, or nothing at all; an absolute path begins so.
    #[error("a component is empty, or the path is absolute")]
    Empty,
    /// The directory itself: leave it out.
    #[error("a component is \".\"")]
    Dot,
    /// The directory above: nothing above is ever reached by a relative path.
    #[error("a component is \"..\"")]
    DotDot,
    /// A slash in a single name.
    #[error("a name contains a slash")]
    Slash,
    /// No path can hold it.
    #[error("a name contains a NUL byte")]
    Nul,
    /// No file system takes it.
    #[error("a name is longer than {NAME_MAX} bytes")]
    TooLong,
    /// Names of this form are kept for files that are being written; see [`Dir::write`](crate::Dir::write) and
    /// [`Directory::commit`](crate::tree::Directory::commit).
    #[error("a name has the form of a file that is being written")]
    Reserved,
}

/// Checks a name's bytes.
fn check(name: &[u8]) -> Result<(), InvalidName> {
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

/// Checks each component of a relative path, and splits the last one off. The first part may be empty.
pub(crate) fn split(path: &Path) -> Result<(&Path, &OsStr), InvalidName> {
    let bytes = path.as_os_str().as_bytes();
    for component in bytes.split(|&byte| byte == b'/') {
        check(component)?;
        if is_sibling(component) {
            return Err(InvalidName::Reserved);
        }
    }
    let (parent, name) = match bytes.iter().rposition(|&byte| byte == b'/') {
        Some(slash) => (&bytes[..slash], &bytes[slash + 1..]),
        None => (&bytes[..0], bytes),
    };
    Ok((Path::new(OsStr::from_bytes(parent)), OsStr::from_bytes(name)))
}

const SIBLING_START: &[u8] = b".nodekeel-";
const SIBLING_END: &[u8] = b".new";

/// The name of a file that is being written, before it takes the place of another. It doesn't tell of whom: the
/// longest name has one, too.
pub(crate) fn sibling(random: u64) -> OsString {
    format!(".nodekeel-{random:016x}.new").into()
}

/// Whether [`sibling`] makes such names.
pub(crate) fn is_sibling(name: &[u8]) -> bool {
    let hex = name.strip_prefix(SIBLING_START).and_then(|rest| rest.strip_suffix(SIBLING_END));
    hex.is_some_and(|hex| hex.len() == 16 && hex.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_split_before_its_last_name() {
        let parts = |path: &'static str| split(Path::new(path)).map(|(a, b)| (a.to_str(), b.to_str()));
        assert_eq!(parts("a"), Ok((Some(""), Some("a"))));
        assert_eq!(parts("a/b/c"), Ok((Some("a/b"), Some("c"))));
    }

    #[test]
    fn what_is_no_plain_relative_path_is_refused() {
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
            assert_eq!(split(Path::new(path)), Err(why), "{path:?}");
        }
        assert_eq!(Name::try_new("a/b"), Err(InvalidName::Slash));
    }

    #[test]
    fn siblings_are_known_by_their_names() {
        assert!(is_sibling(sibling(0).as_bytes()) && is_sibling(sibling(u64::MAX).as_bytes()));
        for other in [".nodekeel-.new", ".nodekeel-0123456789abcdeX.new", "nodekeel-0123456789abcdef.new"] {
            assert!(!is_sibling(other.as_bytes()), "{other}");
        }
    }
}
