//! The options, named as fio names them.

#![forbid(unsafe_code)]

pub(crate) mod engine;
pub(crate) mod fio;

use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::time::Duration;

use ringhaul_options::{EngineChoice, parse_duration, parse_size};

use crate::arrivals::RateProcess;
use crate::error::BenchError;
use crate::pattern::{BlockSplit, Rw};
use crate::quantities::{CpuList, LunAddress, LunChoice};
use engine::EngineArgs;
use fio::FioArgs;

/// The options of `ringhaul bench`.
///
/// Sizes are in bytes and take the suffixes k, m, g, t, p (powers of 1024). Times are in seconds
/// and take the suffixes us, ms, s, m, h, d.
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("target").required(true).args(["socket_path", "filename"]))]
pub struct BenchArgs {
    /// Unix socket of the vhost-user server
    #[arg(long, value_name = "PATH", conflicts_with = "filename")]
    pub socket_path: Option<PathBuf>,

    /// Drive this file or block device directly through an engine, with one IoThread for each
    /// job; no server and no virtqueue is involved
    ///
    /// It is refused if another program seems to use it, unless --lock is off. It is opened
    /// read-only if the pattern does not write.
    #[arg(long, value_name = "PATH")]
    pub filename: Option<PathBuf>,

    /// Kind of the device behind the socket
    #[arg(long, conflicts_with = "filename", value_name = "KIND", value_enum,
          default_value_t = DeviceKind::Blk)]
    pub device: DeviceKind,

    /// With --device scsi, the logical unit to drive, as TARGET:LUN or LUN, or all [default: 0:0]
    ///
    /// With all, the requests of each job go to all disks that the device reports, in turn. Each
    /// has a region of its own, set by --offset and --size.
    #[arg(long, conflicts_with = "filename", value_name = "UNIT", value_parser = LunChoice::parse)]
    pub lun: Option<LunChoice>,

    /// A known mix of I/O by name; other options change single parts of it
    ///
    /// file-server is fio's iometer-file-access-server: random, 80% reads, sizes
    /// 512/10:1k/5:2k/5:4k/60:8k/2:16k/4:32k/4:64k/10, 64 requests in flight. Sizes that the disk's
    /// logical block does not allow are rounded up to it.
    #[arg(long, value_name = "NAME", value_enum)]
    pub profile: Option<Profile>,

    /// Pattern: read, write, randread, randwrite, rw (mixed), randrw [default: read]
    ///
    /// Random offsets are drawn independently of each other (fio's norandommap) from the whole
    /// region. Sequential jobs each walk their own even share of the region, over and over.
    /// With rw, reads and writes advance separately.
    #[arg(long, alias = "readwrite", value_name = "PATTERN", value_parser = Rw::parse)]
    pub rw: Option<Rw>,

    /// Share of reads in mixed patterns, in percent (0 to 100) [default: 50]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixread: Option<u8>,

    /// Block size in bytes, or two of them as READ,WRITE [default: 4k]
    #[arg(long, alias = "blocksize", value_name = "BYTES",
          value_parser = BlockSplit::parse_sizes)]
    pub bs: Option<BlockSplit>,

    /// Mix of block sizes, SIZE/PERCENT:SIZE/PERCENT:…, instead of --bs
    ///
    /// Sizes without a percentage share the rest evenly. Two mixes with a comma between them are
    /// for reads and for writes. Offsets are multiples of the smallest size.
    #[arg(long, value_name = "MIX", value_parser = BlockSplit::parse_mix)]
    pub bssplit: Option<BlockSplit>,

    /// Requests kept in flight by each job; with --rate_iops: the most [default: 1]
    #[arg(long, value_name = "N")]
    pub iodepth: Option<NonZeroU32>,

    /// Reads and writes that each job makes in a second, regardless of the server (an open loop)
    /// [default: as many as complete]
    ///
    /// Latency is counted from the time at which a request was due, so it includes the wait for
    /// room among --iodepth requests.
    #[arg(long = "rate_iops", alias = "rate", conflicts_with = "filename", value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    pub rate_iops: Option<u32>,

    /// Distribution of the requests of --rate_iops over time
    #[arg(long = "rate_process", requires = "rate_iops", value_name = "PROCESS", value_enum,
          default_value_t = RateProcess::Linear)]
    pub rate_process: RateProcess,

    /// Number of jobs; each drives one virtqueue of its own, with --device scsi a request queue
    /// (with --filename: has an IoThread)
    #[arg(long, value_name = "N", default_value = "1")]
    pub numjobs: NonZeroU32,

    /// Measured time [default: 10 s, or no limit with --io_size or --number_ios]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub runtime: Option<Duration>,

    /// Time to run before measuring
    #[arg(long = "ramp_time", value_name = "TIME", default_value = "0",
          value_parser = parse_duration)]
    pub ramp_time: Duration,

    /// First byte of the region to use; a multiple of the logical block size
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_size)]
    pub offset: u64,

    /// Bytes in the region to use [default: up to the end of the disk]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub size: Option<u64>,

    /// End each job after this many bytes, ramp time included [default: no limit]
    #[arg(long = "io_size", value_name = "BYTES", value_parser = parse_size)]
    pub io_size: Option<u64>,

    /// End each job after this many reads and writes, ramp time included [default: no limit]
    #[arg(long = "number_ios", value_name = "N")]
    pub number_ios: Option<NonZeroU64>,

    /// Descriptors in each virtqueue; a power of two up to 32768 [default: enough for --iodepth]
    ///
    /// A request takes one descriptor for each segment of its data and two more. Most servers take
    /// at most 1024.
    #[arg(long, conflicts_with = "filename", value_name = "N")]
    pub queue_size: Option<u16>,

    /// Split the data of a request into segments (descriptors) of at most this many bytes
    /// [default: one segment]
    #[arg(long, conflicts_with = "filename", value_name = "BYTES", value_parser = parse_size)]
    pub seg_size: Option<u64>,

    /// Check data: every block carries its sector, a generation and a checksum
    ///
    /// OVERWRITES THE REGION, with --rw read and randread too: these first write all of it, in a
    /// pass that is not measured, and then check their reads. All other patterns check the blocks
    /// that this run has written, while it runs and in a read-back at the end that is not measured.
    /// No two requests in flight overlap.
    #[arg(long)]
    pub verify: bool,

    /// Flush after every N writes of a job (with --lun all: to one unit); 0 for never
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub fsync: u64,

    /// Seed of the random numbers; the same seed gives the same sequence of I/O
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub randseed: u64,

    /// CPUs that the load generator may run on, as in 0,2-3 [default: all]
    #[arg(long = "cpus_allowed", value_name = "LIST", value_parser = CpuList::parse)]
    pub cpus_allowed: Option<CpuList>,

    /// Use one thread for each job [default: one thread for all jobs]
    #[arg(long, conflicts_with = "filename")]
    pub threads: bool,

    /// Spin on the used rings instead of sleeping on the call eventfds
    #[arg(long, visible_alias = "poll", conflicts_with = "filename")]
    pub busy_poll: bool,

    /// Keep an inflight region, as QEMU does, in which the server marks its requests
    #[arg(long, conflicts_with = "filename")]
    pub inflight: bool,

    /// Use packed virtqueues instead of split ones
    #[arg(long, conflicts_with = "filename")]
    pub packed: bool,

    /// Describe each request in an indirect table, as Linux guests do, instead of in the ring
    #[arg(long, conflicts_with = "filename")]
    pub indirect: bool,

    /// Spin for this many microseconds between a call and the check of the used rings, to emulate
    /// slower machines: a sleeping guest needs this long to get the interrupt
    #[arg(long, conflicts_with_all = ["filename", "busy_poll"], value_name = "US",
          default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    pub wake_delay: u64,

    /// Process whose CPU time is counted [default: the peer of the socket]
    #[arg(long, conflicts_with = "filename", value_name = "PID")]
    pub server_pid: Option<NonZeroU32>,

    /// Fail if the server does not answer for this long
    #[arg(long, conflicts_with = "filename", value_name = "TIME",
          default_value = "30", value_parser = parse_duration)]
    pub timeout: Duration,

    /// Progress on standard error; auto shows it on a terminal only
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = Eta::Auto)]
    pub eta: Eta,

    /// Format of the result
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = OutputFormat::Normal)]
    pub output_format: OutputFormat,

    /// File to write the result to [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Options that need --filename.
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Options for compatibility with fio.
    #[command(flatten)]
    pub fio: FioArgs,
}

