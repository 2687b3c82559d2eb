//! Completion of command lines in shells, with the DNs of the running node.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use nodekeel_node::client;
use nodekeel_node::v1::TreeRequest;

use crate::contexts::{Contexts, NodeEndpoint, contexts_file, find_endpoint};
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
        let option = |name| find_option(name, std::env::args_os());
        let context = option("--context").and_then(|name| name.into_string().ok());
        let Ok(endpoint) = find_endpoint(option("--socket").map(PathBuf::from), context) else {
            return Vec::new();
        };
        read_dns(endpoint).into_iter().filter(|dn| is_word(dn)).map(CompletionCandidate::new).collect()
    })
}

/// Completes the names of contexts.
pub(crate) fn complete_context() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let contexts = contexts_file().and_then(|file| Contexts::read(&file).ok()).unwrap_or_default();
        contexts.contexts.into_keys().filter(|name| is_word(name)).map(CompletionCandidate::new).collect()
    })
}

/// True for a word without a meaning in a shell, as each name of a tree is: another program may answer at the socket.
fn is_word(dn: &str) -> bool {
    dn.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// The value of an option in an incomplete command line.
fn find_option(name: &str, words: impl IntoIterator<Item = OsString>) -> Option<OsString> {
    let mut words = words.into_iter();
    // clap can't parse an incomplete command line, so that the option is searched in its words.
    while let Some(word) = words.next() {
        let value =
            word.to_str().and_then(|word| word.strip_prefix(name)?.strip_prefix('=')).map(OsString::from);
        let next = if word == name { words.next() } else { None };
        if let Some(value) = value.or(next) {
            return Some(value);
        }
    }
    None
}

/// The DNs of the node; none if it does not answer in time.
fn read_dns(endpoint: NodeEndpoint) -> Vec<String> {
    // A failure completes nothing: a message would appear between the words that the operator types.
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return Vec::new();
    };
    let answer = runtime.block_on(async {
        let tree = async {
            let client = match &endpoint {
                NodeEndpoint::Socket(socket) => client::connect(socket).await,
                NodeEndpoint::Remote(node) => client::connect_remote(node).await,
            };
            let mut client = client.ok()?;
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
    fn an_option_is_found_in_an_incomplete_command_line() {
        for (line, socket) in [
            ("nodectl -- nodectl logs", None),
            ("nodectl -- nodectl --socket /a logs", Some("/a")),
            ("nodectl -- nodectl logs --socket=/b ro", Some("/b")),
            ("nodectl -- nodectl --socket", None),
            ("nodectl -- nodectl --sockets /c", None),
        ] {
            let found = find_option("--socket", line.split(' ').map(OsString::from));
            assert_eq!(found, socket.map(OsString::from), "{line}");
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
        assert_eq!(read_dns(NodeEndpoint::Socket("/nowhere/control.sock".into())), [""; 0]);
    }
}
