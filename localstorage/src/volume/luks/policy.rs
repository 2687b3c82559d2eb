//! The policy that a LUKS2 header must meet before it is used.
//!
//! A thief of the disk could have written its header. A header with a null cipher accepts every passphrase and
//! makes the node write its secrets in plain text; one with requirements or several segments makes cryptsetup run code
//! that the caller has not asked for. So this crate accepts what it would have written itself, and what cryptsetup's own
//! maintenance leaves: other key slots and tokens, priorities, flags that change only the speed. An unknown field is
//! rejected. No token of another program is used: each call of cryptsetup has a key and a slot, or two slots that the key opens.
//!
//! The one requirement that is accepted is a [re-encryption](super::reencryption) of the kind that this crate begins. Key slots of
//! another volume key, which an interrupted begin leaves, are accepted without it, and never used.
//!
//! *Source:* CVE-2021-4122; talos#12105; "LUKS2 On-Disk Format Specification", version 1.1.2, §3.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

#[cfg(any(test, feature = "testing"))]
use super::super::uuid::Uuid;
use super::header::{COPIES_BYTES, HEADER_AREA_BYTES, JSON_BYTES};
#[cfg(any(test, feature = "testing"))]
use super::header::{LuksHeader, encode_header};
use super::reencryption::{self, Reencryption, ReencryptionStage, SplitHeader, UnusedSlots};
use super::slot_kind::SlotToken;
use super::token::{Token, VOLUME_TOKEN, VolumeEncryption, VolumeToken};

/// The cipher of the data, and of the areas of the key slots.
pub(super) const CIPHER: &str = "aes-xts-plain64";
/// The key of AES-256-XTS, in bytes.
const XTS_KEY_BYTES: u32 = 64;
/// The key of HMAC-SHA256 that follows it.
const HMAC_KEY_BYTES: u32 = 32;
/// The fewest iterations of PBKDF2: enough for passphrases of 160 random bits and more, as all of this crate are.
///
/// *Source:* systemd-cryptenroll, which uses as many for keys and recovery passphrases.
pub(super) const MIN_PBKDF2_ITERATIONS: u32 = 1000;
/// The least costs of Argon2id, for slots that an operator has added: those of cryptsetup's own minimum for
/// iterations, and 32 MiB.
const MIN_ARGON2_TIME: u32 = 4;
const MIN_ARGON2_KIB: u32 = 32 << 10;

/// A deviation of a header from those that this crate writes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyViolation {
    /// The metadata are not valid JSON, or have a field that this crate does not write.
    #[error("the metadata have a field that this release does not write, or are not JSON: {0}")]
    Metadata(String),
    /// The header requires features of cryptsetup, such as a reencryption in progress.
    #[error("the header requires features that another program has set: {0}")]
    Requirements(String),
    /// A re-encryption of another kind than this crate begins is not complete.
    #[error(
        "a reencryption was begun that this release does not continue ({0}): if you have begun it, complete it by cryptsetup \
         reencrypt --resume-only, without --init-only, on this device"
    )]
    Reencryption(String),
    /// The volume would be opened with a flag that the caller has not asked for.
    #[error(
        "the header sets the flag {0:?}, which another program has stored with --persistent: clear it by cryptsetup \
         refresh --persistent while the volume is open, or restore the header"
    )]
    Flag(String),
    /// A token that names itself one of this crate's, and is of a newer release, damaged, or contradicts another.
    #[error("the header has a token that this release does not know: {0}")]
    UnknownToken(String),
    /// The data are not exactly one encrypted segment from the end of the header to the end of the disk.
    #[error("the data are not one encrypted segment over the whole disk: {0}")]
    Segments(String),
    /// Another cipher, for example the null cipher.
    #[error("{part} has the cipher {found:?}, not {CIPHER:?} with a key of {key_bytes} bytes")]
    Cipher {
        /// The encrypted part.
        part: String,
        /// The cipher, and the length of its key in bytes.
        found: String,
        /// The right length.
        key_bytes: u32,
    },
    /// The integrity of the data is protected in another way, or not at all.
    #[error("the header is of a volume that is {found}, but the volume is configured as {configured}")]
    Integrity {
        /// As recorded in the header.
        found: String,
        /// As the volume is configured.
        configured: VolumeEncryption,
    },
    /// The header records that the node unlock key alone opens the volume, which is configured to need the cluster's,
    /// too.
    #[error(
        "the header is of a volume that the node unlock key alone opens, but the volume is configured as split"
    )]
    Keys,
    /// The header records that the node unlock key alone opens the volume after a power cut, which is configured
    /// otherwise.
    #[error(
        "the header is of a volume that the node unlock key alone opens at a cold start, but the volume is configured otherwise"
    )]
    ColdStart,
    /// A key slot, or the digest of the volume key, is weaker than those of this crate.
    #[error("key slot {slot} is weaker than permitted: {found}")]
    WeakKeySlot {
        /// The number of the slot.
        slot: String,
        /// The weak part.
        found: String,
    },
    /// The digest that verifies the volume key is not the only one of the data, or does not cover all key slots.
    #[error("the digest of the volume key is invalid: {0}")]
    Digest(String),
}

