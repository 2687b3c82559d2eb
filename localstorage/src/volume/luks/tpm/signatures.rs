//! Files with signatures of PCR values, which come with each kernel.
//!
//! *Source:* systemd-measure(1), and `tpm2_policy_signature` in systemd's `tpm2-util.c`: an object with a list for each bank,
//! here that of SHA-256, whose entries have the numbers of the PCRs (`pcrs`), the fingerprint of the key (`pkfp`), the digest of
//! the policy (`pol`), both as hexadecimal digits, and in base64 the signature of that digest (`sig`).

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;

use super::hex::from_hex;
use super::pcr::PcrSelection;
use super::policy::PolicyDigest;
use super::public_key::SignedPcrs;

/// Where systemd keeps the signatures of the booted kernel, and where its stub leaves them in the initrd.
///
/// *Source:* systemd-stub(7), systemd-cryptsetup(8).
const DEFAULT_FILES: [&str; 2] = ["/run/systemd/tpm2-pcr-signature.json", "/.extra/tpm2-pcr-signature.json"];
/// A file with the signatures of four phases of the boot in four banks has 12,000 bytes.
const FILE_LIMIT: u64 = 1 << 20;

/// The signatures in a file, each of the values that some PCRs have under one kernel, in one phase of its boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcrSignatures {
    path: PathBuf,
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    pcrs: PcrSelection,
    fingerprint: String,
    policy: PolicyDigest,
    signature: Vec<u8>,
}

/// There is no signature for the PCRs' values.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PcrSignatureError {
    /// No file with signatures is there.
    #[error(
        "no signatures of PCRs: {paths} is not there; boot a signed kernel, or open the volume with the recovery passphrase"
    )]
    NoFile {
        /// The paths.
        paths: String,
    },
    /// The file could not be read.
    #[error("can't read the signatures of PCRs in {}", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The file has something else.
    #[error(
        "{} has no signatures of PCRs as systemd-measure sign writes them, {reason}: boot a signed kernel, or open the volume with \
         the recovery passphrase",
        path.display()
    )]
    Invalid {
        /// The path.
        path: PathBuf,
        /// The place and the cause.
        reason: String,
    },
    /// All signatures are by other keys.
    #[error(
        "{} has no signature by the public key with fingerprint {fingerprint}: boot a kernel that this key has signed, or open the \
         volume with the recovery passphrase",
        path.display()
    )]
    OtherKey {
        /// The path.
        path: PathBuf,
        /// The SHA-256 of the key.
        fingerprint: String,
    },
    /// The booted kernel is not one that was signed, or not in this phase of its boot.
    #[error(
        "{} has no signature for the present values of PCRs {pcrs}: boot the signed kernel, or open the volume with the recovery \
         passphrase",
        path.display()
    )]
    NotSigned {
        /// The path.
        path: PathBuf,
        /// The PCRs.
        pcrs: PcrSelection,
    },
    /// The signature for the present values is not by the key that it names.
    #[error(
        "the signature for the present values of PCRs {pcrs} in {} is not by the public key with fingerprint {fingerprint}: find \
         out who wrote it, or open the volume with the recovery passphrase",
        path.display()
    )]
    Forged {
        /// The path.
        path: PathBuf,
        /// The PCRs.
        pcrs: PcrSelection,
        /// The SHA-256 of the key.
        fingerprint: String,
    },
}

impl PcrSignatures {
    /// The places of the signatures of the booted kernel, as systemd has them, of which the first counts that is there:
    /// `/run/systemd/tpm2-pcr-signature.json` and `/.extra/tpm2-pcr-signature.json`.
    pub fn default_files() -> Vec<PathBuf> {
        DEFAULT_FILES.map(PathBuf::from).into()
    }

    /// Reads the first of these files that is there, of at most 1 MiB.
    ///
    /// # Errors
    /// [`PcrSignatureError::NoFile`], [`PcrSignatureError::Read`], [`PcrSignatureError::Invalid`].
    pub fn read_first(paths: &[PathBuf]) -> Result<PcrSignatures, PcrSignatureError> {
        for path in paths {
            let mut content = Vec::new();
            match File::open(path).and_then(|file| file.take(FILE_LIMIT + 1).read_to_end(&mut content)) {
                Ok(_) => return Self::parse(path, &content),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(PcrSignatureError::Read { path: path.clone(), source }),
            }
        }
        let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        Err(PcrSignatureError::NoFile { paths: paths.join(" or ") })
    }

