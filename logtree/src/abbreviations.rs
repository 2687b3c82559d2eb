//! Abbreviations of names for consoles.

use std::collections::BTreeMap;

use unicode_width::UnicodeWidthStr;

use crate::Dn;

/// Abbreviations for the parts of names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameAbbreviations(BTreeMap<String, String>);

/// The abbreviations for names that every node has.
const BUILT_IN_ABBREVIATIONS: [(&str, &str); 8] = [
    ("cluster-membership", "cluster"),
    ("controller-manager", "controllers"),
    ("controlplane", "cplane"),
    ("interfaces", "ifaces"),
    ("kubernetes", "k8s"),
    ("map-cluster-membership", "map-membership"),
    ("network", "net"),
    ("networking", "net"),
];

impl NameAbbreviations {
    /// No abbreviations, not even the built-in ones.
    pub fn empty() -> NameAbbreviations {
        NameAbbreviations(BTreeMap::new())
    }

    /// Adds or replaces an abbreviation.
    pub fn with_abbreviation(
        mut self,
        word: impl Into<String>,
        short: impl Into<String>,
    ) -> NameAbbreviations {
        self.0.insert(word.into(), short.into());
        self
    }
}

impl Default for NameAbbreviations {
    /// The built-in abbreviations, for names that every node has.
    fn default() -> NameAbbreviations {
        BUILT_IN_ABBREVIATIONS
            .into_iter()
            .fold(NameAbbreviations::empty(), |words, (word, short)| words.with_abbreviation(word, short))
    }
}

impl Dn {
    /// The name in at most `max` columns, its parts abbreviated and joined by spaces. A leading `root` is
    /// omitted; of `role.X` and names below it, only `X` and the last part remain. If that is still too long,
    /// `...` replaces its start. The root itself is empty.
    pub fn shorten_to_width(&self, words: &NameAbbreviations, max: usize) -> String {
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
        // Measures whole texts: the widths of their characters may add up to less.
        let tail =
            text.char_indices().map(|(at, _)| &text[at..]).find(|tail| tail.width() <= max - dots.len());
        format!("{dots}{}", tail.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shorten_name(dn: &str, max: usize) -> String {
        dn.parse::<Dn>().unwrap().shorten_to_width(&NameAbbreviations::default(), max)
    }

    /// Reference case 12, with our names.
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
            assert_eq!(shorten_name(dn, 20), short);
        }
    }

    #[test]
    fn names_fit_any_width() {
        for max in 0..40 {
            assert!(
                shorten_name("some.very.long.name.with.ünïcode.and.漢字.☁\u{fe0f}.in.it", max).width() <= max
            );
        }
    }
}
