//! Sets of futures that one task runs: the requests of a queue, for example.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::executor::mailbox::TaskKey;
use crate::executor::task;
use crate::thread::io::Io;

/// A set of futures of one type that one task runs.
///
/// Storage is allocated when the set grows and used again afterwards: starting a future allocates
/// nothing if the set was as full before.
pub struct TaskSet<F> {
    io: Rc<Io>,
    /// The number of the set in the executor.
    set: u32,
    /// The last poller of the set: a task or future, or `None` for a combinator.
    owner: Option<TaskKey>,
    places: Vec<TaskPlace<F>>,
    free: Vec<u32>,
    woken: Vec<u32>,
}

/// A place for one future at a time.
struct TaskPlace<F> {
    future: Pin<Box<Option<F>>>,
    /// Wakes the future in this place, regardless of the set's owner.
    waker: Waker,
}

impl<F: Future<Output = ()>> TaskSet<F> {
    /// Makes an empty set for a task on `io`.
    pub fn new(io: Rc<Io>) -> Self {
        let set = io.tasks.executor.borrow_mut().add_set();
        let (places, free, woken) = (Vec::new(), Vec::new(), Vec::new());
        Self { io, set, owner: None, places, free, woken }
    }

    /// The number of futures that have not ended.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Returns true if no future is left.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a future and polls it once.
    pub fn spawn(&mut self, cx: &mut Context<'_>, future: F) {
        self.adopt(cx);
        let child = self.free.pop().unwrap_or_else(|| self.add_place());
        self.places[child as usize].future.as_mut().set(Some(future));
        self.poll_child(child);
    }

    /// Like [`spawn`](Self::spawn), in an `async fn`.
    pub async fn start(&mut self, future: F) {
        let mut future = Some(future);
        poll_fn(|cx| {
            if let Some(future) = future.take() {
                self.spawn(cx, future);
            }
            Poll::Ready(())
        })
        .await;
    }

    /// Polls the futures that were woken since the last call.
    pub fn run_woken(&mut self, cx: &mut Context<'_>) {
        self.adopt(cx);
        self.io.tasks.executor.borrow_mut().take_woken_children(self.set, &mut self.woken);
        for place in 0..self.woken.len() {
            self.poll_child(self.woken[place]);
        }
        self.woken.clear();
    }

    /// Waits until no future is left.
    pub async fn finish(&mut self) {
        poll_fn(|cx| {
            self.run_woken(cx);
            if self.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    #[cold]
    fn add_place(&mut self) -> u32 {
        let child = u32::try_from(self.places.len())
            .unwrap_or_else(|_| unreachable!("2^32 futures in a set"));
        let waker = task::waker(&self.io.tasks.mailbox, TaskKey { home: self.set, child });
        self.places.push(TaskPlace { future: Box::pin(None), waker });
        child
    }

    /// Makes the poller with `cx` the owner that children wake from now on.
    #[inline]
    fn adopt(&mut self, cx: &Context<'_>) {
        let running = &self.io.tasks.running;
        let owner = running.is_polled_by_task(cx).then(|| running.current());
        if owner.is_none() || owner != self.owner {
            self.owner = owner;
            self.io.tasks.executor.borrow_mut().set_owner_of(self.set, running.owner(cx));
        }
    }

    #[inline]
    fn poll_child(&mut self, child: u32) {
        let Some(place) = self.places.get_mut(child as usize) else {
            return;
        };
        let Some(future) = place.future.as_mut().as_pin_mut() else {
            return;
        };
        let key = TaskKey { home: self.set, child };
        let mut cx = Context::from_waker(&place.waker);
        let poll = || future.poll(&mut cx).is_ready();
        if self.io.tasks.running.run(key, &place.waker, poll) {
            place.future.as_mut().set(None);
            self.free.push(child);
        }
    }
}

impl<F> Drop for TaskSet<F> {
    fn drop(&mut self) {
        self.io.tasks.executor.borrow_mut().remove_set(self.set);
    }
}
