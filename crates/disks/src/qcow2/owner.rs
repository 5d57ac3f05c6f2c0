//! The owner of an image: a thread with a loop of its own, and the only user of imago. It finds the
//! places of data, and makes all changes of places.
//!
//! A write that is answered must survive a kill of this process, even without a flush: its sender
//! may continue with the next process. So the changes of a request in the tables of the image are
//! in the file before the answer, and before other requests may use them. Many changes share one
//! such commit. A flush of the file then makes all of it stable.

mod changes;
mod commit;
mod compressed_io;
mod exclusive;
mod first_writes;
mod job;
mod quiesce;
mod removal;

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockio::driver::{ForeignCompleter, RateLimit};
use blockio::executor::Lock;
use blockio::{EngineKind, Error, Io, IoThread, IoThreadConfig, Remote, oneshot};
use imago::{Mapping, StorageExt};
use iomem::Buffers;
use tokio::sync::{Mutex, OnceCell, RwLock, Semaphore, SemaphorePermit};

use super::core::Core;
use super::format::{Format, has_any, open};
use super::place_table::Place;
use super::storage::{self, Store};
use changes::Changes;
pub(super) use job::Job;

/// The most ops of an owner in the kernel at once. Each image has its own context of Linux AIO, and
/// the system bounds the sum of their depths.
const DEPTH: u32 = 64;

/// The units that are looked up at once, since neighbours will be needed too.
const UNITS_AHEAD: u64 = 256;

/// Starts the thread of an image.
pub(super) fn start(core: &Arc<Core>) -> Result<(Remote, oneshot::Receiver<()>), Error> {
    let (answer, pending) = oneshot::channel();
    let (end, ended) = oneshot::channel();
    let core = Arc::clone(core);
    let run = move || {
        run_owner(core, answer);
        end.send(());
    };
    Io::start_thread("qcow2", run)
        .map_err(|error| Error::System { action: "start the thread of an image", error })?;
    let gone = || Error::Options("the thread of an image has ended".to_owned());
    let owner = pending.wait().ok_or_else(gone)??;
    Ok((owner, ended))
}

fn run_owner(core: Arc<Core>, answer: oneshot::Sender<Result<Remote, Error>>) {
    let with = |engine: EngineKind| {
        // Jobs come with requests, and busy-polling for them takes the CPU from the IoThread.
        let (engine, poll_max) = (engine.into(), Duration::ZERO);
        IoThread::new(&IoThreadConfig {
            engine,
            depth: DEPTH,
            poll_max,
            watches_itself: true,
            ..Default::default()
        })
    };
    let thread = match with(EngineKind::IoUring).or_else(|_| with(EngineKind::Threads)) {
        Ok(thread) => thread,
        Err(error) => return answer.send(Err(error)),
    };
    let sources: Vec<_> = core.layers.iter().map(|layer| layer.source.clone()).collect();
    storage::attach(&sources, &thread.io().bounce_share(&core), thread.io());
    let owner = Rc::new(Owner::new(core, Rc::clone(thread.io())));
    OWNER.set(Some(owner));
    answer.send(Ok(thread.remote()));
    if let Err(error) = thread.run() {
        tracing::error!("the thread of an image has failed: {error}");
    }
    OWNER.set(None);
    storage::detach();
}

thread_local! {
    static OWNER: RefCell<Option<Rc<Owner>>> = const { RefCell::new(None) };
}

/// Passes a job to the owner, for the completer of an op. The op gets no bytes: data is put into
/// `data`.
pub(super) fn post_job(
    remote: &Remote,
    job: Job,
    data: &Arc<Lock<Vec<u8>>>,
    done: ForeignCompleter,
) {
    let data = Arc::clone(data);
    begin(remote, job, move |result| {
        let result = result.map(|read| {
            *data.lock() = read;
            0
        });
        done.complete(result);
    });
}

/// Like [`post_job`], for threads that may wait.
pub(super) fn run_job_blocking(remote: &Remote, job: Job) -> io::Result<()> {
    let (answer, pending) = oneshot::channel();
    begin(remote, job, move |result| answer.send(result.map(drop)));
    let gone = || Err(io::Error::from_raw_os_error(libc::ECANCELED));
    pending.wait().unwrap_or_else(gone)
}

fn begin(remote: &Remote, job: Job, end: impl FnOnce(io::Result<Vec<u8>>) + Send + 'static) {
    // If the thread has ended, `end` is dropped, which reports the failure.
    remote.post(move |io| {
        let Some(owner) = OWNER.with_borrow(Clone::clone) else { return };
        let running = owner.track(&job);
        io.spawn(async move {
            let result = owner.answer(job).await;
            drop(running);
            end(result);
        });
    });
}

