//! The events that the loop awaits at a descriptor.

/// The event to await at a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// An eventfd that is written, or a socket with data.
    Readable,
    /// A socket that has room.
    Writable,
}
