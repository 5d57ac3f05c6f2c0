//! The number that identifies an export as the user of a disk, unique on this machine.
//!
//! The kernel may still read into a guest's memory for a process that was killed. Only the process
//! that serves this guest next has to wait for these reads. So the disk is locked for its export,
//! in a way that no other export notices (`DiskOptions::user`). The next process must compute the
//! same number, and no other export may have it at the time. The place of the export's socket in
//! its file system meets both demands. A path alone leads elsewhere in each container, and a folder
//! that is recreated at each start has another inode each time.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use iomem::fits;

use super::values::hash;
use crate::process::folder_of;
use crate::spec::{DeviceSpec, EndpointSpec, ExportSpec, UnitPlace};

impl ExportSpec {
    /// Returns the user number of each of its disks.
    pub(crate) fn lease_ids(&self) -> Vec<Option<u64>> {
        match &self.device {
            DeviceSpec::Blk(_) => vec![lease_id(&self.endpoint, None)],
            DeviceSpec::Scsi(units) => {
                units.iter().map(|unit| lease_id(&self.endpoint, Some(unit.place()))).collect()
            }
        }
    }
}

/// Computes the user number of the disk at this place of the export with this socket. `None`: an
/// inherited socket has no lasting identity.
pub(crate) fn lease_id(endpoint: &EndpointSpec, place: Option<UnitPlace>) -> Option<u64> {
    let EndpointSpec::Path(path) = endpoint else { return None };
    let socket = resolve(path)?;
    // Included because no read of an earlier boot's kernel is left.
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let unit = place.map(|place| place.to_string()).unwrap_or_default();
    Some(fits(hash(&format!("{} {unit} {socket}", boot.trim())) >> 66, "62 bits"))
}

/// Resolves a path to its file system and the path within it.
fn resolve(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy();
    let folder = folder_of(path).canonicalize().ok()?;
    let device = folder.metadata().ok()?.dev();
    let folder = escaped(&folder.to_string_lossy());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    Some(format!("{device} {}/{name}", path_in_file_system(&mounts, &folder)))
}

/// Escapes a path like a list of mounts does.
fn escaped(path: &str) -> String {
    let escape = |char: char| match char {
        ' ' | '\t' | '\n' | '\\' => format!("\\{:03o}", u32::from(char)),
        other => other.to_string(),
    };
    path.chars().map(escape).collect()
}

/// Translates a folder to its path within the file system, of which a part may be mounted; see
/// proc_pid_mountinfo(5).
fn path_in_file_system(mounts: &str, folder: &str) -> String {
    let below = |line: &str| {
        let mut fields = line.split(' ').skip(3);
        let (root, point) = (fields.next()?.to_owned(), fields.next()?);
        let rest = folder.strip_prefix(point.trim_end_matches('/'))?;
        (rest.is_empty() || rest.starts_with('/')).then_some((point.len(), root, rest))
    };
    // The last mount covers earlier ones at the same point, and `max_by_key` returns the last
    // maximum.
    match mounts.lines().filter_map(below).max_by_key(|(length, ..)| *length) {
        Some((_, root, rest)) => format!("{}{rest}", root.trim_end_matches('/')),
        None => folder.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_id_is_the_same_after_a_restart_and_unique() {
        let scene = tempfile::tempdir().unwrap();
        let folder = scene.path().join("run");
        std::fs::create_dir(&folder).unwrap();
        let of = |path: &str| lease_id(&EndpointSpec::Path(scene.path().join(path)), None);
        let first = of("run/a.sock").unwrap();
        assert!(first < 1 << 62);
        assert_ne!(of("run/b.sock"), Some(first));
        assert_ne!(of("a.sock"), Some(first));
        std::os::unix::fs::symlink(&folder, scene.path().join("link")).unwrap();
        assert_eq!(of("link/a.sock"), Some(first));
        std::fs::remove_dir(&folder).unwrap();
        assert_eq!(of("run/a.sock"), None);
        std::fs::create_dir(&folder).unwrap();
        assert_eq!(of("run/a.sock"), Some(first));
        let place = |lun| Some(UnitPlace { target: 0, lun });
        let endpoint = EndpointSpec::Path(folder.join("a.sock"));
        assert_ne!(lease_id(&endpoint, place(0)), lease_id(&endpoint, place(1)));
        assert_eq!(lease_id(&EndpointSpec::Fd(3), None), None);
    }

    #[test]
    fn a_folder_is_known_by_its_place_in_its_file_system() {
        let mounts = "1 0 0:1 / / rw - ext4 /dev/vda rw\n\
                      2 1 0:2 / /run rw - tmpfs none rw\n\
                      3 2 0:2 /pods/7/s /run/so\\040s rw - tmpfs none rw\n";
        assert_eq!(path_in_file_system(mounts, "/run/vm"), "/vm");
        assert_eq!(path_in_file_system(mounts, "/runner"), "/runner");
        assert_eq!(path_in_file_system(mounts, &escaped("/run/so s/vm")), "/pods/7/s/vm");
        assert_eq!(path_in_file_system("", "/run/vm"), "/run/vm");
    }
}
