//! The key slots of a volume: opening one with a secret, rotating keys, and removing the slots that they supersede.
//!
//! The header is the journal of a rotation. A new slot is added and named with the next generation, verified, and only
//! then, once its key is confirmed, the older ones are removed:
//!
//! ```text
//!  slots of the header        killed here, the next call …
//!  split 1                    …
//!  split 1, an announced one  removes the announced one, and adds split 2
//!  split 1, split 2           of rotate with key 1: replaces split 2 · of confirm with key 2: removes split 1
//!  split 2                    has nothing left to do
//! ```
//!
//! A token announces each slot before it is added. A slot without a token is an operator's, and stays.
//!
//! A passphrase does not tell which keys the cluster has. So a rotation with one keeps the oldest slots, which were
//! confirmed last, and replaces the newer ones: at most two generations of a kind are in the header.
//!
//! The slot of a recovery passphrase is marked as unconfirmed until an operator has typed it: the answer that showed it
//! may be lost. The next addition replaces it.
//!
//! A split volume with a [local cold start](super::ColdStart::Local) keeps a slot of the node unlock key alone. Its
//! generation is that of the confirmed split slot: a confirmation adds it before it removes the older ones.

use std::fmt;

use super::super::uuid::Uuid;
use super::device::{CheckedHeader, LuksDevice, Passphrase};
use super::error::LuksError;
use super::key::{UnlockKey, derive_passphrase};
use super::policy::HeaderSummary;
use super::recovery::RecoveryPassphrase;
use super::rollback::{HeaderGenerations, HeaderRecords, HeaderRollback};
use super::seal::{KeySeal, SealId};
use super::slot_kind::{KEY_KINDS, KeySlotStatus, SlotKind, SlotToken};
use super::token::{KeyPolicy, VolumeToken};

/// The number of generations before the newest one that may still have sealed keys: each has a slot, or an interrupted
/// rotation has left it.
const KEPT_GENERATIONS: u32 = 64;

/// The key slots of a header. *Source:* "LUKS2 On-Disk Format Specification", §3.2.
const SLOTS_OF_HEADER: usize = 32;

/// A secret that opens a volume.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum UnlockSecret {
    /// The node unlock key, which the node reads itself.
    Node,
    /// The cluster unlock key, together with the node's.
    Cluster(UnlockKey),
    /// A recovery passphrase.
    Recovery(RecoveryPassphrase),
}

impl UnlockSecret {
    /// The kind of slot that it opens.
    pub fn slot_kind(&self) -> SlotKind {
        match self {
            UnlockSecret::Node => SlotKind::Local,
            UnlockSecret::Cluster(_) => SlotKind::Split,
            UnlockSecret::Recovery(_) => SlotKind::Recovery,
        }
    }
}

#[derive(Clone)]
pub(super) struct OpenedSlot {
    pub(super) slot: u32,
    pub(super) kind: SlotKind,
    pub(super) generation: u32,
    pub(super) passphrase: Passphrase,
}

/// Without the passphrase.
impl fmt::Debug for OpenedSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenedSlot")
            .field("slot", &self.slot)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

pub(super) fn describe_slots(
    summary: &HeaderSummary,
    volume: &VolumeToken,
    opened: Option<u32>,
) -> Vec<KeySlotStatus> {
    let describe = |slot: &u32| {
        let token = summary.slot_token(*slot);
        let name = token.map(|token| (token.kind, token.generation));
        let is_unconfirmed = token.is_some_and(|token| token.unconfirmed);
        let is_temporary = |kind| kind == SlotKind::Local && !volume.keeps_local_slot();
        let is_stale = name.map_or(summary.is_interrupted(*slot), |(kind, generation)| {
            is_temporary(kind) || newest_generation(summary, kind) > Some(generation)
        });
        KeySlotStatus { slot: *slot, name, is_opened: opened == Some(*slot), is_unconfirmed, is_stale }
    };
    summary.slots.iter().map(describe).collect()
}

