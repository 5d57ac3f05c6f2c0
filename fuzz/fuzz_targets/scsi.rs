//! virtio-scsi: two devices with units on one disk, on an IoThread that is stepped by hand.
//!
//! The input is what their drivers do: commands of any CDB, cut into buffers of any length, task
//! management, buffers for events, resets; and what the operator does with units. Each chain is
//! answered once, responses are ones that virtio-scsi has, and when all queues have stopped nothing
//! is left on the IoThread.

#![no_main]

use std::cell::OnceCell;
use std::collections::HashMap;
use std::sync::Arc;

use blockio::{DiskOptions, DiskSource, EngineKind, IoThread, IoThreadConfig};
use device::scsi::ScsiDevice;
use device::scsi::access::DiskAccess;
use device::scsi::address::UnitAddress;
use device::scsi::config::ScsiOptions;
use device::scsi::unit::UnitOptions;
use device::{Device, LogEvents, QueueHandle, QueueSetup, Ring};
use libfuzzer_sys::fuzz_target;
use ringhaul_fuzz::{Input, open_descriptors, turn, wait};
use virtqueue::GuestMemory;
use virtqueue::driver::{Desc, Driver};

const DISK_BYTES: u64 = 64 << 10;
/// Control, events, two for requests.
const QUEUES: usize = 4;
const DEVICES: usize = 2;
const ENTRIES: u16 = 32;
/// Each queue has its ring, and then a slot for the buffers of each entry.
const RING_BYTES: u64 = 0x1000;
const SLOT_BYTES: u64 = 0x2000;
const QUEUE_BYTES: u64 = RING_BYTES + ENTRIES as u64 * SLOT_BYTES;
const MEMORY_BYTES: u64 = (DEVICES * QUEUES) as u64 * QUEUE_BYTES;
const RESPONSE_BYTES: u64 = 108;
/// Where a slot has what the device writes.
const WRITABLE: u64 = 0x1000;

thread_local! {
    static STAGE: OnceCell<Stage> = const { OnceCell::new() };
}

/// What is made once, and must be as new after each input.
struct Stage {
    thread: IoThread,
    source: DiskSource,
    _file: tempfile::NamedTempFile,
}

impl Stage {
    fn new() -> Self {
        let engine = EngineKind::Aio.into();
        let config = IoThreadConfig { engine, depth: 64, ..IoThreadConfig::default() };
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(DISK_BYTES).expect("the length of a file");
        let source = DiskSource::file(file.path(), &DiskOptions::default()).expect("a disk");
        Self { thread: IoThread::new(&config).expect("an IoThread"), source, _file: file }
    }
}

fuzz_target!(|bytes: &[u8]| {
    STAGE.with(|stage| {
        let stage = stage.get_or_init(Stage::new);
        let before = open_descriptors();
        let mut run = Run::new(stage);
        let mut input = Input::new(bytes);
        while !input.is_empty() {
            run.step(&mut input);
        }
        run.stop_all();
        drop(run);
        turn(&stage.thread);
        assert_eq!((stage.thread.io().ops(), stage.thread.io().tasks()), (0, 0), "a leak");
        assert_eq!(open_descriptors(), before, "a descriptor leaks");
    });
});

struct Queue {
    driver: Driver<Arc<GuestMemory>>,
    ring: Ring,
    handle: Option<QueueHandle>,
    /// Where what the device writes to a chain is, and how long, by its head.
    out: HashMap<u32, (u64, u32)>,
}

struct Run<'a> {
    stage: &'a Stage,
    memory: Arc<GuestMemory>,
    devices: Vec<Device>,
    queues: Vec<Queue>,
    access: Arc<DiskAccess>,
}

fn scsi(device: &Device) -> &ScsiDevice {
    match device {
        Device::Scsi(scsi) => scsi,
        Device::Blk(_) => unreachable!("they are virtio-scsi"),
    }
}

