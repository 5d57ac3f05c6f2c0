//! Properties of an open disk, of any kind.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::file::size_probe::SizeProbe;
use super::file::source::FileSource;
use super::foreign::{self, BYTES, format_of, format_of_file, warning};
use super::info::{Abilities, DiskInfo, DiskState, Link, Placement, WaitTimes};
use super::late_lock::LateLock;
use super::qos::error_policy::{ErrorPolicy, WaitReason};
use super::qos::limits::Limits;
use super::qos::{LimitGroup, join};
use super::source::DriverSource;
use super::{DiskSource, SourceKind};
use crate::clock;
use crate::config::{EngineKind, IoThreadConfig};
use crate::error::Error;
use crate::op::OpenFile;
use crate::thread::IoThread;
use crate::thread::io::Io;

impl DiskSource {
    /// The properties of the disk, with its present size.
    pub fn info(&self) -> DiskInfo {
        self.shared.info(&self.info)
    }

    /// The size that users of the disk know. It differs from the present one after another process
    /// has changed it ([`LateLock::take`]), until
    /// [`note_announcement`](Self::note_announcement).
    pub fn announced_bytes(&self) -> u64 {
        self.shared.announced_bytes()
    }

    /// Notes that users are told the present size.
    pub fn note_announcement(&self) {
        self.shared.set_announced(true);
    }

    /// The abilities of the disk, unless it is read-only.
    pub fn abilities(&self) -> Abilities {
        match &self.kind {
            SourceKind::File(source) => source.abilities(),
            SourceKind::Null => {
                Abilities { discard: true, zeroes: true, resize: true, ..Abilities::default() }
            }
            SourceKind::Driver(source) => source.abilities(),
        }
    }

    /// The layers of the disk: the disk itself first, then the disks below.
    pub fn chain(&self) -> Vec<Link> {
        match &self.kind {
            SourceKind::File(source) => vec![source.link()],
            SourceKind::Null => vec![Link { kind: "null", place: String::new() }],
            SourceKind::Driver(source) => source.chain(),
        }
    }

    /// The [`chain`](Self::chain) as text.
    pub fn chain_text(&self) -> String {
        let links: Vec<String> = self.chain().iter().map(ToString::to_string).collect();
        links.join(", ")
    }

    /// The error for a disk that cannot be used, or for a layer on it, which `what` names, as in "a
    /// part of ".
    pub fn refused(&self, what: &str, reason: &str) -> Error {
        // The reason may contain text of a header, which is untrusted.
        let is_shown = |character: &char| !character.is_control();
        let reason = reason.chars().filter(is_shown).collect();
        Error::Disk { disk: format!("{what}{}", self.chain_text()), reason }
    }

