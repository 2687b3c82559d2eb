//! Responses of a TPM: what a command was answered, or why it failed.

use super::error::TpmError;
use super::wire::{
    CC_CREATE, CC_CREATE_PRIMARY, CC_FLUSH_CONTEXT, CC_LOAD, CC_LOAD_EXTERNAL, CC_PCR_READ,
    CC_POLICY_AUTHORIZE, CC_START_AUTH_SESSION, CC_UNSEAL, CC_VERIFY_SIGNATURE, ResponseReader, TAG_SESSIONS,
};

/// A successful response: the handle, if the command makes one, and the parameters.
pub(super) fn parse_response(code: u32, bytes: &[u8]) -> Result<(u32, ResponseReader<'_>), TpmError> {
    let command = command_name(code);
    let invalid = || TpmError::InvalidResponse { command };
    let mut reader = ResponseReader::new(bytes);
    let tag = reader.u16().ok_or_else(invalid)?;
    // A response that was cut off, or that has more bytes after it, is not used.
    if reader.u32().ok_or_else(invalid)? as usize != bytes.len() {
        return Err(invalid());
    }
    match reader.u32().ok_or_else(invalid)? {
        0 => {}
        response_code => return Err(TpmError::Failed { command, response_code }),
    }
    let makes_handle = matches!(code, CC_CREATE_PRIMARY | CC_LOAD | CC_LOAD_EXTERNAL | CC_START_AUTH_SESSION);
    let handle = if makes_handle { reader.u32().ok_or_else(invalid)? } else { 0 };
    // With a session, a length precedes the parameters, and the session's area follows them.
    if tag == TAG_SESSIONS {
        let length = reader.u32().ok_or_else(invalid)?;
        reader = ResponseReader::new(reader.bytes(length as usize).ok_or_else(invalid)?);
    }
    Ok((handle, reader))
}

fn command_name(code: u32) -> &'static str {
    match code {
        CC_CREATE_PRIMARY => "TPM2_CreatePrimary",
        CC_CREATE => "TPM2_Create",
        CC_LOAD => "TPM2_Load",
        CC_UNSEAL => "TPM2_Unseal",
        CC_FLUSH_CONTEXT => "TPM2_FlushContext",
        CC_LOAD_EXTERNAL => "TPM2_LoadExternal",
        CC_POLICY_AUTHORIZE => "TPM2_PolicyAuthorize",
        CC_VERIFY_SIGNATURE => "TPM2_VerifySignature",
        CC_START_AUTH_SESSION => "TPM2_StartAuthSession",
        CC_PCR_READ => "TPM2_PCR_Read",
        _ => "TPM2_PolicyPCR",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_read_whole_or_rejected() {
        let unsealed = [0x80, 2, 0, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0, 5, 0, 3, 1, 2, 3, 0, 0, 0, 0, 0];
        let (_, mut reader) = parse_response(CC_UNSEAL, &unsealed).unwrap();
        assert_eq!(reader.sized(), Some(&[1, 2, 3][..]));
        for length in 0..unsealed.len() {
            let cut = parse_response(CC_UNSEAL, &unsealed[..length]);
            assert!(matches!(cut, Err(TpmError::InvalidResponse { .. })), "{length}");
        }
        let failed = parse_response(CC_LOAD, &[0x80, 1, 0, 0, 0, 10, 0, 0, 1, 0xdf]).unwrap_err();
        assert_eq!(
            failed.to_string(),
            "TPM2_Load failed with response code 0x1df: look it up with tpm2_rc_decode"
        );
    }
}
