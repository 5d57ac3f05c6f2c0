//! Images in Ceph clusters, through librbd.
//!
//! librbd works on threads of its own. An operation is given to it by the IoThread, which does not
//! wait; the thread that ends it posts the result to the mailbox of the IoThread. Operations have
//! no time limit: while a cluster is away they wait, and go on by themselves when it is back.

mod api;
mod image;
pub(super) mod name;
mod open;
mod waiting;

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use iomem::{Buffers, IOVECS_MAX};

use self::image::Image;
use self::name::RbdImage;
use self::open::Facts;
use self::waiting::{Oldest, Waiting};
use super::info::{Abilities, DiskInfo, DiskOptions, DiskState, Extent, Link, Unfinished};
use super::outside::Outside;
use super::seam::{OtherDisk, OtherSource, Request};
use super::source::FileSource;
use super::{DiskSource, SourceKind};
use crate::config::EngineKind;
use crate::error::Error;
use crate::foreign_op::ForeignOp;
use crate::io::Io;

/// How often it is looked whether the cluster answers.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// How often the log repeats that it does not.
const TELL_INTERVAL: Duration = Duration::from_secs(60);

/// The most bytes of one discard: librbd makes an operation for each object at once.
const DISCARD_MAX: u64 = 1 << 30;

impl DiskSource {
    /// An image of a Ceph cluster. With [`DiskOptions::direct`] librbd caches nothing, and
    /// otherwise what the configuration of the cluster says. Waits for the cluster for 30 seconds.
    ///
    /// # Errors
    ///
    /// When the libraries of Ceph are not installed, the cluster cannot be reached, or the image
    /// cannot be opened or used as the options say.
    pub fn rbd(name: &RbdImage, options: &DiskOptions) -> Result<Self, Error> {
        let (image, info, facts) = open::open(name, options)?;
        let shared = Arc::new(Shared {
            size_bytes: AtomicU64::new(info.size_bytes),
            image,
            name: name.to_string(),
            lost: AtomicI32::new(0),
        });
        let end = watch(&shared).map_err(|error| shared.refused(&error.to_string()))?;
        let source =
            RbdSource { shared, facts, has_snapshot: name.snapshot.is_some(), info, _end: end };
        Ok(Self::new(info, SourceKind::Other(Arc::new(source))))
    }
}

/// An image for all threads that use it.
struct Shared {
    image: Image,
    /// What texts call it.
    name: String,
    /// An errno after which nobody knows what of the data is in the cluster; 0 for none.
    lost: AtomicI32,
    /// As it was found last.
    size_bytes: AtomicU64,
}

impl Shared {
    fn refused(&self, reason: &str) -> Error {
        Error::Disk { disk: format!("rbd {}", self.name), reason: reason.to_owned() }
    }

    fn loss(&self) -> io::Result<()> {
        match self.lost.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// What has been written may be lost, from now on for ever.
    fn lose(&self, error: &io::Error) {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        if self.lost.swap(errno, Ordering::Relaxed) == 0 {
            let advice = match errno {
                libc::ESHUTDOWN => {
                    "the cluster has locked this process out, because somebody else took over the \
                     exclusive lock; see to it that nobody else uses the image"
                }
                _ => "check the cluster (`ceph -s`)",
            };
            tracing::error!(
                "rbd {}: {error}; what was written since the last flush may be lost, and all \
                 further flushes fail; {advice}, then restart the export",
                self.name
            );
        }
    }

    fn find_size(&self) -> io::Result<u64> {
        let size = self.image.size_bytes()?;
        self.size_bytes.store(size, Ordering::Relaxed);
        Ok(size)
    }
}

struct RbdSource {
    shared: Arc<Shared>,
    facts: Facts,
    has_snapshot: bool,
    /// As it was opened.
    info: DiskInfo,
    /// Ends the thread that watches, by going.
    _end: mpsc::Sender<()>,
}

impl fmt::Debug for RbdSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RbdSource({})", self.shared.name)
    }
}

