//! Where a layout is placed, and how.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use super::{InvalidLayout, Names, Shape};
use crate::error::Error;
use crate::metadata::Mode;
use crate::placement::Placement;

/// What a field of a layout can be: something with a [shape](Node::SHAPE) that can be placed.
///
/// # Contract
/// [`place`](Node::place) is idempotent and destroys nothing: what is there stays, and gets its mode.
pub trait Node: Sized {
    /// What it is, as data.
    const SHAPE: Shape;

    /// Makes what must be there, and gives the handle.
    ///
    /// # Errors
    /// [`PlaceError`]; what was made before it stays, and is found by the next call.
    fn place(spot: Spot) -> Result<Self, PlaceError>;
}

/// A [`Placement`] with the path that its top has, and the [`Names`] to fill in: all it takes to place a layout.
///
/// It only lends itself: one site places any number of layouts, and the same one again.
#[derive(Clone, Debug)]
pub struct Site {
    placement: Arc<dyn Placement>,
    root: PathBuf,
    names: Arc<Names>,
}

impl Site {
    /// A placement whose top has the path `root`: handles tell their paths by it, for programs that take nothing but a
    /// path. The empty path is `/`.
    pub fn new(placement: Arc<dyn Placement>, root: impl AsRef<Path>) -> Site {
        Site { placement, root: tidy(root.as_ref()), names: Arc::default() }
    }

    /// The same with other names than nodekeel's own.
    pub fn with_names(self, names: Names) -> Site {
        Site { names: Arc::new(names), ..self }
    }

    /// Checks the layout, makes its directories from the outermost on, and gives the handles.
    ///
    /// # Errors
    /// [`PlaceError::Layout`] before anything is touched; otherwise the step that failed, which a retry begins again.
    pub fn place<T: Node>(&self) -> Result<T, PlaceError> {
        T::SHAPE.validate(&self.names, &self.root).map_err(PlaceError::Layout)?;
        T::place(Spot {
            placement: self.placement.clone(),
            names: self.names.clone(),
            inner: PathBuf::new(),
            path: self.root.clone(),
            mode: Mode::new(0o755),
        })
    }
}

/// One slash at the front, one between names, none at the end.
fn tidy(root: &Path) -> PathBuf {
    let relative = root.components().filter(|part| !matches!(part, Component::RootDir | Component::CurDir));
    Path::new("/").join(relative.collect::<PathBuf>())
}

/// Where one node of a layout goes.
#[derive(Clone, Debug)]
pub struct Spot {
    pub(super) placement: Arc<dyn Placement>,
    pub(super) names: Arc<Names>,
    /// Within the placement.
    pub(super) inner: PathBuf,
    /// As a whole.
    pub(super) path: PathBuf,
    pub(super) mode: Mode,
}

impl Spot {
    /// The spot of something in this directory.
    pub(super) fn below(&self, name: &str, mode: Mode) -> Spot {
        let (inner, path) = (self.inner.join(name), self.path.join(name));
        Spot { inner, path, mode, ..self.clone() }
    }

    /// The same place, at the top of another placement: that of what is mounted there.
    pub(super) fn at_top_of(&self, placement: Arc<dyn Placement>) -> Spot {
        Spot { placement, inner: PathBuf::new(), ..self.clone() }
    }

    /// The whole path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The permissions declared.
    pub fn mode(&self) -> Mode {
        self.mode
    }
}

/// Why a layout could not be placed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// The layout itself is wrong, in this place with these names: nothing was touched.
    #[error("check layout")]
    Layout(#[source] InvalidLayout),
    /// A directory could not be made, or not be given its mode. Where something else has its name, remove that.
    #[error("place directory {}", .path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: Error,
    },
    /// A file that is there could not be given its mode.
    #[error("place file {}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Error,
    },
    /// A commit of several files was interrupted, and could not be completed: see [`Directory::commit`].
    ///
    /// [`Directory::commit`]: super::Directory::commit
    #[error("complete the interrupted commit in {}", .path.display())]
    Commit {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: Error,
    },
}
