//! Exports of one daemon on one IoThread: faults of a guest, a front-end, a disk or a reader of the
//! log in one export do not stop its neighbours.
//!
//! Only `long.rs` measures time. Elsewhere a neighbour makes verified requests while a different
//! export is provably stuck or busy. `cargo lab neighbours` measures the speed of the neighbour.

mod busy;
mod descriptors;
mod limits;
mod log;
mod long;
mod report;
mod scene;
mod slow_disks;
