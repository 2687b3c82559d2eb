//! A layout as data: the declaration, before any file exists.

use std::fmt;
use std::path::Path;

use thiserror::Error;

use super::BrandNames;
use super::commit::COMMIT_RECORD;
use crate::file_name::{FileName, InvalidName, is_temp_file_name};
use crate::metadata::FileMode;

/// The longest path that a socket can be bound to, in bytes.
///
/// *Source:* unix(7): `sun_path` has 108 bytes, with a NUL at the end.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The kind of a [layout entry](super::LayoutEntry).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EntryShape {
    /// A regular file. Creating the layout does not create it: its first writer does.
    File,
    /// A socket, created by the program that listens on it. Its full path must be short enough.
    Socket,
    /// A named pipe, created by the program that reads from it.
    Fifo,
    /// A directory with its declared entries.
    Directory(&'static [DeclaredEntry]),
    /// A mount point, with the declared entries of the mounted file system.
    MountPoint(&'static [DeclaredEntry]),
}

impl EntryShape {
    /// The declared entries of a directory or mount point.
    pub const fn child_entries(self) -> &'static [DeclaredEntry] {
        match self {
            EntryShape::Directory(children) | EntryShape::MountPoint(children) => children,
            _ => &[],
        }
    }

    const fn is_directory(self) -> bool {
        matches!(self, EntryShape::Directory(_) | EntryShape::MountPoint(_))
    }

    /// Checks all entries below with these names expanded, as created at `root`.
    ///
    /// Literal names in a [`layout!`](crate::layout) are checked at compile time. This checks what depends on
    /// run time: the expansion of `names`, and the length of paths.
    ///
    /// # Errors
    /// The first problem, and the entry that has it.
    pub fn validate_at(self, names: &BrandNames, root: &Path) -> Result<(), InvalidLayout> {
        let mut seen: Vec<String> = Vec::new();
        for declared in self.child_entries() {
            let name = names.expand(declared.name).map_err(|problem| problem.at_entry(declared.name))?;
            if seen.contains(&name) {
                return Err(LayoutProblem::Duplicate.at_entry(&name));
            }
            declared.shape.validate_entry_at(names, &root.join(&name), &name, declared.mode)?;
            seen.push(name);
        }
        Ok(())
    }

    /// Checks an entry of this shape, and all entries below it, as created at `path`.
    pub(super) fn validate_entry_at(
        self,
        names: &BrandNames,
        path: &Path,
        name: &str,
        mode: FileMode,
    ) -> Result<(), InvalidLayout> {
        if let Err(why) = FileName::try_new(name) {
            return Err(LayoutProblem::InvalidName(why).at_entry(name));
        }
        // The next creation would replay such a file as a commit, or remove it as stale.
        if name == COMMIT_RECORD || is_temp_file_name(name.as_bytes()) {
            return Err(LayoutProblem::InvalidName(InvalidName::Reserved).at_entry(name));
        }
        let bytes = path.as_os_str().len();
        if self == EntryShape::Socket && bytes > MAX_SOCKET_PATH_BYTES {
            return Err(LayoutProblem::SocketPathTooLong { bytes }.at_entry(name));
        }
        if self.is_directory() && mode.bits() & 0o100 == 0 {
            return Err(LayoutProblem::NotSearchable { mode }.at_entry(name));
        }
        self.validate_at(names, path).map_err(|problem| problem.nested_in(name))
    }

    /// Renders all entries below as text: one line each with its mode, indented by its depth.
    pub fn render_outline(self, names: &BrandNames) -> String {
        let mut text = String::new();
        self.render_below(names, 0, &mut text);
        text
    }

    fn render_below(self, names: &BrandNames, depth: usize, text: &mut String) {
        for declared in self.child_entries() {
            let name = names.expand(declared.name).unwrap_or_else(|_| declared.name.to_owned());
            let sign = match declared.shape {
                EntryShape::File => "",
                EntryShape::Socket => "=",
                EntryShape::Fifo => "|",
                EntryShape::Directory(_) => "/",
                EntryShape::MountPoint(_) => "/ (mount point)",
            };
            text.push_str(&format!("{} {:indent$}{name}{sign}\n", declared.mode, "", indent = 2 * depth));
            declared.shape.render_below(names, depth + 1, text);
        }
    }
}

