//! The scenarios that are killed or fail.

use std::fs;

use anyhow::{Result, ensure};
use nodekeel_localstorage::step_journal::{StepJournal, StepList};
use nodekeel_localstorage::{Dir, FileMode, RenameMode};

use super::traced::show_mark;
use crate::fixture::raw_names;

/// Work that can be killed at any point and repeated.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// The maximum number of bytes per write.
    pub(crate) write_bytes: usize,
    pub(crate) prepare: fn(&Dir),
    pub(crate) work: fn(&Dir) -> Result<()>,
    /// Checks the invariants of every moment.
    pub(crate) is_sound: fn(&Dir),
    /// Checks the result of the completed work.
    pub(crate) is_done: fn(&Dir),
}

impl Scenario {
    /// The number of stale files that a failure may leave: the prepared ones that were not removed yet.
    pub(crate) fn remaining_stale_files(&self, dir: &Dir) -> usize {
        if self.name != "remove_stale" {
            return 0;
        }
        raw_names(dir.path()).iter().filter(|name| STALE.contains(&name.as_str())).count()
    }
}

pub(crate) const ALL: &[Scenario] =
    &[REPLACE, CREATE, ENSURE_DIRS, CHANGE, RENAME, REMOVE, REMOVE_STALE, JOURNAL, STEPS];

pub(crate) fn find_scenario(name: &str) -> &'static Scenario {
    ALL.iter().find(|scenario| scenario.name == name).expect("the scenario exists")
}

fn write(dir: &Dir, path: &str, content: &[u8]) {
    dir.write(path, content, FileMode::PRIVATE_FILE).unwrap();
}

/// Whether the file system keeps modes; vfat does not.
fn has_modes(dir: &Dir) -> bool {
    const MSDOS_SUPER_MAGIC: i64 = 0x4d44;
    rustix::fs::fstatfs(dir).unwrap().f_type as i64 != MSDOS_SUPER_MAGIC
}

const OLD: (&[u8], FileMode) = (&[b'o'; 5000], FileMode::new(0o640));
const NEW: (&[u8], FileMode) = (&[b'n'; 9000], FileMode::new(0o604));

fn content(dir: &Dir, path: &str) -> (Vec<u8>, FileMode) {
    (dir.read(path).unwrap(), dir.metadata(path).unwrap().mode)
}

fn has_content(dir: &Dir, path: &str, expected: (&[u8], FileMode)) -> bool {
    let (content, mode) = content(dir, path);
    content == expected.0 && (mode == expected.1 || !has_modes(dir))
}

const REPLACE: Scenario = Scenario {
    name: "replace",
    write_bytes: 1000,
    prepare: |dir| {
        let below = dir.ensure_dir("a/b", FileMode::PRIVATE_DIR).unwrap();
        below.write("file", OLD.0, OLD.1).unwrap();
    },
    work: |dir| Ok(dir.write("a/b/file", NEW.0, NEW.1)?),
    is_sound: |dir| assert!(has_content(dir, "a/b/file", OLD) || has_content(dir, "a/b/file", NEW)),
    is_done: |dir| {
        assert!(has_content(dir, "a/b/file", NEW));
        dir.open_dir("a/b").and_then(|below| below.remove_stale_files()).unwrap();
        assert_eq!(raw_names(&dir.path().join("a/b")), ["file"]);
    },
};

const CREATE: Scenario = Scenario {
    name: "create",
    write_bytes: usize::MAX,
    prepare: |_| {},
    work: |dir| Ok(dir.write("file", NEW.0, NEW.1)?),
    is_sound: |dir| assert!(!dir.exists("file").unwrap() || has_content(dir, "file", NEW)),
    is_done: |dir| {
        assert!(has_content(dir, "file", NEW));
        dir.remove_stale_files().unwrap();
        assert_eq!(raw_names(dir.path()), ["file"]);
    },
};

const ENSURE_DIRS: Scenario = Scenario {
    name: "ensure_dirs",
    write_bytes: usize::MAX,
    prepare: |_| {},
    work: |dir| Ok(dir.ensure_dir("a/b/c", FileMode::new(0o750)).map(drop)?),
    is_sound: |_| {},
    is_done: |dir| {
        for path in ["a", "a/b", "a/b/c"] {
            let mode = dir.metadata(path).unwrap().mode;
            assert!(mode == FileMode::new(0o750) || !has_modes(dir), "{path}: {mode}");
        }
    },
};

const CHANGE: Scenario = Scenario {
    name: "change",
    write_bytes: usize::MAX,
    prepare: |dir| {
        write(dir, "file", b"content");
        for path in ["dir", "empty"] {
            dir.ensure_dir(path, FileMode::PRIVATE_DIR).unwrap();
        }
    },
    work: |dir| {
        dir.open_or_create_file("dir/lock", FileMode::new(0o640))?;
        dir.set_mode("file", FileMode::new(0o444))?;
        dir.set_mode("dir", FileMode::new(0o711))?;
        dir.set_owner("file", dir.metadata("")?.owner())?;
        Ok(dir.remove_empty_dir("empty").map(drop)?)
    },
    is_sound: |dir| assert_eq!(dir.read("file").unwrap(), b"content"),
    is_done: |dir| {
        let mode = |path| dir.metadata(path).unwrap().mode.bits();
        assert!(!has_modes(dir) || ["dir/lock", "file", "dir"].map(mode) == [0o640, 0o444, 0o711]);
        assert_eq!(raw_names(dir.path()), ["dir", "file"]);
    },
};

