//! The command line of User Mode Linux: a real kernel that runs as a process of this machine,
//! without KVM, with its own vhost-user front-end (virtio_uml).

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::image::{Image, find_program};
use super::vm::{Bus, VmOptions};

/// A file system in memory: the kernel keeps the guest's memory in a file, which back-ends map.
const MEMORY_FOLDER: &str = "/dev/shm";

/// The command that starts User Mode Linux, with its control socket in `folder`. The console is its
/// stdout. The second serial line is `agent`, which it gets as its stdin.
pub(super) fn command(
    image: &Image,
    options: &VmOptions,
    folder: &Path,
    agent: OwnedFd,
) -> Result<Command> {
    // User Mode Linux ends with this process, however that ends. Processes of the guest that lose
    // their kernel would go on as processes of this machine, with root's rights. They are in a PID
    // namespace of which that kernel is the first process, so they end with it. Only root can make
    // one; without it, the kernel ends them itself after SIGTERM.
    let is_root = rustix::process::geteuid().is_root();
    let mut command = Command::new(find_program("setpriv", "util-linux")?);
    command.args(["--pdeathsig", if is_root { "KILL" } else { "TERM" }]);
    if is_root {
        command.arg(find_program("unshare", "util-linux")?).args(["--pid", "--kill-child", "--"]);
    }
    command
        .arg(&image.kernel)
        .arg(format!("mem={}M", options.memory_mib))
        .args(["rdinit=/init", "root=/dev/ram0", "loglevel=5"])
        .args(["con=null", "con0=null,fd:1", "ssl=null", "ssl1=fd:0"])
        .arg(format!("initrd={}", image.initramfs.display()))
        .arg(format!("uml_dir={}", folder.display()))
        .env("TMPDIR", MEMORY_FOLDER)
        .stdin(agent);
    for disk in &options.disks {
        // The device's identifier: sections 5.2 and 5.6 of virtio 1.3.
        let device = match disk.bus {
            Bus::Blk => 2,
            Bus::Scsi => 8,
        };
        command.arg(format!("virtio_uml.device={}:{device}", disk.socket.display()));
    }
    Ok(command)
}
