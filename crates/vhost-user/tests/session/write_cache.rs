//! A region that outlives a process, and the choice of the driver in it.

use device::blk::config::WRITEBACK_OFFSET;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost_user::message::{Config, InflightArea, Request};
use virtqueue::{InflightRegion, RingLayout};

use crate::scene::{QUEUE_SIZE, QUEUES, Scene};

/// The process is killed, and front-ends do not repeat a driver's earlier write.
#[test]
fn the_next_process_keeps_the_write_cache_setting() {
    let (queues, queue_size) = (QUEUES, QUEUE_SIZE);
    let size = InflightRegion::bytes_with_note(RingLayout::Split, queues, queue_size);
    let region = memfd_create("region", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&region, size).unwrap();
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
