//! Messages both ways against the `vhost` crate, which shares no code with ours.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};

use vhost::vhost_user::message::*;
use vhost::vhost_user::{
    Backend, BackendReqHandler, Error, Frontend as CrateFrontend, FrontendReqHandler, GpuBackend,
    HandlerResult, Result, VhostUserBackendReqHandlerMut, VhostUserFrontend,
    VhostUserFrontendReqHandlerMut,
};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vhost_user::message::{Config, HEADER_BYTES, Header, Region, Request, RingAddresses};
use vhost_user::{End, PROTOCOL_FEATURES};
use vmm_sys_util::eventfd::EventFd;

use crate::scene::{Frontend, Scene, new_eventfd, region, wait_until};

/// VIRTIO_F_RING_PACKED.
const RING_PACKED: u64 = 1 << 34;
/// GET_VRING_BASE_SKIP_DRAIN, which the crate leaves out.
const UNKNOWN_TO_CRATE: u64 = 1 << 23;

/// All messages that both know, with their numbers of descriptors.
fn requests() -> Vec<(Request, usize)> {
    let addresses =
        RingAddresses { desc_table: 0x7000_1000, avail_ring: 0x7000_2002, used_ring: 0x7000_3004 };
    let config = |data: &[u8]| Config { offset: 32, flags: 1, data: data.to_vec() };
    let other = Region { guest_addr: 1 << 40, user_addr: 1 << 41, ..region() };
    vec![
        (Request::GetFeatures, 0),
        (Request::SetFeatures(1 << 30 | 1 << 32), 0),
        (Request::GetProtocolFeatures, 0),
        (Request::SetProtocolFeatures(PROTOCOL_FEATURES), 0),
        (Request::SetOwner, 0),
        (Request::ResetOwner, 0),
        (Request::GetQueueNum, 0),
        (Request::GetMaxMemSlots, 0),
        (Request::SetMemTable(vec![region(), other]), 2),
        (Request::AddMemReg(other), 1),
        (Request::RemMemReg(region()), 0),
        (Request::SetVringNum { index: 1, size: 256 }, 0),
        (Request::SetVringAddr { index: 1, addresses, log: None }, 0),
        (Request::SetVringBase { index: 1, base: 77 }, 0),
        (Request::GetVringBase { index: 1 }, 0),
        (Request::SetVringKick { index: 1, has_fd: true }, 1),
        (Request::SetVringCall { index: 0, has_fd: true }, 1),
        (Request::SetVringErr { index: 1, has_fd: true }, 1),
        (Request::SetVringKick { index: 1, has_fd: false }, 0),
        (Request::SetVringCall { index: 1, has_fd: false }, 0),
        (Request::SetVringErr { index: 0, has_fd: false }, 0),
        (Request::SetVringEnable { index: 1, value: 1 }, 0),
        (Request::SetVringEnable { index: 0, value: 0 }, 0),
        (Request::GetConfig(config(&[0; 60])), 0),
        (Request::SetConfig(config(&[1])), 0),
        (Request::SetBackendReqFd, 1),
        (Request::ResetDevice, 0),
    ]
}

/// Our encoding, read by the crate's back-end.
#[test]
fn the_crate_decodes_our_messages() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let frontend = Frontend::new(ours);
    let recorder = Arc::new(Mutex::new(Recorder::default()));
    let mut backend = BackendReqHandler::from_stream(theirs, Arc::clone(&recorder));
    let (socket, _peer) = UnixStream::pair().unwrap();
    let socket: OwnedFd = socket.into();
    let mut sent = Vec::new();
    for (request, fds) in requests() {
        frontend.send(&request, false, &vec![&socket; fds]);
        backend.handle_request().unwrap_or_else(|error| panic!("{request:?}: {error}"));
        let body = request.encode().1;
        assert_eq!(Request::decode(request.encode().0, &body).as_ref(), Ok(&request));
        for len in 0..body.len() {
            assert!(Request::decode(request.encode().0, &body[..len]).is_err(), "{request:?}");
        }
        sent.push(request);
        assert_eq!(recorder.lock().unwrap().seen.last(), sent.last());
    }
    assert_eq!(recorder.lock().unwrap().seen, sent);
}

/// The crate's front-end and our session: its requests are carried out, and it understands the
/// answers.
#[test]
fn the_crate_s_front_end_is_served() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (_channel, of_session) = UnixStream::pair().unwrap();
    let front_end = std::thread::spawn(move || play_front_end(ours, &of_session));
    let mut scene = Scene::new();
    let mut session = scene.session(theirs);
    let end = loop {
        if let Some(end) = scene.drive_all(&mut session) {
            break end;
        }
    };
    assert!(matches!(end, End::Gone(_)), "{end:?}");
    front_end.join().unwrap();
    assert!(
        matches!(&scene.refused[..], [one] if one.contains("3 entries")),
        "{:?}",
        scene.refused
    );
}

