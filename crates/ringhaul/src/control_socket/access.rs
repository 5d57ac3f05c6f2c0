//! The rights of the clients of a control socket. Root and the user of the daemon may do all.
//! Members of the `--control-group` name files and sockets in the allowed folders alone.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use blockio::disk::Folder;
use disks::spec::{BackingFiles, KeySpec};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::process::geteuid;

use crate::options::ServeArgs;
use crate::socket::permissions;
use crate::spec::{DeviceSpec, DiskSpec, EndpointSpec, ExportSpec, UnitSpec};

const ONLY_OWNERS: &str = "only root and the user of this daemon";

/// The groups that may use a control socket, and the folders that their members may name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Access {
    /// The group of the members.
    pub(crate) group: Option<u32>,
    pub(super) disk_folders: Vec<PathBuf>,
    pub(super) socket_folders: Vec<PathBuf>,
    /// The control socket.
    pub(super) control: Option<PathBuf>,
}

impl Access {
    /// Reads the rights that the options give.
    ///
    /// # Errors
    ///
    /// When a group or a folder does not exist.
    pub(crate) fn new(args: &ServeArgs) -> Result<Self> {
        let group = args.control_group.as_deref();
        let group = group.map(permissions::group_id).transpose();
        let control = args.control.as_ref().map(std::path::absolute).transpose();
        let control = control.context("cannot determine the folder of the control socket")?;
        let mut socket_folders = folders("--allow-socket-dir", &args.allow_socket_dir)?;
        socket_folders.extend(control.as_deref().and_then(Path::parent).map(Path::to_owned));
        Ok(Self {
            group: group.context("cannot use --control-group")?,
            disk_folders: folders("--allow-disk-dir", &args.allow_disk_dir)?,
            socket_folders,
            control,
        })
    }

    /// Checks that a member may add this export.
    ///
    /// # Errors
    ///
    /// When it names a socket or a file that members may not name.
    pub(super) fn check_export(&self, spec: &ExportSpec) -> Result<()> {
        match &spec.endpoint {
            EndpointSpec::Fd(_) => bail!("{ONLY_OWNERS} may name an inherited descriptor"),
            EndpointSpec::Path(path) => self.check_socket(path)?,
        }
        match &spec.device {
            DeviceSpec::Blk(disk) => self.check_disk(disk),
            DeviceSpec::Scsi(units) => units.iter().try_for_each(|unit| self.check_unit(unit)),
        }
    }

    /// Checks that a member may add this unit.
    ///
    /// # Errors
    ///
    /// When it names a file that members may not name.
    pub(super) fn check_unit(&self, unit: &UnitSpec) -> Result<()> {
        self.check_disk(&unit.disk)?;
        let Some(path) = &unit.settings.reservations else { return Ok(()) };
        check_place(path, &self.disk_folders, ("--allow-disk-dir", true)).with_context(|| {
            format!(
                "a member of the --control-group cannot keep reservations in {}",
                path.display()
            )
        })
    }

    fn check_disk(&self, disk: &DiskSpec) -> Result<()> {
        match disk {
            DiskSpec::Null { .. } => Ok(()),
            DiskSpec::File(path) => self.check_file(path),
            DiskSpec::Raw { over, .. } => self.check_disk(over),
            DiskSpec::Qcow2 { backing, over } | DiskSpec::Image { backing, over, .. } => {
                ensure!(*backing == BackingFiles::None, "{ONLY_OWNERS} may allow backing files");
                self.check_disk(over)
            }
            DiskSpec::Luks { key, header, over, .. } => {
                match key {
                    KeySpec::Fd(_) => bail!("{ONLY_OWNERS} may name an inherited descriptor"),
                    KeySpec::File(path) => self.check_file(path)?,
                }
                header.iter().try_for_each(|path| self.check_file(path))?;
                self.check_disk(over)
            }
            DiskSpec::Nbd(nbd) => {
                ensure!(
                    nbd.socket.is_none() && nbd.tls_certificates.is_none(),
                    "{ONLY_OWNERS} may name the socket of an NBD server, or a folder with \
                     certificates; name the server by host and port"
                );
                Ok(())
            }
            DiskSpec::Rbd(_) => bail!("{ONLY_OWNERS} may use its access to a Ceph cluster"),
        }
    }

