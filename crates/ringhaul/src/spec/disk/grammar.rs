//! The words in which a disk is named: `KIND,KEY=VALUE,...`, or a short form.
//!
//! A layer names the disk that it lies over with its last key, `over`: everything after it belongs
//! to that disk. So `raw,offset=1M,over=file,path=disk.img` needs no brackets, with any number of
//! layers. Commas in values are written twice.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Error, Result, bail, ensure};
use ringhaul_options::key_value::split_at_commas;
use ringhaul_options::parse_size;
use ringhaul_options::redact::redact_part;

use super::backing::BackingFiles;
use super::data::{DiskSpec, ImageFormat, KeySpec};
use super::nbd::{NbdSpec, keys_of_uri};
use super::rbd::RbdSpec;
use super::text::{OVER, redact_spec_parts};

/// A kind of disk, and the grammar of its name.
struct Kind {
    name: &'static str,
    /// Its keys. A kind with the key `over` is a layer.
    keys: &'static [&'static str],
    /// The schemes of its short forms, in addition to its name. A colon follows each.
    schemes: &'static [&'static str],
    /// Reads a short form, the part up to the first comma, into keys.
    read_short: fn(&str, &mut Words) -> Result<()>,
    /// Makes the disk with these keys.
    make: fn(Words) -> Result<DiskSpec>,
}

/// Words that complete the beginning of a disk's name, for a shell.
pub(crate) fn completions(begun: &str) -> Vec<String> {
    // The keys of the innermost disk come last.
    let inner = begun.rfind("over=").map_or(0, |at| at + "over=".len());
    let (outer, inner) = begun.split_at(inner);
    match inner.rsplit_once(',') {
        None => {
            let kinds = KINDS.iter().filter(|kind| kind.name.starts_with(inner));
            kinds.map(|kind| format!("{outer}{},", kind.name)).collect()
        }
        Some((done, last)) => {
            let name = done.split([',', ':']).next().unwrap_or_default();
            let kind = KINDS.iter().find(|kind| kind.name == name);
            let keys = kind.into_iter().flat_map(|kind| kind.keys);
            let keys = keys.filter(|key| key.starts_with(last));
            keys.map(|key| format!("{outer}{done},{key}=")).collect()
        }
    }
}

