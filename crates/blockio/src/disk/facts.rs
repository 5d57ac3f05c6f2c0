//! What is known about a disk that is open, whatever its kind.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use super::info::{Abilities, DiskInfo, DiskState, Link, Place};
use super::limits::Limits;
use super::outside::Outside;
use super::shared::{LimitGroup, join};
use super::source::FileSource;
use super::trouble::{ErrorPolicy, Why};
use super::{DiskSource, SourceKind};
use crate::config::EngineKind;
use crate::error::Error;
use crate::io::Io;
use crate::op::OpenFile;

impl DiskSource {
    /// What the disk is like now.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        self.shared.info(&self.info)
    }

    /// What the disk can do, unless it is read-only.
    #[must_use]
    pub fn abilities(&self) -> Abilities {
        match &self.kind {
            SourceKind::File(source) => source.abilities(),
            SourceKind::Null => {
                Abilities { discard: true, zeroes: true, resize: true, ..Abilities::default() }
            }
            SourceKind::Other(source) => source.abilities(),
        }
    }

    /// What the disk is made of: itself first, then what it lies on.
    #[must_use]
    pub fn chain(&self) -> Vec<Link> {
        match &self.kind {
            SourceKind::File(source) => vec![source.link()],
            SourceKind::Null => vec![Link { kind: "null", place: String::new() }],
            SourceKind::Other(source) => source.chain(),
        }
    }

    /// The same in words.
    #[must_use]
    pub fn chain_text(&self) -> String {
        let links: Vec<String> = self.chain().iter().map(ToString::to_string).collect();
        links.join(", ")
    }

    /// Why the disk cannot be used, or what lies on it: `what`, as in "a part of ".
    pub(super) fn refused(&self, what: &str, reason: &str) -> Error {
        // It may have texts of a header in it, which is anybody's.
        let is_shown = |character: &char| !character.is_control();
        let reason = reason.chars().filter(is_shown).collect();
        Error::Disk { disk: format!("{what}{}", self.chain_text()), reason }
    }

    /// The format of the disk's content on what it lies on.
    #[must_use]
    pub fn format(&self) -> &'static str {
        // A part of something has its format.
        match self.chain().iter().map(|link| link.kind).find(|kind| *kind != "raw") {
            Some(kind @ ("luks" | "qcow2")) => kind,
            _ => "raw",
        }
    }

    /// What sees from outside how large the disk could be. `None`: that never changes without a
    /// call of [`set_size`](Self::set_size).
    #[must_use]
    pub fn outside(&self) -> Option<Arc<Outside>> {
        match &self.kind {
            SourceKind::File(source) => source.outside.clone(),
            SourceKind::Null => None,
            SourceKind::Other(source) => source.outside(),
        }
    }

    /// How the disk is doing, as its IoThreads have found it lately.
    #[must_use]
    pub fn state(&self) -> DiskState {
        let state = match &self.kind {
            SourceKind::File(source) => source.state(),
            SourceKind::Null => DiskState::Ready,
            SourceKind::Other(source) => source.state(),
        };
        match state {
            DiskState::Ready => self.failed_waiting().unwrap_or(state),
            worse => worse,
        }
    }

    /// How many requests have waited so far because the disk had failed them, and the errno of the
    /// last.
    #[must_use]
    pub fn troubles(&self) -> (u64, Option<i32>) {
        self.shared.troubles.so_far()
    }

    /// [Held](DiskState::Held) or [retried](DiskState::Retried) if requests wait now because the
    /// disk has failed them, whatever its [state](Self::state) is besides.
    #[must_use]
    pub fn failed_waiting(&self) -> Option<DiskState> {
        Some(match self.shared.troubles.now()? {
            (Why::Held, since) => DiskState::Held(since),
            (Why::Retried, since) => DiskState::Retried(since),
        })
    }

    /// What requests may do at most.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.shared.limits()
    }

    /// Has requests wait so that they keep to these limits, on all IoThreads, those included that
    /// wait already. Flushes are not limited; zeroes are writes of all their bytes, and discards of
    /// none.
    ///
    /// # Errors
    ///
    /// When they [mean nothing](Limits::check).
    pub fn set_limits(&self, limits: &Limits) -> Result<(), Error> {
        limits.check()?;
        self.shared.set_limits(*limits);
        Ok(())
    }

    /// As [`LimitGroup::debts`], for the limits of the disk itself.
    #[must_use]
    pub fn debts(&self) -> Vec<u64> {
        self.shared.debts()
    }

    /// As [`LimitGroup::owe`], for the limits of the disk itself.
    pub fn owe(&self, debts: &[u64]) {
        self.shared.owe(debts);
    }

    /// Has the disk keep to the limits of a group, too.
    pub fn join(&self, group: Option<&LimitGroup>) {
        join(&self.shared, group);
    }

    /// The group that it [is in](Self::join).
    #[must_use]
    pub fn group(&self) -> Option<LimitGroup> {
        self.shared.group()
    }

    /// What becomes of requests that fail, from now on.
    pub fn set_error_policy(&self, policy: ErrorPolicy) {
        self.shared.set_errors(policy);
    }

    /// Tries those requests again at once that wait because the disk has failed them.
    pub fn resume(&self) {
        self.shared.resume();
    }

    /// Since when the disk has not answered: an operation of the kernel for 5 seconds or more, or
    /// the other end of a disk that is not local, as its IoThreads have found it lately.
    #[must_use]
    pub fn late_since(&self) -> Option<Instant> {
        match self.state() {
            DiskState::Late(since) | DiskState::Away(since) => Some(since),
            // It may be late besides.
            DiskState::Lost => self.local()?.file.late_since(),
            DiskState::Ready | DiskState::Held(_) | DiskState::Retried(_) => None,
        }
    }

    /// Since when it is in this state, where that is known.
    #[must_use]
    pub fn state_since(&self) -> Option<Instant> {
        match self.state() {
            DiskState::Held(since) | DiskState::Retried(since) => Some(since),
            _ => self.late_since(),
        }
    }

    /// One line on what only this kind of disk can say about its state, such as how many
    /// connections it has.
    #[must_use]
    pub fn remark(&self) -> Option<String> {
        match &self.kind {
            SourceKind::File(_) | SourceKind::Null => None,
            SourceKind::Other(source) => source.remark(),
        }
    }

    /// Has all requests fail that wait for the other end of a disk that is not local, and all that
    /// come, if it is away, or as soon as it is. What one has begun that answers goes on.
    /// Operations of the kernel cannot be taken back: those of a file go on. This is the end of the
    /// disk, for all clones of it; others that have opened it are not affected.
    pub fn give_up(&self) {
        self.shared.give_up();
        if let SourceKind::Other(source) = &self.kind {
            source.give_up();
        }
    }

    /// Whether it was [given up](Self::give_up).
    #[cfg(feature = "qcow2")]
    pub(super) fn is_given_up(&self) -> bool {
        self.shared.is_given_up()
    }

    /// Whether [`write_back`](Self::write_back) has anything to do. An open file goes over to
    /// another process as it is.
    #[must_use]
    pub fn is_written_back(&self) -> bool {
        match &self.kind {
            SourceKind::File(_) | SourceKind::Null => false,
            SourceKind::Other(source) => source.is_written_back(),
        }
    }

    /// Another process is to go on with the disk, which it has opened: what answered requests have
    /// left in a cache of this process is written to where that one sees it, and images are left as
    /// if they were closed. No request is in progress. It may wait for the other end of a disk that
    /// is not local.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write_back(&self) -> Result<(), Error> {
        match &self.kind {
            SourceKind::File(_) | SourceKind::Null => Ok(()),
            SourceKind::Other(source) => source.write_back(),
        }
    }

    /// Another process goes on with the disk, which it has opened. What keeps it away from the
    /// other end of a disk that is not local is released; no request is in progress here. It may
    /// wait for that end. Requests that come after all acquire it again.
    pub fn leave(&self) {
        if let SourceKind::Other(source) = &self.kind {
            source.leave();
        }
    }

    /// The errno of the loss of data, if [there was one](DiskState::Lost).
    #[must_use]
    pub fn loss(&self) -> Option<i32> {
        match self.open_file() {
            Some(file) => file.loss().check().err()?.raw_os_error(),
            // Whatever the other end has lost, it did not say so.
            None => (self.state() == DiskState::Lost).then_some(libc::EIO),
        }
    }

    /// Whether all changes that were answered are known to be on stable storage, while no request
    /// runs. A file does not need to know: what the kernel has yet to report comes with it.
    #[must_use]
    pub fn is_flushed(&self) -> bool {
        match &self.kind {
            SourceKind::Other(source) => source.is_flushed(),
            SourceKind::File(_) | SourceKind::Null => false,
        }
    }

    /// Whether changes that nobody waits for any more may still be made, by a server that was given
    /// up on. Another process would not know that its own have to wait for these.
    #[must_use]
    pub fn may_still_change(&self) -> bool {
        match &self.kind {
            SourceKind::Other(source) => source.may_still_change(),
            SourceKind::File(_) | SourceKind::Null => false,
        }
    }

    /// Another process has handed the disk over. What it has written may not be flushed, unless it
    /// [knew](Self::is_flushed) that it is, and data may be lost if it has learnt of such a `loss`,
    /// an errno.
    pub fn inherit(&self, loss: Option<i32>, is_flushed: bool) {
        match (self.open_file(), &self.kind) {
            // What the kernel has yet to report comes with the file.
            (Some(file), _) => loss.into_iter().for_each(|errno| file.loss().inherit(errno)),
            (None, SourceKind::Other(source)) => source.inherit(loss, is_flushed),
            (None, SourceKind::File(_) | SourceKind::Null) => {}
        }
    }

    /// The open file that is written to, to be [handed over](Self::handed_over) to another process.
    /// `None`: it has none, and the other process opens the disk by itself.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.open_file().map(AsFd::as_fd)
    }

    /// A text that is the same whenever this disk is opened, and another one for another disk: the
    /// id of the file system and the number of the file in it, or what a block device says of
    /// itself. It may name files. Empty for a null disk. Where the file system has no id of its
    /// own (XFS before Linux 6.9, NFS, FAT), it has the number of its device, which may change.
    #[must_use]
    pub fn identity(&self) -> &str {
        match &self.kind {
            SourceKind::File(source) => &source.identity,
            SourceKind::Null => "",
            SourceKind::Other(source) => source.identity(),
        }
    }

    /// Which bytes of which disk it is made of.
    #[must_use]
    pub fn place(&self) -> Place {
        let part = match &self.kind {
            SourceKind::File(_) | SourceKind::Null => None,
            SourceKind::Other(source) => source.place(),
        };
        let disk = || self.identity().to_owned();
        let whole = || Place { disk: disk(), start: 0, end: None, is_spread: false };
        part.unwrap_or_else(whole)
    }

    /// Whether the kernel says that its medium rotates, so that requests cost the less the nearer
    /// they are.
    #[must_use]
    pub fn is_rotational(&self) -> bool {
        self.local().is_some_and(|source| source.is_rotational)
    }

    /// The unit in which space is given back by a discard, in bytes: what is smaller, or is not
    /// aligned to it, stays. A multiple of the logical block. `None` if the kernel says that the
    /// device never gives any back.
    #[must_use]
    pub fn discard_bytes(&self) -> Option<u32> {
        match &self.kind {
            SourceKind::File(source) => source.discard_bytes,
            SourceKind::Null => Some(self.info.logical_block_bytes),
            SourceKind::Other(source) => source.discard_bytes(),
        }
    }

    /// How many bytes are best read and written at once, beginning at a multiple of it: those that
    /// lie together where the disk has them. A multiple of the physical block. `None`: nothing is
    /// known.
    #[must_use]
    pub fn optimal_bytes(&self) -> Option<u32> {
        match &self.kind {
            SourceKind::File(_) | SourceKind::Null => None,
            SourceKind::Other(source) => source.optimal_bytes(),
        }
    }

    /// Whether nobody else writes to it, as locks of its file say, which are really had, or the
    /// claim of its block device. Another end may have other users.
    #[cfg(feature = "qcow2")]
    pub(super) fn is_held_alone(&self) -> bool {
        match &self.kind {
            SourceKind::File(source) => source.is_held_alone,
            SourceKind::Null => false,
            SourceKind::Other(source) => source.is_held_alone(),
        }
    }

    /// Whether operations on a file or a block device are made for it, by an engine.
    #[must_use]
    pub fn has_engine(&self) -> bool {
        self.local().is_some()
    }

    /// Whether it can be [given a size](Self::set_size) by a thread that must not wait.
    pub(super) fn sets_size_at_once(&self) -> bool {
        match &self.kind {
            SourceKind::File(_) | SourceKind::Null => true,
            SourceKind::Other(source) => source.sets_size_at_once(),
        }
    }

    /// The engine that it prefers, and why.
    #[must_use]
    pub fn preference(&self) -> Option<(EngineKind, &str)> {
        self.engine.as_ref().map(|(engine, reason)| (*engine, &**reason))
    }

    /// The engine that it [is to use](Self::prefer_engine).
    #[must_use]
    pub fn preferred_engine(&self) -> Option<EngineKind> {
        self.preference().map(|(engine, _)| engine)
    }

    /// The engine that the disk has on `io`. One without a file [has none](Self::has_engine).
    #[must_use]
    pub fn engine_on(&self, io: &Io) -> Option<EngineKind> {
        self.has_engine().then(|| io.engine_for(self.preferred_engine()))
    }

    pub(crate) fn open_file(&self) -> Option<&OpenFile> {
        self.local().map(|source| &*source.file)
    }

    /// Whether it is on a device, and not on a file of a file system.
    pub(crate) fn is_block_device(&self) -> bool {
        self.local().is_some_and(|source| source.is_block_device)
    }

    /// The file or block device under all layers.
    pub(super) fn local(&self) -> Option<&FileSource> {
        match &self.kind {
            SourceKind::File(source) => Some(source),
            SourceKind::Null => None,
            SourceKind::Other(source) => source.local(),
        }
    }
}
