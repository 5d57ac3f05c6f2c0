//! The files of a disk that is to be added, opened with the rights of this user and passed to the
//! daemon.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;

use anyhow::{Result, anyhow};
use ringhaul::control_socket::descriptors::OpenedFiles;
use ringhaul::spec::{ExportSettings, ExportSpec, UnitSpec};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::process::geteuid;
use serde_json::{Value, json};

use super::connection::{Connection, Refusal};

/// Calls a method that adds disks, with the files of these. A daemon that may open the rest does so
/// by itself; otherwise its refusal says why this program could not.
pub(super) fn add(
    daemon: &mut Connection,
    method: &str,
    params: &Value,
) -> Result<Result<Value, Refusal>> {
    let OpenedFiles { files, left_out } = open(daemon, method, params);
    let (names, files): (Vec<_>, Vec<File>) = files.into_iter().unzip();
    let mut with_names = params.clone();
    if let Some(params) = with_names.as_object_mut().filter(|_| !names.is_empty()) {
        params.insert("descriptors".to_owned(), json!(names));
    }
    let mut answer = daemon.call_with(method, &with_names, &files)?;
    // The locks of the daemon end with the last descriptor.
    drop(files);
    if let Err(refusal) = &answer
        && refusal.message.starts_with("unknown field `descriptors`")
    {
        // An earlier version opens all files by itself.
        answer = daemon.call(method, params)?;
    }
    Ok(answer.map_err(|refusal| match left_out {
        Some(error) => {
            let user = geteuid().as_raw();
            let Refusal { code, message } = refusal;
            let message = format!("{message}; ctl, as user {user}, passed no open file: {error:#}");
            Refusal { code, message }
        }
        None => refusal,
    }))
}

/// Opens the files of the disks in a call.
fn open(daemon: &mut Connection, method: &str, params: &Value) -> OpenedFiles {
    let is_foreign = daemon.user() != Some(geteuid().as_raw());
    // The daemon explains parameters that are wrong.
    if method == "export.add" {
        let spec = serde_json::from_value::<ExportSpec>(params.clone());
        return spec.map(|spec| OpenedFiles::for_export(&spec, is_foreign)).unwrap_or_default();
    }
    let Ok(unit) = serde_json::from_value::<UnitSpec>(params["unit"].clone()) else {
        return OpenedFiles::default();
    };
    let shown = daemon.call("export.show", &json!({ "export": params["export"] }));
    let Ok(Ok(shown)) = shown else { return OpenedFiles::default() };
    let is_stated = unit.settings.read_only.is_some();
    let opened = OpenedFiles::for_unit(&unit, &settings_of(&shown), is_foreign);
    match daemon.owner() {
        Some(owner) if is_foreign && geteuid().is_root() && !is_stated => {
            withhold_unwritable(opened, owner)
        }
        _ => opened,
    }
}

/// The settings of a shown export that apply to files of its units.
fn settings_of(shown: &Value) -> ExportSettings {
    let is_on = |key: &str| shown[key].as_bool().unwrap_or(false);
    ExportSettings {
        read_only: is_on("read-only"),
        no_lock: is_on("no-lock"),
        ..ExportSettings::default()
    }
}

/// Leaves files to the daemon that root has opened for writing and to which its user may not write.
/// The daemon alone has stated that the export is writable, and a program in its place could lie.
fn withhold_unwritable(opened: OpenedFiles, (user, group): (u32, u32)) -> OpenedFiles {
    let is_more = |file: &File| {
        let is_written =
            fcntl_getfl(file).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDWR);
        let found = file.metadata();
        is_written && !found.is_ok_and(|found| may_write(&found, user, group))
    };
    let Some((of, _)) = opened.files.iter().find(|(_, file)| is_more(file)) else { return opened };
    let left_out = anyhow!(
        "user {user} may not write to {}, and only the daemon of that user states that the export \
         is writable; add read-only=off to the unit if its guest may write there, or else \
         read-only=on",
        of.path.display()
    );
    OpenedFiles { files: Vec::new(), left_out: Some(left_out) }
}

/// Returns true if the mode of a file lets this user write to it.
fn may_write(found: &Metadata, user: u32, group: u32) -> bool {
    let bit = match (found.uid() == user, found.gid() == group) {
        (true, _) => 0o200,
        (false, true) => 0o020,
        (false, false) => 0o002,
    };
    user == 0 || found.mode() & bit != 0
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, fchown};

    use ringhaul::spec::{DeviceSpec, EndpointSpec};

    use super::*;

    /// The first class of users counts that the daemon belongs to, also if it may do less.
    #[test]
    fn the_mode_of_a_file_says_whether_the_daemon_may_write() {
        let file = tempfile::NamedTempFile::new().unwrap();
        if geteuid().is_root() {
            // Modes do not restrict root.
            fchown(file.as_file(), Some(12_345), Some(12_345)).unwrap();
        }
        let own = file.as_file().metadata().unwrap();
        // Of the owner, of the group, of other users, and root.
        let users = [
            (own.uid(), own.gid()),
            (own.uid(), own.gid() + 1),
            (own.uid() + 1, own.gid()),
            (own.uid() + 1, own.gid() + 1),
        ];
        for (mode, expected) in [
            (0o200, [true, true, false, false]),
            (0o020, [false, false, true, false]),
            (0o002, [false, false, false, true]),
            (0o555, [false; 4]),
        ] {
            file.as_file().set_permissions(Permissions::from_mode(mode)).unwrap();
            let found = file.as_file().metadata().unwrap();
            for ((user, group), expected) in users.into_iter().zip(expected) {
                let may = may_write(&found, user, group);
                assert_eq!(may, expected, "{mode:o} for {user}:{group}");
            }
            assert!(may_write(&found, 0, own.gid()), "root may write to each file");
        }
    }

    /// The file of a new unit is opened as the daemon would open it.
    #[test]
    fn a_shown_export_has_the_settings_of_files() {
        for (read_only, no_lock) in [(false, false), (true, false), (false, true)] {
            let settings = ExportSettings { read_only, no_lock, ..ExportSettings::default() };
            let endpoint = EndpointSpec::Path("/vm.sock".into());
            let device = DeviceSpec::Scsi(Vec::new());
            let spec = ExportSpec { name: None, endpoint, device, settings };
            let found = settings_of(&serde_json::to_value(spec).unwrap());
            assert_eq!((found.read_only, found.no_lock), (read_only, no_lock));
        }
    }
}