fn play_front_end(socket: UnixStream, channel: &UnixStream) {
    let mut frontend = CrateFrontend::from_stream(socket, 2);
    // The rings below are split.
    let features = frontend.get_features().unwrap() & !RING_PACKED;
    frontend.set_features(features).unwrap();
    let protocol = frontend.get_protocol_features().unwrap();
    assert_eq!(protocol.bits(), PROTOCOL_FEATURES & !UNKNOWN_TO_CRATE);
    frontend.set_protocol_features(protocol).unwrap();
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    frontend.set_owner().unwrap();
    frontend.set_backend_request_fd(channel).unwrap();
    assert_eq!(frontend.get_queue_num().unwrap(), 2);
    assert_eq!(frontend.get_max_mem_slots().unwrap(), 509);
    let memory = rustix::fs::memfd_create("oracle", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 1 << 20).unwrap();
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: region().guest_addr,
        memory_size: region().size,
        userspace_addr: region().user_addr,
        mmap_offset: 0,
        mmap_handle: memory.as_raw_fd(),
    };
    frontend.set_mem_table(&[region]).unwrap();
    frontend.remove_mem_region(&region).unwrap();
    frontend.add_mem_region(&region).unwrap();
    let at = |offset| region.userspace_addr + offset;
    for queue in 0..2 {
        frontend.set_vring_num(queue, 16).unwrap();
        let rings = VringConfigData {
            queue_max_size: 16,
            queue_size: 16,
            flags: 0,
            desc_table_addr: at(0),
            used_ring_addr: at(0x1000),
            avail_ring_addr: at(0x2000),
            log_addr: None,
        };
        frontend.set_vring_addr(queue, &rings).unwrap();
        frontend.set_vring_base(queue, 0).unwrap();
        let event = EventFd::new(0).unwrap();
        frontend.set_vring_call(queue, &event).unwrap();
        frontend.set_vring_err(queue, &event).unwrap();
        frontend.set_vring_kick(queue, &event).unwrap();
        frontend.set_vring_enable(queue, true).unwrap();
        // A queue calls once when it starts.
        wait_until(|| event.read().is_ok());
    }
    let log = VhostUserDirtyLogRegion {
        mmap_size: 0x20_0000 / 4096 / 8,
        mmap_offset: 0,
        mmap_handle: memory.as_raw_fd(),
    };
    frontend.set_log_base(0, Some(log)).unwrap();
    frontend.set_log_fd(EventFd::new(0).unwrap().as_raw_fd()).unwrap();
    let flags = VhostUserConfigFlags::empty();
    let (_, config) = frontend.get_config(0, 60, flags, &[0; 60]).unwrap();
    assert_eq!(config[32], 1);
    frontend.set_config(32, flags, &[0]).unwrap();
    let (_, config) = frontend.get_config(32, 1, flags, &[0]).unwrap();
    assert_eq!(config, [0]);
    frontend.set_vring_enable(1, false).unwrap();
    assert_eq!(frontend.get_vring_base(0).unwrap(), 0);
    frontend.reset_device().unwrap();
    assert!(frontend.set_vring_num(0, 3).is_err(), "a bad size was taken");
}

/// CONFIG_CHANGE, received by the crate's front-end side.
#[test]
fn a_change_of_the_configuration_is_sent() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    assert!(!session.send_config_change(), "nothing was negotiated");
    scene.negotiate(&mut session, &mut frontend);
    assert!(!session.send_config_change(), "there is no channel");
    let received = Arc::new(Mutex::new(ChangeListener::default()));
    let mut listener = FrontendReqHandler::new(Arc::clone(&received)).unwrap();
    let channel = copy_of(listener.get_tx_raw_fd());
    scene.send_checked(&mut session, &mut frontend, &Request::SetBackendReqFd, &[&channel]);
    drop(channel);
    for count in 1..=3 {
        assert!(session.send_config_change());
        listener.handle_request().unwrap();
        assert_eq!(received.lock().unwrap().changes, count);
    }
    // Only a socket can be a channel, and a full or closed one does not block the session.
    let refused =
        scene.exchange(&mut session, &mut frontend, &Request::SetBackendReqFd, &[&new_eventfd()]);
    assert_ne!(refused, [0; 8]);
    let (mut listener, channel) = UnixStream::pair().unwrap();
    scene.send_checked(&mut session, &mut frontend, &Request::SetBackendReqFd, &[&channel.into()]);
    let sent = std::iter::from_fn(|| session.send_config_change().then_some(())).count();
    let mut bytes = [0; HEADER_BYTES];
    listener.read_exact(&mut bytes).unwrap();
    assert_eq!(Header::decode(&bytes), Header { code: 2, flags: 1, size: 0 });
    assert!(sent > 1);
    drop(listener);
    assert!(!session.send_config_change());
}

