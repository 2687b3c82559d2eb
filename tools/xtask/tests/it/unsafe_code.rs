//! The workspace's lints deny unsafe code; a crate lifts that in one file.

use crate::sources;

/// The files that lift the lint, but for a crate's `sys.rs`.
fn misplaced_lifts<'a>(sources: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<&'a str> {
    // In two pieces, or this line would be a lift.
    let lift = ["(", "unsafe_code"].concat();
    let lifts =
        |text: &str| text.lines().any(|line| !line.trim_start().starts_with("//") && line.contains(&lift));
    let misplaced = sources.into_iter().filter(|(path, text)| !path.ends_with("sys.rs") && lifts(text));
    misplaced.map(|(path, _)| path).collect()
}

#[test]
fn unsafe_code_is_only_in_sys() {
    let sources = sources::below(".");
    assert!(sources.len() > 100, "the sources were read");
    let files = sources.iter().map(|source| (source.path.to_str().unwrap_or_default(), &*source.text));
    assert_eq!(misplaced_lifts(files), Vec::<&str>::new());
}

#[test]
fn a_misplaced_lift_is_found() {
    let text = ["#![allow(", "unsafe_code, reason = \"x\")]"].concat();
    assert_eq!(misplaced_lifts([("a/src/sys.rs", &*text), ("a/src/lib.rs", &*text)]), ["a/src/lib.rs"]);
}
