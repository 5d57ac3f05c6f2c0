//! The place of a ring after an interrupted pause, and while its queue is full.

use std::os::fd::AsFd;

use blockio::disk::{Limits, Rate, Rates};
use virtqueue::QueueConfig;
use virtqueue::driver::{Desc, Driver};

use super::*;

/// The queues stop before they hear that they may continue.
#[test]
fn rings_that_have_stopped_before_they_resume_start_where_they_stopped() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    let tasks = scene.io.io().tasks();
    scene.connection.rings.iter_mut().for_each(|ring| ring.base = 99);
    scene.connection.begin_pause();
    for _ in 0..100 {
        scene.io.turn(Wait::Never).unwrap();
    }
    assert!(scene.io.io().tasks() < tasks, "the queues run");
    scene.woken.0.store(false, Ordering::Release);
    scene.connection.begin_resume();
    while scene.connection.resume().map(Result::unwrap).is_pending() {
        scene.await_wake();
    }
    assert_eq!(scene.io.io().tasks(), tasks, "a queue does not run");
    for ring in &scene.connection.rings {
        assert!(ring.is_running());
        assert_eq!((ring.base, ring.next_avail_now()), (0, Some(0)));
    }
    scene.end();
}

/// A disk on which only the first requests need not wait.
fn slow_disk() -> DiskSource {
    let source = DiskSource::null(1 << 30, &DiskOptions::default()).unwrap();
    let total = Some(Rate { per_second: 1, burst: None });
    let bytes = Rates { total, ..Rates::default() };
    source.set_limits(&Limits { bytes, ..Limits::default() }).unwrap();
    source
}

/// A full queue leaves requests in its ring, so the ring does not show that it stands still.
#[test]
fn the_place_of_a_full_ring_is_unknown() {
    const BUFFERS: u16 = 132;
    const REQUESTS: u16 = 6;
    let options = BlkOptions { num_queues: QUEUES, ..BlkOptions::default() };
    let device = Device::blk(slow_disk(), options, Arc::new(LogEvents::new("test")));
    let mut scene = Scene::with_device(device, PROTOCOL_FEATURES);
    scene.start_with(256);
    let put = |at: u64, bytes: &[u8]| {
        rustix::io::pwrite(scene.memory.as_fd(), bytes, at).unwrap();
    };
    // A read of 66 MiB, several times.
    let descriptor = |addr: u64, len: u32, flags: u16, next: u16| {
        let (addr, len) = (addr.to_le_bytes(), len.to_le_bytes());
        [&addr[..], &len, &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    };
    put(0, &descriptor(GUEST_ADDR + 0x7_0000, 16, 1, 1));
    for number in 1..=BUFFERS {
        put(u64::from(number) * 16, &descriptor(GUEST_ADDR + 0x8_0000, 512 << 10, 3, number + 1));
    }
    put(u64::from(BUFFERS + 1) * 16, &descriptor(GUEST_ADDR + 0x7_1000, 1, 2, 0));
    put(0x1000, &[[0, 0], REQUESTS.to_le_bytes()].concat());
    let ring = &scene.connection.rings[0];
    assert_eq!(ring.next_avail_now(), Some(0));
    let kick = ring.settings.kick.clone().unwrap();
    rustix::io::write(&kick, &1_u64.to_ne_bytes()).unwrap();
    while ring.load().0.requests == 0 {
        scene.io.turn(Wait::Never).unwrap();
    }
    for _ in 0..100 {
        scene.io.turn(Wait::Never).unwrap();
    }
    assert_eq!(ring.next_avail_now(), None);
    assert_eq!(scene.connection.rings[1].next_avail_now(), Some(0));
    scene.end();
}

/// A front-end that asks for a base by the plain message expects that all requests are answered.
#[test]
fn a_ring_answers_the_requests_that_it_has_left_before_it_gives_its_base() {
    const REQUESTS: usize = 4;
    let source = slow_disk();
    let options = BlkOptions { num_queues: QUEUES, ..BlkOptions::default() };
    let device = Device::blk(source.clone(), options, Arc::new(LogEvents::new("test")));
    let mut scene = Scene::with_device(device, PROTOCOL_FEATURES);
    let region = scene.get_region();
    assert_eq!(scene.bring(&region), Ended::Done);
    scene.start();
    let memory = Arc::clone(&scene.connection.memory.map);
    let config = QueueConfig {
        size: 16,
        desc_table: GUEST_ADDR,
        avail_ring: GUEST_ADDR + 0x1000,
        used_ring: GUEST_ADDR + 0x2000,
        event_idx: false,
        indirect: false,
        next_avail: 0,
    };
    let mut driver = Driver::new(memory, config);
    let area = GUEST_ADDR + 0x4_0000;
    let read = [Desc::readable(area, 16), Desc::writable(area + 0x1000, 513)];
    for _ in 0..REQUESTS {
        driver.add(&read, None);
    }
    driver.publish();
    let kick = scene.connection.rings[0].settings.kick.clone().unwrap();
    rustix::io::write(&kick, &1_u64.to_ne_bytes()).unwrap();
    while scene.connection.rings[0].load().0.requests == 0 {
        scene.io.turn(Wait::Never).unwrap();
    }
    let disable = Request::SetVringEnable { index: 0, value: 0 };
    assert_eq!(scene.send(&disable, vec![]), Ended::Done);
    let answered = std::iter::from_fn(|| driver.take_used()).count();
    assert!(answered < REQUESTS && scene.connection.rings[0].has_left, "they wait");
    source.set_limits(&Limits::default()).unwrap();
    let base = scene.send(&Request::GetVringBase { index: 0 }, vec![]);
    assert_eq!(base, Ended::Answer([0_u32, 4].map(u32::to_ne_bytes).concat()));
    assert_eq!(answered + std::iter::from_fn(|| driver.take_used()).count(), REQUESTS);
    scene.end();
}
