//! The compared servers and their command lines.

use std::fmt;

use serde::{Serialize, Serializer};

use super::plan::Workload;
use crate::rig::elsewhere::IMAGE;
use crate::rig::load::Load;
use crate::rig::targets::Target;

/// The size of the null disk of both programs: 64 GiB, more than any real disk here.
const NULL_SIZE: u64 = 64 << 30;

/// A program with options: a server of one disk, or fio on the disk itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Server {
    Ringhaul(Device, Engine),
    /// qemu-storage-daemon with this `aio=`.
    Qsd(&'static str),
    /// qemu-storage-daemon with this `driver=`, which has no `aio=`.
    QsdDriver(&'static str),
    /// Ringhaul with this engine on the bytes of an image, without its format.
    Raw(Engine),
    /// fio with this `ioengine=`, directly on the disk: the limit.
    Fio(&'static str),
}

/// The kind of the guest's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Device {
    Blk,
    /// A virtio-blk device with a driver that keeps an inflight region.
    Inflight,
    /// LUN 0 of a virtio-scsi device.
    Scsi,
}

impl Device {
    /// Returns the options with which the load generator drives this device.
    pub(super) fn bench_options(self) -> &'static [&'static str] {
        match self {
            Self::Blk => &[],
            Self::Inflight => &["--inflight"],
            Self::Scsi => &["--device", "scsi"],
        }
    }
}

/// An engine of Ringhaul.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Engine {
    Auto,
    Aio,
    IoUring,
    Threads,
}

impl Engine {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Aio => "aio",
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
        }
    }
}

/// Programs on a real disk. As virtio-scsi and with an inflight region, Ringhaul has only named
/// engines: `auto` may choose differently in two starts, and then ratios would compare engines.
const ON_DISKS: &[Server] = &[
    Server::Ringhaul(Device::Blk, Engine::Auto),
    Server::Ringhaul(Device::Blk, Engine::Aio),
    Server::Ringhaul(Device::Blk, Engine::IoUring),
    Server::Ringhaul(Device::Inflight, Engine::Aio),
    Server::Ringhaul(Device::Scsi, Engine::Aio),
    Server::Ringhaul(Device::Scsi, Engine::IoUring),
    Server::Qsd("native"),
    Server::Qsd("io_uring"),
    Server::Qsd("threads"),
    Server::Fio("libaio"),
    Server::Fio("io_uring"),
];

/// Servers of an image.
const ON_IMAGES: &[Server] = &[
    Server::Ringhaul(Device::Blk, Engine::Auto),
    Server::Ringhaul(Device::Blk, Engine::Aio),
    Server::Ringhaul(Device::Blk, Engine::IoUring),
    Server::Raw(Engine::Aio),
    Server::Raw(Engine::IoUring),
    Server::Qsd("native"),
    Server::Qsd("io_uring"),
];

/// Servers of new images. Raw bytes of a new image mean nothing.
const ON_THIN_IMAGES: &[Server] = &[
    Server::Ringhaul(Device::Blk, Engine::Auto),
    Server::Ringhaul(Device::Blk, Engine::Aio),
    Server::Ringhaul(Device::Blk, Engine::IoUring),
    Server::Qsd("native"),
    Server::Qsd("io_uring"),
];

