//! Errors: each error of an answer has a cause, and no injected error is lost.

use crate::content::SECTOR;
use crate::failure::Failure;
use crate::faults::{Class, Injected};

/// A request that failed with an error that only a fault explains, or that was not answered.
pub(crate) struct FailedRequest {
    /// Classes of ops with errors that this request may report.
    pub(crate) classes: &'static [Class],
    pub(crate) begin: u64,
    pub(crate) end: u64,
    /// First sectors and counts.
    pub(crate) ranges: Vec<(u64, u64)>,
    pub(crate) answered: bool,
    /// The request failed because its blocks are gone. That accounts only for refusals of the disk.
    pub(crate) is_gone: bool,
}

pub(crate) fn check(injected: &[Injected], failed: &[FailedRequest]) -> Result<(), Failure> {
    for request in failed.iter().filter(|request| request.answered) {
        let has_cause = |error| explains(error, request) || has_lost_before(error, request);
        if !injected.iter().any(has_cause) {
            let FailedRequest { classes, begin, end, ranges, .. } = request;
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

/// True for promises of stable storage after a possible loss of data: they must fail from then on.
fn has_lost_before(error: &Injected, request: &FailedRequest) -> bool {
    error.loses && request.classes.contains(&Class::Flush) && error.when < request.end
}

fn explains(error: &Injected, request: &FailedRequest) -> bool {
    let FailedRequest { classes, begin, end, ranges, .. } = request;
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
