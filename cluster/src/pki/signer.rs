//! The authority's key with its certificate, and what is made with them.

use std::time::{Duration, SystemTime};

use nodekeel_localstorage::pki::{Certificate, PrivateKey, PublicKey, RevocationList};
use rcgen::{
    CertificateRevocationListParams, Issuer, KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber,
    date_time_ymd,
};
use zeroize::Zeroize as _;

use super::leaf::subject_key;
use super::{AuthorityError, Leaf};

/// Seconds from 1970 to the end of 9999, after which no date can be written.
const LAST_SECOND: u64 = 253_402_300_799;

/// A certificate on the list of revoked ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Revoked {
    /// Its serial number, as it is in the certificate.
    pub(super) serial: Vec<u8>,
    /// When it was revoked, in seconds since 1970 by the clock of who did it.
    pub(super) at: u64,
}

/// A key with the certificate of an authority, known to belong together.
#[derive(Debug)]
pub(super) struct Signer {
    key: PrivateKey,
    certificate: Certificate,
}

impl Signer {
    /// Checks that the two are of one pair, and that the certificate is an authority's own.
    pub(super) fn new(key: PrivateKey, certificate: Certificate) -> Result<Signer, AuthorityError> {
        if !certificate.is_ca() || !certificate.is_signed_by(&certificate) {
            return Err(AuthorityError::NotAnAuthority { key: super::CA });
        }
        if key.public() != certificate.public() {
            return Err(AuthorityError::KeyMismatch);
        }
        Ok(Signer { key, certificate })
    }

    pub(super) fn key(&self) -> &PrivateKey {
        &self.key
    }

    pub(super) fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// A certificate for this public key.
    pub(super) fn certify(&self, public: PublicKey, leaf: &Leaf) -> Result<Certificate, AuthorityError> {
        let (params, subject) = (leaf.params()?, subject_key(public)?);
        let der =
            self.sign("a certificate", |issuer| Ok(params.signed_by(&subject, issuer)?.der().to_vec()))?;
        let certificate = Certificate::from_der(&der)
            .map_err(|error| AuthorityError::make("a certificate")(error.into()))?;
        // Whatever the library made of the authority's name: what is handed out is known to verify.
        match certificate.is_signed_by(&self.certificate) {
            true => Ok(certificate),
            false => Err(AuthorityError::make("a certificate")("it does not verify".into())),
        }
    }

    /// A list of revoked certificates, as of now by this machine's clock.
    pub(super) fn list(&self, number: u64, revoked: &[Revoked]) -> Result<RevocationList, AuthorityError> {
        let entry = |revoked: &Revoked| RevokedCertParams {
            serial_number: SerialNumber::from_slice(&revoked.serial),
            revocation_time: date_time_ymd(1970, 1, 1) + Duration::from_secs(revoked.at.min(LAST_SECOND)),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            // It has to be before the other; a clock that says otherwise is wrong.
            this_update: date_time_ymd(1970, 1, 1) + Duration::from_secs(now().min(LAST_SECOND - 1)),
            next_update: date_time_ymd(1970, 1, 1) + Duration::from_secs(LAST_SECOND),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: revoked.iter().map(entry).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let what = "a list of revoked certificates";
        let der = self.sign(what, |issuer| Ok(params.signed_by(issuer)?.der().to_vec()))?;
        RevocationList::from_der(&der, &self.certificate)
            .map_err(|error| AuthorityError::make(what)(error.into()))
    }

    fn sign(
        &self,
        what: &'static str,
        sign: impl FnOnce(&Issuer<'_, &KeyPair>) -> Result<Vec<u8>, rcgen::Error>,
    ) -> Result<Vec<u8>, AuthorityError> {
        let failed = |error: rcgen::Error| AuthorityError::make(what)(error.into());
        let mut pair = KeyPair::try_from(self.key.expose_pkcs8()).map_err(failed)?;
        let signed =
            Issuer::from_ca_cert_der(&self.certificate.der().into(), &pair).and_then(|issuer| sign(&issuer));
        pair.zeroize();
        signed.map_err(failed)
    }
}

/// Seconds since 1970 by this machine's clock, which may be wrong.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
