//! Entries as text: [`full`] for files and pipes, [`compact`] for consoles, [`json`] for programs.
//!
//! All times are UTC. Lines are joined by `\n`, with none at the end. Control characters, which could drive the terminal
//! they are printed to, are escaped.

mod compact;
mod full;
mod json;
mod text;

pub use compact::compact;
pub use full::full;
pub use json::json;
