//! The header of a volume that is being re-encrypted: the volume as it was, the volume as it will be, and the pieces of the
//! data that have the one key or the other.
//!
//! ```text
//!  byte 0      16 MiB
//!  header      | new key … | hot zone | old key … |
//!              segment 0   1          2
//!  segment 3, backup-previous: all of it by the old key         digest, key slots of the old key
//!  segment 4, backup-final:    all of it by the new key         digest, key slots of the new key
//!  key slot of type "reencrypt": the checksums of the hot zone  a digest over all of this, by both keys
//! ```
//!
//! Each of the first three may be absent. The hot zone is named only if cryptsetup was killed in it: `cryptsetup repair` completes
//! it. Only the second version of the requirement is accepted: its digest over these fields needs both volume keys, so that
//! nobody else can make a header of this kind that cryptsetup uses.
//!
//! cryptsetup writes the header several times at the begin and at the end. Killed in between, it can't go on itself:
//!
//! ```text
//!  header                                     cryptsetup           this crate
//!  the new digest has no segment, and some    leaves them          never uses these slots, and removes them
//!  of the new slots; no requirement
//!  the whole data have the new key, some      opens nothing, and   opens by the new key alone, and writes
//!  or none of the old slots are left          completes nothing    the header without the old key
//! ```
//!
//! *Source:* "LUKS2 On-Disk Format Specification", version 1.1.2, §3.6 and §5; CVE-2021-4122.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::{Value, json};

use super::header::{HEADER_AREA_BYTES, JSON_BYTES};
use super::policy::{MIN_PBKDF2_ITERATIONS, PolicyViolation};

/// The requirement of a header whose re-encryption has a digest over its metadata.
const REQUIREMENT: &str = "online-reencrypt-v2";
const SECTOR_BYTES: u64 = 512;

/// A re-encryption that was begun, and is not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reencryption {
    /// The bytes of the data that have the new key; [`u64::MAX`] for all of them.
    pub(super) done_bytes: u64,
    pub(super) stage: ReencryptionStage,
}

/// What is left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReencryptionStage {
    /// Part of the data has the old key.
    Data,
    /// The same, and cryptsetup was killed in the middle of a piece.
    Repair,
    /// All data have the new key, and the header still describes what is left of the old one.
    Header,
}

/// Both volumes that a header describes, each as a header of its own.
pub(super) struct SplitHeader {
    /// None if no data have the old key any more.
    pub(super) before: Option<Value>,
    pub(super) after: Value,
    pub(super) reencryption: Reencryption,
}

/// Returns whether a header requires nothing but a re-encryption of the kind that this crate begins.
pub(super) fn is_required(requirements: &Value) -> bool {
    *requirements == json!({ "mandatory": [REQUIREMENT] })
}

/// Splits a header that requires a re-encryption. What it returns is still to be checked: both volumes alike.
pub(super) fn split_header(metadata: &Value) -> Result<SplitHeader, PolicyViolation> {
    let parts: Parts =
        Parts::deserialize(metadata).map_err(|error| PolicyViolation::Metadata(error.to_string()))?;
    let split = finish_parts(&parts).or_else(|| split_parts(&parts));
    split.ok_or_else(|| PolicyViolation::Reencryption(parts.describe()))
}

/// The metadata without the old key, of a header whose data all have the new one; none of any other header.
pub(super) fn finish_metadata(json: &[u8]) -> Option<Vec<u8>> {
    let parts: Parts = serde_json::from_slice(json).ok()?;
    let finished = finish_parts(&parts)?.after.to_string().into_bytes();
    (finished.len() < JSON_BYTES).then_some(finished)
}

