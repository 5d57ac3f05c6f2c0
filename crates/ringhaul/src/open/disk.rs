//! Opens the disks of exports.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blockio::disk::Folder;
use blockio::disk::hand_over::DiskHandOver;
use blockio::{DiskOptions, DiskSource};
use disks::rbd::RbdImage;
use rustix::fs::{OFlags, fcntl_getfl};

use crate::open::cancellation::CancelToken;
use crate::open::image::{Backing, is_image, open_qcow2};
#[cfg(feature = "luks")]
use crate::open::luks::open_luks;
use crate::spec::disk::{BackingFiles, ImageFormat, RbdSpec};
use crate::spec::{CacheMode, DiskSpec, ExportSettings};

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
        let (mut is_logged, mut has_yielded, mut at_once) = (false, false, true);
        let mut again = IMMEDIATE_RETRIES;
        while token.is_active() {
            let error = match Self::open_as(disk, Claimant { lease_id, at_once }, token) {
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

    /// Opens a disk of an export for a [lease id](DiskOptions::user).
    ///
    /// # Errors
    ///
    /// When it cannot be used, or was cancelled and does not answer.
    pub fn open(
        disk: &(DiskSpec, ExportSettings),
        lease_id: Option<u64>,
        token: &CancelToken,
    ) -> Result<Self> {
        Self::open_as(disk, Claimant { lease_id, at_once: false }, token)
    }

    fn open_as(
        (disk, settings): &(DiskSpec, ExportSettings),
        by: Claimant,
        token: &CancelToken,
    ) -> Result<Self> {
        let opened = Instant::now();
        let mut open_file = |path: &Path, used: FileUse, within: Option<&Folder>| {
            open_file((path, within), used, settings, by)
        };
        let how = OpenSettings { settings, begin: ReadFrom::Now, token };
        let (source, cache) = open(disk, &mut open_file, how)?;
        if disk.has_unnamed_content() {
            token.while_reading(&source, || {
                source.detect_format();
                Ok(())
            })?;
        }
        if let Some(warning) = source.warning() {
            tracing::warn!("{}: {warning}", disk.name());
        }
        Ok(Self::new(disk.name(), source, opened, cache))
    }

    /// Takes over a disk of this size from another process, which has it open for an export with
    /// these settings. `file` is the one file of the disk that is written to.
    ///
    /// # Errors
    ///
    /// When it cannot be used here.
    pub(crate) fn take_over(
        (disk, settings): &(DiskSpec, ExportSettings),
        mut file: Option<File>,
        size_bytes: u64,
    ) -> Result<Self> {
        let mut take = |path: &Path, used: FileUse, within: Option<&Folder>| match file.take() {
            // Backing files are opened again: only the file that is written to is handed over.
            given if used == FileUse::Backing => {
                file = given;
                open_file((path, within), used, settings, Claimant::default())
            }
            Some(file) => take_file(file, path, used, settings),
            None => bail!("{} was handed over without a descriptor", path.display()),
        };
        let how = OpenSettings {
            settings,
            begin: ReadFrom::WithRequests,
            token: &CancelToken::default(),
        };
        let (source, cache) = open(disk, &mut take, how)?;
        if file.is_some() {
            bail!("{disk} was handed over with a superfluous descriptor");
        }
        source.hand_over().adopt_size(size_bytes);
        Ok(Self::new(disk.name(), source, Instant::now(), cache))
    }

    fn new(name: String, source: DiskSource, opened: Instant, cache: CacheMode) -> Self {
        let info = source.info();
        let summary = format!(
            "{} MiB, logical block {} bytes, cache {}{}",
            info.size_bytes >> 20,
            info.logical_block_bytes,
            cache.name(),
            if info.read_only { ", read-only" } else { "" },
        );
        Self { name, source, opened, cache, summary }
    }
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

/// The lease id for a disk, and the choice to fail at once if the disk is in use.
#[derive(Clone, Copy, Default)]
struct Claimant {
    lease_id: Option<u64>,
    at_once: bool,
}

fn is_in_use(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(blockio::Error::InUse { .. }))
}

fn has_no_visible_holder(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(blockio::Error::InUse { is_user_known: false, .. }))
}

/// The role of a file in a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileUse {
    /// The whole disk.
    Disk,
    /// An image, or a part of one.
    Image,
    /// A layer below an image, which is only read.
    Backing,
}

/// The time from which the content of a file may be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadFrom {
    Now,
    /// Until the first request, another process writes to the file.
    WithRequests,
}

/// Settings for opening all layers of a disk.
#[derive(Clone, Copy)]
struct OpenSettings<'a> {
    settings: &'a ExportSettings,
    begin: ReadFrom,
    token: &'a CancelToken,
}

fn disk_options(
    settings: &ExportSettings,
    used: FileUse,
    direct: bool,
    lease_id: Option<u64>,
) -> DiskOptions {
    let is_backing = used == FileUse::Backing;
    DiskOptions {
        direct,
        read_only: settings.read_only || is_backing,
        no_lock: settings.no_lock,
        logical_block_bytes: settings.logical_block_bytes,
        holds_image: used != FileUse::Disk,
        user: if is_backing { None } else { lease_id },
        at_once: false,
        within: None,
    }
}

/// Opens a file and returns it with its cache mode.
type OpenFile<'a> =
    dyn FnMut(&Path, FileUse, Option<&Folder>) -> Result<(DiskSource, CacheMode)> + 'a;

