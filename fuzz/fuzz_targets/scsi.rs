//! virtio-scsi: two devices with units on one disk, on an IoThread that is stepped by hand.
//!
//! The input holds actions of the drivers: commands of any CDB, cut into buffers of any length,
//! task management, buffers for events, resets. It also holds actions of the operator on units.
//! Each chain is answered once, with a response that virtio-scsi defines. When all queues have
//! stopped, nothing is left on the IoThread.

#![no_main]

use std::cell::OnceCell;
use std::collections::HashMap;
use std::sync::Arc;

use blockio::{DiskOptions, DiskSource, EngineKind, IoThread, IoThreadConfig};
use device::access::DiskAccess;
use device::scsi::ScsiDevice;
use device::scsi::config::ScsiOptions;
use device::scsi::unit::UnitOptions;
use device::unit_address::UnitAddress;
use device::{Device, LogEvents, QueueHandle, QueueSetup, Ring};
use libfuzzer_sys::fuzz_target;
use ringhaul_fuzz::{Input, open_descriptors, turn, wait};
use virtqueue::GuestMemory;
use virtqueue::driver::{Desc, Driver};

const DISK_BYTES: u64 = 64 << 10;
/// A control queue, an event queue, two request queues.
const QUEUES: usize = 4;
const DEVICES: usize = 2;
const ENTRIES: u16 = 32;
/// Each queue has its ring, and then a slot for the buffers of each entry.
const RING_BYTES: u64 = 0x1000;
const SLOT_BYTES: u64 = 0x2000;
const QUEUE_BYTES: u64 = RING_BYTES + ENTRIES as u64 * SLOT_BYTES;
const MEMORY_BYTES: u64 = (DEVICES * QUEUES) as u64 * QUEUE_BYTES;
const RESPONSE_BYTES: u64 = 108;
/// Offset of the writable buffers in a slot.
const WRITABLE: u64 = 0x1000;
/// An address without memory.
const NOWHERE: u64 = 1 << 40;

/// Functions of task management (virtio 1.3, section 5.6.6.2); the last two only query.
const FUNCTIONS: [u32; 7] = [0, 1, 3, 4, 5, QUERY_TASK, QUERY_TASK_SET];
const QUERY_TASK: u32 = 6;
const QUERY_TASK_SET: u32 = 7;

/// Responses of virtio-scsi.
const OK: u8 = 0;
const BAD_TARGET: u8 = 3;
const FAILURE: u8 = 9;
const SUCCEEDED: u8 = 10;
const REJECTED: u8 = 11;
const INCORRECT_LUN: u8 = 12;

thread_local! {
    static STAGE: OnceCell<Stage> = const { OnceCell::new() };
}

/// Objects that are made once, and must be as new after each input.
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

/// Features of rings that the driver here does not have.
const LEFT_OUT: u64 = 1 << 28 | 1 << 29 | 1 << 34;

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
    /// Chains that are not answered, by their heads.
    out: HashMap<u32, PendingChain>,
}

/// A chain that is not answered.
struct PendingChain {
    sent: Vec<u8>,
    /// Address and length of the room that the device may write.
    at: u64,
    room: u32,
    has_fault: bool,
}

/// A fault of a chain.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The buffer for the device to read is not memory.
    NoOut,
    /// The buffer for the device to write, behind the response, is not memory.
    NoIn,
    /// A readable buffer follows a writable one.
    Order,
}

