//! The data path on one thread, for `cargo lab instructions` to count its instructions.
//!
//! A driver and the device share the thread: the driver makes a batch of requests available and
//! kicks, and the IoThread takes turns until all are answered. Only [`device_turn`] is counted, so
//! the instructions of the driver are left out. With a null disk, and with a file in the page
//! cache, where ops end in the submit, nothing depends on the machine's timing: the count is the
//! same each time.
//!
//! `instructions CASE DEPTH REQUESTS`, where CASE is DISK-ENGINE-KIND: `null-threads-read`,
//! `file-aio-write` and so on. The kinds `read10` and `write10` are commands of virtio-scsi. With
//! `-inflight` behind them, requests are marked in an inflight region. With `-packed`, the ring is
//! packed. With `-ordered`, virtio-blk answers in order.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockio::{Activity, DiskOptions, DiskSource, EngineKind, IoThread, IoThreadConfig, Wait};
use device::blk::config::{
    BlkOptions, F_EVENT_IDX, F_FLUSH, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1, SECTOR_BYTES,
};
use device::scsi::config::ScsiOptions;
use device::scsi::unit::UnitOptions;
use device::unit_address::UnitAddress;
use device::{Device, LogEvents, QueueSetup, Ring};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use virtqueue::driver::{self, Desc, PACKED_START, PackedDriver};
use virtqueue::{GuestMemory, InflightRegion, QueueConfig, RingLayout};

const DISK_BYTES: u64 = 1 << 20;
const MEMORY_BYTES: u64 = 4 << 20;
const RING: Ring = Ring {
    size: 256,
    desc_table: 0x1000,
    avail_ring: 0x3000,
    used_ring: 0x5000,
    next_avail: 0,
    next_used: 0,
};
const TABLES: u64 = 0x1_0000;
const HEADERS: u64 = 0x2_0000;
const DATA: u64 = 0x10_0000;
const DATA_BYTES: u32 = 4096;
/// Distance between the headers of two chains; the response is in the middle.
const SLOT_BYTES: u64 = 256;
const RESPONSE: u64 = 128;

/// The kind of request.
#[derive(Clone, Copy)]
enum Kind {
    /// A request type of virtio-blk.
    Blk(u32),
    /// An opcode of virtio-scsi, for a CDB that gives the blocks like READ (10).
    Scsi(u8),
}

impl Kind {
    fn parse(name: &str) -> Result<Self> {
        Ok(match name {
            "read" => Self::Blk(VIRTIO_BLK_T_IN),
            "write" => Self::Blk(VIRTIO_BLK_T_OUT),
            "read10" => Self::Scsi(0x28),
            "write10" => Self::Scsi(0x2a),
            _ => bail!("no request is called {name}"),
        })
    }

    /// Returns the header of a request for the sectors from this one on, true if it reads, and the
    /// length of its response.
    fn request(self, sector: u64) -> (Vec<u8>, bool, u32) {
        match self {
            Self::Blk(kind) => {
                let header = [&u64::from(kind).to_le_bytes()[..], &sector.to_le_bytes()].concat();
                (header, kind == VIRTIO_BLK_T_IN, 1)
            }
            Self::Scsi(opcode) => {
                let mut header = vec![0; 51];
                // LUN 0 of target 0, by the flat method.
                header[..4].copy_from_slice(&[1, 0, 0x40, 0]);
                header[8..16].copy_from_slice(&sector.to_le_bytes());
                header[19] = opcode;
                let lba = u32::try_from(sector).expect("the disk is small");
                header[21..25].copy_from_slice(&lba.to_be_bytes());
                header[27] = u8::try_from(u64::from(DATA_BYTES) / SECTOR_BYTES).expect("8");
                (header, opcode == 0x28, 108)
            }
        }
    }

    /// True if a response reports success.
    fn is_well(self, response: &[u8]) -> bool {
        match self {
            Self::Blk(_) => response[0] == 0,
            // Residual, status and response.
            Self::Scsi(_) => response[4..8] == [0; 4] && response[10..12] == [0; 2],
        }
    }
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [case, depth, requests] = &words[..] else {
        bail!("instructions CASE DEPTH REQUESTS");
    };
    let parts: Vec<&str> = case.split('-').collect();
    let [disk, engine, kind, ref more @ ..] = parts[..] else {
        bail!("no case is called {case}");
    };
    let has = |word| more.contains(&word);
    let rings = Rings {
        are_marked: has("inflight"),
        are_packed: has("packed"),
        are_ordered: has("ordered"),
    };
    ensure!(rings.words() == more.len(), "no case is called {case}");
    let depth: u16 = depth.parse().context("DEPTH is 1 to 256")?;
    ensure!((1..=RING.size).contains(&depth), "DEPTH is 1 to {}", RING.size);
    let requests: u64 = requests.parse().context("REQUESTS is a number")?;
    let kind = Kind::parse(kind)?;
    let mut guest = Guest::start(disk, engine, kind, depth, rings)?;
    for _ in 0..requests / u64::from(depth) {
        guest.run_batch(depth)?;
    }
    guest.check(depth)
}