    /// The format in which the disk's content is stored below: `luks`, `qcow2` or `raw`.
    pub fn format(&self) -> &'static str {
        // A part of a disk has the format of that disk.
        match self.chain().iter().map(|link| link.kind).find(|kind| *kind != "raw") {
            Some(kind @ ("luks" | "qcow2")) => kind,
            _ => "raw",
        }
    }

    /// True if a layer of the disk is on a server that requests reach through a library or a
    /// connection of this process.
    pub fn is_remote(&self) -> bool {
        self.chain().iter().any(|link| matches!(link.kind, "nbd" | "rbd"))
    }

    /// A probe for the possible size of the disk, which does not use the disk. `None` if the size
    /// never changes without a call of [`set_size`](Self::set_size).
    pub fn size_probe(&self) -> Option<Arc<SizeProbe>> {
        match &self.kind {
            SourceKind::File(source) => source.size_probe.clone(),
            SourceKind::Null => None,
            SourceKind::Driver(source) => source.size_probe(),
        }
    }

    /// The state of the disk, as its IoThreads have found it lately.
    pub fn state(&self) -> DiskState {
        let state = match &self.kind {
            SourceKind::File(source) => source.state(),
            SourceKind::Null => DiskState::Ready,
            SourceKind::Driver(source) => source.state(),
        };
        match state {
            DiskState::Ready => self.retry_state().unwrap_or(state),
            worse => worse,
        }
    }

    /// The number of requests so far that waited because the disk failed them, and the errno of the
    /// last.
    pub fn retry_totals(&self) -> (u64, Option<i32>) {
        self.shared.retry_stats.totals()
    }

    /// The time that requests have waited so far.
    pub fn wait_times(&self) -> WaitTimes {
        let now = clock::now();
        let [retried, held] = self.shared.retry_stats.times(now);
        WaitTimes { throttled: self.shared.throttled.lock().total(now), retried, held }
    }

    /// [Held](DiskState::Held) or [retried](DiskState::Retried) if requests wait now because the
    /// disk failed them, regardless of its [state](Self::state).
    pub fn retry_state(&self) -> Option<DiskState> {
        Some(match self.shared.retry_stats.current()? {
            (WaitReason::Held, since) => DiskState::Held(since),
            (WaitReason::Retried, since) => DiskState::Retried(since),
        })
    }

    /// The limits of requests.
    pub fn limits(&self) -> Limits {
        self.shared.limits()
    }

    /// Makes requests wait for these limits on all IoThreads, including requests that wait already.
    /// Flushes are not limited; zeroes are writes of all their bytes, and discards of none.
    ///
    /// # Errors
    ///
    /// If they are [invalid](Limits::check).
    pub fn set_limits(&self, limits: &Limits) -> Result<(), Error> {
        limits.check()?;
        self.shared.set_limits(*limits);
        Ok(())
    }

    /// Makes the disk a member of this group alone: its limits then apply, too.
    pub fn join(&self, group: Option<&LimitGroup>) {
        join(&self.shared, group);
    }

    /// The group that the disk [joined](Self::join).
    pub fn group(&self) -> Option<LimitGroup> {
        self.shared.group()
    }

    /// Sets the treatment of failed requests, from now on.
    pub fn set_error_policy(&self, policy: ErrorPolicy) {
        self.shared.set_errors(policy);
    }

    /// Retries at once all requests that wait because the disk failed them.
    pub fn resume(&self) {
        self.shared.resume();
    }

    /// The time at which the disk stopped answering, as its IoThreads have found it lately: an
    /// operation of the kernel for 5 seconds or more, or the remote end of a disk that is not
    /// local.
    pub fn stalled_since(&self) -> Option<Instant> {
        match self.state() {
            DiskState::Late(since) | DiskState::Away(since) => Some(since),
            // A lost disk may be late, too.
            DiskState::Lost => self.local()?.file.stalled_since(),
            DiskState::Ready | DiskState::Held(_) | DiskState::Retried(_) => None,
        }
    }

    /// The time at which the present state began, if known.
    pub fn state_since(&self) -> Option<Instant> {
        match self.state() {
            DiskState::Held(since) | DiskState::Retried(since) => Some(since),
            _ => self.stalled_since(),
        }
    }

    /// A line about the state that only this kind of disk has, such as its number of connections.
    pub fn remark(&self) -> Option<String> {
        self.driver()?.remark()
    }

    /// Ends the use of the disk, for all clones of it. Disks that were opened separately are not
    /// affected.
    ///
    /// Requests that wait for the remote end of a disk that is not local fail, and so do later
    /// ones, as soon as that end is away. While it answers, requests continue. Operations of the
    /// kernel cannot be cancelled: those of a file continue.
    pub fn abandon(&self) {
        self.shared.abandon();
        if let Some(source) = self.driver() {
            source.abandon();
        }
    }

    /// Returns true if the disk was [abandoned](Self::abandon).
    pub fn is_abandoned(&self) -> bool {
        self.shared.is_abandoned()
    }

    /// A text that is the same whenever this disk is opened, and differs for another disk: the id
    /// of the file system and the inode, or the id that a block device reports. May contain names
    /// of files. Empty for a null disk. Where the file system has no id of its own (XFS before
    /// Linux 6.9, NFS, FAT), it contains the number of its device, which may change.
    pub fn identity(&self) -> &str {
        match &self.kind {
            SourceKind::File(source) => &source.identity,
            SourceKind::Null => "",
            SourceKind::Driver(source) => source.identity(),
        }
    }

    /// The bytes of the bottom disk that make up this disk.
    #[doc(hidden)]
    pub fn place(&self) -> Placement {
        let disk = || self.identity().to_owned();
        let whole = || Placement { disk: disk(), start: 0, end: None, is_spread: false };
        self.driver().and_then(|source| source.place()).unwrap_or_else(whole)
    }

    /// Returns true if the kernel reports a rotating medium, on which requests cost the less the
    /// nearer they are.
    pub fn is_rotational(&self) -> bool {
        self.local().is_some_and(|source| source.is_rotational)
    }

    /// The unit in which discards give space back, in bytes. Smaller or misaligned parts keep their
    /// space. A multiple of the logical block. `None` if the kernel reports that the device never
    /// gives space back.
    pub fn discard_bytes(&self) -> Option<u32> {
        match &self.kind {
            SourceKind::File(source) => source.discard_bytes,
            SourceKind::Null => Some(self.info.logical_block_bytes),
            SourceKind::Driver(source) => source.discard_bytes(),
        }
    }

    /// The best length and alignment of reads and writes, in bytes: the disk stores this many
    /// together. A multiple of the physical block. `None` if unknown.
    pub fn optimal_bytes(&self) -> Option<u32> {
        self.driver()?.optimal_bytes()
    }

    /// Returns true if no other program writes to the disk: its file is in fact locked, or its
    /// block device claimed. A remote end may have other users.
    pub fn is_exclusive(&self) -> bool {
        match &self.kind {
            SourceKind::File(source) => source.is_exclusive(),
            SourceKind::Null => false,
            SourceKind::Driver(source) => source.is_exclusive(),
        }
    }

    /// The right to write to a disk that was opened with
    /// [`late_lock`](super::DiskOptions::late_lock). `None` for a disk that is only read, or keeps
    /// no data.
    #[must_use]
    pub fn late_lock(&self) -> Option<LateLock> {
        let is_possible = !self.info.read_only && self.changes_users();
        is_possible.then(|| LateLock::new(self.clone()))
    }

    /// Returns true if another process can use the disk between two uses here.
    pub(super) fn changes_users(&self) -> bool {
        match &self.kind {
            SourceKind::File(_) => true,
            SourceKind::Null => false,
            SourceKind::Driver(source) => source.changes_users(),
        }
    }

    /// Returns true if an engine makes operations on a file or a block device for the disk.
    pub fn has_engine(&self) -> bool {
        self.local().is_some()
    }

    /// Returns true if a thread that must not wait can [set the size](Self::set_size).
    pub fn sets_size_at_once(&self) -> bool {
        self.driver().is_none_or(|source| source.sets_size_at_once())
    }

    /// The preferred engine, and the reason.
    pub fn preference(&self) -> Option<(EngineKind, &str)> {
        self.engine.as_ref().map(|(engine, reason)| (*engine, &**reason))
    }

    /// The engine that is [preferred](Self::prefer_engine).
    pub fn preferred_engine(&self) -> Option<EngineKind> {
        self.preference().map(|(engine, _)| engine)
    }

    /// The engine of the disk on `io`. `None` for a disk [without a file](Self::has_engine).
    pub fn engine_on(&self, io: &Io) -> Option<EngineKind> {
        self.has_engine().then(|| io.engine_for(self.preferred_engine()))
    }

    pub(crate) fn open_file(&self) -> Option<&OpenFile> {
        self.local().map(|source| &*source.file)
    }

    /// Returns true if the disk is on a block device, not in a file of a file system.
    pub fn is_block_device(&self) -> bool {
        self.local().is_some_and(|source| source.is_block_device)
    }

    /// The numbers of the block device that the disk is on, or of the file system of its file, as
    /// `MAJOR:MINOR`. `None` without a file, or if the kernel does not report them.
    pub fn device_number(&self) -> Option<String> {
        let status = rustix::fs::fstat(self.open_file()?).ok()?;
        let device = if self.is_block_device() { status.st_rdev } else { status.st_dev };
        Some(format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device)))
    }

    /// The disk of a driver.
    pub(super) fn driver(&self) -> Option<&dyn DriverSource> {
        match &self.kind {
            SourceKind::Driver(source) => Some(&**source),
            SourceKind::File(_) | SourceKind::Null => None,
        }
    }

    /// The file or block device under all layers.
    pub(crate) fn local(&self) -> Option<&FileSource> {
        match &self.kind {
            SourceKind::File(source) => Some(source),
            SourceKind::Null => None,
            SourceKind::Driver(source) => source.below()?.local(),
        }
    }
}

