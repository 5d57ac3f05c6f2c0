//! Access to an IoThread from other threads.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use crate::executor::mailbox::{Call, Mailbox};
use crate::executor::oneshot;
use crate::stats::Stats;
use crate::thread::io::Io;

/// A handle with which other threads reach an IoThread.
#[derive(Clone)]
pub struct Remote {
    mailbox: Arc<Mailbox>,
    stats: Arc<Stats>,
}

impl Io {
    /// Returns a handle with which other threads reach this IoThread.
    pub fn remote(&self) -> Remote {
        Remote { mailbox: Arc::clone(&self.tasks.mailbox), stats: Arc::clone(&self.stats) }
    }
}

/// A call for the mailbox, which knows no handle of tasks.
fn erased(call: impl FnOnce(&Rc<Io>) + Send + 'static) -> Call {
    Box::new(move |io: &dyn Any| match io.downcast_ref::<Rc<Io>>() {
        Some(io) => call(io),
        None => unreachable!("a turn gives its handle to calls"),
    })
}

impl Remote {
    /// Runs `call` on the IoThread between two turns. Returns false if the IoThread has ended.
    pub fn post(&self, call: impl FnOnce(&Rc<Io>) + Send + 'static) -> bool {
        self.mailbox.post(|posted| posted.calls.push(erased(call)))
    }

    /// Like [`post`](Self::post), but does not end a sleep: when the IoThread wakes for another
    /// reason, it runs `call` before its tasks. A thread that is just waking up may run it a turn
    /// later.
    pub fn post_quietly(&self, call: impl FnOnce(&Rc<Io>) + Send + 'static) -> bool {
        self.mailbox.post_quietly(|posted| posted.calls.push(erased(call)))
    }

    /// Like [`post`](Self::post), and waits for the result. `None` if the IoThread has ended.
    pub fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Rc<Io>) -> T + Send + 'static,
    ) -> Option<T> {
        self.begin_call(call).wait()
    }

    /// Like [`call`](Self::call), for callers that must not block.
    #[must_use]
    pub fn begin_call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Rc<Io>) -> T + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (answer, pending) = oneshot::channel();
        self.post(move |io| answer.send(call(io)));
        pending
    }

    /// The counters of the IoThread.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }
}
