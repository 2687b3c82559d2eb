//! Advertisements: the keys of a Tang server, signed.

use p521::ecdsa::signature::Verifier as _;
use p521::ecdsa::{Signature, VerifyingKey};
use serde::Deserialize;
use serde_json::Value;

use super::binding::Binding;
use super::error::TangError;
use super::jwk::{EXCHANGE, Jwk, SIGNATURE, Thumbprint, decode, parse_set};

/// The keys that a Tang server advertises, signed by a key that the caller knows.
#[derive(Clone, Debug)]
pub struct Advertisement {
    pub(super) signer: Jwk,
    /// The first one is preferred.
    pub(super) exchange_keys: Vec<Jwk>,
}

/// A JWS in its flattened or its general form.
#[derive(Deserialize)]
struct Jws {
    payload: String,
    protected: Option<String>,
    signature: Option<String>,
    #[serde(default)]
    signatures: Vec<JwsSignature>,
}

#[derive(Deserialize)]
struct JwsSignature {
    protected: String,
    signature: String,
}

impl Advertisement {
    /// The path of the advertisement that this key has signed, also once the server signs with a newer one.
    pub fn path(signer: &Thumbprint) -> String {
        format!("/adv/{signer}")
    }

    /// Reads an advertisement. The key with this thumbprint must have signed it: the rest of the answer is worth nothing
    /// before. A server that signs with a newer key leaves the older one out; then it is taken from the bindings.
    ///
    /// # Errors
    /// [`TangError::Answer`], [`TangError::NotSigned`], [`TangError::NoExchangeKey`].
    pub fn verify<'a>(
        answer: &[u8],
        signer: &Thumbprint,
        bindings: impl IntoIterator<Item = &'a Binding>,
    ) -> Result<Advertisement, TangError> {
        let jws: Jws =
            serde_json::from_slice(answer).map_err(|_| TangError::Answer("it is no signed JSON"))?;
        let payload = decode(&jws.payload).and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
        let keys = payload.as_ref().and_then(parse_set).ok_or(TangError::Answer("it has no set of keys"))?;
        let is_signer = |key: &&Jwk| key.thumbprint() == *signer && key.is_for(SIGNATURE, "verify");
        let mut known = bindings.into_iter().flat_map(|binding| &binding.keys);
        let not_signed = || TangError::NotSigned { signer: *signer };
        let signer = keys.iter().find(is_signer).or_else(|| known.find(is_signer)).ok_or_else(not_signed)?;
        let point = signer.point().ok_or(TangError::Answer("its signing key is not on the curve"))?;
        let verifier = VerifyingKey::from(point);
        let flattened = jws.protected.zip(jws.signature);
        let flattened = flattened.map(|(protected, signature)| JwsSignature { protected, signature });
        let mut signatures = jws.signatures.into_iter().chain(flattened);
        if !signatures.any(|signature| signature.is_by(&verifier, &jws.payload)) {
            return Err(not_signed());
        }
        let signer = signer.clone();
        let is_exchange = |key: &Jwk| key.is_for(EXCHANGE, "deriveKey") && key.point().is_some();
        let exchange_keys: Vec<_> = keys.into_iter().filter(is_exchange).collect();
        if exchange_keys.is_empty() {
            return Err(TangError::NoExchangeKey);
        }
        Ok(Advertisement { signer, exchange_keys })
    }

    /// Returns whether the server advertises the key of a binding. If not, the operator has replaced it, and may remove it
    /// soon: bind again.
    pub fn has_key_of(&self, binding: &Binding) -> bool {
        self.exchange_keys.iter().any(|key| key.thumbprint() == binding.key_id())
    }
}

impl JwsSignature {
    fn is_by(&self, key: &VerifyingKey, payload: &str) -> bool {
        let header = decode(&self.protected).and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
        // An extension that is critical changes what the signature means.
        let is_known = header.is_some_and(|header| {
            header.get("alg").and_then(Value::as_str) == Some(SIGNATURE) && header.get("crit").is_none()
        });
        let signature = decode(&self.signature).and_then(|bytes| Signature::from_slice(&bytes).ok());
        let signed = format!("{}.{payload}", self.protected);
        is_known && signature.is_some_and(|signature| key.verify(signed.as_bytes(), &signature).is_ok())
    }
}
