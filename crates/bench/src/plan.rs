//! The options checked against the device.

#![forbid(unsafe_code)]

use std::ops::Range;

use iomem::fits;

use crate::args::{BenchArgs, DeviceKind};
use crate::arrivals::Arrivals;
use crate::error::BenchError;
use crate::pattern::{BlockSplit, Source, Sweep, Workload};
use crate::quantities::show_bytes;

/// The kind of target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetKind {
    Blk,
    Scsi,
    /// No device: a file through an engine.
    Engine,
}

impl TargetKind {
    /// The noun for a job's queues in messages, and the words before their limit.
    fn queues(self) -> (&'static str, &'static str) {
        match self {
            Self::Blk => ("virtqueues", "the server has"),
            Self::Scsi => ("request queues", "the server has"),
            Self::Engine => ("IoThreads", "the most are"),
        }
    }
}

/// The properties of the device.
#[derive(Debug, Clone)]
pub(crate) struct DeviceInfo {
    pub(crate) kind: TargetKind,
    /// The driven units, in the order of their indices.
    pub(crate) units: Vec<UnitInfo>,
    /// The most jobs.
    pub(crate) max_queues: usize,
    pub(crate) can_flush: bool,
    /// Largest segment; `None` if the device sets no limit.
    pub(crate) size_max: Option<u32>,
    /// Most segments in a request; `None` if the device sets no limit.
    pub(crate) seg_max: Option<u32>,
}

/// A disk: a logical unit of a SCSI device, or the only disk. Sizes are in bytes.
#[derive(Debug, Clone)]
pub(crate) struct UnitInfo {
    /// Its name in messages.
    pub(crate) name: String,
    pub(crate) disk_bytes: u64,
    pub(crate) logical_block_bytes: u32,
    pub(crate) read_only: bool,
}

impl DeviceInfo {
    /// The largest logical block size, a multiple of all units' sizes.
    pub(crate) fn logical_block_bytes(&self) -> u32 {
        self.units.iter().map(|unit| unit.logical_block_bytes).max().unwrap_or(512)
    }

    /// The total size of all disks.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.units.iter().fold(0, |sum, unit| sum.saturating_add(unit.disk_bytes))
    }
}

/// The number of queues to start, and their size.
#[derive(Debug, Clone)]
pub(crate) struct QueueShape {
    pub(crate) queues: usize,
    /// Descriptors in each virtqueue, a power of two; 0 without virtqueues.
    pub(crate) size: u16,
    /// Requests that each queue can have in flight.
    pub(crate) slots: usize,
    /// Bytes of data memory for each request; a multiple of the page size.
    pub(crate) slot_bytes: usize,
    /// Largest segment in bytes.
    pub(crate) segment_bytes: usize,
    /// Descriptors of a request in a virtqueue.
    pub(crate) descriptors: u32,
}

/// A run that fits the device.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) args: &'a BenchArgs,
    pub(crate) sizes: BlockSplit,
    /// Bytes of each unit to use, a whole number of blocks.
    pub(crate) regions: Vec<Range<u64>>,
    /// The largest number of bytes that divides all block sizes.
    pub(crate) block_bytes: u32,
    pub(crate) depth: u32,
    pub(crate) shape: QueueShape,
}

/// Shorthand for an error about the options.
fn refuse<T>(message: String) -> Result<T, BenchError> {
    Err(BenchError::Usage(message))
}

impl<'a> Plan<'a> {
    /// Checks the options against the device and fills in the defaults.
    pub(crate) fn new(args: &'a BenchArgs, info: &DeviceInfo) -> Result<Self, BenchError> {
        check_limits(args)?;
        check_device(args, info)?;
        check_alignment(args, info)?;
        let sizes = args.block_sizes(info.logical_block_bytes());
        let block_bytes = sizes.common_divisor();
        let regions = info.units.iter().map(|unit| find_region(args, unit, &sizes));
        let regions = regions.collect::<Result<Vec<_>, _>>()?;
        check_map_size(args, region_bytes(&regions), block_bytes)?;
        let shape = find_shape(args, info, &sizes)?;
        Ok(Self { args, sizes, regions, block_bytes, depth: args.depth().get(), shape })
    }

    /// Returns the sum of the regions of all units.
    pub(crate) fn region_bytes(&self) -> u64 {
        region_bytes(&self.regions)
    }

