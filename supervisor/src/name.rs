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

/// The DN of `name` below `parent`, if both are valid.
pub(crate) fn child_dn(parent: &str, name: &str) -> Result<String, NameError> {
    let valid = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-';
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(valid) {
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

    proptest! {
        #[test]
        fn a_dn_splits_into_the_names_it_was_made_of(names in prop::collection::vec("[a-z0-9_-]{1,20}", 1..8)) {
            let dn = names.iter().try_fold(ROOT.to_owned(), |dn, name| child_dn(&dn, name)).expect("valid names");
            let parts: Vec<&str> = dn.split('.').skip(1).collect();
            prop_assert_eq!(parts, names);
        }
    }
}
