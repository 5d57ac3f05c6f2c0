//! An image on one IoThread: requests go to its files if the table has their place, and otherwise
//! to the owner.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockio::disk::{Extent, ExtentKind, TransferError};
use blockio::driver::{
    BounceShare, COPY_BYTES_MAX, CopyTurns, Driver, FilePosition, Request, in_parts,
};
use blockio::executor::Lock;
use blockio::op::OpKind;
use blockio::{Disk, EngineKind, Io};
use iomem::Buffers;

use super::owner::{Image, Job, post_job};
use super::place_queries::PlaceQueries;
use super::place_table::{Place, Run};
use super::readers::{ReaderGuard, Readers};

/// The most bytes of one request that move through the owner at once.
const PIECE_BYTES: usize = 256 << 10;

/// The most bytes of one request that get space at once.
const PLACED_BYTES: usize = 4 << 20;

pub(super) struct Qcow2Disk {
    image: Arc<Image>,
    io: Rc<Io>,
    /// The disks of the layers, from the top.
    layers: Vec<Disk>,
    readers: Arc<Readers>,
    last_guard: RefCell<Weak<ReaderGuard>>,
    place_queries: PlaceQueries,
    /// The budget of memory for data that moves through the owner.
    share: Rc<BounceShare>,
    copies: Rc<CopyTurns>,
}

impl Qcow2Disk {
    pub(super) fn new(image: &Arc<Image>, io: &Rc<Io>, engine: Option<EngineKind>) -> Self {
        let readers = Arc::new(Readers::default());
        image.core.add_thread(io.remote(), &readers);
        let sources = image.core.layers.iter();
        let layers = sources.map(|layer| layer.source.attach_with(io, engine)).collect();
        let share = io.bounce_share(image);
        Self {
            image: Arc::clone(image),
            io: Rc::clone(io),
            layers,
            readers,
            last_guard: RefCell::default(),
            place_queries: PlaceQueries::default(),
            share,
            copies: CopyTurns::for_disk(io, image),
        }
    }

    fn run(&self, offset: u64, len: u64) -> Run {
        self.image.core.table.run(offset, len)
    }

    /// Passes a job to the owner, and returns the data that the owner has read.
    async fn run_job(&self, job: Job) -> io::Result<Vec<u8>> {
        let data = Arc::new(Lock::new(Vec::new()));
        let (op, completer) = self.io.foreign_op(Buffers::empty());
        post_job(&self.image.owner, job, &data, completer);
        op.await.result?;
        let mut data = data.lock();
        Ok(std::mem::take(&mut *data))
    }

    /// Keeps the places of the table in use as long as the buffers. Requests that are in progress
    /// at the same time share a guard.
    fn guard_places(&self, buffers: &mut Buffers) {
        if self.image.core.is_writable() {
            let last = self.last_guard.borrow().upgrade().filter(|last| last.is_current_round());
            buffers.keep(last.unwrap_or_else(|| {
                let guard = Rc::new(ReaderGuard::new(&self.readers));
                self.last_guard.replace(Rc::downgrade(&guard));
                guard
            }));
        }
    }

    /// Reads some of the first bytes, or has their place found.
    async fn read_part(&self, offset: u64, rest: &Buffers) -> io::Result<usize> {
        let Run { place, bytes } = self.run(offset, rest.bytes() as u64);
        let bytes: usize = iomem::fits(bytes, "a part of a request");
        let mut part = rest.duplicate();
        part.truncate(bytes);
        match place {
            Place::Unknown => {
                self.run_job(Job::LookUp(range(offset, rest.bytes()))).await?;
                return Ok(0);
            }
            Place::Data { layer, offset, .. } => {
                self.guard_places(&mut part);
                self.layers[layer].read(offset, part).await?;
            }
            Place::Zero => {
                let bytes = bytes.min(COPY_BYTES_MAX);
                part.truncate(bytes);
                self.copies.turn(bytes).await;
                part.zero_from(0);
                return Ok(bytes);
            }
            Place::Owner => {
                let bytes = bytes.min(PIECE_BYTES);
                let _permit = self.share.take(bytes).await;
                let data = self.run_job(Job::Read(range(offset, bytes))).await?;
                self.copies.turn(bytes).await;
                part.copy_from(0, &data);
                return Ok(bytes);
            }
        }
        Ok(bytes)
    }

    async fn write_parts(
        &self,
        offset: u64,
        rest: Buffers,
        fua: bool,
    ) -> Result<(), TransferError> {
        let part = async |offset, rest: &Buffers| self.write_part(offset, rest).await;
        in_parts(offset, rest, part).await?;
        match fua {
            true => self.flush_all().await.map_err(TransferError::lost),
            false => Ok(()),
        }
    }

