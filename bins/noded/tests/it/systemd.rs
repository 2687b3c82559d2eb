//! The systemd unit that is shipped.

use std::fs;
use std::path::Path;
use std::process::Command;

use testbed::ScratchDir;

use crate::harness::{nodectl_path, noded_command};

const UNIT: &str = include_str!("../../../../deploy/systemd/noded.service");

/// The value of a key.
fn value(key: &str) -> &'static str {
    let line = UNIT.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    line.unwrap_or_else(|| panic!("no {key}"))
}

#[test]
fn the_commands_of_the_unit_are_commands_of_the_programs() {
    let run: Vec<_> = value("ExecStart").split(' ').skip(1).collect();
    // The configuration is not there, so that a valid command line fails with its error.
    let output = noded_command(&run).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(3) && error.contains("/etc/nodekeel/noded.toml"), "{error}");
    let reload: Vec<_> = value("ExecReload").split(' ').skip(1).collect();
    let mut nodectl = Command::new(nodectl_path());
    let output = nodectl.args(reload).env("NODEKEEL_SOCKET", "/nonexistent/control.sock").output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "needs systemd"]
fn systemd_accepts_the_unit() {
    let scratch = ScratchDir::new().unwrap();
    let unit = scratch.path().join("noded.service");
    let noded = Path::new(env!("CARGO_BIN_EXE_noded"));
    let installed = UNIT
        .replace("/usr/local/bin/noded", noded.to_str().unwrap())
        .replace("/usr/local/bin/nodectl", nodectl_path().to_str().unwrap());
    fs::write(&unit, installed).unwrap();
    let output = Command::new("systemd-analyze").arg("verify").arg(&unit).output().unwrap();
    let messages = String::from_utf8_lossy(&output.stderr);
    // systemd 254 introduced it.
    let is_known = |line: &&str| !line.contains("'DelegateSubgroup'");
    let unexpected: Vec<_> = messages.lines().filter(is_known).collect();
    assert!(output.status.success() && unexpected.is_empty(), "{unexpected:#?}");
}
