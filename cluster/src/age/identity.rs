//! Private keys.

use std::fmt;

use ring::error::Unspecified;
use ring::rand::{SecureRandom as _, SystemRandom};
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::{Zeroize as _, Zeroizing};

use super::{Recipient, SECRET_HRP, bech32, derive_key};

/// A private key: it opens the files of its recipient. It is wiped when dropped, and is never printed.
pub(crate) struct Identity {
    secret: StaticSecret,
    recipient: Recipient,
}

impl Identity {
    /// A new one. An error if the machine has no random numbers.
    pub(crate) fn generate() -> Result<Identity, Unspecified> {
        let mut bytes = Zeroizing::new([0; 32]);
        SystemRandom::new().fill(&mut *bytes)?;
        Ok(Identity::from_secret(StaticSecret::from(*bytes)))
    }

    fn from_secret(secret: StaticSecret) -> Identity {
        let recipient = Recipient::from_key(PublicKey::from(&secret).to_bytes());
        Identity { secret, recipient }
    }

    /// The key in the file of an identity, as `age-keygen` and [`to_file`](Self::to_file) write it; `None` if it has none.
    pub(crate) fn from_file(content: &[u8]) -> Option<Identity> {
        let text = std::str::from_utf8(content).ok()?;
        let line = text.lines().find(|line| !line.is_empty() && !line.starts_with('#'))?;
        let lower = Zeroizing::new(line.trim_end().to_ascii_lowercase());
        let mut bytes = bech32::decode(SECRET_HRP, &lower)?;
        let identity = Identity::from_secret(StaticSecret::from(bytes));
        bytes.zeroize();
        Some(identity)
    }

    /// The file of the identity, for `age -d -i`.
    pub(crate) fn to_file(&self) -> Zeroizing<Vec<u8>> {
        let mut text = bech32::encode(SECRET_HRP, self.secret.as_bytes());
        text.make_ascii_uppercase();
        let (intro, recipient) = ("# public key: ", self.recipient.text.as_bytes());
        let length = intro.len() + recipient.len() + text.len() + 2;
        let mut file = Zeroizing::new(Vec::with_capacity(length));
        for part in [intro.as_bytes(), recipient, b"\n", text.as_bytes(), b"\n"] {
            file.extend_from_slice(part);
        }
        file
    }

    /// The public key.
    pub(crate) fn recipient(&self) -> &Recipient {
        &self.recipient
    }

    /// The key that a sender with this share has derived with the recipient.
    pub(super) fn agree(&self, share: [u8; 32], label: &str) -> Result<Zeroizing<[u8; 32]>, Unspecified> {
        let shared = self.secret.diffie_hellman(&PublicKey::from(share));
        if !shared.was_contributory() {
            return Err(Unspecified);
        }
        derive_key(&[share, self.recipient.key].concat(), shared.as_bytes(), label)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Identity").field(&self.recipient.text).finish()
    }
}
