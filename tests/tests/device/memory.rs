//! Guest memory that is added and removed in many pieces.

use std::sync::Arc;

use anyhow::{Result, ensure};
use ringhaul_kit::daemon::{DaemonOptions, GUEST_MEMORY, SECTOR_BYTES, sector_content};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::memory::{Memory, Region, take_count, wait_readable};
use ringhaul_kit::frontend::message::{Message, code};
use ringhaul_kit::frontend::ring::{Desc, Ring};
use ringhaul_kit::frontend::{
    BORDER, DATA, Frontend, MEMORY_END, Setup, blk, feature, protocol_feature,
};
use ringhaul_kit::server::Engine;
use rustix::fs::FallocateFlags;

use crate::start;

for_each_engine! {
    announced_regions_can_all_be_added,
    a_region_is_removed_and_added_again,
    a_table_replaces_a_table,
    a_session_without_protocol_features,
    pages_are_exchanged,
}

const REGIONS: u64 = 509;
const REGION_BYTES: u64 = 0x1_0000;

fn announced_regions_can_all_be_added(engine: Engine) -> Result<()> {
    many_regions(DaemonOptions::new(engine))
}

fn many_regions(mut options: DaemonOptions) -> Result<()> {
    options.num_queues = 1;
    let daemon = start(&options)?;
    let setup = Setup { queues: 1, ..Setup::default() };
    let mut frontend = Frontend::attach(daemon.socket(), &setup)?;
    // Two regions exist. The remaining ones are added while the queue runs, each right behind the
    // one before.
    let file = Region::new(MEMORY_END, (REGIONS - 2) * REGION_BYTES)?;
    let region = |n: u64| Region {
        guest_addr: file.guest_addr + n * REGION_BYTES,
        bytes: REGION_BYTES,
        user_addr: 0x100_0000_0000 + n * REGION_BYTES,
        file_offset: file.file_offset + n * REGION_BYTES,
        file: Arc::clone(&file.file),
    };
    for n in 0..REGIONS - 2 {
        frontend.send_checked(Message::add_region(&region(n)))?;
    }
    let mut regions = frontend.memory.regions.clone();
    regions.push(file.clone());
    let memory = Arc::new(Memory::new(regions)?);
    // Reads into the last region, and into all of the last eight.
    let last = region(REGIONS - 3).guest_addr;
    for (data, bytes) in
        [(last, 4096), (last + REGION_BYTES - 512, 512), (last - 0x7_0000, 0x7_8000)]
    {
        let (header, status) = frontend.put_header(0, 0, blk::IN, 5)?;
        let used = frontend.execute(
            0,
            &[Desc::readable(header, 16), Desc::writable(data, bytes), Desc::writable(status, 1)],
        )?;
        assert_eq!((used, memory.read(status, 1)?[0]), (bytes + 1, blk::OK));
        let bytes = usize::try_from(bytes)?;
        let sectors = u64::try_from(bytes / SECTOR_BYTES)?;
        let content = (5..5 + sectors).flat_map(sector_content).collect::<Vec<_>>();
        assert!(memory.read(data, bytes)? == content, "{bytes} bytes at {data:#x}");
    }
    Ok(())
}

fn a_region_is_removed_and_added_again(engine: Engine) -> Result<()> {
    region_by_region(&DaemonOptions::new(engine))
}

fn region_by_region(options: &DaemonOptions) -> Result<()> {
    let daemon = start(options)?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    let regions = frontend.memory.regions.clone();
    let read_at = |frontend: &mut Frontend, data: u64| {
        let (header, status) = frontend.put_header(0, 0, blk::IN, 5)?;
        frontend.execute(
            0,
            &[Desc::readable(header, 16), Desc::writable(data, 1024), Desc::writable(status, 1)],
        )?;
        anyhow::Ok(frontend.memory.read(status, 1)?[0])
    };
    for _ in 0..3 {
        // Without the region of data the queues continue, and requests into it fail.
        assert_eq!(read_at(&mut frontend, BORDER)?, blk::OK);
        frontend.send_checked(Message::remove_region(&regions[1]))?;
        for data in [BORDER, BORDER - 512] {
            assert_eq!(read_at(&mut frontend, data)?, blk::IOERR);
        }
        assert_eq!(read_at(&mut frontend, BORDER - 1024)?, blk::OK);
        frontend.send_checked(Message::add_region(&regions[1]))?;
        assert_eq!(read_at(&mut frontend, BORDER - 512)?, blk::OK);
        // Without the region of rings the queues wait for it, and continue where they stopped.
        frontend.send_checked(Message::remove_region(&regions[0]))?;
        let (header, status) = frontend.put_header(0, 0, blk::IN, 6)?;
        frontend.rings[0].put_chain(
            0,
            &[Desc::readable(header, 16), Desc::writable(DATA, 512), Desc::writable(status, 1)],
        );
        frontend.rings[0].submit(0)?;
        frontend.send_checked(Message::add_region(&regions[0]))?;
        assert_eq!(frontend.rings[0].wait_used()?.bytes, 513);
        assert!(frontend.memory.read(DATA, SECTOR_BYTES)? == sector_content(6));
        frontend.read(1, 7, SECTOR_BYTES)?;
    }
    assert_eq!(daemon.mappings(GUEST_MEMORY)?, 2, "a region is mapped twice, or not");
    drop(frontend);
    Ok(())
}

