//! What provisionerd reports of a directory and an API server that it can't use.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use testbed::{ScratchDir, UNREACHABLE_KUBECONFIG, command_output};

use crate::cluster::{TestDaemon, start_control_plane, wait_logged};

/// A daemon whose API server does not answer.
fn unreachable_daemon(scratch: &ScratchDir) -> TestDaemon {
    let kubeconfig = scratch.path().join("kubeconfig");
    fs::write(&kubeconfig, UNREACHABLE_KUBECONFIG).expect("written");
    TestDaemon::with_kubeconfig(&kubeconfig, "node-a")
}

/// Runs provisionerd on a directory in which it can't start, below a wrapper.
fn run_on(directory: &Path, wrapper: &[&str]) -> Output {
    let limits = tempfile::tempdir().expect("a directory");
    let line =
        [wrapper, &[env!("CARGO_BIN_EXE_provisionerd"), "run", "--no-csi", "--listen=127.0.0.1:0"]].concat();
    let mut command = Command::new(line[0]);
    command.args(&line[1..]).arg("--directory").arg(directory).env_clear();
    command.env("NODE_NAME", "node-a").env("PROVISIONERD_BOOKS", limits.path());
    command.output().expect("provisionerd runs")
}

/// Asserts one error line with these texts, and the exit code.
fn assert_reported(output: &Output, code: i32, texts: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{}: {text}", output.status);
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("provisionerd: ")).collect();
    let [line] = lines[..] else { panic!("one line: {text}") };
    texts.iter().for_each(|text| assert!(line.contains(text), "{text}: {line}"));
}

fn assert_unusable(directory: &Path, wrapper: &[&str], advice: &str) {
    let path = directory.display().to_string();
    assert_reported(&run_on(directory, wrapper), 4, &[&path, advice, "--directory"]);
}

#[test]
fn a_directory_in_use_is_reported_and_left_unchanged() {
    let scratch = ScratchDir::new().expect("a directory");
    let daemon = unreachable_daemon(&scratch);
    let running = daemon.start(&[], &[]);
    wait_logged(&running, "started");
    let born = daemon.base.path().join(".new/pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f");
    fs::create_dir(&born).expect("a volume that the first instance is creating");
    let second = run_on(daemon.base.path(), &[]);
    assert_reported(&second, 5, &["another instance of provisionerd uses", "--directory"]);
    assert!(born.exists());
}

#[test]
fn a_conflicting_symlink_or_file_is_reported_and_left_unchanged() {
    let [base, target] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
    symlink(target.path(), base.path().join("volumes")).expect("a link");
    assert_unusable(base.path(), &[], "path contains a symbolic link");
    assert_eq!(fs::read_dir(target.path()).expect("unchanged").count(), 0);

    let base = tempfile::tempdir().expect("a directory");
    fs::write(base.path().join("volumes"), "mine").expect("written");
    assert_unusable(base.path(), &[], "remove the conflicting file");
    assert_eq!(fs::read_to_string(base.path().join("volumes")).expect("unchanged"), "mine");
}

#[test]
#[ignore = "needs root: it mounts"]
fn a_read_only_or_full_file_system_is_reported() {
    for (options, advice) in [
        ("ro", "mount its file system read-write"),
        ("size=64k,nr_inodes=1,mode=755", "free space on its file system"),
    ] {
        let scratch = ScratchDir::new().expect("a directory");
        let directory = scratch.path().join("volumes");
        fs::create_dir(&directory).expect("a directory");
        let mut mount = Command::new("mount");
        command_output(mount.args(["-t", "tmpfs", "-o", options, "none"]).arg(&directory)).unwrap();
        assert_unusable(&directory, &[], advice);
    }
}

#[test]
#[ignore = "needs root: it gives files to another user"]
fn what_another_user_could_have_written_is_reported() {
    let base = tempfile::tempdir().expect("a directory");
    chown(base.path(), Some(65534), None).expect("given away");
    assert_unusable(base.path(), &[], "belongs to user 65534");
    chown(base.path(), Some(0), None).expect("given back");
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o777)).expect("chmod");
    assert_unusable(base.path(), &[], "type: chmod go-w");
}

#[test]
#[ignore = "needs root and setpriv: it changes its user"]
fn an_inaccessible_directory_is_reported() {
    let base = tempfile::tempdir().expect("a directory");
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    for mode in [0o755, 0o700] {
        fs::set_permissions(base.path(), fs::Permissions::from_mode(mode)).expect("chmod");
        assert_unusable(base.path(), &nobody, "run as root");
    }
}

#[test]
fn a_daemon_with_an_unusable_kubeconfig_exits_with_4() {
    let daemon = TestDaemon::with_kubeconfig(Path::new("/nowhere/config"), "node-a");
    let output = daemon.command(&["run", "--no-csi"]).output().expect("provisionerd runs");
    assert_reported(&output, 4, &["can't read kubeconfig /nowhere/config: "]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(text.matches("No such file or directory").count(), 1, "{text}");
}

#[test]
fn an_unreachable_api_server_is_logged_once_for_all_watches() {
    let scratch = ScratchDir::new().expect("a directory");
    let daemon = unreachable_daemon(&scratch);
    let mut running = daemon.start(&[], &[]);
    let warning = wait_logged(&running, "API server");
    assert!(warning.contains("WARN") && warning.contains("is the API server reachable?"), "{warning}");
    // All three watches have failed twice by then.
    assert_eq!(running.wait_for_exit(Duration::from_secs(3)).expect("a status"), None);
    let log = running.read_log().expect("a log");
    assert_eq!(log.matches("API server reachable").count(), 1, "{log}");
}

#[test]
#[ignore = "needs kube"]
fn missing_permissions_of_an_account_are_named() {
    let kube = start_control_plane();
    let daemon = TestDaemon::with_kubeconfig(&kube.kubeconfig_file("nobody").expect("a user"), "node-a");
    let running = daemon.start(&[], &[]);
    let error = wait_logged(&running, "missing permissions");
    assert!(error.contains("ERROR"), "{error}");
    for (verbs, resource) in [
        ("watch", " persistentvolumeclaims "),
        ("delete", " persistentvolumes "),
        ("create, patch", " events "),
    ] {
        let permissions = error.split("; ").find(|part| part.contains(resource));
        assert!(permissions.is_some_and(|permissions| permissions.contains(verbs)), "{error}");
    }
    let checked = daemon.command(&["check", "--no-csi"]).output().expect("provisionerd runs");
    assert_eq!(checked.status.code(), Some(4));
    let text = String::from_utf8_lossy(&checked.stdout);
    let denied = text.lines().find(|line| line.contains("rbac.yaml"));
    assert!(denied.is_some_and(|line| line.starts_with("FAIL")), "{text}");
}
