//! A vhost-user connection, which `virtio-driver` needs to run a queue. The back-end behind it
//! answers the handshake and accepts memory. Nothing else passes through it, since the tests run
//! both sides of the queue themselves.

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

use virtio_driver::virtqueue::VirtqueueLayout;
use virtio_driver::{IovaTranslator, Le32, ScmSocket, VhostUser, VirtioTransport};
use virtqueue::{GuestMemory, MappingRules, RegionConfig};

const GET_FEATURES: u32 = 1;
const GET_PROTOCOL_FEATURES: u32 = 15;
const GET_QUEUE_NUM: u32 = 17;
const GET_MAX_MEM_SLOTS: u32 = 36;
const ADD_MEM_REG: u32 = 37;

const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// REPLY_ACK, CONFIG and CONFIGURE_MEM_SLOTS.
const PROTOCOL_FEATURES: u64 = 1 << 3 | 1 << 9 | 1 << 15;

const HEADER_BYTES: usize = 12;
const VERSION: u32 = 1;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// The front-end, which owns the driver's mapping, and the back-end.
pub(crate) struct Connection {
    front: VhostUser<Le32, ()>,
    back: Option<JoinHandle<GuestMemory>>,
}

/// Memory that the driver and the device have mapped separately. Guest addresses are the driver's
/// addresses.
pub(crate) struct Shared<'a> {
    pub(crate) driver: &'a mut [u8],
    pub(crate) translator: Box<dyn IovaTranslator>,
    pub(crate) device: GuestMemory,
}

impl Connection {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("virtqueue-{}-{count}.sock", std::process::id()));
        let listener = UnixListener::bind(&path).expect("bind");
        let back = std::thread::spawn(move || {
            let (socket, _) = listener.accept().expect("accept");
            serve(&socket)
        });
        let front = VhostUser::new(path.to_str().expect("a plain path"), u64::MAX);
        std::fs::remove_file(&path).expect("remove the socket");
        Self { front: front.expect("handshake"), back: Some(back) }
    }

    /// Allocates memory and sends it to the back-end. Works once.
    pub(crate) fn share(&mut self, bytes: usize) -> Shared<'_> {
        let translator = self.front.iova_translator();
        let layout = VirtqueueLayout {
            num_queues: 1,
            driver_area_offset: 0,
            device_area_offset: 0,
            req_offset: 0,
            end_offset: bytes,
        };
        let driver = self.front.alloc_queue_mem(&layout).expect("memory is sent and accepted");
        let back = self.back.take().expect("memory is shared once");
        Shared { driver, translator, device: back.join().expect("the back-end has the memory") }
    }
}

/// Answers messages until memory has arrived.
fn serve(mut socket: &UnixStream) -> GuestMemory {
    loop {
        let mut header = [0; HEADER_BYTES];
        let (count, file) = socket.recv_with_fd(&mut header).expect("a message");
        assert_eq!(count, HEADER_BYTES, "the front-end went away");
        let [request, flags, size] = [0, 4, 8].map(|at| u32_at(&header, at));
        let mut payload = vec![0; usize::try_from(size).expect("a size")];
        if size > 0 {
            let (count, _) = socket.recv_with_fd(&mut payload).expect("a payload");
            assert_eq!(count, payload.len());
        }
        let mut memory = None;
        let value = match request {
            GET_FEATURES => F_PROTOCOL_FEATURES,
            GET_PROTOCOL_FEATURES => PROTOCOL_FEATURES,
            GET_QUEUE_NUM => 1,
            GET_MAX_MEM_SLOTS => 8,
            ADD_MEM_REG => {
                let [guest_addr, size, user_addr, file_offset] =
                    [8, 16, 24, 32].map(|at| u64_at(&payload, at));
                let file = Arc::new(file.expect("a region has a file"));
                let config = RegionConfig { guest_addr, size, user_addr, file, file_offset };
                let rules = MappingRules::default();
                memory =
                    Some(GuestMemory::empty().with_region(&config, &rules).expect("a good region"));
                0
            }
            _ if flags & FLAG_NEED_REPLY != 0 => 0,
            _ => continue,
        };
        let mut reply = Vec::new();
        for word in [request, VERSION | FLAG_REPLY, 8] {
            reply.extend(word.to_le_bytes());
        }
        reply.extend(value.to_le_bytes());
        socket.write_all(&reply).expect("a reply");
        if let Some(memory) = memory {
            return memory;
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
