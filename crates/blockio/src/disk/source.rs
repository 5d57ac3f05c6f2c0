//! An open disk of any kind, for all threads.

use std::fmt;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use super::driver::Driver;
use super::file::size_probe::SizeProbe;
use super::file::source::FileSource;
use super::info::{Abilities, DiskInfo, DiskOptions, DiskState, Link, Placement};
use super::qos::SharedState;
use crate::config::EngineKind;
use crate::error::Error;
use crate::file::FileTable;
use crate::thread::io::Io;

/// An open disk, for any number of IoThreads. Clones are of the same disk.
#[derive(Debug, Clone)]
pub struct DiskSource {
    /// The facts at the time of opening.
    pub(super) info: DiskInfo,
    /// The facts that have changed since.
    pub(super) shared: Arc<SharedState>,
    pub(super) kind: SourceKind,
    /// The preferred engine, and the reason for it.
    pub(super) engine: Option<(EngineKind, Arc<str>)>,
    /// Files that another program has opened for the disk.
    pub(super) files: Option<Arc<FileTable>>,
}

#[derive(Debug, Clone)]
pub(super) enum SourceKind {
    File(FileSource),
    Null,
    /// All other kinds.
    Driver(Arc<dyn DriverSource>),
}

impl DiskSource {
    /// Opens a regular file or a block device. Locks it like QEMU's programs: a disk open for
    /// writing is open only once; one open for reading is not written to. Block devices are also
    /// claimed, so that they cannot be mounted. Retries for two seconds while the disk is in use.
    ///
    /// # Errors
    ///
    /// If it cannot be opened, is in use, is neither a file nor a block device, has no size, or has
    /// a size or an alignment that does not fit the options.
    pub fn file(path: &Path, options: &DiskOptions) -> Result<Self, Error> {
        let (file, info) = FileSource::open(path, options)?;
        Ok(Self::new(info, SourceKind::File(file)))
    }

    /// Makes the disk of a driver, with its properties at open: the end of a function that opens a
    /// disk of another kind.
    pub fn from_driver(info: DiskInfo, source: Arc<dyn DriverSource>) -> Self {
        Self::new(info, SourceKind::Driver(source))
    }

    pub(super) fn new(info: DiskInfo, kind: SourceKind) -> Self {
        Self {
            info,
            shared: Arc::new(SharedState::new(info.size_bytes)),
            kind,
            engine: None,
            files: None,
        }
    }

    /// Returns the disk for reading its content before it has requests. The disk itself learns
    /// nothing from these reads: see `DriverSource::reopen_for_probe`.
    ///
    /// # Errors
    ///
    /// If the disk cannot be opened again.
    pub fn for_probe(&self) -> Result<Self, Error> {
        Ok(self.reopen_for_probe()?.unwrap_or_else(|| self.clone()))
    }

    /// Opens the disk again if a read for a probe would change it. `None`: the disk itself can be
    /// probed.
    ///
    /// # Errors
    ///
    /// If the disk cannot be opened again.
    pub fn reopen_for_probe(&self) -> Result<Option<Self>, Error> {
        self.driver().map_or(Ok(None), DriverSource::reopen_for_probe)
    }

    /// Returns the same disk, read-only.
    #[must_use]
    pub fn for_reading(self) -> Self {
        Self { info: DiskInfo { read_only: true, ..self.info }, ..self }
    }

    /// Makes a disk that answers at once, stores nothing, and leaves the buffers of reads as they
    /// are: for measuring everything else.
    ///
    /// # Errors
    ///
    /// If the size is zero or not a multiple of the logical block.
    pub fn null(size_bytes: u64, options: &DiskOptions) -> Result<Self, Error> {
        Ok(Self::new(null_info(size_bytes, options)?, SourceKind::Null))
    }

