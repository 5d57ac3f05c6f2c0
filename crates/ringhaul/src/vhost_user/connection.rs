//! The state that one front-end has set up.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use blockio::Remote;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use vhost::vhost_user::message::{
    VHOST_USER_CONFIG_OFFSET, VhostTransferStateDirection, VhostTransferStatePhase,
    VhostUserConfigFlags, VhostUserInflight, VhostUserLog, VhostUserMemoryRegion,
    VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags,
    VhostUserVringState,
};
use vhost::vhost_user::{
    Error as VhostError, GpuBackend, Result as VhostResult, VhostUserBackendReqHandlerMut,
};
use virtqueue::{GuestMemory, MAX_REGIONS, MappingRules, RegionConfig};

use super::ring::{RingAddresses, RingState, invalid};
use crate::blk::BlkDevice;

const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// One front-end's device.
pub(super) struct Connection {
    name: String,
    device: BlkDevice,
    /// Queue `i` is served by IoThread `i` modulo their number.
    threads: Vec<Remote>,
    memory: Arc<GuestMemory>,
    /// What the front-end may have mapped.
    rules: MappingRules,
    rings: Vec<RingState>,
    /// Whether rings start disabled, as the protocol features make them.
    rings_need_enable: bool,
    /// The session ends: no queue is started any more.
    closing: bool,
}

impl Connection {
    pub(super) fn new(
        name: String,
        device: BlkDevice,
        threads: Vec<Remote>,
        rules: MappingRules,
    ) -> Self {
        let rings = (0..device.num_queues()).map(|_| RingState::default()).collect();
        let memory = Arc::new(GuestMemory::empty());
        let (rings_need_enable, closing) = (false, false);
        Self { name, device, threads, memory, rules, rings, rings_need_enable, closing }
    }

    /// Stops all queues for good and lets go of the memory. When this returns, requests are
    /// finished.
    pub(super) fn close(&mut self) {
        self.closing = true;
        self.stop_all();
        self.memory = Arc::new(GuestMemory::empty());
    }

    /// Stops all queues. Their requests are finished when this returns.
    fn stop_all(&mut self) {
        for ring in &mut self.rings {
            if let Err(error) = ring.stop() {
                tracing::error!(export = self.name, "cannot stop a queue: {error}");
            }
        }
    }

    fn ring(&mut self, index: u32) -> io::Result<&mut RingState> {
        let count = self.rings.len();
        self.rings
            .get_mut(index as usize)
            .ok_or_else(|| invalid(format!("queue {index}, but there are {count}")))
    }

    /// Changes what is known of a ring, then starts or stops it if that is what follows.
    fn change(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut RingState) -> io::Result<()>,
    ) -> VhostResult<()> {
        change(self.ring(index).map_err(failed)?).map_err(failed)?;
        self.update(index as usize).map_err(failed)
    }

    fn update(&mut self, index: usize) -> io::Result<()> {
        if self.closing {
            return self.rings[index].stop();
        }
        let thread = &self.threads[index % self.threads.len()];
        self.rings[index].update(&self.device, &self.memory, thread)
    }

    /// Puts another memory map in place. Queues are stopped for that: nothing may use a region
    /// once the front-end has heard that it is gone.
    fn set_memory(&mut self, memory: GuestMemory) -> io::Result<()> {
        for ring in &mut self.rings {
            ring.stop()?;
        }
        self.memory = Arc::new(memory);
        for index in 0..self.rings.len() {
            if let Err(error) = self.update(index) {
                // Its memory may be on its way: a region that grows is removed and added again.
                tracing::debug!(export = self.name, "queue {index} waits for memory: {error}");
            }
        }
        Ok(())
    }

    fn region(
        guest_addr: u64,
        size: u64,
        user_addr: u64,
        file_offset: u64,
        file: File,
    ) -> RegionConfig {
        RegionConfig { guest_addr, size, user_addr, file: Arc::new(file), file_offset }
    }
}

/// An error that ends this connection.
fn failed(error: io::Error) -> VhostError {
    VhostError::ReqHandlerError(error)
}

fn not_offered<T>(what: &str) -> VhostResult<T> {
    Err(failed(io::Error::new(io::ErrorKind::Unsupported, format!("{what} was not offered"))))
}

/// A descriptor of the front-end's must not make us wait.
fn nonblocking(file: Option<File>) -> io::Result<Option<OwnedFd>> {
    file.map(|file| {
        let fd = OwnedFd::from(file);
        fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
        Ok(fd)
    })
    .transpose()
}

/// What we add to must be an eventfd: nothing else can be written to without waiting for it, once
/// the front-end takes `O_NONBLOCK` back.
fn eventfd(file: Option<File>, what: &str, index: u8) -> io::Result<Option<OwnedFd>> {
    let Some(fd) = nonblocking(file)? else { return Ok(None) };
    // Without /proc there is no telling.
    match std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())) {
        Ok(kind) if kind.as_os_str() != "anon_inode:[eventfd]" => {
            let kind = kind.display();
            Err(invalid(format!("a {what} of queue {index} that is no eventfd but {kind}")))
        }
        _ => Ok(Some(fd)),
    }
}

/// The place in the configuration space: most front-ends count from its start, some from the start
/// of the device's registers, 256 bytes earlier.
fn config_offset(offset: u32) -> usize {
    offset.checked_sub(VHOST_USER_CONFIG_OFFSET).unwrap_or(offset) as usize
}

impl VhostUserBackendReqHandlerMut for Connection {
    fn set_owner(&mut self) -> VhostResult<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> VhostResult<()> {
        self.stop_all();
        Ok(())
    }

