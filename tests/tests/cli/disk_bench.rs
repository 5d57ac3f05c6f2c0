//! `ringhaul disk bench` of disks that are no plain files.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{ringhaul, run};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::system::{is_installed, run as run_program};
use serde_json::Value;

use crate::{DISK_BYTES, scene};

const LOAD: [&str; 6] = ["--rw", "randrw", "--destroy-contents", "--json", "--runtime", "200ms"];

/// That requests of both kinds were answered, without errors.
fn check(said: &str) -> Result<()> {
    let result: Value = serde_json::from_str(said).context("reading a result")?;
    let has_some = ["read_ios", "write_ios"].iter().all(|key| result[key].as_u64() > Some(0));
    ensure!(has_some && result["errors"] == 0, "{said}");
    Ok(())
}

fn bench(disk: &str) -> Result<()> {
    let mut bench = ringhaul()?;
    bench.args(["disk", "bench", disk]).args(LOAD);
    check(&run(&mut bench)?.expect_code(0)?.stdout).with_context(|| disk.to_owned())
}

#[test]
fn images_and_encrypted_disks_are_driven() -> Result<()> {
    let scene = scene()?;
    let [image, locked, key] =
        ["image", "locked", "key"].map(|name| scene.path(name).display().to_string());
    std::fs::write(&key, "secret")?;
    let size = DISK_BYTES.to_string();
    if is_installed("qemu-img") {
        run_program("qemu-img", &["create", "-q", "-f", "qcow2", &image, &size])?;
        bench(&format!("qcow2:{image}"))?;
        run_program("qemu-img", &["check", "-q", &image])?;
        let secret = format!("secret,id=key,file={key}");
        let create = ["create", "-q", "--object", &secret, "-f", "luks"];
        let options = ["-o", "key-secret=key,iter-time=10", &locked, &size];
        run_program("qemu-img", &[&create[..], &options].concat())?;
        bench(&format!("luks,key-file={key},over={locked}"))?;
    }
    Ok(())
}

/// The server ends with the load that it starts.
#[test]
fn an_export_of_a_server_is_driven() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let binary = ringhaul_binary()?;
    let words = LOAD.join(" ");
    let load = format!("{} disk bench nbd+unix:///?socket=$unixsocket {words}", binary.display());
    let mut nbdkit = Command::new("nbdkit");
    nbdkit.args(["--unix", "-", "memory", &DISK_BYTES.to_string(), "--run", &load]);
    check(&run(&mut nbdkit)?.expect_code(0)?.stdout)
}
