//! Descriptors of a front-end that block their user: files of a FUSE file system that does not
//! answer.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::memory::Region;
use ringhaul_kit::frontend::message::{Message, code};
use ringhaul_kit::frontend::ring::layout_at;
use ringhaul_kit::frontend::{Frontend, MEMORY_END, Setup, check_service};
use ringhaul_kit::fuse::{FILE_BYTES, Fuse, opcode};
use ringhaul_kit::server::Engine;

use crate::scene::Scene;

for_each_engine! {
    a_file_that_does_not_answer_as_memory,
    a_file_that_does_not_answer_as_an_eventfd,
    a_file_that_does_not_answer_beside_a_message,
}

/// The file system is dropped before the daemon and the front-ends that have its files open,
/// because their close needs its answer.
struct FuseScene {
    fuse: Fuse,
    scene: Scene,
}

impl FuseScene {
    fn start(engine: Engine) -> Result<Option<Self>> {
        let Some(fuse) = Fuse::mount()? else { return Ok(None) };
        let scene = Scene::with_engine(engine)?;
        Ok(Some(Self { fuse, scene }))
    }

    /// Checks that the neighbours stay in service, that a new front-end is served, and that SIGTERM
    /// ends all exports. The kernel keeps a process that closes a file until FUSE answers.
    fn finish(self) -> Result<()> {
        let Self { fuse, mut scene } = self;
        let result = (|| {
            scene.check_neighbours()?;
            check_service(&mut scene.daemon).context("the export itself")?;
            scene.check_neighbours()?;
            scene.end_exports().context("while FUSE does not answer")
        })();
        let folder = fuse.folder().to_string_lossy().into_owned();
        drop(fuse);
        result?;
        scene.finish()?;
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        ensure!(!mounts.contains(&folder), "{folder} is still mounted");
        Ok(())
    }
}

fn a_file_that_does_not_answer_as_memory(engine: Engine) -> Result<()> {
    let Some(mut this) = FuseScene::start(engine)? else { return Ok(()) };
    this.fuse.withhold(this.scene.daemon.pid(), &[opcode::READ]);
    let region = Region {
        guest_addr: MEMORY_END,
        bytes: FILE_BYTES,
        user_addr: 0x6000_0000_0000,
        file_offset: 0,
        file: this.fuse.open()?,
    };
    let mut bad = Frontend::attach(this.scene.daemon.socket(), &Setup::default())?;
    let refused = bad.expect_refused(Message::add_region(&region));
    if refused.is_err() {
        // The daemon took the region, so use it for a queue.
        bad.stop_queue(1)?;
        bad.rings[1].config = layout_at(MEMORY_END, 64);
        let message = Message::ring_addresses(
            1,
            region.user_addr,
            region.user_addr + 0x5000,
            region.user_addr + 0x4000,
        );
        bad.send_checked(message)?;
        let kick = std::sync::Arc::clone(&bad.rings[1].kick);
        bad.channel.send(&Message::ring_fd(code::SET_VRING_KICK, 1, Some(&kick)))?;
        this.fuse.wait_for(opcode::READ)?;
    }
    this.scene.check_neighbours().context("beside memory that does not answer")?;
    drop(bad);
    refused.context("memory that waits for a program")?;
    this.finish()
}

fn a_file_that_does_not_answer_as_an_eventfd(engine: Engine) -> Result<()> {
    let Some(mut this) = FuseScene::start(engine)? else { return Ok(()) };
    this.fuse.withhold(this.scene.daemon.pid(), &[opcode::POLL, opcode::READ]);
    for request in [code::SET_VRING_KICK, code::SET_VRING_CALL, code::SET_VRING_ERR] {
        let mut bad = Frontend::attach(this.scene.daemon.socket(), &Setup::default())?;
        let message = Message::ring_fd(request, 1, Some(&this.fuse.open()?));
        let refused = bad.expect_refused(message);
        this.scene.check_neighbours().with_context(|| format!("beside message {request}"))?;
        refused.with_context(|| format!("message {request} with a file"))?;
        ensure!(!this.fuse.is_waiting(opcode::POLL), "the daemon polls a foreign file");
    }
    this.finish()
}

/// Closing the file takes an answer, and so does reading its attributes.
fn a_file_that_does_not_answer_beside_a_message(engine: Engine) -> Result<()> {
    let Some(mut this) = FuseScene::start(engine)? else { return Ok(()) };
    let files = [this.fuse.open()?, this.fuse.open()?];
    this.fuse.withhold(
        this.scene.daemon.pid(),
        &[opcode::FLUSH, opcode::GETATTR, opcode::STATX, opcode::POLL],
    );
    for (message, file) in [
        Message::new(code::GET_QUEUE_NUM, Vec::new()),
        Message::ring_fd(code::SET_VRING_CALL, 0, Some(&files[0])),
    ]
    .into_iter()
    .zip(&files)
    {
        let message = match message.fds.is_empty() {
            true => message.with_fd(file),
            false => message,
        };
        let mut bad = Frontend::connect(this.scene.daemon.socket(), &Setup::default())?;
        bad.negotiate()?;
        bad.channel.send(&message.needs_reply())?;
        this.fuse.wait_for(opcode::FLUSH).context("nobody closes what was refused")?;
        this.scene.check_neighbours().context("beside a file that cannot be closed")?;
    }
    this.finish()
}
