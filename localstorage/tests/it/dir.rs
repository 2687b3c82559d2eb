//! A directory that is held open.

use nodekeel_localstorage::{Dir, Error, FileKind, Mode, Rename};

fn scratch() -> (tempfile::TempDir, Dir) {
    let temporary = tempfile::tempdir().expect("a directory");
    let dir = Dir::open(temporary.path()).expect("it opens");
    (temporary, dir)
}

#[test]
fn what_is_written_is_read_listed_renamed_and_removed() -> Result<(), Error> {
    let (_temporary, dir) = scratch();
    let below = dir.ensure_dir("a/b", Mode::new(0o750))?;
    below.write("file", b"one", Mode::new(0o640))?;
    below.write("file", b"two", Mode::new(0o604))?;
    assert_eq!(dir.read("a/b/file")?, b"two");
    let metadata = dir.metadata("a/b/file")?;
    assert_eq!((metadata.kind, metadata.mode, metadata.size), (FileKind::File, Mode::new(0o604), 3));
    assert_eq!(dir.metadata("a/b")?.mode, Mode::new(0o750));
    below.rename("file", &dir, "moved", Rename::Exclusive)?;
    let names =
        |dir: &Dir| dir.list().map(|list| list.iter().map(|e| e.name.to_string()).collect::<Vec<_>>());
    assert_eq!((names(&dir)?, names(&below)?), (vec!["a".to_owned(), "moved".to_owned()], vec![]));
    assert!(dir.remove_file("moved")? && !dir.remove_file("moved")?);
    assert!(dir.remove_tree("a")? && !dir.remove_tree("a")? && !dir.remove_tree("a/b/c")?);
    assert!(dir.list()?.is_empty());
    Ok(())
}
