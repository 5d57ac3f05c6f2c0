//! Opens the disks of exports.

use std::path::Path;

use anyhow::{Result, bail};
use blockio::{DiskOptions, DiskSource};
use device::blk::config::{BlkOptions, SERIAL_BYTES};
use iomem::fits;

use crate::spec::{CacheMode, DiskSpec, ExportSettings, ExportSpec};

/// A disk that is open, and the options of its device.
pub(crate) struct OpenDisk {
    /// What the log calls it.
    pub(crate) name: String,
    /// The disk.
    pub(crate) source: DiskSource,
    /// The device on it.
    pub(crate) options: BlkOptions,
    /// One line on what was opened.
    pub(crate) summary: String,
}

impl OpenDisk {
    /// Opens the disk of an export.
    ///
    /// # Errors
    ///
    /// When it cannot be used.
    pub(crate) fn open(spec: &ExportSpec) -> Result<Self> {
        let settings = &spec.settings;
        let (source, cache, name) = match &spec.disk {
            DiskSpec::File(path) => {
                let (source, cache) = open_file(path, settings)?;
                (source, cache, path.display().to_string())
            }
            DiskSpec::Null { size_bytes } => {
                let source = DiskSource::null(*size_bytes, &disk_options(settings, false))?;
                (source, settings.cache.unwrap_or(CacheMode::None), "null disk".to_owned())
            }
        };
        let info = source.info();
        let summary = format!(
            "{} MiB, logical block {} bytes, cache {}{}",
            info.size_bytes >> 20,
            info.logical_block_bytes,
            cache.name(),
            if info.read_only { ", read-only" } else { "" },
        );
        let options = BlkOptions {
            serial: settings.serial.clone().unwrap_or_else(|| default_serial(source.identity())),
            num_queues: settings.num_queues,
            queue_size: settings.queue_size,
            write_cache: cache.has_write_cache(),
            notify_batch: settings.notify_batch,
            run_max: settings.run_max,
            fixed_buffers: settings.fixed_buffers,
            ..BlkOptions::default()
        };
        Ok(Self { name, source, options, summary })
    }
}

fn disk_options(settings: &ExportSettings, direct: bool) -> DiskOptions {
    DiskOptions {
        direct,
        read_only: settings.read_only,
        no_lock: settings.no_lock,
        logical_block_bytes: settings.logical_block_bytes,
    }
}

/// Opens a file as `--cache` says, or without it in the best way that works.
fn open_file(path: &Path, settings: &ExportSettings) -> Result<(DiskSource, CacheMode)> {
    let cache = settings.cache.unwrap_or(CacheMode::None);
    let error = match DiskSource::file(path, &disk_options(settings, cache.is_direct())) {
        Ok(source) => return Ok((source, cache)),
        // Whoever has it in use has it in use with the page cache too.
        Err(error @ blockio::Error::InUse { .. }) => return Err(error.into()),
        Err(error) => error,
    };
    if cache.is_direct()
        && let Ok(source) = DiskSource::file(path, &disk_options(settings, false))
    {
        if settings.cache.is_some() {
            bail!("{error} (--cache writeback or --cache writethrough)");
        }
        tracing::warn!("{error}; falling back to --cache writeback");
        return Ok((source, CacheMode::Writeback));
    }
    Err(error.into())
}

/// Of numbers in base 32.
const DIGITS: &[u8; 32] = b"0123456789ABCDEFGHIJKLMNOPQRSTUV";

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
        let value: usize = fits(hash >> (128 - 5 * (place + 1)) & 31, "five bits");
        char::from(DIGITS[value])
    };
    (0..SERIAL_BYTES).map(digit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(of(7), "55IN9JE2M4HQD2IQ9FGO");
        assert_eq!(default_serial(""), "null");
    }
}
