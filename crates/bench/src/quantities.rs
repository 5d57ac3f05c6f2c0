//! Numbers as people write them: sizes and lists of CPUs.

#![forbid(unsafe_code)]

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
}
