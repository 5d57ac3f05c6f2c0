//! The choice of the next I/O: patterns, mixes of block sizes, sweeps over a region.

#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;

use iomem::fits;
use ringhaul_options::parse_size;

use crate::quantities::show_bytes;
use crate::verify::BlockMap;

/// A pattern of `--rw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rw {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Reads at random offsets.
    RandRead,
    /// Writes at random offsets.
    RandWrite,
    /// Sequential reads and writes mixed.
    Rw,
    /// Reads and writes at random offsets mixed.
    RandRw,
}

impl Rw {
    const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::RandRead, Self::RandWrite, Self::Rw, Self::RandRw];

    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wanted = if text == "readwrite" { "rw" } else { text };
        Self::ALL.into_iter().find(|rw| rw.name() == wanted).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("unknown pattern '{text}': use one of {names}")
        })
    }

    /// Returns the name as fio spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::RandRead => "randread",
            Self::RandWrite => "randwrite",
            Self::Rw => "rw",
            Self::RandRw => "randrw",
        }
    }

    /// Returns true if offsets are random.
    pub(crate) const fn is_random(self) -> bool {
        matches!(self, Self::RandRead | Self::RandWrite | Self::RandRw)
    }

    /// Returns true if the pattern reads and writes.
    pub(crate) const fn is_mixed(self) -> bool {
        matches!(self, Self::Rw | Self::RandRw)
    }

    /// Returns true if the pattern has writes.
    pub const fn writes(self) -> bool {
        !matches!(self, Self::Read | Self::RandRead)
    }
}

impl fmt::Display for Rw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Read,
    Write,
    Flush,
}

impl Op {
    pub(crate) const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Flush];

    /// Position in tables that have one entry for each operation.
    pub(crate) const fn index(self) -> usize {
        self as usize
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
        }
    }
}

/// A request to make. `offset` and `len` are in bytes and 0 for a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Io {
    pub(crate) op: Op,
    /// The index of its unit in the run.
    pub(crate) unit: u16,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

/// Block sizes of reads and of writes, each a single size or a mix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSplit {
    read: Mix,
    write: Mix,
}

/// Sizes in bytes, each with the running sum of percentages up to its own.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mix(Vec<(u32, u8)>);

impl BlockSplit {
    /// Parses `--bs`: one size, or one for reads and one for writes, separated by a comma.
    pub(crate) fn parse_sizes(text: &str) -> Result<Self, String> {
        Self::parse_pair(text, |size| Ok(Mix(vec![(parse_block_size(size)?, 100)])))
    }

    /// Parses `--bssplit`.
    pub(crate) fn parse_mix(text: &str) -> Result<Self, String> {
        Self::parse_pair(text, Mix::parse)
    }

    /// A single size for reads and writes.
    pub(crate) fn single(bytes: u32) -> Self {
        Self::from_entries(&[(bytes, 100)])
    }

    /// A mix for reads and writes: sizes in bytes, with percentages that add up to 100.
    pub(crate) fn from_entries(entries: &[(u32, u8)]) -> Self {
        let entries: Vec<_> =
            entries.iter().map(|(size, percent)| (*size, Some(*percent))).collect();
        let mix = Mix::accumulate(&entries, 0, 0);
        Self { read: mix.clone(), write: mix }
    }

    /// Returns the mix with each size rounded up to a multiple of `block_bytes`.
    pub(crate) fn rounded_up(&self, block_bytes: u32) -> Self {
        let [read, write] = [&self.read, &self.write].map(|mix| mix.rounded_up(block_bytes));
        Self { read, write }
    }

    fn parse_pair(text: &str, parse: fn(&str) -> Result<Mix, String>) -> Result<Self, String> {
        let (read, write) = text.split_once(',').unwrap_or((text, text));
        Ok(Self { read: parse(read)?, write: parse(write)? })
    }

    fn mix(&self, op: Op) -> &Mix {
        if op == Op::Read { &self.read } else { &self.write }
    }

