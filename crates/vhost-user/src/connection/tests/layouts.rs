//! Drivers of one front-end that choose different layouts of their rings: a firmware, and the guest
//! that it boots.

use device::blk::config::F_RING_PACKED;
use virtqueue::driver::{Desc, PackedDriver};
use virtqueue::{GuestMemory, InflightRegion, QueueConfig};

use super::*;

const SPLIT: u64 = F_PROTOCOL_FEATURES | 1 << 32;
const PACKED: u64 = SPLIT | 1 << F_RING_PACKED;

/// A region for the queues of a scene.
pub(super) fn inflight_area() -> InflightArea {
    InflightArea { size: 0, file_offset: 0, queues: QUEUES, queue_size: 128 }
}

impl Scene {
    pub(super) fn get_region(&mut self) -> (InflightArea, OwnedFd) {
        let answer = self.send(&Request::GetInflightFd(inflight_area()), vec![]);
        let Ended::Answer(body) = answer else { panic!("{answer:?}") };
        (InflightArea::decode(&body).unwrap(), self.peer_fd.take().unwrap())
    }

    pub(super) fn bring(&mut self, (area, file): &(InflightArea, OwnedFd)) -> Ended {
        let file = file.try_clone().unwrap();
        self.send(&Request::SetInflightFd(*area), vec![file])
    }

    /// Sets up all rings for a driver with these features, and starts them. Returns the last
    /// outcome.
    fn run_driver(&mut self, features: u64) -> Ended {
        use Request::*;
        let is_packed = features & 1 << F_RING_PACKED != 0;
        let base = if is_packed { 0x8000_8000 } else { 0 };
        let mut all = vec![(SetFeatures(features), vec![])];
        all.push((SetMemTable(vec![region()]), self.memory()));
        for index in 0..u32::from(QUEUES) {
            let byte = u8::try_from(index).unwrap();
            let addresses = addresses(USER_ADDR + 0x4000 * u64::from(index));
            all.push((SetVringNum { index, size: 16 }, vec![]));
            all.push((SetVringBase { index, base }, vec![]));
            all.push((SetVringAddr { index, addresses, log: None }, vec![]));
            all.push((SetVringKick { index: byte, has_fd: true }, vec![new_eventfd()]));
            all.push((SetVringEnable { index, value: 1 }, vec![]));
        }
        for (request, fds) in all {
            let ended = self.send(&request, fds);
            if ended != Ended::Done {
                return ended;
            }
        }
        assert!(self.connection.rings.iter().all(RingState::is_running));
        Ended::Done
    }

    /// Stops all rings, as a front-end does when its driver resets the device.
    fn end_driver(&mut self) {
        for index in 0..u32::from(QUEUES) {
            let disable = Request::SetVringEnable { index, value: 0 };
            assert_eq!(self.send(&disable, vec![]), Ended::Done);
            let base = self.send(&Request::GetVringBase { index }, vec![]);
            assert!(matches!(base, Ended::Answer(_)), "{base:?}");
        }
        assert_eq!(self.send(&Request::SetStatus(0), vec![]), Ended::Done);
    }
}

/// QEMU drops the region at a reset. It negotiates for the next driver, and only then asks for a
/// region: the back-end still has that of the first one, perhaps from an earlier back-end.
#[test]
fn the_next_driver_may_choose_another_layout_before_it_has_a_region() {
    for [first, second] in [[SPLIT, PACKED], [PACKED, SPLIT]] {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        let (area, file) = scene.get_region();
        // No longer than split rings need.
        let size = InflightRegion::bytes_with_note(RingLayout::Split, QUEUES, area.queue_size);
        let area = if first == SPLIT { InflightArea { size, ..area } } else { area };
        assert_eq!(scene.send(&Request::SetFeatures(first), vec![]), Ended::Done);
        assert_eq!(scene.bring(&(area, file)), Ended::Done);
        assert_eq!(scene.run_driver(first), Ended::Done);
        scene.end_driver();
        assert_eq!(scene.send(&Request::SetFeatures(second), vec![]), Ended::Done);
        let region = scene.get_region();
        assert_eq!(scene.bring(&region), Ended::Done);
        assert_eq!(scene.run_driver(second), Ended::Done);
        scene.end();
    }
}

/// The front-end may ask for the region before its driver has chosen, and keep it for all drivers.
#[test]
fn one_region_serves_drivers_of_all_layouts() {
    for first in [SPLIT, PACKED] {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        let region = scene.get_region();
        assert_eq!(scene.bring(&region), Ended::Done);
        for features in [first, SPLIT, PACKED, SPLIT, PACKED] {
            assert_eq!(scene.run_driver(features), Ended::Done);
            scene.end_driver();
        }
        scene.end();
    }
}

