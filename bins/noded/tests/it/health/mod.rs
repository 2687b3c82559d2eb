//! What `nodectl health` says of what goes wrong, and its exit code; `nodectl status` agrees.

mod daemons;
mod disks;
mod metrics;
mod services;

use serde_json::Value;
use testbed::wait_until;

use crate::harness::{NodedProcess, TEST_TIMEOUT};

/// Without the disk of the machine that runs the tests, which may be full.
const NO_DISKS: &str = "[health]\nmin_free_percent = 0\nwarn_free_percent = 0\n";

const ENVIRONMENT: &str = "environment = { PATH = \"/usr/bin:/bin\" }";

/// The value of `nodectl -o json health`, and the exit codes of `health` and `status`.
fn ask_health(noded: &NodedProcess) -> (Value, Option<i32>, Option<i32>) {
    let output = noded.nodectl(&["-o", "json", "health"]);
    let health = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (health, output.status.code(), noded.nodectl(&["status"]).status.code())
}

/// The problem of this object, once it is reported and contains this text; by then both commands exit with 6.
fn wait_problem(noded: &NodedProcess, object: &str, problem: &str) -> Value {
    wait_until(TEST_TIMEOUT, problem, || {
        let (health, code, status_code) = ask_health(noded);
        let mut conditions = health["conditions"].as_array().unwrap().iter();
        let found = conditions
            .find(|found| found["object"] == object && found["problem"].as_str().unwrap().contains(problem));
        let Some(found) = found else { anyhow::bail!("{health}") };
        assert_eq!((code, status_code, &health["healthy"]), (Some(6), Some(6), &false.into()), "{health}");
        assert_eq!(found["severity"], "problem", "{found}");
        Ok(found.clone())
    })
    .unwrap()
}

fn wait_healthy(noded: &NodedProcess) {
    let output = noded.nodectl(&["health", "--wait", "2m"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.code() == Some(0) && text.starts_with("healthy"), "{output:?}");
}
