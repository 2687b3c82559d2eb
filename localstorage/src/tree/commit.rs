//! Atomic replacement of several files, based only on the durable replacement of one: a record of all new
//! contents.
//!
//! ```text
//! record = "nodekeel commit 1\n"  file*  crc32c of all before (4 bytes, little endian)
//! file   = length of name, mode, length of content (4 bytes each, little endian)  name  content
//! ```

use zeroize::Zeroizing;

use super::{LayoutDir, LayoutFile};
use crate::dir::READ_LIMIT;
use crate::error::{Error, FileOperation, RejectReason};
use crate::file_name::FileName;
use crate::metadata::FileMode;

const MAGIC: &[u8] = b"nodekeel commit 1\n";

/// The name of the record, which exists only during a commit.
pub(super) const COMMIT_RECORD: &str = ".commit";

/// Private, since the record may contain a key.
const RECORD_MODE: FileMode = FileMode::PRIVATE_FILE;

#[derive(Debug, PartialEq, Eq)]
struct FileChange<'a> {
    name: &'a str,
    mode: FileMode,
    content: &'a [u8],
}

pub(super) fn commit_files(directory: &LayoutDir, contents: &[(&LayoutFile, &[u8])]) -> Result<(), Error> {
    let mut changes = Vec::with_capacity(contents.len());
    for (file, content) in contents {
        let name = name_in_directory(directory, file).ok_or_else(|| {
            invalid_input(FileOperation::Write, file, "file is not in the committed directory")
        })?;
        changes.push(FileChange { name, mode: file.mode(), content });
    }
    let (location, record) = (directory.location(), encode_record(&changes));
    // A record that cannot be read back would make every later creation of the directory fail.
    if record.len() as u64 > READ_LIMIT {
        let path = directory.path().join(COMMIT_RECORD);
        return Err(Error::new(FileOperation::Write, path, RejectReason::TooLarge { limit: READ_LIMIT }));
    }
    // This write is the commit: from here on, a crash leads to the new contents.
    location.store.write(&location.store_path.join(COMMIT_RECORD), &record, RECORD_MODE)?;
    replay_changes(directory, &changes)
}

/// Completes a commit that a crash interrupted.
///
/// The record got its name only when it was durable, so a damaged one may be that of a commit whose files are
/// partly replaced: it stays, and is an error.
pub(super) fn complete_commit(directory: &LayoutDir) -> Result<(), Error> {
    match read_record(directory)? {
        Some(record) => replay_changes(directory, &parse_record(directory, &record)?),
        None => Ok(()),
    }
}

/// The content of a file after the pending commit; none if no pending commit contains the file.
#[cfg(feature = "pki")]
pub(crate) fn committed_content(
    directory: &LayoutDir,
    file: &LayoutFile,
) -> Result<Option<Zeroizing<Vec<u8>>>, Error> {
    let (Some(record), Some(name)) = (read_record(directory)?, name_in_directory(directory, file)) else {
        return Ok(None);
    };
    let changes = parse_record(directory, &record)?;
    let change = changes.iter().find(|change| change.name == name);
    Ok(change.map(|change| Zeroizing::new(change.content.to_vec())))
}

fn read_record(directory: &LayoutDir) -> Result<Option<Zeroizing<Vec<u8>>>, Error> {
    let location = directory.location();
    match location.store.read(&location.store_path.join(COMMIT_RECORD)) {
        Ok(record) => Ok(Some(Zeroizing::new(record))),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

fn parse_record<'a>(directory: &LayoutDir, record: &'a [u8]) -> Result<Vec<FileChange<'a>>, Error> {
    decode_record(record).ok_or_else(|| {
        let path = directory.path().join(COMMIT_RECORD);
        Error::new(FileOperation::Read, path, RejectReason::DamagedCommit)
    })
}

fn replay_changes(directory: &LayoutDir, changes: &[FileChange<'_>]) -> Result<(), Error> {
    let location = directory.location();
    for FileChange { name, mode, content } in changes {
        location.store.write(&location.store_path.join(name), content, *mode)?;
    }
    // All files are durable by now. A crash before this repeats their writes, which changes nothing.
    remove_record(directory)
}

fn remove_record(directory: &LayoutDir) -> Result<(), Error> {
    let location = directory.location();
    location.store.remove(&location.store_path.join(COMMIT_RECORD)).map(drop)
}

/// The name of the file, if it is directly in the directory.
fn name_in_directory<'a>(directory: &LayoutDir, file: &'a LayoutFile) -> Option<&'a str> {
    let (location, within) = (file.location(), directory.location());
    let is_inside = location.store_path.parent() == Some(&within.store_path)
        && location.path.parent() == Some(&within.path);
    is_inside.then(|| location.store_path.file_name()?.to_str()).flatten()
}

