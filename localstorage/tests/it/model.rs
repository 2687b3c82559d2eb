//! Random operations have the results and leave the trees of a model in memory.

use std::collections::BTreeMap;
use std::path::Path;

use nodekeel_localstorage::mem::MemFileStore;
use nodekeel_localstorage::{Dir, Error, FileKind, FileMode, FileStore, OsFileStore, RenameMode};
use proptest::prelude::*;

use crate::fixture::scratch_dir;

#[derive(Clone, Debug)]
enum ModelOperation {
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

fn operations() -> impl Strategy<Value = Vec<ModelOperation>> {
    let mode = || prop::sample::select(vec![0o700, 0o755, 0o740]);
    let one = prop_oneof![
        3 => (paths(), prop::collection::vec(any::<u8>(), 0..20), mode())
            .prop_map(|(path, content, mode)| ModelOperation::Write(path, content, mode)),
        3 => (paths(), mode()).prop_map(|(path, mode)| ModelOperation::EnsureDir(path, mode)),
        1 => paths().prop_map(ModelOperation::Read),
        1 => paths().prop_map(ModelOperation::List),
        1 => paths().prop_map(ModelOperation::Remove),
        1 => paths().prop_map(ModelOperation::RemoveFile),
        2 => (paths(), paths(), any::<bool>()).prop_map(|(from, to, existing)| ModelOperation::Rename(from, to, existing)),
    ];
    prop::collection::vec(one, 1..30)
}

/// The result as the caller sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ModelOutcome {
    Done,
    WasThere(bool),
    Content(Vec<u8>),
    Names(Vec<(String, FileKind)>),
    NotFound,
    NotADirectory,
    NotAFile,
    Other,
}

fn to_outcome<T>(result: Result<T, Error>, done: impl FnOnce(T) -> ModelOutcome) -> ModelOutcome {
    match result {
        Ok(value) => done(value),
        Err(error) if error.is_not_found() => ModelOutcome::NotFound,
        Err(error) if error.is_not_a_directory() => ModelOutcome::NotADirectory,
        Err(error) if error.is_not_a_file() => ModelOutcome::NotAFile,
        Err(_) => ModelOutcome::Other,
    }
}

fn names_outcome(entries: Vec<nodekeel_localstorage::DirEntry>) -> ModelOutcome {
    ModelOutcome::Names(entries.into_iter().map(|entry| (entry.name.to_string(), entry.kind)).collect())
}

fn apply_to_dir(dir: &Dir, operation: &ModelOperation) -> ModelOutcome {
    match operation {
        ModelOperation::Write(path, content, mode) => {
            to_outcome(dir.write(path, content, FileMode::new(*mode)), |()| ModelOutcome::Done)
        }
        ModelOperation::EnsureDir(path, mode) => {
            to_outcome(dir.ensure_dir(path, FileMode::new(*mode)), |_| ModelOutcome::Done)
        }
        ModelOperation::Read(path) => to_outcome(dir.read(path), ModelOutcome::Content),
        ModelOperation::List(path) => {
            to_outcome(dir.open_dir(path).and_then(|below| below.list()), names_outcome)
        }
        ModelOperation::Remove(path) => to_outcome(dir.remove_tree(path), ModelOutcome::WasThere),
        ModelOperation::RemoveFile(path) => to_outcome(dir.remove_file(path), ModelOutcome::WasThere),
        ModelOperation::Rename(from, to, is_exclusive) => {
            let existing = if *is_exclusive { RenameMode::NoReplace } else { RenameMode::Replace };
            to_outcome(dir.rename(from, dir, to, existing), |()| ModelOutcome::Done)
        }
    }
}

/// Paths with the content of a file, or none for a directory, and the mode.
#[derive(Debug, Default, PartialEq, Eq)]
struct TreeModel(BTreeMap<String, (Option<Vec<u8>>, u32)>);

fn parent_paths(path: &str) -> Vec<String> {
    path.match_indices('/').map(|(at, _)| path[..at].to_owned()).collect()
}

