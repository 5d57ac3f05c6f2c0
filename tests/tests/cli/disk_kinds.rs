//! Disks of kinds beyond files: driven by `ringhaul disk bench`, and named in a configuration file.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{EXIT_RUN, LIMIT, READY, Running, TestFolders, bench, ringhaul, run};
use ringhaul_kit::nbd_server::NbdServer;
use ringhaul_kit::system::{is_installed, run as run_program};
use ringhaul_tools::process::retry;
use rustix::process::Signal;
use serde_json::Value;

use super::{DISK_BYTES, test_folders};

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path with an odd name")
}

/// Makes an encrypted disk with a weak key derivation, and returns its name.
pub(super) fn luks(folders: &TestFolders) -> Result<String> {
    let (image, key) = (folders.disk("encrypted", DISK_BYTES + (16 << 20))?, folders.path("key"));
    fs::write(&key, "no secret")?;
    let (image, key) = (text(&image)?, text(&key)?);
    let format = ["luksFormat", "--batch-mode", "--type", "luks2", "--key-file", key];
    let quick = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", image];
    run_program("cryptsetup", &[&format[..], &quick].concat())?;
    Ok(format!("luks,key-file={key},over={image}"))
}

pub(super) fn qcow2(folders: &TestFolders) -> Result<String> {
    let image = folders.path("image");
    let image = text(&image)?;
    run_program("qemu-img", &["create", "-q", "-f", "qcow2", image, &DISK_BYTES.to_string()])?;
    Ok(format!("qcow2:{image}"))
}

/// Runs a load for longer and longer until it has answers of each kind: on a busy machine a short
/// run may have none. Returns the last result.
fn repeat_until_answered<T>(mut load: impl FnMut(&str) -> Result<(bool, T)>) -> Result<T> {
    for runtime in ["200ms", "2s", "20s"] {
        if let (true, output) = load(runtime)? {
            return Ok(output);
        }
    }
    Ok(load("60s")?.1)
}

/// Drives a disk with reads and writes, and checks that both were answered.
fn drive(disk: &str) -> Result<()> {
    let drive = |options: &str| -> Result<_> {
        let mut command = ringhaul()?;
        command.args(["disk", "bench", disk]);
        run(command.args(options.split_whitespace()))
    };
    let load = "--rw randrw --iodepth 8 --numjobs 2 --destroy-contents --json";
    let output = repeat_until_answered(|runtime| {
        let finished = drive(&format!("{load} --runtime {runtime}"))?.expect_code(0)?;
        let output: Value = serde_json::from_str(&finished.stdout).context("the result")?;
        Ok((output["read_ios"] != 0 && output["write_ios"] != 0, output))
    })?;
    for figure in ["iops", "read_iops", "write_iops", "bandwidth_bytes_per_s", "latency_mean_us"] {
        ensure!(output[figure].as_f64() > Some(0.0), "{figure} is {}", output[figure]);
    }
    ensure!(output["errors"] == 0 && output["filename"] == disk, "{output}");
    let output = repeat_until_answered(|runtime| {
        let load = format!("--rw read --bs 64k --runtime {runtime}");
        let output = drive(&load)?.expect_code(0)?.stdout;
        Ok((output.contains("read: IOPS="), output))
    })?;
    let [iops, size] = ["read: IOPS=", "disk of 16.0 MiB"].map(|words| output.contains(words));
    ensure!(iops && size && output.contains("errors: 0"), "{output}");
    drive("--rw write")?.expect_refusal(&["--destroy-contents"])
}

#[test]
fn a_disk_of_each_kind_can_be_driven() -> Result<()> {
    let folders = test_folders()?;
    if is_installed("nbdkit") {
        let server = NbdServer::start_nbdkit(&folders, &["memory", "16M"])?;
        drive(&server.uri("")).context("nbd")?;
        drive(&format!("raw,size=16M,over={}", server.uri(""))).context("raw over nbd")?;
    }
    if is_installed("cryptsetup") {
        drive(&luks(&folders)?).context("luks")?;
    }
    if is_installed("qemu-img") {
        drive(&qcow2(&folders)?).context("qcow2")?;
    }
    Ok(())
}

