//! A guest of a few pages that a monitor runs with KVM.
//!
//! On some hosts KVM interprets the kernel mode of a guest, instruction by instruction, and a Linux
//! kernel takes minutes to boot. User mode runs at full speed everywhere. So this guest leaves
//! kernel mode after some dozen instructions, and drives its disk from user mode: `kvm/guest.c`.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::process::{output, retry, wait_child};
use ringhaul_tools::workspace;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;

use super::channel::{self, StopFlag};
use super::image::{guest_dir, lock};
use super::trace;

const START: &str = include_str!("kvm/start.S");
const GUEST: &str = include_str!("kvm/guest.c");
const LAYOUT: &str = include_str!("kvm/guest.ld");

/// The smallest disk that the guest can use.
pub const KVM_DISK_BYTES: u64 = 16 << 20;

/// The version of Alioth that tests install.
const ALIOTH_VERSION: &str = "0.12.0";

/// The limit of a wait for a line of the guest.
pub(super) const LIMIT: Duration = Duration::from_secs(180);

/// The time until a monitor listens for commands.
const START_LIMIT: Duration = Duration::from_secs(30);

/// The time that a monitor may take to end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// The options of each QEMU.
const QEMU: &[&str] = &[
    "qemu-system-x86_64",
    "-nodefaults",
    "-no-user-config",
    "-no-reboot",
    "-accel",
    "kvm",
    "-cpu",
    "host,-arch-capabilities",
    "-m",
    "64M",
    "-object",
    "memory-backend-memfd,id=memory,size=64M,share=on",
    "-bios",
    "qboot.rom",
    "-display",
    "none",
    "-serial",
    "stdio",
];

/// The rings that the guest uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingLayout {
    /// Split rings (virtio 1.3, section 2.7).
    Split,
    /// Packed rings (section 2.8).
    Packed,
}

impl RingLayout {
    /// The properties of a device of QEMU that offers such rings.
    fn properties(self) -> &'static str {
        match self {
            Self::Split => "",
            Self::Packed => ",packed=on",
        }
    }
}

/// The small machine of QEMU.
const MICROVM: &str = "microvm,acpi=off,pit=off,pic=off,rtc=off,memory-backend=memory";

/// A program that runs guests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Vmm {
    /// QEMU's microvm: virtio-mmio, two queues, connects again.
    Qemu(RingLayout),
    /// QEMU's microvm with packed rings, which never connects again.
    QemuOnce,
    /// QEMU's pc: virtio-pci, with a disk that is plugged in and out.
    QemuPlugged(RingLayout),
    /// QEMU's pc: virtio-pci, with a guest that begins here or comes from another QEMU.
    QemuMoved {
        /// The rings of the guest.
        layout: RingLayout,
        /// True if the guest comes from another QEMU.
        is_target: bool,
        /// True for a virtio-scsi device.
        is_scsi: bool,
    },
    /// Alioth: virtio-pci, never connects again.
    Alioth(PathBuf),
    /// Cloud Hypervisor: virtio-pci, connects again.
    CloudHypervisor(PathBuf),
    /// Firecracker: virtio-mmio, never connects again.
    Firecracker(PathBuf),
}

impl Vmm {
    /// Cloud Hypervisor and Firecracker, as far as `$PATH` has them.
    #[must_use]
    pub fn all_in_path() -> Vec<Self> {
        let cloud_hypervisor = workspace::find_program("cloud-hypervisor");
        let firecracker = workspace::find_program("firecracker");
        let cloud_hypervisor = cloud_hypervisor.map(Self::CloudHypervisor);
        cloud_hypervisor.into_iter().chain(firecracker.map(Self::Firecracker)).collect()
    }

    /// Alioth from `$PATH`, or installed below the target folder.
    ///
    /// # Errors
    /// If cargo cannot install it.
    pub fn alioth() -> Result<Self> {
        if let Some(program) = workspace::find_program("alioth") {
            return Ok(Self::Alioth(program));
        }
        let _lock = lock()?;
        let folder = guest_dir()?.join(format!("alioth-{ALIOTH_VERSION}"));
        let program = folder.join("bin/alioth");
        if !program.is_file() {
            eprintln!("guest: installing Alioth, which takes some minutes, once");
            let build = tempfile::tempdir_in(guest_dir()?).context("making a folder")?;
            let mut install = workspace::cargo();
            install
                .env("CARGO_PROFILE_DEV_DEBUG", "0")
                .args(["install", "alioth-cli", "--version", ALIOTH_VERSION])
                .args(["--locked", "--debug", "--quiet", "--root"])
                .arg(&folder)
                .arg("--target-dir")
                .arg(build.path());
            output(&mut install).context("installing Alioth")?;
        }
        Ok(Self::Alioth(program))
    }