/// The words at the end of a case.
#[derive(Clone, Copy)]
struct Rings {
    are_marked: bool,
    are_packed: bool,
    are_ordered: bool,
}

impl Rings {
    /// The number of words.
    fn words(self) -> usize {
        [self.are_marked, self.are_packed, self.are_ordered].map(usize::from).iter().sum()
    }
}

/// A turn of the loop: the only code that is counted.
#[inline(never)]
fn device_turn(thread: &IoThread) -> Result<Activity, blockio::Error> {
    thread.turn(Wait::Never)
}

/// The driver's side of a ring of either layout.
enum DriverRing {
    Split(driver::Ring<Arc<GuestMemory>>),
    /// With the number of chains in the device.
    Packed(PackedDriver<Arc<GuestMemory>>, u16),
}

impl DriverRing {
    fn new(memory: Arc<GuestMemory>, config: QueueConfig, is_packed: bool) -> Self {
        match is_packed {
            false => Self::Split(driver::Ring::new(memory, config)),
            true => Self::Packed(PackedDriver::new(memory, config), 0),
        }
    }

    fn memory(&self) -> &Arc<GuestMemory> {
        match self {
            Self::Split(ring) => &ring.memory,
            Self::Packed(ring, _) => &ring.memory,
        }
    }

    /// Writes the indirect table of chain `slot`.
    fn put_table(&self, slot: u16, table: u64, buffers: &[Desc]) {
        match self {
            Self::Split(ring) => ring.put_indirect(slot, table, buffers),
            Self::Packed(ring, _) => ring.put_table(table, buffers),
        }
    }

    /// Makes the chains of the slots before `depth` available, and asks for one call, for the last
    /// answer.
    fn offer_batch(&mut self, depth: u16) {
        match self {
            Self::Split(ring) => {
                (0..depth).for_each(|slot| ring.put_head(slot));
                let idx = ring.next_avail;
                ring.put_used_event(idx.wrapping_sub(1));
                fence(Ordering::SeqCst);
                ring.put_avail_idx(idx);
            }
            Self::Packed(ring, in_device) => {
                ring.ask_for_call(depth - 1);
                for slot in 0..depth {
                    ring.put_named(slot, TABLES + u64::from(slot) * 64, 3);
                }
                fence(Ordering::SeqCst);
                ring.publish();
                *in_device = depth;
            }
        }
    }

    /// Returns true if the device has answered all chains.
    fn is_answered(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.used_idx() == ring.next_avail,
            Self::Packed(ring, in_device) => {
                while ring.take_element().is_some() {
                    *in_device -= 1;
                }
                *in_device == 0
            }
        }
    }
}

/// A driver, its device and the thread that serves it.
struct Guest {
    thread: IoThread,
    ring: DriverRing,
    kind: Kind,
    kick: OwnedFd,
    _call: OwnedFd,
}

impl Guest {
    fn start(
        disk: &str,
        engine: &str,
        kind: Kind,
        depth: u16,
        Rings { are_marked, are_packed, are_ordered }: Rings,
    ) -> Result<Self> {
        let engine = parse_engine(engine)?;
        let source = match disk {
            "null" => DiskSource::null(DISK_BYTES, &DiskOptions::default())?,
            "file" => {
                // The page cache of a file in memory completes ops in the submit.
                let file = tempfile::NamedTempFile::new_in("/dev/shm").context("making a file")?;
                let content = vec![7; usize::try_from(DISK_BYTES)?];
                std::fs::write(file.path(), content).context("filling a file")?;
                DiskSource::file(file.path(), &DiskOptions::default())?
            }
            _ => bail!("no disk is called {disk}"),
        };
        let device = new_device(kind, source, are_ordered)?;
        let bits = [F_VERSION_1, F_FLUSH, F_EVENT_IDX, F_INDIRECT_DESC];
        let packed = are_packed.then_some(F_RING_PACKED);
        let wanted = bits.iter().chain(&packed).fold(0, |all, bit| all | 1 << bit);
        device.set_features(device.features() & wanted).context("negotiating features")?;
        // Busy-polling and its clock would make the count depend on the time.
        let config = IoThreadConfig {
            engine: engine.into(),
            poll_max: Duration::ZERO,
            embedded: true,
            ..Default::default()
        };
        let thread = IoThread::new(&config)?;
        let memory = Arc::new(GuestMemory::anonymous(&[(0, MEMORY_BYTES)])?);
        let (kick, call) = (new_eventfd()?, new_eventfd()?);
        let region = GuestMemory::anonymous(&[(0, MEMORY_BYTES)])?;
        let (layout, start) = match are_packed {
            false => (RingLayout::Split, 0),
            true => (RingLayout::Packed, PACKED_START),
        };
        let region = InflightRegion::new(Arc::new(region), 3, RING.size)?;
        let inflight = are_marked.then(|| region.queue(0, layout)).transpose()?;
        let setup = QueueSetup {
            memory: Arc::clone(&memory),
            ring: Ring { next_avail: start, next_used: start, ..RING },
            inflight,
            region_is_own: false,
            kick: Some(kick.try_clone().context("duplicating the kick")?),
            call: Some(call.try_clone().context("duplicating the call")?),
            err: None,
            log: None,
        };
        let queue = match kind {
            Kind::Blk(_) => 0,
            Kind::Scsi(_) => 2,
        };
        let started = device.begin_start_queue(queue, &thread.remote(), setup);
        while started.poll().map(|handle| handle.map(drop)).transpose()?.is_none() {
            thread.turn(Wait::Never)?;
        }
        let config = QueueConfig { next_avail: start, ..RING.config(true, true) };
        let ring = DriverRing::new(memory, config, are_packed);
        let mut guest = Self { thread, ring, kind, kick, _call: call };
        (0..depth).try_for_each(|slot| guest.put_chain(slot))?;
        if matches!(kind, Kind::Scsi(_)) {
            // The first command reports that the unit was powered on.
            guest.run_batch(1)?;
        }
        Ok(guest)
    }

