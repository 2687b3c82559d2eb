//! Messages for an unusable directory of volumes, with limits kept in files.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use testbed::ScratchDir;

use crate::client_cluster::{self as cluster, TIMEOUT};
use crate::messages::unreachable_kubeconfig;

/// A command that runs provisionerd with limits in files.
fn provisionerd_command(wrapper: &[&str], subcommand: &str, directory: &Path, quota_dir: &Path) -> Command {
    let line = [wrapper, &[env!("CARGO_BIN_EXE_provisionerd"), subcommand]].concat();
    let mut command = Command::new(line[0]);
    command.args(&line[1..]).args(["--no-csi", "--listen=127.0.0.1:0"]).arg("--directory").arg(directory);
    command.stdin(Stdio::null()).env_clear().env("NODE_NAME", "node-a").env("PROVISIONERD_BOOKS", quota_dir);
    command
}

/// Runs provisionerd on a directory in which it cannot start.
fn run_to_end(directory: &Path, wrapper: &[&str]) -> Output {
    let quota_dir = tempfile::tempdir().expect("a directory");
    provisionerd_command(wrapper, "run", directory, quota_dir.path()).output().expect("provisionerd runs")
}

/// A running provisionerd and the lines of its stderr.
struct RunningDaemon {
    child: Child,
    lines: Receiver<String>,
    directories: [tempfile::TempDir; 2],
}

impl RunningDaemon {
    fn start(kubeconfig: &Path) -> Self {
        let directories = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let mut command = provisionerd_command(&[], "run", directories[0].path(), directories[1].path());
        command.arg("--kubeconfig").arg(kubeconfig).stderr(Stdio::piped());
        let mut child = command.spawn().expect("provisionerd starts");
        let stderr = BufReader::new(child.stderr.take().expect("stderr is piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { child, lines, directories }
    }

    /// The directory of volumes.
    fn directory(&self) -> &Path {
        self.directories[0].path()
    }

    /// The next line that contains this; `None` if no line arrives for this long.
    fn wait_for_line(&self, part: &str, within: Duration) -> Option<String> {
        let next = || self.lines.recv_timeout(within).ok();
        std::iter::from_fn(next).find(|line| line.contains(part))
    }
}

impl Drop for RunningDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Asserts one error line with a hint, and the exit code of a missing requirement.
fn assert_reported(output: &Output, directory: &Path, advice: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{}: {text}", output.status);
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("provisionerd: ")).collect();
    let [line] = lines[..] else { panic!("one line: {text}") };
    assert!(line.contains(&directory.display().to_string()), "{line}");
    assert!(line.contains(advice) && line.contains("--directory"), "{line}");
}

#[test]
fn a_directory_in_use_is_reported_and_left_unchanged() {
    let kubeconfig = unreachable_kubeconfig();
    let first = RunningDaemon::start(kubeconfig.path());
    assert!(first.wait_for_line("started", TIMEOUT).is_some());
    let directory = first.directory();
    let born = directory.join(".new/pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f");
    fs::create_dir(&born).expect("a volume that the first instance is creating");
    let second = run_to_end(directory, &[]);
    let text = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(5), "{text}");
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("provisionerd: ")).collect();
    let [line] = lines[..] else { panic!("one line: {text}") };
    assert!(line.contains("another instance of provisionerd uses") && line.contains("--directory"), "{line}");
    assert!(born.exists());
}

/// Mounts a tmpfs below a scratch directory, which unmounts it.
fn mount_tmpfs(scratch: &ScratchDir, options: &str) -> PathBuf {
    let directory = scratch.path().join("volumes");
    fs::create_dir(&directory).expect("a directory");
    let mut command = Command::new("mount");
    command.args(["-t", "tmpfs", "-o", options, "none"]).arg(&directory);
    assert!(command.status().expect("mount runs").success());
    directory
}

