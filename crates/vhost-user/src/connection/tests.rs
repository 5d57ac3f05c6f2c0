//! The effect of messages on a connection without a socket: tables, and messages in any order.

mod effects;
mod functions;
mod hand_over;
mod inflight;
mod layouts;
mod places;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Wake, Waker};

use blockio::{DiskOptions, DiskSource, EngineConfig, IoThread, IoThreadConfig, Wait};
use device::blk::config::{BlkOptions, F_CONFIG_WCE, F_FLUSH, WRITEBACK_OFFSET};
use device::{Device, LogEvents};
use layouts::inflight_area;
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::MappingRules;

use super::super::config::PROTOCOL_FEATURES;
use super::super::examiner::{Examiner, tests::wait_until};
use super::super::message::{
    Config, F_LOG_ALL, F_PROTOCOL_FEATURES, Header, LogArea, RingAddresses,
};
use super::super::ring::RingSettings;
use super::*;

const QUEUES: u16 = 2;
const MEMORY_BYTES: u64 = 1 << 20;
const GUEST_ADDR: u64 = 0x10_0000;
const USER_ADDR: u64 = 0x7f00_0000_0000;
const CAPACITY: usize = 8;

struct Scene {
    io: IoThread,
    device: Device,
    examiner: Arc<Examiner>,
    connection: Connection,
    memory: OwnedFd,
    /// The descriptor that came with the last answer that had one.
    peer_fd: Option<OwnedFd>,
    woken: Arc<Woken>,
}

/// A waker that notes its call.
#[derive(Default)]
pub(crate) struct Woken(pub(crate) AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// The outcome of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ended {
    Answer(Vec<u8>),
    Done,
    Refused {
        text: String,
        needs_ack: bool,
    },
    /// The connection ends.
    Over(String),
}

impl Scene {
    /// Makes a front-end that has negotiated these protocol features.
    fn new(protocol_features: u64) -> Self {
        let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        let options = BlkOptions { num_queues: QUEUES, ..BlkOptions::default() };
        let device = Device::blk(source, options, Arc::new(LogEvents::new("test")));
        Self::with_device(device, protocol_features)
    }