impl<'a> Run<'a> {
    fn new(stage: &'a Stage) -> Self {
        let memory = GuestMemory::anonymous(&[(0, MEMORY_BYTES)]).expect("memory");
        let memory = Arc::new(memory);
        let queues = (0..DEVICES * QUEUES).map(|index| {
            let at = index as u64 * QUEUE_BYTES;
            let ring = Ring {
                size: ENTRIES,
                desc_table: at,
                avail_ring: at + 0x400,
                used_ring: at + 0x800,
                next_avail: 0,
            };
            let driver = Driver::new(Arc::clone(&memory), ring.config(false, false));
            Queue { driver, ring, handle: None, out: HashMap::new() }
        });
        let options = ScsiOptions { num_queues: 2, ..ScsiOptions::default() };
        let device = |_| {
            let device = Device::scsi(options.clone(), Arc::new(LogEvents::new("fuzz")));
            device.set_features(device.features() & !(1 << 28 | 1 << 29)).expect("offered");
            device
        };
        let (queues, devices) = (queues.collect(), (0..DEVICES).map(device).collect());
        let mut run = Self { stage, memory, devices, queues, access: Arc::default() };
        (0..DEVICES).for_each(|device| run.add_unit(device, 0));
        (0..DEVICES * QUEUES).for_each(|queue| run.start(queue));
        run
    }

    fn add_unit(&self, device: usize, lun: u8) {
        let options = UnitOptions {
            vendor: "vendor".into(),
            product: String::new(),
            revision: "1".into(),
            serial: "serial".into(),
            naa: [0x30; 8],
            rotational: lun & 1 != 0,
            discard: lun & 2 == 0,
            write_cache: lun & 4 == 0,
            access: Arc::clone(&self.access),
            port: [0x30, 0, 0, 0, 0, 0, u8::try_from(device).expect("few"), lun],
        };
        let address = UnitAddress { target: 0, lun: lun.into() };
        let _ = scsi(&self.devices[device]).add_unit(address, self.stage.source.clone(), options);
    }

    fn step(&mut self, input: &mut Input) {
        let choice = input.u8();
        let device = usize::from(choice >> 7);
        match choice & 0x1f {
            0 => self.task_management(device, input),
            1 => self.add_unit(device, input.u8() & 7),
            2 => {
                let address = UnitAddress { target: 0, lun: u16::from(input.u8() & 7) };
                drop(scsi(&self.devices[device]).remove_unit(address));
            }
            3 => {
                let address = UnitAddress { target: 0, lun: u16::from(input.u8() & 7) };
                if let Some(access) = scsi(&self.devices[device]).access(address) {
                    access.refresh();
                }
            }
            4 => {
                let at = WRITABLE;
                self.offer(device * QUEUES + 1, &[], &[], 16 + u32::from(input.u8() & 1), at);
            }
            5 => {
                let queue = device * QUEUES + usize::from(input.u8() & 3);
                self.stop(queue);
                self.start(queue);
            }
            6 => {
                (0..QUEUES).for_each(|queue| self.stop(device * QUEUES + queue));
                self.devices[device].reset();
                let features = self.devices[device].features() & !(1 << 28 | 1 << 29);
                self.devices[device].set_features(features).expect("offered");
                (0..QUEUES).for_each(|queue| self.start(device * QUEUES + queue));
            }
            7 => {
                let offset = usize::from(input.u8());
                let _ = self.devices[device].write_config(offset, input.bytes(4));
                let _ = self.devices[device].config_space();
            }
            8..=11 => {
                turn(&self.stage.thread);
            }
            _ => self.command(device, choice >> 5 & 1, input),
        }
        self.take_used();
    }

    fn command(&mut self, device: usize, queue: u8, input: &mut Input) {
        let mut request = vec![0; 51];
        let how = input.u8();
        let lun = match how & 7 {
            0 => input.u64().to_le_bytes(),
            1 => [0xc1, 1, 0, 0, 0, 0, 0, 0],
            2 => [1, 0, 0x40, input.u8() & 7, 0, 0, 0, 0],
            _ => [1, 0, 0x40, 0, 0, 0, 0, 0],
        };
        request[..8].copy_from_slice(&lun);
        request[8] = input.u8() & 3;
        let cdb_bytes = input.u8() & 0x1f;
        let cdb = input.bytes(cdb_bytes.into());
        request[19..19 + cdb.len()].copy_from_slice(cdb);
        if how & 8 != 0 {
            // Short ranges near the start of the disk, where most commands go well.
            request[21..24].fill(0);
        }
        let out = usize::from(input.u16() % 2049);
        let given_bytes = input.u8();
        let given = input.bytes(out.min(given_bytes.into()));
        request.extend(given);
        request.resize(51 + if how & 16 == 0 { given.len() } else { out }, 0);
        if how & 0xe0 == 0xe0 {
            request.truncate(usize::from(input.u8()));
        }
        let room = match how >> 5 & 3 {
            0 => 108,
            1 => 108 + u32::from(input.u16() % 2049),
            2 => 108 + 512,
            _ => u32::from(input.u8()),
        };
        let cuts = [u64::from(input.u8()), u64::from(input.u8())];
        self.offer(device * QUEUES + 2 + usize::from(queue), &request, &cuts, room, WRITABLE);
    }

