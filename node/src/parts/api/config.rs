//! `[api]` of the configuration.

use std::fmt::Display;
use std::net::SocketAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, de};

use crate::access::{PublicKey, Role};
use crate::config::ConfigViolation;

pub(crate) const NAME: &str = "api";
pub(crate) const DN: &str = "root.api";

/// The reason of those that wait for the node's cluster.
pub(crate) const NOT_IN_CLUSTER: &str = "the node is not in its cluster: see `nodectl cluster status`";
pub(crate) const ADDRESS_KEY: &str = "api.address";

/// Longest name of an operator.
const MAX_NAME_BYTES: usize = 64;

/// `[api]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApiConfig {
    pub(crate) address: SocketAddr,
    #[serde(default)]
    pub(crate) operators: Vec<OperatorConfig>,
    /// Admits the operators that the cluster has recorded, too. Who can write to its store can record one.
    #[serde(default)]
    pub(crate) cluster_operators: bool,
}

/// An entry of `api.operators`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OperatorConfig {
    pub(crate) name: String,
    #[serde(deserialize_with = "from_text")]
    pub(crate) key: PublicKey,
    #[serde(deserialize_with = "from_text")]
    pub(crate) role: Role,
}

fn from_text<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromStr<Err: Display>,
    D: Deserializer<'de>,
{
    String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
}

/// Returns whether this can be the name of an operator: it is in logs, events and command lines.
pub(crate) fn is_valid_operator_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._@-".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(is_allowed)
        && name.as_bytes()[0].is_ascii_alphanumeric()
}

impl ApiConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigViolation> {
        let refuse = |key: &str, message: String| Err(ConfigViolation::new(key, message));
        if self.address.port() == 0 {
            return refuse(
                ADDRESS_KEY,
                "must have a port: operators would not know one that the kernel chooses".into(),
            );
        }
        for (index, operator) in self.operators.iter().enumerate() {
            let name = &operator.name;
            if !is_valid_operator_name(name) {
                let message = format!(
                    "invalid name {name:?} of an operator; use 1 to 64 letters, digits, '.', '_', '@' and '-'"
                );
                return refuse("api.operators", message);
            }
            for other in &self.operators[..index] {
                if other.name == *name {
                    return refuse(
                        "api.operators",
                        format!("duplicate operator {name:?}; use another name for one"),
                    );
                }
                if other.key == operator.key {
                    let message =
                        format!("operators {:?} and {name:?} have the same key; remove one", other.name);
                    return refuse("api.operators", message);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_an_operator_is_a_word() {
        for name in ["a", "alice@example.com", "ci-2", "A.b_c", &"a".repeat(64)] {
            assert!(is_valid_operator_name(name), "{name}");
        }
        for name in ["", "-a", ".a", "a b", "a\n", "é", "a/b", "\u{1b}[2J", &"a".repeat(65)] {
            assert!(!is_valid_operator_name(name), "{name}");
        }
    }
}
