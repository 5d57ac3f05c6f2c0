//! Two daemons, their disk, and the QEMUs between which a guest moves.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Finished, Running, TestFolders, ringhaul, run};
use ringhaul_kit::control::read_counters;
use ringhaul_kit::guest::{KVM_DISK_BYTES, Mover, QemuHost, RingLayout, Vmm, lacks_kvm};
use ringhaul_kit::nbd_server::NbdServer;
use ringhaul_kit::system::{is_installed, print_skipped};
use ringhaul_tools::process::{output, retry};
use rustix::process::{Pid, Signal};

use crate::LIMIT;

/// The moves of a guest: there and back, ten times.
pub(super) const MOVES: usize = 20;

/// The daemons to which a guest at `a` moves there and back.
pub(super) fn targets(moves: usize) -> impl Iterator<Item = &'static str> {
    ["b", "a"].into_iter().cycle().take(moves)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Device {
    Blk,
    /// virtio-blk with packed rings.
    PackedBlk,
    Scsi,
    /// virtio-scsi with packed rings.
    PackedScsi,
}

impl Device {
    pub(super) fn is_packed(self) -> bool {
        matches!(self, Self::PackedBlk | Self::PackedScsi)
    }

    pub(super) fn is_scsi(self) -> bool {
        matches!(self, Self::Scsi | Self::PackedScsi)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskKind {
    Raw,
    Qcow2,
    Nbd,
}

impl DiskKind {
    /// False for a disk without locks.
    pub(super) fn has_locks(self) -> bool {
        self != Self::Nbd
    }
}

/// The two daemons, `a` and `b`, and the disk of both.
pub(super) struct Scene {
    folders: TestFolders,
    device: Device,
    kind: DiskKind,
    options: Vec<String>,
    daemons: BTreeMap<&'static str, Running>,
    server: Option<NbdServer>,
}

/// The times of a complete move at its source.
pub(super) struct Switch {
    downtime: Duration,
    stop: Duration,
}

impl Switch {
    /// Waits for the end of a move, and asks QEMU for its times.
    pub(super) fn of(monitor: &mut Mover) -> Result<Self> {
        let downtime = monitor.wait_for("completed")?.context("QEMU reports no downtime")?;
        Ok(Self { downtime: Duration::from_millis(downtime), stop: monitor.stop_time()? })
    }
}

/// Prints the row of a table: medians in milliseconds, the largest value in brackets, and the share
/// of the downtime in which the queues stop.
pub(super) fn print_row(guest: &str, switches: &[Switch]) {
    let column = |times: Vec<Duration>| {
        let mut millis: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        millis.sort_by(f64::total_cmp);
        (millis[millis.len() / 2], millis[millis.len() - 1])
    };
    if switches.is_empty() {
        return;
    }
    let downtime = column(switches.iter().map(|switch| switch.downtime).collect());
    let stop = column(switches.iter().map(|switch| switch.stop).collect());
    let all = |time: fn(&Switch) -> Duration| switches.iter().map(time).sum::<Duration>();
    let share =
        all(|switch| switch.stop).as_secs_f64() / all(|switch| switch.downtime).as_secs_f64();
    println!(
        "| {guest} | {} | {:.0} ({:.0}) | {:.1} ({:.1}) | {:.0}% |",
        switches.len(),
        downtime.0,
        downtime.1,
        stop.0,
        stop.1,
        share * 100.0,
    );
}

impl Scene {
    /// Starts both daemons. `None` if a program is missing here.
    pub(super) fn new(device: Device, kind: DiskKind, options: &[&str]) -> Result<Option<Self>> {
        if let Some(reason) = lacks_kvm() {
            print_skipped(&reason);
            return Ok(None);
        }
        Self::with_disk(device, kind, options, KVM_DISK_BYTES)
    }

    /// Starts both daemons with a disk of this size. `None` if a program is missing here.
    pub(super) fn with_disk(
        device: Device,
        kind: DiskKind,
        options: &[&str],
        bytes: u64,
    ) -> Result<Option<Self>> {
        if kind == DiskKind::Nbd && !is_installed("qemu-nbd") {
            return Ok(None);
        }
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let disk = folders.path("disk");
        if kind == DiskKind::Qcow2 {
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2"]).arg(&disk);
            output(create.arg(bytes.to_string()))?;
        } else {
            folders.disk("disk", bytes)?;
        }
        let server = match kind {
            DiskKind::Nbd => Some(NbdServer::start_qemu_nbd(&folders, &disk)?),
            DiskKind::Raw | DiskKind::Qcow2 => None,
        };
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let daemons = BTreeMap::new();
        let mut scene = Self { folders, device, kind, options, daemons, server };
        scene.serve("a")?;
        scene.serve("b")?;
        Ok(Some(scene))
    }

    /// Starts a daemon.
    pub(super) fn serve(&mut self, name: &'static str) -> Result<()> {
        self.serve_with(name, &[])
    }

    /// Starts a daemon with further options.
    pub(super) fn serve_with(&mut self, name: &'static str, more: &[&str]) -> Result<()> {
        let path = self.disk().display().to_string();
        let disk = match (self.kind, &self.server) {
            (DiskKind::Nbd, Some(server)) => server.uri("disk"),
            (DiskKind::Qcow2, _) => format!("qcow2:{path}"),
            _ => path,
        };
        let mut command = ringhaul()?;
        command.arg("serve").arg("--socket-path").arg(self.folders.socket(name));
        command.arg("--control").arg(self.control(name));
        command.args(["--lock", "late", "--num-queues", "2"]).args(&self.options).args(more);
        match self.device.is_scsi() {
            false => command.args(["--disk", &disk]),
            true => command.args(["--device", "scsi", "--lun", &format!("0,disk={disk}")]),
        };
        self.daemons.insert(name, Running::serve(&mut command)?);
        Ok(())
    }

    /// The path of a socket.
    pub(super) fn socket(&self, name: &str) -> PathBuf {
        self.folders.socket(name)
    }

    /// True for virtio-scsi.
    pub(super) fn is_scsi(&self) -> bool {
        self.device.is_scsi()
    }

    /// True if a running guest locks the disk.
    pub(super) fn has_locks(&self) -> bool {
        self.kind.has_locks()
    }

    /// True if the disk is an image.
    pub(super) fn is_image(&self) -> bool {
        self.kind == DiskKind::Qcow2
    }

    /// Ends all daemons in an orderly way.
    pub(super) fn stop_daemons(&mut self) -> Result<()> {
        for (name, mut daemon) in std::mem::take(&mut self.daemons) {
            daemon.signal(Signal::TERM)?;
            let ended = daemon.finish()?;
            ensure!(ended.status.success(), "the daemon {name} ended with {}", ended.status);
        }
        Ok(())
    }

    fn control(&self, name: &str) -> PathBuf {
        self.folders.socket(&format!("{name}-control"))
    }

    /// Runs a command of `ringhaul ctl` about the export of a daemon, with this input.
    pub(super) fn ctl(&self, name: &str, words: &[&str], input: &str) -> Result<Finished> {
        let mut command = ringhaul()?;
        command.arg("ctl").arg("--control").arg(self.control(name)).args(words);
        let path = self.folders.path("input");
        std::fs::write(&path, input).context("writing the input of a command")?;
        let input = std::fs::File::open(&path).context("opening the input of a command")?;
        run(command.arg(self.folders.socket(name)).stdin(input))
    }

    /// Adds the same unit to the devices of both daemons.
    pub(super) fn add_second_unit(&self) -> Result<()> {
        let disk = self.folders.disk("second", KVM_DISK_BYTES)?;
        let unit = format!("1,blk-file={}", disk.display());
        for name in ["a", "b"] {
            let mut command = ringhaul()?;
            command.arg("ctl").arg("--control").arg(self.control(name)).arg("add-lun");
            run(command.arg(self.folders.socket(name)).arg(&unit))?.expect_code(0)?;
        }
        Ok(())
    }

    /// Kills a daemon, and waits for its end.
    pub(super) fn kill(&mut self, name: &str) -> Result<()> {
        let mut daemon = self.daemons.remove(name).context("no such daemon")?;
        daemon.signal(Signal::KILL)?;
        daemon.finish()?;
        Ok(())
    }

    /// Waits for a line in the log of a daemon.
    pub(super) fn wait_for_log(&mut self, name: &str, text: &str) -> Result<String> {
        self.daemons.get_mut(name).context("no such daemon")?.wait_for(text)
    }

    /// The number of requests that a daemon has answered.
    pub(super) fn answered_requests(&self, name: &str) -> Result<u64> {
        let counters = read_counters(&self.control(name))?;
        let operations = counters["operations"].as_array();
        let operations = operations.with_context(|| format!("no operations in {counters}"))?;
        Ok(operations.iter().filter_map(|operation| operation["requests"].as_u64()).sum())
    }

    /// The process of a daemon.
    pub(super) fn process(&self, name: &str) -> Result<Pid> {
        Ok(self.daemons.get(name).context("no such daemon")?.pid())
    }

    /// The file of the disk.
    pub(super) fn disk(&self) -> PathBuf {
        self.folders.path("disk")
    }

    /// Starts a QEMU with a guest, or one that waits for a guest.
    pub(super) fn start(&self, name: &str, is_target: bool) -> Result<QemuHost> {
        let layouts = [RingLayout::Split, RingLayout::Packed];
        let layout = layouts[usize::from(self.device.is_packed())];
        let vmm = Vmm::QemuMoved { layout, is_target, is_scsi: self.device.is_scsi() };
        QemuHost::start(&vmm, &self.folders.socket(name))
    }

    /// Starts a QEMU that waits for a guest at the second result.
    pub(super) fn target(&self, name: &str) -> Result<(QemuHost, PathBuf)> {
        let mut target = self.start(name, true)?;
        let socket = self.accept(&mut target)?;
        Ok((target, socket))
    }

    /// Lets a QEMU that was started as a target wait for a guest at the result.
    pub(super) fn accept(&self, target: &mut QemuHost) -> Result<PathBuf> {
        let socket = self.folders.socket("move");
        let _ = std::fs::remove_file(&socket);
        target.monitor.accept(&socket)?;
        Ok(socket)
    }

    /// Moves a guest to a QEMU at the daemon `to`, and waits until it runs there.
    pub(super) fn move_to(&mut self, to: &str, mut source: QemuHost) -> Result<(QemuHost, Switch)> {
        let (mut target, socket) = self.target(to)?;
        self.move_between(&mut source, &mut target, &socket)?;
        let switch = Switch::of(&mut source.monitor)?;
        Ok((target, switch))
    }

    /// Moves a guest, and waits until it runs at the target. Returns its last round at the source.
    pub(super) fn move_between(
        &mut self,
        source: &mut QemuHost,
        target: &mut QemuHost,
        socket: &Path,
    ) -> Result<u64> {
        source.move_to(target, socket, || self.lock_failure())
    }

    /// The line about a lock that a daemon has not obtained.
    fn lock_failure(&mut self) -> Option<String> {
        let mut logs = self.daemons.values_mut();
        logs.find_map(|daemon| {
            let mut lines = daemon.log().lines();
            lines.find(|line| line.contains("without the lock of the disk")).map(str::to_owned)
        })
    }

    /// Returns true if a program of QEMU finds the file of the disk locked for writing.
    pub(super) fn is_locked(&self) -> Result<bool> {
        if self.kind == DiskKind::Nbd {
            // The server has it open.
            return Ok(false);
        }
        let mut command = Command::new("qemu-io");
        let output = command.args(["-f", "raw", "-c", "read 0 512"]).arg(self.disk()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success() || said.contains("lock"), "{said}");
        Ok(!output.status.success())
    }

    /// Waits until the image is closed, and checks it for errors and leaks.
    pub(super) fn check_image(&self) -> Result<()> {
        if self.kind != DiskKind::Qcow2 {
            return Ok(());
        }
        retry(LIMIT, || {
            ensure!(!self.is_locked()?, "the image is still in use");
            Ok(())
        })?;
        output(Command::new("qemu-img").arg("check").arg(self.disk())).map(drop)
    }
}
