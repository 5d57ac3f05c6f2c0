//! The files, sockets and servers that a daemon needs, as data.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::thread::CapabilitySet;

use crate::process::folder_of;

/// The use of a file or a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// A file or device is read.
    Read,
    /// A file or device is read and written.
    Write,
    /// Files in a folder are read.
    ReadFolder,
    /// Files and devices in a folder are read and written.
    WriteFolder,
    /// Sockets are made and removed in a folder.
    Sockets,
    /// Files are made, replaced, read and removed in a folder.
    Replace,
}

/// The files, sockets and servers that a daemon needs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rules {
    pub(super) places: Vec<(PathBuf, Use)>,
    /// Device and inode of the files among the places: the kernel permits no other file that takes
    /// the path of one.
    identities: BTreeMap<PathBuf, (u64, u64)>,
    /// TCP ports of servers.
    pub(super) ports: Vec<u16>,
    pub(super) has_any_server: bool,
    has_local_server: bool,
    /// The TCP port of the metrics server.
    pub(super) listen_port: Option<u16>,
    pub(super) has_libraries: bool,
    /// Capabilities that the daemon keeps although the sandbox needs none of them.
    pub(super) capabilities: Vec<CapabilitySet>,
}

/// Files of the system that network disks need: the names of machines, certificates, libraries of
/// name services.
const NETWORK_FILES: [&str; 16] = [
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ld.so.cache",
    "/etc/ssl",
    "/etc/pki",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    "/usr/lib",
    "/usr/lib64",
    "/run/NetworkManager",
    "/run/resolvconf",
    "/run/systemd/resolve",
];

/// Files of the libraries of Ceph, beyond the files of network disks.
const CEPH_FILES: [&str; 5] = ["/etc/ceph", "/usr/share/ceph", "/etc/passwd", "/etc/group", "/tmp"];
/// Folders in which the libraries of Ceph make sockets and logs.
const CEPH_FOLDERS: [&str; 2] = ["/run/ceph", "/var/log/ceph"];

impl Rules {
    /// The daemon keeps this capability.
    pub(crate) fn keep(&mut self, capability: CapabilitySet) {
        self.capabilities.push(capability);
    }

    /// The disk at `path` is read, and written if `is_written`.
    pub(crate) fn disk(&mut self, path: &Path, is_written: bool) {
        self.add(path, if is_written { Use::Write } else { Use::Read });
    }

    /// Disks and their files in this folder are read and written.
    pub(crate) fn disk_folder(&mut self, path: &Path) {
        self.add(path, Use::WriteFolder);
    }

    /// The file at `path` is read.
    pub(crate) fn read(&mut self, path: &Path) {
        self.add(path, Use::Read);
    }

    /// Files in this folder are read.
    pub(crate) fn read_folder(&mut self, path: &Path) {
        self.add(path, Use::ReadFolder);
    }

    /// The file at `path` is made, read, replaced and removed. So is, in the worst case, any other
    /// file in its folder.
    pub(crate) fn replaced(&mut self, path: &Path) {
        self.add(folder_of(path), Use::Replace);
    }

    /// A socket at `path` is made and removed.
    pub(crate) fn socket(&mut self, path: &Path) {
        self.socket_folder(folder_of(path));
    }

    /// Sockets in this folder are made and removed.
    pub(crate) fn socket_folder(&mut self, path: &Path) {
        self.add(path, Use::Sockets);
    }

    /// The daemon listens on this TCP port.
    pub(crate) fn listen(&mut self, port: u16) {
        self.listen_port = Some(port);
    }

    /// The daemon connects to a socket on this machine.
    pub(crate) fn local_server(&mut self) {
        self.has_local_server = true;
    }

    /// The daemon connects to servers at this TCP port.
    pub(crate) fn server(&mut self, port: u16) {
        self.network_files();
        // Long answers about names come over TCP.
        self.ports.extend([port, 53]);
    }

    /// The daemon connects to any server.
    pub(crate) fn any_server(&mut self) {
        self.network_files();
        (self.has_any_server, self.has_local_server) = (true, true);
    }

    /// The libraries of Ceph run in the process. They read the files beside these, too.
    pub(crate) fn ceph(&mut self, files: &[PathBuf]) {
        self.any_server();
        self.has_libraries = true;
        CEPH_FILES.iter().for_each(|path| self.read_folder(Path::new(path)));
        CEPH_FOLDERS.iter().for_each(|path| self.add(Path::new(path), Use::Replace));
        CEPH_FOLDERS.iter().for_each(|path| self.socket_folder(Path::new(path)));
        files.iter().for_each(|path| self.read_folder(folder_of(path)));
    }

