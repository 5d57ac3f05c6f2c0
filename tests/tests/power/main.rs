//! Images and raw files on a disk that loses its power at any moment: QEMU finds no damage in the
//! remains of an image, and each sector has contents that the guest may expect.
//!
//! A recorder below the daemon logs every change of the image. The guest logs each request and its
//! answer by the same clock. A test cuts one run at many moments.

mod guest;
mod recorded;

use anyhow::{Result, ensure};

use recorded::{Base, Below, Format, Kind, Recorded};

/// Cuts of each recorded run.
const CUTS: usize = 42;

/// The plain kind of image; each test varies some of its fields.
const PLAIN: Kind = Kind {
    format: Format::Qcow2,
    options: "cluster_size=64k",
    base: Base::None,
    below: Below::Fuse,
    cache: "none",
    is_used: false,
    grows: false,
    is_taken_over: false,
    requests: 600,
};

fn check_survival(kind: &Kind) -> Result<()> {
    let Some(recorded) = Recorded::run(kind)? else { return Ok(()) };
    let leaks = recorded.check_cuts(CUTS)?;
    eprintln!("{kind}: {leaks} of {CUTS} cuts left clusters behind");
    Ok(())
}

macro_rules! images_survive {
    ($($name:ident: { $($field:ident: $value:expr),* },)*) => {
        $(#[test]
        fn $name() -> Result<()> {
            check_survival(&Kind { $($field: $value,)* ..PLAIN })
        })*
    };
}

images_survive! {
    clusters_of_64k: {},
    clusters_of_64k_in_use: { is_used: true },
    clusters_of_64k_that_grow: { grows: true },
    clusters_of_4k: { options: "cluster_size=4k", grows: true },
    clusters_of_512: { options: "cluster_size=512", requests: 300 },
    version_2: { options: "cluster_size=4k,compat=0.10" },
    counts_of_1_bit: { options: "cluster_size=4k,refcount_bits=1", is_used: true },
    counts_of_64_bits: { options: "cluster_size=512,refcount_bits=64", requests: 300 },
    tables_ahead: { options: "preallocation=metadata" },
    over_raw: { base: Base::Raw },
    over_an_image: { options: "cluster_size=4k", base: Base::Qcow2, is_used: true },
    on_a_server: { below: Below::Nbd },
    small_clusters_on_a_server: { options: "cluster_size=4k", below: Below::Nbd, is_used: true },
    passed_to_another_process: { options: "cluster_size=4k", is_taken_over: true },
    stable_writes: { cache: "directsync", options: "cluster_size=4k" },
    stable_writes_in_use: { cache: "writethrough", is_used: true, grows: true },
    stable_writes_on_a_server: { cache: "directsync", below: Below::Nbd, is_taken_over: true },
    raw: { format: Format::Raw, grows: true },
    raw_stable_writes: { format: Format::Raw, cache: "directsync", is_taken_over: true },
    raw_stable_writes_without_direct_io: { format: Format::Raw, cache: "writethrough" },
}

/// A device that ignores flushes loses data that the guest has flushed, and the tests above notice.
#[test]
fn a_disk_that_ignores_flushes_is_noticed() -> Result<()> {
    let Some(recorded) = Recorded::run(&Kind { options: "cluster_size=4k", ..PLAIN })? else {
        return Ok(());
    };
    let lost = recorded.losses_without_flushes(CUTS)?;
    ensure!(lost > CUTS / 2, "{lost} of {CUTS} cuts without flushes were noticed");
    Ok(())
}