/// All kinds.
const KINDS: &[Kind] = &[
    Kind {
        name: "file",
        keys: &["path"],
        schemes: &[],
        read_short: |text, words| words.add("path", after_scheme(text)),
        make: |mut words| {
            let path = words.take("path").context("a file needs a path, as in file,path=disk.img");
            Ok(DiskSpec::File(PathBuf::from(path?)))
        },
    },
    Kind {
        name: "null",
        keys: &["size"],
        schemes: &[],
        read_short: |text, words| words.add("size", after_scheme(text)),
        make: |mut words| {
            let size = words.take_size("size")?;
            let size_bytes = size.context("a null disk needs a size, as in null,size=64G")?;
            Ok(DiskSpec::Null { size_bytes })
        },
    },
    Kind {
        name: "nbd",
        keys: NBD_KEYS,
        schemes: &["nbd+unix", "nbds", "nbds+unix"],
        read_short: |text, words| {
            keys_of_uri(text)?.iter().try_for_each(|(key, value)| words.add(key, value))
        },
        make: |mut words| {
            let nbd = NbdSpec {
                socket: words.take("socket").map(PathBuf::from),
                host: words.take("host"),
                port: words.take_as("port")?,
                export: words.take("export").unwrap_or_default(),
                connections: words.take_as("connections")?,
                deadline_seconds: words.take_as("deadline")?,
                unflushed: words.take_as("unflushed")?,
                tls: words.take_switch("tls")?,
                tls_certificates: words.take("tls-certificates").map(PathBuf::from),
                tls_hostname: words.take("tls-hostname"),
            };
            nbd.check()?;
            Ok(DiskSpec::Nbd(nbd))
        },
    },
    Kind {
        name: "rbd",
        keys: &["pool", "namespace", "image", "snapshot", "conf", "id", "keyring", "exclusive"],
        schemes: &[],
        read_short: |text, words| {
            let spec = RbdSpec::of_image(after_scheme(text))?;
            let parts = [("namespace", spec.namespace), ("snapshot", spec.snapshot)];
            let parts = parts.into_iter().filter_map(|(key, value)| Some((key, value?)));
            [("pool", spec.pool), ("image", spec.image)]
                .into_iter()
                .chain(parts)
                .try_for_each(|(key, value)| words.add(key, &value))
        },
        make: |mut words| {
            let image = words.take("image");
            let image = image.context("an image needs a name, as in rbd,pool=vms,image=vm1")?;
            Ok(DiskSpec::Rbd(RbdSpec {
                pool: words.take("pool").unwrap_or_else(|| "rbd".to_owned()),
                namespace: words.take("namespace"),
                image,
                snapshot: words.take("snapshot"),
                conf: words.take("conf").map(PathBuf::from),
                id: words.take("id"),
                keyring: words.take("keyring").map(PathBuf::from),
                exclusive: words.take_switch("exclusive")?,
            }))
        },
    },
    Kind {
        name: "raw",
        keys: &["offset", "size", OVER],
        schemes: &[],
        read_short: |_, _| bail!("disk kind raw has no short form"),
        make: |mut words| {
            Ok(DiskSpec::Raw {
                offset_bytes: words.take_size("offset")?.unwrap_or(0),
                size_bytes: words.take_size("size")?,
                over: words.take_over("raw,offset=1M,over=file,path=disk.img")?,
            })
        },
    },
    Kind {
        name: "luks",
        keys: &["key-file", "key-fd", "header", "discard", OVER],
        schemes: &[],
        read_short: |_, _| bail!("disk kind luks has no short form"),
        make: |mut words| {
            let key = match (words.take("key-file"), words.take("key-fd")) {
                (Some(path), None) => KeySpec::File(path.into()),
                (None, Some(fd)) => {
                    KeySpec::Fd(fd.parse().context("key-fd: it is the number of a descriptor")?)
                }
                _ => bail!("a LUKS disk needs its key in one place: key-file=PATH or key-fd=N"),
            };
            Ok(DiskSpec::Luks {
                key,
                header: words.take("header").map(PathBuf::from),
                discard: words.take_switch("discard")?,
                over: words.take_over("luks,key-file=disk.key,over=file,path=disk.img")?,
            })
        },
    },
    Kind {
        name: "qcow2",
        keys: &["path", "backing", OVER],
        schemes: &[],
        read_short: |text, words| words.add("path", after_scheme(text)),
        make: |mut words| {
            Ok(DiskSpec::Qcow2 {
                backing: words.take_backing()?,
                over: words.take_file_or_over("qcow2,path=disk.qcow2")?,
            })
        },
    },
    Kind {
        name: "image",
        keys: &["path", "format", "backing", OVER],
        schemes: &[],
        read_short: |_, _| bail!("disk kind image has no short form"),
        make: |mut words| {
            let format = match words.take("format").as_deref() {
                Some("auto") => ImageFormat::Auto,
                Some(other) => bail!(
                    "format={other}: an image is of a kind only if its format is to be found out \
                     (format=auto); name other formats as the kind, as in qcow2,path=disk.qcow2"
                ),
                None => bail!("it needs a format, as in image,format=auto,path=disk.img"),
            };
            Ok(DiskSpec::Image {
                format,
                backing: words.take_backing()?,
                over: words.take_file_or_over("image,format=auto,path=disk.img")?,
            })
        },
    },
];

const NBD_KEYS: &[&str] = &[
    "socket",
    "host",
    "port",
    "export",
    "connections",
    "deadline",
    "unflushed",
    "tls",
    "tls-certificates",
    "tls-hostname",
];

/// The most layers of a disk, far below the limits of a stack or a JSON parser.
const LAYERS_MAX: usize = 16;

impl DiskSpec {
    /// Reads the disk that a text names, such as `file,path=disk.img`.
    ///
    /// # Errors
    ///
    /// When the text names no disk.
    pub fn parse(text: &str) -> Result<Self> {
        disk_of_layers(&split_at_commas(text))
    }

    /// Like [`parse`](Self::parse), for a text that was split at its commas.
    pub(crate) fn from_parts(parts: &[String]) -> Result<Self> {
        disk_of_layers(parts)
    }
}

