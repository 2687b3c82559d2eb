//! Kills the process with SIGKILL at a step, so that a test can check what remains and what the next start
//! resumes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, bail};
use nodekeel_provisioner::{StepHook, StepMoment, VolumeStep};
use rustix::process::{Signal, getpid, kill_process};

/// The moments to kill at, separated by commas: each by its name, as in `Before RenameIntoPlace`, or by its
/// number, counted from 1. Every step has two moments, before and after it. The first one reached kills.
const KILL_VARIABLE: &str = "PROVISIONERD_KILL_AT";

/// The killing hook, if the environment configures it.
pub(crate) fn kill_hook() -> Result<Option<Arc<dyn StepHook>>> {
    let Some(text) = std::env::var_os(KILL_VARIABLE) else { return Ok(None) };
    let wanted: Vec<String> = text.to_string_lossy().split(',').map(str::to_owned).collect();
    let names: Vec<String> = VolumeStep::ALL
        .into_iter()
        .flat_map(|step| [StepMoment::Before, StepMoment::After].map(|at| moment_name(at, step)))
        .collect();
    for wanted in &wanted {
        if wanted.parse::<u64>().is_err() && !names.contains(wanted) {
            bail!("invalid moment {wanted} in {KILL_VARIABLE}: use a number, or one of {}", names.join(", "));
        }
    }
    let passed = AtomicU64::new(0);
    let hook = move |step: VolumeStep, moment: StepMoment| {
        let number = passed.fetch_add(1, Ordering::Relaxed) + 1;
        let is_now = |wanted: &String| *wanted == moment_name(moment, step) || *wanted == number.to_string();
        if wanted.iter().any(is_now) {
            // Directly to stderr: the log would not be flushed.
            eprintln!("killed at {number}: {}", moment_name(moment, step));
            // SIGKILL can't be blocked: the call does not return.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    };
    Ok(Some(Arc::new(hook)))
}

fn moment_name(moment: StepMoment, step: VolumeStep) -> String {
    format!("{moment:?} {step:?}")
}
