//! A writer and a reader of age's file format, version 1, for X25519 recipients.
//!
//! The crate `age` would bring some sixty crates, most of them for translations of its messages, and second versions of several
//! that this workspace has. The part of the format that is needed is in this folder, by primitives that are built here anyway. Only
//! a lasting key is not one of ring's, which has ephemeral ones alone: it is by `x25519-dalek`.
//!
//! *Source:* <https://age-encryption.org/v1>, and BIP 173 for the texts of keys.

mod bech32;
mod identity;
mod open;

use std::fmt;
use std::str::FromStr;

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::error::Unspecified;
use ring::rand::{SecureRandom as _, SystemRandom};
use ring::{hkdf, hmac};
use thiserror::Error;
use zeroize::Zeroizing;

pub(crate) use identity::Identity;
pub(crate) use open::OpenError;
#[cfg(any(test, feature = "testing"))]
pub(crate) use open::check_arbitrary_file;

/// The first line of each file.
pub(crate) const INTRO: &str = "age-encryption.org/v1\n";
const FILE_KEY_BYTES: usize = 16;
const PAYLOAD_NONCE_BYTES: usize = 16;
/// The plaintext of each chunk of the payload but the last one.
const CHUNK_BYTES: usize = 64 << 10;
/// The purpose of the key that a recipient and a sender derive from their shared secret.
const STANZA_LABEL: &str = "age-encryption.org/v1/X25519";
const HRP: &str = "age";
/// The text of a private key starts with it.
const SECRET_HRP: &str = "age-secret-key-";

/// The public key for which a file is encrypted: `age1…`, as `age-keygen` prints it.
///
/// ```
/// use nodekeel_cluster::backup::Recipient;
///
/// let text = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p";
/// assert_eq!(text.parse::<Recipient>()?.to_string(), text);
/// # Ok::<(), nodekeel_cluster::backup::InvalidRecipient>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipient {
    key: [u8; 32],
    /// In lower case.
    text: String,
}

/// A text that is no recipient.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidRecipient {
    /// It is of another kind, or mistyped.
    #[error(
        "not an age recipient: {text:?}; it starts with age1 and has 62 characters, as `age-keygen -o KEY` prints it"
    )]
    Malformed {
        /// The text.
        text: String,
    },
    /// It is the private key, which the text of this error does not have.
    #[error("an age private key instead of its recipient: `age-keygen -y KEY` prints the recipient, age1…")]
    PrivateKey,
}

impl Recipient {
    fn from_key(key: [u8; 32]) -> Recipient {
        Recipient { key, text: bech32::encode(HRP, &key).to_string() }
    }
}

impl FromStr for Recipient {
    type Err = InvalidRecipient;

