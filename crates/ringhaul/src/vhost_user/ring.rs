//! What a front-end has said about one ring.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockio::Remote;
use virtqueue::{GuestMemory, MAX_QUEUE_SIZE};

use crate::blk::BlkDevice;
use crate::queue::{QueueHandle, QueueSetup, Ring};

/// Addresses in the front-end's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingAddresses {
    pub(super) desc_table: u64,
    pub(super) avail_ring: u64,
    pub(super) used_ring: u64,
}

/// A ring is *started* by its kick descriptor and *enabled* by a message of its own; it is served
/// while it is both. A kick that came before stays in the eventfd, and a queue is processed once
/// unasked when it starts, so none is lost.
#[derive(Default)]
pub(super) struct RingState {
    pub(super) size: u16,
    pub(super) addresses: Option<RingAddresses>,
    pub(super) next_avail: u16,
    pub(super) started: bool,
    pub(super) enabled: bool,
    pub(super) kick: Option<OwnedFd>,
    pub(super) call: Option<OwnedFd>,
    pub(super) err: Option<OwnedFd>,
    running: Option<QueueHandle>,
}

impl RingState {
    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Starts or stops the queue, whichever what was said so far asks for.
    pub(super) fn update(
        &mut self,
        device: &BlkDevice,
        memory: &Arc<GuestMemory>,
        thread: &Remote,
    ) -> io::Result<()> {
        let wanted = self.started && self.enabled;
        if !wanted {
            return self.stop();
        }
        if self.is_running() {
            return Ok(());
        }
        // Memory and addresses may still be on their way.
        let Some(addresses) = self.addresses else { return Ok(()) };
        if self.size == 0 || memory.num_regions() == 0 {
            return Ok(());
        }
        let setup = QueueSetup {
            memory: Arc::clone(memory),
            ring: self.ring(addresses, memory)?,
            kick: clone(self.kick.as_ref())?,
            call: clone(self.call.as_ref())?,
            err: clone(self.err.as_ref())?,
        };
        self.running = Some(device.start_queue(thread, setup).map_err(io::Error::other)?);
        Ok(())
    }

    /// Stops the queue, after all its requests have been answered.
    pub(super) fn stop(&mut self) -> io::Result<()> {
        if let Some(running) = self.running.take() {
            self.next_avail = running
                .stop()
                .ok_or_else(|| io::Error::other("the IoThread of the queue has ended"))?;
        }
        Ok(())
    }

    pub(super) fn set_size(&mut self, size: u32) -> io::Result<()> {
        match u16::try_from(size) {
            Ok(size) if size.is_power_of_two() && size <= MAX_QUEUE_SIZE => {
                self.size = size;
                Ok(())
            }
            _ => Err(invalid(format!(
                "a ring of {size} entries; it must be a power of two up to {MAX_QUEUE_SIZE}"
            ))),
        }
    }

    pub(super) fn set_call(&mut self, call: Option<OwnedFd>) -> io::Result<()> {
        self.call = call;
        if let Some(running) = &self.running {
            running.set_call(clone(self.call.as_ref())?);
        }
        Ok(())
    }

    pub(super) fn set_err(&mut self, err: Option<OwnedFd>) -> io::Result<()> {
        self.err = err;
        if let Some(running) = &self.running {
            running.set_err(clone(self.err.as_ref())?);
        }
        Ok(())
    }

    fn ring(&self, addresses: RingAddresses, memory: &GuestMemory) -> io::Result<Ring> {
        let guest = |user_addr: u64| {
            memory.guest_addr_of_user(user_addr).ok_or_else(|| {
                invalid(format!("a ring at address {user_addr:#x}, which is not in its memory"))
            })
        };
        Ok(Ring {
            size: self.size,
            desc_table: guest(addresses.desc_table)?,
            avail_ring: guest(addresses.avail_ring)?,
            used_ring: guest(addresses.used_ring)?,
            next_avail: self.next_avail,
        })
    }
}

fn clone(fd: Option<&OwnedFd>) -> io::Result<Option<OwnedFd>> {
    fd.map(OwnedFd::try_clone).transpose()
}

pub(super) fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}
