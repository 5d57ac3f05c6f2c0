//! Lasting effects of messages on rings, descriptors and memory.

use device::blk::config::F_RING_PACKED;
use virtqueue::driver::{Desc, Driver};
use virtqueue::{MemoryFiles, QueueConfig};

use super::*;

const QUEUE: u64 = GUEST_ADDR + 0x4000;

fn own(scene: &Scene, fd: OwnedFd) -> PeerFd {
    PeerFd::new(fd, Arc::clone(&scene.examiner))
}

/// Begins to carry a message out.
fn begin(scene: &mut Scene, request: &Request, fds: Vec<OwnedFd>) -> Outcome {
    let (code, body) = request.encode();
    let header = Header::new(code, body.len());
    let fds = fds.into_iter().map(|fd| own(scene, fd)).collect();
    scene.connection.handle(Message { header, body, fds, lost_fds: None })
}

/// Such a message may look like one without a descriptor.
#[test]
fn a_message_whose_descriptors_are_lost_is_refused() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let (code, body) = Request::SetVringKick { index: 0, has_fd: false }.encode();
    let header = Header::new(code, body.len());
    let lost_fds = Some("no descriptor was left".to_owned());
    let message = Message { header, body, fds: Vec::new(), lost_fds };
    let Outcome::Refuse(Refusal { text, needs_ack: true }) = scene.connection.handle(message)
    else {
        panic!("it was carried out");
    };
    assert!(text.contains("lost; no descriptor was left"), "{text}");
    scene.end();
}

/// virtio_uml sends room for two regions and announces one.
#[test]
fn a_table_may_be_longer_than_its_regions() {
    let expected = Request::SetMemTable(vec![region()]);
    let (code, table) = expected.encode();
    for excess in [0, 1, 8, 32, 224] {
        let body = [table.clone(), vec![0xff; excess]].concat();
        assert_eq!(Request::decode(code, &body), Ok(expected.clone()), "{excess} bytes more");
    }
    for bytes in [0, 7, 8, table.len() - 1] {
        assert_eq!(Request::decode(code, &table[..bytes]), Err(DecodeError::BadBody), "{bytes}");
    }
}

/// A file system may hang while it maps a file.
#[test]
fn a_file_that_may_be_no_memory_is_mapped_on_another_thread() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.connection.setup.rules.files = MemoryFiles::Any;
    let file = tempfile::tempfile().unwrap();
    file.set_len(MEMORY_BYTES).unwrap();
    let memory = scene.memory();
    let at_once = begin(&mut scene, &Request::AddMemReg(region()), memory);
    assert!(matches!(at_once, Outcome::Later(Work::Stop(_))), "a memfd is memory");
    let other = Region { guest_addr: 1 << 40, user_addr: 1 << 40, ..region() };
    let outcome = begin(&mut scene, &Request::AddMemReg(other), vec![file.into()]);
    let Outcome::Later(Work::Map(map, Purpose::Guest)) = outcome else {
        panic!("it does not wait");
    };
    let mut mapped = map.check();
    if mapped.is_pending() {
        wait_until(|| scene.woken.0.load(Ordering::Acquire));
        mapped = map.check();
    }
    assert!(matches!(mapped, Poll::Ready(Some(Ok(_)))));
    scene.end();
}