    /// Returns the even share of each unit's region that belongs to a job, in whole blocks.
    fn shares(&self, job: usize) -> Vec<Range<u64>> {
        let share = |region| share(region, self.block_bytes, self.shape.queues, job);
        self.regions.iter().map(share).collect()
    }

    /// Returns the I/O of a job in the measured run.
    pub(crate) fn workload(&self, job: usize) -> Source {
        let args = self.args;
        let random = args.pattern().is_random();
        let areas = if random { self.regions.clone() } else { self.shares(job) };
        Source::Workload(Workload::new(
            (args.pattern(), args.percent_reads()),
            &self.sizes,
            (areas, job),
            self.seed(job),
            (args.number_ios.map(u64::from), args.io_size),
        ))
    }

    /// Returns the start times of a job's requests, if the loop is open.
    pub(crate) fn arrivals(&self, job: usize) -> Option<Arrivals> {
        let rate = self.args.rate_iops?;
        // The inverted seed gives times that do not repeat the numbers of the offsets.
        Some(Arrivals::new(rate, self.args.rate_process, !self.seed(job)))
    }

    /// Returns a pass that writes a job's shares of the regions.
    pub(crate) fn fill(&self, job: usize) -> Source {
        Source::Sweep(Sweep::fill(self.shares(job), self.sizes.largest()))
    }

    /// Returns a pass that reads the written blocks in a job's shares of the regions.
    pub(crate) fn read_back(&self, job: usize) -> Source {
        Source::Sweep(Sweep::read_back(self.shares(job), self.sizes.largest()))
    }

    /// Returns the seed of a job, different for each.
    pub(crate) fn seed(&self, job: usize) -> u64 {
        fastrand::Rng::with_seed(
            self.args.randseed ^ (fits::<_, u64>(job, "the number of a job") << 32),
        )
        .u64(..)
    }
}

fn region_bytes(regions: &[Range<u64>]) -> u64 {
    regions.iter().fold(0, |sum, region| sum.saturating_add(region.end - region.start))
}

fn share(region: &Range<u64>, block_bytes: u32, jobs: usize, job: usize) -> Range<u64> {
    let to_u64 = |value: usize| fits::<_, u64>(value, "a number of jobs");
    let block = u64::from(block_bytes);
    let blocks = u128::from((region.end - region.start) / block);
    let border = |index: usize| {
        let before = blocks * u128::from(to_u64(index)) / u128::from(to_u64(jobs.max(1)));
        region.start + fits::<_, u64>(before, "a number of blocks") * block
    };
    border(job)..border(job + 1)
}

/// Checks the options that need no device.
pub(crate) fn check_limits(args: &BenchArgs) -> Result<(), BenchError> {
    for (name, zero) in [
        ("--runtime", args.runtime.is_some_and(|time| time.is_zero())),
        ("--timeout", args.timeout.is_zero()),
        ("--io_size", args.io_size == Some(0)),
        ("--size", args.size == Some(0)),
        ("--seg-size", args.seg_size == Some(0)),
    ] {
        if zero {
            return refuse(format!("{name} must be more than 0"));
        }
    }
    if args.lun.is_some() && args.device != DeviceKind::Scsi {
        return refuse("--lun is for SCSI devices: add --device scsi, or leave it out".to_owned());
    }
    if args.filename.is_some() { check_engine(args) } else { Ok(()) }
}

/// Checks the options of an engine.
fn check_engine(args: &BenchArgs) -> Result<(), BenchError> {
    /// Most ops of an IoThread.
    const DEPTH_LIMIT: u32 = 65_535;
    let depth = args.depth();
    if depth.get() > DEPTH_LIMIT {
        return refuse(format!("--iodepth={depth}: an IoThread has at most {DEPTH_LIMIT} ops"));
    }
    let options = args.engine.io_uring_options();
    args.engine.engine.check_io_uring_options(&options).map_err(BenchError::Usage)?;
    match args.engine.iodepth_batch {
        Some(batch) if batch > depth => refuse(format!(
            "--iodepth-batch={batch} is more than --iodepth={depth} can have in flight"
        )),
        _ => Ok(()),
    }
}

