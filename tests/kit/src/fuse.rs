//! A FUSE file system with one file, which can withhold its answers.
//!
//! Any process that touches the file waits in the kernel until this program answers. It understands
//! only the messages that tests need (`include/uapi/linux/fuse.h` of Linux). The file holds zeroes
//! and cannot be written to, or it has the contents of a [`Journal`], which notes each change.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::Pid;
use tempfile::TempDir;

use crate::daemon::LIMIT;
use crate::journal::{Change, Journal};
use crate::random::Random;
use crate::system::{RestoreOnDrop, can_change_system, print_skipped};

/// Numbers of requests.
#[expect(missing_docs, reason = "the names are the kernel's")]
pub mod opcode {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    /// Refused without a journal, since the file then has a fixed size.
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const INTERRUPT: u32 = 36;
    pub const POLL: u32 = 40;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub const STATX: u32 = 52;
}

/// Size of the file without a journal.
pub const FILE_BYTES: u64 = 1 << 20;

const NAME: &str = "file";
const ROOT: u64 = 1;
const FILE: u64 = 2;
/// The time in seconds for which the kernel may cache attributes: longer than any test.
const VALID_S: u64 = 3600;
/// The version of the protocol, and the most bytes and pages of a write.
const VERSION: [u32; 2] = [7, 31];
const WRITE_BYTES: u32 = 128 << 10;
const WRITE_PAGES: u16 = 32;
/// Flags of the protocol: writes of more than a page, and a limit of pages.
const BIG_WRITES: u32 = 1 << 5;
const MAX_PAGES: u32 = 1 << 22;
/// Flags of an open file: the kernel caches nothing, and writes run in parallel.
const DIRECT_IO: u32 = 1 << 0;
const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
/// A flag of `SETATTR`: the request has a size.
const HAS_SIZE: u32 = 1 << 3;
const DSYNC: u32 = OFlags::DSYNC.bits();
/// Larger than any request.
const REQUEST_BYTES: usize = 256 << 10;
const HEADER_BYTES: usize = 40;
/// The number of a message to the kernel (`FUSE_NOTIFY_INVAL_INODE`).
const NOTIFY_INVAL_INODE: i32 = 2;

/// The treatment of the kernel's requests.
#[derive(Default)]
struct State {
    /// The process and the kinds of requests that get no answer.
    withheld: Option<(Pid, Vec<u32>)>,
    waiting: Vec<Request>,
    /// The error with which withheld requests fail at once.
    fails: Option<Errno>,
    /// The duration of reads, and the thread that answers them.
    slow: Option<(Duration, mpsc::Sender<(Instant, Request)>)>,
    /// The thread that answers changes, which the journal has noted, out of order.
    change_sender: Option<mpsc::Sender<(usize, Request, Vec<u8>)>>,
}

#[derive(Clone, Debug)]
struct Request {
    opcode: u32,
    unique: u64,
    node: u64,
    thread: u32,
    body: Vec<u8>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    device: File,
    journal: Option<Arc<Journal>>,
}

/// The file system, mounted in a folder of its own. Dropping it answers all waiting requests and
/// unmounts it.
pub struct Fuse {
    shared: Arc<Shared>,
    server: Option<JoinHandle<()>>,
    _restore: RestoreOnDrop,
    folder: TempDir,
}

impl Fuse {
    /// Mounts a file system that answers all requests. `None`, with a message, where that is
    /// impossible.
    ///
    /// # Errors
    /// If the kernel refuses although root asks and it has FUSE.
    pub fn mount() -> Result<Option<Self>> {
        Self::mount_with(None)
    }

    /// Like [`mount`](Self::mount), with a journal that notes all changes of the file. Answers to
    /// changes come out of order.
    ///
    /// # Errors
    /// As for [`mount`](Self::mount).
    pub fn mount_recorded(journal: &Arc<Journal>) -> Result<Option<Self>> {
        let this = Self::mount_with(Some(Arc::clone(journal)))?;
        if let Some(this) = &this {
            let (sender, changes) = mpsc::channel();
            let shared = Arc::clone(&this.shared);
            // The thread ends with the file system, which owns the sender.
            std::thread::spawn(move || shared.answer_changes(&changes));
            this.shared.state().change_sender = Some(sender);
        }
        Ok(this)
    }

