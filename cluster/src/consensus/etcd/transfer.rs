//! The data of its cluster that a member receives before its etcd answers, as it arrives on the disk.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::{SeekFrom, seek};
use tokio::task::spawn_blocking;

/// The length of a file of the log, which it has from the start; its end is a hole until it is written.
///
/// *Source:* `SegmentSizeBytes` in etcd's `wal/wal.go`.
const SEGMENT: u64 = 64_000_000;
/// The most that etcd writes to its log at a start, and without a leader.
const OWN_ENTRIES: u64 = 64 << 10;

/// What has arrived and is kept, in bytes. A leader sends its database to a member for which its log is too short, and then,
/// or to any other member, the entries of its log.
///
/// Bytes on the network would tell less: until the first entries are acknowledged, a leader sends them again with each
/// heartbeat, and the member discards the copies.
///
/// *Source:* `MsgHeartbeatResp` in `stepLeader` of etcd's `raft.go`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReceivedData {
    databases: u64,
    log: u64,
}

impl ReceivedData {
    /// What is in a data directory.
    pub(super) async fn read(data: &Path) -> ReceivedData {
        let member = data.join("member");
        let read = move || ReceivedData {
            databases: database_bytes(&member.join("snap")),
            log: log_end(&member.join("wal")),
        };
        // The disk may stand still.
        spawn_blocking(read).await.unwrap_or_default()
    }

    /// What came in addition to what there was before. The log counts only for a member that joins: any other writes to it
    /// whenever it stands for election.
    pub(super) fn since(self, before: ReceivedData, joins: bool) -> ReceivedData {
        let log = self.log.saturating_sub(before.log).saturating_sub(OWN_ENTRIES);
        ReceivedData {
            databases: self.databases.saturating_sub(before.databases),
            log: if joins { log } else { 0 },
        }
    }

    /// The most of both kinds. A transfer that starts over is no progress until it is further than the one before.
    pub(super) fn max(self, other: ReceivedData) -> ReceivedData {
        ReceivedData { databases: self.databases.max(other.databases), log: self.log.max(other.log) }
    }

    /// Whether a leader has sent its database, whose size it tells.
    pub(super) fn is_database(self) -> bool {
        self.databases > 0
    }

    pub(super) fn bytes(self) -> u64 {
        self.databases + self.log
    }
}

/// The bytes of the databases that a leader sends, or has sent.
///
/// *Source:* `SaveDBFrom` in etcd's `snap/db.go`.
fn database_bytes(snap: &Path) -> u64 {
    let is_database = |name: &str| name.starts_with("tmp") || name.ends_with(".snap.db");
    let found = files(snap).filter(|(name, _)| is_database(name));
    found.filter_map(|(_, path)| Some(path.metadata().ok()?.len())).sum()
}

/// Where the log ends, which etcd removes from its start.
///
/// *Source:* `walName` in etcd's `wal/util.go`: `%016x-%016x.wal`, the number of the file and of its first entry.
fn log_end(wal: &Path) -> u64 {
    let last = files(wal).filter(|(name, _)| name.ends_with(".wal")).max();
    let end = last.and_then(|(name, path)| {
        let number = u64::from_str_radix(name.split('-').next()?, 16).ok()?;
        Some(number * SEGMENT + seek(File::open(path).ok()?, SeekFrom::Hole(0)).ok()?)
    });
    end.unwrap_or(0)
}

fn files(directory: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn databases_and_entries_count_as_they_arrive() {
        let data = tempfile::tempdir().unwrap();
        let path = |name: &str| data.path().join("member").join(name);
        let read = async || ReceivedData::read(data.path()).await;
        assert_eq!(read().await, ReceivedData::default(), "there is no directory yet");
        ["snap", "wal"].iter().for_each(|name| fs::create_dir_all(path(name)).unwrap());
        fs::write(path("snap/db"), [0; 10]).unwrap();
        fs::write(path("snap/0000000000000009.snap.db"), [0; 20]).unwrap();
        fs::write(path("snap/tmp123"), [0; 30]).unwrap();
        // As etcd makes its files: their length does not tell how much is written.
        let log = |name: &str, written: usize| {
            fs::write(path(name), vec![1; written]).unwrap();
            File::options().write(true).open(path(name)).unwrap().set_len(SEGMENT).unwrap();
        };
        log("wal/0000000000000000-0000000000000000.wal", 1 << 20);
        log("wal/1.tmp", 0);
        let first = read().await;
        assert_eq!(first, ReceivedData { databases: 50, log: 1 << 20 });
        log("wal/000000000000000a-0000000000000007.wal", 2 << 20);
        fs::remove_file(path("wal/0000000000000000-0000000000000000.wal")).unwrap();
        assert_eq!(read().await.log, 10 * SEGMENT + (2 << 20));
    }

    #[test]
    fn only_what_others_have_sent_is_received() {
        let received = |databases, log| ReceivedData { databases, log };
        let before = received(10, 1000);
        assert_eq!(received(30, 1000 + OWN_ENTRIES).since(before, true), received(20, 0), "it has started");
        assert_eq!(received(30, 1007 + OWN_ENTRIES).since(before, true).bytes(), 27);
        assert_eq!(received(30, SEGMENT).since(before, false), received(20, 0), "it stands for election");
        // etcd renames the database once it has all of it.
        assert_eq!(received(20, 0).max(received(0, 5)).bytes(), 25);
    }
}
