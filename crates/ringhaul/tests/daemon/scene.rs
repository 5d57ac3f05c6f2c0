//! A daemon in this process, with a folder for its disks and sockets.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ringhaul::daemon::Daemon;
use ringhaul::options::ServeArgs;
use ringhaul::socket::inherited::InheritedSockets;
use ringhaul::spec::command::{Command, EndCause, ExportStatus, Reply};
use ringhaul::spec::{DeviceSpec, DiskSpec, EndpointSpec, ExportSettings, ExportSpec};
use ringhaul::threads::shutdown::Outcome;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, blk};
use ringhaul_kit::fuse::Fuse;
use tempfile::TempDir;

/// Ends a hopeless wait.
const LIMIT: Duration = Duration::from_secs(30);

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    args: ServeArgs,
}

pub(crate) struct Scene {
    pub(crate) daemon: Arc<Daemon>,
    waiter: Option<JoinHandle<Outcome>>,
    folder: TempDir,
}

impl Scene {
    pub(crate) fn new(options: &[&str]) -> Result<Self> {
        Self::with(options, InheritedSockets::default())
    }

    /// Starts a daemon with inherited sockets.
    pub(crate) fn with(options: &[&str], inherited: InheritedSockets) -> Result<Self> {
        let args = Program::try_parse_from([&["serve"], options].concat())?.args;
        let (daemon, ending) = Daemon::start(args, inherited)?;
        let daemon = Arc::new(daemon);
        let waiter = std::thread::spawn({
            let daemon = Arc::clone(&daemon);
            move || ending.wait(&daemon).expect("nothing was begun")
        });
        Ok(Self { daemon, waiter: Some(waiter), folder: tempfile::tempdir()? })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.path(&format!("{name}.sock"))
    }

    fn spec(&self, name: &str, disk: PathBuf, settings: ExportSettings) -> ExportSpec {
        let endpoint = EndpointSpec::Path(self.socket(name));
        let device = DeviceSpec::Blk(DiskSpec::File(disk));
        ExportSpec { name: None, endpoint, device, settings }
    }

    /// Makes an export of a new file.
    pub(crate) fn export(&self, name: &str, sectors: u64) -> Result<ExportSpec> {
        let disk = self.path(&format!("{name}.img"));
        std::fs::File::create(&disk)?.set_len(sectors * 512)?;
        Ok(self.spec(name, disk, ExportSettings::default()))
    }

    /// Makes an export of the file of a file system whose answers can be withheld.
    pub(crate) fn on_fuse(&self, name: &str, fuse: &Fuse) -> ExportSpec {
        let settings =
            ExportSettings { read_only: true, no_lock: true, ..ExportSettings::default() };
        self.spec(name, fuse.file(), settings)
    }

    pub(crate) fn handle(&self, command: Command) -> Result<Reply> {
        let text = format!("{command:?}");
        self.daemon.handle(command).with_context(|| text)
    }

    pub(crate) fn add(&self, exports: &[&ExportSpec]) -> Result<()> {
        let reply = self.handle(Command::Add(exports.iter().copied().cloned().collect()))?;
        ensure!(reply == Reply::Done, "{reply:?}");
        Ok(())
    }

    pub(crate) fn show(&self) -> Result<Vec<ExportStatus>> {
        Ok(self.daemon.exports()?)
    }

    pub(crate) fn begin_end(&self, cause: EndCause) {
        assert!(matches!(self.daemon.handle(Command::End(cause)), Ok(Reply::Done)));
    }

    /// Ends the daemon, which may have begun to end. SIGHUP is never taken for a second signal.
    pub(crate) fn end(&mut self) -> Outcome {
        self.begin_end(EndCause::Sighup);
        let waiter = self.waiter.take().expect("it ends once");
        waiter.join().expect("its end does not panic")
    }

    /// Waits for the work of other threads.
    pub(crate) fn wait_until(&self, mut is_so: impl FnMut() -> bool) -> Result<()> {
        let start = Instant::now();
        while !is_so() {
            ensure!(start.elapsed() < LIMIT, "it does not happen");
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// Puts a read on the first queue, and does not wait for it.
pub(crate) fn begin_read(frontend: &mut Frontend) -> Result<()> {
    let (header, status) = frontend.put_header(0, 0, blk::IN, 0)?;
    let chain = [Desc::readable(header, 16), Desc::writable(DATA, 4096), Desc::writable(status, 1)];
    frontend.rings[0].put_chain(0, &chain);
    frontend.rings[0].submit(0)
}
