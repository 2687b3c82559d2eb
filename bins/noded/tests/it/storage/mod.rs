//! The data volume: what lies on it waits for it, follows it, and is gone before it is closed.

mod directory;
mod users;

use nodekeel_localstorage::tree::LayoutDir;

nodekeel_localstorage::layout! {
    /// On the volume: the part of the notes.
    struct NotesLayout {
        /// The notes.
        notes: LayoutDir = "notes", 0o700;
    }
}
