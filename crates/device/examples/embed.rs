//! A VMM with a virtio-blk device in its own process: no socket, no second process.
//!
//! A VMM has guest memory, a thread for I/O, and two eventfds for each queue: one that KVM writes
//! when the guest kicks (ioeventfd), and one that makes KVM call the guest (irqfd). [`main`] shows
//! everything that the VMM does with them. [`Guest`] plays the driver, which is Linux in a real
//! guest.
//!
//! Run it with `cargo run --package ringhaul-device --example embed`.

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};

use anyhow::{Context, Result, ensure};
use blockio::{DiskOptions, DiskSource, IoThread, IoThreadConfig};
use device::blk::config::{BlkOptions, F_FLUSH, F_VERSION_1};
use device::{Device, LogEvents, QueueSetup, Ring};
use rustix::event::{EventfdFlags, eventfd};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use virtqueue::GuestMemory;
use virtqueue::driver::{self, Desc};

/// The place of the driver's queue. A VMM learns it from its transport's registers.
const RING: Ring = Ring {
    size: 16,
    desc_table: 0x1000,
    avail_ring: 0x2000,
    used_ring: 0x3000,
    next_avail: 0,
    next_used: 0,
};

pub(crate) fn main() -> Result<()> {
    // The disk, and the device on it.
    let file = tempfile::NamedTempFile::new()?;
    file.as_file().set_len(8 << 20)?;
    let source = DiskSource::file(file.path(), &DiskOptions::default())?;
    let of_thread = source.clone();
    let options = BlkOptions { serial: "embed-0".into(), ..BlkOptions::default() };
    let device = Device::blk(source, options, Arc::new(LogEvents::new("embedded")));

    // A thread for the I/O. Any number of devices can share it.
    let (sender, receiver) = mpsc::sync_channel(1);
    let io_thread = std::thread::spawn(move || -> Result<(), blockio::Error> {
        // Tries the engines on the disk. `DiskOptions` selects direct I/O.
        let thread = IoThread::for_disk(&of_thread, &IoThreadConfig::default())?;
        let _ = sender.send(thread.remote());
        thread.run()
    });
    let remote = receiver.recv().context("the IoThread has not started")?;

    // Guest memory. A VMM with memory in a file, as usual, maps it with `GuestMemory::new`.
    let memory = Arc::new(GuestMemory::anonymous(&[(0, 1 << 20)])?);

    // The driver reads the offered features and the configuration space, and chooses features.
    device.set_features(device.features() & (1 << F_VERSION_1 | 1 << F_FLUSH))?;
    let sectors: [u8; 8] = device.read_config(0, 8).try_into().unwrap_or_default();
    println!("the guest sees a disk of {} sectors", u64::from_le_bytes(sectors));

    // From here on the IoThread serves the queue, independently of this thread.
    let new_eventfd = || eventfd(0, EventfdFlags::CLOEXEC);
    let (kick, call) = (new_eventfd()?, new_eventfd()?);
    let (kicked, called) = (kick.try_clone()?, call.try_clone()?);
    let setup = QueueSetup::new(Arc::clone(&memory), RING, kicked, called);
    let queue = device.start_queue(0, &remote, setup)?;

    let mut guest =
        Guest { ring: driver::Ring::new(memory, RING.config(false, false)), kick, call };
    guest.ring.memory.write(DATA, b"hello")?;
    guest.request(VIRTIO_BLK_T_OUT, Desc::readable(DATA, 512))?;
    guest.ring.memory.write(DATA, b"-----")?;
    guest.request(VIRTIO_BLK_T_IN, Desc::writable(DATA, 512))?;
    let mut read = [0; 5];
    guest.ring.memory.read(DATA, &mut read)?;
    ensure!(&read == b"hello", "the disk has kept {read:?}");

    // The guest resets the device. Requests that were taken are answered first.
    let taken = queue.stop().context("the IoThread has ended")?;
    device.reset();
    println!("{taken} requests: {:?}", device.totals());
    remote.post(|io| io.stop());
    io_thread.join().map_err(|_| anyhow::anyhow!("the IoThread has panicked"))??;
    Ok(())
}

/// Guest addresses of the request's header, status and data.
const HEADER: u64 = 0x4000;
const STATUS: u64 = 0x4010;
const DATA: u64 = 0x5000;

struct Guest {
    ring: driver::Ring<Arc<GuestMemory>>,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Guest {
    /// Makes one request for sector 8 and waits until it is answered (virtio 1.3, sections 5.2.6
    /// and 2.7.13).
    fn request(&mut self, kind: u32, data: Desc) -> Result<()> {
        self.ring.memory.write(HEADER, &u64::from(kind).to_le_bytes())?;
        self.ring.memory.write(HEADER + 8, &8_u64.to_le_bytes())?;
        self.ring.memory.write(STATUS, &[u8::MAX])?;
        let chain = [Desc::readable(HEADER, 16), data, Desc::writable(STATUS, 1)];
        self.ring.put_chain(0, &chain);
        self.ring.offer(0);
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes())?;
        while self.ring.take_used().is_none() {
            rustix::io::read(&self.call, &mut [0; 8])?;
        }
        let mut status = [0];
        self.ring.memory.read(STATUS, &mut status)?;
        ensure!(status == [0], "the request ended with status {}", status[0]);
        Ok(())
    }
}
