//! A key slot: its kind, and its record in the header.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The type of a token that names a key slot.
pub(super) const SLOT_TYPE: &str = "nodekeel-slot";

/// The kind of secret that opens a key slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SlotKind {
    /// The node unlock key.
    Local,
    /// The node unlock key and the cluster unlock key together.
    Split,
    /// A recovery passphrase.
    Recovery,
}

/// The kinds of slots that unlock keys open, whose generations count together.
pub(super) const KEY_KINDS: [SlotKind; 2] = [SlotKind::Local, SlotKind::Split];

impl fmt::Display for SlotKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SlotKind::Local => "local",
            SlotKind::Split => "split",
            SlotKind::Recovery => "recovery",
        })
    }
}

/// A key slot, as the header describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeySlotStatus {
    /// The number in the header.
    pub slot: u32,
    /// The kind of secret that opens it, and its generation; none if this crate's tokens do not name it: an operator has
    /// added it, and it stays, or, if it is stale, a rotation was interrupted.
    pub name: Option<(SlotKind, u32)>,
    /// True if the volume was opened with it, by this process.
    pub is_opened: bool,
    /// True if it holds an [unconfirmed](super::LuksVolume::confirm_secret) recovery passphrase, which the operator
    /// may not have saved.
    pub is_unconfirmed: bool,
    /// True if the next confirmation of the newest key removes it: it is of an older generation, of a rotation that was
    /// interrupted, or the temporary slot of the node unlock key alone.
    pub is_stale: bool,
}

impl KeySlotStatus {
    /// Returns whether an operator, or another program, has added it. This crate never removes it.
    pub fn is_foreign(&self) -> bool {
        self.name.is_none() && !self.is_stale
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SlotToken {
    #[serde(rename = "type")]
    token_type: String,
    /// One slot; none after cryptsetup has removed it; several if another program has assigned it to them.
    keyslots: Vec<String>,
    pub(super) kind: SlotKind,
    /// Grows by one with each rotation.
    pub(super) generation: u32,
    /// The check value of the node unlock key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) node_check: Option<String>,
    /// True if the slot is of a recovery passphrase that was not typed yet. Those of a release before this field
    /// count as typed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) unconfirmed: bool,
    /// True while the slot of this token is being added: it may have no slot yet, and does not name it. An older release
    /// rejects it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) adding: bool,
}

impl SlotToken {
    pub(super) fn new(slot: u32, kind: SlotKind, generation: u32, node_check: Option<String>) -> SlotToken {
        SlotToken {
            token_type: SLOT_TYPE.into(),
            keyslots: vec![slot.to_string()],
            kind,
            generation,
            node_check,
            unconfirmed: kind == SlotKind::Recovery,
            adding: false,
        }
    }

    /// The token that announces the addition of its slot.
    pub(super) fn to_announcement(&self) -> SlotToken {
        // cryptsetup rejects a token with a slot that does not exist.
        SlotToken { keyslots: Vec::new(), adding: true, ..self.clone() }
    }

    /// The same token, of a recovery passphrase that was typed.
    pub(super) fn to_confirmed(&self) -> SlotToken {
        SlotToken { unconfirmed: false, ..self.clone() }
    }

    /// The slots that it names.
    pub(super) fn slots(&self) -> impl Iterator<Item = u32> {
        self.keyslots.iter().filter_map(|slot| slot.parse().ok())
    }

    pub(super) fn names(&self, slot: u32) -> bool {
        self.slots().any(|named| named == slot)
    }
}
