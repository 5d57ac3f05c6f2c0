//! The virtio-blk driver over vhost-user: one device, its queues, the memory shared with it.
//!
//! This is the only file of the crate with `unsafe`. What it gives out is safe: a [`Virtqueue`]
//! keeps the transport (which owns the rings) and the data memory alive for as long as it exists,
//! and the data memory is reached by bounds-checked volatile copies only, so that a server which
//! writes to it at any time can spoil data but not this process.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use iomem::fits;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport,
    VirtioFeatureFlags, iovec, virtio_blk_max_queues,
};
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use crate::job::{Completed, Queue};
use crate::plan::{DeviceFacts, QueueShape};

/// A connected device without queues.
pub(crate) struct Device {
    transport: Box<VirtioBlkTransport>,
    facts: DeviceFacts,
    socket: Option<OwnedFd>,
}

impl Device {
    /// Connects and negotiates features. Blocks for as long as the server does not answer.
    pub(crate) fn connect(path: &Path) -> io::Result<Self> {
        let text = path.to_str().ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "the socket path is not UTF-8")
        })?;
        let wanted = VirtioFeatureFlags::VERSION_1.bits()
            | VirtioFeatureFlags::RING_EVENT_IDX.bits()
            | VirtioBlkFeatureFlags::SIZE_MAX.bits()
            | VirtioBlkFeatureFlags::SEG_MAX.bits()
            | VirtioBlkFeatureFlags::RO.bits()
            | VirtioBlkFeatureFlags::BLK_SIZE.bits()
            | VirtioBlkFeatureFlags::FLUSH.bits()
            | VirtioBlkFeatureFlags::TOPOLOGY.bits()
            | VirtioBlkFeatureFlags::MQ.bits();
        let before = open_sockets();
        let transport: Box<VirtioBlkTransport> = Box::new(VhostUser::new(text, wanted)?);
        let socket = find_connection(&before, path);
        let facts = read_facts(&*transport)?;
        Ok(Self { transport, facts, socket })
    }

    pub(crate) fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Returns a second descriptor of the vhost-user connection, if it could be identified.
    pub(crate) fn take_socket(&mut self) -> Option<OwnedFd> {
        self.socket.take()
    }

    /// Shares data memory with the server and starts the queues.
    pub(crate) fn start(mut self, shape: &QueueShape) -> io::Result<Vec<Virtqueue>> {
        let slots = shape.slots * shape.queues;
        let bytes = slots.checked_mul(shape.slot_bytes).ok_or(io::ErrorKind::OutOfMemory)?;
        let file = File::from(memfd_create("ringhaul-bench", MemfdFlags::CLOEXEC)?);
        file.set_len(u64::try_from(bytes).map_err(io::Error::other)?)?;
        let fd = file.as_raw_fd();
        let memory = MmapRegion::<()>::from_file(FileOffset::new(file, 0), bytes)
            .map_err(io::Error::other)?;
        self.transport.map_mem_region(memory.as_ptr().addr(), bytes, fd, 0)?;
        let vqs = VirtioBlkQueue::setup_queues(&mut *self.transport, shape.queues, shape.size)?;
        let shared = Arc::new(Shared { transport: self.transport, memory });
        Ok(vqs
            .into_iter()
            .enumerate()
            .map(|(index, vq)| Virtqueue {
                vq,
                segments: SegmentTable::new(shape),
                kick: shared.transport.get_submission_notifier(index),
                call: shared.transport.get_completion_fd(index),
                first_byte: index * shape.slots * shape.slot_bytes,
                slots: shape.slots,
                slot_bytes: shape.slot_bytes,
                unkicked: false,
                shared: Arc::clone(&shared),
            })
            .collect())
    }
}

/// What must outlive the queues: the owner of the rings and the data memory.
struct Shared {
    transport: Box<VirtioBlkTransport>,
    memory: MmapRegion,
}

/// Scratch space for the segments of one request.
struct SegmentTable {
    entries: Box<[iovec]>,
    segment_bytes: usize,
}

// SAFETY: the pointers in the table are only ever values to put into descriptors: `fill` writes
// them from the region that the owning `Virtqueue` keeps alive, and nothing here dereferences them.
unsafe impl Send for SegmentTable {}

impl SegmentTable {
    fn new(shape: &QueueShape) -> Self {
        let empty = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let count = shape.slot_bytes.div_ceil(shape.segment_bytes);
        Self { entries: vec![empty; count].into(), segment_bytes: shape.segment_bytes }
    }

