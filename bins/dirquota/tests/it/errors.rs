//! Errors are one line and an exit code.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use crate::{path_text, run_dirquota, run_failing};

#[track_caller]
fn assert_fails(args: &[&str], code: i32, message: &str) {
    let (stderr, exit) = run_failing(args);
    assert_eq!(exit, Some(code), "{stderr}");
    assert!(stderr.starts_with("dirquota: ") && stderr.contains(message), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

#[test]
fn a_missing_directory_exits_with_4() {
    for args in [&["show", "/no/such"][..], &["set", "/no/such", "--bytes", "1Mi"], &["clear", "/no/such"]] {
        assert_fails(args, 4, "open directory /no/such: No such file or directory");
    }
    assert_fails(&["check", "/no/such"], 4, "open /no/such");
}

#[test]
fn links_and_files_are_rejected_as_directories() {
    let scratch = tempfile::tempdir().unwrap();
    let (link, file) = (scratch.path().join("link"), scratch.path().join("file"));
    symlink(scratch.path(), &link).unwrap();
    File::create(&file).unwrap();
    assert_fails(&["set", path_text(&link), "--bytes", "1Mi"], 1, "link is a symbolic link: use a directory");
    assert_fails(&["clear", path_text(&file)], 1, "file is not a directory: use a directory");
    assert_eq!(fs::read_link(link).unwrap(), scratch.path());
}

#[test]
fn a_file_system_without_quotas_exits_with_3() {
    for args in [&["check", "/proc"][..], &["list", "/proc"], &["set", "/proc", "--bytes", "1Mi"]] {
        assert_fails(args, 3, "/proc is on proc, which has no project quotas: use XFS or ext4");
    }
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        &["set", "/tmp"][..],
        &["set", "/tmp", "--bytes", "10Qi"],
        &["set", "/tmp", "--bytes=-1"],
        &["set", "--bytes", "1Mi"],
        &["show"],
        &["dance"],
    ] {
        assert_eq!(run_failing(args).1, Some(2), "{args:?}");
    }
}

#[test]
fn completions_and_help_need_no_file_system() {
    for args in [&["completion", "bash"][..], &["completion", "fish"], &["--help"], &["--version"]] {
        let output = run_dirquota(args);
        assert!(output.status.success() && !output.stdout.is_empty(), "{args:?}");
    }
    let help = |args: &[&str]| String::from_utf8(run_dirquota(args).stdout).unwrap();
    assert!(help(&["--help"]).contains("Exit codes:"));
    let set = help(&["set", "--help"]);
    assert!(set.contains("user namespace") && set.contains("--recursive"), "{set}");
}

#[test]
fn a_write_error_is_a_failure_and_a_closed_pipe_is_not() {
    let complete = |output: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dirquota"));
        let output = command.args(["completion", "bash"]).env_clear().stdout(output).output().unwrap();
        (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
    };
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (stderr, code) = complete(full.into());
    assert!(code == Some(1) && stderr.starts_with("dirquota: can't write the output: "), "{code:?} {stderr}");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(complete(writer.into()), (String::new(), Some(0)));
}
