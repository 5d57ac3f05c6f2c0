//! The marks of each kind of disk for a front-end that moves its guest: data from buffers of NBD,
//! LUKS and images, and through memory that replaces buffers without the alignment of files.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, ringhaul};
use ringhaul_kit::frontend::log::check_marks;
use ringhaul_kit::nbd_server::NbdServer;
use ringhaul_kit::system::is_installed;
use serde_json::json;

use super::control::Client;
use super::disk_kinds::{luks, qcow2};
use super::{DISK_BYTES, test_folders};

/// Serves a disk, and checks its marks. Returns the number of requests with replaced buffers.
fn check(disk: &str, options: &[&str]) -> Result<u64> {
    let folders = test_folders()?;
    let (socket, control) = (folders.socket("disk"), folders.socket("control"));
    let mut command = ringhaul()?;
    command.args(["serve", "--disk", disk, "--num-queues", "2", "--name", "vm"]).args(options);
    command.arg("--socket-path").arg(&socket).arg("--control").arg(&control);
    let _daemon = Running::serve(&mut command)?;
    check_marks(&socket)?;
    let answer = Client::new(&control)?.call("stats", &json!({}))?;
    let threads = answer["result"]["iothreads"].as_array().context("no IoThreads")?;
    Ok(threads.iter().filter_map(|thread| thread["bounced"].as_u64()).sum())
}

#[test]
fn a_file_marks_what_it_writes() -> Result<()> {
    for engine in ["io_uring", "aio", "threads"] {
        let folders = test_folders()?;
        let disk = folders.disk("disk.img", DISK_BYTES)?.display().to_string();
        let bounced = check(&disk, &["--engine", engine, "--cache", "none"])?;
        ensure!(bounced > 0, "{engine}: no buffer was replaced");
    }
    Ok(())
}

#[test]
fn an_image_and_an_encrypted_disk_mark_what_they_write() -> Result<()> {
    let folders = test_folders()?;
    if is_installed("qemu-img") {
        check(&qcow2(&folders)?, &[])?;
    }
    if is_installed("cryptsetup") {
        check(&luks(&folders)?, &[])?;
    }
    Ok(())
}

#[test]
fn an_nbd_server_marks_what_it_writes() -> Result<()> {
    if !is_installed("qemu-nbd") {
        return Ok(());
    }
    let folders = test_folders()?;
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    let server = NbdServer::start_qemu_nbd(&folders, &disk)?;
    check(&server.uri("disk"), &[]).map(drop)
}
