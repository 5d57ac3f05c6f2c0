//! A driver that tracks the expected contents of each block from the answers.

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{LIMIT, SECTOR_BYTES, pattern};
use ringhaul_kit::frontend::message::Message;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{
    DATA, DATA_BYTES, Frontend, Setup, blk, memory, protocol_feature, segment,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::unit;

pub(super) const QUEUES: u16 = 2;
pub(super) const QUEUE_SIZE: u16 = 128;
/// Requests of a queue at a time, each with four descriptors.
pub(super) const SLOTS: u16 = 32;
pub(super) const BLOCK_BYTES: usize = 4096;
/// A small disk, so that each block is soon written again.
pub(super) const FEW_BLOCKS: u64 = 128;
/// The largest disk, in blocks.
pub(super) const BLOCKS_MAX: u64 = 2048;
/// Half of the requests go to at most this number of blocks, the newest ones.
const NEWEST_BLOCKS: u64 = 128;
/// Bytes of the account of a queue in the inflight region (vhost-user specification).
const ACCOUNT_BYTES: u64 = (16 + 16 * QUEUE_SIZE as u64).next_multiple_of(64);
/// The flag of write zeroes that allows the device to deallocate (virtio 1.3, section 5.2.6).
const UNMAP: u32 = 1;

/// The expected contents of a block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Version {
    /// The number of its last write, or 0 for zeroes.
    Of(u64),
    /// Anything: the block was discarded and not written since.
    Any,
}

impl Version {
    fn is_in(self, block: u64, data: &[u8]) -> bool {
        match self {
            Self::Of(number) => data == content(block, number),
            Self::Any => true,
        }
    }
}

/// The contents of a block after this write, or zeroes.
fn content(block: u64, version: u64) -> Vec<u8> {
    if version == 0 {
        vec![0; BLOCK_BYTES]
    } else {
        pattern(version * BLOCKS_MAX + block, BLOCK_BYTES)
    }
}

/// A request without an answer.
#[derive(Clone, Copy, Debug)]
enum Request {
    /// The first block, the number of blocks, and their version.
    Write(u64, u64, u64),
    Read(u64, u64),
    /// Zeroes or a discard, depending on [`Driver::clear_kind`].
    Clear(u64, u64),
    Flush,
}

impl Request {
    fn blocks(self) -> Range<u64> {
        match self {
            Self::Write(first, count, _) | Self::Read(first, count) | Self::Clear(first, count) => {
                first..first + count
            }
            Self::Flush => 0..0,
        }
    }
}

pub(super) struct Driver {
    pub(super) frontend: Frontend,
    /// `None` if the driver has no inflight region.
    region: Option<Arc<OwnedFd>>,
    slots: Vec<Vec<Option<Request>>>,
    /// The expected contents of each block, according to the answers.
    pub(super) versions: Vec<Version>,
    /// The number of blocks in use; grows by one with every second answer.
    pub(super) blocks: u64,
    last_version: u64,
    pub(super) answered: u64,
    /// The request type that clears blocks, if the driver clears any.
    pub(super) clear_kind: Option<u32>,
    /// The LUN of the disk, if the device is a virtio-scsi device.
    lun: Option<u8>,
    /// True if the driver sleeps until it is called.
    pub(super) sleeps: bool,
    pub(super) random: u64,
}

impl Driver {
    /// Connects to a disk of `blocks` blocks of zeroes.
    pub(super) fn new(socket: &Path, blocks: u64, keeps_region: bool) -> Result<Self> {
        Self::connect(socket, blocks, keeps_region, None)
    }

    /// Connects to a disk that is a logical unit.
    pub(super) fn for_unit(socket: &Path, blocks: u64, lun: u8) -> Result<Self> {
        Self::connect(socket, blocks, true, Some(lun))
    }

