//! An operation that is killed or fails at any system call leaves the old state or the new one, and can be
//! repeated.

use std::cell::Cell;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use nodekeel_localstorage::step_journal::StepJournal;
use nodekeel_localstorage::testing::{SyscallAction, with_failpoint_hook};
use nodekeel_localstorage::{Dir, FileMode};
use rustix::io::Errno;
use rustix::process::{Signal, getpid, kill_process};

use crate::fixture::{assigned_task, raw_names, run_in_child, temp_base};

mod scenarios;
mod traced;

pub(crate) use scenarios::{ALL, Scenario};

/// A directory for one scenario, removed on drop.
struct ScenarioFixture {
    _temporary: tempfile::TempDir,
    dir: Dir,
}

impl ScenarioFixture {
    fn new(scenario: &Scenario, base: &Path) -> Self {
        let temporary = tempfile::tempdir_in(base).unwrap();
        let fixture = Self { dir: Self::open_work_dir(temporary.path()), _temporary: temporary };
        (scenario.prepare)(&fixture.dir);
        fixture
    }

    /// Next to this directory the scenario records acknowledged states.
    fn open_work_dir(path: &Path) -> Dir {
        Dir::open(path).and_then(|dir| dir.ensure_dir("work", FileMode::PRIVATE_DIR)).unwrap()
    }

    fn path(&self) -> &Path {
        self.dir.path().parent().expect("the path has a parent")
    }

    fn temp_files(&self) -> Vec<String> {
        let names = raw_names(self.dir.path());
        names.into_iter().filter(|name| name.starts_with(".nodekeel-")).collect()
    }

    fn finish_scenario(&self, scenario: &Scenario, what: &str) {
        (scenario.work)(&self.dir).unwrap_or_else(|error| panic!("{what}, repeated: {error:#}"));
        self.dir.remove_stale_files().unwrap();
        (scenario.is_sound)(&self.dir);
        (scenario.is_done)(&self.dir);
        assert_eq!(self.temp_files(), [""; 0], "{what}");
    }
}

/// Counts the calls, and applies an action to each. Writes are split into pieces.
fn count_calls<R>(
    scenario: &Scenario,
    mut verdict: impl FnMut(u32) -> SyscallAction + 'static,
    work: impl FnOnce() -> R,
) -> (R, u32) {
    let count = Rc::new(Cell::new(0));
    let (counter, piece) = (Rc::clone(&count), scenario.write_bytes);
    let hook = move |_call: &'static str| {
        counter.set(counter.get() + 1);
        match verdict(counter.get()) {
            SyscallAction::Proceed => SyscallAction::ShortWrite(piece),
            other => other,
        }
    };
    let result = with_failpoint_hook(hook, work);
    (result, count.get())
}

/// The child process: runs the work until it kills itself. Without a task, it runs all scenarios.
#[test]
fn the_worker_runs_until_it_is_killed() {
    let Some(task) = assigned_task() else {
        for scenario in ALL {
            ScenarioFixture::new(scenario, &temp_base()).finish_scenario(scenario, scenario.name);
        }
        return;
    };
    let words: Vec<&str> = task.splitn(3, ' ').collect();
    let (scenario, nth) = (scenarios::find_scenario(words[0]), words[1].parse::<u32>().expect("a number"));
    let dir = ScenarioFixture::open_work_dir(Path::new(words[2]));
    let kill = move |count| {
        if count == nth {
            kill_process(getpid(), Signal::KILL).expect("the process kills itself");
        }
        SyscallAction::Proceed
    };
    count_calls(scenario, kill, || (scenario.work)(&dir)).0.unwrap();
}

/// The calls at which the work is killed or fails.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CallSelection {
    /// All calls.
    All,
    /// A sample, chosen by the seed.
    Sample { most: usize, seed: u64 },
}

impl CallSelection {
    /// A sample, or the selection by `NODEKEEL_KILLS` and `NODEKEEL_SEED`. `cargo xtask test` sets
    /// `NODEKEEL_KILLS=all`, which selects every call.
    pub(crate) fn sample(most: usize) -> Self {
        let number = |text: String| text.parse().expect("a number");
        let seed = std::env::var("NODEKEEL_SEED").map_or(1, number);
        match std::env::var("NODEKEEL_KILLS").as_deref() {
            Ok("all") => Self::All,
            Ok(most) => Self::Sample { most: most.parse().expect("a number or \"all\""), seed },
            Err(_) => Self::Sample { most, seed },
        }
    }

    /// The selected calls of the work in order, and the total number of its calls.
    fn select_calls(self, scenario: &Scenario, base: &Path) -> (Vec<u32>, u32) {
        let fixture = ScenarioFixture::new(scenario, base);
        let (done, total) =
            count_calls(scenario, |_| SyscallAction::Proceed, || (scenario.work)(&fixture.dir));
        done.unwrap();
        (scenario.is_done)(&fixture.dir);
        let mut points: Vec<u32> = (1..=total).collect();
        if let Self::Sample { most, seed } = self {
            points.sort_by_cached_key(|nth| {
                let mut hasher = DefaultHasher::new();
                (seed, scenario.name, nth).hash(&mut hasher);
                hasher.finish()
            });
            points.truncate(most);
            points.sort_unstable();
        }
        (points, total)
    }
}

