//! A node's directories as types: a layout is declared once, and creating it yields handles.
//!
//! [`layout!`](crate::layout) takes an ordinary struct with a name and a mode for each field:
//!
//! ```
//! use std::sync::Arc;
//! use nodekeel_localstorage::mem::MemFileStore;
//! use nodekeel_localstorage::tree::{LayoutDir, LayoutFile, LayoutSocket, LayoutTarget, PkiDir};
//!
//! nodekeel_localstorage::layout! {
//!     /// The files of my registry.
//!     pub struct Registry {
//!         /// Its certificate and its key.
//!         pub pki: PkiDir = "pki", 0o700;
//!         /// Layers by their digests.
//!         pub blobs: LayoutDir = "blobs", 0o755;
//!         /// The users that may push.
//!         pub users: LayoutFile = "users.json", 0o600;
//!         /// The socket it listens on.
//!         pub socket: LayoutSocket = "{brand}.sock", 0o600;
//!     }
//! }
//!
//! let target = LayoutTarget::new(Arc::new(MemFileStore::new()), "/data/registry");
//! let registry: Registry = target.create_layout()?;
//! registry.users.write(b"[]")?;
//! assert_eq!(registry.users.read()?, b"[]");
//! assert_eq!(registry.pki.key.path().to_str(), Some("/data/registry/pki/cert-key.pem"));
//! assert_eq!(registry.socket.path().to_str(), Some("/data/registry/nodekeel.sock"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Declaration and handles
//! The declaration is data, `<Registry as LayoutEntry>::SHAPE`: a constant that can be
//! [validated](EntryShape::validate_at), [printed](EntryShape::render_outline) and compared, but not read
//! from or written to. A value of type `Registry` exists only after it was created: its directories exist
//! with their modes. So no call can be forgotten, and every handle has a file store behind it. A failed
//! creation returns no `Registry` and consumes nothing: call it again.
//!
//! A mount point has a type: [`MountPoint<T>`] has a path and no contents; `T` is created in the mounted file
//! system, so that no file is written below a mount point before the mount.
//!
//! # Why in this form
//! Readers know structs: fields have documentation, completion and types, and a part of a struct is passed on
//! as a reference. Three other forms were weighed. A tree of constants with names looked up by string detects
//! a wrong name only at run time. Two structs for each directory, or one with a state as type parameter, make
//! every signature that takes one longer, for a state that is of no use: nothing can be done with a directory
//! before its creation. A derive macro reads as well as this one, but needs a separate crate with a parser in
//! it; this one is 40 lines of `macro_rules`, and a `const fn` checks names at compile time:
//!
//! ```compile_fail,E0080
//! nodekeel_localstorage::layout! {
//!     /// Leads out of its parent directory.
//!     pub struct Escape {
//!         /// Rejected.
//!         pub up: nodekeel_localstorage::tree::LayoutDir = "..", 0o700;
//!     }
//! }
//! ```
//! ```compile_fail,E0080
//! nodekeel_localstorage::layout! {
//!     /// Has two files with the same name.
//!     pub struct Twice {
//!         /// One.
//!         pub one: nodekeel_localstorage::tree::LayoutFile = "same", 0o600;
//!         /// The other.
//!         pub two: nodekeel_localstorage::tree::LayoutFile = "same", 0o600;
//!     }
//! }
//! ```
//!
//! # Your own directories
//! This module declares only the directories that several crates use: [`EtcdDir`], [`IdentityDir`] and [`PkiDir`]
//! are fields of a layout like any other. The layout of a whole node is declared by its program, once: that of noded
//! is in its `layout.rs`. A part of a program adds its layout to a directory with [`LayoutDir::add_layout`].
//!
//! *Source:* Monogon `metropolis/node/core/localstorage`, whose tree the tests of this crate create.

mod brand_names;
pub(crate) mod commit;
mod data;
mod directory;
mod file;
mod layout_target;
mod shape;

pub use brand_names::{BrandNameError, BrandNames};
pub use data::{EtcdDir, IdentityDir, PkiDir};
pub use directory::{LayoutDir, MountPoint};
pub use file::{DecodeError, LayoutFifo, LayoutFile, LayoutSocket, LoadError};
pub use layout_target::{EntryLocation, LayoutEntry, LayoutError, LayoutTarget};
#[doc(hidden)]
pub use shape::assert_valid_layout;
pub use shape::{DeclaredEntry, EntryShape, InvalidLayout, LayoutProblem, MAX_SOCKET_PATH_BYTES};

/// Declares directories and their entries; see [`tree`](crate::tree) for how and why.
///
/// Each field is a [`LayoutEntry`]: a handle of this crate, another layout, or your type. Its name and its mode
/// follow. The generated struct derefs to a [`LayoutDir`].
#[macro_export]
macro_rules! layout {
    ($(
        $(#[$meta:meta])*
        $vis:vis struct $layout:ident {
            $(
                $(#[$field_meta:meta])*
                $field_vis:vis $field:ident: $node:ty = $name:literal, $mode:literal;
            )*
        }
    )*) => {$(
        $(#[$meta])*
        #[derive(Clone, Debug)]
        #[non_exhaustive]
        $vis struct $layout {
            $($(#[$field_meta])* $field_vis $field: $node,)*
            layout_dir: $crate::tree::LayoutDir,
        }

        impl $crate::tree::LayoutEntry for $layout {
            const SHAPE: $crate::tree::EntryShape = $crate::tree::EntryShape::Directory(&[
                $($crate::tree::DeclaredEntry {
                    name: $name,
                    mode: $crate::FileMode::new($mode),
                    shape: <$node as $crate::tree::LayoutEntry>::SHAPE,
                },)*
            ]);

            fn create_at(location: $crate::tree::EntryLocation) -> Result<Self, $crate::tree::LayoutError> {
                let layout_dir = $crate::tree::LayoutDir::create_with_shape(location, Self::SHAPE)?;
                Ok(Self {
                    $($field: layout_dir.create_entry($name, $crate::FileMode::new($mode))?,)*
                    layout_dir,
                })
            }
        }

        impl ::std::ops::Deref for $layout {
            type Target = $crate::tree::LayoutDir;

            fn deref(&self) -> &$crate::tree::LayoutDir {
                &self.layout_dir
            }
        }

        const _: () = $crate::tree::assert_valid_layout(<$layout as $crate::tree::LayoutEntry>::SHAPE);
    )*};
}
