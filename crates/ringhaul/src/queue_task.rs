//! The task of one virtqueue: wait for a kick, pop, start requests, stop. Read this second, after
//! `blockio::io_thread`.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use blockio::{Io, Source, TaskSet, clock};

use crate::blk::{Blk, request};
use crate::pending::Answer;
use crate::queue::{Queue, Registration};

/// Chains popped in one run. Between runs ops are submitted, completions harvested and the driver
/// called, so a smaller number lets the driver go on earlier, and a larger one saves system calls.
const CHAINS_PER_RUN: usize = 16;

/// How soon a queue without a kick is looked at again, after it had work and when it had none for
/// long.
const LOOK_INTERVALS: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(4)];

/// Serves `queue` until it is told to stop. Who asked for that is answered by the caller, when
/// nothing of the queue is left: its memory may be gone right after.
pub(crate) async fn serve(io: Rc<Io>, queue: Rc<Queue>, blk: Rc<Blk>) -> Stopped {
    poll_fn(|cx| {
        queue.set_waker(cx.waker());
        Poll::Ready(())
    })
    .await;
    let source: Rc<dyn Source> = Rc::<Queue>::clone(&queue);
    let kick = queue.take_kick();
    let mut looks = kick.is_none().then(|| Looks::new(clock::now()));
    let source = match io.add_source(source, kick) {
        Ok(id) => Registration { io: Rc::clone(&io), id },
        Err(error) => {
            blk.cannot_serve(&queue, &error);
            return wait_for_stop(&io, &queue).await.of(&queue);
        }
    };
    let mut requests = TaskSet::new(Rc::clone(&io));
    let stop = loop {
        let popped = poll_fn(|cx| {
            requests.run_woken(cx);
            for popped in 0..CHAINS_PER_RUN {
                match queue.pop() {
                    Ok(Some(chain)) => {
                        queue.count_lists(&chain);
                        let request = request::serve(Rc::clone(&blk), Rc::clone(&queue), chain);
                        requests.spawn(cx, request);
                    }
                    Ok(None) => return Poll::Ready(popped),
                    Err(error) => {
                        blk.ring_is_bad(&queue, &error);
                        return Poll::Ready(popped);
                    }
                }
            }
            Poll::Ready(CHAINS_PER_RUN)
        })
        .await;
        if let Some(reply) = queue.take_commands() {
            break Stop(reply);
        }
        queue.show_requests(requests.len());
        let answered = queue.has_unpublished();
        if answered {
            io.notify_at_end(source.id);
        }
        if popped == CHAINS_PER_RUN {
            // There may be more: after this run's submit, harvest and notify.
            io.wake_me();
        }
        if let Some(looks) = &mut looks
            && queue.takes_chains()
            && let Some(due) = looks.next(clock::now(), popped > 0 || answered)
        {
            io.wake_me_at(due);
        }
        io.suspend().await;
    };
    finish(&io, &queue, &source, &mut requests).await;
    drop(source);
    stop.of(&queue)
}

/// When a queue without a kick is looked at: soon while it has work, ever later while it has none.
struct Looks {
    interval: Duration,
    due: Instant,
}

impl Looks {
    fn new(now: Instant) -> Self {
        Self { interval: LOOK_INTERVALS[0], due: now }
    }

    /// When to look next, unless the look that is due already will do.
    fn next(&mut self, now: Instant, worked: bool) -> Option<Instant> {
        let [shortest, longest] = LOOK_INTERVALS;
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

/// Waits until the requests that were popped are answered, and their answers are visible.
async fn finish<F: Future<Output = ()>>(
    io: &Io,
    queue: &Queue,
    source: &Registration,
    requests: &mut TaskSet<F>,
) {
    queue.set_stopping();
    loop {
        poll_fn(|cx| {
            requests.run_woken(cx);
            queue.show_requests(requests.len());
            Poll::Ready(())
        })
        .await;
        // Eventfds may be replaced while a slow disk keeps the queue from stopping.
        let _ = queue.take_commands();
        if requests.is_empty() {
            break;
        }
        if queue.has_unpublished() {
            io.notify_at_end(source.id);
        }
        io.suspend().await;
    }
    queue.notify();
}

async fn wait_for_stop(io: &Io, queue: &Queue) -> Stop {
    loop {
        if let Some(reply) = queue.take_commands() {
            return Stop(reply);
        }
        io.suspend().await;
    }
}

/// Somebody waits to hear that the queue has stopped.
struct Stop(Answer<u16>);

impl Stop {
    fn of(self, queue: &Queue) -> Stopped {
        Stopped { answer: self.0, next_avail: queue.next_avail() }
    }
}

/// A queue has stopped, and nobody has been told.
pub(crate) struct Stopped {
    answer: Answer<u16>,
    next_avail: u16,
}

impl Stopped {
    pub(crate) fn tell(self) {
        self.answer.send(self.next_avail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_without_work_is_looked_at_ever_less() {
        let [shortest, longest] = LOOK_INTERVALS;
        let mut now = Instant::now();
        let mut looks = Looks::new(now);
        let mut count = 0;
        let end = now + Duration::from_secs(10);
        while now < end {
            let due = looks.next(now, false).expect("nothing else would wake the queue");
            assert!(due > now && due <= now + longest);
            assert_eq!(looks.next(now, false), None, "one timer for each look");
            // Woken by something else in between.
            assert_eq!(looks.next(now + (due - now) / 2, false), None);
            (now, count) = (due, count + 1);
        }
        assert!(count < 2600, "{count} looks in 10 s at a queue without work");
        // Work brings the next look forward, and others of the same moment need none of their own.
        assert_eq!(looks.next(now, false), Some(now + longest));
        let worked = now + longest / 2;
        assert_eq!(looks.next(worked, true), Some(worked + shortest));
        assert_eq!(looks.next(worked + shortest / 2, true), None);
        // The look that was due later comes to nothing.
        let next = looks.next(worked + shortest, false).unwrap();
        assert_eq!(next, worked + 3 * shortest);
    }
}
