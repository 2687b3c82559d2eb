//! etcd's own reasons for an exit, read from its output.
//!
//! etcd exits with the same code for most reasons, and logs the reason: as a line of JSON by zap, in 3.4 also in the
//! text format of capnslog; a panic of Go as text alone. Only the fields of a line that etcd itself words are compared:
//! others may contain keys of a client.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodekeel_supervisor::{OutputOrigin, OutputSink};
use serde::Deserialize;
use tokio::time::Instant;

use crate::consensus::error::{REMOVED_NODE, REPLACE_NODE};

/// The longest line that is read: the fields that matter come before the stack trace.
const MAX_LINE: usize = 16 * 1024;
/// The longest text of etcd that is quoted, in characters.
const MAX_QUOTE: usize = 200;

/// The reason for which etcd exits, or can't connect: a clause with the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EtcdFault {
    /// The cluster has committed more than its log has: the data is older than what this member has acknowledged.
    LogBehind,
    /// Another member, with data of another cluster, has called or was called.
    OtherCluster,
    /// The cluster has removed it.
    Removed,
    /// The database is damaged.
    DatabaseDamaged,
    /// The write-ahead log is damaged.
    LogDamaged,
    /// The disk has no room.
    DiskFull,
    /// Another process listens at its address.
    AddressInUse(String),
    /// Another version of etcd has written the data, or runs in the cluster.
    WrongVersion(String),
    /// Its data differs from that of the other members.
    Corrupt,
    /// The words of etcd.
    Unparsed(String),
}

impl fmt::Display for EtcdFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LogBehind => write!(
                f,
                "its data is older than what the cluster has committed, as after a restore or a lost disk; {REPLACE_NODE}"
            ),
            Self::OtherCluster => write!(
                f,
                "its data is of another cluster than that of the members that it reaches; restore this node's data, or {REPLACE_NODE}"
            ),
            Self::Removed => f.write_str(REMOVED_NODE),
            Self::DatabaseDamaged => {
                write!(f, "its database is damaged; check the disk, then {REPLACE_NODE}")
            }
            Self::LogDamaged => {
                write!(f, "its write-ahead log is damaged; check the disk, then {REPLACE_NODE}")
            }
            Self::DiskFull => f.write_str("its disk is full; free space on it"),
            Self::AddressInUse(address) => {
                write!(
                    f,
                    "another process listens at {address}; stop it, or change the ports of services.etcd"
                )
            }
            Self::WrongVersion(text) => write!(
                f,
                "its version does not suit the data or the cluster ({text}); set `services.etcd.binary` to the version \
                 of the other members"
            ),
            Self::Corrupt => write!(f, "its data differs from that of the other members; {REPLACE_NODE}"),
            Self::Unparsed(text) => write!(f, "etcd reports: {text}"),
        }
    }
}

/// The fields of a line that etcd words.
#[derive(Debug, Default, Deserialize)]
struct LogLine {
    #[serde(default)]
    level: String,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    error: String,
    /// The message of a panic in a job.
    #[serde(default)]
    panic: String,
}

impl LogLine {
    /// None if it is neither a line of one of etcd's loggers nor the message of a panic.
    fn parse(line: &str) -> Option<LogLine> {
        if line.starts_with('{') {
            return serde_json::from_str(line).ok();
        }
        if let Some(message) = line.strip_prefix("panic: ").or_else(|| line.strip_prefix("fatal error: ")) {
            return Some(LogLine { level: "panic".into(), msg: message.into(), ..LogLine::default() });
        }
        if line.starts_with("flag provided but not defined") {
            return Some(LogLine { level: "fatal".into(), msg: line.into(), ..LogLine::default() });
        }
        // capnslog: `2026-11-21 11:26:12.708 C | etcdmain: walpb: crc mismatch`.
        let (head, message) = line.split_once(" | ")?;
        let level = match head.rsplit(' ').next()? {
            "C" => "fatal",
            "E" | "W" => "error",
            _ => return None,
        };
        let (_package, message) = message.split_once(": ")?;
        Some(LogLine { level: level.into(), msg: message.into(), ..LogLine::default() })
    }

    /// Only such a line ends etcd.
    fn is_last(&self) -> bool {
        matches!(&*self.level, "panic" | "fatal" | "dpanic")
    }
}

