//! The ring itself: set-up, restrictions, and the one system call.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::Instant;

use io_uring::register::Restriction;
use io_uring::{Builder, IoUring, Probe, Submitter, cqueue, opcode, squeue, types};
use iomem::fits;
use rustix::fd::AsFd;
use rustix::process::{Resource, getrlimit};

use super::super::abi::{
    BUFFERS_MAX, ENTRIES_MAX, ENTRIES_MIN, FILES_MAX, Setup, WaitFor, enter_flags, entries_for,
};
use crate::stats::Stats;

/// A flag of `io_uring_enter` (linux/io_uring.h).
const ENTER_EXT_ARG: u32 = 1 << 3;

/// `IORING_UNREGISTER_FILES`, `IORING_REGISTER_FILES_UPDATE` and `IORING_REGISTER_BUFFERS_UPDATE`.
const UNREGISTER_FILES: u8 = 3;
const REGISTER_FILES_UPDATE: u8 = 6;
const REGISTER_BUFFERS_UPDATE: u8 = 16;

/// Completion entries beyond one for each op, for events of eventfds.
const EVENTS_MAX: u32 = 1024;
/// Milliseconds that the submission thread spins before it sleeps.
const SQPOLL_IDLE_MS: u32 = 2;

/// The opcodes of reads and writes: a polled ring can do nothing else.
const TRANSFERS: &[u8] = &[
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::ReadFixed::CODE,
    opcode::WriteFixed::CODE,
];

/// The opcodes of all further operations: no ring can do anything beyond these two lists.
const OTHERS: &[u8] = &[
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::UringCmd16::CODE,
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
];

pub(in crate::engine) struct Ring {
    ring: IoUring,
    sqpoll: bool,
    has_uring_cmd: bool,
}

impl Ring {
    pub(in crate::engine) fn new(setup: &Setup<'_>) -> io::Result<Self> {
        let ring = build(setup)?;
        let params = ring.params();
        // Resource tags came with Linux 5.13, as multishot polls did.
        if !params.is_feature_ext_arg()
            || !params.is_feature_nodrop()
            || !params.is_feature_resource_tagging()
        {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel is too old"));
        }
        let submitter = ring.submitter();
        submitter.register_files_sparse(files_max())?;
        submitter.register_buffers_sparse(BUFFERS_MAX)?;
        let mut probe = Probe::new();
        submitter.register_probe(&mut probe)?;
        let has_uring_cmd = probe.is_supported(opcode::UringCmd16::CODE);
        // An op that has to wait holds one of the kernel's workers. The usual limit, four times the
        // CPUs, would let a hung disk take them all. With one worker for each op, no op waits for
        // another. Before Linux 5.15 the limit cannot be set.
        let _ = submitter.register_iowq_max_workers(&mut [setup.depth.max(ENTRIES_MIN), 0]);
        restrict(&submitter, &probe, setup)?;
        submitter.register_enable_rings()?;
        Ok(Self { ring, sqpoll: setup.sqpoll, has_uring_cmd })
    }

    pub(in crate::engine) fn has_uring_cmd(&self) -> bool {
        self.has_uring_cmd
    }

    /// Registers `file` at `index` of the table of files; -1 clears the place.
    pub(in crate::engine) fn update_file(&self, index: u32, file: RawFd) -> io::Result<()> {
        self.ring.submitter().register_files_update(index, &[file]).map(|_| ())
    }

    /// Registers memory at `index` of the table of buffers; a range without bytes clears the place.
    ///
    /// # Safety
    ///
    /// The memory must be mapped now and as long as ops may name it.
    pub(in crate::engine) unsafe fn update_buffer(
        &self,
        index: u32,
        range: libc::iovec,
    ) -> io::Result<()> {
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { self.ring.submitter().register_buffers_update(index, &[range], None) }.map(|_| ())
    }

    /// Free submission entries.
    pub(in crate::engine) fn room(&mut self) -> usize {
        let queue = self.ring.submission();
        queue.capacity() - queue.len()
    }

    /// Submission entries that the kernel has not taken.
    pub(in crate::engine) fn unsubmitted(&mut self) -> usize {
        self.ring.submission().len()
    }

