//! Conditions of the data volume, with what to type.

use std::path::Path;
use std::sync::Arc;

use nodekeel_localstorage::volume::CopyProgress;
use nodekeel_supervisor::wall_clock_time;

use super::DN;
use super::faults::VolumeFaults;
use super::opener::VolumeOpener;
use super::reencryption::{ReencryptionReport, ReencryptionState, VolumeReencryption};
use super::unlock::{CreationWork, UnlockStatus, VolumeUnlock};
use crate::health::{HealthCondition, HealthSource, NodeSnapshot};
use crate::program_name::program_name;

/// Answers for the data volume.
pub(super) fn health_source(
    unlock: Arc<VolumeUnlock>,
    opener: VolumeOpener,
    faults: VolumeFaults,
    reencryption: VolumeReencryption,
) -> impl HealthSource {
    move |node: &NodeSnapshot| {
        let size = opener.device().and_then(|device| device.size_problem()).map(|problem| {
            let problem = format!("is smaller than its disk: {problem}");
            HealthCondition::warning(DN, problem).hint("see docs/noded.md, \"Grow the disk\"")
        });
        let status = unlock.status();
        // A volume that does not open is a greater problem than its size.
        let state = volume_condition(&status, node).or(size);
        let former = opener.device().and_then(|device| device.former_disk());
        // With blocks that were left out, the former disk may be needed.
        let is_whole = matches!(status, UnlockStatus::Open { .. }) && faults.describe().is_none();
        let copied = former.filter(|_| is_whole).map(|from| {
            let from = from.display();
            let problem = format!("is complete; {from}, which it was made from, still has the former volume");
            HealthCondition::warning("copy of the data volume", problem).hint(format!(
                "`blkdiscard -z {from}` erases it; then remove storage.copy_from, and restart {}",
                program_name()
            ))
        });
        // About the volume and not about root.storage, which stays ready: what uses the volume goes on.
        let faults = faults.describe().map(|problem| {
            HealthCondition::problem("disk of the data volume", problem).hint(
                "the disk fails, or somebody has changed it: restore the files that can't be read, replace the disk; then \
                 `nodectl storage acknowledge`",
            )
        });
        let moved = opener.moved_files().into_iter().map(|path| {
            let path = path.display();
            HealthCondition::warning(
                "files that are not on the data volume",
                format!("were written while it was not mounted, and are in {path}"),
            )
            .hint(format!("move what is needed onto the volume, then `rm -r {path}`"))
        });
        let reencryption = reencryption_condition(&reencryption.report());
        state.into_iter().chain(copied).chain(reencryption).chain(faults).chain(moved).collect()
    }
}

/// One that goes on, or that pauses with its volume, is no problem.
fn reencryption_condition(report: &ReencryptionReport) -> Option<HealthCondition> {
    const OBJECT: &str = "re-encryption of the data volume";
    if let ReencryptionState::Failed(reason) = &report.state {
        let condition = HealthCondition::problem(OBJECT, format!("can't go on: {reason}"));
        return Some(
            condition.hint("it is tried again; if it lacks a key, `nodectl storage reencrypt --recovery`"),
        );
    }
    let stalled = report.stalled?;
    let condition = HealthCondition::problem(OBJECT, "makes no progress").since(Some(stalled));
    Some(condition.hint(format!(
        "look for errors of the disk in the kernel's log; `nodectl restart {DN}` closes the volume, and continues"
    )))
}

/// As the rest of a sentence about root.storage.
pub(super) fn describe_copy(from: &Path, copy: CopyProgress) -> String {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let (done, total) = (gib(copy.done_bytes), gib(copy.total_bytes));
    format!("copies the data volume from {}: {done:.1} of {total:.1} GiB", from.display())
}

fn volume_condition(status: &UnlockStatus, node: &NodeSnapshot) -> Option<HealthCondition> {
    match status {
        UnlockStatus::Locked { since, reason } => {
            let condition = HealthCondition::problem(DN, format!("is locked: {reason}"))
                .since(Some(wall_clock_time(*since)));
            Some(condition.waiting_for("a key").hint("`nodectl storage unlock`"))
        }
        UnlockStatus::Opening { work: Some(CreationWork::Reading(reading)) } => {
            let condition = HealthCondition { problem: reading.to_string(), ..node.condition_of(DN)? };
            let hint = reading.erase_token.as_ref().map(|token| {
                format!("wait, or, if nobody needs what the disk may have, `nodectl storage erase {token}`")
            });
            Some(hint.into_iter().fold(condition, HealthCondition::hint))
        }
        UnlockStatus::Opening { work: Some(CreationWork::Wiping(wipe)) } => {
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            let (done, total) = (gib(wipe.done_bytes), gib(wipe.total_bytes));
            let problem = format!("wipes the new data volume: {done:.1} of {total:.1} GiB");
            Some(HealthCondition { problem, ..node.condition_of(DN)? })
        }
        UnlockStatus::Opening { work: Some(CreationWork::Copying { from, copy }) } => {
            Some(HealthCondition { problem: describe_copy(from, *copy), ..node.condition_of(DN)? })
        }
        UnlockStatus::Closed { error: Some(error), is_lost: true, .. } => {
            let condition = HealthCondition { problem: error.clone(), ..node.condition_of(DN)? };
            Some(
                condition
                    .waiting_for("the node's data volume")
                    .hint("attach or mount it, or, if its data are lost, `nodectl reset`"),
            )
        }
        UnlockStatus::Closed { erase_token: Some(token), .. } => {
            let condition = node.condition_of(DN)?;
            let hint = format!(
                "attach the node's disk, or see docs/noded.md, \"Erase a disk\", and `nodectl storage erase {token}`"
            );
            Some(condition.hint(hint))
        }
        _ => node.condition_of(DN),
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn a_reencryption_without_progress_says_what_to_type() {
        let mut report = ReencryptionReport::default();
        assert!(reencryption_condition(&report).is_none());
        report.state = ReencryptionState::Running;
        assert!(reencryption_condition(&report).is_none());
        report.stalled = Some(SystemTime::UNIX_EPOCH);
        let condition = reencryption_condition(&report).unwrap();
        assert_eq!(condition.problem, "makes no progress");
        assert!(condition.hint.contains("`nodectl restart root.storage`"), "{condition:?}");
    }
}
