//! Disks that are more than one local file: an image in a Ceph cluster, an export of an NBD server,
//! a qcow2 image.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use ringhaul_kit::ceph::Cluster;
use ringhaul_tools::process::{self, Interrupt, ManagedChild};
use ringhaul_tools::workspace;

use super::targets::{
    Cleanup, Disk, Prepared, Target, make_file, prepare_loop, prepare_zram, temporary_folder,
};

/// The image that [`prepare_rbd`] makes, in the pool `rbd`.
pub(crate) const IMAGE: &str = "bench";

/// The most time that an NBD server may take until it listens.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Starts a cluster with an image. The disk's path is that of the cluster's configuration.
pub(super) fn prepare_rbd(size: u64, interrupt: &Interrupt) -> Result<Prepared> {
    let Some(cluster) = Cluster::start_as_service()? else {
        return Ok(Prepared::Skipped("Ceph is not installed (`make setup`)".to_owned()));
    };
    let data = cluster.path("data");
    make_file(&data, size, interrupt)?;
    let data = data.to_string_lossy().into_owned();
    cluster.tool("rbd", &["import", "--no-progress", &data, IMAGE])?;
    std::fs::remove_file(&data).with_context(|| format!("removing {data}"))?;
    // All programs of a round read the same blocks. Without this read, only the first program would
    // wait for the disk of the OSD, and the rest would read its cache.
    let all = format!("{size}B");
    let read = ["bench", "--io-type", "read", "--io-size", "4M", "--io-total", &all, IMAGE];
    cluster.tool("rbd", &read)?;
    Ok(Prepared::Ready(Disk {
        target: Target::Rbd,
        path: Some(cluster.conf()),
        description: format!(
            "image of {} MiB, filled with random data, in a Ceph cluster of one OSD on this \
             machine, which has read it into its cache; nothing is pinned, and each run takes four \
             times as long",
            size >> 20
        ),
        cleanup: Cleanup::Cluster(Box::new(cluster)),
    }))
}

/// Starts a server with a null disk. The disk's path is that of its socket.
pub(super) fn prepare_nbd(size: u64, interrupt: &Interrupt) -> Result<Prepared> {
    let Some(program) = workspace::find_program("qemu-nbd") else {
        return Ok(Prepared::Skipped("qemu-nbd is missing (`make setup`)".to_owned()));
    };
    let folder = temporary_folder(&std::env::temp_dir())?;
    let socket = folder.path().join("nbd");
    let mut command = Command::new(program);
    let disk = format!("driver=null-co,size={size},read-zeroes=off");
    command.args(["--persistent", "--shared", "4", "--image-opts", &disk, "--socket"]);
    command.arg(&socket).stdin(Stdio::null()).stdout(Stdio::null());
    let mut server = ManagedChild::start("qemu-nbd", &mut command, interrupt)?;
    server.wait_for_socket(&socket, START_LIMIT)?;
    // qemu-nbd greets from its loop, and loses a SIGTERM that comes before.
    let mut greeting = [0; 8];
    let mut client = UnixStream::connect(&socket).context("connecting to qemu-nbd")?;
    client.set_read_timeout(Some(START_LIMIT)).context("connecting to qemu-nbd")?;
    client.read_exact(&mut greeting).context("waiting for the greeting of qemu-nbd")?;
    Ok(Prepared::Ready(Disk {
        target: Target::Nbd,
        path: Some(socket),
        description: "export of qemu-nbd, whose disk is null, on a unix socket; nothing is pinned"
            .to_owned(),
        cleanup: Cleanup::Server(server, folder),
    }))
}

/// Makes an image that fills a zram device or, without zram, a loop device over a tmpfs. Without
/// either, the image is a file in the target directory. The load consists of whole pages, so
/// nothing is copied for zram.
pub(super) fn prepare_qcow2(size: u64, interrupt: &Interrupt) -> Result<Prepared> {
    let Some(qemu_img) = workspace::find_program("qemu-img") else {
        return Ok(Prepared::Skipped("qemu-img is missing (`make setup`)".to_owned()));
    };
    let parent = workspace::target_dir()?;
    std::fs::create_dir_all(&parent).with_context(|| format!("making {}", parent.display()))?;
    let folder = temporary_folder(&parent)?;
    let data = folder.path().join("data");
    // The tables of an image take less than a thousandth of it.
    let bytes = (size - size / 32) & !0xf_ffff;
    make_file(&data, bytes, interrupt)?;
    let device = match prepare_zram(size, interrupt)? {
        Prepared::Ready(device) => Some((device, "zram")),
        Prepared::Skipped(_) => match prepare_loop(size, interrupt)? {
            Prepared::Ready(device) => Some((device, "a loop device over tmpfs")),
            Prepared::Skipped(_) => None,
        },
    };
    let (mut disk, place) = match device {
        Some(found) => found,
        None => {
            let own = temporary_folder(&parent)?;
            let path = own.path().join("disk.qcow2");
            let (description, cleanup) = (String::new(), Cleanup::Folder(own));
            let disk = Disk { target: Target::Qcow2, path: Some(path), description, cleanup };
            (disk, "a file, for there is neither zram nor a loop device")
        }
    };
    disk.target = Target::Qcow2;
    disk.description = format!(
        "image of {} MiB, preallocated and filled with random data, on {place}; raw is the same \
         bytes without the format",
        bytes >> 20
    );
    let image = disk.path.clone().unwrap_or_default();
    let mut create = Command::new(&qemu_img);
    create.args(["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"]);
    process::output(create.arg(&image).arg(bytes.to_string()))?;
    let mut fill = Command::new(&qemu_img);
    process::output(
        fill.args(["convert", "-n", "-f", "raw", "-O", "qcow2"]).arg(&data).arg(&image),
    )?;
    folder.close().context("removing the data that the image was filled with")?;
    Ok(Prepared::Ready(disk))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_programs_are_skipped_and_disks_are_removed() {
        for prepare in [prepare_nbd, prepare_qcow2] {
            match prepare(4 << 20, &Interrupt::unset_for_test()).unwrap() {
                Prepared::Ready(disk) => {
                    let path = disk.path.clone().unwrap();
                    assert!(path.exists());
                    let is_device = path.starts_with("/dev");
                    disk.restore().unwrap();
                    assert!(is_device || !path.exists(), "{} is left", path.display());
                }
                Prepared::Skipped(reason) => assert!(reason.contains("is missing"), "{reason}"),
            }
        }
    }
}
