//! Names of the driver, of the node, and of its stores.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error as _};

/// Maximum length of a driver name in bytes. *Source:* CSI specification, `GetPluginInfoResponse.name`.
pub const MAX_DRIVER_NAME_BYTES: usize = 63;

/// Maximum length of a node name in bytes. A longer one is not a label's value, so no node affinity could
/// name the node. *Source:* Kubernetes, "Labels and Selectors".
pub const MAX_NODE_NAME_BYTES: usize = 63;

/// Maximum length of the name of a store in bytes.
pub const MAX_STORE_NAME_BYTES: usize = 63;

/// A text is not a valid name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidObjectName {
    /// The driver name is not a domain name of at most [`MAX_DRIVER_NAME_BYTES`].
    #[error(
        "invalid driver name {name:?}: use a lower-case domain of at most 63 bytes, such as volumes.example.org"
    )]
    Driver {
        /// The given name.
        name: String,
    },
    /// The node name is not a valid Kubernetes node name of at most [`MAX_NODE_NAME_BYTES`].
    #[error(
        "invalid node name {name:?}: use the lower-case name under which the node registers, of at most 63 bytes"
    )]
    Node {
        /// The given name.
        name: String,
    },
    /// The store's name is not a label of at most [`MAX_STORE_NAME_BYTES`].
    #[error("invalid store name {name:?}: use lower-case letters, digits and `-`, at most 63, such as fast")]
    Store {
        /// The given name.
        name: String,
    },
}

/// The driver's name, as claims, volumes, classes and the kubelet use it.
///
/// A domain name: labels of `a-z`, `0-9` and `-`, joined by dots, each starting and ending with a letter or a
/// digit; at most 63 bytes. Everything that must agree on it (annotations, the CSI source, `CSIDriver`, the
/// socket's name) is derived from one value of this type.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverName(String);

impl DriverName {
    /// Validates a name.
    ///
    /// # Errors
    /// [`InvalidObjectName::Driver`]: not a domain name, or too long.
    pub fn try_new(name: impl Into<String>) -> Result<Self, InvalidObjectName> {
        let name = name.into();
        if is_domain(&name, MAX_DRIVER_NAME_BYTES) {
            Ok(Self(name))
        } else {
            Err(InvalidObjectName::Driver { name })
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The label that a node has if its kubelet knows the driver, with the node's name as its value; the node
    /// affinity of volumes refers to it. Only this driver sets it, so it cannot differ from the node's name.
    pub fn topology_key(&self) -> String {
        format!("topology.{}/node", self.0)
    }

    /// The annotation of a PersistentVolume with the path of the directory that was imported into it.
    pub fn import_annotation(&self) -> String {
        format!("{}/imported-from", self.0)
    }

    /// The annotation of a PersistentVolume with the UID of the claim that it is bound to, if that is not the
    /// one that it was created for.
    pub fn claim_annotation(&self) -> String {
        format!("{}/claim-uid", self.0)
    }

    /// The annotation of a PersistentVolume whose disk was declared lost for good, with the id of its store: the volume
    /// may be deleted although it is in no store that is served.
    pub fn lost_annotation(&self) -> String {
        format!("{}/lost-store", self.0)
    }

    /// The annotation of a PersistentVolume that a move to another node has retained or created: the UID of its record.
    pub fn move_annotation(&self) -> String {
        format!("{}/move", self.0)
    }

    /// The annotation of a PersistentVolume while the last event about its condition reports that no pod can use it.
    /// The process that finds it well again need not be the one that reported it, and the API server deletes events
    /// after an hour.
    pub fn condition_annotation(&self) -> String {
        format!("{}/condition", self.0)
    }
}

/// The node's name in the API; the node affinity of volumes refers to it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeName(String);

impl NodeName {
    /// Validates a name.
    ///
    /// # Errors
    /// [`InvalidObjectName::Node`]: not a valid node name.
    pub fn try_new(name: impl Into<String>) -> Result<Self, InvalidObjectName> {
        let name = name.into();
        if is_domain(&name, MAX_NODE_NAME_BYTES) {
            Ok(Self(name))
        } else {
            Err(InvalidObjectName::Node { name })
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The name of one of several stores of a node: a class names the store of its volumes, and each node has its own one of
/// this name. Letters, digits and `-`, at most [`MAX_STORE_NAME_BYTES`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreName(String);

impl StoreName {
    /// Validates a name.
    ///
    /// # Errors
    /// [`InvalidObjectName::Store`]: not a label, or too long.
    pub fn try_new(name: impl Into<String>) -> Result<Self, InvalidObjectName> {
        let name = name.into();
        if name.len() <= MAX_STORE_NAME_BYTES && is_label(&name) {
            Ok(Self(name))
        } else {
            Err(InvalidObjectName::Store { name })
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns whether a text is a lower-case DNS subdomain of at most `max` bytes.
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
            type Err = InvalidObjectName;

            fn from_str(name: &str) -> Result<Self, InvalidObjectName> {
                Self::try_new(name)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Self::try_new(String::deserialize(deserializer)?).map_err(D::Error::custom)
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
text!(StoreName);

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
            assert_eq!(
                DriverName::try_new(bad),
                Err(InvalidObjectName::Driver { name: bad.to_owned() }),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn a_node_name_is_the_value_of_a_label() {
        assert!(NodeName::try_new(format!("{}.{}", "a".repeat(31), "b".repeat(31))).is_ok());
        assert!(NodeName::try_new("a".repeat(64)).is_err());
        assert!(NodeName::try_new("Node").is_err());
    }

    #[test]
    fn the_name_of_a_store_is_a_label_and_no_path() {
        for good in ["fast", "nvme-0", "9", &"a".repeat(63)] {
            assert_eq!(StoreName::try_new(good).map(|name| name.to_string()), Ok(good.to_owned()));
        }
        for bad in ["", "a.b", "-a", "a-", "A", "..", "a/b", &"a".repeat(64)] {
            assert!(matches!(StoreName::try_new(bad), Err(InvalidObjectName::Store { .. })), "{bad:?}");
        }
    }

    #[test]
    fn the_topology_key_is_derived_from_the_drivers_name_and_is_the_key_of_a_label() {
        let driver = DriverName::try_new("volumes.nodekeel").expect("a driver name");
        assert_eq!(driver.topology_key(), "topology.volumes.nodekeel/node");
        let longest = DriverName::try_new("a".repeat(63)).expect("a driver name");
        let key = longest.topology_key();
        let (prefix, name) = key.split_once('/').expect("a prefix");
        assert!(is_domain(prefix, 253) && name == "node", "{prefix}");
    }

    proptest! {
        #[test]
        fn a_valid_driver_name_is_not_changed(text in ".{0,80}") {
            if let Ok(name) = DriverName::try_new(text.as_str()) {
                prop_assert_eq!(name.as_str(), text);
            }
        }
    }
}