    fn with_device(device: Device, protocol_features: u64) -> Self {
        let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
        let io = IoThread::new(&config).unwrap();
        let examiner = Arc::new(Examiner::default());
        let woken = Arc::<Woken>::default();
        let connection = Connection::new(SessionSetup {
            device: device.clone(),
            threads: vec![io.remote()],
            rules: MappingRules::default(),
            examiner: Arc::clone(&examiner),
            run_lock: None,
            waker: Waker::from(Arc::clone(&woken)),
        });
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let memory = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&memory, MEMORY_BYTES).unwrap();
        let mut scene = Self { io, device, examiner, connection, memory, peer_fd: None, woken };
        let request = Request::SetProtocolFeatures(protocol_features);
        assert_eq!(scene.send(&request, vec![]), Ended::Done);
        scene
    }

    /// Carries a message out completely.
    fn send(&mut self, request: &Request, fds: Vec<OwnedFd>) -> Ended {
        let (code, body) = request.encode();
        let header = Header::new(code, body.len());
        let own = |fd| PeerFd::new(fd, Arc::clone(&self.examiner));
        let fds = fds.into_iter().map(own).collect();
        let mut outcome = self.connection.handle(Message { header, body, fds, lost_fds: None });
        loop {
            outcome = match outcome {
                Outcome::Answer(body) => return Ended::Answer(body),
                Outcome::AnswerWith(body, fd) => {
                    self.peer_fd = Some(fd);
                    return Ended::Answer(body);
                }
                Outcome::Done => return self.done(),
                Outcome::Refuse(Refusal { text, needs_ack }) => {
                    return Ended::Refused { text, needs_ack };
                }
                Outcome::End(why) => return Ended::Over(why),
                Outcome::Later(Work::Stop(change)) => {
                    self.settle().unwrap();
                    self.connection.apply(change)
                }
                Outcome::Later(Work::Restart(rings, start)) => self.restart(rings, start),
                Outcome::Later(Work::Start(start)) => {
                    let result = self.settle();
                    self.connection.started(start, result)
                }
                Outcome::Later(Work::Unmap(unmapped)) => {
                    let _ = unmapped.wait();
                    Outcome::Done
                }
                Outcome::Later(Work::Call(ring, fd)) => {
                    self.connection.set_call(ring, fd, false).ok().expect("it may not wait")
                }
                Outcome::Later(Work::Map(..)) => unreachable!("memory of this kind never waits"),
            }
        }
    }

    fn settle(&mut self) -> io::Result<()> {
        loop {
            if let Poll::Ready(result) = self.connection.settle() {
                return result;
            }
            self.await_wake();
        }
    }

    /// Drives the IoThread until the connection is woken.
    fn await_wake(&mut self) {
        for _ in 0..1000 {
            if self.woken.0.swap(false, Ordering::Acquire) {
                return;
            }
            self.io.turn(Wait::Never).unwrap();
        }
        panic!("it would wait for ever");
    }

    /// Starts all queues.
    fn start(&mut self) {
        self.start_with(16);
    }

    /// Starts all queues, with rings of this size.
    fn start_with(&mut self, size: u32) {
        use Request::*;
        // A driver that cannot flush must not choose its cache mode.
        let cache = match self.device {
            Device::Blk(_) => 1 << F_FLUSH | 1 << F_CONFIG_WCE,
            Device::Scsi(_) => 0,
        };
        let features = SetFeatures(F_PROTOCOL_FEATURES | 1 << 32 | cache);
        let (mut all, memory) = (vec![(features, vec![])], self.memory());
        all.push((AddMemReg(region()), memory));
        for index in 0..u32::from(self.device.num_queues()) {
            let byte = u8::try_from(index).unwrap();
            let addresses = addresses(USER_ADDR + 0x4000 * u64::from(index));
            all.push((SetVringNum { index, size }, vec![]));
            all.push((SetVringAddr { index, addresses, log: None }, vec![]));
            all.push((SetVringKick { index: byte, has_fd: true }, vec![new_eventfd()]));
            all.push((SetVringEnable { index, value: 1 }, vec![]));
        }
        for (request, fds) in all {
            assert_eq!(self.send(&request, fds), Ended::Done, "{request:?}");
        }
        assert!(self.connection.rings.iter().all(RingState::is_running));
    }

    fn memory(&self) -> Vec<OwnedFd> {
        vec![self.memory.try_clone().unwrap()]
    }

    /// The state that messages can change, except for running queues.
    fn state(&self) -> String {
        let rings = self.connection.rings.iter().map(|ring| {
            let RingSettings { size, addresses, log, started, enabled, kick } = &ring.settings;
            let kick = kick.as_ref().map(Arc::as_ptr);
            // A running queue moves on while its state is read.
            let base = ring.is_stopped().then_some(ring.base);
            format!("{size} {addresses:?} {log:?} {started} {enabled} {kick:?} {base:?}")
        });
        let rings: Vec<String> = rings.collect();
        let Connection { protocol_features, rings_need_enable, status, memory, inflight, .. } =
            &self.connection;
        let negotiated = self.device.negotiated();
        let regions = memory.map.num_regions();
        format!(
            "{rings:#?} {protocol_features:#x} {rings_need_enable} {status} {regions} \
             {negotiated:?} {}",
            inflight.is_some()
        )
    }

    /// Stops all queues and drops the descriptors of the front-end.
    fn end(mut self) {
        while !self.connection.stop_for_good(false) {
            self.await_wake();
        }
        assert!(!self.connection.release().is_pending(), "little memory is unmapped at once");
        assert_eq!(self.connection.descriptors(), 0);
        assert_eq!(self.device.negotiated().features(), 0, "the next driver has chosen nothing");
        assert_eq!((self.io.io().ops(), self.io.io().tasks()), (0, 0));
    }
}

fn region() -> Region {
    Region { guest_addr: GUEST_ADDR, size: MEMORY_BYTES, user_addr: USER_ADDR, file_offset: 0 }
}

fn addresses(place: u64) -> RingAddresses {
    RingAddresses { desc_table: place, avail_ring: place + 0x1000, used_ring: place + 0x2000 }
}

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn config(offset: usize, data: &[u8]) -> Config {
    Config { offset: u32::try_from(offset).unwrap(), flags: 0, data: data.to_vec() }
}

fn answer(number: u64) -> Ended {
    Ended::Answer(number.to_ne_bytes().to_vec())
}

