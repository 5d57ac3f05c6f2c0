//! One process takes over from another: exports, sockets, disks and guests that are attached, while
//! the guests go on (docs/upgrade.md).
//!
//! The new process asks the old one over its control socket, in three steps. First the old one
//! describes what there is, and goes on serving while the new one opens all of it. Then it has its
//! queues stop and says how far they have come; the new one makes everything ready but starts
//! nothing. Then the new one says that it takes over. From when the old one has read that, only
//! the new one may serve, and does when it is told so. Until then the old one goes on if anything
//! goes wrong, with what it had.

pub(crate) mod arguments;
pub(crate) mod format;
pub(crate) mod give;
pub(crate) mod start;
pub(crate) mod take;
pub(crate) mod wire;
