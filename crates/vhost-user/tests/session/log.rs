//! The log of written pages: each page that changes is marked, in the present log and in no other.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use blockio::{DiskOptions, DiskSource};
use device::blk::config::BlkOptions;
use device::{Device, LogEvents};
use rustix::fs::{MemfdFlags, memfd_create};
use vhost_user::message::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, LogArea, Region, Request, RingAddresses,
};
use vhost_user::{End, PROTOCOL_FEATURES, PassedFds, Session};
use virtqueue::driver::{Desc, Driver};
use virtqueue::{GuestMemory, MappingRules, QueueConfig, RegionConfig};

use crate::scene::{
    Frontend, GUEST_ADDR, MEMORY_BYTES, QUEUE_SIZE, QUEUES, Scene, USER_ADDR, new_eventfd, region,
};

const PAGE: u64 = 4096;
const NONE: [u64; 0] = [];
/// Bytes of a log for the whole memory.
const LOG_BYTES: u64 = (GUEST_ADDR + MEMORY_BYTES) / PAGE / 8;
const DISK_BYTES: usize = 1 << 20;

const DESC_TABLE: u64 = 0;
const AVAIL_RING: u64 = 0x1000;
const USED_RING: u64 = 0x2000;
const HEADER: u64 = 0x3000;
const TABLE: u64 = 0x4000;
const STATUS: u64 = 0x5fff;
const DATA: u64 = 0x8000;

/// Types of requests of virtio-blk.
const IN: u32 = 0;
const GET_ID: u32 = 8;
const UNKNOWN: u32 = 77;

const EVENT_IDX: u64 = 1 << 29;
const INDIRECT: u64 = 1 << 28;

/// A session with one queue that runs, and its guest.
struct Guest {
    scene: Scene,
    session: Session,
    frontend: Frontend,
    memory_file: Arc<File>,
    driver: Driver<Arc<GuestMemory>>,
    kick: OwnedFd,
    features: u64,
    /// Keeps the file of the disk.
    _disk: tempfile::NamedTempFile,
}

impl Guest {
    fn new(features: u64) -> Self {
        let mut disk = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (1..=251).cycle().take(DISK_BYTES).collect();
        disk.write_all(&content).unwrap();
        let options = DiskOptions { direct: false, ..DiskOptions::default() };
        let source = DiskSource::file(disk.path(), &options).unwrap();
        let mut scene = Scene::new();
        let options = BlkOptions { num_queues: QUEUES, ..BlkOptions::default() };
        scene.device = Device::blk(source, options, Arc::new(LogEvents::new("test")));
        let (session, frontend) = scene.attach();
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(MEMORY_BYTES).unwrap();
        let memory_file = Arc::new(file);
        let map = RegionConfig {
            guest_addr: GUEST_ADDR,
            size: MEMORY_BYTES,
            user_addr: 0,
            file: Arc::clone(&memory_file),
            file_offset: 0,
        };
        let map = Arc::new(GuestMemory::new(&[map], &MappingRules::default()).unwrap());
        let ring = QueueConfig {
            size: QUEUE_SIZE,
            desc_table: GUEST_ADDR + DESC_TABLE,
            avail_ring: GUEST_ADDR + AVAIL_RING,
            used_ring: GUEST_ADDR + USED_RING,
            event_idx: features & EVENT_IDX != 0,
            indirect: features & INDIRECT != 0,
            next_avail: 0,
        };
        let (driver, kick) = (Driver::new(map, ring), new_eventfd());
        let features = features | F_PROTOCOL_FEATURES | 1 << 32;
        let mut guest =
            Self { scene, session, frontend, memory_file, driver, kick, features, _disk: disk };
        guest.start();
        guest
    }

    fn start(&mut self) {
        self.deliver(&Request::SetProtocolFeatures(PROTOCOL_FEATURES));
        self.deliver(&Request::SetFeatures(self.features));
        let memory = self.memory_file.try_clone().unwrap().into();
        self.deliver_with(&Request::AddMemReg(region()), &[&memory]);
        self.deliver(&Request::SetVringNum { index: 0, size: QUEUE_SIZE.into() });
        self.deliver(&ring_address(None));
        let kick = self.kick.try_clone().unwrap();
        self.deliver_with(&Request::SetVringKick { index: 0, has_fd: true }, &[&kick]);
        self.deliver(&Request::SetVringEnable { index: 0, value: 1 });
        assert_eq!(self.scene.io.io().tasks(), 1, "the queue runs");
    }

    /// Sends a message that must be carried out.
    fn deliver(&mut self, request: &Request) {
        self.deliver_with(request, &[]);
    }