    /// Returns the distinct sizes in bytes in ascending order.
    pub(crate) fn sizes(&self) -> Vec<u32> {
        let mut sizes: Vec<_> =
            self.read.0.iter().chain(&self.write.0).map(|(size, _)| *size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Returns the largest size in bytes.
    pub(crate) fn largest(&self) -> u32 {
        self.sizes().last().copied().unwrap_or(0)
    }

    /// Returns the largest number of bytes that divides all sizes.
    pub(crate) fn common_divisor(&self) -> u32 {
        self.sizes().into_iter().fold(0, |mut a, mut b| {
            while b != 0 {
                (a, b) = (b, a % b);
            }
            a
        })
    }
}

impl fmt::Display for BlockSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.read)?;
        if self.read == self.write { Ok(()) } else { write!(f, ",{}", self.write) }
    }
}

impl Mix {
    fn parse(text: &str) -> Result<Self, String> {
        let mut entries = Vec::new();
        for part in text.split(':') {
            let (size, percent) = part.split_once('/').unwrap_or((part, ""));
            let percent = match percent.trim_end_matches('%') {
                "" => None,
                number => Some(
                    number
                        .parse::<u8>()
                        .ok()
                        .filter(|percent| *percent <= 100)
                        .ok_or_else(|| format!("'{part}': the percentage must be 0 to 100"))?,
                ),
            };
            entries.push((parse_block_size(size)?, percent));
        }
        let given: u32 = entries.iter().filter_map(|(_, percent)| *percent).map(u32::from).sum();
        let open = entries.iter().filter(|(_, percent)| percent.is_none()).count();
        let left = 100_u32
            .checked_sub(given)
            .ok_or_else(|| format!("the percentages of '{text}' add up to more than 100"))?;
        if open == 0 && left > 0 {
            return Err(format!("the percentages of '{text}' add up to {given}, not 100"));
        }
        Ok(Self::accumulate(&entries, left, open))
    }

    /// Turns percentages into running sums, spreading `left` over the `open` entries.
    fn accumulate(entries: &[(u32, Option<u8>)], left: u32, open: usize) -> Self {
        let open = fits::<_, u32>(open, "a count of sizes");
        let (mut sum, mut opened) = (0, 0);
        let sums = entries.iter().map(|(size, percent)| {
            sum += match percent {
                Some(percent) => u32::from(*percent),
                None => {
                    opened += 1;
                    left * opened / open - left * (opened - 1) / open
                }
            };
            (*size, fits(sum, "a sum of percentages"))
        });
        Self(sums.collect())
    }

    fn rounded_up(&self, block_bytes: u32) -> Self {
        let mut entries: Vec<(u32, u8)> = Vec::new();
        for (size, sum) in &self.0 {
            let size = size.next_multiple_of(block_bytes);
            match entries.last_mut() {
                Some(last) if last.0 == size => last.1 = *sum,
                _ => entries.push((size, *sum)),
            }
        }
        Self(entries)
    }

    fn draw(&self, rng: &mut fastrand::Rng) -> u32 {
        if let [(size, _)] = self.0[..] {
            return size;
        }
        let point = rng.u8(0..100);
        self.0.iter().find(|(_, sum)| point < *sum).map_or(self.0[0].0, |(size, _)| *size)
    }

    fn smallest(&self) -> u32 {
        self.0.iter().map(|(size, _)| *size).min().unwrap_or(1)
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [(size, _)] = self.0[..] {
            return f.write_str(&show_bytes(size.into()));
        }
        let mut before = 0;
        for (index, (size, sum)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ":" };
            write!(f, "{separator}{}/{}", show_bytes((*size).into()), sum - before)?;
            before = *sum;
        }
        Ok(())
    }
}

fn parse_block_size(text: &str) -> Result<u32, String> {
    match u32::try_from(parse_size(text)?) {
        Ok(0) => Err(format!("'{text}': a block size cannot be 0")),
        Ok(size) => Ok(size),
        Err(_) => Err(format!("'{text}': a block size must be less than 4g")),
    }
}

/// The source of a job's I/O.
#[derive(Debug)]
pub(crate) enum Source {
    Workload(Workload),
    Sweep(Sweep),
}

