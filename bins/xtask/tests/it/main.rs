//! Rules of the workspace that the compiler doesn't check.

mod invariants;
mod layers;
mod libraries;
mod sources;
