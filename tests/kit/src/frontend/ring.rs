//! A queue of a front-end: the driver's side of its ring, and its eventfds.

use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Result, ensure};
use virtqueue::QueueConfig;
use virtqueue::driver::{self, DriverMemory};

use super::memory::{Memory, new_eventfd, signal, take_count, wait_readable};

pub use driver::{Desc, INDIRECT, NEXT, Used, WRITE};

/// Bytes between the starts of two rings: enough for 1024 entries.
pub(crate) const STRIDE: u64 = 0x8000;

/// The layout of a ring of up to 1024 entries, with its parts in order from `addr`.
#[must_use]
pub fn layout_at(addr: u64, size: u16) -> QueueConfig {
    QueueConfig {
        size,
        desc_table: addr,
        avail_ring: addr + 0x4000,
        used_ring: addr + 0x5000,
        event_idx: true,
        indirect: true,
        next_avail: 0,
    }
}

/// A queue on the driver's side. Like a [`driver::Ring`], it accepts any value in any field.
pub struct Ring {
    ring: driver::Ring<Arc<Memory>>,
    /// Driver to device.
    pub kick: Arc<OwnedFd>,
    /// Device to driver.
    pub call: Arc<OwnedFd>,
    /// Device to front-end: the ring is bad.
    pub err: Arc<OwnedFd>,
}

impl Deref for Ring {
    type Target = driver::Ring<Arc<Memory>>;

    fn deref(&self) -> &Self::Target {
        &self.ring
    }
}

impl DerefMut for Ring {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.ring
    }
}

impl Ring {
    /// Makes an empty ring, which asks for calls. Does not clear its memory.
    ///
    /// # Errors
    /// If the kernel has no descriptor left.
    pub fn new(memory: &Arc<Memory>, config: QueueConfig) -> Result<Self> {
        let ring = driver::Ring::new(Arc::clone(memory), config);
        ring.enable_calls();
        Ok(Self { ring, kick: new_eventfd()?, call: new_eventfd()?, err: new_eventfd()? })
    }

    /// Kicks.
    ///
    /// # Errors
    /// If the eventfd is full.
    pub fn kick(&self) -> Result<()> {
        fence(Ordering::SeqCst);
        signal(&self.kick)
    }

    /// Makes a chain available and kicks.
    ///
    /// # Errors
    /// As for [`kick`](Self::kick).
    pub fn submit(&mut self, head: u16) -> Result<()> {
        self.offer(head);
        self.kick()
    }

    /// Waits for the next used element like a driver, which depends on calls.
    ///
    /// # Errors
    /// If no call comes in time.
    pub fn wait_used(&mut self) -> Result<Used> {
        loop {
            if let Some(used) = self.take_used() {
                return Ok(used);
            }
            self.enable_calls();
            if !self.has_used() {
                wait_readable(&self.call, "call")?;
                take_count(&self.call);
            }
        }
    }

    /// Polls the used ring until it has `count` elements that were not taken, with or without
    /// calls.
    ///
    /// # Errors
    /// If that takes too long.
    pub fn poll_used(&self, count: u16) -> Result<()> {
        let deadline = std::time::Instant::now() + crate::daemon::LIMIT;
        while self.used_idx().wrapping_sub(self.next_used) < count {
            ensure!(std::time::Instant::now() < deadline, "{count} requests were not answered");
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Waits until the daemon reports a bad ring.
    ///
    /// # Errors
    /// If it does not in time.
    pub fn wait_err(&self) -> Result<()> {
        wait_readable(&self.err, "write to the err eventfd")
    }
}

/// Panics if the memory is in no region.
impl DriverMemory for Memory {
    fn load(&self, addr: u64, bytes: &mut [u8]) {
        self.read_into(addr, bytes).expect("a driver reads memory that is mapped");
    }

    fn store(&self, addr: u64, bytes: &[u8]) {
        Memory::write(self, addr, bytes).expect("a driver writes memory that is mapped");
    }
}
