//! The tokens of a LUKS2 header, where this crate records the state of the volume, and the name of each key slot.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::slot_kind::{SLOT_TYPE, SlotToken};

/// The identifier of the token that describes the volume; that of a key slot is the slot's plus one when it is written. A
/// reencryption gives the token to another slot.
pub(super) const VOLUME_TOKEN: u32 = 0;

/// The type of the token that describes the volume.
const VOLUME_TYPE: &str = "nodekeel-volume";

/// The types of all tokens of this crate begin like this, in later releases, too.
const OUR_TYPES: &str = "nodekeel-";

/// The encryption of the blocks of a volume: always AES-XTS with a key of 512 bits.
///
/// A volume that is not encrypted is a [`DiskVolume`](crate::volume::DiskVolume).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum VolumeEncryption {
    /// A stolen disk can't be read. A changed block decrypts to noise, which the file system may or may not notice.
    Encrypted,
    /// In addition each block has an HMAC-SHA256: reading a changed block fails. The disk can't grow or be trimmed,
    /// and each write costs two.
    EncryptedAndAuthenticated,
}

impl fmt::Display for VolumeEncryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            VolumeEncryption::Encrypted => "encrypted",
            VolumeEncryption::EncryptedAndAuthenticated => "encrypted and authenticated",
        })
    }
}

/// The keys that open a volume in normal operation, chosen when it is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum KeyPolicy {
    /// The node unlock key alone. The node starts without its cluster, and so does a thief of the whole node.
    Local,
    /// The node unlock key and the cluster unlock key together. Until the caller has
    /// [confirmed](super::LuksVolume::confirm_secret) that the cluster keeps its key, the node's alone opens the
    /// volume too.
    Split,
}

/// The way a node opens a [split](KeyPolicy::Split) volume after a power cut, when the store with the cluster unlock
/// key may be on that very volume. It is chosen when the volume is created, and recorded in its header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ColdStart {
    /// The node unlock key alone opens the volume forever: its slot stays. A thief of the whole node opens it, too.
    Local,
    /// An operator types the recovery passphrase.
    #[default]
    Operator,
    /// The node gets the cluster unlock key from its peers.
    Peers,
    /// A Tang server in the network gives the cluster unlock key back. Releases before this one don't read such a header.
    Tang,
}

impl fmt::Display for ColdStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ColdStart::Local => "local",
            ColdStart::Operator => "operator",
            ColdStart::Peers => "peers",
            ColdStart::Tang => "tang",
        })
    }
}

impl fmt::Display for KeyPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeyPolicy::Local => "local",
            KeyPolicy::Split => "split",
        })
    }
}

/// The progress of the creation of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum VolumeProgress {
    /// The volume has no data yet.
    Unfinished,
    /// The volume may have data.
    Complete,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VolumeToken {
    #[serde(rename = "type")]
    token_type: String,
    /// Every token has this list; no key slot belongs to this one.
    keyslots: Vec<String>,
    /// The version of these fields, 1.
    format: u32,
    pub(crate) state: VolumeProgress,
    pub(crate) encryption: VolumeEncryption,
    pub(crate) keys: KeyPolicy,
    /// None in a volume that is not split, and in one of a release before this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cold_start: Option<ColdStart>,
    /// True if it is authenticated, and was not wiped: a block that was never written can't be read.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) unwiped: bool,
    /// The node that created it, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) node: Option<String>,
}

impl VolumeToken {
    pub(super) fn new(encryption: VolumeEncryption, keys: KeyPolicy, cold_start: ColdStart) -> VolumeToken {
        VolumeToken {
            token_type: VOLUME_TYPE.into(),
            keyslots: Vec::new(),
            format: 1,
            state: VolumeProgress::Unfinished,
            encryption,
            keys,
            // A local volume always opens without its cluster: a cold start would mean nothing.
            cold_start: (keys == KeyPolicy::Split).then_some(cold_start),
            unwiped: false,
            node: None,
        }
    }

    /// Returns whether the node unlock key alone opens the volume forever.
    pub(super) fn keeps_local_slot(&self) -> bool {
        self.keys == KeyPolicy::Local || self.cold_start == Some(ColdStart::Local)
    }

    /// The way a split volume is opened after a power cut.
    pub(super) fn cold_start(&self) -> Option<ColdStart> {
        (self.keys == KeyPolicy::Split).then(|| self.cold_start.unwrap_or_default())
    }
}

/// A token of this crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Volume(VolumeToken),
    Slot(SlotToken),
    /// Of another program, of this type. It is kept, and never used.
    Foreign(String),
}

impl Token {
    /// `None` for a token of a newer release, or one that is damaged.
    pub(super) fn parse(value: &serde_json::Value) -> Option<Token> {
        match value.get("type")?.as_str()? {
            other if !other.starts_with(OUR_TYPES) => Some(Token::Foreign(other.to_owned())),
            VOLUME_TYPE => {
                let token: VolumeToken = serde_json::from_value(value.clone()).ok()?;
                (token.format == 1 && token.keyslots.is_empty()).then_some(Token::Volume(token))
            }
            SLOT_TYPE => serde_json::from_value(value.clone()).ok().map(Token::Slot),
            _ => None,
        }
    }
}
