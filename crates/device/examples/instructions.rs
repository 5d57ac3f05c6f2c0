//! The data path on one thread, for `cargo lab instructions` to count its instructions.
//!
//! A driver and the device share the thread: the driver makes a batch of requests available and
//! kicks, and the IoThread takes turns until all are answered. Only [`device_turn`] is counted, so
//! what the driver spends is left out. With a null disk, and with a file in the page cache whose
//! ops end in the submit, nothing depends on the machine's timing: the count is the same each time.
//!
//! `instructions CASE DEPTH REQUESTS`, where CASE is DISK-ENGINE-KIND: `null-threads-read`,
//! `file-aio-write` and so on.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockio::{Activity, DiskOptions, DiskSource, EngineKind, IoThread, IoThreadConfig, Wait};
use device::blk::config::{
    BlkOptions, F_EVENT_IDX, F_FLUSH, F_INDIRECT_DESC, F_VERSION_1, SECTOR_BYTES,
};
use device::{Device, LogEvents, QueueSetup, Ring};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use virtqueue::GuestMemory;
use virtqueue::driver::{self, Desc};

const DISK_BYTES: u64 = 1 << 20;
const MEMORY_BYTES: u64 = 4 << 20;
const RING: Ring =
    Ring { size: 256, desc_table: 0x1000, avail_ring: 0x3000, used_ring: 0x5000, next_avail: 0 };
const TABLES: u64 = 0x1_0000;
const HEADERS: u64 = 0x2_0000;
const DATA: u64 = 0x10_0000;
const DATA_BYTES: u32 = 4096;
const HEADER_BYTES: u32 = 16;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [case, depth, requests] = &words[..] else {
        bail!("instructions CASE DEPTH REQUESTS");
    };
    let parts: Vec<&str> = case.split('-').collect();
    let [disk, engine, kind] = parts[..] else { bail!("no case is called {case}") };
    let depth: u16 = depth.parse().context("DEPTH is 1 to 256")?;
    ensure!((1..=RING.size).contains(&depth), "DEPTH is 1 to {}", RING.size);
    let requests: u64 = requests.parse().context("REQUESTS is a number")?;
    let request = match kind {
        "read" => VIRTIO_BLK_T_IN,
        "write" => VIRTIO_BLK_T_OUT,
        _ => bail!("no request is called {kind}"),
    };
    let mut guest = Guest::start(disk, engine, request, depth)?;
    for _ in 0..requests / u64::from(depth) {
        guest.run_batch(depth)?;
    }
    guest.check(depth)
}

/// One turn of the loop, and all that is counted.
#[inline(never)]
fn device_turn(thread: &IoThread) -> Result<Activity, blockio::Error> {
    thread.turn(Wait::Never)
}

/// A driver, its device and the thread that serves it.
struct Guest {
    thread: IoThread,
    ring: driver::Ring<Arc<GuestMemory>>,
    kick: OwnedFd,
    _call: OwnedFd,
}

impl Guest {
    fn start(disk: &str, engine: &str, request: u32, depth: u16) -> Result<Self> {
        let engine = match engine {
            "threads" => EngineKind::Threads,
            "aio" => EngineKind::Aio,
            "uring" => EngineKind::IoUring,
            _ => bail!("no engine is called {engine}"),
        };
        let source = match disk {
            "null" => DiskSource::null(DISK_BYTES, &DiskOptions::default())?,
            "file" => {
                // The page cache of a file in memory answers in the submit.
                let file = tempfile::NamedTempFile::new_in("/dev/shm").context("making a file")?;
                let content = vec![7; usize::try_from(DISK_BYTES)?];
                std::fs::write(file.path(), content).context("filling a file")?;
                DiskSource::file(file.path(), &DiskOptions::default())?
            }
            _ => bail!("no disk is called {disk}"),
        };
        let options = BlkOptions { queue_size: RING.size, ..BlkOptions::default() };
        let device = Device::blk(source, options, Arc::new(LogEvents::new("instructions")));
        let bits = [F_VERSION_1, F_FLUSH, F_EVENT_IDX, F_INDIRECT_DESC];
        let wanted = bits.iter().fold(0, |all, bit| all | 1 << bit);
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
        let setup = QueueSetup {
            memory: Arc::clone(&memory),
            ring: RING,
            kick: Some(kick.try_clone().context("duplicating the kick")?),
            call: Some(call.try_clone().context("duplicating the call")?),
            err: None,
        };
        let started = device.begin_start_queue(0, &thread.remote(), setup);
        while started.poll().map(|handle| handle.map(drop)).transpose()?.is_none() {
            thread.turn(Wait::Never)?;
        }
        let ring = driver::Ring::new(memory, RING.config(true, true));
        let guest = Self { thread, ring, kick, _call: call };
        (0..depth).try_for_each(|slot| guest.put_chain(slot, request))?;
        Ok(guest)
    }

    /// Writes what stays as it is: the header and the indirect table of chain `slot`.
    fn put_chain(&self, slot: u16, request: u32) -> Result<()> {
        let own = u64::from(slot);
        let (header, data) = (HEADERS + own * 64, DATA + own * u64::from(DATA_BYTES));
        let sector = own * u64::from(DATA_BYTES) / SECTOR_BYTES;
        self.ring.memory.write(header, &request.to_le_bytes())?;
        self.ring.memory.write(header + 8, &sector.to_le_bytes())?;
        let data_desc = match request {
            VIRTIO_BLK_T_IN => Desc::writable(data, DATA_BYTES),
            _ => Desc::readable(data, DATA_BYTES),
        };
        let status = Desc::writable(header + u64::from(HEADER_BYTES), 1);
        let buffers = [Desc::readable(header, HEADER_BYTES), data_desc, status];
        self.ring.put_indirect(slot, TABLES + own * 64, &buffers);
        Ok(())
    }

    /// Makes a batch available, kicks, and lets the device take turns until all is answered.
    fn run_batch(&mut self, depth: u16) -> Result<()> {
        (0..depth).for_each(|slot| self.ring.put_head(slot));
        let idx = self.ring.next_avail;
        // One call, when the last is answered.
        self.ring.put_used_event(idx.wrapping_sub(1));
        fence(Ordering::SeqCst);
        self.ring.put_avail_idx(idx);
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).context("kicking")?;
        loop {
            let activity = device_turn(&self.thread)?;
            if self.ring.used_idx() == idx && activity == Activity::Idle {
                return Ok(());
            }
            if activity == Activity::Idle {
                let descriptor = PollFd::from_borrowed_fd(self.thread.as_fd(), PollFlags::IN);
                rustix::io::retry_on_intr(|| poll(&mut [descriptor.clone()], None))
                    .context("waiting for the device")?;
            }
        }
    }

    /// All requests of a batch went well.
    fn check(&self, depth: u16) -> Result<()> {
        for slot in 0..depth {
            let mut status = [u8::MAX];
            let status_addr = HEADERS + u64::from(slot) * 64 + u64::from(HEADER_BYTES);
            self.ring.memory.read(status_addr, &mut status)?;
            ensure!(status == [0], "request {slot} ended with status {}", status[0]);
        }
        Ok(())
    }
}

fn new_eventfd() -> Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("making an eventfd")
}
