//! The limits on the size of files and on open files (`RLIMIT_NOFILE`), which exports share.

use std::io;

use iomem::fits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors set aside: the most that one message brings, which are open before they are counted,
/// and descriptors that the system's libraries and engines may still open.
const RESERVED: usize = 253 + 64;

/// Descriptors set aside for each export: the connection of its next front-end and one that is
/// being closed.
const RESERVED_EACH: usize = 2;

/// The smallest share: enough for a front-end with some queues if the limit is unreasonably low.
const SHARE_MIN: usize = 32;

/// Makes a write beyond the limit on the size of files (`RLIMIT_FSIZE`) fail with EFBIG, an error
/// of one request. By default the write also raises SIGXFSZ, which ends the process and all its
/// exports. Applies to the whole process.
///
/// # Errors
///
/// When the kernel refuses.
pub fn survive_size_limit() -> io::Result<()> {
    // SAFETY: no handler is installed. Only the default action of a signal is replaced, which
    // nothing else in this process handles.
    let previous = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if previous == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Raises the limit on open files as far as the system allows. A front-end may bring three
/// descriptors for each of 256 queues, and their IoThreads duplicate them: more than the usual soft
/// limit of 1024.
pub(crate) fn raise() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!("cannot raise the limit on open files: {error}");
    }
}

/// Returns the number of descriptors that each export's front-end may have open, so that no
/// front-end starves another. The limit minus all other descriptors is divided equally. Front-ends
/// have `of_front_ends` open now.
#[must_use]
pub(crate) fn share(exports: usize, of_front_ends: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    // Other threads open and close descriptors during the count, so it may fall short.
    let open = open.saturating_sub(of_front_ends);
    limit.map_or(usize::MAX, |limit| part_of(fits(limit, "the limit on open files"), open, exports))
}

fn part_of(limit: usize, open: usize, exports: usize) -> usize {
    let reserved = open + RESERVED + RESERVED_EACH * exports;
    (limit.saturating_sub(reserved) / exports.max(1)).max(SHARE_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_shares_together_leave_room() {
        for exports in 1..100 {
            let share = part_of(1 << 16, 300, exports);
            assert!(300 + RESERVED + exports * (share + RESERVED_EACH) <= 1 << 16);
        }
        assert_eq!(part_of(100, 90, 4), SHARE_MIN);
        assert_eq!(part_of(1024, 20, 0), 1024 - 20 - RESERVED);
    }
}
