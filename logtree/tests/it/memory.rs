//! The memory of a process that has a store, as the kernel counts it.

use std::process::{Command, Stdio};

use nodekeel_logtree::{LogLimits, LogStore};
use testbed::process_cost::anonymous_kib;

use crate::support::*;

/// Set in the process that is measured, which is this test again: other tests share the memory of this one.
const MEASURED: &str = "NODEKEEL_TEST_MEMORY_OF_STORE";
const TOTAL_BYTES: usize = 16 << 20;

#[test]
fn memory_of_a_process_with_many_names_is_at_most_a_quarter_more_than_its_store_may_have() {
    if std::env::var_os(MEASURED).is_some() {
        return measure();
    }
    let test =
        "memory::memory_of_a_process_with_many_names_is_at_most_a_quarter_more_than_its_store_may_have";
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(MEASURED, "1").stdin(Stdio::null());
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let kib = text.lines().find_map(|line| line.strip_prefix("resident KiB: ")?.parse::<usize>().ok());
    let kib = kib.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
    assert!(kib << 10 <= TOTAL_BYTES / 4 * 5, "{kib} KiB");
}

/// Writes a line under more names than the store can keep.
fn measure() {
    let store = LogStore::new(LogLimits { total_bytes: TOTAL_BYTES, ..LogLimits::default() });
    let before = anonymous_kib(std::process::id()).unwrap();
    (0..25_000).for_each(|number| append_info(&store, &format!("n{number}"), "the only line"));
    println!("\nresident KiB: {}", anonymous_kib(std::process::id()).unwrap() - before);
}