    /// Returns true if the monitor connects again by itself, with the state of the guest's disk.
    #[must_use]
    pub fn connects_again(&self) -> bool {
        !matches!(self, Self::QemuOnce | Self::Alioth(_) | Self::Firecracker(_))
    }

    /// Returns true if a guest can reset the disk. Alioth 0.12 panics then, and Firecracker has no
    /// reset.
    #[must_use]
    pub fn resets_devices(&self) -> bool {
        matches!(self, Self::Qemu(_) | Self::QemuOnce | Self::CloudHypervisor(_))
    }

    /// The rings of the guest.
    fn layout(&self) -> RingLayout {
        match self {
            Self::Qemu(layout) | Self::QemuPlugged(layout) | Self::QemuMoved { layout, .. } => {
                *layout
            }
            Self::QemuOnce => RingLayout::Packed,
            Self::Alioth(_) | Self::CloudHypervisor(_) | Self::Firecracker(_) => RingLayout::Split,
        }
    }

    /// The command line for the guest in `folder` with the disk that is served on `socket`.
    pub(super) fn command(&self, folder: &Path, socket: &Path) -> Result<Command> {
        let (kernel, socket) = (folder.join("guest").display().to_string(), socket.display());
        let properties = self.layout().properties();
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        match self {
            Self::Qemu(_) | Self::QemuOnce => {
                let again = if self.connects_again() { ",reconnect-ms=100" } else { "" };
                command
                    .args(QEMU)
                    .args(["-kernel", &kernel, "-machine", MICROVM])
                    .args(["-global", "virtio-mmio.force-legacy=false"])
                    .args(["-chardev", &format!("socket,id=disk,path={socket}{again}")])
                    .arg("-device")
                    .arg(format!("vhost-user-blk,chardev=disk,num-queues=2{properties}"));
            }
            Self::QemuPlugged(_) => {
                let monitor = folder.join("qmp");
                command
                    .args(QEMU)
                    .args(["-kernel", &kernel, "-machine", "pc,memory-backend=memory", "-qmp"])
                    .arg(format!("unix:{},server=on,wait=off", monitor.display()));
            }
            Self::QemuMoved { is_target, is_scsi, .. } => {
                let device = moved_device(*is_scsi);
                let monitor = folder.join("qmp");
                command
                    .args(QEMU)
                    .args(["-kernel", &kernel, "-machine", "pc,memory-backend=memory"])
                    .args(["-chardev", &format!("socket,id=disk,path={socket},reconnect-ms=100")])
                    .args(["-device", &format!("{device}{properties}")])
                    .args(["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())])
                    .args(trace::arguments(folder));
                if *is_target {
                    command.args(["-incoming", "defer"]);
                }
            }
            Self::Alioth(program) => {
                // The serial port needs a terminal.
                let line = format!(
                    "exec {} boot --pvh {kernel} --memory size=64M,backend=memfd,shared=true \
                     --cpu count=1 --blk vu,socket={socket}",
                    program.display()
                );
                command.args(["script", "--quiet", "--flush", "--command", &line, "/dev/null"]);
            }
            Self::CloudHypervisor(program) => {
                command
                    .arg(program)
                    .args([
                        "--kernel",
                        &kernel,
                        "--memory",
                        "size=64M,shared=on",
                        "--cpus",
                        "boot=1",
                    ])
                    .args(["--serial", "tty", "--console", "off", "--disk"])
                    .arg(format!("vhost_user=true,socket={socket},num_queues=1,queue_size=128"));
            }
            Self::Firecracker(program) => {
                let config = folder.join("firecracker.json");
                std::fs::write(&config, firecracker_config(&kernel, &socket.to_string()))
                    .context("writing a configuration")?;
                command.arg(program).args(["--no-api", "--config-file"]).arg(config);
            }
        }
        Ok(command)
    }
}

/// The device of [`Vmm::QemuMoved`].
fn moved_device(is_scsi: bool) -> &'static str {
    match is_scsi {
        true => "vhost-user-scsi-pci,chardev=disk,num_queues=2,disable-legacy=on",
        false => "vhost-user-blk-pci,chardev=disk,num-queues=2,disable-legacy=on",
    }
}

fn firecracker_config(kernel: &str, socket: &str) -> String {
    let config = json!({
        "boot-source": {"kernel_image_path": kernel, "boot_args": ""},
        "machine-config": {"vcpu_count": 1, "mem_size_mib": 64},
        "drives": [{
            "drive_id": "disk",
            "is_root_device": false,
            "cache_type": "Writeback",
            "socket": socket,
        }],
    });
    config.to_string()
}

/// The obstacle to running a guest with KVM here, if there is one.
#[must_use]
pub fn lacks_kvm() -> Option<String> {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    opened.err().map(|error| format!("/dev/kvm cannot be opened: {error}"))
}

/// A guest that reads and writes until this handle is dropped.
pub struct KvmGuest {
    monitor: Child,
    console: PathBuf,
    folder: TempDir,
}

impl KvmGuest {
    /// Builds the guest, and makes a monitor run it on the disk that is served on `socket`.
    ///
    /// # Errors
    /// If the compiler or the monitor is missing.
    pub fn start(vmm: &Vmm, socket: &Path) -> Result<Self> {
        Self::start_by(vmm, |folder| vmm.command(folder, socket))
    }

