//! A guest in QEMU or User Mode Linux that runs scripts and has disks on vhost-user sockets.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use tempfile::TempDir;

use super::accelerator::Accelerator;
use super::channel::{Console, LineChannel, QmpMonitor, StopFlag};
use super::image::Image;
use super::machine::{Machine, MachineKind, QemuCrashed};
use super::mover::Mover;
use super::{qemu, uml};

/// The first message of the guest's init, before it loads any driver.
const STARTED: &str = "ringhaul-guest started";

/// The message of the init when it waits for scripts.
const READY: &str = "ringhaul-guest ready";

/// The guest's tty buffers up to this many bytes that its init has not read.
const MAX_SCRIPT_BYTES: usize = 32 * 1024;

/// The kind of a device of the guest.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Bus {
    /// virtio-blk: one disk.
    #[default]
    Blk,
    /// virtio-scsi: any number of disks.
    Scsi,
}

/// A device of the guest, served by the back-end on a socket.
#[derive(Clone, Debug)]
pub struct Disk {
    /// The kind of the device.
    pub bus: Bus,
    /// The socket of the vhost-user back-end.
    pub socket: PathBuf,
    /// Number of virtqueues; the guest uses at most as many as it has processors.
    pub num_queues: u16,
    /// Entries of each virtqueue, a power of two.
    pub queue_size: u16,
}

/// The configuration of a virtual machine.
#[derive(Clone)]
pub struct VmOptions {
    /// Its disks, /dev/vda first.
    pub disks: Vec<Disk>,
    /// True to offer packed virtqueues to the guest's drivers.
    pub packed: bool,
    /// The target of the boot disk. With `Some`, the firmware boots from its LUN 0 on the first of
    /// the disks, which is virtio-scsi (see [`Image::make_boot_disk`]). With `None`, QEMU loads the
    /// kernel.
    pub boot_target: Option<u8>,
    /// Its memory in MiB.
    pub memory_mib: u32,
    /// Its number of processors.
    pub vcpus: u32,
    /// The time limit for a boot.
    pub boot_limit: Duration,
    /// The most boots of a kernel that hangs before its init is ready, and the most starts of a
    /// QEMU that crashes before then. Under TCG the timer of a guest's first processor at times
    /// stops while its kernel boots, before any disk is used, and at times an assertion of TCG
    /// fails. A kernel that has reached its init is booted again only if it reports a stalled
    /// processor. A guest that hangs later, or waits for a disk, is not.
    pub boot_attempts: u32,
    /// True to show the console on stderr, and the output of scripts on stdout, as they arrive.
    pub echo: bool,
    /// Set to end every wait with an error.
    pub stop: StopFlag,
}

impl Default for VmOptions {
    /// 1 GiB, two processors, no disk, 90 seconds to boot (a busy machine under TCG).
    fn default() -> Self {
        Self {
            disks: Vec::new(),
            packed: false,
            boot_target: None,
            memory_mib: 1024,
            vcpus: 2,
            boot_limit: Duration::from_secs(90),
            boot_attempts: 3,
            echo: false,
            stop: StopFlag::default(),
        }
    }
}

/// The result of a script in the guest.
#[derive(Clone, Debug)]
pub struct ScriptOutput {
    /// Its exit status.
    pub status: i32,
    /// Its output on stdout and stderr.
    pub text: String,
}

/// A running guest. Dropping it ends its machine in any state of the guest.
pub struct Vm {
    machine: Machine,
    agent: LineChannel,
    /// `None` in User Mode Linux.
    monitor: Option<Mover>,
    scripts: u32,
    options: VmOptions,
}

impl Vm {
    /// Starts QEMU and waits until the guest is ready for scripts.
    ///
    /// # Errors
    /// If QEMU is not installed or does not start (for example because no server listens on a
    /// disk's socket), or the guest is not up within the limit. The error shows the console. It is
    /// a [`QemuCrashed`] if QEMU crashed by itself in the last allowed attempt.
    pub fn boot(image: &Image, accelerator: Accelerator, options: &VmOptions) -> Result<Self> {
        Self::boot_with(options, |folder| qemu::command(image, accelerator, options, folder))
    }

    /// Boots a guest with these disks in User Mode Linux, or in QEMU where that is not installed:
    /// Ubuntu has no package of it.
    ///
    /// # Errors
    /// As for [`Vm::boot`]; the error of User Mode Linux shows its console too.
    pub fn boot_fast(disks: Vec<Disk>) -> Result<Self> {
        let options = VmOptions { disks, ..VmOptions::default() };
        if Image::find_uml().is_ok() {
            return Self::boot_uml(&options);
        }
        let image = Image::prepare()?;
        Self::boot(&image, Accelerator::choose(&image)?, &options)
    }

