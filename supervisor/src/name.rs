//! Names of runnables, the parts of a DN.

use thiserror::Error;

/// The name of the root runnable; every DN starts with it.
pub(crate) const ROOT: &str = "root";

/// The maximum length of a runnable's name, in bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// The maximum length of a DN, in bytes: short enough for a log prefix, a socket name and a metric label.
pub const MAX_DN_BYTES: usize = 255;

/// The reason why a child or a sub-span can't have a name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NameError {
    /// The name is empty, too long, or contains a character other than `a-z`, `0-9`, `_` and `-`.
    #[error("invalid runnable name {name:?}: use 1 to 64 of a-z, 0-9, '_' and '-'")]
    Invalid {
        /// The name as it was given.
        name: String,
    },
    /// The DN of the name would exceed [`MAX_DN_BYTES`].
    #[error("the DN {parent}.{name} exceeds 255 bytes: shorten the name, or nest runnables less deeply")]
    DnTooLong {
        /// The name as it was given.
        name: String,
        /// The DN of the parent.
        parent: String,
    },
    /// A child or a sub-span of this incarnation already has the name.
    #[error("{parent} already has a child or sub-span {name:?}: use another name")]
    AlreadyInUse {
        /// The name as it was given.
        name: String,
        /// The DN of the parent.
        parent: String,
    },
    /// The context is stale: the run that it belongs to has ended.
    #[error("this context belongs to a run of its runnable that has ended: use the current run's context")]
    StaleContext,
}

/// The reason why a child can't depend on a runnable, or stop before it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DependencyError {
    /// The text is neither a name nor a DN: no runnable will ever have it.
    #[error(
        "invalid dependency {dependency:?} of {child}: use the name of a sibling, or a DN like \"root.a.b\""
    )]
    Invalid {
        /// The DN of the child.
        child: String,
        /// The dependency as it was given.
        dependency: String,
    },
    /// The child would wait for itself, or for a runnable that only it can start.
    #[error(
        "{child} depends on {dependency}, which can't be ready before it has started: remove the dependency"
    )]
    OnItself {
        /// The DN of the child.
        child: String,
        /// The DN of the dependency.
        dependency: String,
    },
}

fn is_name(text: &str) -> bool {
    let valid = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-';
    !text.is_empty() && text.len() <= MAX_NAME_BYTES && text.bytes().all(valid)
}

/// Returns whether a runnable can have this DN.
pub(crate) fn is_dn(text: &str) -> bool {
    let mut names = text.split('.');
    text.len() <= MAX_DN_BYTES && names.next() == Some(ROOT) && names.all(is_name)
}

/// The DN that code of the runnable `parent` means by a text: a DN, or the name of a child.
pub(crate) fn resolve_dn(parent: &str, text: &str) -> Option<String> {
    if is_dn(text) { Some(text.to_owned()) } else { child_dn(parent, text).ok() }
}

/// The DN of `name` below `parent`, if both are valid.
pub(crate) fn child_dn(parent: &str, name: &str) -> Result<String, NameError> {
    if !is_name(name) {
        return Err(NameError::Invalid { name: name.to_owned() });
    }
    if parent.len() + 1 + name.len() > MAX_DN_BYTES {
        return Err(NameError::DnTooLong { name: name.to_owned(), parent: parent.to_owned() });
    }
    Ok([parent, ".", name].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_invalid_character_makes_a_name_invalid() {
        for bad in ["", "UPPER", "with dots.x", "a/b", "a b", "é", "a.b", "a\n", &"a".repeat(65)] {
            assert_eq!(child_dn("root", bad), Err(NameError::Invalid { name: bad.to_owned() }), "{bad:?}");
        }
    }

    #[test]
    fn a_dn_has_a_maximum_length() {
        let parent = format!("root.{}", "a".repeat(240));
        assert!(matches!(child_dn(&parent, "0123456789"), Err(NameError::DnTooLong { .. })));
        assert_eq!(child_dn(&parent, "012345678").map(|dn| dn.len()), Ok(MAX_DN_BYTES));
    }

    #[test]
    fn a_text_is_a_dn_or_the_name_of_a_child() {
        let cases = [
            ("root", Some("root")),
            ("root.a.b-c", Some("root.a.b-c")),
            ("web", Some("root.parent.web")),
            ("rooted", Some("root.parent.rooted")),
            ("", None),
            ("root.", None),
            ("root..a", None),
            ("web.a", None),
            ("root.UPPER", None),
            ("a b", None),
        ];
        for (text, dn) in cases {
            assert_eq!(resolve_dn("root.parent", text).as_deref(), dn, "{text:?}");
        }
        assert!(!is_dn(&format!("root{}", ".a".repeat(130))));
    }

    proptest! {
        #[test]
        fn a_dn_splits_into_the_names_it_was_made_of(names in prop::collection::vec("[a-z0-9_-]{1,20}", 1..8)) {
            let dn = names.iter().try_fold(ROOT.to_owned(), |dn, name| child_dn(&dn, name)).expect("valid names");
            let parts: Vec<&str> = dn.split('.').skip(1).collect();
            prop_assert_eq!(parts, names);
        }
    }
}
