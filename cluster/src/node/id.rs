//! What a node is called.

use std::fmt;
use std::str::FromStr;

use nodekeel_localstorage::pki::PublicKey;
use thiserror::Error;

/// A node's name: a prefix, and half of its Ed25519 public key as 32 hexadecimal digits. Nobody else has the name, since
/// nobody else has the key.
///
/// It is a DNS label, so it is also the node's hostname, and its name as a member.
///
/// *Source:* Monogon's nodes of 2020, whose prefix was `smalltown-`; `metropolis-` later.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(String);

/// The prefix of nodes' names, unless one is configured: that of the certificates that localstorage makes.
pub const DEFAULT_PREFIX: &str = "nodekeel-";

/// How many hexadecimal digits of the key are in the name.
const DIGITS: usize = 32;

/// Longest DNS label. *Source:* RFC 1035 section 2.3.4.
const LABEL_MAX: usize = 63;

/// What is no node's name, or no prefix of one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{name:?} is no node's name: a prefix of a-z, 0-9 and dash that begins with a letter, at most 31 bytes, and 32 hexadecimal digits"
)]
pub struct InvalidNodeId {
    /// The text given.
    name: String,
}

impl NodeId {
    /// The name of whoever has this key.
    ///
    /// # Errors
    /// [`InvalidNodeId`], where the prefix makes it none.
    pub fn new(prefix: &str, key: &PublicKey) -> Result<Self, InvalidNodeId> {
        format!("{prefix}{}", key.short_id()).parse()
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The digits alone, 32 of them: the form of a machine id.
    pub fn bare(&self) -> &str {
        &self.0[self.0.len() - DIGITS..]
    }

    /// Whether the name is that of whoever has this key, whatever the prefix.
    pub fn is_of(&self, key: &PublicKey) -> bool {
        self.bare() == key.short_id()
    }
}

impl FromStr for NodeId {
    type Err = InvalidNodeId;

    fn from_str(name: &str) -> Result<Self, InvalidNodeId> {
        let invalid = || InvalidNodeId { name: name.to_owned() };
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
        let key = PrivateKey::generate().expect("random numbers").public();
        let other = PrivateKey::generate().expect("random numbers").public();
        for prefix in [DEFAULT_PREFIX, "smalltown-", "metropolis-", "n"] {
            let id = NodeId::new(prefix, &key).expect("a name");
            assert_eq!(id.as_str(), format!("{prefix}{}", id.bare()));
            assert_eq!(
                id.bare(),
                key.as_bytes()[..16].iter().map(|b| format!("{b:02x}")).collect::<String>()
            );
            assert!(id.is_of(&key) && !id.is_of(&other));
            assert_eq!(id.to_string().parse(), Ok(id));
        }
    }

    #[test]
    fn what_is_no_host_is_no_node() {
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
