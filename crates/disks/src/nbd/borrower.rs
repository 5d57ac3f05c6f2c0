//! The waiter for a request that another IoThread carries out, and the form of its result.

use std::io;

use blockio::disk::{Extent, ExtentKind};
use blockio::driver::ForeignCompleter;

use super::answer::Failure;

/// The waiter for a request on another IoThread. If this is dropped, that IoThread makes the
/// request elsewhere.
pub(super) struct Borrower(Option<ForeignCompleter>);

/// The lowest bits of a result that is no extent. The errno of a failed flush follows, or none.
const NO_EXTENT: usize = 3;

impl Borrower {
    pub(super) fn new(completer: ForeignCompleter) -> Self {
        Self(Some(completer))
    }

    /// Completes the request. From now on its memory may go.
    pub(super) fn complete(mut self, result: Result<Extent, Failure>) {
        if let Some(completer) = self.0.take() {
            completer.complete(encode(result));
        }
    }
}

impl Drop for Borrower {
    fn drop(&mut self) {
        if let Some(completer) = self.0.take() {
            completer.complete(Ok(NO_EXTENT));
        }
    }
}

/// Encodes a result as that of a foreign op.
fn encode(result: Result<Extent, Failure>) -> io::Result<usize> {
    let extent = match result {
        Ok(extent) => extent,
        Err(Failure { errno, is_of_flush: true }) => {
            return Ok(usize::try_from(errno).unwrap_or(0) << 2 | NO_EXTENT);
        }
        Err(failure) => return Err(io::Error::from_raw_os_error(failure.errno)),
    };
    let kind = match extent.kind {
        ExtentKind::Data => 0,
        ExtentKind::Zero => 1,
        ExtentKind::Hole => 2,
    };
    let bytes = usize::try_from(extent.bytes).unwrap_or(usize::MAX).min(usize::MAX >> 3);
    Ok(bytes << 2 | kind)
}

/// Decodes the result that a [`Borrower`] got. `None`: the request is to be made elsewhere.
pub(super) fn decode(result: io::Result<usize>) -> Option<Result<Extent, Failure>> {
    let code = match result {
        Ok(NO_EXTENT) => return None,
        Ok(code) => code,
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            return Some(Err(Failure { errno, is_of_flush: false }));
        }
    };
    let kind = match code & 3 {
        0 => ExtentKind::Data,
        1 => ExtentKind::Zero,
        2 => ExtentKind::Hole,
        _ => {
            let errno = i32::try_from(code >> 2).unwrap_or(libc::EIO);
            return Some(Err(Failure { errno, is_of_flush: true }));
        }
    };
    Some(Ok(Extent { bytes: (code >> 2) as u64, kind }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_the_same_on_the_other_thread() {
        let extent = |bytes, kind| Ok(Extent { bytes, kind });
        let failure = |errno, is_of_flush| Err(Failure { errno, is_of_flush });
        for result in [
            extent(0, ExtentKind::Data),
            extent(4096, ExtentKind::Data),
            extent(1 << 60, ExtentKind::Zero),
            extent(512, ExtentKind::Hole),
            failure(libc::EIO, false),
            failure(libc::ENOSPC, false),
            failure(libc::EIO, true),
            failure(libc::ENOSPC, true),
        ] {
            assert_eq!(decode(encode(result)), Some(result));
        }
        // More than any request asks for: a shorter extent is right, too.
        for kind in [ExtentKind::Data, ExtentKind::Hole] {
            let Some(Ok(found)) = decode(encode(extent(1 << 62, kind))) else { panic!("{kind:?}") };
            assert!(found.kind == kind && found.bytes >= 1 << 60, "{found:?}");
        }
        assert_eq!(decode(Ok(NO_EXTENT)), None);
    }
}
