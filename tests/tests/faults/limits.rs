//! Limits of the process that are reached.

use anyhow::{Context, Result, ensure};
use ringhaul_tests::cli::{READY, Running, Scene, ringhaul_under};
use ringhaul_tests::daemon::DaemonOptions;
use ringhaul_tests::for_each_engine;
use ringhaul_tests::frontend::memory::new_eventfd;
use ringhaul_tests::frontend::message::{Message, code};
use ringhaul_tests::frontend::{Frontend, Setup, blk, check_service};
use ringhaul_tests::guest::Engine;
use rustix::process::Signal;

use crate::start;

for_each_engine! {
    a_start_without_enough_descriptors,
    a_front_end_that_brings_too_many_descriptors,
    a_start_without_locked_memory,
    a_write_beyond_the_limit_on_files,
}

/// With each number of descriptors the daemon either serves or says in one line why it does not.
fn a_start_without_enough_descriptors(engine: Engine) -> Result<()> {
    let scene = Scene::new(env!("CARGO_TARGET_TMPDIR"))?;
    let (file, socket) = (scene.disk("disk.img", 16 << 20)?, scene.socket("disk.sock"));
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
            let finished = daemon.finish()?.expect_code(2)?;
            let advised = finished.stderr.contains("ulimit -n");
            // The loader of the program needs some before the program is there to speak.
            let loader = finished.stderr.contains("error while loading shared libraries");
            ensure!(advised || loader, "no advice with {limit}: {}", finished.stderr);
        }
    }
    ensure!(served && refused, "served {served}, refused {refused}");
    Ok(())
}

/// Each eventfd of a queue takes a descriptor, and there is no room for all of them.
fn a_front_end_that_brings_too_many_descriptors(engine: Engine) -> Result<()> {
    let under: &[_] = &["prlimit", "--nofile=80"];
    let options = DaemonOptions { under, num_queues: 100, ..DaemonOptions::new(engine) };
    let mut daemon = start(&options)?;
    let descriptors = daemon.descriptors()?;
    for _ in 0..3 {
        let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
        frontend.negotiate()?;
        let call = new_eventfd()?;
        let refused = (0..100).find_map(|queue| {
            frontend.tell(Message::ring_fd(code::SET_VRING_CALL, queue, Some(&call))).err()
        });
        ensure!(refused.is_some(), "there was room for 100 eventfds");
        drop(frontend);
        check_service(&mut daemon).context("after one that brought too many")?;
    }
    daemon.wait_let_go(&descriptors)?;
    daemon.wait_for_message("a message of the front-end is refused", 3)?;
    daemon.wait_for_message("ulimit -n", 1)?;
    daemon.terminate()?;
    Ok(())
}

/// What io_uring shares with the kernel is locked memory. Who asks for it hears that; the best
/// engine that works is another.
fn a_start_without_locked_memory(engine: Engine) -> Result<()> {
    for engine in [engine.to_string(), "auto".to_owned()] {
        let scene = Scene::new(env!("CARGO_TARGET_TMPDIR"))?;
        let (file, socket) = (scene.disk("disk.img", 16 << 20)?, scene.socket("disk.sock"));
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

/// A limit on the size of files is as good as a full disk to the request that passes it.
fn a_write_beyond_the_limit_on_files(engine: Engine) -> Result<()> {
    const LIMIT_SECTORS: u64 = (8 << 20) / 512;
    let under: &[_] = &["prlimit", "--fsize=8388608"];
    let mut daemon = start(&DaemonOptions { under, ..DaemonOptions::new(engine) })?;
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
