//! The CA of a running cluster.

use std::sync::Arc;

use nodekeel_localstorage::pki::{Certificate, Credentials, PrivateKey, PublicKey, RevocationList};

use super::signer::CaSigner;
use super::stored::{StoredValues, issued_path, parse_certificate, parse_revocation_list};
use super::{
    CA_CERT_PATH, CA_KEY_PATH, CRL_PATH, CaError, CertificateSpec, ISSUED_PREFIX, SEALED_KEY_PATH, Voter,
};
use crate::consensus::kv::{Compare, KeyRange, KvStore, Txn, TxnOp};

/// The CA of a cluster, loaded from its keys and checked. On a voter to which the private key is sealed, it includes that key, and
/// issues and revokes certificates.
#[derive(Debug)]
pub struct ClusterCa {
    pub(super) root_kv: Arc<dyn KvStore>,
    certificate: Certificate,
    signer: Option<CaSigner>,
}

impl ClusterCa {
    /// Loads the CA from these root keys. It can sign if the private key is stored as it is: by an earlier release, or in a store
    /// in memory.
    ///
    /// # Errors
    /// [`CaError::NotFound`] if none was ever saved; an error that names the invalid key; or
    /// [`CaError::Store`].
    pub async fn load_ca(root: Arc<dyn KvStore>) -> Result<ClusterCa, CaError> {
        ClusterCa::load(root, None).await
    }

    /// Loads the CA from these root keys. It can sign if the private key is sealed to this voter, or not sealed yet.
    ///
    /// # Errors
    /// Those of [`load_ca`](Self::load_ca); [`CaError::MalformedSeal`].
    pub async fn load_sealed(root: Arc<dyn KvStore>, voter: &Voter) -> Result<ClusterCa, CaError> {
        ClusterCa::load(root, Some(voter)).await
    }

    pub(super) async fn load(root: Arc<dyn KvStore>, voter: Option<&Voter>) -> Result<ClusterCa, CaError> {
        // One transaction: key, certificate and list are those of one moment.
        let read = Txn::new()
            .then(TxnOp::get(CA_CERT_PATH))
            .then(TxnOp::get(CA_KEY_PATH))
            .then(TxnOp::get(SEALED_KEY_PATH))
            .then(TxnOp::get(CRL_PATH));
        let done = root.txn(read).await.map_err(CaError::store_error("load the CA"))?;
        let (certificate, signer) = StoredValues::from_key_values(done.kvs).into_ca(voter)?;
        Ok(ClusterCa { root_kv: root, certificate, signer })
    }

    pub(super) fn from_parts(
        root_kv: Arc<dyn KvStore>,
        certificate: Certificate,
        signer: Option<CaSigner>,
    ) -> ClusterCa {
        ClusterCa { root_kv, certificate, signer }
    }

    /// The CA's certificate.
    pub fn ca_certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// Returns whether it can issue and revoke certificates.
    pub fn can_sign(&self) -> bool {
        self.signer.is_some()
    }

    pub(super) fn signer(&self) -> Result<&CaSigner, CaError> {
        self.signer.as_ref().ok_or(CaError::Sealed)
    }

    /// Issues a new key and its certificate. The certificate is recorded before it is returned, so that it
    /// can be revoked.
    ///
    /// # Errors
    /// [`CaError::Sealed`], [`CaError::Create`], [`CaError::Store`]: nothing was returned; a certificate that was recorded anyway
    /// belongs to a key that no longer exists.
    pub async fn issue_credentials(&self, spec: &CertificateSpec) -> Result<Credentials, CaError> {
        let key =
            PrivateKey::generate().map_err(|error| CaError::create_error("a private key")(error.into()))?;
        let certificate = self.certify_key(key.public_key(), spec).await?;
        Ok(Credentials { key, certificate, ca: self.ca_certificate().clone() })
    }

    /// Issues a certificate for a key that stays with its owner. It is recorded before it is returned.
    ///
    /// # Errors
    /// Those of [`issue_credentials`](Self::issue_credentials).
    pub async fn certify_key(
        &self,
        public: PublicKey,
        spec: &CertificateSpec,
    ) -> Result<Certificate, CaError> {
        // A certificate that is not recorded could never be revoked, so it is recorded before the caller gets it.
        let certificate = self.signer()?.sign_certificate(public, spec)?;
        self.record_issued(&certificate).await?;
        Ok(certificate)
    }

    /// All issued certificates, including revoked ones, in the order of their serial numbers.
    ///
    /// # Errors
    /// [`CaError::Malformed`] and [`CaError::NotIssued`], naming the key; [`CaError::Store`].
    pub async fn list_issued(&self) -> Result<Vec<Certificate>, CaError> {
        let read = self.root_kv.range(KeyRange::prefix(ISSUED_PREFIX)).await;
        let read = read.map_err(CaError::store_error("list the certificates"))?;
        read.kvs.iter().map(|kv| self.check_issued(&kv.key, &kv.value)).collect()
    }

    /// The present list of revoked certificates.
    ///
    /// # Errors
    /// [`CaError::Incomplete`], [`CaError::Malformed`], [`CaError::Store`].
    pub async fn revocation_list(&self) -> Result<RevocationList, CaError> {
        let read = self.root_kv.get(CRL_PATH.as_bytes()).await;
        let kv = read.map_err(CaError::store_error("read the list of revoked certificates"))?;
        let kv = kv.ok_or(CaError::Incomplete { missing: CRL_PATH })?;
        parse_revocation_list(&kv.value, self.ca_certificate())
    }

    /// Parses the certificate stored under this key, and checks that this CA has issued it.
    pub(super) fn check_issued(&self, key: &[u8], der: &[u8]) -> Result<Certificate, CaError> {
        let key = String::from_utf8_lossy(key);
        let certificate = parse_certificate(&key, der)?;
        if certificate.is_signed_by(self.ca_certificate()) && issued_path(&certificate) == key {
            Ok(certificate)
        } else {
            Err(CaError::NotIssued { key: key.into_owned() })
        }
    }

    /// Records a certificate; one that is already recorded stays unchanged.
    pub(super) async fn record_issued(&self, certificate: &Certificate) -> Result<(), CaError> {
        let key = issued_path(certificate);
        let txn =
            Txn::new().when(Compare::key_absent(key.as_str())).then(TxnOp::put(key, certificate.der_bytes()));
        let done = self.root_kv.txn(txn).await;
        done.map(drop).map_err(CaError::store_error("record a certificate"))
    }
}
