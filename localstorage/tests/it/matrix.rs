//! What is killed, or fails, at every system call, leaves the old state or the new one, and can be done again.

use std::cell::Cell;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use nodekeel_localstorage::journal::Journal;
use nodekeel_localstorage::testing::{Verdict, with_hook};
use nodekeel_localstorage::{Dir, Mode};
use rustix::io::Errno;
use rustix::process::{Signal, getpid, kill_process};

use crate::bed::{base, raw_names, run_alone, task};

mod scenarios;

pub(crate) use scenarios::{ALL, Scenario};

/// A place for one scenario, gone when this is dropped.
struct Bed {
    _temporary: tempfile::TempDir,
    dir: Dir,
}

impl Bed {
    fn new(scenario: &Scenario, base: &Path) -> Self {
        let temporary = tempfile::tempdir_in(base).expect("a directory");
        let bed = Self { dir: Self::open(temporary.path()), _temporary: temporary };
        (scenario.prepare)(&bed.dir);
        bed
    }

    /// Beside the directory is a place to keep what was promised.
    fn open(path: &Path) -> Dir {
        Dir::open(path).and_then(|dir| dir.ensure_dir("work", Mode::PRIVATE_DIR)).expect("it is made")
    }

    fn path(&self) -> &Path {
        self.dir.path().parent().expect("it is in another")
    }

    fn siblings(&self) -> Vec<String> {
        let names = raw_names(self.dir.path());
        names.into_iter().filter(|name| name.starts_with(".nodekeel-")).collect()
    }

    fn finish(&self, scenario: &Scenario, what: &str) {
        (scenario.work)(&self.dir).unwrap_or_else(|error| panic!("{what}, done again: {error:#}"));
        self.dir.sweep().expect("it sweeps");
        (scenario.is_sound)(&self.dir);
        (scenario.is_done)(&self.dir);
        assert_eq!(self.siblings(), [""; 0], "{what}");
    }
}

/// Counts the calls, and asks what becomes of each. Writes are cut into pieces.
fn counted<R>(
    scenario: &Scenario,
    mut verdict: impl FnMut(u32) -> Verdict + 'static,
    work: impl FnOnce() -> R,
) -> (R, u32) {
    let count = Rc::new(Cell::new(0));
    let (counter, piece) = (Rc::clone(&count), scenario.piece);
    let hook = move |_call: &'static str| {
        counter.set(counter.get() + 1);
        match verdict(counter.get()) {
            Verdict::Go => Verdict::Short(piece),
            other => other,
        }
    };
    let result = with_hook(hook, work);
    (result, count.get())
}

/// What a process of its own does: the work, until it kills itself. Without a task, all the work.
#[test]
fn works_until_it_is_killed() {
    let Some(task) = task() else {
        for scenario in ALL {
            Bed::new(scenario, &base()).finish(scenario, scenario.name);
        }
        return;
    };
    let words: Vec<&str> = task.splitn(3, ' ').collect();
    let (scenario, nth) = (scenarios::named(words[0]), words[1].parse::<u32>().expect("a number"));
    let dir = Bed::open(Path::new(words[2]));
    let kill = move |count| {
        if count == nth {
            kill_process(getpid(), Signal::KILL).expect("it kills itself");
        }
        Verdict::Go
    };
    counted(scenario, kill, || (scenario.work)(&dir)).0.expect("nothing fails");
}

/// At which of its calls work is killed, or fails.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Points {
    /// At each.
    All,
    /// At so many of them, chosen by the seed.
    Sample { most: usize, seed: u64 },
}

impl Points {
    /// A sample, or what `NODEKEEL_KILLS` and `NODEKEEL_SEED` say: `NODEKEEL_KILLS=all` is each, and what
    /// `cargo xtask test` asks for.
    pub(crate) fn sample(most: usize) -> Self {
        let number = |text: String| text.parse().expect("a number");
        let seed = std::env::var("NODEKEEL_SEED").map_or(1, number);
        match std::env::var("NODEKEEL_KILLS").as_deref() {
            Ok("all") => Self::All,
            Ok(most) => Self::Sample { most: most.parse().expect("a number, or all"), seed },
            Err(_) => Self::Sample { most, seed },
        }
    }

