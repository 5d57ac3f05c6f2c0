//! A start that fails, or that no write follows, leaves all disks unchanged.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, ringhaul, run};
use ringhaul_kit::system::{is_installed, run as run_program};
use rustix::process::Signal;

use crate::{DISK_BYTES, test_folders};

/// The files of all disks.
const NAMES: [&str; 7] =
    ["plain.img", "luks.img", "odd.img", "new.qcow2", "old.qcow2", "bitmaps.qcow2", "left.qcow2"];

/// Puts an image into the state that a daemon leaves if it is killed while it allocates space: the
/// first free cluster is counted, and the image is marked as dirty.
fn leak(image: &Path) -> Result<()> {
    const CLUSTER: usize = 64 << 10;
    let mut content = fs::read(image)?;
    // Clusters 0 to 3 hold the header, the refcount table, a refcount block and the L1 table.
    let counts = 2 * CLUSTER;
    ensure!(content[counts..counts + 10] == [0, 1, 0, 1, 0, 1, 0, 1, 0, 0], "another layout");
    content[counts + 9] = 1;
    content[79] |= 1;
    Ok(fs::write(image, content)?)
}

/// An export of each kind that is opened for writing.
#[test]
fn no_start_changes_a_disk() -> Result<()> {
    if !is_installed("qemu-img") || !is_installed("cryptsetup") {
        return Ok(());
    }
    let folders = test_folders()?;
    let path = |name: &str| folders.path(name).display().to_string();
    for name in ["plain.img", "luks.img", "odd.img"] {
        folders.disk(name, DISK_BYTES)?;
    }
    fs::write(path("key"), "a key")?;
    let (key, luks) = (path("key"), path("luks.img"));
    let format = ["--batch-mode", "--type", "luks1", "--pbkdf-force-iterations", "1000"];
    let format = [&["luksFormat", "--key-file", &key], &format[..], &[&luks]].concat();
    run_program("cryptsetup", &format)?;
    for (name, options) in [
        ("new.qcow2", "compat=1.1"),
        ("old.qcow2", "compat=0.10"),
        ("bitmaps.qcow2", "compat=1.1"),
        ("left.qcow2", "compat=1.1"),
    ] {
        run_program(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-o", options, &path(name), "1M"],
        )?;
    }
    let bitmaps = path("bitmaps.qcow2");
    run_program("qemu-img", &["bitmap", "--add", "--enable", &bitmaps, "backup0"])?;
    leak(path("left.qcow2").as_ref())?;
    let qcow2 = |name: &str| format!("qcow2:{}", path(name));
    let disks = [
        path("plain.img"),
        format!("luks,key-file={},over={}", path("key"), path("luks.img")),
        qcow2("new.qcow2"),
        qcow2("old.qcow2"),
        qcow2("bitmaps.qcow2"),
        qcow2("left.qcow2"),
        format!("raw,offset=1M,over={}", path("odd.img")),
    ];
    let all =
        || -> Result<Vec<Vec<u8>>> { NAMES.iter().map(|name| Ok(fs::read(path(name))?)).collect() };
    let before = all()?;
    let serve = |missing: Option<&Path>| {
        let mut command = ringhaul()?;
        command.arg("serve");
        let missing = missing.map(|path| path.display().to_string());
        for (index, disk) in disks.iter().chain(&missing).enumerate() {
            let socket = folders.socket(&index.to_string());
            command.args(["--export", &format!("socket-path={},disk={disk}", socket.display())]);
        }
        anyhow::Ok(command)
    };
    let refused = run(&mut serve(Some(&folders.path("missing.img")))?)?.expect_code(2)?.stderr;
    ensure!(refused.contains("missing.img"), "{refused}");
    ensure!(all()? == before, "a start that failed has changed a disk");

    let mut daemon = Running::serve(&mut serve(None)?)?;
    for index in 1..disks.len() {
        daemon.wait_for(&format!("serving on {}", folders.socket(&index.to_string()).display()))?;
    }
    let warning = "it has persistent bitmaps (backup0), which the first write invalidates";
    ensure!(daemon.stderr().matches(warning).count() == 1, "{}", daemon.stderr());
    let found = "found 1 leaked cluster, which the first write frees";
    ensure!(daemon.stderr().contains(found), "{}", daemon.stderr());
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    ensure!(all()? == before, "a daemon without a front-end has changed a disk");
    Ok(())
}
