//! A custom quota: it promises no more than the disk holds, and delegates to another quota.
//!
//! A limit reserves nothing: the limits of the directories of a file system may add up to more than its size.
//! This quota prevents that.
//!
//! `cargo run -p examples --example own_quota`

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use nodekeel_fsquota::testing::{MemQuota, conformance};
use nodekeel_fsquota::{
    Bytes, Error, Inodes, LimitChange, LimitError, ProjectId, QuotaChange, QuotaSetter, QuotaStatus,
};

/// Rejects a limit that would raise the sum of all limits above the total.
#[derive(Debug)]
struct ReservingQuota<Q> {
    quota: Q,
    total: u128,
    promised: Mutex<HashMap<ProjectId, u64>>,
}

impl<Q: QuotaSetter> ReservingQuota<Q> {
    fn new(quota: Q, total: u128) -> Self {
        Self { quota, total, promised: Mutex::default() }
    }
}

impl<Q: QuotaSetter> QuotaSetter for ReservingQuota<Q> {
    fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, Error> {
        // Locked until the limit is set: two concurrent calls can't both get the remaining space.
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.quota.read_status(dir)?.map(|status| status.project);
        if let LimitChange::Set(Bytes(bytes)) = change.bytes {
            let others = promised.iter().filter(|(project, _)| Some(**project) != before);
            let sum = others.map(|(_, bytes)| u128::from(*bytes)).sum::<u128>() + u128::from(bytes);
            if sum > self.total {
                return Err(Error::Backend(
                    format!("the limits would sum to {} of {} bytes", sum, self.total).into(),
                ));
            }
        }
        let status = self.quota.set_limits(dir, change)?;
        promised.insert(status.project, status.limits.bytes.map_or(0, |bytes| bytes.0));
        Ok(status)
    }

    fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
        self.quota.read_status(dir)
    }

    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.quota.read_status(dir)?;
        self.quota.clear_limits(dir)?;
        before.map(|status| promised.remove(&status.project));
        Ok(())
    }

    fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        self.quota.release_project(project)?;
        promised.remove(&project);
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    // A real one is `ProjectQuota::open(mount_point)`; this one needs neither root nor XFS, and enforces
    // nothing.
    let quota = ReservingQuota::new(MemQuota::new(), 100 << 20);
    show_quota(&quota, tempfile::tempdir()?.path())?;

    // It keeps the contract too: the conformance suite that the kernel's quotas pass.
    let scratch = tempfile::tempdir()?;
    conformance(&ReservingQuota::new(MemQuota::new(), u128::MAX), scratch.path());
    println!("conformance suite passed");
    Ok(())
}

fn show_quota(quota: &dyn QuotaSetter, scratch: &std::path::Path) -> anyhow::Result<()> {
    let make = |name: &str| {
        fs::create_dir(scratch.join(name))?;
        File::open(scratch.join(name))
    };
    let bytes = |text: &str| {
        anyhow::Ok(QuotaChange { bytes: LimitChange::Set(text.parse()?), inodes: LimitChange::Keep })
    };

    let (first, second) = (make("first")?, make("second")?);
    let status = quota.set_limits(first.as_fd(), bytes("60Mi")?)?;
    println!("first: {} bytes reserved", status.limits.bytes.unwrap_or_default());
    match quota.set_limits(second.as_fd(), bytes("60Mi")?) {
        Err(Error::Backend(why)) => println!("second: 60Mi rejected: {why}"),
        other => anyhow::bail!("overbooking was not rejected: {other:?}"),
    }
    quota.set_limits(second.as_fd(), bytes("40Mi")?)?;
    println!("second: 40Mi reserved");

    // Each limit changes separately, and 0 does not mean "no limit".
    let change = QuotaChange { inodes: LimitChange::Set(Inodes(100)), ..QuotaChange::default() };
    let status = quota.set_limits(first.as_fd(), change)?;
    println!("first: {} more files allowed", status.remaining_quota().inodes.unwrap_or_default());
    let rejected = quota.set_limits(first.as_fd(), bytes("0")?);
    println!("a limit of 0 is rejected: {}", matches!(rejected, Err(Error::InvalidLimit(LimitError::Zero))));

    quota.clear_limits(first.as_fd())?;
    quota.set_limits(second.as_fd(), bytes("100Mi")?)?;
    println!("second, without first: 100Mi reserved");
    Ok(())
}
