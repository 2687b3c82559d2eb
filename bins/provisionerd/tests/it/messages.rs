//! Messages and exit codes for missing requirements.

use std::path::Path;
use std::process::{Command, Output};

fn run_provisionerd(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
    command.args(arguments).env_clear();
    // A home without a kubeconfig; the service account files do not exist either.
    command.env("HOME", "/nowhere").env("NODE_NAME", "node-a");
    command.output().expect("provisionerd runs")
}

fn stdout_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn create_kubelet_dir(directory: &Path) -> String {
    for below in ["pods", "plugins_registry"] {
        std::fs::create_dir_all(directory.join("kubelet").join(below)).expect("create");
    }
    directory.join("kubelet").display().to_string()
}

#[test]
fn the_shipped_configuration_is_printed_and_can_be_used() {
    let printed = run_provisionerd(&["--print-config"]);
    assert!(printed.status.success());
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("provisionerd.toml");
    std::fs::write(&file, &printed.stdout).expect("write");
    let kubelet = create_kubelet_dir(directory.path());
    let checked =
        run_provisionerd(&["check", "--config", file.to_str().expect("UTF-8"), "--kubelet", &kubelet]);
    assert!(stdout_text(&checked).contains("this is node node-a"), "{}", stderr_text(&checked));
}

#[test]
fn a_check_prints_a_line_with_a_hint_for_each_finding() {
    let directory = tempfile::tempdir().expect("a directory");
    let kubelet = create_kubelet_dir(directory.path());
    let checked =
        run_provisionerd(&["check", "--directory=/proc", "--kubelet", &kubelet, "--listen=127.0.0.1:0"]);
    assert_eq!(checked.status.code(), Some(4));
    let text = stdout_text(&checked);
    assert!(
        text.lines().all(|line| ["ok  ", "warn", "FAIL"].iter().any(|word| line.starts_with(word))),
        "{text}"
    );
    let line = |part: &str| {
        text.lines().find(|line| line.contains(part)).unwrap_or_else(|| panic!("{part}: {text}"))
    };
    assert!(line("/proc").starts_with("FAIL") && line("/proc").contains("use XFS or ext4"), "{text}");
    assert!(line("--kubeconfig").starts_with("FAIL"), "{text}");
    assert!(line("kubelet/pods exists").starts_with("ok"), "{text}");
}

/// A kubeconfig for an API server that does not run.
pub(crate) fn unreachable_kubeconfig() -> tempfile::NamedTempFile {
    let kubeconfig = tempfile::NamedTempFile::new().expect("a file");
    let config = "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
        contexts: [{name: a, context: {cluster: a, user: a}}]\n\
        clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}]\n\
        users: [{name: a, user: {}}]\n";
    std::fs::write(&kubeconfig, config).expect("written");
    kubeconfig
}

#[test]
fn an_unreachable_api_server_fails_the_check() {
    let file = unreachable_kubeconfig();
    let path = file.path().to_str().expect("UTF-8");
    let checked = run_provisionerd(&["check", "--no-csi", "--kubeconfig", path]);
    let text = stdout_text(&checked);
    let line =
        text.lines().find(|line| line.contains("call the API server")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.starts_with("FAIL") && line.contains("check that it is up"), "{line}");
}

#[test]
fn a_check_of_an_agent_without_a_kubeconfig_is_a_failed_finding() {
    let checked = run_provisionerd(&["agent", "--check"]);
    let text = stdout_text(&checked);
    assert_eq!(checked.status.code(), Some(4), "{text}{}", stderr_text(&checked));
    assert!(text.starts_with("FAIL") && text.contains("set --kubeconfig"), "{text}");
}

#[test]
fn an_unusable_kubeconfig_is_a_missing_requirement_with_its_reason_once() {
    let agent = ["agent", "--listen=127.0.0.1:0"];
    let import = ["import", "--claim=default/data", "--directory=/proc", "/nowhere/data"];
    for command in [&agent[..], &import] {
        let failed = run_provisionerd(&[command, &["--kubeconfig=/nowhere/config"]].concat());
        let text = stderr_text(&failed);
        assert_eq!(failed.status.code(), Some(4), "{text}");
        assert!(text.starts_with("provisionerd: can't read kubeconfig /nowhere/config: "), "{text}");
        assert_eq!(text.matches("No such file or directory").count(), 1, "{text}");
    }
    let without = run_provisionerd(&agent);
    let text = stderr_text(&without);
    assert_eq!(without.status.code(), Some(4), "{text}");
    assert!(text.contains("set --kubeconfig"), "{text}");
    assert_eq!(text.matches("/nowhere/.kube/config").count(), 1, "{text}");
}

#[test]
fn a_failed_start_is_one_line() {
    let none = run_provisionerd(&["run", "--directory=/nowhere/at/all", "--listen=127.0.0.1:0"]);
    assert_eq!(none.status.code(), Some(4), "{}", stderr_text(&none));
    let message = stderr_text(&none);
    assert_eq!(message.lines().filter(|line| line.starts_with("provisionerd: ")).count(), 1, "{message}");
    assert!(message.contains("/nowhere/at/all") && message.contains("--directory"), "{message}");
    let other = run_provisionerd(&["run", "--directory=/proc", "--listen=127.0.0.1:0"]);
    assert_eq!(other.status.code(), Some(4), "{}", stderr_text(&other));
    assert!(stderr_text(&other).contains("use XFS or ext4"), "{}", stderr_text(&other));
}

#[test]
fn usage_and_configuration_errors_have_different_exit_codes() {
    assert_eq!(run_provisionerd(&["run", "--driver=Not A Name"]).status.code(), Some(2));
    assert_eq!(run_provisionerd(&["run", "--directory=relative"]).status.code(), Some(3));
    let missing = run_provisionerd(&["run", "--config=/nowhere.toml"]);
    assert_eq!(missing.status.code(), Some(3));
    assert!(stderr_text(&missing).contains("/nowhere.toml"), "{}", stderr_text(&missing));
    assert!(run_provisionerd(&["completion", "bash"]).status.success());
}
