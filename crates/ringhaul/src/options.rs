//! The options of `ringhaul serve`.

pub mod config;
pub(crate) mod export;
pub mod unit;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use blockio::config::EngineOptions;
use blockio::{EngineConfig, EngineKind, IoThreadConfig};
use clap::{Args, ValueEnum};
use clap_complete::engine::{PathCompleter, ValueCompleter as _};
use clap_complete::{ArgValueCompleter, CompletionCandidate};
use device::blk::config::{QUEUES_MAX, SERIAL_BYTES};
use disks::spec::completions;
use ringhaul_options::key_value::{Parts, split_at_commas};
use ringhaul_options::{EngineChoice, LockChoice, OnOff, parse_duration, parse_size};
use serde::Deserialize;
use virtqueue::MemoryFiles;

use crate::fd_store::KeepConnections;
pub use crate::sandbox::options::{SandboxMode, SandboxOptions};
use crate::spec::switches::Switches;
use crate::spec::values::MetricsAddress;

use crate::spec::qos::{LimitSpec, OnError, OnReadError};
use crate::spec::settings::{POLL_MAX_US, PollLimits};
use crate::spec::{CacheMode, check_name, check_queue_size, check_text};

/// The limits of Linux for a time slice, in microseconds.
const SLICE_MIN: u32 = 100;
const SLICE_MAX: u32 = 100_000;