fn invalid_input(operation: FileOperation, file: &LayoutFile, why: &'static str) -> Error {
    Error::new(operation, file.path(), std::io::Error::new(std::io::ErrorKind::InvalidInput, why))
}

fn encode_record(changes: &[FileChange<'_>]) -> Zeroizing<Vec<u8>> {
    let bytes = changes.iter().map(|change| 12 + change.name.len() + change.content.len()).sum::<usize>();
    // Full capacity from the start: a growing vector would leave copies behind.
    let mut record = Zeroizing::new(Vec::with_capacity(MAGIC.len() + bytes + 4));
    record.extend_from_slice(MAGIC);
    for FileChange { name, mode, content } in changes {
        for number in [name.len() as u32, mode.bits(), content.len() as u32] {
            record.extend_from_slice(&number.to_le_bytes());
        }
        record.extend_from_slice(name.as_bytes());
        record.extend_from_slice(content);
    }
    let sum = crc32c::crc32c(&record).to_le_bytes();
    record.extend_from_slice(&sum);
    record
}

/// The changes of a complete record; none of any other.
fn decode_record(record: &[u8]) -> Option<Vec<FileChange<'_>>> {
    let (body, sum) = record.split_last_chunk::<4>()?;
    let mut rest = body.strip_prefix(MAGIC)?;
    if crc32c::crc32c(body).to_le_bytes() != *sum {
        return None;
    }
    let mut changes = Vec::new();
    while !rest.is_empty() {
        let (name, mode, content) = (take_u32(&mut rest)?, take_u32(&mut rest)?, take_u32(&mut rest)?);
        let name = std::str::from_utf8(take_bytes(&mut rest, name)?).ok()?;
        // Only checked names reach the file system, even if the checksum matches.
        FileName::try_new(name).ok().filter(|_| name != COMMIT_RECORD && mode <= 0o7777)?;
        changes.push(FileChange {
            name,
            mode: FileMode::new(mode),
            content: take_bytes(&mut rest, content)?,
        });
    }
    Some(changes)
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    let (number, behind) = rest.split_first_chunk::<4>()?;
    *rest = behind;
    Some(u32::from_le_bytes(*number))
}

fn take_bytes<'a>(rest: &mut &'a [u8], len: u32) -> Option<&'a [u8]> {
    let (bytes, behind) = rest.split_at_checked(usize::try_from(len).ok()?)?;
    *rest = behind;
    Some(bytes)
}

/// Checks that the parser of commit records never panics, and that a parsed record is written back unchanged.
/// It tries the bytes as they are and with a correct checksum.
///
/// # Panics
/// If the check fails.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_commit_record(bytes: &[u8]) {
    let mut summed = [MAGIC, bytes].concat();
    summed.extend_from_slice(&crc32c::crc32c(&summed).to_le_bytes());
    for record in [bytes, &summed[..]] {
        if let Some(changes) = decode_record(record) {
            assert_eq!(*encode_record(&changes), record, "a parsed record is written back unchanged");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn records_are_decoded_completely_or_not_at_all(
            files in prop::collection::vec(("[a-z.]{3,9}", 0u32..=0o7777, any::<Vec<u8>>()), 0..4),
            cut in any::<prop::sample::Index>(),
            flip in any::<prop::sample::Index>(),
        ) {
            let files: Vec<_> = files.iter().filter(|file| FileName::try_new(file.0.as_str()).is_ok()).collect();
            let changes: Vec<_> = files
                .iter()
                .map(|(name, mode, content)| FileChange { name, mode: FileMode::new(*mode), content })
                .collect();
            let mut record = encode_record(&changes);
            prop_assert_eq!(decode_record(&record), Some(changes));
            prop_assert_eq!(decode_record(&record[..cut.index(record.len())]), None);
            let at = flip.index(record.len());
            record[at] ^= 1;
            prop_assert_eq!(decode_record(&record), None);
        }
    }
}
