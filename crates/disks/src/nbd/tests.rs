//! Servers that answer late, break off, and come back changed.

mod abandoned;
mod chunks;
mod deadlines;
mod durable;
mod flags;
mod held;
mod homes;
mod large_reads;
mod log_lines;
mod messages;
mod offers;
mod rerouting;
mod scripted;
mod sizes;
mod slow;
mod stalled;
mod unflushed;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use blockio::disk::{DiskState, Extent, ExtentKind};
use blockio::testing::remote_ops;
use blockio::{Disk, DiskOptions, DiskSource, Error, Io, IoThread, IoThreadConfig, clock};
use iomem::{Buffers, Memory, WriteLog};

use super::handshake::can;
use super::options::NbdOptions;
use super::wire::FLAG_ONE_EXTENT;
use scripted::{Event, FLUSH, READ, STATUS, Server, WRITE};

const MIB: usize = 1 << 20;
const FLAGS: u16 = can::HAS_FLAGS | can::FLUSH | can::MULTI_CONN;
const DEADLINE: Duration = Duration::from_millis(500);

fn new_thread() -> IoThread {
    IoThread::new(&IoThreadConfig::default()).unwrap()
}

fn open(options: NbdOptions) -> DiskSource {
    crate::nbd::open(options, &DiskOptions::default()).unwrap()
}

fn filled(byte: u8, bytes: usize) -> Buffers {
    Buffers::from_vec(vec![byte; bytes])
}

/// A request that runs by itself.
struct Running(Rc<Cell<Option<Outcome>>>);

/// The outcome of a request, with its errno.
type Outcome = Result<(), Option<i32>>;

impl Running {
    fn start(io: &Rc<Io>, request: impl Future<Output = Outcome> + 'static) -> Self {
        let result = Rc::<Cell<_>>::default();
        let seen = Rc::clone(&result);
        io.spawn(async move { seen.set(Some(request.await)) });
        Self(result)
    }

    fn write(thread: &IoThread, disk: &Rc<Disk>, offset: u64, byte: u8) -> Self {
        let disk = Rc::clone(disk);
        Self::start(thread.io(), async move {
            let written = disk.write(offset, filled(byte, 4096), false).await;
            written.map_err(|unfinished| unfinished.error().raw_os_error())
        })
    }

    fn write_durably(thread: &IoThread, disk: &Rc<Disk>, offset: u64, byte: u8) -> Self {
        let disk = Rc::clone(disk);
        Self::start(thread.io(), async move {
            let written = disk.write(offset, filled(byte, 4096), true).await;
            written.map_err(|unfinished| unfinished.error().raw_os_error())
        })
    }

    /// A read or a write of the first bytes.
    fn start_one(thread: &IoThread, disk: &Rc<Disk>, command: u16) -> Self {
        if command == WRITE {
            return Self::write(thread, disk, 0, 1);
        }
        let disk = Rc::clone(disk);
        Self::start(thread.io(), async move {
            let read = disk.read(0, filled(0, 4096)).await;
            read.map_err(|unfinished| unfinished.error().raw_os_error())
        })
    }

    fn flush(thread: &IoThread, disk: &Rc<Disk>) -> Self {
        let disk = Rc::clone(disk);
        let flush = async move { disk.flush().await.map_err(|error| error.raw_os_error()) };
        Self::start(thread.io(), flush)
    }

    /// Waits for the end. Returns the errno.
    fn end(self, thread: &IoThread) -> Option<i32> {
        loop {
            match self.0.get() {
                Some(result) => return result.err().flatten(),
                None => wait_a_turn(thread),
            }
        }
    }
}

fn read(thread: &IoThread, disk: &Disk, offset: u64) -> u8 {
    let memory = filled(0xee, 4096);
    let view = memory.duplicate();
    thread.block_on(disk.read(offset, memory)).unwrap().unwrap();
    view.to_vec()[4095]
}

/// The size that the server has reported last.
fn announced_size(source: &DiskSource) -> u64 {
    source.size_probe().unwrap().size_bytes().unwrap().unwrap()
}

/// Runs the IoThread until the server has seen an event.
fn wait_for(thread: &IoThread, server: &Server, event: Event) {
    while !server.state().events.contains(&event) {
        wait_a_turn(thread);
    }
}

fn wait_a_turn(thread: &IoThread) {
    let io = Rc::clone(thread.io());
    let turn = async move {
        io.wake_me_at(clock::now() + Duration::from_millis(1));
        io.suspend().await;
    };
    thread.block_on(turn).unwrap();
}

