//! What it says, and with which exit code, where something is missing.

use std::path::Path;
use std::process::{Command, Output};

fn provisionerd(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
    command.args(arguments).env_clear();
    // A place without a kubeconfig and without the files of a service account.
    command.env("HOME", "/nowhere").env("NODE_NAME", "node-a");
    command.output().expect("it runs")
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn kubelet(directory: &Path) -> String {
    for below in ["pods", "plugins_registry"] {
        std::fs::create_dir_all(directory.join("kubelet").join(below)).expect("create");
    }
    directory.join("kubelet").display().to_string()
}

#[test]
fn the_shipped_configuration_is_printed_and_can_be_used() {
    let printed = provisionerd(&["--print-config"]);
    assert!(printed.status.success());
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("provisionerd.toml");
    std::fs::write(&file, &printed.stdout).expect("write");
    let kubelet = kubelet(directory.path());
    let checked = provisionerd(&["check", "--config", file.to_str().expect("UTF-8"), "--kubelet", &kubelet]);
    assert!(out(&checked).contains("this is node node-a"), "{}", err(&checked));
}

#[test]
fn a_check_has_a_line_for_each_finding_and_says_what_to_do() {
    let directory = tempfile::tempdir().expect("a directory");
    let kubelet = kubelet(directory.path());
    let checked =
        provisionerd(&["check", "--directory=/proc", "--kubelet", &kubelet, "--listen=127.0.0.1:0"]);
    assert_eq!(checked.status.code(), Some(4));
    let text = out(&checked);
    assert!(
        text.lines().all(|line| ["ok  ", "warn", "FAIL"].iter().any(|word| line.starts_with(word))),
        "{text}"
    );
    let line = |part: &str| {
        text.lines().find(|line| line.contains(part)).unwrap_or_else(|| panic!("{part}: {text}"))
    };
    assert!(line("/proc").starts_with("FAIL") && line("/proc").contains("use XFS or ext4"), "{text}");
    assert!(line("--kubeconfig").starts_with("FAIL"), "{text}");
    assert!(line("kubelet/pods is there").starts_with("ok"), "{text}");
}

#[test]
fn an_unreachable_api_is_told() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("kubeconfig");
    let config = "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
        contexts: [{name: a, context: {cluster: a, user: a}}]\n\
        clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}]\n\
        users: [{name: a, user: {}}]\n";
    std::fs::write(&file, config).expect("write");
    let checked = provisionerd(&["check", "--no-csi", "--kubeconfig", file.to_str().expect("UTF-8")]);
    let text = out(&checked);
    let line =
        text.lines().find(|line| line.contains("ask the API server")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.starts_with("FAIL") && line.contains("is it up"), "{line}");
}

#[test]
fn what_keeps_it_from_starting_is_one_line() {
    let none = provisionerd(&["run", "--directory=/nowhere/at/all", "--listen=127.0.0.1:0"]);
    assert_eq!(none.status.code(), Some(4), "{}", err(&none));
    let told = err(&none);
    assert_eq!(told.lines().filter(|line| line.starts_with("provisionerd: ")).count(), 1, "{told}");
    assert!(told.contains("/nowhere/at/all") && told.contains("--directory"), "{told}");
    let other = provisionerd(&["run", "--directory=/proc", "--listen=127.0.0.1:0"]);
    assert_eq!(other.status.code(), Some(4), "{}", err(&other));
    assert!(err(&other).contains("use XFS or ext4"), "{}", err(&other));
}

#[test]
fn wrong_words_have_codes_of_their_own() {
    assert_eq!(provisionerd(&["run", "--driver=Not A Name"]).status.code(), Some(2));
    assert_eq!(provisionerd(&["run", "--directory=relative"]).status.code(), Some(3));
    let missing = provisionerd(&["run", "--config=/nowhere.toml"]);
    assert_eq!(missing.status.code(), Some(3));
    assert!(err(&missing).contains("/nowhere.toml"), "{}", err(&missing));
    assert!(provisionerd(&["completion", "bash"]).status.success());
}
