//! A CA that is not stored yet.

use std::sync::Arc;

use nodekeel_localstorage::pki::{
    Certificate, CertificateTemplate, CommonName, Credentials, PkiError, PrivateKey,
};

use super::signer::CaSigner;
use super::stored::{StoredValues, issued_path, key_to_raw};
use super::{
    CA_CERT_PATH, CA_KEY_PATH, CRL_PATH, CaError, CertificateSpec, ClusterCa, ISSUED_PREFIX, PEER_NAME_PATH,
    SEAL_PREFIX, SEALED_KEY_PATH, Voter, peer_name,
};
use crate::consensus::kv::{Compare, KeyRange, KvStore, Txn, TxnOp};

/// The CA of a cluster that is being bootstrapped, made by the member that creates it: it exists in memory, and wherever
/// that member keeps it until it is saved.
///
/// It issues the first member's certificate, and is then [saved](Self::save_to) into the cluster.
#[derive(Debug)]
pub struct PendingCa {
    signer: CaSigner,
    issued: Vec<Certificate>,
}

impl PendingCa {
    /// A new CA with a new key, named after the key.
    ///
    /// # Errors
    /// [`CaError::Create`].
    pub fn generate() -> Result<PendingCa, CaError> {
        let failed = |error: PkiError| CaError::create_error("a CA")(error.into());
        let mut template = CertificateTemplate::default();
        (template.is_ca, template.server_auth, template.client_auth) = (true, false, false);
        template.common_name = CommonName::WithKeyId("nodekeel-ca-".into());
        let key = PrivateKey::generate().map_err(failed)?;
        let certificate = template.self_sign(&key).map_err(failed)?;
        Ok(PendingCa { signer: CaSigner::new(key, certificate)?, issued: Vec::new() })
    }

    /// Restores a CA that was written to a directory as credentials before it was saved.
    ///
    /// # Errors
    /// [`CaError::NotACa`] and [`CaError::KeyMismatch`].
    pub fn from_credentials(credentials: Credentials) -> Result<PendingCa, CaError> {
        let Credentials { key, certificate, .. } = credentials;
        Ok(PendingCa { signer: CaSigner::new(key, certificate)?, issued: Vec::new() })
    }

    /// The CA as credentials, to be written to a directory until it is saved. Its certificate is self-signed.
    ///
    /// # Errors
    /// [`CaError::Create`].
    pub fn to_credentials(&self) -> Result<Credentials, CaError> {
        let key = PrivateKey::from_pkcs8(self.signer.private_key().expose_pkcs8())
            .map_err(|error| CaError::create_error("a copy of the key")(error.into()))?;
        let certificate = self.signer.certificate().clone();
        Ok(Credentials { key, ca: certificate.clone(), certificate })
    }

    /// The CA's certificate.
    pub fn ca_certificate(&self) -> &Certificate {
        self.signer.certificate()
    }

    /// Issues a new key and its certificate, which will be saved with the CA.
    ///
    /// # Errors
    /// [`CaError::Create`].
    pub fn issue_credentials(&mut self, spec: &CertificateSpec) -> Result<Credentials, CaError> {
        let key =
            PrivateKey::generate().map_err(|error| CaError::create_error("a private key")(error.into()))?;
        let certificate = self.signer.sign_certificate(key.public_key(), spec)?;
        self.issued.push(certificate.clone());
        Ok(Credentials { key, certificate, ca: self.ca_certificate().clone() })
    }

    /// Adds a certificate that was issued before the CA was restored: it will be saved with the CA.
    ///
    /// # Errors
    /// [`CaError::NotIssued`].
    pub fn add_issued(&mut self, certificate: Certificate) -> Result<(), CaError> {
        if !certificate.is_signed_by(self.ca_certificate()) {
            return Err(CaError::NotIssued { key: issued_path(&certificate) });
        }
        self.issued.push(certificate);
        Ok(())
    }

    /// An empty list of revoked certificates.
    ///
    /// # Errors
    /// [`CaError::Create`].
    pub fn empty_revocation_list(&self) -> Result<nodekeel_localstorage::pki::RevocationList, CaError> {
        self.signer.sign_revocation_list(1, &[])
    }

