//! An authority that nothing keeps yet.

use std::sync::Arc;

use nodekeel_localstorage::pki::{Certificate, CommonName, Credentials, PkiError, PrivateKey, Template};

use super::signer::Signer;
use super::stored::{Values, key_of, key_to_raw};
use super::{Authority, AuthorityError, CA, CA_KEY, Leaf, REVOKED};
use crate::consensus::kv::{Compare, KvStore, Op, Txn};

/// The authority of a cluster that is being made: it is in memory, and where the caller has written it to.
///
/// It issues what the first member needs to start with, and is then [saved](Self::save) into the cluster.
#[derive(Debug)]
pub struct NewAuthority {
    signer: Signer,
    issued: Vec<Certificate>,
}

impl NewAuthority {
    /// A new authority with a new key, named after it.
    ///
    /// # Errors
    /// [`AuthorityError::Make`].
    pub fn generate() -> Result<NewAuthority, AuthorityError> {
        let failed = |error: PkiError| AuthorityError::make("an authority")(error.into());
        let mut template = Template::default();
        (template.ca, template.server, template.client) = (true, false, false);
        template.common_name = CommonName::WithKey("nodekeel-ca-".into());
        let key = PrivateKey::generate().map_err(failed)?;
        let certificate = template.self_sign(&key).map_err(failed)?;
        Ok(NewAuthority { signer: Signer::new(key, certificate)?, issued: Vec::new() })
    }

    /// One that was written to a directory as credentials, before it could be saved.
    ///
    /// # Errors
    /// [`AuthorityError::NotAnAuthority`] and [`AuthorityError::KeyMismatch`].
    pub fn from_credentials(credentials: Credentials) -> Result<NewAuthority, AuthorityError> {
        let Credentials { key, certificate, .. } = credentials;
        Ok(NewAuthority { signer: Signer::new(key, certificate)?, issued: Vec::new() })
    }

    /// The same, to be written to a directory until it is saved: its certificate is its own authority.
    ///
    /// # Errors
    /// [`AuthorityError::Make`].
    pub fn to_credentials(&self) -> Result<Credentials, AuthorityError> {
        let key = PrivateKey::from_pkcs8(self.signer.key().expose_pkcs8())
            .map_err(|error| AuthorityError::make("a copy of the key")(error.into()))?;
        let certificate = self.signer.certificate().clone();
        Ok(Credentials { key, ca: certificate.clone(), certificate })
    }

    /// Its certificate.
    pub fn certificate(&self) -> &Certificate {
        self.signer.certificate()
    }

    /// A new key and its certificate, which will be saved with the authority.
    ///
    /// # Errors
    /// [`AuthorityError::Make`].
    pub fn issue(&mut self, leaf: &Leaf) -> Result<Credentials, AuthorityError> {
        let key =
            PrivateKey::generate().map_err(|error| AuthorityError::make("a private key")(error.into()))?;
        let certificate = self.signer.certify(key.public(), leaf)?;
        self.issued.push(certificate.clone());
        Ok(Credentials { key, certificate, ca: self.certificate().clone() })
    }

    /// A certificate that it has issued before it was written: it will be saved with it.
    ///
    /// # Errors
    /// [`AuthorityError::NotIssued`].
    pub fn issued_before(&mut self, certificate: Certificate) -> Result<(), AuthorityError> {
        if !certificate.is_signed_by(self.certificate()) {
            return Err(AuthorityError::NotIssued { key: key_of(&certificate) });
        }
        self.issued.push(certificate);
        Ok(())
    }

    /// A list of revoked certificates with none on it.
    ///
    /// # Errors
    /// [`AuthorityError::Make`].
    pub fn none_revoked(&self) -> Result<nodekeel_localstorage::pki::RevocationList, AuthorityError> {
        self.signer.list(1, &[])
    }

    /// Saves the authority with what it has issued, in one transaction, where there was never one. Saved again, also by a
    /// process that takes over from one that was killed, it is found.
    ///
    /// # Errors
    /// [`AuthorityError::Another`] where there is another; [`AuthorityError::Store`], after which it can be saved again.
    pub async fn save(&self, root: Arc<dyn KvStore>) -> Result<Authority, AuthorityError> {
        let (ca, key, revoked) =
            (self.certificate().der(), key_to_raw(self.signer.key())?, self.none_revoked()?);
        let mut txn = Txn::new()
            .when(Compare::absent(CA_KEY))
            .when(Compare::absent(CA))
            .then(Op::put(CA, ca))
            .then(Op::put(CA_KEY, &**key))
            .then(Op::put(REVOKED, revoked.der()));
        for certificate in &self.issued {
            txn = txn.then(Op::put(key_of(certificate), certificate.der()));
        }
        for key in [CA, CA_KEY, REVOKED] {
            txn = txn.otherwise(Op::get(key));
        }
        let done = root.txn(txn).await.map_err(AuthorityError::store("save the authority"))?;
        if done.succeeded {
            return Authority::load(root).await;
        }
        let (found, _) = Values::collect(done.read()).signer()?;
        if found.certificate() != self.certificate() {
            return Err(AuthorityError::Another);
        }
        let authority = Authority::of(root, found);
        for certificate in &self.issued {
            authority.record(certificate).await?;
        }
        Ok(authority)
    }
}
