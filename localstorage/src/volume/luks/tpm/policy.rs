//! Digests of policies: what has to hold when a key is unsealed.

use sha2::{Digest as _, Sha256};

use super::pcr::{DIGEST_BYTES, PcrValues};
use super::wire::{CC_POLICY_AUTHORIZE, CC_POLICY_PCR};

/// The digest of a policy, which each command of a policy session extends in its turn.
///
/// *Source:* TPM 2.0 Library, part 1, 19.7 (policy digests), part 3, 23 (the commands).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PolicyDigest(pub(super) [u8; DIGEST_BYTES]);

impl PolicyDigest {
    /// After `TPM2_PolicyPCR` with these values.
    pub(super) fn with_pcrs(self, values: &PcrValues) -> PolicyDigest {
        self.extend(&[&CC_POLICY_PCR.to_be_bytes(), &values.selection().to_wire(), &values.digest()])
    }

    /// After `TPM2_PolicyAuthorize` of whatever the key with this name has signed: all that came before is replaced.
    pub(super) fn authorized_by(key_name: &[u8]) -> PolicyDigest {
        let authorized = PolicyDigest::default().extend(&[&CC_POLICY_AUTHORIZE.to_be_bytes(), key_name]);
        // The reference to the policy comes in a second step, and is empty: systemd-measure signs without one.
        authorized.extend(&[])
    }

    fn extend(self, parts: &[&[u8]]) -> PolicyDigest {
        let hash = Sha256::new().chain_update(self.0);
        PolicyDigest(parts.iter().fold(hash, |hash, part| hash.chain_update(part)).finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::super::public_key::PcrPublicKey;
    use super::*;

    /// Keys that were sealed depend on these bytes.
    #[test]
    fn the_policy_of_values_never_changes() {
        let hex =
            |digest: PolicyDigest| digest.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        // *Source:* python3, hashlib, by the formula of the specification.
        let zeros = PcrValues([(7, [0; 32])].into());
        assert_eq!(
            hex(PolicyDigest::default().with_pcrs(&zeros)),
            include_str!("../../../../testdata/tpm/policy-pcr7-zeros.txt").trim()
        );
        // *Source:* tpm2-tools 5.4 in a trial session: tpm2_loadexternal, tpm2_policyauthorize, tpm2_policypcr.
        let signer = PcrPublicKey::from_pem(include_bytes!("../../../../testdata/tpm/signer.pem")).unwrap();
        let authorized = PolicyDigest::authorized_by(&signer.name());
        assert_eq!(hex(authorized), "3781e8504fd5ee9225f415ecf9dd0cc9306aa2abfc293eb12ad1fe24a3f535b9");
        assert_eq!(
            hex(authorized.with_pcrs(&zeros)),
            "e7d4808f19405cd3ece618eb72109af2d3fcc5fe544f78885ad4adabdbd601d4"
        );
    }
}
