//! The rights of the clients of a control socket. Root and the user of the daemon may do all.
//! Members of the `--control-group` name files and sockets in the allowed folders alone.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use blockio::DiskOptions;
use blockio::disk::{Folder, open_for_other};
use blockio::file::FileTable;
use disks::open::passed_files::open_files_by;
use disks::spec::KeySpec;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::process::geteuid;

use super::descriptors::Descriptor;
use crate::open::disk::PassedFiles;
use crate::options::ServeArgs;
use crate::process::peer::peer_is_in_group;
use crate::socket::permissions::{self, SocketGroups};
use crate::spec::command::Command;
use crate::spec::{
    DeviceSpec, DiskSpec, EndpointSpec, ExportSettings, ExportSpec, FileRecord, UnitPlace, UnitSpec,
};

/// The rights of a client. Each role includes the roles before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// A member of the `--control-read-group` queries.
    Reader,
    /// A member of the `--control-group` changes exports, with its own files.
    Member,
    /// Root, and the user of the daemon.
    Owner,
}

impl Role {
    pub(super) const COUNT: usize = 3;
}

const ONLY_OWNERS: &str = "only root and the user of this daemon";

/// The groups that may use a control socket, and the folders that their members may name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Access {
    /// The groups of members and of readers.
    pub(crate) groups: SocketGroups,
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
        let id = |group: &Option<String>| group.as_deref().map(permissions::group_id).transpose();
        let control = args.control.as_ref().map(std::path::absolute).transpose();
        let control = control.context("cannot determine the folder of the control socket")?;
        let mut socket_folders = folders("--allow-socket-dir", &args.allow_socket_dir)?;
        socket_folders.extend(control.as_deref().and_then(Path::parent).map(Path::to_owned));
        Ok(Self {
            groups: SocketGroups {
                owner: id(&args.control_group).context("cannot use --control-group")?,
                further: id(&args.control_read_group).context("cannot use --control-read-group")?,
            },
            disk_folders: folders("--allow-disk-dir", &args.allow_disk_dir)?,
            socket_folders,
            control,
        })
    }

    /// The role of the client on this connection, if it has one.
    ///
    /// # Errors
    ///
    /// When the kernel does not report its groups.
    pub(super) fn role_of(&self, connection: impl AsFd, user: u32) -> Result<Option<Role>> {
        if is_owner(user, geteuid().as_raw()) {
            return Ok(Some(Role::Owner));
        }
        let SocketGroups { owner, further } = self.groups;
        for (group, role) in [(owner, Role::Member), (further, Role::Reader)] {
            if let Some(group) = group
                && peer_is_in_group(connection.as_fd(), group)
                    .context("cannot read the groups of the client")?
            {
                return Ok(Some(role));
            }
        }
        Ok(None)
    }

    /// Checks that a member may give this command. Takes the files of its disks out of `files`, and
    /// opens the remaining ones in the allowed folders. The specification of each disk gets the
    /// record of its files, so that a later process opens these files alone. `export` are the
    /// settings of the export that gets a unit.
    ///
    /// # Errors
    ///
    /// When it names a socket or a file that members may not name.
    pub(super) fn admit(
        &self,
        command: &mut Command,
        export: &ExportSettings,
        files: &mut Vec<(Descriptor, File)>,
    ) -> Result<PassedFiles> {
        let mut passed = PassedFiles::new();
        match command {
            Command::Add(specs) => {
                for spec in specs {
                    self.admit_export(spec, files, &mut passed)?;
                }
            }
            Command::AddUnit(_, unit) => {
                self.admit_unit(unit, export, files, &mut passed)?;
            }
            _ => {}
        }
        Ok(passed)
    }

    fn admit_export(
        &self,
        spec: &mut ExportSpec,
        files: &mut Vec<(Descriptor, File)>,
        passed: &mut PassedFiles,
    ) -> Result<()> {
        match &spec.endpoint {
            EndpointSpec::Fd(_) => bail!("{ONLY_OWNERS} may name an inherited descriptor"),
            EndpointSpec::Path(path) => self.check_socket(path)?,
        }
        spec.settings.files = None;
        let settings = spec.settings.clone();
        match &mut spec.device {
            DeviceSpec::Blk(disk) => {
                let opened = self.open(disk, &settings, take_at(files, None))?;
                spec.settings.files = Some(records(&opened)?);
                passed.insert(None, Arc::new(FileTable::new(opened, true)));
            }
            DeviceSpec::Scsi(units) => {
                for unit in units {
                    self.admit_unit(unit, &settings, files, passed)?;
                }
            }
        }
        Ok(())
    }

    fn admit_unit(
        &self,
        unit: &mut UnitSpec,
        export: &ExportSettings,
        files: &mut Vec<(Descriptor, File)>,
        passed: &mut PassedFiles,
    ) -> Result<()> {
        if let Some(path) = &unit.settings.reservations {
            let allowed = check_place(path, &self.disk_folders, ("--allow-disk-dir", true));
            allowed.with_context(|| {
                let shown = path.display();
                format!("a member of the --control-group cannot keep reservations in {shown}")
            })?;
        }
        let place = Some(unit.place());
        let (disk, settings) = unit.disk(export);
        let opened = self.open(&disk, &settings, take_at(files, place))?;
        unit.settings.files = Some(records(&opened)?);
        passed.insert(place, Arc::new(FileTable::new(opened, true)));
        Ok(())
    }

    /// Opens the files of a disk, as far as they are not among the ones that the member has passed.
    fn open(
        &self,
        disk: &DiskSpec,
        settings: &ExportSettings,
        passed: Vec<(PathBuf, File)>,
    ) -> Result<Vec<(PathBuf, File)>> {
        check_kinds(disk)?;
        let options = DiskOptions {
            read_only: settings.read_only,
            no_lock: settings.opens_unlocked(),
            ..DiskOptions::default()
        };
        let open = &mut |path: &Path, options: &DiskOptions| {
            let named = options.within.as_ref().map(|folder| folder.join(path));
            let path = named.as_deref().unwrap_or(path);
            match passed.iter().find(|(name, _)| name == path) {
                Some((_, file)) => Ok(file.try_clone()?),
                None => self.open_allowed(path, options),
            }
        };
        open_files_by(disk, &options, open, &|path| self.look_up(path, &passed))
    }

    /// Opens a file that a member has passed, or one in an allowed folder, as a place only. Other
    /// files are not looked up: an error would tell if they exist.
    fn look_up(&self, path: &Path, passed: &[(PathBuf, File)]) -> Result<File> {
        if let Some((_, file)) = passed.iter().find(|(name, _)| name == path) {
            return Ok(file.try_clone()?);
        }
        let look_up = || -> Result<File> {
            let plain = without_parents(path);
            let (folder, rest) = beneath(&plain, &self.disk_folders, "--allow-disk-dir")?;
            Ok(Folder::open(folder)?.find(rest)?)
        };
        look_up().with_context(|| unless_passed(path))
    }

    /// Opens a file in an allowed folder.
    fn open_allowed(&self, path: &Path, options: &DiskOptions) -> Result<File> {
        let open = || -> Result<File> {
            let (folder, rest) = beneath(path, &self.disk_folders, "--allow-disk-dir")?;
            let within = Some(Folder::open(folder)?);
            Ok(open_for_other(rest, &DiskOptions { within, ..options.clone() })?)
        };
        open().with_context(|| unless_passed(path))
    }

    fn check_socket(&self, path: &Path) -> Result<()> {
        let shown = path.display();
        let what = || format!("a member of the --control-group cannot place a socket at {shown}");
        if let Some(control) = &self.control {
            let name = |path: &Path| path.file_name().map(|name| name.as_bytes().to_vec());
            let (own, name) = (name(control).unwrap_or_default(), name(path).unwrap_or_default());
            // The state file and its neighbours begin with the name of the control socket.
            let is_own = is_same_folder(path, control) && name.starts_with(&own);
            ensure!(
                !is_own,
                "{}: names that begin with that of the control socket are kept for the daemon",
                what()
            );
        }
        check_place(path, &self.socket_folders, ("--allow-socket-dir", false)).with_context(what)
    }
}

