//! From an archive's files to blobs, in one pass.

use std::collections::BTreeMap;
use std::io::Read;

use bytes::Bytes;

use super::compression::Compression;
use super::error::{StreamError, StreamLimit};
use super::tar::{Entry, Kind, Tar};
use crate::digest::Hasher;
use crate::store::Incoming;
use crate::{Digest, Limits};

/// How much is handed on at a time.
const CHUNK: usize = 512 << 10;

/// How many links may lead to a file.
const LINKS: usize = 8;

/// Where blobs go.
pub(crate) trait Sink {
    type Error;

    /// Announces a blob; `false`: it is there already, and nothing of it has to be written.
    fn begin(&mut self, blob: Incoming) -> Result<bool, Self::Error>;

    /// A part of the announced blob.
    fn write(&mut self, chunk: Bytes) -> Result<(), Self::Error>;

    /// The announced blob is whole, and this is its digest.
    fn commit(&mut self, digest: Digest) -> Result<(), Self::Error>;
}

/// Why reading ended early.
#[derive(Debug)]
pub(crate) enum ReadError<E> {
    Stream(StreamError),
    /// A blob is not what its name says.
    Digest {
        name: String,
        found: Digest,
    },
    Sink(E),
}

impl<E> From<StreamError> for ReadError<E> {
    fn from(error: StreamError) -> Self {
        Self::Stream(error)
    }
}

/// A file whose content has become a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    pub(crate) compression: Compression,
}

/// What an archive held: its documents, and where its files have gone.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    /// `index.json`, of an OCI layout.
    pub(crate) index: Option<Vec<u8>>,
    /// `manifest.json`, of a docker-archive.
    pub(crate) manifest: Option<Vec<u8>>,
    files: BTreeMap<String, Stored>,
    links: BTreeMap<String, String>,
}

impl Contents {
    /// The file of this name, through links within the archive.
    pub(crate) fn file(&self, name: &str) -> Option<&Stored> {
        let mut name = join("", name)?;
        for _ in 0..LINKS {
            if let Some(stored) = self.files.get(&name) {
                return Some(stored);
            }
            name.clone_from(self.links.get(&name)?);
        }
        None
    }

    /// The digests of everything that the archive held.
    pub(crate) fn digests(&self) -> impl Iterator<Item = Digest> {
        self.files.values().map(|stored| stored.digest)
    }
}

