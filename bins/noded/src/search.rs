//! Where programs are found.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

/// Directories in which programs are searched, in order.
#[derive(Debug, Clone, Default)]
pub struct Search {
    directories: Vec<PathBuf>,
}

/// Where daemons lie though a plain user's `PATH` does not say so.
const USUAL: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Why a program can't be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotFound {
    program: PathBuf,
    /// Where it was searched; empty for a path, which is not searched.
    searched: Vec<PathBuf>,
}

impl Search {
    /// In exactly these directories.
    pub fn new(directories: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { directories: directories.into_iter().collect() }
    }

    /// In the directories of the first list, then of the second, both as `PATH` is written, then in the usual ones.
    pub fn from_lists(first: Option<&OsStr>, second: Option<&OsStr>) -> Self {
        let mut directories: Vec<PathBuf> = Vec::new();
        let lists = [first, second].into_iter().flatten().flat_map(std::env::split_paths);
        for directory in lists.chain(USUAL.into_iter().map(PathBuf::from)) {
            // An empty entry would mean the working directory, from which a daemon must not run programs.
            if directory.is_absolute() && !directories.contains(&directory) {
                directories.push(directory);
            }
        }
        Self { directories }
    }

    /// The directories as `PATH` is written, for a child that searches programs itself.
    pub fn as_path_variable(&self) -> String {
        let directories: Vec<_> = self.directories.iter().map(|d| d.to_string_lossy()).collect();
        directories.join(":")
    }

    /// The program that is meant by a name, or by a path, which is taken as it is.
    ///
    /// # Errors
    /// There is none, or it can't be executed by this user.
    pub fn find(&self, program: &Path) -> Result<PathBuf, NotFound> {
        let is_program = |path: &Path| path.is_file() && access(path, AccessFlags::X_OK).is_ok();
        if program.components().count() > 1 || program.is_absolute() {
            let missing = || NotFound { program: program.to_owned(), searched: Vec::new() };
            return is_program(program).then(|| program.to_owned()).ok_or_else(missing);
        }
        let mut candidates = self.directories.iter().map(|directory| directory.join(program));
        let missing = || NotFound { program: program.to_owned(), searched: self.directories.clone() };
        candidates.find(|path| is_program(path)).ok_or_else(missing)
    }
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.searched.is_empty() {
            return write!(f, "{} is no program that this user can execute", self.program.display());
        }
        let searched: Vec<_> = self.searched.iter().map(|d| d.to_string_lossy()).collect();
        write!(f, "{} is not installed (searched {})", self.program.display(), searched.join(", "))
    }
}

impl std::error::Error for NotFound {}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_first_directory_that_has_an_executable_wins() {
        let scratch = tempfile::tempdir().expect("a directory");
        let make = |path: &str, mode| {
            let path = scratch.path().join(path);
            std::fs::create_dir_all(path.parent().expect("has one")).expect("made");
            std::fs::write(&path, "").expect("written");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("set");
            path
        };
        make("a/tool", 0o644);
        let second = make("b/tool", 0o755);
        make("c/tool", 0o755);
        let search = Search::new(["a", "b", "c"].map(|d| scratch.path().join(d)));
        assert_eq!(search.find(Path::new("tool")), Ok(second.clone()));
        assert_eq!(search.find(&second), Ok(second));
        assert!(search.find(Path::new("other")).is_err());
        assert!(search.find(&scratch.path().join("a/tool")).is_err(), "it is not executable");
    }

    #[test]
    fn relative_and_repeated_entries_are_left_out() {
        let search =
            Search::from_lists(Some(OsStr::new("/opt/x::.:/usr/bin")), Some(OsStr::new("/usr/bin:/bin")));
        let path = search.as_path_variable();
        assert_eq!(path, "/opt/x:/usr/bin:/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin");
    }
}
