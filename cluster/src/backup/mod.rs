//! Backups of the cluster: a snapshot of the store, verified, and encrypted before it touches a disk.
//!
//! A backup is a file of [age](https://age-encryption.org/v1), for one recipient. Its content is the file that `etcdctl snapshot
//! save` writes: etcd's database, and its SHA-256. So a person opens it without nodekeel: `age -d -i KEY BACKUP`.
//!
//! ```text
//!  StoreMaintenance::snapshot ──▶ encrypt_snapshot ──▶ pieces of the file
//!        the store's pieces          verifies            its last one only if the snapshot is whole
//! ```
//!
//! A cluster that is lost is restored from the decrypted file, which [`stage_snapshot`] verifies and stores, by
//! [`ClusterNode::request_restore`](crate::enrolment::ClusterNode::request_restore).
//!
//! The snapshot contains all secrets of the cluster but the private key of its CA, which is [sealed](crate::pki). The node that writes
//! it needs no secret for that: the key that opens it is elsewhere.

mod encrypt;
mod snapshot;
mod stage;

pub use crate::age::{InvalidRecipient, Recipient};
pub use encrypt::encrypt_snapshot;
pub use snapshot::SnapshotError;
pub use stage::stage_snapshot;
