//! Opens small files.

use ring::aead::Aad;
use ring::hmac;
use thiserror::Error;
use zeroize::Zeroizing;

use super::{
    CHUNK_BYTES, FILE_KEY_BYTES, INTRO, Identity, PAYLOAD_NONCE_BYTES, STANZA_LABEL, chunk_nonce, header_key,
    payload_key, sealing_key, stanza_nonce,
};

/// The kind of stanza that an X25519 key opens.
const STANZA: &str = "X25519";
/// The characters of each line of a stanza but the last, which is shorter.
const LINE: usize = 64;
/// The number of stanzas that are tried.
const MAX_STANZAS: usize = 1000;
const TAG_BYTES: usize = 16;

/// A file that is not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum OpenError {
    /// It is not encrypted for this key.
    #[error("it is not encrypted for this key")]
    OtherRecipients,
    /// It is damaged, or no file of this format.
    #[error("it is damaged, or no file of age")]
    Malformed,
    /// Its content is too long for this reader.
    #[error("it is longer than {CHUNK_BYTES} bytes")]
    TooLong,
}

struct Header<'a> {
    /// The shares and sealed file keys of the X25519 stanzas.
    stanzas: Vec<([u8; 32], Vec<u8>)>,
    /// What the checksum covers.
    covered: &'a str,
    checksum: Vec<u8>,
    payload: &'a [u8],
}

impl Identity {
    /// The content of a file of at most one chunk.
    pub(crate) fn open(&self, file: &[u8]) -> Result<Zeroizing<Vec<u8>>, OpenError> {
        let header = parse_header(file).ok_or(OpenError::Malformed)?;
        let mut keys = header.stanzas.iter().filter_map(|(share, sealed)| self.open_file_key(*share, sealed));
        let file_key = keys.next().ok_or(OpenError::OtherRecipients)?;
        let key = header_key(&file_key).map_err(|_| OpenError::Malformed)?;
        hmac::verify(&key, header.covered.as_bytes(), &header.checksum).map_err(|_| OpenError::Malformed)?;
        let (nonce, chunk) =
            header.payload.split_at_checked(PAYLOAD_NONCE_BYTES).ok_or(OpenError::Malformed)?;
        if chunk.len() > CHUNK_BYTES + TAG_BYTES {
            return Err(OpenError::TooLong);
        }
        let key = payload_key(nonce, &file_key).map_err(|_| OpenError::Malformed)?;
        let mut content = Zeroizing::new(chunk.to_vec());
        let opened = key.open_in_place(chunk_nonce(0, true), Aad::empty(), &mut content);
        let length = opened.map_err(|_| OpenError::Malformed)?.len();
        content.truncate(length);
        Ok(content)
    }

    fn open_file_key(&self, share: [u8; 32], sealed: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
        // Of another length, it might be one that several keys open.
        if sealed.len() != FILE_KEY_BYTES + TAG_BYTES {
            return None;
        }
        let key = sealing_key(&*self.agree(share, STANZA_LABEL).ok()?).ok()?;
        let mut opened = Zeroizing::new(sealed.to_vec());
        let length = key.open_in_place(stanza_nonce(), Aad::empty(), &mut opened).ok()?.len();
        opened.truncate(length);
        Some(opened)
    }
}

fn parse_header(file: &[u8]) -> Option<Header<'_>> {
    let mut rest = file.strip_prefix(INTRO.as_bytes())?;
    let mut stanzas = Vec::new();
    for _ in 0..MAX_STANZAS {
        let (line, after) = split_line(rest)?;
        if let Some(checksum) = line.strip_prefix("--- ") {
            let covered = file.len() - rest.len() + "---".len();
            let covered = std::str::from_utf8(&file[..covered]).ok()?;
            return Some(Header { stanzas, covered, checksum: decode_base64(checksum)?, payload: after });
        }
        let mut words = line.strip_prefix("-> ")?.split(' ');
        let (kind, share) = (words.next()?, words.next());
        let mut body = String::new();
        rest = after;
        loop {
            let (line, after) = split_line(rest)?;
            body.push_str(line);
            rest = after;
            if line.len() < LINE {
                break;
            }
        }
        let body = decode_base64(&body)?;
        if kind == STANZA {
            stanzas.push((decode_base64(share?)?.try_into().ok()?, body));
        }
    }
    None
}

fn split_line(text: &[u8]) -> Option<(&str, &[u8])> {
    let end = text.iter().position(|byte| *byte == b'\n')?;
    Some((std::str::from_utf8(&text[..end]).ok()?, &text[end + 1..]))
}

