//! Layer `raw`: a part of the disk below, byte for byte.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use iomem::Buffers;

use super::driver::{Driver, FilePosition, Request};
use super::file::size_probe::SizeProbe;
use super::info::{Abilities, DiskInfo, Extent, Link, Placement, TransferError};
use super::source::DriverSource;
use super::{Disk, DiskSource};
use crate::config::EngineKind;
use crate::error::Error;
use crate::op::OpKind;
use crate::thread::io::Io;

impl DiskSource {
    /// Opens the part of a disk that begins at `offset_bytes` and has `size_bytes`, or all bytes
    /// that follow: then it grows and shrinks with the disk. Only the caller keeps other users away
    /// from the bytes beside it.
    ///
    /// # Errors
    ///
    /// If there is no such part, or it is not made of whole logical blocks.
    pub fn raw(
        below: DiskSource,
        offset_bytes: u64,
        size_bytes: Option<u64>,
    ) -> Result<Self, Error> {
        let info = below.info();
        let part = Part { offset_bytes, size_bytes, block: info.logical_block_bytes };
        let of_part =
            part.size_within(info.size_bytes).map_err(|reason| refused(&below, reason))?;
        let identity = part.identity(below.identity());
        let physical_fits = offset_bytes.is_multiple_of(info.physical_block_bytes.into());
        let info = DiskInfo {
            size_bytes: of_part,
            physical_block_bytes: match physical_fits {
                true => info.physical_block_bytes,
                false => info.logical_block_bytes,
            },
            ..info
        };
        let source = RawSource { below, part, identity };
        Ok(Self::from_driver(info, Arc::new(source)))
    }
}

fn refused(below: &DiskSource, reason: String) -> Error {
    below.refused("a part of ", &reason)
}

/// The position of the part.
#[derive(Debug, Clone, Copy)]
struct Part {
    offset_bytes: u64,
    size_bytes: Option<u64>,
    /// The logical block.
    block: u32,
}

impl Part {
    /// The size of the part on a disk of this many bytes.
    fn size_within(self, disk_bytes: u64) -> Result<u64, String> {
        let Self { offset_bytes, size_bytes, block } = self;
        for (what, bytes) in [("offset", Some(offset_bytes)), ("size", size_bytes)] {
            if bytes.is_some_and(|bytes| !bytes.is_multiple_of(block.into())) {
                return Err(format!(
                    "its {what} of {} bytes is not a multiple of the logical block of {block}; \
                     choose a multiple",
                    bytes.unwrap_or(0)
                ));
            }
        }
        let after = disk_bytes.saturating_sub(offset_bytes);
        let size = size_bytes.unwrap_or(after);
        if size == 0 || size > after {
            return Err(format!(
                "the part does not fit: the disk has {disk_bytes} bytes, {after} of them from \
                 offset {offset_bytes} on; choose a smaller offset or size, and a size above zero"
            ));
        }
        Ok(size)
    }

    fn is_all(self) -> bool {
        self.offset_bytes == 0 && self.size_bytes.is_none()
    }

    /// The identity of the part. It must not change when the disk grows.
    fn identity(self, of_disk: &str) -> String {
        if of_disk.is_empty() || self.is_all() {
            return of_disk.to_owned();
        }
        let size = self.size_bytes.map_or("all".to_owned(), |size| size.to_string());
        format!("{of_disk}, {size} bytes from {}", self.offset_bytes)
    }
}

#[derive(Debug)]
struct RawSource {
    below: DiskSource,
    part: Part,
    identity: String,
}

impl DriverSource for RawSource {
    fn below(&self) -> Option<&DiskSource> {
        Some(&self.below)
    }

    fn attach(&self, io: &Rc<Io>, engine: Option<EngineKind>) -> Box<dyn Driver> {
        let below = self.below.attach_with(io, engine);
        Box::new(RawDisk { below, offset_bytes: self.part.offset_bytes })
    }

    fn reopen_for_probe(&self) -> Result<Option<DiskSource>, Error> {
        let Part { offset_bytes, size_bytes, .. } = self.part;
        let below = self.below.reopen_for_probe()?;
        below.map(|below| DiskSource::raw(below, offset_bytes, size_bytes)).transpose()
    }

