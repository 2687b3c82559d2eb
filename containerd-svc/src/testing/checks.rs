//! Checks over arbitrary input, for property tests and the fuzzer.

use std::collections::BTreeMap;
use std::convert::Infallible;

use bytes::Bytes;

use crate::archive::{self, BlobSink, ReadError};
use crate::digest::DigestHasher;
use crate::documents::{DockerManifestEntry, ImageConfig, ImageIndex, ImageManifest};
use crate::store::IncomingBlob;
use crate::{Digest, ImportLimits};

/// Accepts all blobs, and checks their sizes and digests.
#[derive(Default)]
struct CheckingSink {
    open: Option<(IncomingBlob, DigestHasher, u64)>,
    blobs: BTreeMap<Digest, u64>,
    bytes: u64,
}

impl BlobSink for CheckingSink {
    type Error = Infallible;

    fn begin(&mut self, blob: IncomingBlob) -> Result<bool, Infallible> {
        // A third of the blobs already exist.
        let is_wanted = !blob.size.is_multiple_of(3) || blob.digest.is_none();
        self.open = is_wanted.then(|| (blob, DigestHasher::default(), 0));
        Ok(is_wanted)
    }

    fn write(&mut self, chunk: Bytes) -> Result<(), Infallible> {
        let (_, hasher, size) = self.open.as_mut().expect("only announced blobs are written");
        assert!(!chunk.is_empty() && chunk.len() <= 1 << 20, "chunks have a bounded size");
        hasher.update(&chunk);
        *size += chunk.len() as u64;
        self.bytes += chunk.len() as u64;
        Ok(())
    }

    fn commit(&mut self, digest: Digest) -> Result<(), Infallible> {
        let (incoming, hasher, size) = self.open.take().expect("only announced blobs are committed");
        assert_eq!((hasher.finish(), size), (digest, incoming.size), "digest and size match the content");
        assert!(incoming.digest.is_none_or(|expected| expected == digest), "the digest matches the name");
        self.blobs.insert(digest, size);
        Ok(())
    }

    fn discard(&mut self) {
        let (incoming, hasher, _) = self.open.take().expect("only announced blobs are discarded");
        assert_ne!(incoming.digest, Some(hasher.finish()), "what matches its name is kept");
    }
}

/// Reads any bytes as an archive: never panics, and commits only content that matches its digest.
///
/// # Panics
/// If a check fails.
pub fn fuzz_archive(bytes: &[u8]) {
    let mut limits = ImportLimits::default();
    (limits.archive_bytes, limits.entries, limits.document_bytes) = (8 << 20, 1000, 64 << 10);
    let mut witness = CheckingSink::default();
    check_outline(bytes, &limits);
    match archive::read_archive(bytes, &limits, &None, &mut witness) {
        Ok(contents) => {
            assert!(witness.open.is_none(), "all announced blobs are committed");
            contents.index.iter().chain(&contents.manifest).for_each(|document| fuzz_documents(document));
        }
        Err(ReadError::Archive(_)) => {}
        Err(ReadError::Sink(never)) => match never {},
    }
    assert!(witness.bytes <= limits.archive_bytes, "the limit is enforced");
}

/// The outline of an uncompressed tar lists the files that reading it does.
fn check_outline(bytes: &[u8], limits: &ImportLimits) {
    let read_at = |buffer: &mut [u8], at: u64| {
        let mut rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
        std::io::Read::read_exact(&mut rest, buffer)
    };
    let outline = archive::read_outline(read_at, 0).expect("memory can be read");
    if let (Some(outline), Ok(files)) = (outline, archive::measure_archive(bytes, limits)) {
        for (name, place) in outline.names.files {
            assert!(files.contains(&(archive::digest_from_name(&name), place.size)), "{name}");
        }
    }
}

/// Parses any bytes as each kind of document: never panics.
pub fn fuzz_documents(bytes: &[u8]) {
    if let Ok(ImageIndex { manifests }) = serde_json::from_slice(bytes) {
        for listed in manifests {
            if let Some(reference) = listed.reference_name() {
                check_name(reference);
            }
        }
    }
    if let Ok(saved) = serde_json::from_slice::<Vec<DockerManifestEntry>>(bytes) {
        saved.iter().flat_map(|saved| saved.repo_tags.iter().flatten()).for_each(|tag| check_name(tag));
    }
    drop(serde_json::from_slice::<ImageManifest>(bytes));
    drop(serde_json::from_slice::<ImageConfig>(bytes));
}

/// Completing a complete name does not change it.
fn check_name(text: &str) {
    if let Ok(name) = text.parse::<crate::ImageName>() {
        assert_eq!(name.as_str().parse().as_ref(), Ok(&name), "{text:?}");
    }
}
