//! The creation of a layout in a file store.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use super::{BrandNames, EntryShape, InvalidLayout};
use crate::error::Error;
use crate::file_store::FileStore;
use crate::metadata::FileMode;

/// A field of a layout: a type with a [shape](LayoutEntry::SHAPE) that can be created.
///
/// # Contract
/// [`create_at`](LayoutEntry::create_at) is idempotent and destroys nothing: existing entries stay, and get
/// their mode.
pub trait LayoutEntry: Sized {
    /// The declaration, as data.
    const SHAPE: EntryShape;

    /// Creates the entry and returns its handle.
    ///
    /// # Errors
    /// [`LayoutError`]; entries created before the error stay, and the next call finds them.
    fn create_at(location: EntryLocation) -> Result<Self, LayoutError>;
}

/// A [`FileStore`], the path of its root, and the [`BrandNames`] to expand: everything needed to create a
/// layout.
///
/// One target creates any number of layouts, and the same one repeatedly.
#[derive(Clone, Debug)]
pub struct LayoutTarget {
    store: Arc<dyn FileStore>,
    root: PathBuf,
    brand_names: Arc<BrandNames>,
}

impl LayoutTarget {
    /// A target for a store whose root has the path `root`. Handles derive their full paths from it, for
    /// programs that need a path. The empty path is `/`.
    pub fn new(store: Arc<dyn FileStore>, root: impl AsRef<Path>) -> LayoutTarget {
        LayoutTarget { store, root: normalize_root(root.as_ref()), brand_names: Arc::default() }
    }

    /// Replaces the default names, which are those of nodekeel.
    pub fn with_brand_names(self, names: BrandNames) -> LayoutTarget {
        LayoutTarget { brand_names: Arc::new(names), ..self }
    }

    /// Checks the layout, creates its directories from the outermost on, and returns the handles.
    ///
    /// # Errors
    /// [`LayoutError::InvalidLayout`] before any change; otherwise the failed step, which a retry repeats.
    pub fn create_layout<T: LayoutEntry>(&self) -> Result<T, LayoutError> {
        // Before the first directory is created: an invalid layout leaves nothing behind.
        T::SHAPE.validate_at(&self.brand_names, &self.root).map_err(LayoutError::InvalidLayout)?;
        T::create_at(EntryLocation {
            store: self.store.clone(),
            brand_names: self.brand_names.clone(),
            store_path: PathBuf::new(),
            path: self.root.clone(),
            mode: FileMode::new(0o755),
        })
    }
}

/// Normalizes a path: one leading slash, one between names, none at the end.
fn normalize_root(root: &Path) -> PathBuf {
    let relative = root.components().filter(|part| !matches!(part, Component::RootDir | Component::CurDir));
    Path::new("/").join(relative.collect::<PathBuf>())
}

/// The location of one layout entry.
#[derive(Clone, Debug)]
pub struct EntryLocation {
    pub(super) store: Arc<dyn FileStore>,
    pub(super) brand_names: Arc<BrandNames>,
    /// The path in the store.
    pub(super) store_path: PathBuf,
    /// The full path.
    pub(super) path: PathBuf,
    pub(super) mode: FileMode,
}

impl EntryLocation {
    /// The location of an entry of this directory.
    pub(super) fn child(&self, name: &str, mode: FileMode) -> EntryLocation {
        let (inner, path) = (self.store_path.join(name), self.path.join(name));
        EntryLocation { store_path: inner, path, mode, ..self.clone() }
    }

    /// The same location as the root of another store: that of the mounted file system.
    pub(super) fn at_root_of(&self, store: Arc<dyn FileStore>) -> EntryLocation {
        EntryLocation { store, store_path: PathBuf::new(), ..self.clone() }
    }

    /// The full path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The declared mode.
    pub fn mode(&self) -> FileMode {
        self.mode
    }
}

/// A failure to create a layout.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The layout is invalid with this path and these names. Nothing was changed.
    #[error("invalid directory layout")]
    InvalidLayout(#[source] InvalidLayout),
    /// A directory could not be created, or its mode could not be set. If something else has its name, remove
    /// that.
    #[error("can't create directory {}", .path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Error,
    },
    /// The mode of an existing file could not be set.
    #[error("can't set mode of file {}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Error,
    },
    /// An interrupted commit of several files could not be completed: see [`LayoutDir::commit_files`].
    ///
    /// [`LayoutDir::commit_files`]: super::LayoutDir::commit_files
    #[error("can't complete the interrupted update of the files in {}", .path.display())]
    Commit {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Error,
    },
}
