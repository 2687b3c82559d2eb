//! Consensus by a real etcd: Debian's 3.4, and the newest as a Go tool, the same tests on both.

mod address_change;
mod ca_key;
mod cluster;
mod etcd_fixture;
mod kills;
mod lifecycle;
mod peer_name;
mod peer_question;
mod rejections;
mod restored_copy;
mod upgrade;

pub(crate) use etcd_fixture::{EtcdVersion, etcd_client, etcd_processes, retried};
pub(crate) use peer_question::ask_peer;
