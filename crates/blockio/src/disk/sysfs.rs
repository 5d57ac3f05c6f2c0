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

/// How large the block device with this number is. The kernel counts in units of 512 bytes,
/// whatever the logical block.
pub(super) fn size_bytes(device: u64) -> Option<u64> {
    attribute(device, "size")?.parse::<u64>().ok()?.checked_mul(512)
}

/// The unit in which the block device that `file` is takes discards, in bytes; 0 if nobody says,
/// `None` if it takes none.
pub(super) fn discard_bytes(file: &File) -> Option<u32> {
    unit_of_discards(|name| device_attribute(file, name))
}

/// The same, where `attribute` says what the kernel does.
fn unit_of_discards(attribute: impl Fn(&str) -> Option<String>) -> Option<u32> {
    let takes_any = attribute("queue/discard_max_bytes")? != "0";
    let granularity = attribute("queue/discard_granularity").and_then(|text| text.parse().ok());
    takes_any.then(|| granularity.unwrap_or(0))
}

/// Whether the kernel says that the medium rotates that `file` is, or is on. Without a block device
/// of its own, as with tmpfs or NFS, nobody says so.
pub(super) fn is_rotational(file: &File) -> bool {
    let Ok(metadata) = file.metadata() else { return false };
    let device = if metadata.rdev() != 0 { metadata.rdev() } else { metadata.dev() };
    attribute(device, "queue/rotational").is_some_and(|text| text == "1")
}

#[cfg(test)]
mod tests {
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
        // More than 32 bits have room for.
        assert_eq!(unit(Some("4398046511104"), Some("512")), Some(512));
        assert_eq!(unit(Some("4096"), None), Some(0));
        assert_eq!(unit(Some("0"), Some("4096")), None);
        assert_eq!(unit(None, None), None);
    }
}