    /// Returns true if the daemon connects to servers.
    pub(super) fn may_connect(&self) -> bool {
        self.connects_to_network() || self.has_local_server
    }

    /// Returns true if the daemon uses the network.
    pub(super) fn has_network(&self) -> bool {
        self.connects_to_network() || self.listen_port.is_some()
    }

    /// Returns true if the daemon connects to servers of the network.
    pub(super) fn connects_to_network(&self) -> bool {
        self.has_any_server || !self.ports.is_empty()
    }

    fn network_files(&mut self) {
        if self.ports.is_empty() && !self.has_any_server {
            NETWORK_FILES.iter().for_each(|path| self.read_folder(Path::new(path)));
        }
    }

    fn add(&mut self, path: &Path, used: Use) {
        // A path may be relative to the folder in which the daemon works at present.
        let place = (std::path::absolute(path).unwrap_or(path.to_owned()), used);
        if !self.places.contains(&place) {
            if let Ok(found) = std::fs::metadata(&place.0) {
                self.identities.insert(place.0.clone(), (found.dev(), found.ino()));
            }
            self.places.push(place);
        }
    }

    /// Returns true if the daemon makes sockets in the folder of this path.
    pub(super) fn permits_socket(&self, path: &Path) -> bool {
        let path = std::path::absolute(path).unwrap_or(path.to_owned());
        let folder = folder_of(&path);
        // `..` leads out of a folder.
        let is_below = !path.components().any(|part| part == Component::ParentDir);
        self.places.iter().any(|(place, used)| {
            *used == Use::Sockets && (folder == place || is_below && folder.starts_with(place))
        })
    }

    /// Returns true if a disk or a socket at this path may be used.
    pub(super) fn permits(&self, path: &Path) -> bool {
        let path = std::path::absolute(path).unwrap_or(path.to_owned());
        let is_same = |place| {
            let now = std::fs::metadata(&path).ok().map(|found| (found.dev(), found.ino()));
            now.as_ref() == self.identities.get(place)
        };
        self.places.iter().any(|(place, used)| match used {
            Use::Read | Use::Write => *place == path && is_same(place),
            Use::Sockets | Use::ReadFolder | Use::WriteFolder | Use::Replace => {
                path.starts_with(place)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_permitted_by_name_and_identity_and_folders_with_their_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("disks")).unwrap();
        for file in ["mine", "other", "disks/any"] {
            std::fs::write(path(file), "").unwrap();
        }
        let mut rules = Rules::default();
        rules.disk(&path("mine"), true);
        rules.disk_folder(&path("disks"));
        for (name, is_permitted) in
            [("mine", true), ("other", false), ("disks/any", true), ("disks/later", true)]
        {
            assert_eq!(rules.permits(&path(name)), is_permitted, "{name}");
        }
        std::fs::rename(path("other"), path("mine")).unwrap();
        assert!(!rules.permits(&path("mine")), "another file has its name");
    }

    #[test]
    fn servers_are_permitted_by_their_ports() {
        let mut rules = Rules::default();
        assert!(!rules.may_connect() && !rules.has_network());
        rules.local_server();
        assert!(rules.may_connect() && !rules.has_network());
        rules.server(10809);
        assert!(rules.has_network() && !rules.has_any_server);
        assert_eq!(rules.ports, [10809, 53], "long answers about names come over TCP");
        let mut rules = Rules::default();
        rules.listen(9750);
        assert!(!rules.may_connect() && rules.has_network());
        rules.any_server();
        assert!(rules.may_connect());
    }

    #[test]
    fn listeners_are_looked_for_where_the_daemon_makes_sockets() {
        let mut rules = Rules::default();
        rules.socket(Path::new("/run/a/disk.sock"));
        rules.disk_folder(Path::new("/run/disks"));
        for (path, is_permitted) in [
            ("/run/a/later.sock", true),
            ("/run/a/below/later.sock", true),
            ("/run/a/../b/control", false),
            ("/run/b/control", false),
            ("/run/disks/socket", false),
        ] {
            assert_eq!(rules.permits_socket(Path::new(path)), is_permitted, "{path}");
        }
    }

    #[test]
    fn a_file_lies_in_a_folder() {
        for (file, folder) in [("/a/b", "/a"), ("/a", "/"), ("a", "."), ("a/b", "a"), ("/", "/")] {
            assert_eq!(folder_of(Path::new(file)), Path::new(folder), "{file}");
        }
    }
}
