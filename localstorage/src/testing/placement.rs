//! Checks of a placement.

use std::path::Path;

use crate::error::Error;
use crate::metadata::{FileKind, Mode};
use crate::placement::Placement;

/// Where the checks work.
const TOP: &str = "conformance";

/// Checks that a placement keeps the contract of [`Placement`]. It works below the directory `conformance`, which is
/// gone afterwards.
///
/// # Panics
/// Where a promise isn't kept, with the promise.
pub fn conformance(placement: &dyn Placement) {
    let checked = Checked(placement);
    for check in Checked::ALL {
        checked.must(placement.remove(Path::new(TOP)), "what an earlier run has left is removed");
        checked.must(placement.create_dir(Path::new(TOP), Mode::PRIVATE_DIR), "a directory is made");
        check(&checked);
    }
    assert!(checked.must(placement.remove(Path::new(TOP)), "the directory is removed"));
}

struct Checked<'a>(&'a dyn Placement);

impl<'a> Checked<'a> {
    const ALL: [fn(&Checked<'a>); 8] = [
        Self::contents_are_replaced,
        Self::directories_are_made_with_those_above,
        Self::a_mode_is_given_to_what_is_there,
        Self::listings_are_sorted_and_name_kinds,
        Self::removal_takes_all_and_tells_whether_there_was_something,
        Self::kinds_are_not_confused,
        Self::what_is_missing_is_told,
        Self::no_path_leads_out,
    ];

    #[track_caller]
    fn must<T>(&self, result: Result<T, Error>, promise: &str) -> T {
        result.unwrap_or_else(|error| {
            let why = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            panic!("{promise}: {error}: {why}")
        })
    }

    #[track_caller]
    fn refused<T>(&self, result: Result<T, Error>, (promise, is_right): (&str, fn(&Error) -> bool)) {
        match result {
            Ok(_) => panic!("{promise}: it is not refused"),
            Err(error) => assert!(is_right(&error), "{promise}: {error:?}"),
        }
    }

    fn write(&self, path: &str, content: &[u8]) {
        self.must(
            self.0.write(&at(path), content, Mode::PRIVATE_FILE),
            "a file is written where its directory is",
        );
    }

    fn names(&self, path: &str) -> Vec<(String, FileKind)> {
        let entries = self.must(self.0.list(&at(path)), "a directory is listed");
        entries.iter().map(|entry| (entry.name.to_string(), entry.kind)).collect()
    }

    fn contents_are_replaced(&self) {
        for content in [&b"a long content"[..], b"short", b"", &[0xff; 100_000]] {
            self.write("file", content);
            assert_eq!(
                self.must(self.0.read(&at("file")), "a file is read"),
                content,
                "the whole new content is read"
            );
        }
        let entry = [("file".to_owned(), FileKind::File)];
        assert_eq!(self.names(""), entry, "writing leaves nothing else behind");
    }

    fn directories_are_made_with_those_above(&self) {
        for _ in 0..2 {
            let made = self.0.create_dir(&at("a/b/c"), Mode::PRIVATE_DIR);
            self.must(made, "a directory is made with those above it, and again");
            self.write("a/b/c/file", b"kept");
        }
        self.must(self.0.create_dir(&at("a/b"), Mode::new(0o755)), "one that is there gets a mode");
        assert_eq!(self.must(self.0.read(&at("a/b/c/file")), "what is in it is kept"), b"kept");
        assert_eq!(self.must(self.0.kind(&at("a/b")), "its kind is told"), Some(FileKind::Dir));
    }

    fn a_mode_is_given_to_what_is_there(&self) {
        self.write("file", b"kept");
        self.must(self.0.create_dir(&at("dir"), Mode::PRIVATE_DIR), "a directory is made");
        for mode in [0o640, 0o600] {
            assert!(self.must(self.0.set_mode(&at("file"), Mode::new(mode)), "a file gets a mode"));
        }
        assert_eq!(self.must(self.0.read(&at("file")), "the file is read"), b"kept", "its content stays");
        for path in ["none", "none/none"] {
            let set = self.0.set_mode(&at(path), Mode::PRIVATE_FILE);
            assert!(!self.must(set, "its absence is told"), "what is missing gets no mode");
        }
        let no_file: fn(&Error) -> bool = Error::is_not_a_file;
        let set = self.0.set_mode(&at("dir"), Mode::PRIVATE_FILE);
        self.refused(set, ("a directory gets no mode of a file", no_file));
        let no_dir: fn(&Error) -> bool = Error::is_not_a_directory;
        let set = self.0.set_mode(&at("file/below"), Mode::PRIVATE_FILE);
        self.refused(set, ("nothing is in a file", no_dir));
    }

    fn listings_are_sorted_and_name_kinds(&self) {
        for name in ["b", "a", "ab", "Z"] {
            self.write(name, b"");
        }
        self.must(self.0.create_dir(&at("aa"), Mode::PRIVATE_DIR), "a directory is made");
        let expected = [
            ("Z", FileKind::File),
            ("a", FileKind::File),
            ("aa", FileKind::Dir),
            ("ab", FileKind::File),
            ("b", FileKind::File),
        ];
        assert_eq!(
            self.names(""),
            expected.map(|(name, kind)| (name.to_owned(), kind)),
            "listings are sorted"
        );
        let top = self.must(self.0.list(Path::new("")), "the empty path is the top");
        assert!(top.iter().any(|entry| entry.name == TOP), "the top lists what was made there");
    }

    fn removal_takes_all_and_tells_whether_there_was_something(&self) {
        self.must(self.0.create_dir(&at("a/b/c"), Mode::PRIVATE_DIR), "a directory is made");
        self.write("a/b/file", b"");
        self.write("file", b"");
        for path in ["a", "file"] {
            assert!(
                self.must(self.0.remove(&at(path)), "something is removed"),
                "it tells that there was something"
            );
            assert!(
                !self.must(self.0.remove(&at(path)), "nothing is removed"),
                "it tells that there was nothing"
            );
        }
        assert!(!self.must(self.0.remove(&at("a/b/c")), "nothing is removed below nothing"));
        assert_eq!(self.names(""), [], "nothing is left");
    }

    fn kinds_are_not_confused(&self) {
        self.must(self.0.create_dir(&at("dir"), Mode::PRIVATE_DIR), "a directory is made");
        self.write("file", b"kept");
        let no_file: fn(&Error) -> bool = Error::is_not_a_file;
        let no_dir: fn(&Error) -> bool = Error::is_not_a_directory;
        let write = |path| self.0.write(&at(path), b"", Mode::PRIVATE_FILE);
        self.refused(self.0.read(&at("dir")), ("a directory is not read", no_file));
        self.refused(write("dir"), ("no file takes a directory's place", no_file));
        self.refused(write("file/below"), ("nothing is in a file", no_dir));
        self.refused(self.0.list(&at("file")), ("a file is not listed", no_dir));
        for path in ["file", "file/below"] {
            let made = self.0.create_dir(&at(path), Mode::PRIVATE_DIR);
            self.refused(made, ("no directory takes a file's place, or is in one", no_dir));
        }
        assert_eq!(self.must(self.0.read(&at("file")), "the file is read"), b"kept", "the file is as it was");
    }

    fn what_is_missing_is_told(&self) {
        let missing: fn(&Error) -> bool = Error::is_not_found;
        for path in ["none", "none/none"] {
            self.refused(self.0.read(&at(path)), ("no file is told", missing));
            self.refused(self.0.list(&at(path)), ("no directory is told", missing));
            assert_eq!(self.must(self.0.kind(&at(path)), "its absence is told"), None);
        }
        let written = self.0.write(&at("none/file"), b"", Mode::PRIVATE_FILE);
        self.refused(written, ("no directory to write in is told", missing));
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
        let invalid: fn(&Error) -> bool = Error::is_invalid_path;
        for path in hostile.map(Path::new) {
            self.refused(self.0.read(path), ("a hostile path is not read", invalid));
            self.refused(
                self.0.write(path, b"", Mode::PRIVATE_FILE),
                ("a hostile path is not written", invalid),
            );
            self.refused(self.0.create_dir(path, Mode::PRIVATE_DIR), ("a hostile path is not made", invalid));
            self.refused(self.0.list(path), ("a hostile path is not listed", invalid));
            self.refused(self.0.remove(path), ("a hostile path is not removed", invalid));
            let set = self.0.set_mode(path, Mode::PRIVATE_FILE);
            self.refused(set, ("a hostile path gets no mode", invalid));
            self.refused(self.0.kind(path), ("a hostile path has no kind", invalid));
        }
        let empty = Path::new("");
        self.refused(self.0.remove(empty), ("the top is not removed", invalid));
        self.refused(self.0.read(empty), ("the top is not read", invalid));
        self.refused(self.0.write(empty, b"", Mode::PRIVATE_FILE), ("the top is not written", invalid));
    }
}

fn at(path: &str) -> std::path::PathBuf {
    if path.is_empty() { TOP.into() } else { Path::new(TOP).join(path) }
}
