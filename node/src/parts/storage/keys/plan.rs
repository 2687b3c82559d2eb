//! Decides the next step with the cluster unlock key of a split volume: pure.

use nodekeel_localstorage::volume::{ColdStart, EncryptionStatus, KeyPolicy, KeySlotStatus, SlotKind};

/// The unlock keys of a volume, by its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SlotFacts {
    /// The UUID of the volume.
    pub(super) volume: String,
    pub(super) keys: KeyPolicy,
    /// The newest generation of the slots that both halves open together.
    pub(super) newest_split: Option<u32>,
    /// The node unlock key alone opens the volume.
    pub(super) has_local: bool,
    /// The confirmation of the newest cluster unlock key has something to do.
    pub(super) needs_confirmation: bool,
    /// An operator may have to open the volume after a power cut, and has confirmed no recovery passphrase.
    pub(super) lacks_passphrase: bool,
}

impl SlotFacts {
    pub(super) fn of(status: &EncryptionStatus) -> Self {
        let generations = |kind| {
            let named = status.slots.iter().filter_map(|slot| slot.name);
            named.filter(move |name| name.0 == kind).map(|name| name.1)
        };
        Self {
            volume: status.volume.clone(),
            keys: status.keys,
            newest_split: generations(SlotKind::Split).max(),
            has_local: generations(SlotKind::Local).next().is_some(),
            needs_confirmation: status.needs_confirmation,
            lacks_passphrase: needs_passphrase(status) && !has_confirmed_passphrase(status),
        }
    }

    /// Returns whether the temporary slot has to stay: no one could open the volume after a power cut.
    pub(super) fn needs_temporary_slot(&self) -> bool {
        self.has_local && self.lacks_passphrase
    }
}

/// Returns whether an operator may have to open the volume after a power cut: peers don't, when all of them were off.
pub(super) fn needs_passphrase(status: &EncryptionStatus) -> bool {
    matches!(status.cold_start, Some(ColdStart::Operator | ColdStart::Peers))
}

/// Returns whether an operator has typed a recovery passphrase of the volume since it was shown.
pub(super) fn has_confirmed_passphrase(status: &EncryptionStatus) -> bool {
    let is_recovery = |slot: &KeySlotStatus| slot.name.is_some_and(|(kind, _)| kind == SlotKind::Recovery);
    status.slots.iter().any(|slot| is_recovery(slot) && !slot.is_unconfirmed)
}

/// The next step. Each may be repeated after a kill, and is decided anew from what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyStep {
    /// Nothing: the volume needs no key of the cluster.
    NotSplit,
    /// Nothing: the cluster has this one key, which opens the volume.
    Done(usize),
    /// Adds the key that only this process has to those in the cluster.
    Deposit,
    /// Removes the slots that this key of the cluster supersedes.
    Confirm(usize),
    /// Removes all keys but this one from the cluster.
    Trim(usize),
    /// Makes new keys, since the newest one is lost: permitted by this key of the cluster.
    RotateByCluster(usize),
    /// The same, permitted by the node unlock key alone.
    RotateByNode,
    /// No key at hand opens the volume: an operator gives it new keys by the recovery passphrase.
    Lost,
}

/// Decides the next step. `stored` are the keys in the cluster, and `held` the one that only this process has: each
/// with the generation of the newest slot that it opens, if it opens one.
///
/// ```text
///  slots            cluster      this process   step
///  local, split 1   –            1              Deposit
///  local, split 1   –            –              RotateByNode       killed before the deposit
///  local, split 1   1            any            Confirm            removes local; Done while that has to stay
///  split 1          1            –              Done
///  split 1, 2       1            2              Deposit            a rotation
///  split 1, 2       1            –              RotateByCluster    killed before the deposit
///  split 1, 2       1, 2         any            Confirm            removes split 1
///  split 2          1, 2         any            Trim
///  split 2          1            –              Lost               etcd was restored from a backup
/// ```
///
/// The cluster has the key of the slot before until the new one is confirmed: in each of these states one of its keys
/// opens the volume, or the node's does.
pub(super) fn next_step(slots: &SlotFacts, stored: &[Option<u32>], held: Option<u32>) -> KeyStep {
    let newest = slots.newest_split;
    if slots.keys != KeyPolicy::Split {
        return KeyStep::NotSplit;
    }
    // The cluster has the newest key: all that is left is to remove older ones.
    if let Some(current) = stored.iter().position(|opens| opens.is_some() && *opens == newest) {
        return match (slots.needs_confirmation && !slots.needs_temporary_slot(), stored.len()) {
            (true, _) => KeyStep::Confirm(current),
            (false, 1) => KeyStep::Done(current),
            (false, _) => KeyStep::Trim(current),
        };
    }
    // The newest key is in this process alone.
    if held.is_some() && held == newest {
        return KeyStep::Deposit;
    }
    // The newest key is lost. A key before it permits new ones.
    match stored.iter().position(Option::is_some) {
        Some(older) => KeyStep::RotateByCluster(older),
        None if slots.has_local => KeyStep::RotateByNode,
        None => KeyStep::Lost,
    }
}
