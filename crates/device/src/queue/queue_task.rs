//! The task of one virtqueue: wait for a kick, pop, start requests, stop. Read this second, after
//! `turn.rs` of blockio.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use blockio::thread::{Source, SourceId};
use blockio::{Io, TaskSet, clock, oneshot};
use virtqueue::Chain;

use crate::events::QueueFault;
use crate::queue::Queue;
use crate::queue::queue_setup::StopKind;

/// Intervals between checks of a queue without a kick: after work, and after a long time without
/// work.
const CHECK_INTERVALS: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(4)];

/// The device-specific part of serving a queue.
pub(crate) trait Handler: 'static {
    /// Serves one chain: answers it with [`Queue::push`], or keeps it until [`stop`](Self::stop).
    fn serve(self: Rc<Self>, queue: Rc<Queue>, chain: Chain) -> impl Future<Output = ()> + 'static;

    /// The ring is bad: no chains come until the queue is started again.
    fn ring_broken(&self) {}

    /// The queue stops: no further chains come, and kept chains must be pushed. Requests wait no
    /// longer than this kind of stop allows.
    fn stop(&self, _: &Queue, _: StopKind) {}

    /// The number of requests that wait and hold nothing: their futures may be dropped.
    fn waiting_count(&self, _: &Queue) -> usize {
        0
    }

    /// The stop was cancelled: chains come again.
    fn resume(&self) {}
}

/// Serves `queue` until a stop is requested. The caller sends the answer to that request after it
/// has dropped everything of the queue, because the memory may be gone right after the answer.
pub(crate) async fn serve<H: Handler>(io: Rc<Io>, queue: Rc<Queue>, handler: Rc<H>) -> StopAnswer {
    poll_fn(|cx| {
        queue.set_waker(cx.waker());
        Poll::Ready(())
    })
    .await;
    let (source, is_kicked) = register(&io, &queue);
    let mut check_timer = (!is_kicked).then(|| CheckTimer::new(clock::now()));
    let mut requests = TaskSet::new(Rc::clone(&io));
    loop {
        let serve = |chain| Rc::clone(&handler).serve(Rc::clone(&queue), chain);
        let run = |cx: &mut Context<'_>| Poll::Ready(run(&queue, serve, &mut requests, cx));
        let (popped, more) = poll_fn(run).await;
        if queue.is_broken() {
            handler.ring_broken();
        }
        if queue.is_to_stop() {
            queue.set_stopping(true);
            if finish(&io, &queue, &source, &mut requests, &*handler).await {
                break;
            }
            queue.set_stopping(false);
            handler.resume();
            continue;
        }
        queue.publish_status(requests.len());
        let answered = queue.has_to_notify();
        if answered {
            io.notify_at_end(source.id);
        }
        if more {
            // Chains may remain: take them after this run's submit and harvest.
            io.wake_me();
        }
        if let Some(check_timer) = &mut check_timer
            && queue.accepts_chains()
            && let Some(due) = check_timer.next(clock::now(), popped > 0 || answered)
        {
            io.wake_me_at(due);
        }
        io.suspend().await;
    }
    drop((source, requests));
    StopAnswer::new(&queue)
}

/// Registers the queue as a source of the loop. Returns false if the loop receives no kicks:
/// without a kick that can be watched, the queue is checked at intervals.
fn register(io: &Rc<Io>, queue: &Rc<Queue>) -> (Registration, bool) {
    let add = |kick| {
        let source: Rc<dyn Source> = Rc::<Queue>::clone(queue);
        io.add_source(source, kick).map(|id| Registration { io: Rc::clone(io), id })
    };
    let Some(kick) = queue.take_kick() else { return (add(None).expect(WITHOUT_KICK), false) };
    match add(Some(kick)) {
        Ok(source) => (source, true),
        Err(error) => {
            queue.report_unwatched(&error);
            (add(None).expect(WITHOUT_KICK), false)
        }
    }
}

const WITHOUT_KICK: &str = "only a kick can be refused";

/// Continues requests, then pops and starts new ones. Returns how many it popped, and true if more
/// chains are available.
fn run<F: Future<Output = ()>>(
    queue: &Rc<Queue>,
    serve: impl Fn(Chain) -> F,
    requests: &mut TaskSet<F>,
    cx: &mut Context<'_>,
) -> (u16, bool) {
    requests.run_woken(cx);
    queue.publish_before_run();
    let (run, most) = queue.begin_run();
    let mut popped = 0;
    let more = loop {
        if popped == run.chains || queue.in_device() >= most {
            break queue.has_work();
        }
        match queue.pop() {
            Ok(Some(mut chain)) => {
                if !queue.admit(&mut chain) {
                    break false;
                }
                popped += 1;
                requests.spawn(cx, serve(chain));
                if run.publishes_each {
                    queue.publish_early();
                }
            }
            Ok(None) => break false,
            Err(error) => {
                queue.set_broken(&QueueFault::Ring(error));
                break false;
            }
        }
    };
    queue.count_run(popped);
    queue.publish_early();
    (popped, more)
}

/// The next check of a queue without a kick: soon while it has work, at growing intervals while it
/// has none.
struct CheckTimer {
    interval: Duration,
    due: Instant,
}

impl CheckTimer {
    fn new(now: Instant) -> Self {
        Self { interval: CHECK_INTERVALS[0], due: now }
    }

    /// The time of the next check, or `None` if the check that is already due suffices.
    fn next(&mut self, now: Instant, worked: bool) -> Option<Instant> {
        let [shortest, longest] = CHECK_INTERVALS;
        if worked {
            self.interval = shortest;
        } else if self.due <= now {
            self.interval = (2 * self.interval).min(longest);
        }
        let next = now + self.interval;
        if self.due > now && self.due <= next {
            return None;
        }
        self.due = next;
        Some(next)
    }
}