/// Kills the work before its selected system calls, in one process each. Returns the number of its calls.
pub(crate) fn kill_at_calls(scenario: &Scenario, base: &Path, points: CallSelection) -> u32 {
    let (points, total) = points.select_calls(scenario, base);
    let start = Instant::now();
    for nth in &points {
        let fixture = ScenarioFixture::new(scenario, base);
        let task = format!("{} {nth} {}", scenario.name, fixture.path().display());
        let status = run_in_child("matrix::the_worker_runs_until_it_is_killed", &task);
        let what = format!("{} killed before call {nth}", scenario.name);
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{what}: {status}");
        (scenario.is_sound)(&fixture.dir);
        fixture.finish_scenario(scenario, &what);
    }
    println!("{}: killed before {} of {total} calls in {:.1?}", scenario.name, points.len(), start.elapsed());
    total
}

/// Makes selected system calls fail, alone or with all later ones. Returns the number of calls of the work.
pub(crate) fn fail_at_calls(scenario: &Scenario, base: &Path, points: CallSelection) -> u32 {
    let (points, total) = points.select_calls(scenario, base);
    let (start, mut failures) = (Instant::now(), 0);
    for errno in [Errno::IO, Errno::NOSPC] {
        for is_lasting in [false, true] {
            for &nth in &points {
                let fixture = ScenarioFixture::new(scenario, base);
                let fail = move |count| match count {
                    _ if count == nth || (is_lasting && count > nth) => {
                        SyscallAction::Fail(errno.raw_os_error())
                    }
                    _ => SyscallAction::Proceed,
                };
                let (result, _) = count_calls(scenario, fail, || (scenario.work)(&fixture.dir));
                let what = format!("{}, {errno:?} at call {nth} (lasting: {is_lasting})", scenario.name);
                assert!(result.is_err(), "{what}: the failure is not reported");
                (scenario.is_sound)(&fixture.dir);
                if !is_lasting {
                    assert_eq!(
                        fixture.temp_files().len(),
                        scenario.remaining_stale_files(&fixture.dir),
                        "{what}: temporary files remain"
                    );
                }
                fixture.finish_scenario(scenario, &what);
                failures += 1;
            }
        }
    }
    let (name, calls) = (scenario.name, points.len());
    println!("{name}: {failures} failures at {calls} of {total} calls in {:.1?}", start.elapsed());
    total
}

/// The maximum number of selected calls: all calls of each scenario but the removal, which has some hundred
/// of the same kind.
const SAMPLE_CALLS: usize = 150;

/// The minimum number of calls of each scenario: fewer would mean that calls bypass the failpoints.
macro_rules! matrix {
    ($($name:ident: $least:expr;)*) => {
        mod killed_at_every_call {
            $(#[test]
            fn $name() {
                let scenario = super::scenarios::find_scenario(stringify!($name));
                let points = super::CallSelection::sample(super::SAMPLE_CALLS);
                let calls = super::kill_at_calls(scenario, &crate::fixture::temp_base(), points);
                assert!(calls >= $least, "{calls} calls");
            })*
        }

        mod failing_at_every_call {
            $(#[test]
            fn $name() {
                let scenario = super::scenarios::find_scenario(stringify!($name));
                let points = super::CallSelection::sample(super::SAMPLE_CALLS);
                let calls = super::fail_at_calls(scenario, &crate::fixture::temp_base(), points);
                assert!(calls >= $least, "{calls} calls");
            })*
        }

        #[test]
        fn every_scenario_is_run() {
            let run = [$(stringify!($name)),*];
            assert_eq!(ALL.iter().map(|scenario| scenario.name).collect::<Vec<_>>(), run);
        }
    };
}

matrix! {
    replace: 17;
    create: 8;
    ensure_dirs: 13;
    change: 18;
    rename: 5;
    remove: 330;
    remove_stale: 18;
    journal: 136;
    steps: 46;
}

/// Checks that files on a full file system stay complete; a file of `large` bytes does not fit.
pub(crate) fn check_full_file_system(dir: &Dir, large: usize) {
    let old = vec![1; 1000];
    dir.write("file", &old, FileMode::PRIVATE_FILE).expect("the file system has free space");
    let mut journal = StepJournal::open(dir, "journal").unwrap();
    for content in [[1; 100], [2; 100]] {
        journal.commit(&content).expect("the file system has free space");
    }
    let filled = fill_file_system(dir, large);
    for size in [large, 100_000] {
        let error =
            dir.write("file", &vec![2; size], FileMode::PRIVATE_FILE).expect_err("the file system is full");
        assert!(error.is_full(), "{error:?}");
        assert_eq!(dir.read("file").unwrap(), old);
    }
    assert!(raw_names(dir.path()).iter().all(|name| !name.starts_with(".nodekeel-")));
    let error = journal.commit(&vec![3; 1 << 20]).expect_err("the file system is full");
    assert!(error.is_full(), "{error:?}");
    assert_eq!(journal.committed_state(), Some(&[2; 100][..]));
    for content in [[4; 100], [5; 100], [6; 100]] {
        journal.commit(&content).expect("the slots keep their blocks");
    }
    drop(journal);
    assert_eq!(StepJournal::open(dir, "journal").unwrap().committed_state(), Some(&[6; 100][..]));
    for index in 0..filled {
        assert!(dir.remove_file(format!("fill-{index}")).unwrap());
    }
    dir.write("file", &[3; 100_000], FileMode::PRIVATE_FILE).expect("the file system has free space again");
}

/// Writes files until no file of 4 KiB fits; returns how many.
fn fill_file_system(dir: &Dir, large: usize) -> usize {
    let (mut size, mut count) = (large, 0);
    while size >= 4096 {
        match dir.write(format!("fill-{count}"), &vec![0; size], FileMode::PRIVATE_FILE) {
            Ok(()) => count += 1,
            Err(error) => {
                assert!(error.is_full(), "{error:?}");
                size /= 2;
            }
        }
    }
    count
}
