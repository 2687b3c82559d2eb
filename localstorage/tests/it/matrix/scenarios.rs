//! Work that is killed, or fails.

use std::fs;

use anyhow::{Result, ensure};
use nodekeel_localstorage::journal::{Journal, Steps};
use nodekeel_localstorage::{Dir, Mode, Rename};

use crate::bed::raw_names;

/// Work that can be killed at any point and done again.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// How many bytes a write writes at once.
    pub(crate) piece: usize,
    pub(crate) prepare: fn(&Dir),
    pub(crate) work: fn(&Dir) -> Result<()>,
    /// Checks what holds at any moment.
    pub(crate) is_sound: fn(&Dir),
    /// Checks what holds when the work is done.
    pub(crate) is_done: fn(&Dir),
}

impl Scenario {
    /// How many stale siblings a failure may leave: those that were there and were not swept.
    pub(crate) fn stale(&self, dir: &Dir) -> usize {
        if self.name != "sweep" {
            return 0;
        }
        raw_names(dir.path()).iter().filter(|name| STALE.contains(&name.as_str())).count()
    }
}

pub(crate) const ALL: &[Scenario] = &[REPLACE, CREATE, ENSURE_DIRS, RENAME, REMOVE, SWEEP, JOURNAL, STEPS];

pub(crate) fn named(name: &str) -> &'static Scenario {
    ALL.iter().find(|scenario| scenario.name == name).expect("it is known")
}

fn write(dir: &Dir, path: &str, content: &[u8]) {
    dir.write(path, content, Mode::PRIVATE_FILE).expect("it is written");
}

/// vfat has none.
fn has_modes(dir: &Dir) -> bool {
    const MSDOS_SUPER_MAGIC: i64 = 0x4d44;
    rustix::fs::fstatfs(dir).expect("it is mounted").f_type as i64 != MSDOS_SUPER_MAGIC
}

const OLD: (&[u8], Mode) = (&[b'o'; 5000], Mode::new(0o640));
const NEW: (&[u8], Mode) = (&[b'n'; 9000], Mode::new(0o604));

fn content(dir: &Dir, path: &str) -> (Vec<u8>, Mode) {
    (dir.read(path).expect("it is there"), dir.metadata(path).expect("it is there").mode)
}

fn is(dir: &Dir, path: &str, expected: (&[u8], Mode)) -> bool {
    let (content, mode) = content(dir, path);
    content == expected.0 && (mode == expected.1 || !has_modes(dir))
}

const REPLACE: Scenario = Scenario {
    name: "replace",
    piece: 1000,
    prepare: |dir| {
        let below = dir.ensure_dir("a/b", Mode::PRIVATE_DIR).expect("it is made");
        below.write("file", OLD.0, OLD.1).expect("it is written");
    },
    work: |dir| Ok(dir.write("a/b/file", NEW.0, NEW.1)?),
    is_sound: |dir| assert!(is(dir, "a/b/file", OLD) || is(dir, "a/b/file", NEW)),
    is_done: |dir| {
        assert!(is(dir, "a/b/file", NEW));
        dir.open_dir("a/b").and_then(|below| below.sweep()).expect("it sweeps");
        assert_eq!(raw_names(&dir.path().join("a/b")), ["file"]);
    },
};

const CREATE: Scenario = Scenario {
    name: "create",
    piece: usize::MAX,
    prepare: |_| {},
    work: |dir| Ok(dir.write("file", NEW.0, NEW.1)?),
    is_sound: |dir| assert!(!dir.exists("file").expect("it can be told") || is(dir, "file", NEW)),
    is_done: |dir| {
        assert!(is(dir, "file", NEW));
        dir.sweep().expect("it sweeps");
        assert_eq!(raw_names(dir.path()), ["file"]);
    },
};

const ENSURE_DIRS: Scenario = Scenario {
    name: "ensure_dirs",
    piece: usize::MAX,
    prepare: |_| {},
    work: |dir| Ok(dir.ensure_dir("a/b/c", Mode::new(0o750)).map(drop)?),
    is_sound: |_| {},
    is_done: |dir| {
        for path in ["a", "a/b", "a/b/c"] {
            let mode = dir.metadata(path).expect("it is there").mode;
            assert!(mode == Mode::new(0o750) || !has_modes(dir), "{path}: {mode}");
        }
    },
};

const RENAME: Scenario = Scenario {
    name: "rename",
    piece: usize::MAX,
    prepare: |dir| {
        for path in ["x", "y"] {
            dir.ensure_dir(path, Mode::PRIVATE_DIR).expect("it is made");
        }
        write(dir, "x/file", b"content");
    },
    work: |dir| {
        let to = dir.open_dir("y")?;
        match dir.rename("x/file", &to, "moved", Rename::Exclusive) {
            Err(error) if error.is_not_found() => ensure!(to.exists("moved")?, "it is nowhere"),
            renamed => renamed?,
        }
        Ok(())
    },
    is_sound: |dir| {
        let [old, new] = ["x/file", "y/moved"].map(|path| dir.read(path).ok());
        assert!(old.is_some() != new.is_some(), "it is in one place");
        assert_eq!(old.or(new).expect("it is in one place"), b"content");
    },
    is_done: |dir| assert!(dir.exists("y/moved").expect("it can be told")),
};

