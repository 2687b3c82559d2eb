//! Addresses where the runnables of a plan listen: one address belongs to one key of the configuration.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Maximum length of a unix socket's path: `sun_path` without its terminating NUL (unix(7)).
pub(crate) const MAX_SOCKET_PATH_BYTES: usize = 107;

/// An address of this machine on which one program can listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    /// A TCP port.
    Tcp(IpAddr, u16),
    /// A socket file.
    Unix(PathBuf),
}

impl ListenAddress {
    /// Returns whether only one of two programs could listen.
    pub(crate) fn conflicts_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Tcp(one, port), Self::Tcp(other, other_port)) => {
                // The order of the two addresses does not matter, while `covers` has a direction.
                port == other_port && (covers(*one, *other) || covers(*other, *one))
            }
            _ => self == other,
        }
    }
}

/// Returns whether a socket bound to `one` receives connections to `other`.
///
/// *Source:* ip(7), ipv6(7): a socket at `::` takes IPv4 connections too, unless `IPV6_V6ONLY` is set.
fn covers(one: IpAddr, other: IpAddr) -> bool {
    one == other || one.is_unspecified() && (one.is_ipv6() || other.is_ipv4())
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(_, port) => write!(f, "port {port}"),
            Self::Unix(path) => write!(f, "socket {}", path.display()),
        }
    }
}

/// The problem of a path that is too long for a unix socket.
pub(crate) fn check_socket_path(socket: &Path, hint: &str) -> Option<String> {
    let bytes = socket.as_os_str().len();
    (bytes > MAX_SOCKET_PATH_BYTES).then(|| {
        let path = socket.display();
        format!(
            "socket path {path} has {bytes} bytes, but the limit of a unix socket is {MAX_SOCKET_PATH_BYTES}; {hint}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(address: &str) -> ListenAddress {
        let address: std::net::SocketAddr = address.parse().expect("an address");
        ListenAddress::Tcp(address.ip(), address.port())
    }

    #[test]
    fn two_addresses_conflict_if_one_takes_the_connections_of_the_other() {
        for (one, other, conflict) in [
            ("127.0.0.1:1", "127.0.0.1:1", true),
            ("127.0.0.1:1", "127.0.0.1:2", false),
            ("127.0.0.1:1", "127.0.0.2:1", false),
            ("0.0.0.0:1", "127.0.0.2:1", true),
            ("[::]:1", "127.0.0.2:1", true),
            ("[::]:1", "[::1]:1", true),
            ("0.0.0.0:1", "[::1]:1", false),
            ("0.0.0.0:1", "[::]:1", true),
        ] {
            let (one, other) = (tcp(one), tcp(other));
            assert_eq!(one.conflicts_with(&other), conflict, "{one:?}, {other:?}");
            assert_eq!(other.conflicts_with(&one), conflict, "{other:?}, {one:?}");
        }
        let unix = |path: &str| ListenAddress::Unix(path.into());
        assert!(unix("/run/a").conflicts_with(&unix("/run/a")));
        assert!(
            !unix("/run/a").conflicts_with(&unix("/run/b")) && !unix("/run/a").conflicts_with(&tcp("[::]:1"))
        );
    }
}
