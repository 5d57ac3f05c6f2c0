//! Opens a regular file or a block device, and finds its properties.

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fd::AsFd;
use rustix::fs::{OFlags, SeekFrom, fcntl_getfl, fcntl_setfl};

use super::alignment::Alignment;
use super::attributes;
use super::lock::{Conflict, OpenError, is_still_locked, retry_open};
use super::opening::{check_mode, check_type, lock_as, open_alone, open_error};
use super::partial_blocks::Blocks;
use super::size_probe::{FileEnd, SizeProbe};
use crate::disk::foreign;
use crate::disk::info::{Abilities, DiskInfo, DiskOptions, DiskState, Link};
use crate::error::Error;
use crate::file::claim::Claim;
use crate::op::OpenFile;

/// An open file.
#[derive(Debug, Clone)]
pub(crate) struct FileSource {
    pub(crate) file: Arc<OpenFile>,
    pub(crate) is_block_device: bool,
    pub(crate) is_rotational: bool,
    /// See [`DiskSource::discard_bytes`](crate::disk::DiskSource::discard_bytes).
    pub(crate) discard_bytes: Option<u32>,
    pub(crate) align: Alignment,
    /// See [`DiskSource::identity`](crate::disk::DiskSource::identity).
    pub(crate) identity: Arc<str>,
    /// See [`DiskSource::size_probe`](crate::disk::DiskSource::size_probe).
    pub(crate) size_probe: Option<Arc<SizeProbe>>,
    pub(crate) end: Arc<FileEnd>,
    /// Present if requests may be smaller than the unit of direct I/O.
    pub(crate) blocks: Option<Arc<Blocks>>,
    /// See [`DiskSource::is_exclusive`](crate::disk::DiskSource::is_exclusive).
    pub(crate) is_exclusive: Arc<AtomicBool>,
}

impl FileSource {
    pub(crate) fn open(name: &Path, options: &DiskOptions) -> Result<(Self, DiskInfo), Error> {
        let shown = options.within.as_ref().map(|folder| folder.join(name));
        let path = shown.as_deref().unwrap_or(name);
        let unusable = |reason: String| Error::Unusable { path: path.to_owned(), reason };
        if let Some(file) = options.files.as_ref().and_then(|files| files.get(path)) {
            let file = file.map_err(open_error(path, options))?;
            return Self::passed(file, path, options);
        }
        // Checked before it is opened, since opening has effects on some devices.
        let found = match &options.within {
            None => std::fs::metadata(name),
            Some(folder) => folder.find(name).and_then(|place| place.metadata()),
        };
        let found = found.map_err(open_error(path, options))?.file_type();
        check_type(found, options).map_err(unusable)?;
        let is_block_device = found.is_block_device();
        let (file, is_locked) = retry_open(path, options.at_once, || {
            open_alone((name, path), options, is_block_device)
        })?;
        if is_block_device {
            check_device(&file, options).map_err(unusable)?;
        }
        Self::from_open((file, is_locked, None), path, options, is_block_device)
    }

    /// A file that another program has opened. The caller has checked that it is the file at
    /// `path`. A block device that is written to must be claimed already.
    fn passed(file: File, path: &Path, options: &DiskOptions) -> Result<(Self, DiskInfo), Error> {
        let failed = open_error(path, options);
        let unusable = |reason: String| Error::Unusable { path: path.to_owned(), reason };
        let found = file.metadata().map_err(&failed)?.file_type();
        check_type(found, options).map_err(unusable)?;
        let flags = fcntl_getfl(&file).map_err(|errno| failed(errno.into()))?;
        check_mode(flags, options).map_err(unusable)?;
        let direct = if options.direct { OFlags::DIRECT } else { OFlags::empty() };
        let wanted = (flags - OFlags::NONBLOCK - OFlags::DIRECT) | direct;
        fcntl_setfl(&file, wanted).map_err(|errno| failed(errno.into()))?;
        let is_block_device = found.is_block_device();
        let (is_locked, claim) = retry_open(path, options.at_once, || {
            // First: after a conflict, the locks of the open file end, which another disk may use.
            let claim = claim(&file, path, options)?;
            let is_locked = lock_as(&file, path, options).map_err(OpenError::Conflict)?;
            Ok((is_locked, claim))
        })?;
        if is_block_device {
            check_device(&file, options).map_err(unusable)?;
        }
        Self::from_open((file, is_locked, claim), path, options, is_block_device)
    }

