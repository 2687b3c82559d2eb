//! The commands of this crate to a TPM: its storage key, the values of PCRs, to seal, and to unseal.

use std::io::{self, Read, Write};

use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use super::super::seal::SealId;
use super::error::TpmError;
use super::key_file::TpmKeyFile;
use super::pcr::{DIGEST_BYTES, PcrSelection, PcrValues};
use super::policy::PolicyDigest;
use super::public_key::SignedPcrs;
use super::response::parse_response;
use super::signatures::PcrSignatures;
use super::wire::{self, ALG_SHA256, HEADER_BYTES, ResponseReader, TpmCommand, object_name};

/// The largest response. *Source:* Linux `tpm.h`, `TPM_BUFSIZE`.
const RESPONSE_BYTES: usize = 4096;

/// Format-one reasons of a response code. *Source:* TPM 2.0 Library, part 2, 6.6.3.
const WRONG_PASSWORD: [u32; 2] = [0x8e, 0xa2];
const WRONG_SIGNATURE: u32 = 0x9b;
/// The most attempts to unseal while PCRs are extended: systemd extends PCR 11 a few times while the system starts.
const UNSEAL_ATTEMPTS: u32 = 8;

/// A connection to a TPM 2.0: what is written at once is a command, and what is read then its response, as from
/// `/dev/tpmrm0`. Objects and sessions end with the connection.
pub trait TpmConnection: Read + Write {}

impl<T: Read + Write> TpmConnection for T {}

/// Reads the signatures that come with the present system.
pub(super) type SignatureReader<'a> = dyn Fn() -> Result<PcrSignatures, TpmError> + 'a;

pub(super) struct TpmClient(Box<dyn TpmConnection>);

impl TpmClient {
    pub(super) fn new(connection: Box<dyn TpmConnection>) -> TpmClient {
        TpmClient(connection)
    }

    /// Seals data for the values that these PCRs have now, and for those that a key signs.
    pub(super) fn seal(
        &mut self,
        id: SealId,
        data: &[u8],
        pcrs: PcrSelection,
        signed: Option<SignedPcrs>,
    ) -> Result<TpmKeyFile, TpmError> {
        // The policy of the sealed object is a digest of the present values.
        let pcrs = self.read_pcrs(pcrs)?;
        self.with_storage_key(|client, storage_key, parent| {
            let (public, private) = (Vec::new(), Vec::new());
            let mut file = TpmKeyFile { id, parent, pcrs, signed, public, private };
            let command = wire::create_sealed(storage_key, data, &file.policy().0);
            let (_, response) = client.run(&command)?;
            let mut reader = ResponseReader::new(&response);
            let parts = reader.sized().zip(reader.sized());
            let (private, public) = parts.ok_or(TpmError::InvalidResponse { command: "TPM2_Create" })?;
            (file.public, file.private) = (public.to_vec(), private.to_vec());
            Ok(file)
        })
    }

    /// Unseals what [`seal`](Self::seal) has sealed. `signatures` reads those of the present system, if the key needs one.
    pub(super) fn unseal(
        &mut self,
        file: &TpmKeyFile,
        signatures: &SignatureReader<'_>,
    ) -> Result<Zeroizing<Vec<u8>>, TpmError> {
        for _ in 1..UNSEAL_ATTEMPTS {
            match self.unseal_once(file, signatures) {
                // The next attempt reads the values anew.
                Err(error) if error.is_race_with_pcrs() => {}
                done => return done,
            }
        }
        self.unseal_once(file, signatures)
    }

    fn unseal_once(
        &mut self,
        file: &TpmKeyFile,
        signatures: &SignatureReader<'_>,
    ) -> Result<Zeroizing<Vec<u8>>, TpmError> {
        self.with_storage_key(|client, storage_key, parent| {
            // Another TPM derives another storage key. TPM2_Load would fail as well, but without this reason.
            if parent != file.parent {
                return Err(TpmError::OtherTpm);
            }
            // The TPM would refuse as well, but without the numbers of the PCRs that have changed.
            let changed = file.pcrs.changes_to(&client.read_pcrs(file.pcrs.selection())?);
            if !changed.is_empty() {
                return Err(TpmError::PcrsChanged { changed });
            }
            let (object, _) = client.run(&wire::load(storage_key, &file.private, &file.public))?;
            let unsealed = client.unseal_loaded(object, file, signatures);
            // Also after an error: a TPM has room for a few objects only.
            client.flush(object);
            unsealed
        })
    }