/// Reads a disk. Each layer is a nested call, and the words may come from any source, so the number
/// of layers is checked first.
fn disk_of_layers(parts: &[String]) -> Result<DiskSpec> {
    let is_over = |part: &&String| part.split_once('=').is_some_and(|(key, _)| key == OVER);
    check_layers(1 + parts.iter().filter(is_over).count())?;
    disk(parts)
}

/// Checks the number of layers of a disk.
pub(super) fn check_layers(layers: usize) -> Result<()> {
    ensure!(layers <= LAYERS_MAX, "it has {layers} layers of disks; at most {LAYERS_MAX} can be");
    Ok(())
}

fn disk(parts: &[String]) -> Result<DiskSpec> {
    let Some((first, rest)) = parts.split_first() else { bail!("no disk is named") };
    let mut words = Words::default();
    let kind = if ["/", "./", "../"].iter().any(|start| first.starts_with(start)) {
        words.add("path", first)?;
        find("file")?
    } else if let Some((scheme, _)) = first.split_once(':') {
        // Schemes of URIs have no case.
        let is_uri = first.contains("://");
        let is_same = |name: &str| name == scheme || (is_uri && name.eq_ignore_ascii_case(scheme));
        let is_meant =
            |kind: &&Kind| is_same(kind.name) || kind.schemes.iter().any(|name| is_same(name));
        let kind = KINDS.iter().find(is_meant);
        let kind = kind.with_context(|| unknown_kind(scheme))?;
        (kind.read_short)(first, &mut words)?;
        kind
    } else {
        find(first)?
    };
    let mut rest = rest.iter();
    while let Some(part) = rest.next() {
        let (key, value) = part.split_once('=').with_context(|| {
            format!(
                "'{}' is not of the form KEY=VALUE; write a comma in a value twice",
                redact_part(part)
            )
        })?;
        if !kind.keys.contains(&key) {
            let (name, keys) = (kind.name, kind.keys.join(", "));
            bail!("unknown key '{key}' of disk kind {name} (expected: {keys})");
        }
        if key == OVER {
            let mut below = vec![value.to_owned()];
            below.extend(rest.by_ref().cloned());
            let disk =
                disk(&below).with_context(|| format!("in {OVER}={}", redact_spec_parts(&below)))?;
            words.over = Some(Box::new(disk));
        } else {
            words.add(key, value)?;
        }
    }
    (kind.make)(words)
}

fn find(name: &str) -> Result<&'static Kind> {
    KINDS.iter().find(|kind| kind.name == name).with_context(|| unknown_kind(&redact_part(name)))
}

fn unknown_kind(name: &str) -> String {
    let kinds: Vec<&str> = KINDS.iter().map(|kind| kind.name).collect();
    let expected = format!("unknown disk kind '{name}' (expected: {}", kinds.join(", "));
    // A name with a slash or a suffix is a file name.
    match name.contains(['/', '.']) {
        true => format!("{expected}); for the file of this name, write ./{name}"),
        false => format!("{expected}; or the path of a file, beginning with /, ./ or ../)"),
    }
}

fn after_scheme(text: &str) -> &str {
    text.split_once(':').map_or(text, |(_, rest)| rest)
}

/// The keys of one disk with their values.
#[derive(Default)]
struct Words {
    keys: Keys,
    values: Vec<(String, String)>,
    over: Option<Box<DiskSpec>>,
}

impl Words {
    fn add(&mut self, key: &str, value: &str) -> Result<()> {
        if value.is_empty() {
            bail!("{key} has no value");
        }
        self.keys.check(key)?;
        self.values.push((key.to_owned(), value.to_owned()));
        Ok(())
    }

    fn take(&mut self, key: &str) -> Option<String> {
        let at = self.values.iter().position(|(other, _)| other == key)?;
        Some(self.values.swap_remove(at).1)
    }

    fn take_size(&mut self, key: &str) -> Result<Option<u64>> {
        let parse = |text: String| parse_size(&text).map_err(Error::msg);
        self.take(key).map(parse).transpose().with_context(|| key.to_owned())
    }

