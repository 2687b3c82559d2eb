//! Several files changed at once, over nothing but the durable replacement of one: a record of all new contents.
//!
//! ```text
//! record = "nodekeel commit 1\n"  file*  crc32c of all before (4 bytes, little endian)
//! file   = length of name, mode, length of content (4 bytes each, little endian)  name  content
//! ```

use zeroize::Zeroizing;

use super::{Directory, File};
use crate::dir::READ_LIMIT;
use crate::error::{Error, Operation, Refusal};
use crate::metadata::Mode;
use crate::name::Name;

const MAGIC: &[u8] = b"nodekeel commit 1\n";

/// The record's own name; it is there for as long as a commit takes.
pub(super) const RECORD: &str = ".commit";

/// Private, since a key may be in it.
const MODE: Mode = Mode::PRIVATE_FILE;

/// One file of a record.
#[derive(Debug, PartialEq, Eq)]
struct Change<'a> {
    name: &'a str,
    mode: Mode,
    content: &'a [u8],
}

pub(super) fn commit(directory: &Directory, contents: &[(&File, &[u8])]) -> Result<(), Error> {
    let mut changes = Vec::with_capacity(contents.len());
    for (file, content) in contents {
        let name = own_name(directory, file)
            .ok_or_else(|| invalid(Operation::Write, file, "it is no file of the directory committed to"))?;
        changes.push(Change { name, mode: file.mode(), content });
    }
    let (spot, record) = (directory.spot(), encode(&changes));
    // What can't be read again would keep the directory from ever being placed again.
    if record.len() as u64 > READ_LIMIT {
        let path = directory.path().join(RECORD);
        return Err(Error::new(Operation::Write, path, Refusal::TooLarge { limit: READ_LIMIT }));
    }
    spot.placement.write(&spot.inner.join(RECORD), &record, MODE)?;
    replay(directory, &changes)
}

/// Completes what a crash has interrupted.
pub(super) fn complete(directory: &Directory) -> Result<(), Error> {
    match record(directory)? {
        Some(record) => match decode(&record) {
            Some(changes) => replay(directory, &changes),
            // Without its end it was never committed: the files are the old ones, all of them.
            None => forget(directory),
        },
        None => Ok(()),
    }
}

/// What a file of the directory contains once its commit is complete; none where no commit says anything about it.
#[cfg(feature = "pki")]
pub(crate) fn committed(directory: &Directory, file: &File) -> Result<Option<Zeroizing<Vec<u8>>>, Error> {
    let (Some(record), Some(name)) = (record(directory)?, own_name(directory, file)) else { return Ok(None) };
    let changes = decode(&record).unwrap_or_default();
    let change = changes.iter().find(|change| change.name == name);
    Ok(change.map(|change| Zeroizing::new(change.content.to_vec())))
}

fn record(directory: &Directory) -> Result<Option<Zeroizing<Vec<u8>>>, Error> {
    let spot = directory.spot();
    match spot.placement.read(&spot.inner.join(RECORD)) {
        Ok(record) => Ok(Some(Zeroizing::new(record))),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

fn replay(directory: &Directory, changes: &[Change<'_>]) -> Result<(), Error> {
    let spot = directory.spot();
    for Change { name, mode, content } in changes {
        spot.placement.write(&spot.inner.join(name), content, *mode)?;
    }
    forget(directory)
}

fn forget(directory: &Directory) -> Result<(), Error> {
    let spot = directory.spot();
    spot.placement.remove(&spot.inner.join(RECORD)).map(drop)
}

/// The file's name, if it lies in the directory itself.
fn own_name<'a>(directory: &Directory, file: &'a File) -> Option<&'a str> {
    let (spot, within) = (file.spot(), directory.spot());
    let is_own = spot.inner.parent() == Some(&within.inner) && spot.path.parent() == Some(&within.path);
    is_own.then(|| spot.inner.file_name()?.to_str()).flatten()
}

fn invalid(operation: Operation, file: &File, why: &'static str) -> Error {
    Error::new(operation, file.path(), std::io::Error::new(std::io::ErrorKind::InvalidInput, why))
}

fn encode(changes: &[Change<'_>]) -> Zeroizing<Vec<u8>> {
    let bytes = changes.iter().map(|change| 12 + change.name.len() + change.content.len()).sum::<usize>();
    // Room for all of it from the start: a growing vector would leave copies behind.
    let mut record = Zeroizing::new(Vec::with_capacity(MAGIC.len() + bytes + 4));
    record.extend_from_slice(MAGIC);
    for Change { name, mode, content } in changes {
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

/// The changes of a record that is whole; none of any other.
fn decode(record: &[u8]) -> Option<Vec<Change<'_>>> {
    let (body, sum) = record.split_last_chunk::<4>()?;
    let mut rest = body.strip_prefix(MAGIC)?;
    if crc32c::crc32c(body).to_le_bytes() != *sum {
        return None;
    }
    let mut changes = Vec::new();
    while !rest.is_empty() {
        let (name, mode, content) = (number(&mut rest)?, number(&mut rest)?, number(&mut rest)?);
        let name = std::str::from_utf8(take(&mut rest, name)?).ok()?;
        // Nothing that was not checked reaches the file system, whatever a checksum says.
        Name::try_new(name).ok().filter(|_| name != RECORD && mode <= 0o7777)?;
        changes.push(Change { name, mode: Mode::new(mode), content: take(&mut rest, content)? });
    }
    Some(changes)
}

fn number(rest: &mut &[u8]) -> Option<u32> {
    let (number, behind) = rest.split_first_chunk::<4>()?;
    *rest = behind;
    Some(u32::from_le_bytes(*number))
}

fn take<'a>(rest: &mut &'a [u8], len: u32) -> Option<&'a [u8]> {
    let (taken, behind) = rest.split_at_checked(usize::try_from(len).ok()?)?;
    *rest = behind;
    Some(taken)
}

/// What the record of a commit may hold, as it is and with a right checksum: never panics, and what is read is written
/// as it was.
///
/// # Panics
/// Where that isn't so.
#[cfg(any(test, feature = "testing"))]
pub fn commit_record(bytes: &[u8]) {
    let mut summed = [MAGIC, bytes].concat();
    summed.extend_from_slice(&crc32c::crc32c(&summed).to_le_bytes());
    for record in [bytes, &summed[..]] {
        if let Some(changes) = decode(record) {
            assert_eq!(*encode(&changes), record, "what is parsed prints as it was");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn records_are_parsed_again_and_never_in_part(
            files in prop::collection::vec(("[a-z.]{3,9}", 0u32..=0o7777, any::<Vec<u8>>()), 0..4),
            cut in any::<prop::sample::Index>(),
            flip in any::<prop::sample::Index>(),
        ) {
            let files: Vec<_> = files.iter().filter(|file| Name::try_new(file.0.as_str()).is_ok()).collect();
            let changes: Vec<_> = files
                .iter()
                .map(|(name, mode, content)| Change { name, mode: Mode::new(*mode), content })
                .collect();
            let mut record = encode(&changes);
            prop_assert_eq!(decode(&record), Some(changes));
            prop_assert_eq!(decode(&record[..cut.index(record.len())]), None);
            let at = flip.index(record.len());
            record[at] ^= 1;
            prop_assert_eq!(decode(&record), None);
        }
    }
}
