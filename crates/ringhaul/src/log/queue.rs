//! The thread that writes the log, so that no other thread waits for its reader.
//!
//! A write to a pipe or terminal without a reader waits for ever. So lines go into a queue of
//! bounded size, and one thread writes them. While it waits, the queue fills up. Further lines are
//! dropped and counted, and the thread reports the count when it has caught up.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, OnceLock, PoisonError};
use std::time::Duration;

use blockio::executor::{self, Lock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::stdio::stderr;

use super::recent;

/// Bytes of lines that may wait: thousands of lines.
const QUEUE_BYTES: usize = 256 << 10;

/// The time that the end of the process waits for a reader that does not read.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// The number of such times that it waits for the thread, which may have no processor.
const FLUSHES_MAX: usize = 30;

static QUEUE: OnceLock<Queue> = OnceLock::new();

/// True once the thread has started, or has failed to.
static IS_STARTED: AtomicBool = AtomicBool::new(false);

/// Begins to take lines, which wait for the [thread](start_thread).
pub(super) fn start() {
    QUEUE.get_or_init(Queue::default);
}

/// Starts the thread, once.
///
/// # Errors
///
/// When the kernel has no thread left.
pub(super) fn start_thread() -> io::Result<()> {
    let queue = QUEUE.get_or_init(Queue::default);
    if !IS_STARTED.swap(true, Ordering::Relaxed) {
        let write = move || queue.write_lines(write_to_stderr, report_dropped);
        executor::start_thread("ringhaul-log", write)?;
    }
    Ok(())
}

/// Waits until all lines are written, but not for long, because they may have no reader. Must be
/// called before the process exits in any way.
pub fn flush() {
    if let Some(queue) = QUEUE.get() {
        // A process that fails early has not started it.
        let _ = start_thread();
        queue.flush_while(FLUSH_LIMIT, || has_room(stderr()));
    }
}

/// True if a write to `output` begins at once: its reader reads, or it has none.
fn has_room(output: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&output, PollFlags::OUT)];
    let none = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&none)).is_ok_and(|ready| ready > 0)
}

/// The number of lines that were dropped so far because the log was not read in time.
pub(crate) fn dropped_lines() -> u64 {
    QUEUE.get().map_or(0, |queue| queue.state.lock().dropped)
}

