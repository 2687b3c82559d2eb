//! Points and scalars of P-521.

use p521::elliptic_curve::point::AffineCoordinates as _;
use p521::{ProjectivePoint, PublicKey, SecretKey};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest as _, Sha256};
use zeroize::{Zeroize as _, Zeroizing};

use super::error::TangError;

/// The length of a coordinate and of a scalar, in bytes.
pub(super) const FIELD_BYTES: usize = 66;
/// The length of a key of A256GCM, in bytes.
pub(super) const KEY_BYTES: usize = 32;

/// The content encryption of a binding, by its name in RFC 7518.
pub(super) const CONTENT_ENCRYPTION: &str = "A256GCM";

/// A random scalar that is not 0.
pub(super) fn random_scalar() -> Result<SecretKey, TangError> {
    let mut bytes = Zeroizing::new([0; FIELD_BYTES]);
    loop {
        getrandom(&mut bytes[..], GetRandomFlags::empty())
            .map_err(|error| TangError::Random(error.into()))?;
        // A scalar has 521 bits. One of them that is too large is as likely as 2^-260: the loop ends.
        bytes[0] &= 1;
        if let Ok(scalar) = SecretKey::from_slice(&bytes[..]) {
            return Ok(scalar);
        }
    }
}

/// `scalar · point`.
pub(super) fn multiply(point: &PublicKey, scalar: &SecretKey) -> Zeroizing<ProjectivePoint> {
    Zeroizing::new(point.to_projective() * *scalar.to_nonzero_scalar())
}

/// The point, unless it is the identity, which would make a key that everybody knows.
pub(super) fn public_key(point: &ProjectivePoint) -> Option<PublicKey> {
    PublicKey::try_from(point).ok()
}

/// The key of a binding: Concat KDF over the x coordinate, without data about the parties.
///
/// *Source:* RFC 7518, 4.6.2.
pub(super) fn derive_key(shared: &PublicKey) -> Zeroizing<[u8; KEY_BYTES]> {
    let mut x = Zeroizing::new([0; FIELD_BYTES]);
    let mut coordinate = shared.as_affine().x();
    x.copy_from_slice(&coordinate);
    coordinate.zeroize();
    let mut hash = Sha256::new();
    hash.update(1_u32.to_be_bytes());
    hash.update(&x[..]);
    for data in [CONTENT_ENCRYPTION.as_bytes(), &[], &[]] {
        hash.update(u32::try_from(data.len()).unwrap_or_default().to_be_bytes());
        hash.update(data);
    }
    hash.update((8 * KEY_BYTES as u32).to_be_bytes());
    Zeroizing::new(hash.finalize().into())
}
