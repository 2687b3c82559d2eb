//! Conditions of the keys of the data volume, with what to type.

use std::sync::Arc;

use nodekeel_localstorage::volume::{
    ColdStart, EncryptionStatus, HeaderRollback, KeyPolicy, SlotKind, UnlockSecret,
};

use super::plan::{has_confirmed_passphrase, needs_passphrase};
use super::{ClusterKeyState, VolumeKeys};
use crate::error_chain::error_chain;
use crate::health::{ConditionsFuture, HealthCondition, HealthSource, NodeSnapshot};
use crate::parts::storage::unlock::UnlockStatus;

/// The runnable of a node with a member.
const CLUSTER_KEYS: &str = "root.cluster.keys";

/// The object of the conditions.
const OBJECT: &str = "data volume";

/// The conditions of the keys of the open volume. One that is not open is a condition of root.storage.
pub(crate) fn key_health(keys: Arc<VolumeKeys>) -> impl HealthSource {
    KeyHealth(keys)
}

struct KeyHealth(Arc<VolumeKeys>);

impl HealthSource for KeyHealth {
    fn conditions<'a>(&'a self, _: &'a NodeSnapshot) -> ConditionsFuture<'a> {
        Box::pin(async move {
            if !matches!(self.0.unlock.status(), UnlockStatus::Open { .. }) {
                return Vec::new();
            }
            match self.0.encryption_status().await {
                Ok(Some(status)) => {
                    let needed_passphrase = matches!(self.0.unlock.secret(), Some(UnlockSecret::Recovery(_)));
                    let is_with_tang = self.0.are_with_tang();
                    let is_remote = is_with_tang || self.0.kept_by_voters().is_some();
                    let service = if is_remote { "root.storage.keys" } else { CLUSTER_KEYS };
                    let report =
                        KeyReport { needed_passphrase, is_with_tang, service, ..KeyReport::of(&status) };
                    report.conditions(&self.0.cluster_key_state())
                }
                Ok(None) => Vec::new(),
                Err(error) => {
                    let problem = format!("has a header that can't be checked: {}", error_chain(&error));
                    vec![HealthCondition::warning(OBJECT, problem).hint("`nodectl storage status`")]
                }
            }
        })
    }
}

/// The facts that the conditions depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct KeyReport {
    /// The cluster keeps half of the key, or Tang servers do.
    is_split: bool,
    /// Tang servers do.
    is_with_tang: bool,
    /// The runnable that has it kept.
    service: &'static str,
    /// The node unlock key alone opens it, only until the cluster has its half.
    has_temporary_slot: bool,
    /// An operator has typed its recovery passphrase since it was shown.
    has_recovery: bool,
    /// No operator has, and one is to open it after a power cut.
    lacks_passphrase: bool,
    /// A recovery passphrase was shown, and no operator has typed it.
    has_unconfirmed_recovery: bool,
    /// Slots that an interrupted change of the unlock keys has left.
    stale_slots: usize,
    has_both_headers: bool,
    /// Its header is older than the newest one that this node has written.
    rollback: Option<HeaderRollback>,
    /// An operator has opened it, and its keys were not rotated since.
    needed_passphrase: bool,
}

impl KeyReport {
    fn of(status: &EncryptionStatus) -> Self {
        let named =
            |kind| status.slots.iter().filter(move |slot| slot.name.is_some_and(|name| name.0 == kind));
        let is_split = status.keys == KeyPolicy::Split;
        let keeps_local = !is_split || status.cold_start == Some(ColdStart::Local);
        let stale = status.slots.iter().filter(|slot| {
            slot.is_stale
                && match slot.name {
                    // A replaced or unconfirmed passphrase has a condition of its own.
                    Some((SlotKind::Recovery, _)) => false,
                    // So has a temporary slot: without `keeps_local`, each slot of the node alone is temporary.
                    Some((SlotKind::Local, _)) => keeps_local,
                    _ => true,
                }
        });
        let has_recovery = has_confirmed_passphrase(status);
        Self {
            is_split,
            is_with_tang: false,
            service: CLUSTER_KEYS,
            has_temporary_slot: !keeps_local && named(SlotKind::Local).next().is_some(),
            has_recovery,
            lacks_passphrase: !has_recovery && needs_passphrase(status),
            has_unconfirmed_recovery: named(SlotKind::Recovery).any(|slot| slot.is_unconfirmed),
            stale_slots: stale.count(),
            has_both_headers: status.has_both_headers,
            rollback: status.rollback,
            needed_passphrase: false,
        }
    }

