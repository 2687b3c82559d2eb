//! containerd as a supervised process, and images that are there before anyone asks for them.
//!
//! It pulls nothing from a network, runs no containers and speaks no runtime interface: that is containerd's own. What it
//! imports it verifies by digests; who may put bundles into the directory is decided by whoever makes it.
//!
//! ```text
//!  Settings ─▶ config.toml ─┐
//!  Place: directories ──────┼─▶ Containerd ── process: ready when it tells its version
//!                           │    ├─ runsc ── FIFO ─▶ journal
//!  NAMESPACE/NAME.tar ──────┘    └─ preseed
//!     │                               │
//!     └─ scan ─▶ plan (pure) ─▶ read once: decompress, take apart, verify ─▶ ImageStore: blobs, labels, then the list
//! ```
//!
//! ```
//! use nodekeel_containerd_svc::testing::{Archive, MemStore, Shape};
//! use nodekeel_containerd_svc::{ImageStore, Preseed};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> anyhow::Result<()> {
//! # let directory = tempfile::tempdir()?;
//! std::fs::create_dir(directory.path().join("k8s.io"))?;
//! let archive = Archive::new(Shape::Layout).image(&["registry.k8s.io/pause:3.10"], b"a layer");
//! std::fs::write(directory.path().join("k8s.io/pause.tar.zst"), archive.zstd())?;
//!
//! let (preseed, store) = (Preseed::new(directory.path()), MemStore::new());
//! preseed.run(&store).await?;
//! let images = store.images(&"k8s.io".parse()?).await?;
//! assert_eq!(images[0].name, "registry.k8s.io/pause:3.10");
//! // An unchanged bundle whose images are there is not read again.
//! let written = store.written();
//! preseed.run(&store).await?;
//! assert_eq!(store.written(), written);
//! # Ok(())
//! # }
//! ```
//!
//! # How it behaves
//! - A bundle is read once, from its beginning to its end, and never unpacked to a file system by us. Memory is bounded:
//!   some chunks of half a MiB, one document, a list of names ([`Limits`]).
//! - An image is listed when everything that this node's platform needs of it is there, verified; before that nothing of it
//!   can be seen, and what was written is garbage. What is for other platforms may be missing.
//! - One bad bundle is told, with its file and what is wrong, and touches no other. It is not read again until it changes.
//! - What a bundle has brought is known by labels on its images: no other record has to be kept, and an image that is
//!   removed, moved or damaged is imported again.
//! - Nothing in an archive is a path: names are looked up in maps, and one that leads out refuses the bundle.
//!
//! # Bring your own
//! - [`ImageStore`]: where images are kept. `testing::conformance` checks yours; `ContainerdImages` (feature `client`) is
//!   ours.
//!
//! # Features
//! - `client`: `Containerd`, the runnable, and `ContainerdImages`. It needs protoc at build time.
//! - `testing`: a store in memory, the contract of a store as a check, archives made by hand, checks over arbitrary input.
//!
//! # Where it comes from
//! The runnables, their names and the layout of the directory are those of Monogon's `containerd/main.go`; without its
//! readiness before the process exists, a "FIFO" that is a growing file, and a bad bundle that stops all others. The
//! import does what containerd's own client does (`images/archive`), in one pass.

mod archive;
mod config;
#[cfg(feature = "client")]
mod containerd;
mod digest;
mod documents;
mod error;
mod image;
mod import;
mod limits;
mod name;
mod place;
mod plan;
mod platform;
mod prepare;
mod preseed;
mod runsc;
mod scan;
#[cfg(feature = "client")]
mod service;
mod single;
mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod walk;

pub use archive::{StreamError, StreamLimit};
pub use config::{CgroupDriver, ConfigVersion, Cri, OomScore, Runsc, Runtime, Settings};
#[cfg(feature = "client")]
pub use containerd::{ConnectError, ContainerdImages, version};
pub use digest::{Digest, InvalidDigest};
pub use error::{ImageError, ImportError};
pub use image::{Descriptor, Image, Labels, Layer};
pub use limits::Limits;
pub use name::{ImageName, MAX_IMAGE_NAME_BYTES, MAX_NAMESPACE_BYTES, NameError, Namespace};
pub use place::{Place, PlaceError};
pub use plan::{Action, Bundle, Fingerprint, MARK, Reason, plan};
pub use platform::Platform;
pub use prepare::{PrepareError, prepare};
pub use preseed::{Outcome, Preseed, PreseedError, Report};
pub use runsc::runsc_log;
pub use scan::Stray;
#[cfg(feature = "client")]
pub use service::{Config, Containerd, Hung, Liveness};
pub use single::import;
pub use store::{BlobWriter, Cause, ImageStore, Import, Incoming, StoreError};