impl Source {
    /// Returns the next I/O, or `None` at the end. The I/O counts only once it is
    /// [accepted](Self::accept). A random workload proposes a different I/O each time. `maps` has
    /// one map for each unit.
    pub(crate) fn propose(&mut self, maps: Option<&[BlockMap]>) -> Option<Io> {
        match self {
            Self::Workload(workload) => workload.propose(),
            Self::Sweep(sweep) => sweep.propose(maps),
        }
    }

    /// Records that a proposed I/O is being made.
    pub(crate) fn accept(&mut self, io: &Io) {
        match self {
            Self::Workload(workload) => workload.accept(io),
            Self::Sweep(sweep) => sweep.accept(io),
        }
    }

    /// Returns true if a bound is reached, as far as that is known without a proposal.
    pub(crate) fn is_done(&self) -> bool {
        matches!(self, Self::Workload(workload) if workload.is_done())
    }

    /// Returns the number of proposals worth a try while blocks are claimed.
    pub(crate) fn attempts(&self) -> u32 {
        const RANDOM_ATTEMPTS: u32 = 8;
        match self {
            Self::Workload(workload) if workload.rw.is_random() => RANDOM_ATTEMPTS,
            _ => 1,
        }
    }
}

/// A pattern that continues until it reaches its bounds, if it has any.
#[derive(Debug)]
pub(crate) struct Workload {
    rw: Rw,
    percent_reads: u8,
    sizes: BlockSplit,
    /// Indexed by unit.
    areas: Box<[Area]>,
    /// The unit of the next I/O.
    unit: usize,
    rng: fastrand::Rng,
    ios_left: u64,
    bytes_left: u64,
}

/// The part of a unit that a job uses.
#[derive(Debug)]
struct Area {
    bytes: Range<u64>,
    /// The next offset of sequential reads and of writes.
    next: [u64; 2],
}

impl Workload {
    /// Rotates over the units, with one area of each, starting at unit `first`. Each area must hold
    /// the largest block. Bounds of `None` mean no limit.
    pub(crate) fn new(
        (rw, percent_reads): (Rw, u8),
        sizes: &BlockSplit,
        (areas, first): (impl IntoIterator<Item = Range<u64>>, usize),
        seed: u64,
        (ios, bytes): (Option<u64>, Option<u64>),
    ) -> Self {
        let areas = areas.into_iter().map(|bytes| Area { next: [bytes.start; 2], bytes });
        let areas: Box<[_]> = areas.collect();
        Self {
            rw,
            percent_reads,
            sizes: sizes.clone(),
            unit: first % areas.len().max(1),
            areas,
            rng: fastrand::Rng::with_seed(seed),
            ios_left: ios.unwrap_or(u64::MAX),
            bytes_left: bytes.unwrap_or(u64::MAX),
        }
    }

    fn propose(&mut self) -> Option<Io> {
        if self.is_done() {
            return None;
        }
        let op = match self.rw {
            Rw::Read | Rw::RandRead => Op::Read,
            Rw::Write | Rw::RandWrite => Op::Write,
            Rw::Rw | Rw::RandRw if self.rng.u8(0..100) < self.percent_reads => Op::Read,
            Rw::Rw | Rw::RandRw => Op::Write,
        };
        let mix = self.sizes.mix(op);
        let len = mix.draw(&mut self.rng);
        let Area { bytes, next } = self.areas.get(self.unit)?;
        let last = bytes.end.checked_sub(u64::from(len))?;
        let offset = if self.rw.is_random() {
            let align = u64::from(mix.smallest());
            bytes.start + self.rng.u64(0..=(last - bytes.start) / align) * align
        } else {
            let next = next[op.index()];
            if next <= last { next } else { bytes.start }
        };
        Some(Io { op, unit: unit_index(self.unit), offset, len })
    }

    fn is_done(&self) -> bool {
        self.ios_left == 0 || self.bytes_left == 0
    }

