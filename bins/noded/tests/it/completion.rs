//! Completion of DNs by a shell.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::harness::{Ended, NO_DAEMONS, NodedProcess, nodectl_path, run_nodectl, sleep_config};

/// The words that bash offers for the last of these, with its own completion function, and its stderr.
fn complete_in_bash(socket: &Path, words: &[&str]) -> (Vec<String>, String) {
    let script = format!(
        "{}\nCOMP_WORDS=(nodectl \"$@\") COMP_CWORD=$# COMP_TYPE=9\n\
         _clap_complete_nodectl nodectl \"${{@: -1}}\" \"${{@: -2:1}}\"\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n",
        run_nodectl(&["completion", "bash"]).output()
    );
    let path = format!("{}:/usr/bin:/bin", nodectl_path().parent().unwrap().display());
    let mut bash = Command::new("/bin/bash");
    bash.args(["--norc", "-c", &script, "bash"]).args(words);
    let ended = Ended::of(bash.env_clear().env("PATH", path).env("NODEKEEL_SOCKET", socket));
    let offered = ended.stdout.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    (offered, ended.stderr)
}

#[test]
fn bash_completes_the_dns_of_the_node() {
    let node = NodedProcess::start(&format!("{NO_DAEMONS}{}", sleep_config("web", "")));
    for command in ["logs", "status", "restart", "stop", "start", "signal", "reload", "log-level"] {
        let (offered, stderr) = complete_in_bash(&node.socket(), &[command, "root.service.w"]);
        assert_eq!((offered, stderr.as_str()), (vec!["root.service.web".to_owned()], ""), "{command}");
    }
    let (offered, _) = complete_in_bash(&node.socket(), &["logs", ""]);
    assert!(
        ["root", "root.control", "root.service.web"].iter().all(|dn| offered.contains(&(*dn).to_owned()))
    );
    let socket = format!("--socket={}", node.socket().display());
    let (offered, _) = complete_in_bash(Path::new("/nowhere"), &[&socket, "logs", "root.c"]);
    assert_eq!(offered, ["root.control"]);
    let (offered, _) = complete_in_bash(&node.socket(), &["log-l"]);
    assert_eq!(offered, ["log-level"]);
    node.stop();
}

#[test]
fn completion_is_silent_and_quick_without_a_node_that_answers() {
    let scratch = testbed::ScratchDir::new().unwrap();
    let silent = scratch.path().join("silent.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&silent).unwrap();
    for socket in [Path::new("/nowhere/control.sock"), &silent] {
        let start = Instant::now();
        let (offered, stderr) = complete_in_bash(socket, &["logs", "root."]);
        assert_eq!((offered, stderr.as_str()), (Vec::new(), ""), "{socket:?}");
        assert!(start.elapsed() < Duration::from_secs(10), "{socket:?}: {:?}", start.elapsed());
    }
}
