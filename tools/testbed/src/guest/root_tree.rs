//! The files of a guest's root, and the read-only image of them.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::tools;

/// Directories that are links into `/usr`, as on Debian.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];

/// Files by their path in the guest. All belong to root; files are read when the image is made.
#[derive(Clone, Debug, Default)]
pub(super) struct RootTree {
    entries: BTreeMap<PathBuf, TreeEntry>,
    /// Programs whose libraries are not added yet.
    programs: Vec<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TreeEntry {
    Directory,
    /// The content and mode of a file of this machine.
    File(PathBuf),
    Text {
        mode: u32,
        content: Vec<u8>,
    },
    Link(PathBuf),
}

impl RootTree {
    /// The targets of links into `/usr`, and the mount points.
    pub(super) fn skeleton() -> Self {
        let mut tree = Self::default();
        for name in MERGED {
            tree.insert_entry(Path::new("/usr").join(name), TreeEntry::Directory);
            tree.entries.insert(Path::new("/").join(name), TreeEntry::Link(Path::new("usr").join(name)));
        }
        for name in ["dev", "proc", "sys", "run", "tmp", "root", "var/tmp", "usr/lib/modules"] {
            tree.insert_entry(Path::new("/").join(name), TreeEntry::Directory);
        }
        tree
    }

    pub(super) fn add_directory(&mut self, at: impl AsRef<Path>) {
        self.insert_entry(resolve_path(at.as_ref()), TreeEntry::Directory);
    }

    pub(super) fn add_file(&mut self, at: impl AsRef<Path>, source: &Path) {
        self.insert_entry(resolve_path(at.as_ref()), TreeEntry::File(source.to_owned()));
    }

    pub(super) fn add_text(&mut self, at: impl AsRef<Path>, mode: u32, content: impl Into<Vec<u8>>) {
        self.insert_entry(resolve_path(at.as_ref()), TreeEntry::Text { mode, content: content.into() });
    }

    /// A link, unless the path exists already.
    pub(super) fn add_link(&mut self, at: impl AsRef<Path>, target: impl Into<PathBuf>) {
        let at = resolve_path(at.as_ref());
        if !self.entries.contains_key(&at) {
            self.insert_entry(at, TreeEntry::Link(target.into()));
        }
    }

    /// A file, and the libraries that it is linked to.
    pub(super) fn add_program(&mut self, at: impl AsRef<Path>, source: &Path) {
        self.add_file(at, source);
        self.programs.push(source.to_owned());
    }

    /// A directory with all entries below it whose names pass `keep`, links as links.
    ///
    /// # Errors
    /// It can't be read.
    pub(super) fn copy_directory(
        &mut self,
        at: &Path,
        source: &Path,
        keep: &dyn Fn(&OsStr) -> bool,
    ) -> Result<()> {
        self.add_directory(at);
        for entry in fs::read_dir(source).with_context(|| format!("list {}", source.display()))? {
            let entry = entry.with_context(|| format!("list {}", source.display()))?;
            let (name, path) = (entry.file_name(), entry.path());
            if !keep(&name) {
                continue;
            }
            let kind = entry.file_type().with_context(|| format!("stat {}", path.display()))?;
            if kind.is_dir() {
                self.copy_directory(&at.join(name), &path, keep)?;
            } else if kind.is_symlink() {
                let target = fs::read_link(&path).with_context(|| format!("read {}", path.display()))?;
                self.add_link(at.join(name), target);
            } else if kind.is_file() {
                self.add_file(at.join(name), &path);
            }
        }
        Ok(())
    }

    /// Makes the image: a squashfs without compression, which is written as fast as the files are read.
    ///
    /// # Errors
    /// A file can't be read, or `sqfstar` fails.
    pub(super) fn write_image(&mut self, image: &Path) -> Result<()> {
        for library in find_libraries(&std::mem::take(&mut self.programs))? {
            self.add_file(&library, &library);
        }
        let mut command = Command::new(tools::find_tool(tools::SQFSTAR)?);
        command.args([
            "-noI",
            "-noD",
            "-noF",
            "-noX",
            "-no-xattrs",
            "-no-duplicates",
            "-quiet",
            "-no-progress",
        ]);
        command.arg(image).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().context("execute sqfstar")?;
        let pipe = child.stdin.take().context("the input is piped")?;
        let written = self.write_tar(pipe);
        let done = child.wait_with_output().context("wait for sqfstar")?;
        let errors = String::from_utf8_lossy(&done.stderr);
        // sqfstar's error says more than a broken pipe.
        ensure!(done.status.success(), "sqfstar failed ({}): {}", done.status, errors.trim());
        written
    }