    fn accept(&mut self, io: &Io) {
        let unit = usize::from(io.unit);
        self.areas[unit].next[io.op.index()] = io.offset + u64::from(io.len);
        self.unit = if unit + 1 < self.areas.len() { unit + 1 } else { 0 };
        self.ios_left -= 1;
        self.bytes_left = self.bytes_left.saturating_sub(io.len.into());
    }
}

/// A pass over an area of each unit, front to back, unit by unit.
#[derive(Debug)]
pub(crate) struct Sweep {
    op: Op,
    /// The rest of each unit's area, indexed by unit.
    areas: Box<[Range<u64>]>,
    unit: usize,
    len: u32,
    only_written: bool,
}

impl Sweep {
    /// Writes all of the areas, in blocks of `len` bytes and a shorter last one.
    pub(crate) fn fill(areas: impl IntoIterator<Item = Range<u64>>, len: u32) -> Self {
        let areas = areas.into_iter().collect();
        Self { op: Op::Write, areas, unit: 0, len, only_written: false }
    }

    /// Reads the written blocks of the areas, in blocks of `len` bytes and a shorter last one.
    pub(crate) fn read_back(areas: impl IntoIterator<Item = Range<u64>>, len: u32) -> Self {
        Self { op: Op::Read, only_written: true, ..Self::fill(areas, len) }
    }

    fn propose(&mut self, maps: Option<&[BlockMap]>) -> Option<Io> {
        while let Some(area) = self.areas.get_mut(self.unit) {
            if self.only_written {
                let map = maps?.get(self.unit)?;
                area.start = map.next_written(area.clone()).unwrap_or(area.end);
            }
            if area.is_empty() {
                self.unit += 1;
                continue;
            }
            let left = u32::try_from(area.end - area.start);
            let len = left.map_or(self.len, |left| left.min(self.len));
            return Some(Io { op: self.op, unit: unit_index(self.unit), offset: area.start, len });
        }
        None
    }

    fn accept(&mut self, io: &Io) {
        self.areas[usize::from(io.unit)].start = io.offset + u64::from(io.len);
    }
}