    /// Adds an entry. The caller has made sure that there is room.
    ///
    /// # Safety
    ///
    /// Memory that the entry points to must stay until the completion with its user data.
    pub(in crate::engine) unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the caller's promise is the one that `push` asks for.
        if unsafe { self.ring.submission().push(entry) }.is_err() {
            unreachable!("the submission ring is full");
        }
    }

    /// Returns true if there are entries that the kernel does not know about.
    pub(in crate::engine) fn has_unseen_entries(&mut self) -> bool {
        self.unsubmitted() > 0 && (!self.sqpoll || self.ring.submission().need_wakeup())
    }

    /// Makes room for one entry. Returns false if the kernel takes none for now.
    pub(in crate::engine) fn make_room(&mut self, stats: Option<&Stats>) -> bool {
        while self.room() == 0 {
            let to_submit = self.entries_to_submit();
            let entered = self.enter_with(to_submit, WaitFor::Room, None, stats);
            // A signal ends the wait for a submission thread without room.
            if entered.is_err() || !self.sqpoll {
                break;
            }
        }
        self.room() > 0
    }

    /// Submits all entries, and lets the kernel post finished ops.
    pub(in crate::engine) fn submit(&mut self, stats: &Stats) -> io::Result<()> {
        let to_submit = self.entries_to_submit();
        self.enter_with(to_submit, WaitFor::Nothing, None, Some(stats))
    }

    /// Like `submit`, then waits for a completion until `deadline` (`None`: forever).
    pub(in crate::engine) fn submit_and_wait(
        &mut self,
        deadline: Option<Instant>,
        stats: &Stats,
    ) -> io::Result<()> {
        let to_submit = self.entries_to_submit();
        self.wait(to_submit, deadline, stats)
    }

    /// Waits for a completion without a submit, which the kernel has just refused.
    pub(in crate::engine) fn wait_without_submit(&mut self, until: Instant, stats: &Stats) {
        let _ = self.wait(0, Some(until), stats);
    }

    fn wait(&mut self, submit: u32, deadline: Option<Instant>, stats: &Stats) -> io::Result<()> {
        let Some(deadline) = deadline else {
            return self.enter_with(submit, WaitFor::Completion, None, Some(stats));
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return self.enter_with(submit, WaitFor::Nothing, None, Some(stats));
        }
        let timeout = types::Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
        self.enter_with(submit, WaitFor::Completion, Some(&timeout), Some(stats))
    }

    fn entries_to_submit(&mut self) -> u32 {
        fits(self.unsubmitted(), "a count of entries")
    }

    /// The one system call: takes submissions in, runs deferred work, waits.
    fn enter_with(
        &mut self,
        to_submit: u32,
        waits: WaitFor,
        timeout: Option<&types::Timespec>,
        stats: Option<&Stats>,
    ) -> io::Result<()> {
        let asleep = self.sqpoll.then(|| self.ring.submission().need_wakeup());
        let Some(flags) = enter_flags(asleep, waits) else { return Ok(()) };
        let min_complete = u32::from(waits == WaitFor::Completion);
        if let Some(stats) = stats {
            stats.syscalls.io_uring_enter.add(1);
        }
        let submitter = self.ring.submitter();
        let result = match timeout {
            Some(timeout) => {
                let args = types::SubmitArgs::new().timespec(timeout);
                // SAFETY: the arguments, and the time that they point to, live across the call.
                // Callers of `push` vouch for the memory that entries point to.
                unsafe {
                    submitter.enter(to_submit, min_complete, flags | ENTER_EXT_ARG, Some(&args))
                }
            }
            // SAFETY: there are no arguments; callers of `push` vouch for the entries.
            None => unsafe {
                submitter.enter::<libc::sigset_t>(to_submit, min_complete, flags, None)
            },
        };
        result.map(|_| ())
    }

    /// Returns true if there are completions, or work that the kernel defers until it is entered.
    pub(in crate::engine) fn has_completions(&self) -> bool {
        // SAFETY: this thread alone uses the ring, and neither view outlives this function.
        unsafe {
            let queue = self.ring.submission_shared();
            !self.ring.completion_shared().is_empty() || queue.taskrun() || queue.cq_overflow()
        }
    }

    /// Returns true if there are completions that can be taken without a system call.
    pub(in crate::engine) fn has_entries(&self) -> bool {
        // SAFETY: as in `has_completions`.
        unsafe { !self.ring.completion_shared().is_empty() }
    }

    /// Returns true if there are completions, deferred work or entries that were not submitted.
    pub(in crate::engine) fn has_work(&self) -> bool {
        // SAFETY: as in `has_completions`.
        self.has_completions() || unsafe { !self.ring.submission_shared().is_empty() }
    }

    /// Makes the kernel post deferred completions, if no completion is visible.
    pub(in crate::engine) fn post_deferred(&mut self, stats: &Stats) {
        if !self.ring.completion().is_empty() {
            return;
        }
        let queue = self.ring.submission();
        if queue.taskrun() || queue.cq_overflow() {
            drop(queue);
            let _ = self.enter_with(0, WaitFor::Nothing, None, Some(stats));
        }
    }

    /// Takes all completion entries that are visible.
    pub(in crate::engine) fn take(&mut self, entries: &mut Vec<cqueue::Entry>) {
        entries.extend(self.ring.completion());
    }
}

