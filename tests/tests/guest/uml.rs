//! A guest in User Mode Linux, which has its own front-end.

use std::time::Duration;

use anyhow::{Result, ensure};
use ringhaul_kit::guest::run_uml;
use ringhaul_kit::server::{Cache, Engine, allocated_bytes};

use super::{DISK_BYTES, SECTOR_BYTES, Scene, check_clean_exit, check_file_system};

const SCRIPT: &str = include_str!("../../guest/uml.sh");

/// The limit for the boot and the script; only a hang takes this long.
const LIMIT: Duration = Duration::from_secs(300);

/// More than the guest leaves on the disk, and less than it writes.
const LEFT_BYTES: u64 = 14 << 20;

#[test]
fn user_mode_linux_uses_a_disk() -> Result<()> {
    for engine in [Engine::IoUring, Engine::Aio, Engine::Threads] {
        let scene = Scene::new()?;
        let export = scene.export(&format!("uml-{engine}"), engine, Cache::None)?;
        let mut server = scene.serve(&export)?;
        let console = run_uml(&export.socket, SCRIPT, LIMIT)?;
        let expected = format!("serial={} sectors={}", export.serial, DISK_BYTES / SECTOR_BYTES);
        ensure!(console.contains(&expected), "no {expected}:\n{console}");
        let left = allocated_bytes(&export.file)?;
        ensure!(left < LEFT_BYTES, "{left} bytes are allocated after the discards:\n{console}");
        check_clean_exit(&mut server)?;
        check_file_system(&export.file)?;
    }
    Ok(())
}
