//! Errors: each that a request is answered with has a cause, and none that was put in is lost.

use crate::content::SECTOR;
use crate::failure::Failure;
use crate::faults::{Class, Injected};

/// A request that failed with an error which only a fault explains, or was not answered at all.
pub(crate) struct Failed {
    /// The classes of ops whose errors are its own.
    pub(crate) classes: &'static [Class],
    pub(crate) begin: u64,
    pub(crate) end: u64,
    /// First sectors and counts.
    pub(crate) ranges: Vec<(u64, u64)>,
    pub(crate) answered: bool,
    /// It was told that its blocks are gone, which hides nothing but a disk that says the same.
    pub(crate) is_gone: bool,
}

pub(crate) fn check(injected: &[Injected], failed: &[Failed]) -> Result<(), Failure> {
    for request in failed.iter().filter(|request| request.answered) {
        let has_cause = |error| explains(error, request) || has_lost_before(error, request);
        if !injected.iter().any(has_cause) {
            let Failed { classes, begin, end, ranges, .. } = request;
            let text = format!("{classes:?} {ranges:?}, out from {begin} to {end}");
            return Err(Failure::new("failed without a cause", text));
        }
    }
    for error in injected.iter().filter(|error| error.must_fail) {
        if !failed.iter().any(|request| explains(error, request)) {
            return Err(Failure::new("swallowed error", format!("{error:?}")));
        }
    }
    Ok(())
}

/// Once data may be lost, nothing is answered any more that promises stable storage.
fn has_lost_before(error: &Injected, request: &Failed) -> bool {
    error.loses && request.classes.contains(&Class::Flush) && error.when < request.end
}

fn explains(error: &Injected, request: &Failed) -> bool {
    let Failed { classes, begin, end, ranges, .. } = request;
    let fits = error.class == Class::Any || classes.contains(&error.class);
    let is_data = !matches!(error.class, Class::Any | Class::Flush);
    let sector = SECTOR as u64;
    let overlaps = ranges.iter().any(|&(first, count)| {
        error.offset < (first + count) * sector && first * sector < error.offset + error.len
    });
    (error.refuses || !request.is_gone)
        && fits
        && *begin < error.when
        && error.when < *end
        && (!is_data || overlaps)
}