    fn deliver_with(&mut self, request: &Request, fds: &[&OwnedFd]) {
        self.scene.send_checked(&mut self.session, &mut self.frontend, request, fds);
    }

    /// Sends a message that must be refused, for this reason.
    fn refused(&mut self, request: &Request, fds: &[&OwnedFd], reason: &str) {
        let status = self.scene.exchange(&mut self.session, &mut self.frontend, request, fds);
        assert_eq!(status, 1_u64.to_ne_bytes(), "{request:?} was carried out");
        let said = self.scene.refused.pop().expect("a reason");
        assert!(said.contains(reason), "{said}");
    }

    fn set_log(&mut self, log: &Log) {
        let fd = log.file.try_clone().unwrap().into();
        let request = Request::SetLogBase(log.area);
        let answer = self.scene.exchange(&mut self.session, &mut self.frontend, &request, &[&fd]);
        assert_eq!(answer, log.area.encode());
    }

    fn set_log_all(&mut self, on: bool) {
        let log_all = if on { F_LOG_ALL } else { 0 };
        self.deliver(&Request::SetFeatures(self.features | log_all));
    }

    fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(MEMORY_BYTES).unwrap()];
        self.memory_file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory_file.write_all_at(bytes, at).unwrap();
    }

    /// Makes a request available, without a kick.
    fn offer(&mut self, kind: u32, data: &[(u64, u32)]) {
        self.put(HEADER, &[&kind.to_le_bytes()[..], &[0; 12]].concat());
        self.put(STATUS, &[0xff]);
        let mut buffers = vec![Desc::readable(GUEST_ADDR + HEADER, 16)];
        buffers.extend(data.iter().map(|&(at, len)| Desc::writable(GUEST_ADDR + at, len)));
        buffers.push(Desc::writable(GUEST_ADDR + STATUS, 1));
        let table = (self.features & INDIRECT != 0).then_some(GUEST_ADDR + TABLE);
        self.driver.add(&buffers, table);
        self.driver.publish();
    }

    fn kick(&mut self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
        for _ in 0..100_000 {
            assert_eq!(self.scene.drive_all(&mut self.session), None);
            if self.driver.take_used().is_some() {
                return;
            }
        }
        panic!("the request is not answered");
    }

    fn read(&mut self, data: &[(u64, u32)]) {
        self.offer(IN, data);
        self.kick();
    }
}

/// A log that a front-end keeps.
struct Log {
    file: File,
    area: LogArea,
}

impl Log {
    fn new(size: u64) -> Self {
        let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
        let area = LogArea { size, file_offset: 40 };
        file.set_len(size + area.file_offset).unwrap();
        Self { file, area }
    }

    /// Takes all marks away, and returns the addresses of the marked pages.
    fn take(&self) -> Vec<u64> {
        let mut marks = vec![0; usize::try_from(self.area.size).unwrap()];
        self.file.read_exact_at(&mut marks, self.area.file_offset).unwrap();
        self.file.write_all_at(&vec![0; marks.len()], self.area.file_offset).unwrap();
        let bits = (0..8 * self.area.size).filter(|bit| {
            let byte = marks[usize::try_from(bit / 8).unwrap()];
            byte >> (bit % 8) & 1 != 0
        });
        bits.map(|bit| bit * PAGE).collect()
    }
}

fn ring_address(log: Option<u64>) -> Request {
    let addresses = RingAddresses {
        desc_table: USER_ADDR + DESC_TABLE,
        avail_ring: USER_ADDR + AVAIL_RING,
        used_ring: USER_ADDR + USED_RING,
    };
    Request::SetVringAddr { index: 0, addresses, log }
}

fn changed_pages(before: &[u8], after: &[u8]) -> Vec<u64> {
    let page = usize::try_from(PAGE).unwrap();
    let pages = before.chunks(page).zip(after.chunks(page)).zip(0..);
    let changed = pages.filter(|((before, after), _)| before != after);
    changed.map(|(_, number)| GUEST_ADDR + number * PAGE).collect()
}

fn at(pages: &[u64]) -> Vec<u64> {
    pages.iter().map(|page| GUEST_ADDR + page).collect()
}

/// Buffers that straddle pages, with gaps between them.
const SCATTERED: [(u64, u32); 3] = [(DATA + 0xe00, 0x400), (DATA + 0x4000, 512), (0x2_0ffe, 514)];

