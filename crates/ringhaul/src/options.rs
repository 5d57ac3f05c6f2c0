//! The command line.

mod disk;
mod export;
pub mod switches;

use std::path::PathBuf;
use std::time::Duration;

use blockio::{EngineKind, IoThreadConfig};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::blk::config::{QUEUES_MAX, SERIAL_BYTES};
use crate::log::{LogFormat, parse_filter};
pub use export::{EndpointSpec, ExportSpec, OpenDisk};
use ringhaul_bench::{EngineChoice, OnOff};
use switches::Switches;
use virtqueue::MemoryFiles;

/// Serves disks to virtual machines over vhost-user.
#[derive(Debug, Parser)]
#[command(name = "ringhaul", version, about, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// How the log on standard error is written.
    #[arg(long, value_name = "FORMAT", default_value = "text", global = true)]
    pub log_format: LogFormat,
    /// What is logged: a level (`error`, `warn`, `info`, `debug`, `trace` or `off`), or levels of
    /// parts, such as `info,blockio=debug`. Goes before the variable RUST_LOG, which is of the same
    /// form. Default: `info`.
    #[arg(long, value_name = "FILTER", global = true, value_parser = check_filter)]
    pub log: Option<String>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Export a disk as a virtio-blk device on a vhost-user socket, in the foreground.
    ///
    /// Ends cleanly on SIGTERM and SIGINT: requests that were taken are answered first. Without a
    /// command, options are taken as those of `serve`, which is how management programs start
    /// vhost-user back-ends.
    Serve(ServeArgs),
    /// Drive a vhost-user-blk socket and say how fast it is. Options are named as fio names them.
    Bench(Box<ringhaul_bench::BenchArgs>),
}

/// Options of `ringhaul serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Listen on this Unix socket. It is made at start and removed at the end.
    #[arg(long, value_name = "PATH", conflicts_with = "fd")]
    pub socket_path: Option<PathBuf>,
    /// Use this open descriptor instead: a listening socket, or one that a front-end is connected
    /// to.
    #[arg(long, value_name = "FD", allow_negative_numbers = true)]
    pub fd: Option<i32>,
    /// Serve this regular file or block device.
    #[arg(long, value_name = "PATH", conflicts_with = "disk")]
    pub blk_file: Option<PathBuf>,
    /// Serve this disk: `null,size=SIZE` (answers at once, keeps nothing: for measuring) or
    /// `file,path=PATH`. SIZE takes the suffixes K, M, G and T (powers of 1024).
    #[arg(long, value_name = "KIND,KEY=VALUE")]
    pub disk: Option<String>,
    /// One more disk on a socket of its own, any number of times: `socket-path=PATH`, and
    /// `blk-file=PATH` or `null=SIZE`. `read-only=on|off`, `lock`, `cache`, `serial`,
    /// `logical-block-size`, `num-queues`, `queue-size` and `iothread` are as the options of these
    /// names, which (but for `iothread`) hold where the export does not say otherwise. A comma in a
    /// value is written twice.
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub export: Vec<String>,
    /// Refuse writes.
    #[arg(long)]
    pub read_only: bool,
    /// Whether the disk is locked, in the way of QEMU's programs, which then cannot write to it
    /// either. With `off` you make sure yourself that nobody else writes to it.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub lock: OnOff,
    /// Print what this program can do, as JSON, and exit; other options do not matter then.
    // Here for the help text alone: other options must not matter even if they are wrong, so the
    // program looks for this one before it parses them, and never gets as far as to set it.
    #[arg(long)]
    pub print_capabilities: bool,
    /// The most queues that a front-end may use. Those that it does not use cost nothing.
    #[arg(long, value_name = "N", default_value_t = QUEUES_MAX,
          value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    pub num_queues: u16,
    /// Entries of a queue that the limit on segments is meant for: a power of two from 4 to 1024.
    /// The front-end may choose any size up to 1024.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse_queue_size)]
    pub queue_size: u16,
    /// Threads that serve queues; queue I of export E is served by thread E + I modulo N.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub iothreads: u16,
    /// Serve all queues on this one of the threads, 0 to N - 1. A disk that hangs, or whose
    /// submits wait for it, then has nothing to do with exports on other threads.
    #[arg(long, value_name = "K")]
    pub iothread: Option<u16>,
    /// The longest time in microseconds, 0 to 10000, that an IoThread busy-polls before it sleeps.
    /// It does so only while that has paid lately; 0 is never.
    #[arg(long, value_name = "US", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(0..=10_000))]
    pub poll_max_us: u16,
    /// The share of an IoThread's time in percent, 1 to 100, that may go into busy-polling.
    #[arg(long, value_name = "PERCENT", default_value_t = 100,
          value_parser = clap::value_parser!(u8).range(1..=100))]
    pub poll_budget: u8,
    /// How operations reach the kernel. `auto` tries what there is and says what it chose and why.
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub engine: EngineChoice,
    /// With io_uring, let a kernel thread take submissions in: fewer system calls, and up to one
    /// more core for each IoThread. Without a CPU of its own for that thread everything is slow.
    #[arg(long)]
    pub sqpoll: bool,
    /// With io_uring and direct I/O, poll for completions of reads and writes, on devices whose
    /// drivers have queues for that. An IoThread does not sleep while it waits for them, which
    /// takes a core each. Other disks are served as without it, and the log says why.
    #[arg(long)]
    pub iopoll: bool,
    /// With io_uring, register the guest's memory, which saves the kernel work for each request.
    /// All of that memory is pinned. Only for guests without a memory balloon, free page
    /// reporting or virtio-mem: when the front-end takes pages away, data would go to the old ones.
    #[arg(long)]
    pub fixed_buffers: bool,
    /// The most memory that one front-end may share with the daemon. SIZE is as for `--disk`. What
    /// takes the place of all its memory counts beside that until it is there.
    #[arg(long, value_name = "SIZE", default_value = "16T", value_parser = parse_memory_size)]
    pub max_guest_memory: u64,
    /// The most memory that all front-ends together may share. A process has room for 128T, and
    /// needs some for itself.
    #[arg(long, value_name = "SIZE", default_value = "64T", value_parser = parse_memory_size)]
    pub max_mapped_memory: u64,
    /// Which files a front-end may share as guest memory. `sealable`: those that have seals (memfd,
    /// tmpfs, hugetlbfs) and DAX devices. `any`: those of all file systems; one that does not
    /// answer (FUSE, NFS) then stops all exports on the IoThread that touches it.
    #[arg(long, value_name = "FILES", default_value = "sealable")]
    pub memory_files: MemoryFilesChoice,
    /// Options for measurement.
    #[command(flatten)]
    pub switches: Switches,
    /// What stands between the guest and the disk, in QEMU's words. `none` and `directsync` bypass
    /// the page cache; with `none` and `writeback` the guest sees a write cache, which it flushes;
    /// with `directsync` and `writethrough` a write is on stable storage when it is answered.
    /// Default: `none`, or `writeback` where the file system has no direct I/O.
    #[arg(long, value_name = "MODE")]
    pub cache: Option<CacheMode>,
    /// Serial number that the guest sees, up to 20 bytes of ASCII. Default: one that follows
    /// from what the disk is: the file in its file system, or the block device.
    #[arg(long, value_name = "TEXT", value_parser = parse_serial)]
    pub serial: Option<String>,
    /// The smallest unit of a request in bytes: a power of two from 512 to 65536. Default: what
    /// a block device asks for, and 512 for a regular file.
    #[arg(long, value_name = "BYTES")]
    pub logical_block_size: Option<u32>,
}