/// Options of the export that a command line describes.
#[derive(Debug, Clone, Args)]
pub struct ExportArgs {
    /// Listen on this Unix socket.
    ///
    /// It is created at the start and removed at the end.
    #[arg(help_heading = "Socket", long, value_name = "PATH")]
    pub socket_path: Option<PathBuf>,
    /// The name of the export in commands and in the log.
    ///
    /// It has 1 to 100 characters, and is no other export's name or socket. Default: the path of
    /// its socket.
    #[arg(help_heading = "Socket", long, value_name = "NAME", value_parser = parse_name)]
    pub name: Option<String>,
    /// The device that the guest sees.
    ///
    /// virtio-blk has one disk, virtio-scsi the units that `--lun` names.
    #[arg(help_heading = "Device", long, value_name = "DEVICE", default_value = "blk")]
    pub device: DeviceKind,
    /// A logical unit of the virtio-scsi device; may be repeated.
    ///
    /// A unit is a number from 0 to 16383, or with its target T, 0 to 255. It needs its disk:
    /// `blk-file=PATH`, `null=SIZE`, or, as the last key, `disk=DISK` with DISK as for `--disk`.
    /// `read-only`, `lock`, `cache`, `logical-block-size`, `rerror`, `werror` and the keys of
    /// `--limits` default to the options of the same names. The guest sees `serial` (36 bytes),
    /// `wwn` (16 hexadecimal digits), `rotational=on|off`, `discard=on|off`, `vendor`, `product`,
    /// `revision`, `like=qemu` and `names=wwn|serial`; `stop=ignore|obey` is the effect of START
    /// STOP UNIT, and `reservations=PATH` the file of persistent reservations. Write a comma in a
    /// value twice.
    #[arg(help_heading = "Device", long,
          value_name = "[T:]LUN,KEY=VALUE,...", conflicts_with_all = ["blk_file", "disk"],
          add = ArgValueCompleter::new(complete_keys))]
    pub lun: Vec<String>,
    /// Serve this regular file or block device.
    #[arg(help_heading = "Disk", long, value_name = "PATH", conflicts_with = "disk")]
    pub blk_file: Option<PathBuf>,
    /// Serve this disk: a file, an image, a network disk, or a layer over another disk.
    ///
    /// `file,path=PATH`; `null,size=SIZE` (answers at once, stores nothing: for measurement);
    /// `rbd,pool=POOL,image=IMAGE`, an image in a Ceph cluster; `nbd,host=HOST` or
    /// `nbd,socket=PATH`, with `export=NAME`; or a layer over another disk:
    /// `raw,offset=SIZE,size=SIZE,over=DISK`, a part of it; `luks,key-file=PATH,over=DISK`;
    /// `qcow2,over=DISK`; `image,format=auto,over=DISK`. `ringhaul disk --help` has all keys. Short
    /// forms: a PATH that begins with `/`, `./` or `../`, `file:PATH`, `null:SIZE`,
    /// `rbd:POOL/IMAGE`, `nbd://HOST/NAME`, `nbd+unix:///NAME?socket=PATH`, `qcow2:PATH`. SIZE
    /// takes the suffixes K, M, G, T and P (powers of 1024). Write a comma in a value twice.
    #[arg(help_heading = "Disk", long,
          value_name = "KIND,KEY=VALUE,...", add = ArgValueCompleter::new(complete_disk))]
    pub disk: Option<String>,
    /// Export one more disk on its own socket; may be repeated.
    ///
    /// It needs `socket-path=PATH` and its
    /// disk: `blk-file=PATH`, `null=SIZE`, or, as the last key, `disk=DISK` with DISK as for
    /// `--disk`; or `device=scsi` and units, each of which begins with `lun=[T:]LUN`, followed by
    /// its keys. `name`, `read-only=on|off`, `lock`, `in-order`, `cache`, `serial`,
    /// `logical-block-size`, `num-queues`, `queue-size`, `iothread`, `rerror`, `werror` and the
    /// keys of `--limits` are like the options of the same names, which are their defaults (except
    /// `name`, `serial` and `iothread`). Write a comma in a value twice.
    #[arg(help_heading = "Socket", long,
          value_name = "KEY=VALUE,...", add = ArgValueCompleter::new(complete_keys))]
    pub export: Vec<String>,
    /// Refuse writes.
    #[arg(help_heading = "Disk", long)]
    pub read_only: bool,
    /// Lock the disk the way QEMU's programs do, which then cannot write to it
    /// either. With `off`, make sure yourself that no other program writes to it.
    /// With `late`, only while queues of the guest run: for guests that migrate.
    #[arg(help_heading = "Disk", long, value_name = "ON|OFF|LATE", default_value = "on")]
    pub lock: LockChoice,
    /// Answer requests in the order in which the guest has made them, where the front-end keeps no
    /// inflight region and continues at used idx when the daemon was killed. A slow request then
    /// holds up the answers behind it. For virtio-blk.
    #[arg(help_heading = "Device", long, value_name = "ON|OFF", default_value = "off")]
    pub in_order: OnOff,
    /// The most queues that a front-end may use. Default: as many as the device can have, 256, or
    /// 254 request queues of virtio-scsi. Unused queues cost nothing.
    #[arg(help_heading = "Device", long, value_name = "N",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    pub num_queues: Option<u16>,
    /// The queue size assumed when computing `seg_max`: a power of two from 4 to 1024.
    /// The front-end may use any size up to 1024.
    #[arg(help_heading = "Device", long,
          value_name = "N", default_value_t = 128, value_parser = parse_queue_size)]
    pub queue_size: u16,
    /// Serve all queues on this one thread, 0 to N - 1. A disk that hangs, or whose
    /// submits wait for it, then does not affect exports on other threads.
    #[arg(help_heading = "Threads and engines", long, value_name = "K")]
    pub iothread: Option<u16>,
    /// With io_uring, register the guest's memory, which saves the kernel work for each request.
    /// Pins all of that memory. Only for guests without a memory balloon, free page reporting or
    /// virtio-mem: when the front-end replaces pages, data would go to the old ones.
    #[arg(help_heading = "Guest memory", long)]
    pub fixed_buffers: bool,
    /// The cache between guest and disk, with QEMU's names.
    ///
    /// `none` and `directsync` bypass
    /// the page cache; with `none` and `writeback` the guest sees a write cache, which it flushes;
    /// with `directsync` and `writethrough` a write is on stable storage when it is answered.
    /// Default: `none`, or `writeback` where the file system has no direct I/O.
    #[arg(help_heading = "Disk", long, value_name = "MODE")]
    pub cache: Option<CacheMode>,
    /// Serial number that the guest sees, up to 20 bytes of ASCII. Default: derived from the
    /// identity of the disk: the file in its file system, or the block device.
    #[arg(help_heading = "Device", long,
          value_name = "TEXT", value_parser = parse_serial)]
    pub serial: Option<String>,
    /// The smallest unit of a request in bytes: a power of two from 512 to 65536. Default: that of
    /// a block device, and 512 for a regular file.
    #[arg(help_heading = "Device", long, value_name = "BYTES")]
    pub logical_block_size: Option<u32>,
    /// Limits on each disk, with QEMU's names.
    ///
    /// `iops` or `bps`, with `-total`, `-read` or `-write`;
    /// with `-max` the rate of a burst, with `-max-length` its seconds. `iops-size`: the bytes that
    /// count as one request. `group`: the disks of that name share the limits.
    #[arg(help_heading = "Disk", long, value_name = "KEY=VALUE,...",
          value_parser = |text: &str| parse_limits(text).map_err(|error| format!("{error:#}")))]
    pub limits: Option<LimitSpec>,
    /// The handling of reads that a disk fails: `report` reports the error to the guest, `retry`
    /// retries until they succeed, while the guest waits. Default: `report`.
    #[arg(help_heading = "Disk", long, value_name = "ACTION")]
    pub rerror: Option<OnReadError>,
    /// The handling of writes that a disk fails, discards and zeroes included: like `--rerror`; or
    /// `hold`, which holds writes that lack space until there is some; or `hold-briefly`, the same
    /// for 20 seconds at most. Default: `hold-briefly`.
    #[arg(help_heading = "Disk", long, value_name = "ACTION")]
    pub werror: Option<OnError>,
}