    /// Connects to a disk, or to a logical unit, with or without a region.
    pub(super) fn connect(
        socket: &Path,
        blocks: u64,
        keeps_region: bool,
        lun: Option<u8>,
    ) -> Result<Self> {
        let mut setup = Setup::default().queue_size(QUEUE_SIZE);
        setup.queues = all_queues(lun);
        let mut region = None;
        if keeps_region {
            let features = &mut setup.protocol_features;
            *features = features.map(|all| all | protocol_feature::INFLIGHT_SHMFD);
            let file = memfd_create("ringhaul-test-inflight", MemfdFlags::CLOEXEC)?;
            ftruncate(&file, ACCOUNT_BYTES * u64::from(setup.queues))?;
            region = Some(Arc::new(file));
        }
        Ok(Self {
            frontend: Frontend::connect(socket, &setup)?,
            region,
            slots: vec![vec![None; SLOTS.into()]; QUEUES.into()],
            versions: vec![Version::Of(0); usize::try_from(blocks)?],
            blocks,
            last_version: 0,
            answered: 0,
            clear_kind: None,
            lun,
            sleeps: false,
            random: 1,
        })
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % end
    }

    /// Attaches like a front-end that knows nothing of the last daemon: queues continue at used
    /// idx, and the region has the rest, if there is one.
    pub(super) fn attach(&mut self) -> Result<()> {
        self.frontend.negotiate()?;
        self.frontend.share_memory()?;
        if let Some(region) = &self.region {
            let queues = all_queues(self.lun);
            let bytes = ACCOUNT_BYTES * u64::from(queues);
            self.frontend
                .send_checked(Message::inflight_region(region, bytes, queues, QUEUE_SIZE))?;
        }
        let queues = usize::from(all_queues(self.lun));
        for queue in 0..queues {
            let base = self.frontend.rings[queue].used_idx();
            self.frontend.start_queue(queue, base)?;
        }
        (0..queues).try_for_each(|queue| self.frontend.enable_queue(queue, true))
    }

    /// The index of the ring of a request queue.
    fn ring(&self, queue: usize) -> usize {
        let others = self.lun.map_or(0, |_| unit::OTHER_QUEUES);
        usize::from(others) + queue
    }

    /// Fills the free slots of a queue and kicks.
    fn submit(&mut self, queue: usize) -> Result<()> {
        let mut is_new = false;
        for slot in 0..usize::from(SLOTS) {
            if self.slots[queue][slot].is_none()
                && let Some(request) = self.draw()
            {
                self.put(queue, slot, request)?;
                self.slots[queue][slot] = Some(request);
                is_new = true;
            }
        }
        let ring = self.ring(queue);
        if is_new { self.frontend.rings[ring].kick() } else { Ok(()) }
    }

    /// Draws a request. Returns `None` if its blocks overlap with an outstanding request.
    fn draw(&mut self) -> Option<Request> {
        let kind = self.below(10);
        let count = 1 + self.below(2);
        let mut first = self.below(self.blocks - 1);
        if kind.is_multiple_of(2) {
            first = self.blocks - 2 - first % NEWEST_BLOCKS;
        }
        let wanted = first..first + count;
        let all = self.slots.iter().flatten().flatten();
        let is_free = |other: &Request| {
            other.blocks().end <= wanted.start || wanted.end <= other.blocks().start
        };
        if !all.clone().all(is_free) {
            return None;
        }
        Some(match kind {
            0 if self.clear_kind.is_some() => Request::Clear(first, count),
            0..5 => {
                self.last_version += 1;
                Request::Write(first, count, self.last_version)
            }
            5..9 => Request::Read(first, count),
            _ => Request::Flush,
        })
    }

