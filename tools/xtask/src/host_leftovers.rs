//! What daemons leave outside the directories that they are given: at their default paths, at built-in ones, and loop
//! devices.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use testbed::tools;

/// Where containerd's shims and its client keep their state, wherever containerd keeps its own.
const SHIMS: &str = "/run/containerd";
/// The names of network namespaces (ip-netns(8)).
const NETWORKS: &str = "/run/netns";
/// The namespaces of containers that this workspace runs, by which their cgroups are named.
const NAMESPACES: [&str; 3] = ["demo", "k8s.io", "default"];

/// All block devices, each with a directory or a link.
const BLOCK_DEVICES: &str = "/sys/block";

/// The paths of daemons, and the loop devices, that existed at some time.
#[derive(Debug)]
pub(crate) struct HostLeftovers {
    paths: BTreeSet<PathBuf>,
    devices: BTreeSet<LoopDevice>,
}

/// A loop device over a file that a test has created. With another file it is another device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LoopDevice {
    path: PathBuf,
    file: PathBuf,
}

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
        for parent in ["/etc/cni".into(), NETWORKS.into(), SHIMS.into(), Path::new(SHIMS).join("runc")] {
            found.extend(entries(&parent)?);
        }
        for hierarchy in hierarchies()? {
            found.extend(entries(&hierarchy)?.into_iter().filter(|path| is_of_containers(path)));
        }
        let devices = find_loop_devices(Path::new(BLOCK_DEVICES), &env::temp_dir())?;
        Ok(Self { paths: found, devices })
    }

    /// Removes the new ones that no daemon removes: empty directories of shims, of their client and of runc,
    /// and empty cgroups. Describes the new ones that are left.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub(crate) fn sweep(&self) -> Result<Vec<String>> {
        let now = Self::find()?;
        let new: Vec<_> = now.paths.difference(&self.paths).collect();
        // The innermost first.
        for path in new.into_iter().rev() {
            if path.starts_with(SHIMS) || is_of_containers(path) {
                // A directory that is not empty stays, and is reported.
                let _ = fs::remove_dir(path);
            }
        }
        Ok(self.describe_new(&Self::find()?))
    }

    /// Describes what exists now, and did not exist before.
    fn describe_new(&self, now: &Self) -> Vec<String> {
        let paths = now.paths.difference(&self.paths).map(|path| path.display().to_string());
        let devices = now.devices.difference(&self.devices);
        let devices =
            devices.map(|device| format!("{} over {}", device.path.display(), device.file.display()));
        paths.chain(devices).collect()
    }
}

/// The loop devices whose files are, or were, below a directory: those of other programs are none of ours.
///
/// *Source:* Linux `drivers/block/loop.c`: the file's path, with ` (deleted)` behind that of a removed one.
fn find_loop_devices(block_devices: &Path, directory: &Path) -> Result<BTreeSet<LoopDevice>> {
    let mut devices = BTreeSet::new();
    for device in entries(block_devices)? {
        // Only a loop device with a file has it.
        let Ok(file) = fs::read_to_string(device.join("loop/backing_file")) else { continue };
        let file = PathBuf::from(file.trim_end());
        if file.starts_with(directory) {
            let name = device.file_name().unwrap_or_default();
            devices.insert(LoopDevice { path: Path::new("/dev").join(name), file });
        }
    }
    Ok(devices)
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
    fn a_loop_device_is_left_by_a_test_if_its_file_is_in_the_temporary_directory() {
        let sysfs = tempfile::tempdir().unwrap();
        for name in ["loop3", "sda"] {
            fs::create_dir(sysfs.path().join(name)).unwrap();
        }
        for (name, file) in [
            ("loop0", "/scratch/a/image"),
            ("loop1", "/scratch/b/image (deleted)"),
            ("loop2", "/var/lib/images/image"),
        ] {
            let directory = sysfs.path().join(name).join("loop");
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("backing_file"), format!("{file}\n")).unwrap();
        }
        let found = find_loop_devices(sysfs.path(), Path::new("/scratch")).unwrap();
        let names: Vec<_> = found.iter().map(|device| device.path.display().to_string()).collect();
        assert_eq!(names, ["/dev/loop0", "/dev/loop1"]);
    }

    #[test]
    fn what_existed_before_is_not_left() {
        let leftovers = |paths: &[&str], devices: &[(&str, &str)]| HostLeftovers {
            paths: paths.iter().map(PathBuf::from).collect(),
            devices: devices
                .iter()
                .map(|(path, file)| LoopDevice { path: path.into(), file: file.into() })
                .collect(),
        };
        let before = leftovers(&["/run/etcd"], &[("/dev/loop0", "/scratch/a"), ("/dev/loop1", "/scratch/b")]);
        let now = leftovers(
            &["/run/etcd", "/run/noded"],
            &[("/dev/loop0", "/scratch/a"), ("/dev/loop1", "/scratch/c")],
        );
        assert_eq!(before.describe_new(&now), ["/run/noded", "/dev/loop1 over /scratch/c"]);
        assert_eq!(now.describe_new(&now), Vec::<String>::new());
    }

    #[test]
    fn leftovers_are_recognised_by_their_names() {
        assert!(is_of_daemons(Path::new("/run/containerd")) && is_of_daemons(Path::new("/var/lib/etcd")));
        assert!(!is_of_daemons(Path::new("/run/lock")));
        assert!(is_of_containers(Path::new("/sys/fs/cgroup/pids/k8s.io")));
        assert!(!is_of_containers(Path::new("/sys/fs/cgroup/system.slice")));
    }
}
