//! Temporary changes to the system, which are undone however a test ends.

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

/// The time for which a thread is sought, and the interval.
const LIST_LIMIT: Duration = Duration::from_secs(10);
const LIST_INTERVAL: Duration = Duration::from_millis(5);

/// Prints the reason why a test leaves something out. libtest hides the output of a test that
/// passes, so a skipped test would look like a passed one.
pub fn print_skipped(reason: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // libtest captures only the output of the macros.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
}

/// Returns true if this test may change the system. Otherwise prints a message.
#[must_use]
pub fn can_change_system(what: &str) -> bool {
    let may = rustix::process::geteuid().is_root();
    if !may {
        print_skipped(&format!("only root can change {what}"));
    }
    may
}

/// Runs a script when it is dropped, and after any other end of this process: a keeper waits for
/// that.
pub(crate) struct RestoreOnDrop {
    keeper: Child,
    what: String,
}

impl RestoreOnDrop {
    /// Starts the keeper, which later runs the shell script `script` with `words` as `$1` and so
    /// on.
    pub(crate) fn schedule(script: &str, words: &[&str], output: Stdio) -> Result<Self> {
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

impl Drop for RestoreOnDrop {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        match self.keeper.wait() {
            Ok(status) if status.success() => {}
            other => eprintln!("the state of {} was not restored: {other:?}", self.what),
        }
    }
}

/// A setting of the kernel under /proc/sys, changed until this value is dropped.
pub struct Setting {
    _restore: RestoreOnDrop,
}

impl Setting {
    /// Changes the setting at `path`. A second change waits until this one is undone.
    ///
    /// # Errors
    /// If the setting is missing, or the kernel refuses.
    pub fn change(path: &str, value: &str) -> Result<Self> {
        let opened = File::options().write(true).open(path);
        let file = opened.with_context(|| format!("opening {path}"))?;
        // The keeper inherits the lock, so the next test finds the setting restored.
        flock(&file, FlockOperation::LockExclusive).with_context(|| format!("locking {path}"))?;
        let before = fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
        let restore = RestoreOnDrop::schedule("echo \"$1\"", &[before.trim()], file.into())?;
        fs::write(path, value).with_context(|| format!("writing {value} to {path}"))?;
        Ok(Self { _restore: restore })
    }
}

/// A file system in memory, mounted in a folder of its own.
pub struct Tmpfs {
    _restore: RestoreOnDrop,
    folder: TempDir,
}

impl Tmpfs {
    /// Mounts a file system with room for `bytes`.
    ///
    /// # Errors
    /// If it cannot be mounted.
    pub fn mount(bytes: u64) -> Result<Self> {
        Self::mount_kind(&["-t", "tmpfs", "-o", &format!("size={bytes}")])
    }

    /// Mounts a file system of the kind `ramfs`, which refuses direct I/O and has no limit.
    ///
    /// # Errors
    /// If it cannot be mounted.
    pub fn mount_without_direct_io() -> Result<Self> {
        Self::mount_kind(&["-t", "ramfs"])
    }

    fn mount_kind(options: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir().context("making a folder to mount on")?;
        let path = folder.path().to_str().context("a folder with an odd name")?;
        let restore = RestoreOnDrop::schedule("umount --lazy \"$1\"", &[path], Stdio::null())?;
        run("mount", &[options, &["ringhaul-test", path]].concat())?;
        Ok(Self { _restore: restore, folder })
    }

    /// The mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// A file system on a file of its own.
pub struct FileSystem {
    _restore: RestoreOnDrop,
    folder: TempDir,
    /// The folder of its file.
    _home: TempDir,
}

impl FileSystem {
    /// Makes a file system in a new file of `bytes` in `home`, with `mkfs`, a command and its
    /// options, and mounts it.
    ///
    /// # Errors
    /// If it cannot be made or mounted.
    pub fn make(home: &Path, bytes: u64, mkfs: &[&str]) -> Result<Self> {
        let home = tempfile::tempdir_in(home).context("making a folder for a file system")?;
        let image = home.path().join("file-system.img");
        File::create(&image).and_then(|file| file.set_len(bytes)).context("making a file")?;
        let image = image.to_str().context("a file with an odd name")?;
        let [program, options @ ..] = mkfs else { anyhow::bail!("no command") };
        run(program, &[options, &[image]].concat())?;
        let folder = tempfile::tempdir().context("making a folder to mount on")?;
        let path = folder.path().to_str().context("a folder with an odd name")?;
        // A frozen file system stays frozen without a mount, and blocks its waiting processes.
        let script = "fsfreeze --unfreeze \"$1\" 2>/dev/null; umount --lazy \"$1\"";
        let restore = RestoreOnDrop::schedule(script, &[path], Stdio::null())?;
        run("mount", &["-o", "loop", image, path])?;
        Ok(Self { _restore: restore, folder, _home: home })
    }

