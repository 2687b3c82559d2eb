//! Reads untrusted tars within limits: ustar, with the long names of GNU and pax.
//!
//! *Source:* POSIX.1-2017, pax, "ustar Interchange Format"; tar(5); GNU tar's manual, "Basic Tar Format".

use std::io::Read;

use super::compression::DecompressedStream;
use super::error::{ArchiveError, ArchiveLimitKind};
use super::pax::PaxHeader;
use crate::ImportLimits;

pub(super) const BLOCK_BYTES: usize = 512;

/// Maximum size of a name or pax header: image archives stay far below it.
const MAX_NAME_BYTES: u64 = 64 << 10;

/// Maximum size of all names and link targets together, which are kept in memory: four times what 65,536 blobs
/// need.
pub(super) const MAX_NAMES_BYTES: u64 = 8 << 20;

/// The type of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EntryKind {
    File,
    /// A symbolic link; the target is unresolved, relative to the directory of the link.
    Symlink(String),
    /// A hard link; the target is relative to the root of the archive.
    Hardlink(String),
    /// A directory or device.
    Other,
}

/// One entry without its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TarEntry {
    /// Without a leading `./` and a trailing `/`.
    pub(super) name: String,
    pub(super) kind: EntryKind,
    pub(super) size: u64,
}

impl TarEntry {
    pub(super) fn parse(kind: u8, name: &[u8], link: &[u8], size: u64) -> Result<Self, ArchiveError> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(until_nul(bytes)).into_owned();
        let kind = match kind {
            // The oldest tars mark directories only by a trailing slash.
            kind if is_file_kind(kind) && until_nul(name).ends_with(b"/") => EntryKind::Other,
            kind if is_file_kind(kind) => EntryKind::File,
            b'1' => EntryKind::Hardlink(text(link)),
            b'2' => EntryKind::Symlink(text(link)),
            _ => EntryKind::Other,
        };
        Ok(Self { name: normalize_name(&text(name))?, kind, size })
    }
}

/// One entry, with its names as the headers have them.
pub(super) struct RawEntry {
    pub(super) name: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) kind: u8,
    pub(super) size: u64,
    /// Bytes of its extended attributes.
    pub(super) attribute_bytes: u64,
}

/// Reads the entries of a tar in their order.
pub(super) struct TarReader<R: Read> {
    stream: DecompressedStream<R>,
    limits: ImportLimits,
    /// Bytes read so far.
    position: u64,
    /// Bytes of the current entry's content that are still unread.
    remaining: u64,
    /// Bytes between the content and the next header.
    padding: u64,
    entries: u32,
    /// Bytes of all names so far.
    names: u64,
}

impl<R: Read> TarReader<R> {
    pub(super) fn open(file: R, limits: &ImportLimits) -> Result<Self, ArchiveError> {
        let stream = DecompressedStream::open(file, limits.zstd_window)?;
        Ok(Self {
            stream,
            limits: limits.clone(),
            position: 0,
            remaining: 0,
            padding: 0,
            entries: 0,
            names: 0,
        })
    }

    /// Skips the rest of the current entry and reads the next one; `None` at the end.
    pub(super) fn next_entry(&mut self) -> Result<Option<TarEntry>, ArchiveError> {
        let Some(RawEntry { kind, name, link, size, .. }) = self.next_raw_entry()? else { return Ok(None) };
        // All names stay in memory until the end of the archive, hence the limit on their sum.
        self.names += (name.len() + link.len()) as u64;
        if self.names > MAX_NAMES_BYTES {
            return Err(ArchiveError::Limit { limit: MAX_NAMES_BYTES, of: ArchiveLimitKind::Names });
        }
        TarEntry::parse(kind, &name, &link, size).map(Some)
    }