    /// Takes over the present size of the file, device or remote disk, on all IoThreads. Requests
    /// in progress finish as they began. Returns the size in bytes; the size of a null disk never
    /// changes by itself.
    ///
    /// # Errors
    ///
    /// If the size cannot be determined, or is invalid for a disk, as on opening. Then the disk is
    /// unchanged.
    pub fn refresh(&self) -> Result<u64, Error> {
        let probe = self.shared.begin_probe();
        self.shared.finish_probe(probe, self.probe_size()?);
        Ok(self.shared.size_bytes())
    }

    /// Finds the size that [`refresh`](Self::refresh) takes over.
    ///
    /// # Errors
    ///
    /// Like [`refresh`](Self::refresh).
    pub fn probe_size(&self) -> Result<u64, Error> {
        match &self.kind {
            SourceKind::File(source) => source.size_bytes(&self.info),
            SourceKind::Driver(source) => source.probe_size(),
            SourceKind::Null => Ok(self.shared.size_bytes()),
        }
    }

    /// Asks a server or a cluster for the space that it has for an image. The disk in the image
    /// keeps its size; requests that waited for space continue. Blocks until the answer.
    ///
    /// # Errors
    ///
    /// If there is no answer.
    pub fn probe_space(&self) -> Result<(), Error> {
        self.driver().map_or(Ok(()), |source| source.probe_space())
    }

    /// The larger of two sizes in bytes: the disk's, and that of its file or device, which may have
    /// changed, or the last one that its server has reported.
    ///
    /// # Errors
    ///
    /// If it cannot be determined.
    pub fn covered_bytes(&self) -> Result<u64, Error> {
        let size_bytes = self.shared.size_bytes();
        match &self.kind {
            SourceKind::File(source) => Ok(source.any_size_bytes()?.max(size_bytes)),
            SourceKind::Driver(source) => Ok(source.known_size()?.max(size_bytes)),
            SourceKind::Null => Ok(size_bytes),
        }
    }

    /// Resizes the disk and its file, on all IoThreads. Data beyond the new end is lost. From the
    /// call of `settle` on, no request begins beyond the new end. `settle` must wait for requests
    /// that have begun: one of them could extend the file again.
    ///
    /// # Errors
    ///
    /// If it is a block device, is read-only, or cannot have this size, or if the file system or
    /// server refuses. Then the disk is unchanged.
    pub fn set_size(&self, size_bytes: u64, settle: impl FnOnce()) -> Result<(), Error> {
        self.check_new_size(size_bytes)?;
        let before = self.shared.size_bytes();
        if size_bytes < before {
            self.shared.set_size_bytes(size_bytes);
            settle();
        }
        let resized = match &self.kind {
            SourceKind::Null => Ok(()),
            SourceKind::File(source) => source.truncate(size_bytes),
            SourceKind::Driver(source) => source.set_size(size_bytes),
        };
        self.shared.set_size_bytes(if resized.is_ok() { size_bytes } else { before });
        resized
    }

    /// Uses at most `size_bytes` from now on, in whole blocks, on all IoThreads. Another process is
    /// about to cut the file off there, and waits for requests that have begun.
    pub fn cut_off(&self, size_bytes: u64) {
        let whole = size_bytes - size_bytes % u64::from(self.info.physical_block_bytes);
        if whole < self.shared.size_bytes() {
            self.adopt_size(whole);
        }
    }

    /// Sets the size in bytes that users of the disk know, on all IoThreads, even if the file has
    /// another size. Another process has changed the size, or has handed the disk over.
    pub fn adopt_size(&self, size_bytes: u64) {
        match &self.kind {
            SourceKind::Driver(source) => source.adopt_size(size_bytes),
            SourceKind::File(source) => source.end.invalidate(),
            SourceKind::Null => {}
        }
        self.shared.set_size_bytes(size_bytes);
    }

    /// Checks that users can change the disk to this size.
    ///
    /// # Errors
    ///
    /// If they cannot, with the reason.
    pub fn check_new_size(&self, size_bytes: u64) -> Result<(), Error> {
        match &self.kind {
            SourceKind::Null => check_null_size(size_bytes, self.info.logical_block_bytes),
            SourceKind::File(source) => source.check_new_size(size_bytes, &self.info),
            SourceKind::Driver(source) => source.check_new_size(size_bytes),
        }
    }

