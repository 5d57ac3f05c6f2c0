//! What a ring of io_uring is set up with, and how the kernel is entered.

use std::os::fd::BorrowedFd;

/// Flags of `io_uring_enter` (linux/io_uring.h).
pub(super) const ENTER_GETEVENTS: u32 = 1 << 0;
pub(super) const ENTER_SQ_WAKEUP: u32 = 1 << 1;
pub(super) const ENTER_SQ_WAIT: u32 = 1 << 2;

/// Files that can be registered; others work without.
pub(in crate::engine) const FILES_MAX: u32 = 256;
/// Pieces of memory that can be registered; others work without.
pub(in crate::engine) const BUFFERS_MAX: u32 = 2048;

/// Submission entries. More ops than this in one go take more than one system call.
pub(super) const ENTRIES_MAX: u32 = 256;
/// Fewer would leave no room for watches while the kernel takes no entries for a moment.
pub(super) const ENTRIES_MIN: u32 = 64;

/// How a ring is set up.
pub(in crate::engine) struct Setup<'a> {
    pub(in crate::engine) depth: u32,
    /// A kernel thread takes submissions in, so that a submit needs no system call.
    pub(in crate::engine) sqpoll: bool,
    /// The loop may wait for the ring's descriptor.
    pub(in crate::engine) embedded: bool,
    /// The kernel looks for completions only when asked to, or all the time in its thread for
    /// submissions, which is that of the ring with this descriptor.
    pub(in crate::engine) polled_beside: Option<BorrowedFd<'a>>,
}

/// What an `io_uring_enter` waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitFor {
    Nothing,
    /// A completion, or the end of the timeout.
    Completion,
    /// A free submission entry. Without a submission thread the call itself makes it.
    Room,
}

/// The flags of an `io_uring_enter`; `None` if there need not be one. `asleep`: whether the
/// submission thread sleeps, if there is one.
pub(super) fn enter_flags(asleep: Option<bool>, waits: WaitFor) -> Option<u32> {
    let flags = match (asleep, waits) {
        (None, _) | (Some(false), WaitFor::Completion) => 0,
        (Some(false), WaitFor::Nothing) => return None,
        (Some(false), WaitFor::Room) => ENTER_SQ_WAIT,
        (Some(true), WaitFor::Room) => ENTER_SQ_WAKEUP | ENTER_SQ_WAIT,
        (Some(true), _) => ENTER_SQ_WAKEUP,
    };
    Some(flags | ENTER_GETEVENTS)
}

/// Submission entries of a ring for `depth` ops.
pub(super) fn entries_for(depth: u32) -> u32 {
    depth.next_power_of_two().clamp(ENTRIES_MIN, ENTRIES_MAX)
}