/// A name as it is written in a directory of the archive; `None` where it leads out.
fn join(directory: &str, name: &str) -> Option<String> {
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

/// Reads an archive to its end. All blobs in it have been committed then.
pub(crate) fn read<R: Read, S: Sink>(
    file: R,
    limits: &Limits,
    sink: &mut S,
) -> Result<Contents, ReadError<S::Error>> {
    let mut tar = Tar::open(file, limits)?;
    let mut contents = Contents::default();
    while let Some(entry) = tar.next()? {
        match &entry.kind {
            Kind::File => read_file(&mut tar, entry, limits, (&mut contents, sink))?,
            Kind::Symlink(to) => {
                let directory = entry.name.rsplit_once('/').map_or("", |(directory, _)| directory);
                contents.links.extend(join(directory, to).map(|to| (entry.name.clone(), to)));
            }
            Kind::Hardlink(to) => contents.links.extend(join("", to).map(|to| (entry.name.clone(), to))),
            Kind::Other => {}
        }
    }
    tar.finish()?;
    Ok(contents)
}

fn read_file<R: Read, S: Sink>(
    tar: &mut Tar<R>,
    entry: Entry,
    limits: &Limits,
    (contents, sink): (&mut Contents, &mut S),
) -> Result<(), ReadError<S::Error>> {
    match entry.name.as_str() {
        "index.json" => contents.index = Some(document(tar, &entry, limits)?),
        "manifest.json" => contents.manifest = Some(document(tar, &entry, limits)?),
        "oci-layout" => {}
        name if is_idle(name) => {}
        _ => {
            let stored = blob(tar, &entry, sink)?;
            contents.files.insert(entry.name, stored);
        }
    }
    Ok(())
}

/// What docker-archives hold for tools from before 2016, and nothing refers to.
fn is_idle(name: &str) -> bool {
    name == "repositories"
        || (!name.starts_with("blobs/") && (name.ends_with("/VERSION") || name.ends_with("/json")))
}

fn document<R: Read>(tar: &mut Tar<R>, entry: &Entry, limits: &Limits) -> Result<Vec<u8>, StreamError> {
    if entry.size > limits.document_bytes {
        return Err(StreamError::Limit { limit: limits.document_bytes, of: StreamLimit::Document });
    }
    tar.all()
}

/// Hands a file's content to the sink, and makes its digest on the way.
fn blob<R: Read, S: Sink>(
    tar: &mut Tar<R>,
    entry: &Entry,
    sink: &mut S,
) -> Result<Stored, ReadError<S::Error>> {
    let told = told_digest(&entry.name);
    let incoming = Incoming { digest: told, size: entry.size, file: entry.name.clone() };
    let is_wanted = sink.begin(incoming).map_err(ReadError::Sink)?;
    let (mut hasher, mut compression) = (Hasher::default(), None);
    loop {
        let chunk = chunk(tar, entry.size)?;
        compression.get_or_insert_with(|| Compression::of(&chunk));
        if chunk.is_empty() {
            break;
        }
        match told {
            // The rest is passed by whoever asks for the next entry.
            Some(_) if !is_wanted => break,
            _ => hasher.update(&chunk),
        }
        if is_wanted {
            sink.write(chunk).map_err(ReadError::Sink)?;
        }
    }
    let digest = match told {
        Some(told) if !is_wanted => told,
        told => {
            let found = hasher.finish();
            if told.is_some_and(|told| told != found) {
                return Err(ReadError::Digest { name: entry.name.clone(), found });
            }
            if is_wanted {
                sink.commit(found).map_err(ReadError::Sink)?;
            }
            found
        }
    };
    Ok(Stored { digest, size: entry.size, compression: compression.unwrap_or(Compression::None) })
}

/// The next part of a file of this size.
fn chunk<R: Read>(tar: &mut Tar<R>, size: u64) -> Result<Bytes, StreamError> {
    let mut bytes = vec![0; usize::try_from(size).unwrap_or(CHUNK).min(CHUNK)];
    let mut filled = 0;
    while filled < bytes.len() {
        match tar.content(&mut bytes[filled..])? {
            0 => break,
            read => filled += read,
        }
    }
    bytes.truncate(filled);
    Ok(bytes.into())
}

/// The digest that a file's name says: that of a blob in a layout, or of what a docker-archive calls by its digest.
fn told_digest(name: &str) -> Option<Digest> {
    if let Some(blob) = name.strip_prefix("blobs/") {
        return blob.strip_prefix("sha256/").and_then(Digest::from_hex);
    }
    // Only of configurations: a layer may be called by the digest of what it was before it was compressed.
    Digest::from_hex(name.strip_suffix(".json")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_within_the_archive_only() {
        let stored = Stored { digest: Digest::of(b""), size: 0, compression: Compression::None };
        let links = [("b/layer.tar", "a/layer.tar"), ("loop", "loop")];
        let contents = Contents {
            files: BTreeMap::from([("a/layer.tar".to_owned(), stored.clone())]),
            links: links.map(|(from, to)| (from.to_owned(), to.to_owned())).into(),
            ..Contents::default()
        };
        for name in ["a/layer.tar", "./a//layer.tar", "b/layer.tar", "b/../a/layer.tar"] {
            assert_eq!(contents.file(name), Some(&stored), "{name}");
        }
        for name in ["loop", "c", "../a/layer.tar", "a/../../a/layer.tar", ""] {
            assert_eq!(contents.file(name), None, "{name}");
        }
    }

    #[test]
    fn only_names_of_blobs_and_configurations_tell_a_digest() {
        let digest = Digest::of(b"");
        let hex = digest.hex();
        assert_eq!(told_digest(&format!("blobs/sha256/{hex}")), Some(digest));
        assert_eq!(told_digest(&format!("{hex}.json")), Some(digest));
        for name in [format!("{hex}.tar"), format!("blobs/sha512/{hex}"), format!("{hex}/layer.tar"), hex] {
            assert_eq!(told_digest(&name), None, "{name}");
        }
    }
}