    fn from_str(text: &str) -> Result<Recipient, InvalidRecipient> {
        let lower = text.to_ascii_lowercase();
        if lower.starts_with(SECRET_HRP) {
            return Err(InvalidRecipient::PrivateKey);
        }
        let is_one_case = text == lower || text == text.to_ascii_uppercase();
        let key = Some(()).filter(|()| is_one_case).and_then(|()| bech32::decode(HRP, &lower));
        match key {
            Some(key) => Ok(Recipient { key, text: lower }),
            None => Err(InvalidRecipient::Malformed { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for Recipient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Encrypts one file, piece by piece.
pub(crate) struct Encryptor {
    payload_key: LessSafeKey,
    /// The number of sealed chunks.
    sealed: u64,
    /// At most one chunk: a full one may be the last.
    chunk: Vec<u8>,
}

impl Encryptor {
    /// A new file, which each of the recipients opens: its encryptor, and its first bytes. An error if the machine has no random
    /// numbers, or if a recipient is no point of the curve that anyone has a key of.
    pub(crate) fn new<'a>(
        recipients: impl IntoIterator<Item = &'a Recipient>,
    ) -> Result<(Encryptor, Vec<u8>), Unspecified> {
        let random = SystemRandom::new();
        let mut file_key = Zeroizing::new([0; FILE_KEY_BYTES]);
        random.fill(&mut *file_key)?;
        let mut start = INTRO.to_owned();
        for recipient in recipients {
            start.push_str(&recipient_stanza(recipient, &*file_key, &random)?);
        }
        start.push_str("---");
        let mac = hmac::sign(&header_key(&*file_key)?, start.as_bytes());
        start.push_str(&format!(" {}\n", encode_base64(mac.as_ref())));
        let mut nonce = [0; PAYLOAD_NONCE_BYTES];
        random.fill(&mut nonce)?;
        let payload_key = payload_key(&nonce, &*file_key)?;
        let chunk = Vec::with_capacity(CHUNK_BYTES);
        Ok((Encryptor { payload_key, sealed: 0, chunk }, [start.as_bytes(), &nonce].concat()))
    }

    /// The next bytes of the file, if there are any yet, for these of its content.
    pub(crate) fn push(&mut self, mut content: &[u8]) -> Result<Vec<u8>, Unspecified> {
        let mut sealed = Vec::new();
        while !content.is_empty() {
            if self.chunk.len() == CHUNK_BYTES {
                sealed.append(&mut self.seal_chunk(false)?);
            }
            let (now, later) = content.split_at(content.len().min(CHUNK_BYTES - self.chunk.len()));
            self.chunk.extend_from_slice(now);
            content = later;
        }
        Ok(sealed)
    }

    /// The last bytes of the file. Without them, it is known to be incomplete.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>, Unspecified> {
        self.seal_chunk(true)
    }

    fn seal_chunk(&mut self, is_last: bool) -> Result<Vec<u8>, Unspecified> {
        let nonce = chunk_nonce(self.sealed, is_last);
        self.sealed += 1;
        let mut chunk = std::mem::replace(&mut self.chunk, Vec::with_capacity(CHUNK_BYTES));
        self.payload_key.seal_in_place_append_tag(nonce, Aad::empty(), &mut chunk)?;
        Ok(chunk)
    }
}

/// The file's key, which the recipient's private key opens.
fn recipient_stanza(
    recipient: &Recipient,
    file_key: &[u8],
    random: &SystemRandom,
) -> Result<String, Unspecified> {
    let ephemeral = EphemeralPrivateKey::generate(&X25519, random)?;
    let share = ephemeral.compute_public_key()?;
    let salt = [share.as_ref(), &recipient.key].concat();
    let peer = UnparsedPublicKey::new(&X25519, &recipient.key);
    // A shared secret of zeros is an error of ring's.
    let key = agree_ephemeral(ephemeral, &peer, |secret| derive_key(&salt, secret, STANZA_LABEL))??;
    let mut body = file_key.to_vec();
    sealing_key(&*key)?.seal_in_place_append_tag(stanza_nonce(), Aad::empty(), &mut body)?;
    // The body fits into one line.
    Ok(format!("-> X25519 {}\n{}\n", encode_base64(share.as_ref()), encode_base64(&body)))
}

/// The key of a stanza seals once.
fn stanza_nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; NONCE_LEN])
}

fn chunk_nonce(number: u64, is_last: bool) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[NONCE_LEN - 9..NONCE_LEN - 1].copy_from_slice(&number.to_be_bytes());
    nonce[NONCE_LEN - 1] = is_last.into();
    Nonce::assume_unique_for_key(nonce)
}

/// The key of the header's checksum.
fn header_key(file_key: &[u8]) -> Result<hmac::Key, Unspecified> {
    Ok(hmac::Key::new(hmac::HMAC_SHA256, &*derive_key(&[], file_key, "header")?))
}

fn payload_key(nonce: &[u8], file_key: &[u8]) -> Result<LessSafeKey, Unspecified> {
    sealing_key(&*derive_key(nonce, file_key, "payload")?)
}

fn sealing_key(key: &[u8]) -> Result<LessSafeKey, Unspecified> {
    UnboundKey::new(&CHACHA20_POLY1305, key).map(LessSafeKey::new)
}

