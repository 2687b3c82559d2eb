//! The settings of a child that take effect between its creation and its exec, and why a start has failed.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::error::ProcessError;
use super::limits::Rlimit;
use super::privileges::CapabilitySet;
use super::settings::Process;
use super::spawn::c_string;
use crate::sys::{ChildSetup, ResourceLimit, StartError, StartStep};

/// That of a login, and of systemd's services: see `UMask=` in systemd.exec(5).
const DEFAULT_UMASK: u32 = 0o022;

pub(super) fn build_setup(process: &Process) -> io::Result<ChildSetup> {
    let (limits, privileges) = (&process.limits, &process.privileges);
    let read_only_paths = privileges.read_only_paths.iter().map(|path| c_string(path.as_os_str()));
    let score = limits.oom_score_adj.map(|score| CString::new(score.to_string()));
    let is_root = process.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw()) == 0;
    Ok(ChildSetup {
        oom_score_adj: score.transpose()?,
        umask: privileges.umask.unwrap_or(DEFAULT_UMASK),
        resource_limits: limits.rlimits.iter().copied().map(Rlimit::to_kernel).collect(),
        groups: privileges.groups.clone(),
        capabilities: privileges.capabilities.map(CapabilitySet::bits),
        no_new_privs: privileges.no_new_privs.unwrap_or(!is_root),
        read_only_paths: read_only_paths.collect::<io::Result<_>>()?,
    })
}

/// The limits of all children, of the resources that the process has no limits for.
pub(super) fn default_limits(process: &Process, limits: &[Rlimit]) -> impl Iterator<Item = ResourceLimit> {
    let is_own = |limit: &Rlimit| process.limits.rlimits.iter().any(|own| own.resource == limit.resource);
    limits.iter().copied().filter(move |limit| !is_own(limit)).map(Rlimit::to_kernel)
}

/// The error of a failed start, with a hint.
pub(super) fn start_error(process: &Process, error: StartError) -> ProcessError {
    let StartError { step, source } = error;
    ProcessError::Start {
        program: process.program_path.clone(),
        hint: start_hint(process, step, &source),
        source,
    }
}

fn start_hint(process: &Process, step: StartStep, error: &io::Error) -> String {
    let program = &process.program_path;
    let is_path = program.as_os_str().as_bytes().contains(&b'/');
    match (step, error.raw_os_error()) {
        (StartStep::Fork, Some(libc::EAGAIN)) => {
            "can't create more processes: raise `ulimit -u` or the cgroup's pids.max".into()
        }
        // The mark is a soft limit, which can't exceed the hard one.
        (StartStep::Setup, Some(libc::EINVAL)) => {
            "the hard limit of file locks is too low: set `ulimit -Hx unlimited`".into()
        }
        (StartStep::Setup, Some(libc::EMFILE | libc::ENFILE)) => {
            "can't open more files: raise `ulimit -n`".into()
        }
        (StartStep::Setup, _) => "can't prepare the process".into(),
        (StartStep::Cgroup, _) => "can't start it in the cgroup that limits it".into(),
        (StartStep::OomScoreAdj, _) => {
            "can't set oom_score_adj: only root may set a value below this program's".into()
        }
        (StartStep::MountNamespace, Some(libc::EPERM)) => {
            "can't set read_only_paths: only root may make a mount namespace".into()
        }
        (StartStep::MountNamespace, _) => "can't make the mount namespace of read_only_paths".into(),
        (StartStep::ReadOnlyPath(index), error) => read_only_hint(process, index, error),
        (StartStep::ResourceLimit(index), Some(libc::EPERM)) => {
            format!(
                "can't set the resource limit {}: only root may raise a hard limit",
                rlimit_text(process, index)
            )
        }
        (StartStep::ResourceLimit(index), _) => {
            format!("can't set the resource limit {}", rlimit_text(process, index))
        }
        (StartStep::Groups, _) => "can't set the supplementary groups: only root may".into(),
        (StartStep::Capabilities, _) => {
            "can't set the capabilities: only root may, and only to those that it has".into()
        }
        (StartStep::NoNewPrivs, _) => "can't set no_new_privs".into(),
        (StartStep::Identity, _) => "can't change user or group: only root may".into(),
        (StartStep::Directory, _) => {
            let dir = process.current_dir.as_deref().unwrap_or(Path::new("."));
            format!("can't enter the working directory {}: create it or configure another", dir.display())
        }
        (StartStep::Exec, Some(libc::ENOENT)) if !is_path => {
            "not found in its PATH: install it or configure its full path".into()
        }
        // execve(2) fails with ENOENT also for a missing interpreter.
        (StartStep::Exec, Some(libc::ENOENT)) if program.exists() => {
            "its interpreter or loader is missing: check its #! line, or run `ldd`".into()
        }
        (StartStep::Exec, Some(libc::ENOENT | libc::ENOTDIR)) => {
            "no such file: install it or correct the path".into()
        }
        (StartStep::Exec, Some(libc::EACCES)) => {
            "not executable: check its mode, its directories' and the mount's noexec".into()
        }
        (StartStep::Exec, Some(libc::ENOEXEC)) => {
            "not a program for this host, nor a script with a #! line".into()
        }
        // Since Linux 3.1, a change of the user checks the number of processes only at the exec: see execve(2).
        (StartStep::Exec, Some(libc::EAGAIN)) => {
            "its user runs more processes than its resource limit nproc permits: raise the limit".into()
        }
        (StartStep::Exec, Some(libc::E2BIG)) => "its arguments and environment are too long".into(),
        (StartStep::Fork | StartStep::Exec, _) => "the kernel rejected the start".into(),
    }
}

fn rlimit_text(process: &Process, index: usize) -> String {
    process.limits.rlimits.get(index).map(Rlimit::to_string).unwrap_or_default()
}

fn read_only_hint(process: &Process, index: usize, errno: Option<i32>) -> String {
    let path = process.privileges.read_only_paths.get(index).map_or(Path::new(""), |path| path);
    let path = path.display();
    match errno {
        Some(libc::ENOENT) => {
            format!("can't make {path} read-only: it does not exist; create it, or correct read_only_paths")
        }
        Some(libc::ENOSYS) => format!("can't make {path} read-only: the kernel is older than Linux 5.12"),
        _ => format!("can't make {path} read-only"),
    }
}