/// The parts of a checked header that this crate needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeaderSummary {
    /// None if the creation was interrupted before it, or if another program made the volume.
    pub(super) volume: Option<VolumeToken>,
    /// The numbers of all key slots with the key of the data.
    pub(super) slots: Vec<u32>,
    /// Those with a key of no data: nothing is opened by them.
    pub(super) unused_slots: Vec<u32>,
    /// Those of them that an interrupted begin of a re-encryption has left. Others are an operator's.
    pub(super) left_slots: Vec<u32>,
    /// The tokens that name slots, by their identifiers. A slot may have none.
    pub(super) slot_tokens: BTreeMap<u32, SlotToken>,
    /// The slots with the costs of those that this crate adds. Other programs choose far higher ones.
    pub(super) cheap_slots: Vec<u32>,
    /// The types of the tokens of other programs, by their identifiers.
    pub(super) foreign_tokens: BTreeMap<u32, String>,
    /// Names the volume key, and tells nothing of it: the same for all headers with this key. That of the new key during a
    /// re-encryption, as are the slots.
    pub(super) volume_key: String,
    /// The bytes of a sector of the mapping: 512 or 4096.
    pub(super) sector_bytes: u32,
    /// A re-encryption that is not complete.
    pub(super) reencryption: Option<Reencryption>,
}

impl HeaderSummary {
    /// Returns whether a re-encryption has only its last change of the header left to do.
    pub(super) fn is_unfinished(&self) -> bool {
        self.reencryption.is_some_and(|state| state.stage == ReencryptionStage::Header)
    }

    /// The token that names a slot.
    pub(super) fn slot_token(&self, slot: u32) -> Option<&SlotToken> {
        self.slot_tokens.values().find(|token| token.names(slot))
    }

    /// The identifier of the token that names a slot, or announces it.
    pub(super) fn token_of(&self, slot: u32) -> Option<u32> {
        let named =
            self.slot_tokens.iter().find(|(_, token)| token.names(slot)).map(|(identifier, _)| *identifier);
        named.or_else(|| self.slot_tokens.get(&(slot + 1)).filter(|token| token.adding).map(|_| slot + 1))
    }

    pub(super) fn has_token(&self, identifier: u32) -> bool {
        self.slot_tokens.contains_key(&identifier) || self.foreign_tokens.contains_key(&identifier)
    }

    /// Returns whether a slot without a name was added by an interrupted call of this crate. Any other one is an
    /// operator's.
    pub(super) fn is_interrupted(&self, slot: u32) -> bool {
        let is_announced = self.slot_tokens.get(&(slot + 1)).is_some_and(|token| token.adding);
        is_announced && self.cheap_slots.contains(&slot) && self.slot_token(slot).is_none()
    }
}

/// Reads only the token of the volume, from a header that is not checked: to decide whose a volume is.
pub(super) fn read_volume_token(json: &[u8]) -> Option<VolumeToken> {
    let metadata: Value = serde_json::from_slice(json).ok()?;
    match Token::parse(metadata.get("tokens")?.get(VOLUME_TOKEN.to_string())?)? {
        Token::Volume(token) => Some(token),
        Token::Slot(_) | Token::Foreign(_) => None,
    }
}