/// A slot, for people.
fn describe_slot(summary: &HeaderSummary, slot: u32) -> String {
    match summary.slot_token(slot) {
        Some(SlotToken { kind, unconfirmed: true, .. }) => format!("key slot {slot} ({kind}, not confirmed)"),
        Some(SlotToken { kind, .. }) => format!("key slot {slot} ({kind})"),
        None => format!("key slot {slot} (of another program)"),
    }
}

/// The slots of one kind with their tokens, the newest first.
fn slots_of(summary: &HeaderSummary, kind: SlotKind) -> Vec<(u32, &SlotToken)> {
    let mut slots: Vec<_> = summary
        .slot_tokens
        .values()
        .filter(|token| token.kind == kind)
        .flat_map(|token| token.slots().map(move |slot| (slot, token)))
        .filter(|(slot, _)| summary.slots.contains(slot))
        .collect();
    slots.sort_by_key(|(slot, token)| (std::cmp::Reverse(token.generation), *slot));
    slots
}

fn newest_generation(summary: &HeaderSummary, kind: SlotKind) -> Option<u32> {
    slots_of(summary, kind).first().map(|(_, token)| token.generation)
}

/// The slots that a confirmed slot supersedes: older ones of its kind, those of interrupted rotations, and for a split
/// slot those of the node unlock key alone, except the one that a local cold start needs. What an operator has added stays.
fn superseded_slots(
    summary: &HeaderSummary,
    volume: &VolumeToken,
    kind: SlotKind,
    generation: u32,
) -> Vec<u32> {
    let is_superseded = |slot: &u32| match summary.slot_token(*slot) {
        None => summary.is_interrupted(*slot),
        Some(token) if token.kind == kind => token.generation < generation,
        Some(token) if kind == SlotKind::Split && token.kind == SlotKind::Local => {
            !volume.keeps_local_slot() || token.generation < generation
        }
        Some(_) => false,
    };
    summary.slots.iter().copied().filter(is_superseded).collect()
}

/// Returns whether a confirmation of the newest cluster unlock key has something to do.
pub(super) fn needs_confirmation(summary: &HeaderSummary, volume: &VolumeToken) -> bool {
    newest_generation(summary, SlotKind::Split).is_some_and(|newest| {
        needs_local_slot(summary, volume, newest)
            || !superseded_slots(summary, volume, SlotKind::Split, newest).is_empty()
    })
}

/// Returns whether a confirmed split slot still needs the slot of a local cold start.
fn needs_local_slot(summary: &HeaderSummary, volume: &VolumeToken, generation: u32) -> bool {
    volume.keeps_local_slot() && newest_generation(summary, SlotKind::Local) != Some(generation)
}

/// The newest generation of unlock keys that the cluster may rely on: those of newer ones were never confirmed.
fn confirmed_generation(summary: &HeaderSummary, opened: &OpenedSlot) -> u32 {
    match opened.kind {
        SlotKind::Recovery => {
            let slots = KEY_KINDS.iter().flat_map(|kind| slots_of(summary, *kind));
            slots.map(|(_, token)| token.generation).min().unwrap_or(0)
        }
        SlotKind::Local | SlotKind::Split => opened.generation,
    }
}

/// The key slots of a device, and where the node keeps its half of the keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeySlots<'a> {
    pub(super) device: LuksDevice<'a>,
    pub(super) seal: &'a dyn KeySeal,
    pub(super) records: HeaderRecords<'a>,
}