/// Waits until the popped requests are answered and their answers visible, except for resting
/// requests that this kind of stop may leave. Returns false if the stop was cancelled.
async fn finish<F: Future<Output = ()>>(
    io: &Io,
    queue: &Queue,
    source: &Registration,
    requests: &mut TaskSet<F>,
    handler: &impl Handler,
) -> bool {
    let mut reported = None;
    let left = loop {
        // The stop may have been cancelled and requested again with another kind since the last
        // pass.
        let kind = queue.stop_kind();
        if reported.replace(kind) != Some(kind) {
            handler.stop(queue, kind);
        }
        poll_fn(|cx| {
            requests.run_woken(cx);
            queue.publish_status(requests.len());
            Poll::Ready(())
        })
        .await;
        if !queue.is_to_stop() {
            return false;
        }
        let left = if kind == StopKind::KeepInflight { handler.waiting_count(queue) } else { 0 };
        if requests.len() == left {
            break left;
        }
        if queue.has_to_notify() {
            io.notify_at_end(source.id);
        }
        io.suspend().await;
    };
    let not_done = usize::from(queue.not_done());
    assert!(not_done == left, "invariant 3: a queue stops without an answer to what it popped");
    queue.finish();
    true
}

/// A registered source, removed when this is dropped.
struct Registration {
    io: Rc<Io>,
    id: SourceId,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.io.remove_source(self.id);
    }
}

/// The answer to a stop request, not yet sent.
pub(crate) struct StopAnswer {
    answer: oneshot::Sender<u32>,
    base: u32,
}

impl StopAnswer {
    fn new(queue: &Queue) -> Self {
        let answer = queue.take_stop().expect("a queue stops on a request that waits for it");
        Self { answer, base: queue.base() }
    }

