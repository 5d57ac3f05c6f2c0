//! Foreign ops, which a callback of another library or a thread completes, not the kernel.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use iomem::{Buffers, fits};

use crate::engine::kernel::start_thread;
use crate::executor::mailbox::Mailbox;
use crate::op::Completion;
use crate::thread::io::Io;

impl Io {
    /// Makes a foreign op: its future waits until the completer is used, from any thread.
    /// Completions of many ops share one wake of the IoThread.
    ///
    /// The op owns `buffers` until it is completed, even if the future is dropped before. So
    /// another library may be given the addresses of their bytes and of their
    /// [list](Buffers::iovecs), which does not move. The future yields them with the result.
    ///
    /// An IoThread that is dropped waits until all its ops are completed. After its end the future
    /// yields `ECANCELED` at once, without the buffers, which stay until the completion.
    ///
    /// ```
    /// # use blockio::{Buffers, IoThread, IoThreadConfig};
    /// # let thread = IoThread::new(&IoThreadConfig::default())?;
    /// let (op, completer) = thread.io().foreign_op(Buffers::empty());
    /// std::thread::spawn(move || completer.complete(Ok(4096)));
    /// assert_eq!(thread.block_on(op)?.result.unwrap(), 4096);
    /// # Ok::<(), blockio::Error>(())
    /// ```
    pub fn foreign_op(self: &Rc<Self>, buffers: Buffers) -> (ForeignOp, ForeignCompleter) {
        let slot = self.ops.borrow_mut().slots.insert_foreign(buffers);
        let completer = ForeignCompleter::new(&self.tasks.mailbox, slot);
        (ForeignOp { io: Rc::clone(self), slot: Some(slot) }, completer)
    }

    /// Starts a thread for work that may block, such as work that completes a foreign op in the
    /// end.
    ///
    /// # Errors
    ///
    /// If no thread can be started.
    pub fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        start_thread(name, Box::new(work))
    }

    /// Ends a foreign op after the last harvest. Memory in use stays in its slot.
    #[cold]
    fn end_of_foreign_op(&self, slot: u32) -> Completion {
        let (unwanted, completion) = {
            let mut ops = self.ops.borrow_mut();
            (ops.take_late_results(), ops.slots.take(slot))
        };
        drop(unwanted);
        completion.unwrap_or_else(|| {
            self.abandon_op(slot);
            let result = Err(io::Error::from_raw_os_error(libc::ECANCELED));
            Completion { result, buffers: Buffers::empty() }
        })
    }
}

/// The future of an op that a [`ForeignCompleter`] completes. Dropping it does not cancel the op:
/// its slot keeps the memory until the completion.
#[must_use = "no other code learns of the completion"]
pub struct ForeignOp {
    io: Rc<Io>,
    /// `None` once the completion was taken.
    slot: Option<u32>,
}