    fn mount_with(journal: Option<Arc<Journal>>) -> Result<Option<Self>> {
        if !can_change_system("mounts") {
            return Ok(None);
        }
        let device = match File::options().read(true).write(true).open("/dev/fuse") {
            Ok(device) => device,
            Err(error) => {
                print_skipped(&format!("there is no FUSE: {error}"));
                return Ok(None);
            }
        };
        let folder = tempfile::tempdir().context("making a folder to mount on")?;
        let path = folder.path().to_str().context("a folder with an odd name")?;
        let script = "if grep -q \" $1 \" /proc/self/mountinfo; then umount --lazy \"$1\"; fi";
        let restore = RestoreOnDrop::schedule(script, &[path], Stdio::null())?;
        let fd = device.as_raw_fd();
        let data = format!("fd={fd},rootmode=40000,user_id=0,group_id=0");
        let data = std::ffi::CString::new(data)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("ringhaul-test", folder.path(), "fuse", flags, &*data).context("mounting FUSE")?;
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { state, changed, device, journal });
        let server = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.serve()
        });
        Ok(Some(Self { shared, server: Some(server), _restore: restore, folder }))
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        self.folder.path().join(NAME)
    }

    /// The mount point.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Opens the file.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn open(&self) -> Result<Arc<OwnedFd>> {
        let file = File::options().read(true).write(true).open(self.file());
        Ok(Arc::new(file.context("opening a file of FUSE")?.into()))
    }

    /// Withholds answers to requests of these kinds by process `of` from now on. Requests of other
    /// processes are answered: every program that this process starts closes the file.
    pub fn withhold(&self, of: Pid, opcodes: &[u32]) {
        self.shared.state().withheld = Some((of, opcodes.to_vec()));
    }

    /// Fails the waiting requests, and from now on every request that would wait.
    pub fn fail(&self) {
        let waiting = {
            let mut state = self.shared.state();
            state.fails = Some(Errno::IO);
            std::mem::take(&mut state.waiting)
        };
        for request in waiting {
            self.shared.answer_with(&request, FuseReply::Error(Errno::IO));
        }
    }

    /// Waits until a request of this kind waits.
    ///
    /// # Errors
    /// If none arrives in time.
    pub fn wait_for(&self, opcode: u32) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        let mut state = self.shared.state();
        while !state.waiting.iter().any(|request| request.opcode == opcode) {
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "nobody asks FUSE for {opcode}");
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Returns true if a request of this kind waits.
    #[must_use]
    pub fn is_waiting(&self, opcode: u32) -> bool {
        self.shared.state().waiting.iter().any(|request| request.opcode == opcode)
    }

    /// Makes the kernel ask for the attributes of the file again.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn invalidate_attributes(&self) -> Result<()> {
        // `struct fuse_notify_inval_inode_out` after a header without a request. A negative offset
        // invalidates no content.
        let mut bytes = 40_u32.to_ne_bytes().to_vec();
        bytes.extend(NOTIFY_INVAL_INODE.to_ne_bytes());
        bytes.extend(0_u64.to_ne_bytes());
        bytes.extend(FILE.to_ne_bytes());
        bytes.extend([-1_i64, 0].map(i64::to_ne_bytes).concat());
        let written = (&self.shared.device).write(&bytes);
        written.map(drop).context("telling the kernel that attributes have changed")
    }

    /// Delays the answer to each later read by this time, no matter how many reads wait.
    pub fn slow_down(&self, read_time: Duration) {
        let (sender, reads) = mpsc::channel::<(Instant, Request)>();
        let shared = Arc::clone(&self.shared);
        // The thread ends with the file system, which owns the sender.
        std::thread::spawn(move || {
            for (due, request) in reads {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                shared.answer(&request);
            }
        });
        self.shared.state().slow = Some((read_time, sender));
    }

    /// Answers all waiting and all later requests.
    pub fn release(&self) {
        let waiting = {
            let mut state = self.shared.state();
            state.withheld = None;
            state.fails = None;
            state.slow = None;
            std::mem::take(&mut state.waiting)
        };
        for request in waiting {
            self.shared.answer(&request);
        }
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.release();
        self.shared.state().change_sender = None;
        // The forced unmount makes the kernel abort its requests, which ends the server's read. The
        // mount itself lasts until the last descriptor of the file is closed, and then the keeper
        // removes it.
        let _ = unmount(self.folder.path(), UnmountFlags::FORCE);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut bytes = vec![0; REQUEST_BYTES];
        loop {
            let len = match (&self.device).read(&mut bytes) {
                Ok(len) => len,
                // The kernel aborted a request before it could be read.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOENT) => continue,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                // The file system is no longer mounted.
                Err(_) => return,
            };
            let Some(request) = Request::parse(&bytes[..len]) else { continue };
            let mut state = self.state();
            let withholds = state.withheld.as_ref();
            if withholds.is_some_and(|(of, opcodes)| {
                opcodes.contains(&request.opcode) && request.is_from(*of)
            }) {
                if let Some(errno) = state.fails {
                    drop(state);
                    self.answer_with(&request, FuseReply::Error(errno));
                    continue;
                }
                state.waiting.push(request);
                self.changed.notify_all();
                continue;
            }
            if let Some((read_time, reads)) = &state.slow
                && request.opcode == opcode::READ
            {
                let _ = reads.send((Instant::now() + *read_time, request));
                continue;
            }
            let changes = state.change_sender.clone();
            drop(state);
            if let (Some(journal), Some(changes)) = (&self.journal, changes)
                && let Some((change, reply)) = request.change()
            {
                let number = journal.begin(change, request.is_forced());
                let _ = changes.send((number, request, reply));
                continue;
            }
            self.answer(&request);
        }
    }

    /// Answers changes in random order, as long as some wait.
    fn answer_changes(&self, changes: &mpsc::Receiver<(usize, Request, Vec<u8>)>) {
        let mut random = Random::new(1);
        let mut waiting = Vec::new();
        while let Ok(first) = changes.recv() {
            waiting.push(first);
            while !waiting.is_empty() {
                // Takes changes that arrived in the meantime; the pause lets some arrive.
                std::thread::sleep(Duration::from_micros(random.below(200)));
                waiting.extend(changes.try_iter());
                let index = random.below(waiting.len() as u64);
                let index = usize::try_from(index).expect("it is an index");
                let (number, request, reply) = waiting.swap_remove(index);
                if let Some(journal) = &self.journal {
                    journal.end(number);
                }
                self.answer_with(&request, FuseReply::Body(reply));
            }
        }
    }

    fn answer(&self, request: &Request) {
        self.answer_with(request, request.reply(self.journal.as_deref()));
    }

    fn answer_with(&self, request: &Request, reply: FuseReply) {
        let (error, body) = match reply {
            FuseReply::None => return,
            FuseReply::Body(body) => (0, body),
            FuseReply::Error(errno) => (-errno.raw_os_error(), Vec::new()),
        };
        let len = u32::try_from(16 + body.len()).expect("an answer is short");
        let mut bytes = len.to_ne_bytes().to_vec();
        bytes.extend(error.to_ne_bytes());
        bytes.extend(request.unique.to_ne_bytes());
        bytes.extend(body);
        // Fails if the requesting process has given up.
        let _ = (&self.device).write(&bytes);
    }
}