    /// Boots the kernel of User Mode Linux, a process of this machine, and waits until it is ready
    /// for scripts. It has one processor, one queue of 256 entries for each disk, and no reset
    /// button; a disk whose server ends is lost.
    ///
    /// # Errors
    /// If User Mode Linux is not installed or does not start, or the guest is not up within the
    /// limit. The error shows the console.
    fn boot_uml(options: &VmOptions) -> Result<Self> {
        let image = Image::prepare_uml()?;
        let options = VmOptions { vcpus: 1, boot_attempts: 1, ..options.clone() };
        let folder = make_folder()?;
        let (ours, theirs) = UnixStream::pair().context("making the guest's serial line")?;
        let agent = LineChannel::new("the guest's serial line", ours, options.stop.clone())?;
        let command = uml::command(&image, &options, folder.path(), theirs.into())?;
        let console = Console::new(options.echo);
        let machine = Machine::start(MachineKind::Uml, command, console, folder)?;
        let mut vm = Self { machine, agent, monitor: None, scripts: 0, options };
        vm.wait_ready()?;
        Ok(vm)
    }

    /// Starts a guest with a command of the caller, and waits until it is ready for scripts. The
    /// command gets a folder with two sockets that listen: its QEMU connects `agent` to the second
    /// serial port of the guest and `monitor` to a QMP monitor, and its standard output is the
    /// console. Dropping the guest kills the command.
    ///
    /// # Errors
    /// As for [`Vm::boot`].
    pub fn boot_with(
        options: &VmOptions,
        command: impl Fn(&Path) -> Result<Command>,
    ) -> Result<Self> {
        for _ in 1..options.boot_attempts {
            match Self::start_and_wait(options, &command) {
                Err(error) if error.is::<QemuCrashed>() => {
                    let reason = error.to_string();
                    let reason = reason.lines().next().unwrap_or_default();
                    eprintln!("guest: QEMU is started again: {reason}");
                }
                result => return result,
            }
        }
        Self::start_and_wait(options, &command)
    }

    /// Starts QEMU for a guest that comes from another one, see [`Mover::accept`]. The options are
    /// those of the guest's first QEMU, with other sockets. Scripts run after the move.
    ///
    /// # Errors
    /// If QEMU is not installed or does not start.
    pub fn start_target(
        image: &Image,
        accelerator: Accelerator,
        options: &VmOptions,
    ) -> Result<Self> {
        Self::start(options, |folder| {
            let mut command = qemu::command(image, accelerator, options, folder)?;
            command.args(["-incoming", "defer"]);
            Ok(command)
        })
    }

    /// Starts QEMU once, and waits until its guest is ready.
    fn start_and_wait(
        options: &VmOptions,
        command: impl Fn(&Path) -> Result<Command>,
    ) -> Result<Self> {
        let mut vm = Self::start(options, command)?;
        vm.wait_ready()?;
        Ok(vm)
    }

    /// Starts QEMU once.
    fn start(options: &VmOptions, command: impl Fn(&Path) -> Result<Command>) -> Result<Self> {
        let folder = make_folder()?;
        let agent = listen(&folder, "agent")?;
        let monitor = listen(&folder, "monitor")?;
        let command = command(folder.path())?;
        let console = Console::new(options.echo);
        let mut machine = Machine::start(MachineKind::Qemu, command, console, folder)?;

        let stop = &options.stop;
        let mut connect = || -> Result<(LineChannel, QmpMonitor)> {
            let agent = machine.accept(&agent, stop)?;
            let monitor = machine.accept(&monitor, stop)?;
            let agent = LineChannel::new("the guest's serial port", agent, stop.clone())?;
            Ok((agent, QmpMonitor::new(monitor, stop.clone())?))
        };
        let (agent, monitor) = match connect() {
            Ok(channels) => channels,
            Err(error) => return Err(machine.explain(&error)),
        };
        let mover = Mover::at(monitor, machine.folder());
        let (monitor, options) = (Some(mover), options.clone());
        Ok(Self { machine, agent, monitor, scripts: 0, options })
    }