/// Options of `ringhaul serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// The export.
    #[command(flatten)]
    pub exports: ExportArgs,
    /// Read exports and options from this TOML file too.
    ///
    /// Options on the command line replace the
    /// file's, and exports are added to those in the file. SIGHUP makes the daemon read the file
    /// again.
    #[arg(help_heading = "Socket", long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Use this open descriptor in place of `--socket-path`: a listening socket, or one that a
    /// front-end is connected to.
    #[arg(
        help_heading = "Socket",
        long,
        value_name = "FD",
        allow_negative_numbers = true,
        conflicts_with = "socket_path"
    )]
    pub fd: Option<i32>,
    /// Listen on this Unix socket for `ringhaul ctl`.
    ///
    /// Other programs may also query and change the daemon through it. Only root, the user of the
    /// daemon, and members of `--control-group` and `--control-read-group` can connect.
    #[arg(help_heading = "Socket", long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Serve metrics for Prometheus over HTTP at this address, such as 127.0.0.1:9750, or on the
    /// Unix socket unix:PATH: /metrics, /-/healthy and /-/ready. Each client reads the names
    /// of all exports.
    #[arg(help_heading = "Socket", long, value_name = "ADDRESS")]
    pub metrics: Option<MetricsAddress>,
    /// Keep the changes of control commands in this file, for the next start: exports, units,
    /// limits, error policies and settings. Default with `--control`: its path with `.state` added,
    /// in `$STATE_DIRECTORY` if systemd names one. `none` keeps nothing, and ignores earlier
    /// changes.
    #[arg(help_heading = "Socket", long, value_name = "FILE")]
    pub state: Option<PathBuf>,
    /// The members of this group may connect to the control socket too. They use disks that they
    /// can open themselves, and disks in `--allow-disk-dir`. They place sockets beside the control
    /// socket or in `--allow-socket-dir`.
    #[arg(help_heading = "Socket", long, value_name = "GROUP", requires = "control")]
    pub control_group: Option<String>,
    /// The members of this group may connect to the control socket too, and only query: `list`,
    /// `show`, `stats`, `metrics`, `top`, `doctor`, `events` and the log.
    #[arg(help_heading = "Socket", long, value_name = "GROUP", requires = "control")]
    pub control_read_group: Option<String>,
    /// Disks that are added later may be files in this folder and its subfolders; may be repeated.
    /// Commands of `--control-group` may name files there; no link leads out of it. The sandbox
    /// permits disks there too.
    #[arg(help_heading = "Socket", long, value_name = "FOLDER")]
    pub allow_disk_dir: Vec<PathBuf>,
    /// Exports that are added later may have sockets in this folder and its subfolders; may be
    /// repeated. The folder of the control socket is always allowed.
    #[arg(help_heading = "Socket", long, value_name = "FOLDER")]
    pub allow_socket_dir: Vec<PathBuf>,
    /// Take over from the daemon with this control socket, while its guests run: its exports, its
    /// sockets and its options. Options given beside this one replace the daemon's, except options
    /// of exports, which stay as they are. If anything fails, the old daemon continues.
    #[arg(help_heading = "Socket", long, value_name = "PATH")]
    pub takeover: Option<PathBuf>,
    /// Print the capabilities of this program as JSON, and exit; other options than `--device` are
    /// ignored.
    // Only for the help text. Other options must not matter even if they are wrong, so the program
    // looks for this option before it parses them, and never sets the field.
    #[arg(help_heading = "Socket", long)]
    pub print_capabilities: bool,
    /// Let the service manager keep the connections and the memory of front-ends, so that guests
    /// of every VMM lose nothing when the daemon is killed. `on` needs
    /// `FileDescriptorStoreMax=` in the unit of systemd; `auto`: if systemd 254 or later states
    /// that it stores descriptors.
    #[arg(help_heading = "Socket", long, value_name = "WHEN", default_value = "auto")]
    pub keep_connections: KeepConnections,
    /// Threads that serve queues.
    ///
    /// They serve disks of all engines. Thread E + I modulo N serves queue I of export E.
    #[arg(help_heading = "Threads and engines", long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub iothreads: u16,
    /// The longest time in microseconds, 0 to 10000, that an IoThread busy-polls before it sleeps.
    /// Only while that pays: for a disk, while the saved latency is worth the CPU time. 0 disables
    /// busy-polling.
    #[arg(help_heading = "Threads and engines", long,
          value_name = "US", default_value_t = IoThreadConfig::POLL_MAX_US,
          value_parser = clap::value_parser!(u16).range(0..=i64::from(POLL_MAX_US)))]
    pub poll_max_us: u16,
    /// The CPU time in percent, 1 to 100, that busy-polling may add to an operation. 100 sets no
    /// bound: the lowest latency.
    #[arg(help_heading = "Threads and engines", long,
          value_name = "PERCENT", default_value_t = IoThreadConfig::POLL_BUDGET_PERCENT,
          value_parser = clap::value_parser!(u8).range(1..=100))]
    pub poll_budget: u8,
    /// The time slice of an IoThread in microseconds, 100 to 100000, while other programs want its
    /// CPU: a short one brings the CPU back sooner. 0 leaves the kernel's. Linux before 6.12
    /// ignores it.
    #[arg(help_heading = "Threads and engines", long, value_name = "US",
          default_value_t = IoThreadConfig::SLICE_US, value_parser = parse_slice)]
    pub slice_us: u32,
    /// The engine that carries operations to the kernel.
    ///
    /// `auto` tries the engines on the disk and
    /// logs its choice.
    #[arg(
        help_heading = "Threads and engines",
        long,
        value_name = "ENGINE",
        default_value = "auto"
    )]
    pub engine: EngineChoice,
    /// With io_uring, let a kernel thread pick up submissions: fewer system calls, and up to one
    /// more core for each IoThread. Without a CPU for that thread alone, everything is slow.
    #[arg(help_heading = "Threads and engines", long)]
    pub sqpoll: bool,
    /// With io_uring and direct I/O, poll for completions of reads and writes on devices whose
    /// drivers have polled queues. An IoThread does not sleep while it waits for them, which
    /// takes a core each. Other disks use interrupts as usual, and the log says why.
    #[arg(help_heading = "Threads and engines", long)]
    pub iopoll: bool,
    /// The most memory that one front-end may share with the daemon. SIZE is as for `--disk`. A new
    /// map of its memory counts in addition to the old one until it has replaced it.
    #[arg(help_heading = "Guest memory", long,
          value_name = "SIZE", default_value = "16T", value_parser = parse_memory_size)]
    pub max_guest_memory: u64,
    /// The most memory that all front-ends together may share. A process has room for 128T, and
    /// needs some of that itself.
    #[arg(help_heading = "Guest memory", long,
          value_name = "SIZE", default_value = "64T", value_parser = parse_memory_size)]
    pub max_mapped_memory: u64,
    /// The files that a front-end may share as guest memory. `sealable`: files with seals (memfd,
    /// tmpfs, hugetlbfs) and DAX devices. `any`: files of all file systems; one that does not
    /// answer (FUSE, NFS) then stops every export on the IoThread that touches it.
    #[arg(help_heading = "Guest memory", long, value_name = "FILES", default_value = "sealable")]
    pub memory_files: MemoryFilesChoice,
    /// Options of the sandbox.
    #[command(flatten)]
    pub confinement: SandboxOptions,
    /// Options for measurement.
    #[command(flatten)]
    pub switches: Switches,
    /// Log requests that take at least this time, such as 500ms or 2s: the operation, the sector,
    /// and the phase that took most of the time. A few lines a minute are logged.
    #[arg(help_heading = "Log", long, value_name = "DURATION", value_parser = parse_duration)]
    pub slow_request: Option<Duration>,
}

