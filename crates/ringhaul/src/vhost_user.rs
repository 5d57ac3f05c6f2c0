//! vhost-user: what one front-end tells us, message by message.
//!
//! The specification is "Vhost-user Protocol" of the QEMU project. The `vhost` crate reads and
//! checks messages; [`Connection`] keeps what they say and starts and stops queues accordingly.
//! All of it runs on the export's control thread, which may wait: for a queue to drain, say.

mod connection;
mod ring;

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockio::Remote;
use vhost::vhost_user::{BackendReqHandler, Error as VhostError};
use virtqueue::MappingRules;

use crate::blk::BlkDevice;
use connection::Connection;

/// One front-end that has attached.
pub(crate) struct Session {
    handler: BackendReqHandler<Mutex<Connection>>,
    closer: Closer,
    name: String,
    device: BlkDevice,
}

/// Ends a session from another thread.
#[derive(Clone)]
pub(crate) struct Closer {
    socket: Arc<UnixStream>,
    connection: Arc<Mutex<Connection>>,
}

impl Closer {
    /// Lets go of the front-end. Returns when the requests that were taken are answered.
    ///
    /// The front-end must see the hang-up only after that, because then it reads from the rings
    /// where to go on. So no more messages are taken, queues are stopped, and then the socket is
    /// closed for good, which also ends the wait for a front-end that does not read our replies.
    pub(crate) fn close(&self) {
        // A shutdown fails only when the front-end has gone by itself.
        let _ = self.socket.shutdown(Shutdown::Read);
        self.lock().close();
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    pub(crate) fn new(
        socket: UnixStream,
        name: &str,
        device: &BlkDevice,
        threads: &[Remote],
        rules: MappingRules,
    ) -> io::Result<Self> {
        let for_closer = Arc::new(socket.try_clone()?);
        let connection = Connection::new(name.to_owned(), device.clone(), threads.to_vec(), rules);
        let connection = Arc::new(Mutex::new(connection));
        Ok(Self {
            handler: BackendReqHandler::from_stream(socket, Arc::clone(&connection)),
            closer: Closer { socket: for_closer, connection },
            name: name.to_owned(),
            device: device.clone(),
        })
    }

    pub(crate) fn closer(&self) -> Closer {
        self.closer.clone()
    }

    /// Serves the front-end until it goes away or sends something that makes no sense. When this
    /// returns, its requests are finished; its memory is unmapped with the last closer.
    pub(crate) fn run(mut self) {
        // A front-end that comes and goes without an end is told of as seldom as errors are.
        let export = self.name.as_str();
        let shown = self.device.sessions().permit();
        if let Some(left_out) = shown {
            tracing::info!(export, left_out, "a front-end has attached");
        }
        let reason = loop {
            if let Err(error) = self.handler.handle_request() {
                break error;
            }
        };
        let advice = self.advice();
        self.closer.lock().close();
        self.device.reset();
        match reason {
            VhostError::Disconnected if shown.is_some() => {
                tracing::info!(export, "the front-end has gone");
            }
            VhostError::SocketBroken(error) if shown.is_some() => {
                tracing::info!(export, "the front-end has gone: {error}");
            }
            VhostError::Disconnected | VhostError::SocketBroken(_) => {}
            error => {
                if let Some(left_out) = self.device.log().permit() {
                    tracing::warn!(export, left_out, "the front-end is dropped: {error}{advice}");
                }
            }
        }
        if let Some(left_out) = self.device.log().left_out() {
            tracing::warn!(export, left_out, "errors that the guest or the front-end caused go on");
        }
    }

    /// What to do when descriptors are used up: those of a message are lost then, and it looks as
    /// if the front-end had not sent them.
    fn advice(&self) -> &'static str {
        match self.closer.socket.try_clone() {
            Ok(_) => "",
            Err(_) => "; no descriptor is left: raise the limit on open files (ulimit -n)",
        }
    }
}
