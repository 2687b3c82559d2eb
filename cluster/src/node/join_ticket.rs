//! The join ticket: a short text that a new node redeems at a voter for its place in the cluster.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use data_encoding::{BASE32_NOPAD, BASE32_NOPAD_NOCASE};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use thiserror::Error;
use zeroize::Zeroizing;

/// The start of a ticket of each release, before the number of its format.
const MARK: &str = "nk";
const PREFIX: &str = "nk1-";

const ID_BYTES: usize = 8;
const SECRET_BYTES: usize = 16;
const DIGEST_BYTES: usize = 16;
/// They find a mistyped letter; the secret is what nobody can guess.
const CHECKSUM_BYTES: usize = 4;

/// The voters that a ticket names at most: it stays a line that a person can copy.
pub const MAX_TICKET_VOTERS: usize = 3;

/// Identifies a join ticket. It is no secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JoinTicketId([u8; ID_BYTES]);

/// Another text than an id: see `nodectl cluster ticket list`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "invalid id {0:?} of a join ticket: it has 16 hexadecimal digits, as `nodectl cluster ticket list` prints it"
)]
pub struct InvalidTicketId(String);

impl JoinTicketId {
    /// An id of these bytes.
    pub fn from_bytes(bytes: [u8; ID_BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; ID_BYTES] {
        &self.0
    }
}

/// 16 hexadecimal digits.
impl fmt::Display for JoinTicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for JoinTicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for JoinTicketId {
    type Err = InvalidTicketId;

    fn from_str(text: &str) -> Result<Self, InvalidTicketId> {
        let invalid = || InvalidTicketId(text.to_owned());
        // `from_str_radix` reads a sign, too.
        if text.len() != 2 * ID_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(invalid());
        }
        u64::from_str_radix(text, 16).map(|id| Self(id.to_be_bytes())).map_err(|_| invalid())
    }
}

/// The secret of a join ticket. It is wiped when dropped, and never printed.
#[derive(Clone)]
pub struct JoinSecret(Zeroizing<[u8; SECRET_BYTES]>);

impl JoinSecret {
    /// The secret in these bytes, if it has the length of one.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(|bytes| Self(Zeroizing::new(bytes)))
    }

    /// The bytes. Don't keep copies.
    pub fn expose_bytes(&self) -> &[u8] {
        &*self.0
    }

    /// What the cluster keeps of it.
    pub(super) fn digest(&self) -> [u8; 32] {
        Sha256::digest(*self.0).into()
    }

    /// Compares it with a kept digest, in a time that does not depend on either.
    pub(super) fn matches(&self, digest: &[u8]) -> bool {
        self.digest().ct_eq(digest).into()
    }
}

impl fmt::Debug for JoinSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JoinSecret")
    }
}

/// The first half of the SHA-256 of a voter's public key, as its `SubjectPublicKeyInfo` in DER: only the holder of that key can
/// take the voter's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VoterKeyDigest([u8; DIGEST_BYTES]);

impl VoterKeyDigest {
    /// The digest of this `SubjectPublicKeyInfo`.
    pub fn of_spki(der: &[u8]) -> Self {
        let mut digest = [0; DIGEST_BYTES];
        digest.copy_from_slice(&Sha256::digest(der)[..DIGEST_BYTES]);
        Self(digest)
    }
}

/// A voter at which a ticket can be redeemed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a plain record without invariants")]
pub struct TicketVoter {
    /// The address and port of its API.
    pub address: SocketAddr,
    /// Its key there.
    pub key: VoterKeyDigest,
}

/// A join ticket: a bearer secret until it is used, expired or revoked.
///
/// Its text is `nk1-` and the base32 of RFC 4648, without padding and in lower case, of: the id (8 bytes), the secret (16), one
/// to three voters, and the first 4 bytes of the SHA-256 of all before. A voter is 4 or 6, an address of 4 or 16 bytes, a port of
/// 2, and the digest of its key (16).
#[derive(Clone)]
pub struct JoinTicket {
    id: JoinTicketId,
    secret: JoinSecret,
    voters: Vec<TicketVoter>,
}

/// A defect of a ticket's text. The error contains none of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidJoinTicket {
    /// The text is something else.
    #[error(
        "not a join ticket: it is \"nk1-\" and letters and digits, as `nodectl cluster ticket create` prints it"
    )]
    Prefix,
    /// A later release has made it.
    #[error(
        "a join ticket of a later release: upgrade this node, or create the ticket on a node of its release"
    )]
    Newer,
    /// A letter is wrong, or some are missing.
    #[error("the join ticket is mistyped or incomplete: copy it again, all of it")]
    Mistyped,
}

impl JoinTicket {
    /// A new ticket, redeemed at the first [`MAX_TICKET_VOTERS`] of these voters.
    ///
    /// # Errors
    /// Those of the kernel's random numbers.
    pub(super) fn generate(voters: &[TicketVoter]) -> std::io::Result<Self> {
        let mut bytes = Zeroizing::new([0; ID_BYTES + SECRET_BYTES]);
        // Up to 256 bytes are returned at once or not at all. *Source:* getrandom(2).
        getrandom(&mut *bytes, GetRandomFlags::empty())?;
        let (id, secret) = bytes.split_first_chunk().expect("longer than an id");
        let secret = JoinSecret::from_bytes(secret).expect("the length of a secret");
        let voters = voters.iter().take(MAX_TICKET_VOTERS).copied().collect();
        Ok(Self { id: JoinTicketId(*id), secret, voters })
    }