    fn write_tar(&self, to: impl Write) -> Result<()> {
        let mut archive = tar::Builder::new(std::io::BufWriter::with_capacity(1 << 20, to));
        for (path, entry) in &self.entries {
            let relative = path.strip_prefix("/").unwrap_or(path);
            append_entry(&mut archive, relative, entry)
                .with_context(|| format!("put {} into the guest's root", path.display()))?;
        }
        archive.into_inner().and_then(|mut to| to.flush()).context("write the guest's root")
    }

    fn insert_entry(&mut self, at: PathBuf, entry: TreeEntry) {
        for parent in at.ancestors().skip(1).filter(|parent| *parent != Path::new("/")) {
            self.entries.entry(parent.to_owned()).or_insert(TreeEntry::Directory);
        }
        self.entries.insert(at, entry);
    }
}

/// The path in the guest: absolute, without dots, in `/usr` where the directory is a link into it.
fn resolve_path(at: &Path) -> PathBuf {
    let mut found = PathBuf::from("/");
    for component in at.components() {
        match component {
            Component::Normal(name) => {
                if found == Path::new("/") && MERGED.iter().any(|merged| name == *merged) {
                    found.push("usr");
                }
                found.push(name);
            }
            Component::ParentDir => drop(found.pop()),
            _ => {}
        }
    }
    found
}

fn append_entry(archive: &mut tar::Builder<impl Write>, path: &Path, entry: &TreeEntry) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    let mut add = |kind, mode, size, content: &mut dyn Read| {
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(size);
        archive.append_data(&mut header, path, content)
    };
    match entry {
        TreeEntry::Directory => {
            let mode = if path.ends_with("tmp") { 0o1777 } else { 0o755 };
            add(tar::EntryType::Directory, mode, 0, &mut std::io::empty())?;
        }
        TreeEntry::File(source) => {
            let mut file = File::open(source).with_context(|| format!("open {}", source.display()))?;
            let stat = file.metadata().with_context(|| format!("stat {}", source.display()))?;
            ensure!(stat.is_file(), "{} is not a file", source.display());
            add(tar::EntryType::Regular, stat.permissions().mode() & 0o7777, stat.len(), &mut file)?;
        }
        TreeEntry::Text { mode, content } => {
            add(tar::EntryType::Regular, *mode, content.len() as u64, &mut content.as_slice())?;
        }
        TreeEntry::Link(target) => {
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_mode(0o777);
            header.set_size(0);
            archive.append_link(&mut header, path, target)?;
        }
    }
    Ok(())
}

/// The libraries and loaders that the programs need.
///
/// # Errors
/// `ldd` is missing, or does not find one of them.
pub(super) fn find_libraries(programs: &[PathBuf]) -> Result<Vec<PathBuf>> {
    if programs.is_empty() {
        return Ok(Vec::new());
    }
    let mut command = Command::new(tools::find_tool(tools::LDD)?);
    // It fails where one of them is static, and reports that in its output.
    let done = command.args(programs).stdin(Stdio::null()).output().context("execute ldd")?;
    let text = String::from_utf8_lossy(&done.stdout);
    if let Some(line) = text.lines().find(|line| line.trim_end().ends_with("=> not found")) {
        anyhow::bail!("find a library of the guest's programs: {}", line.trim());
    }
    Ok(text.lines().filter_map(parse_library).collect())
}

/// *Source:* ldd(1): `name => path (address)`, or `path (address)` for the loader.
fn parse_library(line: &str) -> Option<PathBuf> {
    let line = line.strip_prefix('\t')?;
    let (path, _) = line.split_once(" => ").map_or(line, |(_, path)| path).rsplit_once(" (0x")?;
    path.starts_with('/').then(|| PathBuf::from(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_absolute_without_dots_and_below_usr_where_debian_links() {
        assert_eq!(resolve_path(Path::new("/bin/sh")), Path::new("/usr/bin/sh"));
        assert_eq!(resolve_path(Path::new("/opt/bin/sh")), Path::new("/opt/bin/sh"));
        assert_eq!(resolve_path(Path::new("/a/../../b/./c")), Path::new("/b/c"));
    }

    #[test]
    fn a_missing_file_is_named() {
        let mut tree = RootTree::default();
        tree.add_file("/x", Path::new("/nowhere/x"));
        let error = format!("{:#}", tree.write_tar(std::io::sink()).unwrap_err());
        assert!(error.contains("/nowhere/x"), "{error}");
    }
}
