//! The device as a whole: `Device` on an IoThread that is stepped by hand.
//!
//! The input is a set-up, actions of the device's controller and of the guest's driver, and behind
//! these an image of guest memory. For any input, each queue stops and leaves nothing on the
//! IoThread: no op, no task, no descriptor. No byte outside of the guest's memory is written.

#![no_main]

use std::cell::OnceCell;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use blockio::{DiskOptions, DiskSource, EngineKind, IoThread, IoThreadConfig};
use device::blk::config::{BlkOptions, F_EVENT_IDX, F_FLUSH, F_INDIRECT_DESC, F_VERSION_1};
use device::{Device, LogEvents, QueueHandle, QueueSetup, QueueTuning, Ring};
use libfuzzer_sys::fuzz_target;
use ringhaul_fuzz::{Input, memfd, open_descriptors, turn, wait};
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::driver::{self, Desc, DriverMemory};
use virtqueue::{GuestMemory, MappingRules, RegionConfig};

const DISK_BYTES: u64 = 256 << 10;
const QUEUES: u16 = 2;
/// Length of the file of guest memory.
const FILE_BYTES: u64 = 0x1_a000;
/// Offset and length of areas that no layout maps. They must keep `OUTSIDE_BYTE` everywhere.
const OUTSIDE: [(u64, usize); 3] = [(0, 0x800), (0x1_0800, 0x1000), (0x1_8c00, 0x1400)];
const OUTSIDE_BYTE: u8 = 0xa5;
const OUTSIDE_MAX: usize = 0x1400;

/// A region: guest address, bytes, offset in the file. The pages at both ends are mapped as a
/// whole, so a write beyond a region shows in the file.
type Region = (u64, u64, u64);
const LAYOUTS: [&[Region]; 4] = [
    &[(0, 0x1_0000, 0x800), (0x1_0000, 0x7400, 0x1_1800)],
    &[(0, 0x1_0000, 0x800)],
    &[(0, 0x4000, 0x800), (0x4000, 0x3800, 0x4800), (0x8000, 0x8000, 0x8800)],
    &[],
];

thread_local! {
    static STAGES: [OnceCell<Stage>; 3] = const { [const { OnceCell::new() }; 3] };
}

/// Objects that are made once, and must be as new after each input.
struct Stage {
    thread: IoThread,
    source: DiskSource,
    /// The disk's file, which must exist as long as the disk.
    _file: Option<tempfile::NamedTempFile>,
}

impl Stage {
    fn new(index: usize) -> Self {
        virtqueue::install_sigbus_handler().expect("a handler for SIGBUS");
        let engine = [EngineKind::Threads, EngineKind::Aio, EngineKind::Threads][index].into();
        let config = IoThreadConfig { engine, depth: 64, ..IoThreadConfig::default() };
        let file = (index < 2).then(|| tempfile::NamedTempFile::new().expect("a file"));
        let options = DiskOptions::default();
        let source = match &file {
            None => DiskSource::null(DISK_BYTES, &options),
            Some(file) => {
                file.as_file().set_len(DISK_BYTES).expect("the length of a file");
                DiskSource::file(file.path(), &options)
            }
        };
        let thread = IoThread::new(&config).expect("an IoThread");
        let source = source.expect("a disk");
        Self { thread, source, _file: file }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let index = usize::from(input.u8() % 3);
    STAGES.with(|stages| {
        let stage = stages[index].get_or_init(|| Stage::new(index));
        let before = open_descriptors();
        Run::new(stage, input.u8()).all(input);
        // The task of a queue ends in the turn in which it answers, which was the last turn.
        assert_eq!((stage.thread.io().ops(), stage.thread.io().tasks()), (0, 0), "a leak");
        assert_eq!(open_descriptors(), before, "a descriptor leaks");
    });
});

struct Run<'a> {
    stage: &'a Stage,
    device: Device,
    file: Arc<File>,
    memory: Arc<GuestMemory>,
    layout: &'static [Region],
    truncated: bool,
    queues: [Queue; QUEUES as usize],
}

#[derive(Default)]
struct Queue {
    ring: Option<Ring>,
    handle: Option<QueueHandle>,
    kick: Option<OwnedFd>,
}

