//! The words in which a disk is named: `KIND,KEY=VALUE,...`, or a short form.
//!
//! A layer names the disk that it lies over with its last key, `over`: everything after it belongs
//! to that disk. So `raw,offset=1M,over=file,path=disk.img` needs no brackets, with any number of
//! layers. Commas in values are written twice.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail, ensure};
use ringhaul_options::key_value::{Error, Parts, Size, split_at_commas};
use serde::Deserialize;

use super::backing::BackingFiles;
use super::data::{DiskSpec, ImageFormat, KeySpec};
use super::nbd::{NbdSpec, parts_of_uri};
use super::rbd::{RbdSpec, parts_of_image};
use super::text::{OVER, redact_spec_parts};

type Path = Option<PathBuf>;
type Below = Vec<String>;

/// The kinds of disks with their keys.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
enum Words {
    File { path: PathBuf },
    Null { size: Size },
    Nbd(NbdSpec),
    Rbd(RbdSpec),
    Raw { offset: Option<Size>, size: Option<Size>, over: Below },
    Luks { key_file: Path, key_fd: Option<i32>, header: Path, discard: Option<bool>, over: Below },
    Qcow2 { path: Path, backing: Option<BackingFiles>, over: Option<Below> },
    Image { path: Path, format: String, backing: Option<BackingFiles>, over: Option<Below> },
}

/// The most layers of a disk, far below the limits of a stack or a JSON parser.
const LAYERS_MAX: usize = 16;

/// Words that complete the beginning of a disk's name, for a shell.
pub fn completions(begun: &str) -> Vec<String> {
    // The keys of the innermost disk come last.
    let inner = begun.rfind("over=").map_or(0, |at| at + "over=".len());
    let (outer, inner) = begun.split_at(inner);
    match inner.rsplit_once(',') {
        None => {
            let kinds = expected("").into_iter().filter(|kind| kind.starts_with(inner));
            kinds.map(|kind| format!("{outer}{kind},")).collect()
        }
        Some((done, last)) => {
            let kind = done.split([',', ':']).next().unwrap_or_default();
            // An unknown kind has no keys.
            let is_kind = expected("").contains(&kind);
            let keys = expected(kind).into_iter().filter(|key| is_kind && key.starts_with(last));
            keys.map(|key| format!("{outer}{done},{key}=")).collect()
        }
    }
}

/// The keys of a kind, or all kinds for an unknown one.
fn expected(kind: &str) -> Vec<&'static str> {
    // No kind has an empty key, so the error lists the keys or the kinds.
    match Parts::new(&["=x".to_owned()]).finish_variant::<Words>(kind) {
        Err(Error::UnknownKey { expected, .. }) => expected,
        Err(Error::UnknownWord { expected, .. }) => expected.to_vec(),
        _ => Vec::new(),
    }
}

impl DiskSpec {
    /// Reads the disk that a text names, such as `file,path=disk.img`.
    ///
    /// # Errors
    ///
    /// When the text names no disk.
    pub fn parse(text: &str) -> Result<Self> {
        Self::from_parts(&split_at_commas(text))
    }

    /// Like [`parse`](Self::parse), for a text that was split at its commas. Each layer is a nested
    /// call, and the words may come from any source, so the number of layers is checked first.
    ///
    /// # Errors
    ///
    /// Like [`parse`](Self::parse).
    pub fn from_parts(parts: &[String]) -> Result<Self> {
        let is_over = |part: &&String| part.split_once('=').is_some_and(|(key, _)| key == OVER);
        check_layers(1 + parts.iter().filter(is_over).count())?;
        disk(parts)
    }
}

/// Checks the number of layers of a disk.
pub(super) fn check_layers(layers: usize) -> Result<()> {
    ensure!(
        layers <= LAYERS_MAX,
        "it has {layers} layers of disks; at most {LAYERS_MAX} are supported"
    );
    Ok(())
}

fn disk(parts: &[String]) -> Result<DiskSpec> {
    let Some((first, rest)) = parts.split_first() else { bail!("the name of the disk is empty") };
    let (kind, mut parts) = kind_of(first)?;
    parts.extend_from_slice(rest);
    let words = Parts::new(&parts).finish_variant::<Words>(&kind);
    words.map_err(|error| explain(error, &kind))?.into_disk()
}