    fn unseal_loaded(
        &mut self,
        object: u32,
        file: &TpmKeyFile,
        signatures: &SignatureReader<'_>,
    ) -> Result<Zeroizing<Vec<u8>>, TpmError> {
        let mut nonce = [0; 16];
        getrandom(&mut nonce, GetRandomFlags::empty()).map_err(|error| TpmError::Connection(error.into()))?;
        let (session, _) = self.run(&wire::start_policy_session(&nonce))?;
        let unsealed = self
            .meet_policy(session, file, signatures)
            .and_then(|()| self.run(&wire::unseal(object, session)));
        if unsealed.is_err() {
            // A successful command has ended it.
            self.flush(session);
        }
        let (_, response) = unsealed?;
        let data = ResponseReader::new(&response).sized().map(|data| Zeroizing::new(data.to_vec()));
        data.ok_or(TpmError::InvalidResponse { command: "TPM2_Unseal" })
    }

    /// Runs the commands of the file's [policy](TpmKeyFile::policy), in their order.
    fn meet_policy(
        &mut self,
        session: u32,
        file: &TpmKeyFile,
        signatures: &SignatureReader<'_>,
    ) -> Result<(), TpmError> {
        if let Some(signed) = &file.signed {
            self.authorize_pcrs(session, signed, &signatures()?)?;
        }
        self.policy_pcr(session, &file.pcrs)
    }

    /// Has the TPM check that the key has signed the present values of its PCRs.
    fn authorize_pcrs(
        &mut self,
        session: u32,
        signed: &SignedPcrs,
        signatures: &PcrSignatures,
    ) -> Result<(), TpmError> {
        let values = self.read_pcrs(signed.pcrs)?;
        let policy = PolicyDigest::default().with_pcrs(&values);
        let signature = signatures.find(signed, policy).map_err(TpmError::Signature)?;
        let (key, _) = self.run(&wire::load_external(&signed.public_key.public_area()))?;
        // The signature is of the policy, and of the reference to it, which is empty.
        let verified = self.run(&wire::verify_signature(key, &Sha256::digest(policy.0), signature));
        self.flush(key);
        let (_, ticket) = verified.map_err(|error| match error.is_format_one(WRONG_SIGNATURE) {
            true => TpmError::Signature(signatures.forged(signed)),
            false => error,
        })?;
        self.policy_pcr(session, &values)?;
        let name = signed.public_key.name();
        self.run(&wire::policy_authorize(session, &policy.0, &name, &ticket)).map(|_| ())
    }

    fn policy_pcr(&mut self, session: u32, values: &PcrValues) -> Result<(), TpmError> {
        let command = wire::policy_pcr(session, &values.digest(), &values.selection().to_wire());
        self.run(&command).map(|_| ())
    }

    /// Runs `work` with the handle and the name of the storage key.
    fn with_storage_key<R>(
        &mut self,
        work: impl FnOnce(&mut TpmClient, u32, Vec<u8>) -> Result<R, TpmError>,
    ) -> Result<R, TpmError> {
        let created = self.run(&wire::create_primary()).map_err(|error| {
            let is_password = WRONG_PASSWORD.iter().any(|reason| error.is_format_one(*reason));
            if is_password { TpmError::OwnerPassword } else { error }
        });
        let (storage_key, response) = created?;
        let name = ResponseReader::new(&response).sized().map(object_name);
        let done = name
            .ok_or(TpmError::InvalidResponse { command: "TPM2_CreatePrimary" })
            .and_then(|name| work(self, storage_key, name));
        self.flush(storage_key);
        done
    }

    /// A response has at most eight values.
    fn read_pcrs(&mut self, selection: PcrSelection) -> Result<PcrValues, TpmError> {
        let mut values = PcrValues::default();
        loop {
            let missing = selection.without(values.selection());
            if missing.is_empty() {
                return Ok(values);
            }
            let (_, response) = self.run(&wire::read_pcrs(&missing.to_wire()))?;
            let read = parse_pcr_values(&response);
            let read = read.ok_or(TpmError::InvalidResponse { command: "TPM2_PCR_Read" })?;
            // An answer without a missing value would repeat this loop forever.
            if read.selection().without(missing) != PcrSelection::default() || read.0.is_empty() {
                return Err(TpmError::NoPcrs { missing });
            }
            values.0.extend(read.0);
        }
    }

    /// Frees memory of a TPM without a resource manager; with one, the end of the connection does.
    fn flush(&mut self, handle: u32) {
        let _ = self.run(&wire::flush_context(handle));
    }

    fn run(&mut self, command: &TpmCommand) -> Result<(u32, Zeroizing<Vec<u8>>), TpmError> {
        let response = self.transmit(&command.to_bytes()).map_err(TpmError::Connection)?;
        let (handle, parameters) = parse_response(command.code, &response)?;
        Ok((handle, Zeroizing::new(parameters.rest().to_vec())))
    }

