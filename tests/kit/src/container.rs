//! A Debian or Ubuntu with systemd as its first process, in systemd-nspawn.

use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::process::{retry, wait_child};
use rustix::fs::{FlockOperation, flock};

use crate::cli::{Finished, LIMIT, assert_calls, run};
use crate::system::{can_change_system, is_installed};

/// The packages of the root besides the essential ones.
const PACKAGES: &str = "systemd,systemd-sysv,dbus";

/// The time for the download and the unpacking of the root.
const BUILD_MAX: Duration = Duration::from_secs(900);

/// The signal that powers off systemd: SIGRTMIN+4.
const POWER_OFF: &str = "RTMIN+4";

/// The folder of all cgroups.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Folders that systemd-nspawn leaves in hierarchies of cgroups.
const CGROUPS: [&str; 2] = ["payload", "supervisor"];

/// A running container. Its changes of the root are lost. Dropping it powers it off. The test fails
/// if a thread of a daemon in it was denied a system call.
pub struct Container {
    nspawn: Child,
    leader: String,
    name: String,
    /// Held while it runs: systemd-nspawn gives the same cgroup to each container.
    _alone: File,
}

impl Container {
    /// Boots a container with these folders and files of the host, each at a path of its own. The
    /// root is built in the folder `cache`, once. `None`: this machine cannot run containers.
    ///
    /// # Errors
    /// If the root cannot be built, or the container does not come up.
    pub fn boot(cache: &Path, binds: &[(&Path, &str)]) -> Result<Option<Self>> {
        if !can_change_system("cgroups and mounts of a container")
            || !["mmdebstrap", "nsenter", "systemd-nspawn"].into_iter().all(is_installed)
        {
            return Ok(None);
        }
        let root = build_root(cache)?;
        let alone = File::open(CGROUP_ROOT).context("opening the cgroups")?;
        flock(&alone, FlockOperation::LockExclusive).context("waiting for another container")?;
        let name = format!("ringhaul-test-{}", std::process::id());
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "systemd-nspawn", "--quiet", "--boot"]);
        command.args(["--register=no", "--keep-unit", "--private-network", "--console=pipe"]);
        command.args(["--volatile=overlay", &format!("--machine={name}"), "--directory"]);
        command.arg(&root);
        for (host, inside) in binds {
            command.arg(format!("--bind={}:{inside}", host.display()));
        }
        let mut messages = tempfile::tempfile().context("making a file for messages")?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(messages.try_clone()?);
        let nspawn = command.spawn().context("starting systemd-nspawn")?;
        let mut container = Self { nspawn, leader: String::new(), name, _alone: alone };
        retry(LIMIT, || {
            if let Some(status) = container.nspawn.try_wait()? {
                let mut text = String::new();
                messages.rewind()?;
                messages.read_to_string(&mut text)?;
                bail!("systemd-nspawn has ended with {status}:\n{text}");
            }
            container.leader = container.find_leader()?;
            let state = container.run("systemctl is-system-running")?;
            ensure!(state.status.success(), "systemd is {}{}", state.stdout, state.stderr);
            Ok(())
        })?;
        Ok(Some(container))
    }

    /// Runs a script in the container.
    ///
    /// # Errors
    /// If it does not end in time.
    pub fn run(&self, script: &str) -> Result<Finished> {
        let mut command = Command::new("nsenter");
        command.args(["--all", "--target", &self.leader, "sh", "-c", script]);
        run(&mut command)
    }

    /// Runs a script in the container, which must succeed, and returns its standard output.
    ///
    /// # Errors
    /// If it fails.
    pub fn output(&self, script: &str) -> Result<String> {
        let finished = self.run(script)?.expect_code(0);
        let finished = finished.with_context(|| format!("in the container: {script}"))?;
        Ok(finished.stdout.trim_end().to_owned())
    }

    /// A path of the container, as the host sees it.
    #[must_use]
    pub fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{inside}", self.leader))
    }

    /// A field of the status of systemd, as the kernel shows it.
    ///
    /// # Errors
    /// If there is no such field.
    pub fn leader_status(&self, field: &str) -> Result<String> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.leader))?;
        let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        Ok(value.with_context(|| format!("no {field}"))?.trim().to_owned())
    }

    /// The process in the container with the number 1, as the host sees it.
    fn find_leader(&self) -> Result<String> {
        let nspawn = self.nspawn.id();
        let children = fs::read_to_string(format!("/proc/{nspawn}/task/{nspawn}/children"))?;
        let leader = children.split_whitespace().next().context("it has no process yet")?;
        Ok(leader.to_owned())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let journal = self.run("journalctl --sync; journalctl --output=cat");
        let power_off = Command::new("kill").args(["-s", POWER_OFF, &self.leader]).output();
        let power_off = power_off.map(|output| output.status);
        let ended = power_off.is_ok_and(|status| status.success())
            && wait_child(&mut self.nspawn, Instant::now() + LIMIT).is_ok();
        if !ended {
            // The processes of the container end with it.
            let _ = self.nspawn.kill();
            let _ = self.nspawn.wait();
        }
        // Another container may use them, which keeps them.
        let _ = fs::remove_dir(Path::new("/run/systemd/nspawn/propagate").join(&self.name));
        own_cgroups().iter().for_each(|folder| {
            CGROUPS.into_iter().for_each(|name| remove_cgroup(&folder.join(name)));
        });
        // A container that did not come up has no journal, and its test fails for that reason.
        assert_calls(&journal.map(|journal| journal.stdout).unwrap_or_default());
    }
}

/// The folders of this process's cgroups, in all hierarchies.
fn own_cgroups() -> Vec<PathBuf> {
    let root = Path::new(CGROUP_ROOT);
    let hierarchies = fs::read_dir(root).into_iter().flatten().flatten();
    let hierarchies: Vec<PathBuf> = hierarchies.map(|entry| entry.path()).collect();
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let paths = own.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let folders = paths.flat_map(|path| {
        let path = path.trim_start_matches('/');
        let roots = hierarchies.iter().map(PathBuf::as_path).chain([root]);
        roots.map(|root| root.join(path)).collect::<Vec<_>>()
    });
    folders.collect()
}

/// Removes a cgroup and its children, unless a process is in it.
fn remove_cgroup(folder: &Path) {
    let below = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.for_each(|entry| remove_cgroup(&entry.path()));
    let _ = fs::remove_dir(folder);
}

/// The root of a minimal system of this machine's distribution.
fn build_root(cache: &Path) -> Result<PathBuf> {
    let release = fs::read_to_string("/etc/os-release").context("reading the distribution")?;
    let codename = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let codename = codename.context("/etc/os-release has no VERSION_CODENAME")?;
    let root = cache.join(format!("systemd-{codename}"));
    if root.exists() {
        return Ok(root);
    }
    let begun = tempfile::tempdir_in(cache).context("making a folder for a root")?;
    let new = begun.path().join("root");
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "mmdebstrap", "--quiet", "--variant=minbase"]);
    command.arg(format!("--include={PACKAGES}")).arg(codename).arg(&new);
    let mut child = command.spawn().context("starting mmdebstrap")?;
    let status = wait_child(&mut child, Instant::now() + BUILD_MAX)?;
    ensure!(status.success(), "mmdebstrap has ended with {status}");
    // A test beside this one may have been faster.
    if let Err(error) = fs::rename(&new, &root)
        && !root.exists()
    {
        return Err(error).context("moving the new root into its place");
    }
    Ok(root)
}
