//! What the kernel says of a block device in its file system of attributes.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

/// What the kernel says of the block device that `file` is. A partition has what it lacks from its
/// disk, in whose folder its own lies.
pub(super) fn device_attribute(file: &File, name: &str) -> Option<String> {
    let device = file.metadata().ok()?.rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let folder = format!("/sys/dev/block/{major}:{minor}");
    let read = |path: String| std::fs::read_to_string(path).ok();
    let text = read(format!("{folder}/{name}")).or_else(|| read(format!("{folder}/../{name}")))?;
    Some(text.trim().to_owned())
}
