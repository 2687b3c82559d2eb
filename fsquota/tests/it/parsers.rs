//! Parsers of external input: quantities, and the kernel's lists.

use nodekeel_fsquota::testing::{fuzz_owner_mark, fuzz_quantity};
use nodekeel_fsquota::{Bytes, Inodes, QuantityError};
use proptest::prelude::*;

#[test]
fn quantities_parse_with_binary_and_decimal_suffixes() {
    for (text, bytes) in [
        ("0", 0),
        ("4096", 4096),
        ("10Gi", 10 << 30),
        ("10GiB", 10 << 30),
        ("1.5G", 1_500_000_000),
        ("1.5GB", 1_500_000_000),
        ("100k", 100_000),
        ("100K", 100_000),
        ("512B", 512),
        ("0.5Ki", 512),
        ("0.0001Ki", 1),
        ("1.00000000000000000000000001", 2),
        ("18446744073709551615", u64::MAX),
        ("15Ei", 15 << 60),
    ] {
        assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
    }
    assert_eq!("100k".parse(), Ok(Inodes(100_000)));
    assert_eq!(
        ("10Gi".to_owned(), "100k".to_owned()),
        (Bytes(10 << 30).to_string(), Inodes(100_000).to_string())
    );
}

#[test]
fn invalid_quantities_are_rejected_with_a_reason() {
    let why = |text: &str| text.parse::<Bytes>().unwrap_err();
    for text in ["", ".", "1.", ".5", "1.2.3", "Gi", "B"] {
        assert!(matches!(why(text), QuantityError::InvalidNumber(_)), "{text:?}: {}", why(text));
    }
    for text in ["10Qi", "10 Gi", "10gi", "-1", "+1", "1e3", "10GiBB", "\u{661}", "0x10"] {
        assert!(matches!(why(text), QuantityError::UnknownSuffix(_)), "{text:?}: {}", why(text));
    }
    for text in ["16Ei", "18446744073709551616", "18.5E", "99999999999999999999999"] {
        assert!(matches!(why(text), QuantityError::TooLarge(_)), "{text:?}: {}", why(text));
    }
    assert!("1KiB".parse::<Inodes>().is_err(), "inodes have no byte suffix");
}

#[test]
fn a_configuration_gives_a_quantity_as_text_or_as_a_number() {
    let read = |json: &str| serde_json::from_str::<Bytes>(json).map_err(|error| error.to_string());
    for notation in [r#""10Gi""#, r#""10GiB""#, r#""10737418240""#, "10737418240"] {
        assert_eq!(read(notation).map(|bytes| bytes.to_string()).as_deref(), Ok("10Gi"), "{notation}");
    }
    for (json, why) in [
        ("-1", "invalid value: integer `-1`, expected bytes, like \"10Gi\" or 10737418240"),
        ("1.5", "invalid type: floating point `1.5`, expected bytes, like"),
        (r#""16Ei""#, "quantity \"16Ei\" is too large: use less than 16Ei"),
        (r#""ten""#, "unknown suffix \"ten\""),
    ] {
        assert!(read(json).is_err_and(|error| error.starts_with(why)), "{json}: {:?}", read(json));
    }
    assert_eq!(serde_json::from_str::<Inodes>(r#""100k""#).expect("a number"), Inodes(100_000));
    assert_eq!(serde_json::from_str::<Inodes>("7").expect("a number"), Inodes(7));
    assert!(serde_json::from_str::<Inodes>(r#""1KiB""#).is_err());
}

proptest! {
    #[test]
    fn every_displayed_number_parses_back(number: u64, shift in 0u32..64) {
        for number in [number, number >> shift, number >> shift << shift, 10u64.pow(shift % 20)] {
            fuzz_quantity(Bytes(number).to_string().as_bytes());
            prop_assert_eq!(Bytes(number).to_string().parse(), Ok(Bytes(number)));
            prop_assert_eq!(Inodes(number).to_string().parse(), Ok(Inodes(number)));
        }
    }

    #[test]
    fn any_text_parses_as_a_quantity_or_is_rejected(text in "[0-9.]{0,25}[kKMGTPEiB]{0,4}|.*") {
        fuzz_quantity(text.as_bytes());
    }

    #[test]
    fn any_owner_attribute_is_a_mark_or_damaged(
        value in prop::collection::vec(any::<u8>(), 0..80),
        words in "((project|inode|generation|previous|later)=[0-9]{0,11} ?){0,6}",
    ) {
        fuzz_owner_mark(&value);
        fuzz_owner_mark(words.as_bytes());
    }
}