/// Values of `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// virtio-blk.
    Blk,
    /// virtio-scsi.
    Scsi,
}

/// Values of `--memory-files`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MemoryFilesChoice {
    /// Files that cannot make an access wait.
    Sealable,
    /// All files that can be mapped.
    Any,
}

impl From<MemoryFilesChoice> for MemoryFiles {
    fn from(choice: MemoryFilesChoice) -> Self {
        match choice {
            MemoryFilesChoice::Sealable => Self::Sealable,
            MemoryFilesChoice::Any => Self::Any,
        }
    }
}

/// The output of `--print-capabilities` ("Backend program conventions" of the vhost-user
/// specification), which lists supported options by name. The conventions define names for block
/// devices and none for SCSI devices.
pub fn capabilities(device: DeviceKind) -> &'static str {
    match device {
        DeviceKind::Blk => {
            r#"{
  "type": "block",
  "features": [
    "read-only",
    "blk-file"
  ]
}"#
        }
        DeviceKind::Scsi => {
            r#"{
  "type": "scsi",
  "features": [
    "read-only",
    "lun"
  ]
}"#
        }
    }
}

impl ServeArgs {
    /// The options that only engine io_uring has, each with true if it is given.
    pub fn io_uring_options(&self) -> [(&'static str, bool); 3] {
        [
            ("--sqpoll", self.sqpoll),
            ("--iopoll", self.iopoll),
            ("--fixed-buffers", self.exports.fixed_buffers),
        ]
    }

    /// The configuration of an engine.
    pub(crate) fn engine_config(&self, engine: EngineKind) -> EngineConfig {
        let options = EngineOptions {
            sqpoll: self.sqpoll,
            iopoll: self.iopoll,
            completion_ring: self.switches.completion_ring.into(),
        };
        options.engine(engine)
    }

    /// The initial busy-poll limits.
    pub(crate) fn poll_limits(&self) -> PollLimits {
        PollLimits { max_us: self.poll_max_us, budget_percent: self.poll_budget }
    }

    /// The configuration with which each IoThread starts. Engines for the disks are added later.
    pub(crate) fn io_thread_config(&self) -> IoThreadConfig {
        IoThreadConfig {
            engine: EngineConfig::Threads,
            poll_max: self.poll_limits().max(),
            poll_budget_percent: u32::from(self.poll_budget),
            slice: Duration::from_micros(self.slice_us.into()),
            ..self.switches.io_thread_config()
        }
    }
}

/// Formats an error of a command line in one line, without the usage that clap adds.
pub fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let text: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    let text = text.join(" ");
    let text = text.trim_end_matches("For more information, try '--help'.").trim_end();
    let text = text.trim_start_matches("error: ");
    // Texts of Rust's number parsers.
    let text = text.replace("invalid digit found in string", "it must be a whole number");
    text.replace("number would be zero for non-zero type", "it must be at least 1")
}

