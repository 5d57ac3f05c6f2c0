//! Debts of limits, which a process hands over with its disks.

use std::process::Command;
use std::time::Instant;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::daemon::SECTOR_BYTES;
use ringhaul_kit::frontend::{Frontend, Setup};

use crate::takeover::Client;
use crate::test_folders;

/// The code of a refusal that holds for a moment.
const LATER: u64 = 10;

/// The rate in requests per second, and the requests that may come at once after a pause.
const RATE: usize = 10;
const BURST: usize = 100;

/// Requests beyond the burst: more than a second burst, which a process without the debts would
/// allow.
const BEYOND: usize = 30;

fn read(frontend: &mut Frontend, count: usize) -> Result<()> {
    (0..count).try_for_each(|_| frontend.read(0, 0, SECTOR_BYTES).map(drop))
}

fn daemon(folders: &TestFolders, limits: &str) -> Result<Command> {
    let mut command = ringhaul()?;
    command.args(["serve", "--control"]).arg(folders.socket("control"));
    for name in ["one", "other"] {
        let socket = folders.socket(name);
        let export = format!("socket-path={},{limits},null=1M", socket.display());
        command.arg("--export").arg(export);
    }
    Ok(command)
}

/// Reads a burst before the takeover and [`BEYOND`] requests after it, by front-ends without an
/// inflight region.
fn burst_and_take_over(limits: &str, reader: &str) -> Result<()> {
    let folders = test_folders()?;
    let start = Instant::now();
    let daemon = Running::serve(&mut daemon(&folders, limits)?)?;
    let attach = |name| Frontend::attach(&folders.socket(name), &Setup::default());
    let mut frontends = [attach("one")?, attach("other")?];
    read(&mut frontends[0], BURST)?;
    let mut next = Running::start(&mut taking_over(&folders)?)?;
    next.wait_for("took over 2 exports")?;
    daemon.finish()?.expect_code(0)?;
    read(&mut frontends[usize::from(reader == "other")], BEYOND)?;
    let seconds = start.elapsed().as_secs_f64();
    // The first request beyond a burst may begin with it.
    let least = (BEYOND - 1) as f64 / RATE as f64;
    ensure!(seconds >= least, "{BEYOND} requests beyond a burst take {seconds} s, not {least}");
    Ok(())
}

#[test]
fn a_disk_keeps_the_debts_of_its_limits() -> Result<()> {
    let limits = format!("iops-total={RATE},iops-total-max={BURST}");
    burst_and_take_over(&limits, "one")
}

#[test]
fn a_group_keeps_the_debts_of_its_limits() -> Result<()> {
    let limits = format!("group=g,iops-total={RATE},iops-total-max={BURST}");
    burst_and_take_over(&limits, "other")
}

/// The previous format is valid, and has debts without counters.
#[test]
fn a_process_of_an_older_format_receives_no_counters() -> Result<()> {
    let folders = test_folders()?;
    let limits = format!("iops-total={RATE},iops-total-max={BURST}");
    let _daemon = Running::serve(&mut daemon(&folders, &limits)?)?;
    let mut frontend = Frontend::attach(&folders.socket("one"), &Setup::default())?;
    read(&mut frontend, BURST)?;
    for (format, has_counters) in [(5, false), (6, true)] {
        // The hand-over to a client that has gone ends after its queues run again.
        let (mut client, described) = loop {
            let mut client = Client::new(&folders)?;
            match client.begin_in(format)? {
                busy if busy["error"]["code"] == LATER => {}
                described => break (client, described),
            }
        };
        ensure!(described["error"].is_null(), "{described}");
        let paused = client.call("takeover.pause", &serde_json::json!({}))?;
        let export = &paused["result"]["says"]["exports"][0];
        ensure!(export["debts"][0][0].as_u64() > Some(0), "{format}: {paused}");
        ensure!(export["totals"][0]["bytes"].as_u64().is_some() == has_counters, "{paused}");
        drop(client);
        read(&mut frontend, 1)?;
    }
    Ok(())
}
