//! The keeper of one session.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use blockio::executor::Lock;
use rustix::net::sockopt::socket_cookie;
use vhost_user::{FdIndex, FdSink, PassedFds, SessionState, StateKeeper};

use super::record::{self, Record, RecordFile};
use super::stash::{Number, Stash, StashState};
use crate::spec::ExportSpec;

/// The keeper of a session. Its export has it too, because units change between messages.
pub(super) struct SharedKeeper(pub(super) Arc<Lock<Keeper>>);

pub(super) struct Keeper {
    export: ExportSpec,
    /// `None` after an error: the session is not kept any longer.
    kept: Option<StoredSession>,
    /// The descriptors of the state that has begun.
    begun: Vec<Number>,
    /// Their numbers in this process.
    fds: HashSet<RawFd>,
}

/// A stash and its record. The service manager keeps them until this is dropped.
pub(crate) struct StoredSession {
    file: RecordFile,
    /// The number of the record's file.
    record: Number,
    stash: Stash,
    /// The descriptors of the last state, and of the one that has begun.
    known: HashMap<RawFd, Number>,
    /// The sockets of earlier processes, by their cookies. A stash never drops a socket.
    sockets: HashMap<u64, Number>,
    /// The last record.
    last: Option<Record>,
}

impl SharedKeeper {
    pub(super) fn new(kept: StoredSession, export: ExportSpec) -> Self {
        let (kept, begun, fds) = (Some(kept), Vec::new(), HashSet::new());
        Self(Arc::new(Lock::new(Keeper { export, kept, begun, fds })))
    }
}

impl Keeper {
    /// Returns true if the service manager has the last state.
    pub(super) fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    fn put_number(&mut self, fd: RawFd, number: Number) -> FdIndex {
        self.fds.insert(fd);
        self.begun.push(number);
        FdIndex::new(self.begun.len() - 1)
    }

    fn put_new(&mut self, fd: BorrowedFd<'_>) -> io::Result<FdIndex> {
        let raw = fd.as_raw_fd();
        let Some(kept) = &mut self.kept else { return Ok(self.put_number(raw, 0)) };
        let number = kept.put(fd)?;
        kept.known.insert(raw, number);
        Ok(self.put_number(raw, number))
    }

    /// Writes the last state again, as that of the export with these units. A message that is being
    /// carried out stays in it.
    pub(super) fn set_export(&mut self, export: ExportSpec) {
        self.export = export.clone();
        let Some(StoredSession { file, last: Some(last), .. }) = &mut self.kept else { return };
        last.export = export;
        if let Err(error) = file.write(last) {
            self.fail(&error);
        }
    }

    /// Describes the stash for another process, if the session is kept.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(super) fn hand_over(&self, fds: &mut PassedFds) -> io::Result<Option<StashState>> {
        self.kept.as_ref().map(|kept| kept.stash.hand_over(fds)).transpose()
    }

    fn fail(&mut self, error: &io::Error) {
        if self.kept.take().is_some() {
            let export = self.export.name();
            tracing::warn!(
                export,
                "the front-end does not survive a kill of the daemon, because its descriptors \
                 cannot be kept: {error}"
            );
        }
    }
}

impl StoredSession {
    /// Puts an empty record into an empty stash.
    pub(super) fn new(mut stash: Stash) -> io::Result<Self> {
        let file = RecordFile::new()?;
        let record = stash.put(file.as_fd())?;
        Ok(Self { file, record, stash, known: HashMap::new(), sockets: HashMap::new(), last: None })
    }

    /// Continues the stash of another process, which is stored under this name. Returns its other
    /// descriptors too.
    ///
    /// # Errors
    ///
    /// When the pair is no stash. The service manager forgets it.
    pub(super) fn open(
        name: String,
        ends: Vec<OwnedFd>,
    ) -> io::Result<(Self, BTreeMap<Number, OwnedFd>)> {
        let (stash, mut fds) = Stash::open(name, ends)?;
        // The record is put in first.
        let first = fds.pop_first();
        let (record, file) = first.ok_or_else(|| io::Error::other("its record is missing"))?;
        let file = RecordFile::open(file);
        let cookie = |(number, fd): (&Number, &OwnedFd)| Some((socket_cookie(fd).ok()?, *number));
        let sockets = fds.iter().filter_map(cookie).collect();
        Ok((Self { file, record, stash, known: HashMap::new(), sockets, last: None }, fds))
    }

    /// Puts a descriptor in, unless it is that of a socket which an earlier process has put in.
    fn put(&mut self, fd: BorrowedFd<'_>) -> io::Result<Number> {
        let earlier = socket_cookie(fd).ok().and_then(|cookie| self.sockets.get(&cookie));
        earlier.map_or_else(|| self.stash.put(fd), |number| Ok(*number))
    }

    /// The last state of the session, unless there was none.
    ///
    /// # Errors
    ///
    /// When its record is damaged, or of another format.
    pub(super) fn read(&self) -> io::Result<Option<Record>> {
        record::read(self.file.as_fd())
    }

    fn write(
        &mut self,
        export: &ExportSpec,
        session: SessionState,
        descriptors: &[Number],
    ) -> io::Result<()> {
        let (export, descriptors) = (export.clone(), descriptors.to_vec());
        self.file.write(self.last.insert(Record { export, session, descriptors }))?;
        let (known, record) = (&self.known, self.record);
        self.stash.tidy(|number| number == record || known.values().any(|it| *it == number))
    }
}

impl FdSink for SharedKeeper {
    fn put(&mut self, _: &str, fd: BorrowedFd<'_>) -> io::Result<FdIndex> {
        let mut keeper = self.0.lock();
        let raw = fd.as_raw_fd();
        match keeper.kept.as_ref().and_then(|kept| kept.known.get(&raw).copied()) {
            Some(number) => Ok(keeper.put_number(raw, number)),
            None => keeper.put_new(fd),
        }
    }

    fn put_new(&mut self, _: &str, fd: BorrowedFd<'_>) -> io::Result<FdIndex> {
        self.0.lock().put_new(fd)
    }
}

impl StateKeeper for SharedKeeper {
    fn begin(&mut self) {
        let mut keeper = self.0.lock();
        keeper.begun.clear();
        keeper.fds.clear();
    }

    fn keep(&mut self, state: io::Result<SessionState>) {
        let keeper = &mut *self.0.lock();
        let Some(kept) = &mut keeper.kept else { return };
        kept.known.retain(|fd, _| keeper.fds.contains(fd));
        let written = state.and_then(|state| kept.write(&keeper.export, state, &keeper.begun));
        if let Err(error) = written {
            keeper.fail(&error);
        }
    }

    fn note_sent(&mut self) {
        let mut keeper = self.0.lock();
        let Some(kept) = &mut keeper.kept else { return };
        kept.last.iter_mut().for_each(|last| last.session.forget_answer());
        if let Err(error) = kept.file.note_sent() {
            keeper.fail(&error);
        }
    }
}
