//! A connection is made, from the address to the end of the handshake. This waits, and is done by
//! threads that may.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SendFlags};
use rustls::ClientConnection;

use super::handshake::{Facts, Purpose, greet, negotiate, start_tls};
use super::target::{NbdAddress, NbdOptions};
use super::tls::client;
use super::transport::Transport;

/// How long a server may take until it serves.
const PATIENCE: Duration = Duration::from_secs(10);

/// A peer that is silent for this long, after as many questions, is gone.
const SILENCE: Duration = Duration::from_secs(10);
const QUESTIONS: u32 = 3;

/// A connection that serves requests.
pub(super) struct Connected {
    pub(super) transport: Transport,
    pub(super) facts: Facts,
}

/// Connects, and has the server begin to serve.
///
/// # Errors
///
/// Why there is no connection, and what to do about it.
pub(super) fn connect(options: &NbdOptions) -> Result<Connected, String> {
    let (socket, tls, facts) = shake_hands(options, Purpose::Serve)?;
    let transport = Transport::new(socket, tls);
    let transport = transport.map_err(|error| format!("cannot set up its socket: {error}"))?;
    Ok(Connected { transport, facts })
}

/// What the server says of the export now, asked on a connection of its own.
///
/// # Errors
///
/// As [`connect`].
pub(super) fn ask(options: &NbdOptions) -> Result<Facts, String> {
    shake_hands(options, Purpose::Ask).map(|(_, _, facts)| facts)
}

type Hand = (OwnedFd, Option<ClientConnection>, Facts);

fn shake_hands(options: &NbdOptions, purpose: Purpose) -> Result<Hand, String> {
    let until = Instant::now() + PATIENCE;
    let socket = reach(&options.address, until)?;
    let mut stream = Patient { socket, until };
    let greeted = greet(&mut stream)?;
    let export = &options.export;
    let (tls, facts) = match &options.tls {
        None => (None, negotiate(&mut stream, greeted, export, purpose)?),
        Some(tls) => {
            start_tls(&mut stream)?;
            let mut tls = client(options, tls)?;
            let agreed = tls.complete_io(&mut stream);
            agreed.map_err(|error| format!("cannot agree on TLS with the server: {error}"))?;
            let mut inside = rustls::Stream::new(&mut tls, &mut stream);
            let facts = negotiate(&mut inside, greeted, export, purpose)?;
            (Some(tls), facts)
        }
    };
    let set_up = sockopt::set_socket_timeout(&stream.socket, Timeout::Recv, None)
        .and_then(|()| sockopt::set_socket_timeout(&stream.socket, Timeout::Send, None));
    set_up.map_err(|error| format!("cannot set up its socket: {error}"))?;
    Ok((stream.socket, tls, facts))
}

fn reach(address: &NbdAddress, until: Instant) -> Result<OwnedFd, String> {
    match address {
        NbdAddress::Unix(path) => match UnixStream::connect(path) {
            Ok(socket) => Ok(socket.into()),
            Err(error) => {
                let path = path.display();
                Err(format!("cannot connect to {path}: {error}; is the server running?"))
            }
        },
        NbdAddress::Tcp { host, port } => {
            let found = (host.as_str(), *port).to_socket_addrs();
            let addresses = found.map_err(|error| format!("cannot find {host}: {error}"))?;
            let mut problem = format!("{host} has no address");
            for address in addresses {
                let left = until.saturating_duration_since(Instant::now());
                let left = left.max(Duration::from_millis(1));
                match TcpStream::connect_timeout(&address, left) {
                    Ok(socket) => return watched(socket),
                    Err(error) => {
                        problem =
                            format!("cannot connect to {address}: {error}; is the server running?");
                    }
                }
            }
            Err(problem)
        }
    }
}

/// Small requests leave at once, and a machine that has gone is noticed.
fn watched(socket: TcpStream) -> Result<OwnedFd, String> {
    let set_up = || {
        sockopt::set_tcp_nodelay(&socket, true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, SILENCE)?;
        sockopt::set_tcp_keepintvl(&socket, SILENCE / QUESTIONS)?;
        sockopt::set_tcp_keepcnt(&socket, QUESTIONS)?;
        let milliseconds = u32::try_from(2 * SILENCE.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&socket, milliseconds)
    };
    set_up().map_err(|error: rustix::io::Errno| format!("cannot set up its socket: {error}"))?;
    Ok(socket.into())
}

/// A socket whose other side has to be done at some time, however it spreads its bytes.
struct Patient {
    socket: OwnedFd,
    until: Instant,
}

impl Patient {
    fn wait_at_most(&self, which: Timeout) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        sockopt::set_socket_timeout(&self.socket, which, Some(left))?;
        Ok(())
    }
}

fn patiently<T>(result: rustix::io::Result<T>) -> io::Result<T> {
    result.map_err(|errno| match errno {
        rustix::io::Errno::AGAIN => io::ErrorKind::TimedOut.into(),
        errno => errno.into(),
    })
}

impl Read for Patient {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.wait_at_most(Timeout::Recv)?;
        patiently(rustix::net::recv(&self.socket, bytes, RecvFlags::empty()).map(|(_, len)| len))
    }
}

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait_at_most(Timeout::Send)?;
        patiently(rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
