//! Rolled-back headers: the newest confirmed generations of key slots are recorded where the node keeps its key, and a
//! header with older ones is one that was put back.
//!
//! A generation is recorded before the slots that it supersedes are removed: from then on, every header of this volume
//! has it, or a newer one. One that is not confirmed yet may be replaced by an older number.

use std::fmt;

use super::super::uuid::Uuid;
use super::policy::HeaderSummary;
use super::slot_kind::{KEY_KINDS, SlotKind, SlotToken};
use crate::dir::Dir;
use crate::error::Error;
use crate::metadata::FileMode;

const RECORD_HEADER: &str = "nodekeel encryption header, format 1";
const KEYS: &str = "keys = ";
const RECOVERY: &str = "recovery = ";
const VOLUME_KEY: &str = "volume key = ";

/// The newest generations of key slots: of the unlock keys, and of the recovery passphrase. 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeaderGenerations {
    /// The generation of the unlock keys.
    pub keys: u32,
    /// That of the recovery passphrase.
    pub recovery: u32,
}

impl HeaderGenerations {
    /// Those of a header, also of slots that another program has removed: it leaves their tokens.
    pub(super) fn newest_of(summary: &HeaderSummary) -> HeaderGenerations {
        let newest = |is_meant: &dyn Fn(SlotKind) -> bool| {
            let tokens = summary.slot_tokens.values().filter(|token| is_meant(token.kind) && !token.adding);
            tokens.map(|token| token.generation).max().unwrap_or(0)
        };
        HeaderGenerations {
            keys: newest(&|kind| KEY_KINDS.contains(&kind)),
            recovery: newest(&|kind| kind == SlotKind::Recovery),
        }
    }

    /// Those that no later header of the volume goes behind: the oldest slot of unlock keys is confirmed, or the only one.
    fn confirmed_of(summary: &HeaderSummary) -> HeaderGenerations {
        let named = || summary.slot_tokens.values().filter(|token| token.slots().next().is_some());
        let generation = |token: &SlotToken| token.generation;
        let keys = named().filter(|token| KEY_KINDS.contains(&token.kind)).map(generation).min();
        let is_confirmed = |token: &&SlotToken| token.kind == SlotKind::Recovery && !token.unconfirmed;
        let recovery = named().filter(is_confirmed).map(generation).max();
        HeaderGenerations { keys: keys.unwrap_or(0), recovery: recovery.unwrap_or(0) }
    }

    fn max(self, other: HeaderGenerations) -> HeaderGenerations {
        HeaderGenerations { keys: self.keys.max(other.keys), recovery: self.recovery.max(other.recovery) }
    }

    /// Returns how this header is older than the recorded one; none if it is not.
    pub(super) fn rollback_from(self, recorded: HeaderGenerations) -> Option<HeaderRollback> {
        (self.max(recorded) != self).then_some(HeaderRollback { found: self, recorded })
    }
}

impl fmt::Display for HeaderGenerations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unlock keys of generation {}", self.keys)?;
        match self.recovery {
            0 => f.write_str(" and no recovery passphrase"),
            recovery => write!(f, " and a recovery passphrase of generation {recovery}"),
        }
    }
}

/// A header that is older than the newest one that this node has written: it was put back, as from a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeaderRollback {
    /// The generations of the header.
    pub found: HeaderGenerations,
    /// Those that this node has recorded.
    pub recorded: HeaderGenerations,
}

impl fmt::Display for HeaderRollback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it has {}, but this node has written {}", self.found, self.recorded)
    }
}

/// The records of headers, in the directory of the node's keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeaderRecords<'a>(pub(super) &'a Dir);