/// One declared entry of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeclaredEntry {
    /// The name, with [variables](BrandNames) not expanded.
    pub name: &'static str,
    /// The mode.
    pub mode: FileMode,
    /// The kind.
    pub shape: EntryShape,
}

/// The problem of an invalid layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutProblem {
    /// File systems reject the name.
    #[error("{0}")]
    InvalidName(InvalidName),
    /// Another entry of the same directory has the name.
    #[error("the name is used twice in its directory")]
    Duplicate,
    /// The name contains an unknown variable.
    #[error("the name contains an unknown variable")]
    UnknownVariable,
    /// No program could listen on it: create the layout at a shorter path.
    #[error("socket path has {bytes} bytes: the limit is {MAX_SOCKET_PATH_BYTES}")]
    SocketPathTooLong {
        /// The length of the full path.
        bytes: usize,
    },
    /// The directory mode lacks the search bit of the owner, so that no entry could be opened.
    #[error("directory mode {mode} lacks the owner's search bit (0100)")]
    NotSearchable {
        /// The declared mode.
        mode: FileMode,
    },
}

impl LayoutProblem {
    pub(super) fn at_entry(self, name: &str) -> InvalidLayout {
        InvalidLayout { entry_names: vec![name.to_owned()], problem: self }
    }
}

/// An invalid layout: the problem and its entry, as in `data: etcd: duplicate name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidLayout {
    entry_names: Vec<String>,
    problem: LayoutProblem,
}

impl InvalidLayout {
    /// The problem.
    pub fn problem(&self) -> LayoutProblem {
        self.problem
    }

    /// The path of the entry: names from the outermost directory on.
    pub fn entry_names(&self) -> impl Iterator<Item = &str> {
        self.entry_names.iter().map(String::as_str)
    }

    fn nested_in(mut self, name: &str) -> InvalidLayout {
        self.entry_names.insert(0, name.to_owned());
        self
    }
}

impl fmt::Display for InvalidLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.entry_names.iter().try_for_each(|name| write!(f, "{}: ", name.escape_debug()))?;
        self.problem.fmt(f)
    }
}

impl std::error::Error for InvalidLayout {}

/// Checks one directory of a layout in a constant, so that a panic is a compile error.
///
/// # Panics
/// For an invalid name, a duplicate name, or a directory without the search bit of its owner.
#[doc(hidden)]
pub const fn assert_valid_layout(shape: EntryShape) {
    let children = shape.child_entries();
    let mut at = 0;
    // A `const fn` can't use iterators, and so no `for` loop.
    while at < children.len() {
        let DeclaredEntry { name, mode, shape } = children[at];
        assert_valid_name(name.as_bytes());
        assert!(
            !shape.is_directory() || mode.bits() & 0o100 != 0,
            "a directory mode must have the search bit of the owner"
        );
        let mut other = 0;
        while other < at {
            assert!(!is_equal(children[other].name.as_bytes(), name.as_bytes()), "duplicate name");
            other += 1;
        }
        at += 1;
    }
}

/// The checks of [`FileName::try_new`], which is not a `const fn`.
const fn assert_valid_name(name: &[u8]) {
    assert!(!name.is_empty(), "a name is empty");
    assert!(name.len() <= 255, "a name is longer than 255 bytes");
    assert!(!is_equal(name, b".") && !is_equal(name, b".."), "a name is \".\" or \"..\"");
    let mut at = 0;
    while at < name.len() {
        assert!(name[at] != b'/', "a name contains a slash");
        assert!(name[at] != 0, "a name contains a NUL byte");
        at += 1;
    }
}

const fn is_equal(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let mut at = 0;
    while at < one.len() {
        if one[at] != other[at] {
            return false;
        }
        at += 1;
    }
    true
}
