//! A layer that converts all data of the disk below, as encryption does: each request also moves
//! its data without an op, and holds up the loop for that time.

use std::cell::RefCell;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use blockio::disk::{Abilities, DiskSource, Extent, Link, Placement, SizeProbe, TransferError};
use blockio::driver::{CopyTurns, Driver, DriverSource, Request};
use blockio::{Disk, EngineKind, Error, Io};
use iomem::Buffers;

use crate::plan::PIECE_BYTES;
use crate::world::World;

thread_local! {
    /// The world of this thread's run. A source crosses threads, and a world cannot.
    static WORLD: RefCell<Weak<World>> = const { RefCell::new(Weak::new()) };
}

/// A layer over `below` in a run of `world`.
pub(crate) fn new(below: DiskSource, world: &Rc<World>) -> DiskSource {
    WORLD.set(Rc::downgrade(world));
    let info = below.info();
    let size_bytes = AtomicU64::new(info.size_bytes);
    DiskSource::from_driver(info, Arc::new(Source { below: Arc::new(below), size_bytes }))
}

#[derive(Debug)]
struct Source {
    below: Arc<DiskSource>,
    /// The present size. The disk below keeps its size.
    size_bytes: AtomicU64,
}

impl DriverSource for Source {
    fn below(&self) -> Option<&DiskSource> {
        Some(&self.below)
    }

    fn attach(&self, io: &Rc<Io>, engine: Option<EngineKind>) -> Box<dyn Driver> {
        let below = self.below.attach_with(io, engine);
        Box::new(ConvertedDisk { below, copies: CopyTurns::for_disk(io, &self.below) })
    }

    fn chain(&self) -> Vec<Link> {
        self.below.chain()
    }

    fn identity(&self) -> &str {
        self.below.identity()
    }

    fn place(&self) -> Option<Placement> {
        Some(self.below.place())
    }

    fn abilities(&self) -> Abilities {
        self.below.abilities()
    }

    fn discard_bytes(&self) -> Option<u32> {
        self.below.discard_bytes()
    }

    fn size_probe(&self) -> Option<Arc<SizeProbe>> {
        self.below.size_probe()
    }

    fn probe_size(&self) -> Result<u64, Error> {
        self.known_size()
    }

    fn known_size(&self) -> Result<u64, Error> {
        Ok(self.size_bytes.load(Relaxed))
    }

    fn check_new_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.below.check_new_size(size_bytes)
    }

    fn set_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.below.set_size(size_bytes, || ())
    }

    fn adopt_size(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes, Relaxed);
    }
}

struct ConvertedDisk {
    below: Disk,
    copies: Rc<CopyTurns>,
}

impl ConvertedDisk {
    async fn convert(&self, bytes: usize) {
        for start in (0..bytes).step_by(PIECE_BYTES) {
            let piece = PIECE_BYTES.min(bytes - start);
            self.copies.turn(piece).await;
            if let Some(world) = WORLD.with_borrow(Weak::upgrade) {
                world.copy(piece);
            }
        }
    }
}

impl Driver for ConvertedDisk {
    fn read(&self, offset: u64, buffers: Buffers) -> Request<'_, Result<(), TransferError>> {
        Box::pin(async move {
            let bytes = buffers.bytes();
            self.below.read(offset, buffers).await?;
            self.convert(bytes).await;
            Ok(())
        })
    }

    fn write(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Request<'_, Result<(), TransferError>> {
        Box::pin(async move {
            self.convert(buffers.bytes()).await;
            self.below.write(offset, buffers, fua).await
        })
    }

    fn flush(&self) -> Request<'_, io::Result<()>> {
        Box::pin(self.below.flush())
    }

    fn discard(&self, offset: u64, len: u64) -> Request<'_, io::Result<()>> {
        Box::pin(self.below.discard(offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Request<'_, io::Result<()>> {
        Box::pin(self.below.write_zeroes(offset, len, may_unmap))
    }

    fn block_status(&self, offset: u64, len: u64) -> Request<'_, io::Result<Extent>> {
        Box::pin(self.below.block_status(offset, len))
    }
}
