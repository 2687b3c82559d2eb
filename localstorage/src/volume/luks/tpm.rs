//! A node unlock key that a TPM 2.0 has sealed, for the values of chosen PCRs.
//!
//! ```text
//!  policy of the sealed key                                met at each start by
//!  TPM2_PolicyAuthorize of a key, if one is configured     PolicyPCR of its PCRs, whose digest that key has signed
//!  TPM2_PolicyPCR of the values of then                    the same values
//! ```
//!
//! The kernel's resource manager takes commands as bytes: eleven of them are written here ([`wire`]), so that no
//! program and no library in C comes with the node, and a secret leaves this process for the TPM alone. On the bus of
//! a discrete TPM it is not encrypted: to listen there, an attacker has to open the machine.

mod client;
mod error;
mod hex;
mod key_file;
mod pcr;
mod policy;
mod public_key;
mod response;
mod signatures;
mod wire;

use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::key::UnlockKey;
use super::seal::{KeySeal, SealError, SealId, remove_key_files, store_error};
use crate::dir::Dir;
use crate::metadata::FileMode;
use client::TpmClient;
use key_file::TpmKeyFile;

pub use client::TpmConnection;
#[cfg(any(test, feature = "testing"))]
pub use client::fuzz_tpm_response;
pub use error::TpmError;
#[cfg(any(test, feature = "testing"))]
pub use key_file::fuzz_tpm_key_file;
pub use pcr::{InvalidPcr, PcrSelection};
pub use public_key::{InvalidPublicKey, PcrPublicKey, SignedPcrs};
#[cfg(any(test, feature = "testing"))]
pub use signatures::fuzz_pcr_signatures;
pub use signatures::{PcrSignatureError, PcrSignatures};

/// The kernel's resource manager: each open file has its own objects and sessions.
const TPM_DEVICE: &str = "/dev/tpmrm0";
/// A file with all 24 PCRs, and a signer of 4096 bits, has 4,300 bytes.
const FILE_LIMIT: u64 = 8192;
/// The private part was not written by this TPM. *Source:* TPM 2.0 Library, part 2, 6.6.3, `TPM_RC_INTEGRITY`.
const WRONG_INTEGRITY: u32 = 0x9f;

type Connector = Box<dyn Fn() -> io::Result<Box<dyn TpmConnection>> + Send + Sync>;

/// Node unlock keys that only this machine's TPM 2.0 unseals, and only while the selected PCRs have the values that
/// they had when the key was sealed.
///
/// Each key is a text file `ID.tpm` in the directory, usually on the EFI system partition, next to those of a
/// [`FileSeal`](super::FileSeal); the file has no secret.
///
/// To seal a key for other values or other PCRs, open the volume, with the recovery passphrase if the TPM refuses, and
/// [rotate its keys](super::LuksVolume::rotate_keys): the next generation is sealed for the PCRs that are selected
/// and the values that they have then. Before a planned change, such as an update of the firmware, rotate once with
/// an empty selection, and after it with the usual one: no passphrase is needed then.
///
/// PCRs that each upgrade of the kernel changes are better [signed](Self::with_signed_pcrs): a key opens then with every
/// kernel whose values the owner of a key has signed.
pub struct TpmSeal {
    dir: Dir,
    pcrs: PcrSelection,
    signed: Option<SignedPcrs>,
    signature_files: Vec<PathBuf>,
    connect: Connector,
}

impl fmt::Debug for TpmSeal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("TpmSeal");
        fields.field("dir", &self.dir).field("pcrs", &self.pcrs).field("signed", &self.signed);
        fields.finish_non_exhaustive()
    }
}

impl TpmSeal {
    /// Keeps keys in this directory, sealed by the TPM at `/dev/tpmrm0` for the values of these PCRs.
    pub fn new(dir: Dir, pcrs: PcrSelection) -> TpmSeal {
        let connect = device_connector(Path::new(TPM_DEVICE));
        TpmSeal { dir, pcrs, signed: None, signature_files: PcrSignatures::default_files(), connect }
    }

    /// Seals keys also for values of PCRs that a key signs. A key is not sealed under a system that is not signed: it would
    /// not open.
    ///
    /// Each sealed key keeps its signer: with another one, [rotate](super::LuksVolume::rotate_keys).
    pub fn with_signed_pcrs(self, signed: SignedPcrs) -> TpmSeal {
        TpmSeal { signed: Some(signed), ..self }
    }