impl EtcdFault {
    /// The fault that a line of etcd's output names.
    pub(super) fn parse(line: &str) -> Option<EtcdFault> {
        let found = LogLine::parse(line)?;
        let LogLine { msg, error, panic, .. } = &found;
        // These are no errors to etcd, which exits in its own time, or not at all.
        if msg.contains("cluster ID mismatch") {
            return Some(Self::OtherCluster);
        }
        let has = |needle: &str| [msg, error, panic].into_iter().any(|text| text.contains(needle));
        if (msg == "server error" || found.is_last()) && has("permanently removed from the cluster") {
            return Some(Self::Removed);
        }
        if !found.is_last() {
            return None;
        }
        let quoted = || {
            let texts = [msg, error, panic].into_iter().filter(|text| !text.is_empty());
            let text = texts.map(String::as_str).collect::<Vec<_>>().join(": ");
            text.chars().filter(|char| !char.is_control()).take(MAX_QUOTE).collect::<String>()
        };
        let is_database = [
            "failed to open database",
            "freepages:",
            "Page expected to be",
            "invalid freelist",
            "page already freed",
        ];
        let is_version = [
            "unmarshal should never fail",
            "cannot be downgraded",
            "invalid downgrade",
            "incompatible with current running cluster",
            "version is not supported",
            "unsupported version",
        ];
        Some(match () {
            () if has("tocommit(") && has("is out of range") => Self::LogBehind,
            () if has("no space left on device") => Self::DiskFull,
            () if has("address already in use") => {
                let address = error.strip_prefix("listen tcp ").unwrap_or(error);
                Self::AddressInUse(address.split(": ").next().unwrap_or_default().to_owned())
            }
            () if is_version.into_iter().any(has) => Self::WrongVersion(quoted()),
            () if has("found data inconsistency")
                || has("data corruption")
                || has("checkInitialHashKV failed") =>
            {
                Self::Corrupt
            }
            () if is_database.into_iter().any(has) => Self::DatabaseDamaged,
            () if has("crc mismatch") || has("invalid wire-format data") => Self::LogDamaged,
            () => Self::Unparsed(quoted()),
        })
    }

    /// Whether it may be the reason of a member that runs and reaches nobody.
    fn is_of_connections(&self) -> bool {
        matches!(self, Self::OtherCluster)
    }
}

/// The fault that a start of etcd has reported last. It takes a copy of etcd's output.
#[derive(Clone, Debug, Default)]
pub(super) struct FaultLog(Arc<Mutex<Option<(EtcdFault, Instant)>>>);

impl FaultLog {
    /// The reason of an exit.
    pub(super) fn exit_fault(&self) -> Option<EtcdFault> {
        let found = self.lock();
        found.as_ref().map(|(fault, _)| fault.clone()).filter(|fault| !fault.is_of_connections())
    }

    /// The reason for which it reaches nobody, if it was reported since.
    pub(super) fn connection_fault(&self, since: Instant) -> Option<EtcdFault> {
        let found = self.lock();
        found
            .as_ref()
            .filter(|(fault, at)| fault.is_of_connections() && *at >= since)
            .map(|(fault, _)| fault.clone())
    }

    /// The reader of another start of etcd, for one of its streams.
    fn read_start(&self) -> LineReader {
        *self.lock() = None;
        LineReader { log: self.clone(), line: Vec::new() }
    }

