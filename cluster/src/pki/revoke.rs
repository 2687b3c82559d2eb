//! Revokes certificates.

use nodekeel_localstorage::pki::{Certificate, RevocationList};

use super::signer::{RevokedEntry, unix_time};
use super::stored::{StoredValues, parse_revocation_list, revoked_entries};
use super::{CRL_PATH, CaError, ClusterCa, ISSUED_PREFIX, SubjectNames};
use crate::consensus::kv::{Compare, KeyRange, KeyValue, Txn, TxnOp};

/// The number of times that a change of the list is attempted. Each failed attempt is another caller's success, so this
/// bounds the number of concurrent callers.
const MAX_ATTEMPTS: usize = 1000;

impl ClusterCa {
    /// Revokes every certificate that was issued to a name, and returns them, including those revoked before.
    ///
    /// Members receive the list through [`sync_revocation_list`](super::sync_revocation_list), and then
    /// reject new connections. Established connections continue: remove the member, too.
    ///
    /// # Errors
    /// [`CaError::Sealed`]; [`CaError::UnknownName`]; [`CaError::Contended`]; an error that names an invalid stored value;
    /// [`CaError::Store`], after which the call can be repeated.
    pub async fn revoke_name(&self, name: &str) -> Result<Vec<Certificate>, CaError> {
        let is_named = |certificate: &Certificate| SubjectNames::from_certificate(certificate).is_named(name);
        let (certificates, _) = self.revoke_matching(is_named).await?;
        if certificates.is_empty() {
            return Err(CaError::UnknownName { name: name.to_owned() });
        }
        Ok(certificates)
    }

    /// Revokes the certificate of this serial number, as [`revoke_name`](Self::revoke_name) does. Returns whether it was issued,
    /// and not revoked before.
    ///
    /// # Errors
    /// Those of [`revoke_name`](Self::revoke_name); an unknown number is none.
    pub async fn revoke_serial(&self, serial: &[u8]) -> Result<bool, CaError> {
        let (_, is_new) = self.revoke_matching(|certificate| certificate.serial_number() == serial).await?;
        Ok(is_new)
    }

    /// Revokes certificates. Returns all of them, and whether one was not revoked before.
    async fn revoke_matching(
        &self,
        is_meant: impl Fn(&Certificate) -> bool,
    ) -> Result<(Vec<Certificate>, bool), CaError> {
        // Each attempt starts from the newest list, so that no concurrent revocation is lost.
        for _ in 0..MAX_ATTEMPTS {
            let (list, stored, certificates) = self.read_revocation_state(&is_meant).await?;
            let new: Vec<_> =
                certificates.iter().filter(|certificate| !list.is_revoked(certificate)).collect();
            let is_new = !new.is_empty();
            if !is_new || self.replace_list(&list, &stored, &new).await? {
                return Ok((certificates, is_new));
            }
        }
        Err(CaError::Contended)
    }

    /// The list, its stored value, and the certificates that are meant, all read in one transaction.
    async fn read_revocation_state(
        &self,
        is_meant: impl Fn(&Certificate) -> bool,
    ) -> Result<(RevocationList, KeyValue, Vec<Certificate>), CaError> {
        let issued = TxnOp::Range(KeyRange::prefix(ISSUED_PREFIX));
        let done = self.root_kv.txn(Txn::new().then(TxnOp::get(CRL_PATH)).then(issued)).await;
        let done = done.map_err(CaError::store_error("read the issued and the revoked certificates"))?;
        let values = StoredValues::from_key_values(done.kvs);
        let stored = values.revoked.ok_or(CaError::Incomplete { missing: CRL_PATH })?;
        let list = parse_revocation_list(&stored.value, self.ca_certificate())?;
        let mut certificates = Vec::new();
        for kv in &values.certificates {
            let certificate = self.check_issued(&kv.key, &kv.value)?;
            if is_meant(&certificate) {
                certificates.push(certificate);
            }
        }
        Ok((list, stored, certificates))
    }

    /// Replaces the list by a longer one, unless it was changed concurrently; returns whether it did.
    async fn replace_list(
        &self,
        list: &RevocationList,
        stored: &KeyValue,
        new: &[&Certificate],
    ) -> Result<bool, CaError> {
        let (number, mut revoked) = revoked_entries(list)?;
        let at = unix_time();
        revoked.extend(
            new.iter().map(|certificate| RevokedEntry { serial: certificate.serial_number().to_vec(), at }),
        );
        // The number of each list is higher than that of the one before. *Source:* RFC 5280, section 5.2.3.
        let longer = self.signer()?.sign_revocation_list(number.saturating_add(1), &revoked)?;
        let txn =
            Txn::new().when(Compare::key_unchanged(stored)).then(TxnOp::put(CRL_PATH, longer.der_bytes()));
        let done = self.root_kv.txn(txn).await;
        let done = done.map_err(CaError::store_error("replace the list of revoked certificates"))?;
        Ok(done.succeeded)
    }
}
