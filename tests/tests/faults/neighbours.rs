//! Two exports of one daemon: faults of one front-end do not affect its neighbour.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{Daemon, DaemonOptions, pattern};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::memory::{Region, new_eventfd, take_count};
use ringhaul_kit::frontend::message::{Message, code};
use ringhaul_kit::frontend::ring::{Desc, layout_at};
use ringhaul_kit::frontend::{BORDER, DATA, Frontend, Setup, blk, check_service};
use ringhaul_kit::server::Engine;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tempfile::TempDir;

use crate::start;

for_each_engine! {
    memory_of_one_is_gone,
    a_call_of_one_blocks,
}

/// A daemon with two exports on one IoThread, and a front-end of each.
struct TwoExports {
    daemon: Daemon,
    bad: Frontend,
    good: Frontend,
    seed: u64,
    _folder: TempDir,
}

impl TwoExports {
    fn new(engine: Engine) -> Result<Self> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let file = folder.path().join("good.img");
        std::fs::File::create(&file).and_then(|file| file.set_len(16 << 20))?;
        // Paths of sockets must be short.
        let sockets = tempfile::tempdir()?;
        let socket = sockets.path().join("good.sock");
        let export = format!("socket-path={},blk-file={}", socket.display(), file.display());
        let daemon = start(&DaemonOptions::new(engine).with("--export", &export))?;
        daemon.wait_for_message("serving on", 2)?;
        let good = Frontend::attach(&socket, &Setup::default())?;
        let bad = Frontend::attach(daemon.socket(), &Setup::default())?;
        Ok(Self { daemon, bad, good, seed: 0, _folder: folder })
    }

    /// Writes and reads on both queues of the good front-end.
    fn check_good(&mut self) -> Result<()> {
        for (writer, reader) in [(0, 1), (1, 0)] {
            self.seed += 1;
            let data = pattern(self.seed, 8192);
            self.good.write(writer, 16 * self.seed, &data).context("the other export")?;
            let read = self.good.read(reader, 16 * self.seed, 8192).context("the other export")?;
            ensure!(read == data, "the other export reads what was not written");
        }
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        self.check_good()?;
        drop(self.bad);
        check_service(&mut self.daemon)?;
        drop(self.good);
        self.daemon.terminate()?;
        Ok(())
    }
}

fn memory_of_one_is_gone(engine: Engine) -> Result<()> {
    let mut exports = TwoExports::new(engine)?;
    let bad = &mut exports.bad;
    bad.stop_queue(1)?;
    bad.rings[1].config = layout_at(BORDER, 64);
    bad.start_queue(1, 0)?;
    let Region { file, file_offset, .. } = &bad.memory.regions[1];
    rustix::fs::ftruncate(file, *file_offset).context("shrinking a memfd")?;
    // A buffer in missing memory, then a ring.
    let (header, status) = bad.put_header(0, 0, blk::IN, 0)?;
    let chain =
        [Desc::readable(header, 16), Desc::writable(BORDER, 4096), Desc::writable(status, 1)];
    bad.execute(0, &chain)?;
    ensure!(bad.memory.read(status, 1)? == [blk::IOERR]);
    exports.check_good()?;
    exports.bad.rings[1].kick()?;
    exports.check_good()?;
    let _ = exports.bad.stop_queue(1);
    ensure!(take_count(&exports.bad.rings[1].err) > 0, "nobody heard that the ring is gone");
    exports.finish()
}

fn a_call_of_one_blocks(engine: Engine) -> Result<()> {
    let mut exports = TwoExports::new(engine)?;
    let call = new_eventfd()?;
    exports.bad.send_checked(Message::ring_fd(code::SET_VRING_CALL, 1, Some(&call)))?;
    exports.bad.settle(0)?;
    take_count(&call);
    fcntl_setfl(&call, fcntl_getfl(&call)? - OFlags::NONBLOCK)?;
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes())?;
    for _ in 0..3 {
        let bad = &mut exports.bad;
        bad.rings[1].enable_calls();
        let (header, status) = bad.put_header(1, 0, blk::IN, 0)?;
        let chain =
            [Desc::readable(header, 16), Desc::writable(DATA, 512), Desc::writable(status, 1)];
        bad.rings[1].put_chain(0, &chain);
        bad.rings[1].submit(0)?;
        exports.check_good()?;
        exports.bad.rings[1].poll_used(1)?;
        exports.bad.rings[1].take_used();
    }
    // Only the bad export's call blocked. The good export is still called directly.
    exports.daemon.wait_for_exactly("a call did not return", 1)?;
    exports.finish()
}
