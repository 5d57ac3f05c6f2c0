//! A private libvirt: its daemon, and the guests that it runs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use ringhaul_tools::process::output;
use ringhaul_tools::workspace;
use tempfile::TempDir;

/// The first version whose messages the guide has: (major, minor).
const MINIMUM: (u32, u32) = (11, 3);

/// Starts the daemon in the background, and ends when it ends. With a file, a domain is defined and
/// started. The shell is the first process of its namespace: it waits for orphans, and every
/// process of libvirt ends with it.
const START: &str = r#"
libvirtd &
daemon=$!
until virsh -q -c qemu:///session uri >/dev/null 2>&1; do
    kill -0 $daemon || exit 1
    sleep 0.05
done
[ $# = 0 ] || virsh -q -c qemu:///session define "$1" || exit 1
[ $# = 0 ] || virsh -q -c qemu:///session start vm1 || exit 1
echo ready
wait $daemon
"#;

/// Variables with the folders of a user, and their places.
const FOLDERS: [(&str, &str); 4] = [
    ("HOME", "home"),
    ("XDG_RUNTIME_DIR", "run"),
    ("XDG_CONFIG_HOME", "config"),
    ("XDG_CACHE_HOME", "cache"),
];

/// The folder of a libvirt daemon. It runs in session mode, which needs no part of the system, as
/// an ordinary user of a user namespace.
pub struct Libvirt {
    folder: TempDir,
}

impl Libvirt {
    /// The reason why the guide's examples cannot be compared with the libvirt of this machine, if
    /// there is one: an older version has other messages.
    ///
    /// # Errors
    /// If libvirt is not installed.
    pub fn is_too_old() -> Result<Option<String>> {
        let version = output(Command::new("virsh").arg("--version"))
            .context("asking for the version of libvirt; `make setup` installs it")?;
        let mut parts = version.trim().split('.').map(str::parse::<u32>);
        let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) else {
            bail!("virsh has the version {version}");
        };
        let is_too_old = (major, minor) < MINIMUM;
        Ok(is_too_old
            .then(|| format!("libvirt {}: {MINIMUM:?} has other messages", version.trim())))
    }

    /// Makes the folder.
    ///
    /// # Errors
    /// If libvirt is not installed, or the folder cannot be made.
    pub fn new() -> Result<Self> {
        for (program, package) in [
            ("libvirtd", "libvirt-daemon"),
            ("virsh", "libvirt-clients"),
            ("xmllint", "libxml2-utils"),
        ] {
            workspace::find_program(program).with_context(|| {
                format!("{program} is not installed; apt-get install {package}")
            })?;
        }
        let folder = tempfile::Builder::new().prefix("libvirt-").tempdir();
        let folder = folder.context("making a folder for libvirt")?;
        for (_, name) in FOLDERS {
            std::fs::create_dir(folder.path().join(name))
                .with_context(|| format!("making {name}"))?;
        }
        let libvirt = Self { folder };
        std::fs::create_dir(libvirt.folder.path().join("config/libvirt")).context("a folder")?;
        let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid").context("a UUID")?;
        // Guests do not move between daemons with the UUID of the machine.
        libvirt
            .write("config/libvirt/libvirtd.conf", &format!("host_uuid = \"{}\"\n", uuid.trim()))?;
        Ok(libvirt)
    }

    /// The command that runs the daemon, and then the domain `vm1` of the file. It writes `ready`
    /// to its standard output when virsh can connect and the domain runs.
    #[must_use]
    pub fn command(&self, domain: Option<&Path>) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "unshare", "--user", "--map-user=1000"])
            .args(["--map-group=1000", "--pid", "--fork", "--kill-child", "--mount-proc"])
            .args(["sh", "-uc", START, "libvirt"])
            .args(domain);
        // Without this, virsh starts a second daemon while the first one begins to listen.
        command.env("LIBVIRT_AUTOSTART", "0");
        for (variable, folder) in FOLDERS {
            command.env(variable, self.folder.path().join(folder));
        }
        command
    }

    /// The address of the daemon, for `virsh -c` and `LIBVIRT_DEFAULT_URI`.
    #[must_use]
    pub fn uri(&self) -> OsString {
        let mut uri = OsString::from("qemu+unix:///session?socket=");
        uri.push(self.folder.path().join("run/libvirt/libvirt-sock"));
        uri
    }

    /// Checks a file against libvirt's schema.
    ///
    /// # Errors
    /// If it does not match.
    pub fn validate(file: &Path) -> Result<()> {
        output(Command::new("virt-xml-validate").arg(file)).map(drop)
    }

    /// Writes a file into the folder.
    ///
    /// # Errors
    /// If that fails.
    pub fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }
}