impl TreeModel {
    /// Checks that all parents exist and are directories.
    fn check_parents(&self, path: &str) -> Result<(), ModelOutcome> {
        for above in parent_paths(path) {
            match self.0.get(&above) {
                Some((None, _)) => {}
                Some((Some(_), _)) => return Err(ModelOutcome::NotADirectory),
                None => return Err(ModelOutcome::NotFound),
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

    fn apply(&mut self, operation: &ModelOperation) -> ModelOutcome {
        self.try_apply(operation).unwrap_or_else(|failed| failed)
    }

    fn try_apply(&mut self, operation: &ModelOperation) -> Result<ModelOutcome, ModelOutcome> {
        match operation {
            ModelOperation::Write(path, content, mode) => {
                self.check_parents(path)?;
                if self.is_dir(path) == Some(true) {
                    return Err(ModelOutcome::NotAFile);
                }
                self.0.insert(path.clone(), (Some(content.clone()), *mode));
                Ok(ModelOutcome::Done)
            }
            ModelOperation::EnsureDir(path, mode) => {
                for level in parent_paths(path).into_iter().chain([path.clone()]) {
                    match self.is_dir(&level) {
                        Some(true) => {}
                        Some(false) => return Err(ModelOutcome::NotADirectory),
                        None => drop(self.0.insert(level, (None, *mode))),
                    }
                }
                self.0.insert(path.clone(), (None, *mode));
                Ok(ModelOutcome::Done)
            }
            ModelOperation::Read(path) => {
                self.check_parents(path)?;
                let (content, _) = self.0.get(path).ok_or(ModelOutcome::NotFound)?;
                content.clone().map(ModelOutcome::Content).ok_or(ModelOutcome::NotAFile)
            }
            ModelOperation::List(path) => {
                self.check_parents(path)?;
                if !self.is_dir(path).ok_or(ModelOutcome::NotFound)? {
                    return Err(ModelOutcome::NotADirectory);
                }
                Ok(ModelOutcome::Names(self.children(path)))
            }
            ModelOperation::Remove(path) | ModelOperation::RemoveFile(path) => {
                match self.check_parents(path) {
                    Err(ModelOutcome::NotFound) => return Ok(ModelOutcome::WasThere(false)),
                    checked => checked?,
                }
                if matches!(operation, ModelOperation::RemoveFile(_)) && self.is_dir(path) == Some(true) {
                    return Err(ModelOutcome::NotAFile);
                }
                for below in self.below(path) {
                    self.0.remove(&below);
                }
                Ok(ModelOutcome::WasThere(self.0.remove(path).is_some()))
            }
            ModelOperation::Rename(from, to, is_exclusive) => self.rename(from, to, *is_exclusive),
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

    fn rename(&mut self, from: &str, to: &str, is_exclusive: bool) -> Result<ModelOutcome, ModelOutcome> {
        self.check_parents(from)?;
        self.check_parents(to)?;
        let is_dir = self.is_dir(from).ok_or(ModelOutcome::NotFound)?;
        // The order of the checks in the kernel.
        let existing = self.is_dir(to);
        if is_exclusive && existing.is_some() {
            return Err(ModelOutcome::Other);
        }
        if to.starts_with(&format!("{from}/")) || from.starts_with(&format!("{to}/")) {
            return Err(ModelOutcome::Other);
        }
        if from == to {
            return Ok(ModelOutcome::Done);
        }
        match (is_dir, existing) {
            (true, Some(false)) => return Err(ModelOutcome::NotADirectory),
            (false, Some(true)) => return Err(ModelOutcome::NotAFile),
            (true, Some(true)) if !self.below(to).is_empty() => return Err(ModelOutcome::Other),
            _ => {}
        }
        for path in self.below(from).into_iter().chain([from.to_owned()]) {
            let Some(node) = self.0.remove(&path) else { continue };
            self.0.insert(format!("{to}{}", &path[from.len()..]), node);
        }
        Ok(ModelOutcome::Done)
    }

    /// Reads the tree below a directory.
    fn read_from(dir: &Dir) -> Self {
        let mut model = Self::default();
        model.add_entries(dir, "");
        model
    }

    fn add_entries(&mut self, dir: &Dir, prefix: &str) {
        for entry in dir.list().unwrap() {
            let path = format!("{prefix}{}", entry.name);
            let mode = dir.metadata(&entry.name).unwrap().mode.bits();
            if entry.kind == FileKind::Dir {
                self.add_entries(&dir.open_dir(&entry.name).unwrap(), &format!("{path}/"));
                self.0.insert(path, (None, mode));
            } else {
                self.0.insert(path, (Some(dir.read(&entry.name).expect("the file is read")), mode));
            }
        }
    }
}

fn apply_to_store(store: &dyn FileStore, operation: &ModelOperation) -> ModelOutcome {
    match operation {
        ModelOperation::Write(path, content, mode) => {
            to_outcome(store.write(Path::new(path), content, FileMode::new(*mode)), |()| ModelOutcome::Done)
        }
        ModelOperation::EnsureDir(path, mode) => {
            to_outcome(store.create_dir(Path::new(path), FileMode::new(*mode)), |()| ModelOutcome::Done)
        }
        ModelOperation::Read(path) => to_outcome(store.read(Path::new(path)), ModelOutcome::Content),
        ModelOperation::List(path) => to_outcome(store.list(Path::new(path)), names_outcome),
        ModelOperation::Remove(path) | ModelOperation::RemoveFile(path) => {
            to_outcome(store.remove(Path::new(path)), ModelOutcome::WasThere)
        }
        ModelOperation::Rename(path, _, _) => {
            to_outcome(store.file_kind(Path::new(path)), |kind| match kind {
                Some(kind) => ModelOutcome::Names(vec![(path.clone(), kind)]),
                None => ModelOutcome::NotFound,
            })
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_directory_matches_the_model(operations in operations()) {
        let (_temporary, dir) = scratch_dir();
        let mut model = TreeModel::default();
        for operation in &operations {
            prop_assert_eq!(apply_to_dir(&dir, operation), model.apply(operation), "{:?}", operation);
        }
        prop_assert_eq!(TreeModel::read_from(&dir), model);
    }

    #[test]
    fn memory_and_os_file_stores_behave_the_same(operations in operations()) {
        let (_temporary, dir) = scratch_dir();
        let (os, memory) = (OsFileStore::new(dir), MemFileStore::new());
        for operation in &operations {
            let outcomes = [&os as &dyn FileStore, &memory].map(|store| apply_to_store(store, operation));
            prop_assert_eq!(&outcomes[0], &outcomes[1], "{:?}", operation);
        }
        for (path, (_, mode)) in TreeModel::read_from(os.dir()).0 {
            prop_assert_eq!(memory.mode_at(&path), Some(FileMode::new(mode)), "{}", path);
        }
    }
}