/// The limit of open descriptors counts all of them, and a queue has its own copies.
#[test]
fn descriptors_count_until_they_are_given_up() {
    use Request::*;
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let expect = |scene: &mut Scene, request: Request, fds: Vec<OwnedFd>, count: usize| {
        let ended = scene.send(&request, fds);
        assert!(matches!(ended, Ended::Done | Ended::Answer(_)), "{request:?}: {ended:?}");
        assert_eq!(scene.connection.descriptors(), count, "after {request:?}");
    };
    let event = || vec![new_eventfd()];
    let memory = scene.memory();
    expect(&mut scene, AddMemReg(region()), memory, 1);
    let other = Region { guest_addr: 1 << 40, user_addr: 1 << 40, ..region() };
    let memory = scene.memory();
    expect(&mut scene, AddMemReg(other), memory, 2);
    expect(&mut scene, GetInflightFd(inflight_area()), vec![], 2);
    let file = scene.peer_fd.take().unwrap();
    let size = u64::try_from(rustix::fs::fstat(&file).unwrap().st_size).unwrap();
    let area = InflightArea { size, ..inflight_area() };
    expect(&mut scene, SetInflightFd(area), vec![file], 3);
    expect(&mut scene, SetVringKick { index: 0, has_fd: true }, event(), 5);
    expect(&mut scene, SetVringCall { index: 0, has_fd: true }, event(), 7);
    expect(&mut scene, SetVringErr { index: 0, has_fd: true }, event(), 9);
    expect(&mut scene, SetVringErr { index: 0, has_fd: true }, event(), 9);
    expect(&mut scene, GetVringBase { index: 0 }, vec![], 7);
    expect(&mut scene, SetVringKick { index: 0, has_fd: true }, event(), 9);
    // A driver that is reset does not give the eventfds of its front-end again.
    expect(&mut scene, ResetDevice, vec![], 7);
    expect(&mut scene, SetVringCall { index: 0, has_fd: false }, vec![], 5);
    expect(&mut scene, RemMemReg(other), vec![], 4);
    let memory = scene.memory();
    expect(&mut scene, SetMemTable(vec![region()]), memory, 4);
    let (log, area) = (scene.memory(), LogArea { size: region().size, file_offset: 0 });
    expect(&mut scene, SetLogBase(area), log, 5);
    scene.end();
}

impl Scene {
    /// Sends a log, and asks for marks of all written pages.
    pub(super) fn begin_log(&mut self) {
        let (log, area) = (self.memory(), LogArea { size: region().size, file_offset: 0 });
        let ended = self.send(&Request::SetLogBase(area), log);
        assert!(matches!(ended, Ended::Done | Ended::Answer(_)), "{ended:?}");
        let features = Request::SetFeatures(self.connection.features() | F_LOG_ALL);
        assert_eq!(self.send(&features, vec![]), Ended::Done);
    }
}

/// Sends all messages that start ring 1, except its enabling.
fn set_up_ring(scene: &mut Scene, features: u64) {
    use Request::*;
    for (request, fds) in [
        (SetFeatures(features), vec![]),
        (AddMemReg(region()), scene.memory()),
        (SetVringNum { index: 1, size: 16 }, vec![]),
        (SetVringAddr { index: 1, addresses: addresses(USER_ADDR + 0x4000), log: None }, vec![]),
        (SetVringKick { index: 1, has_fd: true }, vec![new_eventfd()]),
    ] {
        assert_eq!(scene.send(&request, fds), Ended::Done, "{request:?}");
    }
}

#[test]
fn rings_need_no_enabling_without_protocol_features() {
    let plain = Request::SetFeatures(1 << 32);
    for later in [false, true] {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        set_up_ring(&mut scene, if later { F_PROTOCOL_FEATURES } else { 0 } | 1 << 32);
        let is_running = |scene: &Scene| scene.connection.rings[1].is_running();
        assert_eq!(is_running(&scene), !later);
        assert_eq!(scene.send(&plain, vec![]), Ended::Done);
        assert!(is_running(&scene));
        let disable = Request::SetVringEnable { index: 1, value: 0 };
        assert!(matches!(scene.send(&disable, vec![]), Ended::Refused { needs_ack: true, .. }));
        scene.end();
    }
}

