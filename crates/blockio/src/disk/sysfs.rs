//! What the kernel says of a block device in its file system of attributes.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

/// What the kernel says of the block device that `file` is. A partition has what it lacks from its
/// disk, in whose folder its own lies.
pub(super) fn device_attribute(file: &File, name: &str) -> Option<String> {
    attribute(file.metadata().ok()?.rdev(), name)
}

/// The same of the device with this number.
fn attribute(device: u64, name: &str) -> Option<String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let folder = format!("/sys/dev/block/{major}:{minor}");
    let read = |path: String| std::fs::read_to_string(path).ok();
    let text = read(format!("{folder}/{name}")).or_else(|| read(format!("{folder}/../{name}")))?;
    Some(text.trim().to_owned())
}

/// The unit in which the block device that `file` is takes discards, in bytes; `None` if it takes
/// none.
pub(super) fn discard_bytes(file: &File) -> Option<u32> {
    let number = |name| device_attribute(file, name)?.parse::<u32>().ok();
    let takes_any = device_attribute(file, "queue/discard_max_bytes")? != "0";
    takes_any.then(|| number("queue/discard_granularity").unwrap_or(0))
}

/// Whether the kernel says that the medium rotates that `file` is, or is on. Without a block device
/// of its own, as with tmpfs or NFS, nobody says so.
pub(super) fn is_rotational(file: &File) -> bool {
    let Ok(metadata) = file.metadata() else { return false };
    let device = if metadata.rdev() != 0 { metadata.rdev() } else { metadata.dev() };
    attribute(device, "queue/rotational").is_some_and(|text| text == "1")
}
