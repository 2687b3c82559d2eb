//! Ends the program with SIGKILL at a step, so that a test can see what is left behind and taken up again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result};
use nodekeel_provisioner::{Hook, Moment, Step};
use rustix::process::{Signal, getpid, kill_process};

/// The number of the moment, counted from 1: every step has two, before and after it.
const VARIABLE: &str = "PROVISIONERD_KILL_AT";

/// What kills, where the environment asks for it.
pub(crate) fn hook() -> Result<Option<Arc<dyn Hook>>> {
    let Some(text) = std::env::var_os(VARIABLE) else { return Ok(None) };
    let text = text.to_string_lossy();
    let at: u64 = text.parse().with_context(|| format!("read {VARIABLE}={text}"))?;
    let passed = AtomicU64::new(0);
    let hook = move |step: Step, moment: Moment| {
        if passed.fetch_add(1, Ordering::Relaxed) + 1 == at {
            // To stderr without the log, which nobody would flush.
            eprintln!("killed at {at}: {moment:?} {step:?}");
            let _ = kill_process(getpid(), Signal::KILL);
        }
    };
    Ok(Some(Arc::new(hook)))
}