/// The kind of a disk, and the keys that its short form stands for, from the part up to the first
/// comma.
fn kind_of(first: &str) -> Result<(String, Vec<String>)> {
    if ["/", "./", "../"].iter().any(|start| first.starts_with(start)) {
        return Ok(("file".to_owned(), vec![format!("path={first}")]));
    }
    let Some((scheme, rest)) = first.split_once(':') else {
        return Ok((first.to_owned(), Vec::new()));
    };
    // Schemes of URIs have no case.
    let kind = if rest.starts_with("//") { scheme.to_ascii_lowercase() } else { scheme.to_owned() };
    let parts = match &*kind {
        "file" | "qcow2" => vec![format!("path={rest}")],
        "null" => vec![format!("size={rest}")],
        "rbd" => parts_of_image(rest)?,
        "nbd" | "nbd+unix" | "nbds" | "nbds+unix" => {
            return Ok(("nbd".to_owned(), parts_of_uri(first)?));
        }
        "raw" | "luks" | "image" => bail!("disk kind {kind} has no short form"),
        _ => Vec::new(),
    };
    Ok((kind, parts))
}

/// An error about the words of a disk, with advice.
fn explain(error: Error, kind: &str) -> anyhow::Error {
    match error {
        Error::UnknownWord { word, expected } => {
            let expected = expected.join(", ");
            // A name with a slash or a suffix is a file name.
            let advice = match word.contains(['/', '.']) {
                true => format!("); for a file with this name, write ./{word}"),
                false => "; or the path of a file that begins with /, ./ or ../)".to_owned(),
            };
            anyhow!("unknown disk kind '{word}' (expected: {expected}{advice}")
        }
        Error::UnknownKey { key, expected } => {
            let expected = expected.join(", ");
            anyhow!("unknown key '{key}' of disk kind {kind} (expected: {expected})")
        }
        Error::MissingKey(_) => anyhow!(match kind {
            "file" => "a file needs a path, as in file,path=disk.img",
            "null" => "a null disk needs a size, as in null,size=64G",
            "rbd" => "an image needs a name, as in rbd,pool=vms,image=vm1",
            "image" => "it needs a format, as in image,format=auto,path=disk.img",
            "luks" => {
                "it needs an underlying disk; name one, as in \
                 luks,key-file=disk.key,over=file,path=disk.img"
            }
            _ =>
                "it needs an underlying disk; name one, as in \
                 raw,offset=1M,over=file,path=disk.img",
        }),
        Error::Other(_) => error.into(),
    }
}

impl Words {
    fn into_disk(self) -> Result<DiskSpec> {
        Ok(match self {
            Self::File { path } => DiskSpec::File(path),
            Self::Null { size } => DiskSpec::Null { size_bytes: size.0 },
            Self::Nbd(nbd) => {
                nbd.check()?;
                DiskSpec::Nbd(nbd)
            }
            Self::Rbd(image) => DiskSpec::Rbd(image),
            Self::Raw { offset, size, over } => DiskSpec::Raw {
                offset_bytes: offset.map_or(0, |offset| offset.0),
                size_bytes: size.map(|size| size.0),
                over: below(&over)?,
            },
            Self::Luks { key_file, key_fd, header, discard, over } => {
                let key = match (key_file, key_fd) {
                    (Some(path), None) => KeySpec::File(path),
                    (None, Some(fd)) => KeySpec::Fd(fd),
                    _ => bail!("a LUKS disk needs its key in one place: key-file=PATH or key-fd=N"),
                };
                let discard = discard.unwrap_or_default();
                DiskSpec::Luks { key, header, discard, over: below(&over)? }
            }
            Self::Qcow2 { path, backing, over } => {
                let over = file_or_below(path, over, "qcow2,path=disk.qcow2")?;
                DiskSpec::Qcow2 { backing: backing.unwrap_or_default(), over }
            }
            Self::Image { path, format, backing, over } => {
                ensure!(
                    format == "auto",
                    "format={format} is not supported: disk kind image detects the format \
                     (format=auto); to set the format, use its disk kind, as in \
                     qcow2,path=disk.qcow2"
                );
                let over = file_or_below(path, over, "image,format=auto,path=disk.img")?;
                let backing = backing.unwrap_or_default();
                DiskSpec::Image { format: ImageFormat::Auto, backing, over }
            }
        })
    }
}

