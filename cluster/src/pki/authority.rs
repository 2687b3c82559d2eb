//! The authority of a cluster that runs.

use std::sync::Arc;

use nodekeel_localstorage::pki::{Certificate, Credentials, PrivateKey, PublicKey, RevocationList};

use super::signer::Signer;
use super::stored::{Values, certificate, key_of, list};
use super::{AuthorityError, CA, CA_KEY, CERTIFICATES, Leaf, REVOKED};
use crate::consensus::kv::{Compare, KeyRange, KvStore, Op, Range, Txn};

/// The authority of a cluster, loaded from its keys and checked. It is as good as they are: whoever holds it can issue.
#[derive(Debug)]
pub struct Authority {
    pub(super) root: Arc<dyn KvStore>,
    pub(super) signer: Signer,
}

impl Authority {
    /// The authority that is kept in these root keys.
    ///
    /// # Errors
    /// [`AuthorityError::Absent`] where none was ever saved; what is wrong with it, naming the key; or
    /// [`AuthorityError::Store`].
    pub async fn load(root: Arc<dyn KvStore>) -> Result<Authority, AuthorityError> {
        let read = Txn::new().then(Op::get(CA)).then(Op::get(CA_KEY)).then(Op::get(REVOKED));
        let done = root.txn(read).await.map_err(AuthorityError::store("load the authority"))?;
        let (signer, _) = Values::collect(done.read()).signer()?;
        Ok(Authority { root, signer })
    }

    pub(super) fn of(root: Arc<dyn KvStore>, signer: Signer) -> Authority {
        Authority { root, signer }
    }

    /// Its certificate.
    pub fn certificate(&self) -> &Certificate {
        self.signer.certificate()
    }

    /// A new key and its certificate. The certificate is recorded before it is given out, so it can be revoked.
    ///
    /// # Errors
    /// [`AuthorityError::Make`], [`AuthorityError::Store`]: then nothing was given out; what may have been recorded is a
    /// certificate of a key that nobody has.
    pub async fn issue(&self, leaf: &Leaf) -> Result<Credentials, AuthorityError> {
        let key =
            PrivateKey::generate().map_err(|error| AuthorityError::make("a private key")(error.into()))?;
        let certificate = self.certify(key.public(), leaf).await?;
        Ok(Credentials { key, certificate, ca: self.certificate().clone() })
    }

    /// A certificate for a key that its owner keeps. It is recorded before it is given out.
    ///
    /// # Errors
    /// Those of [`issue`](Self::issue).
    pub async fn certify(&self, public: PublicKey, leaf: &Leaf) -> Result<Certificate, AuthorityError> {
        let certificate = self.signer.certify(public, leaf)?;
        self.record(&certificate).await?;
        Ok(certificate)
    }

    /// All certificates that it has issued, those revoked among them, in the order of their serial numbers.
    ///
    /// # Errors
    /// [`AuthorityError::Malformed`] and [`AuthorityError::NotIssued`], naming the key; [`AuthorityError::Store`].
    pub async fn issued(&self) -> Result<Vec<Certificate>, AuthorityError> {
        let read = self.root.range(Range::new(KeyRange::prefix(CERTIFICATES))).await;
        let read = read.map_err(AuthorityError::store("list the certificates"))?;
        read.kvs.iter().map(|kv| self.check(&kv.key, &kv.value)).collect()
    }

    /// The list of revoked certificates as it is now.
    ///
    /// # Errors
    /// [`AuthorityError::Incomplete`], [`AuthorityError::Malformed`], [`AuthorityError::Store`].
    pub async fn revoked(&self) -> Result<RevocationList, AuthorityError> {
        let read = self.root.get(REVOKED.as_bytes()).await;
        let kv = read.map_err(AuthorityError::store("read the list of revoked certificates"))?;
        let kv = kv.ok_or(AuthorityError::Incomplete { missing: REVOKED })?;
        list(&kv.value, self.certificate())
    }

    /// A certificate that was stored under this key, checked to be this authority's.
    pub(super) fn check(&self, key: &[u8], der: &[u8]) -> Result<Certificate, AuthorityError> {
        let key = String::from_utf8_lossy(key);
        let certificate = certificate(&key, der)?;
        match certificate.is_signed_by(self.certificate()) && key_of(&certificate) == key {
            true => Ok(certificate),
            false => Err(AuthorityError::NotIssued { key: key.into_owned() }),
        }
    }

    /// Records a certificate; one that is recorded already is as it was.
    pub(super) async fn record(&self, certificate: &Certificate) -> Result<(), AuthorityError> {
        let key = key_of(certificate);
        let txn = Txn::new().when(Compare::absent(key.as_str())).then(Op::put(key, certificate.der()));
        let done = self.root.txn(txn).await;
        done.map(drop).map_err(AuthorityError::store("record a certificate"))
    }
}
