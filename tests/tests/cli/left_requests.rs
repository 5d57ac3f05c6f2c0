//! Requests that a front-end takes from one daemon to the next: they wait when their queue stops,
//! and stay in its inflight region. An op that has begun ends before the queue has stopped.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, TestFolders};
use ringhaul_kit::frontend::memory::memfd;
use ringhaul_kit::frontend::message::{Channel, Message, code};
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, blk, protocol_feature};
use ringhaul_kit::fuse::{Fuse, opcode};
use ringhaul_tools::process::retry;

use super::control::Client;
use super::held_writes::{REGION_BYTES, attach, attach_with, share_region};
use super::throttling::{begin_writes, ctl, end_writes, serve, shown};
use crate::test_folders;

const MIB: u64 = 1 << 20;
/// Bytes of each write.
const PIECE: usize = 64 << 10;
const WRITES: u16 = 4;
const SKIP_DRAIN: u64 = protocol_feature::GET_VRING_BASE_SKIP_DRAIN;

/// A disk whose limit lets one write begin at once, and the next one after 18 hours. Three writes
/// wait.
struct Source {
    folders: TestFolders,
    disk: PathBuf,
    _daemon: Running,
    client: Client,
    frontend: Frontend,
    region: Arc<std::os::fd::OwnedFd>,
}

impl Source {
    /// Attaches a front-end that also negotiates these protocol features.
    fn new(more: u64) -> Result<Self> {
        let folders = test_folders()?;
        let (vm, disk) = (folders.socket("vm"), folders.disk("disk.img", MIB)?);
        let words = ["--socket-path", "", "--name", "vm", "--blk-file", "", "--lock", "late"];
        let (vm_text, disk_text) = (vm.display().to_string(), disk.display().to_string());
        let mut words = [&words[..], &["--limits", "bps-write=1"]].concat();
        (words[1], words[5]) = (&vm_text, &disk_text);
        let (daemon, mut client) = serve(&folders, &words)?;
        let region = Arc::new(memfd(REGION_BYTES)?);
        let mut frontend = attach_with(&vm, &region, more)?;
        frontend.memory.write(DATA, &[0x5a; PIECE])?;
        begin_writes(&mut frontend, WRITES)?;
        end_writes(&mut frontend, 0..1)?;
        retry(LIMIT, || {
            let shown = shown(&mut client, "vm")?;
            ensure!(shown["unfinished"] == WRITES - 1, "{shown}");
            Ok(())
        })?;
        Ok(Self { folders, disk, _daemon: daemon, client, frontend, region })
    }

    /// Three writes have no answer and no effect.
    fn check_left(&mut self) -> Result<()> {
        for slot in 1..WRITES {
            let status = self.frontend.status(0, slot);
            ensure!(status == Some(blk::PENDING), "write {slot} has status {status:?}");
        }
        ensure!(self.frontend.rings[0].take_used().is_none(), "a write is answered");
        let contents = fs::read(&self.disk).context("reading the disk")?;
        ensure!(contents[..PIECE] == [0x5a; PIECE], "the first write is not on the disk");
        ensure!(contents[PIECE..].iter().all(|byte| *byte == 0), "a write without answer is done");
        Ok(())
    }

    /// Moves the front-end to another daemon, which does the three writes.
    fn move_on(mut self, base: u16) -> Result<()> {
        self.check_left()?;
        // Without the limit a write that still waited would begin.
        ctl(&self.folders, &["set-disk", "vm", "bps-write=0"])?;
        let shown = shown(&mut self.client, "vm")?;
        ensure!(shown["unfinished"] == 0, "{shown}");
        self.check_left()?;
        let folders = test_folders()?;
        let (vm, disk) = (folders.socket("vm"), self.disk.display().to_string());
        let vm_text = vm.display().to_string();
        let words = ["--socket-path", &vm_text, "--name", "vm", "--blk-file", &disk];
        let (mut daemon, _client) = serve(&folders, &[&words[..], &["--lock", "late"]].concat())?;
        let frontend = &mut self.frontend;
        frontend.channel = Channel::connect(&vm)?;
        frontend.negotiate()?;
        frontend.share_memory()?;
        share_region(frontend, &self.region)?;
        frontend.start_queue(0, base)?;
        frontend.enable_queue(0, true)?;
        end_writes(frontend, 1..WRITES)?;
        daemon.wait_for("3 requests of an earlier process are repeated")?;
        ensure!(frontend.stop_queue(0)? == WRITES);
        ensure!(frontend.rings[0].take_used().is_none(), "a write is answered twice");
        let contents = fs::read(&disk).context("reading the disk")?;
        ensure!(contents[..usize::from(WRITES) * PIECE].iter().all(|byte| *byte == 0x5a));
        Ok(())
    }
}

