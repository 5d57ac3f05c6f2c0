//! How other threads reach an IoThread.

use std::any::Any;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use crate::io::Io;
use crate::mailbox::Mailbox;
use crate::stats::Stats;

/// Reaches an IoThread from other threads.
#[derive(Clone)]
pub struct Remote {
    mailbox: Arc<Mailbox>,
    stats: Arc<Stats>,
}

impl Remote {
    pub(crate) fn new(mailbox: Arc<Mailbox>, stats: Arc<Stats>) -> Self {
        Self { mailbox, stats }
    }

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
        let (sender, receiver) = mpsc::sync_channel(1);
        self.post(move |io| {
            // The receiver waits below; if its thread was killed, nobody wants the result.
            let _ = sender.send(call(io));
        });
        receiver.recv().ok()
    }

    /// What the IoThread counts.
    #[must_use]
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }
}
