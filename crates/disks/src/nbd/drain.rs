//! Abandoned connections, until the server has ended the changes that it was sent.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockio::driver::Interest;

use super::abandoned::{AbandonedRequests, release_except};
use super::channel::{Broken, Channel};
use super::client::Client;
use super::shared::{Orphan, SharedExport};
use super::socket_source::Watched;

/// The interval at which requests without an answer are checked.
pub(super) const TICK: Duration = Duration::from_secs(1);

/// The information that an abandoned connection can still give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DrainSignal {
    /// Answers, and the end of the connection.
    Answers,
    /// Only the end of the connection by the server.
    Close,
    /// Nothing: the server's changes will never be known.
    Nothing,
}

impl Broken {
    /// The reason, and the information that the connection can still give about changes of its
    /// requests. `None`: there are no changes any more.
    pub(super) fn into_reason_and_signal(self) -> (String, Option<DrainSignal>) {
        match self {
            Self::Gone(why) => (why, None),
            Self::Unusable(why) => (why, Some(DrainSignal::Close)),
            Self::Late(why) | Self::Silent(why) => (why, Some(DrainSignal::Answers)),
            Self::Cut(why) => (why, Some(DrainSignal::Nothing)),
        }
    }
}

/// Starts a task that waits until the server has answered the changes of an abandoned connection,
/// or has closed it. If answers cannot be read, only the close shows that the changes have ended.
pub(super) fn drain(
    client: &Rc<Client>,
    channel: Channel,
    abandoned: AbandonedRequests,
    signal: DrainSignal,
) {
    let connection = Some(AbandonedConnection { channel, abandoned, signal });
    client.io.spawn(wait(DrainTask { client: Rc::clone(client), connection }));
}

/// Passes that wait on to another IoThread, because this loop ends. Even if there is none, the
/// server ends the connection, which is half closed.
pub(super) fn hand_to_another(
    client: &Client,
    mut channel: Channel,
    abandoned: AbandonedRequests,
    signal: DrainSignal,
) {
    let close_is_visible = signal != DrainSignal::Nothing;
    if close_is_visible {
        channel.half_close();
    }
    publish_orphan(&client.shared, abandoned.orphan(channel.into_connected(), close_is_visible));
}

fn publish_orphan(shared: &Arc<SharedExport>, orphan: Orphan) {
    shared.put_orphan(orphan);
    Client::run_on_each(shared, adopt_orphans);
}

/// Releases the changes of connections without a task, if the server has ended them.
pub(super) fn release_closed_orphans(shared: &Arc<SharedExport>) {
    for Orphan { connected, close_is_visible, holder } in shared.take_orphans() {
        let mut channel = Channel::new(0, connected);
        let broken = channel.discard().err();
        let Some(close_is_visible) = orphan_signal(broken, close_is_visible) else {
            release_except(shared, holder, Vec::new());
            continue;
        };
        publish_orphan(
            shared,
            Orphan { connected: channel.into_connected(), close_is_visible, holder },
        );
    }
}

/// Returns true if a close by the server will still be visible; `None` if it was seen. A connection
/// that was cut looks closed from then on.
fn orphan_signal(broken: Option<Broken>, close_is_visible: bool) -> Option<bool> {
    match broken {
        Some(Broken::Gone(_)) if close_is_visible => None,
        Some(Broken::Cut(_)) => Some(false),
        _ => Some(close_is_visible),
    }
}

/// Takes over the waits of IoThreads that have ended.
pub(super) fn adopt_orphans(client: &Rc<Client>) {
    for orphan in client.shared.take_orphans() {
        let signal =
            if orphan.close_is_visible { DrainSignal::Close } else { DrainSignal::Nothing };
        let (abandoned, connected) = AbandonedRequests::adopt(orphan);
        drain(client, Channel::new(0, connected), abandoned, signal);
    }
}

struct AbandonedConnection {
    channel: Channel,
    abandoned: AbandonedRequests,
    signal: DrainSignal,
}

struct DrainTask {
    client: Rc<Client>,
    /// `None` once the wait has ended.
    connection: Option<AbandonedConnection>,
}

impl Drop for DrainTask {
    fn drop(&mut self) {
        if let Some(AbandonedConnection { channel, abandoned, signal }) = self.connection.take() {
            hand_to_another(&self.client, channel, abandoned, signal);
        }
    }
}

async fn wait(mut drain_task: DrainTask) {
    let client = Rc::clone(&drain_task.client);
    let task = client.io.current_task();
    client.draining.borrow_mut().push(task);
    if let Some(connection) = &mut drain_task.connection {
        connection.wait(&client).await;
    }
    if let Some(mut connection) = drain_task.connection.take() {
        client.release_all(&mut connection.abandoned);
    }
    client.draining.borrow_mut().retain(|other| *other != task);
}

impl AbandonedConnection {
    /// Waits for the answers or the end of the connection, or for the end of the disk.
    async fn wait(&mut self, client: &Client) {
        let Self { channel, abandoned, signal } = self;
        // A socket that cannot be watched is checked at each tick.
        let incoming = Watched::new(&client.io, channel, Interest::Readable).ok();
        if *signal == DrainSignal::Close {
            channel.half_close();
        }
        let mut tick: Option<Instant> = None;
        while !client.shared.is_over() {
            let now = client.io.recently();
            if tick.is_none_or(|tick| tick <= now) {
                channel.may_receive();
                channel.may_send();
                client.expire();
                tick = Some(now + TICK);
                client.io.wake_me_at(now + TICK);
            }
            if incoming.as_ref().is_some_and(Watched::take) {
                channel.may_receive();
            }
            let requests = &mut abandoned.requests;
            let progress = match *signal {
                DrainSignal::Answers => {
                    channel.send(requests).and_then(|()| channel.receive(requests, &client.shared))
                }
                DrainSignal::Close => channel.discard(),
                DrainSignal::Nothing => Ok(false),
            };
            match progress {
                Ok(_) if *signal == DrainSignal::Answers && client.release_answered(abandoned) => {
                    break;
                }
                Ok(true) => client.io.wake_me(),
                Ok(false) => {}
                Err(broken) => match broken.into_reason_and_signal().1 {
                    None => break,
                    Some(DrainSignal::Nothing) => *signal = DrainSignal::Nothing,
                    Some(DrainSignal::Answers | DrainSignal::Close) => {
                        *signal = DrainSignal::Close;
                        channel.half_close();
                        client.io.wake_me();
                    }
                },
            }
            client.io.suspend().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A newer change of the same place must not overtake one that the server may still make.
    #[test]
    fn only_a_close_by_the_server_rules_out_further_changes() {
        let why = || "why".to_owned();
        for (broken, left) in [
            (Broken::Gone(why()), None),
            (Broken::Unusable(why()), Some(DrainSignal::Close)),
            (Broken::Late(why()), Some(DrainSignal::Answers)),
            (Broken::Silent(why()), Some(DrainSignal::Answers)),
            (Broken::Cut(why()), Some(DrainSignal::Nothing)),
        ] {
            assert_eq!(broken.into_reason_and_signal(), (why(), left));
        }
        let signal =
            |broken: fn(String) -> Broken, before| orphan_signal(Some(broken(why())), before);
        assert_eq!((signal(Broken::Gone, true), signal(Broken::Gone, false)), (None, Some(false)));
        for before in [true, false] {
            assert_eq!(signal(Broken::Cut, before), Some(false));
            assert_eq!(signal(Broken::Unusable, before), Some(before));
            assert_eq!(orphan_signal(None, before), Some(before));
        }
    }
}
