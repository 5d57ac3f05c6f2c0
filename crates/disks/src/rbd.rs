//! Images in Ceph clusters, through librbd.
//!
//! librbd works on threads of its own. The IoThread passes an operation to it and does not wait.
//! The thread that ends the operation posts the result to the mailbox of the IoThread. Operations
//! have no time limit: while a cluster is away they wait, and continue when it is back.

mod api;
mod image;
mod open;
mod pending_ops;
mod requests;
mod shared;

use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use blockio::disk::{Abilities, DiskInfo, DiskState, LATE_LOCK_PATIENCE, Link, SizeProbe};
use blockio::driver::{Driver, DriverSource, Line, StallLog};
use blockio::executor::start_thread;
use blockio::{DiskOptions, DiskSource, EngineKind, Error, Io, clock};
use tracing::Span;

use self::open::ImageProperties;
use self::pending_ops::AwayState;
use self::requests::RbdDisk;
use self::shared::SharedImage;
use crate::spec::RbdSpec;

/// Checks that the library of Ceph can be used here.
///
/// # Errors
///
/// The reason why it cannot.
pub fn library() -> Result<(), String> {
    api::api().map(drop)
}

/// The interval of checks that the cluster answers.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Opens an image of a Ceph cluster. With [`DiskOptions::direct`] the cache of librbd is off,
/// unless the image itself is configured otherwise; without it the configuration of the cluster
/// decides. Waits for the cluster for 30 seconds, and for the exclusive lock for 60 more.
///
/// # Errors
///
/// If the libraries of Ceph are not installed, the cluster cannot be reached, or the image
/// cannot be opened or used with the options.
pub fn open(name: &RbdSpec, options: &DiskOptions) -> Result<DiskSource, Error> {
    let (image, info, facts) = open::open(name, options)?;
    let (size_bytes, object_bytes) = (info.size_bytes, facts.object_bytes);
    let shared = Arc::new(SharedImage::new(image, name.to_string(), size_bytes, object_bytes));
    let end = watch(&shared).map_err(|error| shared.refused(&error.to_string()))?;
    let source =
        RbdSource { shared, facts, image: name.clone(), options: options.clone(), info, _end: end };
    Ok(DiskSource::from_driver(info, Arc::new(source)))
}

struct RbdSource {
    shared: Arc<SharedImage>,
    facts: ImageProperties,
    image: RbdSpec,
    options: DiskOptions,
    /// The properties at open.
    info: DiskInfo,
    /// Ends the watching thread when dropped.
    _end: mpsc::Sender<()>,
}

impl fmt::Debug for RbdSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RbdSource({})", self.shared.name)
    }
}

impl DriverSource for RbdSource {
    fn attach(&self, io: &Rc<Io>, _: Option<EngineKind>) -> Box<dyn Driver> {
        Box::new(RbdDisk::new(&self.shared, io))
    }

    fn chain(&self) -> Vec<Link> {
        vec![Link { kind: "rbd", place: self.shared.name.clone() }]
    }

