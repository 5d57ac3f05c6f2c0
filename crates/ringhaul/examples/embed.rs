//! A VMM with a virtio-blk device of its own: no vhost-user, no socket, no second process.
//!
//! A VMM has guest memory, a thread for I/O, and two eventfds for each queue: one that KVM writes
//! when the guest kicks (ioeventfd), and one that makes KVM call the guest (irqfd). That is all
//! the device needs. [`main`] is what the VMM does, from an open disk to a stopped queue.
//! [`Driver`] plays the guest: a VMM has no such thing, Linux in the guest does it.
//!
//! Run it with `cargo run --package ringhaul --example embed`.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, Result, ensure};
use blockio::{DiskOptions, DiskSource, EngineKind, IoThreadConfig};
use ringhaul::blk::BlkDevice;
use ringhaul::blk::config::{BlkOptions, F_DISCARD, F_FLUSH, F_VERSION_1, SECTOR_BYTES};
use ringhaul::io_threads::IoThreads;
use ringhaul::queue::{QueueSetup, Ring};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_OK, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};
use virtqueue::GuestMemory;

const DISK_BYTES: u64 = 8 << 20;
const MEMORY_BYTES: u64 = 1 << 20;

/// Where the guest's driver has put the queue. A VMM learns this from its transport's registers.
const RING: Ring =
    Ring { size: 16, desc_table: 0x1000, avail_ring: 0x2000, used_ring: 0x3000, next_avail: 0 };

pub(crate) fn main() -> Result<()> {
    // The disk. A VMM that wants direct I/O says so here, and takes `EngineKind::Aio` below.
    let file = tempfile::NamedTempFile::new().context("cannot make a file for the disk")?;
    file.as_file().set_len(DISK_BYTES).context("cannot give the disk its size")?;
    let source = DiskSource::file(file.path(), &DiskOptions::default())?;

    // The device, and a thread that does its I/O. Any number of devices can share the thread, and
    // the queues of one device can be on several.
    let options = BlkOptions {
        name: "embedded".into(),
        serial: "embed-0".into(),
        queue_size: RING.size,
        ..BlkOptions::default()
    };
    let device = BlkDevice::new(source, options);
    let config = IoThreadConfig { engine: EngineKind::Threads, ..IoThreadConfig::default() };
    let threads = IoThreads::start(1, &config, &std::sync::Arc::new(|| std::process::exit(4)))?;

    // Guest memory. A VMM that has it in a file, as most do, maps it with `GuestMemory::new`.
    let memory = Arc::new(GuestMemory::anonymous(&[(0, MEMORY_BYTES)])?);

    // The driver reads what is offered and the configuration space, and says what it will use.
    let offered = device.features();
    let wanted = [F_VERSION_1, F_FLUSH, F_DISCARD].iter().fold(0, |all, bit| all | 1 << bit);
    device.set_features(offered & wanted).context("cannot negotiate features")?;
    let [s0, s1, s2, s3, s4, s5, s6, s7, ..] = device.config_space();
    let sectors = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    ensure!(sectors * SECTOR_BYTES == DISK_BYTES, "the device shows {sectors} sectors");
    println!("device: {sectors} sectors, features {:#x} of {offered:#x}", offered & wanted);

    // The queue. From here on the IoThread serves it, whatever this thread does.
    let (kick, call) = (new_eventfd()?, new_eventfd()?);
    let setup = QueueSetup {
        memory: Arc::clone(&memory),
        ring: RING,
        kick: Some(kick.try_clone().context("cannot duplicate the kick")?),
        call: Some(call.try_clone().context("cannot duplicate the call")?),
        err: None,
    };
    let queue = device.start_queue(&threads.remotes()[0], setup)?;

    let mut driver = Driver { memory, kick, call, next_avail: 0, next_used: 0 };
    run_guest(&mut driver, file.as_file())?;

    // The guest resets the device. What was taken is answered first; then the device is as new,
    // and the queue could start again where it stopped.
    let next_avail = queue.stop().context("the IoThread has ended")?;
    ensure!(next_avail == driver.next_avail, "{next_avail} chains were taken");
    device.reset();
    println!("queue stopped after {next_avail} requests");
    Ok(())
}