/// Takes the digests without a segment out of a header, with their key slots. Returns those, for each digest: an interrupted
/// begin has left them, or an operator has added them as unbound slots. The digest over the metadata stays.
pub(super) fn take_unused(metadata: &mut Value) -> Vec<UnusedSlots> {
    let is_luks2 =
        |slot: &Value| slot.as_str().is_some_and(|slot| metadata["keyslots"][slot]["type"] == "luks2");
    let is_unused = |digest: &&Value| {
        let slots = digest["keyslots"].as_array();
        digest["segments"] == json!([]) && slots.is_some_and(|slots| slots.iter().all(is_luks2))
    };
    let digests = metadata["digests"].as_object().into_iter().flatten();
    let unused: Vec<_> = digests.filter(|(_, digest)| is_unused(digest)).map(|(at, _)| at.clone()).collect();
    let mut taken = Vec::new();
    for at in unused {
        let Some(digest) = metadata["digests"].as_object_mut().and_then(|digests| digests.remove(&at)) else {
            continue;
        };
        let named = digest["keyslots"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let keyslots = metadata["keyslots"].as_object_mut();
        let slots: Option<serde_json::Map<_, _>> =
            keyslots.map(|all| named.filter_map(|slot| all.remove_entry(slot)).collect());
        taken.push(UnusedSlots { slots: slots.unwrap_or_default().into(), digest });
    }
    taken
}

/// Key slots whose key is of no data, and the digest of that key.
pub(super) struct UnusedSlots {
    pub(super) digest: Value,
    /// By their numbers.
    pub(super) slots: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Parts {
    keyslots: BTreeMap<u32, Value>,
    tokens: Value,
    segments: BTreeMap<u32, Value>,
    digests: BTreeMap<u32, Value>,
    config: Value,
}

/// The key slot with the checksums of the hot zone.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReencryptionSlot {
    #[serde(rename = "type")]
    slot_type: String,
    key_size: u32,
    mode: String,
    direction: String,
    #[serde(rename = "priority")]
    _priority: u32,
    area: ChecksumArea,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChecksumArea {
    #[serde(rename = "type")]
    area_type: String,
    hash: String,
    sector_size: u32,
    offset: String,
    size: String,
}

/// The digest over the metadata, by both volume keys.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MetadataDigest {
    #[serde(rename = "type")]
    digest_type: String,
    #[serde(rename = "keyslots")]
    _keyslots: Vec<String>,
    #[serde(rename = "segments")]
    _segments: Vec<String>,
    hash: String,
    iterations: u32,
    #[serde(rename = "salt")]
    _salt: String,
    #[serde(rename = "digest")]
    _digest: String,
}

impl MetadataDigest {
    fn is_known(&self) -> bool {
        self.digest_type == "pbkdf2"
            && matches!(self.hash.as_str(), "sha256" | "sha512")
            && self.iterations >= MIN_PBKDF2_ITERATIONS
    }
}

impl ReencryptionSlot {
    fn is_known(&self) -> bool {
        let area = &self.area;
        let end = area.offset.parse::<u64>().ok().zip(area.size.parse().ok());
        self.slot_type == "reencrypt"
            && (self.key_size, self.mode.as_str(), self.direction.as_str()) == (1, "reencrypt", "forward")
            && (area.area_type.as_str(), area.hash.as_str()) == ("checksum", "sha256")
            && matches!(area.sector_size, 512 | 4096)
            && end
                .and_then(|(offset, size)| offset.checked_add(size))
                .is_some_and(|end| end <= HEADER_AREA_BYTES)
    }
}

impl Parts {
    fn describe(&self) -> String {
        let slot = self.keyslots.values().find(|slot| slot["type"] == "reencrypt");
        let field = |name: &str| slot.and_then(|slot| slot[name].as_str()).unwrap_or("unknown").to_owned();
        let resilience = slot.and_then(|slot| slot["area"]["type"].as_str()).unwrap_or("none");
        format!(
            "mode {}, {}, resilience {resilience}, {} segments, {} digests",
            field("mode"),
            field("direction"),
            self.segments.len(),
            self.digests.len()
        )
    }

    /// A header with some of the key slots, one digest, and one segment.
    fn volume(&self, slots: &BTreeSet<u32>, digest: &Value, segment: &Value) -> Value {
        let keyslots: serde_json::Map<_, _> = self
            .keyslots
            .iter()
            .filter(|(slot, _)| slots.contains(slot))
            .map(|(slot, value)| (slot.to_string(), value.clone()))
            .collect();
        let (mut digest, mut config, mut tokens) = (digest.clone(), self.config.clone(), self.tokens.clone());
        digest["segments"] = json!(["0"]);
        if let Some(config) = config.as_object_mut() {
            config.remove("requirements");
        }
        // cryptsetup rejects a token with a slot that does not exist.
        for token in tokens.as_object_mut().into_iter().flat_map(|tokens| tokens.values_mut()) {
            if let Some(named) = token.get_mut("keyslots").and_then(Value::as_array_mut) {
                named.retain(|slot| slot.as_str().is_some_and(|slot| keyslots.contains_key(slot)));
            }
        }
        json!({
            "keyslots": keyslots,
            "tokens": tokens,
            "segments": { "0": segment },
            "digests": { "0": digest },
            "config": config,
        })
    }
}

/// None if part of the data may have the old key. What is left of that is not looked at: cryptsetup was killed as it removed it.
fn finish_parts(parts: &Parts) -> Option<SplitHeader> {
    let digests: Vec<_> = parts.digests.values().map(Digest::read).collect::<Option<_>>()?;
    let mut segments = parts.segments.iter();
    let (whole, segment) = segments.next()?;
    let is_whole = *whole == 0 && segment.get("flags").is_none() && segment["size"] == "dynamic";
    let new = single(digests.iter().filter(|digest| digest.segments.contains(whole)))?;
    // The first header of a re-encryption has the same segments, and the first of them is of the old key.
    let mut has_final = false;
    for (number, segment) in segments {
        let is_new = new.segments.contains(number);
        let flags = &segment["flags"];
        match (is_new, *flags == json!(["backup-final"]), *flags == json!(["backup-previous"])) {
            (true, true, false) => has_final = true,
            (false, false, true) => {}
            _ => return None,
        }
    }
    let is_finished = is_whole && has_final && !new.slots.is_empty();
    is_finished.then(|| SplitHeader {
        before: None,
        after: parts.volume(&new.slots, new.value, segment),
        reencryption: Reencryption { done_bytes: u64::MAX, stage: ReencryptionStage::Header },
    })
}

/// None if any part is not as a re-encryption of this kind has it.
fn split_parts(parts: &Parts) -> Option<SplitHeader> {
    let (slot, value) = single(parts.keyslots.iter().filter(|(_, value)| value["type"] == "reencrypt"))?;
    ReencryptionSlot::deserialize(value).ok().filter(ReencryptionSlot::is_known)?;
    // The two whole segments are the last ones.
    let count = u32::try_from(parts.segments.len()).ok().filter(|count| (3..=5).contains(count))?;
    let is_numbered = parts.segments.keys().copied().eq(0..count);
    let (previous, last) = (count - 2, count - 1);
    let whole = without_flag(&parts.segments[&previous], "backup-previous")?;
    let is_same = without_flag(&parts.segments[&last], "backup-final")? == whole;
    let digests: Vec<_> = parts.digests.values().map(Digest::read).collect::<Option<_>>()?;
    let of_segment = |segment: u32, other: u32| {
        let has =
            |digest: &&Digest<'_>| digest.segments.contains(&segment) && !digest.segments.contains(&other);
        single(digests.iter().filter(has))
    };
    let (old, new) = (of_segment(previous, last)?, of_segment(last, previous)?);
    let of_metadata = single(digests.iter().filter(|digest| digest.segments.is_empty()))?;
    MetadataDigest::deserialize(of_metadata.value).ok().filter(MetadataDigest::is_known)?;
    let slots: BTreeSet<u32> = parts.keyslots.keys().copied().collect();
    let covered: BTreeSet<u32> = digests.iter().flat_map(|digest| digest.slots.iter().copied()).collect();
    let is_covered = digests.len() == 3
        && of_metadata.slots == BTreeSet::from([*slot])
        && old.slots.is_disjoint(&new.slots)
        && slots == covered
        && !old.slots.is_empty()
        && !new.slots.is_empty();
    if !is_numbered || !is_same || !is_covered {
        return None;
    }
    let pieces: Vec<_> = (0..previous)
        .map(|piece| (&parts.segments[&piece], new.segments.contains(&piece), old.segments.contains(&piece)))
        .collect();
    let reencryption = read_pieces(&pieces, &whole)?;
    Some(SplitHeader {
        before: Some(parts.volume(&old.slots, old.value, &whole)),
        after: parts.volume(&new.slots, new.value, &whole),
        reencryption,
    })
}

/// The pieces of the data, each with whether the digest of the new and of the old key has it.
fn read_pieces(pieces: &[(&Value, bool, bool)], whole: &Value) -> Option<Reencryption> {
    let (mut next, mut last_at) = (Some(HEADER_AREA_BYTES), 0);
    let (mut done_bytes, mut stage) = (0, ReencryptionStage::Data);
    for (segment, is_new, is_old) in pieces {
        let is_hot = segment.get("flags").is_some();
        let segment = if is_hot { without_flag(segment, "in-reencryption")? } else { (*segment).clone() };
        // In this order, each at most once.
        let at = match (is_new, is_old, is_hot) {
            (true, false, false) => 1,
            (true, true, true) => 2,
            (false, true, false) => 3,
            _ => return None,
        };
        let offset = next.filter(|_| at > last_at)?;
        last_at = at;
        let tweak = (offset - HEADER_AREA_BYTES) / SECTOR_BYTES;
        let mut expected = whole.clone();
        expected["offset"] = json!(offset.to_string());
        expected["iv_tweak"] = json!(tweak.to_string());
        expected["size"] = segment["size"].clone();
        if segment != expected {
            return None;
        }
        // Nothing follows a piece that ends with the disk.
        next = match segment["size"].as_str()? {
            "dynamic" => None,
            size => Some(size.parse::<u64>().ok().and_then(|size| offset.checked_add(size))?),
        };
        if is_hot {
            stage = ReencryptionStage::Repair;
        }
        if at == 1 {
            done_bytes = next.map_or(u64::MAX, |end| end - HEADER_AREA_BYTES);
        }
    }
    Some(Reencryption { done_bytes, stage })
}

/// A segment whose only flag is this one, without it.
fn without_flag(segment: &Value, flag: &str) -> Option<Value> {
    let mut segment = segment.clone();
    let flags = segment.as_object_mut()?.remove("flags")?;
    (flags == json!([flag])).then_some(segment)
}

struct Digest<'a> {
    slots: BTreeSet<u32>,
    segments: BTreeSet<u32>,
    value: &'a Value,
}

impl Digest<'_> {
    fn read(value: &Value) -> Option<Digest<'_>> {
        let numbers = |name: &str| {
            let numbers = value[name].as_array()?.iter();
            numbers.map(|number| number.as_str()?.parse().ok()).collect::<Option<BTreeSet<u32>>>()
        };
        Some(Digest { slots: numbers("keyslots")?, segments: numbers("segments")?, value })
    }
}

fn single<T>(mut items: impl Iterator<Item = T>) -> Option<T> {
    items.next().filter(|_| items.next().is_none())
}
