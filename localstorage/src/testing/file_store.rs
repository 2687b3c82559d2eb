//! Checks of a file store.

use std::path::Path;

use crate::error::Error;
use crate::file_store::FileStore;
use crate::metadata::{FileKind, FileMode};

const TOP_DIR: &str = "conformance";

/// Checks that a file store keeps the contract of [`FileStore`]. It works below the directory `conformance`,
/// and removes it.
///
/// # Panics
/// If the contract is broken, with the broken clause.
pub fn file_store_conformance(store: &dyn FileStore) {
    let checked = ContractCheck(store);
    for check in ContractCheck::ALL {
        checked.expect_ok(store.remove(Path::new(TOP_DIR)), "files of an earlier run are removed");
        checked
            .expect_ok(store.create_dir(Path::new(TOP_DIR), FileMode::PRIVATE_DIR), "a directory is created");
        check(&checked);
    }
    assert!(checked.expect_ok(store.remove(Path::new(TOP_DIR)), "the directory is removed"));
}

struct ContractCheck<'a>(&'a dyn FileStore);

impl<'a> ContractCheck<'a> {
    const ALL: [fn(&ContractCheck<'a>); 8] = [
        Self::contents_are_replaced,
        Self::directories_are_created_with_their_parents,
        Self::existing_files_get_a_mode,
        Self::listings_are_sorted_and_name_kinds,
        Self::removal_takes_all_and_reports_whether_anything_existed,
        Self::kinds_are_not_confused,
        Self::missing_entries_are_reported,
        Self::no_path_leads_out,
    ];

    #[track_caller]
    fn expect_ok<T>(&self, result: Result<T, Error>, clause: &str) -> T {
        result.unwrap_or_else(|error| {
            let why = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            panic!("{clause}: {error}: {why}")
        })
    }

    #[track_caller]
    fn expect_error<T>(&self, result: Result<T, Error>, is_right: fn(&Error) -> bool, clause: &str) {
        match result {
            Ok(_) => panic!("{clause}: the call succeeded"),
            Err(error) => assert!(is_right(&error), "{clause}: {error:?}"),
        }
    }

    fn write_file(&self, path: &str, content: &[u8]) {
        self.expect_ok(
            self.0.write(&at(path), content, FileMode::PRIVATE_FILE),
            "a file is written to an existing directory",
        );
    }

    fn create_dir(&self, path: &str) {
        self.expect_ok(self.0.create_dir(&at(path), FileMode::PRIVATE_DIR), "a directory is created");
    }

    fn read(&self, path: &str) -> Vec<u8> {
        self.expect_ok(self.0.read(&at(path)), "a file is read")
    }

    fn list_names(&self, path: &str) -> Vec<(String, FileKind)> {
        let entries = self.expect_ok(self.0.list(&at(path)), "a directory is listed");
        entries.iter().map(|entry| (entry.name.to_string(), entry.kind)).collect()
    }

    fn contents_are_replaced(&self) {
        for content in [&b"a long content"[..], b"short", b"", &[0xff; 100_000]] {
            self.write_file("file", content);
            assert_eq!(self.read("file"), content, "the complete new content is read");
        }
        let entry = [("file".to_owned(), FileKind::File)];
        assert_eq!(self.list_names(""), entry, "writing leaves no other files");
    }

    fn directories_are_created_with_their_parents(&self) {
        for _ in 0..2 {
            let created = self.0.create_dir(&at("a/b/c"), FileMode::PRIVATE_DIR);
            self.expect_ok(created, "a directory is created with its parents, and again");
            self.write_file("a/b/c/file", b"kept");
        }
        self.expect_ok(
            self.0.create_dir(&at("a/b"), FileMode::new(0o755)),
            "an existing directory gets the mode",
        );
        assert_eq!(self.read("a/b/c/file"), b"kept", "its entries are kept");
        assert_eq!(self.expect_ok(self.0.file_kind(&at("a/b")), "its kind is reported"), Some(FileKind::Dir));
    }

    fn existing_files_get_a_mode(&self) {
        self.write_file("file", b"kept");
        self.create_dir("dir");
        for mode in [0o640, 0o600] {
            assert!(self.expect_ok(self.0.set_mode(&at("file"), FileMode::new(mode)), "a file gets a mode"));
        }
        assert_eq!(self.read("file"), b"kept", "its content stays");
        for path in ["none", "none/none"] {
            let set = self.0.set_mode(&at(path), FileMode::PRIVATE_FILE);
            assert!(!self.expect_ok(set, "a missing file is reported"), "a missing file gets no mode");
        }
        let set = self.0.set_mode(&at("dir"), FileMode::PRIVATE_FILE);
        self.expect_error(set, Error::is_not_a_file, "set_mode on a directory is rejected");
        let set = self.0.set_mode(&at("file/below"), FileMode::PRIVATE_FILE);
        self.expect_error(set, Error::is_not_a_directory, "a file has no entries");
    }

    fn listings_are_sorted_and_name_kinds(&self) {
        for name in ["b", "a", "ab", "Z"] {
            self.write_file(name, b"");
        }
        self.create_dir("aa");
        let expected = [
            ("Z", FileKind::File),
            ("a", FileKind::File),
            ("aa", FileKind::Dir),
            ("ab", FileKind::File),
            ("b", FileKind::File),
        ];
        assert_eq!(
            self.list_names(""),
            expected.map(|(name, kind)| (name.to_owned(), kind)),
            "listings are sorted"
        );
        let top = self.expect_ok(self.0.list(Path::new("")), "the empty path is the root");
        assert!(top.iter().any(|entry| entry.name == TOP_DIR), "the root lists its entries");
    }

    fn removal_takes_all_and_reports_whether_anything_existed(&self) {
        self.create_dir("a/b/c");
        self.write_file("a/b/file", b"");
        self.write_file("file", b"");
        for path in ["a", "file"] {
            assert!(
                self.expect_ok(self.0.remove(&at(path)), "an entry is removed"),
                "removing an entry reports that it existed"
            );
            assert!(
                !self.expect_ok(self.0.remove(&at(path)), "a missing entry is removed"),
                "removing a missing entry reports that it did not exist"
            );
        }
        assert!(!self.expect_ok(self.0.remove(&at("a/b/c")), "an entry of a missing directory is removed"));
        assert_eq!(self.list_names(""), [], "no entries are left");
    }

    fn kinds_are_not_confused(&self) {
        self.create_dir("dir");
        self.write_file("file", b"kept");
        let write = |path| self.0.write(&at(path), b"", FileMode::PRIVATE_FILE);
        self.expect_error(self.0.read(&at("dir")), Error::is_not_a_file, "a directory is not read");
        self.expect_error(write("dir"), Error::is_not_a_file, "a file never replaces a directory");
        self.expect_error(write("file/below"), Error::is_not_a_directory, "a file has no entries");
        self.expect_error(self.0.list(&at("file")), Error::is_not_a_directory, "a file is not listed");
        for path in ["file", "file/below"] {
            let created = self.0.create_dir(&at(path), FileMode::PRIVATE_DIR);
            self.expect_error(
                created,
                Error::is_not_a_directory,
                "a directory never replaces a file, or is created in one",
            );
        }
        assert_eq!(self.read("file"), b"kept", "the file is unchanged");
    }

    fn missing_entries_are_reported(&self) {
        for path in ["none", "none/none"] {
            self.expect_error(self.0.read(&at(path)), Error::is_not_found, "a missing file is reported");
            self.expect_error(self.0.list(&at(path)), Error::is_not_found, "a missing directory is reported");
            assert_eq!(self.expect_ok(self.0.file_kind(&at(path)), "a missing entry has no kind"), None);
        }
        let written = self.0.write(&at("none/file"), b"", FileMode::PRIVATE_FILE);
        self.expect_error(written, Error::is_not_found, "a missing parent directory is reported");
    }

    fn no_path_leads_out(&self) {
        let long = "x".repeat(256);
        let hostile = [
            "..",
            "../x",
            "conformance/../../x",
            "/",
            "/etc",
            "a\0b",
            "a//b",
            "a/",
            ".",
            "./a",
            long.as_str(),
        ];
        for path in hostile.map(Path::new) {
            self.expect_error(self.0.read(path), Error::is_invalid_path, "a hostile path is not read");
            self.expect_error(
                self.0.write(path, b"", FileMode::PRIVATE_FILE),
                Error::is_invalid_path,
                "a hostile path is not written",
            );
            self.expect_error(
                self.0.create_dir(path, FileMode::PRIVATE_DIR),
                Error::is_invalid_path,
                "a hostile path is not created",
            );
            self.expect_error(self.0.list(path), Error::is_invalid_path, "a hostile path is not listed");
            self.expect_error(self.0.remove(path), Error::is_invalid_path, "a hostile path is not removed");
            let set = self.0.set_mode(path, FileMode::PRIVATE_FILE);
            self.expect_error(set, Error::is_invalid_path, "a hostile path gets no mode");
            self.expect_error(self.0.file_kind(path), Error::is_invalid_path, "a hostile path has no kind");
        }
        let empty = Path::new("");
        self.expect_error(self.0.remove(empty), Error::is_invalid_path, "the root is not removed");
        self.expect_error(self.0.read(empty), Error::is_invalid_path, "the root is not read");
        self.expect_error(
            self.0.write(empty, b"", FileMode::PRIVATE_FILE),
            Error::is_invalid_path,
            "the root is not written",
        );
    }
}

/// The path of an entry below the directory of the checks.
fn at(path: &str) -> std::path::PathBuf {
    if path.is_empty() { TOP_DIR.into() } else { Path::new(TOP_DIR).join(path) }
}
