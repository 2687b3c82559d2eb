//! The dotted names under which entries are stored.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::text::is_unprintable;

/// A parsed name: parts joined by dots, `node.cluster.etcd`; the root is the empty name.
///
/// Invariant: no part is empty, every character is printable, and the whole is at most [`Dn::MAX_BYTES`]
/// long. Cloning copies a pointer. Names are ordered by their parts, so a name comes just before all names
/// within it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Dn(Arc<str>);

/// The reason why a text is not a [`Dn`]; each is an error in the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DnError {
    /// A part between two dots, or at an end, is empty: remove the dot or fill the part.
    #[error("invalid DN {dn:?}: it has an empty part between dots")]
    EmptyPart {
        /// The rejected text.
        dn: String,
    },
    /// The name is longer than [`Dn::MAX_BYTES`]: names are kept as long as the store, so their length is
    /// limited.
    #[error("DN of {bytes} bytes is too long: at most {} bytes are allowed", Dn::MAX_BYTES)]
    TooLong {
        /// Length of the text.
        bytes: usize,
    },
    /// The name contains a character that controls the terminal instead of being printed: remove it.
    #[error("invalid DN {dn:?}: it contains an unprintable character")]
    Unprintable {
        /// The rejected text.
        dn: String,
    },
    /// [`Dn::child`] takes one part, and this one contains a dot: parse the whole name instead.
    #[error("invalid part {name:?} of a DN: it contains a dot")]
    DotInName {
        /// The rejected part.
        name: String,
    },
}

impl Dn {
    /// Maximum length of a name, in bytes.
    pub const MAX_BYTES: usize = 512;

    /// The root: the empty name, which contains all names.
    pub fn root() -> Dn {
        Dn(Arc::from(""))
    }

    /// The name as text, empty for the root.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns whether this is the root.
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// The parts, outermost first; none for the root.
    pub fn parts(&self) -> impl DoubleEndedIterator<Item = &str> {
        // Splitting the empty text would yield one empty part.
        self.0.split('.').filter(|part| !part.is_empty())
    }

    /// The name one part below this one.
    ///
    /// # Errors
    /// All of [`DnError`]; a retry does not help.
    pub fn child(&self, name: &str) -> Result<Dn, DnError> {
        if name.contains('.') {
            return Err(DnError::DotInName { name: name.to_owned() });
        }
        if self.is_root() {
            return match name {
                "" => Err(DnError::EmptyPart { dn: String::new() }),
                name => name.parse(),
            };
        }
        format!("{self}.{name}").parse()
    }

    /// The name one part above this one; `None` for the root.
    pub fn parent(&self) -> Option<Dn> {
        match self.0.rsplit_once('.') {
            Some((parent, _)) => Some(Dn(Arc::from(parent))),
            None if self.is_root() => None,
            None => Some(Dn::root()),
        }
    }

    /// Returns whether this is `ancestor` or is below it, part by part: `a.bc` is not within `a.b`.
    pub fn is_within(&self, ancestor: &Dn) -> bool {
        match self.0.strip_prefix(ancestor.as_str()) {
            Some(rest) => ancestor.is_root() || rest.is_empty() || rest.starts_with('.'),
            None => false,
        }
    }
}

impl Default for Dn {
    fn default() -> Dn {
        Dn::root()
    }
}

impl fmt::Display for Dn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl FromStr for Dn {
    type Err = DnError;

    fn from_str(text: &str) -> Result<Dn, DnError> {
        if text.len() > Dn::MAX_BYTES {
            return Err(DnError::TooLong { bytes: text.len() });
        }
        // The empty text is the root, which has no parts.
        if !text.is_empty() && text.split('.').any(str::is_empty) {
            return Err(DnError::EmptyPart { dn: text.to_owned() });
        }
        if text.contains(is_unprintable) {
            return Err(DnError::Unprintable { dn: text.to_owned() });
        }
        Ok(Dn(Arc::from(text)))
    }
}

impl TryFrom<&str> for Dn {
    type Error = DnError;

    fn try_from(text: &str) -> Result<Dn, DnError> {
        text.parse()
    }
}

impl Ord for Dn {
    fn cmp(&self, other: &Dn) -> Ordering {
        // Part by part: as text, `a-b` would come between `a` and `a.b`. The end of a part comes before all that may follow
        // in it, and no name has a zero byte. Without splitting, because each new name is compared with some fifty others.
        let (mine, others) = (self.0.as_bytes(), other.0.as_bytes());
        let order = |byte: u8| if byte == b'.' { 0 } else { byte };
        match mine.iter().zip(others).position(|(mine, other)| mine != other) {
            Some(at) => order(mine[at]).cmp(&order(others[at])),
            None => mine.len().cmp(&others.len()),
        }
    }
}

impl PartialOrd for Dn {
    fn partial_cmp(&self, other: &Dn) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dn(text: &str) -> Dn {
        text.parse().unwrap()
    }

    #[test]
    fn empty_parts_are_rejected_at_any_position() {
        for text in ["a..b", ".a", "a.", "."] {
            assert_eq!(text.parse::<Dn>(), Err(DnError::EmptyPart { dn: text.to_owned() }));
        }
    }

    #[test]
    fn root_is_the_empty_name_with_no_parts_and_no_parent() {
        assert_eq!(dn(""), Dn::root());
        assert_eq!(Dn::root().to_string(), "");
        assert_eq!(Dn::root().parts().count(), 0);
        assert_eq!(Dn::root().parent(), None);
        assert_eq!(dn("a").parent(), Some(Dn::root()));
    }

    #[test]
    fn within_compares_parts_not_text() {
        assert!(dn("foo.bar").is_within(&dn("foo.bar")));
        assert!(dn("foo.bar.baz").is_within(&dn("foo.bar")));
        assert!(!dn("foo").is_within(&dn("foo.bar")));
        assert!(!dn("foo.barr").is_within(&dn("foo.bar")));
        assert!(dn("foo").is_within(&Dn::root()));
    }

    #[test]
    fn a_name_orders_just_before_what_is_within_it() {
        let mut names = vec![dn("a-b"), dn("a.b"), dn("a"), dn("b"), dn("a.b.c"), dn("")];
        names.sort();
        assert_eq!(names, [dn(""), dn("a"), dn("a.b"), dn("a.b.c"), dn("a-b"), dn("b")]);
    }

    #[test]
    fn names_order_as_their_parts_do() {
        let texts = ["", "a", "a.b", "a b", "a.b.c", "a-b", "a-b.c", "ab", "a.ü", "aü", "ü.a", "b", "a.bc"];
        for (one, other) in texts.iter().flat_map(|one| texts.map(|other| (dn(one), dn(other)))) {
            assert_eq!(one.cmp(&other), one.parts().cmp(other.parts()), "{one} and {other}");
        }
    }

    #[test]
    fn child_takes_exactly_one_part() {
        assert_eq!(Dn::root().child("a").unwrap(), dn("a"));
        assert_eq!(dn("a").child("b").unwrap(), dn("a.b"));
        assert!(matches!(dn("a").child("b.c"), Err(DnError::DotInName { .. })));
        assert!(matches!(dn("a").child(""), Err(DnError::EmptyPart { .. })));
        assert!(matches!(Dn::root().child(""), Err(DnError::EmptyPart { .. })));
    }

    #[test]
    fn overlong_and_unprintable_names_are_rejected() {
        assert!(matches!("a\u{1b}[m".parse::<Dn>(), Err(DnError::Unprintable { .. })));
        assert_eq!("x".repeat(513).parse::<Dn>(), Err(DnError::TooLong { bytes: 513 }));
    }
}
