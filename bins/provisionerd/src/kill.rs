//! Ends the program with SIGKILL at a step, so that a test can see what is left behind and taken up again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, bail};
use nodekeel_provisioner::{Hook, Moment, Step};
use rustix::process::{Signal, getpid, kill_process};

/// When: by the moment's name, as in `Before Publish`, or its number counted from 1. Every step has two moments, before
/// and after it.
const VARIABLE: &str = "PROVISIONERD_KILL_AT";

/// What kills, where the environment asks for it.
pub(crate) fn hook() -> Result<Option<Arc<dyn Hook>>> {
    let Some(text) = std::env::var_os(VARIABLE) else { return Ok(None) };
    let wanted = text.to_string_lossy().into_owned();
    let names =
        || Step::ALL.into_iter().flat_map(|step| [Moment::Before, Moment::After].map(|at| name(at, step)));
    if wanted.parse::<u64>().is_err() && !names().any(|name| name == wanted) {
        bail!(
            "{VARIABLE}={wanted} is no moment: use a number, or one of {}",
            names().collect::<Vec<_>>().join(", ")
        );
    }
    let passed = AtomicU64::new(0);
    let hook = move |step: Step, moment: Moment| {
        let number = passed.fetch_add(1, Ordering::Relaxed) + 1;
        if wanted == name(moment, step) || wanted == number.to_string() {
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
