//! Writes cpio archives in the "newc" format, which the kernel unpacks as its initramfs.
//!
//! The `cpio` tool would need root for device nodes, and its archives of the same content differ.
//! These are the same, byte for byte. Format: `man 5 cpio` and the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst.

use std::collections::BTreeSet;
use std::io::{self, Write};

/// File types of `st_mode`, in the archive's own terms.
const TYPE_DIRECTORY: u32 = 0o040_000;
const TYPE_REGULAR: u32 = 0o100_000;
const TYPE_SYMLINK: u32 = 0o120_000;
const TYPE_CHARACTER_DEVICE: u32 = 0o020_000;

/// Alignment of headers, names and contents, in bytes.
const ALIGNMENT: u64 = 4;

/// An archive under construction. [`Archive::finish`] completes it.
pub(crate) struct Archive<W: Write> {
    out: W,
    offset: u64,
    inode: u32,
    directories: BTreeSet<String>,
}

/// The properties of an archive member, except its content.
struct Member<'a> {
    name: &'a str,
    mode: u32,
    device: (u32, u32),
}

impl<W: Write> Archive<W> {
    /// Starts an archive in `out`.
    pub(crate) fn new(out: W) -> Self {
        Self { out, offset: 0, inode: 0, directories: BTreeSet::new() }
    }

    /// Adds the directory `path` and its parents, unless they exist already.
    pub(crate) fn directory(&mut self, path: &str) -> io::Result<()> {
        let path = path.trim_matches('/');
        let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
        for end in ends.filter(|&end| end > 0) {
            let name = &path[..end];
            if self.directories.insert(name.to_owned()) {
                self.member(name, TYPE_DIRECTORY | 0o755, (0, 0), &[])?;
            }
        }
        Ok(())
    }

    /// Adds a regular file with the permission bits `permissions`.
    pub(crate) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) -> io::Result<()> {
        self.parent_of(path)?;
        self.member(path, TYPE_REGULAR | permissions, (0, 0), content)
    }

    /// Adds a symbolic link.
    pub(crate) fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.parent_of(path)?;
        self.member(path, TYPE_SYMLINK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds the node of a character device with the numbers (major, minor).
    pub(crate) fn character_device(&mut self, path: &str, device: (u32, u32)) -> io::Result<()> {
        self.parent_of(path)?;
        self.member(path, TYPE_CHARACTER_DEVICE | 0o600, device, &[])
    }

    /// Writes the trailer and returns the writer.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.member("TRAILER!!!", 0, (0, 0), &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn parent_of(&mut self, path: &str) -> io::Result<()> {
        match path.trim_matches('/').rsplit_once('/') {
            Some((parent, _)) => self.directory(parent),
            None => Ok(()),
        }
    }

    fn member(
        &mut self,
        path: &str,
        mode: u32,
        device: (u32, u32),
        content: &[u8],
    ) -> io::Result<()> {
        let name = path.trim_matches('/');
        self.header(&Member { name, mode, device }, content.len())?;
        self.put(name.as_bytes())?;
        self.put(&[0])?;
        self.pad()?;
        self.put(content)?;
        self.pad()
    }

    fn header(&mut self, member: &Member<'_>, content_bytes: usize) -> io::Result<()> {
        let too_large = |_| io::Error::other(format!("{} is too large for newc", member.name));
        let content_bytes = u32::try_from(content_bytes).map_err(too_large)?;
        let name_bytes = u32::try_from(member.name.len() + 1).map_err(too_large)?;
        self.inode += 1;
        // inode, mode, uid, gid, links, mtime, size, device of the file system (2), device of
        // the node (2), length of the name, checksum (unused in this variant).
        let fields = [
            self.inode,
            member.mode,
            0,
            0,
            1,
            0,
            content_bytes,
            0,
            0,
            member.device.0,
            member.device.1,
            name_bytes,
            0,
        ];
        self.put(b"070701")?;
        for field in fields {
            self.put(format!("{field:08x}").as_bytes())?;
        }
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.offset += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self) -> io::Result<()> {
        while !self.offset.is_multiple_of(ALIGNMENT) {
            self.put(&[0])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the bytes. That the kernel can read them is shown by each boot of a guest.
    #[test]
    fn members_have_the_layout_of_newc() {
        let mut archive = Archive::new(Vec::new());
        archive.file("odd", 0o640, b"12345").unwrap();
        archive.symlink("l", "odd").unwrap();
        let bytes = archive.finish().unwrap();
        let zeroes = |count: usize| "0".repeat(8 * count);
        let trailer = format!("070701{:08x}{}", 3, zeroes(3) + "00000001" + &zeroes(6));
        let wanted = [
            // Inode 1, mode, one link, five bytes, a name of four bytes with its zero.
            format!("07070100000001{:08x}{}00000001", 0o100_640, zeroes(2)),
            format!("{}00000005{}00000004{}", zeroes(1), zeroes(4), zeroes(1)),
            // 110 bytes of header and 4 of the name make 114: two more to the border.
            "odd\0\0\0".to_owned() + "12345\0\0\0",
            format!("07070100000002{:08x}{}00000001", 0o120_777, zeroes(2)),
            format!("{}00000003{}00000002{}", zeroes(1), zeroes(4), zeroes(1)),
            "l\0".to_owned() + "odd\0",
            trailer + "0000000b00000000" + "TRAILER!!!\0\0\0\0",
        ];
        assert_eq!(String::from_utf8(bytes).unwrap(), wanted.concat());
    }

    #[test]
    fn each_directory_is_written_once() {
        let mut archive = Archive::new(Vec::new());
        archive.directory("/a/b").unwrap();
        archive.file("/a/b/c", 0o644, b"x").unwrap();
        archive.directory("a").unwrap();
        let bytes = archive.finish().unwrap();
        let headers = bytes.windows(6).filter(|bytes| bytes == b"070701").count();
        assert_eq!(headers, 4, "a, a/b, a/b/c and the trailer");
    }
}