/// Brings the image of this thread to rest, and then ends the thread, even if a job still runs.
fn stop_owner(io: &Rc<Io>) {
    let Some(owner) = OWNER.with_borrow(Clone::clone) else { return io.stop() };
    io.spawn(async move {
        owner.shut_down().await;
        owner.io.stop();
    });
}

/// Counts a job until it ends and this is dropped.
struct Running(Rc<Owner>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.jobs.set(self.0.jobs.get() - 1);
    }
}

/// An image with its owner. Dropping it ends the owner.
pub(super) struct Image {
    pub(super) core: Arc<Core>,
    pub(super) owner: Remote,
    /// The end of the owner's thread, until a caller has waited for it.
    pub(super) ended: Lock<Option<oneshot::Receiver<()>>>,
}

impl Image {
    /// Ends the owner, and waits until it has closed its files.
    pub(super) fn end(&self) {
        self.owner.post(stop_owner);
        let ended = self.ended.lock().take();
        let _ = ended.and_then(oneshot::Receiver::wait);
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Image").field(&self.core.name()).finish()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        self.owner.post(stop_owner);
    }
}

struct Owner {
    core: Arc<Core>,
    io: Rc<Io>,
    /// Jobs that read the tables, or add to them, share the lock. Jobs that remove entries, and
    /// commits, hold it alone: no change is half in the file.
    image: OnceCell<RwLock<Format>>,
    changes: Changes,
    /// Held while clusters are counted ahead beside requests.
    counting: Mutex<()>,
    job_permits: Semaphore,
    log_limit: RefCell<RateLimit>,
    /// Jobs that have not ended.
    jobs: Cell<usize>,
    /// True if another process may have used the image since the last change here.
    is_handed_over: Cell<bool>,
}

impl Owner {
    fn new(core: Arc<Core>, io: Rc<Io>) -> Self {
        let job_permits = Semaphore::new(core.cache_limit.jobs());
        Self {
            core,
            io,
            image: OnceCell::new(),
            changes: Changes::default(),
            counting: Mutex::default(),
            job_permits,
            log_limit: RefCell::default(),
            jobs: Cell::new(0),
            is_handed_over: Cell::new(false),
        }
    }

    fn track(self: &Rc<Self>, job: &Job) -> Option<Running> {
        if job.may_change_tables() {
            self.is_handed_over.set(false);
        }
        (!matches!(job, Job::Quiesce)).then(|| {
            self.jobs.set(self.jobs.get() + 1);
            Running(Rc::clone(self))
        })
    }

    async fn answer(&self, job: Job) -> io::Result<Vec<u8>> {
        // The caller reports why the image cannot be opened.
        if let Job::Open = job {
            return self.image().await.map(|_| Vec::new());
        }
        let freed = job.releasing_copy();
        let mut result = self.carry_out(job).await;
        if let (Err(error), Some((range, job))) = (&result, freed)
            && removal::is_full(error)
        {
            self.release_early(&range).await?;
            result = self.carry_out(job).await;
        }
        result.inspect_err(|error| self.log_error(error))
    }

    async fn carry_out(&self, job: Job) -> io::Result<Vec<u8>> {
        if job.may_change_tables() {
            self.mark().await?;
        }
        match job {
            Job::Open => Ok(Vec::new()),
            Job::Read(range) => self.read(range).await,
            Job::LookUp(range) => self.look_up(range).await.map(|()| Vec::new()),
            Job::Write(offset, data) => self.write(offset, &data).await.map(|()| data),
            Job::Place(ranges) => self.place_ahead(&ranges).await,
            Job::Discard(range) => self.discard(range).await.map(|()| Vec::new()),
            Job::Zero { range, may_unmap } => {
                self.zero(range, may_unmap).await.map(|()| Vec::new())
            }
            Job::Grow(size) => self.grow(size).await.map(|()| Vec::new()),
            Job::Quiesce => {
                self.hand_over().await;
                Ok(Vec::new())
            }
        }
    }

    /// Logs an error without an errno, since requests get only a number.
    fn log_error(&self, error: &io::Error) {
        if error.raw_os_error().is_none()
            && let Some(left_out) = self.log_limit.borrow_mut().permit(Instant::now())
        {
            let image = self.core.name();
            tracing::error!(
                "{image}: {error}; check it with `qemu-img check` ({left_out} more such errors \
                 were not logged)"
            );
        }
    }

    async fn image(&self) -> io::Result<&RwLock<Format>> {
        self.image.get_or_try_init(|| async { Ok(RwLock::new(open(&self.core).await?)) }).await
    }

