//! Inflight regions, which front-ends keep, and the order in which queues start.

use device::scsi::config::ScsiOptions;
use virtqueue::InflightRegion;

use super::*;

/// The place of the version of the second account in a region for split rings of 128 entries.
pub(super) const SECOND_VERSION: u64 = 2112 + 8;
const BASE: u64 = protocol_feature::GET_VRING_BASE_INFLIGHT;
const SKIP_DRAIN: u64 = protocol_feature::GET_VRING_BASE_SKIP_DRAIN;

#[test]
fn an_inflight_region_is_made_kept_by_the_front_end_and_used() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let Ended::Answer(body) = scene.send(&Request::GetInflightFd(inflight_area()), vec![]) else {
        panic!("it was refused");
    };
    let area = InflightArea::decode(&body).unwrap();
    assert_eq!(InflightArea { size: 0, ..area }, inflight_area());
    let file = scene.peer_fd.take().unwrap();
    assert_eq!(rustix::fs::fstat(&file).unwrap().st_size, i64::try_from(area.size).unwrap());
    assert!(rustix::fs::ftruncate(&file, 0).is_err(), "nobody can take it away");
    // An area without padding is accepted too.
    assert_eq!(InflightArea::decode(&body[..20]), Some(area));

    let bring = |scene: &mut Scene, area: InflightArea| {
        scene.send(&Request::SetInflightFd(area), vec![file.try_clone().unwrap()])
    };
    let needed = InflightRegion::bytes(RingLayout::Split, QUEUES, area.queue_size);
    for wrong in [
        InflightArea { size: needed - 1, ..area },
        InflightArea { queues: 0, ..area },
        InflightArea { file_offset: area.size, ..area },
    ] {
        assert!(matches!(bring(&mut scene, wrong), Ended::Refused { needs_ack: true, .. }));
        assert!(scene.connection.inflight.is_none());
    }
    assert_eq!(bring(&mut scene, area), Ended::Done);
    scene.start();
    // The driver's choice is kept in the region for the next process.
    for kept in [0, 1, 0] {
        scene.device.write_config(WRITEBACK_OFFSET, &[kept]).unwrap();
        scene.connection.inflight.as_ref().unwrap().store_writeback(&scene.device);
        scene.device.write_config(WRITEBACK_OFFSET, &[1 - kept]).unwrap();
        assert_eq!(scene.device.read_config(WRITEBACK_OFFSET, 1), [1 - kept]);
        assert_eq!(bring(&mut scene, area), Ended::Done);
        assert_eq!(scene.device.read_config(WRITEBACK_OFFSET, 1), [kept]);
    }
    let version_of_second = || {
        let mut version = [0; 2];
        rustix::io::pread(&file, &mut version, SECOND_VERSION).unwrap();
        u16::from_ne_bytes(version)
    };
    assert_eq!(version_of_second(), 1, "its queue does not use it");

    // A region that running queues cannot use is refused, and they run as before.
    let small = InflightArea { queue_size: 8, ..area };
    let before = scene.state();
    let Ended::Refused { text, needs_ack: true } = bring(&mut scene, small) else {
        panic!("it was taken");
    };
    assert!(
        text.contains("a ring of 16 entries does not match its inflight region for 8"),
        "{text}"
    );
    assert_eq!(scene.state(), before);
    assert!(scene.connection.rings.iter().all(RingState::is_running));
    scene.end();
}

/// A region of the front-end takes the place of the daemon's own one.
#[test]
fn the_daemon_keeps_no_region_of_its_own_beside_that_of_the_front_end() {
    for is_negotiated in [false, true] {
        let region = if is_negotiated { 0 } else { protocol_feature::INFLIGHT_SHMFD };
        let base = if is_negotiated { 0 } else { BASE | SKIP_DRAIN };
        let mut scene = Scene::new(PROTOCOL_FEATURES & !(region | base));
        scene.connection.keeps_own_region = true;
        scene.connection.prepare_own_region();
        assert!(scene.connection.own_region.is_none(), "no ring can start without memory");
        let memory = scene.memory();
        assert_eq!(scene.send(&Request::AddMemReg(super::region()), memory), Ended::Done);
        scene.connection.prepare_own_region();
        assert_eq!(scene.connection.own_region.is_none(), is_negotiated);
        scene.end();
    }
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.connection.keeps_own_region = true;
    scene.start();
    assert!(scene.connection.own_region.is_some(), "rings have started without a region");
    let Ended::Answer(body) = scene.send(&Request::GetInflightFd(inflight_area()), vec![]) else {
        panic!("it was refused");
    };
    let (area, file) = (InflightArea::decode(&body).unwrap(), scene.peer_fd.take().unwrap());
    assert_eq!(scene.send(&Request::SetInflightFd(area), vec![file]), Ended::Done);
    assert!(scene.connection.own_region.is_none() && scene.connection.inflight.is_some());
    assert!(scene.connection.rings.iter().all(RingState::is_running));
    scene.end();
}