    /// Describes `len` bytes from `base` and returns how many segments that takes.
    fn fill(&mut self, base: *mut u8, len: usize) -> usize {
        let mut done = 0;
        let mut count = 0;
        for entry in &mut self.entries {
            if done == len {
                break;
            }
            let part = (len - done).min(self.segment_bytes);
            *entry = iovec { iov_base: base.wrapping_add(done).cast(), iov_len: part };
            done += part;
            count += 1;
        }
        count
    }
}

/// One virtqueue, and data memory for each request that it can have in flight.
pub(crate) struct Virtqueue {
    // Declared before `shared`, so dropped before the rings that it points to are unmapped.
    vq: VirtioBlkQueue<'static, u32>,
    segments: SegmentTable,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
    first_byte: usize,
    slots: usize,
    slot_bytes: usize,
    /// Requests were queued since the last look at whether the server wants a kick.
    unkicked: bool,
    shared: Arc<Shared>,
}

impl Queue for Virtqueue {
    fn read(&mut self, slot: u32, offset: u64, len: usize) -> io::Result<()> {
        let count = self.describe(slot, len)?;
        let table = self.segments.entries.as_ptr();
        // SAFETY: `table` holds at least `count` entries, all inside the slot's part of the data
        // memory (`describe`), which stays mapped while this queue exists and is read and
        // written by volatile copies only.
        unsafe { self.vq.readv(offset, table, count, slot)? };
        self.unkicked = true;
        Ok(())
    }

    fn write(&mut self, slot: u32, offset: u64, len: usize) -> io::Result<()> {
        let count = self.describe(slot, len)?;
        let table = self.segments.entries.as_ptr();
        // SAFETY: as in `read`.
        unsafe { self.vq.writev(offset, table, count, slot)? };
        self.unkicked = true;
        Ok(())
    }

    fn flush(&mut self, slot: u32) -> io::Result<()> {
        self.vq.flush(slot)?;
        self.unkicked = true;
        Ok(())
    }

    fn store(&mut self, slot: u32, data: &[u8]) -> io::Result<()> {
        self.data(slot, data.len())?.copy_from(data);
        Ok(())
    }

    fn load(&self, slot: u32, data: &mut [u8]) -> io::Result<()> {
        self.data(slot, data.len())?.copy_to(data);
        Ok(())
    }

    fn kick_if_needed(&mut self) -> io::Result<bool> {
        if !self.unkicked {
            return Ok(false);
        }
        self.unkicked = false;
        // The avail index must be visible before the server's wish is read. virtio-driver has
        // this fence with event idx only.
        fence(Ordering::SeqCst);
        let needed = self.vq.avail_notif_needed();
        if needed {
            self.kick.notify()?;
        }
        Ok(needed)
    }

    fn next_completion(&mut self) -> io::Result<Option<Completed>> {
        let mut completions = self.vq.completions();
        if !completions.has_next() {
            return Ok(None);
        }
        match completions.next() {
            Some(done) => Ok(Some(Completed { slot: done.context, result: done.ret })),
            None => Err(io::Error::other("it completed a request that was not in flight")),
        }
    }

    fn describe_error(&self, result: i32) -> String {
        match -result {
            libc::EIO => "status 1, I/O error",
            libc::ENOTSUP => "status 2, not supported",
            _ => "a status that is not in the specification",
        }
        .to_owned()
    }
}

impl Virtqueue {
    fn describe(&mut self, slot: u32, len: usize) -> io::Result<usize> {
        let data = self.data(slot, len)?.ptr_guard_mut().as_ptr();
        Ok(self.segments.fill(data, len))
    }

    /// Returns the first `len` bytes of the slot's memory.
    fn data(&self, slot: u32, len: usize) -> io::Result<VolatileSlice<'_, impl BitmapSlice>> {
        let index = fits::<_, usize>(slot, "the number of a slot");
        if index >= self.slots || len > self.slot_bytes {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.shared
            .memory
            .get_slice(self.first_byte + index * self.slot_bytes, len)
            .map_err(io::Error::other)
    }

    /// Returns whether completed requests are waiting in the used ring.
    pub(crate) fn has_completions(&mut self) -> bool {
        self.vq.completions().has_next()
    }