    fn take_as<T>(&mut self, key: &str) -> Result<Option<T>>
    where
        T: FromStr<Err: Into<Error>>,
    {
        let parse = |text: String| text.parse().map_err(Into::into);
        self.take(key).map(parse).transpose().with_context(|| key.to_owned())
    }

    /// Takes `on` or `off`. A missing key is off.
    fn take_switch(&mut self, key: &str) -> Result<bool> {
        match self.take(key).as_deref() {
            None | Some("off") => Ok(false),
            Some("on") => Ok(true),
            Some(other) => bail!("{key} is '{other}' (expected: on, off)"),
        }
    }

    fn take_backing(&mut self) -> Result<BackingFiles> {
        let read = |text: String| BackingFiles::parse(&text);
        self.take("backing").map_or(Ok(BackingFiles::None), read)
    }

    /// Takes the disk below, which may be named by the path of a file.
    fn take_file_or_over(&mut self, example: &str) -> Result<Box<DiskSpec>> {
        match self.take("path") {
            Some(_) if self.over.is_some() => bail!("path and {OVER} are two disks; leave one out"),
            Some(path) => Ok(Box::new(DiskSpec::File(path.into()))),
            None => self.take_over(example),
        }
    }

    fn take_over(&mut self, example: &str) -> Result<Box<DiskSpec>> {
        self.over.take().with_context(|| format!("it lies over a disk; name it, as in {example}"))
    }
}

/// The keys of a list that were seen. A repeated key has two meanings, and neither may be chosen in
/// silence.
#[derive(Default)]
struct Keys(Vec<String>);

