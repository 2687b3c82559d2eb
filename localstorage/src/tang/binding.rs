//! Bindings: secrets that are encrypted for a Tang server, and their recovery.

use std::fmt;

use aes_gcm::aead::{Aead as _, Payload};
use aes_gcm::{Aes256Gcm, KeyInit as _, Nonce};
use p521::{PublicKey, SecretKey};
use rustix::rand::{GetRandomFlags, getrandom};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use super::advertisement::Advertisement;
use super::curve::{CONTENT_ENCRYPTION, KEY_BYTES, derive_key, multiply, public_key, random_scalar};
use super::error::TangError;
use super::jwk::{Jwk, Thumbprint, decode, encode, parse_set};

const NONCE_BYTES: usize = 12;
const TAG_BYTES: usize = 16;
/// The largest text of a binding, in bytes: clevis writes the server's whole advertisement into it.
const TEXT_LIMIT: usize = 256 << 10;

/// A secret that is encrypted for a Tang server: a JWE in its compact form, as clevis writes and reads it.
#[derive(Clone)]
pub struct Binding {
    text: String,
    url: String,
    /// The server's keys when the secret was bound: the exchange key, and the one that had signed it.
    pub(super) keys: Vec<Jwk>,
    key_id: Thumbprint,
    server: PublicKey,
    /// C.
    client: PublicKey,
    ciphertext: Ciphertext,
}

#[derive(Clone)]
struct Ciphertext {
    nonce: [u8; NONCE_BYTES],
    /// With the tag at its end.
    bytes: Vec<u8>,
}

/// Without the ciphertext, which says nothing to people.
impl fmt::Debug for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Binding")
            .field("url", &self.url)
            .field("key_id", &self.key_id)
            .finish_non_exhaustive()
    }
}

/// The name of a random secret, or of a binding, among others: 32 bits of a one-way function, which tell nothing else about a secret of 128
/// bits or more.
pub fn secret_id(secret: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(b"nodekeel localstorage: name of a bound secret");
    hash.update(secret);
    hash.finalize()[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Advertisement {
    /// Encrypts a secret for the server, which is at this URL.
    ///
    /// # Errors
    /// [`TangError::Random`].
    pub fn bind(&self, url: &str, secret: &[u8]) -> Result<Binding, TangError> {
        let exchange = self.exchange_keys.first().ok_or(TangError::NoExchangeKey)?;
        let server = exchange.point().ok_or(TangError::NoExchangeKey)?;
        let ephemeral = random_scalar()?;
        let shared = public_key(&multiply(&server, &ephemeral)).ok_or(TangError::NoExchangeKey)?;
        let header = json!({
            "alg": "ECDH-ES",
            "clevis": {
                "pin": "tang",
                "tang": { "adv": { "keys": [exchange, self.signer] }, "url": url },
            },
            "enc": CONTENT_ENCRYPTION,
            "epk": Jwk::of_point(&ephemeral.public_key()),
            "kid": exchange.thumbprint().to_string(),
        });
        let header = encode(header.to_string().as_bytes());
        let mut nonce = [0; NONCE_BYTES];
        getrandom(&mut nonce, GetRandomFlags::empty()).map_err(|error| TangError::Random(error.into()))?;
        let payload = Payload { msg: secret, aad: header.as_bytes() };
        let bytes = cipher(&derive_key(&shared)).encrypt(&Nonce::from(nonce), payload);
        let bytes = bytes.map_err(|_| TangError::Binding("the secret is too long"))?;
        let (encrypted, tag) = bytes.split_at(bytes.len() - TAG_BYTES);
        let text = format!("{header}..{}.{}.{}", encode(&nonce), encode(encrypted), encode(tag));
        Binding::parse(&text)
    }
}

impl Binding {
    /// Reads a binding.
    ///
    /// # Errors
    /// [`TangError::Binding`]. A changed text may be read, and is found by [`Recovery::finish`].
    pub fn parse(text: &str) -> Result<Binding, TangError> {
        let text = text.trim_end_matches('\n');
        let damaged = TangError::Binding;
        if text.len() > TEXT_LIMIT {
            return Err(damaged("it is too long"));
        }
        let parts: Vec<_> = text.split('.').collect();
        // The key is agreed on, and so there is no encrypted one.
        let [header, "", nonce, encrypted, tag] = parts[..] else {
            return Err(damaged("it is no JWE for a Tang server"));
        };
        let header = decode(header).and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
        let header = header.ok_or(damaged("its header is no JSON"))?;
        let text_of = |name: &str| header.get(name).and_then(Value::as_str);
        let is_known = text_of("alg") == Some("ECDH-ES") && text_of("enc") == Some(CONTENT_ENCRYPTION);
        if !is_known || ["apu", "apv", "crit", "zip"].iter().any(|name| header.get(name).is_some()) {
            return Err(damaged("its encryption is unknown"));
        }
        let clevis = header.get("clevis").filter(|clevis| clevis["pin"] == "tang");
        let tang = clevis.and_then(|clevis| clevis.get("tang")).ok_or(damaged("it has no Tang server"))?;
        let url = tang["url"].as_str().ok_or(damaged("it has no URL"))?.to_owned();
        let keys = parse_set(&tang["adv"]).ok_or(damaged("it has no keys of the server"))?;
        let key_id = text_of("kid").and_then(|text| text.parse().ok()).ok_or(damaged("it names no key"))?;
        let server = keys.iter().find(|key| key.thumbprint() == key_id).and_then(Jwk::point);
        let server = server.ok_or(damaged("it does not have the key that it names"))?;
        let client = header.get("epk").and_then(Jwk::parse).and_then(|key| key.point());
        let client = client.ok_or(damaged("its ephemeral key is invalid"))?;
        let nonce = decode(nonce).and_then(|bytes| bytes.try_into().ok());
        let nonce = nonce.ok_or(damaged("its initialization vector is invalid"))?;
        let tag = decode(tag).filter(|tag| tag.len() == TAG_BYTES);
        let (Some(mut bytes), Some(tag)) = (decode(encrypted), tag) else {
            return Err(damaged("its ciphertext is invalid"));
        };
        bytes.extend(tag);
        let ciphertext = Ciphertext { nonce, bytes };
        Ok(Binding { text: text.to_owned(), url, keys, key_id, server, client, ciphertext })
    }

    /// The JWE: one line, for `clevis decrypt` too.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The URL of the server when the secret was bound.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The thumbprint of the server's exchange key.
    pub fn key_id(&self) -> Thumbprint {
        self.key_id
    }

    /// Begins a recovery. Each one sends another point.
    ///
    /// # Errors
    /// [`TangError::Random`].
    pub fn start_recovery(&self) -> Result<Recovery<'_>, TangError> {
        loop {
            let blinding = random_scalar()?;
            let sent = self.client.to_projective() + blinding.public_key().to_projective();
            // The sum is the identity only if e·G is -C, which never happens by chance.
            if let Some(sent) = public_key(&sent) {
                return Ok(Recovery { binding: self, blinding, sent });
            }
        }
    }
}

/// A recovery that waits for the server's answer.
pub struct Recovery<'a> {
    binding: &'a Binding,
    /// e.
    blinding: SecretKey,
    /// X.
    sent: PublicKey,
}

