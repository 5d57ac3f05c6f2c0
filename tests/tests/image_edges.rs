//! Images from other tools: a short file, and version 2 with a backing file.

use std::fs::{self, OpenOptions};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::{Frontend, Setup, blk, segment};
use ringhaul_kit::system::{is_installed, run as run_program};
use rustix::process::Signal;

/// Bytes of a cluster.
const CLUSTER: usize = 64 << 10;

/// Serves the image in these folders to a front-end, and then ends the daemon.
fn serve(
    folders: &TestFolders,
    more: &str,
    use_disk: impl FnOnce(&mut Frontend) -> Result<()>,
) -> Result<()> {
    let socket = folders.socket("disk.sock");
    let mut command = ringhaul()?;
    command.arg("serve").arg("--socket-path").arg(&socket).args(["--cache", "none", "--disk"]);
    command.arg(format!("qcow2{more},path={}", folders.path("disk").display()));
    let mut daemon = Running::serve(&mut command)?;
    let mut frontend = Frontend::attach(&socket, &Setup::default())?;
    use_disk(&mut frontend)?;
    drop(frontend);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// Copies and `truncate` make such a file, and `qemu-img check` accepts it.
#[test]
fn an_image_whose_file_ends_in_its_last_cluster_takes_writes() -> Result<()> {
    if !is_installed("qemu-img") {
        return Ok(());
    }
    for cut in [4096, 60 << 10, 4096 + 512] {
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let path = folders.path("disk").display().to_string();
        run_program("qemu-img", &["create", "-q", "-f", "qcow2", &path, "8M"])?;
        run_program("qemu-io", &["-f", "qcow2", "-c", "write -P 7 0 512", &path])?;
        let file = OpenOptions::new().write(true).open(&path)?;
        file.set_len(file.metadata()?.len().next_multiple_of(CLUSTER as u64) - cut)?;
        run_program("qemu-img", &["check", "-q", &path])?;
        serve(&folders, "", |frontend| {
            for place in (0..CLUSTER).step_by(4096).rev() {
                let (sector, data) = (place as u64 / 512, pattern(place as u64, 4096));
                frontend.write(0, sector, &data).with_context(|| format!("{cut} cut off"))?;
                ensure!(frontend.read(1, sector, 4096)? == data, "{place} reads something else");
            }
            Ok(())
        })?;
        run_program("qemu-img", &["check", "-q", &path])?;
    }
    Ok(())
}

/// Version 2 has no zero clusters, which would hide the data of the backing file.
#[test]
fn a_discard_in_version_2_does_not_show_data_from_below() -> Result<()> {
    if !is_installed("qemu-img") {
        return Ok(());
    }
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let [path, base] = ["disk", "base"].map(|name| folders.path(name).display().to_string());
    fs::write(&base, pattern(5, 8 * CLUSTER))?;
    let create = ["create", "-q", "-f", "qcow2", "-o", "compat=0.10", "-b", &base, "-F", "raw"];
    run_program("qemu-img", &[&create[..], &[&path]].concat())?;
    serve(&folders, &format!(",backing={base}"), |frontend| {
        let written = pattern(6, CLUSTER);
        frontend.write(0, 0, &written)?;
        let range = segment(0, u32::try_from(CLUSTER / 512)?, 0);
        let status = frontend.request(0, blk::DISCARD, 0, &range, 0)?.status;
        ensure!(status == blk::OK, "a discard ended with {status}");
        let found = frontend.read(1, 0, CLUSTER)?;
        ensure!(found == written || found == vec![0; CLUSTER], "data from below is seen");
        Ok(())
    })
}
