//! The end of a daemon while a disk hangs: a write to a frozen file system does not return.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Finished, LIMIT, Running, TestFolders, ringhaul, ringhaul_under, serve};
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, Setup, blk};
use ringhaul_kit::fuse::{Fuse, opcode};
use ringhaul_kit::system::{FileSystem, Frozen, LoopDevice, can_change_system, is_installed};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;

const DISK_BYTES: u64 = 16 << 20;

/// The exit code of a daemon that a second signal ended with requests unfinished.
const EXIT_ABANDONED: i32 = 3;

/// A daemon with one export on a hung disk and one on a healthy disk.
pub(crate) struct HungDisk {
    /// Dropped first: a process with a call that is stuck cannot be killed.
    pub(crate) frozen: Option<Frozen>,
    pub(crate) daemon: Running,
    sockets: [PathBuf; 2],
    pub(crate) hung: Frontend,
    pub(crate) healthy: Frontend,
    _folders: TestFolders,
    pub(crate) file_system: FileSystem,
}

impl HungDisk {
    /// `None` if no file system can be frozen.
    pub(crate) fn new(engine: &str) -> Result<Option<Self>> {
        Self::with(engine, &[])
    }

    /// Like [`HungDisk::new`], with more options of the daemon.
    pub(crate) fn with(engine: &str, options: &[&str]) -> Result<Option<Self>> {
        Self::start(engine, |command, _| {
            command.args(options);
            Ok(())
        })
    }

    /// Like [`HungDisk::new`], with a daemon that `prepare` changes before its start.
    pub(crate) fn start(
        engine: &str,
        prepare: impl FnOnce(&mut Command, &TestFolders) -> Result<()>,
    ) -> Result<Option<Self>> {
        if !can_change_system("mounting a file system") || !is_installed("fsfreeze") {
            return Ok(None);
        }
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let home = folders.path("");
        let file_system = FileSystem::make(&home, 64 << 20, &["mkfs.ext4", "-q"])?;
        let file = file_system.path().join("disk.img");
        std::fs::File::create(&file)?.set_len(DISK_BYTES)?;
        let sockets = ["hung", "healthy"].map(|name| folders.socket(name));
        let mut command = ringhaul()?;
        command.args(["serve", "--engine", engine]);
        command.args(["--log", "info,ringhaul::threads::engines=debug", "--export"]);
        command.arg(format!("socket-path={},blk-file={}", sockets[0].display(), file.display()));
        command.args(["--export", &format!("socket-path={},null=16M", sockets[1].display())]);
        prepare(&mut command, &folders)?;
        let daemon = Running::serve(&mut command)?;
        let mut hung = Frontend::attach(&sockets[0], &Setup::default())?;
        let healthy = Frontend::attach(&sockets[1], &Setup::default())?;
        hung.write(0, 0, &[1; 4096])?;
        let frozen = Some(file_system.freeze()?);
        let mut hung =
            Self { frozen, daemon, sockets, hung, healthy, _folders: folders, file_system };
        hung.offer(1, blk::OUT)?;
        hung.hung.rings[0].kick()?;
        Ok(Some(hung))
    }

    /// Offers a request in the three descriptors of this slot.
    pub(crate) fn offer(&mut self, slot: u16, kind: u32) -> Result<()> {
        let (header, status) = self.hung.put_header(0, slot, kind, 0)?;
        let data = match kind {
            blk::OUT => Desc::readable(DATA, 4096),
            _ => Desc::writable(DATA + 4096, 4096),
        };
        let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
        self.hung.rings[0].put_chain(3 * slot, &chain);
        self.hung.rings[0].offer(3 * slot);
        Ok(())
    }

    /// Waits until the daemon has taken the write: a read behind it is answered.
    pub(crate) fn wait_taken(&mut self) -> Result<()> {
        self.offer(2, blk::IN)?;
        self.hung.rings[0].kick()?;
        let head = self.hung.rings[0].wait_used()?.head;
        ensure!(head == 6, "a write to a frozen file system returned");
        Ok(())
    }

    /// Lets the disk continue, and waits for the end of the daemon.
    pub(crate) fn thaw(self) -> Result<(Finished, Frontend)> {
        drop(self.frozen);
        Ok((self.daemon.finish()?, self.hung))
    }
}

/// Waits until the main thread has ended, even if other threads have not.
fn wait_main_ended(daemon: &Running) -> Result<()> {
    let path = format!("/proc/{}/stat", daemon.pid().as_raw_pid());
    let start = Instant::now();
    // The name in parentheses may contain any character.
    while !std::fs::read_to_string(&path)?.rsplit(')').next().is_some_and(|s| s.starts_with(" Z")) {
        ensure!(start.elapsed() < LIMIT, "it does not end");
        std::thread::yield_now();
    }
    Ok(())
}