    fn put(&mut self, queue: usize, slot: usize, request: Request) -> Result<()> {
        if let Some(lun) = self.lun {
            return self.put_command(lun, queue, slot, request);
        }
        let data = data_of(queue, slot);
        let sector = request.blocks().start * (BLOCK_BYTES / SECTOR_BYTES) as u64;
        let kind = match request {
            Request::Write(..) => blk::OUT,
            Request::Read(..) => blk::IN,
            Request::Clear(..) => self.clear_kind.context("it makes no such requests")?,
            Request::Flush => blk::FLUSH,
        };
        let slot_number = u16::try_from(slot)?;
        let (header, status) = self.frontend.put_header(queue, slot_number, kind, sector)?;
        let bytes = u32::try_from(request.blocks().count() * BLOCK_BYTES)?;
        let mut chain = vec![Desc::readable(header, 16)];
        match request {
            Request::Write(..) => {
                self.fill(data, request)?;
                chain.push(Desc::readable(data, bytes));
            }
            Request::Read(..) => chain.push(Desc::writable(data, bytes)),
            Request::Clear(..) => {
                let flags = if kind == blk::WRITE_ZEROES { UNMAP } else { 0 };
                let part = segment(sector, bytes / u32::try_from(SECTOR_BYTES)?, flags);
                self.frontend.memory.write(data, &part)?;
                chain.push(Desc::readable(data, u32::try_from(part.len())?));
            }
            Request::Flush => {}
        }
        chain.push(Desc::writable(status, 1));
        let ring = &mut self.frontend.rings[queue];
        ring.put_chain(slot_number * 4, &chain);
        ring.offer(slot_number * 4);
        Ok(())
    }

    /// Writes the data of a write to guest memory.
    fn fill(&self, data: u64, request: Request) -> Result<()> {
        let Request::Write(first, count, version) = request else { return Ok(()) };
        let new = (first..first + count).flat_map(|block| content(block, version));
        self.frontend.memory.write(data, &new.collect::<Vec<u8>>())
    }

    fn put_command(&mut self, lun: u8, queue: usize, slot: usize, request: Request) -> Result<()> {
        let data = data_of(queue, slot);
        self.fill(data, request)?;
        let blocks = request.blocks();
        let bytes = u32::try_from(blocks.clone().count() * BLOCK_BYTES)?;
        let (opcode, data) = match request {
            Request::Write(..) => (0x8a, Some(Desc::readable(data, bytes))),
            Request::Read(..) => (0x88, Some(Desc::writable(data, bytes))),
            Request::Flush => (0x91, None),
            Request::Clear(..) => anyhow::bail!("it makes no such commands"),
        };
        let range = (blocks.start, blocks.end - blocks.start);
        let memory = &self.frontend.memory;
        let chain = unit::put(memory, lun, (queue, slot), opcode, range, data)?;
        let (ring, head) = (self.ring(queue), u16::try_from(slot)? * 4);
        let ring = &mut self.frontend.rings[ring];
        ring.put_chain(head, &chain);
        ring.offer(head);
        Ok(())
    }

    /// Returns true if a request is done. Sends a command again if the unit reported an event.
    fn finish_request(&mut self, queue: usize, slot: usize, request: Request) -> Result<bool> {
        if self.lun.is_none() {
            let status = self.frontend.status(queue, u16::try_from(slot)?);
            ensure!(status == Some(blk::OK), "{request:?} ended with {status:?}");
            return Ok(true);
        }
        if unit::outcome(&self.frontend.memory, (queue, slot))? == unit::Outcome::Done {
            return Ok(true);
        }
        self.put(queue, slot, request)?;
        self.slots[queue][slot] = Some(request);
        let ring = self.ring(queue);
        self.frontend.rings[ring].kick()?;
        Ok(false)
    }

    /// Takes the available answers, and returns their number.
    pub(super) fn take(&mut self) -> Result<u64> {
        let before = self.answered;
        for queue in 0..usize::from(QUEUES) {
            let ring = self.ring(queue);
            while let Some(used) = self.frontend.rings[ring].take_used() {
                let slot = usize::try_from(used.head)? / 4;
                let request = self.slots[queue].get_mut(slot).and_then(Option::take);
                let request = request.with_context(|| format!("{used:?} was answered twice"))?;
                if !self.finish_request(queue, slot, request)? {
                    continue;
                }
                self.check(queue, slot, request)?;
                self.answered += 1;
                if self.answered.is_multiple_of(2) {
                    self.blocks = (self.blocks + 1).min(self.versions.len() as u64);
                }
            }
        }
        Ok(self.answered - before)
    }

