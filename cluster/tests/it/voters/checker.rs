//! Checks a history of reads and writes.
//!
//! Each write has a unique value, and leaves a unique key: so a lost one is missing in the end. A write whose
//! outcome is unknown may take effect at any later time, also after newer values; so the order is that of the store's
//! revisions. A history is linearizable if each read and each acknowledged write has at least the revision that was
//! acknowledged, or read, before it began, no revision has two values, and nothing is read before its write began.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::process::{Command, Stdio};

use testbed::gotool;

/// An operation on a key that has ended. Its times are ticks of one counter, which all operations share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Op {
    pub(crate) key: usize,
    pub(crate) begun: u64,
    pub(crate) ended: u64,
    pub(crate) outcome: Outcome,
}

/// What came of an operation. An unanswered read is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The write of this value was acknowledged.
    Acknowledged(Version),
    /// Whether, and when, the write of this value takes effect is unknown.
    Unknown(u64),
    /// This value was read; the default if the key did not exist.
    Read(Version),
}

/// A value, and the revision of its write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) value: u64,
    pub(crate) revision: i64,
}

/// An operation that no order of the operations explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    op: Op,
    kind: ViolationKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ViolationKind {
    /// At least this revision was known before the operation began.
    Older(i64),
    /// The value's write had not begun when the operation ended.
    FromNowhere,
    /// The revision has this value, too.
    OtherValue(u64),
}

impl Op {
    fn read(&self) -> Option<u64> {
        match self.outcome {
            Outcome::Read(version) => Some(version.value),
            Outcome::Acknowledged(_) | Outcome::Unknown(_) => None,
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Violation { op: Op { key, begun, ended, outcome }, kind } = self;
        write!(f, "key {key}, {begun} to {ended}: {outcome:?}: {kind:?}")
    }
}

impl Violation {
    /// Whether it is a read of an older value: the member has answered before it knew of a newer one, which it may
    /// have kept.
    pub(crate) fn is_stale_read(&self) -> bool {
        matches!((self.op.outcome, self.kind), (Outcome::Read(_), ViolationKind::Older(_)))
    }
}

/// The acknowledged writes that are missing in the end, by key and value.
pub(crate) fn lost_writes(history: &[Op], left: &BTreeSet<(usize, u64)>) -> Vec<(usize, u64)> {
    let acknowledged = history.iter().filter_map(|op| match op.outcome {
        Outcome::Acknowledged(version) => Some((op.key, version.value)),
        Outcome::Unknown(_) | Outcome::Read(_) => None,
    });
    acknowledged.filter(|write| !left.contains(write)).collect()
}

/// The operations that are wrong.
pub(crate) fn check_history(history: &[Op]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for key in 0..=history.iter().map(|op| op.key).max().unwrap_or_default() {
        let ops: Vec<_> = history.iter().filter(|op| op.key == key).copied().collect();
        violations.extend(check_key(&ops));
    }
    violations
}

/// Whether porcupine, which knows nothing of revisions, finds an order that explains the history; and what it prints.
pub(crate) fn ask_porcupine(history: &[Op]) -> (bool, String) {
    let read: BTreeSet<_> = history.iter().filter_map(|op| op.read().map(|value| (op.key, value))).collect();
    let mut lines = String::new();
    for (client, op) in history.iter().enumerate() {
        let (end, kind, value) = match op.outcome {
            Outcome::Acknowledged(version) => (op.ended.to_string(), "write", version.value),
            // One that nobody has read may never take effect, and explains nothing.
            Outcome::Unknown(value) if !read.contains(&(op.key, value)) => continue,
            Outcome::Unknown(value) => ("-".to_owned(), "write", value),
            Outcome::Read(version) => (op.ended.to_string(), "read", version.value),
        };
        writeln!(lines, "{} {client} {} {end} {kind} {value}", op.key, op.begun).unwrap();
    }
    let mut porcupine = Command::new(gotool::PORCUPINE.program_path("porcupine").unwrap());
    let mut porcupine = porcupine.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // It reads everything before it writes.
    porcupine.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = porcupine.wait_with_output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}: {printed}", output.status);
    (output.status.success(), printed)
}

