//! Opens the disks of exports.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use blockio::disk::hand_over::DiskHandOver;
use blockio::file::FileTable;
use blockio::{DiskOptions, DiskSource};
use disks::DiskSpec;
use disks::open::{CancelToken, DiskOpener};
use disks::spec::DiskPlace;
use rustix::fs::{OFlags, fcntl_getfl};

use crate::sandbox;
use crate::spec::file_record::open_recorded;
use crate::spec::{CacheMode, ExportSettings, UnitPlace};

/// Files that came with a command, by the place of the disk that uses them. `None`: the disk of a
/// virtio-blk device.
pub(crate) type PassedFiles = BTreeMap<Option<UnitPlace>, Arc<FileTable>>;

/// An open disk of an export.
pub struct OpenDisk {
    /// The name of the disk in the log.
    pub(crate) name: String,
    /// The disk itself.
    pub source: DiskSource,
    /// The time at which opening began.
    pub(crate) opened: Instant,
    /// The cache mode with which it was opened.
    pub cache: CacheMode,
    /// True if it is locked only during the turns of guests.
    pub(crate) is_late: bool,
    /// Description of the disk in one line.
    pub(crate) summary: String,
}

impl OpenDisk {
    /// Like [`open`](Self::open), but waits for a disk that is in use without a visible holder: a
    /// killed daemon may have left operations in the kernel, which hold the disk until they end.
    /// `waits` is called when that is so.
    ///
    /// # Errors
    ///
    /// When the disk cannot be used, or was cancelled.
    pub(crate) fn open_waiting(
        disk: &(DiskSpec, ExportSettings),
        lease_id: Option<u64>,
        token: &CancelToken,
        waits: &dyn Fn(),
    ) -> Result<Self> {
        let passed = None;
        let (mut is_logged, mut has_yielded, mut at_once) = (false, false, true);
        let mut again = IMMEDIATE_RETRIES;
        while token.is_active() {
            let error = match Self::open_as(disk, lease_id, at_once, (token, passed)) {
                Err(error) if at_once && again > 0 && has_no_visible_holder(&error) => {
                    again -= 1;
                    pause();
                    continue;
                }
                Err(error) if has_no_visible_holder(&error) => error,
                // A visible holder gets time to end.
                Err(error) if at_once && is_in_use(&error) => {
                    at_once = false;
                    continue;
                }
                result => return result,
            };
            // Disks that are free need not wait for these attempts, each of which takes time.
            if !std::mem::replace(&mut has_yielded, true) {
                waits();
            }
            if !std::mem::replace(&mut at_once, false) && !std::mem::replace(&mut is_logged, true) {
                tracing::warn!("{error:#}; the daemon waits for it");
            }
        }
        bail!("opening {} was cancelled", disk.0.name())
    }

    /// Opens a disk of an export for a [lease id](DiskOptions::user), perhaps with files that were
    /// passed.
    ///
    /// # Errors
    ///
    /// When it cannot be used, or was cancelled and does not answer.
    pub fn open(
        disk: &(DiskSpec, ExportSettings),
        lease_id: Option<u64>,
        token: &CancelToken,
        passed: Option<&Arc<FileTable>>,
    ) -> Result<Self> {
        Self::open_as(disk, lease_id, false, (token, passed))
    }

    /// Opens a disk, with `at_once` without a wait for one that is in use.
    fn open_as(
        (disk, settings): &(DiskSpec, ExportSettings),
        lease_id: Option<u64>,
        at_once: bool,
        (cancel_token, passed): (&CancelToken, Option<&Arc<FileTable>>),
    ) -> Result<Self> {
        let opened = Instant::now();
        let files = match (passed, &settings.files) {
            (Some(passed), _) => Some(Arc::clone(passed)),
            (None, Some(named)) => Some(Arc::new(open_recorded(named, settings.opens_unlocked())?)),
            (None, None) => None,
        };
        let kept = files.clone();
        let options = DiskOptions { user: lease_id, at_once, files, ..disk_options(settings) };
        let mut cache = None;
        let open_file = &mut |path: &Path, options: &DiskOptions| {
            let (source, used) = open_file(path, options, settings.cache)?;
            cache.get_or_insert(used);
            Ok(source)
        };
        let opener = DiskOpener { options, cancel_token, is_handed_over: false, open_file };
        let source = opener.open(disk).map_err(|error| with_advice(error, disk))?;
        let source = source.with_files(kept);
        check_late_lock(&source, settings)?;
        if let Some(warning) = source.warning() {
            tracing::warn!("{}: {warning}", disk.name());
        }
        let cache = cache.unwrap_or(wanted_cache(settings));
        Ok(Self::new(disk.name(), source, opened, (cache, settings.late_lock)))
    }

