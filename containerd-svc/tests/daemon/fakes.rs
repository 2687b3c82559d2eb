//! Programs that are no containerd.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use nodekeel_containerd_svc::{Containerd, Place};
use nodekeel_logtree::Journal;
use nodekeel_supervisor::{Backoff, NodeStatus, Policy, State, Supervisor};
use tempfile::TempDir;
use testbed::{wait_until, write_program};

use crate::harness::until;

struct Fake {
    place: Place,
    supervisor: Supervisor,
    directory: TempDir,
}

impl Fake {
    /// A script in containerd's place; none where there is no text.
    fn start(script: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let binary = directory.path().join("containerd");
        if !script.is_empty() {
            write_program(&binary, &format!("#!/bin/sh\n{script}\n")).unwrap();
        }
        Self::of(binary, directory, |_| {})
    }

    fn of(binary: PathBuf, directory: TempDir, change: impl FnOnce(&mut Containerd)) -> Self {
        let place = Place::new(directory.path().join("data"), directory.path().join("run")).unwrap();
        let mut containerd = Containerd::new(binary, place.clone(), "/usr/bin:/bin", Journal::default());
        containerd.grace = Duration::from_millis(200);
        change(&mut containerd);
        let policy = Policy { backoff: Backoff::NONE, ..Policy::default() };
        let supervisor = Supervisor::builder().policy(policy).start(containerd);
        Self { place, supervisor, directory }
    }

    /// How it stands after some failures in a row: a time of readiness would have cleared them.
    async fn failed(&self) -> NodeStatus {
        let node = until(&self.supervisor, "root", |node| node.failures >= 3).await.unwrap();
        assert!(node.exits.iter().all(|exit| exit.state == State::Dead), "{node:?}");
        node
    }

    /// Waits until the script has written that file into its `TMPDIR`.
    fn said(&self, name: &str) -> String {
        let read = || {
            let text = fs::read_to_string(self.place.tmp().join(name))?;
            anyhow::ensure!(text.ends_with('\n'), "its line is not whole: {text:?}");
            Ok(text.trim().to_owned())
        };
        wait_until(Duration::from_secs(20), name, read).unwrap()
    }
}

/// Reference 10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_ends_has_failed_whatever_its_exit_code() {
    for (code, words) in [(0, "exited with code 0"), (3, "exited with code 3")] {
        let fake = Fake::start(&format!("exit {code}"));
        let node = fake.failed().await;
        let told = node.exits.last().unwrap().exit.to_string();
        assert!(told.contains(words), "{told}");
        fake.supervisor.shutdown().await;
    }
}

/// Reference 13, `containerd binary missing/not executable`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_can_not_be_executed_is_told_with_what_to_do() {
    let missing = Fake::start("");
    let directory = tempfile::tempdir().unwrap();
    let plain = directory.path().join("containerd");
    fs::write(&plain, "#!/bin/sh\n").unwrap();
    let plain = Fake::of(plain, directory, |_| {});
    for fake in [missing, plain] {
        let told = fake.failed().await.exits.last().unwrap().exit.to_string();
        let path = fake.directory.path().join("containerd").display().to_string();
        assert!(told.contains(&path) && told.contains("start"), "{told}");
        fake.supervisor.shutdown().await;
    }
}

/// Reference 10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_ignores_term_is_killed_after_its_grace() {
    let fake = Fake::start("trap '' TERM; echo $$ >\"$TMPDIR/pid\"; exec sleep 1000");
    let pid = fake.said("pid");
    let report = fake.supervisor.shutdown().await;
    assert!(report.stragglers.is_empty(), "{report:?}");
    assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
}

/// Reference 13, `socket directory missing`: what it needs is there before it starts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_directories_are_there_before_it_is() {
    let fake = Fake::start("cd \"$TMPDIR/..\" && stat -c %n:%a state tmp >\"$TMPDIR/seen\"; exec sleep 1000");
    fake.said("seen");
    let seen = fs::read_to_string(fake.place.tmp().join("seen")).unwrap();
    assert_eq!(seen, "state:711\ntmp:700\n");
    fake.supervisor.shutdown().await;
}

/// Reference 10: nothing leaks in, and more can be given.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_environment_and_arguments_are_its_own_and_what_is_added() {
    let directory = tempfile::tempdir().unwrap();
    let binary = directory.path().join("containerd");
    let script =
        "tr '\\0' '\\n' </proc/$$/environ >\"$TMPDIR/env\"; echo \"$@\" >\"$TMPDIR/args\"; exec sleep 1000";
    write_program(&binary, &format!("#!/bin/sh\n{script}\n")).unwrap();
    let fake = Fake::of(binary, directory, |containerd| {
        containerd.env.insert("HTTPS_PROXY".into(), "http://proxy:1".into());
        containerd.extra_args = vec!["--log-level".into(), "debug".into()];
    });
    let (data, run) = (fake.directory.path().join("data"), fake.directory.path().join("run"));
    let args = format!(
        "--config {0}/config.toml --root {0}/root --state {1}/state --address {1}/containerd.sock --log-level debug",
        data.display(),
        run.display()
    );
    assert_eq!(fake.said("args"), args);
    let tmp = format!("TMPDIR={}", fake.place.tmp().display());
    let told = fake.said("env");
    let mut variables: Vec<_> = told.lines().collect();
    variables.sort();
    assert_eq!(variables, ["HTTPS_PROXY=http://proxy:1", "PATH=/usr/bin:/bin", &tmp]);
    fake.supervisor.shutdown().await;
}