    fn transmit(&mut self, command: &[u8]) -> io::Result<Zeroizing<Vec<u8>>> {
        self.0.write_all(command)?;
        let mut buffer = Zeroizing::new(vec![0; RESPONSE_BYTES]);
        let (mut read, mut wanted) = (0, HEADER_BYTES);
        while read < wanted {
            match self.0.read(&mut buffer[read..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => read += count,
            }
            let length = wire::response_length(&buffer[..read]).unwrap_or(HEADER_BYTES);
            // The device names this length: it must neither end the read early nor exceed the buffer.
            wanted = length.clamp(HEADER_BYTES, RESPONSE_BYTES);
        }
        buffer.truncate(read);
        Ok(buffer)
    }
}

/// The counter of updates, the selection of what follows, and the digests.
fn parse_pcr_values(response: &[u8]) -> Option<PcrValues> {
    let mut reader = ResponseReader::new(response);
    reader.u32()?;
    let mut selection = PcrSelection::default();
    for _ in 0..reader.u32()? {
        let algorithm = reader.u16()?;
        let length = reader.bytes(1)?[0];
        let bitmap = reader.bytes(length.into())?;
        if algorithm == ALG_SHA256 {
            selection = PcrSelection::from_bitmap(bitmap);
        }
    }
    let count = usize::try_from(reader.u32()?).ok()?;
    if selection.numbers().count() != count {
        return None;
    }
    let mut values = PcrValues::default();
    for number in selection.numbers() {
        let value: [u8; DIGEST_BYTES] = reader.sized()?.try_into().ok()?;
        values.0.insert(number, value);
    }
    Some(values)
}

/// Checks that no response of a TPM makes a parser panic.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_tpm_response(bytes: &[u8]) {
    for code in [wire::CC_CREATE_PRIMARY, wire::CC_CREATE, wire::CC_PCR_READ, wire::CC_UNSEAL] {
        if let Ok((_, parameters)) = parse_response(code, bytes) {
            let _ = parse_pcr_values(parameters.rest());
            let mut reader = parameters;
            let _ = (reader.sized().map(object_name), reader.sized());
        }
    }
    let _ = parse_pcr_values(bytes);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A TPM that gives these bytes, some at a time.
    struct Script(Vec<u8>, usize);

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Read for Script {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.1.min(self.0.len()).min(buffer.len());
            buffer[..count].copy_from_slice(&self.0[..count]);
            self.0.drain(..count);
            Ok(count)
        }
    }

    #[test]
    fn a_response_may_come_in_parts_and_its_end_is_an_error() {
        let response = [0x80, 1, 0, 0, 0, 14, 0, 0, 0, 0, 1, 2, 3, 4];
        for part in 1..=response.len() {
            let mut client = TpmClient::new(Box::new(Script(response.to_vec(), part)));
            assert_eq!(*client.run(&wire::read_pcrs(&[])).unwrap().1, [1, 2, 3, 4], "{part} bytes at a time");
        }
        let mut cut = TpmClient::new(Box::new(Script(response[..13].to_vec(), 5)));
        assert!(matches!(cut.run(&wire::read_pcrs(&[])), Err(TpmError::Connection(_))));
    }

    #[test]
    fn a_bank_that_is_switched_off_is_an_error_that_names_the_pcrs() {
        // A selection without PCRs, and no digests.
        let empty = [
            &[0x80, 1, 0, 0, 0, 28, 0, 0, 0, 0][..],
            &[0, 0, 0, 1],
            &[0, 0, 0, 1, 0, 11, 3, 0, 0, 0],
            &[0; 4],
        ]
        .concat();
        let mut client = TpmClient::new(Box::new(Script(empty, 64)));
        let error = client.read_pcrs(PcrSelection::try_new([7, 11]).unwrap()).unwrap_err();
        assert!(error.to_string().contains("no SHA-256 values of PCRs 7, 11"), "{error}");
    }

    #[test]
    fn a_password_of_the_owner_is_an_error_of_its_own() {
        let refused = vec![0x80, 1, 0, 0, 0, 10, 0, 0, 9, 0xa2];
        let mut client = TpmClient::new(Box::new(Script(refused, 64)));
        let error = client.with_storage_key(|_, _, _| Ok(())).unwrap_err();
        assert!(matches!(error, TpmError::OwnerPassword), "{error:?}");
    }

    proptest! {
        #[test]
        fn any_response_is_read_or_rejected(bytes in prop::collection::vec(any::<u8>(), 0..128)) {
            fuzz_tpm_response(&bytes);
            let length = u8::try_from(bytes.len() + 10).unwrap_or(u8::MAX);
            fuzz_tpm_response(&[&[0x80, 2, 0, 0, 0, length, 0, 0, 0, 0], &bytes[..]].concat());
        }
    }
}
