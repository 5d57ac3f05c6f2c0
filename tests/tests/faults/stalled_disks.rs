//! Log lines about disks that do not answer, and about IoThreads that wait for one.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, bench, ringhaul, run};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::blk;
use ringhaul_kit::service_manager::ServiceManager;
use ringhaul_kit::system::is_installed;
use ringhaul_tools::process::retry;
use rustix::process::Signal;

use crate::nbd::{DISK_BYTES, NbdServer, VERIFIED, serve, test_folders, wait_for_load};
use crate::shutdown::HungDisk;

fn a_disk_that_does_not_answer_is_named(engine: &str) -> Result<()> {
    let Some(mut hung) = HungDisk::new(engine)? else { return Ok(()) };
    let line = hung.daemon.wait_for("has not been answered for")?;
    let words = "disk.img: a write has not been answered for";
    ensure!(line.contains(words) && line.ends_with("wait for the disk: 1"), "{line}");
    hung.frozen = None;
    let line = hung.daemon.wait_for("answers again")?;
    ensure!(line.contains("disk.img: answers again, after"), "{line}");
    hung.hung.rings[0].wait_used()?;
    hung.daemon.signal(Signal::TERM)?;
    let finished = hung.daemon.finish()?.expect_code(0)?;
    ensure!(finished.stderr.contains("; 1 not answered for 5 s;"), "{}", finished.stderr);
    ensure!(finished.stderr.matches("has not been answered").count() == 1, "{}", finished.stderr);
    Ok(())
}

mod threads {
    #[test]
    fn a_disk_that_does_not_answer_is_named() -> anyhow::Result<()> {
        super::a_disk_that_does_not_answer_is_named("threads")
    }
}

mod io_uring {
    #[test]
    fn a_disk_that_does_not_answer_is_named() -> anyhow::Result<()> {
        super::a_disk_that_does_not_answer_is_named("io_uring")
    }
}

/// Linux AIO may block in a submit, and the first time cannot be avoided. The log reports it while
/// it lasts, and afterwards the disk uses pool threads.
#[test]
fn a_blocking_submit_is_logged_and_is_the_last() -> Result<()> {
    let Some(mut hung) = HungDisk::new("aio")? else { return Ok(()) };
    let line = hung.daemon.wait_for("stuck in a system call")?;
    ensure!(line.contains("iothread-0 has been stuck"), "{line}");
    ensure!(line.contains("disk.img blocks it"), "{line}");
    hung.frozen = None;
    let line = hung.daemon.wait_for("a submit blocked")?;
    ensure!(line.contains("disk.img: "), "{line}");
    hung.daemon.wait_for("iothread-0 continues after")?;
    hung.hung.rings[0].wait_used()?;
    hung.frozen = Some(hung.file_system.freeze()?);
    hung.offer(1, blk::OUT)?;
    hung.hung.rings[0].kick()?;
    for round in 0..20 {
        let healthy = &mut hung.healthy;
        let data = pattern(round, 8192);
        healthy.write(0, 16 * round, &data).context("beside a disk that hangs")?;
        healthy.read(0, 16 * round, data.len()).context("beside a disk that hangs")?;
    }
    hung.wait_taken()?;
    hung.daemon.wait_for("disk.img: a write has not been answered for")?;
    hung.frozen = None;
    hung.hung.rings[0].wait_used()?;
    hung.daemon.signal(Signal::TERM)?;
    let finished = hung.daemon.finish()?.expect_code(0)?;
    ensure!(finished.stderr.matches("stuck in a system call").count() == 1, "{}", finished.stderr);
    ensure!(finished.stderr.matches("a submit blocked").count() == 1, "{}", finished.stderr);
    Ok(())
}

/// The service manager restarts a daemon without signs of life.
#[test]
fn a_stuck_thread_ends_the_signs_of_life() -> Result<()> {
    let mut manager = None;
    let hung = HungDisk::start("aio", |command, folders| {
        command.env("WATCHDOG_USEC", "400000");
        manager = Some(ServiceManager::listen(&folders.socket("manager"), command)?);
        Ok(())
    })?;
    let (Some(mut hung), Some(manager)) = (hung, manager) else { return Ok(()) };
    let before = manager.arrived();
    ensure!(before.iter().any(|message| message == "WATCHDOG=1\n"), "{before:?}");
    // It takes three seconds, which is the time of 30 signs of life.
    hung.daemon.wait_for("stuck in a system call")?;
    let arrived = manager.arrived();
    let signs = arrived.iter().filter(|message| *message == "WATCHDOG=1\n").count();
    ensure!(signs <= 2, "{arrived:?}");
    hung.frozen = None;
    manager.wait_for("WATCHDOG=1\n")?;
    hung.hung.rings[0].wait_used()?;
    hung.daemon.signal(Signal::TERM)?;
    hung.daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// A single line covers all connections of both IoThreads.
#[test]
fn a_server_that_does_not_answer_is_named_once() -> Result<()> {
    if !is_installed("qemu-nbd") {
        return Ok(());
    }
    let folders = test_folders()?;
    let server = NbdServer::start_qemu_nbd(&folders, &folders.disk("disk.img", DISK_BYTES)?)?;
    let name = server.uri("disk");
    let options = ["--iothreads", "2"];
    let mut daemon = serve(&folders, &format!("{name},connections=2"), &options)?;
    let vm = folders.socket("vm.sock");
    let load = format!("{VERIFIED} --numjobs 2 --runtime 10");
    let load = Running::start(&mut bench(&vm, &load)?)?;
    daemon.wait_for("a front-end has connected")?;
    wait_for_load(&folders)?;
    let stopped = server.stop()?;
    let line = daemon.wait_for("has not answered an operation for")?;
    let words = format!("{name}: the server has not answered an operation for");
    ensure!(line.contains("WARN") && line.contains(&words), "{line}");
    ensure!(line.contains("check the server"), "{line}");
    retry(LIMIT, || {
        let mut ctl = ringhaul()?;
        ctl.args(["ctl", "--json", "--control"]).arg(folders.socket("control"));
        let shown = run(ctl.arg("show").arg(&vm))?.expect_code(0)?.stdout;
        let shown: serde_json::Value = serde_json::from_str(&shown).context("what is shown")?;
        let disk = &shown["disks"][0];
        ensure!(disk["remark"] == "connections: 4, late: 4", "{shown:#}");
        ensure!(disk["state"] == "late" && shown["disk-state"] == "late", "{shown:#}");
        Ok(())
    })?;
    drop(stopped);
    let line = daemon.wait_for("answers again")?;
    ensure!(line.contains(&format!("{name}: the server answers again, after")), "{line}");
    let finished = load.finish()?.expect_code(0)?;
    ensure!(finished.stdout.contains("errors: 0; verify: "), "{}", finished.stdout);
    ensure!(finished.stdout.contains(" 0 reads with wrong data"), "{}", finished.stdout);
    daemon.signal(Signal::TERM)?;
    let text = daemon.finish()?.expect_code(0)?.stderr;
    for once in ["has not answered an operation", "answers again"] {
        ensure!(text.matches(once).count() == 1, "{text}");
    }
    Ok(())
}
