//! Protocol features of vhost-user.

pub const MQ: u64 = 1 << 0;
pub const LOG_SHMFD: u64 = 1 << 1;
pub const REPLY_ACK: u64 = 1 << 3;
pub const BACKEND_REQ: u64 = 1 << 5;
pub const CONFIG: u64 = 1 << 9;
pub const INFLIGHT_SHMFD: u64 = 1 << 12;
pub const RESET_DEVICE: u64 = 1 << 13;
pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
pub const STATUS: u64 = 1 << 16;
pub const GET_VRING_BASE_INFLIGHT: u64 = 1 << 20;
pub const GET_VRING_BASE_SKIP_DRAIN: u64 = 1 << 23;