/// Returns true if both files are in one folder, which may have two paths.
fn is_same_folder(one: &Path, other: &Path) -> bool {
    let [one, other] = [one.parent(), other.parent()];
    let id = |folder: Option<&Path>| {
        folder.and_then(|folder| folder.metadata().ok()).map(|found| (found.dev(), found.ino()))
    };
    one == other || id(one).is_some_and(|one| id(other) == Some(one))
}

/// Returns true for root, and for the user of the daemon.
fn is_owner(peer: u32, own: u32) -> bool {
    peer == 0 || peer == own
}

/// Takes out the files of the disks that a command adds, by the places of these.
pub(super) fn by_place(command: &Command, files: &mut Vec<(Descriptor, File)>) -> PassedFiles {
    let mut places: BTreeSet<Option<UnitPlace>> = match command {
        Command::Add(specs) => specs.iter().flat_map(|spec| spec.device.places()).collect(),
        Command::AddUnit(_, unit) => [Some(unit.place())].into(),
        _ => BTreeSet::new(),
    };
    // The daemon opens all files of the other disks.
    places.retain(|place| files.iter().any(|(name, _)| name.place() == *place));
    let table = |place| (place, Arc::new(FileTable::new(take_at(files, place), false)));
    places.into_iter().map(table).collect()
}

