//! Guest memory that is invalid, or that disappears.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::DaemonOptions;
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::memory::{Region, memfd, new_eventfd, take_count};
use ringhaul_kit::frontend::message::{Message, code};
use ringhaul_kit::frontend::ring::{Desc, INDIRECT, layout_at};
use ringhaul_kit::frontend::{
    BORDER, DATA, Frontend, MEMORY_START, Setup, blk, check_service, protocol_feature,
};
use ringhaul_kit::server::Engine;
use rustix::fs::{SealFlags, fcntl_add_seals};

use crate::{start, with_attached, with_negotiated};

for_each_engine! {
    memory_that_shrinks_under_buffers,
    memory_that_shrinks_under_headers,
    memory_that_shrinks_under_rings,
}

const PAGE: u64 = 4096;

/// Sends a region as an addition and as a table; both must be refused.
fn expect_both_refused(
    daemon: &mut ringhaul_kit::daemon::Daemon,
    what: &str,
    region: &Region,
) -> Result<()> {
    for message in [Message::add_region(region), Message::memory_table(&[region])] {
        let what = format!("{what}, request {}", message.request);
        with_negotiated(daemon, &what, |frontend| frontend.expect_refused(message))?;
    }
    Ok(())
}

#[test]
fn impossible_regions() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    let good = Region::new(MEMORY_START, 4 * PAGE)?;
    let end = good.file_offset + good.bytes;
    for (what, region) in [
        ("no bytes", Region { bytes: 0, ..good.clone() }),
        ("a byte more than its file", Region { bytes: good.bytes + 1, ..good.clone() }),
        ("a page more than its file", Region { bytes: good.bytes + PAGE, ..good.clone() }),
        ("far more than its file", Region { bytes: 1 << 40, ..good.clone() }),
        ("more than there is", Region { bytes: 1 << 62, ..good.clone() }),
        ("as much as there are addresses", Region { bytes: u64::MAX, ..good.clone() }),
        ("a start at the end of its file", Region { file_offset: end, ..good.clone() }),
        ("a start beyond its file", Region { file_offset: end + PAGE, ..good.clone() }),
        ("a start that passes all offsets", Region { file_offset: !0xfff, ..good.clone() }),
        ("a start that is not aligned", Region { file_offset: !0, ..good.clone() }),
        ("guest addresses that wrap", Region { guest_addr: !0xfff, ..good.clone() }),
        ("front-end addresses that wrap", Region { user_addr: !0xfff, ..good.clone() }),
    ] {
        expect_both_refused(&mut daemon, what, &region)?;
    }
    daemon.wait_released(&descriptors)
}

#[test]
fn files_that_are_no_memory() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    let good = Region::new(MEMORY_START, 4 * PAGE)?;
    let reopened = |path: &str, write: bool| {
        File::options().read(!write).write(write).open(path).with_context(|| path.to_owned())
    };
    let memory = format!("/proc/self/fd/{}", good.file.as_raw_fd());
    let sealed = |seal| {
        let file = memfd(good.file_offset + good.bytes)?;
        fcntl_add_seals(&file, seal).context("sealing a memfd")?;
        anyhow::Ok(file)
    };
    let (pipe, _writer) = rustix::pipe::pipe()?;
    let (socket, _peer) = UnixStream::pair()?;
    let files: [(&str, OwnedFd); 10] = [
        ("a memfd open for reading", reopened(&memory, false)?.into()),
        ("a memfd open for writing", reopened(&memory, true)?.into()),
        ("a memfd sealed against writing", sealed(SealFlags::WRITE)?),
        ("a memfd sealed against later writing", sealed(SealFlags::FUTURE_WRITE)?),
        ("a folder", File::open(Path::new(env!("CARGO_TARGET_TMPDIR")))?.into()),
        ("the program itself", File::open("/proc/self/exe")?.into()),
        ("/dev/null", File::options().read(true).write(true).open("/dev/null")?.into()),
        ("a pipe", pipe),
        ("a socket", socket.into()),
        ("an eventfd", new_eventfd()?.try_clone()?),
    ];
    for (what, file) in files {
        let region = Region { file: Arc::new(file), ..good.clone() };
        expect_both_refused(&mut daemon, what, &region)?;
    }
    daemon.wait_released(&descriptors)
}

