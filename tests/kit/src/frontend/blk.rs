//! Types of requests (virtio 1.3, section 5.2.6).

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;
/// Values of the status byte.
pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;
/// The value of the status byte before the device writes it.
pub const PENDING: u8 = 0xee;