enum FuseReply {
    None,
    Body(Vec<u8>),
    Error(Errno),
}

impl Request {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let body = bytes.get(HEADER_BYTES..)?.to_vec();
        let (opcode, thread) = (word(4)?, word(32)?);
        Some(Self { opcode, unique: long(8)?, node: long(16)?, thread, body })
    }

    /// Returns true if the request is by a thread of `process`.
    fn is_from(&self, process: Pid) -> bool {
        Path::new(&format!("/proc/{}/task/{}", process.as_raw_nonzero(), self.thread)).exists()
    }

    fn word(&self, at: usize) -> Option<u32> {
        self.body.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
    }

    fn long(&self, at: usize) -> Option<u64> {
        self.body.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes)
    }

    /// True for a write whose answer promises stable data (`RWF_DSYNC`).
    fn is_forced(&self) -> bool {
        self.opcode == opcode::WRITE && self.word(32).is_some_and(|flags| flags & DSYNC != 0)
    }

    /// The change that this requests, for a file with a journal, and its answer.
    fn change(&self) -> Option<(Change, Vec<u8>)> {
        match self.opcode {
            opcode::WRITE => {
                let data = self.body.get(40..)?.to_vec();
                let written = [self.word(16)?, 0].map(u32::to_ne_bytes).concat();
                Some((Change::Write(self.long(8)?, data), written))
            }
            // In any mode, the bytes are zeroes from now on.
            opcode::FALLOCATE => {
                let zeroes = vec![0; usize::try_from(self.long(16)?).ok()?];
                Some((Change::Write(self.long(8)?, zeroes), Vec::new()))
            }
            opcode::SETATTR if self.word(0)? & HAS_SIZE != 0 => {
                let bytes = self.long(16)?;
                let head = [VALID_S, 0].map(u64::to_ne_bytes).concat();
                Some((Change::Size(bytes), [head, attributes(FILE, bytes)].concat()))
            }
            opcode::FSYNC => Some((Change::Flush, Vec::new())),
            _ => None,
        }
    }

    fn reply(&self, journal: Option<&Journal>) -> FuseReply {
        let size = journal.map_or(FILE_BYTES, Journal::size);
        match self.opcode {
            opcode::INIT => FuseReply::Body(init()),
            opcode::LOOKUP => match self.body.strip_suffix(&[0]) {
                Some(name) if name == NAME.as_bytes() && self.node == ROOT => {
                    let head = [FILE, 0, VALID_S, VALID_S, 0].map(u64::to_ne_bytes).concat();
                    FuseReply::Body([head, attributes(FILE, size)].concat())
                }
                _ => FuseReply::Error(Errno::NOENT),
            },
            opcode::GETATTR => {
                let head = [VALID_S, 0].map(u64::to_ne_bytes).concat();
                FuseReply::Body([head, attributes(self.node, size)].concat())
            }
            opcode::OPEN => {
                let flags = if journal.is_some() { DIRECT_IO | PARALLEL_DIRECT_WRITES } else { 0 };
                FuseReply::Body([0, 0, flags, 0].map(u32::to_ne_bytes).concat())
            }
            opcode::READ => {
                let bytes = self.word(16).unwrap_or(0) as usize;
                let offset = self.long(8).unwrap_or(0);
                let read = |journal: &Journal| journal.read(offset, bytes);
                FuseReply::Body(journal.map_or_else(|| vec![0; bytes], read))
            }
            // Attributes other than the size do not change.
            opcode::SETATTR if journal.is_some() => {
                let head = [VALID_S, 0].map(u64::to_ne_bytes).concat();
                FuseReply::Body([head, attributes(self.node, size)].concat())
            }
            // The file is always readable.
            opcode::POLL if journal.is_none() => {
                FuseReply::Body([1_u32.to_ne_bytes(), [0; 4]].concat())
            }
            opcode::FLUSH | opcode::RELEASE => FuseReply::Body(Vec::new()),
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => FuseReply::None,
            _ => FuseReply::Error(Errno::NOSYS),
        }
    }
}

/// `struct fuse_init_out`.
fn init() -> Vec<u8> {
    let [major, minor] = VERSION;
    let flags = BIG_WRITES | MAX_PAGES;
    // Version, read-ahead, flags, two limits on background requests, the most bytes of a write, the
    // granularity of times, and pages of a request.
    let mut bytes = [major, minor, 0, flags, 0, WRITE_BYTES, 1].map(u32::to_ne_bytes).concat();
    bytes.extend(WRITE_PAGES.to_ne_bytes());
    bytes.resize(64, 0);
    bytes
}

/// `struct fuse_attr`, of a file of `file_bytes` bytes.
fn attributes(node: u64, file_bytes: u64) -> Vec<u8> {
    let (mode, bytes) = if node == ROOT { (0o40_755, 0) } else { (0o100_666, file_bytes) };
    let blocks = bytes.div_ceil(512);
    let mut attributes = [node, bytes, blocks, 0, 0, 0].map(u64::to_ne_bytes).concat();
    let words: [u32; 10] = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0];
    attributes.extend(words.map(u32::to_ne_bytes).concat());
    attributes
}