impl Fault {
    /// A fault in some of the cases.
    fn draw(input: &mut Input) -> Option<Self> {
        match input.u8() {
            0xf0..=0xf4 => Some(Self::NoOut),
            0xf5..=0xfa => Some(Self::NoIn),
            0xfb..=0xff => Some(Self::Order),
            _ => None,
        }
    }
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

/// A LUN address: any, or mostly the address of a unit that may exist.
fn lun(how: u8, input: &mut Input) -> [u8; 8] {
    match how & 7 {
        0 => input.u64().to_le_bytes(),
        1 => [0xc1, 1, 0, 0, 0, 0, 0, 0],
        2 => [1, 0, 0x40, input.u8() & 7, 0, 0, 0, 0],
        _ => [1, 0, 0x40, 0, 0, 0, 0, 0],
    }
}

/// Checks that the control queue may give this answer.
fn check_response(out: &PendingChain, response: &[u8]) {
    let word = |at: usize| {
        out.sent[at..].first_chunk().map_or(u32::MAX, |bytes| u32::from_le_bytes(*bytes))
    };
    match *response {
        [] => {}
        _ if out.has_fault => assert_eq!(response[0], FAILURE),
        _ if out.sent.len() < 4 => assert_eq!(response, [FAILURE]),
        [code] if word(0) == 0 && out.sent.len() < 24 => assert_eq!(code, FAILURE),
        [code] if word(0) == 0 => {
            let function = word(4);
            let is_known = FUNCTIONS.contains(&function);
            let asks = [QUERY_TASK, QUERY_TASK_SET].contains(&function);
            match code {
                BAD_TARGET | INCORRECT_LUN => {}
                OK | FAILURE => assert!(is_known, "function {function} is carried out"),
                SUCCEEDED => assert!(asks, "function {function} finds tasks"),
                REJECTED => assert!(!is_known, "function {function} is not carried out"),
                _ => panic!("response {code}"),
            }
        }
        [0, 0, 0, 0, OK | FAILURE] | [0, 0, 0, 0] | [0, 0, 0] | [0, 0] | [0] => {
            assert!([1, 2].contains(&word(0)), "a request of type {}", word(0));
        }
        [code] => assert_eq!(code, FAILURE),
        _ => panic!("response {response:?}"),
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
                next_used: 0,
            };
            let driver = Driver::new(Arc::clone(&memory), ring.config(false, false));
            Queue { driver, ring, handle: None, out: HashMap::new() }
        });
        let options = ScsiOptions { num_queues: 2, ..ScsiOptions::default() };
        let device = |_| {
            let device = Device::scsi(options.clone(), Arc::new(LogEvents::new("fuzz")));
            device.set_features(device.features() & !LEFT_OUT).expect("offered");
            device
        };
        let (queues, devices) = (queues.collect(), (0..DEVICES).map(device).collect());
        let mut run = Self { stage, memory, devices, queues, access: Arc::default() };
        (0..DEVICES).for_each(|device| run.add_unit(device, 0));
        (0..DEVICES * QUEUES).for_each(|queue| run.start(queue));
        run
    }

    fn add_unit(&self, device: usize, lun: u8) {
        let port = [0x30, 0, 0, 0, 0, 0, u8::try_from(device).expect("few"), lun];
        let options = UnitOptions {
            vendor: "vendor".into(),
            revision: "1".into(),
            serial: "serial".into(),
            rotational: lun & 1 != 0,
            discard: lun & 2 == 0,
            write_cache: lun & 4 == 0,
            access: Arc::clone(&self.access),
            ..UnitOptions::new([0x30; 8], port)
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
                let fault = Fault::draw(input);
                let room = 16 + u32::from(input.u8() & 1);
                self.offer(device * QUEUES + 1, &[], &[], room, at, fault);
            }
            5 => {
                let queue = device * QUEUES + usize::from(input.u8() & 3);
                self.stop(queue);
                self.start(queue);
            }
            6 => {
                (0..QUEUES).for_each(|queue| self.stop(device * QUEUES + queue));
                self.devices[device].reset();
                let features = self.devices[device].features() & !LEFT_OUT;
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
        request[..8].copy_from_slice(&lun(how, input));
        request[8] = input.u8() & 3;
        // Attribute, priority and CRN.
        if request[8] == 3 {
            let more = input.bytes(3);
            request[16..16 + more.len()].copy_from_slice(more);
        }
        let cdb_bytes = input.u8() & 0x1f;
        let cdb = input.bytes(cdb_bytes.into());
        request[19..19 + cdb.len()].copy_from_slice(cdb);
        if how & 8 != 0 {
            // Short ranges near the start of the disk, where most commands succeed.
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
        let (queue, fault) = (device * QUEUES + 2 + usize::from(queue), Fault::draw(input));
        self.offer(queue, &request, &cuts, room, WRITABLE, fault);
    }

    fn task_management(&mut self, device: usize, input: &mut Input) {
        let mut request = vec![0; 24];
        let how = input.u8();
        match how >> 5 {
            0 => request[0] = input.u8() & 3,
            1 => request[..4].copy_from_slice(&input.u32().to_le_bytes()),
            2 => request[4..8].copy_from_slice(&input.u32().to_le_bytes()),
            _ => request[4] = input.u8() % 9,
        }
        request[8..16].copy_from_slice(&lun(how, input));
        request[16] = input.u8() & 3;
        request.truncate(24 - usize::from(input.u8() >> 4 & 7));
        let (room, fault) = (u32::from(input.u8() & 7), Fault::draw(input));
        self.offer(device * QUEUES, &request, &[], room, WRITABLE, fault);
    }

    /// Makes a chain available, with its readable part cut at these places.
    fn offer(
        &mut self,
        index: usize,
        sent: &[u8],
        cuts: &[u64],
        room: u32,
        at: u64,
        fault: Option<Fault>,
    ) {
        let queue = &mut self.queues[index];
        if queue.driver.room() < 6 {
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
        if fault == Some(Fault::NoOut) {
            chain.push(Desc::readable(NOWHERE, 9));
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
        match fault {
            Some(Fault::NoIn) => chain.push(Desc::writable(NOWHERE, 512)),
            // A fault only behind a writable buffer.
            Some(Fault::Order) => chain.push(Desc::readable(slot, 9)),
            Some(Fault::NoOut) | None => {}
        }
        let head = queue.driver.add(&chain, None);
        queue.driver.publish();
        let has_fault = fault.is_some_and(|fault| fault != Fault::Order || room > 0);
        let out = PendingChain { sent: sent.to_vec(), at: slot + at, room, has_fault };
        let before = queue.out.insert(head.into(), out);
        assert!(before.is_none(), "a head is out twice");
    }

    /// Checks new answers.
    fn take_used(&mut self) {
        for (index, queue) in self.queues.iter_mut().enumerate() {
            while let Some(used) = queue.driver.take_used() {
                let Some(out) = queue.out.remove(&used.head) else {
                    panic!("chain {} of queue {index} is answered twice", used.head);
                };
                let PendingChain { at, room, has_fault, .. } = out;
                assert!(used.bytes <= room, "{} bytes of {room} are written", used.bytes);
                if index % QUEUES == 0 {
                    let mut response = vec![0; used.bytes as usize];
                    self.memory.read(at, &mut response).expect("it is in memory");
                    check_response(&out, &response);
                }
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
                assert!(!has_fault || code == FAILURE, "a fault, and response {code}");
            }
        }
    }

    fn start(&mut self, index: usize) {
        let (device, number) = (index / QUEUES, index % QUEUES);
        let queue = &mut self.queues[index];
        let setup = QueueSetup {
            memory: Arc::clone(&self.memory),
            ring: queue.ring,
            // Without a kick the queue is checked at intervals.
            inflight: None,
            region_is_own: false,
            kick: None,
            call: None,
            err: None,
            log: None,
        };
        let number = u16::try_from(number).expect("few");
        let remote = self.stage.thread.remote();
        let pending = self.devices[device].begin_start_queue(number, &remote, setup);
        queue.handle = Some(wait(&self.stage.thread, &pending).expect("the ring is good"));
    }

    fn stop(&mut self, index: usize) {
        if let Some(handle) = self.queues[index].handle.take() {
            let base = wait(&self.stage.thread, &handle.begin_final_stop());
            self.take_used();
            let queue = &mut self.queues[index];
            queue.ring.next_avail = u16::try_from(base).expect("the place in a split ring");
        }
    }

    fn stop_all(&mut self) {
        (0..self.queues.len()).for_each(|queue| self.stop(queue));
    }
}
