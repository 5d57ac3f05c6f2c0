//! Exports of one daemon on one IoThread: what a guest, a front-end, a disk or a reader of the log
//! does to one of them, the others go on.
//!
//! Nothing here measures time: a neighbour makes verified requests while the other export is
//! provably stuck or busy. How fast it is beside that, `cargo xtask neighbours` measures.

mod busy;
mod descriptors;
mod limits;
mod log;
mod scene;
mod slow_disks;

use ringhaul_tests::guest::Engine;

/// Whether a test is left out because the daemon is not yet as it demands, with engines `not_yet`.
/// The environment variable `RINGHAUL_TEST_ALL` runs it all the same.
fn is_left_out(engine: Engine, not_yet: &[Engine]) -> bool {
    let left_out = not_yet.contains(&engine) && std::env::var_os("RINGHAUL_TEST_ALL").is_none();
    if left_out {
        eprintln!("skipped: engine {engine} does not do this yet");
    }
    left_out
}
