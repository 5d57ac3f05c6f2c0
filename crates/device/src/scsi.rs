//! virtio-scsi (virtio 1.3, section 5.6).

pub(crate) mod answer;
pub(crate) mod block;
pub(crate) mod cdb;
pub mod config;
pub(crate) mod control_queue;
pub(crate) mod device;
pub(crate) mod event_queue;
pub(crate) mod held;
mod inquiry;
pub(crate) mod mode;
pub(crate) mod outcome;
pub(crate) mod report;
pub(crate) mod request;
pub(crate) mod request_queue;
pub(crate) mod reserve;
pub(crate) mod task_wait;
pub mod unit;
pub(crate) mod units;
pub(crate) mod unmap;
pub(crate) mod verify;

pub use device::{RemovedUnit, ScsiDevice, UnitError};

#[cfg(test)]
mod tests;
