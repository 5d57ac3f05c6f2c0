//! A client, as methods see it: its daemon, and its subscription to events.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::{Context, Result};
use blockio::executor::start_thread;

use super::access::{Access, Role, by_place};
use super::client_quota::ClientSlot;
use super::connection::{Connection, LIMITS};
use super::descriptors::Descriptor;
use super::message::{Code, RpcError, event_line};
use crate::control::subscribers::{
    EventKind, EventReceiver, ExportEvent, QUEUED_MAX, Subscription,
};
use crate::daemon::Daemon;
use crate::process::peer::Peer;
use crate::spec::ExportSettings;
use crate::spec::command::{Command, CommandError, Reply};
use crate::spec::process::{SuccessorProgress, SuccessorStart};
use crate::takeover;

/// A client.
pub(super) struct Client {
    daemon: Weak<Daemon>,
    access: Arc<Access>,
    pub(super) peer: Peer,
    pub(super) slot: ClientSlot,
    pub(super) connection: Arc<Connection>,
    /// The files that came with the current request.
    pub(super) descriptors: Vec<(Descriptor, File)>,
    /// Events come until this is dropped.
    subscription: Option<Subscription>,
    /// The events of a subscription that begins after its request is answered.
    beginning: Option<Events>,
    /// Descriptors that follow the answer.
    streams: Vec<OwnedFd>,
}

/// A queue of events, and the kinds that are sent. `None`: all.
struct Events {
    queue: EventReceiver,
    kinds: Option<Vec<EventKind>>,
}

impl Client {
    pub(super) fn new(
        daemon: Weak<Daemon>,
        access: Arc<Access>,
        peer: Peer,
        slot: ClientSlot,
        connection: Arc<Connection>,
    ) -> Self {
        let (subscription, beginning, streams) = (None, None, Vec::new());
        let descriptors = Vec::new();
        Self {
            daemon,
            access,
            peer,
            slot,
            connection,
            descriptors,
            subscription,
            beginning,
            streams,
        }
    }

    /// Describes the start of a process that is to take over. Its standard output and standard
    /// error follow the answer as descriptors.
    pub(super) fn begin_upgrade(&mut self) -> Result<SuccessorStart, RpcError> {
        let start = takeover::successor_start(&*self.daemon()?)?;
        let streams =
            [io::stdout().as_fd(), io::stderr().as_fd()].map(|fd| fd.try_clone_to_owned());
        let streams: io::Result<Vec<_>> = streams.into_iter().collect();
        self.streams = streams.map_err(|error| {
            let text = format!("cannot pass standard output and standard error on: {error}");
            RpcError::new(Code::UpgradeLater, text)
        })?;
        Ok(start)
    }

    /// Waits at most `limit` for a process to take over.
    pub(super) fn await_upgrade(
        &self,
        process: u32,
        limit: Duration,
    ) -> Result<SuccessorProgress, RpcError> {
        Ok(takeover::wait(&*self.daemon()?, process, limit)?)
    }

    /// Checks that the client may call a method that needs this role.
    ///
    /// # Errors
    ///
    /// When its role does not suffice.
    pub(super) fn check_role(&self, name: &str, least: Role) -> Result<(), RpcError> {
        let own = self.slot.role;
        if own >= least {
            return Ok(());
        }
        let why = match own {
            Role::Reader => "a member of --control-read-group may only query, and not call",
            _ => "only root and the user of this daemon may call",
        };
        Err(RpcError::new(Code::Refused, format!("permission denied: {why} {name}")))
    }

    /// Sends the descriptors that belong to the last answer.
    pub(super) fn send_streams(&mut self) -> io::Result<()> {
        match std::mem::take(&mut self.streams) {
            streams if streams.is_empty() => Ok(()),
            streams => self.connection.send_fds(&streams),
        }
    }

    /// Lets the daemon carry out a command, and waits for the reply.
    pub(super) fn handle(&mut self, command: Command) -> Result<Reply, RpcError> {
        let (mut command, mut files) = (command, std::mem::take(&mut self.descriptors));
        let passed = match self.slot.role {
            Role::Owner => by_place(&command, &mut files),
            Role::Member | Role::Reader => {
                let refuse = |error| RpcError::new(Code::Refused, format!("{error:#}"));
                let export = self.settings_for(&command)?;
                self.access.admit(&mut command, &export, &mut files).map_err(refuse)?
            }
        };
        if let Some((name, _)) = files.first() {
            let text = format!("no disk of the request is at the place of {}", name.path.display());
            return Err(RpcError::new(Code::Params, text));
        }
        Ok(self.daemon()?.handle_with(command, &passed)?)
    }

