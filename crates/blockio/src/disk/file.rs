//! Disk `file`: a regular file or a block device.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use rustix::fs::{AtFlags, FlockOperation, SeekFrom, StatxFlags};

use super::{DiskInfo, DiskOptions, check_logical_block};
use crate::buf::Buffers;
use crate::error::Error;
use crate::io_thread::Io;
use crate::op::{Completion, FileRef, Op, OpKind, OpenFile};

/// Memory for bouncing one request is taken in pieces of at most this many bytes.
const BOUNCE_BYTES: usize = 1 << 20;
/// A kernel that answers EINTR or EAGAIN this often in a row will not do better.
const RETRIES_MAX: u32 = 100;

/// An open file.
#[derive(Debug, Clone)]
pub(super) struct FileSource {
    file: Arc<OpenFile>,
    is_block_device: bool,
    /// Memory and lengths of ranges must be multiples of it; 1 with the page cache.
    memory_align: u32,
    /// Offsets and lengths must be multiples of it; 1 with the page cache.
    request_align: u32,
}

impl FileSource {
    pub(super) fn open(path: &Path, options: &DiskOptions) -> Result<(Self, DiskInfo), Error> {
        let unusable = |reason: String| Error::Unusable { path: path.to_owned(), reason };
        // Looked at before it is opened: opening a named pipe would wait for its other end.
        let file_type = std::fs::metadata(path).map_err(open_error(path, options))?.file_type();
        let is_block_device = file_type.is_block_device();
        if file_type.is_dir() {
            return Err(unusable("it is a directory; name a file or a block device".into()));
        }
        if !file_type.is_file() && !is_block_device {
            return Err(unusable("it is neither a regular file nor a block device".into()));
        }
        let file = open(path, options, is_block_device)?;
        lock(&file, path, options, is_block_device)?;
        if is_block_device && !options.read_only && is_read_only_device(&file) {
            return Err(unusable("it is a read-only device; open it read-only".into()));
        }
        let size_bytes = rustix::fs::seek(&file, SeekFrom::End(0))
            .map_err(|errno| unusable(format!("its size cannot be found: {errno}")))?;
        if size_bytes == 0 {
            return Err(unusable(
                "its size is zero; give it one, for example with `truncate -s 10G`".into(),
            ));
        }
        let align = Alignment::of(&file, options.direct, is_block_device).ok_or_else(|| {
            unusable("the file system offers no direct I/O for it; use the page cache".into())
        })?;
        let wanted = options.logical_block_bytes.unwrap_or(align.request.max(512));
        let logical_block_bytes = check_logical_block(wanted)?;
        if logical_block_bytes < align.request {
            return Err(unusable(format!(
                "it takes direct I/O in units of {} bytes only, but the logical block is to be \
                 {logical_block_bytes}; use a logical block of {0} bytes, or the page cache",
                align.request
            )));
        }
        if size_bytes % u64::from(logical_block_bytes) != 0 {
            let rounded = size_bytes.next_multiple_of(u64::from(logical_block_bytes));
            return Err(unusable(format!(
                "its size of {size_bytes} bytes is no multiple of the logical block of \
                 {logical_block_bytes}; extend it with `truncate -s {rounded}`"
            )));
        }
        let physical =
            if is_block_device { rustix::fs::ioctl_blkpbszget(&file).ok() } else { None };
        let info = DiskInfo {
            size_bytes,
            logical_block_bytes,
            physical_block_bytes: physical.unwrap_or(0).max(logical_block_bytes),
            read_only: options.read_only,
            direct: options.direct,
        };
        let file = Arc::new(OpenFile::new(file, path, options.direct));
        Ok((
            Self {
                file,
                is_block_device,
                memory_align: align.memory,
                request_align: align.request,
            },
            info,
        ))
    }

    /// A file whose nature is not looked at but told.
    #[cfg(feature = "sim")]
    pub(super) fn simulated(
        file: std::os::fd::OwnedFd,
        is_block_device: bool,
        memory_align: u32,
        request_align: u32,
    ) -> Self {
        Self { file: Arc::new(file.into()), is_block_device, memory_align, request_align }
    }

