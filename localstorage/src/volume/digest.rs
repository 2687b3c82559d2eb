//! The digest of what was read of a disk, by which its owner gives the contents up.

use std::fmt;

use sha2::{Digest as _, Sha256};

/// How much of a disk a digest covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DigestScope {
    /// The places that a probe reads: the first and the last MiB, and samples where both are zero.
    Sampled,
    /// Every byte.
    Read,
}

/// The digest of the contents of a disk, and of its identity: its device, serial number, size. It changes with each of
/// them, as far as its scope goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContentsDigest {
    scope: DigestScope,
    value: u64,
}

impl ContentsDigest {
    pub(super) fn new(scope: DigestScope, parts: &[&[u8]]) -> ContentsDigest {
        let mut hash = Sha256::new();
        for part in parts {
            // With its length: two lists of parts never have the same bytes.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let hash: [u8; 32] = hash.finalize().into();
        let [a, b, c, d, e, f, g, h, ..] = hash;
        ContentsDigest { scope, value: u64::from_be_bytes([a, b, c, d, e, f, g, h]) }
    }

    /// How much of the disk it covers.
    pub fn scope(self) -> DigestScope {
        self.scope
    }

    /// The same digest, also of this identity.
    pub(super) fn bound_to(self, identity: &[u8]) -> ContentsDigest {
        ContentsDigest::new(self.scope, &[&self.value.to_be_bytes(), identity])
    }
}

/// As in a token: `sampled-` or `read-`, and 16 digits.
impl fmt::Display for ContentsDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scope = match self.scope {
            DigestScope::Sampled => "sampled",
            DigestScope::Read => "read",
        };
        write!(f, "{scope}-{:016x}", self.value)
    }
}