    /// Waits until few enough jobs use tables. The permit comes before the lock of the image: a
    /// holder of the lock must not wait for jobs that wait for it.
    async fn acquire_permit(&self) -> io::Result<SemaphorePermit<'_>> {
        let permit = self.job_permits.acquire().await.map_err(io::Error::other)?;
        if self.core.cache_limit.is_reached() {
            drop(self.lock_exclusively().await?);
        }
        Ok(permit)
    }

    async fn read(&self, range: Range<u64>) -> io::Result<Vec<u8>> {
        let mut data = vec![0; iomem::fits(range.end - range.start, "bytes in memory")];
        let _permit = self.acquire_permit().await?;
        let image = self.image().await?.read().await;
        check_end(&image, &range)?;
        self.read_into(&image, &mut data, range.start).await?;
        Ok(data)
    }

    /// Puts the places of these bytes, and of some neighbours, into the table.
    async fn look_up(&self, range: Range<u64>) -> io::Result<()> {
        while !self.try_look_up(&range).await? {
            // The bytes have space that is not in the tables of the file yet.
            self.commit().await?;
        }
        Ok(())
    }

    async fn try_look_up(&self, range: &Range<u64>) -> io::Result<bool> {
        self.look_up_in(range, self.core.table.unit_bytes() * UNITS_AHEAD).await
    }

    /// Puts the places of the parts of this size that a range touches into the table. Returns false
    /// if other requests must not use a part of the range yet.
    async fn look_up_in(&self, range: &Range<u64>, span: u64) -> io::Result<bool> {
        let table = &self.core.table;
        let _permit = self.acquire_permit().await?;
        let image = self.image().await?.read().await;
        check_end(&image, range)?;
        let size = image.size();
        let mut at = range.start - range.start % span;
        let end = range.end.next_multiple_of(span).min(size);
        while at < end {
            let (mapping, len) = image.get_mapping(at, end - at).await?;
            // Nothing else runs from here until the table is written.
            let unit_end = at.next_multiple_of(table.unit_bytes());
            assert_eq!(at, unit_end, "each look-up begins with a unit");
            let is_last = at + len >= size;
            let whole = if is_last { len } else { len - len % table.unit_bytes() };
            let (place, len) = match whole {
                0 => (Place::Owner, table.unit_bytes().min(size - at)),
                _ => (self.place(&mapping, whole), whole),
            };
            if self.changes.is_uncommitted(&(at..at + len)) {
                if at < range.end && range.start < at + len {
                    return Ok(false);
                }
            } else {
                table.set(at, len, place);
            }
            at += len;
        }
        Ok(true)
    }

    fn place(&self, mapping: &Mapping<'_, Store>, len: u64) -> Place {
        match mapping {
            Mapping::Raw { storage, offset, writable, .. } => {
                let is_there = offset.checked_add(len).is_some_and(|end| end <= storage.bytes());
                if !is_there || !offset.is_multiple_of(512) {
                    return Place::Owner;
                }
                let may_write = self.core.is_writable() && !self.core.order.mark.delays_writes();
                let (layer, writable) = (storage.layer, *writable && may_write);
                if writable && storage.check_data(*offset, len).is_err() {
                    return Place::Owner;
                }
                Place::Data { layer, offset: *offset, writable: writable && layer == 0 }
            }
            Mapping::Zero { .. } => Place::Zero,
            _ => Place::Owner,
        }
    }

    /// Writes data that has no space yet, or had none when it was looked up.
    async fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let range = offset..offset + data.len() as u64;
        let written = async {
            match self.write_concurrently(&range, data).await? {
                true => Ok(()),
                false => self.write_exclusively(&range, data).await,
            }
        };
        if let Err(error) = written.await {
            // Only a commit makes imago reuse the space that was found for this write. Without one,
            // a write that is tried again and again would make the file longer each time.
            self.changes.add();
            let _ = self.commit().await;
            return Err(error);
        }
        self.commit().await?;
        self.look_up(range).await
    }

    /// Writes beside other writes, unless that releases space: imago would give it to any of them
    /// at once, while the tables in the file still use it. The same holds after a failed commit.
    /// Returns false if nothing was written.
    async fn write_concurrently(&self, range: &Range<u64>, data: &[u8]) -> io::Result<bool> {
        let _permit = self.acquire_permit().await?;
        let image = self.image().await?.read().await;
        check_end(&image, range)?;
        let is_possible = !self.changes.has_failed() && !self.releases_space(&image, range).await?;
        let mut done = 0;
        while is_possible && done < data.len() {
            done += self.write_some(&image, range.start + done as u64, &data[done..]).await?;
        }
        Ok(is_possible)
    }

    /// Returns true if a change of the clusters that a range touches releases space of this image:
    /// they are compressed, or shared.
    async fn releases_space(&self, image: &Format, range: &Range<u64>) -> io::Result<bool> {
        let cluster = self.core.cluster_bytes;
        let start = range.start - range.start % cluster;
        let range = start..range.end.next_multiple_of(cluster).min(image.size());
        has_any(image, &range, |mapping: &Mapping<'_, Store>| match mapping {
            Mapping::Special { layer, .. } => std::ptr::eq(*layer, image),
            Mapping::Raw { storage, writable, .. } => storage.layer == 0 && !writable,
            _ => false,
        })
        .await
    }

    /// Writes some of the first bytes, and returns their number.
    async fn write_some(&self, image: &Format, offset: u64, data: &[u8]) -> io::Result<usize> {
        match self.core.order.is_rounded() {
            true => self.write_decompressed(image, offset, data).await,
            false => self.write_found(image, offset, data, false).await,
        }
    }

    /// Like [`write_some`](Self::write_some), but writes all of `data` at once if it is one
    /// cluster.
    async fn write_found(
        &self,
        image: &Format,
        offset: u64,
        data: &[u8],
        is_cluster: bool,
    ) -> io::Result<usize> {
        let (found, same) = image.get_mapping(offset, data.len() as u64).await?;
        // Clusters of zeroes may have space. imago releases the second cluster's space if it does
        // not follow the first one's.
        let cluster = self.core.cluster_bytes;
        let len = match found {
            _ if is_cluster => data.len() as u64,
            Mapping::Zero { explicit: true, .. } => same.min(cluster - offset % cluster),
            _ => same,
        };
        let reads_as_zeroes = self.reads_as_zeroes(image, &found, offset..offset + len).await?;
        let mapping = image.prepare_data_mapping(offset, len, true).await?;
        let len = usize::try_from(mapping.length().min(len)).unwrap_or(data.len());
        assert!(len > 0, "space for no bytes");
        mapping.storage().check_data(mapping.offset(), len as u64)?;
        let host = mapping.offset()..mapping.offset() + len as u64;
        match !mapping.is_nonblocking() && reads_as_zeroes && self.core.order.take_ahead(&host) {
            true => self.core.top.write_data(&data[..len], host.start).await?,
            false => mapping.storage().write(&data[..len], host.start).await?,
        }
        if !mapping.is_nonblocking() {
            // The rest of the cluster was copied from below, and must not be used until then
            // either.
            let end = (offset + len as u64).next_multiple_of(cluster);
            self.changes.add_range(offset - offset % cluster..end);
        }
        image.commit_data_mapping(mapping).await?;
        Ok(len)
    }

    /// Forgets the places of a range, and waits until no request uses its data. The caller keeps
    /// new places out of the table.
    async fn revoke_places(&self, range: &Range<u64>) {
        self.core.table.forget(range);
        let mut ops = Vec::new();
        for (remote, readers) in self.core.threads() {
            let (op, completer) = self.io.foreign_op(Buffers::empty());
            // If that thread has ended, the completer is dropped, and there is nothing to wait for.
            remote.post(move |_| readers.wait(completer));
            ops.push(op);
        }
        for op in ops {
            let _ = op.await;
        }
    }
}

