//! A daemon that reaches limits of its process.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{READY, Running, TestFolders, bench, ringhaul_under, run};
use ringhaul_kit::daemon::DaemonOptions;
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::memory::new_eventfd;
use ringhaul_kit::frontend::message::{Message, code};
use ringhaul_kit::frontend::{Frontend, Setup, blk, check_service};
use ringhaul_kit::server::Engine;
use ringhaul_kit::system::MemoryCgroup;
use rustix::process::Signal;

use crate::start;

for_each_engine! {
    a_start_without_enough_descriptors,
    a_front_end_that_brings_too_many_descriptors,
    a_start_without_locked_memory,
    a_write_beyond_the_limit_on_files,
}

/// With each limit on descriptors the daemon either serves or names the limit.
fn a_start_without_enough_descriptors(engine: Engine) -> Result<()> {
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let (file, socket) = (folders.disk("disk.img", 16 << 20)?, folders.socket("disk.sock"));
    let (mut served, mut refused) = (false, false);
    for limit in (4..=40).step_by(4) {
        let mut command = ringhaul_under(&["prlimit", &format!("--nofile={limit}")])?;
        command.arg("serve").arg("--socket-path").arg(&socket).arg("--blk-file").arg(&file);
        command.args(["--engine", &engine.to_string()]);
        let mut daemon = Running::start(&mut command)?;
        if daemon.wait_for(READY).is_ok() {
            served = true;
            daemon.signal(Signal::TERM)?;
            let finished = daemon.finish()?.expect_code(0)?;
            ensure!(!finished.stderr.contains("panic"), "{}", finished.stderr);
        } else {
            refused = true;
            ensure!(!served, "what sufficed before does not with {limit}");
            let finished = daemon.finish()?;
            // With the lowest limits the dynamic loader fails before the program starts.
            if !finished.stderr.contains("error while loading shared libraries") {
                let finished = finished.expect_code(2)?;
                let advised = finished.stderr.contains("ulimit -n");
                ensure!(advised, "no advice with {limit}: {}", finished.stderr);
            }
        }
    }
    ensure!(served && refused, "served {served}, refused {refused}");
    Ok(())
}

