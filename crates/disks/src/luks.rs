//! Layer `luks`: a disk that is stored encrypted on the disk below, in the format of `cryptsetup`
//! and QEMU: LUKS of version 1 or 2 with AES in XTS mode.
//!
//! Nothing is encrypted or decrypted in the memory of requests, and no ciphertext gets there: its
//! owner may change it at any time, and would choose the input of the cipher. Data passes through
//! our own memory, within the budget for that.
//!
//! The header is only read. The key of the volume stays in memory while the disk is open, excluded
//! from core dumps, and is wiped afterwards.

mod hash;
mod header;
mod memory;
mod secret;
#[cfg(test)]
pub(super) mod tests;
mod version1;
mod version2;
mod xts;

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use blockio::disk::{Abilities, DiskInfo, Extent, Link, Placement, SizeProbe, TransferError};
use blockio::driver::{
    BounceShare, COPY_BYTES_MAX, CopyTurns, Driver, DriverSource, Request, in_parts,
};
use blockio::{Disk, DiskSource, EngineConfig, EngineKind, Error, Io, IoThread, IoThreadConfig};
use iomem::{Buffers, fits};

use self::header::{Header, MAGIC, Payload};
use self::xts::{CHUNK_BYTES, Cipher, Direction};

pub use self::header::KdfLimits;
pub use self::secret::Passphrase;

/// Options for opening a LUKS disk.
#[derive(Debug)]
pub struct LuksOptions {
    /// The passphrase of a key slot.
    pub passphrase: Passphrase,
    /// Pass discards on. Then readers of the disk below see which parts of it are in use.
    pub discard: bool,
    /// The disk with the header, if it is detached. It is read and not kept.
    pub header: Option<DiskSource>,
    /// The most work of key derivation that the header may demand.
    pub most_work: KdfLimits,
}

/// The unit in which positions of sectors count, in bytes.
const POSITION_BYTES: u64 = 512;
/// Memory aligned to a page suits every disk.
const PAGE: usize = 4096;

/// Opens the disk that is stored encrypted on `below`. It grows and shrinks with `below`,
/// unless its header fixes the size. Takes as long as the header demands for each try of a
/// passphrase, usually some seconds.
///
/// # Errors
///
/// If the header cannot be read, is missing, is damaged or needs unsupported features. If the
/// passphrase opens no key slot. If `below` lacks a part of the data, or the data is not made
/// of whole sectors.
pub fn open(below: DiskSource, options: &LuksOptions) -> Result<DiskSource, Error> {
    let on = options.header.as_ref().unwrap_or(&below);
    let reader = Reader::new(on)?;
    let read = |offset, bytes| reader.read(offset, bytes);
    let is_detached = options.header.is_some();
    let opened = read_header(&read, is_detached).and_then(|header| {
        let key = header.unlock(options.passphrase.bytes(), &options.most_work, &read)?;
        Ok((Cipher::new(&key)?, header))
    });
    let (cipher, header) = opened.map_err(|reason| refused(on, &reason))?;
    if let Some(remark) = &header.remark {
        tracing::warn!("{}: {remark}", on.chain_text());
    }
    let Payload { offset_bytes, size_bytes, sector_bytes, .. } = header.payload;
    check_data_fits(header.payload, below.info().size_bytes)
        .map_err(|reason| refused(&below, &reason))?;
    let below = DiskSource::raw(below, offset_bytes, size_bytes)?;
    let info = below.info();
    let logical_block_bytes = info.logical_block_bytes.max(sector_bytes);
    let physical_block_bytes = info.physical_block_bytes.max(logical_block_bytes);
    let info = DiskInfo { logical_block_bytes, physical_block_bytes, ..info };
    let volume = Arc::new(Volume { cipher, header, block: logical_block_bytes });
    let source = LuksSource { info, below, volume, discard: options.discard };
    source.check(info.size_bytes)?;
    Ok(DiskSource::from_driver(info, Arc::new(source)))
}

