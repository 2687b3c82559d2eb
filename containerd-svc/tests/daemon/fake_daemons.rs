//! Scripts in the place of containerd.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use nodekeel_containerd_svc::{Containerd, DirectoryLayout};
use nodekeel_logtree::LogStore;
use nodekeel_supervisor::{Backoff, ChildPolicy, RunnableState, RunnableStatus, Supervisor};
use tempfile::TempDir;
use testbed::{wait_until, write_program};

use crate::harness::wait_node;

struct FakeDaemon {
    layout: DirectoryLayout,
    supervisor: Supervisor,
    directory: TempDir,
}

impl FakeDaemon {
    /// Starts a script in the place of containerd; a missing program for an empty script.
    fn start(script: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let binary = directory.path().join("containerd");
        if !script.is_empty() {
            write_program(&binary, &format!("#!/bin/sh\n{script}\n")).unwrap();
        }
        Self::start_binary(binary, directory, |_| {})
    }

    fn start_binary(binary: PathBuf, directory: TempDir, change: impl FnOnce(&mut Containerd)) -> Self {
        let layout =
            DirectoryLayout::new(directory.path().join("data"), directory.path().join("run")).unwrap();
        let mut containerd = Containerd::new(binary, layout.clone(), "/usr/bin:/bin", LogStore::default());
        containerd.grace_period = Duration::from_millis(200);
        change(&mut containerd);
        let policy = ChildPolicy { backoff: Backoff::NONE, ..ChildPolicy::default() };
        let supervisor = Supervisor::builder().default_policy(policy).start(containerd);
        Self { layout, supervisor, directory }
    }

    /// Waits for three consecutive failures; readiness would have reset the count.
    async fn wait_failed(&self) -> RunnableStatus {
        let node = wait_node(&self.supervisor, "root", |node| node.failures >= 3).await.unwrap();
        assert!(node.exits.iter().all(|exit| exit.state == RunnableState::Dead), "{node:?}");
        node
    }

    /// Waits until the script has written a line to that file in its `TMPDIR`.
    fn read_line(&self, name: &str) -> String {
        let read = || {
            let text = fs::read_to_string(self.layout.run().tmp.path().join(name))?;
            anyhow::ensure!(text.ends_with('\n'), "incomplete line: {text:?}");
            Ok(text.trim().to_owned())
        };
        wait_until(Duration::from_secs(20), name, read).unwrap()
    }
}

/// Reference 10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_exits_has_failed_with_any_exit_code() {
    for (code, words) in [(0, "exited with code 0"), (3, "exited with code 3")] {
        let fake = FakeDaemon::start(&format!("exit {code}"));
        let node = fake.wait_failed().await;
        let text = node.exits.last().unwrap().exit.to_string();
        assert!(text.contains(words), "{text}");
        fake.supervisor.shutdown().await;
    }
}

/// Reference 13, `containerd binary missing/not executable`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_cannot_be_executed_is_named_in_the_error() {
    let missing = FakeDaemon::start("");
    let directory = tempfile::tempdir().unwrap();
    let plain = directory.path().join("containerd");
    fs::write(&plain, "#!/bin/sh\n").unwrap();
    let plain = FakeDaemon::start_binary(plain, directory, |_| {});
    for fake in [missing, plain] {
        let text = fake.wait_failed().await.exits.last().unwrap().exit.to_string();
        let path = fake.directory.path().join("containerd").display().to_string();
        assert!(text.contains(&path) && text.contains("start"), "{text}");
        fake.supervisor.shutdown().await;
    }
}

/// Reference 10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_ignores_sigterm_is_killed_after_its_grace_period() {
    let fake = FakeDaemon::start("trap '' TERM; echo $$ >\"$TMPDIR/pid\"; exec sleep 1000");
    let pid = fake.read_line("pid");
    let report = fake.supervisor.shutdown().await;
    assert!(report.stragglers.is_empty(), "{report:?}");
    assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
}

/// Reference 13, `socket directory missing`: directories exist before the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn directories_exist_before_the_daemon_starts() {
    let fake =
        FakeDaemon::start("cd \"$TMPDIR/..\" && stat -c %n:%a state tmp >\"$TMPDIR/seen\"; exec sleep 1000");
    fake.read_line("seen");
    let seen = fs::read_to_string(fake.layout.run().tmp.path().join("seen")).unwrap();
    assert_eq!(seen, "state:711\ntmp:700\n");
    fake.supervisor.shutdown().await;
}

/// Reference 10: the parent's environment is not inherited, and variables can be added.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn environment_and_arguments_are_the_fixed_ones_and_the_extra_ones() {
    let directory = tempfile::tempdir().unwrap();
    let binary = directory.path().join("containerd");
    let script =
        "tr '\\0' '\\n' </proc/$$/environ >\"$TMPDIR/env\"; echo \"$@\" >\"$TMPDIR/args\"; exec sleep 1000";
    write_program(&binary, &format!("#!/bin/sh\n{script}\n")).unwrap();
    let fake = FakeDaemon::start_binary(binary, directory, |containerd| {
        containerd.env.insert("HTTPS_PROXY".into(), "http://proxy:1".into());
        containerd.extra_args = vec!["--log-level".into(), "debug".into()];
    });
    let (data, run) = (fake.directory.path().join("data"), fake.directory.path().join("run"));
    let args = format!(
        "--config {0}/config.toml --root {0}/root --state {1}/state --address {1}/containerd.sock --log-level debug",
        data.display(),
        run.display()
    );
    assert_eq!(fake.read_line("args"), args);
    let tmp = format!("TMPDIR={}", fake.layout.run().tmp.path().display());
    let text = fake.read_line("env");
    let mut variables: Vec<_> = text.lines().collect();
    variables.sort();
    assert_eq!(variables, ["HTTPS_PROXY=http://proxy:1", "PATH=/usr/bin:/bin", &tmp]);
    fake.supervisor.shutdown().await;
}
