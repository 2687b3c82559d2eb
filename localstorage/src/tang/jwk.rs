//! Public keys as JSON Web Keys, and their thumbprints.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use p521::PublicKey;
use p521::elliptic_curve::sec1::ToSec1Point as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::curve::FIELD_BYTES;

const CURVE: &str = "P-521";
/// The algorithm of a key that a Tang server recovers with.
pub(super) const EXCHANGE: &str = "ECMR";
/// The algorithm of a key that signs advertisements.
pub(super) const SIGNATURE: &str = "ES512";

/// The name of a public key: SHA-256 of its required members, as `tang-show-keys` prints it.
///
/// *Source:* RFC 7638.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Thumbprint([u8; 32]);

/// Text that is not a thumbprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid thumbprint {text:?}: SHA-256 in base64url, 43 characters, as tang-show-keys prints it")]
pub struct InvalidThumbprint {
    text: String,
}

impl FromStr for Thumbprint {
    type Err = InvalidThumbprint;

    fn from_str(text: &str) -> Result<Thumbprint, InvalidThumbprint> {
        let bytes = decode(text).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Thumbprint).ok_or_else(|| InvalidThumbprint { text: text.to_owned() })
    }
}

impl fmt::Display for Thumbprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode(&self.0))
    }
}

impl fmt::Debug for Thumbprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Thumbprint({self})")
    }
}

/// A public key on P-521, of another kind, or a point. Members that are not used are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Jwk {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    alg: Option<String>,
    crv: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    key_ops: Vec<String>,
    kty: String,
    x: String,
    y: String,
}

impl Jwk {
    /// A point for an exchange.
    pub(super) fn of_exchange(point: &PublicKey) -> Jwk {
        Jwk { alg: Some(EXCHANGE.into()), key_ops: vec!["deriveKey".into()], ..Jwk::of_point(point) }
    }

    /// A point, without its use.
    pub(super) fn of_point(point: &PublicKey) -> Jwk {
        let encoded = point.to_sec1_point(false);
        let (x, y) = encoded.as_bytes()[1..].split_at(FIELD_BYTES);
        let (kty, crv) = ("EC".into(), CURVE.into());
        Jwk { alg: None, crv, key_ops: Vec::new(), kty, x: encode(x), y: encode(y) }
    }

    /// Reads a key on P-521; `None` for one of another kind.
    pub(super) fn parse(value: &Value) -> Option<Jwk> {
        let key: Jwk = serde_json::from_value(value.clone()).ok()?;
        (key.kty == "EC" && key.crv == CURVE).then_some(key)
    }

    /// The point; `None` unless it is on the curve, and not the identity.
    pub(super) fn point(&self) -> Option<PublicKey> {
        let mut encoded = [4; 1 + 2 * FIELD_BYTES];
        let (x, y) = encoded[1..].split_at_mut(FIELD_BYTES);
        for (coordinate, text) in [(x, &self.x), (y, &self.y)] {
            let bytes = decode(text).filter(|bytes| bytes.len() == FIELD_BYTES)?;
            coordinate.copy_from_slice(&bytes);
        }
        PublicKey::from_sec1_bytes(&encoded).ok()
    }

    pub(super) fn thumbprint(&self) -> Thumbprint {
        // The members in this order, without white space.
        let text = format!(
            r#"{{"crv":{},"kty":{},"x":{},"y":{}}}"#,
            json!(self.crv),
            json!(self.kty),
            json!(self.x),
            json!(self.y)
        );
        Thumbprint(Sha256::digest(text.as_bytes()).into())
    }

    pub(super) fn is_for(&self, algorithm: &str, operation: &str) -> bool {
        self.alg.as_deref() == Some(algorithm) && self.key_ops.iter().any(|allowed| allowed == operation)
    }
}

/// The keys on P-521 of a set; `None` if it is not a set.
pub(super) fn parse_set(value: &Value) -> Option<Vec<Jwk>> {
    Some(value.get("keys")?.as_array()?.iter().filter_map(Jwk::parse).collect())
}

pub(super) fn encode(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Base64url without padding. Bits that are left over have to be 0: each text stands for other bytes.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thumbprint_is_that_of_jose() {
        // *Source:* jose 11, `jose jwk gen -i '{"alg":"ECMR"}'` and `jose jwk thp -a S256`.
        let text = include_str!("../../testdata/tang/exchange-key.json");
        let key = Jwk::parse(&serde_json::from_str(text).unwrap()).unwrap();
        let expected = "2l_uvjJ7-agJEqReaYhUuKMTRjlvZ6i6XVwdI1NHoYY";
        assert_eq!(key.thumbprint().to_string(), expected);
        assert_eq!(key.thumbprint(), expected.parse().unwrap());
        assert!(key.point().is_some());
        for invalid in
            ["", "2l_uvjJ7-agJEqReaYhUu", &format!("{expected}A"), &expected.replace(['-', '_'], "/")]
        {
            assert!(invalid.parse::<Thumbprint>().is_err(), "{invalid}");
        }
    }

    #[test]
    fn a_point_that_is_not_on_the_curve_is_none() {
        let text = include_str!("../../testdata/tang/exchange-key.json");
        let key = Jwk::parse(&serde_json::from_str(text).unwrap()).unwrap();
        let zero = encode(&[0; FIELD_BYTES]);
        for (x, y) in [
            (&key.y, &key.x),
            (&zero, &zero),
            (&key.x, &zero),
            (&key.x, &encode(&[255; FIELD_BYTES])),
            (&key.x, &key.y[4..].to_owned()),
            (&key.x, &String::new()),
        ] {
            let wrong = Jwk { x: x.clone(), y: y.clone(), ..key.clone() };
            assert!(wrong.point().is_none(), "{wrong:?}");
        }
    }
}