    /// Returns whether a file begins as a ticket of any release does.
    pub(super) fn is_text(content: &[u8]) -> bool {
        let start = content.trim_ascii_start().get(..MARK.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(MARK.as_bytes()))
    }

    /// Its id.
    pub fn id(&self) -> JoinTicketId {
        self.id
    }

    /// Its secret.
    pub fn secret(&self) -> &JoinSecret {
        &self.secret
    }

    /// The voters that redeem it.
    pub fn voters(&self) -> &[TicketVoter] {
        &self.voters
    }

    /// Its text: a secret.
    pub fn to_text(&self) -> Zeroizing<String> {
        let mut bytes = Zeroizing::new(Vec::with_capacity(256));
        bytes.extend_from_slice(&self.id.0);
        bytes.extend_from_slice(&*self.secret.0);
        for TicketVoter { address, key } in &self.voters {
            match address.ip() {
                IpAddr::V4(ip) => {
                    bytes.push(4);
                    bytes.extend_from_slice(&ip.octets());
                }
                IpAddr::V6(ip) => {
                    bytes.push(6);
                    bytes.extend_from_slice(&ip.octets());
                }
            }
            bytes.extend_from_slice(&address.port().to_be_bytes());
            bytes.extend_from_slice(&key.0);
        }
        let checksum = Sha256::digest(&*bytes);
        bytes.extend_from_slice(&checksum[..CHECKSUM_BYTES]);
        let encoded = Zeroizing::new(BASE32_NOPAD.encode(&bytes));
        let mut text = Zeroizing::new(String::with_capacity(PREFIX.len() + encoded.len()));
        text.push_str(PREFIX);
        text.extend(encoded.chars().map(|letter| letter.to_ascii_lowercase()));
        text
    }

    fn from_payload(mut bytes: &[u8]) -> Option<Self> {
        let (id, secret) = (take::<ID_BYTES>(&mut bytes)?, take::<SECRET_BYTES>(&mut bytes)?);
        let mut voters = Vec::new();
        while !bytes.is_empty() {
            let ip = match take::<1>(&mut bytes)? {
                [4] => IpAddr::from(*take::<4>(&mut bytes)?),
                [6] => IpAddr::from(*take::<16>(&mut bytes)?),
                _ => return None,
            };
            let port = u16::from_be_bytes(*take::<2>(&mut bytes)?);
            let key = VoterKeyDigest(*take::<DIGEST_BYTES>(&mut bytes)?);
            voters.push(TicketVoter { address: SocketAddr::new(ip, port), key });
        }
        let is_valid = (1..=MAX_TICKET_VOTERS).contains(&voters.len());
        is_valid.then(|| Self { id: JoinTicketId(*id), secret: JoinSecret(Zeroizing::new(*secret)), voters })
    }
}

fn take<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(taken)
}

/// White space within it is ignored: a line may be wrapped.
impl FromStr for JoinTicket {
    type Err = InvalidJoinTicket;

    fn from_str(text: &str) -> Result<Self, InvalidJoinTicket> {
        let mut joined = Zeroizing::new(String::with_capacity(text.len()));
        joined.extend(text.chars().filter(|letter| !letter.is_ascii_whitespace()));
        joined.make_ascii_lowercase();
        let rest = joined.strip_prefix(MARK).ok_or(InvalidJoinTicket::Prefix)?;
        let (format, encoded) = rest.split_once('-').ok_or(InvalidJoinTicket::Prefix)?;
        match format {
            "1" => {}
            "" => return Err(InvalidJoinTicket::Prefix),
            number if number.bytes().all(|byte| byte.is_ascii_digit()) => {
                return Err(InvalidJoinTicket::Newer);
            }
            _ => return Err(InvalidJoinTicket::Prefix),
        }
        let decoded = BASE32_NOPAD_NOCASE.decode(encoded.as_bytes());
        let bytes = Zeroizing::new(decoded.map_err(|_| InvalidJoinTicket::Mistyped)?);
        let (payload, checksum) =
            bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(InvalidJoinTicket::Mistyped)?;
        if Sha256::digest(payload)[..CHECKSUM_BYTES] != *checksum {
            return Err(InvalidJoinTicket::Mistyped);
        }
        Self::from_payload(payload).ok_or(InvalidJoinTicket::Mistyped)
    }
}

/// The id alone.
impl fmt::Debug for JoinTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinTicket({})", self.id)
    }
}