    /// Saves the CA with its issued certificates, in one transaction, if the cluster never had a CA. A
    /// repeated call, also by a process that takes over from a killed one, finds the CA saved.
    ///
    /// The private key is stored as it is: for a store in the memory of one process, which has the voters' keys as well.
    ///
    /// # Errors
    /// [`CaError::AnotherCa`] if the cluster has another CA; [`CaError::Store`], after which the call can be
    /// repeated.
    pub async fn save_to(&self, root: Arc<dyn KvStore>) -> Result<ClusterCa, CaError> {
        let key = key_to_raw(self.signer.private_key())?;
        self.save(root, TxnOp::put(CA_KEY_PATH, &**key), None).await
    }

    /// Saves the CA as [`save_to`](Self::save_to), with the private key sealed to this voter.
    ///
    /// # Errors
    /// Those of [`save_to`](Self::save_to).
    pub async fn save_sealed(&self, root: Arc<dyn KvStore>, voter: &Voter) -> Result<ClusterCa, CaError> {
        let sealed = voter.alone().seal(self.signer.private_key())?;
        self.save(root, TxnOp::put(SEALED_KEY_PATH, sealed), Some(voter)).await
    }

    /// Replaces the CA of a cluster whose members are lost by this one, sealed to this voter. The certificates of the former CA are
    /// deleted. It can be repeated.
    ///
    /// # Errors
    /// [`CaError::Create`], [`CaError::Store`].
    pub async fn replace_in(&self, root: Arc<dyn KvStore>, voter: &Voter) -> Result<ClusterCa, CaError> {
        let failed = || CaError::store_error("replace the CA");
        // The keys of the lost voters, apart: a transaction can't write below a prefix that it deletes.
        root.delete(KeyRange::prefix(SEAL_PREFIX)).await.map_err(failed())?;
        let replace = Txn::new()
            .then(TxnOp::put(CA_CERT_PATH, self.ca_certificate().der_bytes()))
            .then(TxnOp::put(SEALED_KEY_PATH, voter.alone().seal(self.signer.private_key())?))
            .then(TxnOp::put(CRL_PATH, self.empty_revocation_list()?.der_bytes()))
            .then(TxnOp::put(PEER_NAME_PATH, peer_name(self.ca_certificate())))
            .then(TxnOp::Delete(KeyRange::single_key(CA_KEY_PATH)))
            .then(TxnOp::Delete(KeyRange::prefix(ISSUED_PREFIX)));
        root.txn(replace).await.map_err(failed())?;
        ClusterCa::load_sealed(root, voter).await
    }

    async fn save(
        &self,
        root: Arc<dyn KvStore>,
        put_key: TxnOp,
        voter: Option<&Voter>,
    ) -> Result<ClusterCa, CaError> {
        let (ca, revoked) = (self.ca_certificate().der_bytes(), self.empty_revocation_list()?);
        // All in one transaction: no reader ever finds a part of a CA.
        let mut txn = Txn::new()
            .when(Compare::key_absent(CA_KEY_PATH))
            .when(Compare::key_absent(SEALED_KEY_PATH))
            .when(Compare::key_absent(CA_CERT_PATH))
            .then(TxnOp::put(CA_CERT_PATH, ca))
            .then(put_key)
            .then(TxnOp::put(CRL_PATH, revoked.der_bytes()))
            // It has issued no certificate of a member without the name.
            .then(TxnOp::put(PEER_NAME_PATH, peer_name(self.ca_certificate())));
        for certificate in &self.issued {
            txn = txn.then(TxnOp::put(issued_path(certificate), certificate.der_bytes()));
        }
        // If a CA exists, the same transaction reads it, to find out whether it is this one.
        for key in [CA_CERT_PATH, CA_KEY_PATH, SEALED_KEY_PATH, CRL_PATH] {
            txn = txn.or_else(TxnOp::get(key));
        }
        let done = root.txn(txn).await.map_err(CaError::store_error("save the CA"))?;
        if done.succeeded {
            // Read back and checked, as every later start does.
            return ClusterCa::load(root, voter).await;
        }
        let (certificate, signer) = StoredValues::from_key_values(done.kvs).into_ca(voter)?;
        if &certificate != self.ca_certificate() {
            return Err(CaError::AnotherCa);
        }
        let cluster_ca = ClusterCa::from_parts(root, certificate, signer);
        for certificate in &self.issued {
            // A killed run may have saved the CA, and this run has issued another certificate since.
            cluster_ca.record_issued(certificate).await?;
        }
        Ok(cluster_ca)
    }
}
