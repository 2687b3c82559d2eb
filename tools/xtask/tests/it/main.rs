//! Rules of the workspace that the compiler doesn't check.

mod documents;
mod layers;
mod sources;
mod unsafe_code;
