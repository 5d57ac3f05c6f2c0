//! The specification of a disk.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::backing::BackingFiles;
use super::nbd::NbdSpec;
use super::rbd::RbdSpec;

/// A disk by its kind. The text form of `--disk` is accepted too.
// `remote` lets serde make functions for the variants, which the implementations below call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(remote = "Self", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
#[serde(deny_unknown_fields, expecting = "the keys of this kind of disk and their values")]
#[cfg_attr(feature = "schema", schemars(transform = or_text))]
pub enum DiskSpec {
    /// A regular file or a block device.
    File(PathBuf),
    /// A disk that answers at once and keeps nothing.
    Null {
        /// The size in bytes.
        size_bytes: u64,
    },
    /// An export of an NBD server.
    Nbd(NbdSpec),
    /// An image in a Ceph cluster.
    Rbd(RbdSpec),
    /// A part of another disk.
    Raw {
        /// The start of the part, in bytes.
        #[serde(default)]
        offset_bytes: u64,
        /// The size of the part, in bytes. `None`: up to the end of the disk.
        #[serde(default)]
        size_bytes: Option<u64>,
        /// The disk that the part is taken from.
        over: Box<DiskSpec>,
    },
    /// A disk that is encrypted with LUKS on another disk.
    Luks {
        /// The place of its key (passphrase).
        #[serde(deserialize_with = "place_of_key")]
        key: KeySpec,
        /// A file with its header, if that is detached.
        #[serde(default)]
        header: Option<PathBuf>,
        /// Pass discards on. A reader of the disk below can then see which parts of it are in use.
        #[serde(default)]
        discard: bool,
        /// The disk below, with the encrypted data.
        over: Box<DiskSpec>,
    },
    /// The disk in a qcow2 image.
    Qcow2 {
        /// Backing files that it may have.
        #[serde(default)]
        backing: BackingFiles,
        /// The disk that contains the image.
        over: Box<DiskSpec>,
    },
    /// The disk in an image with a format that is detected.
    Image {
        /// The format.
        format: ImageFormat,
        /// Backing files that it may have.
        #[serde(default)]
        backing: BackingFiles,
        /// The disk that contains the image.
        over: Box<DiskSpec>,
    },
}

/// The place of a secret. All bytes there belong to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum KeySpec {
    /// A file.
    File(PathBuf),
    /// A descriptor that was inherited. It is read once.
    Fd(i32),
}

/// Reads the place of a key. Errors do not repeat any other value, which may be a key itself.
fn place_of_key<'de, D: Deserializer<'de>>(deserializer: D) -> Result<KeySpec, D::Error> {
    KeySpec::deserialize(deserializer).map_err(|_| {
        D::Error::custom("the key of a LUKS disk is { file = \"PATH\" } or { fd = NUMBER }")
    })
}

/// The source of an image's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ImageFormat {
    /// The content. A disk without a known format can only be read.
    Auto,
}

impl DiskSpec {
    /// The name of the disk in the log.
    pub fn name(&self) -> String {
        match self {
            Self::Null { .. } => "null disk".to_owned(),
            other => other.to_string(),
        }
    }

    /// The disk below a layer.
    fn over(&self) -> Option<&Self> {
        match self {
            Self::File(_) | Self::Null { .. } | Self::Nbd(_) | Self::Rbd(_) => None,
            Self::Raw { over, .. }
            | Self::Luks { over, .. }
            | Self::Qcow2 { over, .. }
            | Self::Image { over, .. } => Some(over),
        }
    }

    /// The number of layers, this one included.
    pub(super) fn layers(&self) -> usize {
        1 + self.over().map_or(0, Self::layers)
    }

    /// Returns true if the specification leaves the format of the content open, so that an image
    /// may be served by mistake as a disk without a format. A layer `raw` fixes the format.
    pub(crate) fn has_unnamed_content(&self) -> bool {
        matches!(self, Self::File(_) | Self::Luks { .. })
    }

