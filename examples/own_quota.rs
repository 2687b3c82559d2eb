//! A quota of one's own: it promises no more than there is, and hands the rest on to another one.
//!
//! A limit reserves nothing: the limits of a file system's directories may add up to more than it holds. Whoever does
//! not want that puts this before it.
//!
//! `cargo run -p examples --example own_quota`

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use nodekeel_fsquota::testing::{MemQuota, conformance};
use nodekeel_fsquota::{Bytes, Change, Error, Inodes, Limit, LimitError, ProjectId, QuotaSetter, Status};

/// Refuses a limit that would bring the sum of all above the total.
#[derive(Debug)]
struct Reserved<Q> {
    quota: Q,
    total: u128,
    promised: Mutex<HashMap<ProjectId, u64>>,
}

impl<Q: QuotaSetter> Reserved<Q> {
    fn new(quota: Q, total: u128) -> Self {
        Self { quota, total, promised: Mutex::default() }
    }
}

impl<Q: QuotaSetter> QuotaSetter for Reserved<Q> {
    fn set(&self, dir: BorrowedFd<'_>, change: Change) -> Result<Status, Error> {
        // Held until the limit is set: two at once can't both have what is left.
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.quota.status(dir)?.map(|status| status.project);
        if let Limit::At(Bytes(bytes)) = change.bytes {
            let others = promised.iter().filter(|(project, _)| Some(**project) != before);
            let sum = others.map(|(_, bytes)| u128::from(*bytes)).sum::<u128>() + u128::from(bytes);
            if sum > self.total {
                return Err(Error::Backend(format!("{} would be promised of {}", sum, self.total).into()));
            }
        }
        let status = self.quota.set(dir, change)?;
        promised.insert(status.project, status.limits.bytes.map_or(0, |bytes| bytes.0));
        Ok(status)
    }

    fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, Error> {
        self.quota.status(dir)
    }

    fn clear(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.quota.status(dir)?;
        self.quota.clear(dir)?;
        before.map(|status| promised.remove(&status.project));
        Ok(())
    }

    fn release(&self, project: ProjectId) -> Result<(), Error> {
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        self.quota.release(project)?;
        promised.remove(&project);
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    // A real one is `ProjectQuota::open(mount_point)`; this one needs neither root nor XFS, and binds nobody.
    let quota = Reserved::new(MemQuota::new(), 100 << 20);
    show(&quota, tempfile::tempdir()?.path())?;

    // What the contract says holds for it, too: the suite that the kernel's quotas pass.
    let scratch = tempfile::tempdir()?;
    conformance(&Reserved::new(MemQuota::new(), u128::MAX), scratch.path());
    println!("it conforms");
    Ok(())
}

fn show(quota: &dyn QuotaSetter, scratch: &std::path::Path) -> anyhow::Result<()> {
    let make = |name: &str| {
        fs::create_dir(scratch.join(name))?;
        File::open(scratch.join(name))
    };
    let bytes = |text: &str| anyhow::Ok(Change { bytes: Limit::At(text.parse()?), inodes: Limit::Keep });

    let (first, second) = (make("first")?, make("second")?);
    let status = quota.set(first.as_fd(), bytes("60Mi")?)?;
    println!("first may take {} bytes", status.limits.bytes.unwrap_or_default());
    match quota.set(second.as_fd(), bytes("60Mi")?) {
        Err(Error::Backend(why)) => println!("second may not take 60Mi: {why}"),
        other => anyhow::bail!("more was promised than there is: {other:?}"),
    }
    quota.set(second.as_fd(), bytes("40Mi")?)?;
    println!("second may take 40Mi");

    // Either limit changes alone, and 0 is never mistaken for "no limit".
    let change = Change { inodes: Limit::At(Inodes(100)), ..Change::default() };
    let status = quota.set(first.as_fd(), change)?;
    println!("first may make {} more files", status.available().inodes.unwrap_or_default());
    let refused = quota.set(first.as_fd(), bytes("0")?);
    println!("a limit of 0 is refused: {}", matches!(refused, Err(Error::Limit(LimitError::Zero))));

    quota.clear(first.as_fd())?;
    quota.set(second.as_fd(), bytes("100Mi")?)?;
    println!("without first, second may take 100Mi");
    Ok(())
}
