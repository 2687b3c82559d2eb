//! Makes the file system in the file of a volume, by the programs of e2fsprogs and xfsprogs.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use nodekeel_fsquota::Bytes;
use rustix::fs::MemfdFlags;

use super::{ImageFormat, ImageSpec, root_mode};
use crate::sys;

/// Directories of the programs, after those of a [`Formatter`]. The empty one stands for `PATH`.
const PROGRAM_DIRS: [&str; 4] = ["", "/usr/sbin", "/sbin", "/usr/local/sbin"];

/// Time limit of a program. A file is sparse: a file system of terabytes takes seconds.
const TIME_LIMIT: Duration = Duration::from_secs(300);

/// Interval between two checks whether the call is canceled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The standard input of a program is the image.
const IMAGE_PATH: &str = "/proc/self/fd/0";

/// Features of every ext4, independent of the mke2fs.conf of the host. *Source:* ext4(5); the defaults of e2fsprogs
/// 1.47.
const EXT4_FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,\
                             sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum";

/// File systems below this size get four times as many inodes for their size, as mke2fs(8) does for small ones.
const SMALL_BYTES: u64 = 512 << 20;

/// An XFS whose top directory is writable for everybody. *Source:* mkfs.xfs(8), `-p protofile`.
const XFS_PROTO: &[u8] = b"/\n0 0\nd--777 0 0\n$\n";

/// The file system of a volume was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The program is not installed: volumes of this format can't be created on the node.
    #[error(
        "{program} is missing on this node: install e2fsprogs for ext4 and xfsprogs for xfs, or use a class without \
         strict"
    )]
    Missing {
        /// The program.
        program: &'static str,
    },
    /// The program could not be started.
    #[error("can't run {program}")]
    Start {
        /// The program.
        program: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The program failed.
    #[error("{program} failed with {status}: {stderr}")]
    Failed {
        /// The program.
        program: &'static str,
        /// Exit status of the program.
        status: ExitStatus,
        /// The first line of its error output.
        stderr: String,
    },
    /// The program did not end in five minutes, and was killed.
    #[error("{program} did not end in five minutes, and was killed: is the disk overloaded?")]
    TimedOut {
        /// The program.
        program: &'static str,
    },
    /// The call was canceled, and the program killed.
    #[error("{program} was stopped before it was complete")]
    Canceled {
        /// The program.
        program: &'static str,
    },
    /// The top directory of the new ext4 could not be made writable for everybody.
    #[error("can't set the mode of the top directory of the new file system")]
    RootMode(#[source] io::Error),
}

/// Makes file systems, by programs that are looked for in its directories first.
#[derive(Debug, Default)]
pub(crate) struct Formatter {
    directories: Vec<PathBuf>,
}

impl ImageFormat {
    /// The program that makes the file system; `None` for a block device.
    pub fn mkfs_program(self) -> Option<&'static str> {
        match self {
            Self::Block => None,
            Self::Ext4 => Some("mkfs.ext4"),
            Self::Xfs => Some("mkfs.xfs"),
        }
    }

    /// Looks whether the node can make the file system: the program is in one of these directories, in `PATH` or in a
    /// directory of system programs, and can be started. Blocks for as long as it prints its version.
    ///
    /// # Errors
    /// [`FormatError::Missing`], [`FormatError::Start`], [`FormatError::Failed`] or [`FormatError::TimedOut`].
    pub fn check_program(self, directories: &[PathBuf]) -> Result<(), FormatError> {
        Formatter::new(directories.to_vec()).check_program(self)
    }
}

impl Formatter {
    pub(crate) fn new(directories: Vec<PathBuf>) -> Self {
        Self { directories }
    }

