//! Errors: each that a request is answered with has a cause, and none that was put in is lost.

use crate::content::SECTOR;
use crate::failure::Failure;
use crate::faults::{Class, Injected};
use crate::request::Kind;

/// A request that failed with an error which only a fault explains, or was not answered at all.
pub(crate) struct Failed {
    pub(crate) kind: Kind,
    pub(crate) begin: u64,
    pub(crate) end: u64,
    /// First sectors and counts.
    pub(crate) ranges: Vec<(u64, u64)>,
    pub(crate) answered: bool,
}

pub(crate) fn check(injected: &[Injected], failed: &[Failed]) -> Result<(), Failure> {
    for request in failed.iter().filter(|request| request.answered) {
        let has_cause = |error| explains(error, request) || has_lost_before(error, request);
        if !injected.iter().any(has_cause) {
            let Failed { kind, begin, end, ranges, .. } = request;
            let text = format!("{kind:?} {ranges:?}, out from {begin} to {end}");
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
    error.loses && request.kind != Kind::Read && error.when < request.end
}

fn explains(error: &Injected, request: &Failed) -> bool {
    let Failed { kind, begin, end, ranges, .. } = request;
    let fits = match error.class {
        Class::Any => true,
        Class::Read => *kind == Kind::Read,
        Class::Write => matches!(kind, Kind::Write | Kind::WriteZeroes),
        // Without a write cache others flush too.
        Class::Flush => *kind != Kind::Read,
        Class::Deallocate => matches!(kind, Kind::Discard | Kind::WriteZeroes),
    };
    let is_data = !matches!(error.class, Class::Any | Class::Flush);
    let sector = SECTOR as u64;
    let overlaps = ranges.iter().any(|&(first, count)| {
        error.offset < (first + count) * sector && first * sector < error.offset + error.len
    });
    fits && *begin < error.when && error.when < *end && (!is_data || overlaps)
}