    /// A file that another process has opened and locked with these options.
    pub(crate) fn handed_over(
        file: File,
        path: &Path,
        options: &DiskOptions,
    ) -> Result<(Self, DiskInfo), Error> {
        let unusable = |reason: String| Error::Unusable { path: path.to_owned(), reason };
        let no_status = |error| unusable(format!("its descriptor cannot be examined: {error}"));
        let flags = fcntl_getfl(&file).map_err(|errno| no_status(errno.into()))?;
        let is_direct = flags.contains(OFlags::DIRECT);
        let is_writable = flags & OFlags::RWMODE == OFlags::RDWR;
        if is_direct != options.direct || !(is_writable || options.read_only) {
            return Err(unusable(format!(
                "its descriptor was handed over with open flags {:#x}, which contradict its \
                 options",
                flags.bits()
            )));
        }
        let is_block_device = file.metadata().map_err(no_status)?.file_type().is_block_device();
        let is_locked = !options.no_lock && !options.read_only && is_still_locked(&file);
        // The other process has seen to it that its disks are not in each other's way.
        let claim = match options.no_lock {
            true => None,
            false => Some(Claim::inherit(&file, !options.read_only).map_err(no_status)?),
        };
        let opened = (file, is_locked, claim);
        let (source, info) = Self::from_open(opened, path, options, is_block_device)?;
        source.file.loss().note_foreign_writes();
        Ok((source, info))
    }

    fn from_open(
        (file, is_locked, claim): (File, bool, Option<Claim>),
        path: &Path,
        options: &DiskOptions,
        is_block_device: bool,
    ) -> Result<(Self, DiskInfo), Error> {
        let unusable = |reason: String| Error::Unusable { path: path.to_owned(), reason };
        let mut size_bytes = size_of(&file).map_err(unusable)?;
        let align = Alignment::probe(&file, options.direct, is_block_device).ok_or_else(|| {
            unusable("its file system does not support direct I/O; use the page cache".into())
        })?;
        // The blocks of a device are fixed. The blocks of a file must not change with the file
        // system on which it lies today, or its partitions are not found.
        let default = if is_block_device { align.request.max(512) } else { 512 };
        let wanted = options.logical_block_bytes.unwrap_or(default);
        let logical_block_bytes = DiskOptions::check_logical_block(wanted)?;
        if options.holds_image && !is_block_device {
            size_bytes = size_bytes.next_multiple_of(align.request.max(logical_block_bytes).into());
        }
        let has_parts = logical_block_bytes < align.request && !options.read_only;
        check_size(size_bytes, logical_block_bytes, has_parts.then_some(align.request))
            .map_err(|reason| unusable(foreign::wrong_size(&file, size_bytes).unwrap_or(reason)))?;
        let physical =
            if is_block_device { rustix::fs::ioctl_blkpbszget(&file).ok() } else { None };
        let info = DiskInfo {
            size_bytes,
            logical_block_bytes,
            physical_block_bytes: physical.unwrap_or(0).max(logical_block_bytes).max(align.request),
            read_only: options.read_only,
            direct: options.direct,
        };
        let identity = if is_block_device {
            attributes::device_identity(&file, path)
        } else {
            attributes::file_identity(&file)
        };
        let end = Arc::new(FileEnd::unseen(logical_block_bytes.max(align.request)));
        let probe = |data| Arc::new(SizeProbe::new(path, &data, is_block_device, &end));
        let size_probe = file.metadata().ok().map(probe);
        let is_rotational = attributes::is_rotational(&file);
        let discard_bytes = discard_bytes(&file, is_block_device, logical_block_bytes);
        let mut file = OpenFile::new(file, path, options.direct);
        file.keep(claim);
        let file = Arc::new(file);
        let blocks = has_parts.then(|| Arc::new(Blocks::new(align.request)));
        let identity = identity.into();
        // Opening a block device for writing has claimed it.
        let is_exclusive = !options.read_only && !options.no_lock && (is_locked || is_block_device);
        let source = Self {
            file,
            is_block_device,
            is_rotational,
            discard_bytes,
            align,
            identity,
            size_probe,
            end,
            blocks,
            is_exclusive: Arc::new(is_exclusive.into()),
        };
        Ok((source, info))
    }