/// The connection would never hang up while the daemon had its other end.
#[test]
fn a_front_end_s_connection_is_no_channel_for_our_messages() {
    let mut scene = Scene::new();
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let theirs = UnixStream::connect(folder.path().join("socket")).unwrap();
    theirs.set_nonblocking(true).unwrap();
    let ours = listener.accept().unwrap().0;
    let ends = [&theirs, &ours].map(|end| OwnedFd::from(end.try_clone().unwrap()));
    let (mut session, mut frontend) = (scene.session(ours), Frontend::new(theirs));
    scene.negotiate(&mut session, &mut frontend);
    for end in &ends {
        let answer = scene.exchange(&mut session, &mut frontend, &Request::SetBackendReqFd, &[end]);
        assert_ne!(answer, [0; 8]);
    }
    assert!(
        scene
            .refused
            .iter()
            .all(|text| text.contains("must not be the front-end's own connection"))
    );
    let (_listener, channel) = UnixStream::pair().unwrap();
    scene.send_checked(&mut session, &mut frontend, &Request::SetBackendReqFd, &[&channel.into()]);
    drop((ends, frontend));
    // The examiner closes refused sockets.
    wait_until(|| scene.drive(&mut session).is_some());
}

/// A descriptor of the same socket.
fn copy_of(fd: i32) -> OwnedFd {
    let this = rustix::process::pidfd_open(
        rustix::process::getpid(),
        rustix::process::PidfdFlags::empty(),
    )
    .unwrap();
    let flags = rustix::process::PidfdGetfdFlags::empty();
    rustix::process::pidfd_getfd(&this, fd, flags).unwrap()
}

#[derive(Default)]
struct ChangeListener {
    changes: u32,
}

impl VhostUserFrontendReqHandlerMut for ChangeListener {
    fn handle_config_change(&mut self) -> HandlerResult<u64> {
        self.changes += 1;
        Ok(0)
    }
}

/// A back-end that only records its requests.
#[derive(Default)]
struct Recorder {
    seen: Vec<Request>,
}

impl Recorder {
    fn record(&mut self, request: Request) -> Result<()> {
        self.seen.push(request);
        Ok(())
    }

    fn answer<T>(&mut self, request: Request, answer: T) -> Result<T> {
        self.record(request).map(|()| answer)
    }
}

fn region_of(region: &VhostUserMemoryRegion) -> Region {
    Region {
        guest_addr: region.guest_phys_addr,
        size: region.memory_size,
        user_addr: region.user_addr,
        file_offset: region.mmap_offset,
    }
}

fn unexpected<T>() -> Result<T> {
    Err(Error::ReqHandlerError(io::ErrorKind::Unsupported.into()))
}

impl VhostUserBackendReqHandlerMut for Recorder {
    fn set_owner(&mut self) -> Result<()> {
        self.record(Request::SetOwner)
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.record(Request::ResetOwner)
    }

    fn reset_device(&mut self) -> Result<()> {
        self.record(Request::ResetDevice)
    }

    fn get_features(&mut self) -> Result<u64> {
        self.answer(Request::GetFeatures, 1 << 30)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        self.record(Request::SetFeatures(features))
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        assert_eq!(files.len(), regions.len());
        let regions = regions.iter().map(region_of).collect();
        self.answer(Request::SetMemTable(regions), None)
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> Result<()> {
        self.record(Request::SetVringNum { index, size })
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        desc_table: u64,
        used_ring: u64,
        avail_ring: u64,
        _log: u64,
    ) -> Result<()> {
        let addresses = RingAddresses { desc_table, avail_ring, used_ring };
        self.record(Request::SetVringAddr { index, addresses, log: None })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.record(Request::SetVringBase { index, base })
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.answer(Request::GetVringBase { index }, VhostUserVringState::new(index, 0))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.record(Request::SetVringKick { index, has_fd: fd.is_some() })
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.record(Request::SetVringCall { index, has_fd: fd.is_some() })
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.record(Request::SetVringErr { index, has_fd: fd.is_some() })
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        self.answer(Request::GetProtocolFeatures, VhostUserProtocolFeatures::all())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.record(Request::SetProtocolFeatures(features))
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        self.answer(Request::GetQueueNum, 2)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.record(Request::SetVringEnable { index, value: enable.into() })
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let data = vec![0; size as usize];
        let config = Config { offset, flags: flags.bits(), data: data.clone() };
        self.answer(Request::GetConfig(config), data)
    }

    fn set_config(&mut self, offset: u32, data: &[u8], flags: VhostUserConfigFlags) -> Result<()> {
        let config = Config { offset, flags: flags.bits(), data: data.to_vec() };
        self.record(Request::SetConfig(config))
    }

    fn set_backend_req_fd(&mut self, _backend: Backend) {
        self.seen.push(Request::SetBackendReqFd);
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        unexpected()
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        unexpected()
    }

    fn get_inflight_fd(&mut self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        unexpected()
    }

    fn set_inflight_fd(&mut self, _: &VhostUserInflight, _: File) -> Result<()> {
        unexpected()
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        self.answer(Request::GetMaxMemSlots, 8)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        _file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        self.answer(Request::AddMemReg(region_of(region)), None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.record(Request::RemMemReg(region_of(region)))
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        unexpected()
    }

    fn check_device_state(&mut self) -> Result<()> {
        unexpected()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unexpected()
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        unexpected()
    }
}
