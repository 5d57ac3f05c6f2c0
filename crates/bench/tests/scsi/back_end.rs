//! A small vhost-user-scsi back-end: the messages, and queues with a script that answers commands.
//!
//! It has no configuration space, and only the protocol features that a test asks for.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tempfile::TempDir;
use virtqueue::{
    Chain, DeviceQueue, GuestMemory, LocalMemory, MappingRules, QueueConfig, RegionConfig,
    SplitQueue,
};

/// Features.
pub(crate) const EVENT_IDX: u64 = 1 << 29;
pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;
pub(crate) const VERSION_1: u64 = 1 << 32;
/// Protocol features.
pub(crate) const MQ: u64 = 1 << 0;
pub(crate) const REPLY_ACK: u64 = 1 << 3;

/// The number of queues, including the control queue and the event queue.
pub(crate) const QUEUES: u64 = 5;

const SENSE_BYTES: usize = 96;

/// A command as it arrived.
pub(crate) struct Command {
    pub(crate) queue: u32,
    pub(crate) lun: [u8; 8],
    pub(crate) cdb: [u8; 32],
    pub(crate) data_out: Vec<u8>,
    /// Room for data from the device, in bytes.
    pub(crate) room: usize,
}

/// The response and the data of the device.
#[derive(Default)]
pub(crate) struct Answer {
    pub(crate) response: u8,
    pub(crate) status: u8,
    pub(crate) residual: u32,
    pub(crate) sense: Vec<u8>,
    pub(crate) data: Vec<u8>,
    /// True to write nothing at all.
    pub(crate) silent: bool,
    /// Distance from the head to the descriptor that the used element names.
    pub(crate) head_offset: u16,
}

/// Answers commands.
pub(crate) trait Script: Send + Sync + 'static {
    fn answer(&self, command: &Command) -> Answer;
}

/// A back-end that serves front-ends on a socket of its own until it is dropped.
pub(crate) struct BackEnd {
    pub(crate) socket: PathBuf,
    _dir: TempDir,
}

impl BackEnd {
    pub(crate) fn start(features: u64, protocol_features: u64, script: Arc<dyn Script>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("scsi.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        // The thread waits for further front-ends until the process ends.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let session = Session {
                    stream: stream.unwrap(),
                    features,
                    protocol_features,
                    acks: false,
                    event_idx: false,
                    memory: Arc::new(GuestMemory::empty()),
                    rings: (0..QUEUES).map(|_| Ring::default()).collect(),
                    script: Arc::clone(&script),
                };
                session.serve();
            }
        });
        Self { socket, _dir: dir }
    }
}

/// The state of a queue, as set by the front-end.
#[derive(Default)]
struct Ring {
    size: u16,
    base: u16,
    /// Descriptor table, used ring, avail ring.
    addrs: [u64; 3],
    kick: Option<Arc<File>>,
    call: Option<File>,
    running: Option<RunningQueue>,
}

struct RunningQueue {
    stop: Arc<AtomicBool>,
    kick: Arc<File>,
    thread: JoinHandle<u16>,
}

struct Session {
    stream: UnixStream,
    features: u64,
    protocol_features: u64,
    acks: bool,
    event_idx: bool,
    memory: Arc<GuestMemory>,
    rings: Vec<Ring>,
    script: Arc<dyn Script>,
}

impl Session {
    fn serve(mut self) {
        while let Some((request, flags, body, file)) = self.receive() {
            let word = |at: usize| u32::from_ne_bytes(body[at..at + 4].try_into().unwrap());
            let number = |at: usize| u64::from_ne_bytes(body[at..at + 8].try_into().unwrap());
            let answer = match request {
                1 => Some(self.features),
                2 => {
                    self.event_idx = number(0) & EVENT_IDX != 0;
                    None
                }
                5 => {
                    assert_eq!(word(0), 1, "one region");
                    self.memory = map([8, 16, 24, 32].map(number), file.unwrap());
                    None
                }
                8 => {
                    self.ring(word(0)).size = word(4).try_into().unwrap();
                    None
                }
                9 => {
                    self.ring(word(0)).addrs = [8, 16, 24].map(number);
                    None
                }
                10 => {
                    self.ring(word(0)).base = word(4).try_into().unwrap();
                    None
                }
                11 => {
                    let base = self.stop(word(0));
                    Some(u64::from(word(0)) | u64::from(base) << 32)
                }
                12 => {
                    self.ring(word(0)).kick = file.map(Arc::new);
                    None
                }
                13 => {
                    self.ring(word(0)).call = file;
                    // Without protocol features no message enables the queue.
                    if self.features & PROTOCOL_FEATURES == 0 {
                        self.start(word(0));
                    }
                    None
                }
                15 => Some(self.protocol_features),
                16 => {
                    self.protocol_features = number(0);
                    None
                }
                17 => Some(QUEUES),
                18 => {
                    self.start(word(0));
                    None
                }
                3 => None,
                other => panic!("message {other} was not negotiated"),
            };
            if let Some(answer) = answer {
                self.reply(request, answer);
            } else if self.acks {
                assert_ne!(flags & 8, 0, "message {request} asks for no reply");
                self.reply(request, 0);
            }
            self.acks = request == 16 && self.protocol_features & REPLY_ACK != 0 || self.acks;
        }
        for index in 0..self.rings.len() {
            self.stop(u32::try_from(index).unwrap());
        }
    }

