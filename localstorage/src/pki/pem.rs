//! Strict PEM: exactly one block with the expected label.
//!
//! The crate has this parser, a few lines, because it decodes private keys: its copies are wiped, and any
//! input but exactly one block is an error and not skipped.
//!
//! *Source:* RFC 7468, "strict" in its section 3, except for the length of lines.

use zeroize::Zeroizing;

use super::PkiEncodingError;

/// Characters in a line.
const LINE_LENGTH: usize = 64;

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Decodes the only block of `text`, which must have this label.
pub(super) fn decode_block(text: &[u8], label: &'static str) -> Result<Zeroizing<Vec<u8>>, PkiEncodingError> {
    let mut lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end);
    let begin = lines.next().and_then(|line| parse_boundary(line, "BEGIN")).ok_or(PkiEncodingError::NoPem)?;
    if begin != label {
        return Err(PkiEncodingError::WrongLabel { found: begin.to_owned(), expected: label });
    }
    let mut digits = Zeroizing::new(Vec::with_capacity(text.len()));
    loop {
        let line = lines.next().ok_or(PkiEncodingError::Truncated)?;
        if line.starts_with(b"-") {
            let end = parse_boundary(line, "END").ok_or(PkiEncodingError::Truncated)?;
            if end != label {
                return Err(PkiEncodingError::WrongLabel { found: end.to_owned(), expected: label });
            }
            break;
        }
        digits.extend_from_slice(line);
    }
    if lines.any(|line| !line.is_empty()) {
        return Err(PkiEncodingError::TrailingData);
    }
    decode_base64(&digits)
}

/// A block with this label and a trailing newline.
pub(super) fn encode_block(label: &str, contents: &[u8]) -> Zeroizing<String> {
    let digits = contents.len().div_ceil(3) * 4;
    // Full capacity from the start: a growing string would leave copies behind.
    let mut text =
        Zeroizing::new(String::with_capacity(digits + digits / LINE_LENGTH + 2 * label.len() + 40));
    text.push_str(&format!("-----BEGIN {label}-----\n"));
    for line in contents.chunks(LINE_LENGTH / 4 * 3) {
        for group in line.chunks(3) {
            push_base64_group(&mut text, group);
        }
        text.push('\n');
    }
    text.push_str(&format!("-----END {label}-----\n"));
    text
}

/// The label in `-----WORD LABEL-----`.
fn parse_boundary<'a>(line: &'a [u8], word: &str) -> Option<&'a str> {
    let inner = line.strip_prefix(b"-----")?.strip_suffix(b"-----")?.strip_prefix(word.as_bytes())?;
    let label = std::str::from_utf8(inner.strip_prefix(b" ")?).ok()?;
    let is_label = |byte: u8| byte == b' ' || byte.is_ascii_uppercase() || byte.is_ascii_digit();
    (!label.is_empty() && label.len() <= LINE_LENGTH && label.bytes().all(is_label)).then_some(label)
}

fn push_base64_group(text: &mut String, group: &[u8]) {
    let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
    let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
    for digit in 0..4 {
        let value = bits >> (18 - 6 * digit) & 63;
        let padding = digit > group.len();
        text.push(if padding { '=' } else { char::from(ALPHABET[value as usize]) });
    }
}

fn decode_base64(digits: &[u8]) -> Result<Zeroizing<Vec<u8>>, PkiEncodingError> {
    let padding = digits.iter().rev().take_while(|digit| **digit == b'=').count();
    let values = &digits[..digits.len() - padding];
    if !digits.len().is_multiple_of(4) || padding > 2 {
        return Err(PkiEncodingError::Base64);
    }
    let mut bytes = Zeroizing::new(Vec::with_capacity(digits.len() / 4 * 3));
    for group in values.chunks(4) {
        let mut bits = 0;
        for digit in group {
            let value = ALPHABET.iter().position(|known| known == digit).ok_or(PkiEncodingError::Base64)?;
            bits = bits << 6 | value as u32;
        }
        bits <<= 6 * (4 - group.len());
        let [_, decoded @ ..] = bits.to_be_bytes();
        let (whole, left) = decoded.split_at(group.len() * 6 / 8);
        // The unused bits must be zero: otherwise two texts would have the same meaning.
        if left.iter().any(|byte| *byte != 0) {
            return Err(PkiEncodingError::Base64);
        }
        bytes.extend_from_slice(whole);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn encoding_matches_openssl() {
        let text = "-----BEGIN TEST-----\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4v\nMDE=\n-----END TEST-----\n";
        let bytes: Vec<u8> = (0..50).collect();
        assert_eq!(*encode_block("TEST", &bytes), text);
        assert_eq!(*decode_block(text.as_bytes(), "TEST").unwrap(), bytes);
        assert_eq!(*decode_block(text.replace('\n', "\r\n").as_bytes(), "TEST").unwrap(), bytes);
    }

    #[test]
    fn anything_but_one_block_is_rejected() {
        let good = encode_block("TEST", b"contents");
        let error = |text: &str| decode_block(text.as_bytes(), "TEST").unwrap_err().to_string();
        assert_eq!(error(""), PkiEncodingError::NoPem.to_string());
        assert_eq!(error(&format!("\n{}", *good)), PkiEncodingError::NoPem.to_string());
        assert_eq!(error(&format!("{}{}", *good, *good)), PkiEncodingError::TrailingData.to_string());
        assert_eq!(error(&format!("{}x", *good)), PkiEncodingError::TrailingData.to_string());
        assert!(error(&good.replace("TEST", "REST")).contains("REST"));
        assert_eq!(error(&good.replace("Y29", "Y2*")), PkiEncodingError::Base64.to_string());
        assert_eq!(
            error("-----BEGIN TEST-----\nQQ==QQ==\n-----END TEST-----\n"),
            PkiEncodingError::Base64.to_string()
        );
        assert_eq!(
            error("-----BEGIN TEST-----\nQR==\n-----END TEST-----\n"),
            PkiEncodingError::Base64.to_string()
        );
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let _ = decode_block(&bytes, "TEST");
            let _ = decode_block(&[b"-----BEGIN TEST-----\n", &bytes[..], b"\n-----END TEST-----\n"].concat(), "TEST");
        }

        #[test]
        fn an_encoded_block_is_decoded_back(bytes: Vec<u8>) {
            prop_assert_eq!(&*decode_block(encode_block("TEST", &bytes).as_bytes(), "TEST").unwrap(), &bytes);
        }
    }
}