fn refused(on: &DiskSource, reason: &str) -> Error {
    on.refused("LUKS on ", reason)
}

/// Checks that a disk of this many bytes has all of the data.
fn check_data_fits(payload: Payload, disk_bytes: u64) -> Result<(), String> {
    let Payload { offset_bytes, size_bytes, .. } = payload;
    let end = offset_bytes.checked_add(size_bytes.unwrap_or(1));
    if end.is_some_and(|end| end <= disk_bytes) {
        return Ok(());
    }
    let size = size_bytes.map_or(String::new(), |size| format!(" and has {size} bytes"));
    Err(format!(
        "its data begins at byte {offset_bytes}{size}, and the disk ends at {disk_bytes}: the disk \
         was truncated, or the header belongs to another disk; restore the disk from a backup"
    ))
}

fn read_header(read: &header::ReadAt<'_>, is_detached: bool) -> Result<Header, String> {
    let start = read(0, version1::HEADER_BYTES)?;
    let start: &[u8; version1::HEADER_BYTES] =
        start.first_chunk().ok_or("the disk is too small for a header")?;
    match (&start[..6], &start[6..8]) {
        (magic, [0, 1]) if magic == MAGIC => version1::parse(start, is_detached),
        (magic, _) if magic == version1::REENCRYPTED_MAGIC => {
            let reason = "its re-encryption is not complete; complete it with `cryptsetup \
                          reencrypt --resume-only`";
            Err(reason.to_owned())
        }
        _ => version2::read(read, is_detached),
    }
}

/// Reads a disk while it is being opened.
struct Reader {
    thread: IoThread,
    disk: Disk,
    /// Dropped last: its drop waits until nothing of the disk is in use.
    _source: DiskSource,
}

impl Reader {
    fn new(source: &DiskSource) -> Result<Self, Error> {
        let config =
            IoThreadConfig { engine: EngineConfig::Threads, depth: 8, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config)?;
        let source = source.for_probe()?;
        let disk = source.attach(thread.io());
        Ok(Self { thread, disk, _source: source })
    }

    fn read(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, String> {
        let info = self.disk.info();
        let block = u64::from(info.logical_block_bytes);
        let start = offset / block * block;
        let end =
            offset.checked_add(bytes as u64).and_then(|end| end.checked_next_multiple_of(block));
        let Some(end) = end.filter(|end| *end <= info.size_bytes) else {
            return Err(format!(
                "its header needs bytes from {offset} on, and the disk ends at {}",
                info.size_bytes
            ));
        };
        let buffers = Buffers::aligned(fits(end - start, "a part of a header"), PAGE);
        let all = buffers.duplicate();
        let result = self.thread.block_on(self.disk.read(start, buffers));
        let failed = |error: &dyn std::fmt::Display| {
            format!("its header cannot be read at byte {offset}: {error}")
        };
        result.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        let mut part = vec![0; bytes];
        all.copy_to(fits(offset - start, "a part of a block"), &mut part);
        Ok(part)
    }
}

/// The header, and the cipher with the key that was found.
#[derive(Debug)]
struct Volume {
    cipher: Cipher,
    header: Header,
    /// The logical block of the disk: whole sectors.
    block: u32,
}

#[derive(Debug)]
struct LuksSource {
    /// The properties at open.
    info: DiskInfo,
    /// The part with the data.
    below: DiskSource,
    volume: Arc<Volume>,
    discard: bool,
}

impl LuksSource {
    /// Checks that the disk can have this size.
    fn check(&self, size_bytes: u64) -> Result<(), Error> {
        let block = self.volume.block;
        if size_bytes.is_multiple_of(block.into()) {
            return Ok(());
        }
        let reason = format!(
            "its data of {size_bytes} bytes is not a multiple of its sector of {block}; extend the \
             underlying disk by {} bytes",
            size_bytes.next_multiple_of(block.into()) - size_bytes
        );
        Err(refused(&self.below, &reason))
    }
}

impl DriverSource for LuksSource {
    fn below(&self) -> Option<&DiskSource> {
        Some(&self.below)
    }