impl Server {
    /// The programs on `target`. The first is Ringhaul without options.
    pub(super) fn on(target: Target) -> &'static [Self] {
        match target {
            // A null disk has no operations, so no engine matters.
            Target::Null => &[
                Self::Ringhaul(Device::Blk, Engine::Auto),
                Self::Ringhaul(Device::Inflight, Engine::Auto),
                Self::Ringhaul(Device::Scsi, Engine::Auto),
                Self::QsdDriver("null-co"),
            ],
            Target::Rbd => &[
                Self::Ringhaul(Device::Blk, Engine::Auto),
                Self::QsdDriver("rbd"),
                Self::Fio("rbd"),
            ],
            Target::Nbd => &[Self::Ringhaul(Device::Blk, Engine::Auto), Self::QsdDriver("nbd")],
            Target::Qcow2 => ON_IMAGES,
            Target::Thin | Target::ThinZram => ON_THIN_IMAGES,
            Target::Zram | Target::Loop | Target::File => ON_DISKS,
        }
    }

    /// The servers that `workload` drives on `target`. fio has no virtqueue to poll. Beside a load,
    /// Ringhaul is compared only without options, and fio not at all.
    pub(super) fn under(target: Target, workload: Workload) -> Vec<Self> {
        let servers = Self::on(target).iter().copied();
        let is_default = |server: &Self| *server == Self::Ringhaul(Device::Blk, Engine::Auto);
        let is_wanted = |server: &Self| match workload.beside {
            Load::Nothing => server.is_server() || !workload.driver_polls,
            _ => is_default(server) || matches!(server, Self::Qsd(_) | Self::QsdDriver(_)),
        };
        servers.filter(is_wanted).collect()
    }

    /// The program's name.
    pub(super) fn program(self) -> &'static str {
        match self {
            Self::Ringhaul(..) | Self::Raw(_) => "ringhaul",
            Self::Qsd(_) | Self::QsdDriver(_) => "qemu-storage-daemon",
            Self::Fio(_) => "fio",
        }
    }

    /// True for Ringhaul, with any device and engine.
    pub(super) fn is_ours(self) -> bool {
        matches!(self, Self::Ringhaul(..) | Self::Raw(_))
    }

    /// The device that the load generator drives.
    pub(super) fn device(self) -> Device {
        match self {
            Self::Ringhaul(device, _) => device,
            Self::Raw(_) | Self::Qsd(_) | Self::QsdDriver(_) | Self::Fio(_) => Device::Blk,
        }
    }

    /// The server of our own to compare with: for virtio-scsi and the inflight region, which no
    /// rival has, virtio-blk, and for an image its raw bytes.
    pub(super) fn own_rival(self) -> Option<Self> {
        match self {
            Self::Ringhaul(Device::Scsi | Device::Inflight, engine) => {
                Some(Self::Ringhaul(Device::Blk, engine))
            }
            Self::Ringhaul(Device::Blk, engine) => Some(Self::Raw(engine)),
            _ => None,
        }
    }

    /// True if the program serves a socket.
    pub(super) fn is_server(self) -> bool {
        !matches!(self, Self::Fio(_))
    }

    /// Options to serve `disk` (of a type that `target` has) on `socket`.
    ///
    /// All programs bypass the page cache, and servers offer a write cache that is never flushed.
    /// So a write is done when the kernel reports it, for all alike.
    pub(super) fn options(self, target: Target, disk: &str, socket: &str) -> Vec<String> {
        let driver = if target == Target::File { "file" } else { "host_device" };
        let blockdev = match self {
            Self::Ringhaul(device, engine) => {
                return ringhaul_options(device, engine, target, disk, socket);
            }
            Self::Raw(engine) => {
                return ringhaul_options(Device::Blk, engine, Target::Zram, disk, socket);
            }
            Self::Fio(_) => return Vec::new(),
            Self::Qsd(aio) if target.is_image() => {
                let driver = if disk.starts_with("/dev/") { "host_device" } else { "file" };
                format!(
                    "driver=qcow2,file.driver={driver},file.filename={disk},file.aio={aio},\
                     file.cache.direct=on,cache.direct=on,node-name=disk"
                )
            }
            Self::Qsd(aio) => {
                let direct = "cache.direct=on,node-name=disk";
                format!("driver={driver},filename={disk},aio={aio},{direct}")
            }
            Self::QsdDriver("rbd") => format!(
                "driver=rbd,pool=rbd,image={IMAGE},conf={disk},cache.direct=on,node-name=disk"
            ),
            Self::QsdDriver("nbd") => {
                format!("driver=nbd,server.type=unix,server.path={disk},node-name=disk")
            }
            Self::QsdDriver(driver) => {
                format!("driver={driver},size={NULL_SIZE},read-zeroes=off,node-name=disk")
            }
        };
        let export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,iothread=thread,writable=on,\
             num-queues=1,addr.type=unix,addr.path={socket}"
        );
        ["--object", "iothread,id=thread", "--blockdev", &blockdev, "--export", &export]
            .map(str::to_owned)
            .to_vec()
    }
}