    async fn write_part(&self, offset: u64, rest: &Buffers) -> io::Result<usize> {
        let Run { place, bytes } = self.run(offset, rest.bytes() as u64);
        let bytes: usize = iomem::fits(bytes, "a part of a request");
        let may_be_new = matches!(place, Place::Zero | Place::Unknown);
        if may_be_new && self.find_place(range(offset, bytes.min(PLACED_BYTES))).await? {
            // The table knows the place from now on.
            return Ok(0);
        }
        match place {
            Place::Unknown => {
                self.run_job(Job::LookUp(range(offset, rest.bytes()))).await?;
                Ok(0)
            }
            Place::Data { layer, offset, writable: true } => {
                let mut part = rest.duplicate();
                part.truncate(bytes);
                self.guard_places(&mut part);
                self.layers[layer].write(offset, part, false).await?;
                Ok(bytes)
            }
            _ => {
                let bytes = bytes.min(PIECE_BYTES);
                let _permit = self.share.take(bytes).await;
                self.copies.turn(bytes).await;
                let mut data = vec![0; bytes];
                rest.copy_to(0, &mut data);
                self.run_job(Job::Write(offset, data)).await?;
                Ok(bytes)
            }
        }
    }

    /// Finds a place for a range among clusters that were counted ahead. Returns true if the range
    /// has one, perhaps an older one.
    async fn find_place(&self, range: Range<u64>) -> io::Result<bool> {
        if !self.image.core.order.has_ahead() {
            return Ok(false);
        }
        let cluster = self.image.core.cluster_bytes;
        let clusters = range.start - range.start % cluster..range.end.next_multiple_of(cluster);
        let ask = async |ranges| self.run_job(Job::Place(ranges)).await;
        self.place_queries.query(&self.io, (range, clusters), ask).await
    }

    /// Flushes the file, which also has the commits of the owner.
    async fn flush_all(&self) -> io::Result<()> {
        let core = &self.image.core;
        let committed = core.committed.load(Ordering::Acquire);
        self.layers[0].flush().await?;
        core.stable.fetch_max(committed, Ordering::AcqRel);
        Ok(())
    }

    /// Returns true if a flush has covered all changes of the tables.
    fn is_stable(&self) -> bool {
        let core = &self.image.core;
        core.stable.load(Ordering::Acquire) == core.committed.load(Ordering::Acquire)
    }

    async fn find_extent(&self, offset: u64, len: u64) -> io::Result<Extent> {
        loop {
            let Run { place, bytes } = self.run(offset, len);
            let kind = match place {
                Place::Unknown => {
                    let end = offset + bytes;
                    self.run_job(Job::LookUp(offset..end)).await?;
                    continue;
                }
                Place::Zero => ExtentKind::Hole,
                Place::Data { .. } | Place::Owner => ExtentKind::Data,
            };
            return Ok(Extent { bytes, kind });
        }
    }
}

fn range(offset: u64, bytes: usize) -> Range<u64> {
    offset..offset + bytes as u64
}

impl Driver for Qcow2Disk {
    fn route_to_file(
        &self,
        kind: OpKind,
        offset: u64,
        buffers: &mut Buffers,
    ) -> Option<FilePosition<'_>> {
        let len = buffers.bytes() as u64;
        let Run { place: Place::Data { layer, offset, writable }, bytes } = self.run(offset, len)
        else {
            return None;
        };
        let is_possible = match kind {
            OpKind::Write { fua } => writable && (!fua || self.is_stable()),
            _ => true,
        };
        if bytes < len || !is_possible {
            return None;
        }
        let in_file = self.layers[layer].route_to_file(kind, offset, buffers)?;
        self.guard_places(buffers);
        Some(in_file)
    }

    fn read(&self, offset: u64, mut buffers: Buffers) -> Request<'_, Result<(), TransferError>> {
        let len = buffers.bytes() as u64;
        if let Run { place: Place::Data { layer, offset, .. }, bytes } = self.run(offset, len)
            && bytes == len
        {
            self.guard_places(&mut buffers);
            return Box::pin(self.layers[layer].read(offset, buffers));
        }
        let part = async |offset, rest: &Buffers| self.read_part(offset, rest).await;
        Box::pin(in_parts(offset, buffers, part))
    }

    fn write(
        &self,
        offset: u64,
        mut buffers: Buffers,
        fua: bool,
    ) -> Request<'_, Result<(), TransferError>> {
        let len = buffers.bytes() as u64;
        if let Run { place: Place::Data { layer, offset, writable: true }, bytes } =
            self.run(offset, len)
            && bytes == len
            && (!fua || self.is_stable())
        {
            self.guard_places(&mut buffers);
            return Box::pin(self.layers[layer].write(offset, buffers, fua));
        }
        Box::pin(self.write_parts(offset, buffers, fua))
    }

    fn flush(&self) -> Request<'_, io::Result<()>> {
        Box::pin(self.flush_all())
    }

    fn discard(&self, offset: u64, len: u64) -> Request<'_, io::Result<()>> {
        Box::pin(async move { self.run_job(Job::Discard(offset..offset + len)).await.map(drop) })
    }

    fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Request<'_, io::Result<()>> {
        let job = Job::Zero { range: offset..offset + len, may_unmap };
        Box::pin(async move { self.run_job(job).await.map(drop) })
    }

    fn block_status(&self, offset: u64, len: u64) -> Request<'_, io::Result<Extent>> {
        Box::pin(self.find_extent(offset, len))
    }
}
