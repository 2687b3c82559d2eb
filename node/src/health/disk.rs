//! The free space and inodes of the node's disks, measured when a client asks.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::stat::stat;
use nix::sys::statvfs::statvfs;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::{
    ConditionSeverity, ConditionsFuture, HealthCondition, HealthSource, NodeSnapshot, SOURCE_TIMEOUT,
};
use crate::config::HealthConfig;
use crate::program_name::program_name;

/// The room of one file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskSpace {
    /// A directory on it.
    pub(crate) path: PathBuf,
    /// Bytes that any user may still use.
    pub(crate) free_bytes: u64,
    pub(crate) total_bytes: u64,
    /// Inodes that any user may still use.
    pub(crate) free_inodes: u64,
    /// Zero where the file system has no fixed number of them.
    pub(crate) total_inodes: u64,
}

/// Held while the kernel answers: a disk that hangs keeps one thread, however often it is asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct MeasureLock(Arc<Mutex<()>>);

/// Measures the file systems of these directories.
#[derive(Debug, Clone)]
pub(crate) struct DiskWatch {
    paths: Vec<PathBuf>,
    config: HealthConfig,
    measuring: MeasureLock,
}

impl DiskWatch {
    pub(crate) fn new(paths: Vec<PathBuf>, config: &HealthConfig, measuring: MeasureLock) -> Self {
        Self { paths, config: config.clone(), measuring }
    }

    /// Each file system once; none if the kernel does not answer in time.
    pub(crate) async fn measured_disks(&self) -> Vec<DiskSpace> {
        timeout(SOURCE_TIMEOUT, self.measure()).await.map(|(disks, _)| disks).unwrap_or_default()
    }

    /// Each file system once, and what can't be measured.
    async fn measure(&self) -> (Vec<DiskSpace>, Vec<HealthCondition>) {
        let guard = Arc::clone(&self.measuring.0).lock_owned().await;
        let paths = self.paths.clone();
        let measured = spawn_blocking(move || {
            // The guard moves to the thread: a statvfs of a disk that hangs can't be canceled, and further calls
            // wait here instead of occupying a thread each.
            let _held = guard;
            measure_disks(&paths)
        });
        // The thread fails only while the runtime shuts down.
        measured.await.unwrap_or_default()
    }
}

impl HealthSource for DiskWatch {
    fn conditions<'a>(&'a self, _: &'a NodeSnapshot) -> ConditionsFuture<'a> {
        Box::pin(async {
            let (disks, mut conditions) = self.measure().await;
            conditions.extend(disks.iter().flat_map(|disk| disk_conditions(disk, &self.config)));
            conditions
        })
    }
}

fn measure_disks(paths: &[PathBuf]) -> (Vec<DiskSpace>, Vec<HealthCondition>) {
    let (mut devices, mut disks, mut failed) = (BTreeSet::new(), Vec::new(), Vec::new());
    for path in paths {
        let measured = stat(path).and_then(|found| {
            // Directories on one device are on one file system: the first one stands for it.
            if devices.insert(found.st_dev) { measure_disk(path).map(Some) } else { Ok(None) }
        });
        match measured {
            Ok(disk) => disks.extend(disk),
            Err(errno) => {
                let problem = format!("its free space can't be read: {}", errno.desc());
                let hint = format!("mount or repair its disk, then restart {}", program_name());
                failed.push(HealthCondition::problem(path.display().to_string(), problem).hint(hint));
            }
        }
    }
    (disks, failed)
}

fn measure_disk(path: &Path) -> nix::Result<DiskSpace> {
    let disk = statvfs(path)?;
    // statvfs(3) counts blocks in units of the fragment size.
    let bytes = |blocks: u64| blocks.saturating_mul(disk.fragment_size());
    Ok(DiskSpace {
        path: path.to_owned(),
        // Without the blocks that the file system reserves for root.
        free_bytes: bytes(disk.blocks_available()),
        total_bytes: bytes(disk.blocks()),
        free_inodes: disk.files_available(),
        total_inodes: disk.files(),
    })
}

