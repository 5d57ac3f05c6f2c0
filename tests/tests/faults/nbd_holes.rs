//! Holes of disks, as NBD servers report them.

use std::fs::{File, write};
use std::os::unix::fs::FileExt;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{TestFolders, ringhaul, run};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::nbd_server::NbdServer;
use ringhaul_kit::system::is_installed;
use serde_json::Value;

use super::nbd::{DISK_BYTES, test_folders};

const MIB: u64 = 1 << 20;

/// The known bytes of holes in a disk, or `None` if the server does not report them.
fn holes(server: &NbdServer, export: &str) -> Result<Option<u64>> {
    let info = run(ringhaul()?.args(["disk", "info", "--json", &server.uri(export)]))?;
    let info: Value = serde_json::from_str(&info.expect_code(0)?.stdout)?;
    ensure!(info["size-bytes"] == DISK_BYTES, "{info}");
    Ok(info["hole-bytes"].as_u64())
}

/// qemu-nbd reports the same holes of a file as nbdkit.
#[test]
fn holes_of_a_sparse_file_are_known_from_each_server() -> Result<()> {
    if !is_installed("nbdkit") || !is_installed("qemu-nbd") {
        return Ok(());
    }
    let folders = test_folders()?;
    let path = folders.disk("disk.img", DISK_BYTES)?;
    let file = File::options().write(true).open(&path)?;
    let serve = |folders: &TestFolders, options: &[&str]| {
        let name = format!("file={}", path.display());
        NbdServer::start_nbdkit(folders, &[options, &["file", &name]].concat())
    };
    let mut stored = 0;
    // Data at the beginning, in the middle, and at the end.
    for (at, bytes) in [(0, 4096), (3 * MIB, 2 * MIB), (DISK_BYTES - 65536, 65536)] {
        file.write_all_at(&pattern(at, usize::try_from(bytes)?), at)?;
        stored += bytes;
        let expected = Some(DISK_BYTES - stored);
        for server in ["nbdkit", "qemu-nbd"] {
            let known = match server {
                "nbdkit" => holes(&serve(&folders, &[])?, "")?,
                _ => holes(&NbdServer::start_qemu_nbd(&folders, &path)?, "disk")?,
            };
            ensure!(known == expected, "{server}, {stored} stored: {known:?}, not {expected:?}");
        }
    }
    // Without structured replies no holes are known. A filter may hide the holes of the file.
    let known = holes(&serve(&folders, &["--no-sr"])?, "")?;
    ensure!(known.unwrap_or(0) == 0, "nobody can have said that: {known:?}");
    let known = holes(&serve(&folders, &["--filter=noextents"])?, "")?;
    ensure!(known == Some(0), "the filter has said otherwise: {known:?}");
    Ok(())
}

/// Extents of several lengths, and an error in place of extents.
#[test]
fn holes_match_a_list_of_extents() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let list = folders.path("extents");
    // Half of the first MiB is data, in pieces of 4 KiB. The second MiB reads as zeroes and takes
    // space. The rest is a hole, except for the last 512 bytes.
    let mut text: String = (0..128).map(|number| format!("{} 4096\n", number * 8192)).collect();
    text += &format!("{MIB} {MIB} zero\n{} 512\n", DISK_BYTES - 512);
    write(&list, text)?;
    let list = format!("extentlist={}", list.display());
    let listed = ["--readonly", "--filter=extentlist", "pattern", "64M", &list];
    let known = holes(&NbdServer::start_nbdkit(&folders, &listed)?, "")?;
    let expected = 128 * 4096 + DISK_BYTES - 2 * MIB - 512;
    ensure!(known == Some(expected), "{known:?}, not {expected}");

    let failing = ["--filter=error", "memory", "64M", "error-extents-rate=100%"];
    let known = holes(&NbdServer::start_nbdkit(&folders, &failing)?, "")?;
    ensure!(known.is_none(), "nobody has said that: {known:?}");
    Ok(())
}
