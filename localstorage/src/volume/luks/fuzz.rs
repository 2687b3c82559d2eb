//! Checks of the header's parsers over arbitrary input, for property tests and the fuzzer.

use serde_json::Value;

use super::super::uuid::Uuid;
use super::header::{JSON_BYTES, LuksHeader, encode_header};
use super::policy::{CIPHER, check_header, read_volume_token};
use super::token::VolumeEncryption;

/// Checks that no header makes a parser panic, and that an accepted one has no weaker cipher than ours: as the start of
/// a disk, and as the metadata of a correct header.
///
/// # Panics
/// If the check fails.
pub fn fuzz_luks_header(bytes: &[u8]) {
    let _ = LuksHeader::parse(bytes);
    let json: Vec<u8> = bytes.iter().copied().filter(|byte| *byte != 0).take(JSON_BYTES - 1).collect();
    let encoded = encode_header(Uuid([1; 16]), 1, &json);
    let header = LuksHeader::parse(&encoded).expect("a header is read back");
    assert_eq!(header.json, json, "the metadata are read back");
    let _ = read_volume_token(&header.json);
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
