//! A driver with an inflight region, or with answers in order, and a daemon that is killed or
//! replaced under it again and again.
//!
//! Every write of a block has different contents. A write that is lost, late or done twice is found
//! by the next read of the block, or at the end.

mod added_exports;
mod driver;
mod guide;
mod images;
mod kept_front_ends;
mod package;
mod setup;
mod systemd;
mod takeovers;
mod unit;

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::LIMIT;
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::message::Channel;
use ringhaul_kit::server::{Cache, Engine, Export, Program, Server};
use serde_json::json;
use tempfile::TempDir;

use driver::{BLOCK_BYTES, Driver, FEW_BLOCKS, QUEUE_SIZE, QUEUES, Version, check_file};

for_each_engine! {
    a_killed_daemon_loses_and_repeats_no_request,
    a_daemon_that_answers_in_order_needs_no_region,
}

/// The variable with the number of kills; `cargo xtask crash --rounds N` sets it.
const ROUNDS: &str = "RINGHAUL_CRASH_ROUNDS";
const ROUNDS_DEFAULT: u32 = 30;
/// The interval of rounds in which the old or the new process is killed during a takeover.
const TAKEOVER_EVERY: u32 = 5;

/// The number of rounds from [`ROUNDS`], or the default.
fn rounds(default: u32) -> Result<u32> {
    match std::env::var(ROUNDS) {
        Ok(text) => text.parse().with_context(|| format!("{ROUNDS} is {text:?}, and no number")),
        Err(_) => Ok(default),
    }
}

fn a_killed_daemon_loses_and_repeats_no_request(engine: Engine) -> Result<()> {
    kill_many_times(engine, true)
}

fn a_daemon_that_answers_in_order_needs_no_region(engine: Engine) -> Result<()> {
    kill_many_times(engine, false)
}

fn kill_many_times(engine: Engine, keeps_region: bool) -> Result<()> {
    let folders: [TempDir; 2] =
        [tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?, tempfile::tempdir()?];
    let disk = folders[0].path().join("disk.img");
    File::create(&disk)?.set_len(FEW_BLOCKS * BLOCK_BYTES as u64)?;
    let export = export(&disk, &folders[1].path().join("socket"), engine, keeps_region);
    let server = Server::start(Program::Ringhaul, &export)?;
    let driver = Driver::new(&export.socket, FEW_BLOCKS, keeps_region)?;
    let kills = Kills {
        rounds: rounds(ROUNDS_DEFAULT)?,
        takeover_every: TAKEOVER_EVERY,
        check_disk: &|| Ok(()),
    };
    check_file(&disk, &kills.carry_out(server, driver)?)
}

/// The number of kills and takeovers of a daemon.
struct Kills<'a> {
    rounds: u32,
    takeover_every: u32,
    /// Checks the disk while no daemon serves it.
    check_disk: &'a dyn Fn() -> Result<()>,
}

impl Kills<'_> {
    /// Returns the versions that the disk must have after all requests are answered. No daemon is
    /// left then.
    fn carry_out(&self, mut server: Server, mut driver: Driver) -> Result<Vec<Version>> {
        let mut export = server.export().clone();
        driver.attach()?;
        let (mut left, mut again, mut survived) = (0, 0, 0);
        for round in 0..self.rounds {
            driver.sleeps = round % 2 == 0;
            let count = driver.below(400);
            driver.run(count, false)?;
            let is_takeover = round % self.takeover_every == 0;
            let survives = is_takeover && kill_during_takeover(&mut server, &mut driver)?;
            survived += u32::from(survives);
            if !survives {
                if !is_takeover {
                    // Kill the daemon at a random moment.
                    driver.run_below(300, false)?;
                    server.kill()?;
                }
                again +=
                    u32::from(server.messages().contains("of an earlier process are repeated"));
                drop(server);
                (self.check_disk)().with_context(|| format!("round {round}, after the kill"))?;
                driver.take()?;
                left += driver.unanswered();
                export.io_threads = 1 + u16::from(round % 4 < 2);
                server = Server::start(Program::Ringhaul, &export)?;
                driver.frontend.channel = Channel::connect(&export.socket)?;
                driver.attach().with_context(|| format!("round {round}; {}", server.messages()))?;
            }
            driver
                .run(1, false)
                .with_context(|| format!("round {round}; {}", server.messages()))?;
        }
        driver.run(0, true)?;
        eprintln!(
            "{}: {} kills, {} in takeovers of which {survived} were survived, {} requests \
             answered, {left} left by daemons, {again} daemons did some again",
            export.engine,
            self.rounds,
            self.rounds.div_ceil(self.takeover_every),
            driver.answered
        );
        let versions = end(server, driver)?;
        (self.check_disk)().context("at the end")?;
        Ok(versions)
    }
}

/// Ends a daemon that has answered all requests. Returns the versions that its disk must have.
fn end(mut server: Server, driver: Driver) -> Result<Vec<Version>> {
    let Driver { frontend, versions, .. } = driver;
    drop(frontend);
    let status = server.terminate(LIMIT)?;
    ensure!(status.success(), "{}", server.messages());
    Ok(versions)
}

/// Begins a takeover, and kills the new process or the old one at a random moment. Returns true if
/// the survivor serves: the old process unless the new one has taken over, the new one if the old
/// one confirmed that.
fn kill_during_takeover(server: &mut Server, driver: &mut Driver) -> Result<bool> {
    let successor = server.begin_upgrade()?;
    // Most of a takeover passes before queues stop.
    if driver.below(4) > 0 {
        let deadline = Instant::now() + LIMIT;
        while !successor.messages().contains("ready to take over") {
            ensure!(Instant::now() < deadline, "nothing takes over:\n{}", successor.messages());
            driver.run_below(100, true)?;
        }
        driver.run_below(3000, true)?;
    } else {
        driver.run_below(10_000, true)?;
    }
    if driver.below(2) == 0 {
        return server.kill_during_upgrade(successor);
    }
    successor.kill()?;
    // This waits until the takeover is decided.
    Ok(server.call("set", &json!({ "poll-max-us": 32 })).is_ok())
}

fn export(file: &Path, socket: &Path, engine: Engine, keeps_region: bool) -> Export {
    Export {
        socket: socket.to_owned(),
        file: file.to_owned(),
        disk: None,
        engine,
        cache: if engine == Engine::Threads { Cache::Writeback } else { Cache::None },
        num_queues: QUEUES,
        queue_size: QUEUE_SIZE,
        serial: "crash".into(),
        logical_block_bytes: 512,
        read_only: false,
        units: None,
        in_order: !keeps_region,
        io_threads: 1,
    }
}