    /// As if it were opened anew.
    #[cfg(feature = "sim")]
    pub(super) fn forget_loss(&self) {
        self.file.forget_loss();
    }

    /// A character device, which `open` would refuse: some of them fail in useful ways.
    #[cfg(test)]
    pub(super) fn of_device(path: &str) -> Self {
        let file = File::options().read(true).write(true).open(path);
        let file = Arc::new(std::os::fd::OwnedFd::from(file.unwrap()).into());
        Self { file, is_block_device: false, memory_align: 1, request_align: 1 }
    }

    /// As if nothing were known of it but what the kernel says to each op.
    #[cfg(test)]
    pub(super) fn forget_polling(&mut self) {
        Arc::get_mut(&mut self.file).unwrap().forget_polling();
    }

    #[cfg(test)]
    pub(super) fn may_be_polled(&self) -> bool {
        self.file.may_be_polled()
    }

    pub(super) fn attach(&self, io: Rc<Io>) -> FileDisk {
        let file = Rc::new(Arc::clone(&self.file));
        io.register_file(&file);
        FileDisk {
            io,
            file,
            is_block_device: self.is_block_device,
            memory_align: self.memory_align as usize,
            request_align: self.request_align as usize,
            has_dsync: Cell::new(true),
            has_discard: Cell::new(true),
            has_punch_zeroes: Cell::new(true),
            has_zero_range: Cell::new(true),
        }
    }
}

fn open(path: &Path, options: &DiskOptions, is_block_device: bool) -> Result<File, Error> {
    let mut flags = libc::O_CLOEXEC;
    if options.direct {
        flags |= libc::O_DIRECT;
    }
    if is_block_device && !options.read_only {
        // Fails when the device is mounted or claimed by someone else.
        flags |= libc::O_EXCL;
    }
    File::options()
        .read(true)
        .write(!options.read_only)
        .custom_flags(flags)
        .open(path)
        .map_err(open_error(path, options))
}

fn open_error(path: &Path, options: &DiskOptions) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    let options = options.clone();
    move |error| {
        let advice = match error.raw_os_error() {
            Some(libc::EBUSY) => "; it is mounted or used by another program: stop that first",
            Some(libc::EINVAL) if options.direct => {
                "; the file system may not allow direct I/O: use the page cache"
            }
            Some(libc::EACCES | libc::EPERM) if !options.read_only => {
                "; check its permissions, or open it read-only"
            }
            Some(libc::EACCES | libc::EPERM) => "; check its permissions",
            Some(libc::ENOENT) => "; check the path",
            Some(libc::EROFS) => "; open it read-only",
            Some(libc::EMFILE) => "; raise the limit on open files (ulimit -n)",
            _ => "",
        };
        Error::Open { path: path.clone(), error, advice }
    }
}

/// Linux lets a read-only device be opened for writing, and fails each write.
fn is_read_only_device(file: &File) -> bool {
    let Ok(metadata) = file.metadata() else { return false };
    let device = metadata.rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"))
        .is_ok_and(|text| text.trim() != "0")
}

/// Two daemons that write to one file destroy it, so a writer locks it for itself alone. Block
/// devices are claimed by the open itself; a lock there would disturb udev.
fn lock(file: &File, path: &Path, options: &DiskOptions, is_block: bool) -> Result<(), Error> {
    if is_block {
        return Ok(());
    }
    let operation = if options.read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    match rustix::fs::flock(file, operation) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::Unusable {
            path: path.to_owned(),
            reason: "another program has locked it; stop that first, or open it read-only in both"
                .into(),
        }),
        // Some network file systems have no locks; that alone does not make the disk unusable.
        _ => Ok(()),
    }
}

/// What direct I/O asks of a request.
struct Alignment {
    memory: u32,
    request: u32,
}