/// Otherwise the queue would not run, and the guest would wait for ever.
#[test]
fn memory_that_changes_while_the_region_makes_no_sense_ends_the_connection() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let Ended::Answer(body) = scene.send(&Request::GetInflightFd(inflight_area()), vec![]) else {
        panic!("it was refused");
    };
    let area = InflightArea::decode(&body).unwrap();
    let file = scene.peer_fd.take().unwrap();
    let brought = file.try_clone().unwrap();
    assert_eq!(scene.send(&Request::SetInflightFd(area), vec![brought]), Ended::Done);
    scene.start();
    // A map without the rings is a step of a longer change.
    assert_eq!(scene.send(&Request::RemMemReg(region()), vec![]), Ended::Done);
    rustix::io::pwrite(&file, &[77, 0], SECOND_VERSION).unwrap();
    let memory = scene.memory();
    let ended = scene.send(&Request::AddMemReg(region()), memory);
    assert!(matches!(&ended, Ended::Over(why) if why.contains("version 77")), "{ended:?}");
    scene.end();
}

#[test]
fn requests_are_left_only_where_there_can_be_a_region() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let memory = || Change::Memory(SharedMemory::empty());
    let stop = |scene: &Scene| {
        let kinds = [Change::GetBase(0, AtStop::Leave), Change::Disable(0)]
            .map(|change| scene.connection.stop_kind(&change));
        assert_eq!(kinds[0], kinds[1], "QEMU disables a ring before it asks for its base");
        let of_other = [
            Change::GetBase(0, AtStop::Finish),
            Change::ResetOwner,
            Change::Features(0),
            Change::Kick(0, None),
        ]
        .map(|change| scene.connection.stop_kind(&change));
        assert_eq!(of_other, [StopKind::Final; 4]);
        let has_region = scene.connection.inflight.is_some();
        let kind = scene.connection.stop_kind(&memory());
        assert_eq!(kind == StopKind::KeepInflight, has_region, "its buffers are in the old memory");
        kinds[0]
    };
    assert_eq!(stop(&scene), StopKind::Final, "the front-end has brought none");
    let Ended::Answer(body) = scene.send(&Request::GetInflightFd(inflight_area()), vec![]) else {
        panic!("it was refused");
    };
    let area = InflightArea::decode(&body).unwrap();
    let file = scene.peer_fd.take().unwrap();
    assert_eq!(scene.send(&Request::SetInflightFd(area), vec![file]), Ended::Done);
    assert_eq!(stop(&scene), StopKind::KeepInflight);
    let region = protocol_feature::INFLIGHT_SHMFD;
    let negotiate = |scene: &mut Scene, features: u64| {
        scene.send(&Request::SetProtocolFeatures(PROTOCOL_FEATURES & !features), vec![])
    };
    for (left_out, needed) in
        [(region, "INFLIGHT_SHMFD"), (region | BASE, "_INFLIGHT"), (BASE, "_INFLIGHT")]
    {
        let refused = negotiate(&mut scene, left_out);
        let Ended::Refused { text, needs_ack: true } = refused else { panic!("{refused:?}") };
        assert!(text.contains(&format!("{needed}, which")), "{text}");
    }
    assert_eq!(negotiate(&mut scene, SKIP_DRAIN), Ended::Done);
    assert_eq!(stop(&scene), StopKind::KeepInflight, "the message itself leaves them");
    let skips = scene.send(&Request::GetVringBaseSkipDrain { index: 0 }, vec![]);
    assert!(matches!(skips, Ended::Refused { .. }), "{skips:?}");
    assert_eq!(negotiate(&mut scene, BASE | SKIP_DRAIN), Ended::Done);
    assert_eq!(stop(&scene), StopKind::Final, "the front-end does not know of it");
    assert_eq!(negotiate(&mut scene, region | BASE | SKIP_DRAIN), Ended::Done);
    scene.start();
    scene.connection.begin_pause();
    let kinds = scene.connection.rings.iter().map(RingState::stop_kind);
    assert!(kinds.clone().all(|kind| kind == Some(StopKind::KeepInflight)), "the front-end waits");
    scene.settle().unwrap();
    scene.end();
}

