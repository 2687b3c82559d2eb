//! Random operations have the results, and leave the trees, that a model in memory says.

use std::collections::BTreeMap;
use std::path::Path;

use nodekeel_localstorage::mem::MemPlacement;
use nodekeel_localstorage::{Dir, Error, FileKind, Mode, OsPlacement, Placement, Rename};
use proptest::prelude::*;

use crate::bed::scratch;

#[derive(Clone, Debug)]
enum Operation {
    Write(String, Vec<u8>, u32),
    EnsureDir(String, u32),
    Read(String),
    List(String),
    Remove(String),
    RemoveFile(String),
    Rename(String, String, bool),
}

fn paths() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4).prop_map(|names| names.join("/"))
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let mode = || prop::sample::select(vec![0o700, 0o755, 0o740]);
    let one = prop_oneof![
        3 => (paths(), prop::collection::vec(any::<u8>(), 0..20), mode())
            .prop_map(|(path, content, mode)| Operation::Write(path, content, mode)),
        3 => (paths(), mode()).prop_map(|(path, mode)| Operation::EnsureDir(path, mode)),
        1 => paths().prop_map(Operation::Read),
        1 => paths().prop_map(Operation::List),
        1 => paths().prop_map(Operation::Remove),
        1 => paths().prop_map(Operation::RemoveFile),
        2 => (paths(), paths(), any::<bool>()).prop_map(|(from, to, taken)| Operation::Rename(from, to, taken)),
    ];
    prop::collection::vec(one, 1..30)
}

/// What the caller can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    WasThere(bool),
    Content(Vec<u8>),
    Names(Vec<(String, FileKind)>),
    NotFound,
    NotADirectory,
    NotAFile,
    Other,
}

fn outcome<T>(result: Result<T, Error>, done: impl FnOnce(T) -> Outcome) -> Outcome {
    match result {
        Ok(value) => done(value),
        Err(error) if error.is_not_found() => Outcome::NotFound,
        Err(error) if error.is_not_a_directory() => Outcome::NotADirectory,
        Err(error) if error.is_not_a_file() => Outcome::NotAFile,
        Err(_) => Outcome::Other,
    }
}

fn names(entries: Vec<nodekeel_localstorage::Entry>) -> Outcome {
    Outcome::Names(entries.into_iter().map(|entry| (entry.name.to_string(), entry.kind)).collect())
}

fn apply_to_dir(dir: &Dir, operation: &Operation) -> Outcome {
    match operation {
        Operation::Write(path, content, mode) => {
            outcome(dir.write(path, content, Mode::new(*mode)), |()| Outcome::Done)
        }
        Operation::EnsureDir(path, mode) => {
            outcome(dir.ensure_dir(path, Mode::new(*mode)), |_| Outcome::Done)
        }
        Operation::Read(path) => outcome(dir.read(path), Outcome::Content),
        Operation::List(path) => outcome(dir.open_dir(path).and_then(|below| below.list()), names),
        Operation::Remove(path) => outcome(dir.remove_tree(path), Outcome::WasThere),
        Operation::RemoveFile(path) => outcome(dir.remove_file(path), Outcome::WasThere),
        Operation::Rename(from, to, is_exclusive) => {
            let taken = if *is_exclusive { Rename::Exclusive } else { Rename::Replace };
            outcome(dir.rename(from, dir, to, taken), |()| Outcome::Done)
        }
    }
}

/// Paths with what they are: the content of a file, or none of a directory; and the mode.
#[derive(Debug, Default, PartialEq, Eq)]
struct Model(BTreeMap<String, (Option<Vec<u8>>, u32)>);

fn above(path: &str) -> Vec<String> {
    path.match_indices('/').map(|(at, _)| path[..at].to_owned()).collect()
}

impl Model {
    /// What is in the way of what would be there.
    fn check_above(&self, path: &str) -> Result<(), Outcome> {
        for above in above(path) {
            match self.0.get(&above) {
                Some((None, _)) => {}
                Some((Some(_), _)) => return Err(Outcome::NotADirectory),
                None => return Err(Outcome::NotFound),
            }
        }
        Ok(())
    }

    fn is_dir(&self, path: &str) -> Option<bool> {
        self.0.get(path).map(|(content, _)| content.is_none())
    }

    fn below(&self, path: &str) -> Vec<String> {
        let prefix = format!("{path}/");
        self.0.keys().filter(|key| key.starts_with(&prefix)).cloned().collect()
    }

    fn apply(&mut self, operation: &Operation) -> Outcome {
        self.try_apply(operation).unwrap_or_else(|failed| failed)
    }