impl DiskSource {
    /// The format of the image header that the disk has. `None` if there is none, it cannot be
    /// read, or the disk is not in a local file or device.
    pub fn foreign_format(&self) -> Option<&'static str> {
        match &self.kind {
            SourceKind::File(source) => format_of_file(source.file.as_ref()),
            SourceKind::Null => None,
            SourceKind::Driver(_) => {
                self.local()?;
                self.format_of_content()
            }
        }
    }

    fn format_of_content(&self) -> Option<&'static str> {
        let thread = IoThread::new(&IoThreadConfig::default()).ok()?;
        let disk = self.for_probe().ok()?.attach(thread.io());
        let size = self.info().size_bytes;
        let block = (BYTES as u64).max(self.info().logical_block_bytes.into()).min(size);
        let read = |offset| {
            let read = thread.block_on(disk.read_part(offset, block)).ok()?;
            Some(read.ok()?.to_vec())
        };
        format_of(&read(0)?, &read(size - block).unwrap_or_default())
    }

    /// The reason why the disk is refused as a qcow2 image. It may have an image of another format.
    pub fn not_qcow2(&self) -> String {
        foreign::not_qcow2(self.foreign_format())
    }

    /// The warning about the file or device at `path`, which is not opened as a disk. `None` if it
    /// has no header of an image, or cannot be read.
    pub fn format_warning(path: &Path) -> Option<String> {
        foreign::format_warning(path)
    }

    /// Marks the disk as used without a format. If it has the [header](Self::foreign_format) of an
    /// image, [`warning`](Self::warning) reports that from then on.
    pub fn detect_format(&self) {
        if let Some(format) = self.foreign_format() {
            self.shared.set_foreign_format(format);
        }
    }

    /// A warning about the content of the disk, for its owner. The disk can be served in spite of
    /// it.
    pub fn warning(&self) -> Option<String> {
        let of_kind = self.driver().and_then(|source| source.warning());
        of_kind.or_else(|| self.shared.foreign_format().map(warning))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::super::{DiskOptions, DiskSource};

    /// Front of a VHD image.
    const VHD: &[u8] = b"conectix";

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_header_is_found_in_files_of_all_lengths_and_in_layers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for bytes in [8192, 8704, 196_624 / 512 * 512] {
            file.as_file().set_len(0).unwrap();
            file.as_file().set_len(bytes).unwrap();
            for direct in [false, true] {
                let options = DiskOptions { direct, ..DiskOptions::default() };
                let source = match DiskSource::file(file.path(), &options) {
                    Err(error) if direct => {
                        eprintln!("skipped: direct I/O: {error}");
                        continue;
                    }
                    opened => opened.unwrap(),
                };
                source.detect_format();
                assert_eq!(source.warning(), None);
                file.as_file().write_all_at(VHD, bytes - 512).unwrap();
                assert_eq!(source.foreign_format(), Some("VHD"), "{bytes} {direct}");
                let part = DiskSource::raw(source.clone(), bytes - 512, None).unwrap();
                assert_eq!(part.foreign_format(), Some("VHD"), "{bytes} {direct}");
                source.detect_format();
                assert!(source.clone().warning().unwrap().contains("header of a VHD image"));
                file.as_file().write_all_at(&[0; 8], bytes - 512).unwrap();
            }
            let all = DiskSource::format_warning(file.path());
            assert_eq!(all, None);
            file.as_file().write_all_at(b"QFI\xfb\0\0\0\x03", 0).unwrap();
            let warning = DiskSource::format_warning(file.path()).unwrap();
            assert!(warning.contains("a qcow2 image") && warning.contains("qcow2:PATH"));
        }
    }
}
