//! One export: which disk on which socket, from the options as a whole or from `--export`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockio::{DiskOptions, DiskSource};
use clap::ValueEnum;

use super::disk::{DiskSpec, Keys, parse_disk, parse_size};
use super::{CacheMode, ServeArgs, parse_queue_size, parse_serial};
use crate::blk::config::{BlkOptions, QUEUES_MAX, SERIAL_BYTES};

/// Where front-ends come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndpointSpec {
    /// A socket to be made at this path.
    Path(PathBuf),
    /// A descriptor that was inherited.
    Fd(i32),
}

/// What one export is to be.
#[derive(Debug, Clone)]
pub struct ExportSpec {
    /// Where front-ends come from.
    pub endpoint: EndpointSpec,
    disk: DiskSpec,
    read_only: bool,
    no_lock: bool,
    cache: Option<CacheMode>,
    serial: Option<String>,
    logical_block_bytes: Option<u32>,
    num_queues: u16,
    queue_size: u16,
    /// The one IoThread that serves all its queues; `None`: they are spread.
    pub iothread: Option<u16>,
    notify_batch: bool,
    fixed_buffers: bool,
}

/// A disk that is open, and the options of its device.
pub struct OpenDisk {
    /// The disk.
    pub source: DiskSource,
    /// The device on it.
    pub options: BlkOptions,
    /// One line on what was opened.
    pub summary: String,
}

impl ServeArgs {
    /// Every export that the options name, at least one.
    ///
    /// # Errors
    ///
    /// When there is none, or one makes no sense.
    pub fn exports(&self) -> Result<Vec<ExportSpec>> {
        let has_disk = self.blk_file.is_some() || self.disk.is_some();
        let has_socket = self.socket_path.is_some() || self.fd.is_some();
        let mut exports = Vec::new();
        if has_disk || has_socket || self.export.is_empty() {
            exports.push(self.main_export()?);
        }
        for text in &self.export {
            let export = self
                .parse_export(text)
                .with_context(|| format!("cannot understand --export {text}"))?;
            exports.push(export);
        }
        for iothread in exports.iter().filter_map(|export| export.iothread) {
            if iothread >= self.iothreads {
                bail!(
                    "there is no IoThread {iothread}; with --iothreads {} they are 0 to {}",
                    self.iothreads,
                    self.iothreads - 1
                );
            }
        }
        Ok(exports)
    }

    fn main_export(&self) -> Result<ExportSpec> {
        let disk = match (&self.blk_file, &self.disk) {
            (Some(path), _) => DiskSpec::File(path.clone()),
            (None, Some(text)) => {
                parse_disk(text).with_context(|| format!("cannot understand --disk {text}"))?
            }
            (None, None) => bail!("no disk is named; use --blk-file PATH or --disk null,size=SIZE"),
        };
        let endpoint = match (&self.socket_path, self.fd) {
            (Some(path), _) => EndpointSpec::Path(path.clone()),
            (None, Some(fd)) => EndpointSpec::Fd(fd),
            (None, None) => bail!("no socket is named; use --socket-path PATH or --fd FD"),
        };
        Ok(self.spec(endpoint, disk))
    }

    /// An export with the options that hold for all.
    fn spec(&self, endpoint: EndpointSpec, disk: DiskSpec) -> ExportSpec {
        ExportSpec {
            endpoint,
            disk,
            read_only: self.read_only,
            no_lock: !self.lock.is_on(),
            cache: self.cache,
            serial: self.serial.clone(),
            logical_block_bytes: self.logical_block_size,
            num_queues: self.num_queues,
            queue_size: self.queue_size,
            iothread: self.iothread,
            notify_batch: self.switches.notify_batch.is_on(),
            fixed_buffers: self.fixed_buffers,
        }
    }

    fn parse_export(&self, text: &str) -> Result<ExportSpec> {
        // The two that every export has are put in below.
        let nothing = (EndpointSpec::Fd(-1), DiskSpec::Null { size_bytes: 0 });
        let mut spec = self.spec(nothing.0, nothing.1);
        // A serial number that holds for all would be that of several disks, and one IoThread for
        // all is what `--iothreads 1` is.
        spec.serial = None;
        spec.iothread = None;
        let (mut endpoint, mut disk) = (None, None);
        let mut keys = Keys::default();
        for part in split_at_commas(text) {
            let (key, value) = part
                .split_once('=')
                .filter(|(_, value)| !value.is_empty())
                .with_context(|| format!("'{part}' is not of the form KEY=VALUE"))?;
            keys.check(&part)?;
            if ["blk-file", "null"].contains(&key) && disk.is_some() {
                bail!("it names both blk-file and null; an export has one disk");
            }
            match key {
                "socket-path" => endpoint = Some(EndpointSpec::Path(value.into())),
                "blk-file" => disk = Some(DiskSpec::File(value.into())),
                "null" => disk = Some(DiskSpec::Null { size_bytes: parse_size(value)? }),
                _ => spec.set(key, value).with_context(|| format!("in '{part}'"))?,
            }
        }
        spec.endpoint = endpoint.context("it names no socket-path=PATH")?;
        spec.disk = disk.context("it names neither blk-file=PATH nor null=SIZE")?;
        Ok(spec)
    }
}