    pub(crate) fn send(self) {
        self.answer.send(self.base);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::num::NonZeroU16;
    use std::sync::Arc;
    use std::task::Waker;

    use blockio::thread::Armed;
    use virtqueue::driver::{Desc, Used};
    use virtqueue::{LocalMemory, SplitQueue};

    use super::*;
    use crate::queue::QueueHandle;
    use crate::queue::data_budget::DataBudget;
    use crate::testing::{DATA, RING, Scene, count_of, new_eventfd};

    /// A limit of the kernel may be reached. The driver does not know that its kicks are lost.
    #[test]
    fn a_queue_whose_kick_cannot_be_watched_is_served() {
        let mut scene = Scene::new();
        scene.kick = scene.memory_file.try_clone().unwrap().into();
        let gate = Rc::new(Gate::default());
        gate.open();
        let handle = scene.start(Gated(gate));
        for _ in 0..3 {
            let head = scene.offer(&buffer()).into();
            assert_eq!(scene.answer(), Used { head, bytes: 7 });
        }
        let [told] = &scene.events.take()[..] else { panic!("it is not told once") };
        assert!(told.contains("queue 3") && told.contains("cannot be watched"), "{told}");
        assert_eq!(scene.wait(&handle.begin_final_stop()), 3);
    }

    /// Answers chains once it is open.
    #[derive(Default)]
    struct Gate {
        is_open: Cell<bool>,
        popped: Cell<u32>,
        queue: RefCell<Option<Rc<Queue>>>,
        wakers: RefCell<Vec<Waker>>,
    }

    impl Gate {
        fn open(&self) {
            self.is_open.set(true);
            self.wakers.take().into_iter().for_each(Waker::wake);
        }
    }

    /// Keeps chains until its queue stops, like the handler of an event queue.
    #[derive(Default)]
    struct Holder(RefCell<Vec<Chain>>);

    impl Handler for Holder {
        async fn serve(self: Rc<Self>, _: Rc<Queue>, chain: Chain) {
            self.0.borrow_mut().push(chain);
        }

        fn stop(&self, queue: &Queue, _: StopKind) {
            for chain in self.0.take() {
                queue.push(chain.head, 0);
            }
        }
    }

    /// A handler with requests that rest, except for one. Records each kind of stop.
    struct Resting(Gated, Rc<RefCell<Vec<StopKind>>>);

    impl Handler for Resting {
        async fn serve(self: Rc<Self>, queue: Rc<Queue>, chain: Chain) {
            Rc::new(Gated(Rc::clone(&self.0.0))).serve(queue, chain).await;
        }

        fn stop(&self, _: &Queue, kind: StopKind) {
            self.1.borrow_mut().push(kind);
        }

        fn waiting_count(&self, queue: &Queue) -> usize {
            // The last one is at the disk.
            usize::from(queue.not_done()).saturating_sub(1)
        }
    }

    struct Gated(Rc<Gate>);

    impl Handler for Gated {
        async fn serve(self: Rc<Self>, queue: Rc<Queue>, chain: Chain) {
            self.0.popped.set(self.0.popped.get() + 1);
            *self.0.queue.borrow_mut() = Some(Rc::clone(&queue));
            poll_fn(|cx| {
                if self.0.is_open.get() {
                    return Poll::Ready(());
                }
                self.0.wakers.borrow_mut().push(cx.waker().clone());
                Poll::Pending
            })
            .await;
            queue.push(chain.head, 7);
        }
    }

    /// A scene with a queue whose chains wait for the gate.
    fn gated() -> (Scene, Rc<Gate>, QueueHandle) {
        let (scene, gate) = (Scene::new(), Rc::<Gate>::default());
        let handle = scene.start(Gated(Rc::clone(&gate)));
        (scene, gate, handle)
    }

    fn buffer() -> [Desc; 1] {
        [Desc::writable(DATA, 8)]
    }

    #[test]
    fn event_buffers_are_held_and_given_back_at_a_stop() {
        let mut scene = Scene::new();
        let handle = scene.start(Holder::default());
        let heads: Vec<u32> = (0..40).map(|_| scene.offer(&buffer()).into()).collect();
        scene.turn(50);
        assert_eq!(handle.next_avail(), 40, "all are taken");
        assert_eq!(handle.view().requests(), 0, "none of them is a request");
        assert_eq!(scene.driver.take_used(), None);
        assert_eq!(scene.wait(&handle.begin_final_stop()), 40);
        assert_eq!(scene.stats.called_answers.get(), 40, "one call announces all of them");
        for head in heads {
            assert_eq!(scene.driver.take_used(), Some(Used { head, bytes: 0 }));
        }
        assert_eq!(scene.driver.take_used(), None);
        assert_eq!((scene.thread.io().tasks(), scene.thread.io().ops()), (0, 0));
    }

    #[test]
    fn a_stop_waits_for_popped_requests_only() {
        let (mut scene, gate, handle) = gated();
        // More than the first run takes.
        for _ in 0..20 {
            scene.offer(&buffer());
        }
        scene.turn(10);
        assert_eq!(gate.popped.get(), 20);
        let watch = handle.view();
        assert_eq!(watch.requests(), 20);
        let stopped = handle.begin_final_stop();
        scene.turn(10);
        assert!(stopped.check() == Poll::Pending && watch.has_taken_commands());
        scene.offer(&buffer());
        scene.turn(10);
        assert_eq!(gate.popped.get(), 20, "a chain was popped after the stop");
        gate.open();
        assert_eq!(scene.wait(&stopped), 20);
        for _ in 0..20 {
            assert_eq!(scene.driver.take_used().map(|used| used.bytes), Some(7));
        }
        assert_eq!(scene.driver.take_used(), None);
        assert_eq!(watch.requests(), 0);
    }

    #[test]
    fn a_queue_that_stops_can_be_told_to_go_on() {
        let (mut scene, gate, handle) = gated();
        scene.offer(&buffer());
        scene.turn(10);
        // The queue either waits for requests already, or has not yet seen the stop.
        for (popped, turns) in [(2, 10), (3, 0)] {
            let stopped = handle.begin_final_stop();
            scene.turn(turns);
            scene.offer(&buffer());
            scene.turn(turns);
            let resumed = handle.begin_resume();
            scene.wait(&resumed);
            scene.turn(10);
            assert_eq!(gate.popped.get(), popped, "it does not look at what has come meanwhile");
            assert_eq!(stopped.check(), Poll::Ready(None));
        }
        gate.open();
        scene.offer(&buffer());
        let stopped = handle.begin_final_stop();
        assert_eq!(scene.wait(&stopped), 4);
        let resumed = handle.begin_resume();
        scene.turn(10);
        assert_eq!(resumed.check(), Poll::Ready(None), "it has stopped");
        for _ in 0..4 {
            assert_eq!(scene.driver.take_used().map(|used| used.bytes), Some(7));
        }
        assert_eq!((scene.thread.io().tasks(), scene.thread.io().ops()), (0, 0));
    }

    /// After the second stop no process would find requests left in the region.
    #[test]
    fn a_queue_that_is_told_again_how_to_stop_does_that() {
        let mut scene = Scene::new();
        scene.mark_requests();
        let (gate, kinds) = (Rc::new(Gate::default()), Rc::default());
        let handle = scene.start(Resting(Gated(Rc::clone(&gate)), Rc::clone(&kinds)));
        for _ in 0..3 {
            scene.offer(&buffer());
        }
        scene.turn(10);
        let to_leave = handle.begin_stop(StopKind::KeepInflight);
        scene.turn(10);
        let (_goes_on, stopped) = (handle.begin_resume(), handle.begin_final_stop());
        scene.turn(10);
        assert_eq!(*kinds.borrow(), [StopKind::KeepInflight, StopKind::Final]);
        assert_eq!(to_leave.check(), Poll::Ready(None));
        gate.open();
        assert_eq!(scene.wait(&stopped), 3);
        for _ in 0..3 {
            assert_eq!(scene.driver.take_used().map(|used| used.bytes), Some(7));
        }
    }

    #[test]
    fn a_fence_waits_for_requests_that_have_begun() {
        let (mut scene, gate, handle) = gated();
        scene.offer(&buffer());
        scene.offer(&buffer());
        scene.turn(10);
        let queue = gate.queue.take().unwrap();
        let token = Rc::new(());
        queue.raise_barrier(Box::new(Rc::clone(&token)));
        scene.turn(10);
        assert!(queue.barrier.checks_access.get() && Rc::strong_count(&token) == 2);
        gate.open();
        scene.turn(10);
        assert_eq!(Rc::strong_count(&token), 1);
        drop((gate.queue.take(), queue));
        assert_eq!(scene.wait(&handle.begin_final_stop()), 2);
    }

    /// Makes an earlier process take the available chains and die.
    fn take_elsewhere(scene: &mut Scene) {
        let account = scene.mark_requests();
        let memory = LocalMemory::new(Arc::clone(&scene.memory));
        let config = RING.config(false, false);
        let mut dying = SplitQueue::with_inflight(memory, config, &account).unwrap().0;
        assert!(dying.pop().unwrap().is_some(), "it has seen all of them");
    }

    /// Its chains may wait for ever, and stay in the region where that is possible.
    #[test]
    fn a_queue_that_is_to_stop_takes_inherited_requests_though_its_lists_are_full() {
        let mut scene = Scene::new();
        for _ in 0..3 {
            scene.offer_without_kick(&[Desc::writable(DATA, 8); 20]);
        }
        take_elsewhere(&mut scene);
        scene.tuning.long_lists_bytes = 1;
        let gate = Rc::new(Gate::default());
        let handle = scene.start(Gated(Rc::clone(&gate)));
        scene.turn(10);
        assert_eq!(gate.popped.get(), 1);
        let stopped = handle.begin_final_stop();
        scene.turn(10);
        assert_eq!(gate.popped.get(), 3, "it waits for the request that it has");
        gate.open();
        assert_eq!(scene.wait(&stopped), 3);
    }

    /// Later requests wait for them, as for all large ones.
    #[test]
    fn large_requests_of_an_earlier_process_count_though_there_is_no_room() {
        let mut scene = Scene::new();
        for _ in 0..3 {
            scene.offer_without_kick(&large());
        }
        take_elsewhere(&mut scene);
        scene.data_budget = Arc::new(DataBudget::new(1));
        let gate = Rc::new(Gate::default());
        let handle = scene.start(Gated(Rc::clone(&gate)));
        scene.offer(&large());
        scene.turn(10);
        assert_eq!((gate.popped.get(), scene.data_budget.bytes()), (3, 3 * (4 << 20)));
        gate.open();
        scene.turn(20);
        assert_eq!((gate.popped.get(), scene.data_budget.bytes()), (4, 0));
        assert_eq!(scene.wait(&handle.begin_final_stop()), 4);
    }

    /// The ring is lost, and the chains that are left with it.
    #[test]
    fn a_queue_with_a_broken_ring_stops_though_inherited_requests_are_left() {
        let mut scene = Scene::new();
        let heads = [(); 3].map(|()| scene.offer_without_kick(&buffer()));
        take_elsewhere(&mut scene);
        let endless = Desc::writable(DATA, 8).then(heads[1]);
        scene.driver.ring().put_desc(heads[1], endless);
        let gate = Rc::new(Gate::default());
        gate.open();
        let handle = scene.start(Gated(Rc::clone(&gate)));
        scene.turn(10);
        assert_eq!(gate.popped.get(), 1);
        let _ = scene.wait(&handle.begin_final_stop());
    }

    /// The next start finds none of these chains in the avail ring.
    #[test]
    fn a_queue_does_not_stop_before_it_has_done_inherited_requests() {
        let mut scene = Scene::new();
        let heads: Vec<u32> = (0..30).map(|_| scene.offer_without_kick(&buffer()).into()).collect();
        take_elsewhere(&mut scene);
        let later = scene.offer_without_kick(&buffer());

        scene.tuning.run_max = NonZeroU16::new(1);
        let gate = Rc::new(Gate::default());
        gate.open();
        let handle = scene.start(Gated(gate));
        assert_eq!(scene.events.take(), ["queue 3: Known { requests: 30 }"]);
        let next_avail = scene.wait(&handle.begin_final_stop());
        for head in heads {
            assert_eq!(scene.driver.take_used(), Some(Used { head, bytes: 7 }));
        }
        // The queue may or may not have reached the chain that the earlier process did not see.
        let is_later = |used: Used| used.head == u32::from(later);
        assert_eq!(next_avail, 30 + u32::from(scene.driver.take_used().is_some_and(is_later)));
        let handle = scene.start(Holder::default());
        assert_eq!(scene.events.take(), ["queue 3: Known { requests: 0 }"], "marks are left");
        let _ = scene.wait(&handle.begin_final_stop());
    }

    /// A driver that breaks the rules harms only itself.
    #[test]
    fn a_chain_with_many_buffers_may_come_again_before_it_is_answered() {
        let (mut scene, gate, handle) = gated();
        let head = scene.offer(&[Desc::writable(DATA, 8); 20]);
        let again = scene.driver.ring().avail_idx();
        scene
            .memory
            .write(RING.avail_ring + 4 + 2 * u64::from(again), &head.to_le_bytes())
            .unwrap();
        scene.driver.ring().put_avail_idx(again + 1);
        scene.kick();
        scene.turn(10);
        assert_eq!(gate.popped.get(), 2);
        assert_eq!(scene.thread.io().stats().lists.bytes.get(), 2 * 20 * 16);
        gate.open();
        scene.turn(10);
        assert_eq!(scene.thread.io().stats().lists.bytes.get(), 0);
        assert_eq!(scene.wait(&handle.begin_final_stop()), 2);
        assert_eq!(scene.driver.ring().used_idx(), 2);
    }

    /// Answers chains in the order of a list.
    struct Shuffled(Rc<Gate>, Vec<u16>);

    impl Handler for Shuffled {
        async fn serve(self: Rc<Self>, queue: Rc<Queue>, chain: Chain) {
            poll_fn(|cx| {
                let done = usize::try_from(self.0.popped.get()).unwrap();
                if self.1.get(done) == Some(&chain.head) {
                    return Poll::Ready(());
                }
                self.0.wakers.borrow_mut().push(cx.waker().clone());
                Poll::Pending
            })
            .await;
            self.0.popped.set(self.0.popped.get() + 1);
            queue.push(chain.head, chain.head.into());
            self.0.open();
        }
    }

    #[test]
    fn answers_wait_for_their_turn_where_they_must_be_in_order() {
        // A region of the daemon's own is none of the front-end, which has no order without one.
        for (in_order, region_is_own) in [
            (false, None),
            (true, None),
            (false, Some(true)),
            (true, Some(true)),
            (true, Some(false)),
        ] {
            let mut scene = Scene::new();
            scene.in_order = in_order;
            if let Some(region_is_own) = region_is_own {
                scene.mark_requests();
                scene.region_is_own = region_is_own;
            }
            let in_order = in_order && region_is_own != Some(false);
            let heads: Vec<u16> = (0..6).map(|_| scene.offer_without_kick(&buffer())).collect();
            let done: Vec<u16> = [2, 1, 0, 5, 3, 4].map(|at| heads[at]).into();
            let handle = scene.start(Shuffled(Rc::default(), done.clone()));
            scene.turn(50);
            for expected in if in_order { heads } else { done } {
                let used = Used { head: expected.into(), bytes: expected.into() };
                assert_eq!(scene.driver.take_used(), Some(used));
            }
            let _ = scene.wait(&handle.begin_final_stop());
        }
    }

    /// A driver that breaks the rules has no order, and gets all its answers even so.
    #[test]
    fn answers_that_should_be_in_order_come_though_the_driver_has_none() {
        for has_head_twice in [true, false] {
            let mut scene = Scene::new();
            scene.in_order = true;
            let mut heads = [(); 3].map(|()| scene.offer_without_kick(&buffer()));
            let put = |scene: &Scene, index: u64, head: u16| {
                let entry = RING.avail_ring + 4 + 2 * index;
                scene.memory.write(entry, &head.to_le_bytes()).unwrap();
            };
            let gate = Rc::new(Gate::default());
            let handle = if has_head_twice {
                heads[2] = heads[1];
                put(&scene, 2, heads[1]);
                let done = vec![heads[1], heads[1], heads[0]];
                scene.start(Shuffled(Rc::clone(&gate), done))
            } else {
                scene.start(Gated(Rc::clone(&gate)))
            };
            scene.turn(10);
            assert_eq!(gate.popped.get(), 3);
            if !has_head_twice {
                put(&scene, 0, 60);
            }
            gate.open();
            assert_eq!(scene.wait(&handle.begin_final_stop()), 3);
            let used = std::iter::from_fn(|| scene.driver.take_used());
            let mut answered: Vec<u32> = used.map(|used| used.head).collect();
            answered.sort_unstable();
            heads.sort_unstable();
            assert_eq!(answered, heads.map(u32::from));
        }
    }

    /// A thread that finds work it does not do would never sleep.
    #[test]
    fn a_queue_that_stops_has_no_work_in_its_ring() {
        let mut scene = Scene::new();
        let gate = Rc::new(Gate::default());
        let handle = scene.start(Gated(Rc::clone(&gate)));
        scene.offer(&buffer());
        scene.turn(10);
        let stopped = handle.begin_final_stop();
        scene.turn(10);
        scene.offer(&buffer());
        scene.turn(10);
        let queue = gate.queue.take().unwrap();
        assert!(matches!(queue.arm(Instant::now()), Armed::Full) && !queue.has_work());
        drop(queue);
        gate.open();
        assert_eq!(scene.wait(&stopped), 1);
    }

    #[test]
    fn a_queue_with_a_bad_ring_reports_it_and_stops_on_request() {
        // The avail idx shows more chains than the ring has room for, or one was taken back.
        [1000, 0].into_iter().for_each(check_that_a_bad_ring_is_told);
    }

    fn check_that_a_bad_ring_is_told(avail_idx: u16) {
        let mut scene = Scene::new();
        let gate = Rc::new(Gate::default());
        gate.open();
        let handle = scene.start(Gated(gate));
        scene.offer(&buffer());
        assert_eq!(scene.answer().bytes, 7);
        scene.driver.ring().put_avail_idx(avail_idx);
        scene.kick();
        scene.turn(10);
        let heard = scene.events.take();
        assert!(
            heard.len() == 1 && heard[0].starts_with("queue 3: a queue"),
            "invariant 9: {heard:?}"
        );
        assert_eq!(count_of(&scene.err), 1);
        // An eventfd that arrives later is notified, too.
        let err = new_eventfd();
        handle.set_err(Some(err.try_clone().unwrap()));
        scene.turn(10);
        assert_eq!(count_of(&err), 1);
        assert_eq!(scene.wait(&handle.begin_final_stop()), 1);
        assert!(scene.events.take().is_empty());
    }

    #[test]
    fn a_call_is_forced_at_the_start_and_when_the_eventfd_is_replaced() {
        let scene = Scene::new();
        let handle = scene.start(Holder::default());
        scene.turn(10);
        assert_eq!(count_of(&scene.call), 1, "invariant 8: no call at the start");
        let call = new_eventfd();
        handle.set_call(Some(call.try_clone().unwrap()));
        scene.turn(10);
        assert_eq!((count_of(&scene.call), count_of(&call)), (0, 1));
        assert_eq!(scene.wait(&handle.begin_final_stop()), 0);
    }

    /// The most unanswered requests include those that wait in the ring.
    #[test]
    fn calls_and_the_depth_are_counted_as_the_driver_sees_them() {
        let (mut scene, gate, handle) = gated();
        scene.turn(10);
        let mut calls = count_of(&scene.call);
        for _ in 0..3 {
            scene.offer_without_kick(&buffer());
        }
        scene.kick();
        scene.turn(10);
        assert_eq!(scene.stats.take_peaks().depth, 3);
        gate.open();
        for _ in 0..3 {
            scene.answer();
        }
        for _ in 0..4 {
            scene.offer(&buffer());
            scene.answer();
        }
        assert_eq!(scene.stats.take_peaks().depth, 1);
        scene.turn(10);
        calls += count_of(&scene.call);
        assert_eq!(scene.stats.calls.get(), calls);
        assert_eq!(scene.stats.called_answers.get(), 7, "each call announces its own answers");
        assert_eq!(scene.wait(&handle.begin_final_stop()), 7);
    }

    #[test]
    fn a_stop_is_heard_once_it_is_carried_out() {
        let scene = Scene::new();
        let handle = scene.start(Holder::default());
        let watch = handle.view();
        handle.set_call(None);
        let stopped = handle.begin_final_stop();
        assert!(!watch.has_taken_commands() && stopped.check() == Poll::Pending);
        assert_eq!(scene.wait(&stopped), 0);
        assert!(watch.has_taken_commands());
    }

    /// The stop was posted before the IoThread ended and never ran, or came afterwards.
    #[test]
    fn a_stop_is_answered_with_nothing_when_the_io_thread_has_ended() {
        for is_posted in [true, false] {
            let scene = Scene::new();
            let mut handle = Some(scene.start(Holder::default()));
            scene.turn(10);
            let watch = handle.as_ref().map(QueueHandle::view);
            let mut stop = || handle.take().map(|handle| handle.begin_final_stop());
            let posted = is_posted.then(&mut stop).flatten();
            drop(scene);
            let stopped = posted.or_else(stop).unwrap();
            assert_eq!(stopped.check(), Poll::Ready(None));
            assert!(watch.is_some_and(|watch| watch.has_taken_commands()), "it waits for nothing");
        }
    }

    #[test]
    fn a_queue_without_work_is_looked_at_ever_less() {
        let [shortest, longest] = CHECK_INTERVALS;
        let mut now = Instant::now();
        let mut check_timer = CheckTimer::new(now);
        let mut count = 0;
        let end = now + Duration::from_secs(10);
        while now < end {
            let due = check_timer.next(now, false).expect("nothing else would wake the queue");
            assert!(due > now && due <= now + longest);
            assert_eq!(check_timer.next(now, false), None, "one timer for each look");
            // A wake-up in between, for another reason.
            assert_eq!(check_timer.next(now + (due - now) / 2, false), None);
            (now, count) = (due, count + 1);
        }
        assert!(count < 2600, "{count} looks in 10 s at a queue without work");
        // Work brings the next check forward. More work at the same moment sets no timer.
        assert_eq!(check_timer.next(now, false), Some(now + longest));
        let worked = now + longest / 2;
        assert_eq!(check_timer.next(worked, true), Some(worked + shortest));
        assert_eq!(check_timer.next(worked + shortest / 2, true), None);
        // The later check finds nothing due.
        let next = check_timer.next(worked + shortest, false).unwrap();
        assert_eq!(next, worked + 3 * shortest);
    }

    /// A request of 4 MiB.
    fn large() -> [Desc; 8] {
        [Desc::writable(DATA, 512 << 10); 8]
    }

    /// Readable data counts as well: a write is as long as a read.
    #[test]
    fn a_request_is_large_by_all_of_its_data() {
        const SMALL: u32 = 128 << 10;
        for (chain, popped) in [
            (&[Desc::readable(DATA, SMALL)][..], 3),
            (&[Desc::writable(DATA, SMALL)], 3),
            (&[Desc::readable(DATA, SMALL + 1)], 1),
            (&[Desc::writable(DATA, SMALL + 1)], 1),
            (&[Desc::readable(DATA, SMALL / 2), Desc::writable(DATA, SMALL / 2)], 3),
            (&[Desc::readable(DATA, SMALL / 2), Desc::writable(DATA, SMALL / 2 + 1)], 1),
        ] {
            let mut scene = Scene::new();
            scene.data_budget = Arc::new(DataBudget::new(1));
            let gate = Rc::new(Gate::default());
            let handle = scene.start(Gated(Rc::clone(&gate)));
            for _ in 0..3 {
                scene.offer(chain);
            }
            scene.turn(10);
            assert_eq!(gate.popped.get(), popped, "{chain:?}");
            gate.open();
            scene.turn(20);
            assert_eq!(scene.wait(&handle.begin_final_stop()), 3, "{chain:?}");
            assert_eq!(scene.data_budget.bytes(), 0, "{chain:?}");
        }
    }

    #[test]
    fn large_requests_wait_in_the_ring_while_their_device_has_too_many() {
        let mut scenes = [Scene::new(), Scene::new()];
        let data_budget = Arc::new(DataBudget::new(8 << 20));
        let gates = [(); 2].map(|()| Rc::new(Gate::default()));
        let mut handles = Vec::new();
        for (scene, gate) in scenes.iter_mut().zip(&gates) {
            scene.data_budget = Arc::clone(&data_budget);
            handles.push(scene.start(Gated(Rc::clone(gate))));
        }
        let popped = || gates.each_ref().map(|gate| gate.popped.get());
        let turn = |scenes: &[Scene; 2]| {
            for _ in 0..10 {
                scenes.iter().for_each(|scene| scene.turn(1));
            }
        };
        for _ in 0..5 {
            scenes[0].offer(&large());
        }
        scenes[1].offer(&buffer());
        turn(&scenes);
        assert_eq!(popped(), [2, 1]);
        assert_eq!(handles[0].view().large_bytes(), 8 << 20);
        assert!(handles[0].is_full() && !handles[1].is_full());
        // Small requests of the second queue continue. Its large ones wait behind earlier ones.
        scenes[1].offer(&large());
        scenes[1].offer(&buffer());
        turn(&scenes);
        assert_eq!(popped(), [2, 1]);
        gates[0].open();
        turn(&scenes);
        assert_eq!(popped(), [5, 3]);
        assert_eq!(handles[0].view().large_bytes(), 0);
        assert_eq!(handles[1].view().large_bytes(), 4 << 20);
        gates[1].open();
        for (scene, (handle, popped)) in scenes.iter().zip(handles.iter().zip([5, 3])) {
            assert_eq!(scene.wait(&handle.begin_final_stop()), popped);
        }
        assert_eq!(data_budget.bytes(), 0);
    }

    #[test]
    fn a_stop_leaves_large_requests_in_the_ring_and_makes_way() {
        let mut scenes = [Scene::new(), Scene::new()];
        let data_budget = Arc::new(DataBudget::new(1 << 20));
        let gates = [(); 2].map(|()| Rc::new(Gate::default()));
        let mut handles = Vec::new();
        for (scene, gate) in scenes.iter_mut().zip(&gates) {
            scene.data_budget = Arc::clone(&data_budget);
            scene.mark_requests();
            handles.push(scene.start(Gated(Rc::clone(gate))));
            scene.offer(&large());
            scene.turn(10);
        }
        assert_eq!(gates[0].popped.get(), 1, "one goes, however large it is");
        assert_eq!(gates[1].popped.get(), 0);
        scenes[0].offer(&large());
        scenes[0].turn(10);
        // The first queue in line stops and leaves the line.
        assert_eq!(scenes[1].wait(&handles[1].begin_final_stop()), 0);
        gates[0].open();
        scenes[0].turn(10);
        assert_eq!(gates[0].popped.get(), 2);
        assert_eq!(scenes[0].wait(&handles[0].begin_final_stop()), 2);
        // The next start finds the request in the ring.
        gates[1].open();
        let handle = scenes[1].start(Gated(Rc::clone(&gates[1])));
        scenes[1].turn(10);
        assert_eq!(scenes[1].wait(&handle.begin_final_stop()), 1);
        assert_eq!(gates[1].popped.get(), 1);
    }

    /// Otherwise a busy queue would keep the others waiting for ever.
    #[test]
    fn a_large_request_that_comes_late_waits_behind_those_of_other_queues() {
        let mut scenes = [Scene::new(), Scene::new(), Scene::new()];
        let data_budget = Arc::new(DataBudget::new(1 << 20));
        let gates = [(); 3].map(|()| Rc::new(Gate::default()));
        let mut handles = Vec::new();
        for (scene, gate) in scenes.iter_mut().zip(&gates) {
            scene.data_budget = Arc::clone(&data_budget);
            handles.push(scene.start(Gated(Rc::clone(gate))));
        }
        let popped = || gates.each_ref().map(|gate| gate.popped.get());
        for scene in &mut scenes[..2] {
            scene.offer(&large());
            scene.turn(10);
        }
        gates[0].open();
        scenes[0].turn(10);
        scenes[2].offer(&large());
        scenes[2].turn(10);
        assert_eq!(popped(), [1, 0, 0], "there is room, and the second queue is first in line");
        for turns in [1, 2] {
            scenes[turns].turn(10);
            gates[turns].open();
            scenes[turns].turn(10);
        }
        for (scene, handle) in scenes.iter().zip(&handles) {
            assert_eq!(scene.wait(&handle.begin_final_stop()), 1);
        }
        assert_eq!(popped(), [1, 1, 1]);
    }

    #[test]
    fn room_for_several_queues_is_used_by_all_of_them() {
        let mut scenes = [Scene::new(), Scene::new(), Scene::new()];
        let data_budget = Arc::new(DataBudget::new(8 << 20));
        let gates = [(); 3].map(|()| Rc::new(Gate::default()));
        let mut handles = Vec::new();
        for (scene, (gate, count)) in scenes.iter_mut().zip(gates.iter().zip([2, 1, 1])) {
            scene.data_budget = Arc::clone(&data_budget);
            handles.push(scene.start(Gated(Rc::clone(gate))));
            for _ in 0..count {
                scene.offer(&large());
            }
            scene.turn(10);
        }
        let popped = || gates.each_ref().map(|gate| gate.popped.get());
        assert_eq!(popped(), [2, 0, 0]);
        gates[0].open();
        scenes.iter().for_each(|scene| scene.turn(10));
        assert_eq!(popped(), [2, 1, 1], "there is room for both");
        gates.iter().for_each(|gate| gate.open());
        for (scene, (handle, popped)) in scenes.iter().zip(handles.iter().zip([2, 1, 1])) {
            assert_eq!(scene.wait(&handle.begin_final_stop()), popped);
        }
    }

    /// A stop may take long, because it waits for the requests of the queue.
    #[test]
    fn a_queue_that_still_stops_keeps_no_other_from_its_turn() {
        let mut scenes = [Scene::new(), Scene::new(), Scene::new()];
        let data_budget = Arc::new(DataBudget::new(1 << 20));
        let gates = [(); 3].map(|()| Rc::new(Gate::default()));
        let mut handles = Vec::new();
        for (scene, gate) in scenes.iter_mut().zip(&gates) {
            scene.data_budget = Arc::clone(&data_budget);
            handles.push(scene.start(Gated(Rc::clone(gate))));
        }
        let popped = || gates.each_ref().map(|gate| gate.popped.get());
        let turn = |scenes: &[Scene; 3]| {
            for _ in 0..10 {
                scenes.iter().for_each(|scene| scene.turn(1));
            }
        };
        scenes[1].offer(&buffer());
        turn(&scenes);
        for scene in &mut scenes {
            scene.offer(&large());
            scene.turn(10);
        }
        assert_eq!(popped(), [1, 1, 0], "two large requests wait");
        let stopped = handles[1].begin_final_stop();
        turn(&scenes);
        gates[0].open();
        turn(&scenes);
        assert_eq!(popped(), [1, 1, 1], "the third queue waits for one that stops");
        // Its place in line is lost, and its request is not.
        let resumed = handles[1].begin_resume();
        scenes[1].wait(&resumed);
        gates[2].open();
        turn(&scenes);
        assert_eq!(popped(), [1, 2, 1]);
        assert_eq!(stopped.check(), Poll::Ready(None));
        gates[1].open();
        for (scene, (handle, popped)) in scenes.iter().zip(handles.iter().zip([1, 2, 1])) {
            assert_eq!(scene.wait(&handle.begin_final_stop()), popped);
        }
        assert_eq!(data_budget.bytes(), 0);
    }

    /// A queue with a bad ring takes nothing any longer.
    #[test]
    fn a_queue_whose_ring_is_bad_keeps_no_other_from_its_turn() {
        let mut scenes = [Scene::new(), Scene::new(), Scene::new()];
        let data_budget = Arc::new(DataBudget::new(1 << 20));
        let gates = [(); 3].map(|()| Rc::new(Gate::default()));
        let mut handles = Vec::new();
        let mut heads = Vec::new();
        for (scene, gate) in scenes.iter_mut().zip(&gates) {
            scene.data_budget = Arc::clone(&data_budget);
            handles.push(scene.start(Gated(Rc::clone(gate))));
            heads.push(scene.offer(&large()));
            scene.turn(10);
        }
        let popped = || gates.each_ref().map(|gate| gate.popped.get());
        assert_eq!(popped(), [1, 0, 0]);
        // The chain waits in the ring, and becomes endless.
        let endless = Desc::writable(DATA, 8).then(heads[1]);
        scenes[1].driver.ring().put_desc(heads[1], endless);
        gates[0].open();
        for _ in 0..20 {
            scenes.iter().for_each(|scene| scene.turn(1));
        }
        assert_eq!(scenes[1].events.take().len(), 1);
        assert_eq!(popped(), [1, 0, 1]);
        gates[2].open();
        for (scene, handle) in scenes.iter().zip(&handles) {
            let _ = scene.wait(&handle.begin_final_stop());
        }
        assert_eq!(data_budget.bytes(), 0);
    }

    /// No process would find requests in the region of a bad ring.
    #[test]
    fn a_queue_leaves_requests_only_in_a_region_of_a_sound_ring() {
        for (kind, is_marked, is_bad, expected) in [
            (StopKind::KeepInflight, true, false, StopKind::KeepInflight),
            (StopKind::KeepInflight, true, true, StopKind::Final),
            (StopKind::KeepInflight, false, false, StopKind::Final),
            (StopKind::DriverGone, true, false, StopKind::KeepInflight),
            (StopKind::DriverGone, true, true, StopKind::DriverGone),
            (StopKind::DriverGone, false, false, StopKind::DriverGone),
            (StopKind::Pause, true, true, StopKind::Pause),
            (StopKind::Final, true, false, StopKind::Final),
        ] {
            let mut scene = Scene::new();
            if is_marked {
                scene.mark_requests();
            }
            let (gate, kinds) = (Rc::new(Gate::default()), Rc::default());
            let handle = scene.start(Resting(Gated(Rc::clone(&gate)), Rc::clone(&kinds)));
            scene.offer(&buffer());
            scene.turn(10);
            if is_bad {
                scene.driver.ring().put_avail_idx(1000);
                scene.kick();
                scene.turn(10);
            }
            let stopped = handle.begin_stop(kind);
            scene.turn(10);
            assert_eq!(*kinds.borrow(), [expected], "{kind:?} {is_marked} {is_bad}");
            gate.open();
            assert_eq!(scene.wait(&stopped), 1);
        }
    }

    /// Counts zeroes for each chain until the gate opens.
    struct Zeroes(Rc<Gate>);

    impl Handler for Zeroes {
        async fn serve(self: Rc<Self>, queue: Rc<Queue>, chain: Chain) {
            let _counted = queue.count_zeroes(32 << 20);
            Rc::new(Gated(Rc::clone(&self.0))).serve(queue, chain).await;
        }
    }

    #[test]
    fn a_queue_takes_nothing_while_it_has_too_many_zeroes_to_write() {
        let mut scene = Scene::new();
        let gate = Rc::new(Gate::default());
        let handle = scene.start(Zeroes(Rc::clone(&gate)));
        for _ in 0..9 {
            scene.offer(&buffer());
        }
        scene.turn(10);
        assert_eq!(gate.popped.get(), 2);
        gate.open();
        scene.turn(20);
        assert_eq!(gate.popped.get(), 9);
        // A queue that has no more zeroes is out of the way of other queues.
        let (mut other, open) = (Scene::new(), Rc::new(Gate::default()));
        other.data_budget = Arc::clone(&scene.data_budget);
        open.open();
        let beside = other.start(Gated(Rc::clone(&open)));
        other.offer(&large());
        other.turn(20);
        assert_eq!(open.popped.get(), 1, "the queue still waits for room");
        assert_eq!(other.wait(&beside.begin_final_stop()), 1);
        assert_eq!(scene.wait(&handle.begin_final_stop()), 9);
        assert_eq!(scene.data_budget.bytes(), 0);
    }
}
