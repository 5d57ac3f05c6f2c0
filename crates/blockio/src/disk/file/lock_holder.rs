//! Finds the programs that use a file. The kernel does not report the owner of a lock of an open
//! file description, but each process shows its descriptors.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// The programs that use a file.
pub(crate) enum LockHolders {
    ThisProcess,
    /// Programs with their process ids, or the use of a device by the kernel, as text.
    Programs(String),
    Unknown,
}

/// The most programs that are named.
const NAMED_MAX: usize = 3;

/// Returns true if this process has `path` open, and locked if `is_locked`.
pub(crate) fn is_this_process(path: &Path, is_locked: bool) -> bool {
    fs::canonicalize(path).is_ok_and(|path| has_open("self", &path, is_locked))
}

/// Finds the programs that have `path` open, and locked if `is_locked`, as far as this process may
/// see them.
pub(crate) fn holders(path: &Path, is_locked: bool) -> LockHolders {
    let Ok(path) = fs::canonicalize(path) else { return LockHolders::Unknown };
    if has_open("self", &path, is_locked) {
        return LockHolders::ThisProcess;
    }
    let mut names: Vec<String> = use_by_kernel(&path).into_iter().collect();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(process) = name.to_str().filter(|name| name.parse::<u32>().is_ok()) else {
            continue;
        };
        if has_open(process, &path, is_locked) {
            let program = fs::read_link(format!("/proc/{process}/exe")).unwrap_or_default();
            let program = program.file_name().unwrap_or_default().to_string_lossy();
            names.push(format!("{program} (process {process})"));
        }
    }
    names.truncate(NAMED_MAX);
    if names.is_empty() { LockHolders::Unknown } else { LockHolders::Programs(names.join(", ")) }
}

/// The kernel's use of a block device: a mount visible here, or a device that it is a part of.
fn use_by_kernel(path: &Path) -> Option<String> {
    let data = fs::metadata(path).ok().filter(|data| data.file_type().is_block_device())?;
    let (major, minor) = (libc::major(data.rdev()), libc::minor(data.rdev()));
    let number = format!("{major}:{minor}");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    if let Some(place) = mounted_on(&mounts, &number) {
        return Some(format!("mounted on {place}"));
    }
    let holders = fs::read_dir(format!("/sys/dev/block/{number}/holders"));
    let holder = holders.ok()?.flatten().next()?;
    Some(format!("a part of {}", holder.file_name().to_string_lossy()))
}

/// The mount point of the device with this number; see proc_pid_mountinfo(5).
fn mounted_on<'a>(mounts: &'a str, number: &str) -> Option<&'a str> {
    let mut mounts = mounts.lines().map(|line| line.split(' '));
    mounts.find_map(|mut fields| (fields.nth(2)? == number).then(|| fields.nth(1))?)
}

/// Returns true if a process has `path` open, and locked if `is_locked`. The links are read, not
/// followed: a file system that hangs cannot hold this up.
fn has_open(process: &str, path: &Path, is_locked: bool) -> bool {
    let folder = fs::read_dir(format!("/proc/{process}/fd"));
    folder.into_iter().flatten().flatten().any(|entry| {
        let is_path = fs::read_link(entry.path()).is_ok_and(|target| target == path);
        is_path && (!is_locked || has_lock(process, &entry.file_name().to_string_lossy()))
    })
}

/// Returns true if `/proc` shows a lock of this descriptor. Some programs only read a file that
/// another has locked.
fn has_lock(process: &str, descriptor: &str) -> bool {
    let info = fs::read_to_string(format!("/proc/{process}/fdinfo/{descriptor}"));
    info.is_ok_and(|info| info.lines().any(|line| line.starts_with("lock:")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_the_number_of_their_device() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
                      30 22 7:12 /sub /mnt rw,relatime shared:1 - xfs /dev/loop12 rw\n";
        assert_eq!(mounted_on(mounts, "7:12"), Some("/mnt"));
        assert_eq!(mounted_on(mounts, "7:1"), None);
    }
}
