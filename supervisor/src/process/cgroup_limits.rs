//! Enforces limits by cgroups: enables controllers, and writes the limits of one cgroup.
//!
//! A cgroup other than the root of the hierarchy either contains processes or passes controllers on. Therefore
//! this program moves into a cgroup below its own before it enables the first controller there:
//!
//! ```text
//! <parent>                      controllers enabled
//! ├── nodekeel-supervisor       this program, and its children without a cgroup
//! └── nodekeel-<program>-<host>-<n>
//!     └── <start>               memory.max, cpu.max, pids.max, io.weight
//! ```
//!
//! *Source:* the kernel's `Documentation/admin-guide/cgroup-v2.rst`, "No Internal Process Constraint".

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::cgroup::CgroupParent;
use super::limits::{CgroupSetting, ProcessLimits};
use super::mark::{ProcessMark, ProgramId};
use super::procfs;

/// The cgroup into which this program moves.
const OWN_CGROUP: &str = "nodekeel-supervisor";
/// The number of times that the processes of a cgroup are moved: those that are being forked appear later.
const MAX_MOVES: usize = 8;

/// The reason why a limit can't be enforced. A retry helps only after the cause is gone.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CgroupLimitError {
    /// The process gets no cgroup: the supervisor may not create one, or cgroups are disabled.
    #[error("{setting} needs a cgroup: mount cgroup v2, and run as root or in a delegated cgroup")]
    NoCgroup {
        /// The limit, as its file is called: `memory.max`.
        setting: &'static str,
        /// The reason why there is none; `None` if the supervisor has logged it.
        #[source]
        source: Option<io::Error>,
    },
    /// A process of [`KillMode::Process`](super::KillMode::Process) gets no cgroup.
    #[error("{setting} needs KillMode::Descendants: a process of KillMode::Process has no cgroup")]
    KillMode {
        /// The limit.
        setting: &'static str,
    },
    /// The kernel, or the cgroup above, doesn't offer the controller.
    #[error(
        "{setting} needs the cgroup controller {controller}, which {} doesn't have: delegate it, or mount it as cgroup v2 if a v1 hierarchy uses it",
        parent.display()
    )]
    NoController {
        /// The limit.
        setting: &'static str,
        /// The controller.
        controller: &'static str,
        /// The directory of the supervisor's parent cgroup.
        parent: PathBuf,
    },
    /// The parent cgroup contains processes of other programs, so it can't pass on controllers.
    #[error(
        "can't enable cgroup controllers below {}: it also contains process {pid}, of another program; run this program in a dedicated cgroup, as a systemd unit with Delegate=yes does",
        parent.display()
    )]
    Occupied {
        /// The directory of the supervisor's parent cgroup.
        parent: PathBuf,
        /// One of those processes; 0 if it is in another PID namespace.
        pid: i32,
    },
    /// The kernel rejected to enable a controller.
    #[error("can't enable the cgroup controller {controller} below {}", dir.display())]
    Enable {
        /// The controller.
        controller: &'static str,
        /// The directory of the cgroup.
        dir: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// This program can't move below its cgroup, as it must before it passes on controllers.
    #[error("can't move this program into the cgroup {}", dir.display())]
    Move {
        /// The directory of that cgroup.
        dir: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The kernel rejected a limit.
    #[error("can't set {setting} to {value}")]
    Set {
        /// The limit.
        setting: &'static str,
        /// The value.
        value: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Checks that the limits can be enforced below this parent. It changes nothing.
///
/// # Errors
/// [`CgroupLimitError::NoCgroup`] or [`CgroupLimitError::NoController`]. A start can still fail: the parent
/// may contain other programs, and the kernel may reject a value.
pub fn check_cgroup_limits(parent: &CgroupParent, limits: &ProcessLimits) -> Result<(), CgroupLimitError> {
    let settings = limits.cgroup_settings();
    let Some(first) = settings.first() else { return Ok(()) };
    let no_cgroup = |source| CgroupLimitError::NoCgroup { setting: first.file, source };
    let parent = usable_parent(parent).map_err(|error| no_cgroup(Some(error)))?;
    check_controllers(&parent.ok_or_else(|| no_cgroup(None))?, &settings)
}

fn check_controllers(parent: &Path, settings: &[CgroupSetting]) -> Result<(), CgroupLimitError> {
    let available = read_controllers(&parent.join("cgroup.controllers"));
    match settings.iter().find(|setting| !available.iter().any(|name| name == setting.controller)) {
        None => Ok(()),
        Some(&CgroupSetting { controller, file, .. }) => {
            Err(CgroupLimitError::NoController { setting: file, controller, parent: parent.to_owned() })
        }
    }
}

/// The directory in which a host creates its cgroup; `None` where cgroups are disabled.
///
/// # Errors
/// There is none, or without permission.
pub(super) fn usable_parent(wanted: &CgroupParent) -> io::Result<Option<PathBuf>> {
    let parent = match wanted {
        CgroupParent::Current => above_own_cgroup(procfs::own_cgroup_dir()?),
        CgroupParent::Path(parent) => parent.clone(),
        CgroupParent::Disabled => return Ok(None),
    };
    // To create a child in another cgroup, a process must be allowed to move processes out of its present
    // one.
    rustix::fs::access(parent.join("cgroup.procs"), rustix::fs::Access::WRITE_OK)?;
    Ok(Some(parent))
}

/// The cgroup that this program was started in, if it has moved below it.
fn above_own_cgroup(dir: PathBuf) -> PathBuf {
    match dir.parent() {
        Some(parent) if dir.ends_with(OWN_CGROUP) => parent.to_owned(),
        _ => dir,
    }
}

/// Enables the controllers of the settings in the cgroups below these directories, the upper one first.
pub(super) fn enable_controllers(dirs: &[&Path], settings: &[CgroupSetting]) -> Result<(), CgroupLimitError> {
    for dir in dirs {
        check_controllers(dir, settings)?;
        let file = dir.join("cgroup.subtree_control");
        let enabled = read_controllers(&file);
        for &CgroupSetting { controller, .. } in settings {
            if enabled.iter().any(|name| name == controller) {
                continue;
            }
            let enable = || fs::write(&file, format!("+{controller}"));
            let enabled = match enable() {
                // A cgroup that contains processes passes no controllers on: this program moves below it first.
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                    move_own_processes(dir)?;
                    enable()
                }
                result => result,
            };
            let failed = |source| CgroupLimitError::Enable { controller, dir: dir.to_path_buf(), source };
            enabled.map_err(failed)?;
        }
    }
    Ok(())
}

/// Sets the limits of the cgroup of a kept process again. They are gone where the controllers were disabled since its
/// start: systemd does so when it starts a unit with `Delegate=yes` again while processes are left in its cgroup.
///
/// *Source:* `unit_prune_cgroup` and `unit_update_cgroup` in systemd's `src/core/cgroup.c`.
pub(super) fn renew_limits(dir: &Path, limits: &ProcessLimits) -> Result<(), CgroupLimitError> {
    let settings = limits.cgroup_settings();
    let Some(parent) = dir.parent().filter(|_| !settings.is_empty()) else { return Ok(()) };
    // Where the kernel still has them, this program need not be able to enable controllers.
    write_settings(dir, &settings).or_else(|_| {
        enable_controllers(&[parent], &settings)?;
        write_settings(dir, &settings)
    })
}

pub(super) fn write_settings(dir: &Path, settings: &[CgroupSetting]) -> Result<(), CgroupLimitError> {
    settings.iter().try_for_each(|&CgroupSetting { file, ref value, .. }| {
        // It never creates a file: outside of a cgroup, it fails.
        let write = || {
            let mut opened = fs::File::options().write(true).open(dir.join(file))?;
            io::Write::write_all(&mut opened, value.as_bytes())
        };
        write().map_err(|source| CgroupLimitError::Set { setting: file, value: value.clone(), source })
    })
}

/// Moves this program, and its children in the same cgroup, into a cgroup below.
fn move_own_processes(parent: &Path) -> Result<(), CgroupLimitError> {
    let own = parent.join(OWN_CGROUP);
    let failed = |source| CgroupLimitError::Move { dir: own.clone(), source };
    for _ in 0..MAX_MOVES {
        let processes = fs::read_to_string(parent.join("cgroup.procs")).map_err(failed)?;
        let pids: Vec<i32> = processes.lines().filter_map(|line| line.parse().ok()).collect();
        if pids.is_empty() {
            return Ok(());
        }
        if let Some(&pid) = pids.iter().find(|pid| !is_own_process(**pid)) {
            return Err(CgroupLimitError::Occupied { parent: parent.to_owned(), pid });
        }
        match fs::create_dir(&own) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
        for pid in pids {
            match fs::write(own.join("cgroup.procs"), pid.to_string()) {
                // It has exited.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                moved => moved.map_err(failed)?,
            }
        }
    }
    Ok(())
}

/// Returns whether it is this program, a child of it, or a descendant that carries one of its marks.
fn is_own_process(pid: i32) -> bool {
    let has_mark = |pid| {
        let mark = ProcessMark::from_limit(procfs::locks_limit(pid).ok()?)?;
        Some(mark.program_id() == ProgramId::current().ok()?)
    };
    let own = procfs::own_pid();
    pid == own || has_mark(pid).unwrap_or(false) || procfs::parent_pid(pid).is_ok_and(|parent| parent == own)
}

/// The names in a file of controllers; none if it can't be read.
fn read_controllers(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plain files with the names of a cgroup's.
    fn cgroup(controllers: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("cgroup.controllers"), controllers).expect("it is written");
        fs::write(dir.path().join("cgroup.procs"), "").expect("it is written");
        dir
    }

    fn limits() -> ProcessLimits {
        ProcessLimits { memory_max: Some(4096), pids_max: Some(9), ..ProcessLimits::default() }
    }

    #[test]
    fn limits_without_cgroups_or_controllers_are_refused_by_name() {
        let check = |parent: &CgroupParent, limits: &ProcessLimits| {
            check_cgroup_limits(parent, limits).map_err(|error| error.to_string())
        };
        let nowhere = CgroupParent::Path("/no/such".into());
        assert_eq!(check(&nowhere, &ProcessLimits::default()), Ok(()));
        let error = check(&nowhere, &limits()).expect_err("no cgroup");
        assert!(error.starts_with("memory.max needs a cgroup: mount cgroup v2"), "{error}");
        assert!(check(&CgroupParent::Disabled, &limits()).is_err());
        let (whole, part) = (cgroup("cpuset cpu memory pids\n"), cgroup("cpu memory\n"));
        assert_eq!(check(&CgroupParent::Path(whole.path().into()), &limits()), Ok(()));
        let error = check(&CgroupParent::Path(part.path().into()), &limits()).expect_err("no pids");
        assert!(error.starts_with("pids.max needs the cgroup controller pids, which /"), "{error}");
    }

    #[test]
    fn a_limit_is_written_only_to_a_file_of_the_kernel() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("memory.max"), "").expect("it is written");
        let error = write_settings(dir.path(), &limits().cgroup_settings()).expect_err("no pids.max");
        assert_eq!(error.to_string(), "can't set pids.max to 9");
        assert_eq!(fs::read_to_string(dir.path().join("memory.max")).expect("it is there"), "4096");
        assert!(!dir.path().join("pids.max").exists());
    }

    #[test]
    fn limits_that_are_gone_are_enabled_again_and_others_stay() {
        let parent = cgroup("memory pids\n");
        let (kept, control) = (parent.path().join("kept"), parent.path().join("cgroup.subtree_control"));
        fs::create_dir(&kept).expect("it is made");
        let renew = || renew_limits(&kept, &limits()).map_err(|error| error.to_string());
        // Only the kernel makes the file, once the controller is enabled.
        assert_eq!(renew(), Err("can't set memory.max to 4096".to_owned()));
        assert_eq!(fs::read_to_string(&control).expect("it is written"), "+pids");
        fs::remove_file(&control).expect("it is there");
        for file in ["memory.max", "pids.max"] {
            fs::write(kept.join(file), "").expect("it is written");
        }
        assert_eq!(renew(), Ok(()));
        assert_eq!(fs::read_to_string(kept.join("pids.max")).expect("it is there"), "9");
        assert!(!control.exists(), "nothing is enabled that is");
    }

    #[test]
    fn a_program_that_has_moved_keeps_its_parent() {
        let parent = PathBuf::from("/sys/fs/cgroup/a.service");
        assert_eq!(above_own_cgroup(parent.join(OWN_CGROUP)), parent);
        assert_eq!(above_own_cgroup(parent.clone()), parent);
    }

    #[test]
    fn only_this_program_and_what_it_has_marked_are_its_own() {
        assert!(is_own_process(procfs::own_pid()));
        assert!(!is_own_process(0) && !is_own_process(i32::MAX));
    }
}