    /// Those of the work, in their order, and how many calls it has.
    fn of(self, scenario: &Scenario, base: &Path) -> (Vec<u32>, u32) {
        let bed = Bed::new(scenario, base);
        let (done, total) = counted(scenario, |_| Verdict::Go, || (scenario.work)(&bed.dir));
        done.expect("nothing fails");
        (scenario.is_done)(&bed.dir);
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

/// Kills the work before its system calls, one process for each. Returns how many calls it has.
pub(crate) fn kill(scenario: &Scenario, base: &Path, points: Points) -> u32 {
    let (points, total) = points.of(scenario, base);
    let start = Instant::now();
    for nth in &points {
        let bed = Bed::new(scenario, base);
        let task = format!("{} {nth} {}", scenario.name, bed.path().display());
        let status = run_alone("matrix::works_until_it_is_killed", &task);
        let what = format!("{} killed before call {nth}", scenario.name);
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{what}: {status}");
        (scenario.is_sound)(&bed.dir);
        bed.finish(scenario, &what);
    }
    println!("{}: killed before {} of {total} calls in {:.1?}", scenario.name, points.len(), start.elapsed());
    total
}

/// Lets system calls fail, alone or with all that follow. Returns how many calls the work has.
pub(crate) fn fail(scenario: &Scenario, base: &Path, points: Points) -> u32 {
    let (points, total) = points.of(scenario, base);
    let (start, mut failures) = (Instant::now(), 0);
    for errno in [Errno::IO, Errno::NOSPC] {
        for is_lasting in [false, true] {
            for &nth in &points {
                let bed = Bed::new(scenario, base);
                let fail = move |count| match count {
                    _ if count == nth || (is_lasting && count > nth) => Verdict::Fail(errno.raw_os_error()),
                    _ => Verdict::Go,
                };
                let (result, _) = counted(scenario, fail, || (scenario.work)(&bed.dir));
                let what = format!("{}, {errno:?} at call {nth} (lasting: {is_lasting})", scenario.name);
                assert!(result.is_err(), "{what}: it is not reported");
                (scenario.is_sound)(&bed.dir);
                if !is_lasting {
                    assert_eq!(bed.siblings().len(), scenario.stale(&bed.dir), "{what}: it cleans up");
                }
                bed.finish(scenario, &what);
                failures += 1;
            }
        }
    }
    let (name, calls) = (scenario.name, points.len());
    println!("{name}: {failures} failures at {calls} of {total} calls in {:.1?}", start.elapsed());
    total
}

/// At how many of its calls, at most, each work is killed and fails: all of each but the removal, whose some hundred are of
/// one kind.
const SAMPLE: usize = 150;

/// The calls of each scenario, at least: fewer would say that the failpoints are not asked any more.
macro_rules! matrix {
    ($($name:ident: $least:expr;)*) => {
        mod killed_at_every_call {
            $(#[test]
            fn $name() {
                let scenario = super::scenarios::named(stringify!($name));
                let points = super::Points::sample(super::SAMPLE);
                let calls = super::kill(scenario, &crate::bed::base(), points);
                assert!(calls >= $least, "{calls} calls");
            })*
        }

        mod failing_at_every_call {
            $(#[test]
            fn $name() {
                let scenario = super::scenarios::named(stringify!($name));
                let points = super::Points::sample(super::SAMPLE);
                let calls = super::fail(scenario, &crate::bed::base(), points);
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
    rename: 5;
    remove: 330;
    sweep: 18;
    journal: 136;
    steps: 46;
}

/// What is on a full file system stays whole; a file of `large` bytes doesn't fit.
pub(crate) fn stays_whole_when_full(dir: &Dir, large: usize) {
    let old = vec![1; 1000];
    dir.write("file", &old, Mode::PRIVATE_FILE).expect("there is space");
    let mut journal = Journal::open(dir, "journal").expect("it opens");
    for content in [[1; 100], [2; 100]] {
        journal.commit(&content).expect("there is space");
    }
    let filled = fill(dir, large);
    for size in [large, 100_000] {
        let error = dir.write("file", &vec![2; size], Mode::PRIVATE_FILE).expect_err("it is full");
        assert!(error.is_full(), "{error:?}");
        assert_eq!(dir.read("file").expect("it is there"), old);
    }
    assert!(raw_names(dir.path()).iter().all(|name| !name.starts_with(".nodekeel-")));
    let error = journal.commit(&vec![3; 1 << 20]).expect_err("it is full");
    assert!(error.is_full(), "{error:?}");
    assert_eq!(journal.state(), Some(&[2; 100][..]));
    for content in [[4; 100], [5; 100], [6; 100]] {
        journal.commit(&content).expect("its files keep their blocks");
    }
    drop(journal);
    assert_eq!(Journal::open(dir, "journal").expect("it opens").state(), Some(&[6; 100][..]));
    for index in 0..filled {
        assert!(dir.remove_file(format!("fill-{index}")).expect("it is removed"));
    }
    dir.write("file", &[3; 100_000], Mode::PRIVATE_FILE).expect("there is space again");
}

/// Writes files until none of 4 KiB fits; how many.
fn fill(dir: &Dir, large: usize) -> usize {
    let (mut size, mut count) = (large, 0);
    while size >= 4096 {
        match dir.write(format!("fill-{count}"), &vec![0; size], Mode::PRIVATE_FILE) {
            Ok(()) => count += 1,
            Err(error) => {
                assert!(error.is_full(), "{error:?}");
                size /= 2;
            }
        }
    }
    count
}
