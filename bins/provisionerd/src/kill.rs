//! Ends the program with SIGKILL at a step, so that a test can see what is left behind and taken up again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, bail};
use nodekeel_provisioner::{Hook, Moment, Step};
use rustix::process::{Signal, getpid, kill_process};

/// When: at the first of these moments, between commas, each by its name, as in `Before Publish`, or its number counted
/// from 1. Every step has two moments, before and after it.
const VARIABLE: &str = "PROVISIONERD_KILL_AT";

/// What kills, where the environment asks for it.
pub(crate) fn hook() -> Result<Option<Arc<dyn Hook>>> {
    let Some(text) = std::env::var_os(VARIABLE) else { return Ok(None) };
    let wanted: Vec<String> = text.to_string_lossy().split(',').map(str::to_owned).collect();
    let names: Vec<String> = Step::ALL
        .into_iter()
        .flat_map(|step| [Moment::Before, Moment::After].map(|at| name(at, step)))
        .collect();
    for wanted in &wanted {
        if wanted.parse::<u64>().is_err() && !names.contains(wanted) {
            bail!("{VARIABLE}: {wanted} is no moment: use a number, or one of {}", names.join(", "));
        }
    }
    let passed = AtomicU64::new(0);
    let hook = move |step: Step, moment: Moment| {
        let number = passed.fetch_add(1, Ordering::Relaxed) + 1;
        let is_now = |wanted: &String| *wanted == name(moment, step) || *wanted == number.to_string();
        if wanted.iter().any(is_now) {
            // To stderr without the log, which nobody would flush.
            eprintln!("killed at {number}: {}", name(moment, step));
            let _ = kill_process(getpid(), Signal::KILL);
        }
    };
    Ok(Some(Arc::new(hook)))
}

fn name(moment: Moment, step: Step) -> String {
    format!("{moment:?} {step:?}")
}