/// Checks the options against the device's abilities.
fn check_device(args: &BenchArgs, info: &DeviceInfo) -> Result<(), BenchError> {
    let jobs = args.numjobs.get();
    if fits::<_, usize>(jobs, "a number of jobs") > info.max_queues {
        let (queues, who) = info.kind.queues();
        let most = info.max_queues;
        return refuse(format!("--numjobs={jobs} needs {jobs} {queues}, but {who} {most}"));
    }
    if let Some(UnitInfo { name, .. }) = info.units.iter().find(|unit| unit.read_only) {
        let pattern = args.pattern();
        if pattern.writes() {
            return refuse(format!("--rw={pattern} needs to write, but {name} is read-only"));
        }
        if args.verify {
            return refuse(format!("--verify writes the region first, but {name} is read-only"));
        }
    }
    if args.fsync > 0 && !info.can_flush {
        return refuse("--fsync needs flushes, which the device does not offer".to_owned());
    }
    Ok(())
}

fn check_alignment(args: &BenchArgs, info: &DeviceInfo) -> Result<(), BenchError> {
    let block = u64::from(info.logical_block_bytes());
    let sizes = args
        .block_sizes(info.logical_block_bytes())
        .sizes()
        .into_iter()
        .map(|size| ("block size", size.into()));
    let limits = [("--offset", args.offset), ("--size", args.size.unwrap_or(0))];
    for (name, bytes) in sizes.chain(limits) {
        if bytes % block != 0 {
            return refuse(format!(
                "{name} {} is not a multiple of the disk's logical block size, {block} bytes",
                show_bytes(bytes)
            ));
        }
    }
    Ok(())
}

fn find_region(
    args: &BenchArgs,
    unit: &UnitInfo,
    sizes: &BlockSplit,
) -> Result<Range<u64>, BenchError> {
    let block_bytes = sizes.common_divisor();
    let disk = unit.disk_bytes;
    let start = args.offset;
    let end = match args.size {
        Some(size) => start.checked_add(size).filter(|end| *end <= disk),
        None => Some(disk).filter(|end| *end > start),
    };
    let Some(end) = end else {
        return refuse(format!(
            "the region (--offset={} --size={}) is not inside {}, which has {disk} bytes",
            show_bytes(start),
            args.size.map_or_else(|| "the rest".to_owned(), show_bytes),
            unit.name
        ));
    };
    let end = end - (end - start) % u64::from(block_bytes);
    let region = start..end;
    let jobs = fits(args.numjobs.get(), "a number of jobs");
    let parts = if args.pattern().is_random() { 1 } else { jobs };
    let smallest = (0..parts).map(|job| share(&region, block_bytes, parts, job));
    let smallest = smallest.map(|part| part.end - part.start).min().unwrap_or(0);
    let largest = sizes.largest();
    if smallest < u64::from(largest) {
        return refuse(format!(
            "the region of {} bytes in {}{} is smaller than one block of {}",
            end - start,
            unit.name,
            if parts > 1 { format!(", shared by {parts} jobs,") } else { String::new() },
            show_bytes(largest.into())
        ));
    }
    Ok(region)
}

/// Bounds the memory for the generations of `--verify`.
fn check_map_size(args: &BenchArgs, region_bytes: u64, block_bytes: u32) -> Result<(), BenchError> {
    /// The limit, 1 GiB of generations: a region of 1 TiB with blocks of 4 KiB.
    const MAX_BLOCKS: u64 = 1 << 28;
    let blocks = region_bytes / u64::from(block_bytes);
    if args.verify && blocks > MAX_BLOCKS {
        return refuse(format!(
            "--verify keeps 4 bytes in memory for each of {blocks} blocks, more than {MAX_BLOCKS}: \
             use --size, or larger blocks"
        ));
    }
    Ok(())
}