    /// Writes the constant parts of chain `slot`: the header and the indirect table.
    fn put_chain(&mut self, slot: u16) -> Result<()> {
        let own = u64::from(slot);
        let (at, data) = (HEADERS + own * SLOT_BYTES, DATA + own * u64::from(DATA_BYTES));
        let sector = own * u64::from(DATA_BYTES) / SECTOR_BYTES;
        let (header, reads, response_bytes) = self.kind.request(sector);
        self.ring.memory().write(at, &header)?;
        let head = Desc::readable(at, u32::try_from(header.len())?);
        let response = Desc::writable(at + RESPONSE, response_bytes);
        let buffers = match (self.kind, reads) {
            (_, false) => [head, Desc::readable(data, DATA_BYTES), response],
            (Kind::Blk(_), true) => [head, Desc::writable(data, DATA_BYTES), response],
            (Kind::Scsi(_), true) => [head, response, Desc::writable(data, DATA_BYTES)],
        };
        self.ring.put_table(slot, TABLES + own * 64, &buffers);
        Ok(())
    }

    /// Makes a batch available, kicks, and lets the device take turns until all chains are
    /// answered.
    fn run_batch(&mut self, depth: u16) -> Result<()> {
        self.ring.offer_batch(depth);
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).context("kicking")?;
        loop {
            let activity = device_turn(&self.thread)?;
            if activity == Activity::Idle && self.ring.is_answered() {
                return Ok(());
            }
            if activity == Activity::Idle {
                let descriptor = PollFd::from_borrowed_fd(self.thread.as_fd(), PollFlags::IN);
                rustix::io::retry_on_intr(|| poll(&mut [descriptor.clone()], None))
                    .context("waiting for the device")?;
            }
        }
    }

    /// Checks that all requests of a batch succeeded.
    fn check(&self, depth: u16) -> Result<()> {
        for slot in 0..depth {
            let mut response = [u8::MAX; 12];
            let response_addr = HEADERS + u64::from(slot) * SLOT_BYTES + RESPONSE;
            self.ring.memory().read(response_addr, &mut response)?;
            ensure!(self.kind.is_well(&response), "request {slot} ended with {response:?}");
        }
        Ok(())
    }
}

fn new_device(kind: Kind, source: DiskSource, in_order: bool) -> Result<Device> {
    let events = Arc::new(LogEvents::new("instructions"));
    let Kind::Scsi(_) = kind else {
        let options = BlkOptions { queue_size: RING.size, in_order, ..BlkOptions::default() };
        return Ok(Device::blk(source, options, events));
    };
    let options = ScsiOptions { queue_size: RING.size, ..ScsiOptions::default() };
    let device = Device::scsi(options, events);
    if let Device::Scsi(scsi) = &device {
        let unit = UnitOptions::new([0x30; 8], [0x31; 8]);
        scsi.add_unit(UnitAddress { target: 0, lun: 0 }, source, unit)?;
    }
    Ok(device)
}

fn parse_engine(name: &str) -> Result<EngineKind> {
    Ok(match name {
        "threads" => EngineKind::Threads,
        "aio" => EngineKind::Aio,
        "uring" => EngineKind::IoUring,
        _ => bail!("no engine is called {name}"),
    })
}

fn new_eventfd() -> Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("making an eventfd")
}
