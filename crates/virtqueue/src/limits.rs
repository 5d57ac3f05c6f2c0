//! The largest sizes of rings and tables.

/// The largest size of a queue in entries. The specification allows up to 32768.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// The most descriptors of an indirect table. The specification allows as many as the queue size.
/// Linux makes tables as long as the device allows segments, regardless of the queue size.
pub const MAX_INDIRECT_ENTRIES: u16 = 1024;
