//! Changes of a disk of another thread.

/// A change that has reached the remote end.
#[derive(Debug, Clone)]
pub enum Event {
    /// Bytes, also for zeroes and discards.
    Write(u64, Vec<u8>),
    /// Everything before is stable.
    Flush,
    /// The write before is stable.
    Stable,
}
