//! For tests of kinds of disks: a disk whose content belongs to another thread, which may be out of
//! reach, and the time, the timers and the remote ops of an IoThread.

mod disk_folder;
mod event;
mod hand_over_facts;
mod io_facts;

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use iomem::Buffers;

use crate::config::EngineKind;
use crate::disk::driver::{Driver, Request};
use crate::disk::file::size_probe::SizeProbe;
use crate::disk::source::DriverSource;
use crate::disk::{Abilities, DiskInfo, DiskSource, DiskState, Extent, Link, TransferError};
use crate::error::Error;
use crate::thread::foreign_op::ForeignCompleter;
use crate::thread::io::Io;

pub use disk_folder::disk_folder;
pub use event::Event;
pub use hand_over_facts::{Call, HandOverFacts};
pub use io_facts::{remote_ops, set_recently, timers};

/// A handle on the thread with the content: the remote end.
#[derive(Clone)]
pub struct RemoteStub(Arc<Handle>);

/// Ends the thread when the disk has no users left.
struct Handle(Arc<End>);

impl Drop for Handle {
    fn drop(&mut self) {
        // A failed test may have poisoned the lock: the thread ends in any case.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).is_over = true;
        self.0.changed.notify_all();
    }
}

struct End {
    state: Mutex<State>,
    changed: Condvar,
    /// The size that the remote end has announced.
    size_bytes: AtomicU64,
    /// True if users of the disk cannot change its size.
    has_own_size: bool,
    /// True if no other program writes to it, as if it were a locked file.
    is_exclusive: bool,
}

impl End {
    fn announce_size(&self, state: &State) -> u64 {
        let size_bytes = state.content.len() as u64;
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
        size_bytes
    }
}

#[derive(Default)]
struct State {
    content: Vec<u8>,
    jobs: VecDeque<(Job, ForeignCompleter)>,
    away_since: Option<Instant>,
    /// True if it does not answer and does not count as away.
    is_silent: bool,
    was_abandoned: bool,
    /// A write-back of its users' caches fails.
    fails_write_back: bool,
    is_over: bool,
    journal: Vec<Event>,
    /// Makes one in this many changes fail; 0 for none.
    one_fails_in: u64,
    random: u64,
    /// Writes of data fail.
    has_no_space: bool,
    /// The number of queries for the size, and the number of the query with a delayed answer.
    asked: usize,
    kept_back: usize,
    hand_over: HandOverFacts,
    /// Calls that a layer passes on.
    calls: Vec<Call>,
}

impl State {
    /// Makes a change, unless it is chosen to fail.
    fn try_to(&mut self, change: impl FnOnce(&mut Self)) -> io::Result<()> {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        if self.one_fails_in > 0 && (self.random >> 33).is_multiple_of(self.one_fails_in) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        change(self);
        Ok(())
    }
}

type Job = Box<dyn FnOnce(&mut State) -> io::Result<()> + Send>;

impl RemoteStub {
    /// Starts the thread of a disk with this content.
    pub fn new(content: &[u8]) -> Self {
        Self::start(content, false, false)
    }

    /// A disk with a size that its users cannot change.
    pub fn fixed_size(content: &[u8]) -> Self {
        Self::start(content, true, false)
    }

    /// A disk to which no other program writes.
    pub fn exclusive(content: &[u8]) -> Self {
        Self::start(content, false, true)
    }

    fn start(content: &[u8], has_own_size: bool, is_exclusive: bool) -> Self {
        let state = State { content: content.to_vec(), ..State::default() };
        let size_bytes = AtomicU64::new(content.len() as u64);
        let end = Arc::new(End {
            state: Mutex::new(state),
            changed: Condvar::new(),
            size_bytes,
            has_own_size,
            is_exclusive,
        });
        let served = Arc::clone(&end);
        std::thread::spawn(move || serve(&served));
        Self(Arc::new(Handle(end)))
    }