    /// Checks that a file lies in an allowed folder.
    fn check_file(&self, path: &Path) -> Result<()> {
        let beneath = beneath(path, &self.disk_folders, "--allow-disk-dir");
        let found = beneath.and_then(|(folder, rest)| Ok(Folder::open(folder)?.find(rest)?));
        found.map(drop).with_context(|| {
            format!("a member of the --control-group cannot name {}", path.display())
        })
    }

    fn check_socket(&self, path: &Path) -> Result<()> {
        let shown = path.display();
        let what = || format!("a member of the --control-group cannot place a socket at {shown}");
        if let Some(control) = &self.control {
            let name = |path: &Path| path.file_name().map(|name| name.as_bytes().to_vec());
            let (own, name) = (name(control).unwrap_or_default(), name(path).unwrap_or_default());
            // The state file and its neighbours begin with the name of the control socket.
            let is_own = path.parent() == control.parent() && name.starts_with(&own);
            ensure!(
                !is_own,
                "{}: names that begin with that of the control socket are kept for the daemon",
                what()
            );
        }
        check_place(path, &self.socket_folders, ("--allow-socket-dir", false)).with_context(what)
    }
}

/// The folders of an option, which must exist.
fn folders(option: &str, named: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let folder = |path: &PathBuf| {
        let what = || format!("cannot use {option} {}", path.display());
        Folder::open(path).with_context(what)?;
        std::path::absolute(path).with_context(what)
    };
    named.iter().map(folder).collect()
}

/// The allowed folder that has this path, and the rest of the path.
fn beneath<'a>(
    path: &'a Path,
    folders: &'a [PathBuf],
    option: &str,
) -> Result<(&'a Path, &'a Path)> {
    let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    ensure!(
        path.is_absolute() && path.components().all(is_plain),
        "its path must be absolute, without '..'"
    );
    let found =
        folders.iter().find_map(|folder| Some((&**folder, path.strip_prefix(folder).ok()?)));
    let allowed = || match folders {
        [] => format!("no folder is allowed; {option} allows one"),
        _ => {
            let folders: Vec<String> =
                folders.iter().map(|folder| folder.display().to_string()).collect();
            format!("it is outside {}; {option} allows another folder", folders.join(", "))
        }
    };
    found.with_context(allowed)
}

/// Checks that a new file at this path comes into an allowed folder, now and later: only root and
/// the user of the daemon can replace the folders on the way to it. With `is_private` they alone
/// write to its own folder too.
fn check_place(path: &Path, folders: &[PathBuf], (option, is_private): (&str, bool)) -> Result<()> {
    let (folder, rest) = beneath(path, folders, option)?;
    ensure!(rest.file_name().is_some(), "it is a folder");
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut shown = folder.to_owned();
    let mut place: File = openat(CWD, folder, flags - OFlags::NOFOLLOW, Mode::empty())
        .with_context(|| format!("cannot examine {}", shown.display()))?
        .into();
    for name in rest.parent().into_iter().flat_map(Path::components) {
        check_is_ours(&place, &shown)?;
        shown.push(name);
        let next = openat(&place, Path::new(&name), flags, Mode::empty());
        place = next.with_context(|| format!("cannot examine {}", shown.display()))?.into();
    }
    if is_private { check_is_ours(&place, &shown) } else { Ok(()) }
}

/// Checks that only root and this user write to a folder.
fn check_is_ours(folder: &File, path: &Path) -> Result<()> {
    let found = folder.metadata().with_context(|| format!("cannot examine {}", path.display()))?;
    let is_ours = [0, geteuid().as_raw()].contains(&found.uid()) && found.mode() & 0o022 == 0;
    ensure!(
        is_ours,
        "another user than root and that of this daemon can replace files in {0}; change its owner \
         or its mode (chmod go-w {0})",
        path.display()
    );
    Ok(())
}