fn a_table_replaces_a_table(engine: Engine) -> Result<()> {
    table_by_table(&DaemonOptions::new(engine))
}

fn table_by_table(options: &DaemonOptions) -> Result<()> {
    let daemon = start(options)?;
    let protocol_features = Some(protocol_feature::MQ | protocol_feature::REPLY_ACK);
    let setup = Setup { protocol_features, ..Setup::default() };
    let mut frontend = Frontend::attach(daemon.socket(), &setup)?;
    frontend.write(0, 9, &[1; 512])?;
    // The same regions in new files: the contents of the old ones, rings included, are gone.
    for _ in 0..3 {
        let regions = [
            Region::new(frontend.memory.regions[0].guest_addr, frontend.memory.regions[0].bytes)?,
            Region::new(frontend.memory.regions[1].guest_addr, frontend.memory.regions[1].bytes)?,
        ];
        let memory = Arc::new(Memory::new(regions.to_vec())?);
        for queue in [0, 1] {
            frontend.stop_queue(queue)?;
            let config = frontend.rings[queue].config;
            frontend.rings[queue] = Ring::new(&memory, config)?;
        }
        frontend.memory = memory;
        frontend.share_memory()?;
        for queue in [0, 1] {
            frontend.start_queue(queue, 0)?;
            assert!(frontend.read(queue, 9, 512)? == vec![1; 512]);
        }
        assert_eq!(daemon.mappings(GUEST_MEMORY)?, 2, "old regions are still mapped");
    }
    Ok(())
}

fn a_session_without_protocol_features(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    for without in [0, feature::EVENT_IDX] {
        let setup = Setup { protocol_features: None, ..Setup::default() }.without(without);
        let mut frontend = Frontend::connect(daemon.socket(), &setup)?;
        frontend.negotiate()?;
        assert_eq!(frontend.features & feature::PROTOCOL_FEATURES, 0);
        // Rings come first and memory after them: the order is free.
        for queue in [0, 1] {
            frontend.start_queue(queue, 0)?;
        }
        frontend.share_memory()?;
        for queue in [0, 1] {
            // Without protocol features rings need no enabling: the kick's descriptor starts a
            // ring.
            wait_readable(&frontend.rings[queue].call, "call at the start of a queue")?;
            take_count(&frontend.rings[queue].call);
            frontend.write(queue, 11, &[7; 1024])?;
            assert!(frontend.read(queue, 11, 1024)? == vec![7; 1024]);
        }
        assert_eq!(frontend.stop_queue(0)?, 2);
        let message = Message::ring_state(code::SET_VRING_ENABLE, 1, 0);
        frontend.channel.send(&message)?;
        ensure!(
            frontend.channel.receive().is_ok_and(|reply| reply.is_none()),
            "SET_VRING_ENABLE belongs to the protocol features"
        );
    }
    Ok(())
}

fn fixed_buffers() -> DaemonOptions {
    DaemonOptions::new(Engine::IoUring).with("--fixed-buffers", "")
}

/// Registered memory is added and removed like other memory.
#[test]
fn registered_memory_follows_the_memory_map() -> Result<()> {
    region_by_region(&fixed_buffers())?;
    table_by_table(&fixed_buffers())?;
    many_regions(fixed_buffers())
}

/// Little memory may be locked, and the capability to lock more is dropped.
const LOW_MEMLOCK: &[&str] =
    &["prlimit", "--memlock=1048576", "setpriv", "--bounding-set=-ipc_lock"];

/// A low limit on locked memory prevents registration: the device still works, and the log reports
/// it.
#[test]
fn a_low_limit_on_locked_memory_costs_speed_only() -> Result<()> {
    let options = DaemonOptions { wrapper: LOW_MEMLOCK, ..fixed_buffers() };
    let daemon = start(&options)?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    frontend.write(0, 9, &[3; 4096])?;
    assert!(frontend.read(1, 9, 4096)? == vec![3; 4096]);
    daemon.wait_for_message("cannot register the guest's memory", 1)?;
    Ok(())
}

/// A memory balloon replaces pages of guest memory. Without fixed buffers, data goes to the current
/// pages.
fn pages_are_exchanged(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    for round in 0..4u64 {
        frontend.read(0, 5 + round, 4096)?;
        let region = frontend.memory.regions[1].clone();
        rustix::fs::fallocate(
            &*region.file,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            region.file_offset,
            region.bytes,
        )?;
        let (header, status) = frontend.put_header(0, 0, blk::IN, 5 + round)?;
        frontend.execute(
            0,
            &[Desc::readable(header, 16), Desc::writable(BORDER, 512), Desc::writable(status, 1)],
        )?;
        assert!(frontend.memory.read(BORDER, 512)? == sector_content(5 + round));
    }
    Ok(())
}