/// The conditions of a disk with too few free bytes or inodes.
fn disk_conditions(disk: &DiskSpace, config: &HealthConfig) -> Vec<HealthCondition> {
    let path = disk.path.display().to_string();
    let condition = |severity, problem: String, hint: String| HealthCondition {
        severity,
        ..HealthCondition::problem(path.as_str(), problem).hint(hint)
    };
    let space = severity(disk.free_bytes, disk.total_bytes, config).map(|severity| {
        let [free, total] = [disk.free_bytes, disk.total_bytes].map(format_bytes);
        let hint = format!("delete what is not needed (`du -xh -d 2 {path}`), or grow the disk");
        condition(severity, format!("its disk is almost full: {free} of {total} free"), hint)
    });
    let inodes = severity(disk.free_inodes, disk.total_inodes, config).map(|severity| {
        let (free, total) = (disk.free_inodes, disk.total_inodes);
        let hint = format!("delete small files (`du -x --inodes -d 2 {path}`), or grow the disk");
        condition(severity, format!("its disk is almost out of inodes: {free} of {total} free"), hint)
    });
    space.into_iter().chain(inodes).collect()
}

/// The severity of this little room; `None` if there is enough.
pub(super) fn severity(free: u64, total: u64, config: &HealthConfig) -> Option<ConditionSeverity> {
    // A total of 0, as btrfs reports for its inodes, is never below. The products may exceed a u64.
    let is_below = |percent: u8| u128::from(free) * 100 < u128::from(total) * u128::from(percent);
    if is_below(config.min_free_percent) {
        Some(ConditionSeverity::Problem)
    } else {
        is_below(config.warn_free_percent).then_some(ConditionSeverity::Warning)
    }
}

/// A number of bytes in the largest binary unit that it has at least one of, cut to one digit.
pub(crate) fn format_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match UNITS.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) => {
            let tenths = (u128::from(bytes) * 10) >> shift;
            format!("{}.{} {unit}", tenths / 10, tenths % 10)
        }
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(free_bytes: u64, free_inodes: u64) -> DiskSpace {
        let (total_bytes, total_inodes) = (1000, 1000);
        DiskSpace { path: "/data".into(), free_bytes, total_bytes, free_inodes, total_inodes }
    }

    #[test]
    fn little_room_is_a_warning_and_less_a_problem() {
        use ConditionSeverity::{Problem, Warning};
        let severities = |disk: &DiskSpace| {
            let found = disk_conditions(disk, &HealthConfig::default());
            found.into_iter().map(|condition| condition.severity).collect::<Vec<_>>()
        };
        assert_eq!(severities(&disk(100, 100)), []);
        assert_eq!(severities(&disk(99, 100)), [Warning]);
        assert_eq!(severities(&disk(50, 49)), [Warning, Problem]);
        assert_eq!(severities(&disk(0, 0)), [Problem, Problem]);
        // btrfs has no number of inodes.
        assert_eq!(severities(&DiskSpace { total_inodes: 0, ..disk(500, 0) }), []);
        let config = HealthConfig { min_free_percent: 0, warn_free_percent: 0, ..HealthConfig::default() };
        assert_eq!(disk_conditions(&disk(0, 0), &config), []);
        let [space] = &disk_conditions(&disk(10, 500), &HealthConfig::default())[..] else { panic!("one") };
        assert_eq!(space.to_string(), "/data: its disk is almost full: 10 bytes of 1000 bytes free");
    }

    #[test]
    fn bytes_have_the_largest_unit() {
        let shown = [0, 1023, 1024, 1536, 3 << 20, (5 << 30) + (1 << 29), u64::MAX].map(format_bytes);
        assert_eq!(
            shown,
            ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 KiB", "3.0 MiB", "5.5 GiB", "16777215.9 TiB"]
        );
    }

    #[tokio::test]
    async fn directories_of_one_disk_are_measured_once_and_a_missing_one_is_named() {
        let scratch = tempfile::tempdir().expect("a directory");
        let below = scratch.path().join("below");
        std::fs::create_dir(&below).expect("created");
        let absent = scratch.path().join("absent");
        let paths = vec![scratch.path().to_owned(), below, absent.clone()];
        let (disks, failed) =
            DiskWatch::new(paths, &HealthConfig::default(), MeasureLock::default()).measure().await;
        let [disk] = &disks[..] else { panic!("one disk: {disks:?}") };
        assert!(disk.path == scratch.path() && disk.free_bytes <= disk.total_bytes, "{disk:?}");
        let [missing] = &failed[..] else { panic!("one: {failed:?}") };
        assert_eq!(missing.object, absent.display().to_string());
        assert!(missing.problem.starts_with("its free space can't be read: "), "{missing}");
    }
}
