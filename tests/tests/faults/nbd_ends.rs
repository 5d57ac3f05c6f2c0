//! NBD servers that end by themselves under load: no request is lost, and the load continues.
//!
//! The nbdkit of some distributions has neither a filter nor a plugin that disconnects. So one
//! server reports through its error filter that it shuts down, and another is killed by its own
//! plugin.

use std::fs::{File, remove_file};
use std::path::Path;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, bench};
use ringhaul_kit::nbd_server::NbdServer;
use ringhaul_kit::system::is_installed;
use rustix::process::Signal;

use super::nbd::{DISK_BYTES, VERIFIED, serve, test_folders, wait_for_load};

/// The number of times that a server ends.
const ENDS: usize = 3;

/// Ends a load, which must have found its own writes, and then the daemon.
fn finish(load: Running, mut daemon: Running) -> Result<()> {
    let finished = load.finish()?.expect_code(0)?;
    ensure!(finished.stdout.contains("errors: 0; verify: "), "{}", finished.stdout);
    ensure!(finished.stdout.contains(" 0 reads with wrong data"), "{}", finished.stdout);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// A server that shuts down by the protocol. Once `sign` exists, it answers all requests with
/// ESHUTDOWN and refuses connections. It ends after its last connection.
fn start_with_shutdown(folders: &TestFolders, disk: &Path, sign: &Path) -> Result<NbdServer> {
    let name = |key: &str, path: &Path| format!("{key}={}", path.display());
    let (file, error_file, exit_file) =
        (name("file", disk), name("error-file", sign), name("exit-when-file-created", sign));
    let filters = ["--filter=exitwhen", "--filter=error", "file", &file];
    let when = ["error=ESHUTDOWN", "error-rate=100%", &error_file, &exit_file];
    NbdServer::start_nbdkit(folders, &[&filters[..], &when].concat())
}

#[test]
fn an_announced_end_of_a_server_costs_no_request() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let (disk, sign) = (folders.disk("disk.img", DISK_BYTES)?, folders.path("ends"));
    let mut server = start_with_shutdown(&folders, &disk, &sign)?;
    let mut daemon = serve(&folders, &format!("{},connections=2", server.uri("")), &[])?;
    let load = format!("{VERIFIED} --runtime 1h");
    let mut load = Running::start(&mut bench(&folders.socket("vm.sock"), &load)?)?;
    daemon.wait_for("a front-end has connected")?;
    for _ in 0..ENDS {
        wait_for_load(&folders)?;
        File::create(&sign)?;
        daemon.wait_for("a connection broke: the server is shutting down")?;
        server.wait_end()?;
        remove_file(&sign)?;
        server = start_with_shutdown(&folders, &disk, &sign)?;
        daemon.wait_for("is back after")?;
    }
    wait_for_load(&folders)?;
    load.signal(Signal::TERM)?;
    finish(load, daemon)
}

/// A server that is killed when it has carried out a write, and has not answered it.
fn start_with_kill(folders: &TestFolders, disk: &Path, ends: bool) -> Result<NbdServer> {
    let (disk, count) = (disk.display(), folders.path("count"));
    let count = count.display();
    let read =
        format!("pread=dd if={disk} skip=$4 count=$3 iflag=skip_bytes,count_bytes status=none");
    let every = if ends { 50 } else { 1_000_000 };
    // A killed nbdkit cannot remove its folder.
    let write = format!(
        "pwrite=dd of={disk} seek=$4 oflag=seek_bytes conv=notrunc status=none; \
         echo >> {count}; [ $(($(wc -l < {count}) % {every})) != 0 ] || \
         {{ rm -r \"$tmpdir\"; kill -KILL $PPID; }}"
    );
    let size = format!("get_size=stat -c %s {disk}");
    let can = ["can_write=exit 0", "can_flush=exit 0", "flush=exit 0"];
    NbdServer::start_nbdkit(folders, &[&["eval", &size, &read, &write][..], &can].concat())
}

/// Each unanswered write is sent again.
#[test]
fn a_server_that_is_gone_after_a_write_costs_no_request() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let disk = folders.disk("disk.img", 4 << 20)?;
    let mut server = start_with_kill(&folders, &disk, true)?;
    let mut daemon = serve(&folders, &server.uri(""), &[])?;
    let load = "--rw randrw --verify --iodepth 8 --bs 4k --fsync 64 --number_ios 600";
    let load = Running::start(&mut bench(&folders.socket("vm.sock"), load)?)?;
    for number in 1..=ENDS {
        server.wait_end()?;
        daemon.wait_for("a connection broke")?;
        server = start_with_kill(&folders, &disk, number < ENDS)?;
        daemon.wait_for("is back after")?;
    }
    finish(load, daemon)?;
    server.terminate()
}
