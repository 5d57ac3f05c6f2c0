//! vhost-user messages with descriptors, over a socket, to a real session.
//!
//! The input is a list of messages. For any input, the session ends when the front-end has gone,
//! and leaves nothing: no descriptor (so no mapping, which keeps one), no op, no task. A session
//! that does not end is a hang, which libFuzzer's `-timeout` finds.

#![no_main]

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use blockio::{DiskOptions, DiskSource, EngineConfig, Io, IoThreadConfig};
use device::Device;
use device::blk::config::BlkOptions;
use libfuzzer_sys::fuzz_target;
use ringhaul::ExportLog;
use ringhaul::control::{Control, ExportSetup};
use ringhaul::process::limits::MemoryLimits;
use ringhaul::socket::Endpoint;
use ringhaul::spec::{DeviceSpec, DiskSpec, EndpointSpec, ExportSettings, ExportSpec};
use ringhaul::threads::IoThreads;
use ringhaul_fuzz::{Input, has_thread, memfd, open_descriptors};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use virtqueue::MemoryFiles;

/// A bound that makes all replies fit the socket, because they are read only at the end.
const MESSAGES_MAX: usize = 40;
/// The threads that map, unmap and close the front-end's memory.
const HELPERS: [&str; 3] = ["ringhaul-close", "ringhaul-map", "ringhaul-unmap"];
/// Descriptors that are still open after this time count as leaks.
const CLOSED_WITHIN: Duration = Duration::from_secs(10);
const FILE_BYTES: u64 = 1 << 20;
/// An action in place of a message: the guest writes to its memory.
const WRITE_MEMORY: u8 = 0xfe;
/// An action in place of a message: the guest kicks.
const KICK: u8 = 0xff;

fn threads() -> &'static IoThreads {
    static THREADS: OnceLock<IoThreads> = OnceLock::new();
    THREADS.get_or_init(|| {
        virtqueue::install_sigbus_handler().expect("a handler for SIGBUS");
        let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
        let failed = Arc::new(|| panic!("an IoThread has failed"));
        IoThreads::start(2, &config, &failed).expect("two IoThreads")
    })
}

fuzz_target!(|bytes: &[u8]| {
    let threads = threads();
    let before = open_descriptors();
    run(threads, Input::new(bytes));
    // All IoThreads are asked before the first answer is awaited.
    let (sender, left) = channel();
    for remote in threads.remotes() {
        let sender = sender.clone();
        let post = move |io: &Rc<Io>| sender.send((io.ops(), io.tasks())).expect("one waits");
        assert!(remote.post(post), "the IoThread is there");
    }
    for _ in threads.remotes() {
        let left = left.recv().expect("the IoThread is there");
        assert_eq!(left, (0, 0), "a session leaves something on its IoThread");
    }
    // Work that may wait is done on separate threads, which end after it.
    let start = Instant::now();
    while open_descriptors() != before || HELPERS.into_iter().any(has_thread) {
        assert!(start.elapsed() < CLOSED_WITHIN, "a descriptor or a thread leaks");
        std::thread::yield_now();
    }
});

