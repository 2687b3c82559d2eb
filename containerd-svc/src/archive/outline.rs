//! The outline of an uncompressed archive: what it holds, without reading large files.

use std::io;

use super::pax::PaxHeader;
use super::reader::ArchiveNames;
use super::tar::{BLOCK_BYTES, EntryKind, MAX_NAMES_BYTES, TarEntry, TarHeader, has_no_content};
use crate::Digest;
use crate::digest::DigestHasher;

/// Files up to this size count with their content: every index, manifest and configuration of usual images.
const SMALL_FILE_BYTES: u64 = 64 << 10;

/// Headers that are read; [`ImportLimits::entries`](crate::ImportLimits::entries) rejects longer archives.
const MAX_HEADERS: usize = 65_536;

/// The files of an uncompressed tar.
#[derive(Debug)]
pub(crate) struct ArchiveOutline {
    /// Of all headers and all small files, and so of all digests in an image's documents.
    pub(crate) digest: Digest,
    /// The places of its files; of several with one name, the last one.
    pub(crate) names: ArchiveNames<FilePlace>,
}

/// The place of a file in an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FilePlace {
    /// The offset of its first byte.
    pub(crate) at: u64,
    pub(crate) size: u64,
}

/// Reads the outline of the tar that begins at this offset, by a function that fills a buffer from an offset;
/// `None` if that is not a complete, uncompressed tar.
pub(crate) fn read_outline(
    read_at: impl Fn(&mut [u8], u64) -> io::Result<()>,
    start: u64,
) -> io::Result<Option<ArchiveOutline>> {
    // A file that ends early is not a complete tar; that is no failure of the disk.
    let read_all = |buffer: &mut [u8], at| match read_at(buffer, at) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        read => read.map(Some),
    };
    let (mut hasher, mut names, mut at) = (DigestHasher::default(), ArchiveNames::default(), start);
    let (mut pax, mut long_name, mut long_link) = (PaxHeader::default(), None, None);
    let mut name_bytes = 0;
    for _ in 0..MAX_HEADERS {
        let mut block = [0; BLOCK_BYTES];
        if read_all(&mut block, at)?.is_none() {
            return Ok(None);
        }
        if block.iter().all(|byte| *byte == 0) {
            return Ok(Some(ArchiveOutline { digest: hasher.finish(), names }));
        }
        let Ok(header) = TarHeader::parse(&block) else { return Ok(None) };
        hasher.update(&block);
        let is_extension = matches!(header.kind, b'x' | b'g' | b'L' | b'K');
        let size = match &pax {
            // A pax header is about the next file, and not about another extension before it.
            _ if is_extension => header.size,
            _ if has_no_content(header.kind) => 0,
            PaxHeader { size, .. } => size.unwrap_or(header.size),
        };
        let mut content = Vec::new();
        // A large file is skipped: one of the documents, which are small, has its digest.
        if size <= SMALL_FILE_BYTES {
            content.resize(usize::try_from(size).unwrap_or_default(), 0);
            if read_all(&mut content, at + BLOCK_BYTES as u64)?.is_none() {
                return Ok(None);
            }
            hasher.update(&content);
        }
        match header.kind {
            b'x' => pax = PaxHeader::parse(&content).unwrap_or_default(),
            b'L' => long_name = Some(content),
            b'K' => long_link = Some(content),
            // The import ignores global headers as well.
            b'g' => {}
            kind => {
                let pax = std::mem::take(&mut pax);
                let name = pax.path.or(long_name.take()).unwrap_or(header.name);
                let link = pax.link.or(long_link.take()).unwrap_or(header.link);
                name_bytes += (name.len() + link.len()) as u64;
                if name_bytes > MAX_NAMES_BYTES {
                    return Ok(None);
                }
                match TarEntry::parse(kind, &name, &link, size) {
                    Ok(TarEntry { name, kind: EntryKind::File, size }) => {
                        names
                            .files
                            .insert(name, FilePlace { at: at.saturating_add(BLOCK_BYTES as u64), size });
                    }
                    Ok(TarEntry { name, kind, .. }) => names.add_link(name, &kind),
                    Err(_) => return Ok(None),
                }
            }
        }
        let blocks = size.checked_next_multiple_of(BLOCK_BYTES as u64);
        // The size comes from an untrusted header, so that the sum may overflow.
        match blocks.and_then(|bytes| at.checked_add(BLOCK_BYTES as u64)?.checked_add(bytes)) {
            Some(next) => at = next,
            None => return Ok(None),
        }
    }
    Ok(None)
}
