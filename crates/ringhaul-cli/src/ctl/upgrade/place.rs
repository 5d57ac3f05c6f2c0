//! The place of a daemon in the system: session, namespaces, control groups, limits and rights. A
//! process without threads moves there.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{Mode, OFlags};
use rustix::process::{
    Gid, Pid, Resource, Rlimit, Uid, chroot, fchdir, getpid, getpriority_process, getrlimit,
    setpriority_process, setrlimit, setsid, umask,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, configure_capability_in_ambient_set,
    move_into_link_name_space, remove_capability_from_bounding_set, sched_getaffinity,
    sched_setaffinity, set_capabilities, set_keep_capabilities, set_no_new_privs,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

use super::status::{Status, limits};

/// The namespaces that a process can move into, in the order of the moves. The last one has the
/// files.
const NAMESPACES: [(&str, LinkNameSpaceType); 5] = [
    ("cgroup", LinkNameSpaceType::ControlGroup),
    ("ipc", LinkNameSpaceType::InterProcessCommunication),
    ("uts", LinkNameSpaceType::HostNameAndNISDomainName),
    ("net", LinkNameSpaceType::Network),
    ("mnt", LinkNameSpaceType::Mount),
];

/// The namespaces that both processes must share.
const SHARED: [&str; 2] = ["user", "pid"];

/// The file with the process's inclination to be killed when memory is short.
const OOM: &str = "oom_score_adj";

/// The place of a process.
pub(super) struct ProcessPlace {
    id: Pid,
    status: Status,
    limits: Vec<(&'static str, Resource, Rlimit)>,
    oom: String,
    nice: i32,
    /// The namespaces that this process is not in.
    namespaces: Vec<(&'static str, LinkNameSpaceType, File)>,
    /// The root folder, if it differs.
    root: Option<OwnedFd>,
    /// The control groups that differ: files that processes are written to.
    cgroups: Vec<Result<PathBuf>>,
}

impl ProcessPlace {
    /// Reads the place of a process.
    ///
    /// # Errors
    ///
    /// When the process is hidden, or in namespaces that a process cannot move into.
    pub(super) fn read(id: Pid) -> Result<Self> {
        let own = getpid();
        for name in SHARED {
            let differs = namespace_id(id, name) != namespace_id(own, name);
            ensure!(!differs, "the daemon is in another {name} namespace; run this command there");
        }
        let mut namespaces = Vec::new();
        for (name, kind) in NAMESPACES {
            if namespace_id(id, name) != namespace_id(own, name) {
                let path = namespace_path(id, name);
                let file = File::open(&path);
                namespaces.push((name, kind, file.with_context(|| as_root("read", &path))?));
            }
        }
        let moves = namespaces.iter().any(|(name, ..)| *name == "mnt");
        Ok(Self {
            id,
            status: Status::read(id)?,
            limits: limits(id)?,
            oom: read(&proc_path(id, OOM))?,
            nice: getpriority_process(Some(id)).context("cannot read the daemon's priority")?,
            namespaces,
            root: root(id, moves)?,
            cgroups: cgroups(&read(&proc_path(id, "cgroup"))?, &read(&proc_path(own, "cgroup"))?)?,
        })
    }

    /// Checks that the process has the rights of this user and group alone. A set-uid program would
    /// have more.
    ///
    /// # Errors
    ///
    /// When a real, effective or saved id differs.
    pub(super) fn check_owner(&self, user: u32, group: u32) -> Result<()> {
        let Status { users, groups, .. } = &self.status;
        ensure!(
            *users == [user; 3] && *groups == [group; 3],
            "process {} has not the rights of the daemon alone: user {user}, group {group} has \
             answered, and it runs with users {users:?}, groups {groups:?}",
            self.id.as_raw_pid()
        );
        Ok(())
    }

    /// Returns true unless the kernel rules out that the process is in a sandbox: a process that
    /// may get new privileges has never entered one.
    pub(super) fn is_confined(&self) -> bool {
        self.status.no_new_privileges
    }

    /// Moves this process to the place, except for its rights and its working directory.
    /// `is_managed`: a service manager identifies the daemon by its control group.
    ///
    /// # Errors
    ///
    /// When this process lacks the right to one of the steps.
    pub(super) fn enter(&self, is_managed: bool) -> Result<()> {
        setsid().context("cannot begin a session")?;
        umask(Mode::from_raw_mode(self.status.umask));
        join_all(&self.cgroups, is_managed)?;
        let oom = proc_path(getpid(), OOM);
        if read(&oom)? != self.oom {
            fs::write(&oom, &self.oom).with_context(|| as_root("write to", &oom))?;
        }
        self.adopt_scheduling()?;
        for (name, resource, limit) in &self.limits {
            if getrlimit(*resource) != *limit {
                let set = setrlimit(*resource, *limit);
                set.with_context(|| as_root("set the daemon's limit", Path::new(name)))?;
            }
        }
        for (name, kind, file) in &self.namespaces {
            let moved = move_into_link_name_space(file.as_fd(), Some(*kind));
            moved.with_context(|| as_root("enter the namespace", Path::new(name)))?;
        }
        if let Some(root) = &self.root {
            fchdir(root).and_then(|()| chroot(".")).context("cannot enter the daemon's root")?;
        }
        Ok(())
    }

    fn adopt_scheduling(&self) -> Result<()> {
        if getpriority_process(None)? != self.nice {
            let set = setpriority_process(None, self.nice);
            set.context("cannot set the daemon's priority; run this command as root")?;
        }
        let cpus = sched_getaffinity(Some(self.id)).context("cannot read the daemon's CPUs")?;
        sched_setaffinity(None, &cpus).context("cannot set the daemon's CPUs")
    }

    /// Takes exactly the rights of the place.
    ///
    /// # Errors
    ///
    /// When this process has not all of these rights.
    pub(super) fn adopt_rights(&self) -> Result<()> {
        let own = Status::read(getpid())?;
        let Status { users, groups, more_groups, bounding, ambient, .. } = &self.status;
        for capability in capabilities(own.bounding & !bounding) {
            let removed = remove_capability_from_bounding_set(capability);
            removed.context("cannot give up capabilities; run this command as root")?;
        }
        let text = "cannot become the user of the daemon; run this command as root";
        let gids: Vec<Gid> = more_groups.iter().map(|id| Gid::from_raw(*id)).collect();
        if own.more_groups != *more_groups {
            set_thread_groups(&gids).context(text)?;
        }
        if own.groups != *groups {
            let [real, effective, saved] = groups.map(Gid::from_raw);
            set_thread_res_gid(real, effective, saved).context(text)?;
        }
        if own.users != *users {
            set_keep_capabilities(true)?;
            let [real, effective, saved] = users.map(Uid::from_raw);
            set_thread_res_uid(real, effective, saved).context(text)?;
            let kept = CapabilitySet::from_bits_retain(*ambient);
            let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: kept };
            set_capabilities(None, sets).context("cannot keep the daemon's capabilities")?;
            for capability in capabilities(*ambient) {
                let raised = configure_capability_in_ambient_set(capability, true);
                raised.context("cannot keep the daemon's capabilities")?;
            }
        }
        if self.status.no_new_privileges {
            set_no_new_privs(true).context("cannot rule out new privileges")?;
        }
        Ok(())
    }
}

/// The capabilities with these bits.
fn capabilities(bits: u64) -> impl Iterator<Item = CapabilitySet> {
    let single = (0..u64::BITS).map(|bit| 1 << bit);
    single.filter(move |bit| bits & bit != 0).map(CapabilitySet::from_bits_retain)
}

fn as_root(action: &str, object: &Path) -> String {
    format!("cannot {action} {}; run this command as root", object.display())
}

fn proc_path(process: Pid, name: &str) -> PathBuf {
    format!("/proc/{}/{name}", process.as_raw_pid()).into()
}

fn read(path: &Path) -> Result<String> {
    let text = fs::read_to_string(path);
    Ok(text.with_context(|| format!("cannot read {}", path.display()))?.trim_end().to_owned())
}

fn namespace_path(process: Pid, name: &str) -> PathBuf {
    proc_path(process, &format!("ns/{name}"))
}

/// The namespace of a process. `None`: this kernel has no such namespaces. A process of the same
/// user may be hidden: it counts as one of this namespace, which this process could not leave
/// without more rights.
fn namespace_id(process: Pid, name: &str) -> Option<PathBuf> {
    match fs::read_link(namespace_path(process, name)) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            fs::read_link(namespace_path(getpid(), name)).ok()
        }
        link => link.ok(),
    }
}

