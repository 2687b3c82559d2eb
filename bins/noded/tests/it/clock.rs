//! Steps of the wall clock, as a board without a battery makes them when it learns the time.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use prost_types::Timestamp;
use serde_json::Value;
use testbed::ScratchDir;

use crate::harness::{NO_DAEMONS, NO_DISKS, NodedProcess, service_config};

const SERVICE: &str = "root.service.a";
const THREE_YEARS: u64 = 3 * 365 * 86_400;

/// A library that lets the wall clock of a program be ahead by the size of a file.
fn build_clock(target: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clock.c");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(target).arg(source).status();
    assert!(built.unwrap().success());
}

/// The times of one moment, as each command shows them: the service's start.
fn shown_times(node: &NodedProcess) -> Vec<(&'static str, i64)> {
    let of_service = |command: &[&str]| -> Vec<Value> {
        let lines = node.ask(&[&["-o", "json"], command].concat());
        let entries = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        entries.filter(|entry| entry["dn"] == SERVICE).collect()
    };
    let status = node.status(SERVICE);
    let events = of_service(&["events"]);
    let started = events.iter().find(|event| event["change"] == "started").unwrap();
    let log = of_service(&["logs", SERVICE]);
    let seconds = |value: &Value| value.as_str().unwrap().parse::<Timestamp>().unwrap().seconds;
    let process = status["process_since"].clone();
    [
        ("status", &status["since"]),
        ("process", &process),
        ("events", &started["at"]),
        ("logs", &log[0]["time"]),
    ]
    .map(|(name, value)| (name, seconds(value)))
    .to_vec()
}

#[test]
fn a_step_of_the_clock_moves_all_shown_times_alike_and_nothing_else() {
    let scratch = ScratchDir::new().unwrap();
    let (library, ahead) = (scratch.path().join("clock.so"), scratch.path().join("ahead"));
    build_clock(&library);
    let file = File::create(&ahead).unwrap();
    let config = format!("{NO_DAEMONS}{NO_DISKS}{}", service_config("a", "echo up; exec sleep 1000", ""));
    let mut node = NodedProcess::spawn(scratch, &config, &[], |command| {
        command.env("LD_PRELOAD", library).env("CLOCK_FILE", &ahead);
    });
    node.wait_for_line("control socket at");
    node.follow(&["logs", "-f", SERVICE]).find_value(|entry| entry["text"] == "up");
    node.wait_for_event(SERVICE, 1, "ready");
    let steps = [
        (0, None),
        (THREE_YEARS, Some("was set forward by 1095 d")),
        (86_400, Some("was set back by 1094 d")),
        (0, Some("was set back by 1 d")),
    ];
    for (step, problem) in steps {
        file.set_len(step).unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() + step;
        for (command, seconds) in shown_times(&node) {
            let age = i64::try_from(now).unwrap() - seconds;
            assert!((-5..120).contains(&age), "{command}, {step} s ahead: {age} s ago");
        }
        let recent = node.ask(&["logs", SERVICE]);
        assert_eq!(recent.lines().count(), 1, "{recent}");
        let health = node.ask_json(&["health"]);
        let conditions = health["conditions"].as_array().unwrap();
        assert!(!conditions.iter().any(|condition| condition["part"] == SERVICE), "{health}");
        let found = conditions.iter().find(|condition| condition["object"] == "wall clock");
        assert_eq!(found.map(|found| found["problem"].as_str().unwrap()), problem, "{health}");
    }
    // Its restart comes after its first start, whatever the clock shows.
    node.ask(&["restart", "--wait", SERVICE]);
    file.set_len(86_400).unwrap();
    let events = node.ask(&["-o", "json", "events"]);
    for (_, problem) in steps {
        assert!(events.contains(problem.unwrap_or_default()), "{problem:?}: {events}");
    }
    let times = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["at"].to_string());
    assert!(times.is_sorted(), "{events}");
    node.stop();
}
