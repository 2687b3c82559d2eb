//! The text of the records in a record directory, version 1.
//!
//! ```text
//! nodekeel-record 1 host                 nodekeel-record 1 kept
//! boot 5c5f…-…                           boot 5c5f…-…
//! pidns pid:[4026531836]                 pidns pid:[4026531836]
//! host 7fff-3fffff                       dn root.service.web
//! start 98765                            mark 2bffffffff800001
//! users 0 65534                          user 65534
//! sum cbf29ce484222325                   definition 9f3c…
//!                                        cgroup /sys/fs/cgroup/nodekeel-keep-2b…
//!                                        process 4711 98766
//!                                        ready yes
//!                                        sum 84222325cbf29ce4
//! ```
//!
//! The last three before the sum are optional. The sum is the FNV-1a hash of everything before its line.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use super::mark::{HostId, ProcessMark};

const MAGIC: &str = "nodekeel-record ";
const VERSION: u32 = 1;
/// No record is longer: a DN has 255 bytes, a path 4,096.
pub(super) const MAX_RECORD_BYTES: usize = 16 * 1024;

/// The boot and the PID namespace in which a pid and a start time identify a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BootId {
    pub(super) boot: String,
    pub(super) pid_namespace: String,
}

/// A process, among all of one boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ProcessId {
    pub(super) pid: i32,
    /// In clock ticks since boot.
    pub(super) start: u64,
}

/// A supervisor that starts processes. Written before the first of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostRecord {
    pub(super) boot: BootId,
    pub(super) host_id: HostId,
    /// The start time of the program. None of its processes is older.
    pub(super) start: u64,
    /// The users as which it has started processes, and its own.
    pub(super) users: BTreeSet<u32>,
}

/// A process that is kept. Written before its start, and again with its pid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeptRecord {
    pub(super) boot: BootId,
    pub(super) dn: String,
    pub(super) mark: ProcessMark,
    /// The user as which it was started.
    pub(super) user: u32,
    /// The hash of what the process was started with.
    pub(super) definition: u64,
    pub(super) cgroup: Option<PathBuf>,
    /// `None` until it has started.
    pub(super) process: Option<ProcessId>,
    /// The process has reported `READY=1`.
    pub(super) is_ready: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Record {
    Host(HostRecord),
    Kept(KeptRecord),
}

/// The reason why a record can't be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ParseRecordError {
    #[error("a newer release wrote it")]
    Newer,
    #[error("it is not text, or does not begin with {MAGIC:?}, a version and a known kind of record")]
    NotRecord,
    #[error("its sum does not match its content: it was cut off or changed")]
    Sum,
    #[error("its line {0:?} is missing, repeated, out of order or invalid")]
    Line(String),
}

impl Record {
    /// Reads exactly what [`Display`](fmt::Display) writes.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, ParseRecordError> {
        let text = std::str::from_utf8(bytes).map_err(|_| ParseRecordError::NotRecord)?;
        let (version, lines) = text
            .strip_prefix(MAGIC)
            .and_then(|rest| rest.split_once(' '))
            .ok_or(ParseRecordError::NotRecord)?;
        // Before the sum, which a newer release may compute in another way.
        match version.parse::<u32>() {
            Ok(version) if version > VERSION => return Err(ParseRecordError::Newer),
            Ok(VERSION) => {}
            _ => return Err(ParseRecordError::NotRecord),
        }
        // A changed byte shows in the sum, so that the error does not blame the line.
        let content = text.rfind("sum ").map_or("", |at| &text[..at]);
        if text[content.len()..] != sum_line(content) {
            return Err(ParseRecordError::Sum);
        }
        let record = parse_lines(lines)?;
        // Only the exact form that `Display` writes is valid, which rejects unknown, repeated and reordered lines.
        let written = record.to_string();
        if written == text {
            return Ok(record);
        }
        let differing = text.lines().zip(written.lines()).find(|(line, expected)| line != expected);
        Err(bad_line(differing.and_then(|(line, _)| line.split(' ').next()).unwrap_or("sum")))
    }
}