    /// Takes over a disk of this size from another process, which has it open for an export with
    /// these settings. `file` is the one file of the disk that is written to, `files` are the files
    /// that a third program had opened for the disk.
    ///
    /// # Errors
    ///
    /// When it cannot be used here.
    pub(crate) fn take_over(
        (disk, settings): &(DiskSpec, ExportSettings),
        (mut file, files): (Option<File>, Option<Arc<FileTable>>),
        size_bytes: u64,
    ) -> Result<Self> {
        let mut cache = None;
        let open_file = &mut |path: &Path, options: &DiskOptions| match (file.take(), cache) {
            (Some(file), _) => {
                let (source, used) = take_file(file, path, options, wanted_cache(settings))?;
                cache = Some(used);
                Ok(source)
            }
            // Backing files are opened again: only the file that is written to is handed over.
            (None, Some(_)) => Ok(open_file(path, options, settings.cache)?.0),
            (None, None) => bail!("{} was handed over without a descriptor", path.display()),
        };
        let cancel_token = &CancelToken::default();
        let options = DiskOptions { files: files.clone(), ..disk_options(settings) };
        let opener = DiskOpener { options, cancel_token, is_handed_over: true, open_file };
        let source = opener.open(disk)?.with_files(files);
        if file.is_some() {
            bail!("{disk} was handed over with a superfluous descriptor");
        }
        source.adopt_size(size_bytes);
        let cache = cache.unwrap_or(wanted_cache(settings));
        Ok(Self::new(disk.name(), source, Instant::now(), (cache, settings.late_lock)))
    }

    fn new(
        name: String,
        source: DiskSource,
        opened: Instant,
        (cache, late_lock): (CacheMode, bool),
    ) -> Self {
        let is_late = late_lock && source.late_lock().is_some();
        let info = source.info();
        // A null disk has no data that a cache could keep.
        let is_null = source.chain().last().is_some_and(|bottom| bottom.kind == "null");
        let cached = if is_null { String::new() } else { format!(", cache {cache}") };
        let summary = format!(
            "{} MiB, logical block {} bytes{cached}{}",
            info.size_bytes >> 20,
            info.logical_block_bytes,
            if info.read_only { ", read-only" } else { "" },
        );
        Self { name, source, opened, cache, is_late, summary }
    }
}

/// Refuses a late lock for a disk that keeps no data, and for a file system without locks.
fn check_late_lock(source: &DiskSource, settings: &ExportSettings) -> Result<()> {
    if !settings.late_lock || settings.read_only {
        return Ok(());
    }
    let lock = source.late_lock().with_context(|| {
        format!(
            "{} cannot be locked late, because it keeps no data; use --lock on or --lock off",
            source.chain_text()
        )
    })?;
    Ok(lock.check()?)
}

/// Adds advice to an error if the sandbox is its reason.
fn with_advice(error: anyhow::Error, disk: &DiskSpec) -> anyhow::Error {
    let is_denied = error.chain().any(is_denied);
    let advice = disk.places().iter().find_map(|place| match place {
        DiskPlace::Data(path) | DiskPlace::Read(path) | DiskPlace::ReadFolder(path) => {
            if is_denied { sandbox::advice_on_disk(path) } else { None }
        }
        // A client of a network may state a reason of its own in place of the kernel's.
        DiskPlace::LocalServer(_) | DiskPlace::Server(_) | DiskPlace::Ceph(_) => {
            sandbox::advice_on_server().map(str::to_owned)
        }
        DiskPlace::ReadAnywhere => None,
    });
    match advice {
        Some(advice) => anyhow!("{error:#}; {advice}"),
        None => error,
    }
}