    /// The hint if no recovery passphrase is confirmed, or the newest one is not.
    fn passphrase_hint(self) -> &'static str {
        if self.has_unconfirmed_recovery {
            "`nodectl storage recovery --confirm`; if it was lost: `nodectl storage recovery`"
        } else {
            "`nodectl storage recovery`"
        }
    }

    /// The next start may need an operator again.
    fn passphrase_condition(self) -> Option<HealthCondition> {
        let problem = "was opened by its recovery passphrase: at the next start, the node's key may not open it, either";
        let condition = HealthCondition::warning(OBJECT, problem).hint("`nodectl storage rotate --recovery`");
        (self.needed_passphrase && !self.is_split).then_some(condition)
    }

    /// A Tang server would not open the volume at the next start.
    fn tang_condition(self, cluster_key: &ClusterKeyState) -> Option<HealthCondition> {
        let problem = match (cluster_key, self.has_temporary_slot) {
            _ if !self.is_with_tang || !self.is_split => return None,
            (ClusterKeyState::Pending(why), true) => {
                format!("opens by the node unlock key alone until a Tang server keeps the other half: {why}")
            }
            (ClusterKeyState::Pending(why), false) => format!("would stay locked at the next start: {why}"),
            (ClusterKeyState::Incomplete(why), _) => {
                format!("is not safely bound to each of its Tang servers: {why}")
            }
            (ClusterKeyState::Unknown, true) => {
                "opens by the node unlock key alone until a Tang server keeps the other half".to_owned()
            }
            _ => return None,
        };
        let condition = HealthCondition::warning(OBJECT, problem).waiting_for("a Tang server");
        Some(condition.hint("`nodectl logs root.storage.keys`"))
    }

    fn conditions(self, cluster_key: &ClusterKeyState) -> Vec<HealthCondition> {
        let warning = |problem: &str| HealthCondition::warning(OBJECT, problem);
        let mut found = Vec::new();
        found.extend(self.rollback.map(|rollback| {
            let problem = format!("has an encryption header that was rolled back: {rollback}");
            HealthCondition::warning(OBJECT, problem).hint(
                "`nodectl storage header restore FILE` with the newer one, or, if this one is to stay, \
                 `nodectl storage rotate --recovery`; for an older passphrase, `nodectl storage recovery`",
            )
        }));
        found.extend(self.passphrase_condition());
        if let (true, ClusterKeyState::Lost) = (self.is_split, cluster_key) {
            let problem = if self.is_with_tang {
                "will open by its recovery passphrase alone: no Tang server has the other half of its key"
            } else {
                "will open by its recovery passphrase alone: the cluster has lost its half of the key"
            };
            found.push(warning(problem).hint("`nodectl storage rotate --recovery`"));
        }
        found.extend(self.tang_condition(cluster_key));
        // The cluster has its half. Only the missing passphrase keeps the temporary slot.
        let waits_for_passphrase =
            self.has_temporary_slot && self.lacks_passphrase && *cluster_key == ClusterKeyState::Stored;
        if waits_for_passphrase {
            let problem = if self.has_unconfirmed_recovery {
                "opens by the node unlock key alone until its recovery passphrase is confirmed"
            } else {
                "opens by the node unlock key alone until it has a recovery passphrase"
            };
            found.push(warning(problem).hint(self.passphrase_hint()));
        } else if self.has_temporary_slot && !self.is_with_tang {
            let problem = match cluster_key {
                ClusterKeyState::Pending(why) => {
                    format!("opens without the cluster, which can't store its half of the key: {why}")
                }
                _ => "opens without the cluster, which does not have its half of the key yet".to_owned(),
            };
            found.push(
                warning(&problem)
                    .waiting_for(self.service)
                    .hint(format!("`nodectl cluster status`; `nodectl logs {}`", self.service)),
            );
        } else if self.stale_slots > 0 && *cluster_key != ClusterKeyState::Lost && !self.has_temporary_slot {
            // A lost key has its own condition, which explains the older slots.
            let hint = match self.is_split {
                true => format!("`nodectl logs {}`", self.service),
                false => "`nodectl storage rotate`".to_owned(),
            };
            found.push(warning("still opens by older keys: a change of its keys was interrupted").hint(hint));
        }
        if !self.has_recovery && !waits_for_passphrase {
            let problem =
                match (self.has_unconfirmed_recovery, self.lacks_passphrase && !self.has_temporary_slot) {
                    (true, _) => "has a recovery passphrase that nobody has confirmed, and no other one",
                    (false, true) => "has no recovery passphrase: nobody would open it after a power cut",
                    (false, false) => "has no recovery passphrase",
                };
            found.push(warning(problem).hint(self.passphrase_hint()));
        }
        if self.has_recovery && self.has_unconfirmed_recovery {
            let problem =
                "has a new recovery passphrase that nobody has confirmed: the one before is valid, too";
            found.push(warning(problem).hint(self.passphrase_hint()));
        }
        if !self.has_both_headers {
            found.push(
                warning("has one damaged copy of its header; the next change of a key repairs it")
                    .hint("`nodectl storage rotate`; check the disk"),
            );
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTLED: KeyReport = KeyReport {
        is_split: true,
        is_with_tang: false,
        service: CLUSTER_KEYS,
        has_temporary_slot: false,
        has_recovery: true,
        lacks_passphrase: false,
        has_unconfirmed_recovery: false,
        stale_slots: 0,
        has_both_headers: true,
        rollback: None,
        needed_passphrase: false,
    };

    fn shown(report: KeyReport, state: &ClusterKeyState) -> Vec<(String, String)> {
        let shown = |condition: HealthCondition| (condition.problem, condition.hint);
        report.conditions(state).into_iter().map(shown).collect()
    }

    #[test]
    fn each_key_that_is_not_as_it_should_be_is_a_warning_with_what_to_type() {
        assert_eq!(shown(SETTLED, &ClusterKeyState::Stored), []);
        assert_eq!(shown(SETTLED, &ClusterKeyState::Unknown), []);
        // The passphrase is how it is opened cold.
        assert_eq!(shown(KeyReport { needed_passphrase: true, ..SETTLED }, &ClusterKeyState::Stored), []);
        let cases = [
            (KeyReport { has_recovery: false, ..SETTLED }, "recovery passphrase", "storage recovery`"),
            (KeyReport { has_unconfirmed_recovery: true, ..SETTLED }, "nobody has confirmed", "--confirm"),
            (KeyReport { has_both_headers: false, ..SETTLED }, "damaged copy", "storage rotate"),
            (KeyReport { stale_slots: 1, ..SETTLED }, "by older keys", "root.cluster.keys"),
            (KeyReport { stale_slots: 1, is_split: false, ..SETTLED }, "by older keys", "storage rotate"),
            (
                KeyReport { needed_passphrase: true, is_split: false, ..SETTLED },
                "was opened by its recovery",
                "rotate --recovery",
            ),
        ];
        for (report, problem, hint) in cases {
            let found = shown(report, &ClusterKeyState::Stored);
            let [(found, found_hint)] = &found[..] else { panic!("{found:?}") };
            assert!(found.contains(problem) && found_hint.contains(hint), "{found}; {found_hint}");
        }
    }

    #[test]
    fn a_temporary_slot_says_why_it_is_still_there() {
        let temporary = KeyReport { has_temporary_slot: true, stale_slots: 1, ..SETTLED };
        let why = |state| {
            let found = temporary.conditions(&state);
            let [found] = &found[..] else { panic!("{found:?}") };
            assert_eq!(found.waiting_for, "root.cluster.keys");
            found.problem.clone()
        };
        assert!(why(ClusterKeyState::Unknown).ends_with("yet"));
        assert!(
            why(ClusterKeyState::Pending("no leader".into())).ends_with("its half of the key: no leader")
        );
    }

    #[test]
    fn a_volume_that_nobody_could_open_says_so_or_keeps_its_temporary_slot() {
        let lacking = KeyReport { has_recovery: false, lacks_passphrase: true, ..SETTLED };
        let temporary = KeyReport { has_temporary_slot: true, stale_slots: 1, ..lacking };
        let shown_once = |report| KeyReport { has_unconfirmed_recovery: true, ..report };
        for (report, says, hint) in [
            (lacking, "nobody would open it", "storage recovery`"),
            (temporary, "alone until it has a recovery", "storage recovery`"),
            (shown_once(lacking), "nobody has confirmed, and no other one", "storage recovery --confirm`"),
            (shown_once(temporary), "passphrase is confirmed", "storage recovery --confirm`"),
        ] {
            let found = shown(report, &ClusterKeyState::Stored);
            let [(problem, found_hint)] = &found[..] else { panic!("{found:?}") };
            assert!(problem.contains(says) && found_hint.contains(hint), "{problem}; {found_hint}");
        }
    }

    #[test]
    fn a_tang_server_that_would_not_open_the_volume_is_one_warning() {
        let settled = KeyReport { is_with_tang: true, ..SETTLED };
        let temporary = KeyReport { has_temporary_slot: true, stale_slots: 1, ..settled };
        let pending = ClusterKeyState::Pending("Tang server http://tang".into());
        let incomplete = ClusterKeyState::Incomplete("Tang server http://tang".into());
        for (report, state, says) in [
            (temporary, &ClusterKeyState::Unknown, "node unlock key alone until a Tang server keeps"),
            (temporary, &pending, "the other half: Tang server http://tang"),
            (settled, &pending, "stay locked at the next start: Tang server http://tang"),
            (settled, &incomplete, "each of its Tang servers: Tang server http://tang"),
            (settled, &ClusterKeyState::Lost, "no Tang server has the other half"),
        ] {
            let found = shown(report, state);
            let [(problem, _)] = &found[..] else { panic!("{found:?}") };
            assert!(problem.contains(says), "{problem}");
        }
        assert_eq!(shown(settled, &ClusterKeyState::Stored), []);
    }

    #[test]
    fn a_key_that_the_cluster_has_lost_is_one_warning() {
        let found = shown(KeyReport { stale_slots: 1, ..SETTLED }, &ClusterKeyState::Lost);
        let [(problem, hint)] = &found[..] else { panic!("{found:?}") };
        assert!(problem.contains("recovery passphrase alone") && hint.contains("rotate --recovery"));
    }
}
