//! Cancels the opening of disks that are no longer wanted. The header of an image or of LUKS is
//! read before the disk is served, and its server may never answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blockio::DiskSource;
use blockio::disk::DiskState;
use blockio::executor::{Lock, start_thread};

/// A cancellation token for opening a disk. Clones share its state.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<State>);

#[derive(Debug, Default)]
struct State {
    is_cancelled: AtomicBool,
    reading: Lock<Reading>,
}

/// The disks that are being read.
#[derive(Debug, Default)]
struct Reading {
    disks: Vec<(u64, DiskSource)>,
    next: u64,
}

impl CancelToken {
    /// Returns false after the cancellation.
    pub fn is_active(&self) -> bool {
        !self.0.is_cancelled.load(Ordering::Relaxed)
    }

    /// Cancels the opening. Reads that wait for an unresponsive server fail; reads that a server
    /// answers continue.
    pub fn cancel(&self) {
        // Under the lock: a read that begins later finds the token cancelled.
        let reading = self.0.reading.lock();
        self.0.is_cancelled.store(true, Ordering::Relaxed);
        reading.disks.iter().for_each(|(_, disk)| disk.abandon());
    }

    /// Calls `read`, which reads from the disk. Its reads fail if the token is cancelled and the
    /// disk does not answer.
    ///
    /// # Errors
    ///
    /// The errors of `read`.
    pub fn while_reading<T>(
        &self,
        disk: &DiskSource,
        read: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let _reads = self.begin_read(disk);
        read()
    }

    /// Returns true if a disk that is being read does not answer.
    fn hangs(&self) -> bool {
        let hangs = |disk: &DiskSource| !matches!(disk.state(), DiskState::Ready | DiskState::Lost);
        self.0.reading.lock().disks.iter().any(|(_, disk)| hangs(disk))
    }

    fn begin_read(&self, disk: &DiskSource) -> ReadGuard<'_> {
        let mut reading = self.0.reading.lock();
        let number = reading.next;
        reading.next += 1;
        reading.disks.push((number, disk.clone()));
        if !self.is_active() {
            disk.abandon();
        }
        ReadGuard { token: self, number }
    }
}

/// A read of a disk, which ends when this is dropped.
struct ReadGuard<'a> {
    token: &'a CancelToken,
    number: u64,
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        let mut reading = self.token.0.reading.lock();
        let place = reading.disks.iter().position(|(number, _)| *number == self.number);
        let disk = place.map(|place| reading.disks.swap_remove(place));
        // Closing the disk may take long, if this was its last handle.
        drop(reading);
        drop(disk);
    }
}

/// The interval between checks of a disk that is slow to open.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Opens a disk, and cancels that if the disk does not answer after `patience`. A disk that answers
/// may take any time, for a key or for a lock.
///
/// # Errors
///
/// The errors of `open`, or that the disk does not answer.
pub fn with_hang_timeout<T>(
    patience: Duration,
    open: impl FnOnce(&CancelToken) -> Result<T>,
) -> Result<T> {
    let token = CancelToken::default();
    let (is_open, opened) = mpsc::channel::<()>();
    let watched = token.clone();
    let watch = move || {
        let mut wait = patience;
        while opened.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
            if watched.hangs() {
                return watched.cancel();
            }
            wait = CHECK_INTERVAL;
        }
    };
    let thread = start_thread("ringhaul-patience", watch)
        .context("cannot start the thread that watches the disk")?;
    let result = open(&token);
    drop(is_open);
    if thread.join().is_err() {
        bail!("ringhaul has a bug: the thread that watches the disk has panicked");
    }
    if token.is_active() {
        return result;
    }
    let hung =
        || "the disk does not answer, so opening it was cancelled; check that its server is up";
    match result {
        Ok(_) => bail!(hung()),
        Err(error) => Err(error.context(hung())),
    }
}

#[cfg(test)]
mod tests {
    use blockio::DiskOptions;
    use blockio::testing::{Call, RemoteStub};

    use super::*;

    /// Disks that hang are tested with servers that do not answer.
    #[test]
    fn a_disk_that_answers_may_take_long() {
        let disk = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        let read = with_hang_timeout(Duration::ZERO, |token| {
            token.while_reading(&disk, || {
                assert!(!token.hangs());
                Ok(token.is_active())
            })
        });
        assert!(read.unwrap());
        let error = with_hang_timeout(Duration::ZERO, |_| -> Result<()> { bail!("no such disk") });
        assert_eq!(error.unwrap_err().to_string(), "no such disk");
        for is_read in [false, true] {
            let opened = with_hang_timeout(Duration::ZERO, |token| {
                token.cancel();
                if is_read { Ok(()) } else { bail!("cannot read the header") }
            });
            let text = format!("{:#}", opened.unwrap_err());
            assert!(text.contains("was cancelled; check that its server is up"), "{text}");
            assert_eq!(text.contains(": cannot read the header"), !is_read, "{text}");
        }
    }

    /// A disk may have several layers, and the cancellation may come between two of them.
    #[test]
    fn a_disk_is_abandoned_whenever_it_is_cancelled() {
        let read = |cancels: &[bool; 2]| {
            let (token, end) = (CancelToken::default(), RemoteStub::new(&[0; 4096]));
            let cancel = |is_now: bool| {
                if is_now {
                    token.cancel();
                }
            };
            cancel(cancels[0]);
            let source = end.clone().source();
            let read = token.while_reading(&source, || {
                cancel(cancels[1]);
                Ok(end.take_calls())
            });
            read.unwrap()
        };
        assert_eq!(read(&[false, false]), []);
        for cancels in [[true, false], [false, true]] {
            assert_eq!(read(&cancels), [Call::Abandon], "{cancels:?}");
        }
    }

    #[test]
    fn disks_are_forgotten_when_they_are_read() {
        let token = CancelToken::default();
        let disk = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        let reading = || token.0.reading.lock().disks.len();
        let read = token.while_reading(&disk, || token.while_reading(&disk, || Ok(reading())));
        assert_eq!(read.unwrap(), 2);
        assert_eq!(reading(), 0);
        assert!(token.while_reading(&disk, || -> Result<()> { bail!("unreadable") }).is_err());
        assert_eq!(reading(), 0);
    }
}
