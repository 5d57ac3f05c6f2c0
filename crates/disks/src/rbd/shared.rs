//! The state of an image, for all threads that use it.

use std::io;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use blockio::Error;
use blockio::executor::{FairSemaphore, Lock};
use iomem::fits;
use tracing::Span;

use super::image::Image;

/// The most pieces of discards that the cluster has at once for one image.
const DISCARDS_AT_ONCE: usize = 4;

/// An image, and its known properties.
pub(super) struct SharedImage {
    pub(super) image: Image,
    /// The name in messages.
    pub(super) name: String,
    /// The span in which the image was opened, for its lines in the log.
    span: Span,
    /// The number of bytes that lie together in one object, or in neighbours over which they are
    /// spread.
    pub(super) object_bytes: u64,
    /// The line in which pieces of discards wait for their turn.
    pub(super) discards: FairSemaphore,
    /// An errno after which the data in the cluster is unknown; 0 for none.
    lost: AtomicI32,
    /// The size as last found, and the number of changes that librbd had reported before.
    size_bytes: AtomicU64,
    changes: AtomicU64,
    /// Locked while these two change.
    finding: Lock<()>,
    size_queries: Lock<SizeQueries>,
}

/// Operations that wait for the size.
#[derive(Default)]
struct SizeQueries {
    /// True while a thread asks for the size, and continues until no operation waits.
    is_running: bool,
    /// Operations that wait for a query not yet made.
    ops: Vec<usize>,
}

impl SharedImage {
    pub(super) fn new(image: Image, name: String, size_bytes: u64, object_bytes: u64) -> Self {
        Self {
            image,
            name,
            span: Span::current(),
            object_bytes,
            discards: FairSemaphore::new(DISCARDS_AT_ONCE),
            lost: AtomicI32::new(0),
            size_bytes: AtomicU64::new(size_bytes),
            changes: AtomicU64::new(0),
            finding: Lock::new(()),
            size_queries: Lock::default(),
        }
    }

    pub(super) fn refused(&self, reason: &str) -> Error {
        Error::Disk { disk: format!("rbd {}", self.name), reason: reason.to_owned() }
    }

    pub(super) fn loss(&self) -> io::Result<()> {
        match self.lost.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Takes over a loss of data from the previous process.
    pub(super) fn inherit(&self, loss: Option<i32>) {
        loss.into_iter().for_each(|errno| self.lost.store(errno, Ordering::Relaxed));
    }

    /// Marks written data as possibly lost, for ever, and logs the first loss.
    pub(super) fn record_loss(&self, error: &io::Error) {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        if self.lost.swap(errno, Ordering::Relaxed) == 0 {
            let advice = match errno {
                libc::ESHUTDOWN => {
                    "the cluster has blocked this process, because another client took the \
                     exclusive lock; make sure that no other program uses the image"
                }
                _ => "check the cluster (`ceph -s`)",
            };
            let _span = self.span.enter();
            tracing::error!(
                "rbd {}: {error}; data written since the last flush may be lost, and all further \
                 flushes fail; {advice}, then restart the export",
                self.name
            );
        }
    }

    /// The size, if librbd has reported no change since it was found.
    pub(super) fn known_size(&self) -> Option<u64> {
        // The size is stored before the number of changes at which it was found.
        let changes = self.changes.load(Ordering::Acquire);
        let size = self.size_bytes.load(Ordering::Relaxed);
        (changes == self.image.changes()).then_some(size)
    }

    /// The size as last found.
    pub(super) fn last_size(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// Makes an operation end with the size. Returns true if the caller must start a thread that
    /// [answers](Self::answer_all), since there is none.
    #[must_use]
    pub(super) fn await_size(&self, op: usize) -> bool {
        let mut size_queries = self.size_queries.lock();
        size_queries.ops.push(op);
        !std::mem::replace(&mut size_queries.is_running, true)
    }

    /// Answers all operations that wait for the size, until none is left. `find` asks the cluster.
    /// An operation that comes during a query may know of a later change, so it gets another query.
    pub(super) fn answer_all(&self, find: impl Fn() -> io::Result<u64>) {
        loop {
            let ops = {
                let mut size_queries = self.size_queries.lock();
                if size_queries.ops.is_empty() {
                    size_queries.is_running = false;
                    return;
                }
                std::mem::take(&mut size_queries.ops)
            };
            let size = find().map(|size| fits(size, "a size as a number of bytes"));
            let size = size.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO));
            for op in ops {
                self.image.pending_ops().end(op, size.map_err(io::Error::from_raw_os_error));
            }
        }
    }

    /// Asks for the size, and waits for the cluster.
    pub(super) fn probe_size(&self) -> io::Result<u64> {
        let changes = self.image.changes();
        let size = self.image.size_bytes()?;
        let _turn = self.finding.lock();
        // A later query may have been answered earlier.
        if changes >= self.changes.load(Ordering::Relaxed) {
            self.size_bytes.store(size, Ordering::Relaxed);
            self.changes.store(changes, Ordering::Release);
        }
        Ok(size)
    }
}

#[cfg(test)]
mod tests {
    use blockio::{IoThread, IoThreadConfig};
    use iomem::Buffers;

    use super::*;
    use crate::rbd::image::fake::FakeImage;

    fn shared(fake: &FakeImage) -> SharedImage {
        SharedImage::new(fake.open(), "image".to_owned(), 8192, 4096)
    }

    #[test]
    fn an_older_answer_about_the_size_does_not_replace_a_newer_one() {
        let fake = FakeImage::new(&[0; 8192]);
        let shared = shared(&fake);
        fake.resize(4096);
        // A later query has been answered after two more changes.
        shared.changes.store(3, Ordering::Relaxed);
        shared.size_bytes.store(16_384, Ordering::Relaxed);
        assert_eq!((shared.probe_size().unwrap(), shared.last_size()), (4096, 16_384));
        assert_eq!(shared.known_size(), None);
        fake.resize(512);
        fake.resize(1024);
        assert_eq!((shared.probe_size().unwrap(), shared.last_size()), (1024, 1024));
        assert_eq!(shared.known_size(), Some(1024));
    }

    /// Otherwise the second request would wait for a thread that has ended.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn each_query_for_the_size_has_a_thread_that_answers_it() {
        let fake = FakeImage::new(&[0; 8192]);
        let shared = shared(&fake);
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        for _ in 0..2 {
            let ops = [(); 2].map(|()| {
                let (op, completer) = thread.io().foreign_op(Buffers::empty());
                (op, shared.image.pending_ops().begin(completer).unwrap())
            });
            let starts = ops.each_ref().map(|(_, number)| shared.await_size(*number));
            assert_eq!(starts, [true, false], "one thread answers both");
            shared.answer_all(|| shared.probe_size());
            for (op, _) in ops {
                assert_eq!(thread.block_on(op).unwrap().result.unwrap(), 8192);
            }
        }
    }
}
