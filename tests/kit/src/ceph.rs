//! A Ceph cluster of one machine: a monitor, a manager and an OSD, with keys, in one folder.

use std::ffi::OsStr;
use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use ringhaul_tools::process::output;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::system::{is_installed, print_skipped};

/// The time limit for the start of a cluster and for each command to it.
const LIMIT: Duration = Duration::from_secs(120);

/// The most that the disk of its OSD can hold.
const OSD_BYTES: u64 = 4 << 30;

/// Its keys, by user. `vm` has the rights that a host of virtual machines needs.
const USERS: [(&str, [&str; 3]); 5] = [
    ("mon.", ["allow *", "", ""]),
    ("client.admin", ["allow *", "allow *", "allow *"]),
    ("mgr.x", ["allow profile mgr", "allow *", ""]),
    ("osd.0", ["allow profile osd", "allow *", "allow profile osd"]),
    ("client.vm", ["profile rbd", "profile rbd", "profile rbd"]),
];

/// Options for an OSD that caches everything that it reads.
const KEEP_ALL_READ: &str = "bluestore cache autotune = false\n\
                             bluestore cache size = 8589934592\n\
                             bluestore cache meta ratio = 0.1\n\
                             bluestore cache kv ratio = 0.1\n";

/// A running cluster with an empty pool `rbd`. Dropping it ends its processes and removes its
/// folder.
pub struct Cluster {
    /// The command that starts its daemons.
    under: &'static [&'static str],
    /// Further lines of its configuration.
    options: &'static str,
    daemons: Vec<(&'static str, Child)>,
    folder: TempDir,
}

impl Cluster {
    /// Starts a cluster. `None`, with a message, if Ceph is not installed.
    ///
    /// # Errors
    /// If Ceph is installed and does not start.
    pub fn start() -> Result<Option<Self>> {
        Self::start_under(&["nice", "-n", "10"], "")
    }

