//! `ringhaul disk`: reports the properties of a disk without serving it.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use blockio::disk::ExtentKind;
use blockio::disk::engine_trial::best_engine;
use blockio::{DiskSource, IoThread, IoThreadConfig};
use clap::Args;
use disks::DiskSpec;
use disks::open::{CancelToken, with_hang_timeout};
use disks::spec::redact_spec;
use ringhaul::open::disk::OpenDisk;
use ringhaul::spec::{CacheMode, ExportSettings};
use ringhaul_options::redact::{escape_controls, escape_json};
use serde::Serialize;

/// The time-out for opening a disk. It exceeds the 30 s after which an unreachable cluster is
/// reported.
const OPEN_MAX: Duration = Duration::from_secs(35);

/// A disk of the command line.
#[derive(Debug, Clone, Args)]
pub(crate) struct DiskArgs {
    /// The disk, as `--disk` of `serve` names it, or a file.
    #[arg(value_name = "DISK")]
    disk: String,
    /// The cache, as `--cache` of `serve`.
    #[arg(long, value_name = "MODE")]
    cache: Option<CacheMode>,
}

/// Options of `ringhaul disk info`.
#[derive(Debug, Clone, Args)]
pub(crate) struct InfoArgs {
    #[command(flatten)]
    disk: DiskArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The properties of a disk.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Info {
    disk: DiskSpec,
    size_bytes: u64,
    logical_block_bytes: u32,
    physical_block_bytes: u32,
    format: String,
    /// The disk, followed by the layers below it.
    chain: Vec<String>,
    cache: CacheMode,
    engine: Option<String>,
    engine_reason: Option<String>,
    can: Can,
    /// The unit of a discard.
    discard_bytes: Option<u32>,
    /// Bytes of known holes. `None` if there are too many to count.
    hole_bytes: Option<u64>,
    identity: String,
    /// A warning about the content, for the owner of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
}

/// Capabilities of the disk when it is open for writing.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Can {
    flush: bool,
    discard: bool,
    write_zeroes: bool,
    resize: bool,
    lock: bool,
    snapshots: bool,
}

impl DiskArgs {
    /// The name of the disk.
    pub(crate) fn name(&self) -> &str {
        &self.disk
    }

    /// Opens the disk.
    ///
    /// # Errors
    ///
    /// When the name is invalid, or the disk cannot be used.
    pub(crate) fn open(&self, read_only: bool, no_lock: bool) -> Result<DiskSource> {
        let open = |token: &CancelToken| self.open_with(read_only, no_lock, token);
        Ok(with_hang_timeout(OPEN_MAX, open)?.1.source)
    }

    fn open_with(
        &self,
        read_only: bool,
        no_lock: bool,
        token: &CancelToken,
    ) -> Result<(DiskSpec, OpenDisk)> {
        // Accepts the plain name of an existing file, because users type the names that they see.
        let is_plain = !self.disk.contains([':', ',', '=']);
        let disk = match is_plain && Path::new(&self.disk).exists() {
            true => DiskSpec::File(self.disk.clone().into()),
            false => DiskSpec::parse(&self.disk).with_context(|| {
                format!("cannot understand the disk {}", redact_spec(&self.disk))
            })?,
        };
        let settings =
            ExportSettings { read_only, no_lock, cache: self.cache, ..ExportSettings::default() };
        let named = (disk, settings);
        let open = OpenDisk::open(&named, None, token, None)?;
        Ok((named.0, open))
    }
}

/// Prints the properties of a disk. The disk may be in use.
///
/// # Errors
///
/// When it cannot be opened.
pub(crate) fn info(args: &InfoArgs) -> Result<ExitCode> {
    let info = with_hang_timeout(OPEN_MAX, |token| Info::read(&args.disk, token))?;
    let text = match args.json {
        true => {
            let json = serde_json::to_string_pretty(&info).context("cannot write JSON")?;
            escape_json(json + "\n")
        }
        false => info.to_string(),
    };
    let printed = std::io::stdout().write_all(text.as_bytes());
    printed.context("cannot write to standard output")?;
    Ok(ExitCode::SUCCESS)
}

impl Info {
    fn read(disk: &DiskArgs, token: &CancelToken) -> Result<Self> {
        let (disk, open) = disk.open_with(true, true, token)?;
        token.while_reading(&open.source, || Ok(Self::new(disk, &open)))
    }

