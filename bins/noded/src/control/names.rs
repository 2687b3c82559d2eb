//! What to say about a name that does not exist.

use std::collections::BTreeSet;

/// A name is similar if at most one in so many characters of its last part differs.
const ONE_IN: usize = 3;

/// How many names are suggested at most.
const SUGGESTIONS: usize = 3;

/// Says that there is no such DN, and which ones may have been meant.
pub(crate) fn unknown(dn: &str, known: impl Iterator<Item = String>) -> String {
    let known: BTreeSet<String> = known.filter(|name| !name.is_empty()).collect();
    let mut near: Vec<_> =
        known.iter().filter_map(|name| Some((distance_between(dn, name)?, name))).collect();
    near.sort();
    let near: Vec<_> = near.into_iter().take(SUGGESTIONS).map(|(_, name)| name.as_str()).collect();
    if near.is_empty() {
        return format!("no DN is called {dn:?}; `nodectl tree` shows all");
    }
    format!("no DN is called {dn:?}; did you mean {}?", near.join(" or "))
}

/// How far a name is from the one that was given; `None` if it is not similar.
fn distance_between(given: &str, name: &str) -> Option<usize> {
    let last = |dn: &str| dn.rsplit('.').next().unwrap_or_default().to_owned();
    let whole = distance(given, name);
    let tail = distance(&last(given), &last(name));
    let nearest = whole.min(tail);
    let allowed = last(given).chars().count().div_ceil(ONE_IN).max(1);
    (nearest <= allowed).then_some(nearest)
}

/// How many characters have to be added, removed or replaced (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
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
    fn near_names_are_suggested_and_far_ones_are_not() {
        let known =
            || ["root", "root.etcd", "root.containerd", "root.service.web"].map(String::from).into_iter();
        for (given, says) in [
            ("root.etdc", "did you mean root.etcd?"),
            ("etcd", "did you mean root.etcd?"),
            ("root.web", "did you mean root.service.web?"),
            ("containerd", "did you mean root.containerd?"),
            ("kubelet", "`nodectl tree` shows all"),
            ("", "`nodectl tree` shows all"),
        ] {
            let text = unknown(given, known());
            assert!(text.contains(says), "{given}: {text}");
        }
    }
}
