//! The place of the connections that an IoThread uses for an export.

use std::rc::Rc;
use std::sync::Arc;

use blockio::{Io, Remote};

use super::flow::Flow;
use super::link;
use super::pipe::{Pipe, key_of};
use super::shared::{Home, Shared};

/// Ends the connections when the last user of the disk is gone.
pub(super) struct Handle {
    pub(super) shared: Arc<Shared>,
}

impl Handle {
    /// Wakes all connections, which then check the state of the disk.
    pub(super) fn wake(&self) {
        let key = key_of(&self.shared);
        self.shared.on_pipes(move |io| {
            if let Some(pipe) = io.shared::<Pipe>(key) {
                pipe.wake_links();
            }
        });
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(unused) = self.shared.take_spare() {
            Flow::new(0, unused).send_disconnect();
        }
        self.wake();
    }
}

/// The place of the connections that an IoThread uses.
pub(super) enum ConnectionChoice {
    Local(Rc<Pipe>),
    /// On the IoThread that has the pipe with this number.
    Remote(u64, Remote),
}

impl ConnectionChoice {
    /// Finds existing connections, or makes new ones, as far as the server allows that.
    pub(super) fn find(io: &Rc<Io>, shared: &Arc<Shared>) -> Self {
        if let Some(pipe) = io.shared::<Pipe>(key_of(shared)) {
            return Self::Local(pipe);
        }
        let (number, links) = if shared.flushes_are_common() {
            (shared.add_pipe(&io.remote()), shared.options.connections.max(1) as usize)
        } else {
            match shared.home(&io.remote()) {
                Home::Local(number) => (number, 1),
                Home::Remote(number, remote) => return Self::Remote(number, remote),
            }
        };
        Self::Local(link::start(io, shared, number, links))
    }
}
