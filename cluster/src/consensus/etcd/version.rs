//! The version gate: which etcd may start with which data.
//!
//! etcd supports an upgrade by one minor release at a time, and no way back. It does not enforce this itself: 3.4
//! starts with data of 3.7, and leaves data that 3.7 cannot read. The highest version that was started with the data
//! is therefore recorded next to it, before each start. Data without a record is older than the record: its database
//! has the version of the cluster, which is that of its oldest member, and from 3.6 on that of its schema.

use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nodekeel_localstorage::tree::{EtcdDir, LayoutFile};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::backend::{DB_PATH, highest_version};
use crate::consensus::ConsensusError;

/// The time that a program may take to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// The version that etcd gives to a cluster until it has asked all members, so that it proves nothing.
///
/// *Source:* `MinClusterVersion` in etcd's `version/version.go`.
const UNKNOWN_CLUSTER_VERSION: EtcdVersion = EtcdVersion { major: 3, minor: 0 };

/// A minor release of etcd. Its patch releases share their data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EtcdVersion {
    pub(super) major: u32,
    pub(super) minor: u32,
}

impl fmt::Display for EtcdVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl EtcdVersion {
    /// Parses `3.4`, `3.4.23` or `3.6.0-rc.1`.
    pub(super) fn parse(version: &str) -> Option<EtcdVersion> {
        let mut numbers = version.trim_end().split('.');
        let (major, minor) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
        Some(EtcdVersion { major, minor })
    }

    /// Parses the version of a cluster, that of its oldest member; `None` if etcd has not decided it.
    pub(super) fn parse_cluster(version: &str) -> Option<EtcdVersion> {
        EtcdVersion::parse(version).filter(|version| *version != UNKNOWN_CLUSTER_VERSION)
    }

    /// Asks this program for its version.
    pub(super) async fn of_program(binary: &Path) -> Option<EtcdVersion> {
        let mut command = Command::new(binary);
        // etcd reads flags from `ETCD_` variables, too: those of this process must not reach it.
        command.arg("--version").env_clear().stdin(Stdio::null()).stderr(Stdio::null());
        let printed = timeout(VERSION_TIMEOUT, spawn_blocking(move || command.output())).await;
        EtcdVersion::parse_printed(&printed.ok()?.ok()?.ok()?.stdout)
    }

    /// Parses `etcd Version: 3.4.23`, the first line of `etcd --version`.
    pub(super) fn parse_printed(printed: &[u8]) -> Option<EtcdVersion> {
        let line = std::str::from_utf8(printed).ok()?.strip_prefix("etcd Version: ")?;
        EtcdVersion::parse(line.lines().next()?)
    }
}

/// Refuses an etcd of this version to a cluster of that one, with a clause: some releases stop when a much newer one joins.
pub(super) fn check_join_version(version: EtcdVersion, cluster: EtcdVersion) -> Result<(), String> {
    if may_start(version, cluster) {
        return Ok(());
    }
    let next = EtcdVersion { minor: cluster.minor + 1, ..cluster };
    Err(format!(
        "its etcd {version} can't join a cluster of etcd {cluster}: install etcd {cluster} or {next}, or set \
         services.etcd.binary to one, and restart the node"
    ))
}

/// Whether etcd of this version may start with data of that one.
fn may_start(version: EtcdVersion, data: EtcdVersion) -> bool {
    version.major == data.major && (version.minor == data.minor || version.minor == data.minor + 1)
}

/// Rejects an etcd that must not start with the data, which stays unchanged. Records the version of one that may.
///
/// # Errors
/// [`ConsensusError::EtcdDowngrade`] and [`ConsensusError::EtcdUpgradeTooFar`]; [`ConsensusError::EtcdVersionUnknown`] if
/// the data has a version, but the program prints none.
pub(super) fn check_version(
    files: &EtcdDir,
    record: &LayoutFile,
    binary: &Path,
    version: Option<EtcdVersion>,
    has_data: bool,
) -> Result<(), ConsensusError> {
    let recorded = read_record(record)?;
    // Without data, the record is of data that is gone.
    let data = if has_data { recorded.max(database_version(files)?) } else { None };
    check_may_start(binary, version, files.data.path(), data)?;
    // Before etcd starts: a kill must not leave data that a newer etcd has touched under an older version.
    if let Some(version) = version.filter(|version| recorded != Some(*version)) {
        let written = record.write(format!("{version}\n").as_bytes());
        written.map_err(ConsensusError::backend("record the version of etcd"))?;
    }
    Ok(())
}