    /// Runs a shell script (with `set -eu`) in the guest.
    ///
    /// # Errors
    /// If the script has not ended within `limit`, the guest crashed, or its machine has ended; not
    /// if the script fails. The error shows the console and the output so far. Like that of every
    /// function here, it is a [`QemuCrashed`] if QEMU crashed by itself.
    pub fn run(&mut self, script: &str, limit: Duration) -> Result<ScriptOutput> {
        let mut text = String::new();
        match self.converse(script, limit, &mut text) {
            Ok(status) => Ok(ScriptOutput { status, text }),
            Err(error) => {
                let error = error.context(format!("running a script in the guest:\n{script}"));
                let error = anyhow!("{error:#}\n--- output of the script ---\n{text}");
                Err(self.machine.explain(&error))
            }
        }
    }

    /// Runs a script that must end with status 0, and returns its output without trailing white
    /// space.
    ///
    /// # Errors
    /// As for [`Vm::run`], and if the script fails.
    pub fn check(&mut self, script: &str, limit: Duration) -> Result<String> {
        let output = self.run(script, limit)?;
        if output.status != 0 {
            let error = anyhow!(
                "a script in the guest ended with status {}:\n{script}\n--- its output ---\n{}",
                output.status,
                output.text
            );
            return Err(self.machine.explain(&error));
        }
        Ok(output.text.trim_end().to_owned())
    }

    /// Makes the guest reboot itself, as `reboot` does, and waits until it is ready.
    ///
    /// # Errors
    /// If it is not up again within the limit.
    pub fn reboot(&mut self) -> Result<()> {
        self.send("reboot -f\n").map_err(|error| self.machine.explain(&error))?;
        self.wait_ready()
    }

    /// Presses the reset button, in any state of the guest, and waits until it is ready.
    ///
    /// # Errors
    /// If it is not up again within the limit, or runs in User Mode Linux.
    pub fn reset(&mut self) -> Result<()> {
        self.press_reset().map_err(|error| self.machine.explain(&error))?;
        self.wait_ready()
    }

    fn press_reset(&mut self) -> Result<()> {
        self.mover()?.monitor.execute("system_reset").map(drop)
    }

    /// The monitor, which moves the guest. After a move, drop the handle of the source.
    ///
    /// # Errors
    /// If the guest runs in User Mode Linux.
    pub fn mover(&mut self) -> Result<&mut Mover> {
        self.monitor.as_mut().context("User Mode Linux has no monitor")
    }

    /// The number of processors.
    #[must_use]
    pub fn vcpus(&self) -> u32 {
        self.options.vcpus
    }

    /// Switches the guest off in an orderly way and waits for its machine to end.
    ///
    /// # Errors
    /// If the machine has not ended within `limit`, or its status is not 0.
    pub fn power_off(mut self, limit: Duration) -> Result<()> {
        let sent = self.send("sync\npoweroff -f\n");
        let ended = sent.and_then(|()| self.machine.wait(Instant::now() + limit));
        match ended {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => {
                let kind = self.machine.kind();
                Err(self.machine.explain(&anyhow!("{kind} ended with {status}")))
            }
            Err(error) => Err(self.machine.explain(&error.context("switching the guest off"))),
        }
    }

    /// Waits until a booting guest takes scripts.
    fn wait_ready(&mut self) -> Result<()> {
        self.boot_again_until_ready()
            .context("waiting for the guest to boot")
            .map_err(|error| self.machine.explain(&error))
    }

    fn boot_again_until_ready(&mut self) -> Result<()> {
        for attempt in 1..=self.options.boot_attempts {
            let deadline = Instant::now() + self.options.boot_limit;
            let stalls = self.machine.stalls();
            if self.wait_for(STARTED, deadline)? {
                if self.wait_for(READY, deadline)? {
                    return Ok(());
                }
                // A wait for a disk stalls no processor.
                ensure!(self.machine.stalls() > stalls, "its init hangs");
            }
            if attempt < self.options.boot_attempts {
                eprintln!("guest: the kernel hangs while it boots; it is started again");
                self.press_reset()?;
            }
        }
        bail!("its kernel did not start the init")
    }

    /// Skips all lines before the line `wanted`, such as the end of an interrupted script. Returns
    /// false at `deadline`.
    fn wait_for(&self, wanted: &str, deadline: Instant) -> Result<bool> {
        loop {
            match self.agent.poll_line(deadline)? {
                Some(line) if line == wanted => return Ok(true),
                Some(_) => {}
                None => return Ok(false),
            }
        }
    }

    /// Sends a script without waiting.
    fn send(&mut self, script: &str) -> Result<()> {
        ensure!(
            script.len() <= MAX_SCRIPT_BYTES,
            "a script for the guest has {} bytes; at most {MAX_SCRIPT_BYTES} can be sent",
            script.len()
        );
        self.scripts += 1;
        let name = self.scripts;
        let newline = if script.ends_with('\n') { "" } else { "\n" };
        self.agent.send(&format!("script {name}\n{script}{newline}end {name}\n"))
    }