/// The server continues, but is not understood: it has ended its requests when it has closed the
/// connection.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_write_is_sent_again_after_a_connection_with_garbage() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| (state.holds, state.lingers) = ((WRITE, 1), true));
    let write = Running::write(&thread, &disk, 0, 1);
    wait_for(&thread, &server, Event::Request(0, WRITE));
    assert_eq!(remote_ops(thread.io()), 1);
    server.send_garbage();
    assert_eq!(read(&thread, &disk, 8192), 0, "reads go on");
    wait_for(&thread, &server, Event::HalfClosed(0));
    assert_eq!(read(&thread, &disk, 8192), 0);
    server.change(|state| state.lingers = false);
    assert_eq!(write.end(&thread), None);
    assert_eq!(remote_ops(thread.io()), 0, "a write that was sent twice");
    let events = server.state().events.clone();
    let at = |event| events.iter().position(|seen| *seen == event);
    assert!(at(Event::Ended(0)) < at(Event::Request(1, WRITE)), "{events:?}");
    assert!(at(Event::Request(1, READ)) < at(Event::Ended(0)), "{events:?}");
}

/// Its requests are for the server that comes next.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_request_to_a_server_that_shuts_down_is_sent_again() {
    const SHUTDOWN: u32 = 108;
    for command in [READ, WRITE] {
        let server = Server::start(MIB, FLAGS);
        server.change(|state| state.fails = Some((command, SHUTDOWN)));
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = Rc::new(source.attach(thread.io()));
        let request = Running::start_one(&thread, &disk, command);
        while server.state().connections < 2 && request.0.get().is_none() {
            wait_a_turn(&thread);
        }
        server.change(|state| state.fails = None);
        assert_eq!(request.end(&thread), None, "{command}");
    }
}

/// A long read goes directly into its memory.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_read_that_breaks_off_within_its_data_is_sent_again() {
    for (is_extended, bytes) in [(false, 4096), (false, 65_536), (true, 4096), (true, 65_536)] {
        let server = Server::start(MIB, FLAGS);
        server.change(|state| {
            state.content.fill(1);
            (state.is_extended, state.cuts_read) = (is_extended, true);
        });
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = Rc::new(source.attach(thread.io()));
        let memory = filled(0xee, bytes);
        let (view, of_disk) = (memory.duplicate(), Rc::clone(&disk));
        let read = Running::start(thread.io(), async move {
            let read = of_disk.read(0, memory).await;
            read.map_err(|unfinished| unfinished.error().raw_os_error())
        });
        while read.0.get().is_none() {
            let connections = server.state().connections;
            assert!(connections <= 2, "its answer is not understood: {is_extended} {bytes}");
            wait_a_turn(&thread);
        }
        assert_eq!(read.end(&thread), None);
        assert!(view.to_vec().iter().all(|byte| *byte == 1), "{is_extended} {bytes}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_flush_that_a_break_interrupts_fails_if_data_may_be_lost() {
    for (distrust, expected) in [(false, None), (true, Some(libc::EIO))] {
        let server = Server::start(MIB, can::HAS_FLAGS);
        let (thread, source) = (new_thread(), open(NbdOptions { distrust, ..server.options() }));
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
        server.hang_up();
        assert_eq!(read(&thread, &disk, 0), 1);
        assert_eq!(Running::flush(&thread, &disk).end(&thread), expected, "it cannot flush");

        let server = Server::start(MIB, FLAGS);
        let (thread, source) = (new_thread(), open(NbdOptions { distrust, ..server.options() }));
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
        server.change(|state| state.holds = (FLUSH, 1));
        let flush = Running::flush(&thread, &disk);
        wait_for(&thread, &server, Event::Request(0, FLUSH));
        server.hang_up();
        assert_eq!(flush.end(&thread), expected);
        assert_eq!(source.state() == DiskState::Lost, distrust);
        assert_eq!(Running::flush(&thread, &disk).end(&thread), expected, "a later one");
    }
}

/// Nothing relies on the write yet: it is made again, with its flush.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_durable_write_that_a_break_interrupts_is_sent_again() {
    for (flags, distrust) in [(FLAGS, true), (FLAGS, false), (FLAGS & !can::MULTI_CONN, true)] {
        let server = Server::start(MIB, flags);
        let (thread, source) = (new_thread(), open(NbdOptions { distrust, ..server.options() }));
        let disk = Rc::new(source.attach(thread.io()));
        server.change(|state| state.holds = (FLUSH, 1));
        let write = Running::write_durably(&thread, &disk, 0, 1);
        wait_for(&thread, &server, Event::Request(0, FLUSH));
        // The state after a restart of its machine.
        server.change(|state| state.content[0] = 0);
        server.hang_up();
        assert_eq!(write.end(&thread), None);
        let (byte, seen) = {
            let state = server.state();
            (state.content[0], state.seen.clone())
        };
        assert_eq!(byte, 1, "it was answered, and is lost");
        assert_eq!(seen, [WRITE, FLUSH, WRITE, FLUSH].map(|command| (command, 0)));
        assert_eq!(source.state(), DiskState::Ready);
        assert!(source.hand_over().is_flushed());
        assert_eq!(Running::flush(&thread, &disk).end(&thread), None);
    }
}

