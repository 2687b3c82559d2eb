//! The keys of nodes and operators.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use pem_rfc7468::LineEnding;
use ring::rand::{SecureRandom as _, SystemRandom};
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use thiserror::Error;
use zeroize::Zeroizing;

/// The start of a public key's text.
const PREFIX: &str = "ed25519:";

/// The bytes before those of the key in its `SubjectPublicKeyInfo`.
///
/// *Source:* RFC 8410, section 4.
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// The bytes before the seed in the `PrivateKeyInfo` of version 1, which every OpenSSL reads.
///
/// *Source:* RFC 8410, section 7.
const PKCS8_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// The label of a private key in PEM.
const PEM_LABEL: &str = "PRIVATE KEY";

/// The text of a public key or a private key is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidKey {
    /// It is no public key: copy it whole, as `nodectl key new` prints it.
    #[error("not a public key: it is \"ed25519:\" and 43 letters, as `nodectl key new FILE` prints it")]
    Public,
    /// Anyone could sign for it: it is one of a few points of the curve that no private key has.
    #[error("a public key that no private key has: anyone could sign for it")]
    SmallOrder,
    /// It is no private key: make one by `nodectl key new`.
    #[error("not an Ed25519 private key in PEM: make one by `nodectl key new FILE`")]
    Private,
}

/// The identity of a node or an operator: an Ed25519 public key.
///
/// Its text is `ed25519:` and the base64url of its 32 bytes, without padding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// The key with these bytes.
    pub(crate) fn new(bytes: [u8; 32]) -> Result<Self, InvalidKey> {
        if has_small_order(&bytes) { Err(InvalidKey::SmallOrder) } else { Ok(Self(bytes)) }
    }

    /// Its bytes.
    #[cfg(feature = "node")]
    pub(crate) fn to_bytes(self) -> [u8; 32] {
        self.0
    }

    /// The key in a `SubjectPublicKeyInfo` in DER, as TLS has it.
    pub(crate) fn from_spki(der: &[u8]) -> Result<Self, InvalidKey> {
        let bytes = der.strip_prefix(&SPKI_PREFIX).and_then(|bytes| bytes.try_into().ok());
        Self::new(bytes.ok_or(InvalidKey::Public)?)
    }

    /// Its `SubjectPublicKeyInfo` in DER.
    pub(crate) fn to_spki(self) -> Vec<u8> {
        [SPKI_PREFIX.as_slice(), &self.0].concat()
    }
}

impl FromStr for PublicKey {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<Self, InvalidKey> {
        let text = text.strip_prefix(PREFIX).ok_or(InvalidKey::Public)?;
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| InvalidKey::Public)?;
        Self::new(bytes.try_into().map_err(|_| InvalidKey::Public)?)
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The points of small order, by their y coordinate in the field of 2^255 - 19, with those that are not reduced.
///
/// *Source:* Cremers and Jackson, "Prime, Order Please!" (2019), table 1 for Ed25519; libsodium, `ge25519_has_small_order`.
const SMALL_ORDER: [[u8; 32]; 7] = [
    [0; 32],
    low(1),
    [
        0x26, 0xe8, 0x95, 0x8f, 0xc2, 0xb2, 0x27, 0xb0, 0x45, 0xc3, 0xf4, 0x89, 0xf2, 0xef, 0x98, 0xf0, 0xd5,
        0xdf, 0xac, 0x05, 0xd3, 0xc6, 0x33, 0x39, 0xb1, 0x38, 0x02, 0x88, 0x6d, 0x53, 0xfc, 0x05,
    ],
    [
        0xc7, 0x17, 0x6a, 0x70, 0x3d, 0x4d, 0xd8, 0x4f, 0xba, 0x3c, 0x0b, 0x76, 0x0d, 0x10, 0x67, 0x0f, 0x2a,
        0x20, 0x53, 0xfa, 0x2c, 0x39, 0xcc, 0xc6, 0x4e, 0xc7, 0xfd, 0x77, 0x92, 0xac, 0x03, 0x7a,
    ],
    high(0xec),
    high(0xed),
    high(0xee),
];

const fn low(first: u8) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[0] = first;
    bytes
}

const fn high(first: u8) -> [u8; 32] {
    let mut bytes = [0xff; 32];
    bytes[0] = first;
    bytes[31] = 0x7f;
    bytes
}

fn has_small_order(bytes: &[u8; 32]) -> bool {
    // The highest bit is the sign of x: both points of a y are alike.
    let mut y = *bytes;
    y[31] &= 0x7f;
    SMALL_ORDER.contains(&y)
}

/// The secret half of a node's or an operator's identity.
pub struct PrivateKey {
    /// `PrivateKeyInfo` in DER.
    pkcs8: Zeroizing<Vec<u8>>,
    public: PublicKey,
}

impl PrivateKey {
    /// A new key.
    ///
    /// # Errors
    /// Those of the kernel's random numbers.
    pub fn generate() -> std::io::Result<Self> {
        let mut pkcs8 = Zeroizing::new([PKCS8_PREFIX.as_slice(), &[0; 32]].concat());
        let unavailable = |_| std::io::Error::other("no random numbers");
        SystemRandom::new().fill(&mut pkcs8[PKCS8_PREFIX.len()..]).map_err(unavailable)?;
        Self::from_pkcs8(pkcs8).map_err(std::io::Error::other)
    }