    /// As [`next_entry`](Self::next_entry), with the names as they are, and without a limit on their sum.
    pub(super) fn next_raw_entry(&mut self) -> Result<Option<RawEntry>, ArchiveError> {
        // Extensions precede the entry that they describe, and apply to that one alone.
        let (mut long_name, mut long_link, mut pax) = (None, None, PaxHeader::default());
        loop {
            self.skip_content()?;
            let Some(header) = self.read_header()? else {
                return Ok(None);
            };
            // Extensions count too: an archive that consists of them must end as well.
            self.entries += 1;
            if self.entries > self.limits.entries {
                return Err(ArchiveError::Limit {
                    limit: self.limits.entries.into(),
                    of: ArchiveLimitKind::Entries,
                });
            }
            match header.kind {
                b'L' => long_name = Some(self.read_extension(&header)?),
                b'K' => long_link = Some(self.read_extension(&header)?),
                b'x' => {
                    let records = self.read_extension(&header)?;
                    pax = PaxHeader::parse(&records).ok_or_else(|| self.format_error("a pax header"))?;
                }
                b'g' => drop(self.read_extension(&header)?),
                kind => {
                    let name = pax.path.or(long_name).unwrap_or(header.name);
                    let link = pax.link.or(long_link).unwrap_or(header.link);
                    // The data of a sparse file leave out its holes, so that its digest would be wrong.
                    if kind == b'S' || pax.is_sparse {
                        return Err(self.format_error("a sparse file"));
                    }
                    let size = if has_no_content(kind) { 0 } else { pax.size.unwrap_or(header.size) };
                    self.expect_content(size)?;
                    let attribute_bytes = pax.attribute_bytes;
                    return Ok(Some(RawEntry { name, link, kind, size, attribute_bytes }));
                }
            }
        }
    }

    /// Reads the next bytes of the current entry's content; 0 at its end.
    pub(super) fn read_content(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        let wanted = usize::try_from(self.remaining).unwrap_or(usize::MAX).min(buffer.len());
        if wanted == 0 {
            return Ok(0);
        }
        let read = self.read_stream(&mut buffer[..wanted])?;
        if read == 0 {
            return Err(ArchiveError::Truncated { at: self.position });
        }
        self.remaining -= read as u64;
        Ok(read)
    }

    /// Reads what follows the end, if a checksum is part of it.
    pub(super) fn read_trailer(&mut self) -> Result<(), ArchiveError> {
        let mut buffer = [0; 16 << 10];
        // A decompressor compares its checksum when it reaches the end of the file.
        while self.stream.ends_with_checksum() && self.read_stream(&mut buffer)? > 0 {}
        Ok(())
    }

    fn expect_content(&mut self, size: u64) -> Result<(), ArchiveError> {
        // The header alone shows that the limit is exceeded: nothing is read or allocated for it.
        if size > self.limits.archive_bytes.saturating_sub(self.position) {
            return Err(self.size_error());
        }
        self.remaining = size;
        self.padding = size.next_multiple_of(BLOCK_BYTES as u64) - size;
        Ok(())
    }

    fn skip_content(&mut self) -> Result<(), ArchiveError> {
        let mut buffer = [0; 16 << 10];
        // Padding is skipped like content, and only once.
        self.remaining += std::mem::take(&mut self.padding);
        while self.read_content(&mut buffer)? > 0 {}
        Ok(())
    }

    /// Reads the content of an entry that describes the next one.
    fn read_extension(&mut self, header: &TarHeader) -> Result<Vec<u8>, ArchiveError> {
        if header.size > MAX_NAME_BYTES {
            return Err(ArchiveError::Limit { limit: MAX_NAME_BYTES, of: ArchiveLimitKind::Name });
        }
        self.expect_content(header.size)?;
        self.read_all_content()
    }