impl OtherSource for RbdSource {
    fn attach(&self, io: &Rc<Io>, _: Option<EngineKind>) -> Box<dyn OtherDisk> {
        Box::new(RbdDisk { shared: Arc::clone(&self.shared), io: Rc::clone(io) })
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
            resize: !self.has_snapshot,
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

    fn local(&self) -> Option<&FileSource> {
        None
    }

    fn state(&self) -> DiskState {
        match self.shared.image.waiting().away() {
            _ if self.shared.loss().is_err() => DiskState::Lost,
            Some(Oldest { since, .. }) => DiskState::Away(since),
            None => DiskState::Ready,
        }
    }

    fn remark(&self) -> Option<String> {
        let Oldest { ops, .. } = self.shared.image.waiting().away()?;
        Some(format!("{ops} operations wait for the cluster"))
    }

    fn give_up(&self) {
        self.shared.image.waiting().give_up();
    }

    /// Whoever goes on would otherwise wait for half a minute, until the cluster takes this client
    /// for dead.
    fn leave(&self) {
        if !self.info.read_only
            && let Err(error) = self.shared.image.unlock()
        {
            // It is not ours, or there is none.
            tracing::debug!("rbd {}: its lock is not released: {error}", self.shared.name);
        }
    }

    fn outside(&self) -> Option<Arc<Outside>> {
        if self.has_snapshot {
            return None;
        }
        let shared = Arc::downgrade(&self.shared);
        Some(Arc::new(Outside::other(move || {
            let Some(shared) = shared.upgrade() else { return Ok(None) };
            if shared.image.has_changed() {
                // What cannot be asked now is asked again.
                shared.find_size().inspect_err(|_| shared.image.look_again())?;
            }
            Ok(Some(shared.size_bytes.load(Ordering::Relaxed)))
        })))
    }

    fn find_size(&self) -> Result<u64, Error> {
        let size = self.shared.find_size();
        let size = size.map_err(|error| {
            self.shared.refused(&format!("the cluster does not say how large it is: {error}"))
        })?;
        open::check_size(size, self.info.logical_block_bytes)
            .map_err(|reason| self.shared.refused(&reason))?;
        Ok(size)
    }

    fn check_new_size(&self, size_bytes: u64) -> Result<(), Error> {
        let checked = if self.has_snapshot {
            Err("a snapshot keeps its size; resize the image".to_owned())
        } else if self.info.read_only {
            Err("it is open for reading only; use `rbd resize`, and ask again without a size"
                .to_owned())
        } else {
            open::check_size(size_bytes, self.info.logical_block_bytes)
        };
        checked.map_err(|reason| self.shared.refused(&reason))
    }

    fn set_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.shared.image.resize(size_bytes).map_err(|error| {
            self.shared.refused(&format!("it cannot be given {size_bytes} bytes: {error}"))
        })?;
        self.shared.size_bytes.store(size_bytes, Ordering::Relaxed);
        Ok(())
    }

    fn adopt_size(&self, _: u64) {}
}

/// Starts a thread that tells the log when the cluster does not answer. It ends when nobody has the
/// image any more, or what this returns is dropped.
fn watch(shared: &Arc<Shared>) -> io::Result<mpsc::Sender<()>> {
    let (end, ended) = mpsc::channel::<()>();
    let (waiting, name) = (Arc::downgrade(shared.image.waiting()), shared.name.clone());
    let work = move || {
        let mut told = Told { since: None, last: None };
        while ended.recv_timeout(LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let Some(waiting) = Weak::upgrade(&waiting) else { return };
            told.look(&name, &waiting);
        }
    };
    thread::Builder::new().name("ringhaul-rbd".into()).spawn(work)?;
    Ok(end)
}

/// What the log knows.
struct Told {
    /// Since when the cluster has been away.
    since: Option<Instant>,
    last: Option<Instant>,
}

impl Told {
    fn look(&mut self, name: &str, waiting: &Waiting) {
        let now = Instant::now();
        match (waiting.away(), self.since) {
            // Nobody waits for it any more.
            _ if waiting.was_given_up() => *self = Self { since: None, last: None },
            (None, Some(since)) => {
                let after = now.saturating_duration_since(since).as_secs();
                tracing::info!("rbd {name}: the cluster answers again, after {after} s");
                *self = Self { since: None, last: None };
            }
            (Some(Oldest { since, ops }), first) => {
                self.since = first.or(Some(since));
                let is_due = |last| now.saturating_duration_since(last) >= TELL_INTERVAL;
                if self.last.is_none_or(is_due) {
                    self.last = Some(now);
                    let seconds = now.saturating_duration_since(since).as_secs();
                    tracing::warn!(
                        "rbd {name}: the cluster has not answered an operation for {seconds} s; \
                         {ops} operations wait and go on when it answers; check it (`ceph -s`)"
                    );
                }
            }
            (None, None) => {}
        }
    }
}