    /// The path of a file or device, if the disk is all of it and nothing else.
    pub fn whole_file(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Raw { offset_bytes: 0, size_bytes: None, over } => over.whole_file(),
            _ => None,
        }
    }

    /// Refuses values that cannot be written in words either.
    ///
    /// # Errors
    ///
    /// With the reason.
    pub(super) fn check(&self) -> Result<()> {
        if let Self::Nbd(nbd) = self {
            nbd.check()?;
        }
        self.over().map_or(Ok(()), Self::check)
    }

    /// Calls `change` for all paths in it.
    ///
    /// # Errors
    ///
    /// The first error of `change`.
    pub fn change_paths(
        &mut self,
        change: &mut dyn FnMut(&mut PathBuf) -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::File(path) => change(path),
            Self::Null { .. } => Ok(()),
            Self::Nbd(nbd) => nbd.paths().try_for_each(change),
            Self::Rbd(image) => {
                image.conf.iter_mut().chain(&mut image.keyring).try_for_each(change)
            }
            Self::Luks { key, header, over, .. } => {
                if let KeySpec::File(path) = key {
                    change(path)?;
                }
                header.iter_mut().try_for_each(&mut *change)?;
                over.change_paths(change)
            }
            Self::Raw { over, .. } | Self::Qcow2 { over, .. } | Self::Image { over, .. } => {
                over.change_paths(change)
            }
        }
    }
}

impl fmt::Display for DiskSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Nbd(nbd) => nbd.fmt(f),
            Self::Rbd(image) => write!(f, "rbd:{image}"),
            Self::Null { size_bytes } => write!(f, "null disk of {size_bytes} bytes"),
            Self::Raw { offset_bytes, size_bytes: Some(size), over } => {
                write!(f, "{size} bytes from {offset_bytes} on of {over}")
            }
            Self::Raw { offset_bytes, size_bytes: None, over } => {
                write!(f, "all from byte {offset_bytes} on of {over}")
            }
            Self::Luks { over, .. } => write!(f, "LUKS on {over}"),
            Self::Qcow2 { over, .. } => write!(f, "qcow2 image {over}"),
            Self::Image { over, .. } => write!(f, "image {over}"),
        }
    }
}

/// Adds the text form of `--disk` to a schema.
#[cfg(feature = "schema")]
fn or_text(schema: &mut schemars::Schema) {
    if let Some(kinds) = schema.get_mut("oneOf").and_then(|kinds| kinds.as_array_mut()) {
        let text = "The same as text, in the form of `--disk`.";
        kinds.push(serde_json::json!({ "type": "string", "description": text }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Errors and the log name a disk so.
    #[test]
    fn the_text_of_a_disk_tells_its_layers() {
        for (name, text) in [
            ("/a", "/a"),
            ("null:4096", "null disk of 4096 bytes"),
            ("rbd:pool/image@snapshot", "rbd:pool/image@snapshot"),
            ("nbd+unix:///export?socket=/s", "nbd+unix:///export?socket=/s"),
            ("raw,offset=512,size=1024,over=/a", "1024 bytes from 512 on of /a"),
            ("raw,offset=512,over=/a", "all from byte 512 on of /a"),
            ("luks,key-fd=3,over=/a", "LUKS on /a"),
            ("luks,key-fd=3,over=qcow2,path=/a", "LUKS on qcow2 image /a"),
            ("image,format=auto,path=/a", "image /a"),
        ] {
            assert_eq!(DiskSpec::parse(name).unwrap().to_string(), text);
        }
    }

    /// `ctl` resolves relative paths, because the daemon has another working directory.
    #[test]
    fn each_path_of_a_disk_can_be_changed() {
        for (name, changed) in [
            ("file,path=a", "/w/a"),
            ("null:4096", "null:4096"),
            ("raw,offset=512,over=file,path=a", "raw,offset=512,over=/w/a"),
            ("qcow2,path=a", "qcow2,path=/w/a"),
            ("image,format=auto,path=a", "image,format=auto,path=/w/a"),
            ("luks,key-fd=3,over=file,path=a", "luks,key-fd=3,over=/w/a"),
            (
                "luks,key-file=k,header=h,over=qcow2,path=a",
                "luks,key-file=/w/k,header=/w/h,over=qcow2,path=/w/a",
            ),
            ("nbd,socket=s", "nbd,socket=/w/s"),
            ("nbd,host=h,tls=on,tls-certificates=c", "nbd,host=h,tls=on,tls-certificates=/w/c"),
            ("rbd:p/i,conf=c,keyring=k", "rbd:p/i,conf=/w/c,keyring=/w/k"),
        ] {
            let mut disk = DiskSpec::parse(name).unwrap();
            let change = &mut |path: &mut PathBuf| {
                *path = Path::new("/w").join(&path);
                Ok(())
            };
            disk.change_paths(change).unwrap();
            assert_eq!(disk, DiskSpec::parse(changed).unwrap(), "{name}");
        }
    }
}