/// Reads base64 without padding, in its only form.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for character in text.bytes() {
        let digit = match character {
            b'A'..=b'Z' => character - b'A',
            b'a'..=b'z' => character - b'a' + 26,
            b'0'..=b'9' => character - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        (bits, count) = (bits << 6 | u32::from(digit), count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    (bits == 0 && count < 6).then_some(bytes)
}

/// Arbitrary bytes as a file: never panics.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_file(bytes: &[u8]) {
    let identity = Identity::generate().expect("random numbers");
    let _ = identity.open(bytes);
    let _ = identity.open(&[INTRO.as_bytes(), bytes].concat());
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use testbed::tools;

    use super::super::{Encryptor, Recipient, encode_base64};
    use super::*;

    fn sealed(recipients: &[&Recipient], content: &[u8]) -> Vec<u8> {
        let (mut encryptor, mut file) = Encryptor::new(recipients.iter().copied()).unwrap();
        file.extend(encryptor.push(content).unwrap());
        file.extend(encryptor.finish().unwrap());
        file
    }

    #[test]
    fn a_file_opens_by_each_of_its_keys_and_no_other_and_not_once_it_has_changed() {
        let keys = [0; 3].map(|_| Identity::generate().unwrap());
        for length in [0, 1, 300, CHUNK_BYTES] {
            let content: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
            let file = sealed(&[keys[0].recipient(), keys[1].recipient()], &content);
            for key in &keys[..2] {
                assert_eq!(key.open(&file).as_deref(), Ok(&content), "{length}");
                let again = Identity::from_file(&key.to_file()).unwrap();
                assert_eq!(again.open(&file).as_deref(), Ok(&content), "{length}");
            }
            assert_eq!(keys[2].open(&file), Err(OpenError::OtherRecipients));
        }
        let long = sealed(&[keys[0].recipient()], &[0; CHUNK_BYTES + 1]);
        assert_eq!(keys[0].open(&long), Err(OpenError::TooLong));
        let file = sealed(&[keys[0].recipient()], b"content");
        for at in 0..file.len() {
            let mut changed = file.clone();
            changed[at] ^= 1;
            assert!(keys[0].open(&changed).is_err(), "{at}");
            assert!(keys[0].open(&file[..at]).is_err(), "{at}");
        }
        assert!(keys[0].open(&[&file[..], b"more"].concat()).is_err());
    }

    #[test]
    fn base64_is_read_in_its_only_form() {
        for bytes in [&b""[..], b"f", b"fo", b"foo", b"foob\x7f"] {
            assert_eq!(decode_base64(&encode_base64(bytes)).as_deref(), Some(bytes));
        }
        for text in ["Z", "Zh", "Zg=", "Zm9v\n", "Zm9vY"] {
            assert_eq!(decode_base64(text), None, "{text}");
        }
    }

    #[test]
    fn a_key_is_never_printed() {
        let key = Identity::generate().unwrap();
        let file = String::from_utf8(key.to_file().to_vec()).unwrap();
        let secret = file.lines().next_back().unwrap().to_ascii_lowercase();
        let text = format!("{key:?}").to_ascii_lowercase();
        assert!(!text.contains("secret") && !text.contains(&secret[20..30]), "{text}");
    }

    #[test]
    #[ignore = "needs age"]
    fn age_opens_our_files_with_our_keys_and_we_open_its_files_with_its_keys() {
        let (age, keygen) =
            (tools::find_tool(tools::AGE).unwrap(), tools::find_tool(tools::AGE_KEYGEN).unwrap());
        let scratch = tempfile::tempdir().unwrap();
        let path = |name: &str| scratch.path().join(name);
        let run = |command: &mut Command| {
            let output = command.output().unwrap();
            assert!(output.status.success(), "{output:?}");
            output.stdout
        };
        run(Command::new(&keygen).arg("-o").arg(path("theirs")));
        let theirs = Identity::from_file(&std::fs::read(path("theirs")).unwrap()).unwrap();
        let ours = Identity::generate().unwrap();
        std::fs::write(path("ours"), &*ours.to_file()).unwrap();
        let printed = run(Command::new(&keygen).arg("-y").arg(path("ours")));
        assert_eq!(String::from_utf8(printed).unwrap().trim(), ours.recipient().to_string());
        std::fs::write(path("file"), sealed(&[ours.recipient(), theirs.recipient()], b"content")).unwrap();
        for key in ["ours", "theirs"] {
            let opened =
                run(Command::new(&age).args(["--decrypt", "--identity"]).arg(path(key)).arg(path("file")));
            assert_eq!(opened, b"content");
        }
        std::fs::write(path("content"), b"of age").unwrap();
        let mut command = Command::new(&age);
        command.args(["--recipient", &theirs.recipient().to_string(), "--recipient"]);
        let file = run(command.arg(ours.recipient().to_string()).arg(path("content")));
        for key in [&ours, &theirs] {
            assert_eq!(key.open(&file).as_deref().map(Vec::as_slice), Ok(&b"of age"[..]));
        }
    }
}
