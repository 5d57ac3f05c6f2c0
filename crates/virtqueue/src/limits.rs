//! How large rings and tables may be.

/// The largest queue that is served; the specification has up to 32768.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// The most descriptors of an indirect table. The specification has up to the queue size, but
/// Linux makes tables as long as the device allows segments, whatever the size of the queue.
pub const MAX_INDIRECT_ENTRIES: u16 = 1024;
