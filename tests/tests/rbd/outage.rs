//! A cluster that does not answer.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, ringhaul};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend};
use ringhaul_kit::system::Stopped;
use ringhaul_tools::process::retry;
use rustix::process::Signal;

use super::{Scene, Served};

/// The time that the OSD is away.
const AWAY: Duration = Duration::from_secs(20);

/// The image under a configuration with time-outs of some seconds.
fn with_time_outs(scene: &Scene, disk: &str) -> Result<String> {
    let conf = scene.sockets.path().join("time-outs.conf");
    let time_outs = "[client]\nrados_osd_op_timeout = 3\nrados_mon_op_timeout = 3\n";
    std::fs::write(&conf, std::fs::read_to_string(scene.cluster.conf())? + time_outs)?;
    Ok(format!("{disk},conf={}", conf.display()))
}

/// Requests wait while the OSD is stopped, and while it is dead. The wait is reported, and no
/// request fails or is lost, even if the configuration has time-outs.
pub(super) fn requests_wait(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("away")?;
    let disk = with_time_outs(scene, &disk)?;
    let mut served = scene.serve("away", &disk, &[])?;
    // A new OSD takes half a minute on a busy machine.
    let load = served.load("--runtime 40 --timeout 300")?;
    retry(LIMIT, || check_served(&served))?;
    let (stopped, since) = (Stopped::new(scene.cluster.osd()?)?, Instant::now());
    served.daemon.wait_for("the cluster has not answered an operation for 5 s; 8 operations")?;
    let shown = served.show()?;
    ensure!(shown["disk-state"] == "away", "{shown:#}");
    ensure!(shown["disks"][0]["remark"] == "8 operations wait for the cluster", "{shown:#}");
    std::thread::sleep(AWAY.saturating_sub(since.elapsed()));
    drop(stopped);
    served.daemon.wait_for("the cluster answers again, after")?;
    scene.cluster.kill_osd()?;
    served.daemon.wait_for("the cluster has not answered an operation for")?;
    scene.cluster.start_osd()?;
    served.daemon.wait_for("the cluster answers again, after")?;
    let load = load.finish()?.expect_code(0)?;
    ensure!(load.stdout.contains("errors: 0;"), "{}", load.stdout);
    ensure!(load.stdout.contains("0 reads with wrong data"), "{}", load.stdout);
    let shown = served.show()?;
    ensure!(shown["disk-state"] == "ready", "{shown:#}");
    ensure!(shown["disks"][0]["remark"].is_null(), "{shown:#}");
    served.end()
}

fn check_served(served: &Served) -> Result<()> {
    let writes = served.show()?["served"]["writes"]["requests"].as_u64();
    ensure!(writes > Some(0), "nothing was written");
    Ok(())
}

/// A read that has failed for the guest fills no memory afterwards.
pub(super) fn failed_read_fills_no_memory(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("unfilled")?;
    let other = scene.sockets.path().join("other.sock");
    let mut served = scene.serve("unfilled", &disk, &[])?;
    served.ctl(&["add", "--disk", "null:1M", "--socket-path", &other.to_string_lossy()])?;
    let mut front_end = served.connect()?;
    front_end.write(0, 0, &pattern(1, 4096))?;
    let stopped = Stopped::new(scene.cluster.osd()?)?;
    begin_read(&mut front_end)?;
    served.daemon.wait_for("the cluster has not answered")?;
    let export = served.socket.to_string_lossy().into_owned();
    served.ctl(&["remove", &export, "--force"])?;
    let used_again = pattern(2, 4096);
    front_end.memory.write(DATA, &used_again)?;
    drop(stopped);
    // The image is closed when all of its operations have ended.
    retry(LIMIT, || {
        let status = scene.cluster.tool("rbd", &["status", "unfilled"])?;
        ensure!(status.contains("Watchers: none"), "it is still in use: {status}");
        Ok(())
    })?;
    ensure!(front_end.memory.read(DATA, 4096)? == used_again, "memory was written to afterwards");
    drop(front_end);
    served.end()
}

/// `--force` does not wait until an unused image is closed.
pub(super) fn removal_during_a_hung_close(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("closing")?;
    let other = scene.sockets.path().join("other.sock");
    let served = scene.serve("closing", &disk, &[])?;
    served.ctl(&["add", "--disk", "null:1M", "--socket-path", &other.to_string_lossy()])?;
    served.connect()?.write(0, 0, &pattern(1, 4096))?;
    let stopped = Stopped::new(scene.cluster.osd()?)?;
    let export = served.socket.to_string_lossy().into_owned();
    let mut remove = ringhaul()?;
    remove.arg("ctl").arg("--control").arg(&served.control).args(["remove", &export]);
    let removing = Running::start(&mut remove)?;
    retry(LIMIT, || {
        let shown = served.show()?;
        ensure!(shown["waits-for"] == "its disk is not closed", "{shown:#}");
        Ok(())
    })?;
    served.ctl(&["remove", &export, "--force"])?;
    removing.finish()?.expect_code(0)?;
    ensure!(!served.ctl(&["list"])?.contains(&export), "it is still there");
    drop(stopped);
    served.end()
}

/// An export with waiting requests can be removed by force. The daemon then ends cleanly, although
/// the cluster is still away.
pub(super) fn removal_with_waiting_requests(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("removed")?;
    let other = scene.sockets.path().join("other.sock");
    let served = scene.serve("removed", &disk, &[])?;
    served.ctl(&["add", "--disk", "null:1M", "--socket-path", &other.to_string_lossy()])?;
    let load = served.load("--runtime 60")?;
    retry(LIMIT, || check_served(&served))?;
    let stopped = Stopped::new(scene.cluster.osd()?)?;
    // The cluster does not yet count as away.
    let export = served.socket.to_string_lossy().into_owned();
    served.ctl(&["remove", &export, "--force"])?;
    let load = load.finish()?;
    ensure!(!load.status.success(), "the load has not noticed");
    ensure!(!served.ctl(&["list"])?.contains(&export), "it is still there");
    served.end()?;
    drop(stopped);
    // A daemon that ends while the cluster is away needs a second signal.
    let mut served = scene.serve("removed", &disk, &["--state", "none"])?;
    let stopped = Stopped::new(scene.cluster.osd()?)?;
    let mut front_end = served.connect()?;
    begin_read(&mut front_end)?;
    served.daemon.wait_for("the cluster has not answered")?;
    served.daemon.signal(Signal::TERM)?;
    served.daemon.wait_for("finishing requests")?;
    served.daemon.signal(Signal::TERM)?;
    let end = served.daemon.finish()?;
    ensure!(end.status.code().is_some(), "{}: {}", end.status, end.stderr);
    drop(stopped);
    Ok(())
}

/// Begins a read, and returns without waiting.
fn begin_read(front_end: &mut Frontend) -> Result<()> {
    let (header, status) = front_end.put_header(0, 0, 0, 0)?;
    let chain = [Desc::readable(header, 16), Desc::writable(DATA, 4096), Desc::writable(status, 1)];
    front_end.rings[0].put_chain(0, &chain);
    front_end.rings[0].submit(0)
}