#[test]
fn messages_that_stand_alone() {
    use Request::*;
    let all = Scene::new(PROTOCOL_FEATURES).device.features() | negotiation::VHOST_FEATURES;
    let capacity = Config { data: 2048_u64.to_le_bytes().to_vec(), ..config(0, &[]) };
    let table = [
        (SetOwner, Ended::Done),
        (GetFeatures, answer(all)),
        (GetProtocolFeatures, answer(PROTOCOL_FEATURES)),
        (GetQueueNum, answer(u64::from(QUEUES))),
        (GetMaxMemSlots, answer(MAX_REGIONS as u64)),
        (GetStatus, answer(0)),
        (SetStatus(15), Ended::Done),
        (SetFeatures(all), Ended::Done),
        (SetVringNum { index: 1, size: 256 }, Ended::Done),
        (SetVringBase { index: 1, base: 65_535 }, Ended::Done),
        (GetVringBase { index: 1 }, Ended::Answer([1_u32, 0].map(u32::to_ne_bytes).concat())),
        (SetVringKick { index: 0, has_fd: false }, Ended::Done),
        (SetConfig(config(WRITEBACK_OFFSET, &[0])), Ended::Done),
        (GetConfig(config(0, &[0; CAPACITY])), Ended::Answer(capacity.encode())),
        (ResetDevice, Ended::Done),
        (ResetOwner, Ended::Done),
    ];
    for (request, expected) in table {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        assert_eq!(scene.send(&request, vec![]), expected, "{request:?}");
        scene.end();
    }
}

/// The log reports such a ring as waiting for memory. A ring that would not run anyway waits for
/// none.
#[test]
fn only_a_ring_that_could_run_lacks_memory() {
    use Request::*;
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let place = addresses(USER_ADDR);
    let kick = || vec![new_eventfd()];
    for (request, fds, lacking) in [
        (SetFeatures(F_PROTOCOL_FEATURES | 1 << 32), vec![], None),
        (SetVringAddr { index: 1, addresses: place, log: None }, vec![], None),
        (SetVringKick { index: 1, has_fd: true }, kick(), None),
        (SetVringNum { index: 1, size: 16 }, vec![], None),
        (SetVringEnable { index: 1, value: 1 }, vec![], Some(1)),
        (SetVringEnable { index: 1, value: 0 }, vec![], None),
        (SetVringEnable { index: 1, value: 1 }, vec![], Some(1)),
        (AddMemReg(region()), scene.memory(), None),
    ] {
        assert_eq!(scene.send(&request, fds), Ended::Done, "{request:?}");
        assert_eq!(scene.connection.ring_without_memory(), lacking, "{request:?}");
    }
    scene.end();
}

/// A refused message changes nothing, and a refusal that the front-end must receive is marked so.
#[test]
fn messages_that_are_refused() {
    use Request::*;
    let moved = Config { flags: 1, ..config(20, &[0, 16, 0, 0]) };
    let far = u32::try_from(WRITEBACK_OFFSET).unwrap() + 0x1000;
    let table = [
        (SetProtocolFeatures(1 << 40), true, "protocol features 0x10000000000"),
        (SetFeatures(1 << 63), true, "features 0x8000000000000000"),
        (SetStatus(256), true, "device status 0x100"),
        (SetVringNum { index: 0, size: 3 }, true, "a ring cannot have 3 entries"),
        (SetVringNum { index: 0, size: 2048 }, true, "a ring cannot have 2048 entries"),
        (SetVringNum { index: 2, size: 64 }, true, "no queue 2: the device has 2"),
        (
            SetVringAddr { index: u32::MAX, addresses: addresses(0), log: None },
            true,
            "the device has 2",
        ),
        (SetVringBase { index: 0, base: 65_536 }, true, "ring base 65536"),
        (GetVringBase { index: 2 }, true, "queue 2"),
        (SetVringEnable { index: 0, value: 1 }, true, "before protocol features are negotiated"),
        (SetVringKick { index: 2, has_fd: false }, true, "queue 2"),
        (SetVringCall { index: 0, has_fd: true }, true, "cannot have 0 descriptors"),
        (AddMemReg(region()), true, "cannot have 0 descriptors"),
        (SetBackendReqFd, true, "cannot have 0 descriptors"),
        (SetMemTable(vec![]), true, "message 5 cannot have 8 bytes"),
        (RemMemReg(region()), true, ""),
        (GetConfig(config(0x1000, &[0])), false, "1 bytes at offset 4096"),
        (GetConfig(config(0, &[])), false, "0 bytes at offset 0"),
        (GetConfig(Config { offset: u32::MAX, ..config(0, &[0; 2]) }), false, "2 bytes"),
        (GetConfig(Config { flags: 4, ..config(0, &[0]) }), false, "flags 0x4"),
        (SetConfig(config(0, &[1])), false, "1 bytes at offset 0"),
        (SetConfig(Config { offset: far, ..config(0, &[0]) }), false, "1 bytes at"),
        (GetInflightFd(InflightArea { queues: 0, ..inflight_area() }), true, "for 0 queues"),
        (GetInflightFd(InflightArea { queues: 3, ..inflight_area() }), true, "the device has 2"),
        (GetInflightFd(InflightArea { queue_size: 2000, ..inflight_area() }), true, "of 2000"),
        (SetInflightFd(inflight_area()), true, "cannot have 0 descriptors"),
        (SetConfig(Config { flags: 2, ..config(WRITEBACK_OFFSET, &[0]) }), false, "flags 0x2"),
        (SetConfig(moved), true, "another device: blk_size is 512 here, 4096 there; both devices"),
    ];
    for (request, is_grave, words) in table {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        let before = scene.state();
        let ended = scene.send(&request, vec![]);
        let Ended::Refused { text, needs_ack } = &ended else { panic!("{request:?}: {ended:?}") };
        assert!(text.contains(words) && *needs_ack == is_grave, "{request:?}: {ended:?}");
        assert_eq!(scene.state(), before, "{request:?}");
        scene.end();
    }
}

