//! The daemon is killed, or stopped, again and again under verified load, and the guest does not
//! notice.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::server::{Cache, Engine, Export, Server};
use serde_json::{Value, json};

use super::{LIMIT, Scene, boot, check_clean_exit, scenario, verified};

const KILLS: u64 = 30;
const STOPS: u64 = 10;

/// How many requests the server has answered since it started.
fn served(server: &Server) -> Result<u64> {
    let shown = server.call("export.show", &json!({ "export": server.export().socket }))?;
    let kinds = shown["served"].as_object().context("the export has served nothing")?;
    let count = |kind: &Value| kind["requests"].as_u64();
    kinds.values().map(count).sum::<Option<u64>>().context("a kind of requests has no count")
}

/// Waits until the server has answered this many requests.
pub(super) fn wait_served(server: &Server, wanted: u64) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while served(server)? < wanted {
        ensure!(Instant::now() < deadline, "the guest does not go on:\n{}", server.messages());
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// How the daemon ends each time, and how often.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Kill,
    Stop,
}

fn restarts(end: End, engine: Engine, cache: Cache, is_scsi: bool) -> Result<()> {
    let scene = Scene::new()?;
    let export = scene.export(&format!("restarts-{engine}"), engine, cache)?;
    let export = Export { units: is_scsi.then(Vec::new), ..export };
    let mut server = scene.serve(&export)?;
    let mut vm = boot(&[&export])?;
    let disk = if is_scsi { "sda" } else { "vda" };
    verified::start(&mut vm, disk)?;

    let mut done_again = 0;
    for round in 0..if end == End::Kill { KILLS } else { STOPS } {
        // At once, and later and later.
        wait_served(&server, round * 7)?;
        match end {
            End::Kill => server.kill()?,
            End::Stop => check_clean_exit(&mut server)?,
        }
        drop(server);
        server = scene.serve(&export)?;
        wait_served(&server, 1)?;
        done_again += server.messages().matches("are done again").count();
    }
    eprintln!("{done_again} starts did requests again");
    ensure!(end == End::Stop || done_again > 0, "no kill has left a request behind");

    verified::finish(vm, disk, server)
}

#[test]
fn blk_with_io_uring_is_killed_thirty_times() -> Result<()> {
    scenario(|| restarts(End::Kill, Engine::IoUring, Cache::None, false))
}

#[test]
fn blk_with_aio_is_killed_thirty_times() -> Result<()> {
    scenario(|| restarts(End::Kill, Engine::Aio, Cache::None, false))
}

#[test]
fn blk_with_threads_is_killed_thirty_times() -> Result<()> {
    scenario(|| restarts(End::Kill, Engine::Threads, Cache::Writeback, false))
}

#[test]
fn scsi_is_killed_thirty_times() -> Result<()> {
    scenario(|| restarts(End::Kill, Engine::IoUring, Cache::None, true))
}

#[test]
fn blk_with_io_uring_is_stopped_ten_times() -> Result<()> {
    scenario(|| restarts(End::Stop, Engine::IoUring, Cache::None, false))
}

#[test]
fn scsi_is_stopped_ten_times() -> Result<()> {
    scenario(|| restarts(End::Stop, Engine::IoUring, Cache::None, true))
}