    /// The disk.
    pub fn source(self) -> DiskSource {
        let info = DiskInfo {
            size_bytes: self.0.0.size_bytes.load(Ordering::Relaxed),
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: false,
            direct: false,
        };
        DiskSource::from_driver(info, Arc::new(RemoteStubSource(self)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.0.0.changed.notify_all();
    }

    /// All changes of the content since it was made.
    pub fn journal(&self) -> Vec<Event> {
        self.state().journal.clone()
    }

    /// The present content.
    pub fn content(&self) -> Vec<u8> {
        self.state().content.clone()
    }

    /// The number of changes of the content.
    pub fn events(&self) -> usize {
        self.state().journal.len()
    }

    /// Makes one in this many writes and flushes fail; 0 for none.
    pub fn have_some_fail(&self, one_fails_in: u64) {
        self.change(|state| state.one_fails_in = one_fails_in);
    }

    /// Makes writes fail until a discard releases space, as on a full file system that copies on
    /// write.
    pub fn have_no_space(&self) {
        self.change(|state| state.has_no_space = true);
    }

    /// Has each write-back of its users' caches fail from now on.
    pub fn fail_write_back(&self) {
        self.change(|state| state.fails_write_back = true);
    }

    /// Puts the content out of reach, or back.
    pub fn set_away(&self, is_away: bool) {
        self.change(|state| state.away_since = is_away.then(Instant::now));
    }

    /// Leaves requests without an answer, or not.
    pub fn set_silent(&self, is_silent: bool) {
        self.change(|state| state.is_silent = is_silent);
    }

    /// Returns true if a request is unanswered.
    pub fn is_asked(&self) -> bool {
        !self.state().jobs.is_empty()
    }

    /// Delays the answer to the `number`-th query for the size.
    #[cfg(test)]
    pub(crate) fn keep_back(&self, number: usize) {
        self.change(|state| state.kept_back = number);
    }

    /// Sets the answers about a hand-over.
    pub fn set_hand_over(&self, facts: HandOverFacts) {
        self.change(|state| state.hand_over = facts);
    }

    /// Takes the calls since the last time.
    pub fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.state().calls)
    }

    fn note(&self, call: Call) {
        self.state().calls.push(call);
    }

    /// The size of the content.
    pub fn size_bytes(&self) -> usize {
        self.state().content.len()
    }

    /// The number of queries for the size.
    pub fn asked(&self) -> usize {
        self.state().asked
    }

    /// Changes the size of the content, and announces it.
    pub fn announce_size(&self, size_bytes: u64) {
        self.have_size(size_bytes);
        self.0.0.announce_size(&self.state());
    }

    /// Changes the size of the content, which is announced only in answer to a query.
    pub fn have_size(&self, size_bytes: u64) {
        self.change(|state| state.content.resize(usize::try_from(size_bytes).unwrap(), 0));
    }
}

fn serve(end: &End) {
    let mut state = end.state.lock().unwrap();
    while !state.is_over {
        let answers = state.away_since.is_none() && !state.is_silent;
        let may_serve = state.was_abandoned || answers;
        let job = if may_serve { state.jobs.pop_front() } else { None };
        match job {
            Some((_, completer)) if state.was_abandoned => {
                completer.complete(Err(io::Error::from_raw_os_error(libc::EIO)));
            }
            Some((job, completer)) => {
                let result = job(&mut state);
                completer.complete(result.map(|()| 0));
            }
            None => state = end.changed.wait(state).unwrap(),
        }
    }
}

struct RemoteStubSource(RemoteStub);

impl std::fmt::Debug for RemoteStubSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RemoteStubSource")
    }
}

impl DriverSource for RemoteStubSource {
    fn attach(&self, io: &Rc<Io>, _: Option<EngineKind>) -> Box<dyn Driver> {
        Box::new(RemoteStubDisk { end: self.0.clone(), io: Rc::clone(io) })
    }

    fn chain(&self) -> Vec<Link> {
        vec![Link { kind: "elsewhere", place: "thread".to_owned() }]
    }

    fn identity(&self) -> &str {
        "elsewhere"
    }

    fn changes_users(&self) -> bool {
        true
    }

    fn abilities(&self) -> Abilities {
        Abilities { zeroes: true, resize: true, ..Abilities::default() }
    }

    fn discard_bytes(&self) -> Option<u32> {
        None
    }

    fn is_exclusive(&self) -> bool {
        self.0.0.0.is_exclusive
    }

    fn state(&self) -> DiskState {
        self.0.state().away_since.map_or(DiskState::Ready, DiskState::Away)
    }

    fn remark(&self) -> Option<String> {
        Some(format!("{} jobs", self.0.state().jobs.len()))
    }

    fn inherit(&self, loss: Option<i32>, is_flushed: bool) {
        self.0.note(Call::Inherit(loss, is_flushed));
    }

    fn is_flushed(&self) -> bool {
        self.0.state().hand_over.is_flushed
    }

    fn may_still_change(&self) -> bool {
        self.0.state().hand_over.may_still_change
    }

    fn is_written_back(&self) -> bool {
        self.0.state().hand_over.is_written_back
    }

    fn abandon(&self) {
        self.0.note(Call::Abandon);
        self.0.change(|state| state.was_abandoned = true);
    }

    fn release_lock(&self) {
        self.0.note(Call::ReleaseLock);
    }

