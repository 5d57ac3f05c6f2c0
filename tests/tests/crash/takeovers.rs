//! Repeated takeovers of images and encrypted disks under requests.

use std::fs::OpenOptions;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::LIMIT;
use ringhaul_kit::for_each_engine;
use ringhaul_kit::nbd_server::NbdServer;
use ringhaul_kit::server::{Engine, Server};
use ringhaul_kit::system::is_installed;

use super::driver::{Driver, Version};
use super::end;
use super::images::{Format, Image};

for_each_engine! {
    an_image_is_taken_over_repeatedly,
    an_encrypted_disk_is_taken_over_repeatedly,
    an_encrypted_disk_in_an_image_is_taken_over_repeatedly,
}

/// The number of takeovers in a row.
const TAKEOVERS: u32 = 6;
/// The least number of requests that each process answers.
const REQUESTS: u64 = 300;
/// The error of a takeover if requests take too long.
const REFUSED: &str = "requests were not finished in time";
/// The size in bytes of a server's export, which cannot grow.
const SERVED_BYTES: u64 = 32 << 20;

fn an_image_is_taken_over_repeatedly(engine: Engine) -> Result<()> {
    take_over_file(Format::Qcow2, engine)
}

fn an_encrypted_disk_is_taken_over_repeatedly(engine: Engine) -> Result<()> {
    take_over_file(Format::Luks, engine)
}

fn an_encrypted_disk_in_an_image_is_taken_over_repeatedly(engine: Engine) -> Result<()> {
    take_over_file(Format::LuksOnQcow2, engine)
}

#[test]
fn disks_on_qemu_nbd_are_taken_over_repeatedly() -> Result<()> {
    take_over_exports("qemu-nbd", |image| {
        let nbd_server = NbdServer::start_qemu_nbd(&image.folders, Path::new(&image.path))?;
        let below = nbd_server.uri("disk");
        Ok((nbd_server, below))
    })
}

#[test]
fn disks_on_nbdkit_are_taken_over_repeatedly() -> Result<()> {
    take_over_exports("nbdkit", |image| {
        let nbd_server = NbdServer::start_nbdkit(&image.folders, &["file", &image.path])?;
        let below = nbd_server.uri("");
        Ok((nbd_server, below))
    })
}

fn take_over_file(format: Format, engine: Engine) -> Result<()> {
    let Some(image) = Image::new(format)? else { return Ok(()) };
    let versions = take_over(&image, &image.path, engine)?;
    check(&image, &versions)
}

/// Takes over images that a server of this program exports.
fn take_over_exports(
    program: &str,
    start: impl Fn(&Image) -> Result<(NbdServer, String)>,
) -> Result<()> {
    if !is_installed(program) {
        return Ok(());
    }
    for format in [Format::Qcow2, Format::Luks] {
        let Some(image) = Image::new(format)? else { return Ok(()) };
        OpenOptions::new().write(true).open(&image.path)?.set_len(SERVED_BYTES)?;
        let (nbd_server, below) = start(&image)?;
        let taken_over = take_over(&image, &below, Engine::IoUring);
        let versions = taken_over.with_context(|| format!("{format:?} on {program}"))?;
        drop(nbd_server);
        check(&image, &versions).with_context(|| format!("{format:?} on {program}"))?;
    }
    Ok(())
}

/// No process was killed, so the image has no leaks and no mark.
fn check(image: &Image, versions: &[Version]) -> Result<()> {
    image.check_closed()?;
    image.check_content(versions)
}

/// Returns the versions that the disk must have.
fn take_over(image: &Image, below: &str, engine: Engine) -> Result<Vec<Version>> {
    let (mut server, mut driver) = image.serve(below, engine)?;
    driver.attach()?;
    for round in 0..TAKEOVERS {
        driver.sleeps = round % 2 == 0;
        driver.run(REQUESTS, false)?;
        let next = follow(&mut server, &mut driver);
        next.with_context(|| format!("takeover {round}; {}", server.messages()))?;
    }
    driver.run(REQUESTS, false)?;
    driver.run(0, true)?;
    eprintln!("{TAKEOVERS} takeovers, {} requests answered", driver.answered);
    end(server, driver)
}

/// Replaces a daemon by another process, while requests keep arriving.
///
/// A takeover may be refused: on a busy machine 64 requests of an unoptimised cipher take longer
/// than the daemon makes guests wait. The old process then stays, and the takeover is tried again.
fn follow(server: &mut Server, driver: &mut Driver) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let mut successor = server.begin_upgrade()?;
        while !successor.messages().contains("stood still") && !successor.has_ended()? {
            ensure!(Instant::now() < deadline, "nothing takes over:\n{}", successor.messages());
            driver.run(1, false)?;
        }
        if !successor.messages().contains(REFUSED) {
            return server.finish_upgrade(successor).map(drop);
        }
        eprintln!("the old process goes on:\n{}", successor.messages());
        driver.run(REQUESTS, false)?;
    }
}
