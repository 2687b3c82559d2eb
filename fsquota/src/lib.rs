//! Project quotas of XFS and ext4 by system call: limits and usage of a directory tree in bytes and inodes.
//!
//! It knows no users and groups, runs no programs, keeps no files of its own, and does not mount: what to mount how is
//! what its errors say.
//!
//! ```text
//!             ┌────────────── file system, mounted with prjquota ───────────────┐
//! set(dir) ──▶│ 1  project 2000000007: 10 GiB, 100,000 inodes       (quotactl)  │
//!             │ 2  dir ── carries 2000000007, and so does ─┐  (FS_IOC_FSSETXATTR)│
//!             │            all that is made in it ◀────────┘                    │
//!             └─────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The limits come first, so nothing is ever made in the directory without them. A project is never given to two
//! directories; finding a free one takes one question to the kernel, however many there are.
//!
//! ```
//! use std::os::fd::AsFd;
//! use nodekeel_fsquota::{Bytes, Change, Inodes, Limit, QuotaSetter};
//! # use nodekeel_fsquota::testing::MemQuota;
//!
//! # let scratch = tempfile::tempdir()?;
//! # let path = scratch.path();
//! // For the real thing: ProjectQuota::open(mount_point)?
//! let quota = MemQuota::new();
//! let dir = std::fs::File::open(path)?;
//!
//! let status = quota.set(dir.as_fd(), Change {
//!     bytes: Limit::At("10Gi".parse()?),
//!     inodes: Limit::At(Inodes(100_000)),
//! })?;
//! assert_eq!(status.limits.bytes, Some(Bytes(10 << 30)));
//! assert_eq!(status.available().inodes, Some(Inodes(99_999)), "the directory itself is one");
//!
//! // Either limit changes alone, and "no limit" is not 0.
//! let status = quota.set(dir.as_fd(), Change { bytes: Limit::Unlimited, inodes: Limit::Keep })?;
//! assert_eq!((status.limits.bytes, status.limits.inodes), (None, Some(Inodes(100_000))));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it does not protect from
//!
//! Whoever owns a file and is in the initial user namespace can take it out of its project, and so out of the limits;
//! ext4 lets CAP_SYS_RESOURCE exceed them. Whoever can open the directory where the file system is mounted can take the
//! lock of those who set limits. [`ProjectQuota::warnings`] says what holds where. Run what is limited in a
//! user namespace, or deny it the ioctl `FS_IOC_FSSETXATTR`. A limit is no reservation, either: the sum of all may be
//! more than there is (`examples/own_quota.rs` minds that).
//!
//! # Bring your own
//!
//! [`QuotaSetter`] is the seam: what gives directories limits in another way implements it, and runs
//! `testing::conformance`, which [`ProjectQuota`] passes in a guest and `testing::MemQuota` everywhere.
//!
//! # Features
//!
//! - `testing` (off): `testing::MemQuota` for tests of what uses a [`QuotaSetter`], as any user on any file system;
//!   the conformance suite; checks that property tests and fuzz targets share.
//!
//! # Origin
//!
//! Monogon OS' `osbase/fsquota`, whose model it keeps: a project per directory, by `quotactl_fd`. Layouts and numbers
//! are those of linux/quota.h, linux/dqblk_xfs.h and linux/fs.h; what is otherwise is because of xfs(5), ext4(5) and
//! the kernel's fs/quota.

mod engine;
mod error;
mod file_system;
mod kernel;
mod limits;
mod linux;
mod mounts;
mod project;
mod quantity;
mod range;
mod setter;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
mod tree;

pub use error::{Call, Error};
pub use file_system::{FileSystem, Kind, OpenError, Warning};
pub use limits::{Change, Limit, LimitError, Limits, ProjectId, Status, Usage};
pub use project::ProjectQuota;
pub use quantity::{Bytes, Inodes, QuantityError};
pub use range::ProjectRange;
pub use setter::QuotaSetter;
pub use tree::Changed;