/// Rejects a program that must not start with data of that version.
///
/// # Errors
/// Those of [`check_version`].
pub(super) fn check_may_start(
    binary: &Path,
    version: Option<EtcdVersion>,
    directory: &Path,
    data: Option<EtcdVersion>,
) -> Result<(), ConsensusError> {
    match (version, data.filter(|data| *data != UNKNOWN_CLUSTER_VERSION)) {
        (None, Some(data)) => {
            Err(ConsensusError::EtcdVersionUnknown { binary: binary.to_owned(), data: data.to_string() })
        }
        (Some(version), Some(data)) if !may_start(version, data) => {
            let (directory, binary) = (directory.to_owned(), binary.to_owned());
            let (is_older, version, written) = (version < data, version.to_string(), data.to_string());
            Err(if is_older {
                ConsensusError::EtcdDowngrade { binary, version, directory, written }
            } else {
                let next = EtcdVersion { minor: data.minor + 1, ..data }.to_string();
                ConsensusError::EtcdUpgradeTooFar { binary, version, directory, written, next }
            })
        }
        // The start fails by itself if the program is none.
        _ => Ok(()),
    }
}

/// The recorded version. A damaged record counts as none.
fn read_record(record: &LayoutFile) -> Result<Option<EtcdVersion>, ConsensusError> {
    let content = record.read_if_present().map_err(ConsensusError::backend("read the version of etcd"))?;
    Ok(content.and_then(|content| EtcdVersion::parse(std::str::from_utf8(&content).ok()?)))
}

/// The version that the database has.
fn database_version(files: &EtcdDir) -> Result<Option<EtcdVersion>, ConsensusError> {
    let failed = "read the version of etcd's data";
    let file = match files.data.open().and_then(|data| data.open_file(DB_PATH)) {
        Ok(file) => file,
        Err(error) if error.is_not_found() => return Ok(None),
        Err(error) => return Err(ConsensusError::backend(failed)(error)),
    };
    let version = highest_version(&file).map_err(ConsensusError::backend(failed))?;
    Ok(version.filter(|version| *version != UNKNOWN_CLUSTER_VERSION))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_etcd_joins_a_cluster_of_its_release_or_of_the_one_before() {
        let refused = |version: &str, cluster: &str| {
            let cluster = EtcdVersion::parse_cluster(cluster).unwrap();
            check_join_version(EtcdVersion::parse(version).unwrap(), cluster).err()
        };
        assert_eq!(refused("3.4.23", "3.4.0").or(refused("3.5.35", "3.4.0")), None);
        for (version, cluster) in [("3.6.1", "3.4.0"), ("3.4.23", "3.5.0")] {
            let text = refused(version, cluster).unwrap();
            assert!(text.contains("install etcd 3.") && text.contains("services.etcd.binary"), "{text}");
        }
        assert_eq!(EtcdVersion::parse_cluster("not_decided").or(EtcdVersion::parse_cluster("3.0.0")), None);
    }

    #[test]
    fn the_same_minor_release_and_the_next_may_start() {
        let may = |version: &str, data: &str| {
            may_start(EtcdVersion::parse(version).unwrap(), EtcdVersion::parse(data).unwrap())
        };
        for (version, data) in [("3.4.23", "3.4"), ("3.4.1", "3.4.23"), ("3.5.0", "3.4"), ("3.10.1", "3.9")] {
            assert!(may(version, data), "{version} with data of {data}");
        }
        let refused =
            [("3.4.23", "3.7"), ("3.6.9", "3.7"), ("3.9.0", "3.10"), ("3.6.0", "3.4"), ("3.7.3", "3.4")];
        for (version, data) in
            refused.into_iter().chain([("4.0.0", "3.7"), ("2.3.0", "3.4"), ("4.7.0", "3.7")])
        {
            assert!(!may(version, data), "{version} with data of {data}");
        }
    }

    #[test]
    fn the_first_line_has_the_version() {
        let parsed = |printed: &[u8]| EtcdVersion::parse_printed(printed).map(|version| version.to_string());
        assert_eq!(parsed(b"etcd Version: 3.4.23\nGit SHA: Not provided\n").unwrap(), "3.4");
        assert_eq!(parsed(b"etcd Version: 3.6.0-rc.1\n").unwrap(), "3.6");
        for unknown in [&b""[..], b"etcd Version: main", b"\xff", b"Version: 3.4.23"] {
            assert_eq!(parsed(unknown), None);
        }
    }

    #[tokio::test]
    async fn a_program_that_prints_no_version_has_none() {
        for program in ["/bin/true", "/nowhere/etcd"] {
            assert_eq!(EtcdVersion::of_program(Path::new(program)).await, None);
        }
    }
}
