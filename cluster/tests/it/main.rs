//! Tests of the crate as others see it.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod memory;
mod node;
mod pki;
