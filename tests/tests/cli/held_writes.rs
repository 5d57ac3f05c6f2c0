//! Requests that wait while their queues stop are left in the inflight region. Without a region, a
//! takeover is refused.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, TestFolders};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::frontend::memory::memfd;
use ringhaul_kit::frontend::message::Message;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, Setup, blk, protocol_feature};
use ringhaul_kit::fuse::{Fuse, opcode};
use ringhaul_kit::system::{Tmpfs, can_change_system};
use ringhaul_tools::process::retry;
use serde_json::json;

use super::control::Client;
use super::throttling::{begin_writes, ctl, end_writes, serve, shown};
use crate::takeover::{self, TAKEN};
use crate::test_folders;

const MIB: u64 = 1 << 20;
const QUEUES: u16 = 2;
const QUEUE_SIZE: u16 = 64;
pub(super) const REGION_BYTES: u64 = 1088 * QUEUES as u64;

/// Attaches a front-end that has an inflight region.
pub(super) fn attach(socket: &Path, region: &Arc<OwnedFd>) -> Result<Frontend> {
    attach_with(socket, region, 0)
}

/// Attaches a front-end that has an inflight region, and also negotiates `more`.
pub(super) fn attach_with(socket: &Path, region: &Arc<OwnedFd>, more: u64) -> Result<Frontend> {
    let mut setup = Setup::default().queue_size(QUEUE_SIZE);
    let more = more | protocol_feature::INFLIGHT_SHMFD | protocol_feature::GET_VRING_BASE_INFLIGHT;
    setup.protocol_features = setup.protocol_features.map(|usual| usual | more);
    let mut frontend = Frontend::connect(socket, &setup)?;
    frontend.negotiate()?;
    frontend.share_memory()?;
    share_region(&mut frontend, region)?;
    for queue in 0..QUEUES.into() {
        frontend.start_queue(queue, 0)?;
        frontend.enable_queue(queue, true)?;
    }
    Ok(frontend)
}

pub(super) fn share_region(frontend: &mut Frontend, region: &Arc<OwnedFd>) -> Result<()> {
    frontend.send_checked(Message::inflight_region(region, REGION_BYTES, QUEUES, QUEUE_SIZE))
}

/// A disk on a full file system, and a front-end with four held writes.
struct HeldWrites {
    space: Tmpfs,
    folders: TestFolders,
    daemon: Running,
    client: Client,
    frontend: Frontend,
    region: Arc<OwnedFd>,
}

impl HeldWrites {
    fn new() -> Result<Self> {
        let (folders, space) = (test_folders()?, Tmpfs::mount(MIB)?);
        let disk = space.path().join("disk.img");
        fs::File::create(&disk)?.set_len(MIB)?;
        fs::write(space.path().join("filler"), vec![1; 1 << 20]).ok();
        let vm = folders.socket("vm").display().to_string();
        let disk = disk.display().to_string();
        let words = ["--socket-path", &vm, "--name", "vm", "--blk-file", &disk, "--werror", "hold"];
        let (daemon, client) = serve(&folders, &words)?;
        let region = Arc::new(memfd(REGION_BYTES)?);
        let mut frontend = attach(Path::new(&vm), &region)?;
        begin_writes(&mut frontend, 4)?;
        let mut this = Self { space, folders, daemon, client, frontend, region };
        this.wait_until_held()?;
        Ok(this)
    }

    fn wait_until_held(&mut self) -> Result<()> {
        retry(LIMIT, || {
            let shown = shown(&mut self.client, "vm")?;
            ensure!(shown["disk-state"] == "held" && shown["disks"][0]["waited"] == 4, "{shown}");
            Ok(())
        })
    }

    fn wait_until(&mut self, state: &str) -> Result<()> {
        retry(LIMIT, || {
            let shown = shown(&mut self.client, "vm")?;
            ensure!(shown["disk-state"] == state, "it is {}", shown["disk-state"]);
            Ok(())
        })
    }

    /// Frees space and resumes. All four writes succeed.
    fn finish(mut self) -> Result<()> {
        let statuses = [0, 1, 2, 3].map(|slot| self.frontend.status(0, slot));
        ensure!(statuses == [Some(blk::PENDING); 4], "{statuses:?}");
        fs::remove_file(self.space.path().join("filler"))?;
        ctl(&self.folders, &["resume", "vm"])?;
        end_writes(&mut self.frontend, 0..4)?;
        self.wait_until("ready")?;
        is_counted(&self.folders, "ringhaul_held_seconds_total{")
    }
}

