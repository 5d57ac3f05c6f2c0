//! Layer `qcow2`: images of QEMU's format, with their backing files.
//!
//! The library imago handles the format. Its images are bound to one thread, so each image has an
//! owner, a thread with a loop (`owner.rs`). Most requests never get there: a table that all
//! threads read maps plain data, and requests for it go straight to the file, by the engine of
//! their IoThread (`disk.rs`). The owner looks positions up, and makes all changes to them: it
//! allocates space before data is written, and gives space back.

#[cfg(test)]
mod bitmaps_tests;
#[cfg(test)]
mod cache_limit_tests;
mod consistency;
mod core;
#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod deferred_tests;
mod disk;
#[cfg(test)]
mod error_tests;
mod format;
#[cfg(test)]
mod full_tests;
#[cfg(test)]
mod hostile_tests;
mod late;
#[cfg(test)]
mod late_tests;
#[cfg(test)]
mod leaks_tests;
#[cfg(test)]
mod mark_tests;
mod owner;
mod place_queries;
mod place_table;
mod readers;
mod storage;
#[cfg(test)]
mod tables_tests;
mod zstd;
#[cfg(test)]
mod zstd_tests;

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockio::disk::{Abilities, DiskInfo, DiskState, Link, Placement, SizeProbe};
use blockio::driver::{Driver, DriverSource};
use blockio::executor::Lock;
use blockio::{DiskSource, EngineKind, Error, Io};

use consistency::cache_limit::CacheLimit;
pub use consistency::header::BackingFile;
use consistency::header::ImageHeader;
use consistency::mark::MarkState;
use consistency::refused;
use consistency::write_order::WriteOrder;
pub use core::Layer;
pub(crate) use core::image_header;
use core::{Core, TOO_LONG_BELOW};
use disk::Qcow2Disk;
use owner::{Image, Job};
use place_table::{LAYERS_MAX, PlaceTable};
use storage::Store;

/// Opens the disk in a qcow2 image. The first layer is the image, the next one its backing
/// file, and so on. With `is_deferred` the image is not read until the first request: another
/// process may still write to it.
///
/// # Errors
///
/// If the image is damaged, or has more than 32 layers.
pub fn open(layers: Vec<Layer>, is_deferred: bool) -> Result<DiskSource, Error> {
    let (info, source) = open_image(layers, is_deferred)?;
    Ok(DiskSource::from_driver(info, Arc::new(source)))
}

/// Opens the disk in an image whose file is locked later. Only the headers are read before.
///
/// # Errors
///
/// As for [`open`].
pub(crate) fn open_late(layers: Vec<Layer>) -> Result<DiskSource, Error> {
    late::open_with(layers, |layers, is_deferred| {
        let (info, source) = open_image(layers, is_deferred)?;
        let image = Arc::clone(&source.image);
        Ok(late::Opened { info, image, source: Arc::new(source) })
    })
}