/// A front-end that asks for a base with all requests answered must not take one with some left.
#[test]
fn a_ring_that_cannot_run_again_keeps_the_requests_that_it_has_left() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    assert_eq!(scene.send(&Request::SetProtocolFeatures(PROTOCOL_FEATURES), vec![]), Ended::Done);
    scene.start();
    let disable = Request::SetVringEnable { index: 0, value: 0 };
    assert_eq!(scene.send(&disable, vec![]), Ended::Done);
    assert_eq!(scene.send(&Request::RemMemReg(region()), vec![]), Ended::Done);
    scene.connection.rings[0].has_left = true;
    let get = Request::GetVringBase { index: 0 };
    let refused = scene.send(&get, vec![]);
    let Ended::Refused { text, needs_ack: true } = refused else { panic!("{refused:?}") };
    assert!(text.contains("queue 0 has left requests"), "{text}");
    let ring = &scene.connection.rings[0];
    assert!(ring.settings.started && !ring.settings.enabled && ring.has_left);
    // With its memory, it answers them and gives its base.
    let memory = scene.memory();
    assert_eq!(scene.send(&Request::AddMemReg(region()), memory), Ended::Done);
    assert!(matches!(scene.send(&get, vec![]), Ended::Answer(_)));
    assert!(!scene.connection.rings[0].has_left);
    scene.end();
}

/// A front-end that asks with SKIP_DRAIN knows of the requests, and a new region has none.
#[test]
fn left_requests_are_of_one_region_until_the_front_end_has_the_base() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let regions = [scene.get_region(), scene.get_region()];
    assert_eq!(scene.bring(&regions[0]), Ended::Done);
    scene.start();
    let disable = Request::SetVringEnable { index: 0, value: 0 };
    for knows in [true, false] {
        assert_eq!(scene.send(&disable, vec![]), Ended::Done);
        scene.connection.rings[0].has_left = true;
        if knows {
            let base = scene.send(&Request::GetVringBaseSkipDrain { index: 0 }, vec![]);
            assert!(matches!(base, Ended::Answer(_)), "{base:?}");
        } else {
            assert_eq!(scene.bring(&regions[1]), Ended::Done);
        }
        assert!(!scene.connection.rings[0].has_left, "{knows}");
        let kick = Request::SetVringKick { index: 0, has_fd: true };
        assert_eq!(scene.send(&kick, vec![new_eventfd()]), Ended::Done);
    }
    scene.end();
}

/// Requests that a driver has left in the request rings must be known before task management
/// begins.
#[test]
fn task_management_begins_when_all_other_rings_are_served() {
    use Request::*;
    let options = ScsiOptions { num_queues: QUEUES, ..ScsiOptions::default() };
    let device = Device::scsi(options, Arc::new(LogEvents::new("test")));
    let mut scene = Scene::with_device(device, PROTOCOL_FEATURES & !protocol_feature::CONFIG);
    let running =
        |scene: &Scene| Vec::from_iter(scene.connection.rings.iter().map(RingState::is_running));
    let features = SetFeatures(F_PROTOCOL_FEATURES | 1 << 32);
    let mut all = vec![(features, vec![]), (AddMemReg(region()), scene.memory())];
    // The last ring is not used.
    for index in 0..3_u8 {
        let addresses = addresses(USER_ADDR + 0x4000 * u64::from(index));
        all.push((SetVringNum { index: index.into(), size: 16 }, vec![]));
        all.push((SetVringAddr { index: index.into(), addresses, log: None }, vec![]));
        all.push((SetVringKick { index, has_fd: true }, vec![new_eventfd()]));
    }
    for (request, fds) in all {
        assert_eq!(scene.send(&request, fds), Ended::Done, "{request:?}");
    }
    let enable = |scene: &mut Scene, index, value| {
        assert_eq!(scene.send(&SetVringEnable { index, value }, vec![]), Ended::Done);
        running(scene)
    };
    assert_eq!(enable(&mut scene, 0, 1), [false; 4]);
    assert_eq!(enable(&mut scene, 1, 1), [false, true, false, false]);
    assert_eq!(enable(&mut scene, 2, 1), [true, true, true, false]);
    assert_eq!(enable(&mut scene, 2, 0), [true, true, false, false]);
    assert_eq!(enable(&mut scene, 0, 0), [false, true, false, false]);
    assert_eq!(enable(&mut scene, 0, 1), [false, true, false, false]);
    let base = scene.send(&GetVringBase { index: 2 }, vec![]);
    assert!(matches!(base, Ended::Answer(_)), "{base:?}");
    assert_eq!(running(&scene), [true, true, false, false], "nothing is left to wait for");
    scene.end();
}