/// A reset disables all rings, and such a front-end never enables one.
#[test]
fn a_kick_enables_a_ring_without_protocol_features() {
    use Request::*;
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    for has_features in [false, true] {
        let features = SetFeatures(F_PROTOCOL_FEATURES | 1 << 32);
        if has_features {
            assert_eq!(scene.send(&features, vec![]), Ended::Done);
        }
        let memory = scene.memory();
        let place = addresses(USER_ADDR + 0x4000);
        for (request, fds) in [
            (SetMemTable(vec![region()]), memory),
            (SetVringNum { index: 1, size: 16 }, vec![]),
            (SetVringAddr { index: 1, addresses: place, log: None }, vec![]),
            (SetVringKick { index: 1, has_fd: true }, vec![new_eventfd()]),
        ] {
            assert_eq!(scene.send(&request, fds), Ended::Done, "{request:?}");
        }
        assert_eq!(scene.connection.rings[1].is_running(), !has_features);
        assert_eq!(scene.send(&ResetDevice, vec![]), Ended::Done);
        assert!(scene.connection.rings[1].is_stopped());
    }
    scene.end();
}

/// QEMU repeats the addresses of running rings when it logs their pages.
#[test]
fn a_running_ring_does_not_stop_when_its_addresses_are_repeated() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    let place = addresses(USER_ADDR + 0x4000);
    let repeat = |addresses| Request::SetVringAddr { index: 1, addresses, log: None };
    let outcome = begin(&mut scene, &repeat(place), vec![]);
    assert!(matches!(outcome, Outcome::Later(Work::Start(_))));
    assert!(scene.connection.rings[1].is_running());
    scene.settle().unwrap();
    let outcome = begin(&mut scene, &repeat(addresses(USER_ADDR + 0x8000)), vec![]);
    assert!(matches!(outcome, Outcome::Later(Work::Stop(_))));
    assert!(!scene.connection.rings[1].is_running());
    scene.end();
}

#[test]
fn an_owner_that_is_reset_has_stopped_rings() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    let before = scene.device.negotiated();
    assert_eq!(scene.send(&Request::ResetOwner, vec![]), Ended::Done);
    assert!(scene.connection.rings.iter().all(|ring| ring.is_stopped() && !ring.is_up()));
    assert_eq!(scene.device.negotiated(), before, "the driver is the same");
    let kick = Request::SetVringKick { index: 1, has_fd: true };
    assert_eq!(scene.send(&kick, vec![new_eventfd()]), Ended::Done);
    assert!(scene.connection.rings[1].is_running(), "its settings are kept");
    scene.end();
}

fn has_event(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0; 8]).is_ok()
}

/// An interrupt on the old eventfd would be lost.
#[test]
fn a_running_queue_uses_new_call_and_error_descriptors() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    let memory = Arc::clone(&scene.connection.memory.map);
    let config = QueueConfig {
        size: 16,
        desc_table: QUEUE,
        avail_ring: QUEUE + 0x1000,
        used_ring: QUEUE + 0x2000,
        event_idx: false,
        indirect: false,
        next_avail: 0,
    };
    let mut driver = Driver::new(Arc::clone(&memory), config);
    let (call, err) = (new_eventfd(), new_eventfd());
    for (request, event) in [
        (Request::SetVringCall { index: 1, has_fd: true }, &call),
        (Request::SetVringErr { index: 1, has_fd: true }, &err),
    ] {
        let copy = event.try_clone().unwrap();
        assert_eq!(scene.send(&request, vec![copy]), Ended::Done);
    }
    let kick = Arc::clone(scene.connection.rings[1].settings.kick.as_ref().unwrap());
    let kick = || rustix::io::write(&*kick, &1_u64.to_ne_bytes()).unwrap();
    let turn_until = |scene: &mut Scene, event: &OwnedFd| {
        assert!((0..1000).any(|_| {
            scene.io.turn(Wait::Never).unwrap();
            has_event(event)
        }));
    };
    // A request for the serial number.
    let request = GUEST_ADDR + 0x4_0000;
    memory.write(request, &[8, 0, 0, 0]).unwrap();
    let buffers = [Desc::readable(request, 16), Desc::writable(request + 16, 21)];
    driver.add(&buffers, None);
    driver.publish();
    kick();
    turn_until(&mut scene, &call);
    assert!(driver.take_used().is_some());
    assert!(!has_event(&err));
    // More entries than the ring has.
    driver.ring().put_avail_idx(1000);
    kick();
    turn_until(&mut scene, &err);
    drop((driver, memory));
    scene.end();
}