fn open_image(layers: Vec<Layer>, is_deferred: bool) -> Result<(DiskInfo, Qcow2Source), Error> {
    let Some(Layer { source, header: Some(header) }) = layers.first() else {
        return Err(Error::Options("an image has a header".to_owned()));
    };
    let (source, header) = (source.clone(), header.clone());
    if layers.len() > LAYERS_MAX {
        let reason = format!(
            "it has {} layers of backing files, and at most {LAYERS_MAX} are supported; merge some \
             with `qemu-img commit`",
            layers.len()
        );
        return Err(refused(&source, reason));
    }
    let below = source.info();
    let blocks = layers.iter().map(|layer| layer.source.info().logical_block_bytes);
    let block = blocks.max().unwrap_or(below.logical_block_bytes);
    header.check_size(block).map_err(|reason| refused(&source, reason))?;
    let unit = layers.iter().filter_map(|layer| Some(layer.header.as_ref()?.cluster_bytes)).min();
    // The table maps whole blocks of a layer.
    let table = PlaceTable::new(unit.unwrap_or(header.cluster_bytes).max(block));
    if header.size_bytes > table.bytes_max() {
        let bytes = header.size_bytes;
        return Err(refused(&source, format!("a disk of {bytes} bytes is too large")));
    }
    let info = DiskInfo {
        size_bytes: header.size_bytes,
        logical_block_bytes: block,
        physical_block_bytes: below.physical_block_bytes.max(block),
        ..below
    };
    let truncation = if is_deferred { None } else { check_tables(&layers)? };
    let leaked = match below.read_only {
        true => None,
        false => count_leaks_if_marked(&source, &header, is_deferred)?,
    };
    let may_be_marked = !below.read_only && header.may_be_marked() && source.is_exclusive();
    let clusters =
        |layer: &Layer| layer.header.as_ref().map_or(0, |header| u64::from(header.cluster_bytes));
    let cache_limit = Arc::new(CacheLimit::new(layers.iter().map(clusters).collect()));
    let order = new_order(&layers, &header);
    let core = Arc::new(Core {
        table,
        top: Store::new(0, (source.clone(), Some(&header)), &order, &cache_limit),
        order,
        cache_limit,
        layers,
        block_bytes: block,
        cluster_bytes: header.cluster_bytes.into(),
        has_zero_clusters: header.has_zero_clusters(),
        may_be_marked,
        leaked,
        size_bytes: AtomicU64::new(header.size_bytes),
        // The previous process may have left changes without a flush.
        committed: AtomicU64::new(1),
        stable: AtomicU64::new(0),
        threads: Lock::default(),
    });
    let (owner, ended) = owner::start(&core)?;
    let image = Image { owner, ended: Lock::new(Some(ended)), core };
    if !is_deferred && let Err(error) = owner::run_job_blocking(&image.owner, Job::Open) {
        // The next try must find the file closed.
        image.end();
        let reason = format!("it cannot be opened: {error}; check it with `qemu-img check`");
        return Err(refused(&source, reason));
    }
    let mut source = Qcow2Source::new(image, &header, is_deferred);
    source.truncation = truncation;
    Ok((info, source))
}

fn new_order(layers: &[Layer], header: &ImageHeader) -> Arc<WriteOrder> {
    let order = WriteOrder::default();
    if layers.iter().any(Layer::has_zstd) {
        order.set_disk_bytes(header.size_bytes);
    }
    Arc::new(order)
}

/// The number of leaked clusters of an image that was left marked. An image that another process
/// still writes to is not checked.
fn count_leaks_if_marked(
    source: &DiskSource,
    header: &ImageHeader,
    is_deferred: bool,
) -> Result<Option<u64>, Error> {
    if !header.is_dirty() {
        return Ok(None);
    }
    // A process that hands the image over has marked it, unless its counts are only in memory.
    if !header.may_be_marked() || !(source.is_exclusive() || is_deferred) {
        return Err(refused(source, header.refusal_when_marked().to_owned()));
    }
    if is_deferred { Ok(None) } else { consistency::leaks::find(source, header) }
}

/// Checks for missing tables. Returns a warning about the first layer that lacks one.
fn check_tables(layers: &[Layer]) -> Result<Option<String>, Error> {
    let mut truncation = None;
    for (index, Layer { source, header }) in layers.iter().enumerate() {
        let Some(header) = header else { continue };
        let found = consistency::leaks::tables::check(source, header)?;
        let named = |found| match index {
            0 => found,
            _ => format!("in its backing file {}: {found}", source.chain_text()),
        };
        truncation = truncation.or(found.map(named));
    }
    Ok(truncation)
}

