//! Rules of the workspace that the compiler doesn't check.

mod guarantees;
mod invariants;
mod layers;
mod sources;
mod unsafe_code;
