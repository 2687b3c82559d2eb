//! The CA's key and certificate, and what they sign.

use std::time::{Duration, SystemTime};

use nodekeel_localstorage::pki::{Certificate, PrivateKey, PublicKey, RevocationList};
use rcgen::{
    CertificateRevocationListParams, Issuer, KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber,
    date_time_ymd,
};
use zeroize::Zeroize as _;

use super::certificate_spec::subject_public_key;
use super::{CaError, CertificateSpec};

/// Seconds from 1970 to the end of 9999, after which no date can be written.
const LAST_SECOND: u64 = 253_402_300_799;

/// An entry of the list of revoked certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RevokedEntry {
    /// The serial number, as in the certificate.
    pub(super) serial: Vec<u8>,
    /// The time of the revocation, in seconds since 1970 by the clock of the revoking node.
    pub(super) at: u64,
}

/// A CA's private key and certificate, checked to match.
#[derive(Debug)]
pub(super) struct CaSigner {
    private_key: PrivateKey,
    certificate: Certificate,
}

impl CaSigner {
    /// Checks that key and certificate match, and that the certificate is a self-signed CA certificate.
    pub(super) fn new(key: PrivateKey, certificate: Certificate) -> Result<CaSigner, CaError> {
        CaSigner::check_certificate(&certificate)?;
        if key.public_key() != certificate.public_key() {
            return Err(CaError::KeyMismatch);
        }
        Ok(CaSigner { private_key: key, certificate })
    }

    /// Checks that the certificate is a self-signed CA certificate.
    pub(super) fn check_certificate(certificate: &Certificate) -> Result<(), CaError> {
        match certificate.is_ca() && certificate.is_signed_by(certificate) {
            true => Ok(()),
            false => Err(CaError::NotACa { key: super::CA_CERT_PATH }),
        }
    }

    pub(super) fn private_key(&self) -> &PrivateKey {
        &self.private_key
    }

    pub(super) fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// Issues a certificate for this public key.
    pub(super) fn sign_certificate(
        &self,
        public: PublicKey,
        spec: &CertificateSpec,
    ) -> Result<Certificate, CaError> {
        let (params, subject) = (spec.to_params(&self.certificate)?, subject_public_key(public)?);
        let der = self.sign_with_issuer("a certificate", |issuer| {
            Ok(params.signed_by(&subject, issuer)?.der().to_vec())
        })?;
        let certificate = Certificate::from_der(&der)
            .map_err(|error| CaError::create_error("a certificate")(error.into()))?;
        // The library may encode the CA's name in another way: a certificate is returned only if it verifies.
        if certificate.is_signed_by(&self.certificate) {
            Ok(certificate)
        } else {
            Err(CaError::create_error("a certificate")("its signature does not verify".into()))
        }
    }

    /// Signs a list of revoked certificates, dated by this host's clock.
    pub(super) fn sign_revocation_list(
        &self,
        number: u64,
        revoked: &[RevokedEntry],
    ) -> Result<RevocationList, CaError> {
        let entry = |revoked: &RevokedEntry| RevokedCertParams {
            serial_number: SerialNumber::from_slice(&revoked.serial),
            revocation_time: date_time_ymd(1970, 1, 1) + Duration::from_secs(revoked.at.min(LAST_SECOND)),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            // It has to precede the next update, also if the clock is wrong.
            this_update: date_time_ymd(1970, 1, 1) + Duration::from_secs(unix_time().min(LAST_SECOND - 1)),
            next_update: date_time_ymd(1970, 1, 1) + Duration::from_secs(LAST_SECOND),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: revoked.iter().map(entry).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let what = "a list of revoked certificates";
        let der = self.sign_with_issuer(what, |issuer| Ok(params.signed_by(issuer)?.der().to_vec()))?;
        RevocationList::from_der(&der, &self.certificate)
            .map_err(|error| CaError::create_error(what)(error.into()))
    }

    fn sign_with_issuer(
        &self,
        what: &'static str,
        sign: impl FnOnce(&Issuer<'_, &KeyPair>) -> Result<Vec<u8>, rcgen::Error>,
    ) -> Result<Vec<u8>, CaError> {
        let failed = |error: rcgen::Error| CaError::create_error(what)(error.into());
        let mut pair = KeyPair::try_from(self.private_key.expose_pkcs8()).map_err(failed)?;
        let signed = Issuer::from_ca_cert_der(&self.certificate.der_bytes().into(), &pair)
            .and_then(|issuer| sign(&issuer));
        // Also after a failure: rcgen's pair has a copy of the private key.
        pair.zeroize();
        signed.map_err(failed)
    }
}

/// Seconds since 1970 by this host's clock, which may be wrong.
pub(super) fn unix_time() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
