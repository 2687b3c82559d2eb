//! Guards of the tree's restraint: it does not wake up, and use tasks, clocks or IO in the state machine.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nodekeel_supervisor::testing::{RemoteRunnable, settle};

use crate::harness::TestTree;

// Under the paused clock every timer advances time by itself, so an hour of rest becomes an hour of ticks for
// any task that ticks. The runtime counts how often it went to sleep in between.
#[tokio::test(start_paused = true)]
async fn an_idle_tree_causes_no_wakeups() {
    let children: [RemoteRunnable; 3] = Default::default();
    let _tree = TestTree::with_group(&[("a", &children[0]), ("b", &children[1]), ("c", &children[2])]);
    for child in &children {
        child.signal_ready().await;
    }
    settle().await;
    let metrics = tokio::runtime::Handle::current().metrics();
    let before = metrics.worker_park_count(0);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let parked = metrics.worker_park_count(0) - before;
    // An hour passes through five levels of tokio's timer wheel.
    assert!(parked <= 6, "the runtime went to sleep {parked} times in an hour in which nothing happened");
}

#[test]
fn the_state_machine_has_no_tasks_no_clock_and_no_io() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files: Vec<PathBuf> = std::fs::read_dir(source.join("fsm"))
        .expect("the state machine has a directory")
        .map(|entry| entry.expect("the entry is readable").path())
        .filter(|path| path.is_file() && !path.to_string_lossy().ends_with("_test.rs"))
        .collect();
    files.push(source.join("fsm.rs"));
    assert!(files.len() > 5, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a source file");
        for foreign in [
            "tokio",
            "Instant",
            "SystemTime",
            "std::fs",
            "std::io",
            "std::thread",
            "std::env",
            "async ",
            "crate::driver",
            "crate::context",
            "crate::process::",
        ] {
            assert!(!text.contains(foreign), "{} names {foreign}", file.display());
        }
    }
}
