//! Commands and responses of a TPM 2.0 as bytes: all numbers are big-endian, and a sized buffer has its length, of two
//! bytes, before it.
//!
//! *Source:* TPM 2.0 Library 1.59, part 2 (structures), part 3 (commands).

use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

/// Commands without a session.
const TAG_NO_SESSIONS: u16 = 0x8001;
pub(super) const TAG_SESSIONS: u16 = 0x8002;
/// The session of an authorization by a password, which is empty here.
pub(super) const SESSION_PASSWORD: u32 = 0x4000_0009;
pub(super) const HIERARCHY_OWNER: u32 = 0x4000_0001;
pub(super) const HIERARCHY_NULL: u32 = 0x4000_0007;
pub(super) const ALG_SHA256: u16 = 0x000b;
const ALG_NULL: u16 = 0x0010;
const ALG_RSA: u16 = 0x0001;
const ALG_RSASSA: u16 = 0x0014;
const ALG_KEYED_HASH: u16 = 0x0008;
const ALG_ECC: u16 = 0x0023;
const ALG_AES: u16 = 0x0006;
const ALG_CFB: u16 = 0x0043;
const CURVE_P256: u16 = 0x0003;
const SESSION_POLICY: u8 = 0x01;
/// fixedTPM, fixedParent, sensitiveDataOrigin, userWithAuth, noDA, restricted, decrypt.
const STORAGE_KEY_ATTRIBUTES: u32 = 0x0003_0472;
/// fixedTPM, fixedParent, noDA: without userWithAuth, the policy alone unseals it.
const SEALED_ATTRIBUTES: u32 = 0x0000_0412;
/// userWithAuth, decrypt, sign: as systemd and tpm2-tools have them for a public key, whose name depends on
/// them.
const SIGNER_ATTRIBUTES: u32 = 0x0006_0040;

pub(super) const CC_CREATE_PRIMARY: u32 = 0x131;
pub(super) const CC_CREATE: u32 = 0x153;
pub(super) const CC_LOAD: u32 = 0x157;
pub(super) const CC_UNSEAL: u32 = 0x15e;
pub(super) const CC_FLUSH_CONTEXT: u32 = 0x165;
pub(super) const CC_LOAD_EXTERNAL: u32 = 0x167;
pub(super) const CC_POLICY_AUTHORIZE: u32 = 0x16a;
pub(super) const CC_START_AUTH_SESSION: u32 = 0x176;
pub(super) const CC_VERIFY_SIGNATURE: u32 = 0x177;
pub(super) const CC_PCR_READ: u32 = 0x17e;
pub(super) const CC_POLICY_PCR: u32 = 0x17f;

/// Bytes of a command, erased from memory when they are dropped.
#[derive(Default)]
pub(super) struct CommandBytes(Zeroizing<Vec<u8>>);

impl CommandBytes {
    pub(super) fn u16(&mut self, number: u16) -> &mut CommandBytes {
        self.bytes(&number.to_be_bytes())
    }

    pub(super) fn u32(&mut self, number: u32) -> &mut CommandBytes {
        self.bytes(&number.to_be_bytes())
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut CommandBytes {
        self.0.extend_from_slice(bytes);
        self
    }

    /// A buffer after its length.
    pub(super) fn sized(&mut self, bytes: &[u8]) -> &mut CommandBytes {
        let length = u16::try_from(bytes.len()).expect("a buffer of a command is short");
        self.u16(length).bytes(bytes)
    }

    pub(super) fn into_vec(mut self) -> Vec<u8> {
        std::mem::take(&mut *self.0)
    }
}

/// A command before it is written: its code, its handles, the session that authorizes the first of them, and its
/// parameters.
pub(super) struct TpmCommand {
    pub(super) code: u32,
    pub(super) handles: Vec<u32>,
    pub(super) session: Option<u32>,
    pub(super) parameters: CommandBytes,
}

impl TpmCommand {
    pub(super) fn new(code: u32, handles: &[u32], session: Option<u32>) -> TpmCommand {
        // The largest command has 600 bytes: a buffer that grows would leave copies of a secret behind.
        let parameters = CommandBytes(Zeroizing::new(Vec::with_capacity(1024)));
        TpmCommand { code, handles: handles.to_vec(), session, parameters }
    }

