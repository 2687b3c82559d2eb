//! What it says where the directory of volumes can't be used, with limits that are only written down.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use testbed::Scratch;

use crate::cluster::{self, PATIENCE};

/// It, with books in a directory.
fn provisionerd(wrapper: &[&str], subcommand: &str, (directory, books): (&Path, &Path)) -> Command {
    let line = [wrapper, &[env!("CARGO_BIN_EXE_provisionerd"), subcommand]].concat();
    let mut command = Command::new(line[0]);
    command.args(&line[1..]).args(["--no-csi", "--listen=127.0.0.1:0"]).arg("--directory").arg(directory);
    command.stdin(Stdio::null()).env_clear().env("NODE_NAME", "node-a").env("PROVISIONERD_BOOKS", books);
    command
}

/// Runs it on a directory in which it can't begin.
fn run(directory: &Path, wrapper: &[&str]) -> Output {
    let books = tempfile::tempdir().expect("a directory");
    provisionerd(wrapper, "run", (directory, books.path())).output().expect("it runs")
}

/// It runs, and what it says is read.
struct Running {
    child: Child,
    lines: Receiver<String>,
    directories: [tempfile::TempDir; 2],
}

impl Running {
    fn with(kubeconfig: &Path) -> Self {
        let directories = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let mut command = provisionerd(&[], "run", (directories[0].path(), directories[1].path()));
        command.arg("--kubeconfig").arg(kubeconfig).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let stderr = BufReader::new(child.stderr.take().expect("it is piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { child, lines, directories }
    }

    /// Where it keeps volumes.
    fn directory(&self) -> &Path {
        self.directories[0].path()
    }

    /// The next line in which this stands; none where nothing at all is said for so long.
    fn says(&self, part: &str, within: Duration) -> Option<String> {
        let next = || self.lines.recv_timeout(within).ok();
        std::iter::from_fn(next).find(|line| line.contains(part))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Asserts that it said why in one line, and what to do; and that it ended as for something missing.
fn assert_told(output: &Output, directory: &Path, advice: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{}: {text}", output.status);
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("provisionerd: ")).collect();
    let [line] = lines[..] else { panic!("one line: {text}") };
    assert!(line.contains(&directory.display().to_string()), "{line}");
    assert!(line.contains(advice) && line.contains("--directory"), "{line}");
}

#[test]
fn a_directory_that_another_instance_works_on_is_told_and_left_alone() {
    let kubeconfig = unreachable();
    let first = Running::with(kubeconfig.path());
    assert!(first.says("started", PATIENCE).is_some());
    let directory = first.directory();
    let born = directory.join(".new/pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f");
    fs::create_dir(&born).expect("what the first is about to make");
    let second = run(directory, &[]);
    let text = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(5), "{text}");
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("provisionerd: ")).collect();
    let [line] = lines[..] else { panic!("one line: {text}") };
    assert!(line.contains("another instance works on") && line.contains("--directory"), "{line}");
    assert!(born.exists());
}

/// A tmpfs below a scratch directory, which undoes it.
fn mount(scratch: &Scratch, options: &str) -> PathBuf {
    let directory = scratch.path().join("volumes");
    fs::create_dir(&directory).expect("a directory");
    let mut command = Command::new("mount");
    command.args(["-t", "tmpfs", "-o", options, "none"]).arg(&directory);
    assert!(command.status().expect("mount runs").success());
    directory
}

#[test]
fn a_link_in_the_way_is_told_and_its_target_left_alone() {
    let (base, target) =
        (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    symlink(target.path(), base.path().join("volumes")).expect("a link");
    assert_told(&run(base.path(), &[]), base.path(), "a symbolic link is in the way");
    assert_eq!(fs::read_dir(target.path()).expect("it is there").count(), 0);
}

#[test]
fn a_file_in_the_way_is_told() {
    let base = tempfile::tempdir().expect("a directory");
    fs::write(base.path().join("volumes"), "mine").expect("written");
    assert_told(&run(base.path(), &[]), base.path(), "remove what is in the way");
    assert_eq!(fs::read_to_string(base.path().join("volumes")).expect("it is there"), "mine");
}

#[test]
#[ignore = "needs root: it mounts"]
fn a_file_system_that_is_read_only_is_told() {
    let scratch = Scratch::new().expect("a directory");
    let directory = mount(&scratch, "ro");
    assert_told(&run(&directory, &[]), &directory, "mount its file system for writing");
}

#[test]
#[ignore = "needs root: it mounts"]
fn a_full_file_system_is_told() {
    let scratch = Scratch::new().expect("a directory");
    let directory = mount(&scratch, "size=64k,nr_inodes=1");
    assert_told(&run(&directory, &[]), &directory, "make room on its file system");
}

#[test]
#[ignore = "needs root and setpriv: it becomes somebody else"]
fn a_directory_that_may_not_be_written_to_or_read_is_told() {
    let base = tempfile::tempdir().expect("a directory");
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    for mode in [0o755, 0o700] {
        fs::set_permissions(base.path(), fs::Permissions::from_mode(mode)).expect("chmod");
        assert_told(&run(base.path(), &nobody), base.path(), "run as root");
    }
}

/// How to reach an API server that is gone.
fn unreachable() -> tempfile::NamedTempFile {
    let kubeconfig = tempfile::NamedTempFile::new().expect("a file");
    let config = "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
        contexts: [{name: a, context: {cluster: a, user: a}}]\n\
        clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}]\n\
        users: [{name: a, user: {}}]\n";
    fs::write(&kubeconfig, config).expect("written");
    kubeconfig
}

#[test]
fn an_api_server_that_is_gone_is_told_once_and_not_by_each_watch() {
    let kubeconfig = unreachable();
    let running = Running::with(kubeconfig.path());
    let told = running.says("API server", PATIENCE).expect("it is told");
    assert!(told.contains("WARN") && told.contains("is the API server reachable?"), "{told}");
    // All three watches have failed twice by then.
    let again = running.says("API server", Duration::from_secs(3));
    assert_eq!(again, None, "after: {told}");
}

#[test]
#[ignore = "needs kube"]
fn an_account_without_rights_is_told_which_to_grant() {
    let kube = cluster::start();
    let kubeconfig = kube.kubeconfig("nobody").expect("an account");
    let running = Running::with(&kubeconfig);
    let told = running.says("rbac.yaml", PATIENCE).expect("it is told");
    assert!(told.contains("ERROR"), "{told}");
    for (verbs, resource) in [
        ("watch", " persistentvolumeclaims "),
        ("delete", " persistentvolumes "),
        ("create, patch", " events "),
    ] {
        let of_it = told.split("; ").find(|kind| kind.contains(resource)).unwrap_or_else(|| panic!("{told}"));
        assert!(of_it.contains(verbs), "{told}");
    }
    let [directory, books] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
    let mut check = provisionerd(&[], "check", (directory.path(), books.path()));
    let checked = check.arg("--kubeconfig").arg(&kubeconfig).output().expect("it runs");
    assert_eq!(checked.status.code(), Some(4));
    let text = String::from_utf8_lossy(&checked.stdout);
    let denied = text.lines().find(|line| line.contains("rbac.yaml"));
    assert!(denied.is_some_and(|line| line.starts_with("FAIL")), "{text}");
}
