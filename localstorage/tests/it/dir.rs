//! An open directory.

use nodekeel_localstorage::{Dir, Error, FileKind, FileMode, RenameMode};

use crate::fixture::scratch_dir;

#[test]
fn a_written_file_is_read_listed_renamed_and_removed() -> Result<(), Error> {
    let (_temporary, dir) = scratch_dir();
    let below = dir.ensure_dir("a/b", FileMode::new(0o750))?;
    below.write("file", b"one", FileMode::new(0o640))?;
    below.write("file", b"two", FileMode::new(0o604))?;
    assert_eq!(dir.read("a/b/file")?, b"two");
    let metadata = dir.metadata("a/b/file")?;
    assert_eq!((metadata.kind, metadata.mode, metadata.size), (FileKind::File, FileMode::new(0o604), 3));
    assert_eq!(dir.metadata("a/b")?.mode, FileMode::new(0o750));
    below.rename("file", &dir, "moved", RenameMode::NoReplace)?;
    let names =
        |dir: &Dir| dir.list().map(|list| list.iter().map(|e| e.name.to_string()).collect::<Vec<_>>());
    assert_eq!((names(&dir)?, names(&below)?), (vec!["a".to_owned(), "moved".to_owned()], vec![]));
    assert!(dir.remove_file("moved")? && !dir.remove_file("moved")?);
    assert!(dir.remove_tree("a")? && !dir.remove_tree("a")? && !dir.remove_tree("a/b/c")?);
    assert!(dir.list()?.is_empty());
    Ok(())
}

#[test]
fn a_no_replace_rename_never_replaces() -> Result<(), Error> {
    let (_temporary, dir) = scratch_dir();
    dir.write("a", b"a", FileMode::PRIVATE_FILE)?;
    dir.write("b", b"b", FileMode::PRIVATE_FILE)?;
    assert!(dir.rename("a", &dir, "b", RenameMode::NoReplace).unwrap_err().is_already_exists());
    assert_eq!((dir.read("a")?, dir.read("b")?), (b"a".to_vec(), b"b".to_vec()));
    dir.rename("a", &dir, "b", RenameMode::Replace)?;
    assert_eq!((dir.exists("a")?, dir.read("b")?), (false, b"a".to_vec()));
    assert!(dir.rename("a", &dir, "b", RenameMode::Replace).unwrap_err().is_not_found());
    Ok(())
}

#[test]
fn an_open_directory_survives_its_rename() -> Result<(), Error> {
    let (_temporary, dir) = scratch_dir();
    let open_dir = dir.ensure_dir("before", FileMode::PRIVATE_DIR)?;
    dir.rename("before", &dir, "after", RenameMode::NoReplace)?;
    open_dir.write("file", b"", FileMode::PRIVATE_FILE)?;
    assert!(dir.exists("after/file")?);
    assert_eq!(open_dir.metadata("")?.inode, dir.metadata("after")?.inode);
    Ok(())
}

#[test]
fn an_error_names_the_operation_and_the_path_and_the_chain_says_why() {
    let (temporary, dir) = scratch_dir();
    let text = format!("{:#}", anyhow::Error::from(dir.read("a/b").unwrap_err()));
    let path = temporary.path().display();
    assert_eq!(text, format!("can't read {path}/a/b: No such file or directory (os error 2)"));
    let text = format!("{:#}", anyhow::Error::from(dir.remove_tree("../x").unwrap_err()));
    assert_eq!(text, format!("can't remove {path}/../x: path contains \"..\""));
    std::os::unix::fs::symlink("/", temporary.path().join("link")).expect("the entry is created");
    let text = format!("{:#}", anyhow::Error::from(dir.open_dir("link/x").unwrap_err()));
    assert!(text.starts_with(&format!("can't open {path}/link/x: path contains a symbolic link")), "{text}");
}
