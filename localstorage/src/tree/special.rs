//! Handles of what other programs make.

use std::fmt;
use std::path::Path;

use super::{Node, PlaceError, Shape, Spot};
use crate::error::Error;
use crate::metadata::FileKind;

/// Handles of what others make: a path, and whether something is there.
macro_rules! special {
    ($(#[$meta:meta])* $handle:ident: $kind:path) => {
        $(#[$meta])*
        #[derive(Clone)]
        pub struct $handle {
            spot: Spot,
        }

        impl $handle {
            /// The whole path.
            pub fn path(&self) -> &Path {
                &self.spot.path
            }

            /// Whether one is there.
            ///
            /// # Errors
            /// Those of [`Placement::kind`](crate::Placement::kind).
            pub fn exists(&self) -> Result<bool, Error> {
                Ok(self.spot.placement.kind(&self.spot.inner)? == Some($kind))
            }

            /// Removes what a killed process has left; tells whether there was one. What is of another kind stays.
            ///
            /// # Errors
            /// Those of [`Placement::kind`](crate::Placement::kind) and [`Placement::remove`](crate::Placement::remove).
            pub fn remove(&self) -> Result<bool, Error> {
                Ok(self.exists()? && self.spot.placement.remove(&self.spot.inner)?)
            }
        }

        impl Node for $handle {
            const SHAPE: Shape = Shape::$handle;

            fn place(spot: Spot) -> Result<$handle, PlaceError> {
                Ok($handle { spot })
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
    /// Where something listens; its path is known to fit into a socket's address.
    Socket: FileKind::Socket
);
special!(
    /// A named pipe.
    Fifo: FileKind::Fifo
);
