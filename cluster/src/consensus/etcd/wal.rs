//! etcd's write-ahead log, rewritten without etcd as that of a cluster of one.
//!
//! etcd's own `--force-new-cluster` does nearly the same at its start. It drops the entries that the member does not know
//! to be committed, although a majority may have acknowledged them; and it keeps the cluster's id, by which a former member
//! whose certificate is not known here could still send its log. Here, each entry of the log counts as committed, the other
//! members are removed by entries of their own, and the cluster has another id.
//!
//! *Source:* `encoder.go`, `decoder.go`, `wal.go` and `walpb/record.proto` in etcd's `server/storage/wal`;
//! `NewConfigChangeEntries` in `server/etcdserver/bootstrap.go`; `restore` in go.etcd.io/raft. All releases from 3.4 on have the
//! same format.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _, Write};

use nodekeel_localstorage::{Dir, FileMode};
use prost::Message;
use rustix::rand::{GetRandomFlags, getrandom};
use thiserror::Error;

use crate::BoxError;

/// The types of a record.
const METADATA: i64 = 1;
const ENTRY: i64 = 2;
const STATE: i64 = 3;
const CRC: i64 = 4;
const SNAPSHOT: i64 = 5;

/// The type of an entry that changes the members.
const CONF_CHANGE: i32 = 1;
/// The types of a change of the members.
const ADD_NODE: i32 = 0;
const REMOVE_NODE: i32 = 1;
const ADD_LEARNER: i32 = 3;

/// No log counts that far: sums with an index below don't overflow.
const TOO_FAR: u64 = 1 << 62;

/// The length field of a frame.
const LENGTH_BYTES: usize = 8;
/// etcd writes whole sectors: a record with one of zeros was cut off by a loss of power.
const SECTOR: usize = 512;

