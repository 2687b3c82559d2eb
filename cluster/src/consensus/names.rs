//! Names and URLs of members.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use thiserror::Error;

/// A text that is not a valid name or URL.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidName {
    /// A member's name has 1 to 63 characters of `a-z`, `0-9` and `-`, and a letter or digit at both ends: a
    /// DNS label.
    #[error(
        "invalid member name {name:?}: must be 1 to 63 of a-z, 0-9, dash, with a letter or digit at both ends"
    )]
    Member {
        /// The text given.
        name: String,
    },
    /// A module or namespace has 1 to 63 characters of `a-z`, `0-9`, `-` and `_`.
    #[error("invalid {what} {name:?}: must be 1 to 63 of a-z, 0-9, dash and underscore")]
    Namespace {
        /// `module` or `namespace`.
        what: &'static str,
        /// The text given.
        name: String,
    },
    /// A peer URL is `https://ADDRESS:PORT`, or `https://NAME:PORT`, and nothing more.
    #[error("invalid peer URL {url:?}: must be https://HOST:PORT")]
    PeerUrl {
        /// The text given.
        url: String,
    },
}

/// A member's name: a DNS label, since it is also the DNS name in the member's certificate.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberName(String);

impl MemberName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for MemberName {
    type Err = InvalidName;

    fn from_str(name: &str) -> Result<MemberName, InvalidName> {
        if is_dns_label(name) {
            Ok(MemberName(name.to_owned()))
        } else {
            Err(InvalidName::Member { name: name.to_owned() })
        }
    }
}

impl fmt::Display for MemberName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for MemberName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// The URL at which other members reach a member: `https://HOST:PORT`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerUrl(String);

impl PeerUrl {
    /// The URL of an address and a port.
    pub fn new(address: IpAddr, port: u16) -> PeerUrl {
        PeerUrl(format!("https://{}", SocketAddr::new(address, port)))
    }

    /// The URL as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The host: an address (IPv6 without brackets), or a name.
    pub fn host(&self) -> &str {
        let authority = self.0.trim_start_matches("https://");
        // The port follows the last colon: an IPv6 address has colons itself.
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }

    /// The port.
    pub fn port(&self) -> u16 {
        let port = self.0.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
        port.expect("a parsed URL ends with a port")
    }

    /// The command that revokes the ticket for this URL, or what a node has got there by one.
    pub fn revoke_command(&self) -> String {
        format!("nodectl cluster ticket revoke --address {} --port {}", self.host(), self.port())
    }
}

impl FromStr for PeerUrl {
    type Err = InvalidName;

    fn from_str(url: &str) -> Result<PeerUrl, InvalidName> {
        let is_authority = |authority: &str| {
            let Some((host, port)) = authority.rsplit_once(':') else { return false };
            let is_name = |host: &str| host.len() <= 253 && host.split('.').all(is_dns_label);
            // Rust parses a leading plus sign, which URLs do not have.
            let is_port = port.parse::<u16>().is_ok_and(|port| port > 0) && !port.starts_with('+');
            is_port && (authority.parse::<SocketAddr>().is_ok() || is_name(host))
        };
        if url.strip_prefix("https://").is_some_and(is_authority) {
            Ok(PeerUrl(url.to_owned()))
        } else {
            Err(InvalidName::PeerUrl { url: url.to_owned() })
        }
    }
}

impl fmt::Display for PeerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PeerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// *Source:* RFC 1123 section 2.1, in lower case.
fn is_dns_label(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len())
        && text.bytes().all(is_inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_name_is_a_dns_label() {
        for good in ["a", "nodekeel-00ff", &"x".repeat(63)] {
            assert_eq!(good.parse::<MemberName>().unwrap().as_str(), good);
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a/b", "a=b", "a,b", "ä", &"x".repeat(64)] {
            assert!(bad.parse::<MemberName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_peer_url_is_https_with_a_host_and_a_port_and_nothing_else() {
        for (good, host, port) in [
            ("https://192.0.2.7:7834", "192.0.2.7", 7834),
            ("https://[2001:db8::7]:7834", "2001:db8::7", 7834),
            ("https://node-1.example:1", "node-1.example", 1),
        ] {
            let url = good.parse::<PeerUrl>().unwrap();
            assert_eq!((url.host(), url.port()), (host, port));
        }
        for bad in [
            "",
            "https://",
            "https://a",
            "https://a:",
            "https://a:0",
            "https://a:+1",
            "https://a:65536",
            "http://a:1",
            "https://a:1/",
            "https://a:1,https://b:2",
            "https://u@a:1",
            "https://A:1",
            "https://::1:1",
        ] {
            assert!(bad.parse::<PeerUrl>().is_err(), "{bad:?}");
        }
        let url = PeerUrl::new("2001:db8::7".parse().unwrap(), 7834);
        assert!(url.revoke_command().ends_with(" --address 2001:db8::7 --port 7834"));
        assert_eq!(url, url.as_str().parse().unwrap());
    }
}
