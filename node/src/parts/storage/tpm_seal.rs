//! The seal of a TPM, as `[storage]` configures it.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::volume::{PcrPublicKey, PcrSignatures, SignedPcrs, TpmSeal};

use super::config::device::{SignerConfig, TpmConfig};
use super::error::{SignerError, StorageError};
use crate::error_chain::error_chain;

/// The most that is read of a file with a public key: more than any has.
const PUBLIC_KEY_LIMIT: u64 = 16 << 10;

/// The seal that keeps keys in this directory.
pub(super) fn new_tpm_seal(dir: Dir, config: &TpmConfig) -> Result<TpmSeal, StorageError> {
    let seal = TpmSeal::new(dir, config.pcrs);
    let seal = match &config.signature {
        Some(file) => seal.with_signature_file(file),
        None => seal,
    };
    Ok(match &config.signer {
        Some(signer) => seal.with_signed_pcrs(read_signer(signer)?),
        None => seal,
    })
}

/// Returns why a start with this configuration would not seal a key, or not open one, as far as the files tell.
pub(super) fn find_signer_problem(config: &TpmConfig) -> Option<String> {
    let signer = match read_signer(config.signer.as_ref()?) {
        Ok(signer) => signer,
        Err(error) => return Some(error_chain(&error)),
    };
    let files = config.signature.clone().map_or_else(PcrSignatures::default_files, |file| vec![file]);
    let checked = PcrSignatures::read_first(&files).and_then(|signatures| signatures.check_signer(&signer));
    checked.err().map(|error| format!("storage.tpm_signature: {}", error_chain(&error)))
}

fn read_signer(config: &SignerConfig) -> Result<SignedPcrs, StorageError> {
    let signer_error = |source| StorageError::Signer { path: config.public_key.clone(), source };
    let pem = read_public_key(&config.public_key).map_err(|error| signer_error(SignerError::Read(error)))?;
    let public_key =
        PcrPublicKey::from_pem(&pem).map_err(|error| signer_error(SignerError::Invalid(error)))?;
    Ok(SignedPcrs { public_key, pcrs: config.pcrs })
}

fn read_public_key(path: &Path) -> io::Result<Vec<u8>> {
    let mut pem = Vec::new();
    File::open(path)?.take(PUBLIC_KEY_LIMIT).read_to_end(&mut pem)?;
    Ok(pem)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use nodekeel_localstorage::volume::PcrSelection;

    use super::*;

    const TESTDATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../localstorage/testdata/tpm");

    fn problem(public_key: &Path, signature: &Path) -> Option<String> {
        let select = |number| PcrSelection::try_new([number]).expect("a PCR");
        let signer = SignerConfig { public_key: public_key.to_owned(), pcrs: select(11) };
        find_signer_problem(&TpmConfig {
            pcrs: select(7),
            signer: Some(signer),
            signature: Some(signature.to_owned()),
        })
    }

    #[test]
    fn a_signer_that_would_open_nothing_is_found_before_the_start() {
        let path = |name: &str| PathBuf::from(format!("{TESTDATA}/{name}"));
        let (key, signatures) = (path("signer.pem"), path("kernel-1.json"));
        assert_eq!(problem(&key, &signatures), None);
        for (key, signatures, says) in [
            (&path("no.pem"), &signatures, "storage.tpm_public_key: can't use "),
            (&signatures, &signatures, "is not a PEM file with an RSA public key"),
            (&key, &path("no.json"), "storage.tpm_signature: no signatures of PCRs: "),
            (&key, &key, "signer.pem has no signatures of PCRs as systemd-measure sign writes them"),
            (&path("other-signer.pem"), &signatures, "has no signature by the public key with fingerprint"),
        ] {
            let found = problem(key, signatures).expect("a problem");
            assert!(found.contains(says), "{found}");
        }
    }
}