    fn probe_space(&self) -> Result<(), Error> {
        self.0.note(Call::ProbeSpace);
        Ok(())
    }

    fn write_back(&self) -> Result<(), Error> {
        self.0.note(Call::WriteBack);
        match self.0.state().fails_write_back {
            false => Ok(()),
            true => Err(Error::Options("its cache cannot be written".to_owned())),
        }
    }

    fn size_probe(&self) -> Option<Arc<SizeProbe>> {
        let end = Arc::clone(&self.0.0.0);
        let look = move || Ok(Some(end.announce_size(&end.state.lock().unwrap())));
        Some(Arc::new(SizeProbe::other(look)))
    }

    fn probe_size(&self) -> Result<u64, Error> {
        let (end, mut state) = (&*self.0.0.0, self.0.state());
        let size_bytes = end.announce_size(&state);
        state.asked += 1;
        let number = state.asked;
        drop(end.changed.wait_while(state, |state| state.kept_back == number).unwrap());
        Ok(size_bytes)
    }

    fn known_size(&self) -> Result<u64, Error> {
        Ok(self.0.0.0.size_bytes.load(Ordering::Relaxed))
    }

    fn check_new_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.0.note(Call::CheckSize(size_bytes));
        match self.0.0.0.has_own_size {
            false => Ok(()),
            true => Err(Error::Options("its size is its own affair".to_owned())),
        }
    }

    fn set_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.0.announce_size(size_bytes);
        Ok(())
    }

    fn sets_size_at_once(&self) -> bool {
        !self.0.0.0.has_own_size
    }

    fn adopt_size(&self, size_bytes: u64) {
        self.0.note(Call::AdoptSize(size_bytes));
    }
}

struct RemoteStubDisk {
    end: RemoteStub,
    io: Rc<Io>,
}

impl RemoteStubDisk {
    /// Writes to the content, on its thread.
    async fn put(&self, offset: u64, data: Vec<u8>, fua: bool) -> io::Result<()> {
        let range = range(offset, data.len() as u64);
        self.have(move |state| {
            if range.end > state.content.len() {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            if state.has_no_space {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            state.try_to(|state| {
                state.content[range].copy_from_slice(&data);
                state.journal.push(Event::Write(offset, data));
                state.journal.extend(fua.then_some(Event::Stable));
            })
        })
        .await
    }

    /// Runs `job` on the thread of the content.
    async fn have(
        &self,
        job: impl FnOnce(&mut State) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let (op, completer) = self.io.foreign_op(Buffers::empty());
        self.end.change(|state| state.jobs.push_back((Box::new(job), completer)));
        op.await.result.map(|_| ())
    }

    async fn fill(&self, offset: u64, len: u64) -> io::Result<()> {
        self.put(offset, vec![0; usize::try_from(len).unwrap()], false).await
    }
}

fn range(offset: u64, len: u64) -> std::ops::Range<usize> {
    let start = usize::try_from(offset).unwrap();
    start..start + usize::try_from(len).unwrap()
}

impl Driver for RemoteStubDisk {
    fn read(&self, offset: u64, buffers: Buffers) -> Request<'_, Result<(), TransferError>> {
        Box::pin(async move {
            let data = Arc::new(Mutex::new(Vec::new()));
            let (filled, range) = (Arc::clone(&data), range(offset, buffers.bytes() as u64));
            let job = move |state: &mut State| {
                *filled.lock().unwrap() = state.content[range].to_vec();
                Ok(())
            };
            match self.have(job).await {
                Ok(()) => {
                    let bytes = buffers.copy_from(0, &data.lock().unwrap());
                    buffers.wrote(bytes);
                    Ok(())
                }
                Err(error) => Err(TransferError::new(error, buffers)),
            }
        })
    }

    fn write(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Request<'_, Result<(), TransferError>> {
        Box::pin(async move {
            let written = self.put(offset, buffers.to_vec(), fua).await;
            written.map_err(|error| TransferError::new(error, buffers))
        })
    }

    fn flush(&self) -> Request<'_, io::Result<()>> {
        Box::pin(self.have(|state| state.try_to(|state| state.journal.push(Event::Flush))))
    }

    fn discard(&self, offset: u64, len: u64) -> Request<'_, io::Result<()>> {
        Box::pin(async move {
            self.end.change(|state| state.has_no_space = false);
            self.fill(offset, len).await
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, _: bool) -> Request<'_, io::Result<()>> {
        Box::pin(self.fill(offset, len))
    }

    fn block_status(&self, _: u64, len: u64) -> Request<'_, io::Result<Extent>> {
        Box::pin(async move { Ok(Extent::data(len)) })
    }
}