impl BenchArgs {
    /// Measured time when neither `--runtime` nor a number of bytes or I/Os bounds the run.
    const DEFAULT_RUNTIME: Duration = Duration::from_secs(10);

    /// Returns the time to measure; `None` if only the amount of I/O bounds the run.
    pub(crate) fn effective_runtime(&self) -> Option<Duration> {
        let bounded = self.io_size.is_some() || self.number_ios.is_some();
        self.runtime.or_else(|| (!bounded).then_some(Self::DEFAULT_RUNTIME))
    }

    /// Returns the pattern.
    pub(crate) fn pattern(&self) -> Rw {
        self.rw.unwrap_or(self.profile.map_or(Rw::Read, Profile::pattern))
    }

    /// Returns the share of reads in mixed patterns, in percent.
    pub(crate) fn percent_reads(&self) -> u8 {
        self.rwmixread.unwrap_or(self.profile.map_or(50, Profile::percent_reads))
    }

    /// Returns the choice of units of a SCSI device; `None` for virtio-blk.
    pub(crate) fn unit(&self) -> Option<LunChoice> {
        let unit = self.lun.unwrap_or(LunChoice::One(LunAddress::FIRST));
        (self.device == DeviceKind::Scsi).then_some(unit)
    }

    /// Returns the requests kept in flight by each job.
    pub(crate) fn depth(&self) -> NonZeroU32 {
        self.iodepth.unwrap_or(self.profile.map_or(NonZeroU32::MIN, Profile::depth))
    }