fn new_eventfd() -> Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("cannot make an eventfd")
}

/// What the guest does with its disk, and a look at the file behind it.
fn run_guest(driver: &mut Driver, file: &File) -> Result<()> {
    let sector_of = |slot: u16| 64 + u64::from(slot) * DATA_BYTES / SECTOR_BYTES;
    let pattern = |slot: u16| -> Vec<u8> {
        (0..DATA_BYTES)
            .map(|at| at.wrapping_mul(31).wrapping_add(slot.into()).to_le_bytes()[0])
            .collect()
    };

    // Several requests, one kick. The device answers in any order.
    for slot in 0..SLOTS {
        driver.memory.write(data_of(slot), &pattern(slot))?;
        driver.add(slot, VIRTIO_BLK_T_OUT, sector_of(slot), DATA_BYTES)?;
    }
    driver.kick()?;
    driver.wait(SLOTS)?;
    println!("wrote {SLOTS} times {DATA_BYTES} bytes");

    driver.add(0, VIRTIO_BLK_T_FLUSH, 0, 0)?;
    driver.kick()?;
    driver.wait(1)?;
    println!("flushed: the file takes {} KiB of its disk", file.metadata()?.blocks() / 2);

    for slot in 0..SLOTS {
        driver.memory.write(data_of(slot), &pattern(SLOTS))?;
        driver.add(slot, VIRTIO_BLK_T_IN, sector_of(slot), DATA_BYTES)?;
    }
    driver.kick()?;
    driver.wait(SLOTS)?;
    for slot in 0..SLOTS {
        let mut seen = pattern(SLOTS);
        driver.memory.read(data_of(slot), &mut seen)?;
        ensure!(seen == pattern(slot), "slot {slot} read something else than it wrote");
        file.read_exact_at(&mut seen, sector_of(slot) * SECTOR_BYTES)?;
        ensure!(seen == pattern(slot), "the file does not have what slot {slot} wrote");
    }
    println!("read them back: all as written, in the file too");

    // One segment for all that was written (virtio 1.3, section 5.2.6): sector, sectors, flags.
    let sectors = u32::from(SLOTS) * u32::try_from(DATA_BYTES / SECTOR_BYTES)?;
    let mut segment = sector_of(0).to_le_bytes().to_vec();
    segment.extend(sectors.to_le_bytes());
    segment.extend(0_u32.to_le_bytes());
    driver.memory.write(data_of(0), &segment)?;
    driver.add(0, VIRTIO_BLK_T_DISCARD, 0, segment.len().try_into()?)?;
    driver.kick()?;
    driver.wait(1)?;
    println!("discarded: the file takes {} KiB of its disk", file.metadata()?.blocks() / 2);
    Ok(())
}

/// Requests that the driver has room for; each takes three descriptors.
const SLOTS: u16 = 4;
const DESCRIPTORS: u16 = 3;
/// Data of one request.
const DATA_BYTES: u64 = 4096;
const HEADER_BYTES: u64 = 16;
/// A limit that only ends a hopeless wait.
const ANSWER_LIMIT: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// Flags of a descriptor (virtio 1.3, section 2.7.5).
const F_NEXT: u16 = 1;
const F_WRITE: u16 = 2;

/// Guest address of a slot's header; the status byte follows it.
fn header_of(slot: u16) -> u64 {
    0x4000 + u64::from(slot) * 64
}

/// Guest address of a slot's data.
fn data_of(slot: u16) -> u64 {
    0x1_0000 + u64::from(slot) * DATA_BYTES
}