#[test]
fn each_page_that_changes_is_marked_and_no_other() {
    for features in [0, EVENT_IDX, INDIRECT, EVENT_IDX | INDIRECT] {
        let mut guest = Guest::new(features);
        guest.read(&[(DATA, 4096)]);
        let log = Log::new(LOG_BYTES);
        guest.set_log(&log);
        assert_eq!(log.take(), NONE, "there is no reason to mark");
        guest.set_log_all(true);
        guest.deliver(&ring_address(Some(GUEST_ADDR + USED_RING)));
        assert_eq!(log.take(), at(&[USED_RING]), "an earlier process may have written there");
        for (kind, data, pages) in [
            (IN, &SCATTERED[..], &[DATA, DATA + 0x1000, DATA + 0x4000, 0x2_0000, 0x2_1000][..]),
            (GET_ID, &[(0x3_0ff0, 20)], &[0x3_0000, 0x3_1000]),
            (UNKNOWN, &[(0x4_0000, 512)], &[0x4_0000]),
        ] {
            guest.offer(kind, data);
            let before = guest.memory();
            guest.kick();
            let changed = changed_pages(&before, &guest.memory());
            let mut expected = at(&[&[USED_RING, STATUS - 0xfff][..], pages].concat());
            expected.sort_unstable();
            // Some bytes were zeroes before, too.
            assert!(changed.iter().all(|page| expected.contains(page)), "{changed:x?}");
            assert_eq!(log.take(), expected, "request {kind}, features {features:#x}");
        }
    }
}

#[test]
fn a_log_is_replaced_turned_off_and_on_while_a_request_is_in_progress() {
    let mut guest = Guest::new(EVENT_IDX);
    let all = at(&[USED_RING, STATUS - 0xfff, DATA]);
    let logs = [Log::new(LOG_BYTES), Log::new(LOG_BYTES + 7)];
    guest.set_log(&logs[0]);
    guest.set_log_all(true);
    guest.deliver(&ring_address(Some(GUEST_ADDR + USED_RING)));
    for round in 0..8 {
        let (log, other) = (&logs[(round + 1) % 2], &logs[round % 2]);
        guest.offer(IN, &[(DATA, 512)]);
        rustix::io::write(&guest.kick, &1_u64.to_ne_bytes()).unwrap();
        // The request begins before the log comes, and may end before or after.
        guest.scene.io.turn(blockio::Wait::Never).unwrap();
        guest.set_log(log);
        let early = other.take();
        guest.kick();
        let marked = [&early[..], &log.take()].concat();
        assert!(all.iter().all(|page| marked.contains(page)), "round {round}: {marked:x?}");
        assert_eq!(other.take(), NONE, "round {round}: a mark after the answer");
    }
    for _ in 0..3 {
        guest.set_log_all(false);
        guest.deliver(&ring_address(None));
        logs[0].take();
        guest.read(&[(DATA, 512)]);
        assert_eq!(logs[0].take(), NONE, "the migration has failed");
        guest.set_log(&logs[0]);
        guest.set_log_all(true);
        guest.deliver(&ring_address(Some(GUEST_ADDR + USED_RING)));
        guest.read(&[(DATA, 512)]);
        assert_eq!(logs[0].take(), all, "it has started again");
    }
    assert_eq!(logs[1].take(), NONE);
}

/// The address of a used ring in the log need not be that of guest memory.
#[test]
fn the_used_ring_has_an_address_of_its_own_in_the_log() {
    let mut guest = Guest::new(0);
    let (log, place) = (Log::new(LOG_BYTES + 1), GUEST_ADDR + MEMORY_BYTES + PAGE);
    guest.set_log(&log);
    guest.deliver(&ring_address(Some(place)));
    log.take();
    guest.read(&[(DATA, 512)]);
    assert_eq!(log.take(), [place], "only the ring was to be logged");
    guest.set_log_all(true);
    log.take();
    guest.read(&[(DATA, 512)]);
    assert_eq!(log.take(), [&at(&[STATUS - 0xfff, DATA])[..], &[place]].concat());
}

#[test]
fn a_log_without_room_is_refused() {
    let mut guest = Guest::new(0);
    let log = Log::new(LOG_BYTES);
    guest.set_log(&log);
    guest.set_log_all(true);
    // The flags and index, an element of 8 bytes for each entry, and the event index.
    let last = GUEST_ADDR + MEMORY_BYTES - (4 + 8 * u64::from(QUEUE_SIZE) + 2);
    guest.deliver(&ring_address(Some(last)));
    let beyond = ring_address(Some(last + 1));
    guest.refused(&beyond, &[], "too small: it ends at address 0x200000, and the used ring");
    guest.refused(&ring_address(Some(u64::MAX)), &[], "too small");
    let more = Region {
        guest_addr: GUEST_ADDR + MEMORY_BYTES,
        size: PAGE,
        user_addr: USER_ADDR + MEMORY_BYTES,
        file_offset: 0,
    };
    let memory: OwnedFd = guest.memory_file.try_clone().unwrap().into();
    let reason = "too small: it ends at address 0x200000, and guest memory at 0x201000";
    guest.refused(&Request::AddMemReg(more), &[&memory], reason);
    guest.set_log(&Log::new(LOG_BYTES + 1));
    guest.deliver_with(&Request::AddMemReg(more), &[&memory]);
    // The answer to this message has no room for a refusal.
    let (fd, area) = (log.file.try_clone().unwrap().into(), log.area);
    guest.frontend.send(&Request::SetLogBase(area), false, &[&fd]);
    let Some(End::Dropped(why)) = guest.scene.drive_all(&mut guest.session) else {
        panic!("a log without room was taken")
    };
    assert!(why.contains("too small"), "{why}");
}