pub(super) fn check_header(
    json: &[u8],
    encryption: VolumeEncryption,
) -> Result<HeaderSummary, PolicyViolation> {
    let not_valid = |error: serde_json::Error| PolicyViolation::Metadata(error.to_string());
    let mut metadata: Value = serde_json::from_slice(json).map_err(not_valid)?;
    // Requirements first: under one that this release does not know, other fields may mean something else.
    let is_reencrypting = check_requirements(&metadata)?;
    let unused = reencryption::take_unused(&mut metadata);
    let mut summary = match is_reencrypting {
        false => check_volume(metadata, encryption)?,
        true => check_reencryption(&metadata, encryption)?,
    };
    for UnusedSlots { digest, slots } in unused {
        let unused = UnusedKey {
            keyslots: serde_json::from_value(slots).map_err(not_valid)?,
            digest: serde_json::from_value(digest).map_err(not_valid)?,
        };
        unused.check(encryption)?;
        // A begin of this crate has their costs; one of cryptsetup by hand has copied at least the first slot with its token.
        let is_copy = |slot: &u32| {
            let token = summary.slot_token(*slot);
            token.is_some_and(|token| token.slots().any(|named| summary.slots.contains(&named)))
        };
        if unused.keyslots.iter().any(|(slot, keyslot)| keyslot.is_cheap() || is_copy(slot)) {
            summary.left_slots.extend(unused.keyslots.keys());
        }
        summary.unused_slots.extend(unused.keyslots.keys());
    }
    Ok(summary)
}

/// Checks both volumes of a header that is being re-encrypted.
fn check_reencryption(
    metadata: &Value,
    encryption: VolumeEncryption,
) -> Result<HeaderSummary, PolicyViolation> {
    let SplitHeader { before, after, reencryption } = reencryption::split_header(metadata)?;
    // cryptsetup can't do that.
    if encryption != VolumeEncryption::Encrypted {
        return Err(PolicyViolation::Reencryption(encryption.to_string()));
    }
    if let Some(before) = before {
        check_volume(before, encryption)?;
    }
    Ok(HeaderSummary { reencryption: Some(reencryption), ..check_volume(after, encryption)? })
}

/// Checks the metadata of a volume with one key.
fn check_volume(metadata: Value, encryption: VolumeEncryption) -> Result<HeaderSummary, PolicyViolation> {
    let not_valid = |error: serde_json::Error| PolicyViolation::Metadata(error.to_string());
    let metadata: Metadata = serde_json::from_value(metadata).map_err(not_valid)?;
    metadata.config.check()?;
    check_segments(&metadata.segments, encryption)?;
    for (slot, keyslot) in &metadata.keyslots {
        keyslot.check(slot, key_bytes(encryption))?;
    }
    metadata.check_digest()?;
    metadata.read_tokens()
}

/// The length of the volume key. That of an authenticated volume has a second part, for the HMAC. Each slot holds both.
fn key_bytes(encryption: VolumeEncryption) -> u32 {
    match encryption {
        VolumeEncryption::Encrypted => XTS_KEY_BYTES,
        VolumeEncryption::EncryptedAndAuthenticated => XTS_KEY_BYTES + HMAC_KEY_BYTES,
    }
}

/// Key slots of a volume key that is of no data. They are removed, which overwrites their areas.
struct UnusedKey {
    keyslots: BTreeMap<u32, Keyslot>,
    digest: VolumeKeyDigest,
}

impl UnusedKey {
    fn check(&self, encryption: VolumeEncryption) -> Result<(), PolicyViolation> {
        for (slot, keyslot) in &self.keyslots {
            keyslot.check(slot, key_bytes(encryption))?;
        }
        if self.digest.is_strong() { Ok(()) } else { Err(self.digest.weakness()) }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    keyslots: BTreeMap<u32, Keyslot>,
    tokens: BTreeMap<u32, Value>,
    segments: BTreeMap<u32, Segment>,
    digests: BTreeMap<u32, VolumeKeyDigest>,
    config: Config,
}

impl Metadata {
    fn check_digest(&self) -> Result<(), PolicyViolation> {
        let invalid = |why: String| Err(PolicyViolation::Digest(why));
        let mut digests = self.digests.values();
        // A second digest verifies a second volume key, as during a reencryption.
        let (Some(digest), None) = (digests.next(), digests.next()) else {
            return invalid(format!("there are {} digests", self.digests.len()));
        };
        if !digest.is_strong() {
            return Err(digest.weakness());
        }
        if digest.segments != ["0"] {
            return invalid(format!("it is that of the segments {:?}", digest.segments));
        }
        // A slot outside of the digest holds another volume key, or one that nothing verifies.
        let covers = |slot: &u32| digest.keyslots.contains(&slot.to_string());
        match self.keyslots.keys().find(|slot| !covers(slot)) {
            Some(slot) => invalid(format!("key slot {slot} has another volume key")),
            None => Ok(()),
        }
    }