    /// Like [`start`](Self::start), but with daemons that have the same claim to a CPU as their
    /// clients.
    ///
    /// Like services, they have a session apart from their clients: the scheduler divides CPUs
    /// between sessions first. Data that was read once does not come from the OSD's disk again.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_as_service() -> Result<Option<Self>> {
        Self::start_under(&["setsid"], KEEP_ALL_READ)
    }

    fn start_under(under: &'static [&'static str], options: &'static str) -> Result<Option<Self>> {
        for program in ["ceph-mon", "ceph-mgr", "ceph-osd", "ceph-authtool", "rbd"] {
            if !is_installed(program) {
                print_skipped(&format!("a Ceph cluster: {program} is missing (`make setup`)"));
                return Ok(None);
            }
        }
        // A folder with a short path, for the sockets in it.
        let folder = tempfile::tempdir().context("making a folder for a cluster")?;
        let mut cluster = Self { under, options, daemons: Vec::new(), folder };
        match cluster.bring_up() {
            Ok(()) => Ok(Some(cluster)),
            Err(error) => Err(error.context(cluster.messages())),
        }
    }

    fn bring_up(&mut self) -> Result<()> {
        self.make_keys()?;
        let id = std::fs::read_to_string("/proc/sys/kernel/random/uuid").context("an id")?;
        self.start_monitor(id.trim())?;
        self.start_daemon("ceph-mgr", "x")?;
        self.make_osd()?;
        self.start_osd()?;
        self.tool("ceph", &["osd", "pool", "create", "rbd", "8", "8"])?;
        self.tool("rbd", &["pool", "init", "rbd"]).map(drop)
    }

    /// The configuration file.
    #[must_use]
    pub fn conf(&self) -> PathBuf {
        self.path("ceph.conf")
    }

    /// The file with the key of `client.vm`.
    #[must_use]
    pub fn vm_keyring(&self) -> PathBuf {
        self.path("client.vm")
    }

    /// The path of `name` in the cluster's folder.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs one of Ceph's tools, and returns its output.
    ///
    /// # Errors
    /// If the tool fails.
    pub fn tool<S: AsRef<OsStr>>(&self, program: &str, arguments: &[S]) -> Result<String> {
        let mut command = Command::new("timeout");
        command.arg(LIMIT.as_secs().to_string()).arg(program).args(arguments);
        let ran = output(command.env("CEPH_CONF", self.conf()));
        ran.with_context(|| {
            let arguments: Vec<_> = arguments.iter().map(AsRef::as_ref).collect();
            format!("{program} {}", arguments.join(OsStr::new(" ")).display())
        })
    }

    /// Makes an image.
    ///
    /// # Errors
    /// If the image cannot be made.
    pub fn create_image(&self, name: &str, bytes: u64) -> Result<()> {
        self.tool("rbd", &["create", name, "--size", &format!("{bytes}B")]).map(drop)
    }

    /// The process of the OSD.
    ///
    /// # Errors
    /// If no OSD runs.
    pub fn osd(&self) -> Result<Pid> {
        let osd = self.daemons.iter().find(|(program, _)| *program == "ceph-osd");
        osd.map(|(_, child)| Pid::from_child(child)).context("no OSD runs")
    }

    /// Kills the OSD.
    ///
    /// # Errors
    /// If no OSD runs.
    pub fn kill_osd(&mut self) -> Result<()> {
        kill_process(self.osd()?, Signal::KILL).context("killing the OSD")?;
        self.daemons.retain_mut(|(program, child)| *program != "ceph-osd" || child.wait().is_err());
        Ok(())
    }

    /// Starts the OSD, at first or again.
    ///
    /// # Errors
    /// If its program cannot be started.
    pub fn start_osd(&mut self) -> Result<()> {
        self.start_daemon("ceph-osd", "0")
    }

    fn make_keys(&self) -> Result<()> {
        for (user, [mon, osd, mgr]) in USERS {
            let own = self.path(user);
            let mut command = Command::new("ceph-authtool");
            command.arg("--create-keyring").arg(&own).args(["--gen-key", "-n", user]);
            for (what, rights) in [("mon", mon), ("osd", osd), ("mgr", mgr)] {
                if !rights.is_empty() {
                    command.args(["--cap", what, rights]);
                }
            }
            output(&mut command)?;
        }
        // A daemon looks up its own key among all of them; a client has only its own.
        let keys = USERS.iter().filter(|(user, _)| *user != "client.vm").chain(&USERS[4..]);
        let all = keys.map(|(user, _)| std::fs::read_to_string(self.path(user)));
        let all = all.collect::<std::io::Result<String>>().context("reading keys")?;
        std::fs::write(self.path("keyring"), all).context("writing keys")
    }

    fn start_monitor(&mut self, id: &str) -> Result<()> {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("looking for a port")?;
        let port = free.local_addr().context("looking for a port")?.port();
        drop(free);
        let address = format!("[v2:127.0.0.1:{port}]");
        std::fs::write(self.conf(), self.configuration(id, &address)).context("configuring")?;
        let (map, monitor) = (self.path("monmap"), self.path("mon"));
        std::fs::create_dir(&monitor).context("a folder for the monitor")?;
        let make = ["--create", "--fsid", id, "--addv", "a", &address];
        let make = make.map(OsStr::new).into_iter().chain([map.as_os_str()]);
        self.tool("monmaptool", &make.collect::<Vec<_>>())?;
        let [map, keyring] = [map, self.path("keyring")].map(PathBuf::into_os_string);
        let make = ["-i", "a", "--mkfs", "--monmap"].map(OsStr::new);
        let make = make.into_iter().chain([&*map, OsStr::new("--keyring"), &*keyring]);
        self.tool("ceph-mon", &make.collect::<Vec<_>>())?;
        self.start_daemon("ceph-mon", "a")
    }

    fn make_osd(&self) -> Result<()> {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/uuid").context("an id")?;
        std::fs::create_dir(self.path("osd")).context("a folder for the OSD")?;
        self.tool("ceph", &["osd", "new", id.trim(), "0"])?;
        self.tool("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", id.trim()]).map(drop)
    }

    fn start_daemon(&mut self, program: &'static str, id: &str) -> Result<()> {
        let messages = File::options().create(true).append(true).open(self.path(program));
        let messages = messages.context("making a file for messages")?;
        // The daemon ends with the test, however the test ends.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).args(self.under).args([program, "-f", "-i", id]);
        let child = command
            .env("CEPH_CONF", self.conf())
            .stdin(Stdio::null())
            .stdout(messages.try_clone().context("duplicating a descriptor")?)
            .stderr(messages)
            .spawn()
            .with_context(|| format!("starting {program}"))?;
        self.daemons.push((program, child));
        Ok(())
    }

    fn configuration(&self, id: &str, address: &str) -> String {
        let folder = self.folder.path().display();
        let options = self.options;
        format!(
            "[global]\n\
             fsid = {id}\n\
             mon host = {address}\n\
             public addr = 127.0.0.1\n\
             cluster addr = 127.0.0.1\n\
             keyring = {folder}/keyring\n\
             run dir = {folder}\n\
             pid file = {folder}/$name.pid\n\
             admin socket =\n\
             log file =\n\
             crash dir = {folder}\n\
             mon cluster log file = {folder}/cluster.log\n\
             mon data = {folder}/mon\n\
             mgr data = {folder}/mgr\n\
             osd data = {folder}/osd\n\
             mon allow pool size one = true\n\
             osd pool default size = 1\n\
             osd pool default min size = 1\n\
             osd crush chooseleaf type = 0\n\
             osd objectstore = bluestore\n\
             bluestore block size = {OSD_BYTES}\n\
             # Tests stop the OSD. It is not to be replaced, nor to wait for others afterwards.\n\
             osd heartbeat grace = 600\n\
             mon data avail warn = 1\n\
             mon data avail crit = 1\n\
             {options}"
        )
    }

    /// The messages of its daemons.
    #[must_use]
    pub fn messages(&self) -> String {
        let read = |name: &&str| std::fs::read_to_string(self.path(name)).unwrap_or_default();
        ["ceph-mon", "ceph-mgr", "ceph-osd"].iter().map(read).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for (_, child) in &mut self.daemons {
            // Both fail only for a daemon that was already waited for.
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- messages of the cluster ---\n{}", self.messages());
        }
    }
}

/// The content of an image, as `rbd export` reads it.
///
/// # Errors
/// If the image cannot be read.
pub fn export(cluster: &Cluster, image: &str, to: &Path) -> Result<Vec<u8>> {
    let _ = std::fs::remove_file(to);
    let words = [OsStr::new("export"), OsStr::new("--no-progress"), OsStr::new(image)];
    cluster.tool("rbd", &words.into_iter().chain([to.as_os_str()]).collect::<Vec<_>>())?;
    std::fs::read(to).context("reading what was exported")
}