const REMOVE: Scenario = Scenario {
    name: "remove",
    piece: usize::MAX,
    prepare: |dir| {
        write(dir, "kept", b"kept");
        // Deeper than what is held open of it. Nobody has to find it after a crash, so it is made without a sync: there are
        // as many of them as there are calls to kill.
        let mut path = dir.path().join("tree");
        for level in 0..36 {
            fs::create_dir(&path).expect("it is made");
            fs::write(path.join("file"), "").expect("it is written");
            path.push(level.to_string());
        }
    },
    work: |dir| Ok(dir.remove_tree("tree").map(drop)?),
    is_sound: |dir| assert_eq!(dir.read("kept").expect("it is there"), b"kept"),
    is_done: |dir| assert_eq!(raw_names(dir.path()), ["kept"]),
};

const STALE: [&str; 3] =
    [".nodekeel-0000000000000001.new", ".nodekeel-0000000000000002.new", ".nodekeel-0000000000000003.new"];

const SWEEP: Scenario = Scenario {
    name: "sweep",
    piece: usize::MAX,
    prepare: |dir| {
        write(dir, "kept", b"kept");
        for name in STALE {
            fs::write(dir.path().join(name), "stale").expect("it is written");
        }
    },
    work: |dir| Ok(dir.sweep().map(drop)?),
    is_sound: |dir| assert_eq!(dir.read("kept").expect("it is there"), b"kept"),
    is_done: |dir| assert_eq!(raw_names(dir.path()), ["kept"]),
};

/// The number of the last state that was reported as committed, kept where nothing is killed or fails.
fn acknowledged(dir: &Dir) -> usize {
    let text = fs::read_to_string(dir.path().with_file_name("acknowledged")).unwrap_or_default();
    text.parse().unwrap_or(0)
}

fn acknowledge(dir: &Dir, number: usize) {
    fs::write(dir.path().with_file_name("acknowledged"), number.to_string()).expect("it is written");
}

/// The state with that number.
fn state(number: usize) -> Vec<u8> {
    format!("{number}{}", "x".repeat(number)).into_bytes()
}

fn recorded(journal: &Journal) -> usize {
    let Some(content) = journal.state() else { return 0 };
    (1..=3).find(|&number| state(number) == content).expect("it is one of the states, whole")
}

const JOURNAL: Scenario = Scenario {
    name: "journal",
    // Each of them is torn at each byte.
    piece: 1,
    prepare: |_| {},
    work: |dir| {
        let mut journal = Journal::open(dir, "journal")?;
        for number in recorded(&journal) + 1..=3 {
            journal.commit(&state(number))?;
            acknowledge(dir, number);
        }
        Ok(())
    },
    is_sound: |dir| {
        let recorded = recorded(&Journal::open(dir, "journal").expect("it opens"));
        let acknowledged = acknowledged(dir);
        let range = acknowledged..=acknowledged + 1;
        assert!(range.contains(&recorded), "{recorded} is recorded, {acknowledged} was reported");
    },
    is_done: |dir| {
        assert_eq!(recorded(&Journal::open(dir, "journal").expect("it opens")), 3);
        assert_eq!(raw_names(dir.path()), ["journal.0", "journal.1"]);
    },
};

const NAMES: [&str; 3] = ["first", "second", "third"];

const STEPS: Scenario = Scenario {
    name: "steps",
    piece: 50,
    prepare: |_| {},
    work: |dir| {
        let steps = Steps::try_new(NAMES)?;
        let mut run = steps.start(Journal::open(dir, "steps")?, b"0")?;
        while let Some(step) = run.step().map(str::to_owned) {
            let number: usize = std::str::from_utf8(run.state())?.parse()?;
            ensure!(NAMES[number] == step, "step {step} has the state {number}");
            dir.write(&step, b"", Mode::PRIVATE_FILE)?;
            run.done((number + 1).to_string())?;
            acknowledge(dir, number + 1);
        }
        Ok(())
    },
    is_sound: |dir| {
        let done = NAMES.map(|name| dir.exists(name).expect("it can be told"));
        let count = done.iter().filter(|is_done| **is_done).count();
        assert!(done.is_sorted_by(|one, next| one >= next), "they are done in order: {done:?}");
        let acknowledged = acknowledged(dir);
        assert!((acknowledged..=acknowledged + 1).contains(&count), "{count} done, {acknowledged} reported");
    },
    is_done: |dir| {
        let run = Steps::try_new(NAMES)
            .expect("a good list")
            .start(Journal::open(dir, "steps").expect("it opens"), b"");
        let run = run.expect("it is about these steps");
        assert_eq!(run.step(), None);
        assert_eq!(run.state(), b"3");
    },
};