/// An image on one IoThread.
struct RbdDisk {
    shared: Arc<Shared>,
    io: Rc<Io>,
}

impl RbdDisk {
    /// Has librbd read or write all of `rest`, in as few operations as it takes.
    async fn transfer(
        &self,
        reads: bool,
        mut offset: u64,
        mut rest: Buffers,
        begin: impl Fn(u64, Buffers) -> ForeignOp,
    ) -> Result<(), Unfinished> {
        while rest.iovecs().len() > IOVECS_MAX {
            let bytes = rest.iovecs()[..IOVECS_MAX].iter().map(|range| range.iov_len).sum();
            let mut piece = rest.again();
            piece.truncate(bytes);
            let done = begin(offset, piece).await;
            match done.result {
                Ok(moved) => fill_rest(reads, moved, &done.buffers),
                Err(error) => return Err(Unfinished::new(self.seen(error), rest)),
            }
            rest.advance(bytes);
            offset += bytes as u64;
        }
        let done = begin(offset, rest).await;
        match done.result {
            Ok(moved) => {
                fill_rest(reads, moved, &done.buffers);
                Ok(())
            }
            Err(error) => Err(Unfinished::new(self.seen(error), done.buffers)),
        }
    }

    /// An error of an operation. Whoever was locked out by the cluster stays so.
    fn seen(&self, error: io::Error) -> io::Error {
        if error.raw_os_error() == Some(libc::ESHUTDOWN) {
            self.shared.lose(&error);
        }
        error
    }

    async fn all(&self, op: ForeignOp) -> io::Result<()> {
        op.await.result.map(|_| ()).map_err(|error| self.seen(error))
    }

    async fn flush_all(&self) -> io::Result<()> {
        let image = &self.shared.image;
        let result = self.all(image.flush(&self.io)).await;
        if let Err(error) = &result
            && !image.waiting().was_given_up()
        {
            self.shared.lose(error);
        }
        result.and_then(|()| self.shared.loss())
    }
}

/// An image that somebody has made smaller ends within a read: what is beyond reads as zeroes.
fn fill_rest(reads: bool, moved: usize, buffers: &Buffers) {
    if reads && moved < buffers.bytes() {
        buffers.zero_from(moved);
    }
}

impl OtherDisk for RbdDisk {
    fn read(&self, offset: u64, buffers: Buffers) -> Request<'_, Result<(), Unfinished>> {
        Box::pin(self.transfer(true, offset, buffers, |offset, piece| {
            self.shared.image.read(&self.io, offset, piece)
        }))
    }

    fn write(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Request<'_, Result<(), Unfinished>> {
        Box::pin(async move {
            let begin = |offset, piece| self.shared.image.write(&self.io, offset, piece);
            self.transfer(false, offset, buffers, begin).await?;
            if fua {
                let flushed = self.flush_all().await;
                flushed.map_err(|error| Unfinished::new(error, Buffers::empty()))?;
            }
            Ok(())
        })
    }

    fn flush(&self) -> Request<'_, io::Result<()>> {
        Box::pin(self.flush_all())
    }

    fn discard(&self, offset: u64, len: u64) -> Request<'_, io::Result<()>> {
        Box::pin(async move {
            let mut done = 0;
            while done < len {
                let bytes = (len - done).min(DISCARD_MAX);
                self.all(self.shared.image.discard(&self.io, offset + done, bytes)).await?;
                done += bytes;
            }
            Ok(())
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Request<'_, io::Result<()>> {
        Box::pin(async move {
            let mut done = 0;
            while done < len {
                let bytes = (len - done).min(DISCARD_MAX);
                let of_memory = iomem::fits(bytes, "a part of a range");
                let op =
                    self.shared.image.write_zeroes(&self.io, offset + done, of_memory, may_unmap);
                self.all(op).await?;
                done += bytes;
            }
            Ok(())
        })
    }

    fn block_status(&self, _: u64, len: u64) -> Request<'_, io::Result<Extent>> {
        Box::pin(async move { Ok(Extent::data(len)) })
    }
}
