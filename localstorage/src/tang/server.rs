//! A Tang server without its sockets, and checks over any answer.

use p521::SecretKey;
use p521::ecdsa::SigningKey;
use p521::ecdsa::signature::Signer as _;
use serde_json::{Value, json};

use super::advertisement::Advertisement;
use super::binding::Binding;
use super::curve::{multiply, public_key, random_scalar};
use super::jwk::{Jwk, SIGNATURE, Thumbprint, encode};

/// The keys of a Tang server in memory, for tests.
pub struct TangKeys {
    signing: SecretKey,
    exchange: SecretKey,
}

impl std::fmt::Debug for TangKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TangKeys").field("signer", &self.signer()).finish_non_exhaustive()
    }
}

impl TangKeys {
    /// New keys.
    ///
    /// # Panics
    /// The kernel has no random numbers.
    pub fn generate() -> TangKeys {
        let scalar = || random_scalar().expect("random numbers");
        TangKeys { signing: scalar(), exchange: scalar() }
    }

    /// A new signing key, with the exchange key of another server.
    #[cfg(test)]
    pub(super) fn with_exchange_key(scalar: &[u8]) -> TangKeys {
        TangKeys { exchange: SecretKey::from_slice(scalar).expect("a scalar"), ..TangKeys::generate() }
    }

    /// The thumbprint of the key that signs.
    pub fn signer(&self) -> Thumbprint {
        self.signing_jwk().thumbprint()
    }

    fn signing_jwk(&self) -> Jwk {
        let mut key = json!(Jwk::of_point(&self.signing.public_key()));
        key["alg"] = SIGNATURE.into();
        key["key_ops"] = json!(["verify"]);
        Jwk::parse(&key).expect("a key")
    }

    /// The answer to `GET /adv`.
    pub fn advertise(&self) -> String {
        let exchange = Jwk::of_exchange(&self.exchange.public_key());
        self.sign(&json!({ "keys": [self.signing_jwk(), exchange] }))
    }

    /// Signs a set of keys.
    pub(super) fn sign(&self, keys: &Value) -> String {
        let payload = encode(keys.to_string().as_bytes());
        let protected = encode(json!({ "alg": SIGNATURE, "cty": "jwk-set+json" }).to_string().as_bytes());
        let signing = SigningKey::from(self.signing.clone());
        let signature: p521::ecdsa::Signature = signing.sign(format!("{protected}.{payload}").as_bytes());
        json!({ "payload": payload, "protected": protected, "signature": encode(&signature.to_bytes()) })
            .to_string()
    }

    /// The answer to `POST /rec/KID`; `None` if the path names another key, or the body is no point.
    pub fn recover(&self, path: &str, body: &[u8]) -> Option<String> {
        let kid = Jwk::of_point(&self.exchange.public_key()).thumbprint();
        let sent = Jwk::parse(&serde_json::from_slice(body).ok()?)?.point()?;
        let answer = public_key(&multiply(&sent, &self.exchange))?;
        (path == format!("/rec/{kid}")).then(|| json!(Jwk::of_exchange(&answer)).to_string())
    }
}

/// Checks that no answer of a server and no text of a binding makes the parsers panic, and that an answer that nobody has
/// signed or computed is refused.
///
/// # Panics
/// If the check fails.
pub fn fuzz_tang_answer(bytes: &[u8]) {
    let keys = TangKeys::generate();
    let verify = |answer: &[u8]| Advertisement::verify(answer, &keys.signer(), []);
    assert!(verify(bytes).is_err(), "an advertisement of these new keys");
    let binding = verify(keys.advertise().as_bytes()).and_then(|adv| adv.bind("http://tang", b"secret"));
    let binding = binding.expect("bound");
    let recovery = binding.start_recovery().expect("random numbers");
    assert!(recovery.finish(bytes).is_err(), "an answer of these new keys");
    let text = String::from_utf8_lossy(bytes);
    // Also as a header and as a payload, which is most of what a server decides.
    for text in [text.to_string(), format!("{}..AAAAAAAAAAAAAAAA.AA.AAAAAAAAAAAAAAAAAAAAAA", encode(bytes))] {
        if let Ok(binding) = Binding::parse(&text) {
            assert!(text.starts_with(binding.as_str()));
            let _ = binding.start_recovery().expect("random numbers").request();
        }
    }
    if let Ok(payload) = serde_json::from_slice::<Value>(bytes) {
        let _ = verify(keys.sign(&payload).as_bytes());
    }
}