/// The root folder of a process, unless it is that of this process.
fn root(process: Pid, moves: bool) -> Result<Option<OwnedFd>> {
    let path = proc_path(process, "root");
    let place = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    match place(&path) {
        Ok(found) if moves || found != place(Path::new("/"))? => {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let root = rustix::fs::open(&path, flags, Mode::empty());
            Ok(Some(root.with_context(|| as_root("open", &path))?))
        }
        Err(error) if error.kind() != io::ErrorKind::PermissionDenied => {
            Err(error).with_context(|| as_root("examine", &path))
        }
        _ => Ok(None),
    }
}

/// Moves this process into control groups. Only a service manager needs that; elsewhere a failure
/// is a warning.
fn join_all(cgroups: &[Result<PathBuf>], is_managed: bool) -> Result<()> {
    for cgroup in cgroups {
        match join(cgroup) {
            Err(error) if is_managed => {
                return Err(error.context(
                    "the new process would not belong to the service of the daemon; run this \
                     command as root",
                ));
            }
            Err(error) => eprintln!("ringhaul: warning: {error:#}"),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Moves this process into a control group.
fn join(cgroup: &Result<PathBuf>) -> Result<()> {
    let path = cgroup.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))?;
    let joined = OpenOptions::new().write(true).open(path);
    // This process is 0 in each PID namespace.
    let joined = joined.and_then(|mut file| io::Write::write_all(&mut file, b"0"));
    joined.with_context(|| format!("cannot join the daemon's control group, {}", path.display()))
}

/// The control groups of the daemon that this process is not in.
fn cgroups(daemon: &str, own: &str) -> Result<Vec<Result<PathBuf>>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot read mountinfo")?;
    let own = groups_by_hierarchy(own);
    let differing = groups_by_hierarchy(daemon).into_iter().filter(|(hierarchy, path)| {
        // A hierarchy that is missing in one list appeared between the two reads.
        own.get(hierarchy).is_some_and(|own| own != path)
    });
    Ok(differing.map(|(hierarchy, path)| members_file(&mounts, hierarchy, path)).collect())
}