/// Completes the name of a disk, or the path of a file, for a shell.
fn complete_disk(begun: &OsStr) -> Vec<CompletionCandidate> {
    let text = begun.to_string_lossy();
    let words = completions(&text).into_iter().map(CompletionCandidate::new);
    let paths = if text.contains(',') { Vec::new() } else { PathCompleter::any().complete(begun) };
    words.chain(paths).collect()
}

/// Completes the name of a disk after `disk=`, which is the last key.
fn complete_keys(begun: &OsStr) -> Vec<CompletionCandidate> {
    let text = begun.to_string_lossy();
    match text.split_once(",disk=") {
        Some((front, disk)) => {
            let words = completions(disk).into_iter();
            words.map(|word| CompletionCandidate::new(format!("{front},disk={word}"))).collect()
        }
        None => Vec::new(),
    }
}

/// Reads limits in the form of `--limits`.
///
/// # Errors
///
/// When a key is unknown, or a value makes no sense.
fn parse_limits(text: &str) -> anyhow::Result<LimitSpec> {
    let limits: LimitSpec = Parts::new(&split_at_commas(text)).finish()?;
    limits.limits()?;
    Ok(limits)
}

fn parse_memory_size(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("no front-end can be served without memory".to_owned()),
        bytes => Ok(bytes),
    }
}