    fn converse(&mut self, script: &str, limit: Duration, text: &mut String) -> Result<i32> {
        let deadline = Instant::now() + limit;
        self.send(script)?;
        let end = format!("ringhaul-guest status {} ", self.scripts);
        loop {
            let line = self.agent.next_line(deadline)?;
            if let Some(status) = line.strip_prefix(&end) {
                // The guest adds a newline before the status, which is not part of the script's
                // output.
                if text.ends_with("\n\n") || text == "\n" {
                    text.pop();
                }
                return status
                    .parse()
                    .with_context(|| format!("the guest's exit status is not a number: {status}"));
            }
            if line == STARTED {
                bail!("the guest crashed and booted again");
            }
            if self.options.echo {
                println!("{line}");
            }
            text.push_str(&line);
            text.push('\n');
        }
    }
}

/// The start of the names of machines' folders, before the process that has made the folder.
const FOLDER_PREFIX: &str = "ringhaul-guest-";

/// Makes the folder of a machine's sockets. Removes the folders of tests that were killed.
fn make_folder() -> Result<TempDir> {
    for entry in std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process =
            name.to_str().and_then(|name| name.strip_prefix(FOLDER_PREFIX)?.split_once('-'));
        let process = process.map(|(process, _)| Path::new("/proc").join(process));
        if process.is_some_and(|process| !process.exists()) {
            // A test beside this one may remove it, too.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    let prefix = format!("{FOLDER_PREFIX}{}-", std::process::id());
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).tempdir().context("making a folder for a guest's sockets")
}

fn listen(folder: &TempDir, name: &str) -> Result<UnixListener> {
    let path = folder.path().join(name);
    let listener =
        UnixListener::bind(&path).with_context(|| format!("listening on {}", path.display()))?;
    // Accepting a connection that has gone must not block.
    listener.set_nonblocking(true).with_context(|| format!("preparing {}", path.display()))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_a_killed_test_is_removed() {
        // It ends with this test.
        let mut killed = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let prefix = format!("{FOLDER_PREFIX}{}-", killed.id());
        let folder = tempfile::Builder::new().prefix(&prefix).tempdir().unwrap();
        std::fs::write(folder.path().join("agent"), "").unwrap();
        let own = make_folder().unwrap();
        assert!(folder.path().exists(), "its test still runs");
        killed.kill().unwrap();
        killed.wait().unwrap();
        make_folder().unwrap();
        assert!(!folder.path().exists());
        assert!(own.path().exists());
    }

    /// Boots with a QEMU that only writes `message` to stderr and dies of `signal`. Returns the
    /// number of starts and the error.
    fn boot_a_dying_qemu(message: &str, signal: &str) -> (usize, anyhow::Error) {
        let folder = tempfile::tempdir().unwrap();
        let starts = folder.path().join("starts");
        let options = VmOptions { boot_attempts: 3, ..VmOptions::default() };
        let command = |_: &Path| {
            let mut command = Command::new("sh");
            let script = r#"echo >>"$1"; echo "$2" >&2; kill -s "$3" $$"#;
            command.args(["-c", script, "qemu"]).arg(&starts).args([message, signal]);
            Ok(command)
        };
        let error = Vm::boot_with(&options, command).err().unwrap();
        (std::fs::read(&starts).unwrap().len(), error)
    }

    #[test]
    fn only_a_qemu_that_dies_of_tcg_is_restarted() {
        let tcg = "qemu-system-x86_64: system/physmem.c:2678: iotlb_to_section: Assertion \
                   `section_index < d->map.sections_nb' failed.";
        let (starts, error) = boot_a_dying_qemu(tcg, "ABRT");
        assert_eq!(starts, 3);
        assert!(error.is::<QemuCrashed>(), "{error}");
        assert!(error.to_string().contains("sections_nb"), "{error}");

        let vhost = "qemu-system-x86_64: ../hw/virtio/vhost-user.c:300: vhost_user_read: \
                     Assertion `r == 0' failed.";
        for (message, signal) in [(vhost, "ABRT"), (tcg, "KILL"), ("", "ABRT")] {
            let (starts, error) = boot_a_dying_qemu(message, signal);
            assert_eq!(starts, 1, "{message:?}, {signal}");
            assert!(!error.is::<QemuCrashed>(), "{error}");
        }
    }
}
