//! The rights of an operator.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// The rights of an operator. Each role may do what those before it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Sees states, logs and events; changes nothing.
    Reader,
    /// Acts on what the node runs: no act of it reveals a secret, or loses data.
    Operator,
    /// Everything that root may do by the control socket.
    Admin,
}

/// Another word than the name of a role.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown role {0:?}: use admin, operator or reader")]
pub struct InvalidRole(String);

impl Role {
    /// All of them, the one with the least rights first.
    pub const ALL: [Self; 3] = [Self::Reader, Self::Operator, Self::Admin];

    /// Its name in configurations, on command lines and in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reader => "reader",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = InvalidRole;

    fn from_str(text: &str) -> Result<Self, InvalidRole> {
        Self::ALL.into_iter().find(|role| role.as_str() == text).ok_or_else(|| InvalidRole(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_role_is_its_text() {
        for role in Role::ALL {
            assert_eq!(role.to_string().parse(), Ok(role));
        }
        for text in ["", "Admin", "root", "admin "] {
            assert_eq!(text.parse::<Role>(), Err(InvalidRole(text.to_owned())));
        }
        assert!(Role::Reader < Role::Operator && Role::Operator < Role::Admin);
    }
}
