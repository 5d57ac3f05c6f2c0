//! An IoThread that fails, because its waiting system calls return an error.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::server::Engine;
use ringhaul_kit::system::{can_change_system, is_installed, thread_id};

use crate::shutdown::HungDisk;

for_each_engine! { other_exports_end_as_by_a_signal }

/// The exit code after the failure of an IoThread.
const EXIT_THREAD_FAILED: i32 = 4;

/// Returns true if results of system calls can be replaced; prints a message if not.
pub(crate) fn can_inject() -> bool {
    can_change_system("what the kernel answers") && is_installed("strace")
}

/// Makes every wait of the daemon's thread `name` fail, including the current one.
fn fail_waits(daemon: &Running, name: &str) -> Result<Running> {
    let thread = thread_id(daemon.pid(), name)?.as_raw_nonzero().to_string();
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "strace", "-q", "-o", "/dev/null", "-p", &thread]);
    command.args(["-e", "inject=/^(epoll_p?wait2?|io_uring_enter)$:error=EBADF"]);
    Running::start(&mut command)
}

fn other_exports_end_as_by_a_signal(engine: Engine) -> Result<()> {
    if !can_inject() {
        return Ok(());
    }
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let sockets = ["failing", "healthy"].map(|name| folders.socket(name));
    let files = ["failing.img", "healthy.img"].map(|name| folders.disk(name, 16 << 20));
    let mut command = ringhaul()?;
    command.args(["serve", "--iothreads", "2", "--engine", &engine.to_string()]);
    for (socket, file) in sockets.iter().zip(files) {
        let export = format!("socket-path={},blk-file={}", socket.display(), file?.display());
        // Without an IoThread number, each export would use both IoThreads.
        let thread = usize::from(socket != &sockets[0]);
        command.args(["--export", &format!("{export},iothread={thread}")]);
    }
    let mut daemon = Running::serve(&mut command)?;
    let mut failing = Frontend::attach(&sockets[0], &Setup::default())?;
    let mut healthy = Frontend::attach(&sockets[1], &Setup::default())?;
    failing.write(0, 8, &[1; 4096])?;
    healthy.write(0, 8, &[2; 4096])?;
    let _strace = fail_waits(&daemon, "iothread-0")?;
    let line = daemon.wait_for("iothread-0 has ended: ")?;
    ensure!(line.contains("its queues are lost"), "{line}");
    daemon.wait_for("an IoThread has failed: finishing requests")?;
    for mut frontend in [failing, healthy] {
        frontend.channel.wait_closed().context("a connection is left")?;
    }
    daemon.finish()?.expect_code(EXIT_THREAD_FAILED)?;
    for socket in sockets {
        ensure!(!socket.exists(), "{} is left behind", socket.display());
    }
    let disk = std::fs::read(folders.path("healthy.img"))?;
    ensure!(disk[4096..8192] == [2; 4096], "what was written is not on the disk");
    Ok(())
}

/// Requests that another IoThread has taken are finished, and their driver gets the answers. The
/// second queue of that driver is on the failing IoThread.
fn check_requests_of_other_threads(engine: &str) -> Result<()> {
    if !can_inject() {
        return Ok(());
    }
    let Some(mut hung) = HungDisk::with(engine, &["--iothreads", "2"])? else {
        return Ok(());
    };
    hung.wait_taken()?;
    let _strace = fail_waits(&hung.daemon, "iothread-1")?;
    hung.daemon.wait_for("an IoThread has failed: finishing requests")?;
    hung.healthy.channel.wait_closed().context("the export of the IoThread that failed")?;
    let (finished, mut frontend) = hung.thaw()?;
    finished.expect_code(EXIT_THREAD_FAILED)?;
    ensure!(frontend.rings[0].wait_used()?.head == 3, "the write was not answered");
    Ok(())
}

#[test]
fn requests_of_other_threads_are_finished_with_io_uring() -> Result<()> {
    check_requests_of_other_threads("io_uring")
}

#[test]
fn requests_of_other_threads_are_finished_with_threads() -> Result<()> {
    check_requests_of_other_threads("threads")
}
