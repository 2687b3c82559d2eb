//! What tests need: the contracts of consensus and of stores as checks, and checks over arbitrary input.

mod consensus;
mod kv;

use crate::pki;

pub use consensus::consensus_conformance;
pub use kv::kv_conformance;

/// What the values of an authority may hold: never panics, and what is read as a key is stored as the same bytes.
///
/// # Panics
/// Where that isn't so.
pub fn authority_values(bytes: &[u8]) {
    pki::arbitrary(bytes);
}