#[derive(Clone, PartialEq, prost::Message)]
struct Record {
    #[prost(int64, required, tag = "1")]
    kind: i64,
    #[prost(uint32, required, tag = "2")]
    crc: u32,
    #[prost(bytes = "vec", optional, tag = "3")]
    data: Option<Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Metadata {
    #[prost(uint64, required, tag = "1")]
    member: u64,
    #[prost(uint64, required, tag = "2")]
    cluster: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Entry {
    #[prost(int32, required, tag = "1")]
    kind: i32,
    #[prost(uint64, required, tag = "2")]
    term: u64,
    #[prost(uint64, required, tag = "3")]
    index: u64,
    #[prost(bytes = "vec", optional, tag = "4")]
    data: Option<Vec<u8>>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
struct HardState {
    #[prost(uint64, required, tag = "1")]
    term: u64,
    #[prost(uint64, required, tag = "2")]
    vote: u64,
    #[prost(uint64, required, tag = "3")]
    commit: u64,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
struct Snapshot {
    #[prost(uint64, required, tag = "1")]
    index: u64,
    #[prost(uint64, required, tag = "2")]
    term: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ConfChange {
    #[prost(uint64, required, tag = "1")]
    id: u64,
    #[prost(int32, required, tag = "2")]
    kind: i32,
    #[prost(uint64, required, tag = "3")]
    member: u64,
}

/// The log could not be rewritten. It is unchanged.
#[derive(Debug, Error)]
pub(super) enum LogError {
    #[error("read etcd's log {file}")]
    Read { file: String, source: BoxError },
    #[error("etcd's log {file} is damaged at byte {at}")]
    Damaged { file: String, at: usize },
    #[error("etcd's log is incomplete: {0}")]
    Incomplete(&'static str),
    #[error("the cluster has removed this member")]
    Removed,
    #[error("write etcd's log")]
    Write(#[source] BoxError),
}

/// Writes the log in `from` to the empty directory `to`, durably: with all its entries, and without these members and those
/// that it adds itself.
pub(super) fn rewrite_log(from: &Dir, to: &Dir, others: &BTreeSet<u64>) -> Result<(), LogError> {
    let mut scan = LogScan::default();
    let names = read_log(from, |record| scan.add(record))?;
    let log = scan.finish(others)?;
    // The files are one stream that is cut into segments: as one segment it stays valid, under the name of the first.
    let name = names.first().ok_or(LogError::Incomplete("it has no file"))?;
    let written = |source: nodekeel_localstorage::Error| LogError::Write(source.into());
    let mut file = to.open_or_create_file(name, FileMode::new(0o600)).map_err(written)?;
    let failed = |source: io::Error| LogError::Write(source.into());
    let mut writer = LogWriter { file: io::BufWriter::new(&mut file), crc: 0 };
    writer.write(CRC, None).map_err(failed)?;
    let mut id = [0; 8];
    // Up to 256 bytes are returned at once or not at all. *Source:* getrandom(2).
    getrandom(&mut id, GetRandomFlags::empty()).map_err(|error| failed(error.into()))?;
    let metadata = Metadata { cluster: u64::from_le_bytes(id), ..log.former.clone() };
    writer.write(METADATA, Some(metadata.encode_to_vec())).map_err(failed)?;
    let mut copied = Ok(());
    read_log(from, |record| {
        if copied.is_ok() && log.keeps(record) {
            copied = writer.write(record.kind, record.data.clone());
        }
        Ok(())
    })?;
    copied.map_err(failed)?;
    for removal in &log.removals {
        writer.write(ENTRY, Some(removal.encode_to_vec())).map_err(failed)?;
    }
    writer.write(STATE, Some(log.state.encode_to_vec())).map_err(failed)?;
    writer.file.flush().map_err(failed)?;
    drop(writer);
    file.sync_all().map_err(failed)?;
    to.sync().map_err(written)
}

/// Reads all records, and returns the names of the files.
fn read_log(
    from: &Dir,
    mut record: impl FnMut(&Record) -> Result<(), LogError>,
) -> Result<Vec<String>, LogError> {
    let failed = |source: BoxError| LogError::Read { file: from.path().display().to_string(), source };
    let listed = from.list().map_err(|error| failed(error.into()))?;
    let names = listed
        .iter()
        .filter_map(|entry| entry.name.as_os_str().to_str())
        .filter(|name| name.ends_with(".wal"));
    let mut names: Vec<_> = names.map(str::to_owned).collect();
    // Their numbers are of one length.
    names.sort();
    let mut crc = 0;
    for (number, name) in names.iter().enumerate() {
        let failed = |source: BoxError| LogError::Read { file: name.clone(), source };
        let mut file: File = from.open_file(name).map_err(|error| failed(error.into()))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|error| failed(error.into()))?;
        let mut frames = Frames { bytes: &bytes, at: 0, crc };
        while let Some(next) = frames
            .next(number + 1 == names.len())
            .map_err(|()| LogError::Damaged { file: name.clone(), at: frames.at })?
        {
            record(&next)?;
        }
        crc = frames.crc;
    }
    Ok(names)
}

/// The records of a file.
struct Frames<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Of all data until here.
    crc: u32,
}

impl Frames<'_> {
    /// The next record; none at the end, and, in the last file, at a record that a loss of power has cut off: etcd has not
    /// acknowledged it.
    fn next(&mut self, is_last: bool) -> Result<Option<Record>, ()> {
        let bytes: &[u8] = self.bytes;
        let rest = &bytes[self.at..];
        let Some(length) = rest.first_chunk::<LENGTH_BYTES>().map(|bytes| u64::from_le_bytes(*bytes)) else {
            return Ok(None);
        };
        // Behind the last record the file is empty.
        if length == 0 {
            return Ok(None);
        }
        let (size, padding) = frame_size(length);
        let cut_off = if is_last { Ok(None) } else { Err(()) };
        let end = LENGTH_BYTES.checked_add(size).and_then(|end| end.checked_add(padding));
        let Some(frame) = end.and_then(|end| rest.get(LENGTH_BYTES..end)) else { return cut_off };
        let begin = self.at + LENGTH_BYTES;
        let Some(record) = Record::decode(&frame[..size]).ok().filter(|record| self.check(record)) else {
            return if is_torn(frame, begin) { cut_off } else { Err(()) };
        };
        self.at = begin + frame.len();
        Ok(Some(record))
    }

    /// Checks the sum of a record, which covers the data of all before it.
    fn check(&mut self, record: &Record) -> bool {
        if record.kind == CRC {
            let is_first = self.crc == 0;
            let matches = is_first || record.crc == self.crc;
            self.crc = record.crc;
            return matches;
        }
        let crc = crc32c(self.crc, record.data.as_deref().unwrap_or_default());
        let matches = crc == record.crc;
        if matches {
            self.crc = crc;
        }
        matches
    }
}

/// The size of a record and of the zeros after it.
fn frame_size(length: u64) -> (usize, usize) {
    let size = usize::try_from(length & !(0xff << 56)).unwrap_or(usize::MAX);
    let padding = if length >> 63 == 1 { usize::from((length >> 56) as u8 & 0x7) } else { 0 };
    (size, padding)
}

/// Returns whether a sector of this frame was not written.
fn is_torn(frame: &[u8], begin: usize) -> bool {
    let first = (SECTOR - begin % SECTOR).min(frame.len());
    let (first, rest) = frame.split_at(first);
    [first].into_iter().chain(rest.chunks(SECTOR)).any(|sector| sector.iter().all(|byte| *byte == 0))
}

/// The log as far as it was read.
#[derive(Debug, Default)]
struct LogScan {
    metadata: Option<Metadata>,
    state: HardState,
    /// The index of the first of `terms`.
    first: u64,
    /// Of each entry that counts: a later entry with the same index replaces an earlier one, and all after it.
    terms: Vec<u64>,
    /// The member of this log is removed by the entry with this index.
    own_removal: Option<u64>,
    /// Members that entries add.
    added: BTreeSet<u64>,
}

impl LogScan {
    fn add(&mut self, record: &Record) -> Result<(), LogError> {
        let data = record.data.as_deref().unwrap_or_default();
        let unknown = |_| LogError::Incomplete("a record can't be understood");
        match record.kind {
            METADATA => self.metadata = Some(Metadata::decode(data).map_err(unknown)?),
            STATE => self.state = HardState::decode(data).map_err(unknown)?,
            ENTRY => self.add_entry(&Entry::decode(data).map_err(unknown)?)?,
            SNAPSHOT => self.add_snapshot(Snapshot::decode(data).map_err(unknown)?)?,
            CRC => {}
            _ => return Err(LogError::Incomplete("a record is of an unknown type")),
        }
        Ok(())
    }

    /// The index of the last entry.
    fn last(&self) -> u64 {
        (self.first + self.terms.len() as u64).saturating_sub(1)
    }

    fn add_entry(&mut self, entry: &Entry) -> Result<(), LogError> {
        check_index(entry.index)?;
        if self.terms.is_empty() && self.first == 0 || entry.index < self.first {
            (self.first, self.terms) = (entry.index, Vec::new());
        }
        let at = usize::try_from(entry.index - self.first).unwrap_or(usize::MAX);
        if at > self.terms.len() {
            return Err(LogError::Incomplete("entries are missing"));
        }
        self.terms.truncate(at);
        self.terms.push(entry.term);
        self.own_removal = self.own_removal.filter(|index| *index < entry.index);
        if entry.kind != CONF_CHANGE {
            return Ok(());
        }
        let change = ConfChange::decode(entry.data.as_deref().unwrap_or_default());
        let change =
            change.map_err(|_| LogError::Incomplete("a change of the members can't be understood"))?;
        match change.kind {
            ADD_NODE | ADD_LEARNER => _ = self.added.insert(change.member),
            REMOVE_NODE if self.is_own(change.member) => self.own_removal = Some(entry.index),
            _ => {}
        }
        Ok(())
    }

    /// A snapshot of the member itself changes nothing. One that it has received replaces its log, unless that has the same.
    fn add_snapshot(&mut self, snapshot: Snapshot) -> Result<(), LogError> {
        check_index(snapshot.index)?;
        let at = snapshot.index.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        let has_same = at.and_then(|at| self.terms.get(at)) == Some(&snapshot.term);
        // A file begins with entries, of which the snapshot before has none.
        let is_before = snapshot.index < self.first;
        if !has_same && !is_before {
            (self.first, self.terms, self.own_removal) = (snapshot.index + 1, Vec::new(), None);
        }
        Ok(())
    }

    fn is_own(&self, member: u64) -> bool {
        self.metadata.as_ref().is_some_and(|metadata| metadata.member == member)
    }

    fn finish(self, others: &BTreeSet<u64>) -> Result<LoneLog, LogError> {
        let metadata = self.metadata.clone().ok_or(LogError::Incomplete("it names no member"))?;
        let mut last = self.last();
        if last < self.state.commit {
            return Err(LogError::Incomplete("entries that are committed are missing"));
        }
        // Nobody has acknowledged what comes after the entry that nobody may count as committed.
        if let Some(index) = self.own_removal {
            if index <= self.state.commit {
                return Err(LogError::Removed);
            }
            last = index - 1;
        }
        let others = others.union(&self.added).copied().filter(|member| !self.is_own(*member));
        let removal = |(index, member)| Entry {
            kind: CONF_CHANGE,
            term: self.state.term,
            index,
            data: Some(ConfChange { id: 0, kind: REMOVE_NODE, member }.encode_to_vec()),
        };
        let removals: Vec<_> = (last + 1..).zip(others).map(removal).collect();
        let commit = last + removals.len() as u64;
        Ok(LoneLog { former: metadata, last, removals, state: HardState { commit, ..self.state } })
    }
}

fn check_index(index: u64) -> Result<(), LogError> {
    if index < TOO_FAR { Ok(()) } else { Err(LogError::Incomplete("an index is out of range")) }
}

/// The log of a cluster of one.
#[derive(Debug)]
struct LoneLog {
    former: Metadata,
    /// The index of the last entry that is kept.
    last: u64,
    removals: Vec<Entry>,
    state: HardState,
}

impl LoneLog {
    fn keeps(&self, record: &Record) -> bool {
        match record.kind {
            ENTRY => {
                let entry = Entry::decode(record.data.as_deref().unwrap_or_default());
                entry.is_ok_and(|entry| entry.index <= self.last)
            }
            kind => kind == STATE || kind == SNAPSHOT,
        }
    }
}

struct LogWriter<W> {
    file: W,
    crc: u32,
}

impl<W: Write> LogWriter<W> {
    fn write(&mut self, kind: i64, data: Option<Vec<u8>>) -> io::Result<()> {
        self.crc = crc32c(self.crc, data.as_deref().unwrap_or_default());
        let record = Record { kind, crc: self.crc, data }.encode_to_vec();
        let padding = record.len().wrapping_neg() % LENGTH_BYTES;
        let mark = if padding == 0 { 0 } else { (0x80 | padding as u64) << 56 };
        self.file.write_all(&(record.len() as u64 | mark).to_le_bytes())?;
        self.file.write_all(&record)?;
        self.file.write_all(&[0; LENGTH_BYTES][..padding])
    }
}

/// The sum of these bytes after that of others.
///
/// *Source:* Castagnoli's polynomial, as Go's `hash/crc32` has it.
fn crc32c(crc: u32, bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let (mut crc, mut bit) = (byte as u32, 0);
            while bit < 8 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
                bit += 1;
            }
            table[byte] = crc;
            byte += 1;
        }
        table
    };
    !bytes.iter().fold(!crc, |crc, byte| TABLE[usize::from(crc as u8 ^ byte)] ^ crc >> 8)
}

/// Arbitrary bytes as a segment, and as records, each after its type and its length.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_log(bytes: &[u8]) {
    let mut frames = Frames { bytes, at: 0, crc: 0 };
    while let Ok(Some(_)) = frames.next(true) {}
    let (mut scan, mut rest) = (LogScan::default(), bytes);
    while let [kind, length, data @ ..] = rest {
        let (data, after) = data.split_at(data.len().min(usize::from(*length)));
        if scan.add(&Record { kind: i64::from(*kind), crc: 0, data: Some(data.to_vec()) }).is_err() {
            return;
        }
        rest = after;
    }
    if let Ok(log) = scan.finish(&BTreeSet::from([1, 2])) {
        let indexes: Vec<_> = log.removals.iter().map(|removal| removal.index).collect();
        assert!(indexes.into_iter().eq(log.last + 1..=log.state.commit), "{log:?}");
    }
}

#[cfg(test)]
#[path = "wal_test.rs"]
mod tests;
