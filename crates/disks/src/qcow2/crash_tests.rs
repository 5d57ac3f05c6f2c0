//! Images after a power cut, or after a kill of the daemon: QEMU finds no fault except leaked
//! clusters, and flushed data is there. The next opening finds these clusters, and the first write
//! frees them.

mod first_writes;
mod fua;
mod kinds;
mod streams;
mod zeroes;

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::ops::Range;
use std::process::{Command, Stdio};

use blockio::testing::{Event, RemoteStub};
use blockio::{Disk, DiskOptions, DiskSource, IoThread, IoThreadConfig};
use futures_util::future::{LocalBoxFuture, join_all};
use iomem::Buffers;
use tempfile::TempDir;

use super::core::Layer;
use crate::qcow2::consistency::mark;
use crate::qcow2::consistency::write_order::Roots;
use kinds::{Below, KINDS, Kind};

const MIB: u64 = 1 << 20;
const SECTOR: usize = 512;
/// The number of power cuts of each image.
const CUTS: u64 = 12;

/// The content of a sector: a number that fills it, or 0 for zeroes.
type Version = u64;
/// The version of the data below the image.
const BELOW: Version = 1;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % end
    }
}

/// The versions that each sector may have.
#[derive(Clone)]
struct Expected(Vec<Vec<Version>>);

impl Expected {
    fn add(&mut self, sectors: &Range<u64>, version: Version) {
        for sector in sectors.clone() {
            self.0[usize::try_from(sector).unwrap()].push(version);
        }
    }

    fn set(&mut self, sectors: &Range<u64>, version: Version) {
        for sector in sectors.clone() {
            self.0[usize::try_from(sector).unwrap()] = vec![version];
        }
    }
}

/// A moment at which requests have ended: the number of events, and the versions that sectors may
/// have after a power cut if no later flush counts.
struct Moment {
    events: usize,
    flushed: Expected,
}

struct World {
    folder: TempDir,
    thread: IoThread,
    file: RemoteStub,
    /// The content of the file at the beginning.
    content: Vec<u8>,
    image: DiskSource,
    below: bool,
    /// True if the image is marked while it is in use.
    is_marked: bool,
    may_fail: bool,
    random: Random,
    /// The number of checked files with leaked clusters.
    leaks: usize,
    last: Version,
    now: Expected,
    moments: Vec<Moment>,
    /// Answered writes after some of the rounds. A kill leaves them in the file.
    answered: Vec<Moment>,
}

/// Makes sectors of a version, which can hardly be compressed. Version 0 is zeroes.
fn filled(version: Version, sectors: u64) -> Vec<u8> {
    let mut random = Random(version);
    let mut words = vec![version; SECTOR / 8];
    words[1..].fill_with(|| if version == 0 { 0 } else { random.below(u64::MAX) });
    let sector: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    sector.repeat(usize::try_from(sectors).unwrap())
}

fn qemu_img(arguments: &[&str]) {
    let output = Command::new("qemu-img").args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
}

fn open(folder: &TempDir, file: &RemoteStub, below: bool) -> DiskSource {
    let mut layers = vec![Layer::qcow2(file.clone().source()).unwrap()];
    if below {
        let options = DiskOptions { read_only: true, ..DiskOptions::default() };
        let base = DiskSource::file(&folder.path().join("base"), &options).unwrap();
        layers.push(Layer::raw(base));
    }
    crate::qcow2::open(layers, false).unwrap()
}

impl World {
    fn new(kind: &Kind, is_held: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let sectors = kind.bytes / SECTOR as u64;
        let [image, base, compressed] = ["image", "base", "compressed"].map(path);
        let mut create = vec!["create", "-q", "-f", "qcow2", "-o", kind.options];
        let size = kind.bytes.to_string();
        std::fs::write(&base, filled(BELOW, sectors)).unwrap();
        match kind.below {
            Below::Nothing => create.extend([&*image, &size]),
            Below::Raw => create.extend(["-b", &base, "-F", "raw", &image, &size]),
            Below::Compressed => create.extend([&*compressed, &size]),
        }
        qemu_img(&create);
        if let Below::Compressed = kind.below {
            let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", kind.options];
            qemu_img(&[&convert[..], &[&*base, &*image]].concat());
        }
        let mut content = std::fs::read(&image).unwrap();
        content.resize(content.len().next_multiple_of(4096), 0);
        let file = if is_held { RemoteStub::exclusive } else { RemoteStub::new }(&content);
        let below = matches!(kind.below, Below::Raw);
        let first = if let Below::Nothing = kind.below { 0 } else { BELOW };
        let now = Expected(vec![vec![first]; usize::try_from(sectors).unwrap()]);
        let moments = vec![Moment { events: 0, flushed: now.clone() }];
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let image = open(&folder, &file, below);
        Self {
            folder,
            thread,
            file,
            content,
            image,
            below,
            is_marked: is_held && !kind.options.contains("compat=0.10"),
            may_fail: false,
            random: Random(kind.bytes),
            leaks: 0,
            last: BELOW,
            now,
            moments,
            answered: Vec::new(),
        }
    }