    /// Reads the signatures from this file. Default: `/run/systemd/tpm2-pcr-signature.json`, or, if that is not there,
    /// `/.extra/tpm2-pcr-signature.json`.
    pub fn with_signature_file(self, path: impl Into<PathBuf>) -> TpmSeal {
        TpmSeal { signature_files: vec![path.into()], ..self }
    }

    /// Uses the TPM of another device, such as `/dev/tpmrm1`.
    pub fn with_device(self, path: impl Into<PathBuf>) -> TpmSeal {
        TpmSeal { connect: device_connector(&path.into()), ..self }
    }

    /// Uses a TPM that is reached in another way. Each operation opens one connection.
    pub fn with_connector<C: TpmConnection + 'static>(
        self,
        connect: impl Fn() -> io::Result<C> + Send + Sync + 'static,
    ) -> TpmSeal {
        let connect = move || -> io::Result<Box<dyn TpmConnection>> { Ok(Box::new(connect()?)) };
        TpmSeal { connect: Box::new(connect), ..self }
    }

    fn read_signatures(&self) -> Result<PcrSignatures, TpmError> {
        PcrSignatures::read_first(&self.signature_files).map_err(TpmError::Signature)
    }

    fn connect(&self) -> Result<TpmClient, TpmError> {
        (self.connect)().map(TpmClient::new).map_err(|error| match error.kind() {
            // The kernel creates the device of a resource manager only for a TPM 2.0 that it has found.
            io::ErrorKind::NotFound => TpmError::Absent(error),
            _ => TpmError::Connection(error),
        })
    }
}

fn device_connector(path: &Path) -> Connector {
    let path = path.to_owned();
    let connect = move || -> io::Result<Box<dyn TpmConnection>> {
        Ok(Box::new(File::options().read(true).write(true).open(&path)?))
    };
    Box::new(connect)
}

impl KeySeal for TpmSeal {
    fn seal_key(&self, id: SealId, key: &UnlockKey) -> Result<(), SealError> {
        let sealed = self.connect().and_then(|mut tpm| {
            let file = tpm.seal(id, key.expose_bytes(), self.pcrs, self.signed.clone())?;
            // The TPM seals for any key. Without a signature for this system, the next start would be locked.
            if file.signed.is_some() {
                tpm.unseal(&file, &|| self.read_signatures())?;
            }
            Ok(file)
        });
        let file = sealed.map_err(|source| SealError::Tpm { id, source })?;
        let text = file.to_text();
        self.dir.write(file_name(id), text.as_bytes(), FileMode::PRIVATE_FILE).map_err(store_error(id))
    }

    fn unseal_key(&self, id: SealId) -> Result<Option<UnlockKey>, SealError> {
        let content = match self.dir.read_at_most(file_name(id), FILE_LIMIT) {
            Ok(content) => content,
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(store_error(id)(error)),
        };
        let file = TpmKeyFile::parse(id, &content).ok_or(SealError::Damaged { id })?;
        let unsealed = self.connect().and_then(|mut tpm| tpm.unseal(&file, &|| self.read_signatures()));
        let bytes = unsealed.map_err(|source| match source.is_format_one(WRONG_INTEGRITY) {
            true => SealError::Damaged { id },
            false => SealError::Tpm { id, source },
        })?;
        UnlockKey::from_bytes(&bytes).map(Some).map_err(|_| SealError::Damaged { id })
    }

    fn remove_key(&self, id: SealId) -> Result<(), SealError> {
        remove_key_files(&self.dir, id)
    }
}

pub(super) fn file_name(id: SealId) -> String {
    format!("{id}.tpm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_tpm_absent_keys_are_absent_and_others_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let seal = TpmSeal::new(Dir::open(directory.path()).unwrap(), PcrSelection::default())
            .with_device(directory.path().join("tpmrm0"));
        let id = SealId::new([1; 16], 1);
        assert!(seal.unseal_key(id).unwrap().is_none());
        let refused = seal.seal_key(id, &UnlockKey::generate().unwrap()).unwrap_err();
        assert!(matches!(refused, SealError::Tpm { source: TpmError::Absent(_), .. }), "{refused:?}");
        assert!(seal.unseal_key(id).unwrap().is_none(), "nothing was written");
    }
}
