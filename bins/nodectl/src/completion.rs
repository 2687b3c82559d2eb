//! Completion of command lines in shells, with the DNs of the running node.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use nodekeel_node::client::{self, DEFAULT_SOCKET};
use nodekeel_node::v1::TreeRequest;

use crate::error::CommandError;

/// The variable by which the script of a shell asks for completions.
const VARIABLE: &str = "_NODECTL_COMPLETE";

/// Timeout until the node has answered: a person waits for the shell.
const NODE_TIMEOUT: Duration = Duration::from_millis(800);

/// Answers a shell that asks for completions of this command line; false if none does.
pub(crate) fn answer_shell(command_line: fn() -> clap::Command) -> bool {
    let directory = std::env::current_dir().ok();
    let answer = CompleteEnv::with_factory(command_line).var(VARIABLE);
    // An error would be printed between the words that the operator types.
    answer.try_complete(std::env::args_os(), directory.as_deref()).unwrap_or(true)
}

/// Prints the script by which a shell asks.
pub(crate) fn print_script(shell: clap_complete::Shell) -> Result<(), CommandError> {
    let shells = Shells::builtins();
    let completer = shells.completer(&shell.to_string()).expect("each shell has a completer");
    let mut script = Vec::new();
    completer.write_registration(VARIABLE, "nodectl", "nodectl", "nodectl", &mut script)?;
    let mut printer = std::io::stdout().lock();
    printer.write_all(&script)?;
    Ok(printer.flush()?)
}

/// Completes the DNs of the node's tree.
pub(crate) fn complete_dn() -> ArgValueCandidates {
    // The node is only asked when a shell completes, and not when a command line is parsed.
    ArgValueCandidates::new(|| {
        let socket = find_socket(std::env::args_os(), std::env::var_os("NODEKEEL_SOCKET"));
        read_dns(&socket).into_iter().filter(|dn| is_word(dn)).map(CompletionCandidate::new).collect()
    })
}

/// True for a word without a meaning in a shell, as each name of a tree is: another program may answer at the socket.
fn is_word(dn: &str) -> bool {
    dn.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// The socket of an incomplete command line.
fn find_socket(words: impl IntoIterator<Item = OsString>, variable: Option<OsString>) -> PathBuf {
    let mut words = words.into_iter();
    // clap can't parse an incomplete command line, so that the option is searched in its words.
    while let Some(word) = words.next() {
        let value = word.to_str().and_then(|word| word.strip_prefix("--socket=")).map(OsString::from);
        let next = if word == "--socket" { words.next() } else { None };
        if let Some(path) = value.or(next) {
            return path.into();
        }
    }
    variable.unwrap_or_else(|| DEFAULT_SOCKET.into()).into()
}

/// The DNs of the node; none if it does not answer in time.
fn read_dns(socket: &Path) -> Vec<String> {
    // A failure completes nothing: a message would appear between the words that the operator types.
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return Vec::new();
    };
    let answer = runtime.block_on(async {
        let tree = async {
            let mut client = client::connect(socket).await.ok()?;
            client.tree(TreeRequest {}).await.ok()
        };
        tokio::time::timeout(NODE_TIMEOUT, tree).await.ok().flatten()
    });
    let nodes = answer.map(|tree| tree.into_inner().nodes).unwrap_or_default();
    nodes.into_iter().map(|node| node.dn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_is_that_of_the_command_line_or_of_the_environment() {
        let find = |line: &str, variable: Option<&str>| {
            let path = find_socket(line.split(' ').map(OsString::from), variable.map(OsString::from));
            path.to_str().unwrap().to_owned()
        };
        for (line, variable, socket) in [
            ("nodectl -- nodectl logs", None, DEFAULT_SOCKET),
            ("nodectl -- nodectl logs", Some("/v"), "/v"),
            ("nodectl -- nodectl --socket /a logs", Some("/v"), "/a"),
            ("nodectl -- nodectl logs --socket=/b ro", Some("/v"), "/b"),
            ("nodectl -- nodectl --socket", Some("/v"), "/v"),
        ] {
            assert_eq!(find(line, variable), socket, "{line}");
        }
    }

    #[test]
    fn only_names_without_a_meaning_for_a_shell_or_terminal_are_offered() {
        assert!(is_word("root.service.web-1_a"));
        for dn in ["root.$(reboot)", "root.a b", "root.\u{1b}[2J", "root.a\n", "root.`a`", "root.é"] {
            assert!(!is_word(dn), "{dn:?}");
        }
    }

    #[test]
    fn a_node_that_does_not_run_has_no_dns() {
        assert_eq!(read_dns(Path::new("/nowhere/control.sock")), [""; 0]);
    }
}