const RENAME: Scenario = Scenario {
    name: "rename",
    write_bytes: usize::MAX,
    prepare: |dir| {
        for path in ["x", "y"] {
            dir.ensure_dir(path, FileMode::PRIVATE_DIR).unwrap();
        }
        write(dir, "x/file", b"content");
    },
    work: |dir| {
        let to = dir.open_dir("y")?;
        match dir.rename("x/file", &to, "moved", RenameMode::NoReplace) {
            Err(error) if error.is_not_found() => ensure!(to.exists("moved")?, "it is nowhere"),
            renamed => renamed?,
        }
        Ok(())
    },
    is_sound: |dir| {
        let [old, new] = ["x/file", "y/moved"].map(|path| dir.read(path).ok());
        assert!(old.is_some() != new.is_some(), "the entry exists exactly once");
        assert_eq!(old.or(new).expect("the entry exists exactly once"), b"content");
    },
    is_done: |dir| assert!(dir.exists("y/moved").unwrap()),
};

const REMOVE: Scenario = Scenario {
    name: "remove",
    write_bytes: usize::MAX,
    prepare: |dir| {
        write(dir, "kept", b"kept");
        // Deeper than the levels that stay open. The tree need not survive a crash, so it is created without
        // a sync: the test creates one for each selected call.
        let mut path = dir.path().join("tree");
        for level in 0..36 {
            fs::create_dir(&path).unwrap();
            fs::write(path.join("file"), "").unwrap();
            path.push(level.to_string());
        }
    },
    work: |dir| Ok(dir.remove_tree("tree").map(drop)?),
    is_sound: |dir| assert_eq!(dir.read("kept").unwrap(), b"kept"),
    is_done: |dir| assert_eq!(raw_names(dir.path()), ["kept"]),
};

const STALE: [&str; 3] =
    [".nodekeel-0000000000000001.new", ".nodekeel-0000000000000002.new", ".nodekeel-0000000000000003.new"];

const REMOVE_STALE: Scenario = Scenario {
    name: "remove_stale",
    write_bytes: usize::MAX,
    prepare: |dir| {
        write(dir, "kept", b"kept");
        for name in STALE {
            fs::write(dir.path().join(name), "stale").unwrap();
        }
    },
    work: |dir| Ok(dir.remove_stale_files().map(drop)?),
    is_sound: |dir| assert_eq!(dir.read("kept").unwrap(), b"kept"),
    is_done: |dir| assert_eq!(raw_names(dir.path()), ["kept"]),
};

/// The number of the last acknowledged state, recorded outside of the failpoints.
fn acknowledged_number(dir: &Dir) -> usize {
    let text = fs::read_to_string(dir.path().with_file_name("acknowledged")).unwrap_or_default();
    text.parse().unwrap_or(0)
}

fn acknowledge(dir: &Dir, number: usize) {
    show_mark("outside");
    fs::write(dir.path().with_file_name("acknowledged"), number.to_string()).unwrap();
    show_mark("inside");
}

/// The state with that number.
fn numbered_state(number: usize) -> Vec<u8> {
    format!("{number}{}", "x".repeat(number)).into_bytes()
}

fn recorded_number(journal: &StepJournal) -> usize {
    let Some(content) = journal.committed_state() else { return 0 };
    (1..=3)
        .find(|&number| numbered_state(number) == content)
        .expect("the state is one of the committed states")
}

const JOURNAL: Scenario = Scenario {
    name: "journal",
    // Each write is torn at each byte.
    write_bytes: 1,
    prepare: |_| {},
    work: |dir| {
        let mut journal = StepJournal::open(dir, "journal")?;
        for number in recorded_number(&journal) + 1..=3 {
            journal.commit(&numbered_state(number))?;
            acknowledge(dir, number);
        }
        Ok(())
    },
    is_sound: |dir| {
        let recorded = recorded_number(&StepJournal::open(dir, "journal").unwrap());
        let acknowledged = acknowledged_number(dir);
        let range = acknowledged..=acknowledged + 1;
        assert!(range.contains(&recorded), "{recorded} is recorded, {acknowledged} was reported");
    },
    is_done: |dir| {
        assert_eq!(recorded_number(&StepJournal::open(dir, "journal").unwrap()), 3);
        assert_eq!(raw_names(dir.path()), ["journal.0", "journal.1"]);
    },
};

const NAMES: [&str; 3] = ["first", "second", "third"];

const STEPS: Scenario = Scenario {
    name: "steps",
    write_bytes: 50,
    prepare: |_| {},
    work: |dir| {
        let steps = StepList::try_new(NAMES)?;
        let mut run = steps.start_run(StepJournal::open(dir, "steps")?, b"0")?;
        while let Some(step) = run.current_step().map(str::to_owned) {
            let number: usize = std::str::from_utf8(run.recorded_state())?.parse()?;
            ensure!(NAMES[number] == step, "step {step} has the state {number}");
            dir.write(&step, b"", FileMode::PRIVATE_FILE)?;
            run.complete_step((number + 1).to_string())?;
            acknowledge(dir, number + 1);
        }
        Ok(())
    },
    is_sound: |dir| {
        let done = NAMES.map(|name| dir.exists(name).unwrap());
        let count = done.iter().filter(|is_done| **is_done).count();
        assert!(done.is_sorted_by(|one, next| one >= next), "the steps run in order: {done:?}");
        let acknowledged = acknowledged_number(dir);
        assert!((acknowledged..=acknowledged + 1).contains(&count), "{count} done, {acknowledged} reported");
    },
    is_done: |dir| {
        let run = StepList::try_new(NAMES).unwrap().start_run(StepJournal::open(dir, "steps").unwrap(), b"");
        let run = run.expect("the journal contains these steps");
        assert_eq!(run.current_step(), None);
        assert_eq!(run.recorded_state(), b"3");
    },
};
