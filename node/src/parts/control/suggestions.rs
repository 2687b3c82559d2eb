//! DNs as an operator types them: short names, and suggestions for unknown ones.

use std::collections::BTreeSet;

use nodekeel_logtree::Dn;
use thiserror::Error;

/// A name is similar if at most one in this number of characters of its last part differs.
const CHARS_PER_TYPO: usize = 3;

/// Maximum number of suggestions.
const MAX_SUGGESTIONS: usize = 3;

/// Longest part of a client's text that an error repeats, in characters.
const MAX_QUOTED_CHARS: usize = 64;

/// A text of a client in quotes, cut to a prefix if it is long.
pub(super) fn quote_prefix(text: &str) -> String {
    match text.char_indices().nth(MAX_QUOTED_CHARS) {
        Some((at, _)) => format!("{:?}… ({} bytes)", &text[..at], text.len()),
        None => format!("{text:?}"),
    }
}

/// The reason why a short name means no DN.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum NameError {
    /// No DN ends with it.
    #[error("{message}")]
    Unknown { message: String },
    /// Several DNs end with it: one of them has to be typed.
    #[error("ambiguous name {name:?}: use {}", .dns.join(" or "))]
    Ambiguous { name: String, dns: Vec<String> },
}

/// The DN that a name means: itself, or the only one whose last components it is. Those of the tree come before those that
/// have only a log.
pub(crate) fn resolve_name(name: &str, tree: &[String], logged: &[String]) -> Result<String, NameError> {
    if tree.iter().chain(logged).any(|dn| dn == name) {
        return Ok(name.to_owned());
    }
    let is_meant = |dn: &&String| dn.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'));
    for known in [tree, logged] {
        let meant: BTreeSet<&String> = known.iter().filter(is_meant).collect();
        match meant.len() {
            0 => {}
            1 => return Ok(meant.into_iter().cloned().collect()),
            _ => {
                let dns = meant.into_iter().cloned().collect();
                return Err(NameError::Ambiguous { name: name.to_owned(), dns });
            }
        }
    }
    let message = unknown_dn_message(name, tree.iter().chain(logged).cloned());
    Err(NameError::Unknown { message })
}

/// The message for an unknown DN, with similar ones.
pub(crate) fn unknown_dn_message(dn: &str, known: impl Iterator<Item = String>) -> String {
    // The comparison takes time with the length, and no runnable has such a name.
    if dn.len() > Dn::MAX_BYTES {
        return format!("invalid DN {}: it has at most {} bytes", quote_prefix(dn), Dn::MAX_BYTES);
    }
    // The name of the log's root is empty, which is no suggestion.
    let known: BTreeSet<String> = known.filter(|name| !name.is_empty()).collect();
    let mut near: Vec<_> = known.iter().filter_map(|name| Some((similarity(dn, name)?, name))).collect();
    // The nearest names come first, those of one distance by the alphabet.
    near.sort();
    let near: Vec<_> = near.into_iter().take(MAX_SUGGESTIONS).map(|(_, name)| name.as_str()).collect();
    if near.is_empty() {
        return format!("unknown DN {dn:?}; `nodectl tree` lists all");
    }
    format!("unknown DN {dn:?}; did you mean {}?", near.join(" or "))
}

/// Edit distance of a name from the given one; `None` if it is not similar.
fn similarity(given: &str, name: &str) -> Option<usize> {
    let last = |dn: &str| dn.rsplit('.').next().unwrap_or_default().to_owned();
    let full = edit_distance(given, name);
    // The operator may have left out the names above.
    let tail = edit_distance(&last(given), &last(name));
    let nearest = full.min(tail);
    // A short name is allowed one typo, too.
    let allowed = last(given).chars().count().div_ceil(CHARS_PER_TYPO).max(1);
    (nearest <= allowed).then_some(nearest)
}

/// Number of characters to add, remove or replace (Levenshtein).
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    // One row of the matrix is enough: a cell only depends on its neighbors to the left, above and between these.
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names_are_suggested_and_others_are_not() {
        let known =
            || ["root", "root.etcd", "root.containerd", "root.service.web"].map(String::from).into_iter();
        for (given, says) in [
            ("root.etdc", "did you mean root.etcd?"),
            ("etcd", "did you mean root.etcd?"),
            ("root.web", "did you mean root.service.web?"),
            ("containerd", "did you mean root.containerd?"),
            ("kubelet", "`nodectl tree` lists all"),
            ("", "`nodectl tree` lists all"),
        ] {
            let text = unknown_dn_message(given, known());
            assert!(text.contains(says), "{given}: {text}");
        }
    }

    #[test]
    fn a_short_name_means_the_only_dn_that_ends_with_it() {
        let names = |dns: &[&str]| dns.iter().copied().map(String::from).collect::<Vec<_>>();
        let tree =
            names(&["root", "root.a", "root.a.web", "root.etcd", "root.service.db", "root.service.web"]);
        // A log below a runnable, and that of the program.
        let logged = names(&["", "noded", "root.etcd", "root.b.etcd", "root.containerd.runsc"]);
        let resolve = |name: &str| resolve_name(name, &tree, &logged).map_err(|error| error.to_string());
        for (name, dn) in [
            ("root", "root"),
            ("root.etcd", "root.etcd"),
            ("db", "root.service.db"),
            ("service.web", "root.service.web"),
            ("etcd", "root.etcd"),
            ("runsc", "root.containerd.runsc"),
            ("noded", "noded"),
            ("", ""),
        ] {
            assert_eq!(resolve(name), Ok(dn.to_owned()), "{name}");
        }
        let ambiguous = "ambiguous name \"web\": use root.a.web or root.service.web";
        assert_eq!(resolve("web"), Err(ambiguous.to_owned()));
        for name in ["eb", "oot", "tcd", ".web", "service"] {
            let error = resolve(name).expect_err(name);
            assert!(error.starts_with("unknown DN"), "{error}");
        }
    }

    #[test]
    fn a_long_name_is_refused_with_its_prefix_alone() {
        let text = unknown_dn_message(&"é".repeat(1 << 20), ["root".to_owned()].into_iter());
        let prefix = "é".repeat(MAX_QUOTED_CHARS);
        assert_eq!(text, format!("invalid DN \"{prefix}\"… (2097152 bytes): it has at most 512 bytes"));
    }
}