    /// See [`DiskSource::is_exclusive`](crate::disk::DiskSource::is_exclusive).
    pub(crate) fn is_exclusive(&self) -> bool {
        self.is_exclusive.load(Ordering::Relaxed)
    }

    /// Notes that a lock was taken or released after the file was opened.
    pub(crate) fn set_exclusive(&self, is_exclusive: bool) {
        self.is_exclusive.store(is_exclusive, Ordering::Relaxed);
    }

    /// The present size, if the disk that was opened with `info` can have it.
    pub(crate) fn size_bytes(&self, info: &DiskInfo) -> Result<u64, Error> {
        let size_bytes = size_of(self.file.as_ref()).map_err(|reason| self.unusable(reason))?;
        self.check_size(size_bytes, info)?;
        self.end.invalidate();
        Ok(size_bytes)
    }

    /// The present size of the file or device, even if a disk cannot have it.
    pub(crate) fn any_size_bytes(&self) -> Result<u64, Error> {
        let end = rustix::fs::seek(self.file.as_ref(), SeekFrom::End(0));
        end.map_err(|errno| self.unusable(format!("its size cannot be determined: {errno}")))
    }

    /// Checks that the disk that was opened with `info` can be given this size.
    pub(crate) fn check_new_size(&self, size_bytes: u64, info: &DiskInfo) -> Result<(), Error> {
        let reason = if self.is_block_device {
            "a block device is resized with its own tool (lvextend, losetup --set-capacity); \
             resize it there, then repeat this command without a size"
        } else if info.read_only {
            "it is open read-only; resize it with another program, then repeat this command \
             without a size"
        } else if size_bytes == 0 {
            "a disk cannot have a size of zero; choose another size"
        } else {
            // If only whole blocks of the file can be written, they are larger than logical blocks.
            let block =
                self.blocks.as_ref().map_or(info.logical_block_bytes, |_| self.align.request);
            if size_bytes.is_multiple_of(block.into()) {
                return Ok(());
            }
            let text = format!(
                "{size_bytes} bytes are not a multiple of the logical block of {block}; choose \
                 another size"
            );
            return Err(self.unusable(text));
        };
        Err(self.unusable(reason.into()))
    }

    /// Gives the file this length.
    pub(crate) fn truncate(&self, size_bytes: u64) -> Result<(), Error> {
        rustix::fs::ftruncate(self.file.as_ref(), size_bytes).map_err(|errno| Error::Length {
            path: self.file.path().to_owned(),
            size_bytes,
            error: errno.into(),
        })?;
        self.end.invalidate();
        Ok(())
    }

    fn check_size(&self, size_bytes: u64, info: &DiskInfo) -> Result<(), Error> {
        let blocks = self.blocks.as_ref().map(|_| self.align.request);
        let checked = check_size(size_bytes, info.logical_block_bytes, blocks);
        checked.map_err(|reason| self.unusable(reason))
    }

    pub(crate) fn state(&self) -> DiskState {
        match self.file.stalled_since() {
            _ if self.file.loss().check().is_err() => DiskState::Lost,
            Some(since) => DiskState::Late(since),
            None => DiskState::Ready,
        }
    }

    pub(crate) fn abilities(&self) -> Abilities {
        Abilities {
            flush: true,
            discard: self.discard_bytes.is_some(),
            zeroes: true,
            resize: !self.is_block_device,
            lock: true,
            snapshots: false,
        }
    }

    pub(crate) fn link(&self) -> Link {
        let kind = if self.is_block_device { "block device" } else { "file" };
        Link { kind, place: self.file.path().display().to_string() }
    }

    fn unusable(&self, reason: String) -> Error {
        Error::Unusable { path: self.file.path().to_owned(), reason }
    }

