//! Durations as people write them.

use std::num::IntErrorKind;
use std::time::Duration;

/// Parses a duration with fio's suffixes; a bare number is in seconds: `10`, `0.5`, `500ms`, `2m`.
///
/// # Errors
///
/// If the text is not such a duration, or longer than a hundred years.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, suffix) = split_at(text, |c| c.is_ascii_digit() || c == '.')?;
    let unit = match suffix.to_ascii_lowercase().as_str() {
        "us" | "usec" => Duration::from_micros(1),
        "ms" | "msec" => Duration::from_millis(1),
        "" | "s" => Duration::from_secs(1),
        "m" => Duration::from_secs(60),
        "h" => Duration::from_secs(60 * 60),
        "d" => Duration::from_secs(24 * 60 * 60),
        _ => {
            return Err(format!("'{text}' has an unknown suffix: use us, ms, s, m, h or d"));
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    // Digits below a nanosecond of the longest unit do not matter.
    let fraction = &fraction[..fraction.len().min(FRACTION_DIGITS)];
    let parse = |digits: &str| match digits.parse::<u64>() {
        Ok(number) => Ok(number),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => {
            Err(format!("'{text}' is too long a time"))
        }
        Err(_) => Err(format!("'{text}' is not a time, such as 10, 0.5 or 500ms")),
    };
    let (whole, part) = (parse(whole)?, parse(fraction)?);
    let scale = fraction.bytes().fold(1, |scale: u128, _| scale * 10);
    let nanoseconds = u128::from(whole)
        .checked_mul(unit.as_nanos())
        .and_then(|whole| whole.checked_add(u128::from(part) * unit.as_nanos() / scale));
    nanoseconds
        .and_then(|nanoseconds| u64::try_from(nanoseconds).ok())
        .map(Duration::from_nanos)
        .filter(|duration| *duration < Duration::from_secs(LONGEST_DURATION_S))
        .ok_or_else(|| format!("'{text}' is too long a time"))
}

/// The most digits after the point that count.
const FRACTION_DIGITS: usize = 15;

/// A hundred years: far below where adding to the clock could overflow.
const LONGEST_DURATION_S: u64 = 100 * 365 * 24 * 60 * 60;

/// Splits `text` after the number at its start.
fn split_at(text: &str, of_number: impl Fn(char) -> bool) -> Result<(&str, &str), String> {
    let end = text.find(|c: char| !of_number(c)).unwrap_or(text.len());
    if end == 0 {
        return Err(format!("'{text}' does not begin with a number"));
    }
    Ok(text.split_at(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_default_to_seconds() {
        assert_eq!(parse_duration("10"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        for text in ["2 weeks", "18446744073709551615d", "18446744073709551615", "-1"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_may_be_fractions() {
        assert_eq!(parse_duration("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1.25m"), Ok(Duration::from_secs(75)));
        assert_eq!(parse_duration("0.001ms"), Ok(Duration::from_micros(1)));
        assert_eq!(parse_duration("0.0000000000000001d"), Ok(Duration::ZERO));
        for text in [".5", "5.", "1.2.3", ".", "0.5.s", "36500.0d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