fn parse_lines(text: &str) -> Result<Record, ParseRecordError> {
    let mut lines = text.lines();
    let kind = lines.next();
    // Of repeated lines the last counts here; `Record::parse` rejects the record afterwards.
    let fields: BTreeMap<&str, &str> = lines.filter_map(|line| line.split_once(' ')).collect();
    let field = |name| fields.get(name).copied().ok_or(bad_line(name));
    let hex = |name| u64::from_str_radix(field(name)?, 16).map_err(|_| bad_line(name));
    let boot = || -> Result<BootId, ParseRecordError> {
        Ok(BootId { boot: field("boot")?.to_owned(), pid_namespace: field("pidns")?.to_owned() })
    };
    match kind {
        Some("host") => Ok(Record::Host(HostRecord {
            boot: boot()?,
            host_id: HostId::parse(field("host")?).ok_or(bad_line("host"))?,
            start: field("start")?.parse().map_err(|_| bad_line("start"))?,
            users: field("users")?
                .split(' ')
                .map(|user| user.parse().map_err(|_| bad_line("users")))
                .collect::<Result<_, _>>()?,
        })),
        Some("kept") => Ok(Record::Kept(KeptRecord {
            boot: boot()?,
            dn: field("dn")?.to_owned(),
            mark: ProcessMark::from_limit(hex("mark")?).ok_or(bad_line("mark"))?,
            user: field("user")?.parse().map_err(|_| bad_line("user"))?,
            definition: hex("definition")?,
            cgroup: field("cgroup").ok().map(PathBuf::from),
            process: match field("process") {
                Ok(process) => Some(parse_process(process).ok_or(bad_line("process"))?),
                Err(_) => None,
            },
            is_ready: field("ready").is_ok(),
        })),
        _ => Err(ParseRecordError::NotRecord),
    }
}

fn bad_line(name: &str) -> ParseRecordError {
    ParseRecordError::Line(name.to_owned())
}

/// The last line of a record with this content.
fn sum_line(content: &str) -> String {
    format!("sum {:016x}\n", fnv1a([content.as_bytes()]))
}

fn parse_process(text: &str) -> Option<ProcessId> {
    let (pid, start) = text.split_once(' ')?;
    // 1 is init, which no supervisor starts.
    let pid = pid.parse().ok().filter(|pid| *pid > 1)?;
    Some(ProcessId { pid, start: start.parse().ok()? })
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Host(HostRecord { boot, host_id, start, users }) => {
                let users: String = users.iter().map(|user| format!(" {user}")).collect();
                format!("{MAGIC}{VERSION} host\n{boot}host {host_id}\nstart {start}\nusers{users}\n")
            }
            Self::Kept(kept) => format!("{MAGIC}{VERSION} kept\n{kept}"),
        };
        write!(f, "{text}{}", sum_line(&text))
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "boot {}\npidns {}\n", self.boot, self.pid_namespace)
    }
}

impl fmt::Display for KeptRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { boot, dn, mark, user, definition, cgroup, process, is_ready } = self;
        let mark = mark.as_limit();
        writeln!(f, "{boot}dn {dn}\nmark {mark:x}\nuser {user}\ndefinition {definition:016x}")?;
        if let Some(cgroup) = cgroup {
            writeln!(f, "cgroup {}", cgroup.display())?;
        }
        if let Some(ProcessId { pid, start }) = process {
            writeln!(f, "process {pid} {start}")?;
        }
        if *is_ready { f.write_str("ready yes\n") } else { Ok(()) }
    }
}