/// The names of the bitmaps in a list, or a text in their place.
fn bitmap_names(source: &DiskSource, list: &Range<u64>, is_deferred: bool) -> String {
    let bytes = list.end.saturating_sub(list.start).min(consistency::bitmaps::LIST_BYTES_MAX);
    let content = if is_deferred { None } else { core::read_front(source, list.start, bytes).ok() };
    let list = content.map(|mut content| {
        content.truncate(iomem::fits(bytes, "bytes in memory"));
        content
    });
    let parsed = list.and_then(|list| consistency::bitmaps::parse(&list));
    let names = parsed.into_iter().flatten().map(|bitmap| bitmap.name).collect::<Vec<_>>();
    match names.is_empty() {
        true => "names unreadable".to_owned(),
        false => names.join(", "),
    }
}

const CORRUPT: &str = "it is marked as corrupt, so its data may be wrong; copy its data, then \
                       repair it with `qemu-img check -r all`";

struct Qcow2Source {
    image: Arc<Image>,
    identity: String,
    is_deferred: bool,
    /// Names of the bitmaps that were valid when the image was opened for writing.
    bitmaps: Option<String>,
    /// True if a layer is marked as corrupt.
    is_corrupt: bool,
    /// A warning about a file that was cut off.
    truncation: Option<String>,
}

impl std::fmt::Debug for Qcow2Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Qcow2Source").field(&self.image.core.layers).finish()
    }
}

impl Drop for Qcow2Source {
    /// Waits until the owner has closed the image, since the file may be opened again at once. If a
    /// disk on an IoThread is left, its drop closes the image, and does not wait.
    fn drop(&mut self) {
        if let Some(image) = Arc::get_mut(&mut self.image) {
            image.end();
        }
    }
}

impl Qcow2Source {
    fn new(image: Image, header: &ImageHeader, is_deferred: bool) -> Self {
        let source = image.core.source();
        let identity = match source.identity() {
            "" => String::new(),
            file => format!("{file}, qcow2"),
        };
        let bitmaps = match header.bitmaps() {
            Some(list) if image.core.is_writable() => Some(bitmap_names(source, list, is_deferred)),
            _ => None,
        };
        let is_corrupt = image.core.layers.iter().any(Layer::is_corrupt);
        Self {
            image: Arc::new(image),
            identity,
            is_deferred,
            bitmaps,
            is_corrupt,
            truncation: None,
        }
    }

    fn source(&self) -> &DiskSource {
        self.image.core.source()
    }

    /// Returns true if the owner of the image cannot extend the file itself. A server or a cluster
    /// provides the space, and must be asked how much there is.
    fn has_remote_space(&self) -> bool {
        !self.source().sets_size_at_once()
    }
}

impl DriverSource for Qcow2Source {
    fn below(&self) -> Option<&DiskSource> {
        Some(self.source())
    }

    fn attach(&self, io: &Rc<Io>, engine: Option<EngineKind>) -> Box<dyn Driver> {
        Box::new(Qcow2Disk::new(&self.image, io, engine))
    }

    fn reopen_for_probe(&self) -> Result<Option<DiskSource>, Error> {
        if !self.is_deferred {
            return Ok(None);
        }
        let layers = self.image.core.layers.iter().map(|Layer { source, header }| {
            let source = source.for_probe()?.for_reading();
            Ok(Layer { source, header: header.clone() })
        });
        let (info, source) = open_image(layers.collect::<Result<_, Error>>()?, false)?;
        Ok(Some(DiskSource::from_driver(info, Arc::new(source))))
    }

    fn chain(&self) -> Vec<Link> {
        let mut chain = Vec::new();
        for (index, layer) in self.image.core.layers.iter().enumerate() {
            let role = if index == 0 { "" } else { ", backing file" };
            match &layer.header {
                Some(header) => {
                    let place = format!("clusters of {} bytes{role}", header.cluster_bytes);
                    chain.push(Link { kind: "qcow2", place });
                }
                None => chain.push(Link { kind: "raw", place: "backing file".to_owned() }),
            }
            chain.extend(layer.source.chain());
        }
        chain
    }

    fn identity(&self) -> &str {
        &self.identity
    }

    fn place(&self) -> Option<Placement> {
        Some(Placement { is_spread: true, ..self.source().place() })
    }

