//! A layout as data: what is declared, before anything of it exists.

use std::fmt;
use std::path::Path;

use thiserror::Error;

use super::Names;
use super::commit::RECORD;
use crate::metadata::Mode;
use crate::name::{InvalidName, Name, is_sibling};

/// Longest path that a socket can be bound to, in bytes.
///
/// *Source:* unix(7): `sun_path` has 108 bytes, with a NUL at the end.
pub const SOCKET_PATH_MAX: usize = 107;

/// What a [node](super::Node) of a layout is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shape {
    /// A regular file. It is not created by placing: its first writer creates it.
    File,
    /// A socket, which whoever listens on it creates. Its whole path must be short enough.
    Socket,
    /// A named pipe, which whoever reads from it creates.
    Fifo,
    /// A directory, with what is declared in it.
    Directory(&'static [Declared]),
    /// A directory that something is mounted on, with what is declared in what is mounted.
    MountPoint(&'static [Declared]),
}

impl Shape {
    /// What is declared below.
    pub const fn children(self) -> &'static [Declared] {
        match self {
            Shape::Directory(children) | Shape::MountPoint(children) => children,
            _ => &[],
        }
    }

    const fn is_directory(self) -> bool {
        matches!(self, Shape::Directory(_) | Shape::MountPoint(_))
    }

    /// Checks everything below with these names filled in, as placed at `root`.
    ///
    /// Names written out in a [`layout!`](crate::layout) are checked when it is compiled. This finds what can't be known
    /// before: what `names` make of the others, and how long paths become.
    ///
    /// # Errors
    /// The first thing that is wrong, and where.
    pub fn validate(self, names: &Names, root: &Path) -> Result<(), InvalidLayout> {
        let mut seen: Vec<String> = Vec::new();
        for declared in self.children() {
            let name = names.fill(declared.name).map_err(|problem| problem.of(declared.name))?;
            let below = |problem: InvalidLayout| problem.below(&name);
            if let Err(why) = Name::try_new(name.as_str()) {
                return Err(LayoutProblem::Name(why).of(&name));
            }
            if name == RECORD || is_sibling(name.as_bytes()) {
                return Err(LayoutProblem::Name(InvalidName::Reserved).of(&name));
            }
            if seen.contains(&name) {
                return Err(LayoutProblem::Duplicate.of(&name));
            }
            let path = root.join(&name);
            let bytes = path.as_os_str().len();
            if declared.shape == Shape::Socket && bytes > SOCKET_PATH_MAX {
                return Err(LayoutProblem::SocketPath { bytes }.of(&name));
            }
            if declared.shape.is_directory() && declared.mode.bits() & 0o100 == 0 {
                return Err(LayoutProblem::NotSearchable { mode: declared.mode }.of(&name));
            }
            declared.shape.validate(names, &path).map_err(below)?;
            seen.push(name);
        }
        Ok(())
    }

    /// Everything below as text: one line each with its mode, indented by its depth.
    pub fn outline(self, names: &Names) -> String {
        let mut text = String::new();
        self.outline_at(names, 0, &mut text);
        text
    }

    fn outline_at(self, names: &Names, depth: usize, text: &mut String) {
        for declared in self.children() {
            let name = names.fill(declared.name).unwrap_or_else(|_| declared.name.to_owned());
            let sign = match declared.shape {
                Shape::File => "",
                Shape::Socket => "=",
                Shape::Fifo => "|",
                Shape::Directory(_) => "/",
                Shape::MountPoint(_) => "/ (mount point)",
            };
            text.push_str(&format!("{} {:indent$}{name}{sign}\n", declared.mode, "", indent = 2 * depth));
            declared.shape.outline_at(names, depth + 1, text);
        }
    }
}

/// One line of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Its name, with [variables](Names) not filled in.
    pub name: &'static str,
    /// Its permissions.
    pub mode: Mode,
    /// What it is.
    pub shape: Shape,
}

/// What is wrong with a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutProblem {
    /// No file system takes the name.
    #[error("{0}")]
    Name(InvalidName),
    /// Something else in the same directory has the name.
    #[error("duplicate")]
    Duplicate,
    /// There is no such variable.
    #[error("unknown variable")]
    Variable,
    /// Nobody could listen on it: place the tree nearer to the root.
    #[error("a socket's path of {bytes} bytes is longer than {SOCKET_PATH_MAX}")]
    SocketPath {
        /// Length of the whole path.
        bytes: usize,
    },
    /// A directory without the search bit of its owner, in which nothing can be opened.
    #[error("a directory of mode {mode} can't be searched")]
    NotSearchable {
        /// The mode declared.
        mode: Mode,
    },
}

impl LayoutProblem {
    pub(super) fn of(self, name: &str) -> InvalidLayout {
        InvalidLayout { at: vec![name.to_owned()], problem: self }
    }
}

/// What is wrong with a layout, and where: `data: etcd: duplicate`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidLayout {
    at: Vec<String>,
    problem: LayoutProblem,
}

impl InvalidLayout {
    /// What is wrong.
    pub fn problem(&self) -> LayoutProblem {
        self.problem
    }

    /// Where: names from the outermost directory on.
    pub fn at(&self) -> impl Iterator<Item = &str> {
        self.at.iter().map(String::as_str)
    }

    fn below(mut self, name: &str) -> InvalidLayout {
        self.at.insert(0, name.to_owned());
        self
    }
}

impl fmt::Display for InvalidLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.at.iter().try_for_each(|name| write!(f, "{}: ", name.escape_debug()))?;
        self.problem.fmt(f)
    }
}

impl std::error::Error for InvalidLayout {}

/// Checks one directory of a layout, in a constant: an error there is one of compilation.
///
/// # Panics
/// For a name that no file system takes, two of the same name, and a directory that can't be searched.
#[doc(hidden)]
pub const fn check(shape: Shape) {
    let children = shape.children();
    let mut at = 0;
    while at < children.len() {
        let Declared { name, mode, shape } = children[at];
        check_name(name.as_bytes());
        assert!(
            !shape.is_directory() || mode.bits() & 0o100 != 0,
            "a directory's owner must be able to search it"
        );
        let mut other = 0;
        while other < at {
            assert!(!is_same(children[other].name.as_bytes(), name.as_bytes()), "two of the same name");
            other += 1;
        }
        at += 1;
    }
}

/// The same as [`Name::try_new`] checks; that can't be called in a constant.
const fn check_name(name: &[u8]) {
    assert!(!name.is_empty(), "a name is empty");
    assert!(name.len() <= 255, "a name is longer than 255 bytes");
    assert!(!is_same(name, b".") && !is_same(name, b".."), "a name is \".\" or \"..\"");
    let mut at = 0;
    while at < name.len() {
        assert!(name[at] != b'/', "a name contains a slash");
        assert!(name[at] != 0, "a name contains a NUL byte");
        at += 1;
    }
}

const fn is_same(one: &[u8], other: &[u8]) -> bool {
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