impl HeaderRecords<'_> {
    /// The newest confirmed generations of a volume. A record that is absent or damaged knows of none.
    pub(super) fn read(self, volume: Uuid) -> Result<HeaderGenerations, Error> {
        self.read_record(volume).map(|record| record.generations)
    }

    /// The name of the volume key of a volume that was re-encrypted; `None` before the first time.
    pub(super) fn volume_key(self, volume: Uuid) -> Result<Option<String>, Error> {
        self.read_record(volume).map(|record| record.volume_key)
    }

    fn read_record(self, volume: Uuid) -> Result<HeaderRecord, Error> {
        match self.0.read_at_most(record_name(volume), 4096) {
            Ok(text) => Ok(parse_record(&String::from_utf8_lossy(&text))),
            Err(error) if error.is_not_found() => Ok(HeaderRecord::default()),
            Err(error) => Err(error),
        }
    }

    /// Records the volume key that the data have, or get by a re-encryption: no header with another one decrypts them.
    pub(super) fn record_volume_key(self, volume: Uuid, volume_key: &str) -> Result<(), Error> {
        let recorded = self.read_record(volume)?;
        if recorded.volume_key.as_deref() == Some(volume_key) {
            return Ok(());
        }
        self.write_record(volume, &HeaderRecord { volume_key: Some(volume_key.to_owned()), ..recorded })
    }

    fn write_record(self, volume: Uuid, record: &HeaderRecord) -> Result<(), Error> {
        let HeaderRecord { generations, volume_key } = record;
        let mut text =
            format!("{RECORD_HEADER}\n{KEYS}{}\n{RECOVERY}{}\n", generations.keys, generations.recovery);
        // A release before this line reads past it.
        text.extend(volume_key.iter().map(|key| format!("{VOLUME_KEY}{key}\n")));
        self.0.write(record_name(volume), text.as_bytes(), FileMode::PRIVATE_FILE)
    }

    /// Records these generations, unless newer ones are recorded.
    pub(super) fn raise(self, volume: Uuid, to: HeaderGenerations) -> Result<(), Error> {
        let recorded = self.read_record(volume)?;
        let raised = recorded.generations.max(to);
        // No header is older than the first one.
        if raised == recorded.generations || raised.max(FIRST) == FIRST {
            return Ok(());
        }
        self.write_record(volume, &HeaderRecord { generations: raised, ..recorded })
    }

    /// A restore of the header begins: until it ends, its key slots may not open.
    pub(super) fn begin_restore(self, volume: Uuid) -> Result<(), Error> {
        self.0.write(restore_name(volume), RESTORE_RECORD, FileMode::PRIVATE_FILE)
    }

    pub(super) fn end_restore(self, volume: Uuid) -> Result<(), Error> {
        self.0.remove_file(restore_name(volume)).map(drop)
    }

    pub(super) fn is_restoring(self, volume: Uuid) -> Result<bool, Error> {
        self.0.exists(restore_name(volume))
    }

    /// Records the generations of a header by which a volume was opened.
    pub(super) fn raise_to_header(self, volume: Uuid, summary: &HeaderSummary) -> Result<(), Error> {
        self.raise(volume, HeaderGenerations::confirmed_of(summary))
    }
}

const FIRST: HeaderGenerations = HeaderGenerations { keys: 1, recovery: 0 };

/// For people: the file is the record.
const RESTORE_RECORD: &[u8] = b"nodekeel restores the encryption header, format 1\n";

fn restore_name(volume: Uuid) -> String {
    format!("{volume}.restore")
}

fn record_name(volume: Uuid) -> String {
    format!("{volume}.header")
}

/// What is recorded of the header of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct HeaderRecord {
    generations: HeaderGenerations,
    volume_key: Option<String>,
}

fn parse_record(text: &str) -> HeaderRecord {
    // A line without its end was cut off, and does not count.
    let mut lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
    if lines.next() != Some(RECORD_HEADER) {
        return HeaderRecord::default();
    }
    let rest: Vec<_> = lines.collect();
    let value = |key: &str| rest.iter().find_map(|line| line.strip_prefix(key)?.parse().ok()).unwrap_or(0);
    let generations = HeaderGenerations { keys: value(KEYS), recovery: value(RECOVERY) };
    let volume_key = rest.iter().find_map(|line| line.strip_prefix(VOLUME_KEY)).map(str::to_owned);
    HeaderRecord { generations, volume_key }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn generations(keys: u32, recovery: u32) -> HeaderGenerations {
        HeaderGenerations { keys, recovery }
    }

    #[test]
    fn a_header_is_rolled_back_if_one_of_its_generations_is_older() {
        let recorded = generations(3, 2);
        for (found, is_rolled_back) in
            [((3, 2), false), ((4, 2), false), ((2, 2), true), ((9, 1), true), ((3, 0), true)]
        {
            let found = generations(found.0, found.1);
            assert_eq!(found.rollback_from(recorded).is_some(), is_rolled_back, "{found:?}");
        }
        assert_eq!(
            generations(1, 0).rollback_from(recorded).unwrap().to_string(),
            "it has unlock keys of generation 1 and no recovery passphrase, but this node has written unlock keys of \
             generation 3 and a recovery passphrase of generation 2"
        );
    }

    #[test]
    fn a_record_only_rises_and_a_part_of_it_knows_no_newer_header() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = Dir::open(scratch.path()).unwrap();
        let (records, volume) = (HeaderRecords(&dir), Uuid([1; 16]));
        records.raise(volume, generations(1, 0)).unwrap();
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0, "a new volume needs none");
        for (to, expected) in [((2, 0), (2, 0)), ((1, 4), (2, 4)), ((0, 0), (2, 4))] {
            records.raise(volume, generations(to.0, to.1)).unwrap();
            assert_eq!(records.read(volume).unwrap(), generations(expected.0, expected.1));
        }
        assert_eq!(records.read(Uuid([2; 16])).unwrap(), generations(0, 0));
        records.record_volume_key(volume, "0123").unwrap();
        records.raise(volume, generations(2, 4)).unwrap();
        assert_eq!(records.volume_key(volume).unwrap().as_deref(), Some("0123"));
        assert_eq!(records.read(volume).unwrap(), generations(2, 4));
        let path = scratch.path().join(record_name(volume));
        let text = std::fs::read_to_string(&path).unwrap();
        for end in 0..text.len() {
            std::fs::write(&path, &text[..end]).unwrap();
            assert!(generations(2, 4).rollback_from(records.read(volume).unwrap()).is_none(), "cut at {end}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_record_or_knows_nothing(text in "\\PC{0,80}") {
            parse_record(&text);
            parse_record(&format!("{RECORD_HEADER}\n{text}\n"));
        }
    }
}
