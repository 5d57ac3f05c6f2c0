//! Numbers as people write them: sizes, durations, lists of CPUs.

#![forbid(unsafe_code)]

use std::num::IntErrorKind;
use std::time::Duration;

use rustix::thread::CpuSet;

/// Parses a duration with fio's suffixes; a bare number is in seconds: `10`, `0.5`, `500ms`, `2m`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
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

/// A set of CPUs, written as `0,2-3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList {
    cpus: Vec<usize>,
}

impl CpuList {
    /// Parses a comma-separated list of CPU numbers and ranges.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let bad = || format!("'{text}' is not a list of CPUs: use numbers and ranges, as in 0,2-3");
        let number = |part: &str| part.trim().parse::<usize>().map_err(|_| bad());
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            if first > last {
                return Err(bad());
            }
            if last >= CpuSet::MAX_CPU {
                return Err(format!("CPU {last} is beyond {}, the last one", CpuSet::MAX_CPU - 1));
            }
            cpus.extend(first..=last);
        }
        Ok(Self { cpus })
    }

    /// Returns the set in the kernel's form.
    pub(crate) fn to_set(&self) -> CpuSet {
        let mut set = CpuSet::new();
        for cpu in &self.cpus {
            set.set(*cpu);
        }
        set
    }
}

/// Shows a size in the form of the command line: `4k`, `1m`, `513`.
pub(crate) fn show_bytes(bytes: u64) -> String {
    for (shift, suffix) in [(40, "t"), (30, "g"), (20, "m"), (10, "k")] {
        if bytes != 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{suffix}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// Shows an amount of data to three or four digits with a binary unit: `4.88 GiB`.
pub(crate) fn show_amount(bytes: f64) -> String {
    let (value, unit) = scale(bytes, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
    format!("{value} {unit}")
}

/// Shows a count to three or four digits: `123k`, `4.86M`.
pub(crate) fn show_count(count: f64) -> String {
    let (value, unit) = scale(count, 1000.0, &["", "k", "M", "G", "T"]);
    format!("{value}{unit}")
}

fn scale<'a>(mut value: f64, base: f64, units: &[&'a str]) -> (String, &'a str) {
    let mut index = 0;
    while value >= base && index + 1 < units.len() {
        value /= base;
        index += 1;
    }
    let decimals = match value {
        v if index == 0 && v.fract() == 0.0 => 0,
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    (format!("{value:.decimals$}"), units[index])
}

#[cfg(test)]
mod tests {
    use ringhaul_options::parse_size;

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

    #[test]
    fn cpu_lists_take_ranges() {
        assert_eq!(CpuList::parse("0,2-3"), Ok(CpuList { cpus: vec![0, 2, 3] }));
        for text in ["", "a", "3-2", "1-", "0,,1", "100000"] {
            assert!(CpuList::parse(text).is_err(), "{text}");
        }
        let set = CpuList { cpus: vec![1, 5] }.to_set();
        assert!(set.is_set(1) && set.is_set(5) && set.count() == 2);
    }

    #[test]
    fn shown_sizes_have_the_form_of_options() {
        for text in ["4k", "513", "1m", "12g", "0"] {
            assert_eq!(parse_size(text).map(show_bytes), Ok(text.to_owned()));
        }
        assert_eq!(show_amount(5_242_880.0), "5.00 MiB");
        assert_eq!(show_count(123_456.0), "123k");
        assert_eq!(show_count(7.0), "7");
    }
}
