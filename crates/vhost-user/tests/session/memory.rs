//! Memory that comes and goes while a session runs.

use device::blk::config::WRITEBACK_OFFSET;
use vhost_user::End;
use vhost_user::message::{Config, InflightArea, Region, Request};
use virtqueue::{InflightRegion, MappingBudget, RingLayout};

use crate::scene::{QUEUE_SIZE, QUEUES, Scene, region};

const ACK: [u8; 8] = [0; 8];

/// The queue cannot start again after the memory has changed, and the change cannot be undone.
#[test]
fn a_queue_that_cannot_restart_in_new_memory_ends_the_connection() {
    for needs_reply in [true, false] {
        let mut scene = Scene::new();
        let (mut session, mut frontend) = scene.attach();
        scene.negotiate(&mut session, &mut frontend);
        let (queues, queue_size) = (QUEUES, QUEUE_SIZE);
        let bytes = InflightRegion::bytes(RingLayout::Split, queues, queue_size);
        let file = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        let area = InflightArea { size: bytes, file_offset: 0, queues, queue_size };
        scene.send_checked(&mut session, &mut frontend, &Request::SetInflightFd(area), &[&file]);
        scene.set_up(&mut session, &mut frontend);
        assert_eq!(scene.io.io().tasks(), 2);
        // The version of the first queue's account.
        rustix::io::pwrite(&file, &[77, 0], 8).unwrap();
        let other = Region { guest_addr: 1 << 40, user_addr: 1 << 40, ..region() };
        let memory = rustix::fs::memfd_create("more", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, other.size).unwrap();
        frontend.send(&Request::AddMemReg(other), needs_reply, &[&memory]);
        frontend.send(&Request::GetFeatures, false, &[]);
        let end = loop {
            let end = scene.drive_all(&mut session);
            if end.is_some() || frontend.receive().is_some() {
                break end;
            }
            scene.await_due(&session);
        };
        assert!(
            matches!(&end, Some(End::Dropped(reason)) if reason.contains("version 77")),
            "{end:?}"
        );
        assert!(frontend.is_closed());
        assert_eq!(scene.io.io().tasks(), 0);
    }
}

/// Memory is unmapped on another thread, and counts until then. The front-end waits for that, and
/// so does the next one.
#[test]
fn removed_memory_makes_room_for_the_next_region() {
    const BYTES: u64 = 1 << 30;
    let mut scene = Scene::new();
    let budget = MappingBudget::new("test", BYTES + (1 << 20));
    scene.rules.budget = budget.clone();
    let memory = rustix::fs::memfd_create("large", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, BYTES).unwrap();
    let large = Region { guest_addr: 1 << 40, user_addr: 1 << 40, size: BYTES, file_offset: 0 };
    for _ in 0..8 {
        let (mut session, mut frontend) = scene.attach();
        scene.set_up(&mut session, &mut frontend);
        for _ in 0..8 {
            scene.send_checked(&mut session, &mut frontend, &Request::AddMemReg(large), &[&memory]);
            frontend.send(&Request::RemMemReg(large), true, &[]);
            let answer = loop {
                assert_eq!(scene.drive_all(&mut session), None);
                let Some((_, body)) = frontend.receive() else {
                    scene.await_due(&session);
                    continue;
                };
                break body;
            };
            assert_eq!(answer, ACK, "{:?}", scene.refused);
            assert_eq!(budget.mapped_bytes(), 1 << 20);
        }
        scene.send_checked(&mut session, &mut frontend, &Request::AddMemReg(large), &[&memory]);
        drop(frontend);
        let end = loop {
            if let Some(end) = scene.drive_all(&mut session) {
                break end;
            }
            assert!(session.is_ending());
            session.begin_end();
            scene.await_due(&session);
        };
        assert_eq!(end, End::Gone(None), "the first reason stays");
        assert_eq!(budget.mapped_bytes(), 0);
    }
}

/// The process is killed, and front-ends do not repeat a driver's earlier write.
#[test]
fn the_next_process_keeps_the_write_cache_setting() {
    let (queues, queue_size) = (QUEUES, QUEUE_SIZE);
    let size = InflightRegion::bytes_with_note(RingLayout::Split, queues, queue_size);
    let region = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&region, size).unwrap();
    let area = InflightArea { size, file_offset: 0, queues, queue_size };
    let offset = u32::try_from(WRITEBACK_OFFSET).unwrap();
    let config = |value| Config { offset, flags: 0, data: vec![value] };
    let mut last = None;
    for chosen in [0, 1, 0, 0, 1] {
        let mut scene = Scene::new();
        let (mut session, mut frontend) = scene.attach();
        scene.negotiate(&mut session, &mut frontend);
        scene.send_checked(&mut session, &mut frontend, &Request::SetInflightFd(area), &[&region]);
        scene.set_up(&mut session, &mut frontend);
        let shown =
            scene.exchange(&mut session, &mut frontend, &Request::GetConfig(config(0)), &[]);
        // A new device has its cache on.
        assert_eq!(shown[12..], [last.unwrap_or(1)], "before it chooses {chosen}");
        scene.send_checked(&mut session, &mut frontend, &Request::SetConfig(config(chosen)), &[]);
        last = Some(chosen);
    }
}
