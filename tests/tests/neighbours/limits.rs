//! Limits of the process that one export reaches, and limits on the memory that its front-end may
//! map.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::DaemonOptions;
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::memory::{Region, memfd};
use ringhaul_kit::frontend::message::Message;
use ringhaul_kit::frontend::{Frontend, MEMORY_END, Setup, blk, check_service};
use ringhaul_kit::server::Engine;

use crate::scene::{Scene, disks};

for_each_engine! {
    memory_that_takes_all_addresses,
    a_write_beyond_the_limit_on_files,
}

/// The largest regions that the daemon takes, then smaller and smaller ones. They are holes, and
/// cost their owner nothing.
fn memory_that_takes_all_addresses(engine: Engine) -> Result<()> {
    const LARGEST: u64 = 1 << 46;
    const SMALLEST: u64 = 1 << 20;
    /// The default of `--max-guest-memory`.
    const LIMIT_OF_ONE: u64 = 16 << 40;
    let mut scene = Scene::with_engine(engine)?;
    let hole = Arc::new(memfd(1 << 47)?);
    let mut taken: Vec<Region> = Vec::new();
    let mut guest = Frontend::connect(scene.daemon.socket(), &Setup::default())?;
    guest.negotiate()?;
    guest.share_memory()?;
    let (mut bytes, mut addr) = (LARGEST, MEMORY_END.next_multiple_of(SMALLEST));
    while bytes >= SMALLEST && taken.len() < 400 {
        let region = Region {
            guest_addr: addr,
            bytes,
            user_addr: 0x1000_0000 + addr,
            file_offset: 0,
            file: Arc::clone(&hole),
        };
        match guest.send_checked(Message::add_region(&region)) {
            Ok(()) => {
                addr += bytes;
                taken.push(region);
            }
            // A refusal is an answer: the connection stays.
            Err(_) => bytes /= 2,
        }
    }
    let sum: u64 = taken.iter().map(|region| region.bytes).sum();
    ensure!(sum <= LIMIT_OF_ONE, "one front-end may share {sum} bytes in {} regions", taken.len());
    ensure!(sum > LIMIT_OF_ONE / 2, "only {sum} bytes could be shared");
    scene.daemon.wait_for_message("max-guest-memory", 1).context("the option is not named")?;
    // Bounced requests need memory while these regions are mapped.
    for _ in 0..300 {
        scene.file.run_misaligned().context("beside many addresses that are taken")?;
    }
    scene.check_neighbours()?;
    drop(guest);
    check_service(&mut scene.daemon)?;
    scene.terminate()
}

fn a_write_beyond_the_limit_on_files(engine: Engine) -> Result<()> {
    let options =
        DaemonOptions { wrapper: &["prlimit", "--fsize=8388608"], ..DaemonOptions::new(engine) };
    let mut scene = Scene::start(disks(), &options)?;
    let mut guest = Frontend::attach(scene.daemon.socket(), &Setup::default())?;
    for _ in 0..3 {
        let answer = guest.request(0, blk::OUT, (12 << 20) / 512, &[7; 4096], 0)?;
        ensure!(answer.status == blk::IOERR, "a write beyond the limit ended with {answer:?}");
        scene.check_neighbours()?;
    }
    guest.write(1, 0, &[8; 4096])?;
    ensure!(guest.read(0, 0, 4096)? == [8; 4096], "what is within the limit is not served");
    scene.terminate()
}