/// Such a region is of another back-end.
#[test]
fn rings_that_do_not_fit_into_their_region_do_not_start() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let (area, file) = scene.get_region();
    let size = InflightRegion::bytes(RingLayout::Split, QUEUES, area.queue_size);
    assert_eq!(scene.bring(&(InflightArea { size, ..area }, file)), Ended::Done);
    let ended = scene.run_driver(PACKED);
    let Ended::Refused { text, needs_ack: true } = ended else { panic!("{ended:?}") };
    assert!(text.contains("must ask for another region"), "{text}");
    assert!(scene.connection.rings.iter().all(RingState::is_stopped));
    assert_eq!(scene.run_driver(SPLIT), Ended::Done);
    // Rings that run continue with the features that they have.
    let refused = scene.send(&Request::SetFeatures(PACKED | F_LOG_ALL), vec![]);
    assert!(matches!(refused, Ended::Refused { needs_ack: true, .. }), "{refused:?}");
    assert!(scene.connection.rings.iter().all(RingState::is_running));
    assert_eq!(scene.connection.features(), SPLIT);
    scene.end();
}

/// Used elements of a packed ring are among its descriptors, which may be anywhere in memory.
#[test]
fn memory_beyond_the_log_of_a_packed_ring_is_refused() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    for features in [SPLIT, PACKED] {
        assert_eq!(scene.run_driver(features), Ended::Done);
        let size = (GUEST_ADDR + MEMORY_BYTES) / (8 * 4096);
        let log = scene.memory();
        let set = Request::SetLogBase(LogArea { size, file_offset: 0 });
        assert!(matches!(scene.send(&set, log), Ended::Done | Ended::Answer(_)));
        let addresses = addresses(USER_ADDR + 0x4000);
        let set = Request::SetVringAddr { index: 1, addresses, log: Some(0) };
        assert_eq!(scene.send(&set, vec![]), Ended::Done);
        let other = Region { guest_addr: 1 << 40, user_addr: 1 << 40, ..region() };
        let memory = scene.memory();
        let added = scene.send(&Request::AddMemReg(other), memory);
        if features == SPLIT {
            assert_eq!(added, Ended::Done, "only the used ring is logged");
        } else {
            let Ended::Refused { text, needs_ack: true } = added else { panic!("{added:?}") };
            assert!(text.contains("the log of writes is too small"), "{text}");
        }
        assert!(scene.connection.rings.iter().all(RingState::is_running));
        scene.end_driver();
        assert_eq!(scene.send(&Request::ResetDevice, vec![]), Ended::Done);
    }
    scene.end();
}

impl Scene {
    /// Ends a message like a session without a keeper.
    pub(super) fn done(&mut self) -> Ended {
        self.connection.forget_stale_accounts();
        Ended::Done
    }

    /// Starts rings again like such a session.
    pub(super) fn restart(&mut self, rings: Range<usize>, start: Start) -> Outcome {
        self.connection.forget_stale_accounts();
        self.connection.start(rings, start)
    }
}

/// The driver of a packed ring that has been set up just now.
fn new_packed_driver(scene: &Scene) -> PackedDriver<Arc<GuestMemory>> {
    let memory = Arc::clone(&scene.connection.memory.map);
    let [desc_table, avail_ring, used_ring] =
        [0x4000, 0x5000, 0x6000].map(|place| GUEST_ADDR + place);
    for area in [desc_table, avail_ring, used_ring] {
        memory.write(area, &[0; 0x1000]).unwrap();
    }
    let config = QueueConfig {
        size: 16,
        desc_table,
        avail_ring,
        used_ring,
        event_idx: false,
        indirect: false,
        next_avail: 0x8000,
    };
    PackedDriver::new(memory, config)
}

/// Offers some requests for the serial number.
fn offer(driver: &mut PackedDriver<Arc<GuestMemory>>, memory: &GuestMemory) {
    for number in 0..3 {
        let request = GUEST_ADDR + 0x4_0000 + number * 0x100;
        memory.write(request, &[8, 0, 0, 0]).unwrap();
        driver.add(&[Desc::readable(request, 16), Desc::writable(request + 16, 21)], None);
    }
    driver.publish();
}

fn await_answers(scene: &mut Scene, driver: &mut PackedDriver<Arc<GuestMemory>>) {
    for number in 0..3 {
        let is_answered = (0..1000).any(|_| {
            scene.io.turn(Wait::Never).unwrap();
            driver.take_used().is_some()
        });
        assert!(is_answered, "request {number}");
    }
}

/// The first descriptors of the new ring may be available before it starts. Then the ring looks
/// like one that is as far as the old one was.
#[test]
fn a_packed_ring_that_is_set_up_again_starts_from_the_front() {
    for (has_own, resets) in [(true, false), (true, true), (false, true)] {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        if has_own {
            scene.connection.keeps_own_region = true;
        } else {
            let region = scene.get_region();
            assert_eq!(scene.bring(&region), Ended::Done);
        }
        assert_eq!(scene.run_driver(PACKED), Ended::Done);
        let memory = Arc::clone(&scene.connection.memory.map);
        let mut driver = new_packed_driver(&scene);
        offer(&mut driver, &memory);
        let kick = Arc::clone(scene.connection.rings[1].settings.kick.as_ref().unwrap());
        rustix::io::write(&*kick, &1_u64.to_ne_bytes()).unwrap();
        await_answers(&mut scene, &mut driver);
        scene.end_driver();
        if resets {
            assert_eq!(scene.send(&Request::ResetDevice, vec![]), Ended::Done);
        }
        let mut driver = new_packed_driver(&scene);
        offer(&mut driver, &memory);
        assert_eq!(scene.run_driver(PACKED), Ended::Done);
        await_answers(&mut scene, &mut driver);
        scene.end();
    }
}