/// The writer of log lines, one line for each write. Before the log has started, lines are lost.
#[derive(Clone, Copy)]
pub(super) struct Lines;

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Some(queue) = QUEUE.get() {
            recent::keep(line);
            queue.push(line);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lines that wait to be written.
#[derive(Default)]
struct Queue {
    state: Lock<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: VecDeque<Box<[u8]>>,
    /// Bytes of the lines.
    bytes: usize,
    /// Lines that were dropped and not reported yet. While there are any, further lines are dropped
    /// too, so that the report comes in their place.
    left_out: u64,
    /// Lines that were dropped so far.
    dropped: u64,
    /// True while the thread writes a line that it has taken out of the queue.
    writing: bool,
}

impl Queue {
    fn push(&self, line: &[u8]) {
        let mut state = self.state.lock();
        if state.left_out > 0 || state.bytes + line.len() > QUEUE_BYTES {
            state.left_out += 1;
            state.dropped += 1;
            return;
        }
        state.bytes += line.len();
        state.lines.push_back(line.into());
        self.changed.notify_all();
    }

    /// Passes lines to `write` for ever, and the number of dropped lines to `say`, in their place.
    fn write_lines(&self, write: impl Fn(&[u8]), say: impl Fn(u64)) -> ! {
        let mut state = self.state.lock();
        loop {
            if let Some(line) = state.lines.pop_front() {
                state.bytes -= line.len();
                state.writing = true;
                drop(state);
                write(&line);
                state = self.state.lock();
                state.writing = false;
            } else if state.left_out > 0 {
                let left_out = std::mem::take(&mut state.left_out);
                drop(state);
                say(left_out);
                state = self.state.lock();
            } else {
                self.changed.notify_all();
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Waits until nothing is left to be written, for at most `limit`. Returns false if something
    /// is left.
    fn flush(&self, limit: Duration) -> bool {
        let is_left =
            |state: &mut State| state.writing || !state.lines.is_empty() || state.left_out > 0;
        let waited = self.changed.wait_timeout_while(self.state.lock(), limit, is_left);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Waits like [`flush`](Self::flush), and again as long as the output has room: the thread has
    /// no processor then.
    fn flush_while(&self, limit: Duration, has_room: impl Fn() -> bool) {
        for _ in 0..FLUSHES_MAX {
            if self.flush(limit) || !has_room() {
                return;
            }
        }
    }
}

fn report_dropped(count: u64) {
    tracing::warn!("{count} lines were dropped: the log was not read in time");
}

/// Writes a line, however long that takes. If the reader is gone, the line is lost.
fn write_to_stderr(mut line: &[u8]) {
    while !line.is_empty() {
        match rustix::io::write(stderr(), line) {
            Ok(count) => line = &line[count..],
            Err(Errno::INTR) => {}
            // Another process may have made the descriptor non-blocking.
            Err(Errno::AGAIN) => {
                let _ = poll(&mut [PollFd::from_borrowed_fd(stderr(), PollFlags::OUT)], None);
            }
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::{Arc, mpsc};

    use super::*;

    /// Makes a queue whose thread writes one line for each `()` that it receives.
    fn queue() -> (Arc<Queue>, mpsc::Sender<()>, mpsc::Receiver<String>) {
        let queue = Arc::new(Queue::default());
        let (allow, allowed) = mpsc::channel();
        let (written, lines) = mpsc::channel();
        let of_thread = Arc::clone(&queue);
        std::thread::spawn(move || {
            let write = |line: &[u8]| {
                // Fails if the test has ended.
                let _ = allowed.recv();
                let _ = written.send(String::from_utf8_lossy(line).into_owned());
            };
            let say = |count: u64| of_thread.push(format!("{count} left out").as_bytes());
            of_thread.write_lines(write, say);
        });
        (queue, allow, lines)
    }

    #[test]
    fn lines_without_room_are_counted_in_their_place() {
        let (queue, allow, lines) = queue();
        let long = vec![b'x'; QUEUE_BYTES / 4];
        queue.push(b"first");
        // The line takes room until the thread has it.
        while !queue.state.lock().writing {
            std::thread::yield_now();
        }
        for _ in 0..7 {
            queue.push(&long);
        }
        // The line would fit, but a line before it was dropped.
        queue.push(b"short");
        assert!(!queue.flush(Duration::ZERO));
        (0..6).for_each(|_| allow.send(()).unwrap());
        let next = || lines.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(next(), "first");
        (0..4).for_each(|_| assert_eq!(next().len(), long.len()));
        assert_eq!(next(), "4 left out");
        assert_eq!(queue.state.lock().dropped, 4);
        queue.push(b"last");
        allow.send(()).unwrap();
        assert_eq!(next(), "last");
        assert!(queue.flush(Duration::from_secs(30)));
        assert!(!queue.state.lock().writing && queue.state.lock().bytes == 0);
    }

    #[test]
    fn the_end_does_not_wait_for_a_reader_that_does_not_read() {
        let (queue, _allow, _lines) = queue();
        queue.push(b"never written");
        queue.flush_while(Duration::from_millis(1), || false);
        assert!(queue.state.lock().writing || !queue.state.lock().lines.is_empty());
    }

    #[test]
    fn the_end_waits_for_a_thread_without_a_processor() {
        let (queue, allow, lines) = queue();
        queue.push(b"last words");
        let rounds = Cell::new(0);
        queue.flush_while(Duration::from_millis(1), || {
            rounds.set(rounds.get() + 1);
            if rounds.get() == 3 {
                allow.send(()).unwrap();
                assert_eq!(lines.recv(), Ok("last words".to_owned()));
            }
            true
        });
        assert!(rounds.get() >= 3 && queue.flush(Duration::from_secs(30)));
    }

    #[test]
    fn a_full_pipe_has_no_room() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        assert!(has_room(&writer));
        while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
        assert!(!has_room(&writer));
        drop(reader);
        assert!(has_room(&writer), "a write fails at once");
    }
}