    /// A character device, which `open` would refuse: some of them fail in useful ways.
    #[cfg(test)]
    pub(crate) fn from_device(path: &str) -> Self {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file =
            Arc::new(rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap().into());
        let (align, identity) = (Alignment::ANY, "".into());
        Self {
            file,
            is_block_device: false,
            is_rotational: false,
            discard_bytes: None,
            align,
            identity,
            size_probe: None,
            end: Arc::new(FileEnd::unseen(512)),
            blocks: None,
            is_exclusive: Arc::default(),
        }
    }

    /// Forgets all knowledge about polling: only the kernel's answers to ops count.
    #[cfg(test)]
    pub(crate) fn forget_polling(&mut self) {
        Arc::get_mut(&mut self.file).unwrap().forget_polling();
    }

    #[cfg(test)]
    pub(crate) fn may_be_polled(&self) -> bool {
        self.file.may_be_polled()
    }
}

/// Claims a passed file, unless the options allow other users.
fn claim(file: &File, path: &Path, options: &DiskOptions) -> Result<Option<Claim>, OpenError> {
    if options.no_lock {
        return Ok(None);
    }
    let claim = Claim::new(file, !options.read_only);
    let claim = claim.map_err(|error| OpenError::Failed(open_error(path, options)(error)))?;
    claim.map(Some).ok_or(OpenError::Conflict(Conflict::Locked))
}

/// The length of a file, or the size of a device, in bytes. Moves the position, which is not used.
fn size_of(file: impl AsFd) -> Result<u64, String> {
    let size_bytes = rustix::fs::seek(file, SeekFrom::End(0))
        .map_err(|errno| format!("its size cannot be determined: {errno}"))?;
    if size_bytes == 0 {
        return Err("its size is zero; set one, for example with `truncate -s 10G`".into());
    }
    Ok(size_bytes)
}

/// The unit in which a disk gives back space, if it does: that of the device, or the block of the
/// file system. The logical block if these report no unit that requests could keep to.
fn discard_bytes(file: &File, is_block_device: bool, logical_block_bytes: u32) -> Option<u32> {
    let unit = if is_block_device {
        attributes::discard_bytes(file)?
    } else {
        let block = rustix::fs::fstatvfs(file).map_or(0, |stat| stat.f_frsize);
        u32::try_from(block).unwrap_or(0)
    };
    Some(if unit.is_power_of_two() { unit.max(logical_block_bytes) } else { logical_block_bytes })
}

/// Checks the size of a disk. With `request_bytes`, parts of such blocks may be written.
fn check_size(size_bytes: u64, logical: u32, request_bytes: Option<u32>) -> Result<(), String> {
    if let Some(request_bytes) = request_bytes
        && !size_bytes.is_multiple_of(request_bytes.into())
    {
        // A part of the last block would be written as a whole, and the file would grow.
        return Err(format!(
            "it supports direct I/O only in units of {request_bytes} bytes, and its size of \
             {size_bytes} bytes is not a multiple of them; extend it, or use the page cache"
        ));
    }
    if !size_bytes.is_multiple_of(logical.into()) {
        // No overflow: no file is longer than 2^63 bytes.
        let rounded = size_bytes.next_multiple_of(logical.into());
        return Err(format!(
            "its size of {size_bytes} bytes is not a multiple of the logical block of {logical}; \
             extend it with `truncate -s {rounded}`"
        ));
    }
    Ok(())
}

/// Refuses devices that could be opened, but would fail requests.
fn check_device(file: &File, options: &DiskOptions) -> Result<(), String> {
    let attribute = |name: &str| attributes::device_attribute(file, name).unwrap_or_default();
    // Linux lets a read-only device be opened for writing, and fails each write.
    if !options.read_only && !["", "0"].contains(&attribute("ro").as_str()) {
        return Err("it is a read-only device; open it read-only".into());
    }
    check_zones(&attribute("queue/zoned"))
}

