//! Kubernetes quantities as whole numbers: exact, rounded up, rejected if out of range.
//!
//! *Source:* `k8s.io/apimachinery/pkg/api/resource`, the grammar in the documentation of `Quantity`.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The largest valid amount: file systems count in signed 64 bits, in blocks of up to 64 KiB. It is below
/// 2^63 - 1, to which the API server truncates larger amounts.
pub(crate) const MAX_AMOUNT: u64 = (1 << 63) - (1 << 16);

/// Maximum length of a quantity in bytes.
const MAX_TEXT_BYTES: usize = 4096;

/// Maximum number of digits of the whole part, leading zeros aside.
const MAX_WHOLE_DIGITS: usize = 20;

/// The reason why a text is not a valid amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantityError {
    /// Not a number with one of the suffixes n, u, m, k, M, G, T, P, E, Ki ... Ei, or a decimal exponent.
    #[error("the size is not a quantity such as 10Gi")]
    Malformed,
    /// Less than zero.
    #[error("the size is less than zero")]
    Negative,
    /// More than 2^63 - 64Ki.
    #[error("the size is more than 2^63 - 64Ki")]
    TooLarge,
}

/// The factor that a suffix stands for.
enum SuffixScale {
    /// Ten to this power.
    PowerOfTen(i64),
    /// Two to this power.
    PowerOfTwo(u32),
}

/// Parses a quantity into a whole number in `[0, 2^63 - 64Ki]`; fractions are rounded up.
pub(crate) fn parse_quantity(text: &str) -> Result<u64, QuantityError> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(QuantityError::Malformed);
    }
    let (negative, rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    let (whole, fraction) = split_digits(&rest[..end])?;
    let scale = parse_suffix(&rest[end..])?;
    // `-0` is zero, and valid.
    if negative && is_nonzero(&whole, &fraction) {
        return Err(QuantityError::Negative);
    }
    let amount = match scale {
        SuffixScale::PowerOfTen(power) => shift_decimal(whole, fraction, power)?,
        SuffixScale::PowerOfTwo(power) => scale_binary(&whole, fraction, power)?,
    };
    if amount > u128::from(MAX_AMOUNT) {
        return Err(QuantityError::TooLarge);
    }
    u64::try_from(amount).map_err(|_| QuantityError::TooLarge)
}

/// Formats an amount of bytes as a quantity, in the largest binary unit that is exact.
pub(crate) fn format_quantity(amount: u64) -> Quantity {
    const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let unit = if amount == 0 { 0 } else { (amount.trailing_zeros() / 10) as usize };
    Quantity(format!("{}{}", amount >> (10 * unit), UNITS[unit]))
}

/// The digits before and after the point; either may be empty.
fn split_digits(number: &str) -> Result<(Vec<u8>, Vec<u8>), QuantityError> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
        return Err(QuantityError::Malformed);
    }
    let values = |text: &str| text.bytes().map(|byte| byte - b'0').collect();
    Ok((values(whole), values(fraction)))
}

fn is_nonzero(whole: &[u8], fraction: &[u8]) -> bool {
    whole.iter().chain(fraction).any(|&digit| digit != 0)
}

fn parse_suffix(suffix: &str) -> Result<SuffixScale, QuantityError> {
    Ok(match suffix {
        "n" => SuffixScale::PowerOfTen(-9),
        "u" => SuffixScale::PowerOfTen(-6),
        "m" => SuffixScale::PowerOfTen(-3),
        "" => SuffixScale::PowerOfTen(0),
        "k" => SuffixScale::PowerOfTen(3),
        "M" => SuffixScale::PowerOfTen(6),
        "G" => SuffixScale::PowerOfTen(9),
        "T" => SuffixScale::PowerOfTen(12),
        "P" => SuffixScale::PowerOfTen(15),
        "E" => SuffixScale::PowerOfTen(18),
        "Ki" => SuffixScale::PowerOfTwo(10),
        "Mi" => SuffixScale::PowerOfTwo(20),
        "Gi" => SuffixScale::PowerOfTwo(30),
        "Ti" => SuffixScale::PowerOfTwo(40),
        "Pi" => SuffixScale::PowerOfTwo(50),
        "Ei" => SuffixScale::PowerOfTwo(60),
        _ => SuffixScale::PowerOfTen(parse_exponent(suffix).ok_or(QuantityError::Malformed)?),
    })
}