fn find_shape(
    args: &BenchArgs,
    info: &DeviceInfo,
    sizes: &BlockSplit,
) -> Result<QueueShape, BenchError> {
    /// The size that Linux and most servers use by default.
    const DEFAULT_SIZE: u16 = 128;
    /// The largest size that most servers expect or accept.
    const USUAL_LIMIT: u16 = 1024;
    const SECTOR_BYTES: u64 = 512;

    let largest = u64::from(sizes.largest());
    let size_max = info.size_max.map(u64::from);
    let segment = args.seg_size.or(size_max).unwrap_or(largest).min(largest);
    if segment % SECTOR_BYTES != 0 {
        return refuse(format!("--seg-size={segment} is not a multiple of {SECTOR_BYTES}"));
    }
    if let Some(limit) = size_max.filter(|limit| segment > *limit) {
        return refuse(format!("--seg-size={segment} is more than the device takes, {limit}"));
    }
    let segments = largest.div_ceil(segment);
    if let Some(limit) = info.seg_max.filter(|limit| segments > u64::from(*limit)) {
        return refuse(format!(
            "a block of {} in segments of {} takes {segments} segments, but the device takes \
             {limit}: use a larger --seg-size",
            show_bytes(largest),
            show_bytes(segment)
        ));
    }
    let page = rustix::param::page_size();
    let to_usize = |value: u64| fits(value, "a number of jobs");
    let shape = QueueShape {
        queues: to_usize(args.numjobs.get().into()),
        size: 0,
        slots: to_usize(args.depth().get().into()),
        slot_bytes: to_usize(largest).next_multiple_of(page),
        segment_bytes: to_usize(segment),
        descriptors: fits(segments + 2, "the descriptors of a request"),
    };
    if info.kind == TargetKind::Engine {
        return Ok(shape);
    }
    // An indirect table takes one descriptor of the ring, and may be as long as the ring.
    let in_ring = if args.indirect { 1 } else { shape.descriptors };
    let in_rings = u64::from(in_ring) * u64::from(args.depth().get());
    let needed = in_rings.max(shape.descriptors.into());
    let most = u64::from(args.queue_size.unwrap_or(USUAL_LIMIT));
    if needed > most {
        return refuse(format!(
            "--iodepth={} needs {needed} descriptors, {in_ring} for each request, but the queue \
             has {most}: use a lower --iodepth or a larger --queue-size, if the server takes it",
            args.depth(),
        ));
    }
    let size = match args.queue_size {
        Some(size) => size,
        None => u16::try_from(needed).map_or(USUAL_LIMIT, u16::next_power_of_two).max(DEFAULT_SIZE),
    };
    if !size.is_power_of_two() || size > 1 << 15 {
        return refuse(format!("--queue-size={size} is not a power of two up to 32768"));
    }
    Ok(QueueShape { size, ..shape })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::{parse, parse_only};

    fn info() -> DeviceInfo {
        DeviceInfo {
            kind: TargetKind::Blk,
            units: vec![unit()],
            max_queues: 2,
            can_flush: true,
            size_max: None,
            seg_max: Some(126),
        }
    }

    fn unit() -> UnitInfo {
        UnitInfo {
            name: "the disk".to_owned(),
            disk_bytes: 64 << 20,
            logical_block_bytes: 512,
            read_only: false,
        }
    }

    fn refusal(options: &str, info: &DeviceInfo) -> String {
        let args = parse(options).unwrap();
        let error = Plan::new(&args, info).unwrap_err();
        assert!(matches!(error, BenchError::Usage(_)));
        let text = error.to_string();
        assert!(!text.contains('\n'), "{text}");
        text
    }

    #[test]
    fn options_beyond_the_device_are_refused() {
        for (options, word) in [
            ("--numjobs=3", "has 2"),
            ("--bs=1000", "logical block size"),
            ("--bssplit=4k/50:513/50", "513"),
            ("--offset=100", "--offset"),
            ("--size=65m", "not inside the disk"),
            ("--offset=64m", "not inside the disk"),
            ("--offset=63m --size=2m", "not inside the disk"),
            ("--offset=16383p --size=16383p", "not inside the disk"),
            ("--size=4k --bs=8k", "smaller than one block"),
            ("--size=8k --bs=8k --numjobs=2", "smaller than one block"),
            ("--iodepth=342", "1026 descriptors"),
            ("--indirect --iodepth=1025", "1025 descriptors"),
            ("--queue-size=100", "power of two"),
            ("--queue-size=128 --iodepth=64", "192 descriptors"),
            ("--seg-size=1000 --bs=4k", "multiple of 512"),
            ("--seg-size=512 --bs=128k", "256 segments"),
            ("--runtime=0", "--runtime"),
            ("--timeout=0", "--timeout"),
        ] {
            let text = refusal(options, &info());
            assert!(text.contains(word), "{options}: {text}");
        }
    }

    #[test]
    fn a_read_only_disk_is_not_written() {
        let units = vec![UnitInfo { read_only: true, ..unit() }];
        let info = DeviceInfo { units, ..info() };
        assert!(refusal("--rw=randrw", &info).contains("read-only"));
        assert!(refusal("--rw=read --verify", &info).contains("read-only"));
        assert!(Plan::new(&parse("--rw=read").unwrap(), &info).is_ok());
    }

    #[test]
    fn flushes_and_segment_sizes_follow_the_device() {
        let info = DeviceInfo { can_flush: false, size_max: Some(4096), ..info() };
        assert!(refusal("--rw=write --fsync=1", &info).contains("flushes"));
        assert!(refusal("--bs=64k --seg-size=8k", &info).contains("4096"));
        let args = parse("--bs=64k --iodepth=4").unwrap();
        assert_eq!(Plan::new(&args, &info).unwrap().shape.segment_bytes, 4096);
    }

    #[test]
    fn a_4k_disk_refuses_512() {
        let units = vec![unit(), UnitInfo { logical_block_bytes: 4096, ..unit() }];
        let info = DeviceInfo { units, ..info() };
        assert!(refusal("--bs=512", &info).contains("4096 bytes"));
    }

    #[test]
    fn every_unit_has_a_region_of_its_own() {
        let small = UnitInfo { name: "unit 0:1".to_owned(), disk_bytes: 1 << 20, ..unit() };
        let units = vec![unit(), small.clone()];
        let info = DeviceInfo { kind: TargetKind::Scsi, units, ..info() };
        let args = parse("--rw=write --offset=64k --numjobs=2").unwrap();
        let plan = Plan::new(&args, &info).unwrap();
        assert_eq!(plan.regions, [64 << 10..64 << 20, 64 << 10..1 << 20]);
        assert_eq!(plan.region_bytes(), (65 << 20) - (128 << 10));
        let half = (64 << 10) + (960 << 10) / 2;
        assert_eq!(plan.shares(0)[1], 64 << 10..half);
        assert_eq!(plan.shares(1)[1], half..1 << 20);
        assert!(refusal("--size=2m", &info).contains("inside unit 0:1, which has 1048576 bytes"));
        assert!(refusal("--numjobs=3", &info).contains("3 request queues"));
        let units = vec![unit(), UnitInfo { read_only: true, ..small }];
        let info = DeviceInfo { units, ..info };
        assert!(refusal("--rw=write", &info).contains("unit 0:1 is read-only"));
    }

    #[test]
    fn units_are_for_scsi() {
        let args = parse("--lun=0:1").unwrap();
        assert!(check_limits(&args).unwrap_err().to_string().contains("--device scsi"));
        for lun in ["0:1", "1", "all"] {
            let args = parse(&format!("--device=scsi --lun={lun}")).unwrap();
            assert!(check_limits(&args).is_ok());
        }
    }

    #[test]
    fn queue_sizes_follow_the_depth() {
        let size = |options: &str| Plan::new(&parse(options).unwrap(), &info()).unwrap().shape.size;
        assert_eq!(size("--iodepth=1"), 128);
        assert_eq!(size("--iodepth=64"), 256);
        assert_eq!(size("--iodepth=341"), 1024);
        // An indirect table takes one descriptor, and is not longer than the ring.
        assert_eq!(size("--iodepth=256 --indirect"), 256);
        let large = "--iodepth=2 --bs=1m --seg-size=16k";
        assert_eq!((size(large), size(&format!("{large} --indirect"))), (256, 128));
        assert_eq!(size("--iodepth=64 --queue-size=1024"), 1024);
        assert_eq!(size("--bs=32k --seg-size=4k --iodepth=64"), 1024);
    }

    #[test]
    fn an_engine_has_no_limit_of_descriptors() {
        let info = DeviceInfo { kind: TargetKind::Engine, max_queues: 256, ..info() };
        let args = parse("--iodepth=1000 --numjobs=3").unwrap();
        assert_eq!(Plan::new(&args, &info).unwrap().shape.slots, 1000);
        assert!(refusal("--numjobs=257", &info).contains("IoThreads"));
        for (options, word) in
            [("--iodepth=70000", "65535"), ("--iodepth=4 --iodepth-batch=5", "--iodepth-batch=5")]
        {
            let args = parse_only(&format!("--filename=f {options}")).unwrap();
            assert!(check_limits(&args).unwrap_err().to_string().contains(word));
        }
    }

    #[test]
    fn shares_cover_the_region_in_whole_blocks() {
        let region = 4096..4096 + 7 * 1024;
        let shares: Vec<_> = (0..3).map(|job| share(&region, 1024, 3, job)).collect();
        assert_eq!(shares, [4096..6144, 6144..8192, 8192..11_264]);
    }

    #[test]
    fn jobs_have_different_seeds() {
        let args = parse("--rw=randread").unwrap();
        let plan = Plan::new(&args, &info()).unwrap();
        assert_ne!(plan.seed(0), plan.seed(1));
        assert_eq!(plan.seed(1), plan.seed(1));
    }
}