    fn new(disk: DiskSpec, open: &OpenDisk) -> Self {
        let (source, info) = (&open.source, open.source.info());
        let (engine, engine_reason) = match source.has_engine() {
            true => {
                let best = best_engine(source);
                (Some(best.engine.to_string()), Some(best.why))
            }
            false => (None, None),
        };
        let abilities = source.abilities();
        let chain = source.chain();
        Self {
            disk,
            size_bytes: info.size_bytes,
            logical_block_bytes: info.logical_block_bytes,
            physical_block_bytes: info.physical_block_bytes,
            format: source.format().to_owned(),
            chain: chain.iter().map(ToString::to_string).collect(),
            cache: open.cache,
            engine,
            engine_reason,
            can: Can {
                flush: abilities.flush,
                discard: abilities.discard,
                write_zeroes: abilities.zeroes,
                resize: abilities.resize,
                lock: abilities.lock,
                snapshots: abilities.snapshots,
            },
            discard_bytes: source.discard_bytes(),
            hole_bytes: hole_bytes(source),
            identity: source.identity().to_owned(),
            warning: source.warning(),
        }
    }
}

/// Counts the bytes of holes. `None` if they cannot be counted, or not soon.
fn hole_bytes(source: &DiskSource) -> Option<u64> {
    const EXTENTS_MAX: usize = 4096;
    let thread = IoThread::new(&IoThreadConfig::default()).ok()?;
    let (disk, size) = (source.attach(thread.io()), source.info().size_bytes);
    let (mut offset, mut holes) = (0, 0);
    for _ in 0..EXTENTS_MAX {
        if offset == size {
            return Some(holes);
        }
        let extent = thread.block_on(disk.block_status(offset, size - offset)).ok()?.ok()?;
        offset += extent.bytes;
        holes += if extent.kind == ExtentKind::Hole { extent.bytes } else { 0 };
    }
    None
}

impl std::fmt::Display for Info {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let can = &self.can;
        let all = [
            ("flush", can.flush),
            ("discard", can.discard),
            ("write zeroes", can.write_zeroes),
            ("resize", can.resize),
            ("lock", can.lock),
            ("snapshots", can.snapshots),
        ];
        let can: Vec<&str> = all.iter().filter(|(_, can)| *can).map(|(what, _)| *what).collect();
        let mut size = format!("{} bytes", self.size_bytes);
        if self.size_bytes >= 1 << 20 {
            write!(size, ", {} MiB", self.size_bytes >> 20)?;
        }
        let blocks =
            format!("{} bytes, physical {}", self.logical_block_bytes, self.physical_block_bytes);
        let mut rows = vec![("size", size), ("blocks", blocks), ("format", self.format.clone())];
        rows.extend(self.chain.iter().map(|link| ("made of", link.clone())));
        rows.push(("cache", self.cache.to_string()));
        if let (Some(engine), Some(why)) = (&self.engine, &self.engine_reason) {
            rows.push(("engine", format!("{engine}: {why}")));
        }
        rows.push(("can", can.join(", ")));
        if let Some(bytes) = self.discard_bytes {
            rows.push(("discards", format!("in units of {bytes} bytes")));
        }
        if let Some(bytes @ 1..) = self.hole_bytes {
            rows.push(("holes", format!("{bytes} bytes")));
        }
        rows.push(("identity", self.identity.clone()));
        rows.extend(self.warning.iter().map(|warning| ("warning", warning.clone())));
        for (name, what) in rows.iter().filter(|(_, what)| !what.is_empty()) {
            writeln!(f, "{name:<9} {}", escape_controls(what))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn read(name: &str) -> Result<Info> {
        let args = DiskArgs { disk: name.to_owned(), cache: None };
        Info::read(&args, &CancelToken::default())
    }

    #[test]
    fn a_disk_is_described_though_it_is_in_use() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4 << 20).unwrap();
        let path = file.path().display().to_string();
        let args = DiskArgs { disk: path.clone(), cache: None };
        let _in_use = args.open(false, false).unwrap();
        let info = read(&format!("raw,offset=1M,over={path}")).unwrap();
        assert_eq!(info.size_bytes, 3 << 20);
        assert_eq!(info.chain, ["raw all bytes from 1048576".to_owned(), format!("file {path}")]);
        assert!(info.can.flush && info.can.resize && info.engine.is_some());
        let text = info.to_string();
        for line in
            ["size      3145728 bytes, 3 MiB\n", "made of   raw all bytes", "can       flush"]
        {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(info.hole_bytes, Some(3 << 20));
        file.as_file().write_all_at(&[1; 4096], 2 << 20).unwrap();
        let text = read(&path).unwrap().to_string();
        assert!(text.contains("holes     4190208 bytes\n"), "{text}");
        let null = read("null:1K").unwrap();
        assert!(null.engine.is_none() && !null.can.flush && !null.to_string().contains("identity"));
    }

    #[test]
    fn a_disk_that_does_not_open_has_its_reason_in_one_line() {
        for (name, expected) in [
            ("disk.img", "cannot understand the disk disk.img: unknown disk kind 'disk.img'"),
            ("/nowhere/disk.img", "check the path"),
            ("raw,offset=1M,over=null:1M", "choose a smaller offset"),
        ] {
            let error = format!("{:#}", read(name).err().unwrap());
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
    }
}