    /// Returns the options with `--ioengine` translated to `--engine`.
    ///
    /// # Errors
    ///
    /// If the engine for `--filename` has no counterpart here.
    pub(crate) fn with_fio_names(&self) -> Result<Self, BenchError> {
        let mut args = self.clone();
        if self.filename.is_some()
            && let Some(engine) = self.fio.engine()?
            && self.engine.engine == EngineChoice::Auto
        {
            args.engine.engine = engine;
        }
        Ok(args)
    }

    /// Returns the names of given options that change nothing.
    pub(crate) fn ignored_options(&self) -> Vec<&'static str> {
        let is_served = self.socket_path.is_some();
        let of_file = [
            ("--ioengine", self.fio.ioengine.is_some()),
            ("--direct", self.engine.direct.is_some()),
        ];
        let of_file = of_file.into_iter().filter(|(_, is_given)| *is_given && is_served);
        of_file.map(|(name, _)| name).chain(self.fio.ignored_options()).collect()
    }

    /// Returns the block sizes for a disk with logical blocks of this many bytes: from `--bssplit`
    /// if given, else from `--bs`, else from the profile.
    pub(crate) fn block_sizes(&self, logical_block_bytes: u32) -> BlockSplit {
        let given = self.bssplit.as_ref().or(self.bs.as_ref());
        match (given, self.profile) {
            (Some(sizes), _) => sizes.clone(),
            (None, Some(profile)) => profile.sizes().rounded_up(logical_block_bytes),
            (None, None) => BlockSplit::single(4096),
        }
    }
}

/// Values of `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceKind {
    /// virtio-blk: one disk.
    Blk,
    /// virtio-scsi: logical units.
    Scsi,
}

impl DeviceKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Blk => "blk",
            Self::Scsi => "scsi",
        }
    }
}

/// Values of `--profile`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Profile {
    /// The accesses of a file server, as in Iometer.
    FileServer,
}

impl Profile {
    fn pattern(self) -> Rw {
        match self {
            Self::FileServer => Rw::RandRw,
        }
    }

