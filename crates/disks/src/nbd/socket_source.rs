//! Sockets that the loop watches.

use std::cell::Cell;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Instant;

use blockio::Io;
use blockio::driver::Interest;
use blockio::thread::{Armed, Source, SourceId};

use super::channel::{Broken, Channel};

/// The loop's report on a socket.
#[derive(Default)]
struct Readiness(Cell<bool>);

impl Source for Readiness {
    fn notify(&self) {}

    fn arm(&self, _: Instant) -> Armed {
        Armed::Yes
    }

    fn disarm(&self) {}

    fn has_work(&self) -> bool {
        false
    }

    fn on_event(&self) {
        self.0.set(true);
    }
}

/// A socket that the loop watches, for as long as this exists.
pub(super) struct Watched<'a> {
    io: &'a Io,
    readiness: Rc<Readiness>,
    source: SourceId,
}

impl<'a> Watched<'a> {
    pub(super) fn new(io: &'a Io, channel: &Channel, interest: Interest) -> Result<Self, Broken> {
        let cannot = |error: &dyn std::fmt::Display| {
            Broken::Unusable(format!("cannot watch its socket: {error}"))
        };
        let socket = channel.socket().as_fd().try_clone_to_owned().map_err(|e| cannot(&e))?;
        let readiness = Rc::<Readiness>::default();
        let source: Rc<dyn Source> = Rc::<Readiness>::clone(&readiness);
        let added = io.add_socket(source, socket, interest);
        let source = added.map_err(|error| cannot(&error))?;
        Ok(Self { io, readiness, source })
    }

    pub(super) fn take(&self) -> bool {
        self.readiness.0.take()
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.io.remove_source(self.source);
    }
}
