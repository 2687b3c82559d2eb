//! The names that a provisioner goes by: its driver's and its node's.

use std::fmt;
use std::str::FromStr;

/// Longest name of a driver, in bytes. *Source:* CSI specification, `GetPluginInfoResponse.name`.
pub const MAX_DRIVER_NAME_BYTES: usize = 63;

/// Longest name of a node, in bytes. *Source:* Kubernetes object names (DNS subdomain).
pub const MAX_NODE_NAME_BYTES: usize = 253;

/// Why a text is no name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// The driver name is no domain-style name of at most [`MAX_DRIVER_NAME_BYTES`].
    #[error(
        "invalid driver name {name:?}: use a lower-case domain of at most 63 bytes, such as volumes.example.org"
    )]
    Driver {
        /// The name as it was given.
        name: String,
    },
    /// The node name is not one that a Kubernetes node can have.
    #[error("invalid node name {name:?}: use the lower-case name under which the node registers")]
    Node {
        /// The name as it was given.
        name: String,
    },
}

/// The one name by which claims, volumes, classes and the kubelet know this driver.
///
/// Domain-style: labels of `a-z`, `0-9` and `-`, joined by dots, each beginning and ending with a letter or a digit;
/// at most 63 bytes. Everything that has to agree on it (annotations, the CSI source, `CSIDriver`, the socket's name)
/// is made from one value of this type.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverName(String);

impl DriverName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`NameError::Driver`]: it isn't domain-style, or too long.
    pub fn try_new(name: impl Into<String>) -> Result<Self, NameError> {
        let name = name.into();
        match is_domain(&name, MAX_DRIVER_NAME_BYTES) {
            true => Ok(Self(name)),
            false => Err(NameError::Driver { name }),
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The name of the node, as the API server knows it; it is also what volumes are bound to.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeName(String);

impl NodeName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`NameError::Node`]: no node can be called so.
    pub fn try_new(name: impl Into<String>) -> Result<Self, NameError> {
        let name = name.into();
        match is_domain(&name, MAX_NODE_NAME_BYTES) {
            true => Ok(Self(name)),
            false => Err(NameError::Node { name }),
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether a text is a lower-case DNS subdomain of at most `max` bytes.
fn is_domain(name: &str, max: usize) -> bool {
    name.len() <= max && name.split('.').all(is_label)
}

fn is_label(label: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !label.is_empty() && label.bytes().all(inner) && !label.starts_with('-') && !label.ends_with('-')
}

macro_rules! text {
    ($name:ident) => {
        impl FromStr for $name {
            type Err = NameError;

            fn from_str(name: &str) -> Result<Self, NameError> {
                Self::try_new(name)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

text!(DriverName);
text!(NodeName);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_driver_name_is_a_short_domain() {
        for good in ["volumes.example.org", "dev.monogon.metropolis.vfs", "a", "9-9.x", &"a".repeat(63)] {
            assert_eq!(DriverName::try_new(good).map(|name| name.to_string()), Ok(good.to_owned()));
        }
        for bad in [
            "",
            ".",
            "a.",
            ".a",
            "a..b",
            "-a",
            "a-",
            "A.b",
            "a_b",
            "a/b",
            "a b",
            "é",
            "../x",
            &"a".repeat(64),
        ] {
            assert_eq!(DriverName::try_new(bad), Err(NameError::Driver { name: bad.to_owned() }), "{bad:?}");
        }
    }

    #[test]
    fn a_node_name_may_be_longer() {
        assert!(NodeName::try_new(format!("{}.{}", "a".repeat(126), "b".repeat(126))).is_ok());
        assert!(NodeName::try_new("a".repeat(254)).is_err());
        assert!(NodeName::try_new("Node").is_err());
    }

    proptest! {
        #[test]
        fn a_name_is_taken_as_it_is_or_not_at_all(text in ".{0,80}") {
            if let Ok(name) = DriverName::try_new(text.as_str()) {
                prop_assert_eq!(name.as_str(), text);
            }
        }
    }
}