    fn attach(&self, io: &Rc<Io>, engine: Option<EngineKind>) -> Box<dyn Driver> {
        Box::new(LuksDisk {
            below: self.below.attach_with(io, engine),
            volume: Arc::clone(&self.volume),
            share: io.bounce_share(&self.volume),
            copies: CopyTurns::for_disk(io, &self.volume),
            io: Rc::clone(io),
            discard: self.discard,
        })
    }

    fn reopen_for_probe(&self) -> Result<Option<DiskSource>, Error> {
        let Self { info, discard, .. } = *self;
        Ok(self.below.reopen_for_probe()?.map(|below| {
            let source = Self { info, below, volume: Arc::clone(&self.volume), discard };
            DiskSource::from_driver(info, Arc::new(source))
        }))
    }

    fn chain(&self) -> Vec<Link> {
        let Volume { cipher, header, .. } = &*self.volume;
        let place = format!(
            "version {}, {cipher:?} in XTS mode, sectors of {} bytes, {}",
            header.version,
            header.payload.sector_bytes,
            // The UUID may be any text.
            header.uuid.escape_debug()
        );
        let mut chain = vec![Link { kind: "luks", place }];
        chain.extend(self.below.chain());
        chain
    }

    fn identity(&self) -> &str {
        self.below.identity()
    }

    fn place(&self) -> Option<Placement> {
        Some(self.below.place())
    }

    fn abilities(&self) -> Abilities {
        let below = self.below.abilities();
        Abilities { discard: self.discard && below.discard, zeroes: false, ..below }
    }

    fn discard_bytes(&self) -> Option<u32> {
        let unit = self.below.discard_bytes().filter(|_| self.discard)?;
        Some(unit.max(self.volume.block))
    }

    fn remark(&self) -> Option<String> {
        let remarks = [self.volume.header.remark.clone(), self.below.remark()];
        remarks.into_iter().flatten().reduce(|one, other| format!("{one}; {other}"))
    }

    fn size_probe(&self) -> Option<Arc<SizeProbe>> {
        let (block, below) = (u64::from(self.volume.block), self.below.size_probe()?);
        let whole = move |size: u64| size.is_multiple_of(block).then_some(size);
        Some(Arc::new(SizeProbe::above(below, whole)))
    }

    fn probe_size(&self) -> Result<u64, Error> {
        let size_bytes = self.below.refresh()?;
        self.check(size_bytes).map(|()| size_bytes)
    }

    fn known_size(&self) -> Result<u64, Error> {
        let size_bytes = self.below.covered_bytes()?;
        Ok(size_bytes - size_bytes % u64::from(self.volume.block))
    }

    fn check_new_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.check(size_bytes)?;
        self.below.check_new_size(size_bytes)
    }

    fn set_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.below.set_size(size_bytes, || ())
    }

    fn adopt_size(&self, size_bytes: u64) {
        self.below.adopt_size(size_bytes);
    }
}

struct LuksDisk {
    below: Disk,
    volume: Arc<Volume>,
    share: Rc<BounceShare>,
    copies: Rc<CopyTurns>,
    io: Rc<Io>,
    discard: bool,
}

impl LuksDisk {
    /// Allocates memory for as much of `left` bytes as goes at once.
    async fn own_memory(&self, left: u64) -> io::Result<Buffers> {
        let most = self.share.piece_bytes(self.volume.block as usize);
        let bytes = usize::try_from(left).unwrap_or(usize::MAX).min(most);
        let permit = self.share.take(bytes).await;
        Buffers::uninitialized(bytes, PAGE, permit)
            .inspect_err(|_| self.io.stats().bounce.failed.add(1))
    }

