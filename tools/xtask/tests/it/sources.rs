//! The Rust files of the workspace.

use std::fs;
use std::path::{Path, PathBuf};

/// A file and its text.
#[derive(Debug)]
pub(crate) struct Source {
    /// Its path below the workspace's root.
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

/// The workspace's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every Rust file below a directory of the workspace.
pub(crate) fn below(directory: &str) -> Vec<Source> {
    let mut found = Vec::new();
    visit(&root().join(directory), &mut found);
    found
}

fn visit(directory: &Path, found: &mut Vec<Source>) {
    for entry in fs::read_dir(directory).expect("the directory was just listed").flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let is_hidden = name.to_string_lossy().starts_with('.');
        if path.is_dir() && name != "target" && !is_hidden {
            visit(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("a source is UTF-8");
            let path = path.strip_prefix(root()).expect("it is below the root").to_owned();
            found.push(Source { path, text });
        }
    }
}