impl KeySlots<'_> {
    /// The newest slot that a secret opens.
    pub(super) fn open_slot(
        &self,
        header: &CheckedHeader,
        secret: &UnlockSecret,
    ) -> Result<OpenedSlot, LuksError> {
        self.open_slot_by(header, secret, |slot, passphrase| self.device.opens(header, slot, passphrase))
    }

    /// The newest slot that a secret opens, as `open` finds: it may map the data as well.
    pub(super) fn open_slot_by(
        &self,
        header: &CheckedHeader,
        secret: &UnlockSecret,
        open: impl Fn(u32, &Passphrase) -> Result<bool, LuksError>,
    ) -> Result<OpenedSlot, LuksError> {
        let error = match self.open_header_slot(header, secret, open) {
            Ok(opened) => return Ok(opened),
            Err(error) => error,
        };
        if self.records.is_restoring(header.uuid).map_err(LuksError::HeaderRecord)? {
            return Err(LuksError::RestoreInterrupted { key_error: Box::new(error) });
        }
        // The right key of a newer header does not open this one.
        Err(match self.rollback(header)? {
            Some(rollback) => LuksError::RolledBack {
                volume: header.uuid.to_string(),
                rollback,
                key_error: Box::new(error),
            },
            None => error,
        })
    }

    /// The newest slot that a secret opens, as `open` finds, of any header of the volume.
    pub(super) fn open_header_slot(
        &self,
        header: &CheckedHeader,
        secret: &UnlockSecret,
        open: impl Fn(u32, &Passphrase) -> Result<bool, LuksError>,
    ) -> Result<OpenedSlot, LuksError> {
        let kind = secret.slot_kind();
        let mut first_error = None;
        // The newest first: until a rotation is confirmed, older slots of the kind remain.
        for (slot, token) in slots_of(&header.summary, kind) {
            let tried = self.passphrase_of(header.uuid, secret, token).and_then(|passphrase| {
                if open(slot, &passphrase)? { Ok(passphrase) } else { Err(closed_slot(header.uuid, secret)) }
            });
            match tried {
                Ok(passphrase) => {
                    return Ok(OpenedSlot { slot, kind, generation: token.generation, passphrase });
                }
                // The caller learns why the newest slot stays closed; older ones may have other keys.
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        Err(first_error.unwrap_or(LuksError::NoSlot { kind }))
    }

    /// How a header is older than the newest one that this node has written.
    pub(super) fn rollback(&self, header: &CheckedHeader) -> Result<Option<HeaderRollback>, LuksError> {
        let recorded = self.records.read(header.uuid).map_err(LuksError::HeaderRecord)?;
        Ok(HeaderGenerations::newest_of(&header.summary).rollback_from(recorded))
    }

    /// The generation of the next unlock keys: also a newer header than this one, which was rolled back, has no such keys.
    fn next_key_generation(&self, header: &CheckedHeader) -> Result<u32, LuksError> {
        let recorded = self.records.read(header.uuid).map_err(LuksError::HeaderRecord)?;
        let newest = HeaderGenerations::newest_of(&header.summary).keys.max(recorded.keys);
        // A key that was sealed and not confirmed may be that of a newer header, too.
        let is_used = |generation: &u32| {
            let id = SealId { volume: header.uuid, generation: *generation };
            !matches!(self.seal.unseal_key(id), Ok(None))
        };
        let first = newest.saturating_add(1);
        let mut generations = first..=first.saturating_add(KEPT_GENERATIONS);
        Ok(generations.find(|generation| !is_used(generation)).unwrap_or(first))
    }

    fn passphrase_of(
        &self,
        volume: Uuid,
        secret: &UnlockSecret,
        token: &SlotToken,
    ) -> Result<Passphrase, LuksError> {
        let cluster_key = match secret {
            UnlockSecret::Recovery(passphrase) => return Ok(passphrase_bytes(passphrase)),
            UnlockSecret::Node => None,
            UnlockSecret::Cluster(key) => Some(key),
        };
        let id = SealId { volume, generation: token.generation };
        let node_key = self.node_key(id)?;
        // Compared before cryptsetup runs, so that the error can name the wrong half of the two keys.
        if token.node_check.as_ref() != Some(&node_key.check_value(volume)) {
            return Err(LuksError::WrongNodeKey { volume: volume.to_string() });
        }
        Ok(derive_passphrase(volume, token.kind, &node_key, cluster_key))
    }

    /// The node unlock key that was sealed.
    pub(super) fn node_key(&self, id: SealId) -> Result<UnlockKey, LuksError> {
        let sealed = self.seal.unseal_key(id).map_err(LuksError::Seal)?;
        sealed.ok_or_else(|| LuksError::NodeKeyMissing { volume: id.volume.to_string() })
    }

    /// Generates a node unlock key, seals it, and reads it back.
    pub(super) fn seal_new_key(&self, id: SealId) -> Result<UnlockKey, LuksError> {
        let key = UnlockKey::generate().map_err(LuksError::Random)?;
        self.seal.seal_key(id, &key).map_err(LuksError::Seal)?;
        // A key that can't be unsealed must be noticed now, and not at the next start, when the volume needs it.
        let sealed = self.node_key(id)?;
        if sealed.expose_bytes() != key.expose_bytes() {
            return Err(LuksError::WrongNodeKey { volume: id.volume.to_string() });
        }
        Ok(key)
    }

    /// Adds slots with new keys, which a secret permits. Returns the cluster unlock key of a split volume, whose slot
    /// replaces the old one when it is confirmed; a local volume has its new key only.
    pub(super) fn rotate(
        &self,
        secret: &UnlockSecret,
        volume: &VolumeToken,
    ) -> Result<Option<UnlockKey>, LuksError> {
        let header = self.device.check_header()?;
        let opened = self.open_slot(&header, secret)?;
        let confirmed = confirmed_generation(&header.summary, &opened);
        // Void slots go first: rotations that are repeated must not fill the header.
        self.remove_slots(&header, &KEY_KINDS, |token| token.generation > confirmed)?;
        let generation = self.next_key_generation(&header)?;
        let id = SealId { volume: header.uuid, generation };
        // Sealed before its slot exists: a kill in between leaves an unused key, and no slot whose key is lost.
        let node_key = self.seal_new_key(id)?;
        let cluster_key = match volume.keys {
            KeyPolicy::Local => None,
            KeyPolicy::Split => Some(UnlockKey::generate().map_err(LuksError::Random)?),
        };
        self.add_key_slot(&opened.passphrase, id, &node_key, cluster_key.as_ref())?;
        // The node has sealed the only key: no answer can be lost, so the old slot goes at once.
        if cluster_key.is_none() {
            self.confirm(&UnlockSecret::Node, volume)?;
        }
        Ok(cluster_key)
    }

    /// Adds the slot of a node unlock key, or of both keys together.
    pub(super) fn add_key_slot(
        &self,
        existing: &Passphrase,
        id: SealId,
        node_key: &UnlockKey,
        cluster_key: Option<&UnlockKey>,
    ) -> Result<(), LuksError> {
        let kind = if cluster_key.is_some() { SlotKind::Split } else { SlotKind::Local };
        let passphrase = derive_passphrase(id.volume, kind, node_key, cluster_key);
        let check = node_key.check_value(id.volume);
        self.device
            .add_slot(existing, &passphrase, |slot| SlotToken::new(slot, kind, id.generation, Some(check)))
    }

    /// Adds the slot of a new recovery passphrase.
    pub(super) fn add_recovery(&self, secret: &UnlockSecret) -> Result<RecoveryPassphrase, LuksError> {
        let header = self.device.check_header()?;
        let opened = self.open_slot(&header, secret)?;
        // The passphrase that permits this was typed, and stays.
        let is_unknown = |token: &SlotToken| token.unconfirmed && !token.names(opened.slot);
        self.remove_slots(&header, &[SlotKind::Recovery], is_unknown)?;
        let passphrase = RecoveryPassphrase::generate().map_err(LuksError::Random)?;
        let recorded = self.records.read(header.uuid).map_err(LuksError::HeaderRecord)?;
        let newest = HeaderGenerations::newest_of(&header.summary).recovery.max(recorded.recovery);
        let generation = newest.saturating_add(1);
        self.device.add_slot(&opened.passphrase, &passphrase_bytes(&passphrase), |slot| {
            SlotToken::new(slot, SlotKind::Recovery, generation, None)
        })?;
        Ok(passphrase)
    }

    /// Begins a re-encryption, whose new volume key has a slot for each slot of the old one. A slot whose secret is not given is
    /// removed if it is among those that may go.
    pub(super) fn begin_reencryption(
        &self,
        header: &CheckedHeader,
        secrets: &[UnlockSecret],
        may_go: &[u32],
    ) -> Result<(), LuksError> {
        self.remove_interrupted(header)?;
        let header = self.device.check_header()?;
        self.plan_reencryption(&header, secrets, may_go)?;
        for slot in header.summary.slots.iter().filter(|slot| may_go.contains(slot)) {
            self.device.remove_slot(*slot)?;
        }
        let header = self.device.check_header()?;
        let passphrases = self.plan_reencryption(&header, secrets, &[])?;
        self.device.begin_reencryption(&passphrases)?;
        let begun = self.device.check_header()?;
        self.records.record_volume_key(begun.uuid, &begun.summary.volume_key).map_err(LuksError::HeaderRecord)
    }

    /// The passphrases of all slots but those that may go, in the order of their numbers.
    pub(super) fn plan_reencryption(
        &self,
        header: &CheckedHeader,
        secrets: &[UnlockSecret],
        may_go: &[u32],
    ) -> Result<Vec<Passphrase>, LuksError> {
        let summary = &header.summary;
        let kept: Vec<u32> = summary.slots.iter().copied().filter(|slot| !may_go.contains(slot)).collect();
        let (mut passphrases, mut unknown) = (Vec::new(), Vec::new());
        for slot in &kept {
            match self.passphrase_of_slot(header, *slot, secrets)? {
                Some(passphrase) => passphrases.push(passphrase),
                None => unknown.push(describe_slot(summary, *slot)),
            }
        }
        if let ([], Some(slot)) = (&*kept, summary.slots.first()) {
            return Err(LuksError::LastSlot { slot: *slot });
        }
        if !unknown.is_empty() {
            return Err(LuksError::UnknownSlots { slots: unknown.join(", ") });
        }
        // One more keeps the state of the re-encryption.
        if 2 * kept.len() >= SLOTS_OF_HEADER {
            return Err(LuksError::TooManySlots);
        }
        Ok(passphrases)
    }

    /// What opens this slot, of these secrets; `None` if none of them does.
    fn passphrase_of_slot(
        &self,
        header: &CheckedHeader,
        slot: u32,
        secrets: &[UnlockSecret],
    ) -> Result<Option<Passphrase>, LuksError> {
        let Some(token) = header.summary.slot_token(slot) else { return Ok(None) };
        for secret in secrets.iter().filter(|secret| secret.slot_kind() == token.kind) {
            let passphrase = self.passphrase_of(header.uuid, secret, token)?;
            if self.device.opens(header, slot, &passphrase)? {
                return Ok(Some(passphrase));
            }
        }
        Ok(None)
    }

    /// Removes the slots that the newest one of a kind supersedes, after a secret has opened it.
    pub(super) fn confirm(&self, secret: &UnlockSecret, volume: &VolumeToken) -> Result<(), LuksError> {
        let header = self.device.check_header()?;
        let opened = self.open_slot(&header, secret)?;
        let generation = opened.generation;
        // An older secret does not prove that the newest key is kept: no slot may go.
        if newest_generation(&header.summary, opened.kind) != Some(generation) {
            return Err(LuksError::NotNewest { kind: opened.kind });
        }
        // Before the older slots go: at no point does the node lose the way to start without its cluster.
        if opened.kind == SlotKind::Split && needs_local_slot(&header.summary, volume, generation) {
            let id = SealId { volume: header.uuid, generation };
            self.add_key_slot(&opened.passphrase, id, &self.node_key(id)?, None)?;
        }
        // Before the older slots go, too: after a kill, the next confirmation removes those that are left.
        let tokens = &header.summary.slot_tokens;
        let of_slot =
            header.summary.token_of(opened.slot).map(|identifier| (identifier, &tokens[&identifier]));
        if let Some((identifier, token)) = of_slot.filter(|(_, token)| token.unconfirmed) {
            self.device.replace_slot_token(identifier, &token.to_confirmed())?;
        }
        let recorded = self.records.read(header.uuid).map_err(LuksError::HeaderRecord)?;
        let (keys, recovery) = match opened.kind {
            SlotKind::Recovery => (0, generation),
            SlotKind::Local | SlotKind::Split => (generation, 0),
        };
        // Once the older slots are gone, a header that still has them was put back.
        self.records
            .raise(header.uuid, HeaderGenerations { keys, recovery })
            .map_err(LuksError::HeaderRecord)?;
        let summary = self.device.check_header()?.summary;
        for slot in superseded_slots(&summary, volume, opened.kind, generation) {
            self.device.remove_slot(slot)?;
        }
        self.remove_unused_seals(&header, recorded.keys)
    }

    /// Removes the node unlock keys that no slot needs any more. The recorded one stays if no slot had it: it is that of a
    /// newer header, which was rolled back, and may be restored.
    fn remove_unused_seals(&self, before: &CheckedHeader, recorded: u32) -> Result<(), LuksError> {
        let (volume, before) = (before.uuid, &before.summary);
        let after = self.device.check_header()?.summary;
        let was_named =
            |generation: u32| before.slot_tokens.values().any(|token| token.generation == generation);
        let is_needed = |generation: u32| {
            if generation == recorded && !was_named(generation) {
                return true;
            }
            let mut slots = KEY_KINDS.iter().flat_map(|kind| slots_of(&after, *kind));
            slots.any(|(_, token)| token.generation == generation)
        };
        // The header before the removals has all generations that may have a sealed key.
        let next = HeaderGenerations::newest_of(before).keys.saturating_add(1);
        let generations = next.saturating_sub(KEPT_GENERATIONS).max(1)..next;
        for generation in generations.filter(|generation| !is_needed(*generation)) {
            self.seal.remove_key(SealId { volume, generation }).map_err(LuksError::Seal)?;
        }
        Ok(())
    }

    /// Removes the slots that interrupted rotations and unconfirmed additions have left: void ones, and those without a name.
    fn remove_slots(
        &self,
        header: &CheckedHeader,
        kinds: &[SlotKind],
        is_void: impl Fn(&SlotToken) -> bool,
    ) -> Result<(), LuksError> {
        let slots = kinds.iter().flat_map(|kind| slots_of(&header.summary, *kind));
        for (slot, _) in slots.filter(|(_, token)| is_void(token)) {
            self.device.remove_slot(slot)?;
        }
        self.remove_interrupted(header)
    }

    /// Removes the slots that an interrupted begin of a re-encryption has left.
    pub(super) fn remove_left(&self, summary: &HeaderSummary) -> Result<(), LuksError> {
        // cryptsetup changes no slot in a re-encryption.
        let left = summary.left_slots.iter().filter(|_| summary.reencryption.is_none());
        left.copied().try_for_each(|slot| self.device.remove_unused_slot(slot))
    }

    /// Removes what an interrupted addition has left, a slot or its announcement, an interrupted removal, a token, and an
    /// interrupted begin of a re-encryption, its slots. A slot that an operator has added stays.
    pub(super) fn remove_interrupted(&self, header: &CheckedHeader) -> Result<(), LuksError> {
        let summary = &header.summary;
        self.remove_left(summary)?;
        for (identifier, _) in summary.slot_tokens.iter().filter(|(_, token)| token.slots().next().is_none())
        {
            let slot = identifier - 1;
            match summary.is_interrupted(slot) {
                true => self.device.remove_slot(slot)?,
                false => self.device.remove_token(*identifier)?,
            }
        }
        Ok(())
    }
}

fn passphrase_bytes(passphrase: &RecoveryPassphrase) -> Passphrase {
    Passphrase::new(passphrase.reveal().as_bytes().to_vec())
}

fn closed_slot(volume: Uuid, secret: &UnlockSecret) -> LuksError {
    match secret {
        // The check value has shown that the node's half is right.
        UnlockSecret::Cluster(_) => LuksError::WrongClusterKey { volume: volume.to_string() },
        UnlockSecret::Node | UnlockSecret::Recovery(_) => LuksError::SlotClosed { kind: secret.slot_kind() },
    }
}