    fn task_management(&mut self, device: usize, input: &mut Input) {
        let mut request = vec![0; 24];
        request[0] = if input.u8() & 7 == 0 { input.u8() & 3 } else { 0 };
        request[4] = input.u8() % 9;
        request[8..16].copy_from_slice(&[1, 0, 0x40, input.u8() & 3, 0, 0, 0, 0]);
        request[16] = input.u8() & 3;
        request.truncate(24 - usize::from(input.u8() >> 4 & 7));
        self.offer(device * QUEUES, &request, &[], u32::from(input.u8() & 7), WRITABLE);
    }

    /// Makes a chain available whose readable part is cut at these places.
    fn offer(&mut self, index: usize, sent: &[u8], cuts: &[u64], room: u32, at: u64) {
        let queue = &mut self.queues[index];
        if queue.driver.room() < 5 {
            return;
        }
        let head = u64::from(queue.driver.next_head().expect("there is room"));
        let slot = index as u64 * QUEUE_BYTES + RING_BYTES + head * SLOT_BYTES;
        let _ = self.memory.write(slot, sent);
        let poison = vec![0xee; room as usize];
        let _ = self.memory.write(slot + at, &poison);
        let mut chain = Vec::new();
        let (mut from, len) = (0, sent.len() as u64);
        for to in cuts.iter().copied().chain([len]) {
            let to = to.clamp(from, len);
            if to > from {
                let bytes = u32::try_from(to - from).expect("a short request");
                chain.push(Desc::readable(slot + from, bytes));
            }
            from = to;
        }
        let first = room.min(u32::try_from(cuts.first().copied().unwrap_or(7)).expect("a byte"));
        for (from, bytes) in [(0, first), (first, room - first)] {
            if bytes > 0 {
                chain.push(Desc::writable(slot + at + u64::from(from), bytes));
            }
        }
        if chain.is_empty() {
            return;
        }
        let head = queue.driver.add(&chain, None);
        queue.driver.publish();
        let before = queue.out.insert(head.into(), (slot + at, room));
        assert!(before.is_none(), "a head is out twice");
    }

    /// Looks at what has been answered.
    fn take_used(&mut self) {
        for (index, queue) in self.queues.iter_mut().enumerate() {
            while let Some(used) = queue.driver.take_used() {
                let Some((at, room)) = queue.out.remove(&used.head) else {
                    panic!("chain {} of queue {index} is answered twice", used.head);
                };
                assert!(used.bytes <= room, "{} bytes of {room} are written", used.bytes);
                if index % QUEUES < 2 || u64::from(used.bytes) < RESPONSE_BYTES {
                    continue;
                }
                let mut response = [0; RESPONSE_BYTES as usize];
                self.memory.read(at, &mut response).expect("it is in memory");
                let (status, code) = (response[10], response[11]);
                assert!([0, 2, 8, 0x18].contains(&status), "status {status:#x}");
                assert!([0, 1, 2, 3, 4, 9].contains(&code), "response {code}");
                assert!(status == 0 || code == 0, "status {status:#x} with response {code}");
                assert_eq!(status == 2, response[0] > 0, "sense data without a reason");
            }
        }
    }

    fn start(&mut self, index: usize) {
        let (device, number) = (index / QUEUES, index % QUEUES);
        let queue = &mut self.queues[index];
        let setup = QueueSetup {
            memory: Arc::clone(&self.memory),
            ring: queue.ring,
            // It is looked at now and then.
            inflight: None,
            kick: None,
            call: None,
            err: None,
        };
        let number = u16::try_from(number).expect("few");
        let remote = self.stage.thread.remote();
        let pending = self.devices[device].begin_start_queue(number, &remote, setup);
        queue.handle = Some(wait(&self.stage.thread, &pending).expect("the ring is good"));
    }

    fn stop(&mut self, index: usize) {
        if let Some(handle) = self.queues[index].handle.take() {
            let next_avail = wait(&self.stage.thread, &handle.begin_stop());
            self.take_used();
            let queue = &mut self.queues[index];
            queue.ring.next_avail = next_avail;
        }
    }

    fn stop_all(&mut self) {
        (0..self.queues.len()).for_each(|queue| self.stop(queue));
    }
}
