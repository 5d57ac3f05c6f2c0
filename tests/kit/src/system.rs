//! What tests change in the system, and change back however they end.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::process::retry;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// How long a thread is looked for, and how often.
const LIST_LIMIT: Duration = Duration::from_secs(10);
const LIST_INTERVAL: Duration = Duration::from_millis(5);

/// Prints the reason why a test leaves something out. libtest keeps what a test prints that passes,
/// so a test that was left out would look like one that has passed.
pub fn skipped(why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // Only the macros write to the place that libtest keeps.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}

/// Whether this test may change the system. Prints a message if not.
#[must_use]
pub fn may_change(what: &str) -> bool {
    let may = rustix::process::geteuid().is_root();
    if !may {
        skipped(&format!("only root can change {what}"));
    }
    may
}

/// Undoes something when it is dropped; so does the end of this process, whatever ends it, because
/// a keeper waits for that.
pub(crate) struct Undo {
    keeper: Child,
    what: String,
}

impl Undo {
    /// Starts the keeper, which is to run `script`, a shell's, with `$1` and so on for `words`.
    pub(crate) fn later(script: &str, words: &[&str], output: Stdio) -> Result<Self> {
        let script = format!("trap '' HUP INT TERM; read -r end; {script}");
        let keeper = Command::new("sh")
            .args(["-c", &script, "sh"])
            .args(words)
            .stdin(Stdio::piped())
            .stdout(output)
            .spawn()
            .context("starting a keeper of the system's state")?;
        Ok(Self { keeper, what: words.join(" ") })
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        match self.keeper.wait() {
            Ok(status) if status.success() => {}
            other => eprintln!("the state of {} was not restored: {other:?}", self.what),
        }
    }
}

/// A setting of the kernel under /proc/sys, changed until this is dropped.
pub struct Setting {
    _undo: Undo,
}

impl Setting {
    /// Changes the setting at `path`. Others who want to wait until it is restored.
    ///
    /// # Errors
    /// When it is not there, or the kernel refuses.
    pub fn change(path: &str, value: &str) -> Result<Self> {
        let opened = File::options().write(true).open(path);
        let file = opened.with_context(|| format!("opening {path}"))?;
        // The keeper inherits the lock, so a second run of a test sees the setting restored.
        flock(&file, FlockOperation::LockExclusive).with_context(|| format!("locking {path}"))?;
        let before = fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
        let undo = Undo::later("echo \"$1\"", &[before.trim()], file.into())?;
        fs::write(path, value).with_context(|| format!("writing {value} to {path}"))?;
        Ok(Self { _undo: undo })
    }
}

/// A file system in memory, mounted in a folder of its own.
pub struct Tmpfs {
    _undo: Undo,
    folder: TempDir,
}

impl Tmpfs {
    /// Mounts one with room for `bytes`.
    ///
    /// # Errors
    /// When it cannot be mounted.
    pub fn mount(bytes: u64) -> Result<Self> {
        let folder = tempfile::tempdir().context("making a folder to mount on")?;
        let path = folder.path().to_str().context("a folder with an odd name")?;
        let undo = Undo::later("umount --lazy \"$1\"", &[path], Stdio::null())?;
        let options = format!("size={bytes}");
        run("mount", &["-t", "tmpfs", "-o", &options, "ringhaul-test", path])?;
        Ok(Self { _undo: undo, folder })
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// A file system on a file of its own.
pub struct FileSystem {
    _undo: Undo,
    folder: TempDir,
    /// Where its file is.
    _home: TempDir,
}

impl FileSystem {
    /// Makes one in a new file of `bytes` in `home`, with `mkfs`, a command and its options, and
    /// mounts it.
    ///
    /// # Errors
    /// When it cannot be made or mounted.
    pub fn make(home: &Path, bytes: u64, mkfs: &[&str]) -> Result<Self> {
        let home = tempfile::tempdir_in(home).context("making a folder for a file system")?;
        let image = home.path().join("file-system.img");
        File::create(&image).and_then(|file| file.set_len(bytes)).context("making a file")?;
        let image = image.to_str().context("a file with an odd name")?;
        let [program, options @ ..] = mkfs else { anyhow::bail!("no command") };
        run(program, &[options, &[image]].concat())?;
        let folder = tempfile::tempdir().context("making a folder to mount on")?;
        let path = folder.path().to_str().context("a folder with an odd name")?;
        // A file system that is frozen stays so without a mount, and whoever waits for it too.
        let script = "fsfreeze --unfreeze \"$1\" 2>/dev/null; umount --lazy \"$1\"";
        let undo = Undo::later(script, &[path], Stdio::null())?;
        run("mount", &["-o", "loop", image, path])?;
        Ok(Self { _undo: undo, folder, _home: home })
    }

    /// Makes all that would change it wait until the result is dropped.
    ///
    /// # Errors
    /// When it cannot be frozen.
    pub fn freeze(&self) -> Result<Frozen> {
        let path = self.folder.path().to_str().context("a folder with an odd name")?;
        let undo = Undo::later("fsfreeze --unfreeze \"$1\"", &[path], Stdio::null())?;
        run("fsfreeze", &["--freeze", path])?;
        Ok(Frozen { _undo: undo })
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// A file system that does not change until this is dropped.
pub struct Frozen {
    _undo: Undo,
}

/// Whether `program` is installed. Prints a message if not.
#[must_use]
pub fn is_installed(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", "command -v \"$1\"", "sh", program]).output();
    let is_there = found.is_ok_and(|output| output.status.success());
    if !is_there {
        skipped(&format!("{program} is not installed"));
    }
    is_there
}

/// A loop device.
pub struct LoopDevice {
    _undo: Undo,
    path: PathBuf,
}

impl LoopDevice {
    /// Makes a block device of a file.
    ///
    /// # Errors
    /// When there is none left.
    pub fn attach(file: &Path) -> Result<Self> {
        Self::attach_with(file, &[])
    }

    /// The same with more options of `losetup`.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub fn attach_with(file: &Path, options: &[&str]) -> Result<Self> {
        let file = file.to_str().context("a file with an odd name")?;
        let arguments = [options, &["--find", "--show", file]].concat();
        let path = run("losetup", &arguments)?.trim().to_owned();
        // It may have been detached by then, and be another's.
        let script =
            "if losetup --associated \"$2\" | grep -q \"^$1:\"; then losetup -d \"$1\"; fi";
        let undo = Undo::later(script, &[&path, file], Stdio::null())?;
        Ok(Self { _undo: undo, path: path.into() })
    }

    /// The device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A process that is stopped, until this is dropped.
pub struct Stopped(Pid);

impl Stopped {
    /// Stops a process, and waits until all of its threads have stopped.
    ///
    /// # Errors
    /// When it has gone, or does not stop in time.
    pub fn new(process: Pid) -> Result<Self> {
        kill_process(process, Signal::STOP).context("stopping a process")?;
        let stopped = Self(process);
        // They stop one after the other, and work until then.
        retry(LIST_LIMIT, || {
            for task in fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero()))? {
                let stat = fs::read_to_string(task?.path().join("stat"))?;
                ensure!(stat.contains(") T "), "it runs: {stat}");
            }
            Ok(())
        })?;
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// Runs a command of the system, and returns what it says.
///
/// # Errors
/// When it is not there or fails.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| format!("starting {program}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {arguments:?}: {}: {error}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The id of the thread of this name in a process. A list of threads can lack some while others
/// end, so it is read again for a while.
///
/// # Errors
/// When it has none.
pub fn thread_id(process: Pid, name: &str) -> Result<Pid> {
    let deadline = Instant::now() + LIST_LIMIT;
    loop {
        match listed_thread_id(process, name) {
            Err(_) if Instant::now() < deadline => std::thread::sleep(LIST_INTERVAL),
            result => return result,
        }
    }
}

fn listed_thread_id(process: Pid, name: &str) -> Result<Pid> {
    let path = format!("/proc/{}/task", process.as_raw_nonzero());
    for entry in fs::read_dir(&path).with_context(|| format!("reading {path}"))? {
        let entry = entry?;
        // One that has ended meanwhile has no name.
        let comm = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if comm.trim_end() == name {
            let id = entry.file_name().to_str().and_then(|id| Pid::from_raw(id.parse().ok()?));
            return id.context("a thread with an odd id");
        }
    }
    bail!("{path} has no thread {name}")
}
