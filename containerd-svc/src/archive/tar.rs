//! Files out of a tar: ustar, with GNU's and pax's long names; within bounds, and without trust.
//!
//! *Source:* POSIX.1-2017, pax, "ustar Interchange Format"; tar(5); GNU tar's manual, "Basic Tar Format".

use std::io::Read;

use super::compression::Stream;
use super::error::{StreamError, StreamLimit};
use super::pax::Pax;
use crate::Limits;

const BLOCK: usize = 512;

/// The longest name or pax header: no archive of images has a fraction of it.
const LONGEST_NAME: u64 = 64 << 10;

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    /// A symbolic link to a name as it is written, relative to its own directory.
    Symlink(String),
    /// Another name of a file, by its whole name.
    Hardlink(String),
    /// Directories, devices.
    Other,
}

/// One entry's header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// Without `./` before it and `/` behind.
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) size: u64,
}

/// The entries of a tar, one after the other.
pub(super) struct Tar<R: Read> {
    stream: Stream<R>,
    limits: Limits,
    /// How much has been read.
    at: u64,
    /// What is left of the current entry's content.
    left: u64,
    /// What stands between that and the next header.
    padding: u64,
    entries: u32,
}

impl<R: Read> Tar<R> {
    pub(super) fn open(file: R, limits: &Limits) -> Result<Self, StreamError> {
        let stream = Stream::open(file)?;
        Ok(Self { stream, limits: limits.clone(), at: 0, left: 0, padding: 0, entries: 0 })
    }

    /// The next entry, once what is left of the one before has been passed; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Entry>, StreamError> {
        let (mut long_name, mut long_link, mut pax) = (None, None, Pax::default());
        loop {
            self.pass()?;
            let Some(header) = self.header()? else {
                return Ok(None);
            };
            self.entries += 1;
            if self.entries > self.limits.entries {
                return Err(StreamError::Limit {
                    limit: self.limits.entries.into(),
                    of: StreamLimit::Entries,
                });
            }
            match header.kind {
                b'L' => long_name = Some(self.extension(&header)?),
                b'K' => long_link = Some(self.extension(&header)?),
                b'x' => {
                    let records = self.extension(&header)?;
                    pax = Pax::parse(&records).ok_or_else(|| self.damaged("a pax header"))?;
                }
                b'g' => drop(self.extension(&header)?),
                _ => {
                    let name = pax.path.or(long_name).unwrap_or(header.name);
                    let link = pax.link.or(long_link).unwrap_or(header.link);
                    if header.kind == b'S' || pax.is_sparse {
                        return Err(self.damaged("a sparse file"));
                    }
                    return self.entry(header.kind, &name, &link, pax.size.unwrap_or(header.size)).map(Some);
                }
            }
        }
    }

    fn entry(&mut self, kind: u8, name: &[u8], link: &[u8], size: u64) -> Result<Entry, StreamError> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(until_nul(bytes)).into_owned();
        let kind = match kind {
            // The oldest tars know directories by their names only.
            b'0' | 0 | b'7' if until_nul(name).ends_with(b"/") => Kind::Other,
            b'0' | 0 | b'7' => Kind::File,
            b'1' => Kind::Hardlink(text(link)),
            b'2' => Kind::Symlink(text(link)),
            _ => Kind::Other,
        };
        // Links have no content, whatever their size says.
        let size = if matches!(kind, Kind::Symlink(_) | Kind::Hardlink(_)) { 0 } else { size };
        self.expect(size)?;
        let name = plain(&text(name))?;
        Ok(Entry { name, kind, size })
    }

    /// Reads of the current entry's content; nothing at its end.
    pub(super) fn content(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        let wanted = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if wanted == 0 {
            return Ok(0);
        }
        let read = self.read(&mut buffer[..wanted])?;
        if read == 0 {
            return Err(StreamError::Truncated { at: self.at });
        }
        self.left -= read as u64;
        Ok(read)
    }

    /// Reads what is behind the end, where that tells whether all was well.
    pub(super) fn finish(&mut self) -> Result<(), StreamError> {
        let mut buffer = [0; 16 << 10];
        while self.stream.ends_with_checksum() && self.read(&mut buffer)? > 0 {}
        Ok(())
    }

    fn expect(&mut self, size: u64) -> Result<(), StreamError> {
        if size > self.limits.archive_bytes.saturating_sub(self.at) {
            return Err(self.too_large());
        }
        self.left = size;
        self.padding = size.next_multiple_of(BLOCK as u64) - size;
        Ok(())
    }

    fn pass(&mut self) -> Result<(), StreamError> {
        let mut buffer = [0; 16 << 10];
        self.left += std::mem::take(&mut self.padding);
        while self.content(&mut buffer)? > 0 {}
        Ok(())
    }

    /// The content of an entry that speaks of the next one.
    fn extension(&mut self, header: &Header) -> Result<Vec<u8>, StreamError> {
        if header.size > LONGEST_NAME {
            return Err(StreamError::Limit { limit: LONGEST_NAME, of: StreamLimit::Name });
        }
        self.expect(header.size)?;
        self.all()
    }

    /// All of the current entry's content, which is known to be small.
    pub(super) fn all(&mut self) -> Result<Vec<u8>, StreamError> {
        let mut bytes = vec![0; usize::try_from(self.left).unwrap_or_default()];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += self.content(&mut bytes[filled..])?;
        }
        Ok(bytes)
    }

    /// The next header; `None` at the end, which is a block of zeros.
    fn header(&mut self) -> Result<Option<Header>, StreamError> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.read(&mut block[filled..])? {
                0 => return Err(StreamError::Truncated { at: self.at }),
                read => filled += read,
            }
        }
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        Header::parse(&block).map(Some).map_err(|what| StreamError::Tar { at: self.at - BLOCK as u64, what })
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        loop {
            match self.stream.read(buffer) {
                Ok(read) => {
                    self.at += read as u64;
                    if self.at > self.limits.archive_bytes {
                        return Err(self.too_large());
                    }
                    return Ok(read);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.stream.failed(error, self.at)),
            }
        }
    }

    fn too_large(&self) -> StreamError {
        StreamError::Limit { limit: self.limits.archive_bytes, of: StreamLimit::Bytes }
    }

    fn damaged(&self, what: &'static str) -> StreamError {
        StreamError::Tar { at: self.at, what }
    }
}