    /// The key in PEM with the label `PRIVATE KEY`, as [`to_pem`](Self::to_pem) and `openssl genpkey -algorithm ed25519` write it.
    ///
    /// # Errors
    /// See [`InvalidKey`].
    pub fn from_pem(text: &[u8]) -> Result<Self, InvalidKey> {
        let (label, der) = pem_rfc7468::decode_vec(text.trim_ascii()).map_err(|_| InvalidKey::Private)?;
        let der = Zeroizing::new(der);
        if label == PEM_LABEL { Self::from_pkcs8(der) } else { Err(InvalidKey::Private) }
    }

    fn from_pkcs8(pkcs8: Zeroizing<Vec<u8>>) -> Result<Self, InvalidKey> {
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&pkcs8).map_err(|_| InvalidKey::Private)?;
        let public = pair.public_key().as_ref().try_into().map_err(|_| InvalidKey::Private)?;
        Ok(Self { public: PublicKey::new(public)?, pkcs8 })
    }

    /// The key in PEM.
    pub fn to_pem(&self) -> Zeroizing<String> {
        let text = pem_rfc7468::encode_string(PEM_LABEL, LineEnding::LF, &self.pkcs8);
        Zeroizing::new(text.expect("a key is short"))
    }

    /// Its public key.
    pub fn public_key(&self) -> PublicKey {
        self.public
    }

    /// Its `PrivateKeyInfo` in DER.
    pub(crate) fn pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }
}

impl fmt::Debug for PrivateKey {
    /// The public key alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrivateKey").field("public", &self.public).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ring::signature::{ED25519, UnparsedPublicKey};

    use super::*;

    /// By `openssl genpkey -algorithm ed25519` of OpenSSL 3, and its public key by `openssl pkey -pubout`.
    const OPENSSL: &str = "-----BEGIN PRIVATE KEY-----\n\
        MC4CAQAwBQYDK2VwBCIEIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f\n\
        -----END PRIVATE KEY-----\n";

    #[test]
    fn a_key_of_openssl_is_read_and_written_as_it_was() {
        let key = PrivateKey::from_pem(OPENSSL.as_bytes()).expect("a key");
        assert_eq!(key.to_pem().as_str(), OPENSSL);
        assert_eq!(key.public_key().to_string(), "ed25519:A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg");
        assert_eq!(PublicKey::from_spki(&key.public_key().to_spki()), Ok(key.public_key()));
        let shown = format!("{key:?}");
        assert!(
            shown.contains("ed25519:A6EH") && !shown.contains("30, 2e") && !shown.contains("48,"),
            "{shown}"
        );
        for text in ["", "-----BEGIN PRIVATE KEY-----", &OPENSSL.replace("PRIVATE", "PUBLIC"), &OPENSSL[..80]]
        {
            assert_eq!(PrivateKey::from_pem(text.as_bytes()).map(|_| ()), Err(InvalidKey::Private), "{text}");
        }
    }

    #[test]
    fn a_new_key_is_another_one() {
        let [one, other] = [(); 2].map(|()| PrivateKey::generate().expect("random numbers"));
        assert_ne!(one.public_key(), other.public_key());
        assert_eq!(
            PrivateKey::from_pem(one.to_pem().as_bytes()).map(|key| key.public_key()),
            Ok(one.public_key())
        );
    }

    #[test]
    fn the_text_of_a_key_has_one_form() {
        let text = "ed25519:A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg";
        assert_eq!(text.parse::<PublicKey>().map(|key| key.to_string()).as_deref(), Ok(text));
        let same_bits = "ed25519:A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbh";
        let standard = text.replace('_', "/");
        let padded = format!("{text}=");
        for text in
            ["", "ed25519:", &text[8..], &text[..50], &padded, &standard, same_bits, &text.to_uppercase()]
        {
            assert_eq!(text.parse::<PublicKey>(), Err(InvalidKey::Public), "{text}");
        }
    }

    /// Each of these is a key for which a signature is forged without a private key, or one that is refused anyway.
    #[test]
    fn a_key_for_which_anyone_can_sign_is_refused() {
        // The signature whose point is neutral and whose scalar is 0 is valid if the hash of the message times the key is neutral.
        let mut forged = [0; 64];
        forged[0] = 1;
        let mut forgeable = 0;
        for y in SMALL_ORDER {
            for sign in [0, 0x80] {
                let mut bytes = y;
                bytes[31] |= sign;
                let key = UnparsedPublicKey::new(&ED25519, bytes);
                forgeable += usize::from((0..=255_u8).any(|message| key.verify(&[message], &forged).is_ok()));
                assert_eq!(PublicKey::new(bytes), Err(InvalidKey::SmallOrder), "{bytes:?}");
            }
        }
        // The test would find a wrong digit in the table: there are at least the eight points of the small subgroup.
        assert!(forgeable >= 8, "{forgeable}");
    }

    proptest! {
        #[test]
        fn each_key_that_is_parsed_has_its_text(bytes: [u8; 32], text in "(ed25519:)?[A-Za-z0-9_=-]{0,50}") {
            if let Ok(key) = PublicKey::new(bytes) {
                prop_assert_eq!(key.to_string().parse(), Ok(key));
                prop_assert_eq!(PublicKey::from_spki(&key.to_spki()), Ok(key));
            }
            if let Ok(key) = text.parse::<PublicKey>() {
                prop_assert_eq!(key.to_string(), text);
            }
        }

        #[test]
        fn no_text_makes_the_reader_of_private_keys_panic(text: Vec<u8>, at in 0..OPENSSL.len(), byte: u8) {
            let _ = PrivateKey::from_pem(&text);
            let mut key = OPENSSL.as_bytes().to_vec();
            key[at] = byte;
            let _ = PrivateKey::from_pem(&key);
        }
    }
}