    /// Builds the guest, and runs it by a command of the caller, which gets a folder. The guest is
    /// the kernel `guest` there, its serial port the standard output of the command.
    ///
    /// # Errors
    /// If the compiler or the monitor is missing.
    pub fn start_by(vmm: &Vmm, command: impl Fn(&Path) -> Result<Command>) -> Result<Self> {
        let folder = tempfile::tempdir().context("making a folder for the guest")?;
        build(folder.path(), vmm)?;
        let console = folder.path().join("console");
        let file = File::create(&console).context("creating the console's file")?;
        let errors = file.try_clone().context("duplicating a descriptor")?;
        let mut command = command(folder.path())?;
        command.stdin(Stdio::null()).stdout(file).stderr(errors);
        let monitor = command.spawn().with_context(|| format!("starting {vmm:?}"))?;
        Ok(Self { monitor, console, folder })
    }

    /// Kills the command, such as one that ignores the signal with which this handle ends it.
    ///
    /// # Errors
    /// If that fails.
    pub fn kill(&mut self) -> Result<()> {
        self.monitor.kill().context("killing a monitor")
    }

    /// The folder of the guest and its monitor's sockets.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The output of the guest and its monitor.
    #[must_use]
    pub fn console(&self) -> String {
        let console = std::fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&console).replace('\r', "")
    }

    /// The output without an incomplete last line. The guest writes a line in parts, and carries
    /// out commands between them.
    #[must_use]
    pub fn complete_lines(&self) -> String {
        let mut console = self.console();
        console.truncate(console.rfind('\n').map_or(0, |end| end + 1));
        console
    }

    /// The last round in which all requests were answered correctly.
    #[must_use]
    pub fn round(&self) -> u64 {
        let lines = self.complete_lines();
        let numbers = lines.lines().filter_map(|line| line.strip_prefix("round ")?.parse().ok());
        numbers.max().unwrap_or(0)
    }

    /// Waits for more rounds, of which all but the first begin after the call.
    ///
    /// # Errors
    /// If the guest finds an error, stands still, or has ended.
    pub fn wait_rounds(&mut self, more: u64) -> Result<()> {
        self.wait_for_round_unless(self.round() + more, || None)
    }

    /// Waits until this round is over, or its disk is known to have failed, with the reason.
    ///
    /// # Errors
    /// If the guest finds an error, stands still, or has ended, or its disk has failed.
    pub fn wait_for_round_unless(
        &mut self,
        wanted: u64,
        mut disk_failure: impl FnMut() -> Option<String>,
    ) -> Result<()> {
        let mut ended = None;
        let waited = retry(LIMIT, || {
            if let Some(failure) = disk_failure() {
                ended = Some(format!("{}\n{failure}", self.console()));
                return Ok(());
            }
            let lines = self.complete_lines();
            let has_failed = lines.lines().any(|line| line.starts_with("failed: "));
            if has_failed || self.monitor.try_wait()?.is_some() {
                ended = Some(self.console());
                return Ok(());
            }
            ensure!(self.round() >= wanted, "round {wanted} is not over");
            Ok(())
        });
        if let Some(console) = ended {
            bail!("the guest cannot continue:\n{console}");
        }
        waited.with_context(|| format!("the guest stands still:\n{}", self.console()))
    }
}

impl Drop for KvmGuest {
    fn drop(&mut self) {
        // SIGTERM, on which `script` also ends the monitor in its terminal.
        let _ = kill_process(Pid::from_child(&self.monitor), Signal::TERM);
        if wait_child(&mut self.monitor, Instant::now() + END_LIMIT).is_err() {
            let _ = self.monitor.kill();
            let _ = self.monitor.wait();
        }
    }
}