fn a_hung_disk_delays_its_own_export_alone(engine: &str) -> Result<()> {
    let Some(mut hung) = HungDisk::new(engine)? else { return Ok(()) };
    hung.wait_taken()?;
    hung.daemon.signal(Signal::TERM)?;
    hung.healthy.channel.wait_closed().context("the healthy export waits for the other")?;
    for socket in &hung.sockets {
        ensure!(!socket.exists(), "{} is still there", socket.display());
    }
    let line = hung.daemon.wait_for("still stopping after 5 s")?;
    let left = "queue 0: 1 request is not answered, of at most 128 KiB";
    ensure!(line.contains("/hung: ") && line.contains(left), "{line}");
    // SIGHUP does not count as a second signal: service managers send it with the first.
    hung.daemon.signal(Signal::HUP)?;
    let line = hung.daemon.wait_for("still stopping after 10 s")?;
    ensure!(line.contains(&format!("{left}; its disk has not answered for")), "{line}");
    // A request that was taken is finished, and the driver gets the answer.
    let (finished, mut frontend) = hung.thaw()?;
    finished.expect_code(0)?;
    ensure!(frontend.rings[0].wait_used()?.head == 3, "the write was not answered");
    Ok(())
}

/// No request was taken that would have to be finished.
#[test]
fn opening_a_hung_disk_does_not_delay_the_end() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let [hung, healthy] = ["hung", "healthy"].map(|name| folders.socket(name));
    let mut daemon = serve_beside(&folders, &fuse, opcode::OPEN)?;
    // Dropped first: a process with a call that is stuck cannot be killed.
    let fuse = fuse;
    daemon.signal(Signal::TERM)?;
    // The kernel keeps the process itself until the file system answers.
    let ended = wait_main_ended(&daemon);
    fuse.release();
    ended?;
    daemon.finish()?.expect_code(0)?;
    ensure!(!hung.exists() && !healthy.exists(), "a socket is left behind");
    Ok(())
}

/// Starts a daemon with one export on a disk that hangs in the call `withheld`, and a healthy one.
pub(crate) fn serve_beside(folders: &TestFolders, fuse: &Fuse, withheld: u32) -> Result<Running> {
    serve_limited(folders, fuse, withheld, [""; 2])
}

/// Like [`serve_beside`], with more keys for the hung and the healthy export.
pub(crate) fn serve_limited(
    folders: &TestFolders,
    fuse: &Fuse,
    withheld: u32,
    [of_hung, of_healthy]: [&str; 2],
) -> Result<Running> {
    let gate = folders.path("gate");
    mknodat(CWD, &gate, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    // The shell waits at the gate, so that its process id is known before it becomes the daemon.
    let script = "read go < \"$0\"; exec \"$@\"";
    let mut command =
        ringhaul_under(&["sh".as_ref(), "-c".as_ref(), script.as_ref(), gate.as_os_str()])?;
    let (hung, healthy) = (folders.socket("hung"), folders.socket("healthy"));
    let (hung, file) = (hung.display(), fuse.file());
    let file = format!("read-only=on,lock=off,blk-file={}", file.display());
    let hung = format!("socket-path={hung}{of_hung},{file}");
    let healthy = format!("socket-path={}{of_healthy},null=16M", healthy.display());
    command.args(["serve", "--export", &hung, "--export", &healthy]);
    command.arg("--control").arg(folders.socket("control"));
    let daemon = Running::start(&mut command)?;
    fuse.withhold(daemon.pid(), &[withheld]);
    std::fs::write(&gate, "go\n")?;
    fuse.wait_for(withheld)?;
    Ok(daemon)
}

#[test]
fn opening_a_hung_disk_delays_no_other_export() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let mut daemon = serve_beside(&folders, &fuse, opcode::OPEN)?;
    // Dropped first: a process with a call that is stuck cannot be killed.
    let fuse = fuse;
    let [hung, healthy] = ["hung", "healthy"].map(|name| folders.socket(name));
    let line = daemon.wait_for("its disk is not open after 5 s")?;
    ensure!(line.contains(&hung.display().to_string()), "{line}");
    daemon.wait_for(&format!("serving on {}", healthy.display()))?;
    let mut frontend = Frontend::attach(&healthy, &Setup::default())?;
    frontend.write(0, 0, &[1; 4096])?;
    ensure!(!hung.exists(), "there is a socket without a disk");
    fuse.release();
    daemon.wait_for(&format!("serving on {}", hung.display()))?;
    Frontend::attach(&hung, &Setup::default())?.read(0, 0, 4096)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_second_signal_names_the_unfinished_work() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let (socket, control) = (folders.socket("hung"), folders.socket("control"));
    let mut command = serve(&socket, &fuse.file())?;
    command.args(["--read-only", "--lock", "off", "--engine", "threads", "--control"]);
    let mut daemon = Running::serve(command.arg(&control))?;
    // Dropped first: a process with a call that is stuck cannot be killed.
    let fuse = fuse;
    let mut frontend = Frontend::attach(&socket, &Setup::default())?;
    fuse.withhold(daemon.pid(), &[opcode::READ, opcode::OPEN]);
    let (header, status) = frontend.put_header(0, 1, blk::IN, 0)?;
    let data = Desc::writable(DATA, 4096);
    let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
    frontend.rings[0].put_chain(0, &chain);
    frontend.rings[0].submit(0)?;
    fuse.wait_for(opcode::READ)?;
    let mut add = ringhaul()?;
    add.args(["ctl", "--control"]).arg(&control).args(["call", "export.add"]);
    let other = folders.socket("other");
    let disk = serde_json::json!({ "blk": { "file": fuse.file() } });
    let spec = serde_json::json!({
        "endpoint": { "path": other }, "device": disk, "read-only": true, "no-lock": true,
    });
    let _add = Running::start(add.arg(spec.to_string()))?;
    fuse.wait_for(opcode::OPEN)?;
    daemon.signal(Signal::TERM)?;
    daemon.wait_for("still stopping after 10 s")?;
    daemon.signal(Signal::TERM)?;
    let line = daemon.wait_for("ended without waiting for requests, ")?;
    for words in [
        " s after the stop began; unfinished: ".to_owned(),
        format!("{}: queue 0: 1 request is not answered", socket.display()),
        "its disk has not answered for ".to_owned(),
        format!("{}: its disk is not open after ", other.display()),
    ] {
        ensure!(line.contains(&words), "no {words:?}: {line}");
    }
    fuse.release();
    daemon.finish()?.expect_code(EXIT_ABANDONED)?;
    Ok(())
}