impl<'a> Run<'a> {
    fn new(stage: &'a Stage, switches: u8) -> Self {
        let options = BlkOptions {
            serial: "serial".into(),
            num_queues: QUEUES,
            queue_size: 64,
            write_cache: switches & 1 == 0,
            tuning: QueueTuning {
                notify_batch: switches & 2 == 0,
                fixed_buffers: switches & 4 != 0,
                ..QueueTuning::default()
            },
            ..BlkOptions::default()
        };
        let events = Arc::new(LogEvents::new("fuzz"));
        let device = Device::blk(stage.source.clone(), options, events);
        let wanted = [F_VERSION_1, F_FLUSH, F_INDIRECT_DESC, F_EVENT_IDX];
        let bits = wanted.iter().zip(4..8).filter(|(_, at)| switches >> at & 1 != 0);
        let features = bits.fold(0, |all, (bit, _)| all | 1_u64 << bit);
        device.set_features(features).expect("they are offered");
        let file = Arc::new(memfd(FILE_BYTES));
        for (offset, len) in OUTSIDE {
            file.write_all_at(&[OUTSIDE_BYTE; OUTSIDE_MAX][..len], offset).expect("it has room");
        }
        let mut run = Self {
            stage,
            device,
            file,
            memory: Arc::new(GuestMemory::empty()),
            layout: &[],
            truncated: false,
            queues: Default::default(),
        };
        run.map(usize::from(switches >> 3 & 1));
        run
    }

    fn all(mut self, mut input: Input) {
        let count = usize::from(input.u16() & 0x3ff);
        let actions = input.bytes(count);
        // The image fills the first 64 KiB only; actions write the rest.
        let image = input.rest();
        let _ = self.memory.write(0, &image[..image.len().min(0x1_0000)]);
        let mut actions = Input::new(actions);
        while !actions.is_empty() {
            self.step(&mut actions);
        }
        self.stop_all();
        self.check_outside();
    }

    fn step(&mut self, input: &mut Input) {
        let queue = usize::from(input.u8());
        let (queue, action) = (queue >> 7, queue & 0x7f);
        match action % 16 {
            0 => self.start(queue, input),
            1 => self.stop(queue),
            2 => self.kick(queue),
            3 | 4 => self.make_available(queue, input.u8()),
            5 => {
                let (addr, len) = (u64::from(input.u16()), usize::from(input.u8()));
                let _ = self.memory.write(addr, input.bytes(len));
            }
            6 | 7 => self.request(queue, input),
            8 => {
                let features = input.u64();
                self.stop_all();
                let _ = self.device.set_features(features & self.device.features());
                let _ = self.device.set_features(features & input.u64());
            }
            9 => {
                let (offset, len) = (usize::from(input.u8()), usize::from(input.u8() % 8));
                let _ = self.device.write_config(offset, input.bytes(len));
                let _ = self.device.config_space();
            }
            10 => {
                if let Some(handle) = &self.queues[queue].handle {
                    let fd = (input.u8() & 1 == 0).then(new_eventfd);
                    if action & 16 == 0 { handle.set_call(fd) } else { handle.set_err(fd) }
                }
            }
            11 => {
                self.stop_all();
                self.device.reset();
            }
            12 => self.change_memory(usize::from(input.u8()) % LAYOUTS.len()),
            13 => self.truncate(u64::from(input.u8()) << 12),
            _ => {
                turn(&self.stage.thread);
            }
        }
    }

    fn start(&mut self, index: usize, input: &mut Input) {
        self.stop(index);
        let switches = input.u8();
        let place = |input: &mut Input, default: u64| match switches & 1 {
            0 => default + 0x2000 * index as u64,
            _ => u64::from(input.u16()) << 2,
        };
        self.queues[index].ring = Some(Ring {
            size: if switches & 2 == 0 { 1 << (switches >> 5) } else { input.u16() },
            desc_table: place(input, 0x1000),
            avail_ring: place(input, 0x1800),
            used_ring: place(input, 0x2000),
            next_avail: if switches & 4 == 0 { 0 } else { input.u16() },
            next_used: if switches & 4 == 0 { 0 } else { input.u16() },
        });
        self.queues[index].kick = (switches & 8 == 0).then(new_eventfd);
        let call = (switches & 16 == 0).then(new_eventfd);
        self.start_at_ring(index, call);
    }

    /// Starts the queue at the next entry of its ring.
    fn start_at_ring(&mut self, index: usize, call: Option<OwnedFd>) {
        let Some(ring) = self.queues[index].ring else { return };
        let kick = &self.queues[index].kick;
        let setup = QueueSetup {
            memory: Arc::clone(&self.memory),
            ring,
            inflight: None,
            region_is_own: false,
            kick: kick.as_ref().map(|fd| fd.try_clone().expect("a descriptor")),
            call,
            err: Some(new_eventfd()),
            log: None,
        };
        let pending =
            self.device.begin_start_queue(index as u16, &self.stage.thread.remote(), setup);
        self.queues[index].handle = wait(&self.stage.thread, &pending).ok();
    }