    /// Encrypts or decrypts the data at `offset`, from one memory into another: as much as fits
    /// both.
    async fn convert(&self, direction: Direction, offset: u64, from: &Buffers, to: &Buffers) {
        let Payload { sector_bytes, first_position, .. } = self.volume.header.payload;
        let mut chunk = [0; CHUNK_BYTES];
        let mut position = first_position + offset / POSITION_BYTES;
        let bytes = from.bytes().min(to.bytes());
        for start in (0..bytes).step_by(COPY_BYTES_MAX) {
            let end = (start + COPY_BYTES_MAX).min(bytes);
            self.copies.turn(end - start).await;
            for at in (start..end).step_by(CHUNK_BYTES) {
                let chunk = &mut chunk[..CHUNK_BYTES.min(end - at)];
                from.copy_to(at, chunk);
                self.volume.cipher.run(direction, chunk, sector_bytes as usize, position);
                to.copy_from(at, chunk);
                position += chunk.len() as u64 / POSITION_BYTES;
            }
        }
    }

    async fn read_pieces(&self, offset: u64, buffers: Buffers) -> Result<(), TransferError> {
        let piece = async |offset, rest: &Buffers| {
            let memory = self.own_memory(rest.bytes() as u64).await?;
            let piece = memory.duplicate();
            self.below.read(offset, memory).await?;
            self.convert(Direction::Decrypt, offset, &piece, rest).await;
            Ok(piece.bytes())
        };
        in_parts(offset, buffers, piece).await
    }

    async fn write_pieces(
        &self,
        mut offset: u64,
        mut buffers: Buffers,
        fua: bool,
    ) -> Result<(), TransferError> {
        while !buffers.is_empty() {
            let memory = match self.own_memory(buffers.bytes() as u64).await {
                Ok(memory) => memory,
                Err(error) => return Err(TransferError::new(error, buffers)),
            };
            let bytes = memory.bytes();
            self.convert(Direction::Encrypt, offset, &buffers, &memory).await;
            if let Err(unfinished) = self.below.write(offset, memory, fua).await {
                return Err(unfinished.within(buffers, bytes));
            }
            buffers.advance(bytes);
            offset += bytes as u64;
        }
        Ok(())
    }

    /// Writes encrypted zeroes, which are data to the disk below.
    async fn write_zero_pieces(&self, mut offset: u64, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let memory = self.own_memory(len).await?;
            let bytes = memory.bytes();
            memory.zero_from(0);
            self.convert(Direction::Encrypt, offset, &memory, &memory).await;
            self.below.write(offset, memory, false).await?;
            offset += bytes as u64;
            len -= bytes as u64;
        }
        Ok(())
    }

    async fn discard_if_allowed(&self, offset: u64, len: u64) -> io::Result<()> {
        if !self.discard {
            return Ok(());
        }
        self.below.discard(offset, len).await
    }
}

/// All requests are of whole sectors: the logical block is at least one.
impl Driver for LuksDisk {
    fn read(&self, offset: u64, buffers: Buffers) -> Request<'_, Result<(), TransferError>> {
        Box::pin(self.read_pieces(offset, buffers))
    }

    fn write(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Request<'_, Result<(), TransferError>> {
        Box::pin(self.write_pieces(offset, buffers, fua))
    }

    fn flush(&self) -> Request<'_, io::Result<()>> {
        Box::pin(self.below.flush())
    }

    fn discard(&self, offset: u64, len: u64) -> Request<'_, io::Result<()>> {
        Box::pin(self.discard_if_allowed(offset, len))
    }

    fn write_zeroes(&self, offset: u64, len: u64, _may_unmap: bool) -> Request<'_, io::Result<()>> {
        Box::pin(self.write_zero_pieces(offset, len))
    }

    /// Reports data without a check: encrypted zeroes cannot be recognised.
    fn block_status(&self, _offset: u64, len: u64) -> Request<'_, io::Result<Extent>> {
        Box::pin(std::future::ready(Ok(Extent::data(len))))
    }
}