/// Data that the previous process left unflushed may be lost, and nothing else.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_break_after_a_takeover_loses_unflushed_changes() {
    for is_flushed in [true, false] {
        let server = Server::start(MIB, FLAGS);
        let options = || NbdOptions { distrust: true, ..server.options() };
        let thread = new_thread();
        let before = open(options());
        let disk = Rc::new(before.attach(thread.io()));
        assert!(before.hand_over().is_flushed());
        assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
        assert!(!before.hand_over().is_flushed());
        if is_flushed {
            assert_eq!(Running::flush(&thread, &disk).end(&thread), None);
        }
        assert_eq!(before.hand_over().is_flushed(), is_flushed);

        let source = open(options());
        source.hand_over().inherit(before.hand_over().loss(), before.hand_over().is_flushed());
        drop((disk, before));
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(read(&thread, &disk, 0), 1);
        server.hang_up();
        assert_eq!(read(&thread, &disk, 0), 1, "on another connection");
        let expected = (!is_flushed).then_some(libc::EIO);
        assert_eq!(Running::flush(&thread, &disk).end(&thread), expected);
    }
}

/// Writes in the meantime wait until the server is as it was.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_server_that_returns_with_fewer_features_is_not_used() {
    type Change = fn(&mut scripted::State);
    let lesser: [(Change, Change); 4] = [
        (|state| state.flags &= !can::MULTI_CONN, |state| state.flags = FLAGS),
        (|state| state.flags &= !can::FLUSH, |state| state.flags = FLAGS),
        (|state| state.flags |= can::READ_ONLY, |state| state.flags = FLAGS),
        (|state| state.is_extended = false, |state| state.is_extended = true),
    ];
    for (lessen, restore) in lesser {
        let server = Server::start(MIB, FLAGS);
        server.change(|state| state.is_extended = true);
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
        server.change(lessen);
        server.change(|state| state.content.resize(2 * MIB, 0));
        server.hang_up();
        let write = Running::write(&thread, &disk, 4096, 2);
        let flush = Running::flush(&thread, &disk);
        while !source
            .remark()
            .is_some_and(|why| why.contains("offers fewer capabilities than before"))
        {
            let is_used = |event: &Event| matches!(event, Event::Request(1.., _));
            assert!(!server.state().events.iter().any(is_used), "it is used");
            wait_a_turn(&thread);
        }
        assert!(matches!(source.state(), DiskState::Away(_)));
        let refused = source.refresh().unwrap_err().to_string();
        assert!(refused.contains("offers fewer capabilities than before"), "{refused}");
        assert_eq!(announced_size(&source), MIB as u64, "the size of one that is refused counts");
        server.change(restore);
        assert_eq!((write.end(&thread), flush.end(&thread)), (None, None));
        assert_eq!(read(&thread, &disk, 4096), 2);
        assert_eq!(announced_size(&source), 2 * MIB as u64);
    }
}

/// Flags that no request depends on may change.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_server_that_returns_without_unneeded_flags_is_used() {
    const ROTATIONAL: u16 = 1 << 4;
    let server = Server::start(MIB, FLAGS | can::FUA | ROTATIONAL);
    let options = DiskOptions { read_only: true, ..DiskOptions::default() };
    let reader = crate::nbd::open(server.options(), &options).unwrap();
    let (thread, writer) = (new_thread(), open(server.options()));
    let disks = [&reader, &writer].map(|source| source.attach(thread.io()));
    for flags in [FLAGS | can::FUA, FLAGS | can::READ_ONLY] {
        let is_writable = flags & can::READ_ONLY == 0;
        server.change(|state| state.flags = flags);
        server.hang_up();
        assert_eq!(read(&thread, &disks[0], 0), 0);
        if is_writable {
            assert_eq!(read(&thread, &disks[1], 0), 0);
        }
    }
}

/// Only the connection that has written can flush.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn written_data_is_flushed_before_a_takeover() {
    for (flags, is_needed) in [(FLAGS, false), (FLAGS & !can::MULTI_CONN, true)] {
        let server = Server::start(MIB, flags);
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
        let leaving = source.clone();
        let other = std::thread::spawn(move || leaving.hand_over().write_back().unwrap());
        while !other.is_finished() {
            wait_a_turn(&thread);
        }
        other.join().unwrap();
        let has_flushed = server.state().events.contains(&Event::Request(0, FLUSH));
        assert_eq!((has_flushed, source.hand_over().is_flushed()), (is_needed, is_needed));
    }
}