#[test]
fn messages_of_features_that_were_not_negotiated() {
    use Request::*;
    let skip = protocol_feature::GET_VRING_BASE_SKIP_DRAIN;
    let of_region = protocol_feature::INFLIGHT_SHMFD | 1 << 20 | skip;
    for (request, feature) in [
        (GetQueueNum, protocol_feature::MQ),
        (GetConfig(config(0, &[0])), protocol_feature::CONFIG),
        (SetConfig(config(WRITEBACK_OFFSET, &[0])), protocol_feature::CONFIG),
        (ResetDevice, protocol_feature::RESET_DEVICE),
        (GetInflightFd(inflight_area()), of_region),
        (SetInflightFd(inflight_area()), of_region),
        (SetStatus(1), protocol_feature::STATUS),
        (GetStatus, protocol_feature::STATUS),
        (GetMaxMemSlots, protocol_feature::CONFIGURE_MEM_SLOTS),
        (RemMemReg(region()), protocol_feature::CONFIGURE_MEM_SLOTS),
        (SetBackendReqFd, protocol_feature::BACKEND_REQ),
        (GetVringBaseSkipDrain { index: 0 }, skip),
    ] {
        let mut scene = Scene::new(PROTOCOL_FEATURES & !feature);
        let ended = scene.send(&request, vec![]);
        let Ended::Refused { text, needs_ack: false } = &ended else {
            panic!("{request:?}: {ended:?}");
        };
        assert!(text.contains("was not offered"), "{text}");
    }
}

#[test]
fn a_queue_runs_after_all_messages_in_any_order() {
    use Request::*;
    let place = addresses(USER_ADDR + 0x8000);
    let say = |scene: &mut Scene, step: usize| {
        let (request, fds) = match step {
            0 => (AddMemReg(region()), scene.memory()),
            1 => (SetVringNum { index: 1, size: 16 }, vec![]),
            2 => (SetVringAddr { index: 1, addresses: place, log: None }, vec![]),
            3 => (SetVringKick { index: 1, has_fd: true }, vec![new_eventfd()]),
            _ => (SetVringEnable { index: 1, value: 1 }, vec![]),
        };
        assert_eq!(scene.send(&request, fds), Ended::Done, "{request:?}");
    };
    for first in 0..5 {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        assert_eq!(scene.send(&SetFeatures(F_PROTOCOL_FEATURES | 1 << 32), vec![]), Ended::Done);
        for step in (0..5).map(|step| (first + step) % 5) {
            assert!(!scene.connection.rings[1].is_running(), "before step {step}");
            say(&mut scene, step);
        }
        assert!(scene.connection.rings[1].is_running(), "from step {first} on");
        let load = scene.connection.load();
        assert!(load.requests() == 0 && load.has_taken_commands, "{load:?}");
        let base = scene.send(&GetVringBase { index: 1 }, vec![]);
        assert_eq!(base, Ended::Answer([1_u32, 0].map(u32::to_ne_bytes).concat()));
        assert!(scene.connection.rings[1].is_stopped());
        scene.end();
    }
}

