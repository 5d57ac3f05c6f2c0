//! A server for tests: it keeps its disk in memory, answers when a test lets it, and changes its
//! offers.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;

use super::super::options::{NbdAddress, NbdOptions};
use super::super::wire::Framing;
use super::messages::{DISCONNECT, Request, read_request, reply, status, take};
pub(super) use super::messages::{FLUSH, READ, STATUS, TRIM, WRITE, ZEROES};

/// An event at the server, with the number of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Request(usize, u16),
    /// The client has closed its sending direction.
    HalfClosed(usize),
    /// The connection and all its requests have ended.
    Ended(usize),
    /// The reply about the export is settled, and kept back.
    KeptBack(usize),
}

/// The content and the behaviour of the server.
pub(super) struct State {
    pub(super) content: Vec<u8>,
    pub(super) flags: u16,
    /// True to offer extended headers, which come before structured replies. Otherwise replies are
    /// simple.
    pub(super) is_extended: bool,
    pub(super) is_structured: bool,
    /// True to report holes with them.
    pub(super) has_context: bool,
    /// A command, and the number of its requests to put aside.
    pub(super) holds: (u16, usize),
    /// True to put flushes aside that come right after a write.
    pub(super) holds_first_flushes: bool,
    /// True to read nothing more.
    pub(super) stalls: bool,
    /// The connection that does not get the reply about the export yet.
    pub(super) keeps_back: Option<usize>,
    /// True to keep connections that the client has half closed, with the requests put aside.
    pub(super) lingers: bool,
    /// The number of flushes to fail.
    pub(super) failing_flushes: usize,
    /// A command to fail, and the error.
    pub(super) fails: Option<(u16, u32)>,
    /// True to end the connection of the next read within the data of its answer.
    pub(super) cuts_read: bool,
    /// The bytes by which the export grows with each connection.
    pub(super) growth: usize,
    /// The smallest, the preferred and the largest block, if they are announced.
    pub(super) blocks: Option<[u32; 3]>,
    /// True to accept no further clients.
    pub(super) is_full: bool,
    /// True if zeroes take as long as data, so that fast ones are refused.
    pub(super) is_slow_with_zeroes: bool,
    pub(super) events: Vec<Event>,
    /// The commands of requests, with their flags.
    pub(super) seen: Vec<(u16, u16)>,
    /// The offset and the length of each request.
    pub(super) ranges: Vec<(u64, u64)>,
    held: Vec<(usize, Request)>,
    sockets: Vec<(usize, UnixStream)>,
    /// The size that each connection got, which stays.
    sizes: BTreeMap<usize, u64>,
    pub(super) connections: usize,
    /// The number of clients that have announced the end of their requests.
    pub(super) disconnects: usize,
    /// The last answer, with its connection.
    last_answer: (usize, Vec<u8>),
    is_over: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// Locks the state, even after a test has failed with it locked: the server ends in any case.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `condition` holds. Returns the state.
    fn wait_while<'lock>(
        &self,
        state: MutexGuard<'lock, State>,
        condition: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'lock, State> {
        self.changed.wait_while(state, condition).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends with all its connections when it is dropped.
pub(super) struct Server {
    shared: Arc<Shared>,
    address: NbdAddress,
    _folder: Option<TempDir>,
}

impl Server {
    pub(super) fn start(bytes: usize, flags: u16) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nbd");
        let listener = UnixListener::bind(&path).unwrap().into();
        Self::listen(bytes, flags, listener, NbdAddress::Unix(path), Some(folder))
    }

    /// Starts a server on TCP.
    pub(super) fn start_tcp(bytes: usize, flags: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let address = NbdAddress::Tcp { host: address.ip().to_string(), port: address.port() };
        Self::listen(bytes, flags, listener.into(), address, None)
    }

    fn listen(
        bytes: usize,
        flags: u16,
        listener: OwnedFd,
        address: NbdAddress,
        folder: Option<TempDir>,
    ) -> Self {
        let state = State {
            content: vec![0; bytes],
            flags,
            is_extended: false,
            is_structured: false,
            has_context: true,
            holds: (0, 0),
            holds_first_flushes: false,
            stalls: false,
            keeps_back: None,
            lingers: false,
            failing_flushes: 0,
            fails: None,
            cuts_read: false,
            growth: 0,
            blocks: None,
            is_full: false,
            is_slow_with_zeroes: false,
            events: Vec::new(),
            seen: Vec::new(),
            ranges: Vec::new(),
            held: Vec::new(),
            sockets: Vec::new(),
            sizes: BTreeMap::new(),
            connections: 0,
            disconnects: 0,
            last_answer: (0, Vec::new()),
            is_over: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || accept(&accepting, &listener));
        Self { shared, address, _folder: folder }
    }