/// The parts of a list; two commas stand for one in a part.
fn split_at_commas(text: &str) -> Vec<String> {
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

impl ExportSpec {
    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "read-only" => {
                self.read_only = match value {
                    "on" => true,
                    "off" => false,
                    _ => bail!("read-only is on or off"),
                }
            }
            "lock" => {
                self.no_lock = match value {
                    "on" => false,
                    "off" => true,
                    _ => bail!("lock is on or off"),
                }
            }
            "cache" => {
                let mode = CacheMode::from_str(value, false).map_err(anyhow::Error::msg);
                self.cache =
                    Some(mode.context("cache is none, directsync, writeback or writethrough")?);
            }
            "serial" => self.serial = Some(parse_serial(value).map_err(anyhow::Error::msg)?),
            "logical-block-size" => {
                self.logical_block_bytes = Some(value.parse().context("it is a number of bytes")?);
            }
            "num-queues" => {
                self.num_queues = match value.parse() {
                    Ok(number @ 1..=QUEUES_MAX) => number,
                    _ => bail!("a number of queues is 1 to {QUEUES_MAX}"),
                }
            }
            "queue-size" => {
                self.queue_size = parse_queue_size(value).map_err(anyhow::Error::msg)?;
            }
            "iothread" => {
                self.iothread = Some(value.parse().context("it is the number of an IoThread")?);
            }
            _ => bail!(
                "there is no {key}; there are socket-path, blk-file, null, read-only, lock, \
                 cache, serial, logical-block-size, num-queues, queue-size and iothread"
            ),
        }
        Ok(())
    }

    /// Opens the disk.
    ///
    /// # Errors
    ///
    /// When it cannot be used.
    pub fn open_disk(&self) -> Result<OpenDisk> {
        let (source, cache, name) = match &self.disk {
            DiskSpec::File(path) => {
                let (source, cache) = self.open_file(path)?;
                (source, cache, path.display().to_string())
            }
            DiskSpec::Null { size_bytes } => {
                let source = DiskSource::null(*size_bytes, &self.disk_options(false))?;
                (source, self.cache.unwrap_or(CacheMode::None), "null disk".to_owned())
            }
        };
        let info = source.info();
        let summary = format!(
            "{} MiB, logical block {} bytes, cache {}{}",
            info.size_bytes >> 20,
            info.logical_block_bytes,
            name_of(cache),
            if info.read_only { ", read-only" } else { "" },
        );
        let options = BlkOptions {
            name,
            serial: self.serial.clone().unwrap_or_else(|| default_serial(source.identity())),
            num_queues: self.num_queues,
            queue_size: self.queue_size,
            write_cache: cache.has_write_cache(),
            notify_batch: self.notify_batch,
            fixed_buffers: self.fixed_buffers,
        };
        Ok(OpenDisk { source, options, summary })
    }

    fn disk_options(&self, direct: bool) -> DiskOptions {
        DiskOptions {
            direct,
            read_only: self.read_only,
            no_lock: self.no_lock,
            logical_block_bytes: self.logical_block_bytes,
        }
    }

    /// Opens a file as `--cache` says, or without it in the best way that works.
    fn open_file(&self, path: &Path) -> Result<(DiskSource, CacheMode)> {
        let cache = self.cache.unwrap_or(CacheMode::None);
        let error = match DiskSource::file(path, &self.disk_options(cache.is_direct())) {
            Ok(source) => return Ok((source, cache)),
            // Whoever has it in use has it in use with the page cache too.
            Err(error @ blockio::Error::InUse { .. }) => return Err(error.into()),
            Err(error) => error,
        };
        if cache.is_direct()
            && let Ok(source) = DiskSource::file(path, &self.disk_options(false))
        {
            if self.cache.is_some() {
                bail!("{error} (--cache writeback or --cache writethrough)");
            }
            tracing::warn!("{error}; falling back to --cache writeback");
            return Ok((source, CacheMode::Writeback));
        }
        Err(error.into())
    }
}

