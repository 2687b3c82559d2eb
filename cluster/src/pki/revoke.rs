//! Taking back certificates.

use nodekeel_localstorage::pki::{Certificate, RevocationList};

use super::signer::{Revoked, now};
use super::stored::{Values, entries, list};
use super::{Authority, AuthorityError, CERTIFICATES, REVOKED, SubjectNames};
use crate::consensus::kv::{Compare, KeyRange, KeyValue, Op, Range, Txn};

/// How often a change of the list is tried. Each that fails is another's that succeeded, so this is so many others at once.
const TRIES: usize = 1000;

impl Authority {
    /// Revokes every certificate that was issued to a name, and tells them; those that were revoked before among them.
    ///
    /// Members learn of it through [`keep_revoked`](super::keep_revoked), and refuse new connections then. Those that
    /// stand go on: remove a member, too.
    ///
    /// # Errors
    /// [`AuthorityError::UnknownName`]; [`AuthorityError::Contended`]; what is wrong with what is stored;
    /// [`AuthorityError::Store`], after which it can be called again.
    pub async fn revoke(&self, name: &str) -> Result<Vec<Certificate>, AuthorityError> {
        for _ in 0..TRIES {
            let (list, stored, certificates) = self.read_for(name).await?;
            if certificates.is_empty() {
                return Err(AuthorityError::UnknownName { name: name.to_owned() });
            }
            let new: Vec<_> = certificates.iter().filter(|certificate| !list.revokes(certificate)).collect();
            if new.is_empty() || self.replace(&list, &stored, &new).await? {
                return Ok(certificates);
            }
        }
        Err(AuthorityError::Contended)
    }

    /// The list, its key, and the certificates of a name, all of one moment.
    async fn read_for(
        &self,
        name: &str,
    ) -> Result<(RevocationList, KeyValue, Vec<Certificate>), AuthorityError> {
        let issued = Op::Range(Range::new(KeyRange::prefix(CERTIFICATES)));
        let done = self.root.txn(Txn::new().then(Op::get(REVOKED)).then(issued)).await;
        let done = done.map_err(AuthorityError::store("read what was issued and revoked"))?;
        let values = Values::collect(done.read());
        let stored = values.revoked.ok_or(AuthorityError::Incomplete { missing: REVOKED })?;
        let list = list(&stored.value, self.certificate())?;
        let mut certificates = Vec::new();
        for kv in &values.certificates {
            let certificate = self.check(&kv.key, &kv.value)?;
            if SubjectNames::of(&certificate).is_named(name) {
                certificates.push(certificate);
            }
        }
        Ok((list, stored, certificates))
    }

    /// Puts a longer list in the place of one, unless another was put there meanwhile; tells whether it did.
    async fn replace(
        &self,
        list: &RevocationList,
        stored: &KeyValue,
        new: &[&Certificate],
    ) -> Result<bool, AuthorityError> {
        let (number, mut revoked) = entries(list)?;
        let at = now();
        revoked.extend(new.iter().map(|certificate| Revoked { serial: certificate.serial().to_vec(), at }));
        let longer = self.signer.list(number.saturating_add(1), &revoked)?;
        let txn = Txn::new().when(Compare::unchanged(stored)).then(Op::put(REVOKED, longer.der()));
        let done = self.root.txn(txn).await;
        let done = done.map_err(AuthorityError::store("replace the list of revoked certificates"))?;
        Ok(done.succeeded)
    }
}