/// The disk below a layer.
fn below(parts: &[String]) -> Result<Box<DiskSpec>> {
    let disk = disk(parts).with_context(|| format!("in {OVER}={}", redact_spec_parts(parts)))?;
    Ok(Box::new(disk))
}

/// The disk below a layer, which may be named by the path of a file.
fn file_or_below(path: Path, over: Option<Below>, example: &str) -> Result<Box<DiskSpec>> {
    match (path, over) {
        (Some(path), None) => Ok(Box::new(DiskSpec::File(path))),
        (None, Some(over)) => below(&over),
        (Some(_), Some(_)) => bail!("path and {OVER} name two disks; leave one out"),
        (None, None) => bail!("it needs an underlying disk; name one, as in {example}"),
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
            Ok(disk @ DiskSpec::Rbd(_)) => disk.to_string(),
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
    fn an_error_names_the_fault_and_the_possible_words() {
        let deep = "raw,over=".repeat(16) + "null:1M";
        assert!(DiskSpec::parse(&deep["raw,over=".len()..]).is_ok());
        for (bad, expected) in [
            (
                "qcow3,path=x",
                "unknown disk kind 'qcow3' (expected: file, null, nbd, rbd, raw, luks, qcow2,",
            ),
            ("rbd9:x", "unknown disk kind 'rbd9'"),
            ("vms/disk.img", "for a file with this name, write ./vms/disk.img"),
            ("disk.img", "for a file with this name, write ./disk.img"),
            (
                "/srv/a,b.img",
                "'b.img' is not of the form KEY=VALUE; write a comma in a value twice",
            ),
            ("raw,offset=1M", "it needs an underlying disk; name one"),
            ("raw:1M", "has no short form"),
            ("raw,path=x", "unknown key 'path' of disk kind raw (expected: offset, size, over)"),
            ("raw,over=null,path=x", "in over=null,path=x: unknown key 'path' of disk kind null"),
            ("raw,over=null:1M,offset=1M", "unknown key 'offset' of disk kind null"),
            ("null,size=1M,size=1M", "size is given twice"),
            ("file,path=a,path=b", "path is given twice"),
            ("raw,offset=1,offset=1,over=/a", "offset is given twice"),
            ("luks,over=/a", "key-file=PATH or key-fd=N"),
            ("luks,key-file=/k,key-fd=3,over=/a", "key-file=PATH or key-fd=N"),
            ("luks,key-fd=x,over=/a", "key-fd: it must be a whole number"),
            ("luks,key-fd=3,discard=yes,over=/a", "discard is 'yes' (expected: on, off)"),
            ("luks,key=secret,over=/a", "unknown key 'key' of disk kind luks"),
            ("qcow2,backing=a:,path=/a", "backing: 'a:' has an empty name"),
            ("qcow2,path=/a,over=/b", "path and over name two disks"),
            ("qcow2", "it needs an underlying disk; name one, as in qcow2,path=disk.qcow2"),
            ("image,path=/a", "it needs a format"),
            ("image,format=qcow2,path=/a", "to set the format, use its disk kind"),
            ("null,size", "'size' is not of the form KEY=VALUE"),
            ("null,user:hidden@h=1", "unknown key 'user:***@h' of disk kind null"),
            ("hidden@h", "unknown disk kind '***@h'"),
            ("null,size=x", "size: "),
            ("rbd,pool=p", "an image needs a name"),
            ("rbd:p/n/x/a", "has too many parts"),
            ("rbd:p/@s", "'p/@s' has an empty part"),
            ("rbd:p/a:id=x:key=secret", "options of an image after commas"),
            ("rbd:a,exclusive=yes", "exclusive is 'yes' (expected: on, off)"),
            ("rbd:a,key=secret", "unknown key 'key' of disk kind rbd"),
            (&deep, "it has 17 layers of disks; at most 16 are supported"),
        ] {
            let error = format!("{:#}", DiskSpec::parse(bad).unwrap_err());
            assert!(error.contains(expected), "{bad}: {error}");
        }
    }
}
