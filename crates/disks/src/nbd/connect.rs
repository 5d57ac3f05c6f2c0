//! The set-up of a connection, from the address to the end of the handshake. It waits, so it runs
//! on threads that may.

use std::fmt::Display;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::handshake::{Facts, Purpose, greet, negotiate, start_tls};
use super::options::{NbdAddress, NbdOptions};
use super::resolver::RESOLVER;
use super::tls::{Tls, agree};
use super::transport::Transport;

/// The time that a server may take until it serves.
const PATIENCE: Duration = Duration::from_secs(10);

/// The kernel probes a machine that has been silent for this long.
const QUIET: Duration = Duration::from_secs(10);

/// The number of probes until the machine counts as gone.
const PROBE_COUNT: u32 = 3;

/// The time for which the kernel keeps a connection to a silent machine, in milliseconds: far
/// longer than any wait. If the kernel ended it, nothing would be known about the server's further
/// changes. A machine that is back reports that it does not know the connection. So the link
/// judges.
const KEPT_MS: u32 = i32::MAX as u32;

/// A connection that serves requests.
pub(super) struct Connected {
    pub(super) transport: Transport,
    pub(super) facts: Facts,
}

/// The number of questions to servers about their exports.
static ASKED: AtomicU64 = AtomicU64::new(0);

/// Numbers the answers of servers in the order of the questions. An answer may be on its way for
/// long, and its size is then older than the size in other answers.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QuestionNumber(u64);

/// Connects, and makes the server begin to serve.
///
/// # Errors
///
/// The reason why there is no connection, and advice.
pub(super) fn connect(options: &NbdOptions) -> Result<(Connected, QuestionNumber), String> {
    let (socket, tls, facts, asked) = shake_hands(options, Purpose::Serve)?;
    let transport = Transport::new(socket, tls);
    let transport = transport.map_err(|error| format!("cannot set up its socket: {error}"))?;
    Ok((Connected { transport, facts }, asked))
}

/// Asks the server about the export, on a connection of its own.
///
/// # Errors
///
/// As for [`connect`].
pub(super) fn query_export(options: &NbdOptions) -> Result<(Facts, QuestionNumber), String> {
    shake_hands(options, Purpose::Ask).map(|(_, _, facts, asked)| (facts, asked))
}

type Handshake = (OwnedFd, Option<Tls>, Facts, QuestionNumber);

fn shake_hands(options: &NbdOptions, purpose: Purpose) -> Result<Handshake, String> {
    let until = Instant::now() + PATIENCE;
    let socket = reach(&options.address, until)?;
    let mut stream = DeadlineSocket { socket, until };
    let greeted = greet(&mut stream)?;
    let asked = QuestionNumber(1 + ASKED.fetch_add(1, Ordering::Relaxed));
    let export = &options.export;
    let (tls, facts) = match &options.tls {
        None => (None, negotiate(&mut stream, greeted, export, purpose)?),
        Some(tls) => {
            start_tls(&mut stream)?;
            let (tls, facts) = agree(options, tls, &mut stream, |mut inside| {
                negotiate(&mut inside, greeted, export, purpose)
            })?;
            (Some(tls), facts)
        }
    };
    // From now on the socket does not wait, so its timeouts have no effect.
    Ok((stream.socket, tls, facts, asked))
}

fn reach(address: &NbdAddress, until: Instant) -> Result<OwnedFd, String> {
    match address {
        NbdAddress::Unix(path) => {
            reach_unix(path, until).map_err(|error| not_reached(&path.display(), &error))
        }
        NbdAddress::Tcp { host, port } => {
            let addresses = RESOLVER.find(host, *port, until)?;
            reach_one(&addresses, until)
                .unwrap_or_else(|| Err(format!("the name {host} has no address")))
        }
    }
}

/// Explains why there is no connection to an address, with advice.
fn not_reached(address: &dyn Display, error: &io::Error) -> String {
    let advice = match error.kind() {
        ErrorKind::WouldBlock => {
            return format!(
                "cannot connect to {address}: the server accepts no connections, and its queue is \
                 full; restart it if it hangs"
            );
        }
        ErrorKind::PermissionDenied => {
            "check the permissions of the socket and of its parent folders, and the firewall"
        }
        ErrorKind::InvalidFilename => {
            "a socket path has at most 107 bytes; use a shorter one, such as a link"
        }
        ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => {
            "check the network, and that the server's machine is up"
        }
        _ => "is the server running?",
    };
    format!("cannot connect to {address}: {error}; {advice}")
}

/// Connects to the first address that accepts. Each has its share of the time that is left, because
/// the first addresses may never answer.
fn reach_one(addresses: &[SocketAddr], until: Instant) -> Option<Result<OwnedFd, String>> {
    let mut problem = None;
    for (index, address) in addresses.iter().enumerate() {
        let others = u32::try_from(addresses.len() - index).unwrap_or(u32::MAX);
        let left = until.saturating_duration_since(Instant::now()) / others;
        match TcpStream::connect_timeout(address, left.max(Duration::from_millis(1))) {
            Ok(socket) => return Some(watched(socket)),
            Err(error) => problem = Some(not_reached(address, &error)),
        }
    }
    problem.map(Err)
}