/// Takes out the files of the disk at this place.
fn take_at(files: &mut Vec<(Descriptor, File)>, place: Option<UnitPlace>) -> Vec<(PathBuf, File)> {
    let (of_disk, others) =
        std::mem::take(files).into_iter().partition(|(name, _)| name.place() == place);
    *files = others;
    let of_disk: Vec<(Descriptor, File)> = of_disk;
    of_disk.into_iter().map(|(name, file)| (name.path, file)).collect()
}

/// The records of open files.
fn records(files: &[(PathBuf, File)]) -> Result<Vec<FileRecord>> {
    let record = |(path, file): &(PathBuf, File)| {
        FileRecord::new(path, file).with_context(|| format!("cannot examine {}", path.display()))
    };
    files.iter().map(record).collect()
}

/// Refuses disks that are reached with the rights of the daemon.
fn check_kinds(disk: &DiskSpec) -> Result<()> {
    match disk {
        DiskSpec::Null { .. } | DiskSpec::File(_) => Ok(()),
        DiskSpec::Luks { key: KeySpec::Fd(_), .. } => {
            bail!("{ONLY_OWNERS} may name an inherited descriptor")
        }
        DiskSpec::Raw { over, .. }
        | DiskSpec::Luks { over, .. }
        | DiskSpec::Qcow2 { over, .. }
        | DiskSpec::Image { over, .. } => check_kinds(over),
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

/// The folders of an option, which must exist.
fn folders(option: &str, named: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let folder = |path: &PathBuf| {
        let what = || format!("cannot use {option} {}", path.display());
        Folder::open(path).with_context(what)?;
        std::path::absolute(path).with_context(what)
    };
    named.iter().map(folder).collect()
}

fn unless_passed(path: &Path) -> String {
    let shown = path.display();
    format!("a member of the --control-group cannot name {shown} unless it passes the open file")
}

/// A path in which no part is `..`: each has ended the part before it.
fn without_parents(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        if part == Component::ParentDir {
            plain.pop();
        } else {
            plain.push(part);
        }
    }
    plain
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

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn root_and_the_user_of_the_daemon_are_owners() {
        for (peer, own, expected) in [
            (0, 0, true),
            (0, 1000, true),
            (1000, 1000, true),
            (1000, 0, false),
            (1001, 1000, false),
        ] {
            assert_eq!(is_owner(peer, own), expected, "{peer} of {own}");
        }
    }
    /// A folder that a stranger can replace may lead anywhere at the next start.
    #[test]
    fn new_files_of_members_come_below_folders_of_the_daemon() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for (folder, mode) in [
            ("own", 0o755),
            ("own/open", 0o777),
            ("own/open/sub", 0o755),
            ("own/group", 0o775),
            ("own/all", 0o757),
        ] {
            std::fs::create_dir(at(folder)).unwrap();
            std::fs::set_permissions(at(folder), Permissions::from_mode(mode)).unwrap();
        }
        std::os::unix::fs::symlink(at("own/open"), at("own/link")).unwrap();
        let folders = [root.path().to_owned()];
        for (path, is_private, expected) in [
            ("file", true, Ok(())),
            ("own/file", true, Ok(())),
            ("own/open/socket", false, Ok(())),
            ("own/open/file", true, Err("can replace files in")),
            ("own/open/sub/socket", false, Err("can replace files in")),
            ("own/open/sub/file", true, Err("can replace files in")),
            ("own/group/file", true, Err("can replace files in")),
            ("own/all/file", true, Err("can replace files in")),
            ("own/link/socket", false, Err("cannot examine")),
            ("own/../file", true, Err("without '..'")),
            ("", false, Err("it is a folder")),
        ] {
            let checked = check_place(&at(path), &folders, ("--option", is_private));
            match (checked, expected) {
                (Ok(()), Ok(())) => {}
                (Err(error), Err(words)) if error.to_string().contains(words) => {}
                (checked, _) => panic!("{path}: {checked:?}"),
            }
        }
    }

    /// A later process opens the recorded files alone. No member records files itself.
    #[test]
    fn each_disk_of_a_member_has_a_record_of_its_files() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        for folder in ["own", "private"] {
            std::fs::create_dir(root.join(folder)).unwrap();
            std::fs::write(root.join(folder).join("disk"), [0; 4096]).unwrap();
        }
        let [own, private] = ["own", "private"].map(|folder| root.join(folder));
        let access = Access {
            disk_folders: vec![own.clone()],
            socket_folders: vec![own.clone()],
            ..Access::default()
        };
        let settings = ExportSettings { read_only: true, ..ExportSettings::default() };
        let forged = json!([{ "path": "/", "writable": true, "device": 1, "inode": 1,
            "created-ns": null, "disk-sequence": null }]);
        let unit = |folder: &Path, reservations: &Path| {
            json!({ "lun": 3, "disk": { "file": folder.join("disk") },
                "settings": { "reservations": reservations.join("kept"), "files": forged } })
        };
        let add = |socket: Value, device: Value| {
            let export = json!({ "name": "vm", "endpoint": socket, "device": device,
                "read-only": true, "files": forged });
            Command::Add(vec![serde_json::from_value(export).unwrap()])
        };
        let add_unit =
            |unit: Value| Command::AddUnit("vm".to_owned(), serde_json::from_value(unit).unwrap());
        let at = |folder: &Path| json!({ "path": folder.join("socket") });
        let blk = |folder: &Path| json!({ "blk": { "file": folder.join("disk") } });
        let place = Some(UnitPlace { target: 0, lun: 3 });
        for (mut command, place) in [
            (add(at(&own), blk(&own)), None),
            (add(at(&own), json!({ "scsi": [unit(&own, &own)] })), place),
            (add_unit(unit(&own, &own)), place),
        ] {
            let passed = access.admit(&mut command, &settings, &mut Vec::new()).unwrap();
            assert!(passed.len() == 1 && passed[&place].get(&own.join("disk")).is_some());
            let recorded = match &command {
                Command::Add(specs) => match &specs[0].device {
                    DeviceSpec::Blk(_) => specs[0].settings.files.clone(),
                    DeviceSpec::Scsi(units) => {
                        assert_eq!(specs[0].settings.files, None);
                        units[0].settings.files.clone()
                    }
                },
                Command::AddUnit(_, unit) => unit.settings.files.clone(),
                other => panic!("{other:?}"),
            };
            let recorded = recorded.unwrap();
            let found: Vec<_> = recorded.iter().map(|file| (&file.path, file.writable)).collect();
            assert_eq!(found, [(&own.join("disk"), false)]);
        }
        for (mut command, reason) in [
            (add(at(&own), blk(&private)), "unless it passes the open file"),
            (add(at(&private), blk(&own)), "cannot place a socket"),
            (add(json!({ "fd": 9 }), blk(&own)), "an inherited descriptor"),
            (add(at(&own), json!({ "scsi": [unit(&private, &own)] })), "the open file"),
            (add(at(&own), json!({ "scsi": [unit(&own, &private)] })), "cannot keep reservations"),
            (add_unit(unit(&private, &own)), "unless it passes the open file"),
            (add_unit(unit(&own, &private)), "cannot keep reservations"),
        ] {
            let error = access.admit(&mut command, &settings, &mut Vec::new()).unwrap_err();
            assert!(format!("{error:#}").contains(reason), "{error:#}");
        }
    }

    #[test]
    fn disks_that_need_the_rights_of_the_daemon_are_refused_in_each_layer() {
        for disk in [
            "nbd,socket=/run/server",
            "rbd:pool/image",
            "raw,over=nbd,socket=/run/server",
            "qcow2,over=rbd:pool/image",
            "luks,key-file=/key,over=nbd,socket=/run/server",
            "raw,over=luks,key-fd=9,over=/disk",
            "nbd,host=h,tls=on,tls-certificates=/no/tls",
        ] {
            let spec = DiskSpec::parse(disk).unwrap();
            assert!(check_kinds(&spec).is_err(), "{disk}");
        }
        for disk in ["null:1M", "nbd://host/disk", "qcow2:/disk", "raw,over=nbd://host/disk"] {
            check_kinds(&DiskSpec::parse(disk).unwrap()).unwrap();
        }
    }

    /// The state file and its neighbours stand in the folder of the control socket, however a
    /// member names that folder.
    #[test]
    fn names_of_the_daemon_are_kept_in_its_folder_by_each_path() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        std::fs::create_dir(at("run")).unwrap();
        std::fs::create_dir(at("more")).unwrap();
        std::os::unix::fs::symlink(at("run"), at("alias")).unwrap();
        let access = Access {
            socket_folders: ["run", "alias", "more"].map(at).to_vec(),
            control: Some(at("run/control")),
            ..Access::default()
        };
        for (path, is_allowed) in [
            ("run/control.state", false),
            ("alias/control.state", false),
            ("alias/control", false),
            ("alias/vm.sock", true),
            ("more/control", true),
        ] {
            assert_eq!(access.check_socket(&at(path)).is_ok(), is_allowed, "{path}");
        }
    }

    /// The header of an image chooses the path, and its supplier may be curious.
    #[test]
    #[cfg(feature = "qcow2")]
    fn an_error_tells_nothing_of_files_that_a_member_cannot_name() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let at = |name: &str| root.join(name);
        ["own", "private"].iter().for_each(|folder| std::fs::create_dir(at(folder)).unwrap());
        std::fs::write(at("private/secret"), [0; 4096]).unwrap();
        std::fs::write(at("own/base"), [0; 4096]).unwrap();
        let access = Access { disk_folders: vec![at("own")], ..Access::default() };
        let settings = ExportSettings { no_lock: true, ..ExportSettings::default() };
        let image = at("own/image");
        let open = |backing: &Path, allowed: &str| {
            let mut create = std::process::Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2", "-u", "-F", "raw", "-b"]);
            let made = create.arg(backing).arg(&image).arg("1M").status();
            if made.is_err() {
                return None;
            }
            let disk = format!("qcow2,backing={allowed},path={}", image.display());
            let opened = access.open(&DiskSpec::parse(&disk).unwrap(), &settings, Vec::new());
            Some(opened.map(|files| files.len()).map_err(|error| {
                format!("{error:#}").replace(&backing.display().to_string(), "BACKING")
            }))
        };
        if open(&at("own/base"), "anywhere").is_none() {
            eprintln!("skipped: qemu-img is not installed");
            return;
        }
        assert_eq!(open(&at("own/base"), "anywhere"), Some(Ok(2)));
        assert_eq!(open(&at("own/../own/base"), "base"), Some(Ok(3)));
        for allowed in ["anywhere", "beside", "BACKING"] {
            let open = |name: &str| {
                let path = at(name);
                let allowed = allowed.replace("BACKING", &path.display().to_string());
                open(&path, &allowed).unwrap().unwrap_err()
            };
            let (there, absent) = (open("private/secret"), open("private/absent"));
            assert_eq!(there.replace("secret", "absent"), absent, "{allowed}");
        }
    }
}