/// The FNV-1a hash of these parts in a row, which is the same in every release.
///
/// *Source:* draft-eastlake-fnv, the 64-bit parameters.
pub(super) fn fnv1a<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let bytes = parts.into_iter().flatten();
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOST: &[u8] = include_bytes!("../../testdata/records/host-1");
    const KEPT: &[u8] = include_bytes!("../../testdata/records/kept-1");

    fn boot() -> BootId {
        let boot = "5c5f1b4e-9d9b-4c55-9a56-5b8b6e1c1c02".to_owned();
        BootId { boot, pid_namespace: "pid:[4026531836]".to_owned() }
    }

    fn mark() -> ProcessMark {
        ProcessMark::from_limit(0x2bff_ffff_ff80_0001).expect("a mark")
    }

    fn kept() -> KeptRecord {
        KeptRecord {
            boot: boot(),
            dn: "root.service.web".to_owned(),
            mark: mark(),
            user: 65534,
            definition: 0x9f3c,
            cgroup: Some("/sys/fs/cgroup/nodekeel-keep-2bffffffff800001".into()),
            process: Some(ProcessId { pid: 4711, start: 98_766 }),
            is_ready: true,
        }
    }

    #[test]
    fn records_of_a_release_stay_readable() {
        let host =
            HostRecord { boot: boot(), host_id: mark().host_id(), start: 98_765, users: [0, 65534].into() };
        for (bytes, record) in [(HOST, Record::Host(host)), (KEPT, Record::Kept(kept()))] {
            assert_eq!(String::from_utf8_lossy(bytes), record.to_string());
            assert_eq!(Record::parse(bytes), Ok(record));
        }
        let newer = String::from_utf8_lossy(KEPT).replacen(" 1 ", " 2 ", 1);
        assert_eq!(Record::parse(newer.as_bytes()), Err(ParseRecordError::Newer));
    }

    #[test]
    fn an_error_names_the_line_that_is_invalid() {
        let content = String::from_utf8_lossy(KEPT);
        let content = &content[..content.rfind("sum ").expect("it has a sum")];
        for (from, to, error) in [
            ("mark 2bff", "mark 0", bad_line("mark")),
            ("process 4711", "process 1", bad_line("process")),
            ("boot ", "Boot ", bad_line("boot")),
            ("ready yes", "ready maybe", bad_line("ready")),
            ("1 kept", "1 else", ParseRecordError::NotRecord),
            ("1 kept", "0 kept", ParseRecordError::NotRecord),
            ("user 65534", "user nobody", bad_line("user")),
            ("user 65534\n", "", bad_line("user")),
        ] {
            let changed = content.replacen(from, to, 1);
            assert_ne!(changed, content);
            let record = format!("{changed}{}", sum_line(&changed));
            assert_eq!(Record::parse(record.as_bytes()), Err(error), "{from}");
        }
    }

    proptest! {
        /// Also one that is cut off, or that lacks a line.
        #[test]
        fn no_damaged_record_is_read(at in 0..KEPT.len(), bit in 0..8_u32, cut in 0..KEPT.len()) {
            let mut flipped = KEPT.to_vec();
            flipped[at] ^= 1 << bit;
            prop_assert!(Record::parse(&flipped).is_err());
            let begins = MAGIC.len() + "1 ".len();
            let error = if cut < begins { ParseRecordError::NotRecord } else { ParseRecordError::Sum };
            prop_assert_eq!(Record::parse(&KEPT[..cut]), Err(error));
        }

        #[test]
        fn what_is_written_is_read(
            (dn, definition, start, pid) in ("[a-z.]{1,40}", any::<u64>(), any::<u64>(), 2..i32::MAX),
            cgroup in proptest::option::of("/[ -~]{0,40}"),
            (has_process, is_ready) in any::<(bool, bool)>(),
        ) {
            let record = Record::Kept(KeptRecord {
                dn,
                definition,
                cgroup: cgroup.map(PathBuf::from),
                process: has_process.then_some(ProcessId { pid, start }),
                is_ready,
                ..kept()
            });
            prop_assert_eq!(Record::parse(record.to_string().as_bytes()), Ok(record));
        }
    }
}