    fn check(&mut self, queue: usize, slot: usize, request: Request) -> Result<()> {
        match request {
            Request::Write(_, _, version) => self.record(request, Version::Of(version))?,
            Request::Clear(..) if self.clear_kind == Some(blk::DISCARD) => {
                self.record(request, Version::Any)?;
            }
            Request::Clear(..) => self.record(request, Version::Of(0))?,
            Request::Read(first, count) => {
                let bytes = usize::try_from(count)? * BLOCK_BYTES;
                let data = self.frontend.memory.read(data_of(queue, slot), bytes)?;
                for (block, data) in (first..).zip(data.chunks_exact(BLOCK_BYTES)) {
                    self.check_block(block, data)?;
                }
            }
            Request::Flush => {}
        }
        Ok(())
    }

    /// Records this version for each block of a request.
    fn record(&mut self, request: Request, version: Version) -> Result<()> {
        for block in request.blocks() {
            self.versions[usize::try_from(block)?] = version;
        }
        Ok(())
    }

    fn check_block(&self, block: u64, data: &[u8]) -> Result<()> {
        let version = self.versions[usize::try_from(block)?];
        if !version.is_in(block, data) {
            let found = (0..=self.last_version).rev().find(|other| data == content(block, *other));
            anyhow::bail!("block {block} has version {found:?} instead of {version:?}");
        }
        Ok(())
    }

    /// Runs until `count` more requests are answered, or at the end until all are, without new
    /// ones.
    pub(super) fn run(&mut self, count: u64, is_end: bool) -> Result<()> {
        let wanted = self.answered + count;
        let deadline = Instant::now() + LIMIT;
        loop {
            let taken = self.take()?;
            let is_done = if is_end {
                self.slots.iter().flatten().all(Option::is_none)
            } else {
                self.answered >= wanted
            };
            if is_done {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "requests are not answered: {:?}", self.slots);
            if !is_end {
                (0..usize::from(QUEUES)).try_for_each(|queue| self.submit(queue))?;
            }
            if taken == 0 && self.sleeps {
                self.wait()?;
            } else if taken == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// The number of requests without an answer.
    pub(super) fn unanswered(&self) -> usize {
        self.slots.iter().flatten().flatten().count()
    }

    /// Runs for less than `max_us` microseconds, or idles if not busy.
    pub(super) fn run_below(&mut self, max_us: u64, is_busy: bool) -> Result<()> {
        let moment = Instant::now() + Duration::from_micros(self.below(max_us));
        while Instant::now() < moment {
            if is_busy {
                self.take()?;
                (0..usize::from(QUEUES)).try_for_each(|queue| self.submit(queue))?;
            }
        }
        Ok(())
    }

    /// Sleeps until a queue calls; a missing call is an error.
    fn wait(&self) -> Result<()> {
        let rings = &self.frontend.rings;
        rings.iter().for_each(|ring| ring.enable_calls());
        if rings.iter().any(|ring| ring.has_used()) {
            return Ok(());
        }
        let mut fds: Vec<PollFd<'_>> =
            rings.iter().map(|ring| PollFd::new(&*ring.call, PollFlags::IN)).collect();
        let limit = Timespec::try_from(LIMIT)?;
        ensure!(poll(&mut fds, Some(&limit))? > 0, "no call within {LIMIT:?}");
        for ring in rings {
            let _ = memory::take_count(&ring.call);
        }
        Ok(())
    }
}

fn all_queues(lun: Option<u8>) -> u16 {
    if lun.is_some() { unit::OTHER_QUEUES + QUEUES } else { QUEUES }
}

fn data_of(queue: usize, slot: usize) -> u64 {
    DATA + queue as u64 * DATA_BYTES + (slot * 2 * BLOCK_BYTES) as u64
}

/// Checks that a file has these versions of all blocks.
pub(super) fn check_file(path: &Path, versions: &[Version]) -> Result<()> {
    let file = File::open(path)?;
    let mut data = vec![0; BLOCK_BYTES];
    for (block, version) in (0..).zip(versions) {
        file.read_exact_at(&mut data, block * BLOCK_BYTES as u64)?;
        ensure!(version.is_in(block, &data), "block {block} does not have {version:?}");
    }
    Ok(())
}
