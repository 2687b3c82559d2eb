//! Renders entries as text: [`full_text`] for files and pipes, [`compact_text`] for consoles, [`json_object`]
//! for programs.
//!
//! All times are UTC. Lines are separated by `\n`, without one at the end. Characters that could
//! control the terminal or reorder its text are escaped.

mod compact;
mod full;
mod json;
mod text;

pub use compact::compact_text;
pub use full::full_text;
pub use json::{json_object, printable_json};
