//! Probes the content of a disk for image formats, and warns about it.

use super::foreign::{BYTES, format_of, format_of_file, warning};
use super::{DiskSource, SourceKind};
use crate::config::IoThreadConfig;
use crate::thread::io_thread::IoThread;

impl DiskSource {
    /// The format of the image header that the disk has. `None` if there is none, it cannot be
    /// read, or the disk is not in a local file or device.
    #[must_use]
    pub fn foreign_format(&self) -> Option<&'static str> {
        match &self.kind {
            SourceKind::File(source) => format_of_file(source.file.as_ref()),
            SourceKind::Null => None,
            SourceKind::Driver(source) => {
                source.local()?;
                self.format_of_content()
            }
        }
    }

    fn format_of_content(&self) -> Option<&'static str> {
        let thread = IoThread::new(&IoThreadConfig::default()).ok()?;
        let disk = self.for_probe().ok()?.attach(thread.io());
        let size = self.info().size_bytes;
        let block = (BYTES as u64).max(self.info().logical_block_bytes.into()).min(size);
        let read = |offset| {
            let read = thread.block_on(disk.read_part(offset, block)).ok()?;
            Some(read.ok()?.to_vec())
        };
        format_of(&read(0)?, &read(size - block).unwrap_or_default())
    }

    /// Marks the disk as used without a format. If it has the [header](Self::foreign_format) of an
    /// image, [`warning`](Self::warning) reports that from then on.
    pub fn detect_format(&self) {
        if let Some(format) = self.foreign_format() {
            self.shared.set_foreign_format(format);
        }
    }

    /// A warning about the content of the disk, for its owner. The disk can be served in spite of
    /// it.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let of_kind = self.driver().and_then(|source| source.warning());
        of_kind.or_else(|| self.shared.foreign_format().map(warning))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use crate::disk::{DiskOptions, DiskSource, format_warning};

    /// Front of a VHD image.
    const VHD: &[u8] = b"conectix";

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_header_is_found_in_files_of_all_lengths_and_in_layers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for bytes in [8192, 8704, 196_624 / 512 * 512] {
            file.as_file().set_len(0).unwrap();
            file.as_file().set_len(bytes).unwrap();
            for direct in [false, true] {
                let options = DiskOptions { direct, ..DiskOptions::default() };
                let source = match DiskSource::file(file.path(), &options) {
                    Err(error) if direct => {
                        eprintln!("skipped: direct I/O: {error}");
                        continue;
                    }
                    opened => opened.unwrap(),
                };
                source.detect_format();
                assert_eq!(source.warning(), None);
                file.as_file().write_all_at(VHD, bytes - 512).unwrap();
                assert_eq!(source.foreign_format(), Some("VHD"), "{bytes} {direct}");
                let part = DiskSource::raw(source.clone(), bytes - 512, None).unwrap();
                assert_eq!(part.foreign_format(), Some("VHD"), "{bytes} {direct}");
                source.detect_format();
                assert!(source.clone().warning().unwrap().contains("header of a VHD image"));
                file.as_file().write_all_at(&[0; 8], bytes - 512).unwrap();
            }
            let all = format_warning(file.path());
            assert_eq!(all, None);
            file.as_file().write_all_at(b"QFI\xfb\0\0\0\x03", 0).unwrap();
            let warning = format_warning(file.path()).unwrap();
            assert!(warning.contains("a qcow2 image") && warning.contains("qcow2:PATH"));
        }
    }
}