/// Refuses a range beyond the end: nothing there has a place, however often a request asks for it.
fn check_end(image: &Format, range: &Range<u64>) -> io::Result<()> {
    let size = image.size();
    if range.end <= size {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "a request for the bytes up to {} goes beyond its end at {size}",
        range.end
    )))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use blockio::testing::RemoteStub;
    use blockio::{DiskOptions, DiskSource};

    use super::*;
    use crate::qcow2::{Layer, open_image};

    const CLUSTER: u64 = 512 << 10;

    /// Changes of other requests need a commit of their own.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_commit_ends_no_change_that_was_made_beside_it() {
        const CLUSTER: u64 = 64 << 10;
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2"]).arg(file.path());
        if create.arg("64M").status().is_err() {
            eprintln!("skipped: qemu-img is not installed");
            return;
        }
        let mut content = std::fs::read(file.path()).unwrap();
        content.resize(content.len().next_multiple_of(4096), 0);
        let end = RemoteStub::exclusive(&content);
        let layers = vec![Layer::qcow2(end.clone().source()).unwrap()];
        let (_, source) = open_image(layers, false).unwrap();
        let (send, found) = oneshot::channel();
        source.image.owner.post(move |io| {
            let owner = OWNER.with_borrow(Clone::clone).unwrap();
            io.spawn(async move {
                owner.mark().await.unwrap();
                // From now on clusters are counted ahead, and the table is known.
                owner.write(0, &[7; 512]).await.unwrap();
                let [first, second, third] =
                    [2, 4, 6].map(|cluster| cluster * CLUSTER..(cluster + 1) * CLUSTER);
                assert!(owner.place_concurrently(&first).await.unwrap());
                end.set_silent(true);
                let mut commit = Box::pin(owner.commit_entries());
                std::future::poll_fn(|context| {
                    assert!(commit.as_mut().poll(context).is_pending());
                    std::task::Poll::Ready(())
                })
                .await;
                assert!(owner.place_concurrently(&second).await.unwrap());
                end.set_silent(false);
                assert!(commit.await.unwrap());
                // A look-up covers both, but only one of them may be used.
                for (range, may_use) in [(&first, true), (&second, false), (&third, true)] {
                    let part = range.start..range.start + 512;
                    assert_eq!(owner.try_look_up(&part).await.unwrap(), may_use, "{part:?}");
                }
                let changes = &owner.changes;
                let are_uncommitted = [first, second].map(|range| changes.is_uncommitted(&range));
                send.send((are_uncommitted, changes.are_committed()));
            });
        });
        assert_eq!(found.wait(), Some(([false, true], false)));
    }

    /// Reads of a backing file go straight to it, up to its last byte.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn all_bytes_of_a_backing_file_have_their_places() {
        const BYTES: u64 = 1 << 20;
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-u", "-F", "raw", "-b", "below"]);
        if create.arg(file.path()).arg("2M").status().is_err() {
            eprintln!("skipped: qemu-img is not installed");
            return;
        }
        let options = DiskOptions { holds_image: true, ..DiskOptions::default() };
        let top = Layer::qcow2(DiskSource::file(file.path(), &options).unwrap()).unwrap();
        let below = RemoteStub::new(&vec![7; usize::try_from(BYTES).unwrap()]);
        let (_, source) = open_image(vec![top, Layer::raw(below.source())], false).unwrap();
        let (send, found) = oneshot::channel();
        source.image.owner.post(move |io| {
            let owner = OWNER.with_borrow(Clone::clone).unwrap();
            io.spawn(async move {
                owner.look_up(0..2 * BYTES).await.unwrap();
                let place = |at| owner.core.table.run(at, 512).place;
                send.send([0, BYTES - 512, BYTES].map(place));
            });
        });
        let data = |offset| Place::Data { layer: 1, offset, writable: false };
        assert_eq!(found.wait(), Some([data(0), data(BYTES - 512), Place::Zero]));
    }

    /// A look-up covers less than a cluster here. A kill would lose data in a place that no table
    /// of the file has.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn no_part_of_a_cluster_with_new_space_is_used_before_the_commit() {
        let folder = tempfile::tempdir().unwrap();
        let [base, top] = ["base", "top"].map(|name| folder.path().join(name));
        let create = |arguments: &[&str], path: &std::path::Path| {
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2"]).args(arguments).arg(path).arg("1M");
            create.status()
        };
        if create(&["-o", "cluster_size=512"], &base).is_err() {
            eprintln!("skipped: qemu-img is not installed");
            return;
        }
        let below = base.display().to_string();
        let over = ["-o", "cluster_size=512k", "-F", "qcow2", "-b", &below];
        assert!(create(&over, &top).unwrap().success());
        let layers = [(top, false), (base, true)].map(|(path, read_only)| {
            let options = DiskOptions { read_only, holds_image: true, ..DiskOptions::default() };
            Layer::qcow2(DiskSource::file(&path, &options).unwrap()).unwrap()
        });
        let (_, source) = open_image(layers.into(), false).unwrap();
        let (send, found) = oneshot::channel();
        source.image.owner.post(move |io| {
            let owner = OWNER.with_borrow(Clone::clone).unwrap();
            io.spawn(async move {
                let find = async || {
                    let mut found = Vec::new();
                    // At the cache limit a look-up commits first.
                    owner.core.cache_limit.clear();
                    for at in [0, 4096, CLUSTER / 2, CLUSTER - 512, CLUSTER] {
                        found.push(owner.try_look_up(&(at..at + 512)).await.unwrap());
                    }
                    found
                };
                owner.mark().await.unwrap();
                assert!(owner.write_concurrently(&(4096..4608), &[7; 512]).await.unwrap());
                let before = find().await;
                owner.commit().await.unwrap();
                send.send((before, find().await));
            });
        });
        let (before, after) = found.wait().unwrap();
        assert_eq!(before, [false, false, false, false, true]);
        assert_eq!(after, [true; 5]);
    }
}
