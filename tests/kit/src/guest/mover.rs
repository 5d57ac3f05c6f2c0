//! Moves of a guest between two QEMUs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use ringhaul_tools::process::retry;
use serde_json::json;

use super::channel::QmpMonitor;
use super::kvm::{KvmGuest, LIMIT, Vmm, connect};
use super::trace;

/// Bytes per second that no move of the small guest reaches.
pub const FAST: u64 = 1 << 30;

/// Bytes per second with which a move does not end.
pub const SLOW: u64 = 64 << 10;

/// A QEMU with the small guest, or one that waits for it: a [`Vmm::QemuMoved`].
pub struct QemuHost {
    /// The guest, or its console as far as it has run here.
    pub guest: KvmGuest,
    /// The monitor of this QEMU.
    pub monitor: Mover,
}

impl QemuHost {
    /// Starts a QEMU at the disk that is served on `socket`.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(vmm: &Vmm, socket: &Path) -> Result<Self> {
        Self::from_guest(KvmGuest::start(vmm, socket)?)
    }

    /// Like [`start`](Self::start), with a low priority: the guest polls its rings, and leaves
    /// little time to servers of such a priority.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_nice(vmm: &Vmm, socket: &Path) -> Result<Self> {
        let guest = KvmGuest::start_by(vmm, |folder| {
            let command = vmm.command(folder, socket)?;
            let mut nice = Command::new("nice");
            nice.args(["-n", "10"]).arg(command.get_program()).args(command.get_args());
            Ok(nice)
        });
        Self::from_guest(guest?)
    }

    fn from_guest(guest: KvmGuest) -> Result<Self> {
        let monitor = Mover::new(&guest)?;
        Ok(Self { guest, monitor })
    }

    /// Moves the guest to a QEMU that accepts it on `socket`, and waits until it has run there or
    /// its disk is known to have failed, with the reason. Returns its last round here.
    ///
    /// # Errors
    /// If it does not move, or does not run there or there alone.
    pub fn move_to(
        &mut self,
        target: &mut Self,
        socket: &Path,
        disk_failure: impl FnMut() -> Option<String>,
    ) -> Result<u64> {
        self.monitor.begin(socket, FAST)?;
        self.monitor.wait_for("completed")?;
        let round = self.guest.round();
        target.guest.wait_for_round_unless(round + 2, disk_failure)?;
        ensure!(self.guest.round() == round, "the guest runs twice");
        Ok(round)
    }
}

/// The monitor of a QEMU, such as of [`Vmm::QemuMoved`], which moves its guest.
pub struct Mover {
    pub(super) monitor: QmpMonitor,
    folder: PathBuf,
}

impl Mover {
    /// Connects to the monitor of a guest.
    ///
    /// # Errors
    /// If QEMU does not listen in time.
    pub fn new(guest: &KvmGuest) -> Result<Self> {
        Ok(Self::at(connect(guest)?, guest.folder()))
    }

    /// The monitor of a QEMU that has its trace in `folder`.
    pub(super) fn at(monitor: QmpMonitor, folder: &Path) -> Self {
        Self { monitor, folder: folder.to_owned() }
    }

    /// Makes a target accept its guest on `socket`.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn accept(&mut self, socket: &Path) -> Result<()> {
        self.monitor.execute_with("migrate-incoming", &json!({"uri": uri(socket)}))?;
        Ok(())
    }

    /// Begins to move the guest to the target at `socket`, at most this many bytes in a second.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn begin(&mut self, socket: &Path, bytes_per_second: u64) -> Result<()> {
        let limit = json!({"max-bandwidth": bytes_per_second});
        self.monitor.execute_with("migrate-set-parameters", &limit)?;
        self.monitor.execute_with("migrate", &json!({"uri": uri(socket)}))?;
        Ok(())
    }

    /// Lets the target tell the source that it has refused a guest, if both have this set.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn set_return_path(&mut self, is_on: bool) -> Result<()> {
        let capabilities = json!([{"capability": "return-path", "state": is_on}]);
        let capabilities = json!({"capabilities": capabilities});
        self.monitor.execute_with("migrate-set-capabilities", &capabilities)?;
        Ok(())
    }

    /// Cancels the move. The guest continues here.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn cancel(&mut self) -> Result<()> {
        self.monitor.execute("migrate_cancel")?;
        Ok(())
    }

    /// Waits until the move has this status. Returns the downtime in milliseconds, after a complete
    /// move.
    ///
    /// # Errors
    /// If it does not get the status in time, or fails.
    pub fn wait_for(&mut self, status: &str) -> Result<Option<u64>> {
        let mut last = serde_json::Value::Null;
        retry(LIMIT, || {
            last = self.monitor.execute("query-migrate")?;
            let has_ended = ["failed", "completed", "cancelled"].map(|end| last["status"] == end);
            ensure!(has_ended.contains(&true), "the move is not {status}: {last}");
            Ok(())
        })?;
        ensure!(last["status"] == status, "the move is not {status}: {last}");
        Ok(last["downtime"].as_u64())
    }

    /// The time from QEMU's first message that stopped a queue to the answer to the last one, when
    /// its device was stopped last.
    ///
    /// # Errors
    /// If QEMU has stopped no queue, or keeps no times.
    pub fn stop_time(&self) -> Result<Duration> {
        trace::stop_time(&self.folder)
    }

    /// Pauses the guest.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn pause(&mut self) -> Result<()> {
        self.monitor.execute("stop")?;
        Ok(())
    }

    /// Lets a paused guest continue, or the guest of a source after a complete move.
    ///
    /// # Errors
    /// If QEMU refuses, or does not finish loading a guest.
    pub fn resume(&mut self) -> Result<()> {
        // A target loads the guest for a while after the source reports a complete move. QEMU
        // forgets a command of that time if the guest was paused.
        retry(LIMIT, || {
            let status = self.monitor.execute("query-status")?;
            ensure!(status["status"] != "inmigrate", "QEMU still loads the guest: {status}");
            Ok(())
        })?;
        self.monitor.execute("cont")?;
        Ok(())
    }
}

fn uri(socket: &Path) -> String {
    format!("unix:{}", socket.display())
}