    /// Blocks all changes of the file system until the result is dropped.
    ///
    /// # Errors
    /// If it cannot be frozen.
    pub fn freeze(&self) -> Result<Frozen> {
        let path = self.folder.path().to_str().context("a folder with an odd name")?;
        let restore =
            RestoreOnDrop::schedule("fsfreeze --unfreeze \"$1\"", &[path], Stdio::null())?;
        run("fsfreeze", &["--freeze", path])?;
        Ok(Frozen { _restore: restore })
    }

    /// The mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// A file system that does not change until this value is dropped.
pub struct Frozen {
    _restore: RestoreOnDrop,
}

/// Returns true if `program` is installed. Otherwise prints a message.
#[must_use]
pub fn is_installed(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", "command -v \"$1\"", "sh", program]).output();
    let is_installed = found.is_ok_and(|output| output.status.success());
    if !is_installed {
        print_skipped(&format!("{program} is not installed"));
    }
    is_installed
}

/// A script that removes a cgroup when its last process has gone.
const REMOVE_CGROUP: &str =
    "for i in $(seq 1000); do rmdir \"$1\" 2>/dev/null && exit; sleep 0.01; done; exit 1";

/// A cgroup with a limit on memory. Dropping it removes it, after its processes have ended.
pub struct MemoryCgroup {
    _restore: RestoreOnDrop,
    folder: PathBuf,
}

impl MemoryCgroup {
    /// Makes a cgroup. `None`: this machine has no cgroups for memory.
    ///
    /// # Errors
    /// If the limit cannot be set.
    pub fn new(limit_bytes: u64) -> Result<Option<Self>> {
        if !can_change_system("cgroups") {
            return Ok(None);
        }
        let name = format!("ringhaul-test-{}", std::process::id());
        for (root, file) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let folder = Path::new(root).join(&name);
            if !Path::new(root).join("cgroup.procs").exists() || fs::create_dir(&folder).is_err() {
                continue;
            }
            let words = [&*folder.to_string_lossy()];
            let restore = RestoreOnDrop::schedule(REMOVE_CGROUP, &words, Stdio::null())?;
            let cgroup = Self { _restore: restore, folder };
            let limit = cgroup.folder.join(file);
            if limit.exists() {
                let limited = fs::write(&limit, limit_bytes.to_string());
                limited.with_context(|| format!("writing {}", limit.display()))?;
                return Ok(Some(cgroup));
            }
        }
        print_skipped("there are no cgroups for memory");
        Ok(None)
    }

    /// The words that start the command behind them in this cgroup.
    #[must_use]
    pub fn wrapper(&self) -> [String; 4] {
        let script = format!("echo $$ > {}/cgroup.procs; exec \"$@\"", self.folder.display());
        ["sh".into(), "-c".into(), script, "sh".into()]
    }
}

/// A loop device.
pub struct LoopDevice {
    _restore: RestoreOnDrop,
    path: PathBuf,
}

impl LoopDevice {
    /// Makes a block device of a file.
    ///
    /// # Errors
    /// If no loop device is left.
    pub fn attach(file: &Path) -> Result<Self> {
        Self::attach_with(file, &[])
    }

    /// Like [`attach`](Self::attach), with further options of `losetup`.
    ///
    /// # Errors
    /// As for [`attach`](Self::attach).
    pub fn attach_with(file: &Path, options: &[&str]) -> Result<Self> {
        let file = file.to_str().context("a file with an odd name")?;
        let arguments = [options, &["--find", "--show", file]].concat();
        let path = run("losetup", &arguments)?.trim().to_owned();
        // The device may have been detached by that time, and belong to a different file.
        let script =
            "if losetup --associated \"$2\" | grep -q \"^$1:\"; then losetup -d \"$1\"; fi";
        let restore = RestoreOnDrop::schedule(script, &[&path, file], Stdio::null())?;
        Ok(Self { _restore: restore, path: path.into() })
    }

    /// The path of the device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A stopped process, which continues when this value is dropped.
pub struct Stopped(Pid);

impl Stopped {
    /// Stops a process, and waits until all of its threads have stopped.
    ///
    /// # Errors
    /// If the process has gone, or does not stop in time.
    pub fn new(process: Pid) -> Result<Self> {
        kill_process(process, Signal::STOP).context("stopping a process")?;
        let stopped = Self(process);
        // Threads stop one by one, and run until then.
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

/// Runs a command of the system, and returns its output.
///
/// # Errors
/// If it is missing or fails.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| format!("starting {program}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {arguments:?}: {}: {error}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The id of a process's thread by name. A list of threads can lack some while threads end, so it
/// is read repeatedly for a while.
///
/// # Errors
/// If there is no such thread.
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
        // A thread that has ended since the listing has no name.
        let comm = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if comm.trim_end() == name {
            let id = entry.file_name().to_str().and_then(|id| Pid::from_raw(id.parse().ok()?));
            return id.context("a thread with an odd id");
        }
    }
    bail!("{path} has no thread {name}")
}
