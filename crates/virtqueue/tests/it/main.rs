//! Tests of the crate against hand-written rings, against `virtio-queue` as an oracle, and against
//! the driver side of `virtio-driver`.

mod chains;
mod driver;
mod events;
mod front_end;
mod litmus;
mod memory;
mod oracle;
mod queue;
mod ring;
mod sigbus;
mod writable_prefix;
