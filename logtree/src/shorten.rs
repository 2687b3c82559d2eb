//! Names short enough for a console.

use std::collections::BTreeMap;

use unicode_width::UnicodeWidthStr;

use crate::Dn;

/// Shorter words for the parts of names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dictionary(BTreeMap<String, String>);

/// The words every node has.
const BUILT_IN: [(&str, &str); 8] = [
    ("cluster-membership", "cluster"),
    ("controller-manager", "controllers"),
    ("controlplane", "cplane"),
    ("interfaces", "ifaces"),
    ("kubernetes", "k8s"),
    ("map-cluster-membership", "map-membership"),
    ("network", "net"),
    ("networking", "net"),
];

impl Dictionary {
    /// No words.
    pub fn empty() -> Dictionary {
        Dictionary(BTreeMap::new())
    }

    /// Adds a word, or replaces it.
    pub fn with(mut self, word: impl Into<String>, short: impl Into<String>) -> Dictionary {
        self.0.insert(word.into(), short.into());
        self
    }
}

impl Default for Dictionary {
    /// The words every node has.
    fn default() -> Dictionary {
        BUILT_IN.into_iter().fold(Dictionary::empty(), |words, (word, short)| words.with(word, short))
    }
}

impl Dn {
    /// The name in at most `max` columns, its parts joined by spaces: shorter words from the dictionary, without a leading
    /// `root`, of `role.X` and what is in it only `X` and the last part. What is still too long loses its beginning
    /// to `...`. The root itself is empty.
    pub fn shorten(&self, words: &Dictionary, max: usize) -> String {
        let parts: Vec<&str> =
            self.parts().map(|part| words.0.get(part).map_or(part, |short| short.as_str())).collect();
        let parts = match parts.as_slice() {
            ["root", rest @ ..] if !rest.is_empty() => rest,
            all => all,
        };
        let text = match parts {
            ["role", role] => (*role).to_owned(),
            ["role", role, .., last] => format!("{role} {last}"),
            all => all.join(" "),
        };
        if text.width() <= max {
            return text;
        }
        let dots = &"..."[..max.min(3)];
        // Widths are of texts: those of characters one by one may add up to less.
        let tail =
            text.char_indices().map(|(at, _)| &text[at..]).find(|tail| tail.width() <= max - dots.len());
        format!("{dots}{}", tail.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shorten(dn: &str, max: usize) -> String {
        dn.parse::<Dn>().unwrap().shorten(&Dictionary::default(), max)
    }

    /// Reference case 12, with names of our own.
    #[test]
    fn names_fit_twenty_columns() {
        for (dn, short) in [
            ("root.role.controlplane.launcher.consensus.watcher", "cplane watcher"),
            ("networking.interfaces", "net ifaces"),
            ("clock", "clock"),
            ("root.dns-server", "dns-server"),
            ("root.role.kubernetes.run.kubernetes.scheduler", "k8s scheduler"),
            ("a.quite.long.name.that.stays.too.long.anyway", "...s too long anyway"),
            ("network.interfaces.static", "net ifaces static"),
            ("root.role.controlplane", "cplane"),
            ("root", "root"),
            ("", ""),
        ] {
            assert_eq!(shorten(dn, 20), short);
        }
    }

    #[test]
    fn no_limit_is_too_small() {
        for max in 0..40 {
            assert!(shorten("some.very.long.name.with.ünïcode.and.漢字.☁\u{fe0f}.in.it", max).width() <= max);
        }
    }
}
