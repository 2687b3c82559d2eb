//! Secrets that a Tang server in the network gives back: bound once, and recovered without the server learning them.
//!
//! The exchange is that of McCallum and Relyea, on the curve P-521. All calls compute; the caller sends and receives.
//!
//! ```text
//!  server                     bind once                           recover, again and again
//!  S = s·G ── GET /adv ─────▶ K = c·S, keeps C = c·G
//!                             a JWE of the secret by K
//!  Y = s·X ◀─ POST /rec/kid ───────────────────────────────────── X = C + e·G
//!          ─────────────────────────────────────────────────────▶ K = Y - e·S
//! ```
//!
//! A [`Binding`] is the JWE that `clevis encrypt tang` writes and `clevis decrypt` reads. It has neither the secret nor K:
//! without an answer of the server it opens nothing. The server, and who listens, see X, which e has made random.
//!
//! *Source:* `latchset/tang` and `latchset/clevis`; RFC 7515, 7516, 7517, 7518 (4.6, 5.3), 7638.

mod advertisement;
mod binding;
mod curve;
mod error;
mod jwk;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod server;
#[cfg(test)]
mod tang_test;

pub use advertisement::Advertisement;
pub use binding::{Binding, Recovery, secret_id};
pub use error::TangError;
pub use jwk::{InvalidThumbprint, Thumbprint};

/// The largest body that a Tang server may answer with, in bytes. An advertisement of 100 keys is smaller.
pub const ANSWER_LIMIT: usize = 64 << 10;