    /// Makes the file system of this format in a new, sparse file of this size. A block volume gets none.
    ///
    /// The top directory has mode 0777, as that of a volume that is a directory. The file has few blocks afterwards,
    /// and nothing is durable until it is synced.
    pub(crate) fn format_image(
        &self,
        image: &File,
        ImageSpec { format, size }: ImageSpec,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<(), FormatError> {
        let Some(program) = format.mkfs_program() else { return Ok(()) };
        if format == ImageFormat::Ext4 {
            self.run_program(program, ext4_arguments(size), image, is_canceled)?;
            return root_mode::open_root(image).map_err(FormatError::RootMode);
        }
        let failed = |source| FormatError::Start { program, source };
        let proto = proto_file().map_err(failed)?;
        // The child opens it anew, from its beginning.
        let proto_path = format!("/proc/{}/fd/{}", std::process::id(), proto.as_raw_fd());
        self.run_program(program, xfs_arguments(proto_path), image, is_canceled)
    }

    fn check_program(&self, format: ImageFormat) -> Result<(), FormatError> {
        let Some(program) = format.mkfs_program() else { return Ok(()) };
        let nothing = File::open("/dev/null").map_err(|source| FormatError::Start { program, source })?;
        let child = self.start_program(program, &["-V".into()], &nothing)?;
        let (status, stderr) = wait_for_end(child, program, &|| false)?;
        match status.success() {
            true => Ok(()),
            false => Err(FormatError::Failed { program, status, stderr: first_line(&stderr) }),
        }
    }

    fn run_program(
        &self,
        program: &'static str,
        mut arguments: Vec<OsString>,
        image: &File,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<(), FormatError> {
        arguments.push(IMAGE_PATH.into());
        let child = self.start_program(program, &arguments, image)?;
        let (status, stderr) = wait_for_end(child, program, is_canceled)?;
        if !status.success() {
            return Err(FormatError::Failed { program, status, stderr: first_line(&stderr) });
        }
        Ok(())
    }

    /// Starts a program, which ends with this one.
    fn start_program(
        &self,
        program: &'static str,
        arguments: &[OsString],
        image: &File,
    ) -> Result<Child, FormatError> {
        let failed = |source| FormatError::Start { program, source };
        for dir in self.directories.iter().map(PathBuf::as_path).chain(PROGRAM_DIRS.map(Path::new)) {
            let mut command = Command::new(dir.join(program));
            // An error quotes the output of the program, which is English by `LC_ALL`. The image is its
            // standard input: no path can lead it to another file.
            command.args(arguments).env("LC_ALL", "C").stdin(image.try_clone().map_err(failed)?);
            command.stdout(Stdio::null()).stderr(Stdio::piped());
            // The next start discards what this one has begun; it must not find the program still at work.
            sys::end_with_parent(&mut command);
            match command.spawn() {
                Ok(child) => return Ok(child),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Err(FormatError::Missing { program })
    }
}

fn ext4_arguments(size: Bytes) -> Vec<OsString> {
    let inode_ratio = if size.0 < SMALL_BYTES { "4096" } else { "16384" };
    // `-F`: a file, and not a device. `-m 0`: no blocks are reserved for root, so that a pod can use all of
    // its volume.
    let mut arguments = vec!["-q", "-F", "-b", "4096", "-I", "256", "-i", inode_ratio, "-m", "0"];
    // All blocks of a new file are zero already: nothing is written later to make them so.
    arguments.extend(["-O", EXT4_FEATURES, "-E", "lazy_itable_init=0,lazy_journal_init=1"]);
    arguments.into_iter().map(OsString::from).collect()
}

fn xfs_arguments(proto_path: String) -> Vec<OsString> {
    // `-K`: a new file is sparse, so that there is nothing to discard.
    let mut arguments = vec!["-q", "-f", "-K", "-s", "size=4096", "-b", "size=4096", "-m", "crc=1,reflink=1"];
    arguments.push("-p");
    arguments.into_iter().map(OsString::from).chain([proto_path.into()]).collect()
}

fn proto_file() -> io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create("mkfs-proto", MemfdFlags::CLOEXEC)?);
    file.write_all(XFS_PROTO)?;
    Ok(file)
}

/// Waits for the end of a program, and kills it if it takes too long or the call is canceled.
fn wait_for_end(
    mut child: Child,
    program: &'static str,
    is_canceled: &dyn Fn() -> bool,
) -> Result<(ExitStatus, String), FormatError> {
    let (stderr, started) = (child.stderr.take(), Instant::now());
    let (stopped, text) = thread::scope(|scope| {
        // Disconnected when the error output has ended.
        let (reading, is_read) = mpsc::channel::<()>();
        // On a thread of its own: a program that fills the pipe would wait for its reader forever.
        let reader = scope.spawn(move || {
            let (_reading, mut bytes) = (reading, Vec::new());
            let _ = stderr.map(|mut stderr| stderr.read_to_end(&mut bytes));
            bytes
        });
        let stopped = loop {
            match is_read.recv_timeout(POLL_INTERVAL) {
                Err(RecvTimeoutError::Timeout) if is_canceled() => {
                    break Some(FormatError::Canceled { program });
                }
                Err(RecvTimeoutError::Timeout) if started.elapsed() > TIME_LIMIT => {
                    break Some(FormatError::TimedOut { program });
                }
                Err(RecvTimeoutError::Timeout) => {}
                _ => break None,
            }
        };
        if stopped.is_some() {
            // The program may have ended in the meantime.
            let _ = child.kill();
        }
        (stopped, reader.join().unwrap_or_default())
    });
    // Also after a kill: once it is reaped, it writes nothing into the image, and no zombie is left.
    let status = child.wait().map_err(|source| FormatError::Start { program, source })?;
    match stopped {
        Some(error) => Err(error),
        None => Ok((status, String::from_utf8_lossy(&text).into_owned())),
    }
}

fn first_line(stderr: &str) -> String {
    let line = stderr.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("Usage:"));
    line.unwrap_or("it says no reason").to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;
    use std::process::Command;

    use super::*;

    fn new_image(bytes: u64) -> (tempfile::TempDir, std::path::PathBuf, File) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("image");
        let file = File::options().read(true).write(true).create_new(true).open(&path).expect("a file");
        file.set_len(bytes).expect("it is sparse");
        (directory, path, file)
    }