    pub(super) fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        let mut body = CommandBytes(Zeroizing::new(Vec::with_capacity(1024)));
        for handle in &self.handles {
            body.u32(*handle);
        }
        if let Some(session) = self.session {
            // Its size, the session, an empty nonce, no attributes, an empty password.
            body.u32(9).u32(session).u16(0).bytes(&[0]).u16(0);
        }
        body.bytes(&self.parameters.0);
        let tag = if self.session.is_some() { TAG_SESSIONS } else { TAG_NO_SESSIONS };
        let length = u32::try_from(10 + body.0.len()).expect("a command is short");
        let mut bytes = CommandBytes(Zeroizing::new(Vec::with_capacity(1024)));
        bytes.u16(tag).u32(length).u32(self.code).bytes(&body.0);
        bytes.0
    }
}

/// Reads a response from its start.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResponseReader<'a>(&'a [u8]);

impl<'a> ResponseReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> ResponseReader<'a> {
        ResponseReader(bytes)
    }

    /// All that was not read yet.
    pub(super) fn rest(self) -> &'a [u8] {
        self.0
    }

    pub(super) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.bytes(2)?.try_into().ok()?))
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.bytes(4)?.try_into().ok()?))
    }

    pub(super) fn sized(&mut self) -> Option<&'a [u8]> {
        let length = self.u16()?;
        self.bytes(length.into())
    }
}

/// The size of a response's header, in bytes.
pub(super) const HEADER_BYTES: usize = 10;

/// The length in the header of a response, in bytes.
pub(super) fn response_length(header: &[u8]) -> Option<usize> {
    let mut reader = ResponseReader(header);
    reader.u16()?;
    usize::try_from(reader.u32()?).ok()
}

/// The storage root key of every TPM: the same seed gives the same key.
///
/// *Source:* TCG TPM v2.0 Provisioning Guidance 1.0, 7.5.1 (storage primary key, ECC P-256).
pub(super) fn create_primary() -> TpmCommand {
    let mut public = CommandBytes::default();
    public.u16(ALG_ECC).u16(ALG_SHA256).u32(STORAGE_KEY_ATTRIBUTES).sized(&[]);
    public.u16(ALG_AES).u16(128).u16(ALG_CFB).u16(ALG_NULL).u16(CURVE_P256).u16(ALG_NULL);
    public.sized(&[0; 32]).sized(&[0; 32]);
    let mut command = TpmCommand::new(CC_CREATE_PRIMARY, &[HIERARCHY_OWNER], Some(SESSION_PASSWORD));
    // Neither password nor data; no outside information, no PCRs of the creation.
    command.parameters.sized(&[0; 4]).sized(&public.0).sized(&[]).u32(0);
    command
}

/// Seals data below a key, for a policy alone.
pub(super) fn create_sealed(parent: u32, data: &[u8], policy: &[u8]) -> TpmCommand {
    let mut sensitive = CommandBytes(Zeroizing::new(Vec::with_capacity(64)));
    sensitive.sized(&[]).sized(data);
    let mut public = CommandBytes::default();
    public.u16(ALG_KEYED_HASH).u16(ALG_SHA256).u32(SEALED_ATTRIBUTES).sized(policy).u16(ALG_NULL).sized(&[]);
    let mut command = TpmCommand::new(CC_CREATE, &[parent], Some(SESSION_PASSWORD));
    command.parameters.sized(&sensitive.0).sized(&public.0).sized(&[]).u32(0);
    command
}

pub(super) fn load(parent: u32, private: &[u8], public: &[u8]) -> TpmCommand {
    let mut command = TpmCommand::new(CC_LOAD, &[parent], Some(SESSION_PASSWORD));
    command.parameters.sized(private).sized(public);
    command
}