/// Fails if a time is zero in the metrics.
fn is_counted(folders: &TestFolders, start: &str) -> Result<()> {
    let text = ctl(folders, &["metrics"])?;
    let line = text.lines().find(|line| line.starts_with(start)).context("no such time")?;
    let seconds: f64 = line.split(' ').nth(1).context("no value")?.parse()?;
    ensure!(seconds > 0.0, "{line}");
    Ok(())
}

#[test]
fn held_writes_are_taken_over() -> Result<()> {
    if !can_change_system("mounts") {
        return Ok(());
    }
    let mut held = HeldWrites::new()?;
    let mut next = Running::start(&mut taking_over(&held.folders)?)?;
    next.wait_for(TAKEN)?;
    std::mem::replace(&mut held.daemon, next).finish()?.expect_code(0)?;
    held.client = Client::new(&held.folders.socket("control"))?;
    held.wait_until_held()?;
    held.finish()
}

#[test]
fn held_writes_survive_a_takeover_that_fails() -> Result<()> {
    if !can_change_system("mounts") {
        return Ok(());
    }
    let mut held = HeldWrites::new()?;
    let mut client = takeover::Client::new(&held.folders)?;
    client.begin()?;
    let paused = client.call("takeover.pause", &json!({}))?;
    ensure!(paused["error"].is_null(), "{paused}");
    held.wait_until("ready")?;
    drop(client);
    held.daemon.wait_for("does not take over")?;
    held.wait_until("held")?;
    held.finish()
}

/// QEMU stops and continues a guest like this.
#[test]
fn held_writes_survive_a_stop_of_their_queue() -> Result<()> {
    if !can_change_system("mounts") {
        return Ok(());
    }
    let mut held = HeldWrites::new()?;
    held.frontend.enable_queue(0, false)?;
    held.wait_until("ready")?;
    ensure!(held.frontend.stop_queue(0)? == 4);
    let (frontend, region) = (&mut held.frontend, &held.region);
    share_region(frontend, region)?;
    frontend.start_queue(0, 0)?;
    frontend.enable_queue(0, true)?;
    held.wait_until("held")?;
    // The writes restart in the new map of memory.
    let region = held.frontend.memory.regions[1].clone();
    held.frontend.send_checked(Message::remove_region(&region))?;
    held.frontend.send_checked(Message::add_region(&region))?;
    held.finish()
}

/// The error policy also covers errors that arrive while queues stop.
#[test]
fn a_read_that_fails_while_a_takeover_begins_is_retried() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    for keeps_region in [true, false] {
        let folders = test_folders()?;
        let (vm, file) = (folders.socket("vm"), fuse.file());
        let words = [&vm, &file].map(|path| path.display().to_string());
        let words = ["--socket-path", &words[0], "--name", "vm", "--blk-file", &words[1]];
        let more = ["--read-only", "--lock", "off", "--engine", "threads", "--rerror", "retry"];
        let (mut daemon, mut client) = serve(&folders, &[&words[..], &more].concat())?;
        let mut frontend = match keeps_region {
            true => attach(&vm, &Arc::new(memfd(REGION_BYTES)?))?,
            false => Frontend::attach(&vm, &Setup::default())?,
        };
        fuse.withhold(daemon.pid(), &[opcode::READ]);
        let (header, status) = frontend.put_header(0, 0, blk::IN, 8)?;
        let chain =
            [Desc::readable(header, 16), Desc::writable(DATA, 512), Desc::writable(status, 1)];
        frontend.rings[0].put_chain(0, &chain);
        frontend.rings[0].submit(0)?;
        fuse.wait_for(opcode::READ)?;
        let fails = (|| {
            let mut next = takeover::Client::new(&folders)?;
            next.begin()?;
            next.send("takeover.pause", &json!({}))?;
            retry(LIMIT, || {
                let state = shown(&mut client, "vm")?["front-end"]["queues"][0]["state"].clone();
                ensure!(state == "stopping", "the queue is {state}");
                Ok(())
            })?;
            fuse.fail();
            let paused = next.answer()?;
            if keeps_region {
                ensure!(paused["error"].is_null(), "{paused}");
            } else {
                let message = paused["error"]["message"].as_str().context("it was not refused")?;
                ensure!(message.contains("keeps no inflight region"), "{message}");
            }
            ensure!(frontend.status(0, 0) == Some(blk::PENDING), "the guest was told");
            drop(next);
            daemon.wait_for("does not take over")
        })();
        // Released even after a failure: the kernel keeps a process with hung reads.
        fuse.release();
        fails?;
        let used = frontend.rings[0].wait_used()?;
        ensure!((used.bytes, frontend.status(0, 0)) == (513, Some(blk::OK)), "{used:?}");
        is_counted(&folders, "ringhaul_retried_seconds_total{")?;
    }
    Ok(())
}