/// A queue that stops for a pause may wait for ever, and is asked again in another way.
#[test]
fn an_end_waits_for_no_request_that_a_pause_waits_for() {
    let kinds = |scene: &Scene| scene.connection.rings.iter().map(RingState::stop_kind).collect();
    let kinds = |scene: &Scene| -> Vec<Option<StopKind>> { kinds(scene) };
    for kind in [StopKind::Pause, StopKind::Final] {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        scene.start();
        scene.connection.begin_stop(0..2, kind);
        assert_eq!(kinds(&scene), [Some(kind); 2]);
        assert!(!scene.connection.stop_for_good(false));
        assert_eq!(kinds(&scene), [None; 2], "it resumes first");
        scene.end();
    }

    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    assert!(!scene.connection.stop_for_good(false));
    assert_eq!(kinds(&scene), [Some(StopKind::DriverGone); 2]);
    scene.end();
}

/// A request that hangs would keep its queue from others until it ends.
#[test]
fn queues_continue_at_once_when_a_pause_is_abandoned() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    let kinds = |scene: &Scene| -> Vec<Option<StopKind>> {
        scene.connection.rings.iter().map(RingState::stop_kind).collect()
    };
    scene.connection.begin_pause();
    assert_eq!(kinds(&scene), [Some(StopKind::Pause); 2]);
    scene.woken.0.store(false, Ordering::Release);
    scene.connection.begin_resume();
    assert_eq!(kinds(&scene), [None; 2], "they still stop");
    while scene.connection.resume().is_pending() {
        scene.await_wake();
    }
    assert!(scene.connection.rings.iter().all(RingState::is_running));
    scene.end();
}

/// Each IoThread has its part of the queues.
#[test]
fn queues_run_on_all_iothreads() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
    let second = IoThread::new(&config).unwrap();
    scene.connection.setup.threads.push(second.remote());
    set_up_ring(&mut scene, F_PROTOCOL_FEATURES | 1 << 32);
    let before = [scene.io.io().tasks(), second.io().tasks()];
    let enable = Request::SetVringEnable { index: 1, value: 1 };
    let Outcome::Later(Work::Start(start)) = begin(&mut scene, &enable, vec![]) else {
        panic!("the ring does not start");
    };
    let turn = |scene: &mut Scene| {
        scene.io.turn(Wait::Never).unwrap();
        second.turn(Wait::Never).unwrap();
    };
    let result = loop {
        match scene.connection.settle() {
            Poll::Ready(result) => break result,
            Poll::Pending => turn(&mut scene),
        }
    };
    assert!(matches!(scene.connection.started(start, result), Outcome::Done));
    assert!(scene.connection.rings[1].is_running());
    let after = [scene.io.io().tasks(), second.io().tasks()];
    assert_eq!((after[0], after[1] > before[1]), (before[0], true), "{before:?} {after:?}");
    while !scene.connection.stop_for_good(false) {
        turn(&mut scene);
    }
    scene.end();
    assert_eq!(second.io().tasks(), 0);
}

/// The next driver is logged only if its front-end asks for that.
#[test]
fn a_reset_of_the_device_ends_its_log() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.begin_log();
    assert!(scene.connection.log.is_some() && scene.connection.features() & F_LOG_ALL != 0);
    // A front-end that pauses its guest relies on the log.
    assert_eq!(scene.send(&Request::SetStatus(0), vec![]), Ended::Done);
    assert!(scene.connection.log.is_some() && scene.connection.features() & F_LOG_ALL != 0);
    assert_eq!(scene.send(&Request::ResetDevice, vec![]), Ended::Done);
    assert!(scene.connection.log.is_none() && scene.connection.features() & F_LOG_ALL == 0);
    scene.end();
}

