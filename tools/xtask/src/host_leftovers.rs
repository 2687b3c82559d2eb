//! What daemons leave outside the directories that they are given: at their default paths, at built-in ones, and loop
//! devices.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use testbed::{leftovers, tools};

/// Where containerd's shims and its client keep their state, wherever containerd keeps its own.
const SHIMS: &str = "/run/containerd";
/// Directories of whose entries each is one that a daemon has made, with the names of network namespaces (ip-netns(8)).
const OF_DAEMONS: [&str; 4] = ["/etc/cni", "/run/netns", SHIMS, "/run/containerd/runc"];
/// The namespaces of containers that this workspace runs, by which their cgroups are named.
const NAMESPACES: [&str; 3] = ["demo", "k8s.io", "default"];

/// The paths of daemons, and the loop devices over files in the temporary directory, that existed at some time.
#[derive(Debug)]
pub(crate) struct HostLeftovers(BTreeSet<PathBuf>);

impl HostLeftovers {
    /// Finds those that exist now.
    ///
    /// # Errors
    /// A directory can't be read.
    pub(crate) fn find() -> Result<Self> {
        let mut found = BTreeSet::new();
        for parent in ["/run", "/opt", "/var/lib", "/etc"] {
            found.extend(entries(Path::new(parent))?.into_iter().filter(|path| is_of_daemons(path)));
        }
        for parent in OF_DAEMONS {
            found.extend(entries(Path::new(parent))?);
        }
        for hierarchy in hierarchies()? {
            found.extend(entries(&hierarchy)?.into_iter().filter(|path| is_of_containers(path)));
        }
        let devices = leftovers::find_loop_devices(&env::temp_dir())?;
        found.extend(devices.into_iter().map(|name| Path::new("/dev").join(name)));
        Ok(Self(found))
    }

    /// Removes the new ones that no daemon removes: empty directories of shims, of their client and of runc,
    /// and empty cgroups. Gives the new ones that are left.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub(crate) fn sweep(&self) -> Result<Vec<PathBuf>> {
        // The innermost first.
        for path in Self::find()?.0.difference(&self.0).collect::<Vec<_>>().into_iter().rev() {
            if path.starts_with(SHIMS) || is_of_containers(path) {
                // A directory that is not empty stays, and is reported.
                let _ = fs::remove_dir(path);
            }
        }
        Ok(Self::find()?.0.difference(&self.0).cloned().collect())
    }
}

/// The entries of a directory; none where it doesn't exist.
fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(directory) {
        Ok(entries) => Ok(entries.flatten().map(|entry| entry.path()).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("read {}", directory.display())),
    }
}

/// The mount points of cgroups.
///
/// *Source:* proc_pid_mountinfo(5): the fifth field is the mount point, the first after a lone dash the type.
fn hierarchies() -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
    let mount_point = |line: &str| {
        let (mount, file_system) = line.split_once(" - ")?;
        file_system.starts_with("cgroup").then(|| mount.split(' ').nth(4).map(PathBuf::from))?
    };
    Ok(table.lines().filter_map(mount_point).collect())
}

fn is_of_daemons(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    [tools::ETCD.name, tools::CONTAINERD.name, "nodekeel", "noded", "cni"]
        .iter()
        .any(|word| name.contains(word))
}

fn is_of_containers(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    NAMESPACES.contains(&&*name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_are_recognised_by_their_names() {
        assert!(is_of_daemons(Path::new("/run/containerd")) && is_of_daemons(Path::new("/var/lib/etcd")));
        assert!(!is_of_daemons(Path::new("/run/lock")));
        assert!(is_of_containers(Path::new("/sys/fs/cgroup/pids/k8s.io")));
        assert!(!is_of_containers(Path::new("/sys/fs/cgroup/system.slice")));
    }
}
