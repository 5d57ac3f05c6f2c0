//! NBD servers that do not answer while the header of a disk is read.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Finished, Running, TestFolders, ringhaul, run};
use ringhaul_kit::nbd_server::NbdServer;
use ringhaul_kit::system::is_installed;
use rustix::process::Signal;

/// A limit that only ends a hopeless wait.
const HOPELESS: Duration = Duration::from_secs(60);

/// A server that accepts all connections and answers no read. `None` if nbdkit is not installed.
fn start_silent_server(folders: &TestFolders) -> Result<Option<NbdServer>> {
    if !is_installed("nbdkit") {
        return Ok(None);
    }
    let log = format!("logfile={}", folders.path("reads").display());
    let filters = ["--filter=log", "--filter=delay", "memory", "64M", &log, "delay-read=3600"];
    NbdServer::start_nbdkit(folders, &filters).map(Some)
}

/// The number of reads that the server has received.
fn count_reads(folders: &TestFolders) -> Result<usize> {
    let log = std::fs::read_to_string(folders.path("reads"))?;
    Ok(log.lines().filter(|line| line.contains(" Read id=")).count())
}

/// Disks that cannot be opened without a read.
fn disks(folders: &TestFolders, server: &NbdServer) -> Result<[String; 3]> {
    let (key, uri) = (folders.path("key"), server.uri(""));
    std::fs::write(&key, "secret")?;
    let luks = format!("luks,key-file={},over={uri}", key.display());
    Ok([format!("qcow2,over={uri}"), luks, format!("image,format=auto,over={uri}")])
}

fn ctl(folders: &TestFolders, words: &[&str]) -> Result<Finished> {
    run(ringhaul()?.args(["ctl", "--control"]).arg(folders.socket("control")).args(words))
}

/// Starts a `ctl` command that does not end by itself.
fn start_ctl(folders: &TestFolders, words: &[&str]) -> Result<Running> {
    let control = folders.socket("control");
    Running::start(ringhaul()?.args(["ctl", "--control"]).arg(control).args(words))
}

/// Repeats a `ctl` command until its result fits.
fn wait_for_result(
    folders: &TestFolders,
    words: &[&str],
    has_come: impl Fn(&Finished) -> bool,
) -> Result<Finished> {
    let start = Instant::now();
    loop {
        let finished = ctl(folders, words)?;
        if has_come(&finished) {
            return Ok(finished);
        }
        ensure!(start.elapsed() < HOPELESS, "{}{}", finished.stdout, finished.stderr);
    }
}

fn serve(folders: &TestFolders, options: &[&str]) -> Result<Running> {
    let mut command = ringhaul()?;
    command.args(["serve", "--allow-network", "--control"]).arg(folders.socket("control"));
    command.arg("--socket-path").arg(folders.socket("vm.sock")).args(options);
    Running::serve(&mut command)
}

fn end(mut daemon: Running) -> Result<()> {
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

#[test]
fn an_export_is_removed_while_its_header_is_read() -> Result<()> {
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let Some(server) = start_silent_server(&folders)? else { return Ok(()) };
    let daemon = serve(&folders, &["--disk", "null:1M"])?;
    let name = folders.socket("late.sock").display().to_string();
    for disk in disks(&folders, &server)? {
        let added = start_ctl(&folders, &["add", "--socket-path", &name, "--disk", &disk])?;
        wait_for_result(&folders, &["list"], |list| list.stdout.contains(&name))?;
        ctl(&folders, &["remove", &name])?.expect_code(0)?;
        let added = added.finish()?.expect_code(1)?;
        ensure!(added.stderr.contains("was removed before it was served"), "{}", added.stderr);
        ensure!(!Path::new(&name).exists(), "there is a socket without an export");
    }
    end(daemon)
}

#[test]
fn a_unit_is_removed_while_its_header_is_read() -> Result<()> {
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let Some(server) = start_silent_server(&folders)? else { return Ok(()) };
    let daemon = serve(&folders, &["--device", "scsi", "--lun", "0,disk=null:1M"])?;
    let name = folders.socket("vm.sock").display().to_string();
    let is_given_up = |removed: &Finished| removed.stderr.contains("was cancelled");
    for disk in disks(&folders, &server)? {
        let unit = format!("1,disk={disk}");
        let added = start_ctl(&folders, &["add-lun", &name, &unit])?;
        wait_for_result(&folders, &["remove-lun", &name, "1"], is_given_up)?.expect_code(1)?;
        let added = added.finish()?.expect_code(1)?;
        ensure!(added.stderr.contains("was not added"), "{}", added.stderr);
    }
    ctl(&folders, &["add-lun", &name, "1,disk=null:2M"])?.expect_code(0)?;
    // The removal of an export also removes a unit that is being opened.
    let unit = format!("2,disk={}", disks(&folders, &server)?[0]);
    let before = count_reads(&folders)?;
    let added = start_ctl(&folders, &["add-lun", &name, &unit])?;
    wait_for_result(&folders, &["ping"], |_| count_reads(&folders).is_ok_and(|now| now > before))?;
    ctl(&folders, &["remove", &name])?.expect_code(0)?;
    let added = added.finish()?.expect_code(1)?;
    ensure!(added.stderr.contains("was not added"), "{}", added.stderr);
    end(daemon)
}

#[test]
fn a_read_of_a_header_is_cancelled_in_time() -> Result<()> {
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let Some(server) = start_silent_server(&folders)? else { return Ok(()) };
    let disks = disks(&folders, &server)?;
    let programs = disks.iter().zip(["info", "bench", "info"]).map(|(disk, command)| {
        let options = if command == "bench" { &["--rw", "read"][..] } else { &[] };
        Running::start(ringhaul()?.args(["disk", command, disk]).args(options))
    });
    for program in programs.collect::<Result<Vec<_>>>()? {
        let finished = program.finish()?.expect_code(2)?;
        ensure!(finished.stderr.contains("was cancelled; check that"), "{}", finished.stderr);
    }
    Ok(())
}
