//! Sizes with suffixes, as in options.

use std::num::IntErrorKind;

/// Parses a number of bytes such as `512`, `4k`, `64G` or `2GiB`. The suffixes are K, M, G, T and
/// P, in either case, and may end in `iB`, `i` or `B`. All of them are powers of 1024, as in fio.
///
/// # Errors
///
/// If the text is not such a number, or if the size does not fit in 64 bits.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let suffix = &text[digits.len()..];
    let shift = match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "ki" | "kib" => 10,
        "m" | "mb" | "mi" | "mib" => 20,
        "g" | "gb" | "gi" | "gib" => 30,
        "t" | "tb" | "ti" | "tib" => 40,
        "p" | "pb" | "pi" | "pib" => 50,
        _ => {
            return Err(format!(
                "'{text}' has the unknown size suffix '{suffix}' (expected: K, M, G, T, P)"
            ));
        }
    };
    let too_large = || format!("'{text}' is not a size that 64 bits can hold");
    match digits.parse::<u64>() {
        Ok(number) => number.checked_mul(1 << shift).ok_or_else(too_large),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Err(too_large()),
        Err(_) => Err(format!("'{text}' is not a size, such as 64G")),
    }
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn suffixes_are_powers_of_1024() {
        for (text, bytes) in [
            ("512", 512),
            ("0", 0),
            ("7B", 7),
            ("4k", 4 << 10),
            ("128K", 128 << 10),
            ("3mb", 3 << 20),
            ("2gib", 2 << 30),
            ("1Ti", 1 << 40),
            ("16383p", 16383 << 50),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn an_error_quotes_the_text_and_names_its_fault() {
        for (text, why) in [
            ("", "is not a size"),
            ("k", "is not a size"),
            ("-1", "is not a size"),
            ("1.5k", "is not a size"),
            ("1 k", "is not a size"),
            ("4q", "unknown size suffix 'q'"),
            ("4kk", "unknown size suffix 'kk'"),
            ("16384p", "64 bits"),
            ("99999999999T", "64 bits"),
            ("99999999999999999999", "64 bits"),
        ] {
            let message = parse_size(text).unwrap_err();
            assert!(message.contains(&format!("'{text}'")) && message.contains(why), "{message}");
        }
    }
}