    /// Reads the rest of the current entry's content, which is known to be small.
    pub(super) fn read_all_content(&mut self) -> Result<Vec<u8>, ArchiveError> {
        let mut bytes = vec![0; usize::try_from(self.remaining).unwrap_or_default()];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += self.read_content(&mut bytes[filled..])?;
        }
        Ok(bytes)
    }

    /// Reads the next header; `None` at the end, which is a block of zeros.
    fn read_header(&mut self) -> Result<Option<TarHeader>, ArchiveError> {
        let mut block = [0; BLOCK_BYTES];
        let mut filled = 0;
        while filled < BLOCK_BYTES {
            match self.read_stream(&mut block[filled..])? {
                0 => return Err(ArchiveError::Truncated { at: self.position }),
                read => filled += read,
            }
        }
        // POSIX ends an archive by two blocks of zeros; one suffices, as for GNU tar.
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        TarHeader::parse(&block)
            .map(Some)
            .map_err(|what| ArchiveError::Tar { at: self.position - BLOCK_BYTES as u64, what })
    }

    fn read_stream(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        loop {
            match self.stream.read(buffer) {
                Ok(read) => {
                    self.position += read as u64;
                    if self.position > self.limits.archive_bytes {
                        return Err(self.size_error());
                    }
                    return Ok(read);
                }
                // A signal came before the first byte. *Source:* read(2), `EINTR`.
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.stream.read_error(error, self.position)),
            }
        }
    }

    fn size_error(&self) -> ArchiveError {
        ArchiveError::Limit { limit: self.limits.archive_bytes, of: ArchiveLimitKind::Bytes }
    }

    fn format_error(&self, what: &'static str) -> ArchiveError {
        ArchiveError::Tar { at: self.position, what }
    }
}

/// Returns whether a header is of a regular file.
fn is_file_kind(kind: u8) -> bool {
    matches!(kind, b'0' | 0 | b'7')
}

/// Returns whether a header is of a link, a device, a directory or a FIFO, which has no content, even if its size is not 0:
/// some tars give a hard link the size of its target.
///
/// *Source:* Go's `archive/tar`, `isHeaderOnly`, which containerd reads layers with.
pub(super) fn has_no_content(kind: u8) -> bool {
    matches!(kind, b'1'..=b'6')
}

/// Removes `./` and double slashes from a name.
fn normalize_name(name: &str) -> Result<String, ArchiveError> {
    let parts = name.split('/').filter(|part| !part.is_empty() && *part != ".");
    if name.starts_with('/') || parts.clone().any(|part| part == "..") {
        return Err(ArchiveError::PathTraversal { name: name.chars().take(100).collect() });
    }
    Ok(parts.collect::<Vec<_>>().join("/"))
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// A header block of the archive.
pub(super) struct TarHeader {
    pub(super) name: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) kind: u8,
    pub(super) size: u64,
}

impl TarHeader {
    pub(super) fn parse(block: &[u8; BLOCK_BYTES]) -> Result<Self, &'static str> {
        let expected = parse_number(&block[148..156]).ok_or("a header without a checksum")?;
        let sum = |value: fn(u8) -> i64| -> i64 {
            // The checksum counts its own eight bytes as spaces.
            let of_field = 8 * i64::from(b' ');
            let rest = block[..148].iter().chain(&block[156..]);
            rest.map(|byte| value(*byte)).sum::<i64>() + of_field
        };
        // Some old tars sum signed bytes.
        let sums = [sum(i64::from), sum(|byte| i64::from(byte.cast_signed()))];
        if !sums.iter().any(|sum| u64::try_from(*sum) == Ok(expected)) {
            return Err("a header with a wrong checksum");
        }
        let size = parse_number(&block[124..136]).ok_or("a header without a size")?;
        // GNU's header has a space after the name of the format, and other fields in place of the prefix.
        let prefix = if block[257..263] == *b"ustar\0" { until_nul(&block[345..500]) } else { &[] };
        let name = until_nul(&block[..100]);
        let name = if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() };
        Ok(Self { name, link: until_nul(&block[157..257]).to_vec(), kind: block[156], size })
    }
}

/// Parses a number in octal digits, or in binary if the highest bit is set.
fn parse_number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        // The second bit is the sign.
        let first = u64::from(field[0] & 0x7f);
        let mut rest = field[1..].iter();
        return rest
            .try_fold(first, |number, byte| number.checked_mul(256).map(|number| number | u64::from(*byte)));
    }
    let text = std::str::from_utf8(field).ok()?.trim_matches([' ', '\0']);
    // Some tars leave a field empty that they do not use.
    if text.is_empty() {
        return Some(0);
    }
    // Rust accepts a leading plus sign, which no tar writes.
    u64::from_str_radix(text, 8).ok().filter(|_| !text.starts_with('+'))
}

#[cfg(test)]
#[path = "tar_test.rs"]
mod tests;
