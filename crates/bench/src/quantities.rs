//! Numbers as people write them: sizes, lists of CPUs, logical units.

#![forbid(unsafe_code)]

use std::fmt;

use rustix::thread::CpuSet;

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

/// Flat space addressing in the first byte of a single-level LUN, for numbers up to 16383.
const FLAT_SPACE: u8 = 0x40;
const ADDRESSING: u8 = 0xc0;
/// The largest LUN of flat space addressing.
const LUN_MAX: u16 = 0x3fff;

/// A logical unit by its target and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LunAddress {
    target: u8,
    lun: u16,
}

impl LunAddress {
    /// The only unit of many devices.
    pub(crate) const FIRST: Self = Self::lun0(0);

    /// The unit that every target answers for, even if it does not exist.
    pub(crate) const fn lun0(target: u8) -> Self {
        Self { target, lun: 0 }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let (target, lun) = text.split_once(':').unwrap_or(("0", text));
        let bad = || {
            format!(
                "'{text}' is not a logical unit: use TARGET:LUN or LUN, with targets up to 255 and \
                 LUNs up to {LUN_MAX}, or all"
            )
        };
        let target = target.parse().map_err(|_| bad())?;
        let lun = lun.parse().ok().filter(|lun| *lun <= LUN_MAX).ok_or_else(bad)?;
        Ok(Self { target, lun })
    }

    /// The `lun` field of a request (section 5.6.6.1).
    #[inline]
    pub(crate) fn field(&self) -> [u8; 8] {
        let [high, low] = self.lun.to_be_bytes();
        [1, self.target, FLAT_SPACE | high, low, 0, 0, 0, 0]
    }

    /// Reads an entry of the list that REPORT LUNS of a target returns: a single-level LUN, or the
    /// field of a request, which the well-known unit may use. `None` for any other form, such as
    /// well-known units.
    pub(crate) fn from_entry(of_target: u8, entry: [u8; 8]) -> Option<Self> {
        let (target, high, low, rest) = match entry {
            [1, target, high, low, a, b, c, d] => (target, high, low, [a, b, c, d, 0, 0]),
            [high, low, rest @ ..] => (of_target, high, low, rest),
        };
        let lun = match high & ADDRESSING {
            0 if high == 0 => u16::from(low),
            FLAT_SPACE => u16::from_be_bytes([high & !ADDRESSING, low]),
            _ => return None,
        };
        (rest == [0; 6]).then_some(Self { target, lun })
    }
}

impl fmt::Display for LunAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.target, self.lun)
    }
}

/// Values of `--lun`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LunChoice {
    /// A single unit.
    One(LunAddress),
    /// All disks that the device reports.
    All,
}

impl LunChoice {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if text == "all" { Ok(Self::All) } else { LunAddress::parse(text).map(Self::One) }
    }
}

impl fmt::Display for LunChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(address) => address.fmt(f),
            Self::All => f.write_str("all"),
        }
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

    #[test]
    fn units_are_given_by_target_and_lun() {
        for (text, target, lun) in [("0", 0, 0), ("5", 0, 5), ("3:16383", 3, 16383)] {
            let address = LunAddress { target, lun };
            assert_eq!(LunChoice::parse(text), Ok(LunChoice::One(address)), "{text}");
        }
        assert_eq!(LunChoice::parse("all"), Ok(LunChoice::All));
        for text in ["", ":", "256:0", "0:16384", "-1", "1:2:3", "ALL", "1.0", "+ 1"] {
            let message = LunChoice::parse(text).unwrap_err();
            assert!(message.contains("TARGET:LUN"), "{message}");
        }
        assert_eq!(LunChoice::parse("7").unwrap().to_string(), "0:7");
        assert_eq!(LunChoice::All.to_string(), "all");
    }

    #[test]
    fn an_address_is_a_single_level_lun() {
        let address = LunAddress { target: 2, lun: 0x1234 };
        assert_eq!(address.field(), [1, 2, 0x52, 0x34, 0, 0, 0, 0]);
        assert_eq!(LunAddress::FIRST.field(), [1, 0, 0x40, 0, 0, 0, 0, 0]);
        assert_eq!(LunAddress::from_entry(9, address.field()), Some(address));
    }
}
