//! The identity of a disk: unique to it, and the same each time it is opened.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::sysfs::device_attribute;

/// `FS_IOC_GETFSUUID` of linux/fs.h: `_IOR(0x15, 0, struct fsuuid2)`. Since Linux 6.9.
const FS_IOC_GETFSUUID: libc::c_ulong = 0x8011_1500;

/// `struct fsuuid2` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct FsUuid {
    len: u8,
    uuid: [u8; 16],
}

/// The id of the file system and the inode.
pub(crate) fn file_identity(file: &File) -> String {
    let (device, inode) = file.metadata().map_or((0, 0), |data| (data.dev(), data.ino()));
    let id = rustix::fs::fstatvfs(file).map_or(0, |stat| stat.f_fsid);
    // Most file systems derive their id from their UUID, and some from more, since btrfs has
    // subvolumes. XFS and some more derive it from the number of their device, which depends on the
    // order in which devices were found.
    if id != 0 && id != device {
        return format!("file system {id:x}, inode {inode}");
    }
    match file_system_uuid(file) {
        Some(uuid) => format!("file system {uuid}, inode {inode}"),
        None if id != 0 => format!("file system {id:x}, inode {inode}"),
        None => format!("device {device}, inode {inode}"),
    }
}

fn file_system_uuid(file: &File) -> Option<String> {
    let mut said = FsUuid::default();
    // SAFETY: `said` is the `struct fsuuid2` that the kernel expects and writes before it returns.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_GETFSUUID, &raw mut said) };
    let uuid = said.uuid.get(..usize::from(said.len))?;
    let says_something = result == 0 && uuid.iter().any(|&byte| byte != 0);
    says_something.then(|| uuid.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The id that the device reports, and the number of the partition. Devices that report no id are
/// known by their path.
pub(crate) fn device_identity(file: &File, path: &Path) -> String {
    let names = ["dm/uuid", "wwid", "device/wwid", "device/serial", "serial", "loop/backing_file"];
    let said = names.into_iter().filter_map(|name| device_attribute(file, name));
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let device = said.into_iter().find(|text| !text.is_empty());
    let device = device.unwrap_or_else(|| path.display().to_string());
    let partition = device_attribute(file, "partition").unwrap_or_default();
    format!("device {device}, partition {partition}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{DiskOptions, DiskSource};
    use std::process::Command;

    fn run(program: &str, arguments: &[&str]) -> Option<String> {
        let output = Command::new(program).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// A file system on a loop device.
    struct Mounted {
        device: String,
        folder: tempfile::TempDir,
    }

    impl Mounted {
        fn new(image: &Path) -> Option<Self> {
            let device = run("losetup", &["--find", "--show", image.to_str()?])?;
            let folder = tempfile::tempdir().ok()?;
            let mounted = Self { device, folder };
            run("mount", &[&mounted.device, mounted.folder.path().to_str()?]).map(|_| mounted)
        }

        fn number(&self) -> u64 {
            std::fs::metadata(self.folder.path()).unwrap().dev()
        }
    }

    impl Drop for Mounted {
        fn drop(&mut self) {
            if let Some(path) = self.folder.path().to_str() {
                run("umount", &[path]);
            }
            run("losetup", &["--detach", &self.device]);
        }
    }

    /// A file system is on one loop device and then on another, as after a start at which devices
    /// were found in another order.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_is_the_same_under_another_device_number() {
        for (kind, bytes) in [("ext4", 16 << 20), ("xfs", 400 << 20)] {
            let image = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
            image.as_file().set_len(bytes).unwrap();
            let path = image.path().to_str().unwrap();
            if run(&format!("mkfs.{kind}"), &["-q", path]).is_none() {
                eprintln!("skipped: mkfs.{kind} does not work");
                continue;
            }
            let identity = |mounted: &Mounted, name: &str| {
                let path = mounted.folder.path().join(name);
                let file = File::options().create(true).append(true).open(&path).unwrap();
                file.set_len(1 << 20).unwrap();
                let source = DiskSource::file(&path, &DiskOptions::default()).unwrap();
                source.identity().to_owned()
            };
            let Some(first) = Mounted::new(image.path()) else {
                eprintln!("skipped: {kind} cannot be mounted on a loop device");
                continue;
            };
            let folder = File::open(first.folder.path()).unwrap();
            if kind == "xfs" && file_system_uuid(&folder).is_none() {
                eprintln!("skipped: the kernel does not tell the UUID of a file system");
                continue;
            }
            drop(folder);
            let (number, before) = (first.number(), identity(&first, "disk"));
            assert_ne!(before, identity(&first, "other"), "{kind}: two files are one");
            drop(first);
            // Takes the number that the device had.
            let other = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
            other.as_file().set_len(1 << 20).unwrap();
            let taken = run("losetup", &["--find", "--show", other.path().to_str().unwrap()]);
            let second = Mounted::new(image.path());
            let found = second.as_ref().map(|second| (second.number(), identity(second, "disk")));
            drop(second);
            taken.and_then(|device| run("losetup", &["--detach", &device]));
            let (other_number, after) = found.expect("it was mounted before");
            if other_number == number {
                eprintln!("skipped: another test has taken the number of the device meanwhile");
                continue;
            }
            assert_eq!(before, after, "{kind}");
        }
    }
}
