//! Abandoned connections, until the server has ended the changes that it was sent.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockio::driver::Interest;

use super::abandoned::{AbandonedRequests, release_except};
use super::flow::{Broken, Flow};
use super::pipe::{Pipe, key_of};
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
    pipe: &Rc<Pipe>,
    flow: Flow,
    abandoned: AbandonedRequests,
    signal: DrainSignal,
) {
    let connection = Some(AbandonedConnection { flow, abandoned, signal });
    pipe.io.spawn(wait(DrainTask { pipe: Rc::clone(pipe), connection }));
}

/// Passes that wait on to another IoThread, because this loop ends. Even if there is none, the
/// server ends the connection, which is half closed.
pub(super) fn hand_to_another(
    pipe: &Pipe,
    mut flow: Flow,
    abandoned: AbandonedRequests,
    signal: DrainSignal,
) {
    let close_is_visible = signal != DrainSignal::Nothing;
    if close_is_visible {
        flow.half_close();
    }
    publish_orphan(&pipe.shared, abandoned.orphan(flow.into_connected(), close_is_visible));
}

fn publish_orphan(shared: &Arc<SharedExport>, orphan: Orphan) {
    shared.put_orphan(orphan);
    let key = key_of(shared);
    shared.on_pipes(move |io| {
        if let Some(pipe) = io.shared::<Pipe>(key) {
            adopt_orphans(&pipe);
        }
    });
}

/// Releases the changes of connections without a task, if the server has ended them.
pub(super) fn release_closed_orphans(shared: &Arc<SharedExport>) {
    for Orphan { connected, close_is_visible, holder } in shared.take_orphans() {
        let mut flow = Flow::new(0, connected);
        let broken = flow.discard().err();
        let Some(close_is_visible) = orphan_signal(broken, close_is_visible) else {
            release_except(shared, holder, Vec::new());
            continue;
        };
        publish_orphan(
            shared,
            Orphan { connected: flow.into_connected(), close_is_visible, holder },
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
pub(super) fn adopt_orphans(pipe: &Rc<Pipe>) {
    for orphan in pipe.shared.take_orphans() {
        let signal =
            if orphan.close_is_visible { DrainSignal::Close } else { DrainSignal::Nothing };
        let (abandoned, connected) = AbandonedRequests::adopt(orphan);
        drain(pipe, Flow::new(0, connected), abandoned, signal);
    }
}

struct AbandonedConnection {
    flow: Flow,
    abandoned: AbandonedRequests,
    signal: DrainSignal,
}

struct DrainTask {
    pipe: Rc<Pipe>,
    /// `None` once the wait has ended.
    connection: Option<AbandonedConnection>,
}

impl Drop for DrainTask {
    fn drop(&mut self) {
        if let Some(AbandonedConnection { flow, abandoned, signal }) = self.connection.take() {
            hand_to_another(&self.pipe, flow, abandoned, signal);
        }
    }
}

async fn wait(mut drain_task: DrainTask) {
    let pipe = Rc::clone(&drain_task.pipe);
    let task = pipe.io.current_task();
    pipe.draining.borrow_mut().push(task);
    if let Some(connection) = &mut drain_task.connection {
        connection.wait(&pipe).await;
    }
    if let Some(mut connection) = drain_task.connection.take() {
        pipe.release_all(&mut connection.abandoned);
    }
    pipe.draining.borrow_mut().retain(|other| *other != task);
}

impl AbandonedConnection {
    /// Waits for the answers or the end of the connection, or for the end of the disk.
    async fn wait(&mut self, pipe: &Pipe) {
        let Self { flow, abandoned, signal } = self;
        // A socket that cannot be watched is checked at each tick.
        let incoming = Watched::new(&pipe.io, flow, Interest::Readable).ok();
        if *signal == DrainSignal::Close {
            flow.half_close();
        }
        let mut tick: Option<Instant> = None;
        while !pipe.shared.is_over() {
            let now = pipe.io.recently();
            if tick.is_none_or(|tick| tick <= now) {
                flow.may_receive();
                flow.may_send();
                pipe.expire();
                tick = Some(now + TICK);
                pipe.io.wake_me_at(now + TICK);
            }
            if incoming.as_ref().is_some_and(Watched::take) {
                flow.may_receive();
            }
            let requests = &mut abandoned.requests;
            let progress = match *signal {
                DrainSignal::Answers => {
                    flow.send(requests).and_then(|()| flow.receive(requests, &pipe.shared))
                }
                DrainSignal::Close => flow.discard(),
                DrainSignal::Nothing => Ok(false),
            };
            match progress {
                Ok(_) if *signal == DrainSignal::Answers && pipe.release_answered(abandoned) => {
                    break;
                }
                Ok(true) => pipe.io.wake_me(),
                Ok(false) => {}
                Err(broken) => match broken.into_reason_and_signal().1 {
                    None => break,
                    Some(DrainSignal::Nothing) => *signal = DrainSignal::Nothing,
                    Some(DrainSignal::Answers | DrainSignal::Close) => {
                        *signal = DrainSignal::Close;
                        flow.half_close();
                        pipe.io.wake_me();
                    }
                },
            }
            pipe.io.suspend().await;
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