fn run(threads: &IoThreads, mut input: Input) {
    let source = DiskSource::null(1 << 20, &DiskOptions::default()).expect("a disk");
    let options = BlkOptions { num_queues: 2, ..BlkOptions::default() };
    let log = Arc::new(ExportLog::new("fuzz"));
    let device = Device::blk(source.clone(), options, Arc::<ExportLog>::clone(&log));
    let (mut ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    let (sender, ended) = channel();
    let spec = ExportSpec {
        name: None,
        endpoint: EndpointSpec::Fd(3),
        device: DeviceSpec::Blk(DiskSpec::Null { size_bytes: 1 << 20 }),
        settings: ExportSettings::default(),
    };
    let ended_of_thread = move || sender.send(()).expect("somebody waits");
    let control = Control::start(ended_of_thread).expect("a control thread");
    let mut opening = control.begin(vec![spec], false).expect("its name is free");
    let Ok(export) = opening.remove(0).claim() else { panic!("it is not cancelled") };
    let setup = ExportSetup {
        log,
        disks: vec![source],
        device,
        endpoint: Some(Endpoint::Connection(theirs)),
        threads: threads.remotes().to_vec(),
        limits: MemoryLimits::new(1 << 40, 1 << 40, MemoryFiles::Sealable),
        groups: Arc::default(),
        fd_store: None,
        line: String::new(),
        export,
    };
    control.serve(vec![setup]).expect("an export");
    let guest = FrontEnd::new();
    let stops_early = input.u8() & 1 != 0;
    for _ in 0..MESSAGES_MAX {
        if input.is_empty() || !guest.send(&ours, &mut input) {
            break;
        }
    }
    if stops_early {
        // The operator ends the export while messages are on their way.
        control.begin_stop();
        ended.recv().expect("an export that was stopped has ended");
        control.join();
        return;
    }
    ours.shutdown(std::net::Shutdown::Write).expect("a socket can be shut down");
    ended.recv().expect("a session whose front-end has gone ends");
    // All replies must be readable to the end: the session has closed the socket.
    let mut replies = Vec::new();
    match ours.read_to_end(&mut replies) {
        Ok(_) => {}
        // Messages that the session has not read are lost, which resets the connection.
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
    control.join();
}

struct FrontEnd {
    memory: File,
    event: OwnedFd,
    null: File,
    pipe: (OwnedFd, OwnedFd),
}

impl FrontEnd {
    fn new() -> Self {
        Self {
            memory: memfd(FILE_BYTES),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd"),
            null: File::open("/dev/null").expect("/dev/null is there"),
            pipe: rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe"),
        }
    }

    /// Sends the next message. Returns false if the session has closed the socket.
    fn send(&self, socket: &UnixStream, input: &mut Input) -> bool {
        use std::os::unix::fs::FileExt;

        let request = input.u8();
        match request {
            WRITE_MEMORY => {
                let (offset, len) = (u64::from(input.u32() & 0xf_ffff), usize::from(input.u8()));
                let bytes = input.bytes(len);
                if input.u8() == 0xff {
                    // Takes memory away.
                    self.memory.set_len(offset).expect("a memfd gets shorter");
                } else if offset + 256 <= FILE_BYTES {
                    self.memory.write_all_at(bytes, offset).expect("a memfd can be written");
                }
                return true;
            }
            KICK => {
                rustix::io::write(&self.event, &1_u64.to_ne_bytes()).expect("it has room");
                return true;
            }
            _ => {}
        }
        let (switches, kinds, count) = (input.u8(), input.u8(), input.u8());
        let payload = input.bytes(usize::from(count));
        // Version 1, maybe with a request for a reply, or any flags; a size that is right, or any
        // size.
        let flags = if switches & 1 == 0 { 1 | u32::from(switches & 8) } else { input.u32() };
        let size = if switches & 2 == 0 { payload.len() as u32 } else { input.u32() };
        let request = if switches & 4 == 0 { u32::from(request) } else { input.u32() };
        let mut message = Vec::new();
        for number in [request, flags, size] {
            message.extend(number.to_le_bytes());
        }
        message.extend(payload);
        let fds: Vec<_> =
            (0..switches >> 4).map(|at| self.descriptor(kinds >> (2 * (at & 3)) & 3)).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)), "there is room");
        }
        let sent = sendmsg(socket, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL);
        match sent {
            Ok(_) => true,
            Err(Errno::PIPE | Errno::CONNRESET) => false,
            Err(error) => panic!("cannot send to a session: {error}"),
        }
    }

    fn descriptor(&self, kind: u8) -> rustix::fd::BorrowedFd<'_> {
        match kind {
            0 => self.memory.as_fd(),
            1 => self.event.as_fd(),
            2 => self.null.as_fd(),
            _ => self.pipe.1.as_fd(),
        }
    }
}
