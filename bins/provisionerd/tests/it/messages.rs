//! Messages and exit codes for missing requirements.

use std::fs;
use std::process::Command;

use tempfile::NamedTempFile;
use testbed::{ScratchDir, UNREACHABLE_KUBECONFIG};

/// A kubeconfig of an API server that does not answer.
pub(crate) fn unreachable_kubeconfig() -> NamedTempFile {
    let file = NamedTempFile::new().expect("a file");
    fs::write(file.path(), UNREACHABLE_KUBECONFIG).expect("written");
    file
}

/// Runs provisionerd, whose home has no kubeconfig; gives its exit code, output and errors.
fn run_provisionerd(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
    command.args(arguments).env_clear().env("HOME", "/nowhere").env("NODE_NAME", "node-a");
    let output = command.output().expect("provisionerd runs");
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
    (output.status.code(), stdout, stderr)
}

#[test]
fn a_check_prints_a_line_with_a_hint_for_each_finding() {
    let scratch = ScratchDir::new().expect("a directory");
    let path = |name: &str| scratch.path().join(name).display().to_string();
    for below in ["kubelet/pods", "kubelet/plugins_registry"] {
        fs::create_dir_all(path(below)).expect("a directory");
    }
    fs::write(path("kubeconfig"), UNREACHABLE_KUBECONFIG).expect("written");
    // The shipped configuration can be used as it is printed.
    let (code, printed, errors) = run_provisionerd(&["--print-config"]);
    assert_eq!(code, Some(0), "{errors}");
    fs::write(path("provisionerd.toml"), printed).expect("written");
    let [config, kubelet, kubeconfig] = ["provisionerd.toml", "kubelet", "kubeconfig"].map(path);
    for (arguments, findings) in [
        (&["--config", &config, "--kubelet", &kubelet][..], &[("this is node node-a", "", "")][..]),
        (
            &["--directory=/proc", "--listen=127.0.0.1:0", "--kubelet", &kubelet],
            &[
                ("/proc", "FAIL", "use XFS or ext4"),
                ("--kubeconfig", "FAIL", ""),
                ("kubelet/pods exists", "ok", ""),
            ],
        ),
        (
            &["--no-csi", "--kubeconfig", &kubeconfig],
            &[("call the API server", "FAIL", "check that it is up")],
        ),
    ] {
        let (_, text, _) = run_provisionerd(&[&["check"][..], arguments].concat());
        let is_finding = |line: &str| ["ok  ", "warn", "FAIL"].iter().any(|word| line.starts_with(word));
        assert!(text.lines().all(is_finding), "{text}");
        for (about, word, hint) in findings {
            let line =
                text.lines().find(|line| line.contains(about)).unwrap_or_else(|| panic!("{about}: {text}"));
            assert!(line.starts_with(word) && line.contains(hint), "{line}");
        }
    }
    let (code, text, _) = run_provisionerd(&["agent", "--check"]);
    assert_eq!(code, Some(4), "{text}");
    assert!(text.starts_with("FAIL") && text.contains("set --kubeconfig"), "{text}");
}

#[test]
fn an_error_has_its_exit_code_and_its_reason_once() {
    const NO_FILE: &str = "No such file or directory";
    const KUBECONFIG: &str = "--kubeconfig=/nowhere/config";
    let import = ["import", "--claim=default/data", "--directory=/proc", "/nowhere/data", KUBECONFIG];
    let listen = "--listen=127.0.0.1:0";
    for (arguments, code, texts, once) in [
        (&["run", "--driver=Not A Name"][..], 2, &[][..], "error: "),
        (&["run", "--directory=relative"], 3, &[], "provisionerd: "),
        (&["run", "--config=/nowhere.toml"], 3, &["/nowhere.toml"], "provisionerd: "),
        (
            &["run", "--directory=/nowhere/at/all", listen],
            4,
            &["/nowhere/at/all", "--directory"],
            "provisionerd: ",
        ),
        (&["run", "--directory=/proc", listen], 4, &["use XFS or ext4"], "provisionerd: "),
        (
            &["agent", listen, KUBECONFIG],
            4,
            &["provisionerd: can't read kubeconfig /nowhere/config: "],
            NO_FILE,
        ),
        (&import, 4, &["provisionerd: can't read kubeconfig /nowhere/config: "], NO_FILE),
        (&["agent", listen], 4, &["set --kubeconfig"], "/nowhere/.kube/config"),
    ] {
        let (found, _, errors) = run_provisionerd(arguments);
        assert_eq!(found, Some(code), "{arguments:?}: {errors}");
        texts.iter().for_each(|text| assert!(errors.contains(text), "{arguments:?}: {errors}"));
        assert_eq!(errors.matches(once).count(), 1, "{arguments:?}: {errors}");
    }
}

#[test]
fn the_help_the_version_and_completions_are_printed() {
    testbed::command_line::assert_prints_help(env!("CARGO_BIN_EXE_provisionerd").as_ref());
}
