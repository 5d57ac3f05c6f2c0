//! Abandoned connections, until the server has ended the changes that it was sent.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::flow::{Broken, Flow};
use super::pipe::{Pipe, key_of};
use super::remains::{Remains, let_go};
use super::shared::{Orphan, Shared};
use super::watched::Watched;
use crate::interest::Interest;

/// The interval at which requests without an answer are checked.
pub(super) const TICK: Duration = Duration::from_secs(1);

/// The information that an abandoned connection can still give.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Hears {
    /// Answers, and the end of the connection.
    Answers,
    /// Only the end of the connection by the server.
    End,
    /// Nothing: the server's changes will never be known.
    Nothing,
}

/// Starts a task that waits until the server has answered the changes of an abandoned connection,
/// or has closed it. If answers cannot be read, only the close shows that the changes have ended.
pub(super) fn see_off(pipe: &Rc<Pipe>, flow: Flow, remains: Remains, hears: Hears) {
    let left = Some(Left { flow, remains, hears });
    pipe.io.spawn(wait(Leaving { pipe: Rc::clone(pipe), left }));
}

/// Passes that wait on to another IoThread, because this loop ends. Even if there is none, the
/// server ends the connection, which is half closed.
pub(super) fn pass_on(pipe: &Pipe, mut flow: Flow, remains: Remains, hears: Hears) {
    let is_heard = hears != Hears::Nothing;
    if is_heard {
        flow.half_close();
    }
    offer(&pipe.shared, remains.orphan(flow.into_connected(), is_heard));
}

fn offer(shared: &Arc<Shared>, orphan: Orphan) {
    shared.put_orphan(orphan);
    let key = key_of(shared);
    shared.on_pipes(move |io| {
        if let Some(pipe) = io.shared::<Pipe>(key) {
            adopt(&pipe);
        }
    });
}

/// Releases the changes of connections without a task, if the server has ended them.
pub(super) fn look_at_orphans(shared: &Arc<Shared>) {
    for Orphan { connected, is_heard, holder } in shared.take_orphans() {
        let mut flow = Flow::new(0, connected);
        let is_heard = match flow.discard() {
            Err(Broken::Gone(_)) if is_heard => {
                let_go(shared, holder, Vec::new());
                continue;
            }
            Err(Broken::Cut(_)) => false,
            _ => is_heard,
        };
        offer(shared, Orphan { connected: flow.into_connected(), is_heard, holder });
    }
}

/// Takes over the waits of IoThreads that have ended.
pub(super) fn adopt(pipe: &Rc<Pipe>) {
    for orphan in pipe.shared.take_orphans() {
        let hears = if orphan.is_heard { Hears::End } else { Hears::Nothing };
        let (remains, connected) = Remains::adopt(orphan);
        see_off(pipe, Flow::new(0, connected), remains, hears);
    }
}

struct Left {
    flow: Flow,
    remains: Remains,
    hears: Hears,
}

struct Leaving {
    pipe: Rc<Pipe>,
    /// `None` once the wait has ended.
    left: Option<Left>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(Left { flow, remains, hears }) = self.left.take() {
            pass_on(&self.pipe, flow, remains, hears);
        }
    }
}

async fn wait(mut leaving: Leaving) {
    let pipe = Rc::clone(&leaving.pipe);
    let task = pipe.io.current_task();
    pipe.leaving.borrow_mut().push(task);
    if let Some(left) = &mut leaving.left {
        left.wait(&pipe).await;
    }
    if let Some(mut left) = leaving.left.take() {
        pipe.release_all(&mut left.remains);
    }
    pipe.leaving.borrow_mut().retain(|other| *other != task);
}

impl Left {
    /// Waits for the answers or the end of the connection, or for the end of the disk.
    async fn wait(&mut self, pipe: &Pipe) {
        let Self { flow, remains, hears } = self;
        // A socket that cannot be watched is checked at each tick.
        let incoming = Watched::new(&pipe.io, flow, Interest::Readable).ok();
        if *hears == Hears::End {
            flow.half_close();
        }
        let mut tick: Option<Instant> = None;
        while !pipe.shared.is_over() {
            let now = pipe.io.recently.get();
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
            let requests = &mut remains.requests;
            let went_on = match *hears {
                Hears::Answers => {
                    flow.send(requests).and_then(|()| flow.receive(requests, &pipe.shared))
                }
                Hears::End => flow.discard(),
                Hears::Nothing => Ok(false),
            };
            match went_on {
                Ok(_) if *hears == Hears::Answers && pipe.release_answered(remains) => break,
                Ok(true) => pipe.io.wake_me(),
                Ok(false) => {}
                Err(Broken::Gone(_)) => break,
                Err(Broken::Cut(_)) => *hears = Hears::Nothing,
                Err(Broken::Unusable(_) | Broken::Late(_) | Broken::Silent(_)) => {
                    *hears = Hears::End;
                    flow.half_close();
                    pipe.io.wake_me();
                }
            }
            pipe.io.suspend().await;
        }
    }
}