    /// Makes the disk use this engine on IoThreads that [have](Io::add_engine) it. On all other
    /// IoThreads it uses [`IoThreadConfig::engine`](crate::IoThreadConfig::engine). The reason is
    /// kept for reports.
    #[must_use]
    pub fn prefer_engine(self, engine: EngineKind, reason: &str) -> Self {
        Self { engine: Some((engine, reason.into())), ..self }
    }

    /// Keeps files that another program has opened for the disk, for a hand-over.
    #[must_use]
    pub fn with_files(self, files: Option<Arc<FileTable>>) -> Self {
        Self { files, ..self }
    }
}

/// The properties of a null disk of this size.
fn null_info(size_bytes: u64, options: &DiskOptions) -> Result<DiskInfo, Error> {
    let logical_block_bytes =
        DiskOptions::check_logical_block(options.logical_block_bytes.unwrap_or(512))?;
    check_null_size(size_bytes, logical_block_bytes)?;
    Ok(DiskInfo {
        size_bytes,
        logical_block_bytes,
        physical_block_bytes: logical_block_bytes,
        read_only: options.read_only,
        direct: options.direct,
    })
}

/// Checks the size of a null disk.
fn check_null_size(size_bytes: u64, logical_block_bytes: u32) -> Result<(), Error> {
    if size_bytes == 0 || !size_bytes.is_multiple_of(u64::from(logical_block_bytes)) {
        return Err(Error::Options(format!(
            "a disk of {size_bytes} bytes is not possible: the size must be a multiple of its \
             logical block of {logical_block_bytes} bytes, and not zero"
        )));
    }
    Ok(())
}

/// An open disk of another kind, for all threads. Its methods are called by threads that may wait,
/// except for methods that only report known facts.
pub trait DriverSource: fmt::Debug + Send + Sync {
    /// The disk below, if this is a layer. It gives the answers of the methods that a layer does
    /// not have.
    fn below(&self) -> Option<&DiskSource> {
        None
    }

    /// Attaches the disk for tasks on `io`. Does not wait: a task makes connections, and requests
    /// wait for that. A layer passes `engine` on to the disk below.
    fn attach(&self, io: &Rc<Io>, engine: Option<EngineKind>) -> Box<dyn Driver>;

    /// Opens the disk again for a probe, if this one reads the disk below only at its first
    /// request: the content below may change between the probe and that request.
    fn reopen_for_probe(&self) -> Result<Option<DiskSource>, Error> {
        Ok(None)
    }

    /// See [`DiskSource::chain`](super::DiskSource::chain).
    fn chain(&self) -> Vec<Link>;

    /// See [`DiskSource::identity`](super::DiskSource::identity). It decides which exports share
    /// reservations, so a disk that is reached in two ways has one identity.
    fn identity(&self) -> &str;

    /// See [`DiskSource::place`](super::DiskSource::place); for a layer that of the disk below.
    /// `None`: all of a disk.
    #[doc(hidden)]
    fn place(&self) -> Option<Placement> {
        None
    }

    /// See [`DiskSource::abilities`](super::DiskSource::abilities).
    fn abilities(&self) -> Abilities;

    /// See [`DiskSource::discard_bytes`](super::DiskSource::discard_bytes).
    fn discard_bytes(&self) -> Option<u32>;

    /// See [`DiskSource::optimal_bytes`](super::DiskSource::optimal_bytes).
    fn optimal_bytes(&self) -> Option<u32> {
        None
    }

    /// See [`DiskSource::is_exclusive`](super::DiskSource::is_exclusive).
    fn is_exclusive(&self) -> bool {
        self.below().and_then(DiskSource::local).is_some_and(FileSource::is_exclusive)
    }

    /// The state of the disk.
    fn state(&self) -> DiskState {
        self.below().map_or(DiskState::Ready, DiskSource::state)
    }

