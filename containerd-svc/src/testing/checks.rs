//! Checks over arbitrary input, for property tests and the fuzzer.

use std::collections::BTreeMap;
use std::convert::Infallible;

use bytes::Bytes;

use crate::archive::{self, ReadError, Sink};
use crate::digest::Hasher;
use crate::documents::{Config, Index, Manifest, Saved};
use crate::store::Incoming;
use crate::{Digest, Limits};

/// Takes everything, and looks whether it is told the truth.
#[derive(Default)]
struct Witness {
    open: Option<(Incoming, Hasher, u64)>,
    blobs: BTreeMap<Digest, u64>,
    bytes: u64,
}

impl Sink for Witness {
    type Error = Infallible;

    fn begin(&mut self, blob: Incoming) -> Result<bool, Infallible> {
        // Every third is there already.
        let is_wanted = !blob.size.is_multiple_of(3) || blob.digest.is_none();
        self.open = is_wanted.then(|| (blob, Hasher::default(), 0));
        Ok(is_wanted)
    }

    fn write(&mut self, chunk: Bytes) -> Result<(), Infallible> {
        let (_, hasher, size) = self.open.as_mut().expect("only what is wanted is written");
        assert!(!chunk.is_empty() && chunk.len() <= 1 << 20, "chunks have a bounded size");
        hasher.update(&chunk);
        *size += chunk.len() as u64;
        self.bytes += chunk.len() as u64;
        Ok(())
    }

    fn commit(&mut self, digest: Digest) -> Result<(), Infallible> {
        let (incoming, hasher, size) = self.open.take().expect("only what is wanted is committed");
        assert_eq!((hasher.finish(), size), (digest, incoming.size), "the digest is that of the content");
        assert!(incoming.digest.is_none_or(|told| told == digest), "and that which was told");
        self.blobs.insert(digest, size);
        Ok(())
    }
}

/// Any bytes as an archive: never panics, and what is committed is what it is said to be.
///
/// # Panics
/// Where that isn't so.
pub fn check_archive(bytes: &[u8]) {
    let mut limits = Limits::default();
    (limits.archive_bytes, limits.entries, limits.document_bytes) = (8 << 20, 1000, 64 << 10);
    let mut witness = Witness::default();
    match archive::read(bytes, &limits, &mut witness) {
        Ok(contents) => {
            assert!(witness.open.is_none(), "what was begun was committed");
            contents.index.iter().chain(&contents.manifest).for_each(|document| check_documents(document));
        }
        Err(ReadError::Stream(_) | ReadError::Digest { .. }) => {}
        Err(ReadError::Sink(never)) => match never {},
    }
    assert!(witness.bytes <= limits.archive_bytes, "the limit is kept");
}

/// Any bytes as each of the documents: never panics.
pub fn check_documents(bytes: &[u8]) {
    if let Ok(Index { manifests }) = serde_json::from_slice(bytes) {
        for listed in manifests {
            if let Some(reference) = listed.reference() {
                check_name(reference);
            }
        }
    }
    if let Ok(saved) = serde_json::from_slice::<Vec<Saved>>(bytes) {
        saved.iter().flat_map(|saved| saved.repo_tags.iter().flatten()).for_each(|tag| check_name(tag));
    }
    drop(serde_json::from_slice::<Manifest>(bytes));
    drop(serde_json::from_slice::<Config>(bytes));
}

/// A full name is its own full name.
fn check_name(text: &str) {
    if let Ok(name) = text.parse::<crate::ImageName>() {
        assert_eq!(name.as_str().parse().as_ref(), Ok(&name), "{text:?}");
    }
}
