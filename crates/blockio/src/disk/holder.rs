//! Which programs have a file in use. The kernel does not tell whose a lock of an open file
//! description is, but each process shows what its descriptors are.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Which programs are in the way.
pub(super) enum Holders {
    ThisProcess,
    /// Programs and their processes, or what the kernel does with a device, in words.
    Others(String),
    Unknown,
}

/// The most that are named.
const NAMED_MAX: usize = 3;

/// Whether this process has `path` open, and locked if that is wanted.
pub(super) fn is_this_process(path: &Path, is_locked: bool) -> bool {
    fs::canonicalize(path).is_ok_and(|path| has_open("self", &path, is_locked))
}

/// Which programs have `path` open, and locked if that is wanted, as far as this process may see
/// it.
pub(super) fn holders(path: &Path, is_locked: bool) -> Holders {
    let Ok(path) = fs::canonicalize(path) else { return Holders::Unknown };
    if has_open("self", &path, is_locked) {
        return Holders::ThisProcess;
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
    if names.is_empty() { Holders::Unknown } else { Holders::Others(names.join(", ")) }
}

/// What the kernel uses a block device for, if it is mounted here or a part of other devices.
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

/// Where the device of this number is mounted; see proc_pid_mountinfo(5).
fn mounted_on<'a>(mounts: &'a str, number: &str) -> Option<&'a str> {
    let mut mounts = mounts.lines().map(|line| line.split(' '));
    mounts.find_map(|mut fields| (fields.nth(2)? == number).then(|| fields.nth(1))?)
}

/// The links are read, not followed: a file system that hangs cannot hold this up.
fn has_open(process: &str, path: &Path, is_locked: bool) -> bool {
    let folder = fs::read_dir(format!("/proc/{process}/fd"));
    folder.into_iter().flatten().flatten().any(|entry| {
        let is_path = fs::read_link(entry.path()).is_ok_and(|target| target == path);
        is_path && (!is_locked || has_lock(process, &entry.file_name().to_string_lossy()))
    })
}

/// Whether a descriptor has a lock, as its program shows: some only read what others have locked.
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
