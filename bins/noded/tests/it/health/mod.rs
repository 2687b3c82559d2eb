//! `nodectl health` of each problem, and its exit code; `nodectl status` agrees.

mod agreement;
mod daemons;
mod disks;
mod metrics;
mod services;

use serde_json::Value;

use crate::harness::{NodedProcess, wait};

/// The value of `nodectl -o json health`, and the exit codes of `health` and `status`.
fn ask_health(noded: &NodedProcess) -> (Value, Option<i32>, Option<i32>) {
    let ended = noded.nodectl(&["-o", "json", "health"]);
    (ended.json(), ended.code, noded.nodectl(&["status"]).code)
}

/// The problem of this object, once it is reported and contains this text; by then both commands exit with 6.
pub(crate) fn wait_problem(noded: &NodedProcess, object: &str, problem: &str) -> Value {
    wait(problem, || {
        let (health, code, status_code) = ask_health(noded);
        let mut conditions = health["conditions"].as_array().unwrap().iter();
        let found = conditions
            .find(|found| found["object"] == object && found["problem"].as_str().unwrap().contains(problem));
        let Some(found) = found else { anyhow::bail!("{health}") };
        assert_eq!((code, status_code, &health["healthy"]), (Some(6), Some(6), &false.into()), "{health}");
        assert_eq!(found["severity"], "problem", "{found}");
        Ok(found.clone())
    })
}

pub(crate) fn wait_healthy(noded: &NodedProcess) {
    let text = noded.nodectl(&["health", "--wait", "2m"]).output();
    assert!(text.starts_with("healthy"), "{text}");
}