fn check_key(ops: &[Op]) -> Vec<Violation> {
    let mut begun = BTreeMap::from([(0, 0)]);
    let (mut known, mut values) = (Vec::new(), BTreeMap::new());
    for op in ops {
        let (Outcome::Acknowledged(Version { value, .. }) | Outcome::Unknown(value)) = op.outcome else {
            continue;
        };
        begun.insert(value, op.begun);
    }
    for op in ops {
        if let Outcome::Acknowledged(version) | Outcome::Read(version) = op.outcome {
            known.push((op.ended, version.revision));
            values.entry(version.revision).or_insert(version.value);
        }
    }
    let known = running_maxima(known);
    let check = |op: &Op| {
        let (Outcome::Acknowledged(version) | Outcome::Read(version)) = op.outcome else { return None };
        let (least, value) = (newest_before(&known, op.begun), values[&version.revision]);
        let kind = match begun.get(&version.value) {
            _ if version.revision < least => ViolationKind::Older(least),
            Some(begun) if *begun < op.ended => {
                (value != version.value).then_some(ViolationKind::OtherValue(value))?
            }
            _ => ViolationKind::FromNowhere,
        };
        Some(Violation { op: *op, kind })
    };
    ops.iter().filter_map(check).collect()
}

/// By time, with the greatest revision so far.
fn running_maxima(mut revisions: Vec<(u64, i64)>) -> Vec<(u64, i64)> {
    revisions.sort_unstable();
    let mut greatest = 0;
    for (_, revision) in &mut revisions {
        greatest = greatest.max(*revision);
        *revision = greatest;
    }
    revisions
}

/// The greatest revision before this time.
fn newest_before(revisions: &[(u64, i64)], time: u64) -> i64 {
    let before = revisions.partition_point(|(at, _)| *at < time);
    before.checked_sub(1).map_or(0, |last| revisions[last].1)
}

#[test]
fn a_history_with_a_lost_write_a_stale_read_or_a_value_from_nowhere_is_found() {
    let op = |begun, ended, outcome| Op { key: 0, begun, ended, outcome };
    let version = |value, revision| Version { value, revision };
    let wrote = |value, revision| Outcome::Acknowledged(version(value, revision));
    let read = |value, revision| Outcome::Read(version(value, revision));
    let unknown = Outcome::Unknown;
    let is_sound = |ops: &[Op]| check_history(ops).is_empty();
    assert!(is_sound(&[op(1, 2, read(0, 0)), op(3, 4, wrote(1, 2)), op(5, 6, read(1, 2))]));
    // Concurrent operations may take place in either order.
    assert!(is_sound(&[op(1, 4, wrote(1, 2)), op(2, 3, read(0, 0))]));
    assert!(is_sound(&[op(1, 4, wrote(1, 2)), op(2, 3, read(1, 2))]));
    // What is unknown may be there, now or later, or never; also after a newer value.
    assert!(is_sound(&[
        op(1, 2, unknown(1)),
        op(3, 4, read(0, 0)),
        op(5, 6, read(1, 2)),
        op(7, 8, read(1, 2))
    ]));
    assert!(is_sound(&[op(1, 2, unknown(1)), op(3, 4, wrote(2, 2)), op(5, 6, read(2, 2))]));
    assert!(is_sound(&[
        op(1, 2, unknown(1)),
        op(3, 4, wrote(2, 2)),
        op(5, 6, read(2, 2)),
        op(7, 8, read(1, 3))
    ]));

    let lost = check_history(&[op(1, 2, wrote(1, 2)), op(3, 4, read(0, 0))]);
    assert!(matches!(lost[..], [read] if read.is_stale_read()), "an acknowledged write is lost");
    assert!(
        !is_sound(&[op(1, 2, wrote(1, 2)), op(3, 4, wrote(2, 3)), op(5, 6, read(1, 2))]),
        "the last one is"
    );
    let back = [op(1, 2, unknown(1)), op(3, 4, read(1, 2)), op(5, 6, read(0, 0))];
    assert!(!is_sound(&back), "a read goes back");
    let early = [op(1, 2, unknown(1)), op(3, 4, wrote(2, 3)), op(5, 6, read(1, 2))];
    assert!(!is_sound(&early), "an unknown write that took effect before a newer one is read after it");
    let wrong = |ops: &[Op]| check_history(ops).iter().any(|violation| !violation.is_stale_read());
    assert!(wrong(&[op(1, 2, read(1, 2)), op(3, 4, wrote(1, 2))]), "a value is read before it was written");
    assert!(wrong(&[op(1, 2, wrote(1, 5)), op(3, 4, wrote(2, 4))]), "the revisions go back");
    assert!(
        wrong(&[op(1, 2, wrote(1, 5)), op(3, 6, wrote(2, 6)), op(3, 6, read(2, 5))]),
        "a revision has two values"
    );
    let writes = [op(1, 2, wrote(1, 2)), op(3, 4, unknown(2)), op(5, 6, wrote(3, 4))];
    assert_eq!(lost_writes(&writes, &[(0, 1), (0, 3)].into()), []);
    assert_eq!(lost_writes(&writes, &[(0, 2), (0, 3), (1, 1)].into()), [(0, 1)]);
    let other = Op { key: 1, ..op(3, 4, read(0, 0)) };
    assert!(is_sound(&[op(1, 2, wrote(1, 2)), other]), "keys have nothing to do with each other");
}
