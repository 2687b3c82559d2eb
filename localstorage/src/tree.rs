//! A node's directories as types: a layout is declared once, and placing it yields handles.
//!
//! [`layout!`](crate::layout) takes what reads as an ordinary struct, with a name and a mode to each field:
//!
//! ```
//! use std::sync::Arc;
//! use nodekeel_localstorage::mem::MemPlacement;
//! use nodekeel_localstorage::tree::{Directory, File, Pki, Site, Socket};
//!
//! nodekeel_localstorage::layout! {
//!     /// What my registry keeps.
//!     pub struct Registry {
//!         /// Its certificate, and its key.
//!         pub pki: Pki = "pki", 0o700;
//!         /// Layers by their digests.
//!         pub blobs: Directory = "blobs", 0o755;
//!         /// Who may push.
//!         pub users: File = "users.json", 0o600;
//!         /// Where it listens.
//!         pub socket: Socket = "{brand}.sock", 0o600;
//!     }
//! }
//!
//! let site = Site::new(Arc::new(MemPlacement::new()), "/data/registry");
//! let registry: Registry = site.place()?;
//! registry.users.write(b"[]")?;
//! assert_eq!(registry.users.read()?, b"[]");
//! assert_eq!(registry.pki.key.path().to_str(), Some("/data/registry/pki/cert-key.pem"));
//! assert_eq!(registry.socket.path().to_str(), Some("/data/registry/nodekeel.sock"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Unplaced and placed
//! What is declared is data, `<Registry as Node>::SHAPE`: a constant that can be [validated](Shape::validate),
//! [printed](Shape::outline) and compared, and that nothing can be read from or written to. A value of type `Registry`
//! exists only once it is placed: its directories are there, with their modes. So there is nothing to forget, and no
//! handle without a file system behind it. A placement that fails gives no `Registry` and takes nothing: call it again.
//!
//! A mount point is a type of its own. [`MountPoint<T>`] has a path and no contents; `T` is placed in what was mounted,
//! so that nobody writes below a mount point before its time.
//!
//! # Why in this form
//! A struct is what its readers know: fields have documentation, completion and types, and a part of it is passed on as a
//! reference. Three other forms were weighed. A tree of constants with names looked up by string finds a wrong name when
//! it runs. Two structs to each directory, or one with a state as type parameter, make every signature that takes one
//! longer, for a state that no reader wants to hold: nothing can be done with an unplaced directory. A derive macro reads
//! as well as this one, and needs a crate of its own with a parser in it; this is 40 lines of `macro_rules`, and names are
//! checked by a `const fn` while compiling:
//!
//! ```compile_fail,E0080
//! nodekeel_localstorage::layout! {
//!     /// Leads out of its own directory.
//!     pub struct Escape {
//!         /// No.
//!         pub up: nodekeel_localstorage::tree::Directory = "..", 0o700;
//!     }
//! }
//! ```
//! ```compile_fail,E0080
//! nodekeel_localstorage::layout! {
//!     /// Has two files, and one name.
//!     pub struct Twice {
//!         /// One.
//!         pub one: nodekeel_localstorage::tree::File = "same", 0o600;
//!         /// The other.
//!         pub two: nodekeel_localstorage::tree::File = "same", 0o600;
//!     }
//! }
//! ```
//!
//! # Your own directories
//! Declare your own root with the parts of this one that you keep as its fields: [`Etcd`], [`Kubernetes`] and [`Pki`] are
//! fields like any other. Or keep [`Root`], and place more in one of its directories with [`Directory::extend`].
//!
//! *Source:* Monogon `metropolis/node/core/localstorage`, the paths and modes of its commit 8b9bf216.

pub(crate) mod commit;
mod data;
mod directory;
mod ephemeral;
mod esp;
mod etc;
mod file;
mod names;
mod root;
mod run;
mod shape;
mod site;
mod special;

pub use data::{
    ClusterNetworking, Credentialed, Data, DevicePlugins, Etcd, Identity, Kubelet, Kubernetes, Pki, Plugins,
    PluginsRegistry,
};
pub use directory::{Directory, MountPoint};
pub use ephemeral::{Consensus, Containerd, Ephemeral};
pub use esp::{BootImages, Efi, Esp, EspNode};
pub use etc::Etc;
pub use file::{File, LoadError, Undecodable};
pub use names::{Names, NamesError};
pub use root::Root;
pub use run::{Run, Tmp};
#[doc(hidden)]
pub use shape::check;
pub use shape::{Declared, InvalidLayout, LayoutProblem, SOCKET_PATH_MAX, Shape};
pub use site::{Node, PlaceError, Site, Spot};
pub use special::{Fifo, Socket};

/// Declares directories and what is in them; see [`tree`](crate::tree) for how and why.
///
/// Each field is a [`Node`](crate::tree::Node): a handle of this crate, another layout, or a type of the reader's. Its
/// name and its mode follow it. The struct made is a [`Directory`](crate::tree::Directory) as well (it derefs to one).
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
            itself: $crate::tree::Directory,
        }

        impl $crate::tree::Node for $layout {
            const SHAPE: $crate::tree::Shape = $crate::tree::Shape::Directory(&[
                $($crate::tree::Declared {
                    name: $name,
                    mode: $crate::Mode::new($mode),
                    shape: <$node as $crate::tree::Node>::SHAPE,
                },)*
            ]);

            fn place(spot: $crate::tree::Spot) -> Result<Self, $crate::tree::PlaceError> {
                let itself = $crate::tree::Directory::of(spot, Self::SHAPE)?;
                Ok(Self {
                    $($field: itself.place($name, $crate::Mode::new($mode))?,)*
                    itself,
                })
            }
        }

        impl ::std::ops::Deref for $layout {
            type Target = $crate::tree::Directory;

            fn deref(&self) -> &$crate::tree::Directory {
                &self.itself
            }
        }

        const _: () = $crate::tree::check(<$layout as $crate::tree::Node>::SHAPE);
    )*};
}