/// Connects to the monitor of a guest.
pub(super) fn connect(guest: &KvmGuest) -> Result<channel::QmpMonitor> {
    let mut stream = None;
    retry(START_LIMIT, || {
        stream = Some(UnixStream::connect(guest.folder.path().join("qmp"))?);
        Ok(())
    })?;
    let stream = stream.context("the monitor of QEMU")?;
    channel::QmpMonitor::new(stream, StopFlag::default())
}

/// Plugs in and out the disk of [`Vmm::QemuPlugged`].
pub struct HotPlug {
    monitor: channel::QmpMonitor,
    layout: RingLayout,
}

impl HotPlug {
    /// Connects to the monitor of a guest.
    ///
    /// # Errors
    /// If QEMU does not listen in time.
    pub fn new(guest: &KvmGuest, layout: RingLayout) -> Result<Self> {
        Ok(Self { monitor: connect(guest)?, layout })
    }

    /// Plugs in the disk that is served on `socket`.
    ///
    /// # Errors
    /// If QEMU refuses it.
    pub fn plug_in(&mut self, socket: &Path) -> Result<()> {
        let addr = json!({"type": "unix", "data": {"path": socket}});
        let data = json!({"addr": addr, "server": false, "reconnect-ms": 100});
        let backend = json!({"type": "socket", "data": data});
        self.monitor.execute_with("chardev-add", &json!({"id": "disk", "backend": backend}))?;
        let device = json!({
            "driver": "vhost-user-blk-pci",
            "id": "disk",
            "chardev": "disk",
            "disable-legacy": "on",
            "num-queues": 2,
            "packed": self.layout == RingLayout::Packed,
        });
        self.monitor.execute_with("device_add", &device)?;
        Ok(())
    }

    /// Asks the guest to eject the disk, and waits until QEMU has released it.
    ///
    /// # Errors
    /// If QEMU does not release it in time.
    pub fn pull_out(&mut self) -> Result<()> {
        self.monitor.execute_with("device_del", &json!({"id": "disk"}))?;
        retry(LIMIT, || {
            self.monitor.execute_with("chardev-remove", &json!({"id": "disk"}))?;
            Ok(())
        })
    }
}

/// Guests that were built, by their options.
static BUILT: Mutex<BTreeMap<[u8; 4], Vec<u8>>> = Mutex::new(BTreeMap::new());

/// Puts the guest for a monitor into a folder. It is built once: a compiler takes longer than the
/// start of a monitor.
fn build(folder: &Path, vmm: &Vmm) -> Result<()> {
    let reset = if vmm.resets_devices() { 3 } else { 0 };
    let plugged = u8::from(matches!(vmm, Vmm::QemuPlugged(_)));
    let packed = u8::from(vmm.layout() == RingLayout::Packed);
    // Short rounds: a move waits for one at the target.
    let moved = u8::from(matches!(vmm, Vmm::QemuMoved { .. }));
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let (options, guest) = ([reset, plugged, packed, moved], folder.join("guest"));
    if let Some(program) = built.get(&options) {
        return std::fs::write(guest, program).context("writing the guest");
    }
    compile(folder, options)?;
    built.insert(options, std::fs::read(guest).context("reading the guest")?);
    Ok(())
}

fn compile(folder: &Path, [reset, plugged, packed, moved]: [u8; 4]) -> Result<()> {
    for (name, text) in [("start.S", START), ("guest.c", GUEST), ("guest.ld", LAYOUT)] {
        std::fs::write(folder.join(name), text).with_context(|| format!("writing {name}"))?;
    }
    let mut compiler = Command::new("cc");
    compiler
        .current_dir(folder)
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-static", "-nostdlib", "-ffreestanding"])
        .args(["-fno-pic", "-no-pie", "-fno-stack-protector", "-fno-builtin", "-mno-red-zone"])
        .args(["-mgeneral-regs-only", &format!("-DROUNDS_OF_RESET={reset}")])
        .arg(format!("-DIS_PLUGGED={plugged}"))
        .arg(format!("-DIS_PACKED={packed}"))
        .arg(format!("-DIS_MOVED={moved}"))
        .args(["-Wl,-T,guest.ld,--build-id=none,--no-warn-rwx-segments,-z,noexecstack"])
        .args(["-o", "guest", "start.S", "guest.c"]);
    output(&mut compiler).context("building the guest")?;
    Ok(())
}
