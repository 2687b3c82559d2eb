//! PEM files: exactly one block with the expected label.
//!
//! The base64 is read and written by `pem-rfc7468`, in constant time and into buffers that are wiped: most blocks here
//! are private keys. Its reader of whole files would refuse lines of another length than 64 and white space at their
//! ends, which other programs write, and skip text before the block. This one accepts the former and refuses the latter.
//!
//! *Source:* RFC 7468, section 3.

use pem_rfc7468::{Base64Decoder, LineEnding};
use zeroize::Zeroizing;

use super::PkiEncodingError;

/// The longest label that is read.
const MAX_LABEL_BYTES: usize = 64;

/// Decodes the only block of `text`, which must have this label.
pub(super) fn decode_block(text: &[u8], label: &'static str) -> Result<Zeroizing<Vec<u8>>, PkiEncodingError> {
    let mut lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end);
    let check_label = |found: &str| match found == label {
        true => Ok(()),
        false => Err(PkiEncodingError::WrongLabel { found: found.to_owned(), expected: label }),
    };
    let begin = lines.next().and_then(|line| parse_boundary(line, "BEGIN")).ok_or(PkiEncodingError::NoPem)?;
    check_label(begin)?;
    // Full capacity from the start: a growing vector would leave copies of a key behind.
    let mut digits = Zeroizing::new(Vec::with_capacity(text.len()));
    loop {
        let line = lines.next().ok_or(PkiEncodingError::Truncated)?;
        // No digit of base64 is a dash: this line ends the block, or is wrong.
        if line.starts_with(b"-") {
            check_label(parse_boundary(line, "END").ok_or(PkiEncodingError::Truncated)?)?;
            break;
        }
        digits.extend_from_slice(line);
    }
    if lines.any(|line| !line.is_empty()) {
        return Err(PkiEncodingError::TrailingData);
    }
    decode_base64(&digits).ok_or(PkiEncodingError::Base64)
}

/// A block with this label and a trailing newline.
pub(super) fn encode_block(label: &str, contents: &[u8]) -> Zeroizing<String> {
    let length =
        pem_rfc7468::encoded_len(label, LineEnding::LF, contents).expect("a credential fits into memory");
    let mut text = Zeroizing::new(vec![0; length]);
    pem_rfc7468::encode(label, LineEnding::LF, contents, &mut text).expect("the label is valid");
    // The same memory: nothing is copied.
    Zeroizing::new(String::from_utf8(std::mem::take(&mut *text)).expect("PEM is ASCII"))
}

/// The label in `-----WORD LABEL-----`.
fn parse_boundary<'a>(line: &'a [u8], word: &str) -> Option<&'a str> {
    let inner = line.strip_prefix(b"-----")?.strip_suffix(b"-----")?.strip_prefix(word.as_bytes())?;
    let label = std::str::from_utf8(inner.strip_prefix(b" ")?).ok()?;
    let is_label = |byte: u8| byte == b' ' || byte.is_ascii_uppercase() || byte.is_ascii_digit();
    (!label.is_empty() && label.len() <= MAX_LABEL_BYTES && label.bytes().all(is_label)).then_some(label)
}

/// `None` unless the digits are base64 in its only form: padded, with zeros as unused bits.
fn decode_base64(digits: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    if digits.is_empty() {
        return Some(Zeroizing::default());
    }
    let mut decoder = Base64Decoder::new(digits).ok()?;
    let mut bytes = Zeroizing::new(vec![0; decoder.remaining_len()]);
    decoder.decode(&mut bytes).ok()?;
    decoder.is_finished().then_some(bytes)
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
        // Other programs write other line ends, lines of other lengths, blank lines, and no last newline.
        let lines = text.replace("Hh8gISIj", "Hh8g \n\nISIj");
        for other in [text.replace('\n', "\r\n"), lines, text.trim_end().to_owned(), format!("{text}\n \n")] {
            assert_eq!(*decode_block(other.as_bytes(), "TEST").unwrap(), bytes, "{other}");
        }
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
        for digits in ["QQ==QQ==", "QQ=", "QQ", "QQ==\n=", "=", "====", "QQ= =", "QR==", "Q Q==", "QUJDRR=="]
        {
            let text = format!("-----BEGIN TEST-----\n{digits}\n-----END TEST-----\n");
            assert_eq!(error(&text), PkiEncodingError::Base64.to_string(), "{digits}");
        }
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