impl Future for ForeignOp {
    type Output = Completion;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Completion> {
        let Some(slot) = self.slot else { return Poll::Pending };
        let completion = self.io.take_completion(slot, cx).or_else(|| {
            let has_ended = self.io.ops.borrow().slots.lanes.is_closed();
            has_ended.then(|| self.io.end_of_foreign_op(slot))
        });
        match completion {
            Some(completion) => {
                self.slot = None;
                Poll::Ready(completion)
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for ForeignOp {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.io.abandon_op(slot);
        }
    }
}

/// Completes a [`ForeignOp`] once, from any thread. Dropping it completes the op with `EIO`: its
/// user has cancelled the work at an unknown point.
#[must_use = "dropping it fails the op"]
pub struct ForeignCompleter {
    /// `None` once it was used.
    mailbox: Option<Arc<Mailbox>>,
    slot: u32,
}

impl ForeignCompleter {
    pub(crate) fn new(mailbox: &Arc<Mailbox>, slot: u32) -> Self {
        Self { mailbox: Some(Arc::clone(mailbox)), slot }
    }

    /// Completes the op with a number of bytes or an error. All use of its memory must have ended,
    /// because it may be freed from now on. Returns false if the IoThread has ended and the result
    /// is lost.
    pub fn complete(mut self, result: io::Result<usize>) -> bool {
        let result = match result {
            Ok(bytes) => fits(bytes, "a number of bytes"),
            Err(error) => {
                let errno = error.raw_os_error().filter(|errno| *errno > 0);
                -i64::from(errno.unwrap_or(libc::EIO))
            }
        };
        self.mailbox.take().is_some_and(|mailbox| mailbox.post_result(self.slot, result))
    }
}

impl Drop for ForeignCompleter {
    fn drop(&mut self) {
        if let Some(mailbox) = self.mailbox.take() {
            mailbox.post_result(self.slot, -i64::from(libc::EIO));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::task::Waker;
    use std::thread;
    use std::time::Duration;

    use super::super::IoThread;
    use super::*;
    use crate::config::{EngineKind, IoThreadConfig};
    use crate::thread::poll_window::Awaited;
    use crate::thread::turn::{Activity, Wait};

    const ENGINES: [EngineKind; 3] = [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads];

    fn new_thread(engine: EngineKind) -> IoThread {
        IoThread::new(&IoThreadConfig { engine: engine.into(), ..IoThreadConfig::default() })
            .unwrap()
    }

    struct Canary(Rc<Cell<bool>>);

    impl Drop for Canary {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }

    /// Makes buffers, and a flag that is set when they are dropped.
    fn watched_buffers() -> (Buffers, Rc<Cell<bool>>) {
        let gone = Rc::new(Cell::new(false));
        (Buffers::uninitialized(512, 512, Canary(Rc::clone(&gone))).unwrap(), gone)
    }

    fn errno(completion: Completion) -> Option<i32> {
        completion.result.unwrap_err().raw_os_error()
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn many_completions_of_other_threads_share_one_wake() {
        for engine in ENGINES {
            let thread = new_thread(engine);
            let io = thread.io();
            let served = Rc::new(Cell::new(0));
            let mut completers = Vec::new();
            for bytes in 0..100 {
                let (op, completer) = io.foreign_op(Buffers::aligned(512, 512));
                let served = Rc::clone(&served);
                io.spawn(async move {
                    let Completion { result, buffers } = op.await;
                    assert_eq!((result.unwrap(), buffers.bytes()), (bytes, 512));
                    served.set(served.get() + 1);
                });
                completers.push(completer);
            }
            while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
            assert_eq!((io.ops(), served.get()), (100, 0));
            let other = thread::spawn(move || {
                let completers = completers.into_iter().enumerate().rev();
                completers.for_each(|(bytes, completer)| assert!(completer.complete(Ok(bytes))));
            });
            other.join().unwrap();
            let mut writes = [0; 8];
            rustix::io::read(io.tasks.mailbox.eventfd(), &mut writes).unwrap();
            assert_eq!(u64::from_ne_bytes(writes), 1, "{engine}: eventfd writes");
            while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
            assert_eq!((io.ops(), served.get()), (0, 100));
            let stats = io.stats();
            let counted = (stats.foreign_at_once.values(), stats.woken.get());
            assert_eq!((counted.0.sum(), counted.0.count(), counted.1), (100, 1, 1), "{engine}");
        }
    }

    /// The loop sleeps each time, and only the completion can wake it.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_completion_wakes_a_loop_that_sleeps() {
        for engine in ENGINES {
            let thread = new_thread(engine);
            let (sender, receiver) = std::sync::mpsc::channel::<ForeignCompleter>();
            let other = thread::spawn(move || {
                receiver.into_iter().for_each(|completer| assert!(completer.complete(Ok(7))));
            });
            for _ in 0..1000 {
                let (op, completer) = thread.io().foreign_op(Buffers::empty());
                sender.send(completer).unwrap();
                assert_eq!(thread.block_on(op).unwrap().result.unwrap(), 7);
            }
            drop(sender);
            other.join().unwrap();
        }
    }

    /// During a foreign op the loop must not poll for the peers of its sources, which would take
    /// CPU time from the working threads.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_sleep_for_a_foreign_op_is_no_sleep_for_a_source() {
        for engine in ENGINES {
            let poll_max = Duration::from_secs(3600);
            let config = IoThreadConfig { engine: engine.into(), poll_max, ..Default::default() };
            let thread = IoThread::new(&config).unwrap();
            for _ in 0..3 {
                let (op, completer) = thread.io().foreign_op(Buffers::empty());
                let stats = Arc::clone(&thread.io().stats);
                let other = thread::spawn(move || {
                    while stats.is_idle.get() == 0 {
                        thread::yield_now();
                    }
                    completer.complete(Ok(7))
                });
                assert_eq!(thread.block_on(op).unwrap().result.unwrap(), 7);
                assert!(other.join().unwrap());
            }
            let window = &thread.io().poll_window;
            assert!(window.is_closed(Awaited::Source), "{engine}: it polls for sources");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn memory_of_a_dropped_future_stays_until_the_completion() {
        let thread = new_thread(EngineKind::Threads);
        let (buffers, gone) = watched_buffers();
        let (op, completer) = thread.io().foreign_op(buffers);
        drop(op);
        while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
        assert_eq!((gone.get(), thread.io().ops()), (false, 1));
        thread::spawn(move || completer.complete(Ok(0))).join().unwrap();
        while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
        assert_eq!((gone.get(), thread.io().ops()), (true, 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_completer_that_is_dropped_fails_its_op() {
        let thread = new_thread(EngineKind::Threads);
        let (op, completer) = thread.io().foreign_op(Buffers::empty());
        thread::spawn(move || drop(completer)).join().unwrap();
        assert_eq!(errno(thread.block_on(op).unwrap()), Some(libc::EIO));
        let (op, completer) = thread.io().foreign_op(Buffers::empty());
        completer.complete(Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert_eq!(errno(thread.block_on(op).unwrap()), Some(libc::ENOSPC));
        let (op, completer) = thread.io().foreign_op(Buffers::empty());
        completer.complete(Err(io::Error::other("no errno")));
        assert_eq!(errno(thread.block_on(op).unwrap()), Some(libc::EIO));
    }

    /// Waits until this OS thread sleeps in a system call.
    fn wait_for_sleep(thread: rustix::process::Pid) {
        let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
        while !std::fs::read_to_string(&path).unwrap().contains(") S ") {
            thread::yield_now();
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn dropping_a_loop_waits_for_completions() {
        for engine in ENGINES {
            let thread = new_thread(engine);
            let (buffers, gone) = watched_buffers();
            let (op, completer) = thread.io().foreign_op(buffers);
            thread.io().spawn(async move { drop(op.await) });
            // An op held by a task or a call is dropped, and does not delay the end.
            let (op, held) = thread.io().foreign_op(Buffers::empty());
            thread.io().spawn(async move {
                drop(op.await);
                drop(held);
            });
            while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
            let (_op, held) = thread.io().foreign_op(Buffers::empty());
            assert!(thread.remote().post(move |_| drop(held)));
            let this = rustix::thread::gettid();
            let other = thread::spawn(move || {
                wait_for_sleep(this);
                completer.complete(Ok(0))
            });
            drop(thread);
            assert!(gone.get(), "{engine}: it did not wait");
            assert!(other.join().unwrap(), "{engine}: the completer was told that it is gone");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn completers_are_told_that_the_loop_has_ended_and_memory_stays_until_then() {
        let thread = new_thread(EngineKind::Threads);
        let io = Rc::clone(thread.io());
        drop(thread);
        let mut cx = Context::from_waker(Waker::noop());
        let (buffers, gone) = watched_buffers();
        let (mut op, completer) = io.foreign_op(buffers);
        let Poll::Ready(completion) = Pin::new(&mut op).poll(&mut cx) else {
            panic!("nothing will ever wake the future");
        };
        assert_eq!(errno(completion), Some(libc::ECANCELED));
        drop(op);
        assert!(!gone.get(), "the memory went before the completion");
        assert!(!thread::spawn(move || completer.complete(Ok(0))).join().unwrap());
        // An op that was completed before the poll has its result.
        let (mut op, completer) = io.foreign_op(Buffers::empty());
        assert!(!completer.complete(Ok(3)));
        let Poll::Ready(completion) = Pin::new(&mut op).poll(&mut cx) else {
            panic!("the completion is lost");
        };
        assert_eq!(completion.result.unwrap(), 3);
        assert!(gone.get(), "the memory stayed after the completion");
        drop(op);
        let (buffers, gone) = watched_buffers();
        let (op, completer) = io.foreign_op(buffers);
        drop(op);
        drop(completer);
        drop(io);
        assert!(gone.get(), "the memory is lost");
    }
}
