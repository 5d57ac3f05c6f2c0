//! NBD servers with few features, such as a single client, and layers over their disks.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use ringhaul_kit::cli::{TestFolders, bench, ringhaul, run};
use ringhaul_kit::system::{is_installed, run as run_program};

use rustix::process::Signal;

use super::nbd::{DISK_BYTES, NbdServer, drive, serve, test_folders};

/// Bytes of an image, with room for its metadata.
const IMAGE_BYTES: u64 = 2 * DISK_BYTES;

/// Starts a server of a file that has one client at a time.
fn start(folders: &TestFolders, kind: &str, file: &Path) -> Result<NbdServer> {
    let socket = folders.socket("nbd");
    match kind {
        "qemu-nbd" => {
            let mut command = Command::new(kind);
            command.args(["--persistent", "--format", "raw", "--socket"]).arg(&socket).arg(file);
            NbdServer::start(&socket, &mut command)
        }
        _ => {
            let path = format!("file={}", file.display());
            let filters = ["--filter=multi-conn", "--filter=limit", "file", &path];
            let settings = ["multi-conn-mode=disable", "limit=1"];
            NbdServer::start_nbdkit(folders, &[&filters[..], &settings].concat())
        }
    }
}

/// The header of an image is read on a separate thread, before the IoThreads exist.
#[test]
fn images_on_servers_that_have_one_client_are_disks() -> Result<()> {
    let programs = ["qemu-nbd", "nbdkit", "qemu-img", "cryptsetup"];
    if !programs.iter().all(|program| is_installed(program)) {
        return Ok(());
    }
    let folders = test_folders()?;
    let (file, key) = (folders.disk("image", IMAGE_BYTES)?, folders.path("key"));
    let path = file.to_str().context("a path with an odd name")?;
    let (key, inner) = (key.to_str().context("an odd name")?, folders.path("inner"));
    let inner = inner.to_str().context("an odd name")?;
    std::fs::write(key, "secret")?;
    let size = DISK_BYTES.to_string();
    run_program("qemu-img", &["create", "-q", "-f", "qcow2", inner, &size])?;
    for server in ["qemu-nbd", "nbdkit"] {
        run_program("qemu-img", &["create", "-q", "-f", "qcow2", path, &size])?;
        std::fs::OpenOptions::new().write(true).open(&file)?.set_len(IMAGE_BYTES)?;
        let nbd_server = start(&folders, server, &file)?;
        for layer in ["qcow2", "image,format=auto", "qcow2,over=raw"] {
            let disk = format!("{layer},over={}", nbd_server.uri(""));
            let driven = drive(&folders, &disk, "--number_ios 1000");
            driven.with_context(|| format!("{layer} over {server}"))?;
        }
        nbd_server.kill()?;
        run_program("qemu-img", &["check", "-q", path])?;

        let format = ["luksFormat", "--batch-mode", "--type", "luks1", "--key-file", key];
        let quick = ["--pbkdf-force-iterations", "1000", path];
        run_program("cryptsetup", &[&format[..], &quick].concat())?;
        let nbd_server = start(&folders, server, &file)?;
        let disk = format!("luks,key-file={key},over={}", nbd_server.uri(""));
        let driven = drive(&folders, &disk, "--number_ios 1000");
        driven.with_context(|| format!("luks over {server}"))?;
        run(ringhaul()?.args(["disk", "info", &disk]))?.expect_code(0)?;
        nbd_server.kill()?;

        let secret = format!("secret,id=key,file={key}");
        let encrypted = format!("driver=luks,key-secret=key,file.filename={path}");
        let convert = ["convert", "--object", &secret, "-n", "--target-image-opts", "-f", "raw"];
        run_program("qemu-img", &[&convert[..], &[inner, &encrypted]].concat())?;
        let _server = start(&folders, server, &file)?;
        let driven = drive(&folders, &format!("qcow2,over={disk}"), "--number_ios 1000");
        driven.with_context(|| format!("qcow2 over luks over {server}"))?;
    }
    Ok(())
}

/// Even for reading, a disk has several connections only if its server offers that.
#[test]
fn a_disk_that_is_only_read_has_the_connections_that_its_server_allows() -> Result<()> {
    if !is_installed("qemu-nbd") {
        return Ok(());
    }
    let folders = test_folders()?;
    let (file, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("nbd"));
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--read-only", "--format", "raw", "--socket"]);
    let nbd_server = NbdServer::start(&socket, command.arg(&socket).arg(&file))?;
    let options = ["--read-only", "--iothreads", "2", "--num-queues", "2"];
    let mut daemon = serve(&folders, &nbd_server.uri(""), &options)?;
    let load = "--rw randread --number_ios 1000 --numjobs 2";
    run(&mut bench(&folders.socket("vm.sock"), load)?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// A server refuses requests beyond the end that it announced when the connection was made.
#[test]
fn a_disk_that_was_enlarged_on_its_server_is_used_to_its_new_end() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    for multi_conn in ["multi-conn-mode=emulate", "multi-conn-mode=disable"] {
        let folders = test_folders()?;
        let file = folders.disk("disk.img", 1 << 20)?;
        let path = format!("file={}", file.display());
        let options = ["--filter=multi-conn", "file", &path, multi_conn];
        let nbd_server = NbdServer::start_nbdkit(&folders, &options)?;
        let _daemon = serve(&folders, &nbd_server.uri(""), &["--iothreads", "2"])?;
        let (vm, load) = (folders.socket("vm.sock"), "--rw randrw --verify --number_ios 500");
        run(&mut bench(&vm, load)?)?.expect_code(0)?;
        std::fs::OpenOptions::new().write(true).open(&file)?.set_len(DISK_BYTES)?;
        let mut ctl = ringhaul()?;
        ctl.args(["ctl", "--control"]).arg(folders.socket("control"));
        run(ctl.arg("resize").arg(&vm))?.expect_code(0)?;
        run(&mut bench(&vm, load)?)?.expect_code(0).context(multi_conn)?;
    }
    Ok(())
}

/// The filter removes the flag for durable writes by default, so a flush follows each write.
#[test]
fn writes_are_durable_on_a_server_without_durable_writes() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let nbd_server = NbdServer::start_nbdkit(&folders, &["--filter=fua", "memory", "64M"])?;
    let _daemon = serve(&folders, &nbd_server.uri(""), &["--cache", "writethrough"])?;
    let load = "--rw randrw --verify --number_ios 500";
    run(&mut bench(&folders.socket("vm.sock"), load)?)?.expect_code(0)?;
    Ok(())
}