impl fmt::Debug for Recovery<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recovery").field("binding", &self.binding).finish_non_exhaustive()
    }
}

impl Recovery<'_> {
    /// The type of the request's body.
    pub const CONTENT_TYPE: &'static str = "application/jwk+json";

    /// The path to which the request is posted.
    pub fn path(&self) -> String {
        format!("/rec/{}", self.binding.key_id)
    }

    /// The body of the request.
    pub fn request(&self) -> String {
        json!(Jwk::of_exchange(&self.sent)).to_string()
    }

    /// Decrypts the secret by the server's answer.
    ///
    /// # Errors
    /// [`TangError::Answer`], [`TangError::WrongAnswer`].
    pub fn finish(self, answer: &[u8]) -> Result<Zeroizing<Vec<u8>>, TangError> {
        let answer: Value = serde_json::from_slice(answer).map_err(|_| TangError::Answer("it is no JSON"))?;
        let point = Jwk::parse(&answer).and_then(|key| key.point());
        let point = point.ok_or(TangError::Answer("it is no point on P-521"))?;
        let unblinding = multiply(&self.binding.server, &self.blinding);
        let shared = Zeroizing::new(point.to_projective() - *unblinding);
        let key = derive_key(&public_key(&shared).ok_or(TangError::WrongAnswer)?);
        let Ciphertext { nonce, bytes } = &self.binding.ciphertext;
        let header = self.binding.text.split('.').next().unwrap_or_default();
        let payload = Payload { msg: bytes, aad: header.as_bytes() };
        let secret = cipher(&key).decrypt(&Nonce::from(*nonce), payload);
        secret.map(Zeroizing::new).map_err(|_| TangError::WrongAnswer)
    }
}

fn cipher(key: &[u8; KEY_BYTES]) -> Aes256Gcm {
    Aes256Gcm::new(key.into())
}
