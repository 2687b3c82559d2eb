//! Errors are one line and an exit code.

use std::fs::{self, File};
use std::os::unix::fs::symlink;

use testbed::{ScratchDir, command_line};

use crate::{DIRQUOTA, path_text, run_dirquota, run_failing};

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
    let scratch = ScratchDir::new().unwrap();
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
    let lines = [
        &["set", "/tmp"][..],
        &["set", "/tmp", "--bytes", "10Qi"],
        &["set", "/tmp", "--bytes=-1"],
        &["set", "--bytes", "1Mi"],
        &["show"],
        &["dance"],
    ];
    command_line::assert_rejects_usage(DIRQUOTA.as_ref(), &lines);
}

#[test]
fn completions_and_help_need_no_file_system() {
    command_line::assert_prints_help(DIRQUOTA.as_ref());
    let set = String::from_utf8(run_dirquota(&["set", "--help"]).stdout).unwrap();
    assert!(set.contains("user namespace") && set.contains("--recursive"), "{set}");
}

#[test]
fn a_write_error_is_a_failure_and_a_closed_pipe_is_not() {
    command_line::assert_reports_write_errors(DIRQUOTA.as_ref());
}
