//! Handles of sockets and pipes, which other programs create.

use std::fmt;
use std::path::Path;

use super::{EntryLocation, EntryShape, LayoutEntry, LayoutError};
use crate::error::Error;
use crate::metadata::FileKind;

/// Defines a handle of an entry that other programs create: its path, and whether it exists.
macro_rules! special {
    ($(#[$meta:meta])* $handle:ident: $shape:ident, $kind:path) => {
        $(#[$meta])*
        #[derive(Clone)]
        pub struct $handle {
            location: EntryLocation,
        }

        impl $handle {
            /// The full path.
            pub fn path(&self) -> &Path {
                &self.location.path
            }

            /// Whether it exists.
            ///
            /// # Errors
            /// Those of [`FileStore::file_kind`](crate::FileStore::file_kind).
            pub fn exists(&self) -> Result<bool, Error> {
                Ok(self.location.store.file_kind(&self.location.store_path)? == Some($kind))
            }

            /// Removes the entry of a killed process; returns whether it existed. An entry of another kind
            /// stays.
            ///
            /// # Errors
            /// Those of [`FileStore::file_kind`](crate::FileStore::file_kind) and
            /// [`FileStore::remove`](crate::FileStore::remove).
            pub fn remove_stale(&self) -> Result<bool, Error> {
                Ok(self.exists()? && self.location.store.remove(&self.location.store_path)?)
            }
        }

        impl LayoutEntry for $handle {
            const SHAPE: EntryShape = EntryShape::$shape;

            fn create_at(location: EntryLocation) -> Result<$handle, LayoutError> {
                Ok($handle { location })
            }
        }

        impl fmt::Debug for $handle {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($handle), self.path().display())
            }
        }
    };
}

special!(
    /// A socket. Its path is known to fit into a socket address.
    LayoutSocket: Socket, FileKind::Socket
);
special!(
    /// A named pipe.
    LayoutFifo: Fifo, FileKind::Fifo
);