/// Without marks to make, queues take the shorter way of a guest that is not logged.
#[test]
fn only_queues_with_something_to_mark_have_the_log() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    let log = scene.memory();
    assert!(matches!(scene.send(&log_of(MEMORY_BYTES), log), Ended::Done | Ended::Answer(_)));
    let has_log = |scene: &Scene| [0, 1].map(|ring| scene.connection.queue_log(ring).is_some());
    assert_eq!(has_log(&scene), [false; 2]);
    let addresses = addresses(USER_ADDR + 0x4000);
    let set = Request::SetVringAddr { index: 1, addresses, log: Some(0x1000) };
    assert_eq!(scene.send(&set, vec![]), Ended::Done);
    assert_eq!(has_log(&scene), [false, true]);
    let all = Request::SetFeatures(scene.connection.features() | F_LOG_ALL);
    assert_eq!(scene.send(&all, vec![]), Ended::Done);
    assert_eq!(has_log(&scene), [true; 2]);
    scene.end();
}

/// A log of this many bytes.
fn log_of(size: u64) -> Request {
    Request::SetLogBase(LogArea { size, file_offset: 0 })
}

/// The flags and the index of a split ring, and the event index behind its 16 elements. A packed
/// ring has the device's event suppression alone.
#[test]
fn the_log_has_room_for_each_byte_of_a_used_ring() {
    const END: u64 = 2 * (GUEST_ADDR + MEMORY_BYTES);
    for (features, bytes) in [(0, 2 + 2 + 16 * 8 + 2), (1 << F_RING_PACKED, 4)] {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        set_up_ring(&mut scene, F_PROTOCOL_FEATURES | 1 << 32 | features);
        let enable = Request::SetVringEnable { index: 1, value: 1 };
        assert_eq!(scene.send(&enable, vec![]), Ended::Done);
        let log = scene.memory();
        assert!(matches!(scene.send(&log_of(END / (8 * 4096)), log), Ended::Answer(_)));
        for (room, has_room) in [(bytes, true), (bytes - 1, false)] {
            let addresses = addresses(USER_ADDR + 0x4000);
            let set = Request::SetVringAddr { index: 1, addresses, log: Some(END - room) };
            let is_done = scene.send(&set, vec![]) == Ended::Done;
            assert_eq!(is_done, has_room, "{room} bytes, features {features:#x}");
        }
        scene.end();
    }
}

/// A queue must not write beyond the end of its log.
#[test]
fn a_log_without_room_for_the_used_ring_of_a_running_queue_is_refused() {
    // The log of this length ends where guest memory does.
    const SHORT: u64 = (GUEST_ADDR + MEMORY_BYTES) / (8 * 4096);
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    let log = scene.memory();
    assert!(matches!(scene.send(&log_of(2 * SHORT), log), Ended::Done | Ended::Answer(_)));
    let addresses = addresses(USER_ADDR + 0x4000);
    let end = GUEST_ADDR + MEMORY_BYTES;
    let set = Request::SetVringAddr { index: 1, addresses, log: Some(end) };
    assert_eq!(scene.send(&set, vec![]), Ended::Done);
    let log = scene.memory();
    let refused = scene.send(&log_of(SHORT), log);
    let Ended::Refused { text, needs_ack: true } = refused else { panic!("{refused:?}") };
    assert!(text.contains("the used ring of queue 1"), "{text}");
    let before = Request::SetVringAddr { index: 1, addresses, log: Some(end - 0x1000) };
    assert_eq!(scene.send(&before, vec![]), Ended::Done);
    let log = scene.memory();
    assert!(matches!(scene.send(&log_of(SHORT), log), Ended::Done | Ended::Answer(_)));
    scene.end();
}

/// The front-end may unmap the earlier log once it has the answer.
#[test]
fn a_log_is_taken_by_the_queues_before_it_is_answered() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    let log = scene.memory();
    let outcome = begin(&mut scene, &log_of(MEMORY_BYTES), log);
    let Outcome::Later(Work::Start(start)) = outcome else { panic!("it does not wait") };
    assert!(scene.connection.settle().is_pending(), "no queue has the log");
    let result = scene.settle();
    assert!(matches!(scene.connection.started(start, result), Outcome::Answer(_)));
    scene.end();
}