    fn try_apply(&mut self, operation: &Operation) -> Result<Outcome, Outcome> {
        match operation {
            Operation::Write(path, content, mode) => {
                self.check_above(path)?;
                if self.is_dir(path) == Some(true) {
                    return Err(Outcome::NotAFile);
                }
                self.0.insert(path.clone(), (Some(content.clone()), *mode));
                Ok(Outcome::Done)
            }
            Operation::EnsureDir(path, mode) => {
                for level in above(path).into_iter().chain([path.clone()]) {
                    match self.is_dir(&level) {
                        Some(true) => {}
                        Some(false) => return Err(Outcome::NotADirectory),
                        None => drop(self.0.insert(level, (None, *mode))),
                    }
                }
                self.0.insert(path.clone(), (None, *mode));
                Ok(Outcome::Done)
            }
            Operation::Read(path) => {
                self.check_above(path)?;
                let (content, _) = self.0.get(path).ok_or(Outcome::NotFound)?;
                content.clone().map(Outcome::Content).ok_or(Outcome::NotAFile)
            }
            Operation::List(path) => {
                self.check_above(path)?;
                if !self.is_dir(path).ok_or(Outcome::NotFound)? {
                    return Err(Outcome::NotADirectory);
                }
                Ok(Outcome::Names(self.children(path)))
            }
            Operation::Remove(path) | Operation::RemoveFile(path) => {
                match self.check_above(path) {
                    Err(Outcome::NotFound) => return Ok(Outcome::WasThere(false)),
                    checked => checked?,
                }
                if matches!(operation, Operation::RemoveFile(_)) && self.is_dir(path) == Some(true) {
                    return Err(Outcome::NotAFile);
                }
                for below in self.below(path) {
                    self.0.remove(&below);
                }
                Ok(Outcome::WasThere(self.0.remove(path).is_some()))
            }
            Operation::Rename(from, to, is_exclusive) => self.rename(from, to, *is_exclusive),
        }
    }

    fn children(&self, path: &str) -> Vec<(String, FileKind)> {
        let depth = path.matches('/').count() + 1;
        let children = self.below(path).into_iter().filter(|below| below.matches('/').count() == depth);
        let kind =
            |child: &str| if self.is_dir(child) == Some(true) { FileKind::Dir } else { FileKind::File };
        let name = |child: &str| child.rsplit('/').next().map(str::to_owned).unwrap_or_default();
        children.map(|child| (name(&child), kind(&child))).collect()
    }

    fn rename(&mut self, from: &str, to: &str, is_exclusive: bool) -> Result<Outcome, Outcome> {
        self.check_above(from)?;
        self.check_above(to)?;
        let is_dir = self.is_dir(from).ok_or(Outcome::NotFound)?;
        // The order in which the kernel looks.
        let taken = self.is_dir(to);
        if is_exclusive && taken.is_some() {
            return Err(Outcome::Other);
        }
        if to.starts_with(&format!("{from}/")) || from.starts_with(&format!("{to}/")) {
            return Err(Outcome::Other);
        }
        if from == to {
            return Ok(Outcome::Done);
        }
        match (is_dir, taken) {
            (true, Some(false)) => return Err(Outcome::NotADirectory),
            (false, Some(true)) => return Err(Outcome::NotAFile),
            (true, Some(true)) if !self.below(to).is_empty() => return Err(Outcome::Other),
            _ => {}
        }
        for path in self.below(from).into_iter().chain([from.to_owned()]) {
            let Some(node) = self.0.remove(&path) else { continue };
            self.0.insert(format!("{to}{}", &path[from.len()..]), node);
        }
        Ok(Outcome::Done)
    }

    /// The tree below a directory.
    fn of(dir: &Dir) -> Self {
        let mut model = Self::default();
        model.add(dir, "");
        model
    }

    fn add(&mut self, dir: &Dir, prefix: &str) {
        for entry in dir.list().expect("it is listed") {
            let path = format!("{prefix}{}", entry.name);
            let mode = dir.metadata(&entry.name).expect("it is there").mode.bits();
            if entry.kind == FileKind::Dir {
                self.add(&dir.open_dir(&entry.name).expect("it opens"), &format!("{path}/"));
                self.0.insert(path, (None, mode));
            } else {
                self.0.insert(path, (Some(dir.read(&entry.name).expect("it is read")), mode));
            }
        }
    }
}

fn apply_to_placement(placement: &dyn Placement, operation: &Operation) -> Outcome {
    match operation {
        Operation::Write(path, content, mode) => {
            outcome(placement.write(Path::new(path), content, Mode::new(*mode)), |()| Outcome::Done)
        }
        Operation::EnsureDir(path, mode) => {
            outcome(placement.create_dir(Path::new(path), Mode::new(*mode)), |()| Outcome::Done)
        }
        Operation::Read(path) => outcome(placement.read(Path::new(path)), Outcome::Content),
        Operation::List(path) => outcome(placement.list(Path::new(path)), names),
        Operation::Remove(path) | Operation::RemoveFile(path) => {
            outcome(placement.remove(Path::new(path)), Outcome::WasThere)
        }
        Operation::Rename(path, _, _) => outcome(placement.kind(Path::new(path)), |kind| match kind {
            Some(kind) => Outcome::Names(vec![(path.clone(), kind)]),
            None => Outcome::NotFound,
        }),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_directory_does_what_the_model_does(operations in operations()) {
        let (_temporary, dir) = scratch();
        let mut model = Model::default();
        for operation in &operations {
            prop_assert_eq!(apply_to_dir(&dir, operation), model.apply(operation), "{:?}", operation);
        }
        prop_assert_eq!(Model::of(&dir), model);
    }

    #[test]
    fn placements_in_memory_and_in_a_directory_do_the_same(operations in operations()) {
        let (_temporary, dir) = scratch();
        let (os, memory) = (OsPlacement::new(dir), MemPlacement::new());
        for operation in &operations {
            let outcomes = [&os as &dyn Placement, &memory].map(|it| apply_to_placement(it, operation));
            prop_assert_eq!(&outcomes[0], &outcomes[1], "{:?}", operation);
        }
        for (path, (_, mode)) in Model::of(os.dir()).0 {
            prop_assert_eq!(memory.mode(&path), Some(Mode::new(mode)), "{}", path);
        }
    }
}