    fn output_of(program: &str, arguments: &[&str], path: &Path) -> (bool, String) {
        let programs = PROGRAM_DIRS.map(|dir| Path::new(dir).join(program));
        let run = |program| Command::new(program).args(arguments).arg(path).output().ok();
        let output = programs.iter().find_map(run).expect("a program of e2fsprogs");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    #[test]
    fn an_ext4_is_valid_sparse_and_writable_for_everybody() {
        for mebibytes in [8, 64, 10 << 10] {
            let size = Bytes(mebibytes << 20);
            let (_directory, path, file) = new_image(size.0);
            let formatter = Formatter::default();
            formatter
                .format_image(&file, ImageSpec { format: ImageFormat::Ext4, size }, &|| false)
                .expect("an ext4");
            let (is_valid, found) = output_of("e2fsck", &["-f", "-n"], &path);
            assert!(is_valid, "{mebibytes} MiB: {found}");
            let (_, root) = output_of("debugfs", &["-R", "stat <2>"], &path);
            assert!(root.contains("Mode:  0777"), "{root}");
            let (_, header) = output_of("dumpe2fs", &["-h"], &path);
            assert!(header.contains("has_journal") && header.contains("metadata_csum"), "{header}");
            assert_eq!(file.metadata().expect("metadata").len(), size.0);
            let used = file.metadata().expect("metadata").blocks() * 512;
            assert!(used <= 8 << 20, "{mebibytes} MiB: {used} bytes are allocated");
        }
    }

    #[test]
    fn a_block_volume_stays_empty() {
        let (_directory, _, file) = new_image(1 << 20);
        let block = ImageSpec { format: ImageFormat::Block, size: Bytes(1 << 20) };
        Formatter::default().format_image(&file, block, &|| false).expect("nothing to do");
        assert_eq!(file.metadata().expect("metadata").blocks(), 0);
    }

    #[test]
    fn a_missing_program_is_named() {
        let (_directory, _, file) = new_image(1 << 20);
        let formatter = Formatter::new(vec!["/nowhere".into()]);
        let missing = formatter.run_program("mkfs.nodekeel-test", Vec::new(), &file, &|| false);
        let error = missing.expect_err("missing");
        assert!(matches!(error, FormatError::Missing { program: "mkfs.nodekeel-test" }), "{error}");
        assert!(error.to_string().starts_with("mkfs.nodekeel-test is missing on this node"), "{error}");
    }

    #[test]
    fn a_program_in_a_directory_of_the_store_comes_first() {
        let (directory, _, file) = new_image(300 << 20);
        let program = directory.path().join("mkfs.xfs");
        std::os::unix::fs::symlink("/bin/false", &program).expect("a link");
        let formatter = Formatter::new(vec!["/nowhere".into(), directory.path().to_owned()]);
        let spec = ImageSpec { format: ImageFormat::Xfs, size: Bytes(300 << 20) };
        let error = formatter.format_image(&file, spec, &|| false).expect_err("it is /bin/false");
        assert!(matches!(&error, FormatError::Failed { program: "mkfs.xfs", .. }), "{error}");
        formatter.check_program(ImageFormat::Xfs).expect_err("it is /bin/false");
        for format in [ImageFormat::Block, ImageFormat::Ext4] {
            formatter.check_program(format).expect("it is installed, or there is none");
        }
    }

    #[test]
    fn the_error_of_a_failed_program_has_its_output() {
        let (_directory, _, file) = new_image(0);
        let spec = ImageSpec { format: ImageFormat::Ext4, size: Bytes(0) };
        let error = Formatter::default().format_image(&file, spec, &|| false).expect_err("it has no size");
        assert!(matches!(&error, FormatError::Failed { stderr, .. } if !stderr.is_empty()), "{error}");
    }

    #[test]
    fn a_canceled_program_is_killed() {
        let (_directory, _, file) = new_image(1 << 20);
        let started = Instant::now();
        let arguments = vec!["-f".into(), "/dev/null".into()];
        let stopped = Formatter::default().run_program("tail", arguments, &file, &|| true);
        let error = stopped.expect_err("canceled");
        assert!(matches!(error, FormatError::Canceled { .. }), "{error}");
        assert!(started.elapsed() < Duration::from_secs(60));
    }
}
