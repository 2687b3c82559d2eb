//! Search for programs.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

/// Directories in which programs are searched, in order.
#[derive(Debug, Clone, Default)]
pub struct SearchPath {
    directories: Vec<PathBuf>,
}

/// Directories of daemons that the `PATH` of a plain user may lack.
const DEFAULT_DIRECTORIES: [&str; 6] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// A program that does not exist or can't be executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramNotFound {
    program: PathBuf,
    /// The searched directories; empty for a path, which is not searched.
    searched: Vec<PathBuf>,
}

impl SearchPath {
    /// Searches exactly these directories.
    pub fn new(directories: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { directories: directories.into_iter().collect() }
    }

    /// Searches the directories of the first list, then of the second, both in the syntax of `PATH`, then the
    /// usual ones.
    pub fn with_default_directories(first: Option<&OsStr>, second: Option<&OsStr>) -> Self {
        let mut directories: Vec<PathBuf> = Vec::new();
        let lists = [first, second].into_iter().flatten().flat_map(std::env::split_paths);
        for directory in lists.chain(DEFAULT_DIRECTORIES.into_iter().map(PathBuf::from)) {
            // An empty entry would mean the working directory, from which a daemon must not run programs.
            if directory.is_absolute() && !directories.contains(&directory) {
                directories.push(directory);
            }
        }
        Self { directories }
    }

    /// The directories, in order.
    pub(crate) fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// The directories in the syntax of `PATH`, for a child that searches programs itself.
    pub fn as_path_variable(&self) -> String {
        let directories: Vec<_> = self.directories.iter().map(|d| d.to_string_lossy()).collect();
        directories.join(":")
    }

    /// Finds a program by its name; a path is not searched but used as it is.
    ///
    /// # Errors
    /// The program does not exist, or this user can't execute it.
    pub fn find_program(&self, program: &Path) -> Result<PathBuf, ProgramNotFound> {
        let is_program = |path: &Path| path.is_file() && access(path, AccessFlags::X_OK).is_ok();
        // As for execvp(3), a name with a slash is a path.
        if program.components().count() > 1 || program.is_absolute() {
            let missing = || ProgramNotFound { program: program.to_owned(), searched: Vec::new() };
            return is_program(program).then(|| program.to_owned()).ok_or_else(missing);
        }
        let mut candidates = self.directories.iter().map(|directory| directory.join(program));
        let missing = || ProgramNotFound { program: program.to_owned(), searched: self.directories.clone() };
        candidates.find(|path| is_program(path)).ok_or_else(missing)
    }
}

impl fmt::Display for ProgramNotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.searched.is_empty() {
            return write!(f, "{} does not exist or is not executable by this user", self.program.display());
        }
        let searched: Vec<_> = self.searched.iter().map(|d| d.to_string_lossy()).collect();
        write!(f, "{} is not installed (searched {})", self.program.display(), searched.join(", "))
    }
}

impl std::error::Error for ProgramNotFound {}

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
        let search = SearchPath::new(["a", "b", "c"].map(|d| scratch.path().join(d)));
        assert_eq!(search.find_program(Path::new("tool")), Ok(second.clone()));
        assert_eq!(search.find_program(&second), Ok(second));
        assert!(search.find_program(Path::new("other")).is_err());
        assert!(search.find_program(&scratch.path().join("a/tool")).is_err(), "it is not executable");
    }

    #[test]
    fn relative_and_repeated_entries_are_skipped() {
        let search = SearchPath::with_default_directories(
            Some(OsStr::new("/opt/x::.:/usr/bin")),
            Some(OsStr::new("/usr/bin:/bin")),
        );
        let path = search.as_path_variable();
        assert_eq!(path, "/opt/x:/usr/bin:/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin");
    }
}
