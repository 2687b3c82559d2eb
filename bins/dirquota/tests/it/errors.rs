//! What goes wrong is said in one line, and by the exit code.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use crate::{dirquota, failed, text};

#[track_caller]
fn assert_fails(args: &[&str], code: i32, says: &str) {
    let (said, ended) = failed(args);
    assert_eq!(ended, Some(code), "{said}");
    assert!(said.starts_with("dirquota: ") && said.contains(says), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn a_directory_that_is_not_there() {
    for args in [&["show", "/no/such"][..], &["set", "/no/such", "--bytes", "1Mi"], &["clear", "/no/such"]] {
        assert_fails(args, 4, "open /no/such: No such file or directory");
    }
    assert_fails(&["check", "/no/such"], 4, "open /no/such");
}

#[test]
fn what_is_no_directory() {
    let scratch = tempfile::tempdir().unwrap();
    let (link, file) = (scratch.path().join("link"), scratch.path().join("file"));
    symlink(scratch.path(), &link).unwrap();
    File::create(&file).unwrap();
    assert_fails(&["set", text(&link), "--bytes", "1Mi"], 1, "link is a symbolic link; name a directory");
    assert_fails(&["clear", text(&file)], 1, "file is no directory; name a directory");
    assert_eq!(fs::read_link(link).unwrap(), scratch.path());
}

#[test]
fn a_file_system_without_quotas() {
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
        assert_eq!(failed(args).1, Some(2), "{args:?}");
    }
}

#[test]
fn completions_and_help_need_nothing() {
    for args in [&["completion", "bash"][..], &["completion", "fish"], &["--help"], &["--version"]] {
        let output = dirquota(args);
        assert!(output.status.success() && !output.stdout.is_empty(), "{args:?}");
    }
    let help = |args: &[&str]| String::from_utf8(dirquota(args).stdout).unwrap();
    assert!(help(&["--help"]).contains("Exit codes:"));
    let set = help(&["set", "--help"]);
    assert!(set.contains("user namespace") && set.contains("--recursive"), "{set}");
}

#[test]
fn output_that_can_not_be_written_is_a_failure_and_an_early_reader_is_none() {
    let complete = |output: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dirquota"));
        let output = command.args(["completion", "bash"]).env_clear().stdout(output).output().unwrap();
        (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
    };
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (said, code) = complete(full.into());
    assert!(code == Some(1) && said.starts_with("dirquota: write the output: "), "{code:?} {said}");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(complete(writer.into()), (String::new(), Some(0)));
}