/// A mappable file with pages of a file system, which may be a program (FUSE).
#[test]
fn files_with_pages_of_a_file_system() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    let on_disk = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR"))?;
    on_disk.set_len(16 * PAGE)?;
    let good = Region::new(MEMORY_START, 4 * PAGE)?;
    let region = Region { file: Arc::new(on_disk.into()), ..good };
    expect_both_refused(&mut daemon, "a file on a disk", &region)?;
    daemon.wait_for_message("--memory-files any", 1)?;
    daemon.wait_released(&descriptors)
}

/// The marks of the requests are gone, so a crash would lose the requests.
#[test]
fn an_inflight_region_that_shrinks_stops_the_queues_of_its_front_end() -> Result<()> {
    const REGION_BYTES: u64 = 1088 * 2;
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let mut setup = Setup::default();
    let more = protocol_feature::INFLIGHT_SHMFD;
    setup.protocol_features = setup.protocol_features.map(|usual| usual | more);
    let mut frontend = Frontend::connect(daemon.socket(), &setup)?;
    frontend.negotiate()?;
    frontend.share_memory()?;
    let region = Arc::new(memfd(REGION_BYTES)?);
    frontend.send_checked(Message::inflight_region(&region, REGION_BYTES, 2, setup.queue_size))?;
    for queue in 0..2 {
        frontend.start_queue(queue, 0)?;
        frontend.enable_queue(queue, true)?;
        frontend.read(queue, 0, 512)?;
    }
    rustix::fs::ftruncate(&*region, 0)?;
    for queue in 0..2 {
        let (header, status) = frontend.put_header(queue, 0, blk::IN, 0)?;
        let data = Desc::writable(DATA, 512);
        let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
        let ring = &mut frontend.rings[queue];
        ring.put_chain(0, &chain);
        ring.submit(0)?;
        let gone = "the memory of the inflight region is gone: its file was truncated";
        daemon.wait_for_message(gone, queue + 1)?;
    }
    drop(frontend);
    check_service(&mut daemon)
}

/// Sparse regions cost a front-end nothing, and could exhaust the daemon's address space.
#[test]
fn more_memory_than_a_front_end_may_have() -> Result<()> {
    const TIB: u64 = 1 << 40;
    let options = DaemonOptions::new(Engine::Aio);
    let mut daemon = start(&options.with("--max-mapped-memory", "20T"))?;
    let descriptors = daemon.descriptors()?;
    let file = Arc::new(memfd(TIB)?);
    let region = |index: u64| Region {
        guest_addr: 16 * TIB + index * TIB,
        bytes: TIB,
        user_addr: 32 * TIB + index * TIB,
        file_offset: 0,
        file: Arc::clone(&file),
    };
    let add =
        |frontend: &mut Frontend, index| frontend.send_checked(Message::add_region(&region(index)));
    with_negotiated(&mut daemon, "one TiB after the other", |frontend| {
        (0..16).try_for_each(|index| add(frontend, index))?;
        // A removed region leaves room for the next one.
        frontend.send_checked(Message::remove_region(&region(3)))?;
        add(frontend, 20)?;
        frontend.expect_refused(Message::add_region(&region(21)))
    })?;
    daemon.wait_for_message("(--max-guest-memory) is limited to 17592186044416", 1)?;
    daemon.wait_released(&descriptors)?;

    let regions: Vec<_> = (0..17).map(region).collect();
    let table = Message::memory_table(&regions.iter().collect::<Vec<_>>());
    with_negotiated(&mut daemon, "too much in one table", |frontend| {
        frontend.expect_refused(table)
    })?;
    daemon.wait_released(&descriptors)
}

#[test]
fn more_memory_than_all_front_ends_may_have() -> Result<()> {
    let sockets = tempfile::tempdir()?;
    let socket = sockets.path().join("other.sock");
    let export = format!("socket-path={},null=16M", socket.display());
    let options = DaemonOptions::new(Engine::Aio).with("--export", &export);
    let mut daemon = start(&options.with("--max-mapped-memory", "100M"))?;
    daemon.wait_for_message("serving on", 2)?;
    let large = Region::new(1 << 32, 90 << 20)?;
    let mut first = Frontend::attach(daemon.socket(), &Setup::default())?;
    first.send_checked(Message::add_region(&large))?;
    let mut second = Frontend::connect(&socket, &Setup::default())?;
    second.negotiate()?;
    ensure!(second.share_memory().is_err(), "more is mapped than may be");
    daemon.wait_for_message("(--max-mapped-memory) is limited to 104857600", 1)?;
    // The first front-end stays in service, and makes room when it disconnects.
    first.write(0, 0, &[7; 4096])?;
    drop((first, second));
    check_service(&mut daemon)?;
    let mut second = Frontend::attach(&socket, &Setup::default())?;
    second.write(0, 0, &[7; 4096])?;
    drop(second);
    daemon.terminate()?;
    Ok(())
}

