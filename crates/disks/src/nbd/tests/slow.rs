//! Servers that are slow, and machines that are silent for a while.

use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockio::disk::DiskState;
use blockio::{DiskOptions, DiskSource, IoThread, Wait};

use super::super::connect::connect;
use super::super::disk::NbdDisk;
use super::super::handshake::can;
use super::super::options::NbdOptions;
use super::super::shared::SharedExport;
use super::scripted::{Event, READ, Server, WRITE};
use super::{DEADLINE, FLAGS, MIB, Running, filled, new_thread, open, read, wait_a_turn, wait_for};
use crate::nbd::connection_task::Handle;

const SILENCE: Duration = Duration::from_millis(300);

fn open_impatiently(server: &Server) -> DiskSource {
    crate::nbd::open_with_silence(server.options(), &DiskOptions::default(), SILENCE).unwrap()
}

/// The server's machine reports that there is no room, as long as there is none.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_server_that_does_not_read_is_waited_for() {
    let server = Server::start_tcp(MIB, FLAGS);
    let (thread, source) = (new_thread(), open_impatiently(&server));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| state.stalls = true);
    // Far more than the sockets take.
    let writes: Vec<_> = (0..32)
        .map(|byte| {
            let disk = Rc::clone(&disk);
            Running::start(thread.io(), async move {
                let written = disk.write(0, filled(byte, MIB), false).await;
                written.map_err(|unfinished| unfinished.error().raw_os_error())
            })
        })
        .collect();
    while !matches!(source.state(), DiskState::Late(_)) {
        assert_eq!(server.state().connections, 1, "another connection was made");
        wait_a_turn(&thread);
    }
    server.change(|state| state.stalls = false);
    for write in writes {
        assert_eq!(write.end(&thread), None);
    }
    assert_eq!(read(&thread, &disk, 0), 31, "they came in another order");
    assert_eq!(server.state().connections, 1, "another connection was made");
}

/// Waits until all bytes that the server has sent have arrived: it would send them again and again.
fn wait_until_received(thread: &IoThread, socket: &impl AsRawFd) {
    loop {
        let mut left: libc::c_int = -1;
        // SAFETY: the kernel writes one number.
        let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut left) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        if left == 0 {
            return;
        }
        wait_a_turn(thread);
    }
}

/// Makes a socket drop all packets, or take them again: its machine seems to have gone.
fn ignore_all(socket: &impl AsRawFd, is_on: bool) {
    let code = libc::sock_filter { code: 6, jt: 0, jf: 0, k: 0 };
    let filter = libc::sock_fprog { len: 1, filter: (&raw const code).cast_mut() };
    let len = u32::try_from(size_of::<libc::sock_fprog>()).unwrap();
    let name = if is_on { libc::SO_ATTACH_FILTER } else { libc::SO_DETACH_FILTER };
    let (socket, value) = (socket.as_raw_fd(), (&raw const filter).cast());
    // SAFETY: the kernel copies the program, which is one instruction, and keeps no pointer to it.
    let result = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, name, value, len) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// The kernel's bytes are sent when the machine is back, or in vain, which is not known before.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_write_to_a_machine_that_was_silent_never_lands_after_a_newer_one() {
    for flags in [FLAGS, FLAGS & !can::MULTI_CONN] {
        let server = Server::start_tcp(MIB, flags);
        let (thread, source) = (new_thread(), open_impatiently(&server));
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(read(&thread, &disk, 0), 0);
        let socket = server.socket(0);
        wait_until_received(&thread, &socket);
        ignore_all(&socket, true);
        let older = Running::write(&thread, &disk, 0, 1);
        // The read has a connection of its own, when the first has been silent for too long.
        assert_eq!(read(&thread, &disk, 8192), 0);
        let newer = Running::write(&thread, &disk, 0, 2);
        let beside = Running::write(&thread, &disk, 4096, 3);
        assert_eq!(beside.end(&thread), None, "other places can be written to");
        assert!(
            source.hand_over().may_still_change() && newer.0.get().is_none(),
            "it does not wait"
        );
        ignore_all(&socket, false);
        wait_for(&thread, &server, Event::Request(0, WRITE));
        assert_eq!((older.end(&thread), newer.end(&thread)), (None, None));
        assert_eq!(server.state().content[0], 2, "the old write came last");
        assert!(!source.hand_over().may_still_change());
    }
}

/// The machine is back without the server: it does not know the connection.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_write_resumes_after_the_server_has_closed_its_connection() {
    let server = Server::start_tcp(MIB, FLAGS);
    let (thread, source) = (new_thread(), open_impatiently(&server));
    let disk = Rc::new(source.attach(thread.io()));
    let write = {
        assert_eq!(read(&thread, &disk, 0), 0);
        let socket = server.socket(0);
        wait_until_received(&thread, &socket);
        ignore_all(&socket, true);
        Running::write(&thread, &disk, 0, 1)
    };
    assert_eq!(read(&thread, &disk, 8192), 0);
    assert!(write.0.get().is_none());
    server.hang_up();
    assert_eq!(write.end(&thread), None);
    assert_eq!(server.state().content[0], 1);
}

/// The waiting task has one timer, however often it is woken.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_awaited_connection_has_one_timer() {
    let server = Server::start(MIB, FLAGS);
    let (connected, _) = connect(&server.options()).unwrap();
    let shared = SharedExport::new(server.options(), false, SILENCE, connected);
    let (thread, handle) = (new_thread(), Arc::new(Handle { shared: Arc::new(shared) }));
    let _disk = NbdDisk::new(&handle, thread.io());
    server.change(|state| state.keeps_back = Some(1));
    server.hang_up();
    wait_for(&thread, &server, Event::KeptBack(1));
    for _ in 0..100 {
        handle.wake();
        thread.turn(Wait::Never).unwrap();
    }
    let timers = blockio::testing::timers(thread.io());
    assert!(timers < 10, "there are {timers}");
    server.change(|state| state.keeps_back = None);
}

/// A program may turn the loop within a loop of its own.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_deadline_comes_to_a_loop_that_never_sleeps() {
    let server = Server::start(MIB, FLAGS);
    let options = NbdOptions { deadline: Some(DEADLINE), ..server.options() };
    let (thread, source) = (new_thread(), open(options));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| state.holds = (READ, 1));
    let request = Running::start_one(&thread, &disk, READ);
    while request.0.get().is_none() {
        thread.turn(Wait::Never).unwrap();
    }
    assert_eq!(request.end(&thread), Some(libc::ETIMEDOUT));
}