/// HKDF with SHA-256.
fn derive_key(salt: &[u8], secret: &[u8], label: &str) -> Result<Zeroizing<[u8; 32]>, Unspecified> {
    let mut key = Zeroizing::new([0; 32]);
    let extracted = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(secret);
    extracted.expand(&[label.as_bytes()], hkdf::HKDF_SHA256)?.fill(&mut *key)?;
    Ok(key)
}

/// Base64 without padding.
fn encode_base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits =
            group.iter().fold(0, |bits, byte| bits << 8 | usize::from(*byte)) << (8 * (3 - group.len()));
        // One byte has two digits, two have three.
        for digit in 0..=group.len() {
            text.push(char::from(DIGITS[bits >> (18 - 6 * digit) & 63]));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use testbed::tools;

    use super::*;

    const TEXT: &str = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p";

    #[test]
    fn a_recipient_is_its_text_in_one_case_with_its_checksum() {
        let parse = |text: &str| text.parse::<Recipient>();
        assert_eq!(parse(TEXT).unwrap().to_string(), TEXT);
        assert_eq!(parse(&TEXT.to_uppercase()).unwrap(), parse(TEXT).unwrap());
        let mixed = TEXT.replacen("age1q", "age1Q", 1);
        let mistyped = TEXT.replace("aqm", "aqq");
        for text in ["", "age1", "age", "age1é", &TEXT[..61], &mistyped, &mixed, "ssh-ed25519 AAAA"] {
            let error = parse(text).unwrap_err();
            assert!(error.to_string().contains("age-keygen"), "{error}");
        }
        let secret = parse("AGE-SECRET-KEY-1SECRET").unwrap_err();
        assert!(
            secret == InvalidRecipient::PrivateKey && !secret.to_string().contains("1SECRET"),
            "{secret}"
        );
    }

    #[test]
    fn a_point_that_gives_its_sender_no_secret_is_no_key() {
        assert!(Encryptor::new([&Recipient::from_key([0; 32])]).is_err());
    }

    #[test]
    fn base64_has_no_padding() {
        for (bytes, text) in
            [("", ""), ("f", "Zg"), ("fo", "Zm8"), ("foo", "Zm9v"), ("foob\u{7f}", "Zm9vYn8")]
        {
            assert_eq!(encode_base64(bytes.as_bytes()), text);
        }
    }

    #[test]
    #[ignore = "needs age"]
    fn age_decrypts_what_it_has_the_key_for_unless_it_ends_early() {
        let (age, keygen) =
            (tools::find_tool(tools::AGE).unwrap(), tools::find_tool(tools::AGE_KEYGEN).unwrap());
        let scratch = tempfile::tempdir().unwrap();
        let key = scratch.path().join("key");
        let made = Command::new(&keygen).arg("-o").arg(&key).output().unwrap();
        assert!(made.status.success());
        let recipient = Command::new(&keygen).arg("-y").arg(&key).output().unwrap();
        let recipient: Recipient = String::from_utf8(recipient.stdout).unwrap().trim().parse().unwrap();
        let decrypt = |file: &[u8]| {
            let mut command = Command::new(&age);
            command.args(["--decrypt", "--identity"]).arg(&key).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut running = command.stderr(Stdio::null()).spawn().unwrap();
            let (mut input, file) = (running.stdin.take().unwrap(), file.to_vec());
            // It may end before it has read all.
            let writer = std::thread::spawn(move || _ = input.write_all(&file));
            let output = running.wait_with_output().unwrap();
            writer.join().unwrap();
            (output.status.success(), output.stdout)
        };
        for length in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 1_000_000] {
            let content: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
            let (mut encryptor, mut file) = Encryptor::new([&recipient]).unwrap();
            for piece in content.chunks(10_007) {
                file.extend(encryptor.push(piece).unwrap());
            }
            let incomplete = file.clone();
            file.extend(encryptor.finish().unwrap());
            assert_eq!(decrypt(&file), (true, content), "{length}");
            assert!(!decrypt(&incomplete).0, "{length}: without its last chunk");
            let mut changed = file;
            *changed.last_mut().unwrap() ^= 1;
            assert!(!decrypt(&changed).0, "{length}: changed");
        }
    }
}
