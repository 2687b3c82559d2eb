//! A directory that is held open.

use nodekeel_localstorage::{Dir, Error, FileKind, Mode, Rename};

use crate::bed::scratch;

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

#[test]
fn an_exclusive_rename_takes_nobodys_place() -> Result<(), Error> {
    let (_temporary, dir) = scratch();
    dir.write("a", b"a", Mode::PRIVATE_FILE)?;
    dir.write("b", b"b", Mode::PRIVATE_FILE)?;
    assert!(dir.rename("a", &dir, "b", Rename::Exclusive).unwrap_err().is_already_exists());
    assert_eq!((dir.read("a")?, dir.read("b")?), (b"a".to_vec(), b"b".to_vec()));
    dir.rename("a", &dir, "b", Rename::Replace)?;
    assert_eq!((dir.exists("a")?, dir.read("b")?), (false, b"a".to_vec()));
    assert!(dir.rename("a", &dir, "b", Rename::Replace).unwrap_err().is_not_found());
    Ok(())
}

#[test]
fn a_directory_that_was_renamed_is_still_the_same() -> Result<(), Error> {
    let (_temporary, dir) = scratch();
    let held = dir.ensure_dir("before", Mode::PRIVATE_DIR)?;
    dir.rename("before", &dir, "after", Rename::Exclusive)?;
    held.write("file", b"", Mode::PRIVATE_FILE)?;
    assert!(dir.exists("after/file")?);
    assert_eq!(held.metadata("")?.inode, dir.metadata("after")?.inode);
    Ok(())
}

#[test]
fn an_error_names_the_operation_and_the_path_and_the_chain_says_why() {
    let (temporary, dir) = scratch();
    let text = format!("{:#}", anyhow::Error::from(dir.read("a/b").unwrap_err()));
    let path = temporary.path().display();
    assert_eq!(text, format!("read {path}/a/b: No such file or directory (os error 2)"));
    let text = format!("{:#}", anyhow::Error::from(dir.remove_tree("../x").unwrap_err()));
    assert_eq!(text, format!("remove {path}/../x: a component is \"..\""));
    std::os::unix::fs::symlink("/", temporary.path().join("link")).expect("it is made");
    let text = format!("{:#}", anyhow::Error::from(dir.open_dir("link/x").unwrap_err()));
    assert!(text.starts_with(&format!("open {path}/link/x: a symbolic link is in the way")), "{text}");
}