/// The power of `e3`, `E-3`, `e+3`; a power that does not fit is clamped to a very large one.
fn parse_exponent(suffix: &str) -> Option<i64> {
    let power = suffix.strip_prefix(['e', 'E'])?;
    let unsigned = power.strip_prefix(['+', '-']).unwrap_or(power);
    if unsigned.is_empty() || !unsigned.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let size = unsigned.parse::<i32>().unwrap_or(i32::MAX);
    Some(if power.starts_with('-') { -i64::from(size) } else { i64::from(size) })
}

/// Moves the point to the right by `power` digits, or to the left, and rounds up.
fn shift_decimal(mut whole: Vec<u8>, fraction: Vec<u8>, power: i64) -> Result<u128, QuantityError> {
    let point = whole.len() as i64 + power;
    whole.extend(fraction);
    if !is_nonzero(&whole, &[]) {
        return Ok(0);
    }
    // Less than one and not zero, so it is rounded up.
    let Ok(point) = usize::try_from(point) else { return Ok(1) };
    let leading = whole.iter().take_while(|&&digit| digit == 0).count();
    // Before the digits are added up: an exponent can stand for billions of zeros.
    if point.saturating_sub(leading) > MAX_WHOLE_DIGITS {
        return Err(QuantityError::TooLarge);
    }
    let (before, after) = whole.split_at(point.min(whole.len()));
    let zeros = std::iter::repeat_n(&0, point - before.len().min(point));
    let amount = before.iter().chain(zeros).fold(0, |sum: u128, &digit| sum * 10 + u128::from(digit));
    Ok(amount + u128::from(is_nonzero(after, &[])))
}