impl Alignment {
    /// `None`: the file cannot be used with direct I/O.
    fn of(file: &File, direct: bool, is_block_device: bool) -> Option<Self> {
        if !direct {
            return Some(Self { memory: 1, request: 1 });
        }
        let flags = StatxFlags::DIOALIGN;
        if let Ok(stat) = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, flags)
            && stat.stx_mask & flags.bits() != 0
        {
            let (memory, request) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
            return (memory > 0 && request > 0).then_some(Self { memory, request });
        }
        if is_block_device && let Ok(bytes) = rustix::fs::ioctl_blksszget(file) {
            return Some(Self { memory: bytes, request: bytes });
        }
        let request = probe_request_align(file)?;
        Some(Self { memory: request, request })
    }
}

/// Tries reads of growing size at the start of the file. Kernels before 6.1 do not tell.
fn probe_request_align(file: &File) -> Option<u32> {
    let mut memory = vec![0u8; 3 * 4096];
    let skip = memory.as_ptr().align_offset(4096);
    let aligned = &mut memory[skip..skip + 4096];
    [512u32, 1024, 2048, 4096].into_iter().find(|&align| {
        let part = &mut aligned[..align as usize];
        !matches!(rustix::io::pread(file, part, 0), Err(rustix::io::Errno::INVAL))
    })
}

/// A file on one IoThread. What the file system turns out not to support is remembered.
pub(super) struct FileDisk {
    io: Rc<Io>,
    file: FileRef,
    is_block_device: bool,
    memory_align: usize,
    request_align: usize,
    has_dsync: Cell<bool>,
    has_discard: Cell<bool>,
    has_punch_zeroes: Cell<bool>,
    has_zero_range: Cell<bool>,
}

impl Drop for FileDisk {
    fn drop(&mut self) {
        self.io.unregister_file(&self.file);
    }
}

impl FileDisk {
    pub(super) async fn read(&self, offset: u64, buffers: Buffers) -> (io::Result<()>, Buffers) {
        if buffers.is_aligned(self.memory_align) {
            return self.transfer(OpKind::Read, offset, buffers).await;
        }
        self.bounce(OpKind::Read, offset, buffers).await
    }

    pub(super) async fn write(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> (io::Result<()>, Buffers) {
        if fua && let Err(error) = self.file.check_not_lost() {
            return (Err(error), buffers);
        }
        let kind = OpKind::Write { fua: fua && self.has_dsync.get() };
        let (result, buffers) = if buffers.is_aligned(self.memory_align) {
            self.transfer(kind, offset, buffers).await
        } else {
            self.bounce(kind, offset, buffers).await
        };
        if result.is_ok() && fua {
            let stable =
                if self.has_dsync.get() { self.file.check_not_lost() } else { self.flush().await };
            return (stable, buffers);
        }
        (result, buffers)
    }

    pub(super) async fn flush(&self) -> io::Result<()> {
        self.file.check_not_lost()?;
        self.simple(OpKind::Flush, 0).await?;
        // Another one that was out at the same time may have heard of a loss.
        self.file.check_not_lost()
    }

    pub(super) async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        if !self.has_discard.get() {
            return Ok(());
        }
        let kind = if self.is_block_device {
            OpKind::DiscardBlocks { len }
        } else {
            OpKind::Fallocate { mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, len }
        };
        self.try_feature(&self.has_discard, kind, offset).await.map(|_| ())
    }

    pub(super) async fn write_zeroes(
        &self,
        offset: u64,
        len: u64,
        may_unmap: bool,
    ) -> io::Result<()> {
        let punch =
            OpKind::Fallocate { mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, len };
        if may_unmap && self.try_feature(&self.has_punch_zeroes, punch, offset).await? {
            return Ok(());
        }
        let zero = if self.is_block_device {
            OpKind::ZeroBlocks { len }
        } else {
            OpKind::Fallocate { mode: libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, len }
        };
        if self.try_feature(&self.has_zero_range, zero, offset).await? {
            return Ok(());
        }
        self.write_zero_bytes(offset, len).await
    }

