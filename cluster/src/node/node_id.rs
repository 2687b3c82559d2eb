//! Nodes' names.

use std::fmt;
use std::str::FromStr;

use nodekeel_localstorage::pki::PublicKey;
use thiserror::Error;

/// A node's name: a prefix, and half of its Ed25519 public key as 32 hexadecimal digits. The name is unique,
/// since the key is.
///
/// The name is a DNS label, so it is also the node's hostname, and its name as a member.
///
/// *Source:* Monogon's nodes of 2020, whose prefix was `smalltown-`; `metropolis-` later.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(String);

/// The default prefix of nodes' names: that of the certificates that localstorage creates.
pub const DEFAULT_NODE_PREFIX: &str = "nodekeel-";

/// The number of hexadecimal digits of the key in the name.
const DIGITS: usize = 32;

/// Longest DNS label. *Source:* RFC 1035 section 2.3.4.
const LABEL_MAX: usize = 63;

/// A text that is not a node's name, or has an invalid prefix.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "invalid node name {name:?}: must be a prefix of a-z, 0-9 and dash that starts with a letter, at most 31 \
     bytes, and 32 hexadecimal digits"
)]
pub struct InvalidNodeId {
    /// The text given.
    name: String,
}

impl NodeId {
    /// The name of the node with this key.
    ///
    /// # Errors
    /// [`InvalidNodeId`] if the prefix is invalid.
    pub fn from_key(prefix: &str, key: &PublicKey) -> Result<Self, InvalidNodeId> {
        format!("{prefix}{}", key.short_id()).parse()
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The 32 digits without the prefix: the format of a machine id.
    pub fn hex_digits(&self) -> &str {
        &self.0[self.0.len() - DIGITS..]
    }

    /// Returns whether the name belongs to this key, with any prefix.
    pub fn matches_key(&self, key: &PublicKey) -> bool {
        self.hex_digits() == key.short_id()
    }
}

impl FromStr for NodeId {
    type Err = InvalidNodeId;

    fn from_str(name: &str) -> Result<Self, InvalidNodeId> {
        let invalid = || InvalidNodeId { name: name.to_owned() };
        // The text may come from a file: a position within a character must not panic.
        let split = name.len().checked_sub(DIGITS).and_then(|at| name.split_at_checked(at));
        let (prefix, digits) = split.ok_or_else(invalid)?;
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let is_good = name.len() <= LABEL_MAX
            && prefix.starts_with(|first: char| first.is_ascii_lowercase())
            && prefix.bytes().all(is_inner)
            && digits.bytes().all(is_digit);
        if is_good { Ok(Self(name.to_owned())) } else { Err(invalid()) }
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_localstorage::pki::PrivateKey;

    use super::*;

    #[test]
    fn a_node_is_named_by_its_key() {
        let key = PrivateKey::generate().expect("random numbers").public_key();
        let other = PrivateKey::generate().expect("random numbers").public_key();
        for prefix in [DEFAULT_NODE_PREFIX, "smalltown-", "metropolis-", "n"] {
            let id = NodeId::from_key(prefix, &key).expect("a valid name");
            assert_eq!(id.as_str(), format!("{prefix}{}", id.hex_digits()));
            assert_eq!(
                id.hex_digits(),
                key.as_bytes()[..16].iter().map(|b| format!("{b:02x}")).collect::<String>()
            );
            assert!(id.matches_key(&key) && !id.matches_key(&other));
            assert_eq!(id.to_string().parse(), Ok(id));
        }
    }

    #[test]
    fn a_name_that_is_not_a_dns_label_is_not_a_node_id() {
        let hex = "0".repeat(32);
        assert!(format!("{}{hex}", "p".repeat(31)).parse::<NodeId>().is_ok());
        let bad = [
            String::new(),
            hex.clone(),
            format!("-{hex}"),
            format!("1-{hex}"),
            format!("A-{hex}"),
            format!("a/{hex}"),
            format!("a.{hex}"),
            format!("ä-{hex}"),
            format!("n-{}", "g".repeat(32)),
            format!("n-{}", "A".repeat(32)),
            format!("n-{}ä{}", "0".repeat(15), "0".repeat(15)),
            format!("{}{hex}", "p".repeat(32)),
            format!("n-{hex}\n"),
        ];
        for name in bad {
            assert!(name.parse::<NodeId>().is_err(), "{name:?}");
        }
    }
}