    /// Makes some requests at once, each with sectors of its own, and then sometimes a flush.
    fn run(&mut self, rounds: u64) {
        let disk = self.image.attach(self.thread.io());
        let (io_thread, size) = (&self.thread, disk.info().size_bytes / SECTOR as u64);
        for _ in 0..rounds {
            let mut requests: Vec<LocalBoxFuture<'_, (Change, io::Result<()>)>> = Vec::new();
            let part = size / 8;
            for index in 0..8 {
                let sectors = 1 + self.random.below(part.min(40));
                let first = index * part + self.random.below(part - sectors + 1);
                let sectors = first..first + sectors;
                self.last += 1;
                let version = match self.random.below(8) {
                    0..6 => self.last,
                    _ => 0,
                };
                // The change may be there or not, until it is flushed and nothing else was written
                // since.
                let is_discard = version == 0 && self.random.below(2) == 0;
                self.moments.last_mut().unwrap().flushed.add(&sectors, version);
                let change = Change { sectors, version, is_discard };
                let disk = &disk;
                requests.push(Box::pin(async move {
                    let result = change.make(disk).await;
                    (change, result)
                }));
            }
            let results = io_thread.block_on(join_all(requests)).unwrap();
            for (Change { sectors, version, is_discard }, result) in results {
                assert!(self.may_fail || result.is_ok(), "{sectors:?}: {result:?}");
                match is_discard || result.is_err() {
                    true => self.now.add(&sectors, version),
                    false => self.now.set(&sectors, version),
                }
            }
            if self.random.below(4) == 0 {
                let moment = Moment { events: self.file.events(), flushed: self.now.clone() };
                self.answered.push(moment);
            }
            if self.random.below(3) == 0 {
                if let Err(error) = io_thread.block_on(disk.flush()).unwrap() {
                    assert!(self.may_fail, "{error}");
                    continue;
                }
                let moment = Moment { events: self.file.events(), flushed: self.now.clone() };
                self.moments.push(moment);
            }
        }
    }

    fn grow(&mut self, bytes: u64) {
        let result = self.image.set_size(bytes, || ());
        assert!(self.may_fail || result.is_ok(), "{result:?}");
        let sectors = usize::try_from(bytes).unwrap() / SECTOR;
        for moment in &mut self.moments {
            moment.flushed.0.resize(sectors, vec![0]);
        }
        self.now.0.resize(sectors, vec![0]);
    }

    /// The file as a power cut after some events may leave it: writes that the last flush has
    /// covered, writes with FUA, and some sectors of later writes.
    fn cut(&mut self, journal: &[Event], end: usize, is_kill: bool) -> Vec<u8> {
        let odds = 1 + self.random.below(4);
        self.cut_with(journal, end, is_kill, odds)
    }

