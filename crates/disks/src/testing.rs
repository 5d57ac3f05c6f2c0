//! Facts about the memory of a test.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

/// Returns true if the page with this address has this flag in /proc (proc_pid_smaps(5)).
pub(crate) fn has_flag(address: usize, wanted: &str) -> bool {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut is_there = false;
    for line in maps.lines() {
        let bounds = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16).ok();
        if let Some((start, end)) = bounds.and_then(|(a, b)| Some((number(a)?, number(b)?))) {
            is_there = (start..end).contains(&address);
        } else if is_there && let Some(flags) = line.strip_prefix("VmFlags:") {
            return flags.split_whitespace().any(|flag| flag == wanted);
        }
    }
    panic!("nothing is mapped there");
}