fn a_second_signal_ends_at_once(engine: &str) -> Result<()> {
    let Some(mut hung) = HungDisk::new(engine)? else { return Ok(()) };
    hung.wait_taken()?;
    hung.daemon.signal(Signal::TERM)?;
    hung.daemon.wait_for("finishing requests")?;
    hung.healthy.channel.wait_closed()?;
    hung.daemon.signal(Signal::INT)?;
    let line = hung.daemon.wait_for("ended without waiting for requests")?;
    ensure!(line.contains(" s after the stop began; unfinished: "), "{line}");
    let left = "/hung: queue 0: 1 request is not answered";
    ensure!(line.contains(left) && !line.contains("/healthy: "), "{line}");
    // Everything that does not wait for the disk has ended. The front-end sees the end only after
    // the end of its requests, because it then reads from the rings where to continue.
    wait_main_ended(&hung.daemon)?;
    ensure!(!hung.hung.channel.is_closed()?, "the front-end saw the end before its request had");
    // The kernel frees a process when none of its calls is stuck.
    let (finished, _frontend) = hung.thaw()?;
    finished.expect_code(EXIT_ABANDONED)?;
    Ok(())
}

/// Ops that the kernel can cancel do not delay the end: ops of io_uring on a block device.
#[test]
fn a_second_signal_does_not_wait_for_a_disk() -> Result<()> {
    if !can_change_system("a loop device on a frozen file system") || !is_installed("fsfreeze") {
        return Ok(());
    }
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let file_system = FileSystem::make(&folders.path(""), 64 << 20, &["mkfs.ext4", "-q"])?;
    let file = file_system.path().join("disk.img");
    std::fs::File::create(&file)?.set_len(DISK_BYTES)?;
    let device = LoopDevice::attach_with(&file, &["--direct-io=on"])?;
    let socket = folders.socket("hung");
    let mut command = serve(&socket, device.path())?;
    let mut daemon = Running::serve(command.args(["--engine", "io_uring"]))?;
    let mut frontend = Frontend::attach(&socket, &Setup::default())?;
    let frozen = file_system.freeze()?;
    let (header, status) = frontend.put_header(0, 1, blk::OUT, 0)?;
    let data = Desc::readable(DATA, 4096);
    let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
    frontend.rings[0].put_chain(0, &chain);
    frontend.rings[0].submit(0)?;
    // This request is behind the write in the ring, and is answered without the disk.
    let (header, status) = frontend.put_header(0, 2, 0xff, 0)?;
    frontend.rings[0].put_chain(3, &[Desc::readable(header, 16), Desc::writable(status, 1)]);
    frontend.rings[0].submit(3)?;
    ensure!(frontend.rings[0].wait_used()?.head == 3, "a write to a frozen file system returned");
    daemon.signal(Signal::TERM)?;
    daemon.wait_for("finishing requests")?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(EXIT_ABANDONED)?;
    drop(frozen);
    Ok(())
}

mod threads {
    #[test]
    fn a_hung_disk_delays_its_own_export_alone() -> anyhow::Result<()> {
        super::a_hung_disk_delays_its_own_export_alone("threads")
    }

    #[test]
    fn a_second_signal_ends_at_once() -> anyhow::Result<()> {
        super::a_second_signal_ends_at_once("threads")
    }
}

mod io_uring {
    #[test]
    fn a_hung_disk_delays_its_own_export_alone() -> anyhow::Result<()> {
        super::a_hung_disk_delays_its_own_export_alone("io_uring")
    }

    #[test]
    fn a_second_signal_ends_at_once() -> anyhow::Result<()> {
        super::a_second_signal_ends_at_once("io_uring")
    }
}