/// Guest memory that the daemon touches first counts as its own, and the kernel may kill it.
#[test]
fn guest_memory_above_the_limit_of_the_cgroup_is_logged() -> Result<()> {
    let Some(cgroup) = MemoryCgroup::new(100 << 20)? else { return Ok(()) };
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let socket = folders.socket("disk.sock");
    let mut command = ringhaul_under(&cgroup.wrapper())?;
    command.args(["serve", "--disk", "null:1G", "--socket-path"]).arg(&socket);
    let mut daemon = Running::serve(&mut command)?;
    // Memory for all requests is shared, and that of one request is touched.
    let small = "--rw read --bs 1m --iodepth 8 --number_ios 1";
    run(&mut bench(&socket, small)?)?.expect_code(0)?;
    daemon.wait_for("the front-end has disconnected")?;
    ensure!(!daemon.stderr().contains("MemoryMax"), "{}", daemon.stderr());
    let large = small.replace("--iodepth 8", "--iodepth 128");
    run(&mut bench(&socket, &large)?)?.expect_code(0)?;
    let line = daemon.wait_for("the cgroup of this daemon is limited to 100 MiB")?;
    ensure!(line.contains("WARN") && line.contains("MemoryMax=infinity"), "{line}");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Each eventfd of a queue takes a descriptor, and the limit is too low for all of them.
fn a_front_end_that_brings_too_many_descriptors(engine: Engine) -> Result<()> {
    let wrapper: &[_] = &["prlimit", "--nofile=80"];
    let options = DaemonOptions { wrapper, num_queues: 100, ..DaemonOptions::new(engine) };
    let mut daemon = start(&options)?;
    let descriptors = daemon.descriptors()?;
    for _ in 0..3 {
        let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
        frontend.negotiate()?;
        let call = new_eventfd()?;
        let refused = (0..100).find_map(|queue| {
            frontend.send_checked(Message::ring_fd(code::SET_VRING_CALL, queue, Some(&call))).err()
        });
        ensure!(refused.is_some(), "there was room for 100 eventfds");
        drop(frontend);
        check_service(&mut daemon).context("after one that brought too many")?;
    }
    daemon.wait_released(&descriptors)?;
    daemon.wait_for_message("refused a message of the front-end", 3)?;
    daemon.wait_for_message("ulimit -n", 1)?;
    daemon.terminate()?;
    Ok(())
}

/// Each export has a share of the descriptors. A front-end that exceeds it takes none from its
/// neighbour, and the log gives the reason.
#[test]
fn a_front_end_that_takes_all_descriptors() -> Result<()> {
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let sockets = ["greedy", "neighbour"].map(|name| folders.socket(name));
    let mut command = ringhaul_under(&["prlimit", "--nofile=600"])?;
    command.arg("serve");
    for socket in &sockets {
        command.args(["--export", &format!("null=16M,socket-path={}", socket.display())]);
    }
    let mut daemon = Running::serve(&mut command)?;
    let mut greedy = Frontend::connect(&sockets[0], &Setup::default())?;
    greedy.negotiate()?;
    let event = new_eventfd()?;
    let mut refused = 0;
    for queue in 0..=u8::MAX {
        for request in [code::SET_VRING_CALL, code::SET_VRING_ERR, code::SET_VRING_KICK] {
            refused += usize::from(
                greedy.send_checked(Message::ring_fd(request, queue, Some(&event))).is_err(),
            );
        }
    }
    // An incomplete message, with the maximum number of descriptors.
    let many: Vec<_> = (0..253).map(|_| std::sync::Arc::clone(&event)).collect();
    greedy.channel.send_bytes(&[0], &many)?;
    daemon.wait_for("the export's share of the limit on open files")?;
    let mut neighbour = Frontend::attach(&sockets[1], &Setup::default())?;
    neighbour.read(0, 0, 4096).context("beside one that takes all descriptors")?;
    ensure!(refused > 0, "there was room for 768 eventfds");
    drop((greedy, neighbour));
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// The rings of io_uring are locked memory. Without it, a fixed choice of io_uring fails, and
/// `auto` uses the best engine that works.
fn a_start_without_locked_memory(engine: Engine) -> Result<()> {
    for engine in [engine.to_string(), "auto".to_owned()] {
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let (file, socket) = (folders.disk("disk.img", 16 << 20)?, folders.socket("disk.sock"));
        let words = ["prlimit", "--memlock=65536", "setpriv", "--bounding-set=-ipc_lock"];
        let mut command = ringhaul_under(&words)?;
        command.arg("serve").arg("--socket-path").arg(&socket).arg("--blk-file").arg(&file);
        command.args(["--engine", &engine]);
        let mut daemon = Running::start(&mut command)?;
        if daemon.wait_for(READY).is_err() {
            ensure!(engine == "io_uring", "engine {engine} does not start");
            daemon.finish()?.expect_refusal(&["cannot set up io_uring", "ulimit -l", "aio"])?;
            continue;
        }
        if engine == "auto" {
            ensure!(!daemon.stderr().contains("engine threads"), "{}", daemon.stderr());
        }
        let mut frontend = Frontend::attach(&socket, &Setup::default())?;
        frontend.write(0, 9, &[3; 4096])?;
        ensure!(frontend.read(1, 9, 4096)? == vec![3; 4096]);
        drop(frontend);
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
    }
    Ok(())
}

/// A limit on the size of files acts like a full disk on a request that exceeds it.
fn a_write_beyond_the_limit_on_files(engine: Engine) -> Result<()> {
    const LIMIT_SECTORS: u64 = (8 << 20) / 512;
    let wrapper: &[_] = &["prlimit", "--fsize=8388608"];
    let mut daemon = start(&DaemonOptions { wrapper, ..DaemonOptions::new(engine) })?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    for (queue, sector) in [(0, LIMIT_SECTORS), (1, LIMIT_SECTORS + 8192), (0, LIMIT_SECTORS - 4)] {
        let answer = frontend.request(queue, blk::OUT, sector, &[9; 4096], 0)?;
        ensure!(answer.status == blk::IOERR, "at sector {sector}: {answer:?}");
    }
    daemon.wait_for_message("a request failed: write at byte", 3)?;
    frontend.write(1, LIMIT_SECTORS - 8, &[9; 4096])?;
    ensure!(frontend.read(0, LIMIT_SECTORS - 8, 4096)? == [9; 4096]);
    drop(frontend);
    daemon.check_running()?;
    daemon.terminate()?;
    Ok(())
}
