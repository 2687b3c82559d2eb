//! Scripts in the place of containerd.

use std::fs;
use std::path::Path;
use std::time::Duration;

use testbed::wait_until;

use crate::harness::{Setup, TestDaemon};

/// Waits until the script has written a line to that file in its `TMPDIR`.
fn read_line(daemon: &TestDaemon, name: &str) -> String {
    let read = || {
        let text = fs::read_to_string(daemon.layout.run().tmp.path().join(name))?;
        anyhow::ensure!(text.ends_with('\n'), "incomplete line: {text:?}");
        Ok(text.trim().to_owned())
    };
    wait_until(Duration::from_secs(20), name, read).unwrap()
}

/// Reference 10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_exits_has_failed_with_any_exit_code() {
    for (code, words) in [(0, "exited with code 0"), (3, "exited with code 3")] {
        let daemon = Setup::fake(&format!("exit {code}")).launch();
        let text = daemon.wait_failed().await.exits.last().unwrap().exit.to_string();
        assert!(text.contains(words), "{text}");
        daemon.stop().await;
    }
}

/// Reference 13, `containerd binary missing/not executable`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_cannot_be_executed_is_named_in_the_error() {
    for is_missing in [true, false] {
        let mut setup = Setup::fake("");
        let program = setup.path("no-program");
        if !is_missing {
            fs::write(&program, "#!/bin/sh\n").unwrap();
        }
        setup.containerd.binary.clone_from(&program);
        let daemon = setup.launch();
        let text = daemon.wait_failed().await.exits.last().unwrap().exit.to_string();
        assert!(text.contains(program.to_str().unwrap()) && text.contains("start"), "{text}");
        daemon.stop().await;
    }
}

/// Reference 10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_ignores_sigterm_is_killed_after_its_grace_period() {
    let daemon = Setup::fake("trap '' TERM; echo $$ >\"$TMPDIR/pid\"; exec sleep 1000").launch();
    let pid = read_line(&daemon, "pid");
    let _scratch = daemon.stop().await;
    assert!(!Path::new("/proc").join(pid).exists());
}

/// Reference 13, `socket directory missing`: directories exist before the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn directories_exist_before_the_daemon_starts() {
    let script = "cd \"$TMPDIR/..\" && stat -c %n:%a state tmp >\"$TMPDIR/seen\"; exec sleep 1000";
    let daemon = Setup::fake(script).launch();
    read_line(&daemon, "seen");
    let seen = fs::read_to_string(daemon.layout.run().tmp.path().join("seen")).unwrap();
    assert_eq!(seen, "state:711\ntmp:700\n");
    daemon.stop().await;
}

/// Reference 10: the parent's environment is not inherited, and variables can be added.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn environment_and_arguments_are_the_fixed_ones_and_the_extra_ones() {
    let mut setup = Setup::fake(
        "tr '\\0' '\\n' </proc/$$/environ >\"$TMPDIR/env\"; echo \"$@\" >\"$TMPDIR/args\"; exec sleep 1000",
    );
    setup.containerd.env.insert("HTTPS_PROXY".into(), "http://proxy:1".into());
    setup.containerd.extra_args = vec!["--log-level".into(), "debug".into()];
    let daemon = setup.launch();
    let args = format!(
        "--config {0}/config.toml --root {0}/root --state {1}/state --address {1}/containerd.sock --log-level debug",
        daemon.path("data").display(),
        daemon.path("run").display()
    );
    assert_eq!(read_line(&daemon, "args"), args);
    let tmp = format!("TMPDIR={}", daemon.layout.run().tmp.path().display());
    let text = read_line(&daemon, "env");
    let mut variables: Vec<_> = text.lines().collect();
    variables.sort();
    assert_eq!(variables, ["HTTPS_PROXY=http://proxy:1", "PATH=/usr/bin:/bin", &tmp]);
    daemon.stop().await;
}