/// Returns true if the kernel has denied an access.
fn is_denied(error: &(dyn std::error::Error + 'static)) -> bool {
    let of_disk = error.downcast_ref::<blockio::Error>().and_then(blockio::Error::system_error);
    let error = of_disk.or_else(|| error.downcast_ref::<std::io::Error>());
    error.is_some_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

/// The number of immediate retries. Two processes that open a disk at the same moment may refuse
/// each other, and see no holder afterwards.
const IMMEDIATE_RETRIES: u32 = 4;

/// Waits for some milliseconds, with different lengths for successive callers.
fn pause() {
    static PAUSES: AtomicU64 = AtomicU64::new(0);
    let number = PAUSES.fetch_add(1, Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(1 + 5 * (number % 4)));
}

fn is_in_use(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(blockio::Error::InUse { .. }))
}

fn has_no_visible_holder(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(blockio::Error::InUse { is_user_known: false, .. }))
}

/// The cache mode of a disk whose file supports it.
fn wanted_cache(settings: &ExportSettings) -> CacheMode {
    settings.cache.unwrap_or(CacheMode::None)
}

fn disk_options(settings: &ExportSettings) -> DiskOptions {
    DiskOptions {
        direct: wanted_cache(settings).is_direct(),
        read_only: settings.read_only,
        no_lock: settings.opens_unlocked(),
        late_lock: settings.late_lock && !settings.read_only,
        logical_block_bytes: settings.logical_block_bytes,
        ..DiskOptions::default()
    }
}

/// Takes a file that another process has opened.
fn take_file(
    file: File,
    path: &Path,
    options: &DiskOptions,
    wanted: CacheMode,
) -> Result<(DiskSource, CacheMode)> {
    let direct = fcntl_getfl(&file)
        .map(|flags| flags.contains(OFlags::DIRECT))
        .with_context(|| format!("cannot use the descriptor of {}", path.display()))?;
    // The old process fell back to the page cache if direct I/O did not work.
    let cache = if direct == options.direct { wanted } else { CacheMode::Writeback };
    let options = DiskOptions { direct, ..options.clone() };
    Ok((DiskHandOver::open(file, path, &options)?, cache))
}

/// Opens a file with the cache of `--cache`, or by default with the best one that works.
fn open_file(
    path: &Path,
    options: &DiskOptions,
    wanted: Option<CacheMode>,
) -> Result<(DiskSource, CacheMode)> {
    let error = match DiskSource::file(path, options) {
        Ok(source) => return Ok((source, wanted.unwrap_or(CacheMode::None))),
        // A disk that is in use would be in use with the page cache too.
        Err(error @ blockio::Error::InUse { .. }) => return Err(error.into()),
        Err(error) => error,
    };
    let cached = DiskOptions { direct: false, ..options.clone() };
    if options.direct
        && let Ok(source) = DiskSource::file(path, &cached)
    {
        if wanted.is_some() {
            bail!("{error} (--cache writeback or --cache writethrough)");
        }
        tracing::warn!("{error}; falling back to --cache writeback");
        return Ok((source, CacheMode::Writeback));
    }
    Err(error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_the_cache_of_disks_with_data() {
        let summary = |disk: &str| {
            let disk = (DiskSpec::parse(disk).unwrap(), ExportSettings::default());
            OpenDisk::open(&disk, None, &CancelToken::default(), None).unwrap().summary
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let cached = summary(&format!("file:{}", file.path().display()));
        assert!(cached.contains("512 bytes, cache "), "{cached}");
        for null in ["null:1M", "raw,over=null,size=1M"] {
            assert_eq!(summary(null), "1 MiB, logical block 512 bytes");
        }
    }
}
