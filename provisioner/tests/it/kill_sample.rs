//! Processes that are killed, and the moments of the kills: a sample by a seed, or all.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Mutex};

use nodekeel_provisioner::{DirStoreOptions, StepHook, StepMoment, VolumeStep};
use rustix::process::{Signal, getpid, kill_process};

/// Kills at every moment if it is `all`, else at so many, which `NODEKEEL_SEED` chooses.
const KILLS_VARIABLE: &str = "NODEKEEL_STORE_KILLS";
const SAMPLE: usize = 5;

/// The numbers of the moments at which a process is killed, of so many in the life that is named.
pub(crate) fn choose_moments(life: &str, count: usize) -> Vec<usize> {
    let sample = match std::env::var(KILLS_VARIABLE).as_deref() {
        Ok("all") => count,
        Ok(number) => number.parse().expect("a number, or all"),
        Err(_) => SAMPLE,
    };
    let seed = std::env::var("NODEKEEL_SEED").map_or(1, |seed| seed.parse::<u64>().expect("a number"));
    let mut moments: Vec<usize> = (0..count).collect();
    moments.sort_by_cached_key(|moment| {
        let mut hasher = DefaultHasher::new();
        (seed, life, moment).hash(&mut hasher);
        hasher.finish()
    });
    moments.truncate(sample);
    moments
}

/// The names of moments, as a store passes them.
pub(crate) type PassedMoments = Arc<Mutex<Vec<String>>>;

/// Options of a store that records its moments.
pub(crate) fn recording_options() -> (DirStoreOptions, PassedMoments) {
    let (mut options, passed) = (DirStoreOptions::default(), PassedMoments::default());
    let seen = Arc::clone(&passed);
    options.hook = Some(Arc::new(move |step: VolumeStep, moment: StepMoment| {
        seen.lock().expect("not poisoned").push(format!("{moment:?} {step:?}"));
    }));
    (options, passed)
}

/// Options of a store that kills its process at the moment with this number.
pub(crate) fn killing_options(moment: usize) -> DirStoreOptions {
    let (mut options, left) = (DirStoreOptions::default(), Mutex::new(moment));
    options.hook = Some(Arc::new(move |_: VolumeStep, _: StepMoment| {
        let mut left = left.lock().expect("not poisoned");
        match left.checked_sub(1) {
            Some(less) => *left = less,
            None => {
                let _ = kill_process(getpid(), Signal::KILL);
            }
        }
    }));
    options
}

/// The order to a process that is to be killed; the test `child` of a module carries it out.
pub(crate) struct KillOrder {
    pub(crate) base: PathBuf,
    /// The number of a moment, or its name, as in `Before RenameIntoPlace`.
    pub(crate) moment: String,
    /// Which of several lives it has; may be empty.
    pub(crate) life: String,
}

const BASE: &str = "NODEKEEL_KILLED_BASE";
const MOMENT: &str = "NODEKEEL_KILLED_MOMENT";
const LIFE: &str = "NODEKEEL_KILLED_LIFE";

impl KillOrder {
    /// `None` in a process of the test runner.
    pub(crate) fn of_this_process() -> Option<Self> {
        let variable = |name| std::env::var(name).ok();
        Some(Self { base: variable(BASE)?.into(), moment: variable(MOMENT)?, life: variable(LIFE)? })
    }
}

/// Runs the test `child` of a module in a process that is killed.
pub(crate) fn run_child(module: &str, base: &Path, moment: &str, life: &str) -> ExitStatus {
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", &format!("{module}::child")]);
    child.env(BASE, base).env(MOMENT, moment).env(LIFE, life);
    child.output().expect("a child").status
}

/// Kills this process at a moment.
pub(crate) fn kill_at(wanted: String) -> Arc<dyn StepHook> {
    Arc::new(move |step: VolumeStep, moment: StepMoment| {
        if format!("{moment:?} {step:?}") == wanted {
            let _ = kill_process(getpid(), Signal::KILL);
        }
    })
}