    /// See [`DiskSource::remark`](super::DiskSource::remark).
    fn remark(&self) -> Option<String> {
        self.below()?.remark()
    }

    /// See [`DiskSource::warning`](super::DiskSource::warning).
    fn warning(&self) -> Option<String> {
        self.below()?.warning()
    }

    /// See [`DiskHandOver::inherit`](super::hand_over::DiskHandOver::inherit).
    fn inherit(&self, loss: Option<i32>, is_flushed: bool) {
        if let Some(below) = self.below() {
            below.hand_over().inherit(loss, is_flushed);
        }
    }

    /// See [`DiskHandOver::is_flushed`](super::hand_over::DiskHandOver::is_flushed).
    fn is_flushed(&self) -> bool {
        self.below().is_some_and(|below| below.hand_over().is_flushed())
    }

    /// See [`DiskHandOver::may_still_change`](super::hand_over::DiskHandOver::may_still_change).
    fn may_still_change(&self) -> bool {
        self.below().is_some_and(|below| below.hand_over().may_still_change())
    }

    /// See [`DiskSource::abandon`](super::DiskSource::abandon).
    fn abandon(&self) {
        if let Some(below) = self.below() {
            below.abandon();
        }
    }

    /// See [`DiskHandOver::is_written_back`](super::hand_over::DiskHandOver::is_written_back).
    fn is_written_back(&self) -> bool {
        self.below().is_none_or(|below| below.hand_over().is_written_back())
    }

    /// See [`DiskHandOver::write_back`](super::hand_over::DiskHandOver::write_back).
    fn write_back(&self) -> Result<(), Error> {
        self.below().map_or(Ok(()), |below| below.hand_over().write_back())
    }

    /// See [`DiskHandOver::release_lock`](super::hand_over::DiskHandOver::release_lock).
    fn release_lock(&self) {
        if let Some(below) = self.below() {
            below.hand_over().release_lock();
        }
    }

    /// Returns true if another process can use the disk between two uses here: see
    /// [`DiskHandOver::begin_use`](super::hand_over::DiskHandOver::begin_use).
    fn changes_users(&self) -> bool {
        self.below().is_some_and(DiskSource::changes_users)
    }

    /// See [`DiskHandOver::begin_use`](super::hand_over::DiskHandOver::begin_use).
    fn begin_use(&self) -> Result<(), Error> {
        self.below().map_or(Ok(()), |below| below.hand_over().begin_use())
    }

    /// See [`DiskHandOver::end_use`](super::hand_over::DiskHandOver::end_use).
    fn end_use(&self) -> Result<(), Error> {
        self.below().map_or(Ok(()), |below| below.hand_over().end_use())
    }

    /// A probe that notices another size.
    fn size_probe(&self) -> Option<Arc<SizeProbe>>;

    /// Finds the present size: one that a disk can have. It is the known size from then on.
    fn probe_size(&self) -> Result<u64, Error>;

    /// See [`DiskSource::probe_space`](super::DiskSource::probe_space).
    fn probe_space(&self) -> Result<(), Error> {
        self.below().map_or(Ok(()), DiskSource::probe_space)
    }

    /// The last known size, without waiting for a remote end: IoThreads call this.
    fn known_size(&self) -> Result<u64, Error>;

    /// Checks that the disk can be given this size.
    fn check_new_size(&self, size_bytes: u64) -> Result<(), Error>;

    /// Gives the disk this size, which was checked. No request lies beyond it.
    fn set_size(&self, size_bytes: u64) -> Result<(), Error>;

    /// Returns true if [`set_size`](Self::set_size) ends at once, so that an IoThread may call it:
    /// it waits for no server and for no cluster.
    fn sets_size_at_once(&self) -> bool {
        self.below().is_some_and(DiskSource::has_engine)
    }

    /// See [`DiskSource::adopt_size`](super::DiskSource::adopt_size).
    fn adopt_size(&self, size_bytes: u64);
}