    fn parse(path: &Path, content: &[u8]) -> Result<PcrSignatures, PcrSignatureError> {
        let invalid = |reason: String| PcrSignatureError::Invalid { path: path.to_owned(), reason };
        if content.len() as u64 > FILE_LIMIT {
            return Err(invalid(format!("but more than {FILE_LIMIT} bytes")));
        }
        let file: SignatureFile =
            serde_json::from_slice(content).map_err(|error| invalid(error.to_string()))?;
        let entries = file.sha256.into_iter().enumerate().map(|(index, entry)| {
            entry.decode().ok_or_else(|| invalid(format!("entry {index} of \"sha256\" can't be decoded")))
        });
        Ok(PcrSignatures { path: path.to_owned(), entries: entries.collect::<Result<_, _>>()? })
    }

    /// Checks that a signature of these PCRs, with any values, names the key as its own.
    ///
    /// # Errors
    /// [`PcrSignatureError::OtherKey`].
    pub fn check_signer(&self, signed: &SignedPcrs) -> Result<(), PcrSignatureError> {
        self.of(signed).next().map(|_| ()).ok_or_else(|| PcrSignatureError::OtherKey {
            path: self.path.clone(),
            fingerprint: signed.public_key.fingerprint(),
        })
    }

    /// The signature of a policy. The TPM verifies it: only then it counts.
    pub(super) fn find(&self, signed: &SignedPcrs, policy: PolicyDigest) -> Result<&[u8], PcrSignatureError> {
        self.check_signer(signed)?;
        let entry = self.of(signed).find(|entry| entry.policy == policy);
        let entry = entry
            .ok_or_else(|| PcrSignatureError::NotSigned { path: self.path.clone(), pcrs: signed.pcrs })?;
        // One of another size is no number below the modulus, which the TPM would reject in another way.
        match entry.signature.len() == signed.public_key.signature_bytes() {
            true => Ok(&entry.signature),
            false => Err(self.forged(signed)),
        }
    }

    pub(super) fn forged(&self, signed: &SignedPcrs) -> PcrSignatureError {
        let fingerprint = signed.public_key.fingerprint();
        PcrSignatureError::Forged { path: self.path.clone(), pcrs: signed.pcrs, fingerprint }
    }

    fn of(&self, signed: &SignedPcrs) -> impl Iterator<Item = &Entry> {
        let (pcrs, fingerprint) = (signed.pcrs, signed.public_key.fingerprint());
        self.entries.iter().filter(move |entry| entry.pcrs == pcrs && entry.fingerprint == fingerprint)
    }
}

/// Other banks, and other fields, are those of other programs or of later releases of systemd: the signature alone counts.
#[derive(Deserialize)]
struct SignatureFile {
    #[serde(default)]
    sha256: Vec<EncodedEntry>,
}

#[derive(Deserialize)]
struct EncodedEntry {
    pcrs: Vec<u32>,
    pkfp: String,
    pol: String,
    sig: String,
}

impl EncodedEntry {
    fn decode(self) -> Option<Entry> {
        Some(Entry {
            pcrs: PcrSelection::try_new(self.pcrs).ok()?,
            fingerprint: self.pkfp.to_ascii_lowercase(),
            policy: PolicyDigest(from_hex(&self.pol)?.try_into().ok()?),
            signature: BASE64_STANDARD.decode(self.sig).ok()?,
        })
    }
}

