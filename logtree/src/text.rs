//! Text that is safe to keep and to show.

use std::borrow::Cow;

/// The largest `at <= limit` where `text` may be cut.
pub(crate) fn floor_boundary(text: &str, limit: usize) -> usize {
    if limit >= text.len() {
        return text.len();
    }
    (0..=limit).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// Whether a character drives a terminal, or reorders or breaks the line it is in, instead of being shown.
pub(crate) fn is_unsafe_to_show(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Bytes of unknown origin made text, once and for all readers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SafeText<'a> {
    pub(crate) text: Cow<'a, str>,
    /// Something was not UTF-8 and is U+FFFD now.
    pub(crate) lossy: bool,
}

/// Makes `bytes` text. If they were `cut` off a longer line, a character cut in two is left out whole.
pub(crate) fn safe_text(bytes: &[u8], cut: bool) -> SafeText<'_> {
    let error = match std::str::from_utf8(bytes) {
        Ok(text) => return SafeText { text: Cow::Borrowed(text), lossy: false },
        Err(error) => error,
    };
    if cut && error.error_len().is_none() {
        let whole = &bytes[..error.valid_up_to()];
        return SafeText { text: String::from_utf8_lossy(whole), lossy: false };
    }
    // The cut may have left half a character after earlier rubbish, too.
    let end = if cut { bytes.len() - half_character(bytes) } else { bytes.len() };
    SafeText { text: String::from_utf8_lossy(&bytes[..end]), lossy: true }
}

/// How many bytes at the end are the beginning of a character that is not whole.
fn half_character(bytes: &[u8]) -> usize {
    (1..=bytes.len().min(3))
        .find(|&n| {
            let tail = &bytes[bytes.len() - n..];
            matches!(std::str::from_utf8(tail), Err(e) if e.valid_up_to() == 0 && e.error_len().is_none())
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_cut_forgives_half_a_character() {
        assert_eq!(safe_text(b"a\xc3", true), SafeText { text: "a".into(), lossy: false });
        assert_eq!(safe_text(b"a\xc3", false), SafeText { text: "a\u{fffd}".into(), lossy: true });
        assert_eq!(safe_text(b"\xffa\xf0\x9f\x98", true), SafeText { text: "\u{fffd}a".into(), lossy: true });
    }

    #[test]
    fn boundaries_are_found_downwards() {
        assert_eq!(floor_boundary("aü", 2), 1);
        assert_eq!(floor_boundary("aü", 3), 3);
        assert_eq!(floor_boundary("ü", 0), 0);
    }
}