#[inline]
fn unit_index(unit: usize) -> u16 {
    fits(unit, "the number of a unit")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn workload(rw: Rw, sizes: &str, area: Range<u64>) -> Source {
        let sizes = BlockSplit::parse_mix(sizes).unwrap();
        Source::Workload(Workload::new((rw, 30), &sizes, ([area], 0), 7, (None, None)))
    }

    fn take(source: &mut Source, count: usize) -> Vec<Io> {
        let mut ios = Vec::new();
        while ios.len() < count
            && let Some(io) = source.propose(None)
        {
            source.accept(&io);
            ios.push(io);
        }
        ios
    }

    #[test]
    fn bssplit_follows_fio() {
        let split = BlockSplit::parse_mix("512/10:1k/5:4k/85").unwrap();
        assert_eq!(split.read.0, vec![(512, 10), (1024, 15), (4096, 100)]);
        let open = BlockSplit::parse_mix("4k/10:64k/:32k").unwrap();
        assert_eq!(open.read.0, vec![(4096, 10), (65536, 55), (32768, 100)]);
        assert_eq!(open.to_string(), "4k/10:64k/45:32k/45");
        let pair = BlockSplit::parse_mix("2k/100,4k/50:8k/50").unwrap();
        assert_eq!((pair.sizes(), pair.largest()), (vec![2048, 4096, 8192], 8192));
        assert_eq!(BlockSplit::parse_mix("3k/50:4k/50").unwrap().common_divisor(), 1024);
    }

    #[test]
    fn bad_bssplit_is_refused() {
        for text in ["", "4k/50", "4k/101", "4k/60:8k/60", "4k/x", "0/100", "4k/50:8q/50", "8g"] {
            assert!(BlockSplit::parse_mix(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_mix_is_drawn_in_its_proportions() {
        let ios = take(&mut workload(Rw::RandRead, "512/10:4k/90", 0..1 << 20), 10_000);
        let small = ios.iter().filter(|io| io.len == 512).count();
        assert!((800..1200).contains(&small), "{small}");
    }

    #[test]
    fn mixed_patterns_follow_rwmixread() {
        let ios = take(&mut workload(Rw::RandRw, "4k", 0..1 << 20), 10_000);
        let reads = ios.iter().filter(|io| io.op == Op::Read).count();
        assert!((2700..3300).contains(&reads), "{reads}");
    }

    #[test]
    fn sequential_wraps_at_the_end_of_the_area() {
        let ios = take(&mut workload(Rw::Write, "4k", 8192..20480), 5);
        let offsets: Vec<_> = ios.iter().map(|io| io.offset).collect();
        assert_eq!(offsets, [8192, 12288, 16384, 8192, 12288]);
    }

    #[test]
    fn random_reaches_the_last_block_and_repeats_with_its_seed() {
        let ios = take(&mut workload(Rw::RandRead, "4k", 4096..36864), 1000);
        assert_eq!(ios, take(&mut workload(Rw::RandRead, "4k", 4096..36864), 1000));
        let blocks: std::collections::BTreeSet<_> = ios.iter().map(|io| io.offset).collect();
        assert_eq!(
            blocks.into_iter().collect::<Vec<_>>(),
            (1..9).map(|i| i * 4096).collect::<Vec<_>>()
        );
    }

    #[test]
    fn bounds_end_a_workload() {
        let sizes = BlockSplit::parse_sizes("4k").unwrap();
        let bounded = |bounds| {
            let areas = std::iter::once(0..1 << 20);
            let workload = Workload::new((Rw::Read, 0), &sizes, (areas, 0), 0, bounds);
            take(&mut Source::Workload(workload), 100).len()
        };
        assert_eq!(bounded((Some(5), None)), 5);
        assert_eq!(bounded((None, Some(8192))), 2);
        assert_eq!(bounded((None, Some(8193))), 3);
        assert_eq!(bounded((None, None)), 100);
    }

    #[test]
    fn a_sweep_covers_its_area_once() {
        let area = std::iter::once(512..10_752);
        let ios = take(&mut Source::Sweep(Sweep::fill(area, 4096)), 100);
        let covered: Vec<_> = ios.iter().map(|io| (io.offset, io.len)).collect();
        assert_eq!(covered, [(512, 4096), (4608, 4096), (8704, 2048)]);
    }

    #[test]
    fn units_take_turns_and_keep_their_positions() {
        let sizes = BlockSplit::parse_sizes("4k").unwrap();
        let areas = [0..1 << 20, 8192..16384, 4096..1 << 20];
        let workload = Workload::new((Rw::Read, 0), &sizes, (areas, 4), 0, (None, None));
        let ios = take(&mut Source::Workload(workload), 9);
        let places: Vec<_> = ios.iter().map(|io| (io.unit, io.offset)).collect();
        let expected = [(1, 8192), (2, 4096), (0, 0), (1, 12288), (2, 8192), (0, 4096)];
        assert_eq!(places[..6], expected);
        assert_eq!(places[6..], [(1, 8192), (2, 12288), (0, 8192)]);
    }

    #[test]
    fn a_sweep_covers_each_unit() {
        let ios = take(&mut Source::Sweep(Sweep::fill([0..4096, 0..0, 512..6144], 4096)), 100);
        let covered: Vec<_> = ios.iter().map(|io| (io.unit, io.offset, io.len)).collect();
        assert_eq!(covered, [(0, 0, 4096), (2, 512, 4096), (2, 4608, 1536)]);
    }

    proptest! {
        #[test]
        fn every_io_stays_in_its_area_and_aligned(
            random in any::<bool>(),
            start in 0_u64..8,
            blocks in 8_u64..64,
        ) {
            let area = start * 512..(start + blocks) * 512;
            let rw = if random { Rw::RandRw } else { Rw::Rw };
            for io in take(&mut workload(rw, "512/30:1k/30:4k", area.clone()), 200) {
                prop_assert!(io.offset >= area.start);
                prop_assert!(io.offset + u64::from(io.len) <= area.end);
                prop_assert_eq!(io.offset % 512, 0);
            }
        }
    }
}
