//! Guest memory of a front-end, in memfds that it shares with the daemon.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use crate::daemon::{GUEST_MEMORY, LIMIT};

/// A region in the front-end's description.
#[derive(Clone, Debug)]
pub struct Region {
    /// Start in guest memory.
    pub guest_addr: u64,
    /// Bytes.
    pub bytes: u64,
    /// Start in the front-end's address space, which occurs only in messages.
    pub user_addr: u64,
    /// Start in its file.
    pub file_offset: u64,
    /// The memory.
    pub file: Arc<OwnedFd>,
}

impl Region {
    /// Makes a region in a memfd of its own. Its front-end address is unrelated to its guest
    /// address.
    ///
    /// # Errors
    /// If the kernel has no memory or descriptor left.
    pub fn new(guest_addr: u64, bytes: u64) -> Result<Self> {
        let file_offset = 0x3000;
        let file = Arc::new(memfd(file_offset + bytes)?);
        let user_addr = 0x7f00_0000_0000 - 3 * guest_addr;
        Ok(Self { guest_addr, bytes, user_addr, file_offset, file })
    }

    /// The region in a message.
    #[must_use]
    pub fn description(&self) -> Vec<u8> {
        let Self { guest_addr, bytes, user_addr, file_offset, .. } = *self;
        [guest_addr, bytes, user_addr, file_offset].map(u64::to_ne_bytes).concat()
    }

    /// The front-end address of a guest address, if it is in this region.
    #[must_use]
    pub(crate) fn find_user_addr(&self, guest_addr: u64) -> Option<u64> {
        let offset = guest_addr.checked_sub(self.guest_addr)?;
        (offset < self.bytes).then(|| self.user_addr + offset)
    }
}

/// Makes an anonymous file of `bytes` zeroes.
///
/// # Errors
/// If the kernel has no memory or descriptor left.
pub fn memfd(bytes: u64) -> Result<OwnedFd> {
    let file = memfd_create(GUEST_MEMORY, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .context("creating a memfd")?;
    rustix::fs::ftruncate(&file, bytes).context("making a memfd larger")?;
    Ok(file)
}

/// The regions and the front-end's own mapping of them.
pub struct Memory {
    /// The regions, in the order of sharing.
    pub regions: Vec<Region>,
    map: GuestMemoryMmap,
}

impl Memory {
    /// Maps regions.
    ///
    /// # Errors
    /// If the kernel refuses, or the regions overlap.
    pub fn new(mut regions: Vec<Region>) -> Result<Self> {
        regions.sort_by_key(|region| region.guest_addr);
        let mut ranges = Vec::new();
        for region in &regions {
            let file = File::from(region.file.try_clone().context("duplicating a memfd")?);
            let offset = FileOffset::new(file, region.file_offset);
            let bytes = usize::try_from(region.bytes)?;
            ranges.push((GuestAddress(region.guest_addr), bytes, Some(offset)));
        }
        let map = GuestMemoryMmap::from_ranges_with_files(ranges).context("mapping memfds")?;
        Ok(Self { regions, map })
    }

    /// The front-end address of a guest address.
    ///
    /// # Errors
    /// If the address is in no region.
    pub fn user_addr(&self, guest_addr: u64) -> Result<u64> {
        let found = self.regions.iter().find_map(|region| region.find_user_addr(guest_addr));
        found.with_context(|| format!("guest address {guest_addr:#x} is in no region"))
    }

    /// Writes bytes, across regions if need be.
    ///
    /// # Errors
    /// If any byte is outside of the regions.
    pub fn write(&self, addr: u64, bytes: &[u8]) -> Result<()> {
        self.map
            .write_slice(bytes, GuestAddress(addr))
            .with_context(|| format!("writing {} bytes at guest address {addr:#x}", bytes.len()))
    }

    /// Reads bytes, across regions if need be.
    ///
    /// # Errors
    /// If any byte is outside of the regions.
    pub fn read(&self, addr: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read_into(addr, &mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn read_into(&self, addr: u64, bytes: &mut [u8]) -> Result<()> {
        let len = bytes.len();
        self.map
            .read_slice(bytes, GuestAddress(addr))
            .with_context(|| format!("reading {len} bytes at guest address {addr:#x}"))
    }
}

/// Makes an eventfd.
///
/// # Errors
/// If the kernel has no descriptor left.
pub fn new_eventfd() -> Result<Arc<OwnedFd>> {
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    Ok(Arc::new(fd.context("creating an eventfd")?))
}

/// Adds one to an eventfd.
///
/// # Errors
/// If its counter is full.
pub fn signal(fd: &OwnedFd) -> Result<()> {
    rustix::io::write(fd, &1_u64.to_ne_bytes()).context("writing an eventfd")?;
    Ok(())
}

/// Returns the counter of an eventfd, and sets it to zero.
pub fn take_count(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(fd, &mut count) {
        Ok(8) => u64::from_ne_bytes(count),
        // The read would block at zero.
        _ => 0,
    }
}

/// Waits until an eventfd, or any descriptor, is readable, and reads nothing.
///
/// # Errors
/// If it does not become readable in time; the error names it by `what`.
pub fn wait_readable(fd: &impl AsFd, what: &str) -> Result<()> {
    let limit = Timespec::try_from(LIMIT).context("converting a time limit")?;
    let ready = poll(&mut [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)], Some(&limit));
    match ready.with_context(|| format!("waiting for {what}"))? {
        0 => anyhow::bail!("there was no {what} within {LIMIT:?}"),
        _ => Ok(()),
    }
}
