//! Splits an archive into blobs, in one pass.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use bytes::Bytes;

use super::compression::Compression;
use super::error::{ArchiveError, ArchiveLimitKind};
use super::tar::{EntryKind, TarEntry, TarReader};
use crate::digest::DigestHasher;
use crate::store::IncomingBlob;
use crate::{Digest, ImportLimits};

/// Bytes passed to the sink at a time.
const CHUNK_BYTES: usize = 512 << 10;

/// Maximum number of links followed to a file.
const MAX_LINKS: usize = 8;

/// The number of files without the name of any document or layer at which an archive counts as none of images: a root file
/// system, for one, that is not to be written to its end.
const MAX_FOREIGN_FILES: usize = 64;

/// Receives the blobs of an archive.
pub(crate) trait BlobSink {
    type Error;

    /// Announces a blob; `false` if it already exists, and then nothing of it is written.
    fn begin(&mut self, blob: IncomingBlob) -> Result<bool, Self::Error>;

    /// Writes the next part of the announced blob.
    fn write(&mut self, chunk: Bytes) -> Result<(), Self::Error>;

    /// Completes the announced blob, which has this digest.
    fn commit(&mut self, digest: Digest) -> Result<(), Self::Error>;

    /// Discards the announced blob, whose digest is not the one in its name.
    fn discard(&mut self);
}

/// Failure to read an archive into a sink.
#[derive(Debug)]
pub(crate) enum ReadError<E> {
    Archive(ArchiveError),
    Sink(E),
}

impl<E> From<ArchiveError> for ReadError<E> {
    fn from(error: ArchiveError) -> Self {
        Self::Archive(error)
    }
}

/// A file of the archive whose content is a blob in the sink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredBlob {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    pub(crate) compression: Compression,
}

/// The documents of an archive, and the blobs that its files became.
#[derive(Debug, Default)]
pub(crate) struct ArchiveContents {
    /// `index.json` of an OCI layout.
    pub(crate) index: Option<Vec<u8>>,
    /// `manifest.json` of a docker-archive.
    pub(crate) manifest: Option<Vec<u8>>,
    names: ArchiveNames<StoredBlob>,
    /// Files whose content has this digest, and not the one in their name. No sink has them.
    damaged: BTreeMap<String, Digest>,
}

/// The files of an archive, and the links to them.
#[derive(Debug)]
pub(crate) struct ArchiveNames<T> {
    pub(crate) files: BTreeMap<String, T>,
    links: BTreeMap<String, String>,
}

impl<T> Default for ArchiveNames<T> {
    fn default() -> Self {
        Self { files: BTreeMap::new(), links: BTreeMap::new() }
    }
}

impl<T> ArchiveNames<T> {
    /// The file with this name, following links within the archive; with the name that it has itself.
    pub(crate) fn find(&self, name: &str) -> Option<(String, &T)> {
        let mut name = resolve_name("", name)?;
        // A bounded number: an archive may have links in a circle.
        for _ in 0..MAX_LINKS {
            if let Some(file) = self.files.get(&name) {
                return Some((name, file));
            }
            name.clone_from(self.links.get(&name)?);
        }
        None
    }

    /// Adds a link; a target outside of the archive is dropped.
    pub(super) fn add_link(&mut self, name: String, kind: &EntryKind) {
        let (directory, to) = match kind {
            // Relative to the link's own directory.
            EntryKind::Symlink(to) => (name.rsplit_once('/').map_or("", |(directory, _)| directory), to),
            EntryKind::Hardlink(to) => ("", to),
            EntryKind::File | EntryKind::Other => return,
        };
        if let Some(to) = resolve_name(directory, to) {
            self.links.insert(name, to);
        }
    }
}

impl ArchiveContents {
    /// The file with this name, following links within the archive.
    pub(crate) fn find_file(&self, name: &str) -> Option<&StoredBlob> {
        self.names.find(name).map(|(_, stored)| stored)
    }

    /// The damaged file that this missing content would be, by its name or its digest; with the digest that it has.
    pub(crate) fn find_damaged(&self, missing: &str) -> Option<(&str, Digest)> {
        let is_it = |name: &str| {
            name == missing || digest_from_name(name).is_some_and(|digest| digest.to_string() == missing)
        };
        let found = self.damaged.iter().find(|(name, _)| is_it(name));
        found.map(|(name, digest)| (name.as_str(), *digest))
    }

    /// The digests of all blobs of the archive.
    pub(crate) fn blob_digests(&self) -> impl Iterator<Item = Digest> {
        self.names.files.values().map(|stored| stored.digest)
    }
}

