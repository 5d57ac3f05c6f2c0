//! The name of a disk: one grammar for the command line, files and the control socket. It is data;
//! nothing is opened here.
//!
//! A disk is of a kind. Some kinds are layers: they lie over another disk, which is a part of their
//! name. The use of a disk (read-only, its cache) is no part of its name; see
//! [`DiskOptions`](blockio::DiskOptions). Neither are secrets: a kind that needs one has a key that
//! names a file with it.
//!
//! To add a kind: a variant in `data.rs`, its keys in `grammar.rs`, its files and servers in
//! `places.rs`, which the sandbox admits, and its opening in `open.rs`. `open/passed_files.rs`
//! opens its files for a daemon that may not open them itself.
//! docs/guide/disks.md lists kinds and keys, which a test compares, and docs/reference/control.md
//! the form as a table.

mod backing;
mod data;
mod grammar;
mod nbd;
mod places;
mod rbd;
mod text;

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use backing::BackingFiles;
pub use data::{DiskSpec, ImageFormat, KeySpec};
pub use grammar::completions;
pub use nbd::{NbdSpec, Unflushed};
pub use places::DiskPlace;
pub use rbd::RbdSpec;
pub use text::redact_spec;

impl Serialize for DiskSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for DiskSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOrTable)
    }
}

struct TextOrTable;

impl<'de> Visitor<'de> for TextOrTable {
    type Value = DiskSpec;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a disk: a text such as \"file,path=disk.img\", or its kind with its keys")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<DiskSpec, E> {
        DiskSpec::parse(text).map_err(|error| E::custom(format!("{error:#}")))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<DiskSpec, A::Error> {
        let disk = DiskSpec::deserialize(MapAccessDeserializer::new(&mut map));
        let disk = disk.map_err(|error| {
            let message = error.to_string();
            let without = text::redact_quoted(&message);
            // An error without quoted text stays as it is, because it knows its place in a file.
            if without == message { error } else { A::Error::custom(without) }
        })?;
        if map.next_key::<IgnoredAny>()?.is_some() {
            return Err(A::Error::custom("a disk has one key, its kind; leave the others out"));
        }
        grammar::check_layers(disk.layers()).map_err(A::Error::custom)?;
        disk.check().map_err(A::Error::custom)?;
        Ok(disk)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse_json(text: &str) -> Result<DiskSpec, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn a_disk_is_written_and_read_as_a_table_and_read_as_text() {
        let raw = DiskSpec::Raw {
            offset_bytes: 1 << 20,
            size_bytes: None,
            over: Box::new(DiskSpec::File("/a".into())),
        };
        for (disk, json, text) in [
            (DiskSpec::File("/a".into()), r#"{"file":"/a"}"#, "file,path=/a"),
            (DiskSpec::Null { size_bytes: 512 }, r#"{"null":{"size-bytes":512}}"#, "null:512"),
            (
                DiskSpec::Rbd(RbdSpec {
                    pool: "vms".into(),
                    image: "vm1".into(),
                    conf: Some("/c".into()),
                    ..RbdSpec::default()
                }),
                r#"{"rbd":{"pool":"vms","image":"vm1","conf":"/c"}}"#,
                "rbd:vms/vm1,conf=/c",
            ),
            (
                DiskSpec::Luks {
                    key: KeySpec::File("/key".into()),
                    header: None,
                    discard: true,
                    over: Box::new(DiskSpec::File("/a".into())),
                },
                concat!(
                    r#"{"luks":{"key":{"file":"/key"},"header":null,"discard":true,"#,
                    r#""over":{"file":"/a"}}}"#
                ),
                "luks,key-file=/key,discard=on,over=/a",
            ),
            (
                DiskSpec::parse("qcow2:/a").unwrap(),
                r#"{"qcow2":{"backing":"none","over":{"file":"/a"}}}"#,
                "qcow2,over=/a",
            ),
            (
                DiskSpec::parse("qcow2,backing=a,,b:/c,path=/a").unwrap(),
                r#"{"qcow2":{"backing":["a,b","/c"],"over":{"file":"/a"}}}"#,
                "qcow2,backing=a,,b:/c,over=/a",
            ),
            (
                DiskSpec::parse("image,format=auto,backing=anywhere,over=/a").unwrap(),
                r#"{"image":{"format":"auto","backing":"anywhere","over":{"file":"/a"}}}"#,
                "image,format=auto,backing=anywhere,over=/a",
            ),
            (
                DiskSpec::parse("image,format=auto,path=/a").unwrap(),
                r#"{"image":{"format":"auto","backing":"none","over":{"file":"/a"}}}"#,
                "image,format=auto,over=/a",
            ),
            (
                raw,
                r#"{"raw":{"offset-bytes":1048576,"size-bytes":null,"over":{"file":"/a"}}}"#,
                "raw,offset=1M,over=/a",
            ),
        ] {
            assert_eq!(serde_json::to_string(&disk).unwrap(), json);
            assert_eq!(parse_json(json).unwrap(), disk);
            assert_eq!(parse_json(&format!("{text:?}")).unwrap(), disk);
        }
        let nested = parse_json(r#"{"raw": {"over": "null:1M"}}"#).unwrap();
        assert_eq!(nested, DiskSpec::parse("raw,over=null:1M").unwrap());
    }

    #[test]
    fn the_fault_of_a_disk_is_named() {
        let deep = format!("{}\"null:1M\"{}", r#"{"raw":{"over":"#.repeat(16), "}}".repeat(16));
        for (json, expected) in [
            (&*deep, "it has 17 layers of disks; at most 16 are supported"),
            (r#"{"null":{"size-bytes":512,"size":1}}"#, "unknown field `size`"),
            (r#"{"file":"/a","x":2}"#, "a disk has one key, its kind"),
            (r#"{"qcow3":"/a"}"#, "unknown variant `qcow3`"),
            (r#""qcow3,path=/a""#, "unknown disk kind 'qcow3'"),
            (r#"{"luks":{"key":"hidden","over":"/a"}}"#, "the key of a LUKS disk is {"),
            (r#"{"luks":{"key":7,"over":"/a"}}"#, "the key of a LUKS disk is {"),
            (r#"{"luks":{"key":{"hidden":7},"over":"/a"}}"#, "the key of a LUKS disk is {"),
            (r#"{"luks":{"key":{"fd":"hidden"},"over":"/a"}}"#, "the key of a LUKS disk is {"),
            (r#"{"nbd":"user:hidden@host"}"#, "invalid type: string \"user:***@host\""),
            (r#"{"nbd":{"host":"h","port":"x"}}"#, "invalid type: string \"x\""),
            (r#""nbd:user:hidden@host""#, "it is not a URI"),
            ("7", "a disk: a text such as"),
        ] {
            let error = parse_json(json).unwrap_err();
            assert!(error.contains(expected) && !error.contains("hidden"), "{error}");
        }
    }

    #[test]
    fn only_a_disk_that_is_all_of_a_file_is_that_file() {
        let file = |text| DiskSpec::parse(text).unwrap().whole_file().map(Path::to_owned);
        assert_eq!(file("raw,over=raw,over=/a"), Some("/a".into()));
        assert_eq!(file("raw,offset=512,over=/a"), None);
        assert_eq!(file("raw,size=512,over=/a"), None);
        assert_eq!(file("raw,over=null:512"), None);
    }
}