/// Doubles the number `power` times, digit by digit so that no precision is lost, and rounds up.
fn scale_binary(whole: &[u8], mut fraction: Vec<u8>, power: u32) -> Result<u128, QuantityError> {
    let leading = whole.iter().take_while(|&&digit| digit == 0).count();
    if whole.len() - leading > MAX_WHOLE_DIGITS {
        return Err(QuantityError::TooLarge);
    }
    let mut amount = whole.iter().fold(0, |sum: u128, &digit| sum * 10 + u128::from(digit));
    for _ in 0..power {
        let mut carry = 0;
        for digit in fraction.iter_mut().rev() {
            let twice = *digit * 2 + carry;
            *digit = twice % 10;
            carry = twice / 10;
        }
        amount = amount * 2 + u128::from(carry);
    }
    Ok(amount + u128::from(is_nonzero(&fraction, &[])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn amounts_are_exact_and_rounded_up() {
        let table: &[(&str, u64)] = &[
            ("0", 0),
            ("-0", 0),
            ("1", 1),
            ("+1", 1),
            ("1n", 1),
            ("1000000000n", 1),
            ("1000000001n", 2),
            ("1u", 1),
            ("500m", 1),
            ("1500m", 2),
            ("0.5", 1),
            (".5", 1),
            ("5.", 5),
            ("1k", 1000),
            ("1.5k", 1500),
            ("1M", 1_000_000),
            ("1G", 1_000_000_000),
            ("1T", 1_000_000_000_000),
            ("1P", 1_000_000_000_000_000),
            ("9E", 9_000_000_000_000_000_000),
            ("1Ki", 1024),
            ("1.5Ki", 1536),
            ("0.0001Ki", 1),
            ("0.1Mi", 104_858),
            ("50Mi", 52_428_800),
            ("1Gi", 1 << 30),
            ("1Ti", 1 << 40),
            ("1Pi", 1 << 50),
            ("7Ei", 7 << 60),
            ("1e3", 1000),
            ("1E3", 1000),
            ("1E+3", 1000),
            ("15e-1", 2),
            ("1e-999999999999", 1),
            ("0e999999999999", 0),
            ("0000000000000000000000000000012", 12),
            ("9223372036854710272", (1 << 63) - (1 << 16)),
        ];
        for (text, amount) in table {
            assert_eq!(parse_quantity(text), Ok(*amount), "{text}");
        }
    }

    #[test]
    fn amounts_out_of_range_are_rejected() {
        for large in [
            "9223372036854710273",
            "9223372036854775807",
            "9223372036854775808",
            "8Ei",
            "7.99999999999999999999Ei",
            "10E",
            "1e19",
            "1e999999999999",
        ] {
            assert_eq!(parse_quantity(large), Err(QuantityError::TooLarge), "{large}");
        }
        assert_eq!(parse_quantity(&"9".repeat(4000)), Err(QuantityError::TooLarge));
        for negative in ["-1", "-1n", "-0.0001", "-9Ei"] {
            assert_eq!(parse_quantity(negative), Err(QuantityError::Negative), "{negative}");
        }
    }

    #[test]
    fn malformed_quantities_are_rejected() {
        for bad in [
            "", "-", "+", ".", "Gi", "1 Gi", " 1", "1gi", "1K", "1ki", "1.2.3", "1e", "1e+", "1e1.5", "1EE",
            "--1", "0x10", "1Gii", "é", "1\0",
        ] {
            assert_eq!(parse_quantity(bad), Err(QuantityError::Malformed), "{bad:?}");
        }
        assert_eq!(parse_quantity(&"1".repeat(5000)), Err(QuantityError::Malformed));
    }

    #[test]
    fn bytes_are_printed_in_the_largest_exact_unit() {
        let print = |amount| format_quantity(amount).0;
        assert_eq!([print(0), print(1000), print(1024), print(50 << 20)], ["0", "1000", "1Ki", "50Mi"]);
        assert_eq!([print(1 << 30), print(1536), print(1 << 60)], ["1Gi", "1536", "1Ei"]);
    }

    proptest! {
        #[test]
        fn any_text_is_an_amount_or_an_error(text in "[-+]?[0-9.]{0,40}[a-zA-Z]{0,2}[-+]?[0-9]{0,12}|.*") {
            if let Ok(amount) = parse_quantity(&text) {
                prop_assert!(amount <= MAX_AMOUNT);
            }
        }

        #[test]
        fn a_formatted_amount_parses_to_the_same_amount(amount in 0..=MAX_AMOUNT) {
            prop_assert_eq!(parse_quantity(&format_quantity(amount).0), Ok(amount));
            prop_assert_eq!(parse_quantity(&amount.to_string()), Ok(amount));
        }

        #[test]
        fn decimals_agree_with_integer_arithmetic(mantissa: u32, places in 0_u32..9, unit in 0_usize..6) {
            let power = 10 * (unit as u32 + 1);
            let suffix = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"][unit];
            let text = format!("{mantissa}e-{places}");
            let (whole, part) = (mantissa / 10_u32.pow(places), mantissa % 10_u32.pow(places));
            let binary = format!("{whole}.{part:0width$}{suffix}", width = places as usize);
            let exact = |scaled: u128| scaled.div_ceil(10_u128.pow(places));
            prop_assert_eq!(parse_quantity(&text).map(u128::from), Ok(exact(mantissa.into())));
            let want = exact(u128::from(mantissa) << power);
            let want = if want > u128::from(MAX_AMOUNT) { Err(QuantityError::TooLarge) } else { Ok(want) };
            prop_assert_eq!(parse_quantity(&binary).map(u128::from), want, "{}", binary);
        }
    }
}