#[test]
fn regions_that_overlap() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    let first = Region::new(MEMORY_START, 4 * PAGE)?;
    let apart = Region::new(MEMORY_START + 64 * PAGE, 4 * PAGE)?;
    let at = |guest: u64, user: u64| Region { guest_addr: guest, user_addr: user, ..apart.clone() };
    let (guest, user) = (first.guest_addr, first.user_addr);
    for (what, second) in [
        ("the same twice", first.clone()),
        ("the same guest address", at(guest, apart.user_addr)),
        ("the last page", at(guest + 3 * PAGE, apart.user_addr)),
        ("the first page", at(guest - 3 * PAGE, apart.user_addr)),
        ("the same front-end address", at(apart.guest_addr, user)),
        ("the last page of the front-end", at(apart.guest_addr, user + 3 * PAGE)),
        ("the first page of the front-end", at(apart.guest_addr, user - 3 * PAGE)),
        ("all of it and more", Region { bytes: 4 * PAGE, ..at(guest - PAGE, apart.user_addr) }),
    ] {
        with_negotiated(&mut daemon, &format!("{what}, one by one"), |frontend| {
            frontend.send_checked(Message::add_region(&first))?;
            frontend.expect_refused(Message::add_region(&second))
        })?;
        with_negotiated(&mut daemon, &format!("{what}, in a table"), |frontend| {
            frontend.expect_refused(Message::memory_table(&[&first, &apart, &second]))
        })?;
    }
    daemon.wait_released(&descriptors)
}

#[test]
fn more_regions_than_announced() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    let file = Region::new(MEMORY_START, 600 * PAGE)?;
    let page = |n: u64| Region {
        guest_addr: file.guest_addr + n * PAGE,
        user_addr: file.user_addr + n * PAGE,
        file_offset: file.file_offset + n * PAGE,
        bytes: PAGE,
        ..file.clone()
    };
    with_negotiated(&mut daemon, "one more than announced", |frontend| {
        for n in 0..509 {
            frontend.send_checked(Message::add_region(&page(n)))?;
        }
        frontend.expect_refused(Message::add_region(&page(509)))
    })?;
    for count in [0, 33, 100] {
        let pages: Vec<Region> = (0..count).map(page).collect();
        with_negotiated(&mut daemon, &format!("a table of {count} regions"), |frontend| {
            let message = Message::memory_table(&pages.iter().collect::<Vec<_>>());
            if message.fds.len() > 32 {
                // A message with more descriptors than the daemon has room for is lost or refused.
                return frontend.channel.send(&message);
            }
            frontend.expect_refused(message)
        })?;
    }
    for count in [0_u32, 1, 3, 33, 127, u32::MAX] {
        with_negotiated(
            &mut daemon,
            &format!("a table that claims {count} regions"),
            |frontend| {
                let mut message = Message::memory_table(&[&page(0), &page(1)]);
                message.body[..4].copy_from_slice(&count.to_ne_bytes());
                frontend.expect_refused(message)
            },
        )?;
    }
    daemon.wait_released(&descriptors)
}

#[test]
fn removals_of_absent_regions() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    let good = Region::new(MEMORY_START, 4 * PAGE)?;
    for (what, region) in [
        ("another guest address", Region { guest_addr: MEMORY_START + PAGE, ..good.clone() }),
        ("another front-end address", Region { user_addr: good.user_addr + PAGE, ..good.clone() }),
        ("half of it", Region { bytes: 2 * PAGE, ..good.clone() }),
        ("no bytes", Region { bytes: 0, ..good.clone() }),
    ] {
        with_negotiated(&mut daemon, what, |frontend| {
            frontend.send_checked(Message::add_region(&good))?;
            frontend.expect_refused(Message::remove_region(&region))
        })?;
    }
    with_negotiated(&mut daemon, "twice", |frontend| {
        frontend.send_checked(Message::add_region(&good))?;
        frontend.send_checked(Message::remove_region(&good))?;
        frontend.expect_refused(Message::remove_region(&good))
    })?;
    with_negotiated(&mut daemon, "with a descriptor, as some front-ends do", |frontend| {
        frontend.send_checked(Message::add_region(&good))?;
        frontend.send_checked(Message::remove_region(&good).with_fd(&good.file))
    })?;
    daemon.wait_released(&descriptors)
}

