//! A process killed at every step of a volume's birth and death: the next one finds each volume whole or gone.

use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;

use nodekeel_fsquota::{Bytes, Change, Error, Inodes, Limit, Limits, ProjectId, QuotaSetter, Status, Usage};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::uid;
use nodekeel_provisioner::{DirStore, DirStoreOptions, Moment, Step, VolumeId, VolumeStore as _};
use rustix::process::{Signal, getpid, kill_process};

/// Where the child works, and at which step it dies.
const BASE: &str = "NODEKEEL_KILLS_BASE";
const STEP: &str = "NODEKEEL_KILLS_STEP";

const LIMITS: Limits = Limits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

const STEPS: [Step; 8] = [
    Step::MakeDirectory,
    Step::Limit,
    Step::Publish,
    Step::Dig,
    Step::Bury,
    Step::Erase,
    Step::Release,
    Step::Level,
];

/// A quota whose books are files, so that they outlive a process: `<project>` holds the limits, and a directory's project is
/// its inode's number. It limits nothing, but what it keeps can leak like the kernel's.
#[derive(Debug)]
struct Books(PathBuf);

impl Books {
    fn page(&self, project: u32) -> PathBuf {
        self.0.join(project.to_string())
    }

    fn read(&self, project: u32) -> Option<Limits> {
        let text = fs::read_to_string(self.page(project)).ok()?;
        let (bytes, inodes) = text.split_once(' ')?;
        Some(Limits { bytes: Some(Bytes(bytes.parse().ok()?)), inodes: Some(Inodes(inodes.parse().ok()?)) })
    }
}

fn project(dir: BorrowedFd<'_>) -> u32 {
    u32::try_from(rustix::fs::fstat(dir).expect("stat").st_ino & 0x7fff_ffff).expect("masked")
}

impl QuotaSetter for Books {
    fn set(&self, dir: BorrowedFd<'_>, change: Change) -> Result<Status, Error> {
        let (Limit::At(bytes), Limit::At(inodes)) = (change.bytes, change.inodes) else {
            panic!("{change:?}")
        };
        fs::write(self.page(project(dir)), format!("{} {}", bytes.0, inodes.0)).expect("write");
        Ok(self.status(dir)?.expect("just written"))
    }

    fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, Error> {
        let number = project(dir);
        let status = |limits| Status {
            project: ProjectId::new(number).expect("not 0"),
            limits,
            usage: Usage { bytes: Bytes(0), inodes: Inodes(1) },
        };
        Ok(self.read(number).map(status))
    }

    fn clear(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.release(ProjectId::new(project(dir)).expect("not 0"))
    }

    fn release(&self, project: ProjectId) -> Result<(), Error> {
        let _ = fs::remove_file(self.page(project.get()));
        Ok(())
    }
}

fn id() -> VolumeId {
    VolumeId::from_uid(&uid(1)).expect("a UUID")
}

fn open(base: &Path, options: DirStoreOptions) -> DirStore {
    let books = Arc::new(Books(base.join("books")));
    DirStore::with(Dir::open(base).expect("the base"), books, options).expect("a store")
}

async fn live_and_die(store: &DirStore, base: &Path) {
    store.create(&id(), LIMITS).await.expect("create");
    let data = base.join("volumes").join(id().as_str()).join("a/b");
    fs::create_dir_all(&data).expect("a directory");
    fs::write(data.join("file"), "data").expect("a file");
    store.remove(&id()).await.expect("remove");
    store.erased().await;
}

/// The child's part; by itself it is nothing.
#[tokio::test]
async fn child() {
    let (Some(base), Ok(step)) = (std::env::var_os(BASE).map(PathBuf::from), std::env::var(STEP)) else {
        return;
    };
    let mut options = DirStoreOptions::default();
    options.hook = Some(Arc::new(move |at: Step, moment: Moment| {
        if format!("{moment:?} {at:?}") == step {
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }));
    live_and_die(&open(&base, options), &base).await;
}

fn run_child(base: &Path, step: &str) -> ExitStatus {
    let program = std::env::current_exe().expect("this program");
    let mut child = Command::new(program);
    child.args(["--exact", "kills::child"]).env(BASE, base).env(STEP, step);
    child.output().expect("a child").status
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").file_name());
    entries.map(|name| name.to_string_lossy().into_owned()).collect()
}

#[tokio::test]
async fn a_process_killed_at_any_step_leaves_a_whole_volume_or_none() {
    for step in STEPS {
        for moment in [Moment::Before, Moment::After] {
            let point = format!("{moment:?} {step:?}");
            let base = tempfile::tempdir().expect("a directory");
            fs::create_dir(base.path().join("books")).expect("a directory");
            let status = run_child(base.path(), &point);
            assert_eq!(status.signal(), Some(9), "{point}: the step is made");

            let store = open(base.path(), DirStoreOptions::default());
            store.erased().await;
            let volumes = store.list().await.expect("list");
            assert_eq!(names(&base.path().join(".new")), Vec::<String>::new(), "{point}");
            assert_eq!(names(&base.path().join(".trash")), Vec::<String>::new(), "{point}");
            assert_eq!(names(&base.path().join("books")).len(), volumes.len(), "{point}: no project leaks");
            for id in &volumes {
                assert_eq!(store.usage(id).await.expect("usage").limits, LIMITS, "{point}");
            }
            live_and_die(&store, base.path()).await;
            assert_eq!(names(&base.path().join("volumes")), Vec::<String>::new(), "{point}");
            assert_eq!(names(&base.path().join("books")), Vec::<String>::new(), "{point}");
        }
    }
}
