//! Tests of the crate against hand-written rings, against `virtio-queue` as an oracle, and against
//! the driver side of `virtio-driver`.

mod chains;
mod driver;
mod driver_threads;
mod events;
mod front_end;
mod litmus;
mod memory;
mod oracle;
mod packed;
mod packed_log;
mod packed_model;
mod queue;
mod ring;
mod sigbus;
mod writable_prefix;