    /// The settings of the export that a command adds a unit to.
    fn settings_for(&self, command: &Command) -> Result<ExportSettings, RpcError> {
        let Command::AddUnit(name, _) = command else { return Ok(ExportSettings::default()) };
        let shown = self.daemon()?.exports()?;
        let export = shown.into_iter().find(|status| status.spec.is_called(name));
        // The daemon refuses a unit of an export that does not exist.
        Ok(export.map(|status| status.spec.settings).unwrap_or_default())
    }

    /// Subscribes to events of these kinds, or to all.
    pub(super) fn subscribe(&mut self, kinds: Option<Vec<EventKind>>) -> Result<(), RpcError> {
        let daemon = self.daemon()?;
        self.slot.subscribe()?;
        let (subscription, queue) = daemon.subscribers().subscribe();
        (self.subscription, self.beginning) = (Some(subscription), Some(Events { queue, kinds }));
        Ok(())
    }

    /// Begins to send events, if the client has subscribed. A thread sends them, so that a client
    /// which does not read them delays no other work.
    pub(super) fn begin_events(&mut self) -> Result<()> {
        let Some(events) = self.beginning.take() else { return Ok(()) };
        let (connection, peer) = (Arc::clone(&self.connection), self.peer.clone());
        let send = move || {
            if let Some(why) = events.send_all(&connection) {
                let process = peer.pid.map_or_else(|| "not visible".into(), |pid| pid.to_string());
                tracing::warn!(
                    "dropped a subscriber to events (process {process}, user {}): {why}; it must \
                     read events as they arrive",
                    peer.uid
                );
            }
            // The client has left, or was too slow.
            connection.close();
        };
        let thread = start_thread("ringhaul-events", send);
        thread.context("cannot start the thread of a subscriber").map(drop)
    }

    pub(super) fn daemon(&self) -> Result<Arc<Daemon>, RpcError> {
        Ok(self.daemon.upgrade().ok_or(CommandError::Ending)?)
    }
}

impl Events {
    /// Sends events until the last one. Returns the reason if the client was too slow.
    fn send_all(&self, connection: &Connection) -> Option<String> {
        let is_wanted = |event: &Arc<ExportEvent>| {
            self.kinds.as_ref().is_none_or(|kinds| kinds.contains(&event.details.kind()))
        };
        for event in self.queue.iter().filter(is_wanted) {
            match connection.send(&event_line(&event)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    let seconds = LIMITS.taken_within.as_secs();
                    return Some(format!("it has not read an event within {seconds} seconds"));
                }
                // The client has left.
                Err(_) => return None,
            }
        }
        self.queue.is_full().then(|| format!("more than {QUEUED_MAX} events wait for it"))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use serde_json::Value;

    use super::*;
    use crate::control::subscribers::{EventDetails, Subscribers};
    use crate::spec::UnitPlace;

    /// An event of each kind.
    fn all() -> Vec<EventDetails> {
        let unit = UnitPlace { target: 0, lun: 1 };
        vec![
            EventDetails::Added,
            EventDetails::Removed,
            EventDetails::Attached { peer: None },
            EventDetails::Gone { reason: None },
            EventDetails::Error { message: "why".to_owned(), left_out: 0 },
            EventDetails::Resized { unit: None, size_bytes: 512 },
            EventDetails::LunAdded { unit },
            EventDetails::LunRemoved { unit },
        ]
    }

    #[test]
    fn a_subscriber_gets_events_of_its_kinds_alone() {
        let name = |kind| serde_json::to_value(kind).unwrap();
        let each: Vec<EventKind> = all().iter().map(EventDetails::kind).collect();
        let mut wanted: Vec<Option<Vec<EventKind>>> = vec![None, Some(Vec::new())];
        wanted.extend(each.iter().map(|kind| Some(vec![*kind])));
        wanted.push(Some(vec![each[4], each[1]]));
        for kinds in wanted {
            let expected: Vec<Value> = each
                .iter()
                .filter(|kind| kinds.as_ref().is_none_or(|kinds| kinds.contains(kind)))
                .map(name)
                .collect();
            let subscribers = Subscribers::default();
            let (subscription, queue) = subscribers.subscribe();
            for details in all() {
                subscribers.report(ExportEvent { export: "vm".to_owned(), details });
            }
            drop(subscription);
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let connection = Connection::new(ours, LIMITS).unwrap();
            assert_eq!(Events { queue, kinds: kinds.clone() }.send_all(&connection), None);
            drop(connection);
            let mut lines = String::new();
            theirs.read_to_string(&mut lines).unwrap();
            let seen: Vec<Value> = lines
                .lines()
                .map(|line| serde_json::from_str::<Value>(line).unwrap()["params"]["event"].take())
                .collect();
            assert_eq!(seen, expected, "{kinds:?}");
        }
    }
}