/// The groups in `/proc/PID/cgroup`, by the controllers of their hierarchies.
fn groups_by_hierarchy(text: &str) -> BTreeMap<&str, &str> {
    text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':')).collect()
}

/// The file that moves processes into the group `path` of a hierarchy.
fn members_file(mounts: &str, controllers: &str, path: &str) -> Result<PathBuf> {
    let is_outside = path.starts_with("/..");
    for mount in mounts.lines().filter(|_| !is_outside) {
        let Some((place, source)) = mount.split_once(" - ") else { continue };
        let (place, source): (Vec<&str>, Vec<&str>) =
            (place.split(' ').collect(), source.split(' ').collect());
        let (&[_, _, _, root, folder, ..], &[kind, _, options, ..]) = (&place[..], &source[..])
        else {
            continue;
        };
        let has = |controller| options.split(',').any(|option| option == controller);
        let is_meant = match controllers {
            "" => kind == "cgroup2",
            controllers => kind == "cgroup" && controllers.split(',').all(has),
        };
        let below = match root {
            "/" => Some(path),
            root => path
                .strip_prefix(root)
                .filter(|below| ["", "/"].contains(&&below[..below.len().min(1)])),
        };
        if let Some(below) = below.filter(|_| is_meant) {
            return Ok(PathBuf::from(format!("{folder}{below}/cgroup.procs")));
        }
    }
    bail!("the daemon's control group {controllers}:{path} is not mounted here")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_groups_are_found_in_each_kind_of_hierarchy() {
        let mounts = "\
            30 24 0:26 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup rw\n\
            31 24 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
            32 24 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
            33 24 0:29 /box /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        for (controllers, path, expected) in [
            ("", "/a", Some("unified/a")),
            ("name=systemd", "/a/b", Some("systemd/a/b")),
            ("cpu,cpuacct", "/", Some("cpu,cpuacct/")),
            ("memory", "/box/a", Some("memory/a")),
            ("memory", "/box", Some("memory")),
            ("memory", "/boxes", None),
            ("memory", "/other", None),
            ("pids", "/a", None),
            ("", "/../a", None),
        ] {
            let expected =
                expected.map(|path| PathBuf::from(format!("/sys/fs/cgroup/{path}/cgroup.procs")));
            let found = members_file(mounts, controllers, path).ok();
            assert_eq!(found, expected, "{controllers}:{path}");
        }
        let daemon = "3:memory:/a\n2:name=systemd:/b\n0::/c\n";
        let groups = groups_by_hierarchy(daemon);
        assert_eq!(groups["memory"], "/a");
        assert_eq!(groups["name=systemd"], "/b");
        assert_eq!(groups[""], "/c");
        assert!(cgroups(daemon, daemon).unwrap().is_empty());
        assert_eq!(cgroups(daemon, "3:memory:/a\n2:name=systemd:/x\n0::/c\n").unwrap().len(), 1);
    }

    /// A service manager would not know the new process, and would kill it or start its service.
    #[test]
    fn a_control_group_is_vital_where_a_service_manager_identifies_the_daemon_by_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cgroup.procs");
        let absent = || vec![Ok(file.clone()), Err(anyhow::anyhow!("it is not mounted"))];
        let error = join_all(&absent(), true).unwrap_err().to_string();
        assert!(error.contains("would not belong to the service"), "{error}");
        join_all(&absent(), false).unwrap();
        fs::write(&file, "").unwrap();
        join_all(&absent()[..1], true).unwrap();
        assert_eq!(fs::read_to_string(file).unwrap(), "0");
    }

    #[test]
    fn the_place_of_this_process_asks_for_no_move() {
        let place = ProcessPlace::read(getpid()).unwrap();
        assert!(place.namespaces.is_empty() && place.root.is_none() && place.cgroups.is_empty());
        // Nothing differs, so nothing needs a right.
        place.adopt_rights().unwrap();
    }

    #[test]
    fn a_process_has_the_rights_of_one_user_and_group() {
        let mut place = ProcessPlace::read(getpid()).unwrap();
        (place.status.users, place.status.groups) = ([7; 3], [8; 3]);
        place.check_owner(7, 8).unwrap();
        for (user, group) in [(0, 8), (7, 0)] {
            assert!(place.check_owner(user, group).is_err(), "{user} {group}");
        }
        for index in 0..3 {
            let mut one = [7; 3];
            one[index] = 0;
            (place.status.users, place.status.groups) = (one, [8; 3]);
            assert!(place.check_owner(7, 8).is_err(), "user {index}");
            (place.status.users, place.status.groups) = ([7; 3], one.map(|id| id + 1));
            assert!(place.check_owner(7, 8).is_err(), "group {index}");
        }
    }

    #[test]
    fn each_bit_is_a_capability() {
        let found: Vec<u64> = capabilities(0x8000_0000_0000_0005).map(|one| one.bits()).collect();
        assert_eq!(found, [1, 4, 1 << 63]);
    }
}