    /// Asks for a call at the next completion. Returns whether one has come already, in which
    /// case it may not be announced and the caller must not sleep.
    pub(crate) fn arm(&mut self) -> bool {
        self.vq.set_used_notif_enabled(true);
        // The wish must be visible before the used index is read again. virtio-driver has this
        // fence with event idx only.
        fence(Ordering::SeqCst);
        self.has_completions()
    }

    /// Asks for no calls. With event idx this leaves the armed position where it was, so it must
    /// come before completions are taken, or the server would be asked for one more call.
    pub(crate) fn disarm(&mut self) {
        self.vq.set_used_notif_enabled(false);
    }

    /// Returns the call eventfd, to wait for.
    pub(crate) fn call_fd(&self) -> BorrowedFd<'_> {
        (*self.call).as_fd()
    }

    /// Returns how many calls came since this was last asked.
    pub(crate) fn take_calls(&mut self) -> io::Result<u64> {
        // The eventfd is a blocking one: reading it is safe only when there is something.
        let mut fds = [PollFd::from_borrowed_fd(self.call.as_fd(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut fds, Some(&now))? == 0 { Ok(0) } else { self.call.read() }
    }
}

fn read_facts(transport: &VirtioBlkTransport) -> io::Result<DeviceFacts> {
    const SECTOR_BYTES: u64 = 512;
    let features = VirtioBlkFeatureFlags::from_bits_truncate(transport.get_features());
    let config = transport.get_config()?;
    let offered = |flag, value| features.contains(flag).then_some(value).filter(|v| *v > 0);
    let block = offered(VirtioBlkFeatureFlags::BLK_SIZE, u32::from(config.blk_size));
    let sectors = u64::from(config.capacity);
    let ring_limit = transport.max_queues().unwrap_or(1);
    Ok(DeviceFacts {
        disk_bytes: sectors.checked_mul(SECTOR_BYTES).ok_or_else(|| {
            io::Error::other(format!("it announces a capacity of {sectors} sectors"))
        })?,
        logical_block_bytes: block.unwrap_or(512),
        max_queues: virtio_blk_max_queues(transport)?.min(ring_limit),
        has_virtqueues: true,
        read_only: features.contains(VirtioBlkFeatureFlags::RO),
        can_flush: features.contains(VirtioBlkFeatureFlags::FLUSH),
        size_max: offered(VirtioBlkFeatureFlags::SIZE_MAX, u32::from(config.size_max)),
        seg_max: offered(VirtioBlkFeatureFlags::SEG_MAX, u32::from(config.seg_max)),
    })
}

/// Returns the descriptors of this process that are sockets, with their inodes.
fn open_sockets() -> BTreeSet<(RawFd, String)> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let sockets = entries.filter_map(|entry| {
        let target = std::fs::read_link(entry.path()).ok()?.to_str()?.to_owned();
        let fd = entry.file_name().to_str()?.parse().ok()?;
        target.starts_with("socket:").then_some((fd, target))
    });
    sockets.collect()
}

/// Finds the connection that virtio-driver has made and keeps to itself, among the sockets that
/// were not there before. `None` when that does not single one out, or without /proc.
fn find_connection(before: &BTreeSet<(RawFd, String)>, path: &Path) -> Option<OwnedFd> {
    let after = open_sockets();
    let fresh = after.difference(before).filter_map(|(fd, _)| duplicate(*fd).ok());
    let connected = fresh.map(UnixStream::from).filter_map(|stream| {
        let peer = stream.peer_addr().ok()?;
        Some((peer.as_pathname() == Some(path), OwnedFd::from(stream)))
    });
    // Another thread may have opened sockets too, and a server may have bound its socket by
    // another name than ours: so the name decides only where there is a choice.
    let mut found: Vec<_> = connected.collect();
    if found.len() > 1 {
        found.retain(|(same_path, _)| *same_path);
    }
    let (_, socket) = found.pop()?;
    found.is_empty().then_some(socket)
}

fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers only; a descriptor that is not open gives EBADF.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Returns the process that listened at the other end of a Unix socket; `None` when it is not
/// visible from here, as in another PID namespace.
pub(crate) fn peer_pid(socket: BorrowedFd<'_>) -> Option<u32> {
    // Not through rustix, whose result has no room for the 0 that means "not visible".
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let size = size_of::<libc::ucred>();
    let mut len = libc::socklen_t::try_from(size).ok()?;
    // SAFETY: the pointers are to live locals, and `len` is the size of what `credentials` is.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    let pid = u32::try_from(credentials.pid).ok()?;
    (status == 0 && pid > 0).then_some(pid)
}
