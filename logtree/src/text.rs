//! Text that is safe to store and to print.

use std::borrow::Cow;

use memchr::memchr;

/// The largest `at <= limit` at a character boundary of `text`.
pub(crate) fn floor_char_boundary(text: &str, limit: usize) -> usize {
    if limit >= text.len() {
        return text.len();
    }
    (0..=limit).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// Returns whether a character controls the terminal, or reorders or breaks its line, instead of being printed.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}'
        )
}

/// Removes the escape sequences of a terminal, as those of colors.
///
/// *Source:* ECMA-48, 5.4: control sequences.
pub(crate) fn strip_colors(text: &str) -> Cow<'_, str> {
    const INTRODUCER: &str = "\u{1b}[";
    // Most lines have none.
    let Some(start) = memchr(0x1b, text.as_bytes()) else { return Cow::Borrowed(text) };
    let (first, rest) = text.split_at(start);
    let mut pieces = rest.split(INTRODUCER);
    let mut plain = String::with_capacity(text.len());
    plain.extend([first, pieces.next().unwrap_or_default()]);
    for piece in pieces {
        let end = piece.bytes().position(|byte| !matches!(byte, 0x20..=0x3f));
        match end.filter(|&end| matches!(piece.as_bytes()[end], 0x40..=0x7e)) {
            Some(end) => plain.push_str(&piece[end + 1..]),
            // Not such a sequence.
            None => plain.extend([INTRODUCER, piece]),
        }
    }
    Cow::Owned(plain)
}

/// Valid UTF-8 text made from untrusted bytes, once for all readers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SanitizedText<'a> {
    pub(crate) text: Cow<'a, str>,
    /// Invalid UTF-8 was replaced with U+FFFD.
    pub(crate) lossy: bool,
}

/// Converts `bytes` to text. If they were `cut` from a longer line, a partial character at the end is
/// omitted.
pub(crate) fn sanitize_text(bytes: &[u8], cut: bool) -> SanitizedText<'_> {
    let error = match std::str::from_utf8(bytes) {
        Ok(text) => return SanitizedText { text: Cow::Borrowed(text), lossy: false },
        Err(error) => error,
    };
    if cut && error.error_len().is_none() {
        // No error length means that the text ends within a character.
        let whole = &bytes[..error.valid_up_to()];
        return SanitizedText { text: String::from_utf8_lossy(whole), lossy: false };
    }
    // The cut may also have left a partial character after earlier invalid bytes.
    let end = if cut { bytes.len() - partial_character_length(bytes) } else { bytes.len() };
    SanitizedText { text: String::from_utf8_lossy(&bytes[..end]), lossy: true }
}

/// The number of bytes at the end that belong to an incomplete character.
fn partial_character_length(bytes: &[u8]) -> usize {
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
    fn only_a_cut_line_may_end_in_half_a_character() {
        assert_eq!(sanitize_text(b"a\xc3", true), SanitizedText { text: "a".into(), lossy: false });
        assert_eq!(sanitize_text(b"a\xc3", false), SanitizedText { text: "a\u{fffd}".into(), lossy: true });
        assert_eq!(
            sanitize_text(b"\xffa\xf0\x9f\x98", true),
            SanitizedText { text: "\u{fffd}a".into(), lossy: true }
        );
    }

    #[test]
    fn colors_are_removed_and_nothing_else() {
        for (text, plain) in [
            ("\u{1b}[31mERRO\u{1b}[0m[0000] x", "ERRO[0000] x"),
            ("a\u{1b}[1;38;5;9mb\u{1b}[K", "ab"),
            ("a\u{1b}b \u{1b}[c\u{1b}[é \u{1b}[", "a\u{1b}b \u{1b}[é \u{1b}["),
            ("a", "a"),
        ] {
            assert_eq!(strip_colors(text), plain);
        }
    }

    #[test]
    fn character_boundaries_are_rounded_down() {
        assert_eq!(floor_char_boundary("aü", 2), 1);
        assert_eq!(floor_char_boundary("aü", 3), 3);
        assert_eq!(floor_char_boundary("ü", 0), 0);
    }
}