fn name_of(cache: CacheMode) -> String {
    cache.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// A serial number that follows from what the disk is, and tells nothing of it.
fn default_serial(identity: &str) -> String {
    if identity.is_empty() {
        return "null".to_owned();
    }
    // FNV-1a in 128 bits, 100 of them as base-32 digits.
    let hash =
        identity.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
            (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b)
        });
    let digit = |place: usize| {
        let value = u32::try_from(hash >> (128 - 5 * (place + 1)) & 31).unwrap_or(0);
        char::from_digit(value, 32).unwrap_or('0').to_ascii_uppercase()
    };
    (0..SERIAL_BYTES).map(digit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn exports(arguments: &[&str]) -> Result<Vec<ExportSpec>> {
        let arguments = [&["serve"], arguments].concat();
        Program::try_parse_from(arguments)?.args.exports()
    }

    #[test]
    fn an_export_has_its_own_options_and_those_of_all() {
        let all = exports(&[
            "--num-queues",
            "2",
            "--cache",
            "directsync",
            "--export",
            "socket-path=/a,,b.sock,blk-file=/srv/x=y.img,read-only=on",
            "--export",
            "socket-path=/c.sock,null=1G,cache=writeback,num-queues=7,serial=s",
        ])
        .unwrap();
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].endpoint, EndpointSpec::Path("/a,b.sock".into()));
        assert_eq!(all[0].disk, DiskSpec::File("/srv/x=y.img".into()));
        assert!(all[0].read_only && all[0].cache == Some(CacheMode::Directsync));
        assert_eq!((all[0].num_queues, all[1].num_queues), (2, 7));
        assert_eq!(all[1].disk, DiskSpec::Null { size_bytes: 1 << 30 });
        assert!(!all[1].read_only && all[1].cache == Some(CacheMode::Writeback));
        assert_eq!(all[1].serial.as_deref(), Some("s"));
    }

    #[test]
    fn an_export_may_have_an_io_thread_to_itself() {
        let plain = ["--iothreads", "3", "--iothread", "1", "--socket-path", "/a", "--disk"];
        let plain = [&plain[..], &["null,size=1M"]].concat();
        let with = |more: &str| {
            let more = format!("socket-path=/b,null=1M{more}");
            exports(&[&plain[..], &["--export", &more]].concat())
        };
        let threads = |more: &str| {
            let all = with(more).unwrap();
            all.iter().map(|export| export.iothread).collect::<Vec<_>>()
        };
        assert_eq!(threads(""), [Some(1), None]);
        assert_eq!(threads(",iothread=2"), [Some(1), Some(2)]);
        let error = with(",iothread=3").unwrap_err().to_string();
        assert_eq!(error, "there is no IoThread 3; with --iothreads 3 they are 0 to 2");
        assert!(with(",iothread=x").is_err());
    }

    #[test]
    fn the_plain_options_are_an_export_too() {
        let plain = ["--socket-path", "/a.sock", "--blk-file", "/x.img"];
        let more = ["--export", "socket-path=/b.sock,null=1M"];
        assert_eq!(exports(&plain).unwrap().len(), 1);
        assert_eq!(exports(&[&plain[..], &more[..]].concat()).unwrap().len(), 2);
        assert!(exports(&[]).unwrap_err().to_string().contains("no disk is named"));
        assert!(exports(&plain[..2]).is_err() && exports(&plain[2..]).is_err());
    }

    #[test]
    fn an_export_that_makes_no_sense_is_refused() {
        for bad in [
            "",
            "socket-path=/a",
            "blk-file=/x",
            "socket-path=,blk-file=/x",
            "socket-path=/a,blk-file=/x,size=3",
            "socket-path=/a,blk-file=/x,read-only=yes",
            "socket-path=/a,blk-file=/x,cache=fast",
            "socket-path=/a,blk-file=/x,num-queues=0",
            "socket-path=/a,blk-file=/x,num-queues=257",
            "socket-path=/a,blk-file=/x,queue-size=3",
            "socket-path=/a,blk-file=/x,logical-block-size=big",
            "socket-path=/a,null=1X",
            "socket-path=/a,socket-path=/b,null=1M",
            "socket-path=/a,null=1M,null=1M",
            "socket-path=/a,null=1M,blk-file=/x",
            "socket-path=/a,null=1M,serial=a,serial=b",
        ] {
            assert!(exports(&["--export", bad]).is_err(), "{bad} was taken");
        }
    }

    #[test]
    fn serials_are_full_printable_and_apart() {
        let of = |inode: u32| default_serial(&format!("file system [1, 2], inode {inode}"));
        let serials: std::collections::BTreeSet<_> = (0..10_000).map(of).collect();
        assert_eq!(serials.len(), 10_000);
        for serial in serials {
            assert_eq!(serial.len(), SERIAL_BYTES);
            assert!(serial.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{serial}");
        }
        // What was told once is told again, whatever the version.
        assert_eq!(of(7), default_serial("file system [1, 2], inode 7"));
        assert_eq!(default_serial(""), "null");
    }
}