/// Values of `--cache`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CacheMode {
    /// Direct I/O; the guest flushes the disk's own write cache.
    None,
    /// Direct I/O; every write is on stable storage when it is answered.
    Directsync,
    /// The page cache; the guest flushes it.
    Writeback,
    /// The page cache; every write is on stable storage when it is answered.
    Writethrough,
}

impl CacheMode {
    fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    fn has_write_cache(self) -> bool {
        matches!(self, Self::None | Self::Writeback)
    }
}

/// Values of `--memory-files`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MemoryFilesChoice {
    /// Files that cannot make an access wait.
    Sealable,
    /// All that can be mapped.
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

/// What `--print-capabilities` prints ("Backend program conventions" of the vhost-user
/// specification).
pub const CAPABILITIES: &str = r#"{
  "type": "block",
  "features": [
    "read-only",
    "blk-file"
  ]
}"#;

impl ServeArgs {
    /// The options that only engine io_uring has, and whether they are given.
    #[must_use]
    pub fn io_uring_options(&self) -> [(&'static str, bool); 3] {
        [
            ("--sqpoll", self.sqpoll),
            ("--iopoll", self.iopoll),
            ("--fixed-buffers", self.fixed_buffers),
        ]
    }

    /// How each IoThread is set up, with `engine`.
    #[must_use]
    pub fn io_thread_config(&self, engine: EngineKind) -> IoThreadConfig {
        IoThreadConfig {
            engine,
            poll_max: Duration::from_micros(u64::from(self.poll_max_us)),
            poll_budget_percent: u32::from(self.poll_budget),
            sqpoll: self.sqpoll && engine == EngineKind::IoUring,
            iopoll: self.iopoll && engine == EngineKind::IoUring,
            harvest_on_submit: self.switches.harvest_on_submit.is_on(),
            submit_max: if self.switches.submit_batch.is_on() { u32::MAX } else { 1 },
            completion_ring: self.switches.completion_ring.into(),
            ..IoThreadConfig::default()
        }
    }
}

fn check_filter(text: &str) -> Result<String, String> {
    parse_filter(text).map(|_| text.to_owned())
}

fn parse_memory_size(text: &str) -> Result<u64, String> {
    match disk::parse_size(text) {
        Ok(0) => Err("no front-end can be served without memory".to_owned()),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(error.to_string()),
    }
}

fn parse_serial(text: &str) -> Result<String, String> {
    if text.len() > SERIAL_BYTES || !text.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
        return Err(format!("a serial number is up to {SERIAL_BYTES} bytes of printable ASCII"));
    }
    Ok(text.to_owned())
}

fn parse_queue_size(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        Ok(size) if size.is_power_of_two() && (4..=1024).contains(&size) => Ok(size),
        _ => Err("a queue size is a power of two from 4 to 1024".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_json_of_a_block_back_end() {
        let value: serde_json::Value = serde_json::from_str(CAPABILITIES).unwrap();
        assert_eq!(value["type"], "block");
        assert_eq!(value["features"].as_array().map(Vec::len), Some(2));
    }
}