/// The public area of a key that only verifies RSA signatures, as `TPMT_PUBLIC`.
pub(super) fn signer_public_area(modulus: &[u8], exponent: u32) -> Vec<u8> {
    let bits = u16::try_from(8 * modulus.len()).expect("a key has 4096 bits at most");
    let mut public = CommandBytes::default();
    public.u16(ALG_RSA).u16(ALG_SHA256).u32(SIGNER_ATTRIBUTES).sized(&[]);
    // Neither an algorithm for children nor a scheme: each signature names its own.
    public.u16(ALG_NULL).u16(ALG_NULL).u16(bits).u32(exponent).sized(modulus);
    public.into_vec()
}

/// The name of an object: its hash algorithm and the digest of its public part.
///
/// *Source:* TPM 2.0 Library, part 1, 16 (names).
pub(super) fn object_name(public: &[u8]) -> Vec<u8> {
    [&ALG_SHA256.to_be_bytes()[..], &Sha256::digest(public)].concat()
}

pub(super) fn load_external(public: &[u8]) -> TpmCommand {
    let mut command = TpmCommand::new(CC_LOAD_EXTERNAL, &[], None);
    // No private part. With the null hierarchy, a verified signature would give no ticket.
    command.parameters.sized(&[]).sized(public).u32(HIERARCHY_OWNER);
    command
}

/// Verifies a signature of PKCS#1 v1.5 over a digest of SHA-256.
pub(super) fn verify_signature(key: u32, digest: &[u8], signature: &[u8]) -> TpmCommand {
    let mut command = TpmCommand::new(CC_VERIFY_SIGNATURE, &[key], None);
    command.parameters.sized(digest).u16(ALG_RSASSA).u16(ALG_SHA256).sized(signature);
    command
}

/// Replaces a policy that a key has signed by that of the key: `ticket` is the response to the verified signature.
pub(super) fn policy_authorize(session: u32, policy: &[u8], key_name: &[u8], ticket: &[u8]) -> TpmCommand {
    let mut command = TpmCommand::new(CC_POLICY_AUTHORIZE, &[session], None);
    command.parameters.sized(policy).sized(&[]).sized(key_name).bytes(ticket);
    command
}

pub(super) fn start_policy_session(nonce: &[u8; 16]) -> TpmCommand {
    // Neither salted nor bound: the session only carries the policy, and encrypts nothing.
    let mut command = TpmCommand::new(CC_START_AUTH_SESSION, &[HIERARCHY_NULL, HIERARCHY_NULL], None);
    command.parameters.sized(nonce).sized(&[]).bytes(&[SESSION_POLICY]).u16(ALG_NULL).u16(ALG_SHA256);
    command
}

pub(super) fn policy_pcr(session: u32, digest: &[u8], selection: &[u8]) -> TpmCommand {
    let mut command = TpmCommand::new(CC_POLICY_PCR, &[session], None);
    command.parameters.sized(digest).bytes(selection);
    command
}

pub(super) fn unseal(object: u32, session: u32) -> TpmCommand {
    TpmCommand::new(CC_UNSEAL, &[object], Some(session))
}

pub(super) fn read_pcrs(selection: &[u8]) -> TpmCommand {
    let mut command = TpmCommand::new(CC_PCR_READ, &[], None);
    command.parameters.bytes(selection);
    command
}

pub(super) fn flush_context(handle: u32) -> TpmCommand {
    let mut command = TpmCommand::new(CC_FLUSH_CONTEXT, &[], None);
    command.parameters.u32(handle);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_its_length_and_its_session() {
        let bytes = unseal(0x8000_0001, 0x0300_0000).to_bytes();
        let expected =
            [0x80, 2, 0, 0, 0, 27, 0, 0, 1, 0x5e, 0x80, 0, 0, 1, 0, 0, 0, 9, 3, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(**bytes, expected);
        assert_eq!(**flush_context(1).to_bytes(), [0x80, 1, 0, 0, 0, 14, 0, 0, 1, 0x65, 0, 0, 0, 1]);
    }
}