#[test]
fn a_conflicting_symlink_is_reported_and_its_target_left_unchanged() {
    let (base, target) =
        (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    symlink(target.path(), base.path().join("volumes")).expect("a link");
    assert_reported(&run_to_end(base.path(), &[]), base.path(), "path contains a symbolic link");
    assert_eq!(fs::read_dir(target.path()).expect("unchanged").count(), 0);
}

#[test]
fn a_conflicting_file_is_reported() {
    let base = tempfile::tempdir().expect("a directory");
    fs::write(base.path().join("volumes"), "mine").expect("written");
    assert_reported(&run_to_end(base.path(), &[]), base.path(), "remove the conflicting file");
    assert_eq!(fs::read_to_string(base.path().join("volumes")).expect("unchanged"), "mine");
}

#[test]
#[ignore = "needs root: it mounts"]
fn a_read_only_file_system_is_reported() {
    let scratch = ScratchDir::new().expect("a directory");
    let directory = mount_tmpfs(&scratch, "ro");
    assert_reported(&run_to_end(&directory, &[]), &directory, "mount its file system read-write");
}

#[test]
#[ignore = "needs root: it mounts"]
fn a_full_file_system_is_reported() {
    let scratch = ScratchDir::new().expect("a directory");
    let directory = mount_tmpfs(&scratch, "size=64k,nr_inodes=1");
    assert_reported(&run_to_end(&directory, &[]), &directory, "free space on its file system");
}

#[test]
#[ignore = "needs root and setpriv: it changes its user"]
fn an_inaccessible_directory_is_reported() {
    let base = tempfile::tempdir().expect("a directory");
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    for mode in [0o755, 0o700] {
        fs::set_permissions(base.path(), fs::Permissions::from_mode(mode)).expect("chmod");
        assert_reported(&run_to_end(base.path(), &nobody), base.path(), "run as root");
    }
}

#[test]
fn a_daemon_with_an_unusable_kubeconfig_exits_with_4() {
    let [directory, quota_dir] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
    let mut command = provisionerd_command(&[], "run", directory.path(), quota_dir.path());
    let output = command.arg("--kubeconfig=/nowhere/config").output().expect("provisionerd runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{text}");
    assert!(text.contains("provisionerd: can't read kubeconfig /nowhere/config: "), "{text}");
    assert_eq!(text.matches("No such file or directory").count(), 1, "{text}");
}

#[test]
fn an_unreachable_api_server_is_logged_once_for_all_watches() {
    let kubeconfig = unreachable_kubeconfig();
    let running = RunningDaemon::start(kubeconfig.path());
    let warning = running.wait_for_line("API server", TIMEOUT).expect("a warning");
    assert!(warning.contains("WARN") && warning.contains("is the API server reachable?"), "{warning}");
    // All three watches have failed twice by then.
    let again = running.wait_for_line("API server", Duration::from_secs(3));
    assert_eq!(again, None, "after: {warning}");
}

#[test]
#[ignore = "needs kube"]
fn missing_permissions_of_an_account_are_named() {
    let kube = cluster::start_control_plane();
    let kubeconfig = kube.kubeconfig_file("nobody").expect("an account");
    let running = RunningDaemon::start(&kubeconfig);
    let error = running.wait_for_line("missing permissions", TIMEOUT).expect("an error");
    assert!(error.contains("ERROR"), "{error}");
    for (verbs, resource) in [
        ("watch", " persistentvolumeclaims "),
        ("delete", " persistentvolumes "),
        ("create, patch", " events "),
    ] {
        let permissions =
            error.split("; ").find(|part| part.contains(resource)).unwrap_or_else(|| panic!("{error}"));
        assert!(permissions.contains(verbs), "{error}");
    }
    let [directory, quota_dir] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
    let mut check = provisionerd_command(&[], "check", directory.path(), quota_dir.path());
    let checked = check.arg("--kubeconfig").arg(&kubeconfig).output().expect("provisionerd runs");
    assert_eq!(checked.status.code(), Some(4));
    let text = String::from_utf8_lossy(&checked.stdout);
    let denied = text.lines().find(|line| line.contains("rbac.yaml"));
    assert!(denied.is_some_and(|line| line.starts_with("FAIL")), "{text}");
}