/// Figures of failed requests would be worthless.
#[test]
fn a_disk_that_fails_under_a_load_is_reported() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let server = NbdServer::start_nbdkit(
        &folders,
        &["--filter=error", "memory", "16M", "error-pread-rate=100%"],
    )?;
    let failed = run(ringhaul()?.args(["disk", "bench", &server.uri(""), "--runtime", "100ms"]))?;
    let failed = failed.expect_code(EXIT_RUN)?;
    ensure!(failed.stderr.contains("Input/output error"), "{}", failed.stderr);
    Ok(())
}

/// The load cannot end in order before its requests do.
#[test]
fn a_disk_that_does_not_answer_at_the_end_of_a_load_is_named() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let server =
        NbdServer::start_nbdkit(&folders, &["--filter=delay", "memory", "16M", "delay-read=3600"])?;
    let disk = server.uri("");
    let load = ["--iodepth", "4", "--runtime", "200ms"];
    let mut driving = Running::start(ringhaul()?.args(["disk", "bench", &disk]).args(load))?;
    let output = driving.wait_for("waiting for")?;
    ensure!(output.contains(&format!("waiting for 4 operations of {disk} to end; two interr")));
    // Signals that come at once may be merged into one.
    retry(LIMIT, || {
        ensure!(driving.signal(Signal::INT).is_err(), "it goes on after interrupts");
        Ok(())
    })?;
    let ended = driving.finish()?.expect_code(EXIT_RUN)?;
    ensure!(ended.stderr.matches("waiting for").count() == 1, "{}", ended.stderr);
    Ok(())
}

/// Disks as a table with all keys, as text, and as units.
#[test]
fn a_configuration_file_has_disks_of_all_kinds() -> Result<()> {
    if !["nbdkit", "cryptsetup", "qemu-img"].iter().all(|program| is_installed(program)) {
        return Ok(());
    }
    let folders = test_folders()?;
    let server = NbdServer::start_nbdkit(&folders, &["memory", "16M"])?;
    let (luks, qcow2, nbd) = (luks(&folders)?, qcow2(&folders)?, folders.socket("nbd"));
    let export = |name: &str, device: &str| {
        let path = folders.socket(name).display().to_string();
        format!("[[export]]\nendpoint = {{ path = \"{path}\" }}\n{device}\n")
    };
    let table = format!("{{ nbd = {{ socket = \"{}\", connections = 2 }} }}", nbd.display());
    let units = [(0, server.uri("")), (1, luks), (2, qcow2)]
        .map(|(lun, disk)| format!("[[export.device.scsi]]\nlun = {lun}\ndisk = \"{disk}\"\n"));
    let exports = [
        export("table", &format!("device = {{ blk = {table} }}")),
        export("units", &units.concat()),
    ];
    let file = folders.path("ringhaul.toml");
    fs::write(&file, exports.concat())?;
    let mut check = ringhaul()?;
    let checked = run(check.arg("check").arg(&file))?.expect_code(0)?.stdout;
    for words in ["virtio-blk, nbd+unix:", "0:0 nbd+unix:", "0:1 LUKS", "0:2 qcow2"] {
        ensure!(checked.contains(words), "no {words:?}: {checked}");
    }

    let mut command = ringhaul()?;
    let mut daemon = Running::serve(command.arg("serve").arg("--config").arg(&file))?;
    daemon.wait_for(READY)?;
    let load = "--rw randrw --number_ios 300 --size 4m --verify";
    for (name, options) in [("table", ""), ("units", "--device scsi --lun all")] {
        let mut command = bench(&folders.socket(name), &format!("{load} {options}"))?;
        let output = run(&mut command)?.expect_code(0).context(name)?.stdout;
        ensure!(output.contains(" 0 reads with wrong data"), "{name}: {output}");
    }
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}
