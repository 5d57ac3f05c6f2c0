//! What `--disk` and `--blk-file` name.

use std::path::PathBuf;

use anyhow::{Context, Error, Result, bail};
use clap::ValueEnum;
use ringhaul_options::parse_size;

use crate::spec::{CacheMode, DiskSpec};

pub(super) fn parse_disk(text: &str) -> Result<DiskSpec> {
    let mut parts = text.split(',');
    let kind = parts.next().unwrap_or_default();
    if !["null", "file"].contains(&kind) {
        bail!("unknown disk kind '{kind}' (expected: null, file)");
    }
    let mut size = None;
    let mut path = None;
    let mut keys = Keys::default();
    for part in parts {
        keys.check(part)?;
        match (kind, part.split_once('=')) {
            ("null", Some(("size", value))) => {
                size = Some(parse_size(value).map_err(Error::msg)?);
            }
            ("file", Some(("path", value))) if !value.is_empty() => {
                path = Some(PathBuf::from(value))
            }
            ("file", Some(("path", _))) => {}
            _ => bail!("'{part}' is not an option of disk kind {kind}"),
        }
    }
    match (kind, size, path) {
        ("null", Some(size_bytes), _) => Ok(DiskSpec::Null { size_bytes }),
        ("file", _, Some(path)) => Ok(DiskSpec::File(path)),
        ("null", ..) => bail!("a null disk needs a size, as in null,size=64G"),
        _ => bail!("a file needs a path, as in file,path=disk.img"),
    }
}

/// The keys of a list that were seen. One that comes twice has two meanings, of which we would have
/// to choose one in silence.
#[derive(Default)]
pub(super) struct Keys(Vec<String>);

impl Keys {
    /// Refuses a `KEY=VALUE` whose key was seen before.
    pub(super) fn check(&mut self, part: &str) -> Result<()> {
        let key = part.split_once('=').map_or(part, |(key, _)| key);
        if self.0.iter().any(|seen| seen == key) {
            bail!("{key} is given twice; leave one of them out");
        }
        self.0.push(key.to_owned());
        Ok(())
    }
}

/// The parts of a list; two commas stand for one in a part.
pub(super) fn split_at_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match (character, parts.last_mut()) {
            (',', _) if characters.peek() != Some(&',') => parts.push(String::new()),
            (',', Some(part)) => part.extend(characters.next()),
            (_, Some(part)) => part.push(character),
            (_, None) => {}
        }
    }
    parts
}

pub(super) fn parse_cache(value: &str) -> Result<CacheMode> {
    let mode = CacheMode::from_str(value, false).map_err(anyhow::Error::msg);
    mode.context("it must be none, directsync, writeback or writethrough")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_understood() {
        let null = |size_bytes| Some(DiskSpec::Null { size_bytes });
        assert_eq!(parse_disk("null,size=64G").ok(), null(64 << 30));
        assert_eq!(parse_disk("null,size=512").ok(), null(512));
        assert_eq!(parse_disk("file,path=a=b").ok(), Some(DiskSpec::File("a=b".into())));
        for bad in [
            "null",
            "null,size=1X",
            "null,size=99999999999T",
            "null,size=",
            "null,path=x",
            "file",
            "qcow2,path=x",
            "",
        ] {
            assert!(parse_disk(bad).is_err(), "{bad} was taken");
        }
        for twice in ["null,size=1M,size=2M", "null,size=1M,size=1M", "file,path=a,path=b"] {
            let error = parse_disk(twice).unwrap_err().to_string();
            assert!(error.contains("is given twice"), "{twice}: {error}");
        }
    }
}