/// Ringhaul's options to serve `disk` on `socket`.
pub(super) fn ringhaul_options(
    device: Device,
    engine: Engine,
    target: Target,
    disk: &str,
    socket: &str,
) -> Vec<String> {
    let disk = match (device, target) {
        (Device::Blk | Device::Inflight, Target::Null) => {
            vec!["--disk".to_owned(), format!("null,size={NULL_SIZE}")]
        }
        (Device::Blk | Device::Inflight, Target::Rbd) => {
            vec!["--disk".to_owned(), format!("rbd,image={IMAGE},conf={disk}")]
        }
        (Device::Blk | Device::Inflight, Target::Nbd) => {
            vec!["--disk".to_owned(), format!("nbd,socket={disk}")]
        }
        (Device::Blk | Device::Inflight, target) if target.is_image() => {
            vec!["--disk".to_owned(), format!("qcow2:{disk}")]
        }
        (Device::Blk | Device::Inflight, _) => vec!["--blk-file".to_owned(), disk.to_owned()],
        (Device::Scsi, _) => {
            let disk = match target {
                Target::Null => format!("null={NULL_SIZE}"),
                _ => format!("blk-file={disk}"),
            };
            ["--device", "scsi", "--lun", &format!("0,{disk}")].map(str::to_owned).to_vec()
        }
    };
    let fixed = ["--num-queues", "1", "--cache", "none", "--engine", engine.name()];
    // The log provides the figures of IoThreads.
    // Builds from before the folders have the module at the top.
    let filter = "info,ringhaul::engines=debug,ringhaul::threads::engines=debug";
    let counters = ["--log", filter];
    let fixed = fixed.into_iter().chain(counters);
    let start = ["serve", "--socket-path", socket].map(str::to_owned);
    start.into_iter().chain(disk).chain(fixed.map(str::to_owned)).collect()
}

/// fio's options for a workload, without its time and output file.
pub(super) fn fio_options(
    ioengine: &str,
    disk: &str,
    workload: Workload,
    cpu: usize,
) -> Vec<String> {
    let Workload { rw, bs, depth, .. } = workload;
    // The environment names the cluster of an image.
    let on = match ioengine {
        "rbd" => vec![
            "--clientname=admin".to_owned(),
            "--pool=rbd".to_owned(),
            format!("--rbdname={IMAGE}"),
        ],
        _ => vec![format!("--filename={disk}"), format!("--cpus_allowed={cpu}")],
    };
    // Like the load generator, draws each random offset independently.
    let options = [
        "--name=limit".to_owned(),
        format!("--ioengine={ioengine}"),
        format!("--rw={rw}"),
        format!("--bs={bs}"),
        format!("--iodepth={depth}"),
        "--direct=1".to_owned(),
        "--norandommap".to_owned(),
        "--random_generator=tausworthe64".to_owned(),
        "--time_based".to_owned(),
        "--allow_mounted_write=0".to_owned(),
    ];
    options.into_iter().chain(on).collect()
}

impl fmt::Display for Server {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ringhaul(Device::Blk, engine) => write!(out, "Ringhaul {}", engine.name()),
            Self::Ringhaul(Device::Inflight, engine) => {
                write!(out, "Ringhaul inflight {}", engine.name())
            }
            Self::Ringhaul(Device::Scsi, engine) => write!(out, "Ringhaul SCSI {}", engine.name()),
            Self::Qsd(aio) => write!(out, "QSD aio={aio}"),
            Self::QsdDriver(driver) => write!(out, "QSD {driver}"),
            Self::Raw(engine) => write!(out, "Ringhaul raw {}", engine.name()),
            Self::Fio(ioengine) => write!(out, "fio {ioengine}"),
        }
    }
}

impl Serialize for Server {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
