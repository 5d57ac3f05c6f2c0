//! The process of a guest's machine, QEMU or User Mode Linux: its start, its end, and the check for
//! crashes of QEMU itself.

use std::fmt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use ringhaul_tools::process::{wait_child, wait_readable};
use rustix::process::{Pid, Signal, kill_process_group};
use tempfile::TempDir;

use super::channel::{Console, STOP_INTERVAL, StopFlag};

/// The time limit for QEMU's own start, which takes a fraction of a second.
const QEMU_LIMIT: Duration = Duration::from_secs(30);

/// The time limit for the end of a machine after a signal or after its sockets were closed, and for
/// the check after any failed wait that it has ended.
const ENDING_LIMIT: Duration = Duration::from_secs(2);

/// A failed assertion in QEMU's own emulation of processors (TCG), in which no back-end has a part.
/// A test of a back-end may start again.
#[derive(Debug)]
pub struct QemuCrashed {
    explanation: String,
}

impl fmt::Display for QemuCrashed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.explanation)
    }
}

impl std::error::Error for QemuCrashed {}

/// Returns true if a line of QEMU's stderr reports a failed assertion in code that only TCG runs.
///
/// The forms are the C library's (`program: file:line: function: Assertion ...`) and GLib's
/// (`ERROR:file:line:function: assertion failed: ...`).
fn is_tcg_assertion(line: &str) -> bool {
    let place = if let Some((place, _)) = line.split_once(": Assertion `") {
        place.split_once(": ").map(|(_program, place)| place)
    } else if let Some((place, _)) = line.split_once(": assertion failed") {
        place.split_once("ERROR:").map(|(_, place)| place)
    } else {
        None
    };
    let mut parts = place.unwrap_or_default().splitn(3, ':').map(str::trim);
    let (file, _line, function) = (parts.next(), parts.next(), parts.next());
    let file = file.unwrap_or_default().trim_start_matches("../");
    // The rest of this file serves devices and back-ends as well.
    let iotlb = file.ends_with("physmem.c") && function == Some("iotlb_to_section");
    // The memory of this table ends where the assertion says: only an outdated entry of the same
    // cache leads beyond it.
    let msix = file.ends_with("hw/pci/msix.c") && function == Some("msix_table_mmio_write");
    iotlb || msix || file.starts_with("accel/tcg/") || file.starts_with("tcg/")
}

/// The program of a machine.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum MachineKind {
    Qemu,
    /// It has a process for each process of the guest, in a process group of its own.
    Uml,
}

impl fmt::Display for MachineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qemu => "QEMU",
            Self::Uml => "User Mode Linux",
        })
    }
}

/// The processes of a machine. Dropping it kills them and waits for their end.
pub(super) struct Machine {
    kind: MachineKind,
    child: Child,
    console: Console,
    readers: Vec<JoinHandle<()>>,
    folder: TempDir,
}

impl Machine {
    /// Starts `command`. The machine's stdout is the console; `folder` is removed after its end.
    pub(super) fn start(
        kind: MachineKind,
        mut command: Command,
        console: Console,
        folder: TempDir,
    ) -> Result<Self> {
        if kind == MachineKind::Uml {
            command.process_group(0);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting {kind}"))?;
        let mut readers = Vec::new();
        readers.extend(child.stdout.take().map(|stream| console.follow(stream, false)));
        readers.extend(child.stderr.take().map(|stream| console.follow(stream, true)));
        Ok(Self { kind, child, console, readers, folder })
    }

    /// The folder of its sockets.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn kind(&self) -> MachineKind {
        self.kind
    }

    /// Accepts the connection that QEMU makes to `listener` at its start.
    pub(super) fn accept(
        &mut self,
        listener: &UnixListener,
        stop: &StopFlag,
    ) -> Result<UnixStream> {
        let deadline = Instant::now() + QEMU_LIMIT;
        loop {
            match listener.accept() {
                Ok((stream, _)) => return Ok(stream),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("accepting a connection of QEMU"),
            }
            if let Some(status) = self.child.try_wait().context("waiting for QEMU")? {
                bail!("QEMU ended with {status}");
            }
            ensure!(!stop.load(Ordering::Relaxed), "stopped by a signal");
            ensure!(Instant::now() < deadline, "QEMU did not start in time");
            wait_readable(listener, STOP_INTERVAL)?;
        }
    }

    /// Waits for the machine to end on its own.
    pub(super) fn wait(&mut self, deadline: Instant) -> Result<ExitStatus> {
        wait_child(&mut self.child, deadline).with_context(|| format!("waiting for {}", self.kind))
    }

    /// The number of stalled processors that the guest's kernel has reported.
    pub(super) fn stalls(&self) -> usize {
        self.console.count("rcu: INFO")
    }

    /// Returns `error` with the console and, if the machine has ended, its status: a
    /// [`QemuCrashed`] after an assertion of TCG.
    pub(super) fn explain(&mut self, error: &anyhow::Error) -> anyhow::Error {
        let Ok(status) = self.wait(Instant::now() + ENDING_LIMIT) else {
            return anyhow!("{error:#}\n--- console ---\n{}", self.console.tail());
        };
        // The last messages may still be in the pipe.
        self.end_group();
        self.join_readers();
        let place = self.console.find_error(is_tcg_assertion);
        let console = self.console.tail();
        let aborted = status.signal() == Some(Signal::ABORT.as_raw());
        let kind = self.kind;
        let what = format!("{error:#} ({kind} ended with {status})\n--- console ---\n{console}");
        match place {
            Some(line) if aborted => {
                QemuCrashed { explanation: format!("QEMU died of itself: {line}\n{what}") }.into()
            }
            _ => anyhow!(what),
        }
    }

    /// Kills the guest's processes in User Mode Linux that are left.
    fn end_group(&self) {
        if self.kind == MachineKind::Uml {
            // Fails if all have ended.
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
    }

    fn join_readers(&mut self) {
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.end_group();
        // Fails only if the process was already waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.join_readers();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assertions_of_tcg_are_recognised() {
        for line in [
            "qemu-system-x86_64: system/physmem.c:2678: iotlb_to_section: Assertion `a < b' failed",
            "qemu: ../softmmu/physmem.c:24: iotlb_to_section: Assertion `a < b' failed.",
            "qemu: ../accel/tcg/cpu-exec.c:5: cpu_exec_longjmp_cleanup: Assertion `a' failed.",
            "ERROR:../accel/tcg/tb-maint.c:341:page_unlock__debug: assertion failed: (a)",
            "qemu: hw/pci/msix.c:228: msix_table_mmio_write: Assertion `a <= b' failed.",
            "Bail out! ERROR:tcg/tcg.c:341:tcg_gen_code: assertion failed: (a)",
        ] {
            assert!(is_tcg_assertion(line), "{line}");
        }
        for line in [
            "qemu: ../hw/virtio/vhost.c:5: vhost_dev_start: Assertion `a' failed.",
            "qemu: ../system/physmem.c:5: address_space_unmap: Assertion `mr != NULL' failed.",
            "qemu: ../hw/pci/msix.c:5: msix_set_notification_vector: Assertion `a' failed.",
            "qemu: ../hw/virtio/vhost.c:5: f: Assertion `accel/tcg/' failed.",
            "ERROR:../hw/virtio/virtio.c:5:f: assertion failed: (a)",
            "Assertion `accel/tcg/cpu-exec.c:5: f' failed",
            "accel/tcg/cpu-exec.c:5: f: what else is written there",
            "",
        ] {
            assert!(!is_tcg_assertion(line), "{line}");
        }
    }
}
