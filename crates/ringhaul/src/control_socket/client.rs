//! A client, as methods see it: the daemon that it asks, and the events that it wants to know.

use std::path::Path;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};

use anyhow::{Context, Result};

use super::connection::Connection;
use super::message::{Code, Problem, event_line};
use super::places::Place;
use crate::command::{Command, CommandError, Reply};
use crate::daemon::Daemon;
use crate::subscribers::{ExportEvent, Kind, Subscription};
use crate::takeover;

/// A client.
pub(super) struct Client {
    daemon: Weak<Daemon>,
    pub(super) place: Place,
    pub(super) connection: Arc<Connection>,
    /// Events come for as long as it is there.
    subscription: Option<Subscription>,
    /// Events that it gets when it has the answer to what it has asked.
    beginning: Option<Events>,
}

/// Events as they happen, those of some kinds or all.
struct Events {
    queue: Receiver<Arc<ExportEvent>>,
    kinds: Option<Vec<Kind>>,
}

impl Client {
    pub(super) fn new(daemon: Weak<Daemon>, place: Place, connection: Arc<Connection>) -> Self {
        Self { daemon, place, connection, subscription: None, beginning: None }
    }

    /// Has `binary` run as the user of the daemon, to take over from it.
    pub(super) fn upgrade(&self, binary: &Path) -> Result<u32, Problem> {
        if !self.place.is_owner {
            let text = "only root and the user of this daemon may say what takes over from it";
            return Err(Problem::new(Code::Refused, text));
        }
        let process = takeover::start::upgrade(&*self.daemon()?, binary);
        process.map_err(|error| Problem::from(&CommandError::from(error)))
    }

    /// Has the daemon do something, and waits for that.
    pub(super) fn handle(&self, command: Command) -> Result<Reply, Problem> {
        self.daemon()?.handle(command).map_err(|error| Problem::from(&error))
    }

    /// Sends it events from now on: those of these kinds, or all.
    pub(super) fn subscribe(&mut self, kinds: Option<Vec<Kind>>) -> Result<(), Problem> {
        let daemon = self.daemon()?;
        self.place.subscribe()?;
        let (subscription, queue) = daemon.subscribers().subscribe();
        (self.subscription, self.beginning) = (Some(subscription), Some(Events { queue, kinds }));
        Ok(())
    }

    /// Begins to send events, if it has subscribed. A thread does it, so that a client which does
    /// not read them slows nobody.
    pub(super) fn begin_events(&mut self) -> Result<()> {
        let Some(Events { queue, kinds }) = self.beginning.take() else { return Ok(()) };
        let connection = Arc::clone(&self.connection);
        let send = move || {
            let is_wanted = |event: &Arc<ExportEvent>| {
                kinds.as_ref().is_none_or(|kinds| kinds.contains(&event.what.kind()))
            };
            for event in queue.iter().filter(is_wanted) {
                if let Err(error) = connection.send(&event_line(&event)) {
                    tracing::debug!("a subscriber is dropped: {error}");
                    break;
                }
            }
            // It has left, or was too slow.
            connection.close();
        };
        let thread = std::thread::Builder::new().name("ringhaul-events".into()).spawn(send);
        thread.context("cannot start the thread of a subscriber").map(drop)
    }

    fn daemon(&self) -> Result<Arc<Daemon>, Problem> {
        let ending = || Problem::from(&CommandError::Ending);
        self.daemon.upgrade().ok_or_else(ending)
    }
}