    /// Like [`cut`](Self::cut). A later write or sector is there with a chance of `odds` in five.
    fn cut_with(&mut self, journal: &[Event], end: usize, is_kill: bool, odds: u64) -> Vec<u8> {
        let is_flush = |event: &Event| matches!(event, Event::Flush);
        let covered = journal[..end].iter().rposition(is_flush).unwrap_or(0);
        let mut content = self.content.clone();
        for (index, event) in journal[..end].iter().enumerate() {
            let Event::Write(offset, data) = event else { continue };
            let start = usize::try_from(*offset).unwrap();
            content.resize(content.len().max(start + data.len()), 0);
            let is_all_there = self.random.below(2) == 0;
            let is_there = self.random.below(5) < odds;
            let with_fua = matches!(journal[..end].get(index + 1), Some(Event::Stable));
            for (at, sector) in (start..).step_by(SECTOR).zip(data.chunks(SECTOR)) {
                let is_there = if is_all_there { is_there } else { self.random.below(5) < odds };
                if index < covered || is_kill || with_fua || is_there {
                    content[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        content
    }

    /// The places in the journal behind headers that name other root tables than before.
    fn ends_behind_new_roots(&self, journal: &[Event]) -> Vec<usize> {
        const ROOTS: Range<usize> = 36..60;
        let mut known = self.content[ROOTS].to_vec();
        let is_new = |(index, event): (usize, &Event)| match event {
            Event::Write(0, header) if header[ROOTS] != known => {
                known = header[ROOTS].to_vec();
                Some(index + 1)
            }
            _ => None,
        };
        journal.iter().enumerate().filter_map(is_new).collect()
    }

    /// The file with only the last of all events since the last flush.
    fn cut_to_last(&self, journal: &[Event], end: usize) -> Vec<u8> {
        let is_flush = |event: &Event| matches!(event, Event::Flush);
        let covered = journal[..end].iter().rposition(is_flush).unwrap_or(0);
        let mut content = self.content.clone();
        for (index, event) in journal[..end].iter().enumerate() {
            let Event::Write(offset, data) = event else { continue };
            let start = usize::try_from(*offset).unwrap();
            content.resize(content.len().max(start + data.len()), 0);
            if index < covered || index + 1 == end {
                content[start..start + data.len()].copy_from_slice(data);
            }
        }
        content
    }

    /// Moments just after pointers that come after an entry for a new block of counts.
    fn ends_behind_new_blocks(&self, journal: &[Event]) -> Vec<usize> {
        let table = Roots::parse(self.content.first_chunk().unwrap()).counts;
        let is_entry = |event: &Event| {
            matches!(event, Event::Write(offset, data)
                if table.contains(offset) && data.len() as u64 <= table.end - table.start)
        };
        let entries = (0..journal.len()).filter(|index| is_entry(&journal[*index]));
        let behind = entries.flat_map(|index| index + 1..index + 5);
        behind.filter(|end| *end <= journal.len()).collect()
    }

    /// Returns true if QEMU finds no fault with an image, and asserts that it finds none except
    /// leaked clusters.
    fn is_clean(&self, content: &[u8], what: &str) -> bool {
        let path = self.folder.path().join("cut");
        std::fs::File::create(&path).unwrap().write_all(content).unwrap();
        let mut check = Command::new("qemu-img");
        let output = check.args(["check", "-f", "qcow2"]).arg(&path).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 3)), "{what}: {text}{errors}");
        code == Some(0)
    }

    fn check(&mut self, content: &[u8], end: usize, what: &str) {
        let moment = self.moments.iter().rev().find(|moment| moment.events <= end).unwrap();
        let expected = moment.flushed.clone();
        self.check_for(content, &expected, what);
    }

    /// Checks that a kill leaves the answered writes, at some of the moments.
    fn check_kills(&mut self, journal: &[Event], what: &str) {
        let answered = std::mem::take(&mut self.answered);
        for Moment { events, flushed } in answered.iter().step_by(1 + answered.len() / 6) {
            let content = self.cut(journal, *events, true);
            self.check_for(&content, flushed, &format!("{what}, killed after {events}"));
        }
    }

    fn check_for(&mut self, content: &[u8], expected: &Expected, what: &str) {
        let is_clean = self.is_clean(content, what);
        self.leaks += usize::from(!is_clean);
        assert!(is_clean || !self.is_marked || mark::is_set(content), "{what}: it is not marked");
        let mut content = content.to_vec();
        content.resize(content.len().next_multiple_of(4096), 0);
        let file = if self.is_marked { RemoteStub::exclusive } else { RemoteStub::new }(&content);
        let opened = open(&self.folder, &file, self.below);
        let disk = opened.attach(self.thread.io());
        let size = disk.info().size_bytes;
        let mut known = HashMap::new();
        for at in (0..size).step_by(1 << 16) {
            let bytes = usize::try_from((size - at).min(1 << 16)).unwrap();
            let buffers = Buffers::aligned(bytes, 4096);
            let read = buffers.duplicate();
            self.thread.block_on(disk.read(at, buffers)).unwrap().unwrap();
            for (index, sector) in read.to_vec().chunks(SECTOR).enumerate() {
                let sector_number = usize::try_from(at).unwrap() / SECTOR + index;
                let version = u64::from_le_bytes(*sector.first_chunk().unwrap());
                // The disk may have grown after that.
                let allowed = expected.0.get(sector_number).map_or(&[0][..], |all| &**all);
                let whole = known.entry(version).or_insert_with(|| filled(version, 1));
                assert!(
                    allowed.contains(&version) && sector == whole,
                    "{what}: sector {sector_number} has {version}, and not one of {allowed:?}"
                );
            }
        }
        if self.is_marked {
            // The first write frees leaked clusters.
            self.thread.block_on(disk.discard(0, 4096)).unwrap().unwrap();
            drop((disk, opened));
            assert!(self.is_clean(&file.content(), what), "{what}: clusters stay leaked");
            assert!(!mark::is_set(&file.content()), "{what}: the mark stays");
        }
    }
}

struct Change {
    sectors: Range<u64>,
    version: Version,
    is_discard: bool,
}

impl Change {
    async fn make(&self, disk: &Disk) -> io::Result<()> {
        let sectors = self.sectors.end - self.sectors.start;
        let (offset, len) = (self.sectors.start * SECTOR as u64, sectors * SECTOR as u64);
        match self.version {
            0 if self.is_discard => disk.discard(offset, len).await,
            0 => disk.write_zeroes(offset, len, offset % 1024 == 0).await,
            _ => {
                let buffers = Buffers::from_vec(filled(self.version, sectors));
                Ok(disk.write(offset, buffers, false).await?)
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_survives_a_loss_of_power_at_any_write() {
    let version = Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status();
    if version.is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    let (mut leaks, mut moved_roots) = (0, 0);
    for kind in &KINDS {
        let mut world = World::new(kind, true);
        world.run(kind.rounds);
        let grows = world.file.events();
        if kind.grows {
            world.grow(2 * kind.bytes);
        }
        let grown = world.file.events();
        world.run(kind.rounds / 4);
        let journal = world.file.journal();
        let mut ends: Vec<usize> = (grows..grown).step_by(2).collect();
        let count = journal.len() as u64;
        ends.extend((0..CUTS).map(|_| usize::try_from(world.random.below(count)).unwrap()));
        ends.push(journal.len());
        for (index, end) in ends.into_iter().enumerate() {
            let is_kill = index % 4 == 3;
            let content = world.cut(&journal, end, is_kill);
            let what = format!("{}, cut {end} of {}, kill: {is_kill}", kind.options, journal.len());
            world.check(&content, end, &what);
        }
        world.check_kills(&journal, kind.options);
        let mut ends = world.ends_behind_new_blocks(&journal);
        let new_blocks = ends.len() / 4;
        assert!(kind.new_blocks <= new_blocks, "{}: {new_blocks} new blocks", kind.options);
        ends = ends.into_iter().step_by((new_blocks * 4 / 40).max(1) | 1).collect();
        let new_roots = world.ends_behind_new_roots(&journal);
        moved_roots += new_roots.len();
        ends.extend(new_roots);
        ends.extend((0..CUTS).map(|_| usize::try_from(world.random.below(count)).unwrap()));
        for end in ends {
            let content = world.cut_to_last(&journal, end);
            let what = format!("{}, last of {end} of {}", kind.options, journal.len());
            world.check(&content, end, &what);
        }
        leaks += if world.is_marked { world.leaks } else { 0 };
    }
    assert!(leaks > 0, "nothing was freed");
    assert!(moved_roots > 0, "no table was replaced by a longer one");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_survives_errors_of_its_file() {
    let version = Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status();
    if version.is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    let one_fails_in = 4;
    for kind in &KINDS {
        let mut world = World::new(kind, true);
        world.random.0 += one_fails_in;
        world.may_fail = true;
        for round in 0..8 {
            world.file.have_some_fail(one_fails_in);
            world.run(kind.rounds / 16);
            if kind.grows && round % 2 == 1 {
                world.grow(kind.bytes + (round + 1) * kind.bytes / 8);
            }
            world.file.have_some_fail(0);
            world.run(kind.rounds / 16);
        }
        let journal = world.file.journal();
        let count = journal.len() as u64;
        let ends = (0..CUTS).map(|_| usize::try_from(world.random.below(count)).unwrap());
        for (index, end) in ends.collect::<Vec<_>>().into_iter().chain([journal.len()]).enumerate()
        {
            let is_kill = index % 2 == 0;
            let content = world.cut(&journal, end, is_kill);
            let what = format!("{}, cut {end} of {}, kill: {is_kill}", kind.options, journal.len());
            world.check(&content, end, &what);
        }
    }
}