    fn stop(&mut self, index: usize) {
        if let Some(handle) = self.queues[index].handle.take() {
            let base = wait(&self.stage.thread, &handle.begin_final_stop());
            if let Some(ring) = &mut self.queues[index].ring {
                (ring.next_avail, ring.next_used) = (base as u16, (base >> 16) as u16);
            }
        }
    }

    fn stop_all(&mut self) {
        (0..self.queues.len()).for_each(|index| self.stop(index));
    }

    fn kick(&self, index: usize) {
        if let Some(kick) = &self.queues[index].kick {
            rustix::io::write(kick, &1_u64.to_ne_bytes()).expect("the counter has room");
        }
    }

    /// The driver's side of a queue, at the place that the input has chosen.
    fn driver(&self, index: usize) -> Option<driver::Ring<UncheckedMemory<'_>>> {
        let ring = self.queues[index].ring?;
        let memory = UncheckedMemory(&self.memory);
        (ring.size > 0).then(|| driver::Ring::new(memory, ring.config(false, true)))
    }

    /// Makes a chain available, like a driver that has filled its descriptors.
    fn make_available(&self, index: usize, head: u8) {
        let Some(mut ring) = self.driver(index) else { return };
        ring.next_avail = ring.avail_idx();
        ring.offer(head.into());
    }

    /// Writes a chain of three descriptors like virtio-blk's, with variations from the input.
    fn request(&self, index: usize, input: &mut Input) {
        let Some(ring) = self.driver(index) else { return };
        let head = u16::from(input.u8() % 16);
        let (kind, sector) = (u32::from(input.u8()), u64::from(input.u16()));
        let (pages, odd) = (u32::from(input.u8()), u32::from(input.u8()));
        let header_addr = 0x5000 + u64::from(head) * 32;
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        let _ = self.memory.write(header_addr, &header);
        let len = match kind {
            // Discard and write zeroes carry segments of 16 bytes.
            11 | 13 => (pages & 7) * 16,
            _ => (pages & 31) * 512,
        } + if odd & 0xc0 == 0xc0 { odd & 63 } else { 0 };
        let data = 0x6000 + u64::from(odd) * 64;
        let data = match kind {
            0 | 8 => Desc::writable(data, len),
            _ => Desc::readable(data, len),
        };
        let header = Desc::readable(header_addr, 16);
        let status = Desc::writable(header_addr + 16, 1);
        ring.put_chain(head, &[header, data, status]);
        self.make_available(index, head as u8);
    }

    /// Replaces the memory map like vhost-user: the old map is unused once the new one is there.
    fn change_memory(&mut self, layout: usize) {
        let running = self.queues.each_ref().map(|queue| queue.handle.is_some());
        self.stop_all();
        self.map(layout);
        for (index, _) in running.iter().enumerate().filter(|(_, running)| **running) {
            self.start_at_ring(index, Some(new_eventfd()));
        }
    }

    fn map(&mut self, layout: usize) {
        let region = |&(guest_addr, size, file_offset): &Region| RegionConfig {
            guest_addr,
            size,
            user_addr: guest_addr,
            file: Arc::clone(&self.file),
            file_offset,
        };
        // The file may be too short by now.
        let regions: Vec<_> = LAYOUTS[layout].iter().map(region).collect();
        if let Ok(memory) = GuestMemory::new(&regions, &MappingRules::default()) {
            self.memory = Arc::new(memory);
            self.layout = LAYOUTS[layout];
        }
    }

    /// Truncates the memory file, like a front-end that takes memory away.
    fn truncate(&mut self, bytes: u64) {
        self.file.set_len(bytes.min(FILE_BYTES)).expect("a memfd gets shorter");
        self.truncated = true;
    }

    /// Checks that bytes around the regions are unchanged.
    fn check_outside(&self) {
        if self.truncated {
            return;
        }
        for (offset, len) in OUTSIDE {
            let mut bytes = [0; OUTSIDE_MAX];
            let bytes = &mut bytes[..len];
            self.file.read_exact_at(bytes, offset).expect("it has its length");
            // Compared as a whole: libFuzzer traces each single comparison of a byte.
            if *bytes != [OUTSIDE_BYTE; OUTSIDE_MAX][..len] {
                let at = bytes.iter().position(|byte| *byte != OUTSIDE_BYTE);
                panic!("byte {at:?} behind {offset:#x} of the file lies outside of all regions");
            }
        }
    }
}

/// Memory of a ring at any address: accesses to unmapped addresses are ignored.
struct UncheckedMemory<'a>(&'a GuestMemory);

impl DriverMemory for UncheckedMemory<'_> {
    fn load(&self, addr: u64, bytes: &mut [u8]) {
        let _ = self.0.read(addr, bytes);
    }

    fn store(&self, addr: u64, bytes: &[u8]) {
        let _ = self.0.write(addr, bytes);
    }
}

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}