    fn chain(&self) -> Vec<Link> {
        let Part { offset_bytes, size_bytes, .. } = self.part;
        let size = size_bytes.map_or("all".to_owned(), |size| size.to_string());
        let place = format!("{size} bytes from {offset_bytes}");
        let mut chain = vec![Link { kind: "raw", place }];
        chain.extend(self.below.chain());
        chain
    }

    fn identity(&self) -> &str {
        &self.identity
    }

    fn place(&self) -> Option<Placement> {
        let Part { offset_bytes, size_bytes, .. } = self.part;
        // The part was checked to lie there.
        Some(self.below.place().part(offset_bytes, size_bytes))
    }

    fn abilities(&self) -> Abilities {
        let below = self.below.abilities();
        Abilities { resize: below.resize && self.part.size_bytes.is_none(), ..below }
    }

    fn discard_bytes(&self) -> Option<u32> {
        let unit = self.below.discard_bytes()?;
        let fits = self.part.offset_bytes.is_multiple_of(unit.into());
        Some(if fits { unit } else { self.part.block })
    }

    fn optimal_bytes(&self) -> Option<u32> {
        let bytes = self.below.optimal_bytes()?;
        self.part.offset_bytes.is_multiple_of(bytes.into()).then_some(bytes)
    }

    fn size_probe(&self) -> Option<Arc<SizeProbe>> {
        if self.part.size_bytes.is_some() {
            return None;
        }
        let (part, below) = (self.part, self.below.size_probe()?);
        // A disk that ends before the part begins has no size to report.
        Some(Arc::new(SizeProbe::above(below, move |size| part.size_within(size).ok())))
    }

    fn probe_size(&self) -> Result<u64, Error> {
        let size = self.part.size_within(self.below.refresh()?);
        size.map_err(|reason| refused(&self.below, reason))
    }

    fn known_size(&self) -> Result<u64, Error> {
        let size = self.part.size_within(self.below.covered_bytes()?);
        size.map_err(|reason| refused(&self.below, reason))
    }

    fn check_new_size(&self, size_bytes: u64) -> Result<(), Error> {
        if self.part.size_bytes.is_some() {
            let reason = "its size was set when it was opened; open it again with another size";
            return Err(refused(&self.below, reason.to_owned()));
        }
        self.part.size_within(self.end_of(size_bytes)?).map_err(|why| refused(&self.below, why))?;
        self.below.check_new_size(self.end_of(size_bytes)?)
    }

    fn set_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.below.set_size(self.end_of(size_bytes)?, || ())
    }

    fn adopt_size(&self, size_bytes: u64) {
        if self.part.size_bytes.is_none()
            && let Ok(end) = self.end_of(size_bytes)
        {
            self.below.adopt_size(end);
        }
    }
}

impl RawSource {
    /// The end of the disk below if the part has this size.
    fn end_of(&self, size_bytes: u64) -> Result<u64, Error> {
        let end = self.part.offset_bytes.checked_add(size_bytes);
        end.ok_or_else(|| {
            refused(&self.below, format!("a size of {size_bytes} bytes is too large"))
        })
    }
}

struct RawDisk {
    below: Disk,
    offset_bytes: u64,
}

/// Offsets do not overflow: [`Disk`] has checked that they lie on this disk, which lies on the disk
/// below.
impl Driver for RawDisk {
    fn route_to_file(
        &self,
        kind: OpKind,
        offset: u64,
        buffers: &mut Buffers,
    ) -> Option<FilePosition<'_>> {
        self.below.route_to_file(kind, self.offset_bytes + offset, buffers)
    }

    fn read(&self, offset: u64, buffers: Buffers) -> Request<'_, Result<(), TransferError>> {
        Box::pin(self.below.read(self.offset_bytes + offset, buffers))
    }

    fn write(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Request<'_, Result<(), TransferError>> {
        Box::pin(self.below.write(self.offset_bytes + offset, buffers, fua))
    }

    fn flush(&self) -> Request<'_, io::Result<()>> {
        Box::pin(self.below.flush())
    }

    fn discard(&self, offset: u64, len: u64) -> Request<'_, io::Result<()>> {
        Box::pin(self.below.discard(self.offset_bytes + offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Request<'_, io::Result<()>> {
        Box::pin(self.below.write_zeroes(self.offset_bytes + offset, len, may_unmap))
    }

    fn block_status(&self, offset: u64, len: u64) -> Request<'_, io::Result<Extent>> {
        Box::pin(self.below.block_status(self.offset_bytes + offset, len))
    }
}