/// The server has no lock: the next host begins when the queues here have stopped.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_end_of_a_use_flushes_and_reports_a_loss() {
    for is_lost in [false, true] {
        let server = Server::start(MIB, FLAGS & !can::MULTI_CONN);
        let (thread, source) = (new_thread(), open(server.options()));
        let lock = source.late_lock().unwrap();
        lock.take(1).unwrap();
        assert!(!server.state().events.iter().any(|event| matches!(event, Event::Request(..))));
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
        if is_lost {
            source.hand_over().inherit(Some(libc::EIO), false);
        }
        let leaving = source.clone();
        let other = std::thread::spawn(move || leaving.hand_over().end_use());
        while !other.is_finished() {
            wait_a_turn(&thread);
        }
        assert_eq!(other.join().unwrap().is_err(), is_lost);
        assert!(is_lost || server.state().events.contains(&Event::Request(0, FLUSH)));
    }
}

/// Until a refresh, the disk keeps its size.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_server_that_returns_with_another_size_is_used() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    for bytes in [2 * MIB, MIB / 2] {
        server.change(|state| state.content.resize(bytes, 7));
        server.hang_up();
        assert_eq!(read(&thread, &disk, 4096), 0);
        assert_eq!(disk.info().size_bytes, MIB as u64);
    }
    let beyond = Running::write(&thread, &disk, MIB as u64 - 4096, 1);
    assert_eq!(beyond.end(&thread), Some(libc::EINVAL), "the server has less than that");
}

/// The whole way of a question about holes.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn holes_of_the_server_are_reported() {
    let server = Server::start(MIB, FLAGS);
    for (is_extended, expected) in [
        (true, [(MIB / 2, ExtentKind::Data), (MIB / 2 - 4096, ExtentKind::Hole)]),
        (false, [(MIB, ExtentKind::Data), (MIB / 2 - 4096, ExtentKind::Data)]),
    ] {
        server.change(|state| state.is_extended = is_extended);
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = source.attach(thread.io());
        let extents = [(0, MIB), (MIB / 2 + 4096, MIB / 2 - 4096)].map(|(offset, bytes)| {
            let asked = disk.block_status(offset as u64, bytes as u64);
            thread.block_on(asked).unwrap().unwrap()
        });
        let expected = expected.map(|(bytes, kind)| Extent { bytes: bytes as u64, kind });
        assert_eq!(extents, expected);
        if is_extended {
            // The server must not be asked for a context that it does not offer.
            server.change(|state| state.has_context = false);
            server.hang_up();
            let asked = disk.block_status(MIB as u64 / 2, 4096);
            assert_eq!(thread.block_on(asked).unwrap().unwrap(), Extent::data(4096));
            let is_asked = |seen: &&Event| matches!(seen, Event::Request(_, STATUS));
            assert_eq!(server.state().events.iter().filter(is_asked).count(), 2);
            // A server may report many extents otherwise.
            assert_eq!(server.state().seen, [(STATUS, FLAG_ONE_EXTENT); 2]);
        }
    }
}

/// Counts the bytes that were written.
#[derive(Default)]
struct Log(RefCell<usize>);

impl WriteLog for Log {
    fn wrote(&self, _: *const u8, bytes: usize) {
        *self.0.borrow_mut() += bytes;
    }
}

/// The case of a migration, which logs writes, while another IoThread has the only connection.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_log_of_writes_includes_data_that_another_iothread_received() {
    let server = Server::start(MIB, can::HAS_FLAGS | can::FLUSH);
    let source = open(server.options());
    let (ready, is_ready) = mpsc::channel();
    let theirs = source.clone();
    let home = std::thread::spawn(move || -> Result<(), Error> {
        let thread = new_thread();
        let _disk = theirs.attach(thread.io());
        let (op, completer) = thread.io().foreign_op(Buffers::empty());
        ready.send(completer).unwrap();
        thread.block_on(op).map(drop)
    });
    let end = is_ready.recv().unwrap();
    let thread = new_thread();
    let disk = source.attach(thread.io());
    let (memory, log) = (filled(0xee, 8192), Rc::<Log>::default());
    let logged = Memory::loggable(memory.memory().clone());
    logged.set_log(Some(Rc::<Log>::clone(&log)));
    // SAFETY: the ranges are those of `memory`, which the list keeps.
    let list = unsafe { Buffers::from_raw_parts(memory.iovecs().to_vec().into(), logged) };
    thread.block_on(disk.read(0, list)).unwrap().unwrap();
    assert_eq!((memory.to_vec()[8191], *log.0.borrow()), (0, 8192));
    end.complete(Ok(0));
    home.join().unwrap().unwrap();
}
