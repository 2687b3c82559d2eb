//! The file of a sealed key.

use std::fmt::Write as _;

use super::super::seal::SealId;
use super::hex::{from_hex, to_hex};
use super::pcr::{DIGEST_BYTES, PcrSelection, PcrValues};
use super::policy::PolicyDigest;
use super::public_key::{PcrPublicKey, SignedPcrs};

const FILE_HEADER: &str = "nodekeel node unlock key, sealed by a TPM 2.0, format 1";
/// With PCRs whose values a key signs. A release that knows format 1 alone would take the key for one without them.
const SIGNED_FILE_HEADER: &str = "nodekeel node unlock key, sealed by a TPM 2.0, format 2";

/// A key that a TPM has sealed. It is worth nothing without the TPM, and contains no secret.
///
/// As text: what it is, the name of the storage key, a line for each PCR with its value, in format 2 one for each PCR whose
/// values are signed and one with the key that signs, the public and the private part, all in hexadecimal digits, and a checksum
/// of its identifier and all of that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TpmKeyFile {
    pub(super) id: SealId,
    /// The name of the storage key, which tells whether this TPM has sealed it.
    pub(super) parent: Vec<u8>,
    /// The values when it was sealed.
    pub(super) pcrs: PcrValues,
    pub(super) signed: Option<SignedPcrs>,
    pub(super) public: Vec<u8>,
    /// Encrypted by the TPM.
    pub(super) private: Vec<u8>,
}

impl TpmKeyFile {
    /// The policy of the sealed object, in the order in which a session meets it.
    pub(super) fn policy(&self) -> PolicyDigest {
        let authorized =
            self.signed.as_ref().map(|signed| PolicyDigest::authorized_by(&signed.public_key.name()));
        authorized.unwrap_or_default().with_pcrs(&self.pcrs)
    }

    pub(super) fn to_text(&self) -> String {
        let header = if self.signed.is_some() { SIGNED_FILE_HEADER } else { FILE_HEADER };
        let mut text = format!("{header}\nstorage-key {}\n", to_hex(&self.parent));
        for (number, value) in &self.pcrs.0 {
            // Writing to a string never fails.
            let _ = writeln!(text, "pcr {number} {}", to_hex(value));
        }
        if let Some(signed) = &self.signed {
            for number in signed.pcrs.numbers() {
                let _ = writeln!(text, "signed-pcr {number}");
            }
            let _ = writeln!(text, "signer {}", to_hex(signed.public_key.as_der()));
        }
        let _ = writeln!(text, "public {}\nprivate {}", to_hex(&self.public), to_hex(&self.private));
        let sum = crc32c::crc32c_append(crc32c::crc32c(self.id.to_string().as_bytes()), text.as_bytes());
        let _ = writeln!(text, "checksum {sum:08x}");
        text
    }

    /// Reads the file of a key; none if it is damaged, or that of another key.
    pub(super) fn parse(id: SealId, content: &[u8]) -> Option<TpmKeyFile> {
        let text = std::str::from_utf8(content).ok()?;
        let mut file = TpmKeyFile {
            id,
            parent: Vec::new(),
            pcrs: PcrValues::default(),
            signed: None,
            public: Vec::new(),
            private: Vec::new(),
        };
        let (mut signed_pcrs, mut signer) = (Vec::new(), None);
        for line in text.lines() {
            let mut words = line.split(' ');
            match (words.next()?, words.next(), words.next()) {
                ("storage-key", Some(hex), None) => file.parent = from_hex(hex)?,
                ("pcr", Some(number), Some(hex)) => {
                    // A selection has 24 bits: a larger number would not be part of it.
                    let number = number.parse().ok().filter(|number| *number < 24)?;
                    let value: [u8; DIGEST_BYTES] = from_hex(hex)?.try_into().ok()?;
                    file.pcrs.0.insert(number, value);
                }
                ("signed-pcr", Some(number), None) => signed_pcrs.push(number.parse().ok()?),
                ("signer", Some(hex), None) => signer = Some(PcrPublicKey::from_der(&from_hex(hex)?)?),
                ("public", Some(hex), None) => file.public = from_hex(hex)?,
                ("private", Some(hex), None) => file.private = from_hex(hex)?,
                _ => {}
            }
        }
        let pcrs = PcrSelection::try_new(signed_pcrs).ok()?;
        file.signed = signer.map(|public_key| SignedPcrs { public_key, pcrs });
        // Any difference from the written text is damage.
        (file.to_text() == text).then_some(file)
    }
}

/// Checks that no file of a sealed key makes the parser panic, and that an accepted one is written back unchanged.
///
/// # Panics
/// If the check fails.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_tpm_key_file(bytes: &[u8]) {
    let id = SealId::new([1; 16], 1);
    if let Some(file) = TpmKeyFile::parse(id, bytes) {
        assert_eq!(file.to_text().as_bytes(), bytes, "a key file is written back unchanged");
        let _ = (file.policy(), file.pcrs.selection().to_string());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn example() -> TpmKeyFile {
        TpmKeyFile {
            id: SealId::new([1; 16], 1),
            parent: vec![0, 11, 7],
            pcrs: PcrValues([(7, [7; 32]), (11, [11; 32])].into()),
            signed: None,
            public: vec![1, 2],
            private: vec![3, 4],
        }
    }

    /// With PCRs whose values a key signs.
    fn signed_example() -> TpmKeyFile {
        let signer = include_bytes!("../../../../testdata/tpm/signer.pem");
        let public_key = PcrPublicKey::from_pem(signer).unwrap();
        let signed = SignedPcrs { public_key, pcrs: PcrSelection::try_new([11, 12]).unwrap() };
        TpmKeyFile { id: SealId::new([1; 16], 2), signed: Some(signed), ..example() }
    }

    #[test]
    fn a_key_file_that_is_changed_anywhere_is_damaged() {
        for file in [example(), signed_example()] {
            let text = file.to_text().into_bytes();
            assert_eq!(TpmKeyFile::parse(file.id, &text), Some(file.clone()));
            assert_eq!(
                TpmKeyFile::parse(SealId::new([1; 16], 3), &text),
                None,
                "the key of another generation"
            );
            for at in 0..text.len() {
                assert_eq!(TpmKeyFile::parse(file.id, &text[..at]), None, "cut at {at}");
                let mut changed = text.clone();
                changed[at] ^= 1;
                assert_eq!(TpmKeyFile::parse(file.id, &changed), None, "changed at {at}");
            }
        }
    }

    #[test]
    fn files_of_this_release_stay_readable() {
        let golden = [
            (
                example(),
                include_str!("../../../../testdata/golden/tpm/01010101-0101-0101-0101-010101010101.1.tpm"),
            ),
            (
                signed_example(),
                include_str!("../../../../testdata/golden/tpm/01010101-0101-0101-0101-010101010101.2.tpm"),
            ),
        ];
        for (file, text) in golden {
            assert_eq!(TpmKeyFile::parse(file.id, text.as_bytes()), Some(file));
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_key_file_or_damage(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
            fuzz_tpm_key_file(&bytes);
            fuzz_tpm_key_file(&[FILE_HEADER.as_bytes(), b"\n", &bytes].concat());
        }
    }
}
