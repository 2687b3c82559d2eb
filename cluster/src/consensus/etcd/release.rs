//! What differs between releases of etcd.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// The variables of a flag that has one name until 3.5, and the other from 3.6 on: with it, a connecting member
/// needs no certificate for its address.
const SKIP_SAN_VARIABLES: [&str; 2] =
    ["ETCD_EXPERIMENTAL_PEER_SKIP_CLIENT_SAN_VERIFICATION", "ETCD_PEER_SKIP_CLIENT_SAN_VERIFICATION"];

/// How long a program may take to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// The variables to set for this program, so that it knows each of them: etcd warns about an unknown variable. All
/// of them if its version is unknown.
pub(super) async fn skip_san_variables(binary: &Path) -> &'static [&'static str] {
    let mut command = Command::new(binary);
    command.arg("--version").env_clear().stdin(Stdio::null()).stderr(Stdio::null());
    let printed = timeout(VERSION_TIMEOUT, spawn_blocking(move || command.output())).await;
    let printed = printed.ok().and_then(Result::ok).and_then(Result::ok).map(|output| output.stdout);
    variables_of(printed.as_deref().and_then(parse_version))
}

fn variables_of(version: Option<(u32, u32)>) -> &'static [&'static str] {
    match version {
        Some(version) if version < (3, 6) => &SKIP_SAN_VARIABLES[..1],
        Some(_) => &SKIP_SAN_VARIABLES[1..],
        None => &SKIP_SAN_VARIABLES,
    }
}

/// Parses `etcd Version: 3.4.23`, the first line of `etcd --version`.
fn parse_version(printed: &[u8]) -> Option<(u32, u32)> {
    let version = std::str::from_utf8(printed).ok()?.strip_prefix("etcd Version: ")?;
    let mut numbers = version.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_release_gets_the_variable_that_it_knows() {
        let variables = |printed: &[u8]| variables_of(parse_version(printed));
        let [old, new] = SKIP_SAN_VARIABLES;
        assert_eq!(variables(b"etcd Version: 3.4.23\nGit SHA: Not provided\n"), [old]);
        assert_eq!(variables(b"etcd Version: 3.5.21\n"), [old]);
        assert_eq!(variables(b"etcd Version: 3.6.0-rc.1\n"), [new]);
        assert_eq!(variables(b"etcd Version: 3.7.3\n"), [new]);
        for unknown in [&b""[..], b"etcd Version: main", b"\xff", b"Version: 3.4.23"] {
            assert_eq!(variables(unknown), [old, new]);
        }
    }

    #[tokio::test]
    async fn a_program_that_prints_no_version_gets_all_variables() {
        for program in ["/bin/true", "/nowhere/etcd"] {
            assert_eq!(skip_san_variables(Path::new(program)).await, SKIP_SAN_VARIABLES);
        }
    }
}
