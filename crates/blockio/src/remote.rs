//! How other threads reach an IoThread.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use crate::io::Io;
use crate::mailbox::Mailbox;
use crate::pending::Pending;
use crate::stats::Stats;

/// Reaches an IoThread from other threads.
#[derive(Clone)]
pub struct Remote {
    mailbox: Arc<Mailbox>,
    stats: Arc<Stats>,
}

impl Io {
    /// A way for other threads to reach this one.
    #[must_use]
    pub fn remote(&self) -> Remote {
        Remote { mailbox: Arc::clone(&self.mailbox), stats: Arc::clone(&self.stats) }
    }
}

impl Remote {
    /// Has `call` run on the IoThread between two turns. False when that thread has ended.
    pub fn post(&self, call: impl FnOnce(&Rc<Io>) + Send + 'static) -> bool {
        let call = move |io: &dyn Any| match io.downcast_ref::<Rc<Io>>() {
            Some(io) => call(io),
            None => unreachable!("a turn gives its handle to calls"),
        };
        self.mailbox.post(|posted| posted.calls.push(Box::new(call)))
    }

    /// As [`post`](Self::post), and waits for the result. `None` when that thread has ended.
    pub fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Rc<Io>) -> T + Send + 'static,
    ) -> Option<T> {
        self.begin_call(call).wait()
    }

    /// As [`call`](Self::call), for callers that must not block.
    #[must_use]
    pub fn begin_call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Rc<Io>) -> T + Send + 'static,
    ) -> Pending<T> {
        let (answer, pending) = Pending::new();
        self.post(move |io| answer.send(call(io)));
        pending
    }

    /// What the IoThread counts.
    #[must_use]
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }
}
