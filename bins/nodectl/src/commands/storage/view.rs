//! The answers of the node about its data volume, as `storage` prints them.

use std::time::SystemTime;

use nodekeel_node::v1;
use serde::Serialize;

use super::reencrypt::ReencryptionView;
use super::scrub::ScrubView;
use crate::time::format_rfc3339;
use crate::wire::{non_empty, system_time};

#[derive(Debug, Serialize)]
pub(super) struct StorageView {
    pub(super) state: String,
    /// The reason why it is closed or locked.
    pub(super) detail: Option<String>,
    pub(super) since: Option<String>,
    pub(super) erase_token: Option<String>,
    pub(super) wiped_bytes: Option<u64>,
    pub(super) wipe_bytes: Option<u64>,
    pub(super) copied_bytes: Option<u64>,
    pub(super) copy_bytes: Option<u64>,
    pub(super) read_bytes: Option<u64>,
    pub(super) disk_bytes: Option<u64>,
    pub(super) left_seconds: Option<u64>,
    pub(super) path: Option<String>,
    pub(super) encryption: Option<EncryptionView>,
    pub(super) encryption_error: Option<String>,
    pub(super) faults: Vec<String>,
    /// The running one.
    pub(super) scrub: Option<ScrubView>,
    pub(super) last_scrub: Option<ScrubView>,
    pub(super) reencryption: Option<ReencryptionView>,
    #[serde(skip)]
    pub(super) since_time: Option<SystemTime>,
}

#[derive(Debug, Serialize)]
pub(super) struct EncryptionView {
    pub(super) device: String,
    pub(super) volume: String,
    pub(super) encryption: String,
    pub(super) keys: String,
    pub(super) cold_start: Option<String>,
    pub(super) node: Option<String>,
    pub(super) both_headers: bool,
    pub(super) cluster_key: Option<String>,
    pub(super) cluster_key_detail: Option<String>,
    pub(super) rollback: Option<String>,
    pub(super) foreign_tokens: Vec<String>,
    pub(super) slots: Vec<SlotView>,
}

#[derive(Debug, Serialize)]
pub(super) struct SlotView {
    pub(super) slot: u32,
    /// Absent if the header does not name it.
    pub(super) kind: Option<String>,
    pub(super) generation: u32,
    pub(super) opened: bool,
    pub(super) stale: bool,
    /// A recovery passphrase that the operator has not confirmed.
    pub(super) unconfirmed: bool,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct StorageChangeView<'a> {
    pub(super) done: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) passphrase: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) trimmed_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) faults: Vec<String>,
}

impl From<v1::StorageResponse> for StorageView {
    fn from(answer: v1::StorageResponse) -> Self {
        let since_time = system_time(answer.since);
        Self {
            state: answer.state,
            detail: non_empty(answer.detail),
            since: since_time.map(format_rfc3339),
            erase_token: non_empty(answer.erase_token),
            wiped_bytes: answer.wiped_bytes,
            copied_bytes: answer.copied_bytes,
            copy_bytes: answer.copy_bytes,
            wipe_bytes: answer.wipe_bytes,
            read_bytes: answer.read_bytes,
            disk_bytes: answer.disk_bytes,
            left_seconds: answer.left_seconds,
            path: non_empty(answer.path),
            encryption: answer.encryption.map(EncryptionView::from),
            encryption_error: non_empty(answer.encryption_error),
            faults: answer.faults,
            scrub: answer.scrub.map(ScrubView::from),
            last_scrub: answer.last_scrub.map(ScrubView::from),
            reencryption: answer.reencryption.map(ReencryptionView::from),
            since_time,
        }
    }
}

impl From<v1::StorageEncryption> for EncryptionView {
    fn from(encryption: v1::StorageEncryption) -> Self {
        let slot = |slot: v1::StorageKeySlot| SlotView {
            slot: slot.slot,
            kind: non_empty(slot.kind),
            generation: slot.generation,
            opened: slot.is_opened,
            stale: slot.is_stale,
            unconfirmed: slot.is_unconfirmed,
        };
        Self {
            device: encryption.device,
            volume: encryption.volume,
            encryption: encryption.encryption,
            keys: encryption.keys,
            cold_start: non_empty(encryption.cold_start),
            node: non_empty(encryption.node),
            both_headers: encryption.has_both_headers,
            cluster_key: non_empty(encryption.cluster_key),
            cluster_key_detail: non_empty(encryption.cluster_key_detail),
            rollback: non_empty(encryption.rollback),
            foreign_tokens: encryption.foreign_tokens,
            slots: encryption.slots.into_iter().map(slot).collect(),
        }
    }
}