impl Keys {
    /// Refuses a `KEY=VALUE` whose key was seen before.
    fn check(&mut self, part: &str) -> Result<()> {
        let key = part.split_once('=').map_or(part, |(key, _)| key);
        if self.0.iter().any(|seen| seen == key) {
            bail!("{key} is given twice; leave one of them out");
        }
        self.0.push(key.to_owned());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<DiskSpec> {
        DiskSpec::parse(text).ok()
    }

    #[test]
    fn a_shell_gets_kinds_and_their_keys() {
        assert_eq!(completions("q"), ["qcow2,"]);
        assert_eq!(completions("null,"), ["null,size="]);
        assert_eq!(completions("nbd,host=h,po"), ["nbd,host=h,port="]);
        assert_eq!(completions("raw,over=qcow2,pa"), ["raw,over=qcow2,path="]);
        assert_eq!(completions("raw,offset=1M,over=nu"), ["raw,offset=1M,over=null,"]);
        assert!(completions("./disk.img").is_empty() && completions("x,y").is_empty());
    }

    #[test]
    fn disks_are_understood() {
        let null = |size_bytes| Some(DiskSpec::Null { size_bytes });
        let file = |path: &str| Some(DiskSpec::File(path.into()));
        for (text, disk) in [
            ("null,size=64G", null(64 << 30)),
            ("null,size=512", null(512)),
            ("null:64G", null(64 << 30)),
            ("file,path=a=b", file("a=b")),
            ("file,path=a,,b:c", file("a,b:c")),
            ("file:a b", file("a b")),
            ("/a", file("/a")),
            ("./a:b", file("./a:b")),
            ("../a", file("../a")),
        ] {
            assert_eq!(parse(text), disk, "{text}");
        }
        for bad in [
            "null",
            "null,size=1X",
            "null,size=99999999999T",
            "null,size=",
            "null,path=x",
            "null:1M,size=1M",
            "null:",
            "file",
            "file:",
            "qcow3,path=x",
            "disk.img",
            "",
            ",",
            "file,path=x,over=null:1M",
        ] {
            assert!(parse(bad).is_none(), "{bad} was taken");
        }
    }

    #[test]
    fn images_are_named_as_in_ceph() {
        let name = |text: &str| match DiskSpec::parse(text) {
            Ok(DiskSpec::Rbd(spec)) => spec.to_string(),
            other => panic!("{text}: {other:?}"),
        };
        for (text, full) in [
            ("rbd:a", "rbd:rbd/a"),
            ("rbd:p/a", "rbd:p/a"),
            ("rbd:p/n/a@s", "rbd:p/n/a@s"),
            ("rbd:a,pool=p", ""),
            ("rbd,image=a", "rbd:rbd/a"),
            ("rbd,pool=p,namespace=n,image=a,snapshot=s,id=x,keyring=/k", "rbd:p/n/a@s"),
        ] {
            match full {
                "" => assert!(DiskSpec::parse(text).is_err(), "{text}: two pools"),
                _ => assert_eq!(name(text), full),
            }
        }
        let Ok(DiskSpec::Rbd(spec)) = DiskSpec::parse("rbd:a,exclusive=on,conf=/c") else {
            panic!("it is not an image")
        };
        assert!(spec.exclusive && spec.conf == Some("/c".into()));
    }

    #[test]
    fn a_layer_lies_over_all_that_follows() {
        let raw = |offset_bytes, size_bytes, over| DiskSpec::Raw {
            offset_bytes,
            size_bytes,
            over: Box::new(over),
        };
        let file = || DiskSpec::File("/a,b".into());
        let texts = [
            ("raw,offset=1M,size=2M,over=file,path=/a,,b", raw(1 << 20, Some(2 << 20), file())),
            ("raw,over=/a,,b", raw(0, None, file())),
            ("raw,offset=512,over=raw,size=1K,over=/a,,b", {
                raw(512, None, raw(0, Some(1024), file()))
            }),
        ];
        for (text, disk) in texts {
            assert_eq!(parse(text), Some(disk), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_what_is_known() {
        let deep = "raw,over=".repeat(16) + "null:1M";
        assert!(DiskSpec::parse(&deep["raw,over=".len()..]).is_ok());
        for (bad, expected) in [
            (
                "qcow3,path=x",
                "unknown disk kind 'qcow3' (expected: file, null, nbd, rbd, raw, luks, qcow2,",
            ),
            ("rbd9:x", "unknown disk kind 'rbd9'"),
            ("vms/disk.img", "for the file of this name, write ./vms/disk.img"),
            ("disk.img", "for the file of this name, write ./disk.img"),
            (
                "/srv/a,b.img",
                "'b.img' is not of the form KEY=VALUE; write a comma in a value twice",
            ),
            ("raw,offset=1M", "it lies over a disk; name it"),
            ("raw:1M", "has no short form"),
            ("raw,path=x", "unknown key 'path' of disk kind raw (expected: offset, size, over)"),
            ("raw,over=null,path=x", "in over=null,path=x: unknown key 'path' of disk kind null"),
            ("raw,over=null:1M,offset=1M", "unknown key 'offset' of disk kind null"),
            ("null,size=1M,size=1M", "size is given twice"),
            ("file,path=a,path=b", "path is given twice"),
            ("raw,offset=1,offset=1,over=/a", "offset is given twice"),
            ("luks,over=/a", "key-file=PATH or key-fd=N"),
            ("luks,key-file=/k,key-fd=3,over=/a", "key-file=PATH or key-fd=N"),
            ("luks,key-fd=x,over=/a", "the number of a descriptor"),
            ("luks,key-fd=3,discard=yes,over=/a", "discard is 'yes' (expected: on, off)"),
            ("luks,key=secret,over=/a", "unknown key 'key' of disk kind luks"),
            ("qcow2,backing=a:,path=/a", "backing=a: has an empty name"),
            ("qcow2,path=/a,over=/b", "path and over are two disks"),
            ("qcow2", "it lies over a disk; name it, as in qcow2,path=disk.qcow2"),
            ("image,path=/a", "it needs a format"),
            ("image,format=qcow2,path=/a", "name other formats as the kind"),
            ("null,size", "'size' is not of the form KEY=VALUE"),
            ("null,size=x", "size: "),
            ("rbd,pool=p", "an image needs a name"),
            ("rbd:p/n/x/a", "has too many parts"),
            ("rbd:p/@s", "'p/@s' has an empty part"),
            ("rbd:p/a:id=x:key=secret", "options of an image stand behind commas"),
            ("rbd:a,exclusive=yes", "exclusive is 'yes' (expected: on, off)"),
            ("rbd:a,key=secret", "unknown key 'key' of disk kind rbd"),
            (&deep, "it has 17 layers of disks; at most 16 can be"),
        ] {
            let error = format!("{:#}", DiskSpec::parse(bad).unwrap_err());
            assert!(error.contains(expected), "{bad}: {error}");
        }
    }
}