/// Arbitrary bytes as a ticket's text: never panics, and a valid one has one text.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_join_ticket(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(ticket) = text.parse::<JoinTicket>() {
        let again = ticket.to_text().parse::<JoinTicket>().expect("a written ticket is valid");
        assert_eq!(again.to_text(), ticket.to_text());
        let typed: String = text.chars().filter(|letter| !letter.is_ascii_whitespace()).collect();
        assert_eq!(*ticket.to_text(), typed.to_ascii_lowercase());
    }
    // With a valid checksum, the content is what is read.
    let mut payload = bytes.to_vec();
    payload.extend_from_slice(&Sha256::digest(bytes)[..CHECKSUM_BYTES]);
    let text = format!("{PREFIX}{}", BASE32_NOPAD.encode(&payload).to_ascii_lowercase());
    if let Ok(ticket) = text.parse::<JoinTicket>() {
        assert_eq!(*ticket.to_text(), text);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ticket(addresses: &[&str]) -> JoinTicket {
        let voter = |address: &&str| TicketVoter {
            address: address.parse().expect("an address"),
            key: VoterKeyDigest::of_spki(address.as_bytes()),
        };
        JoinTicket {
            id: JoinTicketId(*b"\x01\x23\x45\x67\x89\xab\xcd\xef"),
            secret: JoinSecret::from_bytes(&[7; 16]).expect("16 bytes"),
            voters: addresses.iter().map(voter).collect(),
        }
    }

    #[test]
    fn the_text_of_a_ticket_is_a_line_and_is_read_as_it_is_typed() {
        let one = ticket(&["192.0.2.1:7836"]);
        let text = one.to_text();
        // By Python's base64.b32encode and hashlib.sha256.
        assert_eq!(
            *text,
            "nk1-aerukz4jvpg66byha4dqobyha4dqobyha4dqobyeyaaaeai6tqzum6ek3k43enqvaimzir7j4xhmd7pwsm"
        );
        let wrapped = format!("  {}\n {}\n", text[..40].to_uppercase(), &text[40..]);
        for typed in [&**text, &wrapped] {
            assert!(JoinTicket::is_text(typed.as_bytes()), "as a file, too");
            let read: JoinTicket = typed.parse().expect("a ticket");
            assert_eq!((read.id(), read.voters()), (one.id(), one.voters()));
            assert_eq!(read.secret().expose_bytes(), [7; 16]);
        }
        let three = ticket(&["192.0.2.1:7836", "[2001:db8::1]:1", "203.0.113.255:65535"]);
        assert_eq!(three.to_text().parse::<JoinTicket>().expect("a ticket").voters(), three.voters());
        assert!(three.to_text().len() < 200, "a line");
        assert_eq!(one.id().to_string().parse(), Ok(one.id()));
        for wrong in ["", "0123", "+123456789abcdef", "0123456789abcdeg", "0123456789abcdef0"] {
            wrong.parse::<JoinTicketId>().expect_err(wrong);
        }
    }

    #[test]
    fn each_mistyped_or_missing_letter_is_found() {
        let text = ticket(&["192.0.2.1:7836"]).to_text();
        for at in PREFIX.len()..text.len() {
            for letter in "a7ql1".chars().filter(|letter| !text[at..].starts_with(*letter)) {
                let mut typed = text.to_string();
                typed.replace_range(at..=at, letter.encode_utf8(&mut [0; 4]));
                assert_eq!(
                    typed.parse::<JoinTicket>().map(|_| ()),
                    Err(InvalidJoinTicket::Mistyped),
                    "{typed}"
                );
            }
            assert_eq!(
                text[..at].parse::<JoinTicket>().map(|_| ()),
                Err(InvalidJoinTicket::Mistyped),
                "{at}"
            );
        }
        for (typed, error) in [
            ("", InvalidJoinTicket::Prefix),
            ("nk1", InvalidJoinTicket::Prefix),
            ("nk-aa", InvalidJoinTicket::Prefix),
            ("nkx-aa", InvalidJoinTicket::Prefix),
            ("token-1", InvalidJoinTicket::Prefix),
            ("nk2-aa", InvalidJoinTicket::Newer),
            ("nk1-", InvalidJoinTicket::Mistyped),
        ] {
            assert_eq!(typed.parse::<JoinTicket>().map(|_| ()), Err(error), "{typed}");
        }
        for voters in [&[][..], &["192.0.2.1:1"; 4]] {
            let text = ticket(voters).to_text();
            assert_eq!(text.parse::<JoinTicket>().map(|_| ()), Err(InvalidJoinTicket::Mistyped));
        }
    }

    #[test]
    fn a_ticket_prints_its_id_alone() {
        let one = ticket(&["192.0.2.1:7836"]);
        assert_eq!(format!("{one:?} {:?}", one.secret()), "JoinTicket(0123456789abcdef) JoinSecret");
        assert!(one.secret().matches(&one.secret().digest()));
        let other = JoinSecret::from_bytes(&[8; 16]).expect("16 bytes");
        assert!(!other.matches(&one.secret().digest()) && !other.matches(&[]));
        assert!(JoinSecret::from_bytes(&[7; 15]).is_none());
    }

    proptest! {
        #[test]
        fn any_text_is_a_ticket_or_an_error(bytes: Vec<u8>, text in "nk1-[a-z2-7]{0,120}") {
            check_arbitrary_join_ticket(&bytes);
            check_arbitrary_join_ticket(text.as_bytes());
        }
    }
}