/// Refuses a device with zones that take sequential writes only; `zoned` is its attribute of this
/// name.
fn check_zones(zoned: &str) -> Result<(), String> {
    match zoned {
        "host-managed" => Err("it is a zoned device, which takes sequential writes only; add a \
                               layer that accepts random writes (dm-zoned), or serve a file on a \
                               file system for zoned devices"
            .into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::FileTable;
    use crate::op::OpKind;
    use std::time::Instant;

    #[test]
    fn devices_that_take_sequential_writes_only_are_refused() {
        assert!(check_zones("host-managed").unwrap_err().contains("sequential"));
        for zoned in ["none", "host-aware", ""] {
            assert!(check_zones(zoned).is_ok(), "{zoned}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn only_a_file_can_be_resized() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let (mut source, _) = FileSource::open(file.path(), &DiskOptions::default()).unwrap();
        for is_block_device in [false, true] {
            source.is_block_device = is_block_device;
            assert_eq!(source.abilities().resize, !is_block_device);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_passed_file_is_used_only_if_its_mode_and_type_fit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 4096]).unwrap();
        let open = |file: File, read_only: bool| {
            let files = Some(Arc::new(FileTable::new(vec![(path.clone(), file)], true)));
            FileSource::open(&path, &DiskOptions { read_only, files, ..DiskOptions::default() })
        };
        let reading = || File::open(&path).unwrap();
        let writing = File::options().read(true).write(true).open(&path).unwrap();
        assert!(open(reading(), true).is_ok() && open(writing, false).is_ok());
        let appending = File::options().read(true).append(true).open(&path).unwrap();
        for file in [reading(), appending, File::open(folder.path()).unwrap()] {
            let error = open(file, false).unwrap_err();
            assert!(matches!(error, Error::Unusable { .. }), "{error}");
        }
    }

    /// Its lock is not in the way of itself.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn one_open_file_that_is_passed_twice_serves_one_writable_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 4096]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let open = |read_only: bool, no_lock: bool| {
            let passed = vec![(path.clone(), file.try_clone().unwrap())];
            let files = Some(Arc::new(FileTable::new(passed, true)));
            FileSource::open(
                &path,
                &DiskOptions { read_only, no_lock, files, ..Default::default() },
            )
        };
        for (first, second) in [(false, false), (false, true), (true, false)] {
            let _held = open(first, false).unwrap();
            let error = open(second, false).unwrap_err();
            assert!(matches!(error, Error::InUse { is_user_known: true, .. }), "{error}");
            assert!(open(second, true).is_ok(), "the user allows it");
        }
        let _two = [open(true, false).unwrap(), open(true, false).unwrap()];
        drop(_two);
        // The process that takes over knows of it, too.
        let options = DiskOptions::default();
        let handed = FileSource::handed_over(file.try_clone().unwrap(), &path, &options);
        assert!(open(false, false).is_err() && handed.is_ok());
    }

    /// Layers rely on it: nothing else writes to a disk that has a lock.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_that_was_handed_over_is_exclusive_only_with_its_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        for (read_only, no_lock) in [(false, false), (false, true), (true, false), (true, true)] {
            let options = DiskOptions { read_only, no_lock, ..DiskOptions::default() };
            let (opened, _) = FileSource::open(file.path(), &options).unwrap();
            let same = opened.file.as_fd().try_clone_to_owned().unwrap();
            let handed = FileSource::handed_over(same.into(), file.path(), &options).unwrap().0;
            let is_exclusive = !read_only && !no_lock;
            let seen = [&opened, &handed].map(FileSource::is_exclusive);
            assert_eq!(seen, [is_exclusive; 2], "{read_only} {no_lock}");
        }
    }

    /// The earlier process may have left writes without a flush.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_failed_fua_write_is_a_loss_in_a_file_that_was_handed_over() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let (path, options) = (file.path(), DiskOptions::default());
        let (opened, _) = FileSource::open(path, &options).unwrap();
        let same = opened.file.as_fd().try_clone_to_owned().unwrap();
        let (handed, _) = FileSource::handed_over(same.into(), path, &options).unwrap();
        for (source, is_lost) in [(&opened, false), (&handed, true)] {
            let (loss, kind) = (source.file.loss(), OpKind::Write { fua: true });
            let tracked = loss.begin(kind);
            assert_eq!(loss.end_op(tracked, kind, libc::EIO, Instant::now()), is_lost);
            assert_eq!(source.state() == DiskState::Lost, is_lost);
        }
    }
}
