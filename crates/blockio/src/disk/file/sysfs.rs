//! Attributes of block devices in sysfs.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

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