/// Connects to a socket. A server that accepts no connections has the same time as for everything
/// else.
fn reach_unix(path: &Path, until: Instant) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    let patient = DeadlineSocket { socket, until };
    patient.set_timeout(Timeout::Send)?;
    rustix::net::connect(&patient.socket, &address)?;
    Ok(patient.socket)
}

/// Sets a socket up: small requests leave at once, and a machine that has gone can be noticed.
fn watched(socket: TcpStream) -> Result<OwnedFd, String> {
    let set_up = || {
        sockopt::set_tcp_nodelay(&socket, true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, QUIET)?;
        sockopt::set_tcp_keepintvl(&socket, QUIET / PROBE_COUNT)?;
        sockopt::set_tcp_keepcnt(&socket, PROBE_COUNT)?;
        sockopt::set_tcp_user_timeout(&socket, KEPT_MS)
    };
    set_up().map_err(|error: rustix::io::Errno| format!("cannot set up its socket: {error}"))?;
    Ok(socket.into())
}

/// A socket with a deadline for its peer, however that spreads its bytes.
struct DeadlineSocket {
    socket: OwnedFd,
    until: Instant,
}

impl DeadlineSocket {
    fn set_timeout(&self, which: Timeout) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        sockopt::set_socket_timeout(&self.socket, which, Some(left))?;
        Ok(())
    }
}

fn map_timeout<T>(result: rustix::io::Result<T>) -> io::Result<T> {
    result.map_err(|errno| match errno {
        rustix::io::Errno::AGAIN => ErrorKind::TimedOut.into(),
        errno => errno.into(),
    })
}

impl Read for DeadlineSocket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.set_timeout(Timeout::Recv)?;
        map_timeout(rustix::net::recv(&self.socket, bytes, RecvFlags::empty()).map(|(_, len)| len))
    }
}

impl Write for DeadlineSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.set_timeout(Timeout::Send)?;
        map_timeout(rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Without a deadline this would wait forever: the kernel has no room for further clients, and
    /// the server accepts none.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn connecting_to_a_server_that_accepts_nothing_ends_at_its_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let until = || Instant::now() + Duration::from_millis(20);
        let mut taken = Vec::new();
        let error = loop {
            match reach(&NbdAddress::Unix(path.clone()), until()) {
                Ok(socket) => taken.push(socket),
                Err(error) => break error,
            }
            assert!(taken.len() < 1000, "the kernel has room for all of them");
        };
        assert!(error.contains("accepts no connections"), "{error}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_advice_fits_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let left = folder.path().join("left");
        drop(UnixListener::bind(&left).unwrap());
        let until = Instant::now() + Duration::from_secs(2);
        for (path, expected) in [
            (left, "is the server running?"),
            (folder.path().join("absent"), "is the server running?"),
            (folder.path().join("a".repeat(107)), "has at most 107 bytes"),
        ] {
            let error = reach(&NbdAddress::Unix(path), until).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        // Root may do everything, and no test waits for a machine that is away.
        for (errno, expected) in [
            (libc::EACCES, "check the permissions of the socket"),
            (libc::EPERM, "check the permissions of the socket"),
            (libc::ETIMEDOUT, "check the network"),
            (libc::EHOSTUNREACH, "check the network"),
            (libc::ENETUNREACH, "check the network"),
        ] {
            let error = not_reached(&"a", &io::Error::from_raw_os_error(errno));
            assert!(error.contains(expected), "{error}");
        }
    }

    /// A machine that has gone must be noticed, by this client and not by the kernel.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_kernel_probes_a_silent_machine_and_keeps_its_connection() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let until = Instant::now() + Duration::from_secs(2);
        let socket = reach_one(&[listener.local_addr().unwrap()], until).unwrap().unwrap();
        assert!(sockopt::tcp_nodelay(&socket).unwrap(), "small requests wait");
        assert!(sockopt::socket_keepalive(&socket).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&socket).unwrap(), QUIET);
        // The kernel counts whole seconds.
        let interval = sockopt::tcp_keepintvl(&socket).unwrap();
        assert_eq!(interval.as_secs(), (QUIET / PROBE_COUNT).as_secs() + 1);
        assert_eq!(sockopt::tcp_keepcnt(&socket).unwrap(), PROBE_COUNT);
        assert_eq!(sockopt::tcp_user_timeout(&socket).unwrap(), KEPT_MS);
    }

    /// A listener with a full queue does not answer at all.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_silent_address_leaves_time_for_the_next_address() {
        let [silent, good] = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        rustix::net::listen(&silent, 0).unwrap();
        let addresses = [&silent, &good].map(|listener| listener.local_addr().unwrap());
        let limit = Duration::from_millis(50);
        let mut taken = Vec::new();
        while let Ok(socket) = TcpStream::connect_timeout(&addresses[0], limit) {
            taken.push(socket);
        }
        let reached = reach_one(&addresses, Instant::now() + Duration::from_secs(2)).unwrap();
        let peer = TcpStream::from(reached.unwrap()).peer_addr().unwrap();
        assert_eq!(peer, addresses[1]);
        assert!(reach_one(&[], Instant::now()).is_none());
    }
}