fn parse_serial(text: &str) -> Result<String, String> {
    check_text(text, SERIAL_BYTES).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}

fn parse_name(text: &str) -> Result<String, String> {
    check_name(text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}

fn parse_slice(text: &str) -> Result<u32, String> {
    let slice = text.parse().ok().filter(|us| *us == 0 || (SLICE_MIN..=SLICE_MAX).contains(us));
    slice.ok_or_else(|| format!("it must be 0, or a number from {SLICE_MIN} to {SLICE_MAX}"))
}

fn parse_queue_size(text: &str) -> Result<u16, String> {
    // 0 is out of range like text that is no number.
    let size = text.parse().unwrap_or(0);
    check_queue_size(size).map_err(|error| error.to_string())?;
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shell replaces the whole word by a completion.
    #[test]
    fn a_disk_among_keys_is_completed_behind_them() {
        let complete = |begun: &str| {
            let found = complete_keys(OsStr::new(begun)).into_iter();
            found.map(|word| word.get_value().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        let found = complete("lun=0,disk=nul");
        assert!(found.iter().any(|word| word.starts_with("lun=0,disk=null")), "{found:?}");
        assert!(found.iter().all(|word| word.starts_with("lun=0,disk=nul")), "{found:?}");
        let found = complete("0,disk=nbd,");
        assert!(found.iter().any(|word| word == "0,disk=nbd,socket="), "{found:?}");
        assert_eq!(complete("serial=nul"), Vec::<String>::new(), "no disk has begun");
    }

    #[test]
    fn the_files_of_guest_memory_are_those_of_the_word() {
        for (choice, files) in [
            (MemoryFilesChoice::Sealable, MemoryFiles::Sealable),
            (MemoryFilesChoice::Any, MemoryFiles::Any),
        ] {
            assert_eq!(MemoryFiles::from(choice), files);
        }
    }
}