    fn percent_reads(self) -> u8 {
        match self {
            Self::FileServer => 80,
        }
    }

    fn depth(self) -> NonZeroU32 {
        const FILE_SERVER: NonZeroU32 = NonZeroU32::new(64).expect("it is not zero");
        match self {
            Self::FileServer => FILE_SERVER,
        }
    }

    fn sizes(self) -> BlockSplit {
        BlockSplit::from_entries(match self {
            Self::FileServer => &[
                (512, 10),
                (1 << 10, 5),
                (2 << 10, 5),
                (4 << 10, 60),
                (8 << 10, 2),
                (16 << 10, 4),
                (32 << 10, 4),
                (64 << 10, 10),
            ],
        })
    }
}

/// When to show progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Eta {
    /// When standard error is a terminal.
    Auto,
    /// Always; one line each second when standard error is not a terminal.
    Always,
    /// Never.
    Never,
}

/// The format of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OutputFormat {
    /// Text for people.
    Normal,
    /// A flat JSON object.
    // Its keys are the fields of `Report`.
    #[value(alias = "json+")]
    Json,
    /// JSON in the form of fio, for programs that draw its reports.
    FioJson,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: BenchArgs,
    }

    pub(crate) fn parse(options: &str) -> Result<BenchArgs, String> {
        parse_only(&format!("--socket-path s {options}"))
    }

    pub(crate) fn parse_only(options: &str) -> Result<BenchArgs, String> {
        let words = ["bench"].into_iter().chain(options.split_whitespace());
        Cli::try_parse_from(words).map(|cli| cli.args).map_err(|error| error.to_string())
    }

    #[test]
    fn options_need_the_right_target() {
        let good = "--filename f --engine io_uring --direct 0 --lock off --iodepth_batch 4 \
                    --poll-max-us 0 --completion-ring getevents \
                    --harvest-on-submit off --submit-batch 0";
        assert!(parse_only(good).is_ok());
        for bad in [
            "",
            "--socket-path s --filename f",
            "--socket-path s --engine aio",
            "--socket-path s --lock off",
            "--socket-path s --iodepth-batch 4",
            "--socket-path s --harvest-on-submit off",
            "--filename f --busy-poll",
            "--filename f --queue-size 128",
            "--filename f --timeout 1",
            "--filename f --threads",
            "--filename f --server-pid 1",
            "--filename f --rate_iops 1",
            "--filename f --wake-delay 1",
            "--socket-path s --poll --wake-delay 1",
            "--socket-path s --rate_process poisson",
            "--socket-path s --rate_iops 0",
            "--filename f --device scsi",
            "--filename f --lun 0",
            "--socket-path s --device nvme",
            "--socket-path s --device scsi --lun 0:0:0",
        ] {
            assert!(parse_only(bad).is_err(), "'{bad}' was taken");
        }
    }

    #[test]
    fn fio_options_are_understood() {
        let args = parse(
            "--rw=randrw --rwmixread=70 --bs=8k --iodepth=32 --numjobs=2 --runtime=500ms \
             --ramp_time=1 --size=1g --offset=1m --io_size=4m --number_ios=7 --fsync=8 \
             --randseed=5 --cpus_allowed=1 --eta=never --output-format=json --rate_iops=900 \
             --rate_process=poisson",
        )
        .unwrap();
        assert_eq!(args.rate_iops, Some(900));
        assert_eq!(args.rate_process, RateProcess::Poisson);
        assert_eq!(args.pattern(), Rw::RandRw);
        assert_eq!(args.effective_runtime(), Some(Duration::from_millis(500)));
        assert_eq!((args.size, args.offset), (Some(1 << 30), 1 << 20));
        assert_eq!(args.block_sizes(512).sizes(), vec![8192]);
        assert_eq!((args.fsync, args.randseed), (8, 5));
    }

    #[test]
    fn a_scsi_device_has_units() {
        assert_eq!(parse("").unwrap().unit(), None);
        let unit = |options: &str| parse(options).unwrap().unit().unwrap().to_string();
        assert_eq!(unit("--device=scsi"), "0:0");
        assert_eq!(unit("--device=scsi --lun=7"), "0:7");
        assert_eq!(unit("--device=scsi --lun=all"), "all");
        let message = parse_only("--filename f --device scsi").unwrap_err();
        assert!(message.contains("--device") && message.contains("--filename"), "{message}");
    }

    #[test]
    fn bssplit_takes_precedence_over_bs() {
        let args = parse("--bs=8k --bssplit=512/50:1k/50").unwrap();
        assert_eq!(args.block_sizes(512).sizes(), vec![512, 1024]);
    }

    #[test]
    fn a_profile_is_changed_by_other_options() {
        let args = parse("--profile=file-server").unwrap();
        let sizes = "512/10:1k/5:2k/5:4k/60:8k/2:16k/4:32k/4:64k/10";
        assert_eq!(args.block_sizes(512).to_string(), sizes);
        assert_eq!(args.block_sizes(4096).to_string(), "4k/80:8k/2:16k/4:32k/4:64k/10");
        assert_eq!((args.pattern(), args.percent_reads()), (Rw::RandRw, 80));
        assert_eq!(args.depth().get(), 64);
        let args = "--profile=file-server --rw=randread --rwmixread=7 --bs=512 --iodepth=16";
        let args = parse(args).unwrap();
        assert_eq!(args.block_sizes(4096).to_string(), "512");
        assert_eq!((args.pattern(), args.percent_reads()), (Rw::RandRead, 7));
        assert_eq!(args.depth().get(), 16);
    }

    #[test]
    fn a_bound_replaces_the_default_runtime() {
        assert_eq!(parse("").unwrap().effective_runtime(), Some(BenchArgs::DEFAULT_RUNTIME));
        assert_eq!(parse("--number_ios=1").unwrap().effective_runtime(), None);
        let both = parse("--number_ios=1 --runtime=2").unwrap();
        assert_eq!(both.effective_runtime(), Some(Duration::from_secs(2)));
    }

    #[test]
    fn bad_values_are_named_in_the_first_line() {
        for (options, word) in [
            ("--rw=randomread", "randomread"),
            ("--rwmixread=101", "101"),
            ("--bs=4q", "4q"),
            ("--bs=0", "0"),
            ("--profile=web", "web"),
            ("--iodepth=0", "0"),
            ("--bssplit=4k/60:8k/60", "more than 100"),
            ("--runtime=soon", "soon"),
        ] {
            let message = parse(options).unwrap_err();
            let first = message.lines().next().unwrap();
            assert!(first.contains(word), "{first}");
        }
    }

    #[test]
    fn usual_command_lines_of_fio_are_accepted() {
        let usual = "--name=x --time_based --group_reporting=1 --norandommap --randrepeat=0";
        let args = parse(&format!("{usual} --ioengine=io_uring --direct=1 --runtime=1")).unwrap();
        let expected = [
            "--ioengine",
            "--direct",
            "--time_based",
            "--group_reporting",
            "--norandommap",
            "--randrepeat",
        ];
        assert_eq!(args.ignored_options(), expected);
        assert!(parse("").unwrap().ignored_options().is_empty());
        let args = parse_only(&format!("--filename f {usual} --thread --direct=1")).unwrap();
        assert_eq!(args.ignored_options(), [&expected[2..], &["--thread"]].concat());
    }

    #[test]
    fn engines_have_fio_names_too() {
        let engine = |words: &str| {
            let args = parse_only(&format!("--filename f {words}")).unwrap().with_fio_names();
            args.map(|args| args.engine.engine).map_err(|error| error.to_string())
        };
        assert_eq!(engine("--ioengine=libaio"), Ok(EngineChoice::Aio));
        assert_eq!(engine("--ioengine=psync"), Ok(EngineChoice::Threads));
        assert_eq!(engine("--ioengine=libaio --engine=io_uring"), Ok(EngineChoice::IoUring));
        assert!(engine("--ioengine=rbd").unwrap_err().contains("--engine io_uring"));
    }
}