    pub(super) async fn write_zero_bytes(&self, mut offset: u64, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let piece = usize::try_from(len).unwrap_or(usize::MAX).min(BOUNCE_BYTES);
            let zeroes = Buffers::aligned(piece, self.memory_align.max(4096));
            self.transfer(OpKind::Write { fua: false }, offset, zeroes).await.0?;
            offset += piece as u64;
            len -= piece as u64;
        }
        Ok(())
    }

    /// Runs `kind` unless `has` says that it is of no use. False, for ever after, when the kernel,
    /// the file system or the device does not support it.
    async fn try_feature(&self, has: &Cell<bool>, kind: OpKind, offset: u64) -> io::Result<bool> {
        if !has.get() {
            return Ok(false);
        }
        match self.simple(kind, offset).await {
            Ok(()) => Ok(true),
            Err(error) if is_unsupported(&error) => {
                has.set(false);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    async fn simple(&self, kind: OpKind, offset: u64) -> io::Result<()> {
        let mut retries = 0;
        loop {
            let result = self.op(kind, offset, Buffers::empty()).await.result;
            match result {
                Err(error) if is_transient(&error) && retries < RETRIES_MAX => retries += 1,
                other => return other.map(|_| ()),
            }
        }
    }

    async fn op(&self, kind: OpKind, offset: u64, buffers: Buffers) -> Completion {
        self.io.op(Op { kind, file: Rc::clone(&self.file), offset, buffers }).await
    }

    /// Moves all bytes of `buffers`, whose memory is aligned: the one home of short transfers.
    async fn transfer(
        &self,
        mut kind: OpKind,
        mut offset: u64,
        mut buffers: Buffers,
    ) -> (io::Result<()>, Buffers) {
        let mut retries = 0;
        while buffers.bytes() > 0 {
            let wanted = buffers.bytes();
            let completion = self.op(kind, offset, buffers).await;
            buffers = completion.buffers;
            let moved = match completion.result {
                Ok(moved) => moved.min(wanted),
                Err(error) if is_transient(&error) && retries < RETRIES_MAX => {
                    retries += 1;
                    continue;
                }
                Err(error) if kind == (OpKind::Write { fua: true }) && is_unsupported(&error) => {
                    // The caller sees `has_dsync` and flushes after the write.
                    self.has_dsync.set(false);
                    kind = OpKind::Write { fua: false };
                    continue;
                }
                Err(error) => return (Err(error), buffers),
            };
            retries = 0;
            // Direct I/O can go on at a multiple of its alignment only.
            let usable = if moved == wanted { moved } else { moved & !(self.request_align - 1) };
            if usable > 0 {
                buffers.advance(usable);
                offset += usable as u64;
            } else if kind == OpKind::Read {
                // The file ends here; it was cut while in use. What is beyond reads as zeroes.
                buffers.zero_from(moved);
                return (Ok(()), buffers);
            } else {
                return (Err(io::Error::from_raw_os_error(libc::ENOSPC)), buffers);
            }
        }
        (Ok(()), buffers)
    }

    /// Moves `buffers` by way of aligned memory, piece by piece.
    async fn bounce(
        &self,
        kind: OpKind,
        mut offset: u64,
        mut buffers: Buffers,
    ) -> (io::Result<()>, Buffers) {
        self.io.stats().bounced.add(1);
        while buffers.bytes() > 0 {
            let piece = buffers.bytes().min(BOUNCE_BYTES);
            let bounce = Buffers::aligned(piece, self.memory_align.max(512));
            if kind != OpKind::Read {
                bounce.copy_from_buffers(&buffers, piece);
            }
            // The list is used up by the transfer, the memory is not: keep a second list of it.
            let view = bounce.again();
            let (result, _) = self.transfer(kind, offset, bounce).await;
            if result.is_err() {
                return (result, buffers);
            }
            if kind == OpKind::Read {
                buffers.copy_from_buffers(&view, piece);
            }
            buffers.advance(piece);
            offset += piece as u64;
        }
        (Ok(()), buffers)
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY | libc::ENODEV)
    )
}