    fn read_tokens(&self) -> Result<HeaderSummary, PolicyViolation> {
        let slots = self.keyslots.keys().copied().collect();
        let cheap_slots = self.keyslots.iter().filter(|slot| slot.1.is_cheap()).map(|slot| *slot.0).collect();
        let (slot_tokens, foreign_tokens) = (BTreeMap::new(), BTreeMap::new());
        let mut hash = Sha256::new();
        for digest in self.digests.values() {
            hash.update(format!("{} {}", digest.salt, digest.digest));
        }
        let name: Vec<_> = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let mut summary = HeaderSummary {
            sector_bytes: self.segments.get(&0).map_or(512, |segment| segment.sector_size),
            volume: None,
            slots,
            unused_slots: Vec::new(),
            left_slots: Vec::new(),
            slot_tokens,
            cheap_slots,
            foreign_tokens,
            volume_key: name.concat(),
            reencryption: None,
        };
        for (identifier, value) in &self.tokens {
            match Token::parse(value) {
                Some(Token::Volume(token)) if *identifier == VOLUME_TOKEN => summary.volume = Some(token),
                // Two names of one slot would contradict each other.
                Some(Token::Slot(token))
                    if *identifier != VOLUME_TOKEN
                        && !token.slots().any(|slot| summary.slot_token(slot).is_some()) =>
                {
                    summary.slot_tokens.insert(*identifier, token);
                }
                Some(Token::Foreign(kind)) => {
                    summary.foreign_tokens.insert(*identifier, kind);
                }
                _ => {
                    let kind = value.get("type").and_then(Value::as_str).unwrap_or("without a type");
                    return Err(PolicyViolation::UnknownToken(kind.to_owned()));
                }
            }
        }
        Ok(summary)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keyslot {
    #[serde(rename = "type")]
    keyslot_type: String,
    key_size: u32,
    af: Splitter,
    area: Area,
    kdf: Kdf,
    /// The order in which cryptsetup tries slots that are not named. Each call of this crate names one.
    #[serde(default, rename = "priority")]
    _priority: u32,
}

impl Keyslot {
    /// Returns whether it has the costs of those that this crate adds.
    fn is_cheap(&self) -> bool {
        matches!(self.kdf, Kdf::Pbkdf2 { iterations: MIN_PBKDF2_ITERATIONS, .. })
    }

    fn check(&self, slot: &u32, key_bytes: u32) -> Result<(), PolicyViolation> {
        let weak = |found: String| Err(PolicyViolation::WeakKeySlot { slot: slot.to_string(), found });
        let part = format!("key slot {slot}");
        // The area holds the volume key: a null cipher would leave it in plain text.
        check_cipher(part.clone(), &self.area.encryption, self.area.key_size)?;
        if self.key_size != key_bytes {
            return Err(PolicyViolation::Cipher {
                part,
                found: format!("a volume key of {} bytes", self.key_size),
                key_bytes,
            });
        }
        let is_known = self.keyslot_type == "luks2" && self.area.area_type == "raw" && self.af.is_known();
        if !is_known {
            return weak(format!("its type {:?}, area or splitter is unknown", self.keyslot_type));
        }
        // Outside, a change of the slot would overwrite data of the volume.
        if !self.area.is_within_header() {
            return weak("its area is outside the header".into());
        }
        match &self.kdf {
            Kdf::Pbkdf2 { hash, iterations, .. }
                if matches!(hash.as_str(), "sha256" | "sha512") && *iterations >= MIN_PBKDF2_ITERATIONS =>
            {
                Ok(())
            }
            Kdf::Pbkdf2 { hash, iterations, .. } => weak(format!("PBKDF2 with {iterations} times {hash}")),
            Kdf::Argon2id { time, memory, .. } if *time >= MIN_ARGON2_TIME && *memory >= MIN_ARGON2_KIB => {
                Ok(())
            }
            Kdf::Argon2id { time, memory, .. } => weak(format!("Argon2 with {time} times {memory} KiB")),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Splitter {
    #[serde(rename = "type")]
    splitter_type: String,
    stripes: u32,
    hash: String,
}

impl Splitter {
    fn is_known(&self) -> bool {
        self.splitter_type == "luks1"
            && self.stripes == 4000
            && matches!(self.hash.as_str(), "sha256" | "sha512")
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Area {
    #[serde(rename = "type")]
    area_type: String,
    offset: String,
    size: String,
    encryption: String,
    key_size: u32,
}

impl Area {
    fn is_within_header(&self) -> bool {
        let (Ok(offset), Ok(size)) = (self.offset.parse::<u64>(), self.size.parse::<u64>()) else {
            return false;
        };
        offset >= COPIES_BYTES as u64 && offset.checked_add(size).is_some_and(|end| end <= HEADER_AREA_BYTES)
    }
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
enum Kdf {
    Pbkdf2 {
        hash: String,
        iterations: u32,
        #[serde(rename = "salt")]
        _salt: String,
    },
    #[serde(alias = "argon2i")]
    Argon2id {
        time: u32,
        memory: u32,
        #[serde(rename = "cpus")]
        _cpus: u32,
        #[serde(rename = "salt")]
        _salt: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Segment {
    #[serde(rename = "type")]
    segment_type: String,
    offset: String,
    size: String,
    iv_tweak: String,
    encryption: String,
    sector_size: u32,
    integrity: Option<Integrity>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Integrity {
    #[serde(rename = "type")]
    integrity_type: String,
    journal_encryption: String,
    journal_integrity: String,
}

fn check_segments(
    segments: &BTreeMap<u32, Segment>,
    encryption: VolumeEncryption,
) -> Result<(), PolicyViolation> {
    // Several segments are a re-encryption in progress, which was split before.
    let (Some(segment), 1) = (segments.get(&0), segments.len()) else {
        return Err(PolicyViolation::Segments(format!("{} segments", segments.len())));
    };
    let is_whole = segment.segment_type == "crypt"
        && segment.offset == HEADER_AREA_BYTES.to_string()
        && segment.size == "dynamic"
        && segment.iv_tweak == "0"
        && matches!(segment.sector_size, 512 | 4096);
    if !is_whole {
        return Err(PolicyViolation::Segments(format!(
            "{} of {} bytes at byte {} with sectors of {} bytes",
            segment.segment_type, segment.size, segment.offset, segment.sector_size
        )));
    }
    check_cipher("the data".into(), &segment.encryption, XTS_KEY_BYTES)?;
    // A thief could remove this field, and the kernel would no longer check the blocks.
    let is_authenticated = segment.integrity.as_ref().map(|integrity| {
        integrity.integrity_type == "hmac(sha256)"
            && integrity.journal_encryption == "none"
            && integrity.journal_integrity == "none"
    });
    match (encryption, is_authenticated) {
        (VolumeEncryption::Encrypted, None) | (VolumeEncryption::EncryptedAndAuthenticated, Some(true)) => {
            Ok(())
        }
        (configured, found) => Err(PolicyViolation::Integrity {
            found: match found {
                None => VolumeEncryption::Encrypted.to_string(),
                Some(true) => VolumeEncryption::EncryptedAndAuthenticated.to_string(),
                Some(false) => "authenticated in another way".into(),
            },
            configured,
        }),
    }
}

fn check_cipher(part: String, cipher: &str, key_bytes: u32) -> Result<(), PolicyViolation> {
    if cipher == CIPHER && key_bytes == XTS_KEY_BYTES {
        return Ok(());
    }
    let found = format!("{cipher} with a key of {key_bytes} bytes");
    Err(PolicyViolation::Cipher { part, found, key_bytes: XTS_KEY_BYTES })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VolumeKeyDigest {
    #[serde(rename = "type")]
    digest_type: String,
    keyslots: Vec<String>,
    segments: Vec<String>,
    hash: String,
    iterations: u32,
    salt: String,
    digest: String,
}

impl VolumeKeyDigest {
    fn is_strong(&self) -> bool {
        self.digest_type == "pbkdf2"
            && matches!(self.hash.as_str(), "sha256" | "sha512")
            && self.iterations >= MIN_PBKDF2_ITERATIONS
    }

    fn weakness(&self) -> PolicyViolation {
        PolicyViolation::Digest(format!("{} with {}", self.digest_type, self.hash))
    }
}

/// Rejects a header that requires what this crate does not know. Returns whether it requires a re-encryption.
fn check_requirements(metadata: &Value) -> Result<bool, PolicyViolation> {
    let Some(required) = metadata.get("config").and_then(|config| config.get("requirements")) else {
        return Ok(false);
    };
    // What a completed reencryption leaves may be an empty list.
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    if required.as_object().is_some_and(|fields| fields.values().all(is_empty)) {
        return Ok(false);
    }
    if reencryption::is_required(required) {
        return Ok(true);
    }
    let mandatory = required.get("mandatory").and_then(Value::as_array).into_iter().flatten();
    let mut names = mandatory.filter_map(Value::as_str);
    Err(if names.any(|name| name.starts_with("online-reencrypt") || name == "offline-reencrypt") {
        PolicyViolation::Reencryption(required.to_string())
    } else {
        PolicyViolation::Requirements(required.to_string())
    })
}

/// The flags of an opened volume that change only its speed.
///
/// *Source:* cryptsetup(8), `--persistent`; "LUKS2 On-Disk Format Specification", §3.6.
const HARMLESS_FLAGS: [&str; 4] =
    ["same-cpu-crypt", "submit-from-crypt-cpus", "no-read-workqueue", "no-write-workqueue"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    json_size: String,
    keyslots_size: String,
    #[serde(default)]
    flags: Vec<String>,
    /// Checked before.
    #[serde(rename = "requirements")]
    _requirements: Option<Value>,
}

impl Config {
    fn check(&self) -> Result<(), PolicyViolation> {
        if let Some(flag) = self.flags.iter().find(|flag| !HARMLESS_FLAGS.contains(&flag.as_str())) {
            return Err(PolicyViolation::Flag(flag.clone()));
        }
        // The metadata repeat the sizes of the binary header, and must agree with it.
        let areas = HEADER_AREA_BYTES - COPIES_BYTES as u64;
        if self.json_size != JSON_BYTES.to_string() || self.keyslots_size != areas.to_string() {
            let sizes = format!("areas of {} and {} bytes", self.json_size, self.keyslots_size);
            return Err(PolicyViolation::Metadata(sizes));
        }
        Ok(())
    }
}

/// Checks that no header makes a parser panic, and that an accepted one has no weaker cipher than ours: as the start of
/// a disk, and as the metadata of a correct header.
///
/// # Panics
/// If the check fails.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_luks_header(bytes: &[u8]) {
    let _ = LuksHeader::parse(bytes);
    let json: Vec<u8> = bytes.iter().copied().filter(|byte| *byte != 0).take(JSON_BYTES - 1).collect();
    let encoded = encode_header(Uuid([1; 16]), 1, &json);
    let header = LuksHeader::parse(&encoded).expect("a header is read back");
    assert_eq!(header.json, json, "the metadata are read back");
    let _ = read_volume_token(&header.json);
    let _ = reencryption::finish_metadata(&header.json);
    for encryption in [VolumeEncryption::Encrypted, VolumeEncryption::EncryptedAndAuthenticated] {
        if check_header(&header.json, encryption).is_ok() {
            let metadata: Value = serde_json::from_slice(&json).expect("an accepted header is JSON");
            let segment = &metadata["segments"]["0"];
            assert_eq!(segment["encryption"], CIPHER);
            let is_authenticated = segment.get("integrity").is_some_and(|integrity| !integrity.is_null());
            assert_eq!(is_authenticated, encryption == VolumeEncryption::EncryptedAndAuthenticated);
        }
    }
}

#[cfg(test)]
#[path = "policy_test.rs"]
mod tests;