    fn ring(&mut self, index: u32) -> &mut Ring {
        &mut self.rings[usize::try_from(index).unwrap()]
    }

    fn receive(&mut self) -> Option<(u32, u32, Vec<u8>, Option<File>)> {
        let mut head = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut head)];
        let got = recvmsg(&self.stream, slices, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
        if got.bytes == 0 {
            return None;
        }
        assert_eq!(got.bytes, 12, "headers come in one piece");
        let mut files = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next().map(File::from),
            _ => None,
        });
        let file = files.next();
        let [request, flags, size] =
            [0, 4, 8].map(|at| u32::from_ne_bytes(head[at..at + 4].try_into().unwrap()));
        let mut body = vec![0; usize::try_from(size).unwrap()];
        self.stream.read_exact(&mut body).ok()?;
        Some((request, flags, body, file))
    }

    fn reply(&mut self, request: u32, value: u64) {
        let head = [request, 1 | 4, 8].map(u32::to_ne_bytes);
        let bytes = [head.as_flattened(), &value.to_ne_bytes()].concat();
        // The front-end may be gone.
        let _ = self.stream.write_all(&bytes);
    }

    fn start(&mut self, index: u32) {
        let (memory, event_idx) = (Arc::clone(&self.memory), self.event_idx);
        let script = Arc::clone(&self.script);
        let ring = self.ring(index);
        assert!(ring.running.is_none(), "queue {index} is started twice without a stop");
        let addrs = ring.addrs.map(|addr| memory.guest_addr_of_user(addr).unwrap());
        let [desc_table, used_ring, avail_ring] = addrs;
        let config = QueueConfig {
            size: ring.size,
            desc_table,
            avail_ring,
            used_ring,
            event_idx,
            indirect: false,
            next_avail: ring.base,
        };
        let (kick, call) = (ring.kick.take().unwrap(), ring.call.take().unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let (kick, stop) = (Arc::clone(&kick), Arc::clone(&stop));
            move || serve_queue(index, (memory, config), (&kick, &call), &stop, &*script)
        });
        ring.running = Some(RunningQueue { stop, kick, thread });
    }

    fn stop(&mut self, index: u32) -> u16 {
        let Some(RunningQueue { stop, kick, thread }) = self.ring(index).running.take() else {
            return 0;
        };
        stop.store(true, Ordering::Release);
        (&*kick).write_all(&1_u64.to_ne_bytes()).unwrap();
        thread.join().unwrap()
    }
}

fn map([guest_addr, size, user_addr, file_offset]: [u64; 4], file: File) -> Arc<GuestMemory> {
    let file = Arc::new(file);
    let config = RegionConfig { guest_addr, size, user_addr, file, file_offset };
    Arc::new(GuestMemory::new(&[config], &MappingRules::default()).unwrap())
}

/// Answers the commands of one queue until it is stopped. Returns the next avail entry.
fn serve_queue(
    index: u32,
    (memory, config): (Arc<GuestMemory>, QueueConfig),
    (kick, call): (&File, &File),
    stop: &AtomicBool,
    script: &dyn Script,
) -> u16 {
    let mut queue = SplitQueue::new(LocalMemory::new(memory), config).unwrap();
    while !stop.load(Ordering::Acquire) {
        while let Some(chain) = queue.pop().unwrap() {
            assert!(index >= 2, "queue {index} carries nothing");
            let (head, written) = execute(index, chain, script);
            queue.push(head, written);
            if queue.publish() {
                let mut call = call;
                call.write_all(&1_u64.to_ne_bytes()).unwrap();
            }
        }
        if !queue.enable_kicks() {
            let mut kick = kick;
            kick.read_exact(&mut [0; 8]).unwrap();
        }
    }
    queue.next_avail()
}

/// Carries out one command. Returns its head and the number of written bytes.
fn execute(queue: u32, mut chain: Chain, script: &dyn Script) -> (u16, u32) {
    let header: [u8; 51] = chain.readable.take_front().unwrap();
    let command = Command {
        queue,
        lun: *header.first_chunk().unwrap(),
        cdb: *header.last_chunk().unwrap(),
        data_out: chain.readable.to_vec(),
        room: chain.writable.bytes() - 12 - SENSE_BYTES,
    };
    let answer = script.answer(&command);
    if answer.silent {
        return (chain.head, 0);
    }
    let mut bytes = u32::try_from(answer.sense.len()).unwrap().to_le_bytes().to_vec();
    bytes.extend(answer.residual.to_le_bytes());
    bytes.extend([0, 0, answer.status, answer.response]);
    bytes.extend(&answer.sense);
    bytes.resize(12 + SENSE_BYTES, 0);
    bytes.extend(&answer.data);
    let written = chain.writable.copy_from(0, &bytes);
    (chain.head + answer.head_offset, u32::try_from(written).unwrap())
}
