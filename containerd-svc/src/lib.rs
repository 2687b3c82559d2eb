//! Runs containerd as a supervised process and imports preseeded images before any pod needs them.
//!
//! The crate pulls nothing from a registry, runs no containers and implements no CRI: containerd does that. It
//! verifies what it imports by digest. Access to the bundle directories is the operator's decision: every image for
//! this node in it is imported, unless an [`ImagePolicy`] refuses it.
//!
//! ```text
//!  ContainerdSettings ─▶ config.toml ─┐
//!  DirectoryLayout ───────────────────┼─▶ Containerd ── process: ready when its version call answers
//!                                     │    ├─ runsc ── file ─▶ journal
//!  NAMESPACE/NAME.tar ────────────────┘    └─ preseed
//!     │                                         │
//!     └─ scan ─▶ plan_preseed (pure) ─▶ decompress, split, verify ─▶ ImageStore: blobs, labels, images
//! ```
//!
//! ```
//! use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat, MemStore};
//! use nodekeel_containerd_svc::{ImageStore, Preseed};
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let directory = tempfile::tempdir()?;
//!     std::fs::create_dir(directory.path().join("k8s.io"))?;
//!     let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout);
//!     let archive = archive.with_image(&["registry.k8s.io/pause:3.10"], b"a layer");
//!     std::fs::write(directory.path().join("k8s.io/pause.tar.zst"), archive.to_zstd())?;
//!
//!     let (preseed, store) = (Preseed::new(directory.path()), MemStore::new());
//!     preseed.run(&store).await?;
//!     let images = store.list_images(&"k8s.io".parse()?).await?;
//!     assert_eq!(images[0].name, "registry.k8s.io/pause:3.10");
//!     // An unchanged bundle whose images are complete is not read again.
//!     let written = store.written_bytes();
//!     preseed.run(&store).await?;
//!     assert_eq!(store.written_bytes(), written);
//!     Ok(())
//! }
//! ```
//!
//! # How it behaves
//! - A bundle is read once, from start to end, and never unpacked to a file system by this crate. An uncompressed
//!   one is first judged by its index: what this node does not need of it is not written. Memory is
//!   bounded by 16 MiB, a few chunks of 512 KiB, one document and a list of names ([`ImportLimits`]), and by the
//!   window of a zstd archive: one with a larger window than [`ImportLimits::zstd_window`] is rejected by name.
//! - Before the first byte of a bundle, and again before each blob, the free space of the store's disk is
//!   compared with what is to be written: [`DiskReserve`] stays free. The size of a compressed bundle is known
//!   only blob by blob. A layer is unpacked once what its files take at most was counted, in bytes and inodes.
//! - An image is listed once everything that this node's platform needs of it is present and verified. Before
//!   that, nothing of it is visible, and what was written is garbage. Content for other platforms may be
//!   missing.
//! - An invalid bundle is logged with its file and the reason, and does not affect any other bundle. It is
//!   not read again until it changes. An image that is damaged, and what is no image for this node (a chart, a
//!   signature, another platform), is left out by name, and does not affect the other images of its bundle.
//! - Content counts as present if its file can be read to its end, and a document if it matches its digest:
//!   containerd knows content from its database alone, also what a power cut has damaged. Damaged content is
//!   written again. Other bytes in a layer are found by an import with `with_layer_verification`, and by an
//!   [`ImageProof`], which also looks at unpacked layers. The runnable runs one after a boot that no ordered stop has
//!   ended: a power cut.
//! - Labels on the images record which bundles bring them: their marks. No other record is kept, and an image
//!   that is removed, moved or damaged is imported again. A name belongs to the first bundle that brings it, by the order of
//!   directories and of names. An image that no bundle brings any more loses its marks and its pin; it is not removed.
//! - Several programs that import into one containerd each have an [`InstanceId`]: none unpins the images of another, or
//!   discards an import that another has under way.
//! - No name in an archive is used as a path: names are looked up in maps, and a name with path traversal
//!   rejects the bundle.
//!
//! # Bring your own
//! - [`ImageStore`]: where images are stored. `testing::conformance` checks an implementation;
//!   `ContainerdImages` (feature `client`) is the one for containerd.
//! - [`ImagePolicy`]: which images may be listed. [`AllowList`] is the one by digests.
//!
//! # Features
//! - `client`: `Containerd`, the runnable, and `ContainerdImages`. It needs protoc at build time.
//! - `testing`: an image store in memory, the store contract as a conformance check, generated archives,
//!   checks over arbitrary input.
//!
//! # Where it comes from
//! The runnables, their names and the directory layout are those of Monogon's `containerd/main.go`, without
//! its readiness before the process exists, a "FIFO" that is a file which grows for ever, and an invalid bundle that stops
//! all others. The import does what containerd's client does (`images/archive`), in one pass.

mod archive;
mod config;
#[cfg(feature = "client")]
mod containerd;
#[cfg(feature = "client")]
mod cri;
#[cfg(feature = "client")]
mod daemon;
mod digest;
mod disk_space;
mod documents;
mod error;
mod image;
mod image_walk;
mod import;
mod instance;
mod label_names;
mod layout;
mod limits;
mod name;
mod plan;
mod platform;
mod policy;
mod prepare;
mod preseed;
mod runsc;
mod scan;
mod single_archive;
mod store;
#[cfg(feature = "client")]
mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use archive::{ArchiveError, ArchiveLimitKind};
pub use config::{
    CgroupDriver, ConfigFragment, ConfigVersion, ContainerdSettings, CriSettings, InvalidFragment,
    OomScorePolicy, RunscSettings, RuntimeHandler,
};
#[cfg(feature = "client")]
pub use containerd::{ConnectError, ContainerdImages, daemon_version};
#[cfg(feature = "client")]
pub use daemon::{Containerd, ContainerdConfig, LivenessProbe};
pub use digest::{Digest, InvalidDigest};
pub use disk_space::{DiskReserve, DiskSpace, DiskUsage};
pub use error::{ArchivedImageError, ImportError, LeftOutImage, LeftOutReason};
pub use image::{Descriptor, Image, ImageLayer, Labels};
pub use import::ImportedImages;
pub use instance::{InstanceId, InvalidInstanceId};
pub use layout::{ContainerdDataDir, ContainerdRunDir, DirectoryLayout, InvalidDirectories};

pub use limits::ImportLimits;
pub use name::{ImageName, InvalidContainerdName, MAX_IMAGE_NAME_BYTES, MAX_NAMESPACE_BYTES, Namespace};
pub use plan::{
    BUNDLE_LABEL_PREFIX, Bundle, BundleAction, BundleDirectory, BundleFingerprint, ImageUpdate,
    ImageUpdateKind, ImportReason, PreseedPlan, WantedBundles, plan_preseed,
};
pub use platform::Platform;
pub use policy::{AllowList, AllowedImage, ImagePolicy, InvalidAllowedImage, OfferedImage};
pub use prepare::{PrepareError, prepare_layout};
pub use preseed::{
    BundleCounts, BundleOutcome, DamagedImage, ImageProof, ImageStage, ImageState, Preseed, PreseedError,
    PreseedReport, ProofKind, RequiredImage, UncomparedImage,
};
pub use runsc::runsc_log_reader;
pub use scan::{AbsentDirectory, SkippedEntry, find_misplaced_archives};
pub use single_archive::import_archive;
pub use store::{
    BlobWriter, ErrorSource, ImageStore, ImageStoreError, ImportSession, IncomingBlob, ReadPace,
};