/// Opens the layers of a disk, beginning at the bottom.
fn open(
    disk: &DiskSpec,
    open_file: &mut OpenFile<'_>,
    how: OpenSettings<'_>,
) -> Result<(DiskSource, CacheMode)> {
    let OpenSettings { settings, begin, token } = how;
    match disk {
        DiskSpec::File(path) => open_file(path, FileUse::Disk, None),
        DiskSpec::Null { size_bytes } => {
            let options = disk_options(settings, FileUse::Disk, false, None);
            let source = DiskSource::null(*size_bytes, &options)?;
            Ok((source, settings.cache.unwrap_or(CacheMode::None)))
        }
        DiskSpec::Nbd(nbd) => {
            let options = disk_options(settings, FileUse::Disk, false, None);
            let source = disks::nbd::open(nbd.options(), &options);
            let source = match begin {
                ReadFrom::Now => source?,
                ReadFrom::WithRequests => source.context(
                    "cannot connect while the old process is connected; let the server allow one \
                     more connection",
                )?,
            };
            Ok((source, settings.cache.unwrap_or(CacheMode::None)))
        }
        DiskSpec::Rbd(image) => {
            let cache = settings.cache.unwrap_or(CacheMode::None);
            let options = disk_options(settings, FileUse::Disk, cache.is_direct(), None);
            Ok((disks::rbd::open(&rbd_image(image), &options)?, cache))
        }
        DiskSpec::Raw { offset_bytes, size_bytes, over } => {
            let (below, cache) = open(over, open_file, how)?;
            Ok((DiskSource::raw(below, *offset_bytes, *size_bytes)?, cache))
        }
        #[cfg(feature = "luks")]
        DiskSpec::Luks { key, header, discard, over } => {
            let (below, cache) = open(over, open_file, how)?;
            let open = || open_luks(below.clone(), key, header.as_deref(), *discard);
            Ok((token.while_reading(&below, open)?, cache))
        }
        #[cfg(not(feature = "luks"))]
        DiskSpec::Luks { .. } => {
            bail!("cannot open {disk}: this program was built without LUKS (feature luks)")
        }
        DiskSpec::Qcow2 { backing, over } => {
            let (below, cache) = open_for_image(over, open_file, how)?;
            Ok((open_image(below, over, backing, open_file, how)?, cache))
        }
        DiskSpec::Image { format: ImageFormat::Auto, backing, over } => {
            let (below, cache) = open_for_image(over, open_file, how)?;
            if !token.while_reading(&below, || is_image(&below))? {
                return Ok((below, cache));
            }
            Ok((open_image(below, over, backing, open_file, how)?, cache))
        }
    }
}

/// Opens the disk that contains an image.
fn open_for_image(
    over: &DiskSpec,
    open_file: &mut OpenFile<'_>,
    how: OpenSettings<'_>,
) -> Result<(DiskSource, CacheMode)> {
    let in_image = &mut |path: &Path, used: FileUse, within: Option<&Folder>| match used {
        FileUse::Disk => open_file(path, FileUse::Image, within),
        _ => open_file(path, used, within),
    };
    open(over, in_image, how)
}

/// Opens the image in `below`, which is named `over`, with the backing files that are `allowed`.
fn open_image(
    below: DiskSource,
    over: &DiskSpec,
    allowed: &BackingFiles,
    open_file: &mut OpenFile<'_>,
    how: OpenSettings<'_>,
) -> Result<DiskSource> {
    let open = &mut |path: &Path, within: Option<&Folder>| {
        Ok(open_file(path, FileUse::Backing, within)?.0)
    };
    let backing = Backing { image: over.whole_file(), allowed, open };
    let is_deferred = how.begin == ReadFrom::WithRequests;
    // The backing files of the image are local, so the token watches `below` alone.
    how.token.while_reading(&below, || open_qcow2(below.clone(), backing, is_deferred))
}

fn rbd_image(spec: &RbdSpec) -> RbdImage {
    let RbdSpec { pool, namespace, image, snapshot, conf, id, keyring, exclusive } = spec.clone();
    let namespace = namespace.unwrap_or_default();
    RbdImage { pool, namespace, image, snapshot, conf, id, keyring, exclusive }
}

/// Takes a file that another process has opened.
fn take_file(
    file: File,
    path: &Path,
    used: FileUse,
    settings: &ExportSettings,
) -> Result<(DiskSource, CacheMode)> {
    let direct = fcntl_getfl(&file)
        .map(|flags| flags.contains(OFlags::DIRECT))
        .with_context(|| format!("cannot use the descriptor of {}", path.display()))?;
    let wanted = settings.cache.unwrap_or(CacheMode::None);
    // The other process fell back to the page cache if direct I/O did not work.
    let cache = if direct == wanted.is_direct() { wanted } else { CacheMode::Writeback };
    Ok((DiskHandOver::open(file, path, &disk_options(settings, used, direct, None))?, cache))
}

/// Opens a file with the cache of `--cache`, or by default with the best one that works.
fn open_file(
    (path, within): (&Path, Option<&Folder>),
    used: FileUse,
    settings: &ExportSettings,
    by: Claimant,
) -> Result<(DiskSource, CacheMode)> {
    let cache = settings.cache.unwrap_or(CacheMode::None);
    let options = |direct| DiskOptions {
        at_once: by.at_once,
        within: within.cloned(),
        ..disk_options(settings, used, direct, by.lease_id)
    };
    let error = match DiskSource::file(path, &options(cache.is_direct())) {
        Ok(source) => return Ok((source, cache)),
        // A disk that is in use would be in use with the page cache too.
        Err(error @ blockio::Error::InUse { .. }) => return Err(error.into()),
        Err(error) => error,
    };
    if cache.is_direct()
        && let Ok(source) = DiskSource::file(path, &options(false))
    {
        if settings.cache.is_some() {
            bail!("{error} (--cache writeback or --cache writethrough)");
        }
        tracing::warn!("{error}; falling back to --cache writeback");
        return Ok((source, CacheMode::Writeback));
    }
    Err(error.into())
}