    fn identity(&self) -> &str {
        &self.facts.identity
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            flush: true,
            discard: true,
            zeroes: true,
            resize: !self.has_snapshot(),
            lock: true,
            snapshots: true,
        }
    }

    fn discard_bytes(&self) -> Option<u32> {
        Some(self.facts.discard_bytes)
    }

    fn optimal_bytes(&self) -> Option<u32> {
        self.facts.optimal_bytes
    }

    fn state(&self) -> DiskState {
        match self.shared.image.pending_ops().away() {
            _ if self.shared.loss().is_err() => DiskState::Lost,
            Some(AwayState { since, .. }) => DiskState::Away(since),
            None => DiskState::Ready,
        }
    }

    fn remark(&self) -> Option<String> {
        let AwayState { ops, .. } = self.shared.image.pending_ops().away()?;
        Some(format!("{ops} operations wait for the cluster"))
    }

    fn inherit(&self, loss: Option<i32>, _: bool) {
        self.shared.inherit(loss);
    }

    fn abandon(&self) {
        self.shared.image.pending_ops().abandon();
    }

    /// Flushes librbd's cache, which is local to this process. The next process reads without a
    /// lock, and would find older data.
    fn write_back(&self) -> Result<(), Error> {
        // Even with `direct`, the configuration of the image may have switched a cache on.
        if self.info.read_only {
            return Ok(());
        }
        let was_lost = self.shared.loss().is_err();
        match self.shared.image.write_back() {
            // The next process inherits a loss that is known already.
            Err(error) if !was_lost => {
                self.shared.record_loss(&error);
                Err(self.shared.refused(&format!(
                    "written data cannot be flushed: {error}; check the cluster (`ceph -s`)"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Releases the lock. The next process would otherwise wait for half a minute, until the
    /// cluster takes this client for dead.
    fn release_lock(&self) {
        if !self.info.read_only
            && let Err(error) = self.shared.image.unlock()
        {
            // The lock is not ours, or there is none.
            tracing::debug!("rbd {}: cannot release its lock: {error}", self.shared.name);
        }
    }

    fn changes_users(&self) -> bool {
        true
    }

    /// Acquires the exclusive lock, within the time that the lock of a file has. Drops the cache of
    /// librbd, since another client may have written.
    fn begin_use(&self) -> Result<(), Error> {
        let end = Instant::now() + LATE_LOCK_PATIENCE;
        while self.image.exclusive
            && let Err(error) = self.shared.image.lock()
        {
            if error.raw_os_error() != Some(libc::EROFS) || Instant::now() >= end {
                return Err(self.shared.refused(&open::no_lock(&error)));
            }
            std::thread::sleep(CHECK_INTERVAL / 10);
        }
        let dropped = self.shared.image.drop_cache();
        dropped.map_err(|error| self.shared.refused(&format!("cannot drop its cache: {error}")))
    }

    fn end_use(&self) -> Result<(), Error> {
        self.write_back()?;
        self.shared
            .loss()
            .map_err(|error| self.shared.refused(&format!("written data may be lost: {error}")))?;
        self.release_lock();
        Ok(())
    }

    fn size_probe(&self) -> Option<Arc<SizeProbe>> {
        if self.has_snapshot() {
            return None;
        }
        let shared = Arc::downgrade(&self.shared);
        Some(Arc::new(SizeProbe::other(move || {
            let Some(shared) = shared.upgrade() else { return Ok(None) };
            // After an error, the next probe asks again.
            shared.known_size().map_or_else(|| shared.probe_size(), Ok).map(Some)
        })))
    }

    fn probe_size(&self) -> Result<u64, Error> {
        if self.info.read_only && !self.has_snapshot() {
            return self.reopen_for_size();
        }
        let size = self.shared.probe_size();
        let size = size.map_err(|error| {
            self.shared.refused(&format!("cannot query its size from the cluster: {error}"))
        })?;
        open::check_size(size, self.info.logical_block_bytes)
            .map_err(|reason| self.shared.refused(&reason))?;
        Ok(size)
    }

    fn check_new_size(&self, size_bytes: u64) -> Result<(), Error> {
        let checked = if self.has_snapshot() {
            Err("a snapshot cannot be resized; resize the image".to_owned())
        } else if self.info.read_only {
            Err("it is open read-only; use `rbd resize`, and restart the export".to_owned())
        } else {
            open::check_size(size_bytes, self.info.logical_block_bytes)
        };
        checked.map_err(|reason| self.shared.refused(&reason))
    }

    fn set_size(&self, size_bytes: u64) -> Result<(), Error> {
        let resized = self.shared.image.resize(size_bytes);
        let found = resized.and_then(|()| self.shared.probe_size()).map_err(|error| {
            self.shared.refused(&format!("it cannot be resized to {size_bytes} bytes: {error}"))
        })?;
        if found == size_bytes {
            return Ok(());
        }
        Err(self.shared.refused(&format!(
            "it was resized to {size_bytes} bytes but has {found}: another client has resized it \
             too; try again"
        )))
    }

    fn adopt_size(&self, _: u64) {}

    fn known_size(&self) -> Result<u64, Error> {
        Ok(self.shared.last_size())
    }
}

impl RbdSource {
    fn has_snapshot(&self) -> bool {
        self.image.snapshot.is_some()
    }

    /// Opens the image once more to find its size. While an image is open for reading only, librbd
    /// learns of no new size, and reads nothing beyond the old one.
    fn reopen_for_size(&self) -> Result<u64, Error> {
        let (_, now, _) = open::open(&self.image, &self.options)?;
        if now.size_bytes == self.info.size_bytes {
            return Ok(now.size_bytes);
        }
        Err(self.shared.refused(&format!(
            "its new size of {} bytes takes effect only when it is opened again, because it is \
             open read-only; restart the export",
            now.size_bytes
        )))
    }
}

/// Starts a thread that logs when the cluster does not answer, and gives the image up if that is
/// wanted. It ends when the image is closed or abandoned, or the returned sender is dropped.
fn watch(shared: &Arc<SharedImage>) -> io::Result<mpsc::Sender<()>> {
    let (end, ended) = mpsc::channel::<()>();
    let (waiting, name) = (Arc::downgrade(shared.image.pending_ops()), shared.name.clone());
    let span = Span::current();
    let work = move || {
        let _span = span.enter();
        let mut unanswered = StallLog::default();
        while ended.recv_timeout(CHECK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let Some(waiting) = Weak::upgrade(&waiting) else { return };
            waiting.abandon_if_away();
            let away = waiting.away();
            // No request waits for an image that was abandoned.
            if waiting.was_abandoned() {
                return;
            }
            log_state(&name, &mut unanswered, away);
        }
    };
    start_thread("ringhaul-rbd", work)?;
    Ok(end)
}

fn log_state(name: &str, unanswered: &mut StallLog, away: Option<AwayState>) {
    match unanswered.next_line(clock::now(), away.map(|oldest| oldest.since)) {
        Some(Line::Waits(age)) => tracing::warn!(
            "rbd {name}: the cluster has not answered an operation for {} s; {} operations wait \
             for it; check the cluster (`ceph -s`)",
            age.as_secs(),
            away.map_or(0, |oldest| oldest.ops)
        ),
        Some(Line::Answers(after)) => {
            tracing::info!("rbd {name}: the cluster answers again, after {} s", after.as_secs());
        }
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use blockio::{IoThread, IoThreadConfig};

    use super::image::fake::FakeImage;
    use super::*;

    const BYTES: usize = 64 << 10;

    fn source(fake: &FakeImage, read_only: bool) -> DiskSource {
        source_of(fake, RbdSpec::default(), read_only)
    }

    fn source_of(fake: &FakeImage, image: RbdSpec, read_only: bool) -> DiskSource {
        let info = DiskInfo {
            size_bytes: BYTES as u64,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only,
            direct: false,
        };
        let facts = ImageProperties {
            identity: "image".to_owned(),
            discard_bytes: 4096,
            optimal_bytes: None,
            object_bytes: 4096,
        };
        let shared =
            Arc::new(SharedImage::new(fake.open(), "image".to_owned(), BYTES as u64, 4096));
        let options = DiskOptions { read_only, ..DiskOptions::default() };
        let (end, _) = mpsc::channel();
        let source = RbdSource { shared, facts, image, options, info, _end: end };
        DiskSource::from_driver(info, Arc::new(source))
    }

    fn fake() -> FakeImage {
        FakeImage::new(&[0; BYTES])
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn an_image_shows_its_name_in_a_chain() {
        assert_eq!(source(&fake(), false).chain_text(), "rbd image");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn only_an_image_that_is_written_to_gets_another_size_of_whole_blocks() {
        let snapshot = RbdSpec { snapshot: Some("snapshot".to_owned()), ..RbdSpec::default() };
        for (image, read_only, bytes, refused) in [
            (RbdSpec::default(), false, 2 * BYTES as u64, None),
            (RbdSpec::default(), false, 511, Some("block")),
            (RbdSpec::default(), true, 2 * BYTES as u64, Some("it is open read-only")),
            (snapshot, true, 2 * BYTES as u64, Some("a snapshot cannot be resized")),
        ] {
            let source = source_of(&fake(), image.clone(), read_only);
            let checked = source.check_new_size(bytes).map_err(|error| error.to_string());
            let is_as_expected = match (&checked, refused) {
                (Err(error), Some(reason)) => error.contains(reason),
                (checked, reason) => checked.is_ok() && reason.is_none(),
            };
            assert!(is_as_expected, "{checked:?} in place of {refused:?}");
            assert_eq!(source.abilities().resize, image.snapshot.is_none());
            assert_eq!(source.size_probe().is_some(), image.snapshot.is_none());
        }
    }

    /// The errno of a flush.
    fn flush(source: &DiskSource) -> Option<i32> {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let flushed = thread.block_on(source.attach(thread.io()).flush()).unwrap();
        flushed.err().and_then(|error| error.raw_os_error())
    }

    /// The next process reads without a lock, and would find older data.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_cache_that_cannot_be_written_back_is_a_loss_and_ends_one_takeover() {
        let fake = fake();
        let source = source(&fake, false);
        source.hand_over().write_back().unwrap();
        assert_eq!(
            (fake.take_ops(), source.state()),
            (vec![("write back", 0, 0)], DiskState::Ready)
        );
        fake.fail_with(libc::EIO);
        assert!(source.hand_over().write_back().is_err());
        assert_eq!((source.state(), source.hand_over().loss()), (DiskState::Lost, Some(libc::EIO)));
        // The next process inherits a loss that is known.
        source.hand_over().write_back().unwrap();
        fake.fail_with(0);
        assert_eq!(flush(&source), Some(libc::EIO));
    }

    /// Another host has the lock, and reads without a lock.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_lock_of_an_image_changes_hands_after_its_data() {
        for exclusive in [true, false] {
            let fake = fake();
            let image = RbdSpec { exclusive, ..RbdSpec::default() };
            let lock = source_of(&fake, image, false).late_lock().unwrap();
            assert!(fake.take_ops().is_empty(), "it is locked early");
            lock.take(1).unwrap();
            let begun = [("lock", 0, 0), ("drop cache", 0, 0)];
            assert_eq!(fake.take_ops(), begun[usize::from(!exclusive)..]);
            lock.release(1).unwrap();
            assert_eq!(fake.take_ops(), [("write back", 0, 0), ("unlock", 0, 0)]);
            lock.take(2).unwrap();
            fake.take_ops();
            fake.fail_with(libc::EIO);
            lock.release(2).unwrap_err();
            let has_unlocked = fake.take_ops().contains(&("unlock", 0, 0));
            assert!(!has_unlocked, "data may be lost");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn an_image_that_another_client_keeps_is_refused_in_time() {
        let fake = fake();
        let image = RbdSpec { exclusive: true, ..RbdSpec::default() };
        let lock = source_of(&fake, image, false).late_lock().unwrap();
        fake.fail_with(libc::EROFS);
        let error = lock.take(1).unwrap_err().to_string();
        assert!(error.contains("another client holds its exclusive lock"), "{error}");
        fake.fail_with(0);
        lock.take(2).unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn an_image_inherits_the_loss_of_the_process_before() {
        for loss in [None, Some(libc::ENOSPC)] {
            let source = source(&fake(), false);
            source.hand_over().inherit(loss, false);
            assert_eq!(source.state() == DiskState::Lost, loss.is_some());
            assert_eq!(flush(&source), loss);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn an_image_that_is_only_read_has_no_cache_and_no_lock_to_give_up() {
        for read_only in [false, true] {
            let fake = fake();
            let source = source(&fake, read_only);
            source.hand_over().write_back().unwrap();
            source.hand_over().release_lock();
            let expected = [("write back", 0, 0), ("unlock", 0, 0)];
            assert_eq!(fake.take_ops(), expected[..if read_only { 0 } else { 2 }]);
        }
    }
}
