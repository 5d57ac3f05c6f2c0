//! Exports of one daemon on one IoThread: what a guest, a front-end, a disk or a reader of the log
//! does to one of them, the others go on.
//!
//! Nothing but `long.rs` measures time: a neighbour makes verified requests while the other export
//! is provably stuck or busy. How fast it is beside that, `cargo lab neighbours` measures.

mod busy;
mod descriptors;
mod limits;
mod log;
mod long;
mod report;
mod scene;
mod slow_disks;