/// Resolves a name relative to a directory of the archive; `None` if it leads out of the archive.
fn resolve_name(directory: &str, name: &str) -> Option<String> {
    let mut parts: Vec<&str> =
        if name.starts_with('/') { Vec::new() } else { directory.split('/').collect() };
    for part in name.split('/') {
        match part {
            ".." => {
                parts.retain(|part| !part.is_empty());
                parts.pop()?;
            }
            "." | "" => {}
            part => parts.push(part),
        }
    }
    parts.retain(|part| !part.is_empty());
    Some(parts.join("/"))
}

/// The files of an archive that are read; `None` for all.
pub(crate) type WantedFiles = Option<BTreeSet<String>>;

/// Reads an archive to its end and commits the blobs in it that are wanted.
pub(crate) fn read_archive<R: Read, S: BlobSink>(
    file: R,
    limits: &ImportLimits,
    wanted: &WantedFiles,
    sink: &mut S,
) -> Result<ArchiveContents, ReadError<S::Error>> {
    let mut tar = TarReader::open(file, limits)?;
    let (mut contents, mut foreign) = (ArchiveContents::default(), Some(0));
    while let Some(entry) = tar.next_entry()? {
        match &entry.kind {
            EntryKind::File => {
                foreign = count_foreign(foreign, &entry.name)?;
                read_file(&mut tar, entry, limits, wanted, &mut contents, sink)?;
            }
            kind => contents.names.add_link(entry.name, kind),
        }
    }
    // The checksum at the end covers everything before it, so it is read before anything is listed.
    tar.read_trailer()?;
    Ok(contents)
}

/// Reads an archive to its end for the sizes of its files, and the digests in their names.
pub(crate) fn measure_archive<R: Read>(
    file: R,
    limits: &ImportLimits,
) -> Result<Vec<(Option<Digest>, u64)>, ArchiveError> {
    let mut tar = TarReader::open(file, limits)?;
    let mut files = Vec::new();
    while let Some(entry) = tar.next_entry()? {
        if entry.kind == EntryKind::File {
            files.push((digest_from_name(&entry.name), entry.size));
        }
    }
    Ok(files)
}

fn read_file<R: Read, S: BlobSink>(
    tar: &mut TarReader<R>,
    entry: TarEntry,
    limits: &ImportLimits,
    wanted: &WantedFiles,
    contents: &mut ArchiveContents,
    sink: &mut S,
) -> Result<(), ReadError<S::Error>> {
    match entry.name.as_str() {
        "index.json" => contents.index = Some(read_document(tar, &entry, limits)?),
        "manifest.json" => contents.manifest = Some(read_document(tar, &entry, limits)?),
        // Only a version, on which nothing here depends.
        "oci-layout" => {}
        name if is_legacy_metadata(name) => {}
        name if wanted.as_ref().is_some_and(|wanted| !wanted.contains(name)) => {}
        _ => {
            let stored = read_blob(tar, &entry, sink)?;
            match digest_from_name(&entry.name).filter(|expected| *expected != stored.digest) {
                Some(_) => drop(contents.damaged.insert(entry.name, stored.digest)),
                None => drop(contents.names.files.insert(entry.name, stored)),
            }
        }
    }
    Ok(())
}

/// Counts the files before the first one that an image archive may have; an error where there are too many.
fn count_foreign(foreign: Option<usize>, name: &str) -> Result<Option<usize>, ArchiveError> {
    match foreign {
        Some(count) if !is_usual_name(name) => match count + 1 {
            MAX_FOREIGN_FILES => Err(ArchiveError::NotImages { file: name.to_owned() }),
            count => Ok(Some(count)),
        },
        // One usual name suffices.
        _ => Ok(None),
    }
}

/// Returns whether writers of image archives use such names, for documents, layers or version files.
///
/// *Source:* the OCI image layout; `docker save` of all releases; go-containerregistry's tarballs (`sha256:…` for a
/// configuration).
fn is_usual_name(name: &str) -> bool {
    const SUFFIXES: [&str; 7] = [".json", ".tar", ".gz", ".tgz", ".zst", "/VERSION", "/json"];
    name.starts_with("blobs/")
        || name.starts_with("sha256:")
        || ["oci-layout", "repositories"].contains(&name)
        || SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
        || Digest::from_hex(name).is_some()
}

/// Files that docker-archives keep for tools from before 2016 and that nothing refers to.
fn is_legacy_metadata(name: &str) -> bool {
    name == "repositories"
        || (!name.starts_with("blobs/") && (name.ends_with("/VERSION") || name.ends_with("/json")))
}

fn read_document<R: Read>(
    tar: &mut TarReader<R>,
    entry: &TarEntry,
    limits: &ImportLimits,
) -> Result<Vec<u8>, ArchiveError> {
    if entry.size > limits.document_bytes {
        return Err(ArchiveError::Limit { limit: limits.document_bytes, of: ArchiveLimitKind::Document });
    }
    tar.read_all_content()
}

