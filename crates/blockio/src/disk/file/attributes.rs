//! Facts that the kernel reports about a file: attributes of block devices in sysfs, and an
//! identity that is unique, and the same each time the file is opened.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

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
    let mut answer = FsUuid::default();
    // SAFETY: `answer` is the `struct fsuuid2` that the kernel expects, and writes before it
    // returns.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_GETFSUUID, &raw mut answer) };
    let uuid = answer.uuid.get(..usize::from(answer.len))?;
    let is_known = result == 0 && uuid.iter().any(|&byte| byte != 0);
    is_known.then(|| uuid.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The id that the device reports, and the number of the partition. Devices that report no id are
/// known by their path.
pub(crate) fn device_identity(file: &File, path: &Path) -> String {
    let names = ["dm/uuid", "wwid", "device/wwid", "device/serial", "serial", "loop/backing_file"];
    let reported = names.into_iter().filter_map(|name| device_attribute(file, name));
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let device = reported.into_iter().find(|text| !text.is_empty());
    let device = device.unwrap_or_else(|| path.display().to_string());
    let partition = device_attribute(file, "partition").unwrap_or_default();
    format!("device {device}, partition {partition}")
}

/// Reads an attribute of the block device `file`. For a partition, a missing attribute is read from
/// its disk, one folder up.
pub(crate) fn device_attribute(file: &File, name: &str) -> Option<String> {
    attribute(file.metadata().ok()?.rdev(), name)
}

/// Reads an attribute of the device with this number.
fn attribute(device: u64, name: &str) -> Option<String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let folder = format!("/sys/dev/block/{major}:{minor}");
    let read = |path: String| std::fs::read_to_string(path).ok();
    let text = read(format!("{folder}/{name}")).or_else(|| read(format!("{folder}/../{name}")))?;
    Some(text.trim().to_owned())
}

/// The size in bytes of the block device with this number. The kernel counts in units of 512 bytes,
/// regardless of the logical block.
pub(crate) fn size_bytes(device: u64) -> Option<u64> {
    attribute(device, "size")?.parse::<u64>().ok()?.checked_mul(512)
}

/// The unit in which the block device `file` takes discards, in bytes; 0 if unknown, `None` if it
/// takes none.
pub(crate) fn discard_bytes(file: &File) -> Option<u32> {
    unit_of_discards(|name| device_attribute(file, name))
}

/// Like [`discard_bytes`], with the attributes that `attribute` reads.
fn unit_of_discards(attribute: impl Fn(&str) -> Option<String>) -> Option<u32> {
    let takes_any = attribute("queue/discard_max_bytes")? != "0";
    let granularity = attribute("queue/discard_granularity").and_then(|text| text.parse().ok());
    takes_any.then(|| granularity.unwrap_or(0))
}

/// Returns true if the kernel reports a rotating medium for `file`, or for the file system that it
/// is on. False without a block device, as with tmpfs or NFS.
pub(crate) fn is_rotational(file: &File) -> bool {
    let Ok(metadata) = file.metadata() else { return false };
    let device = if metadata.rdev() != 0 { metadata.rdev() } else { metadata.dev() };
    attribute(device, "queue/rotational").is_some_and(|text| text == "1")
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
            let image = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
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
            let other = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
            other.as_file().set_len(1 << 20).unwrap();
            let taken = run("losetup", &["--find", "--show", other.path().to_str().unwrap()]);
            let second = Mounted::new(image.path());
            let found = second.as_ref().map(|second| (second.number(), identity(second, "disk")));
            drop(second);
            taken.and_then(|device| run("losetup", &["--detach", &device]));
            let (other_number, after) = found.expect("it was mounted before");
            if other_number == number {
                eprintln!("skipped: another test has taken the number of the device");
                continue;
            }
            assert_eq!(before, after, "{kind}");
        }
    }
}

#[cfg(test)]
mod sysfs_tests {
    use super::*;

    #[test]
    fn a_device_takes_discards_if_the_kernel_has_a_maximum_for_them() {
        let unit = |maximum: Option<&str>, granularity: Option<&str>| {
            unit_of_discards(|name| {
                let text = if name == "queue/discard_max_bytes" { maximum } else { granularity };
                text.map(str::to_owned)
            })
        };
        assert_eq!(unit(Some("2147450880"), Some("4096")), Some(4096));
        // More than 32 bits can hold.
        assert_eq!(unit(Some("4398046511104"), Some("512")), Some(512));
        assert_eq!(unit(Some("4096"), None), Some(0));
        assert_eq!(unit(Some("0"), Some("4096")), None);
        assert_eq!(unit(None, None), None);
    }
}
