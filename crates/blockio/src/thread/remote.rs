//! Access to an IoThread from other threads.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use crate::executor::mailbox::Mailbox;
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
    #[must_use]
    pub fn remote(&self) -> Remote {
        Remote { mailbox: Arc::clone(&self.tasks.mailbox), stats: Arc::clone(&self.stats) }
    }
}

impl Remote {
    /// Runs `call` on the IoThread between two turns. Returns false if the IoThread has ended.
    pub fn post(&self, call: impl FnOnce(&Rc<Io>) + Send + 'static) -> bool {
        let call = move |io: &dyn Any| match io.downcast_ref::<Rc<Io>>() {
            Some(io) => call(io),
            None => unreachable!("a turn gives its handle to calls"),
        };
        self.mailbox.post(|posted| posted.calls.push(Box::new(call)))
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
    #[must_use]
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }
}