    pub(super) fn options(&self) -> NbdOptions {
        NbdOptions {
            address: self.address.clone(),
            export: String::new(),
            connections: 1,
            deadline: None,
            distrust: false,
            tls: None,
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.shared.changed.notify_all();
    }

    /// Carries out the requests that were put aside, and answers them.
    pub(super) fn answer_held(&self) {
        self.change(|state| {
            state.holds.1 = 0;
            for (connection, request) in std::mem::take(&mut state.held) {
                state.answer(connection, &request);
            }
        });
    }

    /// Like `answer_held`, for one connection.
    pub(super) fn answer_held_of(&self, connection: usize) {
        self.change(|state| state.answer_held_of(connection));
    }

    /// Sends the last answer once more.
    pub(super) fn answer_again(&self) {
        self.change(|state| {
            let (connection, reply) = state.last_answer.clone();
            state.send(connection, &reply);
        });
    }

    /// Ends all connections. Requests that were put aside are never done.
    pub(super) fn hang_up(&self) {
        self.change(|state| {
            state.held.clear();
            for (_, socket) in state.sockets.drain(..) {
                let _ = socket.shutdown(Shutdown::Both);
            }
        });
    }

    /// Carries out the requests that were put aside, and answers them by this connection.
    pub(super) fn answer_held_by(&self, connection: usize) {
        self.change(|state| {
            for (_, request) in std::mem::take(&mut state.held) {
                state.answer(connection, &request);
            }
        });
    }

    /// The cookies of the requests that were put aside. They are never answered by themselves.
    pub(super) fn take_held(&self) -> Vec<[u8; 8]> {
        let mut state = self.state();
        std::mem::take(&mut state.held).into_iter().map(|(_, request)| request.cookie).collect()
    }

    /// Sends bytes by a connection.
    pub(super) fn send(&self, connection: usize, bytes: &[u8]) {
        self.state().send(connection, bytes);
    }

    /// The server's end of a connection.
    pub(super) fn socket(&self, connection: usize) -> OwnedFd {
        let state = self.state();
        let socket = state.sockets.iter().find(|(number, _)| *number == connection);
        socket.unwrap().1.try_clone().unwrap().into()
    }

    /// Sends bytes that are no reply, on all connections.
    pub(super) fn send_garbage(&self) {
        for (_, socket) in &mut self.state().sockets {
            socket.write_all(&[0x55; 64]).unwrap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.change(|state| {
            (state.is_over, state.lingers, state.stalls) = (true, false, false);
            state.keeps_back = None;
        });
        self.hang_up();
        // The thread that accepts checks the state.
        match &self.address {
            NbdAddress::Unix(path) => drop(UnixStream::connect(path)),
            NbdAddress::Tcp { host, port } => drop(TcpStream::connect((host.as_str(), *port))),
        }
    }
}

impl State {
    fn answer_held_of(&mut self, connection: usize) {
        let held = std::mem::take(&mut self.held).into_iter();
        let (mine, others) = held.partition::<Vec<_>, _>(|(of, _)| *of == connection);
        self.held = others;
        mine.iter().for_each(|(of, request)| self.answer(*of, request));
    }

    fn answer(&mut self, connection: usize, request: &Request) {
        let start = usize::try_from(request.offset).unwrap();
        let range = start..start + usize::try_from(request.len).unwrap();
        let mut data = Vec::new();
        let mut error = 0u32;
        let middle = self.content.len() as u64 / 2;
        let is_inside = self.sizes.get(&connection).is_some_and(|size| range.end as u64 <= *size);
        let place = self.content.get_mut(range).filter(|_| is_inside);
        match (request.command, place) {
            (command, _) if self.fails.is_some_and(|(failing, _)| failing == command) => {
                error = self.fails.map_or(0, |(_, error)| error);
            }
            (FLUSH, _) if self.failing_flushes > 0 => {
                self.failing_flushes -= 1;
                error = 5;
            }
            (FLUSH | TRIM, _) => {}
            (ZEROES, _) if self.is_slow_with_zeroes && request.flags & 1 << 4 != 0 => error = 95,
            (ZEROES, Some(place)) => place.fill(0),
            (READ, Some(place)) => data.extend_from_slice(place),
            // The second half is a hole.
            (STATUS, _) if request.offset < middle => {
                data = status(request.len.min(middle - request.offset), 0);
            }
            (STATUS, _) => data = status(request.len, 3),
            (WRITE, Some(place)) => place.copy_from_slice(&request.data),
            _ => error = 22,
        }
        let reply = reply(request, error, &data);
        if request.command == READ && std::mem::take(&mut self.cuts_read) {
            self.send(connection, &reply[..reply.len() / 2]);
            let socket = self.sockets.iter().find(|(number, _)| *number == connection);
            let _ = socket.map(|(_, socket)| socket.shutdown(Shutdown::Both));
            return;
        }
        self.send(connection, &reply);
        self.last_answer = (connection, reply);
    }

    fn send(&mut self, connection: usize, reply: &[u8]) {
        let mut sockets = self.sockets.iter_mut();
        if let Some((_, socket)) = sockets.find(|(number, _)| *number == connection) {
            // The client may have gone.
            let _ = socket.write_all(reply);
        }
    }
}

fn accept(shared: &Arc<Shared>, listener: &OwnedFd) {
    loop {
        // A TCP stream is read and written in the same way.
        let stream = UnixStream::from(rustix::net::accept(listener).unwrap());
        let mut state = shared.state();
        if state.is_over {
            return;
        }
        if state.is_full {
            continue;
        }
        let number = state.connections;
        state.connections += 1;
        let bytes = state.content.len() + state.growth;
        state.content.resize(bytes, 0);
        let shared = Arc::clone(shared);
        // An error is the end of the connection.
        std::thread::spawn(move || serve(&shared, number, stream).ok());
    }
}

fn serve(shared: &Shared, number: usize, mut stream: UnixStream) -> std::io::Result<()> {
    let framing = shake_hands(shared, number, &mut stream)?;
    loop {
        let state = shared.state();
        drop(shared.wait_while(state, |state| state.stalls));
        let Some(request) = read_request(&mut stream, framing)? else { break };
        let mut state = shared.state();
        if request.command == DISCONNECT {
            state.disconnects += 1;
            break;
        }
        state.events.push(Event::Request(number, request.command));
        let before = state.seen.last().map(|seen| seen.0);
        state.seen.push((request.command, request.flags));
        state.ranges.push((request.offset, request.len));
        let is_first_flush = (before, request.command) == (Some(WRITE), FLUSH);
        if state.holds_first_flushes && is_first_flush {
            state.held.push((number, request));
        } else if state.holds.0 == request.command && state.holds.1 > 0 {
            state.holds.1 -= 1;
            state.held.push((number, request));
        } else {
            state.answer(number, &request);
        }
        shared.changed.notify_all();
    }
    let mut state = shared.state();
    state.events.push(Event::HalfClosed(number));
    shared.changed.notify_all();
    let mut state = shared.wait_while(state, |state| state.lingers);
    state.answer_held_of(number);
    state.events.push(Event::Ended(number));
    state.sockets.retain(|(of, _)| *of != number);
    shared.changed.notify_all();
    stream.shutdown(Shutdown::Both)
}

/// Shakes hands. Returns the form of messages.
fn shake_hands(
    shared: &Shared,
    number: usize,
    stream: &mut UnixStream,
) -> std::io::Result<Framing> {
    stream.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
    take::<4>(stream)?;
    let mut framing = Framing::Simple;
    loop {
        take::<8>(stream)?;
        let option = u32::from_be_bytes(take(stream)?);
        let len = u32::from_be_bytes(take(stream)?);
        stream.read_exact(&mut vec![0; len as usize])?;
        let mut reply = |kind: u32, data: &[u8]| {
            let len = u32::try_from(data.len()).unwrap().to_be_bytes();
            let head =
                [&[0x00, 0x03, 0xe8, 0x89, 0x04, 0x55, 0x65, 0xa9][..], &option.to_be_bytes()];
            stream.write_all(&[&head.concat()[..], &kind.to_be_bytes(), &len, data].concat())
        };
        let mut state = shared.state();
        match option {
            11 if state.is_extended => {
                framing = Framing::Extended;
                reply(1, &[])?;
            }
            8 if state.is_structured => {
                framing = Framing::Structured;
                reply(1, &[])?;
            }
            10 if framing != Framing::Simple => {
                if state.has_context {
                    reply(4, b"\0\0\0\x09base:allocation")?;
                }
                reply(1, &[])?;
            }
            6 | 7 => {
                let size = state.content.len() as u64;
                let flags = state.flags.to_be_bytes();
                if state.keeps_back == Some(number) {
                    state.events.push(Event::KeptBack(number));
                    let is_kept = |state: &mut State| state.keeps_back == Some(number);
                    state = shared.wait_while(state, is_kept);
                }
                reply(3, &[&[0, 0][..], &size.to_be_bytes(), &flags].concat())?;
                if let Some(blocks) = state.blocks {
                    let sizes = blocks.map(u32::to_be_bytes).concat();
                    reply(3, &[&[0, 3][..], &sizes].concat())?;
                }
                reply(1, &[])?;
                if option == 6 {
                    continue;
                }
                state.sizes.insert(number, size);
                state.sockets.push((number, stream.try_clone()?));
                return Ok(framing);
            }
            _ => reply(0x8000_0001, &[])?,
        }
    }
}
