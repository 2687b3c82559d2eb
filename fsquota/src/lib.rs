//! Project quotas of XFS and ext4 by system call: limits and usage of a directory tree in bytes and inodes.
//!
//! It does not handle user or group quotas, run programs or mount file systems, and keeps one empty file, the
//! lock. Its errors name the mount options that are missing.
//!
//! ```text
//!             ┌────────────── file system, mounted with prjquota ───────────────┐
//! set(dir) ──▶│ 1  project 2000000007: 10 GiB, 100,000 inodes       (quotactl)  │
//!             │ 2  dir ── is marked as the owner of 2000000007  (trusted xattr) │
//!             │ 3      └─ carries 2000000007, inherited by ┐  (FS_IOC_FSSETXATTR)│
//!             │            everything created in it ◀──────┘                    │
//!             └─────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The limits are set first, so nothing is ever created in the directory without them. A project is never
//! allocated to two directories, and only the directory that it was allocated to changes its limits. Finding a free project takes one query to the kernel, however many projects
//! exist.
//!
//! ```
//! use std::fs::{self, File};
//! use std::os::fd::AsFd;
//!
//! use nodekeel_fsquota::{Bytes, Inodes, LimitChange, ProjectQuota, QuotaChange, QuotaSetter};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let parent = std::env::temp_dir();
//!     let quota = match ProjectQuota::open(&parent) {
//!         Ok(quota) => quota,
//!         Err(error) => {
//!             // Names what is missing: root, the mount option, or a file system with project quotas.
//!             println!("{error}");
//!             return Ok(());
//!         }
//!     };
//!     let path = parent.join("fsquota-example");
//!     fs::create_dir_all(&path)?;
//!     let dir = File::open(&path)?;
//!
//!     let status = quota.set_limits(dir.as_fd(), QuotaChange {
//!         bytes: LimitChange::Set("10Gi".parse()?),
//!         inodes: LimitChange::Set(Inodes(100_000)),
//!     })?;
//!     assert_eq!(status.limits.bytes, Some(Bytes(10 << 30)));
//!     assert_eq!(status.remaining_quota().inodes, Some(Inodes(99_999)), "the directory itself is one");
//!
//!     // Either limit changes alone, and "no limit" is not 0.
//!     let change = QuotaChange { bytes: LimitChange::Unlimited, inodes: LimitChange::Keep };
//!     let status = quota.set_limits(dir.as_fd(), change)?;
//!     assert_eq!((status.limits.bytes, status.limits.inodes), (None, Some(Inodes(100_000))));
//!
//!     quota.clear_limits(dir.as_fd())?;
//!     fs::remove_dir(&path)?;
//!     Ok(())
//! }
//! ```
//!
//! # What it does not protect from
//!
//! A process in the initial user namespace can move a file that it owns out of its project, and so out of the
//! limits. ext4 lets processes with CAP_SYS_RESOURCE exceed the limits.
//! [`ProjectQuota::enforcement_gaps`] lists which of these apply. Run limited programs in a user namespace, or
//! deny them the ioctl `FS_IOC_FSSETXATTR`. A limit does not reserve space: the sum of all limits may exceed
//! the file system (`examples/own_quota.rs` prevents that).
//!
//! # Bring your own
//!
//! To limit directories in another way, implement [`QuotaSetter`] and run `testing::conformance` against it.
//! [`ProjectQuota`] passes that suite in a guest, `testing::MemQuota` everywhere.
//!
//! # Features
//!
//! - `serde` (off): reads [`Bytes`] and [`Inodes`] from configurations, as text or as whole numbers.
//! - `testing` (off): `testing::MemQuota` for tests of code that uses a [`QuotaSetter`], as any user on any
//!   file system; the conformance suite; checks that property tests and fuzz targets share.
//!
//! # Origin
//!
//! Monogon OS' `osbase/fsquota`, whose model it keeps: a project per directory, by `quotactl_fd`. Layouts and
//! numbers are those of linux/quota.h, linux/dqblk_xfs.h and linux/fs.h; differences from the original follow
//! xfs(5), ext4(5) and the kernel's fs/quota.

mod audit;
mod engine;
mod error;
mod file_system;
mod kernel;
mod limits;
mod linux;
mod owner;
mod project;
mod quantity;
mod range;
mod setter;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
mod tree;
mod verify;

pub use audit::{AuditFinding, AuditOptions, AuditReport, AuditSummary, FindingKind, ProjectDirectories};
pub use error::{Error, KernelOperation};
pub use file_system::{EnforcementGap, FileSystem, FileSystemKind, OpenError};
pub use limits::{LimitChange, LimitError, ProjectId, QuotaChange, QuotaLimits, QuotaStatus, QuotaUsage};
pub use project::ProjectQuota;
pub use quantity::{Bytes, Inodes, QuantityError};
pub use range::ProjectRange;
pub use setter::QuotaSetter;
pub use tree::TreeSummary;