impl Drop for Ring {
    /// Unregisters the files. The kernel takes a ring apart later, up to seconds after the program
    /// has ended. Files would stay open as long, and a block device claimed, so that the next
    /// program could not have it.
    fn drop(&mut self) {
        if let Err(error) = self.ring.submitter().unregister_files() {
            tracing::debug!("cannot unregister files from io_uring: {error}");
        }
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open for as long as the ring, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

/// The size of the table of files: the kernel takes no more than a process may have open.
fn files_max() -> u32 {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    FILES_MAX.min(u32::try_from(limit).unwrap_or(u32::MAX))
}

/// Builds a disabled ring with the best set-up that the kernel has.
fn build(setup: &Setup<'_>) -> io::Result<IoUring> {
    let with = |more: &dyn Fn(&mut Builder)| {
        let mut builder = IoUring::builder();
        builder
            .setup_r_disabled()
            .setup_clamp()
            .setup_cqsize((setup.depth * 2).next_power_of_two().max(ENTRIES_MAX) + EVENTS_MAX);
        if let Some(main) = setup.polled_beside {
            builder.setup_iopoll();
            if setup.sqpoll {
                builder.setup_attach_wq(main.as_raw_fd());
            }
        }
        more(&mut builder);
        builder.build(entries_for(setup.depth))
    };
    if setup.sqpoll {
        return with(&|builder| {
            builder.setup_sqpoll(SQPOLL_IDLE_MS);
        });
    }
    if setup.embedded {
        // A poll of the descriptor does not see deferred work.
        return with(&|_| {});
    }
    let deferred = with(&|builder| {
        builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_submit_all();
    });
    match deferred {
        // Linux before 6.1.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => with(&|_| {}),
        other => other,
    }
}

/// Restricts the ring to the operations of this engine.
fn restrict(submitter: &Submitter<'_>, probe: &Probe, setup: &Setup<'_>) -> io::Result<()> {
    let others = if setup.polled_beside.is_none() { OTHERS } else { &[] };
    let known = TRANSFERS.iter().chain(others).filter(|&&code| probe.is_supported(code));
    let mut restrictions: Vec<Restriction> = known.map(|&code| Restriction::sqe_op(code)).collect();
    restrictions.extend([
        Restriction::register_op(UNREGISTER_FILES),
        Restriction::register_op(REGISTER_FILES_UPDATE),
        Restriction::register_op(REGISTER_BUFFERS_UPDATE),
        Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()),
    ]);
    submitter.register_restrictions(&mut restrictions)
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// The kernel keeps a ring from all operations that no engine makes, so that code in the place
    /// of the daemon opens and connects nothing through the rings that it has.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_ring_makes_only_the_operations_of_its_engine() {
        let setup = Setup { depth: 4, sqpoll: false, embedded: false, polled_beside: None };
        let fsync = || opcode::Fsync::new(types::Fd(-1)).build();
        let (path, cwd) = (c"/dev/null", types::Fd(libc::AT_FDCWD));
        let address = [0_u8; 16];
        for (name, entry, is_permitted) in [
            ("nop", opcode::Nop::new().build(), false),
            ("openat", opcode::OpenAt::new(cwd, path.as_ptr()).build(), false),
            ("socket", opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build(), false),
            ("connect", opcode::Connect::new(cwd, address.as_ptr().cast(), 16).build(), false),
            ("unlinkat", opcode::UnlinkAt::new(cwd, path.as_ptr()).build(), false),
            ("close", opcode::Close::new(types::Fd(-1)).build(), false),
            // The engine has this operation without the flag, and this descriptor is none.
            ("flag", fsync().flags(squeue::Flags::ASYNC), false),
            ("fsync", fsync(), true),
        ] {
            let mut ring = Ring::new(&setup).unwrap();
            // SAFETY: the memory of the entries lives until the completion.
            unsafe { ring.push(&entry) };
            ring.submit_and_wait(None, &Stats::default()).unwrap();
            let mut entries = Vec::new();
            ring.take(&mut entries);
            let expected = if is_permitted { -libc::EBADF } else { -libc::EACCES };
            assert_eq!(entries[0].result(), expected, "{name}");
        }
        let ring = Ring::new(&setup).unwrap();
        let refused = ring.ring.submitter().register_personality().unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn entries_are_untold_until_they_are_submitted() {
        let setup = Setup { depth: 4, sqpoll: false, embedded: false, polled_beside: None };
        let mut ring = Ring::new(&setup).unwrap();
        assert!(!ring.has_unseen_entries());
        let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let events = u32::from(libc::POLLIN.unsigned_abs());
        let entry = opcode::PollAdd::new(types::Fd(kick.as_raw_fd()), events).build();
        // SAFETY: a poll points to no memory.
        unsafe { ring.push(&entry.user_data(1)) };
        assert!(ring.has_unseen_entries() && ring.has_work());
        ring.submit(&Stats::default()).unwrap();
        assert!(!ring.has_unseen_entries() && !ring.has_work());
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        assert!(ring.has_work(), "the kernel does not know the poll");
    }
}