    fn note(&self, line: &[u8]) {
        let Some(fault) = EtcdFault::parse(&String::from_utf8_lossy(line)) else { return };
        let mut last = self.lock();
        // A panic is printed after its log entry, and says less.
        let is_known = last.as_ref().is_some_and(|(known, _)| !known.is_of_connections());
        if !(is_known && matches!(fault, EtcdFault::Unparsed(_))) {
            *last = Some((fault, Instant::now()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<(EtcdFault, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OutputSink for FaultLog {
    fn open_writer(&self, _: OutputOrigin<'_>) -> Box<dyn io::Write + Send> {
        Box::new(self.read_start())
    }
}

/// Splits the output into lines.
struct LineReader {
    log: FaultLog,
    /// The beginning of an incomplete line.
    line: Vec<u8>,
}

impl io::Write for LineReader {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = MAX_LINE.saturating_sub(self.line.len());
            self.line.extend_from_slice(&piece[..piece.len().min(room)]);
            if piece.ends_with(b"\n") {
                self.log.note(self.line.trim_ascii_end());
                self.line.clear();
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Arbitrary bytes as output of etcd, in two parts.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_output(bytes: &[u8]) {
    let log = FaultLog::default();
    let mut writer = log.read_start();
    let (first, second) = bytes.split_at(bytes.len() / 2);
    for part in [first, second] {
        let written = io::Write::write(&mut writer, part);
        assert_eq!(written.ok(), Some(part.len()));
    }
    if let Some(fault) = log.exit_fault() {
        let text = fault.to_string();
        assert!(!text.is_empty() && !text.contains('\n'), "one line: {text:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of real runs, after the reason that they give.
    const GOLDEN: [(&str, &str); 2] = [
        ("3.4.23", include_str!("../../../testdata/etcd-3.4.23-faults.txt")),
        ("3.7.3", include_str!("../../../testdata/etcd-3.7.3-faults.txt")),
    ];

    fn kind(fault: Option<&EtcdFault>) -> &'static str {
        match fault {
            None => "none",
            Some(EtcdFault::LogBehind) => "behind",
            Some(EtcdFault::OtherCluster) => "other-cluster",
            Some(EtcdFault::Removed) => "removed",
            Some(EtcdFault::DatabaseDamaged) => "database",
            Some(EtcdFault::LogDamaged) => "log",
            Some(EtcdFault::DiskFull) => "full",
            Some(EtcdFault::AddressInUse(_)) => "address",
            Some(EtcdFault::WrongVersion(_)) => "version",
            Some(EtcdFault::Corrupt) => "corrupt",
            Some(EtcdFault::Unparsed(_)) => "other",
        }
    }

    #[test]
    fn each_line_of_both_releases_names_its_fault() {
        for (release, golden) in GOLDEN {
            for line in golden.lines().filter(|line| !line.starts_with('#')) {
                let (expected, line) = line.split_once(' ').expect("KIND LINE");
                let found = EtcdFault::parse(line);
                assert_eq!(kind(found.as_ref()), expected, "{release}: {line}: {found:?}");
            }
        }
    }

    #[test]
    fn the_text_format_of_the_old_logger_is_read_too() {
        let parsed = |line: &str| EtcdFault::parse(line);
        assert_eq!(
            parsed("2026-11-21 11:26:12.708 C | etcdmain: walpb: crc mismatch"),
            Some(EtcdFault::LogDamaged)
        );
        let removed = "2026-11-21 11:26:12.708 E | etcdserver: the member has been permanently removed from the cluster";
        assert_eq!(parsed(removed), None, "only with the exit");
        assert_eq!(parsed(&removed.replace(" E ", " C ")), Some(EtcdFault::Removed));
        assert_eq!(parsed("2026-11-21 11:26:12.708 I | etcdmain: panic: none"), None);
    }

    #[test]
    fn a_key_of_a_client_is_no_fault() {
        let slow = r#"{"level":"warn","msg":"apply request took too long","request":"key:\"tocommit(1) is out of range\"","error":"no space left on device"}"#;
        assert_eq!(EtcdFault::parse(slow), None);
    }

    #[test]
    fn the_log_entry_of_a_panic_counts_and_not_the_panic_and_another_start_forgets_it() {
        let log = FaultLog::default();
        let mut writer = log.read_start();
        let entry = br#"{"level":"panic","msg":"failed to open database","error":"invalid database"}"#;
        for chunk in [&entry[..30], &entry[30..], b"\npanic: x\n\ngoroutine 1 [running]:\n"] {
            io::Write::write_all(&mut writer, chunk).unwrap();
        }
        assert_eq!(log.exit_fault(), Some(EtcdFault::DatabaseDamaged));
        log.read_start();
        assert_eq!(log.exit_fault(), None);
    }

    #[test]
    fn arbitrary_changes_of_real_output_are_no_panic() {
        for (_, golden) in GOLDEN {
            for at in (0..golden.len()).step_by(7) {
                check_arbitrary_output(&golden.as_bytes()[..at]);
                let mut changed = golden.as_bytes().to_vec();
                changed[at] ^= 0x55;
                check_arbitrary_output(&changed);
            }
        }
    }
}
