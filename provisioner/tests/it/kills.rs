//! A process killed at each step of creating, resizing and removing a volume: the next one finds each volume complete
//! or removed.

use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;

use nodekeel_fsquota::{
    Bytes, Error, Inodes, LimitChange, ProjectId, QuotaChange, QuotaLimits, QuotaSetter, QuotaStatus,
    QuotaUsage,
};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::{DirStore, DirStoreOptions, StepMoment, VolumeStep, VolumeStore as _};
use rustix::process::{Signal, getpid, kill_process};

use crate::fixture::{id, names};

/// Environment variables of the child: its directory, and the step at which it is killed.
const BASE: &str = "NODEKEEL_KILLS_BASE";
const STEP: &str = "NODEKEEL_KILLS_STEP";

pub(crate) const LIMITS: QuotaLimits =
    QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

/// After an expansion.
const RESIZED: QuotaLimits = QuotaLimits { bytes: Some(Bytes(2 << 20)), inodes: Some(Inodes(2048)) };

const STEPS: [VolumeStep; 9] = [
    VolumeStep::CreateDirectory,
    VolumeStep::SetLimits,
    VolumeStep::RenameIntoPlace,
    VolumeStep::ResizeLimits,
    VolumeStep::CreateTrashEntry,
    VolumeStep::MoveToTrash,
    VolumeStep::EraseContent,
    VolumeStep::ReleaseProject,
    VolumeStep::RemoveTrashEntry,
];

/// A quota whose records are files, so that they outlive a process: `<project>` contains the limits, and a
/// directory's project is its inode number. It enforces nothing, but its records can leak like the kernel's.
#[derive(Debug)]
pub(crate) struct FileQuota(pub(crate) PathBuf);

impl FileQuota {
    fn record_path(&self, project: u32) -> PathBuf {
        self.0.join(project.to_string())
    }

    fn read_limits(&self, project: u32) -> Option<QuotaLimits> {
        let text = fs::read_to_string(self.record_path(project)).ok()?;
        let (bytes, inodes) = text.split_once(' ')?;
        // Block and strict volumes have no inode limit.
        let inodes = inodes.parse().ok().map(Inodes);
        Some(QuotaLimits { bytes: Some(Bytes(bytes.parse().ok()?)), inodes })
    }
}

fn inode_project(dir: BorrowedFd<'_>) -> u32 {
    u32::try_from(rustix::fs::fstat(dir).expect("stat").st_ino & 0x7fff_ffff).expect("masked")
}

impl QuotaSetter for FileQuota {
    fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, Error> {
        let LimitChange::Set(bytes) = change.bytes else { panic!("{change:?}") };
        let inodes = match change.inodes {
            LimitChange::Set(inodes) => inodes.0.to_string(),
            _ => "unlimited".to_owned(),
        };
        fs::write(self.record_path(inode_project(dir)), format!("{} {inodes}", bytes.0)).expect("write");
        Ok(self.read_status(dir)?.expect("just written"))
    }

    fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
        let number = inode_project(dir);
        let status = |limits| QuotaStatus {
            project: ProjectId::new(number).expect("not 0"),
            limits,
            usage: QuotaUsage { bytes: Bytes(0), inodes: Inodes(1) },
        };
        Ok(self.read_limits(number).map(status))
    }

    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.release_project(ProjectId::new(inode_project(dir)).expect("not 0"))
    }

    fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        let _ = fs::remove_file(self.record_path(project.get()));
        Ok(())
    }
}

async fn open(base: &Path, options: DirStoreOptions) -> DirStore {
    let quota = Arc::new(FileQuota(base.join("records")));
    let store = DirStore::with_options(Dir::open(base).expect("the base"), quota, options).expect("a store");
    store.create_identity().await.expect("an identity");
    store
}

async fn create_and_remove(store: &DirStore, base: &Path) {
    store.create(&id(1), LIMITS).await.expect("create");
    let data = base.join("volumes").join(id(1).as_str()).join("a/b");
    fs::create_dir_all(&data).expect("a directory");
    fs::write(data.join("file"), "data").expect("a file");
    store.resize(&id(1), RESIZED).await.expect("resize");
    store.remove(&id(1)).await.expect("remove");
    store.wait_until_erased().await;
}

/// The child process; without its environment variables this test does nothing.
#[tokio::test]
async fn child() {
    let (Some(base), Ok(step)) = (std::env::var_os(BASE).map(PathBuf::from), std::env::var(STEP)) else {
        return;
    };
    let mut options = DirStoreOptions::default();
    options.hook = Some(Arc::new(move |at: VolumeStep, moment: StepMoment| {
        if format!("{moment:?} {at:?}") == step {
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }));
    create_and_remove(&open(&base, options).await, &base).await;
}

fn run_child(base: &Path, step: &str) -> ExitStatus {
    let program = std::env::current_exe().expect("this program");
    let mut child = Command::new(program);
    child.args(["--exact", "kills::child"]).env(BASE, base).env(STEP, step);
    child.output().expect("a child").status
}

#[tokio::test]
async fn a_process_killed_at_any_step_leaves_a_complete_volume_or_none() {
    for step in STEPS {
        for moment in [StepMoment::Before, StepMoment::After] {
            let point = format!("{moment:?} {step:?}");
            let base = tempfile::tempdir().expect("a directory");
            fs::create_dir(base.path().join("records")).expect("a directory");
            let status = run_child(base.path(), &point);
            assert_eq!(status.signal(), Some(9), "{point}: the step happens");

            let store = open(base.path(), DirStoreOptions::default()).await;
            store.wait_until_erased().await;
            let volumes = store.list().await.expect("list");
            assert_eq!(names(&base.path().join(".new")), Vec::<String>::new(), "{point}");
            assert_eq!(names(&base.path().join(".trash")), Vec::<String>::new(), "{point}");
            assert_eq!(names(&base.path().join("records")).len(), volumes.len(), "{point}: no project leaks");
            for id in &volumes {
                let limits = store.usage(id).await.expect("usage").limits;
                assert!([LIMITS, RESIZED].contains(&limits), "{point}: {limits:?}");
            }
            create_and_remove(&store, base.path()).await;
            assert_eq!(names(&base.path().join("volumes")), Vec::<String>::new(), "{point}");
            assert_eq!(names(&base.path().join("records")), Vec::<String>::new(), "{point}");
        }
    }
}
