//! Takeover: exports, sockets, disks and connected guests move to another process while the guests
//! run (docs/guide/crash-and-upgrade.md#upgrade-while-guests-run).
//!
//! The new process sends requests to the old one's control socket, in three steps. First the old
//! process describes its exports, and continues to serve while the new one opens all of them. Then
//! the old process stops its queues and reports their positions; the new one prepares everything
//! but starts nothing. Finally the new process announces that it takes over. Once the old process
//! has read that, only the new one may serve, and does so after its confirmation. Before that point
//! any failure lets the old process resume with everything that it had.

pub(crate) mod new_process;
pub(crate) mod old_process;
pub(crate) mod upgrade;
pub(crate) mod wire;