/// Removes the memory of a region. The test must not touch it afterwards; the daemon will.
fn shrink(frontend: &Frontend, region: usize) -> Result<()> {
    let Region { file, file_offset, .. } = &frontend.memory.regions[region];
    rustix::fs::ftruncate(file, *file_offset).context("shrinking a memfd")
}

/// Submits a chain to queue 1 that touches missing memory, and waits until the daemon has finished
/// it.
fn touch(frontend: &mut Frontend, chain: &[Desc]) -> Result<()> {
    frontend.rings[1].put_chain(0, chain);
    frontend.rings[1].submit(0)?;
    frontend.stop_queue(1)?;
    Ok(())
}

fn memory_that_shrinks_under_buffers(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    // Aligned for direct I/O, and unaligned; all of the buffer missing, and its end.
    for addr in [BORDER, BORDER + 1, BORDER - 512] {
        for (kind, flags) in [(blk::IN, true), (blk::OUT, false), (blk::GET_ID, true)] {
            let what = format!("type {kind} with a buffer at {addr:#x}");
            with_attached(&mut daemon, &Setup::default(), &what, |frontend| {
                shrink(frontend, 1)?;
                let (header, status) = frontend.put_header(1, 0, kind, 5000)?;
                let data =
                    if flags { Desc::writable(addr, 4096) } else { Desc::readable(addr, 4096) };
                touch(frontend, &[Desc::readable(header, 16), data, Desc::writable(status, 1)])?;
                let status = frontend.memory.read(status, 1)?[0];
                ensure!(status == blk::IOERR, "status {status}");
                frontend.read(0, 0, 512)?;
                Ok(())
            })?;
        }
    }
    Ok(())
}

fn memory_that_shrinks_under_headers(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    for gone in ["header", "status", "indirect table"] {
        with_attached(&mut daemon, &Setup::default(), gone, |frontend| {
            shrink(frontend, 1)?;
            let (header, status) = frontend.put_header(1, 0, blk::IN, 0)?;
            let header = Desc::readable(if gone == "header" { BORDER } else { header }, 16);
            let status = Desc::writable(if gone == "status" { BORDER } else { status }, 1);
            let table = Desc { addr: BORDER, len: 48, flags: INDIRECT, next: 0 };
            let chain = match gone {
                "indirect table" => vec![table],
                _ => vec![header, Desc::writable(DATA, 512), status],
            };
            touch(frontend, &chain)?;
            // Only memory that this request touches is missing: queue 0 is not affected.
            frontend.read(0, 0, 512)?;
            Ok(())
        })?;
    }
    Ok(())
}

fn memory_that_shrinks_under_rings(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let setup = Setup::default();
    let mut frontend = Frontend::attach(daemon.socket(), &setup)?;
    // Queue 1 moves to the second region, which disappears.
    frontend.stop_queue(1)?;
    frontend.rings[1].config = layout_at(BORDER, setup.queue_size);
    frontend.start_queue(1, 0)?;
    frontend.read(1, 0, 512)?;
    shrink(&frontend, 1)?;
    frontend.rings[1].kick()?;
    let _ = frontend.stop_queue(1);
    ensure!(take_count(&frontend.rings[1].err) > 0, "nobody heard that the ring is gone");
    frontend.read(0, 0, 512).context("the other queue does not go on")?;
    drop(frontend);
    check_service(&mut daemon)?;
    // Memory that disappears before the queue starts.
    let mut frontend = Frontend::connect(daemon.socket(), &setup)?;
    frontend.negotiate()?;
    frontend.share_memory()?;
    shrink(&frontend, 0)?;
    let refused = frontend.start_queue(0, 0).is_err() || frontend.enable_queue(0, true).is_err();
    ensure!(
        refused || frontend.exchange_number(&Message::new(code::GET_FEATURES, Vec::new())).is_ok()
    );
    drop(frontend);
    check_service(&mut daemon)
}