    fn reset_device(&mut self) -> VhostResult<()> {
        not_offered("RESET_DEVICE")
    }

    fn get_features(&mut self) -> VhostResult<u64> {
        Ok(self.device.features() | PROTOCOL_FEATURES)
    }

    fn set_features(&mut self, features: u64) -> VhostResult<()> {
        self.stop_all();
        self.device.set_features(features & !PROTOCOL_FEATURES).map_err(failed)?;
        self.rings_need_enable = features & PROTOCOL_FEATURES != 0;
        for index in 0..self.rings.len() {
            if !self.rings_need_enable {
                self.rings[index].enabled = true;
            }
            self.update(index).map_err(failed)?;
        }
        Ok(())
    }

    fn get_protocol_features(&mut self) -> VhostResult<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, features: u64) -> VhostResult<()> {
        let unknown = features & !self.get_protocol_features()?.bits();
        if unknown != 0 {
            return not_offered(&format!("protocol feature mask {unknown:#x}"));
        }
        Ok(())
    }

    fn get_queue_num(&mut self) -> VhostResult<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> VhostResult<Option<Vec<u64>>> {
        let regions: Vec<_> = regions
            .iter()
            .zip(files)
            .map(|(r, file)| {
                Self::region(r.guest_phys_addr, r.memory_size, r.user_addr, r.mmap_offset, file)
            })
            .collect();
        let memory = GuestMemory::new(&regions, &self.rules);
        let memory = memory.map_err(|error| failed(io::Error::other(error)))?;
        self.set_memory(memory).map_err(failed)?;
        Ok(None)
    }

    fn get_max_mem_slots(&mut self) -> VhostResult<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        r: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> VhostResult<Option<u64>> {
        let region =
            Self::region(r.guest_phys_addr, r.memory_size, r.user_addr, r.mmap_offset, file);
        let memory = self.memory.with_region(&region, &self.rules);
        let memory = memory.map_err(|error| failed(io::Error::other(error)))?;
        self.set_memory(memory).map_err(failed)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, r: &VhostUserSingleMemoryRegion) -> VhostResult<()> {
        let memory = self.memory.without_region(r.guest_phys_addr, r.user_addr, r.memory_size);
        let memory = memory.map_err(|error| failed(io::Error::other(error)))?;
        self.set_memory(memory).map_err(failed)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> VhostResult<()> {
        self.change(index, |ring| {
            ring.stop()?;
            ring.set_size(num)
        })
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> VhostResult<()> {
        let addresses =
            Some(RingAddresses { desc_table: descriptor, avail_ring: available, used_ring: used });
        self.change(index, |ring| {
            if ring.addresses != addresses {
                ring.stop()?;
                ring.addresses = addresses;
            }
            Ok(())
        })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> VhostResult<()> {
        self.change(index, |ring| {
            ring.stop()?;
            ring.next_avail =
                u16::try_from(base).map_err(|_| invalid(format!("ring base {base}")))?;
            Ok(())
        })
    }

    fn get_vring_base(&mut self, index: u32) -> VhostResult<VhostUserVringState> {
        self.change(index, |ring| {
            ring.stop()?;
            ring.started = false;
            ring.kick = None;
            Ok(())
        })?;
        let next_avail = self.ring(index).map_err(failed)?.next_avail;
        Ok(VhostUserVringState::new(index, u32::from(next_avail)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> VhostResult<()> {
        let needs_enable = self.rings_need_enable;
        let kick = nonblocking(fd).map_err(failed)?;
        self.change(u32::from(index), |ring| {
            ring.stop()?;
            ring.kick = kick;
            ring.started = true;
            ring.enabled |= !needs_enable;
            Ok(())
        })
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> VhostResult<()> {
        let call = eventfd(fd, "call", index).map_err(failed)?;
        self.change(u32::from(index), |ring| ring.set_call(call))
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> VhostResult<()> {
        let err = eventfd(fd, "err", index).map_err(failed)?;
        self.change(u32::from(index), |ring| ring.set_err(err))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> VhostResult<()> {
        self.change(index, |ring| {
            ring.enabled = enable;
            Ok(())
        })
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> VhostResult<Vec<u8>> {
        // What lies beyond the fields that we have reads as zeroes; the size must be as asked.
        let mut reply = vec![0; size as usize];
        let space = self.device.config_space();
        if let Some(rest) = space.get(config_offset(offset)..) {
            let len = rest.len().min(reply.len());
            reply[..len].copy_from_slice(&rest[..len]);
        }
        Ok(reply)
    }

    fn set_config(
        &mut self,
        offset: u32,
        data: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> VhostResult<()> {
        self.device.write_config(config_offset(offset), data).map_err(failed)
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> VhostResult<()> {
        not_offered("GPU_SET_SOCKET")
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> VhostResult<File> {
        not_offered("SHARED_OBJECT")
    }

    fn get_inflight_fd(&mut self, _: &VhostUserInflight) -> VhostResult<(VhostUserInflight, File)> {
        not_offered("INFLIGHT_SHMFD")
    }

    fn set_inflight_fd(&mut self, _: &VhostUserInflight, _: File) -> VhostResult<()> {
        not_offered("INFLIGHT_SHMFD")
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> VhostResult<Option<File>> {
        not_offered("DEVICE_STATE")
    }

    fn check_device_state(&mut self) -> VhostResult<()> {
        not_offered("DEVICE_STATE")
    }

    fn get_shmem_config(&mut self) -> VhostResult<VhostUserShMemConfig> {
        not_offered("SHMEM")
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> VhostResult<()> {
        not_offered("LOG_SHMFD")
    }
}