    fn abilities(&self) -> Abilities {
        let below = self.source().abilities();
        Abilities { discard: true, zeroes: true, resize: true, snapshots: false, ..below }
    }

    fn discard_bytes(&self) -> Option<u32> {
        // Clusters may be smaller than the blocks below.
        let core = &self.image.core;
        u32::try_from(core.cluster_bytes).ok().map(|bytes| bytes.max(core.block_bytes))
    }

    fn state(&self) -> DiskState {
        let states = self.image.core.layers.iter().map(|layer| layer.source.state());
        states.into_iter().find(|state| *state != DiskState::Ready).unwrap_or(DiskState::Ready)
    }

    fn warning(&self) -> Option<String> {
        let mark = &self.image.core.order.mark;
        let is_valid = mark.has_autoclear() || mark.state() == MarkState::Unknown;
        let bitmaps = self.bitmaps.as_ref().filter(|_| is_valid).map(|names| {
            format!(
                "it has persistent bitmaps ({names}), which the first write invalidates: make a \
                 full backup before the next incremental one"
            )
        });
        let corrupt = self.is_corrupt.then(|| CORRUPT.to_owned());
        let below = self.image.core.layers.iter().find_map(|layer| layer.source.warning());
        [corrupt, self.truncation.clone(), bitmaps, below]
            .into_iter()
            .flatten()
            .reduce(|one, other| format!("{one}; {other}"))
    }

    fn is_flushed(&self) -> bool {
        // Tables of a writable image may be written back after this call.
        self.source().info().read_only
    }

    fn abandon(&self) {
        self.image.core.layers.iter().for_each(|layer| layer.source.abandon());
    }

    fn is_written_back(&self) -> bool {
        let core = &self.image.core;
        core.may_be_marked
            || core.layers.iter().any(|layer| layer.source.hand_over().is_written_back())
    }

    fn write_back(&self) -> Result<(), Error> {
        if self.image.core.may_be_marked {
            // If this fails, the next process finds the mark.
            let _ = owner::run_job_blocking(&self.image.owner, Job::Quiesce);
        }
        self.image.core.layers.iter().try_for_each(|layer| layer.source.hand_over().write_back())
    }

    fn release_lock(&self) {
        self.image.core.layers.iter().for_each(|layer| layer.source.hand_over().release_lock());
    }

    /// Tables stay in memory: see `late.rs` for an image that changes users.
    fn changes_users(&self) -> bool {
        false
    }

    /// Probes the space for the image. The disk in it never changes its size by itself.
    fn size_probe(&self) -> Option<Arc<SizeProbe>> {
        let below = self.source().size_probe().filter(|_| self.has_remote_space())?;
        Some(Arc::new(SizeProbe::other(move || below.size_bytes().map(|_| None))))
    }

    fn probe_size(&self) -> Result<u64, Error> {
        self.known_size()
    }

    fn probe_space(&self) -> Result<(), Error> {
        self.source().probe_space()?;
        if self.has_remote_space() {
            // The owner takes over more space. Less space is not taken over: tables behind its end
            // would read as zeroes.
            self.source().probe_size()?;
        }
        Ok(())
    }

    fn known_size(&self) -> Result<u64, Error> {
        Ok(self.image.core.size_bytes.load(Ordering::Relaxed))
    }

    fn check_new_size(&self, size_bytes: u64) -> Result<(), Error> {
        let core = &self.image.core;
        let (info, now) = (self.source().info(), core.size_bytes.load(Ordering::Relaxed));
        let reason = if info.read_only {
            "it is open read-only; resize it with `qemu-img resize`, and open it again".to_owned()
        } else if size_bytes < now {
            "an image in use can only grow; shrink it with `qemu-img resize --shrink` when it is \
             not in use"
                .to_owned()
        } else if !size_bytes.is_multiple_of(core.block_bytes.into()) {
            let block = core.block_bytes;
            format!("{size_bytes} bytes are not a multiple of the logical block of {block}")
        } else if size_bytes > core.table.bytes_max() {
            format!("a disk of {size_bytes} bytes is too large")
        } else if size_bytes > now && core.bytes_below() > now {
            TOO_LONG_BELOW.to_owned()
        } else {
            return Ok(());
        };
        Err(refused(self.source(), reason))
    }

