//! Linux AIO when the system has none left. The limit is one for the whole machine, so this is a
//! test program of its own, which cargo runs when no other is running.

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use ringhaul_tests::cli::{READY, Running, Scene, bench, run, serve};
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;

const LIMIT_FILE: &str = "/proc/sys/fs/aio-max-nr";

/// Keeps new contexts from being made. Dropping it restores the limit; so does the end of this
/// process, whatever ends it, because a keeper waits for that.
struct NoAio {
    keeper: Child,
}

impl NoAio {
    fn set() -> Result<Self> {
        let file = File::options().write(true).open(LIMIT_FILE).context("opening the limit")?;
        // The keeper inherits the lock, so a second run of this test sees the limit restored.
        flock(&file, FlockOperation::LockExclusive).context("locking the limit")?;
        let before = fs::read_to_string(LIMIT_FILE).context("reading the limit")?;
        let keeper = Command::new("sh")
            .args(["-c", "trap '' HUP INT TERM; read -r end; echo \"$1\"", "sh", before.trim()])
            .stdin(Stdio::piped())
            .stdout(file)
            .spawn()
            .context("starting the keeper of the limit")?;
        let guard = Self { keeper };
        // Not the number that is in use: it may fall while the test runs.
        fs::write(LIMIT_FILE, "0").context("lowering the limit")?;
        Ok(guard)
    }
}

impl Drop for NoAio {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        match self.keeper.wait() {
            Ok(status) if status.success() => {}
            other => eprintln!("{LIMIT_FILE} was not restored: {other:?}"),
        }
    }
}

#[test]
fn without_aio_contexts_threads_are_used_or_advised() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can lower {LIMIT_FILE}");
        return Ok(());
    }
    let scene = Scene::new(env!("CARGO_TARGET_TMPDIR"))?;
    let (file, socket) = (scene.disk("disk.img", 16 << 20)?, scene.socket("disk.sock"));
    let before = fs::read_to_string(LIMIT_FILE).context("reading the limit")?;
    let mut explicit = serve(&socket, &file)?;
    explicit.args(["--engine", "aio"]);
    let mut auto = serve(&socket, &file)?;

    let no_aio = NoAio::set()?;
    let refused = run(&mut explicit);
    let daemon = Running::start(&mut auto).and_then(|mut daemon| {
        daemon.wait_for(READY)?;
        Ok(daemon)
    });
    drop(no_aio);

    refused?.expect_refusal(&["Linux AIO", "fs.aio-max-nr", "sysctl", "threads"])?;
    let mut daemon = daemon?;
    for words in ["engine io_uring: ", "fs.aio-max-nr"] {
        if !daemon.stderr().contains(words) {
            bail!("no {words:?}:\n{}", daemon.stderr());
        }
    }
    let options = "--rw randrw --number_ios 200 --iodepth 8 --verify";
    run(&mut bench(&socket, options)?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;

    let after = fs::read_to_string(LIMIT_FILE).context("reading the limit")?;
    if before != after {
        bail!("the limit was {} and is {}", before.trim(), after.trim());
    }
    Ok(())
}
