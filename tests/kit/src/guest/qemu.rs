//! The command line of QEMU for a guest.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use ringhaul_tools::process;

use super::accelerator::Accelerator;
use super::image::{Image, KERNEL_OPTIONS, find_program};
use super::vm::{Bus, VmOptions};

/// The first QEMU that calls `reconnect` `reconnect-ms`: (major, minor).
const RECONNECT_MS_SINCE: (u32, u32) = (9, 2);

/// The command that starts QEMU and connects it to the sockets `agent` and `monitor` in `folder`.
pub(super) fn command(
    image: &Image,
    accelerator: Accelerator,
    options: &VmOptions,
    folder: &Path,
) -> Result<Command> {
    let qemu = find_program("qemu-system-x86_64", "qemu-system-x86")?;
    let reconnect =
        if qemu_version(&qemu)? < RECONNECT_MS_SINCE { "reconnect=1" } else { "reconnect-ms=100" };
    let memory = options.memory_mib;
    // QEMU ends with this process, however that ends.
    let mut command = Command::new(find_program("setpriv", "util-linux")?);
    command.args(["--pdeathsig", "KILL"]).arg(qemu);
    command
        .stdin(Stdio::null())
        .args(["-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-M", "q35,memory-backend=memory"])
        .args(["-accel", accelerator.qemu_argument(), "-cpu", "max"])
        .args(["-smp", &options.vcpus.to_string()])
        .args(["-m", &format!("{memory}M")])
        .args(["-object", &format!("memory-backend-memfd,id=memory,size={memory}M,share=on")])
        .args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"])
        .args(socket_chardev("agent", &folder.join("agent"), ""))
        .args(["-serial", "chardev:agent"])
        .args(socket_chardev("monitor", &folder.join("monitor"), ""))
        .args(["-mon", "chardev=monitor,mode=control"]);
    if options.boot_target.is_none() {
        command.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initramfs);
        command.args(["-append", KERNEL_OPTIONS]);
    }
    for (index, disk) in options.disks.iter().enumerate() {
        let id = format!("disk{index}");
        let (queues, size) = (disk.num_queues, disk.queue_size);
        let device = match disk.bus {
            Bus::Blk => format!("vhost-user-blk-pci,num-queues={queues},queue-size={size}"),
            Bus::Scsi => format!("vhost-user-scsi-pci,num_queues={queues},virtqueue_size={size}"),
        };
        let packed = if options.packed { ",packed=on" } else { "" };
        let boot = match options.boot_target {
            Some(target) if index == 0 => format!(",bootindex=1,boot_tpgt={target}"),
            _ => String::new(),
        };
        command
            .args(socket_chardev(&id, &disk.socket, reconnect))
            .args(["-device", &format!("{device},chardev={id}{packed}{boot}")]);
    }
    Ok(command)
}

fn socket_chardev(id: &str, path: &Path, more: &str) -> [OsString; 2] {
    let mut argument = OsString::from(format!("socket,id={id},path="));
    argument.push(path);
    if !more.is_empty() {
        argument.push(",");
        argument.push(more);
    }
    ["-chardev".into(), argument]
}

fn qemu_version(qemu: &Path) -> Result<(u32, u32)> {
    let text = process::output(Command::new(qemu).arg("--version"))?;
    parse_version(&text).with_context(|| format!("{} says no version: {text}", qemu.display()))
}

/// The (major, minor) in `QEMU emulator version 10.0.2 (Debian …)`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let (_, version) = text.split_once("version ")?;
    let mut parts = version.split(|character: char| !character.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_qemu_are_read() {
        let debian = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright";
        assert_eq!(parse_version(debian), Some((10, 0)));
        assert_eq!(parse_version("QEMU emulator version 8.2.2"), Some((8, 2)));
        assert_eq!(parse_version("no such thing"), None);
        assert!((8, 2) < RECONNECT_MS_SINCE && (10, 0) >= RECONNECT_MS_SINCE);
    }
}