    fn set_size(&self, size_bytes: u64) -> Result<(), Error> {
        owner::run_job_blocking(&self.image.owner, Job::Grow(size_bytes)).map_err(|error| {
            refused(self.source(), format!("it cannot be resized to {size_bytes} bytes: {error}"))
        })?;
        self.image.core.size_bytes.store(size_bytes, Ordering::Relaxed);
        Ok(())
    }

    fn adopt_size(&self, size_bytes: u64) {
        self.image.core.size_bytes.store(size_bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;
    use std::path::Path;
    use std::process::Command;
    use std::rc::Rc;

    use blockio::{DiskOptions, DiskSource, IoThread, IoThreadConfig, Wait};
    use iomem::Buffers;

    use crate::qcow2::Layer;

    /// The number of times that this process has a file open. Locks do not show that: a child that
    /// another test starts has them too, until it runs its program.
    fn open_count(path: &Path) -> usize {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let is_it =
            |fd: &std::fs::DirEntry| std::fs::read_link(fd.path()).is_ok_and(|to| to == path);
        all.filter(|fd| fd.as_ref().is_ok_and(is_it)).count()
    }

    /// Makes an image. `None` without qemu-img.
    fn image() -> Option<tempfile::NamedTempFile> {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut make = Command::new("qemu-img");
        let made = make.args(["create", "-q", "-f", "qcow2"]).arg(file.path()).arg("8M").status();
        if made.is_err() {
            eprintln!("skipped: qemu-img is not installed");
        }
        made.is_ok().then_some(file)
    }

    /// The data below would show in the new part.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn an_image_over_a_larger_file_does_not_grow() {
        for (bytes_below, grows) in [(4 << 20, true), (8 << 20, true), (9 << 20, false)] {
            let Some(file) = image() else { return };
            let below = tempfile::NamedTempFile::new().unwrap();
            below.as_file().set_len(bytes_below).unwrap();
            let mut rebase = Command::new("qemu-img");
            rebase.args(["rebase", "-u", "-F", "raw", "-b"]).arg(below.path()).arg(file.path());
            assert!(rebase.status().unwrap().success());
            let open = |path: &Path, read_only| {
                let options =
                    DiskOptions { holds_image: true, read_only, ..DiskOptions::default() };
                DiskSource::file(path, &options).unwrap()
            };
            let top = Layer::qcow2(open(file.path(), false)).unwrap();
            let layers = vec![top, Layer::raw(open(below.path(), true))];
            let image = crate::qcow2::open(layers, false).unwrap();
            assert_eq!(image.set_size(10 << 20, || ()).is_ok(), grows, "{bytes_below}");
            assert_eq!(image.info().size_bytes, if grows { 10 << 20 } else { 8 << 20 });
        }
    }

    /// The owner has a thread, which has the file open, too.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn closing_an_image_closes_its_file() {
        let Some(file) = image() else { return };
        let options = DiskOptions { holds_image: true, ..DiskOptions::default() };
        for _ in 0..50 {
            let source = DiskSource::file(file.path(), &options).unwrap();
            let layers = vec![Layer::qcow2(source).unwrap()];
            let image = crate::qcow2::open(layers, false).unwrap();
            assert!(open_count(file.path()) > 1);
            drop(image);
            assert_eq!(open_count(file.path()), 1);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn an_image_that_cannot_be_opened_has_its_file_closed() {
        let Some(file) = image() else { return };
        // There is no table of reference counts.
        file.as_file().write_all_at(&[0; 12], 48).unwrap();
        let options = DiskOptions { holds_image: true, ..DiskOptions::default() };
        for _ in 0..50 {
            let source = DiskSource::file(file.path(), &options).unwrap();
            let layers = vec![Layer::qcow2(source).unwrap()];
            assert!(crate::qcow2::open(layers, false).is_err());
            assert_eq!(open_count(file.path()), 1);
        }
    }

    /// Reads of holes make no op. The loop checks its sources all the same.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_turn_of_the_loop_zeroes_a_bounded_number_of_bytes() {
        const READS: u64 = 10;
        let Some(file) = image() else { return };
        let options = DiskOptions { holds_image: true, ..DiskOptions::default() };
        let source = DiskSource::file(file.path(), &options).unwrap();
        let source = crate::qcow2::open(vec![Layer::qcow2(source).unwrap()], false).unwrap();
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let io = Rc::clone(thread.io());
        let (disk, memory) = (Rc::new(source.attach(&io)), Buffers::aligned(4 << 20, 4096));
        // The owner finds the holes.
        thread.block_on(disk.read(0, memory.duplicate())).unwrap().unwrap();
        for _ in 0..READS {
            let (disk, memory) = (Rc::clone(&disk), memory.duplicate());
            io.spawn(async move { disk.read(0, memory).await.unwrap() });
        }
        let begun = io.stats().turns.get();
        while io.tasks() > 0 {
            thread.turn(Wait::Never).unwrap();
        }
        let turns = io.stats().turns.get() - begun;
        assert!(turns >= READS * 4 / 2, "{turns} turns for {READS} reads of 4 MiB");
    }

    /// Each layer may have a part of a block.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_logical_block_is_the_largest_of_all_layers() {
        let folder = tempfile::tempdir().unwrap();
        let [base, top] = ["base", "top"].map(|name| folder.path().join(name));
        for cluster in ["512", "64k"] {
            let mut expected: Vec<u8> = (0..1u32 << 18).flat_map(u32::to_le_bytes).collect();
            std::fs::write(&base, &expected).unwrap();
            let mut make = Command::new("qemu-img");
            let options = format!("cluster_size={cluster}");
            let make = make.args(["create", "-q", "-f", "qcow2", "-o", &options]);
            if make.args(["-b", "base", "-F", "raw"]).arg(&top).status().is_err() {
                eprintln!("skipped: qemu-img is not installed");
                return;
            }
            let mut write = Command::new("qemu-io");
            let write = write.args(["-f", "qcow2", "-c", "write -q -P 7 6656 1024"]).arg(&top);
            assert!(write.status().unwrap().success());
            expected[6656..7680].fill(7);
            let image = DiskOptions { holds_image: true, ..DiskOptions::default() };
            let below = DiskOptions {
                read_only: true,
                logical_block_bytes: Some(4096),
                ..DiskOptions::default()
            };
            let layers = vec![
                Layer::qcow2(DiskSource::file(&top, &image).unwrap()).unwrap(),
                Layer::raw(DiskSource::file(&base, &below).unwrap()),
            ];
            let source = crate::qcow2::open(layers, false).unwrap();
            let info = source.info();
            assert_eq!((info.logical_block_bytes, info.physical_block_bytes), (4096, 4096));
            let unit = if cluster == "512" { 4096 } else { 65_536 };
            assert_eq!(source.discard_bytes(), Some(unit), "it has whole blocks");
            assert!(source.set_size(expected.len() as u64 + 512, || ()).is_err());
            let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
            let disk = source.attach(thread.io());
            let data = Buffers::from_vec(vec![9; 4096]);
            thread.block_on(disk.write(40_960, data, false)).unwrap().unwrap();
            expected[40_960..45_056].fill(9);
            for round in 0..2 {
                let all = Buffers::aligned(expected.len(), 4096);
                let read = all.duplicate();
                thread.block_on(disk.read(0, all)).unwrap().unwrap();
                assert!(read.to_vec() == expected, "{cluster}, round {round}");
            }
        }
    }
}