/// The first form of the protocol: the feature alone changes the message.
#[test]
fn waiting_writes_move_to_another_daemon() -> Result<()> {
    let mut source = Source::new(0)?;
    let base = source.frontend.stop_queue(0)?;
    ensure!(base == WRITES, "{base}");
    source.move_on(base)
}

/// QEMU disables a queue before it stops it.
#[test]
fn waiting_writes_move_by_a_message_of_its_own() -> Result<()> {
    for disables in [false, true] {
        let mut source = Source::new(SKIP_DRAIN)?;
        if disables {
            source.frontend.enable_queue(0, false)?;
        }
        let base = source.frontend.stop_queue_by(code::GET_VRING_BASE_SKIP_DRAIN, 0)?;
        ensure!(base == WRITES, "{base}");
        source.move_on(base)?;
    }
    Ok(())
}

/// Without a region for the next daemon they would be lost.
#[test]
fn a_front_end_that_can_leave_writes_gets_their_answers_otherwise() -> Result<()> {
    for disables in [false, true] {
        let mut source = Source::new(SKIP_DRAIN)?;
        if disables {
            source.frontend.enable_queue(0, false)?;
            source.check_left()?;
        }
        let base = source.frontend.stop_queue(0)?;
        ensure!(base == WRITES, "{base}");
        for _ in 1..WRITES {
            let used = source.frontend.rings[0].take_used().context("a write has no answer")?;
            let status = source.frontend.status(0, u16::try_from(used.head / 4)?);
            ensure!(status == Some(blk::OK), "{used:?} has status {status:?}");
        }
        // A kick starts the queue again, but it is disabled.
        source.frontend.start_queue(0, base)?;
        source.frontend.enable_queue(0, true)?;
        source.frontend.read(0, 0, 512)?;
    }
    Ok(())
}

/// Data of an op that landed later would overwrite the memory of a guest that has moved on.
#[test]
fn a_read_that_has_begun_ends_before_its_queue_has_stopped() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let (vm, file) = (folders.socket("vm"), fuse.file().display().to_string());
    let vm_text = vm.display().to_string();
    let words = ["--socket-path", &vm_text, "--name", "vm", "--blk-file", &file, "--read-only"];
    let more = ["--lock", "off", "--engine", "threads", "--limits", "bps-read=1"];
    let (daemon, mut client) = serve(&folders, &[&words[..], &more].concat())?;
    let region = Arc::new(memfd(REGION_BYTES)?);
    let mut frontend = attach(&vm, &region)?;
    fuse.withhold(daemon.pid(), &[opcode::READ]);
    let held = (|| {
        for slot in 0..2 {
            let data = DATA + u64::from(slot) * 4096;
            frontend.memory.write(data, &[0x77; 512])?;
            let (header, status) = frontend.put_header(0, slot, blk::IN, 8)?;
            let chain =
                [Desc::readable(header, 16), Desc::writable(data, 512), Desc::writable(status, 1)];
            frontend.rings[0].put_chain(4 * slot, &chain);
            frontend.rings[0].submit(4 * slot)?;
        }
        fuse.wait_for(opcode::READ)?;
        frontend.channel.send(&Message::ring_state(code::GET_VRING_BASE, 0, 0))?;
        retry(LIMIT, || {
            let queue = shown(&mut client, "vm")?["front-end"]["queues"][0].clone();
            ensure!(queue["state"] == "stopping", "{queue}");
            Ok(())
        })?;
        ensure!(frontend.status(0, 0) == Some(blk::PENDING), "the read has no data yet");
        Ok(())
    })();
    // Released even after a failure: the kernel keeps a process with hung reads.
    fuse.release();
    held?;
    let reply = frontend.channel.receive()?.context("the daemon has closed the connection")?;
    ensure!(reply.body == [0_u32, 2].map(u32::to_ne_bytes).concat(), "{reply:?}");
    let used = frontend.rings[0].take_used().context("the read that had begun has no answer")?;
    ensure!((used.head, used.bytes) == (0, 513), "{used:?}");
    ensure!(frontend.status(0, 0) == Some(blk::OK));
    ensure!(frontend.memory.read(DATA, 512)? == [0; 512], "the data is missing");
    ensure!(frontend.rings[0].take_used().is_none(), "the read that waited is answered");
    ensure!(frontend.status(0, 1) == Some(blk::PENDING));
    ensure!(frontend.memory.read(DATA + 4096, 512)? == [0x77; 512], "it has written data");
    Ok(())
}