/// The front-end may go on without the migration, and its rings change later.
#[test]
fn a_refused_migration_leaves_no_request_to_log() {
    let mut guest = Guest::new(0);
    guest.set_log(&Log::new(LOG_BYTES));
    let more = Region {
        guest_addr: GUEST_ADDR + MEMORY_BYTES,
        size: PAGE,
        user_addr: USER_ADDR + MEMORY_BYTES,
        file_offset: 0,
    };
    let memory: OwnedFd = guest.memory_file.try_clone().unwrap().into();
    guest.deliver_with(&Request::AddMemReg(more), &[&memory]);
    let log_all = Request::SetFeatures(guest.features | F_LOG_ALL);
    guest.refused(&log_all, &[], "too small: it ends at address 0x200000, and guest memory");
    guest.deliver(&ring_address(Some(GUEST_ADDR + USED_RING)));
    guest.deliver(&ring_address(None));
    guest.read(&[(DATA, 512)]);
}

/// QEMU starts a device during a migration in this order.
#[test]
fn a_queue_waits_for_a_log_with_room() {
    let mut guest = Guest::new(0);
    guest.set_log_all(true);
    guest.deliver(&ring_address(Some(GUEST_ADDR + USED_RING)));
    guest.read(&[(DATA, 512)]);
    guest.set_log(&Log::new(LOG_BYTES));
    let get_base = Request::GetVringBase { index: 0 };
    let base = guest.scene.exchange(&mut guest.session, &mut guest.frontend, &get_base, &[]);
    assert_eq!(base, [0_u32, 1].map(u32::to_ne_bytes).concat());
    let more = Region {
        guest_addr: GUEST_ADDR + MEMORY_BYTES,
        size: PAGE,
        user_addr: USER_ADDR + MEMORY_BYTES,
        file_offset: 0,
    };
    let memory: OwnedFd = guest.memory_file.try_clone().unwrap().into();
    guest.deliver_with(&Request::AddMemReg(more), &[&memory]);
    let kick = guest.kick.try_clone().unwrap();
    guest.deliver_with(&Request::SetVringKick { index: 0, has_fd: true }, &[&kick]);
    guest.deliver(&Request::SetVringEnable { index: 0, value: 1 });
    assert_eq!(guest.scene.io.io().tasks(), 0, "its writes could not be marked");
    let log = Log::new(LOG_BYTES + 1);
    guest.set_log(&log);
    assert_eq!(guest.scene.io.io().tasks(), 1);
    log.take();
    guest.read(&[(DATA, 512)]);
    assert_eq!(log.take(), at(&[USED_RING, STATUS - 0xfff, DATA]));
}

#[test]
fn the_next_process_continues_with_the_log() {
    let mut guest = Guest::new(0);
    let log = Log::new(LOG_BYTES);
    guest.set_log(&log);
    guest.set_log_all(true);
    guest.deliver(&ring_address(Some(GUEST_ADDR + USED_RING)));
    guest.session.begin_pause();
    assert_eq!(guest.scene.drive_all(&mut guest.session), None);
    let mut fds = PassedFds::default();
    let state = guest.session.hand_over(&mut fds).unwrap();
    let state = serde_json::to_string(&state).unwrap();
    let setup = guest.scene.setup();
    let now = guest.scene.now;
    let session =
        Session::take_over(serde_json::from_str(&state).unwrap(), setup, &mut fds, now).unwrap();
    let _old = std::mem::replace(&mut guest.session, session);
    guest.session.begin_resume();
    assert_eq!(guest.scene.drive_all(&mut guest.session), None);
    log.take();
    guest.read(&[(DATA, 512)]);
    assert_eq!(log.take(), at(&[USED_RING, STATUS - 0xfff, DATA]));
    guest.set_log_all(false);
    guest.deliver(&ring_address(None));
    log.take();
    guest.read(&[(DATA, 512)]);
    assert_eq!(log.take(), NONE);
}