/// The driver's side of one virtqueue, as simple as it can be: no event idx, no indirect tables.
struct Driver {
    memory: Arc<GuestMemory>,
    kick: OwnedFd,
    call: OwnedFd,
    /// The avail idx, as last written.
    next_avail: u16,
    /// The used element to look at next.
    next_used: u16,
}

impl Driver {
    /// Makes one request available (virtio 1.3, sections 5.2.6 and 2.7.13).
    fn add(&mut self, slot: u16, kind: u32, sector: u64, data_bytes: u64) -> Result<()> {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend(0_u32.to_le_bytes());
        header.extend(sector.to_le_bytes());
        self.memory.write(header_of(slot), &header)?;
        let status = header_of(slot) + HEADER_BYTES;
        // No status of the device, so that one that was not written is seen.
        self.memory.write(status, &[u8::MAX])?;

        let head = slot * DESCRIPTORS;
        let data_flags = if kind == VIRTIO_BLK_T_IN { F_NEXT | F_WRITE } else { F_NEXT };
        if data_bytes > 0 {
            self.descriptor(head, header_of(slot), HEADER_BYTES, F_NEXT, head + 1)?;
            self.descriptor(head + 1, data_of(slot), data_bytes, data_flags, head + 2)?;
        } else {
            self.descriptor(head, header_of(slot), HEADER_BYTES, F_NEXT, head + 2)?;
        }
        self.descriptor(head + 2, status, 1, F_WRITE, 0)?;

        let entry = RING.avail_ring + 4 + u64::from(self.next_avail % RING.size) * 2;
        self.memory.write(entry, &head.to_le_bytes())?;
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(())
    }

    fn descriptor(&self, index: u16, addr: u64, len: u64, flags: u16, next: u16) -> Result<()> {
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend(u32::try_from(len)?.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        Ok(self.memory.write(RING.desc_table + u64::from(index) * 16, &bytes)?)
    }

    /// Shows the device what was added. In a guest the write to the eventfd is one to a register
    /// of the transport, which KVM turns into the same.
    fn kick(&self) -> Result<()> {
        // The device must see the entries before it sees the idx.
        fence(Ordering::SeqCst);
        self.memory.write(RING.avail_ring + 2, &self.next_avail.to_le_bytes())?;
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).context("cannot kick")?;
        Ok(())
    }

    /// Waits until `count` requests are answered, all of them well.
    fn wait(&mut self, count: u16) -> Result<()> {
        let wanted = self.next_used.wrapping_add(count);
        while self.next_used != wanted {
            let mut idx = [0; 2];
            self.memory.read(RING.used_ring + 2, &mut idx)?;
            if self.next_used == u16::from_le_bytes(idx) {
                self.sleep()?;
                continue;
            }
            // What the device wrote before the idx is to be seen after it.
            fence(Ordering::SeqCst);
            let mut head = [0; 4];
            let element = RING.used_ring + 4 + u64::from(self.next_used % RING.size) * 8;
            self.memory.read(element, &mut head)?;
            let slot = u16::try_from(u32::from_le_bytes(head))? / DESCRIPTORS;
            let mut status = [0];
            self.memory.read(header_of(slot) + HEADER_BYTES, &mut status)?;
            ensure!(u32::from(status[0]) == VIRTIO_BLK_S_OK, "slot {slot}: status {}", status[0]);
            self.next_used = self.next_used.wrapping_add(1);
        }
        Ok(())
    }

    /// Sleeps until the device calls.
    fn sleep(&self) -> Result<()> {
        let answered = poll(&mut [PollFd::new(&self.call, PollFlags::IN)], Some(&ANSWER_LIMIT))
            .context("cannot wait for the device")?;
        ensure!(answered > 0, "the device does not answer");
        // Calls that came together are one: the counter goes back to zero.
        rustix::io::read(&self.call, &mut [0; 8]).context("cannot take the call")?;
        Ok(())
    }
}