/// Streams a file's content to the sink and computes its digest, which may differ from the one in its name.
fn read_blob<R: Read, S: BlobSink>(
    tar: &mut TarReader<R>,
    entry: &TarEntry,
    sink: &mut S,
) -> Result<StoredBlob, ReadError<S::Error>> {
    let expected = digest_from_name(&entry.name);
    let incoming = IncomingBlob { digest: expected, size: entry.size, file: entry.name.clone() };
    // The store has verified content that it already has, so its copy in the archive is skipped.
    let is_wanted = sink.begin(incoming).map_err(ReadError::Sink)?;
    let (mut hasher, mut compression) = (DigestHasher::default(), None);
    loop {
        let chunk = read_chunk(tar, entry.size)?;
        // From the first chunk: a docker-archive does not state the compression of its layers.
        compression.get_or_insert_with(|| Compression::detect(&chunk));
        if chunk.is_empty() {
            break;
        }
        match expected {
            // `next_entry` skips the rest.
            Some(_) if !is_wanted => break,
            _ => hasher.update(&chunk),
        }
        if is_wanted {
            sink.write(chunk).map_err(ReadError::Sink)?;
        }
    }
    let digest = match expected {
        Some(expected) if !is_wanted => expected,
        expected => {
            let found = hasher.finish();
            // Before the commit: content with a wrong digest never becomes visible.
            match expected.is_some_and(|expected| expected != found) {
                true => sink.discard(),
                false if is_wanted => sink.commit(found).map_err(ReadError::Sink)?,
                false => {}
            }
            found
        }
    };
    Ok(StoredBlob { digest, size: entry.size, compression: compression.unwrap_or(Compression::None) })
}

/// Reads the next part of a file of this size.
fn read_chunk<R: Read>(tar: &mut TarReader<R>, size: u64) -> Result<Bytes, ArchiveError> {
    let mut bytes = vec![0; usize::try_from(size).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES)];
    let mut filled = 0;
    // Decompressors return small parts; full chunks keep the number of requests to the store low.
    while filled < bytes.len() {
        match tar.read_content(&mut bytes[filled..])? {
            0 => break,
            read => filled += read,
        }
    }
    bytes.truncate(filled);
    Ok(bytes.into())
}

/// The digest in a file's name: of a blob in an OCI layout, or of a file that a docker-archive names by its
/// digest.
pub(crate) fn digest_from_name(name: &str) -> Option<Digest> {
    if let Some(blob) = name.strip_prefix("blobs/") {
        return blob.strip_prefix("sha256/").and_then(Digest::from_hex);
    }
    // Of configurations only: a layer may be named by the digest of its uncompressed content.
    Digest::from_hex(name.strip_suffix(".json")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_within_the_archive_only() {
        let stored = StoredBlob { digest: Digest::of_content(b""), size: 0, compression: Compression::None };
        let links = [("b/layer.tar", "a/layer.tar"), ("loop", "loop")];
        let names = ArchiveNames {
            files: BTreeMap::from([("a/layer.tar".to_owned(), stored.clone())]),
            links: links.map(|(from, to)| (from.to_owned(), to.to_owned())).into(),
        };
        let contents = ArchiveContents { names, ..ArchiveContents::default() };
        for name in ["a/layer.tar", "./a//layer.tar", "b/layer.tar", "b/../a/layer.tar"] {
            assert_eq!(contents.find_file(name), Some(&stored), "{name}");
        }
        for name in ["loop", "c", "../a/layer.tar", "a/../../a/layer.tar", ""] {
            assert_eq!(contents.find_file(name), None, "{name}");
        }
    }

    #[test]
    fn files_count_as_foreign_until_the_first_usual_name() {
        let count = |names: &[&str]| names.iter().try_fold(Some(0), |count, name| count_foreign(count, name));
        let root = ["bin/ls"; MAX_FOREIGN_FILES];
        assert!(matches!(count(&root), Err(ArchiveError::NotImages { file }) if file == "bin/ls"));
        assert_eq!(count(&root[1..]).expect("few"), Some(MAX_FOREIGN_FILES - 1));
        let hex = Digest::of_content(b"").to_hex();
        let layer = format!("{hex}/layer.tar");
        for usual in ["oci-layout", "index.json", "blobs/sha256/x", &layer, &hex, "x.tar.gz", "sha256:x"] {
            assert_eq!(count(&[&[usual][..], &root, &root].concat()).expect("usual"), None, "{usual}");
        }
    }

    #[test]
    fn digests_come_only_from_names_of_blobs_and_configurations() {
        let digest = Digest::of_content(b"");
        let hex = digest.to_hex();
        assert_eq!(digest_from_name(&format!("blobs/sha256/{hex}")), Some(digest));
        assert_eq!(digest_from_name(&format!("{hex}.json")), Some(digest));
        for name in [format!("{hex}.tar"), format!("blobs/sha512/{hex}"), format!("{hex}/layer.tar"), hex] {
            assert_eq!(digest_from_name(&name), None, "{name}");
        }
    }
}