/// The name as it is looked up: without `./` and double slashes.
fn plain(name: &str) -> Result<String, StreamError> {
    let parts = name.split('/').filter(|part| !part.is_empty() && *part != ".");
    if name.starts_with('/') || parts.clone().any(|part| part == "..") {
        return Err(StreamError::Name { name: name.chars().take(100).collect() });
    }
    Ok(parts.collect::<Vec<_>>().join("/"))
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// A header as it lies in the archive.
struct Header {
    name: Vec<u8>,
    link: Vec<u8>,
    kind: u8,
    size: u64,
}

impl Header {
    fn parse(block: &[u8; BLOCK]) -> Result<Self, &'static str> {
        let told = number(&block[148..156]).ok_or("a header without a checksum")?;
        let sum = |value: fn(u8) -> i64| -> i64 {
            let of_field = 8 * i64::from(b' ');
            let rest = block[..148].iter().chain(&block[156..]);
            rest.map(|byte| value(*byte)).sum::<i64>() + of_field
        };
        // Some old tars have summed up signed bytes.
        let sums = [sum(i64::from), sum(|byte| i64::from(byte.cast_signed()))];
        if !sums.iter().any(|sum| u64::try_from(*sum) == Ok(told)) {
            return Err("a header with a wrong checksum");
        }
        let size = number(&block[124..136]).ok_or("a header without a size")?;
        let prefix = if block[257..263] == *b"ustar\0" { until_nul(&block[345..500]) } else { &[] };
        let name = until_nul(&block[..100]);
        let name = if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() };
        Ok(Self { name, link: until_nul(&block[157..257]).to_vec(), kind: block[156], size })
    }
}

/// A number in octal digits, or with its highest bit set in binary.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        // The next bit is the sign.
        let first = u64::from(field[0] & 0x7f);
        let mut rest = field[1..].iter();
        return rest
            .try_fold(first, |number, byte| number.checked_mul(256).map(|number| number | u64::from(*byte)));
    }
    let text = std::str::from_utf8(field).ok()?.trim_matches([' ', '\0']);
    if text.is_empty() {
        return Some(0);
    }
    u64::from_str_radix(text, 8).ok().filter(|_| !text.starts_with('+'))
}

#[cfg(test)]
#[path = "tar_test.rs"]
mod tests;