/// The descriptor that comes with a message.
#[derive(Debug, Clone)]
enum Fd {
    None,
    Event,
    Memory,
    Inflight,
    Pipe,
}

fn messages() -> impl Strategy<Value = (Request, Fd)> {
    use Request::*;
    let index = 0..3_u32;
    let place = prop_oneof![Just(0), Just(0x4000), Just(0x8000), Just(MEMORY_BYTES)];
    let fd = prop_oneof![4 => Just(Fd::Event), 1 => Just(Fd::Pipe), 1 => Just(Fd::None)];
    let of_ring =
        (index, place, fd, 0..9_u8, 0..4_u32).prop_map(|(index, place, fd, kind, value)| {
            let (byte, has_fd) = (u8::try_from(index).unwrap(), !matches!(fd, Fd::None));
            let addresses = addresses(USER_ADDR + place);
            match kind {
                0 => (SetVringNum { index, size: 15 + value }, Fd::None),
                1 => (SetVringAddr { index, addresses, log: None }, Fd::None),
                2 => (SetVringBase { index, base: 65_533 + value }, Fd::None),
                3 => (GetVringBase { index }, Fd::None),
                4 | 5 => (SetVringKick { index: byte, has_fd }, fd),
                6 => (SetVringCall { index: byte, has_fd }, fd),
                7 => (SetVringErr { index: byte, has_fd }, fd),
                _ => (SetVringEnable { index, value: value.min(2) }, Fd::None),
            }
        });
    let writeback =
        (0..4_u8, 30..34_usize).prop_map(|(value, at)| (SetConfig(config(at, &[value])), Fd::None));
    let other = prop_oneof![
        Just((AddMemReg(region()), Fd::Memory)),
        Just((RemMemReg(region()), Fd::None)),
        Just((SetMemTable(vec![region()]), Fd::Memory)),
        Just((SetFeatures(F_PROTOCOL_FEATURES | 1 << 32), Fd::None)),
        Just((SetFeatures(1 << 32), Fd::None)),
        Just((SetFeatures(1 << 63), Fd::None)),
        Just((GetInflightFd(inflight_area()), Fd::None)),
        Just((SetInflightFd(InflightArea { size: MEMORY_BYTES, ..inflight_area() }), Fd::Inflight)),
        Just((SetInflightFd(InflightArea { size: 64, ..inflight_area() }), Fd::Inflight)),
        Just((SetStatus(0), Fd::None)),
        Just((SetStatus(7), Fd::None)),
        Just((ResetDevice, Fd::None)),
        Just((ResetOwner, Fd::None)),
    ];
    prop_oneof![6 => of_ring, 1 => writeback, 3 => other]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// For any messages in any order: each message ends, a refused one has changed nothing, and
    /// nothing is left at the end.
    #[test]
    fn messages_in_any_order(
        messages in prop::collection::vec(messages(), 1..40),
        is_set_up in any::<bool>(),
    ) {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        if is_set_up {
            scene.start();
        }
        for (request, fd) in messages {
            let fds = match fd {
                Fd::None => vec![],
                Fd::Event => vec![new_eventfd()],
                Fd::Memory => scene.memory(),
                Fd::Inflight => Scene::new(0).memory(),
                Fd::Pipe => vec![rustix::pipe::pipe().unwrap().0],
            };
            let before = scene.state();
            let ended = scene.send(&request, fds);
            if matches!(ended, Ended::Refused { .. }) {
                prop_assert_eq!(scene.state(), before, "{:?}: {:?}", request, ended);
            }
            for ring in &scene.connection.rings {
                let RingSettings { size, addresses, started, enabled, .. } = &ring.settings;
                let may_run = *started && *enabled && *size > 0 && addresses.is_some()
                    && scene.connection.memory.map.num_regions() > 0;
                prop_assert!(may_run || ring.is_stopped(), "after {:?}", request);
            }
        }
        scene.end();
    }
}