/// Checks that neither a file with signatures nor one with a public key makes its parser panic.
///
/// # Panics
/// If the check fails.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_pcr_signatures(bytes: &[u8]) {
    super::public_key::fuzz_public_key(bytes);
    // A key of 2048 bits.
    let der = [&[0x30, 0x82, 1, 10, 2, 0x82, 1, 1, 0][..], &[0xff; 256], &[2, 3, 1, 0, 1]].concat();
    let public_key = super::PcrPublicKey::from_der(&der).expect("it is a key");
    if let Ok(signatures) = PcrSignatures::parse(Path::new("signatures"), bytes) {
        for entry in &signatures.entries {
            let signed = SignedPcrs { public_key: public_key.clone(), pcrs: entry.pcrs };
            if let Ok(signature) = signatures.find(&signed, entry.policy) {
                assert_eq!(signature.len(), public_key.signature_bytes(), "a command has room for it");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::pcr::PcrValues;
    use super::super::public_key::PcrPublicKey;
    use super::*;

    const KERNEL: &str = include_str!("../../../../testdata/tpm/kernel-1.json");

    fn signed(pcr: u32) -> SignedPcrs {
        let public_key =
            PcrPublicKey::from_pem(include_bytes!("../../../../testdata/tpm/signer.pem")).unwrap();
        SignedPcrs { public_key, pcrs: PcrSelection::try_new([pcr]).unwrap() }
    }

    fn parse(text: &str) -> Result<PcrSignatures, PcrSignatureError> {
        PcrSignatures::parse(Path::new("signatures"), text.as_bytes())
    }

    // *Source:* systemd-measure of systemd 252, which has made the file and calculates this value of PCR 11.
    #[test]
    fn the_signature_of_present_values_is_found_as_systemd_writes_it() {
        let value = from_hex("501eb5e855e09779579ea9fff345ff2b88d046f09e22de79e402dddb592b63db").unwrap();
        let policy = |number| {
            let values = PcrValues([(number, value.clone().try_into().unwrap())].into());
            PolicyDigest::default().with_pcrs(&values)
        };
        let signatures = parse(KERNEL).unwrap();
        assert_eq!(signatures.find(&signed(11), policy(11)).unwrap().len(), 256);
        let error = signatures.find(&signed(11), PolicyDigest::default()).unwrap_err();
        assert!(
            error.to_string().starts_with("signatures has no signature for the present values of PCRs 11")
        );
        // That of other PCRs is none.
        let other = signatures.find(&signed(12), policy(12));
        assert!(matches!(other, Err(PcrSignatureError::OtherKey { .. })), "{other:?}");
        let other = parse(include_str!("../../../../testdata/tpm/kernel-2-other-signer.json")).unwrap();
        let error = other.find(&signed(11), policy(11)).unwrap_err();
        assert!(
            error.to_string().contains("no signature by the public key with fingerprint a1cea00b"),
            "{error}"
        );
    }

    #[test]
    fn a_file_that_is_no_list_of_signatures_says_where() {
        let entry = |key: &str, value: &str| {
            let fields = [("pcrs", "[11]"), ("pkfp", "\"aa\""), ("pol", "\"aa\""), ("sig", "\"aa==\"")];
            let fields =
                fields.map(|(name, text)| format!("{name:?}: {}", if name == key { value } else { text }));
            format!("{{\"sha256\": [{{{}}}]}}", fields.join(", "))
        };
        let large = " ".repeat(1 << 20) + KERNEL;
        for (text, says) in [
            (&KERNEL[..100], "EOF while parsing"),
            ("", "EOF while parsing"),
            ("{\"sha256\": [{\"pcrs\": [11]}]}", "missing field `pkfp`"),
            (&entry("pcrs", "[99]"), "entry 0 of \"sha256\""),
            (&entry("pol", "\"aaa\""), "entry 0 of \"sha256\""),
            (&entry("sig", "\"%\""), "entry 0 of \"sha256\""),
            (&large, "more than 1048576 bytes"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains("recovery passphrase"), "{error}");
        }
        assert!(parse("{\"sha384\": 1}").unwrap().entries.is_empty());
    }

    proptest! {
        #[test]
        fn any_text_is_a_list_of_signatures_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..128), at in 0..2000_usize) {
            fuzz_pcr_signatures(&bytes);
            let mut changed = KERNEL.as_bytes().to_vec();
            changed.splice(at..at + bytes.len().min(100), bytes);
            fuzz_pcr_signatures(&changed);
        }
    }
}
